"""Threads of the loader and of training never exceed the cores, by default."""

from __future__ import annotations

import os
import threading

import batches
import pytest
import torch

from pyg_distcomm.loader import DistNeighborLoader
from pyg_distcomm.loader.batcher import Batcher
from pyg_distcomm.loader.epoch import Phases


@pytest.fixture
def machine(monkeypatch):
    """Sets the cores of this process, torch's threads, and the ranks of its host."""
    before = torch.get_num_threads()

    def set_up(cores, used, ranks=None):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
        torch.set_num_threads(used)
        if ranks is not None:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))

    yield set_up
    torch.set_num_threads(before)


def loader_of(**options):
    data, seeds = batches.graph(), torch.arange(24)
    return DistNeighborLoader(
        data, [3, 2], seeds, **batches.arguments(batch_size=4, seed=1, **options)
    )


# cores, torch's threads, ranks; prefetch, and on how many threads bulks are built
CASES = [
    (1, 1, None, "auto", 0, 1),
    (1, 2, None, "auto", 0, 2),
    (2, 2, None, "auto", 0, 2),
    (2, 1, None, "auto", 1, 1),
    (8, 2, None, "auto", 1, 2),
    (8, 6, None, "auto", 1, 2),
    (8, 2, 2, "auto", 1, 2),
    (8, 2, 4, "auto", 0, 2),
    (8, 2, 16, "auto", 0, 2),
    (2, 2, None, 1, 1, 1),
    (8, 2, None, 3, 3, 2),
    (8, 2, None, 0, 0, 2),
]


@pytest.mark.parametrize("case", CASES)
def test_bulks_are_built_on_idle_cores(case, machine):
    cores, used, ranks, prefetch, ahead, width = case
    machine(cores, used, ranks)
    bulk = Batcher(loader_of(prefetch=prefetch), Phases())
    assert (bulk.ahead, bulk.width) == (ahead, width)
    if prefetch == "auto" and used <= cores // (ranks or 1):
        assert used + ahead * width <= cores // (ranks or 1)


@pytest.mark.parametrize("cores", [1, 2])
def test_threads_run_where_a_core_is_idle(cores, machine):
    """The minibatches are the same, whoever builds them."""
    machine(cores, 1)
    loader, started = loader_of(), []
    inner = loader.sample_planned

    def sampled(index):
        started.append(threading.current_thread() is not threading.main_thread())
        return inner(index)

    loader.sample_planned = sampled
    found = [batch.n_id for batch in loader]
    assert started == [cores > 1] * 6
    wanted = [batch.n_id for batch in loader_of(prefetch=0)]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))

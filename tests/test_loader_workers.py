"""DataLoader with worker processes yields on two ranks what PyG's yields on one process."""

from __future__ import annotations

import multiprocessing
import random

import alike
import pytest
import test_data_loader as graphs
import tiers
import torch
import torch_geometric.loader
import worlds

import pyg_distcomm as pdc
import pyg_distcomm.loader
import pyg_distcomm.nn as nn

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")


class Noisy(torch.utils.data.Dataset):
    """Draws a number for a graph whenever it is read, from torch's and Python's generators."""

    def __init__(self, kind="rings"):
        self.graphs = graphs.dataset(kind) * 2

    def __len__(self):
        return len(self.graphs)

    def __getitem__(self, k):
        data = self.graphs[k].clone()
        data.noise = torch.rand(1) + random.random()
        return data


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        yield from graphs.dataset("clouds")[worker.id :: worker.num_workers]


def shuffled(lib, **more):
    options = {"shuffle": True, "drop_last": True, "pin_memory": True, **more}
    return lib.DataLoader(Noisy(), 4, num_workers=2, **options)


def kept(lib):
    return shuffled(lib, persistent_workers=True)


def own_batches(lib):
    batches = torch.utils.data.BatchSampler(range(13, -1, -1), 5, drop_last=False)
    chosen = {"follow_batch": ["x"], "exclude_keys": ["edge_attr"]}
    make = {"batch_sampler": batches, "num_workers": 2, **chosen}
    return lib.DataLoader(Noisy("types"), **make)


def streamed(lib):
    return lib.DataLoader(Stream(), 2, num_workers=2)


LOADERS = {f.__name__: f for f in (shuffled, kept, own_batches, streamed)}


def epochs(loader):
    """Yields the batches of an epoch, of one that is broken off, and of one more."""
    for left in (99, 2, 99):
        for count, batch in enumerate(loader, 1):
            yield batch
            if count == left:
                break


@tiers.parametrize("kind", LOADERS, ["shuffled", "kept", "streamed"])
@worlds.on(2)
def test_workers_batches_are_those_of_one_process(kind):
    worlds.mesh()
    got, want = [], []
    for lib, found in (pyg_distcomm.loader, got), (torch_geometric.loader, want):
        torch.manual_seed(5)
        found += epochs(LOADERS[kind](lib))
        found.append(torch.rand(3))
    assert len(got) > 6
    for mine, theirs in zip(got, want, strict=True):
        graphs.same(mine, theirs)


def _rank_0_draws(kind):
    torch.manual_seed(worlds.mesh().rank)  # a script without a seed
    return [
        [alike.whole(batch[name]).tolist() for name in ("y", "noise")]
        for batch in epochs(LOADERS[kind](pyg_distcomm.loader))
    ]


def _one_process_draws(kind):
    torch.manual_seed(0)
    batches = epochs(LOADERS[kind](torch_geometric.loader))
    return [[batch[name].tolist() for name in ("y", "noise")] for batch in batches]


@tiers.parametrize("kind", ["shuffled", "kept"], ["shuffled"])
def test_without_a_seed_workers_draw_what_rank_0s_do(kind):
    got, other = worlds.run(_rank_0_draws, 2, kind)
    assert got == other
    assert [got] == worlds.run(_one_process_draws, 1, kind)


def _started():
    mesh = pdc.init()
    model = pdc.replicate(nn.GraphConv(2, 3).double(), mesh)
    for batch in shuffled(pyg_distcomm.loader):
        model(batch.x, batch.edge_index, batch.edge_attr).sum().backward()
    return multiprocessing.get_start_method(allow_none=True)


def test_launched_ranks_start_workers_as_their_launcher_does():
    """By a fork server of their own, workers would import everything anew in each epoch."""
    asked = multiprocessing.get_start_method(allow_none=True)
    default = multiprocessing.get_all_start_methods()[0]
    assert pdc.launch(_started, 2, timeout=300) == [asked or default] * 2

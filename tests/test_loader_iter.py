"""An epoch begins with its first batch, and PyG's layer-wise inference gets all batches."""

from __future__ import annotations

import io
import itertools

import pytest
import tiers
import torch
import torch_geometric.nn as pyg
import worlds
from alike import whole
from batches import LOADERS, all_same, graph, graph_of, made
from tqdm.auto import tqdm

import pyg_distcomm as pdc
import pyg_distcomm.nn as nn
from pyg_distcomm.loader import NeighborLoader


def bar(loader):
    return tqdm(loader, file=io.StringIO())


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("size", [tiers.rarely(1), 2, tiers.rarely(3)])
@worlds.on()
def test_an_iterator_that_is_not_used_is_no_epoch(size, kind):
    """Iterators that are not used, on some ranks, change nothing."""
    mesh = worlds.mesh()
    loader, other = (LOADERS[kind](graph_of(kind), seed=1) for _ in range(2))
    for epoch in range(2):
        want = list(other)
        iter(loader)
        got = list(bar(loader) if mesh.rank == 0 else loader)
        all_same(got, want)
        assert loader.state_dict()["epoch"] == epoch + 1
    state, before = loader.state_dict(), list(bar(loader))
    loader.load_state_dict(state)
    assert len(iter(loader)) == len(before)
    all_same(list(bar(loader)), before)


def models(lib):
    yield "GCN", lib.GCN(5, 6, 2, 3)
    yield "GraphSAGE", lib.GraphSAGE(5, 6, 1, 3, norm="batch_norm")
    yield "GAT", lib.GAT(5, 6, 3, 4, heads=2, jk="last")


@tiers.parametrize(
    ("size", "cut", "cache"),
    itertools.product([1, 2, 3], [False, True], [False, True]),
    [(2, False, True), (3, True, False)],
)
@worlds.on()
def test_inference_gets_all_rows_on_all_ranks(size, cut, cache):
    mesh = worlds.mesh()
    torch.manual_seed(0)
    data = graph()
    given = pdc.partition(data, mesh, "random") if cut else data
    load = made(NeighborLoader, [-1], batch_size=16)
    for lib in (pyg, nn):
        for name, model in models(lib):
            model.eval()
            want = getattr(pyg, name).inference(model, load(data, split=False))
            loader = load(given)
            for _ in range(1 + (name == "GCN")):
                got = model.inference(loader, cache=cache)
                torch.testing.assert_close(whole(got), want)
            rounds = -(-60 // 16)
            assert len(loader) == len(list(loader)) == rounds
            apart = load(given, split=True)
            assert len(list(apart)) == -(-rounds // mesh.size)


def _layers_on_one_rank_only(partitioned):
    mesh = worlds.mesh()
    data = graph()
    seeds = torch.arange(data.num_nodes)
    seeds = seeds if mesh.rank == 0 else seeds[: len(seeds) // 2]
    data = pdc.partition(data, mesh) if partitioned else data
    options = {"input_nodes": seeds, "even_batches": "drop", "batch_size": 9}
    loader = made(NeighborLoader, [-1])(data, **options)
    return sum(1 for _ in loader)


@pytest.mark.parametrize("partitioned", [False, True])
def test_a_loader_is_of_inference_on_all_ranks_or_on_none(partitioned):
    counts = worlds.anew(_layers_on_one_rank_only, 2, partitioned)
    assert len(set(counts)) == 1

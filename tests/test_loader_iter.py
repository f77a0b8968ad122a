"""An epoch begins with its first batch, and PyG's layer-wise inference gets all batches."""

from __future__ import annotations

import io
import itertools

import pytest
import tiers
import torch
import torch_geometric.nn as pyg
import worlds
from batches import all_same, arguments, graph, hetero
from tqdm.auto import tqdm

import pyg_distcomm as pdc
import pyg_distcomm.nn as nn
from pyg_distcomm.loader import (
    ClusterData,
    ClusterLoader,
    DistLayerLoader,
    DistNeighborLoader,
    GraphSAINTEdgeSampler,
    GraphSAINTNodeSampler,
    GraphSAINTRandomWalkSampler,
    HGTLoader,
    ImbalancedSampler,
    LinkNeighborLoader,
    LoaderOptions,
    NeighborLoader,
    RandomNodeLoader,
    ShaDowKHopSampler,
)

MAKE = {
    "nodes": lambda d, **k: NeighborLoader(
        d, [3, 2], **arguments(batch_size=7, shuffle=True, **k)
    ),
    "links": lambda d, **k: LinkNeighborLoader(
        d, [2], **arguments(batch_size=50, shuffle=True, neg_sampling="binary", **k)
    ),
    "layers": lambda d, **k: DistLayerLoader(
        d, [5, 5], **arguments(batch_size=9, shuffle=True, **k)
    ),
    "parts": lambda d, **k: RandomNodeLoader(d, 5, **arguments(shuffle=True, **k)),
    "clusters": lambda d, **k: ClusterLoader(
        ClusterData(d, 6, method="random"), **arguments(batch_size=2, shuffle=True, **k)
    ),
    "hops": lambda d, **k: ShaDowKHopSampler(
        d, 2, 3, **arguments(batch_size=9, shuffle=True, **k)
    ),
    "saint nodes": lambda d, **k: GraphSAINTNodeSampler(
        d, 9, **arguments(num_steps=5, **k)
    ),
    "saint edges": lambda d, **k: GraphSAINTEdgeSampler(
        d, 9, **arguments(num_steps=5, **k)
    ),
    "saint walks": lambda d, **k: GraphSAINTRandomWalkSampler(
        d, 5, 2, **arguments(num_steps=5, **k)
    ),
    "classes": lambda d, **k: NeighborLoader(
        d,
        [2],
        **arguments(batch_size=9, sampler=ImbalancedSampler(torch.arange(60) % 3), **k),
    ),
    "types": lambda d, **k: HGTLoader(
        hetero(), [4, 3], "paper", **arguments(batch_size=9, **k)
    ),
}


def bar(loader):
    return tqdm(loader, file=io.StringIO())


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("size", [tiers.rarely(1), 2, tiers.rarely(3)])
@worlds.on()
def test_an_iterator_that_is_not_used_is_no_epoch(size, kind):
    """Iterators that are not used, on some ranks, change nothing."""
    mesh = worlds.mesh()
    loader = MAKE[kind](graph(), seed=1)
    other = MAKE[kind](graph(), seed=1)
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
    for lib in (pyg, nn):
        for name, model in models(lib):
            model.eval()
            loader = NeighborLoader(
                data, [-1], batch_size=16, options=LoaderOptions(split=False)
            )
            want = getattr(pyg, name).inference(model, loader)
            loader = NeighborLoader(given, [-1], batch_size=16)
            for _ in range(1 + (name == "GCN")):
                got = model.inference(loader, cache=cache)
                got = got.full_tensor() if hasattr(got, "full_tensor") else got
                torch.testing.assert_close(got, want)
            rounds = -(-60 // 16)
            assert len(loader) == len(list(loader)) == rounds
            apart = NeighborLoader(
                given, [-1], batch_size=16, options=LoaderOptions(split=True)
            )
            assert len(list(apart)) == -(-rounds // mesh.size)


def _layers_on_one_rank_only(partitioned):
    mesh = worlds.mesh()
    data = graph()
    seeds = torch.arange(data.num_nodes)
    seeds = seeds if mesh.rank == 0 else seeds[: len(seeds) // 2]
    data = pdc.partition(data, mesh) if partitioned else data
    ours = LoaderOptions(even_batches="drop")
    loader = DistNeighborLoader(data, [-1], seeds, batch_size=9, options=ours)
    return sum(1 for _ in loader)


@pytest.mark.parametrize("partitioned", [False, True])
def test_a_loader_is_of_inference_on_all_ranks_or_on_none(partitioned):
    counts = worlds.anew(_layers_on_one_rank_only, 2, partitioned)
    assert len(set(counts)) == 1

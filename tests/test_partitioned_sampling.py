"""Minibatches of a graph that is spread over ranks are those of the whole graph."""

from __future__ import annotations

import batches
import pytest
import tiers
import torch
import worlds
from torch_geometric.sampler import NodeSamplerInput

import pyg_distcomm as pdc
from pyg_distcomm.comm.random import fold
from pyg_distcomm.sampling import (
    FastGCN,
    KeyedLayerSampler,
    KeyedNeighborSampler,
    Ladies,
)
from pyg_distcomm.sampling.graph_block import read_block
from pyg_distcomm.sampling.partitioned import (
    PartitionedLayerGraph,
    PartitionedNeighborSampler,
)
from pyg_distcomm.sampling.rules import UserRule

pytestmark = pytest.mark.usefixtures("place")

GRIDS = [(1, 1), (2, 1), (2, 2), (3, 1), (3, 3), (4, 1), (4, 2), (4, 4)]


def owners(n, size, seed=0):
    """Owners at random; the last rank of several has no nodes at all."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(max(size - 1, 1), (n,), generator=g)


def inputs(n, rank, name=None, k=3, b=7, time=None):
    """Minibatches of one rank: its first seed twice, its last batch short."""
    found = []
    for i in range(k):
        g = torch.Generator().manual_seed(100 * rank + i)
        node = torch.randint(n, (b if i < k - 1 else 2,), generator=g)
        node[-1] = node[0]
        given = NodeSamplerInput(
            input_id=torch.arange(len(node)),
            node=node,
            time=None if time is None else time[node],
            input_type=name,
        )
        given.key = fold(5, rank, i)
        found.append(given)
    return found


def assert_same(one, two):
    for name in (
        "node",
        "row",
        "col",
        "edge",
        "batch",
        "num_sampled_nodes",
        "num_sampled_edges",
        "orig_row",
        "orig_col",
    ):
        batches.same(getattr(one, name, None), getattr(two, name, None))


def sample(size, c, make, options, name, sample_at, timed=False):
    mesh = worlds.mesh()
    data = make()
    fan_outs = options.get("num_neighbors", [4, 3, -1])
    options = {k: v for k, v in options.items() if k != "num_neighbors"}
    nodes = data if name is None else data[name]
    time = nodes.time if timed else None
    bulk = inputs(nodes.num_nodes, mesh.rank, name, time=time)
    whole = KeyedNeighborSampler(data, fan_outs, seed=1, **options)
    n = data.num_nodes if name is None else None
    cut = (
        owners(n, size)
        if name is None
        else {
            t: owners(data[t].num_nodes, size, k) for k, t in enumerate(data.node_types)
        }
    )
    share = pdc.partition(data, mesh, cut)
    part = PartitionedNeighborSampler(
        share,
        fan_outs,
        seed=1,
        channel=worlds.channel(mesh, c),
        sample_at=sample_at,
        **options,
    )
    for given, found in zip(bulk, part.sample_bulk(bulk), strict=True):
        assert_same(whole.sample_from_nodes(given), found)
    for given in bulk[:2]:  # alone as in a bulk
        assert_same(whole.sample_from_nodes(given), part.sample_from_nodes(given))


def timed():
    data = batches.graph()
    g = torch.Generator().manual_seed(1)
    data.time = torch.randint(50, (data.num_nodes,), generator=g)
    data.edge_time = torch.rand(data.num_edges, generator=g)
    data.weight = torch.rand(data.num_edges, generator=g) + 0.1
    data.weight[::7] = 0.0
    into = torch.zeros(data.num_nodes).index_add(0, data.edge_index[1], data.weight)
    data.weight[into[data.edge_index[1]] == 0] = 1.0
    return data


def timed_hetero():
    data = batches.hetero()
    g = torch.Generator().manual_seed(1)
    for name in data.node_types:
        data[name].time = torch.randint(50, (data[name].num_nodes,), generator=g)
    return data


CASES = {
    "uniform": (batches.graph, {}),
    "replace": (batches.graph, {"replace": True}),
    "disjoint": (batches.graph, {"disjoint": True}),
    "induced": (batches.graph, {"subgraph_type": "induced"}),
    "bidirectional": (batches.graph, {"subgraph_type": "bidirectional"}),
    "weighted": (timed, {"weight_attr": "weight"}),
    "weighted, replace": (timed, {"weight_attr": "weight", "replace": True}),
    "node times": (timed, {"time_attr": "time"}),
    "latest": (timed, {"time_attr": "time", "temporal_strategy": "last"}),
    "edge times": (timed, {"time_attr": "edge_time", "weight_attr": "weight"}),
    "hetero": (batches.hetero, {}),
    "hetero, fan-outs": (
        batches.hetero,
        {
            "num_neighbors": {
                ("paper", "cites", "paper"): [3, 0],
                ("author", "writes", "paper"): [2, 2],
                ("paper", "written", "author"): [-1, 4],
            }
        },
    ),
    "hetero, times": (timed_hetero, {"time_attr": "time"}),
    "hetero, induced": (batches.hetero, {"subgraph_type": "induced"}),
}


@tiers.parametrize(
    ("size", "c", "sample_at"),
    [(*grid, at) for grid in GRIDS for at in ("owner", "requester")],
    [(2, 1, "requester"), (4, 2, "owner")],
)
def test_minibatches_are_those_of_the_whole_graph(size, c, sample_at):
    for turn, (name, (make, options)) in enumerate(CASES.items()):
        if size > 2 and turn % 2 == (c + (sample_at == "owner")) % 2:
            continue  # half of the cases on the larger grids, in turn
        kind = "paper" if name.startswith("hetero") else None
        timed = "time_attr" in options
        worlds.run(sample, size, size, c, make, options, kind, sample_at, timed)


# Layer by layer ----------------------------------------------------------------------


def root(p):
    return p.with_value(p.values.sqrt())


LAYER_CASES = (
    (batches.graph, Ladies(), None, {}),
    (batches.graph, Ladies("cagnet"), None, {"weights": None}),
    (timed, Ladies("paper"), None, {"weights": "debiased"}),
    (timed, Ladies(), "weight", {"weights": "importance", "replace": True}),
    (batches.graph, FastGCN(), None, {"weights": "debiased"}),
    (timed, FastGCN(), "weight", {}),
    (timed, UserRule(root), "weight", {"keep_batch": False}),
)


def sample_layers(size, c, sample_at, make, rule, weight_attr, options):
    mesh = worlds.mesh()
    data = make()
    bulk = inputs(data.num_nodes, mesh.rank)
    whole = KeyedLayerSampler(
        data, [6, 9, -1], rule, weight_attr=weight_attr, **options
    )
    share = pdc.partition(data, mesh, owners(data.num_nodes, size))
    block = read_block(share, worlds.channel(mesh, c), weight_attr=weight_attr)
    graph = PartitionedLayerGraph(
        block, worlds.channel(mesh, c), rule, sample_at=sample_at
    )
    assert graph.scale == whole.graph.scale
    part = KeyedLayerSampler(graph, [6, 9, -1], **options)
    for one, two in zip(whole.sample_bulk(bulk), part.sample_bulk(bulk), strict=True):
        for name in (
            "node",
            "row",
            "col",
            "edge",
            "edge_weight",
            "num_sampled_nodes",
            "num_sampled_edges",
        ):
            batches.same(getattr(one, name), getattr(two, name))
    one = part.sample_from_nodes(bulk[0])
    batches.same(one.node, whole.sample_from_nodes(bulk[0]).node)


@pytest.mark.parametrize("sample_at", ["owner", "requester"])
@tiers.parametrize(("size", "c"), GRIDS, [(2, 1)])
def test_layer_wise_minibatches_are_those_of_the_whole_graph(size, c, sample_at):
    for make, rule, weight_attr, options in LAYER_CASES:
        worlds.run(
            sample_layers, size, size, c, sample_at, make, rule, weight_attr, options
        )

"""Layer-wise minibatches of a graph spread over ranks are those of the whole graph."""

from __future__ import annotations

import batches
import pytest
import tiers
import worlds
from test_partitioned_sampling import GRIDS, inputs, owners, timed

import pyg_distcomm as pdc
from pyg_distcomm.sampling import FastGCN, KeyedLayerSampler, Ladies
from pyg_distcomm.sampling.graph_block import read_block
from pyg_distcomm.sampling.partitioned import PartitionedLayerGraph
from pyg_distcomm.sampling.rules import UserRule

pytestmark = pytest.mark.usefixtures("place")


def root(p):
    return p.with_value(p.values.sqrt())


CASES = (
    (batches.graph, Ladies(), None, {}),
    (batches.graph, Ladies("cagnet"), None, {"weights": None}),
    (timed, Ladies("paper"), None, {"weights": "debiased"}),
    (timed, Ladies(), "weight", {"weights": "importance", "replace": True}),
    (batches.graph, FastGCN(), None, {"weights": "debiased"}),
    (timed, FastGCN(), "weight", {}),
    (timed, UserRule(root), "weight", {"keep_batch": False}),
)


def sample(size, c, sample_at, make, rule, weight_attr, options):
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
def test_minibatches_are_those_of_the_whole_graph(size, c, sample_at):
    for make, rule, weight_attr, options in CASES:
        worlds.run(sample, size, size, c, sample_at, make, rule, weight_attr, options)

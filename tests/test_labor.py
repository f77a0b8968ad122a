"""Sampling by "labor" draws as its definition says, alike on any ranks, and fewer nodes."""

from __future__ import annotations

import pytest
import sample_reference
import tiers
import torch
import worlds
from batches import arguments, hetero
from test_partitioned_loader import load, masked
from test_partitioned_sampling import timed
from test_sample_kernels import graph, request, same
from test_sampling_statistics import fan, likely, sets
from torch_geometric.data import Data
from torch_geometric.sampler import NodeSamplerInput

import pyg_distcomm as pdc
from pyg_distcomm.kernels.sample_cpu import Sampler
from pyg_distcomm.loader import DistNeighborLoader, LoaderOptions
from pyg_distcomm.sampling import KeyedNeighborSampler

DRAWS = 6000


@tiers.parametrize("kind", ["plain", "weighted", "node", "edge"], ["weighted"])
@tiers.parametrize("typed", [False, True], [True])
def test_compiled_equals_reference(typed, kind):
    timed = (kind,) if kind in ("node", "edge") else ()
    pairs, dtype = typed, torch.int32 if typed else torch.int64
    g = graph(typed, pairs=pairs, dtype=dtype, weighted=kind == "weighted", timed=timed)
    sampler = Sampler(g)
    for key, fan_out in enumerate([(4, 3, 2), (-1, 2), (0, 5), (60, 1)]):
        for induced in (False, True):
            options = {"timed": bool(timed), "induced": induced, "labor": True}
            wanted = request(g, fan_out, key, **options)
            same(sampler(wanted), sample_reference.sample(g, wanted))


def drawn(data, k, **kwargs):
    """What node 0 draws [DRAWS, k], in as many copies of a graph, which share no source."""
    n, e = data.num_nodes, data.num_edges
    copy = torch.arange(DRAWS).repeat_interleave(e)
    many = Data(edge_index=data.edge_index.repeat(1, DRAWS) + n * copy)
    many.num_nodes = n * DRAWS
    if "w" in data:
        many.w = data.w.repeat(DRAWS)
    sampler = KeyedNeighborSampler(many, [k], draws="labor", seed=8, **kwargs)
    out = sampler.sample_from_nodes(NodeSamplerInput(None, n * torch.arange(DRAWS)))
    assert torch.equal(out.col, torch.arange(DRAWS).repeat_interleave(k))
    return out.edge.view(DRAWS, k) % e


@tiers.parametrize(("degree", "k"), [(5, 1), (6, 2), (7, 3), (6, 5)], [(6, 2)])
def test_all_subsets_of_a_row_are_equally_likely(degree, k):
    likely(sets(drawn(fan(degree), k), degree))


def test_so_are_those_of_edges_beside_each_other():
    ends = torch.tensor([[1, 2, 1, 1, 2], [0, 0, 0, 0, 0]])
    likely(sets(drawn(Data(edge_index=ends, num_nodes=3), 2), 5))


def test_weights_give_the_chances_that_they_give_without_labor():
    data = fan(6, w=torch.tensor([0.0, 1.0, 2.0, 0.5, 4.0, 0.25]))
    picks = drawn(data, 2, weight_attr="w")
    weight = data.w.double()
    chance = torch.zeros(6, 6, dtype=torch.float64)  # first this, then that
    for first in range(6):
        rest = weight.clone()
        rest[first] = 0
        chance[first] = weight[first] / weight.sum() * rest / rest.sum()
    code = picks[:, 0] * 6 + picks[:, 1]
    likely(torch.bincount(code, minlength=36), chance)


def star(targets, degree):
    """Nodes 0 .. targets-1 with in-edges from all of `degree` others."""
    source = torch.arange(targets, targets + degree).repeat(targets)
    target = torch.arange(targets).repeat_interleave(degree)
    return Data(edge_index=torch.stack([source, target]), num_nodes=targets + degree)


def test_nodes_of_a_hop_share_their_draws_and_hops_do_not():
    data, seeds = star(6, 40), NodeSamplerInput(None, torch.arange(6))
    distinct = {}
    for draws in ("neighbor", "labor"):
        sampler = KeyedNeighborSampler(data, [8], draws=draws, seed=1)
        outs = [sampler.sample_from_nodes(seeds) for _ in range(60)]
        assert all(len(out.edge) == 48 for out in outs)
        distinct[draws] = sum(len(out.node) - 6 for out in outs) / 60
    assert distinct["labor"] == 8
    assert abs(distinct["neighbor"] - 40 * (1 - 0.8**6)) < 1
    # node 0 draws at hop 0, and node 2, a neighbour of seed 1, at hop 1
    edges = data.edge_index[:, data.edge_index[1] % 2 == 0]
    edges = torch.cat([edges, torch.tensor([[2], [1]])], 1)
    chain = Data(edge_index=edges, num_nodes=46)
    sampler = KeyedNeighborSampler(chain, [8, 8], draws="labor", seed=1)
    out = sampler.sample_from_nodes(NodeSamplerInput(None, torch.tensor([0, 1])))
    assert 2 in out.node.tolist()
    at = [int((out.node == v).nonzero()) for v in (0, 2)]
    found = [set(out.node[out.row[out.col == v]].tolist()) for v in at]
    assert len(found[0]) == 8
    assert found[0] != found[1]


def skewed(nodes=60, edges=900):
    """A graph whose nodes share many in-neighbours, with in-degrees of 0 and more."""
    g = torch.Generator().manual_seed(2)
    source = (torch.rand(edges, generator=g) ** 2 * nodes).long()
    target = (torch.rand(edges, generator=g) ** 3 * (nodes - 1)).long()
    return Data(edge_index=torch.stack([source, target]), num_nodes=nodes)


def important(draws, k, runs):
    """Distinct nodes and edges of a hop on average, and estimates of means `[runs, s]`."""
    data, seeds = skewed(), torch.arange(30)
    x = torch.randn(60, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    sampler = KeyedNeighborSampler(data, [k], draws=draws, seed=4)
    outs = [
        sampler.sample_from_nodes(NodeSamplerInput(None, seeds)) for _ in range(runs)
    ]
    nodes = sum(len(out.node) for out in outs) / runs
    edges = sum(len(out.edge) for out in outs) / runs
    if draws == "labor":
        return nodes, edges, None, None
    found = []
    for out in outs:
        source, target = out.node[out.row], out.node[out.col]
        assert torch.equal(torch.stack([source, target]), data.edge_index[:, out.edge])
        terms = out.edge_weight.double() * x[source]
        found.append(torch.zeros(60, dtype=torch.float64).index_add_(0, target, terms))
    source, target = data.edge_index
    count = torch.bincount(target, minlength=60)
    want = torch.zeros(60, dtype=torch.float64).index_add_(0, target, x[source])
    return nodes, edges, torch.stack(found)[:, :30], (want / count.clamp(min=1))[:30]


def test_importances_leave_means_as_they_are_and_draw_fewer_nodes():
    runs, (base, drawn, *_) = 1500, important("labor", 3, 300)
    before = base
    for draws, least in (("labor-1", 0.97), ("labor-*", 0.995)):
        nodes, edges, found, want = important(draws, 3, runs)
        error = found.std(0, unbiased=True) / runs**0.5
        off = (found.mean(0) - want).abs()
        assert bool((off <= 4.5 * error + 1e-6).all()), off / error
        assert (
            edges >= drawn * 0.98
        )  # of chances of one variance, the sum is k at least
        assert nodes < least * before
        before = nodes
        again = important(draws, 3, 5)
        assert torch.equal(again[2], found[:5])  # keyed


def test_the_chances_of_a_node_have_the_variance_of_its_fan_out():
    sampler = KeyedNeighborSampler(skewed(), [4], draws="labor-1", seed=1)
    out = sampler.sample_from_nodes(NodeSamplerInput(None, torch.arange(60)))
    degree = torch.bincount(skewed().edge_index[1], minlength=60)
    drawn = torch.bincount(out.node[out.col], minlength=60)
    few = degree <= 4
    assert torch.equal(drawn[few], degree[few])
    # 1 / (d p) of those drawn, of which 1 / p has the sum d^2 / k on average
    alone = Data(edge_index=skewed().edge_index, num_nodes=60)
    share = KeyedNeighborSampler(alone, [4], draws="labor-1", seed=7)
    hub = int(degree.argmax())
    total = 0.0
    for _ in range(400):
        one = share.sample_from_nodes(NodeSamplerInput(None, torch.tensor([hub])))
        total += float(one.edge_weight.double().sum())
        assert torch.allclose(one.edge_weight, torch.tensor(0.25))  # alone: 1 / k
    assert abs(total / 400 - 1) < 0.1


def test_batches_have_the_weights():
    data = skewed()
    data.x = torch.randn(60, 3)
    loader = DistNeighborLoader(
        data, [3, 2], batch_size=20, options=LoaderOptions(draws="labor-*", seed=1)
    )
    for batch in loader:
        assert batch.edge_weight.shape == (batch.edge_index.size(1),)
        assert bool((batch.edge_weight > 0).all())
    state = loader.state_dict()
    other = DistNeighborLoader(
        data, [3, 2], batch_size=20, options=LoaderOptions(draws="labor-1", seed=1)
    )
    with pytest.raises(ValueError, match="draws=labor-"):
        other.load_state_dict(state)
    typed = DistNeighborLoader(
        hetero(),
        [3, 2],
        ("paper", torch.arange(30)),
        batch_size=15,
        options=LoaderOptions(draws="labor-1"),
    )
    for batch in typed:
        for kind in batch.edge_types:
            edges = batch[kind].edge_index.size(1)
            assert len(batch[kind].edge_weight) == edges


def refused():
    share = pdc.partition(masked(), worlds.mesh(), "random")
    with pytest.raises(ValueError, match="sample_at='requester'"):
        DistNeighborLoader(share, [3], options=LoaderOptions(draws="labor-1"))


def test_importances_are_refused_where_a_hop_is_drawn_by_its_owners():
    worlds.run(refused, 2)


def weighted():
    data = masked()
    data.weight = torch.rand(data.num_edges, generator=torch.Generator().manual_seed(1))
    return data


WAYS = (
    (masked, "mask", {}),
    (masked, "all", {"sample_at": "requester", "bulk_size": 3}),
    (masked, "mask", {"topology": "replicated", "batch_size": 64}),
    (weighted, "mask", {"weight_attr": "weight"}),
    (timed, "all", {"time_attr": "time", "batch_size": 16}),
    (hetero, ("paper", torch.arange(30)), {"batch_size": 4}),
    (masked, "mask", {"topology": "replicated", "batch_size": 64, "draws": "labor-1"}),
    (masked, "mask", {"sample_at": "requester", "draws": "labor-1", "bulk_size": 3}),
    (
        hetero,
        ("paper", torch.arange(30)),
        {"sample_at": "requester", "draws": "labor-*"},
    ),
)


@tiers.parametrize(("size", "c"), [(1, 1), (2, 1), (2, 2), (3, 1), (4, 2)], [(2, 1)])
@tiers.parametrize("way", range(len(WAYS)), [3, 7])
def test_batches_of_a_share_are_those_of_the_whole_graph(way, size, c):
    make, nodes, options = WAYS[way]
    worlds.run(load, size, size, c, make, nodes, {"draws": "labor", **options})


def test_a_state_knows_its_draws():
    loaders = [
        DistNeighborLoader(
            masked(), [3], batch_size=9, options=LoaderOptions(seed=1, draws=draws)
        )
        for draws in ("labor", "neighbor")
    ]
    with pytest.raises(ValueError, match="draws=labor"):
        loaders[1].load_state_dict(loaders[0].state_dict())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"draws": "ladies"}, "draws must be one of"),
        ({"draws": "labor", "replace": True}, "without replacement"),
        ({"draws": "labor-1", "replace": True}, "leave replace out"),
        ({"draws": "labor-*", "disjoint": True}, "leave disjoint out"),
        ({"draws": "labor-1", "subgraph_type": "induced"}, "leave subgraph_type out"),
    ],
)
def test_what_is_no_way_to_draw_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        DistNeighborLoader(masked(), [3], **arguments(**options))

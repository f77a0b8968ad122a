"""Draws have the distribution they should: chi-square tests over many draws.

Seeds are fixed, so a test passes always or never; p > 1e-4 is what a right sampler
misses once in 10,000 seeds.
"""

from functools import partial
from itertools import combinations, permutations

import pytest
import tiers
import torch
from batches import links, nodes
from chances import likely, subsets, successive
from torch_geometric.data import Data
from torch_geometric.sampler import NegativeSampling, NodeSamplerInput

from pyg_distcomm.comm.random import keyed_permutation
from pyg_distcomm.sampling import KeyedNeighborSampler

DRAWS = 20_000


def fan(degree, **kwargs):
    """Node 0 with in-edges 0 .. degree-1 from nodes 1 .. degree."""
    leaves = torch.arange(1, degree + 1)
    ends = torch.stack([leaves, torch.zeros_like(leaves)])
    return Data(edge_index=ends, num_nodes=degree + 1, **kwargs)


def draws(data, k, count=DRAWS, time=None, **kwargs):
    """What each of many copies of seed 0 draws, [count, k]; -1 where there is less."""
    kwargs = {"disjoint": True, "seed": 8, **kwargs}
    sampler = KeyedNeighborSampler(data, [k], **kwargs)
    seeds = torch.zeros(count, dtype=torch.long)
    times = None if time is None else torch.as_tensor(time).expand(count)
    out = sampler.sample_from_nodes(NodeSamplerInput(None, seeds, times))
    each = torch.bincount(out.col, minlength=count)[:count]
    drawn = torch.full((count, k), -1)
    place = torch.arange(len(out.col)) - (each.cumsum(0) - each)[out.col]
    drawn[out.col, place] = out.edge
    return drawn


def labor(data, k, count=6000, **kwargs):
    """What node 0 draws [count, k], in as many copies of a graph, which share no source."""
    n, e = data.num_nodes, data.num_edges
    copy = torch.arange(count).repeat_interleave(e)
    many = Data(edge_index=data.edge_index.repeat(1, count) + n * copy)
    many.num_nodes = n * count
    if "weight" in data:
        many.weight = data.weight.repeat(count)
    sampler = KeyedNeighborSampler(many, [k], draws="labor", seed=8, **kwargs)
    out = sampler.sample_from_nodes(NodeSamplerInput(None, n * torch.arange(count)))
    assert torch.equal(out.col, torch.arange(count).repeat_interleave(k))
    return out.edge.view(count, k) % e


WEIGHT = torch.tensor([0.0, 1.0, 2.0, 0.5, 4.0, 0.25])
HOW = {"disjoint": draws, "joint": partial(draws, disjoint=False), "labor": labor}


@tiers.cover(("weighted", "k", "how"), [True, False], [3, 2, 4, 1], list(HOW))
def test_all_subsets_are_as_likely_as_their_weights(how, k, weighted):
    options = {"weight_attr": "weight"} if weighted else {}
    drawn = HOW[how](fan(6, weight=WEIGHT), k, **options)
    weight = WEIGHT if weighted else torch.ones(6)
    likely(subsets(drawn.sort(1).values, 6), successive(weight, k))


@tiers.parametrize(("degree", "k"), [(200, 40), (200, 70)], [(200, 70)])
def test_edges_and_pairs_of_long_rows(degree, k):
    drawn = draws(fan(degree), k, count=4000)
    assert bool((drawn.sort(1).values.diff(dim=1) > 0).all())
    marks = torch.zeros(4000, degree).scatter_(1, drawn, 1.0)
    # of fixed-size subsets the chi-square is below that of independent draws
    likely(marks.sum(0))
    pairs = marks.T @ marks
    for cut in (marks.sum(0), pairs[torch.triu(torch.ones(degree, degree), 1) > 0]):
        off = (cut - cut.mean()).square().mean() / cut.mean()
        assert 0.3 < float(off) < 1.2
    chance = k * (k - 1) / degree / (degree - 1)
    assert abs(float(pairs[0, 1:].mean()) / 4000 - chance) < 0.01


@pytest.mark.parametrize("weighted", [False, True])
def test_draws_with_replacement_are_independent(weighted):
    options = {"weight_attr": "weight"} if weighted else {}
    drawn = draws(fan(6, weight=WEIGHT), 2, replace=True, **options)
    weight = WEIGHT if weighted else torch.ones(6)
    code = drawn[:, 0] * 6 + drawn[:, 1]
    likely(torch.bincount(code, minlength=36), torch.outer(weight, weight))


def test_edges_beside_each_other_are_drawn_apart():
    ends = torch.tensor([[1, 2, 1, 1, 2], [0, 0, 0, 0, 0]])
    found = labor(Data(edge_index=ends, num_nodes=3), 2)
    likely(subsets(found.sort(1).values, 5))


def star(targets, degree):
    """Nodes 0 .. targets-1 with in-edges from all of `degree` others."""
    source = torch.arange(targets, targets + degree).repeat(targets)
    target = torch.arange(targets).repeat_interleave(degree)
    return Data(edge_index=torch.stack([source, target]), num_nodes=targets + degree)


def test_by_labor_nodes_of_a_hop_share_their_draws_and_hops_do_not():
    data, seeds = star(6, 40), NodeSamplerInput(None, torch.arange(6))
    distinct = {}
    for how in ("neighbor", "labor"):
        sampler = KeyedNeighborSampler(data, [8], draws=how, seed=1)
        outs = [sampler.sample_from_nodes(seeds) for _ in range(60)]
        assert all(len(out.edge) == 48 for out in outs)
        distinct[how] = sum(len(out.node) - 6 for out in outs) / 60
    assert distinct["labor"] == 8
    assert abs(distinct["neighbor"] - 40 * (1 - 0.8**6)) < 1
    # node 0 draws at hop 0, and node 2, a neighbour of seed 1, at hop 1
    edges = data.edge_index[:, data.edge_index[1] % 2 == 0]
    edges = torch.cat([edges, torch.tensor([[2], [1]])], 1)
    chain = Data(edge_index=edges, num_nodes=46)
    sampler = KeyedNeighborSampler(chain, [8, 8], draws="labor", seed=1)
    out = sampler.sample_from_nodes(NodeSamplerInput(None, torch.tensor([0, 1])))
    at = [int((out.node == v).nonzero()) for v in (0, 2)]
    found = [set(out.node[out.row[out.col == v]].tolist()) for v in at]
    assert len(found[0]) == 8
    assert found[0] != found[1]


@tiers.parametrize("of", ["node", "edge"], ["edge"])
def test_all_that_is_early_enough_is_equally_likely(of):
    clock = torch.tensor([4, 0, 9, 2, 4, 7, 1, 5])
    when = torch.cat([torch.tensor([0]), clock]) if of == "node" else clock
    drawn = draws(fan(8, clock=when), 2, time=4, time_attr="clock")
    early = (clock <= 4).nonzero().view(-1)
    wanted = torch.tensor(
        [all(e in early.tolist() for e in c) for c in combinations(range(8), 2)]
    )
    likely(subsets(drawn.sort(1).values, 8), wanted)


@tiers.parametrize("disjoint", [False, True], [False])
def test_copies_of_a_seed_draw_for_themselves(disjoint):
    drawn = draws(fan(6), 1, disjoint=disjoint).view(-1, 2)
    likely(torch.bincount(drawn[:, 0] * 6 + drawn[:, 1], minlength=36))
    far = draws(fan(6), 1, disjoint=disjoint).view(2, -1)
    likely(torch.bincount(far[0] * 6 + far[1], minlength=36))


def test_shuffles_are_uniform():
    orders = {p: i for i, p in enumerate(permutations(range(4)))}
    found = [orders[tuple(keyed_permutation(key, 4).tolist())] for key in range(2400)]
    likely(torch.bincount(torch.tensor(found), minlength=24))
    loader = nodes(fan(4), [1], input_nodes=torch.arange(4), seed=2)
    found = [orders[tuple(b.input_id.tolist())] for _ in range(150) for b in loader]
    likely(torch.bincount(torch.tensor(found), minlength=24))


@pytest.mark.parametrize("mode", ["binary", "triplet"])
@tiers.parametrize("weighted", [False, True], [True])
def test_negatives_are_drawn_by_weight(weighted, mode):
    n = 12
    weight = torch.arange(n).float() % 5 if weighted else torch.ones(n)
    given = weight if weighted else None
    if mode == "binary":
        sampling = NegativeSampling("binary", 40, src_weight=given, dst_weight=given)
    else:
        sampling = NegativeSampling("triplet", 40, dst_weight=given)
    pairs = {"edge_label_index": torch.tensor([[1], [0]]).repeat(1, 200)}
    options = {"neg_sampling": sampling, "batch_size": 100, "shuffle": False, "seed": 6}
    loader = links(fan(n - 1), [1], **pairs, **options)
    for batch in loader:
        if mode == "triplet":
            drawn = batch.n_id[batch.dst_neg_index].flatten()
            likely(torch.bincount(drawn, minlength=n), weight)
        else:
            pairs = batch.n_id[batch.edge_label_index][:, 100:]
            code = torch.bincount(pairs[0] * n + pairs[1], minlength=n * n)
            likely(code, torch.outer(weight, weight))

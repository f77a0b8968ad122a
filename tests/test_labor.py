"""Sampling by "labor" draws as its definition says, alike on any ranks, and fewer nodes."""

from __future__ import annotations

import pytest
import tiers
import torch
from batches import arguments
from chances import likely, subsets
from test_partitioned_loader import masked
from test_sampling_statistics import fan
from torch_geometric.data import Data
from torch_geometric.sampler import NodeSamplerInput

from pyg_distcomm.loader import DistNeighborLoader, LoaderOptions
from pyg_distcomm.sampling import KeyedNeighborSampler

DRAWS = 6000


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
    likely(subsets(drawn(fan(degree), k).sort(1).values, degree))


def test_so_are_those_of_edges_beside_each_other():
    ends = torch.tensor([[1, 2, 1, 1, 2], [0, 0, 0, 0, 0]])
    found = drawn(Data(edge_index=ends, num_nodes=3), 2)
    likely(subsets(found.sort(1).values, 5))


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
    ],
)
def test_what_is_no_way_to_draw_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        DistNeighborLoader(masked(), [3], **arguments(**options))

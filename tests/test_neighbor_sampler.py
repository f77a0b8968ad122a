"""NeighborSampler yields what PyG's does with torch-sparse, which is not needed."""

from __future__ import annotations

import pytest
import torch
import torch_geometric.nn as pyg
import worlds
from alike import whole
from batches import graph
from torch_geometric.loader.neighbor_sampler import EdgeIndex

import pyg_distcomm as pdc
from pyg_distcomm.loader import NeighborSampler


def expected(edges, batch, sizes):
    """What torch-sparse samples with sizes of -1: rows in order, columns as they arrive."""
    nodes, found = batch.tolist(), []
    for _ in sizes:
        targets, place = list(nodes), {node: k for k, node in enumerate(nodes)}
        ends = []
        for row, node in enumerate(targets):
            into = (edges[1] == node).nonzero().view(-1).tolist()
            here = []
            for e in sorted(into, key=lambda e: (int(edges[0, e]), e)):
                source = int(edges[0, e])
                if source not in place:
                    place[source] = len(nodes)
                    nodes.append(source)
                here.append((place[source], row, e))
            ends += sorted(here)
        found.append((torch.tensor(ends).view(-1, 3).T, (len(nodes), len(targets))))
    return torch.tensor(nodes), found[::-1]


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("size", [1, 2])
@worlds.on()
def test_all_neighbours_come_in_torch_sparses_order(size, cut):
    mesh = worlds.mesh()
    data = graph()
    given = pdc.partition(data, mesh, "random") if cut else data
    loader = NeighborSampler(given.edge_index, [-1, -1], num_nodes=60, batch_size=7)
    for k, (size, n_id, adjs) in enumerate(loader):
        batch = torch.arange(60)[7 * k : 7 * k + 7]
        nodes, layers = expected(data.edge_index, batch, [-1, -1])
        assert size == len(batch)
        assert torch.equal(n_id, nodes)
        for adj, (want, shape) in zip(adjs, layers, strict=True):
            assert isinstance(adj, EdgeIndex)
            assert adj.size == shape
            assert torch.equal(adj.edge_index, want[:2])
            assert torch.equal(adj.e_id, want[2])
        assert torch.equal(whole(given.x[n_id]), data.x[n_id])
    assert k == 8


def test_neighbours_are_drawn_without_replacement_by_torchs_generator():
    data, drawn = graph(), []
    into = torch.bincount(data.edge_index[1], minlength=60)
    for _ in range(2):
        torch.manual_seed(0)
        loader = NeighborSampler(data.edge_index, [3], num_nodes=60, batch_size=60)
        epochs = [next(iter(loader)) for _ in range(200)]
        drawn.append([adj.e_id for _, _, adj in epochs])
    assert all(map(torch.equal, *drawn))
    counts = torch.zeros(400)
    for _, n_id, adj in epochs:
        assert torch.equal(
            torch.bincount(adj.edge_index[1], minlength=60), into.clamp(max=3)
        )
        ends = torch.stack([n_id[adj.edge_index[0]], adj.edge_index[1]])
        assert torch.equal(data.edge_index[:, adj.e_id], ends)
        assert len(adj.e_id.unique()) == len(adj.e_id)
        counts[adj.e_id] += 1
    chance = (3 / into.clamp(min=3))[data.edge_index[1]]
    assert float((counts / 200 - chance).abs().max()) < 0.2


def test_arguments_are_pygs():
    data = graph()
    edges = data.edge_index
    seeds = torch.tensor([3, 5, 58])
    mask = torch.zeros(60, dtype=torch.bool).index_fill_(0, seeds, True)
    for node_idx in (seeds, mask):
        loader = NeighborSampler(edges, [2, -1], node_idx, return_e_id=False)
        found = list(loader)
        assert [int(n_id[0]) for _, n_id, _ in found] == seeds.tolist()
        assert all(adj.e_id is None for _, _, adjs in found for adj in adjs)
    matrix = torch.sparse_coo_tensor(
        edges.flip(0), torch.ones(400), (60, 60)
    ).coalesce()
    turned = NeighborSampler(matrix.to_sparse_csr(), [-1], batch_size=60)
    _, _, adj = next(iter(turned))
    assert torch.equal(matrix.indices()[0, adj.e_id], adj.edge_index[1])
    loader = NeighborSampler(edges, [1], batch_size=9, transform=lambda *out: out[0])
    assert sum(loader) == int(edges.max()) + 1
    loader = NeighborSampler(edges, [-1], shuffle=True, batch_size=56, num_workers=0)
    assert next(iter(loader))[1].sort().values.tolist() == list(range(56))
    assert list(NeighborSampler(torch.empty(2, 0).long(), [2])) == []


def test_a_script_of_old_trains_and_infers():
    data = graph()
    torch.manual_seed(0)
    convs = torch.nn.ModuleList([pyg.SAGEConv(5, 8), pyg.SAGEConv(8, 4)])

    def layers(x, adjs):
        for k, (edge_index, _, size) in enumerate(adjs):
            x = convs[k]((x, x[: size[1]]), edge_index)
            x = x.relu() if k == 0 else x
        return x

    loader = NeighborSampler(data.edge_index, [-1, -1], num_nodes=60, batch_size=13)
    out = torch.cat([layers(data.x[n_id], adjs) for _, n_id, adjs in loader])
    edges = data.edge_index
    want = convs[1](convs[0](data.x, edges).relu(), edges)
    torch.testing.assert_close(out, want)

"""Graphs that change: a share with nodes and edges appended is that of the whole new graph."""

from __future__ import annotations

import copy
import itertools

import pytest
import tiers
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
import worlds
from problems import CUTTERS, GRAPHS, owners
from torch_geometric.data import Data

import pyg_distcomm as pdc
from pyg_distcomm.graph.topology import Topology

NODES = ("x", "y", "train_mask")
EDGES = ("edge_weight", "edge_attr")


def growth(data, nodes, edges, seed=7):
    """What is appended: loops, copies and edges of old and new nodes among them."""
    g = torch.Generator().manual_seed(seed)
    n = data.num_nodes + nodes
    ends = torch.randint(0, n, (2, edges), generator=g)
    if edges > 4:
        ends[:, 0], ends[:, 1] = ends[:, 2], n - 1  # a copy, and a loop
    more = {"edge_index": ends}
    more["edge_weight"] = torch.rand(edges, generator=g, dtype=torch.float64)
    more["edge_attr"] = torch.randn(edges, 3, generator=g, dtype=torch.float64)
    rows = {
        "x": torch.randn(nodes, 7, generator=g, dtype=torch.float64),
        "y": torch.randint(0, 4, (nodes,), generator=g),
        "train_mask": torch.rand(nodes, generator=g) < 0.7,
    }
    return more, rows


def whole(data, more, rows):
    out = Data(edge_index=torch.cat([data.edge_index, more["edge_index"]], 1))
    for name, new in (*rows.items(), *((n, more[n]) for n in EDGES)):
        out[name] = torch.cat([data[name], new])
    out.num_nodes = data.num_nodes + len(rows["x"])
    return out


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = pyg.GCNConv(7, 6)
        self.second = pyg.GATConv(6, 4, edge_dim=3)

    def forward(self, data):
        x = self.first(data.x, data.edge_index, data.edge_weight).relu()
        return self.second(x, data.edge_index, data.edge_attr)


def numbers(model, data):
    data.x = data.x.clone().requires_grad_()
    out = model(data)
    F.cross_entropy(out[data.train_mask], data.y[data.train_mask]).backward()
    full = out.full_tensor() if isinstance(out, pdc.DistTensor) else out
    grad = data.x.grad
    grad = grad.full_tensor() if isinstance(grad, pdc.DistTensor) else grad
    return [full, grad, *(p.grad for p in model.parameters())]


def made():
    torch.manual_seed(2)
    return Net().double()


def same_plans(grown, fresh):
    """Asserts that nothing tells a grown topology from one that is planned anew."""
    for name in ("source_lid", "target_lid", "ghost_gid"):
        assert torch.equal(getattr(grown, name), getattr(fresh, name)), name
    assert grown.num_own == fresh.num_own
    for name in ("send_slot", "send_gid", "ghost_gid"):
        assert torch.equal(getattr(grown.halo, name), getattr(fresh.halo, name)), name
    for name in ("send_counts", "recv_counts", "num_local", "silent", "most"):
        assert getattr(grown.halo, name) == getattr(fresh.halo, name), name


def updated(graph, cutter, steps, memory=None):
    mesh = worlds.mesh()
    data = GRAPHS[graph]()
    share = pdc.partition(
        data, mesh, owners(cutter, data, mesh.size), edge_attrs=EDGES, memory=memory
    )
    _ = pdc.convert(made())(share)  # so that there are plans
    for k, (nodes, edges) in enumerate(steps):
        more, rows = growth(data, nodes, edges, seed=k)
        before = share
        share = pdc.update(share, new_edges=more, new_nodes=rows)
        assert before.num_nodes == data.num_nodes
        data = whole(data, more, rows)
    assert share.num_nodes == data.num_nodes
    for name in (*NODES, *EDGES, "edge_index"):
        assert torch.equal(share[name].full_tensor(), data[name]), name
    topology = share.edge_index.topology
    parts = topology.source_gid, topology.target_gid, topology.nodes, topology.edges
    same_plans(topology.locals, Topology(*parts).locals)
    want = numbers(made(), copy.copy(data))
    got = numbers(pdc.convert(made()), share)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


STEPS = [[(5, 30), (0, 12), (4, 0)], [(0, 9)], [(6, 1), (3, 40)]]
CASES = list(
    zip(
        itertools.cycle(GRAPHS.keys() - {"negative"}),
        itertools.cycle(CUTTERS),
        itertools.cycle(STEPS),
        [k % 4 + 1 for k in range(24)],
        strict=False,
    )
)


def test_what_grew_is_the_share_of_the_new_graph():
    for case in (("directed", "random"), ("isolated", "empty_rank")):
        worlds.run(updated, 2, *case, STEPS[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("graph", "cutter", "steps", "size"), sorted(CASES, key=str))
def test_every_graph_grows(graph, cutter, steps, size):
    worlds.run(updated, size, graph, cutter, steps)


@tiers.parametrize("size", [1, 2, 3], slice(0, 0))
def test_graphs_grow_within_a_memory_cap(size):
    worlds.run(updated, size, "directed", "random", STEPS[0], "4KiB")


def counted():
    mesh = worlds.mesh()
    data = GRAPHS["directed"](400, 2000)
    share = pdc.partition(data, mesh, "random")
    halo = share.edge_index.topology.locals.halo
    more, rows = growth(data, 3, 20)
    mesh.ledger.reset()
    share = pdc.update(share, new_edges=more, new_nodes=rows)
    grown = share.edge_index.topology.locals.halo
    fresh = int(sum(grown.send_counts) - sum(halo.send_counts))
    # of each ghost that is new, the id; nothing of those that were known
    assert mesh.ledger.words("update") == fresh
    return fresh, halo.num_ghosts


def test_only_new_ghosts_are_asked_for():
    for fresh, ghosts in worlds.run(counted, 2):
        assert fresh < 20 < ghosts


def placed():
    mesh = worlds.mesh()
    data = GRAPHS["edgeless"]()
    share = pdc.partition(data, mesh, [0] * 2 + [1] * 10)
    rows = growth(data, 3, 0)[1]
    more = growth(data, 3, 2)[0]
    more["edge_index"] = torch.tensor([[0, 13], [12, 12]])
    share = pdc.update(share, new_edges=more, new_nodes=rows)
    first = share.edge_index.nodes.partition.owner[12:].tolist()
    share = pdc.update(share, new_nodes=rows, owner=[1, 1, 0])
    return first, share.edge_index.nodes.partition.owner[15:].tolist()


def test_new_nodes_join_their_neighbours():
    assert worlds.run(placed, 2) == [([0, 0, 0], [1, 1, 0])] * 2


def refused():
    mesh = worlds.mesh()
    data = GRAPHS["directed"]()
    share = pdc.partition(data, mesh, "random", edge_attrs=EDGES)
    more, rows = growth(data, 2, 5)
    wrong = [
        ({"new_edges": more["edge_index"]}, "give new_edges a 'edge_attr', [5, 3] of"),
        ({"new_nodes": 2}, "give new_nodes a"),
        ({"new_nodes": rows | {"x": rows["x"].float()}}, "new x must be [2, 7] of"),
        ({"new_nodes": rows | {"z": rows["x"]}}, "new_nodes has 'z', but the nodes"),
        ({"new_nodes": rows | {"x": rows["x"][:1]}}, "as many rows in each attribute"),
        ({"new_edges": more | {"edge_index": torch.tensor([[0], [99]])}}, "must be [1"),
        ({"new_edges": more | {"edge_index": more["edge_index"] + 58}}, "0 .. 59"),
        ({"new_nodes": rows, "owner": [0, 7]}, "owner must be a rank below 2"),
        ({"new_nodes": -1}, "new_nodes must be a number of nodes"),
    ]
    if mesh.rank:
        more = more | {"edge_weight": more["edge_weight"] + 1}
    wrong.append(
        ({"new_edges": more, "new_nodes": rows}, "the same nodes and edges on")
    )
    for call, text in wrong:
        with pytest.raises(ValueError, match=r".") as error:
            pdc.update(share, **call)
        assert text in str(error.value), (text, str(error.value))
    with pytest.raises(TypeError, match=r"changed before pdc\.partition"):
        pdc.update(data, new_nodes=1)
    return True


def test_mistakes_are_named_on_all_ranks():
    assert all(worlds.run(refused, 2))

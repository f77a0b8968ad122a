"""The planner: bytes of an epoch as the ledger counts them, before anything is sent."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
import worlds
from problems import GRAPHS, grids, owners
from torch_geometric.nn import GATConv, GINConv

import pyg_distcomm as pdc
from pyg_distcomm.constants import ORDERS, Ordering
from pyg_distcomm.nn import DistGCNConv, DistSAGEConv
from pyg_distcomm.plan.planner import plan
from pyg_distcomm.plan.training import training_of, training_of_model

WIDTHS = (7, 5, 9, 4)
LAYERS = {"gcn": DistGCNConv, "sage": DistSAGEConv}
SWITCHES = list(itertools.product(ORDERS, (True, False), (False, True)))


class Net(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x, edge_index):
        for layer in self.layers[:-1]:
            x = layer(x, edge_index).relu()
        return self.layers[-1](x, edge_index)


def stack(layer, widths):
    return Net([layer(a, b) for a, b in itertools.pairwise(widths)]).double()


def late_epoch(model, x, edges, y):
    """Trains three epochs, and returns the ledger of the last, by what travelled."""
    ledger = edges.nodes.mesh.ledger
    for _ in range(3):
        ledger.reset()
        model.zero_grad()
        out = model(x, edges)
        F.cross_entropy(out, y % out.size(1)).backward()
    names = {op for op, _ in ledger.entries}
    sums = ledger.bytes("all_reduce")
    return {
        "exchange": ledger.bytes() - sums,
        "parameters": ledger.bytes("all_reduce", "data"),
        "rest": ledger.bytes("all_reduce", "world"),
        "messages": ledger.messages() - ledger.messages("all_reduce"),
        "names": sorted(names),
    }


def trained(grid, graph, owner, layer, switches):
    mesh = worlds.mesh(grid=grid)
    data = GRAPHS[graph]()
    share = pdc.partition(data, mesh, owner)
    torch.manual_seed(0)
    model = pdc.replicate(stack(LAYERS[layer], WIDTHS), mesh)
    found = []
    for order, keep, oblivious in switches:
        edges = share.edge_index.oblivious() if oblivious else share.edge_index
        edges = edges.with_ordering(order, keep_inputs=keep)
        found.append(late_epoch(model, share.x, edges, share.y))
    return found


def same_as_ledger(size, grid, graph, cutter, layer, switches):
    data = GRAPHS[graph]()
    owner = owners(cutter, data, size)
    plans = plan(
        data, WIDTHS, size, partition=owner, layers=layer, dtype=torch.float64, grid=grid
    )
    training = training_of(WIDTHS, layer, itemsize=8)
    counted = worlds.run(trained, size, grid, graph, owner, layer, switches)
    for k, (order, keep, oblivious) in enumerate(switches):
        orders = training.orders(Ordering(order, keep))
        halo = grid[:2] != (1, 1)  # else there is nothing to be oblivious of
        one = plans.of(grid, orders=orders, oblivious=oblivious and halo)
        rest = one.sum_bytes["loss"] + one.sum_bytes["norms"]
        messages = []
        for rank, each in enumerate(counted):
            got = each[k]
            sums = one.sum_bytes["parameters"] + rest
            assert got["exchange"] == one.bytes_by_rank[rank] - sums, (rank, one, got)
            assert got["parameters"] == one.sum_bytes["parameters"]
            assert got["rest"] == rest
            messages.append(got["messages"])
        assert max(messages) == one.messages
        assert one.total_bytes == sum(one.bytes_by_rank)


CASES = [
    (1, "undirected", "block", "gcn"),
    (2, "directed", "random", "sage"),
    (3, "loops_and_copies", "empty_rank", "gcn"),
    (4, "star", "lopsided", "gcn"),
    (4, "directed", "metis", "gcn"),
    (6, "isolated", "random", "sage"),
    (6, "undirected", "ldg", "gcn"),
    (8, "tiny", "block", "gcn"),
    (8, "directed", "random", "gcn"),
]


@pytest.mark.parametrize(("size", "graph", "cutter", "layer"), CASES)
def test_bytes_are_those_of_the_ledger_on_every_grid(size, graph, cutter, layer):
    for number, grid in enumerate(grids(size)):
        # every switch on every size, a third of them on every grid
        some = [s for k, s in enumerate(SWITCHES) if k % 3 == number % 3]
        same_as_ledger(size, grid, graph, cutter, layer, some)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("cutter", ["random", "metis", "empty_rank", "lopsided"])
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("size", [2, 3, 4, 6, 8])
def test_bytes_of_every_graph(size, graph, cutter, layer):
    for grid in grids(size):
        same_as_ledger(size, grid, graph, cutter, layer, SWITCHES)

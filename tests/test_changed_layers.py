"""Layers that a user has changed: another linear layer, hooks, a `propagate` of their own."""

from __future__ import annotations

from functools import partial

import alike
import batches
import pytest
import tiers
import torch
import torch_geometric.nn as pyg
import worlds
from problems import GRAPHS, grids
from test_step import agree

import pyg_distcomm as pdc
from pyg_distcomm.loader import DistNeighborLoader, LoaderOptions

pytestmark = pytest.mark.usefixtures("place")

WIDTH = 7  # features of the problems' graphs


class Twice:
    """Doubles what a layer propagates."""

    def propagate(self, edge_index, **given):
        return 2 * super().propagate(edge_index, **given)


TwiceSAGE, TwiceGraph, TwiceGAT, TwiceOfOurs = (
    type(f"Twice{kind.__name__}", (Twice, kind), {})
    for kind in (pyg.SAGEConv, pyg.GraphConv, pyg.GATConv, pdc.nn.SAGEConv)
)


class CentredGraph(pyg.GraphConv):
    def message(self, x_j):
        return x_j - x_j.mean(0)


def biased(name):
    def change(conv):
        lin = getattr(conv, name)
        setattr(conv, name, torch.nn.Linear(WIDTH, lin.out_channels))

    return change


def patched(name):
    def change(conv):
        part = getattr(conv, name)
        inner = part.forward
        part.forward = lambda *args, **given: 2 * inner(*args, **given)

    return change


def hooked(name):
    def change(conv):
        part = getattr(conv, name)
        part.register_forward_hook(lambda module, given, out: 2 * out)

    return change


def centred(name):
    def change(conv):
        part = getattr(conv, name)
        part.register_forward_hook(lambda module, given, out: out - out.mean(0))

    return change


def own_propagate(conv):
    inner = conv.propagate
    conv.propagate = lambda *args, **given: 2 * inner(*args, **given)


def own_update(conv):
    conv.update = lambda out: out - out.mean(0)


MEAN = pyg.MeanAggregation()
CHANGES = {
    "gcn linear with bias": (pyg.GCNConv, biased("lin")),
    "gcn linear patched": (pyg.GCNConv, patched("lin")),
    "gcn sum hooked": (pyg.GCNConv, hooked("aggr_module")),
    "gcn own propagate": (pyg.GCNConv, own_propagate),
    "sage root with bias": (pyg.SAGEConv, biased("lin_r")),
    "sage linear patched": (pyg.SAGEConv, patched("lin_l")),
    "sage mean hooked": (pyg.SAGEConv, hooked("aggr_module")),
    "sage own propagate": (pyg.SAGEConv, own_propagate),
    "sage class with propagate": (TwiceSAGE, None),
    "our class with propagate": (TwiceOfOurs, None),
    "graph class with propagate": (TwiceGraph, None),
    "graph class with message": (CentredGraph, None),
    "graph own update": (pyg.GraphConv, own_update),
    "sage projects": (partial(pyg.SAGEConv, aggr=MEAN, project=True), None),
    "graph sum hooked": (pyg.GraphConv, hooked("aggr_module")),
    "gat class with propagate": (TwiceGAT, None),
    "gat linear with bias": (pyg.GATConv, biased("lin")),
    "gat linear hooked": (pyg.GATConv, centred("lin")),
    "gat sum hooked": (pyg.GATConv, hooked("aggr_module")),
}


def made(name, plain=False):
    kind, change = CHANGES[name]
    kind = TwiceSAGE if plain and kind is TwiceOfOurs else kind
    torch.manual_seed(2)
    conv = kind(WIDTH, 4)
    if change is not None:
        change(conv)
    return conv.double()


@tiers.parametrize(
    ("size", "grid"), [(n, grid) for n in (2, 3) for grid in grids(n)], slice(3)
)
@worlds.on()
def test_changed_layers_on_ranks_are_what_they_were_changed_to(size, grid):
    data = GRAPHS["directed"]()
    mesh = worlds.mesh(grid=grid)
    share = pdc.partition(data, mesh, "random")
    for name in CHANGES:
        plain, ours = made(name, plain=True), pdc.convert(made(name))
        found = []
        for layer, given in ((plain, data), (ours, share)):
            x = given.x.clone().requires_grad_()
            out = layer(x, given.edge_index)
            out.square().sum().backward()
            found.append([out, x.grad, *(p.grad for p in layer.parameters())])
        alike.same(found[1], found[0], name)


@pytest.mark.parametrize("name", CHANGES)
def test_changed_layers_of_minibatches_are_what_they_were_changed_to(name):
    class Model(torch.nn.Module):
        def __init__(self, plain):
            super().__init__()
            self.conv, self.last = made(name, plain), pyg.SAGEConv(4, 3).double()

        def forward(self, x, edge_index):
            return self.last(self.conv(x, edge_index).relu(), edge_index)

    data = batches.graph()
    data.x = torch.randn(data.num_nodes, WIDTH, dtype=torch.float64)
    wanted, ours = Model(plain=True), pdc.convert(Model(plain=False))
    ours.load_state_dict(wanted.state_dict())
    given = {"input_nodes": torch.arange(9), "options": LoaderOptions(seed=2)}
    for batch in DistNeighborLoader(data, [4, 3], batch_size=3, **given):
        rows = slice(batch.batch_size)
        agree(ours, wanted, rows, batch.edge_index, x=batch.x)

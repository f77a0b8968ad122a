"""What PyG's own layers and plain tensors move on a share, and what one rank does alone."""

from __future__ import annotations

import alike
import pytest
import tiers
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
import worlds
from problems import owners
from torch_geometric.data import Data

import pyg_distcomm as pdc

N, E, WIDE = 60, 300, 4
sizes = tiers.parametrize("size", [2, 3], [3])


def _graph():
    torch.manual_seed(0)
    data = Data(x=torch.randn(N, WIDE), edge_index=torch.randint(N, (2, E)))
    data.kind, data.edge_attr = torch.randint(3, (E,)), torch.randn(E, 3)
    return data.apply(lambda t: t.double() if t.is_floating_point() else t)


def _steps(model, data, leaves, mesh=None):
    """Returns output and gradients of the third of three equal steps."""
    given = [data[name].detach().requires_grad_() for name in leaves]
    for _ in range(3):
        if mesh is not None:
            mesh.ledger.reset()
        for leaf in (*given, *model.parameters()):
            leaf.grad = None
        found = model(data, *given)
        found.sin().sum().backward()
    grads = [leaf.grad for leaf in (*given, *model.parameters())]
    moved = {}
    if mesh is not None:
        moved = {op: mesh.ledger.words(op) for op, _ in mesh.ledger.entries}
    return [alike.whole(t) for t in (found.detach(), *grads)], moved


class _On(torch.nn.Module):
    def __init__(self, make, run):
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.run = make().double(), run

    def forward(self, data, *given):
        return self.run(self.layer, data, *given)


class _Table(torch.nn.Module):
    """Holds a plain row for each node, read by ids and in place."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(N, WIDE))

    def forward(self, data):
        source, target = data.edge_index
        rows = F.embedding(source, self.weight)
        return (data.x + self.weight).index_add(0, target, rows)


CASES = {  # how often the halo travels there and back in a step, and leaves
    "MFConv": (lambda: pyg.MFConv(WIDE, 3), 1, ("x",)),
    "GATConv": (lambda: pyg.GATConv(WIDE, WIDE, edge_dim=3), None, ("x", "edge_attr")),
    "PDNConv": (lambda: pyg.PDNConv(WIDE, 3, 3, 2), None, ("x", "edge_attr")),
    "table": (_Table, 0, ()),
}


def _run(layer, data, *given):
    return layer(data) if not given else layer(given[0], data.edge_index, *given[1:])


@sizes
@pytest.mark.parametrize("name", CASES)
@worlds.on()
def test_layers_of_pyg_gather_nothing_in_a_step(name, size):
    make, times, leaves = CASES[name]
    mesh, data = worlds.mesh(), _graph()
    share = pdc.partition(data, mesh, owners("random", data, mesh.size))
    want, _ = _steps(_On(make, _run), data, leaves)
    got, moved = _steps(_On(make, _run), share, leaves, mesh)
    alike.same(got, want)
    assert not [op for op in moved if op.startswith("gather")], moved
    if times is not None:
        halo = share.edge_index.topology.locals.halo
        assert moved.get("halo", 0) == times * halo.price(WIDE).words
        assert moved.get("halo_reduce", 0) == times * halo.price_transpose(WIDE).words


@sizes
@worlds.on()
def test_degrees_orders_and_parts_travel_no_further_than_needed(size):
    mesh, data = worlds.mesh(), _graph()
    share = pdc.partition(data, mesh, owners("random", data, mesh.size))
    here = len(share.x.to_local())
    mesh.ledger.reset()
    found = torch.zeros(N).index_add_(0, share.edge_index[1], torch.ones(E))
    assert mesh.ledger.bytes("all_gather") == N - here  # degrees as bytes
    torch.testing.assert_close(
        found, torch.zeros(N).index_add_(0, data.edge_index[1], torch.ones(E))
    )
    mesh.ledger.reset()
    torch.testing.assert_close(share.x.full_tensor(), data.x)
    assert mesh.ledger.words() == (N - here) * WIDE  # no order of rows: all know owners
    both = torch.cat([share.x[share.edge_index[0]], share.x[share.edge_index[1]]])
    mesh.ledger.reset()
    one, other = both.split(E)
    torch.testing.assert_close(
        (one - other).full_tensor(),
        data.x[data.edge_index[0]] - data.x[data.edge_index[1]],
    )
    assert not mesh.ledger.words("halo")  # the parts lie as before they were joined


# What one rank does alone ----------------------------------------------------------------


def _written(how):
    mesh, data = worlds.mesh(fresh=True), _graph()
    share = pdc.partition(data, mesh, owners("random", data, mesh.size))
    table, ids = torch.arange(N), torch.tensor([1, 5, 7, 30])
    h = share.x.double() * 2
    with pytest.raises(ValueError, match=r"\[60\]|\[4\]") as told:  # noqa: PT012
        for step in range(3):
            if step == 2 and mesh.rank == 0:
                table[3] = ids[0] = 9
            if how == "table":
                h[table[share.edge_index][0]].sum()
            else:
                h[ids].sum()
            h[share.edge_index[0]].sum()
    return str(told.value)


@sizes
@pytest.mark.parametrize("how", ["table", "ids"])
def test_what_one_rank_alone_writes_to_is_named_on_all(how, size):
    words = {"table": "index() reads", "ids": "that index() got"}[how]
    assert all(words in told for told in worlds.run(_written, size, how))
    worlds.only(0)  # messages are left over


def _last(x):
    return torch.linalg.eigh(x)[0].sum()


def _largest(x):
    return torch.linalg.svd(x)[1].sum()


@sizes
@pytest.mark.parametrize("op", [_last, _largest])
@worlds.on()
def test_a_matrix_that_has_no_values_is_an_error_on_all_ranks(op, size):
    mesh, data = worlds.mesh(), _graph()
    data.square = torch.randn(N, 3, 3).double()
    share = pdc.partition(data, mesh, owners("random", data, mesh.size))
    square = share.square @ share.square.mT
    torch.testing.assert_close(op(square), op(data.square @ data.square.mT))
    share.square[17] = torch.nan
    with pytest.raises(RuntimeError, match=r"rank \d: .*linalg"):
        op(share.square)

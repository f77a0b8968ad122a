"""Dropout: masks depend on the seed, the call and the row, never on the ranks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tiers
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
import worlds
from layers import F as WIDTH
from layers import problem
from test_layers import _in_doubles, _parameter_grads, shared, step
from torch.utils.checkpoint import checkpoint

import pyg_distcomm as pdc
from pyg_distcomm import kernels
from pyg_distcomm.comm import random
from pyg_distcomm.comm.rows import Rows

pytestmark = pytest.mark.usefixtures("place")

X = ("x", "edge_index")
W = ("x", "edge_index", "edge_weight")


class OnNodes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = pyg.GCNConv(WIDTH, 6)
        self.drop, self.last = torch.nn.Dropout(0.3), pyg.SAGEConv(6, 4)

    def forward(self, x, edge_index):
        x = F.dropout(x, 0.5, self.training)
        return self.last(self.drop(self.conv(x, edge_index).relu()), edge_index)


class OnEdgesTwice(pyg.MessagePassing):
    """Messages dropped by edge, twice in one call, one of them in the update."""

    def __init__(self):
        super().__init__(aggr="sum")
        self.lin = torch.nn.Linear(WIDTH, 5)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=F.dropout(self.lin(x), 0.2, self.training))

    def message(self, x_j):
        return F.dropout(F.dropout(x_j, 0.3, self.training), 0.4, self.training)

    def update(self, inputs):
        return F.dropout(inputs, 0.25, self.training)


def _attention(kind, **kwargs):
    return lambda: getattr(pyg, kind)(WIDTH, 3, heads=2, dropout=0.6, **kwargs)


LAYERS = {
    "nodes": (OnNodes, X),
    "edges twice": (OnEdgesTwice, X),
    "GATConv": (_attention("GATConv"), X),
    "GATConv edges": (_attention("GATConv", edge_dim=3), (*X, "edge_attr")),
    "GATConv bare": (_attention("GATConv", add_self_loops=False), X),
    "GATv2Conv": (_attention("GATv2Conv"), X),
    "GATv2Conv back": (_attention("GATv2Conv", flow="target_to_source"), X),
    "TransformerConv": (_attention("TransformerConv"), X),
    "APPNP": (lambda: pyg.APPNP(3, 0.1, dropout=0.4), W),
    "FAConv": (lambda: pyg.FAConv(WIDTH, dropout=0.3), ("x", "x0", "edge_index")),
    "GCN": (lambda: pyg.models.GCN(WIDTH, 8, 3, 4, dropout=0.5, norm="batch"), X),
    "GAT": (lambda: pyg.models.GAT(WIDTH, 8, 2, 4, heads=2, dropout=0.5), X),
}


def trained(name, graph, cutter, training=True):
    """What one step computes, on every rank in full."""
    return _in_doubles(_trained, name, graph, cutter, training)


def _trained(name, graph, cutter, training):
    make, names = LAYERS[name]
    mesh = worlds.mesh()
    share = shared(problem(graph), mesh, cutter)
    torch.manual_seed(4)
    model = pdc.convert(make().double()).train(training)
    found = step(model, share, names)
    found.update(_parameter_grads(model))
    return {
        key: (v.full_tensor() if isinstance(v, pdc.DistTensor) else v)
        .detach()
        .cpu()
        .cpu()
        .numpy()
        for key, v in found.items()
        if v is not None
    }


def _same(got, want):
    assert got.keys() == want.keys()
    for key, value in got.items():
        a, b = torch.as_tensor(value), torch.as_tensor(want[key])
        torch.testing.assert_close(
            a, b, rtol=1e-9, atol=1e-9, msg=lambda t, k=key: k + t
        )


RANKS = [(2, "random"), (3, "empty_rank"), (4, "metis")]


@tiers.cover(
    ("name", "graph", "ranks"),
    [*LAYERS],
    ["directed", "loops_and_copies"],
    RANKS,
    step=3,
)
def test_ranks_and_cutters_do_not_change_the_masks(name, graph, ranks):
    size, cutter = ranks
    want = worlds.run(trained, 1, name, graph, "random")[0]
    for got in worlds.run(trained, size, name, graph, cutter):
        _same(got, want)


def in_both_forms(name):
    """Output, gradients and bytes of PyG's layer and of ours, from the same draws."""
    make, names = LAYERS[name]
    mesh, found = worlds.mesh(), []
    share = shared(problem("loops_and_copies"), mesh, "random")
    for form in (lambda layer: layer, pdc.convert):
        torch.manual_seed(4)
        layer = form(make().double())
        x = share.x.detach().clone().requires_grad_()
        mesh.step = 7
        mesh.ledger.reset()
        out = layer(x, *(share[name] for name in names[1:]))
        out.square().sum().backward()
        values = out, x.grad, *(p.grad for p in layer.parameters())
        values = [
            v.full_tensor() if isinstance(v, pdc.DistTensor) else v for v in values
        ]
        found.append(([v.detach().cpu() for v in values], mesh.ledger.bytes()))
    return found


@pytest.mark.parametrize("name", [n for n in LAYERS if n.endswith("Conv")])
@pytest.mark.parametrize("size", [1, 3])
def test_our_layers_draw_the_masks_of_pygs_and_send_no_more(name, size):
    for (want, most), (got, sent) in worlds.run(in_both_forms, size, name):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
        assert sent <= most


def undropped(make, names):
    torch.manual_seed(4)
    found = step(make().double().eval(), problem("directed"), names)
    return {k: v.detach().cpu().numpy() for k, v in found.items()}


@tiers.parametrize("name", [*LAYERS], slice(0, None, 3))
def test_eval_drops_nothing(name):
    want = _in_doubles(undropped, *LAYERS[name])
    got = worlds.run(trained, 3, name, "directed", "random", False)[0]
    _same({k: v for k, v in got.items() if k in want}, want)


def masks():
    """The mask of dropout on a DistTensor, and what the kernel says it must be."""
    mesh = worlds.mesh()
    share = shared(problem("directed"), mesh, "random")
    ones = torch.ones_like(share.x)
    drawn = [F.dropout(ones, 0.5).full_tensor() for _ in range(2)]
    gid = torch.arange(share.x.rows.total)
    plain = torch.ones(len(gid), WIDTH, dtype=torch.float64)
    told = [kernels.keyed_dropout(plain, random.fold(0, k), gid, 0.5) for k in (1, 2)]
    return [d.cpu().numpy() for d in drawn], [t.numpy() for t in told]


def test_masks_are_those_of_the_kernel():
    for drawn, told in worlds.run(masks, 3):
        assert (drawn[0] == told[0]).all()
        assert (drawn[1] == told[1]).all()
        assert (drawn[0] != drawn[1]).any()


def slopes():
    """Numbers, what dropout made of them, and their gradients."""
    share = shared(problem("directed"), worlds.mesh(), "random")
    x = share.x.detach().abs().add(1.0).requires_grad_()
    y = F.dropout(x, 0.3)
    (y * x.detach()).sum().backward()
    return [t.detach().full_tensor().cpu().numpy() for t in (y, x, x.grad)]


@pytest.mark.parametrize("size", [1, 3])
def test_gradients_go_where_numbers_were_kept(size):
    for y, x, slope in worlds.run(slopes, size):
        assert 0 < (y == 0).sum() < y.size
        np.testing.assert_allclose(y, (y != 0) * x / 0.7, rtol=1e-12)
        np.testing.assert_allclose(slope, (y != 0) * x / 0.7, rtol=1e-12)


def test_rates_are_kept_and_calls_are_independent():
    mesh = worlds.mesh()
    rows = Rows.blocks(20_000, mesh)
    ones = pdc.DistTensor.wrap(torch.ones(20_000, 4), rows)
    for p in (0.1, 0.5, 0.9):
        first, second = F.dropout(ones, p).to_local(), F.dropout(ones, p).to_local()
        spread = (p * (1 - p) / ones.numel()) ** 0.5
        for drawn in (first, second):
            assert abs((drawn == 0).double().mean() - p) < 5 * spread
            assert torch.all((drawn == 0) | (drawn == torch.tensor(1 / (1 - p))))
        both = ((first == 0) & (second == 0)).double().mean()
        assert abs(both - p * p) < 5 * (p * p * (1 - p * p) / ones.numel()) ** 0.5
        columns = (first == 0).double().T
        assert torch.corrcoef(columns).fill_diagonal_(0).abs().max() < 0.05


class KeepsMessages(pyg.MessagePassing):
    """Keeps the messages it drops, to look at."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        self.kept = F.dropout(torch.ones_like(x_j), 0.5)
        return self.kept


def parallel():
    mesh = worlds.mesh()
    data = problem("directed")
    data.edge_index = torch.tensor([[0, 1], [1, 0]]).repeat(1, 120)
    share = shared(data, mesh, "random")
    conv = KeepsMessages()
    pdc.nn.HaloConv(conv)(share.x, share.edge_index)
    return conv.kept.rows.gid.numpy(), conv.kept.to_local().cpu().numpy()


@pytest.mark.parametrize("size", [1, 2])
def test_parallel_edges_draw_on_their_own(size):
    found = worlds.run(parallel, size)
    kept = {
        int(g): row.tolist() for gid, m in found for g, row in zip(gid, m, strict=True)
    }
    assert len(kept) == 240
    differ = [kept[a] != kept[b] for a, b in itertools.pairwise(sorted(kept)[::2])]
    assert sum(differ) > 0.95 * len(differ)


class Checkpointed(torch.nn.Module):
    def __init__(self, model, reentrant):
        super().__init__()
        self.model, self.reentrant = model, reentrant

    def forward(self, *args):
        if self.reentrant is None:
            return self.model(*args)
        return checkpoint(self.model, *args, use_reentrant=self.reentrant)


def recomputed(name, reentrant):
    return _in_doubles(_recomputed, name, reentrant)


def _recomputed(name, reentrant):
    make, names = LAYERS[name]
    mesh = worlds.mesh()
    share = shared(problem("directed"), mesh, "random")
    torch.manual_seed(4)
    model = Checkpointed(pdc.convert(make().double()), reentrant)
    found = step(model, share, names)
    found.update(_parameter_grads(model))
    return {
        k.replace("model.", ""): (
            v.full_tensor() if isinstance(v, pdc.DistTensor) else v
        )
        .detach()
        .cpu()
        .numpy()
        for k, v in found.items()
        if v is not None and "running" not in k and "tracked" not in k
    }


@tiers.cover(
    ("name", "reentrant"),
    ["nodes", "GATConv", "APPNP", "edges twice", "GAT"],
    [True, False],
)
def test_recomputation_repeats_the_masks(name, reentrant):
    want = worlds.run(recomputed, 1, name, None)[0]
    for size in (1, 3):
        for got in worlds.run(recomputed, size, name, reentrant):
            _same(got, want)

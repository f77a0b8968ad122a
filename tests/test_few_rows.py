"""Graphs and node types of no node, or of one: what one process makes of them, or its error."""

from __future__ import annotations

import itertools

import alike
import pytest
import tiers
import torch
import torch_geometric.nn as pyg
import worlds
from torch_geometric.data import Data, HeteroData

import pyg_distcomm as pdc

pytestmark = pytest.mark.usefixtures("place")

SIZES = (1, 2, 3)
WIDE = 8


def _found(model, *args):
    """Returns outputs and gradients of two steps in training, and outputs in evaluation."""
    found = []
    for training in (True, True, False):
        model.train(training)
        out = model(*args)
        rows = list(out.values()) if isinstance(out, dict) else [out]
        sum(x.square().sum() for x in rows).backward()
        found += rows
    found += [p.grad for p in model.parameters()]
    return found, list(model.buffers())


def _compare(make, one, many):
    """Compares a model on a share with PyG's on the whole, or their errors."""
    ends = []
    for args, run in ((one, lambda m: m), (many, pdc.convert)):
        torch.manual_seed(0)
        model = run(make().double())
        try:
            ends.append(_found(model, *args))
        except ValueError as error:
            ends.append(str(error))
    want, got = ends
    if isinstance(want, str):
        assert got == want
        return
    for wanted, found in zip(want, got, strict=True):
        for a, b in zip(wanted, found, strict=True):
            if a is None or b is None:  # of no row
                assert a is b or not (b if a is None else a).any()
            else:
                alike.same(b, a)


LAYERS = {
    **{
        f"GPSConv, {norm}": lambda norm=norm: pyg.GPSConv(
            WIDE, pyg.SAGEConv(WIDE, WIDE), heads=2, norm=norm
        )
        for norm in ("layer_norm", "batch_norm", "pair_norm")
    },
    "GPSConv, performer": lambda: pyg.GPSConv(
        WIDE, None, heads=2, norm=None, attn_type="performer"
    ),
    "attention": lambda: _Attention(),
    "GATConv": lambda: pyg.GATConv(WIDE, WIDE, heads=2),
    "GINConv": lambda: pyg.GINConv(torch.nn.Linear(WIDE, WIDE)),
    "EdgeCNN": lambda: pyg.EdgeCNN(WIDE, WIDE, 2, norm="batch_norm"),
}


class _Attention(torch.nn.Module):
    """Attends to all nodes, as rows of one batch."""

    def __init__(self):
        super().__init__()
        self.attend = torch.nn.MultiheadAttention(WIDE, 2, batch_first=True)

    def forward(self, x, edge_index):
        rows = x.unsqueeze(0)
        return self.attend(rows, rows, x[None])[0].squeeze(0) + x


@tiers.parametrize(
    ("size", "edges"), itertools.product(SIZES, [0, 2]), [(2, 2), (3, 0)]
)
@worlds.on()
def test_layers_on_one_node(size, edges):
    mesh = worlds.mesh()
    x = torch.randn(1, WIDE, generator=torch.Generator().manual_seed(0))
    data = Data(x=x.double(), edge_index=torch.zeros(2, edges, dtype=torch.long))
    share = pdc.partition(data, mesh, torch.tensor([mesh.size - 1]))
    torch.testing.assert_close(
        share.x[None].full_tensor(), data.x[None].to(share.x.device)
    )
    for make in LAYERS.values():
        _compare(make, (data.x, data.edge_index), (share.x, share.edge_index))


NORMS = {
    "BatchNorm1d": lambda: torch.nn.BatchNorm1d(4),
    "cumulative": lambda: torch.nn.BatchNorm1d(4, momentum=None, affine=False),
    "untracked": lambda: torch.nn.BatchNorm1d(4, track_running_stats=False),
    "single": lambda: pyg.BatchNorm(4, allow_single_element=True),
    "DiffGroupNorm": lambda: pyg.DiffGroupNorm(4, 2),
    "LayerNorm": lambda: pyg.LayerNorm(4),
    "GraphNorm": lambda: pyg.GraphNorm(4),
}


class _Normed(torch.nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.first, self.norm = pyg.SAGEConv(4, 4), norm
        self.last = pyg.SAGEConv(4, 4)

    def forward(self, x, edge_index):
        return self.last(self.norm(self.first(x, edge_index)).relu(), edge_index)


@tiers.parametrize(
    ("size", "nodes"),
    itertools.product(SIZES, [0, 1, 2]),
    [(2, 1), (3, 0)],
)
@worlds.on()
def test_norms_of_a_node_type_with_few_rows(size, nodes):
    """Compares models on nodes of two types, of which the second has few."""
    mesh, g, data = worlds.mesh(), torch.Generator().manual_seed(0), HeteroData()
    counts = {"a": 9, "b": nodes}
    for kind, n in counts.items():
        data[kind].x = torch.randn(n, 4, generator=g).double()
    ends = [
        torch.randint(n or 1, (12 if nodes else 0,), generator=g) for n in (9, nodes)
    ]
    data["a", "to", "b"].edge_index = torch.stack(ends)
    data["b", "of", "a"].edge_index = torch.stack(ends[::-1])
    data["a", "by", "a"].edge_index = torch.randint(9, (2, 20), generator=g)
    owners = {k: torch.arange(n) % mesh.size for k, n in counts.items()}
    share = pdc.partition(data, mesh, owners)
    one, many = ((d.x_dict, d.edge_index_dict) for d in (data, share))
    for norm in NORMS.values():
        _compare(lambda k=norm: pyg.to_hetero(_Normed(k()), data.metadata()), one, many)

"""DistGCN2Conv against PyG's own layer."""

from __future__ import annotations

import copy

import pytest
import tiers
import torch
import worlds
from problems import GRAPHS, grids
from torch_geometric.nn import GCN2Conv

import pyg_distcomm as pdc
from pyg_distcomm.nn import DistGCN2Conv

pytestmark = pytest.mark.usefixtures("place")

KINDS = {
    "plain": {},
    "unshared": {"shared_weights": False, "cached": True},
    "raw": {"normalize": False},
    "loopless": {"add_self_loops": False},
    "turned": {"flow": "target_to_source"},
    "mean": {"aggr": "mean"},
}


def _compare(kind, graph, grid, weighted):
    data = GRAPHS[graph]()
    torch.manual_seed(2)
    plain = GCN2Conv(7, 0.2, 0.5, 3, **KINDS[kind]).double()
    first = torch.randn(data.num_nodes, 7, dtype=torch.float64)
    data.first = first
    share = pdc.partition(data, worlds.mesh(grid=grid), "random")
    conv = pdc.convert(copy.deepcopy(plain))
    assert type(conv) is DistGCN2Conv
    found = []
    for layer, d in ((plain, data), (conv, share)):
        x, x0 = d.x.clone().requires_grad_(), d.first.clone().requires_grad_()
        weight = [d.edge_weight.clone().requires_grad_()] if weighted else []
        out = layer(x, x0, d.edge_index, *weight)
        out.square().sum().backward()
        found.append([out.detach(), x.grad, x0.grad, *(w.grad for w in weight)])
        grads = [p.grad for p in layer.parameters()]
        size = 1 if layer is plain else share.edge_index.nodes.mesh.size
        if size > 1:
            grads = [
                pdc.comm.collectives.all_reduce(g, share.edge_index.nodes.mesh.world)
                / size
                for g in grads
            ]
        found[-1] += grads
    for want, got in zip(*found, strict=True):
        got = got.full_tensor() if isinstance(got, pdc.DistTensor) else got
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9, equal_nan=True)


@tiers.cover(("kind", "size"), [*KINDS], [1, 2, 4], step=3)
def test_numbers_are_those_of_pyg(kind, size):
    every = [(size, 1, 1)] if kind == "mean" else grids(size)
    for k, grid in enumerate(every):
        graph = ("directed", "loops_and_copies", "isolated")[k % 3]
        worlds.run(_compare, size, kind, graph, grid, k % 2 == 0)

"""How often the host waits for the device within a layer that has run before: never."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import second_device
import tiers
import torch
import torch_geometric.nn as pyg
import worlds
from problems import GRAPHS, owners
from torch.utils._python_dispatch import _disable_current_modes

import pyg_distcomm as pdc
from pyg_distcomm.comm import axis, collectives
from pyg_distcomm.nn import DistGCNConv, DistSAGEConv

LAYERS = {
    "GCN": lambda: DistGCNConv(7, 4),
    "SAGE": lambda: DistSAGEConv(7, 4),
    "GAT": lambda: pyg.GATConv(7, 4, heads=2, dropout=0.5),
}
MORE = {
    "SAGE max": lambda: DistSAGEConv(7, 4, aggr="max"),
    "SAGE projected": lambda: pyg.SAGEConv(7, 4, project=True, normalize=True),
    "GATv2": lambda: pyg.GATv2Conv(7, 4),
    "Transformer": lambda: pyg.TransformerConv(7, 4, dropout=0.5),
    "GIN": lambda: pyg.GINConv(torch.nn.Linear(7, 4)),
    "Graph": lambda: pyg.GraphConv(7, 4),
    "Cheb": lambda: pyg.ChebConv(7, 4, 3),
    "TAG": lambda: pyg.TAGConv(7, 4),
    "SG": lambda: pyg.SGConv(7, 4, K=2),
    "APPNP": lambda: pyg.APPNP(2, 0.1),
    "ARMA": lambda: pyg.ARMAConv(7, 4),
    "EG": lambda: pyg.EGConv(7, 4, num_heads=2, num_bases=2),
    "ClusterGCN": lambda: pyg.ClusterGCNConv(7, 4),
    "GEN": lambda: pyg.GENConv(7, 4),
    "Edge": lambda: pyg.EdgeConv(torch.nn.Linear(14, 4)),
}


def counter():
    """The dispatch mode that counts, of benchmarks/one_device.py."""
    path = Path(__file__).parents[1] / "benchmarks" / "one_device.py"
    spec = importlib.util.spec_from_file_location("one_device", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Synchronisations


def unseen(run):
    """Has what moves messages through host memory, as gloo needs it, not counted."""

    def instead(*args, **kwargs):
        with _disable_current_modes():
            return run(*args, **kwargs)

    return instead


def waits(names, place, grid=None):
    where = second_device.device() if place == "spare" else torch.device(place)
    mesh, data, found = worlds.mesh(grid=grid), GRAPHS["undirected"](), {}
    counting, check = counter(), mesh.check
    share = pdc.partition(data, mesh, owners("random", data, mesh.size)).to(where)
    staged, wait = collectives._staged, axis.Pending.wait
    collectives._staged, axis.Pending.wait = unseen(staged), unseen(wait)
    mesh.check = "never"  # of copies, in passes 1, 2, 4, 8, ...
    try:
        for name in names:
            conv = pdc.convert({**LAYERS, **MORE}[name]().double().to(where))
            x = share.x.clone().requires_grad_()
            for _ in range(2):
                conv(x, share.edge_index).sum().backward()
            with counting(device=place != "cpu") as mode:
                conv(x, share.edge_index).sum().backward()
            if mode.found:
                found[name] = mode.found
    finally:
        collectives._staged, axis.Pending.wait, mesh.check = staged, wait, check
    return found


def test_products_ask_for_no_value():
    """On the CPU, too, where masks that select edges have no places to be kept."""
    assert waits(("GCN", "SAGE", "SAGE max"), "cpu") == {}


@pytest.mark.skipif(not second_device.can_build(), reason="no C++ compiler")
@tiers.parametrize(
    ("size", "grid"), [(1, None), (2, None), (4, (2, 2, 1)), (4, (1, 2, 2))], []
)
def test_no_waits_on_a_device(size, grid):
    names = (*LAYERS, *MORE)
    assert worlds.anew(waits, size, names, "spare", grid) == [{}] * size


@pytest.mark.cuda
def test_no_waits_on_cuda():
    assert waits((*LAYERS, *MORE), "cuda") == {}

"""How often the host waits for the device within a layer that has run before: never."""

import ast
import contextlib
import importlib
import sys
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import second_device
import tiers
import torch
import torch_geometric.nn as pyg
import worlds
from problems import GRAPHS, owners, two_types
from torch.utils._python_dispatch import _disable_current_modes

import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives
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
    "AGNN": lambda: pyg.AGNNConv(),
    "ResGated": lambda: pyg.ResGatedGraphConv(7, 4),
    "GATv2 heads": lambda: pyg.GATv2Conv(7, 4, heads=3, concat=False),
}


# layers that make loops and weights of 1 anew in each call, which are known by content: so
# many comparisons at most
COMPARED = {"GAT": 1, "AGNN": 1, "TAG": 3, "SG": 4, "APPNP": 4, "ARMA": 4, "EG": 4}
COMPARED |= {"Cheb": 5, "ClusterGCN": 5}
# on the stand-in for a device, where no products run, they select edges by masks
SELECTED = {"GATv2", "GATv2 heads"}


def unexpected(found, selected=frozenset()):
    """What the host waits for beside comparisons by content, and selections by masks."""
    return {
        name: came
        for name, came in found.items()
        if came != ["equal"] * len(came) or len(came) > COMPARED.get(name, 0)
        if name not in selected or came != ["index"]
    }


def benchmark(name):
    """A module of benchmarks/, which import each other by name."""
    folder = str(Path(__file__).parents[1] / "benchmarks")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)


def counter():
    """The dispatch mode that counts, of benchmarks/one_device.py."""
    return benchmark("one_device").Synchronisations


def unseen(run):
    """Has what moves messages through host memory, as gloo needs it, not counted."""

    def instead(*args, **kwargs):
        with _disable_current_modes():
            return run(*args, **kwargs)

    return instead


@contextlib.contextmanager
def uncounted(mesh):
    """Leaves out what gloo moves through host memory, and comparisons of copies."""
    staged, wait = collectives._to_backend_device, collectives.Pending.wait
    with (
        mock.patch.object(collectives, "_to_backend_device", unseen(staged)),
        mock.patch.object(collectives.Pending, "wait", unseen(wait)),
        mock.patch.object(mesh, "check", "never"),  # in passes 1, 2, 4, 8, ...
    ):
        yield


def third(step, counting, device):
    """For what the host waits in a step that has run twice before."""
    for _ in range(2):
        step()
    under = torch._C._len_torch_dispatch_stack

    def fewer():  # layers run by products under no mode but this one
        return max(under() - 1, 0)

    seen = mock.patch.object(torch._C, "_len_torch_dispatch_stack", fewer)
    with counting(device=device) as mode, seen:
        step()
    return mode.found


def waits_of(steps, mesh, place):
    """For what the host waits in steps, by their names."""
    with uncounted(mesh):
        found = {name: third(step, counter(), place != "cpu") for name, step in steps}
    return {name: came for name, came in found.items() if came}


def step_of(conv, share, link=None):
    x = share.x.clone().requires_grad_()

    def step():
        conv(x, share.edge_index).sum().backward()
        if link is not None:
            link.step()

    return step


def waits(names, place, grid=None):
    where, mesh, data = (
        second_device.device_of(place),
        worlds.mesh(grid=grid),
        GRAPHS["undirected"](),
    )
    share = pdc.partition(data, mesh, owners("random", data, mesh.size)).to(where)
    made = (pdc.convert({**LAYERS, **MORE}[n]().double().to(where)) for n in names)
    steps = ((n, step_of(c, share)) for n, c in zip(names, made, strict=True))
    return waits_of(steps, mesh, place)


TYPED = {
    "of SAGE": lambda meta: pyg.HeteroConv(
        {edge: pyg.SAGEConv((4, 4), 6) for edge in meta[1]}
    ),
    "of GAT": lambda meta: pyg.HeteroConv(
        {edge: pyg.GATConv((4, 4), 6, add_self_loops=False) for edge in meta[1]}
    ),
    "HGT": lambda meta: pyg.HGTConv(4, 6, meta, heads=2),
    "HAN": lambda meta: pyg.HANConv(4, 6, meta, heads=2),
}


def waits_by_type(place):
    """Layers of typed nodes, and the rows of a `DistEmbedding`, as a step learns them."""
    where, mesh, data = second_device.device_of(place), worlds.mesh(), two_types()
    share = pdc.partition(data, mesh).to(where)
    plain = pdc.partition(GRAPHS["undirected"](), mesh, "random").to(where)
    table = pdc.DistEmbedding(plain.num_nodes, 7, like=plain).to(where)
    conv = pdc.convert(pyg.GCNConv(7, 4)).to(where)
    sgd = torch.optim.SGD([*table.parameters(), *conv.parameters()], lr=0.1)

    def learnt():
        sgd.zero_grad()
        conv(table(), plain.edge_index).sum().backward()
        pdc.clip_grad_norm_(torch.nn.ModuleList([table, conv]), 1.0)
        sgd.step()

    def steps():
        for name, make in TYPED.items():
            layer = pdc.convert(make(data.metadata())).to(where)

            def step(layer=layer):
                out = layer(share.x_dict, share.edge_index_dict)
                sum(y.sum() for y in out.values() if y is not None).backward()

            yield name, step
        yield "embedding", learnt

    return waits_of(steps(), mesh, place)


def test_products_ask_for_no_value():
    """On the CPU, too, where masks that select edges have no places to be kept."""
    assert waits(("GCN", "SAGE", "SAGE max"), "cpu") == {}


@pytest.mark.skipif(not second_device.can_build(), reason="no C++ compiler")
@tiers.parametrize(
    ("size", "grid"), [(1, None), (2, None), (4, (2, 2, 1)), (4, (1, 2, 2))], []
)
def test_no_waits_on_a_device(size, grid):
    names = (*LAYERS, *MORE)
    for found in worlds.anew(waits, size, names, "spare", grid):
        assert unexpected(found, SELECTED) == {}


@pytest.mark.skipif(not second_device.can_build(), reason="no C++ compiler")
@tiers.parametrize("size", [1, 2], [])
def test_no_waits_by_type_or_for_learnt_rows(size):
    assert worlds.anew(waits_by_type, size, "spare") == [{}] * size


@pytest.mark.cuda
def test_no_waits_on_cuda():
    assert waits_by_type("cuda") == {}
    assert unexpected(waits((*LAYERS, *MORE), "cuda")) == {}


# The benchmark of one CUDA device ----------------------------------------------------

ROOT = Path(__file__).parents[1]


@cache
def functions(path):
    found = ast.parse(path.read_text()).body
    return {node.name for node in found if isinstance(node, ast.FunctionDef)}


def test_sixty_tests_come_first_and_all_are_there():
    first = benchmark("device_tests")
    assert sum(number for _, number in first.FIRST) == 60
    names = [name for name, _ in first.FIRST]
    assert len(set(names)) == len(names)
    assert set(first.SMOKED) <= set(names)
    for name in names:
        file, _, function = name.partition("::")
        assert function in functions(ROOT / "tests" / file), name
    assert first.spread(list(range(10)), 4) == [0, 2, 5, 7]
    assert first.spread([1, 2], 4) == [1, 2]


def test_the_benchmark_says_that_there_is_no_device(tmp_path, capsys, monkeypatch):
    parts = benchmark("device_parts")
    monkeypatch.setattr(parts, "imported", lambda: None)
    monkeypatch.setattr(parts, "probed", lambda: ("CPU", "torch 2", False))
    assert parts.main("", ["--report", str(tmp_path / "report.md")]) == 1
    assert "no CUDA device" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())

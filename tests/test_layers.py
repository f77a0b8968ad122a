"""Every layer of PyG, on ranks, equals itself on one process, or is refused by name."""

import functools
import itertools

import alike
import places
import pytest
import second_device
import tiers
import torch
import torch_geometric.nn as pyg
import worlds
from layers import (
    AGGREGATIONS,
    EDGE_ATTRS,
    EXACT,
    NODE_ATTRS,
    NOT_LAYERS,
    OTHERS,
    F,
    T,
    W,
    X,
    chained,
    make,
    plain,
    problem,
)
from problems import owners
from torch.nn import Linear
from torch_geometric.data import Data, HeteroData

import pyg_distcomm as pdc
from pyg_distcomm.nn import HaloConv

pytestmark = pytest.mark.usefixtures("place")

CUTTERS = ("metis", "random", "empty_rank", "lopsided")
FOUR = ("directed", "loops_and_copies", "undirected", "isolated")


def _given(data, names):
    found = []
    for name in names:
        value = data.get(name) if name else None
        if name == "stacked":
            value = torch.stack([data.x, data.x0], dim=1)
        found.append(value)
    return found


def _leaves(data, names):
    wanted = [n for n in ("x", "h6", "x0", "pos", *EDGE_ATTRS) if n in names]
    if "stacked" in names:
        wanted += ["x", "x0"]
    return [n for n in wanted if data[n].is_floating_point()]


def step(conv, data, names):
    """One pass there and back: output, and the gradients of everything that has one."""
    leaves = _leaves(data, names)
    for name in leaves:
        data[name] = data[name].clone().requires_grad_()
    out = conv(*_given(data, names))
    found = {"out": out}
    (out.square().sum() + (out * out.sin()).mean()).backward()
    for name in leaves:
        found[f"grad of {name}"] = data[name].grad
    return found


def _parameter_grads(conv):
    for name, p in conv.named_parameters():  # averaged already, so equal on all ranks
        yield f"grad of parameter {name}", p.grad
    for name, b in conv.named_buffers():
        yield f"buffer {name}", b


@alike.in_doubles()
def _in_doubles(fn, *args):
    return fn(*args)


def shared(data, mesh, cutter, memory=None):
    cut = owners(cutter, data, mesh.size)
    levels = {"edge_attrs": EDGE_ATTRS, "node_attrs": NODE_ATTRS}
    return pdc.partition(data, mesh, cut, memory=memory, **levels)


def parity(
    build, names, graph, cutter, wrap=HaloConv, grid=None, memory=None, place="cpu"
):
    """Runs a layer on this rank, and asserts every piece equal to PyG's on the CPU."""
    device, data = second_device.device_of(place), problem(graph)
    single = make(build)
    want = step(single, data, names)
    want.update(_parameter_grads(single))
    share = shared(problem(graph), worlds.mesh(grid=grid), cutter, memory).to(device)
    conv = wrap(make(build)).to(device)
    got = step(conv, share, names)
    got.update(_parameter_grads(conv))
    astray = {k for k, v in got.items() if v is not None and v.device != device}
    assert not astray
    got = {key: places.home(alike.whole(value)) for key, value in got.items()}
    alike.same(got, want, graph)


def exact(name, graph, cutter, grid=None, memory=None, place="cpu"):
    build, names = EXACT[name]
    _in_doubles(parity, build, names, graph, cutter, HaloConv, grid, memory, place)


# the last case of each layer, on graphs, cutters and ranks that go round
SOME = [
    (name, FOUR[k % 4], CUTTERS[(k + k // 4) % 4], (2, 3, 2)[k % 3])
    for k, name in enumerate({name.split()[0]: name for name in EXACT}.values())
]


@pytest.mark.parametrize(("name", "graph", "cutter", "size"), SOME)
def test_exact(name, graph, cutter, size, place):
    worlds.run(exact, size, name, graph, cutter, None, None, place)


@pytest.mark.exhaustive
@pytest.mark.skipif(not second_device.can_build(), reason="no C++ compiler")
@worlds.on(2, functools.partial(worlds.anew, deadline=600))
def test_exact_on_a_second_device():
    """All but GatedGraphConv: torch's fused cell does not know the device."""
    layers = {name: name for name in EXACT if name != "GatedGraphConv"}
    run = functools.partial(exact, graph="directed", cutter="random", place="spare")
    alike.assert_none([alike.failures_of(layers, run)])


ODD = ["GATConv edges", "GINConv", "APPNP", "GENConv", "PNAConv", "ChebConv"]


@tiers.cover(("graph", "name"), ["star", "tiny", "edgeless", "negative"], ODD)
def test_exact_on_odd_graphs(name, graph, place):
    size = 4 if graph == "tiny" else 2  # of three nodes
    worlds.run(exact, size, name, graph, "random", None, None, place)


@tiers.parametrize("name", EXACT, [])
def test_exhaustive(name):
    for graph, cutter, size in itertools.product((*FOUR, "star"), CUTTERS, range(1, 5)):
        worlds.run(exact, size, name, graph, cutter)


def test_every_layer_of_pyg_is_in_the_table():
    known = {name.split()[0] for name in (*EXACT, *OTHERS)} | NOT_LAYERS.keys()
    assert set(pyg.conv.__all__) <= known


@tiers.cover(
    ("name", "wrap", "size", "where"),
    [*AGGREGATIONS],
    [HaloConv, pdc.convert],
    [3, 2],
    [("sorted directed", "empty_rank"), ("sorted undirected", "random")],
)
@worlds.on()
def test_aggregations(name, wrap, size, where):
    kwargs = dict(AGGREGATIONS[name])
    aggr = kwargs.pop("aggr", name)

    def build():
        deep = aggr == "deepsets"
        how = pyg.DeepSetsAggregation(plain(F, F), Linear(F, F)) if deep else aggr
        return pyg.SAGEConv(F, 6, aggr=how, **kwargs)

    _in_doubles(parity, build, X, *where, wrap)


GCN = {
    "plain": {},
    "improved": {"improved": True},
    "cached": {"cached": True},
    "raw": {"normalize": False},
    "no loops": {"add_self_loops": False},
    "no bias": {"bias": False},
    "mean": {"aggr": "mean"},
    "max": {"aggr": "max"},
    "back": {"flow": "target_to_source"},
    "back mean": {"flow": "target_to_source", "aggr": "mean"},
    "node_dim": {"node_dim": 0},
    "wide": {"out": 11},
    "lazy": {"lazy": True},
    "column": {"column": True},
    "back column": {"flow": "target_to_source", "column": True},
}
SAGE = {
    "plain": {},
    "sum": {"aggr": "sum"},
    "back": {"flow": "target_to_source"},
    "back max": {"flow": "target_to_source", "aggr": "max"},
    "project": {"project": True},
    "project max": {"project": True, "aggr": "max"},
    "normalize": {"normalize": True},
    "no root": {"root_weight": False},
    "no root max": {"root_weight": False, "aggr": "max"},
    "no bias": {"bias": False},
    "pair": {"pair": True},
    "pair max": {"pair": True, "aggr": "max"},
    "several": {"aggr": ["mean", "max", "std"]},
    "wide": {"out": 11},
    "lazy": {"lazy": True},
    "lazy max": {"lazy": True, "aggr": "max"},
}


@tiers.parametrize(
    ("kind", "name"),
    [*(("gcn", n) for n in GCN), *(("sage", n) for n in SAGE)],
    slice(1, None, 2),
)
@worlds.on(3)
def test_arguments_of_the_matrix_layers(kind, name):
    kwargs = dict((GCN if kind == "gcn" else SAGE)[name])
    out, lazy = kwargs.pop("out", 4), kwargs.pop("lazy", False)
    pair, column = (kwargs.pop(k, None) for k in ("pair", "column"))
    layer = pyg.GCNConv if kind == "gcn" else pyg.SAGEConv
    width = -1 if lazy else (F, F) if pair else F

    def changed(conv):
        conv = pdc.convert(conv)
        return _pairing(conv) if pair else _column(conv) if column else conv

    build = functools.partial(layer, width, out, **kwargs)
    names = W if kind == "gcn" else X
    _in_doubles(parity, build, names, "loops_and_copies", "empty_rank", changed)


def _column(conv):
    forward = conv.forward
    conv.forward = lambda x, edge_index, w: forward(x, edge_index, w.unsqueeze(1))
    return conv


def _pairing(conv):
    forward = conv.forward
    conv.forward = lambda x, edge_index: forward((x, x), edge_index)
    return conv


def gcn2(**options):
    return lambda: pyg.GCN2Conv(F, 0.2, 0.5, 3, **options), ("x", "x0", *W[1:])


# what is computed by code of our own, or in a way of its own
REWRITTEN = {
    "ARMAConv": (lambda: pyg.ARMAConv(F, 4, num_stacks=3, num_layers=2), W),
    "MFConv": (lambda: pyg.MFConv(F, 4, max_degree=3), X),
    "ARMAConv shared": (
        lambda: pyg.ARMAConv(F, 4, 2, 3, shared_weights=True, bias=False),
        X,
    ),
    "DNAConv groups": (lambda: pyg.DNAConv(F, heads=F, groups=F), ("stacked", *W[1:])),
    "SimpleConv loops": (lambda: pyg.SimpleConv("mean", combine_root="self_loop"), W),
    "RGCNConv without x": (lambda: pyg.RGCNConv(60, 4, 3), ("", *T[1:])),
    "FastRGCNConv without x": (
        lambda: pyg.FastRGCNConv(60, 4, 3, num_bases=2),
        ("", *T[1:]),
    ),
    "LabelPropagation": (lambda: pyg.LabelPropagation(3, 0.8), ("y", "edge_index")),
    "GINConv of a function": (lambda: pyg.GINConv(lambda h: h - h.mean(0)), X),
    "GCN2Conv raw": gcn2(normalize=False),
    "GCN2Conv without loops": gcn2(add_self_loops=False),
    "GCN2Conv back": gcn2(flow="target_to_source"),
    "GCN2Conv": gcn2(shared_weights=False, cached=True),
    "GCN2Conv mean": gcn2(aggr="mean"),
}


def propagated(build):
    data, mesh = problem("directed"), worlds.mesh()
    share = shared(data, mesh, "random")
    own, ids = pdc.convert(build()), data.train_mask.nonzero().view(-1)
    for mask, ours in ((data.train_mask, share.train_mask), (ids, ids), (None, None)):
        want = build()(data.y, data.edge_index, mask=mask)
        for each in (ours, mask):
            alike.same(own(share.y, share.edge_index, mask=each), want)


@tiers.cover(
    ("grid", "name"),
    [(2, 1, 1), (3, 1, 1), (1, 1, 1), (2, 2, 1)],
    [*REWRITTEN],
    step=3,
)
@worlds.on()
def test_layers_that_are_rewritten(name, grid):
    build, names = REWRITTEN[name]
    if name == "LabelPropagation":
        return _in_doubles(propagated, build)
    return _in_doubles(parity, build, names, "directed", "random", pdc.convert, grid)


# Graphs and node types of no node, or of one -----------------------------------------

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


ON_ONE_NODE = {
    **{
        f"GPSConv, {norm}": lambda norm=norm: pyg.GPSConv(
            WIDE, pyg.SAGEConv(WIDE, WIDE), heads=2, norm=norm
        )
        for norm in ("layer_norm", "batch_norm", "pair_norm")
    },
    "GPSConv, performer": lambda: pyg.GPSConv(
        WIDE, None, heads=2, norm=None, attn_type="performer"
    ),
    "attention": lambda: _Attention(WIDE, 2, batch_first=True),
    "GATConv": lambda: pyg.GATConv(WIDE, WIDE, heads=2),
    "GINConv": lambda: pyg.GINConv(torch.nn.Linear(WIDE, WIDE)),
    "EdgeCNN": lambda: pyg.EdgeCNN(WIDE, WIDE, 2, norm="batch_norm"),
}


class _Attention(torch.nn.MultiheadAttention):
    """Attends to all nodes, as rows of one batch."""

    def forward(self, x, edge_index):
        return super().forward(*[x[None]] * 3)[0].squeeze(0) + x


@tiers.parametrize(("size", "edges"), itertools.product(SIZES, [0, 2]), [(2, 2)])
@worlds.on()
def test_layers_on_one_node(size, edges):
    mesh = worlds.mesh()
    x = torch.randn(1, WIDE, generator=torch.Generator().manual_seed(0))
    data = Data(x=x.double(), edge_index=torch.zeros(2, edges, dtype=torch.long))
    share = pdc.partition(data, mesh, torch.tensor([mesh.size - 1]))
    torch.testing.assert_close(
        share.x[None].full_tensor(), data.x[None].to(share.x.device)
    )
    for build in ON_ONE_NODE.values():
        _compare(build, (data.x, data.edge_index), (share.x, share.edge_index))


NORMS = {
    "BatchNorm1d": lambda: torch.nn.BatchNorm1d(4),
    "cumulative": lambda: torch.nn.BatchNorm1d(4, momentum=None, affine=False),
    "untracked": lambda: torch.nn.BatchNorm1d(4, track_running_stats=False),
    "single": lambda: pyg.BatchNorm(4, allow_single_element=True),
    "DiffGroupNorm": lambda: pyg.DiffGroupNorm(4, 2),
    "LayerNorm": lambda: pyg.LayerNorm(4),
    "GraphNorm": lambda: pyg.GraphNorm(4),
}


def _normed(norm):
    first, last = pyg.SAGEConv(4, 4), pyg.SAGEConv(4, 4)
    return chained(first, norm, torch.nn.ReLU(), last)


@tiers.parametrize(("size", "nodes"), itertools.product(SIZES, [0, 1, 2]), [(2, 1)])
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
        _compare(lambda k=norm: pyg.to_hetero(_normed(k()), data.metadata()), one, many)

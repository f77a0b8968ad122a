"""The step on ordinary tensors of a device: PyG's numbers, by products, and who waits."""

import contextlib
import functools
import itertools

import pytest
import second_device
import test_synchronisations
import tiers
import torch
import torch_geometric.nn as pyg
import worlds
from batches import arguments
from test_step import (
    LAYERS,
    SAMPLES,
    WIDTH,
    Stack,
    close,
    graded,
    graph,
    loader_of,
    pair,
)

import pyg_distcomm as pdc
from pyg_distcomm import kernels
from pyg_distcomm.graph import local_adjacency
from pyg_distcomm.graph.local_adjacency import GroupedEdges, known
from pyg_distcomm.kernels import registry
from pyg_distcomm.loader import NeighborLoader, device_placement

# PyG's own code selects edges by masks in each call of these, for which the host waits
BY_MASKS = {"sg", "cheb", "cluster", "mf"}
CAPTURED = ("sage mean", "gcn", "gat", "graph max")
NEVER = BY_MASKS - {"mf"} | {"arma", "le", "pna-like", "gcn cached"}


def builds(test):
    """Makes a test exhaustive: the second device takes a compiler a minute."""
    able = second_device.can_build()
    return tiers.rare(pytest.mark.skipif(not able, reason="no C++ compiler")(test))


@contextlib.contextmanager
def device():
    """The second device, whose tensors take products as those of CUDA do."""
    found, before = second_device.device(), local_adjacency.DEVICES
    local_adjacency.DEVICES = before | {found.type}
    try:
        yield found
    finally:
        local_adjacency.DEVICES = before


@contextlib.contextmanager
def counted():
    """Names the products that run, and what the host waits for; a mode of torch is seen."""
    products, under = [], torch._C._len_torch_dispatch_stack
    names = ("spmm", "segment_max", "segment_softmax")
    inner = {name: getattr(kernels, name) for name in names}

    def run(name, *args):
        products.append(name)
        return inner[name](*args)

    with test_synchronisations.counter()(True) as mode:
        torch._C._len_torch_dispatch_stack = lambda: max(under() - 1, 0)
        for name in names:
            setattr(kernels, name, functools.partial(run, name))
        try:
            yield products, mode.found
        finally:
            torch._C._len_torch_dispatch_stack = under
            for name in names:
                setattr(kernels, name, inner[name])


def same(found, wanted, place):
    for one, two in zip(found, wanted, strict=True):
        assert one is None or one.device == place
        close(None if one is None else one.cpu(), two)


def step(model, x, *args):
    return graded(model.eval(), None, *args, x=x)


@builds
@worlds.on(1, worlds.anew)
def test_layers_equal_pygs_and_wait_for_nothing():
    data = graph()
    with device() as place:
        for name in LAYERS:
            wanted, ours = pair(LAYERS[name]().double())
            ours, x, edges = ours.to(place), data.x.to(place), data.edge_index.to(place)
            want = step(wanted, data.x, data.edge_index)
            for _ in range(2):  # by PyG's path, then by products
                same(step(ours, x, edges), want, place)
            with counted() as (products, waits):
                found = step(ours, x, edges)
            same(found, want, place)
            assert bool(products) == (name not in NEVER), name
            assert bool(waits) == (name in BY_MASKS), (name, waits)
            if name in CAPTURED:  # into a CUDA graph, on a stream that has made nothing
                with pytest.MonkeyPatch.context() as patch, counted() as (runs, waits):
                    patch.setattr(local_adjacency, "_stream", lambda t: 8)
                    patch.setattr(local_adjacency, "_is_captured", lambda t: True)
                    found = step(ours, x, edges)
                same(found, want, place)
                assert runs, name
                assert not waits, (name, waits)
            edges[:, :9] = edges[:, 9:18].clone()  # they are others now
            same(step(ours, x, edges), step(wanted, data.x, edges.cpu()), place)


@builds
@worlds.on(1, worlds.anew)
def test_minibatches_that_move_are_trimmed():
    """Minibatches that `.to(device)` moves: all seeds, and the host waits for nothing."""
    with device() as place:
        for kind, name in itertools.product(SAMPLES, ("sage mean", "gcn", "gat")):
            wanted, ours = pair(Stack(LAYERS[name]))
            ours = ours.to(place)
            for batch in loader_of(graph(), **SAMPLES[kind]):
                want = wanted.eval()(batch.x, batch.edge_index.clone())
                batch = batch.to(place)
                for model in (ours.train(), ours.eval()):
                    model(batch.x, batch.edge_index)
                with counted() as (products, waits):
                    out = ours(batch.x, batch.edge_index)
                assert out.device == place
                seeds = slice(batch.batch_size)
                close(out[seeds].detach().cpu(), want[seeds].detach())
                assert products, name
                assert not waits, (kind, name, waits)
            assert pdc.nn.trimming_of(ours) == "on"


@builds
@worlds.on(1, worlds.anew)
def test_who_waits_for_new_minibatches():
    """Once for their edges and once for their hops; a loader of the device is ahead."""
    data, found = graph(), {}
    with device() as place:
        for where in ("moved", "made there"):
            model = pdc.convert(Stack(LAYERS["sage mean"])).to(place)
            device_placement.HOST = frozenset()
            options = {} if where == "moved" else {"device": place}
            options |= {"batch_size": 7, "prefetch": 0, "bulk_size": 1}
            for batch in NeighborLoader(data, [4, 3, 2], **arguments(**options)):
                batch = batch.to(place)
                with counted() as (products, waits):
                    model(batch.x, batch.edge_index)[:7].sum().backward()
                assert products
                assert known(batch.edge_index).batch is not None
                found.setdefault(where, []).append(len(waits))
            assert pdc.nn.trimming_of(model) == "on"
    assert max(found["moved"]) == 2, found
    assert max(found["made there"][2:]) == 0, found


@pytest.fixture
def as_cuda(monkeypatch):
    """Has products of CPU tensors run by the kernels of CUDA, in Triton's interpreter."""
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setattr(registry, "device_type_of", lambda t: "cuda")


@tiers.parametrize(
    "name", ["sage mean", "gcn", "gat", "graph max", "gin", "gat mean"], slice(3)
)
def test_products_by_triton_equal_pygs(name, as_cuda):
    if torch.cuda.is_available():
        pytest.skip("the kernels run on the device: test_cuda.py")
    data = graph(n=20, e=60)
    wanted, ours = pair(LAYERS[name]().double())
    want = step(wanted, data.x, data.edge_index.clone())
    for _ in range(2):
        found = step(ours, data.x, data.edge_index)
    same(found, want, torch.device("cpu"))


def test_edges_on_a_device_are_checked_before_products_read_them(monkeypatch):
    monkeypatch.setattr(registry, "device_type_of", lambda t: "cuda")
    build = GroupedEdges.build
    good = torch.tensor([[0, 4, 2], [1, 1, 3]])
    form = build(good, 5, 4)
    assert form.order is None
    assert form.pattern.rowptr.tolist() == [0, 0, 2, 2, 3]
    turned = build(good.flip(1), 5, 4)
    assert turned.order.tolist() == [1, 2, 0]
    assert build(good, 4, 4) is None
    assert build(good, 5, 3) is None
    assert build(good.neg(), 5, 4) is None
    assert build(good[:, :0], 0, 0).pattern.rowptr.tolist() == [0]


def test_what_one_stream_made_another_does_not_use(monkeypatch):
    """It may run ahead of the first; while it is captured into a graph, it has waited."""
    stream, captured = [7], [False]
    monkeypatch.setattr(local_adjacency, "_stream", lambda t: stream[0])
    monkeypatch.setattr(local_adjacency, "_is_captured", lambda t: captured[0])
    edges = graph().edge_index
    for _ in range(2):
        found = local_adjacency.adjacency_of(edges)
    assert found.grouped(edges, 60, 60) is not None
    assert known(edges) is found
    stream[0] = 8
    assert known(edges) is None
    captured[0] = True
    assert known(edges) is found
    other = edges.clone()
    for _ in range(2):
        captive = local_adjacency.adjacency_of(other)
    assert captive.grouped(other, 60, 60) is None
    captured[0] = False
    assert captive.grouped(other, 60, 60) is not None
    assert local_adjacency.adjacency_of(edges) is None
    assert local_adjacency.adjacency_of(edges) is not found


def test_what_a_loader_made_on_its_stream_is_handed_over(monkeypatch):
    stream, recorded = [7], []
    monkeypatch.setattr(local_adjacency, "_stream", lambda t: stream[0])
    current = object()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current)
    record = lambda t, at: recorded.append((t, at))  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "record_stream", record)
    batch = next(iter(loader_of(graph())))
    found = known(batch.edge_index)
    found.batch.prepare(2)
    stream[0] = 8
    assert known(batch.edge_index) is None
    local_adjacency.hand_over(batch.edge_index)
    assert known(batch.edge_index) is found
    assert {at for _, at in recorded} == {current}
    assert len(recorded) >= 2


@builds
@worlds.on(1, worlds.anew)
def test_what_is_elsewhere_takes_pygs_path():
    """Edges and rows on two devices take PyG's path, which says so."""
    data = graph()
    conv = pdc.convert(pyg.SAGEConv(WIDTH, 4).double())
    for _ in range(2):
        conv(data.x, data.edge_index)
    with device() as place:
        conv, x, edges = conv.to(place), data.x.to(place), data.edge_index.to(place)
        with counted() as (products, _), contextlib.suppress(RuntimeError):
            conv(x, data.edge_index)  # CUDA refuses it, this device does not
        assert not products
        for _ in range(2):
            conv(x, edges)
        with counted() as (products, _), torch.autocast("cpu", torch.bfloat16):
            conv(x, edges)
        assert not products
        halves = conv.half()
        with counted() as (products, _):
            assert halves(x.half(), edges).dtype == torch.float16
        assert not products

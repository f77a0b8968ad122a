"""The sampler of devices draws the minibatches of the CPU's, bit for bit."""

import contextlib
import functools
import itertools
import mmap
import operator
import sys
from functools import partial

import numpy as np
import pytest
import second_device
import tiers
import torch
import worlds
from batches import SUBGRAPHS, arguments, made, rich, same, timed_types
from test_partitioned_loader import LAYERS, LINKS, NODES, loaders_of

import pyg_distcomm as pdc
from pyg_distcomm.kernels import matrix_ops, sample_jit, sample_ops
from pyg_distcomm.kernels.registry import Op
from pyg_distcomm.kernels.sample_cpu import Sampler
from pyg_distcomm.kernels.sample_device import DeviceSampler
from pyg_distcomm.kernels.sample_ops import (
    Minibatch,
    Relation,
    Request,
    SampleGraph,
    UnweightedNode,
)
from pyg_distcomm.loader import (
    DistFeatureStore,
    DistLayerLoader,
    HGTLoader,
    LinkNeighborLoader,
    LoaderOptions,
    NeighborLoader,
    device_placement,
)
from pyg_distcomm.loader.device_placement import HOST
from pyg_distcomm.ops.id_plan import route_of
from pyg_distcomm.sampling import KeyedNeighborSampler

WRITES = ("author", "writes", "paper")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
builds = pytest.mark.skipif(not second_device.can_build(), reason="no C++ compiler")
# nothing of the host meets what lies on a device that is none of the host's
EVERYWHERE = [*DEVICES, pytest.param("spare", marks=[tiers.rare, builds])]


def on_host(found):
    lists = found.node, found.tree, found.edge_index, found.edge
    moved = [t if t is None else [a.cpu() for a in t] for t in lists]
    return Minibatch(*moved, found.nodes_per_hop, found.edges_per_hop)


def outcome(sampler, wanted):
    try:
        return sampler(wanted)
    except UnweightedNode as error:
        return str(error), error.relation


RULES = {
    "plain": {},
    "replace": {"replace": True},
    "weighted": {"weighted": True},
    "weighted, replace": {"weighted": True, "replace": True},
    "labor": {"labor": True},
    "weighted labor": {"weighted": True, "labor": True},
}


FAN_OUTS = (4, 3, 2), (-1, 2), (0, 5), (60, 1), (1,)


@pytest.mark.parametrize("device", DEVICES)
@tiers.parametrize(
    ("hetero", "rule", "timed", "latest", "disjoint", "induced", "table"),
    [
        case
        for case in itertools.product(
            [False, True], RULES, [(), ("node",), ("edge",)], *[[False, True]] * 4
        )
        if case[2] or not case[3]
    ],
    slice(0, None, 29),
)
def test_device_equals_cpu(
    hetero, rule, timed, latest, disjoint, induced, table, device, monkeypatch
):
    if not table:
        monkeypatch.setattr("pyg_distcomm.kernels.sample_device.TABLE", 0)
        monkeypatch.setattr("pyg_distcomm.kernels.sample_cpu.TABLES", 0)
    options = dict(RULES[rule])
    weighted = options.pop("weighted", False)
    for pairs, dtype in ((True, torch.int32), (False, torch.int64)):
        g = graph(hetero, pairs=pairs, dtype=dtype, weighted=weighted, timed=timed)
        for key, fan_out in enumerate(FAN_OUTS[1 - pairs :: 2]):
            wanted = request(
                g,
                fan_out,
                2**62 + key,
                disjoint=disjoint,
                induced=induced,
                timed=bool(timed),
                latest=latest,
                **options,
            )
            theirs, ours = (
                outcome(sampler, wanted)
                for sampler in (Sampler(g), DeviceSampler(g, torch.device(device)))
            )
            if isinstance(theirs, tuple):
                assert ours == theirs
            else:
                same(on_host(ours), theirs)


def data():
    found = rich()
    found.half, found.odd = found.x.half(), (10 * found.x).to(torch.uint8)
    return found


def typed():
    found = timed_types()
    for store in found.edge_stores:
        store.weight = torch.rand(200, generator=torch.Generator().manual_seed(2))
    return found


def alike(host, there, device):
    """Asserts that batches are those of the host, on a device."""
    for one, other in zip(host, there, strict=True):
        places = set()
        other.apply(lambda t, places=places: places.add(t.device.type) or t)
        assert places == {device}
        same(one, other.cpu())


# loaders of test_partitioned_loader.py, and how those of a device are made
WAYS = (
    {},
    {"prefetch": 2, "bulk_size": 3},
    {"transform_sampler_output": lambda out: out, "prefetch": 1},
)
TABLES = {NeighborLoader: NODES, LinkNeighborLoader: LINKS, DistLayerLoader: LAYERS}


def both(kind, name, **more):
    """A loader of the host, and one with more options."""
    make, options = TABLES[kind][name]
    graph = data() if make is rich else make()
    return loaders_of(kind, graph, graph, options, False, **more)


@pytest.fixture
def forced(monkeypatch):
    """Lets device="cpu" take the way of devices."""
    monkeypatch.setattr("pyg_distcomm.loader.device_placement.HOST", frozenset())


CASES = [
    (kind, name)
    for kind in (NeighborLoader, LinkNeighborLoader)
    for name in TABLES[kind]
]
CASES = [(*case, WAYS[k % 3]) for k, case in enumerate(CASES)]


@pytest.mark.parametrize("device", EVERYWHERE)
@tiers.parametrize(("kind", "name", "way"), CASES, slice(0, None, 4))
def test_loaders_yield_the_batches_of_the_host(kind, name, way, device, forced):
    place = second_device.device_of(device)
    host, loader = both(kind, name, **way, device=place)
    assert type(loader.neighbor_sampler_in_use) is KeyedNeighborSampler
    there = list(loader)
    assert isinstance(loader.neighbor_sampler_in_use._draw, DeviceSampler)
    alike(host, there, device)


@pytest.mark.parametrize("device", EVERYWHERE)
@tiers.parametrize("name", list(LAYERS), slice(0, None, 3))
def test_layers_are_those_of_the_host(name, device, forced, monkeypatch):
    if device == "cpu":  # by operations of torch, as on a device
        for op in vars(matrix_ops).values():
            if isinstance(op, Op):
                monkeypatch.setitem(op._backends, "cpu", None)
    _, loader = both(DistLayerLoader, name, device=second_device.device_of(device))
    there = list(loader)
    monkeypatch.undo()
    host, _ = both(DistLayerLoader, name)
    alike(host, there, device)


@pytest.mark.parametrize("device", DEVICES)
def test_states_go_from_one_device_to_another(device, forced):
    def loader(place):
        options = {"batch_size": 9, "shuffle": True, "seed": 5, "device": place}
        return NeighborLoader(data(), [3, 2], **arguments(**options))

    wanted = list(loader(None))
    for first, second in ((None, device), (device, None)):
        left, right = loader(first), loader(second)
        begun = iter(left)
        next(begun), next(begun)
        state = left.state_dict()
        del begun
        right.load_state_dict(state)
        alike(wanted[state["batches"] :], list(right), second or "cpu")


def test_rows_that_change_are_placed_again(forced):
    graph = data()
    loader = NeighborLoader(
        graph, [3], batch_size=70, options=LoaderOptions(seed=1, device="cpu")
    )
    next(iter(loader))
    graph.x += 1
    graph.y = graph.y + 1
    batch = next(iter(loader))
    assert torch.equal(batch.x, graph.x[batch.n_id])
    assert torch.equal(batch.y, graph.y[batch.n_id])


def test_rows_on_disk_are_read_once_a_bulk(forced, tmp_path):
    graph, file = data(), tmp_path / "x.npy"
    np.save(file, graph.x.numpy())
    mapped = data()
    mapped.x = np.load(file, mmap_mode="r")
    options = {"num_neighbors": [3, 2], "batch_size": 9, "seed": 1}
    there = NeighborLoader(mapped, **arguments(**options, device="cpu"))
    alike(NeighborLoader(graph, **arguments(**options)), there, "cpu")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_workers": 1}, "leave num_workers out"),
        ({"neighbor_sampler": object()}, "leave one out"),
        ({"graph_on": "disk"}, "must be one of"),
        ({"device": "nowhere"}, "must name a device"),
        ({"device": None, "rows_on": "pinned"}, "give device='cuda'"),
        pytest.param(
            {"device": "cuda"},
            "sees 0 CUDA devices",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="it is there"),
        ),
        ({"graph_on": "pinned"}, "leave graph_on and rows_on out"),
        ({"cache": 0.5}, "give rows_on='pinned'"),
        ({"cache": 1.5}, "a fraction of all rows"),
    ],
)
def test_what_is_not_made_on_a_device_is_refused(options, said, monkeypatch):
    if "device" not in options:
        monkeypatch.setattr(device_placement, "HOST", frozenset())
        options = {"device": "cpu"} | options
    with pytest.raises(ValueError, match=said):
        NeighborLoader(data(), [2], **arguments(**options))


def shared(place="cpu", rows=("device", "host"), some=slice(None)):
    """Loads shares for a device: the minibatches of the host."""
    mesh = worlds.mesh()
    place = second_device.device() if place == "spare" else torch.device(place)
    share, two = (pdc.partition(g, mesh) for g in (data(), typed()))
    lossy = DistFeatureStore.from_data(share, mesh, wire="int8", cache=0.3)
    hot = DistFeatureStore.from_data(two, mesh, cache=7)
    table = pdc.DistEmbedding(60, 3, like=share)
    at = {"batch_size": 6, "seed": 3}
    nodes, links = made(NeighborLoader, [3, 2], **at), made(LinkNeighborLoader, [3, 2])
    late = {"transform_sampler_output": lambda out: out}
    ways = {
        "nodes": partial(nodes, share, embedding=table),
        "coded": partial(nodes, share, features=lossy),
        "types": partial(nodes, two, input_nodes="paper", features=hot, prefetch=0),
        "links": partial(links, share, neg_sampling="binary", batch_size=60),
        "layers": partial(made(DistLayerLoader, [9, 9], **at), share, prefetch=2),
        "late": partial(nodes, share, **late),
        "whole": partial(nodes, share, topology="replicated"),
        **subgraphs(share, two),
    }
    if mesh.size == 1:
        whole = subgraphs(data(), typed())
        ways |= {f"{name} of a whole graph": way for name, way in whole.items()}
    try:
        for name, make in list(ways.items())[some]:
            torch.manual_seed(1)
            host = list(make())
            device_placement.HOST = frozenset()
            for rows_on in rows:
                torch.manual_seed(1)
                there = list(make(device=place, rows_on=rows_on))
                if name == "nodes":
                    routes = [route_of(b.n_id, table.rows) for b in there]
                    assert len(routes) > 0
                    assert None not in routes
                alike(host, there, place.type)
            device_placement.HOST = HOST
        wrong = {"graph_on": "pinned"}, {"cache": 0.5}
        for options, said in zip(wrong, ("graph_on out", "features="), strict=True):
            with pytest.raises(ValueError, match=said):
                LoaderOptions(**options).are_for_share(share)
    finally:
        device_placement.HOST = HOST


class Side:
    """A stand-in for a side stream: says what comes of it, once."""

    def __init__(self, device):
        self.use = contextlib.nullcontext

    def sent(self, outs):
        return [(out, self) for out in outs]

    def received(self, arriving):
        out, sent = arriving
        assert sent is self
        return out


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", ["layers", "neighbours"])
def test_bulks_leave_a_side_stream_once(kind, late, forced, monkeypatch):
    """Whatever the number of stages that make them."""
    for name, value in {"cuda": True, "send": device_placement.Placement.put}.items():
        monkeypatch.setattr(device_placement.Placement, name, value)
    monkeypatch.setattr("pyg_distcomm.loader.batcher.SideStream", Side)
    options = {"batch_size": 9, "seed": 4}
    if late:
        options["transform_sampler_output"] = lambda out: out
    kind = DistLayerLoader if kind == "layers" else NeighborLoader
    make = made(kind, [5, 5], **options)
    host = list(make(data()))
    for prefetch in (0, 1):
        alike(host, make(data(), prefetch=prefetch, device="cpu"), "cpu")


def subgraphs(graph, two):
    budgets = made(HGTLoader, [5, 4], "paper", batch_size=6)
    ways = {name: partial(make, graph, seed=3) for name, make in SUBGRAPHS.items()}
    return {**ways, "budgets": partial(budgets, two, seed=3)}


@tiers.parametrize(
    ("size", "rows", "some"),
    [
        (2, ["device"], slice(0, None, 3)),
        (2, ["device"], slice(None)),
        (1, ["host"], slice(None)),
        (3, ["host"], slice(None)),
    ],
    slice(1),
)
def test_shares_are_loaded_for_a_device(size, rows, some):
    worlds.run(shared, size, "cpu", rows, some)


@pytest.mark.exhaustive
@builds
@pytest.mark.parametrize("size", [1, 2, 3])
def test_nothing_of_a_share_meets_the_device(size):
    worlds.anew(shared, size, "spare")


@pytest.mark.cuda
def test_shares_are_loaded_for_cuda():
    shared("cuda", ("device", "pinned", "host"))


# Triton --------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("replaced", [False, True])
@tiers.parametrize(
    ("rows", "draws"),
    list(itertools.product([0, 1, 127, 128, 300], [1, 2, 7, 25])),
    slice(3, None, 5),
)
def test_triton_draws_what_is_defined(rows, draws, replaced, device):
    triton_kernels = pytest.importorskip("pyg_distcomm.kernels.sample_cuda")
    g = torch.Generator().manual_seed(draws)
    ends = torch.iinfo(torch.int64)
    streams = torch.randint(ends.min, ends.max, (rows,), generator=g)
    size = torch.randint(1, 9, (rows,), generator=g) + (0 if replaced else draws)
    size[::7] = 2**40  # no more than rounding of one product may decide
    wanted = sample_ops.uniform_picks.definition(streams, size, draws, replaced)
    assert bool((wanted >= 0).all() & (wanted < size[:, None]).all())
    given = streams.to(device), size.to(device)
    found = triton_kernels.uniform_picks(*given, draws, replaced)
    assert torch.equal(found.cpu(), wanted)


@pytest.mark.parametrize("device", DEVICES)
@tiers.parametrize(
    ("most", "draws"),
    list(itertools.product([2, 9, 1 << 50], [1, 5, 40, 200])),
    slice(2, None, 6),
)
def test_triton_draws_from_urns_what_is_defined(most, draws, device):
    triton_kernels = pytest.importorskip("pyg_distcomm.kernels.sample_cuda")
    g = torch.Generator().manual_seed(draws)
    size = torch.tensor([draws + 1, 2000, 130 * 128, draws + 40])
    weight = torch.randint(1, most, (int(size.sum()),), generator=g)
    weight[::3] *= torch.rand(len(weight[::3]), generator=g) < 0.5
    high = size.cumsum(0)
    weight[high[:1] - draws - 1 : high[0]] += 1  # more than draws are not zero
    weight[high[2:3] : high[2] + draws + 1] += 1
    running = torch.cat([torch.zeros(1).long(), weight.cumsum(0)]) + 2**63 - 2**20
    keys = torch.randint(2**62, (4,), generator=g)
    given = running, high - size, high, keys
    wanted = sample_ops.draw_urns.definition(*given, draws)
    assert all(len(set(row.tolist())) == draws for row in wanted[0])
    assert bool((weight[wanted[0]] > 0).all())
    found = triton_kernels.draw_urns(*(t.to(device) for t in given), draws)
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sizes", [[], [0], [3, 0, 257, 1] * 40])
def test_triton_adds_up_rows_in_order(sizes, device):
    triton_kernels = pytest.importorskip("pyg_distcomm.kernels.sample_cuda")
    ptr = torch.tensor([0, *sizes]).cumsum(0)
    value = torch.rand(int(ptr[-1]), dtype=torch.float64)
    rows = value.split(sizes) if sizes else []
    wanted = [functools.reduce(operator.add, row.tolist(), 0.0) for row in rows]
    wanted = torch.tensor(wanted, dtype=torch.float64)
    assert torch.equal(sample_ops.row_sums.definition(ptr, value), wanted)
    found = triton_kernels.row_sums(ptr.to(device), value.to(device))
    assert torch.equal(found.cpu(), wanted)


@pytest.mark.parametrize("device", DEVICES)
@tiers.parametrize(
    ("shape", "dtype"),
    list(
        itertools.product(
            [(9,), (9, 1), (9, 3), (9, 2, 5), (9, 513), (9, 0)],
            [torch.bool, torch.uint8, torch.half, torch.int32, torch.float64],
        )
    ),
    slice(0, None, 4),
)
def test_rows_are_read_from_pinned_memory(shape, dtype, device):
    triton_kernels = pytest.importorskip("pyg_distcomm.kernels.sample_cuda")
    values = (torch.arange(torch.Size(shape).numel()).view(shape) % 5).to(dtype)
    for index in (torch.tensor([8, 0, 3, 3]), torch.tensor([[1], [2]]), torch.empty(0)):
        for part in (values, values[1:]):
            index = index.long() % len(part)
            given = part if device == "cpu" else part.pin_memory()
            found = triton_kernels.read_rows(given, index.to(device))
            assert torch.equal(found.cpu(), part[index])
            place = torch.full((len(part),), -1, dtype=torch.int32)
            place[3], place[1] = 0, 1
            kept = torch.zeros(2, *shape[1:], dtype=dtype, device=device)
            found = triton_kernels.read_rows(
                given, index.to(device), (kept, place.to(device))
            )
            assert torch.equal(found.cpu(), _without(part, 3, 1)[index])


def _without(values, *rows):
    values = values.clone()
    values[list(rows)] = 0
    return values


@pytest.mark.parametrize("hetero", [False, True])
def test_hot_rows_are_read_from_the_device(hetero, forced, monkeypatch):
    """Of pinned rows, those of nodes that most edges leave: by a kernel, interpreted."""
    triton_kernels = pytest.importorskip("pyg_distcomm.kernels.sample_cuda")
    reads = triton_kernels.read_rows
    monkeypatch.setitem(sample_ops.read_rows._backends, "cpu", reads)
    monkeypatch.setattr(device_placement, "_check_pinned", lambda device: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    graph = typed() if hetero else data()
    options = {"num_neighbors": [4], "batch_size": 20, "seed": 2, "cache": 0.25}
    kind = "paper" if hetero else None
    options |= {"input_nodes": kind, "rows_on": "pinned"}
    options |= {"prefetch": 0, "bulk_size": 1}  # the interpreter is for one thread
    loader = NeighborLoader(graph, **arguments(**options, device="cpu"))
    del options["cache"], options["rows_on"]
    alike(NeighborLoader(graph, **arguments(**options)), loader, "cpu")
    place = loader.placement
    store = graph[kind] if hetero else graph
    source = [graph[e] for e in graph.edge_types if e[0] == kind] if hetero else [graph]
    degree = torch.cat([s.edge_index[0] for s in source])
    degree = degree.bincount(minlength=store.num_nodes)
    hot = place._slots[kind][0]
    assert len(hot) == round(0.25 * store.num_nodes)
    cold = torch.ones(store.num_nodes, dtype=torch.bool).index_fill_(0, hot, False)
    assert degree[hot].min() >= degree[cold].max()
    place._rows[kind, "x", "kept"][2].fill_(7)
    found = next(iter(loader))
    found = found[kind] if hetero else found
    assert bool((found.x[~cold[found.n_id]] == 7).all())
    assert torch.equal(found.x[cold[found.n_id]], store.x[found.n_id[cold[found.n_id]]])


@pytest.mark.cuda
@pytest.mark.parametrize("name", list(NODES))
@pytest.mark.parametrize("rows_on", ["device", "pinned", "host", "cached"])
def test_loaders_read_pinned_memory(name, rows_on):
    place = {"device": "cuda", "graph_on": "pinned", "rows_on": rows_on}
    if rows_on == "cached":
        place |= {"rows_on": "pinned", "cache": 0.3}
    alike(*both(NeighborLoader, name, **place), "cuda")


@pytest.mark.cuda
@pytest.mark.parametrize("name", list(LAYERS))
@pytest.mark.parametrize("rows_on", ["device", "pinned"])
def test_layers_read_pinned_memory(name, rows_on):
    place = {"device": "cuda", "graph_on": "pinned", "rows_on": rows_on}
    alike(*both(DistLayerLoader, name, **place), "cuda")


# The compiled sampler where rows are long, nodes many, and weights zero --------------

CPU = torch.device("cpu")
NORESERVE = 0x4000  # of Linux; named by mmap from Python 3.13 on


def relation(
    source, target, sizes, edges, seed, pairs, dtype, weighted=False, timed=()
):
    """A random relation, its in-edges by (target, time, id)."""
    g = torch.Generator().manual_seed(seed)
    src = torch.randint(sizes[source], (edges,), generator=g)
    dst = (torch.rand(edges, generator=g) ** 2 * sizes[target]).long()
    time = torch.randint(10, (edges,), generator=g)
    if "node" in timed:
        time = node_time(sizes[source])[src]
    order = torch.argsort(time, stable=True) if timed else torch.arange(edges)
    order = order[torch.argsort(dst[order], stable=True)]
    colptr = torch.zeros(sizes[target] + 1, dtype=torch.int64)
    colptr[1:] = torch.bincount(dst, minlength=sizes[target]).cumsum(0)
    row = torch.stack([src[order], order], 1).flatten() if pairs else src[order]
    weight = None
    if weighted:
        weight = torch.rand(edges, generator=g)
        weight[torch.rand(edges, generator=g) < 0.3] = 0
        weight[colptr[:-1][colptr.diff() > 0]] = 0.5  # a choice for every node
    return Relation(
        source,
        target,
        colptr,
        row.to(dtype),
        2 if pairs else 1,
        weight,
        time[order] if "edge" in timed else None,
    )


def node_time(size):
    return torch.arange(size) % 10


def graph(hetero=False, **kwargs):
    sizes = (40, 25, 3) if hetero else (60,)
    ends = [(0, 0), (0, 1), (1, 0), (2, 1), (1, 2)] if hetero else [(0, 0)]
    relations = tuple(
        relation(s, t, sizes, 400 if s != 2 else 30, 7 + k, **kwargs)
        for k, (s, t) in enumerate(ends)
    )
    timed = "node" in kwargs.get("timed", ())
    return SampleGraph(
        sizes, relations, tuple(node_time(n) if timed else None for n in sizes)
    )


def request(g, fan_out=(4, 3, 2), key=5, **kwargs):
    seeds = [(0, torch.tensor([3, 11, 3, 0, 59 % g.sizes[0], 3]))]
    if len(g.sizes) > 1:
        seeds.append((1, torch.tensor([2, 24])))
    if kwargs.pop("timed", False):
        kwargs["tree_time"] = torch.arange(sum(len(s) for _, s in seeds)) + 2
        kwargs["disjoint"] = True
    return Request(tuple(seeds), (tuple(fan_out),) * len(g.relations), key, **kwargs)


def test_many_draws_and_many_nodes():
    ends = torch.tensor([0, 3000] + [3000] * 59)
    star = Relation(0, 0, ends, torch.arange(3000) % 60, 1)
    star = SampleGraph((60,), (star,), (None,))
    for fan_out in (47, 48, 49, 700, 2999, 3000):
        wanted = Request(((0, torch.tensor([0])),), ((fan_out,),), 3)
        ours = Sampler(star)(wanted)
        same(ours, DeviceSampler(star, CPU)(wanted))
        assert ours.edge[0].unique().numel() == fan_out
    g = graph(pairs=True, dtype=torch.int32)
    seeds = ((0, torch.arange(60).repeat(40)),)  # the table of nodes grows
    wanted = Request(seeds, ((5, 5, 5),), 3, disjoint=True)
    same(Sampler(g)(wanted), DeviceSampler(g, CPU)(wanted))


def test_unweighted_node_is_named():
    colptr, row = torch.tensor([0, 2, 4]), torch.tensor([0, 1, 0, 1])
    weight = torch.tensor([1.0, 1.0, 0.0, 0.0])
    g = SampleGraph((2,), (Relation(0, 0, colptr, row, 1, weight),), (None,))
    for draw in (Sampler(g), DeviceSampler(g, CPU)):
        with pytest.raises(UnweightedNode, match="into node 1 are zero"):
            draw(Request(((0, torch.tensor([0])),), ((2, 1),), 3))
        found = draw(Request(((0, torch.tensor([1])),), ((-1,),), 3))
        assert found.edge[0].numel() == 2


def untouched(count, values, at):
    """Returns `count` int64 on pages that nothing has touched, but for values `at`."""
    pages = mmap.mmap(-1, 8 * count, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    out = np.frombuffer(pages, np.int64)
    out[at : at + len(values)] = values
    return out


@pytest.mark.skipif(sys.platform != "linux", reason="reserves 70 GB of addresses")
def test_a_frontier_of_more_than_2_to_31_nodes():
    size, draws, nodes = 100, 80, 3  # so many draws that a table finds repeats
    found = []
    for at in (0, 2**31):
        columns = [[7, 8, 9], [0] * nodes, [size] * nodes, [0, draws, 2 * draws, 240]]
        rows = (untouched(at + 4, c, at) for c in columns)
        ends = np.array([at, at + nodes])
        out, keys = np.empty(nodes * draws, np.int64), np.array([0, 5], np.uint64)
        sample_jit.draw((keys, ends, *rows), None, False, (out, 0), 1, 2)
        assert all(len(set(row)) == draws for row in out.reshape(nodes, draws))
        found.append(out)
    assert np.array_equal(*found)

"""Kernels and codecs on devices, devices that do not fit, and NCCL's ways by stand-ins."""

import re
import time
import types

import alike
import pytest
import second_device
import test_codec
import tiers
import torch
import torch.distributed as dist
import torch_geometric.nn as pyg
import worlds
from problems import GRAPHS, owners, two_types
from torch_geometric.nn import GATConv

import pyg_distcomm as pdc
from pyg_distcomm import kernels
from pyg_distcomm.comm import collectives, store
from pyg_distcomm.comm.store import RankError
from pyg_distcomm.halo import codecs
from pyg_distcomm.kernels.registry import Op
from pyg_distcomm.loader import LoaderOptions, NeighborLoader
from pyg_distcomm.nn import DistGCNConv, HaloConv

META = torch.device("meta")


@tiers.parametrize(
    ("what", "ranks"),
    [
        ("features", (0, 1)),
        ("parameters", (1,)),
        ("edge_weight", (1,)),
        ("between layers", (1,)),
        ("edge_attr", (0,)),
        ("features", (0,)),
        ("parameters", (0, 1)),
        ("between layers", (0, 1)),
    ],
    slice(0, 4),
)
@worlds.on(2)
def test_misplaced_tensors_are_named_on_all_ranks(what, ranks):
    """Where some ranks have something on the meta device."""
    mesh, data = worlds.mesh(fresh=True), GRAPHS["undirected"]()
    share = pdc.partition(data, mesh, owners("random", data, mesh.size))
    conv, head = DistGCNConv(7, 4).double(), torch.nn.Linear(4, 2).double()
    if what == "edge_attr":
        conv = HaloConv(GATConv(7, 4, edge_dim=1).double())
    x, weight = share.x, share.edge_weight
    if mesh.rank in ranks:
        if what == "features":
            x = x.to(META)
        elif what in ("parameters", "between layers"):
            (conv if what == "parameters" else head).to(META)
        else:
            weight = weight.to(META)
    name = {"parameters": r"DistGCNConv\.bias", "features": "x"}.get(what, what)
    wrong = f"{name} lies on meta, and the edges on cpu"
    if what == "between layers":
        named = r"Linear\.weight lies on meta, and a tensor \[\d+, \d+\] lies on cpu"
        wrong = rf"in addmm\(\), {named}"
    more = [weight] if what in ("edge_attr", "edge_weight") else []
    told = rf"by \.to\(mesh.device\): {wrong}"
    with pytest.raises((ValueError, RankError), match=told):
        head(conv(x, share.edge_index, *more)).sum()


def unlike(case):
    """Says what a rank hears where one of them has another device, or none."""
    mesh, data = worlds.mesh(fresh=True), GRAPHS["undirected"]()
    seen = torch.cuda.is_available, torch.cuda.device_count
    alone = mesh.rank == 1
    where = second_device.device() if case.startswith("on ") else META
    try:
        if case == "init lacks":
            if not alone:  # and would have it
                torch.cuda.is_available = torch.cuda.device_count = lambda: 1
            pdc.init(device="cuda")
        elif case == "init differs":
            pdc.init(device="meta" if alone else None)
        elif case == "init has no such":
            pdc.init(device="gpu" if alone else None)
        elif case == "loader":
            if alone:
                NeighborLoader(data, [2], options=LoaderOptions(device="cuda"))
            collectives.all_reduce(torch.ones(1), mesh.world)
        elif case == "on partition":
            pdc.partition(data.to(where) if alone else data, mesh, "random")
        else:
            share, conv = pdc.partition(data, mesh, "random"), DistGCNConv(7, 4)
            conv = conv.double()
            if alone:
                share, conv = share.to(where), conv.to(where)
            conv(share.x, share.edge_index)
    except ValueError as error:
        return str(error)
    finally:
        torch.cuda.is_available, torch.cuda.device_count = seen
    return "it went on"


UNLIKE = {
    "init lacks": r"device='cuda': rank 1, on .*, sees 0 CUDA devices",
    "init differs": r"the same device: it is 'cpu' on rank 0, and 'meta' on rank 1",
    "init has no such": r"device must name a device, as 'cuda:0', got 'gpu'|same device",
    "loader": r"this process sees 0 CUDA devices",
    "on partition": r"data\.\w+: it is [^\n]* on rank 0, and [^\n]* on spare, [^\n]*rank 1",
    "on layer": r"kind of device: it is cpu on rank 0, and spare on rank 1",
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="ranks without CUDA")
@tiers.parametrize("case", list(UNLIKE), ["init lacks"])
def test_a_rank_with_another_device_is_named_on_all_ranks(case):
    if case.startswith("on ") and not second_device.can_build():
        pytest.skip("no C++ compiler")
    start = worlds.anew if case.startswith("on ") else worlds.run
    for said in start(unlike, 2, case):
        assert re.search(UNLIKE[case], said), said


@pytest.mark.parametrize(
    ("asked", "local", "count", "found"),
    [
        ("cuda", "3", 4, "cuda:3"),
        ("cuda", "3", 2, "cuda:1"),
        ("cuda:1", "0", 2, "cuda:1"),
        ("cuda", None, 4, "cuda:2"),  # the current one, where no launcher has told
        (None, "1", 2, "cpu"),
    ],
)
def test_cuda_is_the_device_of_local_rank(asked, local, count, found, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_RANK", local)
    assert store.chosen_device(asked) == torch.device(found)


@tiers.parametrize(("size", "same"), [(2, True), (3, True), (3, False)], [(2, True)])
@worlds.on()
def test_whole_blocks_by_one_collective(size, same):
    """Multiplies by whole blocks, on a graph whose blocks have one size or not."""
    mesh, data = worlds.mesh(), GRAPHS["undirected"]()
    count = data.num_nodes if not same else data.num_nodes // mesh.size * mesh.size
    data = data.subgraph(torch.arange(count))
    share = pdc.partition(data, mesh, "block")
    edges = share.edge_index.with_halo("blocks")
    torch.manual_seed(0)
    conv, found = DistGCNConv(7, 4).double(), []
    plain, called = collectives._uses_nccl, []

    def owns(x, axis):
        called.append(axis.name)
        return True

    for stand_in in (plain, owns):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(collectives, "_uses_nccl", stand_in)
            x = share.x.clone().requires_grad_()
            conv(x, edges)
            mesh.ledger.reset()
            out = conv(x, edges)
            out.square().sum().backward()
            ledger = [
                (mesh.ledger.words(op), mesh.ledger.bytes(op))
                for op in ("all_gather", "reduce_scatter")
            ]
            found.append((out.full_tensor().detach(), x.grad.full_tensor(), ledger))
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)
    assert called
    assert found[0][2][0][0] > 0


class OnStream:
    """A collective on a stream of NCCL's: `wait()` has the current stream wait, not the host.

    With a limit of time NCCL's would stop the host until the exchange has ended.
    """

    def __init__(self, work, tape):
        self.work, self.tape = work, tape

    def wait(self, *limit):
        assert not limit, "the host would wait"
        self.tape.append("stream waits")
        return self.work.wait()

    def is_completed(self):
        return self.work.is_completed()


@tiers.parametrize("size", [2, 3], [2])
@worlds.on()
def test_a_stream_multiplies_while_an_exchange_is_on_another(size):
    """Between the beginning of an exchange and the wait for it lies the product of own rows."""
    mesh, data, tape = worlds.mesh(), GRAPHS["undirected"](), []
    share = pdc.partition(data, mesh, owners("random", data, mesh.size))
    conv, x = DistGCNConv(7, 4).double(), share.x.clone().requires_grad_()
    conv(x, share.edge_index).sum().backward()
    group, sends, waits = mesh.row.group, dist.all_to_all_single, collectives._wait
    multiplies, ends = kernels.spmm, collectives._backend_of

    def begin(*args, **kwargs):
        work = sends(*args, **kwargs)
        if kwargs["group"] is not group:
            return work
        tape.append("exchange begins")
        return OnStream(work, tape)

    def multiply(*args):
        tape.append("product")
        return multiplies(*args)

    def backend(at):
        return "nccl" if at.group is group else ends(at)

    def wait(work, at, op, _):
        return waits(work, at, op, at.group is group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "_backend_of", backend)
        patch.setattr(collectives, "_wait", wait)
        patch.setattr(dist, "all_to_all_single", begin)
        patch.setattr(kernels, "spmm", multiply)
        out = conv(x, share.edge_index)
        forward = list(tape)
        tape.clear()
        out.sum().backward()
    for order in (forward, tape):
        begun, waited = order.index("exchange begins"), order.index("stream waits")
        assert "product" in order[begun:waited], order
        assert order.count("exchange begins") == order.count("stream waits"), order


@worlds.on(2)
def test_the_deadline_watches_exchanges_of_a_device():
    """An exchange that does not end is named by the next one."""
    mesh = worlds.mesh(fresh=True)
    watch = mesh.world.watch
    watch.deadline = 1.0
    done = types.SimpleNamespace(is_completed=lambda: True)
    watch.streamed.add(done, "halo")
    under_way = types.SimpleNamespace(is_completed=lambda: mesh.rank > 0)
    watch.streamed.add(under_way, "halo_reduce")
    stop = time.monotonic() + 60
    told = "waited 1 s for halo_reduce, and not every rank came"

    def meet():
        while time.monotonic() < stop:
            collectives.all_reduce(torch.ones(1), mesh.world)
            time.sleep(0.1)

    with pytest.raises((RankError, RuntimeError), match=told):
        meet()


@pytest.mark.parametrize("kind", ["HeteroConv", "HGT", "HAN", "GCN", "GAT", "pipeline"])
def test_a_model_that_moves_away_is_named(kind):
    """Also after it has run where the edges are; of typed nodes, rows are named, too."""
    data, mesh = two_types(), pdc.init()
    share, meta = pdc.partition(data, mesh, "block"), data.metadata()
    given = share.x_dict, share.edge_index_dict
    layers = [DistGCNConv(7, 4).double(), DistGCNConv(4, 4).double()]
    model = {
        "HeteroConv": lambda: pyg.HeteroConv(
            {edge: pyg.SAGEConv((4, 4), 6) for edge in meta[1]}
        ),
        "HGT": lambda: pyg.HGTConv(4, 6, meta, heads=2),
        "HAN": lambda: pyg.HANConv(4, 6, meta, heads=2),
        "GCN": lambda: pyg.GCN(7, 4, 2).double(),
        "GAT": lambda: HaloConv(GATConv(7, 4).double()),
        "pipeline": lambda: pdc.Pipeline(layers, mesh, chunks=2),
    }[kind]()
    if kind in ("GCN", "GAT", "pipeline"):
        share = pdc.partition(GRAPHS["directed"](), mesh, "block")
        given = [share] if kind == "pipeline" else [share.x, share.edge_index]
    model = model if kind == "pipeline" else pdc.convert(model)
    model(*given)
    if kind in ("HGT", "HAN"):
        moved = {name: x.to(META) for name, x in share.x_dict.items()}
        with pytest.raises(ValueError, match=r"x_dict\['\w+'\] lies on meta"):
            model(moved, given[1])
    (layers[1] if kind == "pipeline" else model).to(META)
    told = r"\w+Conv\.\S+ lies on meta, and the edges on"
    with pytest.raises(ValueError, match=told):
        model(*given)


# Every kernel and codec has a line that says what comes back on the device -----------

CPU = torch.device("cpu")
# a matrix [3, 3] in the forms that kernels take, and what it is multiplied by
ROW, COL = torch.tensor([0, 0, 1, 2, 2]), torch.tensor([0, 2, 1, 0, 1])
ROWPTR, INTS = torch.tensor([0, 2, 3, 5]), torch.tensor([3, 1, 4, 1, 5])
X, IDS = torch.arange(6.0).view(3, 2).sin(), torch.tensor([2, 0])
EDGES = torch.arange(10.0).view(5, 2).cos()  # a number or two an edge
KEYS, KEY = torch.tensor([17, 4, 9]), 2**62 + 12345


def told(why, names):
    """Lines of names that run elsewhere, or not on devices."""
    return dict.fromkeys(names.split(), why)


def matrix(at, values=None):
    return at(ROWPTR), at(COL), None if values is None else at(values)


def segments(at, y=EDGES):
    return kernels.segment_softmax(at(ROWPTR), at(y))


def largest(at):
    return kernels.segment_max(at(ROWPTR), at(COL), at(X))


def drawn(at, draw, *more):
    ptr = at(torch.tensor([0, 1, 2, 3]))
    return draw(at(ROWPTR), at(INTS), *more, at(KEYS), ptr)


def pairs(at):
    rows = at(X).unsqueeze(-1)
    return at(ROWPTR), at(COL), rows, rows, rows[0]


KERNELS = {
    "coo_to_csr": lambda at: kernels.coo_to_csr(at(ROW), at(COL), 3),
    "count_positive": lambda at: kernels.count_positive(at(ROWPTR), at(INTS)),
    "csr_transpose": lambda at: kernels.csr_transpose(at(ROWPTR), at(COL), 3),
    "draw": lambda at: drawn(
        at, lambda *given: kernels.draw(*given, False), at(ROWPTR).diff()
    ),
    "extract": lambda at: kernels.extract(
        matrix(at)[:2], *[(at(IDS), at(torch.tensor([0, 2])))] * 2
    ),
    "gather_rows": lambda at: kernels.gather_rows(at(X), at(IDS)),
    "keyed_bits": lambda at: kernels.keyed_bits(KEY, at(IDS), 3),
    "keyed_dropout": lambda at: kernels.keyed_dropout(
        at(X), KEY, at(IDS)[[0, 1, 0]], 0.5
    ),
    "keyed_mask": lambda at: kernels.keyed_mask(KEY, at(IDS), 3, 0.5),
    "normalize_rows": lambda at: kernels.normalize_rows(at(ROWPTR), at(INTS).double()),
    "pair_scores": lambda at: kernels.pair_scores(*pairs(at), 0.2),
    "pair_scores_grad": lambda at: kernels.pair_scores_grad(
        *pairs(at), 0.2, at(EDGES), True
    ),
    "count_ids": lambda at: kernels.count_ids(at(COL), at(torch.zeros(5).long())),
    "hash_edges": lambda at: kernels.hash_edges(at(ROW), at(COL), at(COL)),
    "place_pairs": lambda at: kernels.place_pairs(
        at(ROW), at(COL), at(COL), at(ROWPTR[:-1]), at(torch.zeros(10).long())
    ),
    "read_rows": lambda at: kernels.read_rows(at(X), at(IDS)),
    "scatter_add_rows": lambda at: kernels.scatter_add_rows(at(X), at(IDS), at(X)[:2]),
    "sddmm": lambda at: kernels.sddmm(at(ROWPTR), at(COL), at(X), at(X)),
    "segment_max": largest,
    "segment_max_grad": lambda at: kernels.segment_max_grad(
        at(ROWPTR), at(COL), at(X), largest(at), at(X)
    ),
    "segment_softmax": segments,
    "rank_select_index": lambda at: kernels.rank_select_index(
        at(torch.tensor([0, 2])), 3
    )(at(IDS)),
    "segment_softmax_grad": lambda at: kernels.segment_softmax_grad(
        at(ROWPTR), segments(at), at(EDGES)
    ),
    "spgemm": lambda at: kernels.spgemm(matrix(at, INTS), matrix(at, EDGES[:, 0]), 3),
    "spmm": lambda at: kernels.spmm(*matrix(at, EDGES[:, 0]), at(X)),
    "weighted_sampler": lambda at: kernels.weighted_sampler(at(INTS))(
        at(KEYS), at(torch.tensor([0, 2, 4, 6])), False
    ),
    **told("KeyedNeighborSampler", "neighbor_sampler"),
    **told("the host", "describe layer_weights minimum_cover quantiser warm_up"),
}


def coded(name):
    def run(at):
        found, x = [], at(torch.randn(21, 33, generator=torch.manual_seed(0)).relu())
        ids = at(torch.arange(21)) * 3
        key = codecs.RngKey(KEY, ids, degree=ids % 5)
        for codec in CODED:
            if type(codec).__name__ != name:
                continue
            for _ in range(2):
                message = codec.encode(x, key)
                out = codec.decode(message, torch.empty_like(x), key)
                found += [message, out.clone()]
        assert found, f"no {name} in tests/test_codec.py"
        return found

    return run


CODED = [*test_codec.EVERY, codecs.RowSample(2.5), codecs.DegreeBits(1)]
CODED += [codecs.RangeBits(4)]
CODECS = {name: coded(name) for name in {type(codec).__name__ for codec in CODED}}
CODECS |= told("no codec", "CODECS Codec RngKey codec_of known_codecs")


TABLES = KERNELS, CODECS


def test_every_name_has_a_line():
    """A name that is not here comes back on no one knows which device."""
    assert sorted(set(kernels.__all__) ^ set(KERNELS)) == []
    assert sorted(set(codecs.__all__) ^ set(CODECS)) == []
    host = {n for n in KERNELS if isinstance(KERNELS[n], str)}
    run_on_devices = {n for n in kernels.__all__ if isinstance(getattr(kernels, n), Op)}
    assert not run_on_devices & host


class At:
    """Puts tensors on a device."""

    def __init__(self, device):
        self.device = device

    def __call__(self, t):
        return t.clone().to(self.device)


def tensors(value):
    """The tensors in a value, in lists and objects."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors(one)
    elif type(value).__module__.startswith("pyg_distcomm"):
        yield from tensors(list(vars(value).values()))


def at_home(t):
    return alike.whole(t).detach().cpu()


def run_tables(place):
    """Runs cases on both devices: nothing is elsewhere, or has other numbers."""
    device = second_device.device_of(place)

    def check(case):
        want = [at_home(t) for t in tensors(case(At(CPU)))]
        found = list(tensors(case(At(device))))
        astray = {str(t.device) for t in found} - {str(device)}
        assert not astray, f"tensors on {astray}"
        assert want, "no tensors"
        loose = 1e-5 * (place == "cuda")  # terms come in any order
        alike.same([at_home(t) for t in found], want, rtol=loose, atol=loose)

    cases = {n: c for table in TABLES for n, c in table.items() if callable(c)}
    alike.assert_none([alike.failures_of(cases, check)])


@pytest.mark.exhaustive
@pytest.mark.skipif(not second_device.can_build(), reason="no C++ compiler")
@worlds.on(1, worlds.anew)
def test_tables():
    run_tables("spare")


@pytest.mark.cuda
@worlds.on(1, worlds.anew)
def test_on_cuda():
    run_tables("cuda")

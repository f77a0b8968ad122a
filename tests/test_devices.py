"""Devices that do not fit, whole blocks as NCCL moves them, and its deadline, by stand-ins."""

from __future__ import annotations

import re
import time
import types

import pytest
import second_device
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


@tiers.parametrize(("size", "same"), [(2, True), (3, True), (3, False)], [(3, True)])
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
    with pytest.raises(
        ValueError, match=r"\w+Conv\.\S+ lies on meta, and the edges on"
    ):
        model(*given)

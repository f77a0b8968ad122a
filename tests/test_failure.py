"""An error on one rank, or memory it lacks, reaches all with its cause, and who is where."""

import contextlib
import io
import os
import re
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tiers
import torch
import torch.distributed as dist
import worlds
from problems import GRAPHS, owners
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GATConv

import pyg_distcomm as pdc
from pyg_distcomm import kernels
from pyg_distcomm.comm import collectives, failure
from pyg_distcomm.comm.failure import FailureMonitor, Wait, place_of
from pyg_distcomm.comm.store import RankError, StoreMailbox
from pyg_distcomm.graph import partition_data
from pyg_distcomm.halo import halo
from pyg_distcomm.halo.codecs import Quantise
from pyg_distcomm.halo.policy import LinkPolicy
from pyg_distcomm.loader import (
    DistLayerLoader,
    LoaderOptions,
    NeighborLoader,
    device_placement,
)
from pyg_distcomm.nn import DistGCNConv
from pyg_distcomm.ops.grid_plan import GridPlan
from pyg_distcomm.partition.folder import write_folder
from pyg_distcomm.sampling.layer_graph import LocalLayerGraph

ROOT = Path(__file__).parents[1]


def _raises_inside():
    mesh = pdc.init(timeout=120)
    share = pdc.partition(GRAPHS["undirected"](), mesh, "random")
    for step in range(5):
        if step == 3 and mesh.rank == 1:
            raise KeyError("the data of step 3")
        share.x.sum()


def test_launch_raises_the_first_cause():
    with pytest.raises(KeyError, match="step 3") as error:
        pdc.launch(_raises_inside, 2, timeout=300)
    assert "rank 1 failed with KeyError" in str(error.value.__cause__)
    assert "_raises_inside" in str(error.value.__cause__)


def _dies(folder):
    mesh = pdc.init(timeout=120)
    share = pdc.partition(GRAPHS["undirected"](), mesh, "random")
    if mesh.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(100):
            share.x.sum()
    except pdc.RankError as error:
        (Path(folder) / str(mesh.rank)).write_text(str(error))
        raise


def test_the_others_name_the_rank_that_died(tmp_path):
    with pytest.raises(pdc.RankError, match="signal 9"):
        pdc.launch(_dies, 2, str(tmp_path), timeout=300)
    told = (tmp_path / "0").read_text()
    assert "lost another rank" in told
    assert "nothing was heard of rank(s) 1" in told


def test_launch_explains_what_it_cannot_send():
    with pytest.raises(TypeError, match=r"\.py file"):
        pdc.launch(lambda: 1, 2)
    with pytest.raises(ValueError, match="at least 1"):
        pdc.launch(_dies, 0)
    for how, kind in {
        ("nprocs", "2"): TypeError,
        ("nprocs", True): TypeError,
        ("threads", -1): ValueError,
        ("threads", 1.5): TypeError,
        ("timeout", "x"): TypeError,
        ("timeout", 0): ValueError,
    }.items():
        name, value = how
        with pytest.raises(kind, match=f"{name} must be .*got {value!r}"):
            pdc.launch(_dies, **{"nprocs": 2, name: value})
    with pytest.raises(TypeError, match="takes a function, got 5"):
        pdc.launch(5, 2)


def _fails_beside_a_collective_of_the_scripts_own():
    mesh = pdc.init(timeout=20)
    if mesh.rank == 1:
        raise LookupError("mine")
    torch.distributed.barrier()


def test_launch_raises_the_cause_and_not_what_gloo_makes_of_it():
    with pytest.raises(LookupError, match="mine"):
        pdc.launch(_fails_beside_a_collective_of_the_scripts_own, 2, timeout=300)


@tiers.parametrize("size", [1, 2, 3], [2])
@worlds.on()
def test_bad_input_raises_on_all_ranks_alike(size):
    mesh, good = worlds.mesh(), GRAPHS["undirected"]()
    edges, share = good.edge_index, pdc.partition(good, mesh, "random")
    above, below = (torch.tensor([[node], [0]]) for node in (50, -1))
    changes = [
        ("float", "edge_index", edges.double()),
        ("NaN|nan", "edge_index", edges * float("nan")),
        ("50", "edge_index", torch.cat([edges, above], 1)),
        ("-1", "edge_index", torch.cat([edges, below], 1)),
        (r"shape|two|\[2", "edge_index", edges.t().contiguous()),
        ("train_mask", "train_mask", torch.ones(49, dtype=torch.bool)),
        ("'x'", "x", good.x[:-1]),
    ]
    if size > 1:  # one rank alone holds something else: all of them say so
        other = edges.flip(1) if mesh.rank == 1 else edges
        mask = good.train_mask[mesh.rank == 1 :]
        changes += [("same graph and arguments on all ranks", "edge_index", other)]
        changes += [(r"rank 1.*train_mask", "train_mask", mask)]
    for told, name, value in changes:
        data = good.clone()
        data[name] = value
        with pytest.raises((TypeError, ValueError), match=told):
            pdc.partition(data, mesh, "random")
    for kind, told, given in (
        (ValueError, "metis", (good, mesh, "metiss")),
        (ValueError, "50", (good, mesh, torch.zeros(49, dtype=torch.long))),
        (ValueError, "part|owner", (good, mesh, torch.full((50,), size))),
        (TypeError, "HeteroData", ([good], mesh)),
        (ValueError, "no nodes of any type", (HeteroData(), mesh)),
        (TypeError, "share already", (share, mesh)),
    ):
        with pytest.raises(kind, match=told):
            pdc.partition(*given)
    # the mesh is as good as before
    torch.testing.assert_close(share.x.sum(), good.x.sum())


@pytest.mark.parametrize("size", [1, 2])
@worlds.on()
def test_misuse_says_what_to_do(size):
    share = pdc.partition(GRAPHS["undirected"](), worlds.mesh(), "random")
    x, edges, plain = share.x, share.edge_index, torch.ones(9, 7).double()
    conv, sage = DistGCNConv(7, 4).double(), pdc.nn.SAGEConv(7, 4).double()
    for error, told, layer, *given in (
        (TypeError, r"data\.x of pdc\.partition", conv, plain, edges),
        (ValueError, "one row for each node", conv, x[share.train_mask], edges),
        (TypeError, "edge_weight", conv, x, edges, torch.ones(3).double()),
        (ValueError, "edge_weight", conv, x, edges, x[:, 0]),
        (ValueError, "bipartite", conv, (x, x), edges),
        (TypeError, "plain tensor", sage, plain, edges),
        (RuntimeError, "", DistGCNConv(7, 4), x, edges),
    ):
        with pytest.raises(error, match=told):
            layer(*given)


def test_data_must_have_edges():
    with pytest.raises(TypeError, match="edge_index"):
        pdc.partition(Data(), pdc.init())


class _Lost:
    """A store whose process has ended: torch prints a page at each call."""

    def __init__(self):
        self.calls = 0

    def set(self, *args):
        self.calls += 1
        raise torch.distributed.DistNetworkError("broken pipe")

    check = set


def test_a_store_that_went_is_asked_once():
    store = _Lost()
    watch = FailureMonitor(store, 1, 2, 60.0)
    told = watch.connection_error("halo", RuntimeError("closed by peer"))
    assert isinstance(told, RankError)
    assert "closed by peer" in str(told)
    assert "store does not answer" in str(
        watch.timeout_error(Wait(watch.places, "halo", 0))
    )
    assert store.calls == 1


class _Stuck:
    """An exchange whose rows another rank never sends."""

    def wait(self, seconds):
        raise RuntimeError("timed out")

    def is_completed(self):
        return False


def test_a_wait_raises_what_another_rank_reported():
    store = torch.distributed.HashStore()
    here, there = (FailureMonitor(store, rank, 2, deadline=0.0) for rank in range(2))
    there.report(LookupError("no such row"))
    with pytest.raises(LookupError, match="rank 1 failed with LookupError: no such"):
        collectives._wait_in_slices(_Stuck(), "halo", here)
    own = r"(?s)rank 1 waited 0 s for halo.*LookupError: no such row"
    with pytest.raises(RankError, match=own):
        collectives._wait_in_slices(_Stuck(), "halo", there)


def test_a_thread_is_refused_while_another_waits():
    watch = FailureMonitor(StoreMailbox(dist.HashStore()), 0, 1, deadline=9.0)
    threads = failure.Threads()
    with threads.waiting(), ThreadPoolExecutor(1) as other:
        with pytest.raises(ValueError, match="from one thread at a time"):
            other.submit(threads.enter, watch).result(60)
        threads.enter(watch)  # this one may go on


def test_a_rank_that_failed_in_another_thread_says_so(monkeypatch):
    monkeypatch.setattr(failure, "_REPORT_GRACE", 0.0)
    watch = FailureMonitor(torch.distributed.HashStore(), 1, 2, deadline=0.0)
    watch.report(LookupError("no such row"))
    told = str(watch.connection_error("halo", RuntimeError("closed by peer")))
    assert "cannot go on with halo" in told
    assert "LookupError: no such row" in told


@worlds.on(3)
def test_what_all_ranks_failed_with_alike_is_over():
    """All ranks fail alike and go on; then one of them fails alone."""
    link = LinkPolicy(Quantise(1, "stochastic"), late=1, exact_last=False)
    mesh = worlds.mesh(fresh=True)
    share = pdc.partition(GRAPHS["undirected"](), mesh, "random", link=link)
    conv = pdc.nn.DistGCNConv(share.num_features, 4).to(share.x.dtype)
    x = share.x.clone().requires_grad_()
    for _ in range(2):
        out = conv(x, share.edge_index).sum()
        out.backward(retain_graph=True)
        link.step()
    with pytest.raises(ValueError, match="gradients twice"):
        out.backward()
    collectives.barrier(mesh.world)
    for slow in range(mesh.size):  # longer than a slice of waiting
        time.sleep(0.6 * (mesh.rank == slow))
        collectives.barrier(mesh.world)
    if mesh.rank == 1:
        mesh.world.watch.report(KeyError("of one rank"))
        return
    with pytest.raises(RuntimeError, match="of one rank"):
        collectives.barrier(mesh.world)


@worlds.on(2, worlds.anew)
def test_what_a_failed_step_sent_stays_with_its_mesh():
    """One rank fails before an exchange that the others have begun; all make a new mesh."""
    first = pdc.init(timeout=120)
    if first.rank:
        first.world.watch.report(OSError("no such file"))
    else:
        collectives.all_to_all(torch.ones(6), [3, 3], [3, 3], first.row, "halo")
    again = pdc.init(timeout=120)
    sent = torch.full((4,), 5.0)
    got = collectives.all_to_all(sent, [2, 2], [2, 2], again.row, "halo").wait()
    assert torch.equal(got, sent)


# A rank that waits for long says where in the script each rank is --------------------

HERE = Path(__file__).name
SOURCE = Path(__file__).read_text().splitlines()


def line(mark):
    """Returns "file:line" of the line of this file that ends with a mark."""
    found = [n for n, text in enumerate(SOURCE, 1) if text.endswith(f"# {mark}")]
    (number,) = found
    return f"{HERE}:{number}"


def share_of(timeout):
    failure._TELL_AFTER, failure._LOOK_INTERVAL = 1.5, 0.3
    mesh = pdc.init(timeout=timeout)
    return mesh, pdc.partition(GRAPHS["undirected"](), mesh, "random")


def asks_alone(others):
    """Rank 0 asks alone; returns what each rank printed, its error, and those after it."""
    mesh, share = share_of(timeout=6)
    conv = pdc.nn.DistGCNConv(7, 4).double()
    loss = conv(share.x.clone().requires_grad_(), share.edge_index).square().sum()
    collectives.barrier(mesh.world)
    printed, said = io.StringIO(), []
    stop = time.monotonic() + 7.5
    with contextlib.redirect_stderr(printed):
        try:
            if mesh.rank == 0:
                print(float(share.x.mean()))  # asks
            elif others[mesh.rank - 1] == "sleep":
                time.sleep(7.5)  # sleeps
            elif others[mesh.rank - 1] == "backward":
                time.sleep(0.5)  # so that rank 0 gives up first
                loss.backward()  # backward
            elif others[mesh.rank - 1] == "barrier":
                dist.barrier()  # torch
            elif others[mesh.rank - 1] == "error":
                with contextlib.suppress(TypeError):  # its own, which it handles
                    torch.ones(1).view("all")
                while time.sleep(0.02) or time.monotonic() < stop:  # computes
                    pass
        except (RuntimeError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
        time.sleep(max(0.0, stop - time.monotonic()))
        for _ in range(2):
            try:
                said.append(float(share.x.sum()))
            except RuntimeError as error:
                said.append(str(error))
    again, share = share_of(timeout=120)
    total = float(share.x.sum())
    again.close()
    return printed.getvalue(), said, total


@tiers.parametrize(
    "others",
    [["error"], ["barrier"], ["sleep", "sleep"], ["error", "backward", "sleep"]],
    [["error"]],
)
def test_a_rank_that_asks_alone(others):
    found = worlds.anew(asks_alone, 1 + len(others), others)
    places = {
        "sleep": line("sleeps"),
        "backward": f"{line('backward')} (backward)",
        "barrier": f"{line('torch')} (barrier)",
        "error": line("computes"),
    }
    each = [f"rank {k} is at {places[other]}" for k, other in enumerate(others, 1)]
    if others == ["sleep", "sleep"]:
        each = [f"ranks 1-2 are at {places['sleep']}"]
    wanted = ", ".join([f"rank 0 waits at {line('asks')} (mean)", *each])
    lines = [text for printed, _, _ in found for text in printed.splitlines()]
    (told,) = [text for text in lines if "pyg_distcomm: after" in text]
    assert told.endswith(wanted), (told, wanted)
    error = found[0][1][0]
    assert error.startswith("RankError: rank 0 waited 6 s for mean, and not every rank")
    assert wanted in error
    for text in (error, *(str(one) for _, said, _ in found for one in said[-2:])):
        assert "make a new one by pdc.init()" in text
    assert len({total for *_, total in found}) == 1


def test_ranks_at_one_place_are_told_together():
    store = StoreMailbox(dist.HashStore())
    watches = [FailureMonitor(store, rank, 70, deadline=60.0) for rank in range(70)]
    wait = Wait(watches[3].places, "halo", 0)
    wait.question = watches[3].places.ask()
    for rank, watch in enumerate(watches):
        watch.places.here = lambda rank=rank: (rank == 3, f"train.py:{9 + rank % 2}")
        if rank != 5:
            watch.answer()
    watches[6].report_exit()
    told = watches[3].places.told(wait)
    even = ", ".join(map(str, [0, 2, 4, *range(8, 70, 2)]))
    odd = ", ".join(map(str, [1, 3, *range(7, 70, 2)]))
    assert told.split(", rank") == [
        f"ranks {even} are at train.py:9",
        f"s {odd} wait at train.py:10",
        " 5 is silent (it was stopped or killed, or a call holds Python's lock)",
        " 6 is at the end of the script",
    ]
    older, wait.question = wait.question, watches[3].places.ask()
    assert older < wait.question
    # those were answers of before
    assert "ranks 0-2, 4-5, 7-69 are silent" in watches[3].places.told(wait)
    for watch in watches[6:]:
        watch.places.here = lambda: (False, "train.py:30")
        watch.answer()
    assert ", ranks 7-69 are at train.py:30" in watches[3].places.told(wait)


class Called(torch.nn.Module):
    def __init__(self, found):
        super().__init__()
        self.found = found

    def forward(self, x):
        import sys

        self.found.append(place_of(sys._getframe().f_back))
        return x


def test_a_place_is_the_innermost_line_of_a_script():
    found = []
    Called(found)(torch.ones(1))  # module
    assert found == [f"{line('module')} (Called)"]
    assert place_of(None) == ""


# Memory that runs out on one rank ----------------------------------------------------

TEXTS = {
    "cuda": (torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2.00 GiB"),
    "cpu": (RuntimeError, "DefaultCPUAllocator: can't allocate memory: you tried to"),
}


PLACES = {
    "product": (kernels, "spmm"),
    "backward": (kernels, "spmm"),
    "halo": (halo.kernels, "gather_rows"),
    "op": (halo.kernels, "gather_rows"),
    "partition": (partition_data, "DividedGraph"),
    "typed": (partition_data, "DividedGraph"),
    "folder": (partition_data, "_read_share"),
    "to": (torch.Tensor, "to"),
    "matrix": (GridPlan, "valued"),
}


def steps(where, mesh):
    """Trains a layer; stops once before an allocation that may fail."""
    data = GRAPHS["undirected"]()
    cut = owners("random", data, mesh.size)
    if where in ("partition", "typed", "folder"):
        yield
    if where == "typed":
        typed = HeteroData()
        typed["v"].x = data.x
        typed["v", "to", "v"].edge_index = data.edge_index
        pdc.partition(typed, mesh, cut)
        collectives.barrier(mesh.world)  # a rank that has room goes on until it waits
    if where == "folder":
        with tempfile.TemporaryDirectory() as folder:
            each = torch.arange(data.num_nodes) % mesh.size
            parts = pdc.Partition.from_owner(each, mesh.size)
            write_folder(f"{folder}/parts", data, parts)
            pdc.load_partition(f"{folder}/parts", mesh)
    share = pdc.partition(data, mesh, cut)
    x = share.x.clone().requires_grad_()
    layer = GATConv(7, 4) if where in ("halo", "op") else DistGCNConv(7, 4)
    conv = layer.double() if where == "op" else pdc.convert(layer.double())
    if where == "backward":
        loss = conv(x, share.edge_index).sum()
        yield
        loss.backward()
        return
    yield
    if where == "to":
        share.x.to(torch.device("cpu"))
        collectives.barrier(mesh.world)
    conv(x, share.edge_index).sum().item()


def full(where, text, ranks):
    """Runs a step in which an allocation fails on some ranks; says what each raised."""
    mesh, (kind, said) = worlds.mesh(fresh=True), TEXTS[text]
    module, name = PLACES[where]
    before = getattr(module, name)

    def fails(*args, **kwargs):
        raise kind(said)

    try:
        for _ in steps(where, mesh):
            if mesh.rank in ranks:
                setattr(module, name, fails)
    except (RuntimeError, MemoryError, pdc.RankError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        setattr(module, name, before)
    return "it went on"


CASES = [
    ("product", "cuda", (1,)),
    ("halo", "cpu", (0,)),
    ("op", "cpu", (1,)),
    ("backward", "cuda", (0,)),
    ("partition", "cpu", (1,)),
    ("product", "cpu", (0, 1)),
    ("typed", "cpu", (0,)),
    ("folder", "cpu", (1,)),
    ("to", "cuda", (1,)),
    ("matrix", "cpu", (0,)),
]


@tiers.parametrize(("where", "text", "ranks"), CASES, slice(0, 3))
def test_all_ranks_say_what_did_not_fit(where, text, ranks):
    part = {"halo": "GATConv, with messages", "op": "index_select() of a tensor ["}
    part |= {"to": "a tensor of rows"}
    part |= dict.fromkeys(("partition", "typed", "folder"), "share of the graph")
    part |= {"matrix": "a matrix of"}
    part = part.get(where, "a product of the graph and rows")
    for said in worlds.run(full, 2, where, text, ranks):
        assert re.search(r"needs about [\d,]+ bytes", said), said
        assert part in said
        assert re.search(r"4 ranks, about [\d,]+ bytes on each", said), said
        assert "memory=" in said
        assert TEXTS[text][1] in said
        assert said.startswith(("OutOfMemoryError", "MemoryError", "RankError")), said


def test_other_errors_stay_as_they_are(monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("misaligned address")

    share = pdc.partition(GRAPHS["undirected"](), pdc.init(), "random")
    monkeypatch.setattr(kernels, "spmm", fails)
    with pytest.raises(RuntimeError, match=r"^misaligned address$"):
        DistGCNConv(7, 4).double()(share.x, share.edge_index)


@pytest.mark.parametrize("part", ["rows", "graph", "layers"])
def test_a_loader_names_what_does_not_fit_on_the_device(part, monkeypatch):
    """The host stands for a device, whose rows are copied there all the same."""
    monkeypatch.setattr(device_placement, "HOST", frozenset())
    data, device = GRAPHS["undirected"](), torch.device("cpu")
    how = {"batch_size": 4, "options": LoaderOptions(device=device)}
    placed, ids = device_placement.Placement(device), torch.tensor([1])

    def fails(*args, **kwargs):
        raise torch.OutOfMemoryError(TEXTS["cuda"][1])

    place, run, text = {
        "rows": (
            (device_placement.Placement, "put"),
            lambda: placed.take((None, "x"), data.x, ids),
            "rows_on='host'",
        ),
        "graph": (
            (kernels, "neighbor_sampler"),
            lambda: list(NeighborLoader(data, [2], **how)),
            "graph_on='pinned'",
        ),
        "layers": (
            (LocalLayerGraph, "on"),
            lambda: DistLayerLoader(data, [4, 4], **how),
            "graph_on='pinned'",
        ),
    }[part]
    monkeypatch.setattr(*place, fails)
    wanted = rf"out of memory on cpu of rank 0: .* about [\d,]+ bytes.*{text}"
    with pytest.raises(MemoryError, match=wanted):
        run()

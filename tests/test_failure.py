"""An error on one rank reaches all of them, within seconds, with its cause."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiers
import torch
import worlds
from problems import GRAPHS
from torch_geometric.data import Data, HeteroData

import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives, failure
from pyg_distcomm.comm.failure import FailureMonitor, Wait
from pyg_distcomm.comm.store import RankError
from pyg_distcomm.halo.codecs import Quantise
from pyg_distcomm.halo.policy import LinkPolicy

ROOT = Path(__file__).parents[1]


def _raises_inside():
    mesh = pdc.init(timeout=120)
    share = pdc.partition(GRAPHS["undirected"](), mesh, "random")
    for step in range(5):
        if step == 3 and mesh.rank == 1:
            raise KeyError("the data of step 3")
        share.x.sum()


def _returns(value):
    mesh = pdc.init()
    return mesh.rank, value


def test_launch_returns_what_each_rank_returns():
    assert pdc.launch(_returns, 2, "x") == [(0, "x"), (1, "x")]


def test_launch_raises_the_first_cause():
    with pytest.raises(KeyError, match="step 3") as error:
        pdc.launch(_raises_inside, 3, timeout=300)
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
        pdc.launch(_dies, 3, str(tmp_path), timeout=300)
    for rank in (0, 2):
        told = (tmp_path / str(rank)).read_text()
        assert "lost another rank" in told
        # on a busy machine another may be late to say that it noticed
        assert re.search(r"nothing was heard of rank\(s\) [\d, ]*\b1\b", told)


def test_launch_explains_what_it_cannot_send():
    with pytest.raises(TypeError, match=r"\.py file"):
        pdc.launch(lambda: 1, 2)
    with pytest.raises(ValueError, match="at least 1"):
        pdc.launch(_returns, 0)
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
            pdc.launch(_returns, **{"nprocs": 2, name: value})
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


CAUSE = """
import pyg_distcomm as pdc, torch
mesh = pdc.init(timeout=120)
x = torch.ones(3)
from pyg_distcomm.comm import collectives
if mesh.rank == 1:
    raise ValueError("bad luck on this rank")
try:
    collectives.all_reduce(x, mesh.world)
except ValueError as error:
    print("HEARD", str(error).splitlines()[0])
    raise
"""


@tiers.rare
@pytest.mark.subprocess
def test_torchrun_ends_with_the_cause(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(CAUSE)
    launcher = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    how = {"env": env, "capture_output": True, "text": True, "timeout": 600}
    done = subprocess.run([sys.executable, *launcher, script], **how, check=False)
    assert done.returncode != 0
    assert "bad luck on this rank" in done.stderr
    heard = "HEARD rank 1 failed with ValueError: bad luck on this rank"
    assert heard in done.stdout or "SIGTERM" in done.stderr  # torchrun may be faster


def _bad_inputs():
    mesh = worlds.mesh()
    good = GRAPHS["undirected"]()
    cases = []

    def case(text, kind, **change):
        data = good.clone()
        for name, value in change.items():
            data[name] = value
        cases.append((text, kind, data))

    edges = good.edge_index
    case("float", TypeError, edge_index=edges.double())
    case("NaN|nan", (TypeError, ValueError), edge_index=edges * float("nan"))
    case("50", ValueError, edge_index=torch.cat([edges, torch.tensor([[50], [0]])], 1))
    case("-1", ValueError, edge_index=torch.cat([edges, torch.tensor([[-1], [0]])], 1))
    case("shape|two|\\[2", ValueError, edge_index=edges.t().contiguous())
    case("train_mask", ValueError, train_mask=torch.ones(49, dtype=torch.bool))
    case("'x'", ValueError, x=good.x[:-1])
    for text, kind, data in cases:
        with pytest.raises(kind, match=text):
            pdc.partition(data, mesh, "random")
    with pytest.raises(ValueError, match="metis"):
        pdc.partition(good, mesh, "metiss")
    with pytest.raises(ValueError, match="50"):
        pdc.partition(good, mesh, torch.zeros(49, dtype=torch.long))
    with pytest.raises(ValueError, match=r"part|owner"):
        pdc.partition(good, mesh, torch.full((50,), mesh.size))
    with pytest.raises(TypeError, match="HeteroData"):
        pdc.partition([good], mesh)
    with pytest.raises(ValueError, match="no nodes of any type"):
        pdc.partition(HeteroData(), mesh)
    share = pdc.partition(good, mesh, "random")
    with pytest.raises(TypeError, match="share already"):
        pdc.partition(share, mesh)
    if mesh.size > 1:  # one rank alone holds something else: all of them say so
        data = good.clone()
        if mesh.rank == 1:
            data.edge_index = edges.flip(1)
        with pytest.raises(ValueError, match="same graph and arguments on all ranks"):
            pdc.partition(data, mesh, "random")
        data = good.clone()
        if mesh.rank == 1:
            data.train_mask = data.train_mask[:-1]
        with pytest.raises(ValueError, match=r"rank 1.*train_mask"):
            pdc.partition(data, mesh, "random")
    return float(share.x.sum())  # the mesh is as good as before


@tiers.parametrize("size", [1, 2, 3], [1, 3])
def test_bad_input_raises_on_all_ranks_alike(size):
    assert len({round(v, 9) for v in worlds.run(_bad_inputs, size)}) == 1


def _misuse():
    from pyg_distcomm.nn import DistGCNConv, DistSAGEConv

    mesh = worlds.mesh()
    data = GRAPHS["undirected"]()
    share = pdc.partition(data, mesh, "random")
    conv = DistGCNConv(7, 4).double()
    with pytest.raises(TypeError, match=r"data\.x of pdc\.partition"):
        conv(data.x[:9], share.edge_index)
    with pytest.raises(ValueError, match="one row for each node"):
        conv(share.x[share.train_mask], share.edge_index)
    with pytest.raises(TypeError, match="edge_weight"):
        conv(share.x, share.edge_index, torch.ones(3).double())
    with pytest.raises(ValueError, match="edge_weight"):
        conv(share.x, share.edge_index, share.x[:, 0])
    with pytest.raises(ValueError, match="bipartite"):
        conv((share.x, share.x), share.edge_index)
    with pytest.raises(TypeError, match="plain tensor"):
        DistSAGEConv(7, 4).double()(data.x[:9], share.edge_index)
    with pytest.raises(RuntimeError):
        conv.float()(share.x, share.edge_index)
    with pytest.raises(TypeError, match="Module"):
        pdc.convert("model")
    with pytest.raises(ValueError, match="no_such_folder"):
        pdc.load_partition("/no_such_folder", mesh)


@pytest.mark.parametrize("size", [1, 2])
def test_misuse_says_what_to_do(size):
    worlds.run(_misuse, size)


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
    with pytest.raises(RankError, match="rank 1 waited 0 s for halo"):  # its own error
        collectives._wait_in_slices(_Stuck(), "halo", there)


def test_a_rank_that_failed_in_another_thread_says_so(monkeypatch):
    monkeypatch.setattr(failure, "_REPORT_GRACE", 0.0)
    watch = FailureMonitor(torch.distributed.HashStore(), 1, 2, deadline=0.0)
    watch.report(LookupError("no such row"))
    told = str(watch.connection_error("halo", RuntimeError("closed by peer")))
    assert "cannot go on with halo" in told
    assert "LookupError: no such row" in told


def fails_alike():
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


def test_what_all_ranks_failed_with_alike_is_over():
    worlds.run(fails_alike, 3)


def goes_on():
    """One rank fails before an exchange that the others have begun; all make a new mesh."""
    first = pdc.init(timeout=120)
    if first.rank:
        first.world.watch.report(OSError("no such file"))
    else:
        collectives.all_to_all(torch.ones(6), [3, 3], [3, 3], first.row, "halo")
    again = pdc.init(timeout=120)
    sent = torch.full((4,), 5.0)
    return (
        collectives.all_to_all(sent, [2, 2], [2, 2], again.row, "halo").wait().tolist()
    )


def test_what_a_failed_step_sent_stays_with_its_mesh():
    assert worlds.run(goes_on, 2) == [[5.0] * 4] * 2
    worlds.only(0)

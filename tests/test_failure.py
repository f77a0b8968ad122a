"""An error on one rank reaches all of them, within seconds, with its cause."""

from __future__ import annotations

import os
import re
import signal
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


@tiers.parametrize("size", [1, 2, 3], [1, 3])
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

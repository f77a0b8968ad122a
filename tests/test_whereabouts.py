"""A rank that waits for long says where in the script each rank is."""

from __future__ import annotations

import contextlib
import io
import time
from pathlib import Path

import pytest
import tiers
import torch
import torch.distributed as dist
import worlds
from problems import GRAPHS

import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives, failure
from pyg_distcomm.comm.failure import FailureMonitor, Wait, place_of
from pyg_distcomm.comm.store import StoreMailbox

HERE = Path(__file__).name
SOURCE = Path(__file__).read_text().splitlines()


def line(mark):
    """Returns "file:line" of the line of this file that ends with a mark."""
    found = [n for n, text in enumerate(SOURCE, 1) if text.endswith(f"# {mark}")]
    (number,) = found
    return f"{HERE}:{number}"


def share_of(timeout, tell_after=1.5):
    failure._TELL_AFTER, failure._LOOK_INTERVAL = tell_after, 0.3
    mesh = pdc.init(timeout=timeout)
    return mesh, pdc.partition(GRAPHS["undirected"](), mesh, "random")


def compute_until(stop):
    while time.sleep(0.02) or time.monotonic() < stop:  # computes
        pass


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
                compute_until(stop)
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


@worlds.on(2)
def test_a_mesh_works_after_ranks_that_called_different_operations():
    mesh = pdc.init(timeout=120)
    share = pdc.partition(GRAPHS["undirected"](), mesh, "random")
    with pytest.raises(ValueError, match="run the same operations on all ranks"):
        share.x.mean() if mesh.rank else share.x.sum()
    found = float(share.x.sum()), float(share.x.mean())
    assert set(collectives.all_gather_object(found, mesh.world)) == {found}


def is_late():
    """The last rank comes late, again and again; returns what each rank printed."""
    mesh, share = share_of(timeout=100, tell_after=1.0)
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        for _ in range(2):
            if mesh.rank == mesh.size - 1:
                time.sleep(2.5)  # late
            (share.x * 1.5).sum()  # waits
            collectives.barrier(mesh.world)
    return printed.getvalue()


def test_one_line_is_printed_for_each_long_wait():
    printed = worlds.anew(is_late, 3)
    (first, second) = [text for one in printed for text in one.splitlines()]
    told = f"ranks 0-1 wait at {line('waits')} (sum), rank 2 is at {line('late')}"
    assert told in first
    assert told in second


def monitors(size):
    store = StoreMailbox(dist.HashStore())
    return [FailureMonitor(store, rank, size, deadline=60.0) for rank in range(size)]


def test_ranks_at_one_place_are_told_together():
    watches = monitors(70)
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

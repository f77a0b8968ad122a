"""Describes axes of the mesh, opens grids of them, and ends their messages at exit.

[Note: receive first] A gloo rank sends only once the other has said that it is ready to
receive, and says so itself over the connection that it also sends over. Gloo's collectives
post their sends before their receives, so the later rank finds the other ready and sends
at once, its own "ready" waits behind all of that, and the two directions take turns on the
link. An exchange is therefore made of messages: a rank that sends much to another first
posts what it will receive from it. Where little is sent, sends go first, which takes fewer
turns. A wait of torch for a message that times out breaks the connection, so threads of their
own wait without a timeout, and keep the buffers until all messages are done.

[Note: exit] A thread of gloo releases the tensors of a collective after the waiting thread has
gone on, and takes the GIL to do so. A thread that asks for the GIL while Python shuts down
aborts the process ("terminate called without an active exception", exit code -6;
pytorch/pytorch#190489). A script whose last line is a training step can exit that fast. So at
exit, running exchanges get a moment to complete, all groups are aborted (torch would wait for
their timeouts: see [Note: one deadline]), and the GIL is released until gloo's threads sleep.

[Note: channels] Collectives of one process group have to start in the same order on all
ranks. Sampling and fetching run in their own threads, so each has its own process groups,
independent of the order of training's collectives.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from pyg_distcomm.comm.failure import FailureMonitor, abort_all_groups
from pyg_distcomm.comm.ledger import Ledger
from pyg_distcomm.comm.messages import Rings, open_rings
from pyg_distcomm.comm.store import RankError, open_group
from pyg_distcomm.process import PROCESS

# seconds at exit for exchanges to complete, and for threads to sleep
_EXIT_TIMEOUT = 2.0
_POLL_INTERVAL = 0.005  # seconds, enough for a thread that waits for the GIL to get it
_EXIT_SLEEP = 0.05  # seconds to sleep where the system does not list threads
_THREADS_FOLDER, _GLOO_THREAD = "/proc/self/task", "pt_gloo_runloop"


@dataclass(frozen=True, eq=False)
class Axis:
    """Describes a mesh axis as this rank sees it: the ranks that communicate along it.

    Args:
        name: "row", "col", "fiber", "world" or "data".
        rank: this rank's place on the axis.
        size: how many ranks the axis has.
        group: their process group; None when there is no other rank.
        ledger: counts what travels over the axis.
        watch: the monitor that reports and raises failures; None on one rank.
        observer: called in a dry run on one rank with what more ranks would do, the tensor
            that they would do it with, and this axis: "sum" it over the ranks, as gradients
            of "parameters" at the end of a pass, "gather" all of its rows, send "rows" to
            the ranks that read them, or sums "back".
        meeting: passes rows between ranks that are threads of this process, where plans are
            made for all of them; see `plan.ranks.Meeting`.
        rings: carry messages of host memory where all ranks are on one host, else None.
    """

    name: str
    rank: int
    size: int
    group: dist.ProcessGroup | None
    ledger: Ledger
    watch: FailureMonitor | None
    observer: Callable[[str, Tensor, Axis], None] | None = None
    meeting: Any = None
    rings: Rings | None = None

    def __post_init__(self) -> None:
        if self.watch is not None and self.group not in (None, dist.group.WORLD):
            self.watch.groups.add(self.group)
        if self.watch is not None and self.rings is not None:
            self.watch.rings.add(self.rings)

    def __repr__(self) -> str:
        return f"Axis({self.name} {self.rank}/{self.size})"


def open_axes(
    lines: Mapping[str, Sequence[Sequence[int]]],
    rank: int,
    watch: FailureMonitor | None,
    ledger: Ledger,
    gloo: Collection[str],
) -> dict[str, Axis]:
    """Opens the axes of a rank by name, each with a process group of more ranks than one.

    Args:
        lines: the ranks along each line of an axis. Every rank takes part in making every
            group, in the same order, as torch requires.
        rank: this rank.
        watch, ledger: those of each axis.
        gloo: the axes whose messages lie in host memory.
    """
    own: dict[str, tuple[Sequence[int], Any]] = {}
    for name, ranks in lines.items():
        for line in ranks:
            group = None
            if len(line) > 1 and watch is not None:
                backend = "gloo" if name in gloo else None
                group = open_group(list(line), backend, watch.deadline)
            if rank in line:
                own[name] = list(line), group
    rings: dict[str, Rings] = {}
    if watch is not None:
        more = {name: line for name, line in own.items() if line[1] is not None}
        rings = open_rings(more, watch)
    return {
        name: Axis(
            *(name, line.index(rank), len(line), group, ledger, watch),
            rings=rings.get(name),
        )
        for name, (line, group) in own.items()
    }


def destroy_groups(
    axes: Iterable[Axis], more: Iterable[dist.ProcessGroup] = ()
) -> None:
    """Destroys the process groups of axes, except WORLD, once nothing uses them.

    In the same order on all ranks, as NCCL requires.
    """
    groups = [*(axis.group for axis in axes), *more]
    for group in dict.fromkeys(groups):
        known = group in dist.distributed_c10d._world.pg_map
        if known and group is not dist.group.WORLD:
            dist.destroy_process_group(group)


@dataclass(frozen=True, eq=False)
class ProcessGrid:
    """Describes a grid of P/c x c ranks with process groups of its own.

    Rank q stands at row q // c, column q % c. The c ranks of one row hold the same
    block of data; the P/c ranks of one column hold all blocks between them.

    Args:
        replication: c.
        world: all ranks.
        row: the ranks of this column, one for each block (the axis on which i varies).
        col: the ranks of this row, which hold the same block.
    """

    replication: int
    world: Axis
    row: Axis
    col: Axis

    @property
    def block(self) -> int:
        """Returns the block that this rank holds: its place on the row axis."""
        return self.row.rank

    def members(self, block: int) -> range:
        """Returns the ranks that hold a block."""
        return range(block * self.replication, (block + 1) * self.replication)

    def close(self) -> None:
        """Destroys the process groups, once nothing uses them.

        After a failure they are kept: a rank that still waits could not destroy them.
        """
        watch = self.world.watch
        if not dist.is_initialized() or (
            watch is not None and watch.reported_failure()
        ):
            return
        # c = 1: row and world share one group
        destroy_groups((self.world, self.row, self.col))


def new_process_grid(
    mesh: Any, replication: int | None = None, purpose: str = ""
) -> ProcessGrid:
    """Opens a process grid; collective over all ranks of the mesh.

    Args:
        mesh: the ranks.
        replication: c, which has to divide P. The default is that of the mesh if its
            grid is (P/c, c, 1), and 1 otherwise.
        purpose: a prefix of the names of the axes in the ledger.

    Raises:
        ValueError: if c does not divide P; the message lists the values that do.
    """
    c = check_replication(mesh, replication)
    everyone = range(mesh.size)
    rows = [everyone[i : i + c] for i in range(0, mesh.size, c)]
    lines = {
        "world": [everyone],
        "row": [everyone[j::c] for j in range(c)],
        "col": rows,
    }
    if c == 1:  # which are those of the world
        del lines["row"]
    ledger, watch = Ledger(parent=mesh.ledger), mesh.world.watch
    # ids and features lie in host memory: gloo moves them whatever training uses
    axes = open_axes(lines, mesh.rank, watch, ledger, gloo=lines)
    every = (axes["world"], axes.get("row", axes["world"]), axes["col"])
    before = f"{purpose}:" if purpose else ""
    named = zip(every, ("world", "row", "col"), strict=True)
    return ProcessGrid(c, *(replace(axis, name=before + name) for axis, name in named))


def check_replication(mesh: Any, replication: int | None) -> int:
    """Returns c, or raises an error that lists the values that fit."""
    if replication is None:
        r, s, p = mesh.grid
        return s if p == 1 and r > 1 else 1
    fits = [c for c in range(1, mesh.size + 1) if mesh.size % c == 0]
    if replication not in fits:
        raise ValueError(
            f"replication={replication!r} must divide the number of ranks, {mesh.size}; "
            f"it may be one of {fits}"
        )
    return int(replication)


@atexit.register
def drain_at_exit() -> None:
    """Ends running exchanges at exit, and lets gloo's threads sleep: see [Note: exit]."""
    if PROCESS.answering is not None:
        PROCESS.answering.end()
    for messages in list(PROCESS.messages):
        messages.abort()
    stop = time.monotonic() + _EXIT_TIMEOUT
    for work in list(PROCESS.works):
        left = max(stop - time.monotonic(), 0.001)
        with contextlib.suppress(Exception):
            work.wait(timedelta(seconds=left))
    abort_all_groups()
    _poll(lambda: all(work.is_completed() for work in PROCESS.works))
    PROCESS.works.clear()
    if dist.is_initialized() and not os.path.isdir(_THREADS_FOLDER):
        time.sleep(_EXIT_SLEEP)
    seen: list[dict[str, str]] = [{}]

    def are_asleep() -> bool:
        seen.append(_gloo_threads())
        same = seen[-1] == seen[-2]
        return same and not any("R (" in state for state in seen[-1].values())

    _poll(are_asleep)


def _poll(has_ended: Callable[[], bool]) -> None:
    stop = time.monotonic() + _EXIT_TIMEOUT
    while not has_ended() and time.monotonic() < stop:
        time.sleep(_POLL_INTERVAL)


def _gloo_threads() -> dict[str, str]:
    """Returns the state and the context switches of each gloo thread, on Linux."""
    found = {}
    with contextlib.suppress(OSError):
        for thread in os.listdir(_THREADS_FOLDER):
            with (
                contextlib.suppress(OSError),
                open(f"{_THREADS_FOLDER}/{thread}/status") as file,
            ):
                lines = file.read().splitlines()
                if lines[0].split()[-1] == _GLOO_THREAD:
                    fields = ("State", "voluntary", "nonvoluntary")
                    found[thread] = " ".join(s for s in lines if s.startswith(fields))
    return found


def exit_on_sigterm() -> None:
    """Makes SIGTERM end this process as sys.exit does, so that a script's cleanup runs.

    Does nothing if a script has its own handler, or outside of the main thread.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return

    def end(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_DFL)
        if PROCESS.answering is None:  # a forked process, which is not a rank
            signal.raise_signal(number)
        for watch in [watch for watch in PROCESS.monitors if watch.size > 1]:
            watch.report(RankError("it was ended by SIGTERM"))
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)

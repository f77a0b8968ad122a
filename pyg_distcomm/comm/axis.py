"""Begins and awaits exchanges over an axis of the mesh, and ends them with the process.

A rank waits in slices, and looks between them whether another has failed: see
[Note: failure].

[Note: receive first] A gloo rank sends only once the other has said that it is ready to
receive, and says so itself over the connection that it also sends over. Gloo's collectives
post their sends before their receives, so the later rank finds the other ready and sends
at once, its own "ready" waits behind all of that, and the two directions take turns on the
link. An exchange is therefore made of messages: a rank that sends much to another first
posts what it will receive from it. Where little is sent, sends go first, which takes fewer
turns. Torch's waits for a message have no end that leaves the connection whole, so threads
wait, and keep the buffers until the messages have come and gone.

[Note: at rest] A thread of gloo releases a collective's tensors after whoever waited for it
goes on, and needs Python's lock to do so. A thread that asks for the lock while Python ends
takes the process down ("terminate called without an active exception", exit code -6;
pytorch/pytorch#190489), and a script whose last line is a step of training is as quick as
that. So when a process ends, what is under way has a moment to end, all groups are broken
off (torch would wait for their timeouts: see [Note: one deadline]), and the lock is left to
gloo's threads until they sleep.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import get_worker_info

from pyg_distcomm.comm.failure import FailureMonitor, break_off_all
from pyg_distcomm.comm.ledger import Ledger
from pyg_distcomm.comm.store import RankError
from pyg_distcomm.comm.trace import Exchange, label
from pyg_distcomm.process import PROCESS

_SLICE = timedelta(seconds=0.25)
_LONG = timedelta(days=30)  # who waits for messages has a deadline, and breaks them off
_BUSY = 5.0  # seconds for threads to come back, where processors are busy
_PATIENCE = 2.0  # seconds, as a process ends, for exchanges to end and threads to sleep
_PAUSE = 0.005  # seconds in which a thread that waits for Python's lock would get it
_UNSEEN = 0.05  # seconds left to threads where the system does not list them
_TASKS, _NAME = "/proc/self/task", "pt_gloo_runloop"
_MANY = 8  # collectives remembered before those that have ended are forgotten


@dataclass(frozen=True, eq=False)
class Axis:
    """Describes a mesh axis as this rank sees it: the ranks that communicate along it.

    Args:
        name: "row", "col", "fiber", "world" or "data".
        rank: this rank's place on the axis.
        size: how many ranks the axis has.
        group: their process group; None when there is no other rank.
        ledger: where what travels is counted.
        watch: where failures are reported and looked up.
        observer: called in a dry run on one rank with each tensor that more ranks would
            sum, and whether its gradient would be summed too.
    """

    name: str
    rank: int
    size: int
    group: dist.ProcessGroup | None
    ledger: Ledger
    watch: FailureMonitor | None
    observer: Callable[[Tensor, bool], None] | None = None

    def __post_init__(self) -> None:
        if self.watch is not None and self.group not in (None, dist.group.WORLD):
            self.watch.groups.add(self.group)

    def __repr__(self) -> str:
        return f"Axis({self.name} {self.rank}/{self.size})"


@dataclass(eq=False)
class Pending:
    """Represents an exchange under way; `wait()` returns what arrived."""

    out: Tensor
    device: torch.device
    axis: Axis
    op: str
    work: dist.Work | Messages | None = None
    traced: Exchange | None = None
    kept: Any = None  # what is being sent must live until it has left
    into: Tensor | None = None
    wanted: Sequence[int] = ()  # how many rows of each block of `out`, if not all

    def __post_init__(self) -> None:
        if isinstance(self.work, dist.Work) and not self.out.is_cuda:
            _remember(self.work)
        if self.traced is not None:  # on a stream, futures end too early
            get = None if self.out.is_cuda else getattr(self.work, "get_future", None)
            self.traced.under_way(get and get())

    def wait(self) -> Tensor:
        """Blocks until everything has arrived, and returns it."""
        if self.work is not None:
            start = time.perf_counter_ns()
            with label(f"wait for {self.op} over {self.axis.name}"):
                _wait(self.work, self.axis, self.op, self.out.is_cuda)
            spent = (time.perf_counter_ns() - start) / 1e9
            self.axis.ledger.waited(self.op, self.axis.name, spent)
            if self.traced is not None:
                self.traced.waited(start)
            PROCESS.works.discard(self.work)
            self.work = self.kept = None
            if self.wanted and len(self.out) != sum(self.wanted):
                blocks = self.out.chunk(len(self.wanted))
                pairs = zip(blocks, self.wanted, strict=True)
                self.out = torch.cat([block[:count] for block, count in pairs])
        if self.into is not None and self.into is not self.out:
            self.out = self.into.copy_(self.out)
        return self.out.to(self.device)


def _wait(work: dist.Work | Messages, axis: Axis, op: str, on_stream: bool) -> None:
    watch, doing = axis.watch, f"{op} over axis {axis.name}"
    if watch is None:
        work.wait()
        return
    if on_stream:  # which waits, and not this thread
        watch.streamed.add(work, doing)
        work.wait()
        return
    try:
        with watch.threads.waiting() if _is_owned(axis) else contextlib.nullcontext():
            _wait_in_slices(work, doing, watch)
    except BaseException as error:  # what is under way is lost: others must not wait
        watch.fail(error)
        raise


def _wait_in_slices(
    work: dist.Work | Messages, doing: str, watch: FailureMonitor
) -> None:
    start, said = time.monotonic(), False
    while not _arrived(work, doing, watch):
        if not said:
            watch.say(doing)
            said = True
        watch.look()
        if time.monotonic() - start > watch.deadline:
            raise watch.expired(doing)
    if said:
        watch.say("not waiting (computing)")


def _arrived(work: dist.Work | Messages, doing: str, watch: FailureMonitor) -> bool:
    """Waits a slice; False if it was too short, an exception if the transport broke."""
    try:
        work.wait(_SLICE)
        return True
    except RuntimeError:
        if not work.is_completed():
            return False
    try:  # it ended between the two lines above: well or badly
        work.wait()
        return True
    except RuntimeError as error:
        raise watch.broken(doing, error) from None


class guarded:
    """Begins an exchange in a block; raises why, if the transport breaks."""

    __slots__ = ("_axis", "_label", "_op")

    def __init__(self, axis: Axis, op: str) -> None:
        self._axis, self._op = axis, op
        self._label = label(f"{op} over {axis.name}")

    def __enter__(self) -> None:
        watch = self._axis.watch
        if watch is not None and watch.closed:
            raise RankError(
                f"{self._op} over a mesh that was closed; make a new one by pdc.init()"
            )
        if watch is not None and get_worker_info() is not None:
            raise ValueError(
                "leave num_workers at 0 where a DataLoader reads rows of a share, or give it "
                f"x.full_tensor(): its workers are no ranks, and {self._op} needs all ranks"
            )
        if watch is not None and watch.streamed.error is not None:
            raise watch.streamed.error
        if watch is not None and _is_owned(self._axis):
            watch.threads.enter(watch)
        self._label.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._label.__exit__(kind, error, trace)
        watch = self._axis.watch
        if watch is None or not isinstance(error, RuntimeError):
            return
        reason = watch.broken(f"{self._op} over axis {self._axis.name}", error)
        watch.fail(reason)
        raise reason from None


def _is_owned(axis: Axis) -> bool:
    """Returns whether an axis is the mesh's own; loaders have others for their threads."""
    return axis.watch is not None and axis.group in axis.watch.threads.of


def let_go(axes: Iterable[Axis], more: Iterable[dist.ProcessGroup] = ()) -> None:
    """Ends the process groups of axes, but the caller's; nothing may be under way.

    In the same order on all ranks, as NCCL needs it.
    """
    groups = [*(axis.group for axis in axes), *more]
    for group in dict.fromkeys(groups):
        known = group in dist.distributed_c10d._world.pg_map
        if known and group is not dist.group.WORLD:
            dist.destroy_process_group(group)


class Messages:
    """Waits for messages under way, with the methods of a `Work` that an exchange needs.

    Args:
        works: what torch returned for each message.
        kept: what must live until they are done.
    """

    def __init__(self, works: Sequence[dist.Work], kept: Any) -> None:
        self._works = works
        self._kept = kept
        self._done = threading.Event()
        self._error: Exception | None = None
        self._told: SimpleQueue[Callable[[Messages], None]] = SimpleQueue()
        if not works:
            self._done.set()
            return
        PROCESS.messages.add(self)
        _inbox().put(self)

    def is_completed(self) -> bool:
        """Returns whether all have arrived, or one has failed."""
        return self._done.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for all of them.

        Raises:
            RuntimeError: if the transport broke, or after `timeout`; they go on then.
        """
        if not self._done.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError(f"messages are still under way after {timeout}")
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> Messages:
        """Returns the object that takes callbacks for the end: itself."""
        return self

    def add_done_callback(self, tell: Callable[[Messages], None]) -> None:
        """Calls back once all have arrived, or one has failed."""
        self._told.put(tell)
        if self._done.is_set():
            self._tell()

    def _tell(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                self._told.get_nowait()(self)

    def run(self) -> None:
        """Waits for one after the other, in a thread that has nothing else to do."""
        try:
            self._finish()
        except Exception as error:
            self._error = error.with_traceback(None)
        PROCESS.messages.discard(self)
        # torch's objects go before anyone learns of the end, which may be Python's too
        self._works, self._kept = (), None
        self._done.set()
        self._tell()

    def _finish(self) -> None:
        for work in self._works:
            work.wait(_LONG)

    def give_up(self) -> None:
        """Ends the wait, and with it the connections of the group."""
        # the thread waits in this order: a wait for a later one could take its end from it
        for work in self._works[:1]:
            try:
                work.wait(timedelta(milliseconds=1))
            except RuntimeError:
                self._done.wait(_BUSY)


def _inbox() -> SimpleQueue[Messages]:
    try:
        return PROCESS.inboxes.pop()
    except IndexError:
        inbox: SimpleQueue[Messages] = SimpleQueue()
        # a daemon: a process that leaves early must not wait for what will not come
        threading.Thread(target=_serve, args=(inbox,), daemon=True).start()
        return inbox


def _serve(inbox: SimpleQueue[Messages]) -> None:
    while True:
        inbox.get().run()
        PROCESS.inboxes.append(inbox)


def _remember(work: dist.Work) -> None:
    """Keeps a collective, which perhaps nobody will wait for, until it has ended."""
    if len(PROCESS.works) >= _MANY:
        ended = [one for one in list(PROCESS.works) if one.is_completed()]
        PROCESS.works.difference_update(ended)
    PROCESS.works.add(work)


@atexit.register
def come_to_rest() -> None:
    """Ends what is under way, and lets gloo's threads come to rest."""
    for messages in list(PROCESS.messages):
        messages.give_up()
    stop = time.monotonic() + _PATIENCE
    for work in list(PROCESS.works):
        left = max(stop - time.monotonic(), 0.001)
        with contextlib.suppress(Exception):
            work.wait(timedelta(seconds=left))
    break_off_all()
    stop = time.monotonic() + _PATIENCE
    while (
        any(not work.is_completed() for work in PROCESS.works)
        and time.monotonic() < stop
    ):
        time.sleep(_PAUSE)
    PROCESS.works.clear()
    if dist.is_available() and dist.is_initialized() and not os.path.isdir(_TASKS):
        time.sleep(_UNSEEN)
    stop = time.monotonic() + _PATIENCE
    before, now = None, _gloo_threads()
    while now and time.monotonic() < stop:
        if now == before and not any("R (" in state for state in now.values()):
            return
        time.sleep(_PAUSE)
        before, now = now, _gloo_threads()


def _gloo_threads() -> dict[str, str]:
    """Returns the state of each, and how often it has come and gone, on Linux."""
    found = {}
    with contextlib.suppress(OSError):
        for thread in os.listdir(_TASKS):
            with (
                contextlib.suppress(OSError),
                open(f"{_TASKS}/{thread}/status") as file,
            ):
                lines = file.read().splitlines()
                if lines[0].split()[-1] == _NAME:
                    told = ("State", "voluntary", "nonvoluntary")
                    found[thread] = " ".join(s for s in lines if s.startswith(told))
    return found

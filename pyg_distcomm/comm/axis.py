"""Holds a process group as one axis of the mesh, and waits for exchanges over it.

A rank waits in slices, and looks between them whether another has failed: see
[Note: failure].
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyg_distcomm.comm import shutdown
from pyg_distcomm.comm.failure import FailureMonitor, RankError
from pyg_distcomm.comm.ledger import Ledger
from pyg_distcomm.comm.p2p import Messages
from pyg_distcomm.comm.timeline import Exchange, label

_SLICE = timedelta(seconds=0.25)


@dataclass(frozen=True, eq=False)
class Axis:
    """One mesh axis seen from this rank: the ranks that talk to each other along it.

    Args:
        name: "row", "col", "fiber", "world" or "data".
        rank: this rank's place on the axis.
        size: how many ranks the axis has.
        group: their process group; None when there is nobody to talk to.
        ledger: where what travels is counted.
        watch: where failures are told and learnt.
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
    """An exchange under way; `wait()` returns what arrived."""

    out: Tensor
    device: torch.device
    axis: Axis
    op: str
    work: dist.Work | Messages | None = None
    traced: Exchange | None = None
    kept: Any = None  # what is being sent must live until it has left
    into: Tensor | None = None

    def __post_init__(self) -> None:
        if isinstance(self.work, dist.Work) and not self.out.is_cuda:
            shutdown.keep_in_mind(self.work)
        if self.traced is not None:  # on a stream, futures do not tell
            told = None if self.out.is_cuda else getattr(self.work, "get_future", None)
            self.traced.under_way(told and told())

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
            if isinstance(self.work, dist.Work):
                shutdown.forget(self.work)
            self.work = self.kept = None
        if self.into is not None and self.into is not self.out:
            self.out = self.into.copy_(self.out)
        return self.out.to(self.device)


def _wait(work: dist.Work | Messages, axis: Axis, op: str, on_stream: bool) -> None:
    watch = axis.watch
    if watch is None or on_stream:
        work.wait()
        return
    doing = f"{op} over axis {axis.name}"
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
    """Says whether an axis is the mesh's own; loaders have others for their threads."""
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

"""The only file that calls collectives; every word they move goes in the Ledger.

Each function takes the `Axis` it communicates over, skips the network when the axis has
one rank, and counts what *this rank receives from others* (a row a rank keeps is not
counted). Exchanges come as `begin -> Pending`, `Pending.wait() -> Tensor`, so that a
caller can compute between the two.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyg_distcomm.failure import Watch
from pyg_distcomm.ledger import Ledger
from pyg_distcomm.timeline import Exchange

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
    """

    name: str
    rank: int
    size: int
    group: dist.ProcessGroup | None
    ledger: Ledger
    watch: Watch | None

    def __repr__(self) -> str:
        return f"Axis({self.name} {self.rank}/{self.size})"


@dataclass(eq=False)
class Pending:
    """An exchange under way; `wait()` returns what arrived."""

    out: Tensor
    device: torch.device
    axis: Axis
    op: str
    work: dist.Work | None = None
    traced: Exchange | None = None
    kept: Any = None  # what is being sent must live until it has left
    into: Tensor | None = None

    def __post_init__(self) -> None:
        if self.traced is not None:  # on a stream, futures do not tell
            told = None if self.out.is_cuda else getattr(self.work, "get_future", None)
            self.traced.under_way(told and told())

    def wait(self) -> Tensor:
        """Blocks until everything has arrived, and returns it."""
        if self.work is not None:
            start = time.perf_counter_ns()
            _wait(self.work, self.axis, self.op, self.out.is_cuda)
            spent = (time.perf_counter_ns() - start) / 1e9
            self.axis.ledger.waited(self.op, self.axis.name, spent)
            if self.traced is not None:
                self.traced.waited(start)
            self.work = self.kept = None
        if self.into is not None and self.into is not self.out:
            self.out = self.into.copy_(self.out)
        return self.out.to(self.device)


def _wait(work: dist.Work, axis: Axis, op: str, on_stream: bool) -> None:
    watch = axis.watch
    if watch is None or on_stream:
        work.wait()
        return
    doing = f"{op} over axis {axis.name}"
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


def _arrived(work: dist.Work, doing: str, watch: Watch) -> bool:
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


def _staged(x: Tensor, axis: Axis) -> Tensor:
    # gloo moves host memory and nccl device memory: what lies elsewhere is copied
    backends = str(dist.get_backend_config(axis.group))
    if x.is_cuda and "nccl" not in backends:
        return x.cpu()
    return x.cuda() if not x.is_cuda and backends == "cuda:nccl" else x


def _started(axis: Axis, op: str, begin: Callable[[], Any]) -> Any:
    try:
        return begin()
    except RuntimeError as error:
        if axis.watch is None:
            raise
        raise axis.watch.broken(f"{op} over axis {axis.name}", error) from None


def all_to_all(
    x: Tensor,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    axis: Axis,
    op: str = "all_to_all",
    into: Tensor | None = None,
) -> Pending:
    """Starts to send row blocks of `x` to the ranks of an axis.

    What arrives is written `into` a tensor of the right shape, if one is given.

    Shapes (this rank):
        x        [sum(send_counts), ...]   rows for rank 0, then rank 1, ...
        return   [sum(recv_counts), ...]   rows from rank 0, then rank 1, ...

    Price: (sum(recv_counts) - recv_counts[self]) times the width of a row, in words.
    """
    if axis.size == 1:
        return Pending(x if into is None else into.copy_(x), x.device, axis, op)
    width = x[0].numel() if x.size(0) else _width(x)
    source = _staged(x.contiguous(), axis)
    out = into
    if out is None or out.device != source.device:
        out = source.new_empty((sum(recv_counts), *x.shape[1:]))
    traced = _note_rows(x, width, send_counts, recv_counts, axis, op)
    work = _started(
        axis,
        op,
        lambda: dist.all_to_all_single(
            out,
            source,
            list(recv_counts),
            list(send_counts),
            group=axis.group,
            async_op=True,
        ),
    )
    return Pending(out, x.device, axis, op, work, traced, source, into)


def _width(x: Tensor) -> int:
    return int(torch.Size(x.shape[1:]).numel())


def _note_rows(
    x: Tensor,
    width: int,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    axis: Axis,
    op: str,
) -> Exchange | None:
    received = sum(recv_counts) - recv_counts[axis.rank]
    sent = sum(send_counts) - send_counts[axis.rank]
    peers = [c for i, c in enumerate(send_counts) if i != axis.rank]
    return axis.ledger.note(
        op,
        axis.name,
        words=received * width,
        bytes=received * width * x.element_size(),
        sent_bytes=sent * width * x.element_size(),
        messages=sum(1 for c in peers if c) if width else 0,
    )


def all_reduce(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """Returns the elementwise sum (or "max", "min") of `x` over an axis.

    Price: 2 (P-1)/P times the elements of `x`, in words (what a ring moves).
    """
    pending = all_reduce_begin(x, axis, op)
    return pending.wait()


_REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


def all_reduce_begin(x: Tensor, axis: Axis, op: str = "sum") -> Pending:
    """Starts an `all_reduce`; `wait()` returns the result in a tensor of its own."""
    if axis.size == 1:
        return Pending(x, x.device, axis, "all_reduce")
    out = _staged(x, axis)
    out = out.clone(memory_format=torch.contiguous_format) if out is x else out
    traced = note_all_reduce(x, axis)
    work = _started(
        axis,
        "all_reduce",
        lambda: dist.all_reduce(
            out, op=_REDUCTIONS[op], group=axis.group, async_op=True
        ),
    )
    return Pending(out, x.device, axis, "all_reduce", work, traced)


def note_all_reduce(x: Tensor, axis: Axis, before: int = 0) -> Exchange | None:
    """Counts an all-reduce of `x` as the ring moves it, after `before` other words.

    Pieces of one sum cost together what the sum in one piece costs.
    """
    words = ring_words(before + x.numel(), axis.size) - ring_words(before, axis.size)
    size = words * x.element_size()
    return axis.ledger.note(
        "all_reduce",
        axis.name,
        words=words,
        bytes=size,
        sent_bytes=size,
        messages=2 * (axis.size - 1),
    )


def ring_words(numel: int, size: int) -> int:
    """Returns the words a rank receives in a ring all-reduce of `numel` words."""
    return -(-2 * numel * (size - 1) // size)


def all_reduce_future(x: Tensor, axis: Axis, before: int = 0) -> Any:
    """Starts an in-place sum and returns torch's own future of it (for DDP's hook).

    It is a piece of a larger sum, of which `before` words have left.
    """
    traced = note_all_reduce(x, axis, before)
    future = dist.all_reduce(x, group=axis.group, async_op=True).get_future()
    if traced is not None:
        traced.under_way(None if x.is_cuda else future)
    return future


def all_gather_counts(counts: Sequence[int], axis: Axis) -> list[list[int]]:
    """Returns every rank's row of integers (all rows have the same length)."""
    if axis.size == 1:
        return [list(counts)]
    mine = torch.tensor(list(counts), dtype=torch.int64)
    rows = all_gather_rows(mine.unsqueeze(0), [1] * axis.size, axis, op="plan")
    return [[int(v) for v in row] for row in rows.tolist()]


def all_gather_rows(
    x: Tensor, counts: Sequence[int], axis: Axis, op: str = "all_gather"
) -> Tensor:
    """Returns the rows of all ranks of an axis, in rank order.

    Shapes (this rank): x `[counts[rank], ...]`, return `[sum(counts), ...]`.
    Price: (sum(counts) - counts[rank]) times the width of a row, in words.
    Blocks of unequal size travel as an all_to_all: not every back end gathers them.
    """
    send = x.repeat(axis.size, *([1] * (x.dim() - 1))) if axis.size > 1 else x
    return all_to_all(send, [x.size(0)] * axis.size, counts, axis, op).wait()


def exchange_counts(counts: Sequence[int], axis: Axis) -> list[int]:
    """Tells each rank of an axis one integer, and returns what each told us."""
    if axis.size == 1:
        return list(counts)
    ones = [1] * axis.size
    mine = torch.tensor(list(counts), dtype=torch.int64)
    return [int(v) for v in all_to_all(mine, ones, ones, axis, "plan").wait().tolist()]


def all_gather_object(value: Any, axis: Axis) -> list[Any]:
    """Returns every rank's picklable value (for plans and messages, not for data)."""
    if axis.size == 1:
        return [value]
    mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = exchange_counts([mine.numel()] * axis.size, axis)
    every = all_gather_rows(mine, sizes, axis, op="plan")
    return [pickle.loads(part.numpy().tobytes()) for part in every.split(sizes)]


def broadcast_object(value: Any, axis: Axis) -> Any:
    """Returns rank 0's picklable value on every rank (for plans, not for data)."""
    if axis.size == 1:
        return value
    text = pickle.dumps(value) if axis.rank == 0 else b""
    size = exchange_counts([len(text)] * axis.size, axis)[0]
    mine = bytearray(text) if axis.rank == 0 else bytearray(size)
    buffer = _staged(torch.frombuffer(mine, dtype=torch.uint8), axis)
    traced = _note_broadcast(buffer, axis)
    work = _started(
        axis,
        "plan",
        lambda: dist.broadcast(buffer, _first_rank(axis), axis.group, async_op=True),
    )
    got = Pending(buffer, torch.device("cpu"), axis, "plan", work, traced).wait()
    return pickle.loads(got.numpy().tobytes())


def _first_rank(axis: Axis) -> int:
    assert axis.group is not None
    return dist.get_global_rank(axis.group, 0)


def _note_broadcast(x: Tensor, axis: Axis) -> Exchange | None:
    first = axis.rank == 0
    received = 0 if first else x.numel()
    sent = x.numel() * (axis.size - 1) if first else 0
    peers = axis.size - 1 if first else 0
    return axis.ledger.note(
        "plan",
        axis.name,
        words=received,
        bytes=received,
        sent_bytes=sent,
        messages=peers,
    )


def barrier(axis: Axis) -> None:
    """Waits until every rank of an axis is here."""
    if axis.size > 1:
        all_reduce(torch.zeros(1), axis)


def agree(problem: str | None, axis: Axis, kind: type[Exception] = ValueError) -> None:
    """Raises on all ranks, or on none: the rule for every check at a door.

    Args:
        problem: what is wrong on this rank; None when all is well.
        axis: the ranks that must agree.
        kind: the exception to raise.

    Raises:
        kind: with the message of the lowest rank that had one.
    """
    found = all_gather_object(problem, axis)
    for rank, text in enumerate(found):
        if text is not None:
            where = f"rank {rank}: " if axis.size > 1 else ""
            raise kind(where + text)

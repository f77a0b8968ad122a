"""Calls the collectives of torch.distributed, and counts every word they move in the Ledger.

No other module calls collectives.

Each function takes the `Axis` it communicates over, skips the network when the axis has
one rank, and counts what *this rank receives from others* (a row a rank keeps is not
counted). Exchanges come as `begin -> Pending`, `Pending.wait() -> Tensor`, so that a
caller can compute between the two. A rank waits in short slices, and checks between them
whether another rank has failed: see [Note: failure].
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import get_worker_info

from pyg_distcomm.comm.axis import Axis as Axis
from pyg_distcomm.comm.failure import FailureMonitor
from pyg_distcomm.comm.ledger import Exchange, label
from pyg_distcomm.comm.messages import AWAKE, Delivery, Messages, Rings, give_way
from pyg_distcomm.comm.serialization import decode, encode
from pyg_distcomm.comm.store import ENDED, RankError
from pyg_distcomm.kernels.registry import HALVES
from pyg_distcomm.process import PROCESS

Work = dist.Work | Messages | Delivery
_LARGE_MESSAGE = 1 << 17  # bytes to one rank from which receives are posted first
_TAG = 0x9D0C  # of our messages, on groups that a script may use, too
_WAIT_SLICE = timedelta(seconds=0.25)
# the kinds of errors that one rank raises for another; others become the last
_KINDS = (TypeError, ValueError, IndexError, ImportError, NotImplementedError)
_BY_NAME: dict[Any, Any] = {kind.__name__: kind for kind in (*_KINDS, RuntimeError)}
_MAX_TRACKED_WORKS = 8  # works tracked before completed ones are removed


@dataclass(eq=False)
class Pending:
    """Represents an exchange under way; `wait()` returns what arrived."""

    out: Tensor
    device: torch.device
    axis: Axis
    op: str
    work: Work | None = None
    traced: Exchange | None = None
    kept: Any = None  # buffers that are being sent
    into: Tensor | None = None
    wanted: Sequence[int] = ()  # rows of each block of `out` to return, if not all

    def __post_init__(self) -> None:
        if isinstance(self.work, dist.Work) and not self.out.is_cuda:
            _keep_until_completed(self.work)

    def wait(self) -> Tensor:
        """Blocks until everything has arrived, and returns it."""
        if self.work is not None:
            start = time.perf_counter_ns()
            with label(f"wait for {self.op} over {self.axis.name}"):
                _wait(self.work, self.axis, self.op, self.out.is_cuda)
            spent = (time.perf_counter_ns() - start) / 1e9
            self.axis.ledger.waited(self.op, self.axis.name, spent)
            if self.traced is not None:
                self.traced(start)
            PROCESS.works.discard(self.work)
            self.work = self.kept = None
            if self.wanted and len(self.out) != sum(self.wanted):
                blocks = self.out.chunk(len(self.wanted))
                pairs = zip(blocks, self.wanted, strict=True)
                self.out = torch.cat([block[:count] for block, count in pairs])
        if self.into is not None and self.into is not self.out:
            self.out = self.into.copy_(self.out)
        return self.out.to(self.device)


def _wait(work: Work, axis: Axis, op: str, on_stream: bool) -> None:
    watch = axis.watch
    if watch is None:
        work.wait()
        return
    if on_stream:  # the stream waits, not this thread
        watch.streamed.add(work, op)
        work.wait()
        return
    shared = axis.group in watch.threads.of  # loaders' threads use groups of their own
    try:
        with watch.threads.waiting() if shared else contextlib.nullcontext():
            _wait_in_slices(work, op, watch)
    except BaseException as error:
        watch.fail(error)  # messages are lost: other ranks must not wait for them
        raise


def _wait_in_slices(work: Work, doing: str, watch: FailureMonitor) -> None:
    start = time.monotonic()
    while not work.is_completed() and time.monotonic() < start + AWAKE:
        give_way()
    if _wait_slice(work, doing, watch):
        return
    with watch.waiting(doing) as check:
        check(time.monotonic() - start)
        while not _wait_slice(work, doing, watch):
            check(time.monotonic() - start)


def _wait_slice(work: Work, doing: str, watch: FailureMonitor) -> bool:
    """Waits one slice; returns whether the work is done, and raises if the transport broke."""
    try:
        work.wait(_WAIT_SLICE)
        return True
    except RuntimeError:
        if not work.is_completed():
            return False
    try:  # it completed, or failed, between the two lines above
        work.wait()
        return True
    except RuntimeError as error:
        raise watch.connection_error(doing, error) from None


def _keep_until_completed(work: dist.Work) -> None:
    """Keeps a reference to a work, which perhaps nobody waits for, until it is completed."""
    if len(PROCESS.works) >= _MAX_TRACKED_WORKS:
        ended = [one for one in list(PROCESS.works) if one.is_completed()]
        PROCESS.works.difference_update(ended)
    PROCESS.works.add(work)


class guarded:
    """Checks the mesh before an exchange starts, and explains a failure of the transport."""

    __slots__ = ("_axis", "_label", "_op")

    def __init__(self, axis: Axis, op: str) -> None:
        self._axis, self._op = axis, op
        self._label = label(f"{op} over {axis.name}")

    def __enter__(self) -> None:
        watch = self._axis.watch
        if watch is not None and get_worker_info() is not None:
            raise ValueError(
                "leave num_workers at 0 where a DataLoader reads rows of a share, or give it "
                f"x.full_tensor(): its workers are not ranks, and {self._op} needs all ranks"
            )
        if watch is not None and watch.closed:
            raise RankError(
                f"{self._op} over a mesh that was closed; make a new one by pdc.init(). In a "
                "process that a rank forks, its meshes are closed"
            )
        if watch is not None and watch.streamed.error is not None:
            raise watch.streamed.error
        if watch is not None and self._axis.group in watch.threads.of:
            watch.threads.enter(watch)
        self._label.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._label.__exit__(kind, error, trace)
        watch = self._axis.watch
        if watch is None or not isinstance(error, RuntimeError):
            return
        reason = watch.connection_error(self._op, error)
        watch.fail(reason)
        raise reason from None


def _to_backend_device(x: Tensor, axis: Axis) -> Tensor:
    # gloo moves host memory and NCCL device memory: other tensors are copied
    backends = _backend_of(axis)
    if not x.is_cpu and "nccl" not in backends:
        return x.cpu()
    if x.is_cpu and backends == "cuda:nccl":  # each thread has its own current device
        mesh = None if PROCESS.mesh is None else PROCESS.mesh()
        home = None if mesh is None else mesh.device
        return x.to(home if home is not None and home.type == "cuda" else "cuda")
    return x


def _backend_of(axis: Axis) -> str:
    try:
        return str(dist.get_backend_config(axis.group))
    except (TypeError, ValueError) as error:
        raise RankError(ENDED) from error


def all_to_all(
    x: Tensor | Sequence[Tensor],
    send_counts: Sequence[int] | None,
    recv_counts: Sequence[int],
    axis: Axis,
    op: str = "all_to_all",
    most: int | None = None,
    *,
    into: Tensor | None = None,
) -> Pending:
    """Starts to send rows to the ranks of an axis.

    Args:
        x: the rows, those for rank 0 first; or one tensor for each rank, see `copies`.
        send_counts: how many of one tensor go to each rank; None for a tensor each.
        recv_counts: how many come from each.
        axis: the ranks.
        op: the name of the operation in the ledger.
        most: the most rows that any rank sends to any other, if all ranks know it: a
            small exchange is faster as one collective.
        into: the tensor to receive into, instead of a new one.

    Shapes (this rank): x `[sum(send_counts), ...]`, return `[sum(recv_counts), ...]`, the
    rows from rank 0, then rank 1, ...
    Price: (sum(recv_counts) - recv_counts[self]) times the width of a row, in words.
    """
    if axis.meeting is not None:
        each = x.split(list(send_counts or ())) if isinstance(x, Tensor) else x
        met = torch.cat(axis.meeting.swap(axis.rank, each))
        return Pending(met, met.device, axis, op)
    source, parts = _staged(x, send_counts, axis)
    like, device = parts[0], (x if isinstance(x, Tensor) else x[0]).device
    if axis.size == 1:
        return Pending(like if into is None else into.copy_(like), device, axis, op)
    # of one tensor for each rank, see `copies`
    gathers = into is None and source is None
    equal = gathers and _is_equal_gather(parts, recv_counts, axis)
    rows = axis.size * len(parts[axis.rank - 1]) if equal else sum(recv_counts)
    out = into
    if out is None or out.device != like.device:
        out = like.new_empty((rows, *like.shape[1:]))
    sizes = [len(part) for part in parts]
    traced = _count_rows(like, sizes, recv_counts, axis, op)
    width, rings = like.shape[1:].numel() * like.element_size(), _rings_of(axis)
    small = most is not None and most * width < _LARGE_MESSAGE and rings is None
    single = small or like.is_cuda or "gloo" not in _backend_of(axis)
    if (single or equal) and source is None:
        source = parts[axis.rank - 1] if equal else torch.cat(list(parts))
    with guarded(axis, op):
        if equal:
            work: Any = dist.all_gather_into_tensor(
                out, source, group=axis.group, async_op=True
            )
        elif single:
            splits = list(recv_counts), sizes
            work = dist.all_to_all_single(
                out, source, *splits, group=axis.group, async_op=True
            )
        else:  # the work keeps the parts, and releases them before anyone waits
            places = out.split(list(recv_counts))
            places[axis.rank].copy_(parts[axis.rank])
            work = _start_messages(
                places, parts, axis, 0 if rings is None else rings.room
            )
            if rings is not None:
                work = rings.begin(places, parts, work)
    given = work, traced, source if single else None, into
    return Pending(out, device, axis, op, *given, recv_counts if equal else ())


def copies(x: Tensor, counts: Sequence[int], axis: Axis) -> list[Tensor]:
    """Returns the rows of an all-gather, for `all_to_all`: all of `x` for every rank.

    Args:
        x: own rows.
        counts: how many rows come from each rank; 0 for this rank leaves out its own.
        axis: the ranks.
    """
    own = x[: counts[axis.rank]]
    return [own if i == axis.rank else x for i in range(axis.size)]


def _staged(
    x: Tensor | Sequence[Tensor], send_counts: Sequence[int] | None, axis: Axis
) -> tuple[Tensor | None, Sequence[Tensor]]:
    """Returns rows where the backend moves them: as one tensor, if they are, and in parts."""
    if isinstance(x, Tensor):
        assert send_counts is not None
        source = x if axis.size == 1 else _to_backend_device(x.contiguous(), axis)
        return source, source.split(list(send_counts)) if axis.size > 1 else (source,)
    if axis.size == 1:
        return None, x
    moved = {id(part): _to_backend_device(part.contiguous(), axis) for part in x}
    return None, [moved[id(part)] for part in x]


def _is_equal_gather(
    parts: Sequence[Tensor], counts: Sequence[int], axis: Axis
) -> bool:
    """Tells whether all ranks send one tensor of the same size to all, which NCCL gathers."""
    sent = parts[axis.rank - 1]
    same = all(part is sent for i, part in enumerate(parts) if i != axis.rank)
    return same and _has_equal_blocks(sent, counts, len(sent), axis)


def _rings_of(axis: Axis) -> Rings | None:
    # a transform of torch.func wraps tensors, whose memory is hidden then
    return None if torch._C._are_functorch_transforms_active() else axis.rings


def _has_equal_blocks(x: Tensor, counts: Sequence[int], size: int, axis: Axis) -> bool:
    """Tells whether NCCL's collectives of equal blocks fit: every rank has `size` rows."""
    others = {count for i, count in enumerate(counts) if i != axis.rank}
    return _uses_nccl(x, axis) and others == {size} and size > 0


def _uses_nccl(x: Tensor, axis: Axis) -> bool:
    return x.is_cuda and "nccl" in _backend_of(axis)


def reduce_scatter_begin(
    x: Tensor, counts: Sequence[int], own: int, axis: Axis
) -> Pending | None:
    """Starts a reduce-scatter of rows by NCCL, without this rank's own contribution.

    Args:
        x: rows for rank 0, then rank 1, ..., none for this rank.
        counts: how many for each.
        own: how many rows this rank's block has.
        axis: the ranks.

    Shapes (this rank): x [sum(counts), f], return [own, f], the sums of the other ranks.
    Returns None where blocks differ in size or NCCL does not move them.
    Price: (P - 1) own f words.
    """
    source = _to_backend_device(x.contiguous(), axis)
    if not _has_equal_blocks(source, counts, own, axis):
        return None
    if x.dtype in HALVES or torch.are_deterministic_algorithms_enabled():
        return None  # the caller sums them: in float32, and in the order of ranks
    first = own * axis.rank
    blocks = torch.cat(
        [source[:first], source.new_zeros(own, *x.shape[1:]), source[first:]]
    )
    out = source.new_empty((own, *x.shape[1:]))
    received = [0 if i == axis.rank else own for i in range(axis.size)]
    traced = _count_rows(x, counts, received, axis, "reduce_scatter")
    with guarded(axis, "reduce_scatter"):
        work = dist.reduce_scatter_tensor(out, blocks, group=axis.group, async_op=True)
    return Pending(out, x.device, axis, "reduce_scatter", work, traced, blocks)


def _start_messages(
    places: Sequence[Tensor], parts: Sequence[Tensor], axis: Axis, least: int
) -> Messages | None:
    """Starts the messages of more than `least` bytes; returns None if there are none."""
    if max(x.nbytes for x in (*places, *parts)) <= least:
        return None
    # [Note: receive first]; every rank starts with its neighbour, so that not all ranks
    # send to the same one at once
    peers = [(axis.rank + i) % axis.size for i in range(1, axis.size)]
    much = [i for i in peers if parts[i].nbytes >= _LARGE_MESSAGE]
    order: list[Any] = [(dist.irecv, places, i) for i in much]
    order += [(dist.isend, parts, i) for i in peers]
    order += [(dist.irecv, places, i) for i in peers if i not in much]
    works = [
        begin(rows[i], _global_rank(i, axis), axis.group, _TAG)
        for begin, rows, i in order
        if rows[i].nbytes > least
    ]
    return Messages(works, (places, parts))


def send(x: Tensor, to: int, axis: Axis, op: str = "send") -> Pending:
    """Starts to send `x` to one rank of an axis, which must `receive` as much.

    What one rank sends another arrives in the order in which it was sent.
    """
    source, some = _to_backend_device(x.contiguous(), axis), int(x.numel() > 0)
    note = {"words": 0, "bytes": 0, "sent_bytes": x.nbytes, "messages": some}
    traced = axis.ledger.note(op, axis.name, **note)
    work = _start_message(dist.isend, source, to, axis, op)
    return Pending(source, x.device, axis, op, work, traced, source)


def receive(into: Tensor, origin: int, axis: Axis, op: str = "send") -> Pending:
    """Starts to receive the message of one rank of an axis, `into` a contiguous tensor.

    Price: the elements of `into`, in words.
    """
    out = _to_backend_device(into, axis)
    note = {"words": into.numel(), "bytes": into.nbytes, "sent_bytes": 0, "messages": 0}
    traced = axis.ledger.note(op, axis.name, **note)
    work = _start_message(dist.irecv, out, origin, axis, op)
    return Pending(out, into.device, axis, op, work, traced, out, into)


def _start_message(begin: Any, x: Tensor, peer: int, axis: Axis, op: str) -> Any:
    if not x.numel():  # both ends know that there is nothing to send
        return None
    peer = _global_rank(peer, axis)
    with guarded(axis, op):
        work = begin(x, peer, axis.group, _TAG)
    return work if x.is_cuda else Messages([work], x)


def _count_rows(
    x: Tensor,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    axis: Axis,
    op: str,
) -> Exchange | None:
    width = x.shape[1:].numel()
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
    if axis.observer is not None:
        axis.observer("sum", x, axis)
    return all_reduce_begin(x, axis, op).wait()


_REDUCTIONS: dict[str, Any] = {
    "sum": (dist.ReduceOp.SUM, torch.add),
    "max": (dist.ReduceOp.MAX, torch.maximum),
    "min": (dist.ReduceOp.MIN, torch.minimum),
}


def all_reduce_begin(x: Tensor, axis: Axis, op: str = "sum") -> Pending:
    """Starts an `all_reduce`; `wait()` returns the result in a tensor of its own."""
    if axis.size == 1:
        return Pending(x, x.device, axis, "all_reduce")
    if axis.meeting is not None:
        every: Any = axis.meeting.swap(axis.rank, [x] * axis.size)
        return Pending(torch.stack(every).sum(0), x.device, axis, "all_reduce")
    out = _to_backend_device(x, axis)
    own = torch.contiguous_format
    out = out.clone(memory_format=own) if out is x else out.contiguous()
    traced = note_all_reduce(x, axis)
    with guarded(axis, "all_reduce"):
        work = _start_all_reduce(out, axis, op)
    return Pending(out, x.device, axis, "all_reduce", work, traced)


def _start_all_reduce(x: Tensor, axis: Axis, op: str = "sum") -> Any:
    """Starts to reduce in place: of few bytes, each rank sends all and reduces all."""
    rings = _rings_of(axis)
    much = (axis.size - 2) * x.nbytes > _LARGE_MESSAGE
    if rings is None or not x.is_cpu or much or x.nbytes > rings.room:
        given: Any = {"op": _REDUCTIONS[op][0], "group": axis.group, "async_op": True}
        return dist.all_reduce(x, **given)
    every = [
        x.clone() if i == axis.rank else torch.empty_like(x) for i in range(axis.size)
    ]

    @torch.inference_mode()  # where an inference tensor may be written to
    def finish() -> None:
        x.copy_(functools.reduce(_REDUCTIONS[op][1], every))  # in the order of ranks

    return rings.begin(every, [every[axis.rank]] * axis.size, finish=finish)


def note_all_reduce(x: Tensor, axis: Axis, before: int = 0) -> Exchange | None:
    """Counts a ring all-reduce of `x` in the ledger, after `before` words of the same sum.

    The pieces of one sum together cost the same as the sum in one piece.
    """
    words = ring_words(before + x.numel(), axis.size) - ring_words(before, axis.size)
    size = words * x.element_size()
    note = {"bytes": size, "sent_bytes": size, "messages": 2 * (axis.size - 1)}
    return axis.ledger.note("all_reduce", axis.name, words=words, **note)


def ring_words(numel: int, size: int) -> int:
    """Returns the words a rank receives in a ring all-reduce of `numel` words."""
    return -(-2 * numel * (size - 1) // size)


def all_reduce_future(x: Tensor, axis: Axis, before: int = 0) -> tuple[Pending, Any]:
    """Starts an in-place sum; returns it, and torch's own future of it (for DDP's hook).

    DDP waits for the future without a deadline, so wait for the sum first.

    Args:
        x: the tensor.
        axis: the ranks.
        before: where `x` is a piece of a larger sum, the words already sent of it.
    """
    traced = note_all_reduce(x, axis, before)
    with guarded(axis, "all_reduce"):
        work = _start_all_reduce(x, axis)
    future = None if isinstance(work, Delivery) else work.get_future()
    return Pending(x, x.device, axis, "all_reduce", work, traced), future


def all_gather_counts(
    counts: Sequence[int], axis: Axis, op: str = "plan"
) -> list[list[int]]:
    """Returns every rank's row of integers (all rows have the same length)."""
    if axis.size == 1:
        return [list(counts)]
    own_data = torch.tensor(list(counts), dtype=torch.int64)
    rows = all_gather_rows(own_data.unsqueeze(0), [1] * axis.size, axis, op)
    every: list[list[int]] = rows.tolist()
    return every


def all_gather_rows(
    x: Tensor, counts: Sequence[int], axis: Axis, op: str = "all_gather"
) -> Tensor:
    """Returns the rows of all ranks of an axis, in rank order.

    Shapes (this rank): x `[counts[rank], ...]`, return `[sum(counts), ...]`.
    Price: (sum(counts) - counts[rank]) times the width of a row, in words.
    """
    parts = copies(x, counts, axis)
    return all_to_all(parts, None, counts, axis, op, max(counts)).wait()


def exchange_counts(counts: Sequence[int], axis: Axis) -> list[int]:
    """Sends each rank of an axis one integer, and returns those that arrive."""
    if axis.size == 1:
        return list(counts)
    ones = [1] * axis.size
    own_data = torch.tensor(list(counts), dtype=torch.int64)
    came: list[int] = all_to_all(own_data, ones, ones, axis, "plan", 1).wait().tolist()
    return came


def all_gather_object(value: Any, axis: Axis) -> list[Any]:
    """Returns every rank's value, for plans and error messages; see `serialization.encode`.

    Raises:
        TypeError: on all ranks, if a value cannot be sent as data.
    """
    if axis.size == 1:
        return [value]
    try:
        packed = encode((True, value))
    except TypeError as error:
        packed = encode((False, str(error)))
    own_data = torch.frombuffer(packed, dtype=torch.uint8)
    sizes = exchange_counts([own_data.numel()] * axis.size, axis)
    gathered = all_gather_rows(own_data, sizes, axis, op="plan").cpu()
    found = [decode(part.numpy().data) for part in gathered.split(sizes)]
    problem = next((text for fine, text in found if not fine), None)
    if problem is not None:
        raise TypeError(problem)
    return [other for _, other in found]


def broadcast_object(value: Any, axis: Axis) -> Any:
    """Returns rank 0's value on every rank, for plans; see `serialization.encode`.

    Raises:
        TypeError: on all ranks, if the value cannot be sent as data.
    """
    return all_gather_object(value if axis.rank == 0 else None, axis)[0]


def _global_rank(rank: int, axis: Axis) -> int:
    assert axis.group is not None
    return dist.get_global_rank(axis.group, rank)


def barrier(axis: Axis) -> None:
    """Waits until every rank of an axis is here."""
    if axis.size > 1:
        all_reduce(torch.zeros(1), axis)


def differ(mark: int, axis: Axis) -> bool:
    """Returns whether a number is another on some rank: an all-reduce of two words."""
    high, low = all_reduce(torch.tensor([mark, -mark]), axis, "max").tolist()
    return bool(high != -low)


def agree(
    problem: str | Exception | None, axis: Axis, kind: type[Exception] = ValueError
) -> None:
    """Raises the same error on all ranks if any rank has a problem; else returns on all.

    Args:
        problem: the error of this rank, or its message; None if there is no problem.
        axis: the ranks that must agree.
        kind: the exception to raise for a message; an error gives its own kind.

    Raises:
        kind: with the message of the lowest rank that had one.
    """
    note: Any = problem
    if isinstance(problem, Exception):
        own = next((k for k in _KINDS if isinstance(problem, k)), RuntimeError)
        note = own.__name__, str(problem) or type(problem).__name__
    found = all_gather_object(note, axis)
    for rank, other in enumerate(found):
        if other is not None:
            name, text = (None, other) if isinstance(other, str) else other
            where = f"rank {rank}: " if axis.size > 1 else ""
            cause = problem if isinstance(problem, Exception) else None
            raise _BY_NAME.get(name, kind)(where + text) from cause

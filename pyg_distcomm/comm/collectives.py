"""Calls the collectives of torch.distributed, and counts every word they move in the Ledger.

No other module calls collectives.

Each function takes the `Axis` it communicates over, skips the network when the axis has
one rank, and counts what *this rank receives from others* (a row a rank keeps is not
counted). Exchanges come as `begin -> Pending`, `Pending.wait() -> Tensor`, so that a
caller can compute between the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyg_distcomm.comm.axis import Axis as Axis
from pyg_distcomm.comm.axis import Messages, guarded
from pyg_distcomm.comm.axis import Pending as Pending
from pyg_distcomm.comm.serialization import decode, encode
from pyg_distcomm.comm.store import ENDED, RankError
from pyg_distcomm.comm.trace import Exchange
from pyg_distcomm.kernels.registry import HALVES
from pyg_distcomm.process import PROCESS

_LARGE_MESSAGE = 1 << 17  # bytes to one rank from which receives are posted first
_TAG = 0x9D0C  # of our messages, on groups that a script may use, too


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
    x: Tensor,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    axis: Axis,
    op: str = "all_to_all",
    most: int | None = None,
    *,
    into: Tensor | None = None,
) -> Pending:
    """Starts to send row blocks of `x` to the ranks of an axis.

    Args:
        x: the rows, those for rank 0 first.
        send_counts: how many go to each rank.
        recv_counts: how many come from each.
        axis: the ranks.
        op: the name of the operation in the ledger.
        most: the most rows that any rank sends to any other, if all ranks know it: a
            small exchange is faster as one collective.
        into: the tensor to receive into, instead of a new one.

    Shapes (this rank):
        x        [sum(send_counts), ...]   rows for rank 0, then rank 1, ...
        return   [sum(recv_counts), ...]   rows from rank 0, then rank 1, ...

    Price: (sum(recv_counts) - recv_counts[self]) times the width of a row, in words.
    """
    if axis.size == 1:
        return Pending(x if into is None else into.copy_(x), x.device, axis, op)
    source = _to_backend_device(x.contiguous(), axis)
    parts = source.split(list(send_counts))
    return _start_exchange(x, parts, recv_counts, axis, op, most, into, source)


def all_to_all_parts(
    parts: Sequence[Tensor], recv_counts: Sequence[int], axis: Axis, op: str
) -> Pending:
    """Does the same as `all_to_all`, with one tensor of rows for each rank."""
    if axis.size == 1:
        return Pending(parts[0], parts[0].device, axis, op)
    staged = [_to_backend_device(part.contiguous(), axis) for part in parts]
    return _start_exchange(parts[0], staged, recv_counts, axis, op, None, None)


def all_gather_begin(
    x: Tensor,
    counts: Sequence[int],
    axis: Axis,
    op: str = "all_gather",
    most: int | None = None,
    *,
    into: Tensor | None = None,
) -> Pending:
    """Starts to send all rows of `x` to every rank of an axis.

    Args:
        x: own rows.
        counts: how many rows come from each rank; 0 for this rank leaves out its own.
        axis, op, most, into: as in `all_to_all`.

    Shapes (this rank): x [n, ...], return [sum(counts), ...].
    Price: (sum(counts) - counts[self]) times the width of a row, in words.
    """
    if axis.size == 1:
        own = x[: counts[0]]
        return Pending(own if into is None else into.copy_(own), x.device, axis, op)
    source = _to_backend_device(x.contiguous(), axis)
    here = counts[axis.rank]
    if into is None and _has_equal_blocks(source, counts, len(source), axis):
        out = source.new_empty((axis.size * len(source), *source.shape[1:]))
        sent = [len(source)] * axis.size
        traced = _count_rows(x, sent, counts, axis, op)
        with guarded(axis, op):
            work = dist.all_gather_into_tensor(
                out, source, group=axis.group, async_op=True
            )
        given = x.device, axis, op, work, traced, source
        return Pending(out, *given, wanted=counts)
    parts = [source[:here] if i == axis.rank else source for i in range(axis.size)]
    return _start_exchange(x, parts, counts, axis, op, most, into)


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


def _start_exchange(
    x: Tensor,
    parts: Sequence[Tensor],
    recv_counts: Sequence[int],
    axis: Axis,
    op: str,
    most: int | None,
    into: Tensor | None,
    whole: Tensor | None = None,
) -> Pending:
    """Starts an exchange of the parts of `x`; `whole` is their concatenation, if it exists."""
    like = parts[0]
    width = x.shape[1:].numel()
    send_counts = [part.size(0) for part in parts]
    out = into
    if out is None or out.device != like.device:
        out = like.new_empty((sum(recv_counts), *x.shape[1:]))
    traced = _count_rows(x, send_counts, recv_counts, axis, op)
    small = most is not None and most * width * like.element_size() < _LARGE_MESSAGE
    if not like.is_cuda and "gloo" in _backend_of(axis) and not small:
        places = out.split(list(recv_counts))
        with guarded(axis, op):
            work: Any = _start_messages(places, parts, axis)
        # the work keeps the parts, and releases them before anyone waits
        return Pending(out, x.device, axis, op, work, traced, into=into)
    source = torch.cat(list(parts)) if whole is None else whole
    splits = list(recv_counts), send_counts
    with guarded(axis, op):
        work = dist.all_to_all_single(
            out, source, *splits, group=axis.group, async_op=True
        )
    return Pending(out, x.device, axis, op, work, traced, source, into)


def _start_messages(
    places: Sequence[Tensor], parts: Sequence[Tensor], axis: Axis
) -> Messages:
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
        if rows[i].numel()
    ]
    places[axis.rank].copy_(parts[axis.rank])
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


_REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


def all_reduce_begin(
    x: Tensor, axis: Axis, op: str = "sum", before: int = 0
) -> Pending:
    """Starts an `all_reduce`; `wait()` returns the result in a tensor of its own.

    Args:
        x, axis, op: see `all_reduce`.
        before: where `x` is a piece of a larger sum, the words already sent of it.
    """
    if axis.size == 1:
        return Pending(x, x.device, axis, "all_reduce")
    out = _to_backend_device(x, axis)
    out = out.clone(memory_format=torch.contiguous_format) if out is x else out
    traced = note_all_reduce(x, axis, before)
    reduction: Any = {"op": _REDUCTIONS[op], "group": axis.group, "async_op": True}
    with guarded(axis, "all_reduce"):
        work = dist.all_reduce(out, **reduction)
    return Pending(out, x.device, axis, "all_reduce", work, traced)


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

    DDP waits for the future without a deadline, so wait for the sum first. `before` is as in
    `all_reduce_begin`.
    """
    traced = note_all_reduce(x, axis, before)
    with guarded(axis, "all_reduce"):
        work = dist.all_reduce(x, group=axis.group, async_op=True)
    future = work.get_future()
    return Pending(x, x.device, axis, "all_reduce", work, traced), future


def all_gather_counts(
    counts: Sequence[int], axis: Axis, op: str = "plan"
) -> list[list[int]]:
    """Returns every rank's row of integers (all rows have the same length)."""
    if axis.size == 1:
        return [list(counts)]
    own_data = torch.tensor(list(counts), dtype=torch.int64)
    rows = all_gather_rows(own_data.unsqueeze(0), [1] * axis.size, axis, op)
    return [[int(v) for v in row] for row in rows.tolist()]


def all_gather_rows(
    x: Tensor, counts: Sequence[int], axis: Axis, op: str = "all_gather"
) -> Tensor:
    """Returns the rows of all ranks of an axis, in rank order.

    Shapes (this rank): x `[counts[rank], ...]`, return `[sum(counts), ...]`.
    Price: (sum(counts) - counts[rank]) times the width of a row, in words.
    """
    return all_gather_begin(x, counts, axis, op, max(counts)).wait()


def exchange_counts(counts: Sequence[int], axis: Axis) -> list[int]:
    """Sends each rank of an axis one integer, and returns those that arrive."""
    if axis.size == 1:
        return list(counts)
    ones = [1] * axis.size
    own_data = torch.tensor(list(counts), dtype=torch.int64)
    return [
        int(v)
        for v in all_to_all(own_data, ones, ones, axis, "plan", 1).wait().tolist()
    ]


def all_gather_object(value: Any, axis: Axis) -> list[Any]:
    """Returns every rank's value, for plans and error messages; see `serialization.encode`.

    Raises:
        TypeError: on all ranks, if a value can not be sent as data.
    """
    if axis.size == 1:
        return [value]
    own_data = torch.frombuffer(_encode(value), dtype=torch.uint8)
    sizes = exchange_counts([own_data.numel()] * axis.size, axis)
    gathered = all_gather_rows(own_data, sizes, axis, op="plan")
    return [_decode(part) for part in gathered.split(sizes)]


def broadcast_object(value: Any, axis: Axis) -> Any:
    """Returns rank 0's value on every rank, for plans; see `serialization.encode`.

    Raises:
        TypeError: on all ranks, if the value can not be sent as data.
    """
    if axis.size == 1:
        return value
    own_data = _encode(value) if axis.rank == 0 else bytearray()
    size = exchange_counts([len(own_data)] * axis.size, axis)[0]
    own_data = own_data if axis.rank == 0 else bytearray(size)
    buffer = _to_backend_device(torch.frombuffer(own_data, dtype=torch.uint8), axis)
    received, peers = (size, 0) if axis.rank else (0, axis.size - 1)
    note = {"bytes": received, "sent_bytes": size * peers, "messages": peers}
    traced = axis.ledger.note("plan", axis.name, words=received, **note)
    with guarded(axis, "plan"):
        first = _global_rank(0, axis)
        work = dist.broadcast(buffer, first, axis.group, async_op=True)
    got = Pending(buffer, torch.device("cpu"), axis, "plan", work, traced).wait()
    return _decode(got)


def _encode(value: Any) -> bytearray:
    try:
        return encode((True, value))
    except TypeError as error:
        return encode((False, str(error)))


def _decode(data: Tensor) -> Any:
    fine, value = decode(data.cpu().numpy().data)
    if not fine:
        raise TypeError(value)
    return value


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


def agree(problem: str | None, axis: Axis, kind: type[Exception] = ValueError) -> None:
    """Raises the same error on all ranks if any rank has a problem; else returns on all.

    Args:
        problem: the error message of this rank; None if there is no problem.
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

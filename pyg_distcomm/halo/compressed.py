"""Coded: one use of a halo by a layer: halo x codec x timing.

[Note: coded links] A link says what a layer's rows become: a codec writes them, a timing
says when they arrive. Operators do not know: a layer asks its policy for a call, and the
call wraps each halo. What is kept until the next epoch is the policy's.

[Note: answers] The gradient of an exchange is masked as the rows it answers: with the rate
and the key of the message that was read, which may be an earlier epoch's. Codecs that only
round are passed straight through, and gradients are written at the rate of their own epoch,
with noise of their own; where sums meet, each sender has its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from pyg_distcomm import kernels
from pyg_distcomm.comm import collectives, random
from pyg_distcomm.comm.collectives import Axis
from pyg_distcomm.comm.price import Price
from pyg_distcomm.halo.codec import (
    Codec,
    CodecState,
    RngKey,
    fresh_state,
    pack,
    packed_bytes,
)
from pyg_distcomm.halo.codecs.quantise import Plain
from pyg_distcomm.halo.halo import Halo
from pyg_distcomm.halo.link import Link
from pyg_distcomm.halo.link_cost import Load
from pyg_distcomm.halo.staleness import Message, StaleBuffer, Timing


@dataclass(frozen=True, eq=False)
class Direction:
    """One direction of a halo.

    Shapes: index, gid [sum(counts)] rows that leave; from_gid [sum(from_counts)] rows
    that arrive. Without an index all rows leave, in order.
    """

    axis: Axis
    index: Tensor | None
    gid: Tensor
    counts: tuple[int, ...]
    from_gid: Tensor
    from_counts: tuple[int, ...]
    most: int
    sums: bool
    backward: bool

    @staticmethod
    def of(halo: Halo, sums: bool, backward: bool) -> Direction:
        """Returns the way of rows to where they are needed, or of sums back."""
        assert halo.send_gid is not None
        assert halo.ghost_gid is not None
        there = halo.send_gid, halo.send_counts
        here = halo.ghost_gid, halo.recv_counts
        most = halo.most or 0
        if sums:
            return Direction(halo.axis, None, *here, *there, most, True, backward)
        return Direction(
            halo.axis, halo.send_slot, *there, *here, most, False, backward
        )

    def load(self, width: int, dtype: torch.dtype) -> Load:
        """Returns what arrives here, in numbers."""
        return Load(self.from_counts, self.axis.size - 1, width, dtype)

    def price(self, codec: Codec, width: int, dtype: torch.dtype) -> Price:
        """Returns the price in words of one byte; the most, if sizes depend on values."""
        there = Load(self.counts, self.axis.size - 1, width, dtype)
        sizes = packed_bytes(codec, self.counts, width, dtype)
        messages = sum(1 for size in sizes if size)
        messages += 0 if codec.fixed_size else self.axis.size - 1
        here = self.load(width, dtype).bytes(codec)
        return Price(here, there.bytes(codec), messages)


def send(
    way: Direction,
    x: Tensor,
    codec: Codec,
    epoch: int,
    keys: tuple[int, int],
    state: CodecState | None,
    where: str,
) -> Message:
    """Starts to send rows; returns what comes from the others."""
    key, noise = keys
    if way.sums:
        noise = random.fold(noise, way.axis.rank)
    draw = RngKey(key, way.gid, noise)
    packed, sizes = pack(
        codec, x, way.counts, draw, index=way.index, state=state, where=where
    )
    op = "halo_transpose" if way.sums else "halo"
    if codec.fixed_size:
        from_sizes = packed_bytes(codec, way.from_counts, x.size(1), x.dtype)
    else:
        told, ones = torch.tensor(sizes), [1] * way.axis.size
        ahead = collectives.all_to_all(told, ones, ones, way.axis, op, 1)
        from_sizes = [int(size) for size in ahead.wait()]
    most = codec.wire_bytes(way.most, x.size(1), x.dtype)
    pending = collectives.all_to_all(packed, sizes, from_sizes, way.axis, op, most)
    counts, gid = way.from_counts, way.from_gid
    return Message(codec, epoch, key, gid, counts, from_sizes, pending)


class Use(Protocol):
    """What an exchange asks of the call it belongs to; see `LayerExchange`."""

    @property
    def epoch(self) -> int: ...
    @property
    def codec(self) -> Codec: ...
    @property
    def gradient_codec(self) -> Codec | None: ...
    @property
    def timing(self) -> Timing: ...
    @property
    def fresh(self) -> bool: ...
    @property
    def where(self) -> str: ...
    def key(self, name: int) -> int: ...
    def late(self, backward: bool) -> int: ...
    def seeds(self, backward: bool) -> bool: ...
    def intact(self) -> Any: ...
    def note(self, name: int, piece: int, way: Direction, x: Tensor) -> None: ...
    def inbox(
        self, halo: Halo, name: int, piece: int, way: Direction, x: Tensor
    ) -> StaleBuffer: ...


class CompressedLink(Link):
    """A halo as one call of a layer uses it, forward and backward.

    Args:
        halo: what travels.
        call: whose exchange this is.
        name: which of the call's.
        piece: which part of it.
    """

    def __init__(self, halo: Halo, call: Use, name: int, piece: int) -> None:
        self.halo, self.call, self.name, self.piece = halo, call, name, piece
        self.silent = halo.silent
        self._read: Message | None = None  # by the forward pass
        self._answered = False

    @property
    def is_exact(self) -> bool:
        """False: rows are coded, or late."""
        return False

    @property
    def num_ghosts(self) -> int:
        """The number of rows that arrive here."""
        return self.halo.num_ghosts

    def begin(self, x: Tensor, into: Tensor | None = None) -> Callable[[], Tensor]:
        """Starts to send own rows; the call returns the ghosts of this epoch or before."""
        read = self._begun(x.flatten(1), sums=False)

        def arrive() -> Tensor:
            out = into
            if out is None:
                out = x.new_empty((self.num_ghosts, *x.shape[1:]))
            read(out.flatten(1))
            return out

        return arrive

    def begin_transpose(self, g: Tensor) -> Callable[[Tensor], Tensor]:
        """Starts to send sums; the call adds those of this epoch or before."""
        read = self._begun(g.flatten(1), sums=True)
        slot = self.halo.send_slot

        def arrive(out: Tensor) -> Tensor:
            flat = out.flatten(1)
            rows = read(flat.new_empty((len(slot), flat.size(1))))
            kernels.scatter_add_rows(flat, slot, rows)
            return out

        return arrive

    def _begun(self, x: Tensor, sums: bool) -> Callable[[Tensor], Tensor]:
        """Sends rows, and returns how to read those that are due."""
        call, backward = self.call, self._read is not None
        way = Direction.of(self.halo, sums, backward)
        call.note(self.name, self.piece, way, x)
        with call.intact():
            if backward:
                return self._exchanged(*self._answer(x, way))
            key = call.key(self.name)
            return self._exchanged(x, way, call.codec, (key, key))

    def _answer(
        self, g: Tensor, way: Direction
    ) -> tuple[Tensor, Direction, Codec, tuple[int, int]]:
        """Returns a gradient as it is sent, and how; see [Note: answers]."""
        call, rows = self.call, self._read
        assert rows is not None
        if self._answered and call.late(True):
            raise ValueError(
                f"{call.where}: a second backward pass of one forward pass would send late "
                "gradients twice; run the layer again, or use late_gradients=0"
            )
        self._answered = True
        codec = answering(call.codec, rows.codec, call.gradient_codec)
        if call.gradient_codec is not None and rows.codec.zero_fills:
            g, way = _adjoint(rows, _picked(g, way), way), replace(way, index=None)
        return g, way, codec, (rows.key, random.fold(rows.key, call.epoch, 1))

    def _exchanged(
        self, x: Tensor, way: Direction, codec: Codec, keys: tuple[int, int]
    ) -> Callable[[Tensor], Tensor]:
        call, late = self.call, self.call.late(way.backward)
        inbox = call.inbox(self.halo, self.name, self.piece, way, x)
        if call.fresh:
            inbox.drain()
        if codec.stateful and inbox.sent is None:
            inbox.sent = fresh_state(len(way.gid), x.size(1), x.dtype, x.device)
            inbox.seen = fresh_state(len(way.from_gid), x.size(1), x.dtype, x.device)
        sent = inbox.sent if codec.stateful else None
        new = send(way, x, codec, call.epoch, keys, sent, call.where)
        due = inbox.take(new, late, call.fresh)
        inbox.trim(late)
        if not way.backward:
            self._read = due
        if call.seeds(way.backward):
            inbox.sent = CodecState(_picked(x, way).clone())

        def read(out: Tensor) -> Tensor:
            with call.intact():
                due.read(out, inbox.seen if due.codec.stateful else None)
            if due not in inbox.messages:
                due.raw = None  # the backward pass asks only how it was written
            if call.seeds(way.backward):
                inbox.seen = CodecState(out.clone())
            smooth = call.timing.smooth
            if smooth is not None and late:
                inbox.average(out, smooth, call.fresh)
            return out

        return read

    def price(self, width: int) -> Price:
        """Returns the price of a `begin` in float32, in words of one byte."""
        way = Direction.of(self.halo, sums=False, backward=False)
        return way.price(self.call.codec, width, torch.float32)

    def price_transpose(self, width: int) -> Price:
        """Returns the price of a `begin_transpose`, likewise."""
        way = Direction.of(self.halo, sums=True, backward=False)
        return way.price(self.call.codec, width, torch.float32)

    def to(self, device: torch.device) -> CompressedLink:
        """Returns the same use of a halo on another device."""
        return CompressedLink(self.halo.to(device), self.call, self.name, self.piece)

    def __repr__(self) -> str:
        return f"Coded({self.halo}, {self.call.codec})"


def answering(now: Codec, rows: Codec, own: Codec | None) -> Codec:
    """Returns how a gradient is written.

    Args:
        now: the codec of this epoch.
        rows: that of the message the gradient answers.
        own: that of gradients, if they have one.
    """
    if own is not None:
        return own
    if rows.zero_fills:
        return rows
    return (
        Plain() if now.zero_fills else now
    )  # rows that were whole have whole gradients


def _picked(x: Tensor, way: Direction) -> Tensor:
    return x if way.index is None else kernels.gather_rows(x, way.index)


def _adjoint(rows: Message, g: Tensor, way: Direction) -> Tensor:
    """Returns C^T g, message by message; C is that of the rows read."""
    whole = RngKey(rows.key, way.gid)
    ends = list(accumulate(way.counts, initial=0))
    parts = [
        rows.codec.adjoint(g[begin:end], whole.part(begin, end))
        for begin, end in pairwise(ends)
    ]
    return torch.cat(parts)

"""Exchanges rows that are coded, late, or both, as one call of a layer does.

[Note: coded links] A link policy defines how rows travel: a codec writes them as bytes, and a
timing sets in which epoch they are used. Operators do not depend on either: a layer asks its
policy for a `LayerExchange`, which wraps each halo. The policy's state holds the buffers that
last until the next epoch.

[Note: answers] The gradient of an exchange is masked in the same way as the rows that the
forward pass read: by the rate and the key of their message, which may be of an earlier epoch.
Codecs that only round pass gradients straight through; these are written at the rate of their
own epoch, with their own noise. Where sums of several ranks are added, each sender has its
own noise.

[Note: late rows] At epoch t an exchange with a staleness of k sends this epoch's rows and uses
those of epoch t - k, which have had k epochs to travel. They are decoded with the codec, rate
and key that encoded them. An exchange is synchronous in its first epoch, and after an epoch
without it (as for gradients of frozen layers); while there are fewer than k earlier messages,
the oldest is used. A synchronous epoch waits for pending messages and uses its own rows, which
are the oldest from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from pyg_distcomm import kernels
from pyg_distcomm.comm import collectives, random
from pyg_distcomm.comm.collectives import Pending
from pyg_distcomm.comm.ledger import Price
from pyg_distcomm.halo.codec import (
    Codec,
    Index,
    Load,
    RngKey,
    Writer,
    packed_bytes,
    ranges,
    rows_at,
    unpack,
)
from pyg_distcomm.halo.codecs import Plain
from pyg_distcomm.halo.halo import DEGREES, ChunkedHalo, Direction, Halo, Link

CallKey: TypeAlias = tuple[int, int]  # number of the layer, number of its call


class ExchangeKey(NamedTuple):
    """Identifies an exchange, alike on all ranks and in all epochs."""

    layer: int  # by first use in training
    number: int  # of the layer's call in an epoch
    name: int  # of the exchange in the call; see `policy.exchange_name`
    chunk: int


@dataclass(frozen=True, eq=False)
class Part:
    """Describes the message for one peer, and what writes it; see `Packing`."""

    rows: slice  # of all rows that are sent
    bytes: slice  # of all messages side by side
    index: Index
    draw: RngKey | None  # the ids of the rows, with the key of the plan
    writer: Writer | None


@dataclass(frozen=True, eq=False)
class Packing:
    """Plans the messages of an exchange, once for all epochs with the same codec."""

    codec: Codec
    shape: tuple[int, torch.dtype, torch.device]  # width, dtype and device of rows
    sizes: list[int]  # the bytes of the message for each peer
    parts: list[Part]  # the messages that are not empty
    direction: Direction | None = None  # None for rows that are written once

    @staticmethod
    def of(
        codec: Codec,
        x: Tensor,
        counts: Sequence[int],
        draw: RngKey | None = None,
        index: Index = None,
        direction: Direction | None = None,
    ) -> Packing:
        """Plans the messages of rows like `x`.

        Args:
            codec: the codec.
            x: rows `[n, f]`.
            counts: how many rows go to each peer.
            draw: the key of all the rows, in order.
            index: the rows of x to send, in order of peers `[sum(counts)]`; all by default.
            direction: the rows of a halo, if such rows will be written again and again.
        """
        sizes, parts = packed_bytes(codec, counts, x.size(1), x.dtype), []
        for (begin, end), (first, last) in zip(
            ranges(counts), ranges(sizes), strict=True
        ):
            if first == last:
                continue
            rows = slice(begin, end)
            key = None if draw is None else draw.part(begin, end)
            at = None if index is None else index[rows]
            writer = None
            if direction is not None and key is not None:
                writer = codec.writer(x[rows] if at is None else x, at, key.gid)
            parts.append(Part(rows, slice(first, last), at, key, writer))
        shape = x.size(1), x.dtype, x.device
        return Packing(codec, shape, sizes, parts, direction)

    def fits(self, codec: Codec, direction: Direction, x: Tensor) -> bool:
        """Tells whether it is the plan of these rows."""
        same = self.codec == codec and self.direction is direction
        return same and self.shape == (x.size(1), x.dtype, x.device)

    @cached_property
    def from_sizes(self) -> list[int]:
        """The bytes that arrive from each peer."""
        assert self.direction is not None
        return packed_bytes(self.codec, self.direction.from_counts, *self.shape[:2])

    @cached_property
    def most(self) -> int:
        """The most bytes that any rank sends to any other."""
        assert self.direction is not None
        return self.codec.wire_bytes(self.direction.most, *self.shape[:2])

    def write(self, x: Tensor, draw: RngKey | None = None, where: str = "") -> Tensor:
        """Writes the messages of rows with a key, side by side.

        Raises:
            ValueError: if rows cannot be written, or take other bytes than `wire_bytes` says;
                `where` names the layer.
        """
        out = torch.empty(sum(self.sizes), dtype=torch.uint8, device=x.device)
        for part in self.parts:
            key = part.draw
            if key is not None and draw is not None:
                key = replace(key, key=draw.key, noise=draw.noise)
            message = self.codec.encode(
                x[part.rows] if part.index is None else x,
                key,
                index=part.index,
                out=out[part.bytes],
                where=where,
                writer=part.writer,
            )
            wanted = part.bytes.stop - part.bytes.start
            if len(message) != wanted:
                count = part.rows.stop - part.rows.start
                raise ValueError(
                    f"{self.codec!r} wrote {len(message)} bytes for {count} rows of "
                    f"{x.size(1)}, but wire_bytes returned {wanted}: it must return the "
                    "exact size"
                )
            if message.data_ptr() != out[part.bytes].data_ptr():
                out[part.bytes].copy_(message)  # of a codec with a tensor of its own
        return out


@dataclass(eq=False)
class Message:
    """Holds the messages that all peers send in one exchange, pending or received."""

    codec: Codec
    epoch: int
    key: int
    direction: Direction
    sizes: list[int]
    pending: Pending | None  # the collective, until it is waited for
    raw: Tensor | None = None  # the bytes received

    def wait(self) -> Tensor:
        """Waits for the collective, and returns the bytes."""
        if self.pending is not None:
            self.raw, self.pending = self.pending.wait(), None
        assert self.raw is not None
        return self.raw

    def read(self, out: Tensor) -> Tensor:
        """Decodes the rows into `out` `[rows, f]`."""
        at, raw = self.direction, self.wait()
        draw = RngKey(self.key, at.from_gid, degree=at.from_degree)
        return unpack(self.codec, raw, self.sizes, at.from_counts, out, draw)


@dataclass(eq=False)
class StaleBuffer:
    """Keeps the messages of one exchange, in one direction, from epoch to epoch.

    Its bytes, for rows that are k epochs late: k messages, and with `smooth` the mean of the
    rows received.
    """

    messages: list[Message] = field(default_factory=list)  # the newest last
    mean: Tensor | None = None  # the moving average
    # the plan, width and type of the rows
    shape: tuple[Any, int, torch.dtype] | None = None
    # the epoch of the first message, or of the last synchronous one
    since: int | None = None
    reference: Tensor | None = None  # the rows sent last, if exchanges may be skipped

    def bind(self, plan: Any, width: int, dtype: torch.dtype) -> None:
        """Clears the buffer if it holds rows of another plan, width or type."""
        if self.shape is None:
            self.shape = plan, width, dtype
        if self.shape[0] is None:  # restored
            self.shape = plan, *self.shape[1:]
        if self.shape[0] is plan and self.shape[1:] == (width, dtype):
            return
        self.drain()
        self.messages, self.mean = [], None
        self.since = self.reference = None
        self.shape = plan, width, dtype

    def push(self, new: Message, late: int, synchronous: bool, most: int) -> Message:
        """Adds a message, and returns the one to read: `late` before it, or the oldest.

        A synchronous message is read at once, and earlier ones are dropped. Of all `most` stay.
        """
        if synchronous:
            self.messages, self.since = [], None
        self.messages.append(new)
        self.since = new.epoch if self.since is None else self.since
        due = self.messages[max(len(self.messages) - 1 - late, 0)]
        del self.messages[: max(len(self.messages) - most, 0)]
        return due

    def average(self, rows: Tensor, smooth: float, synchronous: bool) -> Tensor:
        """Updates the moving average with rows, and writes it to them in place."""
        if self.mean is None or synchronous:
            self.mean = rows.clone()
        else:
            self.mean.mul_(smooth).add_(rows, alpha=1 - smooth)
        return rows.copy_(self.mean)

    def drift(self, rows: Tensor) -> Tensor:
        """Returns sum |x - s|^2 and sum |s|^2, of these rows and those sent last `[2]`."""
        assert self.reference is not None
        last = self.reference.double()
        change = (rows.double() - last).square().sum()
        return torch.stack([change, last.square().sum()])

    def drain(self) -> None:
        """Waits for pending messages."""
        for message in self.messages:
            message.wait()

    @property
    def held(self) -> int:
        """The bytes in the buffer, those of pending messages included."""
        held = sum(sum(message.sizes) for message in self.messages)
        tensors = [t for t in (self.mean, self.reference) if t is not None]
        return held + sum(t.nbytes for t in tensors)


@dataclass(frozen=True, eq=False)
class LayerExchange:
    """Describes how one call of a layer exchanges rows.

    Args:
        link: the link, a `LinkPolicy`.
        call: the number of the layer, by first use, and of its call in this epoch.
        epoch: this epoch.
        codec: the codec of this epoch.
        synchronous: whether rows of this epoch are used.
        trains: whether it updates the state; evaluation does not.
        degrees: returns the in-degrees of own nodes `[n]`, for codecs that are `ranked`.
        exact_reason: why rows are exact and synchronous in all epochs; "" if they are not.
    """

    link: Any
    call: CallKey
    epoch: int
    codec: Codec
    synchronous: bool
    trains: bool
    degrees: Callable[[], Tensor] | None = None
    exact_reason: str = ""

    def as_exact(self, why: str) -> LayerExchange:
        """Returns the same call with exact and synchronous rows."""
        return replace(self, codec=Plain(), exact_reason=why)

    def wrap(self, link: Link, name: int) -> Link:
        """Returns a link of an operator with the codec and timing of this call.

        Exchanges of degrees are exact and synchronous.
        """
        if name >= DEGREES and not self.exact_reason:
            return self.as_exact("degrees are").wrap(link, name)
        if isinstance(link, ChunkedHalo):
            parts = [self._compress(part, name, i) for i, part in enumerate(link.parts)]
            return ChunkedHalo(tuple(parts))
        return self._compress(link, name, 0)

    def _compress(self, link: Link, name: int, chunk: int) -> Link:
        if link.silent or not isinstance(link, Halo):
            return link
        return CompressedLink(link, self, ExchangeKey(*self.call, name, chunk))

    @property
    def layer_name(self) -> str:
        """The name of the layer in error messages."""
        name: str = self.link.state.layer_name(self.call[0])
        return name

    def late(self, backward: bool) -> int:
        """Returns by how many epochs rows, or gradients, are late."""
        buffered = self.trains and not self.exact_reason
        return self.link.lateness[backward] if buffered else 0

    def skips(self, backward: bool) -> bool:
        """Tells whether rows, or gradients, may be skipped."""
        return self.trains and not self.exact_reason and self.link.skipping[backward]


class CompressedLink(Link):
    """Exchanges the rows of a halo as one call of a layer does, forward and backward.

    Args:
        halo: the plan of the rows to exchange.
        exchange: the codec and timing of the call.
        key: identifies the exchange.
    """

    is_exact = False

    def __init__(self, halo: Halo, exchange: LayerExchange, key: ExchangeKey) -> None:
        self.halo, self.exchange, self.key = halo, exchange, key
        self.silent = halo.silent
        self._forward_message: Message | None = None  # by the forward pass
        self._has_answered = False

    @property
    def num_ghosts(self) -> int:
        return self.halo.num_ghosts

    def begin(self, x: Tensor, into: Tensor | None = None) -> Callable[[], Tensor]:
        """Starts to send own rows; the returned call gives ghosts of this epoch or older."""
        read = self._send(x.flatten(1), sums=False)

        def arrive() -> Tensor:
            out = into
            if out is None:
                out = x.new_empty((self.num_ghosts, *x.shape[1:]))
            read(out.flatten(1))
            return out

        return arrive

    def begin_transpose(self, g: Tensor) -> Callable[[Tensor], Tensor]:
        """Starts to send sums; the returned call adds those of this or an earlier epoch."""
        read = self._send(g.flatten(1), sums=True)
        slot, dtype = self.halo.send_slot, g.dtype  # not `g`, to free its memory

        def arrive(out: Tensor) -> Tensor:
            flat = out.flatten(1)
            rows = read(flat.new_empty((len(slot), flat.size(1)), dtype=dtype))
            kernels.scatter_add_rows(flat, slot, rows.to(flat.dtype))
            return out

        return arrive

    def _send(self, x: Tensor, sums: bool) -> Callable[[Tensor], Tensor]:
        """Starts to send rows; returns a function that reads those due in this epoch."""
        exchange, direction = self.exchange, self._direction(sums)
        backward = self._forward_message is not None
        late, skips = exchange.late(backward), exchange.skips(backward)
        if exchange.trains:
            shape = direction.axis.size - 1, x.size(1), x.dtype, len(direction.gid)
            load = Load(direction.from_counts, *shape)
            seen = self.key, backward, load, exchange.exact_reason
            exchange.link.state.record_exchange(*seen)
        with exchange.link.state.guard():
            if backward:
                codec, key, noise = self._answer(late or skips)
            else:
                fold = self.key.layer, self.key.number, self.key.name
                key = noise = random.fold(exchange.link.seed, exchange.epoch, *fold)
                codec = exchange.codec
            buffer = self._buffer(x, direction, backward)
            if skips and self._is_skipped(
                rows_at(x, direction.index), buffer, direction, backward
            ):
                due = buffer.messages[-1]
                self._forward_message = self._forward_message if backward else due
                return lambda out: self._receive(due, buffer, out, backward)
            if sums:
                noise = random.fold(noise, direction.axis.rank)
            draw = RngKey(key, direction.gid, noise, direction.degree)
            plan = exchange.link.state.plan(self.key, codec, direction, x, draw)
            pending = collectives.all_to_all(
                plan.write(x, draw, exchange.layer_name),
                plan.sizes,
                plan.from_sizes,
                direction.axis,
                "halo_reduce" if sums else "halo",
                plan.most,
            )
            told = codec, exchange.epoch, key, direction, plan.from_sizes
            new = Message(*told, pending)
            most = max(late, int(skips))
            due = buffer.push(new, late, exchange.synchronous, most)
            if skips:
                buffer.reference = rows_at(x, direction.index).detach().clone()
            if not backward:
                self._forward_message = due
        return lambda out: self._receive(due, buffer, out, backward)

    def _direction(self, sums: bool) -> Direction:
        """Returns a direction, with in-degrees if a codec needs them; collective then."""
        exchange, directions = self.exchange, self.halo.directions
        if not exchange.codec.ranked:
            return directions[sums]
        if self.halo not in exchange.link.state.degrees:
            assert exchange.degrees is not None
            ends = self.halo.degrees(exchange.degrees())
            exchange.link.state.degrees[self.halo] = tuple(
                replace(one, degree=sent, from_degree=received)
                for one, sent, received in zip(
                    directions, ends, ends[::-1], strict=True
                )
            )
        found: Direction = exchange.link.state.degrees[self.halo][sums]
        return found

    def _is_skipped(
        self, rows: Tensor, buffer: StaleBuffer, direction: Direction, backward: bool
    ) -> bool:
        """Tells whether the exchange is skipped in this epoch; see [Note: skipped rows]."""
        exchange, rule = self.exchange, self.exchange.link.timing.skip
        assert rule is not None
        if exchange.synchronous or buffer.reference is None:
            return False
        if exchange.epoch - buffer.messages[-1].epoch > rule.most:
            return False
        change, norm = collectives.all_reduce(
            buffer.drift(rows), direction.axis
        ).tolist()
        return bool(change <= rule.bound_of(backward) ** 2 * norm)

    def _buffer(self, x: Tensor, direction: Direction, backward: bool) -> StaleBuffer:
        """Returns the buffer of the exchange."""
        exchange, buffer = self.exchange, StaleBuffer()
        if exchange.trains and not exchange.exact_reason:
            buffer = exchange.link.state.buffer(
                self.key, backward, direction, self.halo, x
            )
        if exchange.synchronous:
            buffer.drain()
        return buffer

    def _answer(self, late: int) -> tuple[Codec, int, int]:
        """Returns the codec, the key and the noise of a gradient; see [Note: answers]."""
        exchange, rows = self.exchange, self._forward_message
        assert rows is not None
        if self._has_answered and late:
            raise ValueError(
                f"{exchange.layer_name}: a second backward pass of one forward pass would send "
                "late gradients twice; run the layer again, or use late_gradients=0"
            )
        self._has_answered = True
        codec = gradient_codec(exchange.codec, rows.codec)
        return codec, rows.key, random.fold(rows.key, exchange.epoch, 1)

    def _receive(
        self, due: Message, buffer: StaleBuffer, out: Tensor, backward: bool
    ) -> Tensor:
        """Decodes the rows that are due into `out`, and returns it."""
        exchange = self.exchange
        with exchange.link.state.guard():
            due.read(out)
        if due not in buffer.messages:
            due.raw = None  # the backward pass needs only its codec and key
        momentum = exchange.link.timing.momentum(backward)
        if momentum and exchange.late(backward):
            buffer.average(out, momentum, exchange.synchronous)
        return out

    def price(self, width: int, sums: bool = False) -> Price:
        """Returns the price of an exchange in float32, in words of one byte."""
        codec, direction = self.exchange.codec, self.halo.directions[sums]
        received, sent = (
            packed_bytes(codec, counts, width, torch.float32)
            for counts in (direction.from_counts, direction.counts)
        )
        return Price(sum(received), sum(sent), sum(map(bool, sent)))

    def __repr__(self) -> str:
        return f"CompressedLink({self.halo}, {self.exchange.codec})"


def gradient_codec(now: Codec, rows: Codec) -> Codec:
    """Returns the codec of a gradient.

    Args:
        now: the codec of this epoch.
        rows: the codec of the message that the gradient answers.
    """
    if rows.zero_fills:
        return rows
    return Plain() if now.zero_fills else now  # gradients of whole rows are whole

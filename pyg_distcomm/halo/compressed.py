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
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyg_distcomm import kernels
from pyg_distcomm.comm import collectives, random
from pyg_distcomm.comm.ledger import Price
from pyg_distcomm.halo.codec import (
    Codec,
    Load,
    RngKey,
    pack,
    packed_bytes,
)
from pyg_distcomm.halo.codecs.quantise import Plain
from pyg_distcomm.halo.halo import DEGREES, ChunkedHalo, Direction, Halo, Link
from pyg_distcomm.halo.staleness import Message, StaleBuffer, Timing
from pyg_distcomm.halo.state import CallKey, ExchangeKey, LinkState


@dataclass(frozen=True, eq=False)
class LayerExchange:
    """Describes how one call of a layer exchanges rows.

    Args:
        state: the state of the link.
        timing: the epochs in which rows are used.
        seed: the seed of random numbers.
        call: the number of the layer, by first use, and of its call in this epoch.
        epoch: this epoch.
        codec: the codec of this epoch.
        synchronous: whether rows of this epoch are used.
        trains: whether it updates the state; evaluation does not.
        degrees: returns the in-degrees of own nodes `[n]`, for codecs that are `ranked`.
        exact_reason: why rows are exact and synchronous in all epochs; "" if they are not.
    """

    state: LinkState
    timing: Timing
    seed: int
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
        return self.state.layer_name(self.call[0])

    def late(self, backward: bool) -> int:
        """Returns by how many epochs rows, or gradients, are late."""
        buffered = self.trains and not self.exact_reason
        return self.timing.staleness(backward) if buffered else 0

    def skips(self, backward: bool) -> bool:
        """Tells whether rows, or gradients, may be skipped."""
        return self.trains and not self.exact_reason and self.timing.skips(backward)


class CompressedLink(Link):
    """Exchanges the rows of a halo as one call of a layer does, forward and backward.

    Args:
        halo: the plan of the rows to exchange.
        exchange: the codec and timing of the call.
        key: identifies the exchange.
    """

    def __init__(self, halo: Halo, exchange: LayerExchange, key: ExchangeKey) -> None:
        self.halo, self.exchange, self.key = halo, exchange, key
        self.silent = halo.silent
        self._forward_message: Message | None = None  # by the forward pass
        self._has_answered = False

    @property
    def is_exact(self) -> bool:
        """False: rows are coded, or late."""
        return False

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
            load = _load_of(direction, x.size(1), x.dtype)
            sent = len(direction.gid)
            exchange.state.record_exchange(
                self.key, backward, load, sent, exchange.exact_reason
            )
        with exchange.state.guard():
            if backward:
                codec, key, noise = self._answer(late or skips)
            else:
                fold = self.key.layer, self.key.number, self.key.name
                key = noise = random.fold(exchange.seed, exchange.epoch, *fold)
                codec = exchange.codec
            buffer = self._buffer(x, direction, backward)
            if skips and self._is_skipped(
                _rows_to_send(x, direction), buffer, direction, backward
            ):
                due = buffer.messages[-1]
                self._forward_message = self._forward_message if backward else due
                return lambda out: self._receive(due, buffer, out, backward)
            if sums:
                noise = random.fold(noise, direction.axis.rank)
            rng = RngKey(key, direction.gid, noise, direction.degree)
            op = "halo_reduce" if sums else "halo"
            packed, sizes = pack(
                codec,
                x,
                direction.counts,
                rng,
                index=direction.index,
                where=exchange.layer_name,
            )
            shape = x.size(1), x.dtype
            from_sizes = packed_bytes(codec, direction.from_counts, *shape)
            most = codec.wire_bytes(direction.most, *shape)
            pending = collectives.all_to_all(
                packed, sizes, from_sizes, direction.axis, op, most
            )
            ghosts = direction.from_gid, direction.from_counts, direction.from_degree
            new = Message(codec, exchange.epoch, key, *ghosts, from_sizes, pending)
            due = buffer.push(new, late, exchange.synchronous)
            buffer.trim(max(late, int(skips)))
            if skips:
                buffer.reference = _rows_to_send(x, direction).detach().clone()
            if not backward:
                self._forward_message = due
        return lambda out: self._receive(due, buffer, out, backward)

    def _direction(self, sums: bool) -> Direction:
        """Returns a direction, with in-degrees if a codec needs them; collective then."""
        exchange, direction = self.exchange, self.halo.direction(sums)
        if not exchange.codec.ranked:
            return direction
        if self.halo not in exchange.state.degrees:
            assert exchange.degrees is not None
            exchange.state.degrees[self.halo] = self.halo.degrees(exchange.degrees())
        sent, ghosts = exchange.state.degrees[self.halo]
        ends = (ghosts, sent) if sums else (sent, ghosts)
        return replace(direction, degree=ends[0], from_degree=ends[1])

    def _is_skipped(
        self, rows: Tensor, buffer: StaleBuffer, direction: Direction, backward: bool
    ) -> bool:
        """Tells whether the exchange is skipped in this epoch; see [Note: skipped rows]."""
        exchange, rule = self.exchange, self.exchange.timing.skip
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
            buffer = exchange.state.buffer(self.key, backward, direction, self.halo, x)
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
        with exchange.state.guard():
            due.read(out)
        if due not in buffer.messages:
            due.raw = None  # the backward pass needs only its codec and key
        momentum = exchange.timing.momentum(backward)
        if momentum and exchange.late(backward):
            buffer.average(out, momentum, exchange.synchronous)
        return out

    def price(self, width: int) -> Price:
        """Returns the price of a `begin` in float32, in words of one byte."""
        return self._price(width, sums=False)

    def price_transpose(self, width: int) -> Price:
        """Returns the price of a `begin_transpose` in float32, in words of one byte."""
        return self._price(width, sums=True)

    def _price(self, width: int, sums: bool) -> Price:
        codec, direction = self.exchange.codec, self.halo.direction(sums)
        peers, kind = direction.axis.size - 1, torch.float32
        received = _load_of(direction, width, kind).bytes(codec)
        sent = Load(direction.counts, peers, width, kind).bytes(codec)
        sizes = packed_bytes(codec, direction.counts, width, kind)
        return Price(received, sent, sum(map(bool, sizes)))

    def to(self, device: torch.device) -> CompressedLink:
        return CompressedLink(self.halo.to(device), self.exchange, self.key)

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


def _load_of(direction: Direction, width: int, dtype: torch.dtype) -> Load:
    return Load(direction.from_counts, direction.axis.size - 1, width, dtype)


def _rows_to_send(x: Tensor, direction: Direction) -> Tensor:
    return x if direction.index is None else kernels.gather_rows(x, direction.index)

"""Exchanges rows that are coded, late, or both, as one call of a layer does.

[Note: coded links] A link defines what a layer receives: a codec writes rows, and a timing
sets when they are used. Operators do not depend on either: a layer asks its policy for a
`LayerExchange`, which wraps each halo. The policy's state holds what is kept until the
next epoch.

[Note: answers] The gradient of an exchange is masked as the rows it answers: with the rate
and the key of the message that was read, which may be an earlier epoch's. Codecs that only
round pass gradients straight through, which are written at the rate of their own epoch,
with noise of their own; where sums meet, each sender has its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from pyg_distcomm import kernels
from pyg_distcomm.comm import collectives, random
from pyg_distcomm.comm.ledger import Price
from pyg_distcomm.halo.codec import (
    Codec,
    CodecState,
    Load,
    RngKey,
    fresh_state,
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
        timing: when rows are used.
        seed: the seed of random numbers.
        call: the number of the layer, by first use, and of its call in this epoch.
        epoch: this epoch.
        codec, gradient_codec: the codecs of rows and of gradients.
        synchronous: whether rows of this epoch are used.
        trains: whether it updates the state; evaluation does not.
        seeds: whether the rows, or the gradients, of this exact exchange start the state
            of a stateful codec.
        degrees: returns the in-degrees of own nodes `[n]`, for codecs that are `ranked`.
        exactly: why rows are exact and synchronous in all epochs; empty if they are not.
    """

    state: LinkState
    timing: Timing
    seed: int
    call: CallKey
    epoch: int
    codec: Codec
    gradient_codec: Codec | None
    synchronous: bool
    trains: bool
    seeds: tuple[bool, bool]
    degrees: Callable[[], Tensor] | None = None
    exactly: str = ""

    def whole(self, why: str) -> LayerExchange:
        """Returns the same call for rows that must be exact and synchronous."""
        exact = replace(self, codec=Plain(), gradient_codec=None)
        return replace(exact, seeds=(False, False), exactly=why)

    def wrap(self, link: Link, name: int) -> Link:
        """Returns a link of an operator as this call uses it, chunk by chunk.

        Degrees are exact and synchronous.
        """
        if name >= DEGREES and not self.exactly:
            return self.whole("degrees are").wrap(link, name)
        if isinstance(link, ChunkedHalo):
            parts = [self._coded(part, name, i) for i, part in enumerate(link.parts)]
            return ChunkedHalo(tuple(parts))
        return self._coded(link, name, 0)

    def _coded(self, link: Link, name: int, chunk: int) -> Link:
        if link.silent or not isinstance(link, Halo):
            return link
        return CompressedLink(link, self, ExchangeKey(*self.call, name, chunk))

    @property
    def where(self) -> str:
        """The name of the layer in messages."""
        return self.state.where(self.call[0])

    def late(self, backward: bool) -> int:
        """Returns by how many epochs rows, or gradients, are late."""
        buffered = self.trains and not self.exactly
        return self.timing.staleness(backward) if buffered else 0

    def skips(self, backward: bool) -> bool:
        """Tells whether rows, or gradients, may be skipped."""
        return self.trains and not self.exactly and self.timing.skips(backward)


class CompressedLink(Link):
    """Exchanges the rows of a halo as one call of a layer does, forward and backward.

    Args:
        halo: the rows that travel.
        use: how the call exchanges rows.
        key: identifies the exchange.
    """

    def __init__(self, halo: Halo, use: LayerExchange, key: ExchangeKey) -> None:
        self.halo, self.use, self.key = halo, use, key
        self.silent = halo.silent
        self._read: Message | None = None  # by the forward pass
        self._answered = False

    @property
    def is_exact(self) -> bool:
        """False: rows are coded, or late."""
        return False

    @property
    def num_ghosts(self) -> int:
        return self.halo.num_ghosts

    def begin(self, x: Tensor, into: Tensor | None = None) -> Callable[[], Tensor]:
        """Starts to send own rows; the call returns ghosts of this or an earlier epoch."""
        read = self._start(x.flatten(1), sums=False)

        def arrive() -> Tensor:
            out = into
            if out is None:
                out = x.new_empty((self.num_ghosts, *x.shape[1:]))
            read(out.flatten(1))
            return out

        return arrive

    def begin_transpose(self, g: Tensor) -> Callable[[Tensor], Tensor]:
        """Starts to send sums; the call adds those of this or an earlier epoch."""
        read = self._start(g.flatten(1), sums=True)
        slot, dtype = self.halo.send_slot, g.dtype  # sums themselves are let go of

        def arrive(out: Tensor) -> Tensor:
            flat = out.flatten(1)
            rows = read(flat.new_empty((len(slot), flat.size(1)), dtype=dtype))
            kernels.scatter_add_rows(flat, slot, rows.to(flat.dtype))
            return out

        return arrive

    def _start(self, x: Tensor, sums: bool) -> Callable[[Tensor], Tensor]:
        """Sends rows, and returns a function that reads those due in this epoch."""
        use, way, backward = self.use, self._direction(sums), self._read is not None
        late, skips = use.late(backward), use.skips(backward)
        if use.trains:
            load = _received(way, x.size(1), x.dtype)
            sent = len(way.gid)
            use.state.note(self.key, backward, load, sent, use.exactly)
        with use.state.guard():
            if backward:
                x, way, codec, key, noise = self._gradient(x, way, late or skips)
            else:
                fold = self.key.layer, self.key.number, self.key.name
                key = noise = random.fold(use.seed, use.epoch, *fold)
                codec = use.codec
            buffer = self._buffer(x, way, codec, backward)
            if skips and self._skipped(_rows(x, way), buffer, way, backward):
                due = buffer.messages[-1]
                self._read = self._read if backward else due
                return lambda out: self._finish(due, buffer, out, backward)
            if sums:
                noise = random.fold(noise, way.axis.rank)
            packed, sizes = pack(
                codec,
                x,
                way.counts,
                RngKey(key, way.gid, noise, way.degree),
                index=way.index,
                state=buffer.sent if codec.stateful else None,
                where=use.where,
            )
            op = "halo_reduce" if sums else "halo"
            if codec.fixed_size:
                from_sizes = packed_bytes(codec, way.from_counts, x.size(1), x.dtype)
            else:
                lengths, ones = torch.tensor(sizes), [1] * way.axis.size
                header = collectives.all_to_all(lengths, ones, ones, way.axis, op, 1)
                from_sizes = [int(size) for size in header.wait()]
            most = codec.wire_bytes(way.most, x.size(1), x.dtype)
            pending = collectives.all_to_all(
                packed, sizes, from_sizes, way.axis, op, most
            )
            ghosts = way.from_gid, way.from_counts, way.from_degree
            new = Message(codec, use.epoch, key, *ghosts, from_sizes, pending)
            due = buffer.push(new, late, use.synchronous)
            buffer.trim(max(late, int(skips)))
            if skips:
                buffer.reference = _rows(x, way).detach().clone()
            if not backward:
                self._read = due
            if use.seeds[backward]:
                buffer.sent = CodecState(_rows(x, way).clone())
        return lambda out: self._finish(due, buffer, out, backward)

    def _direction(self, sums: bool) -> Direction:
        """Returns a direction, with in-degrees if a codec goes by them; collective then."""
        use, way = self.use, self.halo.direction(sums)
        own = use.gradient_codec
        if not (use.codec.ranked or (own is not None and own.ranked)):
            return way
        if self.halo not in use.state.degrees:
            assert use.degrees is not None
            use.state.degrees[self.halo] = self.halo.degrees(use.degrees())
        sent, ghosts = use.state.degrees[self.halo]
        ends = (ghosts, sent) if sums else (sent, ghosts)
        return replace(way, degree=ends[0], from_degree=ends[1])

    def _skipped(
        self, rows: Tensor, buffer: StaleBuffer, way: Direction, backward: bool
    ) -> bool:
        """Tells whether the rows sent last are used again; see [Note: skipped rows]."""
        use, rule = self.use, self.use.timing.skip
        assert rule is not None
        if use.synchronous or buffer.reference is None:
            return False
        if use.epoch - buffer.messages[-1].epoch > rule.most:
            return False
        change, norm = collectives.all_reduce(buffer.drift(rows), way.axis).tolist()
        return bool(change <= rule.bound_of(backward) ** 2 * norm)

    def _buffer(
        self, x: Tensor, way: Direction, codec: Codec, backward: bool
    ) -> StaleBuffer:
        """Returns the buffer of the exchange, with states for a stateful codec."""
        use, buffer = self.use, StaleBuffer()
        if use.trains and not use.exactly:
            buffer = use.state.buffer(self.key, backward, way, self.halo, x)
        if use.synchronous:
            buffer.drain()
        if codec.stateful and buffer.sent is None:
            like = x.size(1), x.dtype, x.device
            buffer.sent = fresh_state(len(way.gid), *like)
            buffer.received = fresh_state(len(way.from_gid), *like)
        return buffer

    def _gradient(
        self, g: Tensor, way: Direction, late: int
    ) -> tuple[Tensor, Direction, Codec, int, int]:
        """Returns a gradient, its codec and its keys; see [Note: answers]."""
        use, rows = self.use, self._read
        assert rows is not None
        if self._answered and late:
            raise ValueError(
                f"{use.where}: a second backward pass of one forward pass would send late "
                "gradients twice; run the layer again, or use late_gradients=0"
            )
        self._answered = True
        codec = gradient_codec(use.codec, rows.codec, use.gradient_codec)
        if use.gradient_codec is not None and rows.codec.zero_fills:
            g, way = _adjoint(rows, _rows(g, way), way), replace(way, index=None)
        return g, way, codec, rows.key, random.fold(rows.key, use.epoch, 1)

    def _finish(
        self, due: Message, buffer: StaleBuffer, out: Tensor, backward: bool
    ) -> Tensor:
        """Reads the rows that are due into `out`, and returns it."""
        use = self.use
        with use.state.guard():
            due.read(out, buffer.received if due.codec.stateful else None)
        if due not in buffer.messages:
            due.raw = None  # the backward pass needs only its codec and key
        if use.seeds[backward]:
            buffer.received = CodecState(out.clone())
        momentum = use.timing.momentum(backward)
        if momentum and use.late(backward):
            buffer.average(out, momentum, use.synchronous)
        return out

    def price(self, width: int) -> Price:
        """Returns the price of a `begin` in float32, in words of one byte."""
        return self._price(width, sums=False)

    def price_transpose(self, width: int) -> Price:
        """Returns the price of a `begin_transpose` in float32, in words of one byte."""
        return self._price(width, sums=True)

    def _price(self, width: int, sums: bool) -> Price:
        codec, way = self.use.codec, self.halo.direction(sums)
        peers, kind = way.axis.size - 1, torch.float32
        received = _received(way, width, kind).bytes(codec)
        sent = Load(way.counts, peers, width, kind).bytes(codec)
        sizes = packed_bytes(codec, way.counts, width, kind)
        headers = 0 if codec.fixed_size else peers
        return Price(received, sent, sum(map(bool, sizes)) + headers)

    def to(self, device: torch.device) -> CompressedLink:
        return CompressedLink(self.halo.to(device), self.use, self.key)

    def __repr__(self) -> str:
        return f"CompressedLink({self.halo}, {self.use.codec})"


def gradient_codec(now: Codec, rows: Codec, own: Codec | None) -> Codec:
    """Returns the codec of a gradient.

    Args:
        now: the codec of this epoch.
        rows: the codec of the message that the gradient answers.
        own: the codec of gradients, if they have one.
    """
    if own is not None:
        return own
    if rows.zero_fills:
        return rows
    return Plain() if now.zero_fills else now  # gradients of whole rows are whole


def _received(way: Direction, width: int, dtype: torch.dtype) -> Load:
    return Load(way.from_counts, way.axis.size - 1, width, dtype)


def _rows(x: Tensor, way: Direction) -> Tensor:
    return x if way.index is None else kernels.gather_rows(x, way.index)


def _adjoint(rows: Message, g: Tensor, way: Direction) -> Tensor:
    """Returns C^T g, message by message; C is that of the rows read."""
    whole = RngKey(rows.key, way.gid, degree=way.degree)
    ends = list(accumulate(way.counts, initial=0))
    parts = [
        rows.codec.adjoint(g[begin:end], whole.part(begin, end))
        for begin, end in pairwise(ends)
    ]
    return torch.cat(parts)

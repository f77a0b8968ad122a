"""Predicts the bytes that the exchanges of a link policy receive and keep in an epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.ledger import Short, format_table
from pyg_distcomm.halo.codec import Codec
from pyg_distcomm.halo.codecs.quantise import Plain
from pyg_distcomm.halo.exchange import CallKey, ExchangeKey, gradient_codec
from pyg_distcomm.halo.halo import DEGREES, NAMES
from pyg_distcomm.halo.state import ExchangeState


@dataclass(frozen=True)
class Line:
    """Prices one exchange of this rank in one epoch.

    Args:
        layer: number, kind and call of the layer.
        exchange: "ghost" moves rows over the row axis and "sums" moves sums back over it;
            "out" and "far" do so over the col axis; numbers count what a layer looks up.
        width: the width of the rows.
        how: the codec and timing.
        forward, backward: bytes received.
        kept: bytes kept until the next epoch.
    """

    layer: str
    exchange: str
    width: int
    how: str
    forward: int
    backward: int
    kept: int


@dataclass(frozen=True)
class LinkPrice:
    """Prices the exchanges of this rank in one epoch of training.

    Args:
        epoch: the epoch.
        lines: each exchange.
        agreement: bytes by which ranks agree on whether calls are exact, or skipped.
        exact: whether bytes are exact; where exchanges may be skipped, they are upper bounds.
    """

    epoch: int
    lines: tuple[Line, ...]
    agreement: int
    exact: bool

    @property
    def forward(self) -> int:
        """Bytes received in forward passes."""
        return sum(line.forward for line in self.lines)

    @property
    def backward(self) -> int:
        """Bytes received in backward passes."""
        return sum(line.backward for line in self.lines)

    @property
    def total(self) -> int:
        """All bytes received, including those of the agreement."""
        return self.forward + self.backward + self.agreement

    @property
    def kept(self) -> int:
        """Bytes kept until the next epoch."""
        return sum(line.kept for line in self.lines)

    def __str__(self) -> str:
        head = ["layer", "exchange", "width", "how", "forward", "backward", "kept"]
        rows: list[Sequence[object]] = [
            (
                *(line.layer, line.exchange, line.width, line.how),
                *map(Short, (line.forward, line.backward, line.kept)),
            )
            for line in self.lines
        ]
        sums = map(Short, (self.forward, self.backward, self.kept))
        rows.append(("all", "", None, "", *sums))
        most = "" if self.exact else ", at most"
        return (
            f"epoch {self.epoch}: bytes received here{most}\n{format_table(head, rows)}"
        )


@dataclass(frozen=True, eq=False)
class LinkCostModel:
    """Predicts the bytes of a link's exchanges from its state at one moment.

    Args:
        link: the link.
        active: calls of the last whole epoch, or of this one if it is the first.
        size: the number of ranks.
    """

    link: Any
    active: tuple[CallKey, ...]
    size: int

    @staticmethod
    def of(link: Any) -> LinkCostModel:
        """Returns the cost model of the exchanges seen so far."""
        state = link.state
        first = link.epoch == 0 and bool(state.calls)
        parts = state.nodes is None or state.in_pipeline
        size = 1 if parts or state.nodes is None else state.nodes.mesh.size
        return LinkCostModel(link, tuple(state.calls) if first else state.active, size)

    def price(self, epoch: int) -> LinkPrice:
        """Returns the price of an epoch on this rank."""
        lines: dict[tuple[int, int, int], Line] = {}
        decision_bytes = 0
        for key, exchange in self._active_exchanges(epoch):
            computed_now = self._is_computed_now(key.layer, epoch)
            forward = self._received_bytes(key, exchange, epoch, False, computed_now)
            backward = (
                0
                if computed_now
                else self._received_bytes(key, exchange, epoch, True, computed_now)
            )
            decision_bytes += (
                0 if computed_now else self._skip_decision_bytes(key, exchange, epoch)
            )
            loads = [load for load in exchange.loads if load is not None]
            before = lines.get(key[:3])
            kept = 0 if computed_now else self._kept_bytes(key, exchange, epoch)
            number = f" #{key.number}" if key.number else ""
            lines[key[:3]] = Line(
                f"{key.layer} {exchange.layer}{number}",
                exchange_name(key.name),
                loads[0].width if loads else 0,
                self._describe(key, exchange, epoch, computed_now),
                forward + (before.forward if before else 0),
                backward + (before.backward if before else 0),
                kept + (before.kept if before else 0),
            )
        agreement = self._agreement_bytes(epoch) + decision_bytes
        return LinkPrice(epoch, tuple(lines.values()), agreement, not decision_bytes)

    def _active_exchanges(
        self, epoch: int
    ) -> Iterator[tuple[ExchangeKey, ExchangeState]]:
        for key, exchange in sorted(
            self.link.state.exchanges.items(), key=lambda one: one[0]
        ):
            if key[:2] in self.active and not self._is_cached(key.layer, epoch):
                yield key, exchange

    def _agreement_bytes(self, epoch: int) -> int:
        """Returns the bytes with which ranks agree on the modes of an epoch's calls."""
        asking_layers = [
            number
            for number, _ in self.active
            if not (
                self._is_cached(number, epoch) or self._is_computed_now(number, epoch)
            )
        ]
        if not asking_layers or self.size == 1:
            return 0
        new = {number for number in asking_layers if self._first_epoch(number) == epoch}
        times = asking_layers.count(asking_layers[0]) + len(new - {asking_layers[0]})
        return times * collectives.ring_words(1, self.size)

    def _skip_decision_bytes(
        self, key: ExchangeKey, exchange: ExchangeState, epoch: int
    ) -> int:
        """Returns at most how many bytes ranks use to decide whether to skip an exchange."""
        if self.link.is_synchronous(epoch) or self._is_exact(key, exchange, epoch):
            return 0
        return sum(
            8 * collectives.ring_words(2, load.peers + 1)
            for backward, load in enumerate(exchange.loads)
            if load is not None and self.link.timing.skips(bool(backward))
        )

    def _first_epoch(self, number: int) -> int:
        """Returns the epoch in which a layer trains first."""
        layer = self.link.state.layers.get(number)
        return self.link.epoch if layer is None or layer.first is None else layer.first

    def _input_stage(self, number: int) -> int:
        layer = self.link.state.layers.get(number)
        return 0 if layer is None else layer.input_stage

    def _is_computed_now(self, number: int, epoch: int) -> bool:
        """Tells whether a layer's product is computed in this epoch and then cached."""
        layer = self.link.state.layers.get(number)
        if layer is not None and layer.cached_at == epoch:
            return True
        return self._input_stage(number) == 1 and epoch == max(self.link.epoch, 1)

    def _is_cached(self, number: int, epoch: int) -> bool:
        """Tells whether a layer's product is cached, so that it exchanges nothing."""
        if not self._input_stage(number) or self._is_computed_now(number, epoch):
            return False
        return epoch >= max(self.link.epoch, 1)

    def _is_exact(self, key: ExchangeKey, exchange: ExchangeState, epoch: int) -> bool:
        first = self.link.exact_last and epoch == 0
        return first or key[:2] == self.link.state.last or bool(exchange.exact_reason)

    def oldest(self, epoch: int, late: int, since: int = 0) -> int:
        """Returns the oldest epoch whose rows are used in `epoch`, at least `since`."""
        window = range(epoch, max(epoch - late, -1), -1)
        synchronous = (e for e in window if self.link.is_synchronous(e))
        return next(synchronous, max(since, epoch - late))

    def _codec(
        self, key: ExchangeKey, exchange: ExchangeState, epoch: int, backward: bool
    ) -> Codec:
        """Returns the codec of rows, or of gradients, in an epoch."""
        if self._is_exact(key, exchange, epoch):
            return Plain()
        codec = self.link.codec_at(epoch)
        if not backward:
            return codec
        buffer, read = exchange.buffers[False], epoch  # the epoch of the rows read
        since = None if buffer is None else buffer.since
        if self.link.timing.skips(False) and buffer is not None and buffer.messages:
            read = buffer.messages[-1].epoch
        elif since is not None and not self.link.is_synchronous(epoch):
            read = self.oldest(epoch, self.link.timing.staleness(False), since)
        return gradient_codec(codec, self._codec(key, exchange, read, False))

    def _received_bytes(
        self,
        key: ExchangeKey,
        exchange: ExchangeState,
        epoch: int,
        backward: bool,
        exact: bool,
    ) -> int:
        load = exchange.loads[backward]
        if load is None:
            return 0
        codec = Plain() if exact else self._codec(key, exchange, epoch, backward)
        return load.bytes(codec)

    def _kept_bytes(self, key: ExchangeKey, exchange: ExchangeState, epoch: int) -> int:
        """Returns the bytes of both buffers after an epoch; see `StaleBuffer`."""
        if key[:2] == self.link.state.last or exchange.exact_reason:
            return 0
        total = 0
        for backward in (False, True):
            load, late = exchange.loads[backward], self.link.timing.staleness(backward)
            if load is None:
                continue
            buffer = exchange.buffers[backward]
            since = epoch if buffer is None or buffer.since is None else buffer.since
            for e in range(self.oldest(epoch, late - 1, since), epoch + 1):
                total += load.bytes(self._codec(key, exchange, e, backward))
            if self.link.timing.momentum(backward):
                total += load.rows_bytes
            row = load.width * load.dtype.itemsize
            if self.link.timing.skips(backward):
                sent = [m.codec for m in buffer.messages] if buffer else []
                sent = sent or [self._codec(key, exchange, epoch, backward)]
                total += load.bytes(sent[-1])
                total += exchange.sent_rows[backward] * row
        return total

    def _describe(
        self, key: ExchangeKey, exchange: ExchangeState, epoch: int, computed_now: bool
    ) -> str:
        if computed_now:
            return "exact: its product is kept"
        if key[:2] == self.link.state.last:
            return "exact: the last one"
        if exchange.exact_reason:
            return f"exact: {exchange.exact_reason}"
        if self._is_exact(key, exchange, epoch):
            return "exact: the first epoch"
        how = f"{self.link.codec_at(epoch)}"
        late = [self.link.timing.staleness(backward) for backward in (False, True)]
        skip = self.link.timing.skip
        if skip is not None and not self.link.is_synchronous(epoch):
            return f"{how}, once it drifts by {skip.bound:g}"
        if self.link.is_synchronous(epoch) or not any(late):
            return how
        if late[0] == late[1]:
            return f"{how}, late by {late[0]}"
        return f"{how}, late by {late[0]} and {late[1]}"


def exchange_name(name: int) -> str:
    """Returns the name of an exchange of a call."""
    if name >= DEGREES:
        return "degrees"
    return NAMES[name] if name < len(NAMES) else str(name - len(NAMES))

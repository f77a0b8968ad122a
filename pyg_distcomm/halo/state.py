"""Holds what a link policy keeps of layers and exchanges, saves it, and prices an epoch."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.ledger import Short, format_table
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.halo import codecs
from pyg_distcomm.halo.codec import Codec, Load
from pyg_distcomm.halo.codecs import Plain
from pyg_distcomm.halo.exchange import ExchangeKey, Message, StaleBuffer, gradient_codec
from pyg_distcomm.halo.halo import DEGREES, NAMES, Direction

COMPUTED, KEPT = "computed", "kept"  # what becomes of a constant input's product


@dataclass(eq=False)
class ExchangeState:
    """Holds the state of one exchange of a layer; pairs are (forward, backward)."""

    layer: str  # its name
    exact_reason: str = ""  # why rows are always exact and synchronous
    # None for a direction without an exchange so far
    loads: list[Load | None] = field(default_factory=lambda: [None, None])
    buffers: list[StaleBuffer] = field(
        default_factory=lambda: [StaleBuffer(), StaleBuffer()]
    )
    answered: bool = False  # whether it had a backward pass in this epoch


@dataclass(eq=False)
class LayerState:
    """Holds the state of a layer that trains with the link."""

    name: str  # in error messages
    # returns `ProductCache.stage` of its input in training; that of an evaluation may differ
    stage: Callable[[], int] | None = None
    first: int | None = None  # the epoch in which it first trained with the link
    last: int | None = None
    cached_at: int | None = None  # the epoch that computed its product to be cached
    used: bool = False  # in training of this epoch, be it with a cached product

    @property
    def input_stage(self) -> int:
        """Whether its input was seen (1), or its product is cached (2); 0 if neither.

        An input that is not used again in the next epoch no longer counts as seen.
        """
        if self.stage is None:
            return 0
        stage, lasts = self.stage(), self.first == self.last
        return stage if stage != 1 or lasts else 0

    def phase(self, epoch: int, now: int) -> str:
        """Returns whether its product is COMPUTED, to be kept, or KEPT in an epoch; or ""."""
        stage, soonest = self.input_stage, max(now, 1)
        if self.cached_at == epoch or (stage == 1 and epoch == soonest):
            return COMPUTED
        return KEPT if stage and epoch >= soonest else ""


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

    def plus(self, other: Line) -> Line:
        """Returns the line of two chunks of one exchange."""
        names = "forward", "backward", "kept"
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return replace(self, **sums)


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
class Forecast:
    """Predicts the exchanges of a link in an epoch from its state now."""

    link: Any
    epoch: int

    def price(self) -> LinkPrice:
        """Returns the price of the epoch on this rank."""
        link, state, epoch = self.link, self.link.state, self.epoch
        # calls of the last whole epoch, or of this one if it is the first
        first = link.epoch == 0 and bool(state.calls)
        active = tuple(state.calls) if first else state.active
        phases = {n: self._layer(n).phase(epoch, link.epoch) for n, _ in active}
        lines: dict[tuple[int, int, int], Line] = {}
        decisions = 0
        for key, exchange in sorted(state.exchanges.items(), key=lambda one: one[0]):
            if key[:2] in active and phases[key.layer] != KEPT:
                line, decided = self._line(key, exchange, phases[key.layer])
                before = lines.get(key[:3])
                lines[key[:3]] = line if before is None else before.plus(line)
                decisions += decided
        agreement = self._agreement_bytes([n for n, _ in active if not phases[n]])
        return LinkPrice(
            epoch, (*lines.values(),), agreement + decisions, not decisions
        )

    def _layer(self, number: int) -> LayerState:
        return self.link.state.layers.get(number) or LayerState("")

    def _agreement_bytes(self, asking: list[int]) -> int:
        """Returns the bytes with which ranks agree on the modes of the calls of layers."""
        nodes, now = self.link.state.nodes, self.link.epoch
        if not asking or nodes is None or self.link.state.in_pipeline:
            return 0
        firsts = {n: self._layer(n).first for n in asking}
        new = {
            n for n, at in firsts.items() if (now if at is None else at) == self.epoch
        }
        times = asking.count(asking[0]) + len(new - {asking[0]})
        return times * collectives.ring_words(1, nodes.mesh.size)

    def _line(
        self, key: ExchangeKey, exchange: ExchangeState, phase: str
    ) -> tuple[Line, int]:
        """Returns the line of an exchange, and at most how many bytes decide on skipping it."""
        first = self.link.exact_last and self.epoch == 0
        why = exchange.exact_reason or ("the first epoch" if first else "")
        why = "its product is kept" if phase else why
        received, decisions, kept, widths = [0, 0], 0, 0, [0]
        for backward, load in enumerate(exchange.loads):
            if load is None or (phase and backward):
                continue
            codec = Plain() if phase else self._codec(exchange, self.epoch, backward)
            received[backward] = load.bytes(codec)
            kept += 0 if phase else self._kept_bytes(exchange, backward, load)
            widths.append(load.width)
            skips = self.link.timing.skips(bool(backward))
            if skips and not why and not self.link.is_synchronous(self.epoch):
                decisions += 8 * collectives.ring_words(2, load.peers + 1)
        number = f" #{key.number}" if key.number else ""
        layer, how = f"{key.layer} {exchange.layer}{number}", self._describe(why)
        name = exchange_name(key.name)
        forward, back = received
        return Line(layer, name, max(widths), how, forward, back, kept), decisions

    def _codec(self, exchange: ExchangeState, epoch: int, backward: int) -> Codec:
        """Returns the codec of rows, or of gradients, in an epoch."""
        link, buffer = self.link, exchange.buffers[False]
        if exchange.exact_reason or (link.exact_last and epoch == 0):
            return Plain()
        if not backward:
            return link.codec_at(epoch)
        read = epoch  # the epoch of the rows that the gradient answers
        if buffer.messages and link.timing.skips(False):
            read = buffer.messages[-1].epoch
        elif buffer.since is not None and not link.is_synchronous(epoch):
            late = link.timing.staleness(False)
            read = link.oldest(epoch, late, buffer.since)
        rows = self._codec(exchange, read, False)
        return gradient_codec(link.codec_at(epoch), rows)

    def _kept_bytes(self, exchange: ExchangeState, backward: int, load: Load) -> int:
        """Returns the bytes of a buffer after the epoch; see `StaleBuffer`."""
        if exchange.exact_reason:
            return 0
        link, epoch, way = self.link, self.epoch, bool(backward)
        buffer, late = exchange.buffers[way], link.timing.staleness(way)
        since = epoch if buffer.since is None else buffer.since
        epochs = range(link.oldest(epoch, late - 1, since), epoch + 1)
        written = [self._codec(exchange, e, backward) for e in epochs]
        means, skips = bool(link.timing.momentum(way)), link.timing.skips(way)
        if skips:
            sent = [m.codec for m in buffer.messages]
            now = self._codec(exchange, epoch, backward)
            written.append(sent[-1] if sent else now)
        copies = means * sum(load.counts) + skips * load.sent
        row = load.width * load.dtype.itemsize
        return sum(map(load.bytes, written)) + copies * row

    def _describe(self, why_exact: str) -> str:
        link, skip = self.link, self.link.timing.skip
        if why_exact:
            return f"exact: {why_exact}"
        how, (rows, gradients) = f"{link.codec_at(self.epoch)}", link.lateness
        if link.is_synchronous(self.epoch) or not link.timing.is_late:
            return how
        if skip is not None:
            return f"{how}, once it drifts by {skip.bound:g}"
        ends = f" and {gradients}" if gradients != rows else ""
        return f"{how}, late by {rows}{ends}"


def exchange_name(name: int) -> str:
    """Returns the name of an exchange of a call."""
    if name >= DEGREES:
        return "degrees" if name == DEGREES else "rows of edges"
    return NAMES[name] if name < len(NAMES) else str(name - len(NAMES))


def partition_fingerprint(nodes: Rows) -> dict[str, Any]:
    """Returns the rank, the grid and a digest of the partition, of nodes of all types."""
    owners = nodes.partition
    owners = owners if owners is None or owners.union is None else owners.union
    digest = None if owners is None else owners.digest()
    return {
        "rank": nodes.mesh.rank,
        "grid": list(nodes.mesh.grid),
        "owners": digest,
    }


def codec_state(codec: Codec) -> dict[str, Any]:
    """Returns a codec as plain values.

    Raises:
        ValueError: for a codec that is not of this package.
    """
    kind = type(codec).__name__
    if isinstance(codec, codecs.Chain):
        return {"kind": kind, "codecs": [codec_state(one) for one in codec.inside]}
    if getattr(codecs, kind, None) is not type(codec):
        raise ValueError(f"{codec!r} is not one of the codecs that can be saved")
    fields = {}
    for one in dataclasses.fields(codec):  # type: ignore[arg-type]
        value = getattr(codec, one.name)
        fields[one.name] = codec_state(value) if isinstance(value, Codec) else value
    return {"kind": kind, **fields}


def read_codec(state: Mapping[str, Any]) -> Codec:
    """Returns the codec that `codec_state` saved."""
    if state["kind"] == "Chain":
        return codecs.Chain(*map(read_codec, state["codecs"]))
    fields = {
        name: read_codec(value) if isinstance(value, Mapping) else value
        for name, value in state.items()
        if name != "kind"
    }
    return getattr(codecs, state["kind"])(**fields)


def saved_buffer(buffer: StaleBuffer) -> dict[str, Any]:
    """Returns a buffer without pending messages as plain values and tensors."""
    assert buffer.shape is not None
    halo, width, dtype = buffer.shape
    ends = (halo.send_gid, halo.send_counts), (halo.ghost_gid, halo.recv_counts)
    return {
        "messages": [
            {
                "codec": codec_state(m.codec),
                "epoch": m.epoch,
                "key": m.key,
                "sizes": list(m.sizes),
                "raw": m.wait(),
            }
            for m in buffer.messages
        ],
        "mean": buffer.mean,
        "reference": buffer.reference,
        "since": buffer.since,
        "rows": _digests(*ends),
        "width": width,
        "dtype": dtype,
    }


def read_buffer(
    state: Mapping[str, Any], direction: Direction, where: str
) -> StaleBuffer:
    """Returns the buffer that was saved of an exchange.

    Raises:
        ValueError: if it holds other rows than those of this direction.
    """
    gid, counts = direction.from_gid, direction.from_counts
    if state["rows"] != _digests((direction.gid, direction.counts), (gid, counts)):
        raise ValueError(
            f"{where}: the late rows that were saved are not those that travel "
            "now; load them with the edges and halo they were saved with, or call "
            "link.reset() after loading"
        )

    def to_device(value: Any) -> Any:
        return None if value is None else value.to(gid.device)

    messages = [
        Message(
            read_codec(m["codec"]),
            m["epoch"],
            m["key"],
            direction,
            list(m["sizes"]),
            None,
            to_device(m["raw"]),
        )
        for m in state["messages"]
    ]
    return StaleBuffer(
        messages,
        to_device(state["mean"]),
        (None, state["width"], state["dtype"]),
        state["since"],
        to_device(state.get("reference")),  # older checkpoints have none
    )


def _digests(*ends: tuple[Any, tuple[int, ...]]) -> list[int]:
    """Returns digests of the rows of an exchange, the same for both directions."""
    return sorted(
        zlib.crc32(gid.cpu().numpy().tobytes(), zlib.crc32(str(tuple(counts)).encode()))
        for gid, counts in ends
    )

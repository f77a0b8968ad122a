"""Defines the codec, compression rate and staleness of the rows of a link, and its price."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.ledger import Short, format_table
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.comm.store import world_size
from pyg_distcomm.halo.codec import Codec
from pyg_distcomm.halo.codecs import (
    Cast,
    ColumnMask,
    DegreeBits,
    Plain,
    Quantise,
    RowSample,
    codec_of,
)
from pyg_distcomm.halo.exchange import (
    CallKey,
    ExchangeKey,
    LayerExchange,
    gradient_codec,
)
from pyg_distcomm.halo.halo import DEGREES, NAMES
from pyg_distcomm.halo.schedule import (
    Adaptive,
    Linear,
    LossTrend,
    Schedule,
    bits_of,
    with_bits,
)
from pyg_distcomm.halo.staleness import Drift, Timing
from pyg_distcomm.halo.state import ExchangeState, LayerState, LinkState, LinkUse


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


__all__ = ["LinkPolicy"]

_STATE_KEYS = frozenset(
    "epoch pace trend last active parts_of mark constant kept".split()
)


class LinkPolicy(LinkUse):
    """Defines how rows travel between ranks, and when they are used.

    Given to `pdc.partition(data, mesh, link=...)`, to `data.edge_index.with_link(...)`, to
    one layer or to `convert`, it applies to all products and exchanges of layers. Own rows
    never travel, fiber steps are exact and synchronous, and one rank ignores it. Call
    `link.step()` once per epoch; `print(link)` shows the exchanges and their bytes.

    Some exchanges are exact: those of an evaluation, unless `exact_eval=False`; of the
    first epoch, which is synchronous, and from then on its last exchange, unless
    `exact_last=False`; and of the product of constant inputs, where it is cached (see
    `DistEdgeIndex.with_ordering`).

    Price: `price()`, bytes of an epoch, forward and backward, as the ledger counts them.
    Ranks agree on one byte once in a training pass, and in each call of an evaluation or
    of a new layer: whether one evaluates. More would delay late exchanges.
    Memory: the exact link's, `price().kept` (see `StaleBuffer`), and at most the messages of
    one exchange; synchronous messages of a few bits take less than the exact link alone.
    Differs from [Cervino24], [Zhang23], [Wan22a] in that codec and timing are chosen
    independently, on any grid, and in exact evaluation.

    Args:
        codec: the codec of rows, or its name, as "bf16" (`codecs.known_codecs`).
        schedule: the compression ratio of each epoch, for a codec that has a rate.
        late: by how many epochs rows are late.
        late_gradients: by how many gradients are late; None is as late as rows.
        sync_every, warmup: which epochs are synchronous; see `Timing`.
        smooth, smooth_gradients: moving averages of late rows and gradients; see `Timing`.
        skip: skips exchanges of what has hardly changed; see `Drift`.
        exact_last: makes the last call exact, of layers that make more than one, and the
            first epoch.
        exact_eval: makes evaluation exact; otherwise it is coded, never late, and exact
            where `exact_last` makes training so, in all calls of that layer.
        adaptive: sets bits and timing by the loss; True is `Adaptive()`.
        seed: the seed of random columns, rows and rounding.

    Raises:
        ValueError: for arguments that contradict each other.
    """

    def __init__(
        self,
        codec: Codec | str,
        schedule: Schedule | None = None,
        *,
        late: int = 0,
        late_gradients: int | None = None,
        sync_every: int | None = None,
        smooth: float | None = None,
        smooth_gradients: float | None = None,
        warmup: int = 1,
        skip: Drift | None = None,
        exact_last: bool = True,
        exact_eval: bool = True,
        adaptive: bool | Adaptive = False,
        seed: int = 0,
    ) -> None:
        codec = codec_of(codec) if isinstance(codec, str) else codec
        if not isinstance(codec, Codec):
            raise TypeError(
                "codec must be a Codec, as Plain(), or its name, as 'bf16', got "
                f"{codec!r}"
            )
        if schedule is not None and not isinstance(schedule, Schedule):
            raise TypeError(
                f"schedule must be a Schedule, as Fixed(2), got {schedule!r}"
            )
        self.codec = codec
        means = smooth, smooth_gradients
        self.timing = timing = Timing(
            late, late_gradients, sync_every, *means, warmup, skip
        )
        self.is_exact = codec == Plain() and not timing.is_late
        self.lateness = timing.staleness(False), timing.staleness(True)
        self.skipping = timing.skips(False), timing.skips(True)
        self.exact_last, self.exact_eval, self.seed = exact_last, exact_eval, seed
        self.schedule = schedule
        rule = Adaptive() if adaptive is True else adaptive or None
        self.trend = None if rule is None else LossTrend(rule, bits_of(codec))
        if schedule is not None:
            codec.with_rate(1.0)  # raises for a codec without a rate
        self.epoch = 0
        self.state = LinkState()
        self._codecs_by_epoch: dict[int, Codec] = {}
        self._warned = False
        self._begin_epoch()

    def begin_pipeline(self, nodes: Rows) -> None:
        """Begins an epoch of a pipeline, on the ranks of all its stages; see `begin_chunk`.

        Raises:
            ValueError: for a link that skips, or needs in-degrees: chunks support neither.
        """
        if self.timing.skip or self.codec.ranked:
            raise ValueError(
                f"{self!r} skips exchanges or needs in-degrees, which chunks of a pipeline do "
                "not support; leave out skip, and use Quantise or RangeBits for DegreeBits"
            )
        if nodes.mesh.size > 1 and not self.is_exact:
            self.state.begin_pipeline(nodes, self.epoch)

    def begin_chunk(
        self, boundary: int, name: str, number: int, last: bool
    ) -> LayerExchange:
        """Returns the exchange of a chunk of rows in training; the link must not be exact.

        Args:
            boundary: the number of the layer boundary, counted over all stages.
            name: the name of its layer in messages.
            number: the number of the chunk.
            last: whether it is the last boundary.
        """
        self.state.layers.setdefault(boundary, LayerState(name)).name = name
        self.state.calls[boundary, number] = None
        call = self._layer_exchange((boundary, number), trains=True)
        return call.as_exact("the last one") if last and self.exact_last else call

    def _begin_epoch(self) -> None:
        """Decides what layers ask for in the epoch in progress."""
        self._codec = self.codec_at(self.epoch)
        self._synchronous = self.is_synchronous(self.epoch)

    def is_synchronous(self, epoch: int) -> bool:
        """Tells whether an epoch uses its own rows; with `adaptive` by the loss so far."""
        if epoch == 0 or self.timing.synchronous(epoch):
            return True
        return self.trend is not None and self.trend.synchronous

    def codec_at(self, epoch: int) -> Codec:
        """Returns the codec of an epoch: of rows, and of the gradients that answer them."""
        if epoch in self._codecs_by_epoch:
            return self._codecs_by_epoch[epoch]
        codec = self.codec
        if self.trend is not None:
            codec = with_bits(codec, self.trend.bits)
        if self.schedule is not None:
            codec = codec.with_rate(self.schedule.rate(epoch))
        if epoch == self.epoch:
            self._codecs_by_epoch[epoch] = codec
        return codec

    @property
    def settings(self) -> dict[str, str]:
        """The arguments and the epoch of the link, which must be the same on all ranks."""
        made = {
            "codec": self.codec,
            "schedule": self.schedule,
            "timing": self.timing,
            "exact_last": self.exact_last,
            "exact_eval": self.exact_eval,
            "adaptive": None if self.trend is None else self.trend.rule,
            "seed": self.seed,
            "epoch": self.epoch,
        }
        named = {f"link.{name}": repr(value) for name, value in made.items()}
        named = {"link": type(self).__name__, **named}
        return {k: re.sub(r" at 0x[0-9a-f]+", "", v) for k, v in named.items()}

    def step(self, metric: float | Tensor | None = None) -> None:
        """Ends an epoch; on all ranks, after the optimizer's step.

        Args:
            metric: the loss, for `adaptive` links; rank 0's counts.

        Raises:
            ValueError: if such a link gets no metric.
        """
        value = None if metric is None else float(torch.as_tensor(metric).detach())
        state, axis = self.state, self.state.axis
        if self.trend is not None:
            value = value if axis is None else collectives.broadcast_object(value, axis)
            if value is None or not math.isfinite(value):
                raise ValueError(
                    f"this link needs a finite loss: call link.step(loss), got {value}"
                )
            self.trend.step(value)
        self._warn_unused()
        state.end_epoch(self.exact_last)
        self.epoch += 1
        skip = self.timing.skip
        reach = self.timing.staleness(False) + self.timing.staleness(True) + 1
        reach += 0 if skip is None else 2 * skip.most
        for epoch in [e for e in self._codecs_by_epoch if e < self.epoch - reach]:
            del self._codecs_by_epoch[epoch]
        self._begin_epoch()

    def _warn_unused(self) -> None:
        """Warns once if no exchange of this or a later epoch is coded or late."""
        if self.is_exact or self._warned or world_size() == 1:
            return
        if told := self.state.why_unused(self.epoch):
            self._warned = True
            warnings.warn(f"{self!r} is configured but not used: {told}", stacklevel=3)

    def price(self, epoch: int | None = None) -> LinkPrice:
        """Returns the price of a training epoch on this rank, from the exchanges so far.

        Args:
            epoch: the epoch; by default the one in progress. Later epochs of an `adaptive`
                link are priced at the current bits.
        """
        epoch = self.epoch if epoch is None else epoch
        return LinkCostModel.of(self).price(epoch)

    def staleness(self, epoch: int | None = None) -> int:
        """Returns by how many epochs the oldest rows or gradients of an epoch are late.

        0 in synchronous epochs; with `skip` that of the last epoch that is over. For a
        learning rate that is divided by it, as in [Zhang16]:

            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1 / (1 + link.staleness()))

        whose `step()` comes after `link.step()`.

        Args:
            epoch: by default the one in progress.
        """
        epoch = self.epoch if epoch is None else epoch
        if self.timing.skip is not None:
            sent = [b.messages[-1].epoch for *_, b in self.state.buffers if b.messages]
            return max(self.epoch - 1 - min(sent, default=epoch), 0)
        model = LinkCostModel.of(self)
        ends = (model.oldest(epoch, self.timing.staleness(b)) for b in (False, True))
        return max(epoch - end for end in ends)

    @property
    def held(self) -> int:
        """The bytes of all buffers that are kept between epochs."""
        return sum(buffer.held for _, _, buffer in self.state.buffers)

    def drain(self) -> None:
        """Waits for pending messages."""
        for _, _, buffer in self.state.buffers:
            buffer.drain()

    def reset(self) -> None:
        """Drops late rows, so that the next exchanges are synchronous."""
        self.state.reset()

    def state_dict(self) -> dict[str, Any]:
        """Returns the progress of training, with the late rows of this rank.

        Save between epochs, after `step()`: a run that is saved within an epoch repeats it
        after a restart, and sends its rows twice; a warning is given.
        """
        trend = self.trend
        return {
            "epoch": self.epoch,
            "pace": None if self.schedule is None else repr(self.schedule),
            "trend": None if trend is None else trend.state_dict(),
            **self.state.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the progress of a link made with the same arguments.

        Late rows are used if each rank has its own, of the same partition,
        which is checked at the first use; otherwise all ranks drop them with a warning,
        and the next epoch is synchronous.

        Raises:
            ValueError: if a key is missing; nothing has changed then.
        """
        self.check_state(state)
        nodes = self.state.nodes
        self.state, self._codecs_by_epoch = LinkState.read(state), {}
        if self.trend is not None:
            self.trend.load_state_dict(state["trend"])
        self.epoch = int(state["epoch"])
        self.state.nodes = nodes
        self._begin_epoch()

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises a ValueError for a state that does not belong to such a link."""
        if _STATE_KEYS - state.keys():
            raise ValueError(
                f"the state of a link lacks {sorted(_STATE_KEYS - state.keys())}; give what "
                "link.state_dict() returned"
            )
        pairs = ("schedule", self.schedule, "pace"), ("adaptive", self.trend, "trend")
        for name, own, key in pairs:
            if (own is None) != (state[key] is None):
                raise ValueError(
                    f"only one of the saved link and this one has {name}; make this one with "
                    "the same arguments"
                )

    def __str__(self) -> str:
        """Returns a table of the exchanges so far, with their bytes in this epoch."""
        parts = [f"{self!r}"]
        if self.schedule is not None:
            rate = self.schedule.rate(self.epoch)
            parts.append(f"{self.schedule}, epoch {self.epoch}: rate {rate:.4g}")
        if self.state.exchanges:
            parts.append(f"{self.price()}")
        return "\n".join(parts)

    def __repr__(self) -> str:
        shown = [f"{self.codec}"]
        if self.timing.is_late:
            shown.append(f"{self.timing}")
        options = ("exact_last", "exact_eval")
        shown += [f"{name}=False" for name in options if not getattr(self, name)]
        return f"LinkPolicy({', '.join(shown)})"

    def __deepcopy__(self, memo: dict) -> LinkPolicy:
        return self  # copies of a layer share their link

    def __getstate__(self) -> dict[str, Any]:
        bound = {"state", "_codecs_by_epoch", "_warned"}
        return {k: v for k, v in self.__dict__.items() if k not in bound}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(
            state, state=LinkState(), _codecs_by_epoch={}, _warned=False
        )


def check_link(link: Any) -> None:
    """Raises TypeError for an object that cannot be a link."""
    if link is not None and not isinstance(link, LinkPolicy):
        raise TypeError(
            "link must be a LinkPolicy, such as pdc.Sylvie(), pdc.VARCO(epochs) or "
            f"pdc.LinkPolicy('bf16'), or None for the exact one, got {link!r}; links by "
            "relation are for a HeteroData"
        )


def settings_of(link: LinkPolicy | None) -> dict[str, str]:
    """Returns the settings of a link by name, which must be the same on all ranks."""
    return {"link": "exact"} if link is None else link.settings


_PICKS = {"random": "epoch", "prefix": "prefix"}


def VARCO(
    epochs: int,
    c_max: float = 128.0,
    c_min: float = 1.0,
    slope: float = 5.0,
    mask: str = "random",
    *,
    scaled: bool = False,
    schedule: Schedule | None = None,
    exact_last: bool = True,
    exact_eval: bool = True,
    seed: int = 0,
) -> LinkPolicy:
    """Returns a link that sends a growing share of the columns ([Cervino24]).

    The defaults are one setting for all graphs; `docs/papers/varco.md` says how it was found.
    The authors' scripts have the same slope, and end at c_min=1.5.

    Args:
        epochs: the number of epochs: `link.step()` once each.
        c_max, c_min: the first and the last compression ratio.
        slope: how often the ramp would fit in all epochs; the ratio reaches c_min after
            1/slope of them. 5 saves a fifth of the columns; 1 saves more than three
            quarters, and loses accuracy on some graphs.
        mask: "random" columns as in the paper, or the "prefix" of columns as in its scripts.
        scaled: scales received columns, which makes them unbiased.
        schedule: another schedule than the paper's, which is linear in c; it has bounds of
            its own, so leave out c_max, c_min and slope.
        exact_last, exact_eval, seed: see `LinkPolicy`.
    """
    if schedule is not None and (c_max, c_min, slope) != (128.0, 1.0, 5.0):
        raise ValueError(
            f"{schedule!r} has ratios of its own; give c_max, c_min and slope to it, not to "
            f"VARCO as well, which got {c_max}, {c_min} and {slope}"
        )
    if mask not in _PICKS:
        raise ValueError(f"mask must be one of {', '.join(_PICKS)}, got {mask!r}")
    if schedule is None:
        schedule = Linear(epochs, c_max, c_min, slope)
    return LinkPolicy(
        ColumnMask(c_max, _PICKS[mask], scaled=scaled),
        schedule,
        exact_last=exact_last,
        exact_eval=exact_eval,
        seed=seed,
    )


def Sylvie(
    bits: int = 1,
    late: int = 1,
    sync_every: int | None = None,
    adaptive: bool | Adaptive = False,
    *,
    by_degree: bool = False,
    late_gradients: int | None = None,
    warmup: int = 1,
    exact_last: bool = True,
    exact_eval: bool = True,
    seed: int = 0,
) -> LinkPolicy:
    """Returns a link that sends a few bits per number, one epoch late ([Zhang23]).

    Args:
        bits: 1, 2, 4 or 8; 16 is bf16, and 32 sends numbers unchanged.
        late: 1 is Sylvie-A, 0 is Sylvie-S.
        sync_every: the period of synchronous epochs: its staleness adaptor.
        adaptive: sets bits and timing by the loss, as the later Sylvie; give the loss to
            `link.step(loss)`.
        by_degree: gives rows of nodes with more in-edges more bits, from `bits` to 8, as
            the later Sylvie; see `DegreeBits`.
        late_gradients: 0 sends gradients promptly; None is as late as rows.
        warmup: how many epochs are synchronous at first.
        exact_last, exact_eval, seed: see `LinkPolicy`.
    """
    wide: dict[int, Codec] = {16: Cast(torch.bfloat16), 32: Plain()}
    few = DegreeBits(bits) if by_degree else wide.get(bits)
    return LinkPolicy(
        few or Quantise(bits, "stochastic"),
        late=late,
        late_gradients=late_gradients,
        sync_every=sync_every,
        warmup=warmup,
        adaptive=adaptive,
        exact_last=exact_last,
        exact_eval=exact_eval,
        seed=seed,
    )


def PipeGCN(
    smooth: float | None = None,
    smooth_gradients: float | None = None,
    *,
    late_gradients: int = 1,
    warmup: int = 1,
    exact_last: bool = True,
    exact_eval: bool = True,
) -> LinkPolicy:
    """Returns a link that sends unchanged rows, one epoch late ([Wan22a]).

    Args:
        smooth: the momentum of a moving average of late rows; 0.95 in the paper.
        smooth_gradients: that of late gradients; None is that of rows, 0 is none.
        late_gradients: 0 sends gradients promptly.
        warmup: how many epochs are synchronous at first.
        exact_last, exact_eval: see `LinkPolicy`.
    """
    return LinkPolicy(
        Plain(),
        late=1,
        late_gradients=late_gradients,
        smooth=smooth,
        smooth_gradients=smooth_gradients,
        warmup=warmup,
        exact_last=exact_last,
        exact_eval=exact_eval,
    )


def BNS(
    p: float,
    *,
    scaled: bool = True,
    exact_last: bool = True,
    exact_eval: bool = True,
    seed: int = 0,
) -> LinkPolicy:
    """Returns a link that samples rows of the boundary in each epoch ([Wan22]).

    Args:
        p: the share of rows that is sent, in (0, 1].
        scaled: scales received rows, which makes sums unbiased.
        exact_last, exact_eval, seed: see `LinkPolicy`.
    """
    if not 0.0 < p <= 1.0:
        raise ValueError(f"p is a share in (0, 1], got {p!r}")
    return LinkPolicy(
        RowSample(1 / p, scaled),
        exact_last=exact_last,
        exact_eval=exact_eval,
        seed=seed,
    )


def SANCUS(
    bound: float = 0.1,
    most: int = 4,
    bits: int = 32,
    *,
    gradients: float | None = None,
    exact_last: bool = True,
    exact_eval: bool = True,
    seed: int = 0,
) -> LinkPolicy:
    """Returns a link that sends rows again once they have drifted ([Peng22]).

    Args:
        bound, most, gradients: the drift that is not sent, how many epochs old rows may
            get, and the bound of gradients; see `Drift`.
        bits: 32 sends numbers unchanged; fewer as in `Sylvie`, as SANCUS-q does.
        exact_last, exact_eval, seed: see `LinkPolicy`.
    """
    codec = Plain() if bits == 32 else Quantise(bits, "stochastic")
    return LinkPolicy(
        codec,
        skip=Drift(bound, most, gradients),
        exact_last=exact_last,
        exact_eval=exact_eval,
        seed=seed,
    )

"""Defines how the rows of a link travel, by codec, rate and staleness, and what it keeps."""

from __future__ import annotations

import contextlib
import copy
import math
import re
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.collectives import Axis
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.comm.store import world_size
from pyg_distcomm.halo.codec import Codec, Load, RngKey
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
    Packing,
    StaleBuffer,
)
from pyg_distcomm.halo.halo import Direction, Halo
from pyg_distcomm.halo.schedule import (
    Adaptive,
    Linear,
    LossTrend,
    Schedule,
    bits_of,
    with_bits,
)
from pyg_distcomm.halo.staleness import Drift, Timing
from pyg_distcomm.halo.state import (
    ExchangeState,
    Forecast,
    LayerState,
    LinkPrice,
    partition_fingerprint,
    read_buffer,
    saved_buffer,
)

# modes of a call of a layer; the greatest of any rank holds on all ranks
TRAINS, EVALUATES, RECOMPUTES, REPEATS = range(4)
MODES = 64  # digests of the layers' modes, sent in the same byte
MIXED = (
    "begins a pass in which some layers train on some ranks and evaluate on others; call "
    "model.train() or model.eval() on all ranks alike"
)
PROBLEMS = {
    RECOMPUTES: (
        "was computed again in the backward pass (activation checkpointing), where an "
        "exchange that is coded or late would travel twice; leave the layer out of the "
        "checkpoint, or give it link='exact'"
    ),
    REPEATS: (
        "runs again after its backward pass, in the same epoch of its link; call "
        "link.step() once per epoch, after the optimizer's step"
    ),
}


@dataclass(eq=False)
class LinkState:
    """Holds the state of a link policy since it was made."""

    nodes: Rows | None = None  # the partition of nodes, once the link is in use
    # the numbers of layers, in the order of their first use in training
    numbers: Any = field(default_factory=weakref.WeakKeyDictionary)
    # the provisional numbers of layers that were evaluated, but not trained yet
    guests: Any = field(default_factory=weakref.WeakKeyDictionary)
    layers: dict[int, LayerState] = field(default_factory=dict)
    exchanges: dict[ExchangeKey, ExchangeState] = field(default_factory=dict)
    calls: dict[CallKey, None] = field(default_factory=dict)  # of this epoch, in order
    active: tuple[CallKey, ...] = ()  # the calls of the last epoch
    last: CallKey | None = None  # the call that is exact
    evaluates: bool = False  # whether ranks agreed at the last call that one evaluates
    pipeline_epoch: int | None = None  # the latest of a pipeline that uses it by chunks
    # layers whose inputs had been seen before the run was restored
    constant: set[int] = field(default_factory=set)
    # directions with in-degrees, by halo; for codecs that are `ranked`
    degrees: Any = field(default_factory=weakref.WeakKeyDictionary)
    # restored buffers that have not been used yet
    saved: dict[tuple[ExchangeKey, bool], Any] = field(default_factory=dict)
    mark: Mapping[str, Any] | None = None  # theirs: see `partition_fingerprint`
    restored: bool = False  # whether it was restored, and nothing has run since

    def bind(self, nodes: Rows) -> None:
        """Binds the link to a mesh, and checks restored buffers; collective.

        Raises:
            ValueError: if it is bound to another mesh.
        """
        if self.nodes is None:
            self.nodes = nodes
        if self.nodes.mesh is not nodes.mesh:
            raise ValueError(
                f"this link is in use on {self.nodes.mesh}, and now on {nodes.mesh}; make "
                "one for each"
            )
        if not self.restored:
            return
        self.restored = False
        wrong = torch.tensor(
            [bool(self.saved) and self.mark != partition_fingerprint(nodes)]
        )
        wrong = collectives.all_reduce(wrong.to(torch.uint8), nodes.mesh.world, "max")
        if wrong and self.saved:
            self.saved = {}
            warnings.warn(
                "the late rows of this link were saved by another rank, or on "
                "another number of ranks or another partition, and are dropped: the next "
                "epoch is synchronous",
                stacklevel=2,
            )

    @property
    def in_pipeline(self) -> bool:
        """Whether a pipeline uses the link."""
        return self.pipeline_epoch is not None

    @property
    def axis(self) -> Axis | None:
        """The ranks that use the link, in all pipeline stages; None before its first use."""
        if self.nodes is None:
            return None
        mesh = self.nodes.mesh
        return mesh.everyone if self.in_pipeline else mesh.world

    @property
    def buffers(self) -> list[tuple[ExchangeKey, bool, StaleBuffer]]:
        """All buffers in use, each with its exchange, and whether gradients are in it."""
        return [
            (key, bool(backward), buffer)
            for key, exchange in self.exchanges.items()
            for backward, buffer in enumerate(exchange.buffers)
            if buffer.shape is not None
        ]

    def number_of(self, layer: Any, trains: bool, name: str = "") -> int:
        """Returns the number of a layer; a provisional one if it does not train yet.

        Provisional numbers assume that layers train in the order in which they are evaluated.
        After a restart as many layers are expected as before; further ones belong to another
        copy of the model.
        """
        if trains:
            if layer not in self.numbers:
                self.guests.clear()
            number = self.numbers.setdefault(layer, len(self.layers))
            state = self.layers.setdefault(number, LayerState(""))
            state.name, state.used = name or type(layer).__name__, True
            return number
        if layer not in self.numbers and layer not in self.guests:
            before = {number for number, _ in self.active} | self.constant
            if not self.layers and len(self.guests) == max(before, default=-1) + 1:
                self.guests.clear()
            self.guests[layer] = len(self.layers) + len(self.guests)
        return (self.numbers if layer in self.numbers else self.guests)[layer]

    def agree_on_mode(self, layer: Any, training: bool) -> int:
        """Returns the mode of a call on all ranks; collective, except within a pass.

        Raises:
            ValueError: if other layers of the last epoch train here and elsewhere do not.
        """
        number = self.numbers.get(layer)
        mode = self._mode(number, training)
        known = number in self.layers and self.layers[number].first is not None
        first = next(iter(self.calls), (number, 0))[0]
        if mode == TRAINS and known and not (number == first or self.evaluates):
            return mode  # the mode of the first call of this pass
        assert self.nodes is not None
        digest = self._digest(number)
        packed = torch.tensor([mode * MODES + digest], dtype=torch.uint8)
        packed = collectives.all_reduce(packed, self.nodes.mesh.data, "max")
        mode, most = divmod(int(packed), MODES)
        self.evaluates = mode == EVALUATES
        if mode == TRAINS and digest != most:  # at least one rank differs, and raises
            with self.guard():
                number = self.number_of(layer, trains=False)
                raise ValueError(f"{self.layer_name(number)} {MIXED}")
        return mode

    def _mode(self, number: int | None, training: bool) -> int:
        if torch._C._current_graph_task_id() != -1:
            return RECOMPUTES
        if not training:
            return EVALUATES
        every = self.exchanges.items()
        repeats = any(one.answered and key.layer == number for key, one in every)
        return REPEATS if repeats else TRAINS

    def _digest(self, number: int | None) -> int:
        """Returns a digest of the layers that evaluate, 0 for a layer not in use."""
        used = {other for other, _ in self.active}
        if number not in used:  # layers are garbage-collected at different times
            return 0
        every = self.numbers.items()
        modes = {at for layer, at in every if not getattr(layer, "training", True)}
        return zlib.crc32(repr(sorted(modes & used)).encode()) % MODES

    def layer_name(self, number: int) -> str:
        """Returns the name of a layer in error messages."""
        layer = self.layers.get(number)
        return f"layer {number} ({layer.name if layer else 'not trained yet'})"

    def record_exchange(
        self, key: ExchangeKey, backward: bool, load: Load, exact_reason: str
    ) -> None:
        """Records that an exchange takes place."""
        if key not in self.exchanges:
            name = self.layers[key.layer].name
            self.exchanges[key] = ExchangeState(name, exact_reason)
        exchange = self.exchanges[key]
        exchange.answered = exchange.answered or backward
        exchange.loads[backward] = load

    def buffer(
        self,
        key: ExchangeKey,
        backward: bool,
        direction: Direction,
        halo: Halo,
        rows: Tensor,
    ) -> StaleBuffer:
        """Returns the buffer of an exchange in one direction, restored if it was saved."""
        buffers = self.exchanges[key].buffers
        if (key, backward) in self.saved:
            saved = self.saved.pop((key, backward))
            buffers[backward] = read_buffer(
                saved, direction, self.layer_name(key.layer)
            )
        buffers[backward].bind(halo, rows.size(1), rows.dtype)
        return buffers[backward]

    def plan(
        self,
        key: ExchangeKey,
        codec: Codec,
        direction: Direction,
        x: Tensor,
        draw: RngKey,
    ) -> Packing:
        """Returns the plan of the messages of rows like `x`, the known one if it fits.

        It is kept with the direction, so that it ends with its halo.
        """
        exchange = self.exchanges.get(key)
        kept = direction.plans
        known = None if exchange is None else kept.get(exchange)
        if known is None or not known.fits(codec, direction, x):
            of = direction.counts, draw, direction.index, direction
            known = Packing.of(codec, x, *of)
            if exchange is not None:
                kept[exchange] = known
        return known

    @property
    def constants(self) -> list[int]:
        """The layers with constant inputs, whose products are cached."""
        seen = {
            number
            for number, layer in self.layers.items()
            if layer.input_stage
            or (layer.stage is None and layer.cached_at is not None)
        }
        return sorted(seen | self.constant)

    def why_unused(self, epoch: int) -> str:
        """Returns why no exchange is coded or late from this epoch on; "" if one may be."""
        if self.in_pipeline or (self.nodes is not None and self.nodes.mesh.size == 1):
            return ""
        if not self.layers:
            return (
                "no layer has trained with it. Give it to pdc.partition(data, mesh, "
                "link=link), "
                "data.edge_index.with_link(link), pdc.convert(model, link) or a layer"
            )
        # by the third epoch the last call is known, and constant products are cached
        trained = any(layer.used for layer in self.layers.values())
        if epoch < 2 or not trained or any(call != self.last for call in self.calls):
            return ""
        return (
            "all exchanges are exact: the product of constant inputs is kept, and the last "
            "exchange is exact by default. Have it coded by exact_last=False, take one layer "
            "more, or give dropout to the inputs"
        )

    def end_epoch(self, exact_last: bool) -> None:
        """Ends an epoch: finds the last call in the first, and drops unused buffers."""
        used = sum(layer.used for layer in self.layers.values())
        many = max(len(self.calls), used) > 1 and not self.in_pipeline
        self.active = tuple(self.calls)
        if exact_last and self.last is None and self.calls and many:
            self.last = self.active[-1]
            for key, exchange in self.exchanges.items():
                if key[:2] == self.last:
                    exchange.exact_reason = "the last one"
        alive = {call for call in self.active if call != self.last}
        for key, exchange in self.exchanges.items():
            if key[:2] in alive and not exchange.answered:
                exchange.loads[True] = None  # gradients of frozen layers
        self.drop(
            lambda key, backward: (
                key[:2] not in alive or (backward and not self.exchanges[key].answered)
            )
        )
        cached = {n for n, one in self.layers.items() if one.cached_at is not None}
        unused = {key.layer for key, _ in self.saved} - cached - self.constant
        # a stage restores all layers
        if unused and self.calls and not self.in_pipeline:
            warnings.warn(
                f"the late rows saved of layers {sorted(unused)}, in the order "
                "of their first use, are dropped: the first epoch did not use them; run the "
                "layers in the order in which they ran before",
                stacklevel=3,
            )
        self.saved, self.calls = {}, {}
        for layer in self.layers.values():
            layer.used = False
        for exchange in self.exchanges.values():
            exchange.answered = False

    def reset(self) -> None:
        """Drops late rows, also restored ones, without waiting for them."""
        for exchange in self.exchanges.values():
            exchange.buffers = [StaleBuffer(), StaleBuffer()]
        self.saved = {}

    def drop(self, chosen: Callable[[ExchangeKey, bool], bool]) -> None:
        """Drops buffers, once their messages have arrived."""
        for key, backward, buffer in self.buffers:
            if chosen(key, backward):
                buffer.drain()
                self.exchanges[key].buffers[backward] = StaleBuffer()

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Drops all buffers if an exchange fails, and reports the failure to all ranks.

        Buffers may be partly updated, and other ranks wait for rows that are not sent.
        """
        try:
            yield
        except BaseException as error:
            self.reset()
            watch = None if self.nodes is None else self.nodes.mesh.world.watch
            if watch is not None:
                watch.report(error)
            raise

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of this rank as plain values and tensors."""
        if any(exchange.answered for exchange in self.exchanges.values()):
            warnings.warn(
                "this link is saved between the backward pass of an epoch and link.step(): "
                "a run restored from it repeats that epoch; save after link.step()",
                stacklevel=3,
            )
        nodes = self.nodes
        for _, _, buffer in self.buffers:
            buffer.drain()
        saved = [
            {"of": [*key, backward], **saved_buffer(buffer)}
            for key, backward, buffer in self.buffers
        ]
        return {
            "last": self.last,
            "active": self.active,
            "parts_of": self.pipeline_epoch,
            "mark": self.mark
            if nodes is None or self.restored
            else partition_fingerprint(nodes),
            "constant": self.constants,
            "kept": [*saved, *map(dict, self.saved.values())],
        }

    @staticmethod
    def read(state: Mapping[str, Any]) -> LinkState:
        """Returns the state that `state_dict` saved."""
        last = None if state["last"] is None else tuple(state["last"])
        active = tuple((layer, number) for layer, number in state["active"])
        read = LinkState(mark=state["mark"], restored=True, active=active, last=last)
        read.pipeline_epoch = state["parts_of"]
        read.constant = {int(number) for number in state["constant"]}
        for one in state["kept"]:
            *key, backward = one["of"]
            read.saved[ExchangeKey(*key), bool(backward)] = copy.deepcopy(one)
        return read


__all__ = ["LinkPolicy"]

_STATE_KEYS = frozenset(
    "epoch pace trend last active parts_of mark constant kept".split()
)


class LinkPolicy:
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

    def is_used_on(self, mesh: Any) -> bool:
        """Tells whether layers on a mesh use codecs or late rows."""
        return mesh.size > 1 and not self.is_exact

    def check_ranked(self, nodes: Rows, degrees: Callable[[], Tensor] | None) -> None:
        """Raises a ValueError if a codec needs in-degrees that are not available."""
        if not self.codec.ranked:
            return
        if nodes.mesh.grid[1:] != (1, 1):
            raise ValueError(
                f"{self!r} needs in-degrees of own nodes, on grids (P, 1, 1), but the mesh "
                f"is {nodes.mesh.grid}; use pdc.init('1d'), or RangeBits"
            )
        if degrees is None:
            raise ValueError(
                f"{self!r} needs in-degrees, but edges between two types of nodes have none "
                "for their sources; use RangeBits or Quantise"
            )

    def begin(
        self,
        layer: Any,
        nodes: Rows,
        training: bool,
        stage: Callable[[], int] | None = None,
        name: str = "",
        degrees: Callable[[], Tensor] | None = None,
    ) -> LayerExchange | None:
        """Returns one call of a layer, or None if it is exact; collective.

        Args:
            layer: the layer.
            nodes: the partition of nodes.
            training: whether the layer trains.
            stage: returns the caching stage of its input; see `ProductCache.stage`.
            name: its name in error messages; by default its class.
            degrees: returns the in-degrees of own nodes `[n]`; None if unknown.
        """
        state = self.state
        if not self.is_used_on(nodes.mesh):
            return None
        self.check_ranked(nodes, degrees)
        state.bind(nodes)
        mode = state.agree_on_mode(layer, training and torch.is_grad_enabled())
        if mode == EVALUATES:
            number = state.number_of(layer, trains=False)
            if self.exact_eval or (state.last or (-1,))[0] == number:
                return None
            return self._layer_exchange((number, 0), trains=False, degrees=degrees)
        state.nodes = nodes  # may be those of an updated graph
        number = state.number_of(layer, True, name)
        if mode in PROBLEMS:
            raise ValueError(f"{state.layer_name(number)} {PROBLEMS[mode]}")
        used = state.layers[number]
        used.first = self.epoch if used.first is None else used.first
        used.last, used.stage = self.epoch, stage or used.stage
        call = number, sum(1 for other, _ in state.calls if other == number)
        state.calls[call] = None
        exchange = self._layer_exchange(call, trains=True, degrees=degrees)
        return exchange.as_exact("the last one") if call == state.last else exchange

    def _layer_exchange(
        self,
        call: CallKey,
        *,
        trains: bool,
        degrees: Callable[[], Tensor] | None = None,
    ) -> LayerExchange:
        first = self.exact_last and self.epoch == 0 and trains
        return LayerExchange(
            self,
            call,
            self.epoch,
            Plain() if first else self._codec,
            synchronous=not trains or self._synchronous,
            trains=trains,
            degrees=degrees,
        )

    def note_cached(self, layer: Any, nodes: Rows, trains: bool) -> None:
        """Records that a layer's product is computed exactly, in order to be cached."""
        if nodes.mesh.size == 1:
            return
        state, number = self.state, self.state.number_of(layer, trains)
        known = state.layers.get(number)
        if trains and known is not None:
            known.cached_at = self.epoch
            state.constant.discard(number)
        if trains or (known is not None and known.input_stage):
            state.drop(lambda key, _: key.layer == number)

    def was_constant(self, layer: Any, trains: bool) -> bool:
        """Tells whether a layer's input was known to be constant before a restart."""
        return self.state.number_of(layer, trains) in self.state.constant

    def begin_pipeline(self, nodes: Rows) -> None:
        """Begins an epoch of a pipeline, on the ranks of all its stages; see `begin_chunk`.

        Collective over a stage at first.

        Raises:
            ValueError: for a link that skips, or needs in-degrees: chunks support neither; and
                if the epoch has begun already.
        """
        if self.timing.skip or self.codec.ranked:
            raise ValueError(
                f"{self!r} skips exchanges or needs in-degrees, which chunks of a pipeline do "
                "not support; leave out skip, and use Quantise or RangeBits for DegreeBits"
            )
        if nodes.mesh.size > 1 and not self.is_exact:
            self.state.bind(nodes)
            if self.state.pipeline_epoch == self.epoch:
                raise ValueError(f"a pipeline {PROBLEMS[REPEATS]}")
            self.state.pipeline_epoch = self.epoch

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

    def oldest(self, epoch: int, late: int, since: int = 0) -> int:
        """Returns the oldest epoch whose rows are used in `epoch`, at least `since`."""
        window = range(epoch, max(epoch - late, -1), -1)
        synchronous = (e for e in window if self.is_synchronous(e))
        return next(synchronous, max(since, epoch - late))

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
        quiet = self.is_exact or self._warned or world_size() == 1
        if not quiet and (told := state.why_unused(self.epoch)):
            self._warned = True
            warnings.warn(f"{self!r} is configured but not used: {told}", stacklevel=2)
        state.end_epoch(self.exact_last)
        self.epoch += 1
        skip = self.timing.skip
        reach = self.timing.staleness(False) + self.timing.staleness(True) + 1
        reach += 0 if skip is None else 2 * skip.most
        for epoch in [e for e in self._codecs_by_epoch if e < self.epoch - reach]:
            del self._codecs_by_epoch[epoch]
        self._begin_epoch()

    def price(self, epoch: int | None = None) -> LinkPrice:
        """Returns the price of a training epoch on this rank, from the exchanges so far.

        Args:
            epoch: the epoch; by default the one in progress. Later epochs of an `adaptive`
                link are priced at the current bits.
        """
        epoch = self.epoch if epoch is None else epoch
        return Forecast(self, epoch).price()

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
        return max(epoch - self.oldest(epoch, late) for late in self.lateness)

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

"""Holds, and saves, the state of a link policy in training: layers, exchanges, late rows."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
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
from pyg_distcomm.halo import codecs
from pyg_distcomm.halo.codec import Codec, Load, RngKey
from pyg_distcomm.halo.codecs import Plain
from pyg_distcomm.halo.exchange import (
    CallKey,
    ExchangeKey,
    LayerExchange,
    Message,
    Packing,
    StaleBuffer,
)
from pyg_distcomm.halo.halo import Direction, Halo
from pyg_distcomm.halo.staleness import Timing

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
class ExchangeState:
    """Holds the state of one exchange of a layer; pairs are (forward, backward).

    Args:
        layer: the layer's name.
        exact_reason: why its rows are always exact and synchronous; "" if they are not.
        loads: the rows it receives; None for a direction without an exchange so far.
        sent_rows: how many rows it sends.
        buffers: its buffered messages.
        answered: whether it had a backward pass in this epoch.
    """

    layer: str
    exact_reason: str = ""
    loads: list[Load | None] = field(default_factory=lambda: [None, None])
    sent_rows: list[int] = field(default_factory=lambda: [0, 0])
    buffers: list[StaleBuffer | None] = field(default_factory=lambda: [None, None])
    answered: bool = False

    def drop(self, backward: bool) -> None:
        """Drops a buffer, once its messages have arrived."""
        buffer = self.buffers[backward]
        if buffer is not None:
            buffer.drain()
        self.buffers[backward] = None


@dataclass(eq=False)
class LayerState:
    """Holds the state of a layer that trains with the link.

    Args:
        name: its name in error messages.
        stage: returns `ProductCache.stage` of its input in training; inputs of an
            evaluation may differ.
        first, last: the epochs in which it first and last trained with the link.
        cached_at: the epoch in which its product was computed to be cached.
        used: whether it has trained in this epoch, be it with a cached product.
    """

    name: str
    stage: Callable[[], int] | None = None
    first: int | None = None
    last: int | None = None
    cached_at: int | None = None
    used: bool = False

    @property
    def input_stage(self) -> int:
        """Whether its input was seen (1), or its product is cached (2); 0 if neither.

        An input that is not used again in the next epoch no longer counts as seen.
        """
        if self.stage is None:
            return 0
        stage, lasts = self.stage(), self.first == self.last
        return stage if stage != 1 or lasts else 0


@dataclass(eq=False)
class LinkState:
    """Holds the state of a link policy since it was made.

    Args:
        nodes: the partition of nodes, once the link is in use.
        numbers: the numbers of layers, in the order of their first use in training.
        guests: the provisional numbers of layers that were evaluated, but not trained yet.
        layers: the state of each layer.
        exchanges: the state of each exchange.
        calls: calls of this epoch, in order.
        active: calls of the last epoch.
        last: the call that is exact.
        evaluates: whether ranks agreed at the last call that one of them evaluates.
        pipeline_epoch: the latest epoch of a pipeline that uses the link by chunks.
        constant: layers whose inputs had been seen before the run was restored.
        degrees: directions with in-degrees, by halo; for codecs that are `ranked`.
        saved: restored buffers that have not been used yet.
        mark: the rank and partition of restored buffers; see `partition_fingerprint`.
        restored: whether it was restored, and nothing has run since.
    """

    nodes: Rows | None = None
    numbers: Any = field(default_factory=weakref.WeakKeyDictionary)
    guests: Any = field(default_factory=weakref.WeakKeyDictionary)
    layers: dict[int, LayerState] = field(default_factory=dict)
    exchanges: dict[ExchangeKey, ExchangeState] = field(default_factory=dict)
    calls: dict[CallKey, None] = field(default_factory=dict)
    active: tuple[CallKey, ...] = ()
    last: CallKey | None = None
    evaluates: bool = False
    pipeline_epoch: int | None = None
    constant: set[int] = field(default_factory=set)
    degrees: Any = field(default_factory=weakref.WeakKeyDictionary)
    saved: dict[tuple[ExchangeKey, bool], Mapping[str, Any]] = field(
        default_factory=dict
    )
    mark: Mapping[str, Any] | None = None
    restored: bool = False

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
        """All buffers, each with its exchange and whether it is of the backward pass."""
        return [
            (key, backward, buffer)
            for key, exchange in self.exchanges.items()
            for backward in (False, True)
            if (buffer := exchange.buffers[backward]) is not None
        ]

    def begin_pipeline(self, nodes: Rows, epoch: int) -> None:
        """Begins an epoch of a pipeline; collective over its stage at first.

        Raises:
            ValueError: if the epoch has begun already.
        """
        self.bind(nodes)
        if self.pipeline_epoch == epoch:
            raise ValueError(f"a pipeline {PROBLEMS[REPEATS]}")
        self.pipeline_epoch = epoch

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

    def next_call(self, number: int) -> CallKey:
        """Counts one more call of a layer in this epoch, and returns its key."""
        call = number, sum(1 for other, _ in self.calls if other == number)
        self.calls[call] = None
        return call

    def record_exchange(
        self, key: ExchangeKey, backward: bool, load: Load, sent: int, exact_reason: str
    ) -> None:
        """Records that an exchange takes place."""
        if key not in self.exchanges:
            name = self.layers[key.layer].name
            self.exchanges[key] = ExchangeState(name, exact_reason)
        exchange = self.exchanges[key]
        exchange.answered = exchange.answered or backward
        exchange.loads[backward], exchange.sent_rows[backward] = load, sent

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
        buffer = buffers[backward] or StaleBuffer()
        buffers[backward] = buffer
        buffer.bind(halo, rows.size(1), rows.dtype)
        return buffer

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

    def record_cached(self, layer: Any, epoch: int | None) -> None:
        """Records that a layer's product is cached; `epoch` is None outside training."""
        number = self.number_of(layer, trains=epoch is not None)
        state = self.layers.get(number)
        if epoch is not None and state is not None:
            state.cached_at = epoch
            self.constant.discard(number)
        if epoch is not None or (state is not None and state.input_stage):
            self._drop(lambda key, _: key.layer == number)

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
        alive = {call for call in self.active if call != self.last}
        for key, exchange in self.exchanges.items():
            if key[:2] in alive and not exchange.answered:
                exchange.loads[True] = None  # gradients of frozen layers
        self._drop(
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
            exchange.buffers = [None, None]
        self.saved = {}

    def _drop(self, chosen: Callable[[ExchangeKey, bool], bool]) -> None:
        for key, backward, _ in self.buffers:
            if chosen(key, backward):
                self.exchanges[key].drop(backward)

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


class LinkUse:
    """Answers the layers that exchange rows by a link; `LinkPolicy` adds what scripts call.

    Args:
        codec, exact_last, exact_eval, seed: as of `LinkPolicy`.
        timing: the epochs in which rows are used.
        lateness: by how many epochs rows are late, and gradients.
        skipping: whether exchanges of rows may be skipped, and of gradients.
        is_exact: whether it is the exact link: unchanged rows of this epoch.
        epoch: the epoch in progress.
        state: what it holds from epoch to epoch.
    """

    codec: Codec
    timing: Timing
    exact_last: bool
    exact_eval: bool
    seed: int
    epoch: int
    is_exact: bool
    state: LinkState
    _codec: Codec  # of this epoch
    _synchronous: bool  # whether this epoch uses its own rows
    lateness: tuple[int, int]
    skipping: tuple[bool, bool]

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
        call = state.next_call(number)
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
        if nodes.mesh.size > 1:
            self.state.record_cached(layer, self.epoch if trains else None)

    def was_constant(self, layer: Any, trains: bool) -> bool:
        """Tells whether a layer's input was known to be constant before a restart."""
        return self.state.number_of(layer, trains) in self.state.constant


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

"""Run: what a link knows of a training run: its layers, their exchanges, what they keep."""

from __future__ import annotations

import contextlib
import copy
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.collectives import Axis
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.halo.compressed import Direction
from pyg_distcomm.halo.cost_model import CallKey, InboxKey
from pyg_distcomm.halo.link_cost import Load, Record, RecordKey
from pyg_distcomm.halo.staleness import StaleBuffer
from pyg_distcomm.halo.state_io import check_rows, mark, read_inbox, saved_inbox
from pyg_distcomm.halo.validation import (
    EVALUATES,
    MIXED,
    MODES,
    PROBLEMS,
    RECOMPUTES,
    REPEATS,
    TRAINS,
)


@dataclass(eq=False)
class LinkState:
    """What a link has seen since it was made.

    Args:
        nodes: which nodes are where, once it is in use.
        places: of layers, in the order of their first use in training.
        guests: those that were evaluated and not trained yet, likewise.
        layers: what they are called.
        stages: how to ask whether their inputs are kept; see `ProductCache.stage`. Inputs of
            training: without dropout those of an evaluation may be others.
        began: in which epoch they were first trained by a link, and in which last.
        kept_at: in which epoch a product was made to be kept.
        records: the exchanges seen.
        inboxes: what they keep.
        saved: what they will keep, where it was restored and not used yet.
        mark: whose rows were saved, and of which partition; see `mark`.
        restored: whether it was restored, and nothing has run since.
        made: calls of this epoch, in order.
        active: calls of the last epoch.
        last: the call that is exact.
        met: layers that training has come to in this epoch, those with a kept product too.
        answered: exchanges that have had a backward pass in this epoch.
        evaluates: whether ranks last agreed that one of them evaluates.
        parts_of: the epoch that a pipeline began last, which uses it chunk by chunk.
        constant: layers whose inputs had been seen before the run was restored.
    """

    nodes: Rows | None = None
    places: Any = field(default_factory=weakref.WeakKeyDictionary)
    guests: Any = field(default_factory=weakref.WeakKeyDictionary)
    layers: dict[int, str] = field(default_factory=dict)
    stages: dict[int, Callable[[], int]] = field(default_factory=dict)
    began: dict[int, tuple[int, int]] = field(default_factory=dict)
    kept_at: dict[int, int] = field(default_factory=dict)
    records: dict[RecordKey, Record] = field(default_factory=dict)
    inboxes: dict[InboxKey, StaleBuffer] = field(default_factory=dict)
    saved: dict[InboxKey, Mapping[str, Any]] = field(default_factory=dict)
    mark: Mapping[str, Any] | None = None
    restored: bool = False
    made: dict[CallKey, None] = field(default_factory=dict)
    active: tuple[CallKey, ...] = ()
    last: CallKey | None = None
    met: set[int] = field(default_factory=set)
    answered: set[RecordKey] = field(default_factory=set)
    evaluates: bool = False
    parts_of: int | None = None
    constant: set[int] = field(default_factory=set)

    def bind(self, nodes: Rows) -> None:
        """Takes a mesh into use, and what was saved if it is of its partition; collective.

        Raises:
            ValueError: if another mesh is in use.
        """
        if self.nodes is None:
            self.nodes = nodes
        if self.nodes.mesh is not nodes.mesh:
            raise ValueError(
                f"this link is in use on {self.nodes.mesh}, and now on {nodes.mesh}; make "
                "one for each"
            )
        if self.restored:
            self.restored = False
            self._check_saved(nodes)

    def _check_saved(self, nodes: Rows) -> None:
        wrong = torch.tensor([bool(self.saved) and self.mark != mark(nodes)])
        wrong = collectives.all_reduce(wrong.to(torch.uint8), nodes.mesh.world, "max")
        if wrong and self.saved:
            self.saved = {}
            warnings.warn(
                "the late and residual rows of this link were saved by another rank, or on "
                "another number of ranks or another partition, and are dropped: the next "
                "epoch is synchronous",
                stacklevel=2,
            )

    @property
    def in_parts(self) -> bool:
        """Whether a pipeline uses it."""
        return self.parts_of is not None

    @property
    def axis(self) -> Axis | None:
        """The ranks that use it, those of all stages of a pipeline; None before."""
        if self.nodes is None:
            return None
        mesh = self.nodes.mesh
        return mesh.everyone if self.in_parts else mesh.world

    def begin_parts(self, nodes: Rows, epoch: int) -> None:
        """Begins an epoch of a pipeline; collective over its stage at first.

        Raises:
            ValueError: if it is begun already.
        """
        self.bind(nodes)
        if self.parts_of == epoch:
            raise ValueError(f"a pipeline {PROBLEMS[REPEATS]}")
        self.parts_of = epoch

    def place(self, layer: Any, name: str = "") -> int:
        """Returns the place of a layer."""
        if layer not in self.places:
            self.guests.clear()
        place: int = self.places.setdefault(layer, len(self.layers))
        self.layers[place] = name or type(layer).__name__
        self.met.add(place)
        return place

    def place_of(self, layer: Any) -> int:
        """Returns the place of a layer, or that which it will have.

        Layers are trained in the order in which they are evaluated; where a run goes on,
        as many as before, so that those after them are of another copy of the model.
        """
        if layer not in self.places and layer not in self.guests:
            before = {place for place, _ in self.active} | self.constant
            if not self.layers and len(self.guests) == max(before, default=-1) + 1:
                self.guests.clear()
            self.guests[layer] = len(self.layers) + len(self.guests)
        place: int = (self.places if layer in self.places else self.guests)[layer]
        return place

    def agreed(self, layer: Any, training: bool) -> int:
        """Returns what ranks say of a call of a layer; collective, but within a pass.

        Raises:
            ValueError: if other layers of the last epoch train here and elsewhere do not.
        """
        place = self.places.get(layer)
        said = self._mode(place, training)
        known = said == TRAINS and place in self.began
        if known and not self.begins(place):
            return said  # the rest goes as it began
        assert self.nodes is not None
        modes = self._modes(place)
        mine = torch.tensor([said * MODES + modes], dtype=torch.uint8)
        every = int(collectives.all_reduce(mine, self.nodes.mesh.data, "max"))
        said, most = divmod(every, MODES)
        self.evaluates = said == EVALUATES
        if said == TRAINS and modes != most:  # where it is the most, they hear of it
            with self.intact():
                raise ValueError(f"{self.where(self.place_of(layer))} {MIXED}")
        return said

    def _mode(self, place: int | None, training: bool) -> int:
        if torch._C._current_graph_task_id() != -1:
            return RECOMPUTES
        if not training:
            return EVALUATES
        answered = {other for other, *_ in self.answered}
        return REPEATS if place in answered else TRAINS

    def _modes(self, place: int | None) -> int:
        """Returns a number that tells which layers evaluate, if one of the last epoch asks."""
        used = {other for other, _ in self.active}
        if place not in used:  # others may be gone, on some ranks earlier
            return 0
        every = self.places.items()
        modes = {at for layer, at in every if not getattr(layer, "training", True)}
        return zlib.crc32(repr(sorted(modes & used)).encode()) % MODES

    def train(self, place: int, stage: Callable[[], int] | None, epoch: int) -> None:
        """Remembers how to ask for the input that a layer is trained with."""
        self.began[place] = self.began.get(place, (epoch,))[0], epoch
        if stage is not None:
            self.stages[place] = stage

    def stage_of(self, place: int) -> int:
        """Returns `ProductCache.stage` of the input that a layer is trained with.

        One that was seen comes again in the next epoch, or it does not last.
        """
        stage, (first, last) = self.stages[place](), self.began[place]
        return 0 if stage == 1 and first < last else stage

    def where(self, place: int) -> str:
        """Returns what a layer is called in messages."""
        return f"layer {place} ({self.layers.get(place, 'not trained yet')})"

    def begins(self, place: int | None) -> bool:
        """Tells whether ranks must agree on how a pass goes, before a call of a layer."""
        first = next(iter(self.made), (place, 0))[0]
        return place == first or self.evaluates

    def next_call(self, place: int) -> int:
        """Counts one more call of a layer in this epoch, and returns its number."""
        number = sum(1 for other, _ in self.made if other == place)
        self.made[place, number] = None
        return number

    def inbox(self, key: InboxKey, way: Direction) -> StaleBuffer:
        """Returns what an exchange keeps, in one direction."""
        if key in self.saved:
            device = way.from_gid.device
            ids = way.from_gid, way.from_counts
            ends = (way.gid, way.counts), (way.from_gid, way.from_counts)
            check_rows(self.saved[key], ends, self.where(key[0]))
            self.inboxes[key] = read_inbox(self.saved.pop(key), None, *ids, device)
        return self.inboxes.setdefault(key, StaleBuffer())

    def note(
        self, key: RecordKey, back: bool, load: Load, sent: int, exactly: str
    ) -> None:
        """Remembers that an exchange takes place."""
        if back:
            self.answered.add(key)
        if key not in self.records:
            layer = self.layers[key[0]]
            self.records[key] = Record(*key, layer, exactly, [None, None], [0, 0])
        self.records[key].loads[back] = load
        self.records[key].sent_rows[back] = sent

    def knows(self, place: int, number: int) -> bool:
        """Tells whether an exchange of a call has been seen."""
        return any(key[:2] == (place, number) for key in self.records)

    def keep(self, layer: Any, epoch: int | None) -> None:
        """Remembers that a layer's product is kept, in which epoch if in training."""
        place = self.place_of(layer) if epoch is None else self.place(layer)
        if epoch is not None:
            self.kept_at[place] = epoch
            self.constant.discard(place)
        if epoch is not None or (place in self.stages and self.stage_of(place)):
            self._drop([key for key in self.inboxes if key[0] == place])

    def constants(self) -> list[int]:
        """Returns the layers whose inputs have been seen, so that products are kept."""
        seen = {place for place in self.stages if self.stage_of(place)}
        at_once = self.kept_at.keys() - self.stages.keys()
        return sorted(seen | at_once | self.constant)

    def settle(self, exact_last: bool) -> None:
        """Ends an epoch: finds the last call in the first, and forgets calls gone by."""
        self.active = tuple(self.made)
        many = max(len(self.made), len(self.met)) > 1 and not self.in_parts
        if exact_last and self.last is None and self.made and many:
            self.last = self.active[-1]
        alive = {call for call in self.active if call != self.last}
        for key in self.records.keys() - self.answered:
            if key[:2] in alive:  # a layer that is frozen has no late gradients later
                self.records[key].loads[True] = None
        self._drop(
            [
                key
                for key in self.inboxes
                if key[:2] not in alive or (key[4] and key[:4] not in self.answered)
            ]
        )
        whose = {place for place, *_ in self.saved}
        whose -= self.kept_at.keys() | self.constant  # their products are kept instead
        if whose and self.made and not self.in_parts:  # stages get all
            warnings.warn(
                f"the late and residual rows saved of layers {sorted(whose)}, in the order "
                "of their first use, are dropped: the first epoch did not use them; run the "
                "layers in the order in which they ran before",
                stacklevel=3,
            )
        self.saved = {}

    def kept(self) -> list[dict[str, Any]]:
        """Returns late and residual rows, restored ones that nothing has used as well."""
        if self.answered:
            warnings.warn(
                "this link is saved between the backward pass of an epoch and link.step(): "
                "what goes on from there repeats that epoch; save after link.step()",
                stacklevel=3,
            )
        for inbox in self.inboxes.values():
            inbox.drain()
        here = [
            {"of": list(key), **saved_inbox(inbox)}
            for key, inbox in self.inboxes.items()
            if inbox.shape is not None
        ]
        return [*here, *map(dict, self.saved.values())]

    def forget(self) -> None:
        """Drops late and residual rows, restored ones as well."""
        self.inboxes, self.saved = {}, {}

    def _drop(self, keys: list[InboxKey]) -> None:
        for key in keys:
            self.inboxes.pop(key).drain()

    @contextlib.contextmanager
    def intact(self) -> Iterator[None]:
        """Drops what is kept if an exchange fails, and tells the ranks that wait for it.

        Half of what is kept may have changed, and what was to be sent will not come.
        """
        try:
            yield
        except BaseException as error:
            self.forget()
            watch = None if self.nodes is None else self.nodes.mesh.world.watch
            if watch is not None:
                watch.report(error)
            raise

    @staticmethod
    def read(state: Mapping[str, Any]) -> LinkState:
        """Returns the run that was saved; see `LinkPolicy.state_dict`."""
        last = None if state["last"] is None else tuple(state["last"])
        active = tuple((place, number) for place, number in state["active"])
        run = LinkState(mark=state["mark"], restored=True, active=active, last=last)
        run.parts_of = state["parts_of"]
        run.constant = {int(place) for place in state["constant"]}
        for one in state["kept"]:
            place, number, name, piece, backward = one["of"]
            run.saved[place, number, name, piece, bool(backward)] = copy.deepcopy(one)
        return run

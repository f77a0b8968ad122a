"""Forecast: what the exchanges of a link will send, from those seen so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.collectives import Axis
from pyg_distcomm.halo.codec import Codec
from pyg_distcomm.halo.codecs.quantise import Plain
from pyg_distcomm.halo.compressed import answering
from pyg_distcomm.halo.link_cost import (
    Line,
    LinkPrice,
    Load,
    Record,
    RecordKey,
    exchange_name,
)
from pyg_distcomm.halo.schedule import BytesOf
from pyg_distcomm.halo.staleness import StaleBuffer, Timing

CallKey: TypeAlias = tuple[int, int]  # place of the layer, number of its call
InboxKey: TypeAlias = tuple[int, int, int, int, bool]
Codecs: TypeAlias = tuple[Codec, Codec | None]


@dataclass(frozen=True, eq=False)
class Forecast:
    """What is known of the exchanges of a link, at one moment.

    Args:
        records: the exchanges seen.
        inboxes: what they keep.
        active: calls of the last whole epoch, or of this one if it is the first.
        stages: by layer, whether its input was seen (1), or its product is kept (2).
        kept_at: by layer, in which epoch its product was made to be kept.
        began: by layer, in which epoch it was trained first.
        last: the call that is exact.
        timing: when rows arrive.
        exact_first: whether the first epoch is exact.
        codecs_at: codecs of rows and of gradients in an epoch.
        rated: those at a rate.
        epoch: the one under way.
        synchronous: whether epochs are synchronous until further notice.
        size: the number of ranks.
    """

    records: Mapping[RecordKey, Record]
    inboxes: Mapping[InboxKey, StaleBuffer]
    active: tuple[CallKey, ...]
    stages: Mapping[int, int]
    kept_at: Mapping[int, int]
    began: Mapping[int, int]
    last: CallKey | None
    timing: Timing
    exact_first: bool
    codecs_at: Callable[[int], Codecs]
    rated: Callable[[float], Codecs]
    epoch: int
    synchronous: bool
    size: int

    def price(self, epoch: int) -> LinkPrice:
        """Returns what an epoch costs this rank."""
        lines: dict[tuple[int, int, int], Line] = {}
        exact = True
        for key, record in self._alive(epoch):
            once = self._is_once(record.place, epoch)
            there = self._bytes(record, epoch, False, once)
            back = 0 if once else self._bytes(record, epoch, True, once)
            used = (
                self._codec(record, e, back) for e in (epoch,) for back in (False, True)
            )
            exact = exact and (once or all(codec.fixed_size for codec in used))
            loads = [load for load in record.loads if load is not None]
            before = lines.get(key[:3])
            kept = 0 if once else self._kept(key, record, epoch)
            number = f" #{record.number}" if record.number else ""
            lines[key[:3]] = Line(
                f"{record.place} {record.layer}{number}",
                exchange_name(record.name),
                loads[0].width if loads else 0,
                self._how(record, epoch, once),
                there + (before.forward if before else 0),
                back + (before.backward if before else 0),
                kept + (before.kept if before else 0),
            )
        return LinkPrice(epoch, tuple(lines.values()), self._agreement(epoch), exact)

    def _alive(self, epoch: int) -> Iterator[tuple[RecordKey, Record]]:
        for key, record in sorted(self.records.items()):
            if key[:2] in self.active and not self._is_gone(record.place, epoch):
                yield key, record

    def _agreement(self, epoch: int) -> int:
        asked = [
            place
            for place, _ in self.active
            if not (self._is_gone(place, epoch) or self._is_once(place, epoch))
        ]
        if not asked or self.size == 1:
            return 0
        new = {p for p in asked if self.began.get(p, self.epoch) == epoch}
        times = asked.count(asked[0]) + len(new - {asked[0]})
        return times * collectives.ring_words(1, self.size)

    def _is_once(self, place: int, epoch: int) -> bool:
        """Tells whether a layer's product is made in this epoch, and kept from then on."""
        if self.kept_at.get(place) == epoch:
            return True
        return self.stages.get(place) == 1 and epoch == max(self.epoch, 1)

    def _is_gone(self, place: int, epoch: int) -> bool:
        """Tells whether a layer exchanges nothing any more, as its product is kept."""
        if not self.stages.get(place) or self._is_once(place, epoch):
            return False
        return epoch >= max(self.epoch, 1)

    def _is_exact(self, record: Record, epoch: int) -> bool:
        first = self.exact_first and epoch == 0
        last = (record.place, record.number) == self.last
        return first or last or bool(record.exactly)

    def _is_now(self, epoch: int) -> bool:
        return epoch == 0 or self.synchronous or self.timing.synchronous(epoch)

    def _read(self, record: Record, epoch: int, key: InboxKey) -> int:
        """Returns the epoch of the message that is read in one."""
        inbox = self.inboxes.get(key)
        late = self.timing.staleness(False)
        if self._is_now(epoch) or inbox is None or inbox.since is None:
            return epoch
        return self._oldest(epoch, late, inbox.since)

    def _oldest(self, epoch: int, late: int, since: int = 0) -> int:
        """Returns the oldest epoch whose rows are of use in one."""
        window = range(epoch, max(epoch - late, -1), -1)
        return next((e for e in window if self._is_now(e)), max(since, epoch - late))

    def _codec(self, record: Record, epoch: int, backward: bool) -> Codec:
        """Returns how rows, or gradients, are written in an epoch."""
        if self._is_exact(record, epoch):
            return Plain()
        codec, own = self.codecs_at(epoch)
        if not backward:
            return codec
        key = (record.place, record.number, record.name, record.piece, False)
        rows = self._codec(record, self._read(record, epoch, key), False)
        return answering(codec, rows, own)

    def _bytes(self, record: Record, epoch: int, backward: bool, exact: bool) -> int:
        load = record.loads[backward]
        if load is None:
            return 0
        return load.bytes(Plain() if exact else self._codec(record, epoch, backward))

    def _kept(self, key: RecordKey, record: Record, epoch: int) -> int:
        """Returns the bytes of both inboxes after an epoch; see `StaleBuffer`."""
        if (record.place, record.number) == self.last or record.exactly:
            return 0
        total = 0
        for backward in (False, True):
            load, late = record.loads[backward], self.timing.staleness(backward)
            if load is None:
                continue
            inbox = self.inboxes.get((*key, backward))
            since = epoch if inbox is None or inbox.since is None else inbox.since
            for e in range(self._oldest(epoch, late - 1, since), epoch + 1):
                total += load.payload(self._codec(record, e, backward))
            if self.timing.smooth is not None and late:
                total += load.rows_bytes
            codec, own = self.codecs_at(epoch)
            if (own if backward and own is not None else codec).stateful:
                row = load.width * load.dtype.itemsize
                total += load.rows_bytes + record.sent_rows[backward] * row
        return total

    def _how(self, record: Record, epoch: int, once: bool) -> str:
        if once:
            return "exact: its product is kept"
        if (record.place, record.number) == self.last:
            return "exact: the last one"
        if record.exactly:
            return f"exact: {record.exactly}"
        if self._is_exact(record, epoch):
            return "exact: the first epoch"
        codec, own = self.codecs_at(epoch)
        how = f"{codec}" if own is None else f"{codec}, gradients {own}"
        late = [self.timing.staleness(back) for back in (False, True)]
        if self._is_now(epoch) or not any(late):
            return how
        if late[0] == late[1]:
            return f"{how}, late by {late[0]}"
        return f"{how}, late by {late[0]} and {late[1]}"

    def bytes_of(self, axis: Axis, epochs: int) -> BytesOf:
        """Returns the bytes of all ranks of an axis by epoch and rate; collective.

        Where gradients are masked as the rows they answer, they are counted in the epoch
        of these.
        """
        mine = [
            (key, record.loads, self.stages.get(record.place, 0), record.exactly)
            for key, record in self._alive(0)
        ]
        every = [
            one for rows in collectives.all_gather_object(mine, axis) for one in rows
        ]
        calls = {(key[0], stage) for key, _, stage, _ in every}
        asking = collectives.ring_words(1, self.size) * self.size
        one = _Epochs(self, every)

        def bytes_of(epoch: int, rate: float) -> float:
            asked = {place for place, stage in calls if epoch == 0 or not stage}
            times = bool(asked) if epoch else len(asked)  # new layers ask one by one
            return one.cost(epoch, rate, answers[epoch]) + asking * times

        late = self.timing.staleness(False)
        read = (self._oldest(t, late) for t in range(epochs))
        answers = Counter(read)
        return bytes_of


class _Epochs:
    """What epochs cost all ranks, by rate; remembered, since budgets ask often."""

    def __init__(
        self,
        forecast: Forecast,
        every: list[tuple[tuple[int, ...], list[Load | None], int, str]],
    ) -> None:
        self._forecast = forecast
        last = forecast.last
        self._all: tuple[Counter[Load], Counter[Load]] = Counter(), Counter()
        self._coded: tuple[Counter[Load], Counter[Load]] = Counter(), Counter()
        self._exact = self._once = 0
        for key, loads, stage, exactly in every:
            for back, load in enumerate(loads):
                if load is None:
                    continue
                self._all[back][load] += 1
                whole = load.bytes(Plain())
                if stage:  # made once, if not by training then by an evaluation
                    self._once += 0 if back else whole
                elif key[:2] == last or exactly:
                    self._exact += whole
                else:
                    self._coded[back][load] += 1
        self._known: dict[object, int] = {}

    def cost(self, epoch: int, rate: float, answers: int) -> int:
        """Returns the bytes of an epoch, `answers` being how often its rows are answered."""
        codec, own = self._forecast.rated(rate)
        if epoch == 0 and self._forecast.exact_first:
            there, codec, own = self._sum(self._all[0], Plain()), Plain(), None
            zero_fills = self._forecast.rated(2.0)[0].zero_fills
            answers = answers if zero_fills else 1
            first = self._sum(self._all[1], Plain())
            return there + first + (answers - 1) * self._sum(self._coded[1], Plain())
        loads = self._all if epoch == 0 else self._coded
        total = self._sum(loads[0], codec)
        if own is not None:
            total += self._sum(loads[1], own)
        elif self._forecast.rated(2.0)[0].zero_fills:
            total += answers * self._sum(loads[1], codec)
        else:
            total += self._sum(loads[1], codec)
        total += self._exact if epoch else 0
        return total + (self._once if epoch == 1 else 0)

    def _sum(self, loads: Counter[Load], codec: Codec) -> int:
        widest: dict[tuple[int, torch.dtype], int] = {}
        for load in loads:
            shape = load.width, load.dtype
            widest[shape] = max(widest.get(shape, 1), *load.counts)
        # codecs that write the widest messages alike write all others alike
        sizes = tuple(codec.wire_bytes(rows, *shape) for shape, rows in widest.items())
        key = id(loads), codec == Plain(), sizes
        if key not in self._known:
            self._known[key] = sum(n * load.bytes(codec) for load, n in loads.items())
        return self._known[key]

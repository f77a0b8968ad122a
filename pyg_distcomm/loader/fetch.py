"""Fetches rows of a feature store by id, in one round of the row service."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pyg_distcomm import kernels
from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.process_grid import ProcessGrid
from pyg_distcomm.halo.codecs import Codec, Plain, RngKey
from pyg_distcomm.loader.placement import ON_HOST, Placement
from pyg_distcomm.loader.row_group import Group, RowGroup, take_rows, width_of, words_of
from pyg_distcomm.sampling.row_service import RowRound

Counts = Sequence[Sequence[int]]  # rows of each group, for each rank


@dataclass(frozen=True, eq=False)
class FetchedColumn:
    """Encodes and decodes the rows of one attribute that travels.

    Args:
        group: the number of its group.
        name: of the attribute.
        values: the rows here, `[m, ...]`.
        codec: how they are written.
        key: of what that draws, with the ids of rows: a row is always drawn alike.
    """

    group: int
    name: str
    values: Tensor
    codec: Codec
    key: int = 0

    def bytes_of(self, count: int) -> int:
        """Returns the bytes of `count` rows for one rank."""
        return self.codec.wire_bytes(count, width_of(self.values), self.values.dtype)

    def write(self, part: Tensor, place: Tensor, gid: Tensor) -> None:
        """Puts the rows `gid` at `place` `[k]` into a part of a message, `[bytes_of(k)]`."""
        words, count = words_of(self.values), len(place)
        plain = isinstance(self.codec, Plain)
        if plain and part.storage_offset() % words.element_size() == 0:
            kernels.gather_rows(words, place, part.view(words.dtype).view(count, -1))
        else:
            rows = take_rows(self.values, place).view(count, width_of(self.values))
            self.codec.encode(rows, self._draw(gid), out=part, where=self.name)

    def read(self, part: Tensor, out: Tensor, gid: Tensor) -> None:
        """Decodes a part of a message into contiguous rows `gid` `[k, ...]`."""
        flat = out.view(len(out), width_of(self.values))
        self.codec.decode(part, flat, self._draw(gid))

    def _draw(self, gid: Tensor) -> RngKey | None:
        return RngKey(self.key, gid) if self.codec.keyed else None


def message_bytes(columns: Sequence[FetchedColumn], counts: Counts) -> list[int]:
    """Returns the bytes for each rank."""
    return [
        sum(c.bytes_of(counts[c.group][rank]) for c in columns)
        for rank in range(len(counts[0]))
    ]


def _parts(
    columns: Sequence[FetchedColumn], counts: Counts
) -> Iterator[tuple[FetchedColumn, slice, slice]]:
    """Yields each column's rows for each rank, and where they lie in the message."""
    first = [[0, *accumulate(row)] for row in counts]
    at = 0
    for rank in range(len(counts[0])):
        for column in columns:
            begin, end = first[column.group][rank : rank + 2]
            size = column.bytes_of(end - begin)
            if size:
                yield column, slice(begin, end), slice(at, at + size)
            at += size


Wanted: TypeAlias = Mapping[Group, Tensor | tuple[Tensor, Tensor]]

SPARSE = 256  # ids there could be for each that there is: beyond, a search is cheaper
_BAD = -1  # in the place of a checksum: this rank cannot ask for what it wants


@dataclass(frozen=True, eq=False)
class Pool:
    """Holds the distinct rows of one group, in the order in which they arrived.

    Shapes (u ids): ids `[u]` ascending; place `[u]`, where each is in the rows;
    rows name -> `[v, ...]`, v >= u.
    """

    ids: Tensor
    place: Tensor
    rows: dict[str, Tensor]

    def find(self, ids: Tensor) -> Tensor:
        """Returns where the rows of ids are; all of them must have been asked for."""
        if ids is self.ids:
            return self.place
        return self.place[self._look_up(ids)]

    @cached_property
    def _look_up(self) -> Callable[[Tensor], Tensor]:
        """Returns a rank-select index, or a binary search where ids are sparse."""
        total = int(self.ids[-1]) + 1 if len(self.ids) else 0
        if len(self.ids) == 0 or total > SPARSE * len(self.ids):
            return partial(torch.searchsorted, self.ids)
        return kernels.rank_select_index(self.ids, total)

    def take(self, ids: Tensor) -> dict[str, Tensor]:
        """Returns the rows of ids, in their order: name -> `[len(ids), ...]`."""
        place = self.find(ids)
        return {name: take_rows(rows, place) for name, rows in self.rows.items()}


@dataclass(frozen=True, eq=False)
class GroupQuery:
    """Lists the distinct ids that one fetch needs of one group, sorted by where they are.

    Shapes (u ids):
        ids     [u]  ascending
        order   [u]  places in ids: those here, those in the cache, then block by block
        counts  how many each block sends; none from this one
        here    [l]  where those here are in the block
        kept    [h]  where those in the cache are in it
    """

    ids: Tensor
    order: Tensor
    counts: tuple[int, ...]
    here: Tensor
    kept: Tensor

    @property
    def away(self) -> Tensor:
        """Returns the ids that travel, block by block."""
        return self.ids[self.order[len(self.order) - sum(self.counts) :]]

    @property
    def place(self) -> Tensor:
        """Returns the position of each id in the order."""
        place = torch.empty_like(self.order)
        place[self.order] = torch.arange(len(self.order))
        return place


@dataclass(frozen=True, eq=False)
class Fetch:
    """Fetches rows of some attributes; collective.

    Args:
        channel: its row axis holds all blocks between its ranks.
        row_groups: the groups of the store, in the same order on all ranks.
        columns: the attributes to bring, likewise; `group` numbers the row_groups.
        placement: the device that rows are brought to; None for the host.
    """

    channel: ProcessGrid
    row_groups: Sequence[RowGroup]
    columns: Sequence[FetchedColumn]
    placement: Placement | None = None

    def __call__(self, wanted: Wanted) -> dict[Group, Pool]:
        """Returns the distinct rows wanted, by group; collective.

        Raises:
            ValueError: on all ranks of the axis, if one asks for a bad id.
        """
        asks, problem = self.plan(wanted)
        axis, pending = self.channel.row, None
        room = [self._room(column, asks) for column in self.columns]
        if axis.size > 1:
            turn = self._agree(asks, problem)
            asked: Counts = turn.table[:, 1:].t().tolist()
            places, gids = self._served(turn, asks, asked)
            pending = turn.send_rows(
                self._packed(places, gids, asked),
                message_bytes(self.columns, asked),
                message_bytes(self.columns, [ask.counts for ask in asks]),
                "fetch_rows",
                self._landing(asks, room),
            )
        elif problem is not None:
            raise ValueError(problem)
        return self._joined(wanted, asks, room, pending)

    # Before anything travels ----------------------------------------------------------

    def plan(self, wanted: Wanted) -> tuple[list[GroupQuery], str | None]:
        """Returns what is wanted of each group, or why it cannot be had."""
        groups = [row_group.group for row_group in self.row_groups]
        unknown = [group for group in wanted if group not in groups]
        problem = None
        if unknown:
            problem = f"no group {unknown[0]!r} in the store; there are {groups}"
        asks = []
        for number, row_group in enumerate(self.row_groups):
            ask = self._nothing
            try:
                if problem is None and row_group.group in wanted:
                    ask = self._planned(number, row_group, wanted[row_group.group])
            except ValueError as error:
                problem = str(error)
            asks.append(ask)
        return asks, problem

    @property
    def _nothing(self) -> GroupQuery:
        none = torch.empty(0, dtype=torch.int64)
        return GroupQuery(none, none, (0,) * self.channel.row.size, none, none)

    def _planned(
        self, number: int, row_group: RowGroup, asked: Tensor | tuple[Tensor, Tensor]
    ) -> GroupQuery:
        group = row_group.group
        ids = _vector(asked, f"ids of group {group!r}", row_group.total)
        _check_range(ids, row_group.total, f"ids of group {group!r}")
        unique = distinct(ids, row_group.total)
        if not any(column.group == number for column in self.columns):
            order = torch.arange(len(unique))  # nothing of them is ours to bring
            return replace(self._nothing, ids=unique, order=order)
        if isinstance(asked, tuple):
            owner = _owners_of(unique, ids, asked[1])
            _check_range(owner, self.channel.world.size, f"owners of group {group!r}")
        elif row_group.owners is not None:
            owner = row_group.owners.owner_of(unique)
        else:
            raise ValueError(
                f"who owns which id of group {group!r} is not known; give (ids, owners), "
                "or call learn_owners(group) before"
            )
        return self._sorted(row_group, unique, owner // self.channel.replication)

    def _sorted(self, row_group: RowGroup, ids: Tensor, block: Tensor) -> GroupQuery:
        """Sorts distinct ids `[u]` of the blocks `[u]` by where their rows are."""
        own = block == self.channel.row.rank
        home, rest = own.nonzero().view(-1), (~own).nonzero().view(-1)
        here, found = row_group.index.places(ids[home])
        if not bool(found.all()):
            bad = int(ids[home[~found]][0])
            raise ValueError(
                f"id {bad} of group {row_group.group!r} is not here, as the owner given with "
                "it says"
            )
        kept, found = row_group.cached.places(ids[rest])
        hot, cold = rest[found], rest[~found]
        cold = cold[torch.argsort(block[cold], stable=True)]
        counts = torch.bincount(block[cold], minlength=self.channel.row.size).tolist()
        return GroupQuery(
            ids, torch.cat([home, hot, cold]), tuple(counts), here, kept[found]
        )

    # Exchanges ------------------------------------------------------------------------

    def _agree(self, asks: Sequence[GroupQuery], problem: str | None) -> RowRound:
        """Begins a round: sends each rank the number of rows that are asked of it."""
        axis = self.channel.row
        spoken = zlib.crc32(repr([(c.group, c.name) for c in self.columns]).encode())
        head = torch.full((axis.size,), spoken if problem is None else _BAD)
        table = torch.stack([head, *(torch.tensor(ask.counts) for ask in asks)], 1)
        turn = RowRound(axis, table)
        if problem is not None or bool((turn.table[:, 0] != spoken).any()):
            collectives.agree(problem, axis)
            raise ValueError(
                "the ranks fetch different attributes at the same time; give all ranks "
                "the same `attrs`"
            )
        return turn

    def _served(
        self, turn: RowRound, asks: Sequence[GroupQuery], asked: Counts
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Sends ids to where their rows are; returns places and ids of those asked here."""
        # by rank, and within that by group
        away = [ask.away.split(ask.counts) for ask in asks]
        ids = turn.send_ids(
            torch.cat([p for one in zip(*away, strict=True) for p in one]).to(
                self.id_type
            ),
            [sum(one) for one in zip(*(ask.counts for ask in asks), strict=True)],
            [sum(one) for one in zip(*asked, strict=True)],
            "fetch_ids",
        )
        by_rank = zip(ids, zip(*asked, strict=True), strict=True)
        parts = [part for one, sizes in by_rank for part in one.long().split(sizes)]
        gids = [torch.cat(parts[g :: len(asked)]) for g in range(len(asked))]
        places = []
        for row_group, part in zip(self.row_groups, gids, strict=True):
            place, here = row_group.index.places(part)
            if not bool(here.all()):
                raise self._misled(row_group, int(part[~here][0]))
            places.append(place)
        return places, gids

    def _packed(
        self, places: list[Tensor], gids: list[Tensor], asked: Counts
    ) -> Tensor:
        """Returns the message of the rows `gids[group]` at `places[group]`, rank by rank."""
        out = torch.empty(sum(message_bytes(self.columns, asked)), dtype=torch.uint8)
        try:
            for column, rows, part in _parts(self.columns, asked):
                group = column.group
                column.write(out[part], places[group][rows], gids[group][rows])
        except ValueError as error:
            self._tell(error)
            raise
        return out

    def _misled(self, row_group: RowGroup, gid: int) -> ValueError:
        error = ValueError(
            f"id {gid} of group {row_group.group!r} was asked of rank "
            f"{self.channel.world.rank}, which does not have it: the owner given with it "
            "is wrong"
        )
        self._tell(error)
        return error

    def _tell(self, error: ValueError) -> None:
        watch = self.channel.row.watch
        if watch is not None:  # the others wait for rows that will not come
            watch.report(error)

    @property
    def id_type(self) -> torch.dtype:
        """Returns the dtype in which ids travel."""
        big = any(row_group.total >= 2**31 for row_group in self.row_groups)
        return torch.int64 if big else torch.int32

    # After ----------------------------------------------------------------------------

    def _room(self, column: FetchedColumn, asks: Sequence[GroupQuery]) -> Tensor:
        """Returns where rows of a column go, those that arrive last, all for a device.

        It returns the values of the column, if all are read in place.
        """
        ask = asks[column.group]
        if self._direct(column.group, ask):
            return column.values
        if self.placement is not None:
            return self.placement.landing(sum(ask.counts), column.values)
        count = len(ask.ids)
        return column.values.new_empty((count, *column.values.shape[1:]))

    def _landing(
        self, asks: Sequence[GroupQuery], room: Sequence[Tensor]
    ) -> Tensor | None:
        """Returns where a message can be received as it is: one column of plain rows."""
        if len(self.columns) != 1 or not isinstance(self.columns[0].codec, Plain):
            return None
        ask = asks[self.columns[0].group]
        rows = room[0][len(room[0]) - sum(ask.counts) :]
        if not sum(ask.counts) or not rows.numel():  # nothing comes
            return None
        return rows.view(-1).view(torch.uint8)

    def _joined(
        self,
        wanted: Wanted,
        asks: Sequence[GroupQuery],
        room: Sequence[Tensor],
        pending: collectives.Pending | None,
    ) -> dict[Group, Pool]:
        """Lays rows from here beside those that arrive."""
        direct = [self._direct(n, ask) for n, ask in enumerate(asks)]
        for column, rows in zip(self.columns, room, strict=True):
            ask, row_group = asks[column.group], self.row_groups[column.group]
            here, kept = len(ask.here), len(ask.here) + len(ask.kept)
            if not direct[column.group] and self.placement is None:
                take_rows(column.values, ask.here, rows[:here])
                if kept > here:
                    take_rows(row_group.hot[column.name], ask.kept, rows[here:kept])
        if pending is not None:
            message = pending.wait()
            if self._landing(asks, room) is None:
                counts, away = [ask.counts for ask in asks], [ask.away for ask in asks]
                into = {
                    column: rows[len(rows) - sum(counts[column.group]) :]
                    for column, rows in zip(self.columns, room, strict=True)
                }
                for column, some, part in _parts(self.columns, counts):
                    gid = away[column.group][some]
                    column.read(message[part], into[column][some], gid)
        if self.placement is not None:
            room = [
                self._placed(*one, asks) for one in zip(self.columns, room, strict=True)
            ]
        pools: dict[Group, Pool] = {}
        for number, (row_group, ask) in enumerate(
            zip(self.row_groups, asks, strict=True)
        ):
            if row_group.group in wanted:
                pairs = zip(self.columns, room, strict=True)
                rows_of = {c.name: rows for c, rows in pairs if c.group == number}
                place = ask.here if direct[number] else ask.place
                pools[row_group.group] = Pool(ask.ids, place, rows_of)
        return pools

    def _placed(
        self, column: FetchedColumn, rows: Tensor, asks: Sequence[GroupQuery]
    ) -> Tensor:
        """Returns rows of a column on the device: those here, kept here, and come."""
        place, ask = self.placement, asks[column.group]
        assert place is not None
        row_group = self.row_groups[column.group]
        key = row_group.group, column.name
        if self._direct(column.group, ask):
            return place.rows(key, column.values)
        parts = [place.take(key, column.values, ask.here)]
        if len(ask.kept):
            parts.append(
                place.take((*key, "kept"), row_group.hot[column.name], ask.kept)
            )
        return torch.cat([*parts, place.send(rows)])

    def _direct(self, number: int, ask: GroupQuery) -> bool:
        """Returns whether a group's rows are all here, and can be read in place."""
        alone = not self.row_groups[number].foreign
        if self.placement is not None and self.placement.rows_on == ON_HOST:
            return False
        return alone and 0 < len(ask.here) == len(ask.ids)


def ids_of(asked: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """Returns the ids of a request, without their owners, on the CPU."""
    ids = asked[0] if isinstance(asked, tuple) else asked
    return torch.as_tensor(ids).cpu()


def distinct(ids: Tensor, total: int) -> Tensor:
    """Returns ids in [0, total) once each, ascending."""
    if bool((ids[1:] > ids[:-1]).all()):
        return ids
    if total < 32 * len(ids):  # a mark for each id there is takes less than a sort
        seen = torch.zeros(total, dtype=torch.bool)
        seen[ids] = True
        return seen.nonzero().view(-1)
    return torch.unique(ids)


def _owners_of(unique: Tensor, ids: Tensor, owner: Tensor) -> Tensor:
    owner = torch.as_tensor(owner).cpu().long()
    if owner.shape != ids.shape:
        raise ValueError(
            f"owners must be given for each of {len(ids)} ids, got {list(owner.shape)}"
        )
    if len(unique) == len(ids) and unique.data_ptr() == ids.data_ptr():
        return owner
    out = torch.empty_like(unique)
    out[torch.searchsorted(unique, ids.long())] = owner
    return out


def _vector(asked: Any, what: str, total: int) -> Tensor:
    """Returns ids as a vector of integers, or refuses them."""
    wanted = f"{what} must be a vector of integers (or in an index, a mask of {total})"
    try:
        ids = ids_of(asked)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{wanted}, got {asked!r}") from None
    none = ids.shape == (0,)  # an empty list is one of floats
    if not none and (
        ids.dim() != 1 or ids.is_floating_point() or ids.dtype == torch.bool
    ):
        raise ValueError(f"{wanted}, got {ids.dtype} {list(ids.shape)}")
    return ids.long()


def _check_range(values: Tensor, end: int, what: str) -> None:
    if not len(values):
        return
    low, high = (int(v) for v in torch.aminmax(values))
    if low < 0 or high >= end:
        bad = low if low < 0 else high
        raise ValueError(f"{what} must be in 0 .. {end - 1}, got {bad}")

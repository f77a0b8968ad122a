"""Fetches rows of sharded feature stores by id, in one round of the row service."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.axis import ProcessGrid
from pyg_distcomm.comm.random import fold
from pyg_distcomm.halo.codecs import Codec, Plain, RngKey
from pyg_distcomm.kernels.sample_cpu import RankSelect
from pyg_distcomm.loader.batcher import reporting, take_rows
from pyg_distcomm.loader.device_placement import ON_HOST, Placement
from pyg_distcomm.partition.partition import Partition
from pyg_distcomm.sampling.row_service import Index, RowRound

Group: TypeAlias = Any  # None, a node type, an edge type, or EDGES
NODES = None  # the group of the nodes of a homogeneous graph, as PyG names it
EDGES = (None, None)  # the group of its edges
_DRAWN = 0xFE7C  # separates the keys of fetched rows from other keys


def _no_ids() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


@dataclass(eq=False)
class RowGroup:
    """Holds one group: the rows of this rank's block, and cached rows of other blocks."""

    group: Group  # the name of the group
    index: Index  # the ids of the rows in this block
    own: Tensor  # the ids of the rows that this rank owns, ascending
    owners: Partition | None  # the owner of each id; None if it is not known
    columns: dict[str, Column] = field(default_factory=dict)  # the attributes, by name
    # the ids of the rows that every rank caches, ascending
    cached_gid: Tensor = field(default_factory=_no_ids)
    # the index of those that are not in this block
    cached: Index = field(default_factory=lambda: Index(_no_ids(), 0))


Counts = Mapping[RowGroup, Sequence[int]]  # rows of each group, for each rank


@dataclass(eq=False)
class Column:
    """Holds the rows of one attribute, and encodes and decodes them."""

    group: RowGroup  # its group
    name: str  # the name of the attribute
    values: Tensor  # its rows `[m, ...]`, in the order of the group's index
    codec: Codec  # what encodes rows in messages; a row is always encoded alike
    cached: Tensor | None = None  # the rows that the group caches

    @property
    def width(self) -> int:
        """Returns how many numbers a row has."""
        return math.prod(self.values.shape[1:])

    def bytes_of(self, count: int) -> int:
        """Returns the bytes of `count` rows in a message."""
        if isinstance(self.codec, Plain):
            return count * self.width * self.values.element_size()
        return self.codec.wire_bytes(count, self.width, self.values.dtype)

    def write(self, part: Tensor, place: Tensor, gid: Tensor) -> None:
        """Writes the rows `gid`, at `place` `[k]`, into a part of a message `[bytes_of(k)]`."""
        values, count = self.values, len(place)
        fits = part.storage_offset() % values.element_size() == 0
        if isinstance(self.codec, Plain) and fits:
            into = part.view(values.dtype).view(count, *values.shape[1:])
            take_rows(values, place, into)
        else:
            rows = take_rows(values, place).view(count, self.width)
            self.codec.encode(rows, self._draw(gid), out=part, where=self.name)

    def read(self, part: Tensor, out: Tensor, gid: Tensor) -> None:
        """Decodes a part of a message into the contiguous rows `out` `[k, ...]` of `gid`."""
        self.codec.decode(part, out.view(len(out), self.width), self._draw(gid))

    def _draw(self, gid: Tensor) -> RngKey | None:
        if not self.codec.keyed:
            return None
        name = f"{self.group.group}.{self.name}".encode()
        return RngKey(fold(_DRAWN, zlib.crc32(name)), gid)


def message_bytes(columns: Sequence[Column], counts: Counts, ranks: int) -> list[int]:
    """Returns the bytes of the message for each rank."""
    return [
        sum(column.bytes_of(counts[column.group][rank]) for column in columns)
        for rank in range(ranks)
    ]


def _parts(
    columns: Sequence[Column], counts: Counts, ranks: int
) -> Iterator[tuple[Column, slice, slice]]:
    """Yields each column, its rows for each rank, and their bytes in the message, as ranges."""
    first = {group: [0, *accumulate(row)] for group, row in counts.items()}
    at = 0
    for rank in range(ranks):
        for column in columns:
            begin, end = first[column.group][rank : rank + 2]
            size = column.bytes_of(end - begin)
            if size:
                yield column, slice(begin, end), slice(at, at + size)
            at += size


Wanted: TypeAlias = Mapping[Group, Tensor | tuple[Tensor, Tensor]]

SPARSE = 256  # range of ids per id in a pool, above which a binary search is cheaper
_FAILED = -1  # instead of a checksum: the request of this rank is invalid


@dataclass(frozen=True, eq=False)
class Pool:
    """Holds the distinct rows of one group, in the order of arrival.

    Shapes (u ids): ids `[u]` ascending; place `[u]`, the position of each id's row;
    rows name -> `[v, ...]`, v >= u.
    """

    ids: Tensor
    place: Tensor
    rows: dict[str, Tensor]

    def find(self, ids: Tensor) -> Tensor:
        """Returns the positions of the rows of ids, all of which must be in the pool."""
        if ids is self.ids:
            return self.place
        return self.place[self._look_up(ids)]

    @cached_property
    def _look_up(self) -> Callable[[Tensor], Tensor]:
        """Returns a rank-select index, or a binary search where ids are sparse."""
        total = int(self.ids[-1]) + 1 if len(self.ids) else 0
        if len(self.ids) == 0 or total > SPARSE * len(self.ids):
            return partial(torch.searchsorted, self.ids)
        return RankSelect(self.ids, total)

    def take(self, ids: Tensor) -> dict[str, Tensor]:
        """Returns the rows of ids, in their order: name -> `[len(ids), ...]`."""
        place = self.find(ids)
        return {name: take_rows(rows, place) for name, rows in self.rows.items()}


@dataclass(frozen=True, eq=False)
class GroupQuery:
    """Lists the distinct ids that one fetch needs of one group, sorted by location."""

    ids: Tensor  # ascending
    order: Tensor  # positions in ids: local ones, cached ones, then block by block
    counts: tuple[int, ...]  # how many rows each block sends; none from this one
    here: Tensor  # the rows of the local ids in this block
    kept: Tensor  # the rows of the cached ids in the cache

    @property
    def away(self) -> Tensor:
        """Returns the ids of rows on other blocks, block by block."""
        return self.ids[self.order[len(self.order) - sum(self.counts) :]]

    @property
    def place(self) -> Tensor:
        """Returns the position of each id in `order`."""
        place = torch.empty_like(self.order)
        place[self.order] = torch.arange(len(self.order))
        return place

    def is_here(self, placement: Placement | None) -> bool:
        """Returns whether all rows are local, and can be read in place."""
        on_host = placement is not None and placement.rows_on == ON_HOST
        return not on_host and 0 < len(self.here) == len(self.ids)

    def buffer(self, column: Column, placement: Placement | None) -> Tensor:
        """Returns where rows of a column are put together; those that are received come last.

        For a device they are received alone.
        """
        received = sum(self.counts)
        if placement is not None:
            return placement.receive_buffer(received, column.values)
        count = received if self.is_here(None) else len(self.ids)
        return column.values.new_empty((count, *column.values.shape[1:]))

    def copy_local(self, column: Column, rows: Tensor) -> None:
        """Copies local and cached rows of a column into a buffer of the host."""
        here, kept = len(self.here), len(self.here) + len(self.kept)
        take_rows(column.values, self.here, rows[:here])
        if column.cached is not None and kept > here:
            take_rows(column.cached, self.kept, rows[here:kept])

    def joined(
        self, column: Column, rows: Tensor, placement: Placement | None
    ) -> Tensor:
        """Returns the rows of a column, of which a buffer has those that were received."""
        if placement is None:
            return column.values if self.is_here(None) else rows
        key = column.group.group, column.name
        if self.is_here(placement):
            return placement.rows(key, column.values)
        parts = [placement.take(key, column.values, self.here)]
        if column.cached is not None and len(self.kept):
            parts.append(placement.take((*key, "kept"), column.cached, self.kept))
        return torch.cat([*parts, placement.send(rows)])


@dataclass(frozen=True, eq=False)
class Fetch:
    """Fetches rows of some attributes; collective."""

    channel: ProcessGrid  # the ranks of its row axis hold all blocks between them
    groups: Sequence[RowGroup]  # those of the store, in the same order on all ranks
    columns: Sequence[Column]  # the attributes to fetch, in the same order on all ranks

    def __call__(
        self,
        wanted: Wanted,
        problem: str | None = None,
        placement: Placement | None = None,
    ) -> dict[Group, Pool]:
        """Returns the distinct rows wanted, by group, on a device if any; collective.

        Raises:
            ValueError: on all ranks of the axis, if one has a problem (ids that cannot be,
                see `DistFeatureStore.fetch`), or requests a row of a rank that has it not.
        """
        queries, problem = self.plan(wanted, problem)
        rows = {c: queries[c.group].buffer(c, placement) for c in self.columns}
        pending = None
        if self.channel.row.size > 1:
            pending = self._exchange(queries, rows, problem)
        elif problem is not None:
            raise ValueError(problem)
        for column, buffer in rows.items():
            query = queries[column.group]
            if placement is None and not query.is_here(None):
                query.copy_local(column, buffer)
        if pending is not None:
            self._read(pending.wait(), queries, rows)
        pools: dict[Group, Pool] = {}
        for group, query in queries.items():
            if group.group in wanted:
                found = {
                    column.name: query.joined(column, buffer, placement)
                    for column, buffer in rows.items()
                    if column.group is group
                }
                place = query.here if query.is_here(placement) else query.place
                pools[group.group] = Pool(query.ids, place, found)
        return pools

    def renewed(self) -> Fetch:
        """Returns a fetch of the attributes of these names that the groups have now."""
        columns = [column.group.columns[column.name] for column in self.columns]
        return replace(self, columns=columns)

    # Before anything travels ----------------------------------------------------------

    def plan(
        self, wanted: Wanted, problem: str | None = None
    ) -> tuple[dict[RowGroup, GroupQuery], str | None]:
        """Returns the query of each group, and an error message if one is invalid."""
        none, queries = _no_ids(), {}
        empty = GroupQuery(none, none, (0,) * self.channel.row.size, none, none)
        for group in self.groups:
            queries[group] = empty
            try:
                if problem is None and group.group in wanted:
                    queries[group] = self._plan_group(group, wanted[group.group], empty)
            except ValueError as error:
                problem = str(error)
        return queries, problem

    def _plan_group(
        self, group: RowGroup, asked: Tensor | tuple[Tensor, Tensor], empty: GroupQuery
    ) -> GroupQuery:
        ids, owners = asked if isinstance(asked, tuple) else (asked, None)
        unique = distinct(ids, group.index.total)
        if not any(column.group is group for column in self.columns):
            order = torch.arange(len(unique))  # no attribute of them is fetched here
            return replace(empty, ids=unique, order=order)
        if owners is not None:
            owner = torch.empty_like(unique)
            owner[torch.searchsorted(unique, ids)] = owners
        elif group.owners is not None:
            owner = group.owners.owner[unique].long()
        else:
            raise ValueError(
                f"got ids of group {group.group!r}, whose owners are not known; give "
                "(ids, owners), or call learn_owners(group) first"
            )
        return self._sort_by_location(group, unique, owner // self.channel.replication)

    def _sort_by_location(
        self, group: RowGroup, ids: Tensor, block: Tensor
    ) -> GroupQuery:
        """Sorts distinct ids `[u]` of the blocks `[u]` by the location of their rows."""
        own = block == self.channel.row.rank
        own_ids, rest = own.nonzero().view(-1), (~own).nonzero().view(-1)
        here, found = group.index.places(ids[own_ids])
        if not bool(found.all()):
            bad = int(ids[own_ids[~found]][0])
            raise ValueError(
                f"got this rank as the owner of id {bad} of group {group.group!r}, but its "
                "row is not here; give the rank that owns it"
            )
        kept, found = group.cached.places(ids[rest])
        cached, uncached = rest[found], rest[~found]
        uncached = uncached[torch.argsort(block[uncached], stable=True)]
        blocks = self.channel.row.size
        counts = torch.bincount(block[uncached], minlength=blocks).tolist()
        order = torch.cat([own_ids, cached, uncached])
        return GroupQuery(ids, order, tuple(counts), here, kept[found])

    # Exchanges ------------------------------------------------------------------------

    def _exchange(
        self,
        queries: Mapping[RowGroup, GroupQuery],
        rows: Mapping[Column, Tensor],
        problem: str | None,
    ) -> collectives.Pending:
        """Sends counts and ids, and begins to send the rows that other ranks ask for."""
        ranks, counts = self.channel.row.size, _counts(queries)
        round_ = self._start_round(counts, problem)
        table: list[list[int]] = round_.table[:, 1:].t().tolist()
        asked = dict(zip(queries, table, strict=True))
        gids = self._exchange_ids(round_, queries, asked)
        sizes = message_bytes(self.columns, asked, ranks)
        with reporting(self.channel.row.watch):
            out = self._packed(gids, asked, sum(sizes))
        coming = message_bytes(self.columns, counts, ranks)
        into = _received_as_it_is(queries, rows)
        axis = self.channel.row
        return collectives.all_to_all(out, sizes, coming, axis, "fetch_rows", into=into)

    def _start_round(self, counts: Counts, problem: str | None) -> RowRound:
        """Starts a round: sends each rank the number of rows that are requested of it."""
        axis = self.channel.row
        names = repr([(c.group.group, c.name) for c in self.columns])
        checksum = zlib.crc32(names.encode())
        head = torch.full((axis.size,), checksum if problem is None else _FAILED)
        table = torch.stack([head, *map(torch.tensor, counts.values())], 1)
        round_ = RowRound(axis, table)
        if problem is not None or bool((round_.table[:, 0] != checksum).any()):
            collectives.agree(problem, axis)
            raise ValueError(
                "got different attributes to fetch on the ranks; give all ranks the same "
                "`attrs`"
            )
        return round_

    def _exchange_ids(
        self, round_: RowRound, queries: Mapping[RowGroup, GroupQuery], asked: Counts
    ) -> dict[RowGroup, Tensor]:
        """Sends ids to the ranks of their rows; returns those that are requested here."""
        # by rank, and within that by group
        away = [query.away.split(query.counts) for query in queries.values()]
        big = any(group.index.total >= 2**31 for group in queries)
        ids = round_.send_ids(
            torch.cat([part for one in zip(*away, strict=True) for part in one]).to(
                torch.int64 if big else torch.int32
            ),
            [sum(one) for one in zip(*_counts(queries).values(), strict=True)],
            [sum(one) for one in zip(*asked.values(), strict=True)],
            "fetch_ids",
        )
        by_rank = zip(ids, zip(*asked.values(), strict=True), strict=True)
        parts = [part for one, sizes in by_rank for part in one.long().split(sizes)]
        every = enumerate(asked)
        return {group: torch.cat(parts[k :: len(asked)]) for k, group in every}

    def _packed(
        self, gids: Mapping[RowGroup, Tensor], asked: Counts, size: int
    ) -> Tensor:
        """Packs the rows of ids, which lie on this rank, into a message, rank by rank."""
        out, places = torch.empty(size, dtype=torch.uint8), {}
        for group, gid in gids.items():
            places[group], here = group.index.places(gid)
            if not bool(here.all()):
                raise ValueError(
                    f"got rank {self.channel.world.rank} as the owner of id "
                    f"{int(gid[~here][0])} of group {group.group!r}, but its row is not "
                    "there; give the rank that owns it"
                )
        for column, some, part in _parts(self.columns, asked, self.channel.row.size):
            group = column.group
            column.write(out[part], places[group][some], gids[group][some])
        return out

    def _read(
        self,
        message: Tensor,
        queries: Mapping[RowGroup, GroupQuery],
        rows: Mapping[Column, Tensor],
    ) -> None:
        """Decodes received rows into the ends of their buffers, if they are not there."""
        if _received_as_it_is(queries, rows) is not None:
            return
        counts = _counts(queries)
        away = {group: query.away for group, query in queries.items()}
        for column, some, part in _parts(self.columns, counts, self.channel.row.size):
            into = rows[column][len(rows[column]) - sum(counts[column.group]) :]
            column.read(message[part], into[some], away[column.group][some])


def _counts(queries: Mapping[RowGroup, GroupQuery]) -> dict[RowGroup, Sequence[int]]:
    return {group: query.counts for group, query in queries.items()}


def _received_as_it_is(
    queries: Mapping[RowGroup, GroupQuery], rows: Mapping[Column, Tensor]
) -> Tensor | None:
    """Returns the rows that the message is received into, if it needs no decoding."""
    for column, buffer in rows.items() if len(rows) == 1 else ():
        end = buffer[len(buffer) - sum(queries[column.group].counts) :]
        if isinstance(column.codec, Plain) and end.numel():  # else nothing is received
            return end.view(-1).view(torch.uint8)
    return None


def distinct(ids: Tensor, total: int) -> Tensor:
    """Returns ids in [0, total) once each, ascending."""
    if bool((ids[1:] > ids[:-1]).all()):
        return ids
    if total < 32 * len(ids):  # marking ids is faster than sorting them
        seen = torch.zeros(total, dtype=torch.bool)
        seen[ids] = True
        return seen.nonzero().view(-1)
    return torch.unique(ids)

"""Fetches rows of sharded feature stores by id, in one round of the row service."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.axis import ProcessGrid
from pyg_distcomm.halo.codecs import Codec, Plain, RngKey
from pyg_distcomm.kernels.sample_cpu import RankSelect
from pyg_distcomm.loader.batcher import take_rows
from pyg_distcomm.loader.device_placement import ON_HOST, Placement
from pyg_distcomm.sampling.row_service import RowRound

Group: TypeAlias = Any  # None, a node type, an edge type, or EDGES
Counts = Sequence[Sequence[int]]  # rows of each group, for each rank
NODES = None  # the group of the nodes of a homogeneous graph, as PyG names it
EDGES = (None, None)  # the group of its edges


def width_of(values: Tensor) -> int:
    """Returns how many numbers a row has."""
    return math.prod(values.shape[1:])


@dataclass(frozen=True, eq=False)
class FetchedColumn:
    """Encodes and decodes the rows of one attribute that is fetched.

    Args:
        number: the number of its group.
        group: the RowGroup, which has its local rows, `[m, ...]`.
        name: the name of the attribute.
        exact: whether rows travel uncompressed, whatever the codec of the attribute.
        key: keys the codec's draws, together with row ids: a row is always encoded alike.
    """

    number: int
    group: Any
    name: str
    exact: bool = False
    key: int = 0

    @property
    def values(self) -> Tensor:
        """Returns the local rows."""
        return self.group.values[self.name]

    @property
    def codec(self) -> Codec:
        """Returns what encodes the rows in messages."""
        return Plain() if self.exact else self.group.codecs[self.name]

    def bytes_of(self, count: int) -> int:
        """Returns the bytes of `count` rows in a message."""
        values, codec = self.values, self.codec
        width = width_of(values)
        if isinstance(codec, Plain):
            return count * width * values.element_size()
        return codec.wire_bytes(count, width, values.dtype)

    def write(self, part: Tensor, place: Tensor, gid: Tensor) -> None:
        """Writes the rows `gid`, at `place` `[k]`, into a part of a message `[bytes_of(k)]`."""
        values, count = self.values, len(place)
        fits = part.storage_offset() % values.element_size() == 0
        if isinstance(self.codec, Plain) and fits:
            into = part.view(values.dtype).view(count, *values.shape[1:])
            take_rows(values, place, into)
        else:
            rows = take_rows(values, place).view(count, width_of(values))
            self.codec.encode(rows, self._draw(gid), out=part, where=self.name)

    def read(self, part: Tensor, out: Tensor, gid: Tensor) -> None:
        """Decodes a part of a message into the contiguous rows `out` `[k, ...]` of `gid`."""
        flat = out.view(len(out), width_of(self.values))
        self.codec.decode(part, flat, self._draw(gid))

    def _draw(self, gid: Tensor) -> RngKey | None:
        return RngKey(self.key, gid) if self.codec.keyed else None


def message_bytes(columns: Sequence[FetchedColumn], counts: Counts) -> list[int]:
    """Returns the bytes of the message for each rank."""
    return [
        sum(c.bytes_of(counts[c.number][rank]) for c in columns)
        for rank in range(len(counts[0]))
    ]


def _parts(
    columns: Sequence[FetchedColumn], counts: Counts
) -> Iterator[tuple[FetchedColumn, slice, slice]]:
    """Yields each column, its rows for each rank, and their bytes in the message, as ranges."""
    first = [[0, *accumulate(row)] for row in counts]
    at = 0
    for rank in range(len(counts[0])):
        for column in columns:
            begin, end = first[column.number][rank : rank + 2]
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
    """Lists the distinct ids that one fetch needs of one group, sorted by location.

    Shapes (u ids):
        ids     [u]  ascending
        order   [u]  positions in ids: local ones, cached ones, then block by block
        counts  how many rows each block sends; none from this one
        here    [l]  the rows of the local ids in this block
        kept    [h]  the rows of the cached ids in the cache
    """

    ids: Tensor
    order: Tensor
    counts: tuple[int, ...]
    here: Tensor
    kept: Tensor

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


@dataclass(frozen=True, eq=False)
class Fetch:
    """Fetches rows of some attributes; collective.

    Args:
        channel: the ranks of its row axis hold all blocks between them.
        row_groups: each RowGroup of the store, in the same order on all ranks.
        columns: the attributes to fetch, in the same order on all ranks.
        placement: the device to put rows on; None for the host.
    """

    channel: ProcessGrid
    row_groups: Sequence[Any]
    columns: Sequence[FetchedColumn]
    placement: Placement | None = None

    def __call__(self, wanted: Wanted, problem: str | None = None) -> dict[Group, Pool]:
        """Returns the distinct rows wanted, by group; collective.

        Raises:
            ValueError: on all ranks of the axis, if one has a problem (ids that cannot be,
                see `DistFeatureStore.fetch`), or requests a row of a rank that has it not.
        """
        queries, problem = self.plan(wanted, problem)
        axis, pending = self.channel.row, None
        outputs = [self._output_of(column, queries) for column in self.columns]
        if axis.size > 1:
            round_ = self._start_round(queries, problem)
            asked: Counts = round_.table[:, 1:].t().tolist()
            places, gids = self._exchange_ids(round_, queries, asked)
            pending = round_.send_rows(
                self._pack_rows(places, gids, asked),
                message_bytes(self.columns, asked),
                message_bytes(self.columns, [query.counts for query in queries]),
                "fetch_rows",
                self._receive_buffer(queries, outputs),
            )
        elif problem is not None:
            raise ValueError(problem)
        return self._join(wanted, queries, outputs, pending)

    # Before anything travels ----------------------------------------------------------

    def plan(
        self, wanted: Wanted, problem: str | None = None
    ) -> tuple[list[GroupQuery], str | None]:
        """Returns the query of each group, and an error message if one is invalid."""
        queries = []
        for number, row_group in enumerate(self.row_groups):
            query = self._empty_query
            try:
                if problem is None and row_group.group in wanted:
                    query = self._plan_group(number, row_group, wanted[row_group.group])
            except ValueError as error:
                problem = str(error)
            queries.append(query)
        return queries, problem

    @property
    def _empty_query(self) -> GroupQuery:
        none = torch.empty(0, dtype=torch.int64)
        return GroupQuery(none, none, (0,) * self.channel.row.size, none, none)

    def _plan_group(
        self, number: int, row_group: Any, asked: Tensor | tuple[Tensor, Tensor]
    ) -> GroupQuery:
        ids, owners = asked if isinstance(asked, tuple) else (asked, None)
        unique = distinct(ids, row_group.index.total)
        if not any(column.number == number for column in self.columns):
            order = torch.arange(len(unique))  # no attribute of them is fetched here
            return replace(self._empty_query, ids=unique, order=order)
        if owners is not None:
            owner = torch.empty_like(unique)
            owner[torch.searchsorted(unique, ids)] = owners
        elif row_group.owners is not None:
            owner = row_group.owners.owner[unique].long()
        else:
            raise ValueError(
                f"got ids of group {row_group.group!r}, whose owners are not known; give "
                "(ids, owners), or call learn_owners(group) first"
            )
        return self._sort_by_location(
            row_group, unique, owner // self.channel.replication
        )

    def _sort_by_location(
        self, row_group: Any, ids: Tensor, block: Tensor
    ) -> GroupQuery:
        """Sorts distinct ids `[u]` of the blocks `[u]` by the location of their rows."""
        own = block == self.channel.row.rank
        own_ids, rest = own.nonzero().view(-1), (~own).nonzero().view(-1)
        here, found = row_group.index.places(ids[own_ids])
        if not bool(found.all()):
            bad = int(ids[own_ids[~found]][0])
            raise ValueError(
                f"got this rank as the owner of id {bad} of group {row_group.group!r}, but its "
                "row is not here; give the rank that owns it"
            )
        kept, found = row_group.cached.places(ids[rest])
        cached, uncached = rest[found], rest[~found]
        uncached = uncached[torch.argsort(block[uncached], stable=True)]
        blocks = self.channel.row.size
        counts = torch.bincount(block[uncached], minlength=blocks).tolist()
        order = torch.cat([own_ids, cached, uncached])
        return GroupQuery(ids, order, tuple(counts), here, kept[found])

    # Exchanges ------------------------------------------------------------------------

    def _start_round(
        self, queries: Sequence[GroupQuery], problem: str | None
    ) -> RowRound:
        """Starts a round: sends each rank the number of rows that are requested of it."""
        axis = self.channel.row
        checksum = zlib.crc32(repr([(c.number, c.name) for c in self.columns]).encode())
        head = torch.full((axis.size,), checksum if problem is None else _FAILED)
        table = torch.stack(
            [head, *(torch.tensor(query.counts) for query in queries)], 1
        )
        round_ = RowRound(axis, table)
        if problem is not None or bool((round_.table[:, 0] != checksum).any()):
            collectives.agree(problem, axis)
            raise ValueError(
                "got different attributes to fetch on the ranks; give all ranks the same "
                "`attrs`"
            )
        return round_

    def _exchange_ids(
        self, round_: RowRound, queries: Sequence[GroupQuery], asked: Counts
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Sends ids to the ranks of their rows; returns positions and ids requested here."""
        # by rank, and within that by group
        away = [query.away.split(query.counts) for query in queries]
        ids = round_.send_ids(
            torch.cat([p for one in zip(*away, strict=True) for p in one]).to(
                self.id_type
            ),
            [
                sum(one)
                for one in zip(*(query.counts for query in queries), strict=True)
            ],
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
                raise self._wrong_owner(row_group, int(part[~here][0]))
            places.append(place)
        return places, gids

    def _pack_rows(
        self, places: list[Tensor], gids: list[Tensor], asked: Counts
    ) -> Tensor:
        """Packs the rows `gids[group]`, at `places[group]`, into a message, rank by rank."""
        out = torch.empty(sum(message_bytes(self.columns, asked)), dtype=torch.uint8)
        try:
            for column, rows, part in _parts(self.columns, asked):
                group = column.number
                column.write(out[part], places[group][rows], gids[group][rows])
        except ValueError as error:
            self._report(error)
            raise
        return out

    def _wrong_owner(self, row_group: Any, gid: int) -> ValueError:
        error = ValueError(
            f"got rank {self.channel.world.rank} as the owner of id {gid} of group "
            f"{row_group.group!r}, but its row is not there; give the rank that owns it"
        )
        self._report(error)
        return error

    def _report(self, error: ValueError) -> None:
        watch = self.channel.row.watch
        if watch is not None:  # the other ranks wait for rows that will not arrive
            watch.report(error)

    @property
    def id_type(self) -> torch.dtype:
        """Returns the dtype of ids in messages."""
        big = any(row_group.index.total >= 2**31 for row_group in self.row_groups)
        return torch.int64 if big else torch.int32

    # After ----------------------------------------------------------------------------

    def _output_of(
        self, column: FetchedColumn, queries: Sequence[GroupQuery]
    ) -> Tensor:
        """Returns the tensor for the fetched rows of a column; received rows come last.

        For a device it holds received rows only. If all rows are local and can be read in
        place, it is the values of the column.
        """
        query = queries[column.number]
        if self._reads_in_place(query):
            return column.values
        if self.placement is not None:
            return self.placement.receive_buffer(sum(query.counts), column.values)
        count = len(query.ids)
        return column.values.new_empty((count, *column.values.shape[1:]))

    def _receive_buffer(
        self, queries: Sequence[GroupQuery], outputs: Sequence[Tensor]
    ) -> Tensor | None:
        """Returns the rows that the message is received into, if it needs no decoding."""
        if len(self.columns) != 1 or not isinstance(self.columns[0].codec, Plain):
            return None
        query = queries[self.columns[0].number]
        rows = outputs[0][len(outputs[0]) - sum(query.counts) :]
        if not sum(query.counts) or not rows.numel():  # nothing is received
            return None
        return rows.view(-1).view(torch.uint8)

    def _join(
        self,
        wanted: Wanted,
        queries: Sequence[GroupQuery],
        outputs: Sequence[Tensor],
        pending: collectives.Pending | None,
    ) -> dict[Group, Pool]:
        """Copies local and cached rows, decodes received ones, and returns the pools."""
        direct = [self._reads_in_place(query) for query in queries]
        for column, rows in zip(self.columns, outputs, strict=True):
            query, row_group = queries[column.number], column.group
            here, kept = len(query.here), len(query.here) + len(query.kept)
            if not direct[column.number] and self.placement is None:
                take_rows(column.values, query.here, rows[:here])
                if kept > here:
                    take_rows(
                        row_group.cached_rows[column.name], query.kept, rows[here:kept]
                    )
        if pending is not None:
            message = pending.wait()
            if self._receive_buffer(queries, outputs) is None:
                counts, away = (
                    [query.counts for query in queries],
                    [query.away for query in queries],
                )
                into = {
                    column: rows[len(rows) - sum(counts[column.number]) :]
                    for column, rows in zip(self.columns, outputs, strict=True)
                }
                for column, some, part in _parts(self.columns, counts):
                    gid = away[column.number][some]
                    column.read(message[part], into[column][some], gid)
        if self.placement is not None:
            outputs = [
                self._to_device(*one, queries)
                for one in zip(self.columns, outputs, strict=True)
            ]
        pools: dict[Group, Pool] = {}
        for number, (row_group, query) in enumerate(
            zip(self.row_groups, queries, strict=True)
        ):
            if row_group.group in wanted:
                pairs = zip(self.columns, outputs, strict=True)
                rows_of = {c.name: rows for c, rows in pairs if c.number == number}
                place = query.here if direct[number] else query.place
                pools[row_group.group] = Pool(query.ids, place, rows_of)
        return pools

    def _to_device(
        self, column: FetchedColumn, rows: Tensor, queries: Sequence[GroupQuery]
    ) -> Tensor:
        """Returns the rows of a column on the device: local, cached, and received ones."""
        place, query = self.placement, queries[column.number]
        assert place is not None
        row_group = column.group
        key = row_group.group, column.name
        if self._reads_in_place(query):
            return place.rows(key, column.values)
        parts = [place.take(key, column.values, query.here)]
        if len(query.kept):
            parts.append(
                place.take(
                    (*key, "kept"), row_group.cached_rows[column.name], query.kept
                )
            )
        return torch.cat([*parts, place.send(rows)])

    def _reads_in_place(self, query: GroupQuery) -> bool:
        """Returns whether all rows of a query are local, and can be read in place."""
        if self.placement is not None and self.placement.rows_on == ON_HOST:
            return False
        return 0 < len(query.here) == len(query.ids)


def distinct(ids: Tensor, total: int) -> Tensor:
    """Returns ids in [0, total) once each, ascending."""
    if bool((ids[1:] > ids[:-1]).all()):
        return ids
    if total < 32 * len(ids):  # marking ids is faster than sorting them
        seen = torch.zeros(total, dtype=torch.bool)
        seen[ids] = True
        return seen.nonzero().view(-1)
    return torch.unique(ids)

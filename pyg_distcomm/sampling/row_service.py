"""Sends ids to the ranks that hold their rows, and returns the rows.

[Note: row service] A `RowRound` is three exchanges over an axis: the number of ids that each
rank requests of each other rank, the ids, and the answers. Every lookup of rows by id runs on
it: node-wise and layer-wise samplers of a partitioned graph (`RemoteRows`), which draw from
the rows or fetch them whole, and the feature store (`loader.fetch`). Callers decide the
content of a message; this module decides the order of the exchanges.

[Note: rows over the process row] In the Graph Partitioned algorithm of [Tripathy24] the c
ranks of a process row hold the same rows of Q. Each multiplies by a c-th of the blocks of A,
whose rows it gets in its process column, block by block; the partial products are added up
by a sparse all-reduce over the process row, and each rank samples a c-th of the sum. What
differs here:

- a rank has the minibatches that it samples from the start, so ids of the rows they need go
  to the others of the process row, and only these rows come back: a reduce-scatter;
- a row of a node-wise Q has one nonzero, so that no two ranks have parts of one row of the
  product, and nothing is left to add; layer-wise, partial rows are added;
- the column of a row's owner, not its block, decides which of the c ranks fetches it, so
  that c need not divide P/c, and all fetch about as many rows;
- rows of this rank's block, which all c ranks hold, do not travel;
- one all_to_allv moves rows of all blocks, each row once for all minibatches of all c ranks.

If each rank requested only its own rows from its column, a rank would receive fewer words in
total; here a row enters a process row once, which counts if the process row is one host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyg_distcomm import kernels
from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.axis import ProcessGrid
from pyg_distcomm.comm.collectives import Axis
from pyg_distcomm.kernels.sample_ops import (
    Frontier,
    Relation,
    RemoteDraws,
    UnweightedNode,
    all_in_edges,
)
from pyg_distcomm.sampling.algebra import offsets
from pyg_distcomm.sampling.graph_block import GraphBlock

_STREAM, _TIMED, _FLOAT = 1, 2, 4  # flags: the columns beside the ids of a message


@dataclass(frozen=True, eq=False)
class Index:
    """Looks ids up among the ids of a block."""

    gid: Tensor  # the ids of the block, `[m]`, ascending
    total: int  # ids lie in [0, total)

    def __len__(self) -> int:
        return len(self.gid)

    @cached_property
    def _find(self) -> Callable[[Tensor], Tensor]:
        return kernels.rank_select_index(self.gid, self.total)

    def places(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the position of each id `[k]`, and whether it is there; else position 0."""
        if not len(self.gid):
            return torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
        first, last = int(self.gid[0]), int(self.gid[-1])
        if last - first + 1 == len(self.gid):
            place = ids - first
            here = (place >= 0) & (place < len(self.gid))
        else:
            place = self._find(ids)
            here = place >= 0
        return place.masked_fill_(~here, 0), here


@dataclass(frozen=True, eq=False)
class RowQuery:
    """Requests the in-edges of nodes in one relation: a segment of a message.

    Shapes: node [m] gids; stream, max_time [m] or None, as in `Frontier`.
    """

    relation: int
    node: Tensor
    stream: Tensor | None = None
    max_time: Tensor | None = None


def rows_at(sampler: Any, relation: Relation, place: Tensor) -> Relation:
    """Returns some rows of a relation of pairs, in the order given, as one of their own."""
    every = all_in_edges(place, place)
    start, entry, _ = sampler.draw_rows(relation, None, every, _allocate)
    # a pair as one number
    pair = torch.int64 if relation.row.dtype == torch.int32 else torch.complex128
    row, weight, time = (
        None if t is None else t.index_select(0, torch.from_numpy(entry))
        for t in (relation.row.view(pair), relation.weight, relation.time)
    )
    assert row is not None
    own: Any = {"row": row.view(relation.row.dtype), "weight": weight, "time": time}
    return replace(relation, colptr=torch.from_numpy(start), **own)


class RowRound:
    """Runs the exchanges of one round: counts (in the constructor), then ids, then answers.

    The table `[ranks, w]`, int64, has a row for each rank: the numbers of ids requested of it,
    and what it needs to read them, as flags or a checksum.
    """

    def __init__(self, axis: Axis, table: Tensor) -> None:
        self.axis = axis
        ones = [1] * axis.size
        self.table: Tensor = collectives.all_to_all(
            table, ones, ones, axis, "plan", 1
        ).wait()

    def send_ids(
        self, ids: Tensor, sent: Sequence[int], coming: Sequence[int], op: str
    ) -> list[Tensor]:
        """Sends ids, sorted by rank; returns the ids that each rank requests from this one."""
        got = collectives.all_to_all(ids, list(sent), list(coming), self.axis, op)
        return list(got.wait().split(list(coming)))

    def send_parts(
        self, messages: Sequence[Tensor], op: str = "samples"
    ) -> tuple[list[Tensor], Tensor]:
        """Sends answers of any size, after their sizes; a rank's own answer does not travel.

        Returns:
            the answer of each rank, and the answers of all other ranks, in rank order.
        """
        rank = self.axis.rank
        coming = collectives.exchange_counts([len(m) for m in messages], self.axis)
        own, coming[rank] = messages[rank], 0
        away = [own[:0] if i == rank else m for i, m in enumerate(messages)]
        received = collectives.all_to_all(away, None, coming, self.axis, op).wait()
        parts = list(received.split(coming))
        parts[rank] = own
        return parts, received


class RowRequest(RowRound):
    """Requests in-edges of other ranks: the constructor sends ids, `rows` returns whole rows.

    All ranks of the axis give the same number of segments, for the same relations in the
    same order. Price, in words of 4 bytes (8 if ids need them), and counts of 8 bytes:

        words   id_words asked_by_others + asked + (2 + columns) drawn
        counts  (segments + 2) (ranks - 1), of whole rows (segments + 1) (ranks - 1)

    A requested node is one word, one more for its stream, and two for a time; it is answered
    by a count, and by a source and an id for each of its in-edges `drawn`; whole rows have
    weights and times besides, as they are. Counts are the nodes of each segment, the flags of
    their columns, and the length of an answer of draws. Nodes whose rows lie on this rank
    cost nothing.

    Attributes:
        received: the queries of each rank for rows of this one.
        sent: [ranks, segments], the number of nodes of each segment requested of each rank.
        first: [segments + 1], the first node of each segment, in request order.
        asked: by rank, the positions in request order of the nodes requested of it.
    """

    def __init__(
        self,
        axis: Axis,
        queries: Sequence[RowQuery],  # of this rank; a segment may be empty
        peers: Sequence[Tensor],  # for each query, which rank has each node's row
        sampler: Any,  # sorts the nodes by peer (`kernels.neighbor_sampler`)
        word: torch.dtype,  # of messages: int32, or int64 where ids need it
    ) -> None:
        self._sampler, self._word = sampler, word
        sizes = torch.tensor([w.node.numel() for w in queries], dtype=torch.int64)
        self.first: list[int] = [0, *sizes.cumsum(0).tolist()]
        peer = torch.cat([torch.empty(0).long(), *peers])
        segments = len(queries)
        segment = torch.repeat_interleave(torch.arange(segments), sizes)
        self._order = sampler.by_rank(peer, axis.size)
        each = torch.bincount(peer * segments + segment, minlength=axis.size * segments)
        self.sent = each.view(axis.size, segments)
        rows = self.sent.sum(1)
        self.asked = self._order.split(rows.tolist())
        flags = _flags(queries)
        table = torch.cat([self.sent, torch.full((axis.size, 1), flags)], 1)
        super().__init__(axis, table)
        theirs = self.table
        message = _packed(queries, flags, word).index_select(0, self._order)
        widths = torch.tensor([_width(int(row[-1]), word) for row in theirs])
        coming = theirs[:, :-1].sum(1) * widths
        parts = self.send_ids(
            message.view(-1),
            (rows * message.size(1)).tolist(),
            coming.tolist(),
            "frontier",
        )
        relations = [w.relation for w in queries]
        self.received = [
            _unpacked(part, row[:-1].tolist(), int(row[-1]), relations)
            for part, row in zip(parts, theirs, strict=True)
        ]

    def rows(
        self, relation: Relation, places: Sequence[Tensor]
    ) -> tuple[Relation, Tensor]:
        """Sends each rank whole rows, and returns those received, as a relation.

        `places` are, for each rank, the rows of `relation` that it asked for. Also returned is
        which of the rows received is that of each node, as they were requested.
        """
        found = rows_at(self._sampler, relation, torch.cat(list(places)))

        def exchanged(t: Tensor, sent: list[int], coming: list[int]) -> Tensor:
            return collectives.all_to_all(t, sent, coming, self.axis, "samples").wait()

        sizes = [len(p) for p in places], [len(p) for p in self.asked]
        counts = exchanged(found.colptr.diff().to(self._word), *sizes).long()
        ends = [
            [int(part.sum()) for part in each.split(size)]
            for each, size in zip((found.colptr.diff(), counts), sizes, strict=True)
        ]
        pairs, weight, time = (
            None if t is None else exchanged(t, *ends)
            for t in (found.row.view(-1, 2), found.weight, found.time)
        )
        assert pairs is not None
        slot = torch.empty_like(self._order)
        slot[self._order] = torch.arange(len(slot))
        own: Any = {"row": pairs.view(-1), "weight": weight, "time": time}
        return replace(found, colptr=offsets(counts), **own), slot


def _allocate(total: int) -> tuple[NDArray[np.int64], int]:
    return np.empty(total, np.int64), 0


def _flags(queries: Sequence[RowQuery]) -> int:
    """Returns which columns go beside the ids of a message, as bits."""
    streams = any(w.stream is not None for w in queries)
    times = [w.max_time for w in queries if w.max_time is not None]
    floats = any(time.is_floating_point() for time in times)
    return _STREAM * streams + _TIMED * bool(times) + _FLOAT * floats


def _width(flags: int, word: torch.dtype) -> int:
    """Returns how many words each requested node takes."""
    timed = 8 // word.itemsize if flags & _TIMED else 0
    return 1 + bool(flags & _STREAM) + timed


def _packed(queries: Sequence[RowQuery], flags: int, word: torch.dtype) -> Tensor:
    """Packs ids, and the columns of their flags, as rows of words [m, width]."""
    none = torch.empty(0).long()
    columns = [torch.cat([none, *(w.node for w in queries)]).to(word).unsqueeze(1)]
    if flags & _STREAM:
        streams = [
            torch.zeros_like(w.node) if w.stream is None else w.stream for w in queries
        ]
        columns.append(torch.cat([none, *streams]).to(word).unsqueeze(1))
    if flags & _TIMED:
        dtype = torch.float64 if flags & _FLOAT else torch.int64
        times = [
            torch.zeros(len(w.node), dtype=dtype)
            if w.max_time is None
            else w.max_time.to(dtype)
            for w in queries
        ]
        every = torch.cat([none.to(dtype), *times])
        columns.append(every.view(word).view(len(every), -1))
    return torch.cat(columns, 1)


def _unpacked(
    part: Tensor, counts: Sequence[int], flags: int, relations: Sequence[int]
) -> list[RowQuery]:
    """Reads the queries of one rank, written by `_packed`."""
    rows = part.view(sum(counts), -1) if len(part) else part.view(0, 1)
    none: list[Tensor | None] = [None] * len(counts)
    nodes = rows[:, 0].long().split(list(counts))
    streams, times = list(none), list(none)
    if flags & _STREAM and len(part):
        streams = list(rows[:, 1].long().split(list(counts)))
    if flags & _TIMED and len(part):
        dtype = torch.float64 if flags & _FLOAT else torch.int64
        raw = rows[:, 1 + bool(flags & _STREAM) :].contiguous().view(dtype)
        times = list(raw.view(-1).split(list(counts)))
    segments = zip(relations, nodes, streams, times, strict=True)
    return [RowQuery(*segment) for segment in segments]


class RemoteRows:
    """Draws from, and fetches, the rows of all blocks; by one thread at a time."""

    def __init__(self, block: GraphBlock, channel: ProcessGrid) -> None:
        self.block, self.channel = block, channel
        self.relations = block.topology.graph.relations
        wide = any(r.row.dtype == torch.int64 for r in self.relations)
        self.word = torch.int64 if wide else torch.int32
        self.sampler: Any = kernels.neighbor_sampler(block.topology.graph)
        sizes = block.topology.graph.sizes
        self._index = [
            Index(gid, size) for gid, size in zip(block.node_gid, sizes, strict=True)
        ]

    def request(self, queries: Sequence[RowQuery]) -> RowRequest:
        """Sends ids to the ranks of the process column that have their rows."""
        return self._request(self.channel.row, queries, self._block_of)

    def _block_of(self, node_type: int, gid: Tensor) -> Tensor:
        """Returns the block of each node of a type, int64."""
        owner = self.block.partitions[node_type].owner[gid].long()
        c = self.channel.replication
        return owner if c == 1 else owner // c

    def _fetcher_of(self, node_type: int, gid: Tensor) -> Tensor:
        """Returns the rank of the process row that fetches the row of each node, int64.

        It is the rank in the process column of the node's owner; for nodes of this block,
        which every rank of the process row holds, it is this rank.
        """
        owner = self.block.partitions[node_type].owner[gid].long()
        c = self.channel.replication
        here = owner // c == self.channel.block
        return torch.where(here, self.channel.col.rank, owner % c)

    def _request(
        self,
        axis: Axis,
        queries: Sequence[RowQuery],
        peer_of: Callable[[int, Tensor], Tensor],
    ) -> RowRequest:
        peers = [peer_of(self.relations[w.relation].target, w.node) for w in queries]
        return RowRequest(axis, queries, peers, self.sampler, self.word)

    def local_rows(self, r: int, node: Tensor) -> Tensor:
        """Returns the local row of each node that was requested of this rank."""
        return self._index[self.relations[r].target].places(node)[0]

    def answer(self, frontiers: Sequence[tuple[int, Frontier]]) -> Tensor:
        """Draws the in-edges that one rank requests, and packs them into its message.

        The number of in-edges of each node comes first, then the pairs of all. `frontiers`
        are nodes of relations, by their numbers, ascending.
        """
        found = []
        for number, frontier in frontiers:
            relation = self.relations[number]
            try:
                drawn = self.sampler.draw_rows(relation, None, frontier, _allocate)
            except UnweightedNode as error:
                raise self.unweighted(error, number) from None
            found.append((relation, *drawn[:2]))
        counts = torch.cat([torch.from_numpy(start).diff() for _, start, _ in found])
        at = len(counts)
        total = at + 2 * sum(len(entry) for _, _, entry in found)
        words = torch.empty(total, dtype=self.word)
        words[:at] = counts
        for relation, _, entry in found:
            self.sampler.write_pairs(relation, entry, words, at)
            at += 2 * len(entry)
        return words

    def draws(self, request: RowRequest, messages: Sequence[Tensor]) -> RemoteDraws:
        """Sends every rank its answer; returns the draws that this rank requested."""
        found, far = request.send_parts(messages)
        parts = list(zip(found, request.asked, strict=True))
        draws: RemoteDraws = self.sampler.locate(parts, self.channel.row.rank, far)
        return draws

    def unweighted(self, error: UnweightedNode, r: int) -> ValueError:
        """Returns the error with the name of its edge type."""
        edge_type = self.block.topology.edge_types[r]
        where = "" if edge_type is None else f"edge type {edge_type}: "
        return ValueError(f"{where}{error}")

    def fetch(
        self, r: int, nodes: Sequence[Tensor | None]
    ) -> tuple[Relation, list[Tensor]]:
        """Fetches whole rows of a relation, each distinct one once; collective.

        With c copies of a block, the ranks of a process row pool their requests; see
        [Note: rows over the process row].

        Price: that of a `RowRequest` on each axis. In the process row, this rank requests
        the distinct rows that other ranks fetch; in the process column, the rows that it
        fetches for any rank of the process row and does not hold.

        Returns:
            the rows as a relation, and for each list of nodes, their rows in it.
        """
        none = torch.empty(0).long()
        every = torch.cat([none, *(n for n in nodes if n is not None)])
        wanted, where = torch.unique(every, return_inverse=True)
        request = self.request_from_row([RowQuery(r, wanted)])
        requested = [theirs[0].node for theirs in request.received]
        pool, places = torch.unique(torch.cat(requested), return_inverse=True)
        found, slot = self._fetch_from_column(r, pool)
        if self.channel.col.size > 1:
            theirs = slot[places].split([len(n) for n in requested])
            found, slot = request.rows(found, theirs)
        sizes = [0 if n is None else len(n) for n in nodes]
        return found, list(slot[where].split(sizes))

    def request_from_row(self, queries: Sequence[RowQuery]) -> RowRequest:
        """Requests of each rank of the process row the rows that it fetches for all of it.

        See `_fetcher_of`.
        """
        return self._request(self.channel.col, queries, self._fetcher_of)

    def sorted_rows(self, r: int, nodes: Tensor) -> Relation:
        """Fetches the rows of distinct ids from this column, in the order of the ids."""
        return rows_at(self.sampler, *self._fetch_from_column(r, nodes))

    def _fetch_from_column(self, r: int, wanted: Tensor) -> tuple[Relation, Tensor]:
        """Fetches whole rows of distinct nodes from the ranks of the process column."""
        request = self.request([RowQuery(r, wanted)])
        places = [self.local_rows(r, query.node) for (query,) in request.received]
        return request.rows(self.relations[r], places)

"""Sends ids to the ranks that hold their rows, and brings the rows back.

[Note: row service] A `RowRound` is three exchanges over an axis: how many ids each rank asks
of each other, the ids, and the answers. All that looks rows up by id runs on it: node-wise
and layer-wise samplers of a partitioned graph (`RemoteRows`), which draw from the rows or
bring them whole, and the feature store (`loader.fetch`). Callers decide what a
message holds; this module decides the order of the exchanges.

[Note: rows over the process row] In the Graph Partitioned algorithm of [Tripathy24] the c
ranks of a process row hold the same rows of Q. Each multiplies by a c-th of the blocks of A,
whose rows it gets in its process column, block by block; the partial products are added up
by a sparse all-reduce over the process row, and each rank samples a c-th of the sum. What
differs here:

- a rank has the minibatches that it samples from the start, so ids of the rows they need go
  to the others of the process row, and only these rows come back: a reduce-scatter;
- a row of a node-wise Q has one nonzero, so that no two ranks have parts of one row of the
  product, and nothing is left to add; layer-wise, partial rows are added;
- which of the c ranks brings a row is settled by the column of its owner, not by its block,
  so that c need not divide P/c, and they bring about as many each;
- rows of the own block, which all c ranks hold, do not travel;
- one all_to_allv brings all blocks, and each row once for all minibatches of all c ranks.

Each rank asking its column for what itself needs would bring fewer words to a rank in all;
this way a row comes into a process row once, which is what counts where it is a host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyg_distcomm import kernels
from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.collectives import Axis
from pyg_distcomm.comm.process_grid import ProcessGrid
from pyg_distcomm.kernels.minibatch import (
    Draws,
    HopDraw,
    Relation,
    UnweightedNode,
    everything,
)
from pyg_distcomm.sampling.graph_block import GraphBlock

_NAMED, _TIMED, _FLOAT = 1, 2, 4  # columns beside the ids of a message


@dataclass(frozen=True, eq=False)
class RowQuery:
    """Lists nodes whose in-edges in one relation are needed: a segment of a message.

    Shapes: node [m] gids; name, limit [m] or None, as in `HopDraw`.
    """

    relation: int
    node: Tensor
    name: Tensor | None = None
    limit: Tensor | None = None


@dataclass(frozen=True, eq=False)
class RowReply:
    """Holds in-edges received, as rows in the order in which they arrived.

    Shapes: offset [m + 1]; pair [2 t], a source and an edge id each; columns [t] each;
    slot [m], the row of each node in the order of asking.
    """

    offset: Tensor
    pair: Tensor
    columns: tuple[Tensor, ...]
    slot: Tensor


class RowRound:
    """Runs the exchanges of one round: counts when it is made, then ids, then answers.

    Args:
        axis: the ranks that ask each other.
        table: `[ranks, w]` int64, a row for each rank: how many ids are asked of it, and
            what it has to know to read them.
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
        """Sends ids, sorted by rank; returns those that each rank asks for here."""
        got = collectives.all_to_all(ids, list(sent), list(coming), self.axis, op)
        return list(got.wait().split(list(coming)))

    def send_rows(
        self,
        rows: Tensor,
        sent: Sequence[int],
        coming: Sequence[int],
        op: str,
        into: Tensor | None = None,
    ) -> collectives.Pending:
        """Starts to send answers of sizes that both ends know from the counts."""
        counts = list(sent), list(coming)
        return collectives.all_to_all(rows, *counts, self.axis, op, into=into)

    def send_parts(
        self, messages: Sequence[Tensor], op: str
    ) -> tuple[list[Tensor], Tensor]:
        """Sends answers of any size, whose sizes go first; a rank's own does not travel.

        Returns:
            the answer of each rank, and all those of other ranks, in rank order.
        """
        rank = self.axis.rank
        coming = collectives.exchange_counts([len(m) for m in messages], self.axis)
        own, coming[rank] = messages[rank], 0
        away = [own[:0] if i == rank else m for i, m in enumerate(messages)]
        received = collectives.all_to_all_parts(away, coming, self.axis, op).wait()
        parts = list(received.split(coming))
        parts[rank] = own
        return parts, received


class RowRequest:
    """Asks other ranks for in-edges: sends node ids when made, and `reply` returns rows.

    All ranks of the axis give as many segments, for the same relations in the same
    order. Price, in words of 4 bytes (8 if ids need them), and counts of 8 bytes:

        words   id_words asked_by_others + asked + (2 + columns) drawn
        counts  (segments + 2) (ranks - 1)

    A node asked for is one word, and one more for its tree, two for a time; each is answered
    by a count, and a source and an id for each of its in-edges `drawn`. Counts are the nodes of
    each segment, the flags of columns beside them, and the length of an answer. Nodes
    whose rows lie on this rank count nowhere.

    Args:
        axis: the ranks that ask each other.
        queries: what this rank wants; a segment may be empty.
        peers: for each query, which rank of the axis has each node's row.
        word: int32, or int64 where ids need it: the type of all that travels.

    Attributes:
        received: what each rank asks for here, as its queries.
        sent: [ranks, segments], how many nodes of each segment are asked of each rank.
        first: [segments + 1], where segments begin in the order of asking.
        asked: by rank, the places in that order of the nodes asked of it.
    """

    def __init__(
        self,
        axis: Axis,
        queries: Sequence[RowQuery],
        peers: Sequence[Tensor],
        word: torch.dtype,
    ) -> None:
        self._word = word
        sizes = torch.tensor([w.node.numel() for w in queries], dtype=torch.int64)
        self.first: list[int] = [0, *sizes.cumsum(0).tolist()]
        peer = torch.cat([torch.empty(0).long(), *peers])
        segments = len(queries)
        segment = torch.repeat_interleave(torch.arange(segments), sizes)
        _, _, self._order = kernels.coo_to_csr(peer, peer, axis.size)
        each = torch.bincount(peer * segments + segment, minlength=axis.size * segments)
        self.sent = each.view(axis.size, segments)
        rows = self.sent.sum(1)
        self.asked = self._order.split(rows.tolist())
        flags = _flags(queries)
        table = torch.cat([self.sent, torch.full((axis.size, 1), flags)], 1)
        self._round = RowRound(axis, table)
        theirs = self._round.table
        message = _packed(queries, flags, word).index_select(0, self._order)
        widths = torch.tensor([_width(int(row[-1]), word) for row in theirs])
        coming = theirs[:, :-1].sum(1) * widths
        parts = self._round.send_ids(
            message.view(-1),
            (rows * message.size(1)).tolist(),
            coming.tolist(),
            "frontier",
        )
        kinds = [w.relation for w in queries]
        self.received = [
            _unpacked(part, row[:-1].tolist(), int(row[-1]), kinds)
            for part, row in zip(parts, theirs, strict=True)
        ]

    def exchange(self, messages: Sequence[Tensor], op: str = "samples") -> list[Tensor]:
        """Sends a message of words to each rank of the axis; returns those for this one."""
        return self.arrived(messages, op)[0]

    def arrived(
        self, messages: Sequence[Tensor], op: str = "samples"
    ) -> tuple[list[Tensor], Tensor]:
        """Does as `exchange`; returns also all that came from others, in rank order."""
        return self._round.send_parts(messages, op)

    def reply(
        self, messages: Sequence[Tensor], columns: Sequence[torch.dtype] = ()
    ) -> RowReply:
        """Answers every rank by a message from `answer`; returns what they answered.

        `columns` are the types of what comes with each in-edge beside its pair.
        """
        counts, parts = [], []
        for part, nodes in zip(self.exchange(messages), self.asked, strict=True):
            asked = len(nodes)
            counts.append(part[:asked].long())
            total = int(counts[-1].sum())
            words = [2 * total, *(total * _words(c, self._word) for c in columns)]
            parts.append(part[asked:].split(words))
        offset = torch.nn.functional.pad(torch.cat(counts).cumsum(0), (1, 0))
        pair, *rest = (torch.cat(column) for column in zip(*parts, strict=True))
        slot = torch.empty_like(self._order)
        slot[self._order] = torch.arange(len(slot))
        more = tuple(_narrowed(w, c) for w, c in zip(rest, columns, strict=True))
        return RowReply(offset, pair, more, slot)


def answer(
    relations: Sequence[Relation],
    asks: Sequence[tuple[int, HopDraw]],
    sampler: Any,
    word: torch.dtype,
    whole: bool = False,
) -> Tensor:
    """Draws what one rank asks for, and writes the message that answers it.

    How many in-edges each node has comes first, then the pairs of all, then the columns.

    Args:
        relations: where the rows are.
        asks: (relation, ask), relations ascending.
        sampler: draws from rows and writes pairs (`kernels.neighbor_sampler`).
        word: the type of the message.
        whole: whether weights and times of the in-edges go with them.
    """
    found = []
    for number, ask in asks:
        try:
            start, entry, _ = sampler.draw_rows(relations[number], None, ask, _fresh)
        except UnweightedNode as error:
            raise UnweightedNode(number, error.node) from None
        found.append((relations[number], torch.from_numpy(start).diff(), entry))
    columns = [
        _widened(column[torch.from_numpy(entry)], word)
        for relation, _, entry in found
        for column in (columns_of(relation) if whole else [])
    ]
    heads = [count for _, count, _ in found]
    draws = sum(len(entry) for _, _, entry in found)
    sizes = [*map(len, heads), 2 * draws, *map(len, columns)]
    words = torch.empty(sum(sizes), dtype=word)
    parts = words.split(sizes)
    at = sum(map(len, heads))
    for count, part in zip(heads, parts, strict=False):
        part.copy_(count)
    for column, part in zip(columns, parts[len(heads) + 1 :], strict=True):
        part.copy_(column)
    for relation, _, entry in found:
        sampler.write_pairs(relation, entry, words, at)
        at += 2 * len(entry)
    return words


def columns_of(relation: Relation) -> list[Tensor]:
    """Returns what an in-edge has beside its pair: a weight, a time."""
    return [c for c in (relation.weight, relation.time) if c is not None]


def _widened(column: Tensor, word: torch.dtype) -> Tensor:
    """Writes numbers as words; float32 becomes float64 where words have eight bytes."""
    narrow = column.element_size() < word.itemsize
    return (column.double() if narrow else column).view(word)


def _narrowed(words: Tensor, kind: torch.dtype) -> Tensor:
    """Reads what `_widened` wrote."""
    wide = torch.float64 if kind.itemsize < words.element_size() else kind
    return words.clone().view(wide).to(kind)


def _fresh(total: int) -> tuple[NDArray[np.int64], int]:
    return np.empty(total, np.int64), 0


def _flags(queries: Sequence[RowQuery]) -> int:
    named = any(w.name is not None for w in queries)
    limits = [w.limit for w in queries if w.limit is not None]
    floats = any(limit.is_floating_point() for limit in limits)
    return _NAMED * named + _TIMED * bool(limits) + _FLOAT * floats


def _words(kind: torch.dtype, word: torch.dtype) -> int:
    return max(kind.itemsize // word.itemsize, 1)


def _width(flags: int, word: torch.dtype) -> int:
    timed = _words(torch.int64, word) if flags & _TIMED else 0
    return 1 + bool(flags & _NAMED) + timed


def _packed(queries: Sequence[RowQuery], flags: int, word: torch.dtype) -> Tensor:
    """Writes ids, and what goes with them, as rows of words [m, width]."""
    none = torch.empty(0).long()
    columns = [torch.cat([none, *(w.node for w in queries)]).to(word).unsqueeze(1)]
    if flags & _NAMED:
        names = [
            torch.zeros_like(w.node) if w.name is None else w.name for w in queries
        ]
        columns.append(torch.cat([none, *names]).to(word).unsqueeze(1))
    if flags & _TIMED:
        kind = torch.float64 if flags & _FLOAT else torch.int64
        limits = [
            torch.zeros(len(w.node), dtype=kind)
            if w.limit is None
            else w.limit.to(kind)
            for w in queries
        ]
        every = torch.cat([none.to(kind), *limits])
        columns.append(every.view(word).view(len(every), -1))
    return torch.cat(columns, 1)


def _unpacked(
    part: Tensor, counts: Sequence[int], flags: int, kinds: Sequence[int]
) -> list[RowQuery]:
    """Reads what `_packed` wrote, for one rank, as its queries."""
    rows = part.view(sum(counts), -1) if len(part) else part.view(0, 1)
    none: list[Tensor | None] = [None] * len(counts)
    nodes = rows[:, 0].long().split(list(counts))
    names, limits = list(none), list(none)
    if flags & _NAMED and len(part):
        names = list(rows[:, 1].long().split(list(counts)))
    if flags & _TIMED and len(part):
        kind = torch.float64 if flags & _FLOAT else torch.int64
        raw = rows[:, 1 + bool(flags & _NAMED) :].contiguous().view(kind)
        limits = list(raw.view(-1).split(list(counts)))
    return [
        RowQuery(*segment) for segment in zip(kinds, nodes, names, limits, strict=True)
    ]


class RemoteRows:
    """Draws from, and fetches, the rows of all blocks.

    Args:
        block: what this rank holds.
        channel: the ranks; used by one thread at a time.
    """

    def __init__(self, block: GraphBlock, channel: ProcessGrid) -> None:
        self.block, self.channel = block, channel
        self.relations = block.topology.graph.relations
        wide = any(r.row.dtype == torch.int64 for r in self.relations)
        self.word = torch.int64 if wide else torch.int32
        self._sampler: Any = kernels.neighbor_sampler(block.topology.graph)

    def ask(self, queries: Sequence[RowQuery]) -> RowRequest:
        """Sends ids to the ranks of the process column that have their rows."""
        return self._request(self.channel.row, queries, self.block.block_of)

    def _request(
        self,
        axis: Axis,
        queries: Sequence[RowQuery],
        whom: Callable[[int, Tensor], Tensor],
    ) -> RowRequest:
        peers = [
            whom(kind, torch.cat([w.node for w in some]))
            for kind, some in groupby(
                queries, lambda w: self.relations[w.relation].target
            )
        ]
        return RowRequest(axis, queries, peers, self.word)

    def place_of(self, r: int, node: Tensor) -> Tensor:
        """Returns where nodes that were asked of this rank have their rows."""
        return self.block.place_of(self.relations[r].target, node)

    def answer(self, asks: list[tuple[int, HopDraw]], whole: bool = False) -> Tensor:
        """Draws what one rank asks of this one; see `answer`."""
        try:
            return answer(self.relations, asks, self._sampler, self.word, whole)
        except UnweightedNode as error:
            raise self.unweighted(error, error.relation) from None

    def draws(self, request: RowRequest, messages: Sequence[Tensor]) -> Draws:
        """Answers every rank by a message; returns the draws that this one asked for."""
        found, far = request.arrived(messages)
        parts = list(zip(found, request.asked, strict=True))
        draws: Draws = self._sampler.locate(parts, self.channel.row.rank, far)
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

        With c copies of a block, the ranks of a process row pool what they want; see
        [Note: rows over the process row].

        Price: that of a `RowRequest` on each axis. In the process row, it asks
        for the distinct rows that others are to bring; in the process column, for those
        that it is to bring for any of the process row and does not hold.

        Returns:
            the rows as a relation, and for each list of nodes, their places in it.
        """
        none = torch.empty(0).long()
        every = torch.cat([none, *(n for n in nodes if n is not None)])
        wanted, where = torch.unique(every, return_inverse=True)
        request = self.ask_twins([RowQuery(r, wanted)])
        asked = [theirs[0].node for theirs in request.received]
        pool, places = torch.unique(torch.cat(asked), return_inverse=True)
        answers = self._column(r, pool)
        if self.channel.col.size > 1:
            arrived = self._arrived(r, answers)
            messages = [
                answer(
                    [arrived],
                    [(0, everything(node, answers.slot[place]))],
                    self._sampler,
                    self.word,
                    whole=True,
                )
                for node, place in zip(
                    asked, places.split([len(a) for a in asked]), strict=True
                )
            ]
            answers = request.reply(messages, self._columns(r))
        sizes = [0 if n is None else len(n) for n in nodes]
        return self._arrived(r, answers), list(answers.slot[where].split(sizes))

    def ask_twins(self, queries: Sequence[RowQuery]) -> RowRequest:
        """Asks each rank of the process row for the rows that it fetches for all of them.

        See `GraphBlock.twin_of`.
        """
        return self._request(self.channel.col, queries, self.block.twin_of)

    def sorted_rows(self, r: int, nodes: Tensor) -> Relation:
        """Fetches the rows of distinct ids from this column, in the order of the ids."""
        answers = self._column(r, nodes)
        arrived = self._arrived(r, answers)
        start, entry, _ = self._sampler.draw_rows(
            arrived, None, everything(nodes, answers.slot), _fresh
        )
        picked = torch.from_numpy(entry)
        weight = None if arrived.weight is None else arrived.weight[picked]
        pair = arrived.row.view(-1, 2)[picked].view(-1)
        return replace(
            arrived, colptr=torch.from_numpy(start), row=pair, weight=weight, time=None
        )

    def _column(self, r: int, wanted: Tensor) -> RowReply:
        request = self.ask([RowQuery(r, wanted)])
        messages = [
            self.answer(
                [(r, everything(query.node, self.place_of(r, query.node)))], whole=True
            )
            for (query,) in request.received
        ]
        return request.reply(messages, self._columns(r))

    def _arrived(self, r: int, answers: RowReply) -> Relation:
        """Returns rows that have arrived as a relation of their own."""
        columns, own = list(answers.columns), self.relations[r]
        weight = None if own.weight is None else columns.pop(0)
        time = None if own.time is None else columns.pop(0)
        return replace(
            own, colptr=answers.offset, row=answers.pair, weight=weight, time=time
        )

    def _columns(self, r: int) -> list[torch.dtype]:
        return [column.dtype for column in columns_of(self.relations[r])]

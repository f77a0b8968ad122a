"""Samples layer by layer from a graph that no rank holds whole.

[Note: a distributed P = Q A] The rows of Q (which nodes each minibatch has in a layer) go to
the ranks that multiply them; sums of weights come back, one partial row for each minibatch, and
are added up. At the owner, every block multiplies what it holds. At the requester, as in
the Graph Partitioned algorithm of [Tripathy24], the c ranks of a process row share out
the rows of A: each brings a part for all of them, once each, multiplies, and the partial
rows are added up over the process row ([Note: rows over the process row] in row_service.py says
what differs). Weights are integers, so that all orders of adding give the same bits, and
draws are made from equal rows by equal keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.price import Price
from pyg_distcomm.comm.process_grid import ProcessGrid
from pyg_distcomm.kernels.minibatch import Relation
from pyg_distcomm.sampling.algebra import (
    BulkMatrix,
    BulkNodes,
    add,
    check_nodes,
    offsets,
)
from pyg_distcomm.sampling.graph_block import GraphBlock
from pyg_distcomm.sampling.layer_graph import MOST_ROWS, LayerEdges, LocalLayerGraph
from pyg_distcomm.sampling.row_service import RemoteRows, RowQuery, RowRequest, RowRound
from pyg_distcomm.sampling.rules import Rule


def sums_price(
    asked_by_others: int, batches: int, columns: int, word: int = 4
) -> Price:
    """Prices what the partial sums of one layer bring this rank, in words of 4 or 8 bytes.

        received = asked_by_others + batches + (1 + 8 / word) columns

    Args:
        asked_by_others: rows that other ranks ask this one for.
        batches: minibatches of this rank, for each other rank of the axis.
        columns: entries of the partial rows that come from others.
        word: bytes of a word.
    """
    return Price(words=asked_by_others + batches + (1 + 8 // word) * columns)


def edges_price(
    cols_of_others: int, asked: int, edges: int, weighted: bool = False, word: int = 4
) -> Price:
    """Prices what the edges of one layer bring this rank, after its sums.

        received = cols_of_others + asked + 2 edges + (8 / word) (edges, or asked)

    Args:
        cols_of_others: columns that other ranks send, of minibatches with rows here.
        asked: rows of this rank's minibatches that others multiply.
        edges: edges into these rows.
        weighted: whether each edge has a weight; otherwise each row has.
        word: bytes of a word.
    """
    weights = edges if weighted else asked
    return Price(words=cols_of_others + asked + 2 * edges + 8 // word * weights)


def layer_counts_price(batches: int, ranks: int) -> Price:
    """Prices the counts of one layer over an axis of `ranks`, in words of 8 bytes.

        received = (2 batches + 3) (ranks - 1)

    How many rows and columns each minibatch has, what stands beside the rows, and how long
    the sums and the edges are.
    """
    return Price(words=(2 * batches + 3) * (ranks - 1))


@dataclass(eq=False)
class _Round:
    """Holds the rows of one layer, their request, and the graph that multiplies them."""

    rows: BulkNodes
    request: RowRequest
    server: LocalLayerGraph

    @property
    def received(self) -> list[BulkNodes]:
        """Returns the rows that each rank asks for here."""
        return [BulkNodes.of([w.node for w in part]) for part in self.request.received]


class PartitionedLayerGraph:
    """Multiplies rows of this rank's block and of those on other ranks; collective.

    All ranks of the channel sample bulks of equally many minibatches together.

    Args:
        block: what this rank holds.
        channel: the ranks; used by one thread at a time.
        rule: which weights to make.
        sample_at: "owner" or "requester"; see [Note: a distributed P = Q A].
        most_rows: how many rows a minibatch may have in a layer; the most of any rank.

    Price of a layer: see `sums_price`, `edges_price` and `layer_counts_price`; rules that
    share a row need the edges alone. At the owner, all is exchanged in the process column.
    At the requester, all is in the process row, and rows of A travel in the column, each
    distinct one once (`request_price`, `counts_price`).
    """

    def __init__(
        self,
        block: GraphBlock,
        channel: ProcessGrid,
        rule: Rule,
        *,
        sample_at: str = "owner",
        most_rows: int = MOST_ROWS,
    ) -> None:
        self.block, self.channel, self.rule = block, channel, rule
        self.sample_at = sample_at
        self.num_nodes = block.topology.graph.sizes[0]
        self._far = RemoteRows(block, channel)
        relation = block.topology.graph.relations[0]
        problem, peak = None, 0.0
        try:
            own = LocalLayerGraph(relation, self.num_nodes, rule, block.node_gid[0])
            peak = own.peak
        except ValueError as error:
            problem = str(error)
        collectives.agree(problem, channel.world)
        most = torch.tensor([peak, most_rows], dtype=torch.float64)
        self._peak, rows = collectives.all_reduce(most, channel.world, "max").tolist()
        self.most_rows = int(rows)
        self._own = self._local(relation, block.node_gid[0])
        self.scale = self._own.scale
        self._weighted = relation.weight is not None
        self._round: _Round | None = None

    def sums(self, rows: BulkNodes) -> BulkMatrix:
        """Returns the weights of the rows of each minibatch, [k, n] int64."""
        turn = self._turn(rows)
        parts = [turn.server.sums(asked) for asked in turn.received]
        messages = [self._words(p.rowptr.diff(), p.col, p.values) for p in parts]
        found = turn.request.exchange(messages, "sums")
        return add([self._read_sums(part, len(rows)) for part in found])

    def column_sums(self) -> Tensor:
        """Returns the weights of all rows, [n] int64. Price: an all_reduce of n words."""
        return collectives.all_reduce(self._own.column_sums(), self.channel.row)

    def extract(self, rows: BulkNodes, cols: BulkNodes) -> LayerEdges:
        """Returns the edges from the columns to the rows of each minibatch."""
        turn = self._turn(rows)
        self._round = None
        wanted = turn.request.sent > 0  # [peers, k]
        sizes = cols.ptr.diff() * wanted
        columns = RowRound(self._axis, sizes)
        coming = columns.table
        places = [_ranges(cols.ptr, row) for row in wanted]
        theirs = columns.send_ids(
            cols.id[torch.cat(places)].to(self._far.word),
            sizes.sum(1).tolist(),
            coming.sum(1).tolist(),
            "columns",
        )
        messages = [
            self._edges(turn.server, asked, BulkNodes(ids.long(), offsets(counts)))
            for asked, ids, counts in zip(turn.received, theirs, coming, strict=True)
        ]
        found = turn.request.exchange(messages, "edges")
        asked_rows = turn.request.asked
        parts = [
            self._read_edges(message, len(asked), place)
            for message, asked, place in zip(found, asked_rows, places, strict=True)
        ]
        return LayerEdges.join(parts, asked_rows)

    @property
    def _axis(self) -> Any:
        """Returns the axis over which rows of Q are sent."""
        return self.channel.row if self.sample_at == "owner" else self.channel.col

    def _local(self, rows: Relation, gid: Tensor) -> LocalLayerGraph:
        return LocalLayerGraph(
            rows, self.num_nodes, self.rule, gid, self.most_rows, self._peak
        )

    def _turn(self, rows: BulkNodes) -> _Round:
        """Sends the rows of a layer, once for its sums and its edges."""
        if self._round is not None and self._round.rows is rows:
            return self._round
        check_nodes(rows, self.num_nodes, "rows")
        queries = [RowQuery(0, node) for node in rows.split()]
        if self.sample_at == "owner":
            turn = _Round(rows, self._far.ask(queries), self._own)
        else:
            request = self._far.ask_twins(queries)
            none = [torch.empty(0).long()]
            asked = [w.node for part in request.received for w in part]
            wanted = torch.unique(torch.cat(none + asked))
            server = self._local(self._far.sorted_rows(0, wanted), wanted)
            turn = _Round(rows, request, server)
        self._round = turn
        return turn

    # Messages -------------------------------------------------------------------------

    def _words(self, *parts: Tensor) -> Tensor:
        """Joins counts and ids, as words, and numbers of eight bytes, as they are."""
        word = self._far.word
        head, last = parts[:-1], parts[-1]
        return torch.cat([*(p.to(word) for p in head), last.contiguous().view(word)])

    def _read_sums(self, message: Tensor, k: int) -> BulkMatrix:
        counts = message[:k].long()
        total, step = int(counts.sum()), 8 // message.element_size()
        col, value = message[k:].split([total, step * total])
        return BulkMatrix(
            offsets(counts),
            col.long(),
            value.clone().view(torch.int64),
            self.num_nodes,
            torch.arange(k + 1),
        )

    def _edges(
        self, server: LocalLayerGraph, rows: BulkNodes, cols: BulkNodes
    ) -> Tensor:
        """Writes: edges of each row; column and id of each edge; weights."""
        edges = server.extract(rows, cols)
        counts = torch.bincount(edges.row, minlength=len(rows.id))
        weight = edges.weight
        if not self._weighted:  # all edges of a row have one
            weight = torch.zeros(len(rows.id), dtype=torch.float64)
            weight[edges.row] = edges.weight
        return self._words(counts, edges.col, edges.edge, weight)

    def _read_edges(self, message: Tensor, rows: int, place: Tensor) -> LayerEdges:
        counts = message[:rows].long()
        row, total = torch.repeat_interleave(counts), int(counts.sum())
        step = 8 // message.element_size()
        sizes = [total, total, step * (total if self._weighted else rows)]
        col, edge, raw = message[rows:].split(sizes)
        weight = raw.clone().view(torch.float64)
        if not self._weighted:
            weight = weight[row]
        return LayerEdges(row, place[col.long()], edge.long(), weight)


def _ranges(ptr: Tensor, chosen: Tensor) -> Tensor:
    """Returns the places of the ranges of `ptr` that are chosen, in order."""
    return chosen.repeat_interleave(ptr.diff()).nonzero().view(-1)

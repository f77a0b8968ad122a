"""Samples neighbourhoods of a graph that is partitioned over the ranks.

[Note: owner and requester] A hop of a bulk is one all_to_allv of the ids of its frontier
and one of the answers, among the ranks of a process column, which together hold the whole
graph. At the owner, in-edges are drawn where they lie, and the draws travel. At the
requester, as in the Graph Partitioned algorithm of [Tripathy24], rows of the adjacency matrix
travel, each distinct one once, and the draws are made from them. A draw is a function of
(key, relation, node, the row), so both, and a graph that every rank holds, give the same
minibatch bit for bit.
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

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch_geometric.sampler import EdgeSamplerInput, NegativeSampling, NodeSamplerInput
from torch_geometric.sampler.base import SubgraphType

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.axis import ProcessGrid
from pyg_distcomm.comm.consistency import on_all_ranks
from pyg_distcomm.kernels import threads
from pyg_distcomm.kernels.sample_cpu import check_ids, hop_key
from pyg_distcomm.kernels.sample_ops import (
    Frontier,
    Minibatch,
    Relation,
    Request,
    UnweightedNode,
)
from pyg_distcomm.sampling.algebra import BulkMatrix, BulkNodes, add, offsets
from pyg_distcomm.sampling.graph_block import GraphBlock, read_block
from pyg_distcomm.sampling.graph_source import SampledTopology
from pyg_distcomm.sampling.layer_graph import MOST_ROWS, LayerEdges, LocalLayerGraph
from pyg_distcomm.sampling.neighbor_sampler import LABOR, KeyedNeighborSampler, Output
from pyg_distcomm.sampling.row_service import RemoteRows, RowQuery, RowRequest, RowRound
from pyg_distcomm.sampling.rules import Rule

SAMPLE_AT = ("owner", "requester")


class PartitionedNeighborSampler(KeyedNeighborSampler):
    """Samples neighbourhoods of a graph that is spread over the ranks of a channel.

    Minibatches are those of `KeyedNeighborSampler` on the whole graph, bit for bit. All
    calls are collective: all ranks of the channel sample as many minibatches at a time.

    Price of a hop: that of a `RowRequest`. At the owner, for k minibatches
    of b nodes and fan-out s on this rank, at most k b (1 + s) pairs of words are asked and
    answered, of which those of this rank's own block do not travel, and k keys of 8 bytes
    come from each rank of the column, once per bulk; at the requester, the whole rows, and
    with c > 1 most of them once more inside the process row (`RemoteRows.fetch`).

    Args:
        data: a share, from `pdc.partition`.
        num_neighbors, subgraph_type, replace, disjoint, temporal_strategy, time_attr,
        weight_attr, is_sorted, directed, rule, seed: as in `KeyedNeighborSampler`.
        channel: the ranks, in blocks replicated c times; used by one thread at a time.
        sample_at: "owner" or "requester"; see [Note: owner and requester].
    """

    def __init__(
        self,
        data: Any,
        num_neighbors: Any,
        *,
        channel: ProcessGrid,
        sample_at: str = "owner",
        **options: Any,
    ) -> None:
        if sample_at not in SAMPLE_AT:
            raise ValueError(
                f"sample_at must be 'owner' or 'requester', got {sample_at!r}"
            )
        self.channel, self.sample_at = channel, sample_at
        super().__init__(data, num_neighbors, **options)
        # this rank's node times do not cover other ranks' nodes
        self.node_time: Any = None
        self._rows = RemoteRows(self.block, channel)

    def _read(self, data: Any, **options: Any) -> SampledTopology:
        if options.pop("backward"):
            raise ValueError(
                "sample_direction='backward' needs the out-edges of nodes, which lie with "
                "other ranks; partition a graph with its edges turned around"
            )
        self.block: GraphBlock = read_block(data, self.channel, **options)
        return self.block.topology

    @property
    def is_temporal(self) -> bool:
        """Returns whether sampling is temporal, also where no edges here have times."""
        return self.time_attr is not None

    @property
    def _relations(self) -> tuple[Relation, ...]:
        return self.block.topology.graph.relations

    def set_node_times(self, name: Any, time: Tensor) -> None:
        """Sets the times of all nodes of a type, of which only this rank's are known else."""
        graph, place = self._topology.graph, self.node_types.index(name)
        times = *graph.time[:place], time, *graph.time[place + 1 :]
        self._topology = replace(self._topology, graph=replace(graph, time=times))
        known: Any = {**(self.node_time or {}), name: time} if self.is_hetero else time
        self.node_time = known

    def in_edges(
        self, number: int, nodes: Sequence[Tensor]
    ) -> tuple[Relation, Sequence[Tensor]]:
        """Fetches all in-edges of nodes; collective, see `RemoteRows.fetch`."""
        return self._rows.fetch(number, nodes)

    def sample_bulk(
        self,
        bulk: Sequence[NodeSamplerInput | EdgeSamplerInput],
        neg_sampling: NegativeSampling | None = None,
    ) -> list[Output]:
        """Samples minibatches together: all hops of all of them in a few exchanges.

        Args:
            bulk: seed nodes, or seed edges, of each minibatch.
            neg_sampling: how many negative edges to draw for each seed edge, and how.
        """
        return self._sample_all(bulk, neg_sampling)

    def _draw_all(self, requests: Sequence[Request]) -> list[Minibatch]:
        """Draws the minibatches of a bulk."""
        with ExitStack() as stack:
            builders = [
                stack.enter_context(self._rows.sampler.builder(r, len(requests)))
                for r in requests
            ]
            self._draw_hops(builders, [r.key for r in requests])
            return [builder.result() for builder in builders]

    def _draw_hops(self, builders: list[Any], own_keys: list[int]) -> None:
        """Draws all hops of the minibatches of a bulk together; collective."""
        keys: list[list[int]] = []
        if self.sample_at == "owner":
            keys = collectives.all_gather_counts(own_keys, self.channel.row)
        fan_outs = self._fan_outs()
        for hop in range(max(map(len, fan_outs), default=0)):
            active = {r: f[hop] for r, f in enumerate(fan_outs) if f[hop] != 0}
            frontiers = [
                [builder.frontier(r, hop) for builder in builders]
                for r in range(len(fan_outs))
            ]
            if self.sample_at == "owner" and active:
                self._draw_at_owner(hop, builders, frontiers, active, keys)
            elif self.sample_at == "requester":
                for r in active:
                    self._draw_at_requester(r, hop, builders, frontiers[r])
            for builder in builders:
                builder.end_hop()
        if self.subgraph_type == SubgraphType.induced:
            for r in range(len(self._relations)):
                self._induce(r, builders)

    def _draw_at_owner(
        self,
        hop: int,
        builders: list[Any],
        frontiers: list[list[Frontier | None]],
        fan_outs: dict[int, int],
        keys: list[list[int]],
    ) -> None:
        """Has the owners of the frontier nodes draw their in-edges, and adds the draws."""
        queries = [_query(r, frontier) for r in fan_outs for frontier in frontiers[r]]
        request = self._rows.request(queries)
        k, labor, relations = len(builders), self.draws == LABOR, self._relations
        messages = []
        for peer, theirs in enumerate(request.received):
            segments = []
            for n, (r, fan_out) in enumerate(fan_outs.items()):
                received = theirs[n * k : (n + 1) * k]
                relation = relations[r]
                about = r, relation, hop, labor
                drawn_by = [hop_key(key, *about) for key in keys[peer]]
                segments.append((r, self._frontier_of(received, drawn_by, fan_out)))
            messages.append(self._rows.answer(segments))
        draws, first = self._rows.draws(request, messages), request.first

        def add(i: int) -> None:
            for n, r in enumerate(fan_outs):
                if frontiers[r][i] is not None:
                    s = n * k + i
                    builders[i].add_draws(r, hop, draws, first[s], first[s + 1])

        threads.run(add, [(i,) for i in range(k)])

    def _draw_at_requester(
        self, r: int, hop: int, builders: list[Any], frontiers: list[Frontier | None]
    ) -> None:
        """Fetches the rows of the frontier nodes, and draws from them on this rank."""
        nodes = [frontier.node if frontier else None for frontier in frontiers]
        relation, places = self._rows.fetch(r, nodes)

        def draw(i: int) -> None:
            frontier, place = frontiers[i], places[i]
            if frontier is not None:
                builders[i].draw(r, hop, relation, replace(frontier, place=place))

        try:
            threads.run(draw, [(i,) for i in range(len(builders))])
        except UnweightedNode as error:
            raise self._rows.unweighted(error, r) from None

    def _induce(self, r: int, builders: list[Any]) -> None:
        """Fetches the in-edges of all sampled nodes, and keeps those between them."""
        frontiers = [builder.all_nodes(r) for builder in builders]
        relation, places = self._rows.fetch(r, [f.node for f in frontiers])
        for builder, frontier, place in zip(builders, frontiers, places, strict=True):
            builder.induce(r, relation, replace(frontier, place=place))

    def _frontier_of(
        self, queries: Sequence[RowQuery], keys: Sequence[int], fan_out: int
    ) -> Frontier:
        """Returns another rank's queries of one relation as a frontier on this rank."""
        node, drawn = torch.cat([w.node for w in queries]), fan_out > 0
        return Frontier(
            node=node,
            place=self._rows.local_rows(queries[0].relation, node),
            keys=keys,
            ends=list(accumulate(len(w.node) for w in queries)),
            fan_out=fan_out,
            replace=self.replace and drawn,
            latest=self.is_temporal and self.temporal_strategy == "last" and drawn,
            stream=_joined([w.stream for w in queries]),
            max_time=_joined([w.max_time for w in queries]),
            labor=self.draws == LABOR and drawn,
        )


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Concatenates an optional column of all segments of a message; None if it is absent."""
    found = [part for part in parts if part is not None]
    return torch.cat(found) if found else None


def _query(relation: int, frontier: Frontier | None) -> RowQuery:
    if frontier is None:
        return RowQuery(relation, torch.empty(0).long())
    return RowQuery(relation, frontier.node, frontier.stream, frontier.max_time)


def _requested(request: RowRequest) -> list[BulkNodes]:
    """Returns the rows that each rank requests from this one."""
    return [BulkNodes.of([w.node for w in part]) for part in request.received]


class PartitionedLayerGraph:
    """Multiplies rows of this rank's block and of those on other ranks; collective.

    All ranks of the channel sample bulks of equally many minibatches together.

    Args:
        block: what this rank holds.
        channel: the ranks; used by one thread at a time.
        rule: which weights to make.
        sample_at: "owner" or "requester"; see [Note: a distributed P = Q A].
        most_rows: how many rows a minibatch may have in a layer; the most of any rank.

    Price of a layer, of a bulk of k minibatches over an axis of `ranks`, in words of w = 4 or 8
    bytes, and counts of 8 bytes:

        sums    asked_by_others + k (ranks - 1) + (1 + 8 / w) columns
        edges   cols_of_others + asked + 2 edges + (8 / w) (edges, or asked)
        counts  (2 k + 3) (ranks - 1)

    `asked` are the rows of this rank that others multiply, `columns` the entries of the partial
    sums that come back, `edges` those into these rows; each edge has a weight, or each row.
    Rules that share a row need the edges alone. At the owner, all is exchanged in the process
    column. At the requester, all is in the process row, and rows of A travel in the column,
    each distinct one once (`RowRequest`).
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
        self._remote_rows = RemoteRows(block, channel)
        relation = block.topology.graph.relations[0]
        with on_all_ranks(channel.world):
            own = LocalLayerGraph(relation, self.num_nodes, rule, block.node_gid[0])
        most = torch.tensor([own.peak, most_rows], dtype=torch.float64)
        self._peak, rows = collectives.all_reduce(most, channel.world, "max").tolist()
        self.most_rows = int(rows)
        self._own = self._local(relation, block.node_gid[0])
        self.scale = self._own.scale
        self._weighted = relation.weight is not None
        # the rows of a layer, their request, and the graph that multiplies them
        self._round: tuple[BulkNodes, RowRequest, LocalLayerGraph] | None = None

    def sums(self, rows: BulkNodes) -> BulkMatrix:
        """Returns the weights of the rows of each minibatch, [k, n] int64."""
        request, server = self._round_of(rows)
        parts = [server.sums(requested) for requested in _requested(request)]
        messages = [self._words(p.rowptr.diff(), p.col, p.values) for p in parts]
        found, _ = request.send_parts(messages, "sums")
        return add([self._read_sums(part, len(rows)) for part in found])

    def column_sums(self) -> Tensor:
        """Returns the weights of all rows, [n] int64. Price: an all_reduce of n words."""
        return collectives.all_reduce(self._own.column_sums(), self.channel.row)

    def extract(self, rows: BulkNodes, cols: BulkNodes) -> LayerEdges:
        """Returns the edges from the columns to the rows of each minibatch."""
        request, server = self._round_of(rows)
        self._round = None
        wanted, each = request.sent > 0, cols.ptr.diff()  # [peers, k], [k]
        sizes = each * wanted
        columns = RowRound(self._axis, sizes)
        coming = columns.table
        places = [row.repeat_interleave(each).nonzero().view(-1) for row in wanted]
        theirs = columns.send_ids(
            cols.id[torch.cat(places)].to(self._remote_rows.word),
            sizes.sum(1).tolist(),
            coming.sum(1).tolist(),
            "columns",
        )
        messages = [
            self._edges(server, asked, BulkNodes(ids.long(), offsets(counts)))
            for asked, ids, counts in zip(
                _requested(request), theirs, coming, strict=True
            )
        ]
        found, _ = request.send_parts(messages, "edges")
        by_peer = request.asked
        parts = [
            self._read_edges(message, len(rows_there), place)
            for message, rows_there, place in zip(found, by_peer, places, strict=True)
        ]
        return LayerEdges.join(parts, by_peer)

    @property
    def _axis(self) -> Any:
        """Returns the axis over which the rows of Q are sent."""
        return self.channel.row if self.sample_at == "owner" else self.channel.col

    def _local(self, rows: Relation, gid: Tensor) -> LocalLayerGraph:
        return LocalLayerGraph(
            rows, self.num_nodes, self.rule, gid, self.most_rows, self._peak
        )

    def _round_of(self, rows: BulkNodes) -> tuple[RowRequest, LocalLayerGraph]:
        """Sends the rows of a layer, once for both its sums and its edges; collective."""
        if self._round is not None and self._round[0] is rows:
            return self._round[1:]
        check_ids(rows.id, self.num_nodes, "rows")
        queries = [RowQuery(0, node) for node in rows.split()]
        if self.sample_at == "owner":
            request, server = self._remote_rows.request(queries), self._own
        else:
            request = self._remote_rows.request_from_row(queries)
            none = [torch.empty(0).long()]
            requested = [w.node for part in request.received for w in part]
            wanted = torch.unique(torch.cat(none + requested))
            server = self._local(self._remote_rows.sorted_rows(0, wanted), wanted)
        self._round = rows, request, server
        return request, server

    # Messages -------------------------------------------------------------------------

    def _words(self, *parts: Tensor) -> Tensor:
        """Packs counts and ids as words, and the last part, 8-byte numbers, unchanged."""
        word = self._remote_rows.word
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
        """Packs the number of edges of each row, the column and id of each edge, weights."""
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

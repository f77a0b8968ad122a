"""Samples neighbourhoods of a graph that no rank holds whole.

[Note: owner and requester] A hop of a bulk is one all_to_allv of the ids of its frontier
and one of the answers, inside the process column, whose ranks hold all blocks between
them. At the owner, in-edges are drawn where they lie, and the draws travel. At the
requester, as in the Graph Partitioned algorithm of [Tripathy24], rows travel, each distinct
one once, and the draws are made from them. A draw is a function of (key, relation, node, the
row), so both, and a graph that every rank holds, give the same minibatch bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch_geometric.sampler import NodeSamplerInput
from torch_geometric.sampler.base import SubgraphType
from torch_geometric.sampler.neighbor_sampler import node_sample

from pyg_distcomm import kernels
from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.process_grid import ProcessGrid
from pyg_distcomm.kernels import threads
from pyg_distcomm.kernels.minibatch import (
    HopDraw,
    Minibatch,
    Relation,
    Request,
    UnweightedNode,
    relation_key,
)
from pyg_distcomm.sampling.graph_block import GraphBlock, read_block
from pyg_distcomm.sampling.graph_source import SampledTopology
from pyg_distcomm.sampling.neighbor_sampler import KeyedNeighborSampler, Output
from pyg_distcomm.sampling.row_service import RemoteRows, RowQuery

PLACES = ("owner", "requester")


class PartitionedNeighborSampler(KeyedNeighborSampler):
    """Samples neighbourhoods of a graph that is spread over the ranks of a channel.

    Minibatches are those of `KeyedNeighborSampler` on the whole graph, bit for bit. All
    calls are collective: all ranks of the channel sample as many minibatches at a time.

    Price of a hop: see `request_price` and `counts_price`. At the owner, for k minibatches
    of b nodes and fan-out s on this rank, at most k b (1 + s) pairs of words are asked and
    answered, of which those of this rank's own block do not travel, and k keys of 8 bytes
    come from each rank of the column, once a bulk; at the requester, the whole rows, and
    with c > 1 most of them once more inside the process row (`RemoteRows.fetch`).

    Args:
        data: a share, from `pdc.partition`.
        num_neighbors, subgraph_type, replace, disjoint, temporal_strategy, time_attr,
        weight_attr, is_sorted, directed, seed: as in `KeyedNeighborSampler`.
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
        if sample_at not in PLACES:
            raise ValueError(
                f"sample_at must be 'owner' or 'requester', got {sample_at!r}"
            )
        self.channel, self.sample_at = channel, sample_at
        self._clock: dict[Any, tuple[Tensor, Tensor]] = {}
        super().__init__(data, num_neighbors, **options)
        self._rows = RemoteRows(self.block, channel)
        self._sampler: Any = kernels.neighbor_sampler(self.block.topology.graph)

    def _read(self, data: Any, **options: Any) -> SampledTopology:
        if options.pop("backward"):
            raise ValueError(
                "sample_direction='backward' needs the out-edges of nodes, which lie with "
                "other ranks; partition a graph with its edges turned around"
            )
        self.time_attr = options["time_attr"]
        self.block: GraphBlock = read_block(data, self.channel, **options)
        return self.block.topology

    @property
    def is_temporal(self) -> bool:
        """Returns whether sampling is temporal, also where no edges here have times."""
        return self.time_attr is not None

    @property
    def _relations(self) -> tuple[Relation, ...]:
        return self.block.topology.graph.relations

    def set_seed_times(self, name: Any, node: Tensor, time: Tensor) -> None:
        """Sets the times of the seed nodes of a type."""
        order = torch.argsort(node)
        self._clock[name] = node[order], time[order]

    def sample_from_nodes(self, inputs: NodeSamplerInput) -> Output:
        """Samples around nodes; collective, see `sample_bulk`."""
        return self.sample_bulk([inputs])[0]

    def sample_bulk(self, bulk: Sequence[NodeSamplerInput]) -> list[Output]:
        """Samples minibatches together: all hops of all of them in a few exchanges."""
        requests = []
        for inputs in bulk:
            hetero = inputs.input_type is not None
            seed = {inputs.input_type: inputs.node} if hetero else inputs.node
            time = inputs.time
            if hetero and time is not None:
                time = {inputs.input_type: time}
            requests.append(self._request(seed, time, self._key(inputs)))
        outs = []
        for inputs, found in zip(bulk, self._grown(requests), strict=True):
            out = self._output(found, inputs.input_type is not None)
            outs.append(self._finished(node_sample(inputs, lambda *_, out=out: out)))
        return outs

    def sample_from_edges(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses: a partitioned graph is sampled around nodes."""
        raise TypeError(
            "a partitioned graph is sampled around nodes only; for links, give "
            "DistLinkNeighborLoader the whole graph (pyg_distcomm.loader.shared keeps one "
            "copy a host)"
        )

    def _tree_time(self, seeds: dict[Any, Tensor], times: Any) -> Tensor:
        found = dict(times or {})
        for name, ids in seeds.items():
            if found.get(name) is None and name in self._clock:
                node, time = self._clock[name]
                found[name] = time[torch.searchsorted(node, ids.long())]
        return super()._tree_time(seeds, found)

    def _grown(self, requests: Sequence[Request]) -> list[Minibatch]:
        """Draws the minibatches of a bulk, hop by hop."""
        with ExitStack() as lent:
            drawings = [
                lent.enter_context(self._sampler.drawing(r, len(requests)))
                for r in requests
            ]
            self._grow(drawings, [r.key for r in requests])
            return [drawing.result() for drawing in drawings]

    def _grow(self, drawings: list[Any], own_keys: list[int]) -> None:
        keys: list[list[int]] = []
        if self.sample_at == "owner":
            keys = collectives.all_gather_counts(own_keys, self.channel.row)
        fan_outs = self._fan_outs()
        for hop in range(max(map(len, fan_outs), default=0)):
            drawing_from = [r for r, f in enumerate(fan_outs) if f[hop] != 0]
            asks = [[d.ask(r, hop) for d in drawings] for r in range(len(fan_outs))]
            if self.sample_at == "owner" and drawing_from:
                self._at_owner(hop, drawings, asks, drawing_from, keys)
            elif self.sample_at == "requester":
                for r in drawing_from:
                    self._at_requester(r, hop, drawings, asks[r])
            for drawing in drawings:
                drawing.end_hop()
        if self.subgraph_type == SubgraphType.induced:
            for r in range(len(self._relations)):
                self._induce(r, drawings)

    def _at_owner(
        self, hop: int, drawings: list[Any], asks: Any, where: list[int], keys: Any
    ) -> None:
        queries = [_query(r, ask) for r in where for ask in asks[r]]
        request = self._rows.ask(queries)
        k, fan_outs = len(drawings), self._fan_outs()
        messages = []
        for peer, theirs in enumerate(request.received):
            segments = []
            for n, r in enumerate(where):
                wanted = theirs[n * k : (n + 1) * k]
                drawn_by = [relation_key(key, r) for key in keys[peer]]
                segments.append((r, self._ask(wanted, drawn_by, fan_outs[r][hop])))
            messages.append(self._rows.answer(segments))
        draws, first = self._rows.draws(request, messages), request.first

        def take(i: int) -> None:
            for n, r in enumerate(where):
                if asks[r][i] is not None:
                    s = n * k + i
                    drawings[i].take(r, hop, draws.of(first[s], first[s + 1]))

        threads.run(take, [(i,) for i in range(k)])

    def _at_requester(
        self, r: int, hop: int, drawings: list[Any], asks: list[HopDraw | None]
    ) -> None:
        relation, places = self._rows.fetch(r, [a.node if a else None for a in asks])

        def draw(i: int) -> None:
            ask, place = asks[i], places[i]
            if ask is not None:
                drawings[i].draw(r, hop, relation, replace(ask, place=place))

        try:
            threads.run(draw, [(i,) for i in range(len(drawings))])
        except UnweightedNode as error:
            raise self._rows.unweighted(error, r) from None

    def _induce(self, r: int, drawings: list[Any]) -> None:
        asks = [drawing.ask_all(r) for drawing in drawings]
        relation, places = self._rows.fetch(r, [ask.node for ask in asks])
        for drawing, ask, place in zip(drawings, asks, places, strict=True):
            drawing.induce(r, relation, replace(ask, place=place))

    def _ask(
        self, queries: Sequence[RowQuery], keys: Sequence[int], fan_out: int
    ) -> HopDraw:
        """Returns another rank's query of a relation as a draw from this rank's rows."""
        node, drawn = torch.cat([w.node for w in queries]), fan_out > 0
        return HopDraw(
            node=node,
            place=self._rows.place_of(queries[0].relation, node),
            keys=keys,
            ends=list(accumulate(len(w.node) for w in queries)),
            fan_out=fan_out,
            replace=self.replace and drawn,
            latest=self.is_temporal and self.temporal_strategy == "last" and drawn,
            name=_joined([w.name for w in queries]),
            limit=_joined([w.limit for w in queries]),
        )


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Joins a column of a message, which all its segments have, or none."""
    found = [part for part in parts if part is not None]
    return torch.cat(found) if found else None


def _query(relation: int, ask: HopDraw | None) -> RowQuery:
    if ask is None:
        return RowQuery(relation, torch.empty(0).long())
    return RowQuery(relation, ask.node, ask.name, ask.limit)

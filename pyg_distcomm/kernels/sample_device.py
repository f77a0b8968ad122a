"""Samples neighbours on any device with torch operations: the minibatches of `sample_cpu`.

All nodes of a hop draw at once. Draws are hashes in int64, which wraps around as uint64 does;
every comparison of floats is of one product or one sequential sum, in float64, so that
minibatches equal those of the CPU's loops bit for bit. One exception: draws without
replacement by weight compare -log(u) / w, and logarithms may differ between devices in the
last bit. The order of two edges can differ if their clocks agree to a relative 2^-52.

[Note: first come] Local ids are given in the order of first appearance. Each appearance of a
node writes its number to the node's slot, which keeps the least. An appearance that finds its
own number there is the first, and a running count of these gives local ids. The result does
not depend on the order of threads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.kernels import sample_jit as loops
from pyg_distcomm.kernels.sample_cpu import MinibatchBuilder
from pyg_distcomm.kernels.sample_ops import (
    UNIT,
    Frontier,
    Minibatch,
    Relation,
    Request,
    SampleGraph,
    UnweightedNode,
    bisect,
    read_rows,
    spread,
    streams_of,
    uniform,
    uniform_picks,
)

TABLE = 1 << 30  # bytes of a slot for each node above which nodes are sorted instead
_FREE = torch.iinfo(torch.int64).max  # marks a free slot


class DeviceSampler:
    """Draws minibatches from one graph on one device. Thread-safe.

    Args:
        graph: the graph, on the host.
        device: the device on which minibatches are drawn and returned.
        pinned: whether the graph stays in pinned host memory, where the device reads it;
            needs CUDA and Triton.

    Memory: the graph on the device, or in pinned memory; 8 bytes per edge more for draws by
    weight, and 8 a node for each minibatch in flight.
    """

    def __init__(
        self, graph: SampleGraph, device: torch.device, pinned: bool = False
    ) -> None:
        self.device, self.pinned, self._host_graph = device, pinned, graph
        self.graph = SampleGraph(
            graph.sizes,
            tuple(
                replace(
                    relation,
                    colptr=self._put(relation.colptr),
                    row=self._put(relation.row),
                    weight=self._put(relation.weight),
                    time=self._put(relation.time),
                )
                for relation in graph.relations
            ),
            tuple(self._put(time) for time in graph.time),
        )
        degrees = [r.colptr.diff() for r in graph.relations]
        most = [int(d.max()) if d.numel() else 0 for d in degrees]
        self.search_steps = [degree.bit_length() for degree in most]  # of a bisection
        self.all_positive = [
            r.weight is None or bool((r.weight > 0).all()) for r in graph.relations
        ]
        self._sums: dict[int, Tensor] = {}

    def _put(self, t: Any) -> Any:
        if t is None:
            return None
        return t.pin_memory() if self.pinned else t.to(self.device)

    def running(self, number: int) -> Tensor:
        """Returns running sums of the weights of each node's in-edges, added in order."""
        if number not in self._sums:
            relation = self._host_graph.relations[number]
            assert relation.weight is not None
            sums = torch.empty(relation.num_edges, dtype=torch.float64)
            args = relation.colptr.numpy(), relation.weight.numpy(), sums.numpy()
            loops.running_sums(*args)
            self._sums[number] = self._put(sums)
        return self._sums[number]

    def __call__(self, request: Request) -> Minibatch:
        """Draws a minibatch.

        Raises:
            UnweightedNode: if weights do not say what to draw.
        """
        return _DeviceMinibatchBuilder(self, request).run()


class _NodeTable:
    """Relabels the nodes of one type in a minibatch, in the order of their local ids."""

    def __init__(self, size: int, device: torch.device, disjoint: bool) -> None:
        self.size, self.disjoint = size, disjoint
        self.node = torch.empty(0, dtype=torch.int64, device=device)
        # the tree if disjoint, else how many equal seeds came before
        self.tree = self.node
        self.ends: list[int] = []
        self._table: Tensor | None = None
        if not disjoint and 8 * size <= TABLE:
            self._table = torch.full((size,), _FREE, device=device)

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return len(self.node)

    def streams(self, hop: int) -> Tensor:
        """Returns the random streams of the nodes."""
        return self.tree

    def add_seeds(self, seed: Tensor, first_tree: int) -> None:
        """Adds seeds; a repeated seed gets a local id of its own, without edges to it."""
        seed = seed.to(self.node.device)
        count = seed.numel()
        place = torch.arange(count, device=seed.device)
        self.node = seed
        self.tree = place + first_tree if self.disjoint else _repeats(seed)
        if self._table is not None:
            self._table.scatter_reduce_(0, seed, place, "amin")

    def _codes(self, tree: Tensor, node: Tensor) -> Tensor:
        return tree * self.size + node if self.disjoint else node

    def _slots(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Returns slots with the local ids of known nodes, and the slots of the codes."""
        if self._table is not None:
            return self._table, codes
        known = len(self.node)
        every = torch.cat([self._codes(self.tree, self.node), codes])
        distinct, slot = torch.unique(every, return_inverse=True)
        table = torch.full_like(distinct, _FREE)
        place = torch.arange(known, device=codes.device)
        table.scatter_reduce_(0, slot[:known], place, "amin")
        return table, slot[known:]

    def label(self, source: Tensor, tree: Tensor) -> Tensor:
        """Adds new sources, in their trees; returns local ids; see [Note: first come]."""
        known, count = len(self.node), len(source)
        if not count:
            return source
        table, slot = self._slots(self._codes(tree, source))
        place = torch.arange(known, known + count, device=source.device)
        table.scatter_reduce_(0, slot, place, "amin")
        first = (table.index_select(0, slot) == place).nonzero().view(-1)
        fresh = torch.arange(known, known + len(first), device=source.device)
        table.scatter_(0, slot[first], fresh)
        self.node = torch.cat([self.node, source[first]])
        trees = tree[first] if self.disjoint else torch.zeros_like(fresh)
        self.tree = torch.cat([self.tree, trees])
        return table.index_select(0, slot)

    def find(self, source: Tensor, tree: Tensor) -> Tensor:
        """Returns local ids of sources, in their trees; `_FREE` for unknown ones."""
        table, slot = self._slots(self._codes(tree, source))
        return table.index_select(0, slot)


class _DeviceMinibatchBuilder(MinibatchBuilder):
    """Builds one minibatch hop by hop, on a device."""

    def __init__(self, sampler: DeviceSampler, request: Request) -> None:
        self.sampler, graph, device = sampler, sampler.graph, sampler.device
        nodes = [_NodeTable(n, device, request.disjoint) for n in graph.sizes]
        super().__init__(graph, request, nodes)
        none = torch.empty((2, 0), dtype=torch.int64, device=device)
        self.index = [none for _ in graph.relations]
        self.edge = [none[0] for _ in graph.relations]
        if self.limits is not None:
            self.limits = self.limits.to(device)

    def as_tensor(self, part: Tensor) -> Tensor:
        """Returns a tensor as it is."""
        return part

    def draw(
        self, number: int, hop: int, relation: Relation, frontier: Frontier
    ) -> None:
        """Draws in-edges of a frontier."""
        _, begin, _ = self._found(number, hop)
        assert frontier.stream is not None
        owner, entry = self._draw(number, relation, frontier, frontier.stream)
        source = read_rows(relation.row, entry * relation.stride).long()
        label = self.nodes[relation.source].label(source, frontier.stream[owner])
        ends = torch.stack([label, owner + begin])
        edge = self._ids(relation, entry)
        self.index[number] = torch.cat([self.index[number], ends], 1)
        self.edge[number] = torch.cat([self.edge[number], edge])
        self.edges_per_hop[number].append(len(entry))

    def _bounds(
        self, number: int, relation: Relation, frontier: Frontier
    ) -> tuple[Tensor, Tensor]:
        """Returns the entries that nodes may draw from."""
        low = read_rows(relation.colptr, frontier.place).long()
        high = read_rows(relation.colptr, frontier.place + 1).long()
        clock = self.graph.time[relation.source]
        time = clock if relation.time is None else relation.time
        if frontier.max_time is None or time is None:
            return low, high
        limits = frontier.max_time

        def is_early(entry: Tensor) -> Tensor:
            if relation.time is None:
                entry = read_rows(relation.row, entry * relation.stride).long()
            return read_rows(time, entry) <= limits

        end = bisect(low, high, self.sampler.search_steps[number], is_early)
        if frontier.latest:
            low = torch.maximum(low, end - frontier.fan_out)
        return low, end

    def _draw(
        self, number: int, relation: Relation, frontier: Frontier, name: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Draws entries; returns the node of each entry, and the entries, node by node."""
        low, high = self._bounds(number, relation, frontier)
        node, fan_out, replaced = frontier.node, frontier.fan_out, frontier.replace
        size = high - low
        choices, weighted = size, relation.weight is not None and fan_out > 0
        if weighted and not self.sampler.all_positive[number]:
            choices = self._count_positive(relation, low, size)
            bare = ((size > 0) & (choices == 0)).nonzero().view(-1)
            if len(bare):
                raise UnweightedNode(number, int(node[bare[0]]))
        draws = choices
        if fan_out >= 0:
            draws = choices.clamp(max=fan_out)
            if replaced:
                draws = torch.where(choices > 0, fan_out, 0)
        owner, within, start = spread(draws)
        entry = low[owner] + within
        partial = draws > 0 if replaced else draws < size
        some = partial.nonzero().view(-1)
        if fan_out < 0 or not len(some):
            return owner, entry
        (key,) = frontier.keys
        low, size, start = low[some], size[some], start[some]
        streams = streams_of(key, name[some], node[some])
        if frontier.labor or (weighted and not replaced):
            labor_key = key if frontier.labor else None
            place, found = self._draw_by_clock(
                number, labor_key, streams, low, size, start, draws[some]
            )
            entry[place] = found
            return owner, entry
        if weighted:
            picks = self._draw_by_weight(number, streams, low, size, fan_out)
        else:
            picks = uniform_picks(streams, size, fan_out, replaced)
        steps = torch.arange(fan_out, device=low.device)
        entry[start[:, None] + steps] = low[:, None] + picks
        return owner, entry

    def _count_positive(self, relation: Relation, low: Tensor, size: Tensor) -> Tensor:
        """Counts the entries of positive weight."""
        assert relation.weight is not None
        owner, within, _ = spread(size)
        positive = (read_rows(relation.weight, low[owner] + within) > 0).long()
        return torch.zeros_like(size).index_add_(0, owner, positive)

    def _draw_by_weight(
        self, number: int, streams: Tensor, low: Tensor, size: Tensor, fan_out: int
    ) -> Tensor:
        """Draws by weight with replacement: the first entry whose running sum exceeds u."""
        u = uniform(streams[:, None], torch.arange(fan_out, device=low.device))
        last = (size - 1)[:, None]
        if self.request.latest:  # few entries, not from a node's first one on
            weight = self.graph.relations[number].weight
            assert weight is not None
            total = torch.zeros_like(u[:, 0])
            sums = []
            for k in range(fan_out):
                entry = low + torch.clamp(size - 1, max=k)
                sums.append(total + read_rows(weight, entry) * (k < size))
                total = sums[-1]
            goal = u * total[:, None]
            picks = sum((s[:, None] <= goal).long() for s in sums)
            return torch.minimum(torch.as_tensor(picks), last)
        running = self.sampler.running(number)
        goal = u * read_rows(running, low + size - 1)[:, None]
        first = torch.zeros_like(goal, dtype=torch.int64)
        steps, high = self.sampler.search_steps[number], last + 1
        found = bisect(
            first,
            high.expand_as(first),
            steps,
            lambda k: read_rows(running, low[:, None] + k) <= goal,
        )
        return torch.minimum(found, last)

    def _draw_by_clock(
        self,
        number: int,
        labor_key: int | None,
        streams: Tensor,
        low: Tensor,
        size: Tensor,
        start: Tensor,
        draws: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Draws the entries of least u, or -log(u) / weight; returns positions and entries."""
        relation = self.graph.relations[number]
        owner, within, _ = spread(size)
        entry, weight = low[owner] + within, None
        if relation.weight is not None:
            weight = read_rows(relation.weight, entry)
            if not self.sampler.all_positive[number]:
                kept = (weight > 0).nonzero().view(-1)
                owner, entry, weight = owner[kept], entry[kept], weight[kept]
        if labor_key is None:
            u = uniform(streams[owner], self._ids(relation, entry))
        else:
            source = read_rows(relation.row, entry * relation.stride).long()
            stream = streams_of(labor_key, torch.zeros_like(source), source)
            pair = owner * self.graph.sizes[relation.source] + source
            u = uniform(stream, _repeats(pair))
        clock = u if weight is None else -torch.log(u + 0.5 * UNIT) / weight
        order = torch.argsort(clock, stable=True)
        order = order[torch.argsort(owner[order], stable=True)]
        owner, entry = owner[order], entry[order]
        count = torch.zeros_like(size).index_add_(0, owner, torch.ones_like(owner))
        rank = torch.arange(len(owner), device=low.device)
        rank = rank - (count.cumsum(0) - count)[owner]
        taken = (rank < draws[owner]).nonzero().view(-1)
        return start[owner[taken]] + rank[taken], entry[taken]

    def induce(self, number: int, relation: Relation, frontier: Frontier) -> None:
        """Replaces the edges of a relation by all edges between the sampled nodes."""
        target, source = self.nodes[relation.target], self.nodes[relation.source]
        low, high = self._bounds(number, relation, frontier)
        owner, within, _ = spread(high - low)
        entry = low[owner] + within
        row = read_rows(relation.row, entry * relation.stride).long()
        label = source.find(row, target.tree[owner])
        kept = (label != _FREE).nonzero().view(-1)
        self.index[number] = torch.stack([label[kept], owner[kept]])
        self.edge[number] = self._ids(relation, entry[kept])

    @staticmethod
    def _ids(relation: Relation, entry: Tensor) -> Tensor:
        if relation.stride == 1:
            return entry
        return read_rows(relation.row, 2 * entry + 1).long()


def _repeats(values: Tensor) -> Tensor:
    """Returns how many equal values come before each."""
    order = torch.argsort(values, stable=True)
    ranked = values[order]
    place = torch.arange(len(values), device=values.device)
    begin = torch.searchsorted(ranked, ranked)
    return torch.empty_like(order).scatter_(0, order, place - begin)

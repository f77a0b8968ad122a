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
from pyg_distcomm.kernels.compile import ready
from pyg_distcomm.kernels.sample_cpu import hop_key
from pyg_distcomm.kernels.sample_ops import (
    UNIT,
    Minibatch,
    Relation,
    Request,
    SampleGraph,
    UnweightedNode,
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
            ready(loops.running_sums, args)()
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

    def seed(self, seed: Tensor, first_tree: int) -> None:
        """Adds seeds; a repeated seed gets a local id of its own, without edges to it."""
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


class _DeviceMinibatchBuilder:
    """Builds one minibatch hop by hop."""

    def __init__(self, sampler: DeviceSampler, request: Request) -> None:
        self.sampler, self.request = sampler, request
        self.graph, device = sampler.graph, sampler.device
        self.nodes = [_NodeTable(n, device, request.disjoint) for n in self.graph.sizes]
        self.none = torch.empty(0, dtype=torch.int64, device=device)
        self.parts: list[list[tuple[Tensor, Tensor, Tensor]]]
        self.parts = [[] for _ in self.graph.relations]
        self.edges_per_hop: list[list[int]] = [[] for _ in self.graph.relations]
        trees = 0
        for node_type, seed in request.seeds:
            self.nodes[node_type].seed(seed.to(device), trees)
            trees += seed.numel()
        time = request.tree_time
        self.limits = time.to(device) if time is not None and request.disjoint else None

    def run(self) -> Minibatch:
        begins = [0 for _ in self.nodes]
        self._end_hop()
        for hop in range(self.request.hops):
            for number, relation in enumerate(self.graph.relations):
                target = self.nodes[relation.target]
                begin, end = begins[relation.target], target.ends[hop]
                fan_out = self.request.fan_outs[number][hop]
                count = 0
                if begin < end and fan_out:
                    count = self._expand(number, hop, fan_out, begin, end)
                self.edges_per_hop[number].append(count)
            begins = [nodes.ends[hop] for nodes in self.nodes]
            self._end_hop()
        if self.request.induced:
            self.parts = [[self._induced(k)] for k in range(len(self.graph.relations))]
        return self._result()

    def _end_hop(self) -> None:
        for nodes in self.nodes:
            nodes.ends.append(len(nodes.node))

    def _expand(self, number: int, hop: int, fan_out: int, begin: int, end: int) -> int:
        """Draws in-edges of the frontier, nodes begin .. end-1; returns the number of edges."""
        relation = self.graph.relations[number]
        target = self.nodes[relation.target]
        node, name = target.node[begin:end], target.tree[begin:end]
        latest = fan_out if self.request.latest and fan_out > 0 else -1
        low, high = self._bounds(number, node, name, latest)
        owner, entry = self._draw(number, hop, fan_out, node, name, low, high)
        source = read_rows(relation.row, entry * relation.stride).long()
        label = self.nodes[relation.source].label(source, name[owner])
        self.parts[number].append((label, owner + begin, self._ids(relation, entry)))
        return len(entry)

    def _bounds(
        self, number: int, node: Tensor, tree: Tensor, latest: int
    ) -> tuple[Tensor, Tensor]:
        """Returns the entries that nodes may draw from; only the `latest`, unless it is -1."""
        relation = self.graph.relations[number]
        low = read_rows(relation.colptr, node).long()
        high = read_rows(relation.colptr, node + 1).long()
        clock = self.graph.time[relation.source]
        time = clock if relation.time is None else relation.time
        if self.limits is None or time is None:
            return low, high
        limit = self.limits[tree]
        first = low
        for _ in range(self.sampler.search_steps[number]):
            open_ = first < high
            middle = torch.where(open_, (first + high) // 2, 0)
            timed = middle
            if relation.time is None:
                timed = read_rows(relation.row, middle * relation.stride).long()
            early = read_rows(time, timed) <= limit
            first = torch.where(open_ & early, middle + 1, first)
            high = torch.where(open_ & ~early, middle, high)
        if latest >= 0:
            low = torch.maximum(low, first - latest)
        return low, first

    def _draw(
        self,
        number: int,
        hop: int,
        fan_out: int,
        node: Tensor,
        name: Tensor,
        low: Tensor,
        high: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Draws entries; returns the node of each entry, and the entries, node by node."""
        request, relation = self.request, self.graph.relations[number]
        size, replaced = high - low, request.replace and fan_out > 0
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
        key = hop_key(request.key, number, relation, hop, request.labor)
        low, size, start = low[some], size[some], start[some]
        streams = streams_of(key, name[some], node[some])
        if request.labor or (weighted and not replaced):
            labor_key = key if request.labor else None
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
        first, high = torch.zeros_like(goal, dtype=torch.int64), last + 1
        high = high.expand_as(first)
        for _ in range(self.sampler.search_steps[number]):
            open_ = first < high
            middle = torch.where(open_, (first + high) // 2, 0)
            below = read_rows(running, low[:, None] + middle) <= goal
            first = torch.where(open_ & below, middle + 1, first)
            high = torch.where(open_ & ~below, middle, high)
        return torch.minimum(first, last)

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

    def _induced(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns all edges between the sampled nodes."""
        relation = self.graph.relations[number]
        target, source = self.nodes[relation.target], self.nodes[relation.source]
        low, high = self._bounds(number, target.node, target.tree, -1)
        owner, within, _ = spread(high - low)
        entry = low[owner] + within
        row = read_rows(relation.row, entry * relation.stride).long()
        label = source.find(row, target.tree[owner])
        kept = (label != _FREE).nonzero().view(-1)
        return label[kept], owner[kept], self._ids(relation, entry[kept])

    @staticmethod
    def _ids(relation: Relation, entry: Tensor) -> Tensor:
        if relation.stride == 1:
            return entry
        return read_rows(relation.row, 2 * entry + 1).long()

    def _result(self) -> Minibatch:
        ends = [torch.tensor([0, *nodes.ends]) for nodes in self.nodes]
        none = (self.none, self.none, self.none)
        columns = [
            [torch.cat(column) for column in zip(none, *parts, strict=True)]
            for parts in self.parts
        ]
        return Minibatch(
            node=[nodes.node for nodes in self.nodes],
            tree=[nodes.tree for nodes in self.nodes]
            if self.request.disjoint
            else None,
            edge_index=[torch.stack(found[:2]) for found in columns],
            edge=[found[2] for found in columns],
            nodes_per_hop=[end.diff().tolist() for end in ends],
            edges_per_hop=self.edges_per_hop,
        )


def _repeats(values: Tensor) -> Tensor:
    """Returns how many equal values come before each."""
    order = torch.argsort(values, stable=True)
    ranked = values[order]
    place = torch.arange(len(values), device=values.device)
    begin = torch.searchsorted(ranked, ranked)
    return torch.empty_like(order).scatter_(0, order, place - begin)

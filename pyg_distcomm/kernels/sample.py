"""Samples neighbours on the CPU: compiled loops, one minibatch on one thread.

`sample` below is the definition, in plain torch and Python, of the same bits.

Draws of a node come from a generator of its own,

    s = mix(mix(key ^ mix(t + G)) ^ mix(v + G)),    u_j = (mix(s + (j + 1) G) >>> 11) / 2^53

with mix and G those of `reference.keyed_bits`, v the node and t its tree: for disjoint
sampling the place of its seed, otherwise 0, or for a seed how many equal ones came before.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyg_distcomm.kernels import sample_jit as loops
from pyg_distcomm.kernels import threads
from pyg_distcomm.kernels.compile import ready
from pyg_distcomm.kernels.minibatch import (
    Draws,
    HopDraw,
    Minibatch,
    Relation,
    Request,
    SampleGraph,
    UnweightedNode,
    relation_key,
)
from pyg_distcomm.kernels.node_relabeler import NodeRelabeler, Table, grown

GRAIN = 1 << 14  # nodes or entries that are worth a thread
TABLES = 1 << 28  # bytes of tables, one slot a node, beyond which nodes are hashed

_INDEX = torch.int64

Array = NDArray[Any]
Room = Callable[[int], tuple[Array, int]]


class Sampler:
    """Draws minibatches from one graph; any number of threads may call it at once."""

    def __init__(self, graph: SampleGraph) -> None:
        self.graph = graph
        # minibatches in flight have one each; used again, so bounded by the threads
        self._tables: deque[list[Table]] = deque()

    @staticmethod
    def draw_rows(*args: Any) -> tuple[Array, Array, int]:
        """Draws from rows for whoever asks; see `draw_rows`."""
        return draw_rows(*args)

    @staticmethod
    def write_pairs(relation: Relation, entry: Array, words: Tensor, at: int) -> None:
        """Writes the source and id of each entry into a message, from word `at` on."""
        args = (relation.row.numpy(), entry, words.numpy(), at)
        threads.run_split(ready(loops.write_pairs, args, 2), len(entry), GRAIN)

    @staticmethod
    def locate(
        messages: Sequence[tuple[Tensor, Tensor]], own: int, far: Tensor
    ) -> Draws:
        """Finds each node's draws in the messages that have come.

        Args:
            messages: for each rank, what it says (how many draws each node has, then the
                pairs of all), and which of those who asked its nodes are.
            own: which of the messages is this rank's; the others stand in `far`, in order.
            far: their words.
        """
        begin, count = torch.empty((2, sum(len(p) for _, p in messages)), dtype=_INDEX)
        base = 0
        for rank, (words, order) in enumerate(messages):
            near = rank == own
            arrays = words.numpy(), order.numpy(), near, 0 if near else base
            ready(loops.locate, (*arrays, begin.numpy(), count.numpy()))()
            base += 0 if near else len(words)
        return Draws(begin, count, messages[own][0], far)

    def __call__(self, request: Request) -> Minibatch:
        """Draws a minibatch.

        Raises:
            UnweightedNode: if weights do not say what to draw.
        """
        with self.drawing(request) as drawing:
            return drawing.run()

    @contextmanager
    def drawing(self, request: Request, beside: int = 1) -> Iterator[Drawing]:
        """Lends a minibatch the tables it grows with, `beside` of them at a time."""
        tables = None
        if not request.disjoint and 8 * sum(self.graph.sizes) * beside <= TABLES:
            try:
                tables = self._tables.pop()
            except IndexError:
                tables = [Table(size) for size in self.graph.sizes]
        try:
            yield Drawing(self.graph, request, tables)
        finally:
            if tables is not None:
                self._tables.append(tables)


class Drawing:
    """One minibatch while it grows, wherever its in-edges are drawn."""

    def __init__(
        self,
        graph: SampleGraph,
        request: Request,
        tables: list[Table] | None = None,
    ) -> None:
        self.graph, self.request = graph, request
        self.seen = [
            NodeRelabeler(size, tables[t] if tables else None, request.disjoint)
            for t, size in enumerate(graph.sizes)
        ]
        self.index = [np.empty((2, 0), np.int64) for _ in graph.relations]
        self.edge = [np.empty(0, np.int64) for _ in graph.relations]
        self.drawn: list[list[int]] = [[] for _ in graph.relations]
        trees = 0
        for kind, seed in request.seeds:
            self.seen[kind].seed(_vector(seed), trees)
            trees += seed.numel()
        self.end_hop()

    def run(self) -> Minibatch:
        """Draws everything from the relations of the graph."""
        for hop in range(self.request.hops):
            for number, relation in enumerate(self.graph.relations):
                ask = self.ask(number, hop)
                if ask is not None:
                    self.draw(number, hop, relation, ask)
            self.end_hop()
        if self.request.induced:
            for number, relation in enumerate(self.graph.relations):
                self.induce(number, relation, self.ask_all(number))
        return self.result()

    def end_hop(self) -> None:
        """Notes which nodes a hop has found: those that draw at the next."""
        for seen in self.seen:
            seen.ends.append(seen.known)

    def ask(self, number: int, hop: int) -> HopDraw | None:
        """Returns who draws from a relation at a hop; None if nobody does."""
        relation = self.graph.relations[number]
        fan_out = self.request.fan_outs[number][hop]
        target = self.seen[relation.target]
        begin, end = target.frontier(hop)
        if begin == end or fan_out == 0:
            self.drawn[number].append(0)
            return None
        names = target.names(hop)
        return self._asked(
            number, begin, end, fan_out, None if names is None else names[begin:end]
        )

    def ask_all(self, number: int) -> HopDraw:
        """Returns an ask for all in-edges of all nodes found, to induce a subgraph."""
        target = self.seen[self.graph.relations[number].target]
        return self._asked(number, 0, target.known, -1, None)

    def _asked(
        self, number: int, begin: int, end: int, fan_out: int, names: Array | None
    ) -> HopDraw:
        request = self.request
        target = self.seen[self.graph.relations[number].target]
        node = torch.from_numpy(target.node[begin:end])
        limit = None
        if request.tree_time is not None and target.tree is not None:
            limit = request.tree_time[torch.from_numpy(target.tree[begin:end])]
        return HopDraw(
            node=node,
            place=node,
            keys=(relation_key(request.key, number),),
            ends=(node.numel(),),
            fan_out=fan_out,
            replace=request.replace and fan_out > 0,
            latest=request.latest and fan_out > 0,
            name=None if names is None else torch.from_numpy(names),
            limit=limit,
        )

    def draw(self, number: int, hop: int, relation: Relation, ask: HopDraw) -> None:
        """Draws for an ask, from rows that are here."""
        try:
            start, edge, at = draw_rows(
                relation, self._clock(relation), ask, lambda n: self._room(number, n)
            )
        except UnweightedNode as error:
            raise UnweightedNode(number, error.node) from None
        source, row = self.index[number][0], relation.row.numpy()
        ready(loops.fetch, (row, relation.stride, edge, source, at))()
        self._enter(number, hop, start, at)

    def take(self, number: int, hop: int, draws: Draws) -> None:
        """Takes in draws made elsewhere, those of each node of the ask."""
        count = draws.count.numpy()
        edge, at = self._room(number, int(count.sum()))
        words = draws.near.numpy(), draws.far.numpy()
        first, _ = self.seen[self.graph.relations[number].target].frontier(hop)
        index = self.index[number]
        args = (draws.begin.numpy(), count, *words, first, *index, edge, at)
        ready(loops.take_rows, args)()
        self._label(number, at)

    def _room(self, number: int, total: int) -> tuple[Array, int]:
        """Makes room for the draws of a hop; returns where edge ids go, and from."""
        before = len(self.edge[number])
        size = before + total
        self.index[number] = grown(self.index[number], before, size, exact=True)
        self.edge[number] = grown(self.edge[number], before, size, exact=True)
        return self.edge[number], before

    def _enter(self, number: int, hop: int, start: Array, at: int) -> None:
        """Turns the sources drawn at a hop, in place, into local ids; keeps targets."""
        index = self.index[number]
        begin, _ = self.seen[self.graph.relations[number].target].frontier(hop)
        ready(loops.point_to, (start, begin, index[1], at))()
        self._label(number, at)

    def _label(self, number: int, at: int) -> None:
        """Turns the sources of draws from `at` on into local ids."""
        relation, (source, target) = self.graph.relations[number], self.index[number]
        ends = self.seen[relation.source], self.seen[relation.target]
        ends[0].label(source, at, target, ends[1])
        self.drawn[number].append(len(source) - at)

    def _clock(self, relation: Relation) -> Tensor | None:
        return self.graph.time[relation.source]

    def induce(self, number: int, relation: Relation, ask: HopDraw) -> None:
        """Replaces the edges of a relation by all those between the nodes found."""
        source, target = self.seen[relation.source], self.seen[relation.target]
        bounds = _bounds(relation, self._clock(relation), ask)
        place, entry, label = source.known_edges(relation, *bounds, target)
        self.index[number] = np.stack([label, place])
        row = relation.row.numpy()
        self.edge[number] = row[2 * entry + 1] if relation.stride == 2 else entry

    def result(self) -> Minibatch:
        """Returns the minibatch."""
        nodes = [_tensor(seen.node[: seen.known]) for seen in self.seen]
        trees = [
            _tensor(seen.tree[: seen.known])
            for seen in self.seen
            if seen.tree is not None
        ]
        return Minibatch(
            node=nodes,
            tree=trees if self.request.disjoint else None,
            edge_index=[torch.from_numpy(index) for index in self.index],
            edge=[torch.from_numpy(e.astype(np.int64, copy=False)) for e in self.edge],
            nodes_per_hop=[np.diff(s.ends, prepend=0).tolist() for s in self.seen],
            edges_per_hop=self.drawn,
        )


def draw_rows(
    relation: Relation, clock: Tensor | None, ask: HopDraw, room: Room
) -> tuple[Array, Array, int]:
    """Draws in-edges of the nodes of an ask.

    Args:
        relation: where they are.
        clock: the times of its sources, if nodes have times and its entries none.
        ask: who draws, and how.
        room: returns an array and where in it to write, for so many draws.

    Returns:
        offsets of each node's draws [m + 1], the array with places of entries, and where
        in it the first stands.

    Raises:
        UnweightedNode: if all in-edges of a node have weight zero.
    """
    low, high = _bounds(relation, clock, ask)
    weight = None if relation.weight is None else relation.weight.numpy()
    start = np.empty(len(low) + 1, np.int64)
    args = (low, high, weight, ask.fan_out, ask.replace, start)
    threads.run_split(ready(loops.count, args, 2), len(low), GRAIN)
    total = ready(loops.add_up, (start,))()
    if total < 0:
        raise UnweightedNode(0, int(ask.node[-1 - total]))
    position, at = room(int(total))
    name = None if ask.name is None else ask.name.numpy()
    keys, ends = np.array(ask.keys, np.int64), np.array(ask.ends, np.int64)
    nodes = (keys, ends, ask.node.numpy(), name, low, high, start, ask.replace)
    if weight is None:
        draw = ready(loops.draw, (*nodes, position, at), 2)
    else:
        edges = relation.row.numpy(), relation.stride, weight
        draw = ready(loops.draw_weighted, (*nodes, *edges, position, at), 2)
    threads.run_split(draw, len(keys), 1)
    return start, position, at


def _bounds(
    relation: Relation, clock: Tensor | None, ask: HopDraw
) -> tuple[Array, Array]:
    """Returns the entries that the nodes of an ask may draw from."""
    count = ask.place.numel()
    low, high = np.empty((2, count), np.int64)
    args = (relation.colptr.numpy(), ask.place.numpy(), low, high)
    threads.run_split(ready(loops.bounds, args, 2), count, GRAIN)
    time = clock if relation.time is None else relation.time
    if ask.limit is None or time is None:
        return low, high
    row = relation.row.numpy()
    timed = (row, relation.stride, time.numpy(), relation.time is None)
    keep = ask.fan_out if ask.latest else -1
    narrow = ready(loops.narrow, (*timed, ask.limit.numpy(), keep, low, high), 2)
    threads.run_split(narrow, count, GRAIN)
    return low, high


def _vector(t: Tensor) -> Array:
    return t.contiguous().numpy()


def _tensor(part: Array) -> Tensor:
    return torch.from_numpy(part.copy())


_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def sample(graph: SampleGraph, request: Request) -> Minibatch:
    """Draws one minibatch, a node at a time; see `Request` for what is asked.

    At each hop, for each relation in order, each node that the hop before found first
    draws ``fan_out`` of its in-edges (all if it has fewer, or if -1). Sources not seen
    before become nodes, in the order in which they are found.
    """
    return _Drawing(graph, request).run()


class _Drawing:
    def __init__(self, graph: SampleGraph, request: Request) -> None:
        self.graph, self.request = graph, request
        self.nodes: list[list[tuple[int, int]]] = [[] for _ in graph.sizes]
        self.label: list[dict[tuple[int, int], int]] = [{} for _ in graph.sizes]
        self.edges: list[list[tuple[int, int, int]]] = [[] for _ in graph.relations]

    def run(self) -> Minibatch:
        self._seed()
        ends = [[len(nodes)] for nodes in self.nodes]
        drawn: list[list[int]] = [[] for _ in self.graph.relations]
        for hop in range(self.request.hops):
            for number in range(len(self.graph.relations)):
                end = ends[self.graph.relations[number].target]
                begin = end[hop - 1] if hop else 0
                drawn[number].append(self._expand(number, hop, begin, end[hop]))
            for end, nodes in zip(ends, self.nodes, strict=True):
                end.append(len(nodes))
        if self.request.induced:
            self.edges = [self._induced(r) for r in self.graph.relations]
        return self._result(ends, drawn)

    def _seed(self) -> None:
        """Enters the seeds; the copy of a seed is a node that no edge points to."""
        trees = 0
        for kind, seed in self.request.seeds:
            copies: dict[int, int] = {}
            for place, v in enumerate(seed.tolist()):
                copies[v] = copies.get(v, -1) + 1
                tree = trees + place if self.request.disjoint else copies[v]
                self.label[kind].setdefault((tree, v), len(self.nodes[kind]))
                self.nodes[kind].append((tree, v))
            trees += seed.numel()

    def _expand(self, number: int, hop: int, begin: int, end: int) -> int:
        relation = self.graph.relations[number]
        before = len(self.edges[number])
        for target in range(begin, end):
            tree, v = self.nodes[relation.target][target]
            entries = self._eligible(relation, tree, v)
            fan_out = self.request.fan_outs[number][hop]
            if self.request.latest and fan_out >= 0:
                entries = entries[len(entries) - min(fan_out, len(entries)) :]
            for e in self._draw(number, fan_out, tree, v, entries):
                name = (tree if self.request.disjoint else 0, _source(relation, e))
                nodes, label = self.nodes[relation.source], self.label[relation.source]
                if name not in label:
                    label[name] = len(nodes)
                    nodes.append(name)
                self.edges[number].append((label[name], target, _edge_id(relation, e)))
        return len(self.edges[number]) - before

    def _eligible(self, relation: Relation, tree: int, v: int) -> list[int]:
        """Returns the in-edges of a node that are no later than its tree."""
        entries = range(int(relation.colptr[v]), int(relation.colptr[v + 1]))
        limit, time = self.request.tree_time, self.graph.time[relation.source]
        if limit is None or (relation.time is None and time is None):
            return list(entries)
        if relation.time is not None:
            return [e for e in entries if relation.time[e] <= limit[tree]]
        assert time is not None
        return [e for e in entries if time[_source(relation, e)] <= limit[tree]]

    def _draw(
        self, number: int, fan_out: int, tree: int, v: int, entries: list[int]
    ) -> list[int]:
        relation = self.graph.relations[number]
        weight, replace = relation.weight, self.request.replace
        choices = len(entries)
        if weight is not None and fan_out > 0 and choices:
            choices = int((weight[entries] > 0).sum())
            if not choices:
                raise UnweightedNode(number, v)
        if fan_out == 0 or not entries:
            return []
        if fan_out < 0 or (choices <= fan_out and not replace):
            if fan_out < 0 or choices == len(entries):
                return entries
        key = (self.request.key + number * _GOLDEN) % (1 << 63)
        generator = _mix(
            _mix(key ^ _mix(tree + _GOLDEN & _WORD)) ^ _mix(v + _GOLDEN & _WORD)
        )
        draws = fan_out if replace else min(fan_out, choices)
        if weight is None:
            return [entries[k] for k in _floyd(generator, len(entries), draws, replace)]
        if replace:
            return _by_running_sum(generator, entries, weight, draws)
        return _by_clocks(generator, relation, entries, draws)

    def _induced(self, relation: Relation) -> list[tuple[int, int, int]]:
        found = []
        for target, (tree, v) in enumerate(self.nodes[relation.target]):
            for e in self._eligible(relation, tree, v):
                name = (tree if self.request.disjoint else 0, _source(relation, e))
                label = self.label[relation.source].get(name)
                if label is not None:
                    found.append((label, target, _edge_id(relation, e)))
        return found

    def _result(self, ends: list[list[int]], drawn: list[list[int]]) -> Minibatch:
        trees = [_ids([tree for tree, _ in nodes]) for nodes in self.nodes]
        edges = [torch.tensor(found).view(-1, 3).long().T for found in self.edges]
        return Minibatch(
            node=[_ids([v for _, v in nodes]) for nodes in self.nodes],
            tree=trees if self.request.disjoint else None,
            edge_index=[found[:2].contiguous() for found in edges],
            edge=[found[2].contiguous() for found in edges],
            nodes_per_hop=[
                [b - a for a, b in zip([0, *end], end, strict=False)] for end in ends
            ],
            edges_per_hop=drawn,
        )


def _floyd(generator: int, size: int, draws: int, replace: bool) -> list[int]:
    """Draws places in 0 .. size-1; without replacement as [Bentley87] has it."""
    picks: list[int] = []
    for k in range(draws):
        top = size if replace else size - draws + k + 1
        pick = int(_uniform(generator, k) * top)
        picks.append(top - 1 if not replace and pick in picks else pick)
    return picks


def _by_running_sum(
    generator: int, entries: list[int], weight: Tensor, draws: int
) -> list[int]:
    """Draws with replacement: the first entry whose running sum exceeds u times the sum."""
    running = weight[entries].double().cumsum(0)
    picks = []
    for k in range(draws):
        goal = torch.tensor(_uniform(generator, k) * float(running[-1])).double()
        place = int(torch.searchsorted(running, goal, right=True))
        picks.append(entries[min(place, len(entries) - 1)])
    return picks


def _by_clocks(
    generator: int, relation: Relation, entries: list[int], draws: int
) -> list[int]:
    """Draws without replacement: the entries with the least -log(u) / weight.

    The number u of an edge is keyed by its id ([Efraimidis06]).
    """
    assert relation.weight is not None
    clocks = []
    for e in entries:
        weight = float(relation.weight[e])
        if weight > 0:
            u = _uniform(generator, _edge_id(relation, e)) + 2.0**-54
            clocks.append((-math.log(u) / weight, e))
    return [e for _, e in sorted(clocks)[:draws]]


def _source(relation: Relation, e: int) -> int:
    return int(relation.row[e * relation.stride])


def _edge_id(relation: Relation, e: int) -> int:
    return int(relation.row[2 * e + 1]) if relation.stride == 2 else e


def _uniform(generator: int, draw: int) -> float:
    return (_mix(generator + (draw + 1) * _GOLDEN & _WORD) >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    return z ^ (z >> 31)


def _ids(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)

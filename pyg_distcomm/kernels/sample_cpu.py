"""Samples neighbours on the CPU: compiled loops, one minibatch on one thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyg_distcomm.kernels import memory, threads
from pyg_distcomm.kernels import sample_jit as loops
from pyg_distcomm.kernels.compile import ready
from pyg_distcomm.kernels.id_lookup import NodeRelabeler, Table, grown
from pyg_distcomm.kernels.minibatch import (
    Draws,
    HopDraw,
    Minibatch,
    Relation,
    Request,
    SampleGraph,
    UnweightedNode,
    hop_key,
)

MANY = 1 << 24  # edges of a hop from which room for them is looked for
# of an edge: both ends and its id, twice where a minibatch is put together
EDGE_BYTES = 32
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
        self.weight: list[list[Tensor]] = [[] for _ in graph.relations]
        trees = 0
        for kind, seed in request.seeds:
            self.seen[kind].seed(seed.contiguous().numpy(), trees)
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
        names = None if names is None else names[begin:end]
        return self._asked(number, begin, end, fan_out, names, hop)

    def ask_all(self, number: int) -> HopDraw:
        """Returns an ask for all in-edges of all nodes found, to induce a subgraph."""
        target = self.seen[self.graph.relations[number].target]
        return self._asked(number, 0, target.known, -1, None)

    def _asked(
        self,
        number: int,
        begin: int,
        end: int,
        fan_out: int,
        names: Array | None,
        hop: int = 0,
    ) -> HopDraw:
        request, relation = self.request, self.graph.relations[number]
        target = self.seen[relation.target]
        node = torch.from_numpy(target.node[begin:end])
        limit = None
        if request.tree_time is not None and target.tree is not None:
            limit = request.tree_time[torch.from_numpy(target.tree[begin:end])]
        return HopDraw(
            node=node,
            place=node,
            keys=(hop_key(request.key, number, relation, hop, request.labor),),
            ends=(node.numel(),),
            fan_out=fan_out,
            replace=request.replace and fan_out > 0,
            latest=request.latest and fan_out > 0,
            name=None if names is None else torch.from_numpy(names),
            limit=limit,
            labor=request.labor and fan_out > 0,
            rounds=request.rounds,
        )

    def draw(self, number: int, hop: int, relation: Relation, ask: HopDraw) -> None:
        """Draws for an ask, from rows that are here."""
        clock, room = self.graph.time[relation.source], partial(self._room, number)
        try:
            if ask.rounds:
                start, edge, at, weight = draw_important(relation, ask, room)
                self.weight[number].append(torch.from_numpy(weight))
            else:
                start, edge, at = draw_rows(relation, clock, ask, room)
        except UnweightedNode as error:
            raise UnweightedNode(number, error.node) from None
        source, row = self.index[number][0], relation.row.numpy()
        ready(loops.fetch, (row, relation.stride, edge, source, at))()
        begin, _ = self.seen[self.graph.relations[number].target].frontier(hop)
        ready(loops.point_to, (start, begin, self.index[number][1], at))()
        self._label(number, at)

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

    def _label(self, number: int, at: int) -> None:
        """Turns the sources of draws from `at` on into local ids."""
        relation, (source, target) = self.graph.relations[number], self.index[number]
        ends = self.seen[relation.source], self.seen[relation.target]
        ends[0].label(source, at, target, ends[1])
        self.drawn[number].append(len(source) - at)

    def induce(self, number: int, relation: Relation, ask: HopDraw) -> None:
        """Replaces the edges of a relation by all those between the nodes found."""
        source, target = self.seen[relation.source], self.seen[relation.target]
        bounds = _bounds(relation, self.graph.time[relation.source], ask)
        place, entry, label = source.known_edges(relation, *bounds, target)
        self.index[number] = np.stack([label, place])
        row = relation.row.numpy()
        self.edge[number] = row[2 * entry + 1] if relation.stride == 2 else entry

    def result(self) -> Minibatch:
        """Returns the minibatch."""
        none = torch.empty(0, dtype=torch.float64)
        weight = [torch.cat([none, *parts]) for parts in self.weight]
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
            weight=weight if self.request.rounds else None,
        )


CLOSE, MOST_ROUNDS = 1e-4, 100  # the change in distinct sources that ends the rounds


def draw_important(
    relation: Relation, ask: HopDraw, room: Room
) -> tuple[Array, Array, int, Array]:
    """Draws in-edges by importances of their sources: LABOR-1 and later ([Balin23]).

    Source t has the importance pi_t, at first 1. Node s with d in-edges draws those with
    r_t < c_s pi_t, where r_t is one random number of t, and c_s is such that

        sum over its in-edges of 1 / min(1, c_s pi_t)  =  d^2 / k,

    so that the variance of its estimate is that of k draws; where d <= k it takes all. Each
    round has pi_t <- pi_t max_s c_s, by which fewer distinct sources are drawn.

    Args:
        relation: where the in-edges are.
        ask: the nodes of one minibatch.
        room: see `draw_rows`.

    Returns:
        as `draw_rows`, and the weight of each edge drawn, 1 / (d min(1, c_s pi_t)).
    """
    low, high = _bounds(relation, None, ask)
    first = np.zeros(len(low) + 1, np.int64)
    np.cumsum(high - low, out=first[1:])
    source = np.empty(first[-1], np.int64)
    rows = (relation.row.numpy(), relation.stride, low, first, source)
    ready(loops.sources_of, rows)()
    node, place = np.unique(source, return_inverse=True)
    place = place.reshape(-1)
    importance, scale = np.ones(len(node)), np.empty(len(low))
    best, expected = np.empty(len(node)), np.inf
    rounds = MOST_ROUNDS if ask.rounds < 0 else ask.rounds
    for number in range(rounds + 1):
        solve = (first, place, importance, ask.fan_out, scale)
        threads.run_split(ready(loops.solve_scales, solve, 2), len(low), GRAIN)
        best[:] = 0
        ready(loops.most_scale, (first, place, scale, best))()
        found = float(np.minimum(importance * best, 1).sum())
        done = ask.rounds < 0 and expected - found <= CLOSE * found
        if number == rounds or done:
            break
        importance, expected = importance * best, found
    chosen = (np.int64(ask.keys[0]), node, first, place, importance, scale)
    start = np.empty(len(low) + 1, np.int64)
    total = ready(loops.count_important, (*chosen, start))()
    edge, at = room(int(total))
    weight = np.empty(total)
    ready(loops.draw_important, (*chosen, low, edge, at, weight))()
    return start, edge, at, weight


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
        ValueError: if memory does not hold the draws.
    """
    low, high = _bounds(relation, clock, ask)
    weight = None if relation.weight is None else relation.weight.numpy()
    start = np.empty(len(low) + 1, np.int64)
    args = (low, high, weight, ask.fan_out, ask.replace, start)
    threads.run_split(ready(loops.count, args, 2), len(low), GRAIN)
    total = ready(loops.add_up, (start,))()
    if total < 0:
        raise UnweightedNode(0, int(ask.node[-1 - total]))
    if total >= MANY:
        _check_room(int(total), len(low), ask.fan_out)
    position, at = room(int(total))
    name = None if ask.name is None else ask.name.numpy()
    keys, ends = np.array(ask.keys, np.int64), np.array(ask.ends, np.int64)
    nodes = (keys, ends, ask.node.numpy(), name, low, high, start, ask.replace)
    edges = relation.row.numpy(), relation.stride, weight
    if ask.labor:
        rows = (keys, ends, low, high, start, *edges, position, at)
        draw = ready(loops.draw_labor, rows, 2)
    elif weight is None:
        draw = ready(loops.draw, (*nodes, position, at), 2)
    else:
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


def _check_room(edges: int, nodes: int, fan_out: int) -> None:
    """Refuses draws that memory does not hold.

    Raises:
        ValueError: with what they would take, and what is free.
    """
    free, size = memory.available(), edges * EDGE_BYTES
    if free is not None and size > free:
        raise ValueError(
            f"num_neighbors={fan_out} draws {edges:,} edges for {nodes:,} nodes of one hop, "
            f"{size / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB are free; give a smaller "
            "fan-out, or a smaller batch_size"
        )


def _tensor(part: Array) -> Tensor:
    return torch.from_numpy(part.copy())

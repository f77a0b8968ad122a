"""Samples neighbours on the CPU: compiled loops, one minibatch on one thread.

`NodeRelabeler` replaces global ids by local ids, in the order of arrival. It looks them up in
a table, which has a slot with a stamp and a local id for each node of a type, or in a hash
table of node names with labels, their local ids, beside them.
"""

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

from pyg_distcomm.kernels import core_jit, memory, threads
from pyg_distcomm.kernels import sample_jit as loops
from pyg_distcomm.kernels.sample_ops import (
    Frontier,
    Minibatch,
    Relation,
    RemoteDraws,
    Request,
    SampleGraph,
    UnweightedNode,
)

CHECKED_EDGES = 1 << 24  # edges of one hop from which the free memory is checked first
# bytes of an edge: both ends and its id, twice while a minibatch is put together
EDGE_BYTES = 32
GRAIN = 1 << 14  # nodes, entries or lookups that are worth a thread
ROWS = 1 << 15  # numbers of rows copied that are
MIN_SLOTS = 1 << 10  # slots of a hash table at first
TABLES = 1 << 28  # bytes of tables (one slot per node) above which nodes are hashed

_INDEX = torch.int64

Array = NDArray[Any]
# takes a number of draws; returns an array, and the position to write them from
Allocate = Callable[[int], tuple[Array, int]]


def check_ids(ids: Tensor, size: int, what: str, of: str = "", do: str = "") -> None:
    """Raises ValueError for ids outside 0 .. size - 1; says of what, and what to do."""
    if not ids.numel():
        return
    low, high = (int(v) for v in ids.long().aminmax())
    if low < 0 or high >= size:
        raise ValueError(
            f"{what} span {low} .. {high}, but there are {size}{of} (0 .. {size - 1}){do}"
        )


def check_seeds(ids: Tensor) -> Tensor:
    """Returns seeds; raises ValueError unless they are a vector of ids."""
    if ids.shape == (0,):
        return ids
    if ids.dim() != 1 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(
            f"seeds must be a vector of node ids, got {list(ids.shape)} of {ids.dtype}"
        )
    return ids


class Table:
    """Holds a slot for each node of a type; taking the next stamp empties it."""

    def __init__(self, size: int) -> None:
        self.slot = memory.advise(torch.empty(size, dtype=torch.int64)).zero_().numpy()
        self.stamp = 0

    def clear(self) -> None:
        self.stamp += 1
        if self.stamp == 1 << 31:
            self.slot[:], self.stamp = 0, 1


class NodeRelabeler:
    """Relabels the nodes of one type in a minibatch, in the order of arrival.

    Args:
        size: the number of nodes of the type.
        table: the lookup table; None to use a hash table.
        disjoint: whether each seed has a tree of its own, with local ids of its own.
    """

    def __init__(self, size: int, table: Table | None, disjoint: bool) -> None:
        self.size, self.disjoint = size, disjoint
        self.node = np.empty(0, np.int64)
        self.tree: Array | None = np.empty(0, np.int64) if disjoint else None
        self.copy: Array | None = None  # for each seed, how many equal ones came before
        self.num_nodes = 0
        self.ends: list[int] = []  # how many nodes the seeds and each hop leave
        self.labels: Array | None = None  # of a hash table
        if table is None:
            self._rehash(MIN_SLOTS)
        else:
            table.clear()
            self.table = table.slot, table.stamp, size

    def add_seeds(self, seed: Tensor, first_tree: int) -> None:
        """Adds seeds, the first of them in tree ``first_tree``."""
        self._reserve(len(seed))
        self.node[: len(seed)] = seed.numpy()
        if self.tree is not None:
            self.tree[: len(seed)] = np.arange(first_tree, first_tree + len(seed))
        copy = np.empty(len(seed), np.int64)
        repeats = self._enter(len(seed), copy)
        self.num_nodes = len(seed)
        if repeats and not self.disjoint:
            self.copy = copy

    def relabel(
        self, source: Array, at: int, target: Array, other: NodeRelabeler
    ) -> None:
        """Replaces ``source[at:]`` by local ids; their targets are nodes of ``other``."""
        self._reserve(len(source) - at)
        args = (self.table, self.labels, (source, target), at, other.tree)
        more = (*args, self.node, self.tree, self.num_nodes)
        self.num_nodes = loops.relabel(*more)

    def induced_edges(
        self, relation: Relation, low: Array, high: Array, other: NodeRelabeler
    ) -> Array:
        """Finds the in-edges of nodes of ``other`` from nodes here; see `known_edges`."""
        entries = relation.row.numpy(), relation.stride
        args = (self.table, self.labels, other.tree, entries, low, high)
        return loops.known_edges(*args)

    def streams(self, hop: int) -> Array | None:
        """Returns the random streams of the nodes at a hop; None if all are stream 0."""
        return self.tree if self.disjoint else self.copy if hop == 0 else None

    def _reserve(self, more: int) -> None:
        """Grows the arrays, and the hash table, for ``more`` nodes."""
        need = self.num_nodes + more
        self.node = grow(self.node, self.num_nodes, need)
        if self.tree is not None:
            self.tree = grow(self.tree, self.num_nodes, need)
        if self.labels is not None and 2 * need > len(self.labels):
            self._rehash(1 << (2 * need).bit_length())

    def _rehash(self, slots: int) -> None:
        """Makes a hash table of so many slots, with the nodes that are known."""
        self.table = np.full(slots, -1, np.int64), 0, self.size
        self.labels = np.empty(slots, np.int64)
        self._enter(self.num_nodes, None)

    def _enter(self, count: int, copy: Array | None) -> int:
        args = (self.table, self.labels, self.node, self.tree, count, copy)
        return loops.enter(*args)


def grow(old: Array, used: int, size: int, exact: bool = False) -> Array:
    """Returns an array of ``size`` or more columns that begins like ``old``."""
    if old.shape[-1] >= size and not exact:
        return old
    new = np.empty((*old.shape[:-1], size), old.dtype)
    new[..., :used] = old[..., :used]
    return new


class Sampler:
    """Draws minibatches from one graph. Thread-safe."""

    def __init__(self, graph: SampleGraph) -> None:
        self.graph = graph
        # one list for each minibatch in flight; reused, so bounded by the number of threads
        self._tables: deque[list[Table]] = deque()

    @staticmethod
    def by_rank(rank: Tensor, ranks: int) -> Tensor:
        """Returns the positions of numbers in 0 .. ranks - 1, in the order of the numbers."""
        first, order = np.zeros(ranks + 1, np.int64), torch.empty_like(rank)
        core_jit.count(rank.numpy(), first)
        unused = np.empty(len(rank), np.int64)
        core_jit.place(rank.numpy(), rank.numpy(), first, unused, order.numpy())
        return order

    @staticmethod
    def draw_rows(*args: Any) -> tuple[Array, Array, int]:
        """Draws in-edges from rows of this process for any rank; see `draw_rows`."""
        return draw_rows(*args)

    @staticmethod
    def write_pairs(relation: Relation, entry: Array, words: Tensor, at: int) -> None:
        """Writes the source and id of each entry into a message, from word `at` on."""
        args = (relation.row.numpy(), entry, words.numpy(), at)
        threads.run_split(partial(loops.write_pairs, *args), len(entry), GRAIN)

    @staticmethod
    def locate(
        messages: Sequence[tuple[Tensor, Tensor]], own: int, far: Tensor
    ) -> RemoteDraws:
        """Locates each node's draws in the messages received.

        Args:
            messages: for each rank, its message (the number of draws of each node, then
                the pairs of all), and the positions of its nodes in the frontier.
            own: the index of this rank's own message; the others follow each other in
                `far`, in rank order.
            far: the words of the other ranks' messages.
        """
        begin, count = torch.empty((2, sum(len(p) for _, p in messages)), dtype=_INDEX)
        base = 0
        for rank, (words, order) in enumerate(messages):
            near = rank == own
            arrays = words.numpy(), order.numpy(), near, 0 if near else base
            loops.locate(*arrays, begin.numpy(), count.numpy())
            base += 0 if near else len(words)
        return RemoteDraws(begin, count, messages[own][0], far)

    def __call__(self, request: Request) -> Minibatch:
        """Draws a minibatch.

        Raises:
            UnweightedNode: if weights do not say what to draw.
        """
        with self.builder(request) as builder:
            return builder.run()

    @contextmanager
    def builder(
        self, request: Request, concurrent: int = 1
    ) -> Iterator[MinibatchBuilder]:
        """Yields the builder of a minibatch, with lookup tables from the pool.

        Args:
            request: the minibatch to draw.
            concurrent: how many builders are in use at the same time.
        """
        tables = None
        if not request.disjoint and 8 * sum(self.graph.sizes) * concurrent <= TABLES:
            try:
                tables = self._tables.pop()
            except IndexError:
                tables = [Table(size) for size in self.graph.sizes]
        try:
            nodes = [
                NodeRelabeler(size, tables[t] if tables else None, request.disjoint)
                for t, size in enumerate(self.graph.sizes)
            ]
            yield MinibatchBuilder(self.graph, request, nodes)
        finally:
            if tables is not None:
                self._tables.append(tables)


class MinibatchBuilder:
    """Builds one minibatch hop by hop, from draws made here or on other ranks.

    Args:
        graph: the graph.
        request: the minibatch.
        nodes: relabels the nodes of each type, as a `NodeRelabeler`.
    """

    def __init__(
        self, graph: SampleGraph, request: Request, nodes: Sequence[Any]
    ) -> None:
        self.graph, self.request, self.nodes = graph, request, nodes
        self.index: list[Any] = [np.empty((2, 0), np.int64) for _ in graph.relations]
        self.edge: list[Any] = [np.empty(0, np.int64) for _ in graph.relations]
        self.edges_per_hop: list[list[int]] = [[] for _ in graph.relations]
        self.limits = request.tree_time if request.disjoint else None
        trees = 0
        for node_type, seed in request.seeds:
            self.nodes[node_type].add_seeds(seed, trees)
            trees += seed.numel()
        self.end_hop()

    def run(self) -> Minibatch:
        """Draws everything from the relations of the graph."""
        for hop in range(max(map(len, self.request.fan_outs), default=0)):
            for number, relation in enumerate(self.graph.relations):
                frontier = self.frontier(number, hop)
                if frontier is not None:
                    self.draw(number, hop, relation, frontier)
            self.end_hop()
        if self.request.induced:
            for number, relation in enumerate(self.graph.relations):
                self.induce(number, relation, self.all_nodes(number))
        return self.result()

    def end_hop(self) -> None:
        """Records the nodes found at this hop: they are the frontier of the next."""
        for nodes in self.nodes:
            nodes.ends.append(nodes.num_nodes)

    def frontier(self, number: int, hop: int) -> Frontier | None:
        """Returns the nodes that draw from a relation at a hop; None if there are none."""
        fan_out = self.request.fan_outs[number][hop]
        target, begin, end = self._found(number, hop)
        if begin == end or fan_out == 0:
            self.edges_per_hop[number].append(0)
            return None
        streams = target.streams(hop)
        streams = None if streams is None else streams[begin:end]
        return self._frontier(number, begin, end, fan_out, streams, hop)

    def _found(self, number: int, hop: int) -> tuple[Any, int, int]:
        """Returns the targets of a relation, and the range that the previous hop found."""
        target = self.nodes[self.graph.relations[number].target]
        return target, (target.ends[hop - 1] if hop else 0), target.ends[hop]

    def as_tensor(self, part: Any) -> Tensor:
        """Returns an array of this builder as a tensor of the same memory."""
        return torch.from_numpy(part)

    def all_nodes(self, number: int) -> Frontier:
        """Returns a frontier that takes all in-edges of all nodes, to induce a subgraph."""
        target = self.nodes[self.graph.relations[number].target]
        return self._frontier(number, 0, target.num_nodes, -1, None)

    def _frontier(
        self,
        number: int,
        begin: int,
        end: int,
        fan_out: int,
        streams: Any,
        hop: int = 0,
    ) -> Frontier:
        request, relation = self.request, self.graph.relations[number]
        target = self.nodes[relation.target]
        node, max_time = self.as_tensor(target.node[begin:end]), None
        if self.limits is not None:
            max_time = self.limits[self.as_tensor(target.tree[begin:end])]
        return Frontier(
            node=node,
            place=node,
            keys=(hop_key(request.key, number, relation, hop, request.labor),),
            ends=(node.numel(),),
            fan_out=fan_out,
            replace=request.replace and fan_out > 0,
            latest=request.latest and fan_out > 0,
            stream=None if streams is None else self.as_tensor(streams),
            max_time=max_time,
            labor=request.labor and fan_out > 0,
        )

    def draw(
        self, number: int, hop: int, relation: Relation, frontier: Frontier
    ) -> None:
        """Draws in-edges of a frontier, from rows held in this process."""
        clock, allocate = (
            self.graph.time[relation.source],
            partial(self._allocate, number),
        )
        try:
            start, edge, at = draw_rows(relation, clock, frontier, allocate)
        except UnweightedNode as error:
            raise UnweightedNode(number, error.node) from None
        source, row = self.index[number][0], relation.row.numpy()
        loops.fetch(row, relation.stride, edge, source, at)
        _, begin, _ = self._found(number, hop)
        loops.point_to(start, begin, self.index[number][1], at)
        self._label(number, at)

    def add_draws(
        self, number: int, hop: int, draws: RemoteDraws, first: int, end: int
    ) -> None:
        """Adds what the owners, this rank too, drew for nodes `first .. end - 1` asked."""
        begin, count = draws.begin[first:end].numpy(), draws.count[first:end].numpy()
        edge, at = self._allocate(number, int(count.sum()))
        _, place, _ = self._found(number, hop)
        asked = begin, count, draws.local.numpy(), draws.remote.numpy()
        loops.take_rows(asked, place, (*self.index[number], edge), at)
        self._label(number, at)

    def _allocate(self, number: int, total: int) -> tuple[Array, int]:
        """Grows the edge arrays for the draws of a hop.

        Returns the array of edge ids, and the position of the first new one.
        """
        before = len(self.edge[number])
        size = before + total
        self.index[number] = grow(self.index[number], before, size, exact=True)
        self.edge[number] = grow(self.edge[number], before, size, exact=True)
        return self.edge[number], before

    def _label(self, number: int, at: int) -> None:
        """Relabels the sources of the draws from position `at` on to local ids."""
        relation, (source, target) = self.graph.relations[number], self.index[number]
        ends = self.nodes[relation.source], self.nodes[relation.target]
        ends[0].relabel(source, at, target, ends[1])
        self.edges_per_hop[number].append(len(source) - at)

    def induce(self, number: int, relation: Relation, frontier: Frontier) -> None:
        """Replaces the edges of a relation by all edges between the sampled nodes."""
        source, target = self.nodes[relation.source], self.nodes[relation.target]
        bounds = _bounds(relation, self.graph.time[relation.source], frontier)
        place, entry, label = source.induced_edges(relation, *bounds, target)
        self.index[number] = np.stack([label, place])
        row = relation.row.numpy()
        self.edge[number] = row[2 * entry + 1] if relation.stride == 2 else entry

    def result(self) -> Minibatch:
        """Returns the minibatch."""
        every, as_tensor, trees = self.nodes, self.as_tensor, None
        if self.request.disjoint:
            trees = [as_tensor(s.tree[: s.num_nodes]).clone() for s in every]
        return Minibatch(
            node=[as_tensor(s.node[: s.num_nodes]).clone() for s in every],
            tree=trees,
            edge_index=[as_tensor(index) for index in self.index],
            edge=[as_tensor(edge).long() for edge in self.edge],
            nodes_per_hop=[np.diff(s.ends, prepend=0).tolist() for s in every],
            edges_per_hop=self.edges_per_hop,
        )


def hop_key(key: int, number: int, relation: Relation, hop: int, labor: bool) -> int:
    """Returns the key of a minibatch's draws from one relation at one hop.

    A node draws at one hop only, so the key does not contain the hop. With "labor" the
    key belongs to the sources: all relations from one source type share it, hop by hop.
    """
    place = (hop + 1 << 20) + relation.source if labor else number
    return (key + place * 0x9E3779B97F4A7C15) % (1 << 63)


def draw_rows(
    relation: Relation, clock: Tensor | None, frontier: Frontier, allocate: Allocate
) -> tuple[Array, Array, int]:
    """Draws in-edges of the nodes of a frontier.

    Args:
        relation: holds the in-edges.
        clock: the times of its source nodes, if nodes have times and edges have none.
        frontier: the nodes that draw, and how they draw.
        allocate: provides the output array for a number of draws.

    Returns:
        offsets of each node's draws [m + 1], the array of positions of the drawn entries,
        and the position in it of the first draw.

    Raises:
        UnweightedNode: if all in-edges of a node have weight zero.
        ValueError: if the draws do not fit in memory.
    """
    low, high = _bounds(relation, clock, frontier)
    weight = None if relation.weight is None else relation.weight.numpy()
    start = np.empty(len(low) + 1, np.int64)
    args = (low, high, weight, frontier.fan_out, frontier.replace, start)
    threads.run_split(partial(loops.count, *args), len(low), GRAIN)
    total = loops.add_up(start)
    if total < 0:
        raise UnweightedNode(0, int(frontier.node[-1 - total]))
    if total >= CHECKED_EDGES:
        _check_memory(int(total), len(low), frontier.fan_out)
    position, at = allocate(int(total))
    stream = None if frontier.stream is None else frontier.stream.numpy()
    keys, ends = np.array(frontier.keys, np.int64), np.array(frontier.ends, np.int64)
    nodes = (keys, ends, frontier.node.numpy(), low, high, start)
    entries, to = (relation.row.numpy(), relation.stride), (position, at)
    how = nodes, stream, frontier.replace
    if frontier.labor:
        draw = partial(loops.draw_labor, nodes, entries, weight, to)
    elif weight is None:
        draw = partial(loops.draw, *how, to)
    else:
        draw = partial(loops.draw_weighted, *how, entries, weight, to)
    threads.run_split(draw, len(keys), 1)
    return start, position, at


def _bounds(
    relation: Relation, clock: Tensor | None, frontier: Frontier
) -> tuple[Array, Array]:
    """Returns the first and the end of the entries that each frontier node may draw from."""
    count = frontier.place.numel()
    low, high = np.empty((2, count), np.int64)
    args = (relation.colptr.numpy(), frontier.place.numpy(), low, high)
    threads.run_split(partial(loops.bounds, *args), count, GRAIN)
    time = clock if relation.time is None else relation.time
    if frontier.max_time is None or time is None:
        return low, high
    entries, timed = (relation.row.numpy(), relation.stride), relation.time is None
    keep = frontier.fan_out if frontier.latest else -1
    limits = frontier.max_time.numpy(), keep
    narrow = (entries, (time.numpy(), timed), *limits, (low, high))
    threads.run_split(partial(loops.narrow, *narrow), count, GRAIN)
    return low, high


def _check_memory(edges: int, nodes: int, fan_out: int) -> None:
    """Raises ValueError if the draws of a hop do not fit in the free memory."""
    free, size = memory.available(), edges * EDGE_BYTES
    if free is not None and size > free:
        raise ValueError(
            f"num_neighbors={fan_out} draws {edges:,} edges for {nodes:,} nodes of one hop, "
            f"{size / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB are free; give a smaller "
            "fan-out, or a smaller batch_size"
        )


class RankSelect:
    """Runs what `sample_ops.rank_select_index` returns: a bit for each id there could be.

    The position of an id is the number of bits set before its own, so a lookup touches
    two lines of memory: a word of bits, and the count before that word.
    """

    def __init__(self, gid: Tensor, total: int) -> None:
        words = torch.zeros(total // 64 + 1, dtype=torch.int64)
        dtype = torch.int32 if len(gid) < 2**31 else torch.int64
        counts = torch.zeros(total // 64 + 1, dtype=dtype)
        self._bits = words.numpy().view(np.uint64), counts.numpy()
        core_jit.mark_bits(gid.long().contiguous().numpy(), *self._bits)

    def __call__(self, ids: Tensor) -> Tensor:
        """Returns the position of each id [k], -1 for those that are not in the list."""
        ids = ids.long().contiguous()
        out = torch.empty_like(ids)
        args = (*self._bits, ids.numpy(), out.numpy())
        find = partial(core_jit.find_places, *args)
        threads.run_split(find, len(ids), GRAIN)
        return out


rank_select_index = RankSelect


def take_rows(values: Tensor, index: Tensor, out: Tensor) -> None:
    """Copies rows of any dtype, `out[k] = values[index[k]]`, as the widest words that fit.

    Shapes: values `[n, ...]` and out `[k, ...]`, contiguous; index `[k]`. Raises IndexError
    outside 0 .. n-1.
    """
    if not len(index):
        return
    place, size = index.detach().long().contiguous().numpy(), len(values)
    if place.min() < 0 or place.max() >= size:
        raise IndexError(f"index spans {place.min()} .. {place.max()}, of {size} rows")
    width = out.nbytes // len(index)
    for word in (torch.float64, torch.float32, torch.uint8):
        places = (
            width,
            *(t.storage_offset() * t.element_size() for t in (values, out)),
        )
        if not any(at % word.itemsize for at in places):
            break
    # the stride of one number or none may be anything, which `view` does not take
    flat = [
        t.detach().as_strided((t.numel(),), (1,)).view(torch.uint8).view(word).numpy()
        for t in (values, out)
    ]
    step = width // word.itemsize
    if step:
        args = (flat[0], step), place, (flat[1], step), step
        copy = partial(loops.gather, *args)
        threads.run_split(copy, len(place), ROWS // step)

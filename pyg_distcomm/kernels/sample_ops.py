"""Defines ops of sampling, and what they take and make: graphs, requests and minibatches.

A graph has nodes of one or more types and relations between them; a node type is a number,
the index into `SampleGraph.sizes`. A homogeneous graph has one of each.

[Note: pairs] PyG's samplers keep the source and the id of each edge, 16 bytes, in two
arrays, and look up both for each edge drawn. Here the two are adjacent, as int32 if the
graph is small enough: 8 bytes, and one cache miss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_distcomm.kernels.core_ops import HASH_ODD, _mix, _shift
from pyg_distcomm.kernels.registry import op

GOLDEN = HASH_ODD[0]
UNIT = 2.0**-53  # the grain of uniform numbers


def streams_of(key: int, tree: Tensor, node: Tensor) -> Tensor:
    """Returns the generator of each node in its tree."""
    return _mix(_mix(_mix(tree + GOLDEN) ^ key) ^ _mix(node + GOLDEN))


def uniform(streams: Tensor, draw: Tensor) -> Tensor:
    """Returns numbers of generators, in [0, 1)."""
    return _shift(keyed_hash(streams, draw), 11).double() * UNIT


@op("streams size", dtypes=None)
def uniform_picks(streams: Tensor, size: Tensor, draws: int, replaced: bool) -> Tensor:
    """Draws places in 0 .. size-1; without replacement by Floyd's method ([Bentley87]).

    Shapes: streams [m], size [m], int64; returns [m, draws], int64.
    """
    steps = torch.arange(draws, device=size.device)
    top = size[:, None] if replaced else size[:, None] - draws + steps + 1
    picks = (uniform(streams[:, None], steps) * top).long()
    if replaced:
        return picks
    for k in range(1, draws):
        again = (picks[:, :k] == picks[:, k : k + 1]).any(1)
        picks[:, k] = torch.where(again, top[:, k] - 1, picks[:, k])
    return picks


@op("gid", dtypes=None)
def rank_select_index(gid: Tensor, total: int) -> Callable[[Tensor], Tensor]:
    """Returns a function that finds the positions of ids in ascending, distinct `gid`.

    It takes ids [k] in [0, total) and returns int64 [k], -1 for ids that `gid` lacks. The
    CPU backend holds 12 bytes for each 64 ids below `total`.
    """

    def find(ids: Tensor) -> Tensor:
        ids = ids.long()
        if not len(gid):
            return torch.full_like(ids, -1)
        place = torch.searchsorted(gid.long(), ids).clamp_(max=len(gid) - 1)
        return torch.where(gid[place] == ids, place, -1)

    return find


@op("index", dtypes=None)
def read_rows(
    values: Tensor, index: Tensor, kept: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Returns rows by index, on the device of the index; values may be in pinned host memory.

    Some rows may be cached on the device: `kept` has these rows [h, ...], and the position of
    each row among them, [n] int32, -1 for others.

    Shapes: values [n, ...], contiguous; index any, int64; returns [*index.shape, ...].
    """
    found = values.index_select(0, index.reshape(-1))
    return found.view(*index.shape, *values.shape[1:])


@op("running", dtypes=None)
def draw_urns(
    running: Tensor, low: Tensor, high: Tensor, keys: Tensor, draws: int
) -> tuple[Tensor, Tensor]:
    """Draws entries by integer weights without replacement, as `matrix_ops.draw` does.

    Urn i holds the entries `low[i] .. high[i] - 1`, of which more than `draws` weigh
    something. Shapes: running [nnz + 1], int64, sums of the weights before each entry, which
    may wrap around beyond an urn; low, high, keys [m]. Returns entries, and the weight left
    before each draw, [m, draws] each.

    [Note: no tree] The sums stay as they are. Each entry drawn keeps the weight left before
    its place: those with no more than the goal lie before what is drawn next, so that is the
    first entry whose sum exceeds the goal and their weights.
    """
    base = running[low]
    left = running[high] - base
    steps = torch.arange(draws, device=low.device)
    bits = keyed_hash(hashes(keys)[:, None], steps)
    weight = torch.zeros((len(low), draws), dtype=torch.int64, device=low.device)
    before = torch.full_like(weight, torch.iinfo(torch.int64).max)
    entries, lefts = torch.empty_like(weight), torch.empty_like(weight)
    for k in range(draws):
        goal = share(bits[:, k], left)
        passed = before <= goal[:, None]
        skipped = torch.where(passed, weight, 0).sum(1)
        pick = first_above(running, low, high, goal + skipped)
        start = running[pick]
        mine = running[pick + 1] - start
        before = torch.where(passed, before, before - mine[:, None])
        before[:, k], weight[:, k] = start - base - skipped, mine
        entries[:, k], lefts[:, k] = pick, left
        left = left - mine
    return entries, lefts


@op("value", dtypes=None)
def row_sums(ptr: Tensor, value: Tensor) -> Tensor:
    """Adds up each row of float64 numbers [nnz], one after the other; ptr [m + 1]."""
    place, end = ptr[:-1], ptr[1:]
    total = torch.zeros(len(place), dtype=torch.float64, device=value.device)
    most = int((end - place).max()) if len(place) else 0
    for _ in range(most):
        there = place < end
        one = value[torch.where(there, place, 0)]
        total, place = torch.where(there, total + one, total), place + 1
    return total


def first_above(running: Tensor, low: Tensor, high: Tensor, goal: Tensor) -> Tensor:
    """Returns the first entries from `low` on up to which more than the goal adds up."""
    base = running[low]
    steps = len(running).bit_length()
    return bisect(low, high, steps, lambda k: running[k + 1] - base <= goal)


def bisect(
    low: Tensor, high: Tensor, steps: int, below: Callable[[Tensor], Tensor]
) -> Tensor:
    """Returns the first places in low .. high-1 that are not `below`, or high, by halves."""
    for _ in range(steps):
        open_ = low < high
        middle = torch.where(open_, (low + high) // 2, 0)
        passed = below(middle)
        low = torch.where(open_ & passed, middle + 1, low)
        high = torch.where(open_ & ~passed, middle, high)
    return low


def hashes(keys: Tensor) -> Tensor:
    """Returns the generators of keys; see `matrix_ops`."""
    return _mix(keys + GOLDEN)


def keyed_hash(streams: Tensor, draw: Tensor) -> Tensor:
    """Returns 64 bits for each draw of a generator, as int64."""
    return _mix(streams + (draw + 1) * GOLDEN)


def share(bits: Tensor, whole: Tensor) -> Tensor:
    """Returns `floor(bits whole / 2^64)`, for 64 bits without a sign and whole in [0, 2^62)."""
    half = (1 << 32) - 1
    top, low = _shift(bits, 32), bits & half
    first = (whole & half) * top + _shift((whole & half) * low, 32)
    second = (whole >> 32) * low + (first & half)
    return (whole >> 32) * top + _shift(first, 32) + _shift(second, 32)


def spread(count: Tensor, total: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the owner of each of `sum(count)` items, its number there, and offsets.

    The host waits for the sum, unless `total` is given.
    """
    ends = count.cumsum(0)
    start = ends - count
    if total is None:
        total = int(ends[-1]) if len(ends) else 0
    each = torch.arange(len(count), device=count.device)
    owner = torch.repeat_interleave(each, count, output_size=total)
    return owner, torch.arange(total, device=count.device) - start[owner], start


@dataclass(frozen=True, eq=False)
class Relation:
    """Holds the edges of one type as in-edges of their targets (CSC).

    Args:
        source: the number of the source node type.
        target: the number of the target node type.
        colptr: in-edges of node v are entries `colptr[v] .. colptr[v + 1] - 1`.
        row: the source of entry e at `row[e * stride]`; flat, int32 or int64.
        stride: 2 if `row[2 e + 1]` is the id of the edge, 1 if the id is e.
        weight: the weight of each entry, or None.
        time: the time of each entry, or None; ascends among the in-edges of a node.
    """

    source: int
    target: int
    colptr: Tensor
    row: Tensor
    stride: int
    weight: Tensor | None = None
    time: Tensor | None = None

    @property
    def num_edges(self) -> int:
        """The number of edges."""
        return self.row.numel() // self.stride


@dataclass(frozen=True, eq=False)
class SampleGraph:
    """Describes a graph to sample from.

    Args:
        sizes: the number of nodes of each type.
        relations: the edges, by type.
        time: by node type, the time of each node, or None; with times, the in-edges of a
            node ascend in the time of their source.
    """

    sizes: tuple[int, ...]
    relations: tuple[Relation, ...]
    time: tuple[Tensor | None, ...]


@dataclass(frozen=True, eq=False)
class Request:
    """Describes one minibatch to draw.

    Args:
        seeds: (type, node ids), in the order in which trees are numbered.
        fan_outs: for each relation, in-edges to draw for a node at each hop; -1 takes all.
        key: the key of all its draws, in [0, 2^63).
        replace: whether an edge may be drawn twice.
        disjoint: whether each seed grows a tree of its own.
        induced: whether to return all edges between the sampled nodes.
        latest: whether to take the latest edges instead of random ones; needs `tree_time`.
        labor: whether the nodes of a hop share one random number per source, so that they
            draw the same sources; not with `replace`.
        tree_time: for each seed, the latest time of an edge or node of its tree.
    """

    seeds: tuple[tuple[int, Tensor], ...]
    fan_outs: tuple[tuple[int, ...], ...]
    key: int
    replace: bool = False
    disjoint: bool = False
    induced: bool = False
    latest: bool = False
    tree_time: Tensor | None = None
    labor: bool = False

    @property
    def hops(self) -> int:
        """The number of hops."""
        return max(map(len, self.fan_outs), default=0)


@dataclass(frozen=True, eq=False)
class Frontier:
    """Holds the nodes of one or more minibatches that draw from one relation at one hop.

    Args:
        node: node ids, int64, which key the draws.
        place: the row of each node in the offsets (`colptr`) of the relation.
        keys: the key of each minibatch's draws from this relation.
        ends: the end of each minibatch's nodes in `node`; the next ones begin there.
        fan_out: in-edges to draw for each node; -1 takes all.
        replace: whether an edge may be drawn twice.
        latest: whether to take the latest edges instead of random ones.
        stream: the random stream of each node, so that equal nodes draw independently;
            None for stream 0.
        max_time: for each node, the latest time of an edge to draw; or None.
        labor: whether nodes with the same key share one random number per source.
    """

    node: Tensor
    place: Tensor
    keys: Sequence[int]
    ends: Sequence[int]
    fan_out: int
    replace: bool = False
    latest: bool = False
    stream: Tensor | None = None
    max_time: Tensor | None = None
    labor: bool = False


def all_in_edges(node: Tensor, place: Tensor) -> Frontier:
    """Returns a frontier that takes all in-edges of its nodes."""
    return Frontier(node, place, (0,), (node.numel(),), -1)


@dataclass(frozen=True, eq=False)
class RemoteDraws:
    """Locates the draws of each frontier node in the messages that hold them.

    Shapes:
        begin [m]: the first word of each node's draws in `remote`; if negative, `~begin`
            is their first word in `local`.
        count [m]: the number of draws of each node; a draw is a source and an edge id.
        local, remote: the words of this rank's own message, and of the other ranks'.
    """

    begin: Tensor
    count: Tensor
    local: Tensor
    remote: Tensor


@dataclass(eq=False)
class Minibatch:
    """Holds a sampled subgraph, with nodes and edges in the order in which they were sampled.

    Args:
        node: ids of the nodes, by type; the seeds come first.
        tree: the tree of each node, by type; None unless sampling is disjoint.
        edge_index: by relation, [2, edges]: local ids (positions in `node`) of source and
            target.
        edge: by relation, ids of the edges.
        nodes_per_hop: by type, the number of new nodes at each hop; the seeds are the first.
        edges_per_hop: by relation, the number of edges drawn at each hop.
    """

    node: list[Tensor]
    tree: list[Tensor] | None
    edge_index: list[Tensor]
    edge: list[Tensor]
    nodes_per_hop: list[list[int]]
    edges_per_hop: list[list[int]]


class UnweightedNode(ValueError):
    """Raised when in-edges are drawn of a node whose in-edges all have weight zero."""

    def __init__(self, relation: int, node: int) -> None:
        super().__init__(
            f"the weights of all edges into node {node} are zero, so none can be drawn; "
            "give them positive weights, remove them, or take all edges (fan-out -1)"
        )
        self.relation, self.node = relation, node

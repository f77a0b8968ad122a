"""Describes a graph to sample, a request to sample it, and the minibatch that is drawn.

A graph has nodes of one or more types and relations between them; a type is a number,
its place in `SampleGraph.sizes`. A homogeneous graph has one of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Relation:
    """The edges of one type as in-edges of their targets (CSC).

    Args:
        source: the type of the nodes edges come from.
        target: the type of the nodes they point to.
        colptr: in-edges of node v are entries `colptr[v] .. colptr[v + 1] - 1`.
        row: the source of entry e at `row[e * stride]`; flat, int32 or int64.
        stride: 2 if `row[2 e + 1]` is the id of the edge, 1 if the id is e.
        weight: of each entry, or None.
        time: of each entry, or None; ascends among the in-edges of a node.
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
    """A graph to sample from.

    Args:
        sizes: the number of nodes of each type.
        relations: the edges, by type.
        time: of each node, by type, or None; then in-edges ascend in their source's time.
    """

    sizes: tuple[int, ...]
    relations: tuple[Relation, ...]
    time: tuple[Tensor | None, ...]


@dataclass(frozen=True, eq=False)
class Request:
    """One minibatch to draw.

    Args:
        seeds: (type, node ids), in the order in which trees are numbered.
        fan_outs: for each relation, in-edges to draw for a node at each hop; -1 is all.
        key: of all its draws, in [0, 2^63).
        replace: whether an edge may be drawn twice.
        disjoint: whether each seed grows a tree of its own.
        induced: whether to return all edges between the nodes found.
        latest: whether the latest edges are taken, rather than drawn; needs `tree_time`.
        labor: whether the nodes of a hop draw by the same random number of a source, so
            that they draw the same sources; not with `replace`.
        tree_time: of each seed: no edge or node later than it is drawn in its tree.
        rounds: by "labor", how often importances of sources are found anew: 0 draws as
            many in-edges as `fan_outs` say, -1 goes on until that changes nothing.
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
    rounds: int = 0

    @property
    def hops(self) -> int:
        """The number of hops."""
        return max(map(len, self.fan_outs), default=0)


@dataclass(frozen=True, eq=False)
class HopDraw:
    """Nodes of one or more minibatches that draw from one relation, at one hop.

    Args:
        node: their ids, int64, which key the draws.
        place: where the relation has their in-edges: row `place[i]` of its offsets.
        keys: of each minibatch's draws from this relation.
        ends: where the nodes of each minibatch end; those of the next come after them.
        fan_out: in-edges to draw for each; -1 is all.
        replace: whether an edge may be drawn twice.
        latest: whether the latest edges are taken, rather than drawn.
        name: tells the draws of equal nodes apart, or None.
        limit: for each node, no edge later than it is drawn; or None.
        labor: whether nodes of one key draw by the same random number of a source.
        rounds: how often importances are found anew; see `Request`.
    """

    node: Tensor
    place: Tensor
    keys: Sequence[int]
    ends: Sequence[int]
    fan_out: int
    replace: bool = False
    latest: bool = False
    name: Tensor | None = None
    limit: Tensor | None = None
    labor: bool = False
    rounds: int = 0


def everything(node: Tensor, place: Tensor) -> HopDraw:
    """Returns an ask for all in-edges of nodes."""
    return HopDraw(node, place, (0,), (node.numel(),), -1)


@dataclass(frozen=True, eq=False)
class Draws:
    """Draws made elsewhere: who draws, in order, and where in which message its draws are.

    Shapes:
        begin [m]: the first word of each node's in `far`; `~begin` in `near` if negative.
        count [m]: how many there are: a source and an edge id each.
        near, far: the words of this rank's own message, and of the others'.
    """

    begin: Tensor
    count: Tensor
    near: Tensor
    far: Tensor

    def of(self, first: int, end: int) -> Draws:
        """Returns those of a range of the nodes."""
        return Draws(self.begin[first:end], self.count[first:end], self.near, self.far)


@dataclass(eq=False)
class Minibatch:
    """A sampled subgraph, with nodes and edges in the order in which they were found.

    Args:
        node: ids of the nodes, by type; the seeds come first.
        tree: the tree of each node, by type; None unless disjoint.
        edge_index: by relation, [2, edges]: places in `node` of source and target.
        edge: by relation, ids of the edges.
        nodes_per_hop: by type, how many nodes each hop found; the seeds are the first.
        edges_per_hop: by relation, how many edges each hop drew.
        weight: by relation, of each edge, 1 / (its target's in-edges times its chance), by
            which the sum of what is drawn has the mean over all in-edges as its
            expectation; None but where importances are found.
    """

    node: list[Tensor]
    tree: list[Tensor] | None
    edge_index: list[Tensor]
    edge: list[Tensor]
    nodes_per_hop: list[list[int]]
    edges_per_hop: list[list[int]]
    weight: list[Tensor] | None = None


class UnweightedNode(ValueError):
    """A node whose in-edges all have weight zero was to be drawn from."""

    def __init__(self, relation: int, node: int) -> None:
        super().__init__(
            f"the weights of all edges into node {node} are zero, so none can be drawn; "
            "give them positive weights, remove them, or take all edges (fan-out -1)"
        )
        self.relation, self.node = relation, node


def hop_key(key: int, number: int, relation: Relation, hop: int, labor: bool) -> int:
    """Returns the key of a minibatch's draws from one relation at one hop.

    A node draws at one hop only, so that its hop is no part of the key; by "labor" it is
    the sources that are keyed, alike for all relations from their type.
    """
    place = (hop + 1 << 20) + relation.source if labor else number
    return (key + place * 0x9E3779B97F4A7C15) % (1 << 63)

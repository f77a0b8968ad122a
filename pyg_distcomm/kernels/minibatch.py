"""Describes a graph to sample, a request to sample it, and the minibatch that is drawn.

A graph has nodes of one or more types and relations between them; a node type is a number,
the index into `SampleGraph.sizes`. A homogeneous graph has one of each.

[Note: pairs] PyG's samplers keep the source and the id of each edge, 16 bytes, in two
arrays, and look up both for each edge drawn. Here the two are adjacent, as int32 if the
graph is small enough: 8 bytes, and one cache miss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


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

"""Cuts a graph whose edges may exceed the memory, as they stream by.

[Note: cutting a stream] Edges are read in any order and not stored, so that the state of a
node must fit a fixed number of words. There are three kinds of pass:

1. degrees are counted;
2. ends of edges join clusters, the end in the smaller cluster going to the larger, as
   [Hollocou17] does with three words a node, and with a limit on clusters as the first
   phase of [Mayer22] sets; clusters are then packed into parts, the largest first;
3. clusters, and then single nodes, vote: each keeps the number of its neighbours in its
   own part, and counts those in others in SEATS places by the rule of [Misra82], whose
   counts are never too high. Then half of them, drawn anew each time, move to the part
   with most votes that has room. The best of all passes is kept.

A table of votes for all parts would be n P words; LDG needs the neighbours of a node at
once, which edges on a disk do not give.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from pyg_distcomm.partition.partition import (
    Partition,
    capacities,
    fill_empty,
    plain_edges,
)

CHUNK = 1 << 18  # edges in memory at once
SEATS = 8  # parts whose votes are counted, at most
SHARE = 1 / 32  # a cluster may be this much of a part
CLUSTER_PASSES = 4
NODE_PASSES = 8
ENOUGH = 0.998  # a pass that cuts more than this of the last one's edges is the last


class EdgeStream(Protocol):
    """Defines a source of edges that can be read repeatedly, from front to back."""

    @property
    def num_edges(self) -> int:
        """Returns the number of edges."""

    def chunks(self, what: str) -> Iterator[np.ndarray]:
        """Yields arrays `[2, c]` of sources and targets, int64, in order."""


class TensorEdges:
    """Reads the edges of an edge_index in memory, or mapped from a file."""

    def __init__(self, edge_index: Tensor) -> None:
        self._edges = plain_edges(edge_index).cpu().numpy()

    @property
    def num_edges(self) -> int:
        """Returns the number of edges."""
        return int(self._edges.shape[1])

    def chunks(self, what: str) -> Iterator[np.ndarray]:
        """Yields arrays `[2, c]`, int64, in order; ignores `what`, the label of a bar."""
        for start in range(0, self.num_edges, CHUNK):
            yield self._edges[:, start : start + CHUNK].astype(np.int64)


def stream(
    edges: EdgeStream,
    num_nodes: int,
    num_parts: int,
    *,
    seed: int = 0,
    balance: float = 1.03,
) -> Partition:
    """Partitions the nodes of a graph whose edges may exceed the memory.

    No part owns more than max(ceil(n/P), balance n/P) nodes, nor, where there is room
    for all, more than its share of in-edges and twice that looseness. The same for the
    same order of edges. Memory: about (100 + 8 min(P, SEATS)) bytes a node, and a chunk
    of edges; reads the edges up to 4 + CLUSTER_PASSES + NODE_PASSES times.
    See [Note: cutting a stream].
    """
    capacity = capacities(np.array([[num_nodes, edges.num_edges]]), num_parts, balance)
    if num_nodes <= num_parts:
        return Partition.from_owner(np.arange(num_nodes), num_parts)
    return _StreamCut(edges, num_nodes, num_parts, seed, capacity).run()


class _StreamCut:
    """Runs the streaming cutter once; holds what its passes share."""

    def __init__(
        self,
        edges: EdgeStream,
        num_nodes: int,
        num_parts: int,
        seed: int,
        capacity: np.ndarray,
    ) -> None:
        self.edges, self.n, self.parts, self.seed = edges, num_nodes, num_parts, seed
        self.loops = jit_loops()
        self.weight = np.ones((num_nodes, 2), np.int64)
        self.weight[:, 1] = 0
        self.capacity = capacity
        self.load = np.zeros((num_parts, 2), np.int64)

    def run(self) -> Partition:
        home, weight = self._clusters()
        ids = np.flatnonzero(weight[:, 0])
        share = (weight[ids] / np.maximum(weight[ids].sum(0), 1)).sum(1)
        place = np.full(self.n, -1, np.int64)
        largest = ids[np.argsort(-share, kind="stable")]
        self.loops.pack(largest, weight, self.capacity, self.load, place)
        if (place[ids] >= 0).all():
            place = self._vote(ids, place, weight, home, CLUSTER_PASSES)
        owner = place[home]
        del home, weight, place
        homeless = np.flatnonzero(owner < 0)
        self.loops.pack(homeless, self.weight, self.capacity, self.load, owner)
        nodes = np.arange(self.n)
        owner = self._vote(nodes, owner, self.weight, None, NODE_PASSES)
        return Partition.from_owner(fill_empty(owner, self.parts), self.parts)

    def _clusters(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the cluster of each node, and the nodes and in-edges in each."""
        degree = np.zeros(self.n, np.int64)
        for src, dst in self.edges.chunks("counting degrees"):
            self.loops.count_degrees(src, dst, degree, self.weight)
        degree += self.weight[:, 1]
        home, volume = np.arange(self.n), degree.copy()
        size = np.ones(self.n, np.int64)
        share = SHARE / self.parts
        most = np.array([degree.sum() * share, max(1, self.n * share)])
        for src, dst in self.edges.chunks("clustering"):
            self.loops.cluster(src, dst, degree, home, volume, size, most)
        work = np.bincount(home, self.weight[:, 1], self.n).astype(np.int64)
        return home, np.stack([size, work], axis=1)

    def _vote(
        self,
        ids: np.ndarray,
        owner: np.ndarray,
        weight: np.ndarray,
        home: np.ndarray | None,
        passes: int,
    ) -> np.ndarray:
        """Moves nodes, or clusters if `home` gives those of nodes; returns the best owners."""
        what = "moving nodes" if home is None else "moving clusters"
        seats = min(self.parts, SEATS)
        own = np.zeros(self.n, np.int32)
        seat, count = np.zeros((2, self.n, seats), np.int32)
        self.load[:] = 0
        np.add.at(self.load, owner[ids], weight[ids])
        best, least = owner, np.inf
        for k in range(passes + 1):
            own[:], count[:] = 0, 0
            cut = 0
            for src, dst in self.edges.chunks(what):
                if home is not None:
                    src, dst = home[src], home[dst]
                cut += self.loops.vote(src, dst, owner, own, seat, count)
            last = k == passes or cut > ENOUGH * least
            if cut < least:
                best, least = owner.copy(), cut
            if last:
                break
            rng = np.random.default_rng((self.seed, k))
            half = rng.permutation(ids)[: -(-ids.size // 2)]
            self.loops.move(
                half, owner, own, seat, count, weight, self.capacity, self.load
            )
        self.load[:] = 0
        np.add.at(self.load, best[ids], weight[ids])
        return best


def jit_loops() -> Any:
    """Returns the compiled loops: Numba takes a second to import, and only cutters need it."""
    return importlib.import_module("pyg_distcomm.partition.cutters_jit")

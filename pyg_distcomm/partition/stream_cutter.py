"""Cuts a graph whose edges may exceed the memory, reading them as a stream.

[Note: cutting a stream] Edges are read in any order and not stored, so that the state of a
node must fit a fixed number of words. There are three kinds of pass:

1. count degrees;
2. join the ends of edges into clusters: the end in the smaller cluster moves to the larger,
   as in [Hollocou17] with three words a node, and with a limit on the size of clusters as in
   the first phase of [Mayer22]; then pack clusters into parts, the largest first;
3. let clusters, and then single nodes, vote: each counts its neighbours in its own part, and
   those in other parts in SLOTS slots by the rule of [Misra82], whose counts are never too
   high. Then half of them, drawn anew each time, move to the part with most votes that has
   room. The best result of all passes is kept.

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
SLOTS = 8  # the most parts whose votes a node counts
SHARE = 1 / 32  # the largest size of a cluster, as a fraction of a part
CLUSTER_PASSES = 4
NODE_PASSES = 8
NARROW = 2**31  # counts below it take four bytes
# passes end once one cuts more than this fraction of the last one's edges
ENOUGH = 0.998


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
    for all, more in-edges than its share times 1 + 2 (balance - 1). Deterministic for a
    given order of edges. Memory: about (50 + 6 min(P, SLOTS)) bytes a node below 2**30
    edges, and a chunk of edges; reads the edges up to 4 + CLUSTER_PASSES + NODE_PASSES times.
    See [Note: cutting a stream].
    """
    capacity = capacities(np.array([[num_nodes, edges.num_edges]]), num_parts, balance)
    if num_nodes <= num_parts:
        return Partition.from_owner(np.arange(num_nodes), num_parts)
    return _StreamCut(edges, num_nodes, num_parts, seed, capacity).run()


class _StreamCut:
    """Runs the streaming cutter once, and holds the state that its passes share."""

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
        # the largest counts are sums of degrees: at most twice the edges
        largest = max(num_nodes, 2 * edges.num_edges)
        self.dtype = np.int32 if largest < NARROW else np.int64
        self.weight = np.ones((num_nodes, 2), self.dtype)
        self.weight[:, 1] = 0
        self.capacity = capacity
        self.load = np.zeros((num_parts, 2), np.int64)

    def run(self) -> Partition:
        cluster_of, weight = self._clusters()
        ids = np.flatnonzero(weight[:, 0])
        share = (weight[ids] / np.maximum(weight[ids].sum(0), 1)).sum(1)
        cluster_part = np.full(self.n, -1, np.int32)
        largest = ids[np.argsort(-share, kind="stable")]
        self.loops.pack(largest, weight, self.capacity, self.load, cluster_part)
        if (cluster_part[ids] >= 0).all():
            cluster_part = self._vote(
                ids, cluster_part, weight, cluster_of, CLUSTER_PASSES
            )
        owner = cluster_part[cluster_of]
        del cluster_of, weight, cluster_part
        unplaced = np.flatnonzero(owner < 0)
        self.loops.pack(unplaced, self.weight, self.capacity, self.load, owner)
        nodes = np.arange(self.n, dtype=self.dtype)
        owner = self._vote(nodes, owner, self.weight, None, NODE_PASSES)
        return Partition.from_owner(fill_empty(owner, self.parts), self.parts)

    def _clusters(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the cluster of each node, and the nodes and in-edges in each."""
        degree = np.zeros(self.n, self.dtype)
        for src, dst in self.edges.chunks("counting degrees"):
            self.loops.count_degrees(src, dst, degree, self.weight)
        degree += self.weight[:, 1]
        cluster_of, volume = np.arange(self.n, dtype=self.dtype), degree.copy()
        size = np.ones(self.n, self.dtype)
        share = SHARE / self.parts
        most = np.array([degree.sum() * share, max(1, self.n * share)])
        for src, dst in self.edges.chunks("clustering"):
            self.loops.cluster(src, dst, degree, cluster_of, volume, size, most)
        del degree, volume
        weight = np.zeros((self.n, 2), self.dtype)
        weight[:, 0] = size
        np.add.at(weight[:, 1], cluster_of, self.weight[:, 1])
        return cluster_of, weight

    def _vote(
        self,
        ids: np.ndarray,
        owner: np.ndarray,
        weight: np.ndarray,
        cluster_of: np.ndarray | None,
        passes: int,
    ) -> np.ndarray:
        """Moves nodes, or clusters if `cluster_of` is given; returns the best owners."""
        label = "moving nodes" if cluster_of is None else "moving clusters"
        slots = min(self.parts, SLOTS)
        own = np.zeros(self.n, np.int32)
        part_dtype = np.int16 if self.parts <= 2**15 else np.int32
        voted_part = np.zeros((self.n, slots), part_dtype)
        count = np.zeros((self.n, slots), np.int32)
        self.load[:] = 0
        np.add.at(self.load, owner[ids], weight[ids])
        best, least = owner, np.inf
        for k in range(passes + 1):
            own[:], count[:] = 0, 0
            cut = 0
            for src, dst in self.edges.chunks(label):
                if cluster_of is not None:
                    src, dst = cluster_of[src], cluster_of[dst]
                cut += self.loops.vote(src, dst, owner, own, voted_part, count)
            last = k == passes or cut > ENOUGH * least
            if cut < least:
                best, least = owner.copy(), cut
            if last:
                break
            rng = np.random.default_rng((self.seed, k))
            half = rng.permutation(ids)[: -(-ids.size // 2)]
            self.loops.move(
                half, owner, own, voted_part, count, weight, self.capacity, self.load
            )
        self.load[:] = 0
        np.add.at(self.load, best[ids], weight[ids])
        return best


def jit_loops() -> Any:
    """Returns the compiled loops: Numba takes a second to import, and only cutters need it."""
    return importlib.import_module("pyg_distcomm.partition.cutters_jit")

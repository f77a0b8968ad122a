"""The nodes of one minibatch: a table or a hash of ids, and local ids in order."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pyg_distcomm.kernels import memory
from pyg_distcomm.kernels import relabel_jit as labels
from pyg_distcomm.kernels.compile import ready
from pyg_distcomm.kernels.minibatch import Relation

SMALLEST = 1 << 10  # slots of the smallest hash table

Array = NDArray[Any]


class Table:
    """A slot for each node of a type; emptied by taking the next stamp."""

    def __init__(self, size: int) -> None:
        self.slot = memory.empty(size, 1, torch.int64).zero_().view(-1).numpy()
        self.stamp = 0

    def clear(self) -> None:
        self.stamp += 1
        if self.stamp == 1 << 31:
            self.slot[:], self.stamp = 0, 1


class NodeRelabeler:
    """The nodes of one type in a minibatch, in the order of their local ids."""

    def __init__(self, size: int, table: Table | None, disjoint: bool) -> None:
        self.size, self.table, self.disjoint = size, table, disjoint
        self.node = np.empty(0, np.int64)
        self.tree: Array | None = np.empty(0, np.int64) if disjoint else None
        self.copy: Array | None = None  # how many equal seeds came before this one
        self.known = 0
        self.ends: list[int] = []  # of the seeds, then of each hop
        if table is None:
            self.keys = np.full(SMALLEST, -1, np.int64)
            self.label_of = np.empty(SMALLEST, np.int64)
        else:
            table.clear()

    def seed(self, seed: Array, first_tree: int) -> None:
        """Enters seeds, the first of them in tree ``first_tree``."""
        self._reserve(len(seed))
        copy = np.empty(len(seed), np.int64)
        if self.table is not None:
            slot, stamp = self.table.slot, self.table.stamp
            args = (slot, stamp, seed, self.node, copy)
            repeats = ready(labels.seed_table, args)()
        else:
            self.node[: len(seed)] = seed
            if self.tree is not None:
                self.tree[: len(seed)] = np.arange(first_tree, first_tree + len(seed))
            repeats = self._enter(self.keys, self.label_of, 0, len(seed), copy)
        self.known = len(seed)
        if repeats and not self.disjoint:
            self.copy = copy

    def label(
        self, source: Array, at: int, target: Array, other: NodeRelabeler
    ) -> None:
        """Turns ``source[at:]`` into local ids; their targets are nodes of ``other``."""
        self._reserve(len(source) - at)
        if self.table is not None:
            slot, stamp = self.table.slot, self.table.stamp
            args = (slot, stamp, source, at, self.node, self.known)
            self.known = ready(labels.label_by_table, args)()
        else:
            hashed = (
                self.keys,
                self.label_of,
                self.size,
                source,
                at,
                target,
                other.tree,
            )
            more = (*hashed, self.node, self.tree, self.known)
            self.known = ready(labels.label_by_hash, more)()

    def known_edges(
        self, relation: Relation, low: Array, high: Array, other: NodeRelabeler
    ) -> Array:
        """Finds the in-edges of ``other`` that come from here; see `known_by_table`."""
        edges = (relation.row.numpy(), relation.stride, low, high)
        if self.table is not None:
            args = (self.table.slot, self.table.stamp, *edges)
            return ready(labels.known_by_table, args)()
        more = (self.keys, self.label_of, self.size, other.tree, *edges)
        return ready(labels.known_by_hash, more)()

    def names(self, hop: int) -> Array | None:
        """Returns what tells the draws of equal nodes apart at a hop."""
        return self.tree if self.disjoint else self.copy if hop == 0 else None

    def frontier(self, hop: int) -> tuple[int, int]:
        """Returns the range of nodes that the hop before found."""
        return (self.ends[hop - 1] if hop else 0), self.ends[hop]

    def _reserve(self, more: int) -> None:
        """Makes room for ``more`` nodes."""
        need = self.known + more
        self.node = grown(self.node, self.known, need)
        if self.tree is not None:
            self.tree = grown(self.tree, self.known, need)
        if self.table is None and 2 * need > len(self.keys):
            slots = 1 << (2 * need).bit_length()
            keys, label_of = np.full(slots, -1, np.int64), np.empty(slots, np.int64)
            self._enter(keys, label_of, 0, self.known, None)
            self.keys, self.label_of = keys, label_of

    def _enter(
        self, keys: Array, label_of: Array, begin: int, end: int, copy: Array | None
    ) -> int:
        args = (keys, label_of, self.node, self.tree, self.size, begin, end, copy)
        repeats: int = ready(labels.enter, args)()
        return repeats


def grown(old: Array, used: int, size: int, exact: bool = False) -> Array:
    """Returns an array of ``size`` or more columns that begins like ``old``."""
    if old.shape[-1] >= size and not exact:
        return old
    new = np.empty((*old.shape[:-1], size), old.dtype)
    new[..., :used] = old[..., :used]
    return new

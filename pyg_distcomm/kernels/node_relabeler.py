"""Relabels the nodes of a minibatch: global ids to local ids, in the order of arrival.

`NodeRelabeler` looks local ids up in a table, which has a slot with a stamp and a local id
for each node of a type, or in a hash table of node names with local ids beside them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pyg_distcomm.kernels import memory
from pyg_distcomm.kernels.compile import jit, prefetch, ready
from pyg_distcomm.kernels.core_jit import GOLDEN, mix
from pyg_distcomm.kernels.minibatch import Relation

MIN_SLOTS = 1 << 10  # slots of a hash table at first
PREFETCH_AHEAD = 32  # nodes prefetched ahead of the one in use
LOCAL_ID = np.int64(0xFFFFFFFF)  # mask: the low half of a slot; above is the stamp

Array = NDArray[Any]


class Table:
    """Holds a slot for each node of a type; taking the next stamp empties it."""

    def __init__(self, size: int) -> None:
        self.slot = memory.empty(size, 1, torch.int64).zero_().view(-1).numpy()
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
        self.size, self.table, self.disjoint = size, table, disjoint
        self.node = np.empty(0, np.int64)
        self.tree: Array | None = np.empty(0, np.int64) if disjoint else None
        self.copy: Array | None = None  # for each seed, how many equal ones came before
        self.num_nodes = 0
        self.ends: list[
            int
        ] = []  # the number of nodes after the seeds, and after each hop
        if table is None:
            self.keys = np.full(MIN_SLOTS, -1, np.int64)
            self.local_ids = np.empty(MIN_SLOTS, np.int64)
        else:
            table.clear()

    def add_seeds(self, seed: Array, first_tree: int) -> None:
        """Adds seeds, the first of them in tree ``first_tree``."""
        self._reserve(len(seed))
        copy = np.empty(len(seed), np.int64)
        if self.table is not None:
            slot, stamp = self.table.slot, self.table.stamp
            args = (slot, stamp, seed, self.node, copy)
            repeats = ready(seed_table, args)()
        else:
            self.node[: len(seed)] = seed
            if self.tree is not None:
                self.tree[: len(seed)] = np.arange(first_tree, first_tree + len(seed))
            repeats = self._add_to_hash_table(
                self.keys, self.local_ids, 0, len(seed), copy
            )
        self.num_nodes = len(seed)
        if repeats and not self.disjoint:
            self.copy = copy

    def relabel(
        self, source: Array, at: int, target: Array, other: NodeRelabeler
    ) -> None:
        """Replaces ``source[at:]`` by local ids; their targets are nodes of ``other``."""
        self._reserve(len(source) - at)
        if self.table is not None:
            slot, stamp = self.table.slot, self.table.stamp
            args = (slot, stamp, source, at, self.node, self.num_nodes)
            self.num_nodes = ready(label_by_table, args)()
        else:
            hashed = (
                self.keys,
                self.local_ids,
                self.size,
                source,
                at,
                target,
                other.tree,
            )
            more = (*hashed, self.node, self.tree, self.num_nodes)
            self.num_nodes = ready(label_by_hash, more)()

    def induced_edges(
        self, relation: Relation, low: Array, high: Array, other: NodeRelabeler
    ) -> Array:
        """Finds the in-edges of nodes of ``other`` from nodes here; see `known_by_table`."""
        edges = (relation.row.numpy(), relation.stride, low, high)
        if self.table is not None:
            args = (self.table.slot, self.table.stamp, *edges)
            return ready(known_by_table, args)()
        more = (self.keys, self.local_ids, self.size, other.tree, *edges)
        return ready(known_by_hash, more)()

    def streams(self, hop: int) -> Array | None:
        """Returns the random streams of the nodes at a hop; None if all are stream 0."""
        return self.tree if self.disjoint else self.copy if hop == 0 else None

    def frontier_range(self, hop: int) -> tuple[int, int]:
        """Returns the range of the nodes that the previous hop found."""
        return (self.ends[hop - 1] if hop else 0), self.ends[hop]

    def _reserve(self, more: int) -> None:
        """Grows the arrays, and the hash table, for ``more`` nodes."""
        need = self.num_nodes + more
        self.node = grow(self.node, self.num_nodes, need)
        if self.tree is not None:
            self.tree = grow(self.tree, self.num_nodes, need)
        if self.table is None and 2 * need > len(self.keys):
            slots = 1 << (2 * need).bit_length()
            keys, label_of = np.full(slots, -1, np.int64), np.empty(slots, np.int64)
            self._add_to_hash_table(keys, label_of, 0, self.num_nodes, None)
            self.keys, self.local_ids = keys, label_of

    def _add_to_hash_table(
        self, keys: Array, label_of: Array, begin: int, end: int, copy: Array | None
    ) -> int:
        args = (keys, label_of, self.node, self.tree, self.size, begin, end, copy)
        return ready(enter, args)()


def grow(old: Array, used: int, size: int, exact: bool = False) -> Array:
    """Returns an array of ``size`` or more columns that begins like ``old``."""
    if old.shape[-1] >= size and not exact:
        return old
    new = np.empty((*old.shape[:-1], size), old.dtype)
    new[..., :used] = old[..., :used]
    return new


# Loops --------------------------------------------------------------------------------


@jit
def seed_table(slot: Array, stamp: int, seed: Array, node: Array, copy: Array) -> int:
    """Enters the seeds into an empty table; returns how many of them are repeats.

    A repeated seed keeps a place of its own, which no edge points to, and ``copy`` says
    how many of the same came before.
    """
    repeats = 0
    copies = np.zeros(len(seed), np.int64)
    for i in range(len(seed)):
        v = seed[i]
        node[i] = v
        found = slot[v]
        if found >> 32 == stamp:
            copies[found & LOCAL_ID] += 1
            copy[i] = copies[found & LOCAL_ID]
            repeats += 1
        else:
            slot[v] = (stamp << 32) | i
            copy[i] = 0
    return repeats


@jit
def label_by_table(
    slot: Array, stamp: int, source: Array, at: int, node: Array, known: int
) -> int:
    """Turns sources into local ids, and enters those not seen before; returns how many.

    A slot holds the stamp of the minibatch that wrote it: emptying costs nothing.
    """
    last = len(source) - 1
    for k in range(at, len(source)):
        prefetch(slot, np.int64(source[min(k + PREFETCH_AHEAD, last)]))
        v = source[k]
        found = slot[v]
        if found >> 32 == stamp:
            source[k] = found & LOCAL_ID
        else:
            slot[v] = (stamp << 32) | known
            node[known] = v
            source[k] = known
            known += 1
    return known


@jit
def find_slot(keys: Array, name: np.int64) -> np.int64:
    """Returns where a name is in a hash table, or the empty slot where it would go."""
    mask = np.uint64(len(keys) - 1)
    slot = mix(np.uint64(name) + GOLDEN) & mask
    while keys[slot] != -1 and keys[slot] != name:
        slot = (slot + np.uint64(1)) & mask
    return np.int64(slot)


@jit
def enter(
    keys: Array,
    labels: Array,
    node: Array,
    tree: Array | None,
    size: int,
    begin: int,
    end: int,
    copy: Array | None,
) -> int:
    """Enters nodes ``begin .. end-1`` into a hash table; returns how many are repeats.

    A node of tree t goes by the name ``t size + node``, of no tree by its id.
    """
    repeats = 0
    copies = np.zeros(end - begin if copy is not None else 0, np.int64)
    for i in range(begin, end):
        name = np.int64(node[i]) + (0 if tree is None else tree[i] * size)
        slot = find_slot(keys, name)
        if keys[slot] == -1:
            keys[slot] = name
            labels[slot] = i
            if copy is not None:
                copy[i] = 0
        elif copy is not None:
            copies[labels[slot]] += 1
            copy[i] = copies[labels[slot]]
            repeats += 1
    return repeats


@jit
def label_by_hash(
    keys: Array,
    labels: Array,
    size: int,
    source: Array,
    at: int,
    target: Array,
    target_tree: Array | None,
    node: Array,
    tree: Array | None,
    known: int,
) -> int:
    """Does what `label_by_table` does by a hash table; sources join their target's tree."""
    for k in range(at, len(source)):
        v = source[k]
        t = np.int64(0) if target_tree is None else target_tree[target[k]]
        slot = find_slot(keys, v + t * size)
        if keys[slot] == -1:
            keys[slot] = v + t * size
            labels[slot] = known
            node[known] = v
            if tree is not None:
                tree[known] = t
            known += 1
        source[k] = labels[slot]
    return known


@jit
def known_by_table(
    slot: Array, stamp: int, row: Array, stride: int, low: Array, high: Array
) -> Array:
    """Finds the in-edges whose source is in the table: (place in low, entry, local id)."""
    total = 0
    for i in range(len(low)):
        for e in range(low[i], high[i]):
            total += slot[row[e * stride]] >> 32 == stamp
    found = np.empty((3, total), np.int64)
    k = 0
    for i in range(len(low)):
        for e in range(low[i], high[i]):
            label = slot[row[e * stride]]
            if label >> 32 == stamp:
                found[0, k], found[1, k], found[2, k] = i, e, label & LOCAL_ID
                k += 1
    return found


@jit
def known_by_hash(
    keys: Array,
    labels: Array,
    size: int,
    tree: Array | None,
    row: Array,
    stride: int,
    low: Array,
    high: Array,
) -> Array:
    """Does what `known_by_table` does by a hash table, each tree for itself."""
    total = 0
    for i in range(len(low)):
        t = np.int64(0) if tree is None else tree[i]
        for e in range(low[i], high[i]):
            total += keys[find_slot(keys, np.int64(row[e * stride]) + t * size)] != -1
    found = np.empty((3, total), np.int64)
    k = 0
    for i in range(len(low)):
        t = np.int64(0) if tree is None else tree[i]
        for e in range(low[i], high[i]):
            slot = find_slot(keys, np.int64(row[e * stride]) + t * size)
            if keys[slot] != -1:
                found[0, k], found[1, k], found[2, k] = i, e, labels[slot]
                k += 1
    return found

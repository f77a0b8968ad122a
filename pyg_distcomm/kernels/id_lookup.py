"""Maps node ids to places: in a minibatch, or in a sorted list.

`NodeRelabeler` numbers the nodes of a minibatch as they come, by a table, which has a slot
for each node of a type with a stamp and a local id, or by a hash table of names with
local ids beside them. `RankSelect` looks up ascending ids by a bit for each id there could
be, and counts; a lookup touches two lines of memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyg_distcomm.kernels import memory, threads
from pyg_distcomm.kernels.compile import jit, prefetch, ready
from pyg_distcomm.kernels.core_jit import GOLDEN, mix
from pyg_distcomm.kernels.minibatch import Relation

SMALLEST = 1 << 10  # slots of the smallest hash table
GRAIN = 1 << 14  # lookups that are worth a thread
SOON = 32  # nodes or entries asked for before they are needed
LABEL = np.int64(0xFFFFFFFF)  # the low half of a slot, a local id; a stamp is above it
ONE, SIX, LOW = np.uint64(1), np.uint64(6), np.uint64(63)

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
            repeats = ready(seed_table, args)()
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
            self.known = ready(label_by_table, args)()
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
            self.known = ready(label_by_hash, more)()

    def known_edges(
        self, relation: Relation, low: Array, high: Array, other: NodeRelabeler
    ) -> Array:
        """Finds the in-edges of ``other`` that come from here; see `known_by_table`."""
        edges = (relation.row.numpy(), relation.stride, low, high)
        if self.table is not None:
            args = (self.table.slot, self.table.stamp, *edges)
            return ready(known_by_table, args)()
        more = (self.keys, self.label_of, self.size, other.tree, *edges)
        return ready(known_by_hash, more)()

    def streams(self, hop: int) -> Array | None:
        """Returns what tells the draws of equal nodes apart at a hop."""
        return self.tree if self.disjoint else self.copy if hop == 0 else None

    def frontier_range(self, hop: int) -> tuple[int, int]:
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
        return ready(enter, args)()


def grown(old: Array, used: int, size: int, exact: bool = False) -> Array:
    """Returns an array of ``size`` or more columns that begins like ``old``."""
    if old.shape[-1] >= size and not exact:
        return old
    new = np.empty((*old.shape[:-1], size), old.dtype)
    new[..., :used] = old[..., :used]
    return new


class RankSelect:
    """The places of ascending, distinct ids in [0, total), for fast lookups."""

    def __init__(self, gid: Tensor, total: int) -> None:
        words = torch.zeros(total // 64 + 1, dtype=torch.int64)
        kind = torch.int32 if len(gid) < 2**31 else torch.int64
        counts = torch.zeros(total // 64 + 1, dtype=kind)
        self._bits = words.numpy().view("uint64"), counts.numpy()
        ready(mark_bits, (gid.long().contiguous().numpy(), *self._bits))()

    def __call__(self, ids: Tensor) -> Tensor:
        """Returns the place of each id [k], -1 for those that are not in the list."""
        ids = ids.long().contiguous()
        out = torch.empty_like(ids)
        find = ready(find_places, (*self._bits, ids.numpy(), out.numpy()), integers=2)
        threads.run_split(find, len(ids), GRAIN)
        return out


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
            copies[found & LABEL] += 1
            copy[i] = copies[found & LABEL]
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
        prefetch(slot, np.int64(source[min(k + SOON, last)]))
        v = source[k]
        found = slot[v]
        if found >> 32 == stamp:
            source[k] = found & LABEL
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
                found[0, k], found[1, k], found[2, k] = i, e, label & LABEL
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


@jit
def ones_in(word: np.uint64) -> np.int64:
    """Counts the bits of a word."""
    word = word - ((word >> ONE) & np.uint64(0x5555555555555555))
    twos = np.uint64(0x3333333333333333)
    word = (word & twos) + ((word >> np.uint64(2)) & twos)
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56))


@jit
def mark_bits(gid: Array, words: Array, counts: Array) -> None:
    """Sets the bits of ids, and counts those before each word."""
    for i in range(len(gid)):
        words[gid[i] >> 6] |= ONE << (np.uint64(gid[i]) & LOW)
    before = np.int64(0)
    for w in range(len(words)):
        counts[w] = before
        before += ones_in(words[w])


@jit
def find_places(
    words: Array, counts: Array, ids: Array, out: Array, begin: int, end: int
) -> None:
    """Looks up places: the bits set before that of an id."""
    for i in range(begin, end):
        soon = ids[min(i + SOON, end - 1)] >> 6
        prefetch(words, soon)
        prefetch(counts, soon)
        at, bit = ids[i] >> 6, np.uint64(ids[i]) & LOW
        word = words[at]
        if word >> bit & ONE:
            out[i] = counts[at] + ones_in(word & ((ONE << bit) - ONE))
        else:
            out[i] = -1

"""The inner loops that turn node ids into local ids, for Numba.

A table has a slot for each node of a type, which holds a stamp and a local id; a hash
table has names, and beside them local ids.
"""

from __future__ import annotations

import numpy as np

from pyg_distcomm.kernels.compile import Array, jit, prefetch
from pyg_distcomm.kernels.core_jit import mix

SOON = 32  # nodes or entries asked for before they are needed
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
LABEL = np.int64(
    0xFFFFFFFF
)  # the low half of a slot: a local id; the high half is a stamp


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

"""The inner loops that draw from sparse rows of integer weights, for Numba.

[Note: drawing from a Fenwick tree] Node i (from 1) of the tree of a row holds the sum of
its last `i & -i` weights up to i ([Fenwick94]). Going down from the root by halves finds
the first entry whose running sum exceeds a goal, and going up takes its weight away, each
in as many steps as the length of the row has bits. All sums are integers, so the sum that
is left is exact, and an entry that was drawn, or weighs nothing, cannot be drawn.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pyg_distcomm.kernels.compile import Array, jit
from pyg_distcomm.kernels.core_jit import mix

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
UNIT = 2.0**-53
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
MOST = 1 << 62


@jit
def count_positive(
    rowptr: Array, value: Array, count: Array, begin: int, end: int
) -> None:
    for i in range(begin, end):
        positive, total = 0, 0
        for e in range(rowptr[i], rowptr[i + 1]):
            w = value[e]
            if w < 0:
                positive = -1
                break
            if w >= MOST - total and positive >= 0:
                positive = -2
            if positive >= 0:
                total += w
                positive += w > 0
        count[i] = positive


@jit
def high_half(a: np.uint64, b: np.uint64) -> np.uint64:
    """Returns the upper 64 bits of the product of two words."""
    a_low, a_high, b_low, b_high = a & LOW, a >> HALF, b & LOW, b >> HALF
    middle = a_high * b_low + ((a_low * b_low) >> HALF)
    other = a_low * b_high + (middle & LOW)
    return a_high * b_high + (middle >> HALF) + (other >> HALF)


@jit
def word(generator: np.uint64, draw: int) -> np.uint64:
    """Returns draw number `draw` of a generator: 64 bits."""
    return mix(generator + (np.uint64(draw) + np.uint64(1)) * GOLDEN)


@jit
def grow(value: Array, first: int, size: int, tree: Array) -> int:
    """Builds the Fenwick tree of `value[first : first + size]`; returns the sum."""
    total = 0
    for i in range(1, size + 1):
        tree[i] = value[first + i - 1]
        total += tree[i]
    for i in range(1, size + 1):
        parent = i + (i & -i)
        if parent <= size:
            tree[parent] += tree[i]
    return total


@jit
def find(tree: Array, size: int, goal: Any) -> int:
    """Returns the first entry whose running sum exceeds the goal."""
    place, step = 0, 1
    while 2 * step <= size:
        step *= 2
    while step:
        below = place + step
        if below <= size and tree[below] <= goal:
            place = below
            goal -= tree[below]
        step >>= 1
    return place


@jit
def change(tree: Array, size: int, place: int, by: int) -> None:
    """Adds `by` to the weight of one entry."""
    i = place + 1
    while i <= size:
        tree[i] += by
        i += i & -i


@jit
def take_all(
    value: Array, first: int, size: int, left: int, entry: Array, lefts: Array, at: int
) -> None:
    """Takes the positive entries of a row in order."""
    for e in range(first, first + size):
        if value[e] > 0:
            entry[at], lefts[at] = e, left
            left -= value[e]
            at += 1


@jit
def draw_from(
    tree: Array,
    value: Array,
    first: int,
    size: int,
    left: int,
    key: int,
    replace: bool,
    entry: Array,
    lefts: Array,
    at: int,
    end: int,
) -> None:
    """Draws entries `at .. end-1` from the tree of one row."""
    generator = mix(np.uint64(key) + GOLDEN)
    for k in range(at, end):
        goal = np.int64(high_half(word(generator, k - at), np.uint64(left)))
        pick = find(tree, size, goal)
        entry[k], lefts[k] = first + pick, left
        if not replace:
            left -= value[first + pick]
            change(tree, size, pick, -value[first + pick])


@jit
def draw(
    rowptr: Array,
    value: Array,
    count: Array,
    keys: Array,
    ptr: Array,
    replace: bool,
    entry: Array,
    lefts: Array,
    begin: int,
    end: int,
) -> None:
    """Draws from rows begin .. end-1, each with a tree of its own."""
    most = 0
    for i in range(begin, end):
        most = max(most, rowptr[i + 1] - rowptr[i])
    tree = np.empty(most + 1, np.int64)
    for i in range(begin, end):
        first, size, at = rowptr[i], rowptr[i + 1] - rowptr[i], ptr[i]
        if ptr[i + 1] == at:
            continue
        if ptr[i + 1] - at == count[i] and not replace:
            left = 0
            for e in range(first, first + size):
                left += value[e]
            take_all(value, first, size, left, entry, lefts, at)
            continue
        left = grow(value, first, size, tree)
        row = (tree, value, first, size, left, keys[i], replace)
        draw_from(*row, entry, lefts, at, ptr[i + 1])


@jit
def draw_shared(
    tree: Array,
    value: Array,
    count: int,
    total: int,
    keys: Array,
    ptr: Array,
    replace: bool,
    entry: Array,
    lefts: Array,
) -> None:
    """Draws from one row for many keys; the tree is as before when it returns."""
    size = len(value)
    for i in range(len(keys)):
        at, end = ptr[i], ptr[i + 1]
        if end - at == count and not replace:
            take_all(value, 0, size, total, entry, lefts, at)
            continue
        row = (tree, value, 0, size, total, keys[i], replace)
        draw_from(*row, entry, lefts, at, end)
        for k in range(at, end if not replace else at):
            change(tree, size, entry[k], value[entry[k]])


@jit
def exponential_race(
    rowptr: Array,
    value: Array,
    keys: Array,
    ptr: Array,
    entry: Array,
    lefts: Array,
    begin: int,
    end: int,
) -> None:
    """Takes the entries of rows begin .. end-1 whose clocks ring first."""
    for i in range(begin, end):
        first, size = rowptr[i], rowptr[i + 1] - rowptr[i]
        generator, left = mix(np.uint64(keys[i]) + GOLDEN), 0
        clock = np.full(size, np.inf)
        for e in range(size):
            if value[first + e] > 0:
                u = (np.float64(word(generator, e) >> np.uint64(11)) + 0.5) * UNIT
                clock[e] = -math.log(u) / value[first + e]
                left += value[first + e]
        order = np.argsort(clock, kind="mergesort")
        for k in range(ptr[i + 1] - ptr[i]):
            entry[ptr[i] + k], lefts[ptr[i] + k] = first + order[k], left
            left -= value[first + order[k]]


@jit
def normalize_rows(
    rowptr: Array, value: Array, out: Array, begin: int, end: int
) -> None:
    for i in range(begin, end):
        total = 0.0
        for e in range(rowptr[i], rowptr[i + 1]):
            total += value[e]
        for e in range(rowptr[i], rowptr[i + 1]):
            out[e] = value[e] / total if total != 0 else value[e]

"""The inner loops of codecs that leave numbers out, for Numba: columns, and zeros."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from pyg_distcomm.kernels.codec_jit import bounds, draw_noise, pack_group, unpack_group
from pyg_distcomm.kernels.compile import jit

Array: TypeAlias = Any  # of one dimension, contiguous
COLUMN = (1 << 20) - 1  # the bits of a hash that are replaced by its column


@jit
def keyed_columns(
    key: int, ids: Array, width: int, count: int, columns: Array, begin: int, end: int
) -> None:
    words = np.empty(width, np.uint64)
    chosen = np.empty(count, np.int32)
    for i in range(begin, end):
        draw_noise(key, ids[i], words, width)
        for c in range(width):
            h = words[np.uint64(c)] >> np.uint64(1) & ~np.uint64(COLUMN)
            words[np.uint64(c)] = h | np.uint64(c)
        least = np.sort(words)
        for j in range(count):
            chosen[j] = np.int32(least[j] & np.uint64(COLUMN))
        columns[i * count : (i + 1) * count] = np.sort(chosen)


@jit
def top_columns(
    x: Array,
    ld: int,
    index: Array | None,
    f: int,
    count: int,
    columns: Array,
    begin: int,
    end: int,
) -> None:
    """Finds the largest magnitudes, compared as the integers `x` of their bits."""
    kind = x.dtype.type
    size = np.empty(f, x.dtype)
    positive = kind((np.uint64(1) << np.uint64(8 * x.itemsize - 1)) - np.uint64(1))
    for r in range(begin, end):
        at = ld * (r if index is None else np.int64(index[r]))
        for c in range(f):
            size[np.uint64(c)] = kind(x[np.uint64(at + c)] & positive)
        # bit by bit, the greatest number that `count` magnitudes or more reach
        least, reach = kind(0), f
        for bit in range(8 * x.itemsize - 2, -1, -1):
            trial = kind(np.int64(least) | np.int64(1) << np.int64(bit))
            found = reaching(size, trial)
            if found >= count:
                least, reach = trial, found
            if reach == count:
                break
        equal = count
        for c in range(f if reach > count else 0):
            equal -= size[c] > least
        to = r * count
        for c in range(f):
            if size[c] > least or (size[c] == least and equal > 0):
                equal -= size[c] == least
                columns[to] = c
                to += 1


@jit
def reaching(size: Array, least: Any) -> Any:
    """Counts the numbers that are not below `least`."""
    total = np.int32(0)
    for c in range(len(size)):
        total += np.int32(size[np.uint64(c)] >= least)
    return total


@jit
def take_columns(
    x: Array,
    ld: int,
    index: Array | None,
    columns: Array,
    which: Array | None,
    count: int,
    out: Array,
    begin: int,
    end: int,
) -> None:
    for r in range(begin, end):
        at = ld * (r if index is None else np.int64(index[r]))
        first = 0 if which is None else np.int64(which[r]) * count
        for j in range(count):
            column = np.uint64(columns[np.uint64(first + j)])
            out[np.uint64(r * count + j)] = x[np.uint64(at) + column]


@jit
def put_columns(
    y: Array,
    columns: Array,
    which: Array | None,
    count: int,
    scale: Any,
    out: Array,
    ld: int,
    f: int,
    begin: int,
    end: int,
) -> None:
    for r in range(begin, end):
        at = r * ld
        for c in range(f):
            out[np.uint64(at + c)] = 0
        first = 0 if which is None else np.int64(which[r]) * count
        for j in range(count):
            column = np.uint64(columns[np.uint64(first + j)])
            out[np.uint64(at) + column] = y[np.uint64(r * count + j)] * scale


@jit
def finite(
    x: Array,
    ld: int,
    index: Array | None,
    f: int,
    infinity: int,
    bad: Array,
    begin: int,
    end: int,
) -> None:
    """Notes which rows are not finite; `x` are the integers of their bits."""
    word = (np.uint64(1) << np.uint64(8 * x.itemsize - 1)) - np.uint64(1)
    largest = x.dtype.type(word)
    for r in range(begin, end):
        at = ld * (r if index is None else np.int64(index[r]))
        low, high = bounds(x, at, f, largest)
        beyond = (np.int64(low) & np.int64(largest)) >= infinity
        bad[r] = beyond or np.int64(high) >= infinity


@jit
def count_kept(
    x: Array,
    ld: int,
    index: Array | None,
    f: int,
    rows: int,
    kept: Array,
    begin: int,
    end: int,
) -> None:
    """Counts the numbers that are not zero in each group of eight rows.

    `x` are the integers of their bits, of which a zero has none but its sign.
    """
    nothing = x.dtype.type(0)
    for g in range(begin, end):
        total = 0
        for r in range(8 * g, min(8 * g + 8, rows)):
            at = ld * (r if index is None else np.int64(index[r]))
            for c in range(f):
                total += x.dtype.type(x[np.uint64(at + c)] << 1) != nothing
        kept[g] = total


@jit
def compact(
    x: Array,
    ld: int,
    index: Array | None,
    f: int,
    rows: int,
    first: Array,
    packed: Array,
    values: Array,
    begin: int,
    end: int,
) -> None:
    """Writes flags and numbers of groups begin .. end-1; `first` tells where."""
    words = np.zeros(f, np.uint64)
    flags = words.view(np.uint8)
    # every number is written, and the next one over it if it is zero: no branch
    found = np.empty(8 * f + 1, x.dtype)
    found_bytes = found.view(np.uint8)
    nothing, size = x.dtype.type(0), x.itemsize
    for g in range(begin, end):
        total = 0
        count = min(8, rows - 8 * g)
        for k in range(count):
            r = 8 * g + k
            at = ld * (r if index is None else np.int64(index[r]))
            for c in range(f):
                value = x[np.uint64(at + c)]
                flag = x.dtype.type(value << 1) != nothing
                flags[np.uint64(k * f + c)] = flag
                found[np.uint64(total)] = value
                total += flag
        flags[count * f :] = 0
        pack_group(flags, words, 1, packed, g * f)
        to = first[g] * size
        for i in range(total * size):
            values[np.uint64(to + i)] = found_bytes[np.uint64(i)]


@jit
def count_flags(packed: Array, f: int, kept: Array, begin: int, end: int) -> None:
    for g in range(begin, end):
        total = np.uint64(0)
        for i in range(g * f, min((g + 1) * f, len(packed))):
            byte = np.uint64(packed[i])
            byte -= byte >> np.uint64(1) & np.uint64(0x55)
            byte = (byte & np.uint64(0x33)) + (byte >> np.uint64(2) & np.uint64(0x33))
            total += (byte + (byte >> np.uint64(4))) & np.uint64(15)
        kept[g] = total


@jit
def expand(
    packed: Array,
    values: Array,
    first: Array,
    out: Array,
    ld: int,
    f: int,
    rows: int,
    begin: int,
    end: int,
) -> None:
    """Reads groups begin .. end-1 of what `compact` wrote; `out` as integers."""
    words = np.zeros(f, np.uint64)
    flags = words.view(np.uint8)
    found = np.zeros(8 * f + 1, out.dtype)
    found_bytes = found.view(np.uint8)
    size, kind = out.itemsize, out.dtype.type
    for g in range(begin, end):
        unpack_group(packed, g * f, 1, flags, words)
        at = first[g] * size
        for i in range((first[g + 1] - first[g]) * size):
            found_bytes[np.uint64(i)] = values[np.uint64(at + i)]
        total: Any = 0
        for k in range(min(8, rows - 8 * g)):
            base = (8 * g + k) * ld
            for c in range(f):
                flag = np.int64(flags[np.uint64(k * f + c)])
                # minus one has all bits: the number, or none of it, and no branch
                out[np.uint64(base + c)] = found[np.uint64(total)] & kind(-flag)
                total += flag

"""Runs the ops of `codec_ops` on the CPU: loops over groups of eight rows, the same bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_distcomm.kernels import codec_jit, memory
from pyg_distcomm.kernels.codec_jit import bounds, draw_noise, pack_group, unpack_group
from pyg_distcomm.kernels.codec_ops import META, Noise, rest_begins, wrong_length
from pyg_distcomm.kernels.compile import jit, ready
from pyg_distcomm.kernels.core_cpu import (
    Array,
    check_index,
    deliver,
    flat,
    over_rows,
    row_strided,
    vector,
    writable,
)

COLUMN = (1 << 20) - 1  # the bits of a hash that are replaced by its column
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

Rows = tuple[Array, int, "Array | None"]  # storage, row stride, which rows


def quantise_wide(
    x: Tensor, index: Tensor | None, bits: int, noise: Noise | None, out: Tensor
) -> int:
    """Runs `codec_ops.quantise_wide`, groups of rows in parallel."""
    m, f = _size(x, index)
    if not m * f:
        out.zero_()
        return -1
    bad = np.empty(-(-m // 8), np.int64)
    parts = _parts(out, m, f, bits)
    storage, ld, at = _rows(x, index)
    key, gid = (0, None) if noise is None else (noise[0], vector(noise[1]))
    numbers = (storage, storage.view(f"int{8 * x.itemsize}"), ld, at, f, m, bits)
    _run(codec_jit.quantise, (*numbers, key, gid, *parts, bad), m, f)
    worst = bad[bad >= 0]
    return int(worst[0]) if len(worst) else -1


def dequantise_wide(message: Tensor, bits: int, out: Tensor) -> Tensor:
    """Runs `codec_ops.dequantise_wide`, groups of rows in parallel."""
    m, f = out.shape
    target = writable(out, len(out), out)
    if m * f:
        storage, ld, _ = _rows(target, None)
        args = (*_parts(message, m, f, bits), f, m, bits, storage, ld)
        _run(codec_jit.dequantise, args, m, f)
    return deliver(target, out)


def compact(x: Tensor, index: Tensor | None = None) -> Tensor:
    """Runs `codec_ops.compact`: counts first, so that no byte is written twice."""
    m, f = _size(x, index)
    numbers = (*_rows(_integers(x), index), f, m)
    first = np.zeros(-(-m // 8) + 1, np.int64)
    _run(count_kept, (*numbers, first[1:]), m, f)
    np.cumsum(first, out=first)
    flags, size = -(-m * f // 8), x.element_size()
    out = torch.empty(flags + int(first[-1]) * size, dtype=torch.uint8)
    packed, values = _cut(out, flags)
    _run(compact_groups, (*numbers, first, packed, values), m, f)
    return out


def expand(message: Tensor, out: Tensor) -> Tensor:
    """Runs `codec_ops.expand`, groups of rows in parallel."""
    m, f = out.shape
    target, flags = writable(out, len(out), out), -(-m * f // 8)
    packed, values = _cut(message, min(flags, len(message)))
    first = np.zeros(-(-m // 8) + 1, np.int64)
    if len(packed) == flags:
        _run(count_flags, (packed, f, first[1:]), m, f)
    np.cumsum(first, out=first)
    wanted = flags + int(first[-1]) * out.element_size()
    if len(message) != wanted:
        raise ValueError(wrong_length(len(message), wanted))
    storage, ld, _ = _rows(_integers(target), None)
    _run(expand_groups, (packed, values, first, storage, ld, f, m), m, f)
    return deliver(target, out)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Runs `codec_ops.pack_bits`, on one thread."""
    out = torch.empty(-(-len(codes) * bits // 8), dtype=torch.uint8)
    words = np.zeros(-(-len(codes) // 8), np.uint64)
    padded = words.view(np.uint8)
    padded[: len(codes)] = codes.numpy()
    ready(codec_jit.pack_group, (padded, words, bits, out.numpy(), 0))()
    return out


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """Runs `codec_ops.unpack_bits`, on one thread."""
    words = np.zeros(-(-count // 8), np.uint64)
    codes = words.view(np.uint8)
    args = (packed.contiguous().numpy(), 0, bits, codes, words)
    ready(codec_jit.unpack_group, args)()
    return torch.from_numpy(codes[:count])


def keyed_columns(key: int, ids: Tensor, width: int, count: int) -> Tensor:
    """Runs `codec_ops.keyed_columns`, ids in parallel."""
    out = torch.empty(len(ids), count, dtype=torch.int32)
    args = (key, vector(ids.long()), width, count, out.view(-1).numpy())
    over_rows(choose_columns, args, len(ids), 16 * width)
    return out


def top_columns(x: Tensor, index: Tensor | None, count: int) -> Tensor:
    """Runs `codec_ops.top_columns`, rows in parallel."""
    m, f = _size(x, index)
    out = torch.empty(m, count, dtype=torch.int32)
    args = (*_rows(_integers(x), index), f, count, out.view(-1).numpy())
    over_rows(largest_columns, args, m, 16 * f)
    return out


def take_columns(
    x: Tensor, index: Tensor | None, columns: Tensor, which: Tensor | None = None
) -> Tensor:
    """Runs `codec_ops.take_columns`, rows in parallel."""
    (m, _), count = _size(x, index), columns.size(1)
    out = memory.empty(m, count, x.dtype)
    lists = (vector(columns.view(-1)), None if which is None else vector(which))
    args = (*_rows(x, index), *lists, count, out.view(-1).numpy())
    over_rows(copy_columns, args, m, count)
    return out


def put_columns(
    y: Tensor, columns: Tensor, which: Tensor | None, scale: float, out: Tensor
) -> Tensor:
    """Runs `codec_ops.put_columns`, rows in parallel."""
    (m, f), count = out.shape, columns.size(1)
    target = writable(out, len(out), out)
    lists = (vector(columns.view(-1)), None if which is None else vector(which))
    storage, ld, _ = _rows(target, None)
    factor = storage.dtype.type(scale)
    args = (vector(y.view(-1)), *lists, count, factor, storage, ld, f)
    over_rows(spread_columns, args, m, f)
    return deliver(target, out)


def first_nonfinite(x: Tensor, index: Tensor | None = None) -> int:
    """Runs `codec_ops.first_nonfinite`, rows in parallel."""
    m, f = _size(x, index)
    bad = np.zeros(m, np.bool_)
    infinity = int(_integers(torch.full((1,), float("inf"), dtype=x.dtype)))
    args = (*_rows(_integers(x), index), f, infinity, bad)
    over_rows(mark_nonfinite, args, m, f)
    return int(bad.argmax()) if bad.any() else -1


def _run(loop: Any, args: tuple[Any, ...], rows: int, width: int) -> None:
    """Runs a loop over groups of eight rows."""
    over_rows(loop, args, -(-rows // 8), 8 * width)


def _size(x: Tensor, index: Tensor | None) -> tuple[int, int]:
    return len(x) if index is None else len(index), x.size(1)


def _rows(x: Tensor, index: Tensor | None) -> Rows:
    """Returns the storage under a matrix as a vector, its row stride, and which rows."""
    if index is None:
        return (*flat(x), None)
    at = vector(index)
    check_index(at, len(x))
    if row_strided(x):
        return (*flat(x), at)
    return (*flat(x.detach().index_select(0, index)), None)  # not all rows of x


def _parts(message: Tensor, rows: int, width: int, bits: int) -> tuple[Array, ...]:
    """Returns what leads the rows, their codes, and the rest of constants if any."""
    flat, end = message.numpy(), rest_begins(rows, width, bits)
    return flat[: META * rows], flat[META * rows : end], flat[end:]


def _cut(message: Tensor, at: int) -> tuple[Array, Array]:
    flat = message.numpy()
    return flat[:at], flat[at:]


def _integers(t: Tensor) -> Tensor:
    """Returns the bits of numbers, as signed integers."""
    return t.detach().view(_INTEGERS[t.element_size()])


# Loops over columns, and over rows without zeros --------------------------------------


@jit
def choose_columns(
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
def largest_columns(
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
def copy_columns(
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
def spread_columns(
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
def mark_nonfinite(
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
def compact_groups(
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
def expand_groups(
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
    """Reads groups begin .. end-1 of what `compact_groups` wrote; `out` as integers."""
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

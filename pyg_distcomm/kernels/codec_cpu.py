"""Runs the ops of `codec_ops` on the CPU: loops over groups of eight rows, the same bytes.

Groups of eight rows fill whole bytes. Codes of a group are written side by side, a byte each,
and then packed: so no row needs to know at which bit it starts. Bytes are little-endian, as on
every processor that PyTorch is built for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_distcomm.kernels import memory
from pyg_distcomm.kernels.codec_ops import (
    LEAST,
    META,
    WIDEST,
    Noise,
    rest_begins,
    size_of,
)
from pyg_distcomm.kernels.compile import Array, Matrix, jit, reinterpret
from pyg_distcomm.kernels.core_cpu import (
    GRAIN,
    check_index,
    flat,
    over_rows,
    row_strided,
    vector,
    writable,
)
from pyg_distcomm.kernels.core_jit import hash_row, word
from pyg_distcomm.kernels.core_ops import deliver

MOST = float(np.finfo(np.float32).max)
UNIT = 2.0**16  # parts of a step, the grain of random rounding
Rows = tuple[Matrix, "Array | None"]  # a matrix, and which rows of it
# numbers, the integers of their bits, the row stride
Numbers = tuple[Array, Array, int]
# what leads rows: their minimum and step; or their codes, and the rest of constants
Levels = tuple[Array, Array, Array]
Parts = tuple[Array, Array, Array]


def quantise_wide(
    x: Tensor, index: Tensor | None, bits: int, noise: Noise | None, out: Tensor
) -> int:
    """Runs `codec_ops.quantise_wide`, groups of rows in parallel."""
    m, f = size_of(x, index)
    if not m * f:
        out.zero_()
        return -1
    if index is not None and not row_strided(x):  # not all rows of x are copied
        x, index = x.detach().index_select(0, index), None
    key, gid = (0, None) if noise is None else noise
    return Quantiser(x, index, bits, gid)(x, key, out)


class Quantiser:
    """Writes rows from the same places again and again, with the bytes of `quantise_wide`.

    What depends on the places alone is checked and converted once.

    Args:
        x, index, bits: as in `codec_ops.quantise`; later rows are of the same shape.
        gid: the ids of rows, for random rounding; None rounds to nearest.
    """

    def __init__(
        self, x: Tensor, index: Tensor | None, bits: int, gid: Tensor | None
    ) -> None:
        self._height, self._bits, self._size = len(x), bits, size_of(x, index)
        self._at = None if index is None else vector(index)
        self._gid = None if gid is None else vector(gid)
        if self._at is not None:
            check_index(self._at, len(x))
        m, f = self._size
        self._codes = META * m
        self._end = rest_begins(m, f, bits)

    def _arguments(self, x: Tensor, key: int, out: Tensor) -> tuple[Any, ...]:
        (m, f), codes, end = self._size, self._codes, self._end
        x = x.detach()
        x = x if x.stride(1) == 1 and x.stride(0) >= f else x.contiguous()
        ld, span = x.stride(0), (len(x) - 1) * x.stride(0) + f
        flat, message = x.as_strided((span,), (1,)).numpy(), out.numpy()
        parts = message[:codes], message[codes:end], message[end:]
        numbers = flat, flat.view(f"int{8 * flat.itemsize}"), ld
        bad = np.empty(-(-m // 8), np.int64)
        return numbers, self._at, (m, f), self._bits, key, self._gid, parts, bad

    def __call__(self, x: Tensor, key: int, out: Tensor) -> int:
        """Writes rows of `x` to `out`; returns the first that cannot be written, or -1."""
        if len(x) != self._height:
            raise IndexError(f"rows of {self._height} were planned, got {len(x)}")
        args, (m, f) = self._arguments(x, key, out), self._size
        loop: Any = quantise
        if m * f < GRAIN:  # one thread
            loop(*args, 0, -(-m // 8))
        else:
            _run(loop, args, m, f)
        return int(next(iter(args[-1][args[-1] >= 0]), -1))


def dequantise_wide(message: Tensor, bits: int, out: Tensor) -> Tensor:
    """Runs `codec_ops.dequantise_wide`, groups of rows in parallel."""
    m, f = out.shape
    target = writable(out, len(out), out)
    if m * f:
        args = (_parts(message, m, f, bits), (m, f), bits, flat(target))
        _run(dequantise, args, m, f)
    return deliver(target, out)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Runs `codec_ops.pack_bits`, on one thread."""
    out = torch.empty(-(-len(codes) * bits // 8), dtype=torch.uint8)
    words = np.zeros(-(-len(codes) // 8), np.uint64)
    padded = words.view(np.uint8)
    padded[: len(codes)] = codes.numpy()
    pack_group(padded, words, bits, out.numpy(), 0)
    return out


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """Runs `codec_ops.unpack_bits`, on one thread."""
    words = np.zeros(-(-count // 8), np.uint64)
    codes = words.view(np.uint8)
    args = (packed.contiguous().numpy(), 0, bits, codes, words)
    unpack_group(*args)
    return torch.from_numpy(codes[:count])


def take_columns(x: Tensor, index: Tensor | None, columns: Tensor) -> Tensor:
    """Runs `codec_ops.take_columns`, rows in parallel."""
    (m, _), count = size_of(x, index), len(columns)
    out = memory.empty((m, count), x.dtype)
    args = (*_rows(x, index), vector(columns), out.view(-1).numpy())
    over_rows(copy_columns, args, m, count)
    return out


def put_columns(y: Tensor, columns: Tensor, scale: float, out: Tensor) -> Tensor:
    """Runs `codec_ops.put_columns`, rows in parallel."""
    m, f = out.shape
    target = writable(out, len(out), out)
    numbers = vector(y.view(-1))
    args = numbers, vector(columns), numbers.dtype.type(scale), flat(target), f
    over_rows(spread_columns, args, m, f)
    return deliver(target, out)


def _run(loop: Any, args: tuple[Any, ...], rows: int, width: int) -> None:
    """Runs a loop over groups of eight rows."""
    over_rows(loop, args, -(-rows // 8), 8 * width)


def _rows(x: Tensor, index: Tensor | None) -> Rows:
    """Returns a matrix as loops take it, and which of its rows."""
    if index is None:
        return flat(x), None
    at = vector(index)
    check_index(at, len(x))
    if row_strided(x):
        return flat(x), at
    return flat(x.detach().index_select(0, index)), None  # not all rows of x


def _parts(message: Tensor, rows: int, width: int, bits: int) -> Parts:
    flat, end = message.numpy(), rest_begins(rows, width, bits)
    return flat[: META * rows], flat[META * rows : end], flat[end:]


# Loops over columns ------------------------------------------------------------------


@jit
def copy_columns(
    rows: Matrix, index: Array | None, columns: Array, out: Array, begin: int, end: int
) -> None:
    (x, ld), count = rows, len(columns)
    for r in range(begin, end):
        at = ld * (r if index is None else np.int64(index[r]))
        for j in range(count):
            column = np.uint64(columns[np.uint64(j)])
            out[np.uint64(r * count + j)] = x[np.uint64(at) + column]


@jit
def spread_columns(
    y: Array, columns: Array, scale: Any, target: Matrix, f: int, begin: int, end: int
) -> None:
    (out, ld), count = target, len(columns)
    for r in range(begin, end):
        at = r * ld
        for c in range(f):
            out[np.uint64(at + c)] = 0
        for j in range(count):
            column = np.uint64(columns[np.uint64(j)])
            out[np.uint64(at) + column] = y[np.uint64(r * count + j)] * scale


# Loops over numbers ------------------------------------------------------------------


@jit
def pack_group(codes: Array, words: Array, bits: int, out: Array, at: int) -> None:
    """Packs the bytes `codes`, which are also the 64-bit `words`, from out[at] on.

    No more bytes are written than `out` has.
    """
    end = min(len(codes) * bits // 8, len(out) - at)
    if bits == 8:
        for i in range(end):
            out[np.uint64(at + i)] = codes[np.uint64(i)]
    elif bits == 4:
        for i in range(end):
            low, high = codes[np.uint64(2 * i)], codes[np.uint64(2 * i + 1)]
            out[np.uint64(at + i)] = low | high << np.uint8(4)
    elif bits == 2:
        for i in range(end):
            j = np.uint64(4 * i)
            low = codes[j] | codes[j + np.uint64(1)] << np.uint8(2)
            high = codes[j + np.uint64(2)] | codes[j + np.uint64(3)] << np.uint8(2)
            out[np.uint64(at + i)] = low | high << np.uint8(4)
    else:
        # the lowest bit of byte i ends as bit 56 + i, and no two products meet there
        spread = np.uint64(0x0102040810204080)
        for i in range(end):
            out[np.uint64(at + i)] = (words[np.uint64(i)] * spread) >> np.uint64(56)


@jit
def unpack_group(packed: Array, at: int, bits: int, codes: Array, words: Array) -> None:
    """Fills `codes` from the bytes at packed[at] on: the reverse of `pack_group`."""
    end = min(len(codes) * bits // 8, len(packed) - at)
    if bits == 8:
        for i in range(end):
            codes[np.uint64(i)] = packed[np.uint64(at + i)]
    elif bits == 4:
        for i in range(end):
            byte, j = packed[np.uint64(at + i)], np.uint64(2 * i)
            codes[j] = byte & np.uint8(15)
            codes[j + np.uint64(1)] = byte >> np.uint8(4)
    elif bits == 2:
        for i in range(end):
            byte, j = packed[np.uint64(at + i)], np.uint64(4 * i)
            codes[j] = byte & np.uint8(3)
            codes[j + np.uint64(1)] = byte >> np.uint8(2) & np.uint8(3)
            codes[j + np.uint64(2)] = byte >> np.uint8(4) & np.uint8(3)
            codes[j + np.uint64(3)] = byte >> np.uint8(6)
    else:
        copies, own = np.uint64(0x0101010101010101), np.uint64(0x8040201008040201)
        carry, seven = np.uint64(0x7F7F7F7F7F7F7F7F), np.uint64(7)
        for i in range(end):
            # byte k keeps bit k alone, and overflows into its highest bit if it is set
            word = (np.uint64(packed[np.uint64(at + i)]) * copies) & own
            words[np.uint64(i)] = ((word + carry) >> seven) & copies


@jit
def bf16_down(value: float) -> Any:
    """Returns the bits of the greatest bf16 that is not above a float64."""
    near = np.float32(value)
    bits = np.int64(reinterpret(near))
    if np.float64(near) > value:  # to the next float32 below
        bits += 1 if bits < 0 else (-1 if bits > 0 else -(2**31) + 1)
    if bits < 0:
        bits += 0xFFFF  # a negative number falls as its bits grow
    return (bits >> 16) & 0xFFFF


@jit
def bf16_up(value: float) -> Any:
    """Returns the bits of the least bf16 that is not below a float64 >= 0."""
    near = np.float32(value)
    bits = np.int64(reinterpret(near))
    if np.float64(near) < value:
        bits += 1
    return ((bits + 0xFFFF) >> 16) & 0xFFFF


@jit
def bf16_number(bits: Any) -> float:
    """Returns the number of a bf16."""
    return np.float64(reinterpret(np.int32(np.uint32(bits) << np.uint32(16))))


@jit
def bounds(x: Array, at: Any, f: Any, rest: Any) -> tuple[Any, Any]:
    """Finds the least and greatest of ``f`` floats, by the integers of their bits.

    `rest` is the largest of these integers. Once those of negative numbers are turned
    round, they are in the order of the floats, infinities and NaN beyond all numbers.
    """
    kind = x.dtype.type
    sign = kind(8 * x.itemsize - 1)
    least, most = rest, kind(-rest - 1)
    for c in range(f):
        bits = x[np.uint64(at + c)]
        value = kind(bits ^ kind(kind(bits >> sign) & rest))
        least = kind(min(least, value))
        most = kind(max(most, value))
    low = kind(least ^ kind(kind(least >> sign) & rest))
    return low, kind(most ^ kind(kind(most >> sign) & rest))


@jit
def draw_noise(key: int, gid: int, words: Array, count: int) -> None:
    """Fills ``count`` words with hashes of (key, gid, 0 .. count-1)."""
    row = hash_row(key, gid)
    for j in range(count):
        words[np.uint64(j)] = word(row, j)


@jit
def round_row(
    x: Array,
    at: Any,
    f: Any,
    level: tuple[Any, Any, Any],
    top: Any,
    noise: Array | None,
    q: Array,
    to: Any,
) -> None:
    """Rounds to the nearest code, or up with the chance of the fraction, else down.

    `level` is z, 1 / D and UNIT in the type to compute in; `noise` has 16 bits each.
    """
    z, inverse, unit = level
    for c in range(f):
        t = (x[np.uint64(at + c)] - z) * inverse
        if noise is None:
            code = np.int32(np.rint(t))
        else:
            whole = np.int32(np.rint(t * unit)) + np.int32(noise[np.uint64(c)])
            code = np.int32(whole) >> np.int32(16)
        q[np.uint64(to + c)] = np.uint8(min(np.int32(code), np.int32(top)))


@jit
def find_levels(
    numbers: Numbers, start: Array, f: Any, top: Any, levels: Levels, first: Any
) -> int:
    """Finds minimum and step of the rows that begin at `start`, and writes them.

    Fills `low` and `step` in float64. A step of 0 means a row of the number `low`, and
    one below 0 a row that cannot be written. Returns the first such row, or -1.
    """
    (x, xi, _), (meta, low, step) = numbers, levels
    rest = xi.dtype.type((np.uint64(1) << np.uint64(8 * x.itemsize - 1)) - np.uint64(1))
    bad = -1
    for k in range(len(start)):
        low_bits, high_bits = bounds(xi, start[k], f, rest)
        least = np.float64(reinterpret(low_bits)) + 0.0
        most = np.float64(reinterpret(high_bits)) + 0.0
        if least == most and np.isfinite(most):
            low[k], step[k] = least, 0.0
            continue
        z = bf16_down(least)
        low[k] = bf16_number(z)
        d = bf16_up((most - low[k]) / top)
        step[k] = bf16_number(d)
        if not (np.isfinite(low[k]) and np.isfinite(step[k]) and np.isfinite(most)):
            d, z, step[k] = 0, 0x7FC0, -1.0
            bad = first + k if bad < 0 else bad
        write_meta(meta, first + k, d, z)
    return bad


@jit
def quantise(
    numbers: Numbers,
    index: Array | None,
    shape: tuple[int, int],
    bits: int,
    key: int,
    gid: Array | None,
    parts: Parts,
    bad: Array,
    begin: int,
    end: int,
) -> None:
    """Writes groups begin .. end-1 of eight rows."""
    (x, _, ld), (rows, f), (meta, out, tail) = numbers, shape, parts
    words = np.zeros(f, np.uint64)
    codes = words.view(np.uint8)
    noise = np.empty((f + 3) // 4, np.uint64)
    quarters = None if gid is None else noise.view(np.uint16)
    start, low, step = np.empty(8, np.int64), np.empty(8), np.empty(8)
    kind, top = x.dtype.type, 2**bits - 1
    for g in range(begin, end):
        count = min(8, rows - 8 * g)
        for k in range(count):
            r = 8 * g + k
            start[k] = ld * (r if index is None else np.int64(index[r]))
        levels = meta, low, step
        bad[g] = find_levels(numbers, start[:count], f, top, levels, 8 * g)
        if len(tail):
            tail[32 * g : 32 * g + 4 * count] = 0
        for k in range(count):
            at, to, z, d = start[k], k * f, low[k], step[k]
            if d <= 0.0:
                codes[to : to + f] = 0
                if d == 0.0:
                    same(z, x.itemsize, bits, f, codes, to, parts, 8 * g + k)
                continue
            inverse = 1.0 / d  # for this row alone: it is not sent
            if gid is not None:
                draw_noise(key, gid[8 * g + k], noise, len(noise))
            if d * top > WIDEST or d < LEAST:
                level = z, inverse, UNIT
                round_row(x, at, f, level, top, quarters, codes, to)
            else:
                near = kind(z), kind(inverse), kind(UNIT)
                round_row(x, at, f, near, top, quarters, codes, to)
        codes[count * f :] = 0
        pack_group(codes, words, bits, out, g * f * bits)


@jit
def write_meta(meta: Array, r: Any, first: Any, second: Any) -> None:
    meta[4 * r] = first & 255
    meta[4 * r + 1] = first >> 8 & 255
    meta[4 * r + 2] = second & 255
    meta[4 * r + 3] = second >> 8 & 255


@jit
def same(
    value: float,
    size: Any,
    bits: Any,
    f: Any,
    codes: Array,
    to: Any,
    parts: Parts,
    r: Any,
) -> None:
    """Writes a row of one and the same number."""
    meta, _, tail = parts
    if size == 8:
        word = np.uint64(reinterpret(np.float64(value)))
    else:
        word = np.uint64(np.uint32(reinterpret(np.float32(value)))) << np.uint64(32)
    first = np.int64(word >> np.uint64(49)) | 0x8000
    write_meta(meta, r, first, np.int64(word >> np.uint64(33)) & 0xFFFF)
    left = (word & np.uint64((1 << 33) - 1)) << np.uint64(7)
    for c in range(min(f, (32 + bits) // bits)):
        place = np.uint64(40 - (c + 1) * bits)
        codes[to + c] = (left >> place) & np.uint64(2**bits - 1)
    if len(tail):
        for i in range(4):
            tail[4 * r + i] = word >> np.uint64(8 * i) & np.uint64(255)


@jit
def dequantise(
    parts: Parts,
    shape: tuple[int, int],
    bits: int,
    target: Matrix,
    begin: int,
    end: int,
) -> None:
    """Reads groups begin .. end-1 of eight rows."""
    (meta, packed, tail), (rows, f), (out, ld) = parts, shape, target
    words = np.zeros(f, np.uint64)
    codes = words.view(np.uint8)
    kind, top = out.dtype.type, 2**bits - 1
    for g in range(begin, end):
        unpack_group(packed, g * f * bits, bits, codes, words)
        for k in range(min(8, rows - 8 * g)):
            r, to = 8 * g + k, k * f
            at = r * ld
            first = np.int64(meta[4 * r]) | np.int64(meta[4 * r + 1]) << 8
            second = np.int64(meta[4 * r + 2]) | np.int64(meta[4 * r + 3]) << 8
            if first >= 0x8000:
                head = np.uint64(first & 0x7FFF) << np.uint64(49)
                head |= np.uint64(second) << np.uint64(33)
                if len(tail):
                    for i in range(4):
                        head |= np.uint64(tail[4 * r + i]) << np.uint64(8 * i)
                value = constant(head, codes, to, f, bits, out.itemsize)
                for c in range(f):
                    out[np.uint64(at + c)] = kind(value)
                continue
            z, d = bf16_number(second), bf16_number(first)
            if top * d > WIDEST or z + top * d > MOST:
                most = MOST if out.itemsize == 4 else np.inf
                fill_below(codes, to, f, z, d, most, out, at)
            else:
                # q D is exact: the sum is rounded once, as it is in float64
                fill(codes, to, f, kind(z), kind(d), out, at)


@jit
def fill(codes: Array, to: Any, f: Any, z: Any, d: Any, out: Array, at: Any) -> None:
    for c in range(f):
        out[np.uint64(at + c)] = z + np.float32(codes[np.uint64(to + c)]) * d


@jit
def fill_below(
    codes: Array, to: Any, f: Any, z: Any, d: Any, most: Any, out: Array, at: Any
) -> None:
    for c in range(f):
        out[np.uint64(at + c)] = min(z + np.float64(codes[np.uint64(to + c)]) * d, most)


@jit
def constant(head: Any, codes: Array, to: Any, f: Any, bits: Any, size: Any) -> float:
    """Reads the number of a row that `same` wrote; `head` is all of it but its codes."""
    tail = np.uint64(0)
    for c in range(min(f, (32 + bits) // bits)):
        tail |= np.uint64(codes[to + c]) << np.uint64(40 - (c + 1) * bits)
    word = head | tail >> np.uint64(7)
    if size == 8:
        return reinterpret(np.int64(word))
    return np.float64(reinterpret(np.int32(word >> np.uint64(32))))

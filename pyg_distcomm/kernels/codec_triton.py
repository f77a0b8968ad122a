"""Holds the loops of `codec_cuda` for Triton: rows as codes, and by columns.

Each program writes whole bytes, so none has to know where rows begin, and no two write one
byte. Numbers are rounded as in `codec_ops`; no product may be fused with a sum. What tells
numbers apart reads them as the integers that have their bits, of 2, 4 or 8 bytes.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from pyg_distcomm.kernels.core_cuda import hashes


@triton.jit
def rounded(t):
    """Rounds float64 of less than 2^51 to the nearest integer, ties to even."""
    return (t + 6755399441055744.0) - 6755399441055744.0


@triton.jit
def levels(
    x,
    ld,
    index,
    low,
    high,
    rows,
    width,
    INDEXED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Finds the least and greatest number of rows, NaN for both in rows not finite."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = r < rows
    source = r
    if INDEXED:
        source = tl.load(index + r, mask=live, other=0).to(tl.int64)
    kind = x.dtype.element_ty
    least = tl.full((ROWS,), float("inf"), kind)
    most = tl.full((ROWS,), float("-inf"), kind)
    wrong = tl.zeros((ROWS,), tl.int32)
    for at in range(0, width, COLS):
        c = at + tl.arange(0, COLS)
        inside = live[:, None] & (c < width)[None, :]
        number = tl.load(x + source[:, None] * ld + c[None, :], mask=inside, other=0.0)
        fine = tl.abs(number) < float("inf")  # false for NaN
        wrong = tl.maximum(wrong, tl.max((inside & ~fine).to(tl.int32), 1))
        good = inside & fine
        least = tl.minimum(least, tl.min(tl.where(good, number, float("inf")), 1))
        most = tl.maximum(most, tl.max(tl.where(good, number, float("-inf")), 1))
    tl.store(low + r, tl.where(wrong > 0, float("nan"), least), mask=live)
    tl.store(high + r, tl.where(wrong > 0, float("nan"), most), mask=live)


@triton.jit
def quantise(
    x,
    ld,
    index,
    lows,
    inverses,
    kinds,
    words,
    key,
    gid,
    out,
    count,
    width,
    INDEXED: tl.constexpr,
    NOISE: tl.constexpr,
    BITS: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Writes BYTES bytes of codes; `kinds`: 0 a row in its type, 1 float64, 2 same, 3 bad."""
    PER: tl.constexpr = 8 // BITS
    TOP: tl.constexpr = (1 << BITS) - 1
    byte = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    place = tl.arange(0, PER)
    k = byte[:, None] * PER + place[None, :]
    live = k < count
    r = k // width
    c = k % width
    source = r
    if INDEXED:
        source = tl.load(index + r, mask=live, other=0).to(tl.int64)
    number = tl.load(x + source * ld + c, mask=live, other=0.0)
    z = tl.load(lows + r, mask=live, other=0.0)
    inverse = tl.load(inverses + r, mask=live, other=0.0)
    kind = tl.load(kinds + r, mask=live, other=3)
    narrow = x.dtype.element_ty
    near = ((number - z.to(narrow)) * inverse.to(narrow)).to(tl.float64)
    far = (number.to(tl.float64) - z) * inverse
    t = tl.where(kind == 1, far, near)
    t = tl.where(live & (kind < 2), t, 0.0)
    if NOISE:
        v = tl.load(gid + r, mask=live, other=0).to(tl.int64)
        drawn = hashes(tl.load(key), v, c // 4) >> (16 * (c % 4)).to(tl.uint64)
        part = rounded(t * 65536.0).to(tl.int64) + (drawn & 0xFFFF).to(tl.int64)
        code = part >> 16
    else:
        code = rounded(t).to(tl.int64)
    left = tl.load(words + r, mask=live, other=0)
    down = 40 - (c + 1) * BITS
    own = (left >> tl.maximum(down, 0)) & TOP
    own = tl.where((down >= 0) & (c * BITS < 33), own, 0)
    code = tl.where(kind == 2, own, tl.minimum(code, TOP))
    code = tl.where(live & (kind < 3), code, 0)
    packed = tl.sum(code << (place * BITS)[None, :].to(tl.int64), 1)
    tl.store(out + byte, packed.to(tl.uint8), mask=byte * PER < count)


@triton.jit
def constants(
    packed,
    heads,
    kinds,
    words,
    rows,
    width,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Joins the codes of rows of one number to the bits that lead them."""
    TOP: tl.constexpr = (1 << BITS) - 1
    MOST: tl.constexpr = (32 + BITS) // BITS
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = r < rows
    same = live & (tl.load(kinds + r, mask=live, other=0) == 2)
    word = tl.zeros((ROWS,), tl.int64)
    for c in range(0, MOST):
        bit = (r * width + c) * BITS
        there = same & (r * 0 + c < width)
        byte = tl.load(packed + bit // 8, mask=there, other=0).to(tl.int64)
        word = word | ((byte >> (bit % 8)) & TOP) << (40 - (c + 1) * BITS)
    head = tl.load(heads + r, mask=live, other=0)
    tl.store(words + r, head | (word >> 7), mask=live)


@triton.jit
def dequantise(
    packed,
    lows,
    steps,
    kinds,
    words,
    out,
    ld,
    most,
    count,
    width,
    BITS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Reads BLOCK codes, and numbers of rows that have but one."""
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = k < count
    r = k // width
    bit = k * BITS
    byte = tl.load(packed + bit // 8, mask=live, other=0).to(tl.int64)
    code = (byte >> (bit % 8)) & ((1 << BITS) - 1)
    z = tl.load(lows + r, mask=live, other=0.0)
    step = tl.load(steps + r, mask=live, other=0.0)
    total = z + code.to(tl.float64) * step
    limit = tl.load(most)
    total = tl.where(total > limit, limit, total).to(out.dtype.element_ty)
    same = tl.load(kinds + r, mask=live, other=0) == 2
    word = tl.load(words + r, mask=live, other=0)
    if WIDE:
        constant = word.to(tl.float64, bitcast=True)
    else:
        constant = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    number = tl.where(same, constant, total)
    tl.store(out + r * ld + k % width, number, mask=live)


@triton.jit
def words_at(x, ld, index, r, c, there, INDEXED: tl.constexpr):
    """Reads numbers of rows, and columns, as integers."""
    source = r
    if INDEXED:
        source = tl.load(index + r, mask=there, other=0).to(tl.int64)
    return tl.load(x + source * ld + c, mask=there, other=0).to(tl.int64)


@triton.jit
def pack(codes, out, count, BITS: tl.constexpr, BYTES: tl.constexpr):
    """Packs codes into BYTES bytes."""
    PER: tl.constexpr = 8 // BITS
    byte = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    place = tl.arange(0, PER)
    k = byte[:, None] * PER + place[None, :]
    code = tl.load(codes + k, mask=k < count, other=0).to(tl.int32)
    packed = tl.sum(code << (place * BITS)[None, :], 1)
    tl.store(out + byte, packed.to(tl.uint8), mask=byte * PER < count)


@triton.jit
def unpack(packed, out, count, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Reads BLOCK codes."""
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bit = k * BITS
    byte = tl.load(packed + bit // 8, mask=k < count, other=0).to(tl.int32)
    code = (byte >> (bit % 8).to(tl.int32)) & ((1 << BITS) - 1)
    tl.store(out + k, code.to(tl.uint8), mask=k < count)


@triton.jit
def take_columns(
    x,
    ld,
    index,
    columns,
    out,
    total,
    count,
    INDEXED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies BLOCK numbers of chosen columns."""
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    r, live = k // count, k < total
    c = tl.load(columns + k % count, mask=live, other=0).to(tl.int64)
    word = words_at(x, ld, index, r, c, live, INDEXED)
    tl.store(out + k, word.to(out.dtype.element_ty), mask=live)


@triton.jit
def put_columns(
    y,
    columns,
    scale,
    out,
    ld,
    total,
    count,
    BLOCK: tl.constexpr,
):
    """Puts BLOCK numbers back into their columns, scaled."""
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    r, live = k // count, k < total
    c = tl.load(columns + k % count, mask=live, other=0).to(tl.int64)
    number = tl.load(y + k, mask=live, other=0.0) * tl.load(scale)
    tl.store(out + r * ld + c, number, mask=live)

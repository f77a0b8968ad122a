"""Runs ops of `codec_ops` on CUDA by Triton: the same bytes as on the CPU.

What concerns rows as wholes is computed by torch, on vectors of a number a row; Triton reads
and writes their numbers and codes. Each program writes whole bytes, so none has to know where
rows begin, and no two write one byte. Numbers are rounded as in `codec_ops`; no product may be
fused with a sum. What tells numbers apart reads them as the integers that have their bits, of
2, 4 or 8 bytes. Ops without a backend here run as plain torch.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyg_distcomm.kernels import codec_ops
from pyg_distcomm.kernels.codec_ops import META, REALS, Noise, rest_begins, size_of
from pyg_distcomm.kernels.core_cuda import hashes, rows_of
from pyg_distcomm.kernels.core_ops import deliver
from pyg_distcomm.kernels.registry import FLOATS


@triton.jit
def rounded(t):
    """Rounds float64 of less than 2^51 to the nearest integer, ties to even."""
    return (t + 6755399441055744.0) - 6755399441055744.0


@triton.jit
def levels_loop(
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
def quantise_loop(
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
def constants_loop(
    packed, heads, kinds, words, rows, width, BITS: tl.constexpr, ROWS: tl.constexpr
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
def dequantise_loop(
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
def pack_loop(codes, out, count, BITS: tl.constexpr, BYTES: tl.constexpr):
    """Packs codes into BYTES bytes."""
    PER: tl.constexpr = 8 // BITS
    byte = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    place = tl.arange(0, PER)
    k = byte[:, None] * PER + place[None, :]
    code = tl.load(codes + k, mask=k < count, other=0).to(tl.int32)
    packed = tl.sum(code << (place * BITS)[None, :], 1)
    tl.store(out + byte, packed.to(tl.uint8), mask=byte * PER < count)


@triton.jit
def unpack_loop(packed, out, count, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Reads BLOCK codes."""
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bit = k * BITS
    byte = tl.load(packed + bit // 8, mask=k < count, other=0).to(tl.int32)
    code = (byte >> (bit % 8).to(tl.int32)) & ((1 << BITS) - 1)
    tl.store(out + k, code.to(tl.uint8), mask=k < count)


@triton.jit
def take_columns_loop(
    x, ld, index, columns, out, total, count, INDEXED: tl.constexpr, BLOCK: tl.constexpr
):
    """Copies BLOCK numbers of chosen columns."""
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    r, live = k // count, k < total
    c = tl.load(columns + k % count, mask=live, other=0).to(tl.int64)
    word = words_at(x, ld, index, r, c, live, INDEXED)
    tl.store(out + k, word.to(out.dtype.element_ty), mask=live)


@triton.jit
def put_columns_loop(y, columns, scale, out, ld, total, count, BLOCK: tl.constexpr):
    """Puts BLOCK numbers back into their columns, scaled."""
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    r, live = k // count, k < total
    c = tl.load(columns + k % count, mask=live, other=0).to(tl.int64)
    number = tl.load(y + k, mask=live, other=0.0) * tl.load(scale)
    tl.store(out + r * ld + c, number, mask=live)


BLOCK = 1024  # codes of a program
TILE = 2048  # numbers of which a program finds the least and greatest at a time
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def quantise_wide(
    x: Tensor, index: Tensor | None, bits: int, noise: Noise | None, out: Tensor
) -> int | Tensor:
    """Runs `codec_ops.quantise_wide`; the host waits for nothing."""
    m, f = size_of(x, index)
    if not m * f:
        out.zero_()
        return -1
    source, top, end = rows_of(x), 2**bits - 1, rest_begins(m, f, bits)
    at = out if index is None else index.contiguous()
    ends = x.new_empty(2, m)
    columns = min(triton.next_power_of_2(f), 256)
    rows = TILE // columns
    levels_loop[(triton.cdiv(m, rows),)](
        *(source, source.stride(0), at, ends[0], ends[1], m, f),
        INDEXED=index is not None,
        ROWS=rows,
        COLS=columns,
    )
    low, high = ends + 0.0
    z, step, word, same, bad = codec_ops.write_bounds(low, high, top, out, end)
    width = step.double()
    kind = ((width * top > codec_ops.WIDEST) | (width < codec_ops.LEAST)).to(
        torch.int32
    )
    kind = kind.masked_fill(same, 2).masked_fill(bad, 3)
    drawn = noise is not None
    key = torch.full((1,), noise[0] if noise else 0, dtype=torch.int64, device=x.device)
    some = BLOCK * bits // 8
    quantise_loop[(triton.cdiv(m * f, BLOCK),)](
        *(source, source.stride(0), at, z.double(), 1.0 / width, kind),
        (word & ((1 << 33) - 1)) << 7,
        *(key, noise[1].contiguous() if noise else at, out[META * m :], m * f, f),
        INDEXED=index is not None,
        NOISE=drawn,
        BITS=bits,
        BYTES=some,
        enable_fp_fusion=False,
    )
    row = torch.arange(m, device=x.device).masked_fill(~bad, m).amin()
    return row.masked_fill(row >= m, -1)


def dequantise_wide(message: Tensor, bits: int, out: Tensor) -> Tensor:
    """Runs `codec_ops.dequantise_wide`; the host waits for nothing."""
    m, f = out.shape
    if not out.numel():
        return out
    end = rest_begins(m, f, bits)
    z, step, head, same = codec_ops.read_bounds(message, m, end)
    kind = same.to(torch.int32) * 2
    packed, words = message[META * m : end].contiguous(), torch.empty_like(head)
    constants_loop[(triton.cdiv(m, 128),)](
        packed, head, kind, words, m, f, BITS=bits, ROWS=128
    )
    home = rows_of(out)
    most = torch.full_like(z[:1], torch.finfo(out.dtype).max)
    dequantise_loop[(triton.cdiv(m * f, BLOCK),)](
        *(packed, z, step, kind, words, home, home.stride(0), most, m * f, f),
        BITS=bits,
        WIDE=out.dtype == torch.float64,
        BLOCK=BLOCK,
        enable_fp_fusion=False,
    )
    return deliver(home, out)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Runs `codec_ops.pack_bits`."""
    out = codes.new_empty(-(-len(codes) * bits // 8))
    if len(out):
        pack_loop[(triton.cdiv(len(out), BLOCK),)](
            codes.contiguous(), out, len(codes), BITS=bits, BYTES=BLOCK
        )
    return out


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """Runs `codec_ops.unpack_bits`."""
    out = packed.new_empty(count)
    if count:
        unpack_loop[(triton.cdiv(count, BLOCK),)](
            packed.contiguous(), out, count, BITS=bits, BLOCK=BLOCK
        )
    return out


def take_columns(x: Tensor, index: Tensor | None, columns: Tensor) -> Tensor:
    """Runs `codec_ops.take_columns`."""
    if x.dtype not in REALS:
        return codec_ops.take_columns.definition(x, index, columns)
    (m, _), count = size_of(x, index), len(columns)
    out = x.new_empty(m, count)
    if out.numel():
        words = _words(x)
        take_columns_loop[(triton.cdiv(m * count, BLOCK),)](
            *(words, words.stride(0), out if index is None else index.contiguous()),
            *(columns.contiguous(), out.view(words.dtype), m * count, count),
            INDEXED=index is not None,
            BLOCK=BLOCK,
        )
    return out


def put_columns(y: Tensor, columns: Tensor, scale: float, out: Tensor) -> Tensor:
    """Runs `codec_ops.put_columns`."""
    if y.dtype not in FLOATS or out.dtype != y.dtype:
        return codec_ops.put_columns.definition(y, columns, scale, out)
    out.zero_()
    if y.numel():
        home, count = rows_of(out), y.size(1)
        put_columns_loop[(triton.cdiv(y.numel(), BLOCK),)](
            *(y.contiguous(), columns.contiguous(), y.new_full((1,), scale)),
            *(home, home.stride(0), y.numel(), count),
            BLOCK=BLOCK,
        )
        deliver(home, out)
    return out


def _words(x: Tensor) -> Tensor:
    """Returns numbers as integers with their bits."""
    return rows_of(x).view(_WORDS[x.element_size()])

"""Runs ops of `codec_ops` on CUDA by Triton: the same bytes as on the CPU.

What concerns rows as wholes is computed by torch, on vectors of a number a row; Triton reads
and writes their numbers and codes. Ops without a backend here run as plain torch.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from pyg_distcomm.kernels import codec_ops, codec_triton
from pyg_distcomm.kernels.codec_ops import (
    META,
    REALS,
    Noise,
    rest_begins,
)
from pyg_distcomm.kernels.core_cuda import deliver, rows_of
from pyg_distcomm.kernels.registry import FLOATS

BLOCK = 1024  # codes of a program
TILE = 2048  # numbers of which a program finds the least and greatest at a time
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def quantise_wide(
    x: Tensor, index: Tensor | None, bits: int, noise: Noise | None, out: Tensor
) -> int | Tensor:
    """Runs `codec_ops.quantise_wide`; the host waits for nothing."""
    m, f = _size(x, index)
    if not m * f:
        out.zero_()
        return -1
    source, top, end = rows_of(x), 2**bits - 1, rest_begins(m, f, bits)
    at = out if index is None else index.contiguous()
    ends = x.new_empty(2, m)
    columns = min(triton.next_power_of_2(f), 256)
    rows = TILE // columns
    codec_triton.levels[(triton.cdiv(m, rows),)](
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
    codec_triton.quantise[(triton.cdiv(m * f, BLOCK),)](
        *(source, source.stride(0), at, z.double(), 1.0 / width, kind),
        (word & ((1 << 33) - 1)) << 7,
        *(key, noise[1].contiguous() if noise else at, out[META * m :], m * f, f),
        INDEXED=index is not None,
        NOISE=drawn,
        BITS=bits,
        BYTES=some,
        enable_fp_fusion=False,
    )
    row = torch.arange(m, device=x.device).masked_fill(~bad, m)
    return _first(row.amin(), m)


def dequantise_wide(message: Tensor, bits: int, out: Tensor) -> Tensor:
    """Runs `codec_ops.dequantise_wide`; the host waits for nothing."""
    m, f = out.shape
    if not out.numel():
        return out
    end = rest_begins(m, f, bits)
    z, step, head, same = codec_ops.read_bounds(message, m, end)
    kind = same.to(torch.int32) * 2
    packed, words = message[META * m : end].contiguous(), torch.empty_like(head)
    codec_triton.constants[(triton.cdiv(m, 128),)](
        packed, head, kind, words, m, f, BITS=bits, ROWS=128
    )
    home = rows_of(out)
    most = torch.full_like(z[:1], torch.finfo(out.dtype).max)
    codec_triton.dequantise[(triton.cdiv(m * f, BLOCK),)](
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
        codec_triton.pack[(triton.cdiv(len(out), BLOCK),)](
            codes.contiguous(), out, len(codes), BITS=bits, BYTES=BLOCK
        )
    return out


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """Runs `codec_ops.unpack_bits`."""
    out = packed.new_empty(count)
    if count:
        codec_triton.unpack[(triton.cdiv(count, BLOCK),)](
            packed.contiguous(), out, count, BITS=bits, BLOCK=BLOCK
        )
    return out


def take_columns(x: Tensor, index: Tensor | None, columns: Tensor) -> Tensor:
    """Runs `codec_ops.take_columns`."""
    if x.dtype not in REALS:
        return codec_ops.take_columns.definition(x, index, columns)
    (m, _), count = _size(x, index), len(columns)
    out = x.new_empty(m, count)
    if out.numel():
        words = _words(x)
        codec_triton.take_columns[(triton.cdiv(m * count, BLOCK),)](
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
        codec_triton.put_columns[(triton.cdiv(y.numel(), BLOCK),)](
            *(y.contiguous(), columns.contiguous(), y.new_full((1,), scale)),
            *(home, home.stride(0), y.numel(), count),
            BLOCK=BLOCK,
        )
        deliver(home, out)
    return out


def _first(row: Tensor, rows: int) -> Tensor:
    return row.masked_fill(row >= rows, -1)


def _size(x: Tensor, index: Tensor | None) -> tuple[int, int]:
    return len(x) if index is None else len(index), x.size(1)


def _words(x: Tensor) -> Tensor:
    """Returns numbers as integers with their bits."""
    return rows_of(x).view(_WORDS[x.element_size()])

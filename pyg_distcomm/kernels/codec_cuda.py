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
    Noise,
    rest_begins,
)
from pyg_distcomm.kernels.core_cuda import deliver, rows_of

BLOCK = 1024  # codes of a program
TILE = 2048  # numbers of which a program finds the least and greatest at a time


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


def _first(row: Tensor, rows: int) -> Tensor:
    return row.masked_fill(row >= rows, -1)


def _size(x: Tensor, index: Tensor | None) -> tuple[int, int]:
    return len(x) if index is None else len(index), x.size(1)

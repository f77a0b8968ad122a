"""Runs the ops of `core_ops` on CUDA: by Triton, or by cuSPARSE where it does better.

Nothing here waits for the device. With `torch.use_deterministic_algorithms(True)` sums are
taken in the order of the CPU, and no product is fused with a sum.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyg_distcomm.kernels import core_library, core_ops, core_triton

gather_rows = core_library.gather_rows

CUT = 1024  # edges of a window, into which long rows are cut
TILE = 256  # numbers that a program of a product sums at a time
WIDEST = 128  # columns of a tile
UNROLL = 4  # edges that are read together
LIBRARY_WIDTH = 256  # columns from which cuSPARSE is asked, if a matrix has values,
LIBRARY_DEGREE = 32  # and edges a row from which it is
BLOCK = 1024  # numbers of a program that draws
_WIDE = {torch.float64: tl.float64}
_TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def spmm(
    rowptr: Tensor,
    col: Tensor,
    value: Tensor | None,
    x: Tensor,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """Runs `core_ops.spmm`, a tile of rows and columns a program.

    Holds no more than `[nnz / 1024, f]` beside the result, for the parts of long rows. The
    bits are the same at each run; in deterministic mode rows are not cut, and they are those
    of the CPU.
    """
    if x.dtype not in _TYPES or (value is not None and value.dtype not in _TYPES):
        return core_ops.spmm.definition(rowptr, col, value, x, out, accumulate)
    in_order = torch.are_deterministic_algorithms_enabled()
    if not in_order and value is not None and library_wins(rowptr, col, x):
        return core_library.spmm(rowptr, col, value, x, out, accumulate)
    m, f = rowptr.numel() - 1, x.size(1)
    target = x.new_empty(m, f) if out is None else out.detach()
    if not m * f:
        return target if out is None else out
    source, home = rows_of(x), rows_of(target)
    wide = _WIDE.get(x.dtype, tl.float32)
    columns = min(triton.next_power_of_2(f), WIDEST)
    blocks = triton.cdiv(f, columns)
    weight = source if value is None else value.detach().contiguous()
    matrix = (rowptr.contiguous(), col.contiguous(), weight)
    cut = 0 if in_order or len(col) <= 2 * CUT else CUT
    sums = source
    options: dict[str, Any] = {
        "WEIGHTED": value is not None,
        "CUT": cut,
        "WIDE": wide,
        "COLS": columns,
        "UNROLL": UNROLL,
        "enable_fp_fusion": not in_order,
    }
    if cut:
        windows = triton.cdiv(len(col), CUT)
        kind = torch.float64 if x.dtype == torch.float64 else torch.float32
        sums = torch.empty(windows, f, dtype=kind, device=x.device)
        core_triton.spmm_windows[(windows, blocks)](
            *matrix, source, source.stride(0), sums, m, f, **options
        )
    rows = max(TILE // columns, 1)
    core_triton.spmm_rows[(triton.cdiv(m, rows), blocks)](
        *(*matrix, source, source.stride(0), home, home.stride(0), sums, m, f),
        ADD=accumulate,
        ROWS=rows,
        **options,
    )
    return deliver(home, target if out is None else out)


def library_wins(rowptr: Tensor, col: Tensor, x: Tensor) -> bool:
    """Tells whether cuSPARSE is to multiply: a wide x, and many edges a row."""
    dense = len(col) >= LIBRARY_DEGREE * (rowptr.numel() - 1)
    return dense and x.size(1) >= LIBRARY_WIDTH and core_library.fits(rowptr, col, x)


def sddmm(rowptr: Tensor, col: Tensor, g: Tensor, x: Tensor) -> Tensor:
    """Runs `core_ops.sddmm`, a few edges a program.

    The number of edges is read from the device when offsets are first seen.
    """
    if x.dtype not in _TYPES:
        return core_ops.sddmm.definition(rowptr, col, g, x)
    low, high = core_ops.span_of(rowptr)
    edges = high - low
    out, f = x.new_empty(edges), x.size(1)
    if not edges:
        return out
    left, right = rows_of(g), rows_of(x)
    columns = min(triton.next_power_of_2(max(f, 1)), 64)
    some = 1024 // columns
    core_triton.sddmm[(triton.cdiv(edges, some),)](
        rowptr.contiguous(),
        col.contiguous(),
        *(left, left.stride(0), right, right.stride(0)),
        *(out, edges, rowptr.numel() - 1, f),
        WIDE=_WIDE.get(x.dtype, tl.float32),
        EDGES=some,
        COLS=columns,
        enable_fp_fusion=True,
    )
    return out


def scatter_add_rows(out: Tensor, index: Tensor, src: Tensor) -> Tensor:
    """Runs `core_ops.scatter_add_rows`; in deterministic mode in order of k.

    For that the rows are sorted by target, and added as a product with a matrix of ones;
    rows whose target lies outside `out` are then left out.
    """
    in_order = torch.are_deterministic_algorithms_enabled()
    if not in_order or out.dim() != 2 or out.dtype not in _TYPES:
        return core_library.scatter_add_rows(out, index, src)
    target, order = torch.sort(index, stable=True)
    rows = torch.arange(len(out) + 1, device=index.device, dtype=index.dtype)
    rowptr = torch.searchsorted(target, rows)
    return spmm(rowptr, order, None, src, out, True)


def keyed_bits(key: int, gid: Tensor, cols: int) -> Tensor:
    """Runs `core_ops.keyed_bits`."""
    out = torch.empty(gid.numel(), cols, dtype=torch.int32, device=gid.device)
    return _keyed(key, gid, out, out, cols, 0, gid, 0)


def keyed_mask(key: int, gid: Tensor, cols: int, p: float) -> Tensor:
    """Runs `core_ops.keyed_mask`."""
    out = torch.empty(gid.numel(), cols, dtype=torch.bool, device=gid.device)
    threshold = core_ops.drop_threshold(p)
    _keyed(key, gid, out, out.view(torch.int8), cols, threshold, gid, 1)
    return out


def keyed_dropout(x: Tensor, key: int, gid: Tensor, p: float) -> Tensor:
    """Runs `core_ops.keyed_dropout`, fused."""
    if x.dtype not in _TYPES:
        return core_ops.keyed_dropout.definition(x, key, gid, p)
    source = x.detach().contiguous()
    out = torch.empty_like(source)
    cols = x.numel() // len(x) if len(x) else 0
    threshold = core_ops.drop_threshold(p)
    scale = torch.full((1,), core_ops.drop_scale(p), dtype=x.dtype, device=x.device)
    return _keyed(key, gid, source, out, cols, threshold, scale, 2)


def _keyed(
    key: int,
    gid: Tensor,
    x: Tensor,
    out: Tensor,
    cols: int,
    threshold: int,
    scale: Tensor,
    kind: int,
) -> Tensor:
    count = out.numel()
    if count:
        words = torch.full((1,), key, dtype=torch.int64, device=gid.device)
        core_triton.keyed[(triton.cdiv(count, BLOCK),)](
            *(words, gid.contiguous(), x, out, cols, count, threshold, scale),
            KIND=kind,
            WIDE=_WIDE.get(x.dtype, tl.float32),
            BLOCK=BLOCK,
            enable_fp_fusion=False,
        )
    return out


def rows_of(t: Tensor) -> Tensor:
    """Returns a matrix whose rows lie side by side in memory, itself if it is one."""
    t = t.detach()
    return t if t.stride(1) == 1 or t.size(1) == 0 else t.contiguous()


def deliver(home: Tensor, out: Tensor) -> Tensor:
    """Returns `out`, with what was computed in `home`."""
    if home.data_ptr() != out.data_ptr():
        out.detach().copy_(home)
    return out

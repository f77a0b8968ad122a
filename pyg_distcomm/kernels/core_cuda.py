"""Runs the ops of `core_ops` on CUDA: by Triton, or by cuSPARSE where it does better.

Nothing here waits for the device. With `torch.use_deterministic_algorithms(True)` sums are
taken in the order of the CPU, and no product is fused with a sum. Kernels take matrices as
pointers and the distance between rows (``ld``); on the CPU they run, number for number, in
Triton's interpreter (``TRITON_INTERPRET=1``).

[Note: long rows cut up] The edges are cut into windows of ``CUT``, wherever rows begin. A
row sums its own edges up to the end of the first window that lies in it whole; each window
after that is summed by a program of its own, and the row adds those sums in order. Every
program finds its row by bisection, so nothing is planned and the host waits for nothing;
the order of each sum depends on the matrix alone.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyg_distcomm.kernels import core_ops

CUT = 1024  # edges of a window, into which long rows are cut
TILE = 256  # numbers that a program of a product sums at a time
WIDEST = 128  # columns of a tile
UNROLL = 4  # edges that are read together
LARGE = 1 << 20  # edges of a matrix from which cuSPARSE may be asked:
SKEW = 16  # if its longest row is so many times the mean,
LIBRARY_WIDTH = 128  # or x has so many columns, the matrix values,
LIBRARY_DEGREE = 32  # and so many edges per row
BLOCK = 1024  # numbers of a program that draws
_WIDE = {torch.float64: tl.float64}
_TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def row_of(rowptr, edge, rows):
    """Returns the row that holds an edge: the last whose offset is not above it."""
    low = tl.full((), 0, tl.int64)
    high = tl.full((), 0, tl.int64) + rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(rowptr + middle).to(tl.int64) <= edge:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def add_edge(
    total,
    col,
    value,
    x,
    x_ld,
    e,
    there,
    c,
    ok,
    WEIGHTED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Adds one edge to each row of a tile, where there is one."""
    source = tl.load(col + e, mask=there, other=0).to(tl.int64)
    at = x + source[:, None] * x_ld + c[None, :]
    number = tl.load(at, mask=there[:, None] & ok[None, :], other=0.0)
    if WEIGHTED:
        weight = tl.load(value + e, mask=there, other=0.0)
        weight = weight.to(x.dtype.element_ty).to(WIDE)
        number = number.to(WIDE) * weight[:, None]
    return tl.where(there[:, None], total + number.to(WIDE), total)


@triton.jit
def spmm_rows(
    rowptr,
    col,
    value,
    x,
    x_ld,
    out,
    out_ld,
    sums,
    rows,
    width,
    WEIGHTED: tl.constexpr,
    ADD: tl.constexpr,
    CUT: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Sums the edges of ROWS rows in order, in COLS columns; CUT of 0 cuts no row."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLS + tl.arange(0, COLS)
    live, ok = r < rows, c < width
    low = tl.load(rowptr + r, mask=live, other=0).to(tl.int64)
    high = tl.load(rowptr + r + 1, mask=live, other=0).to(tl.int64)
    stop = high
    if CUT:
        stop = tl.minimum(high, (low + CUT - 1) // CUT * CUT + CUT)
    home = out + r[:, None] * out_ld + c[None, :]
    inside = live[:, None] & ok[None, :]
    total = tl.zeros((ROWS, COLS), WIDE)
    if ADD:
        total = tl.load(home, mask=inside, other=0.0).to(WIDE)
    longest = tl.max(stop - low, 0)
    for k in range(0, longest, UNROLL):
        for u in tl.static_range(UNROLL):
            e = low + k + u
            total = add_edge(
                total, col, value, x, x_ld, e, e < stop, c, ok, WEIGHTED, WIDE
            )
    if CUT:
        most = tl.max((high - stop + CUT - 1) // CUT, 0)
        first = stop // CUT  # where a row goes on, it stopped at the end of a window
        for w in range(0, most):
            there = stop + w * CUT < high
            part = sums + (first + w)[:, None] * width + c[None, :]
            number = tl.load(part, mask=there[:, None] & ok[None, :], other=0.0)
            total = tl.where(there[:, None], total + number, total)
    tl.store(home, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def spmm_windows(
    rowptr,
    col,
    value,
    x,
    x_ld,
    sums,
    rows,
    width,
    WEIGHTED: tl.constexpr,
    CUT: tl.constexpr,
    WIDE: tl.constexpr,
    COLS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Sums a window of edges that a long row leaves to it; see the Note above."""
    window = tl.program_id(0).to(tl.int64)
    begin = window * CUT
    first = tl.load(rowptr).to(tl.int64)
    end = tl.load(rowptr + rows).to(tl.int64)
    if (begin >= first) & (begin < end):
        row = row_of(rowptr, begin, rows)
        low = tl.load(rowptr + row).to(tl.int64)
        high = tl.load(rowptr + row + 1).to(tl.int64)
        if begin >= (low + CUT - 1) // CUT * CUT + CUT:
            stop = tl.minimum(high, begin + CUT)
            c = tl.program_id(1) * COLS + tl.arange(0, COLS)
            ok = c < width
            total = tl.zeros((1, COLS), WIDE)
            one = tl.zeros((1,), tl.int64)
            for k in range(0, stop - begin, UNROLL):
                for u in tl.static_range(UNROLL):
                    e = one + begin + k + u
                    total = add_edge(
                        total, col, value, x, x_ld, e, e < stop, c, ok, WEIGHTED, WIDE
                    )
            home = sums + (one + window)[:, None] * width + c[None, :]
            tl.store(home, total, mask=ok[None, :])


@triton.jit
def sddmm_edges(
    rowptr,
    col,
    g,
    g_ld,
    x,
    x_ld,
    out,
    edges,
    rows,
    width,
    WIDE: tl.constexpr,
    EDGES: tl.constexpr,
    COLS: tl.constexpr,
):
    """Takes the dot products of EDGES edges, COLS columns at a time."""
    first = tl.load(rowptr).to(tl.int64)
    end = tl.load(rowptr + rows).to(tl.int64)
    k = tl.program_id(0).to(tl.int64) * EDGES + tl.arange(0, EDGES)
    live = (k < edges) & (k + first < end)
    e = k + first
    low = tl.zeros((EDGES,), tl.int64)
    high = low + rows
    while tl.max(high - low, 0) > 1:
        middle = (low + high) // 2
        below = tl.load(rowptr + middle, mask=live, other=0).to(tl.int64) <= e
        low, high = tl.where(below, middle, low), tl.where(below, high, middle)
    source = tl.load(col + e, mask=live, other=0).to(tl.int64)
    total = tl.zeros((EDGES,), WIDE)
    for at in range(0, width, COLS):
        c = at + tl.arange(0, COLS)
        inside = live[:, None] & (c < width)[None, :]
        a = tl.load(g + low[:, None] * g_ld + c[None, :], mask=inside, other=0.0)
        b = tl.load(x + source[:, None] * x_ld + c[None, :], mask=inside, other=0.0)
        total += tl.sum(a.to(WIDE) * b.to(WIDE), 1)
    tl.store(out + k, total.to(out.dtype.element_ty), mask=live)


@triton.jit
def mix(z):
    """Mixes 64 bits; see `core_ops.keyed_bits`."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def hashes(key, gid, draw):
    """Returns hash number `draw` of each (key, gid): 64 bits."""
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    row = mix(key.to(tl.uint64) ^ mix(gid.to(tl.uint64) + golden))
    return mix(row + (draw.to(tl.uint64) + 1) * golden)


@triton.jit
def keyed(
    key,
    gid,
    x,
    out,
    cols,
    count,
    threshold,
    scale,
    KIND: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Draws 24 bits per number: writes the bits (0), the mask (1), or the dropout of x (2)."""
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = k < count
    v = tl.load(gid + k // cols, mask=live, other=0).to(tl.int64)
    drawn = (hashes(tl.load(key), v, k % cols) >> 40).to(tl.int32)
    if KIND == 0:
        tl.store(out + k, drawn, mask=live)
    elif KIND == 1:
        tl.store(out + k, (drawn >= threshold).to(tl.int8), mask=live)
    else:
        number = tl.load(x + k, mask=live, other=0.0).to(WIDE)
        factor = tl.load(scale).to(WIDE)
        factor = tl.where(drawn >= threshold, factor, factor * 0)
        tl.store(out + k, (number * factor).to(out.dtype.element_ty), mask=live)


def spmm(
    rowptr: Tensor,
    col: Tensor,
    value: Tensor | None,
    x: Tensor,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """Runs `core_ops.spmm`, a tile of rows and columns per program.

    Holds no more than `[nnz / 1024, f]` beside the result, for the parts of long rows. The
    bits are the same at each run; in deterministic mode rows are not cut, and they are those
    of the CPU.
    """
    if x.dim() > 2:
        assert value is not None  # a number for each head
        target = x.new_empty(len(rowptr) - 1, *x.shape[1:]) if out is None else out
        for h in range(x.size(1)):
            spmm(rowptr, col, value[:, h], x[:, h], target[:, h], accumulate)
        return target
    if x.dtype not in _TYPES or (value is not None and value.dtype not in _TYPES):
        return core_ops.spmm.definition(rowptr, col, value, x, out, accumulate)
    in_order = torch.are_deterministic_algorithms_enabled()
    if not in_order and library_wins(rowptr, col, value, x):
        return core_ops.library_spmm(rowptr, col, value, x, out, accumulate)
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
        spmm_windows[(windows, blocks)](
            *matrix, source, source.stride(0), sums, m, f, **options
        )
    rows = max(TILE // columns, 1)
    spmm_rows[(triton.cdiv(m, rows), blocks)](
        *(*matrix, source, source.stride(0), home, home.stride(0), sums, m, f),
        ADD=accumulate,
        ROWS=rows,
        **options,
    )
    return core_ops.deliver(home, target if out is None else out)


def library_wins(rowptr: Tensor, col: Tensor, value: Tensor | None, x: Tensor) -> bool:
    """Returns whether cuSPARSE is to multiply: where it was faster on a device.

    That is a large matrix whose rows differ much in length, or one with values and a wide x;
    see benchmarks/reports/cuda.md.
    The length of the longest row is read from the device when offsets are first seen.
    """
    edges, rows = len(col), rowptr.numel() - 1
    if edges < LARGE or not core_ops.library_fits(rowptr, col, x):
        return False
    if core_ops.longest_of(rowptr) * rows > SKEW * edges:
        return True
    wide = value is not None and x.size(1) >= LIBRARY_WIDTH
    return wide and edges >= LIBRARY_DEGREE * rows


def sddmm(rowptr: Tensor, col: Tensor, g: Tensor, x: Tensor) -> Tensor:
    """Runs `core_ops.sddmm`, a few edges per program.

    The number of edges is read from the device when offsets are first seen.
    """
    if x.dim() > 2:
        heads = range(x.size(1))
        return torch.stack([sddmm(rowptr, col, g[:, h], x[:, h]) for h in heads], 1)
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
    sddmm_edges[(triton.cdiv(edges, some),)](
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
        return out.index_add_(0, index, src)
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
        keyed[(triton.cdiv(count, BLOCK),)](
            *(words, gid.contiguous(), x, out, cols, count, threshold, scale),
            KIND=kind,
            WIDE=_WIDE.get(x.dtype, tl.float32),
            BLOCK=BLOCK,
            enable_fp_fusion=False,
        )
    return out


def rows_of(t: Tensor) -> Tensor:
    """Returns a matrix whose rows are contiguous, without copying if they are."""
    t = t.detach()
    return t if t.stride(1) == 1 or t.size(1) == 0 else t.contiguous()

"""Holds the loops of `core_cuda` for Triton: products by rows, and keyed randomness.

Matrices are pointers and the distance between rows (``ld``). The same loops run on the CPU,
number for number, in Triton's interpreter (``TRITON_INTERPRET=1``).

[Note: long rows cut up] The edges are cut into windows of ``CUT``, wherever rows begin. A
row sums its own edges up to the end of the first window that lies in it whole; each window
after that is summed by a program of its own, and the row adds those sums in order. Every
program finds its row by bisection, so nothing is planned and the host waits for nothing;
the order of each sum depends on the matrix alone.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


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
def sddmm(
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
    """Draws 24 bits a number: writes them (0), whether they keep it (1), or what is left."""
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

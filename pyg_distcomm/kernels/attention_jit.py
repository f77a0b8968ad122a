"""Holds the loops of attention of `core_cpu` for Numba, each over a range of targets."""

from __future__ import annotations

import numpy as np

from pyg_distcomm.kernels.compile import LINE, Array, jit, prefetch, reordering

SOON = 16  # edges whose rows are prefetched ahead of the one in use


@reordering
def fetch_ahead(x: Array, col: Array, e: int, last: np.int64, wide: int) -> None:
    """Prefetches the row that is read SOON edges after `e`."""
    at = np.int64(col[min(e + SOON, last)]) * wide
    for k in range(0, wide, LINE // x.itemsize):
        prefetch(x, at + k)


@reordering
def score(
    g: Array,
    g_at: int,
    x: Array,
    x_at: np.int64,
    a: Array,
    a_at: int,
    slope: float,
    f: int,
) -> float:
    """Returns `<a, LeakyReLU(g + x)>` of one head."""
    total = g.dtype.type(0)
    for k in range(f):
        s = g[np.uint64(g_at + k)] + x[np.uint64(x_at + k)]
        total += a[np.uint64(a_at + k)] * (s if s > 0 else s * slope)
    return total


@jit
def pair_scores(
    rowptr: Array,
    col: Array,
    g: Array,
    x: Array,
    a: Array,
    slope: float,
    out: Array,
    heads: int,
    f: int,
    begin: int,
    end: int,
) -> None:
    first, last = np.int64(rowptr[0]), np.int64(rowptr[end]) - 1
    wide = heads * f
    for i in range(begin, end):
        for e in range(np.int64(rowptr[i]), np.int64(rowptr[i + 1])):
            fetch_ahead(x, col, e, last, wide)
            j = np.int64(col[e]) * wide
            for h in range(heads):
                at = h * f
                found = score(g, i * wide + at, x, j + at, a, at, slope, f)
                out[(e - first) * heads + h] = found


@jit
def pair_scores_grad(
    rowptr: Array,
    col: Array,
    g: Array,
    x: Array,
    a: Array,
    slope: float,
    by: Array,
    out: Array,
    by_a: Array,
    heads: int,
    f: int,
    begin: int,
    end: int,
) -> None:
    """Sums the gradient of each row of g, and of a over the edges of the row, if wanted."""
    first, last = np.int64(rowptr[0]), np.int64(rowptr[end]) - 1
    wide = heads * f
    for i in range(begin, end):
        home = i * wide
        for k in range(wide):
            out[np.uint64(home + k)] = 0
        for k in range(wide if len(by_a) else 0):
            by_a[np.uint64(home + k)] = 0
        for e in range(np.int64(rowptr[i]), np.int64(rowptr[i + 1])):
            fetch_ahead(x, col, e, last, wide)
            j = np.int64(col[e]) * wide
            for h in range(heads):
                d, at = by[(e - first) * heads + h], h * f
                for k in range(at, at + f):
                    s = g[np.uint64(home + k)] + x[np.uint64(j + k)]
                    t = d if s > 0 else d * slope
                    out[np.uint64(home + k)] += a[np.uint64(k)] * t
                    if len(by_a):
                        by_a[np.uint64(home + k)] += s * t

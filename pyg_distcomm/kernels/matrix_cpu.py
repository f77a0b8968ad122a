"""Runs the ops of `matrix_ops` on the CPU: compiled loops over rows, the same bits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyg_distcomm.kernels import matrix_jit as loops
from pyg_distcomm.kernels import threads
from pyg_distcomm.kernels.matrix_ops import Csr, value_type

Array = NDArray[Any]
NO_IDS = np.empty(0, np.int64)
DENSE_COLUMNS = 1 << 23  # columns up to which a row may have a place for each
DENSE_RATIO = 256  # columns for one product, up to which that pays


def spgemm(
    q: Csr, a: Csr, num_cols: int, diagonal: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs `matrix_ops.spgemm`, rows in parallel."""
    dtype, m = value_type(q[2], a[2]), len(q[0]) - 1
    own, extra = diagonal or (torch.empty(0), torch.empty(0))
    left = (_long(q[0]), _long(q[1]), _values(q[2], dtype))
    right = (_long(a[0]), *_strided(a[1]), _values(a[2], dtype))
    args = left, right, (_long(own), _values(extra, dtype))
    products = int((right[0][left[1] + 1] - right[0][left[1]]).sum()) + len(left[1])
    if num_cols <= DENSE_COLUMNS and DENSE_RATIO * products >= m * num_cols:
        found = _over_rows(loops.spgemm_dense, (*args, num_cols), m)
    else:
        found = _over_rows(loops.spgemm, args, m)
    count, col, value = found
    rowptr = torch.zeros(m + 1, dtype=torch.int64)
    torch.cumsum(count, 0, out=rowptr[1:])
    return rowptr, col, value


def extract(
    a: tuple[Tensor, Tensor],
    rows: tuple[Tensor, Tensor],
    cols: tuple[Tensor, Tensor],
    own: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs `matrix_ops.extract`, minibatches in parallel."""
    wanted = (*map(_long, rows), *map(_long, cols))
    loop = NO_IDS if own is None else _long(own)
    args = (_long(a[0]), *_strided(a[1])), wanted, loop
    row, col, entry = _over_rows(loops.extract, args, len(rows[1]) - 1)
    return row, col, entry


def count_positive(rowptr: Tensor, value: Tensor) -> Tensor:
    """Runs `matrix_ops.count_positive`, rows in parallel."""
    count = torch.empty(len(rowptr) - 1, dtype=torch.int64)
    args = (_long(rowptr), _long(value), count.numpy())
    threads.run_split(partial(loops.count_positive, *args), len(count), 1 << 12)
    return count


def draw(
    rowptr: Tensor,
    value: Tensor,
    count: Tensor,
    keys: Tensor,
    ptr: Tensor,
    replace: bool,
) -> tuple[Tensor, Tensor]:
    """Runs `matrix_ops.draw`, rows in parallel."""
    entry, left = _empty_draws(ptr)
    rows, draws = (_long(rowptr), _long(value), _long(count)), (_long(keys), _long(ptr))
    args = rows, draws, replace, (entry.numpy(), left.numpy())
    threads.run_split(partial(loops.draw, *args), len(keys), 1)
    return entry, left


class WeightedSampler:
    """Draws from one row for many keys. Thread-safe."""

    def __init__(self, value: Tensor) -> None:
        self._value = _long(value)
        self._count = int((self._value > 0).sum())
        self._total = int(self._value.sum())
        # one tree for each call in flight, which restores it
        self._trees: deque[Array] = deque()

    def __call__(
        self, keys: Tensor, ptr: Tensor, replace: bool
    ) -> tuple[Tensor, Tensor]:
        """Runs what `matrix_ops.weighted_sampler` returns."""
        try:
            tree = self._trees.pop()
        except IndexError:
            tree = np.zeros(len(self._value) + 1, np.int64)
            loops.grow(self._value, 0, len(self._value), tree)
        entry, left = _empty_draws(ptr)
        row = (tree, self._value, 0, len(self._value), self._total)
        draws, out = (_long(keys), _long(ptr)), (entry.numpy(), left.numpy())
        loops.draw_shared(row, self._count, draws, replace, out)
        self._trees.append(tree)
        return entry, left


weighted_sampler = WeightedSampler


def normalize_rows(rowptr: Tensor, value: Tensor) -> Tensor:
    """Runs `matrix_ops.normalize_rows`, rows in parallel."""
    out = torch.empty_like(value)
    args = (_long(rowptr), value.contiguous().numpy(), out.numpy())
    threads.run_split(partial(loops.normalize_rows, *args), len(rowptr) - 1, 1 << 12)
    return out


def layer_weights(
    a: Csr, own: Tensor | None, power: int, scale: float
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Computes `kernels.layer_weights`, rows in parallel."""
    m = len(a[0]) - 1
    total, even = torch.empty(m, dtype=torch.float64), torch.empty(m, dtype=torch.int64)
    loop = torch.empty(0 if own is None else m, dtype=torch.int64)
    weight = _values(a[2], torch.float64)
    value = torch.empty(0 if a[2] is None else len(a[1]), dtype=torch.int64)
    mine = NO_IDS if own is None else _long(own)
    graph = (_long(a[0]), *_strided(a[1]), weight), mine, (power, float(scale))
    out = (total.numpy(), even.numpy(), loop.numpy())

    def run(value: Tensor) -> int:
        others: list[int] = []
        work = partial(loops.layer_weights, *graph, (*out, value.numpy()))
        threads.run_split(lambda b, e: others.append(work(b, e)), m, 1 << 12)
        return sum(others)

    if run(value) == 0 and a[2] is None:
        return total, even, None, None
    if a[2] is None:
        value = torch.empty(len(a[1]), dtype=torch.int64)
        run(value)
    return total, even, value, None if own is None else loop


def _over_rows(loop: Any, args: tuple[Any, ...], m: int) -> list[Tensor]:
    """Runs a loop that returns arrays over ranges of rows, and joins them."""
    work: Callable[..., Any] = partial(loop, *args)
    pieces = threads.split(m, 8 * threads.width() if threads.width() > 1 else 1)
    found: list[Any] = [None] * len(pieces)

    def run(piece: int) -> None:
        found[piece] = work(*pieces[piece])

    threads.run(run, [(piece,) for piece in range(len(pieces))])
    parts = zip(*found, strict=True)
    return [
        torch.from_numpy(part[0] if len(part) == 1 else np.concatenate(part))
        for part in parts
    ]


def _empty_draws(ptr: Tensor) -> tuple[Tensor, Tensor]:
    entry, left = torch.empty(2, int(ptr[-1]), dtype=torch.int64)
    return entry, left


def _long(t: Tensor) -> Array:
    return t.to(torch.int64).contiguous().numpy()


def _values(value: Tensor | None, dtype: torch.dtype) -> Array:
    """Returns values as an array of one type; of length zero where there are none."""
    if value is None:
        return torch.empty(0, dtype=dtype).numpy()
    return value.to(dtype).contiguous().numpy()


def _strided(col: Tensor) -> tuple[Array, int]:
    """Returns a vector as contiguous memory and the distance between its entries."""
    step = col.stride(0) if col.numel() else 1
    if step < 1 or col.dtype not in (torch.int32, torch.int64):
        return _long(col), 1
    reach = 1 + (len(col) - 1) * step if len(col) else 0
    return col.as_strided((reach,), (1,)).numpy(), step

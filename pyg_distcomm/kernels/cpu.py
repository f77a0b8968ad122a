"""Runs kernels on the CPU: tensors in, compiled loops over ranges of rows, tensors out.

Same signatures and the same meaning as `reference`. Imported at the first call of
a kernel, because importing Numba takes a while.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from pyg_distcomm.kernels import core_jit, memory, sample_jit, threads
from pyg_distcomm.kernels.compile import cache_folder, ready
from pyg_distcomm.kernels.reference import (
    column_dtype,
    drop_scale,
    drop_threshold,
    offset_dtype,
)

GRAIN = 1 << 15  # numbers read or written below which a second thread does not pay
PANEL = 128  # bytes of a row copied together; see _panels_pay
LAST_CACHE = 1 << 25  # bytes of a typical last-level cache

WIDEST = 256  # bytes of a block of columns: half the registers of AVX2

Array = NDArray[Any]
Matrix = tuple[Array, Array, Array | None]  # rowptr, col, value


def spmm(
    rowptr: Tensor,
    col: Tensor,
    value: Tensor | None,
    x: Tensor,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """Runs `reference.spmm`, rows in parallel, pieces balanced by edges."""
    target = _writable(out, rowptr.numel() - 1, x)
    if target.numel():
        weight = None if value is None else _vector(value)
        matrix = _vector(rowptr), _vector(col), weight
        edges = int(matrix[0][-1]) - int(matrix[0][0])
        multiply = _multiply_panels if _panels_pay(x, edges) else _multiply
        multiply(matrix, x, target, accumulate)
    return _delivered(target, out)


def _panels_pay(x: Tensor, edges: int) -> bool:
    """Tells whether to copy columns of ``x`` side by side before multiplying.

    Such a panel is likelier to stay in the last cache. That pays when x does not
    stay there and each of its rows is read often.
    """
    n, f = x.shape
    size = x.element_size()
    return n * f * size >= LAST_CACHE and f * size >= 4 * PANEL and edges >= 8 * n


def _multiply_panels(matrix: Matrix, x: Tensor, out: Tensor, accumulate: bool) -> None:
    """Multiplies a panel of columns at a time; what fills no panel goes directly."""
    n, f = x.shape
    wide = PANEL // x.element_size()
    panel = memory.empty(n, wide, x.dtype)
    x_flat, x_ld = _flat(x)
    for at in range(0, f - f % wide, wide):
        args = (x_flat, x_ld, at, wide, panel.view(-1).numpy())
        threads.run_split(ready(core_jit.pack, args, 2), n, GRAIN // wide)
        _multiply(matrix, panel, out[:, at : at + wide], accumulate)
    if f % wide:
        _multiply(matrix, x[:, -(f % wide) :], out[:, -(f % wide) :], accumulate)


def _multiply(matrix: Matrix, x: Tensor, out: Tensor, accumulate: bool) -> None:
    """Multiplies a block of columns at a time, as many as fit in registers."""
    arrays = (*matrix, *_flat(x), *_flat(out), accumulate)
    pieces = _pieces(matrix[0], x.size(1))
    for at, lanes, keep in _blocks(x.size(1), WIDEST // x.element_size()):
        width = (0,) * (lanes * x.element_size()).bit_length()
        args = (width[1:], *arrays, at, at, lanes, keep)
        threads.run(ready(core_jit.spmm, args, 2), pieces)


def _blocks(f: int, widest: int) -> list[tuple[int, int, int]]:
    """Cuts ``f`` columns into blocks (first column, lanes, lanes to keep).

    Lanes are powers of two. The last block ends at the last column, reaches back
    over its neighbour, and keeps the columns that this one lacks.
    """
    lanes = min(widest, 1 << (f.bit_length() - 1))
    blocks = [(at, lanes, lanes) for at in range(0, f - lanes + 1, lanes)]
    rest = f % lanes
    if rest:
        tail = 1 << (rest - 1).bit_length()
        blocks.append((f - tail, tail, rest))
    return blocks


def sddmm(rowptr: Tensor, col: Tensor, g: Tensor, x: Tensor) -> Tensor:
    """Runs `reference.sddmm`, rows in parallel."""
    pointers = _vector(rowptr)
    f = x.size(1)
    out = x.new_empty(int(pointers[-1]) - int(pointers[0]))
    if f and out.numel():
        args = (pointers, _vector(col), *_flat(g), *_flat(x), out.numpy(), f)
        threads.run(ready(core_jit.sddmm, args, 2), _pieces(pointers, f))
        return out
    return out.zero_()


def gather_rows(x: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """Runs `reference.gather_rows`, rows in parallel."""
    k, f = index.numel(), x.size(1)
    target = _writable(out, k, x)
    positions = _vector(index)
    _check_index(positions, x.size(0))
    if k and f:
        args = (*_flat(x), positions, *_flat(target), f)
        threads.run_split(ready(core_jit.gather, args, 2), k, GRAIN // f)
    return _delivered(target, out)


def scatter_add_rows(out: Tensor, index: Tensor, src: Tensor) -> Tensor:
    """Runs `reference.scatter_add_rows`, each target row on one thread."""
    k, f = index.numel(), src.size(1)
    target = _writable(out, out.size(0), src)
    positions = _vector(index)
    _check_index(positions, out.size(0))
    if k and f:
        parts = threads.width() if k * f >= GRAIN else 1
        args = (*_flat(target), positions, *_flat(src), f)
        work = ready(core_jit.scatter_add, args, 2)
        threads.run(work, [(part, parts) for part in range(parts)])
    return _delivered(target, out)


def coo_to_csr(
    row: Tensor, col: Tensor, num_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs `reference.coo_to_csr` as a counting sort."""
    rows = _vector(row)
    _check_index(rows, num_rows)
    rowptr = torch.zeros(num_rows + 1, dtype=offset_dtype(len(rows)))
    ready(core_jit.count, (rows, rowptr.numpy()))()
    col_sorted = torch.empty(len(rows), dtype=column_dtype(col))
    perm = torch.empty(len(rows), dtype=torch.int64)
    cursor = rowptr.clone().numpy()
    args = (rows, _vector(col), cursor, col_sorted.numpy(), perm.numpy())
    ready(core_jit.place, args)()
    return rowptr, col_sorted, perm


def csr_transpose(
    rowptr: Tensor, col: Tensor, num_cols: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs `reference.csr_transpose` as a counting sort."""
    pointers = _vector(rowptr)
    part = _vector(col)[int(pointers[0]) : int(pointers[-1])]
    _check_index(part, num_cols)
    rowptr_t = torch.zeros(num_cols + 1, dtype=offset_dtype(len(part)))
    ready(core_jit.count, (part, rowptr_t.numpy()))()
    row_t = torch.empty(len(part), dtype=offset_dtype(len(pointers) - 1))
    perm = torch.empty(len(part), dtype=torch.int64)
    cursor = rowptr_t.clone().numpy()
    args = (pointers, _vector(col), cursor, row_t.numpy(), perm.numpy())
    ready(core_jit.place_transposed, args)()
    return rowptr_t, row_t, perm


def place_pairs(
    target: Tensor, source: Tensor, order: Tensor | None, colptr: Tensor, pair: Tensor
) -> Tensor:
    """Runs `reference.place_pairs`, on one thread."""
    memory.advise(pair)
    sorted_by = None if order is None else _vector(order)
    cursor = colptr[:-1].numpy().copy()
    args = (_vector(target), _vector(source), sorted_by, cursor, pair.numpy())
    ready(sample_jit.place_pairs, args)()
    return pair


def keyed_bits(key: int, gid: Tensor, cols: int) -> Tensor:
    """Runs `reference.keyed_bits`, rows in parallel."""
    out = torch.empty(gid.numel(), cols, dtype=torch.int32)
    args = (key, _vector(gid), out.view(-1).numpy(), cols)
    _over_rows(ready(core_jit.bits, args, 2), gid.numel(), cols)
    return out


def keyed_mask(key: int, gid: Tensor, cols: int, p: float) -> Tensor:
    """Runs `reference.keyed_mask`, rows in parallel."""
    out = torch.empty(gid.numel(), cols, dtype=torch.bool)
    args = (key, _vector(gid), out.view(-1).numpy(), cols, drop_threshold(p))
    _over_rows(ready(core_jit.mask, args, 2), gid.numel(), cols)
    return out


def keyed_dropout(x: Tensor, key: int, gid: Tensor, p: float) -> Tensor:
    """Runs `reference.keyed_dropout`, fused, rows in parallel."""
    rows, source = len(x), x.detach().contiguous()
    out = torch.empty_like(source)
    cols = x.numel() // rows if rows else 0
    arrays = source.view(-1).numpy(), key, _vector(gid), out.view(-1).numpy()
    scale = arrays[0].dtype.type(drop_scale(p))
    args = (*arrays, cols, drop_threshold(p), scale)
    _over_rows(ready(core_jit.dropout, args, 2), rows, cols)
    return out


def warm_up() -> None:
    """Compiles every float32 kernel, or loads it from Numba's cache on disk."""
    index = torch.zeros(1, dtype=torch.int32)
    rowptr, x = torch.tensor([0, 1], dtype=torch.int32), torch.ones(1, 1)
    spmm(rowptr, index, x[0], x)
    sddmm(rowptr, index, x, x)
    csr_transpose(rowptr, index, 1)
    for k in (index, index.long()):
        gather_rows(x, k)
        scatter_add_rows(x.clone(), k, x)
        coo_to_csr(k, k, 1)
    for work in (keyed_bits, keyed_mask):
        work(0, index.long(), 1, *((0.5,) if work is keyed_mask else ()))
    keyed_dropout(x, 0, index.long(), 0.5)


def describe() -> dict[str, object]:
    """Returns what runs these kernels: version, threads, cache folder, SIMD."""
    import llvmlite.binding as llvm
    import numba

    features = llvm.get_host_cpu_features()
    simd = [name for name in ("avx512f", "avx2", "neon") if features.get(name)]
    return {
        "numba": numba.__version__,
        "threads": threads.width(),
        "cache": cache_folder(core_jit.spmm),
        "cpu": llvm.get_host_cpu_name(),
        "simd": simd[0] if simd else "baseline",
    }


def _over_rows(work: Callable[[int, int], None], rows: int, cols: int) -> None:
    if rows and cols:
        threads.run_split(work, rows, GRAIN // cols)


def _pieces(rowptr: Array, f: int) -> list[tuple[int, int]]:
    """Cuts rows into pieces of about equal work, the heaviest first."""
    m = len(rowptr) - 1
    work = (int(rowptr[-1]) - int(rowptr[0]) + m) * f
    count = min(work // GRAIN, 16 * threads.width())
    if threads.width() == 1 or count < 2:
        return [(0, m)]
    bounds = ready(core_jit.balance, (rowptr, count))().tolist()
    pieces = [(a, b) for a, b in pairwise(bounds) if a < b]
    return sorted(pieces, key=lambda piece: int(rowptr[piece[0]] - rowptr[piece[1]]))


def _writable(out: Tensor | None, rows: int, like: Tensor) -> Tensor:
    """Returns ``out``, or a matrix to compute it in when its columns are strided."""
    if out is None:
        return memory.empty(rows, like.size(1), like.dtype)
    return out.detach() if _row_strided(out) else out.detach().contiguous()


def _delivered(target: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        return target
    if target.data_ptr() != out.data_ptr():
        out.detach().copy_(target)
    return out


def _row_strided(t: Tensor) -> bool:
    return t.stride(1) == 1 and t.stride(0) >= t.size(1)


def _flat(t: Tensor) -> tuple[Array, int]:
    """Returns the storage under a matrix as a vector, and its row stride."""
    t = t.detach() if _row_strided(t) else t.detach().contiguous()
    span = (t.size(0) - 1) * t.stride(0) + t.size(1) if t.numel() else 0
    return t.as_strided((span,), (1,)).numpy(), t.stride(0)


def _vector(t: Tensor) -> Array:
    return t.detach().contiguous().numpy()


def _check_index(index: Array, size: int) -> None:
    if not ready(core_jit.in_range, (index, size))():
        raise IndexError(
            f"index spans {index.min()} .. {index.max()}, but there are {size} rows"
        )

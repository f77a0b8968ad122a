"""Runs the ops of `core_ops` on the CPU: compiled loops over ranges of rows.

Imported at the first call of an op, because importing Numba takes a while.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyg_distcomm.kernels import core_jit, core_ops, memory, sample_jit, threads
from pyg_distcomm.kernels.compile import cache_folder

GRAIN = 1 << 15  # numbers read or written below which a second thread does not pay
PANEL = 128  # bytes of a row copied together; see _panels_pay
LAST_CACHE = 1 << 25  # bytes of a typical last-level cache

WIDEST = 256  # bytes of a block of columns: half the registers of AVX2

Array = NDArray[Any]
Sparse = tuple[tuple[Array, Array], Array | None]  # offsets and columns, and values


def spmm(
    rowptr: Tensor,
    col: Tensor,
    value: Tensor | None,
    x: Tensor,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """Runs `core_ops.spmm`, rows in parallel, pieces balanced by edges."""
    target = writable(out, rowptr.numel() - 1, x)
    if target.numel():
        weight = None if value is None else vector(value.to(x.dtype)).reshape(-1)
        pointers = vector(rowptr)
        matrix = (pointers, vector(col)), weight
        edges = int(pointers[-1]) - int(pointers[0])
        multiply = _multiply_panels if _panels_pay(x, edges) else _multiply
        multiply(matrix, x, target, accumulate)
    return core_ops.deliver(target, out)


def _panels_pay(x: Tensor, edges: int) -> bool:
    """Returns whether to copy columns of ``x`` side by side before multiplying.

    Such a panel is likelier to stay in the last cache. That pays when x does not
    stay there and each of its rows is read often.
    """
    if x.dim() > 2:
        return False
    n, f = x.shape
    size = x.element_size()
    return n * f * size >= LAST_CACHE and f * size >= 4 * PANEL and edges >= 8 * n


def _multiply_panels(matrix: Sparse, x: Tensor, out: Tensor, accumulate: bool) -> None:
    """Multiplies a panel of columns at a time; what fills no panel goes directly."""
    n, f = x.shape
    wide = PANEL // x.element_size()
    panel = memory.empty((n, wide), x.dtype)
    rows = flat(x)
    for at in range(0, f - f % wide, wide):
        args = (rows, at, wide, panel.view(-1).numpy())
        over_rows(core_jit.pack, args, n, wide)
        _multiply(matrix, panel, out[:, at : at + wide], accumulate)
    if f % wide:
        _multiply(matrix, x[:, -(f % wide) :], out[:, -(f % wide) :], accumulate)


def _multiply(matrix: Sparse, x: Tensor, out: Tensor, accumulate: bool) -> None:
    """Multiplies a block of columns at a time, as many as fit in registers."""
    heads = x.size(1) if x.dim() > 2 else None
    arrays = (*matrix, heads, _heads(x), _heads(out), accumulate)
    pieces = _pieces(matrix[0][0], (heads or 1) * x.size(-1))
    for at, lanes, keep in _blocks(x.size(-1), WIDEST // x.element_size()):
        width = (0,) * (lanes * x.element_size()).bit_length()
        args = (width[1:], *arrays, (at, lanes, keep if accumulate else lanes))
        threads.run(partial(core_jit.spmm, *args), pieces)


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
    """Runs `core_ops.sddmm`, rows in parallel."""
    pointers = vector(rowptr)
    f, heads = x.size(-1), x.size(1) if x.dim() > 2 else None
    edges = int(pointers[-1]) - int(pointers[0])
    out = memory.empty((edges, *x.shape[1:-1]), x.dtype)
    if f and out.numel():
        edges_of = pointers, vector(col)
        args = (edges_of, heads, _heads(g), _heads(x), out.view(-1).numpy(), f)
        _over_segments(core_jit.sddmm, args, pointers, (heads or 1) * f)
        return out
    return out.zero_()


def _heads(t: Tensor) -> tuple[Array, int, int]:
    """Returns the storage under rows as a vector, and its strides of rows and heads."""
    if t.dim() == 2:
        return *flat(t), 0
    t = t.detach() if t.stride(-1) == 1 else t.detach().contiguous()
    (n, heads, f), (ld, step, _) = t.shape, t.stride()
    span = (n - 1) * ld + (heads - 1) * step + f if t.numel() else 0
    return t.as_strided((span,), (1,)).numpy(), ld, step


def pair_scores(
    rowptr: Tensor, col: Tensor, g: Tensor, x: Tensor, a: Tensor, slope: float
) -> Tensor:
    """Runs `core_ops.pair_scores`, rows in parallel."""
    heads, f = a.shape
    out = x.new_zeros(int(rowptr[-1]), heads)
    if out.numel():
        edges, pairs = _pairs(rowptr, col, g, x, a, slope)
        args = edges, pairs, _whole(out), (heads, f)
        _over_segments(core_jit.pair_scores, args, edges[0], heads * f)
    return out


def _pairs(
    rowptr: Tensor, col: Tensor, g: Tensor, x: Tensor, a: Tensor, slope: float
) -> tuple[tuple[Array, Array], tuple[Any, ...]]:
    flats = [_whole(t) for t in (g, x, a)]
    return (vector(rowptr), vector(col)), (*flats, flats[0].dtype.type(slope))


def pair_scores_grad(
    rowptr: Tensor,
    col: Tensor,
    g: Tensor,
    x: Tensor,
    a: Tensor,
    slope: float,
    by: Tensor,
    both: bool,
) -> tuple[Tensor, Tensor | None]:
    """Runs `core_ops.pair_scores_grad`, rows in parallel."""
    heads, f = a.shape
    out = memory.empty_rows(g, len(g))
    by_a = memory.empty_rows(g, len(g) if both else 0)
    if out.numel():
        edges, pairs = _pairs(rowptr, col, g, x, a, slope)
        args = edges, pairs, (_whole(by), _whole(out), _whole(by_a)), (heads, f)
        _over_segments(core_jit.pair_scores_grad, args, edges[0], heads * f)
    return out, by_a.sum(0) if both else None


def _whole(t: Tensor) -> Array:
    return t.detach().contiguous().view(-1).numpy()


def segment_softmax(rowptr: Tensor, x: Tensor) -> Tensor:
    """Runs `core_ops.segment_softmax`, rows in parallel."""
    pointers, values = vector(rowptr), x.detach().contiguous()
    out = memory.empty_rows(values, len(values))
    h = x.size(1)
    flat_out = out.view(-1).numpy()
    args = (pointers, values.view(-1).numpy(), flat_out, h)
    _over_segments(core_jit.less_segment_max, args, pointers, h)
    out.exp_()  # which torch vectorises
    _over_segments(core_jit.over_segment_sum, (pointers, flat_out, h), pointers, h)
    return out


def segment_softmax_grad(rowptr: Tensor, y: Tensor, g: Tensor) -> Tensor:
    """Runs `core_ops.segment_softmax_grad`, rows in parallel."""
    pointers, h = vector(rowptr), y.size(1)
    out = memory.empty_rows(y, len(y))
    flats = [t.detach().contiguous().view(-1).numpy() for t in (y, g)]
    args = (pointers, *flats, out.view(-1).numpy(), h)
    _over_segments(core_jit.segment_softmax_grad, args, pointers, h)
    return out


def segment_max(rowptr: Tensor, col: Tensor, x: Tensor) -> Tensor:
    """Runs `core_ops.segment_max`, rows in parallel."""
    pointers, f = vector(rowptr), x.size(1)
    out = memory.empty_rows(x, len(pointers) - 1)
    args = (pointers, vector(col)), flat(x), out.view(-1).numpy(), f
    _over_segments(core_jit.segment_max, args, pointers, f)
    return out


def segment_max_grad(
    rowptr: Tensor, col: Tensor, x: Tensor, out: Tensor, g: Tensor
) -> Tensor:
    """Runs `core_ops.segment_max_grad`, on one thread."""
    f = x.size(1)
    grad = memory.empty_rows(x, len(x)).zero_()
    edges = vector(rowptr), vector(col)
    args = edges, flat(x), flat(out), flat(g), grad.view(-1).numpy(), f
    if grad.numel():
        core_jit.segment_max_grad(*args)
    return grad


def gather_rows(x: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """Runs `core_ops.gather_rows`, rows in parallel."""
    if x.dim() != 2:
        return core_ops.gather_rows.definition(x, index, out)
    k, f = index.numel(), x.size(1)
    target = writable(out, k, x)
    positions = vector(index)
    check_index(positions, x.size(0))
    args = (flat(x), positions, flat(target), f)
    over_rows(sample_jit.gather, args, k, f)
    return core_ops.deliver(target, out)


def scatter_add_rows(out: Tensor, index: Tensor, src: Tensor) -> Tensor:
    """Runs `core_ops.scatter_add_rows`, each target row on one thread."""
    if out.dim() != 2:
        return core_ops.scatter_add_rows.definition(out, index, src)
    k, f = index.numel(), src.size(1)
    target = writable(out, out.size(0), src)
    positions = vector(index)
    check_index(positions, out.size(0))
    if k and f:
        parts = threads.width() if k * f >= GRAIN else 1
        args = (flat(target), positions, flat(src), f)
        work = partial(core_jit.scatter_add, *args)
        threads.run(work, [(part, parts) for part in range(parts)])
    return core_ops.deliver(target, out)


def coo_to_csr(
    row: Tensor, col: Tensor, num_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs `core_ops.coo_to_csr` as a counting sort."""
    rows = vector(row)
    check_index(rows, num_rows)
    rowptr = torch.zeros(num_rows + 1, dtype=core_ops.offset_dtype(len(rows)))
    core_jit.count(rows, rowptr.numpy())
    col_sorted = torch.empty(len(rows), dtype=core_ops.column_dtype(col))
    perm = torch.empty(len(rows), dtype=rowptr.dtype)
    cursor = rowptr.clone().numpy()
    core_jit.place(rows, vector(col), cursor, col_sorted.numpy(), perm.numpy())
    return rowptr, col_sorted, perm


def csr_transpose(
    rowptr: Tensor, col: Tensor, num_cols: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs `core_ops.csr_transpose` as a counting sort."""
    pointers = vector(rowptr)
    part = vector(col)[int(pointers[0]) : int(pointers[-1])]
    check_index(part, num_cols)
    rowptr_t = torch.zeros(num_cols + 1, dtype=core_ops.offset_dtype(len(part)))
    core_jit.count(part, rowptr_t.numpy())
    row_t = torch.empty(len(part), dtype=core_ops.offset_dtype(len(pointers) - 1))
    perm = torch.empty(len(part), dtype=core_ops.offset_dtype(len(col)))
    cursor = rowptr_t.clone().numpy()
    csr = pointers, vector(col)
    core_jit.place_transposed(csr, cursor, row_t.numpy(), perm.numpy())
    return rowptr_t, row_t, perm


def place_pairs(
    target: Tensor, source: Tensor, edge: Tensor, cursor: Tensor, pair: Tensor
) -> Tensor:
    """Runs `core_ops.place_pairs`, on one thread."""
    memory.advise(pair)
    ids = vector(target), vector(source), vector(edge)
    core_jit.place_pairs(*ids, cursor.numpy(), pair.numpy())
    return pair


def count_ids(ids: Tensor, counts: Tensor) -> Tensor:
    """Runs `core_ops.count_ids`, on one thread."""
    core_jit.count_ids(vector(ids), counts.numpy())
    return counts


def hash_edges(source: Tensor, target: Tensor, place: Tensor) -> Tensor:
    """Runs `core_ops.hash_edges`, on one thread."""
    out = torch.empty(1, dtype=torch.int64)
    odd = np.array(core_ops.HASH_ODD)
    edges = vector(source), vector(target), vector(place)
    core_jit.hash_edges(odd, *edges, out.numpy())
    return out[0]


def keyed_bits(key: int, gid: Tensor, cols: int) -> Tensor:
    """Runs `core_ops.keyed_bits`, rows in parallel."""
    out = torch.empty(gid.numel(), cols, dtype=torch.int32)
    args = ((key, vector(gid)), out.view(-1).numpy(), cols)
    over_rows(core_jit.bits, args, gid.numel(), cols)
    return out


def keyed_mask(key: int, gid: Tensor, cols: int, p: float) -> Tensor:
    """Runs `core_ops.keyed_mask`, rows in parallel."""
    out = torch.empty(gid.numel(), cols, dtype=torch.bool)
    noise, threshold = (key, vector(gid)), core_ops.drop_threshold(p)
    args = (noise, out.view(-1).numpy(), cols, threshold)
    over_rows(core_jit.mask, args, gid.numel(), cols)
    return out


def keyed_dropout(x: Tensor, key: int, gid: Tensor, p: float) -> Tensor:
    """Runs `core_ops.keyed_dropout`, fused, rows in parallel."""
    rows, source = len(x), x.detach().contiguous()
    out = torch.empty_like(source)
    cols = x.numel() // rows if rows else 0
    numbers, noise = source.view(-1).numpy(), (key, vector(gid))
    drop = core_ops.drop_threshold(p), numbers.dtype.type(core_ops.drop_scale(p))
    args = (numbers, noise, out.view(-1).numpy(), cols, drop)
    over_rows(core_jit.dropout, args, rows, cols)
    return out


def minimum_cover(ptr: Tensor, to: Tensor, num_right: int) -> tuple[Tensor, Tensor]:
    """Runs `kernels.minimum_cover`, on one thread.

    By Konig's theorem: with a maximum matching, and all that alternating paths reach from
    unmatched left vertices, it is the left vertices not reached and the right ones reached.
    What is reached is the same for every maximum matching.
    """
    graph = ptr.to(torch.int64).numpy(), to.to(torch.int64).numpy()
    lefts = ptr.numel() - 1
    mates = np.full(lefts, -1, np.int64), np.full(num_right, -1, np.int64)
    core_jit.match(graph, mates)
    left, right = np.zeros(lefts, np.bool_), np.zeros(num_right, np.bool_)
    core_jit.reach(graph, mates, left, right)
    return torch.from_numpy(~left), torch.from_numpy(right)


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
    keyed_bits(0, index.long(), 1)
    keyed_mask(0, index.long(), 1, 0.5)
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


def over_rows(loop: Any, args: tuple[Any, ...], rows: int, width: int) -> None:
    """Runs a loop over ranges of rows in parallel, each row with `width` numbers."""
    if rows and width:
        threads.run_split(partial(loop, *args), rows, GRAIN // width)


def _over_segments(loop: Any, args: tuple[Any, ...], rowptr: Array, width: int) -> None:
    """Runs a loop over rows of a CSR matrix in parallel, each edge with `width` numbers."""
    if width and len(rowptr) > 1:
        threads.run(partial(loop, *args), _pieces(rowptr, width))


def _pieces(rowptr: Array, f: int) -> list[tuple[int, int]]:
    """Cuts rows into pieces of about equal work, the heaviest first."""
    m = len(rowptr) - 1
    work = (int(rowptr[-1]) - int(rowptr[0]) + m) * f
    count = min(work // GRAIN, 16 * threads.width())
    if threads.width() == 1 or count < 2:
        return [(0, m)]
    bounds = core_jit.balance(rowptr, count).tolist()
    pieces = [(a, b) for a, b in pairwise(bounds) if a < b]
    return sorted(pieces, key=lambda piece: int(rowptr[piece[0]] - rowptr[piece[1]]))


def writable(out: Tensor | None, rows: int, like: Tensor) -> Tensor:
    """Returns ``out``, or a matrix to compute it in when its columns are strided."""
    if out is None:
        return memory.empty_rows(like, rows)
    return out.detach() if row_strided(out) else out.detach().contiguous()


def row_strided(t: Tensor) -> bool:
    """Returns whether the rows of a matrix are contiguous."""
    return t.stride(-1) == 1 and t.stride(0) >= t.size(-1)


def flat(t: Tensor) -> tuple[Array, int]:
    """Returns the storage under a matrix as a vector, and its row stride."""
    t = t.detach() if row_strided(t) else t.detach().contiguous()
    span = (t.size(0) - 1) * t.stride(0) + t.size(1) if t.numel() else 0
    return t.as_strided((span,), (1,)).numpy(), t.stride(0)


def vector(t: Tensor) -> Array:
    """Returns a tensor as a contiguous array."""
    return t.detach().contiguous().numpy()


def check_index(index: Array, size: int) -> None:
    """Raises IndexError unless all of an index lies in 0 .. size-1."""
    if not core_jit.in_range(index, size):
        raise IndexError(
            f"index spans {index.min()} .. {index.max()}, but there are {size} rows"
        )

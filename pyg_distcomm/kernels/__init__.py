"""The op table: each kernel runs compiled on the CPU, or as plain torch elsewhere.

`reference` defines every op; `cpu` holds the compiled ones, for float32 and
float64 with int32 or int64 indices. Both are plain functions of tensors, without
autograd. Column indices of `spmm` and `sddmm` are trusted: they are checked where
a matrix is built (`coo_to_csr`, `csr_transpose`), not at each product.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from pyg_distcomm.kernels import matrix_reference, reference
from pyg_distcomm.kernels.matrix_reference import Csr, WeightedSampler
from pyg_distcomm.kernels.minibatch import Minibatch, Request, SampleGraph

__all__ = [
    "coo_to_csr",
    "count_positive",
    "csr_transpose",
    "describe",
    "draw",
    "exponential_race",
    "extract",
    "gather_rows",
    "keyed_bits",
    "keyed_dropout",
    "keyed_mask",
    "layer_weights",
    "minimum_cover",
    "neighbor_sampler",
    "normalize_rows",
    "place_pairs",
    "rank_select_index",
    "scatter_add_rows",
    "sddmm",
    "spgemm",
    "spmm",
    "untrusted_writer",
    "warm_up",
    "weighted_sampler",
]

FLOATS = (torch.float32, torch.float64)
INDICES = (torch.int32, torch.int64)

P = ParamSpec("P")
R = TypeVar("R")


def spmm(
    rowptr: Tensor,
    col: Tensor,
    value: Tensor | None,
    x: Tensor,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """Multiplies a CSR matrix by dense rows; see `reference.spmm`.

    The sum of a row is taken in edge order, so the bits depend neither on the
    number of threads nor on how callers cut ``rowptr``.
    """
    _check_product(rowptr, col, x)
    if value is not None:
        _check_values(value, col)
        value = value.to(x.dtype)
    if accumulate and out is None:
        raise ValueError("spmm(accumulate=True) needs the out to add to")
    if out is not None:
        _check_out(out, rowptr.numel() - 1, x)
    op = _pick(reference.spmm, (x,), (rowptr, col))
    return op(rowptr, col, value, x, out, accumulate)


def sddmm(rowptr: Tensor, col: Tensor, g: Tensor, x: Tensor) -> Tensor:
    """Takes one dot product for each edge; see `reference.sddmm`."""
    _check_product(rowptr, col, x)
    _check_out(g, rowptr.numel() - 1, x)
    return _pick(reference.sddmm, (g, x), (rowptr, col))(rowptr, col, g, x)


def gather_rows(x: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """Copies rows, ``out[k] = x[index[k]]``; see `reference.gather_rows`."""
    if x.dim() != 2:
        return reference.gather_rows(x, index, out)
    if out is not None:
        _check_out(out, index.numel(), x)
    return _pick(reference.gather_rows, (x,), (index,))(x, index, out)


def scatter_add_rows(out: Tensor, index: Tensor, src: Tensor) -> Tensor:
    """Adds rows in place, in order; see `reference.scatter_add_rows`."""
    if out.dim() != 2:
        return reference.scatter_add_rows(out, index, src)
    _check_out(src, index.numel(), out)
    return _pick(reference.scatter_add_rows, (out, src), (index,))(out, index, src)


def coo_to_csr(
    row: Tensor, col: Tensor, num_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts edges by row in linear time, stably; see `reference.coo_to_csr`."""
    if row.shape != col.shape or row.dim() != 1:
        raise ValueError(
            f"row and col must be vectors of one length, got {list(row.shape)} "
            f"and {list(col.shape)}"
        )
    return _pick(reference.coo_to_csr, (), (row, col))(row, col, num_rows)


def csr_transpose(
    rowptr: Tensor, col: Tensor, num_cols: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Transposes a CSR matrix in linear time; see `reference.csr_transpose`."""
    return _pick(reference.csr_transpose, (), (rowptr, col))(rowptr, col, num_cols)


def keyed_bits(key: int, gid: Tensor, cols: int) -> Tensor:
    """Hashes (key, gid, column) to 24 random bits; see `reference.keyed_bits`."""
    return _pick(reference.keyed_bits, (), (gid,))(_checked(key), gid, cols)


def keyed_mask(key: int, gid: Tensor, cols: int, p: float) -> Tensor:
    """Tells which entries a keyed dropout keeps; see `reference.keyed_mask`."""
    return _pick(reference.keyed_mask, (), (gid,))(_checked(key), gid, cols, p)


def keyed_dropout(x: Tensor, key: int, gid: Tensor, p: float) -> Tensor:
    """Drops entries by keyed draws and scales; see `reference.keyed_dropout`."""
    if gid.shape != x.shape[:1]:
        raise ValueError(
            f"gid must name each of the {len(x)} rows of x, got {list(gid.shape)}"
        )
    return _pick(reference.keyed_dropout, (x,), (gid,))(x, _checked(key), gid, p)


def minimum_cover(ptr: Tensor, to: Tensor, num_right: int) -> tuple[Tensor, Tensor]:
    """Finds a smallest vertex cover of a bipartite graph; `reference.minimum_cover`."""
    module = importlib.import_module(".cover", __name__)
    cover: tuple[Tensor, Tensor] = module.minimum_cover(ptr, to, num_right)
    return cover


def place_pairs(
    target: Tensor, source: Tensor, order: Tensor | None, colptr: Tensor, pair: Tensor
) -> Tensor:
    """Fills the (source, edge id) pairs of a CSC matrix; see `reference.place_pairs`."""
    op = _pick(reference.place_pairs, (), (target, source, pair))
    return op(target, source, order, colptr, pair)


def rank_select_index(gid: Tensor, total: int) -> Callable[[Tensor], Tensor]:
    """Returns what looks up ids among ascending `gid`; see `reference.places`.

    For ids in [0, total), on the CPU; it holds 12 bytes for each 64 of them.
    """
    module = importlib.import_module(".rank_select", __name__)
    index: Callable[[Tensor], Tensor] = module.RankSelect(gid, total)
    return index


def neighbor_sampler(graph: SampleGraph) -> Callable[[Request], Minibatch]:
    """Returns what draws minibatches of a graph; see `sample_reference.sample`.

    It may be called by several threads at once, and holds 8 bytes a node for each.
    """
    module = importlib.import_module(".sample", __name__)
    sampler: Callable[[Request], Minibatch] = module.Sampler(graph)
    return sampler


def spgemm(
    q: Csr, a: Csr, num_cols: int, diagonal: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Multiplies sparse matrices, `C = Q (A + D)`; see `matrix_reference.spgemm`."""
    return _matrix(matrix_reference.spgemm, a[1])(q, a, num_cols, diagonal)


def extract(
    a: tuple[Tensor, Tensor],
    rows: tuple[Tensor, Tensor],
    cols: tuple[Tensor, Tensor],
    own: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Finds entries by row and column; see `matrix_reference.extract`."""
    return _matrix(matrix_reference.extract, a[1])(a, rows, cols, own)


def count_positive(rowptr: Tensor, value: Tensor) -> Tensor:
    """Counts what may be drawn; see `matrix_reference.count_positive`."""
    return _matrix(matrix_reference.count_positive, value)(rowptr, value)


def draw(
    rowptr: Tensor,
    value: Tensor,
    count: Tensor,
    keys: Tensor,
    ptr: Tensor,
    replace: bool,
) -> tuple[Tensor, Tensor]:
    """Draws entries of rows by integer weights; see `matrix_reference.draw`."""
    op = _matrix(matrix_reference.draw, value)
    return op(rowptr, value, count, keys, ptr, replace)


def exponential_race(
    rowptr: Tensor, value: Tensor, keys: Tensor, ptr: Tensor
) -> tuple[Tensor, Tensor]:
    """Draws entries another way; see `matrix_reference.exponential_race`."""
    return _matrix(matrix_reference.exponential_race, value)(rowptr, value, keys, ptr)


def weighted_sampler(value: Tensor) -> WeightedSampler:
    """Returns what draws from one row for many keys; see `matrix_reference.urn`."""
    return _matrix(matrix_reference.weighted_sampler, value)(value)


def normalize_rows(rowptr: Tensor, value: Tensor) -> Tensor:
    """Divides rows by their sums; see `matrix_reference.normalize_rows`."""
    return _matrix(matrix_reference.normalize_rows, value)(rowptr, value)


def layer_weights(
    a: Csr, own: Tensor | None, power: int, scale: float
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Rounds a rule's weights to integers; see `matrix_reference.layer_weights`."""
    return _matrix(matrix_reference.layer_weights, a[1])(a, own, power, scale)


def warm_up() -> None:
    """Compiles the float32 kernels, or loads them from Numba's cache on disk."""
    importlib.import_module(".cpu", __name__).warm_up()


def describe() -> dict[str, object]:
    """Returns what runs the CPU kernels: version, threads, cache folder, SIMD."""
    description: dict[str, object] = importlib.import_module(
        ".cpu", __name__
    ).describe()
    return description


def untrusted_writer(folder: str) -> str | None:
    """Names who else can write to a cache folder; see `compile.untrusted_writer`."""
    other: str | None = importlib.import_module(".compile", __name__).untrusted_writer(
        folder
    )
    return other


def _pick(
    op: Callable[P, R], floats: tuple[Tensor, ...], indices: tuple[Tensor, ...]
) -> Callable[P, R]:
    """Returns the compiled twin of a reference op where these tensors have one."""
    compiled = (
        all(t.device.type == "cpu" for t in (*floats, *indices))
        and all(t.dtype in FLOATS and t.dtype == floats[0].dtype for t in floats)
        and all(t.dtype in INDICES for t in indices)
    )
    if not compiled:
        return op
    # importing Numba takes a while: only those who multiply pay for it
    twin: Callable[P, R] = getattr(
        importlib.import_module(".cpu", __name__), op.__name__
    )
    return twin


def _matrix(op: Callable[P, R], of: Tensor) -> Callable[P, R]:
    """Returns the compiled twin of an op of `matrix_reference` where there is one."""
    if of.device.type != "cpu":
        return op
    twin: Callable[P, R] = getattr(
        importlib.import_module(".matrix", __name__), op.__name__
    )
    return twin


def _check_product(rowptr: Tensor, col: Tensor, x: Tensor) -> None:
    if rowptr.dim() != 1 or col.dim() != 1 or not rowptr.numel():
        raise ValueError(
            f"rowptr [m + 1] and col [nnz] must be vectors, got "
            f"{list(rowptr.shape)} and {list(col.shape)}"
        )
    if x.dim() != 2:
        raise ValueError(f"x must be a matrix [n, f], got {list(x.shape)}")


def _check_values(value: Tensor, col: Tensor) -> None:
    if value.shape != col.shape:
        raise ValueError(
            f"value must hold one number for each of the {col.numel()} edges, "
            f"got {list(value.shape)}"
        )


def _check_out(out: Tensor, rows: int, like: Tensor) -> None:
    wanted = (rows, like.size(1))
    if tuple(out.shape) != wanted or out.dtype != like.dtype:
        raise ValueError(
            f"expected a tensor of shape {list(wanted)} and type {like.dtype}, "
            f"got {list(out.shape)} and {out.dtype}"
        )


def _checked(key: int) -> int:
    if not 0 <= key < 2**63:
        raise ValueError(f"key must lie in [0, 2**63), got {key}")
    return key

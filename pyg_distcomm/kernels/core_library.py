"""Runs ops of `core_ops` on CUDA by what torch brings: cuSPARSE, and copies of rows.

Nothing here waits for the device, but for one look at a matrix when it is first multiplied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_distcomm.kernels import core_ops
from pyg_distcomm.kernels.registry import FLOATS


def spmm(
    rowptr: Tensor,
    col: Tensor,
    value: Tensor | None,
    x: Tensor,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """Runs `core_ops.spmm` by cuSPARSE, where a matrix is whole, else as defined.

    A matrix without values needs a vector of ones, `[nnz]`.
    """
    if not fits(rowptr, col, x):
        return core_ops.spmm.definition(rowptr, col, value, x, out, accumulate)
    ones = col.new_ones(1, dtype=x.dtype).expand(len(col)) if value is None else value
    weight = ones.to(x.dtype).contiguous()
    shape = (rowptr.numel() - 1, len(x))
    matrix = torch.sparse_csr_tensor(rowptr, col, weight, shape, check_invariants=False)
    if out is None:
        return matrix @ x
    return out.addmm_(matrix, x, beta=1 if accumulate else 0)


def fits(rowptr: Tensor, col: Tensor, x: Tensor) -> bool:
    """Tells whether cuSPARSE takes a matrix: of floats, of one index type, and whole."""
    return (
        x.dtype in FLOATS
        and rowptr.dtype == col.dtype
        and rowptr.numel() > 1
        and len(col) > 0
        and x.numel() > 0
        and is_whole(rowptr, col)
    )


def is_whole(rowptr: Tensor, col: Tensor) -> bool:
    """Tells whether offsets span all columns; looks once at each that owns its memory.

    A slice of offsets shares its memory with the rest, and is taken to be a part.
    """
    if rowptr.numel() * rowptr.element_size() != rowptr.untyped_storage().nbytes():
        return False
    return core_ops.span_of(rowptr) == (0, len(col))


def gather_rows(x: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """Runs `core_ops.gather_rows`; the device itself stops where an index is wrong."""
    if out is None:
        return x.index_select(0, index)
    if out.is_contiguous() and not (out.requires_grad or x.requires_grad):
        return torch.index_select(x, 0, index, out=out)
    return out.copy_(x.index_select(0, index))


def scatter_add_rows(out: Tensor, index: Tensor, src: Tensor) -> Tensor:
    """Runs `core_ops.scatter_add_rows`; the device stops where an index is wrong.

    Equal targets are added as they come, unless torch's deterministic algorithms are on.
    """
    return out.index_add_(0, index, src)

"""Sizes of row-cut tensors, which are the whole tensor's, and new tensors made by size."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.gradients import plainly
from pyg_distcomm.rowcut import RowCut
from pyg_distcomm.rows import Rows


def local_shape(x: RowCut) -> torch.Size:
    """Returns the shape of this rank's rows."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.shape


def global_shape(x: RowCut) -> torch.Size:
    """Returns the shape of the whole tensor; see `Rows.count` for when ranks are asked."""
    local = local_shape(x)
    if x.reads_local:
        return local
    return torch.Size((x.rows.count, *local[1:]))


def size_of(name: str, func: Callable, args: Any, kwargs: Any) -> Any:
    """Answers shape, size, len, numel and nbytes of a row-cut tensor."""
    x = args[0]
    if not isinstance(x, RowCut) or x.reads_local:
        return plainly(func, args, kwargs)
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if name == "size" and dim is not None:
        local = local_shape(x)
        return x.rows.count if dim in (0, -len(local)) else local[dim]
    if name == "len":
        return x.rows.count
    shape = global_shape(x)
    if name in ("shape", "size"):
        return shape
    return math.prod(shape) * (x.element_size() if name == "nbytes" else 1)


def new_by_size(func: Callable, args: Any, kwargs: Any) -> Any:
    """Makes x.new_zeros(n, ...) and its like row-cut, if n is the number of x's rows.

    For values per edge, also if n is the number of nodes (and not of edges). Any other
    first size gives an ordinary tensor, equal on all ranks. So `new_zeros(64, 64)` of 64
    rows is row-cut, even where the second 64 is a width.
    """
    x, *rest = args
    if not isinstance(x, RowCut):
        return plainly(func, args, kwargs)
    listed = bool(rest) and not isinstance(rest[0], int)
    full = func.__name__ == "new_full"
    sizes = list(rest[0]) if listed else rest[: 1 if full else None]
    sizes = sizes or list(kwargs.get("size", ()))
    rows = rows_of_length(x, sizes[0]) if sizes and not x.reads_local else None
    if rows is None:
        return plainly(func, args, kwargs)
    kwargs = {k: v for k, v in kwargs.items() if k != "size"}
    wants_gradient = kwargs.pop("requires_grad", False)
    values = rest[1:] if full and rest else ()
    local = plainly(func, (x, (len(rows), *sizes[1:]), *values), kwargs)
    out = x.wrap(local, rows)
    return out.requires_grad_() if wants_gradient else out


def rows_of_length(x: RowCut, count: int) -> Rows | None:
    """Returns the rows that a first size stands for beside `x`, if it does for any."""
    rows = x.rows
    of_nodes = rows.nodes is not None and count == rows.nodes.total
    if count == rows.count:
        return None if of_nodes else rows  # which of the two it means is not known
    return rows.nodes if of_nodes else None


def with_local_size(x: RowCut, sizes: Any) -> Any:
    """Returns sizes in which the whole tensor's number of rows is replaced by this rank's.

    Args:
        x: whose rows the first size counts.
        sizes: for `view`, `expand` and their like, or a dtype.
    """
    if x.reads_local or not sizes:
        return sizes
    first = sizes[0]
    if type(first) is int:
        if first != -1 and first == x.rows.count:
            return (local_shape(x)[0], *sizes[1:])
        return sizes
    if isinstance(first, (tuple, list)) and first and type(first[0]) is int:
        return ((*with_local_size(x, tuple(first)),), *sizes[1:])
    return sizes


def like_of(x: Tensor) -> Tensor:
    """Returns an ordinary tensor of the dtype and device of a row-cut one, of no rows."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.detach()[:0].as_subclass(torch.Tensor)

"""Multiplies matrices and vectors of which one side, or both, are sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.sharded import whole
from pyg_distcomm.sharded.dist_tensor import DistTensor, all_rows, local_at, rule
from pyg_distcomm.sharded.partial import plain, summed_over_ranks

aten = torch.ops.aten
# the dimensions of both sides and of the result: k is summed over, b counts matrices
_DIMS = {
    aten.mm.default: ("mk", "kn", "mn"),
    aten.bmm.default: ("bmk", "bkn", "bmn"),
    aten.mv.default: ("mk", "k", "m"),
    aten.dot.default: ("k", "k", ""),
}


@rule(*_DIMS)
def product(func: Any, args: Any, kwargs: Any) -> Any:
    """Multiplies two sides; of those sharded in two dimensions the smaller is gathered."""
    *dims, out_dims = _DIMS[func]
    sides = [plain(side) for side in args]
    if any(side.layout != torch.strided for side in sides):
        return whole.apply(func, args, kwargs)
    sharded = [type(side) is DistTensor for side in sides]
    if not any(sharded):
        return func(*sides)
    at: list[Any] = [
        d[side.dim_] if type(side) is DistTensor else None
        for side, d in zip(sides, dims, strict=True)
    ]
    if all(sharded) and at[0] != at[1]:
        least = int(sides[0].numel() >= sides[1].numel())
        sides[least] = all_rows(sides[least], "mm")
        return product(func, sides, kwargs)
    first = sharded.index(True)
    dim, rows = at[first], sides[first].rows
    own = [
        local_at(side, rows, d.index(dim)) if dim in d else side
        for side, d in zip(sides, dims, strict=True)
    ]
    out = func(*own)
    if dim == "k":
        return summed_over_ranks(out, rows.mesh)
    return DistTensor(out, rows, out_dims.index(dim))


@rule(aten.addmm.default, aten.baddbmm.default)
def add_product(func: Any, args: Any, kwargs: Any) -> Any:
    """Multiplies two matrices, or batches of them, and adds a bias."""
    bias, a, b = args
    by_rows = type(a) is DistTensor and a.dim_ == 0 and type(b) is Tensor
    if by_rows and func is aten.addmm.default and type(bias) is not DistTensor:
        if bias.dim() == 1 or bias.size(0) == 1:
            return DistTensor(func(plain(bias), a.local, b, **kwargs), a.rows, 0)
    beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
    op = aten.mm.default if func is aten.addmm.default else aten.bmm.default
    out = product(op, (a, b), {})
    return (out if alpha == 1 else out * alpha) + (bias if beta == 1 else bias * beta)

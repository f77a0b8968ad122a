"""Multiplies matrices and vectors of which one side, or both, are sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.sharded import whole
from pyg_distcomm.sharded.dist_tensor import DistTensor, all_rows, local_at, rule
from pyg_distcomm.sharded.partial import plain, summed_over_ranks
from pyg_distcomm.sharded.pointwise import bound

aten = torch.ops.aten
# the dimensions of both sides and of the result: k is summed over, b counts matrices
_DIMS = {
    aten.mm.default: ("mk", "kn", "mn"),
    aten.bmm.default: ("bmk", "bkn", "bmn"),
    aten.mv.default: ("mk", "k", "m"),
    aten.dot.default: ("k", "k", ""),
}


def _along(func: Any, sides: list[Any], dims: Any, out_dims: Any, *more: Any) -> Any:
    """Multiplies sides that are sharded in one dimension; None if it is not the same one.

    Args:
        func: the op.
        sides: what it multiplies.
        dims: names of the dimensions of each side; what has another size there is repeated.
        out_dims: those of the result; over the others it sums.
        more: further arguments.
    """
    pairs = [*zip(sides, dims, strict=True)]
    found = [(side.rows, d[side.dim_]) for side, d in pairs if type(side) is DistTensor]
    rows, dim = found[0]
    if any(other != dim or r.count != rows.count for r, other in found):
        return None
    own = [
        local_at(side, rows, d.index(dim))
        if dim in d and side.size(d.index(dim)) == rows.count
        else side
        for side, d in pairs
    ]
    out = func(*own, *more)
    if dim not in out_dims:
        return summed_over_ranks(out, rows.mesh)
    return DistTensor(out, rows, out_dims.index(dim))


@rule(*_DIMS)
def product(func: Any, args: Any, kwargs: Any) -> Any:
    """Multiplies two sides; of those sharded in two dimensions the smaller is gathered."""
    *dims, out_dims = _DIMS[func]
    sides = [plain(side) for side in args]
    if any(side.layout != torch.strided for side in sides):
        return whole.apply(func, args, kwargs)
    if not any(type(side) is DistTensor for side in sides):
        return func(*sides)
    found = _along(func, sides, dims, out_dims)
    if found is None:
        least = int(sides[0].numel() >= sides[1].numel())
        sides[least] = all_rows(sides[least], "mm")
        found = _along(func, sides, dims, out_dims)
    return found


@rule(aten._trilinear.default)
def trilinear(func: Any, args: Any, kwargs: Any) -> Any:
    """Sums products of three tensors, of which each lacks some of the dimensions."""
    given = bound(func, args, kwargs)
    sides, lacks, summed = [plain(s) for s in given[:3]], given[3:6], given[6]
    n = sides[0].dim() + len(lacks[0])
    dims = [[d for d in range(n) if d not in lack] for lack in lacks]
    out_dims = [d for d in range(n) if d not in summed]
    found = None
    if all(s.rows.count != 1 for s in sides if type(s) is DistTensor):
        # one row would be repeated by torch where a rank has none
        found = _along(func, sides, dims, out_dims, *given[3:])
    return whole.apply(func, args, kwargs) if found is None else found


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

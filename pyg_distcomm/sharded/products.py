"""Multiplies matrices of which one side is sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.sharded import whole
from pyg_distcomm.sharded.dist_tensor import DistTensor, all_rows, local_at, rule
from pyg_distcomm.sharded.partial import PartialSum, summed_over_ranks

aten = torch.ops.aten


def _plain(x: Tensor) -> Tensor:
    return x.value() if type(x) is PartialSum else x


def _product(func: Any, a: Any, b: Any) -> Any:
    """Multiplies `a` [..., m, k] and `b` [..., k, n]."""
    if any(t.layout != torch.strided for t in (a, b)):
        return whole.apply(func, (a, b), {})
    da, db = (t.dim() - t.dim_ if type(t) is DistTensor else None for t in (a, b))
    if da is None and db is None:
        return func(_plain(a), _plain(b))
    if da == 1 or db == 2:  # contracted over the rows of all ranks
        rows = a.rows if da == 1 else b.rows
        left = local_at(_plain(a), rows, a.dim() - 1)
        right = local_at(_plain(b), rows, b.dim() - 2)
        return summed_over_ranks(func(left, right), rows.mesh)
    if da == 3 or db == 3:  # a batch of matrices
        rows = a.rows if da == 3 else b.rows
        return DistTensor(
            func(local_at(_plain(a), rows, 0), local_at(_plain(b), rows, 0)), rows, 0
        )
    if da == 2 and db == 1:  # rows by columns: one side is gathered, the shorter
        if a.size(-2) >= b.size(-1):
            b, db = all_rows(b, "mm"), None
        else:
            a, da = all_rows(a, "mm"), None
    if da == 2:
        out = func(a.local, _plain(b))
        return DistTensor(out, a.rows, out.dim() - 2)
    if db == 1:
        out = func(_plain(a), b.local)
        return DistTensor(out, b.rows, out.dim() - 1)
    return whole.apply(func, (a, b), {})


@rule(aten.mm.default, aten.bmm.default)
def mm(func: Any, args: Any, kwargs: Any) -> Any:
    """Multiplies two matrices, or batches of them."""
    return _product(func, *args)


@rule(aten.addmm.default)
def addmm(func: Any, args: Any, kwargs: Any) -> Any:
    """Multiplies two matrices, and adds a bias."""
    bias, a, b = args
    if (
        type(a) is DistTensor
        and a.dim_ == 0
        and type(b) is Tensor
        and type(bias) is not DistTensor
    ):
        if bias.dim() == 1 or bias.size(0) == 1:
            return DistTensor(func(_plain(bias), a.local, b, **kwargs), a.rows, 0)
    beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
    out = _product(aten.mm.default, a, b)
    return (out if alpha == 1 else out * alpha) + (bias if beta == 1 else bias * beta)


@rule(aten.baddbmm.default)
def baddbmm(func: Any, args: Any, kwargs: Any) -> Any:
    """Multiplies batches of matrices, and adds."""
    bias, a, b = args
    beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
    out = _product(aten.bmm.default, a, b)
    return (out if alpha == 1 else out * alpha) + (bias if beta == 1 else bias * beta)


@rule(aten.mv.default)
def mv(func: Any, args: Any, kwargs: Any) -> Any:
    """Multiplies a matrix and a vector."""
    a, v = args
    if type(a) is DistTensor and a.dim_ == 0:
        return DistTensor(
            func(a.local, all_rows(v, "mv") if type(v) is DistTensor else _plain(v)),
            a.rows,
            0,
        )
    rows = a.rows if type(a) is DistTensor else v.rows
    return summed_over_ranks(
        func(local_at(_plain(a), rows, 1), local_at(_plain(v), rows, 0)), rows.mesh
    )


@rule(aten.dot.default)
def dot(func: Any, args: Any, kwargs: Any) -> Any:
    """Multiplies two vectors."""
    rows = next(t.rows for t in args if type(t) is DistTensor)
    return summed_over_ranks(
        func(*(local_at(_plain(t), rows, 0) for t in args)), rows.mesh
    )

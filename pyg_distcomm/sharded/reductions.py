"""Reduces over rows, by one all-reduce, or over other dimensions, row by row."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.kernels.registry import HALVES
from pyg_distcomm.ops.id_plan import reduction_identity
from pyg_distcomm.sharded import whole
from pyg_distcomm.sharded.agreement import compare_call
from pyg_distcomm.sharded.dist_tensor import DistTensor, all_rows, local_at, rule
from pyg_distcomm.sharded.partial import over_ranks, summed_over_ranks

aten = torch.ops.aten
OverRows = Callable[[Any, Any, Any, list[int], bool], Any]


def _reduction(*ops: Any, at: int = 1) -> Callable[[OverRows], OverRows]:
    """Declares how ops reduce over rows; over other dimensions they do so row by row.

    The function gets the op, its arguments, the dimensions, and whether they are kept.

    Args:
        ops: the ops, of one tensor.
        at: the position of their dimensions, before that of `keepdim`.
    """

    def declare(over_rows: OverRows) -> OverRows:
        @rule(*ops)
        def apply(func: Any, args: Any, kwargs: Any) -> Any:
            x = args[0]
            given = args[at] if len(args) > at else kwargs.get("dim")
            keep = args[at + 1] if len(args) > at + 1 else kwargs.get("keepdim", False)
            given = [given] if isinstance(given, int) else given
            dims = [d % x.dim() for d in given] if given else list(range(x.dim()))
            if x.dim_ in dims:
                compare_call(x.rows.mesh, x, x.rows.count)
                return over_rows(func, args, kwargs, dims, keep)
            dim = x.dim_ if keep else x.dim_ - sum(d < x.dim_ for d in dims)
            out = func(x.local, *args[1:], **kwargs)
            if isinstance(out, Tensor):
                return DistTensor(out, x.rows, dim)
            return tuple(DistTensor(part, x.rows, dim) for part in out)

        return over_rows

    return declare


@_reduction(
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.nansum.default,
    aten.count_nonzero.default,
    aten.count_nonzero.dim_IntList,
)
def summed(func: Any, args: Any, kwargs: Any, dims: list[int], keep: bool) -> Any:
    """Sums, or counts."""
    x = args[0]
    return summed_over_ranks(func(x.local, *args[1:], **kwargs), x.rows.mesh)


@_reduction(aten.mean.default, aten.mean.dim)
def mean(func: Any, args: Any, kwargs: Any, dims: list[int], keep: bool) -> Any:
    """Takes means: the sum over the number of the whole."""
    x = args[0]
    part = x.local.sum(dims, keep, dtype=kwargs.get("dtype"))
    return over_ranks(part, x.rows.mesh) / math.prod(x.size(d) for d in dims)


@_reduction(aten.amax.default, aten.max.default, aten.amin.default, aten.min.default)
def extreme(func: Any, args: Any, kwargs: Any, dims: list[int], keep: bool) -> Any:
    """Takes maxima, or minima."""
    x = args[0]
    if not x.numel():  # which torch refuses
        return func(x.local, *args[1:], **kwargs)
    return _extreme(x, dims, keep, "max" if "max" in func._schema.name else "min")


def _extreme(x: DistTensor, dims: list[int], keep: bool, op: str) -> Tensor:
    local, mesh = x.local, x.rows.mesh
    empty = reduction_identity(x.dtype, f"a{op}")
    if not local.size(x.dim_):  # no rows here
        shape = list(local.shape)
        shape[x.dim_] = 1
        local = local.new_full(shape, empty)
    found: Tensor = getattr(torch, f"a{op}")(local, dims, keep)
    if found.dtype == torch.bool:
        return over_ranks(found.to(torch.uint8), mesh, op).bool()
    if not found.dtype.is_floating_point:
        return over_ranks(found, mesh, op)
    lost = found.isnan()  # what is not a number wins everywhere
    marks = lost if op == "max" else -1 * lost
    both = torch.stack([found.masked_fill(lost, empty), marks])
    both = over_ranks(both, mesh, op)
    return both[0].masked_fill(both[1] != 0, math.nan)


@_reduction(
    aten.any.default,
    aten.any.dim,
    aten.any.dims,
    aten.all.default,
    aten.all.dim,
    aten.all.dims,
)
def any_all(func: Any, args: Any, kwargs: Any, dims: list[int], keep: bool) -> Any:
    """Tells whether any, or all, are true."""
    x, op = args[0], "max" if "any" in func._schema.name else "min"
    part = func(x.local, *args[1:], **kwargs).to(torch.uint8)
    return over_ranks(part, x.rows.mesh, op).bool()


@_reduction(
    aten.linalg_vector_norm.default,
    aten.norm.Scalar,
    aten.norm.ScalarOpt_dim,
    at=2,
)
def norm(func: Any, args: Any, kwargs: Any, dims: list[int], keep: bool) -> Any:
    """Takes norms: of order 2 by a sum of squares, of others on all rows."""
    x = args[0]
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    order = 2 if order is None else order
    if order not in (1, 2):
        return whole.apply(func, args, kwargs)
    kind = kwargs.get("dtype")
    part = torch.linalg.vector_norm(x.local, order, dims, keep, dtype=kind)
    if order == 1:
        return over_ranks(part, x.rows.mesh)
    return over_ranks(part * part, x.rows.mesh).sqrt()


@_reduction(
    aten.var.correction,
    aten.std.correction,
    aten.var_mean.correction,
    aten.std_mean.correction,
)
def var(func: Any, args: Any, kwargs: Any, dims: list[int], keep: bool) -> Any:
    """Takes variances in two passes."""
    x, mesh = args[0], args[0].rows.mesh
    correction = kwargs.get("correction", 1)
    correction = 1 if correction is None else correction
    n = math.prod(x.size(d) for d in dims)
    middle = over_ranks(x.local.sum(dims, True), mesh) / n
    part = (x.local - middle).square().sum(dims, keep)
    out = over_ranks(part, mesh) / max(n - correction, 0)
    if "std" in func._schema.name:
        out = out.sqrt()
    if "mean" not in func._schema.name:
        return out
    return out, middle if keep else middle.view(out.shape)


@_reduction(
    aten.argmax.default,
    aten.argmin.default,
    aten.max.dim,
    aten.min.dim,
    aten.median.dim,
    aten.mode.default,
    aten.prod.dim_int,
    aten.aminmax.default,
)
def picked(func: Any, args: Any, kwargs: Any, dims: list[int], keep: bool) -> Any:
    """Picks among all rows, which every rank gathers."""
    return whole.apply(func, args, kwargs)


_reduction(aten.kthvalue.default, at=2)(picked)


@_reduction(aten.logsumexp.default)
def logsumexp(func: Any, args: Any, kwargs: Any, dims: list[int], keep: bool) -> Any:
    """Takes the logarithm of sums of exponentials, of which the greatest is taken out."""
    x = args[0]
    if not x.numel():
        return whole.apply(func, args, kwargs)
    most = _extreme(x, dims, True, "max")
    most = torch.where(most.isfinite(), most, torch.zeros_like(most))
    part = (x.local - most).exp().sum(dims, True)
    out = over_ranks(part, x.rows.mesh).log() + most
    return out if keep else out.squeeze(dims)  # type: ignore[arg-type]


def softmax_over_rows(x: DistTensor, log: bool, kind: torch.dtype) -> DistTensor:
    """Takes the softmax over all rows, by two all-reduces of one row, in float32 of halves."""
    wide = x.local.float() if x.dtype in HALVES else x.local
    if not x.numel():
        return DistTensor(wide.to(kind), x.rows, x.dim_)
    every = DistTensor(wide, x.rows, x.dim_)
    away = wide - _extreme(every, [x.dim_], True, "max")
    total = over_ranks(away.exp().sum(x.dim_, True), x.rows.mesh)
    out = away - total.log() if log else away.exp() / total
    return DistTensor(out.to(kind), x.rows, x.dim_)


def softmax_over_rows_backward(
    g: Tensor, y: DistTensor, log: bool, kind: torch.dtype
) -> DistTensor:
    """Takes the gradient of `softmax_over_rows`: y (g - sum y g); of logs, g - e^y sum g."""
    own, out = local_at(g, y.rows, y.dim_), y.local
    if y.dtype in HALVES:
        own, out = own.float(), out.float()
    part = (own if log else own * out).sum(y.dim_, True)
    total = over_ranks(part, y.rows.mesh)
    found = own - out.exp() * total if log else out * (own - total)
    return DistTensor(found.to(kind), y.rows, y.dim_)


@rule(aten._local_scalar_dense.default)
def item(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns the one value of a tensor, which its owner sends to all."""
    return all_rows(args[0], "item").item()


@rule(aten.equal.default)
def equal(func: Any, args: Any, kwargs: Any) -> bool:
    """Tells whether two tensors are equal on all ranks."""
    a, b = args
    if a.shape != b.shape:
        return False
    like = a if type(a) is DistTensor else b
    same = torch.equal(*(local_at(t, like.rows, like.dim_) for t in (a, b)))
    flag = torch.tensor([int(same)])
    return bool(over_ranks(flag, like.rows.mesh, "min"))

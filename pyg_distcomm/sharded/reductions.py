"""Reduces over rows, by one all-reduce, or over other dimensions, row by row."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.comm import collectives
from pyg_distcomm.kernels.registry import HALVES
from pyg_distcomm.ops.id_plan import reduction_identity
from pyg_distcomm.sharded import whole
from pyg_distcomm.sharded.agreement import compare_call
from pyg_distcomm.sharded.dist_tensor import DistTensor, all_rows, local_at, rule
from pyg_distcomm.sharded.partial import summed_over_ranks

aten = torch.ops.aten


def _over_ranks(part: Tensor, mesh: Any, op: str = "sum") -> Tensor:
    """Returns the reduction of a part over the ranks."""
    return collectives.all_reduce(part, mesh.world, op)


def _dims(x: Tensor, dims: Any) -> list[int]:
    given = [dims] if isinstance(dims, int) else dims
    found = [d % x.dim() for d in given] if given else list(range(x.dim()))
    if type(x) is DistTensor and x.dim_ in found:
        compare_call(x.rows.mesh, x.shape, x.dtype)
    return found


def _reduced(
    func: Any, args: Any, kwargs: Any, over_ranks: Callable[[Tensor, DistTensor], Any]
) -> Any:
    """Reduces own rows, and over the ranks if the rows are among the dimensions."""
    x = args[0]
    dims = _dims(x, args[1] if len(args) > 1 else kwargs.get("dim"))
    keep = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
    out = func(x.local, *args[1:], **kwargs)
    if x.dim_ in dims:
        return over_ranks(out, x)
    dim = x.dim_ if keep else x.dim_ - sum(d < x.dim_ for d in dims)
    return DistTensor(out, x.rows, dim)


@rule(aten.sum.default, aten.sum.dim_IntList, aten.nansum.default)
def sum_(func: Any, args: Any, kwargs: Any) -> Any:
    """Sums."""
    return _reduced(
        func, args, kwargs, lambda out, x: summed_over_ranks(out, x.rows.mesh)
    )


@rule(aten.mean.default, aten.mean.dim)
def mean(func: Any, args: Any, kwargs: Any) -> Any:
    """Takes means: the sum over the number of the whole."""
    x = args[0]
    dims = _dims(x, args[1] if len(args) > 1 else kwargs.get("dim"))
    if x.dim_ not in dims:
        return _reduced(func, args, kwargs, lambda out, x: out)
    keep = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
    total = x.local.sum(dims, keep, dtype=kwargs.get("dtype"))
    total = _over_ranks(total, x.rows.mesh)
    return total / math.prod(x.size(d) for d in dims)


def _extreme(op: str) -> Callable[[Any, Any, Any], Any]:
    def apply(func: Any, args: Any, kwargs: Any) -> Any:
        x = args[0]
        dims = _dims(x, args[1] if len(args) > 1 else kwargs.get("dim"))
        if x.dim_ not in dims:
            return _reduced(func, args, kwargs, lambda out, x: out)
        if not x.numel():
            return func(x.local, *args[1:], **kwargs)
        local = x.local
        if not local.size(x.dim_):  # no rows here: the identity
            shape = list(local.shape)
            shape[x.dim_] = 1
            local = local.new_full(shape, reduction_identity(x.dtype, f"a{op}"))
        if local.dtype == torch.bool:
            out = func(local, *args[1:], **kwargs).to(torch.uint8)
            return _over_ranks(out, x.rows.mesh, op).bool()
        found = func(local, *args[1:], **kwargs)
        if not found.dtype.is_floating_point:
            return _over_ranks(found, x.rows.mesh, op)
        sign = (
            1 if op == "max" else -1
        )  # of what is not a number, which wins everywhere
        lost = found.isnan()
        both = torch.stack(
            [
                found.masked_fill(lost, reduction_identity(x.dtype, f"a{op}")),
                sign * lost,
            ]
        )
        both = _over_ranks(both, x.rows.mesh, op)
        return both[0].masked_fill(both[1] != 0, math.nan)

    return apply


rule(aten.amax.default, aten.max.default)(_extreme("max"))
rule(aten.amin.default, aten.min.default)(_extreme("min"))


@rule(
    aten.any.default,
    aten.any.dim,
    aten.any.dims,
    aten.all.default,
    aten.all.dim,
    aten.all.dims,
)
def any_all(func: Any, args: Any, kwargs: Any) -> Any:
    """Tells whether any, or all, are true."""
    op = "max" if "any" in func._schema.name else "min"

    def over(out: Tensor, x: DistTensor) -> Tensor:
        return _over_ranks(out.to(torch.uint8), x.rows.mesh, op).bool()

    return _reduced(func, args, kwargs, over)


@rule(aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def count(func: Any, args: Any, kwargs: Any) -> Any:
    """Counts."""
    return _reduced(func, args, kwargs, lambda o, x: summed_over_ranks(o, x.rows.mesh))


@rule(aten.linalg_vector_norm.default, aten.norm.Scalar, aten.norm.ScalarOpt_dim)
def norm(func: Any, args: Any, kwargs: Any) -> Any:
    """Takes norms: of order 2 by a sum of squares, of others on all rows."""
    x = args[0]
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dims = args[2] if len(args) > 2 else kwargs.get("dim")
    keep = args[3] if len(args) > 3 else kwargs.get("keepdim", False)
    over = _dims(x, dims)
    if x.dim_ not in over:
        out = func(x.local, *args[1:], **kwargs)
        dim = x.dim_ if keep else x.dim_ - sum(d < x.dim_ for d in over)
        return DistTensor(out, x.rows, dim)
    order = 2 if order is None else order
    if order not in (1, 2):
        return whole.apply(func, args, kwargs)
    part = (x.local.abs() if order == 1 else x.local * x.local).sum(over, keep)
    total = _over_ranks(part, x.rows.mesh)
    return total if order == 1 else total.sqrt()


@rule(
    aten.var.correction,
    aten.std.correction,
    aten.var_mean.correction,
    aten.std_mean.correction,
)
def var(func: Any, args: Any, kwargs: Any) -> Any:
    """Takes variances in two passes."""
    x = args[0]
    given = args[1] if len(args) > 1 else kwargs.get("dim")
    dims, keep = _dims(x, given), kwargs.get("keepdim", False)
    correction = kwargs.get("correction", 1)
    correction = 1 if correction is None else correction
    pair = func in (aten.var_mean.correction, aten.std_mean.correction)
    if x.dim_ not in dims:
        out = func(x.local, *args[1:], **kwargs)
        dim = x.dim_ if keep else x.dim_ - sum(d < x.dim_ for d in dims)
        return (
            tuple(DistTensor(o, x.rows, dim) for o in out)
            if pair
            else DistTensor(out, x.rows, dim)
        )
    n, world = math.prod(x.size(d) for d in dims), x.rows.mesh
    middle = _over_ranks(x.local.sum(dims, True), world) / n
    part = (x.local - middle).square().sum(dims, keep)
    out = _over_ranks(part, world) / max(n - correction, 0)
    if func in (aten.std.correction, aten.std_mean.correction):
        out = out.sqrt()
    return (out, middle if keep else middle.view(out.shape)) if pair else out


@rule(
    aten.argmax.default,
    aten.argmin.default,
    aten.max.dim,
    aten.min.dim,
    aten.median.dim,
    aten.mode.default,
    aten.prod.dim_int,
    aten.logsumexp.default,
    aten.kthvalue.default,
    aten.aminmax.default,
)
def one_dim(func: Any, args: Any, kwargs: Any) -> Any:
    """Reduces one dimension, row by row if it is not that of the rows."""
    x = args[0]
    at = 2 if func is aten.kthvalue.default else 1
    given = args[at] if len(args) > at else kwargs.get("dim")
    if given is None:
        return whole.apply(func, args, kwargs)
    dims = _dims(x, given)
    if x.dim_ in dims:
        if func is aten.logsumexp.default and x.numel():
            return _logsumexp(x, dims, args[2] if len(args) > 2 else False)
        return whole.apply(func, args, kwargs)
    keep = args[at + 1] if len(args) > at + 1 else kwargs.get("keepdim", False)
    dim = x.dim_ if keep else x.dim_ - sum(d < x.dim_ for d in dims)
    out = func(x.local, *args[1:], **kwargs)
    if isinstance(out, Tensor):
        return DistTensor(out, x.rows, dim)
    return tuple(DistTensor(o, x.rows, dim) for o in out)


def _logsumexp(x: DistTensor, dims: list[int], keep: bool) -> Tensor:
    most = _extreme("max")(aten.amax.default, (x, dims, True), {})
    most = torch.where(most.isfinite(), most, torch.zeros_like(most))
    part = (x.local - most).exp().sum(dims, True)
    out = _over_ranks(part, x.rows.mesh).log() + most
    return out if keep else out.squeeze(dims)  # type: ignore[arg-type]


def softmax_over_rows(x: DistTensor, log: bool, kind: torch.dtype) -> DistTensor:
    """Takes the softmax over all rows, by two all-reduces of one row, in float32 of halves."""
    wide = x.local.float() if x.dtype in HALVES else x.local
    if not x.numel():
        return DistTensor(wide.to(kind), x.rows, x.dim_)
    every = DistTensor(wide, x.rows, x.dim_)
    away = wide - _extreme("max")(aten.amax.default, (every, [x.dim_], True), {})
    total = _over_ranks(away.exp().sum(x.dim_, True), x.rows.mesh)
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
    total = _over_ranks(part, y.rows.mesh)
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
    return bool(_over_ranks(flag, like.rows.mesh, "min"))

"""Reduces over rows, by all-reduces, and over other dimensions, and multiplies matrices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.kernels.memory import computed
from pyg_distcomm.kernels.registry import HALVES
from pyg_distcomm.ops.id_plan import reduction_identity
from pyg_distcomm.sharded import whole
from pyg_distcomm.sharded.agreement import compare_call
from pyg_distcomm.sharded.dist_tensor import DistTensor, all_rows, local_at, rule
from pyg_distcomm.sharded.partial import over_ranks, plain, summed_over_ranks
from pyg_distcomm.sharded.pointwise import alone, bound

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


@_reduction(aten.sum, aten.nansum, aten.count_nonzero)
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


@_reduction(aten.any, aten.all)
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


@_reduction(aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim)
def first(func: Any, args: Any, kwargs: Any, dims: list[int], keep: bool) -> Any:
    """Takes maxima, or minima, over rows, and the first row that has each of them."""
    x, name = args[0], func._schema.name
    if dims != [x.dim_] or not x.numel():
        return whole.apply(func, args, kwargs)
    most = _extreme(x, dims, True, "max" if "max" in name else "min")
    there = (x.local == most) | (x.local != x.local)  # what is not a number wins
    shape = [-1 if d == x.dim_ else 1 for d in range(x.dim())]
    place = x.rows.place_on(x.device).view(shape)
    at = DistTensor(torch.where(there, place, x.rows.count), x.rows, x.dim_)
    found = most, _extreme(at, dims, True, "min")
    kept = found if keep else tuple(part.squeeze(dims) for part in found)
    return kept[1] if "arg" in name else kept


@_reduction(aten.median.dim, aten.mode.default, aten.prod.dim_int, aten.aminmax.default)
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


@rule(
    aten._softmax.default,
    aten._softmax_backward_data.default,
    aten._log_softmax.default,
    aten._log_softmax_backward_data.default,
)
def softmax(func: Any, args: Any, kwargs: Any) -> Any:
    """Takes the softmax of each row, or over all rows; or the gradient of this."""
    name = func._schema.name
    log, back = "log" in name, "backward" in name
    x, d, kind = args[back:]
    if type(x) is DistTensor and d % x.dim() == x.dim_ and x.is_floating_point():
        if back:
            return softmax_over_rows_backward(args[0], x, log, kind)
        return softmax_over_rows(x, log, torch.float32 if kind else x.dtype)
    return alone(func, args, kwargs)


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
    out = computed(func, *own, *more)
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
            return DistTensor(
                computed(func, plain(bias), a.local, b, **kwargs), a.rows, 0
            )
    beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
    op = aten.mm.default if func is aten.addmm.default else aten.bmm.default
    out = product(op, (a, b), {})
    return (out if alpha == 1 else out * alpha) + (bias if beta == 1 else bias * beta)

"""Reduces over rows, by all-reduces, and over other dimensions; multiplies; computes losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm import kernels
from pyg_distcomm.kernels.memory import computed
from pyg_distcomm.kernels.registry import HALVES
from pyg_distcomm.ops.id_plan import reduction_identity
from pyg_distcomm.sharded import whole
from pyg_distcomm.sharded.agreement import compare_call
from pyg_distcomm.sharded.dist_tensor import (
    DistTensor,
    all_rows,
    changed,
    local_at,
    own_part,
    rule,
)
from pyg_distcomm.sharded.partial import over_ranks, plain, summed_over_ranks
from pyg_distcomm.sharded.pointwise import (
    alone,
    bound,
    check_shares,
    decomposed,
    meeting,
)

aten = torch.ops.aten
OverRows = Callable[[Any, Any, Any, list[int], bool], Any]


def _reduction(*ops: Any, at: int = 1) -> Callable[[OverRows], OverRows]:
    """Declares how ops reduce over rows; over other dimensions they do so row by row.

    Their dimensions are the argument `at`, before `keepdim`.
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
    if not all(x.size(d) for d in dims):  # which torch refuses
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


@_reduction(aten.any, aten.all, aten._is_any_true, aten._is_all_true)
def any_all(func: Any, args: Any, kwargs: Any, dims: list[int], keep: bool) -> Any:
    """Tells whether any, or all, are true."""
    x, op = args[0], "max" if "any" in func._schema.name else "min"
    part = func(x.local, *args[1:], **kwargs).to(torch.uint8)
    return over_ranks(part, x.rows.mesh, op).bool()


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


@_reduction(aten.median.dim, aten.mode.default, aten.prod.dim_int)
def picked(func: Any, args: Any, kwargs: Any, dims: list[int], keep: bool) -> Any:
    """Picks among all rows, which every rank gathers."""
    return whole.apply(func, args, kwargs)


_reduction(aten.kthvalue.default, at=2)(picked)


@_reduction(aten.logsumexp.default, aten.aminmax.default)
def by_parts(func: Any, args: Any, kwargs: Any, dims: list[int], keep: bool) -> Any:
    """Reduces by the sums and extremes that torch says an op is made of."""
    found = decomposed(func, args, kwargs)
    return plain(found) if isinstance(found, Tensor) else tuple(map(plain, found))


_reduction(
    aten.linalg_vector_norm.default, aten.norm.Scalar, aten.norm.ScalarOpt_dim, at=2
)(by_parts)


@rule(
    aten._softmax.default,
    aten._softmax_backward_data.default,
    aten._log_softmax.default,
    aten._log_softmax_backward_data.default,
)
def softmax(func: Any, args: Any, kwargs: Any) -> Any:
    """Takes the softmax of each row, or over all rows; or the gradient of this."""
    x, d = args[-3:-1]
    over_rows = type(x) is DistTensor and d % x.dim() == x.dim_
    over_rows = over_rows and x.is_floating_point()
    return (decomposed if over_rows else alone)(func, args, kwargs)


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


@rule(aten.allclose.default)
def allclose(func: Any, args: Any, kwargs: Any) -> bool:
    """Tells whether two tensors are close on all ranks."""
    return bool(torch.isclose(*args, **kwargs).all())


# the dimensions of both sides and of the result: k is summed over, b counts matrices
_DIMS = {
    aten.mm.default: ("mk", "kn", "mn"),
    aten.bmm.default: ("bmk", "bkn", "bmn"),
    aten.mv.default: ("mk", "k", "m"),
    aten.dot.default: ("k", "k", ""),
}


def _along(func: Any, sides: list[Any], dims: Any, out_dims: Any, *more: Any) -> Any:
    """Multiplies sides that are sharded in one dimension; None if it is not the same one.

    Dimensions are known by names; what has another size there is repeated, and those that
    the result does not have are summed over.
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
    return decomposed(func, args, kwargs)


NONE, MEAN, SUM = 0, 1, 2  # torch's reductions of losses


@rule(aten.nll_loss_forward.default)
def nll_loss(func: Any, args: Any, kwargs: Any) -> Any:
    """Takes the negative log-likelihood; mean over the weights of all rows."""
    x, y, w, reduction, ignore = args
    rows = x.rows if type(x) is DistTensor else y.rows
    own = [local_at(t, rows, 0) for t in (x, y)]
    out, weight = func(*own, w, SUM if reduction == MEAN else reduction, ignore)
    if reduction == NONE:
        return DistTensor(out, rows), weight
    both = over_ranks(torch.stack([out, weight]), rows.mesh)
    return (both[0] / both[1] if reduction == MEAN else both[0]), both[1]


@rule(aten.nll_loss_backward.default)
def nll_loss_backward(func: Any, args: Any, kwargs: Any) -> Any:
    """Takes the gradient of `nll_loss`."""
    g, x, y, *how = args
    rows = x.rows if type(x) is DistTensor else y.rows
    own = [meeting(g, rows, 1), *(local_at(t, rows, 0) for t in (x, y))]
    return DistTensor(func(*own, *how), rows)


@rule(
    aten.native_batch_norm,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional,
)
def batch_norm(func: Any, args: Any, kwargs: Any) -> Any:
    """Normalises by the mean and variance of all rows."""
    given = args
    if func is aten._native_batch_norm_legit.no_stats:
        given = *args[:3], None, None, *args[3:]
    x, w, b, mean, var, training, momentum, eps = given
    if type(x) is not DistTensor or x.dim_ == 1:
        return whole.apply(func, args, kwargs)
    local, found = x.local, None
    if training:
        local, n = _wide(local), x.numel() // max(x.size(1), 1)
        dims = [0, *range(2, x.dim())]
        every = DistTensor(local, x.rows, x.dim_)
        spread, middle = torch.var_mean(every, dims, correction=0)
        if mean is not None and var is not None:
            mean.mul_(1 - momentum).add_(middle, alpha=momentum)
            var.mul_(1 - momentum).add_(spread * n / (n - 1), alpha=momentum)
        w, b = (t if t is None else t.to(local.dtype) for t in (w, b))
        mean, var, found = middle, spread, (middle, (spread + eps).rsqrt())
    out, *kept = aten.native_batch_norm(local, w, b, mean, var, False, momentum, eps)
    return DistTensor(out.to(x.dtype), x.rows, x.dim_), *(found or kept)


def _wide(x: Tensor) -> Tensor:
    """Returns numbers in which sums are taken: float32 for half of its width."""
    return x.float() if x.dtype in HALVES else x


@rule(aten.native_batch_norm_backward.default)
def batch_norm_backward(func: Any, args: Any, kwargs: Any) -> Any:
    """Takes the gradient of `batch_norm`."""
    g, x, w, mean, var, middle, scale, training, eps, mask = args
    like = x if type(x) is DistTensor else g  # of plain rows, each rank's own part
    if type(like) is not DistTensor or like.dim_ == 1:
        return whole.apply(func, args, kwargs)
    rows, at = like.rows, like.dim_
    out, own_x = (_wide(local_at(t, rows, at)) for t in (g, x))
    shape = [1, -1, *[1] * (x.dim() - 2)]
    if not training:
        middle, scale = mean, (var + eps).rsqrt()
    hat = (own_x - middle.view(shape)) * scale.view(shape)
    dims = [0, *range(2, x.dim())]
    n = x.numel() // max(x.size(1), 1)
    sums = torch.stack([out.sum(dims), (out * hat).sum(dims)])
    if training:
        gb, gw = over_ranks(sums, rows.mesh)
        out = out - (gb / n).view(shape) - hat * (gw / n).view(shape)
    else:
        total = summed_over_ranks(sums, rows.mesh)
        gb, gw = total[0], total[1]
    out = out * scale.view(shape)
    if w is not None:
        out = out * w.view(shape)
    kind = x.dtype if w is None else w.dtype
    return (
        DistTensor(out.to(x.dtype), rows, at),
        gw.to(kind) if mask[1] else None,
        gb.to(kind) if mask[2] else None,
    )


@rule(aten.bernoulli_.float)
def bernoulli_(func: Any, args: Any, kwargs: Any) -> Any:
    """Draws the mask of a dropout, keyed by the ids of rows."""
    x = args[0]
    p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    rows, front = x.rows, x.local.movedim(x.dim_, 0)
    cols = front[:1].numel() if len(front) else 0
    compare_call(rows.mesh, x)  # on one rank alone, masks would differ from then on
    key = rows.mesh.next_key()
    keep = kernels.keyed_mask(key, rows.gid_on(x.device), cols, 1.0 - p)
    front.copy_(keep.view(front.shape))
    changed(x)
    return x


def _drawn_whole(func: Any, args: Any, kwargs: Any) -> Any:
    """Draws as one process does, the whole on every rank, and keeps own rows."""
    x = args[0]
    full = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    own = own_part(func(full, *args[1:], **kwargs), x.rows, x.dim_)
    return _drawn(x, own, func)


def _drawn(x: DistTensor, own: Tensor, func: Any) -> Any:
    if not func._schema.is_mutable:
        return DistTensor(own, x.rows, x.dim_)
    x.local.copy_(own)
    changed(x)
    return x


rule(
    aten.rand_like,
    aten.randn_like,
    aten.normal_,
    aten.uniform_,
    aten.exponential_,
    aten.random_,
)(_drawn_whole)


@rule(aten.bernoulli.default, aten.bernoulli_.Tensor)
def bernoulli(func: Any, args: Any, kwargs: Any) -> Any:
    """Draws as one process does, of the chances of own rows: others take a number each, too."""
    x, p = args[0], args[-1]
    if type(x) is not DistTensor:
        return whole.apply(func, args, kwargs)
    place = x.rows.place_on(x.device)
    own = meeting(p, x.rows, x.dim() - x.dim_).expand_as(x.local)
    check_shares(DistTensor(own, x.rows, x.dim_))
    every = own.new_full(x.shape, 0.5).index_copy_(x.dim_, place, own)
    drawn = torch.bernoulli(every, **kwargs).index_select(x.dim_, place)
    return _drawn(x, drawn, func)

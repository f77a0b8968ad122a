"""Computes ops that torch fuses: losses, normalisations, draws."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_distcomm import kernels
from pyg_distcomm.kernels.registry import HALVES
from pyg_distcomm.sharded import whole
from pyg_distcomm.sharded.agreement import compare_call
from pyg_distcomm.sharded.dist_tensor import DistTensor, local_at, own_part, rule
from pyg_distcomm.sharded.partial import PartialSum, over_ranks, summed_over_ranks
from pyg_distcomm.sharded.pointwise import bound, changed, meeting

aten = torch.ops.aten
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
    g, x, y, w, reduction, ignore, weight = args
    rows = x.rows if type(x) is DistTensor else y.rows
    own = [local_at(t, rows, 0) for t in (x, y)]
    g = meeting(g, rows, 1)
    if reduction == MEAN:
        g, reduction = g / weight, SUM
    return DistTensor(func(g, *own, w, reduction, ignore, weight), rows)


def _loss(func: Any, args: Any, kwargs: Any) -> Any:
    """Takes a loss of each element, and its sum or mean over all."""
    args = bound(func, args, kwargs)
    at = _reduction_at(func)
    like = next(a for a in args if type(a) is DistTensor)
    right, rows = like.dim() - like.dim_, like.rows
    own = [meeting(a, rows, right) if isinstance(a, Tensor) else a for a in args]
    reduction, own[at] = own[at], NONE
    out = func(*own)
    if reduction == NONE:
        return DistTensor(out, rows, out.dim() - right)
    total = over_ranks(out.sum(), rows.mesh)
    count = out.numel() // max(out.size(out.dim() - right), 1) * rows.count
    if reduction == MEAN and not out.size(out.dim() - right):
        count = max(like.numel(), 1)
    return total / count if reduction == MEAN else total


def _loss_backward(func: Any, args: Any, kwargs: Any) -> Any:
    """Takes the gradient of a loss of each element."""
    args = bound(func, args, kwargs)
    at = _reduction_at(func)
    like = next(a for a in args[1:] if type(a) is DistTensor)
    right, rows = like.dim() - like.dim_, like.rows
    own = [meeting(a, rows, right) if isinstance(a, Tensor) else a for a in args]
    if own[at] == MEAN:
        own[0], own[at] = own[0] / like.numel(), SUM
    out = func(*own)
    return DistTensor(out, rows, out.dim() - right)


def _reduction_at(func: Any) -> int:
    return [a.name for a in func._schema.arguments].index("reduction")


rule(
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
    aten.soft_margin_loss.default,
)(_loss)
rule(
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
    aten.binary_cross_entropy_backward.default,
    aten.soft_margin_loss_backward.default,
)(_loss_backward)


def _over_rows(x: Tensor, rows: Any) -> Tensor:
    """Sums own rows `[n_i, f, ...]` over all but dimension 1, and over the ranks."""
    return over_ranks(x.sum([0, *range(2, x.dim())]), rows.mesh)


@rule(
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
)
def batch_norm(func: Any, args: Any, kwargs: Any) -> Any:
    """Normalises by the mean and variance of all rows."""
    if func is aten._native_batch_norm_legit.no_stats:
        x, w, b, training, momentum, eps = args
        mean = var = None
    else:
        x, w, b, mean, var, training, momentum, eps = args
    if type(x) is not DistTensor or x.dim_ == 1:
        return whole.apply(func, args, kwargs)
    if not training:
        out, *rest = aten.native_batch_norm(
            x.local, w, b, mean, var, False, momentum, eps
        )
        return DistTensor(out, x.rows, x.dim_), *rest
    local, n = _wide(x.local), x.numel() // max(x.size(1), 1)
    shape = [1, -1, *[1] * (local.dim() - 2)]
    middle = _over_rows(local, x.rows) / n
    away = local - middle.view(shape)
    square = _over_rows(away * away, x.rows)
    scale = (square / n + eps).rsqrt()
    if mean is not None and var is not None:
        mean.mul_(1 - momentum).add_(middle, alpha=momentum)
        var.mul_(1 - momentum).add_(square / (n - 1), alpha=momentum)
    out = away * scale.view(shape)
    if w is not None:
        out = out * w.view(shape)
    if b is not None:
        out = out + b.view(shape)
    return DistTensor(out.to(x.dtype), x.rows, x.dim_), middle, scale


def _wide(x: Tensor) -> Tensor:
    """Returns numbers in which sums are taken: float32 for half of its width."""
    return x.float() if x.dtype in HALVES else x


@rule(aten.native_batch_norm_backward.default)
def batch_norm_backward(func: Any, args: Any, kwargs: Any) -> Any:
    """Takes the gradient of `batch_norm`."""
    g, x, w, mean, var, middle, scale, training, eps, mask = args
    if type(x) is not DistTensor or x.dim_ == 1:
        return whole.apply(func, args, kwargs)
    own_g, rows = _wide(local_at(g, x.rows, x.dim_)), x.rows
    shape = [1, -1, *[1] * (x.dim() - 2)]
    if not training:
        middle, scale = mean, (var + eps).rsqrt()
    hat = (_wide(x.local) - middle.view(shape)) * scale.view(shape)
    dims = [0, *range(2, x.dim())]
    n = x.numel() // max(x.size(1), 1)
    sums = torch.stack([own_g.sum(dims), (own_g * hat).sum(dims)])
    if not training:
        total = summed_over_ranks(sums, rows.mesh)
        gw, gb = _two(total)
        out = own_g
    else:
        total = over_ranks(sums, rows.mesh)
        gb, gw = total[0], total[1]
        out = own_g - (gb / n).view(shape) - hat * (gw / n).view(shape)
    out = out * scale.view(shape)
    if w is not None:
        out = out * w.view(shape)
    kind = x.dtype if w is None else w.dtype
    return (
        DistTensor(out.to(x.dtype), rows, x.dim_),
        gw.to(kind) if mask[1] else None,
        gb.to(kind) if mask[2] else None,
    )


def _two(total: Tensor) -> tuple[Tensor, Tensor]:
    if type(total) is PartialSum:
        return (
            PartialSum(total.part[1].clone(), total.mesh),
            PartialSum(total.part[0].clone(), total.mesh),
        )
    return total[1], total[0]


@rule(aten.native_layer_norm.default)
def layer_norm(func: Any, args: Any, kwargs: Any) -> Any:
    """Normalises each row."""
    x, shape, *rest = args
    if x.dim_ >= x.dim() - len(shape):
        return whole.apply(func, args, kwargs)
    return tuple(DistTensor(o, x.rows, x.dim_) for o in func(x.local, shape, *rest))


@rule(aten.native_layer_norm_backward.default)
def layer_norm_backward(func: Any, args: Any, kwargs: Any) -> Any:
    """Takes the gradient of `layer_norm`; those of weights are sums over rows."""
    g, x, shape, mean, scale, w, b, mask = args
    like = x if type(x) is DistTensor else g
    rows, d = like.rows, like.dim_
    own = [local_at(t, rows, d) for t in (g, x)]
    stats = [local_at(t, rows, d) for t in (mean, scale)]
    gx, gw, gb = func(*own[:2], shape, *stats, w, b, mask)
    mesh = rows.mesh
    return (
        DistTensor(gx, rows, d) if mask[0] else None,
        summed_over_ranks(gw, mesh) if mask[1] else None,
        summed_over_ranks(gb, mesh) if mask[2] else None,
    )


@rule(aten.native_group_norm.default)
def group_norm(func: Any, args: Any, kwargs: Any) -> Any:
    """Normalises groups of columns of each row."""
    x, w, b, _, *rest = args
    found = func(x.local, w, b, len(x.local), *rest)
    return tuple(DistTensor(o, x.rows) for o in found)


@rule(aten.native_group_norm_backward.default)
def group_norm_backward(func: Any, args: Any, kwargs: Any) -> Any:
    """Takes the gradient of `group_norm`."""
    g, x, mean, scale, w, _, *rest = args
    own = [local_at(t, x.rows, 0) for t in (g, x, mean, scale)]
    gx, gw, gb = func(*own, w, len(own[1]), *rest)
    mesh, mask = x.rows.mesh, rest[-1]
    return (
        DistTensor(gx, x.rows) if mask[0] else None,
        summed_over_ranks(gw, mesh) if mask[1] else None,
        summed_over_ranks(gb, mesh) if mask[2] else None,
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
    if func._schema.is_mutable:
        func(full, *args[1:], **kwargs)
        x.local.copy_(own_part(full, x.rows, x.dim_))
        changed(x)
        return x
    return DistTensor(
        own_part(func(full, *args[1:], **kwargs), x.rows, x.dim_), x.rows, x.dim_
    )


rule(
    aten.rand_like.default,
    aten.randn_like.default,
    aten.normal_.default,
    aten.uniform_.default,
    aten.exponential_.default,
    aten.random_.default,
    aten.random_.to,
    getattr(aten.random_, "from"),
)(_drawn_whole)


@rule(aten.bernoulli.default, aten.bernoulli_.Tensor)
def bernoulli(func: Any, args: Any, kwargs: Any) -> Any:
    """Draws by probabilities of each element, as one process does."""
    return whole.apply(func, args, kwargs)

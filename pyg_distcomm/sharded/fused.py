"""Computes ops that torch fuses: losses, normalisations, draws."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm import kernels
from pyg_distcomm.kernels.registry import HALVES
from pyg_distcomm.sharded import whole
from pyg_distcomm.sharded.agreement import compare_call
from pyg_distcomm.sharded.dist_tensor import (
    DistTensor,
    changed,
    local_at,
    own_part,
    rule,
)
from pyg_distcomm.sharded.partial import PartialSum, over_ranks, summed_over_ranks
from pyg_distcomm.sharded.pointwise import bound, meeting

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
    """Takes a loss of each element, and its sum or mean over all; or the gradient of this."""
    args = bound(func, args, kwargs)
    names = [a.name for a in func._schema.arguments]
    at, back = names.index("reduction"), names[0] == "grad_output"
    like = next(a for a in args if type(a) is DistTensor)
    right, rows = like.dim() - like.dim_, like.rows
    own = [meeting(a, rows, right) if isinstance(a, Tensor) else a for a in args]
    shapes = [a.shape for a in args if isinstance(a, Tensor)]
    count = math.prod(torch.broadcast_shapes(*shapes))
    reduction = own[at]
    if not back:
        own[at] = NONE
    elif reduction == MEAN:
        own[0], own[at] = own[0] / count, SUM
    out = func(*own)
    if back or reduction == NONE:
        return DistTensor(out, rows, out.dim() - right)
    total = over_ranks(out.sum(), rows.mesh)
    return total / count if reduction == MEAN else total


rule(
    aten.mse_loss,
    aten.mse_loss_backward,
    aten.smooth_l1_loss,
    aten.smooth_l1_loss_backward,
    aten.huber_loss,
    aten.huber_loss_backward,
    aten.binary_cross_entropy,
    aten.binary_cross_entropy_backward,
    aten.binary_cross_entropy_with_logits,
    aten.soft_margin_loss,
    aten.soft_margin_loss_backward,
)(_loss)


def _over_rows(x: Tensor, rows: Any) -> Tensor:
    """Sums own rows `[n_i, f, ...]` over all but dimension 1, and over the ranks."""
    return over_ranks(x.sum([0, *range(2, x.dim())]), rows.mesh)


@rule(
    aten.native_batch_norm,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional,
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
    square = _over_rows((local - middle.view(shape)).square(), x.rows)
    if mean is not None and var is not None:
        mean.mul_(1 - momentum).add_(middle, alpha=momentum)
        var.mul_(1 - momentum).add_(square / (n - 1), alpha=momentum)
    w, b = (t if t is None else t.to(local.dtype) for t in (w, b))
    var = square / n
    out = aten.native_batch_norm(local, w, b, middle, var, False, momentum, eps)[0]
    return DistTensor(out.to(x.dtype), x.rows, x.dim_), middle, (var + eps).rsqrt()


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
    out = own_g
    if training:
        gb, gw = over_ranks(sums, rows.mesh)
        out = own_g - (gb / n).view(shape) - hat * (gw / n).view(shape)
    else:
        total = summed_over_ranks(sums, rows.mesh)
        gb, gw = total[0], total[1]
    out = out * scale.view(shape)
    if w is not None:
        out = out * w.view(shape)
    kind = x.dtype if w is None else w.dtype
    return (
        DistTensor(out.to(x.dtype), rows, x.dim_),
        gw.to(kind) if mask[1] else None,
        gb.to(kind) if mask[2] else None,
    )


# operands of ops of rows and plain weights that have a row for each of the result's
_OF_ROWS = {
    aten.convolution: (0,),
    aten.convolution_backward: (1, 0),
    aten.native_group_norm: (0,),
    aten.native_group_norm_backward: (1, 0, 2, 3),
    aten.native_layer_norm: (0,),
    aten.native_layer_norm_backward: (1, 0, 3, 4),
}


@rule(*_OF_ROWS)
def with_weights(func: Any, args: Any, kwargs: Any) -> Any:
    """Convolves or normalises each row; the gradients of weights are sums over rows."""
    args = bound(func, args, kwargs)
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=True))
    at = _OF_ROWS[func.overloadpacket]
    like = next((args[i] for i in at if type(args[i]) is DistTensor), None)
    others = [a for i, a in enumerate(args) if i not in at]
    apart = any(isinstance(a, (DistTensor, PartialSum)) for a in others)
    if like is None or apart:
        return whole.apply(func, args, kwargs)
    rows, d = like.rows, like.dim_
    mixed = len(given.get("normalized_shape", like.shape[1:]))
    if d >= like.dim() - mixed:
        return whole.apply(func, args, kwargs)
    own = [local_at(a, rows, d) if i in at else a for i, a in enumerate(args)]
    if "N" in given:
        own[list(given).index("N")] = like.local.size(0)
    found = func(*own)
    if "output_mask" in given:
        wanted = given["output_mask"]
        return (
            DistTensor(found[0], rows, d) if wanted[0] else None,
            summed_over_ranks(found[1], rows.mesh) if wanted[1] else None,
            summed_over_ranks(found[2], rows.mesh) if wanted[2] else None,
        )
    if isinstance(found, Tensor):
        return DistTensor(found, rows, d)
    return tuple(DistTensor(f, rows, d) for f in found)


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
    aten.rand_like,
    aten.randn_like,
    aten.normal_,
    aten.uniform_,
    aten.exponential_,
    aten.random_,
)(_drawn_whole)

rule(aten.bernoulli.default, aten.bernoulli_.Tensor)(whole.apply)  # as one process does

"""Reductions over rows, made global: a local reduction and a sum over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_distcomm.comm import autograd, collectives
from pyg_distcomm.comm.rows import Rows

Dims = list[int]


class Extreme(NamedTuple):
    """Values and row ids, as torch.max and torch.min return them."""

    values: Tensor
    indices: Tensor


def total(
    x: Tensor, rows: Rows, dims: Dims, keepdim: bool = False, dtype: Any = None
) -> Tensor:
    """Returns the sum over rows (and other dims) of all ranks."""
    local = x.sum(dims, keepdim=keepdim, dtype=dtype)
    return autograd.all_reduce(local, rows.mesh.world)


def _count(x: Tensor, rows: Rows, dims: Dims) -> int:
    return rows.count * math.prod(x.size(d) for d in dims if d != 0)


def mean(
    x: Tensor, rows: Rows, dims: Dims, keepdim: bool = False, dtype: Any = None
) -> Tensor:
    """Returns the mean over rows (and other dims) of all ranks."""
    dtype = dtype or x.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        raise RuntimeError(f"mean() needs a floating point dtype, got {dtype}")
    return total(x, rows, dims, keepdim, dtype) / _count(x, rows, dims)


def var(
    x: Tensor,
    rows: Rows,
    dims: Dims,
    keepdim: bool = False,
    correction: float | None = 1,
    unbiased: bool | None = None,
) -> Tensor:
    """Returns the variance over rows (and other dims) of all ranks."""
    if unbiased is not None:
        correction = int(unbiased)
    centred = x - mean(x, rows, dims, keepdim=True)
    count = _count(x, rows, dims) - (1 if correction is None else correction)
    squares = total(centred.square(), rows, dims, keepdim)
    return squares / max(0.0, count) if count > 0 else squares / 0.0


def std(x: Tensor, rows: Rows, dims: Dims, **kwargs: Any) -> Tensor:
    """Returns the standard deviation over rows (and other dims) of all ranks."""
    return var(x, rows, dims, **kwargs).sqrt()


def norm(
    x: Tensor,
    rows: Rows,
    dims: Dims,
    keepdim: bool = False,
    p: Any = 2,
    dtype: Any = None,
) -> Tensor:
    """Returns the p-norm over rows (and other dims) of all ranks."""
    x = x.to(dtype) if dtype is not None else x
    p = 2.0 if p in (None, "fro") else float(p)
    if math.isinf(p):
        return extreme(x.abs(), rows, dims, keepdim, "max" if p > 0 else "min")
    if p == 0:
        return total((x != 0).to(x.dtype), rows, dims, keepdim)
    power = total(x.abs().pow(p), rows, dims, keepdim)
    positive = power > 0  # the root has no slope at zero; torch's norm says 0 there
    return torch.where(positive, power, 1).pow(1 / p) * positive


def _lowest(dtype: torch.dtype, op: str) -> Any:
    if dtype == torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return -math.inf if op == "max" else math.inf
    info = torch.iinfo(dtype)
    return info.min if op == "max" else info.max


def _bound(x: Tensor, rows: Rows, dims: Dims, op: str) -> Tensor:
    """The extreme value over all ranks, kept in every reduced dim, without gradient."""
    if rows.count == 0:
        raise IndexError(f"{op}() over rows needs at least one row on some rank")
    x = x.detach()
    if x.size(0) == 0:
        x = x.new_full((1, *x.shape[1:]), _lowest(x.dtype, op))
    local = (x.amax if op == "max" else x.amin)(dims, keepdim=True)
    if local.dtype in _WHOLE_NUMBERS:
        ordered = _ordered(local, op)
        return _unordered(
            collectives.all_reduce(ordered, rows.mesh.world, op), local.dtype
        )
    wide = local.to(torch.uint8) if local.dtype == torch.bool else local
    return collectives.all_reduce(wide, rows.mesh.world, op).to(local.dtype)


_WHOLE_NUMBERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def _ordered(x: Tensor, op: str) -> Tensor:
    """Returns whole numbers in the order of floats, NaN at the end that a reduction takes."""
    bits = x.contiguous().view(_WHOLE_NUMBERS[x.dtype])
    info = torch.iinfo(bits.dtype)
    keys = torch.where(bits < 0, bits ^ info.max, bits)
    return torch.where(x.isnan(), info.max if op == "max" else info.min, keys)


def _unordered(keys: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.iinfo(keys.dtype).max
    return torch.where(keys < 0, keys ^ largest, keys).view(dtype)


def extreme(x: Tensor, rows: Rows, dims: Dims, keepdim: bool, op: str) -> Tensor:
    """Returns the maximum or minimum; ties share the gradient, as in torch."""
    bound = _bound(x, rows, dims, op)
    if not x.requires_grad:
        return bound if keepdim else _squeezed(bound, dims)
    hit = x == bound
    ties = total(hit.to(x.dtype), rows, dims, keepdim)
    return total(torch.where(hit, x, 0), rows, dims, keepdim) / ties


def _squeezed(x: Tensor, dims: Dims) -> Tensor:
    return x.reshape([n for d, n in enumerate(x.shape) if d not in dims])


def extreme_at(x: Tensor, rows: Rows, keepdim: bool, op: str) -> Extreme:
    """Returns extreme values over rows, and the first place of a row that has each."""
    bound = _bound(x, rows, [0], op)
    place = rows.place.to(x.device).view(-1, *([1] * (x.dim() - 1)))
    hit = x == bound
    if x.is_floating_point():
        hit = hit | (x.isnan() & bound.isnan())
    at = torch.where(hit, place, rows.total)
    first = _bound(at, rows, [0], "min")
    value = total(torch.where(place == first, x, 0).to(x.dtype), rows, [0], True)
    values = value if x.requires_grad else bound
    if keepdim:
        return Extreme(values, first)
    return Extreme(_squeezed(values, [0]), _squeezed(first, [0]))


def extreme_of(name: str, local: Tensor, rows: Rows, dim: Any, keepdim: bool) -> Any:
    """Returns what max, min, argmax or argmin do over the rows of all ranks."""
    op = name.removeprefix("arg")
    if dim is None and (op == name or local.dim() == 1):
        if op == name:
            return extreme(local, rows, list(range(local.dim())), False, op)
        return extreme_at(local, rows, False, op).indices
    if dim is None:
        return _flat_argument(local, rows, op)
    found = extreme_at(local, rows, keepdim, op)
    return found if op == name else found.indices


def _flat_argument(local: Tensor, rows: Rows, op: str) -> Tensor:
    """Returns the place of the extreme value in the flattened whole tensor."""
    width = local.shape[1:].numel()
    best = extreme_at(local, rows, False, op)
    values = best.values.flatten()
    column = values.argmax() if op == "max" else values.argmin()
    return best.indices.flatten()[column] * width + column


def truth(x: Tensor, rows: Rows, dims: Dims, keepdim: bool, op: str) -> Tensor:
    """Returns whether any (op "max") or all (op "min") entries are true."""
    if rows.count == 0:
        return x.any() if op == "max" else x.all()
    return extreme(x != 0, rows, dims, keepdim, op)


def agree_all(local: bool, rows: Rows) -> bool:
    """Returns whether something holds on every rank."""
    flag = torch.tensor([int(local)])
    return bool(collectives.all_reduce(flag, rows.mesh.world, "min"))


def batch_norm(
    x: Tensor,
    rows: Rows,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
) -> Tensor:
    """Normalises each channel by its mean and variance over the rows of all ranks.

    Shapes: x [n_i, C] or [n_i, C, L]; statistics [C].
    Price: two all-reduces of C words forward, two backward.
    """
    dims = [d for d in range(x.dim()) if d != 1]
    count = _count(x, rows, dims)
    if count <= 1:
        raise ValueError(
            f"batch norm in training needs more than 1 value per channel, got {count}"
        )
    centre = mean(x, rows, dims, keepdim=True)
    centred = x - centre
    spread = total(centred.square(), rows, dims, keepdim=True) / count
    _track(running_mean, centre, momentum)
    _track(running_var, spread * (count / (count - 1)), momentum)
    shape = [1, -1] + [1] * (x.dim() - 2)
    out = centred * torch.rsqrt(spread + eps)
    out = out if weight is None else out * weight.view(shape)
    return out if bias is None else out + bias.view(shape)


def _track(running: Tensor | None, value: Tensor, momentum: float) -> None:
    if running is not None:
        with torch.no_grad():
            running.lerp_(value.detach().flatten().to(running.dtype), momentum)


def logsumexp(x: Tensor, rows: Rows, keepdim: bool = True) -> Tensor:
    """Returns the logarithm of the sum of exponentials over the rows of all ranks."""
    high = _bound(x, rows, [0], "max")
    high = torch.where(high.isfinite(), high, 0)
    out = total((x - high).exp(), rows, [0], True).log() + high
    return out if keepdim else out.squeeze(0)


def _softmax(x: Tensor, rows: Rows, kwargs: Any, args: Any) -> Tensor:
    return (_as(x, kwargs) - logsumexp(_as(x, kwargs), rows)).exp()


def _as(x: Tensor, kwargs: Any) -> Tensor:
    return x if kwargs.get("dtype") is None else x.to(kwargs["dtype"])


def _log_softmax(x: Tensor, rows: Rows, kwargs: Any, args: Any) -> Tensor:
    return _as(x, kwargs) - logsumexp(_as(x, kwargs), rows)


def _logsumexp(x: Tensor, rows: Rows, kwargs: Any, args: Any) -> Tensor:
    keepdim = kwargs.get("keepdim", len(args) > 2 and args[2])
    return logsumexp(x, rows, bool(keepdim))


def _normalize(x: Tensor, rows: Rows, kwargs: Any, args: Any) -> Tensor:
    p = args[1] if len(args) > 1 else kwargs.get("p", 2.0)
    eps = args[3] if len(args) > 3 else kwargs.get("eps", 1e-12)
    return x / norm(x, rows, [0], True, p).clamp_min(eps)


# over the rows, with a row for each row
SCALED: dict[str, Callable[..., Tensor]] = {
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "softmin": lambda x, rows, kwargs, args: _softmax(-x, rows, kwargs, args),
    "logsumexp": _logsumexp,
    "normalize": _normalize,
}


GLOBAL: dict[str, Callable[..., Any]] = {
    "sum": total,
    "mean": mean,
    "var": var,
    "std": std,
    "norm": norm,
    "vector_norm": norm,
    "linalg_norm": norm,
    "amax": lambda x, r, d, keepdim=False: extreme(x, r, d, keepdim, "max"),
    "amin": lambda x, r, d, keepdim=False: extreme(x, r, d, keepdim, "min"),
    "any": lambda x, r, d, keepdim=False: truth(x, r, d, keepdim, "max"),
    "all": lambda x, r, d, keepdim=False: truth(x, r, d, keepdim, "min"),
    "count_nonzero": lambda x, r, d: total((x != 0).long(), r, d),
}

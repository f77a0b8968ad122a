"""Implements global reductions, losses, normalisation, dropout, RNNs and optimizer steps.

A reduction is a local one and a sum over ranks. A loss is a mean over all ranks: the sum of
their sums, over the sum of their counts. Dropout draws by a key of (seed, call, row id,
column), so that masks do not depend on P. The rows of a recurrent network are its batch.
Functions of lists (`torch._foreach_*`) run element by element: the tensors at one index of the
lists belong together, as a parameter, its gradient and its state. Elementwise functions run on
local storage, row-sharded or not; norms are global.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_distcomm import kernels
from pyg_distcomm.comm import autograd, collectives
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.kernels.registry import HALVES
from pyg_distcomm.tensor import gather_by_id, sizes
from pyg_distcomm.tensor.op_tables import FACTS, base_name
from pyg_distcomm.tensor.row_sharded import (
    RowShardedTensor,
    call_local,
    compare_operation,
    eager,
    first_sharded,
    local_part,
    shard_plain_operand,
    tree_map,
    unsupported_op,
)

Dims = list[int]


class Extreme(NamedTuple):
    """Values and row ids, as torch.max and torch.min return them."""

    values: Tensor
    indices: Tensor


def total(
    x: Tensor, rows: Rows, dims: Dims, keepdim: bool = False, dtype: Any = None
) -> Tensor:
    """Returns the sum over rows (and other dims) of all ranks.

    Half-precision numbers are added in float32, and the sum is rounded once, as torch does.
    """
    kind = dtype
    if dtype is None and x.dtype in HALVES:
        kind, dtype = x[:0].sum().dtype, torch.float32  # autocast may say float32
    local = x.sum(dims, keepdim=keepdim, dtype=dtype)
    out = autograd.all_reduce(local, rows.mesh.world)
    return out if kind is None else out.to(kind)


def _count(x: Tensor, rows: Rows, dims: Dims) -> int:
    return rows.count * math.prod(x.size(d) for d in dims if d != 0)


def mean(
    x: Tensor, rows: Rows, dims: Dims, keepdim: bool = False, dtype: Any = None
) -> Tensor:
    """Returns the mean over rows (and other dims) of all ranks."""
    dtype = dtype or x.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        raise RuntimeError(f"mean() needs a floating point dtype, got {dtype}")
    wide = torch.float32 if dtype in HALVES else dtype
    out = total(x, rows, dims, keepdim, wide) / _count(x, rows, dims)
    return out.to(dtype)


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
    if x.dtype in HALVES:
        return var(x.float(), rows, dims, keepdim, correction).to(x.dtype)
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
    """Returns the p-norm over rows (and other dims) of all ranks, with torch's gradient.

    Where p < 1 the power of a zero has no slope, nor has the root of a sum of zeros: torch's
    gradient is 0 there.
    """
    x = x.to(dtype) if dtype is not None else x
    if not (x.is_floating_point() or x.is_complex()):
        raise RuntimeError(f"norm() needs a floating point dtype, got {x.dtype}")
    if x.dtype in HALVES:
        return norm(x.float(), rows, dims, keepdim, p).to(x[:0].norm().dtype)
    p = 2.0 if p in (None, "fro") else float(p)
    if math.isinf(p):
        return extreme(x.abs(), rows, dims, keepdim, "max" if p > 0 else "min")
    if p == 0:
        count = torch.linalg.vector_norm(x, 0, dims, keepdim)
        return autograd.all_reduce(count, rows.mesh.world)
    size = x.abs()
    if p < 1:
        zero = size == 0
        powers = torch.where(zero, 1, size).pow(p)
        powers = powers.masked_fill(zero, 0.0 if p > 0 else math.inf)
    else:
        powers = size.pow(p)
    power = total(powers, rows, dims, keepdim)
    if p < 0:
        return power.pow(1 / p)
    zero = power == 0
    return torch.where(zero, 1, power).pow(1 / p).masked_fill(zero, 0)


def _extreme_value(x: Tensor, rows: Rows, dims: Dims, op: str) -> Tensor:
    """Returns the extreme value over all ranks, with reduced dims kept, without gradient."""
    if rows.count == 0:
        raise IndexError(f"{op}() over rows needs at least one row on some rank")
    x = x.detach()
    if x.size(0) == 0:
        x = x.new_full(
            (1, *x.shape[1:]), gather_by_id.reduction_identity(x.dtype, f"a{op}")
        )
    local = (x.amax if op == "max" else x.amin)(dims, keepdim=True)
    if local.dtype in _WHOLE_NUMBERS:
        ordered = _to_ordered_integers(local, op)
        return _from_ordered_integers(
            collectives.all_reduce(ordered, rows.mesh.world, op), local.dtype
        )
    wide = local.to(torch.uint8) if local.dtype == torch.bool else local
    return collectives.all_reduce(wide, rows.mesh.world, op).to(local.dtype)


_WHOLE_NUMBERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def _to_ordered_integers(x: Tensor, op: str) -> Tensor:
    """Maps floats to integers in the same order, with NaN as the extreme of the reduction."""
    bits = x.contiguous().view(_WHOLE_NUMBERS[x.dtype])
    info = torch.iinfo(bits.dtype)
    keys = torch.where(bits < 0, bits ^ info.max, bits)
    return torch.where(x.isnan(), info.max if op == "max" else info.min, keys)


def _from_ordered_integers(keys: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.iinfo(keys.dtype).max
    return torch.where(keys < 0, keys ^ largest, keys).view(dtype)


def extreme(x: Tensor, rows: Rows, dims: Dims, keepdim: bool, op: str) -> Tensor:
    """Returns the maximum or minimum; ties share the gradient, as in torch."""
    bound = _extreme_value(x, rows, dims, op)
    if not x.requires_grad:
        return bound if keepdim else _squeezed(bound, dims)
    hit = x == bound
    ties = total(hit.to(x.dtype), rows, dims, keepdim)
    return total(torch.where(hit, x, 0), rows, dims, keepdim) / ties


def _squeezed(x: Tensor, dims: Dims) -> Tensor:
    return x.reshape([n for d, n in enumerate(x.shape) if d not in dims])


def extreme_at(x: Tensor, rows: Rows, keepdim: bool, op: str) -> Extreme:
    """Returns extreme values over rows, and the first position of each."""
    bound = _extreme_value(x, rows, [0], op)
    place = rows.place_on(x.device).view(-1, *([1] * (x.dim() - 1)))
    hit = x == bound
    if x.is_floating_point():
        hit = hit | (x.isnan() & bound.isnan())
    at = torch.where(hit, place, rows.total)
    first = _extreme_value(at, rows, [0], "min")
    value = total(torch.where(place == first, x, 0).to(x.dtype), rows, [0], True)
    values = value if x.requires_grad else bound
    if keepdim:
        return Extreme(values, first)
    return Extreme(_squeezed(values, [0]), _squeezed(first, [0]))


def extreme_of(name: str, local: Tensor, rows: Rows, dim: Any, keepdim: bool) -> Any:
    """Implements max, min, argmax and argmin over the rows of all ranks."""
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
    """Returns the position of the extreme value in the flattened whole tensor."""
    width = local.shape[1:].numel()
    best = extreme_at(local, rows, False, op)
    values = best.values.flatten()
    column = values.argmax() if op == "max" else values.argmin()
    return best.indices.flatten()[column] * width + column


def any_or_all(x: Tensor, rows: Rows, dims: Dims, keepdim: bool, op: str) -> Tensor:
    """Returns whether any (op "max") or all (op "min") entries are true."""
    if rows.count == 0:
        return x.any() if op == "max" else x.all()
    return extreme(x != 0, rows, dims, keepdim, op)


def compare_all(func: Callable, args: Any, kwargs: Any) -> bool:
    """Returns whether tensors are equal (or close) on all ranks, with any sharding."""
    x, name = first_sharded(args, kwargs), base_name(func)
    compare_operation(name, x, (args, kwargs))

    def fit(value: Any) -> Any:
        if isinstance(value, RowShardedTensor) or not isinstance(value, Tensor):
            return value
        return shard_plain_operand(value, x, x.dim(), name)

    if any(isinstance(v, Tensor) and v.dim() != x.dim() for v in args):
        return False
    args = [fit(v) for v in args]
    for k, v in enumerate(args):
        if isinstance(v, RowShardedTensor) and v is not x:
            local = gather_by_id.shard_as(v, x.rows)
            if local is None:
                return False
            args[k] = x.wrap(local, x.rows)
    shapes = {sizes.local_shape(v) for v in args if isinstance(v, RowShardedTensor)}
    same = len(shapes) <= 1 and call_local(func, args, kwargs)
    flag = torch.tensor([int(same)])
    return bool(collectives.all_reduce(flag, x.rows.mesh.world, "min"))


def apply_batch_norm(func: Callable, args: Any, kwargs: Any) -> Any:
    given = inspect.signature(func).bind(*args, **kwargs)
    given.apply_defaults()
    x, running_mean, running_var, weight, bias, training, *how = given.args
    kept = running_mean, running_var, weight, bias
    if not training:
        return x.wrap(func(x.to_local(), *kept, False, *how), x.rows)
    compare_operation("batch_norm", x, (*kept, *how))
    return x.wrap(batch_norm(x.to_local(), x.rows, *kept, *how), x.rows)


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
    if x.dtype in HALVES:  # by float32, as torch's own
        given = running_mean, running_var, weight, bias, momentum, eps
        return batch_norm(x.float(), rows, *given).to(x.dtype)
    dims = [d for d in range(x.dim()) if d != 1]
    count = _count(x, rows, dims)
    if count == 0:  # torch keeps its statistics
        kept = running_mean, running_var, weight, bias
        return torch.nn.functional.batch_norm(x, *kept, True, momentum, eps)
    if count == 1:
        size = torch.Size((rows.count, *x.shape[1:]))
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {size}"
        )
    centre = mean(x, rows, dims, keepdim=True)
    centred = x - centre
    spread = total(centred.square(), rows, dims, keepdim=True) / count
    _update_running(running_mean, centre, momentum)
    _update_running(running_var, spread * (count / (count - 1)), momentum)
    shape = [1, -1] + [1] * (x.dim() - 2)
    out = centred * torch.rsqrt(spread + eps)
    out = out if weight is None else out * weight.view(shape)
    return out if bias is None else out + bias.view(shape)


def _update_running(running: Tensor | None, value: Tensor, momentum: float) -> None:
    if running is not None:
        with torch.no_grad():
            running.lerp_(value.detach().flatten().to(running.dtype), momentum)


def logsumexp(x: Tensor, rows: Rows, keepdim: bool = True) -> Tensor:
    """Returns the logarithm of the sum of exponentials over the rows of all ranks."""
    high = _extreme_value(x, rows, [0], "max")
    high = torch.where(high.isfinite(), high, 0)
    out = total((x - high).exp(), rows, [0], True).log() + high
    return out if keepdim else out.squeeze(0)


def _softmax(x: Tensor, rows: Rows, kwargs: Any, args: Any) -> Tensor:
    return _log_softmax(x, rows, kwargs, args).exp()


def _log_softmax(x: Tensor, rows: Rows, kwargs: Any, args: Any) -> Tensor:
    x = x if kwargs.get("dtype") is None else x.to(kwargs["dtype"])
    return x - logsumexp(x, rows)


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
    "any": lambda x, r, d, keepdim=False: any_or_all(x, r, d, keepdim, "max"),
    "all": lambda x, r, d, keepdim=False: any_or_all(x, r, d, keepdim, "min"),
    "count_nonzero": lambda x, r, d: total((x != 0).long(), r, d),
}


LOSSES = frozenset(
    """cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss
    binary_cross_entropy binary_cross_entropy_with_logits kl_div soft_margin_loss
    multilabel_soft_margin_loss poisson_nll_loss gaussian_nll_loss
    hinge_embedding_loss multi_margin_loss multilabel_margin_loss
    margin_ranking_loss cosine_embedding_loss triplet_margin_loss""".split()
)


ELEMENTWISE = frozenset(
    """mse_loss l1_loss smooth_l1_loss huber_loss poisson_nll_loss kl_div
    soft_margin_loss hinge_embedding_loss""".split()
)


# losses whose first three operands have a row for each row
OF_THREE = frozenset(
    """gaussian_nll_loss margin_ranking_loss cosine_embedding_loss
    triplet_margin_loss""".split()
)


def dropped_weight(func: Callable) -> Tensor | None:
    """Returns the `weight` that a function of torch was given, but does not pass on."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not func.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("weight")


def global_loss(
    func: Callable[..., Tensor], args: Any, kwargs: Any, rows: Rows
) -> tuple[Tensor, bool]:
    """Returns a loss over the rows of all ranks, and whether it is per row.

        mean = sum over ranks of the local sums / sum over ranks of the local counts

    A rank without rows adds nothing to either sum. Price: one all-reduce of two words.
    """
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    for name in ("size_average", "reduce"):
        if given.get(name) is not None:
            raise TypeError(
                f"{func.__name__}({name}=...) is deprecated and unsupported; "
                "use reduction='mean', 'sum' or 'none'"
            )
        given.pop(name, None)
    reduction = given.pop("reduction", "mean")
    if reduction == "none":
        return func(**given, reduction="none"), True
    summed = func(**given, reduction="sum")
    if reduction == "sum":
        return autograd.all_reduce(summed, rows.mesh.world), False
    count = _losses_count(func.__name__, given, reduction, rows)
    wide = torch.float64 if summed.device.type != "mps" else summed.dtype
    pair = torch.stack([summed.to(wide), count.to(summed.device, wide)])
    pair = autograd.all_reduce(pair, rows.mesh.world)
    return (pair[0] / pair[1]).to(summed.dtype), False


def _losses_count(
    name: str, given: dict[str, Any], reduction: str, rows: Rows
) -> Tensor:
    """Returns this rank's part of the denominator of the mean."""
    if name in ("cross_entropy", "nll_loss"):
        return _class_count(given)
    weight = given.get("weight")
    if name in ("mse_loss", "l1_loss") and weight is not None:
        return weight.sum()  # as torch does
    if reduction == "batchmean" or name in _PER_ROW:
        return torch.tensor(len(rows))
    shapes = [v.shape for v in given.values() if isinstance(v, Tensor)][:2]
    return torch.tensor(torch.broadcast_shapes(*shapes).numel())


_PER_ROW = frozenset(
    """multilabel_soft_margin_loss multi_margin_loss multilabel_margin_loss
    cosine_embedding_loss triplet_margin_loss""".split()
)


def _class_count(given: dict[str, Any]) -> Tensor:
    score, target, weight = given["input"], given["target"], given.get("weight")
    if target.is_floating_point():  # class probabilities: every row counts once
        return torch.tensor(target.numel() // max(1, score.size(1)))
    valid = target != given["ignore_index"]
    if weight is None:
        return valid.sum()
    return weight.detach()[target[valid]].sum()


class _KeyedDropout(torch.autograd.Function):
    """y = x * keep / (1 - p), where keep is a function of (key, row id, column)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, gid: Tensor, key: int) -> Tensor:
        ctx.draw = p, gid, key
        return kernels.keyed_dropout(x, key, gid, p)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        p, gid, key = ctx.draw  # the mask is drawn again: nothing is stored
        return _KeyedDropout.apply(g.contiguous(), p, gid, key), None, None, None


def keyed_dropout(x: Tensor, p: float, gid: Tensor, key: int) -> Tensor:
    """Drops entries of plain `x` `[n, ...]` by a keyed hash of `gid` `[n]` and column."""
    out: Tensor = _KeyedDropout.apply(x, p, gid, key)
    return out


def dropout(func: Callable, args: Any, kwargs: Any) -> Any:
    """Drops entries of a row-sharded operand as `torch.nn.functional.dropout` does."""
    x = first_sharded(args, kwargs)
    local, gid = x.to_local(), x.rows.gid_on(x.device)
    p, training, inplace = _arguments(args, kwargs)
    compare_operation("dropout", x, (p, training))
    if not training or p == 0:
        return x
    out = keyed_dropout(local, p, gid, x.rows.mesh.next_key())
    return x.copy_(out) if inplace else x.wrap(out, x.rows)


def _arguments(args: Any, kwargs: Any) -> tuple[float, bool, bool]:
    given = dict(zip(("input", "p", "training", "inplace"), args, strict=False))
    given.update({("training" if k == "train" else k): v for k, v in kwargs.items()})
    p = float(given.get("p", 0.5))
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    return p, bool(given.get("training", True)), bool(given.get("inplace", False))


RECURRENT = frozenset(("lstm", "gru", "rnn_tanh", "rnn_relu"))


def recurrent(func: Callable, args: Any, kwargs: Any) -> Any:
    """Runs `torch.nn.LSTM`, GRU or RNN on `[n_i, steps, C]`, a sequence per row.

    Raises:
        TypeError: without `batch_first`, or with dropout between layers, whose masks
            would depend on the number of ranks.
    """
    x, name = args[0], base_name(func)
    if len(args) != 9 or kwargs or not isinstance(x, RowShardedTensor):
        raise unsupported_op(f"{name}() of packed sequences or row-sharded weights")
    dropout, training, _, batch_first = args[5:]
    if not batch_first or x.dim() != 3:
        raise unsupported_op(
            f"{name}() with rows that are not its batch (use batch_first)"
        )
    if dropout and training:
        raise unsupported_op(f"{name}() with dropout between its layers")
    args = (x, tree_map(lambda v: _local_state(v, x), args[1]), *args[2:])
    local = tree_map(local_part, args)
    with torch._C.DisableTorchFunctionSubclass():
        out, *states = func(*local)
    return x.wrap(out, x.rows), *(_state(s, x) for s in states)


def _local_state(state: Tensor, x: RowShardedTensor) -> Tensor:
    """Returns own rows of an initial state `[layers, n, C]` of all rows."""
    if x.reads_local or state.dim() != 3 or state.size(1) != x.rows.count:
        return state
    return state.index_select(1, x.rows.place_on(state.device))


@eager
class LayerStates(torch.Tensor):
    """Hidden states `[layers, n_i, C]`; only `states[k]` is supported, which is row-sharded."""

    _like: RowShardedTensor
    _spread = True

    def __getitem__(self, key: Any) -> Any:
        """Returns the row-sharded states of one layer."""
        if type(key) is not int:
            raise unsupported_op("states[...] other than of one layer")
        with torch._C.DisableTorchFunctionSubclass():
            local = self.as_subclass(torch.Tensor)[key]
        return self._like.wrap(local, self._like.rows)

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs functions that only read attributes, and raises for others."""
        if base_name(func) not in FACTS:
            raise unsupported_op(f"{base_name(func)}() of the states of all layers")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _state(value: Tensor, like: RowShardedTensor) -> LayerStates:
    out = value.as_subclass(LayerStates)
    out._like = like.wrap(like.to_local().detach(), like.rows)
    return out


_REDUCING = frozenset("_foreach_norm _foreach_max _foreach_powsum".split())


def apply(func: Callable, args: Any, kwargs: Any) -> Any:
    """Runs a foreach function on lists with row-sharded tensors."""
    name = func.__name__
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, (list, tuple))]
    if name in _REDUCING:
        if name != "_foreach_norm":
            raise unsupported_op(f"{name}()")
        order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
        return tuple(_norm(t, order, kwargs.get("dtype")) for t in args[0])
    out = call_local(func, args, kwargs)
    if name.endswith("_") or not isinstance(out, (list, tuple)):
        return out
    return type(out)(_like(t, [x[k] for x in lists]) for k, t in enumerate(out))


def _norm(t: Tensor, order: float, dtype: Any) -> Tensor:
    if not isinstance(t, RowShardedTensor):
        return torch.linalg.vector_norm(t, order, dtype=dtype)
    local = t.to_local()
    return norm(local, t.rows, [*range(local.dim())], p=order, dtype=dtype)


def _like(out: Any, group: list[Any]) -> Any:
    rows = next((t for t in group if isinstance(t, RowShardedTensor)), None)
    return out if rows is None or not out.dim() else rows.wrap(out, rows.rows)

"""Runs functions of `torch.nn.functional` and of optimizers on row-sharded tensors.

A loss is a mean over all ranks: the sum of their sums, over the sum of their counts. Dropout
draws by a key of (seed, call, row id, column), so that masks do not depend on P. The rows of a
recurrent network are its batch. Functions of lists (`torch._foreach_*`) run element by element:
the tensors of one place in the lists belong together: a parameter, its gradient and its
state. What is elementwise runs on local storage, row-sharded or not; norms are global.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm import kernels
from pyg_distcomm.comm import autograd
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.tensor import reductions
from pyg_distcomm.tensor.gradients import agree, call_local
from pyg_distcomm.tensor.op_tables import FACTS, base_name
from pyg_distcomm.tensor.row_sharded import (
    RowShardedTensor,
    eager,
    first_sharded,
    tree_map,
    unsupported_op,
)

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


def global_loss(
    func: Callable[..., Tensor], args: Any, kwargs: Any, rows: Rows
) -> tuple[Tensor, bool]:
    """Returns a loss over the rows of all ranks, and whether it still has rows.

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
    count = _count(func.__name__, given, reduction, rows)
    wide = torch.float64 if summed.device.type != "mps" else summed.dtype
    pair = torch.stack([summed.to(wide), count.to(summed.device, wide)])
    pair = autograd.all_reduce(pair, rows.mesh.world)
    return (pair[0] / pair[1].detach()).to(summed.dtype), False


def _count(name: str, given: dict[str, Any], reduction: str, rows: Rows) -> Tensor:
    """The denominator of the mean on this rank."""
    if name in ("cross_entropy", "nll_loss"):
        return _class_count(given)
    weight = given.get("weight")
    if name in ("mse_loss", "l1_loss") and weight is not None:
        return weight.sum()  # as torch does
    by_row = reduction == "batchmean" or name in _PER_ROW
    first = next(v for v in given.values() if isinstance(v, Tensor))
    return torch.tensor(len(rows) if by_row else _numel(name, given, first))


_PER_ROW = frozenset(
    """multilabel_soft_margin_loss multi_margin_loss multilabel_margin_loss
    cosine_embedding_loss triplet_margin_loss""".split()
)


def _numel(name: str, given: dict[str, Any], first: Tensor) -> int:
    tensors = [v for v in given.values() if isinstance(v, Tensor)][:2]
    return torch.broadcast_shapes(*(t.shape for t in tensors)).numel()


def _class_count(given: dict[str, Any]) -> Tensor:
    score, target, weight = given["input"], given["target"], given.get("weight")
    if target.is_floating_point():  # class probabilities: every row counts once
        return torch.tensor(target.numel() // max(1, score.size(1)))
    valid = target != given["ignore_index"]
    if weight is None:
        return valid.sum()
    return weight[target[valid]].sum()


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
    local, gid = x.to_local(), x.rows.gid.to(x.device)
    p, training, inplace = _arguments(args, kwargs)
    agree("dropout", x, (p, training))
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
    """Runs `torch.nn.LSTM` and its like on `[n_i, steps, C]`, a sequence per row.

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
    args = (x, tree_map(lambda v: _here(v, x), args[1]), *args[2:])
    local = tree_map(
        lambda v: v.to_local() if isinstance(v, RowShardedTensor) else v, args
    )
    with torch._C.DisableTorchFunctionSubclass():
        out, *states = func(*local)
    return x.wrap(out, x.rows), *(_state(s, x) for s in states)


def _here(state: Tensor, x: RowShardedTensor) -> Tensor:
    """Returns the rows here of an initial state `[layers, n, C]` of all rows."""
    if x.reads_local or state.dim() != 3 or state.size(1) != x.rows.count:
        return state
    return state.index_select(1, x.rows.place.to(state.device))


@eager
class LayerStates(torch.Tensor):
    """Hidden states `[layers, n_i, C]`: `states[k]` is row-sharded, nothing else is known."""

    _like: RowShardedTensor
    _spread = True

    def __getitem__(self, key: Any) -> Any:
        """Returns one layer's states, a row for each row."""
        if type(key) is not int:
            raise unsupported_op("states[...] other than of one layer")
        with torch._C.DisableTorchFunctionSubclass():
            local = self.as_subclass(torch.Tensor)[key]
        return self._like.wrap(local, self._like.rows)

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Lets facts through and refuses the rest."""
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
    """Runs a function on lists of which some tensors are row-sharded."""
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
    return reductions.norm(local, t.rows, [*range(local.dim())], p=order, dtype=dtype)


def _like(out: Any, group: list[Any]) -> Any:
    rows = next((t for t in group if isinstance(t, RowShardedTensor)), None)
    return out if rows is None or not out.dim() else rows.wrap(out, rows.rows)

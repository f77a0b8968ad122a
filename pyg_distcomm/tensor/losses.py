"""Losses as global means: the sum over all ranks, over the count over all ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.comm import autograd
from pyg_distcomm.comm.rows import Rows

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

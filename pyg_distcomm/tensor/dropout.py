"""Drops entries by a key of (seed, call, row id, column), so that masks do not depend on P."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm import kernels
from pyg_distcomm.tensor.gradients import agree
from pyg_distcomm.tensor.row_sharded import first_sharded


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

"""Dropout keyed by (seed, call, row id, column), so that masks do not depend on P."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_distcomm import kernels


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

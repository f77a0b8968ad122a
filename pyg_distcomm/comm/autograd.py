"""Sends rows between ranks by an autograd function, beside its transpose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.collectives import Axis


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        send: Sequence[int],
        recv: Sequence[int],
        axis: Axis,
        op: str,
    ) -> Tensor:
        ctx.plan, ctx.transposed = (send, recv, axis, op), op.endswith("_transpose")
        return collectives.all_to_all(x, send, recv, axis, op).wait()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None, None]:
        send, recv, axis, op = ctx.plan
        back = op.removesuffix("_transpose") if ctx.transposed else f"{op}_transpose"
        return all_to_all(g, recv, send, axis, back), None, None, None, None


def all_to_all(
    x: Tensor, send: Sequence[int], recv: Sequence[int], axis: Axis, op: str
) -> Tensor:
    """Sends row blocks to the ranks of an axis; the gradient goes back the same way."""
    return x if axis.size == 1 else _AllToAll.apply(x, send, recv, axis, op)

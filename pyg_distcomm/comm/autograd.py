"""Wraps collectives as autograd functions, each beside its transpose.

[Note: gradients] A global sum is an all-reduce forward and an all-reduce backward.
Every rank then holds the whole loss, and the gradient of a rank's own rows is P times the
true one. Averaging over ranks (DDP) makes parameter gradients exact, and row-sharded
leaves divide by P. Unlike a summing hook, this is exact for every mix of local terms,
global terms and terms that every rank repeats (a weight penalty).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.collectives import Axis


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return collectives.all_reduce(x, axis)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return all_reduce(g, ctx.axis), None


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


# autograd nodes whose gradient is summed over ranks already; see `gradient_averaging.py`
SUMMED: tuple[type, ...] = tuple(
    kind._backward_cls  # type: ignore[attr-defined]
    for kind in (_AllReduce, _AllToAll)
)


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Sums `x` over an axis; the gradient is summed over it too."""
    if axis.observer is not None:
        axis.observer(x, True)
    return x if axis.size == 1 else _AllReduce.apply(x, axis)


def all_to_all(
    x: Tensor, send: Sequence[int], recv: Sequence[int], axis: Axis, op: str
) -> Tensor:
    """Sends row blocks to the ranks of an axis; the gradient goes back the same way."""
    return x if axis.size == 1 else _AllToAll.apply(x, send, recv, axis, op)


def all_gather(x: Tensor, gid: Tensor, axis: Axis) -> Tensor:
    """Returns the rows of all ranks in the order of their ids; the gradient is summed.

    Shapes (this rank): x [n_i, ...], gid [n_i], return [n, ...].
    """
    sizes = [row[0] for row in collectives.all_gather_counts([len(gid)], axis)]
    gathered = x
    if axis.size > 1:
        copies = x.repeat(axis.size, *([1] * (x.dim() - 1)))
        gathered = all_to_all(copies, [len(x)] * axis.size, sizes, axis, "all_gather")
    order = torch.argsort(collectives.all_gather_rows(gid, sizes, axis))
    return gathered.index_select(0, order.to(x.device))

"""Collectives as autograd functions, each beside its transpose.

[Note: gradients] A global sum is an all-reduce forward and an all-reduce backward.
Every rank then holds the whole loss, and what reaches a rank's own rows is P times the
true gradient. Averaging over ranks (DDP) makes parameter gradients exact, and row-cut
leaves divide by P. Unlike a summing hook, this is exact for every mix of local terms,
global terms and terms that every rank repeats (a weight penalty).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyg_distcomm import wire
from pyg_distcomm.exchange.link import Link
from pyg_distcomm.wire import Axis


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return wire.all_reduce(x, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return wire.all_reduce(g, ctx.axis), None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, link: Link) -> Tensor:
        ctx.link, ctx.shape = link, x.shape
        return link.begin(x)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        arrive = ctx.link.begin_transpose(g.contiguous())
        return arrive(g.new_zeros(ctx.shape)), None


class _ExchangeTranspose(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, out: Tensor, link: Link) -> Tensor:
        ctx.link = link
        arrive = link.begin_transpose(g.contiguous())
        return arrive(out.clone())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, None]:
        return ctx.link.begin(x.contiguous())(), x, None


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
        ctx.plan = send, recv, axis, op
        return wire.all_to_all(x, send, recv, axis, op).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None, None]:
        send, recv, axis, op = ctx.plan
        pending = wire.all_to_all(g, recv, send, axis, f"{op}_transpose")
        return pending.wait(), None, None, None, None


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Sums `x` over an axis; the gradient is summed over it too."""
    return x if axis.size == 1 else _AllReduce.apply(x, axis)


def exchange(x: Tensor, link: Link) -> Tensor:
    """Returns the ghosts of own rows `x`; the gradient sends sums back to them."""
    return _Exchange.apply(x, link)


def exchange_transpose(g: Tensor, out: Tensor, link: Link) -> Tensor:
    """Returns `out` plus the sums that the other ranks hold for own rows."""
    return _ExchangeTranspose.apply(g, out, link)


def all_to_all(
    x: Tensor, send: Sequence[int], recv: Sequence[int], axis: Axis, op: str
) -> Tensor:
    """Sends row blocks to the ranks of an axis; the gradient travels the way back."""
    return x if axis.size == 1 else _AllToAll.apply(x, send, recv, axis, op)

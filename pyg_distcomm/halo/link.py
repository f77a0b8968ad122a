"""Defines Link, a row exchange and its transpose, and applies it under autograd."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.comm.ledger import Price

# names of the exchanges of a layer's call: those of a product; others follow from len(NAMES)
NAMES = ("ghost", "out", "sums", "far")
DEGREES = 1 << 20  # from here on exchanges of degrees, which layers may cache


class Link(abc.ABC):
    """Moves owned rows to the ranks that need them, and sums back (abstract).

    With `H` the 0/1 matrix that selects, for every rank, the rows it needs of all rows:

        begin(x)            ghost = H x
        begin_transpose(g)  x += H^T g

    Every `begin` is followed by exactly one call of the function it returned. A link is
    silent if nothing travels on any rank of its axis.
    """

    silent: bool

    @property
    @abc.abstractmethod
    def num_ghosts(self) -> int:
        """The number of rows that arrive here, h."""

    @property
    def is_exact(self) -> bool:
        """Whether rows arrive as they were sent, and in the same call."""
        return True

    @property
    def parts(self) -> Sequence[Link]:
        """The links that make up this one, their ghosts one after another."""
        return (self,)

    @abc.abstractmethod
    def begin(self, x: Tensor, into: Tensor | None = None) -> Callable[[], Tensor]:
        """Starts to send own rows `[n, f]`; the call returns ghosts `[h, f]`.

        Ghosts are written `into` a tensor of that shape, if one is given.
        """

    @abc.abstractmethod
    def begin_transpose(self, g: Tensor) -> Callable[[Tensor], Tensor]:
        """Starts to send ghost sums `[h, f]`; the call adds into own rows `[n, f]`."""

    @abc.abstractmethod
    def price(self, width: int) -> Price:
        """Returns the price of one `begin` at `width` features."""

    @abc.abstractmethod
    def price_transpose(self, width: int) -> Price:
        """Returns the price of one `begin_transpose` at `width` features."""

    @abc.abstractmethod
    def to(self, device: torch.device) -> Link:
        """Returns the same link with its indices on another device."""


def exchange(x: Tensor, link: Link) -> Tensor:
    """Returns the ghosts of own rows `x`; the gradient sends sums back to them."""
    return _Exchange.apply(x, link)


def exchange_transpose(g: Tensor, out: Tensor, link: Link) -> Tensor:
    """Returns `out` plus the other ranks' sums for own rows."""
    return _ExchangeTranspose.apply(g, out, link)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, link: Link) -> Tensor:
        ctx.link, ctx.shape = link, x.shape
        return link.begin(x)()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        _check_twice(ctx.link)
        return exchange_transpose(g, g.new_zeros(ctx.shape), ctx.link), None


class _ExchangeTranspose(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, out: Tensor, link: Link) -> Tensor:
        ctx.link = link
        arrive = link.begin_transpose(g.contiguous())
        return arrive(out.clone())

    @staticmethod
    def backward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, None]:
        _check_twice(ctx.link)
        return exchange(x.contiguous(), ctx.link), x, None


def _check_twice(link: Link) -> None:
    """Raises for a double backward pass over a coded or late exchange."""
    if torch.is_grad_enabled() and not link.is_exact:
        raise RuntimeError(
            "differentiate twice over exact exchanges only: create_graph=True met "
            f"{link}, which is coded or late; use link='exact' for this layer"
        )

"""Link: the abstract pair of a row exchange and its transpose."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pyg_distcomm.comm.price import Price


class Link(abc.ABC):
    """Moves rows owned here to where they are needed, and sums back.

    With `H` the 0/1 matrix that picks, for every rank, the rows it needs of all rows:

        begin(x)            ghost = H x
        begin_transpose(g)  x += H^T g

    Every `begin` is followed by exactly one call of what it returned. A link is silent if
    nothing travels on any rank of its axis.
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
        """Links that make up this one, each for the ghosts after those of the last."""
        return (self,)

    @abc.abstractmethod
    def begin(self, x: Tensor, into: Tensor | None = None) -> Callable[[], Tensor]:
        """Starts to send own rows `[n, f]`; the call returns ghosts `[h, f]`.

        They are written `into` a tensor of that shape, if one is given.
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

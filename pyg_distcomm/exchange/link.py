"""Link: the abstract pair of a row exchange and its transpose."""

from __future__ import annotations

import abc
from collections.abc import Callable

import torch
from torch import Tensor

from pyg_distcomm.price import Price


class Link(abc.ABC):
    """Moves rows owned here to where they are needed, and sums back.

    With `H` the 0/1 matrix that picks, for every rank, the rows it needs of all rows:

        begin(x)            ghost = H x
        begin_transpose(g)  x += H^T g

    Every `begin` is followed by exactly one call of what it returned.
    """

    @abc.abstractmethod
    def begin(self, x: Tensor) -> Callable[[], Tensor]:
        """Starts to send own rows `[n, f]`; the call returns ghosts `[h, f]`."""

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

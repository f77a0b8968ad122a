"""Holds the blocks that a rank multiplies, and the exchanges of a product."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from pyg_distcomm.comm.price import Price
from pyg_distcomm.halo.link import Link
from pyg_distcomm.ops.csr import CSR

_IN_A_TRACE = {
    "own_own": "own columns",
    "own_ghost": "halo columns",
    "out_own": "own columns, rows to send",
    "out_ghost": "halo columns, rows to send",
    "sum_own": "own columns, sums for others",
    "own_far": "forwarded columns",
}


class LinkWrapper(Protocol):
    """Puts links in place of the exact ones, as a call of a layer has them."""

    def wrap(self, link: Link, name: int) -> Link:
        """Returns what stands for one of the links of a product."""
        ...


@dataclass(frozen=True, eq=False)
class LocalBlocks:
    """The nonzeros that this rank multiplies, in blocks by who owns row and column.

    Own rows and columns belong to ranks (i, j, *). A_ij has out rows of other process
    columns, and ghost columns of other process rows. Beside it are nonzeros that other
    ranks handed over (see [Note: rows or sums] in `cover.py`): sum rows are wanted by
    other process rows, far columns are forwarded by other process columns.
    """

    own_own: CSR
    own_ghost: CSR
    out_own: CSR
    out_ghost: CSR
    sum_own: CSR
    own_far: CSR

    def __post_init__(self) -> None:
        for field, name in _IN_A_TRACE.items():
            object.__setattr__(self, field, getattr(self, field).named(name))

    @cached_property
    def transposed(self) -> LocalBlocks:
        """The blocks of the transpose: out rows become ghost columns, and sums far."""
        return LocalBlocks(
            self.own_own.transposed,
            self.out_own.transposed,
            self.own_ghost.transposed,
            self.out_ghost.transposed,
            self.own_far.transposed,
            self.sum_own.transposed,
        )

    @property
    def blocks(self) -> tuple[CSR, ...]:
        """The blocks, in the order of their edges in `EdgeRoute` values."""
        return (
            *(self.own_own, self.own_ghost, self.out_own, self.out_ghost),
            *(self.sum_own, self.own_far),
        )

    def with_values(self, value: Tensor, index: tuple[Tensor, ...]) -> LocalBlocks:
        """Returns the same patterns with the values `value[index]` on them."""
        pairs = zip(self.blocks, index, strict=True)
        return LocalBlocks(
            *(CSR(block.pattern, value.index_select(0, i)) for block, i in pairs)
        )


@dataclass(frozen=True, eq=False)
class Links:
    """The exchanges of a product.

    Args:
        ghost: brings ghost columns, over the row axis.
        out: takes sums of out rows to their owners, over the col axis.
        sums: takes sum rows to who wants them, over the row axis; they land in own
            rows, and out rows after them.
        far: brings far columns, own or ghost of their sender, over the col axis.
    """

    ghost: Link
    out: Link
    sums: Link
    far: Link

    @property
    def is_exact(self) -> bool:
        """Whether all of them are."""
        return all(x.is_exact for x in (self.ghost, self.out, self.sums, self.far))

    @property
    def mirrored(self) -> Links:
        """The exchanges of the transpose."""
        return Links(self.out, self.ghost, self.far, self.sums)

    def price(self, width: int) -> Price:
        """Returns the price of one product at `width` features."""
        there = self.ghost.price(width) + self.far.price(width)
        back = self.out.price_transpose(width) + self.sums.price_transpose(width)
        return there + back

    def wrapped(self, wrapper: LinkWrapper) -> Links:
        """Returns the same exchanges, each as `wrapper` has it."""
        every = (self.ghost, self.out, self.sums, self.far)
        return Links(*(wrapper.wrap(link, name) for name, link in enumerate(every)))

    def to(self, device: torch.device) -> Links:
        """Returns the same exchanges on another device."""
        every = (self.ghost, self.out, self.sums, self.far)
        return Links(*(link.to(device) for link in every))

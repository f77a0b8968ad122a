"""Pieces: one exchange in several, so that the first can travel while the next is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.collectives import Axis
from pyg_distcomm.comm.price import Price, balanced_split
from pyg_distcomm.halo.halo import Halo
from pyg_distcomm.halo.link import Link

ROWS = 8192  # of a piece, at least: fewer would cost more messages than they hide
MOST = 4


@dataclass(frozen=True, eq=False)
class ChunkedHalo(Link):
    """Links over one axis whose ghosts stand one after another.

    Price: the words of the whole, and each piece's messages.
    """

    pieces: tuple[Link, ...]
    silent: bool = False

    @property
    def parts(self) -> Sequence[Link]:
        """The links."""
        return self.pieces

    @property
    def is_exact(self) -> bool:
        """Whether all pieces are."""
        return all(piece.is_exact for piece in self.pieces)

    @property
    def num_ghosts(self) -> int:
        """The number of rows that arrive here."""
        return sum(piece.num_ghosts for piece in self.pieces)

    def begin(self, x: Tensor, into: Tensor | None = None) -> Callable[[], Tensor]:
        """Starts to send own rows; the call returns the ghosts of all pieces."""
        if into is None:
            into = x.new_empty((self.num_ghosts, *x.shape[1:]))
        sizes = [piece.num_ghosts for piece in self.pieces]
        pairs = zip(self.pieces, into.split(sizes), strict=True)
        arriving = [piece.begin(x, part) for piece, part in pairs]

        def arrive() -> Tensor:
            for one in arriving:
                one()
            return into

        return arrive

    def begin_transpose(self, g: Tensor) -> Callable[[Tensor], Tensor]:
        """Starts to send sums for the ghosts; the call adds what came into own rows."""
        sizes = [piece.num_ghosts for piece in self.pieces]
        pairs = zip(self.pieces, g.split(sizes), strict=True)
        landing = [piece.begin_transpose(part) for piece, part in pairs]

        def arrive(out: Tensor) -> Tensor:
            for land in landing:
                land(out)
            return out

        return arrive

    def price(self, width: int) -> Price:
        """Returns the price of one `begin` at `width` features."""
        return sum((piece.price(width) for piece in self.pieces), Price())

    def price_transpose(self, width: int) -> Price:
        """Returns the price of one `begin_transpose` at `width` features."""
        return sum((piece.price_transpose(width) for piece in self.pieces), Price())

    def to(self, device: torch.device) -> ChunkedHalo:
        """Returns the same plan with its indices on another device."""
        return ChunkedHalo(tuple(piece.to(device) for piece in self.pieces))

    def __repr__(self) -> str:
        return f"Pieces({', '.join(map(repr, self.pieces))})"


def plan_link(
    want_gid: Tensor,
    want_counts: list[int],
    have_gid: Tensor,
    axis: Axis,
    dense: bool = False,
) -> tuple[Link, Tensor]:
    """Plans a halo, or its pieces, as in `Halo.build`; returns the ghosts as they stand.

    Collective over the axis, whose ranks take the same number of pieces.
    """
    most = max(row[0] for row in collectives.all_gather_counts([len(want_gid)], axis))
    count = 1 if dense else min(max(most // ROWS, 1), MOST)
    if count == 1:
        halo = Halo.build(want_gid, want_counts, have_gid, axis, dense)
        return halo, want_gid
    blocks = want_gid.split(want_counts)
    cut = [block.split(balanced_split(len(block), count)) for block in blocks]
    pieces, order = [], []
    for parts in zip(*cut, strict=True):
        gid = torch.cat(parts)
        pieces.append(Halo.build(gid, [len(p) for p in parts], have_gid, axis))
        order.append(gid)
    return ChunkedHalo(tuple(pieces)), torch.cat(order)

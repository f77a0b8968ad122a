"""What travels between the blocks of a grid, planned for all ranks on one process.

The same choices as `ops.block` makes rank by rank, by the same function for pairs of ranks
(see [Note: rows or sums] in `ops/cover.py` and [Note: handing over] in `ops/block.py`); only
counts are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyg_distcomm.exchange.pieces import MOST, ROWS
from pyg_distcomm.mesh import Grid
from pyg_distcomm.ops.cover import PACKING, handed

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Side:
    """One link of every rank (i, j) of a grid, each entry [r, s] or broadcast to it.

    ghosts   rows of others that are needed here
    lent     own rows that others need, once for each that needs it
    sources  messages that the ghosts come in
    readers  messages that the lent rows go out in
    """

    ghosts: Array
    lent: Array
    sources: Array
    readers: Array

    @staticmethod
    def of(want: Array, pieces: bool) -> Side:
        """Counts `want[line, a, b]`: rows that rank a of a line asks of its rank b.

        In pieces, as `exchange.pieces` cuts them, a pair of ranks exchanges as many
        messages as there are pieces with rows.
        """
        most = want.sum(2).max(1, initial=0)
        count = np.clip(most // ROWS, 1, MOST) if pieces else np.ones_like(most)
        parts = np.minimum(want, count[:, None, None])
        return Side(want.sum(2), want.sum(1), parts.sum(2), parts.sum(1))

    def turned(self) -> Side:
        """Returns the same counts as `[s, r]` for `[r, s]`."""
        return Side(self.ghosts.T, self.lent.T, self.sources.T, self.readers.T)


@dataclass(frozen=True, eq=False)
class Sides:
    """The links of a product, as `ops.tile.Links` has them, for every rank."""

    ghost: Side
    out: Side
    sums: Side
    far: Side

    @property
    def mirrored(self) -> Sides:
        """The links of the transpose."""
        return Sides(self.out, self.ghost, self.far, self.sums)

    @property
    def all(self) -> tuple[Side, Side, Side, Side]:
        """All of them."""
        return self.ghost, self.out, self.sums, self.far


@dataclass(eq=False)
class _Block:
    """The nonzeros of a block whose ends have different owners, as they are shared out.

    Shapes [e]: source, target (ids), row_of (process row of the source's owner), col_of
    (process column of the target's owner).
    """

    source: Tensor
    target: Tensor
    row_of: Tensor
    col_of: Tensor
    given: Tensor
    summed: Tensor

    def keep(self, which: Tensor) -> None:
        """Drops the other nonzeros."""
        self.source, self.target = self.source[which], self.target[which]
        self.row_of, self.col_of = self.row_of[which], self.col_of[which]


def shared_out(
    edges: tuple[Array, Array], owner: Array, fiber: Array, grid: Grid, halo: str
) -> tuple[Sides, tuple[Array, Array, Array, Array, Array]]:
    """Returns the links of all ranks, and the nonzeros of their blocks but the own ones.

    Args:
        edges: sources and targets with different owners, by the rank of the target, each
            rank's in their original order.
        owner: of each node.
        fiber: own rows of ranks (i, j, *).
        grid: (r, s, p).
        halo: see `ops.cover.check_halo`.

    Returns:
        `Sides`, and [r, s] nonzeros: own_ghost, out_own, out_ghost, sum_own, own_far.
    """
    r, s, _ = grid
    blocks = _blocks(edges, owner, grid)
    ghost, sums = np.zeros((2, s, r, r), np.int64)
    out, far = np.zeros((2, r, s, s), np.int64)
    counts = np.zeros((5, r, s), np.int64)
    words = np.zeros((r, s), np.int64)
    for (i, j), block in blocks.items():
        away = block.row_of != i
        chosen, words[i, j] = handed(
            block.source[away], block.target[away], block.row_of[away], halo
        )
        block.given = torch.zeros_like(away).masked_scatter(away, chosen)
    whole_in = _whole(words.T, fiber.T, halo)
    for (i, j), block in blocks.items():
        given = block.given & (not whole_in[j])
        block.summed = block.target[given]
        sums[j, :, i] = _distinct(block.row_of[given], block.summed, r)
        counts[3, :, j] += torch.bincount(block.row_of[given], minlength=r).numpy()
        block.keep(~given)
        away, paid = block.col_of != j, torch.isin(block.target, block.summed)
        open_ = away & ~paid
        chosen, new = handed(
            block.target[open_], block.source[open_], block.col_of[open_], halo
        )
        words[i, j] = new + len(torch.unique(block.target[away & paid]))
        block.given = torch.zeros_like(open_).masked_scatter(open_, chosen)
    whole_out = _whole(words, fiber, halo)
    for (i, j), block in blocks.items():
        given = block.given & (not whole_out[i])
        forwarded, rows = block.source[given], block.row_of[given]
        far[i, :, j] = _distinct(block.col_of[given], forwarded, s)
        counts[4, i, :] += torch.bincount(block.col_of[given], minlength=s).numpy()
        block.keep(~given)
        columns = torch.cat([block.source, forwarded])
        ghost[j, i] = _distinct(torch.cat([block.row_of, rows]), columns, r, i)
        targets = torch.cat([block.target, block.summed])
        place = torch.from_numpy(owner)[targets] // grid[2] % s
        out[i, j] = _distinct(place, targets, s, j)
        in_row, in_col = block.col_of == j, block.row_of == i
        for k, which in enumerate(
            (in_row & ~in_col, ~in_row & in_col, ~in_row & ~in_col)
        ):
            counts[k, i, j] = int(which.sum())
    _fill(ghost, fiber.T, whole_in)
    _fill(out, fiber, whole_out)
    sides = Sides(
        _side(ghost, whole_in).turned(),
        _side(out, whole_out),
        Side.of(sums, True).turned(),
        Side.of(far, True),
    )
    return sides, tuple(counts)  # type: ignore[return-value]


def _blocks(
    edges: tuple[Array, Array], owner: Array, grid: Grid
) -> dict[tuple[int, int], _Block]:
    r, s, p = grid
    source, target = edges
    home, start = owner[target], owner[source]
    block = home // (s * p) * s + start // p % s
    order = np.argsort(block, kind="stable")
    ends = np.cumsum(np.bincount(block, minlength=r * s))
    none = torch.zeros(0, dtype=torch.int64)
    found = {}
    for k, which in enumerate(np.split(order, ends[:-1])):
        found[divmod(k, s)] = _Block(
            torch.from_numpy(source[which]),
            torch.from_numpy(target[which]),
            torch.from_numpy(start[which] // (s * p)),
            torch.from_numpy(home[which] // p % s),
            none,
            none,
        )
    return found


def _distinct(place: Tensor, gid: Tensor, places: int, own: int = -1) -> Array:
    """Counts the distinct nodes of each place, but of one's own."""
    if not len(gid):
        return np.zeros(places, np.int64)
    pair = torch.unique(place * (gid.max() + 1) + gid)
    found: Array = torch.bincount(pair // (gid.max() + 1), minlength=places).numpy()
    if own >= 0:
        found[own] = 0
    return found


def _whole(words: Array, own: Array, halo: str) -> Array:
    """Tells of each line `[line, rank]` whether it exchanges whole blocks."""
    if halo != "auto" or own.shape[1] == 1:
        return np.full(len(own), halo == "blocks")
    every = own.sum(1, keepdims=True)
    found: Array = (every[:, 0] > 0) & (words * (1 + PACKING) >= every - own).all(1)
    return found


def _fill(want: Array, own: Array, whole: Array) -> None:
    """Puts whole blocks where a line exchanges them."""
    size = own.shape[1]
    blocks = np.repeat(own[:, None, :], size, 1) * (1 - np.eye(size, dtype=np.int64))
    want[whole] = blocks[whole]


def _side(want: Array, whole: Array) -> Side:
    dense, cut = Side.of(want, False), Side.of(want, True)
    pick = whole[:, None]
    return Side(
        cut.ghosts,
        cut.lent,
        np.where(pick, dense.sources, cut.sources),
        np.where(pick, dense.readers, cut.readers),
    )

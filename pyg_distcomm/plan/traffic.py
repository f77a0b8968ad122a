"""Counts the rows that each rank of a grid receives, sends and multiplies in one product.

One process counts for all ranks, by the choices that `ops.block_plan` makes rank by rank and
the same function for pairs of ranks (see [Note: rows or sums] in `ops/grid_plan.py` and
[Note: handing over] in `ops/grid_plan.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyg_distcomm.comm.mesh import Grid
from pyg_distcomm.halo.halo import CHUNK_ROWS, MAX_CHUNKS
from pyg_distcomm.ops.grid_plan import PACKING, offloaded_nonzeros
from pyg_distcomm.partition.cutters import check_edge_index
from pyg_distcomm.partition.partition import Partition

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Pairs:
    """Rows that ranks of each line ask of one another, and in how many pieces they come.

    want    [line, asking, asked]
    pieces  [line]
    turned  whether lines are columns of the grid
    """

    want: Array
    pieces: Array
    turned: bool = False

    def of_piece(self, number: int) -> Array:
        """Returns the rows of one piece `[line, asking, asked]`, cut as `plan_link` does."""
        count = self.pieces[:, None, None]
        rows: Array = self.want // count + (number < self.want % count)
        return np.where(number < count, rows, 0)

    def by_rank(self, size: Array) -> tuple[Array, Array]:
        """Adds up `size[line, asking, asked]` for who asks, and for who is asked."""
        asking, asked = size.sum(2), size.sum(1)
        return (asking.T, asked.T) if self.turned else (asking, asked)


@dataclass(frozen=True, eq=False)
class Side:
    """One link of every rank (i, j) of a grid, each entry [r, s] or broadcast to it.

    ghosts   rows of others that are needed here
    lent     own rows that others need, once for each that needs it
    sources  messages that the ghosts come in
    readers  messages that the lent rows go out in
    pairs    the same, pair of ranks by pair; None for a law of degrees
    """

    ghosts: Array
    lent: Array
    sources: Array
    readers: Array
    pairs: Pairs | None = None

    @staticmethod
    def of(want: Array, pieces: bool | Array) -> Side:
        """Counts `want[line, a, b]`: rows that rank a of a line asks of its rank b.

        In pieces (on each line or none), as `halo.chunked` cuts them, a pair of ranks
        exchanges as many messages as there are pieces with rows.
        """
        most = want.sum(2).max(1, initial=0)
        count = np.where(pieces, np.clip(most // CHUNK_ROWS, 1, MAX_CHUNKS), 1)
        parts = np.minimum(want, count[:, None, None])
        ends = want.sum(2), want.sum(1), parts.sum(2), parts.sum(1)
        return Side(*ends, Pairs(want, count))

    def turned(self) -> Side:
        """Returns the same counts as `[s, r]` for `[r, s]`."""
        pairs = self.pairs
        if pairs is not None:
            pairs = replace(pairs, turned=not pairs.turned)
        return Side(self.ghosts.T, self.lent.T, self.sources.T, self.readers.T, pairs)


@dataclass(frozen=True, eq=False)
class Sides:
    """The links of a product, as `ops.local_blocks` has them, for every rank."""

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
    (process column of the target's owner), given (whether handed over). Summed are the
    targets of those handed over to process rows; forwarded, with their rows, the sources
    of those handed over to process columns.
    """

    source: Tensor
    target: Tensor
    row_of: Tensor
    col_of: Tensor
    given: Tensor
    summed: Tensor
    forwarded: tuple[Tensor, Tensor]

    def choose(
        self, near: Tensor, far: Tensor, place: Tensor, open_: Tensor, halo: str
    ) -> int:
        """Decides which of the open nonzeros are handed over; returns the words left."""
        chosen, words = offloaded_nonzeros(near[open_], far[open_], place[open_], halo)
        self.given = torch.zeros_like(open_).masked_scatter(open_, chosen)
        return words

    def keep(self, which: Tensor) -> None:
        """Drops the other nonzeros."""
        self.source, self.target = self.source[which], self.target[which]
        self.row_of, self.col_of = self.row_of[which], self.col_of[which]


@dataclass(frozen=True, eq=False)
class _Wants:
    """Rows that ranks of a line ask of one another, `[line, asking, asked]`, and nonzeros.

    nonzeros [5, r, s]: own_ghost, out_own, out_ghost, sum_own, own_far
    """

    ghost: Array
    out: Array
    sums: Array
    far: Array
    nonzeros: Array

    def give_rows(self, block: _Block, i: int, j: int, whole: bool) -> None:
        """Hands nonzeros to the process rows of their sources."""
        given, r = block.given & (not whole), self.ghost.shape[1]
        block.summed = block.target[given]
        self.sums[j, :, i] = _distinct(block.row_of[given], block.summed, r)
        self.nonzeros[3, :, j] += torch.bincount(
            block.row_of[given], minlength=r
        ).numpy()
        block.keep(~given)

    def give_columns(self, block: _Block, i: int, j: int, whole: bool) -> None:
        """Hands nonzeros to the process columns of their targets."""
        given, s = block.given & (not whole), self.out.shape[1]
        block.forwarded = block.source[given], block.row_of[given]
        self.far[i, :, j] = _distinct(block.col_of[given], block.source[given], s)
        self.nonzeros[4, i, :] += torch.bincount(
            block.col_of[given], minlength=s
        ).numpy()
        block.keep(~given)

    def take(self, block: _Block, i: int, j: int, summed_at: Tensor) -> None:
        """Counts what the nonzeros that stay need, and what was promised for others."""
        forwarded, rows = block.forwarded
        columns = torch.cat([block.source, forwarded])
        place = torch.cat([block.row_of, rows])
        self.ghost[j, i] = _distinct(place, columns, self.ghost.shape[1], i)
        targets = torch.cat([block.target, block.summed])
        place = torch.cat([block.col_of, summed_at])
        self.out[i, j] = _distinct(place, targets, self.out.shape[1], j)
        in_row, in_col = block.col_of == j, block.row_of == i
        kinds = (in_row & ~in_col, ~in_row & in_col, ~in_row & ~in_col)
        self.nonzeros[:3, i, j] = [int(which.sum()) for which in kinds]


def shared_out(
    edges: tuple[Array, Array], owner: Array, fiber: Array, grid: Grid, halo: str
) -> tuple[Sides, tuple[Array, ...]]:
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
    want = _Wants(
        np.zeros((s, r, r), np.int64),
        np.zeros((r, s, s), np.int64),
        np.zeros((s, r, r), np.int64),
        np.zeros((r, s, s), np.int64),
        np.zeros((5, r, s), np.int64),
    )
    words = np.zeros((r, s), np.int64)
    for (i, j), block in blocks.items():
        near, far, place = block.source, block.target, block.row_of
        words[i, j] = block.choose(near, far, place, place != i, halo)
    whole_in = _whole(words.T, fiber.T, halo)
    for (i, j), block in blocks.items():
        want.give_rows(block, i, j, bool(whole_in[j]))
        near, far, place = block.target, block.source, block.col_of
        away, paid = place != j, torch.isin(near, block.summed)
        words[i, j] = block.choose(near, far, place, away & ~paid, halo)
        summed_at = torch.from_numpy(owner)[block.summed] // grid[2] % s
        words[i, j] += len(torch.unique(block.summed[summed_at != j]))
    whole_out = _whole(words, fiber, halo)
    for (i, j), block in blocks.items():
        want.give_columns(block, i, j, bool(whole_out[i]))
        place = torch.from_numpy(owner)[block.summed] // grid[2] % s
        want.take(block, i, j, place)
    _fill(want.ghost, fiber.T, whole_in)
    _fill(want.out, fiber, whole_out)
    sides = Sides(
        Side.of(want.ghost, ~whole_in).turned(),
        Side.of(want.out, ~whole_out),
        Side.of(want.sums, True).turned(),
        Side.of(want.far, True),
    )
    return sides, tuple(want.nonzeros)


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
            (none, none),
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


MOST_RANKS = 4096  # a table of ranks by ranks is kept


@dataclass(frozen=True, eq=False)
class Flow:
    """What one product moves and multiplies, on every rank of a grid r x s x p.

    nodes      [r, s, p] own rows
    fiber      [r, s]    own rows of all ranks of a fiber
    edges      [r, s, p] edges owned, an edge living with the owner of its target
    sides      what travels
    nonzeros   six times [r, s], as the blocks of `ops.local_blocks`

    For a law of degrees all entries are means, and the same on every rank: the first two
    dims then have size 1.
    """

    grid: Grid
    nodes: Array
    fiber: Array
    edges: Array
    sides: Sides
    nonzeros: tuple[Array, ...]


@dataclass(frozen=True, eq=False)
class CutEdges:
    """The edges of a partitioned graph, as the plans of all grids need them.

    nodes   [P]     nodes owned
    edges   [P, P]  edges by the owner of their target, and of their source
    loops   [P]     self-loops among them
    cut     sources and targets of edges between owners, by the owner of the target
    owner   [n]
    whole   all edges, and who owns which node
    """

    nodes: Array
    edges: Array
    loops: Array
    cut: tuple[Array, Array]
    owner: Array
    whole: tuple[Tensor, Partition]

    @staticmethod
    def of(edge_index: Tensor, partition: Partition) -> CutEdges:
        """Reads the edges once, in time linear in them."""
        parts = partition.num_parts
        if parts > MOST_RANKS:
            raise ValueError(
                f"a real graph is planned for at most {MOST_RANKS} ranks, got {parts}; "
                "plan a RandomGraph of its nodes, edges and law of degrees"
            )
        check_edge_index(edge_index, partition.num_nodes)
        ends = edge_index.detach().as_subclass(Tensor).cpu().long().numpy()
        source, target = ends
        owner = partition.owner.numpy().astype(np.int64)
        home, start = owner[target], owner[source]
        edges = np.bincount(home * parts + start, minlength=parts * parts)
        loops = np.bincount(home[source == target], minlength=parts)
        away = np.flatnonzero(home != start)
        narrow = home[away].astype(np.min_scalar_type(parts - 1))  # a radix sort
        away = away[np.argsort(narrow, kind="stable")]
        return CutEdges(
            np.array(partition.sizes, np.int64),
            edges.reshape(parts, parts),
            loops,
            (source[away], target[away]),
            owner,
            (edge_index, partition),
        )

    @cached_property
    def turned(self) -> CutEdges:
        """The same edges turned around, owned by what were their sources."""
        edge_index, partition = self.whole
        return CutEdges.of(edge_index.flip(0), partition)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.nodes)

    def flow(self, grid: Grid, halo: str, add_loops: bool) -> Flow:
        """Counts the rows of one product on a grid.

        Args:
            grid: (r, s, p), as many ranks as parts.
            halo: what travels; see `ops.cover.check_halo`.
            add_loops: each node has exactly one self-loop, as in a GCN.
        """
        r, s, p = grid
        nodes = self.nodes.reshape(r, s, p)
        sides, others = shared_out(self.cut, self.owner, nodes.sum(2), grid, halo)
        edges = self.edges.reshape(r, s, p, r, s, p).sum((2, 5))
        i, j = np.ix_(range(r), range(s))
        own = edges[i, j, i, j]
        if add_loops:
            own = own + (self.nodes - self.loops).reshape(r, s, p).sum(2)
        return Flow(
            grid,
            nodes,
            nodes.sum(2),
            self.edges.sum(1).reshape(r, s, p),
            sides,
            (own, *others),
        )

    @cached_property
    def halo_flow(self) -> Flow:
        """Counts the rows of one exchange of `HaloConv`, on (P, 1, 1) as on all grids."""
        grid = (self.size, 1, 1)
        flow = self.flow(grid, "rows", False)
        source, target = self.cut
        rank, gid = distinct(self.owner[target], source, self.size, len(self.owner))
        want = np.bincount(rank * self.size + self.owner[gid], minlength=self.size**2)
        side = Side.of(want.reshape(1, self.size, self.size), False).turned()
        return replace(flow, sides=replace(flow.sides, ghost=side))


def distinct(
    group: Array, gid: Array, groups: int, num_nodes: int
) -> tuple[Array, Array]:
    """Returns the distinct pairs of a group and a node, in order of the group.

    Sorting by group is a radix sort for few groups, so the time is linear.
    """
    narrow = np.min_scalar_type(max(groups - 1, 0))
    order = np.argsort(group.astype(narrow), kind="stable")
    gid, sizes = gid[order], np.bincount(group, minlength=groups)
    ends = np.cumsum(sizes)
    last = np.empty(num_nodes, np.int64)  # never cleared: a group reads what it wrote
    keep = np.zeros(len(gid), np.bool_)
    for start, end in zip(ends - sizes, ends, strict=True):
        asked, place = gid[start:end], np.arange(end - start)
        last[asked] = place
        keep[start:end] = last[asked] == place
    return np.repeat(np.arange(groups), sizes)[keep], gid[keep]

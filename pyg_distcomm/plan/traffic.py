"""Counts the rows that each rank of a grid receives, sends and multiplies in one product.

One process counts for all ranks, by the choices that `ops/grid_plan.py` makes on each rank, and
with the same function for pairs of ranks (see its [Note: rows or sums]).
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
from pyg_distcomm.partition.partition import Partition, group_by_part

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class PairCounts:
    """The rows that each pair of ranks on a line exchanges, and the number of pieces.

    want        [line, receiver, sender]
    pieces      [line]
    transposed  whether lines are columns of the grid
    """

    want: Array
    pieces: Array
    transposed: bool = False

    def of_piece(self, number: int) -> Array:
        """Returns the rows of one piece `[line, receiver, sender]`, cut as in `plan_link`."""
        count = self.pieces[:, None, None]
        rows: Array = self.want // count + (number < self.want % count)
        return np.where(number < count, rows, 0)

    def by_rank(self, size: Array) -> tuple[Array, Array]:
        """Sums `size[line, receiver, sender]` over senders, and over receivers."""
        received, sent = size.sum(2), size.sum(1)
        return (received.T, sent.T) if self.transposed else (received, sent)


@dataclass(frozen=True, eq=False)
class LinkCounts:
    """The rows of one link on every rank (i, j) of a grid; entries are [r, s] or broadcast.

    ghosts   rows of other ranks that are needed here
    sent     own rows that other ranks need, counted once for each such rank
    sources  messages in which the ghosts arrive
    readers  messages in which own rows are sent
    pairs    the rows by pair of ranks; None for a degree distribution
    """

    ghosts: Array
    sent: Array
    sources: Array
    readers: Array
    pairs: PairCounts | None = None

    @staticmethod
    def of(want: Array, pieces: bool | Array) -> LinkCounts:
        """Counts the rows of `want[line, a, b]`, which rank a of a line receives from rank b.

        If a line exchanges in pieces, as `halo.plan_link` cuts them, a pair of ranks exchanges
        one message for each piece that has rows.
        """
        most = want.sum(2).max(1, initial=0)
        count = np.where(pieces, np.clip(most // CHUNK_ROWS, 1, MAX_CHUNKS), 1)
        parts = np.minimum(want, count[:, None, None])
        ends = want.sum(2), want.sum(1), parts.sum(2), parts.sum(1)
        return LinkCounts(*ends, PairCounts(want, count))

    def transposed(self) -> LinkCounts:
        """Returns the same counts as `[s, r]` for `[r, s]`."""
        pairs = self.pairs
        if pairs is not None:
            pairs = replace(pairs, transposed=not pairs.transposed)
        return LinkCounts(
            self.ghosts.T, self.sent.T, self.sources.T, self.readers.T, pairs
        )


@dataclass(frozen=True, eq=False)
class ProductLinks:
    """The links of a product on every rank, as in `ops.csr.LocalBlocks`."""

    ghost: LinkCounts
    out: LinkCounts
    sums: LinkCounts
    far: LinkCounts

    @property
    def mirrored(self) -> ProductLinks:
        """The links of the transpose."""
        return ProductLinks(self.out, self.ghost, self.far, self.sums)

    @property
    def all(self) -> tuple[LinkCounts, LinkCounts, LinkCounts, LinkCounts]:
        """All of them."""
        return self.ghost, self.out, self.sums, self.far


@dataclass(eq=False)
class _Block:
    """The nonzeros of a block whose ends have different owners, while ranks divide them.

    Shapes [e]: source, target (ids), row_of (process row of the source's owner), col_of
    (process column of the target's owner), given (whether handed over). Summed are the
    targets of those handed over to process rows; forwarded, with their rows, the sources
    of those handed over to process columns.
    """

    source: Tensor
    target: Tensor
    row_of: Tensor
    col_of: Tensor
    offloaded: Tensor
    summed: Tensor
    forwarded: tuple[Tensor, Tensor]

    def choose(
        self, needed: Tensor, far: Tensor, place: Tensor, open_: Tensor, halo: str
    ) -> int:
        """Decides which of the open nonzeros are offloaded; returns the words that remain."""
        chosen, words = offloaded_nonzeros(
            needed[open_], far[open_], place[open_], halo
        )
        self.offloaded = torch.zeros_like(open_).masked_scatter(open_, chosen)
        return words

    def keep(self, which: Tensor) -> None:
        """Keeps the selected nonzeros, and drops the others."""
        self.source, self.target = self.source[which], self.target[which]
        self.row_of, self.col_of = self.row_of[which], self.col_of[which]


@dataclass(frozen=True, eq=False)
class _LinkTables:
    """The rows of each link, `[line, receiver, sender]`, and the nonzeros of all blocks.

    nonzeros [5, r, s]: own_ghost, out_own, out_ghost, sum_own, own_far
    """

    ghost: Array
    out: Array
    sums: Array
    far: Array
    nonzeros: Array

    def offload_to_rows(self, block: _Block, i: int, j: int, whole: bool) -> None:
        """Offloads nonzeros to the process rows of their sources."""
        offloaded, r = block.offloaded & (not whole), self.ghost.shape[1]
        block.summed = block.target[offloaded]
        self.sums[j, :, i] = _count_distinct(block.row_of[offloaded], block.summed, r)
        self.nonzeros[3, :, j] += torch.bincount(
            block.row_of[offloaded], minlength=r
        ).numpy()
        block.keep(~offloaded)

    def offload_to_columns(self, block: _Block, i: int, j: int, whole: bool) -> None:
        """Offloads nonzeros to the process columns of their targets."""
        offloaded, s = block.offloaded & (not whole), self.out.shape[1]
        block.forwarded = block.source[offloaded], block.row_of[offloaded]
        self.far[i, :, j] = _count_distinct(
            block.col_of[offloaded], block.source[offloaded], s
        )
        self.nonzeros[4, i, :] += torch.bincount(
            block.col_of[offloaded], minlength=s
        ).numpy()
        block.keep(~offloaded)

    def count_rest(self, block: _Block, i: int, j: int, summed_at: Tensor) -> None:
        """Counts the rows that the remaining nonzeros and the offloaded ones of others need."""
        forwarded, rows = block.forwarded
        columns = torch.cat([block.source, forwarded])
        place = torch.cat([block.row_of, rows])
        self.ghost[j, i] = _count_distinct(place, columns, self.ghost.shape[1], i)
        targets = torch.cat([block.target, block.summed])
        place = torch.cat([block.col_of, summed_at])
        self.out[i, j] = _count_distinct(place, targets, self.out.shape[1], j)
        in_row, in_col = block.col_of == j, block.row_of == i
        kinds = (in_row & ~in_col, ~in_row & in_col, ~in_row & ~in_col)
        self.nonzeros[:3, i, j] = [int(which.sum()) for which in kinds]


def count_links(
    edges: tuple[Array, Array], owner: Array, fiber: Array, grid: Grid, halo: str
) -> tuple[ProductLinks, tuple[Array, ...]]:
    """Returns the links of all ranks, and the nonzeros of their blocks without the own blocks.

    Args:
        edges: sources and targets with different owners, by the rank of the target, each
            rank's in their original order.
        owner: the owner of each node.
        fiber: own rows of ranks (i, j, *).
        grid: (r, s, p).
        halo: see `check_halo` in `ops/grid_plan.py`.

    Returns:
        `ProductLinks`, and [r, s] nonzeros: own_ghost, out_own, out_ghost, sum_own, own_far.
    """
    r, s, _ = grid
    blocks = _blocks(edges, owner, grid)
    want = _LinkTables(
        np.zeros((s, r, r), np.int64),
        np.zeros((r, s, s), np.int64),
        np.zeros((s, r, r), np.int64),
        np.zeros((r, s, s), np.int64),
        np.zeros((5, r, s), np.int64),
    )
    words = np.zeros((r, s), np.int64)
    for (i, j), block in blocks.items():
        needed, far, place = block.source, block.target, block.row_of
        words[i, j] = block.choose(needed, far, place, place != i, halo)
    whole_in = _exchanges_whole_blocks(words.T, fiber.T, halo)
    for (i, j), block in blocks.items():
        want.offload_to_rows(block, i, j, bool(whole_in[j]))
        needed, far, place = block.target, block.source, block.col_of
        remote, summed_already = place != j, torch.isin(needed, block.summed)
        words[i, j] = block.choose(needed, far, place, remote & ~summed_already, halo)
        summed_at = torch.from_numpy(owner)[block.summed] // grid[2] % s
        words[i, j] += len(torch.unique(block.summed[summed_at != j]))
    whole_out = _exchanges_whole_blocks(words, fiber, halo)
    for (i, j), block in blocks.items():
        want.offload_to_columns(block, i, j, bool(whole_out[i]))
        place = torch.from_numpy(owner)[block.summed] // grid[2] % s
        want.count_rest(block, i, j, place)
    _set_whole_blocks(want.ghost, fiber.T, whole_in)
    _set_whole_blocks(want.out, fiber, whole_out)
    sides = ProductLinks(
        LinkCounts.of(want.ghost, ~whole_in).transposed(),
        LinkCounts.of(want.out, ~whole_out),
        LinkCounts.of(want.sums, True).transposed(),
        LinkCounts.of(want.far, True),
    )
    return sides, tuple(want.nonzeros)


def _blocks(
    edges: tuple[Array, Array], owner: Array, grid: Grid
) -> dict[tuple[int, int], _Block]:
    r, s, p = grid
    source, target = edges
    target_owner, source_owner = owner[target], owner[source]
    block = target_owner // (s * p) * s + source_owner // p % s
    order = np.argsort(block, kind="stable")
    ends = np.cumsum(np.bincount(block, minlength=r * s))
    none = torch.zeros(0, dtype=torch.int64)
    found = {}
    for k, which in enumerate(np.split(order, ends[:-1])):
        found[divmod(k, s)] = _Block(
            torch.from_numpy(source[which]),
            torch.from_numpy(target[which]),
            torch.from_numpy(source_owner[which] // (s * p)),
            torch.from_numpy(target_owner[which] // p % s),
            none,
            none,
            (none, none),
        )
    return found


def _count_distinct(place: Tensor, gid: Tensor, places: int, own: int = -1) -> Array:
    """Counts the distinct nodes of each place, except for place `own`."""
    if not len(gid):
        return np.zeros(places, np.int64)
    pair = torch.unique(place * (gid.max() + 1) + gid)
    found: Array = torch.bincount(pair // (gid.max() + 1), minlength=places).numpy()
    if own >= 0:
        found[own] = 0
    return found


def _exchanges_whole_blocks(words: Array, own: Array, halo: str) -> Array:
    """Returns for each line `[line, rank]` whether it exchanges whole blocks."""
    if halo != "auto" or own.shape[1] == 1:
        return np.full(len(own), halo == "blocks")
    every = own.sum(1, keepdims=True)
    found: Array = (every[:, 0] > 0) & (words * (1 + PACKING) >= every - own).all(1)
    return found


def _set_whole_blocks(want: Array, own: Array, whole: Array) -> None:
    """Sets the rows of lines that exchange whole blocks."""
    size = own.shape[1]
    blocks = np.repeat(own[:, None, :], size, 1) * (1 - np.eye(size, dtype=np.int64))
    want[whole] = blocks[whole]


MOST_RANKS = 4096  # limits the table of ranks by ranks


@dataclass(frozen=True, eq=False)
class Flow:
    """The rows that one product moves and multiplies, on every rank of a grid r x s x p.

    nodes      [r, s, p] own rows
    fiber      [r, s]    own rows of all ranks of a fiber
    edges      [r, s, p] own edges; an edge belongs to the owner of its target
    sides      the rows that travel
    nonzeros   six times [r, s], the blocks of `ops.csr.LocalBlocks`

    For a degree distribution all entries are means, equal on all ranks: the first two dims
    then have size 1.
    """

    grid: Grid
    nodes: Array
    fiber: Array
    edges: Array
    sides: ProductLinks
    nonzeros: tuple[Array, ...]


@dataclass(frozen=True, eq=False)
class CutEdges:
    """The edges of a partitioned graph, as the plans of all grids read them.

    nodes   [P]     own nodes
    edges   [P, P]  edges by the owner of their target, and of their source
    loops   [P]     self-loops among them
    cut     sources and targets of edges between owners, by the owner of the target
    owner   [n]     the owner of each node
    """

    nodes: Array
    edges: Array
    loops: Array
    cut: tuple[Array, Array]
    owner: Array

    @staticmethod
    def of(edge_index: Tensor, partition: Partition) -> CutEdges:
        """Reads the edges once, in time linear in them."""
        parts = partition.num_parts
        if parts > MOST_RANKS:
            raise ValueError(
                f"a real graph is planned for at most {MOST_RANKS} ranks, got {parts}; "
                "plan a RandomGraph of its nodes, edges and degree distribution"
            )
        check_edge_index(edge_index, partition.num_nodes)
        ends = edge_index.detach().as_subclass(Tensor).cpu().long().numpy()
        source, target = ends
        owner = partition.owner.numpy().astype(np.int64)
        target_owner, source_owner = owner[target], owner[source]
        edges = np.bincount(
            target_owner * parts + source_owner, minlength=parts * parts
        )
        loops = np.bincount(target_owner[source == target], minlength=parts)
        remote = np.flatnonzero(target_owner != source_owner)
        # a radix sort
        narrow = target_owner[remote].astype(np.min_scalar_type(parts - 1))
        remote = remote[np.argsort(narrow, kind="stable")]
        return CutEdges(
            np.array(partition.sizes, np.int64),
            edges.reshape(parts, parts),
            loops,
            (source[remote], target[remote]),
            owner,
        )

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.nodes)

    def flow(self, grid: Grid, halo: str, add_loops: bool) -> Flow:
        """Counts the rows of one product on a grid.

        Args:
            grid: (r, s, p), as many ranks as parts.
            halo: the rows that travel; see `check_halo` in `ops/grid_plan.py`.
            add_loops: each node has exactly one self-loop, as in a GCN.
        """
        r, s, p = grid
        nodes = self.nodes.reshape(r, s, p)
        sides, others = count_links(self.cut, self.owner, nodes.sum(2), grid, halo)
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
        want = np.zeros((self.size, self.size), np.int64)
        for rank, here in group_by_part(self.owner[target]):
            ghosts = np.unique(source[here])
            want[rank] = np.bincount(self.owner[ghosts], minlength=self.size)
        side = LinkCounts.of(want[None], False).transposed()
        return replace(flow, sides=replace(flow.sides, ghost=side))

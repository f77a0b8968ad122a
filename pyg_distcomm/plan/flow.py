"""Flow: how many rows each rank of a grid receives, sends and multiplies, in one product.

[Note: planning a grid] Only edges whose ends have different owners make rows travel, and
which rows depends on two sets alone: the pairs (rank, source) where a rank reads a row of
another, and the pairs (target, rank) where a rank adds to a row of another. Both are
taken from the edges once; a grid merges the ranks of a process row in the first, of a
process column in the second, so that every further grid costs time linear in the volume
of the partition, not in the edges.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pyg_distcomm.mesh import Grid
from pyg_distcomm.partition.cutters import check_edge_index
from pyg_distcomm.partition.partition import Partition

Array = NDArray[Any]
MOST_RANKS = 4096  # a table of ranks by ranks is kept


@dataclass(frozen=True, eq=False)
class Side:
    """One halo of every rank (i, j) of a grid, each entry [r, s] or broadcast to it.

    ghosts   rows of others that are needed here
    lent     own rows that others need, once for each that needs it
    sources  ranks the ghosts come from
    readers  ranks the lent rows go to
    """

    ghosts: Array
    lent: Array
    sources: Array
    readers: Array

    @staticmethod
    def of(want: Array) -> Side:
        """Counts `want[line, a, b]`: rows that rank a of a line asks of its rank b."""
        return Side(want.sum(2), want.sum(1), (want > 0).sum(2), (want > 0).sum(1))

    def turned(self) -> Side:
        """Returns the same counts as `[s, r]` for `[r, s]`."""
        return Side(self.ghosts.T, self.lent.T, self.sources.T, self.readers.T)


@dataclass(frozen=True, eq=False)
class Flow:
    """What one product moves and multiplies, on every rank of a grid r x s x p.

    nodes      [r, s, p] own rows
    fiber      [r, s]    own rows of all ranks of a fiber
    edges      [r, s, p] edges owned, an edge living with the owner of its target
    rows_in    the halo of rows, over the row axis
    sums_out   the halo of sums, over the col axis: its ghosts are sent
    nonzeros   four times [r, s]: (own | out) rows x (own | ghost) columns

    For a law of degrees all entries are means, and the same on every rank: the first two
    dims then have size 1.
    """

    grid: Grid
    nodes: Array
    fiber: Array
    edges: Array
    rows_in: Side
    sums_out: Side
    nonzeros: tuple[Array, Array, Array, Array]


@dataclass(frozen=True, eq=False)
class CutEdges:
    """The edges of a partitioned graph, as the plans of all grids need them.

    nodes   [P]     nodes owned
    edges   [P, P]  edges by the owner of their target, and of their source
    loops   [P]     self-loops among them
    reads   (rank, source_gid), distinct, the source another rank's
    writes  (rank, target_gid), distinct: the target another rank's, a source the rank's
    owner   [n]
    """

    nodes: Array
    edges: Array
    loops: Array
    reads: tuple[Array, Array]
    writes: tuple[Array, Array]
    owner: Array

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
        source, target = edge_index.detach().as_subclass(Tensor).cpu().numpy()
        owner = partition.owner.numpy().astype(np.int64)
        home, start = owner[target], owner[source]
        edges = np.bincount(home * parts + start, minlength=parts * parts)
        loops = np.bincount(home[source == target], minlength=parts)
        away = np.flatnonzero(home != start)
        home, start, source, target = (v[away] for v in (home, start, source, target))
        return CutEdges(
            np.array(partition.sizes, np.int64),
            edges.reshape(parts, parts),
            loops,
            distinct(home, source, parts, len(owner)),
            distinct(start, target, parts, len(owner)),
            owner,
        )

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.nodes)

    @cached_property
    def _owners(self) -> tuple[Array, Array]:
        return self.owner[self.reads[1]], self.owner[self.writes[1]]

    def flow(self, grid: Grid, oblivious: bool, add_loops: bool) -> Flow:
        """Counts the rows of one product on a grid.

        Args:
            grid: (r, s, p), as many ranks as parts.
            oblivious: whole blocks travel.
            add_loops: each node has exactly one self-loop, as in a GCN.
        """
        r, s, p = grid
        nodes = self.nodes.reshape(r, s, p)
        fiber = nodes.sum(2)
        rows_in, sums_out = _whole_blocks(fiber) if oblivious else self._sparse(r, s, p)
        edges = self.edges.copy()
        if add_loops:
            edges[np.diag_indices(self.size)] += self.nodes - self.loops
        return Flow(
            grid,
            nodes,
            fiber,
            self.edges.sum(1).reshape(r, s, p),
            rows_in,
            sums_out,
            _blocks(edges.reshape(r, s, p, r, s, p).sum((2, 5))),
        )

    def _sparse(self, r: int, s: int, p: int) -> tuple[Side, Side]:
        # reads: who reads (its row i), from whom (row a of column j); rows away only
        (rank, gid), (owner, _) = self.reads, self._owners
        i, a = rank // (s * p), owner // (s * p)
        group, row = distinct(i[i != a], gid[i != a], r, len(self.owner))
        home = self.owner[row]
        key = (home // p % s * r + group) * r + home // (s * p)
        rows_in = Side.of(np.bincount(key, minlength=s * r * r).reshape(s, r, r))
        (rank, gid), (_, owner) = self.writes, self._owners
        j, b = rank // p % s, owner // p % s
        group, row = distinct(j[j != b], gid[j != b], s, len(self.owner))
        home = self.owner[row]
        key = (home // (s * p) * s + group) * s + home // p % s
        sums_out = Side.of(np.bincount(key, minlength=r * s * s).reshape(r, s, s))
        return rows_in.turned(), sums_out


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


def _whole_blocks(fiber: Array) -> tuple[Side, Side]:
    """Each rank of a line asks for every row of every other rank of it."""

    def want(rows: Array) -> Array:  # [line, b] rows -> [line, a, b], none from oneself
        size = rows.shape[1]
        return np.repeat(rows[:, None, :], size, 1) * (1 - np.eye(size, dtype=np.int64))

    return Side.of(want(fiber.T)).turned(), Side.of(want(fiber))


def _blocks(edges: Array) -> tuple[Array, Array, Array, Array]:
    """Splits `edges[i, b, a, j]` (target in (i, b), source in (a, j)) into four blocks."""
    r, s = edges.shape[:2]
    i, j = np.arange(r), np.arange(s)
    all_rows = edges.sum(1)  # [i, a, j]
    own_rows = edges[:, j, :, j].transpose(1, 2, 0)  # [i, a, j]: rows of (i, j)
    own_own = own_rows[i, i]
    own_ghost = own_rows.sum(1) - own_own
    out_own = all_rows[i, i] - own_own
    return own_own, own_ghost, out_own, all_rows.sum(1) - own_own - own_ghost - out_own

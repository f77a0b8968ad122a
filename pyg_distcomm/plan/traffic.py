"""Flow: how many rows each rank of a grid receives, sends and multiplies, in one product."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from torch import Tensor

from pyg_distcomm.comm.mesh import Grid
from pyg_distcomm.partition.cutters import check_edge_index
from pyg_distcomm.partition.partition import Partition
from pyg_distcomm.plan.block_traffic import Array, Side, Sides, shared_out

MOST_RANKS = 4096  # a table of ranks by ranks is kept


@dataclass(frozen=True, eq=False)
class Flow:
    """What one product moves and multiplies, on every rank of a grid r x s x p.

    nodes      [r, s, p] own rows
    fiber      [r, s]    own rows of all ranks of a fiber
    edges      [r, s, p] edges owned, an edge living with the owner of its target
    sides      what travels
    nonzeros   six times [r, s], as the blocks of `ops.tile.Tile`

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

    def halo_flow(self) -> Flow:
        """Counts the rows of one exchange of `HaloConv`, on (P, 1, 1)."""
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

"""Plans a GridMatrix from the edges each rank owns; collective, once per graph."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.ops.block_plan import BlockPlan, Edges, coordinate
from pyg_distcomm.ops.cover import check_halo
from pyg_distcomm.ops.edge_routing import EdgeRoute
from pyg_distcomm.ops.grid_matrix import FiberSplit, GridMatrix
from pyg_distcomm.partition.partition import Partition


@dataclass(frozen=True, eq=False)
class GridPlan:
    """A grid matrix, the route of its edge values, and who takes which."""

    matrix: GridMatrix
    route: EdgeRoute
    index: tuple[Tensor, ...]

    def valued(self, value: Tensor) -> GridMatrix:
        """Returns the matrix with fixed edge values `[e]` put in place."""
        tile = self.matrix.tile.with_values(self.route.carry(value), self.index)
        return GridMatrix(tile, self.matrix.links, self.matrix.fiber)

    def to(self, device: torch.device) -> GridPlan:
        """Returns the same plan on another device."""
        index = tuple(i.to(device) for i in self.index)
        return GridPlan(self.matrix.to(device), self.route.to(device), index)

    def with_learnt(self, value: Tensor) -> GridMatrix:
        """Returns the matrix of trainable own edge values `[e]`.

        For plans with halo="rows" or "blocks": values of nonzeros that other ranks
        multiply would travel in every product.
        """
        return replace(self.matrix, value=self.route.carry(value), index=self.index)


def build_plan(
    source_gid: Tensor,
    target_gid: Tensor,
    partition: Partition,
    mesh: Mesh,
    halo: str = "auto",
) -> GridPlan:
    """Plans the products of a matrix with a nonzero (target, source) per edge.

    Args:
        source_gid: sources of the edges owned here `[e]`.
        target_gid: their targets `[e]`, nodes of this rank.
        partition: who owns which node.
        mesh: the grid.
        halo: what travels; see `check_halo`.
    """
    route = _plan_route(source_gid, partition, mesh)
    edges = Edges(*(_carried(ids, route) for ids in (source_gid, target_gid)))
    own_gid, rows = _fiber_rows(partition, mesh)
    block = BlockPlan(partition, mesh, own_gid, check_halo(halo))
    tile, index, links, hops = block.plan(edges)
    matrix = GridMatrix(tile, links, FiberSplit(mesh.fiber, rows))
    for hop in hops:
        route = route.followed_by(hop)
    return GridPlan(matrix, route, index)


def _carried(gid: Tensor, route: EdgeRoute) -> Tensor:
    return gid if route.local else route.carry(gid)


def _plan_route(source_gid: Tensor, partition: Partition, mesh: Mesh) -> EdgeRoute:
    _, s, p = mesh.grid
    if s * p == 1:
        return EdgeRoute(mesh.world, source_gid[:0], (), (), local=True)
    j = coordinate(partition.owner_of(source_gid), 1, mesh)
    order = torch.argsort(j, stable=True)
    sizes = torch.bincount(j, minlength=s).tolist()
    slot = torch.cat([part for b in order.split(sizes) for part in [b] * p])
    counts = [0] * mesh.size
    first = mesh.row.rank * s * p
    for rank in range(s * p):
        counts[first + rank] = sizes[rank // p]
    back = collectives.exchange_counts(counts, mesh.world)
    return EdgeRoute(mesh.world, slot, tuple(counts), tuple(back))


def _fiber_rows(partition: Partition, mesh: Mesh) -> tuple[Tensor, tuple[int, ...]]:
    p = mesh.fiber.size
    first = mesh.rank - mesh.fiber.rank
    parts = [partition.gids(first + k) for k in range(p)]
    return torch.cat(parts), tuple(len(part) for part in parts)

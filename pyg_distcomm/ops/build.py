"""Plans a GridMatrix from the edges each rank owns; collective, once per graph."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyg_distcomm import adjoint, wire
from pyg_distcomm.exchange.halo import Halo
from pyg_distcomm.mesh import Mesh
from pyg_distcomm.ops.csr import CSR, Pattern
from pyg_distcomm.ops.grid_matrix import FiberSplit, GridMatrix, Tile
from pyg_distcomm.partition.partition import Partition
from pyg_distcomm.wire import Axis


@dataclass(frozen=True, eq=False)
class EdgeRoute:
    """Takes edge values from the owners of their targets to the blocks that use them.

    Shapes (this rank; e own edges, b edges of its block): send_slot [sum(send_counts)].
    On (P, 1, 1) owner and block are the same rank, and nothing moves.
    """

    axis: Axis
    send_slot: Tensor
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    local: bool = False

    def carry(self, value: Tensor) -> Tensor:
        """Returns the block's values `[b]` of own edge values `[e]`, differentiably."""
        if self.local:
            return value
        rows = value.index_select(0, self.send_slot)
        return adjoint.all_to_all(
            rows, self.send_counts, self.recv_counts, self.axis, "edges"
        )

    def to(self, device: torch.device) -> EdgeRoute:
        """Returns the same route with its indices on another device."""
        return replace(self, send_slot=self.send_slot.to(device))


@dataclass(frozen=True, eq=False)
class Plan:
    """A grid matrix, the route of its edge values, and who takes which."""

    matrix: GridMatrix
    route: EdgeRoute
    index: tuple[Tensor, ...]

    def valued(self, value: Tensor) -> GridMatrix:
        """Returns the matrix with fixed edge values `[e]` put in place."""
        tile = self.matrix.tile.with_values(self.route.carry(value), self.index)
        m = self.matrix
        return GridMatrix(tile, m.link_in, m.link_out, m.fiber)

    def to(self, device: torch.device) -> Plan:
        """Returns the same plan on another device."""
        index = tuple(i.to(device) for i in self.index)
        return Plan(self.matrix.to(device), self.route.to(device), index)

    def matmul(self, x: Tensor, value: Tensor) -> Tensor:
        """Returns the product with trainable own edge values `[e]`."""
        return self.matrix.matmul(x, self.route.carry(value), index=self.index)


def build_plan(
    source_gid: Tensor,
    target_gid: Tensor,
    partition: Partition,
    mesh: Mesh,
    oblivious: bool = False,
) -> Plan:
    """Plans the products of a matrix with a nonzero (target, source) per edge.

    Args:
        source_gid: sources of the edges owned here `[e]`.
        target_gid: their targets `[e]`, nodes of this rank.
        partition: who owns which node.
        mesh: the grid.
        oblivious: exchange whole blocks, as CAGNET's sparsity-oblivious products do.
    """
    route = _plan_route(source_gid, partition, mesh)
    source, target = (_carried(ids, route) for ids in (source_gid, target_gid))
    own_gid, rows = _fiber_rows(partition, mesh)
    cols_in = _Side.plan(source, own_gid, 0, partition, mesh, oblivious)
    rows_out = _Side.plan(target, own_gid, 1, partition, mesh, oblivious)
    tile, index = _tile(rows_out, cols_in, len(own_gid))
    fiber = FiberSplit(mesh.fiber, rows)
    return Plan(GridMatrix(tile, cols_in.halo, rows_out.halo, fiber), route, index)


def _carried(gid: Tensor, route: EdgeRoute) -> Tensor:
    return gid if route.local else route.carry(gid)


def _coordinate(owner: Tensor, axis: int, mesh: Mesh) -> Tensor:
    _, s, p = mesh.grid
    return owner // (s * p) if axis == 0 else owner // p % s


def _plan_route(source_gid: Tensor, partition: Partition, mesh: Mesh) -> EdgeRoute:
    _, s, p = mesh.grid
    if s * p == 1:
        return EdgeRoute(mesh.world, source_gid[:0], (), (), local=True)
    j = _coordinate(partition.owner_of(source_gid), 1, mesh)
    order = torch.argsort(j, stable=True)
    sizes = torch.bincount(j, minlength=s).tolist()
    slot = torch.cat([part for b in order.split(sizes) for part in [b] * p])
    counts = [0] * mesh.size
    first = mesh.row.rank * s * p
    for rank in range(s * p):
        counts[first + rank] = sizes[rank // p]
    back = wire.exchange_counts(counts, mesh.world)
    return EdgeRoute(mesh.world, slot, tuple(counts), tuple(back))


def _fiber_rows(partition: Partition, mesh: Mesh) -> tuple[Tensor, tuple[int, ...]]:
    p = mesh.fiber.size
    first = mesh.rank - mesh.fiber.rank
    parts = [partition.gids(first + k) for k in range(p)]
    return torch.cat(parts), tuple(len(part) for part in parts)


@dataclass(frozen=True, eq=False)
class _Side:
    """One side of a block: which edges end on own rows, which on others', and where.

    Shapes: away [b] bool, slot [b] place among own rows or among the others'.
    """

    away: Tensor
    slot: Tensor
    count: int
    halo: Halo

    @staticmethod
    def plan(
        gid: Tensor,
        own_gid: Tensor,
        axis: int,
        partition: Partition,
        mesh: Mesh,
        oblivious: bool,
    ) -> _Side:
        line = (mesh.row, mesh.col)[axis]
        place = _coordinate(partition.owner_of(gid), axis, mesh)
        away = place != line.rank
        slot = torch.empty_like(gid)
        slot[~away] = _position(gid[~away], own_gid)
        want, counts = (
            _every_row(own_gid, line)
            if oblivious
            else _needed(gid[away], place[away], line)
        )
        slot[away] = _position(gid[away], want)
        halo = Halo.build(want, counts, own_gid, line, dense=oblivious)
        return _Side(away, slot, len(want), halo)


def _position(gid: Tensor, among: Tensor) -> Tensor:
    order = torch.argsort(among)
    return order[torch.searchsorted(among[order], gid)] if len(gid) else gid


def _needed(gid: Tensor, place: Tensor, line: Axis) -> tuple[Tensor, list[int]]:
    wanted, where = torch.unique(gid, return_inverse=True)
    owner = torch.empty_like(wanted)
    owner[where] = place
    order = torch.argsort(owner, stable=True)
    return wanted[order], torch.bincount(owner, minlength=line.size).tolist()


def _every_row(own_gid: Tensor, line: Axis) -> tuple[Tensor, list[int]]:
    sizes = [row[0] for row in wire.all_gather_counts([len(own_gid)], line)]
    every = wire.all_gather_rows(own_gid, sizes, line, "plan").split(sizes)
    others = [part if i != line.rank else part[:0] for i, part in enumerate(every)]
    return torch.cat(others), [len(part) for part in others]


def _tile(rows: _Side, cols: _Side, own: int) -> tuple[Tile, tuple[Tensor, ...]]:
    blocks, index = [], []
    for row_away in (False, True):
        for col_away in (False, True):
            edge = torch.nonzero(
                (rows.away == row_away) & (cols.away == col_away)
            ).flatten()
            shape = (rows.count if row_away else own, cols.count if col_away else own)
            pattern, order = Pattern.build(rows.slot[edge], cols.slot[edge], shape)
            blocks.append(CSR(pattern))
            index.append(edge.index_select(0, order).to(order.dtype))
    return Tile(*blocks), tuple(index)

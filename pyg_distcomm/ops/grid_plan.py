"""Plans a GridMatrix from the edges that each rank owns; collective, once per graph.

An `EdgeRoute` moves edge values to the blocks that use them.

[Note: rows or sums] Rank a needs, from rank b, the product of a block B with b's rows. For a
nonzero B[v, u], either row x_u is sent to a, or b computes the partial sum of row v and sends
it to a; one row or sum serves all nonzeros of its column or row. The fewest words are a minimum
vertex cover of the bipartite graph of B's nonzeros ([Zhuang25] Sec. IV), by Konig's theorem as
many as a maximum matching has edges: never more than B's nonempty columns, or its nonempty
rows. Nonzeros whose row is in the cover, and whose column is not, are handed to b once, when
the product is planned. In the backward pass sums travel where rows did, and rows where sums
did: the same number of words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm import kernels
from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.collectives import Axis
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.halo.halo import Halo, Link, plan_link
from pyg_distcomm.kernels.core_ops import offset_dtype
from pyg_distcomm.ops.csr import CSR, LocalBlocks, Pattern
from pyg_distcomm.ops.grid_matrix import FiberSplit, GridMatrix, Links
from pyg_distcomm.partition.partition import Partition


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        send: Sequence[int],
        recv: Sequence[int],
        axis: Axis,
        op: str,
    ) -> Tensor:
        ctx.plan, ctx.transposed = (send, recv, axis, op), op.endswith("_transpose")
        return collectives.all_to_all(x, send, recv, axis, op).wait()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None, None]:
        send, recv, axis, op = ctx.plan
        back = op.removesuffix("_transpose") if ctx.transposed else f"{op}_transpose"
        return _all_to_all(g, recv, send, axis, back), None, None, None, None


def _all_to_all(
    x: Tensor, send: Sequence[int], recv: Sequence[int], axis: Axis, op: str
) -> Tensor:
    """Sends row blocks to the ranks of an axis; the gradient goes back the same way."""
    return x if axis.size == 1 else _AllToAll.apply(x, send, recv, axis, op)


@dataclass(frozen=True, eq=False)
class EdgeRoute:
    """Moves edge values from the owners of their targets to the blocks that use them.

    Shapes (this rank; e own edges, b edges of its block): send_slot [sum(send_counts)],
    keep_slot [k]; values that stay precede those that arrive.
    On (P, 1, 1) owner and block are the same rank, and nothing moves.

    Args:
        axis: the axis over which values travel.
        send_slot, send_counts, recv_counts: the values to send, and the counts per rank.
        local: whether nothing moves.
        keep_slot: the values that stay, if any.
        then: the route that values take afterwards.
    """

    axis: Axis
    send_slot: Tensor
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    local: bool = False
    keep_slot: Tensor | None = None
    then: EdgeRoute | None = None

    def carry(self, value: Tensor) -> Tensor:
        """Returns the block's values `[b]` of own edge values `[e]`, differentiably."""
        moved = value if self.local else self._moved(value)
        return moved if self.then is None else self.then.carry(moved)

    def _moved(self, value: Tensor) -> Tensor:
        rows = value.index_select(0, self.send_slot)
        arrived = _all_to_all(
            rows, self.send_counts, self.recv_counts, self.axis, "edges"
        )
        if self.keep_slot is None:
            return arrived
        return torch.cat([value.index_select(0, self.keep_slot), arrived])

    def to(self, device: torch.device) -> EdgeRoute:
        """Returns the same route with its indices on another device."""
        return replace(
            self,
            send_slot=self.send_slot.to(device),
            keep_slot=None if self.keep_slot is None else self.keep_slot.to(device),
            then=None if self.then is None else self.then.to(device),
        )

    def followed_by(self, then: EdgeRoute) -> EdgeRoute:
        """Returns this route followed by another."""
        after = then if self.then is None else self.then.followed_by(then)
        return replace(self, then=after)


HALOS = ("auto", "cover", "rows", "sums", "blocks")
PACKING = 1 / 16  # the cost of copying a row into a message, relative to sending it


def check_halo(halo: str) -> str:
    """Returns the kind of exchange if it is known; else raises an error that lists them.

    "rows" sends the rows that nonzeros need, "sums" sends partial sums instead, "cover" the
    fewest of both; "blocks" sends whole blocks; "auto" is "cover", or "blocks" where they
    are cheaper (see `blocks_are_cheaper`).
    """
    if halo not in HALOS:
        raise ValueError(f"halo must be one of {HALOS}, got {halo!r}")
    return halo


def offloaded_nonzeros(
    sent_if_kept: Tensor, sent_if_handed: Tensor, peer: Tensor, halo: str
) -> tuple[Tensor, int]:
    """Returns which nonzeros are handed to the other rank, and how many words then travel.

    Args:
        sent_if_kept: for each nonzero, the id of its column, whose row travels if the nonzero
            stays (over the col axis the id of its row, whose sum travels).
        sent_if_handed: the id of what travels if it is handed over.
        peer: the other rank.
        halo: see `check_halo`.

    Shapes: sent_if_kept, sent_if_handed, peer [e] -> bool [e], words per feature.
    """
    if not len(sent_if_kept):
        return torch.zeros(0, dtype=torch.bool), 0
    left, near_slot = torch.unique(sent_if_kept, return_inverse=True)
    if halo in ("rows", "blocks"):
        return torch.zeros(len(sent_if_kept), dtype=torch.bool), len(left)
    pair, far_slot = torch.unique(
        peer * (sent_if_handed.max() + 1) + sent_if_handed, return_inverse=True
    )
    if halo == "sums":
        return torch.ones(len(sent_if_kept), dtype=torch.bool), len(pair)
    ptr, to, _ = kernels.coo_to_csr(near_slot, far_slot, len(left))
    near_in, far_in = kernels.minimum_cover(ptr, to, len(pair))
    return ~near_in[near_slot], int(near_in.sum() + far_in.sum())


def blocks_are_cheaper(words: int, own: int, axis: Axis, halo: str) -> bool:
    """Tells whether whole blocks are sent, the same on all ranks of an axis; collective.

    Blocks need no copy of single rows: they are cheaper if every rank's halo, with that copy,
    costs at least as much as the blocks of the other ranks.
    """
    if halo != "auto" or axis.size == 1:
        return halo == "blocks"
    rows = collectives.all_gather_counts([words, own], axis)
    total = sum(own for _, own in rows)
    return total > 0 and all(
        words * (1 + PACKING) >= total - own for words, own in rows
    )


def coordinate(owner: Tensor, axis: int, mesh: Mesh) -> Tensor:
    """Returns the process row (axis 0) or column (1) of ranks."""
    _, s, p = mesh.grid
    return owner // (s * p) if axis == 0 else owner // p % s


@dataclass(frozen=True, eq=False)
class Edges:
    """Nonzeros, by their column and row. Shapes: source, target [e]."""

    source: Tensor
    target: Tensor

    def __len__(self) -> int:
        return len(self.source)

    def of(self, which: Tensor) -> Edges:
        """Returns the nonzeros at `which`."""
        return Edges(self.source[which], self.target[which])

    def but(self, handed_over: Tensor) -> Edges:
        """Returns the other nonzeros; without a copy if none is handed over."""
        return self.of(~handed_over) if bool(handed_over.any()) else self


@dataclass(frozen=True, eq=False)
class BlockPlan:
    """Plans the block A_ij of this rank, and its exchanges.

    [Note: handing over] Over the row axis, nonzeros with ghost columns are shared out
    with the process rows that own these: either they stay, and the column travels here,
    or they are handed over, and come back as sums. Then, over the col axis, nonzeros with
    out rows are shared out with the process columns that own those: either they stay,
    and their sums travel there, or they are handed over, and their columns, own or ghost,
    are forwarded. Rows that take sums from the row axis are paid for already.

    Args:
        partition: the owner of each node.
        mesh: the grid.
        own_gid: nodes of ranks (i, j, *).
        halo: the kind of exchange; see `check_halo`.
    """

    partition: Partition
    mesh: Mesh
    own_gid: Tensor
    halo: str

    def plan(
        self, edges: Edges
    ) -> tuple[LocalBlocks, tuple[Tensor, ...], Links, list[EdgeRoute]]:
        """Returns the blocks, the index of values, the exchanges, and the routes of values."""
        row, col = self.mesh.row, self.mesh.col
        nothing = edges.target[:0]
        handed_over, whole_in = self._choose_handed_over(
            edges.source, edges.target, 0, nothing
        )
        hop, received = self._hand_over(edges, handed_over, edges.source, 0, 0)
        summed = edges.target[handed_over]
        edges = edges.but(handed_over)
        handed_over, whole_out = self._choose_handed_over(
            edges.target, edges.source, 1, summed
        )
        hop_out, received_far = self._hand_over(
            edges, handed_over, edges.target, 1, len(received)
        )
        forwarded = edges.source[handed_over]
        edges = edges.but(handed_over)
        columns = _concatenated(edges.source, forwarded)
        ghost, ghost_gid = self._link(columns, 0, self.own_gid, whole_in)
        rows = _concatenated(edges.target, summed)
        out, out_gid = self._link(rows, 1, self.own_gid, whole_out)
        del columns, forwarded, rows, summed, handed_over
        sums, sum_gid = _silent_link(row, len(self.own_gid) + len(out_gid))
        if hop is not None:
            land = torch.cat([self.own_gid, out_gid])
            sums, sum_gid = self._link(received.target, 0, land)
        forward, far_gid = _silent_link(col, len(self.own_gid) + len(ghost_gid))
        if hop_out is not None:
            held = torch.cat([self.own_gid, ghost_gid])
            forward, far_gid = self._link(received_far.source, 1, held)
        away = [
            self._place(edges.target, 1) != col.rank,
            self._place(edges.source, 0) != row.rank,
        ]
        built = [
            _block(edges, rows, cols, (away[0] == i) & (away[1] == j))
            for i, rows in enumerate((self.own_gid, out_gid))
            for j, cols in enumerate((self.own_gid, ghost_gid))
        ]
        built.append(_block(received, sum_gid, self.own_gid, None, len(edges)))
        behind = len(edges) + len(received)
        built.append(_block(received_far, self.own_gid, far_gid, None, behind))
        tile, index = (
            LocalBlocks(*(csr for csr, _ in built)),
            tuple(i for _, i in built),
        )
        hops = [one for one in (hop, hop_out) if one is not None]
        return tile, index, Links(ghost, out, sums, forward), hops

    def _place(self, gid: Tensor, axis: int) -> Tensor:
        return coordinate(self.partition.owner_of(gid), axis, self.mesh)

    def _choose_handed_over(
        self, sent_if_kept: Tensor, sent_if_handed: Tensor, axis: int, paid_gid: Tensor
    ) -> tuple[Tensor, bool]:
        """Returns which nonzeros are handed over, and whether whole blocks are exchanged.

        Args:
            sent_if_kept: for each nonzero the column (axis 0) or row (axis 1); it can be
                handed to the owner of that.
            sent_if_handed: for each nonzero the row (axis 0) or column (axis 1).
            axis: 0 or 1.
            paid_gid: rows that travel over the axis in any case.
        """
        line = (self.mesh.row, self.mesh.col)[axis]
        place = self._place(sent_if_kept, axis)
        away = place != line.rank
        open_ = away & ~torch.isin(sent_if_kept, paid_gid)
        paid_gid = torch.unique(paid_gid)
        paid = int((self._place(paid_gid, axis) != line.rank).sum())
        chosen, words = offloaded_nonzeros(
            sent_if_kept[open_], sent_if_handed[open_], place[open_], self.halo
        )
        handed_over = torch.zeros(len(sent_if_kept), dtype=torch.bool)
        whole = blocks_are_cheaper(words + paid, len(self.own_gid), line, self.halo)
        if not whole:
            handed_over[open_] = chosen
        return handed_over, whole

    def _hand_over(
        self, edges: Edges, handed_over: Tensor, shared: Tensor, axis: int, after: int
    ) -> tuple[EdgeRoute | None, Edges]:
        """Sends nonzeros to other ranks; returns the route of their values and those received.

        The route is None if no rank of the axis hands any over.

        Args:
            edges: nonzeros of this rank.
            handed_over: which of them are sent.
            shared: for each nonzero the column or row whose owner receives it.
            axis: 0 or 1.
            after: the number of values that follow those of `edges`, and stay.
        """
        line = (self.mesh.row, self.mesh.col)[axis]
        counts_handed = collectives.all_gather_counts([int(handed_over.sum())], line)
        if not any(row[0] for row in counts_handed):
            return None, edges.of(handed_over)
        slot = torch.nonzero(handed_over).flatten()
        place = self._place(shared[slot], axis)
        counts = torch.bincount(place, minlength=line.size).tolist()
        slot = slot[torch.argsort(place, stable=True)]
        back = collectives.exchange_counts(counts, line)
        stay = torch.nonzero(~handed_over).flatten()
        stay = torch.cat([stay, torch.arange(len(edges), len(edges) + after)])
        hop = EdgeRoute(line, slot, tuple(counts), tuple(back), keep_slot=stay)
        moving_only = replace(hop, keep_slot=None)
        return hop, Edges(
            moving_only.carry(edges.source), moving_only.carry(edges.target)
        )

    def _link(
        self, gid: Tensor, axis: int, have_gid: Tensor, dense: bool = False
    ) -> tuple[Link, Tensor]:
        """Plans the exchange of the given nodes that other ranks own."""
        line = (self.mesh.row, self.mesh.col)[axis]
        if dense:
            want, counts = _rows_of_others(self.own_gid, line)
        else:
            place = self._place(gid, axis)
            away = place != line.rank
            want, counts = _by_owner(gid[away], place[away], line)
        return plan_link(want, counts, have_gid, line, dense)


def _block(
    edges: Edges,
    row_gid: Tensor,
    col_gid: Tensor,
    which: Tensor | None,
    first: int = 0,
) -> tuple[CSR, Tensor]:
    """Builds a block of some nonzeros, and the index of each value."""
    edge = (
        None if which is None or bool(which.all()) else torch.nonzero(which).flatten()
    )
    if edge is not None:
        edges = edges.of(edge)
    row, col = _positions(edges.target, row_gid), _positions(edges.source, col_gid)
    pattern, order = Pattern.build(row, col, (len(row_gid), len(col_gid)))
    del row, col, edges
    slot = order if edge is None else edge.index_select(0, order).to(order.dtype)
    return CSR(pattern), slot.add_(first)


def _concatenated(some: Tensor, more: Tensor) -> Tensor:
    return torch.cat([some, more]) if len(more) else some


def _positions(gid: Tensor, among: Tensor) -> Tensor:
    """Returns the positions of nodes in a list, in the narrowest index type."""
    order = torch.argsort(among).to(offset_dtype(len(among)))
    found = torch.searchsorted(among[order], gid, out_int32=order.dtype == torch.int32)
    return order.index_select(0, found)


def _by_owner(gid: Tensor, place: Tensor, line: Axis) -> tuple[Tensor, list[int]]:
    wanted, where = torch.unique(gid, return_inverse=True)
    owner = torch.empty_like(wanted)
    owner[where] = place
    order = torch.argsort(owner, stable=True)
    return wanted[order], torch.bincount(owner, minlength=line.size).tolist()


def _rows_of_others(own_gid: Tensor, line: Axis) -> tuple[Tensor, list[int]]:
    sizes = [row[0] for row in collectives.all_gather_counts([len(own_gid)], line)]
    gathered = collectives.all_gather_rows(own_gid, sizes, line, "plan").split(sizes)
    others = [part if i != line.rank else part[:0] for i, part in enumerate(gathered)]
    return torch.cat(others), [len(part) for part in others]


def _silent_link(line: Axis, rows: int) -> tuple[Link, Tensor]:
    none = torch.empty(0, dtype=torch.int64)
    counts = (0,) * line.size
    return Halo(line, none, counts, counts, rows, silent=True), none


@dataclass(frozen=True, eq=False)
class GridPlan:
    """Holds a grid matrix, the route of its edge values, and their index by nonzero."""

    matrix: GridMatrix
    route: EdgeRoute
    index: tuple[Tensor, ...]

    def valued(self, value: Tensor) -> GridMatrix:
        """Returns the matrix with fixed edge values `[e]`."""
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
        partition: the owner of each node.
        mesh: the grid.
        halo: the kind of exchange; see `check_halo`.
    """
    route = _plan_route(source_gid, partition, mesh)
    edges = Edges(*(route.carry(ids) for ids in (source_gid, target_gid)))
    own_gid, rows = _fiber_rows(partition, mesh)
    block = BlockPlan(partition, mesh, own_gid, check_halo(halo))
    tile, index, links, hops = block.plan(edges)
    matrix = GridMatrix(tile, links, FiberSplit(mesh.fiber, rows))
    for hop in hops:
        route = route.followed_by(hop)
    return GridPlan(matrix, route, index)


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

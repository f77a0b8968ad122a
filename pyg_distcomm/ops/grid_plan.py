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
from pyg_distcomm.comm.rows import narrowed
from pyg_distcomm.halo.halo import Halo, Link, plan_link
from pyg_distcomm.kernels import memory
from pyg_distcomm.kernels.core_ops import MAX_INT32, offset_dtype
from pyg_distcomm.ops.csr import CSR, LocalBlocks, Pattern
from pyg_distcomm.ops.grid_matrix import FiberSplit, GridMatrix, Links
from pyg_distcomm.partition.partition import PIECE, Partition, pieces


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

    Shapes (this rank; e own edges, b edges of its block): send_slot [sum(send_counts)].
    On (P, 1, 1) owner and block are the same rank, and nothing moves.

    Args:
        axis: the axis over which values travel.
        send_slot, send_counts, recv_counts: the values to send, and the counts per rank.
        local: whether nothing moves.
        keeps: whether all values stay as well, before those that arrive.
        then: the route that values take afterwards.
    """

    axis: Axis
    send_slot: Tensor
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    local: bool = False
    keeps: bool = False
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
        return torch.cat([value, arrived]) if self.keeps else arrived

    def to(self, device: torch.device) -> EdgeRoute:
        """Returns the same route with its indices on another device."""
        return replace(
            self,
            send_slot=self.send_slot.to(device),
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
    size = int(sent_if_handed.max()) + 1
    left, near_slot = distinct(sent_if_kept, int(sent_if_kept.max()) + 1)
    if halo in ("rows", "blocks"):
        return torch.zeros(len(sent_if_kept), dtype=torch.bool), len(left)
    sizes = (int(peer.max()) + 1) * size
    if sizes > MAX_INT32:
        peer = peer.long()
    pair, far_slot = distinct(peer * size + sent_if_handed, sizes)
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


def distinct(ids: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Returns the distinct ids, ascending, and the position of each id among them.

    As `torch.unique(ids, return_inverse=True)`, without a sort where ids are dense.

    Shapes: ids [e] in 0 .. size-1 -> int64 [k], and [e] in the narrowest index type.
    """
    if size > 8 * len(ids):
        found, slot = torch.unique(ids, return_inverse=True)
        return found.long(), slot.to(offset_dtype(len(found)))
    found = listed(ids, size)
    return found, numbered(ids, found, size)


def listed(ids: Tensor, size: int) -> Tensor:
    """Returns the distinct ids, all of them below `size`, ascending, int64."""
    if size > 8 * len(ids):
        return ids.unique().long()
    seen = torch.zeros(size, dtype=torch.bool)
    for part in pieces(ids):
        seen[part.long()] = True
    return seen.nonzero().flatten()


def numbered(
    ids: Tensor, among: Tensor, size: int, out: Tensor | None = None
) -> Tensor:
    """Returns the positions of ids `[e]` in a list of distinct ids, all of them below `size`.

    In the narrowest index type; written to `out`, if it is given.
    """
    if out is None:
        out = torch.empty(len(ids), dtype=offset_dtype(len(among)))
    ascends = bool((among.diff() > 0).all())
    place = None if ascends else torch.argsort(among)
    find = kernels.rank_select_index(among if place is None else among[place], size)
    for part, to in zip(pieces(ids), out.split(PIECE), strict=True):
        found = find(part)
        to.copy_(found if place is None else place[found])
    return out


@dataclass(frozen=True, eq=False)
class Edges:
    """Nonzeros, by the positions of their column and row in lists of nodes.

    Shapes: ends [2, e], columns and rows, in the narrowest index type; columns and rows hold
    the ids of nodes, own ones first.
    """

    ends: Tensor
    columns: Tensor
    rows: Tensor

    def __len__(self) -> int:
        return self.ends.size(1)

    @property
    def source(self) -> Tensor:
        """The column of each nonzero `[e]`."""
        return self.ends[0]

    @property
    def target(self) -> Tensor:
        """The row of each nonzero `[e]`."""
        return self.ends[1]

    @staticmethod
    def among(gids: Sequence[Tensor], nodes: Sequence[Tensor], size: int) -> Edges:
        """Returns the nonzeros of columns and rows with these ids, in lists of nodes.

        Args:
            gids: the ids of the columns and rows of nonzeros, below `size`.
            nodes: ids of nodes, of columns and of rows; those of all nonzeros are there.
            size: the number of nodes of the graph.
        """
        dtype = offset_dtype(max(map(len, nodes)))
        ends = torch.empty(2, len(gids[0]), dtype=dtype)
        for gid, among, out in zip(gids, nodes, ends, strict=True):
            numbered(gid, among, size, out)
        return Edges(ends, *nodes)

    @staticmethod
    def of_block(gids: Sequence[Tensor], own_gid: Tensor, size: int) -> Edges:
        """Returns the nonzeros of columns and rows with these ids, below `size`."""
        nodes = []
        for gid in gids:
            found = listed(gid, size)
            nodes.append(torch.cat([own_gid, found[~torch.isin(found, own_gid)]]))
        return Edges.among(gids, nodes, size)


HANDED_OVER = 4  # the mark of a nonzero that another rank multiplies; blocks are 0 .. 3


@dataclass(frozen=True, eq=False)
class BlockPlan:
    """Plans the block A_ij of this rank, and its exchanges.

    [Note: handing over] Over the row axis, nonzeros with ghost columns are shared out
    with the process rows that own these: either they stay, and the column travels here,
    or they are handed over, and come back as sums. Then, over the col axis, nonzeros with
    out rows are shared out with the process columns that own those: either they stay,
    and their sums travel there, or they are handed over, and their columns, own or ghost,
    are forwarded. Rows that take sums from the row axis are paid for already.

    [Note: planning in little memory] Beside its nonzeros, at 8 bytes each, a plan holds a mark
    of each, and builds one block at a time: at its peak some 35 bytes for each nonzero, while
    the blocks keep 8. What is asked of a node, such as its owner, is asked once for each
    distinct one, not for each nonzero.

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
        row, col, n = self.mesh.row, self.mesh.col, len(self.own_gid)
        handed, whole_in = self._choose_handed_over(edges, 0)
        hop, received = self._hand_over(edges, handed, 0)
        handed_out, whole_out = self._choose_handed_over(edges, 1, handed)
        hop_out, received_far = self._hand_over(edges, handed_out, 1)
        wanted = _away(edges.source, handed, n, len(edges.columns))
        ghost, ghost_gid = self._link(edges.columns[wanted], 0, self.own_gid, whole_in)
        column = _places(edges.columns, wanted, ghost_gid)
        wanted = _away(edges.target, handed_out, n, len(edges.rows))
        out, out_gid = self._link(edges.rows[wanted], 1, self.own_gid, whole_out)
        place = _places(edges.rows, wanted, out_gid)
        sums, sum_gid = _silent_link(row, n + len(out_gid))
        if hop is not None:
            land = torch.cat([self.own_gid, out_gid])
            sums, sum_gid = self._link(received[1], 0, land)
        forward, far_gid = _silent_link(col, n + len(ghost_gid))
        if hop_out is not None:
            held = torch.cat([self.own_gid, ghost_gid])
            forward, far_gid = self._link(received_far[0], 1, held)
        mark = (edges.target >= n).to(torch.uint8).mul_(2).add_(edges.source >= n)
        mark.masked_fill_(handed.logical_or_(handed_out), HANDED_OVER)
        del handed, handed_out
        memory.give_back()  # what the choice has freed
        sides = ((self.own_gid, None), (out_gid, place))
        others = ((self.own_gid, None), (ghost_gid, column))
        built = [
            _block(edges, mark == 2 * i + j, (at, to), (len(rows), len(columns)))
            for i, (rows, at) in enumerate(sides)
            for j, (columns, to) in enumerate(others)
        ]
        built.append(_block_of(received, sum_gid, self.own_gid, len(edges)))
        behind = len(edges) + len(received[0])
        built.append(_block_of(received_far, self.own_gid, far_gid, behind))
        blocks, index = zip(*built, strict=True)
        hops = [one for one in (hop, hop_out) if one is not None]
        return LocalBlocks(*blocks), index, Links(ghost, out, sums, forward), hops

    def _place(self, gid: Tensor, axis: int) -> Tensor:
        return coordinate(self.partition.owner_of(gid), axis, self.mesh)

    def _choose_handed_over(
        self, edges: Edges, axis: int, taken: Tensor | None = None
    ) -> tuple[Tensor, bool]:
        """Returns which nonzeros are handed over, and whether whole blocks are exchanged.

        Args:
            edges: the nonzeros. One can be handed to the owner of its column (axis 0) or row
                (axis 1), which travels if it stays; its row or column if it is handed over.
            axis: 0 or 1.
            taken: the nonzeros that have been handed over before, whose rows travel over the
                axis in any case.
        """
        line, n = (self.mesh.row, self.mesh.col)[axis], len(self.own_gid)
        ends = (edges.source, edges.target)
        kept, far = ends[axis], ends[1 - axis]
        nodes = (edges.columns, edges.rows)[axis]
        open_, paid = kept >= n, torch.zeros(len(nodes), dtype=torch.bool)
        if taken is not None and bool(taken.any()):
            paid[kept[taken].long()] = True
            open_ &= ~(taken | paid.index_select(0, kept))
        handed_over = torch.zeros(len(kept), dtype=torch.bool)
        chosen, words = handed_over[:0], 0
        if bool(open_.any()):
            place, mine = self._place(nodes, axis).to(torch.int32), kept[open_]
            place = place.index_select(0, mine)
            chosen, words = offloaded_nonzeros(mine, far[open_], place, self.halo)
        words += int(paid[n:].sum())
        whole = blocks_are_cheaper(words, n, line, self.halo)
        if not whole and len(chosen):
            handed_over.masked_scatter_(open_, chosen)
        return handed_over, whole

    def _hand_over(
        self, edges: Edges, handed_over: Tensor, axis: int
    ) -> tuple[EdgeRoute | None, tuple[Tensor, Tensor]]:
        """Sends nonzeros to the owners of their columns (axis 0) or rows (axis 1).

        Returns:
            The route of their values, None if no rank of the axis hands any over; the ids of
            the columns and rows of those received.
        """
        line = (self.mesh.row, self.mesh.col)[axis]
        counts_handed = collectives.all_gather_counts([int(handed_over.sum())], line)
        if not any(row[0] for row in counts_handed):
            none = self.own_gid[:0]
            return None, (none, none)
        slot = _where(handed_over)
        source = edges.columns.index_select(0, edges.source.index_select(0, slot))
        target = edges.rows.index_select(0, edges.target.index_select(0, slot))
        place = self._place((source, target)[axis], axis)
        counts = torch.bincount(place, minlength=line.size).tolist()
        order = torch.argsort(place, stable=True)
        back = collectives.exchange_counts(counts, line)
        n, how = self.partition.num_nodes, (counts, back, line, "edges")
        ids = [narrowed(end[order], n) for end in (source, target)]
        came = [_all_to_all(end, *how).long() for end in ids]
        hop = EdgeRoute(line, slot[order], tuple(counts), tuple(back), keeps=True)
        return hop, (came[0], came[1])

    def _link(
        self, gid: Tensor, axis: int, have_gid: Tensor, dense: bool = False
    ) -> tuple[Link, Tensor]:
        """Plans the exchange of the given nodes that other ranks own."""
        line = (self.mesh.row, self.mesh.col)[axis]
        if dense:
            sizes = collectives.all_gather_counts([len(self.own_gid)], line)
            counts = [count for (count,) in sizes]
            ids = collectives.all_gather_rows(self.own_gid, counts, line, "plan")
        else:
            ids = gid.unique()
            owner = self._place(ids, axis)
            ids = ids[torch.argsort(owner, stable=True)]
            counts = torch.bincount(owner, minlength=line.size).tolist()
        parts = enumerate(ids.split(counts))
        want = [part if i != line.rank else part[:0] for i, part in parts]
        return plan_link(torch.cat(want), [*map(len, want)], have_gid, line, dense)


def _away(ids: Tensor, but: Tensor, own: int, size: int) -> Tensor:
    """Returns the distinct ids from `own` on, below `size`, of nonzeros other than `but`."""
    seen = torch.zeros(size, dtype=torch.bool)
    for part, left_out in zip(ids.split(PIECE), but.split(PIECE), strict=True):
        seen[part[~left_out].long()] = True
    seen[:own] = False
    return seen.nonzero().flatten()


def _places(nodes: Tensor, wanted: Tensor, among: Tensor) -> Tensor:
    """Returns a table of the positions of wanted nodes in a list, by positions in `nodes`."""
    table = torch.zeros(len(nodes), dtype=offset_dtype(len(among)))
    table[wanted] = _positions(nodes[wanted], among)
    return table


def _where(which: Tensor) -> Tensor:
    """Returns the positions that are set, in the narrowest index type."""
    out = torch.empty(int(which.sum()), dtype=offset_dtype(len(which)))
    at = 0
    for k, part in enumerate(which.split(PIECE)):
        found = part.nonzero().flatten().add_(k * PIECE)
        out[at : at + len(found)] = found
        at += len(found)
    return out


def _block(
    edges: Edges,
    which: Tensor,
    places: tuple[Tensor | None, Tensor | None],
    shape: tuple[int, int],
) -> tuple[CSR, Tensor]:
    """Builds a block of some nonzeros, and the index of each value.

    Args:
        edges: all nonzeros of this rank.
        which: those of the block.
        places: tables of the positions of rows, and of columns; None of own ones.
        shape: the numbers of its rows and columns.
    """
    whole = bool(which.all())
    edge = None if whole else _where(which)
    ends = []
    for ids, table in zip((edges.target, edges.source), places, strict=True):
        some = ids if edge is None else ids.index_select(0, edge)
        ends.append(some if table is None else table.index_select(0, some))
    pattern, order = Pattern.build(ends[0], ends[1], shape)
    del ends
    slot = order if edge is None else edge.index_select(0, order)
    del edge, order
    memory.give_back()
    return CSR(pattern), slot


def _block_of(
    gids: tuple[Tensor, Tensor], row_gid: Tensor, col_gid: Tensor, first: int
) -> tuple[CSR, Tensor]:
    """Builds the block of nonzeros of other ranks, whose values begin at `first`."""
    col, row = _positions(gids[0], col_gid), _positions(gids[1], row_gid)
    pattern, order = Pattern.build(row, col, (len(row_gid), len(col_gid)))
    return CSR(pattern), order.add_(first)


def _positions(gid: Tensor, among: Tensor) -> Tensor:
    """Returns the positions of nodes in a list, in the narrowest index type."""
    order = torch.argsort(among).to(offset_dtype(len(among)))
    found = torch.searchsorted(among[order], gid, out_int32=order.dtype == torch.int32)
    return order.index_select(0, found)


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
    edges: Edges, partition: Partition, mesh: Mesh, halo: str = "auto"
) -> GridPlan:
    """Plans the products of a matrix with a nonzero (target, source) per edge.

    Args:
        edges: the edges owned here; own columns and rows are the nodes of this rank.
        partition: the owner of each node.
        mesh: the grid.
        halo: the kind of exchange; see `check_halo`.
    """
    first = mesh.rank - mesh.fiber.rank
    parts = [partition.gids(first + k) for k in range(mesh.fiber.size)]
    own_gid, rows = torch.cat(parts), tuple(len(part) for part in parts)
    route = EdgeRoute(mesh.world, own_gid[:0], (), (), local=True)
    if mesh.grid[1:] != (1, 1):
        route = _plan_route(edges, partition, mesh)
        ends = (edges.columns, edges.source), (edges.rows, edges.target)
        moved = [route.carry(nodes.index_select(0, ids)) for nodes, ids in ends]
        edges = Edges.of_block(moved, own_gid, partition.num_nodes)
        del moved
    block = BlockPlan(partition, mesh, own_gid, check_halo(halo))
    tile, index, links, hops = block.plan(edges)
    del edges
    memory.give_back()
    matrix = GridMatrix(tile, links, FiberSplit(mesh.fiber, rows))
    for hop in hops:
        route = route.followed_by(hop)
    return GridPlan(matrix, route, index)


def _plan_route(edges: Edges, partition: Partition, mesh: Mesh) -> EdgeRoute:
    _, s, p = mesh.grid
    j = coordinate(partition.owner_of(edges.columns), 1, mesh).to(torch.int32)
    j = j.index_select(0, edges.source)
    order = torch.argsort(j, stable=True).to(offset_dtype(len(j)))
    sizes = torch.bincount(j, minlength=s).tolist()
    slot = torch.cat([part for b in order.split(sizes) for part in [b] * p])
    counts = [0] * mesh.size
    first = mesh.row.rank * s * p
    for rank in range(s * p):
        counts[first + rank] = sizes[rank // p]
    back = collectives.exchange_counts(counts, mesh.world)
    return EdgeRoute(mesh.world, slot, tuple(counts), tuple(back))

"""Cuts the nodes of a rank into chunks, plans their exchanges, and keeps the rows they read.

[Note: chunks] To a layer, a chunk is like a rank: it has rows of its own, and edges whose
sources may be rows of others. The own rows of a rank are sorted by chunk, and so are its
ghosts, so that a chunk is a contiguous run of rows in every buffer, in every matrix and in
its transpose. In a hybrid, chunk c of the graph is chunk c of every rank.

[Note: sites] A site is one exchange of one layer. Its buffer `mix` has a row for each own
node and each ghost. While a chunk is computed, `mix` holds rows of this epoch for this chunk
and for the chunks before it, and history for the chunks after it, as in [Chen23]. In the
backward pass chunks come in the opposite order. When a chunk is done, its rows of `mix` are
set back to history: then the next chunk finds `mix` as its forward pass did, and can be
recomputed from its input alone.

[Note: pulled gradients] With A_c the rows of chunk c of the matrix that a site multiplies
by, the gradient of rows j is the sum over chunks c of (A_c^T)_j g_c. A site keeps g of all
chunks in one buffer, and pulls: it multiplies rows j of A^T by g. In the backward pass g has
the gradients of the chunks after j; those before j, which have read j's history, are not
known yet, and in their place g holds zeros. That is "surrogate": autograd's gradients, with
history constant. With "scaled", g_c counts twice for all chunks but c, since an edge between
chunks counts in one of two epochs ([Chen23], for paths with one such edge).

The sums for ghosts of chunk j travel to their owners while j is computed, over the transpose
of the link that brought their rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.consistency import check_alike, on_all_ranks
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.graph.topology import LocalGraph, OperatorKind, Topology, gcn_norm
from pyg_distcomm.halo.halo import Halo, Link
from pyg_distcomm.ops.csr import CSR, Pattern
from pyg_distcomm.partition.cutters import cut
from pyg_distcomm.sharded.edges import DistEdgeIndex

# by Pipeline's option `gradient`, the factor of g_c for other chunks
GRADIENTS = {"surrogate": 1.0, "scaled": 2.0}


@dataclass(frozen=True, eq=False)
class ChunkOrder:
    """Rows sorted by chunk: row `order[k]` is at place k; chunk c is at bounds c to c + 1."""

    order: Tensor
    bounds: tuple[int, ...]

    @staticmethod
    def of(chunk: Tensor, chunks: int) -> ChunkOrder:
        """Sorts rows by their chunk `[n]`, stably."""
        sizes = torch.bincount(chunk, minlength=chunks)
        bounds = [0, *sizes.cumsum(0).tolist()]
        return ChunkOrder(torch.argsort(chunk, stable=True), tuple(bounds))

    @property
    def place(self) -> Tensor:
        """The place of each row."""
        out = torch.empty_like(self.order)
        out[self.order] = torch.arange(len(self.order), device=self.order.device)
        return out

    def rows(self, chunk: int) -> slice:
        """The places of a chunk."""
        return slice(self.bounds[chunk], self.bounds[chunk + 1])


@dataclass(frozen=True, eq=False)
class Operator:
    """A matrix, sorted by chunk, that multiplies own and ghost rows.

    Shapes: own [r, n], ghost [r, h]; rows of chunk c are `bounds[c] .. bounds[c + 1]`.
    """

    own: CSR
    ghost: CSR
    bounds: tuple[int, ...]

    @staticmethod
    def build(
        row: Tensor,
        col: Tensor,
        value: Tensor | None,
        bounds: tuple[int, ...],
        counts: tuple[int, int],
    ) -> Operator:
        """Makes the matrix from its entries; columns from n on are ghosts."""
        n, h = counts

        def block(which: Tensor, first: int, width: int) -> CSR:
            shape = bounds[-1], width
            pattern, order = Pattern.build(row[which], col[which] - first, shape)
            part = None if value is None else value[which][order.long()]
            return CSR(pattern, part)

        return Operator(block(col < n, 0, n), block(col >= n, n, h), bounds)

    def rows(self, chunk: int) -> slice:
        """The rows of a chunk."""
        return slice(self.bounds[chunk], self.bounds[chunk + 1])


@dataclass(eq=False)
class ChunkPlan:
    """The plan of this rank's chunks: their nodes, edges, matrices and exchanges.

    Shapes (this rank; n own nodes, h ghosts, e edges, M chunks): own, ghost and edge sort
    n nodes, h ghosts and e edges by chunk; ends [2, e] are sources, which count own places,
    then those of ghosts, and targets, which count own places, in the order of `edge`.

    Args:
        topology: the share.
        own, ghost, edge: own nodes, ghosts and edges, sorted by chunk.
        ends: the ends of edges, by place.
        links: for each chunk, the exchange of its rows among the ranks of a stage.
        all_chunks: the exchange of the rows of all chunks at once.
        crossing: the share of the graph's edges whose ends are in two chunks.
    """

    topology: Topology
    own: ChunkOrder
    ghost: ChunkOrder
    edge: ChunkOrder
    ends: Tensor
    links: tuple[Link, ...]
    all_chunks: Link
    crossing: float = 0.0
    _made: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def chunks(self) -> int:
        """The number of chunks, M."""
        return len(self.links)

    @property
    def mesh(self) -> Mesh:
        """The ranks of a stage."""
        return self.topology.nodes.mesh

    @property
    def counts(self) -> tuple[int, int]:
        """Own nodes and ghosts, n and h."""
        return len(self.own.order), len(self.ghost.order)

    @cached_property
    def edges(self) -> Tensor:
        """Edges `[2, e]` in global ids, sorted by chunk, on the CPU."""
        ends = self.topology.source_gid, self.topology.target_gid
        return torch.stack(ends)[:, self.edge.order.cpu()]

    @cached_property
    def gid(self) -> Tensor:
        """Ids of own nodes and ghosts, by place, on the CPU."""
        topology = self.topology
        own = topology.nodes.gid[self.own.order.cpu()]
        return torch.cat([own, topology.locals.ghost_gid[self.ghost.order.cpu()]])

    def local_edges(self, chunk: int) -> tuple[Tensor, Tensor]:
        """Returns a chunk's edges in its own numbering, and the places of its outside sources.

        Shapes: sources and targets [2, e_c], numbered own rows first; places [u_c], ascending.
        """

        def make() -> tuple[Tensor, Tensor]:
            rows = self.own.rows(chunk)
            source, target = self.ends[:, self.edge.rows(chunk)]
            inside = (source >= rows.start) & (source < rows.stop)
            places, index = torch.unique(source[~inside], return_inverse=True)
            lid = source - rows.start
            lid[~inside] = index + (rows.stop - rows.start)
            return torch.stack([lid, target - rows.start]), places

        return self._cached(chunk, make)  # type: ignore[no-any-return]

    @cached_property
    def gather(self) -> Operator:
        """The matrix of zeros and ones that selects the rows each chunk reads."""
        every = [self.local_edges(c)[1] for c in range(self.chunks)]
        bounds = 0, *itertools.accumulate(map(len, every))
        col = torch.cat(every)
        row = torch.arange(len(col), device=col.device)
        return Operator.build(row, col, None, bounds, self.counts)

    @cached_property
    def sum(self) -> Operator:
        """The matrix of all edges, each 1."""
        source, target = self.ends
        return Operator.build(target, source, None, self.own.bounds, self.counts)

    def gcn(self, kind: OperatorKind, dtype: torch.dtype) -> Operator:
        """Returns the symmetrically normalised matrix; collective at its first use."""

        def make() -> Operator:
            here, edges = self.topology.locals, self.topology.edges
            with torch.no_grad():
                ends, value = gcn_norm(here, here.ends, edges, None, kind, dtype)
            place = torch.cat([self.own.place, self.counts[0] + self.ghost.place])
            col, row = place[ends[0]], self.own.place[ends[1]]
            return Operator.build(row, col, value, self.own.bounds, self.counts)

        return self._cached((kind, dtype), make)  # type: ignore[no-any-return]

    def _cached(self, kind: Any, make: Callable[[], Any]) -> Any:
        if kind not in self._made:
            self._made[kind] = make()
        return self._made[kind]


def plan_chunks(edge_index: DistEdgeIndex, chunks: Any, seed: int) -> ChunkPlan:
    """Cuts a share into chunks; collective over all stages.

    Args:
        edge_index: the edges of a share of `pdc.partition`.
        chunks: the number of chunks, or the chunk of each node of the graph.
        seed: the seed of the cutter.

    Raises:
        ValueError: on all ranks, if ranks ask for different numbers of chunks, or a chunk
            would have no node.
    """
    topology = edge_index.topology
    nodes, mesh = topology.nodes, topology.nodes.mesh
    here = topology.locals
    with on_all_ranks(mesh.everyone):
        chunk, count = _chunk_of(here, topology, chunks, seed)
    check_alike({"chunks": count}, mesh.everyone)
    # the first stage's on all stages
    chunk = collectives.broadcast_object(chunk, mesh.stage)
    _check_sizes(chunk, count, mesh)
    chunk = chunk.to(topology.device)
    every = here.with_ghosts(chunk.unsqueeze(1)).squeeze(1)
    ends = every[here.source_lid], chunk[here.target_lid]
    own, ghost, edge = (
        ChunkOrder.of(of, count) for of in (chunk, every[len(nodes) :], ends[1])
    )
    sums = torch.tensor([int((ends[0] != ends[1]).sum()), len(ends[0])])
    num_crossing, edges = collectives.all_reduce(sums, mesh.world).tolist()
    place = torch.cat([own.place, len(nodes) + ghost.place])
    return ChunkPlan(
        topology,
        own,
        ghost,
        edge,
        place[here.ends[:, edge.order]],
        tuple(_link(topology, own, ghost, c) for c in range(count)),
        replace(here.halo, send_slot=own.place[here.halo.send_slot]),
        num_crossing / max(edges, 1),
    )


def _chunk_of(
    here: LocalGraph, topology: Topology, chunks: Any, seed: int
) -> tuple[Tensor, int]:
    """Returns the chunk of each own node, and the number of chunks."""
    nodes = topology.nodes
    if not isinstance(chunks, int):
        given = torch.as_tensor(chunks)
        if given.shape != (nodes.total,) or given.is_floating_point():
            raise ValueError(
                f"chunks must be a number, or the chunk of each of the {nodes.total} nodes, "
                f"got a tensor of {list(given.shape)} of {given.dtype}"
            )
        if given.numel() and int(given.min()) < 0:
            raise ValueError(f"chunks holds {int(given.min())}; count them from 0")
        return given.long()[nodes.gid], int(given.max()) + 1 if given.numel() else 0
    if chunks > nodes.total:
        raise ValueError(
            f"chunks={chunks} leaves chunks without a node: the graph has {nodes.total}; "
            "give at most as many"
        )
    sizes = [int(n) for n in nodes.partition.sizes]  # type: ignore[union-attr]
    # too few nodes to cut: deal them out, in turn over all ranks
    if min(sizes) < chunks:
        first = sum(sizes[: nodes.mesh.rank])
        return (torch.arange(len(nodes)) + first) % chunks, chunks
    source, target = here.source_lid.cpu(), here.target_lid.cpu()
    inside = source < len(nodes)
    edges = torch.stack([source[inside], target[inside]])
    return cut(edges, len(nodes), chunks, "metis", seed=seed).owner.long(), chunks


def _check_sizes(chunk: Tensor, count: int, mesh: Mesh) -> None:
    sizes = torch.bincount(chunk, minlength=max(count, 1))
    sizes = collectives.all_reduce(sizes, mesh.world)
    empty = (sizes == 0).nonzero().flatten().tolist()
    if empty:
        raise ValueError(
            f"chunks {empty[:8]} of {count} have no node; number chunks without gaps, or "
            "ask for fewer"
        )


def _link(topology: Topology, own: ChunkOrder, ghost: ChunkOrder, chunk: int) -> Link:
    """Plans the exchange that sends one chunk's rows to all ranks that read them."""
    nodes, mesh = topology.nodes, topology.nodes.mesh
    assert nodes.partition is not None
    want = topology.locals.ghost_gid[ghost.order[ghost.rows(chunk)].cpu()]
    owner = nodes.partition.owner_of(want)
    counts = torch.bincount(owner, minlength=mesh.size).tolist()
    have = nodes.gid[own.order[own.rows(chunk)].cpu()]
    return Halo.build(want, counts, have, mesh.world).to(topology.device)


class HistoryBuffer:
    """The buffer of one site: the rows that an exchange of a layer reads, and their history.

    Shapes (this rank; n own nodes, h ghosts): mix [n + h, w], gradients g [r, w], where the
    operator has r rows.

    Args:
        plan: the chunks.
        mix: the rows of all chunks, which are their history, too.
        operator: the matrix that multiplies them.
        cross: the factor of gradients that cross from chunk to chunk, of `GRADIENTS`.
        wrap: returns the link of a chunk in this epoch, if rows are coded or late.
        exact_reason: why rows are exact whatever the link; empty if they may be coded.
    """

    def __init__(
        self,
        plan: ChunkPlan,
        mix: Tensor,
        operator: Operator,
        cross: float,
        wrap: Callable[[int], Link] | None = None,
        exact_reason: str = "",
    ) -> None:
        self.plan, self.operator, self.cross = plan, operator, cross
        self.mix, self.history = mix, mix.clone() if plan.chunks > 1 else None
        self.gradients: Tensor | None = None
        self.needs_gradient, self.exact_reason = False, exact_reason
        self._wrap = wrap
        self._links: dict[int, Link] = {}  # of chunks that have no gradient yet
        # chunks whose history is of this epoch; None outside the backward pass
        self._refreshed: set[int] | None = None

    # the forward pass

    def read(self, x: Tensor, chunk: int, again: bool) -> Tensor:
        """Stores the rows of a chunk, and returns its rows of the operator's product.

        Args:
            x: the chunk's rows `[n_c, w]`.
            chunk: which chunk.
            again: whether it is recomputed: its rows are in place, and nothing travels.
        """
        plan, operator, n = self.plan, self.operator, self.plan.counts[0]
        link, arrive = plan.links[chunk], None
        if not again:
            self.mix[plan.own.rows(chunk)] = x
        if not (again or link.silent):
            ghost = plan.ghost.rows(chunk)
            into = self.mix[n + ghost.start : n + ghost.stop]
            if self._wrap is not None:
                link = self._links[chunk] = self._wrap(chunk)
            arrive = link.begin(x, into)
        rows = operator.rows(chunk)
        z = x.new_empty((rows.stop - rows.start, x.size(1)))
        operator.own.matmul(self.mix[:n], z, rows.start)
        if arrive is not None:
            arrived = arrive()
            if arrived.data_ptr() != into.data_ptr():
                into.copy_(arrived)
        return operator.ghost.add_matmul(self.mix[n:], z, rows.start)

    # the backward pass

    def begin_backward(self) -> None:
        """Drops the gradients of the last epoch."""
        self._refreshed = set()
        if self.gradients is not None:
            self.gradients.zero_()

    def pull(self, g: Tensor, chunk: int) -> Tensor:
        """Stores the gradient of a chunk's product, and returns the gradient of its rows."""
        plan, operator, rows = self.plan, self.operator, self.operator.rows(chunk)
        if self.gradients is None:
            self.gradients = g.new_zeros((operator.bounds[-1], g.size(1)))
        self.gradients[rows] = g
        link, arrive = plan.links[chunk], None
        if not link.silent:
            ghost = plan.ghost.rows(chunk)
            sums = g.new_empty((ghost.stop - ghost.start, g.size(1)))
            operator.ghost.transposed.matmul(self.gradients, sums, ghost.start)
            arrive = self._links.pop(chunk, link).begin_transpose(sums)
        own = plan.own.rows(chunk)
        out = g.new_empty((own.stop - own.start, g.size(1)))
        operator.own.transposed.matmul(self.gradients, out, own.start)
        if self.cross != 1:
            self.gradients[rows] *= self.cross
        return out if arrive is None else arrive(out)

    def retire(self, chunk: int, refresh: bool) -> None:
        """Sets a chunk's rows back to history, after its backward pass.

        Args:
            chunk: which chunk.
            refresh: whether its rows of this epoch become its history.
        """
        if self.history is None:
            return
        for rows in self._rows_of(chunk):
            fresh = self.mix[rows].clone() if refresh else None
            self.mix[rows] = self.history[rows]
            if fresh is not None:
                self.history[rows] = fresh
        if refresh:
            assert self._refreshed is not None
            self._refreshed.add(chunk)

    def end_epoch(self, refresh: bool) -> None:
        """Loads the history for the next epoch, once all chunks are retired."""
        self._refreshed = None
        if refresh and self.history is not None:
            self.mix.copy_(self.history)

    def undo(self) -> None:
        """Restores history after an epoch that failed."""
        if self.history is not None:
            for chunk in self._refreshed or ():  # `retire` has put back its rows
                for rows in self._rows_of(chunk):
                    self.history[rows] = self.mix[rows]
        self.end_epoch(refresh=True)

    def _rows_of(self, chunk: int) -> tuple[slice, slice]:
        """Returns where own rows and ghosts of a chunk are in `mix`."""
        n, ghost = self.plan.counts[0], self.plan.ghost.rows(chunk)
        return self.plan.own.rows(chunk), slice(n + ghost.start, n + ghost.stop)

    def memory(self) -> int:
        """Returns the bytes that it takes after the first epoch of training."""
        rows = len(self.mix) + (self.operator.bounds[-1] if self.needs_gradient else 0)
        kept = 0 if self.history is None else self.history.nbytes
        return rows * self.mix.size(1) * self.mix.element_size() + kept


class _ReadSite(torch.autograd.Function):
    """Multiplies by a chunk's rows of an operator; see [Note: pulled gradients]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, site: HistoryBuffer, chunk: int, again: bool
    ) -> Tensor:
        ctx.made = site, chunk
        return site.read(x, chunk, again)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        site, chunk = ctx.made
        return site.pull(g.contiguous(), chunk), None, None, None


def read_from_site(x: Tensor, site: HistoryBuffer, chunk: int, again: bool) -> Tensor:
    """Returns `site.read(x, chunk, again)`, differentiably."""
    site.needs_gradient |= x.requires_grad and torch.is_grad_enabled()
    out: Tensor = _ReadSite.apply(x, site, chunk, again)
    return out

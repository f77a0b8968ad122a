"""Cuts the nodes of a rank into chunks, and plans their edges, matrices and exchanges once.

[Note: chunks] To a layer, a chunk is like a rank: it has rows of its own, and edges whose
sources may be rows of others. The own rows of a rank are sorted by chunk, and so are its
ghosts, so that a chunk is a contiguous run of rows in every buffer, in every matrix and in
its transpose. In a hybrid, chunk c of the graph is chunk c of every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.graph.topology import LocalGraph, Topology, gcn_norm
from pyg_distcomm.halo.halo import Halo, Link
from pyg_distcomm.ops.csr import CSR, Pattern
from pyg_distcomm.partition.cutters import cut
from pyg_distcomm.sharded.edges import DistEdgeIndex


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

    def to(self, device: torch.device) -> ChunkOrder:
        """Returns the same on another device."""
        return ChunkOrder(self.order.to(device), self.bounds)

    def rows(self, chunk: int) -> slice:
        """The places of a chunk."""
        return slice(self.bounds[chunk], self.bounds[chunk + 1])

    def size(self, chunk: int) -> int:
        """The number of rows of a chunk."""
        return self.bounds[chunk + 1] - self.bounds[chunk]


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
    _operators: dict[Any, Operator] = field(default_factory=dict, repr=False)
    _local_edges: dict[int, tuple[Tensor, Tensor]] = field(
        default_factory=dict, repr=False
    )

    @property
    def source(self) -> Tensor:
        """The sources of edges, by place."""
        return self.ends[0]

    @property
    def target(self) -> Tensor:
        """The targets of edges, by place."""
        return self.ends[1]

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

    @property
    def blocks(self) -> tuple[int, ...]:
        """The bounds of blocks of rows: own rows by chunk, then ghosts by chunk."""
        n = self.counts[0]
        return (*self.own.bounds, *(n + b for b in self.ghost.bounds[1:]))

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
        if chunk not in self._local_edges:
            self._local_edges[chunk] = self._build_local_edges(chunk)
        return self._local_edges[chunk]

    def _build_local_edges(self, chunk: int) -> tuple[Tensor, Tensor]:
        edges, rows = self.edge.rows(chunk), self.own.rows(chunk)
        source, target = self.source[edges], self.target[edges] - rows.start
        inside = (source >= rows.start) & (source < rows.stop)
        places, index = torch.unique(source[~inside], return_inverse=True)
        lid = source - rows.start
        lid[~inside] = index + (rows.stop - rows.start)
        return torch.stack([lid, target]), places

    def gather(self) -> Operator:
        """Returns the matrix of zeros and ones that selects the rows each chunk reads."""

        def make() -> Operator:
            every = [self.local_edges(c)[1] for c in range(self.chunks)]
            bounds = [0]
            for places in every:
                bounds.append(bounds[-1] + len(places))
            col = torch.cat(every)
            row = torch.arange(len(col), device=col.device)
            return Operator.build(row, col, None, tuple(bounds), self.counts)

        return self._cached("gather", make)

    def sum(self) -> Operator:
        """Returns the matrix of all edges, each 1."""

        def make() -> Operator:
            edges = self.target, self.source
            return Operator.build(*edges, None, self.own.bounds, self.counts)

        return self._cached("sum", make)

    def gcn(self, improved: bool, loops: bool, dtype: torch.dtype) -> Operator:
        """Returns the symmetrically normalised matrix; collective at its first use."""

        def make() -> Operator:
            here = self.topology.locals
            edges = here.ends
            with torch.no_grad():
                edges, value = gcn_norm(
                    here, edges, self.topology.edges, None, improved, loops, dtype
                )
            place = torch.cat([self.own.place, self.counts[0] + self.ghost.place])
            col, row = place[edges[0]], self.own.place[edges[1]]
            return Operator.build(row, col, value, self.own.bounds, self.counts)

        return self._cached(("gcn", improved, loops, dtype), make)

    def _cached(self, kind: Any, make: Callable[[], Operator]) -> Operator:
        if kind not in self._operators:
            self._operators[kind] = make()
        return self._operators[kind]


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
    chunk, count, problem = None, 0, None
    try:
        chunk, count = _chunk_of(here, topology, chunks, seed)
    except (TypeError, ValueError) as error:
        problem = str(error)
    collectives.agree(problem, mesh.everyone)
    counts = collectives.all_gather_object(count, mesh.everyone)
    if len(set(counts)) > 1:
        raise ValueError(
            f"chunks must be the same on all ranks, but they give {counts} chunks by rank; "
            "pass one value"
        )
    assert chunk is not None
    # the first stage's on all stages
    chunk = collectives.broadcast_object(chunk, mesh.stage)
    _check_sizes(chunk, count, mesh)
    own = ChunkOrder.of(chunk, count)
    every = here.with_ghosts(chunk.unsqueeze(1).to(topology.device)).squeeze(1).cpu()
    ghost = ChunkOrder.of(every[len(nodes) :], count)
    edge = ChunkOrder.of(chunk[here.target_lid.cpu()], count)
    place = torch.cat([own.place, len(nodes) + ghost.place])
    links = tuple(_link(topology, own, ghost, c) for c in range(count))
    ends = every[here.source_lid.cpu()], chunk[here.target_lid.cpu()]
    sums = torch.tensor([int((ends[0] != ends[1]).sum()), len(ends[0])])
    num_crossing, edges = collectives.all_reduce(sums, mesh.world).tolist()
    device = topology.device
    slot = own.place[here.halo.send_slot.cpu()]
    return ChunkPlan(
        topology,
        own.to(device),
        ghost.to(device),
        edge.to(device),
        torch.stack(
            [
                place[here.source_lid.cpu()[edge.order]],
                own.place[here.target_lid.cpu()[edge.order]],
            ]
        ).to(device),
        links,
        replace(here.halo, send_slot=slot.to(device)),
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
    want = topology.locals.ghost_gid[ghost.order[ghost.rows(chunk)]]
    owner = nodes.partition.owner_of(want)
    counts = torch.bincount(owner, minlength=mesh.size).tolist()
    have = nodes.gid[own.order[own.rows(chunk)]]
    return Halo.build(want, counts, have, mesh.world).to(topology.device)

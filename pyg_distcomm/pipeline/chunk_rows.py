"""Makes the edges of a pipeline's chunk tensors below autograd, in the chunk's own numbering.

[Note: chunks below autograd] To a layer, a chunk is a graph of one rank: its nodes are 0 ..
n_c - 1, and rows of other chunks have the numbers that follow, which only sources have. A layer
reads source rows where `propagate` looks them up, from the sites of [Note: sites]; see
`ChunkVisit`. Where it reads numbers of nodes by `edge_index[0]` itself, as `gcn_norm` does
degrees, they are facts of the graph, the same in all epochs.

Sums over rows are those of the chunk alone in a backward pass, where the pipeline adds up the
gradients of all chunks; in a forward pass they raise, by `ChunkMesh.world`. Nothing has a key
([Note: constants]), so that each pass over a chunk computes the same ops.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.pipeline.chunk_graph import (
    ChunkMesh,
    ChunkPass,
    ChunkTopology,
    RefusedLink,
)
from pyg_distcomm.sharded.dist_tensor import DistTensor, rule
from pyg_distcomm.sharded.edges import DistEdgeIndex
from pyg_distcomm.sharded.ids import IdExchange, Ids
from pyg_distcomm.tensor.gather_by_id import IdPlan


class OneChunk(ChunkMesh):
    """The mesh of a chunk, which holds all rows that its layers know of."""

    def __init__(self, mesh: Any, run: ChunkPass) -> None:
        super().__init__(mesh, run)
        self.rank, self.size, self.check = 0, 1, "never"
        self.sharded: dict[str, Any] = {}


class ChunkRows(Rows):
    """Rows of a chunk: `gid` are those of the graph, places count from 0 in the chunk."""

    @cached_property
    def place(self) -> Tensor:  # type: ignore[override]
        """The positions of these rows in the chunk: all of them."""
        return torch.arange(len(self))

    @staticmethod
    def of(gid: Tensor, total: int, mesh: Any, nodes: Rows | None = None) -> ChunkRows:
        """Returns rows of a chunk by their ids in the graph."""
        return ChunkRows(gid, total, mesh, None, False, len(gid), nodes)

    def select(self, mask: Tensor, known: int | None = None) -> Rows:
        """Returns the rows that a boolean mask `[n]` keeps."""
        return ChunkRows.of(self.gid[mask.cpu()], self.total, self.mesh, self.nodes)

    def joined(self, parts: list[Rows]) -> Rows:
        """Returns these rows and those of other parts, one after another."""
        gid, total = [], 0
        for part in parts:
            gid.append(part.gid + total)
            total += part.total
        nodes = next((p.nodes for p in parts if p.nodes is not None), None)
        return ChunkRows.of(torch.cat(gid), total, self.mesh, nodes)


class ShardedChunk(ChunkTopology):
    """The edges of a chunk, as layers of tensors below autograd see them."""

    mesh_kind = OneChunk

    def __init__(self, run: ChunkPass, chunk: int | None) -> None:
        super().__init__(run, chunk)
        nodes, edges, mesh = self.nodes, self.edges, self.nodes.mesh
        self.nodes = ChunkRows.of(nodes.gid, nodes.total, mesh)
        self.edges = ChunkRows.of(edges.gid, edges.total, mesh, self.nodes)
        self.nodes.derived["topology"] = self


def view_of(run: ChunkPass, chunk: int | None) -> DistTensor:
    """Returns the edges of a chunk, or of all chunks in order if `chunk` is None."""
    topology = ShardedChunk(run, chunk)
    return DistEdgeIndex.of(topology.locals.ends, topology)


class _Nothing:
    """Stands in place of the halo of ids that are all in the chunk."""

    num_ghosts, silent, send_slot = 0, True, torch.empty(0, dtype=torch.long)


class _Outside(RefusedLink):
    """Stands in place of the halo of ids of which some are of other chunks."""

    silent = False

    def __init__(self, num_ghosts: int) -> None:
        self.num_ghosts = num_ghosts


class ChunkExchange(IdExchange):
    """Reads rows of a chunk by ids; those of other chunks are facts of the graph."""

    __slots__ = ("_topology",)

    def __init__(self, ids: Ids, rows: Rows) -> None:
        slot = ids.local.reshape(-1).long()
        halo: Any = _Nothing()
        self._topology: Any = rows.derived.get("topology")
        if ids.part == 0 and self._topology is not None:
            halo = _Outside(len(self._topology.locals.ghost_gid))
        elif len(slot) and int(slot.max()) >= len(rows):
            raise TypeError(
                "a layer of a pipeline selects sources of edges, of which some lie in other "
                "chunks, and reads rows by them; read by edge_index[0] of all its edges, or "
                "precompute the rows as an attribute of the Data"
            )
        super().__init__(IdPlan(halo, slot, len(rows)))

    def _with_ghosts(self, x: Tensor, key: int | None) -> Tensor:
        found: Tensor = self._topology.locals.with_ghost_facts(x)
        return found


@rule("ids of a chunk")
def exchange(ids: Ids, rows: Rows) -> IdExchange:
    """Returns what reads and scatters rows of a chunk by ids."""
    return ChunkExchange(ids, rows)

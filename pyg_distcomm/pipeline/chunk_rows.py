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

from typing import Any

from pyg_distcomm.pipeline.chunk_graph import (
    ChunkMesh,
    ChunkPass,
    ChunkTopology,
    RefusedLink,
)
from pyg_distcomm.sharded.dist_tensor import DistTensor
from pyg_distcomm.sharded.edges import DistEdgeIndex
from pyg_distcomm.sharded.local_rows import LocalRows


class OneChunk(ChunkMesh):
    """The mesh of a chunk, which holds all rows that its layers know of."""

    def __init__(self, mesh: Any, run: ChunkPass) -> None:
        super().__init__(mesh, run)
        self.rank, self.size, self.check = 0, 1, "never"
        self.sharded: dict[str, Any] = {}


class _Outside(RefusedLink):
    """Stands in place of the halo of ids of which some are of other chunks."""

    silent = False

    def __init__(self, num_ghosts: int) -> None:
        self.num_ghosts = num_ghosts


class ShardedChunk(ChunkTopology):
    """The edges of a chunk, as layers of tensors below autograd see them."""

    mesh_kind = OneChunk

    def __init__(self, run: ChunkPass, chunk: int | None) -> None:
        super().__init__(run, chunk)
        nodes, edges, mesh = self.nodes, self.edges, self.nodes.mesh
        self.nodes = LocalRows.of(nodes.gid, nodes.total, mesh)
        self.edges = LocalRows.of(edges.gid, edges.total, mesh, self.nodes)
        self.nodes.derived["topology"] = self

    @property
    def outside(self) -> _Outside:
        """What stands in place of the halo of ids of sources."""
        return _Outside(len(self.locals.ghost_gid))


def view_of(run: ChunkPass, chunk: int | None) -> DistTensor:
    """Returns the edges of a chunk, or of all chunks in order if `chunk` is None."""
    topology = ShardedChunk(run, chunk)
    return DistEdgeIndex.of(topology.locals.ends, topology)

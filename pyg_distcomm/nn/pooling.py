"""Pools nodes of a graph that is spread over ranks: PyG's selection and its edges.

With ids v_1 .. v_k of the nodes that stay, and each edge (i, j) between two of them,

    x'_a = x[v_a]         (a, b) of the pooled graph, where v_a = i and v_b = j

A node stays with its owner, and an edge with that of its target, so that no row moves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.pool.connect import ConnectOutput, FilterEdges
from torch_geometric.nn.pool.select import SelectOutput, SelectTopK

from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.graph.edge_index import DistEdgeIndex, rows_of_edges
from pyg_distcomm.partition.partition import Partition
from pyg_distcomm.tensor.dist_tensor import DistTensor
from pyg_distcomm.tensor.gather_by_id import recut


class DistSelectTopK(SelectTopK):
    """PyG's SelectTopK, of TopKPooling and SAGPooling: the nodes with the highest scores.

    Scores of all nodes are compared on every rank, as one process does.

    Shapes: x `[n_i, F]`, batch `[n_i]` -> node_index and weight `[k_i]`, row-sharded by the
    owners of the nodes.
    Price: a few words for each node, to all ranks, and k words more.
    """

    def forward(self, x: Tensor, batch: Any = None) -> SelectOutput:
        """Selects nodes."""
        out = super().forward(x, batch)
        if not isinstance(x, DistTensor):
            return out
        chosen = _whole(out.node_index)
        owners = x.rows.owners.owner_of(chosen.cpu())
        partition = Partition.from_owner(owners, x.rows.mesh.size)
        gid = partition.gids(x.rows.mesh.rank)
        rows = Rows(gid, len(chosen), x.rows.mesh, partition, memory=x.rows.memory)
        weight = out.weight
        if isinstance(weight, DistTensor):
            weight = DistTensor.wrap(recut(weight, rows), rows)
        return SelectOutput(
            node_index=DistTensor.wrap(chosen[gid.to(chosen.device)], rows),
            num_nodes=out.num_nodes,
            cluster_index=out.cluster_index,
            num_clusters=out.num_clusters,
            weight=weight,
        )


class DistFilterEdges(FilterEdges):
    """PyG's FilterEdges, of TopKPooling and SAGPooling: edges between selected nodes.

    The exchanges of the pooled graph are planned anew each time, and are exact, whatever
    link the edges have.

    Shapes: edge_index `[2, e_i]` -> `[2, e'_i]`, edge_attr `[e_i, F]` -> `[e'_i, F]`,
    batch `[n_i]` -> `[k_i]`.
    Price: the k ids of nodes, and the number of each edge that stays, to all ranks.

    Raises:
        ValueError: on all ranks, for rows of other nodes, or edges that carry weights.
    """

    def forward(
        self,
        select_output: SelectOutput,
        edge_index: Tensor,
        edge_attr: Any = None,
        batch: Any = None,
    ) -> ConnectOutput:
        """Returns the pooled graph."""
        chosen = select_output.node_index
        if not isinstance(edge_index, DistEdgeIndex) or not isinstance(
            chosen, DistTensor
        ):
            return super().forward(select_output, edge_index, edge_attr, batch)
        edge_index.topology.check_one_kind()
        total = edge_index.nodes.total
        if select_output.num_nodes != total or edge_index.weight is not None:
            raise ValueError(
                f"give a pool a row for each of the {total} nodes, an edge_index, and its "
                f"weights as edge_attr; got {select_output.num_nodes} rows"
                + ", and edges of an adjacency with weights"
                * (edge_index.weight is not None)
            )
        ids = _whole(chosen).to(edge_index.device)
        number = ids.new_full((total,), -1)
        number[ids] = torch.arange(len(ids), device=ids.device)
        ends = number[edge_index.to_local()]
        keep = (ends >= 0).all(0)
        kept = edge_index.edges.select(keep)
        edges = rows_of_edges(kept.place, kept.count, chosen.rows)
        pooled = DistEdgeIndex.build(ends[:, keep], chosen.rows, edges)
        values = edge_index.check_edges(edge_attr, "edge_attr")
        if values is not None:
            values = DistTensor.wrap(values[keep], edges)
        nodes = None if batch is None else batch[chosen]
        return ConnectOutput(pooled, values, nodes)


def _whole(ids: Tensor) -> Tensor:
    return ids.full_tensor() if isinstance(ids, DistTensor) else ids


POOLS: dict[type, type] = {SelectTopK: DistSelectTopK, FilterEdges: DistFilterEdges}

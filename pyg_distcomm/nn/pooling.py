"""Pools the nodes of a graph spread over ranks: selected nodes, or clusters.

With ids v_1 .. v_k of the selected nodes, and each edge (i, j) between two of them,

    x'_a = x[v_a]         (a, b) of the pooled graph, where v_a = i and v_b = j

A node keeps its owner, and an edge the owner of its target, so that no row moves. With the
cluster c(i) of each node, and S with a row for each node and a column for each selected node,

    (c(i), c(j)) of the pooled graph       A' = S^T A S

A cluster has the owner of one of its nodes. The exchanges of a pooled graph are planned again
each time, and are exact with any link of the edges.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric.nn.pool import cluster_pool, edge_pool
from torch_geometric.nn.pool.connect import ConnectOutput, FilterEdges
from torch_geometric.nn.pool.select import SelectOutput, SelectTopK
from torch_geometric.utils import (
    add_remaining_self_loops,
    remove_self_loops,
    scatter,
    softmax,
)

from pyg_distcomm.comm import autograd, collectives
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.graph.edge_index import DistEdgeIndex, rows_of_edges
from pyg_distcomm.graph.subgraphs import union_of_ranks
from pyg_distcomm.partition.partition import Partition
from pyg_distcomm.tensor.dist_tensor import DistTensor
from pyg_distcomm.tensor.gather_by_id import plan_of, reshard
from pyg_distcomm.tensor.row_sharded import shard_plain_operand


class DistSelectTopK(SelectTopK):
    """PyG's SelectTopK, of TopKPooling and SAGPooling: selects the highest scores.

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
        chosen = _all_ids(out.node_index)
        rows = _pooled_rows(chosen, x.rows)
        gid, weight = rows.gid, out.weight
        if isinstance(weight, DistTensor):
            weight = DistTensor.wrap(reshard(weight, rows), rows)
        return SelectOutput(
            node_index=DistTensor.wrap(chosen[gid.to(chosen.device)], rows),
            num_nodes=out.num_nodes,
            cluster_index=out.cluster_index,
            num_clusters=out.num_clusters,
            weight=weight,
        )


class DistFilterEdges(FilterEdges):
    """PyG's FilterEdges, of TopKPooling and SAGPooling: edges between selected nodes.

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
        edge_index.topology.check_one_node_type()
        total = edge_index.nodes.total
        if select_output.num_nodes != total or edge_index.weight is not None:
            raise ValueError(
                f"give a pool a row for each of the {total} nodes, an edge_index, and its "
                f"weights as edge_attr; got {select_output.num_nodes} rows"
                + ", and edges of an adjacency with weights"
                * (edge_index.weight is not None)
            )
        ids = _all_ids(chosen).to(edge_index.device)
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


class DistEdgePooling(pyg.EdgePooling):
    """PyG's EdgePooling: merges the two nodes of an edge, in order of scores.

    Every rank goes through the scores of all edges, as one process does.

    Shapes: x `[n_i, F]`, edge_index `[2, e_i]`, batch `[n_i]` -> `[c_i, F]`, `[2, e'_i]`,
    `[c_i]`, row-sharded by the owners of the merged edges' targets.
    Price: both ends of each edge and its score, to all ranks; rows at the sources of edges,
    and of merged nodes; and the pooled edges (see `EdgeMatrix.edges`).
    """

    def _merge_edges(
        self, x: Tensor, edge_index: Tensor, batch: Tensor, edge_score: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, edge_pool.UnpoolInfo]:
        if not isinstance(edge_index, DistEdgeIndex):
            return super()._merge_edges(x, edge_index, batch, edge_score)
        x = edge_index.as_nodes(x, "x")
        order = torch.argsort(_all_ids(edge_score.detach()), descending=True)
        source, target = edge_index.full_tensor().tolist()
        cluster = [-1] * x.rows.total
        merged: list[int] = []
        for edge in order.tolist():
            one, two = source[edge], target[edge]
            if cluster[one] < 0 and cluster[two] < 0:
                cluster[one] = cluster[two] = len(merged)
                merged.append(edge)
        found = torch.tensor(cluster, dtype=torch.int64)
        single = (found < 0).nonzero().flatten()
        found[single] = torch.arange(len(merged), len(merged) + len(single))
        edges = torch.tensor(merged, dtype=torch.int64)
        ends = torch.tensor([target[edge] for edge in merged], dtype=torch.int64)
        pool = _Clusters(found, torch.cat([ends, single]), x, edge_index)
        own = edges[pool.rows.gid[pool.rows.gid < len(edges)]]
        at = torch.searchsorted(edge_index.edges.place, own).to(x.device)
        local = edge_index.check_edges(edge_score, "edge_score")
        assert local is not None
        alone = x.to_local().new_ones(len(pool.rows) - len(own))
        score = DistTensor.wrap(torch.cat([local[at], alone]), pool.rows)
        info = edge_pool.UnpoolInfo(edge_index, pool.cluster, batch, score)
        out = pool.sums(x) * score.view(-1, 1)
        return out, pool.edges(loops=True), pool.first(batch), info


class DistClusterPooling(pyg.ClusterPooling):
    """PyG's ClusterPooling: merges nodes that are connected by edges with high scores.

    Shapes: x `[n_i, F]`, edge_index `[2, e_i]`, batch `[n_i]` -> `[c_i, F]`, `[2, e'_i]`,
    `[c_i]`; a cluster is with the owner of its first node.
    Price: two words for each node at such an edge, to all ranks; a product with the edges, and
    its rows at nodes of a cluster; and the pooled edges (see `EdgeMatrix.edges`).
    """

    def _merge_edges(
        self, x: Tensor, edge_index: Tensor, batch: Tensor, edge_score: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, cluster_pool.UnpoolInfo]:
        if not isinstance(edge_index, DistEdgeIndex):
            return super()._merge_edges(x, edge_index, batch, edge_score)
        x = edge_index.as_nodes(x, "x")
        score = edge_index.check_edges(edge_score, "edge_score")
        assert score is not None
        joined = edge_index.to_local()[:, score > self.threshold].cpu()
        cluster, first = _connected(joined, x.rows)
        pool = _Clusters(cluster, first, x, edge_index)
        alone = torch.bincount(cluster, minlength=len(first))[cluster] == 1
        own = alone[x.rows.gid].to(x.device).unsqueeze(1)
        sums = edge_index.with_link(None).matmul(x, edge_score)
        rows = DistTensor.wrap(sums.to_local() + own * x.to_local(), x.rows)
        info = cluster_pool.UnpoolInfo(edge_index, pool.cluster, batch)
        return pool.sums(rows), pool.edges(loops=False), pool.first(batch), info


class DistASAPooling(pyg.ASAPooling):
    """PyG's ASAPooling: keeps the fittest neighbourhoods, and joins those that touch.

        A' = S^T A S      with s_ia the attention of neighbourhood a to its node i

    Shapes: x `[n_i, F]`, edge_index `[2, e_i]`, edge_weight `[e_i]`, batch `[n_i]` ->
    `[k_i, F]`, `[2, e'_i]`, `[e'_i]`, `[k_i]`.
    Price: rows at the sources of edges, that of SelectTopK, and of two products (see
    `EdgeMatrix`).
    """

    def forward(
        self, x: Tensor, edge_index: Tensor, edge_weight: Any = None, batch: Any = None
    ) -> tuple[Tensor, Tensor, Any, Tensor, Tensor]:
        """Pools a graph."""
        if not isinstance(edge_index, DistEdgeIndex):
            return super().forward(x, edge_index, edge_weight, batch)
        edges, weight = edge_index.with_link(None), edge_weight
        x = edges.as_nodes(x.unsqueeze(-1) if x.dim() == 1 else x, "x")
        count = edges.nodes.total
        edges, weight = add_remaining_self_loops(edges, weight, 1.0, count)
        if batch is None:
            zeros = torch.zeros(len(x.rows), dtype=torch.int64, device=x.device)
            batch = DistTensor.wrap(zeros, x.rows)
        source, target = edges
        near: Any = x
        if self.gnn_intra_cluster is not None:
            near = self.gnn_intra_cluster(x=x, edge_index=edges, edge_weight=weight)
        near = near[source]
        query = scatter(near, target, 0, count, reduce="max")
        score = self.att(torch.cat([self.lin(query)[target], near], dim=-1)).view(-1)
        score = F.leaky_relu(score, self.negative_slope)
        score = softmax(score, target, num_nodes=count)
        score = F.dropout(score, p=self.dropout, training=self.training)
        x = scatter(x[source] * score.view(-1, 1), target, 0, count, reduce="sum")
        fitness = self.gnn_score(x, edges).sigmoid().view(-1)
        kept = self.select(fitness, batch).node_index
        x = x[kept] * fitness[kept].view(-1, 1)
        pooled, value = _coarsened(edges, weight, score, kept)
        if self.add_self_loops:
            pooled, value = add_remaining_self_loops(
                pooled, value, num_nodes=kept.rows.total
            )
        else:
            pooled, value = remove_self_loops(pooled, value)
        return x, pooled, value, batch[kept], kept


def _coarsened(
    edges: DistEdgeIndex, weight: Any, score: Any, kept: DistTensor
) -> tuple[Any, Any]:
    """Returns `S^T A S`, for the entries of S whose target is kept."""
    nodes, (source, target) = edges.nodes, edges.to_local()
    number = source.new_full((nodes.total,), -1)
    ids = _all_ids(kept)
    number[ids] = torch.arange(len(ids), device=ids.device)
    stays = number[target] >= 0
    parts = edges.check_edges(score, "score")
    values = edges.check_edges(weight, "edge_weight")
    assert parts is not None
    # without values, only the places of the result's entries count
    parts = None if values is None else parts[stays]
    whole = EdgeMatrix(source, target, values, nodes)
    chosen = EdgeMatrix(source[stays], number[target[stays]], parts, kept.rows)
    return (chosen.transposed(nodes) @ (whole @ chosen)).edges()


class DistGraphUNet(pyg.GraphUNet):
    """PyG's GraphUNet: TopKPooling on a graph augmented by two-hop edges.

    Shapes: x `[n_i, F]`, edge_index `[2, e_i]` -> `[n_i, F']`.
    Price: that of its layers and pools, and of a product (see `EdgeMatrix`) for each pool.
    """

    def augment_adj(
        self, edge_index: Tensor, edge_weight: Tensor, num_nodes: int
    ) -> tuple[Tensor, Tensor]:
        """Returns the entries of `(A + I)^2` off its diagonal, and their values."""
        if not isinstance(edge_index, DistEdgeIndex):
            return super().augment_adj(edge_index, edge_weight, num_nodes)
        nodes, value = edge_index.nodes, edge_index.check_edges(edge_weight, "weight")
        assert value is not None
        source, target = edge_index.to_local()
        given = EdgeMatrix(source, target, value, nodes).without_loops()
        own = nodes.gid_on(edge_index.device)
        assert given.value is not None
        matrix = EdgeMatrix(
            torch.cat([given.source, own]),
            torch.cat([given.target, own]),
            torch.cat([given.value, given.value.new_ones(len(own))]),
            nodes,
        )
        edges, values = (matrix @ matrix).without_loops().edges()
        assert values is not None
        return edges, values


class _Clusters:
    """Merges nodes into clusters, each owned by the owner of one of its nodes.

    Args:
        cluster: the cluster of each node `[n]`, on every rank.
        member: a node of each cluster `[c]`, on every rank.
        x: rows of the nodes.
        edge_index: the edges between them.
    """

    def __init__(
        self, cluster: Tensor, member: Tensor, x: DistTensor, edge_index: DistEdgeIndex
    ) -> None:
        self._of, self._edges = cluster, edge_index
        self.rows = _pooled_rows(member, x.rows)
        self._member = torch.searchsorted(x.rows.gid, member[self.rows.gid])
        own = cluster[x.rows.gid].to(x.device)
        self.cluster = DistTensor.wrap(own, x.rows)

    def sums(self, x: DistTensor) -> DistTensor:
        """Returns the sum of rows `[c_i, F]` over each cluster."""
        plan = plan_of(self.cluster, self.rows)
        return DistTensor.wrap(plan.scatter_add(x.to_local()), self.rows)

    def first(self, batch: Any) -> Any:
        """Returns the graph `[c_i]` of each cluster."""
        nodes = self.cluster.rows
        if isinstance(batch, DistTensor):
            local = batch.to_local()
        else:
            local = shard_plain_operand(batch, nodes, 1, "batch")
        return DistTensor.wrap(local[self._member.to(local.device)], self.rows)

    def edges(self, loops: bool) -> DistEdgeIndex:
        """Returns the edges between clusters, each once."""
        of = self._of.to(self._edges.device)
        source, target = of[self._edges.to_local()]
        matrix = EdgeMatrix(source, target, None, self.rows)
        return (matrix if loops else matrix.without_loops()).edges()[0]


def _connected(ends: Tensor, nodes: Rows) -> tuple[Tensor, Tensor]:
    """Returns the component `[n]` of each node, and the first node `[c]` of each.

    Args:
        ends: edges `[2, k]` on this rank, as global ids.
        nodes: the rows of nodes on this rank.

    Price: two words for each node at an edge here, to all ranks.
    """
    ids, place = torch.unique(ends, return_inverse=True)
    label, first = _components(place, len(ids))
    pairs = torch.stack([ids, ids[first[label]]], 1)
    world = nodes.mesh.world
    sizes = [row[0] for row in collectives.all_gather_counts([len(pairs)], world)]
    every = collectives.all_gather_rows(pairs, sizes, world, op="plan")
    return _components(every.t(), nodes.total)


def _components(ends: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the component of each node, in order of first nodes, and the first nodes.

    Nodes point to lower ones of their component, and take over where these point.
    """
    label, (row, col) = torch.arange(count), ends
    while True:
        low = torch.minimum(label[row], label[col])
        lower = label
        for place in (row, col, label[row], label[col]):
            lower = lower.scatter_reduce(0, place, low, "amin")
        lower = lower[lower]
        if torch.equal(lower, label):
            first, of = torch.unique(label, return_inverse=True)
            return of, first
        label = lower


def _pooled_rows(node: Tensor, rows: Rows) -> Rows:
    """Returns the rows of a pooled graph, owned like the given nodes."""
    owners = rows.owners.owner_of(node.cpu())
    partition = Partition.from_owner(owners, rows.mesh.size)
    gid = partition.gids(rows.mesh.rank)
    return Rows(gid, len(node), rows.mesh, partition, memory=rows.memory)


def _all_ids(ids: Tensor) -> Tensor:
    return ids.full_tensor() if isinstance(ids, DistTensor) else ids


# Matrices of edges -------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class EdgeMatrix:
    """Holds this rank's entries of a sparse matrix; duplicate entries add up.

    An entry (s, t) is an edge from s to t. Entries lie anywhere; those of a matrix on the left
    of a product, and edges that are made of one, lie with the owners of their targets.

    Shapes: source [e], target [e], value [e], or None for a matrix of which only the places
    of entries count.

    Args:
        source: rows of the entries, as global ids.
        target: their columns, as global ids.
        value: their values, differentiable.
        rows: the nodes that targets are; they have a partition.
    """

    source: Tensor
    target: Tensor
    value: Tensor | None
    rows: Rows

    def transposed(self, rows: Rows) -> EdgeMatrix:
        """Returns the transpose, with the owners of its targets.

        Args:
            rows: the nodes that sources are.

        Price: three words for each entry that another rank gets, two without values.
        """
        return EdgeMatrix(self.target, self.source, self.value, rows).at_owners()

    def at_owners(self) -> EdgeMatrix:
        """Moves entries to the owners of their targets; collective."""
        world = self.rows.mesh.world
        if world.size == 1:
            return self
        owner = _owners(self.rows, self.target)
        order, counts = _by_owner(owner, world.size)
        back = collectives.exchange_counts(counts, world)
        order = order.to(self.source.device)
        ends = torch.stack([self.source, self.target], 1)[order]
        came = collectives.all_to_all(ends, counts, back, world, "edges").wait()
        value = self.value
        if value is not None:
            value = autograd.all_to_all(value[order], counts, back, world, "edges")
        return replace(self, source=came[:, 0], target=came[:, 1], value=value)

    def __matmul__(self, other: EdgeMatrix) -> EdgeMatrix:
        """Returns the product, with the entries on the ranks of those of `other`.

            c_st = sum over k of a_sk b_kt

        Collective. Price: for each distinct k of `other` that another rank owns its id and a
        count; for each entry of this matrix at them its source, and its value if there are any,
        which returns as a gradient. All paths of two entries are held at once.
        """
        device, world = other.source.device, self.rows.mesh.world
        asked, place = torch.unique(other.source, return_inverse=True)
        order, counts = _by_owner(_owners(self.rows, asked), world.size)
        order = order.to(device)
        back = collectives.exchange_counts(counts, world)
        wanted = collectives.all_to_all(
            asked[order], counts, back, world, "plan"
        ).wait()
        by_target = torch.argsort(self.target, stable=True)
        ends = self.target[by_target].contiguous()
        first = torch.searchsorted(ends, wanted)
        number = torch.searchsorted(ends, wanted, right=True) - first
        arriving = collectives.all_to_all(number, back, counts, world, "plan").wait()
        slot = by_target[_ranges(first, number)]
        sent = [int(part.sum()) for part in number.split(back)]
        coming = [int(part.sum()) for part in arriving.split(counts)]
        source = collectives.all_to_all(
            self.source[slot], sent, coming, world, "edges"
        ).wait()
        # for each entry of `other`, the range of what came for its source
        at = torch.empty_like(order)
        at[order] = torch.arange(len(order), device=device)
        row = at[place]
        begin = arriving.cumsum(0) - arriving
        picked = _ranges(begin[row], arriving[row])
        value = None
        if self.value is not None and other.value is not None:
            came = autograd.all_to_all(self.value[slot], sent, coming, world, "edges")
            value = came[picked] * other.value.repeat_interleave(arriving[row])
        target = other.target.repeat_interleave(arriving[row])
        return EdgeMatrix(source[picked], target, value, other.rows).added_up()

    def added_up(self) -> EdgeMatrix:
        """Sums duplicate entries of this rank, and sorts them by source and target."""
        total = self.rows.total
        key, place = torch.unique(
            self.source * total + self.target, return_inverse=True
        )
        value = self.value
        if value is not None:
            value = value.new_zeros(len(key)).index_add(0, place, value)
        source = torch.div(key, total, rounding_mode="floor") if total else key
        target = key - source * total
        return EdgeMatrix(source, target, value, self.rows)

    def without_loops(self) -> EdgeMatrix:
        """Returns the entries off the diagonal."""
        keep = self.source != self.target
        value = None if self.value is None else self.value[keep]
        return EdgeMatrix(self.source[keep], self.target[keep], value, self.rows)

    def edges(self) -> tuple[DistEdgeIndex, DistTensor | None]:
        """Returns each entry as one edge, sorted by source and target, and their values.

        Sources are of the nodes that targets are. Collective. Price: that of `at_owners`
        for entries added up, and a word for each edge, to all ranks.
        """
        nodes = self.rows
        mine = self.added_up().at_owners().added_up()
        key = mine.source * nodes.total + mine.target
        every = union_of_ranks(key, nodes.mesh, "plan")
        place = torch.searchsorted(every, key).cpu()
        edges = rows_of_edges(place, len(every), nodes)
        ends = torch.stack([mine.source, mine.target])
        found = DistEdgeIndex.build(ends, nodes, edges)
        value = mine.value
        return found, None if value is None else DistTensor.wrap(value, edges)


def _owners(rows: Rows, ids: Tensor) -> Tensor:
    assert rows.partition is not None
    return rows.partition.owner_of(ids.cpu())


def _by_owner(owner: Tensor, size: int) -> tuple[Tensor, list[int]]:
    counts: list[int] = torch.bincount(owner, minlength=size).tolist()
    return torch.argsort(owner, stable=True), counts


def _ranges(first: Tensor, number: Tensor) -> Tensor:
    """Returns the concatenated ranges first_i .. first_i + number_i - 1."""
    before = number.cumsum(0) - number
    steps = torch.arange(int(number.sum()), device=first.device)
    return (first - before).repeat_interleave(number) + steps


POOLS: dict[type, type] = {
    SelectTopK: DistSelectTopK,
    FilterEdges: DistFilterEdges,
    pyg.ASAPooling: DistASAPooling,
    pyg.ClusterPooling: DistClusterPooling,
    pyg.EdgePooling: DistEdgePooling,
    pyg.GraphUNet: DistGraphUNet,
}

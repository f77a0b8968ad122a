"""Cuts a graph, or the part of each rank, into clusters for minibatches."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.index import index2ptr
from torch_geometric.loader import ClusterData as PyGClusterData
from torch_geometric.loader.cluster import Partition as PyGPartition
from torch_geometric.utils import sort_edge_index

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.serialization import allowing
from pyg_distcomm.graph.edge_index import DistEdgeIndex
from pyg_distcomm.loader.partitioned_source import alike
from pyg_distcomm.partition.atomic import keep_file, kept_file
from pyg_distcomm.partition.cutters import cut
from pyg_distcomm.partition.partition import Partition
from pyg_distcomm.sampling.graph_block import is_share
from pyg_distcomm.tensor.dist_tensor import DistTensor


class ClusterData(PyGClusterData):
    """Cuts a graph into clusters ([Chiang19]), as PyG's class does, by `partition.cut`.

    Neither pyg-lib nor torch-sparse is needed. Of a whole graph, all that PyG's class has is
    there: `cluster_data[i]` is the subgraph of a cluster, `partition` and `data` are the
    graph by cluster (a copy, made when asked for).

    Of a share, from `pdc.partition`, each rank cuts the nodes that it owns into its part of
    the clusters, so that no edge travels, and a cluster lies with one rank; all ranks build
    it together. For the clusters of a whole graph on any number of ranks, give them as
    `method`. Price: 4 bytes a node, on every rank.

    Args:
        data: a Data, or a share of one.
        num_parts: how many clusters; of a share, at least one for each rank with nodes.
        recursive: has no use.
        save_dir, filename: of a whole graph, where the partition is kept for another run.
        log: has no use.
        keep_inter_cluster_edges, sparse_format: of `cluster_data[i]`, as in PyG.
        method: how to cut, see `pyg_distcomm.partition`: "metis" (without pymetis, "ldg"),
            "ldg", "random" and others, or the cluster of each node `[n]`.
        seed: of the cut.

    Raises:
        ValueError: for fewer clusters than ranks, or what `cut` refuses; on all ranks.
    """

    def __init__(
        self,
        data: Any,
        num_parts: int,
        recursive: bool = False,
        save_dir: str | None = None,
        filename: str | None = None,
        log: bool = True,
        keep_inter_cluster_edges: bool = False,
        sparse_format: Any = "csr",
        *,
        method: Any = "metis",
        seed: int = 0,
    ) -> None:
        if not isinstance(data, Data) or data.get("edge_index") is None:
            raise TypeError(
                "ClusterData takes a Data with an edge_index, or a share of one, got "
                f"{type(data).__name__}"
            )
        if sparse_format not in ("csr", "csc"):
            raise ValueError(
                f"sparse_format must be 'csr' or 'csc', got {sparse_format!r}"
            )
        if recursive:
            warnings.warn("recursive has no use here; leave it out", stacklevel=2)
        self.num_parts, self.recursive = num_parts, recursive
        self.keep_inter_cluster_edges = keep_inter_cluster_edges
        self.sparse_format, self.source = sparse_format, data
        self._partition_kept: PyGPartition | None = None
        self._data_kept: Any = None
        kept = _kept(save_dir, filename, num_parts)
        if is_share(data):
            if save_dir is not None:
                raise ValueError(
                    "save_dir keeps the clusters of a whole graph, got a share; leave it "
                    "out, and give kept clusters as method"
                )
            cluster = _of_share(data.edge_index, num_parts, method, seed)
        else:
            known = kept if kept is not None and kept.exists() else None
            cluster = (
                _of_whole(data, num_parts, method, seed)
                if known is None
                else _read(known, int(data.num_nodes or 0), num_parts)
            )
        self.node_perm = torch.argsort(cluster, stable=True)
        self.partptr = torch.zeros(num_parts + 1, dtype=torch.int64)
        self.partptr[1:] = torch.bincount(cluster, minlength=num_parts).cumsum(0)
        if kept is not None and known is None:
            keep_file(self.partition, kept, "clusters")

    @property
    def partition(self) -> PyGPartition:  # type: ignore[override]
        """Returns the edges by cluster, as PyG has them; of a whole graph."""
        if self._partition_kept is None:
            n = len(self.node_perm)
            place = torch.empty_like(self.node_perm)
            place[self.node_perm] = torch.arange(n)
            ends = place[self._whole().edge_index]
            by_row = self.sparse_format == "csr"
            edge_perm = torch.arange(ends.size(1))
            ends, edge_perm = sort_edge_index(ends, edge_perm, n, sort_by_row=by_row)
            first, other = ends if by_row else ends.flip(0)
            self._partition_kept = PyGPartition(
                index2ptr(first, n),
                other,
                self.partptr,
                self.node_perm,
                edge_perm,
                self.sparse_format,
            )
        return self._partition_kept

    @property
    def data(self) -> Any:
        """Returns the graph with nodes and edges by cluster, as PyG has it."""
        if self._data_kept is None:
            self._data_kept = self._permute_data(self._whole(), self.partition)
        return self._data_kept

    def _whole(self) -> Any:
        if is_share(self.source):
            raise TypeError(
                "no rank holds the graph of this ClusterData whole; load its clusters by "
                "ClusterLoader"
            )
        return self.source

    def __len__(self) -> int:
        return int(self.partptr.numel()) - 1


def _of_whole(data: Data, num_parts: int, method: Any, seed: int) -> Tensor:
    found = cut(data.edge_index, int(data.num_nodes or 0), num_parts, method, seed=seed)
    return found.owner.long()


def _of_share(edges: DistEdgeIndex, num_parts: int, method: Any, seed: int) -> Tensor:
    """Returns the cluster of each node of the graph; collective."""
    nodes = edges.nodes
    world, partition = nodes.mesh.world, nodes.partition
    rank, first, problem = world.rank, 0, None
    assert partition is not None  # of what pdc.partition returns
    own = torch.empty(0, dtype=torch.int64)
    name = method if isinstance(method, str) else "the cluster of each node"
    asked = collectives.all_gather_object((name, num_parts, seed), world)
    for other, wanted in enumerate(asked):
        if wanted != asked[0]:
            raise ValueError(
                "all ranks build a ClusterData of a share with the same method, num_parts "
                f"and seed; rank 0 gave {asked[0]}, and rank {other} {wanted}"
            )
    if not isinstance(method, str):
        given = method.full_tensor() if isinstance(method, DistTensor) else method
        with alike(world):
            found = Partition.from_owner(given, num_parts, partition.num_nodes)
        return found.owner.long()
    try:
        counts = _counts(partition.sizes, num_parts)
        first = sum(counts[:rank])
        topology = edges.topology
        ends = torch.stack([topology.source_gid, topology.target_gid])
        within = partition.owner_of(ends[0]) == rank
        local = torch.searchsorted(nodes.gid, ends[:, within])
        if counts[rank]:
            found = cut(local, len(nodes.gid), counts[rank], method, seed=seed)
            own = found.owner.long()
    except (ValueError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
    collectives.agree(problem, world)
    every = collectives.all_gather_rows((own + first).int(), partition.sizes, world)
    cluster = torch.empty(partition.num_nodes, dtype=torch.int64)
    begin = 0
    for part, count in enumerate(partition.sizes):
        cluster[partition.gids(part)] = every[begin : begin + count].long()
        begin += count
    return cluster


def _counts(sizes: Sequence[int], num_parts: int) -> list[int]:
    """Returns how many clusters each rank has: in proportion to its nodes, at least one."""
    some = [rank for rank, size in enumerate(sizes) if size]
    if num_parts < len(some):
        raise ValueError(
            f"num_parts={num_parts}, and {len(some)} ranks own nodes; give each a cluster"
        )
    counts = [int(size > 0) for size in sizes]
    for _ in range(num_parts - sum(counts) if some else 0):
        counts[max(some, key=lambda rank: sizes[rank] / counts[rank])] += 1
    return counts


def _kept(save_dir: str | None, filename: str | None, num_parts: int) -> Path | None:
    if save_dir is None:
        return None
    return Path(save_dir) / f"part_{num_parts}" / (filename or "metis.pt")


def _read(path: Path, num_nodes: int, num_parts: int) -> Tensor:
    """Returns the cluster of each node, from a file of ours or of PyG's class."""
    with allowing([PyGPartition]):
        found: PyGPartition = kept_file(path)
    if (len(found.node_perm), len(found.partptr)) != (num_nodes, num_parts + 1):
        raise ValueError(
            f"{path} holds {len(found.partptr) - 1} clusters of {len(found.node_perm)} nodes, "
            f"wanted {num_parts} of {num_nodes}; remove it"
        )
    cluster = torch.empty_like(found.node_perm)
    cluster[found.node_perm] = torch.repeat_interleave(found.partptr.diff())
    return cluster

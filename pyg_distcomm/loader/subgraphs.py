"""Loads subgraphs induced by sets of nodes: random parts, clusters, and ShaDow's k hops."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.index import index2ptr
from torch_geometric.loader import ClusterData as PyGClusterData
from torch_geometric.loader.cluster import Partition as PyGPartition
from torch_geometric.sampler import NodeSamplerInput
from torch_geometric.utils import sort_edge_index

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.consistency import check_alike, on_all_ranks
from pyg_distcomm.comm.serialization import allowing
from pyg_distcomm.kernels.sample_ops import spread
from pyg_distcomm.loader.base import Graph
from pyg_distcomm.loader.neighbor_loader import DistNeighborLoader
from pyg_distcomm.loader.options import (
    digest,
    ranks_of,
    refuse_draws,
)
from pyg_distcomm.partition.atomic import keep_file, read_whole
from pyg_distcomm.partition.cutters import cut
from pyg_distcomm.partition.partition import Partition
from pyg_distcomm.sampling.graph_block import is_share
from pyg_distcomm.sampling.neighbor_sampler import TypedSeeds
from pyg_distcomm.sharded.dist_tensor import DistTensor
from pyg_distcomm.sharded.edges import DistEdgeIndex

# attributes that neighbour loaders set, and PyG's subgraph loaders do not
_SEED_ATTRIBUTES = (
    "batch num_sampled_nodes num_sampled_edges input_id seed_time batch_size".split()
)
# arguments of neighbour loaders that do not apply
_REFUSED = ("neighbor_sampler", "input_nodes", "input_time")


class NodeSets:
    """Lists sets of nodes, which a loader takes instead of seeds.

    Args:
        ptr: `[s + 1]`, the first node of each set.
        node: `[ptr[-1]]` node ids; with node types, ids count through all types in order.
        sizes: the number of nodes of each type; None without types.
    """

    def __init__(
        self, ptr: Tensor, node: Tensor, sizes: dict[str, int] | None = None
    ) -> None:
        self.ptr, self.node, self.sizes, self.time = ptr, node, sizes, None
        self.input_type = next(iter(sizes)) if sizes else None

    @classmethod
    def single(cls, sizes: int | dict[str, int]) -> NodeSets:
        """Returns one set for each node of a graph, with that node."""
        typed = sizes if isinstance(sizes, dict) else None
        total = sizes if isinstance(sizes, int) else sum(sizes.values())
        every = torch.arange(total + 1)
        return cls(every, every[:-1], typed)

    def __len__(self) -> int:
        return len(self.ptr) - 1

    def __getitem__(self, index: Any) -> Any:
        """Returns the nodes of some sets together, as a sampler's input."""
        index = torch.as_tensor(index).view(-1)
        begin, count = self.ptr[index], self.ptr[index + 1] - self.ptr[index]
        which, step, _ = spread(count)
        node = self.node[begin[which] + step]
        if self.sizes is None:
            return NodeSamplerInput(input_id=node, node=node)
        typed, first = {}, 0
        for name, size in self.sizes.items():
            typed[name] = node[(node >= first) & (node < first + size)] - first
            first += size
        return TypedSeeds(node, typed, self.input_type)

    def digest(self) -> str:
        """Returns a hash of the sets."""
        return digest([self.ptr, self.node])


class SubgraphLoading(DistNeighborLoader[Graph]):
    """Loads induced subgraphs, with the bulks, ranks and states of `DistNeighborLoader`.

    Args:
        data: a Data or HeteroData, or a share of one.
        num_neighbors: fan-outs around the nodes of a set; an empty list for no neighbours.
        node_sets: the sets of nodes to load instead of seeds; None for `input_nodes`.
        **kwargs: as in `DistNeighborLoader`.
    """

    node_sets: Any = None

    def __init__(
        self,
        data: Any,
        num_neighbors: Sequence[int],
        node_sets: Any = None,
        **kwargs: Any,
    ) -> None:
        kwargs.pop("dataset", None)
        kwargs.pop("collate_fn", None)
        if node_sets is not None:
            given = [name for name in _REFUSED if kwargs.get(name) is not None]
            with on_all_ranks(ranks_of(data)):
                refuse_draws(kwargs.get("options"), type(self).__name__)
                if given:
                    raise ValueError(
                        f"{type(self).__name__} chooses the nodes of a batch itself; leave "
                        f"{', '.join(given)} out"
                    )
            self.node_sets = node_sets
            if isinstance(data, HeteroData):
                kwargs["input_nodes"] = data.node_types[0]
        super().__init__(data, num_neighbors, subgraph_type="induced", **kwargs)

    def _finish_init(self, inputs: list[Any], dataloader: dict[str, Any]) -> None:
        if self.node_sets is not None:
            self.input_data, inputs = self.node_sets, [self.node_sets.digest()]
            self.__dict__["dataset"] = range(len(self.node_sets))
        super()._finish_init(inputs, dataloader)

    def _sample(self, inputs: Any) -> Any:
        return self._arrange(super()._sample(inputs))

    def _sample_bulk(self, inputs: list[Any]) -> list[Any]:
        return [self._arrange(out) for out in super()._sample_bulk(inputs)]

    def _arrange(self, out: Any) -> Any:
        """Marks all nodes as seeds, so that no layer is trimmed."""
        node = out.node
        typed = isinstance(node, dict)
        out.num_sampled_nodes = (
            {k: [len(v)] for k, v in node.items()} if typed else [len(node)]
        )
        return out

    def postprocess(self, data: Any, padding: bool | None) -> Any:
        for store in data.stores:
            for name in _SEED_ATTRIBUTES:
                store.pop(name, None)
        return super().postprocess(data, padding)


class RandomNodeLoader(SubgraphLoading[Graph]):
    """Loads the subgraphs that random parts of the nodes induce, as PyG's loader does.

    With `shuffle=True` an epoch cuts the nodes, those of all types together, into
    `num_parts` random parts of equal size; batch t goes to rank t mod P. A batch has `n_id`
    and `e_id`, and edges by target.

    Args:
        data: a Data or HeteroData, or a share of one (see `DistNeighborLoader`, also for the
            price).
        num_parts: how many parts an epoch has.
        **kwargs: those of `torch.utils.data.DataLoader`, and transform and options of
            `DistNeighborLoader`.

    Raises:
        ValueError, TypeError: for fewer than one part, or what is no number; on all ranks.
    """

    def __init__(self, data: Graph, num_parts: int, **kwargs: Any) -> None:
        with on_all_ranks(ranks_of(data)):
            if not isinstance(num_parts, int):
                raise TypeError(f"num_parts must be a whole number, got {num_parts!r}")
            if num_parts < 1:
                raise ValueError(f"num_parts must be at least 1, got {num_parts}")
        whole: Any = data
        sizes = None
        if isinstance(data, HeteroData):
            sizes = {k: int(data[k].num_nodes or 0) for k in data.node_types}
        self.num_parts, self.num_nodes = num_parts, int(whole.num_nodes)
        super().__init__(
            data,
            [],
            NodeSets.single(sizes or self.num_nodes),
            batch_size=max(math.ceil(self.num_nodes / num_parts), 1),
            **kwargs,
        )


class ClusterData(PyGClusterData):
    """Cuts a graph into clusters ([Chiang19]), as PyG's class does, by `partition.cut`.

    Neither pyg-lib nor torch-sparse is needed. Of a whole graph, all that PyG's class has is
    there: `cluster_data[i]` is the subgraph of a cluster, `partition` and `data` are the
    graph by cluster (a copy, made when asked for).

    Of a share, from `pdc.partition`, each rank cuts the nodes that it owns into its part of
    the clusters, so that no edge travels, and a cluster lies with one rank; all ranks build
    it together. For the clusters of a whole graph on any number of ranks, give them as
    `method`. Price: 4 bytes per node, on every rank.

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
        kept = None
        if save_dir is not None:
            kept = Path(save_dir) / f"part_{num_parts}" / (filename or "metis.pt")
        if is_share(data):
            if save_dir is not None:
                raise ValueError(
                    "save_dir keeps the clusters of a whole graph, got a share; leave it "
                    "out, and give kept clusters as method"
                )
            cluster = _of_share(data.edge_index, num_parts, method, seed)
        else:
            nodes = int(data.num_nodes or 0)
            known = kept if kept is not None and kept.exists() else None
            if known is not None:
                cluster = _read(known, nodes, num_parts)
            else:
                found = cut(data.edge_index, nodes, num_parts, method, seed=seed)
                cluster = found.owner.long()
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


def _of_share(edges: DistEdgeIndex, num_parts: int, method: Any, seed: int) -> Tensor:
    """Returns the cluster of each node of a partitioned graph; collective."""
    nodes = edges.nodes
    world, partition = nodes.mesh.world, nodes.partition
    rank, first = world.rank, 0
    assert partition is not None  # of what pdc.partition returns
    own = torch.empty(0, dtype=torch.int64)
    name = method if isinstance(method, str) else "the cluster of each node"
    check_alike({"method": name, "num_parts": num_parts, "seed": seed}, world)
    if not isinstance(method, str):
        given = method.full_tensor() if isinstance(method, DistTensor) else method
        with on_all_ranks(world):
            found = Partition.from_owner(given, num_parts, partition.num_nodes)
        return found.owner.long()
    with on_all_ranks(world):
        counts = _counts(partition.sizes, num_parts)
        first = sum(counts[:rank])
        topology = edges.topology
        ends = torch.stack([topology.source_gid, topology.target_gid])
        within = partition.owner_of(ends[0]) == rank
        local = torch.searchsorted(nodes.gid, ends[:, within])
        if counts[rank]:
            found = cut(local, len(nodes.gid), counts[rank], method, seed=seed)
            own = found.owner.long()
    every = collectives.all_gather_rows((own + first).int(), partition.sizes, world)
    cluster = torch.empty(partition.num_nodes, dtype=torch.int64)
    begin = 0
    for part, count in enumerate(partition.sizes):
        cluster[partition.gids(part)] = every[begin : begin + count].long()
        begin += count
    return cluster


def _counts(sizes: Sequence[int], num_parts: int) -> list[int]:
    """Returns the number of clusters of each rank: in proportion to its nodes, at least one."""
    some = [rank for rank, size in enumerate(sizes) if size]
    if num_parts < len(some):
        raise ValueError(
            f"got num_parts={num_parts}, but {len(some)} ranks own nodes; give each a cluster"
        )
    counts = [int(size > 0) for size in sizes]
    for _ in range(num_parts - sum(counts) if some else 0):
        counts[max(some, key=lambda rank: sizes[rank] / counts[rank])] += 1
    return counts


def _read(path: Path, num_nodes: int, num_parts: int) -> Tensor:
    """Returns the cluster of each node, from a file of ours or of PyG's class."""
    with allowing([PyGPartition]):
        found: PyGPartition = read_whole(path)
    if (len(found.node_perm), len(found.partptr)) != (num_nodes, num_parts + 1):
        raise ValueError(
            f"{path} holds {len(found.partptr) - 1} clusters of {len(found.node_perm)} nodes, "
            f"wanted {num_parts} of {num_nodes}; remove it"
        )
    cluster = torch.empty_like(found.node_perm)
    cluster[found.node_perm] = torch.repeat_interleave(found.partptr.diff())
    return cluster


class ClusterLoader(SubgraphLoading[Data]):
    """Merges clusters of nodes, with the edges between them, into batches ([Chiang19]).

    As PyG's loader, which takes `batch_size` clusters at a time; batch t goes to rank t mod
    P. A batch has `n_id` and `e_id`, nodes by cluster and edges by target.

    Args:
        cluster_data: a `ClusterData` of this package, of a whole graph or of a share.
        **kwargs: as in `RandomNodeLoader`, and batch_size.

    Raises:
        TypeError: for a ClusterData of PyG, which has given nodes other numbers.
    """

    def __init__(self, cluster_data: ClusterData, **kwargs: Any) -> None:
        if not isinstance(cluster_data, ClusterData):
            raise TypeError(
                "cluster_data must be a pyg_distcomm.loader.ClusterData, got "
                f"{type(cluster_data).__module__}.{type(cluster_data).__name__}"
            )
        self.cluster_data = cluster_data
        sets = NodeSets(cluster_data.partptr, cluster_data.node_perm)
        super().__init__(cluster_data.source, [], sets, **kwargs)


class ShaDowKHopSampler(SubgraphLoading[Data]):
    """Loads a subgraph around each of some root nodes ([Zeng21]), as PyG's class does.

    The nodes are those of `depth` hops of sampled in-neighbours of the root, the edges all
    those between them. A batch is a `Batch` of such subgraphs: `batch` and `ptr` tell
    them apart, `root_n_id` is where their roots stand, and `y` has a row for each root.
    Batch t goes to rank t mod P. Neither torch-sparse nor pyg-lib is needed.

    Args:
        data: a Data, or a share of one (see `DistNeighborLoader`, also for the price).
        depth: hops.
        num_neighbors: in-neighbours to draw for a node, -1 for all.
        node_idx: ids or a mask of the roots (default: all nodes).
        replace: whether an edge may be drawn twice.
        **kwargs: as in `RandomNodeLoader`, and batch_size.
    """

    def __init__(
        self,
        data: Any,
        depth: int,
        num_neighbors: int,
        node_idx: Any = None,
        replace: bool = False,
        **kwargs: Any,
    ) -> None:
        if not isinstance(data, Data):
            raise TypeError(
                "ShaDowKHopSampler takes a Data, or a share of one, got "
                f"{type(data).__name__}; for node types, see DistNeighborLoader(disjoint=True)"
            )
        self.depth = depth
        super().__init__(
            data,
            [num_neighbors] * depth,
            input_nodes=node_idx,
            replace=replace,
            disjoint=True,
            **kwargs,
        )

    def _arrange(self, out: Any) -> Any:
        """Puts the nodes and edges of each subgraph one after the other, roots first."""
        order = torch.argsort(out.batch, stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        ends = place[torch.stack([out.row, out.col])]
        edges = torch.argsort(ends[1], stable=True)
        ends = ends[:, edges]
        out.row, out.col, out.edge = ends[0], ends[1], out.edge[edges]
        out.node, out.batch = out.node[order], out.batch[order]
        return super()._arrange(out)

    def postprocess(self, data: Any, padding: bool | None) -> Any:
        tree, roots = data.batch, int(data.batch_size)
        ptr = torch.zeros(roots + 1, dtype=torch.int64, device=tree.device)
        ptr[1:] = torch.bincount(tree, minlength=roots).cumsum(0)
        y = data.get("y")
        if isinstance(y, Tensor) and y.dim() and len(y) == len(tree):
            data.y = y[ptr[:-1]]
        for name in _SEED_ATTRIBUTES:
            data.pop(name, None)
        batch = Batch(batch=tree, ptr=ptr)
        for name, value in data.to_dict().items():
            batch[name] = value
        batch.root_n_id = ptr[:-1].clone()
        return DistNeighborLoader.postprocess(self, batch, padding)

"""Loads subgraphs induced by sets of nodes: random parts, clusters, k hops, or GraphSAINT's."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.index import index2ptr
from torch_geometric.loader import ClusterData as PyGClusterData
from torch_geometric.loader.cluster import Partition as PyGPartition
from torch_geometric.loader.utils import filter_data, filter_hetero_data
from torch_geometric.sampler import NodeSamplerInput
from torch_geometric.utils import sort_edge_index
from tqdm import tqdm

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.consistency import check_alike, on_all_ranks
from pyg_distcomm.comm.random import fold, fresh_seed, keyed_unit
from pyg_distcomm.comm.serialization import allowing
from pyg_distcomm.kernels.sample_ops import spread
from pyg_distcomm.loader.base import Graph
from pyg_distcomm.loader.neighbor_loader import DistNeighborLoader
from pyg_distcomm.loader.notes import World
from pyg_distcomm.loader.options import LoaderOptions, digest, ranks_of
from pyg_distcomm.partition.atomic import keep_file, read_whole
from pyg_distcomm.partition.cutters import cut
from pyg_distcomm.partition.partition import Partition
from pyg_distcomm.sampling.algebra import offsets
from pyg_distcomm.sampling.graph_block import is_share
from pyg_distcomm.sampling.neighbor_sampler import TypedSeeds
from pyg_distcomm.sharded.dist_tensor import DistTensor
from pyg_distcomm.sharded.edges import DistEdgeIndex

# arguments of neighbour loaders that do not apply
_REFUSED = ("neighbor_sampler", "input_nodes", "input_time")


class NodeSets:
    """Lists sets of nodes, which a loader takes instead of seeds."""

    def __init__(
        self,
        ptr: Tensor,  # [s + 1], the first node of each set
        node: Tensor,  # [ptr[-1]] ids; with types, they count through all types in order
        sizes: dict[str, int] | None = None,  # nodes of each type; None without types
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
    """Loads induced subgraphs, with the bulks, ranks and states of `DistNeighborLoader`."""

    node_sets: Any = None

    def __init__(
        self,
        data: Any,
        num_neighbors: Sequence[int],  # around the nodes of a set; empty for none
        node_sets: Any = None,  # to load instead of seeds; None for `input_nodes`
        **kwargs: Any,
    ) -> None:
        kwargs.pop("dataset", None)
        kwargs.pop("collate_fn", None)
        if node_sets is not None:
            given = [name for name in _REFUSED if kwargs.get(name) is not None]
            with on_all_ranks(ranks_of(data)):
                if given:
                    raise ValueError(
                        f"{type(self).__name__} chooses the nodes of a batch itself; leave "
                        f"{', '.join(given)} out"
                    )
            self.node_sets, self._draws_itself = node_sets, True
            if isinstance(data, HeteroData):
                kwargs["input_nodes"] = data.node_types[0]
        super().__init__(data, num_neighbors, subgraph_type="induced", **kwargs)

    def _finish_init(self, inputs: list[Any], dataloader: dict[str, Any]) -> None:
        if self.node_sets is not None:
            self.input_data, inputs = self.node_sets, [self.node_sets.digest()]
            self.__dict__["dataset"] = range(len(self.node_sets))
        super()._finish_init(inputs, dataloader)

    def _sample(self, bulk: list[Any]) -> list[Any]:
        return [self._arrange(out) for out in super()._sample(bulk)]

    def _arrange(self, out: Any) -> Any:
        """Marks all nodes as seeds, so that no layer is trimmed."""
        out.num_sampled_nodes = [len(out.node)]
        if isinstance(out.node, dict):
            out.num_sampled_nodes = {k: [len(v)] for k, v in out.node.items()}
        return out

    def pyg_filter_fn(self, out: Any) -> Any:
        """Filters the data as PyG does; sets no attributes of seeds, which it may have."""
        cut = filter_hetero_data if isinstance(out.node, dict) else filter_data
        data: Any = cut(self.data, out.node, out.row, out.col, out.edge)
        for store in data.stores:
            for name, ids in (("n_id", out.node), ("e_id", out.edge)):
                part = ids.get(store._key) if isinstance(ids, dict) else ids
                if part is not None:
                    store.setdefault(name, part)
        return data


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
            if not isinstance(num_parts, Integral):
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
        kept, nodes = None, int(data.num_nodes or 0)
        if save_dir is not None:
            kept = Path(save_dir) / f"part_{num_parts}" / (filename or "metis.pt")
        known = kept is not None and kept.exists()
        if is_share(data):
            if save_dir is not None:
                raise ValueError(
                    "save_dir keeps the clusters of a whole graph, got a share; leave it "
                    "out, and give kept clusters as method"
                )
            cluster = _of_share(data.edge_index, num_parts, method, seed)
        elif kept is not None and known:
            cluster = _read(kept, nodes, num_parts)
        else:
            found = cut(data.edge_index, nodes, num_parts, method, seed=seed)
            cluster = found.owner.long()
        self.node_perm = torch.argsort(cluster, stable=True)
        self.partptr = offsets(torch.bincount(cluster, minlength=num_parts))
        if kept is not None and not known:
            keep_file(self.partition, kept, "clusters")

    @cached_property
    def partition(self) -> PyGPartition:  # type: ignore[override]
        """The edges by cluster, as PyG has them; of a whole graph."""
        n = len(self.node_perm)
        place = torch.empty_like(self.node_perm)
        place[self.node_perm] = torch.arange(n)
        ends = place[self._whole().edge_index]
        by_row = self.sparse_format == "csr"
        edge_perm = torch.arange(ends.size(1))
        ends, edge_perm = sort_edge_index(ends, edge_perm, n, sort_by_row=by_row)
        first, other = ends if by_row else ends.flip(0)
        ptr, perm = index2ptr(first, n), self.node_perm
        kind = self.sparse_format
        return PyGPartition(ptr, other, self.partptr, perm, edge_perm, kind)

    @cached_property
    def data(self) -> Any:
        """The graph with nodes and edges by cluster, as PyG has it."""
        return self._permute_data(self._whole(), self.partition)

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
    gids = [partition.gids(part) for part in range(world.size)]
    cluster[torch.cat(gids)] = every.long()
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

    def pyg_filter_fn(self, out: Any) -> Any:
        """Filters the data, and tells the subgraphs apart."""
        data, count = super().pyg_filter_fn(out), len(out.metadata[0])
        data.batch = out.batch
        data.ptr = offsets(torch.bincount(out.batch, minlength=count))
        return data

    def postprocess(self, data: Any, padding: bool | None) -> Any:
        batch, y = Batch(**data.to_dict()), data.get("y")
        batch.root_n_id = data.ptr[:-1].clone()
        if isinstance(y, Tensor) and y.dim() and len(y) == len(data.batch):
            batch.y = y[batch.root_n_id]
        return super().postprocess(batch, padding)


_NORMS, _STEP = 0x6E6F726D, 0x57E9


class SampledSteps:
    """Lists the steps of an epoch, which a loader takes instead of seeds."""

    time = input_type = None

    def __init__(self, loader: GraphSAINTSampler) -> None:
        self._loader, self._steps = loader, loader.num_steps

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: Any) -> NodeSamplerInput:
        """Draws the nodes of a step by a fresh key."""
        return self._loader.drawn(fresh_seed())

    def digest(self) -> str:
        """Returns a text that identifies the sampler and its arguments."""
        return repr(self._loader)


class GraphSAINTSampler(SubgraphLoading[Data]):
    """Loads the subgraphs that drawn nodes induce ([Zeng20]); base of the classes that draw.

    Takes the arguments of PyG's classes, and draws in distribution what they draw; neither
    torch-sparse nor pyg-lib is needed. The nodes of a step are a function of (seed, epoch,
    number of the step), and step t goes to rank t mod P: `num_steps` is of all ranks
    together. A batch has `n_id` and `e_id`.

    With `sample_coverage` batches have `node_norm` and `edge_norm`, estimated once from
    subgraphs until nodes were drawn `sample_coverage` times each, on the mean:

        node_norm_v = (subgraphs / times v was drawn) / n
        edge_norm_e = (times its source was drawn) / (times e was in a subgraph)

    the second at most 1e4, and 0.1 for edges never met. Every rank estimates the same.

    A share of a graph is drawn from by its edges, so that these are gathered on every rank,
    as `topology="replicated"` says, and rows are fetched from their owners.

    Args:
        data: a Data, or a share of one.
        batch_size: how many nodes, edges or walks are drawn for a subgraph.
        num_steps: subgraphs of an epoch.
        sample_coverage: see above; 0 for no norms.
        save_dir: where norms are kept for another run.
        log: whether to show how far the norms are, on rank 0.
        **kwargs: as in `RandomNodeLoader`.

    Price: of a share, 16 bytes per edge once on every rank; see `DistFeatureStore` for rows.

    Raises:
        ValueError: for a topology other than "replicated", data that has norms already,
            numbers that cannot be, or that differ by rank for a share.
    """

    def __init__(
        self,
        data: Any,
        batch_size: int,
        num_steps: int = 1,
        sample_coverage: int = 0,
        save_dir: str | None = None,
        log: bool = True,
        **kwargs: Any,
    ) -> None:
        world = ranks_of(data)
        numbers = {
            "batch_size": batch_size,
            "num_steps": num_steps,
            "sample_coverage": sample_coverage,
        }
        with on_all_ranks(world):
            for name, value in numbers.items():
                least = int(name == "batch_size")
                if isinstance(value, bool) or not isinstance(value, Integral):
                    raise TypeError(f"{name} must be a whole number, got {value!r}")
                if value < least:
                    raise ValueError(f"{name} must be {least} or more, got {value}")
            if "node_norm" in data or "edge_norm" in data:
                raise ValueError(
                    "data has 'node_norm' or 'edge_norm', which this loader sets; rename them"
                )
            options = LoaderOptions.checked(
                type(self).__qualname__, kwargs.pop("options", None), kwargs
            )
            if options.topology == "partitioned":
                raise ValueError(
                    "topology='partitioned': nodes are drawn by all edges of the graph, so "
                    "that every rank needs them; leave topology out, or use "
                    "ShaDowKHopSampler or ClusterLoader"
                )
        if world is not None:
            check_alike({"numbers": numbers}, world)
            options = replace(options, topology="replicated")
        self.num_steps, self.sample_coverage = num_steps, sample_coverage
        self.save_dir, self.log = save_dir, log
        self._batch_size = batch_size
        self.N, self.E = int(data.num_nodes), int(data.num_edges)
        super().__init__(
            data, [], SampledSteps(self), batch_size=1, options=options, **kwargs
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._batch_size}, {self.num_steps})"

    def drawn(self, key: int) -> NodeSamplerInput:
        """Draws the nodes of a subgraph, as a sampler's input."""
        node = self.sample_nodes(self._batch_size, key).unique()
        inputs = NodeSamplerInput(input_id=node, node=node)
        inputs.key = key
        return inputs

    def sample_nodes(self, batch_size: int, key: int) -> Tensor:
        """Draws nodes [any], some of them more than once, by a key.

        Args:
            batch_size: how many, in the units of the class.
            key: of the draws; see `pyg_distcomm.comm.random`.
        """
        raise NotImplementedError(
            "GraphSAINTSampler is a base class; use GraphSAINTNodeSampler, "
            "GraphSAINTEdgeSampler or GraphSAINTRandomWalkSampler"
        )

    def _seeds_of(self, index: Any) -> Any:
        return self.drawn(index.key)

    def postprocess(self, data: Any, padding: bool | None) -> Any:
        if self.sample_coverage > 0:
            data.node_norm = self._rows("node_norm", data.n_id)
            data.edge_norm = self._rows("edge_norm", data.e_id)
        return super().postprocess(data, padding)

    def _rows(self, name: str, ids: Tensor) -> Tensor:
        values: Tensor = getattr(self, name)
        if self.placement is None:
            return values[ids]
        return self.placement.take(name, values, ids)

    # The graph as the sampler holds it: edges by target, then by id -------------------

    @cached_property
    def source(self) -> Tensor:
        """The sources of the edges [E], by target."""
        return self.node_sampler.row.long()

    @cached_property
    def target(self) -> Tensor:
        """The targets of the edges [E], ascending."""
        return torch.repeat_interleave(self.node_sampler.colptr.diff())

    @cached_property
    def out_edges(self) -> tuple[Tensor, Tensor]:
        """Where the out-edges of each node begin [N + 1], and their targets [E]."""
        ptr = offsets(torch.bincount(self.source, minlength=self.N))
        return ptr, self.target[torch.argsort(self.source, stable=True)]

    # Norms ---------------------------------------------------------------------------

    @property
    def node_norm(self) -> Tensor:
        """The norms of the nodes [N], float32."""
        return self._norms[0]

    @property
    def edge_norm(self) -> Tensor:
        """The norms of the edges [E], by id, float32."""
        return self._norms[1]

    @property
    def _filename(self) -> str:
        return f"{type(self).__name__.lower()}_{self.sample_coverage}.pt"

    @cached_property
    def _norms(self) -> tuple[Tensor, Tensor]:
        path = Path(self.save_dir or "", self._filename)
        if self.save_dir is not None and path.exists():
            node_norm, edge_norm = read_whole(path)
            if (len(node_norm), len(edge_norm)) != (self.N, self.E):
                raise ValueError(
                    f"{path} holds norms of {len(node_norm)} nodes and {len(edge_norm)} "
                    f"edges, and the graph has {self.N} and {self.E}; remove it"
                )
            return node_norm, edge_norm
        found = self._estimated()
        if self.save_dir is not None and World.now().rank == 0:
            keep_file(found, path, "norms of GraphSAINT")
        return found

    def _estimated(self) -> tuple[Tensor, Tensor]:
        self._sharding()  # all ranks have one seed from here on
        key = fold(self._agreed_seed(), _NORMS)
        drawn, met = torch.zeros(self.N), torch.zeros(self.E)
        wanted, subgraphs, nodes = self.N * self.sample_coverage, 0, 0
        quiet = not self.log or World.now().rank > 0
        bar = tqdm(total=wanted, desc="GraphSAINT norms", disable=quiet, leave=False)
        with bar:
            while nodes < wanted:
                for step in range(subgraphs, subgraphs + self.num_steps):
                    (out,) = self._sample([self.drawn(fold(key, step))])
                    drawn[out.node.cpu()] += 1
                    met[out.edge.cpu()] += 1
                    nodes += len(out.node)
                    bar.update(len(out.node))
                subgraphs += self.num_steps
        relation = self.node_sampler._topology.graph.relations[0]
        ids = (
            relation.row[1::2].long() if relation.stride == 2 else torch.arange(self.E)
        )
        of_source = torch.empty(self.E)
        of_source[ids] = drawn[self.source]
        edge_norm = (of_source / met).clamp_(0, 1e4)
        edge_norm[edge_norm.isnan()] = 0.1
        drawn[drawn == 0] = 0.1
        return subgraphs / drawn / self.N, edge_norm


class GraphSAINTNodeSampler(GraphSAINTSampler):
    """Draws the sources of `batch_size` random edges; see `GraphSAINTSampler`."""

    def sample_nodes(self, batch_size: int, key: int) -> Tensor:
        """Draws nodes with chances as their out-degrees, with replacement."""
        return self.source[(keyed_unit(key, batch_size) * self.E).long()]


class GraphSAINTEdgeSampler(GraphSAINTSampler):
    """Draws both ends of `batch_size` edges; see `GraphSAINTSampler`.

    Without replacement, an edge from u to v with weight indegree(u) + outdegree(v), as PyG's
    class draws; the weight of [Zeng20] is 1 / degree(u) + 1 / degree(v).
    """

    @cached_property
    def _weight(self) -> Tensor:
        into = torch.bincount(self.target, minlength=self.N)
        out = torch.bincount(self.source, minlength=self.N)
        return (into[self.source] + out[self.target]).double()

    def sample_nodes(self, batch_size: int, key: int) -> Tensor:
        """Draws edges by weight, by exponential keys, and returns their ends."""
        clock = -keyed_unit(key, self.E).log() / (self._weight + 1e-10)
        edge = clock.topk(min(batch_size, self.E), largest=False).indices
        return torch.cat([self.source[edge], self.target[edge]])


class GraphSAINTRandomWalkSampler(GraphSAINTSampler):
    """Draws the nodes of `batch_size` random walks; see `GraphSAINTSampler`.

    A walk starts at any node, follows out-edges, and stays where there are none.

    Args:
        data, batch_size, num_steps, sample_coverage, save_dir, log, **kwargs: as there.
        walk_length: how many steps a walk has.
    """

    def __init__(
        self,
        data: Any,
        batch_size: int,
        walk_length: int,
        num_steps: int = 1,
        sample_coverage: int = 0,
        save_dir: str | None = None,
        log: bool = True,
        **kwargs: Any,
    ) -> None:
        self.walk_length = walk_length
        super().__init__(
            data, batch_size, num_steps, sample_coverage, save_dir, log, **kwargs
        )

    def __repr__(self) -> str:
        size, steps = self._batch_size, self.num_steps
        return f"{type(self).__name__}({size}, {self.walk_length}, {steps})"

    @property
    def _filename(self) -> str:
        name = type(self).__name__.lower()
        return f"{name}_{self.walk_length}_{self.sample_coverage}.pt"

    def sample_nodes(self, batch_size: int, key: int) -> Tensor:
        """Draws the nodes of walks, with their starts."""
        ptr, target = self.out_edges
        node = (keyed_unit(key, batch_size) * self.N).long()
        found = [node]
        for step in range(self.walk_length):
            begin, degree = ptr[node], ptr[node + 1] - ptr[node]
            unit = keyed_unit(fold(key, _STEP, step), batch_size)
            place = begin + (unit * degree).long()
            ends = target[place.clamp(max=max(self.E - 1, 0))] if self.E else node
            node = torch.where(degree > 0, ends, node)
            found.append(node)
        return torch.cat(found)

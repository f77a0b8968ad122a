"""Loads subgraphs that sets of nodes induce: random parts, clusters, and around roots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import RandomSampler, SequentialSampler
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.sampler import NodeSamplerInput

from pyg_distcomm.loader.clusters import ClusterData
from pyg_distcomm.loader.neighbor_loader import DistNeighborLoader
from pyg_distcomm.loader.options import LoaderOptions, digest
from pyg_distcomm.loader.partitioned_source import alike, ranks_of
from pyg_distcomm.sampling.neighbor_sampler import TypedSeeds

# what loaders of neighbourhoods set, and PyG's loaders of subgraphs do not
_OF_SEEDS = (
    "batch num_sampled_nodes num_sampled_edges input_id seed_time batch_size".split()
)
_TAKEN = ("neighbor_sampler", "backend", "draws", "rule", "input_nodes", "input_time")


class NodeSets:
    """Lists sets of nodes, in the place of the seeds of a loader.

    Args:
        ptr: `[s + 1]`, where the nodes of each set begin.
        node: `[ptr[-1]]` ids; of all node types one after the other, where there are types.
        sizes: by node type, how many nodes there are; None without types.
    """

    def __init__(
        self, ptr: Tensor, node: Tensor, sizes: dict[str, int] | None = None
    ) -> None:
        self.ptr, self.node, self.sizes, self.time = ptr, node, sizes, None
        self.input_type = next(iter(sizes)) if sizes else None

    @classmethod
    def single(cls, sizes: int | dict[str, int]) -> NodeSets:
        """Returns a set of one node for each node of a graph."""
        typed = sizes if isinstance(sizes, dict) else None
        total = sizes if isinstance(sizes, int) else sum(sizes.values())
        every = torch.arange(total + 1)
        return cls(every, every[:-1], typed)

    def __len__(self) -> int:
        return len(self.ptr) - 1

    def __getitem__(self, index: Any) -> Any:
        """Returns the nodes of some sets together, as a sampler takes them."""
        index = torch.as_tensor(index).view(-1)
        begin, count = self.ptr[index], self.ptr[index + 1] - self.ptr[index]
        step = torch.arange(int(count.sum())) - torch.repeat_interleave(
            count.cumsum(0) - count, count
        )
        node = self.node[torch.repeat_interleave(begin, count) + step]
        if self.sizes is None:
            return NodeSamplerInput(input_id=node, node=node)
        typed, first = {}, 0
        for name, size in self.sizes.items():
            typed[name] = node[(node >= first) & (node < first + size)] - first
            first += size
        return TypedSeeds(node, typed, self.input_type)

    def digest(self) -> str:
        """Hashes the sets."""
        return digest([self.ptr, self.node])


class SubgraphLoading(DistNeighborLoader):
    """Loads subgraphs, with the bulks, ranks and states of `DistNeighborLoader`.

    Args:
        data: a Data or HeteroData, or a share of one.
        num_neighbors: fan-outs around the nodes of a set; none for the nodes alone.
        chosen: the sets of nodes, in the place of seeds; None for `input_nodes`.
        **kwargs: as `DistNeighborLoader` takes them.
    """

    chosen: Any = None

    def __init__(
        self,
        data: Any,
        num_neighbors: Sequence[int],
        chosen: Any = None,
        **kwargs: Any,
    ) -> None:
        kwargs.pop("dataset", None)
        kwargs.pop("collate_fn", None)
        if chosen is not None:
            given = [name for name in _TAKEN if kwargs.get(name) is not None]
            with alike(ranks_of(data)):
                if given:
                    raise ValueError(
                        f"{type(self).__name__} chooses the nodes of a batch itself; leave "
                        f"{', '.join(given)} out"
                    )
            self.chosen = chosen
            if isinstance(data, HeteroData):
                kwargs["input_nodes"] = data.node_types[0]
        super().__init__(data, num_neighbors, subgraph_type="induced", **kwargs)

    def _set_up(
        self,
        loader_options: LoaderOptions,
        inputs: list[Any],
        dataloader: dict[str, Any],
    ) -> None:
        if self.chosen is not None:
            self.input_data, inputs = self.chosen, [self.chosen.digest()]
            every = range(len(self.chosen))
            self.__dict__["dataset"] = every
            own = any(
                dataloader.get(k) is not None for k in ("sampler", "batch_sampler")
            )
            if not own:
                shuffled = bool(dataloader.get("shuffle")) and len(every) > 0
                order: Any = (
                    RandomSampler(every, generator=self.generator)
                    if shuffled
                    else SequentialSampler(every)
                )
                self.__dict__["sampler"] = self.batch_sampler.sampler = order
        super()._set_up(loader_options, inputs, dataloader)

    def _sample(self, inputs: Any) -> Any:
        return self._arranged(super()._sample(inputs))

    def _sample_bulk(self, inputs: list[Any]) -> list[Any]:
        return [self._arranged(out) for out in super()._sample_bulk(inputs)]

    def _arranged(self, out: Any) -> Any:
        """Notes that all nodes are read: layers are not to be trimmed to some seeds."""
        node = out.node
        typed = isinstance(node, dict)
        out.num_sampled_nodes = (
            {k: [len(v)] for k, v in node.items()} if typed else [len(node)]
        )
        return out

    def _finished(self, data: Any, padding: bool | None) -> Any:
        for store in data.stores:
            for name in _OF_SEEDS:
                store.pop(name, None)
        return super()._finished(data, padding)


class RandomNodeLoader(SubgraphLoading):
    """Loads the subgraphs that random parts of the nodes induce, as PyG's loader does.

    With `shuffle=True` an epoch cuts the nodes, those of all types together, into
    `num_parts` random parts of equal size; batch t goes to rank t mod P. A batch has `n_id`
    and `e_id`, and edges by target.

    Args:
        data: a Data or HeteroData, or a share of one (see `DistNeighborLoader`, also for the
            price).
        num_parts: how many parts an epoch has.
        **kwargs: those of `torch.utils.data.DataLoader`, and bulk_size, seed, even_batches,
            prefetch, split, topology, replication, sample_at, features, embedding and
            transform of `DistNeighborLoader`.

    Raises:
        ValueError, TypeError: for fewer than one part, or what is no number; on all ranks.
    """

    def __init__(self, data: Any, num_parts: int, **kwargs: Any) -> None:
        with alike(ranks_of(data)):
            if not isinstance(num_parts, int):
                raise TypeError(f"num_parts must be a whole number, got {num_parts!r}")
            if num_parts < 1:
                raise ValueError(f"num_parts must be at least 1, got {num_parts}")
        typed = isinstance(data, HeteroData)
        sizes = {k: data[k].num_nodes for k in data.node_types} if typed else {}
        self.num_parts, self.num_nodes = num_parts, int(data.num_nodes)
        super().__init__(
            data,
            [],
            NodeSets.single(sizes if typed else self.num_nodes),
            batch_size=max(math.ceil(self.num_nodes / num_parts), 1),
            **kwargs,
        )


class ClusterLoader(SubgraphLoading):
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


class ShaDowKHopSampler(SubgraphLoading):
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

    def _arranged(self, out: Any) -> Any:
        """Puts the nodes and edges of each subgraph one after the other, roots first."""
        order = torch.argsort(out.batch, stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        ends = place[torch.stack([out.row, out.col])]
        edges = torch.argsort(ends[1], stable=True)
        ends = ends[:, edges]
        out.row, out.col, out.edge = ends[0], ends[1], out.edge[edges]
        out.node, out.batch = out.node[order], out.batch[order]
        return super()._arranged(out)

    def _finished(self, data: Any, padding: bool | None) -> Any:
        tree, roots = data.batch, int(data.batch_size)
        ptr = torch.zeros(roots + 1, dtype=torch.int64, device=tree.device)
        ptr[1:] = torch.bincount(tree, minlength=roots).cumsum(0)
        y = data.get("y")
        if isinstance(y, Tensor) and y.dim() and len(y) == len(tree):
            data.y = y[ptr[:-1]]
        for name in _OF_SEEDS:
            data.pop(name, None)
        batch = Batch(batch=tree, ptr=ptr)
        for name, value in data.to_dict().items():
            batch[name] = value
        batch.root_n_id = ptr[:-1].clone()
        return DistNeighborLoader._finished(self, batch, padding)

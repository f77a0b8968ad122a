"""Loads minibatches of sampled neighbourhoods: of nodes, of links, or layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch_geometric.data import Data, FeatureStore, GraphStore
from torch_geometric.loader import LinkNeighborLoader, NeighborLoader
from torch_geometric.loader import NeighborSampler as PyGNeighborSampler
from torch_geometric.loader.neighbor_sampler import EdgeIndex
from torch_geometric.sampler import NegativeSampling, NodeSamplerInput
from torch_geometric.sampler.base import SubgraphType

from pyg_distcomm.comm.consistency import on_all_ranks
from pyg_distcomm.comm.random import fresh_seed
from pyg_distcomm.loader.base import BulkLoading, Graph
from pyg_distcomm.loader.options import (
    LoaderOptions,
    checked_links,
    checked_seeds,
    digest,
    ranks_of,
)
from pyg_distcomm.ops.csr import coo_of
from pyg_distcomm.sampling.neighbor_sampler import KeyedNeighborSampler
from pyg_distcomm.sharded.dist_tensor import DistTensor
from pyg_distcomm.sharded.edges import DistEdgeIndex


class DistNeighborLoader(BulkLoading[Graph], NeighborLoader):
    r"""Loads minibatches with sampled neighbourhoods, as PyG's `NeighborLoader` does.

    Takes all arguments of PyG's loader and yields the same batches in distribution, with
    neither pyg-lib nor torch-sparse. The content of a batch is a function of (seed,
    epoch, number of the batch): the same for every bulk size, thread count, number of
    workers and of ranks.

    Under a process group, `input_nodes` is the list of all ranks and global batch t goes
    to rank t mod P; lists that differ by rank are taken as split by the script. All
    ranks yield equally many batches.

    With `num_workers=0` minibatches are sampled and their features gathered `bulk_size` at
    a time: in the background, on cores that torch's threads leave idle (`OMP_NUM_THREADS`
    or `torch.set_num_threads` below the number of cores, shared by the ranks of a host);
    where all are in use, when asked for, on as many threads as torch uses. So training
    and loading never have more threads than there are cores; see docs/how-to/threads.md.
    Transforms run in the thread that asks. Features that are mapped from disk (np.memmap)
    are read once for each distinct node of a bulk. With workers, they sample as in PyG.

    Price: no communication but one note of each rank, when first used. Memory: the
    topology once, 8 bytes per edge and 8 per node, 8 bytes per node and thread, and the bulks
    in flight.

    Of a share, from `pdc.partition`, the minibatches are the same, bit for bit, and all
    ranks sample together, each its own: they build the loader together, and take the same
    number of minibatches. Seeds are ids of the whole graph, or the share's own masks.
    Bulks are sampled, and their rows fetched, by threads on process groups of their own.
    Price: see `PartitionedNeighborSampler` and `DistFeatureStore`.

    Args:
        data, num_neighbors, input_nodes, input_time, replace, subgraph_type, disjoint,
        temporal_strategy, time_attr, weight_attr, transform, transform_sampler_output,
        is_sorted, filter_per_worker, neighbor_sampler, directed: as in PyG.
        options: what PyG has no arguments for: seed, bulks, ranks, devices; see
            `LoaderOptions`.
        **kwargs: those of `torch.utils.data.DataLoader`.

    Raises:
        ValueError: for fan-outs below -1, seeds, edges, weights or times that cannot be.

    [Tripathy24] Sec. 4 (bulks), [Hamilton17] Alg. 2 (the rule), [Balin23] ("labor": LABOR-0,
    by sequential Poisson sampling as in its App. A.3).
    """

    def __init__(
        self,
        data: Graph | tuple[FeatureStore, GraphStore],
        num_neighbors: Any,
        input_nodes: Any = None,
        input_time: Any = None,
        replace: bool = False,
        subgraph_type: SubgraphType | str = "directional",
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        time_attr: str | None = None,
        weight_attr: str | None = None,
        transform: Callable | None = None,
        transform_sampler_output: Callable | None = None,
        is_sorted: bool = False,
        filter_per_worker: bool | None = None,
        neighbor_sampler: Any = None,
        directed: bool = True,
        *,
        options: LoaderOptions | None = None,
        **kwargs: Any,
    ) -> None:
        drawing = {
            "replace": replace,
            "subgraph_type": subgraph_type,
            "disjoint": disjoint,
            "temporal_strategy": temporal_strategy,
            "time_attr": time_attr,
            "weight_attr": weight_attr,
            "is_sorted": is_sorted,
            "directed": directed,
        }
        data = self._begin_init(data, options, kwargs, neighbor_sampler)
        own = transform_sampler_output is not None
        graph, neighbor_sampler = self._sampler_of(
            data, num_neighbors, neighbor_sampler, kwargs, own, drawing
        )
        if self.partitioned_source is None:
            input_nodes = checked_seeds(data, input_nodes)
        else:
            source = self.partitioned_source
            input_time = source.plain(input_time, "input_time")
            input_nodes = source.seeds(input_nodes, input_time, neighbor_sampler)
        super().__init__(
            graph,
            num_neighbors,
            input_nodes=input_nodes,
            input_time=input_time,
            time_attr=time_attr,
            transform=transform,
            transform_sampler_output=transform_sampler_output,
            filter_per_worker=filter_per_worker,
            neighbor_sampler=neighbor_sampler,
            **kwargs,
        )
        self.data, inputs = data, self.input_data
        one_hop = isinstance(num_neighbors, (list, tuple)) and [*num_neighbors] == [-1]
        drawn = (kwargs.get(name) for name in ("sampler", "batch_sampler", "shuffle"))
        if one_hop and isinstance(data, Data) and not any(d for d in drawn):
            every = torch.arange(data.num_nodes)
            split = self.options.split == "auto"
            self._reads_layers = split and torch.equal(inputs.node.cpu(), every)
        self._finish_init([inputs.node, inputs.time, inputs.input_type], kwargs)


class DistLinkNeighborLoader(BulkLoading[Graph], LinkNeighborLoader):
    r"""Loads minibatches around edges, as PyG's `LinkNeighborLoader` does.

    What `DistNeighborLoader` says of bulks, draws, ranks and epochs holds here for edges:
    under a process group `edge_label_index` is the list of all ranks. Negative edges are
    keyed as well, so that they too do not depend on workers or ranks.

    Of a share, from `pdc.partition`, the minibatches are the same, bit for bit; seed edges
    are pairs of ids of the whole graph, wherever these nodes are, or the share's own
    `edge_index`. Without a list all edges are seeds, 16 bytes per edge on every rank.

    Args:
        data, num_neighbors, edge_label_index, edge_label, edge_label_time, replace,
        subgraph_type, disjoint, temporal_strategy, neg_sampling, neg_sampling_ratio,
        time_attr, weight_attr, transform, transform_sampler_output, is_sorted,
        filter_per_worker, neighbor_sampler, directed: as in PyG.
        options, **kwargs: as in `DistNeighborLoader`.
    """

    def __init__(
        self,
        data: Graph | tuple[FeatureStore, GraphStore],
        num_neighbors: Any,
        edge_label_index: Any = None,
        edge_label: Any = None,
        edge_label_time: Any = None,
        replace: bool = False,
        subgraph_type: SubgraphType | str = "directional",
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        neg_sampling: Any = None,
        neg_sampling_ratio: float | None = None,
        time_attr: str | None = None,
        weight_attr: str | None = None,
        transform: Callable | None = None,
        transform_sampler_output: Callable | None = None,
        is_sorted: bool = False,
        filter_per_worker: bool | None = None,
        neighbor_sampler: Any = None,
        directed: bool = True,
        *,
        options: LoaderOptions | None = None,
        **kwargs: Any,
    ) -> None:
        drawing = {
            "replace": replace,
            "subgraph_type": subgraph_type,
            "disjoint": disjoint,
            "temporal_strategy": temporal_strategy,
            "time_attr": time_attr,
            "weight_attr": weight_attr,
            "is_sorted": is_sorted,
            "directed": directed,
        }
        data = self._begin_init(data, options, kwargs, neighbor_sampler)
        with on_all_ranks(ranks_of(data)):
            if neg_sampling_ratio:  # PyG's old name of it
                neg_sampling = NegativeSampling("binary", neg_sampling_ratio)
            neg_sampling = NegativeSampling.cast(neg_sampling)
        own = transform_sampler_output is not None
        graph, neighbor_sampler = self._sampler_of(
            data,
            num_neighbors,
            neighbor_sampler,
            kwargs,
            own,
            drawing,
            loader=f"{type(self).__qualname__}, neg_sampling={_named(neg_sampling)}",
        )
        if self.partitioned_source is None:
            edge_label_index = checked_links(data, edge_label_index)
        else:
            source = self.partitioned_source
            edge_label = source.plain(edge_label, "edge_label")
            edge_label_time = source.plain(edge_label_time, "edge_label_time")
            links = source.links(edge_label_index, neg_sampling, neighbor_sampler)
            edge_label_index, neg_sampling = links
        super().__init__(
            graph,
            num_neighbors,
            edge_label_index=edge_label_index,
            edge_label=edge_label,
            edge_label_time=edge_label_time,
            neg_sampling=neg_sampling,
            time_attr=time_attr,
            transform=transform,
            transform_sampler_output=transform_sampler_output,
            filter_per_worker=filter_per_worker,
            neighbor_sampler=neighbor_sampler,
            **kwargs,
        )
        self.data, inputs = data, self.input_data
        listed = [inputs.row, inputs.col, inputs.label, inputs.time, inputs.input_type]
        self._finish_init(listed, kwargs)

    def _sample(self, inputs: Any) -> Any:
        return self.link_sampler.sample_from_edges(
            inputs, neg_sampling=self.neg_sampling
        )

    def _sample_bulk(self, inputs: list[Any]) -> list[Any]:
        found: list[Any] = self.link_sampler.sample_bulk(inputs, self.neg_sampling)
        return found


def _named(negatives: NegativeSampling | None) -> str | None:
    """Describes how negative edges are drawn; weights may be this rank's rows."""
    if negatives is None:
        return None
    weights = negatives.src_weight, negatives.dst_weight
    marks = [
        digest([w])[:8] if type(w) is Tensor else None if w is None else "rows"
        for w in weights
    ]
    more = f", weights {marks}" if any(marks) else ""
    return f"{type(negatives).__name__}({negatives.mode.value!r}, {negatives.amount}{more})"


class NeighborSampler(PyGNeighborSampler):
    """Samples for each layer the neighbours of all nodes so far, as PyG's class does.

    Takes its arguments, and yields its batches (batch_size, n_id, adjs): with sizes of -1
    those of torch-sparse, which is not needed, and otherwise as many neighbours, drawn
    without replacement by torch's generator. A SparseTensor is sampled by torch-sparse.

    As in PyG each rank loads the whole list that it is given. The edges of a share are
    gathered on every rank; with one seed on all ranks all sample alike, so that
    `share.x[n_id]` are the rows of a batch. For batches that are shared out, and for a graph
    that fits no rank, see `DistNeighborLoader`.

    Args:
        edge_index: `[2, E]`, plain or of a share, or an adj_t of torch.sparse or torch-sparse.
        sizes, node_idx, num_nodes, return_e_id, transform, **kwargs: as in PyG.

    Price: of a share, 16 bytes per edge once on every rank.
    """

    def __init__(
        self,
        edge_index: Any,
        sizes: Sequence[int],
        node_idx: Tensor | None = None,
        num_nodes: int | None = None,
        return_e_id: bool = True,
        transform: Callable | None = None,
        **kwargs: Any,
    ) -> None:
        options = num_nodes, return_e_id, transform
        if not isinstance(edge_index, Tensor):
            super().__init__(edge_index, list(sizes), node_idx, *options, **kwargs)
            return
        for name in ("dataset", "collate_fn"):
            kwargs.pop(name, None)
        edges = edge_index
        if isinstance(edges, DistEdgeIndex):
            num_nodes = edges.nodes.total if num_nodes is None else num_nodes
            edges = edges.carrying(None).full_tensor()
        elif edges.layout != torch.strided:
            num_nodes = len(edges) if num_nodes is None else num_nodes
            edges = coo_of(edges)[0]
        edges = edges.as_subclass(Tensor).cpu()
        if isinstance(node_idx, DistTensor):
            node_idx = node_idx.full_tensor()
        mask = node_idx is not None and node_idx.dtype == torch.bool
        if num_nodes is None and mask:
            num_nodes = len(node_idx)  # type: ignore[arg-type]
        elif num_nodes is None:
            known = [edges, edges.new_empty(0) if node_idx is None else node_idx.cpu()]
            num_nodes = max(
                (int(ids.max()) + 1 for ids in known if len(ids.view(-1))), default=0
            )
        nodes = torch.arange(num_nodes) if node_idx is None else node_idx.view(-1)
        self.edge_index, self.node_idx, self.num_nodes = edge_index, node_idx, num_nodes
        self.sizes, self.return_e_id, self.transform = list(sizes), *options[1:]
        self.is_sparse_tensor, self.__val__ = False, None
        by_source = edges[0].argsort(stable=True)
        self._order = by_source[edges[1][by_source].argsort(stable=True)]
        data = Data(edge_index=edges[:, self._order], num_nodes=num_nodes)
        self._samplers = {
            size: KeyedNeighborSampler(data, [size]) for size in {*self.sizes}
        }
        ids: Any = (nodes.nonzero().view(-1) if mask else nodes).tolist()
        DataLoader.__init__(self, ids, collate_fn=self.sample, **kwargs)

    def sample(self, batch: Any) -> Any:
        """Returns (batch_size, n_id, adjs) of seeds, the last layer's edges first."""
        if self.is_sparse_tensor:
            return super().sample(batch)
        node, adjs = torch.as_tensor(batch), list[EdgeIndex]()
        count = len(node)
        for size in self.sizes:
            inputs: Any = NodeSamplerInput(input_id=None, node=node)
            inputs.key = fresh_seed()
            out: Any = self._samplers[size].sample_from_nodes(inputs)
            place = torch.argsort(out.col * len(out.node) + out.row, stable=True)
            ends = torch.stack([out.row[place], out.col[place]])
            edge = self._order[out.edge[place]] if self.return_e_id else None
            adjs.append(EdgeIndex(ends, edge, (len(out.node), len(node))))
            node = out.node
        found = count, node, adjs[0] if len(adjs) == 1 else adjs[::-1]
        return found if self.transform is None else self.transform(*found)

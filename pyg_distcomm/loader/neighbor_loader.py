"""Loads minibatches of sampled neighbourhoods, of nodes or of links, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.loader import LinkNeighborLoader, NeighborLoader
from torch_geometric.sampler import NegativeSampling
from torch_geometric.sampler.base import SubgraphType

from pyg_distcomm.loader.base import BulkLoading, make_sampler
from pyg_distcomm.loader.device_placement import Placement
from pyg_distcomm.loader.feature_store import DistFeatureStore
from pyg_distcomm.loader.options import (
    LoaderOptions,
    checked_links,
    checked_seeds,
    digest,
    errors_on_all_ranks,
    ranks_of,
    unused_arguments,
)
from pyg_distcomm.loader.partitioned_source import PartitionedOptions
from pyg_distcomm.loader.sparse_adjacency import with_edges


class DistNeighborLoader(BulkLoading, NeighborLoader):
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
    topology once, 8 bytes an edge and 8 a node, 8 bytes a node and thread, and the bulks
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
        draws: "neighbor", each node draws its neighbours by itself; or "labor", the nodes of
            a hop draw the same ones where they can ([Balin23]): fewer distinct nodes for the
            same fan-out, and what one node draws is distributed as before. Not with
            `replace`. "labor-1" and "labor-*" draw by importances, for fewer nodes again,
            and give batches an `edge_weight`; see `KeyedNeighborSampler`.
        bulk_size: minibatches sampled at a time; "auto" takes 4 for each thread (of a
            share 16), or as many as fit in 1 GiB, or in an eighth of the free memory.
        seed: of all draws and of the order of an epoch (default: from torch's generator,
            rank 0's).
        even_batches: what to do if batches do not come out even: "pad" repeats batches,
            marked by `batch.padding` (set on every batch of several ranks, so that a
            loss can be multiplied by 0), "drop" leaves out at most P - 1 (more, if the
            script has split the lists itself).
        prefetch: bulks made ahead of the one in use, in the background; 0 samples when
            asked. "auto" takes 1 if a core is idle, or if a bulk waits for other ranks or a
            disk, else 0.
        split: whether to share batches out over the ranks. "auto" does, unless the lists
            differ by rank, or batches are those of layer-wise inference: all neighbours
            in one hop, of all nodes, in order. Each rank then gets all of them, as the next
            layer reads all rows. False is for a loader of one rank's own.
        topology: of a share: "partitioned" samples it where it lies, "replicated" gathers
            the edges on every rank first, and only rows travel later. "auto" is
            "partitioned".
        replication: of a share: c, how many ranks hold each block of edges and rows
            (default: that of the mesh if its grid is (P/c, c, 1), else 1).
        sample_at: of a share: "owner" or "requester", where in-edges are drawn; the latter
            for importances.
        features: of a share: the `DistFeatureStore` to fetch rows from, with a cache, a
            codec or files on disk (default: one of the share's own rows).
        embedding: of a share: a `DistEmbedding` that the model looks up by `batch.n_id`, or
            a dictionary of them by node type: who has which of its rows is found out with
            the bulk, so that a step moves rows and gradients alone.
        backend: "pyg-lib" or "torch-sparse" to sample a graph that each rank holds by PyG's
            own compiled libraries, where they are installed; their draws are not keyed.
            pyg-lib draws no induced subgraphs, torch-sparse no disjoint trees, nor by time
            or weight.
        device: where minibatches are sampled, relabelled and their rows gathered, and where
            they lie: the same minibatches as on the host (None), bit for bit, in bulks made
            on a stream of their own while the last one trains. Of a Data or a HeteroData
            that each rank holds whole, on the host; not with workers. A state of one device
            is good on another. Memory there: the topology, 8 bytes an edge more for draws
            by weight, and the rows. A share is sampled on the host, and the device holds
            this rank's rows, and those that `features` keeps.
        graph_on, rows_on: "pinned" to leave the graph, or the rows of nodes and edges, in
            pinned host memory, where a CUDA device reads them by Triton; or "device". Rows
            may also stay where they are, "host", which picks those that travel.
        cache: of pinned rows, how many nodes' (of each type, those that most edges leave) the
            device keeps: a count (int) or a fraction (float).
        **kwargs: those of `torch.utils.data.DataLoader`. The arguments of
            `torch_geometric.distributed.DistNeighborLoader` are taken, and named in a
            warning if they have no use here.

    Raises:
        ValueError: for fan-outs below -1, seeds, edges, weights or times that cannot be.

    [Tripathy24] Sec. 4 (bulks), [Hamilton17] Alg. 2 (the rule), [Balin23] ("labor": LABOR-0,
    by sequential Poisson sampling as in its App. A.3).
    """

    def __init__(
        self,
        data: Any,
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
        draws: str = "neighbor",
        bulk_size: int | str = "auto",
        seed: int | None = None,
        even_batches: str = "pad",
        prefetch: int | str = "auto",
        split: bool | str = "auto",
        topology: str = "auto",
        replication: int | None = None,
        sample_at: str = "owner",
        features: DistFeatureStore | None = None,
        embedding: Any = None,
        backend: str | None = None,
        device: Any = None,
        graph_on: str = "device",
        rows_on: str = "device",
        cache: float = 0,
        **kwargs: Any,
    ) -> None:
        options: dict[str, Any] = {
            "replace": replace,
            "subgraph_type": subgraph_type,
            "disjoint": disjoint,
            "temporal_strategy": temporal_strategy,
            "time_attr": time_attr,
            "weight_attr": weight_attr,
            "is_sorted": is_sorted,
            "directed": directed,
            "draws": draws,
        }
        placing = topology, replication, sample_at, features, embedding
        with errors_on_all_ranks(ranks_of(data := with_edges(data))):
            loader_options = LoaderOptions(
                bulk_size, seed, even_batches, prefetch, split
            )
            self.placement = Placement.of(device, graph_on, rows_on, cache)
            kwargs = unused_arguments(kwargs)
            share_options = PartitionedOptions(*placing)
            if is_partitioned := share_options.applies_to(data, self.placement):
                share_options.check(neighbor_sampler, loader_options, kwargs, backend)
        if is_partitioned:
            source, neighbor_sampler = share_options.begin(
                type(self).__qualname__,
                data,
                num_neighbors,
                loader_options,
                kwargs,
                options,
                transform_sampler_output is not None,
            )
            input_time = source.plain(input_time, "input_time")
            input_nodes = source.seeds(input_nodes, input_time, neighbor_sampler)
            self.partitioned_source = source
        else:
            input_nodes = checked_seeds(data, input_nodes)
            chosen = data, num_neighbors, seed, kwargs, backend, self.placement
            neighbor_sampler = make_sampler(neighbor_sampler, *chosen, **options)
        super().__init__(
            source.placeholder if is_partitioned else data,
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
        self._finish_init(
            loader_options, [inputs.node, inputs.time, inputs.input_type], kwargs
        )
        one_hop = isinstance(num_neighbors, (list, tuple)) and [*num_neighbors] == [-1]
        in_order = not (kwargs.keys() & {"sampler", "batch_sampler"})
        in_order = in_order and not kwargs.get("shuffle")
        if split == "auto" and one_hop and in_order and inputs.input_type is None:
            every = torch.arange(data.num_nodes)
            self._reads_layers = torch.equal(inputs.node.cpu(), every)


class DistLinkNeighborLoader(BulkLoading, LinkNeighborLoader):
    r"""Loads minibatches around edges, as PyG's `LinkNeighborLoader` does.

    What `DistNeighborLoader` says of bulks, draws, ranks and epochs holds here for edges:
    under a process group `edge_label_index` is the list of all ranks. Negative edges are
    keyed as well, so that they too do not depend on workers or ranks.

    Of a share, from `pdc.partition`, the minibatches are the same, bit for bit; seed edges
    are pairs of ids of the whole graph, wherever these nodes are, or the share's own
    `edge_index`. Without a list all edges are seeds, 16 bytes an edge on every rank.

    Args:
        data, num_neighbors, edge_label_index, edge_label, edge_label_time, replace,
        subgraph_type, disjoint, temporal_strategy, neg_sampling, neg_sampling_ratio,
        time_attr, weight_attr, transform, transform_sampler_output, is_sorted,
        filter_per_worker, neighbor_sampler, directed: as in PyG.
        draws, bulk_size, seed, even_batches, prefetch, split, topology, replication,
        sample_at, features, embedding, backend, device, graph_on, rows_on, cache,
        **kwargs: as in `DistNeighborLoader`.
    """

    def __init__(
        self,
        data: Any,
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
        draws: str = "neighbor",
        bulk_size: int | str = "auto",
        seed: int | None = None,
        even_batches: str = "pad",
        prefetch: int | str = "auto",
        split: bool | str = "auto",
        topology: str = "auto",
        replication: int | None = None,
        sample_at: str = "owner",
        features: DistFeatureStore | None = None,
        embedding: Any = None,
        backend: str | None = None,
        device: Any = None,
        graph_on: str = "device",
        rows_on: str = "device",
        cache: float = 0,
        **kwargs: Any,
    ) -> None:
        options: dict[str, Any] = {
            "replace": replace,
            "subgraph_type": subgraph_type,
            "disjoint": disjoint,
            "temporal_strategy": temporal_strategy,
            "time_attr": time_attr,
            "weight_attr": weight_attr,
            "is_sorted": is_sorted,
            "directed": directed,
            "draws": draws,
        }
        placing = topology, replication, sample_at, features, embedding
        with errors_on_all_ranks(ranks_of(data := with_edges(data))):
            loader_options = LoaderOptions(
                bulk_size, seed, even_batches, prefetch, split
            )
            self.placement = Placement.of(device, graph_on, rows_on, cache)
            kwargs = unused_arguments(kwargs)
            if neg_sampling_ratio:  # PyG's old name of it
                neg_sampling = NegativeSampling("binary", neg_sampling_ratio)
            neg_sampling = NegativeSampling.cast(neg_sampling)
            share_options = PartitionedOptions(*placing)
            if is_partitioned := share_options.applies_to(data, self.placement):
                share_options.check(neighbor_sampler, loader_options, kwargs, backend)
        if is_partitioned:
            source, neighbor_sampler = share_options.begin(
                f"{type(self).__qualname__}, neg_sampling={_named(neg_sampling)}",
                data,
                num_neighbors,
                loader_options,
                kwargs,
                options,
                transform_sampler_output is not None,
            )
            edge_label = source.plain(edge_label, "edge_label")
            edge_label_time = source.plain(edge_label_time, "edge_label_time")
            links = source.links(edge_label_index, neg_sampling, neighbor_sampler)
            edge_label_index, neg_sampling = links
            self.partitioned_source = source
        else:
            edge_label_index = checked_links(data, edge_label_index)
            chosen = data, num_neighbors, seed, kwargs, backend, self.placement
            neighbor_sampler = make_sampler(neighbor_sampler, *chosen, **options)
        super().__init__(
            source.placeholder if is_partitioned else data,
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
        self._finish_init(loader_options, listed, kwargs)

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

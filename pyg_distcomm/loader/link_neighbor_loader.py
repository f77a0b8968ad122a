"""DistLinkNeighborLoader: PyG's LinkNeighborLoader, in bulks, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_geometric.loader import LinkNeighborLoader
from torch_geometric.sampler.base import SubgraphType

from pyg_distcomm.loader.base import BulkLoading, keyed_sampler
from pyg_distcomm.loader.options import LoaderOptions, checked_links, unused_arguments


class DistLinkNeighborLoader(BulkLoading, LinkNeighborLoader):
    r"""Loads minibatches around edges, as PyG's `LinkNeighborLoader` does.

    What `DistNeighborLoader` says of bulks, draws, ranks and epochs holds here for edges:
    under a process group `edge_label_index` is the list of all ranks. Negative edges are
    keyed as well, so that they too do not depend on workers or ranks.

    Args:
        data, num_neighbors, edge_label_index, edge_label, edge_label_time, replace,
        subgraph_type, disjoint, temporal_strategy, neg_sampling, neg_sampling_ratio,
        time_attr, weight_attr, transform, transform_sampler_output, is_sorted,
        filter_per_worker, neighbor_sampler, directed: as in PyG.
        bulk_size, seed, even_batches, prefetch, split, **kwargs: as in
            `DistNeighborLoader`.
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
        bulk_size: int | str = "auto",
        seed: int | None = None,
        even_batches: str = "pad",
        prefetch: int = 1,
        split: bool | str = "auto",
        **kwargs: Any,
    ) -> None:
        extras = LoaderOptions(bulk_size, seed, even_batches, prefetch, split)
        kwargs = unused_arguments(kwargs)
        edge_label_index = checked_links(data, edge_label_index)
        neighbor_sampler = keyed_sampler(
            neighbor_sampler,
            data,
            num_neighbors,
            seed,
            kwargs,
            replace=replace,
            subgraph_type=subgraph_type,
            disjoint=disjoint,
            temporal_strategy=temporal_strategy,
            time_attr=time_attr,
            weight_attr=weight_attr,
            is_sorted=is_sorted,
            directed=directed,
        )
        super().__init__(
            data,
            num_neighbors,
            edge_label_index=edge_label_index,
            edge_label=edge_label,
            edge_label_time=edge_label_time,
            neg_sampling=neg_sampling,
            neg_sampling_ratio=neg_sampling_ratio,
            time_attr=time_attr,
            transform=transform,
            transform_sampler_output=transform_sampler_output,
            filter_per_worker=filter_per_worker,
            neighbor_sampler=neighbor_sampler,
            **kwargs,
        )
        inputs = self.input_data
        listed = [inputs.row, inputs.col, inputs.label, inputs.time, inputs.input_type]
        self._set_up(extras, listed, kwargs)

    def _sample(self, inputs: Any) -> Any:
        return self.link_sampler.sample_from_edges(
            inputs, neg_sampling=self.neg_sampling
        )

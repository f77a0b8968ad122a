"""Checks where a loader samples a partitioned graph, and begins it on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch_geometric.data import Data, HeteroData

from pyg_distcomm.comm.random import fresh_seed
from pyg_distcomm.graph.edge_index import DistEdgeIndex
from pyg_distcomm.loader.feature_store import DistFeatureStore
from pyg_distcomm.loader.options import LoaderOptions
from pyg_distcomm.loader.partitioned_source import PartitionedSource
from pyg_distcomm.loader.placement import Placement
from pyg_distcomm.sampling.graph_block import is_share
from pyg_distcomm.sampling.neighbor_sampler import KeyedNeighborSampler
from pyg_distcomm.sampling.partitioned import PLACES, PartitionedNeighborSampler
from pyg_distcomm.tensor.dist_tensor import DistTensor

TOPOLOGIES = ("auto", "partitioned", "replicated")


@dataclass(frozen=True)
class PartitionedOptions:
    """Checks where a share is sampled and its rows are fetched; see `DistNeighborLoader`."""

    topology: str = "auto"
    replication: int | None = None
    sample_at: str = "owner"
    features: DistFeatureStore | None = None
    embedding: Any = None

    def __post_init__(self) -> None:
        if self.topology not in TOPOLOGIES:
            raise ValueError(
                f"topology must be one of {TOPOLOGIES}, got {self.topology!r}"
            )
        if self.sample_at not in PLACES:
            raise ValueError(
                f"sample_at must be one of {PLACES}, got {self.sample_at!r}"
            )

        if not isinstance(self.features, (DistFeatureStore, type(None))):
            raise TypeError(
                "features must be a DistFeatureStore, got "
                f"{type(self.features).__name__}"
            )

    def replicated_args(
        self, loader_options: LoaderOptions, dataloader: dict[str, Any], **options: Any
    ) -> dict[str, Any]:
        """Returns the arguments that must be the same on all ranks."""
        loading = {k: dataloader.get(k) for k in ("batch_size", "shuffle", "drop_last")}
        own = {**vars(self), "features": self.features is not None}
        types = self.embedding
        types = (
            sorted(types, key=str) if isinstance(types, Mapping) else types is not None
        )
        own["embedding"] = types
        return {**options, **loading, **vars(loader_options), **own}

    def source(
        self,
        data: Any,
        loader_options: LoaderOptions,
        dataloader: dict[str, Any],
        **options: Any,
    ) -> PartitionedSource:
        """Returns the source of a loader of a share; collective."""
        arguments = self.replicated_args(loader_options, dataloader, **options)
        given = data, self.replication, self.features, arguments, self.embedding
        return PartitionedSource(*given)

    def wanted(self, data: Any, placement: Placement | None = None) -> bool:
        """Tells whether a graph is spread; refuses options that need one that is, or not."""
        if is_share(data):
            if placement is not None and placement.graph_pinned:
                raise ValueError(
                    "graph_on='pinned': a partitioned graph is sampled on the hosts of all "
                    "ranks; leave graph_on out, or give each rank the whole graph"
                )
            if placement is not None and placement.cache:
                raise ValueError(
                    f"cache={placement.cache!r} is for a graph that each rank holds whole; "
                    "for a share give features=DistFeatureStore.from_data(..., cache=...)"
                )
            return True
        if isinstance(data, (Data, HeteroData)) and any(
            isinstance(value, DistTensor) for s in data.stores for value in s.values()
        ):
            raise ValueError(
                "this share of pdc.partition has no edges of any type to be sampled; load "
                "the whole graph, or batches of its rows"
            )
        used = {
            "topology='partitioned'": self.topology == "partitioned",
            f"replication={self.replication}": self.replication is not None,
            "sample_at='requester'": self.sample_at == "requester",
            "features": self.features is not None,
            "embedding": self.embedding is not None,
        }
        asked = [name for name, given in used.items() if given]
        if asked:
            raise ValueError(
                f"{', '.join(asked)} is for a graph spread over the ranks, got a "
                f"{type(data).__name__} that each rank holds whole; pass "
                "data = pyg_distcomm.partition(data, mesh)"
            )
        return False

    @staticmethod
    def check(
        sampler: Any,
        loader_options: LoaderOptions,
        dataloader: dict[str, Any],
        backend: str | None = None,
    ) -> None:
        """Refuses what cannot be done by all ranks together."""
        if backend is not None:
            raise ValueError(
                f"backend={backend!r} samples a graph that each rank holds whole, but this "
                "one is partitioned; leave it out"
            )
        if sampler is not None:
            raise ValueError(
                "neighbor_sampler was given, but a partitioned graph is sampled by all "
                "ranks together; leave it out"
            )
        if dataloader.get("num_workers", 0):
            raise ValueError(
                f"num_workers={dataloader['num_workers']}: a partitioned graph is sampled "
                "and its rows are fetched by threads of this process, which talk to the "
                "other ranks; leave num_workers out"
            )
        if loader_options.split is False:
            raise ValueError(
                "split=False is for a loader of one rank's own, but a partitioned graph "
                "is sampled by all ranks together; leave it out"
            )

    def begin(
        self,
        loader: str,
        data: Any,
        num_neighbors: Any,
        loader_options: LoaderOptions,
        dataloader: dict[str, Any],
        options: dict[str, Any],
        own_transform: bool,
    ) -> tuple[PartitionedSource, Any]:
        """Returns the source of a loader of a share, and what samples it; collective.

        Args:
            loader: what it is, the same on all ranks.
            data, num_neighbors: as it got them.
            loader_options, dataloader, options: its options, torch's and PyG's.
            own_transform: whether it got a `transform_sampler_output`.
        """
        source = self.source(
            data,
            loader_options,
            dataloader,
            num_neighbors=num_neighbors,
            own_transform=own_transform,
            loader=loader,
            **options,
        )
        return source, self.sampler(source, num_neighbors, options, loader_options.seed)

    def sampler(
        self,
        spread: PartitionedSource,
        num_neighbors: Any,
        options: dict[str, Any],
        seed: int | None,
    ) -> Any:
        """Returns what samples the share, or a copy of its edges; collective."""
        seed = fresh_seed() if seed is None else seed
        if options["subgraph_type"] == "bidirectional":
            spread.learn_edge_owners()  # the target of an edge turned round is its source
        if self.topology == "replicated":
            names = [options["time_attr"], options["weight_attr"]]
            data = gathered(spread.data, [name for name in names if name is not None])
            return KeyedNeighborSampler(data, num_neighbors, seed=seed, **options)
        return PartitionedNeighborSampler(
            spread.data,
            num_neighbors,
            channel=spread.sampling,
            sample_at=self.sample_at,
            seed=seed,
            **options,
        )


def gathered(data: Data | HeteroData, names: list[str]) -> Any:
    """Returns the edges of a share on every rank, and a few attributes; collective."""
    whole: Any = type(data)()
    for part in data.stores:
        key = getattr(part, "_key", None)
        out = whole if key is None else whole[key]
        if "num_nodes" in part:
            out.num_nodes = part.num_nodes
        for name, value in part.items():
            if isinstance(value, DistEdgeIndex):
                out[name] = value.full_tensor().contiguous()
            elif isinstance(value, DistTensor) and name in names:
                out[name] = torch.as_tensor(value.full_tensor())
    return whole

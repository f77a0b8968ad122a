"""Loads minibatches of many graphs, each of which is cut over the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import DistributedSampler, RandomSampler
from torch_geometric.data import Batch
from torch_geometric.loader import DataLoader as PygDataLoader

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.mesh import Mesh, given_mesh, latest_mesh
from pyg_distcomm.graph.partitioning import partition


class DataLoader(PygDataLoader):
    """Loads minibatches of graphs as PyG's DataLoader does, and cuts each over the ranks.

    Every rank reads and joins the graphs of a batch, and keeps its share of it, as
    `pdc.partition` returns it: whole graphs on one rank each, where these spread evenly.
    So the loop, the loss and its gradients are those of one process with the same batches,
    and no `replicate` is needed. Before `pdc.init`, and on one rank, it is PyG's own; so it
    is for what is no Batch of graphs.

    Batches are shuffled as rank 0 does: by its draw of torch's generator, once an epoch.

    Args:
        dataset: the graphs, all of them on every rank.
        batch_size, shuffle, follow_batch, exclude_keys: as in PyG.
        mesh: the ranks; those of the last `pdc.init` if None.
        method: how a batch is cut; see `pdc.partition`.
        **kwargs: those of `torch.utils.data.DataLoader`.

    Price: for each batch what `pdc.partition` exchanges (hashes, and an owner for each
    node), and the plans of its halos, which are empty where graphs are whole.

    Raises:
        ValueError: for a DistributedSampler; on all ranks, if the numbers of their graphs, or
            their batches, differ.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool = False,
        follow_batch: list[str] | None = None,
        exclude_keys: list[str] | None = None,
        *,
        mesh: Mesh | None = None,
        method: Any = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(kwargs.get("sampler"), DistributedSampler):
            raise ValueError(
                "leave the DistributedSampler out: this DataLoader cuts each batch over the "
                "ranks. For batches of a rank's own take torch_geometric.loader.DataLoader "
                "and pdc.replicate"
            )
        self.mesh = None if mesh is None else given_mesh(mesh, "DataLoader")
        self.method = method
        if shuffle and isinstance(dataset, Sized) and _chooses(kwargs):
            order = _SharedOrder(dataset, generator=kwargs.get("generator"))
            kwargs["sampler"], shuffle = order, False
        super().__init__(
            dataset, batch_size, shuffle, follow_batch, exclude_keys, **kwargs
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yields the batches of an epoch; collective."""
        mesh = self.mesh or latest_mesh()
        axis = None if mesh is None or mesh.size == 1 else mesh.world
        if axis is not None:
            _check_lengths(self.dataset, axis)
        if isinstance(self.sampler, _SharedOrder):
            self.sampler.axis = axis
        for batch in super().__iter__():
            yield batch if axis is None else _cut(batch, mesh, self.method)


def _chooses(options: Mapping[str, Any]) -> bool:
    """Whether the loader chooses the order itself."""
    return options.get("sampler") is None and options.get("batch_sampler") is None


def _check_lengths(dataset: Any, axis: Any) -> None:
    count = len(dataset) if isinstance(dataset, Sized) else -1
    counts = [row[0] for row in collectives.all_gather_counts([count], axis)]
    if len(set(counts)) > 1:
        raise ValueError(
            f"DataLoader takes all graphs on every rank, and the ranks have {counts}; give "
            "each the whole dataset, of which it keeps its share batch by batch"
        )


class _SharedOrder(RandomSampler):
    """Draws an order as torch's RandomSampler does, and rank 0's on all ranks."""

    axis: Any = None

    def __iter__(self) -> Iterator[int]:
        if self.generator is not None:
            yield from super().__iter__()
            return
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        if self.axis is not None:
            seed = collectives.broadcast_object(seed, self.axis)
        generator = torch.Generator().manual_seed(seed)
        yield from RandomSampler(self.data_source, generator=generator)


def _cut(value: Any, mesh: Any, method: Any) -> Any:
    """Returns a batch with each Batch of graphs in it cut over the ranks."""
    if isinstance(value, Batch):
        return partition(value, mesh, method)
    if isinstance(value, Mapping):
        return {key: _cut(part, mesh, method) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cut(part, mesh, method) for part in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_cut(part, mesh, method) for part in value)
    return value

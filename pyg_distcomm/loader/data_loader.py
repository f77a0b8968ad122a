"""Loads minibatches of many graphs, or of successive events, each cut over the ranks."""

from __future__ import annotations

import copy
import itertools
import zlib
from collections.abc import Iterator, Sized
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DistributedSampler
from torch_geometric.data import Batch, Data, TemporalData
from torch_geometric.loader import DataLoader as PygDataLoader
from torch_geometric.loader import ImbalancedSampler as ByClass
from torch_geometric.loader import TemporalDataLoader as PygTemporalDataLoader

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.mesh import Mesh, given_mesh, latest_mesh
from pyg_distcomm.graph.partition_data import listed_in_order, partition
from pyg_distcomm.graph.partition_data_types import event_rows
from pyg_distcomm.sharded.dist_tensor import DistTensor


class DataLoader(PygDataLoader):
    """Loads minibatches of graphs as PyG's DataLoader does, and cuts each over the ranks.

    Every rank reads and joins the graphs of a batch, and keeps its share of it, as
    `pdc.partition` returns it: whole graphs on one rank each, where these spread evenly.
    So the loop, the loss and its gradients are those of one process with the same batches,
    and no `replicate` is needed. Before `pdc.init`, and on one rank, it is PyG's own; so it
    is for what is no Batch of graphs.

    As PyG's, `iter(loader)` draws from torch's generator, or the one given, and so do samplers
    with the first batch. Ranks whose generators differ then take the batches that rank 0
    draws. `iter(loader)` itself is no collective.

    Args:
        dataset: the graphs, all of them on every rank.
        batch_size, shuffle, follow_batch, exclude_keys: as in PyG.
        mesh: the ranks; those of the last `pdc.init` if None.
        method: how a batch is cut; see `pdc.partition`.
        **kwargs: those of `torch.utils.data.DataLoader`.

    Price: two words of each rank an epoch, and rank 0's generators (5 KB each) where they
    differ; for each batch what `pdc.partition` exchanges (hashes, and an owner for each
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
        # whether this rank's generators differed from rank 0's in the epoch before, and
        # whether workers that stay between epochs have the seeds of rank 0's
        self._followed = self._seeded = False
        super().__init__(
            dataset, batch_size, shuffle, follow_batch, exclude_keys, **kwargs
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Begins an epoch, whose first batch is collective."""
        mesh, before = self.mesh or latest_mesh(), self._states()
        if mesh is None or mesh.size == 1:
            return super().__iter__()
        # workers would begin on batches of this rank's own, and draw random numbers for them
        wait = self.num_workers and self._followed
        return self._cut(None if wait else super().__iter__(), before, mesh)

    def _cut(
        self, batches: Iterator[Any] | None, before: list[Tensor], mesh: Mesh
    ) -> Iterator[Any]:
        # workers have drawn their first batches already; else, samplers draw now
        states = before if self.num_workers else self._states()
        count = len(self.dataset) if isinstance(self.dataset, Sized) else -1
        mine = [count, zlib.crc32(torch.cat(states).numpy().tobytes())]
        every = collectives.all_gather_counts(mine, mesh.world)
        counts = [other[0] for other in every]
        if len(set(counts)) > 1:
            raise ValueError(
                f"DataLoader takes all graphs on every rank, and the ranks have {counts}; "
                "give each the whole dataset, of which it keeps its share batch by batch"
            )
        differ = any(other != every[0] for other in every)
        self._followed = differ and mesh.rank > 0
        if differ:
            states = collectives.broadcast_object(states, mesh.world)
        if self._followed:
            batches = self._drawn_by(states, batches)
        elif batches is None:
            self._set_states(before)
            batches = super().__iter__()
        self._seeded = True
        cut = partial(partition, mesh=mesh, method=self.method)
        for batch in batches:
            yield tree_map_only(Batch, cut, batch)

    def _generators(self) -> list[torch.Generator]:
        """Returns the generators that samplers draw from."""
        own = [] if self.generator is None else [self.generator]
        return [torch.default_generator, *own]

    def _states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators()]

    def _set_states(self, states: list[Tensor]) -> None:
        for generator, state in zip(self._generators(), states, strict=True):
            generator.set_state(state)

    def _drawn_by(
        self, states: list[Tensor], batches: Iterator[Any] | None
    ) -> Iterator[Any]:
        """Returns the batches that generators in these states draw, and restores their own."""
        kept = self._states()
        self._set_states(states)
        try:
            if batches is None or self.num_workers:
                if not self._seeded:  # torch would keep workers with this rank's seeds
                    self._iterator = None
                batches = super().__iter__()
            first = list(itertools.islice(batches, 1))
        finally:
            self._set_states(kept)
        return itertools.chain(first, batches)


class TemporalDataLoader(PygTemporalDataLoader):
    """Loads successive events as PyG's TemporalDataLoader does, and cuts each batch over ranks.

    Every rank reads the events of a batch, and keeps a block of them: `src`, `dst`, `t`, `msg`
    and whatever has a row for each event are DistTensors, so the loss is that of all
    events, and no `replicate` is needed. `n_id` is an ordinary tensor, equal on all ranks, as
    PyG's `LastNeighborLoader` and `TGNMemory` take it. Negative targets are what rank 0 draws
    with torch's generator, on all ranks. Before `pdc.init`, and on one rank, it is PyG's own.

    Args:
        data: the events, in the order of time, all of them on every rank; or what
            `pdc.partition` returns of them, or a slice of that, whose messages are cut.
        batch_size, neg_sampling_ratio: as in PyG.
        mesh: the ranks; those of the last `pdc.init` if None.
        **kwargs: those of `torch.utils.data.DataLoader`.

    Price: with negatives, a batch sends these from rank 0 to all ranks. Of messages that are
    cut, each rank brings those of its block of the batch that others hold, after their ids.

    Raises:
        ValueError: on all ranks, if the numbers of events, or of a batch, differ.
    """

    def __init__(
        self,
        data: TemporalData,
        batch_size: int = 1,
        neg_sampling_ratio: float = 0.0,
        *,
        mesh: Mesh | None = None,
        **kwargs: Any,
    ) -> None:
        self.mesh = None if mesh is None else given_mesh(mesh, "TemporalDataLoader")
        self._sharded, data = {}, copy.copy(data)
        for name, value in data.to_dict().items():
            if isinstance(value, DistTensor):
                self._sharded[name] = value
                del data[name]
        super().__init__(data, batch_size, neg_sampling_ratio, **kwargs)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Begins an epoch, whose batches are collective."""
        mesh, batches = self.mesh or latest_mesh(), super().__iter__()
        return batches if mesh is None or mesh.size == 1 else self._cut(batches, mesh)

    def _cut(self, batches: Iterator[Any], mesh: Mesh) -> Iterator[Any]:
        mine = [len(self.data), self.events_per_batch]
        every = collectives.all_gather_counts(mine, mesh.world)
        if any(other != every[0] for other in every):
            raise ValueError(
                "give TemporalDataLoader all events and one batch_size on every rank; the "
                f"ranks have {every}"
            )
        begin = 0
        for batch in batches:
            count, batch = batch.num_events, _cut_events(batch, mesh)
            rows = batch.src.rows
            for name, value in self._sharded.items():
                ids = DistTensor((begin + rows.gid).to(value.device), rows)
                found: Any = value[ids]
                batch[name] = DistTensor.wrap(found.to_local(), rows)
            begin += count
            yield batch


def _cut_events(batch: TemporalData, mesh: Mesh) -> TemporalData:
    """Returns a batch of which each rank has a block of events."""
    count, cut = batch.num_events, {}
    if "neg_dst" in batch:
        drawn = collectives.broadcast_object(batch.neg_dst.tolist(), mesh.world)
        batch.neg_dst = batch.neg_dst.new_tensor(drawn)
        ends = batch.src, batch.dst, batch.neg_dst
        batch.n_id = torch.cat(ends).unique()
        cut["neg_dst"] = len(drawn)
    for key, value in batch._store.items():
        if key != "n_id" and isinstance(value, Tensor) and value.size(0) == count:
            cut[key] = count
    rows = {size: event_rows(size, mesh) for size in cut.values()}
    for key, size in cut.items():
        local = batch[key][rows[size].gid.to(batch[key].device)]
        batch[key] = DistTensor.wrap(local, rows[size])
    return listed_in_order(batch)


class ImbalancedSampler(ByClass):
    """Draws seeds with a chance of 1 / (size of their class), as PyG's sampler does.

    Given as `sampler` to a loader of this package, it draws the list of an epoch as a
    function of (seed, epoch): the same on all ranks, which share out its batches, and
    again where a state resumes. To any other loader it is PyG's own, with torch's generator.

    Args:
        dataset: a Data, a share of one from `pdc.partition` (collective), a list or data set
            of graphs, or classes [n], int64.
        input_nodes: ids or a mask of the seeds of the loader; of a share, also its masks.
        num_samples: draws of an epoch (default: as many as there are seeds).

    Price: of a share, the classes of all nodes once, on every rank.
    """

    def __init__(
        self, dataset: Any, input_nodes: Any = None, num_samples: int | None = None
    ) -> None:
        spread = isinstance(dataset, Data) and isinstance(dataset.get("y"), DistTensor)
        classes = dataset.y if spread else dataset
        super().__init__(_whole(classes), _whole(input_nodes), num_samples)


def _whole(values: Any) -> Any:
    """Returns the rows of all ranks; collective if they are row-sharded."""
    return values.full_tensor() if isinstance(values, DistTensor) else values

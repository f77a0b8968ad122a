"""Loads minibatches of events in the order of time, each cut over the ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import TemporalData
from torch_geometric.loader import TemporalDataLoader as PygTemporalDataLoader

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.mesh import Mesh, given_mesh, latest_mesh
from pyg_distcomm.graph.partitioning_batch import event_rows
from pyg_distcomm.tensor.dist_tensor import DistTensor
from pyg_distcomm.tensor.gather_by_id import plan_ids


class TemporalDataLoader(PygTemporalDataLoader):
    """Loads successive events as PyG's TemporalDataLoader does, and cuts each batch over ranks.

    Every rank reads the events of a batch, and keeps a block of them: `src`, `dst`, `t`, `msg`
    and whatever has a row for each event are DistTensors, so the loss is that of all
    events, and no `replicate` is needed. `n_id` is an ordinary tensor, equal on all ranks, as
    `LastNeighborLoader` and `TGNMemory` take it. Negative targets are what rank 0 draws
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
        """Yields the batches of an epoch; collective."""
        mesh = self.mesh or latest_mesh()
        if mesh is None or mesh.size == 1:
            yield from super().__iter__()
            return
        mine = [len(self.data), self.events_per_batch]
        every = collectives.all_gather_counts(mine, mesh.world)
        if any(other != every[0] for other in every):
            raise ValueError(
                "give TemporalDataLoader all events and one batch_size on every rank; the "
                f"ranks have {every}"
            )
        begin = 0
        for batch in super().__iter__():
            count, batch = batch.num_events, _cut(batch, mesh)
            rows = batch.src.rows
            for name, value in self._sharded.items():
                plan = plan_ids([begin + rows.gid], value.rows, mesh.world)[0]
                local = plan.to(value.device).gather(value.to_local())
                batch[name] = DistTensor.wrap(local, rows)
            begin += count
            yield batch


def _cut(batch: TemporalData, mesh: Mesh) -> TemporalData:
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
    return batch

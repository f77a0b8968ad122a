"""Cuts a TemporalData: each rank keeps the ends of all events, and the messages of a block."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch_geometric.data import TemporalData

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.consistency import sampled_digest
from pyg_distcomm.comm.ledger import balanced_split
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.comm.serialization import differing
from pyg_distcomm.partition.partition import Partition
from pyg_distcomm.tensor.dist_tensor import DistTensor


def cut_events(data: TemporalData, mesh: Mesh) -> TemporalData:
    """Returns events of which this rank has a block of what takes more than a number each.

    So `msg` is a DistTensor, and `src`, `dst` and `t` stay whole, by which all ranks find the
    events of a batch. On one rank it is the data itself.

    Args:
        data: the events, all of them on every rank.
        mesh: the ranks.

    Raises:
        TypeError: on all ranks, if they are cut already. ValueError: if ranks have others.
    """
    held = {name: x for name, x in data.to_dict().items() if isinstance(x, Tensor)}
    cut = next((name for name, x in held.items() if isinstance(x, DistTensor)), None)
    problem = f"{cut} is cut already; partition takes all events" if cut else None
    collectives.agree(problem, mesh.world, TypeError)
    told = {n: f"{list(x.shape)}, hash {sampled_digest(x):x}" for n, x in held.items()}
    found = differing(collectives.all_gather_object(told, mesh.world))
    if found is not None:
        raise ValueError(f"partition needs the same events on all ranks: {found}")
    if mesh.size == 1:
        return data
    out = copy.copy(data)
    rows = event_rows(data.num_events, mesh)
    for name, value in held.items():
        if value.dim() > 1 and len(value) == rows.total:
            own = value.detach()[rows.gid.to(value.device)]
            out[name] = DistTensor.wrap(own, rows)
    return out


def event_rows(count: int, mesh: Mesh) -> Rows:
    """Returns equal blocks of events, in order, whose owners all ranks know."""
    block = Rows.blocks(count, mesh)
    sizes = torch.tensor(balanced_split(count, mesh.size))
    owner = torch.arange(mesh.size).repeat_interleave(sizes)
    return Rows(block.gid, count, mesh, Partition.from_owner(owner, mesh.size, count))

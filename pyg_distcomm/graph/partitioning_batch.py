"""Cuts a PyG Batch, whole graphs to one rank, and a TemporalData, into blocks of messages."""

from __future__ import annotations

import copy
import heapq
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data, HeteroData, TemporalData

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.consistency import sampled_digest
from pyg_distcomm.comm.ledger import balanced_split
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.comm.serialization import differing
from pyg_distcomm.partition.partition import Partition
from pyg_distcomm.tensor.dist_tensor import DistTensor

UNEVEN = 1.1  # the most work of a rank over the mean at which graphs stay whole


def graph_owners(data: Any, parts: int) -> tuple[Any, float]:
    """Returns the part of each node, with the nodes of a graph in one, and how uneven it is.

    The graph with most nodes and edges goes first, each to the part with least of both.

    Args:
        data: a Batch, or what has its `batch` vector in each store of nodes.
        parts: their number.

    Returns:
        Owners `[n]`, of a HeteroData a dictionary of them by node type; and the work of the
        busiest part over the mean.

    Raises:
        ValueError: if there is no batch vector, or it is not one graph for each node.
    """
    stores = data.node_stores
    vectors = {store._key: _graph_of(store) for store in stores}
    count = max((int(v.max()) + 1 for v in vectors.values() if len(v)), default=0)
    work = torch.zeros(count, dtype=torch.int64)
    for vector in vectors.values():
        work += torch.bincount(vector, minlength=count)
    for store in data.edge_stores:
        target = None if store._key is None or stores[0]._key is None else store._key[2]
        ends = store.edge_index[1].cpu()
        work += torch.bincount(vectors[target][ends], minlength=count)
    part, loads = _packed(work, parts)
    owners = {name: part[vector] for name, vector in vectors.items()}
    uneven = max(loads) * parts / max(sum(loads), 1)
    return owners if isinstance(data, HeteroData) else owners[None], uneven


def default_method(data: Any, parts: int) -> Any:
    """Returns the owners of whole graphs, where these spread evenly, or "metis"."""
    if parts == 1 or not isinstance(data, Batch):
        return "metis"
    try:
        if data.num_graphs < parts:
            return "metis"
        owners, uneven = graph_owners(data, parts)
    except ValueError:  # joined without a batch vector
        return "metis"
    return owners if uneven <= UNEVEN else "metis"


def as_given(share: Any, data: Any) -> Any:
    """Returns a share as what was cut: a Batch with its graphs' number, or a script's class."""
    if not isinstance(data, Batch):
        if type(data) not in (Data, HeteroData):
            object.__setattr__(share, "__class__", type(data))  # its own would store it
        return share
    out: Any = Batch(_base_cls=type(data).__bases__[-1])
    for store in share.stores:
        mine, whole = out, data
        if store._key is not None:
            mine, whole = out[store._key], data[store._key]
        for name, value in store.items():
            mine[name] = value
        if hasattr(whole, "_num_nodes"):  # of each graph
            mine._num_nodes = whole._num_nodes
    for name in ("_num_graphs", "_slice_dict", "_inc_dict"):
        if hasattr(data, name):
            setattr(out, name, getattr(data, name))
    return out


def _graph_of(store: Any) -> Tensor:
    """Returns the graph `[n]` of each node of a store."""
    vector = store.get("batch")
    if not isinstance(vector, Tensor) or vector.shape != (int(store.num_nodes),):
        raise ValueError(
            "method 'graphs' keeps graphs whole, and needs data.batch, the graph of each "
            f"node, as torch_geometric.data.Batch has it; got {vector!r}"
        )
    if len(vector) and int(vector.min()) < 0:
        raise ValueError(
            f"data.batch has the graph {int(vector.min())}; give 0 or more"
        )
    return vector.cpu().long()


def _packed(work: Tensor, parts: int) -> tuple[Tensor, list[int]]:
    """Shares out pieces of work, the largest first, each to the part with least."""
    heap = [(0, part) for part in range(parts)]
    owner = torch.empty_like(work)
    for piece in work.argsort(descending=True, stable=True).tolist():
        load, part = heapq.heappop(heap)
        owner[piece] = part
        heapq.heappush(heap, (load + int(work[piece]), part))
    return owner, [load for load, _ in heap]


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

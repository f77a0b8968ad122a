"""Cuts a PyG Batch of many graphs: whole graphs to one rank, and a share that is a Batch."""

from __future__ import annotations

import heapq
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data, HeteroData

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
        mine = out if store._key is None else out[store._key]
        for name, value in store.items():
            mine[name] = value
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

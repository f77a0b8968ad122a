"""Makes the share of a graph a Data, or HeteroData, of tensors sharded below autograd."""

from __future__ import annotations

from typing import Any

from pyg_distcomm.graph.edge_index import DistEdgeIndex
from pyg_distcomm.sharded import edges
from pyg_distcomm.sharded.dist_tensor import DistTensor
from pyg_distcomm.tensor.dist_tensor import DistTensor as FunctionTensor


def sharded(share: Any) -> Any:
    """Returns a share whose tensors compute aten ops; its rows are those of `share`."""
    out = share.__class__()
    for store, made in zip(share.stores, _stores(share, out), strict=True):
        for name, value in store.items():
            made[name] = wrapped(value)
    return out


def _stores(share: Any, out: Any) -> list[Any]:
    keys = [getattr(store, "_key", None) for store in share.stores]
    return [
        out._global_store
        if k is None and len(keys) > 1
        else (out._store if k is None else out[k])
        for k in keys
    ]


def wrapped(value: Any) -> Any:
    """Returns one attribute of a share."""
    if isinstance(value, DistEdgeIndex):
        return edges.DistEdgeIndex.of(value.to_local(), value.topology)
    if isinstance(value, FunctionTensor):
        local = value.to_local().detach()
        out = DistTensor(local, value.rows)
        return out.requires_grad_() if value.requires_grad else edges.attribute(out)
    return value

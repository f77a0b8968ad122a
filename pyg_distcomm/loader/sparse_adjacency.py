"""Samples graphs whose edges are an `adj_t` of torch.sparse, which PyG's loaders do not take.

The values of the matrix travel as an attribute of its edges, whose name has its layout, and are
put together again in each minibatch.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.index import index2ptr

from pyg_distcomm.graph.partition_data_types import with_planned_edges
from pyg_distcomm.ops.csr import coo_of
from pyg_distcomm.sharded.dist_tensor import DistTensor, is_rows
from pyg_distcomm.sharded.edges import DistEdgeIndex

_NAME = "values of adj_t in "
_BESIDE = " beside edge_index"  # which the graph has, and so has a minibatch


def with_edges(data: Any) -> Any:
    """Returns a graph with an edge_index in place of each adj_t of torch.sparse.

    Its edges are in the order of the matrix, by target and source.

    Raises:
        TypeError: for other compressed matrices of rows, of which torch selects none.
        ValueError: for a share with rows of an edge_index whose edges are not those of adj_t.
    """
    if not isinstance(data, (Data, HeteroData)):
        return data
    data = with_planned_edges(data)
    for store in data.stores:
        for name, value in store.items():
            if name != "adj_t" and isinstance(value, Tensor):
                _check_rows(store, name, value)
    if not any(map(_holds, data.edge_stores)):
        return data
    out = copy.copy(data)
    for store in filter(_holds, out.edge_stores):
        adj, layout = store.pop("adj_t"), "torch.sparse_csr"
        beside = _BESIDE if "edge_index" in store else ""
        if isinstance(adj, DistEdgeIndex):
            _check_same_edges(store, adj)
            store.edge_index = adj.carrying(None)
            values: Any = adj.weight
            if values is None:
                kind = torch.get_default_dtype()
                ones = adj.to_local().new_ones(len(adj.edges), dtype=kind)
                values = DistTensor.wrap(ones, adj.edges)
        else:
            layout = str(adj.layout)
            store.edge_index, values = coo_of(adj)
        store[_NAME + layout + beside] = values
    return out


def _check_rows(store: Any, name: str, value: Tensor) -> None:
    if value.layout in (torch.strided, torch.sparse_coo):
        return
    if store.is_node_attr(name) or store.is_edge_attr(name):
        raise TypeError(
            f"{name!r} is {value.layout}, of which torch selects no rows; give "
            f"{name}.to_sparse_coo(), or {name}.to_dense()"
        )


def _check_same_edges(store: Any, adj: DistEdgeIndex) -> None:
    edges = store.get("edge_index")
    if edges is None or edges.topology is adj.topology:
        return
    for name, value in store.items():
        if is_rows(value) and value.rows is edges.edges:
            raise ValueError(
                f"{name!r} has a row for each edge of edge_index, and adj_t, by which a loader "
                f"samples, has them in another order; leave adj_t or {name!r} out"
            )


def _holds(store: Any) -> bool:
    adj = store.get("adj_t")
    return isinstance(adj, Tensor) and (
        adj.layout != torch.strided or isinstance(adj, DistEdgeIndex)
    )


def holds_matrices(data: Any) -> bool:
    """Returns whether a graph of `with_edges` had an adj_t of torch.sparse."""
    stores = data.edge_stores if isinstance(data, (Data, HeteroData)) else ()
    return any(name.startswith(_NAME) for store in stores for name in store)


def with_matrices(batch: Any) -> Any:
    """Puts the adj_t of torch.sparse together again in a minibatch of `with_edges`."""
    for store in batch.edge_stores:
        for name in [name for name in store if name.startswith(_NAME)]:
            sizes = store.size()
            source, target = store.edge_index
            order = torch.argsort(target * max(sizes[0], 1) + source, stable=True)
            store.adj_t = torch.sparse_csr_tensor(
                index2ptr(target[order], sizes[1]),
                source[order],
                store.pop(name)[order],
                (sizes[1], sizes[0]),
                check_invariants=False,
            )
            if not name.endswith(_BESIDE):
                del store.edge_index
            layout = name.removeprefix(_NAME).removesuffix(_BESIDE)
            if layout == "torch.sparse_coo":
                store.adj_t = store.adj_t.to_sparse_coo()
            elif layout == "torch.sparse_csc":
                store.adj_t = store.adj_t.to_sparse_csc()
    return batch

"""Compares what ranks change of a share, and shards what a script has set as a whole."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.comm.serialization import first_difference
from pyg_distcomm.graph.attribute_order import listed_in_order
from pyg_distcomm.sharded.dist_tensor import DistTensor, is_rows
from pyg_distcomm.sharded.edges import DistEdgeIndex, shard_as


def agree(problem: Exception | None, mesh: Mesh) -> None:
    """Raises the first problem of any rank on all ranks."""
    kinds = collectives.all_gather_object(
        type(problem) if problem else None, mesh.world
    )
    kind = next((k for k in kinds if k is not None), ValueError)
    collectives.agree(None if problem is None else str(problem), mesh.world, kind)


def agree_same(
    problem: Exception | None, settings: Mapping[str, Any], mesh: Mesh, name: str
) -> None:
    """Raises the first problem, or the first difference between ranks, on all ranks."""
    agree(problem, mesh)
    found = first_difference(collectives.all_gather_object(settings, mesh.world))
    if found is not None:
        raise ValueError(
            f"{name} needs the same arguments on all ranks: {found}; gather what one "
            "rank alone has seen"
        )


def union_of_ranks(places: Tensor, mesh: Mesh, op: str) -> Tensor:
    """Returns the sorted numbers of all ranks on every rank; collective."""
    sizes = [row[0] for row in collectives.all_gather_counts([len(places)], mesh.world)]
    every = collectives.all_gather_rows(places, sizes, mesh.world, op=op)
    return every.sort().values


def fully_sharded(data: Any) -> Any:
    """Returns a share with all edges and attributes sharded, also those that were whole.

    A script may have set some, and what sums over equal edges returns whole ones.
    """
    out = listed_in_order(copy.copy(with_planned_edges(data)))
    rows = rows_of_types(out)
    for store in out.stores:
        key = getattr(store, "_key", None)
        known = store.get("edge_index", store.get("adj_t"))
        source, target = (key[0], key[2]) if isinstance(key, tuple) else (key, key)
        plain = isinstance(known, Tensor) and not isinstance(known, DistEdgeIndex)
        if plain and "edge_index" in store and target in rows and source in rows:
            typed = isinstance(key, tuple)
            sources = rows[source] if typed else None
            known = store["edge_index"] = DistEdgeIndex.cut(
                known, rows[target], sources
            )
        for name, value in list(store.items()):
            plain = isinstance(value, Tensor) and not hasattr(value, "to_local")
            if not plain or "index" in name or not value.dim():
                continue
            own: Rows | None = None
            if hasattr(store, "is_edge_attr") and store.is_edge_attr(name):
                own = known.edges if isinstance(known, DistEdgeIndex) else None
            elif hasattr(store, "is_node_attr") and store.is_node_attr(name):
                own = rows.get(key)
            if own is not None and len(value) == own.count:
                store[name] = DistTensor.wrap(value[own.place_on(value.device)], own)
    return out


def with_planned_edges(data: Any) -> Any:
    """Returns a share whose edges are planned for, also those that an op returned.

    They are with the owners of their targets, and so are the attributes that have a row for
    each edge. Collective, if there are such edges.
    """
    out, rows = data, rows_of_types(data)
    for store in data.edge_stores:
        edges, key = store.get("edge_index"), store._key
        if not isinstance(edges, DistTensor) or isinstance(edges, DistEdgeIndex):
            continue
        typed = isinstance(key, tuple)
        source, target = (rows.get(key[0]), rows.get(key[2])) if typed else (None, None)
        target = target if typed else edges.rows.nodes or rows.get(key)
        if target is None or (typed and source is None):
            continue
        if edges.rows.nodes is target and not typed:
            made = DistEdgeIndex.of_ends(edges[0], edges[1])
        else:
            made = DistEdgeIndex.cut(edges.full_tensor(), target, source)
        out = copy.copy(data) if out is data else out
        mine = out[key] if typed else out
        for name, value in store.items():
            if is_rows(value) and store.is_edge_attr(name):
                local = shard_as(value, made.edges)
                assert local is not None  # of as many rows as there are edges
                mine[name] = DistTensor.wrap(local, made.edges)
        mine.edge_index = made
    return out


def rows_of_types(data: Any) -> dict[Any, Rows]:
    """Returns the rows of each node type that an attribute or edge type of the share has."""
    found: dict[Any, Rows] = {}
    for store in data.edge_stores:
        edges = store.get("edge_index", store.get("adj_t"))
        if isinstance(edges, DistEdgeIndex):
            key = store._key if isinstance(store._key, tuple) else (None, None, None)
            found |= {key[0]: edges.sources, key[2]: edges.nodes}
    for store in data.node_stores:
        for value in store.values():
            if is_rows(value) and value.rows.partition is not None:
                found.setdefault(store._key, value.rows)
    return found

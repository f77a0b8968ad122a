"""Compares what ranks change of a share, and shards what a script has set as a whole."""

from __future__ import annotations

import copy
from typing import Any

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.sharded.dist_tensor import DistTensor, is_rows, local_at
from pyg_distcomm.sharded.edges import DistEdgeIndex


def agree(problem: Exception | None, mesh: Mesh) -> None:
    """Raises the first problem of any rank on all ranks."""
    kinds = collectives.all_gather_object(
        type(problem) if problem else None, mesh.world
    )
    kind = next((k for k in kinds if k is not None), ValueError)
    collectives.agree(None if problem is None else str(problem), mesh.world, kind)


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
                local = local_at(value, made.edges, 0)
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

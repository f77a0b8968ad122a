"""Reads the topology of PyG's (FeatureStore, GraphStore) pairs."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch_geometric.data import FeatureStore, GraphStore, remote_backend_utils

Csc = tuple[
    int, int, Tensor, Tensor, Tensor | None
]  # source, target, colptr, row, perm


@dataclass(frozen=True, eq=False)
class Stored:
    """What a pair of stores says of a graph, types as numbers."""

    sizes: tuple[int, ...]
    node_types: list[Any]
    edge_types: list[Any]
    relations: list[Csc]
    node_time: list[Tensor | None]
    edge_time: list[Tensor | None]


def read_stores(
    stores: tuple[FeatureStore, GraphStore], time_attr: str | None, backward: bool
) -> Stored:
    """Reads all edges, and times by the rules of PyG's own sampler."""
    features, graph = stores
    edge_attrs = graph.get_all_edge_attrs()
    edge_types = list(dict.fromkeys(attr.edge_type for attr in edge_attrs))
    times = _times(features, time_attr)
    if edge_types == [None]:
        n = max(edge_attrs[0].size)
        time = _only(times) if time_attr is not None else None
        # PyG takes an attribute called 'time' to be of nodes, and any other of edges
        by_node = time_attr == "time"
        csc = _csc(graph, backward)
        return Stored(
            (n,),
            [None],
            [None],
            [(0, 0, *csc)],
            [time if by_node else None],
            [None if by_node else time],
        )
    names = [a.group_name for a in features.get_all_tensor_attrs()]
    names = [name for name in names if isinstance(name, str)]
    names += [end for s, _, t in edge_types for end in (s, t)]
    node_types = list(dict.fromkeys(names))
    index = {name: k for k, name in enumerate(node_types)}
    sizes = {t: remote_backend_utils.num_nodes(*stores, t) for t in node_types}
    colptr, row, perm = _csc(graph, backward)
    relations = []
    for key in edge_types:
        ends = index[key[0]], index[key[2]]
        source, target = ends[::-1] if backward else ends
        relations.append((source, target, colptr[key], row[key], perm.get(key)))
    return Stored(
        tuple(int(sizes[t]) for t in node_types),
        node_types,
        edge_types,
        relations,
        [times.get(t) for t in node_types],
        [times.get(t) for t in edge_types],
    )


def _csc(graph: GraphStore, backward: bool) -> Any:
    """Returns (colptr, row, perm), or one dictionary of each by edge type."""
    if backward:
        colptr, row, perm = graph.csr()
    else:
        row, colptr, perm = graph.csc()
    return colptr, row, perm


def _times(features: FeatureStore, name: str | None) -> dict[Any, Tensor]:
    if name is None:
        return {}
    attrs = [
        copy.copy(a) for a in features.get_all_tensor_attrs() if a.attr_name == name
    ]
    for attr in attrs:
        attr.index = None  # all of it
    found = {
        a.group_name: t
        for a, t in zip(attrs, features.multi_get_tensor(attrs), strict=True)
    }
    kinds = {isinstance(group, str) for group in found}
    if not found or (len(kinds) > 1 and None not in found):
        raise ValueError(
            f"time attribute '{name}' must be of node types or of edge types, and of one "
            f"kind only; the feature store has it for {list(found)}"
        )
    return found


def _only(times: dict[Any, Tensor]) -> Tensor:
    if len(times) != 1:
        raise ValueError(
            "Temporal sampling specified but did not find any temporal data"
            if not times
            else f"more than one group has times: {list(times)}"
        )
    return next(iter(times.values()))

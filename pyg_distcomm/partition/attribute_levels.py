"""Tells attributes of nodes, of edges and of the graph apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

Kind = Literal["node", "edge", "graph"]

STRUCTURE = ("edge_index", "num_nodes")
NODE_NAMES = ("x", "y", "pos", "batch")
EDGE_NAMES = ("edge_attr", "edge_weight", "edge_type")


def attribute_kinds(
    data: Data, node_attrs: Iterable[str] = (), edge_attrs: Iterable[str] = ()
) -> dict[str, Kind]:
    """Sorts the attributes of `data`, edge_index and num_nodes apart, into kinds.

    A tensor or array is of the nodes or of the edges when its first dimension is as
    long and is the one that PyG would concatenate; all else is of the graph. Where the
    graph has as many nodes as edges, names decide: those with "edge" in them against
    x, y, pos, batch and *_mask. The names in node_attrs and edge_attrs are as declared.

    Raises ValueError for a name that nothing decides, for a declared one that is absent
    or does not fit, and for x, a *_mask, edge_attr, edge_weight or edge_type that fits
    neither.
    """
    declared: dict[str, Kind] = dict.fromkeys(node_attrs or (), "node")
    for name in edge_attrs or ():
        if name in declared:
            raise ValueError(f"{name!r} is declared both in node_attrs and edge_attrs")
        declared[name] = "edge"
    for name in declared:
        if name not in data or name in STRUCTURE:
            raise ValueError(f"{name!r} is declared, but is no attribute of {data}")
    return {
        name: _kind(data, name, declared.get(name))
        for name in data.to_dict()  # data.keys() has no fixed order
        if name not in STRUCTURE
    }


def shape_kinds(
    shapes: Mapping[str, tuple[int, ...]],
    num_nodes: int,
    num_edges: int,
    node_attrs: Iterable[str] = (),
    edge_attrs: Iterable[str] = (),
) -> dict[str, Kind]:
    """Sorts attributes of which only shapes are known, by the rules of all others."""
    data = Data(edge_index=torch.empty(2, num_edges, device="meta"))
    data.num_nodes = num_nodes
    for name, shape in shapes.items():
        data[name] = torch.empty(shape, device="meta")
    return attribute_kinds(data, node_attrs, edge_attrs)


def _kind(data: Data, name: str, declared: Kind | None) -> Kind:
    length = _length(data, name)
    nodes, edges = int(data.num_nodes or 0), data.num_edges
    if declared is not None:
        want = nodes if declared == "node" else edges
        if length != want:
            raise ValueError(
                f"{name!r} is declared as an attribute of the {declared}s, of which "
                f"there are {want}, but {_what(data[name])}"
            )
        return declared
    if length == nodes == edges:
        return _by_name(name, nodes)
    if length == nodes:
        return "node"
    if length == edges:
        return "edge"
    if length is not None and _must_fit(name):
        raise ValueError(
            f"{name!r} fits neither the {nodes} nodes nor the {edges} edges: "
            f"{_what(data[name])}; make it as long, or rename it to keep it as it is"
        )
    return "graph"


def _length(data: Data, name: str) -> int | None:
    """Gives the length of the dimension that PyG concatenates, if it is the first."""
    value = data[name]
    if not isinstance(value, (Tensor, np.ndarray)) or value.ndim == 0:
        return None
    dim = data.__cat_dim__(name, value)
    if not isinstance(dim, int) or dim % value.ndim != 0:
        return None
    return int(value.shape[0])


def _by_name(name: str, count: int) -> Kind:
    if "edge" in name:
        return "edge"
    if name in NODE_NAMES or name.endswith("_mask"):
        return "node"
    raise ValueError(
        f"{name!r} could be of the nodes or of the edges, of which there are {count} "
        f"each; say which with node_attrs=[{name!r}] or edge_attrs=[{name!r}]"
    )


def _must_fit(name: str) -> bool:
    return name == "x" or name in EDGE_NAMES or name.endswith("_mask")


def _what(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"it is {value!r}" if shape is None else f"its shape is {list(shape)}"

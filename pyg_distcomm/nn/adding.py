"""Sums rows of neighbours by a sparse product, where `propagate` of a layer does no more.

Layers whose message is a row, or a weighted row, and whose aggregation is a sum or a mean
multiply the matrix of their edges, also of edges that they derive from those of a graph, as
`gcn_norm` does. All else of the layer is PyG's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.comm import collectives
from pyg_distcomm.graph.product_cache import same_storage
from pyg_distcomm.graph.topology import OperatorKind, Topology
from pyg_distcomm.nn.layer_context import warn_about_grid
from pyg_distcomm.nn.message_forms import AGGREGATIONS, MESSAGES, adds_rows, layers_of
from pyg_distcomm.sharded.constants import key_of
from pyg_distcomm.sharded.dist_tensor import DistTensor
from pyg_distcomm.sharded.edges import DistEdgeIndex

_MOST = 64  # edges that layers derive from those of a graph, as those of each relation


@contextlib.contextmanager
def adding(conv: Any, topology: Topology) -> Iterator[None]:
    """Has the layers of a module sum rows by products in a block; collective once."""
    layers = [layer for layer in layers_of(conv) if adds_rows(layer)]
    if not layers:
        warn_about_grid(conv, topology, "what it makes of messages is no sum of rows")
    for layer in layers:
        vars(layer)["propagate"] = _propagate(layer, layer.propagate)
    try:
        yield
    finally:
        for layer in layers:
            vars(layer).pop("propagate", None)


def _propagate(layer: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    def propagate(edge_index: Any, size: Any = None, **given: Any) -> Any:
        found = _sum(layer, edge_index, given)
        return run(edge_index, size=size, **given) if found is None else found

    return propagate


def _sum(layer: Any, edge_index: Any, given: dict[str, Any]) -> Any:
    """Returns what `propagate` does, or None if it is no product of this edge_index."""
    name = MESSAGES[type(layer).message]
    given = {key: value for key, value in given.items() if value is not None}
    weight = None if name is None else given.get(name)
    x = given.get("x")
    x = x[0] if isinstance(x, (tuple, list)) and len(x) else x
    topology = None if set(given) - {"x", name} else planned(edge_index)
    if topology is None or layer.flow != "source_to_target":
        return None
    if topology.sources is not None:
        warn_about_grid(layer, topology, "edges go between two types of nodes")
    if not _fits(x, weight, topology) or topology.nodes.memory is not None:
        return None
    assert x is not None
    mesh = topology.nodes.mesh
    on_grid = mesh.grid[1:] != (1, 1)
    if topology.is_gridded and not _is_constant(weight):
        why = "weights of its edges learn, or are computed in each run"
        warn_about_grid(layer, topology, why)
        return None
    if on_grid and not topology.adds_on_grid:
        why = "a product on the grid takes no fewer numbers"
        warn_about_grid(layer, topology, why)
        return None
    mean = AGGREGATIONS[type(layer.aggr_module)] == "mean"
    edges = None if weight is None else _values(weight, topology)
    wide = x.dtype if edges is None else torch.promote_types(x.dtype, edges.dtype)

    def multiply() -> Tensor:
        local = x.to_local().contiguous()
        if on_grid:
            out = topology.add_rows(local, edges, OperatorKind(), wide)
        else:
            out = _matrix(topology, edges, wide) @ local
        if mean:
            out = out / topology.in_degree.clamp(min=1).to(out.dtype).unsqueeze(1)
        return out

    known = None
    if topology.ordering.keep_inputs:
        kept = "sum", mean, x.dtype
        known = topology.constants.product(kept, (x, weight), multiply)
    return DistTensor.from_local(multiply() if known is None else known, topology.nodes)


def _is_constant(weight: DistTensor | None) -> bool:
    return weight is None or key_of(weight) is not None


def _values(weight: DistTensor, topology: Topology) -> Tensor:
    """Returns the weights of own edges, those of a constant as one tensor while it is kept."""
    number = key_of(weight)
    if number is None:
        return weight.to_local()
    kept = topology.edges.derived.get("values")
    if kept is None or kept[0] != number:
        with torch.inference_mode(False):
            kept = number, weight.local.clone()
        topology.edges.derived["values"] = kept
    return kept[1]  # type: ignore[no-any-return]


def _matrix(topology: Topology, weight: Tensor | None, dtype: torch.dtype) -> Any:
    """Returns the matrix of edges whose product exchanges rows; collective once."""
    plan = topology.sum_plan(trainable=True)
    if weight is None:
        return plan.matrix
    if weight.requires_grad and torch.is_grad_enabled():
        return plan.with_learnt(weight.to(dtype))
    key = topology.halo, dtype
    seen, before, matrix = topology.weighted.get(key, (None, 0, None))
    now = -1 if weight.is_inference() else weight._version
    same = seen is not None and same_storage(seen, weight)
    if not same or before != now:
        matrix = plan.valued(weight.detach().to(dtype))
        topology.weighted[key] = weight, now, matrix
    return matrix


def _fits(x: Any, weight: Any, topology: Topology) -> bool:
    if type(x) is not DistTensor or x.dim() != 2 or not x.dtype.is_floating_point:
        return False
    if (
        x.dim_ != 0
        or x.rows is not topology.source_rows
        or topology.sources is not None
    ):
        return False
    if weight is None:
        return True
    known = type(weight) is DistTensor and weight.dim() == 1
    return known and weight.rows is topology.edges and weight.dtype.is_floating_point


def planned(edge_index: Any) -> Topology | None:
    """Returns the topology of edges, made once for constant ones that a layer derives.

    None where their targets are not those of the graph's edges, or where they are fewer than
    a quarter of the nodes: a matrix takes memory for each node. A graph has `_MOST` at once,
    none of which makes room for others: a model that goes round more of them would plan
    each of them anew. Collective the first time.
    """
    if type(edge_index) is not DistTensor or edge_index.dim_ != 1:
        return None
    if edge_index._topology is not None:
        return edge_index._topology if edge_index.weight is None else None
    number, rows = key_of(edge_index), edge_index.rows
    nodes = rows.nodes
    if number is None or edge_index.dim() != 2 or nodes is None:
        return None
    kept = nodes.derived.setdefault("edges", {})
    if number not in kept and len(kept) < _MOST:
        local, partition = edge_index.local, nodes.partition
        away = 1
        there = not local.numel() or int(local.max()) < nodes.count
        if partition is not None and there:
            owner = partition.owner_of(local[1].cpu().long())
            away = int((owner != nodes.mesh.rank).sum())
        both = torch.tensor([away, local.size(1)])
        away, count = collectives.all_reduce(both, nodes.mesh.world).tolist()
        fits = not away and 4 * count >= nodes.count
        made = DistEdgeIndex.build(local, nodes, rows)._topology if fits else None
        kept[number] = made
    return kept.get(number)  # type: ignore[no-any-return]

"""Replaces how a layer on a share propagates: by products of the graph, or rows over its link.

Layers whose message is a row, or a weighted row, and whose aggregation is a sum or a mean
multiply the matrix of their edges, also of edges that they derive from those of a graph, as
`gcn_norm` does. Over a link the exchange takes the place of `x[ids]` where the layer reads
source rows: in `_index_select`, which `propagate` calls; a link is not its own adjoint. All
else of the layer is PyG's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.comm import collectives
from pyg_distcomm.graph.topology import OperatorKind, Topology
from pyg_distcomm.halo.halo import NAMES, exchange
from pyg_distcomm.nn.layer_context import LayerContext, warn_about_grid
from pyg_distcomm.nn.message_forms import (
    AGGREGATIONS,
    MESSAGES,
    adds_rows,
    check_aggregations,
    is_coded,
    layers_of,
    with_attributes,
)
from pyg_distcomm.sharded.constants import key_of
from pyg_distcomm.sharded.dist_tensor import DistTensor
from pyg_distcomm.sharded.edges import DistEdgeIndex
from pyg_distcomm.sharded.ids import ids_of

_MOST = 64  # edges that layers derive from those of a graph, as those of each relation


def adding(conv: Any, topology: Topology) -> AbstractContextManager[None]:
    """Has the layers of a module sum rows by products in a block; collective once."""
    layers = [layer for layer in layers_of(conv) if adds_rows(layer)]
    if not layers:
        warn_about_grid(conv, topology, "it does not sum the rows of its neighbours")
    elif topology.sources is not None:
        warn_about_grid(conv, topology, "edges go between two types of nodes")
        layers = []
    return with_attributes(
        layers, lambda layer: {"propagate": BySum(layer, layer.propagate)}
    )


@dataclass(frozen=True)
class BySum:
    """Propagates a layer by a product where it can, and by `run` elsewhere."""

    layer: Any
    run: Callable[..., Any]

    def __call__(self, edge_index: Any, size: Any = None, **given: Any) -> Any:
        found = self.product(edge_index, given)
        return self.run(edge_index, size=size, **given) if found is None else found()

    def product(self, edge_index: Any, given: dict[str, Any]) -> Any:
        """Returns what computes a product; None if it is none of these edges; collective."""
        layer = self.layer
        name = MESSAGES[type(layer).message]
        given = {key: value for key, value in given.items() if value is not None}
        weight = None if name is None else given.get(name)
        x = given.get("x")
        x = x[0] if isinstance(x, (tuple, list)) and len(x) else x
        topology = None if set(given) - {"x", name} else planned(edge_index)
        if topology is None or layer.flow != "source_to_target":
            return None
        if not _fits(x, weight, topology) or topology.nodes.memory is not None:
            return None
        assert x is not None
        mesh = topology.nodes.mesh
        on_grid = mesh.grid[1:] != (1, 1)
        if topology.is_gridded and not _is_constant(weight):
            why = "its edge weights are learnt, or computed in each run"
            warn_about_grid(layer, topology, why)
            return None
        if on_grid and not topology.adds_on_grid:
            why = "a product on the grid would not send fewer numbers"
            warn_about_grid(layer, topology, why)
            return None
        mean = AGGREGATIONS[type(layer.aggr_module)] == "mean"
        edges = None if weight is None else _values(weight, topology)
        wide = x.dtype if edges is None else torch.promote_types(x.dtype, edges.dtype)

        def multiply() -> DistTensor:
            computed = not _is_constant(weight)
            matrix = topology.operator(OperatorKind(), edges, wide, computed=computed)
            out = matrix @ x.to_local().contiguous()
            if mean:
                out = out / topology.in_degree.clamp(min=1).to(out.dtype).unsqueeze(1)
            return DistTensor.from_local(out, topology.nodes)

        if not topology.ordering.keep_inputs:
            return multiply
        # the same tensor each time: A (A X) is kept, too
        number = None if weight is None else key_of(weight)
        inputs = x, weight if number is None else None
        kind, again = ("sum", mean, x.dtype, number), "kept" in vars(x)
        known: Any = topology.constants.product(kind, inputs, multiply, cache_now=again)
        if known is None:
            return multiply
        vars(known)["kept"] = True
        return lambda: known


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


def _fits(x: Any, weight: Any, topology: Topology) -> bool:
    if type(x) is not DistTensor or x.dim() != 2 or not x.dtype.is_floating_point:
        return False
    if x.dim_ or topology.sources is not None or x.rows is not topology.nodes:
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


def exchanging(conv: Any, context: LayerContext) -> AbstractContextManager[None]:
    """Fetches source rows by the link of a layer's call in a block; collective."""
    layers = layers_of(conv)
    if context.is_coded and context.link is not None:
        check_aggregations(layers, context.link)
    call = context.exchange()
    if context.topology.chunked:
        return with_attributes(layers, _ChunkVisit(context).stand_ins)
    return with_attributes([] if call is None else layers, _Visit(call).stand_ins)


def keeps_rows(layer: Any) -> bool:
    """Tells whether a layer caches propagated rows, as SGConv and SSGConv may."""
    names = vars(layer)
    return bool(names.get("cached")) and ("_cached_x" in names or "_cached_h" in names)


class _Visit:
    """Holds one call of a layer: which rows it has fetched."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.now: tuple[str, dict[str, Any]] = "", {}
        self.coded = 0
        self.fetched: list[tuple[Any, Any, Tensor]] = []

    def stand_ins(self, layer: Any) -> dict[str, Callable[..., Any]]:
        """Returns what takes the place of methods of a layer."""
        plain = layer._index_select

        def noting(verb: str, run: Callable[..., Any]) -> Callable[..., Any]:
            def call(edge_index: Any, size: Any = None, **given: Any) -> Any:
                self.now = verb, given
                return run(edge_index, size=size, **given)

            return call

        return {
            "propagate": noting("propagate", layer.propagate),
            "edge_updater": noting("edge_updater", layer.edge_updater),
            "_index_select": lambda src, index: self.select(layer, plain, src, index),
        }

    def select(
        self, layer: Any, plain: Callable[..., Tensor], src: Any, index: Any
    ) -> Tensor:
        """Returns the rows of `src` at ids, those of other ranks over the link."""
        spread = type(src) is DistTensor and type(index) is DistTensor
        ids = ids_of(index) if spread and src.dim_ == 0 else None
        place = None if ids is None else self.place(src, ids)
        if ids is None or place is None:
            return plain(src, index)
        halo, slot = place
        known = (t for x, of, t in self.fetched if x is src and of is halo)
        table = next(known, None)
        table = self.table(layer, src, halo) if table is None else table
        return DistTensor.from_local(table.index_select(0, slot), ids.rows)

    def place(self, src: Any, ids: Any) -> Any:
        """Returns the halo of rows at ids, and where they lie among own rows and ghosts."""
        plan = ids.exchange(src.rows)
        return None if plan is None or plan.halo.silent else (plan.halo, plan.slot)

    def table(self, layer: Any, src: Any, halo: Any) -> Tensor:
        """Returns own rows and ghosts."""
        verb, given = self.now
        name = next((k for k, v in given.items() if _holds(v, src)), "")
        local = src.to_local().contiguous()
        coded = is_coded(layer, verb, name, local)
        call = self.call if coded else self.call.as_exact("attention depends on it")
        link = call.wrap(halo, len(NAMES) + self.coded)
        self.coded += 1
        flat = local.unsqueeze(1) if local.dim() == 1 else local
        table = torch.cat([flat, exchange(flat, link)])
        table = table.squeeze(1) if local.dim() == 1 else table
        if not coded:
            self.fetched.append((src, halo, table))
        return table


class _ChunkVisit(_Visit):
    """Reads source rows of a chunk of a pipeline, each once; see `pipeline/chunk_graph.py`."""

    def __init__(self, context: LayerContext) -> None:
        super().__init__(None)
        self.here = context.topology.locals

    def place(self, src: Any, ids: Any) -> Any:
        return None if ids.end != 0 else (None, ids.local)

    def table(self, layer: Any, src: Any, halo: Any) -> Tensor:
        table = self.here.with_ghosts(src.to_local().contiguous())
        self.fetched.append((src, None, table))
        return table


def _holds(value: Any, src: Any) -> bool:
    return value is src or (
        isinstance(value, (tuple, list)) and any(v is src for v in value)
    )

"""Runs the layers of a stage on a chunk or on all nodes, with its inputs and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_distcomm.comm import random
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.pipeline.chunk_graph import ChunkPass, view_of
from pyg_distcomm.pipeline.chunks import ChunkPlan
from pyg_distcomm.pipeline.layer_stack import StackLayer, from_data
from pyg_distcomm.tensor.dist_tensor import DistTensor

Values = dict[str, Any]


@dataclass(frozen=True)
class StageTensors:
    """What crosses from stage to stage, side by side in one row per node.

    Args:
        names: of the values.
        shapes: for each value the shape of a row; for a list of tensors a list of them.
        dtype: of all of them.
    """

    names: tuple[str, ...]
    shapes: tuple[Any, ...]
    dtype: torch.dtype

    @staticmethod
    def of(
        values: Values, names: Sequence[str], where: str, nodes: Rows
    ) -> StageTensors:
        """Describes values of some names, with rows as nodes have."""
        shapes, kinds = [], set()
        for name in names:
            value = values[name]
            parts = list(value) if isinstance(value, (list, tuple)) else [value]
            if not all(isinstance(p, DistTensor) for p in parts):
                raise TypeError(
                    f"{name}, after {where}, is a {type(value).__name__}; what crosses from "
                    "stage to stage is a tensor with a row for each node, or a list of them"
                )
            edges = [p for p in parts if not p.rows.same_as(nodes)]
            if edges:
                raise TypeError(
                    f"{name}, after {where}, has a row for each edge ({edges[0].rows}), but "
                    "what crosses from stage to stage has one for each node; give "
                    "balance=[...] so that all that read it are in one stage"
                )
            found = [tuple(part.shape[1:]) for part in parts]
            shapes.append(found if isinstance(value, (list, tuple)) else found[0])
            kinds |= {part.dtype for part in parts}
        if len(kinds) > 1 or not all(kind.is_floating_point for kind in kinds):
            raise TypeError(
                f"{', '.join(names)}, after {where}, are of {sorted(map(str, kinds))}; what "
                "crosses from stage to stage must be of one floating point type"
            )
        return StageTensors(tuple(names), tuple(shapes), kinds.pop())

    @property
    def width(self) -> int:
        """The numbers in a row."""
        return sum(_count(s) for shape in self.shapes for s in _several(shape))

    def pack(self, values: Values) -> Tensor:
        """Returns values as one matrix `[n_c, width]`, differentiably."""
        parts = []
        for name in self.names:
            value = values[name]
            parts += list(value) if isinstance(value, (list, tuple)) else [value]
        flat = [p.to_local() for p in parts]
        flat = [p.flatten(1) if p.dim() > 1 else p.unsqueeze(1) for p in flat]
        packed = torch.cat(flat, 1) if len(flat) > 1 else flat[0].contiguous()
        if packed.dtype != self.dtype or packed.size(1) != self.width:
            raise TypeError(
                f"{', '.join(self.names)} have {packed.size(1)} numbers of {packed.dtype} "
                f"a node, but had {self.width} of {self.dtype} when the pipeline first saw "
                "the data; use torch.autocast around all that it computes, or around none"
            )
        return packed

    def unpack(self, packed: Tensor, rows: Rows) -> Values:
        """Returns the values of a matrix, copied: layers may write into them."""
        widths = [_count(s) for shape in self.shapes for s in _several(shape)]
        parts = iter(packed.split(widths, 1))
        values: Values = {}
        for name, shape in zip(self.names, self.shapes, strict=True):
            found = [
                DistTensor.wrap(next(parts).reshape(len(packed), *s).clone(), rows)
                for s in _several(shape)
            ]
            values[name] = found if isinstance(shape, list) else found[0]
        return values


def _several(shape: Any) -> list[tuple[int, ...]]:
    return shape if isinstance(shape, list) else [shape]


def _count(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


class Stage:
    """Consecutive layers of a stack, and the data they read.

    Args:
        layers: all layers of the stack.
        begin, end: which are this stage's.
        run: what is being computed.
    """

    def __init__(
        self, layers: Sequence[StackLayer], begin: int, end: int, run: ChunkPass
    ) -> None:
        self.layers, self.begin, self.end, self.run = layers, begin, end, run
        self._read = from_data(layers, begin, end)
        self._data: dict[str, tuple[Any, str]] = {}
        self._seen: dict[str, tuple[Any, int]] = {}
        self._views: dict[int | None, Any] = {}

    def look_at(self, data: Data) -> None:
        """Sorts what layers read of the data by chunk, where it has changed."""
        for name in self._read:
            value = data.get(name)
            now = value, value._version if isinstance(value, Tensor) else 0
            before = self._seen.get(name)
            if before is None or before[0] is not now[0] or before[1] != now[1]:
                self._data[name] = _sorted(value, name, self.run.plan)
                self._seen[name] = now

    def view(self, chunk: int | None) -> Any:
        """Returns the edges of a chunk, or of all nodes, made once."""
        if chunk not in self._views:
            self._views[chunk] = view_of(self.run, chunk)
        return self._views[chunk]

    def forward(self, chunk: int | None, values: Values) -> Values:
        """Runs the layers on the rows of a chunk, or of all nodes."""
        known = {**self.given(chunk), **values}
        with random.apart(self.run.plan.topology.device):
            for place in range(self.begin, self.end):
                self.run.begin_layer(place, chunk)
                known.update(self.call(self.layers[place], known))
        return known

    def call(self, layer: StackLayer, known: Values) -> Values:
        """Runs one layer."""
        missing = [name for name in layer.takes if name not in known]
        if missing:
            raise ValueError(
                f"{layer} reads {', '.join(missing)}, which no layer before it writes and "
                "the Data does not have; write it with a header, such as "
                "(layer, 'x -> x_0')"
            )
        out = layer.run(*(known[name] for name in layer.takes))
        if len(layer.gives) == 1:
            return {layer.gives[0]: out}
        return dict(zip(layer.gives, out, strict=True))

    def given(self, chunk: int | None) -> Values:
        """Returns edges and attributes of the data, of a chunk."""
        plan, edge_index = self.run.plan, self.view(chunk)
        values: Values = {"edge_index": edge_index}
        for name, (value, per) in self._data.items():
            if per == "graph":
                values.update({} if value is None else {name: value})
                continue
            rows = edge_index.nodes if per == "node" else edge_index.edges
            cut = plan.own if per == "node" else plan.edge
            part = value if chunk is None else value[cut.rows(chunk)]
            values[name] = DistTensor.wrap(part, rows)
        return values


def _sorted(value: Any, name: str, plan: ChunkPlan) -> tuple[Any, str]:
    """An attribute of the data in the order of chunks, and what it has a row for."""
    if isinstance(value, Tensor) and value.requires_grad:
        raise ValueError(
            f"data.{name} requires a gradient, which a pipeline does not return; detach "
            "it, or learn it in a layer"
        )
    if not isinstance(value, DistTensor):
        return value, "graph"
    topology, local = plan.topology, value.to_local().detach()
    # on one rank, as many nodes as edges have the same ids: the object tells them apart
    of_edges = value.rows is topology.edges
    if not of_edges and value.rows.same_as(topology.nodes):
        return local[plan.own.order.to(local.device)], "node"
    if of_edges or value.rows.same_as(topology.edges):
        return local[plan.edge.order.to(local.device)], "edge"
    raise ValueError(
        f"data.{name} has {value.rows}, neither those of the nodes nor of the edges"
    )

"""Checks the arguments of `plan`, and fills in what they leave out."""

from __future__ import annotations

import functools
import numbers
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_distcomm.comm.mesh import Grid, Mesh
from pyg_distcomm.graph.edge_index import DistEdgeIndex
from pyg_distcomm.partition.partition import Partition
from pyg_distcomm.plan.machine import Machine
from pyg_distcomm.plan.model_profile import SequentialStack
from pyg_distcomm.plan.training import (
    Training,
    features_of,
    training_of,
    training_of_model,
)


def ranks_of(ranks: Any, mesh: Mesh | None, partition: Any) -> int:
    """Returns how many ranks to plan for."""
    if ranks is None:
        if mesh is not None:
            return mesh.size
        if isinstance(partition, Partition):
            return partition.num_parts
        raise ValueError("plan needs ranks=P, or the mesh whose ranks it is for")
    size = _integer(ranks)
    if size is None or size < 1:
        raise ValueError(f"ranks must be a whole number above 0, got {ranks!r}")
    if mesh is not None and mesh.size != size:
        raise ValueError(
            f"ranks={ranks}, but the mesh has {mesh.size}; give one of them"
        )
    return size


def grid_of(grid: Any, algorithm: str | None, size: int) -> Grid | None:
    """Returns the grid that alone is asked for."""
    if grid is None:
        return None
    sides = [_integer(n) for n in grid] if isinstance(grid, (tuple, list)) else []
    if len(sides) != 3 or any(n is None or n < 1 for n in sides):
        raise ValueError(
            f"grid={grid!r} must be three whole numbers above 0: (row, col, fiber)"
        )
    if algorithm is not None:
        raise ValueError(
            f"grid={tuple(grid)} and algorithm={algorithm!r} both choose the grids; give "
            "one of them"
        )
    r, s, p = sides
    if r * s * p != size:  # type: ignore[operator]
        raise ValueError(f"grid={tuple(grid)} does not have {size} ranks")
    return r, s, p  # type: ignore[return-value]


def _integer(value: Any) -> int | None:
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def check_options(
    machine: Any,
    memory: Any,
    stages: tuple[bool, Any, Any],
    grids: tuple[Grid | None, str | None],
) -> None:
    """Refuses options of wrong types, and those that would be ignored."""
    if not isinstance(machine, (Machine, type(None))):
        raise TypeError(
            "machine must be a pdc.Machine, as pdc.Machine.load(path) returns, got "
            f"{machine!r}"
        )
    number = isinstance(memory, numbers.Real) and not isinstance(memory, bool)
    if memory is not None and not number:
        raise TypeError(
            f"memory must be a number of bytes, as 24 * 2**30, got {memory!r}"
        )
    if memory is not None and not memory > 0:
        raise ValueError(f"memory must be a number of bytes above 0, got {memory!r}")
    pipeline, chunks, skips = stages
    if pipeline and grids != (None, None):
        raise ValueError(
            "pipeline=True plans for stages beside all grids; leave algorithm and grid out"
        )
    if not pipeline and (chunks is not None or skips != 0):
        raise ValueError("chunks and skips are of stages; add pipeline=True")


def check_width(graph: Any, first: int, inputs: str) -> None:
    """Refuses widths that do not begin with that of the features, where these go in."""
    x = graph.x if isinstance(graph, Data) else None
    if not isinstance(x, Tensor) or x.dim() != 2 or inputs != "constant":
        return
    if first != x.size(1):
        raise ValueError(
            f"widths begin with {first}, and data.x has {x.size(1)} features; if they go "
            'through something else first, say inputs="changing"'
        )


def training_asked(
    graph: Any,
    widths: Sequence[int] | None,
    model: torch.nn.Module | Sequence[Any] | None,
    layers: str | Sequence[str],
    inputs: str,
    dtype: torch.dtype,
) -> Training:
    """Returns what an epoch of widths, or of a model, multiplies."""
    if (widths is None) == (model is None):
        raise ValueError(
            "plan needs either widths=[features, hidden, ..., output] or model=..."
        )
    if model is not None:
        features = features_asked(graph, model)
        read = training_of_model(_whole(model), features, inputs)
        return replace(read, itemsize=dtype.itemsize)
    assert widths is not None
    read = training_of(widths, layers, inputs=inputs, itemsize=dtype.itemsize)
    check_width(graph, read.layers[0].width_in, inputs)
    return read


def _whole(model: Any) -> torch.nn.Module:
    """Returns a model, or a stack of layers as `Pipeline` takes it as one."""
    return model if isinstance(model, torch.nn.Module) else SequentialStack(model)


def features_asked(graph: Any, model: Any) -> int:
    """Returns the width of the features, which a model tells where the graph does not."""
    given = graph.num_features if isinstance(graph, Data) else 0
    return given or features_of(_whole(model))


def dtype_of(graph: Any, model: Any, dtype: torch.dtype | None) -> torch.dtype:
    """Returns the dtype that features have: as said, or the wider of theirs and the model's."""
    if dtype is not None:
        return dtype
    items = model if isinstance(model, Sequence) else [model]
    parts = (
        p for item in items for p in (item if isinstance(item, tuple) else (item,))
    )
    modules = [p for p in parts if isinstance(p, torch.nn.Module)]
    values = [graph.x] if isinstance(graph, Data) else []
    values += [p for one in modules for p in one.parameters()]
    floats = (v for v in values if isinstance(v, Tensor) and v.is_floating_point())
    found = list(dict.fromkeys(v.dtype for v in floats))
    return functools.reduce(torch.promote_types, found) if found else torch.float32


def edges_of(graph: Any, partition: Any) -> tuple[Tensor, int, Tensor | None]:
    """Returns the edges, the number of nodes, and which are trained on, if known."""
    edge_index = graph.edge_index if isinstance(graph, Data) else graph
    if isinstance(edge_index, DistEdgeIndex):
        raise TypeError(
            "plan takes the whole graph, and this is a rank's share; plan before "
            "pdc.partition"
        )
    if isinstance(graph, Data) and edge_index is None:
        other = (
            " (adj_t is not read: leave ToSparseTensor out)" if "adj_t" in graph else ""
        )
        raise TypeError(f"plan takes data.edge_index, and data has none{other}")
    if not isinstance(edge_index, Tensor):
        raise TypeError(
            "plan takes a torch_geometric.data.Data, an edge_index [2, num_edges] or a "
            f"RandomGraph, got {type(graph).__name__}"
        )
    if isinstance(graph, Data):
        if graph.num_nodes is None:
            raise ValueError("data.num_nodes is not known; set it, or give data.x")
        mask = graph.get("train_mask")
        mask = mask if isinstance(mask, Tensor) and mask.dim() == 1 else None
        return edge_index.cpu(), int(graph.num_nodes), mask
    if isinstance(partition, Partition):
        return edge_index.cpu(), partition.num_nodes, None
    if isinstance(partition, str):
        nodes = int(edge_index.max()) + 1 if edge_index.numel() else 0
        return edge_index.cpu(), nodes, None
    return edge_index.cpu(), len(partition), None

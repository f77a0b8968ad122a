"""Checks the arguments of `plan`: ranks, grids, machines, stages and widths."""

from __future__ import annotations

import numbers
import operator
from typing import Any

from torch import Tensor
from torch_geometric.data import Data

from pyg_distcomm.comm.mesh import Grid, Mesh
from pyg_distcomm.partition.partition import Partition
from pyg_distcomm.pipeline.schedule import BUBBLE
from pyg_distcomm.plan.machine import Machine


def ranks_of(ranks: Any, mesh: Mesh | None, partition: Any) -> int:
    """Returns how many ranks to plan for."""
    if ranks is None:
        if mesh is not None:
            return mesh.size
        if isinstance(partition, Partition):
            return partition.num_parts
        raise ValueError(
            "plan needs ranks=P (--ranks P), or the mesh whose ranks it is for"
        )
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
    stages: tuple[bool, Any, Any, Any],
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
    pipeline, chunks, most, skips = stages
    if pipeline and grids != (None, None):
        raise ValueError(
            "pipeline=True plans for stages beside all grids; leave algorithm and grid out"
        )
    if not pipeline and (chunks is not None or skips != 0 or most != BUBBLE):
        raise ValueError("chunks, bubble and skips are of stages; add pipeline=True")


def check_width(graph: Any, first: int, inputs: str) -> None:
    """Refuses widths that do not begin with that of the features, where these go in."""
    x = graph.x if isinstance(graph, Data) else None
    if not isinstance(x, Tensor) or x.dim() != 2 or inputs != "constant":
        return
    if first != x.size(1):
        raise ValueError(
            f"widths begin with {first}, and data.x has {x.size(1)} features; if they go "
            'through something else first, say inputs="changing" (--inputs changing)'
        )


def check_hetero_options(pipeline: bool, grid: Any, algorithm: Any, size: int) -> None:
    """Refuses what is not planned for a HeteroData."""
    if pipeline:
        raise ValueError(
            "a pipeline takes layers of one node type, and this is a HeteroData; leave "
            "pipeline out"
        )
    if algorithm not in (None, "1d") or grid not in (None, (size, 1, 1)):
        raise ValueError(
            "the rows of a HeteroData travel between all ranks, whatever the grid; leave "
            "grid and algorithm out"
        )

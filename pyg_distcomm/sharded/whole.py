"""Computes ops without a rule on all rows, which every rank gathers."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from pyg_distcomm.comm.failure import place_of
from pyg_distcomm.process import PROCESS
from pyg_distcomm.sharded.agreement import name_of
from pyg_distcomm.sharded.constants import constants_of, key_of
from pyg_distcomm.sharded.dist_tensor import (
    DistTensor,
    all_rows,
    changed,
    own_part,
    shares_memory,
    written_by,
)
from pyg_distcomm.sharded.edge_methods import EdgeMethods
from pyg_distcomm.sharded.partial import PartialSum

_LARGE = 1 << 26  # bytes of which an op says that it gathers them


def apply(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gathers all rows of each sharded operand, and computes the same on every rank.

    What an in-place op wrote to is cut again, so that own rows hold what was written.

    Price: (P-1)/P of the rows of each operand, in words; noted as "gather <op>".
    """
    name = name_of(func).removeprefix("_unsafe_")  # which ranks without rows may lack
    _check_size(name, args, kwargs)
    seen: dict[int, Tensor] = {}

    def whole(value: Any) -> Any:
        if not isinstance(value, (EdgeMethods, PartialSum)):
            return value
        if id(value) not in seen:
            rows: Any = value
            sharded = isinstance(value, DistTensor)
            found = _rows_of(rows, name) if sharded else rows.full_tensor()
            if sharded and rows.requires_grad:  # for which some ops return more
                found.requires_grad_()
            seen[id(value)] = found
        return seen[id(value)]

    if func is torch.ops.aten.view.default:  # of rows whose strides are those of all
        return _as_views(whole(args[0]).reshape(args[1]), args)
    out = func(*tree_map(whole, args), **tree_map(whole, kwargs))
    if not func._schema.is_mutable:
        return _as_views(out, args) if shares_memory(func) else out
    written = written_by(func, args, kwargs)
    for value in written:
        if isinstance(value, DistTensor):
            if seen[id(value)].shape != value.shape:
                raise TypeError(
                    f"{name}() would change the shape of a row-sharded tensor "
                    f"{list(value.shape)} in place, which it cannot; take "
                    f"{name.removesuffix('_')}(), or the same of .full_tensor()"
                )
            value.local.copy_(own_part(seen[id(value)], value.rows, value.dim_))
            changed(value)
    # some write to an argument, and return another tensor
    aliased = [r for r in func._schema.returns if r.alias_info is not None]
    return written[0] if len(aliased) == 1 else out


def _rows_of(x: DistTensor, name: str) -> Tensor:
    """Returns all rows; those of a constant are gathered once."""
    key = key_of(x)
    if key is None:
        return all_rows(x, name)
    known = constants_of(x.rows.mesh)
    number = known.number_of(("all rows", key), key)
    if number not in known.results:
        known.results[number] = all_rows(x, name)
    return known.results[number].clone()  # type: ignore[no-any-return]


def _check_size(name: str, args: Any, kwargs: Any) -> None:
    """Warns of an op that gathers many rows; raises on all ranks if the mesh is strict."""
    found = [x for x in tree_leaves((args, kwargs)) if type(x) is DistTensor]
    if not found or found[0].rows.mesh.size == 1:
        return
    total = sum(x.numel() * x.element_size() for x in found)
    mesh = found[0].rows.mesh
    if mesh.sharded.get("strict"):
        raise TypeError(
            f"{name}() needs all rows of {[list(x.shape) for x in found]}, {total:,} bytes on "
            "each rank, which pdc.init(strict=True) does not gather; take .full_tensor() where "
            "that is wanted, or an operation that works row by row or reduces over rows"
        )
    if total <= _LARGE or mesh.rank:
        return
    line = place_of(sys._getframe(1))
    told = f"{name} at {line}"
    if told not in PROCESS.warned:
        PROCESS.warned.add(told)
        warnings.warn(
            f"{name}() at {line or 'a line of torch'} gathers all rows of "
            f"{[list(x.shape) for x in found]} on every rank, {total:,} bytes",
            stacklevel=2,
        )


def _as_views(out: Any, args: Any) -> Any:
    """Returns copies where torch has views, which no op may write to; a sparse one is plain."""
    x = args[0]
    is_matrix = not isinstance(x, (DistTensor, PartialSum))
    rows = x.edges if is_matrix else getattr(x, "rows", x)
    mesh = rows.mesh

    def copied(part: Tensor) -> Tensor:
        strided = part.layout == torch.strided
        return PartialSum.copy_of(part, mesh) if strided else part

    return copied(out) if isinstance(out, Tensor) else type(out)(map(copied, out))

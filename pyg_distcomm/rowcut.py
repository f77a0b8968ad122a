"""RowCut: what every row-cut tensor has, without the rule for its operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from pyg_distcomm.rows import Rows

WAYS_OUT = (
    "use .to_local() for this rank's rows or .full_tensor() for all of them "
    "(both return an ordinary tensor)"
)


class RowCut(torch.Tensor):
    """A tensor of which this rank holds some rows (abstract; see `DistTensor`)."""

    rows: Rows
    _kept: tuple[int, Rows]  # what this mask keeps, at a version of it

    @classmethod
    def wrap(cls, local: Tensor, rows: Rows) -> Self:
        """Returns `local` `[len(rows), ...]` as this rank's part of a row-cut tensor."""
        if local.dim() == 0 or local.size(0) != len(rows):
            raise ValueError(
                f"local tensor of shape {tuple(local.shape)} must have one row for each "
                f"of this rank's {len(rows)} rows"
            )
        with torch._C.DisableTorchFunctionSubclass():
            out = local.as_subclass(cls)
        out.rows = rows
        return out

    def to_local(self) -> Tensor:
        """Returns this rank's rows as an ordinary tensor, differentiably."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)


class Picker(torch.Tensor):
    """Row numbers that know by themselves which rows of a row-cut tensor they pick."""

    def pick(self, x: RowCut, rest: tuple[Any, ...]) -> Tensor:
        """Returns `x[self, *rest]`."""
        raise NotImplementedError


def tree_map(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Applies `fn` to the leaves of arguments: torch's own, but a tenth of its time."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind([tree_map(fn, value) for value in tree])
    if kind is dict:
        return {key: tree_map(fn, value) for key, value in tree.items()}
    return fn(tree)


def undecided(what: str) -> TypeError:
    """Returns the error of an operation that the rule cannot decide."""
    return TypeError(
        f"{what} is neither row by row nor a reduction over rows, so a DistTensor cannot "
        f"decide what it means on a spread-out tensor; {WAYS_OUT}"
    )


def fit_plain(value: Tensor, rows: Rows, width: int, name: str) -> Tensor:
    """Returns the rows of a plain operand that meet `rows`, by its first size.

    One row is replicated, this rank's number of rows are its rows, and a row for every
    row anywhere gives those that are here.
    """
    if value.dim() < width or value.size(0) == 1:
        return value
    if value.dim() == width and value.size(0) == len(rows):
        return value
    if value.dim() == width and rows.whole and value.size(0) == rows.total:
        return value[rows.gid.to(value.device)]
    raise TypeError(
        f"{name}() got a plain tensor of shape {tuple(value.shape)} beside a row-cut one "
        f"with {len(rows)} rows here and {rows.total} in all; give it one row "
        f"(replicated), {len(rows)} (this rank's) or {rows.total} (everybody's), or make "
        "it part of the Data before pdc.partition"
    )

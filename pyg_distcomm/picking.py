"""x[key] and x[key] = value of row-cut tensors: masks stay here, ids travel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_distcomm import indexing
from pyg_distcomm.rowcut import Picker, RowCut, fit_plain, undecided
from pyg_distcomm.rows import Rows


def get(x: RowCut, key: Any) -> Any:
    first, rest = (key[0], key[1:]) if isinstance(key, tuple) and key else (key, ())
    if isinstance(first, Picker):
        return first.pick(x, rest)
    if first is Ellipsis:
        if isinstance(key, tuple) and len(rest) < x.dim():
            return _columns(x, key)
        raise undecided("x[...] that reaches the rows")
    listed = any(not isinstance(r, (int, slice, type(None), type(...))) for r in rest)
    if listed and (
        any(isinstance(r, RowCut) for r in rest) or not isinstance(first, slice)
    ):
        raise undecided("indexing rows and columns by tensors together")
    return (
        _columns(_take_rows(x, first), (slice(None), *rest))
        if rest
        else (_take_rows(x, first))
    )


def _columns(x: RowCut, key: Any) -> RowCut:
    if isinstance(key, tuple) and len(key) > 1 and key[1] is None and x.dim() == 0:
        raise undecided("x[...]")
    return x.wrap(x.to_local()[key], x.rows)


def _take_rows(x: RowCut, key: Any) -> RowCut:
    if isinstance(key, slice) and key == slice(None):
        return x
    if isinstance(key, (int, type(None), bool)) or _is_scalar(key):
        raise undecided(f"x[{key}], which drops or adds the row dimension,")
    if isinstance(key, Tensor) and key.dtype in (torch.bool, torch.uint8):
        return _masked(x, key)
    if isinstance(key, RowCut):
        local = indexing.take(x.to_local(), x.rows, key.to_local().cpu().long())
        return x.wrap(local, key.rows)
    idx = indexing.ids_of(key, x.rows.total)
    if idx.dtype == torch.bool:
        return _masked(x, idx)
    if idx.dim() != 1 or idx.is_floating_point():
        raise undecided(f"x[idx] with idx of shape {tuple(idx.shape)} and {idx.dtype}")
    local, rows = indexing.take_same(x.to_local(), x.rows, idx)
    return x.wrap(local, rows)


def _is_scalar(key: Any) -> bool:
    return isinstance(key, Tensor) and key.dim() == 0


def _masked(x: RowCut, mask: Tensor) -> RowCut:
    if mask.dim() != 1:
        raise undecided("x[mask] with a mask that is not one bool per row")
    if not isinstance(mask, RowCut):
        mask = x.wrap(fit_plain(mask, x.rows, 1, "x[mask]"), x.rows)
    elif not x.rows.same_as(mask.rows):
        raise TypeError(f"x[mask]: x has {x.rows}, but the mask has {mask.rows}")
    return x.wrap(x.to_local()[mask.to_local()], _selected(mask))


def _selected(mask: RowCut) -> Rows:
    """The rows a mask keeps, remembered on the mask so that their count is asked once."""
    if mask.is_inference():  # has no version to remember it by
        return mask.rows.select(mask.to_local())
    version = mask._version
    known = getattr(mask, "_kept", None)
    if known is None or known[0] != version:
        known = mask._kept = (version, mask.rows.select(mask.to_local()))
    rows: Rows = known[1]
    return rows


def put(x: RowCut, key: Any, value: Any) -> None:
    first, rest = (key[0], key[1:]) if isinstance(key, tuple) and key else (key, ())
    if isinstance(first, Tensor) and first.dtype == torch.bool and first.dim() == 1:
        mask = _masked(x.wrap(torch.empty(len(x.rows)), x.rows), first)
        _check_cut(value, mask.rows)
        if any(not isinstance(r, (int, slice)) for r in rest):
            raise undecided("x[mask, columns] = value with a list of columns")
        if isinstance(first, RowCut):
            first = first.to_local()
        first = fit_plain(first, x.rows, 1, "x[mask]")
    elif isinstance(first, slice) and first == slice(None):
        _check_cut(value, x.rows)
    else:
        raise undecided("x[key] = value, unless key is a mask or [:, columns],")
    with torch._C.DisableTorchFunctionSubclass():
        torch.Tensor.__setitem__(
            x,
            (first, *rest),
            (value.to_local() if isinstance(value, RowCut) else value),
        )


def _check_cut(value: Any, rows: Rows) -> None:
    if isinstance(value, RowCut) and not value.rows.same_as(rows):
        raise TypeError(f"the value has {value.rows}, but its place has {rows}")

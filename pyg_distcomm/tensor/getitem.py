"""Indexes row-sharded tensors: masks select locally, ids are exchanged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_distcomm.comm import autograd, collectives
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.tensor import gather_by_id
from pyg_distcomm.tensor.gather_by_id import IdPlan, cached_plan
from pyg_distcomm.tensor.row_sharded import (
    Picker,
    RowShardedTensor,
    all_rows,
    compare_operation,
    compare_plain,
    shard_plain_operand,
    unsupported_op,
)

_PRIME = (1 << 61) - 1


def take_replicated_ids(local: Tensor, rows: Rows, idx: Tensor) -> tuple[Tensor, Rows]:
    """Returns the rows of replicated ids `idx`, sharded into equal blocks.

    As many as the tensor has, a permutation say, are cut as the tensor is.

    Price: an exchange of rows, each distinct one of another rank once; for ids that are
    new (another tensor, or changed in place) also one of ids.

    Raises:
        IndexError: on all ranks, if an id is out of range.
        ValueError: on all ranks, if `idx` differs between ranks.
    """

    def build() -> tuple[IdPlan, Rows]:
        check_replicated_ids(idx, rows)
        ids = _checked_ids(idx, rows.count)
        alike = rows.whole and len(ids) == rows.total
        block = rows if alike else Rows.blocks(len(ids), rows.mesh)
        return IdPlan.build(ids[block.gid], rows).to(local.device), block

    plan, block = cached_plan(idx, rows, build)
    return plan.gather(local), block


def _checked_ids(idx: Tensor, total: int) -> Tensor:
    idx = idx.cpu().long()
    low, high = (int(idx.min()), int(idx.max())) if len(idx) else (0, -1)
    if low < -total or high >= total:
        bad = low if low < -total else high
        raise IndexError(f"index {bad} is out of range for a tensor of {total} rows")
    return torch.where(idx < 0, idx + total, idx)


def check_replicated_ids(idx: Tensor, rows: Rows) -> None:
    """Raises if ids `[k]` differ between ranks; collective.

    Price: two words of each rank.
    """
    idx = idx.cpu().long()
    weight = torch.arange(1, len(idx) + 1)
    mark = [len(idx), int((idx * weight).sum()) % _PRIME]
    marks = collectives.all_gather_counts(mark, rows.mesh.world)
    if any(other != marks[0] for other in marks):
        raise ValueError(
            "plain ids, or edges, mean the same ids on all ranks, but the ranks gave lists "
            f"that differ (lengths {[m[0] for m in marks]}); build them from a "
            "shared seed (torch_geometric.seed_everything, as PyG draws negative edges by "
            "Python's random, too), or use a mask, which costs nothing"
        )


def replicated_ids(key: Any, rows: Rows) -> Tensor:
    """Returns the ids of a slice, list or tensor, after `check_replicated_ids`."""
    idx = ids_of(key, rows.count)
    check_replicated_ids(idx.reshape(-1), rows)
    return idx


def ids_of(key: Any, total: int) -> Tensor:
    """Returns the ids of a slice, list or integer tensor."""
    if isinstance(key, slice):
        return torch.arange(total)[key]
    return torch.as_tensor(key)


def get(x: RowShardedTensor, key: Any) -> Any:
    first, rest = (key[0], key[1:]) if isinstance(key, tuple) and key else (key, ())
    if first is None and not x.reads_local:  # all rows in one, on every rank
        return x.unsqueeze(0)[(slice(None), *rest)]
    if isinstance(first, Picker):
        return first.pick(x, rest)
    if _is_edges(first) and not rest:
        return at_edges(x, first)
    if first is Ellipsis:
        if isinstance(key, tuple) and len(rest) < x.dim():
            return _columns(x, key)
        raise unsupported_op("x[...] that reaches the rows")
    listed = any(not isinstance(r, (int, slice, type(None), type(...))) for r in rest)
    if listed and not isinstance(first, slice) and len(rest) == 1 and x.dim() > 1:
        return _entries(_take_rows(x, first), rest[0])
    if listed and (
        any(isinstance(r, RowShardedTensor) for r in rest)
        or not isinstance(first, slice)
    ):
        raise unsupported_op("indexing rows and columns by tensors together")
    taken = _take_rows(x, first)
    if rest and not isinstance(taken, RowShardedTensor):  # one row, on all ranks
        return taken[rest]
    out = _columns(taken, (slice(None), *rest)) if rest else taken
    if out is not x and isinstance(out, RowShardedTensor):  # where torch returns a view
        out._is_copy = isinstance(first, slice) and (
            first != slice(None) or hasattr(x, "_is_copy")
        )
        if x.holds_ends and not rest and out.dim() == 2:
            out.holds_ends = True
    return out


def _is_edges(key: Any) -> bool:
    """Tells whether a key is an edge_index that is spread over ranks."""
    spread = isinstance(key, Tensor) and getattr(type(key), "_spread", False)
    return spread and not isinstance(key, RowShardedTensor) and key.dim() == 2


def at_edges(x: Tensor, edges: Any) -> Any:
    """Returns `x[edge_index]`, `[2, e, ...]`: rows of sources, and of targets.

    Numbers, one a node, name the nodes of another graph (as where nodes are relabelled): an
    ordinary edge_index, the same on all ranks, which layers cut themselves. Anything else is
    spread over the ranks as the edges are.
    """
    ends: list[Any] = [x[edges[0]], x[edges[1]]]
    numbers = x.dim() == 1 and not x.is_floating_point() and x.dtype != torch.bool
    if numbers:
        return torch.stack([end.full_tensor() for end in ends])
    return torch.stack(ends)


def check_writes(func: Callable, args: Any) -> None:
    """Raises for a torch function that writes to a copy of some rows."""
    if args and isinstance(args[0], RowShardedTensor) and writes(func):
        check_writable(args[0])


def writes(func: Callable) -> bool:
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name.startswith("__i") and name not in _READ
    if name in ("requires_grad_", "detach_"):
        return False
    return bool(name.endswith("_")) and not name.startswith("_")


_READ = ("__invert__", "__index__", "__int__")


def check_writable(x: RowShardedTensor) -> None:
    """Raises if `x` is a copy of some rows that would be a view in torch."""
    if getattr(x, "_is_copy", False):
        raise ValueError(  # after a TypeError, Python computes v + y for v += y
            "write x[a:b] = value, or take x[a:b].clone() first: rows a to b of a row-sharded "
            "tensor are a copy, and what is written to them would not reach x"
        )


def _entries(x: RowShardedTensor, columns: Any) -> RowShardedTensor:
    """Returns `x[arange(n), columns]`: one entry of each row, or one row of it."""
    if not isinstance(columns, RowShardedTensor):
        columns = torch.as_tensor(columns, device=x.device)
    if columns.dim() != 1 or columns.dtype not in (torch.int64, torch.int32):
        raise unsupported_op("indexing rows and columns by tensors together")
    if not isinstance(columns, RowShardedTensor):
        columns = shard_plain_operand(columns, x, 1, "x[rows, columns]").expand(
            len(x.rows)
        )
    else:
        rows = columns.rows
        columns = gather_by_id.shard_as(columns, x.rows)
        if columns is None:
            raise TypeError(f"x[rows, columns]: {x.rows} rows and {rows} columns")
    local = x.to_local()
    return x.wrap(local[torch.arange(len(local), device=x.device), columns], x.rows)


def _columns(x: RowShardedTensor, key: Any) -> RowShardedTensor:
    if isinstance(key, tuple) and len(key) > 1 and key[1] is None and x.dim() == 0:
        raise unsupported_op("x[...]")
    out = x.wrap(x.to_local()[key], x.rows)
    version, counts = getattr(x, "_counts", (None, None))
    one = isinstance(key, tuple) and len(key) == 2 and isinstance(key[1], int)
    if one and isinstance(counts, list) and version == x._version:
        out._counts = out._version, counts[key[1]]
    return out


def _take_rows(x: RowShardedTensor, key: Any) -> Any:
    if isinstance(key, slice) and key == slice(None):
        return x
    if isinstance(key, (type(None), bool)):
        raise unsupported_op(f"x[{key}], which drops or adds the row dimension,")
    if isinstance(key, (int, np.integer)) or (
        isinstance(key, Tensor) and key.dim() == 0
    ):
        return _one_row(x, int(key))
    if isinstance(key, Tensor) and key.dtype in (torch.bool, torch.uint8):
        return _masked(x, key)
    compare_operation("x[ids]", x, (x, key))
    if isinstance(key, RowShardedTensor):
        return gather_by_id.gather(x, key)
    count = x.rows.total if x.rows.whole else x.rows.count
    idx = ids_of(key, count)
    if idx.dtype == torch.bool:
        return _masked(x, idx)
    if idx.dim() != 1 or idx.is_floating_point():
        raise unsupported_op(
            f"x[idx] with idx of shape {tuple(idx.shape)} and {idx.dtype}"
        )
    if x.rows.partition is None and x.rows.mesh.size > 1 and not x.reads_local:
        return _rows_by_place(x, idx)
    local, rows = take_replicated_ids(x.to_local(), x.rows, idx)
    return x.wrap(local, rows)


def _rows_by_place(x: RowShardedTensor, idx: Tensor) -> RowShardedTensor:
    """Returns rows of a selection, or of values per edge, by position among all rows.

    No rank knows who has them, so all of them are gathered.
    """
    check_replicated_ids(idx, x.rows)
    whole = all_rows(x)
    block = Rows.blocks(len(idx), x.rows.mesh)
    block = replace(block, nodes=x.rows.nodes, stacked=x.rows.stacked)
    return x.wrap(whole[idx[block.gid].to(whole.device)], block)


def _one_row(x: RowShardedTensor, place: int) -> Tensor:
    """Returns one row of the whole tensor on all ranks."""
    count = x.rows.count
    if not -count <= place < count:
        raise IndexError(f"index {place} is out of range for a tensor of {count} rows")
    compare_operation("x[row]", x, (x, place))
    hit = (x.rows.place == place % count).to(x.device)
    local = x.to_local()[hit].sum(0, dtype=x.dtype)
    return autograd.all_reduce(local, x.rows.mesh.world)


def spans(func: Callable, x: RowShardedTensor, args: Any, kwargs: Any) -> Any:
    """Implements chunk, split and narrow over rows: each rank keeps its own rows."""
    given = {k: v for k, v in kwargs.items() if k not in ("input", "tensor", "self")}
    found = func(torch.arange(x.rows.count), *args[1:], **given)
    one = isinstance(found, Tensor)
    parts = [_span(x, ids) for ids in ((found,) if one else found)]
    return parts[0] if one else tuple(parts)


def _span(x: RowShardedTensor, ids: Tensor) -> RowShardedTensor:
    first, place = int(ids[0]) if len(ids) else 0, x.rows.place
    here = (place >= first) & (place < first + len(ids))
    rows = replace(
        x.rows, gid=place[here] - first, total=len(ids), partition=None, whole=True
    )
    out = x.wrap(x.to_local()[here.to(x.device)], rows)
    out._is_copy = True
    return out


def _describe_rows(rows: Rows) -> str:
    """Describes rows, the same on all ranks and without communication."""
    return f"{rows.total} rows" if rows.whole else f"some of {rows.total} rows"


def _masked(x: RowShardedTensor, mask: Tensor) -> RowShardedTensor:
    if mask.dim() != 1:
        raise unsupported_op("x[mask] with a mask that is not one bool per row")
    if not isinstance(mask, RowShardedTensor):
        compare_plain(x, mask, "x[mask]")
        whole = int(mask.sum()) if mask.size(0) == x.rows.count else None
        mask = x.wrap(shard_plain_operand(mask, x, 1, "x[mask]"), x.rows)
        mask._counts = mask._version, whole
    elif mask.rows is not x.rows:
        local = gather_by_id.shard_as(mask, x.rows)
        if local is None:
            raise TypeError(
                f"x[mask] takes a mask of the rows of x: x has {_describe_rows(x.rows)}, and "
                f"the mask {_describe_rows(mask.rows)}"
            )
        inside = x.reads_local
        same = mask.rows.same_as if inside else mask.rows.matches
        mask = mask if same(x.rows) else x.wrap(local, x.rows)
    rows, places = _selected(mask)
    local = x.to_local()
    picked = local[mask.to_local()] if places is None else local.index_select(0, places)
    return x.wrap(picked, rows)


def _selected(mask: RowShardedTensor) -> tuple[Rows, Tensor | None]:
    """Returns the rows a mask keeps, cached on the mask so that they are counted once.

    On a device their places, too, since the host would wait for it each time.
    """
    local = mask.to_local()
    if mask.is_inference():  # has no version to remember it by
        return mask.rows.select(local, getattr(mask, "_counts", (0, None))[1]), None
    version = mask._version
    known = getattr(mask, "_selection", None)
    if known is None or known[0] != version:
        rows = mask.rows.select(local, _known_count(mask))
        places = None if local.is_cpu else local.nonzero().flatten()
        known = mask._selection = version, rows, places
    return known[1:]  # type: ignore[no-any-return]


def _known_count(mask: RowShardedTensor) -> int | None:
    """Returns the global number of rows a mask keeps, if known; else None."""
    version, count = getattr(mask, "_counts", (None, None))
    known = count if version == mask._version and isinstance(count, int) else None
    if mask.rows.mesh.size == 1:
        return int(mask.to_local().sum())
    return known


def columns_at(table: Tensor, key: tuple[Any, ...]) -> Any:
    """Returns `table[i, key]` of an ordinary table, a row for each row of `key`."""
    *front, last = key
    if last.dtype == torch.bool or not all(isinstance(k, int) for k in front):
        raise unsupported_op("x[...] that moves rows or mixes them")
    return last.wrap(table[tuple(front)][last.to_local()], last.rows)


def put(x: RowShardedTensor, key: Any, value: Any) -> None:
    check_writable(x)
    if isinstance(key, tuple) and key and key[0] is Ellipsis and len(key) <= x.dim():
        key = (*[slice(None)] * (x.dim() - len(key) + 1), *key[1:])
    first, rest = (key[0], key[1:]) if isinstance(key, tuple) and key else (key, ())
    if isinstance(first, (list, int, np.ndarray, np.integer)):
        first = torch.as_tensor(first).view(-1) if type(first) is not bool else first
    rest = tuple(
        torch.as_tensor(r) if isinstance(r, (list, np.ndarray)) else r for r in rest
    )
    masked = (
        isinstance(first, Tensor) and first.dtype == torch.bool and first.dim() == 1
    )
    if (
        isinstance(key, RowShardedTensor)
        and key.dtype == torch.bool
        and key.dim() == x.dim() > 1
    ):
        _set_entries(x, key, value)
        return
    compare_plain(x, value, "setitem")
    if isinstance(first, Tensor) and len(rest) == 1 and isinstance(rest[0], Tensor):
        _set_pairs(x, first, rest[0], value)
        return
    if masked:
        mask = _masked(x.wrap(x.to_local().new_empty(len(x.rows)), x.rows), first)
        value = _shard_value(value, x, mask.rows, rest)
        if any(not isinstance(r, (int, slice)) for r in rest):
            raise unsupported_op("x[mask, columns] = value with a list of columns")
        places = None
        if not isinstance(first, RowShardedTensor):
            first = shard_plain_operand(first, x, 1, "x[mask]")
        elif isinstance(value, Tensor) and first.rows is x.rows:
            places = _selected(first)[1]
        if isinstance(first, RowShardedTensor):
            first = first.to_local() if places is None else places
    elif isinstance(first, slice) and first == slice(None):
        value = _shard_value(value, x, x.rows, rest)
    elif isinstance(first, slice) and any(isinstance(r, Tensor) for r in rest):
        raise unsupported_op("x[begin:end, columns] = value with a list of columns")
    elif isinstance(first, (Tensor, slice)):
        if isinstance(first, RowShardedTensor):  # of which a rank has some
            if x.reads_local:
                raise unsupported_op(
                    "x[ids] = value at row-sharded ids, inside a layer,"
                )
            compare_operation("setitem", x, (x, first, value))
            if isinstance(value, Tensor) and value.dim():
                value = _in_order_of(first, value)
            first = all_rows(first)
        ids = ids_of(first, x.rows.count)
        compare_plain(x, ids, "setitem")
        first, value = _local_places_and_rows(x, ids, value)
    else:
        raise unsupported_op(
            "x[key] = value, unless key is a mask, ids or [:, columns],"
        )
    with torch._C.DisableTorchFunctionSubclass():
        torch.Tensor.__setitem__(x, (first, *rest), value)


def _set_entries(x: RowShardedTensor, mask: RowShardedTensor, value: Any) -> None:
    """Writes a number to the entries selected by a mask of the shape of x."""
    if isinstance(value, Tensor) and value.dim():
        raise unsupported_op("x[mask of entries] = value with more than one number")
    if not mask.rows.same_as(x.rows):
        raise TypeError(
            f"x[mask] = value: x has {x.rows}, but the mask has {mask.rows}"
        )
    with torch._C.DisableTorchFunctionSubclass():
        torch.Tensor.__setitem__(x, mask.to_local(), value)


def _in_order_of(ids: RowShardedTensor, value: Tensor) -> Tensor:
    """Returns all rows of a value that is written at row-sharded ids, in their order."""
    if not isinstance(value, RowShardedTensor):
        return value
    if not value.rows.same_as(ids.rows) and value.rows.count != ids.rows.count:
        raise TypeError(
            f"x[ids] = value: the ids have {ids.rows}, but the value has {value.rows}"
        )
    return all_rows(value)


def _set_pairs(x: RowShardedTensor, ids: Any, columns: Any, value: Any) -> None:
    """Writes `x[ids, columns] = value`; the pairs are gathered on every rank.

    Raises:
        TypeError: unless ids and columns are lists of whole numbers.
    """
    compare_operation("x[ids, columns] = value", x, (x, ids, columns, value))
    ids, columns, value = (all_rows(v) for v in (ids, columns, value))
    whole = all(v.dim() == 1 and v.dtype == torch.int64 for v in (ids, columns))
    if not whole or len(ids) != len(columns):
        raise unsupported_op("x[rows, columns] = value, unless both are lists of ids,")
    compare_plain(x, ids, "setitem")
    compare_plain(x, columns, "setitem")
    many = isinstance(value, Tensor) and value.dim() == 1 and len(value) == len(ids)
    place, here = _places(x, ids)
    value = value[here.to(value.device)] if many and len(ids) > 1 else value
    with torch._C.DisableTorchFunctionSubclass():
        torch.Tensor.__setitem__(x, (place, columns[here.to(columns.device)]), value)


def _places(x: RowShardedTensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the local positions of owned ids, and which ids are owned."""
    ids = _checked_ids(ids, x.rows.count)
    place, order = x.rows.place.sort()
    if not len(place):
        return ids[:0], torch.zeros_like(ids, dtype=torch.bool)
    at = torch.searchsorted(place, ids).clamp(max=len(place) - 1)
    here = place[at] == ids
    return order[at[here]], here


def _local_places_and_rows(
    x: RowShardedTensor, ids: Tensor, value: Any
) -> tuple[Tensor, Any]:
    """Returns the local positions of owned ids, and the rows of a value for them."""
    if ids.dim() != 1 or ids.is_floating_point():
        raise unsupported_op("x[ids] = value, where ids are no list,")
    if isinstance(value, RowShardedTensor):  # of which each id may be another rank's
        compare_operation("setitem", x, (x, ids, value))
        value = all_rows(value)
    place, here = _places(x, ids)
    many = isinstance(value, Tensor) and value.dim() and value.size(0) == len(ids)
    if many and len(ids) > 1:
        value = value[here.to(value.device)]
    return place, value


def _shard_value(
    value: Any, x: RowShardedTensor, rows: Rows, rest: tuple[Any, ...]
) -> Any:
    """Returns own rows of a value that is written to rows of x."""
    if isinstance(value, RowShardedTensor):
        found = gather_by_id.shard_as(value, rows)
        if found is None:
            raise TypeError(f"the value has {value.rows}, but its place has {rows}")
        return found
    if not isinstance(value, Tensor) or x.reads_local:
        return value
    width = x.dim() - sum(isinstance(r, int) for r in rest)
    return shard_plain_operand(value, rows, width, "x[mask] = value")


def span(size: int, start: int, length: int) -> slice:
    """Returns the slice of `narrow` for `size` rows.

    Raises:
        IndexError: if there are not so many.
    """
    first = start + size if start < 0 else start
    if not 0 <= first <= first + length <= size:
        raise IndexError(
            f"narrow takes {length} from {start} on, but there are {size}; give a start and "
            "a length within them"
        )
    return slice(first, first + length)

"""Writes to rows by ids and by masks: adds, reduces, replaces."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.ops.id_plan import reduction_identity
from pyg_distcomm.sharded import whole
from pyg_distcomm.sharded.agreement import compare_call, in_backward
from pyg_distcomm.sharded.dist_tensor import (
    DistTensor,
    first_sharded,
    gathered,
    in_least_type,
    local_at,
    own_part,
    rule,
)
from pyg_distcomm.sharded.ids import (
    Ids,
    back,
    chosen,
    front,
    ids_of,
    plain_ids,
)
from pyg_distcomm.sharded.partial import over_ranks, plain, summed_over_ranks
from pyg_distcomm.sharded.pointwise import changed, meeting
from pyg_distcomm.sharded.views import space_of

aten = torch.ops.aten


@rule(
    aten.scatter_add.default,
    aten.scatter_add_.default,
    aten.scatter_reduce.two,
    aten.scatter_reduce_.two,
    aten.index_add.default,
    aten.index_add_.default,
    aten.scatter.src,
    aten.scatter_.src,
    aten.scatter.value,
    aten.scatter_.value,
)
def scatter(func: Any, args: Any, kwargs: Any) -> Any:
    """Adds, or reduces, to rows by ids; along another dimension row by row."""
    x, d, v, src = args[:4]
    d %= max(x.dim(), 1)
    sharded = first_sharded((x, v, src))
    if sharded is not None:
        compare_call(sharded.rows.mesh, x, v)
    op = args[4] if len(args) > 4 else "sum"
    mutable = func._schema.is_mutable
    include = kwargs.get("include_self", True)
    rows = next(
        (t.rows for t in (x, v, src) if type(t) is DistTensor and t.dim_ != d), None
    )
    if rows is not None and not any(
        type(t) is DistTensor and t.dim_ == d for t in (x, v, src)
    ):
        like = next(t for t in (x, v, src) if type(t) is DistTensor)
        dim = like.dim_
        vs, ss = v, src
        if "index_add" not in func._schema.name:
            vs = local_at(v, rows, dim)
        elif type(v) is DistTensor:
            return whole.apply(func, args, kwargs)
        if isinstance(src, Tensor):
            ss = local_at(src, rows, dim)
        if mutable and type(x) is not DistTensor:
            return whole.apply(func, args, kwargs)
        out = func(local_at(x, rows, dim), d, vs, ss, *args[4:], **kwargs)
        if mutable:
            changed(x)
            return x
        return DistTensor(out, rows, dim)
    if "index_add" not in func._schema.name:  # torch takes a corner of src, and of x
        wanted = src.shape if isinstance(src, Tensor) else v.shape
        rest = [k for k in range(v.dim()) if k != d]
        if v.shape != wanted or any(x.size(k) != v.size(k) for k in rest):
            return whole.apply(func, args, kwargs)
    if func._schema.name in ("aten::scatter", "aten::scatter_"):
        op = "put"
    ids = None
    if "alpha" not in kwargs and op in ("sum", "amax", "amin", "put"):
        if type(v) is DistTensor:
            ids = ids_of(v) if v.dim_ == (0 if v.dim() == 1 else d) else None
        elif type(src) is DistTensor and src.dim_ == d:
            ids = _plain_ids_of(v, d, src.rows)
    if ids is None or (op == "put" and type(x) is not DistTensor):
        return whole.apply(func, args, kwargs)
    source = (
        local_at(src, ids.rows, d).movedim(d, 0) if isinstance(src, Tensor) else src
    )
    if type(x) is DistTensor:
        return _scatter_to_owners(x, d, ids, source, op, include, mutable)
    return _scatter_to_plain(plain(x), d, ids, source, op, include, mutable)


def _plain_ids_of(v: Tensor, d: int, rows: Rows) -> Ids | None:
    """Returns own ids of a plain index, also of one that repeats them in each column."""
    spread = [k for k in range(v.dim()) if k != d and v.size(k) != 1]
    if (
        any(v.stride(k) for k in spread)
        or v.size(d if v.dim() > 1 else 0) != rows.count
    ):
        return None
    if v.dim() > 1:
        if not v.numel():
            return None
        v = v.movedim(d, 0).flatten(1)[:, 0]
    return Ids(own_part(v, rows, 0), rows)


def _scatter_to_owners(
    x: DistTensor, d: int, ids: Ids, source: Any, op: str, include: bool, mutable: bool
) -> Any:
    plan, start = ids.exchange(x.rows), front(x)
    hit = plan.hit(start.dim())
    if op == "put" and isinstance(source, Tensor):
        total = start.clone()
        plan.put(total, source.to(start.dtype), ids.rows.place_on(x.device))
    elif op == "put":
        total = torch.where(hit, torch.full_like(start, source), start)
    elif op == "sum":
        total = plan.sum(source.to(start.dtype))
        total = start + total if include else torch.where(hit, total, start)
    else:
        total = plan.extreme(source, op)
        further = torch.maximum if op == "amax" else torch.minimum
        total = further(start, total) if include else total
        total = torch.where(hit, total, start)
    if not mutable:
        return back(total, x.rows, d)
    start.copy_(total)
    changed(x)
    return x


def _scatter_to_plain(
    x: Tensor, d: int, ids: Ids, source: Tensor, op: str, include: bool, mutable: bool
) -> Any:
    mesh, local = ids.rows.mesh, ids.local
    # all edges into a chunk's nodes are in it; and a gradient is its part of one
    if mesh.local_sizes and (ids.end == 1 or in_backward()):
        return _scatter_here(x, d, local, source, op, include, mutable)
    first = x.movedim(d, 0)
    ids.check_below(len(first))

    owners = None if in_backward() else _owners(ids, len(first))

    def summed(y: Tensor) -> Tensor:
        if owners is not None:
            return _sums_of_owners(y, ids, owners)
        part = y.new_zeros((len(first), *y.shape[1:])).index_add_(0, local, y)
        return over_ranks(part, mesh)

    def extreme(start: Tensor, y: Tensor, op: str) -> Tensor:
        index = local.view(-1, *[1] * (y.dim() - 1)).expand_as(y)
        best = start.scatter_reduce(0, index, y, op)
        return over_ranks(best, mesh, op[1:])

    if op == "sum" and include:
        if not mutable:
            if owners is not None:
                return (first + summed(source)).movedim(0, d)
            part = source.new_zeros(first.shape).index_add_(0, local, source)
            total = summed_over_ranks(part, mesh)
            return (first + total).movedim(0, d)
        first.add_(summed(source.to(x.dtype)))
        return x
    total = _reduced(first, source, op, include, summed, extreme)
    if not mutable:
        return total.movedim(0, d)
    first.copy_(total)
    return x


def _owners(ids: Ids, count: int) -> Rows | None:
    """Returns the rows whose owners have all that is added to them; else None; collective once.

    So have the owners of nodes the edges into them. Such sums are gathered, which takes half
    of what an all-reduce does.
    """
    mesh, rows = ids.rows.mesh, space_of(ids.rows, count)
    known = rows is not None and rows.whole and rows.partition is not None
    if mesh.size == 1 or rows is None or not known or ids.rows.nodes is not rows:
        return None
    return rows if ids.exchange(rows).halo.silent else None


def _sums_of_owners(y: Tensor, ids: Ids, rows: Rows) -> Tensor:
    """Returns sums by id, gathered: degrees as whole numbers; collective."""
    own = ids.exchange(rows).sum(y)
    if own.dim() == 1 and own.dtype.is_floating_point:
        own = in_least_type(own, rows.mesh.world)
    return gathered(own, rows, "all_gather").to(y.dtype)


def _scatter_here(
    x: Tensor, d: int, ids: Tensor, source: Tensor, op: str, include: bool, write: bool
) -> Tensor:
    index = ids.view(-1, *[1] * (source.dim() - 1)).expand_as(source)
    first, how = x.movedim(d, 0), {"include_self": include}
    source = source.to(x.dtype)
    if write:
        first.scatter_reduce_(0, index, source, op, **how)
        return x
    return first.scatter_reduce(0, index, source, op, **how).movedim(0, d)


def _reduced(
    start: Tensor, source: Tensor, op: str, include: bool, sums: Any, extremes: Any
) -> Tensor:
    hits = sums(source.new_ones(len(source), dtype=torch.float32))
    hit = hits.view(-1, *[1] * (start.dim() - 1)) > 0
    if op == "sum":
        return torch.where(hit, sums(source.to(start.dtype)), start)
    if include:
        return extremes(start, source, op)
    best = extremes(
        torch.full_like(start, reduction_identity(start.dtype, op)), source, op
    )
    return torch.where(hit, best, start)


@rule(aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
def index_put(func: Any, args: Any, kwargs: Any) -> Any:
    """Writes, or adds, to rows that a mask keeps or that ids name."""
    x, given, value = args[:3]
    add = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    sharded = first_sharded((x, list(given), value))
    if sharded is not None:
        compare_call(sharded.rows.mesh, x, *given)
    used = [i for i, v in enumerate(given) if v is not None]
    d, v = used[0], given[used[0]]
    mutable = func._schema.is_mutable
    if type(x) is not DistTensor:
        if len(used) > 1 or v.dim() != 1 or not add or v.dtype == torch.bool:
            return whole.apply(func, args, kwargs)
        ids: Any = None
        if type(v) is DistTensor:
            ids = ids_of(v)
        elif type(value) is DistTensor and value.dim_ == d:
            ids = _plain_ids_of(torch.where(v < 0, v + x.size(d), v), 0, value.rows)
        if ids is None or value.dim() not in (0, x.dim()):
            return whole.apply(func, args, kwargs)
        rest = [x.size(k) for k in range(x.dim()) if k != d]
        source = meeting_value(value, ids.rows, d, x)
        source = source.movedim(d, 0) if source.dim() else source
        source = source.expand(len(ids.local), *rest)
        return _scatter_to_plain(plain(x), d, ids, source, "sum", True, mutable)
    found = None
    if len(used) > 1 and used == list(range(len(used))) and x.dim_ == 0:
        found = _put_several(x, given, used, value, add, mutable)
    elif len(used) == 1 and x.dim_ == d and v.dim() == 1:
        found = _put_rows(x, d, v, value, add, mutable)
    elif len(used) == 1 and x.dim_ != d and type(v) is not DistTensor:
        own = meeting(value, x.rows, x.dim() - x.dim_)
        found = _written(x, func(x.local, given, own, add), mutable)
    return whole.apply(func, args, kwargs) if found is None else found


def _written(x: DistTensor, local: Tensor, mutable: bool) -> DistTensor:
    """Returns what an op has written: `x` itself, if in place."""
    if not mutable:
        return DistTensor(local, x.rows, x.dim_)
    changed(x)
    return x


@rule(
    aten.index_copy.default,
    aten.index_copy_.default,
    aten.index_fill.int_Scalar,
    aten.index_fill.int_Tensor,
    aten.index_fill_.int_Scalar,
    aten.index_fill_.int_Tensor,
)
def index_copy(func: Any, args: Any, kwargs: Any) -> Any:
    """Writes rows, or one value, to the rows that ids name."""
    x, d, v, value = args
    found, mutable = None, func._schema.is_mutable
    if type(x) is DistTensor:
        compare_call(x.rows.mesh, x, v)
        d %= max(x.dim(), 1)
        fills = "index_fill" in func._schema.name
        if d == x.dim_:
            if not isinstance(value, Tensor):
                value = torch.tensor(value, dtype=x.dtype, device=x.device)
            found = _put_rows(x, d, v, value, False, mutable)
        elif type(v) is not DistTensor:
            own = plain(value) if fills else local_at(value, x.rows, x.dim_)
            found = _written(x, func(x.local, d, v, own), mutable)
    return whole.apply(func, args, kwargs) if found is None else found


def _put_rows(
    x: DistTensor, d: int, v: Tensor, value: Tensor, add: bool, mutable: bool
) -> DistTensor | None:
    """Writes, or adds, to rows; None where their ids are not known."""
    target = x.local if mutable else x.local.clone()
    shape = list(x.local.shape)
    if v.dtype == torch.bool:
        rows, where = chosen(v, x.rows)
        shape[d] = len(where)
        own = meeting_value(value, rows, d, x).expand(shape).to(x.dtype)
        if add:
            target.index_add_(d, where, own)
        else:
            target.index_copy_(d, where, own)
        return _written(x, target, mutable)
    ids = ids_of(v) if type(v) is DistTensor else plain_ids(v, x.rows, x.device)
    if ids is None:
        return None
    shape[d] = len(ids.local)
    own = meeting_value(value, ids.rows, d, x).expand(shape).to(x.dtype).movedim(d, 0)
    first, plan = target.movedim(d, 0), ids.exchange(x.rows)
    if add:
        first.add_(plan.sum(own))
    else:
        plan.put(first, own, ids.rows.place_on(x.device))
    return _written(x, target, mutable)


def meeting_value(value: Tensor, rows: Rows, d: int, x: Tensor) -> Tensor:
    """Returns the part of a written value that meets own rows."""
    return meeting(value, rows, x.dim() - d)  # type: ignore[no-any-return]


def _put_several(
    x: DistTensor,
    given: list[Any],
    used: list[int],
    value: Any,
    add: bool,
    mutable: bool,
) -> Any:
    """Adds to `x[i, j, ...]` where the rows i are all rows in order; else None."""
    if (
        any(given[i].dtype == torch.bool or given[i].dim() != 1 for i in used)
        or not add
    ):
        return None
    v = given[0]
    rows = next((given[i].rows for i in used if type(given[i]) is DistTensor), None)
    if type(v) is DistTensor:
        ids = ids_of(v)
    elif rows is not None:
        ids = Ids(own_part(v, rows, 0), rows)
    else:
        ids = plain_ids(v, x.rows, x.device)
    if ids is None:
        return None
    rest = [meeting(given[i], ids.rows, 1) for i in used[1:]]
    own = meeting(value, ids.rows, value.dim())
    table = x.local.new_zeros((len(ids.local), *x.local.shape[1:]))
    at = torch.arange(len(table), device=table.device)
    table[(at, *rest)] = own
    total = ids.exchange(x.rows).sum(table)
    return _written(x, x.local.add_(total) if mutable else x.local + total, mutable)


@rule(aten.embedding_dense_backward.default)
def embedding_backward(func: Any, args: Any, kwargs: Any) -> Any:
    """Sums gradients by the rows of a table; plain."""
    g, v, *rest = args
    like = g if type(g) is DistTensor else v
    dim = like.dim_
    own = [local_at(t, like.rows, dim) for t in (g, v)]
    return summed_over_ranks(func(*own, *rest, **kwargs), like.rows.mesh)

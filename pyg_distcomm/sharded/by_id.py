"""Reads rows by ids, by masks, and by an index of the result's shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.sharded import whole
from pyg_distcomm.sharded.agreement import compare_call, compare_plain, in_backward
from pyg_distcomm.sharded.constants import key_of
from pyg_distcomm.sharded.dist_tensor import (
    DistTensor,
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
    leading_ids,
    plain_ids,
)
from pyg_distcomm.sharded.partial import plain
from pyg_distcomm.sharded.pointwise import meeting

aten = torch.ops.aten


@rule(aten.index_select.default)
def index_select(func: Any, args: Any, kwargs: Any) -> Any:
    """Reads rows by ids."""
    x, d, index = args
    compare_call(_mesh_of(x, index), x, index)
    d %= max(x.dim(), 1)
    if type(x) is not DistTensor and index.rows.mesh.local_sizes:
        ids = ids_of(index)
        assert ids is not None
        return back(_rows_of_chunk(plain(x).movedim(d, 0), ids), ids.rows, d)
    if type(x) is not DistTensor:  # plain rows, by sharded ids
        compare_plain(plain(x), index.rows.mesh)
        return DistTensor(func(plain(x), d, index.local), index.rows, d)
    if d != x.dim_:
        if type(index) is DistTensor:
            return whole.apply(func, args, kwargs)
        return DistTensor(func(x.local, d, index), x.rows, x.dim_)
    if type(index) is DistTensor:
        at: Any = index if index.device == x.device else index.to(x.device)
        ids = ids_of(at)
    else:
        ids = plain_ids(index, x.rows, x.device)
    if ids is None:
        return whole.apply(func, args, kwargs)
    rows = ids.exchange(x.rows).gather(front(x), None if x._key is None else key_of(x))
    return back(rows, ids.rows, d)


def _mesh_of(*operands: Any) -> Any:
    return next(v.rows.mesh for v in operands if type(v) is DistTensor)


def _rows_of_chunk(x: Tensor, ids: Ids) -> Tensor:
    """Returns rows of a plain tensor by ids of a chunk: of its nodes, or of a table."""
    nodes = ids.rows.nodes
    if ids.end is None or nodes is None or len(x) != nodes.count:
        return x.index_select(0, ids.local)
    return ids.exchange(nodes).gather(x)


@rule(aten.index.Tensor)
def index(func: Any, args: Any, kwargs: Any) -> Any:
    """Selects rows by a mask, or reads them by ids, with other indices beside these."""
    x, given = args
    given = list(given)
    compare_call(_mesh_of(x, *given), x, *given)
    used = [i for i, v in enumerate(given) if v is not None]
    first, v = used[0], given[used[0]]
    if len(used) == 1 and v.dtype == torch.bool and v.dim() == 1:
        return _masked(x, first, v)
    if len(used) == 1 and v.dtype != torch.bool:
        return _by_one_index(func, x, first, v, args)
    if used == list(range(len(used))) and type(x) is DistTensor and x.dim_ == 0:
        found = _by_several(x, given)
        if found is not None:
            return found
    if (
        type(x) is DistTensor
        and x.dim_ not in used
        and not any(type(given[i]) is DistTensor for i in used)
        and used == list(range(first, first + len(used)))
        and x.dim_ < first
    ):
        return DistTensor(func(x.local, given), x.rows, x.dim_)
    return whole.apply(func, args, kwargs)


def _masked(x: Tensor, d: int, mask: Tensor) -> Any:
    if type(x) is DistTensor and x.dim_ != d:
        if type(mask) is DistTensor:
            mask = mask.full_tensor()
        where = mask.nonzero().view(-1)
        return DistTensor(x.local.index_select(d, where), x.rows, x.dim_)
    rows = x.rows if type(x) is DistTensor else mask.rows  # type: ignore[attr-defined]
    kept, where = chosen(mask, rows)
    local = x.local if type(x) is DistTensor else own_part(plain(x), rows, d)
    return DistTensor(local.index_select(d, where.to(local.device)), kept, d)


def _by_one_index(func: Any, x: Any, d: int, v: Any, args: Any) -> Any:
    if type(x) is DistTensor and x.dim_ != d:
        if type(v) is DistTensor:
            return whole.apply(func, args, {})
        dim = x.dim_ if x.dim_ < d else x.dim_ + v.dim() - 1
        return DistTensor(func(x.local, args[1]), x.rows, dim)
    sharded = type(x) is DistTensor
    if v.dim() == 1 and (sharded or v.rows.mesh.local_sizes):
        return index_select(aten.index_select.default, (x, d, v), {})
    if not sharded:  # plain rows, of which those that no id reads may be new memory
        return DistTensor(func(plain(x), [None] * d + [v.local]), v.rows, d + v.dim_)
    if type(v) is not DistTensor or d:
        return whole.apply(func, args, {})
    ids = Ids(v.local.reshape(-1), v.rows)
    found = ids.exchange(x.rows).gather(front(x))
    return DistTensor(found.view(*v.local.shape, *found.shape[1:]), v.rows, v.dim_)


def _by_several(x: DistTensor, given: list[Any]) -> Any:
    """Returns `x[i, j, ...]` of rows i: these are read by ids, the rest is row by row."""
    ids = leading_ids(x, given)
    if ids is None:
        return None
    found = ids.exchange(x.rows).gather(x.local)
    at = torch.arange(len(found), device=found.device)
    rest = [meeting(v, ids.rows, 1) for v in given[1:] if v is not None]
    return DistTensor(found[(at, *rest)], ids.rows, 0)


@rule(aten.gather.default)
def gather(func: Any, args: Any, kwargs: Any) -> Any:
    """Reads by an index of the result's shape: along rows by ids, else row by row."""
    x, d, v = args[:3]
    d %= max(x.dim(), 1)
    if type(x) is DistTensor and d == x.dim_:
        ids = ids_of(v) if type(v) is DistTensor else None
        if ids is None or v.dim_ != d:
            return whole.apply(func, args, kwargs)
        given = front(x)
        width = tuple(s for k, s in enumerate(v.shape) if k != d)
        if given.shape[1:] != width:
            given = given[tuple(slice(s) for s in (None, *width))]
        return back(ids.exchange(x.rows).gather(given), v.rows, d)
    if type(x) is DistTensor:
        own = local_at(v, x.rows, x.dim_)
        return DistTensor(func(x.local, d, own, *args[3:]), x.rows, x.dim_)
    x = plain(x)
    if d == v.dim_:
        if in_backward():  # the gradient of pooled rows, of which all are read
            compare_plain(x, v.rows.mesh)
        return DistTensor(func(x, d, v.local, *args[3:]), v.rows, d)
    return DistTensor(
        func(own_part(x, v.rows, v.dim_), d, v.local, *args[3:]), v.rows, v.dim_
    )


@rule(aten.embedding.default)
def embedding(func: Any, args: Any, kwargs: Any) -> Any:
    """Reads rows of a table by ids."""
    weight, v = args[:2]
    if type(v) is not DistTensor:
        found = index_select(aten.index_select.default, (weight, 0, v.reshape(-1)), {})
        return (
            aten.view.default(found, [*v.shape, weight.size(1)])
            if v.dim() != 1
            else found
        )
    if type(weight) is DistTensor:
        return _by_one_index(aten.index.Tensor, weight, 0, v, (weight, [v]))
    return DistTensor(func(weight, v.local, *args[2:], **kwargs), v.rows, v.dim_)


@rule(aten.masked_select.default)
def masked_select(func: Any, args: Any, kwargs: Any) -> Any:
    """Selects the values that a mask keeps."""
    x, mask = args
    compare_call(_mesh_of(x, mask), x, mask)
    if mask.dim() == 1 and x.dim() == 1:
        return _masked(x, 0, mask)
    return whole.apply(func, args, kwargs)

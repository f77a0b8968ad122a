"""Reads rows by ids and by masks, and adds, reduces or writes to them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.ops.id_plan import beside, reduction_identity
from pyg_distcomm.sharded import whole
from pyg_distcomm.sharded.agreement import compare_call, compare_plain, in_backward
from pyg_distcomm.sharded.constants import key_of
from pyg_distcomm.sharded.dist_tensor import (
    DistTensor,
    changed,
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
    leading_ids,
    plain_ids,
)
from pyg_distcomm.sharded.partial import over_ranks, plain, summed_over_ranks
from pyg_distcomm.sharded.pointwise import alone, decomposed, meeting
from pyg_distcomm.sharded.views import space_of

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
    ids = _ids(x, index)
    if ids is None:
        return whole.apply(func, args, kwargs)
    rows = ids.exchange(x.rows).gather(front(x), None if x._key is None else key_of(x))
    return back(rows, ids.rows, d)


def _ids(x: DistTensor, index: Any) -> Ids | None:
    """Returns the ids of rows of `x` in an index `[k]`; None if they are not known."""
    if type(index) is not DistTensor:
        return plain_ids(index, x.rows, x.device)
    return ids_of(index if index.device == x.device else index.to(x.device))


def _mesh_of(*operands: Any) -> Any:
    return next(v.rows.mesh for v in operands if type(v) is DistTensor)


def _rows_of_chunk(x: Tensor, ids: Ids) -> Tensor:
    """Returns rows of a plain tensor by ids of a chunk: of its nodes, or of a table."""
    nodes = ids.rows.nodes
    if ids.end is None or nodes is None or len(x) != nodes.count:
        return x.index_select(0, ids.local)
    return ids.exchange(nodes).gather(x)


def _indices(given: Any) -> list[Any]:
    """Returns ids and masks, of which torch takes bytes for masks; raises for others."""
    if any(v is not None and v.dtype.is_floating_point for v in given):
        raise IndexError(
            "tensors used as indices must be long, int, byte or bool tensors"
        )
    return [v.bool() if v is not None and v.dtype == torch.uint8 else v for v in given]


@rule(aten.index.Tensor)
def index(func: Any, args: Any, kwargs: Any) -> Any:
    """Selects rows by a mask, or reads them by ids, with other indices beside these."""
    x, given = args
    compare_call(_mesh_of(x, *given), x, *given)
    given = _indices(given)
    used = [i for i, v in enumerate(given) if v is not None]
    first, v = used[0], given[used[0]]
    if len(used) == 1 and v.dtype == torch.bool and (merged := _merged(x, first, v)):
        return _masked(*merged)
    if len(used) == 1 and v.dtype != torch.bool:
        return _by_one_index(func, x, first, v, args)
    if used == list(range(len(used))) and type(x) is DistTensor and x.dim_ == 0:
        found = _by_several(x, given)
        if found is not None:
            return found
    if type(x) is DistTensor and x.dim_ < first:
        plain_ones = not any(type(given[i]) is DistTensor for i in used)
        if plain_ones and used == list(range(first, first + len(used))):
            return DistTensor(func(x.local, given), x.rows, x.dim_)
    return whole.apply(func, args, kwargs)


def _merged(x: Any, d: int, mask: Any) -> tuple[Any, int, Any] | None:
    """Returns a tensor and a mask of its dimension d, merged; None if that mixes rows."""
    if mask.dim() == 1:
        return x, d, mask
    at = x.dim_ - d if type(x) is DistTensor else mask.dim_
    first = 0 <= at < mask.dim() and mask.shape[:at].numel() == 1
    if not first or not mask.numel() or x.shape[d : d + mask.dim()] != mask.shape:
        return None
    return x.flatten(d, d + mask.dim() - 1), d, mask.flatten()


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
    if v.dim() == 1 and (type(x) is DistTensor or v.rows.mesh.local_sizes):
        return index_select(aten.index_select.default, (x, d, v), {})
    if type(x) is not DistTensor:
        # plain rows, of which those that no id reads may be new memory
        return DistTensor(func(plain(x), [None] * d + [v.local]), v.rows, d + v.dim_)
    if type(v) is not DistTensor:
        shape = *x.shape[:d], *v.shape, *x.shape[d + 1 :]
        return x.index_select(d, v.reshape(-1)).view(shape).clone()  # not a view
    if d:
        return whole.apply(func, args, {})
    found = Ids(v.local.reshape(-1), v.rows).exchange(x.rows).gather(front(x))
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
        return alone(func, args, kwargs)
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
    if type(v) is DistTensor and type(weight) is not DistTensor:
        return DistTensor(func(weight, v.local, *args[2:], **kwargs), v.rows, v.dim_)
    return _by_one_index(aten.index.Tensor, weight, 0, v, (weight, [v]))


@rule(aten.masked_select.default)
def masked_select(func: Any, args: Any, kwargs: Any) -> Any:
    """Selects the values that a mask keeps."""
    x, mask = args
    compare_call(_mesh_of(x, mask), x, mask)
    if x.dim() == mask.dim() and (merged := _merged(x, 0, mask)):
        return _masked(*merged)
    return whole.apply(func, args, kwargs)


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
    compare_call(_mesh_of(x, v, src), x, v)
    given = [t for t in (x, v, src) if type(t) is DistTensor]
    if all(t.dim_ != d for t in given):
        return alone(func, args, kwargs)
    name, op = func._schema.name, args[4] if len(args) > 4 else "sum"
    if "index_add" not in name:  # torch takes a corner of src, and of x
        wanted = src.shape if isinstance(src, Tensor) else v.shape
        rest = [k for k in range(v.dim()) if k != d]
        if v.shape != wanted or any(x.size(k) != v.size(k) for k in rest):
            return whole.apply(func, args, kwargs)
    if name in ("aten::scatter", "aten::scatter_"):
        op = "put"
    ids = None
    if "alpha" not in kwargs and op in ("sum", "amax", "amin", "put"):
        if type(v) is DistTensor:
            ids = ids_of(v) if v.dim_ == (0 if v.dim() == 1 else d) else None
        elif type(src) is DistTensor and src.dim_ == d:
            ids = _plain_ids_of(v, d, src.rows)
    if ids is None or (op == "put" and type(x) is not DistTensor):
        return whole.apply(func, args, kwargs)
    if isinstance(src, Tensor):
        src = local_at(src, ids.rows, d).movedim(d, 0)
    include, mutable = kwargs.get("include_self", True), func._schema.is_mutable
    return _scatter(x, d, ids, src, op, mutable, include)


def _plain_ids_of(v: Tensor, d: int, rows: Rows) -> Ids | None:
    """Returns own ids of a plain index, also of one that repeats them in each column."""
    spread = any(v.stride(k) for k in range(v.dim()) if k != d and v.size(k) != 1)
    if spread or v.size(d if v.dim() > 1 else 0) != rows.count:
        return None
    if v.dim() > 1:
        if not v.numel():
            return None
        v = v.movedim(d, 0).flatten(1)[:, 0]
    return Ids(own_part(v, rows, 0), rows)


def _scatter(
    x: Any, d: int, ids: Ids, source: Any, op: str, mutable: bool, include: bool = True
) -> Any:
    """Adds, reduces or writes rows by ids ("sum", "amax", "amin", "put").

    The source has a row for each own id, or is a number to put; of rows that are put at one
    id the last one stays. With `include`, what `x` holds there takes part.
    """
    sharded = type(x) is DistTensor
    start = front(x) if sharded else plain(x).movedim(d, 0)
    plan: Any = ids.exchange(x.rows) if sharded else _Everywhere(ids, len(start))
    if op == "put" and isinstance(source, Tensor):
        total = start.clone()
        plan.put(total, source.to(start.dtype), ids.rows.place_on(x.device))
    elif op == "put":
        total, include = torch.full_like(start, source), False
    elif op == "sum":
        total = plan.sum(source.to(start.dtype))
        total = start + total if include else total
    else:
        total = plan.extreme(source, op)
        further = torch.maximum if op == "amax" else torch.minimum
        total = further(start, total) if include else total
    if not include:
        total = torch.where(beside(plan.hit, start.dim()), total, start)
    if not mutable:
        return back(total, x.rows, d) if sharded else total.movedim(0, d)
    start.copy_(total)
    if sharded:
        changed(x)
    return x


class _Everywhere:
    """Scatters rows by ids to a table that every rank holds; see `IdPlan`.

    Of a chunk, whose edges into its nodes are all here, and of whose gradients all are parts,
    nothing travels.
    """

    def __init__(self, ids: Ids, count: int) -> None:
        self.ids, self.count, self.mesh = ids, count, ids.rows.mesh
        self.here = self.mesh.local_sizes and (ids.end == 1 or in_backward())
        self.owners = None
        if not self.here:
            ids.check_below(count)
            self.owners = None if in_backward() else _owners(ids, count)
        elif not in_backward() and (nodes := ids.rows.nodes) is not None:
            ids.exchange(nodes)  # raises for nodes of other chunks

    def sum(self, src: Tensor) -> Tensor:
        """Returns the sums of rows by id."""
        if self.owners is not None:
            return _sums_of_owners(src, self.ids, self.owners)
        at = self.ids.local
        if in_backward():  # of `table[ids]`, which may count from the end
            at = torch.where(at < 0, at + self.count, at)
        part = src.new_zeros((self.count, *src.shape[1:]))
        part.index_add_(0, at, src)
        return part if self.here else summed_over_ranks(part, self.mesh)

    def extreme(self, src: Tensor, op: str) -> Tensor:
        """Returns the maxima or minima of rows by id; the identity where no id is."""
        empty = reduction_identity(src.dtype, op)
        best = src.new_full((self.count, *src.shape[1:]), empty)
        index = beside(self.ids.local, src.dim()).expand_as(src)
        best.scatter_reduce_(0, index, src, op)
        return best if self.here else over_ranks(best, self.mesh, op[1:])

    @property
    def hit(self) -> Tensor:
        """Whether any id names each row."""
        ones = torch.ones(len(self.ids.local), device=self.ids.local.device)
        return self.sum(ones) > 0


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


@rule(aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
def index_put(func: Any, args: Any, kwargs: Any) -> Any:
    """Writes, or adds, to rows that a mask keeps or that ids name."""
    x, given, value = args[:3]
    add = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    compare_call(_mesh_of(x, *given, value), x, *given)
    given = _indices(given)
    used = [i for i, v in enumerate(given) if v is not None]
    d, v = used[0], given[used[0]]
    wide = v.dtype == torch.bool and v.dim() > 1
    if add and used == [0] and v.dim() > 1 and not wide:
        value = value.expand(*v.shape, *x.shape[1:]).flatten(0, v.dim() - 1)
        v = v.flatten()
    mutable, found = func._schema.is_mutable, None
    if type(x) is not DistTensor:
        if len(used) == 1 and v.dim() == 1 and add and v.dtype != torch.bool:
            found = _put_rows(x, d, v, value, add, mutable)
    elif len(used) > 1 and used == list(range(len(used))) and x.dim_ == 0:
        found = _put_several(x, given, value, mutable) if add else None
    elif len(used) == 1 and x.dim_ == d and v.dim() == 1:
        found = _put_rows(x, d, v, value, add, mutable)
    elif len(used) == 1 and wide and (merged := _merged(x, d, v)):
        found = _put_rows(*merged, value, add, False).view(x.shape)
        found = x.copy_(found) if mutable else found
    elif wide:
        pass  # along the rows, behind other dimensions
    elif len(used) == 1 and x.dim_ != d and type(v) is not DistTensor:
        right = x.dim() - x.dim_ + (v.dim() - 1 if x.dim_ < d else 0)
        own = meeting(value, x.rows, right)
        found = _written(x, func(x.local, given, own, add), mutable)
    return whole.apply(func, args, kwargs) if found is None else found


def _written(x: DistTensor, local: Tensor, mutable: bool) -> DistTensor:
    """Returns what an op has written: `x` itself, if in place."""
    if not mutable:
        return DistTensor(local, x.rows, x.dim_)
    changed(x)
    return x


rule(
    aten.index_copy.default,
    aten.index_copy_.default,
    aten.index_fill.int_Scalar,
    aten.index_fill.int_Tensor,
    aten.index_fill_.int_Scalar,
    aten.index_fill_.int_Tensor,
)(decomposed)  # writes to rows by ids


def _put_rows(x: Any, d: int, v: Any, value: Any, add: bool, mutable: bool) -> Any:
    """Writes, or adds, to rows; None where their ids are not known."""
    right, shape = x.dim() - d, list(x.shape)
    if v.dtype == torch.bool:
        rows, where = chosen(v, x.rows)
        shape[d] = len(where)
        own = meeting(value, rows, right).expand(shape).to(x.dtype)
        target = x.local if mutable else x.local.clone()
        (target.index_add_ if add else target.index_copy_)(d, where, own)
        return _written(x, target, mutable)
    ids = None
    if type(x) is DistTensor or type(v) is DistTensor:
        ids = _ids(x, v)
    elif type(value) is DistTensor and value.dim_ == d:
        ids = _plain_ids_of(torch.where(v < 0, v + x.size(d), v), 0, value.rows)
    if ids is None:
        return None
    shape[d] = len(ids.local)
    own = meeting(value, ids.rows, right).expand(shape).movedim(d, 0)
    return _scatter(x, d, ids, own, "sum" if add else "put", mutable)


def _put_several(x: DistTensor, given: list[Any], value: Any, mutable: bool) -> Any:
    """Adds to `x[i, j, ...]`; None where the ids of rows i are not known."""
    ids = leading_ids(x, given)
    if ids is None:
        return None
    rest = [meeting(v, ids.rows, 1) for v in given[1:] if v is not None]
    own = meeting(value, ids.rows, value.dim())
    table = x.local.new_zeros((len(ids.local), *x.local.shape[1:]))
    at = torch.arange(len(table), device=table.device)
    table[(at, *rest)] = own
    return _scatter(x, 0, ids, table, "sum", mutable)


@rule(aten.embedding_dense_backward.default)
def embedding_backward(func: Any, args: Any, kwargs: Any) -> Any:
    """Sums gradients by the rows of a table; plain."""
    g, v, *rest = args
    like = g if type(g) is DistTensor else v
    dim = like.dim_
    own = [local_at(t, like.rows, dim) for t in (g, v)]
    return summed_over_ranks(func(*own, *rest, **kwargs), like.rows.mesh)

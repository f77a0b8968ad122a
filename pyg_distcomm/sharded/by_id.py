"""Reads rows by ids, and writes to rows by ids.

With ids v_1 .. v_k, sharded over the ranks, and x with a row for each id:

    gather   y_i = x[v_i]
    scatter  x[v] += sum of y_i over i with v_i = v     (and maximum, minimum, replacement)

What travels is planned once for ids that do not change, and kept with them: each distinct row
of another rank once. So `x[edge_index[0]]` is the halo exchange of a layer, and a scatter to
`edge_index[1]`, whose edges are with the owner of their target, moves nothing.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm import kernels
from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.sharded import whole
from pyg_distcomm.sharded.constants import constants_of, key_of, version_of
from pyg_distcomm.sharded.dist_tensor import DistTensor, local_at, own_part, rule
from pyg_distcomm.sharded.partial import PartialSum, summed_over_ranks
from pyg_distcomm.sharded.pointwise import changed, meeting
from pyg_distcomm.tensor.gather_by_id import IdPlan

aten = torch.ops.aten
_KEPT = 64  # lists of ids, and masks
_SUMMED = (torch.float32, torch.float64)


class Ids:
    """Holds the ids `[k]` on this rank, and what has been planned for them."""

    __slots__ = ("_plans", "local", "rows")

    def __init__(self, local: Tensor, rows: Rows) -> None:
        self.local, self.rows = local, rows
        self._plans: dict[int, tuple[Rows, IdExchange]] = {}

    def exchange(self, rows: Rows) -> IdExchange:
        """Returns the exchange with rows of a tensor; collective at the first call."""
        known = self._plans.get(id(rows))
        if known is None:
            plan = IdPlan.build(self.local.reshape(-1).long(), rows)
            known = rows, IdExchange(plan.to(self.local.device))
            self._plans[id(rows)] = known
        return known[1]


class IdExchange:
    """Gathers and scatters rows by planned ids, below autograd.

    Shapes: n own rows, h ghosts, k ids; slot [k] in 0 .. n + h - 1.
    Price: h f words for a gather, the same transposed for a scatter.
    """

    __slots__ = ("_constant", "_csr", "_hit", "count", "halo", "own", "slot")

    def __init__(self, plan: IdPlan) -> None:
        self.halo, self.slot, self.own = plan.halo, plan.slot, plan.own
        self.count = self.own + self.halo.num_ghosts
        self._csr: tuple[Tensor, Tensor] | None = None
        self._hit: Tensor | None = None
        self._constant: tuple[int, Tensor | None] | None = (
            None  # the rows of a constant
        )

    def gather(self, x: Tensor, key: int | None = None) -> Tensor:
        """Returns the rows `[k, ...]` of own rows `[n, ...]`.

        Args:
            x: own rows.
            key: the number of `x` among constants, whose ghosts are kept from their second
                use on.
        """
        if x.dim() == 1:
            return self.gather(x.unsqueeze(1), key).squeeze(1)
        rest = x.shape[1:]
        flat = x.reshape(len(x), math.prod(rest))
        if not self.halo.silent:
            flat = self._with_ghosts(flat, key)
        return _rows_at(flat, self.slot).view(len(self.slot), *rest)

    def _with_ghosts(self, x: Tensor, key: int | None) -> Tensor:
        known = self._constant
        if (
            key is not None
            and known is not None
            and known[0] == key
            and known[1] is not None
        ):
            return torch.cat([x, known[1]])
        table = x.new_empty((self.count, x.size(1)))
        arrive = self.halo.begin(_wire(x), _wire(table[self.own :]))
        table[: self.own] = x
        arrive()
        if key is not None:
            again = known is not None and known[0] == key
            self._constant = key, table[self.own :].clone() if again else None
        return table

    def sum(self, src: Tensor) -> Tensor:
        """Returns the sums `[n, ...]` of rows `[k, ...]` by id, at the owners."""
        if src.dim() == 1:
            return self.sum(src.unsqueeze(1)).squeeze(1)
        rest = src.shape[1:]
        flat = src.reshape(len(src), math.prod(rest))
        if flat.dtype in _SUMMED and len(flat):
            rowptr, perm = self._sorted()
            table = kernels.spmm(rowptr, perm, None, flat.contiguous())
        else:
            table = flat.new_zeros((self.count, flat.size(1))).index_add_(
                0, self.slot, flat
            )
        if self.halo.silent:
            return table.view(self.own, *rest)
        arrive = self.halo.begin_transpose(table[self.own :].contiguous())
        return arrive(table[: self.own].contiguous()).view(self.own, *rest)

    def extreme(self, src: Tensor, op: str) -> Tensor:
        """Returns the maxima or minima `[n, ...]` of rows by id ("amax", "amin").

        Rows that no id names hold the identity.
        """
        if op == "amin" and src.dtype.is_floating_point:
            return -self.extreme(-src, "amax")
        empty = _identity(src.dtype, op)
        if src.dtype not in _SUMMED or not len(src):
            start = src.new_full((self.own, *src.shape[1:]), empty)
            return IdPlan(self.halo, self.slot, self.own).scatter_extreme(
                src, start, op
            )
        rest = src.shape[1:]
        flat = src.reshape(len(src), math.prod(rest)).contiguous()
        rowptr, perm = self._sorted()
        table = kernels.segment_max(rowptr, perm, flat)
        table[rowptr.diff() == 0] = empty
        own = table[: self.own]
        if not self.halo.silent:
            halo = self.halo
            sides = halo.recv_counts, halo.send_counts, halo.axis
            sent = table[self.own :].contiguous()
            came = collectives.all_to_all(sent, *sides, "halo_reduce", halo.most).wait()
            index = halo.send_slot.view(-1, 1).expand_as(came)
            own = own.scatter_reduce(0, index, came, op)
        return own.view(self.own, *rest)

    def hit(self, dim: int) -> Tensor:
        """Tells which own rows any id names, `[n, 1, ...]` with `dim` dimensions."""
        if self._hit is None:
            found = torch.zeros(self.count, dtype=torch.bool, device=self.slot.device)
            found[self.slot] = True
            found = found[: self.own].clone()
            found[self.halo.send_slot] = True
            self._hit = found
        return self._hit.view(-1, *[1] * (dim - 1))

    def put(self, out: Tensor, src: Tensor) -> None:
        """Writes rows `[k, ...]` to the rows of their ids; of several one stays."""
        here = self.slot < self.own
        out[self.slot[here]] = src[here]
        if self.halo.silent:
            return
        table = src.new_zeros((self.count, *src.shape[1:]))
        table[self.slot] = src
        halo = self.halo
        sides = halo.recv_counts, halo.send_counts, halo.axis
        sent = _wire(table[self.own :].contiguous())
        came = collectives.all_to_all(sent, *sides, "halo_put", halo.most).wait()
        out[halo.send_slot] = came.view(src.dtype) if came.dtype != src.dtype else came

    def _sorted(self) -> tuple[Tensor, Tensor]:
        if self._csr is None:
            arange = torch.arange(len(self.slot), device=self.slot.device)
            rowptr, col, _ = kernels.coo_to_csr(self.slot, arange, self.count)
            self._csr = rowptr, col
        return self._csr


def _wire(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype == torch.bool else x


def _rows_at(x: Tensor, index: Tensor) -> Tensor:
    """Returns `x[index]`, by the package's kernel where it has one."""
    if x.dtype in _SUMMED and x.size(1) > 1:
        return kernels.gather_rows(x.contiguous(), index)
    return x.index_select(0, index)


def ids_of(x: DistTensor) -> Ids | None:
    """Returns the ids that a tensor of whole numbers holds, one for each row; else None."""
    found: Ids | None = x._ids
    if found is not None and version_of(x) == x._key_version:
        return found
    if x.local.dim() != 1 or x.dtype.is_floating_point or x.dtype == torch.bool:
        return None
    key = key_of(x)
    if key is None:
        x._key_version, found = version_of(x), Ids(x.local, x.rows)
    else:
        kept = constants_of(x.rows.mesh).ids
        if key not in kept:
            kept[key] = Ids(x.local.clone(), x.rows)
            if len(kept) > _KEPT:
                kept.popitem(last=False)
        kept.move_to_end(key)
        found = kept[key]
    x._ids = found
    return found


def ids_of_part(x: DistTensor, i: int, part: DistTensor) -> Ids | None:
    """Returns the ids of `x[i]`, kept with `x` while it does not change."""
    if x._key is not None:  # known by its key
        return None
    kept, version = x._chosen, version_of(x)
    if not isinstance(kept, dict) or kept["version"] != version:
        kept = x._chosen = {"version": version}
    if i not in kept:
        kept[i] = Ids(part.local, part.rows)
    return kept[i]  # type: ignore[no-any-return]


def reshard(x: DistTensor, rows: Rows) -> Tensor:
    """Returns own rows of `x`, sharded as other rows; collective.

    Price: each row that moves, once; planned the first time.
    """
    key = "reshard", id(x.rows)
    known = rows.derived.get(key)
    if known is None:
        plan = IdPlan.build(rows.place, x.rows).to(x.device)
        known = rows.derived[key] = x.rows, IdExchange(plan)
    front = x.local.movedim(x.dim_, 0)
    return known[1].gather(front).movedim(0, x.dim_)  # type: ignore[no-any-return]


def chosen(mask: DistTensor | Tensor, rows: Rows) -> tuple[Rows, Tensor]:
    """Returns the rows that a mask keeps of `rows`, and where they are among own rows.

    Kept with the mask until it changes. Collective once, for a mask that was computed.
    """
    key = None
    if type(mask) is DistTensor:
        if isinstance(mask._chosen, tuple):
            version, of, found = mask._chosen
            if version == version_of(mask) and of is rows:
                return found  # type: ignore[no-any-return]
        number = key_of(mask)
        if number is not None:
            key, table = (number, id(rows)), constants_of(rows.mesh).masks
            if key in table:
                table.move_to_end(key)
                return table[key][1]  # type: ignore[no-any-return]
    local = local_at(mask, rows, 0)
    known = int(mask.sum()) if type(mask) is not DistTensor else None
    if type(mask) is not DistTensor:
        kept = rows.derived.setdefault("masks", [])
        for other, found in kept:
            if torch.equal(other, mask):
                return found  # type: ignore[no-any-return]
    where = local.nonzero().view(-1)
    found = rows.select(local, known), where
    if found[0].count == rows.count:
        found = rows, where
    if key is not None:
        table[key] = rows, found
        if len(table) > _KEPT:
            table.popitem(last=False)
    elif type(mask) is DistTensor:
        mask._chosen = version_of(mask), rows, found
    else:
        kept.append((mask.clone(), found))
        del kept[:-8]
    return found


def _plain_ids(index: Tensor, rows: Rows) -> Ids:
    """Returns plain ids, sharded in equal blocks (as `rows`, if as many); kept by content."""
    kept = rows.derived.setdefault("plain ids", [])
    for other, found in kept:
        if other.shape == index.shape and torch.equal(other, index):
            return found  # type: ignore[no-any-return]
    count = index.numel()
    at = rows if count == rows.count else Rows.blocks(count, rows.mesh)
    flat = index.reshape(-1)
    flat = torch.where(flat < 0, flat + rows.count, flat)
    found = Ids(own_part(flat, at, 0), at)
    kept.append((index.clone(), found))
    del kept[:-8]
    return found


def _front(x: DistTensor) -> Tensor:
    return x.local if x.dim_ == 0 else x.local.movedim(x.dim_, 0)


def _back(local: Tensor, rows: Rows, dim: int) -> DistTensor:
    return DistTensor(local if dim == 0 else local.movedim(0, dim), rows, dim)


@rule(aten.index_select.default)
def index_select(func: Any, args: Any, kwargs: Any) -> Any:
    """Reads rows by ids."""
    x, d, index = args
    d %= max(x.dim(), 1)
    if type(x) is not DistTensor:  # plain rows, by sharded ids
        return DistTensor(func(_plain(x), d, index.local), index.rows, d)
    if d != x.dim_:
        if type(index) is DistTensor:
            return whole.apply(func, args, kwargs)
        return DistTensor(func(x.local, d, index), x.rows, x.dim_)
    ids = ids_of(index) if type(index) is DistTensor else _plain_ids(index, x.rows)
    if ids is None:
        return whole.apply(func, args, kwargs)
    rows = ids.exchange(x.rows).gather(_front(x), None if x._key is None else key_of(x))
    return _back(rows, ids.rows, d)


def _plain(x: Tensor) -> Tensor:
    return x.value() if isinstance(x, PartialSum) else x


@rule(aten.index.Tensor)
def index(func: Any, args: Any, kwargs: Any) -> Any:
    """Selects rows by a mask, or reads them by ids, with other indices beside these."""
    x, given = args
    given = list(given)
    used = [i for i, v in enumerate(given) if v is not None]
    first, v = used[0], given[used[0]]
    if len(used) == 1 and v.dtype == torch.bool and v.dim() == 1:
        return _masked(x, first, v)
    if len(used) == 1 and v.dtype != torch.bool:
        return _by_one_index(func, x, first, v, args)
    if used == list(range(len(used))) and type(x) is DistTensor and x.dim_ == 0:
        found = _by_several(x, given, used)
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
    local = x.local if type(x) is DistTensor else own_part(_plain(x), rows, d)
    return DistTensor(local.index_select(d, where), kept, d)


def _by_one_index(func: Any, x: Tensor, d: int, v: Tensor, args: Any) -> Any:
    if type(x) is DistTensor and x.dim_ != d:
        if type(v) is DistTensor:
            return whole.apply(func, args, {})
        dim = x.dim_ if x.dim_ < d else x.dim_ + v.dim() - 1
        return DistTensor(func(x.local, args[1]), x.rows, dim)
    if type(v) is DistTensor and v.dim() == 1:
        if type(x) is DistTensor:
            return index_select(aten.index_select.default, (x, d, v), {})
        given = [None] * d + [v.local]
        return DistTensor(func(_plain(x), given), v.rows, d)
    if type(v) is DistTensor and v.dim_ == 0 and type(x) is DistTensor:
        ids = Ids(v.local.reshape(-1), v.rows)
        found = ids.exchange(x.rows).gather(_front(x))
        found = found.view(*v.local.shape, *found.shape[1:])
        return DistTensor(found, v.rows, 0) if d == 0 else whole.apply(func, args, {})
    if type(v) is DistTensor:
        given = [None] * d + [v.local]
        return DistTensor(func(_plain(x), given), v.rows, d + v.dim_)
    assert type(x) is DistTensor
    if v.dim() != 1 or d != 0:
        if v.dim() == 1:
            return index_select(aten.index_select.default, (x, d, v), {})
        return whole.apply(func, args, {})
    return index_select(aten.index_select.default, (x, d, v), {})


def _by_several(x: DistTensor, given: list[Any], used: list[int]) -> Any:
    """Returns `x[i, j, ...]` of rows i: these are read by ids, the rest is row by row."""
    dists = [given[i] for i in used if type(given[i]) is DistTensor]
    if any(given[i].dtype == torch.bool or given[i].dim() != 1 for i in used):
        return None
    v = given[0]
    if type(v) is DistTensor:
        ids = ids_of(v)
    elif dists and v.size(0) == dists[0].rows.count:
        ids = Ids(own_part(v, dists[0].rows, 0), dists[0].rows)
    else:
        ids = _plain_ids(v, x.rows)
    if ids is None:
        return None
    found = ids.exchange(x.rows).gather(x.local)
    at = torch.arange(len(found), device=found.device)
    rest = [meeting(given[i], ids.rows, 1) for i in used[1:]]
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
        front = _front(x)
        width = tuple(s for k, s in enumerate(v.shape) if k != d)
        if front.shape[1:] != width:
            front = front[tuple(slice(s) for s in (None, *width))]
        return _back(ids.exchange(x.rows).gather(front), v.rows, d)
    if type(x) is DistTensor:
        own = local_at(v, x.rows, x.dim_)
        return DistTensor(func(x.local, d, own, *args[3:]), x.rows, x.dim_)
    x = _plain(x)
    if d == v.dim_:
        return DistTensor(func(x, d, v.local, *args[3:]), v.rows, d)
    return DistTensor(
        func(own_part(x, v.rows, v.dim_), d, v.local, *args[3:]), v.rows, v.dim_
    )


def _identity(dtype: torch.dtype, op: str) -> Any:
    if dtype.is_floating_point:
        return -math.inf if op == "amax" else math.inf
    if dtype == torch.bool:
        return op == "amin"
    info = torch.iinfo(dtype)
    return info.min if op == "amax" else info.max


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
    op = {
        "scatter.src": "put",
        "scatter_.src": "put",
        "scatter.value": "put",
        "scatter_.value": "put",
    }.get(str(func).removeprefix("aten."), op)
    ids = None
    if "alpha" not in kwargs and op in ("sum", "amax", "amin", "put"):
        if type(v) is DistTensor:
            ids = ids_of(v) if v.dim_ == (0 if v.dim() == 1 else d) else None
        elif type(src) is DistTensor and v.dim() == 1:
            ids = Ids(own_part(v, src.rows, 0), src.rows)
    if ids is None or (op == "put" and type(x) is not DistTensor):
        return whole.apply(func, args, kwargs)
    source = (
        local_at(src, ids.rows, d).movedim(d, 0) if isinstance(src, Tensor) else src
    )
    if type(x) is DistTensor:
        return _scatter_to_owners(x, d, ids, source, op, include, mutable)
    return _scatter_to_plain(_plain(x), d, ids, source, op, include, mutable)


def _scatter_to_owners(
    x: DistTensor, d: int, ids: Ids, source: Any, op: str, include: bool, mutable: bool
) -> Any:
    plan, start = ids.exchange(x.rows), _front(x)
    hit = plan.hit(start.dim())
    if op == "put" and isinstance(source, Tensor):
        total = start.clone()
        plan.put(total, source.to(start.dtype))
    elif op == "put":
        total = torch.where(hit, torch.full_like(start, source), start)
    elif op == "sum":
        total = plan.sum(source.to(start.dtype))
        total = start + total if include else torch.where(hit, total, start)
    else:
        total = plan.extreme(source, op)
        if include:
            total = (
                torch.maximum(start, total)
                if op == "amax"
                else torch.minimum(start, total)
            )
        total = torch.where(hit, total, start)
    if not mutable:
        return _back(total, x.rows, d)
    start.copy_(total)
    changed(x)
    return x


def _scatter_to_plain(
    x: Tensor, d: int, ids: Ids, source: Tensor, op: str, include: bool, mutable: bool
) -> Any:
    mesh, local = ids.rows.mesh, ids.local
    front = x.movedim(d, 0)

    def summed(y: Tensor) -> Tensor:
        part = y.new_zeros((len(front), *y.shape[1:])).index_add_(0, local, y)
        return collectives.all_reduce(part, mesh.world)

    def extreme(start: Tensor, y: Tensor, op: str) -> Tensor:
        index = local.view(-1, *[1] * (y.dim() - 1)).expand_as(y)
        best = start.scatter_reduce(0, index, y, op)
        return collectives.all_reduce(best, mesh.world, op[1:])

    if op == "sum" and include:
        if not mutable:
            part = source.new_zeros(front.shape).index_add_(0, local, source)
            total = summed_over_ranks(part, mesh)
            return (front + total).movedim(0, d)
        front.add_(summed(source.to(x.dtype)))
        return x
    total = _reduced(front, source, op, include, summed, extreme)
    if not mutable:
        return total.movedim(0, d)
    front.copy_(total)
    return x


def _reduced(
    start: Tensor, source: Tensor, op: str, include: bool, sums: Any, extremes: Any
) -> Tensor:
    hits = sums(source.new_ones(len(source), dtype=torch.float32))
    hit = hits.view(-1, *[1] * (start.dim() - 1)) > 0
    if op == "sum":
        return torch.where(hit, sums(source.to(start.dtype)), start)
    if include:
        return extremes(start, source, op)
    best = extremes(torch.full_like(start, _identity(start.dtype, op)), source, op)
    return torch.where(hit, best, start)


@rule(aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
def index_put(func: Any, args: Any, kwargs: Any) -> Any:
    """Writes, or adds, to rows that a mask keeps or that ids name."""
    x, given, value = args[:3]
    add = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    used = [i for i, v in enumerate(given) if v is not None]
    d, v = used[0], given[used[0]]
    mutable = func._schema.is_mutable
    if type(x) is not DistTensor:
        if (
            len(used) == 1
            and type(v) is DistTensor
            and add
            and v.dim() == 1
            and v.dtype != torch.bool
        ):
            ids: Any = ids_of(v)
            source = meeting_value(value, ids.rows, d, x)
            return _scatter_to_plain(
                _plain(x), d, ids, source.movedim(d, 0), "sum", True, mutable
            )
        return whole.apply(func, args, kwargs)
    if len(used) > 1 and used == list(range(len(used))) and x.dim_ == 0:
        found = _put_several(x, given, used, value, add, mutable)
        if found is not None:
            return found
    if len(used) > 1:
        return whole.apply(func, args, kwargs)
    if x.dim_ != d:
        if type(v) is DistTensor:
            return whole.apply(func, args, kwargs)
        right = x.dim() - x.dim_
        own = meeting(value, x.rows, right)
        out = func(x.local, given, own, add)
        if mutable:
            changed(x)
        return x if mutable else DistTensor(out, x.rows, x.dim_)
    target = x.local if mutable else x.local.clone()
    if v.dtype == torch.bool and v.dim() == 1:
        rows, where = chosen(v, x.rows)
        own = meeting_value(value, rows, d, x)
        shape = list(x.local.shape)
        shape[d] = len(where)
        own = own.expand(shape).to(x.dtype)
        if add:
            target.index_add_(d, where, own)
        else:
            target.index_copy_(d, where, own)
    else:
        ids = (
            (ids_of(v) if v.dim() == 1 else None)
            if type(v) is DistTensor
            else (_plain_ids(v, x.rows) if v.dim() == 1 else None)
        )
        if ids is None:
            return whole.apply(func, args, kwargs)
        own = meeting_value(value, ids.rows, d, x)
        shape = list(x.local.shape)
        shape[d] = len(ids.local)
        own = own.expand(shape).to(x.dtype).movedim(d, 0)
        front, plan = target.movedim(d, 0), ids.exchange(x.rows)
        if add:
            front.add_(plan.sum(own))
        else:
            plan.put(front, own)
    if not mutable:
        return DistTensor(target, x.rows, x.dim_)
    changed(x)
    return x


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
        ids = _plain_ids(v, x.rows)
    if ids is None:
        return None
    rest = [meeting(given[i], ids.rows, 1) for i in used[1:]]
    own = meeting(value, ids.rows, value.dim())
    table = x.local.new_zeros((len(ids.local), *x.local.shape[1:]))
    at = torch.arange(len(table), device=table.device)
    table[(at, *rest)] = own
    total = ids.exchange(x.rows).sum(table)
    if mutable:
        x.local.add_(total)
        changed(x)
        return x
    return DistTensor(x.local + total, x.rows, 0)


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


@rule(aten.embedding_dense_backward.default)
def embedding_backward(func: Any, args: Any, kwargs: Any) -> Any:
    """Sums gradients by the rows of a table; plain."""
    g, v, *rest = args
    like = g if type(g) is DistTensor else v
    dim = like.dim_
    own = [local_at(t, like.rows, dim) for t in (g, v)]
    return summed_over_ranks(func(*own, *rest, **kwargs), like.rows.mesh)


@rule(aten.masked_select.default)
def masked_select(func: Any, args: Any, kwargs: Any) -> Any:
    """Selects the values that a mask keeps."""
    x, mask = args
    if mask.dim() == 1 and x.dim() == 1:
        return _masked(x, 0, mask)
    return whole.apply(func, args, kwargs)

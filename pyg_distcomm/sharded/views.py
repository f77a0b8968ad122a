"""Carries the sharded dimension along views, and along what joins or splits tensors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.sharded import whole
from pyg_distcomm.sharded.agreement import in_backward
from pyg_distcomm.sharded.dist_tensor import DistTensor, local_at, rule
from pyg_distcomm.sharded.ids import blocks_of, with_ids
from pyg_distcomm.sharded.partial import PartialSum, over_ranks, plain

aten = torch.ops.aten
_KEPT = 8  # tensors of which given rows are a slice


def _view(
    x: DistTensor, local: Tensor, dim: int, rows: Rows | None = None, stride: Any = None
) -> DistTensor:
    """Returns a view of `x`; one of the same rows holds the same ids, if `x` holds any."""
    out = DistTensor(local, x.rows if rows is None else rows, dim, stride=stride)
    out._copied, out._family, out._root = x._copied, x._family, x._root
    same = rows is None and not x.dtype.is_floating_point
    return with_ids(x, out) if same else out


# where ops that move dimensions take the sharded one
_MOVED: dict[Any, Callable[..., int]] = {
    aten.t.default: lambda x: x.dim() - 1 - x.dim_,
    aten.transpose.int: lambda x, a, b: (
        {a % x.dim(): b, b % x.dim(): a}.get(x.dim_, x.dim_) % x.dim()
    ),
    aten.permute.default: lambda x, dims: [d % x.dim() for d in dims].index(x.dim_),
    aten.unsqueeze.default: lambda x, d: x.dim_ + (d % (x.dim() + 1) <= x.dim_),
}


@rule(*_MOVED)
def moved(func: Any, args: Any, kwargs: Any) -> Any:
    """Moves dimensions, or adds one."""
    x, *how = args
    return _view(x, func(x.local, *how), _MOVED[func](x, *how))


@rule(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def squeeze(func: Any, args: Any, kwargs: Any) -> Any:
    """Removes dimensions of size 1; the sharded one is gathered if it is one of them."""
    x = args[0]
    given = args[1] if len(args) > 1 else list(range(x.dim()))
    dims = {d % x.dim() for d in ([given] if isinstance(given, int) else given)}
    gone = sorted(d for d in dims if x.size(d) == 1)
    if x.dim_ in gone:
        return whole.apply(func, args, kwargs)
    local = aten.squeeze.dims(x.local, gone) if gone else x.local.view(x.local.shape)
    return _view(x, local, x.dim_ - sum(d < x.dim_ for d in gone))


@rule(aten.expand.default)
def expand(func: Any, args: Any, kwargs: Any) -> Any:
    """Repeats dimensions of size 1; rows stay."""
    x, size = args[0], list(args[1])
    d = x.dim_ + len(size) - x.dim()
    if size[d] not in (-1, x.size(x.dim_)):
        return whole.apply(func, args, kwargs)  # one row, repeated
    size[d] = x.local.size(x.dim_)
    return _view(x, func(x.local, size), d)


@rule(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def view(func: Any, args: Any, kwargs: Any) -> Any:
    """Changes the shape; rows stay, or are merged with dimensions before or behind them."""
    x, size = args[0], list(args[1])
    if -1 in size:
        i = size.index(-1)
        rest = -math.prod(size)
        size[i] = x.numel() // rest if rest else 0
    done = 1
    for d, s in enumerate(size):
        rows = _rows_of_view(x, size, d, done)
        if rows is not None:
            local = x.local.reshape([*size[:d], len(rows), *size[d + 1 :]])
            return _view(x, local, d, None if rows is x.rows else rows)
        done *= s
    return whole.apply(func, args, kwargs)


def _rows_of_view(x: DistTensor, size: list[int], d: int, done: int) -> Rows | None:
    """Returns the rows of a view that has them in one dimension; None if it mixes them.

    `done` is the product of the sizes before it.
    """
    n, s, before = x.size(x.dim_), size[d], math.prod(x.shape[: x.dim_])
    behind, after = math.prod(x.shape[x.dim_ + 1 :]), math.prod(size[d + 1 :])
    if done == before and (s > 1 or s != n or x.numel() or d == x.dim_):
        return _resized(x.rows, s, behind, after)
    if n > 1 and 0 < done < before and not before % done:
        times = before // done  # as those of relations, stacked
        found = None if s % times else _resized(x.rows, s // times, behind, after)
        return None if found is None else joined([found] * times)
    parts = x.rows.derived.get("parts", ())
    if 0 < before < done and len(parts) * before == done and len({*parts}) == 1:
        return _resized(parts[0], s, behind, after)
    return None


def _resized(rows: Rows, s: int, behind: int, after: int) -> Rows | None:
    """Returns the s rows of a view, each one of `rows`, a part of one, or several; else None.

    `behind` and `after` are the sizes of a row before and in the view.
    """
    n = rows.count
    if s == n:
        return rows
    if n and s > n and s % n == 0 and behind and behind % (s // n) == 0:
        return repeated(rows, s // n)
    of, times = rows.derived.get("repeats", (None, 1))
    fits = of is not None and s == of.count and after % times == 0
    return of if fits else None  # type: ignore[no-any-return]


def repeated(rows: Rows, times: int) -> Rows:
    """Returns the rows of a tensor of which each row became `times` rows."""
    known = rows.derived.get(("repeated", times))
    if known is None:
        gid = (rows.place[:, None] * times + torch.arange(times)).view(-1)
        known = Rows(gid, rows.count * times, rows.mesh, None)
        known.derived["repeats"] = rows, times
        rows.derived["repeated", times] = known
    return known  # type: ignore[no-any-return]


@rule(aten.select.int)
def select(func: Any, args: Any, kwargs: Any) -> Any:
    """Selects one index of a dimension; of the sharded one it is broadcast."""
    x, d, i = args
    d %= x.dim()
    if d == x.dim_:
        return PartialSum.copy_of(_one_row(x, d, i), x.rows.mesh)
    # of a column, which `contiguous()` copies
    stride = (x.stride(0),) if x.dim_ == 0 and x.dim() == 2 else None
    out = _view(x, func(x.local, d, i), x.dim_ - (d < x.dim_), stride=stride)
    if not x.dtype.is_floating_point and x.dim() == 2:
        out._end = i % x.size(d)
        with_ids(x, out, i)
    return out


def _one_row(x: DistTensor, d: int, i: int) -> Tensor:
    """Returns one row, which its owner sends to all: a sum in which it alone takes part."""
    n = x.size(d)
    if not -n <= i < n:
        raise IndexError(
            f"select(): index {i} out of range for tensor of size {list(x.shape)} at "
            f"dimension {d}"
        )
    i %= n
    place = x.rows.place
    at = int(torch.searchsorted(place, i))
    mine = at < len(place) and int(place[at]) == i
    shape = [s for k, s in enumerate(x.local.shape) if k != d]
    row = x.local.select(d, at).clone() if mine else x.local.new_zeros(shape)
    if x.rows.mesh.world.size == 1:
        return row
    sent = row.to(torch.uint8) if row.dtype == torch.bool else row
    return over_ranks(sent, x.rows.mesh).to(row.dtype)


@rule(aten.slice.Tensor)
def slice_(func: Any, args: Any, kwargs: Any) -> Any:
    """Takes a range of a dimension; of the sharded one the rows that this rank holds of it."""
    x = args[0]
    d = (args[1] if len(args) > 1 else 0) % x.dim()
    if d != x.dim_:
        return _view(x, func(x.local, *args[1:], **kwargs), x.dim_)
    n = x.size(d)
    begin, end, step = slice(*(*args[2:], None, None, None)[:3]).indices(n)
    if (begin, end, step) == (0, n, 1):
        return _view(x, aten.alias.default(x.local), d)
    rows, where = _sliced(x.rows, begin, end, step)
    if step == 1:  # rows ascend, so that they are a range of own rows
        first = int(where[0]) if len(where) else 0
        return _view(x, x.local.narrow(d, first, len(where)), d, rows)
    out = DistTensor(x.local.index_select(d, where.to(x.device)), rows, d)
    out._copied = step != 1 or x._copied  # on all ranks alike
    return out


def _sliced(rows: Rows, begin: int, end: int, step: int) -> tuple[Rows, Tensor]:
    """Returns the rows of a range, and where they are among own rows; kept."""
    known, key = rows.latest("slices"), (begin, end, step)
    if key not in known and step == 1 and "parts" in rows.derived:
        at = here = 0
        for one in rows.derived["parts"]:  # what `cat` has joined
            if (begin, end) == (at, at + one.count) and begin < end:
                where = torch.arange(here, here + len(one))
                one.latest("slice of", _KEPT)[key, rows.count] = rows, where
                known[key] = one, where
            at, here = at + one.count, here + len(one)
    if key not in known:
        place = rows.place
        inside = (place >= begin) & (place < end) & ((place - begin) % step == 0)
        gid = (place[inside] - begin) // step
        total = max(0, -(-(end - begin) // step))
        part, where = Rows(gid, total, rows.mesh, None), inside.nonzero().view(-1)
        part.latest("slice of", _KEPT)[key, rows.count] = rows, where
        known[key] = part, where
    return known[key]  # type: ignore[no-any-return]


@rule(aten.as_strided.default)
def as_strided(func: Any, args: Any, kwargs: Any) -> Any:
    """Takes a range, or one of a stack, of a gradient, where a plain tensor got rows so.

    Autograd writes to it at once; a write to every k-th row is carried to the gradient.
    """
    x, size, stride = args[:3]
    row, one = math.prod(x.shape[1:]), x.dim_ > 0 and len(size) < x.dim()
    size, stride = [1] * one + list(size), [row] * one + list(stride)
    step, rest = divmod(stride[0], row) if row and stride else (0, 1)
    begin, inside = divmod(args[3] if len(args) > 3 and args[3] else 0, row or 1)
    whole_rows = list(size[1:]) == list(x.shape[1:]) and not rest and not inside
    inner = [math.prod(x.shape[d + 1 :]) for d in range(1, x.dim())]
    if not in_backward() or not whole_rows or list(stride[1:]) != inner:
        return whole.apply(func, args, kwargs)
    end = begin + (size[0] - 1) * step + 1 if size[0] else begin
    out = slice_(aten.slice.Tensor, (x, 0, begin, end, max(step, 1)), {})
    if out._copied and not x._copied:
        where = _sliced(x.rows, begin, end, max(step, 1))[1]
        out.carried, out._copied = (x, where.to(x.device)), False
    return select(aten.select.int, (out, 0, 0), {}) if one else out


@rule(
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
)
def split(func: Any, args: Any, kwargs: Any) -> Any:
    """Splits a tensor into views."""
    x, sizes, *rest = args
    d = (rest[0] if rest else kwargs.get("dim", 0)) % x.dim()
    if d != x.dim_:
        return [_view(x, part, x.dim_) for part in func(x.local, sizes, d)]
    if isinstance(sizes, int):
        sizes = [min(sizes, x.size(d) - i) for i in range(0, x.size(d), sizes)] or [0]
    ends = itertools.accumulate(sizes, initial=0)
    return [
        slice_(aten.slice.Tensor, (x, d, at, at + size, 1), {})
        for at, size in zip(ends, sizes, strict=False)
    ]


@rule(aten.unbind.int)
def unbind(func: Any, args: Any, kwargs: Any) -> Any:
    """Splits a tensor into views without one dimension."""
    x, d = args[0], (args[1] if len(args) > 1 else 0) % args[0].dim()
    if d == x.dim_:
        return whole.apply(func, args, kwargs)
    return [select(aten.select.int, (x, d, i), {}) for i in range(x.size(d))]


@rule(aten.cat.default)
def cat(func: Any, args: Any, kwargs: Any) -> Any:
    """Joins tensors, along rows or along another dimension."""
    parts = [p for p in args[0] if p.dim() != 1 or p.numel()] or args[0]
    d = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    like = next(p for p in (*parts, *args[0]) if type(p) is DistTensor)
    d %= like.dim()
    if d != like.dim_:
        return DistTensor(func(_beside(parts, like), d), like.rows, like.dim_)
    known = [
        p.rows if type(p) is DistTensor and p.dim_ == d else _space(like, p.size(d))
        for p in parts
    ]
    rows = joined(known)
    local = [local_at(p, r, d) for p, r in zip(parts, known, strict=True)]
    return DistTensor(torch.cat(local, d), rows, d)


def _space(x: DistTensor, n: int) -> Rows:
    """Returns the rows of n new rows beside those of `x`: those of its nodes, if as many."""
    found = space_of(x.rows, n)
    return blocks_of(n, x.rows.mesh) if found is None else found


def space_of(rows: Rows, n: int) -> Rows | None:
    """Returns the rows of a new tensor of n rows beside one of `rows`; None if none fit."""
    ends = rows.nodes, *rows.derived.get("ends", ())  # before other graphs' nodes
    for end in ends:
        if end is not None and end.count == n:
            return end  # type: ignore[no-any-return]
    if n in rows.latest("read"):
        return rows.latest("read")[n]  # type: ignore[no-any-return]
    if rows.count == n:
        return rows
    spaces = rows.mesh.sharded.get("spaces", {})
    return spaces.get(n)


def joined(parts: list[Rows]) -> Rows:
    """Returns the rows of parts one after another; kept with the first."""
    if len(parts) == 1:
        return parts[0]

    def made() -> Rows:
        found = parts[0].joined(parts)
        found.derived["parts"] = parts
        return found

    return parts[0].latest("joined").made(tuple(map(id, parts)), made, parts)  # type: ignore[no-any-return]


@rule(aten.stack.default)
def stack(func: Any, args: Any, kwargs: Any) -> Any:
    """Stacks tensors along a new dimension."""
    parts, d = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    like = next(p for p in parts if type(p) is DistTensor)
    d %= like.dim() + 1
    local = func(_beside(parts, like), d)
    return DistTensor(local, like.rows, like.dim_ + (d <= like.dim_))


def _beside(parts: Any, like: DistTensor) -> list[Tensor]:
    """Returns own rows of tensors that are joined row by row: one row is not broadcast."""
    shapes = [list(p.shape) for p in parts]
    if any(shape[like.dim_ : like.dim_ + 1] != [like.rows.count] for shape in shapes):
        raise RuntimeError(
            f"got tensors of {shapes} to join row by row; give each {like.rows.count} "
            f"rows in dimension {like.dim_}"
        )
    return [local_at(plain(p), like.rows, like.dim_) for p in parts]


@rule(aten.flip.default)
def flip(func: Any, args: Any, kwargs: Any) -> Any:
    """Reverses dimensions other than the rows."""
    x, dims = args
    if x.dim_ in [d % x.dim() for d in dims]:
        return whole.apply(func, args, kwargs)
    out = DistTensor(func(x.local, dims), x.rows, x.dim_)
    if list(dims) in ([0], [-2]) and x.dim_ == 1:
        out._edges_are(x._flipped, x._topology)
        if x._topology is not None and x._topology.chunked:
            _ = x._topology.reversed  # raises where these edges are not all here
    return out


@rule(aten.repeat.default)
def repeat(func: Any, args: Any, kwargs: Any) -> Any:
    """Repeats dimensions other than the rows."""
    x, times = args
    d = x.dim_ + len(times) - x.dim()
    if times[d] != 1:
        return whole.apply(func, args, kwargs)
    return DistTensor(func(x.local, times), x.rows, d)


@rule(
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_empty.default,
    aten.new_full.default,
    aten.new_empty_strided.default,
)
def new(func: Any, args: Any, kwargs: Any) -> Any:
    """Makes a tensor, sharded where `x` is, or by its first size if that is one of rows.

    Where there are as many edges as nodes, ones stand for edges, and zeros for sums at nodes.
    """
    x, size, rest = args[0], list(args[1]), args[2:]
    d = x.dim_ if len(size) == x.dim() else 0
    rows = space_of(x.rows, size[d]) if size else None
    if rows is None and len(size) == 3 and size[1] == x.rows.count:
        d, rows = 1, x.rows  # first states of a recurrent layer
    ones = func in (aten.new_ones.default, aten.new_full.default)
    if size and (d or (ones and not x.dim_)) and size[d] == x.size(d):
        rows = x.rows
    if func is aten.new_empty_strided.default:
        func, rest = aten.new_empty.default, ()
    if rows is None or type(x) is not DistTensor:
        return func(x.local, size, *rest, **kwargs)
    size[d] = len(rows)
    return DistTensor(func(x.local, size, *rest, **kwargs), rows, d)


@rule(aten.select_backward.default, aten.slice_backward.default)
def part_backward(func: Any, args: Any, kwargs: Any) -> Any:
    """Puts the gradient of a part where the part was taken."""
    g, size, d, *rest = args
    size = list(size)
    if type(g) is not DistTensor:
        return whole.apply(func, args, kwargs)
    d %= len(size)
    at = g.dim_ + (func is aten.select_backward.default and d <= g.dim_)
    if at == d:
        sliced = func is aten.slice_backward.default
        out = _slice_backward(g, size, d, *rest) if sliced else None
        return whole.apply(func, args, kwargs) if out is None else out
    size[at] = g.local.size(g.dim_)
    return DistTensor(func(g.local, size, d, *rest), g.rows, at)


def _slice_backward(
    g: DistTensor, size: list[int], d: int, begin: int, end: int, step: int
) -> Any:
    part = slice(begin, end, step).indices(size[d])
    if part == (0, g.rows.count, 1) and size[d] == g.rows.count:  # of all rows
        return g
    found = g.rows.latest("slice of", _KEPT).get((part, size[d]))
    if found is None:
        return None
    rows, where = found
    size[d] = len(rows)
    out = g.local.new_zeros(size)
    out.index_copy_(d, where.to(out.device), g.local)
    return DistTensor(out, rows, d)

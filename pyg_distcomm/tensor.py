"""DistTensor: a tensor whose rows are spread over the ranks."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from pyg_distcomm import indexing, kernels, losses, random, reductions
from pyg_distcomm.rows import Rows
from pyg_distcomm.rowwise import BY_DIM, FACTS, ROWWISE, base_name
from pyg_distcomm.shaping import SHAPING, Undecided

_WAYS_OUT = (
    "use .to_local() for this rank's rows or .full_tensor() for all of them "
    "(both return an ordinary tensor)"
)


class DistTensor(torch.Tensor):
    """A tensor cut by rows: this rank holds some rows, full width.

    The rule: *an operation that works row by row is local; an operation that reduces
    over nodes is global; what the rule cannot decide raises a TypeError.*

    So `x.relu()`, `lin(x)`, `x[mask]`, `x.argmax(-1)` stay here, while `x.sum()`,
    `x.mean(0)`, `F.cross_entropy(x, y)` and batch norm return what they would on one
    process, equal on all ranks. `shape` and `repr` are local and never communicate.
    A plain tensor beside it is taken as replicated, or, with a row for each row here,
    as this rank's rows; with a row for every row anywhere, its rows here are used.

    `x[idx]` with plain integer ids (the same on all ranks) returns the rows of those
    ids, cut into equal blocks; with a DistTensor of ids, each rank gets those it asks
    for. `x[mask]` costs nothing. Dropout and `rand_like` are keyed by row id.

    Gradients: see [Note: gradients] in `adjoint.py`; `x.grad` of a leaf is exact.
    Pickling keeps this rank's rows as an ordinary tensor.

    Shapes: `[n_i, ...]` on rank i; `rows.total` in all.
    """

    rows: Rows

    @staticmethod
    def wrap(local: Tensor, rows: Rows) -> DistTensor:
        """Returns `local` `[len(rows), ...]` as this rank's part of a row-cut tensor."""
        if local.dim() == 0 or local.size(0) != len(rows):
            raise ValueError(
                f"local tensor of shape {tuple(local.shape)} must have one row for each "
                f"of this rank's {len(rows)} rows"
            )
        out = local.as_subclass(DistTensor)
        out.rows = rows
        return out

    def to_local(self) -> Tensor:
        """Returns this rank's rows as an ordinary tensor, differentiably."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    def full_tensor(self) -> Tensor:
        """Returns all rows, in original order, on every rank; collective."""
        return indexing.gather_all(self.to_local(), self.rows)

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Applies the rule to one torch function."""
        return _dispatch(func, args, kwargs or {})

    def __getitem__(self, key: Any) -> Any:
        return _getitem(self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        _setitem(self, key, value)

    def __iter__(self) -> Any:
        raise _undecided("iterating over rows")

    def __deepcopy__(self, memo: dict) -> DistTensor:
        if id(self) not in memo:
            local = self.to_local().detach().clone()
            twin = DistTensor.wrap(local, self.rows)
            if self.requires_grad:
                twin.requires_grad_()
            memo[id(self)] = twin
        twin = memo[id(self)]
        twin.__dict__.update(
            {k: copy.deepcopy(v, memo) for k, v in vars(self).items() if k != "rows"}
        )
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.to_local().detach().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        local = repr(self.to_local().detach())
        mesh = self.rows.mesh
        return f"DistTensor({local}, {self.rows}/{mesh.size})"


def _undecided(what: str) -> TypeError:
    return TypeError(
        f"{what} is neither row by row nor a reduction over rows, so a DistTensor cannot "
        f"decide what it means on a spread-out tensor; {_WAYS_OUT}"
    )


def _first(args: Any, kwargs: Any) -> DistTensor:
    found: list[DistTensor] = []
    tree_map(
        lambda v: found.append(v) if isinstance(v, DistTensor) else v, (args, kwargs)
    )
    return found[0]


def _dispatch(func: Callable, args: Any, kwargs: Any) -> Any:
    name = base_name(func)
    if name in _SPECIAL:
        return _SPECIAL[name](func, args, kwargs)
    if name in losses.LOSSES:
        return _loss(func, args, kwargs)
    if name in BY_DIM:
        return _by_dim(name, func, args, kwargs)
    if name in FACTS:
        return _plainly(func, args, kwargs)
    if name in ROWWISE or name.startswith("_foreach_"):
        return _rowwise(func, args, kwargs)
    raise _undecided(f"{name}()")


def _plainly(func: Callable, args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _rowwise(func: Callable, args: Any, kwargs: Any) -> Any:
    rows, width = _aligned_rows(func, args, kwargs)
    args, kwargs = _aligned(func, (args, kwargs), rows, width)
    return _wrapped(_plainly(func, args, kwargs), rows, func)


def _aligned_rows(func: Callable, args: Any, kwargs: Any) -> tuple[Rows, int]:
    """The rows all operands share, and how many dims the widest has."""
    found: list[DistTensor] = []
    tree_map(
        lambda v: found.append(v) if isinstance(v, DistTensor) else v, (args, kwargs)
    )
    rows = found[0].rows
    for other in found[1:]:
        if not rows.same_as(other.rows):
            raise TypeError(
                f"{base_name(func)}() got tensors cut differently: {rows} and "
                f"{other.rows}; pick the same rows of both, or {_WAYS_OUT}"
            )
    return rows, max(t.dim() for t in found)


def _aligned(func: Callable, tree: Any, rows: Rows, width: int) -> Any:
    name = base_name(func)
    if name in ("linear", "embedding", "prelu"):  # their other operands are weights
        if name == "linear" and not isinstance(_at(tree, 0, "input"), DistTensor):
            raise _undecided("linear() with row-cut weights")
        return tree

    def fit(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        if isinstance(value, DistTensor):
            if value.dim() < width:
                raise _undecided(
                    f"{name}() of a {value.dim()}-d and a {width}-d row-cut tensor, whose "
                    "rows would meet columns (add .unsqueeze(-1)),"
                )
            return value
        return _fit_plain(value, rows, width, name)

    return tree_map(fit, tree)


def _at(tree: Any, place: int, name: str) -> Any:
    args, kwargs = tree
    return args[place] if len(args) > place else kwargs.get(name)


def _fit_plain(value: Tensor, rows: Rows, width: int, name: str) -> Tensor:
    if value.dim() < width or value.size(0) == 1:
        return value
    if value.dim() == width and value.size(0) == len(rows):
        return value
    if value.dim() == width and rows.whole and value.size(0) == rows.total:
        return value[rows.gid.to(value.device)]
    raise TypeError(
        f"{name}() got a plain tensor of shape {tuple(value.shape)} beside a row-cut one "
        f"with {len(rows)} rows here and {rows.total} in all; give it one row (replicated), "
        f"{len(rows)} (this rank's) or {rows.total} (everybody's), or make it part of the "
        "Data before pdc.partition"
    )


def _wrapped(out: Any, rows: Rows, func: Callable) -> Any:
    if isinstance(out, DistTensor):  # an in-place operation returns what it was given
        return out
    if isinstance(out, Tensor):
        return DistTensor.wrap(out, rows)
    if isinstance(out, (tuple, list)):
        parts = [_wrapped(part, rows, func) for part in out]
        return type(out)(parts) if type(out) in (tuple, list) else _named(out, parts)
    return out


def _named(out: Any, parts: list[Any]) -> Any:
    return type(out)(parts)  # torch.return_types.* take one sequence


def _by_dim(name: str, func: Callable, args: Any, kwargs: Any) -> Any:
    x = args[0] if args else kwargs.get("input", kwargs.get("self"))
    if not isinstance(x, DistTensor):
        raise _undecided(f"{name}() of an ordinary tensor by a row-cut one")
    if name in ("max", "min") and _is_pairwise(args, kwargs):
        return _rowwise(torch.maximum if name == "max" else torch.minimum, args, kwargs)
    place, default = BY_DIM[name]
    dim = _dim_of(args, kwargs, place, default)
    if isinstance(dim, str):
        raise _undecided(f"{name}() without dim")
    dims = _normal_dims(dim, x.dim())
    if 0 not in dims:
        return _rowwise(func, args, kwargs)
    return _reduce(name, x, dims, dim, args, kwargs)


def _is_pairwise(args: Any, kwargs: Any) -> bool:
    return "other" in kwargs or (len(args) > 1 and isinstance(args[1], Tensor))


def _dim_of(args: Any, kwargs: Any, place: int, default: Any) -> Any:
    for key in ("dim", "dims", "axis"):
        if key in kwargs:
            return kwargs[key]
    if len(args) > place and not isinstance(args[place], bool):
        tail = args[place:]
        whole = len(tail) > 1 and all(type(d) is int for d in tail)
        return list(tail) if whole and place == 1 else args[place]
    return default


def _normal_dims(dim: Any, ndim: int) -> list[int]:
    if dim is None or (isinstance(dim, (tuple, list)) and len(dim) == 0):
        return list(range(ndim))
    dims = [dim] if isinstance(dim, int) else list(dim)
    for d in dims:
        if not -ndim <= d < ndim:
            raise IndexError(
                f"dimension {d} is out of range for a tensor of {ndim} dimensions"
            )
    return sorted({d % ndim for d in dims})


def _reduce(
    name: str, x: DistTensor, dims: list[int], dim: Any, args: Any, kwargs: Any
) -> Any:
    local, rows = x.to_local(), x.rows
    keepdim = bool(kwargs.get("keepdim", _third_bool(args, BY_DIM[name][0])))
    if name in ("max", "min", "argmax", "argmin"):
        return _extreme(name, local, rows, dim, keepdim)
    if name not in reductions.GLOBAL:
        raise _undecided(f"{name}() over the rows")
    extra = {
        k: kwargs[k] for k in ("dtype", "p", "correction", "unbiased") if k in kwargs
    }
    if name in ("var", "std") and len(args) == 2 and isinstance(args[1], bool):
        extra["unbiased"] = args[1]
    if name in ("norm", "vector_norm"):
        extra["p"] = args[1] if len(args) > 1 else kwargs.get("p", kwargs.get("ord", 2))
    if keepdim and name != "count_nonzero":
        extra["keepdim"] = True
    return reductions.GLOBAL[name](local, rows, dims, **extra)


def _third_bool(args: Any, place: int) -> bool:
    return len(args) > place + 1 and args[place + 1] is True


def _extreme(name: str, local: Tensor, rows: Rows, dim: Any, keepdim: bool) -> Any:
    op = name.removeprefix("arg")
    if dim is None and (op == name or local.dim() == 1):
        if op == name:
            return reductions.extreme(local, rows, list(range(local.dim())), False, op)
        return reductions.extreme_at(local, rows, False, op).indices
    if dim is None:
        raise _undecided(f"{name}() without dim")
    found = reductions.extreme_at(local, rows, keepdim, op)
    return found if op == name else found.indices


def _loss(func: Callable, args: Any, kwargs: Any) -> Any:
    rows, _ = _aligned_rows(func, args, kwargs)
    name = func.__name__

    def fit(value: Any, place: Any) -> Any:
        if isinstance(value, DistTensor):
            return value.to_local()
        if isinstance(value, Tensor) and place in _ROW_OPERANDS and value.dim():
            return _fit_plain(value, rows, value.dim(), name)
        return value

    out, per_row = losses.global_loss(
        func,
        [fit(value, place) for place, value in enumerate(args)],
        {key: fit(value, key) for key, value in kwargs.items()},
        rows,
    )
    return DistTensor.wrap(out, rows) if per_row and out.dim() else out


_ROW_OPERANDS = (0, 1, "input", "target", "input1", "input2", "anchor", "positive")


def _shape(func: Callable, args: Any, kwargs: Any) -> Any:
    rows, _ = _aligned_rows(func, args, kwargs)
    name = base_name(func)
    if name in ("matmul", "mm", "mv", "addmm"):
        _check_product(name, args)
    if name in ("cat", "concat", "concatenate", "stack"):
        args, kwargs = _aligned(func, (args, kwargs), rows, _first(args, kwargs).dim())
    local_args, local_kwargs = tree_map(_unwrapped, (args, kwargs))
    try:
        out = SHAPING[name](func, *local_args, **local_kwargs)
    except Undecided:
        raise _undecided(f"{name}() that moves rows or mixes them") from None
    return DistTensor.wrap(out, rows)


def _unwrapped(value: Any) -> Any:
    return value.to_local() if isinstance(value, DistTensor) else value


def _check_product(name: str, args: Any) -> None:
    left, right = args[-2:]
    other = [left, right] if name != "addmm" else [args[1], args[2]]
    if not isinstance(other[0], DistTensor) or isinstance(other[1], DistTensor):
        raise _undecided(f"{name}() that sums over rows")
    if name == "addmm" and isinstance(args[0], DistTensor):
        raise _undecided("addmm() with a row-cut bias")


def _keyed(func: Callable, args: Any, kwargs: Any) -> Any:
    """Dropout, rand_like, randn_like: drawn by (seed, call, row id, column)."""
    x, name = _first(args, kwargs), base_name(func)
    local, gid = x.to_local(), x.rows.gid.to(x.device)
    if name == "rand_like":
        return DistTensor.wrap(
            random.keyed_uniform(x.rows.mesh.next_key(), gid, local.detach()), x.rows
        )
    if name == "randn_like":
        return DistTensor.wrap(
            random.keyed_normal(x.rows.mesh.next_key(), gid, local.detach()), x.rows
        )
    p, training, inplace = _dropout_arguments(args, kwargs)
    if not training or p == 0:
        return x
    out = keyed_dropout(local, p, gid, x.rows.mesh.next_key())
    return x.copy_(out) if inplace else DistTensor.wrap(out, x.rows)


def _dropout_arguments(args: Any, kwargs: Any) -> tuple[float, bool, bool]:
    given = dict(zip(("input", "p", "training", "inplace"), args, strict=False))
    given.update({("training" if k == "train" else k): v for k, v in kwargs.items()})
    p = float(given.get("p", 0.5))
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    return p, bool(given.get("training", True)), bool(given.get("inplace", False))


class _KeyedDropout(torch.autograd.Function):
    """y = x * keep / (1 - p), where keep is a function of (key, row id, column)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, gid: Tensor, key: int) -> Tensor:
        ctx.draw = p, gid, key
        return kernels.keyed_dropout(x, key, gid, p)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        p, gid, key = ctx.draw  # the mask is drawn again: nothing is stored
        return kernels.keyed_dropout(g.contiguous(), key, gid, p), None, None, None


def keyed_dropout(x: Tensor, p: float, gid: Tensor, key: int) -> Tensor:
    """Drops entries of plain `x` `[n, ...]` by a keyed hash of `gid` `[n]` and column."""
    out: Tensor = _KeyedDropout.apply(x, p, gid, key)
    return out


def _batch_norm(func: Callable, args: Any, kwargs: Any) -> Any:
    bound = inspect.signature(torch.nn.functional.batch_norm).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    x = given.pop("input")
    if not given.pop("training"):
        local = torch.nn.functional.batch_norm(x.to_local(), training=False, **given)
    else:
        local = reductions.batch_norm(x.to_local(), x.rows, **given)
    return DistTensor.wrap(local, x.rows)


def _requires_grad(func: Callable, args: Any, kwargs: Any) -> Any:
    x = args[0]
    out = _plainly(func, args, kwargs)
    size = x.rows.mesh.size
    if x.requires_grad and x.is_leaf and size > 1 and not hasattr(x, "_exact_gradient"):
        x._exact_gradient = True  # see [Note: gradients]
        with torch._C.DisableTorchFunctionSubclass():
            x.register_hook(lambda g: g / size)
    return out


def _grad(func: Callable, args: Any, kwargs: Any) -> Any:
    x = args[0]
    found = _plainly(func, args, kwargs)
    if isinstance(found, Tensor) and not isinstance(found, DistTensor):
        return DistTensor.wrap(found, x.rows)
    return found


def _compare_all(func: Callable, args: Any, kwargs: Any) -> bool:
    x = _first(args, kwargs)
    return reductions.agree_all(_plainly(func, args, kwargs), x.rows)


_SPECIAL: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(SHAPING, _shape),
    **dict.fromkeys(("dropout", "rand_like", "randn_like"), _keyed),
    "requires_grad=": _requires_grad,
    **dict.fromkeys(("grad", "grad="), _grad),
    **dict.fromkeys(("equal", "allclose"), _compare_all),
    "batch_norm": _batch_norm,
}


def _getitem(x: DistTensor, key: Any) -> Any:
    first, rest = (key[0], key[1:]) if isinstance(key, tuple) and key else (key, ())
    if first is Ellipsis:
        if isinstance(key, tuple) and len(rest) < x.dim():
            return _columns(x, key)
        raise _undecided("x[...] that reaches the rows")
    if any(isinstance(r, DistTensor) for r in rest):
        raise _undecided("indexing rows and columns by tensors together")
    return (
        _columns(_take_rows(x, first), (slice(None), *rest))
        if rest
        else (_take_rows(x, first))
    )


def _columns(x: DistTensor, key: Any) -> DistTensor:
    if isinstance(key, tuple) and len(key) > 1 and key[1] is None and x.dim() == 0:
        raise _undecided("x[...]")
    return DistTensor.wrap(x.to_local()[key], x.rows)


def _take_rows(x: DistTensor, key: Any) -> DistTensor:
    if isinstance(key, slice) and key == slice(None):
        return x
    if isinstance(key, (int, type(None), bool)) or _is_scalar(key):
        raise _undecided(f"x[{key}], which drops or adds the row dimension,")
    if isinstance(key, Tensor) and key.dtype in (torch.bool, torch.uint8):
        return _masked(x, key)
    if isinstance(key, DistTensor):
        local = indexing.take(x.to_local(), x.rows, key.to_local().cpu().long())
        return DistTensor.wrap(local, key.rows)
    idx = indexing.ids_of(key, x.rows.total)
    if idx.dtype == torch.bool:
        return _masked(x, idx)
    if idx.dim() != 1 or idx.is_floating_point():
        raise _undecided(f"x[idx] with idx of shape {tuple(idx.shape)} and {idx.dtype}")
    local, rows = indexing.take_same(x.to_local(), x.rows, idx)
    return DistTensor.wrap(local, rows)


def _is_scalar(key: Any) -> bool:
    return isinstance(key, Tensor) and key.dim() == 0


def _masked(x: DistTensor, mask: Tensor) -> DistTensor:
    if mask.dim() != 1:
        raise _undecided("x[mask] with a mask that is not one bool per row")
    if not isinstance(mask, DistTensor):
        mask = DistTensor.wrap(_fit_plain(mask, x.rows, 1, "x[mask]"), x.rows)
    elif not x.rows.same_as(mask.rows):
        raise TypeError(f"x[mask]: x has {x.rows}, but the mask has {mask.rows}")
    return DistTensor.wrap(x.to_local()[mask.to_local()], _selected(mask))


def _selected(mask: DistTensor) -> Rows:
    """The rows a mask keeps, remembered on the mask so that their count is asked once."""
    version = mask._version
    known = getattr(mask, "_kept", None)
    if known is None or known[0] != version:
        known = mask._kept = (version, mask.rows.select(mask.to_local()))
    rows: Rows = known[1]
    return rows


def _setitem(x: DistTensor, key: Any, value: Any) -> None:
    first, rest = (key[0], key[1:]) if isinstance(key, tuple) and key else (key, ())
    if isinstance(first, Tensor) and first.dtype == torch.bool and first.dim() == 1:
        mask = _masked(DistTensor.wrap(torch.empty(len(x.rows)), x.rows), first)
        _check_cut(value, mask.rows)
        first = _unwrapped(first)
    elif isinstance(first, slice) and first == slice(None):
        _check_cut(value, x.rows)
    else:
        raise _undecided("x[key] = value, unless key is a mask or [:, columns],")
    with torch._C.DisableTorchFunctionSubclass():
        torch.Tensor.__setitem__(x, (first, *rest), _unwrapped(value))


def _check_cut(value: Any, rows: Rows) -> None:
    if isinstance(value, DistTensor) and not value.rows.same_as(rows):
        raise TypeError(f"the value has {value.rows}, but its place has {rows}")

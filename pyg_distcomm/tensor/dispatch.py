"""Dispatches torch functions on DistTensors: row-wise, global, or unsupported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.comm import random
from pyg_distcomm.comm.gradient_averaging import (
    check_transforms,
    refuse_export,
    refuse_transforms,
)
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.tensor import gather_by_id, gradient_scale, reductions, sizes
from pyg_distcomm.tensor.decompositions import DECOMPOSED, decomposed, gather_from_plain
from pyg_distcomm.tensor.getitem import check_writes, columns_at, spans
from pyg_distcomm.tensor.op_tables import (
    BY_DIM,
    FACTS,
    NEW,
    ROWWISE,
    SIZES,
    WEIGHTED,
    WHOLE,
    base_name,
)
from pyg_distcomm.tensor.reductions import RECURRENT, dropout, recurrent
from pyg_distcomm.tensor.row_sharded import (
    HOW_TO_CONVERT,
    RowShardedTensor,
    TooManyDims,
    advice,
    all_rows,
    argument,
    call_local,
    compare_operation,
    first_sharded,
    leaves,
    local_part,
    refuse_loader,
    replicate_operands,
    shard_plain_operand,
    tree_map,
    unsupported_op,
)
from pyg_distcomm.tensor.shape_ops import (
    SHAPING,
    Stacked,
    UnsupportedOp,
    check_product,
    joined,
    multiplied,
    transposed,
)

TRANSFORMS = "torch._functorch."  # which take a tensor's rows without asking it
FAKES = "torch._subclasses."  # the inputs of torch.export


def apply(func: Callable, args: Any, kwargs: Any) -> Any:
    name = base_name(func)
    if name in SIZES:
        return sizes.size_of(name, func, args, kwargs)
    if name in FACTS:
        caller = sys._getframe(2).f_globals.get("__name__", "")
        if caller.startswith(TRANSFORMS):
            refuse_transforms()
        if caller.startswith(FAKES):
            refuse_export()
        return call_local(func, args, kwargs)
    if name.startswith(("_foreach_", "_fused_")):
        return reductions.apply(func, args, kwargs)
    if name == "l1_loss" and (weight := reductions.dropped_weight(func)) is not None:
        kwargs = {"weight": weight, **kwargs}
    check_writes(func, args)
    if kwargs.get("out") is not None and name not in ROWWISE:
        return _into(kwargs["out"], func, args, kwargs)
    if name in ("type_as", "to") and isinstance((*args, None)[1], Tensor):
        return args[0].to(args[1].device, args[1].dtype, **kwargs)
    if name in _SILENT:  # hooks of saved tensors would hand it others
        return _apply_rule(name, func, args, kwargs)
    with first_sharded(args, kwargs).rows.spilling():
        try:
            return _apply_rule(name, func, *_replicate_operands(name, args, kwargs))
        except TooManyDims:
            return on_all_rows(func, args, kwargs)


def _apply_rule(name: str, func: Callable, args: Any, kwargs: Any) -> Any:
    if name in _SPECIAL:
        return _SPECIAL[name](func, args, kwargs)
    if name in reductions.LOSSES:
        return _loss(func, args, kwargs)
    if name in BY_DIM:
        return _by_dim(name, func, args, kwargs)
    if name in ROWWISE:
        return _rowwise(func, args, kwargs)
    if name in WHOLE:
        return gathered(func, args, kwargs)
    raise unsupported_op(f"{name}()")


def _replicate_operands(name: str, args: Any, kwargs: Any) -> Any:
    """Registers or compares plain operands; see `replicate_operands`."""
    check_transforms()
    found = first_sharded(args, kwargs)
    if found.rows.mesh.size == 1:
        return args, kwargs
    return replicate_operands(found, name, args, kwargs)


# autograd's own, and what does not look at the values of its plain operands
_SILENT = frozenset(
    """requires_grad= requires_grad requires_grad_ grad grad= backward register_hook retain_grad
    register_post_accumulate_grad_hook zeros_like ones_like empty_like""".split()
)


def _into(out: Any, func: Callable, args: Any, kwargs: Any) -> Any:
    """Writes the result of an operation to the given `out`."""
    if not isinstance(out, Tensor):
        raise unsupported_op(f"{base_name(func)}(out=...) of several tensors")
    given = {key: value for key, value in kwargs.items() if key != "out"}
    found = func(*args, **given)
    if not isinstance(out, RowShardedTensor):
        return out.copy_(all_rows(found))
    same = isinstance(found, RowShardedTensor) and out.dim() == found.dim()
    local = gather_by_id.shard_as(found, out.rows) if same else None
    if local is None:
        raise unsupported_op(f"{base_name(func)}(out=...) of another shape")
    return call_local(torch.Tensor.copy_, (out, local), {})


def _rowwise(func: Callable, args: Any, kwargs: Any) -> Any:
    if base_name(func) == "where" and len(args) + len(kwargs) == 1:
        return gathered(func, args, kwargs)
    if _writes_whole(func, args, kwargs):
        compare_operation(func.__name__, first_sharded(args, kwargs), (args, kwargs))
        return func(*tree_map(all_rows, args), **tree_map(all_rows, kwargs))
    args, kwargs, _, width = _align_operands(func, args, kwargs)
    args, kwargs = _aligned(func, (args, kwargs), width)
    wants_gradient = base_name(func).endswith("_like") and kwargs.pop(
        "requires_grad", False
    )
    first = first_sharded(args, kwargs)
    out = _wrapped(call_local(func, args, kwargs), first)
    if base_name(func) in _COPIES and first.holds_ends and out is not first:
        out.holds_ends = not (out.is_floating_point() or out.dtype == torch.bool)
    if base_name(func) in _COPIES and hasattr(first, "_counts"):
        version, counts = first._counts
        if version == first._version and out is not first:
            out._counts = out._version, counts
    return out.requires_grad_() if wants_gradient else out


_COPIES = frozenset("to cpu cuda clone contiguous detach bool pin_memory".split())


def _writes_whole(func: Callable, args: Any, kwargs: Any) -> bool:
    """Tells whether row-sharded values are written to an ordinary tensor of all rows."""
    name = getattr(func, "__name__", "")
    inplace = name.endswith("_") and not name.startswith("_")
    target = args[0] if inplace and args else kwargs.get("out")
    if not isinstance(target, Tensor) or isinstance(target, RowShardedTensor):
        return False
    if first_sharded(args, kwargs).reads_local or "out" in kwargs:
        raise unsupported_op(
            f"{name}() that writes row-sharded values into an ordinary tensor"
        )
    return True


def _align_operands(
    func: Callable, args: Any, kwargs: Any
) -> tuple[Any, Any, Rows, int]:
    """Returns operands with the same sharding, their rows, and the most dims."""
    found = leaves((args, kwargs), RowShardedTensor)
    like = found[0]
    if not func.__name__.endswith("_"):  # else what is written to
        like = next((t for t in found if t.rows.partition is not None), like)
    new: dict[int, Any] = {}
    for other in found:
        if other.rows is like.rows or id(other) in new:
            continue
        local = gather_by_id.shard_as(other, like.rows)
        if local is None or other is kwargs.get("out"):
            raise TypeError(
                f"{advice()}{base_name(func)}() got tensors cut differently: {like.rows} "
                f"and {other.rows}; pick the same rows of both, or {HOW_TO_CONVERT}"
            )
        new[id(other)] = other.wrap(local, like.rows)
    if new:
        args, kwargs = tree_map(lambda v: new.get(id(v), v), (args, kwargs))
    return args, kwargs, like.rows, max(t.dim() for t in found)


def _aligned(func: Callable, tree: Any, width: int) -> Any:
    name = base_name(func)
    if name in WEIGHTED:  # their other operands are weights
        weights = argument(tree, 1, "weight")
        plain = not isinstance(argument(tree, 0, "input"), RowShardedTensor)
        if name in ("linear", "embedding", "prelu") and (
            plain or isinstance(weights, RowShardedTensor)
        ):
            raise unsupported_op(f"{name}() with row-sharded weights")
        if name == "embedding" and tree[1].get("max_norm") is not None:
            raise unsupported_op(
                "embedding(max_norm=...), which changes rows of its weights,"
            )
        if name.endswith("_cell"):  # states of all rows
            (x, states, *rest), kwargs = tree

            def fit_state(h: Any) -> Any:
                return (
                    h
                    if isinstance(h, RowShardedTensor)
                    else shard_plain_operand(h, x, 2, name)
                )

            states = tree_map(fit_state, states)
            return (x, states, *rest), kwargs
        return tree

    like = first_sharded(*tree)

    def fit(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        if isinstance(value, RowShardedTensor):
            if value.dim() < width:
                raise unsupported_op(
                    f"{name}() of a {value.dim()}-d and a {width}-d row-sharded tensor, whose "
                    "rows would meet columns (add .unsqueeze(-1)),"
                )
            return value
        return shard_plain_operand(value, like, width, name)

    return tree_map(fit, tree)


def _wrapped(out: Any, like: RowShardedTensor) -> Any:
    # an in-place operation returns what it was given
    if isinstance(out, RowShardedTensor):
        return out
    if isinstance(out, Tensor):
        return like.wrap(out, like.rows)
    if isinstance(out, (tuple, list)):  # torch.return_types.* take one sequence, too
        return type(out)([_wrapped(part, like) for part in out])
    return out


def _by_dim(name: str, func: Callable, args: Any, kwargs: Any) -> Any:
    x = args[0] if args else kwargs.get("input", kwargs.get("self"))
    if not isinstance(x, RowShardedTensor):
        return gather_from_plain(name, *args, **kwargs)
    if name in ("max", "min") and isinstance(
        argument((args, kwargs), 1, "other"), Tensor
    ):
        return _rowwise(torch.maximum if name == "max" else torch.minimum, args, kwargs)
    place, default = BY_DIM[name]
    dim = _dim_of(name, args, kwargs, place, default)
    if isinstance(dim, str):
        raise unsupported_op(f"{name}() without dim")
    dims = _normal_dims(dim, x.dim())
    if 0 not in dims:
        return _rowwise(func, args, kwargs)
    return _reduce(func, x, dims, dim, args, kwargs)


_MANY_DIMS = frozenset("sum mean amax amin flip var std any all".split())


def _dim_of(name: str, args: Any, kwargs: Any, place: int, default: Any) -> Any:
    for key in ("dim", "dims", "axis"):
        if key in kwargs:
            return kwargs[key]
    if len(args) > place and not isinstance(args[place], bool):
        tail = args[place:]
        several = len(tail) > 1 and all(type(d) is int for d in tail)
        return list(tail) if several and name in _MANY_DIMS else args[place]
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
    func: Callable,
    x: RowShardedTensor,
    dims: list[int],
    dim: Any,
    args: Any,
    kwargs: Any,
) -> Any:
    local, rows, name = x.to_local(), x.rows, base_name(func)
    compare_operation(name, x, (args, kwargs))
    place = BY_DIM[name][0] + 1
    keepdim = bool(kwargs.get("keepdim", args[place:] and args[place] is True))
    if name in ("max", "min", "argmax", "argmin"):
        return reductions.extreme_of(name, local, rows, dim, keepdim)
    if name in reductions.SCALED and dims == [0]:
        out = reductions.SCALED[name](local, rows, kwargs, args)
        return out if name == "logsumexp" else x.wrap(out, rows)
    if name in WHOLE:
        return gathered(func, args, kwargs)
    if name == "select":
        return x[argument((args, kwargs), 2, "index")]
    if name == "unbind":
        return tuple(x)
    if name == "logsumexp":  # of each row, then of the rows
        own = func(x, [d for d in dims if d], keepdim=True).logsumexp(0)
        kept = [n for d, n in enumerate(local.shape) if d not in dims]
        return own.reshape([1] * len(dims) + kept if keepdim else kept)
    if name in _SPANS and not x.reads_local:
        return spans(func, x, args, kwargs)
    if name not in reductions.GLOBAL:
        raise unsupported_op(f"{name}() over the rows")
    extra = {
        k: kwargs[k] for k in ("dtype", "p", "correction", "unbiased") if k in kwargs
    }
    if name in ("var", "std"):  # (unbiased) or (dim, unbiased, keepdim)
        flags = [a for a in args[1:] if isinstance(a, bool)]
        extra.update({"unbiased": flags[0]} if flags else {})
        keepdim = bool(kwargs.get("keepdim", len(flags) > 1 and flags[1]))
    if name in ("norm", "vector_norm", "linalg_norm"):
        order = args[1] if len(args) > 1 else kwargs.get("p", kwargs.get("ord"))
        extra["p"] = 2 if order is None else order
        of_matrix = name == "linalg_norm" and len(dims) > 1 and order is not None
        if order != "fro" and (of_matrix or order == "nuc"):
            return gathered(func, args, kwargs)
    if keepdim and name != "count_nonzero":
        extra["keepdim"] = True
    return reductions.GLOBAL[name](local, rows, dims, **extra)


_SPANS = frozenset("chunk split tensor_split narrow".split())


def _loss(func: Callable, args: Any, kwargs: Any) -> Any:
    args, kwargs, rows, width = _align_operands(func, args, kwargs)
    if not any(type(v) is str and v == "none" for v in (*args, *kwargs.values())):
        compare_operation(func.__name__, first_sharded(args, kwargs), (args, kwargs))
    name, fitted = func.__name__, func.__name__ in reductions.ELEMENTWISE
    if fitted:
        args, kwargs = _aligned(func, (args, kwargs), width)

    def fit(value: Any, place: Any) -> Any:
        if isinstance(value, RowShardedTensor):
            return value.to_local()
        if fitted or (place not in _ROW_OPERANDS and name not in reductions.OF_THREE):
            return value
        if isinstance(value, Tensor) and value.dim():
            return shard_plain_operand(value, like, value.dim(), name)
        return value

    like = first_sharded(args, kwargs)
    out, per_row = reductions.global_loss(
        func,
        [fit(value, place) for place, value in enumerate(args)],
        {key: fit(value, key) for key, value in kwargs.items()},
        rows,
    )
    return first_sharded(args, kwargs).wrap(out, rows) if per_row and out.dim() else out


_ROW_OPERANDS = (0, 1, "input", "target", "input1", "input2", "anchor", "positive")


def _shape(func: Callable, args: Any, kwargs: Any) -> Any:
    name = base_name(func)
    if name in _PRODUCTS and (found := multiplied(name, args, kwargs)) is not None:
        return found
    if name in _PRODUCTS:
        check_product(name, args)
    if name not in _JOINS:
        args, kwargs, _, _ = _align_operands(func, args, kwargs)
    first = first_sharded(args, kwargs)
    if name in _JOINS:
        dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0))
        if name != "stack" and dim % first.dim() == 0 and not first.reads_local:
            return joined(list(args[0] if args else kwargs["tensors"]))
        args, kwargs, rows, _ = _align_operands(func, args, kwargs)
        first = first_sharded(args, kwargs)
        if (
            name == "stack"
            and dim % (first.dim() + 1) == 0
            and rows.stacked is not None
            and first.dim() == 1
            and not (first.is_floating_point() or first.dtype == torch.bool)
        ):
            return rows.stacked(*(args[0] if args else kwargs["tensors"]))
        if name == "stack" and dim % (first.dim() + 1) == 0 and not first.reads_local:
            return Stacked.of(list(args[0] if args else kwargs["tensors"]))
        args, kwargs = _aligned(func, (args, kwargs), first.dim())
    if name in ("view", "reshape") and sizes.regroups(first, args[1:], kwargs):
        return gathered(func, args, kwargs)
    if name in _SIZED:
        args = (first, *sizes.with_local_size(first, args[1:]))
        kwargs = {k: sizes.with_local_size(first, (v,))[0] for k, v in kwargs.items()}
    if name in _TURNED and (turned := transposed(name, args, kwargs)) is not None:
        return turned
    if name == "one_hot":
        args, kwargs = _with_classes(args, kwargs)
    if name == "expand_as":  # an ordinary tensor has a row for each row
        most = max(arg.dim() for arg in args)
        args = [
            a
            if isinstance(a, RowShardedTensor)
            else shard_plain_operand(a, first, most, name)
            for a in args
        ]
        x, other = (local_part(arg) for arg in args)
        if not isinstance(args[0], RowShardedTensor) or x.dim() == other.dim():
            return first.wrap(x.expand_as(other), first.rows)
    local_args, local_kwargs = tree_map(local_part, (args, kwargs))
    try:
        out = SHAPING[name](func, *local_args, **local_kwargs)
    except UnsupportedOp:
        if name == "unsqueeze" and not first.reads_local:
            return on_all_rows(func, args, kwargs)  # [1, n, ...], also of one row
        raise unsupported_op(f"{name}() that moves rows or mixes them") from None
    return first.wrap(out, first.rows)


_PRODUCTS = frozenset("matmul mm mv addmm bmm baddbmm".split())
_JOINS = frozenset("cat concat concatenate stack".split())
_SIZED = frozenset("view reshape expand broadcast_to".split())
_TURNED = frozenset("t T mT transpose swapaxes swapdims permute".split())


def _with_classes(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Adds the number of classes of the whole tensor to the arguments of one_hot."""
    classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
    if classes >= 0 or args[0].rows.mesh.local_sizes:
        return args, kwargs
    return (args[0], int(args[0].max()) + 1), {}


def on_all_rows(func: Callable, args: Any, kwargs: Any) -> Any:
    """Gathers all rows on every rank, and returns an operation's result; collective."""
    x = first_sharded(args, kwargs)
    if x.reads_local:
        raise unsupported_op(f"{base_name(func)}() over the rows")
    compare_operation(base_name(func), x, (args, kwargs))
    args, kwargs = tree_map(all_rows, (args, kwargs))
    return func(*args, **kwargs)


def gathered(func: Callable, args: Any, kwargs: Any) -> Any:
    """Runs an operation on all rows, gathered on every rank; collective.

    What has a row for each row of a whole tensor comes out row-sharded, the rest ordinary.
    """
    x = first_sharded(args, kwargs)

    def cut(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)([cut(v) for v in value])
        many = isinstance(value, Tensor) and value.dim() and x.rows.whole
        if not many or value.size(0) != x.rows.total or value.layout != torch.strided:
            return value
        return x.wrap(value[x.rows.gid_on(value.device)], x.rows)

    return cut(on_all_rows(func, args, kwargs))


def _draw(func: Callable, args: Any, kwargs: Any) -> Any:
    """Draws the random numbers of one process, and keeps own rows; keyed inside a layer."""
    x, name = first_sharded(args, kwargs), func.__name__
    rows = x.rows
    if not name.endswith(("_", "_like")):  # bernoulli(x), normal(x): by its values
        return gathered(func, args, kwargs)
    wants_gradient = kwargs.pop("requires_grad", False)
    how = {k: kwargs.pop(k) for k in _LIKE if k in kwargs}
    like = torch.empty_like(x.to_local().detach(), **how)
    if not x.reads_local:

        def draw(block: Tensor) -> Tensor:
            return func(block, *args[1:], **kwargs)

        out = random.draw_rows(draw, like, rows.count, rows.place)
    elif name not in ("rand_like", "randn_like") or not like.is_floating_point():
        raise unsupported_op(f"{name}() inside a layer")
    else:
        keyed = random.keyed_uniform if name == "rand_like" else random.keyed_normal
        out = keyed(rows.mesh.next_key(), rows.gid_on(x.device), like)
    noise = x.wrap(out, rows)
    if name.endswith("_"):
        return x.copy_(noise)
    return noise.requires_grad_() if wants_gradient else noise


_LIKE = ("dtype", "device", "layout", "memory_format")


def _compressed(func: Callable, args: Any, kwargs: Any) -> Any:
    if first_sharded(args, kwargs).rows.nodes is None:  # no ends of edges
        return gathered(func, args, kwargs)
    refuse_loader()
    raise TypeError(
        f"{advice()}make edges sparse by T.ToSparseTensor, or before pdc.partition, which "
        "takes data.adj_t: torch's own sparse tensors are whole on every rank"
    )


def _scatter(func: Callable, args: Any, kwargs: Any) -> Any:
    """Scatters within each row, or rows to the rows of an index."""
    names = ("input", "dim", "index", "src", "reduce")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    target: Tensor = given["self" if "self" in given else "input"]
    dim = given["dim"]
    if not isinstance(dim, int):
        raise unsupported_op(f"{base_name(func)}() over named dims")
    if dim % target.dim() != 0:
        return _rowwise(func, args, kwargs)
    compare_operation(base_name(func), first_sharded(args, kwargs), given)
    return gather_by_id.scattered(func, {**given, "input": target})


def _look_up(func: Callable, args: Any, kwargs: Any) -> Any:
    """Looks up rows of an ordinary or row-sharded table by a row-sharded integer index."""
    table, key, dim = args[0], args[-1], 0
    key = key[0] if isinstance(key, tuple) and len(key) == 1 else key
    if base_name(func) == "index_select":
        dim, key = (
            argument((args, kwargs), k, n) for k, n in ((1, "dim"), (2, "index"))
        )
        if isinstance(table, RowShardedTensor) and dim % table.dim() != 0:
            return _shape(func, args, kwargs)
        if isinstance(table, RowShardedTensor):
            return table[key]
    plain = isinstance(table, Tensor) and not isinstance(table, RowShardedTensor)
    if plain and isinstance(key, tuple) and isinstance(key[-1], RowShardedTensor):
        return columns_at(table, key)
    if (
        not plain
        or not isinstance(key, RowShardedTensor)
        or dim % max(table.dim(), 1) != 0
    ):
        raise unsupported_op(f"{base_name(func)}() that moves rows or mixes them")
    if key.dtype in (torch.bool, torch.uint8):  # rows of the whole, kept by a mask
        whole = shard_plain_operand(table, key, table.dim(), "x[mask]")
        return key.wrap(whole, key.rows)[key]
    return key.wrap(table[key.to_local()], key.rows)


def _assign(func: Callable, args: Any, kwargs: Any) -> None:
    """Writes to an ordinary tensor at a row-sharded index, the same on all ranks."""
    table, key, value = args
    if isinstance(table, RowShardedTensor):
        table[key] = value
        return
    compare_operation("setitem", first_sharded((key, value), {}), args)
    call_local(func, (table, tree_map(all_rows, key), all_rows(value)), {})


def _to_python(func: Callable, args: Any, kwargs: Any) -> Any:
    """Returns all rows as a numpy array or as lists, on every rank; collective."""
    return func(args[0].full_tensor(), *args[1:], **kwargs)


_SPECIAL: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(SHAPING, _shape),
    "dropout": dropout,
    "_convert_indices_from_coo_to_csr": _compressed,
    **dict.fromkeys(random.DRAWS, _draw),
    **dict.fromkeys(NEW, sizes.new_by_size),
    **dict.fromkeys(("getitem", "index_select"), _look_up),
    **dict.fromkeys(
        ("scatter", "scatter_add", "scatter_reduce", "index_add", "index_reduce"),
        _scatter,
    ),
    "setitem": _assign,
    **dict.fromkeys(("numpy", "tolist", "array"), _to_python),
    **dict.fromkeys(DECOMPOSED, decomposed),
    **dict.fromkeys(RECURRENT, recurrent),
    "requires_grad=": gradient_scale.requires_grad,
    "detach_": gradient_scale.detach_,
    "backward": gradient_scale.backward,
    "register_hook": gradient_scale.register_hook,
    **dict.fromkeys(("grad", "grad="), gradient_scale.grad),
    **dict.fromkeys(("equal", "allclose"), reductions.compare_all),
    "batch_norm": reductions.apply_batch_norm,
}

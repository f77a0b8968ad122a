"""Decomposes torch functions into functions that `dispatch.py` supports.

Each takes the arguments of the function that it implements, of which some are row-sharded, and
calls torch functions that the tables classify. Results equal torch's up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_distcomm.comm import autograd
from pyg_distcomm.tensor import gather_by_id
from pyg_distcomm.tensor.op_tables import base_name
from pyg_distcomm.tensor.row_sharded import (
    RowShardedTensor,
    all_rows,
    compare_operation,
    shard_plain_operand,
    unsupported_op,
)


def decomposed(func: Callable, args: Any, kwargs: Any) -> Any:
    """Runs a function of `DECOMPOSED`; in place if `func` is."""
    out = DECOMPOSED[base_name(func)](*args, **kwargs)
    name = func.__name__
    return args[0].copy_(out) if name.endswith("_") else out


def gather_from_plain(
    name: str,
    input: Any = None,
    dim: Any = None,
    index: Any = None,
    *rest: Any,
    **kwargs: Any,
) -> Any:
    """Gathers from an ordinary tensor's rows at a row-sharded index."""
    rows = isinstance(index, RowShardedTensor) and isinstance(dim, int)
    if name != "gather" or not rows or dim % input.dim() != 0:
        raise unsupported_op(f"{name}() of an ordinary tensor by a row-sharded one")
    return index.wrap(torch.gather(input, 0, index.to_local(), **kwargs), index.rows)


def _all_rows(x: Any, name: str) -> Any:
    """Gathers all rows of a row-sharded tensor on every rank; other values unchanged."""
    if not isinstance(x, RowShardedTensor):
        return x
    if x.reads_local:
        raise unsupported_op(f"{name}() over the rows")
    compare_operation(name, x, (x,))
    return all_rows(x)


# Joins and repeats -------------------------------------------------------------------


def _vstack(tensors: Any) -> Any:
    return torch.cat([torch.atleast_2d(t) if t.dim() < 2 else t for t in tensors], 0)


def _hstack(tensors: Any) -> Any:
    return torch.cat(list(tensors), 0 if tensors[0].dim() == 1 else 1)


def _dstack(tensors: Any) -> Any:
    if tensors[0].dim() < 2:
        raise unsupported_op("dstack() of row-sharded vectors")
    return torch.cat([t.unsqueeze(2) if t.dim() == 2 else t for t in tensors], 2)


def _column_stack(tensors: Any) -> Any:
    return torch.cat([t.unsqueeze(1) if t.dim() == 1 else t for t in tensors], 1)


def _repeat_interleave(
    input: Tensor, repeats: Any = None, dim: int | None = None, **kwargs: Any
) -> Any:
    x = input
    if not isinstance(x, RowShardedTensor) or isinstance(repeats, RowShardedTensor):
        raise unsupported_op("repeat_interleave() by row-sharded numbers")
    if dim is None and x.dim() > 1:
        raise unsupported_op("repeat_interleave() without dim")
    dim = (dim or 0) % x.dim()
    size = x.size(dim) if dim else x.rows.count
    index = torch.arange(size).repeat_interleave(torch.as_tensor(repeats).cpu())
    if not dim:
        return x[index]
    return x.index_select(dim, index.to(x.device))


def _repeat(x: RowShardedTensor, *sizes: Any) -> Any:
    """Implements repeat: concatenates copies of all rows, and repeats within each row."""
    times = list(sizes[0] if len(sizes) == 1 and type(sizes[0]) is not int else sizes)
    copies, *rest = times
    if len(times) != x.dim() or copies < 1 or (copies > 1 and x.reads_local):
        raise unsupported_op("repeat() that moves rows or mixes them")
    one = x.wrap(x.to_local().repeat(1, *rest), x.rows)
    return one if copies == 1 else torch.cat([one] * copies)


def _movedim(input: Tensor, source: Any, destination: Any) -> Any:
    pairs = [[d] if isinstance(d, int) else list(d) for d in (source, destination)]
    source, destination = ([d % input.dim() for d in dims] for dims in pairs)
    order = [d for d in range(input.dim()) if d not in source]
    for place, dim in sorted(zip(destination, source, strict=True)):
        order.insert(place, dim)
    return input.permute(order)


# Products and sums over rows ---------------------------------------------------------


def _outer(input: Tensor, vec2: Tensor) -> Any:
    if not isinstance(input, RowShardedTensor):
        raise unsupported_op("outer() with columns for row-sharded values")
    return input.unsqueeze(1) * _all_rows(vec2, "outer").unsqueeze(0)


def _dot(input: Tensor, other: Tensor) -> Any:
    if input.dim() != 1 or other.dim() != 1:
        raise unsupported_op("inner() of more than vectors")
    return (input * other).sum()


def _addmv(input: Any, mat: Any, vec: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return beta * input + alpha * (mat @ vec)


def _tensordot(a: Any, b: Any, dims: Any = 2, out: None = None) -> Any:
    left, right = ([dims], [dims]) if isinstance(dims, int) else dims
    pair = [d if isinstance(d, int) else d[0] for d in (left, right)]
    if a.dim() != 2 or b.dim() != 2 or isinstance(dims, int):
        raise unsupported_op("tensordot() that moves rows or mixes them")
    if [d % 2 for d in pair] == [0, 0]:
        return a.t() @ b
    return a @ (b if pair[1] % 2 == 0 else b.t())


def _cdist(x1: Tensor, x2: Tensor, p: float = 2.0, **kwargs: Any) -> Any:
    """Computes the distances of each row to all rows of x2, which are gathered.

    Price: all rows of a row-sharded `x2`, (P-1)/P n f words.
    """
    if not isinstance(x1, RowShardedTensor) or x1.dim() != 2:
        raise unsupported_op("cdist() of ordinary rows to row-sharded ones")
    x2 = _all_rows(x2, "cdist")
    return x1.wrap(torch.cdist(x1.to_local(), x2, p, **kwargs), x1.rows)


def _var_mean(
    input: Tensor,
    dim: Any = None,
    unbiased: Any = None,
    keepdim: bool = False,
    **how: Any,
) -> Any:
    if isinstance(dim, bool):  # (input, unbiased)
        dim, unbiased = None, dim
    if unbiased is not None:
        how["correction"] = int(unbiased)
    dim = list(range(input.dim())) if dim is None else dim
    spread = torch.var(input, dim=dim, keepdim=keepdim, **how)
    return spread, input.mean(dim=dim, keepdim=keepdim)


def _std_mean(*args: Any, **kwargs: Any) -> Any:
    spread, mean = _var_mean(*args, **kwargs)
    return spread.sqrt(), mean


def _einsum(equation: Any, *operands: Any) -> Any:
    """Contracts dims within rows, or over the rows of all ranks.

    Rows have one letter, the first of each row-sharded operand: first in the result, or nowhere
    there.
    """
    if len(operands) == 1 and not isinstance(operands[0], Tensor):
        operands = tuple(operands[0])
    inputs, _, out = str(equation).replace(" ", "").partition("->")
    terms = inputs.split(",")
    like = next(x for x in operands if isinstance(x, RowShardedTensor))
    row = next(
        t[:1]
        for t, x in zip(terms, operands, strict=True)
        if isinstance(x, RowShardedTensor)
    )
    refused = unsupported_op("einsum() that moves rows or mixes them")
    if not row.isalpha() or row in out[1:] or "->" not in equation:
        raise refused
    local: list[Tensor] = []
    for term, x in zip(terms, operands, strict=True):
        if not isinstance(x, RowShardedTensor):
            if row not in term:
                local.append(x)
                continue
            dim = term.index(row)
            if "." in term or like.reads_local:
                raise refused
            rows = shard_plain_operand(x.movedim(dim, 0), like, x.dim(), "einsum")
            local.append(rows.movedim(0, dim))
        elif term[0] != row or row in term[1:]:
            raise refused
        else:
            found = gather_by_id.shard_as(x, like.rows)
            if found is None:
                raise TypeError(f"einsum() got rows of {like.rows} and of {x.rows}")
            local.append(found)
    if out[:1] == row:
        return like.wrap(torch.einsum(equation, *local), like.rows)
    if like.reads_local:
        raise refused
    compare_operation("einsum", like, operands)
    part = torch.einsum(equation, *local)
    return autograd.all_reduce(part, like.rows.mesh.world)


# Rows by id --------------------------------------------------------------------------


def _index_fill(input: Tensor, dim: int, index: Any, value: Any) -> Any:
    out = input.clone()
    if dim % out.dim():
        out[(*[slice(None)] * (dim % out.dim()), index)] = value
    else:
        out[index] = value
    return out


def _index_copy(input: Tensor, dim: int, index: Any, source: Any) -> Any:
    return _index_fill(input, dim, index, source)


def _index_put(
    input: Tensor, indices: Any, values: Any, accumulate: bool = False
) -> Any:
    if accumulate:
        if len(indices) != 1 or not isinstance(values, Tensor) or not values.dim():
            raise unsupported_op("index_put(accumulate=True) other than of rows")
        return input.index_add(0, indices[0], values)
    out = input.clone()
    out[indices[0] if len(indices) == 1 else tuple(indices)] = values
    return out


# The operators of torch_scatter ------------------------------------------------------


def _make_scatter(name: str) -> Callable[..., Any]:
    """Makes the operator of `torch_scatter` with this name; collective over the rows."""
    op = name.rpartition("_")[2]

    def run(
        src: Any, index: Any, dim: int = -1, out: None = None, dim_size: Any = None
    ) -> Any:
        dim = dim % src.dim()
        if out is not None and (
            dim or op == "mul" or isinstance(out, RowShardedTensor)
        ):
            raise unsupported_op(f"torch_scatter.{name}(out=...)")
        if dim == 0:
            groups = dim_size if out is None else out.size(0)
            found = _grouped(name, op, *_rows_and_ids(src, index, name), groups)
            return found if out is None else _keep_more_extreme(out, op, *found, src)
        if not isinstance(src, RowShardedTensor):
            raise unsupported_op(f"torch_scatter.{name}() of an ordinary tensor")
        if dim_size is None:
            dim_size = int(index.max()) + 1 if index.numel() else 0
        if isinstance(index, RowShardedTensor):
            index = gather_by_id.shard_as(index, src.rows)
        elif index.dim() == src.dim():
            index = shard_plain_operand(index, src, src.dim(), name)
        if index is None:
            raise unsupported_op(
                f"torch_scatter.{name}() of rows that are cut otherwise"
            )
        operator = getattr(torch.ops.torch_scatter, name)
        found = operator(src.to_local(), index, dim, None, dim_size)
        if isinstance(found, tuple):
            return tuple(src.wrap(part, src.rows) for part in found)
        return src.wrap(found, src.rows)

    return run


def _make_segment_coo(op: str) -> Callable[..., Any]:
    """Makes the reduction by sorted ids, `segment_..._coo` of `torch_scatter`."""
    name = f"segment_{op}_coo"

    def run(src: Any, index: Any, out: None = None, dim_size: Any = None) -> Any:
        if out is not None or index.dim() != 1:
            raise unsupported_op(f"torch_scatter.{name}() other than of rows")
        return _grouped(name, op, *_rows_and_ids(src, index, name), dim_size)

    return run


def _make_segment_csr(op: str) -> Callable[..., Any]:
    """Makes the reduction by ranges of rows, `segment_..._csr` of `torch_scatter`."""
    name = f"segment_{op}_csr"

    def run(src: Any, indptr: Any, out: None = None) -> Any:
        if not isinstance(src, RowShardedTensor) or src.reads_local:
            raise unsupported_op(f"torch_scatter.{name}() by row-sharded pointers")
        if out is not None or indptr.dim() != 1 or isinstance(indptr, RowShardedTensor):
            raise unsupported_op(f"torch_scatter.{name}() other than of ranges of rows")
        groups = indptr.numel() - 1
        places = src.rows.place_on(indptr.device)
        local = torch.searchsorted(indptr, places, right=True) - 1
        local = local.where(local >= 0, groups)  # of no group, as behind the last
        ids = src.wrap(local.to(src.device), src.rows)
        found = _grouped(name, op, src, ids, groups + 1)
        return tuple(f[:-1] for f in found) if type(found) is tuple else found[:-1]

    return run


def _gather_coo(src: Any, index: Any, out: None = None) -> Any:
    if index.dim() != 1 or out is not None:
        raise unsupported_op("torch_scatter.gather_coo() other than of rows")
    return src[index]


def _rows_and_ids(src: Any, index: Any, name: str) -> tuple[Any, Any]:
    """Returns rows and ids, both row-sharded."""
    if not isinstance(src, RowShardedTensor):
        local = shard_plain_operand(src, index, src.dim(), name)
        return index.wrap(local, index.rows), index
    if not isinstance(index, RowShardedTensor):
        return src, src.wrap(
            shard_plain_operand(index, src, index.dim(), name), src.rows
        )
    return src, index


def _grouped(name: str, op: str, src: Any, ids: Any, groups: Any) -> Any:
    """Reduces rows by group, with the ids of extreme rows; empty groups give 0.

        sum, mean    out_g = sum of x_v over the rows v of g, and over their number
        mul          out_g = product of x_v, 1 without rows
        max, min     out_g = x_a and a, the first row of g where it is extreme

    Price: an all-reduce of the groups' rows, three for an extreme; all rows for a product.
    """
    if src.reads_local or ids.reads_local:
        raise unsupported_op(f"torch_scatter.{name}() inside a layer")
    ids = ids.view(-1, *[1] * (src.dim() - ids.dim())) if ids.dim() < src.dim() else ids
    count = src.rows.count
    if groups is None:
        groups = int(ids.max()) + 1 if count else 0
    ids = ids.expand_as(src)
    shape = (int(groups), *src.shape[1:])
    zeros = torch.zeros(shape, dtype=src.dtype, device=src.device)
    if op in ("sum", "add"):
        return zeros.scatter_add(0, ids, src)
    if op == "mul":
        ones = torch.ones_like(zeros)
        return ones.scatter_reduce(0, ids, src, "prod", include_self=True)
    if op == "mean":
        sums = zeros.scatter_add(0, ids, src)
        numbers = zeros.scatter_add(0, ids, torch.ones_like(src)).clamp(min=1)
        if src.is_floating_point():
            return sums / numbers
        whole = "trunc" if name.startswith("segment") else "floor"
        return sums.div(numbers, rounding_mode=whole)
    with torch.no_grad():
        values = src.detach()
        facts: Any = torch.iinfo
        if src.is_floating_point():  # what is not a number is never extreme
            worst, facts = float("-inf" if op == "max" else "inf"), torch.finfo
            values = torch.where(values.isnan(), worst, values)
        start = facts(src.dtype).min if op == "max" else facts(src.dtype).max
        beyond = (values > start) if op == "max" else (values < start)
        best = zeros.scatter_reduce(0, ids, values, f"a{op}", include_self=False)
        places = src.rows.place_on(src.device).view(-1, *[1] * (src.dim() - 1))
        places = src.wrap(places.expand_as(src.to_local()), src.rows)
        hit = beyond & (values == best.gather(0, ids))
        places = torch.where(hit, places, count)
        first = torch.full(shape, count, dtype=torch.int64, device=src.device)
        first = first.scatter_reduce(0, ids, places, "amin")
        chosen = hit & (places == first.gather(0, ids))
    return zeros.scatter_add(0, ids, torch.where(chosen, src, 0)), first


def _keep_more_extreme(
    out: Tensor, op: str, value: Tensor, first: Tensor, src: Any
) -> Any:
    """Writes the extreme rows that exceed the values of `out`."""
    count = src.rows.count if isinstance(src, RowShardedTensor) else src.size(0)
    better = (value > out) if op == "max" else (value < out)
    better = better & (first < count)
    return out.copy_(torch.where(better, value, out)), first.where(better, count)


# Rows as a batch ---------------------------------------------------------------------


def _pad(
    input: Tensor, pad: Any, mode: str = "constant", value: float | None = None
) -> Any:
    dims = input.dim() - (mode != "constant" and input.dim() > 2)
    if not isinstance(input, RowShardedTensor) or len(pad) // 2 >= dims:
        raise unsupported_op("pad() of the rows")
    return input.wrap(F.pad(input.to_local(), pad, mode, value), input.rows)


def _gumbel_softmax(
    logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 0, dim: int = -1
) -> Any:
    noise = -torch.empty_like(logits).exponential_().log()
    soft = ((logits + noise) / tau).softmax(dim)
    if not hard:
        return soft
    best = soft.max(dim, keepdim=True)[1]
    return torch.zeros_like(logits).scatter_(dim, best, 1.0) - soft.detach() + soft


def _rrelu(
    input: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Any:
    if training:
        raise unsupported_op("rrelu() in training")
    return F.leaky_relu(input, (lower + upper) / 2, inplace)


def _alpha_dropout(
    input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Any:
    """Implements alpha dropout, which keeps mean and variance.

    Masks are keyed by row id, as dropout's.
    """
    if not training or p == 0:
        return input
    low = -1.7580993408473766
    scale = ((1 - p) * (1 + p * low**2)) ** -0.5
    keep = F.dropout(torch.ones_like(input), p) * (1 - p)
    out = scale * (input * keep + low * (1 - keep)) - scale * p * low
    return input.copy_(out) if inplace else out


def _make_batched(name: str) -> Callable[..., Any]:
    """Makes a function for which rows are the batch dim."""
    function, dims = getattr(F, name), 2 + int(name[-2])

    def run(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        rest = (*args, *kwargs.values())
        sharded = any(isinstance(value, RowShardedTensor) for value in rest)
        if not isinstance(input, RowShardedTensor) or input.dim() != dims or sharded:
            raise unsupported_op(f"{name}() with rows that are not its batch")
        out = function(input.to_local(), *args, **kwargs)
        if isinstance(out, tuple):  # with the places of what is largest
            return tuple(input.wrap(part, input.rows) for part in out)
        return input.wrap(out, input.rows)

    return run


def _attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs attention within each row, over keys of the same row `[n, ..., steps, C]`."""
    parts = query, key, value
    if not all(isinstance(t, RowShardedTensor) and t.dim() > 2 for t in parts):
        raise unsupported_op("attention between rows")
    if any(args[1:2]) or kwargs.get("dropout_p"):
        raise unsupported_op("attention with dropout of its weights")
    mask = args[0] if args else kwargs.get("attn_mask")
    if mask is not None and (isinstance(mask, RowShardedTensor) or mask.dim() > 2):
        raise unsupported_op("attention with a mask of each row")
    local: list[Any] = [gather_by_id.shard_as(t, query.rows) for t in parts]
    if any(t is None for t in local):
        raise unsupported_op("attention of rows that are cut differently")
    out = F.scaled_dot_product_attention(*local, *args, **kwargs)
    return query.wrap(out, query.rows)


_BATCHED = """conv conv_transpose max_pool avg_pool lp_pool adaptive_max_pool
adaptive_avg_pool""".split()


def _sparse_mm(mat1: Tensor, mat2: Tensor, reduce: str = "sum") -> Any:
    if reduce != "sum":
        raise unsupported_op(f"sparse.mm(reduce={reduce!r})")
    return mat1 @ mat2


DECOMPOSED: dict[str, Callable[..., Any]] = {
    "vstack": _vstack,
    "row_stack": _vstack,
    "hstack": _hstack,
    "dstack": _dstack,
    "column_stack": _column_stack,
    "repeat_interleave": _repeat_interleave,
    "movedim": _movedim,
    "moveaxis": _movedim,
    "outer": _outer,
    "ger": _outer,
    "dot": _dot,
    "vdot": _dot,
    "inner": _dot,
    "addmv": _addmv,
    "tensordot": _tensordot,
    "_sparse_mm": _sparse_mm,
    "cdist": _cdist,
    "var_mean": _var_mean,
    "std_mean": _std_mean,
    "einsum": _einsum,
    "index_fill": _index_fill,
    "index_copy": _index_copy,
    "index_put": _index_put,
    "pad": _pad,
    "gumbel_softmax": _gumbel_softmax,
    "rrelu": _rrelu,
    "alpha_dropout": _alpha_dropout,
    "scaled_dot_product_attention": _attention,
    "repeat": _repeat,
    "tile": _repeat,
    **{
        name: _make_scatter(name)
        for name in ("scatter_max", "scatter_min", "scatter_mul")
    },
    **{
        f"segment_{op}_coo": _make_segment_coo(op)
        for op in ("sum", "mean", "max", "min")
    },
    **{
        f"segment_{op}_csr": _make_segment_csr(op)
        for op in ("sum", "mean", "max", "min")
    },
    "gather_coo": _gather_coo,
    "index_sort": lambda input, max_value=None: input.sort(stable=True),  # of pyg-lib
    **{
        name: _make_batched(name)
        for name in (f"{kind}{dims}d" for kind in _BATCHED for dims in (1, 2, 3))
        if hasattr(F, name)
    },
}

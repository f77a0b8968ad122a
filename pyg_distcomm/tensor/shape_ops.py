"""Implements shape changes within rows, and raises for those that would move rows.

Each function takes plain local tensors and returns one whose dim 0 still is the rows,
or raises `UnsupportedOp`.

The transpose of a row-sharded matrix is sharded by columns, and supported in products.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_distcomm.comm import autograd
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.tensor.op_tables import FACTS, ROWWISE, SIZES, WEIGHTED, base_name
from pyg_distcomm.tensor.row_sharded import (
    RowShardedTensor,
    all_rows,
    compare_operation,
    eager,
    replicate_operands,
    shard_plain_operand,
    tree_map,
    unsupported_op,
)
from pyg_distcomm.tensor.sizes import size_from_shape


class UnsupportedOp(Exception):
    """A shape change that would move rows."""


def view(func: Callable, x: Tensor, *shape: Any, **kwargs: Any) -> Tensor:
    """Views each row in another shape, as in `x.view(-1, heads, channels)`."""
    if len(shape) == 1 and isinstance(shape[0], torch.dtype):
        raise UnsupportedOp
    sizes = list(
        shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    )
    sizes = sizes or list(kwargs.get("shape", kwargs.get("size", ())))
    width, rest = math.prod(x.shape[1:]), sizes[1:]
    if not sizes:
        raise UnsupportedOp
    if -1 in rest:
        known = -math.prod(rest)
        if known <= 0 or width % known:
            raise UnsupportedOp
        rest[rest.index(-1)] = width // known
    if sizes[0] not in (-1, x.size(0)) or math.prod(rest) != width:
        raise UnsupportedOp
    return x.reshape(x.size(0), *rest)


def view_as(func: Callable, x: Tensor, other: Tensor) -> Tensor:
    """Views each row in the shape of another tensor's rows."""
    return view(func, x, *other.shape)


def flatten(func: Callable, x: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """Flattens dims of each row; includes the row dim if each row has one number."""
    if start_dim % x.dim() == 0 and math.prod(x.shape[1 : end_dim % x.dim() + 1]) != 1:
        raise UnsupportedOp
    return x.flatten(start_dim, end_dim) if x.dim() > 1 else x


def transpose(func: Callable, x: Tensor, dim0: int = 0, dim1: int = 1) -> Tensor:
    """Exchanges two dims of each row."""
    if func.__name__ in ("mT", "__get__") and x.dim() > 2:
        return x.mT
    if 0 in (dim0 % x.dim(), dim1 % x.dim()) and dim0 % x.dim() != dim1 % x.dim():
        raise UnsupportedOp
    return x.transpose(dim0, dim1)


def permute(func: Callable, x: Tensor, *dims: Any, **kwargs: Any) -> Tensor:
    """Permutes the dims of each row."""
    order = list(dims[0] if len(dims) == 1 else dims) or list(kwargs["dims"])
    if order[0] % x.dim() != 0:
        raise UnsupportedOp
    return x.permute(order)


def squeeze(func: Callable, x: Tensor, dim: Any = None) -> Tensor:
    """Drops dims of size one, never the rows."""
    if dim is None:
        return x.reshape([x.size(0)] + [n for n in x.shape[1:] if n != 1])
    dims = [dim] if isinstance(dim, int) else list(dim)
    if any(d % x.dim() == 0 for d in dims):
        raise UnsupportedOp
    return x.squeeze(dims)


def unsqueeze(func: Callable, x: Tensor, dim: int) -> Tensor:
    """Adds a dim to each row."""
    if dim % (x.dim() + 1) == 0:
        raise UnsupportedOp
    return x.unsqueeze(dim)


def expand(func: Callable, x: Tensor, *shape: Any) -> Tensor:
    """Repeats dims of size one of each row."""
    sizes = list(
        shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    )
    if len(sizes) != x.dim() or sizes[0] not in (-1, x.size(0)):
        raise UnsupportedOp
    return x.expand([-1, *sizes[1:]])


def expand_as(func: Callable, x: Tensor, other: Tensor) -> Tensor:
    """Repeats dims of size one of each row, to the shape of another tensor."""
    return expand(func, x, *other.shape)


def cat(func: Callable, tensors: Any, dim: int = 0, **kwargs: Any) -> Tensor:
    """Joins the rows of several tensors side by side."""
    dim = kwargs.get("axis", dim)
    tensors = list(tensors)
    if dim % tensors[0].dim() == 0:
        raise UnsupportedOp
    if len({t.size(0) for t in tensors}) > 1:
        raise UnsupportedOp
    return torch.cat(tensors, dim)


def stack(func: Callable, tensors: Any, dim: int = 0) -> Tensor:
    """Stacks the rows of several tensors along a new dim of each row."""
    tensors = list(tensors)
    if dim % (tensors[0].dim() + 1) == 0:
        raise UnsupportedOp
    return torch.stack(tensors, dim)


def mm(func: Callable, x: Tensor, w: Tensor) -> Tensor:
    """Multiplies each row by a replicated matrix or vector."""
    if x.dim() < 2:
        raise UnsupportedOp
    return x @ w


def addmm(func: Callable, bias: Tensor, x: Tensor, w: Tensor, **how: float) -> Tensor:
    """Multiplies each row by a replicated matrix and adds a replicated bias."""
    return torch.addmm(bias, x, w, **how)  # type: ignore[call-overload]


def within_rows(func: Callable, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Runs operations within each row, such as products of its matrices."""
    return func(x, *args, **kwargs)  # type: ignore[no-any-return]


def layer_norm(
    func: Callable, x: Tensor, normalized_shape: Any, *args: Any, **kwargs: Any
) -> Tensor:
    """Normalises the last dims of each row."""
    if len(normalized_shape) >= x.dim():
        raise UnsupportedOp
    return func(x, normalized_shape, *args, **kwargs)  # type: ignore[no-any-return]


def one_hot(func: Callable, x: Tensor, num_classes: int = -1) -> Tensor:
    """Encodes each row's class; the number of classes must be given."""
    if num_classes < 0:
        raise UnsupportedOp
    return torch.nn.functional.one_hot(x, num_classes)


def index_select(func: Callable, x: Tensor, dim: int, index: Tensor) -> Tensor:
    """Selects columns."""
    if dim % x.dim() == 0:
        raise UnsupportedOp
    return x.index_select(dim, index)


SHAPING: dict[str, Callable[..., Tensor]] = {
    **dict.fromkeys(("view", "reshape"), view),
    **dict.fromkeys(("view_as", "reshape_as"), view_as),
    **dict.fromkeys(("flatten", "ravel"), flatten),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims", "t", "T", "mT"), transpose),
    "permute": permute,
    "squeeze": squeeze,
    "unsqueeze": unsqueeze,
    **dict.fromkeys(("expand", "broadcast_to"), expand),
    "expand_as": expand_as,
    **dict.fromkeys(("cat", "concat", "concatenate"), cat),
    "stack": stack,
    **dict.fromkeys(("matmul", "mm", "mv", "bmm"), mm),
    **dict.fromkeys(("layer_norm", "rms_norm"), layer_norm),
    "addmm": addmm,
    **dict.fromkeys(("baddbmm", "group_norm"), within_rows),
    "one_hot": one_hot,
    "index_select": index_select,
}


class _RowsSecond(torch.Tensor):
    """A row-sharded tensor with its rows in the second dim (abstract)."""

    x: RowShardedTensor  # its rows in front
    _spread = True

    def full_tensor(self) -> Tensor:
        """Returns the whole tensor on every rank; collective."""
        return self.x.full_tensor().transpose(0, 1)  # type: ignore[no-any-return, attr-defined]

    def to_local(self) -> Tensor:
        """Returns this rank's part, differentiably."""
        return self.x.to_local().transpose(0, 1)


@eager
class Transposed(_RowsSecond):
    """`x.t()` of a row-sharded `x` `[n, f]`: `[f, n]`, sharded by columns.

    `x.t() @ y` sums over the rows of all ranks and is an ordinary tensor. `y @ x.t()` is
    row-sharded, `[n, n]`: all rows of x come here, (P-1)/P n f words, and so they do for
    `torch.cov(x.t())`, of columns. `.t()` gives x back. Everything else sees a stack of the
    columns: a `Stacked`.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs products and attribute reads; other functions on a stack of the columns."""
        name, kwargs = base_name(func), kwargs or {}
        if name in _PRODUCTS:
            found = multiplied(name, args, kwargs)
            if found is None:
                raise unsupported_op(f"{name}() of a transposed row-sharded matrix")
            return found
        if name in ("t", "T", "mT", "transpose", "permute"):
            return args[0].x
        if name in ("cov", "corrcoef") and isinstance(args[0], Transposed):
            compare_operation(name, args[0].x, (args, kwargs))
            whole = all_rows(args[0].x)
            return func(whole.t(), *args[1:], **kwargs)
        return Stacked.__torch_function__(
            func, types, *tree_map(_stack, (args, kwargs))
        )

    def __iter__(self) -> Any:
        return iter(self.x.unbind(1))


def _stack(value: Any) -> Any:
    return Stacked.over(value.x) if isinstance(value, Transposed) else value


_PRODUCTS = frozenset(("matmul", "mm", "rmatmul", "mv"))


def _attention(func: Callable, args: Any, kwargs: Any) -> Any:
    """Implements multi-head attention among the steps of each row."""
    like = next(a.x for a in args[:3] if isinstance(a, Stacked))
    args, kwargs = replicate_operands(like, func.__name__, args, kwargs)  # weights, too
    given = inspect.signature(func).bind(*args, **kwargs).arguments
    if given["dropout_p"] and given.get("training", True):
        raise unsupported_op("attention with dropout of its weights")
    parts = [given[k] for k in ("query", "key", "value")]
    padding, mask = given.get("key_padding_mask"), given.get("attn_mask")
    if mask is not None and mask.dim() > 2:
        raise unsupported_op("attention with a mask of each row")
    if isinstance(padding, Tensor) and not isinstance(padding, RowShardedTensor):
        padding = like.wrap(
            shard_plain_operand(padding, like, 2, "attention"), like.rows
        )
    count = len(like.rows)

    def local(x: RowShardedTensor) -> Tensor:  # torch's refuses no rows
        rows = x.to_local()
        return rows if count else torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])

    for k, part in zip(("query", "key", "value"), parts, strict=True):
        if not isinstance(part, Stacked) or part.x.rows is not like.rows:
            raise unsupported_op("attention of rows to others, or cut differently,")
        given[k] = local(part.x).transpose(0, 1)
    given["key_padding_mask"] = None if padding is None else local(padding)
    out, weights = func(**given)
    wrapped = Stacked.over(like.wrap(out.transpose(0, 1)[:count], like.rows))
    return wrapped, weights if weights is None else like.wrap(
        weights[:count], like.rows
    )


@eager
class Stacked(_RowsSecond):
    """`torch.stack([x, y, ...])` of row-sharded tensors `[n, f]`: `[k, n, f]`.

    Each of the k tensors is row-sharded, as are reductions over dim 0 `[n, f]`, which
    `HeteroConv` makes; those over dim 1 are equal on all ranks. What works row by row
    returns a stack again, and dims 0 and 1 exchanged are rows `[n, k, f]`. It is also what
    `torch.nn.MultiheadAttention` takes, among k steps of each row. Everything else is
    refused; stack along dim 1 for that.
    """

    @staticmethod
    def of(tensors: list[Any]) -> Stacked:
        """Stacks tensors with the same sharding."""
        return Stacked.over(torch.stack(tensors, dim=1))

    @staticmethod
    def over(x: Any) -> Stacked:
        """Returns the stack with given rows `[n, k, ...]`."""
        with torch._C.DisableTorchFunctionSubclass():
            out = x.as_subclass(torch.Tensor).transpose(0, 1).as_subclass(Stacked)
        out.x = x
        return out

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs reductions and row-wise functions, and raises for others."""
        name, kwargs = base_name(func), dict(kwargs or {})
        whole = args[0] if args and isinstance(args[0], Stacked) else None
        found = None
        if name in FACTS and name not in SIZES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if whole is not None and name in _OVER_STACKS:
            found = whole._reduced(name, args[1:], kwargs)
        elif whole is not None and name == "unbind":
            found = None if any((*args[1:], *kwargs.values())) else whole.x.unbind(1)
        elif whole is not None and name in _ALONG:
            found = whole._along(name, args[1:], kwargs)
        elif whole is not None and name == "getitem" and type(args[1]) is int:
            found = whole.x[:, args[1]]
        elif whole is not None and name in _SWAPS:
            found = whole.x if _SWAPS[name](*args[1:], **kwargs) else None
        elif whole is not None and name in ("numpy", "tolist"):
            found = getattr(whole.full_tensor(), name)()
        elif name == "multi_head_attention_forward":
            return _attention(func, args, kwargs)
        elif name in (*_PRODUCTS, "cov", "corrcoef"):
            flat = [
                a.x.t() if isinstance(a, Stacked) and a.x.dim() == 2 else a
                for a in args
            ]
            if not any(isinstance(a, Stacked) for a in flat):
                return func(*flat, **kwargs)
            right = args[-1]
            # after each tensor of a stack
            if type(right) is Tensor and right.dim() == 2:
                found = Stacked.over(args[0].x @ right)
        elif whole is not None and name in SIZES:
            n, k, *rest = whole.x.shape
            found = size_from_shape(name, (k, n, *rest), whole.x, args, kwargs)
        elif name in ROWWISE or name == "dropout":
            found = _row_by_row(name, func, args, kwargs)
        if found is None:
            raise unsupported_op(
                f"{name}() of row-sharded tensors stacked along dim 0, as of their transpose "
                "(stack along dim 1, and rows stay in front),"
            )
        return found

    def _reduced(self, name: str, args: Any, kwargs: Any) -> Any:
        """Returns a reduction over one dim, or None."""
        dims = kwargs.pop("dim", kwargs.pop("axis", args[0] if args else None))
        if isinstance(dims, (list, tuple)) and len(dims) == 1:
            dims = dims[0]
        reduce = getattr(torch, name)
        if dims is None and not args and name not in ("logsumexp", "argmax", "argmin"):
            return reduce(self.x, **kwargs)
        if kwargs.get("keepdim") or len(args) > 1 or type(dims) is not int:
            return None
        dim = dims % self.x.dim()
        if dim < 2:  # rows are in front here
            return reduce(self.x, dim=1 - dim, **kwargs)
        out = reduce(self.x, dim=dim, **kwargs)
        return Stacked.over(out) if isinstance(out, Tensor) else None

    def _along(self, name: str, args: Any, kwargs: Any) -> Any:
        """Returns the result of a function along one dim that keeps the shape, or None."""
        given = inspect.signature(_ALONG[name]).bind(self.x, *args, **kwargs)
        given.apply_defaults()
        dim = given.arguments["dim"]
        if type(dim) is not int or (len(args) > 1 and name != "normalize"):
            return None
        dim = dim % self.x.dim()
        given.arguments["dim"] = 1 - dim if dim < 2 else dim  # rows are in front here
        return Stacked.over(_ALONG[name](*given.args, **given.kwargs))

    def __iter__(self) -> Any:
        return iter(self.x.unbind(1))


_OVER_STACKS = frozenset(
    "sum mean max min amax amin prod logsumexp std var any all argmax argmin".split()
)
# whether it exchanges the first two dims
_SWAPS: dict[str, Callable[..., bool]] = {
    **dict.fromkeys(("t", "T"), lambda: True),
    **dict.fromkeys(
        ("transpose", "swapaxes"), lambda dim0, dim1: {dim0, dim1} == {0, 1}
    ),
    "permute": lambda *dims: dims == (1, 0, *range(2, len(dims))),
}
_ALONG = {f.__name__: f for f in (F.softmax, F.log_softmax, F.normalize)}


def _row_by_row(name: str, func: Callable, args: Any, kwargs: Any) -> Any:
    """Returns the result of a row-wise function of stacks and broadcast operands, or None."""
    stacks = [v for v in (*args, *kwargs.values()) if isinstance(v, Stacked)]
    dims = {stack.x.dim() for stack in stacks}
    written = func.__name__.endswith("_") and not func.__name__.startswith("_")
    if written or (name.startswith("i") and name[1:] in ROWWISE):
        return None
    if len(dims) != 1 or (name in WEIGHTED and not (name == "linear" and dims == {3})):
        return None
    if name in WEIGHTED:
        if not args or len(stacks) != 1 or stacks[0] is not args[0]:
            return None
        return Stacked.over(func(args[0].x, *args[1:], **kwargs))
    (most,) = dims

    def rows_first(value: Any) -> Any:
        """Moves the rows of a value to the first dim."""
        if isinstance(value, Stacked):
            return value.x
        if isinstance(value, RowShardedTensor):
            if value.dim() != most - 1:
                raise unsupported_op(
                    f"{name}() of stacked tensors and {value.dim()}-d rows"
                )
            return value.unsqueeze(1)
        if not isinstance(value, Tensor) or value.dim() < most - 1:
            return value
        if value.dim() > most or value.size(1 - most) != 1:
            raise unsupported_op(f"{name}() of stacked tensors and plain rows of each")
        return value.transpose(0, 1) if value.dim() == most else value

    args = [rows_first(value) for value in args]
    found = func(*args, **{k: rows_first(value) for k, value in kwargs.items()})
    return Stacked.over(found) if isinstance(found, RowShardedTensor) else found


def transposed(name: str, args: Any, kwargs: Any) -> Any:
    """Returns the transpose of a row-sharded matrix, or None if rows stay the first dim."""
    x = args[0]
    if not isinstance(x, RowShardedTensor):
        return None
    if x.dim() == 1 and name in ("t", "T"):
        return x
    dims = list(args[1:]) or list(kwargs.values())
    if dims and isinstance(dims[0], (list, tuple)):
        dims = list(dims[0])
    swaps = name in ("t", "T", "mT") or (
        len(dims) == 2
        and dims[0] % 2 != dims[1] % 2
        and (name != "permute" or dims[0] % 2)
    )
    if x.dim() == 3 and name in ("transpose", "swapaxes") and {*dims} == {0, 1}:
        return Stacked.over(x)
    if x.dim() != 2 or not swaps:
        return None
    if x.holds_ends and x.rows.stacked is not None:
        return x.rows.stacked(x[:, 0], x[:, 1])
    with torch._C.DisableTorchFunctionSubclass():
        out = x.as_subclass(torch.Tensor).t().as_subclass(Transposed)
    out.x = x
    return out


def multiplied(name: str, args: Any, kwargs: Any) -> Any:
    """Returns a product with rows as the inner dim, or None for other products."""
    if name not in ("matmul", "mm", "mv", "rmatmul") or len(args) != 2 or kwargs:
        return None
    left, right = args if name != "rmatmul" else args[::-1]
    if isinstance(left, Transposed):
        x = left.x
        if isinstance(right, Tensor) and not isinstance(
            right, (RowShardedTensor, Transposed)
        ):
            if right.size(0) != x.rows.count:
                return None
            right = x.wrap(right[x.rows.gid_on(right.device)], x.rows)
        if not isinstance(right, RowShardedTensor) or not right.rows.same_as(x.rows):
            return None
        compare_operation("matmul", x, args)
        part = x.to_local().t() @ right.to_local()
        return autograd.all_reduce(part, x.rows.mesh.world)
    if isinstance(right, Transposed):
        compare_operation("matmul", right.x, args)
        whole = all_rows(right.x)
        if isinstance(left, RowShardedTensor):
            return left.wrap(left.to_local() @ whole.t(), left.rows)
        return left @ whole.t()
    if isinstance(left, RowShardedTensor) and isinstance(right, RowShardedTensor):
        one = left.dim() == 1 and right.dim() < 3 and left.rows.same_as(right.rows)
        if one:
            compare_operation("matmul", left, args)
            part = left.to_local() @ right.to_local()
            return autograd.all_reduce(part, left.rows.mesh.world)
        square = left.dim() == 2 and right.dim() < 3 and right.rows.whole
        if square and left.size(1) == right.rows.total != right.size(-1):
            compare_operation("matmul", left, args)
            whole = all_rows(right)
            return left.wrap(left.to_local() @ whole, left.rows)
    plain = isinstance(left, Tensor) and not isinstance(left, RowShardedTensor)
    if (
        plain
        and isinstance(right, RowShardedTensor)
        and left.size(-1) == right.rows.count
    ):
        compare_operation("matmul", right, args)
        if left.layout not in (torch.strided, torch.sparse_coo):
            left = left.to_sparse_coo()  # of which torch takes columns
        cut = left.index_select(-1, right.rows.place_on(left.device))
        return autograd.all_reduce(cut @ right.to_local(), right.rows.mesh.world)
    return None


def joined(tensors: list[Any]) -> RowShardedTensor:
    """Concatenates tensors by rows; ordinary ones are sharded into equal blocks."""
    like = next(t for t in tensors if isinstance(t, RowShardedTensor))
    mesh, device = like.rows.mesh, like.device
    parts: list[Tensor] = []
    gids: list[Tensor] = []
    before = 0
    for t in tensors:
        if isinstance(t, RowShardedTensor):
            parts.append(t.to_local())
            gids.append(before + t.rows.place)
            before += t.rows.count
        else:
            block = Rows.blocks(t.size(0), mesh)
            parts.append(t[block.gid.to(t.device)].to(device))
            gids.append(before + block.gid)
            before += t.size(0)
    shapes = {tuple(p.shape[1:]) for p, t in zip(parts, tensors, strict=True) if len(t)}
    if len(shapes) > 1:  # torch takes an empty one, as of a rank without rows, with any
        raise ValueError(f"cat() of rows must get rows of one shape: {sorted(shapes)}")
    of = next(
        (t.rows for t in tensors if isinstance(t, RowShardedTensor) and t.rows.nodes),
        like.rows,
    )
    rows = Rows(torch.cat(gids), before, mesh, None, nodes=of.nodes, stacked=of.stacked)
    return like.wrap(torch.cat(parts), rows)


def check_product(name: str, args: Any) -> None:
    """Raises for products that sum over rows."""
    bias, left, right = args if len(args) == 3 else (None, *args[-2:])
    if not isinstance(left, RowShardedTensor) or (
        isinstance(right, RowShardedTensor)
        and not left.dim() == right.dim() > 2  # the matrices of each row
    ):
        raise unsupported_op(f"{name}() that sums over rows")
    if isinstance(bias, RowShardedTensor) and bias.dim() < left.dim():
        raise unsupported_op(f"{name}() with a row-sharded bias of {bias.dim()} dims")

"""Shape changes that leave the rows where they are; anything else is refused.

Each function takes plain local tensors and returns one whose dim 0 still is the rows,
or raises `UnsupportedOp`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class UnsupportedOp(Exception):
    """A shape change that would move rows."""


def view(func: Callable, x: Tensor, *shape: Any, **kwargs: Any) -> Tensor:
    """Views each row in another shape: `x.view(-1, heads, channels)`."""
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
    """Flattens dims of each row."""
    if start_dim % x.dim() == 0 and x.dim() > 1:
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
    """Repeats dims of size one of each row, to the shape of another tensor's."""
    return expand(func, x, *other.shape)


def repeat(func: Callable, x: Tensor, *sizes: Any) -> Tensor:
    """Repeats each row along its own dims."""
    times = list(
        sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    )
    if len(times) != x.dim() or times[0] != 1:
        raise UnsupportedOp
    return x.repeat(times)


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


def addmm(
    func: Callable,
    bias: Tensor,
    x: Tensor,
    w: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Tensor:
    """Multiplies each row by a replicated matrix and adds a replicated bias."""
    return torch.addmm(bias, x, w, beta=beta, alpha=alpha)


def baddbmm(func: Callable, x: Tensor, a: Tensor, b: Tensor, **kwargs: float) -> Tensor:
    """Multiplies the matrices of each row and adds to them."""
    return func(x, a, b, **kwargs)  # type: ignore[no-any-return]


def layer_norm(
    func: Callable, x: Tensor, normalized_shape: Any, *args: Any, **kwargs: Any
) -> Tensor:
    """Normalises the last dims of each row."""
    if len(normalized_shape) >= x.dim():
        raise UnsupportedOp
    return func(x, normalized_shape, *args, **kwargs)  # type: ignore[no-any-return]


def group_norm(func: Callable, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Normalises groups of channels of each row."""
    return func(x, *args, **kwargs)  # type: ignore[no-any-return]


def one_hot(func: Callable, x: Tensor, num_classes: int = -1) -> Tensor:
    """Encodes each row's class; the number of classes must be given."""
    if num_classes < 0:
        raise UnsupportedOp
    return torch.nn.functional.one_hot(x, num_classes)


def index_select(func: Callable, x: Tensor, dim: int, index: Tensor) -> Tensor:
    """Picks columns."""
    if dim % x.dim() == 0:
        raise UnsupportedOp
    return x.index_select(dim, index)


SHAPING: dict[str, Callable[..., Tensor]] = {
    "view": view,
    "reshape": view,
    "view_as": view_as,
    "reshape_as": view_as,
    "flatten": flatten,
    "ravel": flatten,
    "transpose": transpose,
    "swapaxes": transpose,
    "swapdims": transpose,
    "permute": permute,
    "squeeze": squeeze,
    "unsqueeze": unsqueeze,
    "expand": expand,
    "expand_as": expand_as,
    "repeat": repeat,
    "cat": cat,
    "concat": cat,
    "concatenate": cat,
    "stack": stack,
    "matmul": mm,
    "mm": mm,
    "mv": mm,
    "addmm": addmm,
    "bmm": mm,
    "baddbmm": baddbmm,
    "t": transpose,
    "T": transpose,
    "mT": transpose,
    "broadcast_to": expand,
    "layer_norm": layer_norm,
    "rms_norm": layer_norm,
    "group_norm": group_norm,
    "one_hot": one_hot,
    "index_select": index_select,
}

"""Divides gradients of row-sharded tensors by P, once; see comm/autograd.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import swap_tensors

from pyg_distcomm.tensor.row_sharded import (
    RowShardedTensor,
    call_local,
    compare_operation,
    local_part,
)


def requires_grad(func: Callable, args: Any, kwargs: Any) -> Any:
    """Sets requires_grad of a leaf, and divides its gradient by P on arrival."""
    x = args[0]
    out = call_local(func, args, kwargs)
    size = x.rows.mesh.size
    # inside a backward pass, this is a checkpoint's copy, whose gradient goes on
    fresh = torch._C._current_graph_task_id() == -1 and not hasattr(
        x, "_exact_gradient"
    )
    if x.requires_grad and x.is_leaf and size > 1 and fresh:
        x._exact_gradient = True  # see [Note: gradients]
        with torch._C.DisableTorchFunctionSubclass():
            # torch gives None for a zero that it does not compute
            x.register_hook(lambda g: g if g is None else g / size)
    return out


def detach_(func: Callable, args: Any, kwargs: Any) -> Any:
    """Implements detach_, which torch refuses for views such as row-sharded tensors."""
    x = args[0]
    try:
        swap_tensors(x, x.detach())
    except RuntimeError as error:
        raise RuntimeError(
            f"use z = z.detach() instead of z.detach_(): {error}"
        ) from None
    return x


def backward(func: Callable, args: Any, kwargs: Any) -> None:
    """Runs backward from a row-sharded tensor, with a gradient for each entry."""
    x, *rest = args
    if rest:
        rest[0] = _initial_gradient(x, rest[0])
    elif "gradient" in kwargs:
        kwargs = {**kwargs, "gradient": _initial_gradient(x, kwargs["gradient"])}
    call_local(func, (x, *rest), kwargs)


def _initial_gradient(out: Any, g: Any) -> Any:
    """Returns the gradient with which a backward pass starts: P times that of `out`."""
    if not isinstance(out, RowShardedTensor) or not isinstance(g, Tensor):
        return g
    if not isinstance(g, RowShardedTensor):
        if len(g) != out.rows.count:
            raise ValueError(
                f"give a gradient of the shape {list(out.shape)} of the whole tensor, or a "
                f"row-sharded one; got {list(g.shape)}"
            )
        g = out.wrap(g[out.rows.place_on(g.device)], out.rows)
    # see [Note: gradients] in comm/autograd.py
    return g.to_local() * out.rows.mesh.size


def register_hook(func: Callable, args: Any, kwargs: Any) -> Any:
    """Registers a hook that sees and returns the true gradient, not P times that."""
    x, hook = args
    if x.is_leaf or x.rows.mesh.size == 1:
        return call_local(func, args, kwargs)
    rows, wrap, size = x.rows, x.wrap, x.rows.mesh.size

    def scaled_hook(g: Tensor | None) -> Tensor | None:
        out = hook(g if g is None else wrap(local_part(g) / size, rows))
        return None if out is None else local_part(out) * size

    return call_local(func, (x, scaled_hook), kwargs)


def grad(func: Callable, args: Any, kwargs: Any) -> Any:
    """Implements torch.autograd.grad: divides gradients of intermediate results by P."""
    if func is torch.autograd.grad:
        args, kwargs = _with_initial_gradients(args, kwargs)
    found = call_local(func, args, kwargs)
    if func is torch.autograd.grad:
        inputs = args[1] if len(args) > 1 else kwargs["inputs"]
        inputs = [inputs] if isinstance(inputs, Tensor) else inputs
        return tuple(_scaled(g, x) for g, x in zip(found, inputs, strict=True))
    return _scaled(found, args[0])


def _with_initial_gradients(args: Any, kwargs: Any) -> Any:
    """Returns the arguments of torch.autograd.grad with grad_outputs times P."""
    outs = args[0] if args else kwargs["outputs"]
    given = args[2] if len(args) > 2 else kwargs.get("grad_outputs")
    if given is None:
        return args, kwargs
    if isinstance(outs, Tensor):
        begun: Any = _initial_gradient(outs, given)
    else:
        given = (given,) if isinstance(given, Tensor) else given
        begun = tuple(
            _initial_gradient(out, g) for out, g in zip(outs, given, strict=True)
        )
    if len(args) > 2:
        return (*args[:2], begun, *args[3:]), kwargs
    return args, {**kwargs, "grad_outputs": begun}


def _scaled(found: Any, x: Any) -> Any:
    """Returns a gradient of row-sharded `x`; hooks of leaves have divided it by P already."""
    if not isinstance(x, RowShardedTensor) or not isinstance(found, Tensor):
        return found
    found = found if isinstance(found, RowShardedTensor) else x.wrap(found, x.rows)
    return found if x.is_leaf else found / x.rows.mesh.size


def from_local(t: Tensor, like: RowShardedTensor) -> Any:
    """Wraps this rank's rows as a row-sharded tensor; the inverse of `to_local`.

    The gradient of a leaf `t` is that of its rows, and is not averaged over the ranks.

    Args:
        t: `[n_i, ...]`, this rank's rows, in the order of `like.to_local()`.
        like: says which rows they are.

    Raises:
        TypeError: if `like` is not row-sharded.
        ValueError: if `t` has another number of rows than `like` has on this rank; on all
            ranks, if the first time its columns or dtype differ between them.
    """
    if not isinstance(like, RowShardedTensor) or not isinstance(t, Tensor):
        raise TypeError(
            "from_local(t, like=x) takes this rank's rows and a row-sharded tensor, such as "
            f"data.x of pdc.partition; got {type(t).__name__} and {type(like).__name__}"
        )
    compare_operation("from_local", like, [str(t.dtype), *t.shape[1:]])
    size = like.rows.mesh.size
    if t.is_leaf and t.requires_grad and size > 1:
        t = _DivideGradient.apply(t, size)
    return like.wrap(t, like.rows)


class _DivideGradient(torch.autograd.Function):
    """The identity with a gradient divided by P: see [Note: gradients]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        ctx.size = size
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g / ctx.size, None

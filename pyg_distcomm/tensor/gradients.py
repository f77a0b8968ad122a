"""Divides gradients of row-sharded tensors by P, once; see comm/autograd.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import swap_tensors

from pyg_distcomm.comm.consistency import comparer_of
from pyg_distcomm.comm.gradient_averaging import averager_of, meet
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.tensor.row_sharded import RowShardedTensor, tree_map


def call_local(func: Callable, args: Any, kwargs: Any) -> Any:
    """Calls a torch function on the local parts, as they are.

    Where hooks look after saved tensors, as in checkpointing, these are ordinary ones:
    hooks may read their sizes anywhere.
    """
    with torch._C.DisableTorchFunctionSubclass():
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if hooks is not None and not getattr(func, "__name__", "").endswith("_"):
            args, kwargs = tree_map(_local, args), tree_map(_local, kwargs)
        return func(*args, **kwargs)


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, RowShardedTensor) else value


def requires_grad(func: Callable, args: Any, kwargs: Any) -> Any:
    """Marks a leaf, and has its gradient divided by P when it arrives."""
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
            x.register_hook(lambda g: g / size)
    return out


def detach_(func: Callable, args: Any, kwargs: Any) -> Any:
    """Takes a tensor out of its graph; torch's does not where it is a view, as here."""
    x = args[0]
    try:
        swap_tensors(x, x.detach())
    except RuntimeError as error:
        raise RuntimeError(
            f"use z = z.detach() instead of z.detach_(): {error}"
        ) from None
    return x


def backward(func: Callable, args: Any, kwargs: Any) -> None:
    """Goes back from a row-sharded tensor, with a gradient for each of its entries."""
    x, *rest = args
    if rest:
        rest[0] = _begun(x, rest[0])
    elif "gradient" in kwargs:
        kwargs = {**kwargs, "gradient": _begun(x, kwargs["gradient"])}
    call_local(func, (x, *rest), kwargs)


def _begun(out: Any, g: Any) -> Any:
    """Returns the gradient that a backward pass begins with: P times that of `out`."""
    if not isinstance(out, RowShardedTensor) or not isinstance(g, Tensor):
        return g
    if not isinstance(g, RowShardedTensor):
        if len(g) != out.rows.count:
            raise ValueError(
                f"give a gradient of the shape {list(out.shape)} of the whole tensor, or a "
                f"row-sharded one; got {list(g.shape)}"
            )
        g = out.wrap(g[out.rows.place_on(g.device)], out.rows)
    return (
        g.to_local() * out.rows.mesh.size
    )  # see [Note: gradients] in comm/autograd.py


def register_hook(func: Callable, args: Any, kwargs: Any) -> Any:
    """Has a hook see and return the gradient of a row-sharded tensor, not P times that."""
    x, hook = args
    if x.is_leaf or x.rows.mesh.size == 1:
        return call_local(func, args, kwargs)
    rows, wrap, size = x.rows, x.wrap, x.rows.mesh.size

    def seen(g: Tensor) -> Tensor | None:
        out = hook(wrap(_local(g) / size, rows))
        return None if out is None else _local(out) * size

    return call_local(func, (x, seen), kwargs)


def grad(func: Callable, args: Any, kwargs: Any) -> Any:
    """Returns gradients as row-sharded tensors, those of intermediate results divided by P."""
    if func is torch.autograd.grad:
        args, kwargs = _with_begun(args, kwargs)
    found = call_local(func, args, kwargs)
    if func is torch.autograd.grad:
        inputs = args[1] if len(args) > 1 else kwargs["inputs"]
        inputs = [inputs] if isinstance(inputs, Tensor) else inputs
        return tuple(_scaled(g, x) for g, x in zip(found, inputs, strict=True))
    return _scaled(found, args[0])


def _with_begun(args: Any, kwargs: Any) -> Any:
    """Returns the arguments of torch.autograd.grad, its grad_outputs as they have to begin."""
    outs = args[0] if args else kwargs["outputs"]
    given = args[2] if len(args) > 2 else kwargs.get("grad_outputs")
    if given is None:
        return args, kwargs
    if isinstance(outs, Tensor):
        begun: Any = _begun(outs, given)
    else:
        given = (given,) if isinstance(given, Tensor) else given
        begun = tuple(_begun(out, g) for out, g in zip(outs, given, strict=True))
    if len(args) > 2:
        return (*args[:2], begun, *args[3:]), kwargs
    return args, {**kwargs, "grad_outputs": begun}


def _scaled(found: Any, x: Any) -> Any:
    """A gradient of row-sharded `x`: leaves have divided it by P already."""
    if not isinstance(x, RowShardedTensor) or not isinstance(found, Tensor):
        return found
    found = found if isinstance(found, RowShardedTensor) else x.wrap(found, x.rows)
    return found if x.is_leaf else found / x.rows.mesh.size


def meet_all(x: RowShardedTensor, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Returns the operands of an operation, plain ones as they have to meet row-sharded `x`.

    Outside layers, plain tensors without gradient are compared between ranks, as
    `Mesh.check` says. Inside, plain tensors with a history are this rank's own.
    """
    mesh, inside = x.rows.mesh, x.reads_local
    if not isinstance(mesh, Mesh):
        return args, kwargs

    def met(value: Any) -> Any:
        if not isinstance(value, Tensor) or getattr(type(value), "_spread", False):
            return value
        if value.requires_grad:
            return value if inside and not value.is_leaf else meet(value, mesh)
        if not inside and type(value) in (Tensor, torch.nn.Parameter) and checks:
            if isinstance(value, torch.nn.Parameter):
                averager_of(mesh).know(value)
            else:
                comparer_of(mesh).check(value, name)
        return value

    checks = torch._C._current_graph_task_id() == -1
    if name == "setitem" and not isinstance(
        args[0], RowShardedTensor
    ):  # it may hold anything, as out may
        return (args[0], *tree_map(met, args[1:])), kwargs
    if name == "getitem" and _relabels(args[0]):
        return (args[0], *tree_map(met, args[1:])), kwargs
    kept = {"out": kwargs["out"]} if "out" in kwargs else {}
    args, kwargs = tree_map(met, (args, {k: kwargs[k] for k in kwargs if k != "out"}))
    return args, {**kwargs, **kept}


def _relabels(table: Any) -> bool:
    """Whether an ordinary table may number nodes anew: it has values for some of them alone.

    As in `assoc = torch.empty(n); assoc[n_id] = torch.arange(len(n_id))`.
    """
    return (
        not isinstance(table, RowShardedTensor)
        and table.dim() == 1
        and table.dtype == torch.int64
    )


def agree(name: str, x: RowShardedTensor, operands: Any = ()) -> None:
    """Has the ranks compare an operation over the rows of all ranks, before its exchange.

    Nothing is compared in a backward pass; see `Comparer.check_call` for the rest.

    Args:
        name: the operation.
        x: a row-sharded operand.
        operands: all of its arguments, in any nesting.
    """
    mesh = x.rows.mesh
    if not isinstance(mesh, Mesh) or mesh.size == 1 or mesh.check == "never":
        return
    if torch._C._current_graph_task_id() == -1:
        inside = x.reads_local  # where plain operands may be this rank's
        comparer_of(mesh).check_call(name, () if inside else _described(operands))


def _described(value: Any) -> Any:
    """Returns what is the same on all ranks of an operand, hashable."""
    if isinstance(value, (tuple, list)):
        if len(value) > _LISTED:
            return f"{len(value)} values"
        return tuple([_described(v) for v in value])
    if isinstance(value, dict):
        return tuple([f"{k}={_described(v)}" for k, v in value.items()])
    if isinstance(value, Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            shape, dtype = value.shape, str(value.dtype).removeprefix("torch.")
        if isinstance(value, RowShardedTensor):
            rows = value.rows
            count = str(rows.total) if rows.whole else "?"
            return f"{dtype}[{', '.join([count, *map(str, shape[1:])])}]"
        if getattr(type(value), "_spread", False):  # its shape is this rank's
            return f"{dtype} {type(value).__name__}"
        return f"{dtype}[{', '.join(map(str, shape))}]"
    value = getattr(value, "total", value)  # of a number of rows inside a layer
    if value is None or isinstance(value, (bool, int, float, str, slice, torch.dtype)):
        return repr(value)
    return type(value).__name__


_LISTED = 32  # operands of which each is compared


def compare_plain(x: RowShardedTensor, value: Any, name: str) -> None:
    """Has the ranks compare a plain tensor that selects, or is written to, rows of `x`."""
    mesh = x.rows.mesh
    if not isinstance(mesh, Mesh) or mesh.size == 1 or x.reads_local:
        return
    plain = isinstance(value, Tensor) and not getattr(type(value), "_spread", False)
    if plain and torch._C._current_graph_task_id() == -1:
        comparer_of(mesh).check(value.detach(), name)


def from_local(t: Tensor, like: RowShardedTensor) -> Any:
    """Makes this rank's rows part of a row-sharded tensor; the opposite of `to_local`.

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
    agree("from_local", like, [str(t.dtype), *t.shape[1:]])
    size = like.rows.mesh.size
    if t.is_leaf and t.requires_grad and size > 1:
        t = _Share.apply(t, size)
    return like.wrap(t, like.rows)


class _Share(torch.autograd.Function):
    """The identity, whose gradient is divided by P: see [Note: gradients]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        ctx.size = size
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g / ctx.size, None

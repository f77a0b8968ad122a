"""Prepares the operands of torch functions on DistTensors: local parts, and comparisons.

Plain tensors that meet row-sharded ones are compared between ranks, or their gradients
averaged; and ranks compare what they call before it exchanges anything.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.comm import autograd
from pyg_distcomm.comm.consistency import comparer_of
from pyg_distcomm.comm.failure import watch_of
from pyg_distcomm.comm.gradient_averaging import averager_of, meet
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.tensor.row_sharded import RowShardedTensor, leaves, tree_map

_LISTED = 32  # operands of which each is compared


def call_local(func: Callable, args: Any, kwargs: Any) -> Any:
    """Calls a torch function on the local parts, as they are.

    Where hooks look after saved tensors, as in checkpointing, these are ordinary ones:
    hooks may read their sizes anywhere.
    """
    with torch._C.DisableTorchFunctionSubclass():
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if hooks is not None and not getattr(func, "__name__", "").endswith("_"):
            args, kwargs = tree_map(local_part, args), tree_map(local_part, kwargs)
        return func(*args, **kwargs)


def local_part(value: Any) -> Any:
    """Returns the rows of this rank of a row-sharded tensor, and other values as they are."""
    return value.to_local() if isinstance(value, RowShardedTensor) else value


def all_rows(value: Any) -> Any:
    """Returns all rows of a row-sharded tensor, in order; collective. Others as they are."""
    if not isinstance(value, RowShardedTensor):
        return value
    return autograd.all_gather(value.to_local(), value.rows.gid, value.rows.mesh.world)


def argument(tree: Any, place: int, name: str) -> Any:
    """Returns an argument of a call, given by place or by name; None if it is not."""
    args, kwargs = tree
    return args[place] if len(args) > place else kwargs.get(name)


def kind_of(value: Any) -> str:
    """Describes what was given instead of a row-sharded tensor."""
    if isinstance(value, Tensor):
        return f"a plain tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


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


def check_devices(func: Callable, args: Any, kwargs: Any, error: Exception) -> None:
    """Raises, on all ranks, if torch refused operands because they lie on several devices.

    Raises:
        ValueError: naming the operands, and their devices.
    """
    found = leaves((args, kwargs), Tensor)
    with torch._C.DisableTorchFunctionSubclass():
        where = {str(t.device): t for t in found if t.dim()}
    if len(where) < 2 or not re.search("device|meta tensor", str(error)):
        return
    said = [f"{_called(t)} lies on {device}" for device, t in where.items()]
    wrong = ValueError(
        f"move the model and the data to one device, by .to(mesh.device): in "
        f"{getattr(func, '__name__', func)}(), {', and '.join(said)}"
    )
    mesh = next(t for t in found if isinstance(t, RowShardedTensor)).rows.mesh
    watch = watch_of(mesh)
    if watch is not None:
        watch.fail(wrong)
    raise wrong from error


def _called(t: Tensor) -> str:
    """Names a tensor: by the module that calls, if it is one of its own, or by its shape."""
    frame, name = inspect.currentframe(), ""
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, torch.nn.Module):
            own = (*module.named_parameters(), *module.named_buffers())
            name = next(
                (f"{type(module).__name__}.{n}" for n, p in own if p is t), name
            )
        frame = frame.f_back
    return name or _described(t)


def compare_plain(x: RowShardedTensor, value: Any, name: str) -> None:
    """Has the ranks compare a plain tensor that selects, or is written to, rows of `x`."""
    mesh = x.rows.mesh
    if not isinstance(mesh, Mesh) or mesh.size == 1 or x.reads_local:
        return
    plain = isinstance(value, Tensor) and not getattr(type(value), "_spread", False)
    if plain and torch._C._current_graph_task_id() == -1:
        comparer_of(mesh).check(value.detach(), name)

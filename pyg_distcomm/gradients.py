"""Gradients of row-cut tensors: divided by P once; see [Note: gradients] in adjoint.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.rowcut import RowCut


def plainly(func: Callable, args: Any, kwargs: Any) -> Any:
    """Calls a torch function on the local parts, as they are."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def requires_grad(func: Callable, args: Any, kwargs: Any) -> Any:
    """Marks a leaf, and has its gradient divided by P when it arrives."""
    x = args[0]
    out = plainly(func, args, kwargs)
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


def grad(func: Callable, args: Any, kwargs: Any) -> Any:
    """Returns gradients as row-cut tensors, those of intermediate results divided by P."""
    found = plainly(func, args, kwargs)
    if func is torch.autograd.grad:
        inputs = args[1] if len(args) > 1 else kwargs["inputs"]
        inputs = [inputs] if isinstance(inputs, Tensor) else inputs
        return tuple(_scaled(g, x) for g, x in zip(found, inputs, strict=True))
    return _scaled(found, args[0])


def _scaled(found: Any, x: Any) -> Any:
    """A gradient of row-cut `x`: leaves have divided it by P already."""
    if not isinstance(x, RowCut) or not isinstance(found, Tensor):
        return found
    found = found if isinstance(found, RowCut) else x.wrap(found, x.rows)
    return found if x.is_leaf else found / x.rows.mesh.size

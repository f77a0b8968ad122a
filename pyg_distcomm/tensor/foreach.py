"""Runs torch's functions on lists of tensors (optimizers, clipping) element by element.

The tensors of one place in the lists belong together: a parameter, its gradient and its
state. What is elementwise runs on local storage, row-cut or not; norms are global.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.tensor import reductions
from pyg_distcomm.tensor.gradients import call_local
from pyg_distcomm.tensor.row_sharded import RowShardedTensor, unsupported_op

_REDUCING = frozenset("_foreach_norm _foreach_max _foreach_powsum".split())


def apply(func: Callable, args: Any, kwargs: Any) -> Any:
    """Runs a function on lists of which some tensors are row-cut."""
    name = func.__name__
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, (list, tuple))]
    if name in _REDUCING:
        if name != "_foreach_norm":
            raise unsupported_op(f"{name}()")
        order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
        return tuple(_norm(t, order, kwargs.get("dtype")) for t in args[0])
    out = call_local(func, args, kwargs)
    if name.endswith("_") or not isinstance(out, (list, tuple)):
        return out
    return type(out)(_like(t, [x[k] for x in lists]) for k, t in enumerate(out))


def _norm(t: Tensor, order: float, dtype: Any) -> Tensor:
    if not isinstance(t, RowShardedTensor):
        return torch.linalg.vector_norm(t, order, dtype=dtype)
    local = t.to_local()
    return reductions.norm(local, t.rows, [*range(local.dim())], p=order, dtype=dtype)


def _like(out: Any, group: list[Any]) -> Any:
    rows = next((t for t in group if isinstance(t, RowShardedTensor)), None)
    return out if rows is None or not out.dim() else rows.wrap(out, rows.rows)

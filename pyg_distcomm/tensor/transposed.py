"""The transpose of a row-cut matrix: its columns are cut, and products take it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.comm import autograd
from pyg_distcomm.tensor import indexing
from pyg_distcomm.tensor.eager import eager
from pyg_distcomm.tensor.gradients import agree
from pyg_distcomm.tensor.op_tables import FACTS, SIZES, base_name
from pyg_distcomm.tensor.row_sharded import RowShardedTensor, unsupported_op


@eager
class Transposed(torch.Tensor):
    """`x.t()` of a row-cut `x` `[n, f]`: `[f, n]`, this rank having some columns.

    `x.t() @ y` sums over the rows of all ranks and is an ordinary tensor. `y @ x.t()` is
    row-cut, `[n, n]`: all rows of x come here, (P-1)/P n f words. Everything else is
    refused; `.t()` gives x back.
    """

    x: RowShardedTensor
    _spread = True

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs products and facts, and refuses the rest by name."""
        name, kwargs = base_name(func), kwargs or {}
        if name in ("matmul", "mm", "rmatmul", "mv"):
            found = multiplied(name, args, kwargs)
            if found is not None:
                return found
        if name in ("t", "T", "mT", "transpose", "permute"):
            return args[0].x
        if name in SIZES:
            shape = args[0].x.shape[::-1]
            dim = args[1] if len(args) > 1 else kwargs.get("dim")
            if name == "len" or (name == "size" and dim is not None):
                return shape[dim or 0]
            return torch.Size(shape) if name in ("shape", "size") else shape.numel()
        if name in FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        raise unsupported_op(f"{name}() of a transposed row-cut matrix")


def transposed(name: str, args: Any, kwargs: Any) -> Any:
    """Returns the transpose of a row-cut matrix, or None if its rows stay where they are."""
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
    if x.dim() != 2 or not swaps:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        out = x.as_subclass(torch.Tensor).t().as_subclass(Transposed)
    out.x = x
    return out


def multiplied(name: str, args: Any, kwargs: Any) -> Any:
    """Returns a product with row-cut rows on its inner side, or None if it is another."""
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
            right = x.wrap(right[x.rows.gid.to(right.device)], x.rows)
        if not isinstance(right, RowShardedTensor) or not right.rows.same_as(x.rows):
            return None
        agree("matmul", x, args)
        part = x.to_local().t() @ right.to_local()
        return autograd.all_reduce(part, x.rows.mesh.world)
    if isinstance(right, Transposed):
        agree("matmul", right.x, args)
        whole = indexing.gather_all(right.x.to_local(), right.x.rows)
        if isinstance(left, RowShardedTensor):
            return left.wrap(left.to_local() @ whole.t(), left.rows)
        return left @ whole.t()
    if isinstance(left, RowShardedTensor) and isinstance(right, RowShardedTensor):
        one = left.dim() == right.dim() == 1 and left.rows.same_as(right.rows)
        if one:
            agree("matmul", left, args)
            part = left.to_local() @ right.to_local()
            return autograd.all_reduce(part, left.rows.mesh.world)
        square = left.dim() == 2 and right.dim() < 3 and right.rows.whole
        if square and left.size(1) == right.rows.total != right.size(-1):
            agree("matmul", left, args)
            whole = indexing.gather_all(right.to_local(), right.rows)
            return left.wrap(left.to_local() @ whole, left.rows)
    plain = isinstance(left, Tensor) and not isinstance(left, RowShardedTensor)
    if (
        plain
        and isinstance(right, RowShardedTensor)
        and left.size(-1) == right.rows.count
    ):
        agree("matmul", right, args)
        cut = left.index_select(-1, right.rows.place.to(left.device))
        return autograd.all_reduce(cut @ right.to_local(), right.rows.mesh.world)
    return None

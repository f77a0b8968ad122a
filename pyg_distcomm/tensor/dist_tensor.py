"""Defines `DistTensor`, a tensor whose rows are sharded over the ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor

from pyg_distcomm.comm.failure import needing, watch_of
from pyg_distcomm.tensor import dispatch, getitem
from pyg_distcomm.tensor.row_sharded import (
    RowShardedTensor,
    all_rows,
    check_devices,
    check_saved,
    compare_operation,
    eager,
    unsupported_op,
)
from pyg_distcomm.tensor.shape_ops import Stacked


@eager
class DistTensor(RowShardedTensor):
    """A tensor sharded by rows: each rank holds some rows at full width.

    The rule: *a row-wise operation is local; an operation that reduces over nodes is
    global; any other gathers all rows (see below), or raises a TypeError.*

    So `x.relu()`, `lin(x)`, `x[mask]`, `x.argmax(-1)` are local, while `x.sum()`,
    `x.mean(0)`, `F.cross_entropy(x, y)` and batch norm return the same as on one process,
    equal on all ranks.

    It behaves as the whole tensor: `shape`, `size()`, `len` and `numel` are global. So a plain
    tensor of n rows, equal on all ranks (`torch.zeros(n)`, a mask, `torch.randperm(n)`),
    means rows by global id, and `x.new_zeros(n, k)` is row-sharded. `.to_local()` has this
    rank's sizes, and `from_local` is its inverse. Sizes and `repr` never communicate, with one
    exception: the length of a selection by a computed mask takes one small all-reduce the
    first time.

    Operations that need all rows at once gather them on every rank, (P-1)/P n f words: `sort`,
    `cumsum`, `unique`, singular values, `for row in x`, and `x[None]`, an ordinary tensor
    `[1, n, f]`.

    `x[idx]` with plain integer ids (the same on all ranks) returns the rows of those ids,
    sharded into equal blocks (like x, if there are as many); with a DistTensor of ids, each
    rank gets the rows of its own ids. `x[mask]` is free. Random numbers are those of one
    process; dropout is keyed by row id.

    Gradients: see [Note: gradients] in `comm/autograd.py`; `x.grad` of a leaf is exact.
    `torch.save` and pickling raise on several ranks: save `x.full_tensor()`.

    Shapes: `[n, ...]`, of which `to_local()` `[n_i, ...]` is on rank i.
    """

    def full_tensor(self) -> Tensor:
        """Returns all rows, in original order, on every rank; collective."""
        compare_operation("full_tensor", self, (self,))
        return all_rows(self)

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Dispatches one torch function; see `dispatch.py`."""
        if Stacked in types:
            return Stacked.__torch_function__(func, types, args, kwargs)
        try:
            return dispatch.apply(func, args, kwargs or {})
        except RuntimeError as error:  # perhaps on this rank only
            check_devices(func, args, kwargs or {}, error)
            raise

    def __getitem__(self, key: Any) -> Any:
        return getitem.get(self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        getitem.put(self, key, value)

    def __iter__(self) -> Any:
        """Gathers all rows on every rank, and yields them; collective."""
        if self.reads_local:
            raise unsupported_op("iterating over rows, inside a layer,")
        compare_operation("iter", self, (self,))
        return iter(all_rows(self))

    def __contains__(self, value: Any) -> bool:
        return bool((self == value).any())

    def __deepcopy__(self, memo: dict) -> DistTensor:
        if id(self) not in memo:
            local = self.to_local().detach().clone()
            twin = DistTensor.wrap(local, self.rows)
            if self.requires_grad:
                twin.requires_grad_()
            memo[id(self)] = twin
        twin = memo[id(self)]
        twin.__dict__.update(
            {k: copy.deepcopy(v, memo) for k, v in vars(self).items() if k != "rows"}
        )
        return twin

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the rows on a device, or of another type; see `torch.Tensor.to`.

        Raises:
            OutOfMemoryError: on all ranks, if they do not fit on this rank's device.
        """
        watch = watch_of(self.rows.mesh)
        where, local = kwargs.get("device", (*args, None)[0]), self.to_local()
        named = isinstance(where, (str, int, torch.device))
        place = torch.device(where) if named else local.device
        with needing("a tensor of rows", lambda: local.nbytes, watch, place):
            return super().to(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        check_saved(self.rows.mesh.size, "this rank's rows")
        return self.to_local().detach().__reduce_ex__(protocol)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        """Returns all rows as an array, on every rank; collective."""
        found = self.full_tensor().detach().numpy()
        return found if dtype is None else found.astype(dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        local, rows = self.to_local().detach(), self.rows
        count = rows.total if rows.whole else vars(rows).get("count", rows.known)
        here, width = tuple(local.shape), ", ".join(map(str, local.shape[1:]))
        whole = f"[{'?' if count is None else count}{', ' * bool(width)}{width}]"
        kind = str(local.dtype).removeprefix("torch.")
        return (
            f"{type(self).__name__}({whole} of {kind}, {list(here)} on rank "
            f"{rows.mesh.rank}/{rows.mesh.size}: {local})"
        )


def _operator(function: Callable[..., Any], swapped: bool) -> Callable[..., Any]:
    def operate(self: Tensor, other: Any) -> Any:
        if other is None:
            return NotImplemented  # x == None is False, x + None a TypeError
        return function(other, self) if swapped else function(self, other)

    return operate


_OPERATORS: dict[str, Callable[..., Any]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "truediv": torch.true_divide,
    "floordiv": torch.floor_divide,
    "mod": torch.remainder,
    "pow": torch.pow,
    "matmul": torch.matmul,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
}


def is_rows(value: Any) -> TypeGuard[DistTensor]:
    """Tells whether a value has a row per node, edge or another thing, as no edge_index has.

    An edge_index `[2, e]` is row-sharded in its second dimension, if it is a DistTensor.
    """
    return isinstance(value, DistTensor) and not getattr(value, "dim_", 0)


def tells_errors(kind: type) -> None:
    """Makes operators of a Tensor subclass raise TypeErrors of its `__torch_function__`.

    Tensor's own turn them into Python's "unsupported operand", and `==` into False.
    """
    for name, function in _OPERATORS.items():
        setattr(kind, f"__{name}__", _operator(function, swapped=False))
        if name not in ("eq", "ne", "lt", "le", "gt", "ge"):
            setattr(kind, f"__r{name}__", _operator(function, swapped=True))


tells_errors(DistTensor)

"""Returns sizes of row-sharded tensors, which are global, and makes new tensors by size."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.tensor.row_sharded import (
    RowShardedTensor,
    call_local,
    called_by_pyg,
)


class NumRows(int):
    """A number of rows inside a layer: local as a size, global in arithmetic.

    So `x.new_zeros(x.size(0), k)` has this rank's rows, and `x.sum(0) / x.size(0)`,
    `x.size(0) ** -0.5` and `1.0 * x.size(0)` are what they are on one process. Sums and
    products with whole numbers, as of `x.size(0) * heads`, are sizes still.
    """

    rows: Rows
    _total: int | Callable[[], int]

    @staticmethod
    def of(rows: Rows, times: int = 1) -> NumRows:
        """Returns the local number of rows, or a multiple of it."""
        known = rows.total * times if rows.whole else lambda: rows.count * times
        return NumRows.made(len(rows) * times, known, rows)

    @staticmethod
    def made(here: int, total: int | Callable[[], int], rows: Rows) -> NumRows:
        """Returns a number of rows: `here` as a size, `total` in arithmetic."""
        out = NumRows(here)
        out.rows, out._total = rows, total
        return out

    @property
    def total(self) -> int:
        """The number on all ranks; see `Rows.count` for when this is collective."""
        if not isinstance(self._total, int):
            self._total = self._total()
        return self._total

    def _with(self, other: Any, op: Callable[[Any, Any], Any]) -> Any:
        if not isinstance(other, int):
            return op(self.total, other)

        def total() -> int:
            return op(self.total, getattr(other, "total", other))  # type: ignore[no-any-return]

        both = [n for n in (self, other) if isinstance(n, NumRows)]
        known = all(isinstance(n._total, int) for n in both)
        here = op(int(self), int(other))
        return NumRows.made(here, total() if known else total, self.rows)

    def __add__(self, other: Any) -> Any:
        return self._with(other, operator.add)

    def __sub__(self, other: Any) -> Any:
        return self._with(other, operator.sub)

    def __mul__(self, other: Any) -> Any:
        return self._with(other, operator.mul)

    def __floordiv__(self, other: Any) -> Any:
        return self._with(other, operator.floordiv)

    __radd__, __rmul__ = __add__, __mul__

    def __rsub__(self, other: Any) -> Any:
        return other - self.total

    def __truediv__(self, other: Any) -> Any:
        return self.total / getattr(other, "total", other)

    def __rtruediv__(self, other: Any) -> Any:
        return other / self.total

    def __pow__(self, other: Any, modulo: Any = None) -> Any:
        return self.total**other

    def __rpow__(self, other: Any, modulo: Any = None) -> Any:
        return other**self.total

    def __float__(self) -> float:
        return float(self.total)

    def __neg__(self) -> Any:
        return -self.total

    def __mod__(self, other: Any) -> Any:
        return self.total % other

    def __rshift__(self, other: Any) -> Any:
        return self.total >> other

    def __abs__(self) -> Any:
        return self.total

    def __round__(self, ndigits: Any = None) -> Any:
        return round(self.total, ndigits)

    def __lt__(self, other: Any) -> Any:
        return self._compared(other, operator.lt)

    def __le__(self, other: Any) -> Any:
        return self._compared(other, operator.le)

    def __gt__(self, other: Any) -> Any:
        return self._compared(other, operator.gt)

    def __ge__(self, other: Any) -> Any:
        return self._compared(other, operator.ge)

    def _compared(self, other: Any, op: Callable[[Any, Any], bool]) -> bool:
        """Compares two sizes as local ones, and a size with a number as global."""
        if isinstance(other, NumRows):
            return op(int(self), int(other))
        if not isinstance(self._total, int) and called_by_pyg():
            return op(int(self), int(other))
        return op(self.total, other)

    def __bool__(self) -> bool:
        """Returns whether there are rows, on this rank or another."""
        return self._compared(0, operator.ne)

    def __eq__(self, other: object) -> bool:
        return not self if self._compares_rows(other) else int.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return bool(self) if self._compares_rows(other) else int.__ne__(self, other)

    def _compares_rows(self, other: object) -> bool:
        # not by PyG, whose own code compares lengths of what is here
        known = type(other) in (int, float) and other == 0
        return known and not called_by_pyg()

    __hash__ = int.__hash__

    def __reduce__(self) -> Any:
        return int, (int(self),)


def with_total(value: Any) -> Any:
    """Returns an operand of arithmetic, with a number of rows as the global one."""
    return value.total if isinstance(value, NumRows) else value


def local_shape(x: RowShardedTensor) -> torch.Size:
    """Returns the shape of this rank's rows."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.shape


def global_shape(x: RowShardedTensor) -> torch.Size:
    """Returns the shape of the whole tensor; see `Rows.count` for when this is collective."""
    local = local_shape(x)
    if x.reads_local:
        return local
    return torch.Size((x.rows.count, *local[1:]))


def size_of(name: str, func: Callable, args: Any, kwargs: Any) -> Any:
    """Implements shape, size, len, numel and nbytes of a row-sharded tensor."""
    x = args[0]
    if isinstance(x, RowShardedTensor) and x._inside:
        found = call_local(func, args, kwargs)
        return sizes_inside(name, found, x.rows, 0, args, kwargs)
    if not isinstance(x, RowShardedTensor) or x.reads_local:
        return call_local(func, args, kwargs)
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if name == "size" and dim is not None:
        local = local_shape(x)
        return x.rows.count if dim in (0, -len(local)) else local[dim]
    if name == "len":
        return x.rows.count
    return size_from_shape(name, global_shape(x), x, args, kwargs)


def size_from_shape(
    name: str, shape: Sequence[int], like: Tensor, args: Any, kwargs: Any
) -> Any:
    """Implements shape, size, len, numel and nbytes for a given shape and dtype."""
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if name == "len" or (name == "size" and dim is not None):
        return shape[dim or 0]
    if name in ("shape", "size"):
        return torch.Size(shape)
    return math.prod(shape) * (like.element_size() if name == "nbytes" else 1)


def sizes_inside(
    name: str, found: Any, rows: Rows, place: int, args: Any, kwargs: Any
) -> Any:
    """Returns sizes inside a layer, with a `NumRows` in place of the local number.

    Args:
        name: the function: shape, size, len, numel or nbytes.
        found: its answer here.
        rows: the rows of the tensor.
        place: the dim of the rows.
        args, kwargs: the arguments of the function.

    Raises:
        TypeError: for len() asked by a layer of the user's own, which Python makes an int.
    """
    if rows.mesh.size == 1:
        return found
    if isinstance(found, torch.Size):
        return torch.Size((*found[:place], NumRows.of(rows), *found[place + 1 :]))
    if name == "size":
        dim = args[1] if len(args) > 1 else kwargs["dim"]
        with torch._C.DisableTorchFunctionSubclass():
            return NumRows.of(rows) if dim % args[0].dim() == place else found
    if name == "len":
        if place == 0 and rows.whole and not called_by_pyg():
            raise TypeError(
                "len(x) inside a layer counts the rows of this rank alone, and the number "
                "of ranks must not change the answer; use x.size(0)"
            )
        return found
    with torch._C.DisableTorchFunctionSubclass():
        times = math.prod(n for k, n in enumerate(args[0].shape) if k != place)
        times *= args[0].element_size() if name == "nbytes" else 1
    return NumRows.of(rows, times)


def new_by_size(func: Callable, args: Any, kwargs: Any) -> Any:
    """Makes x.new_zeros(n, ...) and similar calls row-sharded, if n is x's number of rows.

    For values per edge, also if n is the number of nodes (and not of edges, nor one more, as
    in a tree: pointers to edges have that length). Any other first size gives an ordinary
    tensor, equal on all ranks. So `new_zeros(64, 64)` of 64 rows is row-sharded, even where
    the second 64 is a width.
    """
    x, *rest = args
    if not isinstance(x, RowShardedTensor):
        return call_local(func, args, kwargs)
    listed = bool(rest) and not isinstance(rest[0], int)
    full = func.__name__ == "new_full"
    sizes = list(rest[0]) if listed else rest[: 1 if full else None]
    sizes = sizes or list(kwargs.get("size", ()))
    if x.reads_local:
        found = call_local(func, args, kwargs)
        return _wrapped_inside(x, found, sizes)
    rows = rows_of_length(x, sizes[0]) if sizes else None
    if rows is None:
        return call_local(func, args, kwargs)
    kwargs = {k: v for k, v in kwargs.items() if k != "size"}
    wants_gradient = kwargs.pop("requires_grad", False)
    values = rest[1:] if full and rest else ()
    local = call_local(func, (x, (len(rows), *sizes[1:]), *values), kwargs)
    out = x.wrap(local, rows)
    return out.requires_grad_() if wants_gradient else out


def _wrapped_inside(x: RowShardedTensor, found: Tensor, sizes: Any) -> Tensor:
    """Returns a new tensor inside a layer, row-sharded if its first size counts x's rows."""
    if not sizes or not is_count_of(sizes[0], x.rows):
        return found
    wants_gradient = found.requires_grad
    out = x.wrap(found.detach(), x.rows)
    return out.requires_grad_() if wants_gradient else out


def is_count_of(size: Any, rows: Rows) -> bool:
    """Tells whether a size inside a layer is the number of rows, not a multiple of it."""
    if not (isinstance(size, NumRows) and rows.whole):
        return False
    counts = (int(size), size.total) == (len(rows), rows.total)
    return counts and size.rows.same_as(rows)


def rows_of_length(x: RowShardedTensor, count: int) -> Rows | None:
    """Returns the rows for a first size beside `x`; None if it is no number of rows."""
    rows = x.rows
    of_nodes = rows.nodes is not None and count == rows.nodes.total
    if count == rows.count:
        return None if of_nodes else rows  # which of the two it means is not known
    return rows.nodes if of_nodes and count != rows.count + 1 else None


def with_local_size(x: RowShardedTensor, sizes: Any) -> Any:
    """Returns sizes in which the whole tensor's number of rows is replaced by this rank's."""
    if x.reads_local or not sizes:
        return sizes
    first = sizes[0]
    if type(first) is int:
        if first != -1 and first == x.rows.count:
            return (local_shape(x)[0], *sizes[1:])
        return sizes
    if isinstance(first, (tuple, list)) and first and type(first[0]) is int:
        return ((*with_local_size(x, tuple(first)),), *sizes[1:])
    return sizes


def regroups(x: RowShardedTensor, args: Any, kwargs: Any) -> bool:
    """Tells whether a new shape regroups the rows of `x`, as `[k, f n / k]` of `[n, f]`.

    A lone -1, which joins all rows, is not decided here.
    """
    shape = args[0] if len(args) == 1 else args
    shape = shape or kwargs.get("size", kwargs.get("shape", ()))
    if x.reads_local or not isinstance(shape, (tuple, list)) or not shape:
        return False
    first, *rest = shape
    if type(first) is not int or not all(type(size) is int for size in rest):
        return False
    if first != -1:
        return bool(first != x.rows.count)
    return (
        bool(rest)
        and -1 not in rest
        and math.prod(rest) != math.prod(local_shape(x)[1:])
    )

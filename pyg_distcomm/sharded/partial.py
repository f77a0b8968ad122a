"""Defines `PartialSum`, a sum over rows of which each rank holds its own part.

[Note: gradients] The gradient of a plain parameter is contracted over the rows of all ranks.
Each rank has its part of it, and the sum is needed only when it is read. So an op of a
backward pass that sums over rows returns a `PartialSum`, which is summed

    at the end of the pass, with all others, in one all-reduce, if torch accumulates it in the
    `.grad` of a leaf: that is an ordinary tensor, whose values arrive then, or a `PartialSum`
    until then, if hooks are called with the leaf;
    by the wrapper of `pdc.replicate`, whose mean of P times the parts is their sum;
    at once, if any other op reads it.

Whether a leaf has hooks decides nothing that ranks send: they may be on one rank alone.

Linear ops (a transpose, a sum of two) keep it a part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.consistency import comparer_of
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.sharded.agreement import (
    compare_call,
    in_backward,
    is_averaged,
    is_wrapped,
)
from pyg_distcomm.sharded.dist_tensor import (
    DistTensor,
    ManyRanks,
    check_writes,
    note_copies,
    shares_memory,
    take_anew,
)

aten = torch.ops.aten
_ACCUMULATE = "torch::autograd::AccumulateGrad"


class PartialSum(ManyRanks, Tensor):
    """A tensor whose value is the sum of `part` over the ranks."""

    __slots__ = ("_before", "_copied", "_value", "mesh", "part")
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    part: Tensor
    mesh: Mesh
    _value: Tensor | None
    _before: Tensor | None  # what the sum is added to, in place
    _copied: Any  # of a copy where torch has a view, how it was taken: see `take_anew`

    @staticmethod
    def __new__(cls, part: Tensor, mesh: Mesh) -> Any:
        """Wraps the part of this rank."""
        self = Tensor._make_wrapper_subclass(
            cls, part.shape, strides=part.stride(), dtype=part.dtype, device=part.device
        )
        self.part, self.mesh, self._value = part, mesh, None
        self._copied, self._before = False, None
        return self

    @staticmethod
    def copy_of(value: Tensor, mesh: Mesh) -> PartialSum:
        """Returns a sum that is known, of which torch would have a view; no op writes to it."""
        out = PartialSum(value, mesh)
        out._value, out._copied = value, True
        return out  # type: ignore[no-any-return]

    def value(self) -> Tensor:
        """Returns the sum; collective at the first call."""
        take_anew(self)
        if self._value is None:
            self._know(collectives.all_reduce(self.part, self.mesh.world))
        assert self._value is not None
        return self._value

    full_tensor = value

    def _know(self, total: Tensor) -> None:
        before = self._before
        self._value = total if before is None else before.add_(total)

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Keeps linear ops partial, and gives every other op the sum."""
        kwargs = kwargs or {}
        x = args[0]
        check_writes(func, args, kwargs)
        for a in args:
            if type(a) is PartialSum and a._before is not None:
                a.value()  # which is no linear function of the part
        if type(x) is PartialSum and x._copied and torch.is_inference_mode_enabled():
            if not x.is_inference():  # as of sharded ones: see DistTensor
                with torch.inference_mode(False), torch.no_grad():
                    return cls.__torch_dispatch__(func, types, args, kwargs)
        if func in _LINEAR and _is_linear(args):
            if func in _COPIES and _accumulates():
                if is_averaged(_leaf(), x.mesh):
                    return x.part * x.mesh.size
                return x.value() if is_wrapped(_leaf(), x.mesh) else _later(x)
            return PartialSum(func(x.part, *args[1:], **kwargs), x.mesh)
        if func in _SUMS and not kwargs and len(args) == 2:
            a, b = args
            both = isinstance(a, PartialSum) and isinstance(b, PartialSum)
            if both and a._value is None and b._value is None:
                return PartialSum(a.part + b.part, a.mesh)
            found = with_rows(func, args)
            if found is not None:
                return found
            into_leaf = func is aten.add_.Tensor and not isinstance(a, PartialSum)
            if into_leaf and _accumulates():
                if is_averaged(_leaf(), b.mesh):
                    return a.add_(b.part, alpha=b.mesh.size)
                if not is_wrapped(_leaf(), b.mesh):
                    return _later(b, a)
        out = func(*tree_map(plain, args), **tree_map(plain, kwargs))
        if type(x) is PartialSum and x._copied and shares_memory(func):
            out = tree_map(lambda part: PartialSum.copy_of(part, x.mesh), out)
            if func.is_view:
                note_copies(out, func, args, kwargs)
        return out

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if self._copied:
            return repr(self.value())
        return (
            f"PartialSum({list(self.shape)} on rank {self.mesh.rank}/{self.mesh.size})"
        )


_COPIES = {aten.detach.default, aten.clone.default}
_LINEAR = _COPIES | {
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
    aten.unsqueeze.default,
    aten.select.int,
    aten.sum.dim_IntList,
    aten.select_backward.default,
    aten.slice_backward.default,
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.div.Scalar,
    aten.neg.default,
}
_SUMS = {aten.add.Tensor, aten.add_.Tensor}


def plain(x: Any) -> Any:
    """Returns the value of a partial sum, and anything else as it is; collective for a sum."""
    return x.value() if isinstance(x, PartialSum) else x


def _is_linear(args: Any) -> bool:
    """Tells whether an op is one of a sum that is not known and of plain values."""
    a, *by = args
    unknown = type(a) is PartialSum and a._value is None
    return unknown and all(not isinstance(b, Tensor) or type(b) is Tensor for b in by)


def with_rows(func: Any, args: Any) -> PartialSum | None:
    """Returns the sum of a partial sum and of a sharded tensor, a partial sum.

    A plain leaf of which rows are read by ids and by place has such a gradient. None if the
    sum is known, or is none of all rows.
    """
    if func is not aten.add.Tensor or len(args) != 2:
        return None
    x, y = args if isinstance(args[0], PartialSum) else args[::-1]
    if type(x) is not PartialSum or type(y) is not DistTensor or x.dtype != y.dtype:
        return None
    if x._value is not None or x._before is not None or x.shape != y.shape:
        return None
    if not y.rows.whole or y.rows.mesh is not x.mesh:
        return None
    at = y.rows.place_on(x.part.device)
    return PartialSum(x.part.index_add(y.dim_, at, y.local), x.mesh)


def over_ranks(part: Tensor, mesh: Any, op: str = "sum") -> Tensor:
    """Returns the sum (or "max", "min") of parts over the ranks, compared at first use."""
    compare_call(mesh, part)
    return collectives.all_reduce(part, mesh.world, op)


def summed_over_ranks(part: Tensor, mesh: Mesh) -> Tensor:
    """Returns the sum of a part over the ranks, in a backward pass when it is read."""
    if in_backward():
        if mesh.size == 1 and not (isinstance(mesh, Mesh) and mesh.world.observer):
            return part  # the mesh of a chunk has no axis
        if not torch.is_grad_enabled():
            return PartialSum(part, mesh)
    return over_ranks(part, mesh)


def accumulates_plain() -> bool:
    """Tells whether torch accumulates the gradient of a leaf that is not sharded."""
    if not _accumulates():
        return False
    node: Any = torch._C._current_autograd_node()
    return not isinstance(node.variable, DistTensor)


def _accumulates() -> bool:
    """Tells whether torch accumulates the gradient of a leaf."""
    node = torch._C._current_autograd_node()
    return node is not None and node.name() == _ACCUMULATE


def _leaf() -> Any:
    """Returns the leaf whose gradient torch accumulates."""
    node: Any = torch._C._current_autograd_node()
    return node.variable


def _finish(sums: list[tuple[PartialSum, Tensor]], mesh: Mesh) -> None:
    """Sums all parts of a pass, in one all-reduce for each type, for their leaves."""
    unknown = [total for total, _ in sums if total._value is None]
    for dtype in dict.fromkeys(total.dtype for total in unknown):
        these = [total for total in unknown if total.dtype == dtype]
        flat = torch.cat([total.part.reshape(-1) for total in these])
        if mesh.world.observer is not None:
            mesh.world.observer("parameters", flat, mesh.world)
            continue
        total = collectives.all_reduce(flat, mesh.world)
        parts = total.split([each.numel() for each in these])
        for each, part in zip(these, parts, strict=True):
            each.part.copy_(part.view(each.shape))
    for total in unknown:
        total._know(total.part)
    for total, leaf in sums:
        if leaf.grad is total:
            leaf.grad = total._value
    if isinstance(mesh, Mesh) and mesh.size > 1:  # after steps of optimizers, at times
        counts = mesh.sharded.setdefault("passes made", WeakTensorKeyDictionary())
        leaves = [leaf for _, leaf in reversed(sums)]
        made = counts[leaves[0]] = counts.get(leaves[0], 0) + 1
        if made > 1 and mesh.is_due(made):
            comparer_of(mesh).compare_trained(dict(enumerate(leaves)))


def _sums_of_pass(mesh: Mesh) -> list[tuple[PartialSum, Tensor]]:
    """Returns what is summed at the end of this backward pass: sums, and their leaves."""
    task = torch._C._current_graph_task_id()
    passes = mesh.sharded.setdefault("passes", {})
    if task not in passes:
        passes[task] = []

        def finish() -> None:
            with torch.no_grad():
                _finish(passes.pop(task), mesh)

        torch.autograd.Variable._execution_engine.queue_callback(finish)
    return passes[task]  # type: ignore[no-any-return]


def _later(x: PartialSum, before: Tensor | None = None) -> Tensor:
    """Returns a tensor that holds the sum once the pass has ended.

    It is added to the gradient that the leaf had before, if any, in place.
    """
    part, leaf = x.part.clone(), _leaf()  # parts may share memory
    total: Any = PartialSum(part, x.mesh)
    total._before = before
    _sums_of_pass(x.mesh).append((total, leaf))
    hooked = bool(leaf._post_accumulate_grad_hooks)
    if before is None:
        return total if hooked else part.view(part.shape)
    if hooked:
        leaf.grad = total
    return before


class _Across(torch.autograd.Function):
    """Sums parts over the ranks; or, as its adjoint, takes plain tensors as such parts."""

    @staticmethod
    def forward(
        ctx: Any, mesh: Mesh, sums: bool, *given: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.mesh, ctx.sums = mesh, sums
        ctx.set_materialize_grads(False)
        if sums:
            return _each(lambda x: collectives.all_reduce(x, mesh.world), given)
        return tuple([None if x is None else x.view_as(x) for x in given])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if ctx.sums or torch.is_grad_enabled():
            # sums are taken here, before ranks compute in ways of their own
            grads = _each(plain, grads)
            return None, None, *_Across.apply(ctx.mesh, not ctx.sums, *grads)
        # contiguous: torch copies a gradient of another layout, which would sum it at once
        found = _each(lambda g: summed_over_ranks(g.contiguous(), ctx.mesh), grads)
        return None, None, *found


def _each(fn: Callable[[Tensor], Tensor], given: Any) -> tuple[Tensor | None, ...]:
    return tuple([None if x is None else fn(x) for x in given])


def entered(x: Tensor, mesh: Any) -> Tensor:
    """Returns a plain tensor for a computation on own rows; its gradient is summed."""
    return all_entered([x], mesh)[0]


def all_entered(given: Sequence[Tensor], mesh: Any) -> list[Tensor]:
    """Returns plain tensors for one computation on own rows; their gradients are summed.

    All of them in the order given, whatever is computed first on some rank.
    """
    several = isinstance(mesh, Mesh) and (mesh.size > 1 or mesh.world.observer)
    summed = [x for x in given if x.requires_grad] if several else []
    if not summed:
        return list(given)
    found = iter(_Across.apply(mesh, False, *summed))
    return [next(found) if x.requires_grad else x for x in given]

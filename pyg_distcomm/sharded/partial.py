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

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.sharded.agreement import in_backward, is_averaged, is_wrapped
from pyg_distcomm.sharded.dist_tensor import DistTensor, check_writes

aten = torch.ops.aten
_ACCUMULATE = "torch::autograd::AccumulateGrad"


class PartialSum(Tensor):
    """A tensor whose value is the sum of `part` over the ranks."""

    __slots__ = ("_copied", "_value", "mesh", "part")
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    part: Tensor
    mesh: Mesh
    _value: Tensor | None
    _copied: bool  # whether it is a copy where torch has a view

    @staticmethod
    def __new__(cls, part: Tensor, mesh: Mesh) -> Any:
        """Wraps the part of this rank."""
        self = Tensor._make_wrapper_subclass(
            cls, part.shape, strides=part.stride(), dtype=part.dtype, device=part.device
        )
        self.part, self.mesh, self._value = part, mesh, None
        self._copied = False
        return self

    @staticmethod
    def copy_of(value: Tensor, mesh: Mesh) -> PartialSum:
        """Returns a sum that is known, of which torch would have a view; no op writes to it."""
        out = PartialSum(value, mesh)
        out._value, out._copied = value, True
        return out  # type: ignore[no-any-return]

    def value(self) -> Tensor:
        """Returns the sum; collective at the first call."""
        if self._value is None:
            self._value = collectives.all_reduce(self.part, self.mesh.world)
        return self._value

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Keeps linear ops partial, and gives every other op the sum."""
        kwargs = kwargs or {}
        x = args[0]
        check_writes(func, args, kwargs)
        if type(x) is PartialSum and x._copied and torch.is_inference_mode_enabled():
            if not x.is_inference():  # as of sharded ones: see DistTensor
                with torch.inference_mode(False):
                    return cls.__torch_dispatch__(func, types, args, kwargs)
        if func in _VIEWS and x._value is None:
            if func in _COPIES and _accumulates():
                if is_averaged(_leaf(), x.mesh):
                    return x.part * x.mesh.size
                return x.value() if is_wrapped(_leaf(), x.mesh) else _later(x)
            return PartialSum(func(x.part, *args[1:], **kwargs), x.mesh)
        if func in _PRODUCTS and _is_linear(args):
            a, *by = args
            return PartialSum(func(a.part, *by), a.mesh)
        if func in _SUMS and not kwargs and len(args) == 2:
            a, b = args
            both = isinstance(a, PartialSum) and isinstance(b, PartialSum)
            if both and a._value is None and b._value is None:
                return PartialSum(a.part + b.part, a.mesh)
            into_leaf = func is aten.add_.Tensor and not isinstance(a, PartialSum)
            if into_leaf and _accumulates():
                if is_averaged(_leaf(), b.mesh):
                    return a.add_(b.part, alpha=b.mesh.size)
                if not _is_read(b.mesh):
                    _pass_of(b.mesh).added.append((a, b.part))
                    return a

        def summed(value: Any) -> Any:
            return value.value() if isinstance(value, PartialSum) else value

        out = func(*tree_map(summed, args), **tree_map(summed, kwargs))
        if type(x) is PartialSum and x._copied and _is_view(func):
            return tree_map(lambda part: PartialSum.copy_of(part, x.mesh), out)
        return out

    def tolist(self) -> Any:
        """Returns the values as nested lists."""
        return self.value().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Returns the values as an array."""
        return self.value().numpy(force=force)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.value().detach().__array__(dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if self._copied:
            return repr(self.value())
        return (
            f"PartialSum({list(self.shape)} on rank {self.mesh.rank}/{self.mesh.size})"
        )


_COPIES = {aten.detach.default, aten.clone.default}
_VIEWS = _COPIES | {
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
    aten.unsqueeze.default,
    aten.sum.dim_IntList,
    aten.select_backward.default,
    aten.slice_backward.default,
}
_SUMS = {aten.add.Tensor, aten.add_.Tensor}
_PRODUCTS = {
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.div.Scalar,
    aten.neg.default,
}


def _is_view(func: Any) -> bool:
    """Tells whether the result of an op shares memory with an operand."""
    return any(r.alias_info is not None for r in func._schema.returns)


def _is_linear(args: Any) -> bool:
    """Tells whether a product is one of a sum that is not known and of plain values."""
    a, *by = args
    unknown = type(a) is PartialSum and a._value is None
    return unknown and all(not isinstance(b, Tensor) or type(b) is Tensor for b in by)


def summed_over_ranks(part: Tensor, mesh: Mesh) -> Tensor:
    """Returns the sum of a part over the ranks, in a backward pass when it is read."""
    if mesh.size == 1 and not in_backward():
        return collectives.all_reduce(part, mesh.world)
    if mesh.size == 1 and not (isinstance(mesh, Mesh) and mesh.world.observer):
        return part  # the mesh of a chunk has no axis
    if in_backward() and not torch.is_grad_enabled():
        return PartialSum(part, mesh)
    return collectives.all_reduce(part, mesh.world)


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


def _is_read(mesh: Mesh) -> bool:
    """Tells whether what is added to the gradient of the leaf is read before the pass ends."""
    leaf = _leaf()
    return bool(leaf._post_accumulate_grad_hooks) or is_wrapped(leaf, mesh)


@dataclass
class _Pass:
    """Holds what is summed at the end of one backward pass."""

    task: int
    written: list[Tensor] = field(default_factory=list)  # in place
    watched: list[tuple[Tensor, PartialSum]] = field(default_factory=list)  # by hooks
    added: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def finish(self, mesh: Mesh) -> None:
        """Sums all parts, in one all-reduce for each type."""
        written = [
            part.part if isinstance(part, PartialSum) else part
            for part in self.written
            if not isinstance(part, PartialSum) or part._value is None
        ]
        parts = [*written, *(part for _, part in self.added)]
        for dtype in dict.fromkeys(part.dtype for part in parts):
            these = [part for part in parts if part.dtype == dtype]
            flat = torch.cat([part.reshape(-1) for part in these])
            if mesh.world.observer is not None:
                mesh.world.observer("parameters", flat, mesh.world)
                continue
            total = collectives.all_reduce(flat, mesh.world)
            sums = total.split([part.numel() for part in these])
            for part, s in zip(these, sums, strict=True):
                part.copy_(s.view(part.shape))
        for target, part in self.added:
            target.add_(part)
        for leaf, total in self.watched:
            total._value = total.part if total._value is None else total._value
            if leaf.grad is total:
                leaf.grad = total._value


def _pass_of(mesh: Mesh) -> _Pass:
    task = torch._C._current_graph_task_id()
    passes = mesh.sharded.setdefault("passes", {})
    if task not in passes:
        passes[task] = _Pass(task)

        def finish() -> None:
            with torch.no_grad():
                passes.pop(task).finish(mesh)

        torch.autograd.Variable._execution_engine.queue_callback(finish)
    return passes[task]  # type: ignore[no-any-return]


def _later(x: PartialSum) -> Tensor:
    """Returns a tensor that holds the sum once the pass has ended."""
    out, now, leaf = x.part.clone(), _pass_of(x.mesh), _leaf()  # parts may share memory
    if leaf._post_accumulate_grad_hooks:
        total: Any = PartialSum(out, x.mesh)
        now.watched.append((leaf, total))
        now.written.append(total)
        return total  # type: ignore[no-any-return]
    now.written.append(out)
    return out.view(out.shape)


class _Enter(torch.autograd.Function):
    """Takes a plain tensor into a computation on own rows; its gradient is summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh) -> Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():
            return _Sum.apply(g, ctx.mesh), None
        return summed_over_ranks(g, ctx.mesh), None


class _Sum(torch.autograd.Function):
    """Sums parts over the ranks; the gradient of each part is that of the sum."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, mesh: Mesh) -> Tensor:
        ctx.mesh = mesh
        return collectives.all_reduce(part, mesh.world)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return _Enter.apply(g, ctx.mesh), None


def entered(x: Tensor, mesh: Any) -> Tensor:
    """Returns a plain tensor for a computation on own rows; its gradient is summed."""
    several = isinstance(mesh, Mesh) and (mesh.size > 1 or mesh.world.observer)
    summed = several and x.requires_grad
    return _Enter.apply(x, mesh) if summed else x

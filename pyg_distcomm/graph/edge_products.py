"""Computes differentiable sums, means, maxima and softmax over edges in CSR form.

Gradients are products as well, so that each function is twice differentiable. The edges are
`GroupedEdges`; see `graph.local_adjacency`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pyg_distcomm import kernels
from pyg_distcomm.graph.local_adjacency import GroupedEdges
from pyg_distcomm.kernels import memory
from pyg_distcomm.ops.csr import Pattern


def _unless_undefined(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns None for the gradients of inputs if that of the output is None.

    An output of which the loss reads nothing has an undefined gradient in a backward pass of
    DistributedDataParallel, whose `find_unused_parameters` must find parameters behind it
    without a gradient, as they are behind torch's own operations; zeros would count as one.
    """

    @functools.wraps(backward)
    def run(ctx: Any, g: Tensor | None) -> Any:
        return (None,) * len(ctx.needs_input_grad) if g is None else backward(ctx, g)

    return run


class _SpMM(torch.autograd.Function):
    """Z = A X; dX = A^T dZ; dvalue_e = <dZ_row(e), X_col(e)>; for each head, if any."""

    @staticmethod
    def forward(pattern: Pattern, value: Tensor | None, x: Tensor) -> Tensor:
        return kernels.spmm(pattern.rowptr, pattern.col, value, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.pattern, value, x = inputs
        ctx.save_for_backward(value, x if ctx.needs_input_grad[1] else None)

    @staticmethod
    @_unless_undefined
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
        value, x = ctx.saved_tensors
        by_value = by_x = None
        if ctx.needs_input_grad[1]:
            by_value = _SDDMM.apply(ctx.pattern, g, x)
        if ctx.needs_input_grad[2]:
            back, order = ctx.pattern.transpose
            value = None if value is None else value.index_select(0, order)
            by_x = _SpMM.apply(back, value, g)
        return None, by_value, by_x


class _SDDMM(torch.autograd.Function):
    """h_e = <g_row(e), x_col(e)>."""

    @staticmethod
    def forward(pattern: Pattern, g: Tensor, x: Tensor) -> Tensor:
        return kernels.sddmm(pattern.rowptr, pattern.col, g, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.pattern, g, x = inputs
        ctx.save_for_backward(g, x)

    @staticmethod
    @_unless_undefined
    def backward(ctx: Any, h: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
        g, x = ctx.saved_tensors
        by_x = None
        if ctx.needs_input_grad[2]:
            back, order = ctx.pattern.transpose
            by_x = _SpMM.apply(back, h.index_select(0, order), g)
        by_g = _SpMM.apply(ctx.pattern, h, x) if ctx.needs_input_grad[1] else None
        return None, by_g, by_x


class _PairScores(torch.autograd.Function):
    """s_e = <a, LeakyReLU(g_row(e) + x_col(e))> for each head."""

    @staticmethod
    def forward(
        pattern: Pattern, g: Tensor, x: Tensor, a: Tensor, slope: float
    ) -> Tensor:
        return kernels.pair_scores(pattern.rowptr, pattern.col, g, x, a, slope)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.pattern, g, x, a, ctx.slope = inputs
        ctx.save_for_backward(g, x, a)

    @staticmethod
    @_unless_undefined
    def backward(ctx: Any, by: Tensor) -> tuple[Any, ...]:
        g, x, a = ctx.saved_tensors
        csr, needs = (ctx.pattern.rowptr, ctx.pattern.col), ctx.needs_input_grad
        back, order = ctx.pattern.transpose
        run: Any = kernels.pair_scores_grad
        run = run.definition if torch.is_grad_enabled() else run  # derives it, too
        by_g = by_x = by_a = None
        if needs[1] or needs[3]:
            by_g, by_a = run(*csr, g, x, a, ctx.slope, by, needs[3])
        if needs[2]:
            turned = back.rowptr, back.col, x, g, a, ctx.slope
            by_x, _ = run(*turned, by.index_select(0, order), False)
        return None, by_g, by_x, by_a, None


class _Softmax(torch.autograd.Function):
    """y_e = exp(a_e) / sum of its row; da = y (dy - sum of y dy over its row)."""

    @staticmethod
    def forward(pattern: Pattern, a: Tensor) -> Tensor:
        return kernels.segment_softmax(pattern.rowptr, a)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.pattern = inputs[0]
        ctx.save_for_backward(output)

    @staticmethod
    @_unless_undefined
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor]:
        (y,) = ctx.saved_tensors
        rowptr = ctx.pattern.rowptr
        if torch.is_grad_enabled():  # which derives this, too
            return None, kernels.segment_softmax_grad.definition(rowptr, y, g)
        return None, kernels.segment_softmax_grad(rowptr, y, g)


class _Max(torch.autograd.Function):
    """z_i = max of x_j over its edges; edges that tie share the gradient."""

    @staticmethod
    def forward(pattern: Pattern, x: Tensor) -> Tensor:
        return kernels.segment_max(pattern.rowptr, pattern.col, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.pattern = inputs[0]
        ctx.save_for_backward(inputs[1], output)

    @staticmethod
    @_unless_undefined
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor]:
        x, z = ctx.saved_tensors
        args = ctx.pattern.rowptr, ctx.pattern.col, x.detach(), z.detach(), g
        if torch.is_grad_enabled():
            return None, kernels.segment_max_grad.definition(*args)
        return None, kernels.segment_max_grad(*args)


class _Linear(torch.autograd.Function):
    """Y = X W^T + b + X_root R^T; what adds up is added in place."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        root: Tensor | None,
        own: Tensor | None,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        by_x, by_weight, _, by_root, by_own = ctx.needs_input_grad
        ctx.save_for_backward(
            x if by_weight else None,
            weight if by_x else None,
            root if by_own else None,
            own if by_root else None,
        )
        y = _dense(x, weight.t(), bias)
        return y if root is None or own is None else y.addmm_(root, own.t())

    @staticmethod
    @_unless_undefined
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        x, weight, root, own = ctx.saved_tensors
        needs = ctx.needs_input_grad
        return (
            _dense(g, weight) if needs[0] else None,
            g.t() @ x if needs[1] else None,
            g.sum(0) if needs[2] else None,
            _dense(g, own) if needs[3] else None,
            g.t() @ root if needs[4] else None,
        )


def _dense(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns `X W + b`, in a kept block where torch derives nothing from it."""
    op = torch.ops.aten.mm.default if bias is None else torch.ops.aten.addmm.default
    given = (x, weight) if bias is None else (bias, x, weight)
    y: Tensor = op(*given) if torch.is_grad_enabled() else memory.computed(op, *given)
    return y


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    root: Tensor | None = None,
    own: Tensor | None = None,
) -> Tensor:
    """Returns `X W^T + b`, and adds `X_root R^T` in place, if given.

    Shapes: x [n, F_in], weight [F_out, F_in], bias [F_out], root [n, F_root], own [F_out,
    F_root]; returns [n, F_out].
    """
    given = [t for t in (x, weight, bias, root, own) if t is not None]
    alike = all(t.dtype is x.dtype for t in given) and x.is_floating_point()
    alike = alike and x.dim() == 2
    transformed = torch._C._are_functorch_transforms_active()
    transformed = transformed or forward_ad._current_level >= 0
    if alike and not transformed and not torch.is_autocast_enabled(x.device.type):
        y: Tensor = _Linear.apply(x, weight, bias, root, own)
        return y
    y = torch.nn.functional.linear(x, weight, bias)
    if root is None or own is None:
        return y
    return y + torch.nn.functional.linear(root, own)


class _MultiplyLinear(torch.autograd.Function):
    """Y = A X W^T + b + X_root R^T; what adds up is added in place, and no row is padded."""

    @staticmethod
    def forward(
        ctx: Any,
        pattern: Pattern,
        value: Tensor | None,
        first: bool,
        x: Tensor,
        root: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        own: Tensor | None,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        csr = pattern.rowptr, pattern.col, value
        if first:
            sums = _rows_of(kernels.spmm(*csr, x), weight.size(1))
            y = _dense(sums, weight.t(), bias)
        else:
            sums = None
            y = kernels.spmm(*csr, _dense(x, weight.t()))
            y = y if bias is None else y.add_(bias)
        if root is not None and own is not None:
            y.addmm_(root[: len(y)], own.t())
        ctx.pattern, ctx.first, ctx.shared = pattern, first, root is x
        sums = sums if ctx.needs_input_grad[5] else None
        ctx.save_for_backward(value, x, root, weight, own, sums)
        return y

    @staticmethod
    @_unless_undefined
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        value, x, root, weight, own, sums = ctx.saved_tensors
        needs = ctx.needs_input_grad
        g_x = g_root = g_weight = g_own = None
        if ctx.first:
            if needs[5]:
                if torch.is_grad_enabled():  # which derives this, too
                    sums = _SpMM.apply(ctx.pattern, value, x)
                    sums = _rows_of(sums, weight.size(1))
                g_weight = g.t() @ sums
            if needs[3]:
                g_sums = _rows_of(_dense(g, weight), x.size(1))
                g_x = _back(ctx.pattern, value, g_sums)
        elif needs[3] or needs[5]:
            g_y = _back(ctx.pattern, value, g)
            g_weight = g_y.t() @ x if needs[5] else None
            g_x = _dense(g_y, weight) if needs[3] else None
        if own is not None:
            g_own = g.t() @ root[: len(g)] if needs[7] else None
            if ctx.shared and g_x is not None:
                if torch.is_grad_enabled():
                    g_x = g_x + _padded(g @ own, len(x))
                else:
                    g_x[: len(g)].addmm_(g, own)
            elif needs[4]:
                g_root = _padded(g @ own, len(root))
        g_bias = g.sum(0) if needs[6] else None
        return None, None, None, g_x, g_root, g_weight, g_bias, g_own


def _back(pattern: Pattern, value: Tensor | None, g: Tensor) -> Tensor:
    """Returns `A^T g`, for an A whose values are constant."""
    value = None if value is None else pattern.transposed_values(value)
    x: Tensor = _SpMM.apply(pattern.transpose[0], value, g)
    return x


def _rows_of(x: Tensor, width: int) -> Tensor:
    """Returns the same numbers in rows of a width: those of all relations of a node in one."""
    return x if x.size(1) == width else x.view(-1, width)


def _padded(rows: Tensor, count: int) -> Tensor:
    """Pads rows with zeros to `count` rows."""
    rest = count - len(rows)
    return torch.nn.functional.pad(rows, (0, 0, 0, rest)) if rest else rows


class _Gather(torch.autograd.Function):
    """y_e = x_index(e); dx_j = sum of dy_e over index(e) = j."""

    @staticmethod
    def forward(x: Tensor, index: Tensor) -> Tensor:
        return kernels.gather_rows(x, index)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)
        x, ctx.index = inputs
        ctx.count = len(x)

    @staticmethod
    @_unless_undefined
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return _ScatterAdd.apply(g, ctx.index, ctx.count), None


class _ScatterAdd(torch.autograd.Function):
    """y_j = sum of x_e over index(e) = j; dx_e = dy_index(e)."""

    @staticmethod
    def forward(x: Tensor, index: Tensor, count: int) -> Tensor:
        return kernels.scatter_add_rows(x.new_zeros(count, x.size(1)), index, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.index = inputs[1]

    @staticmethod
    @_unless_undefined
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return _Gather.apply(g, ctx.index), None, None


def ends_added(edges: GroupedEdges, source: Tensor, target: Tensor) -> Tensor:
    """Returns `s_e = source_j + target_i` for each nonzero e = (j, i), differentiably.

    Shapes: source [>= n, h], target [>= m, h]; returns [nnz, h].
    """
    return rows_at(source, edges.pattern.col) + rows_at(target, edges.targets)


def rows_at(x: Tensor, index: Tensor) -> Tensor:
    """Returns the rows of `x` `[n, f]` at `index` `[k]`, differentiably."""
    y: Tensor = _Gather.apply(x, index)
    return y


def sums_at(x: Tensor, index: Tensor, count: int) -> Tensor:
    """Returns sums of the rows of `x` `[k, f]` with the same index, `[count, f]`."""
    y: Tensor = _ScatterAdd.apply(x, index, count)
    return y


def dots(edges: GroupedEdges, target: Tensor, source: Tensor) -> Tensor:
    """Returns `<target_i, source_j>` of each head for each nonzero (j, i), differentiably.

    Shapes: target [m, h, f], source [n, h, f]; returns [nnz, h].
    """
    edges = edges.prefix(edges.num_targets, len(source))
    s: Tensor = _SDDMM.apply(edges.pattern, target, source)
    return s


def pair_scores(
    edges: GroupedEdges, target: Tensor, source: Tensor, a: Tensor, slope: float
) -> Tensor:
    """Returns `<a, LeakyReLU(target_i + source_j)>` for each nonzero, differentiably.

    Shapes: target [m, h, f], source [n, h, f], a [h, f]; returns [nnz, h].
    """
    edges = edges.prefix(edges.num_targets, len(source))
    s: Tensor = _PairScores.apply(edges.pattern, target, source, a, slope)
    return s


def softmax_of(edges: GroupedEdges, a: Tensor) -> Tensor:
    """Returns the softmax of `a` `[nnz, h]` over the edges of each target."""
    y: Tensor = _Softmax.apply(edges.pattern, a)
    return y


def multiply(edges: GroupedEdges, value: Tensor | None, x: Tensor) -> Tensor:
    """Returns `A x`, differentiably.

        z_i = sum of value_e x_j over the edges e = (j, i)

    Shapes: edges [m, n], value [nnz] in their order or None, x [n, f] or, with values
    [nnz, h], [n, h, f]; z [m, f] or [m, h, f].
    """
    edges = edges.prefix(edges.num_targets, len(x))
    z: Tensor = _SpMM.apply(edges.pattern, value, x)
    return z


# the time of a number read or written by a product, in multiplications of a dense one
_SPARSE = 8


def sums_first(edges: GroupedEdges, x: Tensor, weight: Tensor) -> bool:
    """Tells whether `(A X) W` is cheaper than `A (X W)`, forward and backward."""
    out, into = weight.shape
    rows, nnz = edges.pattern.shape[0], edges.pattern.nnz
    passes = 2 + x.requires_grad
    first = _SPARSE * nnz * into * (passes - 1) + rows * into * out * passes
    last = _SPARSE * nnz * out * 2 + len(x) * into * out * passes
    return first <= last


def multiply_linear(
    kind: str,
    edges: GroupedEdges,
    x: Tensor,
    root: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    own: Tensor | None,
    *,
    sums_first: bool,
) -> Tensor:
    """Returns `A x W^T + b + root R^T`, of the first m rows of root, differentiably.

    Args:
        kind: "sum", or "mean" for the mean over the edges of each target.
        edges: A, of m targets; or of r rows for each, with sums_first, which W maps at once.
        x, root: features of sources and targets; root may have more than m rows.
        weight, bias, own: W, b and R; None without.
        sums_first: whether to compute (A x) W^T, not A (x W^T).

    Shapes: x [n, f], root [>= m, f_root], weight [out, r f], own [out, f_root]; returns
    [m, out].
    """
    edges = edges.prefix(edges.num_targets, len(x))
    value = edges.mean_values(x.dtype) if kind == "mean" else None
    root = None if own is None else root
    given = x, root, weight, bias, own
    y: Tensor = _MultiplyLinear.apply(edges.pattern, value, sums_first, *given)
    return y


def aggregate(
    kind: str, edges: GroupedEdges, value: Tensor | None, x: Tensor
) -> Tensor:
    """Returns the sum, mean or max of (weighted) rows over the edges of each target."""
    if kind == "max":
        edges = edges.prefix(edges.num_targets, len(x))
        z: Tensor = _Max.apply(edges.pattern, x)
        return z
    if kind == "mean":
        mean = edges.mean_values(x.dtype)
        if value is not None:
            mean = mean if value.dim() == 1 else mean[:, None]
            mean = mean * value
        value = mean
    return multiply(edges, value, x)

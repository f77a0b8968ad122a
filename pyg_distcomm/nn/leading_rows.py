"""Tracks tensors of which a model has computed only the leading rows.

See [Note: trimming] in `nn.trimming`.

A name of a function of torch covers that in `torch`, in `torch.nn.functional` and on `Tensor`,
its in-place form and its operator (`add`, `add_`, `__add__`).
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from pyg_distcomm.sharded.dist_tensor import eager

# elementwise with broadcasting, or acting on the last dims of each row
ROWWISE = frozenset(
    """
    abs absolute acos acosh add addcdiv addcmul angle asin asinh atan atan2 atanh
    bfloat16 bitwise_and bitwise_not bitwise_or bitwise_xor bool byte ceil celu char
    clamp clamp_max clamp_min clip clone conj contiguous copy copysign cos cosh cpu
    cuda deg2rad detach digamma div divide double elu eq erf erfc erfinv exp exp2
    expm1 fill float float_power floor floor_divide floordiv fmax fmin fmod frac
    gelu greater greater_equal gt ge half hardshrink hardsigmoid hardswish hardtanh
    heaviside hypot iand idiv ifloordiv igamma ilshift imul int invert ior ipow
    irshift isclose isfinite isinf isnan isneginf isposinf isreal isub ixor iadd
    itruediv le leaky_relu lerp less less_equal lgamma log log_sigmoid log10 log1p
    log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit
    logsigmoid long lt lshift masked_fill maximum minimum mish mod mul multiply
    mvlgamma nan_to_num ne neg negative nextafter not_equal ones_like pin_memory
    polygamma positive pos pow rad2deg radd rdiv real reciprocal relu relu6
    remainder rfloordiv rlshift rmod rmul ror round rpow rrshift rshift rsqrt rsub
    rtruediv rxor selu sgn short sigmoid sign signbit silu sin sinc sinh softplus
    softshrink softsign sqrt square sub subtract tan tanh tanhshrink threshold to
    truediv true_divide trunc type_as where xlogy xor or and zero zeros_like
    full_like empty_like share_memory _foreach_add _foreach_mul _threshold complex
    polar expit ndtr ndtri log_ndtr entr erfcx i0 i0e i1 i1e gammaln psi xlog1py
    zeta dropout alpha_dropout rrelu
    """.split()
)

# a `dim` decides: local unless it names the rows; by the place of dim, and its default
_DIMS: tuple[tuple[int, Any, str], ...] = (
    (1, None, "sum mean prod amax amin any all var std count_nonzero max min argmax"),
    (1, None, "argmin median nanmedian nanmean nansum"),
    (2, None, "norm linalg_norm vector_norm quantile nanquantile roll"),
    (1, -1, "glu mode sort argsort"),
    (2, -1, "diff kthvalue topk"),
    (9, -1, "pairwise_distance"),
    (1, 0, "unbind"),
    (2, 0, "split chunk tensor_split"),
    (2, 1, "normalize cosine_similarity"),
    (1, "missing", "softmax log_softmax softmin cummax cummin logcumsumexp logsumexp"),
    (1, "missing", "cumsum cumprod flip gather select narrow unflatten"),
    (2, "missing", "cross"),
)
BY_DIM = {
    name: (place, default) for place, default, names in _DIMS for name in names.split()
}

# sizes: the whole tensor's
SIZES = frozenset("shape size numel nelement nbytes len".split())

# facts about dtype, memory or autograd; nothing to wrap
FACTS = frozenset(
    """
    dim ndim ndimension element_size itemsize dtype device layout is_cuda is_cpu
    is_sparse is_floating_point is_complex is_signed is_contiguous is_leaf
    is_quantized is_meta is_mps is_xpu is_nested is_pinned is_shared is_inference
    is_sparse_csr is_same_size is_mkldnn is_conj is_neg is_tensor requires_grad
    grad_fn retains_grad output_nr _version _backward_hooks
    register_post_accumulate_grad_hook stride storage_offset data_ptr get_device
    untyped_storage storage name names has_names _is_view _base hash __hash__
    is_storage result_type can_cast new_tensor _is_param is_inference_mode_enabled
    _has_compatible_shallow_copy_type data=
    """.split()
)


def base_name(func: Any) -> str:
    """Returns the name of a torch function in the tables above."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        name = getattr(func.__self__, "__name__", name)
        return f"{name}=" if func.__name__ == "__set__" else str(name)
    if name != "linalg_norm":  # of matrices, unlike Tensor.norm
        name = name.removeprefix("linalg_").removeprefix("special_")
    if name == "requires_grad_":
        return "requires_grad="
    if name == "detach_":  # unlike detach, of this very tensor
        return name
    if name in ("__bool__", "__float__", "__int__", "__index__", "__complex__"):
        return str(name)  # a Python number, not a change of dtype
    if name.startswith("__") and name.endswith("__"):
        return str(name[2:-2])
    return str(name[:-1] if name.endswith("_") and not name.startswith("_") else name)


def is_in_place(func: Any, args: Any, kwargs: Any) -> bool:
    """Tells whether a call writes to its operand: by its name, or by `inplace=True`."""
    name = getattr(func, "__name__", "")
    if name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"):
        return True
    if name.endswith("_") and not name.endswith("__"):
        return True
    if not any(value is True for value in args):
        return bool(kwargs.get("inplace", False))
    try:
        given = inspect.signature(func).bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):  # of a function in C, which has no `inplace`
        return False
    return bool(given.get("inplace", False))


Leaf = TypeVar("Leaf")


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


def version_of(x: Tensor) -> int:
    """Returns the number of in-place changes of a tensor; -1 for inference tensors."""
    with torch._C.DisableTorchFunctionSubclass():
        return -1 if x.is_inference() else x._version


def tree_map(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Applies `fn` to the leaves of arguments; ten times as fast as torch's function."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind([tree_map(fn, value) for value in tree])
    if kind is dict:
        return {key: tree_map(fn, value) for key, value in tree.items()}
    return fn(tree)


def leaves(tree: Any, kind: type[Leaf]) -> list[Leaf]:
    """Returns the leaves of arguments that are instances of a class, in order."""
    found: list[Leaf] = []
    tree_map(lambda v: found.append(v) if isinstance(v, kind) else v, tree)
    return found


@dataclass(eq=False)
class Mode:
    """Holds what was observed of a model in training, or in evaluation.

    Args:
        depths: for each call of a layer, how many layers follow it at most; None before
            the first pass.
        blocked: the operation that reads rows which trimming leaves out; None if none.
        rewritten: memory of leading rows that operations of this pass have changed.
        first: the first pass, until the next begins; see [Note: first pass].
    """

    depths: list[int] | None = None
    blocked: str | None = None
    rewritten: set[int] = field(default_factory=set)
    first: Any = None

    def block(self, reason: str) -> None:
        """Switches trimming off, unless it is."""
        if self.blocked is None:
            self.blocked = reason
            if self.first is not None:
                self.first.undo()


# Rows that a model has computed -------------------------------------------------------


_CHANGED = (
    "rows that trimming has left out are read after a tensor they depend on has changed in "
    "place: read them before, or switch trimming off by pdc.convert(model, trim=False)"
)


class Deferred:
    """Computes all rows of a tensor on demand, from the inputs of its leading rows.

    Args:
        func, args, kwargs: the call that computes them; a Deferred argument is evaluated.
        reads: further tensors that `func` reads.
    """

    def __init__(
        self, func: Callable[..., Any], args: Any, kwargs: Any, reads: Any = ()
    ) -> None:
        self._todo: Any = func, args, kwargs, torch.is_grad_enabled()
        self._value: Any = None
        given = leaves((args, kwargs, tuple(reads)), Tensor)
        self._versions = [(t, version_of(t)) for t in given]

    def value(self) -> Any:
        """Returns all rows, computed once; a RuntimeError if inputs have changed since."""
        if self._todo is not None:
            if any(version_of(t) != version for t, version in self._versions):
                raise RuntimeError(_CHANGED)
            func, args, kwargs, graded = self._todo
            with torch.set_grad_enabled(graded):
                self._value = func(*tree_map(_value, args), **tree_map(_value, kwargs))
            self._todo, self._versions = None, []
        return self._value


def _memory(t: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return t.untyped_storage().data_ptr()


def _value(item: Any) -> Any:
    return item.value() if isinstance(item, Deferred) else item


@dataclass(eq=False)
class Origin:
    """Holds the origin of leading rows: the calls of layers, and all rows on demand.

    Args:
        mode: the mode of the model that computed them.
        total: the number of all rows.
        limit: how many rows may be read.
        calls: the calls of layers whose outputs they depend on.
        every: all rows; None if the tensor has them.
        again: the same rows as later passes compute them; see [Note: first pass].
        first: the first pass that computed both.
        version: the version of the leading rows to which `every` belongs.
    """

    mode: Mode
    total: int
    limit: int
    calls: frozenset[int]
    every: Deferred | None = None
    version: int | None = None
    again: Any = None
    first: Any = None


class _Observed(Tensor):
    """A tensor whose reads are observed."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = base_name(func), kwargs or {}
        if StackedRows in types:
            reduction = _across(name, args, kwargs)
            if reduction is not None:
                return func(*reduction, **{**kwargs, "dim": 1})
            args, kwargs = _unstacked(args, kwargs, name)
            if LeadingRows not in types:
                return func(*args, **kwargs)
        return _dispatch(func, name, args, kwargs)


@eager
class LeadingRows(_Observed):
    """The first rows of a tensor `[n, ...]` that a model has computed; reads as all n."""

    origin: Origin


@eager
class StackedRows(_Observed):
    """Leading rows of k tensors, stacked as `[k, n, ...]`; reads as all of them.

    A reduction over the k tensors, as HeteroConv adds up relations, works row by row.
    Anything else reads all rows.
    """

    turned: Any  # the same numbers as leading rows [n, k, ...]
    every: Tensor | None


def _across(name: str, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
    """Returns the arguments of a reduction over the k tensors, without its dim."""
    if name not in _REDUCTIONS or kwargs.get("keepdim") or "out" in kwargs:
        return None
    stack, *rest = args or (None,)
    if not isinstance(stack, StackedRows) or stack.every is not None:
        return None
    dim = kwargs.get("dim", rest[0] if len(rest) == 1 else None)
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if len(rest) > ("dim" not in kwargs) or type(dim) is not int:
        return None
    return (stack.turned,) if dim in (0, -leading(stack.turned).dim()) else None


def _unstacked(args: Any, kwargs: Any, what: str) -> Any:
    """Returns arguments with all rows in place of stacked leading rows."""

    def every(value: Any) -> Any:
        if not isinstance(value, StackedRows):
            return value
        if value.every is None:
            value.every = whole(value.turned, what).transpose(0, 1).contiguous()
        return value.every

    return tree_map(every, (args, kwargs))


def wrap(rows: Tensor, origin: Origin) -> Tensor:
    """Wraps leading rows, which then read as all rows."""
    with torch._C.DisableTorchFunctionSubclass():
        out = rows.as_subclass(LeadingRows)
    out.origin = replace(origin, version=version_of(out))
    return out


def leading(value: Any) -> Any:
    """Returns the computed leading rows as an ordinary tensor; other values unchanged."""
    if not isinstance(value, LeadingRows):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return value.as_subclass(torch.Tensor)


def whole(tree: Any, what: str) -> Any:
    """Returns arguments with all rows computed, since `what` reads more than leading ones."""

    def every(value: Any) -> Any:
        if not isinstance(value, LeadingRows):
            return value
        origin = value.origin
        origin.mode.block(f"{what} reads rows that are not of the seeds")
        if origin.every is None:
            return leading(value)
        rows = origin.every.value()
        if version_of(value) != origin.version:  # changed by way of another view
            if _memory(value) in origin.mode.rewritten:
                raise RuntimeError(_CHANGED)
            rows = torch.cat([leading(value), rows[len(leading(value)) :]])
        return rows

    return tree_map(every, tree)


def deferred(value: Any) -> Any:
    """Returns the deferred computation of all rows of a value."""
    if not isinstance(value, LeadingRows):
        return value
    return value.origin.every or leading(value)


# Operations on them -------------------------------------------------------------------

_OF_WEIGHTS = frozenset("linear embedding prelu matmul mm layer_norm".split())
_JOINS = frozenset("cat concat concatenate stack".split())
_REDUCTIONS = frozenset("sum mean prod amax amin max min median logsumexp".split())


def _dispatch(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    if name in FACTS:
        return _call_plain(func, args, kwargs)
    if name in _OF_GRADIENTS and _meets_gradients(name, args, kwargs):
        if name == "grad" and (len(args) > 1 or kwargs):
            return _gradients(func, *args, **kwargs)
        return _call_plain(func, args, kwargs)
    if name in SIZES and isinstance(args[0], LeadingRows):
        local = leading(args[0])
        shape = args[0].origin.total, *local.shape[1:]
        return size_from_shape(name, shape, local, args, kwargs)
    if name in ("getitem", "narrow", "index_select"):
        found = _pick_rows(name, args, kwargs)
        if found is not None:
            return _of_later_passes(found, name, args, kwargs)
    if name == "stack" and _stacks_before_rows(args, kwargs):
        turned: Any = torch.stack(args[0], dim=1)
        out = torch.empty(0, dtype=leading(turned).dtype).as_subclass(StackedRows)
        out.turned, out.every = turned, None
        return out
    if _by_row(func, name, args, kwargs):
        found = _row_by_row(func, name, args, kwargs)
        if found is not None:
            return found
    every, every_kw = whole((args, kwargs), name)
    first = args[0] if args else None
    if isinstance(first, LeadingRows) and first.origin.every is not None:
        if name == "setitem" or is_in_place(func, args, kwargs):
            # others may be computed from all rows as they were
            every = (every[0].clone(), *every[1:])
            out, local = _call_plain(func, every, every_kw), leading(first)
            local.copy_(every[0][: len(local)])
            first.origin = replace(
                first.origin,
                every=Deferred(lambda: every[0], (), {}),
                version=version_of(local),
            )
            return out
    return _call_plain(func, every, every_kw)


_OF_GRADIENTS = frozenset(["grad", "register_hook", "retain_grad", "requires_grad="])


def _meets_gradients(name: str, args: Any, kwargs: Any) -> bool:
    """Tells whether an operation uses gradients of tensors, and so all rows."""
    asked = name == "grad" and (len(args) > 1 or bool(kwargs))  # torch.autograd.grad
    if asked:
        args = args[1] if len(args) > 1 else kwargs["inputs"]
    tracked = leaves(args, LeadingRows)
    for t in tracked:
        left_out = t.origin.every is not None or (_was_read(t) and not asked)
        t.origin.mode.block(f"{name} is of all rows")
        if left_out:
            raise RuntimeError(
                f"{name} of a tensor whose rows trimming has left out: run the model "
                "again, or switch trimming off by pdc.convert(model, trim=False)"
            )
    return bool(tracked)


def _was_read(t: LeadingRows) -> bool:
    """Tells whether leading rows that a repeated first pass computed have been read."""
    return t.origin.again is not None and t.origin.first.was_read


def _gradients(func: Any, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs torch.autograd.grad; rows that a repeated first pass left out have no gradient."""

    def in_use(t: Any) -> Any:
        return t.origin.again if isinstance(t, LeadingRows) and _was_read(t) else t

    given = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    found = _call_plain(func, (outputs, list(map(in_use, given)), *args), kwargs)
    every = []
    for g, t in zip(found, given, strict=True):
        if g is not None and isinstance(t, LeadingRows):
            rest = g.new_zeros(len(leading(t)) - len(g), *g.shape[1:])
            g = torch.cat([g, rest])
        every.append(g)
    return tuple(every)


def _call_plain(func: Any, args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _pick_rows(name: str, args: Any, kwargs: Any) -> Any:
    """Returns indexed rows as an ordinary tensor; None if the index reads other rows."""
    t = args[0] if args else None
    if not isinstance(t, LeadingRows):
        return None
    local, limit = leading(t), t.origin.limit
    if name == "getitem":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        head = index[0] if index else Ellipsis
        if head is Ellipsis or (isinstance(head, slice) and head == slice(None)):
            if len(index) < 2 or not all(
                isinstance(i, (int, slice)) or i is Ellipsis for i in index[1:]
            ):
                return None
            rest = (slice(None) if head is not Ellipsis else head, *index[1:])
            if head is Ellipsis and len(index) >= local.dim() + 1:
                return None
            return _row_by_row(lambda s: s[rest], "getitem", (t,), {})
        if isinstance(head, slice) and head.step in (None, 1):
            start, stop, _ = head.indices(t.origin.total)
            return local[(slice(start, stop), *index[1:])] if stop <= limit else None
        if type(head) is int:
            return local[args[1]] if 0 <= head < limit else None
        rows = head
    else:
        if kwargs or args[1] not in (0, -local.dim()):
            return None
        if name == "narrow":
            start, count = args[2:]
            inside = isinstance(start, int) and start >= 0 and start + count <= limit
            return local.narrow(0, start, count) if inside else None
        rows = args[2]
    if not isinstance(rows, Tensor) or isinstance(rows, LeadingRows):
        return None
    if rows.dtype == torch.bool:
        if rows.dim() != 1 or len(rows) != t.origin.total or bool(rows[limit:].any()):
            return None
        if name == "getitem" and isinstance(args[1], tuple):
            return local[(rows[: len(local)], *args[1][1:])]
        return local[rows[: len(local)]]
    if rows.dtype not in (torch.int64, torch.int32) or not rows.numel():
        return None
    low, high = (int(v) for v in rows.aminmax())
    if low < 0 or high >= limit:
        return None
    return local[args[1]] if name == "getitem" else local.index_select(0, rows)


def _of_later_passes(found: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Returns picked rows as later passes compute them; see [Note: first pass]."""
    origin = args[0].origin
    if isinstance(found, LeadingRows) or not _is_doubled(args[0]):
        return found
    origin.first.was_read = True
    return _pick_rows(name, (origin.again, *args[1:]), kwargs)


def _by_row(func: Any, name: str, args: Any, kwargs: Any) -> bool:
    """Tells whether an operation computes each row from the same row of its operands."""
    if "out" in kwargs or not args or (name == "where" and len(args) == 1):
        return False
    first = args[0] if args else None
    dim = leading(first).dim() if isinstance(first, LeadingRows) else None
    if name in _JOINS:
        parts = args[0]
        at = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        dims = {p.dim() for p in parts if isinstance(p, Tensor)}
        if not isinstance(at, int) or len(dims) != 1:
            return False
        return at % (max(dims) + (name == "stack")) != 0
    if name in _OF_WEIGHTS:
        others = [*args[1:], *kwargs.values()]
        if dim is None or any(isinstance(v, LeadingRows) for v in others):
            return False
        if name == "layer_norm":
            return len(args[1] if len(args) > 1 else kwargs["normalized_shape"]) < dim
        if name in ("matmul", "mm"):
            return dim == 2 and len(args) == 2 and args[1].dim() == 2
        return dim >= 2 or name == "embedding"
    if name in ROWWISE:
        return True
    if name in ("max", "min") and len(args) == 2 and isinstance(args[1], Tensor):
        return True  # of two tensors
    if name == "batch_norm":
        training = args[5] if len(args) > 5 else kwargs.get("training", False)
        return dim is not None and not training
    if dim is None:
        return False
    if name in BY_DIM:
        if name in ("quantile", "nanquantile") and not isinstance(args[1], float):
            return False  # several, which come first
        place, default = BY_DIM[name]
        at = kwargs.get("dim", args[place] if len(args) > place else default)
        ints = at if isinstance(at, (tuple, list)) else [at]
        return all(isinstance(k, int) and k % dim for k in ints) and bool(ints)
    if name in ("unsqueeze", "squeeze"):
        at = args[1] if len(args) > 1 else kwargs.get("dim")
        dim += name == "unsqueeze"
        return isinstance(at, int) and at % dim != 0
    if name == "flatten":
        at = args[1] if len(args) > 1 else kwargs.get("start_dim", 0)
        return at % dim != 0
    if name in ("view", "reshape"):
        shape = _shape_of(args)
        return bool(shape) and not kwargs and all(isinstance(k, int) for k in shape)
    return False


def _stacks_before_rows(args: Any, kwargs: Any) -> bool:
    """Tells whether tensors with equal numbers of rows are stacked in a new first dim."""
    if set(kwargs) - {"dim"} or not args or len(args) > 2:
        return False
    at = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    shapes = {p.shape for p in args[0] if isinstance(p, Tensor)}
    return len(shapes) == 1 and at in (0, -len(shapes.pop()) - 1)


def _shape_of(args: Any) -> Any:
    listed = len(args) > 1 and isinstance(args[1], (tuple, list))
    return args[1] if listed else args[1:]


def _row_by_row(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Runs an operation on the computed rows; None if operands have different rows."""
    tracked = leaves((args, kwargs), LeadingRows)
    doubled = [t for t in tracked if _is_doubled(t)]
    if doubled:
        return _on_both(func, name, args, kwargs, doubled[0].origin)
    first = tracked[0].origin
    same = all(
        t.origin.mode is first.mode and t.origin.total == first.total for t in tracked
    )
    if not same or len({leading(t).dim() for t in tracked}) > 1:
        return None
    if not torch.is_grad_enabled() and any(leading(t).requires_grad for t in tracked):
        return None  # within an autograd.Function, whose output has a gradient again
    rows = min(len(leading(t)) for t in tracked)
    changes = is_in_place(func, args, kwargs)
    if changes:
        target = args[0]
        if not isinstance(target, LeadingRows) or len(leading(target)) > rows:
            return None
    try:
        local_args, local_kwargs = _cut_operands(name, args, kwargs, rows, tracked[0])
    except _UnfitRows:
        return None
    every: Any = None
    if any(t.origin.every is not None for t in tracked):
        todo = (lambda x, *a, **k: func(x.clone(), *a, **k)) if changes else func
        every = Deferred(todo, *tree_map(deferred, (args, kwargs)))
    calls = frozenset().union(*(t.origin.calls for t in tracked))
    limit = min(t.origin.limit for t in tracked)
    origin = Origin(first.mode, first.total, limit, calls, every)
    out = _call_plain(func, local_args, local_kwargs)
    if changes:
        if every is not None:
            first.mode.rewritten.add(_memory(args[0]))
        args[0].origin = replace(origin, version=version_of(args[0]))
        return args[0]
    if isinstance(out, Tensor):
        return wrap(out, origin) if out.dim() and len(out) == rows else None
    if any(isinstance(p, Tensor) and (not p.dim() or len(p) != rows) for p in out):
        return None
    parts = [
        wrap(part, _part(origin, k)) if isinstance(part, Tensor) else part
        for k, part in enumerate(out)
    ]
    return type(out)(parts)


def _on_both(func: Any, name: str, args: Any, kwargs: Any, origin: Origin) -> Any:
    """Runs an operation on rows of a first pass, and on those of the repeated one."""

    def later(value: Any) -> Any:
        return value.origin.again if _is_doubled(value) else value

    def first(value: Any) -> Any:
        if not _is_doubled(value):
            return value
        return wrap(leading(value), replace(value.origin, again=None))

    full = functools.partial(_row_by_row, func, name, *tree_map(first, (args, kwargs)))
    trimmed = functools.partial(
        _row_by_row, func, name, *tree_map(later, (args, kwargs))
    )
    out, again = origin.first.run_both(full, trimmed)
    if out is None or again is None:
        return None
    if is_in_place(func, args, kwargs):
        return args[0]
    return double(out, again, origin.first)


def _is_doubled(value: Any) -> bool:
    if not isinstance(value, LeadingRows) or value.origin.mode.blocked is not None:
        return False
    return value.origin.again is not None


def double(out: Any, again: Any, first: Any) -> Any:
    """Returns results whose leading rows are those of a repeated pass, where there are more."""
    if isinstance(out, LeadingRows) and isinstance(again, LeadingRows):
        out.origin = replace(out.origin, again=again, first=first)
        return out
    if type(out) is type(again) and isinstance(out, (list, tuple)):
        if len(out) == len(again):
            parts = [double(*pair, first) for pair in zip(out, again, strict=True)]
            named = hasattr(out, "_fields")
            return type(out)(*parts) if named else type(out)(parts)
    if isinstance(out, dict) and isinstance(again, dict) and out.keys() == again.keys():
        return {key: double(part, again[key], first) for key, part in out.items()}
    return again


class _UnfitRows(Exception):
    """Operands have different rows."""


def _cut_operands(
    name: str, args: Any, kwargs: Any, rows: int, like: LeadingRows
) -> tuple[Any, Any]:
    """Returns the arguments of an operation, cut to their first `rows` rows."""
    dim, total = leading(like).dim(), like.origin.total
    weights = name in _OF_WEIGHTS or name == "batch_norm"

    def cut(value: Any) -> Any:
        if isinstance(value, LeadingRows):
            found = leading(value)
            return found[:rows] if len(found) > rows else found
        if not isinstance(value, Tensor) or weights or value.dim() < dim:
            return value
        if value.dim() == dim and len(value) == total and total != 1:
            return value[:rows]
        if value.dim() > dim or len(value) != 1:
            raise _UnfitRows
        return value

    local_args, local_kwargs = tree_map(cut, (args, kwargs))
    if name in ("view", "reshape"):
        shape = list(_shape_of(args))
        if shape[0] not in (-1, total) or (-1 in shape[1:] and not rows):
            raise _UnfitRows
        if -1 not in shape[1:]:
            each = torch.Size(shape[1:]).numel()
            if each != local_args[0][:1].numel() and rows:
                raise _UnfitRows
        local_args = local_args[0], [rows, *shape[1:]]
    return local_args, local_kwargs


def _part(origin: Origin, place: int) -> Origin:
    """Returns the origin of one of several tensors that an operation returned."""
    every = origin.every
    if every is not None:
        every = Deferred(lambda found: found[place], (every,), {})
    return Origin(origin.mode, origin.total, origin.limit, origin.calls, every)

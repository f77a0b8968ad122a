"""Computes ops row by row, on own rows, without communication.

Operands broadcast as torch's do, since shapes are the whole's. A plain operand with the
sharded dimension is cut to own rows; one of size 1 there, or without it, is taken as it is.
Where an op mixes other dimensions, rows are a batch: of vectors that are sorted, of matrices
that are inverted, of signals that are convolved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.kernels.memory import computed
from pyg_distcomm.process import PROCESS
from pyg_distcomm.sharded import whole
from pyg_distcomm.sharded.agreement import compare_plain, in_backward
from pyg_distcomm.sharded.dist_tensor import (
    DistTensor,
    all_rows,
    become,
    changed,
    local_at,
    overloads,
    rule,
)
from pyg_distcomm.sharded.partial import (
    PartialSum,
    accumulates_plain,
    plain,
    with_rows,
)

aten = torch.ops.aten


def meeting(t: Any, rows: Rows, right: int) -> Any:
    """Returns the part of an operand that meets own rows.

    Args:
        t: the operand.
        rows: own rows.
        right: the sharded dimension of the result, counted from the right, from 1.
    """
    if type(t) is DistTensor:
        if t.rows is rows and t.dim() - t.dim_ == right:
            return t.local
        dim = t.dim() - right
        if (
            dim >= 0
            and t.size(dim) == rows.count
            and (t.dim_ == dim or t.size(dim) != 1)
        ):
            return local_at(t, rows, dim)
        return all_rows(t, "broadcast")
    if not isinstance(t, Tensor):
        return t
    t = plain(t)
    dim = t.dim() - right
    if dim >= 0 and t.size(dim) != 1:
        return local_at(t, rows, dim)
    if type(t) is Tensor and not t.requires_grad and not in_backward():
        compare_plain(t, rows.mesh)
    return t


def bound(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Returns the arguments of a call in the order of the schema."""
    found = list(args)
    for argument in func._schema.arguments[len(args) :]:
        found.append(kwargs.get(argument.name, argument.default_value))
    return found


def _like(args: tuple[Any, ...]) -> DistTensor | None:
    """Returns the operand whose rows the result has: the one with most rows, then the first."""
    best, most = None, -1
    for a in args:
        if type(a) is DistTensor and a.size(a.dim_) > most:
            best, most = a, a.size(a.dim_)
    return best


def apply(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Computes a pointwise op on own rows."""
    like = _like(args)
    if like is None:
        return whole.apply(func, args, kwargs)
    if func is aten.add.Tensor and not kwargs:
        found = with_rows(func, args)
        if found is not None:
            return found
    rows, right = like.rows, like.dim() - like.dim_
    mutable = func._schema.is_mutable
    if mutable:
        target = args[0]
        if "out" in kwargs or type(target) is not DistTensor:
            return whole.apply(func, args, kwargs)
        rows, right = target.rows, target.dim() - target.dim_
    local = [meeting(a, rows, right) for a in args]
    if not mutable:
        out = computed(func, *local, **kwargs)
        if type(out) is tuple:
            return tuple(DistTensor(o, rows, o.dim() - right) for o in out)
        return DistTensor(out, rows, out.dim() - right)
    func(*local, **kwargs)
    changed(target)
    return target


rule(
    aten._prelu_kernel,
    aten.complex,
    aten.copy,
    aten.fill,
    aten.floor_divide,
    aten.hardswish,
    aten.isfinite,
    aten.log_sigmoid_backward,
    aten.log_sigmoid_forward,
    aten.polar,
    aten.silu_backward,
    aten.zero,
)(apply)


def along(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Computes an op of one tensor on own rows, of the same shape and rows."""
    x = args[0]
    local = func(x.local, *args[1:], **kwargs)
    if local is x.local:
        return x
    out = DistTensor(local, x.rows, x.dim_)
    if x._topology is not None and local.device != x.device and local.dtype == x.dtype:
        out._topology = x._topology.to(local.device)  # edges, sent to another device
        out.weight = None if x.weight is None else x.weight.to(local.device)
    return out


@rule(aten._conj.default)
def conj(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Conjugates own rows at once: a wrapper has no mark of what is to be conjugated."""
    x = args[0]
    out = DistTensor(x.local.conj().resolve_conj(), x.rows, x.dim_)
    out._copied = True
    return out


@rule(aten._to_copy.default)
def moved(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Moves own rows, or changes their type; on the device "meta" a tensor is plain.

    There torch derives the shape of a product whose tangent is zero.
    """
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "meta":
        x = args[0]
        return func(torch.empty(x.shape, dtype=x.dtype, device="meta"), **kwargs)
    return along(func, args, kwargs)


rule(
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
    aten.full_like.default,
    aten.bitwise_not.default,
    aten.contiguous.default,
)(along)


@rule(
    aten.clone.default, aten.detach.default, aten.alias.default, aten.lift_fresh.default
)
def same(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copies a tensor, or makes an alias; what was planned for its ids stays."""
    x = args[0]
    if accumulates_plain():  # an optimizer would gather it for each moment
        return all_rows(x, "gradient")
    out = DistTensor(func(x.local, **kwargs), x.rows, x.dim_)
    out._kept, out._topology, out.weight = x._kept, x._topology, x.weight
    out._copied = x._copied and func is not aten.clone.default
    return out


def foreach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Computes a `_foreach_` op tensor by tensor, by the op of its name."""
    name = func._schema.name.removeprefix("aten::_foreach_")
    count = len(args[0])

    def at(value: Any, i: int) -> Any:
        each = isinstance(value, (list, tuple)) and len(value) == count
        return value[i] if each else value

    op = torch.linalg.vector_norm if name == "norm" else getattr(aten, name)
    found = [
        op(*(at(a, i) for a in args), **{k: at(v, i) for k, v in kwargs.items()})
        for i in range(count)
    ]
    return None if func._schema.is_mutable else found


def shape_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Changes a shape in place: the tensor becomes what `set_` is given, or the op returns."""
    name = func._schema.name.removeprefix("aten::").removesuffix("_")
    given = name == "set" and len(args) > 1
    out = args[1] if given else getattr(aten, name)(*args, **kwargs)
    if type(out) is not DistTensor:
        return whole.apply(func, args, kwargs)
    become(args[0], out)
    return args[0]


@rule("default")
def default_rule(func: Any) -> Any:
    """Returns the rule of an op that has none of its own."""
    if func._schema.name.startswith("aten::_foreach_"):
        return foreach
    if torch.Tag.inplace_view in func.tags:
        return shape_in_place
    composite = "CompositeImplicitAutograd"  # which inference mode leaves as they are
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), composite):
        return lambda func, args, kwargs: func.decompose(*args, **kwargs)
    return apply if _is_pointwise(func) else whole.apply


def _is_pointwise(func: Any) -> bool:
    """Tells whether torch tags an op as pointwise, or one of which it has the name.

    That is another overload, the op that it is in place of, or the one whose gradient it takes.
    """
    name = func._schema.name.removeprefix("aten::")
    name = name if name.startswith("__") else name.removesuffix("_")
    packets = func.overloadpacket, getattr(aten, name.removesuffix("_backward"), None)
    return any(
        torch.Tag.pointwise in each.tags or PROCESS.rules.get(each) is apply
        for packet in packets
        if packet is not None
        for each in overloads(packet)
    )


_DIMENSIONS = ("dim", "dims", "dim1", "dim2", "dimension")
_SIZES = ("input_size", "input_sizes")  # of the whole


def _named(names: str) -> list[Any]:
    """Returns ops by their names, and those that take their gradients."""
    ends = "", "_backward"
    every = [name + end for name in names.split() for end in ends]
    return [getattr(aten, name) for name in every if hasattr(aten, name)]


# how many of the last dimensions ops mix that name none; their gradients do so, too
_LAST = {
    aten_op: count
    for count, names in {
        0: "view_as_real",
        1: """reflection_pad1d replication_pad1d upsample_linear1d upsample_nearest1d
            view_as_complex""",
        2: """_adaptive_avg_pool2d _linalg_det _linalg_eigh _linalg_slogdet _linalg_solve_ex
            _linalg_svd adaptive_max_pool2d avg_pool2d linalg_cholesky_ex linalg_eig
            linalg_inv_ex linalg_lu linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp
            linalg_qr linalg_solve_triangular max_pool2d_with_indices reflection_pad2d
            replication_pad2d tril triu upsample_bilinear2d upsample_nearest2d""",
    }.items()
    for aten_op in _named(names)
}


def _mixed(func: Any, args: list[Any], n: int) -> set[int]:
    """Returns the dimensions, of n, along which an op mixes numbers; all if it names none."""
    packet = func.overloadpacket
    if packet in _LAST:
        return set(range(n - _LAST[packet], n))
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=True))
    if packet is aten.diag_embed:
        ends = {given["dim1"] % (n + 1), given["dim2"] % (n + 1)}
        return {n - 1} if ends == {n - 1, n} else set(range(n))
    if packet is aten.constant_pad_nd:
        pad = given["pad"]
        return {n - 1 - i // 2 for i, width in enumerate(pad) if width}
    found = [given[name] for name in _DIMENSIONS if given.get(name) is not None]
    dims = [d for one in found for d in (one if isinstance(one, list) else [one])]
    return {d % n for d in dims} if dims else set(range(n))


def alone(func: Any, args: Any, kwargs: Any) -> Any:
    """Computes an op on own rows, if it does not mix the dimension that they have."""
    given = bound(func, args, kwargs)
    like = next(a for a in given if type(a) is DistTensor)
    rows, at = like.rows, like.dim_
    names = [a.name for a in func._schema.arguments]
    size = next((given[names.index(s)] for s in _SIZES if s in names), like.shape)
    mixed = _mixed(func, given, len(size))
    if at in mixed or (func.overloadpacket in _MOVING and at > min(mixed)):
        return whole.apply(func, args, kwargs)
    if not all(_meets(a, like) for a in given):
        return whole.apply(func, args, kwargs)
    own = [local_at(a, rows, at) if isinstance(a, Tensor) else a for a in given]
    empty = not like.local.size(at)
    if empty:  # some ops refuse no rows, which other ranks have
        own = [_one_zero(a, at) if isinstance(a, Tensor) else a for a in own]
    for i, name in enumerate(names):
        if name in _SIZES:
            count = max(like.local.size(at), 1)
            own[i] = [*given[i][:at], count, *given[i][at + 1 :]]
    count = sum(not a.kwarg_only for a in func._schema.arguments)
    options = dict(zip(names[count:], own[count:], strict=True))
    if func.overloadpacket in _FAILING and rows.mesh.size > 1:
        found = _on_all_or_none(func, own[:count], options, rows)
    else:
        found = computed(func, *own[:count], **options)
    parts = [found] if isinstance(found, Tensor) else list(found)
    parts = [part.narrow(at, 0, 0) if empty else part for part in parts]
    made = tuple(DistTensor(part, rows, at) for part in parts)
    return made[0] if isinstance(found, Tensor) else made


def _on_all_or_none(func: Any, args: Any, kwargs: Any, rows: Rows) -> Any:
    """Computes an op on own rows; raises on all ranks if it fails on one, as for NaN.

    Price: a word of each rank.

    Raises:
        LinAlgError: with torch's message, which numbers a rank's own matrices.
    """
    found, problem = None, None
    try:
        found = func(*args, **kwargs)
    except RuntimeError as error:
        problem = f"{error} (of the rows of this rank)"
    world = rows.mesh.world
    if any(
        row[0] for row in collectives.all_gather_counts([problem is not None], world)
    ):
        collectives.agree(problem, world, torch.linalg.LinAlgError)  # type: ignore[attr-defined]
    return found


def _meets(a: Any, like: DistTensor) -> bool:
    """Tells whether an operand has a row for each of `like`, in the same dimension."""
    if not isinstance(a, Tensor) or a is like:
        return True
    if type(a) is DistTensor:
        return a.rows is like.rows and a.dim_ == like.dim_
    same = a.dim() == like.dim() and type(a) is Tensor
    return same and a.size(like.dim_) == like.rows.count


def _one_zero(x: Tensor, at: int) -> Tensor:
    return x.new_zeros([*x.shape[:at], 1, *x.shape[at + 1 :]])


# ops that remove dimensions, or add some where they are named
_MOVING = {
    aten.diagonal,
    aten.diagonal_backward,
    aten.unfold_backward,
}
# ops that raise for what a matrix holds
_FAILING = {aten._linalg_eigh, aten._linalg_svd, aten.linalg_eig}
_NAMED = _named(
    """_fft_c2c _fft_c2r _fft_r2c _safe_softmax constant_pad_nd cummax cummin cumprod cumsum
    diag_embed diagonal glu linalg_cross logcumsumexp roll sort topk unfold"""
)
rule(
    *(f for op in (*_LAST, *_NAMED) for f in overloads(op) if not f._schema.is_mutable)
)(alone)


@rule(aten.searchsorted.Tensor, aten.bucketize.Tensor, aten.isin)
def found_in_table(func: Any, args: Any, kwargs: Any) -> Any:
    """Finds each number in a plain table, which every rank reads whole."""
    at = int(func is aten.searchsorted.Tensor)
    x, table = args[at], args[1 - at]
    plain = not isinstance(table, (DistTensor, PartialSum))
    if type(x) is not DistTensor or not plain or (at and table.dim() != 1):
        return whole.apply(func, args, kwargs)
    own = [a.local if a is x else a for a in args]
    return DistTensor(func(*own, **kwargs), x.rows, x.dim_)

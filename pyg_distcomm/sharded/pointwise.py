"""Computes ops row by row, on own rows, without communication.

Operands broadcast as torch's do, since shapes are the whole's. A plain operand with the
sharded dimension is cut to own rows; one of size 1 there, or without it, is taken as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.comm.rows import Rows
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
        out = func(*local, **kwargs)
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
    """Changes a shape in place: the tensor becomes what the op out of place returns."""
    name = func._schema.name.removeprefix("aten::").removesuffix("_")
    out = getattr(aten, name)(*args, **kwargs)
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

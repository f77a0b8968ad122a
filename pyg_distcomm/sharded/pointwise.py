"""Computes ops row by row, on own rows, without communication.

Operands broadcast as torch's do, since shapes are the whole's. A plain operand with the
sharded dimension is cut to own rows; one of size 1 there, or without it, is taken as it is.
Where an op mixes other dimensions, rows are a batch: of vectors that are sorted, of matrices
that are inverted, of signals that are convolved.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._decomp import decomposition_table

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.failure import watch_of
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
    summed_over_ranks,
    with_rows,
)

aten = torch.ops.aten


def meeting(t: Any, rows: Rows, right: int) -> Any:
    """Returns the part of an operand that meets own rows.

    They are the dimension `right` of the result, counted from the right, from 1.
    """
    if type(t) is DistTensor:
        if t.rows is rows and t.dim() - t.dim_ == right:
            return t.local
        dim = t.dim() - right
        fits = dim >= 0 and t.size(dim) == rows.count
        if fits and (t.dim_ == dim or rows.count != 1):
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


def _is_repeated(x: DistTensor, args: tuple[Any, ...]) -> bool:
    """Returns whether the one row of `x` is broadcast to several of a plain operand."""
    right = x.dim() - x.dim_
    others = [a for a in args if isinstance(a, Tensor) and type(a) is not DistTensor]
    return any(a.dim() >= right and a.size(-right) > 1 for a in others)


def apply(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Computes a pointwise op on own rows."""
    like = _like(args)
    if like is None or (like.rows.count == 1 and _is_repeated(like, args)):
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
    aten.leaky_relu,  # not tagged in torch 2.11
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
        out._edges_are(x._topology.to(local.device))  # sent to another device
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
    is_view = func is not aten.clone.default
    local = x.local if is_view else func(x.local, **kwargs)  # one count of writes
    out = DistTensor(local, x.rows, x.dim_)
    out._kept, out._end = x._kept, x._end
    out._copied = x._copied and is_view
    if is_view:
        out._family, out._root = x._family, x._root
    out._edges_are(x._topology)
    return out


def decomposed(func: Any, args: Any, kwargs: Any) -> Any:
    """Computes an op by those that torch says it is made of, each by its rule."""
    return decomposition_table[func](*args, **kwargs)


@rule(torch.ops.prims.convert_element_type.default)
def converted(func: Any, args: Any, kwargs: Any) -> Any:
    """Changes the type of rows, as torch's decompositions do."""
    return args[0].to(args[1])


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
    every = [name + end for name in names.split() for end in ("", "_backward")]
    return [getattr(aten, name) for name in every if hasattr(aten, name)]


# how many of the last dimensions ops mix that name none; their gradients do so, too
_LAST = {
    aten_op: count
    for count, names in {
        0: "view_as_real",
        1: """reflection_pad1d replication_pad1d upsample_linear1d upsample_nearest1d
            view_as_complex""",
        2: """_adaptive_avg_pool2d _linalg_det _linalg_eigh _linalg_slogdet _linalg_solve_ex
            _linalg_svd _native_multi_head_attention _scaled_dot_product_flash_attention_for_cpu
            _transformer_encoder_layer_fwd adaptive_max_pool2d avg_pool2d linalg_cholesky_ex
            linalg_eig linalg_inv_ex linalg_lu linalg_lu_factor_ex linalg_lu_solve
            linalg_matrix_exp linalg_qr linalg_solve_triangular max_pool2d_with_indices
            reflection_pad2d replication_pad2d tril triu upsample_bilinear2d
            upsample_nearest2d""",
    }.items()
    for aten_op in _named(names)
}


def _mixed(func: Any, args: list[Any], n: int) -> set[int]:
    """Returns the dimensions, of n, along which an op mixes numbers; all if it names none."""
    packet = func.overloadpacket
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=True))
    if packet in _LAST:
        return set(range(n - _LAST[packet], n))
    if packet in (aten.convolution, aten.convolution_backward):
        kernel, steps, pads = (given[name] for name in ("weight", "stride", "padding"))
        sizes = zip(kernel.shape[2:], steps * n, pads * n, strict=False)
        mixed = [size > 1 or step > 1 or pad > 0 for size, step, pad in sizes]
        return {1, *(d for d, mixes in enumerate(mixed, 2) if mixes)}
    if packet in _WITH_WEIGHTS:
        return set(range(n - len(given.get("normalized_shape", range(n - 1))), n))
    if packet in _TABLES:
        flat = given.get("sorted_sequence", given.get("boundaries"))
        return set() if flat is None or flat.dim() == 1 else set(range(n))
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
    """Computes an op on own rows, if it does not mix the dimension that they have.

    The gradients of plain weights are sums over the rows of all ranks.
    """
    given = bound(func, args, kwargs)
    names = [a.name for a in func._schema.arguments]
    every = [i for i, a in enumerate(given) if isinstance(a, Tensor)]
    of_rows = _OF_ROWS.get(func.overloadpacket, every)
    like = next((given[i] for i in of_rows if type(given[i]) is DistTensor), None)
    others = [given[i] for i in every if i not in of_rows]
    apart = any(isinstance(a, (DistTensor, PartialSum)) for a in others)
    mutable = func._schema.is_mutable
    if like is None or apart or (mutable and like is not args[0]):
        return whole.apply(func, args, kwargs)
    rows, at = like.rows, like.dim_
    size = next((given[names.index(s)] for s in _SIZES if s in names), like.shape)
    mixed = _mixed(func, given, len(size))
    if at in mixed or (func.overloadpacket in _MOVING and at > min(mixed)):
        return whole.apply(func, args, kwargs)
    if not all(_meets(given[i], like) for i in of_rows):
        return whole.apply(func, args, kwargs)
    own = list(given)
    empty = not (mutable or like.local.size(at))
    for i in of_rows:
        if isinstance(own[i], Tensor):
            own[i] = local_at(own[i], rows, at)
            if empty:  # some ops refuse no rows, which other ranks have
                shape = [*own[i].shape[:at], 1, *own[i].shape[at + 1 :]]
                own[i] = own[i].new_full(shape, func is aten.linalg_lu_solve.default)
    count = max(like.local.size(at), 1)
    for i, name in enumerate(names):
        if name in _SIZES:
            own[i] = [*given[i][:at], count, *given[i][at + 1 :]]
        elif name == "N":
            own[i] = count
    named = sum(not a.kwarg_only for a in func._schema.arguments)
    options = dict(zip(names[named:], own[named:], strict=True))
    if func.overloadpacket in _FAILING and rows.mesh.size > 1:
        found = _on_all_or_none(func, own[:named], options, rows)
    else:
        found = computed(func, *own[:named], **options)
    if mutable:
        changed(like)
        return like
    return _placed(found, like, empty, "output_mask" in names)


def _placed(found: Any, like: DistTensor, empty: bool, sums: bool) -> Any:
    """Returns results as rows, without the one that stood for none; the others may be sums."""
    rows, at = like.rows, like.dim_
    parts: list[Any] = [found] if isinstance(found, Tensor) else list(found)
    for i, part in enumerate(parts):
        if part is not None and sums and i:
            parts[i] = summed_over_ranks(part, rows.mesh)
        elif part is not None:
            parts[i] = DistTensor(part.narrow(at, 0, 0) if empty else part, rows, at)
    return parts[0] if isinstance(found, Tensor) else tuple(parts)


def _on_all_or_none(func: Any, args: Any, kwargs: Any, rows: Rows) -> Any:
    """Computes an op on own rows; raises on all ranks if it fails on one, as for NaN.

    Torch's message numbers a rank's own matrices. Price: a word of each rank.
    """
    found, problem = None, None
    try:
        found = func(*args, **kwargs)
    except RuntimeError as error:
        problem = f"{error} (of the rows of this rank)"
    world = rows.mesh.world
    failed = collectives.all_gather_counts([problem is not None], world)
    if [1] in map(list, failed):
        collectives.agree(problem, world, torch.linalg.LinAlgError)  # type: ignore[attr-defined]
    return found


def _meets(a: Any, like: DistTensor) -> bool:
    """Tells whether an operand has a row for each of `like`, in the same dimension."""
    if not isinstance(a, Tensor) or a is like:
        return True
    if type(a) is DistTensor:
        return a.rows.count == like.rows.count and a.dim_ == like.dim_
    return a.dim() == like.dim() and a.size(like.dim_) == like.rows.count


@rule(aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default)
def recurrent(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs a layer of an LSTM on own rows of its sequences `[time, rows, f]`, and of states."""
    x, backward = args[0], "backward" in func._schema.name
    plain_ones = [1, 2, 3, 4, len(args) - 1]  # weights, and what torch keeps between
    apart = any(isinstance(args[i], (DistTensor, PartialSum)) for i in plain_ones)
    if type(x) is not DistTensor or x.dim_ != 1 or apart:
        return whole.apply(func, args, kwargs)
    own, rows, empty = list(args), x.rows, not len(x.rows)
    for i, a in enumerate(args):
        if isinstance(a, Tensor) and i not in plain_ones:
            part = local_at(a, rows, a.dim() - 2)
            own[i] = F.pad(part, (0, 0, 0, 1)) if empty else part.contiguous()
    found = list(computed(func, *own))
    for i, part in enumerate(found):
        if backward and i in plain_ones:
            found[i] = summed_over_ranks(part, rows.mesh)
        elif backward or i < 3:
            part = part.narrow(-2, 0, 0) if empty else part
            found[i] = DistTensor(part, rows, part.dim() - 2)
    return tuple(found)


# ops that remove dimensions, or add some where they are named
_MOVING = set(_named("diagonal diagonal_copy")) | {aten.unfold_backward}
# ops that raise for what a matrix holds
_FAILING = {aten._linalg_eigh, aten._linalg_svd, aten.linalg_eig}
# ops of rows and plain weights
_WITH_WEIGHTS = set(_named("convolution native_group_norm native_layer_norm"))
_TABLES = {aten.searchsorted, aten.bucketize, aten.isin}
# the operands that have a row for each of the result's; others are plain
_OF_ROWS = {
    aten._native_multi_head_attention: (0, 1, 2, 9),
    aten._transformer_encoder_layer_fwd: (0, 18),
    aten.bucketize: (0,),
    aten.convolution: (0,),
    aten.convolution_backward: (1, 0),
    aten.index_add: (0, 3),
    aten.index_add_: (0, 3),
    aten.isin: (0,),
    aten.native_group_norm: (0,),
    aten.native_group_norm_backward: (1, 0, 2, 3),
    aten.native_layer_norm: (0,),
    aten.native_layer_norm_backward: (1, 0, 3, 4),
    aten.searchsorted: (1,),
}
_NAMED = _named(
    """_fft_c2c _fft_c2r _fft_r2c _safe_softmax constant_pad_nd cummax cummin cumprod cumsum
    diag_embed diagonal glu linalg_cross logcumsumexp roll sort topk unfold"""
)
_ALONE = (*_LAST, *_NAMED, *_WITH_WEIGHTS, *_TABLES)
rule(*(f for op in _ALONE for f in overloads(op) if not f._schema.is_mutable))(alone)
rule(aten._euclidean_dist.default, aten.dist.default)(decomposed)


@rule(aten.diagonal.default, aten.diagonal_copy.default, aten.diagonal_backward.default)
def diagonal(func: Any, args: Any, kwargs: Any) -> Any:
    """Takes the diagonal of a square matrix from own rows, or takes its gradient to them."""
    x, backward = args[0], func is aten.diagonal_backward.default
    size, how = (args[1], args[2:]) if backward else (x.shape, args[1:])
    square = len(size) == 2 and size[0] == size[1]
    if x.dim_ or not square or tuple(how) not in ((), (0,), (0, 0, 1)) or kwargs:
        return alone(func, args, kwargs)
    at = x.rows.place_on(x.device).unsqueeze(1)
    if backward:
        rows = x.local.new_zeros(len(at), size[1])
        return DistTensor(rows.scatter_(1, at, x.local.unsqueeze(1)), x.rows)
    out = DistTensor(x.local.gather(1, at).squeeze(1), x.rows)
    out._copied = func.is_view
    return out


_LOSSES = """binary_cross_entropy binary_cross_entropy_with_logits huber_loss mse_loss
    smooth_l1_loss soft_margin_loss"""


@rule(*_named(_LOSSES))
def loss(func: Any, args: Any, kwargs: Any) -> Any:
    """Computes a loss, whose means and sums are of all rows, or its gradient."""
    if "backward" in func._schema.name and not args[1].numel():
        return torch.zeros_like(args[1])  # torch's decomposition divides by the number
    if func is aten.binary_cross_entropy.default:
        check_shares(args[0])
    return decomposed(func, args, kwargs)


def check_shares(x: Any) -> None:
    """Raises on all ranks, as torch does, unless all numbers are between 0 and 1."""
    own = getattr(x, "local", x)
    if own.is_cpu and not bool(((own >= 0) & (own <= 1)).all()):
        error = RuntimeError("all elements of input should be between 0 and 1")
        watch = watch_of(x.rows.mesh) if type(x) is DistTensor else None
        if watch is not None:
            watch.fail(error)
        raise error

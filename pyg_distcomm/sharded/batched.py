"""Computes ops that treat each row alone: along other dimensions, or of batches.

The rows are then a batch dimension: of vectors that are sorted, of matrices that are
inverted, of signals that are convolved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.sharded import whole
from pyg_distcomm.sharded.dist_tensor import DistTensor, local_at, overloads, rule
from pyg_distcomm.sharded.partial import PartialSum
from pyg_distcomm.sharded.pointwise import bound
from pyg_distcomm.sharded.reductions import (
    softmax_over_rows,
    softmax_over_rows_backward,
)

aten = torch.ops.aten

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


def _alone(func: Any, args: Any, kwargs: Any) -> Any:
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
        found = func(*own[:count], **options)
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
)(_alone)


@rule(
    aten._softmax.default,
    aten._softmax_backward_data.default,
    aten._log_softmax.default,
    aten._log_softmax_backward_data.default,
)
def softmax(func: Any, args: Any, kwargs: Any) -> Any:
    """Takes the softmax of each row, or over all rows; or the gradient of this."""
    name = func._schema.name
    log, back = "log" in name, "backward" in name
    x, d, kind = args[back:]
    if type(x) is DistTensor and d % x.dim() == x.dim_ and x.is_floating_point():
        if back:
            return softmax_over_rows_backward(args[0], x, log, kind)
        return softmax_over_rows(x, log, torch.float32 if kind else x.dtype)
    return _alone(func, args, kwargs)


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

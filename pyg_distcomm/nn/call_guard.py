"""Guards the torch functions that an unchanged layer calls: draws, sizes, copies of values."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import eager_transforms
from torch.overrides import TorchFunctionMode

from pyg_distcomm.comm.consistency import refuse_transforms
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.nn.index_guard import (
    LayerTensor,
    LocalIndexGuard,
    find_guard,
    guarded_call,
)
from pyg_distcomm.tensor import dispatch
from pyg_distcomm.tensor.op_tables import base_name
from pyg_distcomm.tensor.row_sharded import RowShardedTensor, tree_map, unsupported_op
from pyg_distcomm.tensor.sizes import NumRows, is_count_of, totalled

_DRAWS = frozenset("rand randn randint randperm bernoulli multinomial normal".split())
_TRAINED = frozenset(
    """dropout alpha_dropout feature_dropout feature_alpha_dropout dropout1d dropout2d
    dropout3d rrelu batch_norm instance_norm""".split()
)


# where a number of rows is a value, and that of all ranks
_FORMULAS = frozenset(
    """add sub subtract rsub mul multiply div divide true_divide pow float_power fmod
    remainder floor_divide tensor as_tensor scalar_tensor addcmul addcdiv""".split()
)


class RngGuard(TorchFunctionMode):
    """Lets guarded numbers decide first, and refuses what would depend on the ranks."""

    def __init__(self, layer: str) -> None:
        super().__init__()
        self.layer = layer

    def __torch_function__(
        self, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs one torch function, or refuses it by name."""
        kwargs = kwargs or {}
        guard, caller = None, sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith(dispatch.TRANSFORMS) and any(map(_is_spread, args)):
            refuse_transforms()
        if any(issubclass(kind, LocalIndexGuard) for kind in types):
            guard = find_guard((*args, *kwargs.values()))
        if guard is not None:
            return guarded_call(func, args, kwargs)
        name = base_name(func)
        if name in _READING and any(map(_is_spread, args)):
            raise unsupported_op(f"torch.{name}(x), in a layer,")
        if name in _FORMULAS:
            args, kwargs = tree_map(totalled, args), tree_map(totalled, kwargs)
        elif name == "arange" and isinstance(args[0], NumRows) and len(args) == 1:
            rows, device = args[0].rows, torch.device(kwargs.get("device") or "cpu")
            if int(args[0]) != len(rows):
                raise unsupported_op("arange() of a multiple of this rank's rows")
            return LayerTensor.wrap(rows.place_on(device).clone(), rows)
        elif name in _MADE and (made := _rows_made(args, kwargs)) is not None:
            return LayerTensor.wrap(func(*args, **kwargs), made)
        if name in _DRAWS or (name in _TRAINED and _plain_in_training(args, kwargs)):
            raise TypeError(
                f"{self.layer} calls {name}() on tensors that no rank shares, so its "
                "result would depend on the number of ranks; draw and normalise per "
                "node or per edge, with F.dropout, torch.rand_like or batch norm"
            )
        return func(*args, **kwargs)


def _is_spread(value: Any) -> bool:
    return isinstance(value, (RowShardedTensor, LocalIndexGuard))


# what reads the values of tensors that it does not ask
_READING = frozenset("tensor scalar_tensor sparse_coo_tensor sparse_csr_tensor".split())
_MADE = frozenset("zeros ones empty full".split())


def _rows_made(args: Any, kwargs: Any) -> Rows | None:
    """Returns the rows that a new tensor has, if its first size counts them."""
    first = args[0] if args else kwargs.get("size")
    first = first[0] if isinstance(first, (tuple, list)) and first else first
    if kwargs.get("requires_grad") or not isinstance(first, NumRows):
        return None
    return first.rows if is_count_of(first, first.rows) else None


def _plain_in_training(args: Any, kwargs: Any) -> bool:
    x = args[0] if args else kwargs.get("input")
    if isinstance(x, RowShardedTensor):
        return False
    flags = [*args[1:], *(kwargs[k] for k in ("training", "train") if k in kwargs)]
    rate = kwargs.get("p", args[1] if len(args) > 1 else None)
    return rate != 0 and any(flag is True for flag in flags)


def _guard_torch_func() -> None:
    """Has torch.func refuse row-sharded tensors that it is to differentiate by.

    It wraps them without asking their class. A torch without this function is left alone.
    Here, and not beside the tensors, as torch.compile traces the functions of `nn`.
    """
    original = getattr(eager_transforms, "_wrap_tensor_for_grad", None)
    if original is None:
        return

    @functools.wraps(original)
    def wrap(maybe_tensor: Any, level: int) -> Any:
        if getattr(type(maybe_tensor), "_spread", False):
            refuse_transforms()
        return original(maybe_tensor, level)

    eager_transforms._wrap_tensor_for_grad = wrap


_guard_torch_func()

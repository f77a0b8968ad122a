"""Declares ops: each runs compiled on the CPU, and as plain torch elsewhere."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float64)
INDICES = (torch.int32, torch.int64)

P = ParamSpec("P")
R = TypeVar("R")


class Op(Generic[P, R]):
    """Calls the compiled twin of a definition where there is one, else the definition.

    The definition is a function of tensors in plain torch, without autograd, in a module
    `x_ops`; the twin has its name and signature, in `x_cpu`. Twins are imported when they
    are first called, because importing Numba takes a while.

    Args:
        definition: says what the op computes, on any device.
        by: the arguments that must lie on the CPU for the twin to take them; of a CSR
            matrix its columns count.
        types: the types that the twin takes, floats all of one type; None for any.
        check: raises where arguments do not fit each other.
    """

    def __init__(
        self,
        definition: Callable[P, R],
        by: str,
        types: tuple[torch.dtype, ...] | None,
        check: Callable[..., None] | None,
    ) -> None:
        functools.update_wrapper(self, definition)
        self.definition = definition
        names = list(inspect.signature(definition).parameters)
        self._by = [(names.index(name), name) for name in by.split()]
        self._types, self._check = types, check
        self._twin: Callable[P, R] | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Checks the arguments and computes."""
        if self._check is not None:
            self._check(*args, **kwargs)
        if not self.compiles(*args, **kwargs):
            return self.definition(*args, **kwargs)
        return (self._twin or self._load())(*args, **kwargs)

    def compiles(self, *args: P.args, **kwargs: P.kwargs) -> bool:
        """Tells whether the compiled twin takes these arguments."""
        floats = set()
        for place, name in self._by:
            given: Any = args[place] if place < len(args) else kwargs[name]
            t: Tensor = given[1] if isinstance(given, tuple) else given
            if t.device.type != "cpu":
                return False
            if self._types is not None and t.dtype not in self._types:
                return False
            if t.dtype.is_floating_point:
                floats.add(t.dtype)
        return self._types is None or len(floats) < 2

    def _load(self) -> Callable[P, R]:
        module = self.definition.__module__.replace("_ops", "_cpu")
        twin: Callable[P, R] = getattr(
            importlib.import_module(module), self.definition.__name__
        )
        self._twin = twin
        return twin


def op(
    by: str,
    types: tuple[torch.dtype, ...] | None = FLOATS + INDICES,
    check: Callable[..., None] | None = None,
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Declares a function as the definition of an op; see `Op`."""
    return lambda definition: Op(definition, by, types, check)

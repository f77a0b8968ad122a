"""Declares ops: each runs compiled on the CPU and on CUDA, and as plain torch elsewhere."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

FLOATS = (torch.float32, torch.float64)
HALVES = (torch.float16, torch.bfloat16)
INDICES = (torch.int32, torch.int64)
PLACES = ("cpu", "cuda")  # that have twins

P = ParamSpec("P")
R = TypeVar("R")


class Op(Generic[P, R]):
    """Calls the twin of a definition that is made for where its arguments lie.

    The definition is a function of tensors in plain torch, without autograd, in a module
    `x_ops`. Its twins have its name and signature: on the CPU in `x_cpu` (compiled by
    Numba), on CUDA in `x_cuda` (Triton, where that is installed). Where there is no twin the
    definition runs, also for fake tensors, which have shapes and no numbers. Twins are
    imported when they are first called, because importing Numba or Triton takes a while.

    The CPU's twin gets arguments of `types` alone. The other twins get all, and call the
    definition for those that they cannot take.

    Args:
        definition: says what the op computes, on any device.
        by: the arguments that must lie on one device for a twin to take them; of a CSR
            matrix its columns count.
        types: the types that the CPU's twin takes, floats all of one type; None for any.
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
        self._twins: dict[str, Callable[P, R] | None] = {}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Checks the arguments and computes."""
        if self._check is not None:
            self._check(*args, **kwargs)
        where = self.place(*args, **kwargs)
        twin = None if where is None else self.twin(where)
        return (twin or self.definition)(*args, **kwargs)

    def place(self, *args: P.args, **kwargs: P.kwargs) -> str | None:
        """Returns where these arguments lie, if a twin may take them; see `place_of`."""
        where: str | None = None
        float_type: torch.dtype | None = None
        suits = True  # the CPU's twin
        for place, name in self._by:
            given: Any = args[place] if place < len(args) else kwargs[name]
            t: Tensor = given[1] if isinstance(given, tuple) else given
            here = place_of(t)
            if where is not None and here != where:
                return None
            where = here
            if self._types is not None:
                kind = t.dtype
                suits = suits and kind in self._types
                if kind.is_floating_point:
                    suits = suits and float_type in (None, kind)
                    float_type = kind
        return where if suits or where != "cpu" else None

    def twin(self, where: str) -> Callable[P, R] | None:
        """Returns the twin for a place, if there is one."""
        if where not in self._twins:
            self._twins[where] = self._load(where)
        return self._twins[where]

    def _load(self, where: str) -> Callable[P, R] | None:
        stem, _, ending = self.definition.__module__.rpartition("_")
        if where not in PLACES or ending != "ops":
            return None
        try:
            module = importlib.import_module(f"{stem}_{where}")
        except ModuleNotFoundError as error:
            if error.name not in ("triton", f"{stem}_{where}"):
                raise
            return None
        twin = getattr(module, self.definition.__name__, None)
        return twin if twin is None or where == "cpu" else self._there(twin)

    def _there(self, twin: Callable[P, R]) -> Callable[P, R]:
        # Triton launches on the current device, wherever the tensors are
        place, name = self._by[0]

        @functools.wraps(twin)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            given: Any = args[place] if place < len(args) else kwargs[name]
            with torch.cuda.device_of(given[1] if isinstance(given, tuple) else given):
                return twin(*args, **kwargs)

        return run


def place_of(t: Tensor) -> str:
    """Returns the type of a tensor's device, or "fake"."""
    if type(t) is not Tensor and isinstance(t, FakeTensor):
        return "fake"
    return "cpu" if t.is_cpu else t.device.type


def op(
    by: str,
    types: tuple[torch.dtype, ...] | None = FLOATS + INDICES,
    check: Callable[..., None] | None = None,
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Declares a function as the definition of an op; see `Op`."""
    return lambda definition: Op(definition, by, types, check)

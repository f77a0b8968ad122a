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
MODULES = {"cpu": ("cpu",), "cuda": ("cuda", "library", "torch"), "fake": ("fake",)}
ELSEWHERE = ("torch",)

P = ParamSpec("P")
R = TypeVar("R")


class Op(Generic[P, R]):
    """Calls the twin of a definition that is made for where its arguments lie.

    The definition is a function of tensors in plain torch, without autograd, in a module
    `x_ops`. Its twins have its name and signature, one in each module of `MODULES` that
    has one: on the CPU `x_cpu` (compiled by Numba); on CUDA `x_cuda` (Triton), or where
    Triton is not installed `x_library` (what torch brings); there and on other devices
    `x_torch`, where the definition is plain Python; for fake tensors, which have shapes and
    no numbers, `x_fake`. Where no module has a twin the definition runs. Twins
    are imported when they are first called, because importing Numba or Triton takes a
    while.

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
        """Returns the key in `MODULES` of the twin for these arguments, if there is one."""
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
        """Returns the twin for a place, None where there is none."""
        if where not in self._twins:
            self._twins[where] = self._load(where)
        return self._twins[where]

    def _load(self, where: str) -> Callable[P, R] | None:
        stem, _, ending = self.definition.__module__.rpartition("_")
        for kind in MODULES.get(where, ELSEWHERE) if ending == "ops" else ():
            try:
                module = importlib.import_module(f"{stem}_{kind}")
            except ModuleNotFoundError as error:
                if error.name not in ("triton", f"{stem}_{kind}"):
                    raise
                continue
            if hasattr(module, self.definition.__name__):
                twin = getattr(module, self.definition.__name__)
                return self._there(twin) if kind == "cuda" else twin
        return None

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
    """Returns a key of `MODULES`: the type of a tensor's device, or "fake"."""
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

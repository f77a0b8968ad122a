"""Declares ops and dispatches them by device: compiled on the CPU and on CUDA, else torch."""

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
COMPILED_FOR = ("cpu", "cuda")  # types of devices that have backends

P = ParamSpec("P")
R = TypeVar("R")


class Op(Generic[P, R]):
    """Dispatches calls of an op to the backend for the device of its arguments.

    The definition is a function of tensors in plain torch, without autograd, in a module
    `x_ops`. A backend is a function of the same name and signature: for the CPU in `x_cpu`
    (compiled by Numba), for CUDA in `x_cuda` (Triton, where that is installed). Without a
    backend the definition runs; so it does for fake tensors, which have shapes and no data.
    A backend is imported at its first call, because importing Numba or Triton takes a while.

    The CPU backend is only given arguments of `dtypes`. Other backends are given all, and
    call the definition for dtypes that they do not support.

    Args:
        definition: what the op computes, on any device.
        device_args: names of the arguments that must be on one device for a backend to
            take them, in one text; of a CSR matrix, the column indices count.
        dtypes: what the CPU backend supports, all floats of one dtype; None for any.
        check: raises if the arguments do not fit each other.
    """

    def __init__(
        self,
        definition: Callable[P, R],
        device_args: str,
        dtypes: tuple[torch.dtype, ...] | None,
        check: Callable[..., None] | None,
    ) -> None:
        functools.update_wrapper(self, definition)
        self.definition = definition
        names = list(inspect.signature(definition).parameters)
        self._device_args = [(names.index(name), name) for name in device_args.split()]
        self._dtypes, self._check = dtypes, check
        self._backends: dict[str, Callable[P, R] | None] = {}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Checks the arguments and computes."""
        if self._check is not None:
            self._check(*args, **kwargs)
        device = self.device_type(*args, **kwargs)
        backend = None if device is None else self.backend(device)
        return (backend or self.definition)(*args, **kwargs)

    def device_type(self, *args: P.args, **kwargs: P.kwargs) -> str | None:
        """Returns the type of the arguments' device; None if no backend may take them."""
        found: str | None = None
        float_dtype: torch.dtype | None = None
        supported = True  # by the CPU backend
        for index, name in self._device_args:
            given: Any = args[index] if index < len(args) else kwargs[name]
            t: Tensor = given[1] if isinstance(given, tuple) else given
            device = device_type_of(t)
            if found is not None and device != found:
                return None
            found = device
            if self._dtypes is not None:
                dtype = t.dtype
                supported = supported and dtype in self._dtypes
                if dtype.is_floating_point:
                    supported = supported and float_dtype in (None, dtype)
                    float_dtype = dtype
        return found if supported or found != "cpu" else None

    def backend(self, device: str) -> Callable[P, R] | None:
        """Returns the backend for a type of device, if there is one."""
        if device not in self._backends:
            self._backends[device] = self._load(device)
        return self._backends[device]

    def _load(self, device: str) -> Callable[P, R] | None:
        stem, _, ending = self.definition.__module__.rpartition("_")
        if device not in COMPILED_FOR or ending != "ops":
            return None
        try:
            module = importlib.import_module(f"{stem}_{device}")
        except ModuleNotFoundError as error:
            if error.name not in ("triton", f"{stem}_{device}"):
                raise
            return None
        backend = getattr(module, self.definition.__name__, None)
        if backend is None or device == "cpu":
            return backend
        return self._on_device_of_arguments(backend)

    def _on_device_of_arguments(self, backend: Callable[P, R]) -> Callable[P, R]:
        """Makes the device of the arguments current in a call, where Triton launches."""
        index, name = self._device_args[0]

        @functools.wraps(backend)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            given: Any = args[index] if index < len(args) else kwargs[name]
            with torch.cuda.device_of(given[1] if isinstance(given, tuple) else given):
                return backend(*args, **kwargs)

        return run


def device_type_of(t: Tensor) -> str:
    """Returns the type of a tensor's device, or "fake"."""
    if type(t) is not Tensor and isinstance(t, FakeTensor):
        return "fake"
    return "cpu" if t.is_cpu else t.device.type


def op(
    device_args: str,
    dtypes: tuple[torch.dtype, ...] | None = FLOATS + INDICES,
    check: Callable[..., None] | None = None,
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Declares a function as the definition of an op; see `Op`."""
    return lambda definition: Op(definition, device_args, dtypes, check)

"""Writes plans, settings and errors as bytes that are data, and reads them back.

Text in JSON, with arrays behind it as they lie in memory. Nothing that is read is run: of
classes only this package's dataclasses and Python's own exceptions are known, by name, and
an object is made of its fields alone.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import json
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_distcomm.kernels.core_ops import as_bytes

_HEAD = struct.Struct("<Q")  # bytes of text
_SCALARS = (type(None), bool, int, float, str)


def encode(value: Any) -> bytearray:
    """Returns a value as bytes.

    Args:
        value: None, numbers, text, bytes, tensors, arrays, dtypes, devices, this package's
            dataclasses, classes of exceptions, and tuples, lists, sets and dicts of these.

    Raises:
        TypeError: naming what can not be written.
    """
    arrays: list[np.ndarray] = []
    text = json.dumps(_told(value, arrays)).encode()
    out = bytearray(_HEAD.pack(len(text)) + text)
    for array in arrays:
        out += array.tobytes()
    return out


def decode(data: bytes | bytearray | memoryview) -> Any:
    """Returns the value that `encode` wrote.

    Raises:
        ValueError: if the bytes are not its own.
    """
    try:
        (size,) = _HEAD.unpack_from(data)
        start = _HEAD.size + size
        tree = json.loads(bytes(data[_HEAD.size : start]))
        return _Reader(memoryview(data)[start:]).read(tree)
    except (struct.error, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"a rank sent what this package does not write: {error!r}"
        ) from error


@contextlib.contextmanager
def allowing(classes: Iterable[Any]) -> Iterator[None]:
    """Lets `torch.load(..., weights_only=True)` read these classes too, for a while."""
    before = torch.serialization.get_safe_globals()
    # leaving the context forgets its classes, so it must not name those of others
    with torch.serialization.safe_globals([c for c in classes if c not in before]):
        yield


def differing(told: Sequence[Mapping[str, Any]]) -> str | None:
    """Says in what ranks differ that must be alike, if in anything.

    Args:
        told: of each rank, values by the name that a user knows them by.
    """
    for name in dict.fromkeys(name for of_rank in told for name in of_rank):
        values = [of_rank.get(name) for of_rank in told]
        for rank, value in enumerate(values):
            if value != values[0]:
                return (
                    f"give all ranks the same {name}: it is {_short(values[0])} on rank 0, "
                    f"and {_short(value)} on rank {rank}"
                )
    return None


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


_LONGEST = 200  # characters of a value in a message


def _told(value: Any, arrays: list[np.ndarray]) -> Any:
    if type(value) in _SCALARS:
        return value
    if isinstance(value, list):
        return [_told(v, arrays) for v in value]
    name, parts = _parts(value)
    if isinstance(value, (Tensor, np.ndarray, np.generic, bytes)):
        arrays.append(_raw(value))
        return {name: parts}
    return {name: _told(parts, arrays)}


def _parts(value: Any) -> tuple[str, Any]:
    """Returns the name of a kind of value, and what it is made of."""
    kind: Any = type(value)
    if isinstance(value, Tensor) and not getattr(kind, "_spread", False):
        return "tensor", [str(value.dtype).removeprefix("torch."), list(value.shape)]
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        name = "array" if isinstance(value, np.ndarray) else "number"
        return name, [value.dtype.str, list(value.shape)]
    if isinstance(value, bytes):
        return "bytes", len(value)
    if isinstance(value, torch.Size):
        return "size", list(value)
    if isinstance(value, tuple):
        if hasattr(value, "_fields"):
            return "record", [kind.__module__, kind.__qualname__, list(value)]
        return "tuple", list(value)
    if isinstance(value, (set, frozenset)):
        return kind.__name__, list(value)
    if isinstance(value, dict):
        return "dict", [[k, v] for k, v in value.items()]
    if isinstance(value, torch.dtype):
        return "dtype", str(value).removeprefix("torch.")
    if isinstance(value, torch.device):
        return "device", str(value)
    if isinstance(value, type) and issubclass(value, Exception):
        return "error", [value.__module__, value.__qualname__]
    if kind.__module__.startswith(_OURS) and hasattr(kind, "__dataclass_fields__"):
        fields = [[f.name, getattr(value, f.name)] for f in dataclasses.fields(value)]
        return "data", [kind.__module__, kind.__qualname__, fields]
    raise TypeError(
        "send numbers, text, tensors, or lists, tuples and dicts of them to other ranks; "
        f"got {kind.__module__}.{kind.__qualname__}"
    )


_OURS = "pyg_distcomm."


def _raw(value: Any) -> np.ndarray:
    if isinstance(value, Tensor):
        return as_bytes(value.detach().as_subclass(Tensor).cpu()).numpy()
    if isinstance(value, bytes):
        return np.frombuffer(value, np.uint8)
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


class _Reader:
    """Makes values of what `_told` returns, and of the arrays behind it."""

    def __init__(self, rest: memoryview) -> None:
        self.rest = rest

    def read(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self.read(one) for one in tree]
        if not isinstance(tree, dict):
            return tree
        ((name, parts),) = tree.items()
        if name in ("tensor", "array", "number", "bytes"):
            return getattr(self, f"_{name}")(parts)
        return _MADE[name](self.read(parts))

    def _taken(self, size: int) -> bytearray:
        if not 0 <= size <= len(self.rest):
            raise ValueError(
                f"{size} bytes of an array were told, {len(self.rest)} came"
            )
        taken, self.rest = bytearray(self.rest[:size]), self.rest[size:]
        return taken

    def _tensor(self, parts: Any) -> Tensor:
        dtype, shape = _dtype(parts[0]), [int(n) for n in parts[1]]
        size = torch.Size(shape).numel() * dtype.itemsize
        taken = self._taken(size)
        if not taken:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(taken, dtype=dtype).view(shape)

    def _array(self, parts: Any) -> np.ndarray:
        dtype, shape = np.dtype(parts[0]), [int(n) for n in parts[1]]
        if dtype.hasobject:
            raise ValueError("arrays of objects are not read")
        taken = self._taken(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
        return np.frombuffer(taken, dtype).reshape(shape)

    def _number(self, parts: Any) -> Any:
        return self._array(parts)[()]

    def _bytes(self, size: Any) -> bytes:
        return bytes(self._taken(int(size)))


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return found


def _class(module: str, name: str) -> Any:
    """Returns a class of this package that has been imported."""
    if not module.startswith(_OURS):
        raise ValueError(f"{module}.{name} is not of this package")
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _data(parts: Any) -> Any:
    module, name, fields = parts
    kind = _class(module, name)
    if not isinstance(kind, type) or not dataclasses.is_dataclass(kind):
        raise ValueError(f"{module}.{name} is no dataclass")
    names = {f.name for f in dataclasses.fields(kind)}
    made = object.__new__(kind)
    for field, value in fields:
        if field not in names:
            raise ValueError(f"{name} has no field {field}")
        object.__setattr__(made, field, value)
    return made


def _record(parts: Any) -> Any:
    module, name, values = parts
    kind = _class(module, name)
    if not (isinstance(kind, type) and issubclass(kind, tuple)):
        raise ValueError(f"{module}.{name} is no tuple")
    return tuple.__new__(kind, values)


def _error(parts: Any) -> type[Exception]:
    module, name = parts
    found = getattr(builtins, name) if module == "builtins" else _class(module, name)
    if not (isinstance(found, type) and issubclass(found, Exception)):
        raise ValueError(f"{name} is no exception")
    return found


_MADE: dict[str, Any] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "dict": lambda pairs: {k: v for k, v in pairs},
    "size": torch.Size,
    "dtype": _dtype,
    "device": torch.device,
    "data": _data,
    "record": _record,
    "error": _error,
}

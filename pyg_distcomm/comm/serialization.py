"""Serialises plans, settings and errors without pickle, and reads them back.

The format is JSON text, followed by the raw bytes of arrays. Reading runs no code: the only
classes are this package's dataclasses and Python's exceptions, looked up by name, and an
object is made of its fields alone.
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
        TypeError: for other types.
    """
    arrays: list[np.ndarray] = []
    text = json.dumps(_to_tree(value, arrays)).encode()
    out = bytearray(_HEAD.pack(len(text)) + text)
    for array in arrays:
        out += array.tobytes()
    return out


def decode(data: bytes | bytearray | memoryview) -> Any:
    """Returns the value that `encode` wrote.

    Raises:
        ValueError: if the bytes were not written by `encode`.
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
def allowing(known: Iterable[Any]) -> Iterator[None]:
    """Lets `torch.load(..., weights_only=True)` read these classes, too, in a block.

    An entry is a class, or a pair (what stands for a name, the name), which comes before
    what others have allowed by that name.
    """
    ours = {_name_of(one): one for one in known}
    before = torch.serialization.get_safe_globals()
    replaced = [c for c in before if ours.get(_name_of(c), c) != c]
    if replaced:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals([c for c in before if c not in replaced])
    # leaving the context forgets its classes, so it must not name those of others
    new = [c for c in ours.values() if c not in before]
    try:
        with torch.serialization.safe_globals(new):
            yield
    finally:
        torch.serialization.add_safe_globals(replaced)


def _name_of(known: Any) -> str:
    if isinstance(known, tuple):
        return str(known[1])
    return f"{known.__module__}.{known.__qualname__}"


def first_difference(by_rank: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns the error message for the first value that differs between ranks; None if none.

    Args:
        by_rank: for each rank, its values by the name that a user knows.
    """
    for name in dict.fromkeys(name for of_rank in by_rank for name in of_rank):
        values = [of_rank.get(name) for of_rank in by_rank]
        for rank, value in enumerate(values):
            if value != values[0]:
                return (
                    f"give all ranks the same {name}: it is {_shortened(values[0])} on rank 0, "
                    f"and {_shortened(value)} on rank {rank}"
                )
    return None


def _shortened(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


_MAX_SHOWN = 200  # characters of a value in a message


def _to_tree(value: Any, arrays: list[np.ndarray]) -> Any:
    if type(value) in _SCALARS:
        return value
    if isinstance(value, list):
        return [_to_tree(v, arrays) for v in value]
    name, parts = _describe(value)
    if isinstance(value, (Tensor, np.ndarray, np.generic, bytes)):
        arrays.append(_raw(value))
        return {name: parts}
    return {name: _to_tree(parts, arrays)}


def _describe(value: Any) -> tuple[str, Any]:
    """Returns the type tag of a value, and its parts."""
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
    if kind.__module__.startswith(_PACKAGE) and hasattr(kind, "__dataclass_fields__"):
        fields = [[f.name, getattr(value, f.name)] for f in dataclasses.fields(value)]
        return "data", [kind.__module__, kind.__qualname__, fields]
    raise TypeError(
        "send numbers, text, tensors, or lists, tuples and dicts of them to other ranks; "
        f"got {kind.__module__}.{kind.__qualname__}"
    )


_PACKAGE = "pyg_distcomm."


def _raw(value: Any) -> np.ndarray:
    if isinstance(value, Tensor):
        return as_bytes(value.detach().as_subclass(Tensor).cpu()).numpy()
    if isinstance(value, bytes):
        return np.frombuffer(value, np.uint8)
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


class _Reader:
    """Makes values of a tree of `_to_tree`, and of the arrays behind it."""

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
        return _CONSTRUCTORS[name](self.read(parts))

    def _take_bytes(self, size: int) -> bytearray:
        if not 0 <= size <= len(self.rest):
            raise ValueError(
                f"an array needs {size} bytes, but {len(self.rest)} are left"
            )
        taken, self.rest = bytearray(self.rest[:size]), self.rest[size:]
        return taken

    def _tensor(self, parts: Any) -> Tensor:
        dtype, shape = _dtype(parts[0]), [int(n) for n in parts[1]]
        size = torch.Size(shape).numel() * dtype.itemsize
        taken = self._take_bytes(size)
        if not taken:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(taken, dtype=dtype).view(shape)

    def _array(self, parts: Any) -> np.ndarray:
        dtype, shape = np.dtype(parts[0]), [int(n) for n in parts[1]]
        if dtype.hasobject:
            raise ValueError("arrays of objects are not read")
        taken = self._take_bytes(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
        return np.frombuffer(taken, dtype).reshape(shape)

    def _number(self, parts: Any) -> Any:
        return self._array(parts)[()]

    def _bytes(self, size: Any) -> bytes:
        return bytes(self._take_bytes(int(size)))


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return found


def _class(module: str, name: str) -> Any:
    """Returns a class of this package, of an imported module."""
    if not module.startswith(_PACKAGE):
        raise ValueError(f"{module}.{name} is not of this package")
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _make_dataclass(parts: Any) -> Any:
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


def _make_named_tuple(parts: Any) -> Any:
    module, name, values = parts
    kind = _class(module, name)
    if not (isinstance(kind, type) and issubclass(kind, tuple)):
        raise ValueError(f"{module}.{name} is no tuple")
    return tuple.__new__(kind, values)


def _make_exception(parts: Any) -> type[Exception]:
    module, name = parts
    found = getattr(builtins, name) if module == "builtins" else _class(module, name)
    if not (isinstance(found, type) and issubclass(found, Exception)):
        raise ValueError(f"{name} is no exception")
    return found


_CONSTRUCTORS: dict[str, Any] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "dict": lambda pairs: {k: v for k, v in pairs},
    "size": torch.Size,
    "dtype": _dtype,
    "device": torch.device,
    "data": _make_dataclass,
    "record": _make_named_tuple,
    "error": _make_exception,
}

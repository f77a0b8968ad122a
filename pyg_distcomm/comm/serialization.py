"""Serialises plans, settings and errors without pickle, and reads them back.

The format is JSON text, followed by the raw bytes of arrays. Reading runs no code: the only
classes are this package's dataclasses, looked up by name, and an object is made of its fields
alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import operator
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
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
            dataclasses, and tuples, lists, sets and dicts of these.

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
        return _from_tree(tree, [memoryview(data)[start:]])
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


_PACKAGE = "pyg_distcomm."


def _from_tree(tree: Any, rest: list[memoryview]) -> Any:
    """Returns the value of a tree of `_to_tree`, and takes its arrays off the `rest`."""
    if isinstance(tree, list):
        return [_from_tree(one, rest) for one in tree]
    if not isinstance(tree, dict):
        return tree
    ((name, parts),) = tree.items()
    if name != "array":
        return _KINDS[name][2](_from_tree(parts, rest))
    dtype, shape = np.dtype(parts[0]), tuple(map(int, parts[1]))
    size = math.prod(shape) * dtype.itemsize
    if dtype.hasobject or min(shape, default=0) < 0:
        raise ValueError("arrays of objects are not read")
    if size > len(rest[0]):
        raise ValueError(f"an array needs {size} bytes, but {len(rest[0])} are left")
    own, rest[0] = bytearray(rest[0][:size]), rest[0][size:]
    return np.frombuffer(own, dtype).reshape(shape)


def _to_tree(value: Any, arrays: list[np.ndarray]) -> Any:
    """Returns a value as JSON holds it, and adds its arrays to a list."""
    if type(value) in _SCALARS:
        return value
    if isinstance(value, list):
        return [_to_tree(v, arrays) for v in value]
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        arrays.append(value)
        return {"array": [value.dtype.str, list(value.shape)]}
    for name, (fits, take_apart, _) in _KINDS.items():
        if fits(value):
            return {name: _to_tree(take_apart(value), arrays)}
    kind = type(value)
    raise TypeError(
        "send numbers, text, tensors, or lists, tuples and dicts of them to other ranks; "
        f"got {kind.__module__}.{kind.__qualname__}"
    )


def _tensor_parts(value: Tensor) -> list[Any]:
    own = as_bytes(value.detach().as_subclass(Tensor).cpu()).numpy()
    return [value.dtype, list(value.shape), own]


def _make_tensor(parts: Any) -> Tensor:
    dtype, shape, own = parts
    if torch.Size(shape).numel() * dtype.itemsize != own.nbytes:
        raise ValueError(f"a tensor {shape} of {dtype} has {own.nbytes} bytes")
    if not own.nbytes:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(own, dtype=dtype).view(shape)


def _make_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return found


def _is_ours(value: Any) -> bool:
    """Returns whether a value is of a dataclass of this package."""
    kind = type(value)
    return kind.__module__.startswith(_PACKAGE) and dataclasses.is_dataclass(kind)


def _dataclass_parts(value: Any) -> list[Any]:
    kind, names = type(value), [f.name for f in dataclasses.fields(value)]
    values = {name: getattr(value, name) for name in names}
    return [kind.__module__, kind.__qualname__, values]


def _make_dataclass(parts: Any) -> Any:
    """Makes an object of its fields alone; its class is one of an imported module."""
    module, name, fields = parts
    if not module.startswith(_PACKAGE):
        raise ValueError(f"{module}.{name} is not of this package")
    kind: Any = operator.attrgetter(name)(sys.modules[module])
    if not isinstance(kind, type) or not dataclasses.is_dataclass(kind):
        raise ValueError(f"{module}.{name} is no dataclass")
    made = object.__new__(kind)
    if unknown := fields.keys() - {f.name for f in dataclasses.fields(kind)}:
        raise ValueError(f"{name} has no fields {unknown}")
    for field, value in fields.items():
        object.__setattr__(made, field, value)
    return made


def _is(kind: Any) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


# name -> what tells a value of a kind, takes it apart, and makes it of its parts
_KINDS: dict[str, tuple[Callable[..., bool], Callable[..., Any], Callable[..., Any]]]
_KINDS = {
    "tensor": (
        lambda value: isinstance(value, Tensor) and not hasattr(value, "full_tensor"),
        _tensor_parts,
        _make_tensor,
    ),
    "number": (_is(np.generic), np.asarray, lambda array: array[()]),
    "bytes": (_is(bytes), partial(np.frombuffer, dtype=np.uint8), np.ndarray.tobytes),
    "size": (_is(torch.Size), list, torch.Size),
    "tuple": (_is(tuple), list, tuple),
    "set": (_is(set), list, set),
    "frozenset": (_is(frozenset), list, frozenset),
    "dict": (_is(dict), lambda v: [list(pair) for pair in v.items()], dict),
    "dtype": (_is(torch.dtype), lambda v: str(v).partition(".")[2], _make_dtype),
    "device": (_is(torch.device), str, torch.device),
    "data": (_is_ours, _dataclass_parts, _make_dataclass),
}

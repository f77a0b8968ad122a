"""Walks through the arguments of torch functions, and answers sizes of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

Leaf = TypeVar("Leaf")


def size_from_shape(
    name: str, shape: Sequence[int], like: Tensor, args: Any, kwargs: Any
) -> Any:
    """Implements shape, size, len, numel and nbytes for a given shape and dtype."""
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if name == "len" or (name == "size" and dim is not None):
        return shape[dim or 0]
    if name in ("shape", "size"):
        return torch.Size(shape)
    return math.prod(shape) * (like.element_size() if name == "nbytes" else 1)


def version_of(x: Tensor) -> int:
    """Returns the number of in-place changes of a tensor; -1 for inference tensors."""
    with torch._C.DisableTorchFunctionSubclass():
        return -1 if x.is_inference() else x._version


def tree_map(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Applies `fn` to the leaves of arguments; ten times as fast as torch's function."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind([tree_map(fn, value) for value in tree])
    if kind is dict:
        return {key: tree_map(fn, value) for key, value in tree.items()}
    return fn(tree)


def leaves(tree: Any, kind: type[Leaf]) -> list[Leaf]:
    """Returns the leaves of arguments that are instances of a class, in order."""
    found: list[Leaf] = []
    tree_map(lambda v: found.append(v) if isinstance(v, kind) else v, tree)
    return found

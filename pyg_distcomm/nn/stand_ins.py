"""Replaces functions of PyG's modules, and methods of layers, while layers run by products."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch_geometric.nn import MessagePassing

_CHANGING = threading.Lock()


@contextlib.contextmanager
def replace_in_module(
    scope: dict[str, Any],
    name: str,
    stand_in: Callable[[Callable], Callable],
    inherited: Any = None,
) -> Iterator[None]:
    """Replaces a function of a PyG module while layers run.

    It does as the original for what is not of a layer that runs in its own thread, so
    other threads may run PyG meanwhile. The last layer that ends puts the original back.
    Where the scope has none, as an object has none of its own, `inherited` is the original.
    """
    with _CHANGING:
        put: Any = scope.get(name)
        if not hasattr(put, "layers_running"):
            original, put = put, stand_in(inherited if put is None else put)
            put.layers_running, put.original = 0, original
            scope[name] = put
        put.layers_running += 1
    try:
        yield
    finally:
        with _CHANGING:
            put.layers_running -= 1
            if not put.layers_running and put.original is None:
                del scope[name]
            elif not put.layers_running:
                scope[name] = put.original


def scopes_of(layers: list[MessagePassing]) -> list[dict[str, Any]]:
    """Returns the namespaces of the modules that define layers and their base classes."""
    names = {kind.__module__ for layer in layers for kind in type(layer).__mro__}
    return [vars(sys.modules[name]) for name in sorted(names) if name in sys.modules]

"""GuardedEdges: what an unchanged layer may do with a local edge_index, and no more.

[Note: guarded edges] A rank has all in-edges of its own nodes, so anything a layer sums
or counts over *targets* is complete here, and anything over *sources* is not. Source ids
may therefore be compared, filtered, joined with self-loops and handed to `propagate`,
where their rows have been fetched; used as an index anywhere else they are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.rowwise import FACTS, base_name

_KEEPS = frozenset("getitem cat clone contiguous detach to long flip".split())
_COMPARES = frozenset("eq ne lt gt le ge".split())


class GuardedEdges(torch.Tensor):
    """Edges `[2, e]` in local numbering; or, of one row, the sources `[e]`."""

    layer: str
    source: int  # which row holds the sources

    @staticmethod
    def wrap(edge_index: Tensor, layer: str, source: int) -> GuardedEdges:
        """Returns a local edge_index that watches over its sources."""
        out = edge_index.as_subclass(GuardedEdges)
        out.layer, out.source = layer, source
        return out

    def plain(self) -> Tensor:
        """Returns the edges as an ordinary tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self[0], self[1]))

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Lets through what cannot go wrong, and refuses the rest by name."""
        name = base_name(func)
        guard = _find(args) or _find(list((kwargs or {}).values()))
        assert guard is not None
        with torch._C.DisableTorchFunctionSubclass():
            if name in FACTS or name in _COMPARES or name == "setitem":
                return func(*args, **(kwargs or {}))
            if name == "getitem" and isinstance(args[0], GuardedEdges):
                return _picked(guard, args[0], args[1])
            if name in _KEEPS - {"getitem", "flip"}:
                out = func(*args, **(kwargs or {}))
                return GuardedEdges.wrap(out, guard.layer, guard.source)
            if name == "unbind" and args[0].dim() == 2:
                return tuple(_picked(guard, guard, k) for k in (0, 1))
        raise TypeError(
            f"{guard.layer} reads the sources of edges outside propagate ({name}), and "
            "the edges of other ranks are not here; it cannot run distributed unchanged. "
            "Precompute what it reads as an edge attribute before pdc.partition, or use "
            "another layer"
        )


def _find(values: Any) -> GuardedEdges | None:
    for value in values:
        if isinstance(value, GuardedEdges):
            return value
        if isinstance(value, (tuple, list)):
            found = _find(value)
            if found is not None:
                return found
    return None


def _picked(guard: GuardedEdges, edges: GuardedEdges, key: Any) -> Tensor:
    out = edges.plain()[key]
    row = key[0] if isinstance(key, tuple) and key else key
    one_row = edges.dim() == 2 and isinstance(row, int)
    if one_row and row % 2 != guard.source:
        return out  # targets: complete on this rank
    return GuardedEdges.wrap(out, guard.layer, guard.source)

"""Recurrent networks along a dim of each row: rows are their batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.tensor.eager import eager
from pyg_distcomm.tensor.op_tables import FACTS, base_name
from pyg_distcomm.tensor.row_sharded import RowShardedTensor, tree_map, unsupported_op

RECURRENT = frozenset(("lstm", "gru", "rnn_tanh", "rnn_relu"))


def recurrent(func: Callable, args: Any, kwargs: Any) -> Any:
    """Runs `torch.nn.LSTM` and its like on `[n_i, steps, C]`, a sequence per row.

    Raises:
        TypeError: without `batch_first`, or with dropout between layers, whose masks
            would depend on the number of ranks.
    """
    x, name = args[0], base_name(func)
    if len(args) != 9 or kwargs or not isinstance(x, RowShardedTensor):
        raise unsupported_op(f"{name}() of packed sequences or row-cut weights")
    dropout, training, _, batch_first = args[5:]
    if not batch_first or x.dim() != 3:
        raise unsupported_op(
            f"{name}() with rows that are not its batch (use batch_first)"
        )
    if dropout and training:
        raise unsupported_op(f"{name}() with dropout between its layers")
    args = (x, tree_map(lambda v: _here(v, x), args[1]), *args[2:])
    local = tree_map(
        lambda v: v.to_local() if isinstance(v, RowShardedTensor) else v, args
    )
    with torch._C.DisableTorchFunctionSubclass():
        out, *states = func(*local)
    return x.wrap(out, x.rows), *(_state(s, x) for s in states)


def _here(state: Tensor, x: RowShardedTensor) -> Tensor:
    """Returns the rows here of an initial state `[layers, n, C]` of all rows."""
    if x.reads_local or state.dim() != 3 or state.size(1) != x.rows.count:
        return state
    return state.index_select(1, x.rows.place.to(state.device))


@eager
class LayerStates(torch.Tensor):
    """Hidden states `[layers, n_i, C]`: `states[k]` is row-cut, nothing else is known."""

    _like: RowShardedTensor
    _spread = True

    def __getitem__(self, key: Any) -> Any:
        """Returns one layer's states, a row for each row."""
        if type(key) is not int:
            raise unsupported_op("states[...] other than of one layer")
        with torch._C.DisableTorchFunctionSubclass():
            local = self.as_subclass(torch.Tensor)[key]
        return self._like.wrap(local, self._like.rows)

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Lets facts through and refuses the rest."""
        if base_name(func) not in FACTS:
            raise unsupported_op(f"{base_name(func)}() of the states of all layers")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _state(value: Tensor, like: RowShardedTensor) -> LayerStates:
    out = value.as_subclass(LayerStates)
    out._like = like.wrap(like.to_local().detach(), like.rows)
    return out

"""What tensors inside a layer may do: sizes and numbers there are this rank's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.nn.index_guard import LocalIndexGuard, find_guard, guarded_call
from pyg_distcomm.tensor.dist_tensor import DistTensor
from pyg_distcomm.tensor.eager import eager
from pyg_distcomm.tensor.op_tables import base_name
from pyg_distcomm.tensor.row_sharded import RowShardedTensor, tree_map, unsupported_op
from pyg_distcomm.tensor.sizes import NumRows, is_count_of, totalled

_DRAWS = frozenset("rand randn randint randperm bernoulli multinomial normal".split())
_TRAINED = frozenset(
    """dropout alpha_dropout feature_dropout feature_alpha_dropout dropout1d dropout2d
    dropout3d rrelu batch_norm instance_norm""".split()
)


# where a number of rows is a value, and that of all ranks
_FORMULAS = frozenset(
    """add sub subtract rsub mul multiply div divide true_divide pow float_power fmod
    remainder floor_divide tensor as_tensor scalar_tensor addcmul addcdiv""".split()
)


@eager
class LayerTensor(DistTensor):
    """A row-cut tensor inside a layer, where sizes and numbers are this rank's."""

    _inside = True

    def __getitem__(self, key: Any) -> Any:
        """Picks rows as outside, but for ranges, which count this rank's rows here."""
        first = key[0] if isinstance(key, tuple) and key else key
        if isinstance(first, slice) and first != slice(None):
            if first not in (slice(len(self.rows)), slice(0, len(self.rows))):
                raise unsupported_op(f"x[{first}], a range of this rank's rows,")
            return self[(slice(None), *key[1:])] if isinstance(key, tuple) else self
        if isinstance(first, Tensor) and not isinstance(
            first, (RowShardedTensor, LocalIndexGuard)
        ):
            if first.dtype != torch.bool:
                raise unsupported_op("x[numbers], of this rank's rows,")
        return super().__getitem__(key)


class GhostMeshGuard:
    """A mesh on which nothing can be reduced: ghosts would count twice."""

    local_sizes = True

    def __init__(self, mesh: Mesh, layer: str) -> None:
        self.size, self.next_key, self.layer = mesh.size, mesh.next_key, layer
        self.rank = mesh.rank

    @property
    def world(self) -> Any:
        """Refuses: asked for by every reduction."""
        raise TypeError(
            f"{self.layer} reduces over the sources of edges (batch norm, mean, ...), "
            "where ghost rows would count twice; do it before the layer"
        )

    control = world


class RngGuard(TorchFunctionMode):
    """Lets guarded numbers decide first, and refuses what would depend on the ranks."""

    def __init__(self, layer: str) -> None:
        super().__init__()
        self.layer = layer

    def __torch_function__(
        self, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs one torch function, or refuses it by name."""
        kwargs = kwargs or {}
        guard = None
        if any(issubclass(kind, LocalIndexGuard) for kind in types):
            guard = find_guard((*args, *kwargs.values()))
        if guard is not None:
            return guarded_call(func, args, kwargs)
        name = base_name(func)
        if name in _FORMULAS:
            args, kwargs = tree_map(totalled, args), tree_map(totalled, kwargs)
        elif name == "arange" and isinstance(args[0], NumRows) and len(args) == 1:
            rows = args[0].rows
            return LayerTensor.wrap(rows.gid.to(kwargs.get("device", "cpu")), rows)
        elif name in _MADE and (made := _rows_made(args, kwargs)) is not None:
            return LayerTensor.wrap(func(*args, **kwargs), made)
        if name in _DRAWS or (name in _TRAINED and _plain_in_training(args, kwargs)):
            raise TypeError(
                f"{self.layer} calls {name}() on tensors that no rank shares, so its "
                "result would depend on the number of ranks; draw and normalise per "
                "node or per edge, with F.dropout, torch.rand_like or batch norm"
            )
        return func(*args, **kwargs)


_MADE = frozenset("zeros ones empty full".split())


def _rows_made(args: Any, kwargs: Any) -> Rows | None:
    """Returns the rows that a new tensor has, if its first size counts them."""
    first = args[0] if args else kwargs.get("size")
    first = first[0] if isinstance(first, (tuple, list)) and first else first
    if kwargs.get("requires_grad") or not isinstance(first, NumRows):
        return None
    return first.rows if is_count_of(first, first.rows) else None


def _plain_in_training(args: Any, kwargs: Any) -> bool:
    x = args[0] if args else kwargs.get("input")
    if isinstance(x, RowShardedTensor):
        return False
    flags = [*args[1:], *(kwargs[k] for k in ("training", "train") if k in kwargs)]
    rate = kwargs.get("p", args[1] if len(args) > 1 else None)
    return rate != 0 and any(flag is True for flag in flags)

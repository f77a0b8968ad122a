"""Replaces functions of PyG that an unchanged layer calls while it runs distributed.

Functions of PyG that read both ends of edges are replaced: each replacement calls the original
unless it is given guarded edges. Functions of torch that draw, read sizes or copy values are
guarded.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._functorch import eager_transforms
from torch.overrides import TorchFunctionMode
from torch_geometric.utils import add_self_loops

from pyg_distcomm.comm.gradient_averaging import refuse_transforms
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.graph.topology import OperatorKind, gcn_norm, loop_places
from pyg_distcomm.nn.index_guard import (
    GuardContext,
    GuardedEdgeIndex,
    LayerTensor,
    LocalIndexGuard,
    find_guard,
    guarded_call,
)
from pyg_distcomm.tensor import dispatch
from pyg_distcomm.tensor.dist_tensor import DistTensor
from pyg_distcomm.tensor.op_tables import base_name
from pyg_distcomm.tensor.row_sharded import (
    RowShardedTensor,
    local_part,
    tree_map,
    unsupported_op,
    version_of,
)
from pyg_distcomm.tensor.sizes import NumRows, is_count_of, with_total

Pair = tuple[GuardedEdgeIndex, Any]

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


@contextlib.contextmanager
def replaced(scope: dict[str, Any], name: str, stand_in: Any) -> Iterator[None]:
    """Replaces an attribute of one object or module in a block."""
    had, before = name in scope, scope.get(name)
    scope[name] = stand_in
    try:
        yield
    finally:
        if had:
            scope[name] = before
        else:
            del scope[name]


@dataclass(frozen=True, eq=False)
class MatrixWeights:
    """Marks edge weights as the values of a matrix that a topology knows.

    Args:
        kind: the matrix.
        weight: the edge weights of the matrix, which are not trained; None is 1.
        version: the version of the values when they were marked.
    """

    kind: OperatorKind
    weight: Tensor | None
    version: int

    @staticmethod
    def mark(value: Any, kind: OperatorKind, weight: Tensor | None) -> None:
        """Marks weights, if they do not depend on trainable tensors."""
        if not value.requires_grad:
            value.matrix = MatrixWeights(kind, weight, version_of(value))

    @staticmethod
    def of(value: Any) -> MatrixWeights | None:
        """Returns the matrix of marked weights that have not changed since."""
        found: MatrixWeights | None = vars(value).get("matrix")
        if found is None or found.version != version_of(value):
            return None
        return found


@dataclass(frozen=True, eq=False)
class _Looped(Rows):
    """Rows of edges followed by one self-loop per own node."""

    def select(self, mask: Tensor, known: int | None = None) -> Rows:
        kept = super().select(mask, known)
        return _Picked(kept.gid, kept.total, kept.mesh, None, False, nodes=self.nodes)


@dataclass(frozen=True, eq=False)
class _Picked(Rows):
    """Rows of selected edges; the self-loops also match the rows of the nodes."""

    def same_as(self, other: Rows) -> bool:
        if other is not self.nodes or other is None:
            return super().same_as(other)
        return torch.equal(self.gid, other.gid + (self.total - other.total))


def _on_guarded(stand_in: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a replacement that calls the original for edges that are not guarded."""

    def instead_of(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def run(edge_index: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(edge_index, GuardedEdgeIndex):
                return stand_in(original, edge_index, *args, **kwargs)
            return original(edge_index, *args, **kwargs)

        return run

    return instead_of


def _with_loops(edges: GuardedEdgeIndex, kept: Rows, local: Tensor, value: Any) -> Pair:
    """Returns edges with one self-loop per own node; ids of loops follow those of edges."""
    nodes = edges.context.nodes
    rows = kept.derived.get("looped")
    if rows is None or rows.nodes is not nodes:
        gid = torch.cat([kept.gid, kept.total + nodes.gid])
        total = kept.total + nodes.total
        rows = _Looped(gid, total, nodes.mesh, None, False, nodes=nodes)
        kept.derived["looped"] = rows
    value = None if value is None else DistTensor.wrap(value, rows)
    cap = edges.context.here.memory
    local = local if cap is None else cap.moved(local)
    return GuardedEdgeIndex.wrap(local, edges.context, rows), value


def _adding_loops(kept: Callable[[GuardedEdgeIndex], Rows]) -> Callable[..., Pair]:
    """Makes a replacement for a function that adds self-loops, after the edges `kept`."""

    def add(
        original: Callable[..., Any],
        edges: GuardedEdgeIndex,
        edge_attr: Any = None,
        fill_value: Any = None,
        num_nodes: Any = None,
    ) -> Pair:
        context, means = edges.context, isinstance(fill_value, str)
        if edge_attr is not None and means and context.source == 1:
            raise TypeError(
                f"{context.layer} fills self-loops with the {fill_value} of edges that "
                "leave a node (flow='target_to_source'), which other ranks hold; give "
                "fill_value as a number, or add self-loops before pdc.partition"
            )
        if num_nodes is None:
            raise TypeError(
                f"{context.layer} adds self-loops without num_nodes, so up to the largest "
                "node with an edge, which may be on another rank; pass num_nodes=x.size(0)"
            )
        given = edges.plain(), local_part(edge_attr), fill_value, context.here.num_own
        local, value = original(*given)
        return _with_loops(edges, kept(edges), local, value)

    return add


def _without_loops(edges: GuardedEdgeIndex) -> Rows:
    known = edges.rows.derived
    here, kept = known.get("no loops", (None, None))
    if kept is None or here is not edges.context.here:
        ends = edges.plain()
        kept = edges.rows.select(ends[0] != ends[1])
        known["no loops"] = edges.context.here, kept
    return kept


def _norm(
    original: Callable[..., Any],
    edges: GuardedEdgeIndex,
    edge_weight: Any = None,
    num_nodes: Any = None,
    improved: bool = False,
    add_self_loops: bool = True,
    flow: str = "source_to_target",
    dtype: Any = None,
) -> Pair:
    """Replaces `gcn_norm`, with global degrees."""
    context = edges.context
    turned = context.source == 1
    local = edges.plain().flip(0) if turned else edges.plain()
    kind = dtype or torch.get_default_dtype()
    values = context.values
    if edge_weight is None and values is not None and values.rows is edges.rows:
        edge_weight = values  # as a sparse adjacency brings them along
    out, weight = gcn_norm(
        context.here,
        local,
        edges.rows,
        local_part(edge_weight),
        improved,
        add_self_loops,
        kind,
        context.link(),
    )
    out = out.flip(0) if turned else out
    if add_self_loops:
        edges, value = _with_loops(edges, _without_loops(edges), out, weight)
    else:
        value = DistTensor.wrap(weight, edges.rows)
    known = None if edge_weight is None else MatrixWeights.of(edge_weight)
    if edge_weight is None or known is not None:
        how = OperatorKind("gcn", improved, add_self_loops)
        MatrixWeights.mark(value, how, None if known is None else known.weight)
    return edges, value


def _laplacian(
    original: Callable[..., Any],
    edges: GuardedEdgeIndex,
    edge_weight: Any = None,
    normalization: str | None = None,
    dtype: Any = None,
    num_nodes: Any = None,
) -> Pair:
    """Replaces `get_laplacian`, with out-degrees summed over ranks."""
    context = edges.context
    others = loop_places(context.here, edges.plain(), edges.rows)[0]
    local, weight = edges.plain().index_select(1, others), local_part(edge_weight)
    if weight is not None:
        weight = weight.index_select(0, others)
    else:
        weight = torch.ones(local.size(1), dtype=dtype, device=local.device)
    degree = _first_end_sums(context, local[0], weight)
    if normalization is None:
        own = degree[: context.here.num_own]
        looped, _ = add_self_loops(local, num_nodes=context.here.num_own)
        value = torch.cat([-weight, own])
    else:
        power = -0.5 if normalization == "sym" else -1.0
        scale = degree.pow(power)
        scale = scale.masked_fill(scale == float("inf"), 0)
        weight = scale[local[0]] * weight
        if normalization == "sym":
            weight = weight * scale[local[1]]
        looped, value = add_self_loops(local, -weight, 1.0, context.here.num_own)
    return _with_loops(edges, _without_loops(edges), looped, value)


def _first_end_sums(context: GuardContext, first: Tensor, weight: Tensor) -> Tensor:
    """Returns the sums of weights over the edges that start at each own and ghost node."""
    here = context.here
    every = here.num_own + len(here.ghost_gid)
    part = weight.new_zeros(every).index_add(0, first, weight).unsqueeze(1)
    own = part[: here.num_own]
    if context.source == 0:
        own = here.scatter_to_owners(part[here.num_own :], own, context.link())
    return here.with_ghosts(own, context.link()).squeeze(1)


def _one_hot(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces PyG's `one_hot`, which is row-wise."""

    @functools.wraps(original)
    def run(index: Any, num_classes: Any = None, dtype: Any = None) -> Any:
        if not isinstance(index, DistTensor):
            return original(index, num_classes, dtype)
        if num_classes is None:
            raise TypeError(
                "one_hot per node or edge needs num_classes, equal on ranks"
            )
        return index.wrap(original(index.to_local(), num_classes, dtype), index.rows)

    return run


def by_row(forward: Callable) -> Callable:
    """Makes the forward of a module that sorts or moves rows run on local rows."""

    def run(x: Any, *args: Any) -> Any:
        out = forward(local_part(x), *map(local_part, args))
        return x.wrap(out, x.rows) if isinstance(x, DistTensor) else out

    return run


STAND_INS: dict[str, Callable[..., Any]] = {
    "gcn_norm": _on_guarded(_norm),
    "add_self_loops": _on_guarded(_adding_loops(lambda edges: edges.rows)),
    "add_remaining_self_loops": _on_guarded(_adding_loops(_without_loops)),
    "get_laplacian": _on_guarded(_laplacian),
    "one_hot": _one_hot,
}


# Guards ------------------------------------------------------------------------------

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


class RngGuard(TorchFunctionMode):
    """Dispatches to guarded numbers first, and raises for results that depend on the ranks."""

    def __init__(self, layer: str) -> None:
        super().__init__()
        self.layer = layer

    def __torch_function__(
        self, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs one torch function, or raises."""
        kwargs = kwargs or {}
        guard, caller = None, sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith(dispatch.TRANSFORMS) and any(map(_is_spread, args)):
            refuse_transforms()
        if any(issubclass(kind, LocalIndexGuard) for kind in types):
            guard = find_guard((*args, *kwargs.values()))
        if guard is not None:
            return guarded_call(func, args, kwargs)
        name = base_name(func)
        if name in _READING and any(map(_is_spread, args)):
            raise unsupported_op(f"torch.{name}(x), in a layer,")
        if name in _FORMULAS:
            args, kwargs = tree_map(with_total, args), tree_map(with_total, kwargs)
        elif name == "arange" and isinstance(args[0], NumRows) and len(args) == 1:
            rows, device = args[0].rows, torch.device(kwargs.get("device") or "cpu")
            if int(args[0]) != len(rows):
                raise unsupported_op("arange() of a multiple of this rank's rows")
            return LayerTensor.wrap(rows.place_on(device).clone(), rows)
        elif name in _MADE and (made := _rows_made(args, kwargs)) is not None:
            return LayerTensor.wrap(func(*args, **kwargs), made)
        if name in _DRAWS or (name in _TRAINED and _plain_in_training(args, kwargs)):
            raise TypeError(
                f"{self.layer} calls {name}() on tensors that no rank shares, so its "
                "result would depend on the number of ranks; draw and normalise per "
                "node or per edge, with F.dropout, torch.rand_like or batch norm"
            )
        return func(*args, **kwargs)


def _is_spread(value: Any) -> bool:
    return isinstance(value, (RowShardedTensor, LocalIndexGuard))


# what reads the values of tensors that it does not ask
_READING = frozenset("tensor scalar_tensor sparse_coo_tensor sparse_csr_tensor".split())
_MADE = frozenset("zeros ones empty full".split())


def _rows_made(args: Any, kwargs: Any) -> Rows | None:
    """Returns the rows of a new tensor if its first size is a number of rows."""
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


def _guard_torch_func() -> None:
    """Makes torch.func raise for row-sharded tensors.

    It wraps them without asking their class.
    Here, and not beside the tensors, as torch.compile traces the functions of `nn`.
    """
    original = eager_transforms._wrap_tensor_for_grad

    @functools.wraps(original)
    def wrap(maybe_tensor: Any, level: int) -> Any:
        if getattr(type(maybe_tensor), "_spread", False):
            refuse_transforms()
        return original(maybe_tensor, level)

    eager_transforms._wrap_tensor_for_grad = wrap


_guard_torch_func()

"""Guards the operations of an unchanged layer on a local edge_index.

[Note: guarded edges] A rank has all in-edges of its own nodes, so reductions over *targets* are
complete on this rank, and reductions over *sources* are not. Values per edge are DistTensors
whose rows are edges. Sources may be compared, filtered, concatenated with self-loops and passed
to `propagate`, where their rows are fetched; they may also index node tensors and count edges
(`degree`), for which rows are exchanged once more. Targets do so without communication, and are
the index of reductions over edges. In arithmetic, and as indices of an ordinary table with a
row per node, both are global node ids (`NodeIds`). Local numbers mean nothing elsewhere, so
every other operation raises a TypeError, the same on all ranks.

Tensors inside a layer (`LayerTensor`) have local sizes; in arithmetic these sizes, and those
that PyG passes to a layer's own code, are global (`NumRows`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.graph.topology import LocalGraph
from pyg_distcomm.halo.halo import Link
from pyg_distcomm.tensor import dispatch
from pyg_distcomm.tensor.dist_tensor import DistTensor, tells_errors
from pyg_distcomm.tensor.op_tables import FACTS, ROWWISE, SIZES, base_name
from pyg_distcomm.tensor.row_sharded import (
    Picker,
    RowShardedTensor,
    called_by_pyg,
    eager,
    tree_map,
    unsupported_op,
)
from pyg_distcomm.tensor.sizes import NumRows, is_count_of, sizes_inside, with_total

_COPIES = frozenset("clone contiguous detach to long cpu cuda".split())
# by ids of nodes, as values
_VALUED = (ROWWISE | {"one_hot"}) - _COPIES - {"data", "fill", "zero", "embedding"}
_LOOKS_UP = frozenset("getitem index_select embedding".split())
_COMPARES = frozenset("eq ne lt gt le ge".split())
_RESHAPES = _COPIES | frozenset(
    "view view_as reshape unsqueeze expand expand_as broadcast_to".split()
)
_SCATTERS = frozenset(
    "scatter_add scatter_reduce scatter index_add index_reduce".split()
)
_OF_TORCH_SCATTER = frozenset("scatter_max scatter_min scatter_mul".split())


@dataclass(frozen=True, eq=False)
class GuardContext:
    """Holds the layer that runs, its local graph, and the row of sources in its edge_index."""

    layer: str
    nodes: Rows
    sources: Rows  # the nodes, unless edges come from another type
    here: LocalGraph
    source: int  # which row of edge_index holds the sources
    link: Callable[[], Link | None]  # of one exchange of degrees; see `HaloVisit.exact`
    values: DistTensor | None = None  # of a matrix whose nonzeros are the edges


class LocalIndexGuard(Picker):
    """Local node numbers with the edges they belong to (abstract)."""

    context: GuardContext
    rows: Rows  # the edges

    @classmethod
    def wrap(cls, ids: Tensor, context: GuardContext, rows: Rows) -> Self:
        """Wraps local numbers in a guard."""
        with torch._C.DisableTorchFunctionSubclass():
            out = ids.as_subclass(cls)
        out.context, out.rows = context, rows
        return out

    def plain(self) -> Tensor:
        """Returns the numbers as an ordinary tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    def pick(self, x: RowShardedTensor, rest: tuple[Any, ...]) -> Tensor:
        """Raises for indexing rows by local numbers outside `propagate`."""
        raise self.refusal("indexing by them")

    def as_values(self) -> NodeIds | None:
        """Returns global node ids, one row per edge; None for edges `[2, e]`."""
        with torch._C.DisableTorchFunctionSubclass():
            if not self.dim() or self.size(0) != len(self.rows):
                return None
        return NodeIds.wrap(gids_of(self), self.rows)

    def refusal(self, what: str) -> TypeError:
        """Returns the error of an operation that would be wrong on several ranks."""
        return TypeError(
            f"{self.context.layer} uses the nodes of edges ({what}), and the edges and rows "
            "of other ranks are not here; it cannot run distributed unchanged. Precompute "
            "what it reads as an edge attribute before pdc.partition, or use another layer"
        )

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs operations that are correct on local numbers, and raises for others."""
        return guarded_call(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict) -> Self:
        return self.wrap(self.plain().clone(), self.context, self.rows)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)

    def call(self, name: str, func: Callable, args: Any, kwargs: Any) -> Any:
        """Runs one torch function with these numbers among its arguments."""
        if name == "stack" and (joined := _stack_ends(args, kwargs)) is not None:
            return joined
        if name == "getitem" and args[0] is self and isinstance(args[1], DistTensor):
            return _keep_rows(self, args[1])
        first = args[0] if args else None
        if name in FACTS:
            found = func(*_plain(args), **_plain(kwargs))
            return self._sizes(name, found, args, kwargs) if name in SIZES else found
        if name in _COMPARES:
            return self._compare(name, func, args, kwargs)
        if name in _COPIES and first is self:
            found = func(self.plain(), *args[1:], **kwargs)
            if not found.is_floating_point():
                return self.wrap(found, self.context, self.rows)
            if (ids := self.as_values()) is not None:
                return LayerTensor.wrap(
                    func(ids.to_local(), *args[1:], **kwargs), ids.rows
                )
        raise self.refusal(f"{name}()")

    def _sizes(self, name: str, found: Any, args: Any, kwargs: Any) -> Any:
        """Returns sizes as `LayerTensor` does."""
        place = 1 if isinstance(self, GuardedEdgeIndex) else 0
        if self.plain().dim() <= place or self.plain().size(place) != len(self.rows):
            return found
        return sizes_inside(name, found, self.rows, place, args, kwargs)

    def _compare(self, name: str, func: Callable, args: Any, kwargs: Any) -> Any:
        """Compares by global node ids; both ends of the same edges at once."""
        ends = [end for end in args if isinstance(end, LocalIndexGuard)]
        known, key = self.rows.derived, (name, *map(type, ends))
        one = all(e.dim() == 1 and e.rows is self.rows for e in ends)
        one = one and len(ends) == len(args) == 2 and not kwargs
        before = known.get(key) if one else None
        if before is not None and before[0] is self.context.here:
            _, mask, version = before
            if mask._version == version:
                return mask
        args, kwargs = _by_gid(args), _by_gid(kwargs)
        found = self.compared(func(*_plain(args), **_plain(kwargs)))
        if one and not found.is_inference():
            known[key] = self.context.here, found, found._version
        return found

    def compared(self, found: Any) -> Any:
        """Returns the result of a comparison, one row per edge."""
        if isinstance(found, Tensor) and found.dim() and self.as_values() is not None:
            return DistTensor.wrap(found, self.rows)
        raise self.refusal("a comparison")


@eager
class GuardedEdgeIndex(LocalIndexGuard):
    """Edges `[2, e]` in local numbering: own nodes first, then ghosts."""

    def ends(self, k: int) -> LocalIndexGuard:
        """Returns one row, the sources or the targets `[e]`."""
        kind = Sources if k % 2 == self.context.source else Targets
        return kind.wrap(self.plain()[k], self.context, self.rows)

    def kept(self, mask: DistTensor) -> GuardedEdgeIndex:
        """Returns the edges where a mask is true."""
        probe = DistTensor.wrap(self.plain().t(), self.rows)[mask]
        return self.wrap(probe.to_local().t(), self.context, probe.rows)

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.ends(0), self.ends(1)))

    def call(self, name: str, func: Callable, args: Any, kwargs: Any) -> Any:
        """Runs one torch function on edges."""
        if name == "getitem" and args[0] is self:
            return self._item(args[1])
        if name == "unbind" and _dim(args, kwargs) == 0:
            return self.ends(0), self.ends(1)
        if name == "select" and _dim(args, kwargs) == 0:
            return self.ends(args[2])
        return super().call(name, func, args, kwargs)

    def _item(self, key: Any) -> LocalIndexGuard:
        row, column = (
            key if isinstance(key, tuple) and len(key) == 2 else (key, slice(None))
        )
        picked: Any = None
        if type(row) is int:
            picked = self.ends(row)
        elif row in (slice(None), Ellipsis) if not isinstance(row, Tensor) else False:
            picked = self
        if picked is not None and isinstance(column, DistTensor):
            return _keep_rows(picked, column)
        if picked is None or isinstance(column, Tensor) or column != slice(None):
            raise self.refusal("picking edges by their place")
        return picked  # type: ignore[no-any-return]


@eager
class Sources(LocalIndexGuard):
    """Sources `[e]` in local numbering."""

    def pick(self, x: RowShardedTensor, rest: tuple[Any, ...] = ()) -> Tensor:
        """Fetches ghosts, and returns the rows of node values `x` at the sources `[e]`."""
        if self.dim() != 1 or not x.rows.same_as(self.context.sources):
            raise self.refusal("indexing a tensor without a row per node")
        ids = DistTensor.wrap(gids_of(self), self.rows)
        return DistTensor.wrap(x.to_local(), x.rows)[(ids, *rest) if rest else ids]  # type: ignore[no-any-return]

    def call(self, name: str, func: Callable, args: Any, kwargs: Any) -> Any:
        """Runs one torch function on sources."""
        if name == "scatter_add" and len(args) == 4 and args[2] is self:
            return self._sum_at_sources(func, args[0], args[3])
        return super().call(name, func, args, kwargs)

    def _sum_at_sources(self, func: Callable, out: Any, values: Any) -> Any:
        """Sums values of edges at their sources, as `degree` does; sums go to the owners."""
        nodes, bare = self.context.sources, _plain((out,))[0]
        fits = out.rows.same_as(nodes) if isinstance(out, RowShardedTensor) else True
        if not fits or bare.shape != (len(nodes),) or self.dim() != 1:
            raise self.refusal("scatter_add() into a tensor without a number per node")
        ids = DistTensor.wrap(gids_of(self), self.rows)
        edges = DistTensor.wrap(_plain((values,))[0], self.rows)
        with torch._C._EnableTorchFunction():
            found: Any = DistTensor.wrap(bare, nodes).scatter_add(0, ids, edges)
        if not func.__name__.endswith("_"):
            return found
        bare.copy_(found.to_local())
        if type(out) is Tensor:
            out.__class__, out.rows = DistTensor, nodes  # type: ignore
        return out


@eager
class Targets(LocalIndexGuard):
    """Targets `[e]` in local numbering (or in a shape made to meet values per edge)."""

    def pick(self, x: RowShardedTensor, rest: tuple[Any, ...] = ()) -> Tensor:
        """Returns the rows of node values `x` at the targets, one per edge."""
        if not x.rows.same_as(self.context.nodes) or self.dim() != 1:
            raise self.refusal("indexing a tensor without a row per node")
        local = x.to_local().index_select(0, self.plain())
        return DistTensor.wrap(
            local[(slice(None), *rest)] if rest else local, self.rows
        )

    def call(self, name: str, func: Callable, args: Any, kwargs: Any) -> Any:
        """Runs one torch function on targets."""
        if name in _SCATTERS:
            return self._scattered(name, func, args, kwargs)
        if name in _OF_TORCH_SCATTER:
            return self._reduced(name, func, *args, **kwargs)
        if name == "gather":
            return self._gathered(func, *args, **kwargs)
        picks = name == "index_select" and isinstance(
            first := args[0], RowShardedTensor
        )
        if picks and _dim(args, kwargs) % first.dim() == 0:
            return self.pick(first)
        if name in _RESHAPES and name not in _COPIES and args[0] is self:
            return self.wrap(
                func(*_plain(args), **_plain(kwargs)), self.context, self.rows
            )
        if name == "numel" and self.rows.total:  # no rank takes a branch of its own
            found = super().call(name, func, args, kwargs)
            if int(found):  # `if found` would ask for those of all ranks
                return found
            return NumRows.made(1, getattr(found, "_total", 1), self.rows)
        if name == "max" and len(args) == 1 and not kwargs:
            if not called_by_pyg():
                raise self.refusal("max(); size_i or x.size(0) is the number of nodes")
            last = self.context.here.num_own - 1  # filled: no copy to wait for
            return torch.full((), last, device=self.device)
        if name == "bincount" and args[0] is self and self.dim() == 1:
            return self._count_at_targets(*args[1:], **kwargs)
        return super().call(name, func, args, kwargs)

    def _count_at_targets(self, weights: Any = None, minlength: Any = 0) -> Tensor:
        """Returns the number, or sum of weights, of the edges into each own node."""
        if not is_count_of(minlength, self.context.nodes):
            raise self.refusal("bincount() without minlength=size_i")
        (weights,), own = _plain((weights,)), self.context.here.num_own
        found = torch.bincount(self.plain(), weights, minlength=own)
        return LayerTensor.wrap(found, self.context.nodes)

    def _scattered(self, name: str, func: Callable, args: Any, kwargs: Any) -> Any:
        """Reduces values per edge at their targets, all of which are local."""
        out, index = args[0], args[2] if len(args) > 2 else kwargs.get("index")
        if index is not self or _dim(args, kwargs) % out.dim() != 0:
            raise self.refusal(f"{name}()")
        if isinstance(out, RowShardedTensor) and not out.rows.same_as(
            self.context.nodes
        ):
            raise self.refusal(f"{name}() into a tensor without a row per node")
        own, bare = self.context.here.num_own, _plain((out,))[0]
        if not isinstance(out, RowShardedTensor) and bare.size(0) > own:
            bare = self._own_rows(name, func, bare)
        if (
            bare.size(0) < own
            and not isinstance(out, RowShardedTensor)
            and not bare.requires_grad
        ):
            seen = bare.size(0)  # no edge points here: sized by the largest target
            bare.resize_(own, *bare.shape[1:])[seen:].zero_()
        found = func(bare, *_plain(args[1:]), **_plain(kwargs))
        if func.__name__.endswith("_") and type(out) is Tensor:
            out.__class__, out.rows = DistTensor, self.context.nodes  # type: ignore
            return out
        return DistTensor.wrap(found, self.context.nodes)

    def _reduced(
        self,
        name: str,
        func: Callable,
        src: Any,
        index: Any,
        dim: int = -1,
        out: Any = None,
        dim_size: Any = None,
    ) -> Any:
        """Runs an operator of torch_scatter over the edges of each target, all local."""
        nodes = self.context.nodes
        known = dim_size is None or is_count_of(dim_size, nodes)
        known = known or (type(dim_size) is int and dim_size == nodes.total)
        if index is not self or dim % src.dim() or out is not None or not known:
            raise self.refusal(f"{name}() other than of values per edge to size_i rows")
        own, (src, index) = self.context.here.num_own, _plain((src, index))
        found = func(src, index, 0, None, own)
        if isinstance(found, Tensor):
            return DistTensor.wrap(found, self.context.nodes)
        place = self.rows.place_on(index.device)
        place = torch.cat([place, place.new_full((1,), self.rows.count)])  # of no edge
        values, first = found
        return tuple(
            DistTensor.wrap(part, self.context.nodes) for part in (values, place[first])
        )

    def _gathered(
        self, func: Callable, input: Any, dim: int, index: Any, **how: Any
    ) -> Any:
        """Gathers entries of own nodes' rows at the targets, for each edge and column."""
        rows = input.rows if isinstance(input, RowShardedTensor) else None
        whole = rows is not None and rows.same_as(self.context.nodes)
        if index is not self or dim % input.dim() or not whole:
            raise self.refusal("gather() of a tensor without a row per node")
        return DistTensor.wrap(func(*_plain((input, 0, index)), **how), self.rows)

    def _own_rows(self, name: str, func: Callable, table: Tensor) -> Tensor:
        """Returns own nodes' rows of an ordinary tensor with a row for every node."""
        nodes = self.context.nodes
        if table.size(0) != nodes.total:
            raise self.refusal(f"{name}() into a tensor without a row per node")
        own = table.index_select(0, nodes.gid_on(table.device))
        if not func.__name__.endswith("_"):
            return own
        if table.requires_grad:
            raise self.refusal(f"{func.__name__}() into a tensor that learns")
        return table.resize_(own.shape).copy_(own)


tells_errors(LocalIndexGuard)


def guarded_call(func: Callable, args: Any, kwargs: Any) -> Any:
    """Runs a torch function with guarded arguments, or raises."""
    guard = find_guard((*args, *kwargs.values()))
    assert guard is not None
    name = base_name(func)
    if name in _LOOKS_UP and _is_table_lookup(name, guard, args, kwargs):
        args, kwargs = _as_values(args), _as_values(kwargs)
        found = dispatch.apply(func, args, kwargs)
        return LayerTensor.wrap(found.to_local(), found.rows)
    if name in _VALUED and name not in _COMPARES and func.__name__[-1:] != "_":
        if guard.as_values() is not None:
            return func(*_as_values(args), **_as_values(kwargs))
    with torch._C.DisableTorchFunctionSubclass():
        return guard.call(name, func, args, kwargs)


def _is_table_lookup(name: str, guard: LocalIndexGuard, args: Any, kwargs: Any) -> bool:
    """Tells whether guarded numbers index an ordinary table of all nodes."""
    table, key = args[0], args[-1]
    if name == "embedding":
        table, key = (*args, kwargs.get("weight"))[1], args[0]
    elif name == "index_select":
        key = args[2] if len(args) > 2 else kwargs["index"]
        if _dim(args, kwargs) % max(table.dim(), 1):
            return False
    if key is not guard or not isinstance(table, Tensor) or not table.dim():
        return False
    if isinstance(table, (RowShardedTensor, LocalIndexGuard)):
        return False
    of = guard.context.sources if isinstance(guard, Sources) else guard.context.nodes
    if table.size(0) < of.total:
        raise guard.refusal("looking up a table of fewer rows than there are nodes")
    return guard.as_values() is not None


_SIZES = {"size_i": 0, "dim_size": 0, "size_j": 1}


def typed(edges: GuardedEdgeIndex, name: str, value: Any) -> Any:
    """Wraps a value for a layer's own code: a size, node numbers, or values per edge."""
    context = edges.context
    if name in _SIZES and isinstance(value, int):
        rows = context.sources if _SIZES[name] else context.nodes
        return NumRows.made(value, rows.total, rows)
    if name == "size" and isinstance(value, (list, tuple)):
        return [
            typed(edges, end, n)
            for end, n in zip(("size_j", "size_i"), value, strict=True)
        ]
    if not isinstance(value, Tensor):
        return value
    if name == "edge_index":
        return edges
    if name in ("index", "edge_index_i"):
        return Targets.wrap(value, context, edges.rows)
    if name == "edge_index_j":
        return Sources.wrap(value, context, edges.rows)
    return LayerTensor.wrap(value, edges.rows) if name[-2:] in ("_i", "_j") else value


def find_guard(values: Any) -> LocalIndexGuard | None:
    """Returns the first guard among arguments, with sources before targets."""
    found: LocalIndexGuard | None = None
    for value in values:
        if isinstance(value, (tuple, list)):
            value = find_guard(value)
        if isinstance(value, LocalIndexGuard) and not isinstance(found, Sources):
            found = value if found is None or isinstance(value, Sources) else found
    return found


def _keep_rows(picked: LocalIndexGuard, mask: DistTensor) -> LocalIndexGuard:
    if isinstance(picked, GuardedEdgeIndex):
        return picked.kept(mask)
    probe = DistTensor.wrap(picked.plain(), picked.rows)[mask]
    return picked.wrap(probe.to_local(), picked.context, probe.rows)


def _stack_ends(args: Any, kwargs: Any) -> GuardedEdgeIndex | None:
    """Returns the edges whose sources and targets are stacked; None for different edges."""
    ends = list(args[0])
    if (
        len(ends) != 2
        or _dim(args, kwargs) != 0
        or not all(isinstance(end, LocalIndexGuard) and end.dim() == 1 for end in ends)
    ):
        return None
    context, rows = ends[0].context, ends[0].rows
    kinds = (Sources, Targets) if context.source == 0 else (Targets, Sources)
    if any(type(e) is not k for e, k in zip(ends, kinds, strict=True)):
        return None
    if not rows.same_as(ends[1].rows):
        return None
    local = torch.stack([end.plain() for end in ends])
    return GuardedEdgeIndex.wrap(local, context, rows)


def _dim(args: Any, kwargs: Any) -> int:
    found = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    return int(found)


def _by_gid(tree: Any) -> Any:
    """Returns arguments with global ids in place of local node numbers."""

    def by_gid(value: Any) -> Any:
        return gids_of(value) if isinstance(value, LocalIndexGuard) else value

    return tree_map(by_gid, tree)


def _as_values(tree: Any) -> Any:
    """Returns arguments with global ids as values, and numbers of rows as totals."""

    def as_values(value: Any) -> Any:
        if not isinstance(value, LocalIndexGuard):
            return with_total(value)
        ids = value.as_values()
        if ids is None:
            raise value.refusal("a formula")
        return ids

    return tree_map(as_values, tree)


def gids_of(value: LocalIndexGuard) -> Tensor:
    """Returns the global ids of local node numbers, each in its own node type."""
    context, lid = value.context, value.plain()
    source = context.here.source_gid_on(context.sources, lid.device)
    target = context.nodes.gid_on(lid.device)
    if isinstance(value, Sources):
        return source[lid]
    if isinstance(value, Targets):
        return target[lid]
    ends = [source[lid[context.source]], target[lid[1 - context.source]]]
    return torch.stack(ends if context.source == 0 else ends[::-1])


def _plain(tree: Any) -> Any:
    def bare(value: Any) -> Any:
        if isinstance(value, LocalIndexGuard):
            return value.plain()
        return value.to_local() if isinstance(value, RowShardedTensor) else value

    return tree_map(bare, tree)


@eager
class LayerTensor(DistTensor):
    """A row-sharded tensor inside a layer, with local sizes and indices."""

    _inside = True

    def __getitem__(self, key: Any) -> Any:
        """Indexes as outside of layers, except ranges, which count this rank's rows."""
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


@eager
class NodeIds(LayerTensor):
    """Global node ids per edge, and integers computed from them; no local indices."""

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs one torch function; integers computed from ids are no local indices, either."""
        name, kwargs = base_name(func), kwargs or {}
        if name in _SCATTERS or name in _PLACING:
            raise unsupported_op(
                f"{name}() of numbers made of ids of nodes, in a layer,"
            )
        found = super().__torch_function__(func, types, args, kwargs)
        if isinstance(found, LayerTensor):
            whole = not (found.is_floating_point() or found.dtype == torch.bool)
            kind = NodeIds if whole else LayerTensor
            if type(found) is not kind:
                return kind.wrap(found.to_local(), found.rows)
        return found


_PLACING = frozenset("bincount index_copy index_fill index_put setitem".split())


class GhostMeshGuard:
    """A mesh on which reductions raise: ghosts would count twice."""

    local_sizes = True

    def __init__(self, mesh: Mesh, layer: str) -> None:
        self.size, self.next_key, self.layer = mesh.size, mesh.next_key, layer
        self.rank = mesh.rank

    @property
    def world(self) -> Any:
        """Raises; every reduction uses this axis."""
        raise TypeError(
            f"{self.layer} reduces over the sources of edges (batch norm, mean, ...), "
            "where ghost rows would count twice; do it before the layer"
        )

    control = world

"""HaloConv: any other PyG layer, unchanged, on own rows and the ghosts it needs."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torch_geometric.nn import MessagePassing

from pyg_distcomm import reductions
from pyg_distcomm.edge_index import DistEdgeIndex
from pyg_distcomm.nn.guard import GuardedEdges
from pyg_distcomm.rows import Rows
from pyg_distcomm.tensor import DistTensor, keyed_dropout
from pyg_distcomm.topology import Topology, gcn_norm


class HaloConv(torch.nn.Module):
    """Runs any PyG layer, unchanged, on a graph spread over ranks.

    A layer that takes a pair of features gets (own and ghost rows, own rows), so its
    input travels. Of any other layer the tensors it hands to `propagate` travel.
    Normalisation by `gcn_norm` is global. Dropout on edges is keyed by the edge, so
    that masks do not depend on the number of ranks. Parameters, their names and
    `state_dict` are those of the layer.

    Args:
        conv: a `MessagePassing` layer; it is shared, not copied.

    Shapes (this rank): x `[n_i, F_in]` DistTensor -> `[n_i, F_out]` DistTensor.
    Price: `halo.price(F)` per exchanged tensor of width F, and its transpose backward.

    Raises:
        TypeError: if conv is no MessagePassing layer, or reads the topology outside
            `propagate`; the layer is named.
        ValueError: on grids other than (P, 1, 1), where rows do not meet their edges.
    """

    def __init__(self, conv: MessagePassing) -> None:
        super().__init__()
        if not isinstance(conv, MessagePassing):
            raise TypeError(
                f"HaloConv wraps a MessagePassing layer of PyG, got {type(conv).__name__}"
            )
        self._parameters = conv._parameters
        self._buffers = conv._buffers
        self._modules = conv._modules
        self._wrapped = [conv]  # in a list: it is this module, not a child of it

    @property
    def conv(self) -> MessagePassing:
        """The wrapped layer."""
        return self._wrapped[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the layer with its own arguments."""
        self.conv.training = self.training
        return through_halo(self.conv, self.conv, *args, **kwargs)

    def reset_parameters(self) -> None:
        """Resets the layer's parameters."""
        self.conv.reset_parameters()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_wrapped":
                raise
            return getattr(self.conv, name)

    def __repr__(self) -> str:
        return f"HaloConv({self.conv})"


def through_halo(
    conv: MessagePassing, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Runs `forward` of `conv`, fetching ghosts where the layer meets its edges."""
    bound = inspect.signature(conv.forward).bind(*args, **kwargs)
    given = bound.arguments
    name, edge_index = _edge_argument(given)
    if edge_index is None:
        return forward(*args, **kwargs)
    grid = edge_index.nodes.mesh.grid
    if grid[1:] != (1, 1):
        raise ValueError(
            f"{type(conv).__name__} runs by halo exchange, on grids (P, 1, 1), but the "
            f"mesh is {grid}; use pdc.init('1d'), or a GCN or mean/sum SAGE layer"
        )
    topology, carry = edge_index.topology, (lambda value: value)
    if conv.flow == "target_to_source":
        back = topology.reversed
        topology, carry = back.topology, back.carry
    visit = _Visit(conv, topology)
    given[name] = visit.edges
    for key, value in list(given.items()):
        if key != name:
            given[key] = _argument(conv, key, value, edge_index, visit, carry)
    with visit.running():
        out = forward(*bound.args, **bound.kwargs)
    return tree_map(visit.outcome, out)


def _edge_argument(given: dict[str, Any]) -> tuple[str, DistEdgeIndex | None]:
    for name, value in given.items():
        if isinstance(value, DistEdgeIndex):
            return name, value
    return "", None


def _argument(
    conv: MessagePassing,
    name: str,
    value: Any,
    edge_index: DistEdgeIndex,
    visit: _Visit,
    carry: Callable[[Tensor], Tensor],
) -> Any:
    """What the layer gets for one of its arguments."""
    if isinstance(value, (tuple, list)) and any(isinstance(v, DistTensor) for v in value):
        source, target = value
        edge_index.check_nodes(source, f"{name}[0]")
        return visit.ghosted(source), target
    if not isinstance(value, DistTensor):
        if name == "x" and isinstance(value, Tensor):
            edge_index.check_nodes(value, name)
        return value
    # a graph may have as many nodes as edges here: the layer's own name for it decides
    on_edges = value.rows.same_as(edge_index.edges) and value.rows is not edge_index.nodes
    if on_edges and not value.rows.same_as(edge_index.nodes):
        return carry(value.to_local())
    if on_edges and name.startswith("edge"):
        return carry(value.to_local())
    edge_index.check_nodes(value, name)
    return (visit.ghosted(value), value) if _takes_pair(conv, name) else value


def _takes_pair(conv: MessagePassing, name: str) -> bool:
    hint = str(inspect.signature(conv.forward).parameters[name].annotation)
    return "Tuple" in hint or "Pair" in hint


class _Visit:
    """One run of a layer on this rank: its edges, and what stands in for torch's own."""

    def __init__(self, conv: MessagePassing, topology: Topology) -> None:
        here = topology.locals
        self.conv, self.topology, self.here = conv, topology, here
        self.source = 0 if conv.flow == "source_to_target" else 1
        ends = [here.source_lid, here.target_lid]
        local = torch.stack(ends if self.source == 0 else ends[::-1])
        self.name = type(conv).__name__
        self.edges = GuardedEdges.wrap(local, self.name, self.source)
        self.current = local

    def ghosted(self, x: DistTensor) -> Tensor:
        """Own and ghost rows, as an ordinary tensor."""
        return self.here.with_ghosts(x.to_local())

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Puts our `propagate`, `edge_updater`, `gcn_norm` and dropout in place."""
        layers = [m for m in self.conv.modules() if isinstance(m, MessagePassing)]
        with contextlib.ExitStack() as stack:
            for layer in layers:
                for verb in ("propagate", "edge_updater"):
                    stack.enter_context(_shadowed(layer, verb, self._wrap(layer, verb)))
            for scope in _modules_of(layers):
                stack.enter_context(_replaced(scope, "gcn_norm", self._norm(scope)))
            stack.enter_context(_KeyedLayer(self))
            yield

    def _wrap(self, layer: MessagePassing, verb: str) -> Callable[..., Any]:
        call = getattr(type(layer), verb)
        needed = {
            a[:-2]
            for a in (*layer._user_args, *layer._edge_user_args)
            if a.endswith("_j")
        }

        def run(edge_index: Any, size: Any = None, **kwargs: Any) -> Any:
            self.current = local = self._plain(edge_index)
            for name, value in kwargs.items():
                kwargs[name] = self._fetched(layer, value, name in needed)
            shape = [self.here.num_own, self.here.num_own]
            shape[self.source] += len(self.here.ghost_gid)
            out = call(layer, local, size=tuple(shape), **kwargs)
            if verb == "propagate" and isinstance(out, Tensor):
                return DistTensor.wrap(out, self.topology.nodes)
            return out

        return run

    def _plain(self, edge_index: Any) -> Tensor:
        if isinstance(edge_index, GuardedEdges):
            return edge_index.plain()
        raise TypeError(
            f"{self.name} makes an edge_index of its own, whose sources may be on other "
            "ranks; it cannot run distributed unchanged"
        )

    def _fetched(self, layer: MessagePassing, value: Any, needed: bool) -> Any:
        """One argument of propagate: a pair (every row that edges come from, own rows)."""
        if isinstance(value, (tuple, list)) and len(value) == 2:
            pair = [self._local(v) for v in value]
            source = value[self.source]
            if needed and isinstance(source, DistTensor):
                pair[self.source] = self.ghosted(source)
            return tuple(pair)
        if not isinstance(value, DistTensor):
            return value
        local = value.to_local()
        if not needed:
            return local
        if layer.node_dim % local.dim() != 0:
            raise ValueError(
                f"{self.name} has its nodes in dim {layer.node_dim} of a tensor of shape "
                f"{tuple(local.shape)}; rows must be dim 0 (node_dim=0)"
            )
        both = self.here.with_ghosts(local)
        return (both, local) if self.source == 0 else (local, both)

    @staticmethod
    def _local(value: Any) -> Any:
        return value.to_local() if isinstance(value, DistTensor) else value

    def _norm(self, scope: dict[str, Any]) -> Callable[..., Any]:
        original = scope["gcn_norm"]

        def norm(
            edge_index: Any,
            edge_weight: Any = None,
            num_nodes: Any = None,
            improved: bool = False,
            add_self_loops: bool = True,
            flow: str = "source_to_target",
            dtype: Any = None,
        ) -> Any:
            if not isinstance(edge_index, GuardedEdges):
                rest = (num_nodes, improved, add_self_loops, flow, dtype)
                return original(edge_index, edge_weight, *rest)
            local = edge_index.plain()
            local = local if self.source == 0 else local.flip(0)
            kind = dtype or torch.get_default_dtype()
            out, weight = gcn_norm(
                self.here, local, edge_weight, improved, add_self_loops, kind
            )
            out = out if self.source == 0 else out.flip(0)
            self.current = out
            return GuardedEdges.wrap(out, self.name, self.source), weight

        return norm

    def edge_keys(self) -> Tensor:
        """A key per current edge, from its end points: the same on any rank."""
        gid = self.topology.all_gid
        ends = gid[self.current.cpu()]
        key = ends[0] * self.topology.nodes.total + ends[1]
        order = torch.argsort(key, stable=True)
        ranked = key[order]
        fresh = torch.ones(len(key), dtype=torch.bool)
        fresh[1:] = ranked[1:] != ranked[:-1]
        place = torch.arange(len(key))
        first = torch.cummax(torch.where(fresh, place, 0), 0).values if len(key) else place
        copy = torch.empty_like(key)
        copy[order] = place - first
        return key + copy * 0x1E3779B97F4A7C15  # parallel edges draw on their own

    def rows_of(self, x: Tensor) -> Rows | None:
        """Whose rows an ordinary tensor inside the layer has: edges', or all nodes'."""
        mesh, total = self.topology.nodes.mesh, self.topology.nodes.total
        if x.dim() == 0:
            return None
        if x.size(0) == self.current.size(1):
            return Rows(self.edge_keys(), total, mesh, None, whole=False)
        if x.size(0) == len(self.topology.all_gid):
            return Rows(self.topology.all_gid, total, mesh, None, whole=False)
        return None

    def outcome(self, value: Any) -> Any:
        """One output of the layer: own rows, or edges in global ids."""
        if isinstance(value, GuardedEdges):
            return self.topology.all_gid.to(value.device)[value.plain()]
        if isinstance(value, DistTensor) or not isinstance(value, Tensor):
            return value
        if value.dim() and value.size(0) == self.here.num_own != self.current.size(1):
            return DistTensor.wrap(value, self.topology.nodes)
        return value


class _KeyedLayer(TorchFunctionMode):
    """Keys dropout, and makes batch norm global, on a layer's inner tensors."""

    def __init__(self, visit: _Visit) -> None:
        super().__init__()
        self.visit = visit

    def __torch_function__(
        self, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (F.dropout, F.batch_norm) and type(args[0]) is Tensor:
            stand_in = self._dropout if func is F.dropout else self._batch_norm
            bound = inspect.signature(func).bind(*args, **kwargs)
            bound.apply_defaults()
            if bound.arguments["training"]:
                return stand_in(**bound.arguments)
        return func(*args, **kwargs)

    def _rows(self, x: Tensor, what: str) -> Rows:
        rows = self.visit.rows_of(x)
        if rows is None:
            raise TypeError(
                f"{self.visit.name}: {what} on a tensor of shape {tuple(x.shape)} that has "
                "a row neither per node nor per edge cannot be made independent of ranks"
            )
        return rows

    def _dropout(self, input: Tensor, p: float, training: bool, inplace: bool) -> Tensor:
        if p == 0:
            return input
        rows = self._rows(input, "dropout")
        return keyed_dropout(input, p, rows.gid.to(input.device), rows.mesh.next_key())

    def _batch_norm(self, input: Tensor, training: bool, **given: Any) -> Tensor:
        rows = self._rows(input, "batch norm")
        if input.size(0) != self.visit.current.size(1):
            raise TypeError(
                f"{self.visit.name}: batch norm over own and ghost rows would count rows "
                "twice; normalise before the layer"
            )
        return reductions.batch_norm(input, rows, **given)


@contextlib.contextmanager
def _shadowed(layer: MessagePassing, name: str, stand_in: Any) -> Iterator[None]:
    layer.__dict__[name] = stand_in
    try:
        yield
    finally:
        del layer.__dict__[name]


@contextlib.contextmanager
def _replaced(scope: dict[str, Any], name: str, stand_in: Any) -> Iterator[None]:
    before = scope[name]
    scope[name] = stand_in
    try:
        yield
    finally:
        scope[name] = before


def _modules_of(layers: list[MessagePassing]) -> list[dict[str, Any]]:
    names = {c.__module__ for layer in layers for c in type(layer).__mro__}
    scopes = [vars(sys.modules[name]) for name in sorted(names) if name in sys.modules]
    return [scope for scope in scopes if "gcn_norm" in scope]



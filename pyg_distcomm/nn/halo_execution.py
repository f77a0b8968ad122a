"""Runs an unchanged PyG layer on this rank's edges; each run is one `HaloVisit`."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch_geometric.backend
import torch_geometric.nn.aggr.base
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch_geometric.nn import HeteroLinear, MessagePassing
from torch_geometric.nn.conv import dna_conv
from torch_geometric.typing import WITH_SEGMM

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.failure import needing
from pyg_distcomm.comm.gradient_averaging import as_replicated
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.graph.edge_index import DistEdgeIndex, rows_of_edges
from pyg_distcomm.graph.topology import OperatorKind, Topology
from pyg_distcomm.halo.compressed import LayerExchange
from pyg_distcomm.halo.halo import DEGREES, NAMES, Link
from pyg_distcomm.nn.index_guard import (
    GhostMeshGuard,
    GuardContext,
    GuardedEdgeIndex,
    LayerTensor,
    LocalIndexGuard,
    gids_of,
    typed,
)
from pyg_distcomm.nn.layer_context import warn_about_grid
from pyg_distcomm.nn.message_forms import (
    AGGREGATIONS,
    MESSAGES,
    adds_rows,
    aggregates_itself,
    check_sizes,
    is_coded,
    layers_of,
    mask_messages,
    untemplated,
    weigh_messages,
    weighs_messages,
)
from pyg_distcomm.nn.node_chunks import (
    arguments_of,
    in_chunks,
    is_pair,
    pads,
    unaveraged,
)
from pyg_distcomm.nn.patched_functions import (
    STAND_INS,
    MatrixWeights,
    RngGuard,
    by_row,
    replace_in_module,
    replaced,
)
from pyg_distcomm.tensor.dist_tensor import DistTensor
from pyg_distcomm.tensor.row_sharded import RowShardedTensor, version_of

_VERBS = """propagate edge_updater message explain_message edge_update aggregate
update""".split()


@dataclass(frozen=True, eq=False)
class _Call:
    """Holds the edges and arguments of one call of `propagate` or `edge_updater`."""

    edges: GuardedEdgeIndex
    given: dict[str, Any]


class HaloVisit:
    """Runs a layer once on this rank, with replacements for its `propagate` and helpers.

    On a grid with more than one axis, layers that add up rows are computed as products on
    the grid if that moves fewer words; see `Topology.adds_on_grid`. Otherwise rows travel,
    with a warning the first time.

    Args:
        conv: the layer.
        topology: the edges, in the direction of messages.
        call: the exchange by the layer's link policy; None is exact.
        coded: whether that exchange may be coded or late.
        whole: whether the layer must not run in chunks.
        keeps: whether ghosts of constant arguments are cached, if all exchanges are exact.
        values: the values of a sparse adjacency, if the edges are given as one.
        of_torch: whether the adjacency is a matrix of torch.sparse.
    """

    def __init__(
        self,
        conv: MessagePassing,
        topology: Topology,
        call: LayerExchange | None,
        coded: bool,
        whole: bool = False,
        keeps: bool = True,
        values: DistTensor | None = None,
        of_torch: bool = False,
    ) -> None:
        self.call, self.link_codes = call, coded
        # chunks pass gradients to the arguments of a layer, not to values
        self.whole = whole or (values is not None and values.requires_grad)
        self.keeps = keeps and not coded
        self.topology = topology
        self.adding = [layer for layer in layers_of(conv) if adds_rows(layer)]
        # whether ghosts are fetched where sources are looked up, not before
        self.late = coded or (bool(self.adding) and topology.adds_on_grid)
        self.fetched: list[tuple[Tensor, Tensor]] = []  # exact ghosts
        # arguments as the layer gets them and as given, for the cache of ghosts, with their
        # versions: a layer may write to them
        self.inputs: list[tuple[Tensor, DistTensor, int]] = []
        self.coded = self.asked = 0
        self.conv, self.here = conv, topology.locals
        self.nodes, self.all_gid = topology.nodes, topology.all_gid
        self.sources = topology.source_rows
        self.source = 0 if conv.flow == "source_to_target" else 1
        context = type(conv).__name__, self.nodes, self.sources, self.here, self.source
        self.context = GuardContext(*context, self.degrees, values)
        self.of_torch = of_torch
        local = self.here.ends
        local = local if self.source == 0 else local.flip(0)
        self.edges = GuardedEdgeIndex.wrap(local, self.context, topology.edges)
        overlap: Any = GhostMeshGuard(self.nodes.mesh, self.context.layer)
        # one more in total, so that these rows never equal the own nodes, even on one rank
        total = self.sources.total + 1
        self.both = Rows(self.all_gid, total, overlap, None, whole=False)
        self.calls: list[_Call] = []
        self.most: int | None = None

    def argument(self, given: DistTensor, nodes: Rows) -> DistTensor:
        """Wraps an argument with the rows of `nodes` for the layer."""
        x = LayerTensor.wrap(given.to_local().contiguous(), nodes)
        if self.keeps:
            self.inputs.append((x, given, version_of(x)))
        return x

    def ghosted(self, x: DistTensor) -> DistTensor:
        """Returns own and ghost rows."""
        rows = self._constant_rows(x)
        if rows is None:
            rows = self.here.with_ghosts(x.to_local().contiguous())
        return LayerTensor.wrap(rows, self.both)

    def _constant_rows(self, x: Tensor) -> Tensor | None:
        """Returns own and ghost rows of a constant argument, if they are cached."""
        for known, given, version in self.inputs:
            if known is x and version_of(x) == version:
                return self.topology.constant_rows(given)
        return None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Replaces `propagate`, `gcn_norm`, dropout and others of PyG in a block."""
        with contextlib.ExitStack() as stack:
            layers = layers_of(self.conv)
            for layer in layers:
                check_sizes(type(layer))
                for verb in _VERBS:
                    call = getattr(self, f"_{verb}")(layer, getattr(layer, verb))
                    stack.enter_context(replaced(vars(layer), verb, call))
            for part in self.conv.modules():
                if isinstance(part, _BY_ROW):
                    stack.enter_context(
                        replaced(vars(part), "forward", by_row(part.forward))
                    )
            if WITH_SEGMM:  # PyG chooses by the local number of edges of a type
                stack.enter_context(_SEGMENTS)
                backend = vars(torch_geometric.backend)
                stack.enter_context(replaced(backend, "use_segment_matmul", False))
            stack.enter_context(
                replace_in_module(_AGGR, "to_dense_batch", _same_width_on_all_ranks)
            )
            for scope in scopes_of(layers):
                for name in STAND_INS.keys() & scope.keys():
                    stack.enter_context(replace_in_module(scope, name, STAND_INS[name]))
            stack.enter_context(RngGuard(self.context.layer))
            before = _running.set(self)
            stack.callback(_running.reset, before)
            stack.callback(self.fetched.clear)
            stack.callback(self.inputs.clear)
            yield

    def explaining_memory(
        self, given: dict[str, Any]
    ) -> contextlib.AbstractContextManager[None]:
        """Returns a context that explains an out-of-memory error of the layer."""
        edges = len(self.topology.edges)

        def size() -> int:
            found = [v for v in tree_leaves(given) if isinstance(v, DistTensor)]
            local = [v.to_local() for v in found]
            widths = [v.shape[1:].numel() * v.element_size() for v in local if v.dim()]
            return (edges + len(self.all_gid)) * max(widths, default=8)

        what = f"{self.context.layer}, with messages of {edges:,} edges and its halo,"
        mesh = self.nodes.mesh  # the mesh of a chunk has no axes
        watch = mesh.world.watch if isinstance(mesh, Mesh) else None
        return needing(what, size, watch, self.topology.device)

    def wrap_output(self, value: Any) -> Any:
        """Returns one output of the layer: own rows, or edges in global ids."""
        if isinstance(value, LocalIndexGuard):
            return self._edges_of(value)
        if isinstance(value, DistTensor) and value.rows is self.both:
            return DistTensor.wrap(value.to_local()[: len(self.sources)], self.sources)
        if isinstance(value, LayerTensor):
            return DistTensor.wrap(value.to_local(), value.rows)
        return value

    def _edges_of(self, value: LocalIndexGuard) -> Tensor:
        """Returns edges, or one end of each, as global node ids."""
        gid = gids_of(value)
        rows = rows_of_edges(value.rows.gid, value.rows.total, self.nodes)
        if not value.rows.whole:
            rows = replace(rows, whole=False, known=value.rows.known)
        if value.dim() == 1:
            return DistTensor.wrap(gid, rows)
        if self.sources is not self.nodes:
            return DistEdgeIndex.build(gid, self.nodes, rows, sources=self.sources)
        ends = DistTensor.wrap(gid[0], rows), DistTensor.wrap(gid[1], rows)
        return DistEdgeIndex.of_ends(*ends)

    # replacements for the methods of a layer

    def _propagate(self, layer: MessagePassing, call: Callable) -> Callable:
        wanted = {*layer._user_args}
        call = untemplated(layer) if layer.explain else call

        def run(edge_index: Any, size: Any = None, **given: Any) -> Any:
            found = self._add_on_grid(layer, call, edge_index, given)
            if found is None:
                found = self._run_with_ghosts(layer, call, wanted, edge_index, given)
            return self._wrap_own_rows(found)

        return run

    def _edge_updater(self, layer: MessagePassing, call: Callable) -> Callable:
        wanted = {*layer._edge_user_args}
        return lambda edge_index, size=None, **given: self._run_with_ghosts(
            layer, call, wanted, edge_index, given
        )

    def _add_on_grid(
        self, layer: MessagePassing, call: Callable, edges: Any, given: dict[str, Any]
    ) -> Tensor | None:
        """Adds up rows by a product on the grid; returns None if it cannot, and warns once."""
        if self.nodes.mesh.grid[1:] == (1, 1) and not self.topology.adds_on_grid:
            return None
        why = "what it makes of messages is no sum of rows"
        if layer in self.adding:
            why = "its link codes rows, which are summed where they arrive"
            if not self.link_codes:
                why = "edges go between two types of nodes"
            if not self.link_codes and self.topology.sources is None:
                why = "a product on the grid takes no fewer numbers"
                if self.topology.adds_on_grid:
                    found = self._product(layer, call, edges, given)
                    if found is not None:
                        return found
                    why = "weights of its edges learn, or are computed in each run"
        warn_about_grid(self.conv, self.topology, why)
        return None

    def _product(
        self, layer: MessagePassing, call: Callable, edges: Any, given: dict[str, Any]
    ) -> Tensor | None:
        """Multiplies by the matrix of these edges; None if its values are unknown."""
        name = MESSAGES[type(layer).message]
        x, weight = given.get("x"), None if name is None else given.get(name)
        weight = self._values_for(layer) if weight is None else weight
        if set(given) - {"x", name} or not isinstance(edges, GuardedEdgeIndex):
            return None
        if isinstance(x, (tuple, list)):
            x = x[self._place_of(call)]
        x = self._shard(x, self.nodes)
        if (
            not isinstance(x, DistTensor)
            or x.dim() != 2
            or edges.context.here is not self.here
        ):
            return None
        matrix = MatrixWeights(OperatorKind(), None, 0)
        if weight is not None:
            known = MatrixWeights.of(weight) if isinstance(weight, DistTensor) else None
            if known is None or weight.rows is not edges.rows or weight.dim() != 1:
                return None
            matrix = known
        if weight is None and edges.rows is not self.topology.edges:
            return None
        wide = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
        if not x.is_floating_point():
            return None
        local = self._rows_of_nodes("x", x, self.nodes).contiguous()
        z = self.topology.add_rows(local, matrix.weight, matrix.kind, wide)
        if AGGREGATIONS[type(layer.aggr_module)] == "mean":
            target = edges.plain()[1 - self.source]
            ones = torch.ones_like(target)
            count = ones.new_zeros(len(z)).index_add_(0, target, ones).clamp(min=1)
            z = z / count.to(z.dtype).unsqueeze(1)
        return z

    def _place_of(self, call: Callable) -> int:
        """Returns the position of sources in a pair; always 0 for PyG's templates."""
        standard = getattr(MessagePassing, call.__name__, None)
        return self.source if getattr(call, "__func__", None) is standard else 0

    def _message(self, layer: MessagePassing, call: Callable) -> Callable:
        values = self._values_for(layer)
        if values is None:
            return self._edge_update(layer, call)

        def run(**given: Any) -> Tensor:
            found, rows = _plain_tensors(call(**self._typed(given))), values.rows
            edges = self.calls[-1].edges.rows
            return weigh_messages(layer, found, values.to_local(), edges, rows)

        return run

    def _values_for(self, layer: MessagePassing) -> DistTensor | None:
        """Returns the adjacency values with which PyG would implicitly weigh messages."""
        values = self.context.values
        return values if weighs_messages(layer, values, self.of_torch) else None

    def _edge_update(self, layer: MessagePassing, call: Callable) -> Callable:
        return lambda **given: call(**self._typed(given))

    def _aggregate(self, layer: MessagePassing, call: Callable) -> Callable:
        custom = aggregates_itself(layer)
        dense = any(pads(m) for m in layer.modules())

        def run(inputs: Any, *args: Any, **given: Any) -> Any:
            if custom:
                return call(inputs, *args, **self._typed(given))
            if isinstance(inputs, DistTensor):
                self._check_rows(inputs, "message")
            if dense:
                self.most = self._max_messages(given["index"])
            plain = _plain_tensors(inputs)
            try:
                return self._wrap_own_rows(call(plain, *args, **given))
            except RuntimeError:
                if plain.size(0) > 0:
                    raise
                none = self._aggregate_no_messages(call, plain, given)
                return self._wrap_own_rows(none)

        return run

    def _explain_message(self, layer: MessagePassing, call: Callable) -> Callable:
        if getattr(call, "__func__", None) is not MessagePassing.explain_message:
            return lambda inputs, **given: call(inputs, **self._typed(given))
        return lambda inputs, **_: mask_messages(
            layer,
            _plain_tensors(inputs),
            self.calls[-1].edges.rows,
            self.topology.edges,
        )

    def _max_messages(self, index: Tensor) -> int:
        """Returns the most messages that any node of any rank receives; collective."""
        counts = torch.bincount(index, minlength=1).max()
        return int(collectives.all_reduce(counts, self.nodes.mesh.world, "max"))

    def _aggregate_no_messages(
        self, call: Callable, inputs: Tensor, given: dict
    ) -> Tensor:
        """Aggregates no messages, by adding one for an extra node, which PyG needs."""
        own = given["dim_size"]
        inputs = torch.cat([inputs, inputs.new_ones(1, *inputs.shape[1:])])
        given["index"] = given["index"].new_full((1,), own)
        given["dim_size"] = own + 1
        out: Tensor = call(inputs, **given)
        return out[:own]

    def _update(self, layer: MessagePassing, call: Callable) -> Callable:
        if type(layer).update is MessagePassing.update:
            return call
        return lambda inputs, *args, **given: call(
            self._wrap_own_rows(inputs), *args, **self._typed(given)
        )

    def _wrap_own_rows(self, value: Any) -> Any:
        if (
            isinstance(value, Tensor)
            and not isinstance(value, RowShardedTensor)
            and value.dim()
        ):
            context = self.calls[-1].edges.context if self.calls else self.context
            return LayerTensor.wrap(value, context.nodes)
        return value

    def _run_with_ghosts(
        self,
        layer: MessagePassing,
        call: Callable,
        wanted: set[str],
        edges: Any,
        given: dict[str, Any],
    ) -> Any:
        """Runs `propagate` or `edge_updater` on ordinary tensors, with ghosts fetched."""
        if (
            not isinstance(edges, GuardedEdgeIndex)
            or edges.context.here is not self.here
        ):
            raise TypeError(
                f"{self.context.layer} gives propagate an edge_index of its own (or one "
                "cached for another graph), whose sources may be on other ranks; it "
                "cannot run distributed unchanged"
            )
        place = self._place_of(call)
        local = {
            name: self._fetched(layer, call.__name__, name, value, wanted, place)
            for name, value in given.items()
        }
        ends = edges.plain() if self.source == 0 else edges.plain().flip(0)
        size = (len(self.all_gid), self.here.num_own)
        run = functools.partial(self._run, layer, call)
        cap = self.nodes.memory
        if cap is not None and not self.whole:
            sorted_out = arguments_of(layer, wanted, edges, given, local)
            by_edge = call.__name__ == "edge_updater"
            how = cap, edges, ends, run, self._replay_scopes, by_edge
            found = None if sorted_out is None else in_chunks(*sorted_out, *how)
            if found is not None:
                return found
        return run(edges, given, ends, size, local)

    def _run(
        self,
        layer: MessagePassing,
        call: Callable,
        edges: GuardedEdgeIndex,
        given: dict[str, Any],
        ends: Tensor,
        size: tuple[int, int],
        local: dict[str, Any],
    ) -> Any:
        self.calls.append(_Call(edges, given))
        try:
            with replaced(vars(layer), "flow", "source_to_target"):
                return call(ends, size=size, **local)
        finally:
            self.calls.pop()

    @contextlib.contextmanager
    def _replay_scopes(self) -> Iterator[None]:
        """Restores the replacements for chunks that run again in the backward pass."""
        with self.running(), unaveraged(self.nodes.mesh):
            yield

    def _fetched(
        self,
        layer: MessagePassing,
        verb: str,
        name: str,
        value: Any,
        wanted: set[str],
        place: int,
    ) -> Any:
        """Returns one argument of propagate: the pair (own and ghost rows, own rows)."""
        afar, near = f"{name}_j" in wanted, f"{name}_i" in wanted
        pair = is_pair(value)
        if not (afar or near) or not (pair or isinstance(value, Tensor)):
            return _plain_tensors(value)
        source, target = (value[place], value[1 - place]) if pair else (value, value)
        source = self._source(layer, verb, name, source) if afar else None
        target = self._target(name, target) if near else None
        return (source, target)

    def _source(self, layer: MessagePassing, verb: str, name: str, value: Any) -> Any:
        if value is None:
            return None
        value = self._shard(value, self.sources)
        local = self._rows_of_nodes(name, value, self.sources)
        if layer.node_dim % local.dim() != 0:
            raise ValueError(
                f"{self.context.layer} has its nodes in dim {layer.node_dim} of a tensor "
                f"of {local.dim()} dims; rows must be dim 0 (node_dim=0)"
            )
        if value.rows is self.both:
            return local
        return self._with_ghosts(value, local, is_coded(layer, verb, name, local))

    def _with_ghosts(self, value: Tensor, local: Tensor, coded: bool) -> Tensor:
        """Fetches ghosts over the link of this run; exact ones only once per run."""
        for known, ghosted in self.fetched:
            if known is value:
                return ghosted
        kept = self._constant_rows(value)
        if kept is not None:
            return kept
        if not self.late:
            return self.here.with_ghosts(local)
        call, link = self.call, None
        if call is not None:
            call = call if coded else call.as_exact("attention depends on it")
            link = call.wrap(self.here.halo, len(NAMES) + self.coded)
            self.coded += 1
        ghosted = self.here.with_ghosts(local, link)
        if not coded:
            self.fetched.append((value, ghosted))
        return ghosted

    def degrees(self) -> Link | None:
        """Returns the link for a further exchange of degrees; None if exact or cached."""
        if self.call is None or any(
            getattr(layer, "cached", False) for layer in layers_of(self.conv)
        ):
            return None
        self.asked += 1
        return self.call.wrap(self.here.halo, DEGREES + self.asked - 1)

    def _target(self, name: str, value: Any) -> Any:
        if value is None:
            return None
        value = self._shard(value, self.nodes)
        return self._rows_of_nodes(name, value, self.nodes)[: len(self.nodes)]

    def _shard(self, value: Any, nodes: Rows) -> Any:
        """Returns this rank's rows of an ordinary tensor with a row for every node."""
        whole = isinstance(value, Tensor) and not isinstance(
            value, (RowShardedTensor, LocalIndexGuard)
        )
        if not whole or not value.dim() or value.size(0) != nodes.total:
            return value
        value = as_replicated(value, nodes.mesh) if value.is_leaf else value
        return LayerTensor.wrap(value[nodes.gid_on(value.device)], nodes)

    def _rows_of_nodes(self, name: str, value: Any, nodes: Rows) -> Tensor:
        """Returns the local rows of a tensor that propagate looks up by node."""
        rows = value.rows if isinstance(value, DistTensor) else None
        ghosted = rows is self.both and nodes is self.sources
        if rows is None or not (ghosted or rows.same_as(nodes)):
            kind = f"cut as {rows}" if rows else f"a {type(value).__name__}"
            raise TypeError(
                f"{self.context.layer} looks up {name} by node, but it is {kind}; it must "
                "have one row for each node and come from data of pdc.partition"
            )
        return value.to_local()  # type: ignore[no-any-return]

    def _typed(self, given: dict[str, Any]) -> dict[str, Any]:
        """Returns arguments for a layer's own code: values per edge, guarded numbers."""
        call = self.calls[-1]
        return {
            name: call.given[name] if name in call.given else typed(call.edges, name, v)
            for name, v in given.items()
        }

    def _check_rows(self, value: DistTensor, what: str) -> None:
        if not value.rows.same_as(self.calls[-1].edges.rows):
            raise TypeError(
                f"{self.context.layer}: its {what} returns {value.rows}, not a row per edge"
            )


def scopes_of(layers: list[MessagePassing]) -> list[dict[str, Any]]:
    names = {kind.__module__ for layer in layers for kind in type(layer).__mro__}
    return [vars(sys.modules[name]) for name in sorted(names) if name in sys.modules]


_running: ContextVar[HaloVisit | None] = ContextVar("the layer that runs", default=None)
_SEGMENTS = threading.RLock()
_AGGR = vars(torch_geometric.nn.aggr.base)


def _same_width_on_all_ranks(original: Callable) -> Callable:
    """Replaces `to_dense_batch` of aggregations: all ranks pad to the same width."""

    @functools.wraps(original)
    def run(*args: Any, max_num_nodes: int | None = None, **kwargs: Any) -> Any:
        visit = _running.get()
        most = None if visit is None else visit.most
        return original(*args, max_num_nodes=max_num_nodes or most, **kwargs)

    return run


# what sorts its rows by their types, and what moves rows to have others multiplied
_BY_ROW = HeteroLinear, dna_conv.Linear


def _plain_tensors(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_plain_tensors(v) for v in value)
    return value.to_local() if isinstance(value, RowShardedTensor) else value

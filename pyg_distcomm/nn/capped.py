"""Runs `propagate` of layers on a share on chunks of target nodes, within a memory cap.

[Note: chunks of targets] A layer's messages, `[e, f]` and more, are the largest tensors of a
pass. All edges into a node are on its rank, so a sum, a maximum or a softmax over them is
complete in a chunk of targets. `propagate` and `edge_updater` run chunk by chunk without
saving tensors, and again in the backward pass. The sums of a node, in the same order, and the
masks of dropout, which are keyed, are those of a single run. To the layer's own code a chunk
is a graph of one rank, whose rows are sharded over nobody.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves
from torch_geometric.nn import MessagePassing

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.graph.topology import Ghosted, Topology
from pyg_distcomm.halo.halo import StagedHalo
from pyg_distcomm.kernels.memory import MemoryCap, give_back, has_saved_tensors_hooks
from pyg_distcomm.nn.layer_context import has_hooks
from pyg_distcomm.nn.message_forms import has_known_steps, layers_of, with_attributes
from pyg_distcomm.sharded.dist_tensor import DistTensor
from pyg_distcomm.sharded.ids import Ids, LocalRows, ids_of
from pyg_distcomm.sharded.partial import all_entered, entered

KEPT = 6  # tensors as large as its arguments that a message keeps, roughly
WHOLE = frozenset("size size_j edge_index edge_index_j ptr".split())
_VERBS = "propagate", "edge_updater"
# aggregations that pad the messages of all nodes to one size
PADDED = (
    *(pyg.GRUAggregation, pyg.LSTMAggregation, pyg.MLPAggregation, pyg.LCMAggregation),
    *(pyg.SetTransformerAggregation, pyg.GraphMultisetTransformer),
    *(pyg.SortAggregation, pyg.PatchTransformerAggregation),
)


class NotInChunksError(TypeError):
    """Reports that a layer cannot run chunk by chunk."""


# Which layers run in chunks -----------------------------------------------------------


@contextlib.contextmanager
def spilling(topology: Topology) -> Iterator[None]:
    """Keeps what autograd saves in a block within the memory cap of the nodes, if any.

    Does nothing where other hooks for saved tensors are active, as in torch's checkpointing.
    """
    cap = topology.nodes.memory
    if cap is None or has_saved_tensors_hooks() or not torch.is_grad_enabled():
        yield
        return

    def pack(x: Tensor) -> Any:
        if type(x) is not DistTensor:
            return cap.pack(x) if type(x) is Tensor else x
        if not x.dtype.is_floating_point:  # ids, with what is planned for them
            return x
        return cap.pack(x.local), x.rows, x.dim_

    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if isinstance(saved, tuple):
            local, rows, dim = saved
            return DistTensor(cap.unpack(local), rows, dim)
        return cap.unpack(saved)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


@contextlib.contextmanager
def within_cap(conv: Any, topology: Topology, args: Any, kwargs: Any) -> Iterator[None]:
    """Runs `propagate` and `edge_updater` of a layer on chunks of targets, in a block."""
    given = inspect.signature(conv.forward).bind(*args, **kwargs).arguments
    layers = layers_of(conv)
    # attention weights that are returned, and masks of all edges, exclude chunks
    given = {**given, **given.get("kwargs", {}), **kwargs}
    if given.get("return_attention_weights") is not None or conv.explain:
        layers = []

    def chunked(layer: Any) -> dict[str, Callable[..., Any]]:
        calls = {verb: getattr(layer, verb) for verb in _VERBS}
        return {v: _in_chunks(layer, call, v, topology) for v, call in calls.items()}

    with with_attributes(layers, chunked), spilling(topology):
        yield


def _in_chunks(
    layer: Any, call: Callable[..., Any], verb: str, topology: Topology
) -> Callable[..., Any]:
    def run(edge_index: Any, size: Any = None, **given: Any) -> Any:
        split = _split(layer, call, verb, topology, edge_index, given)
        if split is not None and split[0].plan(split[1]):
            chunks, tensors = split
            try:
                return DistTensor.from_local(chunks(tensors), chunks.out_rows)
            except NotInChunksError:
                pass
        return call(edge_index, size=size, **given)

    return run


def is_plain(layer: MessagePassing) -> bool:
    """Tells whether a layer's code reads and writes only its arguments and parameters.

    The class of a layer of a script says so itself, by `in_chunks = True`.
    """
    params = list(layer.parameters())
    if has_hooks(layer) or any(map(is_lazy, params)):
        return False
    said = getattr(layer, "in_chunks", False)
    if not said and not all(map(has_known_steps, layer.modules())):
        return False
    if any(p._backward_hooks for p in params):
        return False
    aggregating = list(layer.aggr_module.modules()) if layer.aggr_module else []
    norm = "torch_geometric.nn.norm"
    for part in aggregating:
        if isinstance(part, _NormBase) or type(part).__module__.startswith(norm):
            return False
    return not any(isinstance(part, PADDED) for part in layer.modules())


# The arguments of a call --------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Argument:
    """Describes one argument of `propagate`.

    Args:
        name: its name.
        kind: "source" and "target" are rows of nodes that are looked up by edge, "edge" has
            a row for each edge, "whole" is a tensor for all of them, "value" is no tensor.
        value: what is no tensor; tensors are passed beside their descriptions.
    """

    name: str
    kind: str
    value: Any = None


Found = list[tuple[Argument, Tensor | None]]


def is_pair(value: Any) -> bool:
    """Tells whether an argument is a pair (of sources, of targets)."""
    return isinstance(value, (tuple, list)) and len(value) == 2


def _split(
    layer: Any,
    call: Any,
    verb: str,
    topology: Topology,
    edge_index: Any,
    given: dict[str, Any],
) -> tuple[NodeChunks, list[Tensor]] | None:
    """Returns the chunks of a call, and its tensors; None if it cannot run in chunks."""
    wanted = {*(layer._user_args if verb == "propagate" else layer._edge_user_args)}
    looked_up = {
        name: value if is_pair(value) else (value, value)
        for name, value in given.items()
        if wanted & {f"{name}_i", f"{name}_j"}
        and (isinstance(value, Tensor) or is_pair(value))
    }
    known = type(edge_index) is DistTensor and edge_index.dim_ == 1
    if not known or layer.flow != "source_to_target" or not is_plain(layer):
        return None
    if wanted & WHOLE or looked_up.keys() & wanted:
        return None
    ends = ids_of(edge_index[0]), ids_of(edge_index[1])
    if ends[0] is None or ends[1] is None:
        return None
    nodes, sources = topology.nodes, topology.source_rows
    plans = ends[0].exchange(sources), ends[1].exchange(nodes)
    if not plans[1].halo.silent:
        return None
    arguments: list[Argument] = []
    tensors: list[Tensor] = []
    for name, value in given.items():
        found = (
            _looked_up(layer, wanted, name, looked_up[name], topology, plans[0])
            if name in looked_up
            else _other(name, value, edge_index.rows, nodes)
        )
        if found is None:
            return None
        arguments += [argument for argument, _ in found]
        tensors += [x for _, x in found if x is not None]
    norms = (m for m in layer.modules() if isinstance(m, _NormBase))
    made = NodeChunks(
        call,
        arguments,
        [p for p in layer.parameters() if p.requires_grad],
        [x for m in norms if (x := m.num_batches_tracked) is not None],
        topology,
        edge_index.rows,
        ends[1],
        torch.stack([plans[0].slot, plans[1].slot]),
        verb == "edge_updater",
    )
    return made, tensors


def _looked_up(
    layer: Any, wanted: set[str], name: str, pair: Any, topology: Topology, plan: Any
) -> Found | None:
    """Returns an argument that is looked up by edge: with ghosts of sources, of targets."""
    found: Found = []
    cap: Any = topology.nodes.memory
    rows = topology.source_rows, topology.nodes
    for value, own, end in zip(pair, rows, "ji", strict=True):
        if f"{name}_{end}" not in wanted or value is None:
            continue
        if type(value) is not DistTensor or value.dim_ or value.rows is not own:
            return None
        if layer.node_dim % value.dim():
            return None
        local = value.to_local()
        if end == "j" and not plan.halo.silent:
            flat = local.flatten(1) if local.dim() > 1 else local.unsqueeze(1)
            local = Ghosted.apply(flat.contiguous(), StagedHalo(plan.halo, cap)).view(
                -1, *local.shape[1:]
            )
        found.append((Argument(name, "source" if end == "j" else "target"), local))
    return found


def _other(name: str, value: Any, edges: Rows, nodes: Rows) -> Found | None:
    """Returns an argument of edges, of all of them, or that is no tensor."""
    if type(value) is DistTensor:
        if value.dim_ or value.rows is nodes or not value.rows.matches(edges):
            return None
        return [(Argument(name, "edge"), value.to_local())]
    if isinstance(value, Tensor):
        if value.dim() and len(value) > 1:
            return None
        return [(Argument(name, "whole"), entered(value, nodes.mesh))]
    holds = any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
    return None if holds else [(Argument(name, "value", value), None)]


# A call in chunks ---------------------------------------------------------------------


class ReplayMesh:
    """The mesh of a chunk's rows, which all are here.

    It has the same keys for each chunk, and no reductions.
    """

    local_sizes, rank, size, check = True, 0, 1, "never"

    def __init__(self, mesh: Mesh) -> None:
        self.grid = mesh.grid
        self._mesh, self._keys = mesh, list[int]()
        self.drawn = 0
        self.sharded: dict[str, Any] = {}

    def next_key(self) -> int:
        """Returns the key of a draw; the same for each chunk."""
        self.drawn += 1
        self.draw(self.drawn)
        return self._keys[self.drawn - 1]

    def draw(self, count: int) -> int:
        """Draws keys until there are so many, and returns how many there are."""
        while len(self._keys) < count:
            self._keys.append(self._mesh.next_key())
        return len(self._keys)

    @property
    def world(self) -> Any:
        """Raises; every reduction over edges uses this axis."""
        raise NotInChunksError("a layer reduces over the messages of all ranks")

    control = world


@dataclass(eq=False)
class NodeChunks:
    """Splits one call of `propagate` or `edge_updater` into chunks of targets.

    Args:
        call: the method of the layer.
        arguments: the arguments of the call.
        params: the trainable parameters of the layer; in a run, those that the call uses.
        counters: the buffers of the layer that count batches.
        topology: the edges that the layer was given.
        edges: the rows of the edges of the call, which may have loops besides.
        targets: the ids of their targets.
        ends: their sources and targets on this rank `[2, e]`, in local numbering.
        per_edge: whether the output has a row for each edge, not for each target.
    """

    call: Callable[..., Any]
    arguments: list[Argument]
    params: list[Tensor]
    counters: list[Tensor]
    topology: Topology
    edges: Rows
    targets: Ids
    ends: Tensor
    per_edge: bool

    def __post_init__(self) -> None:
        self.nodes = self.topology.nodes
        self.out_rows = self.edges if self.per_edge else self.nodes
        self.kinds = [a.kind for a in self.arguments if a.kind != "value"]
        self.cap: MemoryCap = self.nodes.memory  # type: ignore[assignment]
        self.mesh: Any = ReplayMesh(self.nodes.mesh)
        self.bounds: list[int] = []

    def plan(self, tensors: list[Tensor]) -> bool:
        """Splits the targets so that each chunk is within the cap.

        Returns False if no rank needs more than one: then all run as without a cap.
        """
        rows = [x for k, x in zip(self.kinds, tensors, strict=True) if k != "whole"]
        size = sum(x.shape[1:].numel() * x.element_size() for x in rows)
        fit = max(self.cap.stage // max(KEPT * size, 1), 1)
        if self.topology.locals.most <= fit:
            return False
        own = len(self.nodes)
        first, self._order = self._by_target()
        ends = first[1:] + torch.arange(1, own + 1, device=first.device)
        total = int(ends[-1]) if own else 0
        marks = torch.arange(fit, max(total, fit), fit, device=ends.device)
        cuts = torch.unique(torch.searchsorted(ends, marks, right=True))
        cuts = cuts[(cuts > 0) & (cuts < own)]
        self.bounds = [0, *cuts.tolist(), own]
        self._first = first[self.bounds].tolist()
        return True

    def _by_target(self) -> tuple[Tensor, Tensor]:
        """Returns the offsets `[n + 1]` and the order `[e]` of edges by target.

        Both are kept with the edges, in files: the same for all layers and epochs.
        """
        targets, found = self.edges.derived.get("by target", (None, None))
        if targets is not self.targets:
            count = torch.bincount(self.ends[1], minlength=len(self.nodes))
            first = torch.cat([count.new_zeros(1), count.cumsum(0)])
            order = self.cap.moved(torch.argsort(self.ends[1], stable=True))
            found = self.cap.moved(first), order
            self.edges.derived["by target"] = self.targets, found
        return found  # type: ignore[no-any-return]

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def of(self, chunk: int) -> tuple[Tensor, Tensor, slice]:
        """Returns the edges `[e_c]` of a chunk, its sources `[u_c]`, and its targets."""
        begin, end = self._first[chunk], self._first[chunk + 1]
        edge = self._order[begin:end].sort().values
        source = torch.unique(self.ends[0, edge])
        return edge, source, slice(self.bounds[chunk], self.bounds[chunk + 1])

    def run(self, chunk: int, tensors: list[Tensor], graded: list[bool]) -> Any:
        """Runs a chunk; returns its output, and the tensors that it was given."""
        edge, source, own = self.of(chunk)
        whole, mesh = self.nodes, self.mesh
        nodes = LocalRows.of(whole.gid[own], whole.total, mesh)
        sources = LocalRows.of(torch.arange(len(source)), len(source), mesh)
        edges = LocalRows.of(self.edges.gid[edge.cpu()], self.edges.total, mesh, nodes)
        rows = {"source": sources, "target": nodes, "edge": edges}
        mesh.sharded = {"spaces": {len(sources): sources, len(nodes): nodes}}
        mesh.drawn = 0
        takes: dict[str, Any] = {"source": source, "target": own, "edge": edge}
        given: dict[str, Any] = {}
        used, left = [], iter(zip(tensors, graded, strict=True))
        for argument in self.arguments:
            name, kind = argument.name, argument.kind
            if kind == "value":
                given[name] = argument.value
                continue
            x, learns = next(left)
            x = x[takes[kind]] if kind in takes else x
            x = x.detach().requires_grad_(learns)
            used.append(x)
            part: Any = DistTensor.from_local(x, rows[kind]) if kind in rows else x
            pair = given.get(name, (None, None))
            if kind == "source":
                part = part, pair[1]
            given[name] = (pair[0], part) if kind == "target" else part
        lid = torch.searchsorted(source, self.ends[0, edge])
        ends = torch.stack([lid, self.ends[1, edge] - own.start])
        size = len(source), own.stop - own.start
        out = self.call(DistTensor(ends, edges, 1), size=size, **given)
        wanted = len(edge) if self.per_edge else size[1]
        if type(out) is not DistTensor or out.dim_ or out.size(0) != wanted:
            raise NotInChunksError("a layer returns no row for each node, or each edge")
        return out.to_local(), used, takes

    def __call__(self, tensors: list[Tensor]) -> Any:
        """Runs all chunks; returns the rows of all targets, or of all edges.

        Raises:
            NotInChunksError: before anything has changed, if the layer cannot run so.
        """
        mesh, state = self.nodes.mesh, torch.get_rng_state()
        step, counted = mesh.step, [(x, x.clone()) for x in self.counters]
        out, fails, reached = None, False, [True] * len(self.params)
        if self.params and torch.is_grad_enabled():
            try:
                # PyG's GATConv leaves out weights of edges where there are none
                most = int(torch.tensor(self._first).diff().argmax())
                learns = [x.requires_grad for x in tensors]
                reached = _reached(self.run(most, tensors, learns)[0], self.params)
            except NotInChunksError:
                fails, reached = True, [False] * len(self.params)
            fails, *reached = self._on_any_rank(fails, *reached)
        if not fails:
            pairs = zip(self.params, reached, strict=True)
            self.params = [p for p, on in pairs if on]
            try:
                learnt = all_entered(self.params, mesh)
                out = _Chunked.apply(self, *tensors, *learnt)
            except NotInChunksError:
                fails = True
            (fails,) = self._on_any_rank(fails)
        if fails:
            torch.set_rng_state(state)
            mesh.step = step
            for x, before in counted:
                x.copy_(before)
            raise NotInChunksError("a layer reads more than a chunk on some rank")
        return out

    def _on_any_rank(self, *said: bool) -> list[bool]:
        """Tells what is so on any rank: one may have no edges, and so drop none; collective."""
        given = [self.mesh.draw(0), *said]
        rows = collectives.all_gather_counts(given, self.nodes.mesh.world)
        drawn, *found = zip(*rows, strict=True)
        self.mesh.draw(max(drawn))
        return [any(each) for each in found]


class _Chunked(torch.autograd.Function):
    """Runs chunk by chunk, and recomputes each chunk in the backward pass."""

    @staticmethod
    def forward(ctx: Any, chunks: NodeChunks, *tensors: Tensor) -> Tensor:
        given = list(tensors[: len(tensors) - len(chunks.params)])
        whole = None
        for chunk in range(len(chunks)):
            out, _, takes = chunks.run(chunk, given, [False] * len(given))
            if whole is None:
                shape = (len(chunks.out_rows), *out.shape[1:])
                whole = chunks.cap.empty(shape, out.dtype, out.device)
            whole[takes["edge" if chunks.per_edge else "target"]] = out
        assert whole is not None
        give_back()
        kind = whole.device.type
        ctx.cast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        ctx.chunks = chunks
        ctx.save_for_backward(*given)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        chunks: NodeChunks = ctx.chunks
        given = list(ctx.saved_tensors)
        graded = list(ctx.needs_input_grad[1 : 1 + len(given)])
        learnt = ctx.needs_input_grad[1 + len(given) :]
        params = [p for p, on in zip(chunks.params, learnt, strict=True) if on]
        kinds = [k for k, on in zip(chunks.kinds, graded, strict=True) if on]
        sums = [
            chunks.cap.empty(tuple(x.shape), x.dtype, x.device).zero_()
            for x, on in zip(given, graded, strict=True)
            if on
        ]
        sums += [torch.zeros_like(p) for p in params]
        kinds += ["whole"] * len(params)
        kind, dtype, enabled = ctx.cast
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            if enabled:
                stack.enter_context(torch.autocast(kind, dtype))
            for chunk in range(len(chunks)):
                out, used, takes = chunks.run(chunk, given, graded)
                if not out.requires_grad:
                    continue
                leaves = [x for x, on in zip(used, graded, strict=True) if on]
                part = g[takes["edge" if chunks.per_edge else "target"]]
                grads = torch.autograd.grad(
                    out, [*leaves, *params], part, allow_unused=True
                )
                for k, add in enumerate(grads):
                    if add is not None:
                        _add(sums[k], add, takes.get(kinds[k]))
        give_back()
        each = iter(sums)
        return None, *(next(each) if on else None for on in (*graded, *learnt))


def _reached(out: Tensor, params: list[Tensor]) -> list[bool]:
    """Tells which parameters an output depends on; others get None, not zeros."""
    queue: list[Any] = [out.grad_fn] if out.requires_grad else []
    seen, found = {None, *queue}, set()
    for node in queue:  # which grows
        found.add(id(getattr(node, "variable", None)))
        fresh = {after for after, _ in node.next_functions} - seen
        seen |= fresh
        queue += fresh
    return [id(p) in found for p in params]


def _add(total: Tensor, part: Any, where: Tensor | slice | None) -> None:
    part = part.local if type(part) is DistTensor else part  # of one row, not summed
    if where is None:
        total += part
    elif isinstance(where, slice):
        total[where] += part
    else:
        total.index_add_(0, where, part)

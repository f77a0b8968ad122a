"""Runs `propagate` of a layer on chunks of target nodes, within a memory cap.

[Note: chunks of targets] A layer's messages, `[e, f]` and more, are the largest tensors of a
pass. All edges into a node are on its rank, so a sum, a maximum or a softmax over them is
complete in a chunk of targets. `propagate` and `edge_updater` run chunk by chunk without
saving tensors, and again in the backward pass. The sums of a node, in the same order, and the
masks of dropout, which are keyed, are those of a single run.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch_geometric.nn import Aggregation, MessagePassing

from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.kernels.memory import MemoryCap, give_back
from pyg_distcomm.nn.layer_context import has_hooks
from pyg_distcomm.sharded.dist_tensor import DistTensor
from pyg_distcomm.sharded.ids import Ids
from pyg_distcomm.sharded.local_rows import LocalRows
from pyg_distcomm.sharded.partial import entered

KEPT = 6  # tensors as large as its arguments that a message keeps, roughly
WHOLE = frozenset("size size_j edge_index edge_index_j ptr".split())


class NotInChunksError(TypeError):
    """A layer cannot run chunk by chunk."""


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
        if self.drawn == len(self._keys):
            self._keys.append(self._mesh.next_key())
        self.drawn += 1
        return self._keys[self.drawn - 1]

    @property
    def world(self) -> Any:
        """Raises; every reduction over edges uses this axis."""
        raise NotInChunksError("a layer reduces over the messages of all ranks")

    control = world


@dataclass(frozen=True, eq=False)
class Argument:
    """Describes one argument of `propagate`.

    Args:
        name: its name.
        kind: "source" and "target" are rows of nodes that are looked up by edge, "edge" has
            a row for each edge, "whole" is a tensor for all of them, "value" is no tensor.
        value: a tensor without its history, and without its values; or what is no tensor.
        wrap: wraps an edge tensor for the layer's own code.
    """

    name: str
    kind: str
    value: Any = None
    wrap: Any = None


def is_pair(value: Any) -> bool:
    """Tells whether an argument is a pair (of sources, of targets)."""
    return isinstance(value, (tuple, list)) and len(value) == 2


def pads(module: torch.nn.Module) -> bool:
    """Tells whether an aggregation pads the messages of all nodes to one size."""
    if not isinstance(module, Aggregation):
        return False
    return "to_dense_batch" in inspect.unwrap(type(module).forward).__code__.co_names


def holds_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        return any(isinstance(v, Tensor) or holds_tensors(v) for v in value)
    return False


def is_plain(layer: MessagePassing) -> bool:
    """Tells whether a layer's code reads and writes only its arguments and parameters.

    The class of a layer of a script says so itself, by `in_chunks = True`.
    """
    params = list(layer.parameters())
    if has_hooks(layer) or any(map(is_lazy, params)):
        return False
    said = getattr(layer, "in_chunks", False)
    if not said and not all(map(_is_known, layer.modules())):
        return False
    if any(p._backward_hooks for p in params):
        return False
    aggregating = list(layer.aggr_module.modules()) if layer.aggr_module else []
    norm = "torch_geometric.nn.norm"
    for part in aggregating:
        if isinstance(part, _NormBase) or type(part).__module__.startswith(norm):
            return False
    return not any(map(pads, layer.modules()))


_STEPS = ("message", "edge_update", "aggregate", "update")
_KNOWN = frozenset("pyg_distcomm torch_geometric torch".split())


def _is_known(module: torch.nn.Module) -> bool:
    """Tells whether the steps of a module are PyG's, torch's or ours, which are stateless."""
    names = _STEPS if isinstance(module, MessagePassing) else ("forward",)
    found = (inspect.unwrap(getattr(type(module), name)) for name in names)
    return all(each.__module__.split(".")[0] in _KNOWN for each in found)


@dataclass(frozen=True, eq=False)
class CallContext:
    """Holds what chunks ask of the edges of a call."""

    layer: str
    nodes: Rows
    sources: Rows
    here: Any
    source: int = 0


@dataclass(frozen=True, eq=False)
class EdgesOfCall:
    """Holds the edges of a call, and the ids of their targets."""

    context: CallContext
    rows: Rows
    target: Ids | None


@dataclass(eq=False)
class NodeChunks:
    """Splits one call of `propagate` or `edge_updater` into chunks of targets.

    Args:
        arguments: the arguments of the call.
        params: the trainable parameters of the layer; in a run, those that the call uses.
        counters: the buffers of the layer that count batches.
        cap: the memory cap.
        edges: all edges of the call on this rank.
        ends: their sources and targets `[2, e]`, in local numbering.
        run: runs the call on a chunk's edges: the edges, `given`, ends, size, arguments.
        per_edge: whether the output has a row for each edge, not for each target.
    """

    arguments: list[Argument]
    params: list[Tensor]
    counters: list[Tensor]
    cap: MemoryCap
    edges: EdgesOfCall
    ends: Tensor
    run: Callable[..., Any]
    per_edge: bool

    def __post_init__(self) -> None:
        context = self.edges.context
        self.mesh = ReplayMesh(context.nodes.mesh)
        self.bounds: list[int] = []

    def plan(self, tensors: list[Tensor]) -> bool:
        """Splits the targets so that each chunk is within the cap.

        Returns False if no rank needs more than one: then all run as without a cap.
        """
        context = self.edges.context
        kinds = [a.kind for a in self.arguments if a.kind != "value"]
        pairs = zip(kinds, tensors, strict=True)
        rows = [x for kind, x in pairs if kind != "whole"]
        size = sum(x.shape[1:].numel() * x.element_size() for x in rows)
        fit = max(self.cap.stage // max(KEPT * size, 1), 1)
        if context.here.most <= fit:
            return False
        own = len(context.nodes)
        first, self._order = self._by_target()
        ends = first[1:] + torch.arange(1, own + 1, device=first.device)
        total = int(ends[-1]) if own else 0
        marks = torch.arange(fit, max(total, fit), fit, device=ends.device)
        cuts = torch.searchsorted(ends, marks, right=True)
        cuts = torch.unique(cuts)
        cuts = cuts[(cuts > 0) & (cuts < own)]
        self.bounds = [0, *cuts.tolist(), own]
        self._first = first[self.bounds].tolist()
        return True

    def _by_target(self) -> tuple[Tensor, Tensor]:
        """Returns the offsets `[n + 1]` and the order `[e]` of edges by target.

        Both are kept with the edges, in files: the same for all layers and epochs.
        """
        context, target = self.edges.context, self.ends[1]
        known, key = self.edges.rows.derived, ("by target", context.source)
        here, found = known.get(key, (None, None))
        mark = self.mark()
        if here is not mark:
            count = torch.bincount(target, minlength=len(context.nodes))
            first = torch.cat([count.new_zeros(1), count.cumsum(0)])
            order = self.cap.moved(torch.argsort(target, stable=True))
            found = self.cap.moved(first), order
            known[key] = mark, found
        return found  # type: ignore[no-any-return]

    def mark(self) -> Any:
        """Returns what tells these edges from others with the same rows."""
        return self.edges.target

    def taken(self) -> list[Tensor]:
        """Returns the parameters as inputs, whose gradients are summed over the ranks."""
        mesh = self.edges.context.nodes.mesh
        return [entered(p, mesh) for p in self.params]

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def of(self, chunk: int) -> tuple[Tensor, Tensor, EdgesOfCall, Tensor]:
        """Returns the edges `[e_c]` of a chunk, its sources `[u_c]`, and its edge_index."""
        begin, end = self.bounds[chunk], self.bounds[chunk + 1]
        edge = self._order[self._first[chunk] : self._first[chunk + 1]].sort().values
        source, lid = torch.unique(self.ends[0, edge], return_inverse=True)
        ends = torch.stack([lid, self.ends[1, edge] - begin])
        whole, mesh = self.edges.context, self.mesh
        nodes = LocalRows.of(whole.nodes.gid[begin:end], whole.nodes.total, mesh)
        sources = LocalRows.of(torch.arange(len(source)), len(source), mesh)
        rows = self.edges.rows
        edges = LocalRows.of(rows.gid[edge.cpu()], rows.total, mesh, nodes)
        mesh.sharded = {"spaces": {len(sources): sources, len(nodes): nodes}}
        context = CallContext(whole.layer, nodes, sources, None)
        return edge, source, EdgesOfCall(context, edges, None), ends

    def call(self, chunk: int, tensors: list[Tensor], graded: list[bool]) -> Any:
        """Runs a chunk; returns its output, and its input tensors."""
        edge, source, edges, ends = self.of(chunk)
        begin, end = self.bounds[chunk], self.bounds[chunk + 1]
        given: dict[str, Any] = {}
        local: dict[str, Any] = {}
        used, left = [], iter(zip(tensors, graded, strict=True))
        for argument in self.arguments:
            name, kind = argument.name, argument.kind
            if kind == "value":
                given[name] = local[name] = argument.value
                continue
            x, learns = next(left)
            if kind == "source":
                x = x.index_select(0, source)
            elif kind == "target":
                x = x[begin:end]
            elif kind == "edge":
                x = x.index_select(0, edge)
            x = x.detach().requires_grad_(learns)
            used.append(x)
            if kind in ("source", "target"):
                pair = local.get(name, (None, None))
                local[name] = (x, pair[1]) if kind == "source" else (pair[0], x)
                continue
            local[name] = x
            given[name] = argument.wrap(x, edges.rows) if kind == "edge" else x
        self.mesh.drawn = 0
        out = self.run(edges, given, ends, (len(source), end - begin), local)
        out = self.local(out, len(edge) if self.per_edge else end - begin)
        return out, used, (edge, source, slice(begin, end))

    def plain(self, g: Any) -> Any:
        """Returns a gradient of a chunk as an ordinary tensor."""
        return g.local if type(g) is DistTensor else g  # of one row, not summed over it

    def local(self, out: Any, rows: int) -> Tensor:
        """Returns own rows of what a chunk gives."""
        if type(out) is not DistTensor or out.dim_ or out.size(0) != rows:
            raise NotInChunksError("a layer returns no row for each node, or each edge")
        return out.to_local()

    def __call__(self, tensors: list[Tensor]) -> Any:
        """Runs all chunks; returns the rows of all targets, or of all edges.

        Raises:
            NotInChunksError: before anything has changed, if the layer cannot run so.
        """
        mesh, state = self.edges.context.nodes.mesh, torch.get_rng_state()
        step, counted = mesh.step, [(x, x.clone()) for x in self.counters]
        try:
            if self.params and torch.is_grad_enabled():
                first = self.call(0, tensors, [x.requires_grad for x in tensors])[0]
                self.params = _reached(first, self.params)
                del first
            out = _Chunked.apply(self, *tensors, *self.taken())
        except NotInChunksError:
            torch.set_rng_state(state)
            mesh.step = step
            for x, before in counted:
                x.copy_(before)
            raise
        return DistTensor.wrap(out, self.edges.rows) if self.per_edge else out


class _Chunked(torch.autograd.Function):
    """Runs chunk by chunk, and recomputes each chunk in the backward pass."""

    @staticmethod
    def forward(ctx: Any, chunks: NodeChunks, *tensors: Tensor) -> Tensor:
        given = list(tensors[: len(tensors) - len(chunks.params)])
        rows = (
            chunks.ends.size(1) if chunks.per_edge else len(chunks.edges.context.nodes)
        )
        whole = None
        for chunk in range(len(chunks)):
            out, _, (edge, _, own) = chunks.call(chunk, given, [False] * len(given))
            if whole is None:
                shape = (rows, *out.shape[1:])
                whole = chunks.cap.empty(shape, out.dtype, out.device)
            whole[edge if chunks.per_edge else own] = out
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
        kinds = [a.kind for a in chunks.arguments if a.kind != "value"]
        sums: list[Any] = [
            chunks.cap.empty(tuple(x.shape), x.dtype, x.device).zero_() if on else None
            for x, on in zip(given, graded, strict=True)
        ]
        params = [p for p, on in zip(chunks.params, learnt, strict=True) if on]
        found = [torch.zeros_like(p) for p in params]
        seen = [False] * len(params)
        kind, dtype, enabled = ctx.cast
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            if enabled:
                stack.enter_context(torch.autocast(kind, dtype))
            for chunk in range(len(chunks)):
                out, used, places = chunks.call(chunk, given, graded)
                if not out.requires_grad:
                    continue
                edge, source, own = places
                leaves = [x for x, on in zip(used, graded, strict=True) if on]
                part = g[edge] if chunks.per_edge else g[own]
                grads = torch.autograd.grad(
                    out, [*leaves, *params], part, allow_unused=True
                )
                grads = tuple(map(chunks.plain, grads))
                where = {"source": source, "target": own, "edge": edge}
                into = [
                    (k, s) for k, s in zip(kinds, sums, strict=True) if s is not None
                ]
                for (what, total), add in zip(into, grads, strict=False):
                    if add is not None:
                        _add(total, add, where.get(what))
                for k, add in enumerate(grads[len(leaves) :]):
                    if add is not None:
                        seen[k] = True
                        found[k] += add
        give_back()
        each = iter(p if used else None for p, used in zip(found, seen, strict=True))
        return None, *sums, *(next(each) if on else None for on in learnt)


def _reached(out: Tensor, params: list[Tensor]) -> list[Tensor]:
    """Returns the parameters that an output depends on; others get None, not zeros."""
    queue, seen, found = [out.grad_fn], {out.grad_fn}, set()
    while queue:
        node: Any = queue.pop()
        found.add(id(getattr(node, "variable", None)))
        for after, _ in () if node is None else node.next_functions:
            if after not in seen:
                seen.add(after)
                queue.append(after)
    return [p for p in params if id(p) in found]


def _add(total: Tensor, part: Tensor, where: Tensor | slice | None) -> None:
    if where is None:
        total += part
    elif isinstance(where, slice):
        total[where] += part
    else:
        total.index_add_(0, where, part)

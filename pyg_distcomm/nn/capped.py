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
from pyg_distcomm.graph.topology import Ghosted, Topology, has_saved_tensors_hooks
from pyg_distcomm.halo.halo import StagedHalo
from pyg_distcomm.kernels.memory import MemoryCap, give_back
from pyg_distcomm.nn.layer_context import has_hooks
from pyg_distcomm.nn.message_forms import has_known_steps, layers_of, with_attributes
from pyg_distcomm.sharded.dist_tensor import DistTensor
from pyg_distcomm.sharded.ids import LocalRows, ids_of
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
        try:
            chunks = NodeChunks(layer, call, verb, topology, edge_index, given)
            if chunks.plan():
                return DistTensor.from_local(chunks(), chunks.out_rows)
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


def is_pair(value: Any) -> bool:
    """Tells whether an argument is a pair (of sources, of targets)."""
    return isinstance(value, (tuple, list)) and len(value) == 2


def _arguments(
    layer: Any, wanted: set[str], given: Any, topology: Topology, halo: Any, edges: Rows
) -> Iterator[tuple[str, str, Any]]:
    """Yields the name, the kind and the value on this rank of each argument of a call.

    Of the kinds, "source" and "target" are rows of nodes that are looked up by edge, "edge"
    has a row for each edge, "whole" is a tensor for all of them, "value" is no tensor.

    Raises:
        NotInChunksError: for an argument of another kind.
    """
    rows = {"source": topology.source_rows, "target": topology.nodes}
    for name, value in given.items():
        by_edge = {"source": f"{name}_j", "target": f"{name}_i"}
        pair = value if is_pair(value) else (value, value)
        looked_up = isinstance(value, Tensor) or is_pair(value)
        if not looked_up or not wanted & {*by_edge.values()}:
            yield name, *_of_edges(value, edges, topology.nodes)
            continue
        for part, (kind, argument) in zip(pair, by_edge.items(), strict=True):
            if argument not in wanted or part is None:
                continue
            known = type(part) is DistTensor and part.dim_ == 0
            known = known and part.rows is rows[kind] and name not in wanted
            if not known or layer.node_dim % part.dim():
                raise NotInChunksError(f"{name} has other rows")
            local = part.to_local()
            if kind == "source" and not halo.silent:
                staged = StagedHalo(halo, topology.nodes.memory)  # type: ignore[arg-type]
                flat = local.flatten(1) if local.dim() > 1 else local.unsqueeze(1)
                local = Ghosted.apply(flat.contiguous(), staged)
                local = local.view(-1, *part.shape[1:])
            yield name, kind, local


def _of_edges(value: Any, edges: Rows, nodes: Rows) -> tuple[str, Any]:
    """Returns the kind and the value on this rank of an argument that is not looked up."""
    if type(value) is DistTensor:
        if value.dim_ == 0 and value.rows is not nodes and value.rows.matches(edges):
            return "edge", value.to_local()
    elif isinstance(value, Tensor):
        if value.dim() == 0 or len(value) <= 1:
            return "whole", entered(value, nodes.mesh)
    elif not any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
        return "value", value
    raise NotInChunksError("an argument is neither of edges nor of all of them")


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
        if self.drawn == len(self._keys):
            self._keys.append(self._mesh.next_key())
        self.drawn += 1
        return self._keys[self.drawn - 1]

    @property
    def world(self) -> Any:
        """Raises; every reduction over edges uses this axis."""
        raise NotInChunksError("a layer reduces over the messages of all ranks")

    control = world


class NodeChunks:
    """Splits one call of `propagate` or `edge_updater` into chunks of targets.

    The edges of the call may have loops besides those that the layer was given.

    Raises:
        NotInChunksError: on all ranks, if the call cannot run in chunks.
    """

    def __init__(
        self,
        layer: Any,
        call: Callable[..., Any],
        verb: str,
        topology: Topology,
        edge_index: Any,
        given: Any,
    ) -> None:
        names = layer._user_args if verb == "propagate" else layer._edge_user_args
        known = type(edge_index) is DistTensor and edge_index.dim_ == 1
        known = known and layer.flow == "source_to_target" and is_plain(layer)
        ends: Any = [ids_of(edge_index[k]) for k in (0, 1)] if known else [None]
        if None in ends or WHOLE.intersection(names):
            raise NotInChunksError("a layer reads more than rows by edge")
        plans = ends[0].exchange(topology.source_rows), ends[1].exchange(topology.nodes)
        if not plans[1].halo.silent:
            raise NotInChunksError("targets lie on other ranks")
        self.call, self.topology, self.edges = call, topology, edge_index.rows
        rows = plans[0].halo, edge_index.rows
        found = [*_arguments(layer, {*names}, given, topology, *rows)]
        held = [(kind, x) for _, kind, x in found if kind != "value"]
        self.kinds, self.tensors = [k for k, _ in held], [x for _, x in held]
        self.arguments = [(n, k, x if k == "value" else None) for n, k, x in found]
        self.params = [p for p in layer.parameters() if p.requires_grad]
        norms = (m for m in layer.modules() if isinstance(m, _NormBase))
        self._counters = [m.num_batches_tracked for m in norms]
        self.nodes, self.targets = topology.nodes, ends[1]
        self.ends = torch.stack([plan.slot for plan in plans])  # sources and targets
        self.per_edge = verb == "edge_updater"  # a row for each edge, not each target
        self.out_rows = self.edges if self.per_edge else self.nodes
        self.cap: MemoryCap = self.nodes.memory  # type: ignore[assignment]
        self.mesh: Any = ReplayMesh(self.nodes.mesh)
        self.bounds: list[int] = []

    def plan(self) -> bool:
        """Splits the targets so that each chunk is within the cap.

        Returns False if no rank needs more than one: then all run as without a cap.
        """
        held = zip(self.kinds, self.tensors, strict=True)
        rows = [x for kind, x in held if kind != "whole"]
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
        """Runs a chunk; returns its output, and the tensors that it was given.

        Some layers fail without edges: a chunk that has none gets one, between rows of its
        own, of which nothing is kept.
        """
        edge, source, own = self.of(chunk)
        whole, mesh, lone = self.nodes, self.mesh, not len(edge)
        gid = _padded(whole.gid[own], lone), _padded(self.edges.gid[edge.cpu()], lone)
        nodes = LocalRows.of(gid[0], whole.total, mesh)
        count = len(source) + lone
        sources = LocalRows.of(torch.arange(count), count, mesh)
        edges = LocalRows.of(gid[1], self.edges.total, mesh, nodes)
        rows = {"source": sources, "target": nodes, "edge": edges}
        mesh.sharded = {"spaces": {len(sources): sources, len(nodes): nodes}}
        mesh.drawn = 0
        takes: dict[str, Any] = {"source": source, "target": own, "edge": edge}
        given: dict[str, Any] = {}
        used, left = [], iter(zip(tensors, graded, strict=True))
        for name, kind, value in self.arguments:
            if kind == "value":
                given[name] = value
                continue
            x, learns = next(left)
            x = x[takes[kind]] if kind in takes else x
            x = x.detach().requires_grad_(learns)
            used.append(x)
            part: Any = x
            if kind in rows:
                filled = _padded(x, lone, 1 + (kind == "target"))
                part = DistTensor.from_local(filled, rows[kind])
            pair = given.get(name, (None, None))
            if kind == "source":
                part = part, pair[1]
            given[name] = (pair[0], part) if kind == "target" else part
        lid = torch.searchsorted(source, self.ends[0, edge])
        ends = torch.stack([lid, self.ends[1, edge] - own.start])
        if lone:
            ends = ends.new_tensor([[0], [own.stop - own.start]])
        size = count, len(nodes)
        out = self.call(DistTensor(ends, edges, 1), size=size, **given)
        wanted = len(edges) if self.per_edge else len(nodes)
        if type(out) is not DistTensor or out.dim_ or out.size(0) != wanted:
            raise NotInChunksError("a layer returns no row for each node, or each edge")
        return out.to_local()[: wanted - lone], used, takes

    def __call__(self) -> Any:
        """Runs all chunks; returns the rows of all targets, or of all edges.

        Raises:
            NotInChunksError: before anything has changed, if the layer cannot run so.
        """
        mesh, state, out = self.nodes.mesh, torch.get_rng_state(), None
        tensors, self.tensors = self.tensors, []  # autograd keeps them within the cap
        counters = [x for x in self._counters if x is not None]
        step, counted = mesh.step, [x.clone() for x in counters]
        with contextlib.suppress(NotInChunksError):
            out = _Chunked.apply(self, *tensors, *all_entered(self.params, mesh))
        if any(self.on_any_rank(out is None)):
            torch.set_rng_state(state)
            mesh.step = step
            for x, before in zip(counters, counted, strict=True):
                x.copy_(before)
            raise NotInChunksError("a layer reads more than a chunk on some rank")
        return out

    def on_any_rank(self, *said: bool) -> list[bool]:
        """Tells what is so on any rank; collective."""
        rows = collectives.all_gather_counts([*said], self.nodes.mesh.world)
        return [any(each) for each in zip(*rows, strict=True)]


class _Chunked(torch.autograd.Function):
    """Runs chunk by chunk, and recomputes each chunk in the backward pass."""

    @staticmethod
    def forward(ctx: Any, chunks: NodeChunks, *tensors: Tensor) -> Tensor:
        given = list(tensors[: len(chunks.kinds)])
        whole = None
        for chunk in range(len(chunks)):
            out, _, takes = chunks.run(chunk, given, [False] * len(given))
            if whole is None:
                shape = (len(chunks.out_rows), *out.shape[1:])
                whole = chunks.cap.empty(shape, out.dtype, out.device)
            whole[takes["edge" if chunks.per_edge else "target"]] = out
        assert whole is not None
        give_back()
        on = whole.device.type
        ctx.cast = on, torch.get_autocast_dtype(on), torch.is_autocast_enabled(on)
        ctx.chunks = chunks
        ctx.save_for_backward(*given)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        chunks: NodeChunks = ctx.chunks
        given, (_, *needed) = list(ctx.saved_tensors), ctx.needs_input_grad
        graded = needed[: len(given)]
        places = [k for k, on in enumerate(needed) if on]
        found: list[Any] = [None] * len(needed)  # gradients; None of what is not read
        for k, x in enumerate(given):
            if graded[k]:
                shape = tuple(x.shape)
                found[k] = chunks.cap.empty(shape, x.dtype, x.device).zero_()
        kind, dtype, enabled = ctx.cast
        cast = torch.autocast(kind, dtype) if enabled else contextlib.nullcontext()
        with torch.enable_grad(), cast:
            for chunk in range(len(chunks)):
                out, used, takes = chunks.run(chunk, given, graded)
                if not out.requires_grad:
                    continue
                every = [*used, *chunks.params]
                part = g[takes["edge" if chunks.per_edge else "target"]]
                leaves = [every[k] for k in places]
                grads = torch.autograd.grad(out, leaves, part, allow_unused=True)
                for k, add in zip(places, grads, strict=True):
                    if add is not None and found[k] is None:
                        found[k] = torch.zeros_like(every[k])
                    if add is not None:
                        rows = chunks.kinds[k] if k < len(given) else "whole"
                        _add(found[k], add, takes.get(rows))
        give_back()
        if chunks.params:  # all ranks sum the gradients of the same ones
            learnt = found[len(given) :]
            reached = chunks.on_any_rank(*(x is not None for x in learnt))
            for k, (p, on) in enumerate(zip(chunks.params, reached, strict=True)):
                if on and learnt[k] is None:
                    found[len(given) + k] = torch.zeros_like(p)
        return None, *found


def _padded(x: Tensor, lone: bool, value: int = 0) -> Tensor:
    """Returns rows and, if there is a lone edge, one more; numbers of kinds are 0.

    Others are neither 0 nor equal at both ends: more functions have gradients there.
    """
    fill = value if x.dtype.is_floating_point else 0
    return torch.cat([x, x.new_full((1, *x.shape[1:]), fill)]) if lone else x


def _add(total: Tensor, part: Any, where: Tensor | slice | None) -> None:
    part = part.local if type(part) is DistTensor else part  # of one row, not summed
    if where is None:
        total += part
    elif isinstance(where, slice):
        total[where] += part
    else:
        total.index_add_(0, where, part)

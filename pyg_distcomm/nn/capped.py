"""Has layers on a share run their steps in the chunks of `node_chunks.py`.

To the layer's own code a chunk is a graph of one rank, whose rows are sharded over nobody, so
that its draws are keyed as those of all edges are.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.graph.topology import Ghosted, Topology
from pyg_distcomm.halo.halo import StagedHalo
from pyg_distcomm.kernels.memory import has_saved_tensors_hooks
from pyg_distcomm.nn.message_forms import layers_of
from pyg_distcomm.nn.node_chunks import (
    WHOLE,
    Argument,
    CallContext,
    EdgesOfCall,
    NodeChunks,
    NotInChunksError,
    holds_tensors,
    is_pair,
    is_plain,
)
from pyg_distcomm.sharded.dist_tensor import DistTensor
from pyg_distcomm.sharded.ids import ids_of
from pyg_distcomm.sharded.partial import entered

_EDGE = object()


def _run(call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that runs a call on the edges of a chunk."""

    def run(edges: Any, given: Any, ends: Tensor, size: Any, local: Any) -> Any:
        context = edges.context
        rows = {"source": context.sources, "target": context.nodes, "edge": edges.rows}

        def sharded(value: Any, kind: str) -> Any:
            return None if value is None else DistTensor.from_local(value, rows[kind])

        made = {}
        for name, value in local.items():
            if is_pair(value):
                pair = zip(value, ("source", "target"), strict=True)
                made[name] = tuple(sharded(x, kind) for x, kind in pair)
            else:
                edge = given.get(name) is _EDGE
                made[name] = sharded(value, "edge") if edge else value
        return call(DistTensor(ends, edges.rows, 1), size=size, **made)

    return run


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
    before = [(layer, dict(vars(layer))) for layer in layers]
    for layer in layers:
        for verb in ("propagate", "edge_updater"):
            call = getattr(layer, verb)
            vars(layer)[verb] = _in_chunks(layer, call, verb, topology)
    try:
        with spilling(topology):
            yield
    finally:
        for layer, known in before:
            for verb in ("propagate", "edge_updater"):
                vars(layer).pop(verb, None)
                if verb in known:
                    vars(layer)[verb] = known[verb]


def _in_chunks(
    layer: Any, call: Callable[..., Any], verb: str, topology: Topology
) -> Callable[..., Any]:
    def run(edge_index: Any, size: Any = None, **given: Any) -> Any:
        split = _split(layer, call, verb, topology, edge_index, given)
        if split is not None and split[0].plan(split[1]):
            chunks, tensors = split
            try:
                out = chunks(tensors)
            except NotInChunksError:
                return call(edge_index, size=size, **given)
            nodes = chunks.edges.context.nodes
            return out if chunks.per_edge else DistTensor.from_local(out, nodes)
        return call(edge_index, size=size, **given)

    return run


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
    context = CallContext(type(layer).__name__, nodes, sources, topology.locals)
    norms = (m for m in layer.modules() if isinstance(m, _NormBase))
    counters = [x for m in norms if (x := m.num_batches_tracked) is not None]
    learnt = [p for p in layer.parameters() if p.requires_grad]
    made = NodeChunks(
        arguments,
        learnt,
        counters,
        nodes.memory,  # type: ignore[arg-type]
        EdgesOfCall(context, edge_index.rows, ends[1]),  # type: ignore[arg-type]
        torch.stack([plans[0].slot, plans[1].slot]),
        _run(call),
        verb == "edge_updater",
    )
    return made, tensors


Found = list[tuple[Argument, Tensor | None]]


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
        return [(Argument(name, "edge", wrap=lambda x, rows: _EDGE), value.to_local())]
    if isinstance(value, Tensor):
        if value.dim() and len(value) > 1:
            return None
        return [(Argument(name, "whole"), entered(value, nodes.mesh))]
    return None if holds_tensors(value) else [(Argument(name, "value", value), None)]

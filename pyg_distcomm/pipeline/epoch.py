"""Trains for one epoch, action by action of a schedule, and clips gradients of all stages.

`Stage` runs its layers on a chunk, or on all nodes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_distcomm.comm import collectives, random
from pyg_distcomm.comm.collectives import Pending
from pyg_distcomm.comm.gradient_averaging import averager_of
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.pipeline.chunk_graph import ChunkPass, view_of
from pyg_distcomm.pipeline.chunks import ChunkPlan
from pyg_distcomm.pipeline.layer_stack import StackLayer, from_data
from pyg_distcomm.pipeline.schedule import Action, ActionSpan, StageSchedule
from pyg_distcomm.tensor.dist_tensor import DistTensor

Values = dict[str, Any]


@dataclass(frozen=True)
class StageTensors:
    """What crosses from stage to stage, side by side in one row per node.

    Args:
        names: of the values.
        shapes: for each value the shape of a row; for a list of tensors a list of them.
        dtype: of all of them.
    """

    names: tuple[str, ...]
    shapes: tuple[Any, ...]
    dtype: torch.dtype

    @staticmethod
    def of(
        values: Values, names: Sequence[str], where: str, nodes: Rows
    ) -> StageTensors:
        """Describes values of some names, with rows as nodes have."""
        shapes, kinds = [], set()
        for name in names:
            value = values[name]
            parts = list(value) if isinstance(value, (list, tuple)) else [value]
            if not all(isinstance(p, DistTensor) for p in parts):
                raise TypeError(
                    f"{name}, after {where}, is a {type(value).__name__}; what crosses from "
                    "stage to stage is a tensor with a row for each node, or a list of them"
                )
            edges = [p for p in parts if not p.rows.same_as(nodes)]
            if edges:
                raise TypeError(
                    f"{name}, after {where}, has a row for each edge ({edges[0].rows}), but "
                    "what crosses from stage to stage has one for each node; give "
                    "balance=[...] so that all that read it are in one stage"
                )
            found = [tuple(part.shape[1:]) for part in parts]
            shapes.append(found if isinstance(value, (list, tuple)) else found[0])
            kinds |= {part.dtype for part in parts}
        if len(kinds) > 1 or not all(kind.is_floating_point for kind in kinds):
            raise TypeError(
                f"{', '.join(names)}, after {where}, are of {sorted(map(str, kinds))}; what "
                "crosses from stage to stage must be of one floating point type"
            )
        return StageTensors(tuple(names), tuple(shapes), kinds.pop())

    @property
    def width(self) -> int:
        """The numbers in a row."""
        return sum(_count(s) for shape in self.shapes for s in _several(shape))

    def pack(self, values: Values) -> Tensor:
        """Returns values as one matrix `[n_c, width]`, differentiably."""
        parts = []
        for name in self.names:
            value = values[name]
            parts += list(value) if isinstance(value, (list, tuple)) else [value]
        flat = [p.to_local() for p in parts]
        flat = [p.flatten(1) if p.dim() > 1 else p.unsqueeze(1) for p in flat]
        packed = torch.cat(flat, 1) if len(flat) > 1 else flat[0].contiguous()
        if packed.dtype != self.dtype or packed.size(1) != self.width:
            raise TypeError(
                f"{', '.join(self.names)} have {packed.size(1)} numbers of {packed.dtype} "
                f"a node, but had {self.width} of {self.dtype} when the pipeline first saw "
                "the data; use torch.autocast around all that it computes, or around none"
            )
        return packed

    def unpack(self, packed: Tensor, rows: Rows) -> Values:
        """Returns the values of a matrix, copied: layers may write into them."""
        widths = [_count(s) for shape in self.shapes for s in _several(shape)]
        parts = iter(packed.split(widths, 1))
        values: Values = {}
        for name, shape in zip(self.names, self.shapes, strict=True):
            found = [
                DistTensor.wrap(next(parts).reshape(len(packed), *s).clone(), rows)
                for s in _several(shape)
            ]
            values[name] = found if isinstance(shape, list) else found[0]
        return values


def _several(shape: Any) -> list[tuple[int, ...]]:
    return shape if isinstance(shape, list) else [shape]


def _count(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


class Stage:
    """Consecutive layers of a stack, and the data they read.

    Args:
        layers: all layers of the stack.
        begin, end: which are this stage's.
        run: what is being computed.
    """

    def __init__(
        self, layers: Sequence[StackLayer], begin: int, end: int, run: ChunkPass
    ) -> None:
        self.layers, self.begin, self.end, self.run = layers, begin, end, run
        self._read = from_data(layers, begin, end)
        self._data: dict[str, tuple[Any, str]] = {}
        self._seen: dict[str, tuple[Any, int]] = {}
        self._views: dict[int | None, Any] = {}

    def look_at(self, data: Data) -> None:
        """Sorts what layers read of the data by chunk, where it has changed."""
        for name in self._read:
            value = data.get(name)
            now = value, value._version if isinstance(value, Tensor) else 0
            before = self._seen.get(name)
            if before is None or before[0] is not now[0] or before[1] != now[1]:
                self._data[name] = _sorted(value, name, self.run.plan)
                self._seen[name] = now

    def view(self, chunk: int | None) -> Any:
        """Returns the edges of a chunk, or of all nodes, made once."""
        if chunk not in self._views:
            self._views[chunk] = view_of(self.run, chunk)
        return self._views[chunk]

    def forward(self, chunk: int | None, values: Values) -> Values:
        """Runs the layers on the rows of a chunk, or of all nodes."""
        known = {**self.given(chunk), **values}
        with random.apart(self.run.plan.topology.device):
            for place in range(self.begin, self.end):
                self.run.begin_layer(place, chunk)
                known.update(self.call(self.layers[place], known))
        return known

    def call(self, layer: StackLayer, known: Values) -> Values:
        """Runs one layer."""
        missing = [name for name in layer.takes if name not in known]
        if missing:
            raise ValueError(
                f"{layer} reads {', '.join(missing)}, which no layer before it writes and "
                "the Data does not have; write it with a header, such as "
                "(layer, 'x -> x_0')"
            )
        out = layer.run(*(known[name] for name in layer.takes))
        if len(layer.gives) == 1:
            return {layer.gives[0]: out}
        return dict(zip(layer.gives, out, strict=True))

    def given(self, chunk: int | None) -> Values:
        """Returns edges and attributes of the data, of a chunk."""
        plan, edge_index = self.run.plan, self.view(chunk)
        values: Values = {"edge_index": edge_index}
        for name, (value, per) in self._data.items():
            if per == "graph":
                values.update({} if value is None else {name: value})
                continue
            rows = edge_index.nodes if per == "node" else edge_index.edges
            cut = plan.own if per == "node" else plan.edge
            part = value if chunk is None else value[cut.rows(chunk)]
            values[name] = DistTensor.wrap(part, rows)
        return values


def _sorted(value: Any, name: str, plan: ChunkPlan) -> tuple[Any, str]:
    """An attribute of the data in the order of chunks, and what it has a row for."""
    if isinstance(value, Tensor) and value.requires_grad:
        raise ValueError(
            f"data.{name} requires a gradient, which a pipeline does not return; detach "
            "it, or learn it in a layer"
        )
    if not isinstance(value, DistTensor):
        return value, "graph"
    topology, local = plan.topology, value.to_local().detach()
    # on one rank, as many nodes as edges have the same ids: the object tells them apart
    of_edges = value.rows is topology.edges
    if not of_edges and value.rows.same_as(topology.nodes):
        return local[plan.own.order.to(local.device)], "node"
    if of_edges or value.rows.same_as(topology.edges):
        return local[plan.edge.order.to(local.device)], "edge"
    raise ValueError(
        f"data.{name} has {value.rows}, neither those of the nodes nor of the edges"
    )


OP = "stage"  # what travels between stages, in the ledger
Loss = Callable[[Any, Any], Tensor]


@dataclass(eq=False)
class StageBuffers:
    """What a stage receives and sends, all chunks side by side.

    Shapes (this rank; n own nodes): inbox [n, d_in], outbox [n, d_out]. Going back, they
    take the gradients of what they held.

    Args:
        takes, gives: what the rows are made of; the first stage takes none.
        result: what the last stage gives.
    """

    takes: StageTensors | None
    gives: StageTensors
    result: StageTensors
    inbox: Tensor | None
    outbox: Tensor

    @property
    def nbytes(self) -> int:
        """The bytes of both."""
        return self.outbox.nbytes + (0 if self.inbox is None else self.inbox.nbytes)


@dataclass(eq=False)
class Epoch:
    """One step of training.

    Args:
        mesh: the ranks.
        stage: what this rank computes.
        boundary: what it receives and sends.
        order: the chunk of each slot.
        recompute: whether chunks are computed again in the backward pass.
        refresh: whether the rows of this epoch become history.
        spans: what was computed when is noted here, in seconds from the start.
    """

    mesh: Mesh
    stage: Stage
    boundary: StageBuffers
    order: list[int]
    recompute: bool
    refresh: bool
    spans: list[ActionSpan] = field(default_factory=list)
    _under_way: dict[tuple[str, int], Pending] = field(default_factory=dict)
    _graphs: dict[int, tuple[Tensor | None, Tensor]] = field(default_factory=dict)
    _begun: float = 0.0

    def run(self, schedule: StageSchedule, data: Data, loss_fn: Loss) -> Tensor:
        """Carries out this stage's actions, and returns the loss, on all ranks.

        Where that fails, history is put back in place of the rows of this epoch; see
        `HistoryBuffer.undo`.
        """
        self._begun = time.perf_counter()
        try:
            return self._carried_out(schedule, data, loss_fn)
        except BaseException:
            for site in self._sites():
                site.undo()
            raise

    def _carried_out(
        self, schedule: StageSchedule, data: Data, loss_fn: Loss
    ) -> Tensor:
        loss = torch.zeros((), dtype=torch.float64)
        for action in schedule.stages[self.mesh.stage.rank]:
            if action.kind == "loss":
                loss = self._loss(data, loss_fn)
            elif action.peer:
                self._exchange(action)
            elif action.kind == "forward":
                self._forward(action.slot)
            else:
                self._backward(action.slot)
        for pending in self._under_way.values():
            pending.wait()
        for site in self._sites():
            site.end_epoch(self.refresh)
        return collectives.all_reduce(loss, self.mesh.stage)

    def _sites(self) -> list[Any]:
        return list(self.stage.run.sites.values())

    def _rows(self, slot: int) -> slice:
        return self.stage.run.plan.own.rows(self.order[slot])

    def _exchange(self, action: Action) -> None:
        """Starts to send or receive a chunk's rows, or waits for them."""
        kind, slot, axis = action.kind, action.slot, self.mesh.stage
        if kind.startswith("receive"):
            self._under_way.pop((kind.replace("receive", "post"), slot)).wait()
            return
        # what the next stage has to do with is in the outbox
        box = self.boundary.outbox if action.peer > 0 else self.boundary.inbox
        assert box is not None
        move = collectives.send if kind.startswith("send") else collectives.receive
        rows, peer = box[self._rows(slot)], axis.rank + action.peer
        self._under_way[kind, slot] = move(rows, peer, axis, OP)

    def _forward(self, slot: int) -> None:
        begin = time.perf_counter()
        self.stage.run.mode = "forward"
        before = self._buffers() if slot == 0 and self.recompute else []
        with torch.set_grad_enabled(not self.recompute):
            leaf, out = self._computed(slot)
        if before and before != self._buffers():
            raise TypeError(
                "a layer changes its buffers as it trains (as spectral_norm does), and "
                "would compute something else when its chunk is computed again; use "
                "Pipeline(..., recompute=False)"
            )
        self.boundary.outbox[self._rows(slot)] = out.detach()
        if not self.recompute:
            self._graphs[slot] = leaf, out
        self._note("forward", slot, begin)

    def _buffers(self) -> list[int]:
        """Returns how many times each buffer of this stage's layers was written to."""
        runs = [layer.run for layer in self.stage.layers]
        modules = [run for run in runs if isinstance(run, torch.nn.Module)]
        return [b._version for module in modules for b in module.buffers()]

    def _backward(self, slot: int) -> None:
        begin, chunk = time.perf_counter(), self.order[slot]
        if slot == len(self.order) - 1:
            for site in self._sites():
                site.begin_backward()
        if self.recompute:
            self.stage.run.mode = "again"
            with torch.enable_grad():
                leaf, out = self._computed(slot)
        else:
            leaf, out = self._graphs.pop(slot)
        if out.requires_grad:
            torch.autograd.backward(out, self.boundary.outbox[self._rows(slot)])
        if leaf is not None:
            assert self.boundary.inbox is not None
            grad = 0.0 if leaf.grad is None else leaf.grad
            self.boundary.inbox[self._rows(slot)] = grad
        for site in self._sites():
            site.retire(chunk, self.refresh)
        self._note("backward", slot, begin)

    def _computed(self, slot: int) -> tuple[Tensor | None, Tensor]:
        """Runs the layers on a chunk; returns what came in, as a leaf, and what goes out."""
        values, leaf, chunk = {}, None, self.order[slot]
        if self.boundary.takes is not None:
            assert self.boundary.inbox is not None
            leaf = self.boundary.inbox[self._rows(slot)].detach()
            leaf.requires_grad_(torch.is_grad_enabled())
            values = self.boundary.takes.unpack(leaf, self.stage.view(chunk).nodes)
        found = self.stage.forward(chunk, values)
        return leaf, self.boundary.gives.pack(found)

    def _loss(self, data: Data, loss_fn: Loss) -> Tensor:
        """Takes the loss of the whole graph; its gradient goes where the output was."""
        box, own = self.boundary.outbox, self.stage.run.plan.own
        leaf = box[own.place].requires_grad_()
        edge_index: Any = data.edge_index
        with torch.enable_grad():
            values = self.boundary.gives.unpack(leaf, edge_index.nodes)
            loss = loss_fn(values[self.boundary.gives.names[0]], data)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = (
                list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            )
            raise TypeError(f"loss_fn must return one number as a tensor, got {shape}")
        loss.backward()
        grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        box.copy_(grad[own.order])
        return torch.as_tensor(loss.detach().reshape(()), dtype=torch.float64).cpu()

    def _note(self, kind: str, slot: int, begin: float) -> None:
        end, rank = time.perf_counter(), self.mesh.stage.rank
        span = ActionSpan(rank, kind, slot, begin - self._begun, end - self._begun)
        self.spans.append(span)


@contextlib.contextmanager
def gradients_added(mesh: Mesh, parameters: list[torch.nn.Parameter]) -> Iterator[None]:
    """Averages the gradients of a step, and adds them to those there are; if it fails, none."""
    before = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        with averager_of(mesh).paused():
            yield
        _average_gradients(mesh, parameters)
    except BaseException:
        for p, grad in zip(parameters, before, strict=True):
            p.grad = grad
        raise
    for p, grad in zip(parameters, before, strict=True):
        if grad is not None:
            p.grad = grad if p.grad is None else grad.add_(p.grad)


def _average_gradients(mesh: Mesh, parameters: list[torch.nn.Parameter]) -> None:
    """Averages gradients over the ranks of a stage; [Note: gradients] in `comm/autograd.py`.

    Price: one all-reduce of the parameters that have a gradient.
    """
    if mesh.size == 1:
        return
    grads = [p.grad for p in parameters if p.grad is not None]
    for dtype in dict.fromkeys(g.dtype for g in grads):
        some = [g for g in grads if g.dtype == dtype]
        flat = collectives.all_reduce(
            torch.cat([g.reshape(-1) for g in some]), mesh.data
        )
        parts = flat.div_(mesh.size).split([g.numel() for g in some])
        for g, part in zip(some, parts, strict=True):
            g.copy_(part.view_as(g))


def clip_grad_norm_(
    layers: torch.nn.Module, mesh: Mesh, max_norm: float, norm_type: float
) -> Tensor:
    """Scales the gradients of all stages; returns their norm before, on all ranks.

        norm = (sum over parameters of |grad|^p)^(1/p),  grad <- grad min(1, max / norm)

    The norms of parameters are joined in the order of layers, so that the number of
    stages does not matter.

    Price: one number for each parameter.

    Raises:
        ValueError: for a norm that is none.
    """
    if isinstance(max_norm, str) or not float(max_norm) >= 0:
        raise ValueError(f"max_norm must be a number from 0 on, got {max_norm!r}")
    mine = [p.grad for p in layers.parameters() if p.grad is not None]
    norms = [float(torch.linalg.vector_norm(g.detach(), norm_type)) for g in mine]
    every = [
        n for part in collectives.all_gather_object(norms, mesh.stage) for n in part
    ]
    total = torch.linalg.vector_norm(
        torch.tensor(every or [0.0], dtype=torch.float64), norm_type
    )
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)  # NaN stays
    for grad in mine:
        grad.mul_(float(scale))
    return total

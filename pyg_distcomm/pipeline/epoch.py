"""Runs the layers of a stage: on all nodes, or for an epoch by the actions of a schedule.

`Stage` runs the layers of this rank on a chunk, or on all nodes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch_geometric.data import Data

from pyg_distcomm.comm import collectives, random
from pyg_distcomm.comm.collectives import Axis, Pending
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.pipeline.chunk_graph import ChunkPass, view_of
from pyg_distcomm.pipeline.chunks import ChunkPlan
from pyg_distcomm.pipeline.layer_stack import (
    StackLayer,
    failing_together,
    names_crossing,
    names_from_data,
)
from pyg_distcomm.sharded.dist_tensor import DistTensor, own_part

Values = dict[str, Any]


@dataclass(frozen=True)
class StageTensors:
    """The layout of the tensors that cross from stage to stage: one row per node holds all.

    Of each it has the `torch.Size` of a row, or for a list of tensors a list of these.
    """

    names: tuple[str, ...]
    shapes: tuple[Any, ...]
    dtype: torch.dtype

    @staticmethod
    def of(
        values: Values, names: Sequence[str], where: str, nodes: Rows
    ) -> StageTensors:
        """Returns the layout of named values, which must have a row for each node."""
        shapes, dtypes = [], set()
        for name in names:
            value = values[name]
            parts = list(value) if isinstance(value, (list, tuple)) else [value]
            if not all(isinstance(p, DistTensor) for p in parts):
                raise TypeError(
                    f"{name}, after {where}, is a {type(value).__name__}, but only a tensor "
                    "with a row for each node, or a list of them, can cross from stage to "
                    "stage; return one, or give balance=[...] so that all layers that read "
                    "it are in one stage"
                )
            edges = [p for p in parts if not p.rows.same_as(nodes)]
            if edges:
                raise TypeError(
                    f"{name}, after {where}, has a row for each edge ({edges[0].rows}), but "
                    "only tensors with a row for each node can cross from stage to stage; "
                    "give balance=[...] so that all layers that read it are in one stage"
                )
            found = [part.shape[1:] for part in parts]
            shapes.append(found if isinstance(value, (list, tuple)) else found[0])
            dtypes |= {part.dtype for part in parts}
        if len(dtypes) > 1 or not all(kind.is_floating_point for kind in dtypes):
            raise TypeError(
                f"{', '.join(names)}, after {where}, are of {sorted(map(str, dtypes))}, but "
                "tensors that cross from stage to stage must be of one floating point dtype; "
                "convert them to one"
            )
        return StageTensors(tuple(names), tuple(shapes), dtypes.pop())

    @property
    def width(self) -> int:
        """The number of elements in a row."""
        return sum(self._widths)

    @property
    def _widths(self) -> list[int]:
        return [
            math.prod(shape) for shape in tree_leaves(self.shapes, is_leaf=_is_shape)
        ]

    def pack(self, values: Values) -> Tensor:
        """Returns values as one matrix `[n_c, width]`, differentiably."""
        parts = tree_leaves([values[name] for name in self.names])
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
        """Returns the values in a matrix as copies, since layers may write into them."""
        parts = iter(packed.split(self._widths, 1))

        def next_value(shape: torch.Size) -> DistTensor:
            own = next(parts).reshape(len(packed), *shape).clone()
            return DistTensor.wrap(own, rows)

        found = tree_map(next_value, self.shapes, is_leaf=_is_shape)
        return dict(zip(self.names, found, strict=True))


def _is_shape(value: Any) -> bool:
    return isinstance(value, torch.Size)


class Stage:
    """Consecutive layers of a stack, the data they read, and the rows they receive and send.

    Shapes (this rank; n own nodes, sorted by chunk): inbox [n, d_in], outbox [n, d_out]. In
    the backward pass they hold the gradients of these rows.

    Args:
        layers: all layers of the stack.
        begin, end: the range of this stage's layers.
        run: the state of the pass that is being computed.
    """

    # the layout of the inbox; the first stage has none
    received: StageTensors | None = None
    inbox: Tensor | None = None
    sent: StageTensors  # the layout of the outbox, once `fill` has run
    outbox: Tensor
    result: StageTensors  # the layout of the last stage's output

    def __init__(
        self, layers: Sequence[StackLayer], begin: int, end: int, run: ChunkPass
    ) -> None:
        self.layers, self.begin, self.end, self.run = layers, begin, end, run
        self._names = names_from_data(layers, begin, end)
        self._data: dict[str, tuple[Any, str]] = {}
        self._versions: dict[str, tuple[Any, int]] = {}
        self._views: dict[int | None, Any] = {}

    def load_data(self, data: Data) -> None:
        """Sorts the attributes that layers read by chunk, if they have changed."""
        for name in self._names:
            value = data.get(name)
            now = value, value._version if isinstance(value, Tensor) else 0
            before = self._versions.get(name)
            if before is None or before[0] is not now[0] or before[1] != now[1]:
                self._data[name] = _sort_by_chunk(value, name, self.run.plan)
                self._versions[name] = now

    def view(self, chunk: int | None) -> Any:
        """Returns the edges of a chunk, or of all nodes; they are built once."""
        if chunk not in self._views:
            self._views[chunk] = view_of(self.run, chunk)
        return self._views[chunk]

    def leaf(self, chunk: int) -> Tensor | None:
        """Returns what the layers receive of a chunk, to take its gradient."""
        if self.inbox is None:
            return None
        rows = self.inbox[self.run.plan.own.rows(chunk)].detach()
        return rows.requires_grad_(torch.is_grad_enabled())

    def forward(self, chunk: int | None, packed: Tensor | None) -> Values:
        """Runs the layers on the rows of a chunk, or of all nodes, which were received."""
        known = self.chunk_inputs(chunk)
        if packed is not None and self.received is not None:
            known |= self.received.unpack(packed, self.view(chunk).nodes)
        with random.apart(self.run.plan.topology.device):
            for place in range(self.begin, self.end):
                self.run.begin_layer(place, chunk)
                known.update(self.call(self.layers[place], known))
        return known

    def fill(self) -> None:
        """Runs the layers on all nodes, into sites; then a chunk, to see what has gradients."""
        with torch.no_grad():
            found = self.forward(None, self.inbox)
        names, where = names_crossing(self.layers, self.end), self.layers[self.end - 1]
        self.sent = StageTensors.of(found, names, str(where), self.view(None).nodes)
        # a copy: it may be the data's, or the inbox
        self.outbox = self.sent.pack(found).clone()
        self.run.mode = "again"
        with torch.enable_grad():
            self.forward(0, self.leaf(0))
        self.run.mode = "fill"

    def call(self, layer: StackLayer, known: Values) -> Values:
        """Runs one layer."""
        missing = [name for name in layer.reads if name not in known]
        if missing:
            raise ValueError(
                f"{layer} reads {', '.join(missing)}, which no layer before it writes and "
                "the Data does not have; write it with a header, such as "
                "(layer, 'x -> x_0')"
            )
        out = layer.run(*(known[name] for name in layer.reads))
        if len(layer.writes) == 1:
            return {layer.writes[0]: out}
        return dict(zip(layer.writes, out, strict=True))

    def chunk_inputs(self, chunk: int | None) -> Values:
        """Returns the edges and the attributes of the data for a chunk, or for all nodes."""
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


def _sort_by_chunk(value: Any, name: str, plan: ChunkPlan) -> tuple[Any, str]:
    """Returns an attribute sorted by chunk, and whether its rows are of "node" or "edge".

    A plain tensor may have the rows of all ranks; what has none belongs to the "graph".
    """
    topology = plan.topology
    if isinstance(value, Tensor) and value.requires_grad:
        raise ValueError(
            f"data.{name} requires a gradient, which a pipeline does not return; detach "
            "it, or learn it in a layer"
        )
    for rows in (topology.nodes, topology.edges):
        if type(value) is Tensor and value.dim() and len(value) == rows.count:
            value = DistTensor(own_part(value, rows, 0), rows)
    if not isinstance(value, DistTensor):
        return value, "graph"
    local = value.to_local().detach()
    # on one rank, as many nodes as edges have the same ids: the object tells them apart
    of_edges = value.rows is topology.edges
    if not of_edges and value.rows.same_as(topology.nodes):
        return local[plan.own.order.to(local.device)], "node"
    if of_edges or value.rows.same_as(topology.edges):
        return local[plan.edge.order.to(local.device)], "edge"
    raise ValueError(
        f"data.{name} has {value.rows}, but layers of a pipeline read rows of the nodes or of "
        "the edges; leave it out of the layers, or make it anew by pdc.partition"
    )


OP = "stage"  # the ledger's name for messages between stages
AHEAD = 2  # chunks whose messages are awaited while another is computed
Loss = Callable[[Any, Any], Tensor]


@dataclass(eq=False)
class Epoch:
    """Runs one epoch on this rank: one step of training.

    Args:
        order: the chunk of each slot.
        recompute: whether chunks are recomputed in the backward pass.
        refresh: whether the rows of this epoch become history.
    """

    mesh: Mesh
    stage: Stage
    order: list[int]
    recompute: bool
    refresh: bool
    _sending: list[Pending] = field(default_factory=list)
    _outputs: dict[int, tuple[Tensor | None, Tensor]] = field(default_factory=dict)

    def run(self, data: Data, loss_fn: Loss) -> Tensor:
        """Computes all chunks forward, the loss, and all chunks back; returns the loss.

        If that fails, history is restored in place of the rows of this epoch; see
        `HistoryBuffer.undo`.
        """
        stage, axis = self.stage, self.mesh.stage
        before = None if axis.rank == 0 else axis.rank - 1
        after = None if axis.rank == axis.size - 1 else axis.rank + 1
        loss = torch.zeros((), dtype=torch.float64)
        ends = (stage.inbox, before), (stage.outbox, after)
        slots = range(len(self.order))
        try:
            self._pass(slots, self._forward, *ends)
            if after is None:
                loss = self._loss(data, loss_fn)
            for site in self._sites():
                site.begin_backward()
            self._pass(slots[::-1], self._backward, *ends[::-1])
            for pending in self._sending:
                pending.wait()
            for site in self._sites():
                site.end_epoch(self.refresh)
            return collectives.all_reduce(loss, axis)
        except BaseException:
            for site in self._sites():
                site.undo()
            raise

    def _pass(
        self,
        slots: range,
        compute: Callable[[int], None],
        source: tuple[Tensor | None, int | None],
        target: tuple[Tensor | None, int | None],
    ) -> None:
        """Computes chunks in order, with rows or gradients from one neighbour for the other.

        Two neighbours have one lane between them, on which messages travel one after the
        other, in an order that both ends must keep (with NCCL, one that waits holds up those
        behind it). A receive is posted some chunks ahead, so that a message travels while the
        chunk before it is computed.
        """
        axis, ((inbox, before), (outbox, after)) = self.mesh.stage, (source, target)
        posted: list[Pending] = []
        for position, slot in enumerate(slots):
            if inbox is not None and before is not None:
                for later in slots[len(posted) : position + AHEAD + 1]:
                    rows = inbox[self._rows(later)]
                    posted.append(collectives.receive(rows, before, axis, OP))
                posted[position].wait()
            compute(slot)
            if outbox is not None and after is not None:
                rows = outbox[self._rows(slot)]
                self._sending.append(collectives.send(rows, after, axis, OP))

    def _sites(self) -> list[Any]:
        return list(self.stage.run.sites.values())

    def _rows(self, slot: int) -> slice:
        return self.stage.run.plan.own.rows(self.order[slot])

    def _forward(self, slot: int) -> None:
        self.stage.run.mode = "forward"
        before = self._buffers() if slot == 0 and self.recompute else []
        with torch.set_grad_enabled(not self.recompute):
            leaf, out = self._compute(slot)
        if before and before != self._buffers():
            raise TypeError(
                "a layer changes its buffers in training (as spectral_norm does), so "
                "recomputing its chunk would give other results; use "
                "Pipeline(..., recompute=False)"
            )
        self.stage.outbox[self._rows(slot)] = out.detach()
        if not self.recompute:
            self._outputs[slot] = leaf, out

    def _buffers(self) -> list[int]:
        """Returns how many times each buffer of this stage's layers was written to."""
        parts = [part for layer in self.stage.layers for part in layer.modules]
        return [b._version for part in parts for b in part.buffers(recurse=False)]

    def _backward(self, slot: int) -> None:
        stage = self.stage
        if self.recompute:
            stage.run.mode = "again"
            with torch.enable_grad():
                leaf, out = self._compute(slot)
        else:
            leaf, out = self._outputs.pop(slot)
        if out.requires_grad:
            torch.autograd.backward(out, stage.outbox[self._rows(slot)])
        if leaf is not None:
            assert stage.inbox is not None
            grad = 0.0 if leaf.grad is None else leaf.grad
            stage.inbox[self._rows(slot)] = grad
        for site in self._sites():
            site.retire(self.order[slot], self.refresh)

    def _compute(self, slot: int) -> tuple[Tensor | None, Tensor]:
        """Runs the layers on a chunk; returns their inputs, as a leaf, and their outputs."""
        leaf = self.stage.leaf(self.order[slot])
        return leaf, self.stage.sent.pack(self.stage.forward(self.order[slot], leaf))

    def _loss(self, data: Data, loss_fn: Loss) -> Tensor:
        """Computes the loss of the whole graph; its gradient overwrites the output."""
        box, sent, own = self.stage.outbox, self.stage.sent, self.stage.run.plan.own
        leaf = box[own.place].requires_grad_()
        edge_index: Any = data.edge_index
        with torch.enable_grad():
            values = sent.unpack(leaf, edge_index.nodes)
            loss = loss_fn(values[sent.names[0]], data)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = (
                list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            )
            raise TypeError(f"loss_fn must return one number as a tensor, got {shape}")
        loss.backward()
        grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        # weights get the mean of what ranks find for their rows, and of what `loss_fn` adds to
        # the gradients of weights, which is the whole's on each rank
        box.copy_(grad[own.order] * self.mesh.size)
        return torch.as_tensor(loss.detach().reshape(()), dtype=torch.float64).cpu()


@contextlib.contextmanager
def accumulated_gradients(
    mesh: Mesh, parameters: list[torch.nn.Parameter]
) -> Iterator[None]:
    """Averages the gradients of a step, and adds them to `p.grad`; a failed step adds none."""
    before = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        yield
        if mesh.size > 1:
            _average_gradients(mesh, parameters)
    except BaseException:
        for p, grad in zip(parameters, before, strict=True):
            p.grad = grad
        raise
    for p, grad in zip(parameters, before, strict=True):
        if grad is not None:
            p.grad = grad if p.grad is None else grad.add_(p.grad)


def _average_gradients(mesh: Mesh, parameters: list[torch.nn.Parameter]) -> None:
    """Averages gradients over the ranks of a stage, of which one without edges has fewer.

    Price: one all-reduce of the parameters that require a gradient, and of a number for each,
    which tells whether any rank has one.
    """
    free = [p for p in parameters if p.requires_grad]
    for dtype in dict.fromkeys(p.dtype for p in free):
        same = [p for p in free if p.dtype == dtype]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in same]
        mine = grads[0].new_tensor([p.grad is not None for p in same])
        flat = torch.cat([*(g.reshape(-1) for g in grads), mine])
        flat = collectives.all_reduce(flat, mesh.data).div_(mesh.size)
        *parts, any_has = flat.split([*(g.numel() for g in grads), len(same)])
        for p, g, part, has in zip(same, grads, parts, any_has, strict=True):
            p.grad = g.copy_(part.view_as(g)) if p.grad is not None or has else None


def clip_grad_norm_(
    layers: torch.nn.Module, mesh: Mesh, max_norm: float, norm_type: float
) -> Tensor:
    """Scales the gradients of all stages; returns their norm before, on all ranks.

        norm = (sum over parameters of |grad|^p)^(1/p),  grad <- grad min(1, max / norm)

    The norms of parameters are joined in the order of layers, so that the number of
    stages does not matter.

    Price: one number for each parameter.

    Raises:
        ValueError: if `max_norm` is negative, NaN or no number.
    """
    if isinstance(max_norm, str) or not float(max_norm) >= 0:
        raise ValueError(f"max_norm must be a number of at least 0, got {max_norm!r}")
    mine = [p.grad for p in layers.parameters() if p.grad is not None]
    norms = [float(torch.linalg.vector_norm(g.detach(), norm_type)) for g in mine]
    every = [
        n for part in collectives.all_gather_object(norms, mesh.stage) for n in part
    ]
    total = torch.linalg.vector_norm(
        torch.tensor(every or [0.0], dtype=torch.float64), norm_type
    )
    torch.nn.utils.clip_grads_with_norm_(layers.parameters(), max_norm, total)
    return total


def broadcast_weights(stack: Sequence[StackLayer], mesh: Mesh) -> None:
    """Broadcasts the weights of rank 0 to all ranks; collective."""
    if mesh.everyone.size == 1:
        return
    runs = [la.run for la in stack if isinstance(la.run, torch.nn.Module)]
    modules = torch.nn.ModuleList(runs)
    state = {name: value.cpu() for name, value in modules.state_dict().items()}
    modules.load_state_dict(collectives.broadcast_object(state, mesh.everyone))


def fill(stage: Stage, mesh: Mesh) -> None:
    """Runs all layers on all nodes, stage after stage; collective over all stages.

    This fills the sites with their first rows, and tells each stage the layout of its inputs.
    """
    run, axis = stage.run, mesh.stage
    run.mode, run.sites, run.facts, run.readers = "fill", {}, {}, []
    for turn in range(axis.size):
        mine = turn == axis.rank
        with failing_together(mesh):
            if mine:
                stage.fill()
        layouts = collectives.all_gather_object(stage.sent if mine else None, axis)
        stage.result = layouts[turn]
        if turn == axis.rank - 1:
            received = stage.received = layouts[turn]
            shape = run.plan.counts[0], received.width
            where = {"dtype": received.dtype, "device": run.plan.topology.device}
            stage.inbox = torch.empty(shape, **where)
            collectives.receive(stage.inbox, turn, axis, OP).wait()
        elif mine and turn < axis.size - 1:
            collectives.send(stage.outbox, turn + 1, axis, OP).wait()
    counts = collectives.all_gather_object(len(run.sites), axis)
    run.before, run.all_sites = sum(counts[: axis.rank]), sum(counts)


def forward_all_nodes(stage: Stage, axis: Axis) -> Tensor:
    """Runs this stage's layers on all nodes, exactly; sends its output on, and returns it."""
    inbox = None
    if stage.inbox is not None:
        inbox = torch.empty_like(stage.inbox)
        collectives.receive(inbox, axis.rank - 1, axis, OP).wait()
    with torch.no_grad():
        out = stage.sent.pack(stage.forward(None, inbox)).contiguous()
    if axis.rank < axis.size - 1:
        collectives.send(out, axis.rank + 1, axis, OP).wait()
    return out

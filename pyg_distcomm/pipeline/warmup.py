"""Prepares a pipeline: broadcasts weights, measures layers, and runs all nodes once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch_geometric.data import Data

from pyg_distcomm.comm import collectives, random
from pyg_distcomm.comm.collectives import Axis
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.pipeline.chunk_graph import ChunkPass
from pyg_distcomm.pipeline.epoch import OP, Stage, StageBuffers, StageTensors, Values
from pyg_distcomm.pipeline.layer_stack import (
    StackLayer,
    estimated_costs,
    least_seconds,
    names_crossing,
    on_all_ranks,
)
from pyg_distcomm.sharded.dist_tensor import DistTensor


def broadcast_weights(stack: Sequence[StackLayer], mesh: Mesh) -> None:
    """Broadcasts the weights of rank 0 to all ranks; collective."""
    if mesh.everyone.size == 1:
        return
    modules = [la.run for la in stack if isinstance(la.run, torch.nn.Module)]
    states = [
        {name: value.cpu() for name, value in module.state_dict().items()}
        for module in modules
    ]
    for module, state in zip(
        modules, collectives.broadcast_object(states, mesh.everyone), strict=True
    ):
        module.load_state_dict(state)


def layer_costs(
    stack: Sequence[StackLayer], mesh: Mesh, run: ChunkPass | None, data: Data | None
) -> list[float]:
    """Returns the relative costs of layers, measured if the data are given."""
    if run is None or data is None or mesh.stage.size == 1:
        return estimated_costs(stack)
    with on_all_ranks(mesh, exchanging=True):
        stage = Stage(stack, 0, len(stack), run)
        stage.load_data(data)
        costs = measured_costs(stage)
    return costs


def measured_costs(stage: Stage) -> list[float]:
    """Returns the seconds of each layer, forward and backward, on the largest chunk.

    Sums over the ranks of a stage, so that all ranks return the same; collective.
    """
    run, plan = stage.run, stage.run.plan
    sizes = torch.tensor([plan.own.size(c) for c in range(plan.chunks)])
    chunk = int(collectives.all_reduce(sizes, plan.mesh.world).argmax())
    run.mode, costs = "measure", []

    def step(place: int, inputs: Values) -> Values:
        run.begin_layer(place, chunk)
        copied = tree_map_only(DistTensor, Tensor.clone, inputs)  # layers may write
        outputs = stage.call(stage.layers[place], copied)
        parts = [part for part in tree_leaves(outputs) if isinstance(part, DistTensor)]
        total = sum(part.to_local().sum() for part in parts)
        if isinstance(total, Tensor) and total.requires_grad:
            total.backward()
        return outputs

    known = stage.chunk_inputs(chunk)
    for place in range(stage.begin, stage.end):
        names = stage.layers[place].reads
        inputs = as_leaves({name: known[name] for name in names if name in known})
        run.sites.clear()  # one layer's buffers at a time
        with random.apart(plan.topology.device):
            costs.append(least_seconds(partial(step, place, inputs)))
            known.update(step(place, inputs))
    for layer in stage.layers[stage.begin : stage.end]:
        if isinstance(layer.run, torch.nn.Module):
            layer.run.zero_grad()
    run.sites.clear()
    # ranks with the same rows measured the same work: the least time is the least disturbed
    least = collectives.all_reduce(
        torch.tensor(costs, dtype=torch.float64), plan.mesh.stage, "min"
    )
    return [float(cost) for cost in collectives.all_reduce(least, plan.mesh.world)]


def as_leaves(values: Values) -> Values:
    """Returns the values detached, as leaves that require gradients."""

    def leaf(value: DistTensor) -> DistTensor:
        if not value.is_floating_point():
            return value
        return DistTensor.wrap(value.to_local().detach().requires_grad_(), value.rows)

    found: Values = tree_map_only(DistTensor, leaf, values)
    return found


def fill(stage: Stage, mesh: Mesh) -> StageBuffers:
    """Runs all layers on all nodes, stage after stage; collective over all stages.

    This fills the sites with their first rows, and tells each stage the layout of its inputs.
    """
    run, axis = stage.run, mesh.stage
    run.mode, run.sites, run.facts, run.readers = "fill", {}, {}, []
    received: StageTensors | None = None
    sent: StageTensors | None = None
    inbox, outbox = None, torch.empty(0)
    for turn in range(axis.size):
        with on_all_ranks(mesh, exchanging=True):
            if turn == axis.rank:
                found = _run_all_nodes(stage, received, inbox)
                names = names_crossing(stage.layers, stage.end)
                where, nodes = stage.layers[stage.end - 1], stage.view(None).nodes
                sent = StageTensors.of(found, names, str(where), nodes)
                outbox = sent.pack(found).clone()  # it may be the data's, or the inbox
                _mark_gradients(stage, received, inbox)
        layouts = collectives.all_gather_object(
            sent if turn == axis.rank else None, axis
        )
        if turn == axis.rank - 1:
            received = layouts[turn]
            shape = (run.plan.counts[0], received.width)
            inbox = torch.empty(
                shape, dtype=received.dtype, device=run.plan.topology.device
            )
            collectives.receive(inbox, turn, axis, OP).wait()
        elif turn == axis.rank and turn < axis.size - 1:
            collectives.send(outbox, turn + 1, axis, OP).wait()
    assert sent is not None
    counts = collectives.all_gather_object(len(run.sites), axis)
    run.before, run.all_sites = sum(counts[: axis.rank]), sum(counts)
    return StageBuffers(received, sent, layouts[-1], inbox, outbox)


def _run_all_nodes(
    stage: Stage, received: StageTensors | None, inbox: Tensor | None
) -> Values:
    values: Values = {}
    if received is not None and inbox is not None:
        values = received.unpack(inbox, stage.view(None).nodes)
    with torch.no_grad():
        return stage.forward(None, values)


def _mark_gradients(
    stage: Stage, received: StageTensors | None, inbox: Tensor | None
) -> None:
    """Runs a chunk with gradients, which marks the sites that need a gradient."""
    stage.run.mode = "again"
    values: Values = {}
    if received is not None and inbox is not None:
        leaf = inbox[stage.run.plan.own.rows(0)].detach().requires_grad_()
        values = received.unpack(leaf, stage.view(0).nodes)
    with torch.enable_grad():
        stage.forward(0, values)
    stage.run.mode = "fill"


def forward_all_nodes(stage: Stage, boundary: StageBuffers, axis: Axis) -> Tensor:
    """Runs this stage's layers on all nodes, exactly; sends its output on, and returns it."""
    inbox = None
    if boundary.inbox is not None:
        inbox = torch.empty_like(boundary.inbox)
        collectives.receive(inbox, axis.rank - 1, axis, OP).wait()
    out = boundary.sent.pack(
        _run_all_nodes(stage, boundary.received, inbox)
    ).contiguous()
    if axis.rank < axis.size - 1:
        collectives.send(out, axis.rank + 1, axis, OP).wait()
    return out

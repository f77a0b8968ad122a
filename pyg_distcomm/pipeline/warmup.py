"""Prepares training: broadcasts weights, measures layers, and passes over all nodes once."""

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
    crossing,
    on_all_ranks,
    seconds_of,
    supposed_costs,
)
from pyg_distcomm.tensor.dist_tensor import DistTensor


def share_weights(stack: Sequence[StackLayer], mesh: Mesh) -> None:
    """Gives all ranks the weights of rank 0."""
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


def costs_of(
    stack: Sequence[StackLayer], mesh: Mesh, run: ChunkPass | None, data: Data | None
) -> list[float]:
    """Returns what layers cost beside one another, measured where the data are given."""
    if run is None or data is None or mesh.stage.size == 1:
        return supposed_costs(stack)
    with on_all_ranks(mesh, exchanging=True):
        stage = Stage(stack, 0, len(stack), run)
        stage.look_at(data)
        costs = measured_costs(stage)
    return costs


def measured_costs(stage: Stage) -> list[float]:
    """Returns the seconds that each layer takes, forward and back, on the largest chunk.

    Of the rows of a stage together, the same on all ranks; collective.
    """
    run, plan = stage.run, stage.run.plan
    sizes = torch.tensor([plan.own.size(c) for c in range(plan.chunks)])
    chunk = int(collectives.all_reduce(sizes, plan.mesh.world).argmax())
    run.mode, costs = "measure", []

    def step(place: int, inputs: Values) -> Values:
        run.begin_layer(place, chunk)
        copies = tree_map_only(DistTensor, Tensor.clone, inputs)  # layers may write
        gives = stage.call(stage.layers[place], copies)
        parts = [part for part in tree_leaves(gives) if isinstance(part, DistTensor)]
        total = sum(part.to_local().sum() for part in parts)
        if isinstance(total, Tensor) and total.requires_grad:
            total.backward()
        return gives

    known = stage.given(chunk)
    for place in range(stage.begin, stage.end):
        names = stage.layers[place].takes
        inputs = leaves({name: known[name] for name in names if name in known})
        run.sites.clear()  # one layer's buffers at a time
        with random.apart(plan.topology.device):
            costs.append(seconds_of(partial(step, place, inputs)))
            known.update(step(place, inputs))
    for layer in stage.layers[stage.begin : stage.end]:
        if isinstance(layer.run, torch.nn.Module):
            layer.run.zero_grad()
    run.sites.clear()
    # what ranks with the same rows measured is the same work: the least disturbed counts
    least = collectives.all_reduce(
        torch.tensor(costs, dtype=torch.float64), plan.mesh.stage, "min"
    )
    return [float(cost) for cost in collectives.all_reduce(least, plan.mesh.world)]


def leaves(values: Values) -> Values:
    """Returns the same rows without their history, ready for gradients."""

    def leaf(value: DistTensor) -> DistTensor:
        if not value.is_floating_point():
            return value
        return DistTensor.wrap(value.to_local().detach().requires_grad_(), value.rows)

    found: Values = tree_map_only(DistTensor, leaf, values)
    return found


def fill(stage: Stage, mesh: Mesh) -> StageBuffers:
    """Runs all layers on all nodes, stage after stage; collective over all stages.

    Sites get the rows that they start from, and each stage learns what it will receive.
    """
    run, axis = stage.run, mesh.stage
    run.mode, run.sites, run.facts, run.readers = "fill", {}, {}, []
    takes: StageTensors | None = None
    gives: StageTensors | None = None
    inbox, outbox = None, torch.empty(0)
    for turn in range(axis.size):
        with on_all_ranks(mesh, exchanging=True):
            if turn == axis.rank:
                found = _whole(stage, takes, inbox)
                names = crossing(stage.layers, stage.end)
                where, nodes = stage.layers[stage.end - 1], stage.view(None).nodes
                gives = StageTensors.of(found, names, str(where), nodes)
                outbox = gives.pack(found).clone()  # it may be the data's, or the inbox
                _probe(stage, takes, inbox)
        said = collectives.all_gather_object(gives if turn == axis.rank else None, axis)
        if turn == axis.rank - 1:
            takes = said[turn]
            shape = (run.plan.counts[0], takes.width)
            inbox = torch.empty(
                shape, dtype=takes.dtype, device=run.plan.topology.device
            )
            collectives.receive(inbox, turn, axis, OP).wait()
        elif turn == axis.rank and turn < axis.size - 1:
            collectives.send(outbox, turn + 1, axis, OP).wait()
    assert gives is not None
    counts = collectives.all_gather_object(len(run.sites), axis)
    run.before, run.all_sites = sum(counts[: axis.rank]), sum(counts)
    return StageBuffers(takes, gives, said[-1], inbox, outbox)


def _whole(stage: Stage, takes: StageTensors | None, inbox: Tensor | None) -> Values:
    values: Values = {}
    if takes is not None and inbox is not None:
        values = takes.unpack(inbox, stage.view(None).nodes)
    with torch.no_grad():
        return stage.forward(None, values)


def _probe(stage: Stage, takes: StageTensors | None, inbox: Tensor | None) -> None:
    """Runs a chunk with gradients, so that sites know whether any go through them."""
    stage.run.mode = "again"
    values: Values = {}
    if takes is not None and inbox is not None:
        leaf = inbox[stage.run.plan.own.rows(0)].detach().requires_grad_()
        values = takes.unpack(leaf, stage.view(0).nodes)
    with torch.enable_grad():
        stage.forward(0, values)
    stage.run.mode = "fill"


def whole_pass(stage: Stage, boundary: StageBuffers, axis: Axis) -> Tensor:
    """Runs all layers on all nodes, exactly, and hands on what comes out, which it returns."""
    inbox = None
    if boundary.inbox is not None:
        inbox = torch.empty_like(boundary.inbox)
        collectives.receive(inbox, axis.rank - 1, axis, OP).wait()
    out = boundary.gives.pack(_whole(stage, boundary.takes, inbox)).contiguous()
    if axis.rank < axis.size - 1:
        collectives.send(out, axis.rank + 1, axis, OP).wait()
    return out

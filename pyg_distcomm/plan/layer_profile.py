"""Deep: a stack of layers as a pipeline cuts it, item by item, read from widths or run dry."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

from pyg_distcomm.comm import mesh, random
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.graph.partitioning import partition
from pyg_distcomm.graph.product_cache import MultiplyOrder
from pyg_distcomm.pipeline.balance import supposed_costs
from pyg_distcomm.pipeline.chunk_graph import ChunkPass
from pyg_distcomm.pipeline.chunks import plan_chunks
from pyg_distcomm.pipeline.history_buffer import GradientRule
from pyg_distcomm.pipeline.layer_stack import (
    StackLayer,
    crossing,
    from_data,
    read_stack,
)
from pyg_distcomm.pipeline.stage import Stage, StageTensors, Values
from pyg_distcomm.pipeline.validation import check_links
from pyg_distcomm.pipeline.warmup import leaves
from pyg_distcomm.plan.training import Training

_KNOWN = ("x", "edge_weight")  # of the data


@dataclass(frozen=True)
class Read:
    """One exchange of rows in a forward pass.

    Args:
        width: of the rows.
        flows: whether their gradients go back.
        behind: whether they do in all stages but the first, which get what they are of.
        exact: whether they are exact, and now, whatever the link.
    """

    width: int
    flows: bool
    behind: bool = True
    exact: bool = False


@dataclass(frozen=True)
class Item:
    """One item of a stack.

    Args:
        cost: beside others, as `Pipeline` supposes.
        reads: what it reads of neighbours.
        dense: widths of the matrices that it multiplies with.
        parameters: how many train.
        carried: numbers a node that go on to the next item.
        skips: values among them, beside the first.
        stuck: why they cannot go to another stage; nothing if they can.
        readers: the layers in it that read by the link.
        layer: itself, where it is known.
    """

    cost: float
    reads: tuple[Read, ...]
    dense: tuple[tuple[int, int], ...]
    parameters: int
    carried: int
    skips: int
    stuck: str = ""
    readers: tuple[list[MessagePassing], ...] = ()
    layer: StackLayer | None = None


def read_width(kind: str, width_in: int, width_out: int) -> tuple[int, bool]:
    """Returns the width at which a layer reads neighbours in chunks, and if after W."""
    if kind == "halo":
        return width_in, False
    first = MultiplyOrder().takes_first(width_in, width_out, (False, False))
    return (width_in, False) if first else (width_out, True)


def items_of(training: Training, skips: int) -> list[Item]:
    """Reads the items of a stack from the widths of its layers."""
    found = []
    for i, layer in enumerate(training.layers):
        width, after = read_width(layer.kind, layer.width_in, layer.width_out)
        pair = layer.width_in, layer.width_out
        found.append(
            Item(
                1.0,
                (Read(width, after or training.wants_gradient(i)),),
                (pair, pair) if layer.kind == "sage" else (pair,),
                sum(layer.parameters),
                layer.width_out * (1 + skips),
                skips,
            )
        )
    return found


@torch.inference_mode(False)
def items_of_stack(layers: Any, num_features: int) -> list[Item]:
    """Reads the items of a stack by running a copy of it, as a pipeline does, on two nodes.

    Raises:
        ValueError, TypeError: as `Pipeline` does, for what is no stack, or cannot run in
            chunks.
    """
    stack = [layer.converted() for layer in copy.deepcopy(read_stack(layers))]
    check_links(stack)
    for layer in stack:
        if isinstance(layer.run, torch.nn.Module):
            layer.run.cpu().eval()
    costs, stage = supposed_costs(stack), _stage_of(stack, num_features)
    try:
        with random.apart(torch.device("cpu")):
            return _items(stack, costs, stage)
    except (ValueError, TypeError, RuntimeError):
        raise
    except Exception as error:  # of layers of the script's own
        told = f"{type(error).__name__}: {error}"
        raise ValueError(f"the stack does not run on two nodes ({told})") from error


def _stage_of(stack: list[StackLayer], num_features: int) -> Stage:
    """Returns a stage of all layers, on two nodes that this process has alone."""
    missing = [name for name in from_data(stack, 0, len(stack)) if name not in _KNOWN]
    if missing:
        raise ValueError(
            f"the stack reads {', '.join(missing)} of the data, whose width is not known "
            "here; give widths=[...] and skips=... instead of the model"
        )
    dtype = next((p.dtype for one in stack for p in _trained(one)), torch.float32)
    x, weight = torch.zeros(2, num_features, dtype=dtype), torch.ones(3, dtype=dtype)
    data = Data(x, torch.tensor([[0, 1, 1], [1, 0, 0]]), edge_weight=weight)
    share = partition(data, mesh.alone((1, 1, 1), 0, torch.device("cpu")), "block")
    plan = plan_chunks(share.edge_index, torch.zeros(2, dtype=torch.long), 0)
    stage = Stage(stack, 0, len(stack), ChunkPass(plan, GradientRule(), None, 0))
    stage.look_at(share)
    return stage


def _items(stack: list[StackLayer], costs: list[float], stage: Stage) -> list[Item]:
    run, found = stage.run, []
    known, readers = stage.given(None), [0]
    with torch.no_grad():  # makes the sites
        for _ in _passed(stage, None, known):
            readers.append(len(run.readers))
    run.mode = "again"
    with torch.enable_grad():
        known = stage.given(0)
        for place in _passed(stage, 0, known):
            known.update(leaves({name: known[name] for name in stack[place].gives}))
        behind = {key: site.flows for key, site in run.sites.items()}
        for site in run.sites.values():
            site.flows = False
        known = stage.given(0)
        for place in _passed(stage, 0, known):
            names, layer = crossing(stack, place + 1), stack[place]
            carried, stuck = _carried(known, names, layer, stage.view(0).nodes)
            matrices = [p for p in _trained(layer) if p.dim() == 2]
            reads = tuple(
                Read(site.mix.size(1), site.flows, behind[key], bool(site.exactly))
                for key, site in run.sites.items()
                if key[0] == place
            )
            found.append(
                Item(
                    costs[place],
                    reads,
                    tuple((p.size(0), p.size(1)) for p in matrices),
                    sum(p.numel() for p in _trained(layer)),
                    carried,
                    len(names) - 1,
                    stuck,
                    tuple(run.readers[readers[place] : readers[place + 1]]),
                    layer,
                )
            )
    return found


def _passed(stage: Stage, chunk: int | None, known: Values) -> Iterator[int]:
    """Runs a stage's layers one by one, and puts down what they return."""
    for place, layer in enumerate(stage.layers):
        stage.run.begin_layer(place, chunk)
        known.update(stage.call(layer, known))
        yield place


def _carried(
    known: Values, names: Sequence[str], layer: StackLayer, nodes: Rows
) -> tuple[int, str]:
    """Returns the width of what crosses behind a layer, or why nothing can."""
    try:
        return StageTensors.of(known, names, str(layer), nodes).width, ""
    except TypeError as error:
        return 0, str(error)


def _trained(layer: StackLayer) -> Sequence[Tensor]:
    if not isinstance(layer.run, torch.nn.Module):
        return ()
    return [p for p in layer.run.parameters() if p.requires_grad]

"""Deep: a stack of layers as a pipeline cuts it, item by item, read from widths or run dry."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from pyg_distcomm.constants import Ordering
from pyg_distcomm.pipeline.balance import supposed_costs
from pyg_distcomm.pipeline.stack import Layer, crossing, read_stack
from pyg_distcomm.plan.training import Training, layer_of


@dataclass(frozen=True)
class Read:
    """One exchange of rows in a forward pass.

    Args:
        width: of the rows.
        flows: whether their gradients go back.
    """

    width: int
    flows: bool


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
    """

    cost: float
    reads: tuple[Read, ...]
    dense: tuple[tuple[int, int], ...]
    parameters: int
    carried: int
    skips: int


def read_width(kind: str, width_in: int, width_out: int) -> tuple[int, bool]:
    """Returns the width at which a layer reads neighbours in chunks, and if after W."""
    if kind == "halo":
        return width_in, False
    first = Ordering().takes_first(width_in, width_out, (False, False))
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


def items_of_stack(layers: Any, num_features: int) -> list[Item]:
    """Reads the items of a stack by running a copy of it on two nodes.

    Raises:
        ValueError, TypeError: as `Pipeline` does, for what is no stack, or cannot run in
            chunks.
    """
    stack = copy.deepcopy(read_stack(layers))
    costs, found = supposed_costs(stack), []
    dtype = next((p.dtype for one in stack for p in _trained(one)), torch.float32)
    known: dict[str, Any] = {
        "x": torch.zeros(2, num_features, dtype=dtype),
        "edge_index": torch.tensor([[0, 1], [1, 0]]),
        "edge_weight": torch.ones(2, dtype=dtype),
    }
    for place, (layer, cost) in enumerate(zip(stack, costs, strict=True)):
        reads = _run(layer, known)
        names = crossing(stack, place + 1)
        parts = [known[name] for name in names]
        matrices = [p for p in _trained(layer) if p.dim() == 2]
        found.append(
            Item(
                cost,
                tuple(reads),
                tuple((p.size(0), p.size(1)) for p in matrices),
                sum(p.numel() for p in _trained(layer)),
                sum(_width(part) for part in parts),
                len(names) - 1,
            )
        )
    return found


def _run(layer: Layer, known: dict[str, Any]) -> list[Read]:
    """Runs a layer, puts down what it returns, and tells what it read of neighbours."""
    reads: list[Read] = []

    def note(conv: torch.nn.Module, given: tuple[Any, ...]) -> None:
        x = given[0][0] if isinstance(given[0], (tuple, list)) else given[0]
        one = layer_of(conv, x.size(-1))
        width, after = read_width(one.kind, one.width_in, one.width_out)
        reads.append(Read(width, after or one.fresh or x.requires_grad))

    missing = [name for name in layer.takes if name not in known]
    if missing:
        raise ValueError(
            f"{layer} reads {', '.join(missing)} of the data, whose width is not known "
            "here; give widths=[...] and skips=... instead of the model"
        )
    if isinstance(layer.run, torch.nn.Module):
        layer.run.eval()
        for part in layer.run.modules():
            if isinstance(part, MessagePassing):
                part.register_forward_pre_hook(note)
    with torch.enable_grad():
        out = layer.run(*(known[name] for name in layer.takes))
    several = out if len(layer.gives) > 1 else (out,)
    known.update(zip(layer.gives, several, strict=True))
    return reads


def _trained(layer: Layer) -> Sequence[Tensor]:
    if not isinstance(layer.run, torch.nn.Module):
        return ()
    return [p for p in layer.run.parameters() if p.requires_grad]


def _width(value: Any) -> int:
    parts = value if isinstance(value, (tuple, list)) else [value]
    return sum(part[0].numel() for part in parts)

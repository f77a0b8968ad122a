"""A model run dry, on two nodes: which layers it calls, with what, and what is not foreseen."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch.nn import Module
from torch_geometric.nn import MessagePassing

from pyg_distcomm.nn.halo_conv import HaloConv
from pyg_distcomm.pipeline.stack import read_stack

_SUMS_OVER_NODES = (
    *(pyg.InstanceNorm, pyg.GraphNorm, pyg.PairNorm, pyg.DiffGroupNorm),
    *(pyg.MeanSubtractionNorm, pyg.GraphSizeNorm),
)


@dataclass
class Visited:
    """One call of a message passing layer.

    Args:
        conv: the layer.
        width: of its input.
        still: whether that is the features themselves.
        flows: whether a gradient goes on to it.
        rounds: how many times the layer hands rows to its edges.
    """

    conv: Module
    width: int
    still: bool
    flows: bool
    rounds: int = 0


class Chain(Module):
    """A stack, as `Pipeline` takes it, run from its first layer to its last."""

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__()
        self.stack = read_stack(layers)
        self.parts = torch.nn.ModuleList(
            layer.run for layer in self.stack if isinstance(layer.run, Module)
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        """Runs the stack."""
        known: dict[str, Any] = {"x": x, "edge_index": edge_index}
        for layer in self.stack:
            out = layer.run(*(known[name] for name in layer.takes))
            several = out if len(layer.gives) > 1 else (out,)
            known.update(zip(layer.gives, several, strict=True))
        return out


def is_layer(module: Module) -> bool:
    """Says whether a module reads rows of neighbours."""
    return isinstance(module, (MessagePassing, HaloConv))


def bare(module: Module) -> Module:
    """Returns the layer of PyG's itself."""
    return module.conv if isinstance(module, HaloConv) else module


def visited(model: Module, num_features: int, trained: bool) -> list[Visited]:
    """Runs a copy of a model on two nodes, and lists the calls of its layers.

    Raises:
        ValueError: if it takes something else than (x, edge_index), with the reason.
    """
    found: list[Visited] = []
    within: list[Visited] = []  # calls of layers inside others are the outer one's

    def enter(layer: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[0] if args else kwargs["x"]
        first = given[0] if isinstance(given, (tuple, list)) else given
        now = Visited(bare(layer), first.size(-1), first is x, first.requires_grad)
        if not within:
            found.append(now)
        within.append(now)

    def leave(*_: Any) -> None:
        within.pop()

    def propagate(*_: Any) -> None:
        within[0].rounds += 1

    try:
        model = copy.deepcopy(model).cpu().train()
        for part in model.modules():
            if is_layer(part):
                part.register_forward_pre_hook(enter, with_kwargs=True)
                part.register_forward_hook(leave)
            if isinstance(part, MessagePassing):
                part.register_propagate_forward_pre_hook(propagate)
        dtype = next((p.dtype for p in model.parameters()), torch.float32)
        x = torch.zeros(2, num_features, dtype=dtype, requires_grad=trained)
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            model(x, torch.tensor([[0, 1], [1, 0]]))
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    return found


def unforeseen(model: Module) -> list[str]:
    """Names the modules of a model that sum over nodes in ways that are not counted."""
    found = [
        type(m).__name__
        for m in model.modules()
        if isinstance(m, _SUMS_OVER_NODES)
        or (isinstance(m, pyg.LayerNorm) and m.mode == "graph")
    ]
    return list(dict.fromkeys(found))

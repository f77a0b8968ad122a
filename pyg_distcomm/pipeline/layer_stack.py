"""Reads a stack of layers and the names of their values, and cuts it into stages."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch_geometric.nn import MessagePassing

from pyg_distcomm.nn.convert import convert
from pyg_distcomm.nn.halo_conv import HaloConv
from pyg_distcomm.nn.halo_execution import pads

_CHUNK_NORMS = (
    *(_NormBase, pyg.BatchNorm, pyg.HeteroBatchNorm, pyg.InstanceNorm, pyg.GraphNorm),
    *(pyg.GraphSizeNorm, pyg.PairNorm, pyg.MeanSubtractionNorm, pyg.DiffGroupNorm),
)
_KEEPING = (pyg.GCNConv, pyg.GCN2Conv)  # in our form they keep nothing of their own
_NAMED = frozenset(("x", "edge_index"))


@dataclass(frozen=True, eq=False)
class StackLayer:
    """One layer of a stack: what it is called with, and what it leaves.

    Args:
        name: its name in the stack's `state_dict`.
        run: a module, or a function of tensors.
        takes: names of its arguments.
        gives: names of what it returns.
    """

    name: str
    run: Callable[..., Any]
    takes: tuple[str, ...]
    gives: tuple[str, ...]

    def __str__(self) -> str:
        kind = getattr(self.run, "__name__", type(self.run).__name__)
        head = f"{', '.join(self.takes)} -> {', '.join(self.gives)}"
        return f"layer {self.name} ({kind}: {head})"

    def converted(self) -> StackLayer:
        """Returns the layer in its distributed form, without checkpoints of its own.

        One of those would exchange rows again; a chunk is computed again as a whole.
        """
        if not isinstance(self.run, Module):
            return self
        run = convert(self.run)
        for part in run.modules():
            if isinstance(part, pyg.DeepGCNLayer):
                part.ckpt_grad = False
        return replace(self, run=run)

    def elsewhere(self) -> StackLayer:
        """Returns the layer as the other stages know it: by its names only."""
        return replace(self, run=_elsewhere)


def _elsewhere(*args: Any) -> Any:
    raise RuntimeError("this layer is another stage's")


def read_stack(layers: Any) -> list[StackLayer]:
    """Returns the layers of a `Sequential` of PyG or torch, a ModuleList or a list.

    Items are as in `torch_geometric.nn.Sequential`: a layer, or a pair of one and a header
    such as `"x, x_0, edge_index -> x"`. A layer without header reads what the last one
    wrote, and `edge_index` and others where its `forward` asks for them by name.

    Raises:
        TypeError, ValueError: for what is no stack of layers, or cannot run in chunks.
    """
    if isinstance(layers, pyg.Sequential):
        found = [
            StackLayer(
                c.name, getattr(layers, c.name), (*c.param_names,), (*c.return_names,)
            )
            for c in layers._children
        ]
    elif isinstance(layers, (torch.nn.ModuleList, torch.nn.Sequential, list, tuple)):
        found = []
        named = getattr(layers, "named_children", None)
        # named_children leaves out a module that comes again
        items = layers._modules.items() if named else enumerate(layers)  # type: ignore[union-attr]
        for name, item in items:
            found.append(_layer(str(name), item, found[-1] if found else None))
    else:
        raise TypeError(
            "Pipeline takes a list of layers (or a Sequential of torch or PyG, or a "
            f"ModuleList), got {type(layers).__name__}, which cannot be cut into stages; "
            "give its layers in the order in which they run"
        )
    if not found:
        raise ValueError("Pipeline got no layers")
    for layer in found:
        _check(layer)
    return found


def _layer(name: str, item: Any, before: StackLayer | None) -> StackLayer:
    last = before.gives if before is not None else ("x",)
    if isinstance(item, (tuple, list)) and len(item) == 2 and isinstance(item[1], str):
        run, header = item
        sides = [[word.strip() for word in s.split(",")] for s in header.split("->")]
        if len(sides) != 2 or not all(w.isidentifier() for side in sides for w in side):
            raise ValueError(
                f"layer {name} has the header {header!r}; write what it reads and what it "
                "returns, as in 'x, x_0, edge_index -> x'"
            )
        return StackLayer(name, run, tuple(sides[0]), tuple(sides[1]))
    if not isinstance(item, torch.nn.Module):
        raise TypeError(
            f"layer {name} is {type(item).__name__}; give a module, or a pair such as "
            "(module, 'x, edge_index -> x')"
        )
    return StackLayer(name, item, (last[0], *_asked(item)[1:]), last[:1])


def _asked(module: torch.nn.Module) -> list[str]:
    """The names of the arguments that a layer has to be given."""
    given = inspect.signature(module.forward).parameters.values()
    named = [p for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if not named:  # as DeepGCNLayer, which hands everything to its convolution
        inner = getattr(module, "conv", None)
        return _asked(inner) if isinstance(inner, torch.nn.Module) else ["x"]
    return [p.name for p in named if p.default is p.empty or p.name in _NAMED] or ["x"]


def _check(layer: StackLayer) -> None:
    """Refuses what cannot run on chunks of nodes."""
    if not callable(layer.run):
        raise TypeError(f"{layer} cannot be called")
    if not isinstance(layer.run, torch.nn.Module):
        return
    for module in layer.run.modules():
        by_graph = isinstance(module, pyg.LayerNorm) and module.mode == "graph"
        if isinstance(module, _CHUNK_NORMS) or by_graph:
            raise ValueError(
                f"{layer} normalises over all nodes ({type(module).__name__}), but a "
                "pipeline has the nodes of one chunk at a time, whose statistics are "
                "others; use torch.nn.LayerNorm or PyG's LayerNorm(mode='node'), which "
                "normalise each node, or train with pdc.replicate"
            )
        if pads(module):
            raise ValueError(
                f"{layer} pads the messages of each node to as many as any node gets "
                f"({type(module).__name__}), which those of one chunk do not tell; use "
                "another aggregation, or train with pdc.replicate"
            )
        if getattr(module, "cached", False) and type(module) not in _KEEPING:
            raise ValueError(
                f"{layer} keeps the edges of its first call (cached=True), and chunks have "
                "others; leave cached out: what is derived from edges is kept anyway"
            )
    if any(is_lazy(p) for p in layer.run.parameters()):
        raise ValueError(
            f"{layer} does not know its width yet; give in_channels, so that optimizers "
            "and stages can be made before the first epoch"
        )


def crossing(layers: Sequence[StackLayer], place: int) -> tuple[str, ...]:
    """Returns the names written before layer `place` and read from it on, in order."""
    if place >= len(layers):
        return layers[-1].gives[:1]
    alive: list[str] = []
    for layer in reversed(layers[place:]):
        alive = [name for name in alive if name not in layer.gives]
        alive += [name for name in layer.takes if name not in alive]
    written = {name for layer in layers[:place] for name in layer.gives}
    result = layers[-1].gives[0]
    if result in written and not any(result in la.gives for la in layers[place:]):
        alive.append(result)
    return tuple(sorted(name for name in set(alive) if name in written))


def from_data(layers: Sequence[StackLayer], begin: int, end: int) -> tuple[str, ...]:
    """Returns the names that layers from `begin` to `end` read and none before writes."""
    written = {name for layer in layers[:begin] for name in layer.gives}
    found: list[str] = []
    for layer in layers[begin:end]:
        found += [n for n in layer.takes if n not in written and n not in found]
        written |= set(layer.gives)
    return tuple(name for name in found if name != "edge_index")


_LIGHT = 0.1  # what a layer that reads no neighbours costs, beside one that does


def cut_layers(costs: Sequence[float], stages: int) -> list[int]:
    """Returns how many layers each stage has, so that the slowest is fastest.

    Least largest sum of consecutive runs, by dynamic programming over (stages, layers);
    of several with the same slowest stage, one whose others are alike.
    """
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    count = len(costs)
    never = (float("inf"), 0.0)
    best = [[never] * (count + 1) for _ in range(stages + 1)]
    where = [[0] * (count + 1) for _ in range(stages + 1)]
    best[0][0] = (0.0, 0.0)
    for s in range(1, stages + 1):
        for end in range(s, count + 1):
            for begin in range(s - 1, end):
                here, (most, squares) = total[end] - total[begin], best[s - 1][begin]
                found = max(most, here), squares + here * here
                if found < best[s][end]:
                    best[s][end], where[s][end] = found, begin
    sizes, end = [], count
    for s in range(stages, 0, -1):
        sizes.append(end - where[s][end])
        end = where[s][end]
    return sizes[::-1]


def supposed_costs(layers: Sequence[StackLayer]) -> list[float]:
    """Returns what layers may cost where nothing was measured: 1 for each aggregation."""
    return [_LIGHT + _aggregations(layer) for layer in layers]


def _aggregations(layer: StackLayer) -> int:
    if not isinstance(layer.run, torch.nn.Module):
        return 0
    kinds = MessagePassing, HaloConv  # which hides the layer that it runs
    return sum(isinstance(part, kinds) for part in layer.run.modules())


def seconds_of(run: Callable[[], object], times: int = 3) -> float:
    """Returns the least seconds that something took, once it has been warmed up."""
    run()
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begin)
    return min(taken)

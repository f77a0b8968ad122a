"""Which layers make up which stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch_geometric.nn import MessagePassing

from pyg_distcomm.nn.halo_conv import HaloConv
from pyg_distcomm.pipeline.layer_stack import StackLayer

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

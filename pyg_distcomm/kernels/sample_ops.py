"""Defines what `sample_device` draws with: keyed uniform numbers, picks, and rows by index."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_distcomm.kernels.core_ops import _mix, _shift, _signed
from pyg_distcomm.kernels.registry import op

GOLDEN = _signed(0x9E3779B97F4A7C15)
UNIT = 2.0**-53  # the grain of uniform numbers


def streams_of(key: int, tree: Tensor, node: Tensor) -> Tensor:
    """Returns the generator of each node in its tree."""
    return _mix(_mix(_mix(tree + GOLDEN) ^ key) ^ _mix(node + GOLDEN))


def uniform(streams: Tensor, draw: Tensor) -> Tensor:
    """Returns numbers of generators, in [0, 1)."""
    return _shift(_mix(streams + (draw + 1) * GOLDEN), 11).double() * UNIT


@op("streams size", types=None)
def uniform_picks(streams: Tensor, size: Tensor, draws: int, replaced: bool) -> Tensor:
    """Draws places in 0 .. size-1; without replacement by Floyd's method ([Bentley87]).

    Shapes: streams [m], size [m], int64; returns [m, draws], int64.
    """
    steps = torch.arange(draws, device=size.device)
    top = size[:, None] if replaced else size[:, None] - draws + steps + 1
    picks = (uniform(streams[:, None], steps) * top).long()
    if replaced:
        return picks
    for k in range(1, draws):
        again = (picks[:, :k] == picks[:, k : k + 1]).any(1)
        picks[:, k] = torch.where(again, top[:, k] - 1, picks[:, k])
    return picks


@op("index", types=None)
def read_rows(values: Tensor, index: Tensor) -> Tensor:
    """Returns rows by index, on its device; from pinned host memory where they lie there.

    Shapes: values [n, ...], contiguous; index any, int64; returns [*index.shape, ...].
    """
    found = values.index_select(0, index.reshape(-1))
    return found.view(*index.shape, *values.shape[1:])

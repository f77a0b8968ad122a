"""Cuts nodes for a grid of ranks: into the row and column parts that its products exchange.

[Note: what a grid exchanges] With node v on rank (i, j, k), block A_ij needs the rows of
x of process column j that process row i does not own, and the partial sums of process row
i go to the columns that own them. In one product, rows and sums of width f/p:

    rows = sum over u of |process rows other than u's that own a target of u|
    sums = sum over v of |process columns other than v's that own a source of v|

The first depends on the row part of each node alone, the second on its column part alone;
blocks of like size tie the two together. A cut into P parts, numbered as they come, serves
neither: the s parts of a process row lie anywhere. So nodes are cut into r row parts (the
P/c parts of [Mukhopadhyay24]), each of these into s column parts, and column parts of
different rows are matched by the edges between them; or into s parts first. The ranks of a
fiber share out the nodes of their block: how does not matter to what they exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_distcomm.partition.partition import Grid, Partition
from pyg_distcomm.partition.report import fill_empty, plain_edges, report

Cutter = Callable[[Tensor, int, np.ndarray], Partition]
SWEEPS = 3  # in which each part is matched anew with all others


def grid_cut(
    edge_index: Tensor, train: np.ndarray, grid: Grid, cutter: Cutter, deal: Any
) -> Partition:
    """Cuts into row and column parts; see [Note: what a grid exchanges].

    Of three cuts, rows first, columns first, and P/p parts as they come, the one whose
    busiest rank sends and receives least on the grid, then the one that sends least in all.

    Args:
        edge_index: `[2, num_edges]`.
        train: 1 for each train node `[num_nodes]`.
        grid: (r, s, p).
        cutter: cuts a graph into a number of parts, given its train nodes.
        deal: spreads nodes over bins by weight, in place, as `cutters_jit.deal`.
    """
    r, s, p = grid
    ends = plain_edges(edge_index).cpu().numpy()
    plain = cutter(edge_index, r * s, train).owner.numpy().astype(np.int64)
    tried = [plain]
    if min(r, s) > 1:
        row, col = _nested(ends, train, (r, s), cutter)
        tried.append(row * s + col)
        col, row = _nested(ends, train, (s, r), cutter)
        tried.append(row * s + col)

    def cost(block: np.ndarray) -> tuple[int, int]:
        here = Partition.from_owner(block, r * s)
        figures = report(edge_index, here, None, (r, s, 1))
        return figures.busiest, sum(figures.block_halo or figures.halo_rows)

    block = tried[0] if len(tried) == 1 else min(tried, key=cost)
    degree = np.bincount(ends[1], minlength=train.size)
    fiber = np.zeros(train.size, np.int64)
    if p > 1:
        for each in range(r * s):
            gid = np.flatnonzero(block == each)
            falling = gid[np.argsort(-degree[gid], kind="stable")]
            deal(falling, degree, np.zeros(p, np.int64), fiber)
    return Partition.from_owner(fill_empty(block * p + fiber, r * s * p), r * s * p)


def _nested(
    ends: np.ndarray, train: np.ndarray, sides: tuple[int, int], cutter: Cutter
) -> tuple[np.ndarray, np.ndarray]:
    """Cuts into parts, and each of these again; returns both parts of each node."""
    many, few = sides
    first = cutter(torch.from_numpy(ends), many, train).owner.numpy().astype(np.int64)
    inner = np.zeros(train.size, np.int64)
    lid = np.zeros(train.size, np.int64)
    both = first[ends[0]] == first[ends[1]]
    for part in range(many):
        gid = np.flatnonzero(first == part)
        lid[gid] = np.arange(gid.size)
        here = both & (first[ends[1]] == part)
        edges = torch.from_numpy(lid[ends[:, here]])
        inner[gid] = cutter(edges, few, train[gid]).owner.numpy()
    return first, _matched(ends[:, ~both], first, inner, sides)


def _matched(
    ends: np.ndarray, first: np.ndarray, inner: np.ndarray, sides: tuple[int, int]
) -> np.ndarray:
    """Renumbers the inner parts of each part, so that many edges join equal numbers."""
    many, few = sides
    cell = first * few + inner
    key = cell[ends[0]] * (many * few) + cell[ends[1]]
    shared = np.bincount(key, minlength=(many * few) ** 2).reshape((many, few) * 2)
    shared = shared + shared.transpose(2, 3, 0, 1)
    number = np.tile(np.arange(few), (many, 1))
    for sweep in range(SWEEPS):
        for part in range(many):
            # edges of each inner part with each number, in the parts numbered so far
            others = [k for k in range(part if sweep == 0 else many) if k != part]
            gain = np.zeros((few, few), np.int64)
            for k in others:
                gain[:, number[k]] += shared[part, :, k]
            number[part] = _greedy(gain)
    found: np.ndarray = number[first, inner]
    return found


def _greedy(gain: np.ndarray) -> np.ndarray:
    """Assigns rows to columns, one each, the largest gains first."""
    few = len(gain)
    found = np.full(few, -1, np.int64)
    free = np.ones(few, bool)
    for place in np.argsort(-gain, axis=None, kind="stable"):
        row, col = divmod(int(place), few)
        if found[row] < 0 and free[col]:
            found[row], free[col] = col, False
    return found

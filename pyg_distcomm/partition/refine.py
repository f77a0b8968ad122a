"""Lowers what the slowest rank sends and receives: by moving nodes, and by cutting for a grid.

[Note: what refinement lowers] One product on (P, 1, 1) exchanges, per feature, the rows

    sent(i)     = sum over own v of |parts other than i that own a target of v|
    received(i) = |nodes of other parts that are sources of own edges|

and takes as long as its slowest rank: max over i of max(sent(i), received(i)), because
links carry both ways at once. Backward swaps the two, so both maxima count in every
epoch. [Acer16] and [Deveci15] lower maxima like these beside the total volume, which
[Mukhopadhyay24] found to decide the time of full-graph training.

Single nodes move, greedily, to lower the sum over parts of (sent / B)^k +
(received / B)^k for k = 1, 2, 4 .. 32: the total first, then more and more the maximum.
The largest of all counts never rises, nor do the largest number of rows sent, the largest
of rows received and the total above what they were at first, nor loads above their limits;
so the result is never worse.

On a grid (r, s, p) what travels splits in two (the next note): row parts are refined as r
parts of the graph, column parts as s parts of the transposed one, and what is best there of
both, either, and moves for (P, 1, 1) is taken.

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

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from pyg_distcomm.partition.partition import (
    Grid,
    Partition,
    capacities,
    check_edge_index,
    check_grid,
    fill_empty,
    node_weights,
    part_loads,
    plain_edges,
    report,
    train_vector,
)

DOUBLINGS = range(6)  # the exponents are 2^0 .. 2^5
SWEEPS = 4  # over all nodes, with each exponent
BALANCE = 1.05
MATCHES = 3  # sweeps in which each part is matched anew with all others

Cutter = Callable[[Tensor, int, np.ndarray], Partition]


def refine_partition(
    edge_index: Tensor,
    partition: Partition,
    *,
    train_mask: Tensor | None = None,
    balance: float = BALANCE,
    grid: Grid | None = None,
) -> Partition:
    """Returns a partition whose busiest rank sends and receives less, or the same.

    edge_index [2, num_edges]; edges may be directed, repeated, or self-loops.
    train_mask [num_nodes], bool; its nodes stay as spread as they are, or better
    balance    most nodes a part may own, over the mean; twice as loose for in-edges and
               train nodes. Where a load is larger before, it may stay as large.
    grid       (r, s, p): row and column parts are refined, and the result is taken only
               if the busiest rank sends and receives no more there

    `before` of the result holds the figures of `partition`. The same for the same
    arguments. Time: linear in the edges, times the parts that a node has neighbours in;
    memory: about 24 bytes an edge. See [Note: what refinement lowers].
    """
    check_edge_index(edge_index, partition.num_nodes)
    before = report(edge_index, partition.refined_from(None), train_mask, grid)
    weight = node_weights(edge_index, train_vector(train_mask, partition.num_nodes))
    owner = partition.owner.numpy().astype(np.int64)
    sides = check_grid(grid, partition.num_parts)
    tried = [partition]
    if partition.num_parts > 1 and before.volume > 0:
        tried += [
            Partition.from_owner(each, partition.num_parts)
            for each in _candidates(edge_index, owner, sides, weight, balance)
        ]
    costs = [report(edge_index, each, train_mask, grid).busiest for each in tried]
    # of equals the last: moves for (P, 1, 1), which may have lowered the total
    found = min(zip(costs, range(0, -len(tried), -1), tried, strict=True))[2]
    return found.refined_from(before)


def _candidates(
    edge_index: Tensor,
    owner: np.ndarray,
    grid: Grid,
    weight: np.ndarray,
    balance: float,
) -> list[np.ndarray]:
    """Returns owners with fewer rows to exchange, whose loads are within their limits."""
    r, s, p = grid
    parts = r * s * p
    found: list[np.ndarray] = []
    if s * p > 1:
        row, col = owner // (s * p), owner // p % s
        rows = _moved(edge_index, row.copy(), r, weight, balance) if r > 1 else row
        turned = edge_index.flip(0)
        cols = _moved(turned, col.copy(), s, weight, balance) if s > 1 else col
        carried = part_loads(owner, weight, parts)
        limit = np.maximum(capacities(weight, parts, balance), carried.max(0))
        for i, j in ((rows, cols), (rows, col), (row, cols)):
            each = (i * s + j) * p + owner % p
            if (part_loads(each, weight, parts) <= limit).all():
                found.append(each)
    return [*found, _moved(edge_index, owner.copy(), parts, weight, balance)]


def _moved(
    edge_index: Tensor,
    owner: np.ndarray,
    num_parts: int,
    weight: np.ndarray,
    balance: float,
) -> np.ndarray:
    # Numba takes a second to import
    loops: Any = importlib.import_module("pyg_distcomm.partition.refine_jit")
    csr: Any = importlib.import_module("pyg_distcomm.partition.cutters_jit")
    src, dst = plain_edges(edge_index).cpu().numpy()
    rows = csr.distinct_sources(src, dst, owner.size, False)
    held = loops.hold(*rows, owner, num_parts)
    load = loops.rows(owner, num_parts, held)
    carried = part_loads(owner, weight, num_parts)
    capacity = np.maximum(capacities(weight, num_parts, balance), carried.max(0))
    # nodes with few neighbours first: they move where many of them make way for a hub
    degree = np.diff(rows[0]) + np.bincount(rows[1], minlength=owner.size)
    order = np.argsort(degree, kind="stable")
    most = int(load[:num_parts].sum())
    first = np.array([load[:num_parts].max(), load[num_parts:].max()])
    state = (*rows, owner, held, load, weight, capacity, carried, first, most)
    for doublings in tqdm(DOUBLINGS, "refining", disable=None, leave=False):
        for _ in range(SWEEPS):
            if not loops.sweep(order, *state, doublings):
                break
    return owner


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
    for sweep in range(MATCHES):
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

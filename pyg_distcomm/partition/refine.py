"""Lowers the rows that the slowest rank exchanges: by moving nodes, and by cutting for a grid.

[Note: what refinement lowers] One product on (P, 1, 1) exchanges, per feature, the rows

    sent(i)     = sum over own v of |parts other than i that own a target of v|
    received(i) = |nodes of other parts that are sources of own edges|

and takes as long as its slowest rank: max over i of max(sent(i), received(i)), because
links carry both directions at once. The backward pass swaps the two, so both maxima count in
every epoch. [Acer16] and [Deveci15] lower such maxima beside the total volume; according to
[Mukhopadhyay24] they decide the time of full-graph training.

Single nodes move, greedily, to lower the sum over parts of (sent / B)^k +
(received / B)^k for k = 1, 2, 4 .. 32: the total first, then more and more the maximum.
The largest count never rises. The most rows sent, the most rows received and the total never
exceed their first values, nor loads their limits; so the result is never worse.

On a grid (r, s, p) rows and partial sums travel (next note). Row parts are refined as r parts
of the graph, and column parts as s parts of the reversed graph; of both refined, either one,
and moves for (P, 1, 1), the best on the grid is taken.

[Note: what a grid exchanges] With node v on rank (i, j, k), block A_ij needs the rows of
x of process column j that process row i does not own, and the partial sums of process row
i go to the columns that own them. In one product, rows and sums of width f/p:

    rows = sum over u of |process rows other than u's that own a target of u|
    sums = sum over v of |process columns other than v's that own a source of v|

The first depends on the row parts of nodes only, the second on their column parts only, and
both must give blocks of similar size. A cut into P parts in arbitrary order lowers neither,
since the s parts of a process row need not be close. So nodes are cut into r row parts (the
P/c parts of [Mukhopadhyay24]), and each of these into s column parts; column parts of
different rows are then matched by the edges between them. Or they are cut into s parts first.
The ranks of a fiber divide the nodes of their block in any way: it does not change what they
exchange.
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
    train_mask [num_nodes], bool; train nodes stay as balanced as they are, or better
    balance    the most nodes that a part may own, over the mean; twice as loose for in-edges
               and train nodes. A load that is larger before may stay as large.
    grid       (r, s, p): row and column parts are refined, and the result is taken only
               if the busiest rank sends and receives no more there

    `before` of the result holds the figures of `partition`. Deterministic. Time: linear in
    the edges, times the parts that a node has neighbours in;
    memory: about 24 bytes per edge. See [Note: what refinement lowers].
    """
    check_edge_index(edge_index, partition.num_nodes)
    before = report(edge_index, partition.refined_from(None), train_mask, grid)
    weight = node_weights(edge_index, train_vector(train_mask, partition.num_nodes))
    owner = partition.owner.numpy().astype(np.int64)
    sides = check_grid(grid, partition.num_parts)
    candidates = [partition]
    if partition.num_parts > 1 and before.volume > 0:
        candidates += [
            Partition.from_owner(each, partition.num_parts)
            for each in _candidates(edge_index, owner, sides, weight, balance)
        ]
    costs = [report(edge_index, each, train_mask, grid).busiest for each in candidates]
    # of equals the last: moves for (P, 1, 1), which may have lowered the total
    found = min(zip(costs, range(0, -len(candidates), -1), candidates, strict=True))[2]
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
        rows = (
            _refine_moves(edge_index, row.copy(), r, weight, balance) if r > 1 else row
        )
        reversed_edges = edge_index.flip(0)
        cols = (
            _refine_moves(reversed_edges, col.copy(), s, weight, balance)
            if s > 1
            else col
        )
        part_load = part_loads(owner, weight, parts)
        limit = np.maximum(capacities(weight, parts, balance), part_load.max(0))
        for i, j in ((rows, cols), (rows, col), (row, cols)):
            each = (i * s + j) * p + owner % p
            if (part_loads(each, weight, parts) <= limit).all():
                found.append(each)
    return [*found, _refine_moves(edge_index, owner.copy(), parts, weight, balance)]


def _refine_moves(
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
    readers = loops.list_readers(*rows, owner, num_parts)
    load = loops.rows(owner, num_parts, readers)
    part_load = part_loads(owner, weight, num_parts)
    capacity = np.maximum(capacities(weight, num_parts, balance), part_load.max(0))
    # nodes with few neighbours first: many of them together can free a hub
    degree = np.diff(rows[0]) + np.bincount(rows[1], minlength=owner.size)
    order = np.argsort(degree, kind="stable")
    max_volume = int(load[:num_parts].sum())
    start_limit = np.array([load[:num_parts].max(), load[num_parts:].max()])
    state = (
        *rows,
        owner,
        readers,
        load,
        weight,
        capacity,
        part_load,
        start_limit,
        max_volume,
    )
    for doublings in tqdm(DOUBLINGS, "refining", disable=None, leave=False):
        for _ in range(SWEEPS):
            if not loops.sweep(order, *state, doublings):
                break
    return owner


def grid_cut(
    edge_index: Tensor, train: np.ndarray, grid: Grid, cutter: Cutter, deal: Any
) -> Partition:
    """Cuts into row and column parts; see [Note: what a grid exchanges].

    Tries three cuts: rows first, columns first, and P/p parts at once. Takes the one whose
    busiest rank exchanges least on the grid; of equal ones, the one that sends least in all.

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
    candidates = [plain]
    if min(r, s) > 1:
        row, col = _cut_twice(ends, train, (r, s), cutter)
        candidates.append(row * s + col)
        col, row = _cut_twice(ends, train, (s, r), cutter)
        candidates.append(row * s + col)

    def cost(block: np.ndarray) -> tuple[int, int]:
        partition = Partition.from_owner(block, r * s)
        figures = report(edge_index, partition, None, (r, s, 1))
        return figures.busiest, sum(figures.block_halo or figures.halo_rows)

    block = candidates[0] if len(candidates) == 1 else min(candidates, key=cost)
    degree = np.bincount(ends[1], minlength=train.size)
    fiber = np.zeros(train.size, np.int64)
    if p > 1:
        for each in range(r * s):
            gid = np.flatnonzero(block == each)
            falling = gid[np.argsort(-degree[gid], kind="stable")]
            deal(falling, degree, np.zeros(p, np.int64), fiber)
    return Partition.from_owner(fill_empty(block * p + fiber, r * s * p), r * s * p)


def _cut_twice(
    ends: np.ndarray, train: np.ndarray, sides: tuple[int, int], cutter: Cutter
) -> tuple[np.ndarray, np.ndarray]:
    """Cuts into outer parts, and each into inner parts; returns both parts of each node."""
    num_outer, num_inner = sides
    outer = (
        cutter(torch.from_numpy(ends), num_outer, train).owner.numpy().astype(np.int64)
    )
    inner = np.zeros(train.size, np.int64)
    lid = np.zeros(train.size, np.int64)
    same_outer = outer[ends[0]] == outer[ends[1]]
    for part in range(num_outer):
        gid = np.flatnonzero(outer == part)
        lid[gid] = np.arange(gid.size)
        inside = same_outer & (outer[ends[1]] == part)
        edges = torch.from_numpy(lid[ends[:, inside]])
        inner[gid] = cutter(edges, num_inner, train[gid]).owner.numpy()
    return outer, _match_inner_parts(ends[:, ~same_outer], outer, inner, sides)


def _match_inner_parts(
    ends: np.ndarray, outer: np.ndarray, inner: np.ndarray, sides: tuple[int, int]
) -> np.ndarray:
    """Renumbers the inner parts of each outer part, so that many edges join equal numbers."""
    num_outer, num_inner = sides
    inner_id = outer * num_inner + inner
    key = inner_id[ends[0]] * (num_outer * num_inner) + inner_id[ends[1]]
    num_joining = np.bincount(key, minlength=(num_outer * num_inner) ** 2).reshape(
        (num_outer, num_inner) * 2
    )
    num_joining = num_joining + num_joining.transpose(2, 3, 0, 1)
    number = np.tile(np.arange(num_inner), (num_outer, 1))
    for sweep_number in range(MATCHES):
        for part in range(num_outer):
            # edges of each inner part with each number, in the parts numbered so far
            others = [
                k for k in range(part if sweep_number == 0 else num_outer) if k != part
            ]
            gains = np.zeros((num_inner, num_inner), np.int64)
            for k in others:
                gains[:, number[k]] += num_joining[part, :, k]
            number[part] = _assign_greedily(gains)
    found: np.ndarray = number[outer, inner]
    return found


def _assign_greedily(gains: np.ndarray) -> np.ndarray:
    """Assigns rows to columns, one each, the largest gains first."""
    num_inner = len(gains)
    found = np.full(num_inner, -1, np.int64)
    free = np.ones(num_inner, bool)
    for place in np.argsort(-gains, axis=None, kind="stable"):
        row, col = divmod(int(place), num_inner)
        if found[row] < 0 and free[col]:
            found[row], free[col] = col, False
    return found

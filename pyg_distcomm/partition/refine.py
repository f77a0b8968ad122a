"""Moves nodes between parts until the slowest rank has less to send and receive.

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

On a grid (r, s, p) what travels splits in two ([Note: what a grid exchanges] in
`grid_cut.py`): row parts are refined as r parts of the graph, column parts as s parts of
the transposed one, and what is best there of both, either, and moves for (P, 1, 1) is taken.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from torch import Tensor
from tqdm import tqdm

from pyg_distcomm.partition.partition import Grid, Partition, check_grid
from pyg_distcomm.partition.report import (
    capacities,
    check_edge_index,
    node_weights,
    part_loads,
    plain_edges,
    report,
    train_vector,
)

DOUBLINGS = range(6)  # the exponents are 2^0 .. 2^5
SWEEPS = 4  # over all nodes, with each exponent
BALANCE = 1.05


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

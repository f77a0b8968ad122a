"""A random double permutation: blocks of a grid with like numbers of nonzeros."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from torch import Tensor

from pyg_distcomm.partition.edges import plain_edges
from pyg_distcomm.partition.partition import Grid, Partition, check_grid


def permutation(
    edge_index: Tensor,
    num_nodes: int,
    num_parts: int,
    *,
    seed: int = 0,
    grid: Grid | None = None,
) -> Partition:
    """Spreads rows of the matrix over process rows, and columns over process columns.

    In random order within equal degrees, nodes are dealt out to the r process rows by
    falling in-degree, and those of each process row to its s columns by falling
    out-degree, each to the one that has least so far and room for one more. So each
    process row has like nonzeros in its rows, each process column in its columns, and a
    block A_ij about m / (r s); the ranks of one block share out its nodes evenly. Sizes
    differ by one for each of the three steps at most. Without a grid, parts are process
    rows.

    Permuting rows and columns at random, and each in its own way, is the double
    permutation of [Ranjan25]; dealing by degree is ours, and keeps hubs apart too.
    """
    loops: Any = importlib.import_module("pyg_distcomm.partition.ldg_jit")
    r, s, p = check_grid(grid, num_parts)
    degree = [
        np.bincount(ends, minlength=num_nodes)
        for ends in plain_edges(edge_index).cpu().numpy()
    ]
    out, into = degree if degree[0].size else (np.zeros(0, np.int64),) * 2
    mixed = np.random.default_rng(seed).permutation(num_nodes)
    row, col, fiber = np.zeros((3, num_nodes), np.int64)
    loops.deal(_falling(mixed, into), into, np.zeros(r, np.int64), row)
    cols = np.zeros(s, np.int64)
    for i in range(r):
        mine = mixed[row[mixed] == i]
        loops.deal(_falling(mine, out), out, cols, col)
        for j in range(s):
            block = mine[col[mine] == j]
            loops.deal(_falling(block, into), into, np.zeros(p, np.int64), fiber)
    return Partition.from_owner((row * s + col) * p + fiber, num_parts)


def _falling(gid: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return gid[np.argsort(-weight[gid], kind="stable")]

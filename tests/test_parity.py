"""Everything a training step computes equals single-process PyG, on any grid."""

from __future__ import annotations

import itertools

import pytest
import tiers
import worlds
from parity import compare
from problems import CUTTERS, GRAPHS, grids, some_grids

KINDS = ("plain", "sum", "improved", "raw", "narrow")


def _covering():
    """Every pair of (graph, cutter), with ranks, grids and kinds going round."""
    sizes = itertools.cycle((1, 2, 3, 4, 6, 4))  # no multiple of the kinds
    kinds = itertools.cycle(KINDS)
    turn = {size: itertools.cycle(grids(size)) for size in (1, 2, 3, 4, 6)}
    for graph, cutter in itertools.product(GRAPHS, CUTTERS):
        size = next(sizes)
        yield graph, cutter, size, next(turn[size]), next(kinds)


COVERING = list(_covering())


@tiers.parametrize(
    ("graph", "cutter", "size", "grid", "kind"),
    COVERING,
    [case for case in COVERING if case[2] <= 4][::3],
)
def test_step_equals_pyg(graph, cutter, size, grid, kind):
    worlds.run(compare, size, graph, cutter, grid, kind)


@tiers.parametrize("size", [1, 2, 3, 4, 6, 8], [1, 2, 3, 4])
def test_every_grid(size):
    for k, grid in enumerate(some_grids(size)):
        worlds.run(compare, size, "directed", "random", grid, KINDS[k % len(KINDS)])


@pytest.mark.parametrize("grid", [tiers.rarely((3, 2, 1)), (2, 2, 2)])
def test_more_than_four_ranks(grid):
    """The default tier's one step on six ranks, and one on eight."""
    size = grid[0] * grid[1] * grid[2]
    worlds.run(compare, size, "directed", "random", grid, "plain")


@tiers.parametrize("optimizer", ["sgd", "adam"], ["adam"])
@tiers.parametrize("size", [1, 3, 4], [3])
def test_ten_steps(size, optimizer):
    grid = {1: (1, 1, 1), 3: (3, 1, 1), 4: (2, 2, 1)}[size]
    worlds.run(compare, size, "undirected", "metis", grid, "plain", 10, optimizer)


@tiers.cover(
    ("halo", "grid"),
    ["rows", "sums", "cover", "blocks"],
    [(4, 1, 1), (2, 2, 1), (2, 1, 2)],
)
def test_whatever_travels(grid, halo):
    worlds.run(compare, 4, "directed", "random", grid, "plain", 0, "sgd", halo)


@pytest.mark.exhaustive
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8])
def test_exhaustive(graph, size):
    worlds.only(size)
    for cutter, grid, kind in itertools.product(CUTTERS, grids(size), KINDS):
        worlds.run(compare, size, graph, cutter, grid, kind)

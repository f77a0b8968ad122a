"""Everything a training step computes equals single-process PyG, on any grid."""

from __future__ import annotations

import itertools
import math

import pytest
import second_device
import tiers
import worlds
from parity import compare
from problems import CUTTERS, GRAPHS, grids

pytestmark = pytest.mark.usefixtures("place")

KINDS = ("plain", "sum", "improved", "raw", "narrow")


def _covering():
    """Every pair of (graph, cutter), with ranks, grids and kinds going round."""
    sizes = itertools.cycle((1, 2, 3, 4, 6, 4))  # no multiple of the kinds
    kinds = itertools.cycle(KINDS)
    turn = {size: itertools.cycle(grids(size)) for size in (1, 2, 3, 4, 6)}
    for graph, cutter in itertools.product(GRAPHS, CUTTERS):
        size = next(sizes)
        yield graph, cutter, size, next(turn[size]), next(kinds)


COVERING = [case for case in _covering() if case[2] <= 4][::4]


@pytest.mark.parametrize(("graph", "cutter", "size", "grid", "kind"), COVERING)
def test_step_equals_pyg(graph, cutter, size, grid, kind, place):
    worlds.run(compare, size, graph, cutter, grid, kind, 0, "sgd", "auto", place)


def test_every_grid():
    for k, grid in enumerate(grids(4)):
        worlds.run(compare, 4, "directed", "random", grid, KINDS[k % len(KINDS)])


@pytest.mark.parametrize("grid", [tiers.rarely((3, 2, 1)), (2, 2, 2)])
def test_more_than_four_ranks(grid):
    """The default tier's one step on six ranks, and one on eight."""
    size = grid[0] * grid[1] * grid[2]
    worlds.run(compare, size, "directed", "random", grid, "plain")


@tiers.parametrize("optimizer", ["sgd", "adam"], ["adam"])
@tiers.parametrize("size", [1, 3, 4], [3])
def test_ten_steps(size, optimizer, place):
    grid = {1: (1, 1, 1), 3: (3, 1, 1), 4: (2, 2, 1)}[size]
    how = "plain", 10, optimizer, "auto", place
    worlds.run(compare, size, "undirected", "metis", grid, *how)


@pytest.mark.skipif(not second_device.can_build(), reason="no C++ compiler")
@tiers.parametrize("grid", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 1, 2)], [])
def test_a_step_on_a_second_device(grid):
    """Nothing comes back to the host."""
    size = math.prod(grid)
    for graph, kind in (("directed", "plain"), ("star", "sum"), ("isolated", "raw")):
        how = "random", grid, kind, 1, "adam", "auto", "spare"
        worlds.anew(compare, size, graph, *how)


@tiers.cover(
    ("halo", "grid"),
    ["rows", "sums", "cover", "blocks"],
    [(4, 1, 1), (2, 2, 1), (2, 1, 2)],
)
def test_whatever_travels(grid, halo, place):
    how = "plain", 0, "sgd", halo, place
    worlds.run(compare, 4, "directed", "random", grid, *how)


@pytest.mark.exhaustive
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8])
def test_exhaustive(graph, size):
    worlds.only(size)
    for cutter, grid, kind in itertools.product(CUTTERS, grids(size), KINDS):
        worlds.run(compare, size, graph, cutter, grid, kind)

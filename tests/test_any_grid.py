"""Layers run by HaloConv on every grid: PyG's numbers, and sums where they are fewer words."""

import itertools
import math
from unittest import mock

import alike
import pytest
import tiers
import torch
import torch_geometric.nn as pyg
import worlds
from layers import EXACT, make
from problems import CUTTERS, GRAPHS, grids, owners
from test_layers import exact

import pyg_distcomm as pdc
from pyg_distcomm.graph.topology import Topology
from pyg_distcomm.nn import HaloConv

pytestmark = pytest.mark.usefixtures("place")


def beyond(size):
    """Grids with more axes than rows."""
    return [grid for grid in grids(size) if grid[1:] != (1, 1)]


def _every_layer():
    graphs = itertools.cycle(("directed", "loops_and_copies", "undirected", "isolated"))
    cutters = itertools.cycle(CUTTERS)
    sides = itertools.cycle([*beyond(2), *beyond(3), *beyond(4)])
    for name in EXACT:
        for _ in range(3):
            yield name, next(graphs), next(cutters), next(sides)


@tiers.parametrize(
    ("name", "graph", "cutter", "grid"), list(_every_layer()), slice(18, None, 152)
)
def test_outputs_and_gradients_are_pygs(name, graph, cutter, grid):
    worlds.run(exact, math.prod(grid), name, graph, cutter, grid)


@pytest.mark.parametrize("grid", [(1, 2, 1), (2, 1, 1)])
@worlds.on()
def test_sums_are_products_where_these_are_fewer_words(grid):
    """A GIN layer on a grid where its sums are fewer words, and its exact price."""
    mesh = worlds.mesh(grid=grid)
    share = pdc.partition(GRAPHS["directed"](), mesh, "random")
    topology = share.edge_index.topology
    conv = HaloConv(pyg.GINConv(torch.nn.Identity()))
    conv(share.x, share.edge_index)
    assert topology.adds_on_grid == (grid[1] > 1)
    rows, added = topology.row_words, topology.product_words
    mesh.ledger.reset()
    conv(share.x, share.edge_index)
    price = topology.sum_plan().matrix.price(7)
    assert mesh.ledger.words() == price.words
    words = pdc.comm.collectives.all_reduce(torch.tensor([price.words]), mesh.world)
    assert int(words) == 7 * added < 7 * rows


# of weights that do not learn, which the grid may sum
ADDING = """GINConv by row,GraphConv,GraphConv back,GraphConv mean,SimpleConv,GatedGraphConv,
APPNP,APPNP cached,APPNP back,SGConv,SGConv cached,SSGConv,TAGConv,TAGConv raw,LGConv,
MixHopConv""".replace("\n", "").split(",")


def counting(name, summed):
    """Notes that a layer's rows were summed by the grid."""
    operator = Topology.operator

    def run(*args, **kwargs):
        summed.add(name)
        return operator(*args, **kwargs)

    return mock.patch.object(Topology, "operator", run)


@tiers.parametrize(
    ("grid", "graph", "cutter", "all_of_them"),
    [
        ((1, 2, 1), "directed", "random", True),
        ((2, 2, 1), "loops_and_copies", "random", True),
        ((1, 2, 2), "directed", "empty_rank", True),
        ((1, 2, 1), "star", "empty_rank", False),
        ((1, 1, 3), "loops_and_copies", "random", False),
        ((2, 1, 2), "isolated", "lopsided", False),
        ((3, 2, 1), "directed", "random", True),
        ((2, 2, 2), "loops_and_copies", "empty_rank", False),
    ],
    slice(0, 1),
)
@worlds.on()
def test_sums_on_the_grid_are_pygs(grid, graph, cutter, all_of_them):
    """As planned from the second time on, and which of them the grid summed."""
    mesh, data, summed = worlds.mesh(grid=grid), GRAPHS[graph](), set()
    share = pdc.partition(data, mesh, owners(cutter, data, mesh.size))
    for name in ADDING:
        build, names = EXACT[name]
        found = []
        for source, form in ((data, lambda layer: layer), (share, pdc.convert)):
            conv, found = form(make(build)), [*found, []]
            for times in (1.0, 1.0) if "cached" in name else (1.0, 1.0, 0.5):
                given = [source.edge_index, source.edge_weight * times][
                    : len(names) - 1
                ]
                with counting(name, summed):
                    found[-1] += alike.learnt(conv, source.x, *given)
        alike.same(found[1], found[0], name)
    # against the edges, rows may be as few words
    ahead = {name for name in ADDING if "back" not in name}
    assert ahead <= summed or not all_of_them

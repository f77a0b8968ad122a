"""Layers run by HaloConv on every grid: PyG's numbers, the planned bytes, and what is told."""

import itertools
import math
from unittest import mock

import alike
import pytest
import tiers
import torch
import torch_geometric.nn as pyg
import worlds
from layers import EXACT
from problems import CUTTERS, GRAPHS, grids, owners, some_grids
from test_layers import exact
from test_plan import late_epoch
from torch_geometric.nn import Sequential

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
    ("name", "graph", "cutter", "grid"), list(_every_layer()), slice(20, None, 150)
)
def test_outputs_and_gradients_are_pygs(name, graph, cutter, grid):
    worlds.run(exact, math.prod(grid), name, graph, cutter, grid)


# Bytes ------------------------------------------------------------------------------


def mixed():
    inner = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU())
    return pyg.GATConv(7, 3, heads=2), pyg.GINConv(inner), pyg.GCNConv(5, 4)


def sums():
    inner = torch.nn.Linear(7, 6)
    mean = pyg.GraphConv(6, 5, aggr="mean")
    return pyg.GINConv(inner), mean, pyg.APPNP(2, 0.1), pyg.TAGConv(5, 4, K=2)


def attending():
    edge = pyg.EdgeConv(torch.nn.Linear(10, 4))
    return pyg.GATv2Conv(7, 6), pyg.TransformerConv(6, 5), edge


MODELS = {"mixed": mixed, "sums": sums, "attending": attending}


def model_of(name):
    calls = [(layer, "x, edge_index -> x") for layer in MODELS[name]()]
    return Sequential("x, edge_index", calls)


def counted(model, grid, graph, owner, halos):
    mesh = worlds.mesh(grid=grid)
    share = pdc.partition(GRAPHS[graph](), mesh, owner)
    found = []
    for halo in halos:
        torch.manual_seed(0)
        net = pdc.replicate(pdc.convert(model_of(model).double()), mesh)
        edges = share.edge_index.with_halo(halo)
        adds = edges.topology.adds_on_grid
        found.append((late_epoch(net, share.x, edges, share.y), adds))
    return found


def planned(model, grid, graph, cutter, halos=("auto",)):
    """Asserts the ledger to be the plan; returns whether sums were the grid's."""
    data = GRAPHS[graph]()
    size = math.prod(grid)
    owner = owners(cutter, data, size)
    how = {"partition": owner, "dtype": torch.float64}
    ran = worlds.run(counted, size, model, grid, graph, owner, halos)
    for k, halo in enumerate(halos):
        plans = pdc.plan(data, ranks=size, model=model_of(model), halo=halo, **how)
        assert not plans.refused
        assert {one.grid for one in plans} == set(grids(size))
        one = plans.of(grid)
        messages = []
        for rank, each in enumerate(ran):
            got, _ = each[k]
            kinds = sum(got[name] for name in ("exchange", "parameters", "rest"))
            assert kinds == one.bytes_by_rank[rank], (model, grid, halo, rank)
            messages.append(got["messages"])
        assert max(messages) == one.messages
    return [adds for _, adds in ran[0]]


def test_bytes_are_the_planners():
    planned("mixed", (2, 2, 1), "directed", "random")


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("size", [2, 3, 4, 6])
def test_bytes_are_the_planners_on_all_grids(model, size):
    chosen = []
    for grid in some_grids(size):
        for graph, cutter in (("directed", "random"), ("star", "empty_rank")):
            halos = ("auto", "rows", "sums", "cover", "blocks")
            chosen += planned(model, grid, graph, cutter, halos)
    assert True in chosen
    assert False in chosen


@pytest.mark.parametrize("grid", [(2, 2, 1), (3, 1, 1)])
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


ADDING = {
    "GIN": lambda: pyg.GINConv(torch.nn.Linear(7, 5), train_eps=True),
    "GraphConv": lambda: pyg.GraphConv(7, 5),
    "GraphConv mean": lambda: pyg.GraphConv(7, 5, aggr="mean"),
    "GraphConv back": lambda: pyg.GraphConv(7, 5, flow="target_to_source"),
    "SimpleConv mean": lambda: pyg.SimpleConv("mean", combine_root="cat"),
    "GatedGraphConv": lambda: pyg.GatedGraphConv(9, 2),
    "APPNP": lambda: pyg.APPNP(3, 0.1),
    "APPNP cached": lambda: pyg.APPNP(3, 0.1, cached=True),
    "APPNP back": lambda: pyg.APPNP(2, 0.1, flow="target_to_source"),
    "APPNP mean": lambda: pyg.APPNP(2, 0.1, aggr="mean"),
    "SGConv": lambda: pyg.SGConv(7, 5, K=2, add_self_loops=False),
    "SSGConv": lambda: pyg.SSGConv(7, 5, 0.2, K=2),
    "TAGConv": lambda: pyg.TAGConv(7, 5, K=2),
    "TAGConv raw": lambda: pyg.TAGConv(7, 5, K=2, normalize=False),
    "LGConv": lambda: pyg.LGConv(),
    "MixHopConv": lambda: pyg.MixHopConv(7, 5, powers=[0, 1, 2]),
}


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
    """Layers whose weights do not learn, and which of them the grid summed."""
    mesh = worlds.mesh(grid=grid)
    data = GRAPHS[graph]()
    share = pdc.partition(data, mesh, owners(cutter, data, mesh.size))
    summed = set()
    for name, build in ADDING.items():
        for weighted in (False, True):
            if weighted and name == "GIN":
                continue
            found = []
            for source in (data, share):
                torch.manual_seed(3)
                conv = build().double()
                if source is share:
                    conv = pdc.convert(conv)
                x = source.x.clone().requires_grad_()
                edges = source.edge_index
                for turn in range(3):  # the second time as planned, then of new weights
                    weight = source.edge_weight
                    weight = weight * 0.5 if turn == 2 else weight
                    given = (x, edges, weight) if weighted else (x, edges)
                    if "cached" in name and turn == 2:
                        break
                    with counting(name, summed):
                        out = conv(*given)
                    out.square().sum().backward()
                grads = [p.grad for p in conv.parameters()]
                found.append([out, x.grad, *grads])
            alike.same(found[1], found[0], name)
    # against the edges, rows may be as few words
    ahead = {name for name in ADDING if "back" not in name}
    assert ahead <= summed or not all_of_them

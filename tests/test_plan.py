"""The planner: bytes of an epoch as the ledger counts them, before anything is sent."""

import importlib
import itertools
import math
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import tiers
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
import worlds
from layers import chained
from links import Net
from problems import GRAPHS, grids, owners, some_grids
from torch_geometric.data import Data

import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.mesh import latest_mesh
from pyg_distcomm.graph.topology import ORDERS, MultiplyOrder
from pyg_distcomm.halo.codecs import Cast, Chain, ColumnMask, Quantise, RowSample
from pyg_distcomm.halo.policy import LinkPolicy
from pyg_distcomm.nn import DistGCNConv, DistSAGEConv
from pyg_distcomm.ops.grid_plan import HALOS
from pyg_distcomm.partition.cutters import cut
from pyg_distcomm.plan.planner import PowerLaw
from pyg_distcomm.plan.training import training_of

auto = importlib.import_module("pyg_distcomm.plan.init")

WIDTHS = (7, 5, 9, 4)
LAYERS = {"gcn": DistGCNConv, "sage": DistSAGEConv}
SWITCHES = list(itertools.product(ORDERS, (True, False), HALOS))


def late_epoch(model, x, edges, y):
    """Trains three epochs, and returns the ledger of the last, by what travelled."""
    ledger = edges.nodes.mesh.ledger
    for features in (x.clone(), x, x, x):  # the first plans
        ledger.reset()
        model.zero_grad()
        out = model(features, edges)
        F.cross_entropy(out, y % out.size(1)).backward()
    sums = ledger.bytes("all_reduce")
    return {
        "exchange": ledger.bytes() - sums,
        "parameters": ledger.bytes("all_reduce", "data"),
        "rest": ledger.bytes("all_reduce", "world"),
        "messages": ledger.messages() - ledger.messages("all_reduce"),
    }


def trained(grid, graph, owner, layer, switches):
    mesh = worlds.mesh(grid=grid)
    share = pdc.partition(GRAPHS[graph](), mesh, owner)
    torch.manual_seed(0)
    model = pdc.replicate(Net(LAYERS[layer], WIDTHS).double(), mesh)
    found = []
    for order, keep, halo in switches:
        edges = share.edge_index.with_halo(halo)
        edges = edges.with_ordering(order, keep_inputs=keep)
        found.append(late_epoch(model, share.x, edges, share.y))
    return found


def same_as_ledger(size, grid, graph, cutter, layer, switches):
    data = GRAPHS[graph]()
    owner = owners(cutter, data, size)
    how = {"partition": owner, "layers": layer, "dtype": torch.float64, "grid": grid}
    counted = worlds.run(trained, size, grid, graph, owner, layer, switches)
    for k, (order, keep, halo) in enumerate(switches):
        ordering = MultiplyOrder(order, keep)
        (one,) = pdc.plan(data, WIDTHS, size, halo=halo, ordering=ordering, **how)
        rest = one.sum_bytes["loss"] + one.sum_bytes["norms"]
        sums = one.sum_bytes["parameters"], rest
        for rank, each in enumerate(counted):
            bytes_of = each[k]["exchange"], each[k]["parameters"], each[k]["rest"]
            assert bytes_of == (one.bytes_by_rank[rank] - sum(sums), *sums), (rank, one)
        assert max(each[k]["messages"] for each in counted) == one.messages
        assert one.total_bytes == sum(one.bytes_by_rank)


def test_bytes_are_those_of_the_ledger():
    """The planner's sums; that each product costs its price, test_products.py proves."""
    for number, grid in enumerate([(2, 2, 1), (1, 2, 2)]):
        switches = SWITCHES[number + 4 :: 12]
        same_as_ledger(4, grid, "star", "lopsided", "gcn", switches)


def uncommon_models():
    """Models that make other products than a stack of layers, each with what they do."""
    against, lin = {"flow": "target_to_source"}, torch.nn.Linear
    gat, gcn, gin, sage = pyg.GATConv, pyg.GCNConv, pyg.GINConv, pyg.SAGEConv
    layers = gcn(7, 6, **against), gat(6, 5, **against), sage(5, 4, **against)
    yield "reads against the edges", chained(*layers)
    ends = pyg.ChebConv(7, 6, K=3), pyg.ChebConv(6, 4, K=2)
    yield "is a polynomial", chained(ends[0], pyg.GatedGraphConv(6, 2), ends[1])
    first, twice, last = lin(7, 6), gcn(6, 6), gcn(6, 4)
    yield "begins with a linear layer", chained(first, twice, last)
    yield "uses a layer twice", chained(gcn(7, 6), twice, 1, last)
    yield "is frozen", chained(gcn(7, 6).requires_grad_(False), last)
    frozen, conv = lin(7, 7).requires_grad_(False), gcn(7, 5)
    conv.lin.weight.requires_grad_(False)
    yield "trains only a bias", chained(frozen, conv, gat(5, 4))
    sums = pyg.SGConv(7, 6, K=3), pyg.TAGConv(6, 6, K=2), pyg.GatedGraphConv(7, 2)
    yield "sums in rounds", chained(*sums, pyg.APPNP(3, 0.1))
    yield "caches", chained(pyg.SGConv(7, 6, K=2, cached=True), last)
    yield "projects", chained(sage(7, 6), sage(6, 4, project=True))
    before, norm = torch.nn.BatchNorm1d(7), torch.nn.BatchNorm1d(6)
    yield "norms before, and twice", chained(before, gcn(7, 6), norm, twice, 2, last)
    yield "sums, and maxima", chained(pyg.GraphConv(7, 6), sage(6, 5, aggr="max"))
    yield "attends first", chained(gat(7, 6), gin(lin(6, 4)))
    inner = torch.nn.Sequential(lin(6, 5), torch.nn.ReLU())
    yield "mixes", chained(gat(7, 3, heads=2), gin(inner), gcn(5, 4))
    sums = gin(lin(7, 6)), pyg.GraphConv(6, 5, aggr="mean"), pyg.APPNP(2, 0.1)
    yield "sums on the grid", chained(*sums, pyg.TAGConv(5, 4, K=2))
    edge = pyg.EdgeConv(lin(10, 4))
    yield "compares", chained(pyg.GATv2Conv(7, 6), pyg.TransformerConv(6, 5), edge)


def uncommon(grid, graph, owner, keep, halo, some):
    mesh, found = worlds.mesh(grid=grid), []
    share = pdc.partition(GRAPHS[graph](), mesh, owner)
    edges = share.edge_index.with_ordering(keep_inputs=keep).with_halo(halo)
    for _, model in list(uncommon_models())[some]:
        model = pdc.convert(model.double())
        found.append(late_epoch(model, share.x, edges, share.y))
    return found


UNCOMMON = [
    (grid, "directed", "random", grid != (1, 1, 2), "auto", some)
    for some in [*(slice(k, None, 4) for k in range(4)), slice(None)]
    for grid in ((2, 1, 1), (2, 1, 2), (1, 1, 2), (2, 2, 1))
]
UNCOMMON += [
    (grid, "star", "empty_rank", True, halo, slice(-3, None))
    for grid, halo in itertools.product(some_grids(4), HALOS)
]


# by default half of the models, on two ranks
@tiers.parametrize(
    ("grid", "graph", "cutter", "keep", "halo", "some"), UNCOMMON, slice(4, 15, 10)
)
def test_a_model_is_read_as_it_runs(grid, graph, cutter, keep, halo, some):
    data, size = GRAPHS[graph](), math.prod(grid)
    owner, ordering = owners(cutter, data, size), MultiplyOrder("auto", keep)
    counted = worlds.run(uncommon, size, grid, graph, owner, keep, halo, some)
    how = {"partition": owner, "ordering": ordering, "halo": halo, "grid": grid}
    for k, (name, model) in enumerate(list(uncommon_models())[some]):
        state, model = torch.get_rng_state(), pdc.convert(model)
        with torch.inference_mode("twice" in name):  # it makes no difference
            best = pdc.plan(data, ranks=size, model=model, **how).best
        kinds = ("exchange", "parameters", "rest")
        found = tuple(sum(each[k][kind] for kind in kinds) for each in counted)
        assert best.bytes_by_rank == found, name
        assert max(each[k]["messages"] for each in counted) == best.messages, name
        assert not best.missing
        assert torch.equal(torch.get_rng_state(), state)


def test_a_graph_is_cut_as_for_the_ranks_of_each_grid():
    data, how = GRAPHS["directed"](), {"partition": "grid"}
    plans = pdc.plan(data, WIDTHS, 4, **how)
    for grid in grids(4)[::3]:
        told = {"train_mask": data.train_mask, "grid": grid}
        owner = cut(data.edge_index, data.num_nodes, 4, "grid", **told)
        want = pdc.plan(data, WIDTHS, 4, partition=owner, grid=grid).best
        assert plans.of(grid).bytes_by_rank == want.bytes_by_rank
        assert pdc.plan(data, WIDTHS, 4, grid=grid, **how).best == want
        if grid == plans.best.grid:
            assert torch.equal(plans.partition.owner, owner.owner)


def planned(model, **how):
    how |= {"ranks": 2, "partition": "random"}
    return pdc.plan(GRAPHS["directed"](), model=model, **how)


def test_what_is_not_counted_is_said():
    for model, words in (
        (chained(pyg.GCNConv(7, 6), pyg.PairNorm()), "sums over nodes of PairNorm"),
        (chained(pyg.MFConv(7, 6)), "rows that MFConv reads by ids"),
    ):
        plans = planned(model)
        assert words in plans.best.missing
        assert words in str(plans)
        assert ">= " in str(plans)
        assert "at least" in str(plans.best)
    back = pyg.SAGEConv(7, 4, flow="target_to_source")
    for model in (chained(back), chained(pyg.DirGNNConv(pyg.SAGEConv(7, 4)))):
        for plan in planned(model, codecs=["bf16"]):
            told = plan.missing == "rows that SAGEConv reads against the edges"
            assert told == (plan.codec == "bf16")


class Idle(torch.nn.Module):
    """Holds a layer, and does not call it."""

    def __init__(self):
        super().__init__()
        self.conv = pyg.GCNConv(7, 4)

    def forward(self, x, edge_index):
        return x


def test_what_does_not_run_is_refused():
    with pytest.raises(ValueError, match="does not run on a graph of two"):
        planned(torch.nn.ModuleList([pyg.GCNConv(7, 4)]))
    with pytest.raises(ValueError, match="calls no message passing layer"):
        planned(Idle())
    with pytest.raises(TypeError, match=r"model is a torch\.nn\.Module, got list"):
        planned([pyg.GCNConv(7, 4)])


def test_numbers_are_as_long_as_the_features():
    data, model = GRAPHS["undirected"](), pyg.GCNConv(7, 4)
    assert data.x.dtype == torch.float64

    def count(**given):
        graph, how = given.pop("graph", data), {"partition": "random", **given}
        return pdc.plan(graph, ranks=2, **how).best.bytes

    long, short = (count(model=model, dtype=t) for t in (torch.float64, torch.float32))
    assert long > short
    assert count(model=model) == count(widths=[7, 4]) == long
    assert count(graph=data.edge_index, model=model) == short
    half = data.clone()
    half.x = half.x.half()
    assert count(graph=half, model=model) == short > count(graph=half, widths=[7, 4])
    assert count(graph=data.edge_index, model=pyg.GCNConv(7, 4).double()) == long


def test_refusals_have_reasons():
    data = GRAPHS["undirected"]()
    data.x = torch.ones(data.num_nodes, 50)
    plans = pdc.plan(data, [50, 16, 4], np.int64(2), partition="random")
    assert len(plans) == len(grids(2))
    with pytest.raises(ValueError, match="q \\* t \\* p"):
        pdc.plan(data, [50, 16, 4], 4, partition="random", algorithm="3d")
    small = plans.best.memory - 1
    tight = pdc.plan(data, [50, 16, 4], 2, partition="random", memory=small)
    assert all(p.memory <= small for p in tight)
    assert any("may use" in p.reason for p in tight.refused)
    assert len(tight) + len(tight.refused) == len(plans)
    with pytest.raises(ValueError, match="no plan can be run"):
        _ = pdc.plan(data, [50, 16, 4], 2, partition="random", memory=1).best


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "ranks=P"),
        ({"ranks": 0}, "above 0"),
        ({"ranks": 4, "widths": None}, "either widths"),
        ({"ranks": 4, "widths": [3]}, "at least two"),
        ({"ranks": 4, "layers": "gat"}, "layers are gcn or sage"),
        ({"ranks": 4, "halo": "some"}, "halo must be one of"),
        ({"ranks": 4, "layers": ["gcn"]}, "1 kinds of layers"),
        ({"ranks": 4, "grid": (3, 1, 1)}, "the number of ranks, 4"),
        ({"ranks": 4, "grid": (2, 2)}, "three positive sizes"),
        ({"ranks": 4, "grid": (-2, -2, 1)}, "three positive sizes"),
        ({"ranks": 4, "grid": (2, 2, 1), "algorithm": "1d"}, "one of them"),
        ({"ranks": 4, "algorithm": "4d"}, "not known"),
        ({"ranks": 4, "memory": -1}, "bytes above 0"),
        ({"ranks": 4, "memory": "24GiB"}, "number of bytes"),
        ({"ranks": 4, "graph": Data(x=torch.ones(3, 7))}, "data has none"),
        ({"ranks": 4, "widths": [7.0, 4.5]}, "whole numbers, at least 1, got 7.0 and"),
        ({"ranks": 4, "widths": [9, 4]}, "data.x has 7 features"),
        ({"ranks": 4, "inputs": "old"}, "inputs must be"),
        ({"ranks": 4, "partition": torch.zeros(3, dtype=torch.long)}, "entries"),
    ],
)
def test_mistakes_are_named(arguments, message):
    how = {"graph": GRAPHS["undirected"](), "widths": [7, 5, 4], **arguments}
    with pytest.raises((TypeError, ValueError), match=message):
        pdc.plan(**how)


@tiers.parametrize("size", [1, 2, 4], [2])
@worlds.on()
def test_auto_takes_the_same_plan_on_all_ranks(size):
    data = GRAPHS["undirected"]()
    mesh = pdc.init(pdc.Auto(data, model=Net(widths=WIDTHS).double()), timeout=60)
    share = pdc.partition(data, mesh)
    torch.manual_seed(0)
    model = pdc.replicate(Net(widths=WIDTHS).double(), mesh)
    got = late_epoch(model, share.x, share.edge_index, share.y)
    total = sum(got[k] for k in ("exchange", "parameters", "rest"))
    assert mesh.grid == mesh.plan.grid
    assert total == mesh.plan.bytes_by_rank[mesh.rank]
    coded = pdc.Auto(data, [7, 64, 64, 4], inputs="changing", codecs=["bf16"])
    codec = pdc.init(coded, timeout=60).plan.codec
    assert codec == ("bf16" if size > 1 else "plain")
    assert len(set(collectives.all_gather_object(mesh.grid, mesh.world))) == 1


@worlds.on(2)
def test_auto_refuses_on_all_ranks():
    data = GRAPHS["undirected"]()
    with pytest.raises(ValueError, match=r"give pdc\.Auto\(data"):
        pdc.init("auto")
    some = data if worlds.mesh().rank == 0 else None
    with pytest.raises(ValueError, match=r"rank 1: .*needs a graph"):
        pdc.init(pdc.Auto(some, widths=[7, 4]), timeout=120)
    with pytest.raises(ValueError, match="leave grid"):
        pdc.init(pdc.Auto(data, widths=[7, 4]), replication=2)
    less = pdc.Auto(data, widths=[7, 4], memory=1)
    with pytest.raises(ValueError, match="no plan can be run"):
        pdc.init(less, timeout=60)
    mesh = pdc.init(pdc.Auto(data, widths=[7, 4], method="random"), timeout=60)
    told = "has partitioned this graph already; leave seed out"
    with pytest.raises(ValueError, match=told):
        pdc.partition(data, mesh, seed=3)
    pdc.partition(data, mesh, "random", seed=3)


@worlds.on(2)
def test_auto_refuses_before_anything_is_timed():
    data, how = GRAPHS["undirected"](), {"widths": [7, np.int64(4), 3]}
    codecs = ["bf16"][: worlds.mesh().rank]
    told = r"codecs: it is \[\] on rank 0, and \['bf16'\] on rank 1"
    with mock.patch.object(auto, "fastest") as timed:
        for wrong, kind, message in (
            ({"widths": [5, 4]}, ValueError, "features"),
            ({"codecs": ["3.5 bits"]}, ValueError, "3.5 bits"),
            ({"method": "metiss"}, ValueError, "metiss"),
            ({"memory": "24GiB"}, TypeError, "number of bytes"),
            ({"data": Data(x=data.x, edge_index=data.y)}, ValueError, "edge_index"),
            ({"codecs": codecs}, ValueError, told),
        ):
            with pytest.raises(kind, match=message):
                pdc.init(pdc.Auto(**{"data": data} | how | wrong), timeout=60)
    assert not timed.called


def test_the_best_few_are_timed():
    data = GRAPHS["undirected"]()

    def shortlist(widths, **how):
        plans = pdc.plan(data, widths, 4, partition="block", **how)
        layers = how.get("layers", "gcn")
        training = training_of(widths, layers, dtype=torch.float64)
        return plans, auto.shortlist(plans, training, how.get("memory"))

    plans, found = shortlist([7, 4, 3])
    assert found[0] is plans.best
    assert 1 < len(found) <= auto.MOST
    assert found == sorted(found, key=lambda one: one.bytes)
    plans, found = shortlist([7, 4, 3], memory=plans.best.memory * 1.5)
    assert found == [plans.best]
    for training in (
        training_of([7, 4, 3], dtype=torch.float16),
        training_of(model=chained(torch.nn.Linear(7, 4), DistGCNConv(4, 3))),
        replace(training_of([7, 4, 3]), layers=training_of([7, 5, 4, 3]).layers[::2]),
    ):
        assert auto.shortlist(plans, training) == [plans.best]


@tiers.parametrize("fastest", [(2, 1, 1), (1, 1, 2)], [(1, 1, 2)])
@worlds.on(2)
def test_auto_takes_what_is_timed_fastest(fastest):
    data, first = GRAPHS["undirected"](), worlds.mesh().rank == 0

    def once(work, there):
        work()
        if there.grid == fastest:
            return 1.0
        return 2.0 if first else 0.1  # to the other rank they are the fastest

    def every(plans, *_):
        return [plans.of(grid) for grid in grids(2)]

    with mock.patch.multiple(auto, shortlist=every, time_once=once):
        how = {"widths": [7, 4], "method": "block"}
        with pytest.raises(TypeError, match="rank 1: give every rank the same data"):
            pdc.init(pdc.Auto(data if first else Data(), **how), timeout=60)
        mesh = pdc.init(pdc.Auto(data, **how), timeout=60)
    assert (mesh.grid, mesh.plan.grid) == (fastest, fastest)
    assert latest_mesh() is mesh
    share = pdc.partition(data, mesh)
    conv = pdc.replicate(DistGCNConv(7, 4).double(), mesh)
    conv(share.x, share.edge_index).sum().backward()
    assert mesh.ledger.bytes() > 0


def rmat(scale, each):
    """The edges of an R-MAT graph (.57, .19, .19, .05), symmetrised, ids permuted."""
    n, g = 1 << scale, torch.Generator().manual_seed(0)
    row = torch.zeros(n * each, dtype=torch.int64)
    col = torch.zeros_like(row)
    for _ in range(scale):
        u = torch.rand(len(row), generator=g)
        row = 2 * row + (u >= 0.76)
        col = 2 * col + (((u >= 0.57) & (u < 0.76)) | (u >= 0.95))
    ends = torch.randperm(n, generator=g)[torch.stack([row, col])]
    return torch.cat([ends, ends.flip(0)], 1)


@pytest.mark.parametrize("law", [tiers.rarely("uniform"), "rmat"])
def test_a_law_gives_the_mean_of_real_graphs(law):
    n, g = 4096, torch.Generator().manual_seed(0)
    uniform = law == "uniform"
    edge_index = torch.randint(n, (2, 8 * n), generator=g) if uniform else rmat(12, 4)
    owner = torch.randperm(n, generator=torch.Generator().manual_seed(1)) % 4
    graph = pdc.RandomGraph(n, edge_index.size(1), law)
    pairs = itertools.cycle(itertools.product((True, False), ("rows", "blocks")))
    for order, (keep, halo) in zip([*ORDERS, "auto"], pairs, strict=False):
        how = {"halo": halo, "ordering": MultiplyOrder(order, keep)}
        mean = pdc.plan(graph, [16, 8, 12], 4, **how)
        for one in pdc.plan(edge_index, [16, 8, 12], 4, partition=owner, **how):
            want = mean.of(one.grid).total_bytes
            assert want == pytest.approx(one.total_bytes, rel=0.01), one


def test_laws_agree_where_degrees_are_alike():
    poisson = pdc.RandomGraph(5000, 40000, PowerLaw(1e9)).fill(4)  # all means alike
    assert poisson == pytest.approx(pdc.RandomGraph(5000, 40000).fill(4), rel=1e-3)
    endless = {"nodes": float("inf")}, {"edges": float("nan")}, {"nodes": "5"}
    for wrong in ({"nodes": 0}, {"edges": -1}, {"law": "zipf"}, *endless):
        with pytest.raises(ValueError, match=r"must be a whole number|not known"):
            pdc.RandomGraph(**{"nodes": 5, "edges": 5, **wrong})


def test_thousands_of_ranks_are_planned_in_closed_form():
    graph = pdc.RandomGraph(111_000_000, 1_600_000_000, "powerlaw")
    widths = [128, 256, 172]
    rowwise, plans = (pdc.plan(graph, widths, 4096, halo=h) for h in ("auto", "blocks"))
    assert len(rowwise) == len({plan.grid for plan in rowwise}) == 91
    # no halo is larger than the edges that cross it, or than all rows
    edges, rows = 2 * 4 * 172 * graph.edges / 4096, 2 * 4 * 172 * graph.nodes
    one = rowwise.of((4096, 1, 1), orders=("kept", "last"))
    assert 0.5 * edges < one.exchange_bytes < edges
    one = plans.of((4096, 1, 1), orders=("kept", "last"))
    assert one.exchange_bytes == pytest.approx(rows * (1 - 1 / 4096))
    with pytest.raises(ValueError, match="RandomGraph"):
        pdc.plan(GRAPHS["tiny"](), [7, 4], 5000, partition="block")


# The planner's codecs ----------------------------------------------------------------

OVER_LINKS = (7, 6, 5, 4)
ONE = Quantise(1, "stochastic")
LINKS = {
    "1 bit": lambda: LinkPolicy(ONE),
    "4 bits late": lambda: LinkPolicy(Quantise(4, "stochastic"), late=1),
    "bf16": lambda: LinkPolicy(Cast(torch.bfloat16)),
    "mask": lambda: LinkPolicy(ColumnMask(2), exact_last=False),
    "rows": lambda: LinkPolicy(RowSample(3.0), late=2, late_gradients=1),
    "chain": lambda: LinkPolicy(Chain(ColumnMask(2), ONE), late=1),
    "switching": lambda: LinkPolicy(ONE, late=1, sync_every=2),
}


def over_a_link(grid, graph, owner, layer, name, order, keep, halo):
    """Returns what the fourth epoch of training over a link sends, and what is kept then."""
    mesh, link = worlds.mesh(grid=grid), LINKS[name]()
    share = pdc.partition(GRAPHS[graph](), mesh, owner, link=link)
    edges = share.edge_index.with_halo(halo).with_ordering(order, keep_inputs=keep)
    torch.manual_seed(0)
    model = pdc.replicate(Net(LAYERS[layer], OVER_LINKS).double(), mesh)
    for _ in range(4):
        mesh.ledger.reset()
        model.zero_grad()
        out = model(share.x, edges)
        F.cross_entropy(out, share.y % out.size(1)).backward()
        link.drain()
        counted = mesh.ledger.bytes()
        messages = mesh.ledger.messages() - mesh.ledger.messages("all_reduce")
        link.step()
    return counted, messages, link.held


CASES = [
    tiers.rarely(1, "undirected", "block", "gcn"),
    (2, "directed", "random", "sage"),
    tiers.rarely(3, "loops_and_copies", "empty_rank", "gcn"),
    tiers.rarely(4, "directed", "lopsided", "gcn"),
    tiers.rarely(6, "isolated", "random", "sage"),
    tiers.rarely(8, "undirected", "random", "gcn"),
]
ORDERINGS = [("first", True, "auto"), ("auto", False, "rows"), ("last", True, "blocks")]


@pytest.mark.parametrize(("size", "graph", "cutter", "layer"), CASES)
def test_bytes_of_a_link_are_those_of_the_ledger(size, graph, cutter, layer):
    data = GRAPHS[graph]()
    owner = owners(cutter, data, size)
    how = {"partition": owner, "layers": layer, "dtype": torch.float64}
    for number, grid in enumerate(grids(size)):
        for k, name in enumerate(list(LINKS)[number :: len(grids(size))]):
            order, keep, halo = ways = ORDERINGS[(k + number) % 3]
            link, ordering = LINKS[name](), MultiplyOrder(order, keep)
            how |= {"grid": grid, "halo": halo, "ordering": ordering}
            plans = pdc.plan(data, OVER_LINKS, size, codecs=[link], **how)
            one, plain = plans.of(grid, link=link), plans.of(grid, codec="plain")
            assert not one.exact
            run = grid, graph, owner, layer, name, *ways
            found = worlds.run(over_a_link, size, *run)
            counted, messages, held = zip(*found, strict=True)
            assert counted == one.bytes_by_rank, (name, one)
            assert max(messages) == one.messages
            assert min(held) <= one.memory - plain.memory <= max(held), name

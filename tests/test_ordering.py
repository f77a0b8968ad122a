"""(A X) W or A (X W), and products that are kept: the same numbers for fewer words."""

from __future__ import annotations

import copy
import itertools

import alike
import pytest
import tiers
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
import worlds
from layers import Checkpointed
from links import Net
from problems import GRAPHS
from torch_geometric.typing import OptPairTensor

import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.failure import FailureMonitor, RankError
from pyg_distcomm.comm.store import StoreMailbox
from pyg_distcomm.graph import topology
from pyg_distcomm.nn import DistGCNConv, DistSAGEConv, halo_conv

pytestmark = pytest.mark.usefixtures("place")

# Widths, and how many times fewer words a late epoch sends than the order of [Tripathy20]:
# (A X) W forward and A G backward, in every layer.
SHAPES = {
    "Reddit": ((602, 16, 41), 675 / 32),
    "Amazon": ((300, 16, 24), 356 / 32),
    "Protein": ((128, 16, 256), 416 / 32),
    "products": ((100, 256, 256, 47), 1171 / 606),
}


def moved(mesh):
    """The words of all exchanges of rows and of sums."""
    ops = ("halo", "halo_reduce", "all_gather", "reduce_scatter", "fiber")
    return sum(mesh.ledger.words(op) for op in ops)


def graph(width):
    data = GRAPHS["undirected"]()
    g = torch.Generator().manual_seed(0)
    data.x = torch.randn(data.num_nodes, width, generator=g, dtype=torch.float64)
    return data


def step(net, share, edges):
    net.zero_grad()
    out = net(share.x, edges)
    F.cross_entropy(out, share.y % out.size(1)).backward()
    world = edges.nodes.mesh.world  # a rank's own part depends on the order
    gradients = [collectives.all_reduce(p.grad, world) for p in net.parameters()]
    return gradients, out.to_local().detach()


def late_epoch(widths, grid, oblivious):
    mesh = worlds.mesh(grid=grid)
    share = pdc.partition(graph(widths[0]), mesh, "random", oblivious=oblivious)
    share.y = share.y.long()
    torch.manual_seed(1)
    net = Net(widths=widths).double()
    plans = share.edge_index.topology._plans
    results, words = [], []
    for _ in range(4):
        mesh.ledger.reset()
        results.append(step(net, share, share.edge_index))
        words.append(moved(mesh))
    operator = next(value[2] for key, value in plans.items() if "gcn" in str(key))
    reference = sum(
        operator.price(a).words + operator.transposed.price(b).words
        for a, b in itertools.pairwise(widths)
    )
    for gradients, out in results[1:]:
        alike.same(out, results[0][1], rtol=1e-10, atol=1e-12)
        alike.same(gradients, results[0][0], atol=1e-11)
    return words, reference


@tiers.cover(("name", "oblivious"), [*SHAPES][1:], [False, True], step=2)
def test_words_fall_as_the_widths_say(name, oblivious):
    widths, times = SHAPES[name]
    found = worlds.run(late_epoch, 2, widths, (2, 1, 1), oblivious)
    words = [sum(each) for each in zip(*(words for words, _ in found), strict=True)]
    reference = sum(reference for _, reference in found)
    assert words[2] == words[3]
    assert reference == pytest.approx(times * words[3], rel=1e-9)


def switches(layer):
    mesh = worlds.mesh()
    share = pdc.partition(graph(9), mesh, "random")
    share.y = share.y.long()
    torch.manual_seed(2)
    net = Net(layer, (9, 4, 12)).double()
    found, words = {}, {}
    for order in ("auto", "first", "last"):
        for keep in (True, False):
            edges = share.edge_index.with_ordering(order, keep_inputs=keep)
            for _ in range(3):
                mesh.ledger.reset()
                found[order, keep] = step(net, share, edges)
            words[order, keep] = moved(mesh)
    for gradients, out in found.values():
        want = found["first", False]
        alike.same(out, want[1], rtol=1e-10, atol=1e-12)
        alike.same(gradients, want[0], atol=1e-11)
    return words


@tiers.parametrize("layer", [DistGCNConv, DistSAGEConv], [DistSAGEConv])
def test_every_order_is_the_same_function(layer):
    found = worlds.run(switches, 2, layer)
    words = {key: sum(each[key] for each in found) for key in found[0]}
    unit = words["first", False] / (9 + 4 + 4)  # no input gradient at the first
    assert words["first", True] == unit * (4 + 4)
    assert words["last", False] == words["last", True] == unit * (2 * 4 + 2 * 12)
    assert words["auto", False] == unit * (2 * 4 + 2 * 4)
    assert words["auto", True] == unit * 2 * 4


@worlds.on(2)
def test_a_kept_product_follows_its_inputs():
    share = pdc.partition(graph(5), worlds.mesh(), "random")
    torch.manual_seed(3)
    conv = DistGCNConv(5, 6).double()
    rows = share.edge_index.nodes.gid
    weight = share.edge_weight

    def check(x, w):
        plain = share.edge_index.with_ordering(keep_inputs=False)
        want = conv(x, plain, w).to_local()
        for _ in range(3):
            got = conv(x, share.edge_index, w).to_local()
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)

    check(share.x, None)
    share.x.to_local().mul_(2.0)  # in place: another version
    check(share.x, None)
    check(share.x, weight)
    with torch.no_grad():  # hidden features of an evaluation need no gradient either
        conv(share.x.relu(), share.edge_index, weight)
    kept = share.edge_index.topology.constants._products[share.x]
    assert all(product is not None for _, product, _ in kept.values())
    assert len(kept) == 2  # with weights and without
    weight.to_local().add_(0.5)
    check(share.x, weight)
    check(share.x.float().double(), weight)
    conv.float()
    check(share.x.float(), None)
    assert len(rows) == len(share.x.rows)


KEPT = {
    "gat": lambda: pyg.GATConv(5, 3, heads=2),
    "gatv2": lambda: pyg.GATv2Conv(5, 6),
    "transformer": lambda: pyg.TransformerConv(5, 6),
    "graph": lambda: pyg.GraphConv(5, 6),
    "gin": lambda: pyg.GINConv(torch.nn.Linear(5, 6)),
    "edge": lambda: pyg.EdgeConv(torch.nn.Linear(10, 6)),  # keeps ghosts in any case
    "max": lambda: pyg.SAGEConv(5, 6, aggr="max"),
    "no pair": lambda: pyg.TAGConv(5, 6, K=1, normalize=False),  # propagates x itself
}


class Writes(pyg.GraphConv):
    """Writes to the rows that it is given."""

    def forward(self, x: torch.Tensor | OptPairTensor, edge_index):
        x = (x, x) if isinstance(x, torch.Tensor) else x
        x[0].mul_(2).div_(2)
        return super().forward(x, edge_index)


@tiers.parametrize("size", [2, 3, 4], [2])
@tiers.parametrize("kind", [*KEPT, "writes"], ["gat"])
@worlds.on()
def test_the_ghosts_of_features_travel_twice(kind, size):
    """The rows of features travel twice, and again when they have changed."""
    data, mesh = graph(5), worlds.mesh()
    share = pdc.partition(data, mesh, "random")
    torch.manual_seed(2)
    first = KEPT[kind]() if kind in KEPT else Writes(5, 6)
    model = torch.nn.ModuleList([first, pyg.GATConv(6, 4)]).double()
    ours = pdc.convert(copy.deepcopy(model))
    halo = share.edge_index.topology.locals.halo
    sent, edges = [], share.edge_index
    for epoch in range(8):
        if epoch == 4:  # in place, on all ranks
            data.x.mul_(2.0)
            share.x.mul_(2.0)
        if epoch == 7:
            edges = edges.with_ordering(keep_inputs=False)
        mesh.ledger.reset()
        found = []
        for net, x, at in ((model, data.x, data.edge_index), (ours, share.x, edges)):
            net.zero_grad()
            h = net[0](x, at)
            if x is share.x:
                sent.append(sum(map(mesh.ledger.words, ("halo", "halo_reduce"))))
            out = net[1](h.relu(), at)
            out.sin().sum().backward()
            found.append((out, [p.grad for p in net.parameters()]))
        alike.same(found[1], found[0])
    adds = kind in ("graph", "gin", "no pair", "writes")  # sends some rows as sums
    price = (edges.topology.sum_plan().matrix if adds else halo).price(5).words
    if kind == "writes":
        assert sent[1:] == [price] * 7
    else:
        assert sent[1:] == [price, 0, 0, price, price, 0, price * (kind != "edge")]


@pytest.mark.parametrize("layer", [DistGCNConv, tiers.rarely(pyg.GATConv)])
@worlds.on(2, worlds.anew)
def test_a_change_on_one_rank_is_an_error_on_all(layer):
    mesh = worlds.mesh()
    share = pdc.partition(graph(5), mesh, "random")
    convs = [pdc.convert(layer(*w).double()) for w in ((5, 6), (6, 3))]

    def epoch():
        x = convs[0](share.x, share.edge_index).relu()
        convs[1](x, share.edge_index).sum().backward()

    epoch(), epoch()
    share.x.mul_(2)  # on all ranks: all is well
    epoch(), epoch()
    if mesh.rank == 1:
        share.x.to_local().mul_(3)
    with pytest.raises(ValueError, match="changed in place on some ranks only"):
        epoch()


@worlds.on(2, worlds.anew)
def test_a_hook_in_a_layer_on_one_rank_is_an_error_on_all():
    mesh = worlds.mesh()
    share = pdc.partition(graph(5), mesh, "random")
    conv = pdc.convert(pyg.GATConv(5, 3).double())
    conv(share.x, share.edge_index)
    if mesh.rank == 1:
        conv.lin.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="hooks"):
        conv(share.x, share.edge_index)


def test_a_change_is_noticed_at_its_place_and_not_before():
    store = StoreMailbox(torch.distributed.HashStore())
    one, other = (FailureMonitor(store, rank, 2, deadline=0.5) for rank in range(2))
    for monitor in (one, other):
        monitor.pass_by(0)
    with pytest.raises(RankError, match="others to change an input"):
        one.meet_changed(0, 2)  # gives up at its deadline
    other.raise_reported()  # may change it, too
    other.pass_by(0)
    with pytest.raises(ValueError, match="not on rank 1"):
        other.raise_reported()
    with pytest.raises(ValueError, match="rank 1 failed with ValueError"):
        one.raise_reported()


def test_ranks_compare_changes_of_hooks_and_weights(monkeypatch):
    told = []
    for place in (halo_conv, topology):
        monkeypatch.setattr(place, "all_or_none", lambda *given: told.append(given[0]))
    share = pdc.partition(graph(5), worlds.mesh(), "random")
    conv = pdc.convert(pyg.GATConv(5, 3).double())
    hook = conv.lin.register_forward_hook(lambda *_: None)
    conv(share.x, share.edge_index), conv(share.x, share.edge_index)
    hook.remove()
    conv(share.x, share.edge_index), conv(share.x, share.edge_index)
    for _ in range(2):
        share.edge_index.matmul(share.x, share.edge_weight)
    share.edge_weight.mul_(2)
    share.edge_index.matmul(share.x, share.edge_weight)
    share.edge_index.matmul(share.x, share.edge_weight.clone())
    assert told == [True, False, True, False, False, True, False]


def test_an_unknown_order_is_refused():
    share = pdc.partition(graph(3), worlds.mesh(), "random")
    with pytest.raises(ValueError, match="order must be one of"):
        share.edge_index.with_ordering("best")


@pytest.mark.parametrize("layer", [DistGCNConv, DistSAGEConv])
@worlds.on(2)
def test_checkpointing_repeats_the_order(layer):
    """An epoch that computes a layer again multiplies in the order of the first time."""
    share = pdc.partition(graph(9), worlds.mesh(), "random")
    net = Net(layer, (9, 2)).double()
    again = Checkpointed(net)
    want, _ = step(net, share, share.edge_index.with_ordering(keep_inputs=False))
    for _ in range(4):
        got, _ = step(again, share, share.edge_index)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)

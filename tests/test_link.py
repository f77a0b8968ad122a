"""A link: exact where nothing is left out, and what it does to products and training."""

import copy
import math
import pickle
from functools import partial

import alike
import pytest
import tiers
import torch
import torch_geometric.nn as pyg
import worlds
from links import LINKS, ONE, Net, build, epoch, moved
from problems import GRAPHS
from torch_geometric.data import Data
from torch_geometric.utils import add_self_loops, to_undirected

import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives
from pyg_distcomm.halo.codecs import Chain, ColumnMask, Plain, RowSample
from pyg_distcomm.halo.policy import LinkPolicy
from pyg_distcomm.nn import DistSAGEConv, HaloConv
from pyg_distcomm.nn.message_forms import is_coded

pytestmark = pytest.mark.usefixtures("place")

# exact where nothing is left out


EXACT = {
    "mask": lambda: LinkPolicy(ColumnMask(1), exact_last=False),
    "rows": lambda: LinkPolicy(RowSample(1.0), exact_last=False),
    "plain": lambda: LinkPolicy(Plain(), exact_last=False),
    "schedule": lambda: pdc.VARCO(9, c_max=1, exact_last=False),
    "synchronous": lambda: LinkPolicy(
        Plain(), late=2, sync_every=1, smooth=None, exact_last=False
    ),
    "32 bits": lambda: pdc.Sylvie(32, late=0, exact_last=False),
}


def same(name, grid, weights="none"):
    _, share, net = build(grid, None)

    def once():
        if weights == "none":
            return epoch(net, share)
        weight = share.edge_weight.clone().requires_grad_(weights == "learnt")
        found = epoch(net, share, weight)
        return found + ([weight.grad.to_local()] if weights == "learnt" else [])

    want = [once() for _ in range(2)]
    link = EXACT[name]()
    _, share, net = build(grid, link)
    for one in want:
        for got, exact in zip(once(), one, strict=True):
            assert torch.equal(got, exact)
        link.step()


@tiers.cover(("name", "grid"), [*EXACT], [(2, 1, 1), (2, 2, 1), (1, 1, 1)], step=2)
def test_rate_one_and_no_lateness_are_the_exact_link(name, grid):
    worlds.run(same, math.prod(grid), name, grid)


@tiers.parametrize("weights", ["given", "learnt"], ["learnt"])
def test_weights_of_edges(weights):
    worlds.run(same, 2, "mask", (1, 2, 1), weights)


# what is multiplied, and its transpose


LINEAR = [
    ColumnMask(3),
    ColumnMask(2, "prefix", scaled=True),
    RowSample(3.0),
    RowSample(2.0, scaled=False),
    Chain(ColumnMask(2), Plain()),
]


@tiers.cover(("grid", "codec"), [(2, 1, 1), (1, 2, 1)], LINEAR, step=3, ids=str)
@worlds.on()
def test_products_over_linear_codecs_have_their_transpose(grid, codec):
    mesh = worlds.mesh(grid=grid)
    data = GRAPHS["directed"]()
    link = LinkPolicy(codec, exact_last=False)
    share = pdc.partition(data, mesh, "random", link=link)
    y = share.x.flip(1).contiguous()
    for _ in range(3):
        x = share.x.clone().requires_grad_()
        out = share.edge_index.matmul(x, share.edge_weight)
        there = (out * y).sum()
        there.backward()
        back = (x.grad * share.x).sum()
        torch.testing.assert_close(there.item(), back.item(), rtol=1e-9, atol=1e-9)
        exact = share.edge_index.with_link(None).matmul(share.x, share.edge_weight)
        assert not torch.equal(out.full_tensor(), exact.full_tensor())
        link.step()


# modes


@worlds.on(2)
def test_what_is_exact():
    mesh, share, net = build((2, 1, 1), None, layer=DistSAGEConv)
    exact = share.edge_index
    want = net(share.x, exact).to_local().detach()
    for exact_eval in (True, False):
        link = LinkPolicy(ColumnMask(3), exact_last=False, exact_eval=exact_eval)
        edges = exact.with_link(link)
        assert not torch.equal(net(share.x, edges).to_local(), want)
        link.step()
        for one in (mesh.rank == 1, True):  # one rank in eval, then all of them
            net.train(not one)
            got = net(share.x, edges).to_local()
            close = float(torch.allclose(got, want, rtol=1e-12))
            everywhere = collectives.all_reduce(torch.tensor(close), mesh.world) == 2
            assert bool(everywhere) is exact_eval
        net.train()
        with torch.no_grad():
            got = net(share.x, edges).to_local()
        assert torch.allclose(got, want, rtol=1e-12) or not exact_eval
    own = DistSAGEConv(7, 4, link="exact").double()
    assert torch.equal(own(share.x, edges).to_local(), own(share.x, exact).to_local())
    own.link = LinkPolicy(ColumnMask(7), exact_last=False)
    got = own(share.x, edges).to_local()
    assert not torch.equal(got, own(share.x, exact).to_local())


@worlds.on(2)
def test_a_coded_evaluation_ends_exactly():
    """Coded, but for the layer whose call is exact in training."""
    link = LinkPolicy(ColumnMask(3), exact_eval=False)
    _, share, net = build((2, 1, 1), link)
    for _ in range(2):
        epoch(net, share)
        link.step()
    x, exact = share.x, []
    with torch.no_grad():
        for layer in net.eval().layers:
            want = layer(x, share.edge_index.with_link(None))
            got = layer(x, share.edge_index)
            exact.append(torch.equal(got.to_local(), want.to_local()))
            x = want
    assert exact == [False, False, True]


@worlds.on(2)
def test_a_product_of_constant_inputs_is_exact_and_travels_once():
    link = LinkPolicy(ColumnMask(3), exact_last=False)
    mesh, share, net = build((2, 1, 1), link, keep=True)
    conv = net.layers[0]
    want = conv(share.x, share.edge_index.with_link(None)).to_local().detach()
    assert not torch.equal(conv(share.x * 1.0, share.edge_index).to_local(), want)
    for t in range(4):
        link.step()
        mesh.ledger.reset()
        found = conv(share.x, share.edge_index).to_local()
        assert t == 0 or torch.equal(found, want)
        assert t < 2 or not moved(mesh)


@worlds.on(2)
def test_copies_of_layers_share_their_link():
    link = LinkPolicy(ONE, late=1, exact_last=False)
    _, share, net = build((2, 1, 1), None)
    net.layers[0].link = link
    epoch(net, share)
    twin = copy.deepcopy(net)
    assert twin.layers[0].link is link
    other = pickle.loads(pickle.dumps(net)).layers[0].link
    assert str(other.codec) == str(link.codec)
    epoch(twin, share)  # another layer, with rows of its own
    link.step()
    epoch(net, share)


# late links, beside their emulation in test_emulated_ranks.py


@worlds.on(2)
def test_late_gradients_begin_anew_where_layers_were_frozen():
    """Layers that were frozen for some epochs: their last gradients are of long ago."""
    link = LinkPolicy(Plain(), late_gradients=1, exact_last=False)
    mesh, share, net = build((2, 1, 1), link)
    exact, right = share.edge_index.with_link(None), []
    for t in range(7):
        frozen = 1 < t < 5
        net.layers[:2].requires_grad_(not frozen)
        found = []
        for edge_index in (exact, share.edge_index):
            net.zero_grad()
            mesh.ledger.reset()
            (net(share.x, edge_index).square().sum() * (t + 1)).backward()
            found.append([p.grad for p in net.parameters() if p.grad is not None])
        right.append(all(map(torch.allclose, *found)))
        if t not in (0, 2):  # the first product plans, and nobody tells what freezes
            assert moved(mesh) == link.price().total, t
            link.drain()
            assert link.held == link.price().kept, t
        link.step()
    assert right == [True, False, True, True, True, True, False]


@worlds.on(2)
def test_staleness_is_known_ahead_and_paces_the_optimizer():
    """A learning rate that is divided by staleness, as the documentation has it."""
    link = LinkPolicy(Plain(), late=2, warmup=3, sync_every=6)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    pace = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda _: 1 / (1 + link.staleness())
    )
    _, share, net = build((2, 1, 1), link)
    found = []
    for _ in range(8):
        found.append(optimizer.param_groups[0]["lr"])
        epoch(net, share)
        optimizer.step()
        link.step()
        pace.step()
    assert found == [1, 1, 1, 1 / 2, 1 / 3, 1, 1 / 2, 1 / 3]


# Links of layers that run by halo exchange -------------------------------------------

LAYERS = {
    "GCN": lambda a, b, **k: pyg.GCNConv(a, b, **k),
    "SAGE": lambda a, b, **k: pyg.SAGEConv(a, b, **k),
    "GAT": lambda a, b, **k: pyg.GATConv(a, b, heads=2, concat=False, **k),
    "GIN": lambda a, b, **k: pyg.GINConv(torch.nn.Linear(a, b), **k),
    "Transformer": lambda a, b, **k: pyg.TransformerConv(a, b, **k),
    "GATv2": lambda a, b: pyg.GATv2Conv(a, b),
    "ARMA": lambda a, b: pyg.ARMAConv(a, b, 2, 2),
    "TAG": lambda a, b: pyg.TAGConv(a, b, K=2),
    "Cheb": lambda a, b: pyg.ChebConv(a, b, K=2),
}


def converted(layer, link):
    mesh = worlds.mesh()
    share = pdc.partition(GRAPHS["undirected"](), mesh, "random")
    torch.manual_seed(3)
    net = pdc.convert(Net(LAYERS[layer], (7, 6, 6, 4)).double(), link)
    return mesh, share, net


@tiers.parametrize("layer", LAYERS, slice(0, None, 3))
@worlds.on(2)
def test_rate_one_is_the_exact_layer(layer):
    """What is coded at rate 1 is the exact layer, with its gradients."""
    found = []
    for link in (None, LinkPolicy(ColumnMask(1), exact_last=False)):
        _, share, net = converted(layer, link)
        found.append(epoch(net, share))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-10)


def test_what_softmaxes_and_gates_are_made_of_is_exact():
    conv = pyg.TransformerConv(7, 4)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x = torch.zeros(2, 4, dtype=dtype)
        assert not is_coded(conv, "propagate", "key", x)
        assert is_coded(conv, "propagate", "value", x)
        assert not is_coded(conv, "edge_updater", "value", x)
    x = torch.zeros(2, 4)
    for conv, name in (
        (pyg.HEATConv(4, 4, 2, 2, 3, 3, 3), "x"),
        (pyg.DNAConv(4), "x"),
        (pyg.FAConv(4), "alpha"),
        (pyg.GENConv(4, 4), "x"),
        (pyg.SAGEConv(4, 4, aggr=["mean", "softmax"]), "x"),
    ):
        assert not is_coded(conv, "propagate", name, x), conv
    assert is_coded(pyg.FAConv(4), "propagate", "x", x)
    assert is_coded(pyg.GENConv(4, 4, aggr="add"), "propagate", "x", x)


@worlds.on(2)
def test_what_a_layer_keeps_for_good_is_exact():
    link = LinkPolicy(ColumnMask(4), exact_last=False)
    share = pdc.partition(GRAPHS["undirected"](), worlds.mesh(), "random", link=link)
    for kind in (pyg.SGConv, lambda *a, **k: pyg.SSGConv(*a, alpha=0.1, **k)):
        torch.manual_seed(3)
        conv = pdc.convert(kind(7, 4, K=2, cached=True).double())
        torch.manual_seed(3)
        exact = pdc.convert(kind(7, 4, K=2).double(), "exact")
        for _ in range(3):
            out, want = (net(share.x, share.edge_index) for net in (conv, exact))
            assert torch.equal(out.to_local(), want.to_local())
            out.sum().backward()
            link.step()
        assert link.price().total == 0


PRICED = ["GAT", "GIN", "Transformer", "ARMA", "GATv2", "TAG", "Cheb"]


@tiers.cover(("layer", "name"), PRICED, ["sylvie", "varco late"], step=3)
@worlds.on(2)
def test_bytes_of_layers_are_those_foretold(layer, name):
    link = LINKS[name]()
    mesh, share, net = converted(layer, link)
    for t in range(3):
        x = share.x.clone()  # never the same: no product is kept
        foretold = link.price().total
        mesh.ledger.reset()
        net(x, share.edge_index).square().mean(1).sum().backward()
        counted = sum(mesh.ledger.bytes(op) for op in ("halo", "halo_reduce"))
        price = link.price()
        if t:
            assert price.forward + price.backward == counted, (t, counted)
            assert foretold == price.total
        link.step(1.0 / (t + 1))
    compares = layer in ("GAT", "GATv2", "Transformer")
    assert ("attention depends on it" in str(link)) is compares
    codec = "Quantise" if name == "sylvie" else "ColumnMask"
    rows = [line for line in str(link).splitlines() if "Conv" in line]
    assert any(codec in line for line in rows) is (layer != "GATv2")


BACK = {
    **{name: LAYERS[name] for name in ("GCN", "SAGE", "GAT", "GIN", "Transformer")},
    "edge features": lambda a, b, **k: pyg.TransformerConv(a, b, edge_dim=1, **k),
    "weights": lambda a, b, **k: pyg.GraphConv(a, b, **k),
}


def coded(net, x, edges, link, *given):
    """Outputs, gradients and prices of some epochs; bytes are those foretold."""
    every, mesh = [], x.rows.mesh
    for t in range(3):
        foretold = link.price().total
        mesh.ledger.reset()
        leaves = [v.detach().clone().requires_grad_() for v in (x, *given)]
        out = net.double()(leaves[0], edges, *leaves[1:])
        out.square().sum().backward()
        price = link.price()
        assert t == 0 or moved(mesh) == foretold == price.total, t
        assert t == 0 or given or not mesh.ledger.bytes("edges")  # moved once
        every += [out, *(p.grad for p in (*leaves, *net.parameters()))]
        every += [] if given else [price.total]  # values of edges may have moved
        link.step(1.0 / (t + 1))
    return [alike.whole(v) for v in every]


CODED = ["one bit", "varco", "sylvie", "pipegcn"]


@tiers.cover(("layer", "name", "size"), [*BACK], CODED, [2, 3], step=4)
@worlds.on()
def test_a_layer_against_the_edges_is_one_along_flipped_edges(layer, name, size):
    """Also if a script flips them: the same codes of rows, gradients and bytes."""
    mesh, data, found = worlds.mesh(), GRAPHS["directed"](), []
    against, turned = {"flow": "target_to_source"}, copy.copy(data)
    turned.edge_index = data.edge_index.flip(0)
    ways = (turned, {}, 0), (data, against, 0), (data, {}, 1), (turned, against, 1)
    for graph, how, flips in ways:
        link = LINKS[name]()
        share = pdc.partition(graph, mesh, "block", link=link)
        edges = share.edge_index.flip(0) if flips else share.edge_index
        torch.manual_seed(3)
        make = partial(BACK[layer], **how)
        net = Net(lambda a, b, make=make: HaloConv(make(a, b)), (7, 6, 6, 4))
        values = share.edge_weight
        given = {"edge features": [values[:, None]], "weights": [values]}.get(layer, [])
        found.append(coded(net, share.x, edges, link, *given))
    for other in found[1:]:
        alike.same(other, found[0])


DERIVED = {
    "looped": lambda data: add_self_loops(data.edge_index, num_nodes=60)[0],
    "both ways": lambda data: to_undirected(data.edge_index, num_nodes=60),
    "some": lambda data: data.edge_index[:, data.edge_index[0] % 3 > 0],
}


@tiers.cover(("derive", "name", "layer"), [*DERIVED], CODED, ["GAT", "GIN"], step=4)
@worlds.on(2)
def test_edges_that_a_script_derives_are_coded_as_those_of_a_graph(derive, name, layer):
    mesh, some, made, found = worlds.mesh(), GRAPHS["directed"](), DERIVED[derive], []
    data, whole = (Data(x=some.x, edge_index=e) for e in (some.edge_index, made(some)))
    for graph in (whole, data):
        link = LINKS[name]()
        share = pdc.partition(graph, mesh, "block", link=link)
        torch.manual_seed(3)
        net = Net(lambda a, b: HaloConv(LAYERS[layer](a, b)), (7, 6, 6, 4))
        edges = share.edge_index if graph is whole else made(share)
        found.append(coded(net, share.x, edges, link))
    alike.same(*found)


class Hypergraph(pyg.HypergraphConv):
    def forward(self, x, edge_index):  # more hyperedges than nodes, of one node each
        of = torch.arange(edge_index.size(1))
        return super().forward(x, torch.stack([edge_index[0], 0 * edge_index[0] + of]))


@worlds.on(2)
def test_links_are_those_of_edges_and_not_of_hyperedges():
    data, link = GRAPHS["directed"](), LinkPolicy(ColumnMask(1), exact_last=False)
    share, conv = (
        pdc.partition(data, worlds.mesh(), link=link),
        Hypergraph(7, 4).double(),
    )
    for other in (None, LinkPolicy(ONE), link):
        assert share.edge_index.with_link(other).flip(0)._flipped.link is other
    ends, want = share.edge_index[0], conv(data.x, data.edge_index)
    for edges in (share.edge_index, torch.stack([ends, 0 * ends + torch.arange(240)])):
        alike.same(HaloConv(conv)(share.x, edges), want)


@worlds.on(2)
def test_both_directions_are_coded():
    link = LinkPolicy(ONE, exact_last=False)
    share = pdc.partition(GRAPHS["directed"](), worlds.mesh(), "random", link=link)
    net = pdc.convert(pyg.DirGNNConv(pyg.SAGEConv(7, 4)).double())
    for layer in (net, pdc.convert(pyg.HypergraphConv(7, 4).double())):
        layer(share.x * 1.0, share.edge_index).sum().backward()
    rows = [line for line in str(link).splitlines() if "Conv" in line]
    assert len(rows) == 6  # two halos of each product of SAGE
    assert all("Quantise" in line for line in rows)


@worlds.on(2)
def test_zeros_must_not_win():
    for aggr in ("max", "median", "std", "softmax"):
        for codec in (ColumnMask(2), ONE):
            link = LinkPolicy(codec, late=1)
            data = GRAPHS["undirected"]()
            share = pdc.partition(data, worlds.mesh(), "random", link=link)
            conv = pdc.convert(pyg.SAGEConv(7, 4, aggr=aggr).double())
            if codec is ONE:
                conv(share.x, share.edge_index).sum().backward()
                continue
            with pytest.raises(ValueError, match=r"SAGEConv has aggr=.*leaves out"):
                conv(share.x, share.edge_index)
            conv.link = "exact"
            conv(share.x, share.edge_index)


@worlds.on(2)
def test_one_rank_in_evaluation():
    link = pdc.Sylvie(exact_last=False)
    mesh, share, net = converted("GAT", link)
    want = net(share.x, share.edge_index.with_link(None))
    net.train(mesh.rank != 1)
    got = net(share.x, share.edge_index)
    exact = net.eval()(share.x, share.edge_index)
    assert torch.equal(got.to_local(), exact.to_local())
    assert want.shape == got.shape
    assert moved(mesh)


@pytest.mark.parametrize("before", [0, 2])
@worlds.on(2)
def test_one_layer_in_evaluation_on_one_rank(before):
    """One layer does, on one rank: from the start, or after some epochs."""
    link = pdc.Sylvie(exact_last=False)
    mesh, share, net = converted("GIN", link)
    x = share.x.clone().requires_grad_()
    for _ in range(before):
        net(x, share.edge_index).sum().backward()
        link.step()
    net.layers[1].train(mesh.rank != 0)
    if before:
        with pytest.raises(ValueError, match="some layers train on some ranks and"):
            net(x, share.edge_index).sum().backward()
        return
    for _ in range(3):  # such a layer is exact
        net(x, share.edge_index).sum().backward()
        link.step()
    assert len(link.state.numbers) == 2

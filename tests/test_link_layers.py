"""Links of layers that run by halo exchange."""

from __future__ import annotations

import pytest
import tiers
import torch
import torch_geometric.nn as pyg
import worlds
from links import LINKS, ONE, Net, epoch, moved
from problems import GRAPHS

import pyg_distcomm as pdc
from pyg_distcomm.halo.codecs import ColumnMask
from pyg_distcomm.halo.policy import LinkPolicy
from pyg_distcomm.nn.message_forms import is_coded

pytestmark = pytest.mark.usefixtures("place")

LAYERS = {
    "GCN": lambda a, b: pyg.GCNConv(a, b),
    "SAGE": lambda a, b: pyg.SAGEConv(a, b),
    "GAT": lambda a, b: pyg.GATConv(a, b, heads=2, concat=False),
    "GIN": lambda a, b: pyg.GINConv(torch.nn.Linear(a, b)),
    "Transformer": lambda a, b: pyg.TransformerConv(a, b),
    "GATv2": lambda a, b: pyg.GATv2Conv(a, b),
    "TAG": lambda a, b: pyg.TAGConv(a, b, K=2),
    "Cheb": lambda a, b: pyg.ChebConv(a, b, K=2),
}


def build(layer, link):
    mesh = worlds.mesh()
    share = pdc.partition(GRAPHS["undirected"](), mesh, "random")
    torch.manual_seed(3)
    net = pdc.convert(Net(LAYERS[layer], (7, 6, 6, 4)).double(), link)
    return mesh, share, net


@tiers.parametrize("layer", LAYERS, slice(0, None, 3))
@worlds.on(3)
def test_rate_one_is_the_exact_layer(layer):
    """What is coded at rate 1 is the exact layer, with its gradients."""
    found = []
    for link in (None, LinkPolicy(ColumnMask(1), exact_last=False)):
        _, share, net = build(layer, link)
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
            out = conv(share.x, share.edge_index)
            assert torch.equal(
                out.to_local(), exact(share.x, share.edge_index).to_local()
            )
            out.sum().backward()
            link.step()
        assert link.price().total == 0


PRICED = ["GAT", "GIN", "Transformer", "GATv2", "TAG", "Cheb"]


@tiers.cover(("layer", "name"), PRICED, ["sylvie", "varco late"], step=3)
@worlds.on(3)
def test_bytes_of_layers_are_those_foretold(layer, name):
    link = LINKS[name]()
    mesh, share, net = build(layer, link)
    for t in range(4):
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
    assert ("attention depends on it" in str(link)) == (
        layer not in ("GIN", "TAG", "Cheb")
    )
    codec = "Quantise" if name == "sylvie" else "ColumnMask"
    rows = [line for line in str(link).splitlines() if "Conv" in line]
    assert any(codec in line for line in rows) is (layer != "GATv2")


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


@worlds.on(3)
def test_one_rank_in_evaluation():
    link = pdc.Sylvie(exact_last=False)
    mesh, share, net = build("GAT", link)
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
    mesh, share, net = build("GIN", link)
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

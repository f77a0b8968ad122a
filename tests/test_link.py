"""A link: exact where nothing is left out, and what it does to products and training."""

from __future__ import annotations

import copy
import pickle

import pytest
import tiers
import torch
import worlds
from links import ONE, Net, build, epoch, moved
from problems import GRAPHS

import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives
from pyg_distcomm.halo.codecs import Chain, ColumnMask, Plain, RowSample
from pyg_distcomm.halo.policy import LinkPolicy
from pyg_distcomm.nn import DistSAGEConv

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


@tiers.parametrize("name", list(EXACT), slice(0, None, 4))
def test_rate_one_and_no_lateness_are_the_exact_link(name):
    worlds.run(same, 3, name, (3, 1, 1))
    worlds.run(same, 4, name, (2, 2, 1))
    worlds.run(same, 1, name, (1, 1, 1))


@pytest.mark.parametrize("weights", ["given", "learnt"])
def test_weights_of_edges(weights):
    worlds.run(same, 4, "mask", (2, 2, 1), weights)


# what is multiplied, and its transpose


LINEAR = [
    ColumnMask(3),
    ColumnMask(2, "prefix", scaled=True),
    RowSample(3.0),
    RowSample(2.0, scaled=False),
    Chain(ColumnMask(2), Plain()),
]


@tiers.cover(("grid", "codec"), [(4, 1, 1), (2, 2, 1)], LINEAR, ids=str)
@worlds.on(4)
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


@worlds.on(3)
def test_what_is_exact():
    mesh, share, net = build((3, 1, 1), None, layer=DistSAGEConv)
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
            everywhere = collectives.all_reduce(torch.tensor(close), mesh.world) == 3
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


@worlds.on(3)
def test_a_product_of_constant_inputs_is_exact_and_travels_once():
    link = LinkPolicy(ColumnMask(3), exact_last=False)
    mesh, share, net = build((3, 1, 1), link, keep=True)
    conv = net.layers[0]
    want = conv(share.x, share.edge_index.with_link(None)).to_local().detach()
    assert not torch.equal(conv(share.x * 1.0, share.edge_index).to_local(), want)
    for t in range(4):
        link.step()
        mesh.ledger.reset()
        found = conv(share.x, share.edge_index).to_local()
        assert t == 0 or torch.equal(found, want)
        assert t < 2 or not moved(mesh)


def outputs(codec):
    """The same two ranks, and others that own nothing."""
    mesh = worlds.mesh()
    data = GRAPHS["undirected"]()
    link = LinkPolicy(codec, exact_last=False, late=1)
    share = pdc.partition(data, mesh, torch.arange(50) % 2, link=link)
    torch.manual_seed(1)
    net = Net().double()
    found = []
    for _ in range(3):
        x = share.x.clone().requires_grad_()
        out = net(x, share.edge_index)
        (out * out).sum().backward()
        grad = x.grad.full_tensor()
        found += [out.full_tensor().detach(), grad]
        link.step()
    return found


@tiers.parametrize("codec", [ONE, ColumnMask(3), RowSample(2.0)], slice(2), ids=str)
def test_the_same_halo_has_the_same_draws_on_any_number_of_ranks(codec):
    two = worlds.run(outputs, 2, codec)[0]
    three = worlds.run(outputs, 3, codec)[0]
    # inside, gradients are P times the true ones, which bf16 rounds another way
    pairs = list(zip(two, three, strict=True))
    for one, other in pairs[::2] if codec is ONE else pairs:
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@worlds.on(3)
def test_copies_of_layers_share_their_link():
    link = LinkPolicy(ONE, late=1, exact_last=False)
    _, share, net = build((3, 1, 1), None)
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


@worlds.on(3)
def test_late_gradients_begin_anew_where_layers_were_frozen():
    """Layers that were frozen for some epochs: their last gradients are of long ago."""
    link = LinkPolicy(Plain(), late_gradients=1, exact_last=False)
    mesh, share, net = build((3, 1, 1), link)
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

"""A link that is saved and restored: the next epoch is the same, or synchronous."""

import copy
import warnings

import pytest
import tiers
import torch
import torch.nn.functional as F
import worlds
from links import LINKS, Net, moved
from problems import GRAPHS

import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives
from pyg_distcomm.halo.codecs import DegreeBits, Quantise, RangeBits
from pyg_distcomm.halo.policy import LinkPolicy
from pyg_distcomm.halo.staleness import Drift

pytestmark = pytest.mark.usefixtures("place")

OTHERS = {
    "apart": lambda: LinkPolicy(
        DegreeBits(1),
        late=2,
        late_gradients=1,
        smooth=0.5,
        smooth_gradients=0.9,
        warmup=2,
    ),
    "skipped": lambda: LinkPolicy(RangeBits(2), skip=Drift(0.5, 2), exact_last=False),
    "skipped, one bit": lambda: LinkPolicy(
        Quantise(1, "stochastic"), skip=Drift(0.5, 2), sync_every=5
    ),
}
NAMES = ("varco late", "sylvie", "pipegcn", "late by 2 and 1", "adaptive", *OTHERS)


def make(name):
    return {**LINKS, **OTHERS}[name]()


def train(share, net, optimizer, link, epochs):
    losses = []
    for _ in range(epochs):
        optimizer.zero_grad()
        x = share.x.clone().requires_grad_()  # no product is kept
        out = net(x, share.edge_index.with_link(link))
        loss = torch.nn.functional.cross_entropy(out, share.y)
        loss.backward()
        optimizer.step()
        link.step(loss.item())
        losses.append(loss.item())
    return losses


def begin(mesh, name, epochs=0, cutter="random"):
    """A share, a network, an optimizer and a link, after some epochs."""
    torch.manual_seed(4)
    share = pdc.partition(GRAPHS["undirected"](), mesh, cutter)
    net = pdc.replicate(Net().double(), mesh)
    run = share, net, torch.optim.Adam(net.parameters(), lr=0.02), make(name)
    train(*run, epochs)
    return run


def resumed(name, grid, folder):
    mesh = worlds.mesh(grid=grid)
    run = _, *model, link = begin(mesh, name, 4)
    pdc.save_checkpoint(folder, mesh, *model, link=link)
    want = train(*run, 3)
    run = _, *model, link = begin(mesh, name)
    pdc.load_checkpoint(folder, mesh, *model, link=link)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(*run, 3) == want
    assert link.epoch == 7


@tiers.parametrize("name", NAMES, ["skipped"])
def test_the_next_epoch_is_the_same(name, tmp_path):
    worlds.run(resumed, 2, name, (2, 1, 1), tmp_path / "a")
    if name in ("varco late", "late by 2 and 1"):
        worlds.run(resumed, 4, name, (2, 2, 1), tmp_path / "b")


def dropped(folder):
    mesh = worlds.mesh()
    run = _, *model, link = begin(mesh, "varco late", cutter="block")
    with pytest.raises(ValueError, match="this one has schedule"):
        pdc.load_checkpoint(folder, mesh, *model, link=pdc.Sylvie())
    pdc.load_checkpoint(folder, mesh, *model, link=link)
    with pytest.warns(UserWarning, match="dropped: the next epoch is synchronous"):
        train(*run, 1)
    assert link.epoch == 5
    train(*run, 2)


def saves(folder):
    mesh = worlds.mesh()
    _, *model, link = begin(mesh, "varco late", 4)
    pdc.save_checkpoint(folder, mesh, *model, link=link)


@tiers.parametrize("size", [2, 3], [2])  # on as many ranks as before
def test_rows_of_another_partition_are_dropped(size, tmp_path):
    worlds.run(saves, 2, tmp_path / "a")
    worlds.run(dropped, size, tmp_path / "a")


@worlds.on(2)
def test_what_was_restored_is_saved_again_given_up_or_dropped_on_all_ranks():
    """What was restored, before anything has used it, is saved again, used, and given up."""
    mesh = worlds.mesh()
    share, net, optimizer, link = begin(mesh, "late by 2 and 1", 3)
    states = net.state_dict(), optimizer.state_dict(), link.state_dict()
    weights, moments, state = copy.deepcopy(states)
    want = train(share, net, optimizer, link, 2)

    def restored(state):
        net.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(moments))
        link = make("late by 2 and 1")
        link.load_state_dict(state)
        return link

    state = restored(state).state_dict()
    for _ in range(2):  # it is not shared
        assert train(share, net, optimizer, restored(state), 2) == want
    for way in ("reset", "step"):
        link = restored(state)
        getattr(link, way)()
        assert not link.state_dict()["kept"]
        train(share, net, optimizer, link, 1)
    # rank 0's state on all ranks: it fits rank 0, but not what the others have
    link = restored(collectives.broadcast_object(state, mesh.world))
    with pytest.warns(UserWarning, match="saved by another rank"):
        train(share, net, optimizer, link, 1)
    train(share, net, optimizer, link, 2)


@worlds.on(2)
def test_one_that_is_saved_before_its_step_warns():
    share, net, _, link = begin(worlds.mesh(), "sylvie")
    x = share.x.clone().requires_grad_()
    for _ in range(2):
        net(x, share.edge_index.with_link(link)).sum().backward()
        with pytest.warns(UserWarning, match="save after link.step"):
            link.state_dict()
        link.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            link.state_dict()


@worlds.on(2)
def test_saved_rows_are_not_lost_to_a_copy(tmp_path):
    """A copy that is evaluated first takes no place of the layers whose rows were saved."""
    mesh = worlds.mesh()
    run = _, *model, link = begin(mesh, "late by 2 and 1", 3)
    pdc.save_checkpoint(tmp_path, mesh, *model, link=link)
    want = train(*run, 2)
    share, net, optimizer, link = begin(mesh, "late by 2 and 1")
    pdc.load_checkpoint(tmp_path, mesh, net, optimizer, link=link)
    with torch.no_grad():
        copy.deepcopy(net.module).eval()(share.x, share.edge_index.with_link(link))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(share, net, optimizer, link, 2) == want
    pdc.load_checkpoint(tmp_path, mesh, net, optimizer, link=link)
    net.module.layers[1](
        net.module.layers[0](share.x, share.edge_index),
        share.edge_index.with_link(link),
    ).sum().backward()
    with pytest.warns(UserWarning, match=r"saved of layers \[1\].*are dropped"):
        link.step()


@tiers.parametrize("exactly", [True, False], [True])
@worlds.on(2)
def test_an_evaluation_that_comes_first_is_that_of_the_run(exactly):
    mesh = worlds.mesh()

    def made():
        torch.manual_seed(4)
        link = LinkPolicy(Quantise(2, "stochastic"), exact_eval=exactly)
        share = pdc.partition(GRAPHS["undirected"](), mesh, "random", link=link)
        return link, share, Net(widths=(7, 64, 3, 3)).double()

    def evaluated(net, share):
        mesh.ledger.reset()
        with torch.no_grad():
            out = net.eval()(share.x, share.edge_index).to_local()
        return out, moved(mesh)

    link, share, net = made()
    for _ in range(3):
        net(share.x, share.edge_index).square().sum().backward()
        link.step()
    state, (want, count) = link.state_dict(), evaluated(net, share)
    link, share, net = made()
    link.load_state_dict(state)
    other = copy.deepcopy(net)
    evaluated(other, share)  # makes the product that is kept
    for one in (other, net, other):
        got, again = evaluated(one, share)
        assert torch.equal(got, want)
        assert again == count


def trained(share, net, optimizer, link, epochs):
    losses = []
    for _ in range(epochs):
        net.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(net(share.x, share.edge_index), share.y)
        loss.backward()
        optimizer.step()
        link.step(loss.item())
        losses.append(loss.item())
    return losses


def evaluate(share, net):
    net.eval()
    with torch.no_grad():
        net(share.x, share.edge_index)


@worlds.on(2)
def test_the_last_of_two_layers_is_exact_also_if_they_were_evaluated_first():
    """The product of the first may then be known before they train."""
    found = []
    for evaluates in (False, True):
        link = pdc.Sylvie(late=0)
        data = GRAPHS["undirected"]()
        share = pdc.partition(data, worlds.mesh(), "random", link=link)
        torch.manual_seed(0)
        net = Net(widths=(7, 5, 4)).double()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        if evaluates:
            evaluate(share, net)
        found.append(trained(share, net, optimizer, link, 4))
        assert link.state.last == (1, 0)
    assert found[1] == pytest.approx(found[0], rel=1e-9)

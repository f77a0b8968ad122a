"""Evaluations leave training by a link as it is, whatever they are given."""

from __future__ import annotations

import itertools

import pytest
import tiers
import torch
import torch.nn.functional as F
import worlds
from links import LINKS, OPS, Net, moved
from problems import GRAPHS

import pyg_distcomm as pdc
from pyg_distcomm.halo.codecs import ColumnMask, Plain
from pyg_distcomm.halo.policy import LinkPolicy
from pyg_distcomm.halo.schedule import Budget, Exponential
from pyg_distcomm.nn import DistGCNConv, DistSAGEConv

pytestmark = pytest.mark.usefixtures("place")


class Dropping(torch.nn.Module):
    """Drops of its input too, which only an evaluation sees as it is."""

    def __init__(self, widths=(7, 7, 7, 4)):
        super().__init__()
        pairs = itertools.pairwise(widths)
        self.convs = torch.nn.ModuleList(DistGCNConv(a, b) for a, b in pairs)

    def forward(self, x, edge_index):
        for k, conv in enumerate(self.convs):
            x = conv(
                F.dropout(x if k == 0 else x.relu(), 0.5, self.training), edge_index
            )
        return x


def begun(mesh, link):
    torch.manual_seed(1)
    share = pdc.partition(GRAPHS["undirected"](), mesh, "random", link=link)
    net = pdc.replicate(Dropping().double(), mesh)
    return share, net, torch.optim.Adam(net.parameters(), 0.02), link


def trained(share, net, optimizer, link, epochs, evaluates):
    losses = []
    for _ in range(epochs):
        net.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(net(share.x, share.edge_index), share.y)
        loss.backward()
        optimizer.step()
        if evaluates == "before the step":
            evaluate(share, net)
        link.step(loss.item())
        losses.append(loss.item())
        if evaluates:
            evaluate(share, net)
    return losses


def evaluate(share, net):
    net.eval()
    with torch.no_grad():
        net(share.x, share.edge_index)


def losses_of(name, evaluates):
    return trained(*begun(worlds.mesh(), LINKS[name]()), 6, evaluates)


NAMES = ["pipegcn", "sylvie", "residual", "varco late"]


@tiers.parametrize("name", NAMES, ["varco late"])
def test_losses_are_the_same_with_evaluations_and_without(name):
    want = worlds.run(losses_of, 3, name, "")
    assert worlds.run(losses_of, 3, name, "after") == want
    assert worlds.run(losses_of, 3, name, "before the step") == want


def first_evaluated(evaluates):
    """Two layers; the product of the first may be known before they train."""
    mesh = worlds.mesh()
    link = pdc.Sylvie(late=0)
    share = pdc.partition(GRAPHS["undirected"](), mesh, "random", link=link)
    torch.manual_seed(0)
    net, losses = Net(widths=(7, 5, 4)).double(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if evaluates:
        evaluate(share, net)
    for _ in range(4):
        optimizer.zero_grad()
        loss = F.cross_entropy(net.train()(share.x, share.edge_index), share.y)
        loss.backward()
        optimizer.step()
        link.step()
        losses.append(loss.item())
    assert link.state.last == (1, 0)
    return losses


def test_the_last_of_two_layers_is_exact_also_if_they_were_evaluated_first():
    want, *_ = worlds.run(first_evaluated, 3, False)
    for losses in worlds.run(first_evaluated, 3, True):
        assert losses == pytest.approx(want, rel=1e-9)


def resumed(folder):
    mesh = worlds.mesh()
    one = begun(mesh, pdc.Sylvie())
    trained(*one, 4, "after")
    assert one[3].state_dict()["constant"] == []
    pdc.save_checkpoint(folder, mesh, one[1], one[2], link=one[3])
    want = trained(*one, 3, "after")
    two = begun(mesh, pdc.Sylvie())
    pdc.load_checkpoint(folder, mesh, two[1], two[2], link=two[3])
    return want, trained(*two, 3, "after")


def test_training_resumes_bit_for_bit_after_an_evaluation(tmp_path):
    for want, got in worlds.run(resumed, 3, tmp_path / "a"):
        assert got == want


def matmuls(anew):
    mesh = worlds.mesh()
    link = pdc.PipeGCN(exact_last=False)
    share = pdc.partition(GRAPHS["directed"](), mesh, "random")
    edge_index, right = share.edge_index.with_link(link), []
    for epoch in range(4):
        x = (share.x * (epoch + 1.0)).requires_grad_()
        if anew:
            edge_index = share.edge_index.with_link(link)
        out = edge_index.matmul(x)
        out.sum().backward()
        want = share.edge_index.matmul(x)
        right.append(bool(torch.allclose(out.full_tensor(), want.full_tensor())))
        link.step()
    return right, len(link.state.layers)


@pytest.mark.parametrize("anew", [False, True])
def test_edges_are_the_same_however_often_they_get_their_link(anew):
    for right, layers in worlds.run(matmuls, 3, anew):
        assert right == [True, False, False, False]
        assert layers == 1


def spent(evaluates):
    mesh = worlds.mesh()
    total, epochs = 1.5e5, 10  # less than the ramp as it is would take
    link = LinkPolicy(ColumnMask(7), Budget(total, Exponential(epochs, 7, 1)))
    share, net, _, link = begun(mesh, link)
    moved = 0
    for _ in range(epochs):
        before = sum(mesh.ledger.bytes(op) for op in OPS)
        net.train()
        F.cross_entropy(net(share.x, share.edge_index), share.y).backward()
        moved += sum(mesh.ledger.bytes(op) for op in OPS) - before
        if evaluates:
            evaluate(share, net)
        link.step()
    return moved, total


def test_budgets_count_what_evaluations_do_not_keep():
    for flag in (False, True):
        moved, totals = zip(*worlds.run(spent, 3, flag), strict=True)
        assert sum(moved) == pytest.approx(totals[0], rel=0.01)


def counted(evaluates):
    """A budget where inputs do not change; what training sends, and their product."""
    total, epochs = 4.0e5, 30
    link = LinkPolicy(ColumnMask(64), Budget(total, Exponential(epochs, 64, 1)))
    mesh, data = worlds.mesh(), GRAPHS["undirected"]()
    data.x = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    share = pdc.partition(data, mesh, "random", link=link)
    net, spent = Net(DistSAGEConv, (64, 64, 64, 5)), 0
    for _ in range(epochs):
        mesh.ledger.reset()
        net.train()(share.x, share.edge_index).square().sum().backward()
        spent += moved(mesh)
        if evaluates == "before the step":
            evaluate(share, net)
        link.step()
        if evaluates == "after":
            evaluate(share, net)
    product = link.state.exchanges[0, 0, 0, 0].loads[0].bytes(Plain())
    return spent + product * bool(evaluates), str(link.scheduler.schedule), total


@tiers.rare
def test_a_budget_counts_a_product_that_an_evaluation_makes():
    schedules = set()
    for evaluates in ("", "before the step", "after"):
        every = worlds.run(counted, 2, evaluates)
        schedules |= {schedule for _, schedule, _ in every}
        total = every[0][2]
        assert 0.99 * total <= sum(spent for spent, *_ in every) <= total
    assert len(schedules) == 1

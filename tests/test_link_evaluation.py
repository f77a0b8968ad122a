"""Evaluations leave training by a link as it is, whatever they are given."""

from __future__ import annotations

import itertools

import pytest
import tiers
import torch
import torch.nn.functional as F
import worlds
from links import LINKS, Net
from problems import GRAPHS

import pyg_distcomm as pdc
from pyg_distcomm.nn import DistGCNConv

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


@tiers.parametrize(
    "name", ["pipegcn", "sylvie", "late by 2 and 1", "varco late"], ["varco late"]
)
@worlds.on(3)
def test_losses_are_the_same_with_evaluations_and_without(name):
    ways = ("", "after", "before the step")
    want, *others = (trained(*begun(worlds.mesh(), LINKS[name]()), 6, w) for w in ways)
    assert others == [want, want]


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

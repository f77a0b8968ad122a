"""A link that is saved and restored: the next epoch is the same, or synchronous."""

from __future__ import annotations

import warnings

import pytest
import torch
import worlds
from problems import GRAPHS
from test_link import LINKS, Net

import pyg_distcomm as pdc
from pyg_distcomm.exchange.codecs import ColumnMask
from pyg_distcomm.exchange.policy import LinkPolicy
from pyg_distcomm.exchange.schedule import Budget, Exponential

NAMES = ("varco late", "sylvie", "pipegcn", "residual", "adaptive", "budget")


def make(name):
    if name != "budget":
        return LINKS[name]()
    schedule = Budget(2.0e5, Exponential(12, 6, 1))
    return LinkPolicy(ColumnMask(6), schedule, late=1)


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


def begin(mesh, cutter):
    torch.manual_seed(4)
    share = pdc.partition(GRAPHS["undirected"](), mesh, cutter)
    net = pdc.replicate(Net().double(), mesh)
    return share, net, torch.optim.Adam(net.parameters(), lr=0.02)


def resumed(name, grid, folder):
    mesh = worlds.mesh(grid=grid)
    share, net, optimizer = begin(mesh, "random")
    link = make(name)
    train(share, net, optimizer, link, 4)
    pdc.save_checkpoint(folder, mesh, net, optimizer, link=link)
    want = train(share, net, optimizer, link, 3)
    share, net, optimizer = begin(mesh, "random")
    link = make(name)
    pdc.load_checkpoint(folder, mesh, net, optimizer, link=link)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(share, net, optimizer, link, 3) == want
    assert link.epoch == 7


@pytest.mark.parametrize("name", NAMES)
def test_the_next_epoch_is_the_same(name, tmp_path):
    worlds.run(resumed, 4, name, (4, 1, 1), tmp_path / "a")
    if name in ("varco late", "residual"):
        worlds.run(resumed, 4, name, (2, 2, 1), tmp_path / "b")


def dropped(folder, size):
    mesh = worlds.mesh()
    share, net, optimizer = begin(mesh, "block")
    link = make("varco late")
    pdc.load_checkpoint(folder, mesh, net, optimizer, link=link)
    with pytest.warns(UserWarning, match="dropped: the next epoch is synchronous"):
        train(share, net, optimizer, link, 1)
    assert link.epoch == 5
    train(share, net, optimizer, link, 2)


def saves(folder):
    mesh = worlds.mesh()
    share, net, optimizer = begin(mesh, "random")
    link = make("varco late")
    train(share, net, optimizer, link, 4)
    pdc.save_checkpoint(folder, mesh, net, optimizer, link=link)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_rows_of_another_partition_are_dropped(size, tmp_path):
    worlds.run(saves, 3, tmp_path / "a")
    worlds.run(dropped, size, tmp_path / "a", size)


def mismatched(folder):
    mesh = worlds.mesh()
    _, net, optimizer = begin(mesh, "random")
    with pytest.raises(ValueError, match="only one has schedule"):
        pdc.load_checkpoint(folder, mesh, net, optimizer, link=pdc.Sylvie())


def test_another_kind_of_link_is_refused(tmp_path):
    worlds.run(saves, 3, tmp_path / "a")
    worlds.run(mismatched, 3, tmp_path / "a")

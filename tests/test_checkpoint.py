"""A run resumed from a checkpoint is the run that never stopped, on any rank count."""

from __future__ import annotations

import itertools
import math

import pytest
import tiers
import torch
import torch.nn.functional as F
import worlds
from problems import GRAPHS
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

import pyg_distcomm as pdc
from pyg_distcomm.loader import DistNeighborLoader
from pyg_distcomm.nn import DistGCNConv, DistSAGEConv

pytestmark = pytest.mark.usefixtures("place")


class Net(torch.nn.Module):
    def __init__(self, rows=None):
        super().__init__()
        self.conv1 = DistGCNConv(7, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.conv2 = DistSAGEConv(8, 4)
        if rows is not None:
            self.emb = torch.nn.Parameter(rows)

    def forward(self, x, edge_index):
        x = x + self.emb if hasattr(self, "emb") else x
        h = self.norm(self.conv1(x, edge_index)).relu()
        return self.conv2(F.dropout(h, 0.3, self.training), edge_index)


def _setup(cut, embedding):
    mesh = worlds.mesh()
    share = pdc.partition(GRAPHS["undirected"](), mesh, cut)
    torch.manual_seed(3)
    net = Net(torch.zeros_like(share.x) if embedding else None).double()
    model = pdc.replicate(net, mesh)
    return mesh, share, model, torch.optim.Adam(model.parameters(), lr=0.01)


def _steps(model, opt, share, n):
    losses = []
    for _ in range(n):
        opt.zero_grad()
        out = model(share.x, share.edge_index)
        loss = F.cross_entropy(out[share.train_mask], share.y[share.train_mask])
        loss.backward()
        opt.step()
        losses.append(float(loss))
    return losses


def _save(path, embedding):
    mesh, share, model, opt = _setup("random", embedding)
    _steps(model, opt, share, 4)
    pdc.save_checkpoint(path, mesh, model, opt, epoch=4)
    pdc.save_checkpoint(path, mesh, model, opt, epoch=4)  # replaces what is there
    return _steps(model, opt, share, 4)


def _resume(path, embedding):
    mesh, share, model, opt = _setup("block", embedding)
    extra = pdc.load_checkpoint(path, mesh, model, opt, epoch=0)
    assert extra == {"epoch": 4}
    return _steps(model, opt, share, 4)


@pytest.mark.parametrize("embedding", [tiers.rarely(False), True])
def test_resume_on_another_number_of_ranks(tmp_path, embedding):
    path = str(tmp_path / "ckpt")
    want = worlds.run(_save, 3, path, embedding)[0]
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]
    for size in (1, 4) if embedding else (2, 3):
        got = worlds.run(_resume, size, path, embedding)[0]
        assert got == pytest.approx(want, rel=1e-9)


def _damaged(path):
    mesh, _, model, opt = _setup("random", False)
    with pytest.raises(ValueError, match="cannot load checkpoint"):
        pdc.load_checkpoint(path + "-nowhere", mesh, model, opt)
    with pytest.raises(ValueError, match="cannot load checkpoint"):
        pdc.load_checkpoint(path, mesh, torch.nn.Linear(3, 3), None)


def test_a_checkpoint_that_does_not_fit_is_refused_on_all_ranks(tmp_path):
    path = str(tmp_path / "ckpt")
    worlds.run(_save, 2, path, False)
    worlds.run(_damaged, 2, path)


class LayerProfile(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        layer, widths = getattr(pdc.nn, kind), (64, 8, 8, 4)
        pairs = itertools.pairwise(widths)
        self.convs = torch.nn.ModuleList(layer(a, b) for a, b in pairs)

    def forward(self, x, edge_index):
        for conv in self.convs[:-1]:
            x = F.dropout(conv(x, edge_index).relu(), 0.3, self.training)
        return self.convs[-1](x, edge_index)


def _begun(grid, kind, make_link):
    mesh, link = worlds.mesh(grid=grid), make_link and make_link()
    torch.manual_seed(0)
    data = GRAPHS["undirected"]()
    data.x = torch.randn(data.num_nodes, 64)
    share = pdc.partition(data, mesh, "random", link=link)
    torch.manual_seed(1)
    net = LayerProfile(kind).to(share.x.device)
    return mesh, share, net, torch.optim.Adam(net.parameters(), lr=0.01), link


def _trained(run, epochs):
    """Trains in float32; returns the output of the last evaluation."""
    _, share, net, opt, link = run
    for _ in range(epochs):
        net.train()
        opt.zero_grad()
        F.cross_entropy(net(share.x, share.edge_index), share.y).backward()
        opt.step()
        if link is not None:
            link.step()
        net.eval()
        with torch.no_grad():
            out = net(share.x, share.edge_index).full_tensor()
    return out


def _straight_and_resumed(path, grid, kind, make_link, at):
    want = _trained(_begun(grid, kind, make_link), 6)
    run = _begun(grid, kind, make_link)
    _trained(run, at)
    pdc.save_checkpoint(path, *run[:1], *run[2:4], link=run[4])
    run = _begun(grid, kind, make_link)
    pdc.load_checkpoint(path, *run[:1], *run[2:4], link=run[4])
    return want, _trained(run, 6 - at)


def _sylvie():
    return pdc.Sylvie(1)


def _varco():
    return pdc.VARCO(6, slope=1)


RESUMED = [
    ((2, 1, 1), "GCNConv", None, 1),
    ((2, 1, 1), "SAGEConv", None, 4),
    ((1, 2, 1), "GATConv", None, 4),
    ((2, 1, 1), "GCNConv", _sylvie, 4),
    ((2, 1, 1), "GCNConv", _varco, 4),
    ((1, 2, 1), "GCNConv", None, 4),
    ((1, 1, 2), "SAGEConv", None, 1),
    ((2, 2, 1), "GCNConv", None, 4),
    ((4, 1, 1), "GCNConv", None, 4),
    ((2, 2, 2), "SAGEConv", None, 4),
    ((2, 1, 1), "GATConv", None, 4),
    ((2, 2, 1), "GATConv", _sylvie, 4),
    ((2, 1, 2), "GraphConv", None, 4),
    ((1, 2, 1), "GraphConv", _varco, 4),
]


@tiers.parametrize(("grid", "kind", "make_link", "at"), RESUMED, slice(0, 7, 3))
def test_a_resumed_run_is_the_straight_one_bit_for_bit(
    tmp_path, grid, kind, make_link, at
):
    path = str(tmp_path / "ckpt")
    args = path, grid, kind, make_link, at
    for want, got in worlds.run(_straight_and_resumed, math.prod(grid), *args):
        assert torch.equal(want, got)


def _goes_on(path, at):
    run = _begun(None, "GCNConv", None)
    pdc.load_checkpoint(path, *run[:1], *run[2:4])
    return _trained(run, 6 - at)


def test_on_another_number_of_ranks_only_rounding_differs(tmp_path):
    path = str(tmp_path / "ckpt")
    args = path, (2, 1, 1), "GCNConv", None, 4
    want = worlds.run(_straight_and_resumed, 2, *args)[0][0]
    for size in (1, 3):
        got = worlds.run(_goes_on, size, path, 4)[0]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = GCNConv(16, 96), GCNConv(96, 3)
        self.inner = GCNConv(96, 96)  # several buckets

    def forward(self, x, edge_index):
        x = self.inner(self.conv1(x, edge_index).relu(), edge_index).relu()
        return self.conv2(x, edge_index)


def _minibatches(path):
    """Saves inside an epoch of minibatches, goes on, and goes on again from the file."""
    draw = torch.Generator().manual_seed(0)
    edges = torch.randint(0, 300, (2, 2000), generator=draw)
    data = Data(x=torch.rand(300, 16, generator=draw), edge_index=edges)
    data.y = torch.arange(300) % 3
    ends = []
    for again in (False, True):
        mesh = worlds.mesh()
        torch.manual_seed(0)
        model = pdc.replicate(Plain(), mesh)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        loader = DistNeighborLoader(data, [5, 5], batch_size=16, seed=0, shuffle=True)
        if again:
            state = pdc.load_checkpoint(
                path, mesh, model, optimizer, loader=loader.state_dict()
            )
            loader.load_state_dict(state["loader"])
        for number, batch in enumerate(loader):
            batch = batch.to(next(model.parameters()).device)
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            F.cross_entropy(out, batch.y[: batch.batch_size]).backward()
            optimizer.step()
            if number == 1 and not again:
                state = loader.state_dict()
                pdc.save_checkpoint(path, mesh, model, optimizer, loader=state)
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize("size", [3, tiers.rarely(2), tiers.rarely(4)])
def test_minibatches_go_on_bit_for_bit(tmp_path, size):
    worlds.run(_minibatches, size, str(tmp_path / "run"))


def test_an_optimizer_of_another_model_is_refused(tmp_path):
    mesh, net = pdc.init(), torch.nn.Linear(2, 2)
    own = torch.optim.Adam(net.parameters())
    other = torch.optim.Adam(torch.nn.Linear(3, 3).parameters())
    with pytest.raises(ValueError, match=r"first of shape \[3, 3\].* not the Linear's"):
        pdc.save_checkpoint(tmp_path / "run", mesh, net, other)
    assert not list(tmp_path.iterdir())
    pdc.save_checkpoint(tmp_path / "run", mesh, net, own)
    with pytest.raises(ValueError, match="give the optimizer of this model"):
        pdc.load_checkpoint(tmp_path / "run", mesh, net, other)


class _Partly(torch.nn.Module):
    """Has a layer that a loss never reads, as the last layers of typed graphs do."""

    def __init__(self):
        super().__init__()
        self.read, self.unread = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)

    def forward(self, x):
        return self.read(x)


def test_parameters_without_gradients_are_resumed_without_state(tmp_path):
    mesh, x = worlds.mesh(), torch.rand(4, 3)

    def trained(model, optimizer, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()

    def made():
        torch.manual_seed(0)
        model = _Partly()
        return model, torch.optim.Adam(model.parameters(), lr=0.1, weight_decay=0.1)

    whole, first, again = made(), made(), made()
    trained(*whole, 5)
    trained(*first, 2)
    pdc.save_checkpoint(tmp_path / "one", mesh, *first)
    pdc.load_checkpoint(tmp_path / "one", mesh, *again)
    assert len(again[1].state) == 2  # weight and bias of the layer that is read
    trained(*again, 3)
    for one, two in zip(again[0].parameters(), whole[0].parameters(), strict=True):
        assert torch.equal(one, two)

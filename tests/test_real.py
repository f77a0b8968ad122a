"""Real graphs: the numbers of single-process PyG, at any number of ranks."""

from __future__ import annotations

import statistics

import pytest
import real
import tiers
import torch
import torch.nn.functional as F
import worlds
from alike import whole
from torch_geometric.nn import GATv2Conv, GCNConv, SAGEConv

import pyg_distcomm as pdc
from pyg_distcomm.nn import DistGCNConv, DistSAGEConv, HaloConv

pytestmark = pytest.mark.data


class Net(torch.nn.Module):
    """Two layers with dropout, as the GCN of [Kipf17] for Cora."""

    def __init__(self, kind, data, ours=False, dropout=0.0):
        super().__init__()
        theirs = {"gcn": GCNConv, "sage": SAGEConv, "gat": GATv2Conv}
        make = {**theirs, "gcn": DistGCNConv, "sage": DistSAGEConv} if ours else theirs
        self.conv1 = make[kind](data.x.size(1), 16)
        self.conv2 = make[kind](16, int(data.y.max()) + 1)
        self.dropout = dropout
        if kind == "gat" and ours:
            self.conv1, self.conv2 = HaloConv(self.conv1), HaloConv(self.conv2)

    def forward(self, x, edge_index):
        x = F.dropout(x, self.dropout, self.training)
        x = self.conv1(x, edge_index).relu()
        return self.conv2(F.dropout(x, self.dropout, self.training), edge_index)


def _train(net, model, data):
    opt = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(2):
        opt.zero_grad()
        out = model(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        opt.step()
    found = {"loss": loss.detach(), "out": out.detach()}
    for name, p in net.named_parameters():
        found[name], found[f"grad {name}"] = p.detach(), p.grad
    return found


def _parity(file, kind, cutter, grid, dtype, tol):
    data = real.read(file, dtype)
    torch.manual_seed(0)
    plain = Net(kind, data).to(dtype)
    want = _train(plain, plain, data)
    mesh = worlds.mesh(grid=grid)
    torch.manual_seed(0)
    net = Net(kind, data, ours=True).to(dtype)
    share = pdc.partition(data, mesh, cutter)
    got = _train(net, pdc.replicate(net, mesh), share)
    for name, value in got.items():
        close = {"rtol": tol, "atol": tol, "msg": name}
        torch.testing.assert_close(whole(value), want[name], **close)


@pytest.mark.parametrize(
    ("name", "kind", "cutter", "grid", "dtype", "tol"),
    [
        tiers.rarely("Cora", "gcn", "metis", (1, 1, 1), torch.float64, 1e-9),
        tiers.rarely("Cora", "gcn", "metis", (8, 1, 1), torch.float64, 1e-9),
        tiers.rarely("Cora", "sage", "ldg", (2, 2, 2), torch.float64, 1e-9),
        ("Cora", "gat", "random", (3, 1, 1), torch.float64, 1e-9),
        tiers.rarely("CiteSeer", "gcn", "random", (3, 2, 1), torch.float64, 1e-9),
        tiers.rarely("CiteSeer", "sage", "block", (1, 1, 3), torch.float32, 1e-4),
        tiers.rarely("Computers", "gcn", "metis", (4, 1, 1), torch.float32, 1e-4),
        tiers.rarely("Computers", "sage", "ldg", (2, 1, 1), torch.float64, 1e-9),
        tiers.rarely("tolokers", "gcn", "ldg", (2, 1, 1), torch.float64, 1e-9),
        tiers.rarely("tolokers", "sage", "metis", (2, 2, 1), torch.float32, 1e-4),
    ],
)
def test_two_steps_equal_pyg(name, kind, cutter, grid, dtype, tol):
    size = grid[0] * grid[1] * grid[2]
    args = (real.path(name), kind, cutter, grid, dtype, tol)
    worlds.run(_parity, size, *args, deadline=300)


def _published(net, model, data, epochs):
    decay = [{"params": net.conv1.parameters(), "weight_decay": 5e-4}]
    opt = torch.optim.Adam([*decay, {"params": net.conv2.parameters()}], lr=0.01)
    for _ in range(epochs):
        net.train()
        opt.zero_grad()
        out = model(data.x, data.edge_index)
        F.cross_entropy(out[data.train_mask], data.y[data.train_mask]).backward()
        opt.step()
    net.eval()
    with torch.no_grad():
        right = model(data.x, data.edge_index).argmax(-1) == data.y
        return int(right[data.test_mask].sum())


def _ours(file, seed, epochs, dtype):
    mesh = worlds.mesh()
    mesh.load_state_dict({"seed": seed, "step": 0})
    data = _normalised(file, dtype)
    share = pdc.partition(data, mesh, "metis")
    torch.manual_seed(seed)
    net = Net("gcn", data, ours=True, dropout=0.5).to(dtype)
    return _published(net, pdc.replicate(net, mesh), share, epochs)


def _normalised(file, dtype):
    data = real.read(file, dtype)
    data.x = data.x / data.x.sum(-1, keepdim=True).clamp(min=1)
    return data


@tiers.rare
def test_accuracy_does_not_depend_on_ranks():
    file = real.path("Cora")
    exact = [worlds.run(_ours, p, file, 0, 60, torch.float64)[0] for p in (1, 2, 4)]
    assert len(set(exact)) == 1
    single = [worlds.run(_ours, p, file, 0, 60, torch.float32)[0] for p in (1, 4)]
    assert max(single) - min(single) <= 2
    assert exact[0] > 780


@pytest.mark.exhaustive
def test_published_accuracy_over_ten_seeds(capsys):
    file = real.path("Cora")
    data, ours, theirs = _normalised(file, torch.float32), [], []
    for seed in range(10):
        torch.manual_seed(seed)
        net = Net("gcn", data, dropout=0.5)
        theirs.append(_published(net, net, data, 200) / 10)
        ours.append(worlds.run(_ours, 2, file, seed, 200, torch.float32)[0] / 10)
    spread = statistics.stdev(theirs) + statistics.stdev(ours)
    with capsys.disabled():
        print(f"\nPyG {statistics.mean(theirs):.2f} +- {statistics.stdev(theirs):.2f}")
        print(f"2 ranks {statistics.mean(ours):.2f} +- {statistics.stdev(ours):.2f}")
    assert abs(statistics.mean(ours) - statistics.mean(theirs)) < spread

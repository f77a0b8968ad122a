"""One training step on ranks against single-process PyG, compared piece by piece."""

from __future__ import annotations

import second_device
import torch
import torch.nn.functional as F
import worlds
from problems import GRAPHS, owners
from torch_geometric.nn import GCNConv, SAGEConv

import pyg_distcomm as pdc
from pyg_distcomm.nn import DistGCNConv, DistSAGEConv


class Net(torch.nn.Module):
    """GCN, SAGE, batch norm, centring, a temperature: all the global pieces at once."""

    def __init__(self, gcn, sage, f, classes, kind):
        super().__init__()
        self.kind = kind
        hidden = 9 if kind != "narrow" else 3
        self.conv1 = gcn(f, hidden, improved=kind == "improved", bias=False)
        self.norm = torch.nn.BatchNorm1d(hidden)
        self.conv2 = sage(hidden, 5, aggr="sum" if kind == "sum" else "mean")
        self.conv3 = gcn(5, classes, normalize=kind != "raw")
        self.temperature = torch.nn.Parameter(torch.tensor(1.7))

    def forward(self, x, edge_index, edge_weight):
        h = self.conv1(x, edge_index, edge_weight)
        h = self.norm(h).relu()
        h = h - h.mean(0)
        h = self.conv2(h, edge_index)
        return self.conv3(h, edge_index, edge_weight) * self.temperature


def single(data, kind, steps=0, optimizer="sgd"):
    torch.manual_seed(7)
    net = Net(GCNConv, SAGEConv, data.x.size(1), 4, kind).double()
    return _run(
        net, net, data, data.x.clone(), data.edge_weight.clone(), steps, optimizer
    )


def _run(net, model, data, x, weight, steps, optimizer):
    make = torch.optim.SGD if optimizer == "sgd" else torch.optim.Adam
    opt = make(net.parameters(), lr=0.05)
    for _ in range(steps):
        opt.zero_grad()
        _loss(model(x, data.edge_index, weight), net, data).backward()
        opt.step()
    opt.zero_grad()
    x.requires_grad_(), weight.requires_grad_()
    out = model(x, data.edge_index, weight)
    loss = _loss(out, net, data)
    loss.backward()
    found = {
        "out": out.detach(),
        "loss": loss.detach(),
        "x": x.grad,
        "weight": weight.grad,
    }
    for name, p in net.named_parameters():
        found[f"grad {name}"], found[f"value {name}"] = p.grad, p.detach()
    found["running"] = net.norm.running_var
    return found


def _loss(out, net, data):
    mask = data.train_mask
    pair = torch.arange(data.num_nodes)
    scores = (out[pair] * out[pair.flip(0)]).sum(-1)
    masked = F.cross_entropy(out[mask], data.y[mask])
    return masked + 0.01 * net.conv1.lin.weight.square().sum() + 0.001 * scores.mean()


def compare(
    graph, cutter, grid, kind, steps=0, optimizer="sgd", halo="auto", place="cpu"
):
    """Runs on this rank of the world, and asserts every piece equal to PyG's on the CPU."""
    device, tol = second_device.device_of(place), 1e-9
    data = GRAPHS[graph]()
    want = single(data, kind, steps, optimizer)
    mesh = worlds.mesh(grid=grid)
    torch.manual_seed(7)
    net = Net(DistGCNConv, DistSAGEConv, data.x.size(1), 4, kind).double().to(device)
    share = pdc.partition(data, mesh, owners(cutter, data, mesh.size)).to(device)
    share.edge_index = share.edge_index.with_halo(halo)
    net = model = pdc.convert(net)
    if place != "spare":  # of which DistributedDataParallel knows no back end
        model = pdc.replicate(net, mesh)
        net = model.module
    got = _run(net, model, share, share.x, share.edge_weight, steps, optimizer)
    for name, value in got.items():
        if isinstance(value, pdc.DistTensor):
            value = value.full_tensor()
        assert value.device == device, (name, value.device)
        torch.testing.assert_close(
            value.cpu(),
            want[name],
            rtol=tol,
            atol=tol,
            equal_nan=True,
            msg=_where(name, graph),
        )


def _where(name, graph):
    return lambda text: f"{name} on {graph}: {text}"

"""Real graphs: the published accuracy, as single-process PyG has it."""

import statistics

import pytest
import real
import torch
import torch.nn.functional as F
import worlds
from links import Dropping
from torch_geometric.nn import GCNConv

import pyg_distcomm as pdc
from pyg_distcomm.nn import DistGCNConv

pytestmark = pytest.mark.data


def _network(data, layer):
    """Two layers with dropout, as the GCN of [Kipf17] for Cora."""
    return Dropping(layer, (data.x.size(1), 16, int(data.y.max()) + 1))


def _published(net, model, data, epochs):
    decay = [{"params": net.layers[0].parameters(), "weight_decay": 5e-4}]
    opt = torch.optim.Adam([*decay, {"params": net.layers[1].parameters()}], lr=0.01)
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
    net = _network(data, DistGCNConv).to(dtype)
    return _published(net, pdc.replicate(net, mesh), share, epochs)


def _normalised(file, dtype):
    data = real.read(file, dtype)
    data.x = data.x / data.x.sum(-1, keepdim=True).clamp(min=1)
    return data


@pytest.mark.exhaustive
def test_published_accuracy_over_ten_seeds(capsys):
    file = real.path("Cora")
    data, ours, theirs = _normalised(file, torch.float32), [], []
    for seed in range(10):
        torch.manual_seed(seed)
        net = _network(data, GCNConv)
        theirs.append(_published(net, net, data, 200) / 10)
        ours.append(worlds.run(_ours, 2, file, seed, 200, torch.float32)[0] / 10)
    spread = statistics.stdev(theirs) + statistics.stdev(ours)
    with capsys.disabled():
        print(f"\nPyG {statistics.mean(theirs):.2f} +- {statistics.stdev(theirs):.2f}")
        print(f"2 ranks {statistics.mean(ours):.2f} +- {statistics.stdev(ours):.2f}")
    assert abs(statistics.mean(ours) - statistics.mean(theirs)) < spread

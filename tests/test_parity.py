"""Everything a training step computes equals single-process PyG, on any grid."""

import itertools

import alike
import pytest
import second_device
import tiers
import torch
import torch.nn.functional as F
import worlds
from problems import CUTTERS, GRAPHS, grids, owners
from torch_geometric.nn import GCNConv, SAGEConv

import pyg_distcomm as pdc
from pyg_distcomm.nn import DistGCNConv, DistSAGEConv

pytestmark = pytest.mark.usefixtures("place")


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
    device = second_device.device_of(place)
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
        value = alike.whole(value)
        assert value.device == device, (name, value.device)
        alike.same(value.cpu(), want[name], f"{name} on {graph}")


KINDS = ("plain", "sum", "improved", "raw", "narrow")


def _covering():
    """Every pair of (graph, cutter), with ranks, grids and kinds going round."""
    sizes = itertools.cycle((1, 2, 3, 4, 6, 4))  # no multiple of the kinds
    kinds = itertools.cycle(KINDS)
    turn = {size: itertools.cycle(grids(size)) for size in (1, 2, 3, 4, 6)}
    for graph, cutter in itertools.product(GRAPHS, CUTTERS):
        size = next(sizes)
        yield graph, cutter, size, next(turn[size]), next(kinds)


COVERING = [case for case in _covering() if case[2] <= 4][::6]


@pytest.mark.parametrize(("graph", "cutter", "size", "grid", "kind"), COVERING)
def test_step_equals_pyg(graph, cutter, size, grid, kind, place):
    worlds.run(compare, size, graph, cutter, grid, kind, 0, "sgd", "auto", place)


def test_every_grid():
    """Those of four ranks, but for three that test_whatever_travels has."""
    for k, grid in enumerate(grids(4)[:3]):
        worlds.run(compare, 4, "directed", "random", grid, KINDS[k % len(KINDS)])


@pytest.mark.parametrize("grid", [tiers.rarely((3, 2, 1)), (2, 2, 2)])
def test_more_than_four_ranks(grid):
    """The default tier's one step on six ranks, and one on eight."""
    size = grid[0] * grid[1] * grid[2]
    worlds.run(compare, size, "directed", "random", grid, "plain")


@tiers.parametrize("optimizer", ["sgd", "adam"], ["adam"])
@tiers.parametrize("size", [1, 3, 4], [3])
def test_ten_steps(size, optimizer, place):
    grid = {1: (1, 1, 1), 3: (3, 1, 1), 4: (2, 2, 1)}[size]
    how = "plain", 10, optimizer, "auto", place
    worlds.run(compare, size, "undirected", "metis", grid, *how)


@tiers.cover(
    ("halo", "grid"),
    ["rows", "sums", "cover", "blocks"],
    [(4, 1, 1), (2, 2, 1), (2, 1, 2)],
)
def test_whatever_travels(grid, halo, place):
    how = "plain", 0, "sgd", halo, place
    worlds.run(compare, 4, "directed", "random", grid, *how)


@tiers.parametrize("graph", GRAPHS, [])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8])
def test_exhaustive(graph, size):
    worlds.only(size)
    for cutter, grid, kind in itertools.product(CUTTERS, grids(size), KINDS):
        worlds.run(compare, size, graph, cutter, grid, kind)

"""The same numbers on CUDA tensors: one process, gloo ranks on one GPU, and NCCL."""

import copy

import pytest
import torch
import torch.nn.functional as F
from batches import arguments
from problems import GRAPHS
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, GraphSAGE, SAGEConv

import pyg_distcomm as pdc
from pyg_distcomm.loader import NeighborLoader
from pyg_distcomm.nn import DistGCNConv, DistSAGEConv, HaloConv

pytestmark = pytest.mark.cuda


class Net(torch.nn.Module):
    def __init__(self, ours):
        super().__init__()
        gat = GATv2Conv(8, 6, heads=2)
        self.conv1 = (DistGCNConv if ours else GCNConv)(7, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.conv2 = HaloConv(gat) if ours else gat
        self.conv3 = (DistSAGEConv if ours else SAGEConv)(12, 4)

    def forward(self, x, edge_index, weight):
        h = self.norm(self.conv1(x, edge_index, weight)).relu()
        return self.conv3(self.conv2(h, edge_index).relu(), edge_index)


def _step(backend, device):
    mesh = pdc.init(backend=backend, device=device)
    data = GRAPHS["undirected"]()
    torch.manual_seed(0)
    plain = Net(ours=False).double()
    torch.manual_seed(0)
    net = Net(ours=True).double().to(mesh.device)
    share = pdc.partition(data, mesh, "random").to(mesh.device)
    model = pdc.replicate(net, mesh)
    out = model(share.x, share.edge_index, share.edge_weight)
    F.cross_entropy(out[share.train_mask], share.y[share.train_mask]).backward()
    want = plain(data.x, data.edge_index, data.edge_weight)
    F.cross_entropy(want[data.train_mask], data.y[data.train_mask]).backward()
    torch.testing.assert_close(out.full_tensor().cpu(), want)
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.cpu(), q.grad)
    return str(out.device)


def test_one_process():
    assert _step(None, "cuda:0").startswith("cuda")


def test_gloo_ranks_share_one_gpu():
    found = pdc.launch(_step, 2, "gloo", "cuda:0", timeout=120)
    assert all(d.startswith("cuda") for d in found)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU per rank")
def test_nccl():
    pdc.launch(_step, 2, "nccl", None, timeout=120)


def test_layers_on_ordinary_tensors_wait_for_nothing():
    """Edges are read when they are met the second time; torch raises where one waits after."""
    data = GRAPHS["undirected"]()
    for kind in (GCNConv, SAGEConv, GATConv):
        torch.manual_seed(0)
        plain = kind(7, 4).double()
        conv = pdc.convert(copy.deepcopy(plain)).to("cuda")
        there = data.clone().to("cuda")
        for _ in range(3):
            conv(there.x, there.edge_index).sum().backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            out = conv(there.x, there.edge_index)
            out.sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(out.cpu(), plain(data.x, data.edge_index))


@pytest.mark.parametrize("layer", [GCNConv, SAGEConv, GATConv])
def test_a_step_is_captured_as_a_cuda_graph(layer):
    data = GRAPHS["undirected"]()
    plain = layer(7, 4).double()
    conv = pdc.convert(copy.deepcopy(plain)).to("cuda")
    x, edges = data.x.double().cuda(), data.edge_index.cuda()

    def step():
        out = conv(x, edges)
        out.square().sum().backward()
        return out

    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):  # as torch asks for: warm up on a stream of its own
        for _ in range(3):
            conv.zero_grad(set_to_none=True)
            step()
    torch.cuda.current_stream().wait_stream(beside)
    conv.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    other = torch.rand(x.shape, dtype=x.dtype)
    x.copy_(other)
    graph.replay()
    want = plain(other, data.edge_index)
    want.square().sum().backward()
    torch.testing.assert_close(out.cpu(), want)
    for p, q in zip(conv.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.cpu(), q.grad)


def test_minibatches_on_the_device_are_trimmed():
    data = GRAPHS["undirected"]()
    torch.manual_seed(0)
    plain = GraphSAGE(7, 6, 2, 4).double()
    model = pdc.convert(copy.deepcopy(plain)).to("cuda")
    for options in ({}, {"device": "cuda"}):
        for batch in NeighborLoader(data, [3, 2], **arguments(batch_size=9, **options)):
            batch = batch.to("cuda")
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            host = batch.cpu()
            want = plain(host.x, host.edge_index)[: batch.batch_size]
            torch.testing.assert_close(out.cpu(), want)
    assert pdc.nn.trimming_of(model) == "on"

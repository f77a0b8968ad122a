"""A GCN on the full graph, as a script that a type checker reads."""

import torch
import torch.nn.functional as F
from torch_geometric.data.data import Data
from typing_extensions import reveal_type

import pyg_distcomm as pdc
from pyg_distcomm.nn import GCNConv


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(16, 4)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return F.log_softmax(self.conv(x, edge_index), dim=-1)


def train(whole: Data) -> float:
    mesh = pdc.init("1.5d", replication=2, seed=1)
    data = pdc.partition(whole, mesh, link=pdc.Sylvie(bits=1))
    reveal_type(mesh)  # Mesh
    reveal_type(data)  # Data
    reveal_type(GCNConv(16, 4))  # DistGCNConv
    model = pdc.replicate(Net(), mesh)
    loss = F.nll_loss(model(data.x, data.edge_index), torch.as_tensor(data.y))
    loss.backward()
    return float(loss)

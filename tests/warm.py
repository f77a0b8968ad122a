"""What every rank would load first, loaded once, in the process that ranks are forked from."""

from __future__ import annotations

import templates  # noqa: F401 - keeps what PyG compiles for each class of layers
import torch
from torch_geometric.nn import GCNConv, SAGEConv

from pyg_distcomm import kernels


def warm():
    GCNConv(1, 1), SAGEConv(1, 1)  # PyG writes their code when they are made
    rowptr, col = torch.tensor([0, 1]), torch.tensor([0])
    for dtype in (torch.float32, torch.float64):
        x = torch.ones(1, 1, dtype=dtype)
        kernels.gather_rows(x, col)
        kernels.spmm(rowptr, col, x.view(-1), x)


warm()

"""Measures an epoch of a GCN against PyG's own layer, on one process."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

from pyg_distcomm.cli.bench import measure
from pyg_distcomm.comm.ledger import format_table
from pyg_distcomm.comm.mesh import init
from pyg_distcomm.datasets import generated
from pyg_distcomm.graph.partitioning import partition
from pyg_distcomm.nn.gcn_conv import DistGCNConv


class Net(torch.nn.Module):
    """Two graph convolutions: in -> hidden -> classes."""

    def __init__(self, conv: type[GCNConv], widths: tuple[int, int, int]) -> None:
        super().__init__()
        self.conv1 = conv(widths[0], widths[1], cached=True)
        self.conv2 = conv(widths[1], widths[2], cached=True)

    def forward(self, data: Data) -> Tensor:
        """Returns a score per class."""
        x = self.conv1(data.x, data.edge_index).relu()
        out: Tensor = self.conv2(x, data.edge_index)
        return out


def epoch(conv: type[GCNConv], data: Data, widths: tuple[int, int, int]) -> Callable:
    """Returns a function that trains one epoch on a Data."""
    torch.manual_seed(0)
    net = Net(conv, widths)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)

    def train() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(data)[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train


def run(
    num_nodes: int = 50_000, hidden: tuple[int, ...] = (16, 64, 256), repeats: int = 5
) -> str:
    """Returns a table: our milliseconds an epoch, and PyG's over ours, by width.

    The graph is `datasets.generated`; both layers cache the normalised matrix.
    """
    whole = generated(num_nodes)
    share = partition(whole, init())
    rows = []
    for width in hidden:
        widths = whole.num_features, width, int(whole.y.max()) + 1
        ways = {
            "ours": epoch(DistGCNConv, share, widths),
            "pyg": epoch(GCNConv, whole, widths),
        }
        took = measure(ways, repeats)
        ratio = took["pyg"] / took["ours"]
        rows.append(
            (width, f"{took['ours']:.1f}", f"{took['pyg']:.1f}", f"{ratio:.2f}")
        )
    return format_table(("hidden", "ours, ms", "PyG, ms", "PyG / ours"), rows)

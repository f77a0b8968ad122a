"""Epochs on tensors sharded below autograd, beside today's: processor time and bytes.

    torchrun --standalone --nproc-per-node 2 benchmarks/below_autograd.py [--write REPORT.md]

Two layers and Adam, full graph, uniform edges, one thread per rank. Both take turns, epoch by
epoch, in one process; the least processor time of six epochs is compared, after three.
"PyG's class" runs as PyG wrote it; "fast" is the class of `sharded/layers.py`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from tables import markdown
from torch_geometric.data import Data

import pyg_distcomm as pdc
import pyg_distcomm.nn as today
from pyg_distcomm.sharded import layers as fast
from pyg_distcomm.sharded.share import sharded

GRAPHS = ((2_000, 8, 32), (30_000, 16, 64))  # nodes, edges per node, features
LAYERS = (
    ("GraphConv", "PyG's class", pyg.GraphConv, today.GraphConv, {}),
    ("GIN", "PyG's class", pyg.GINConv, today.GINConv, {}),
    ("SAGE max", "PyG's class", pyg.SAGEConv, today.SAGEConv, {"aggr": "max"}),
    ("GCN", "fast", fast.DistGCNConv, today.GCNConv, {}),
    ("SAGE", "fast", fast.DistSAGEConv, today.SAGEConv, {}),
    ("GAT", "PyG's class", pyg.GATConv, today.GATConv, {"heads": 2, "concat": False}),
    ("GAT", "fast", fast.DistGATConv, today.GATConv, {"heads": 2, "concat": False}),
    ("GATv2", "PyG's class", pyg.GATv2Conv, today.GATv2Conv, {"concat": False}),
    ("GATv2", "fast", fast.DistGATv2Conv, today.GATv2Conv, {"concat": False}),
)


class Net(torch.nn.Module):
    """Two layers of one class."""

    def __init__(self, kind: type, features: int, options: dict) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = []
        for ends in ((features, 64), (64, 8)):
            given = ends
            if issubclass(kind, pyg.GINConv):
                lins = torch.nn.Linear(*ends), torch.nn.Linear(ends[1], ends[1])
                given = (torch.nn.Sequential(lins[0], torch.nn.ReLU(), lins[1]),)
            layers.append(kind(*given, **options))
        self.first, self.last = layers

    def forward(self, data: Data) -> torch.Tensor:
        hidden = self.first(data.x, data.edge_index).relu()
        return self.last(hidden, data.edge_index)


def graph(nodes: int, degree: int, features: int) -> Data:
    """A uniform graph with labels of eight classes."""
    g = torch.Generator().manual_seed(0)
    return Data(
        x=torch.randn(nodes, features, generator=g),
        edge_index=torch.randint(0, nodes, (2, nodes * degree), generator=g),
        y=torch.randint(0, 8, (nodes,), generator=g),
        train_mask=torch.rand(nodes, generator=g) < 0.5,
    )


def compare(mesh: pdc.Mesh, rivals: dict[str, tuple[Net, Data]]) -> list[str]:
    """Least milliseconds of processor time, their ratio, and bytes that this rank receives."""
    optimizers = {
        k: torch.optim.Adam(net.parameters()) for k, (net, _) in rivals.items()
    }
    least, received, losses = {}, {}, {}
    for epoch in range(9):
        for name, (net, data) in rivals.items():
            before = sum(e.bytes for e in mesh.ledger.entries.values())
            start = time.process_time()
            optimizers[name].zero_grad()
            out = net(data)
            loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
            loss.backward()
            optimizers[name].step()
            spent = time.process_time() - start
            if epoch > 2:
                least[name] = min(spent, least.get(name, spent))
            losses[name] = float(loss.detach())
            received[name] = sum(e.bytes for e in mesh.ledger.entries.values()) - before
    assert abs(losses["new"] - losses["today"]) < 1e-4, losses
    times = [f"{1e3 * least[k]:.1f}" for k in ("today", "new")]
    ratio = f"{least['new'] / least['today']:.2f}"
    return [*times, ratio, *(f"{received[k]:,}" for k in ("today", "new"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="a file for the table")
    args = parser.parse_args()
    torch.set_num_threads(1)
    mesh = pdc.init()
    lines = [
        "| nodes | layer | as | today, ms | new, ms | new / today | bytes today | bytes new |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for size in GRAPHS:
        today_share = pdc.partition(graph(*size), mesh, "block")
        new_share = sharded(today_share)
        for name, how, new_kind, kind, options in LAYERS:
            rivals = {
                "today": (Net(kind, size[2], options), today_share),
                "new": (Net(new_kind, size[2], options), new_share),
            }
            row = [f"{size[0]:,}", name, how, *compare(mesh, rivals)]
            lines.append("| " + " | ".join(row) + " |")
            if mesh.rank == 0:
                print(lines[-1], flush=True)
    if args.write and mesh.rank == 0:
        usage = (__doc__ or "").partition("\n\n")[2]
        title = "# Tensors sharded below autograd\n\n"
        facts = f"torch {torch.__version__}, {mesh.size} ranks.\n\n"
        text = title + usage + "\n" + facts + "\n".join(lines) + "\n"
        args.write.write_text(markdown(text))


if __name__ == "__main__":
    main()

"""One full-graph GCN epoch: ours against PyG's GCNConv, and two ranks against one.

    python benchmarks/epoch.py [--scale 18] [--epochs 5] [--write REPORT.md]

Three layers 128-128-128-32 and Adam on an R-MAT graph. Competitors take turns, in one
process and one run; medians are compared. Two ranks of one thread run after one rank of
two threads, on the same cores.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import spmm as bench
import torch
import torch.nn.functional as F
from tables import from_text
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

import pyg_distcomm as pdc
from pyg_distcomm.comm.ledger import format_table
from pyg_distcomm.nn import DistGCNConv

WIDTHS = (128, 128, 128, 32)


class GCN(torch.nn.Module):
    """The model of all competitors."""

    def __init__(self, conv: type[GCNConv], **kwargs: object) -> None:
        super().__init__()
        pairs = itertools.pairwise(WIDTHS)
        self.convs = torch.nn.ModuleList(conv(f, g, **kwargs) for f, g in pairs)

    def forward(self, x, edge_index):
        for conv in self.convs[:-1]:
            x = conv(x, edge_index).relu()
        return self.convs[-1](x, edge_index)


def trainer(model: torch.nn.Module, x, edge_index, y) -> Callable[[], float]:
    """Returns a function that trains one epoch and says how long it took."""
    opt = torch.optim.Adam(model.parameters(), lr=0.01)

    def epoch() -> float:
        start = time.perf_counter()
        opt.zero_grad()
        F.cross_entropy(model(x, edge_index), y).backward()
        opt.step()
        return time.perf_counter() - start

    return epoch


def graph(scale: int) -> Data:
    """Returns the R-MAT graph with random features and labels."""
    row, col, n = bench.rmat(scale)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, WIDTHS[0], generator=generator)
    y = torch.randint(0, WIDTHS[-1], (n,), generator=generator)
    return Data(x=x, y=y, edge_index=torch.stack([row, col]))


def against_pyg(data: Data, epochs: int) -> list[tuple]:
    """Times one process with one thread: PyG in two forms, and us."""
    torch.set_num_threads(1)
    n, share = data.num_nodes, pdc.partition(data, pdc.init())
    ones = torch.ones(data.num_edges)
    adj_t = torch.sparse_coo_tensor(
        data.edge_index.flip(0), ones, (n, n)
    ).to_sparse_csr()
    runs = {
        "PyG, edge_index, cached": (GCN(GCNConv, cached=True), data.x, data.edge_index),
        "PyG, torch.sparse CSR": (GCN(GCNConv), data.x, adj_t),
        "pyg_distcomm": (GCN(DistGCNConv), share.x, share.edge_index),
    }
    jobs = {
        name: trainer(model, x, e, share.y if "dist" in name else data.y)
        for name, (model, x, e) in runs.items()
    }
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for job in jobs.values():
        job()
    for _ in range(epochs):
        for name, job in jobs.items():
            times[name].append(job())
    ours = statistics.median(times["pyg_distcomm"])
    return [
        (name, statistics.median(found), statistics.median(found) / ours)
        for name, found in times.items()
    ]


def rank_main(file: str, epochs: int) -> tuple[float, int]:
    """Trains on one of several ranks; returns its median epoch and its bytes."""
    data = Data(**torch.load(file, weights_only=True))
    mesh = pdc.init()
    share = pdc.partition(data, mesh)
    del data
    model = pdc.replicate(GCN(DistGCNConv), mesh)
    epoch = trainer(model, share.x, share.edge_index, share.y)
    epoch()
    mesh.ledger.reset()
    found = [epoch() for _ in range(epochs)]
    return statistics.median(found), mesh.ledger.bytes() // epochs


def on_ranks(data: Data, epochs: int) -> list[tuple]:
    """Times one rank with two threads, then two ranks with one."""
    rows = []
    with tempfile.TemporaryDirectory() as room:
        file = f"{room}/graph.pt"
        torch.save(data.to_dict(), file)
        for ranks, threads in ((1, 2), (2, 1)):
            found = pdc.launch(rank_main, ranks, file, epochs, threads=threads)
            slowest = max(seconds for seconds, _ in found)
            rows.append(
                (ranks, threads, slowest, max(sent for _, sent in found) / 2**20)
            )
    return [(*row, rows[0][2] / row[2]) for row in rows]


def main() -> None:
    """Runs both comparisons and prints (or writes) the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--scale", type=int, default=18)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    data = graph(args.scale)
    heads = (
        ("one process, one thread", "s/epoch", "times ours"),
        ("ranks", "threads each", "s/epoch", "MiB/epoch", "speed-up"),
    )
    tables = [
        format_table(heads[0], against_pyg(data, args.epochs)),
        format_table(heads[1], on_ranks(data, args.epochs)),
    ]
    text = "\n\n".join(tables)
    print(text)
    if args.write:
        versions = f"torch {torch.__version__}, Python {platform.python_version()}"
        args.write.write_text(
            f"# A full-graph epoch of a GCN\n\n`python benchmarks/epoch.py --scale "
            f"{args.scale} --epochs {args.epochs}`; {versions}; R-MAT graph of "
            f"{data.num_nodes:,} nodes and {data.num_edges:,} edges, GCN {WIDTHS}, Adam, "
            f"float32; medians, competitors in turn.\n\n{from_text(text)}\n"
        )


if __name__ == "__main__":
    main()

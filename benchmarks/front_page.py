"""The chart of the README: an epoch of PyG, of the swapped imports, and of two ranks.

    python benchmarks/front_page.py [--nodes 170000] [--edges 1200000] [--rounds 3]
        [--epochs 3] [--write docs/img/epoch.svg]

A GCN of three layers, 128-128-128-40, with Adam in float32, on a generated graph of nested
communities (`communities.py`). The competitors:

- PyG as its tutorial writes it (`edge_index`), and PyG at its best (a CSR matrix of torch);
- the same script with its imports swapped, in one process;
- that script on two ranks, cut by METIS.

One process has two threads, and each of two ranks has one, so all use the same two cores.
They take turns, and the chart has the fastest epoch of each, since other work on the machine
only adds time. An epoch of two ranks ends when the slower one ends. Bytes are those that the
busier rank receives, as the ledger counts them.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import warnings
from pathlib import Path

import torch
from communities import communities
from epoch import trainer
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

import pyg_distcomm as pdc
from pyg_distcomm.comm.ledger import format_table
from pyg_distcomm.nn import DistGCNConv

WIDTHS = (128, 128, 128, 40)
LINES = {  # label -> ranks, threads each
    "PyG, edge_index": (1, 2),
    "PyG, torch.sparse CSR": (1, 2),
    "imports swapped, 1 process": (1, 2),
    "imports swapped, 2 ranks": (2, 1),
}
GREY, BLUE, ORANGE = "#8a8a8a", "#0072B2", "#D55E00"


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


def one_turn(file: str, label: str, epochs: int) -> tuple[list[float], int]:
    """Trains one competitor on one rank; returns the seconds and the bytes of its epochs."""
    warnings.filterwarnings("ignore", "Sparse")  # torch's, about its CSR tensors
    data = Data(**torch.load(file, weights_only=True))
    torch.manual_seed(0)
    if label.startswith("PyG"):
        x, y, edges, model = data.x, data.y, data.edge_index, GCN(GCNConv, cached=True)
        if "CSR" in label:
            ones, n = torch.ones(data.num_edges), data.num_nodes
            edges = torch.sparse_coo_tensor(edges.flip(0), ones, (n, n))
            edges, model = edges.to_sparse_csr(), GCN(GCNConv)
        epoch = trainer(model, x, edges, y)
        epoch()
        return [epoch() for _ in range(epochs)], 0
    mesh = pdc.init()
    share = pdc.partition(data, mesh, "metis" if mesh.size > 1 else "block")
    model = GCN(DistGCNConv)
    epoch = trainer(model, share.x, share.edge_index, share.y)
    epoch(), epoch()  # features that do not change are multiplied once
    mesh.ledger.reset()
    found = [epoch() for _ in range(epochs)]
    return found, mesh.ledger.bytes() // epochs


def measure(file: str, rounds: int, epochs: int) -> list[tuple[str, float, int]]:
    """Returns (label, seconds, bytes) of an epoch of each competitor, in turns."""
    seconds: dict[str, list[float]] = {label: [] for label in LINES}
    sent = dict.fromkeys(LINES, 0)
    for _ in range(rounds):
        for label, (ranks, threads) in LINES.items():
            found = pdc.launch(one_turn, ranks, file, label, epochs, threads=threads)
            times = zip(*(each for each, _ in found), strict=True)
            seconds[label] += [max(epoch) for epoch in times]
            sent[label] = max(count for _, count in found)
    return [(label, min(seconds[label]), sent[label]) for label in LINES]


def draw(rows: list[tuple[str, float, int]], title: str, file: Path) -> None:
    """Draws seconds and bytes as bars, the figures beside them."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.hashsalt": "pyg_distcomm", "svg.fonttype": "path"}
    plt.rcParams |= {"font.family": "DejaVu Sans", "font.size": 11.5}
    figure, axes = plt.subplots(1, 2, figsize=(9, 3), width_ratios=[3, 2], sharey=True)
    names = [label for label, _, _ in rows][::-1]
    parts = (
        ([time for _, time, _ in rows], "seconds per epoch", "{:.2f}"),
        ([count / 2**20 for _, _, count in rows], "MiB received per epoch", "{:.1f}"),
    )
    for ax, (values, label, form) in zip(axes, parts, strict=True):
        colours = [GREY, GREY, BLUE, ORANGE][::-1]
        ax.barh(names, values[::-1], color=colours, height=0.62)
        for at, value in enumerate(values[::-1]):
            text = form.format(value) if value else "0"
            ax.text(value + 0.02 * max(values), at, text, va="center")
        ax.set_xlim(0, 1.22 * max(values))
        ax.set_xlabel(label)
        ax.set_xticks([])
        for side in ("top", "right", "bottom"):
            ax.spines[side].set_visible(False)
        ax.tick_params(left=False)
    figure.suptitle(title, fontsize=11.5, x=0.02, ha="left")
    figure.patch.set_facecolor("white")
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None}, dpi=110)


def main() -> None:
    """Measures, prints the table, and writes the chart."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=170_000)
    parser.add_argument("--edges", type=int, default=1_200_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as room:
        file = os.path.join(room, "graph.pt")
        data = communities(args.nodes, args.edges, features=WIDTHS[0])
        torch.save({name: data[name] for name in ("x", "y", "edge_index")}, file)
        rows = measure(file, args.rounds, args.epochs)
    best = rows[-1][1]
    print(
        format_table(
            ("", "ranks x threads", "s per epoch", "times 2 ranks", "bytes received"),
            [
                (
                    label,
                    "{} x {}".format(*LINES[label]),
                    f"{time:.3f}",
                    f"{time / best:.2f}",
                    f"{count:,}",
                )
                for label, time, count in rows
            ],
        )
    )
    if args.write:
        title = f"GCN of 3 layers, {args.nodes:,} nodes, {args.edges:,} edges, two CPU cores"
        draw(rows, title, args.write)


if __name__ == "__main__":
    main()

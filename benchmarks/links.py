"""Accuracy against bytes: exact halos, none, and every way to send less.

    python benchmarks/links.py --graph Computers --ranks 4 --epochs 100 --seeds 3

Models are trained on the whole graph, one setting after another in the same processes, on
the same partition and from the same parameters. Bytes are those of halos that all ranks
received in training, by the ledger; sums of gradients and evaluation are not counted.
Accuracy is that of the test nodes in the epoch whose validation accuracy was best, by exact
evaluation. `--labels` nodes of each class are trained by and 500 validate, or a share of all
nodes and a fifth validates. "none" trains without the edges between ranks.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.transforms as T
from torch_geometric.data import Data
from torch_geometric.nn import GATConv
from tqdm import tqdm

import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.ledger import format_table
from pyg_distcomm.datasets import load_dataset
from pyg_distcomm.halo import schedule as schedules
from pyg_distcomm.halo.codecs import (
    Bitmap,
    Cast,
    Chain,
    ColumnMask,
    Quantise,
    Residual,
    TopK,
)
from pyg_distcomm.nn import DistGCNConv, DistSAGEConv, HaloConv

HALO = ("halo", "halo_transpose", "all_gather", "reduce_scatter")
Policy = Callable[[int], pdc.LinkPolicy | None]  # of the number of epochs


def coded(codec: Any, **options: Any) -> Policy:
    """A link that always uses one codec."""
    return lambda epochs: pdc.LinkPolicy(codec, **options)


def ramp(kind: Any, **options: Any) -> Policy:
    """A column mask whose rate follows a ramp."""
    return lambda epochs: pdc.LinkPolicy(
        ColumnMask(1), schedule=kind(epochs, **options)
    )


def sylvie(every: int) -> Policy:
    """One bit, late, and synchronous every so many epochs."""
    return lambda epochs: pdc.Sylvie(bits=1, sync_every=every)


ONE_BIT = Quantise(1, "stochastic")
SETTINGS: dict[str, Policy] = {
    "full": lambda epochs: None,
    "none": lambda epochs: None,
    **{f"fixed {c}": coded(ColumnMask(c)) for c in (2, 4, 8, 16, 32)},
    "VARCO, slope 5": lambda epochs: pdc.VARCO(epochs),
    "VARCO, slope 2": lambda epochs: pdc.VARCO(epochs, slope=2),
    "VARCO, slope 1": lambda epochs: pdc.VARCO(epochs, slope=1),
    "VARCO, slope 1, all": lambda epochs: pdc.VARCO(epochs, slope=1, exact_last=False),
    "VARCO, slope 1.15, all": lambda epochs: pdc.VARCO(
        epochs, slope=1.15, exact_last=False
    ),
    "linear in 1/c": ramp(schedules.LinearInRate),
    "exponential": ramp(schedules.Exponential),
    "cosine": ramp(schedules.Cosine),
    "Sylvie, 1 bit, now": lambda epochs: pdc.Sylvie(bits=1, late=0),
    "Sylvie, 1 bit, late": lambda epochs: pdc.Sylvie(bits=1),
    "Sylvie, 1 bit, now, all": lambda epochs: pdc.Sylvie(
        bits=1, late=0, exact_last=False
    ),
    **{f"fixed {c}, all": coded(ColumnMask(c), exact_last=False) for c in (5, 16)},
    **{f"Sylvie, every {n}": sylvie(n) for n in (2, 5, 10, 20)},
    "2 bits, now": coded(Quantise(2, "stochastic")),
    "4 bits, now": coded(Quantise(4, "stochastic")),
    "8 bits, now": coded(Quantise(8, "stochastic")),
    "bf16": coded(Cast(torch.bfloat16)),
    "PipeGCN": lambda epochs: pdc.PipeGCN(),
    "BNS, 0.1": lambda epochs: pdc.BNS(0.1),
    "bitmap": coded(Bitmap()),
    "top 1/10": coded(TopK(10)),
    "residual, 1 bit": coded(Residual(ONE_BIT)),
    "residual, 4 bits": coded(Residual(Quantise(4, "stochastic"))),
    "columns 1/4, 1 bit": coded(Chain(ColumnMask(4), ONE_BIT)),
}


class Net(torch.nn.Module):
    """As many layers of one kind as there are pairs of widths."""

    def __init__(self, kind: str, widths: list[int], dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        heads = 4
        make = {
            "sage": DistSAGEConv,
            "gcn": DistGCNConv,
            "gat": lambda a, b: HaloConv(
                GATConv(a, b // heads, heads) if b % heads == 0 else GATConv(a, b)
            ),
        }[kind]
        self.convs = torch.nn.ModuleList(
            make(a, b) for a, b in itertools.pairwise(widths)
        )

    def forward(self, x, edge_index):
        for conv in self.convs[:-1]:
            x = conv(x, edge_index).relu()
            x = F.dropout(x, self.dropout, self.training)
        return self.convs[-1](x, edge_index)


def graph(name: str, root: str, features: int, labels: float) -> Data:
    """Returns a graph with masks; wide features are projected on principal directions."""
    data = load_dataset(name, root)
    x = data.x / data.x.norm(dim=1, keepdim=True).clamp_min(1e-12)
    if x.size(1) > features:
        torch.manual_seed(0)
        _, _, v = torch.pca_lowrank(x, features, center=False)
        x = x @ v
    torch.manual_seed(0)
    split = T.RandomNodeSplit("test_rest", 1, int(labels), num_val=500)
    if labels < 1:
        split = T.RandomNodeSplit(num_val=0.2, num_test=0.8 - labels)
    return split(Data(x=x, y=data.y, edge_index=data.edge_index))


def train(
    data: Data,
    exact: Data,
    link: pdc.LinkPolicy | None,
    mesh: pdc.Mesh,
    args: argparse.Namespace,
    seed: int,
) -> tuple[float, int, float]:
    """Returns the accuracy in %, the bytes of halos of all ranks, and the last loss."""
    torch.manual_seed(seed)
    mesh.load_state_dict({"seed": seed, "step": 0})  # the same masks whatever the link
    widths = [data.x.size(1), *[args.hidden] * (args.layers - 1), args.classes]
    model = pdc.replicate(Net(args.model, widths, args.dropout), mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    if link is not None:
        data.edge_index = data.edge_index.with_link(link)
    mesh.ledger.reset()
    moved, best = 0, (-1.0, 0.0)
    for epoch in range(args.epochs):
        before = halo_bytes(mesh)
        model.train()
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        if link is not None:
            link.step()
        moved += halo_bytes(mesh) - before
        if epoch % args.every == args.every - 1:
            best = max(best, evaluate(model, exact))
    every = collectives.all_gather_object(moved, mesh.world)
    return 100 * best[1], sum(every), loss.item()


@torch.no_grad()
def evaluate(model: torch.nn.Module, data: Data) -> tuple[float, float]:
    """Returns the accuracy on validation and on test nodes, by exact exchanges."""
    model.eval()
    hit = model(data.x, data.edge_index).argmax(-1) == data.y
    return tuple(float(hit[m].float().mean()) for m in (data.val_mask, data.test_mask))


def halo_bytes(mesh: pdc.Mesh) -> int:
    """Returns the bytes that halos have brought to this rank."""
    return sum(mesh.ledger.bytes(op) for op in HALO)


def trained(args: argparse.Namespace, names: list[str]) -> list[dict[str, Any]]:
    """Runs on a rank: trains every setting with every seed."""
    torch.set_num_threads(1)
    mesh = pdc.init(grid=tuple(args.grid) if args.grid else None)
    whole = graph(args.graph, args.root, args.features, args.labels)
    args.classes = int(whole.y.max()) + 1
    nodes = pdc.partition(whole, mesh, args.method).edge_index.nodes
    owner = nodes.partition.owner.long()
    source, target = whole.edge_index
    alone = copy.copy(whole)
    alone.edge_index = whole.edge_index[:, owner[source] == owner[target]]
    exact = pdc.partition(whole, mesh, owner)
    cut_off = pdc.partition(alone, mesh, owner)
    found = []
    for name in tqdm(names, disable=mesh.rank > 0 or not sys.stderr.isatty()):
        runs = []
        for seed in range(args.seeds):
            link = SETTINGS[name](args.epochs)
            data = copy.copy(cut_off if name == "none" else exact)
            runs.append(train(data, exact, link, mesh, args, seed))
        found.append({"setting": name, "runs": runs})
    return found


def report(found: list[dict[str, Any]]) -> str:
    """Returns a table: accuracy, its deviation over seeds, and bytes beside the exact ones."""
    full = next((f for f in found if f["setting"] == "full"), None)
    rows = []
    for one in found:
        accuracy, moved, loss = zip(*one["runs"], strict=True)
        share = statistics.mean(moved) / full["runs"][0][1] if full else float("nan")
        spread = statistics.stdev(accuracy) if len(accuracy) > 1 else 0.0
        rows.append(
            (
                one["setting"],
                f"{statistics.mean(accuracy):.2f} +- {spread:.2f}",
                f"{statistics.mean(moved) / 1e6:.1f}",
                f"{100 * share:.1f} %",
                f"{statistics.mean(loss):.4f}",
            )
        )
    return format_table(("setting", "test accuracy", "MB", "of full", "loss"), rows)


def main() -> None:
    """Reads the command, and starts the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graph", default="digits")
    parser.add_argument("--root", default="data")
    parser.add_argument("--features", type=int, default=128, help="at most so many")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--grid", type=int, nargs=3)
    parser.add_argument("--method", default="random")
    parser.add_argument("--model", choices=("sage", "gcn", "gat"), default="sage")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument(
        "--labels", type=float, default=20, help="a class, or < 1: of all"
    )
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--every", type=int, default=5, help="epochs per evaluation")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=[*SETTINGS])
    parser.add_argument("--json", type=Path, help="keep the figures")
    args = parser.parse_args()
    found = pdc.launch(trained, args.ranks, args, args.settings, threads=1)[0]
    print(report(found))
    if args.json:
        args.json.write_text(
            json.dumps({"command": vars(args) | {"json": ""}, "found": found})
        )


if __name__ == "__main__":
    main()

"""Accuracy against bytes: exact halos, none, and every way to send less.

    python benchmarks/links.py --graph Computers --ranks 4 --epochs 100 --seeds 3

Models are trained on the whole graph, one setting after another in the same processes, on
the same partition and from the same parameters. Bytes are those of halos that all ranks
received in training, by the ledger; sums of gradients and evaluation are not counted.
Accuracy is that of the test nodes in the epoch whose validation accuracy was best, by exact
evaluation. `--labels` nodes of each class are trained by and 500 validate, or a share of all
nodes and a fifth validates. "none" trains without the edges between ranks.

`--emulate` trains a GCN as the ranks would, in one process (see `emulated_ranks.py`): halos
of rows, and dropout masks that are not those of ranks. Settings whose name ends with "lr /
staleness" divide the learning rate by one more than the epochs that rows are late.
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
from communities import load
from emulated_ranks import EmulatedGCN, EmulatedLink, EmulatedRanks
from torch_geometric.data import Data
from torch_geometric.nn import GATConv
from tqdm import tqdm

import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.ledger import format_table
from pyg_distcomm.halo.codecs import (
    Cast,
    Chain,
    ColumnMask,
    DegreeBits,
    Plain,
    Quantise,
    RangeBits,
)
from pyg_distcomm.halo.staleness import Drift
from pyg_distcomm.nn import DistGCNConv, DistSAGEConv, HaloConv
from pyg_distcomm.partition.cutters import cut

HALO = ("halo", "halo_reduce", "all_gather", "reduce_scatter")
Policy = Callable[[int], pdc.LinkPolicy | None]  # of the number of epochs


def coded(codec: Any, **options: Any) -> Policy:
    """A link that always uses one codec."""
    return lambda epochs: pdc.LinkPolicy(codec, **options)


def varco(slope: float, exact_last: bool = True) -> Policy:
    """VARCO at a slope."""
    return lambda epochs: pdc.VARCO(epochs, slope=slope, exact_last=exact_last)


def sylvie(every: int) -> Policy:
    """One bit, late, and synchronous every so many epochs."""
    return lambda epochs: pdc.Sylvie(bits=1, sync_every=every)


ONE_BIT = Quantise(1, "stochastic")
DRIFTS = 0.05, 0.1, 0.2, 0.4, 0.8, 1.6
LATER: dict[str, dict[str, Any]] = {  # what may make late rows learn better
    "warm-up": {"warmup": 20},
    "prompt gradients": {"late_gradients": 0},
    "prompt rows": {"late": 0, "late_gradients": 1},
    "rows 0.5": {"smooth": 0.5, "smooth_gradients": 0.0},
    "gradients 0.5": {"smooth_gradients": 0.5},
    "both 0.5": {"smooth": 0.5},
    "rows 0.95": {"smooth": 0.95, "smooth_gradients": 0.0},
    "gradients 0.95": {"smooth_gradients": 0.95},
    "both 0.95": {"smooth": 0.95},
    "lr / staleness": {},
    "every 10": {"sync_every": 10},
}
LATE: dict[str, Policy] = {
    **{
        f"late, {name}": coded(Plain(), **{"late": 1, **how})
        for name, how in LATER.items()
    },
    **{
        f"1 bit, late, {name}": coded(ONE_BIT, **{"late": 1, **how})
        for name, how in LATER.items()
    },
    "1 bit, late, warm-up, prompt gradients": coded(
        ONE_BIT, late=1, late_gradients=0, warmup=20
    ),
    "4 bits, late": coded(Quantise(4, "stochastic"), late=1),
    "adaptive": lambda epochs: pdc.Sylvie(adaptive=True),
    "adaptive, by degree": lambda epochs: pdc.Sylvie(adaptive=True, by_degree=True),
    "by degree, now": coded(DegreeBits(1)),
    "by degree, late": coded(DegreeBits(1), late=1),
    **{f"by range {mean:g}, now": coded(RangeBits(mean)) for mean in (1.5, 2, 3.75)},
    "by range 2, late": coded(RangeBits(2), late=1),
    "by range 2, now, all": coded(RangeBits(2), exact_last=False),
    **{f"skip below {d:g}": coded(Plain(), skip=Drift(d)) for d in DRIFTS},
    **{f"skip below {d:g}, 1 bit": coded(ONE_BIT, skip=Drift(d)) for d in DRIFTS},
}
SETTINGS: dict[str, Policy] = {
    "full": lambda epochs: None,
    "none": lambda epochs: None,
    **{f"fixed {c}": coded(ColumnMask(c)) for c in (2, 4, 8, 16, 32)},
    **{f"VARCO, slope {a:g}": varco(a) for a in (1, 1.15, 1.5, 2, 5)},
    **{f"VARCO, slope {a:g}, all": varco(a, False) for a in (1, 1.15, 1.5, 2, 5)},
    "Sylvie, 1 bit, now": lambda epochs: pdc.Sylvie(bits=1, late=0),
    "Sylvie, 1 bit, late": lambda epochs: pdc.Sylvie(bits=1),
    "Sylvie, 1 bit, now, all": lambda epochs: pdc.Sylvie(
        bits=1, late=0, exact_last=False
    ),
    **{
        f"fixed {c}, all": coded(ColumnMask(c), exact_last=False) for c in (2, 4, 5, 16)
    },
    **{f"Sylvie, every {n}": sylvie(n) for n in (2, 5, 10, 20)},
    "2 bits, now": coded(Quantise(2, "stochastic")),
    "4 bits, now": coded(Quantise(4, "stochastic")),
    "8 bits, now": coded(Quantise(8, "stochastic")),
    "bf16": coded(Cast(torch.bfloat16)),
    "late": lambda epochs: pdc.PipeGCN(),
    **LATE,
    "BNS, 0.1": lambda epochs: pdc.BNS(0.1),
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
    data = load(name, root)
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
    by_staleness: bool,
) -> tuple[float, int, float, float]:
    """Returns test and validation accuracy in %, bytes of all ranks' halos, and the loss."""
    torch.manual_seed(seed)
    mesh.load_state_dict({"seed": seed, "step": 0})  # the same masks whatever the link
    widths = [data.x.size(1), *[args.hidden] * (args.layers - 1), args.classes]
    model = pdc.replicate(Net(args.model, widths, args.dropout), mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    pace = paced(optimizer, link, by_staleness)
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
            link.step(loss)
        pace.step()
        moved += halo_bytes(mesh) - before
        if epoch % args.every == args.every - 1:
            best = max(best, evaluate(model, exact))
    every = collectives.all_gather_object(moved, mesh.world)
    return 100 * best[1], 100 * best[0], sum(every), loss.item()


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
            how = name.endswith("lr / staleness")
            runs.append(train(data, exact, link, mesh, args, seed, how))
        found.append({"setting": name, "runs": runs})
        if mesh.rank == 0:
            print(report([*found[:1], found[-1]]), flush=True)
    return found


def trained_alone(args: argparse.Namespace, names: list[str]) -> list[dict[str, Any]]:
    """Trains a GCN with every setting and seed, with all ranks in this process."""
    torch.set_num_threads(1)
    whole = graph(args.graph, args.root, args.features, args.labels)
    args.classes = int(whole.y.max()) + 1
    owner = cut(whole.edge_index, whole.num_nodes, args.ranks, args.method).owner.long()
    source, target = whole.edge_index
    inside = whole.edge_index[:, owner[source] == owner[target]]
    kind = whole.x.dtype
    exact = EmulatedRanks.cut(whole.edge_index, owner, args.ranks, kind)
    cut_off = EmulatedRanks.cut(inside, owner, args.ranks, kind)
    found = []
    for name in tqdm(names, disable=not sys.stderr.isatty()):
        runs = []
        for seed in range(args.seeds):
            link = SETTINGS[name](args.epochs)
            ranks = cut_off if name == "none" else exact
            how = name.endswith("lr / staleness")
            runs.append(train_alone(whole, ranks, exact, link, args, seed, how))
        found.append({"setting": name, "runs": runs})
        print(report([*found[:1], found[-1]]), flush=True)
    return found


def train_alone(
    data: Data,
    ranks: EmulatedRanks,
    exact: EmulatedRanks,
    link: pdc.LinkPolicy | None,
    args: argparse.Namespace,
    seed: int,
    by_staleness: bool,
) -> tuple[float, float, int, float]:
    """Returns what `train` does."""
    torch.manual_seed(seed)
    widths = [data.x.size(1), *[args.hidden] * (args.layers - 1), args.classes]
    model = EmulatedGCN(widths, args.dropout)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    pace = paced(optimizer, link, by_staleness)
    sends = EmulatedLink(ranks, link or pdc.LinkPolicy(Plain()), args.layers - 1)
    best = (-1.0, 0.0)
    for epoch in range(args.epochs):
        model.train()
        optimizer.zero_grad()
        out = model(data.x, ranks, sends)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        sends.step(loss.item())
        pace.step()
        if epoch % args.every == args.every - 1:
            model.eval()
            with torch.no_grad():
                hit = model(data.x, exact).argmax(-1) == data.y
            masks = data.val_mask, data.test_mask
            best = max(best, tuple(float(hit[m].float().mean()) for m in masks))
    return 100 * best[1], 100 * best[0], sends.bytes, loss.item()


def paced(optimizer: Any, link: pdc.LinkPolicy | None, by_staleness: bool) -> Any:
    """Returns a schedule of the learning rate: constant, or over 1 + staleness."""

    def factor(epoch: int) -> float:
        return 1.0 if link is None or not by_staleness else 1 / (1 + link.staleness())

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def report(found: list[dict[str, Any]]) -> str:
    """Returns a table: accuracy, its deviation over seeds, and bytes beside the exact ones."""
    full = next((f for f in found if f["setting"] == "full"), None)
    rows = []
    for one in found:
        accuracy, valid, moved, loss = zip(*one["runs"], strict=True)
        whole = full["runs"][0][2] if full else 0  # none on one rank
        share = statistics.mean(moved) / whole if whole else float("nan")
        spread = statistics.stdev(accuracy) if len(accuracy) > 1 else 0.0
        rows.append(
            (
                one["setting"],
                f"{statistics.mean(accuracy):.2f} +- {spread:.2f}",
                f"{statistics.mean(valid):.2f}",
                f"{statistics.mean(moved) / 1e6:.1f}",
                f"{100 * share:.1f} %",
                f"{statistics.mean(loss):.4f}",
            )
        )
    head = "setting", "test accuracy", "validation", "MB", "of full", "loss"
    return format_table(head, rows)


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
    parser.add_argument("--emulate", action="store_true", help="in one process")
    parser.add_argument("--json", type=Path, help="keep the figures")
    args = parser.parse_args()
    if args.emulate:
        found = trained_alone(args, args.settings)
    else:
        found = pdc.launch(trained, args.ranks, args, args.settings, threads=1)[0]
    print(report(found))
    if args.json:
        args.json.write_text(
            json.dumps({"command": vars(args) | {"json": ""}, "found": found})
        )


if __name__ == "__main__":
    main()

"""Epochs of minibatch training: loader and step, ours against PyG's layers.

    python benchmarks/step.py [--scale 18] [--model sage gcn gat] [--hidden 128]
        [--fan-outs 15 10 5] [--batches 6] [--epochs 5] [--threads 1] [--full]
        [--write REPORT.md]

Each competitor trains on the same seeds of the same R-MAT graph, one epoch at a time, in
turns, in one process. Medians are compared, of seconds and of processor seconds (which
other work on the machine disturbs less); times of the loader and of the step are apart
(our loader works ahead in a thread, so it is run without prefetching here). Ratios are to
`pyg_distcomm`: our loader, and the script's model after `pdc.convert`. PyG's NeighborLoader
is run where it can sample, which takes pyg-lib or torch-sparse. `--full` adds epochs over
the whole graph on one process.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.utils import trim_to_layer

import pyg_distcomm as pdc
from pyg_distcomm.cli import bench
from pyg_distcomm.comm.ledger import format_table
from pyg_distcomm.loader import DistNeighborLoader

FEATURES, CLASSES, BATCH = 100, 32, 1024
LAYERS: dict[str, Callable[[int, int], torch.nn.Module]] = {
    "sage": pyg.SAGEConv,
    "gcn": pyg.GCNConv,
    "gat": lambda into, out: pyg.GATConv(into, out // 4, heads=4),
}


class Model(torch.nn.Module):
    """The model of all competitors, which may trim as PyG's scripts do."""

    def __init__(self, layer: str, hidden: int, depth: int, trims: bool) -> None:
        super().__init__()
        widths = [FEATURES, *[hidden] * (depth - 1), CLASSES]
        pairs = itertools.pairwise(widths)
        self.convs = torch.nn.ModuleList(LAYERS[layer](f, g) for f, g in pairs)
        self.trims = trims

    def forward(self, x, edge_index, nodes=None, edges=None):
        for k, conv in enumerate(self.convs):
            if self.trims:
                x, edge_index, _ = trim_to_layer(k, nodes, edges, x, edge_index)
            x = conv(x, edge_index)
            x = x.relu() if k + 1 < len(self.convs) else x
        return x


def graph(scale: int) -> Data:
    """Returns the R-MAT graph with random features and labels."""
    row, col, n = bench.rmat(scale)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, FEATURES, generator=generator)
    y = torch.randint(0, CLASSES, (n,), generator=generator)
    return Data(x=x, y=y, edge_index=torch.stack([row, col]))


def epoch(loader: Any, model: torch.nn.Module, opt: torch.optim.Optimizer) -> Any:
    """Trains an epoch; returns what loader and steps took, by both clocks, and the loss."""
    spent, losses = torch.zeros(2, 2).double(), []
    at = clocks()
    for batch in loader:
        now = clocks()
        spent[0] += now - at
        opt.zero_grad()
        hops = batch.get("num_sampled_nodes"), batch.get("num_sampled_edges")
        out = model(batch.x, batch.edge_index, *hops)[: batch.batch_size]
        loss = F.cross_entropy(out, batch.y[: batch.batch_size])
        loss.backward()
        opt.step()
        losses.append(loss.item())
        at = clocks()
        spent[1] += at - now
    return spent, statistics.mean(losses)


def clocks() -> torch.Tensor:
    """Returns seconds, and seconds that processors have worked for this process."""
    now = time.perf_counter(), time.process_time()
    return torch.tensor(now, dtype=torch.float64)


def competitors(data: Data, args: argparse.Namespace, layer: str) -> dict[str, Any]:
    """Returns loader and model of each competitor; all models begin alike."""
    degree = torch.bincount(data.edge_index[1], minlength=data.num_nodes)
    seeds = degree.nonzero().view(-1)
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(len(seeds), generator=generator)
    options = {
        "num_neighbors": args.fan_outs,
        "input_nodes": seeds[order[: args.batches * BATCH]],
        "batch_size": BATCH,
    }
    plain = Model(layer, args.hidden, len(args.fan_outs), False)
    trimmed = copy.deepcopy(plain)
    trimmed.trims = True
    ours = DistNeighborLoader(data, seed=0, prefetch=0, **options)
    found = {
        "pyg_distcomm": (ours, pdc.convert(copy.deepcopy(plain))),
        "pyg_distcomm, trim=False": (
            ours,
            pdc.convert(copy.deepcopy(plain), trim=False),
        ),
        "our loader, PyG's layers": (ours, copy.deepcopy(plain)),
    }
    if layer != "gcn":  # whose degrees trim_to_layer changes
        found["our loader, PyG's layers, trim_to_layer"] = ours, copy.deepcopy(trimmed)
    try:
        loader = NeighborLoader(data, **options)
        counted = "num_sampled_nodes" in next(iter(loader))  # not by torch-sparse
    except ImportError:
        print("PyG's NeighborLoader: not run, it needs pyg-lib or torch-sparse")
        return found
    found["PyG"] = loader, plain
    if layer != "gcn" and counted:
        found["PyG, trim_to_layer"] = loader, trimmed
    return found


def minibatches(data: Data, args: argparse.Namespace, layer: str) -> list[tuple]:
    """Times epochs of all competitors, in turns."""
    runs = competitors(data, args, layer)
    opts = {
        name: torch.optim.Adam(model.parameters()) for name, (_, model) in runs.items()
    }
    times: dict[str, list[Any]] = {name: [] for name in runs}
    for k in range(args.epochs + 1):
        for name, (loader, model) in runs.items():
            if hasattr(loader, "set_epoch"):
                loader.set_epoch(k)
            found = epoch(loader, model, opts[name])
            if k:  # the first compiles, and observes what may be trimmed
                times[name].append(found)
    rows, base = [], None
    for name, found in times.items():
        spent = torch.stack(
            [part for part, _ in found]
        )  # epochs, (loader, step), clocks
        medians, whole = spent.median(0).values, spent.sum(1)
        total = whole.median(0).values
        base = (medians, total) if base is None else base
        spread = (whole[:, 0].max() / whole[:, 0].min()).item()
        ratios = [(medians[1, 1] / base[0][1, 1]), *(total / base[1])]
        numbers = [*medians[:, 0], *medians[:, 1], *ratios]
        rows.append((name, *(float(v) for v in numbers), spread, found[-1][1]))
    return rows


def whole_graph(data: Data, args: argparse.Namespace, layer: str) -> list[tuple]:
    """Times epochs over the whole graph: PyG's layers, and converted ones."""
    plain = Model(layer, args.hidden, len(args.fan_outs), False)
    models = {"pyg_distcomm": pdc.convert(copy.deepcopy(plain)), "PyG": plain}
    times: dict[str, list[float]] = {name: [] for name in models}
    for k in range(3):
        for name, model in models.items():
            at = time.perf_counter()
            model.zero_grad()
            F.cross_entropy(model(data.x, data.edge_index), data.y).backward()
            if k:
                times[name].append(time.perf_counter() - at)
    base = statistics.median(times["pyg_distcomm"])
    return [
        (name, statistics.median(t), statistics.median(t) / base)
        for name, t in times.items()
    ]


def main() -> None:
    """Runs the comparisons and prints (or writes) the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--scale", type=int, default=18)
    parser.add_argument("--model", nargs="+", choices=LAYERS, default=["sage"])
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--fan-outs", type=int, nargs="+", default=[15, 10, 5])
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    data, parts = graph(args.scale), []
    for layer in args.model:
        heads = f"{layer}, epoch", "loader s", "step s", "loader cpu s", "step cpu s"
        heads += "step cpu", "epoch", "epoch cpu", "slowest/fastest", "loss"
        parts.append(format_table(heads, minibatches(data, args, layer)))
        print(parts[-1], flush=True)
        if args.full:
            heads = f"{layer}, whole graph", "s/epoch", "times ours"
            parts.append(format_table(heads, whole_graph(data, args, layer)))
            print(parts[-1], flush=True)
    text = "\n\n".join(parts)
    if args.write:
        given = " ".join(f"--{k} {v}" for k, v in vars(args).items() if k != "write")
        args.write.write_text(
            f"# The step of a minibatch\n\n`benchmarks/step.py {given}`; torch "
            f"{torch.__version__}, Python {platform.python_version()}; R-MAT graph of "
            f"{data.num_nodes:,} nodes and {data.num_edges:,} edges; medians, competitors "
            f"in turn; cpu: processor seconds; step and epoch as ratios to the first."
            f"\n\n```\n{text}\n```\n"
        )


if __name__ == "__main__":
    main()

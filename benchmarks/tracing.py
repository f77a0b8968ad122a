"""What tracing costs: epochs with a trace and without, in turns.

    python benchmarks/tracing.py [--ranks 2] [--scale 15] [--rounds 10]

A GCN of three layers and Adam on an R-MAT graph, full-graph. A round is some epochs without
a trace and as many inside one, in an order that alternates; medians over all epochs of the
slowest rank are compared. Entering and leaving a trace, where clocks are compared and the
file is written, is timed apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import spmm as bench
import torch
import torch.nn.functional as F
from epoch import GCN, WIDTHS
from torch_geometric.data import Data

import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.ledger import format_table
from pyg_distcomm.nn import DistGCNConv

EPOCHS = 5


def measured(folder: Path, scale: int, rounds: int) -> dict[str, list[float]]:
    """Returns seconds of epochs off and on, and of entering and leaving, on this rank."""
    mesh = pdc.init()
    row, col, n = bench.rmat(scale)
    g = torch.Generator().manual_seed(0)
    data = Data(
        x=torch.randn(n, WIDTHS[0], generator=g),
        y=torch.randint(WIDTHS[-1], (n,), generator=g),
        edge_index=torch.stack([row, col]),
    )
    share = pdc.partition(data, mesh, "ldg")
    torch.manual_seed(0)
    model = pdc.replicate(GCN(DistGCNConv), mesh)
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    found: dict[str, list[float]] = {"off": [], "on": [], "enter": [], "leave": []}

    def epochs(name: str) -> None:
        for _ in range(EPOCHS):
            collectives.barrier(mesh.world)
            start = time.perf_counter()
            opt.zero_grad()
            F.cross_entropy(model(share.x, share.edge_index), share.y).backward()
            opt.step()
            found[name].append(time.perf_counter() - start)

    epochs("off")
    found["off"].clear()
    for k in range(rounds):
        for name in ("off", "on") if k % 2 else ("on", "off"):
            if name == "off":
                epochs(name)
                continue
            context = pdc.trace(folder / "run.json", mesh)
            start = time.perf_counter()
            context.__enter__()
            found["enter"].append(time.perf_counter() - start)
            epochs(name)
            start = time.perf_counter()
            context.__exit__(None, None, None)
            found["leave"].append(time.perf_counter() - start)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--scale", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = pdc.launch(measured, args.ranks, folder, args.scale, args.rounds)
        file = folder / "run.json"
        size, events = file.stat().st_size, json.loads(file.read_text())["traceEvents"]
    worst = {
        key: [
            max(values) for values in zip(*(rank[key] for rank in ranks), strict=True)
        ]
        for key in ranks[0]
    }
    off, on = statistics.median(worst["off"]), statistics.median(worst["on"])
    rows = [
        ("epoch without", 1e3 * off, 1.0),
        ("epoch inside a trace", 1e3 * on, on / off),
        ("entering", 1e3 * statistics.median(worst["enter"]), None),
        ("leaving", 1e3 * statistics.median(worst["leave"]), None),
    ]
    print(format_table(("", "ms, median", "ratio"), rows))
    print(f"{len(events):,} events of {EPOCHS} epochs, {size:,} bytes")


if __name__ == "__main__":
    main()

"""Predicted seconds of an epoch against measured ones, on every grid, over shaped links.

    sudo python benchmarks/network.py --ranks 4 --burst 128kb -- \
        python benchmarks/planned.py [--graph rmat-16] [--widths 602 16 41] [--rates ...]

Each rate is measured by `pdc.calibrate`, every grid is planned, and then all grids train in
turn, one epoch each, in the same processes; also the best plan, if its halo is not "auto".
A rank's median counts, and of the ranks the slowest. `auto` is what the plan would take; its
loss is its measured seconds over those of the fastest. Bytes of the ledger must equal the
plan's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import network
import torch
import torch.nn.functional as F
from torch_geometric.data import Data

import pyg_distcomm as pdc
from pyg_distcomm import bench, wire
from pyg_distcomm.datasets import load_dataset
from pyg_distcomm.ledger import format_table
from pyg_distcomm.nn import DistGCNConv

Grid = tuple[int, int, int]
Way = tuple[Grid, str]  # a grid, and what travels


class GCN(torch.nn.Module):
    """As many layers as there are pairs of widths."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        pairs = itertools.pairwise(widths)
        self.convs = torch.nn.ModuleList(DistGCNConv(a, b) for a, b in pairs)

    def forward(self, x, edge_index):
        for conv in self.convs[:-1]:
            x = conv(x, edge_index).relu()
        return self.convs[-1](x, edge_index)


def graph(name: str, root: str, widths: list[int]) -> Data:
    """Returns a graph with random features and labels of the widths asked for."""
    if name.startswith("rmat-"):
        row, col, n = bench.rmat(int(name[5:]))
        edge_index = torch.stack([row, col])
    else:
        data = load_dataset(name, root)
        assert data.edge_index is not None
        n, edge_index = int(data.num_nodes or 0), data.edge_index
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, widths[0], generator=generator)
    y = torch.randint(0, widths[-1], (n,), generator=generator)
    return Data(x=x, y=y, edge_index=edge_index)


def trainer(
    data: Data, way: Way, args: argparse.Namespace
) -> tuple[pdc.Mesh, Callable[[], None]]:
    """Returns a mesh and a function that trains an epoch on it; collective."""
    mesh = pdc.init(grid=way[0])
    share = pdc.partition(data, mesh, args.method)
    share.edge_index = share.edge_index.with_halo(way[1])
    torch.manual_seed(0)
    model = pdc.replicate(GCN(args.widths), mesh)
    optimizer = torch.optim.Adam(model.parameters())

    def epoch() -> None:
        mesh.ledger.reset()
        optimizer.zero_grad()
        F.cross_entropy(model(share.x, share.edge_index), share.y).backward()
        optimizer.step()

    return mesh, epoch


def measure(
    jobs: dict[Way, tuple[pdc.Mesh, Callable[[], None]]], rounds: int, world: wire.Axis
) -> dict[Way, list[float]]:
    """Returns the seconds of each round on its slowest rank, ways in turn."""
    took: dict[Way, list[float]] = {way: [] for way in jobs}
    for _ in range(rounds):
        for way, (_, epoch) in jobs.items():
            wire.barrier(world)
            start = time.perf_counter()
            epoch()
            took[way].append(time.perf_counter() - start)
    mine = torch.tensor([took[way] for way in jobs], dtype=torch.float64)
    every = wire.all_reduce(mine, world, "max").tolist()
    return dict(zip(jobs, every, strict=True))


def rows_of(
    rate: str, plans: pdc.Plans, took: dict[Way, list[float]], bytes_: dict[Way, int]
) -> list[tuple]:
    """Returns one row a way: predicted, measured, their ratio, spread, bytes."""
    medians = {way: statistics.median(every) for way, every in took.items()}
    fastest, rows = min(medians.values()), []
    auto = plans.best.grid, plans.best.halo
    for way, every in took.items():
        plan = plans.of(way[0], halo=way[1])
        middle = medians[way]
        low, _, high = statistics.quantiles(every, n=4)
        name = "x".join(map(str, way[0])) + f" {way[1]}".removesuffix(" auto")
        rows.append(
            (
                rate,
                name + (" (auto)" if way == auto else ""),
                plan.seconds,
                middle,
                f"{plan.seconds / middle:.2f}",
                f"{(high - low) / middle:.0%}",
                f"{middle / fastest:.2f}",
                plan.bytes,
                "yes" if plan.bytes_by_rank[0] == bytes_[way] else "NO",
            )
        )
    return rows


def main() -> None:
    """Runs on every rank; rank 0 prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--graph", default="rmat-16", help="or as pyg-distcomm plan has it"
    )
    parser.add_argument("--root", default="data")
    parser.add_argument("--widths", type=int, nargs="+", default=[602, 16, 41])
    parser.add_argument("--rates", nargs="+", default=["1gbit", "100mbit"])
    parser.add_argument("--method", default="random")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="keep the figures")
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = graph(args.graph, args.root, args.widths)
    mesh = pdc.init()
    world, size = mesh.world, mesh.size
    bare = pdc.plan(data, args.widths, size, partition=args.method)
    grids = sorted({plan.grid for plan in bare}, reverse=True)
    always: list[Way] = [(grid, "auto") for grid in grids]
    made = {way: trainer(data, way, args) for way in always}
    rows = []
    for rate in args.rates:
        wire.barrier(world)
        network.shape(rate)
        wire.barrier(world)
        measure(made, 3, world)  # plans, and products that are kept
        degree = max(1, data.num_edges // data.num_nodes)
        machine = pdc.calibrate(
            mesh, sorted(set(args.widths)), rows=data.num_nodes // size, degree=degree
        )
        plans = pdc.plan(
            data, args.widths, size, partition=bare.partition, machine=machine
        )
        best = plans.best.grid, plans.best.halo
        if best not in made:
            made[best] = trainer(data, best, args)
            measure({best: made[best]}, 3, world)
        jobs = {way: made[way] for way in dict.fromkeys([*always, best])}
        took = measure(jobs, args.rounds, world)
        counted = {way: job[0].ledger.bytes() for way, job in jobs.items()}
        rows += rows_of(rate, plans, took, counted)
        if mesh.rank == 0:
            print(f"{rate}: {machine}\n", flush=True)
    if mesh.rank == 0:
        head = ("rate", "grid", "planned s", "measured s", "planned/measured", "spread")
        head += ("over the fastest", "bytes, most", "as the ledger's")  # type: ignore[assignment]
        print(plans.graph, format_table(head, rows), sep="\n\n")
        if args.json:
            args.json.write_text(json.dumps({"graph": plans.graph, "rows": rows}))


if __name__ == "__main__":
    main()

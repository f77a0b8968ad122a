"""Compares planned and counted bytes of every grid, beside its seconds, over shaped links.

    sudo python benchmarks/network.py --ranks 4 --burst 128kb -- \
        python benchmarks/planned.py [--graph rmat-16] [--widths 602 16 41] [--rates ...]

In the same processes all grids train in turn, some epochs each.
Medians count, of rounds, a round being as long as its slowest rank.
`auto` is the plan that `init(Auto(...))` takes, some times over: it times the best few.
Bytes of the ledger must equal the plan's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import network
import spmm as bench
import torch
import torch.nn.functional as F
from communities import load
from torch_geometric.data import Data

import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.ledger import format_table
from pyg_distcomm.nn import DistGCNConv
from pyg_distcomm.plan.init import fastest, shortlist

HEAD = (
    *("rate", "grid", "measured s"),
    *("spread", "over the fastest", "bytes, most", "as the ledger's"),
)
EPOCHS = 3  # of a round, one after the other
Grid = tuple[int, int, int]


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
        data = load(name, root)
        assert data.edge_index is not None
        n, edge_index = int(data.num_nodes or 0), data.edge_index
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, widths[0], generator=generator)
    y = torch.randint(0, widths[-1], (n,), generator=generator)
    return Data(x=x, y=y, edge_index=edge_index)


def trainer(
    data: Data, way: Grid, args: argparse.Namespace
) -> tuple[pdc.Mesh, Callable[[], None]]:
    """Returns a mesh and a function that trains an epoch on it; collective."""
    mesh = pdc.init(grid=way)
    share = pdc.partition(data, mesh, args.method)
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
    jobs: dict[Grid, tuple[pdc.Mesh, Callable[[], None]]],
    rounds: int,
    world: collectives.Axis,
) -> dict[Grid, list[float]]:
    """Returns the seconds per epoch of each round on its slowest rank, ways in turn."""
    took: dict[Grid, list[float]] = {way: [] for way in jobs}
    for _ in range(rounds):
        for way, (_, epoch) in jobs.items():
            collectives.barrier(world)
            start = time.perf_counter()
            for _ in range(EPOCHS):
                epoch()
            took[way].append((time.perf_counter() - start) / EPOCHS)
    mine = torch.tensor([took[way] for way in jobs], dtype=torch.float64)
    every = collectives.all_reduce(mine, world, "max").tolist()
    return dict(zip(jobs, every, strict=True))


def chosen(data: Data, plans: pdc.Plans, args: argparse.Namespace) -> Grid:
    """Returns the grid that is taken; collective."""
    training = plans.training
    near, edges, partition = (
        shortlist(plans, training),
        data.edge_index,
        plans.partition,
    )
    if len(near) > 1 and edges is not None and partition is not None:
        return fastest(edges, partition, near, training, {}).grid
    return plans.best.grid


def rows_of(
    rate: str,
    plans: pdc.Plans,
    taken: list[Grid],
    took: dict[Grid, list[float]],
    counted: dict,
) -> list[tuple]:
    """Returns one row a way: measured seconds, spreads, bytes."""
    medians = {way: statistics.median(laps) for way, laps in took.items()}
    rows = []
    picks = Counter(taken)
    for way, laps in took.items():
        found, measured = plans.of(way), medians[way]
        low, _, high = statistics.quantiles(laps, n=4)
        name = "x".join(map(str, way))
        fastest = min(medians.values())
        auto = f" (auto {picks[way]} of {len(taken)})" if picks[way] else ""
        rows.append(
            (
                rate,
                name + auto,
                measured,
                f"{(high - low) / measured:.0%}",
                f"{measured / fastest:.2f}",
                found.bytes,
                "yes" if found.bytes_by_rank[0] == counted[way] else "NO",
            )
        )
    return rows


def main() -> None:
    """Runs on every rank; rank 0 prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--graph", default="rmat-16", help="or as load_dataset has it")
    parser.add_argument("--root", default="data")
    parser.add_argument("--widths", type=int, nargs="+", default=[602, 16, 41])
    parser.add_argument("--rates", nargs="+", default=["1gbit", "100mbit"])
    parser.add_argument("--method", default="random")
    parser.add_argument("--times", type=int, default=3, help="choices of auto")
    parser.add_argument("--rounds", type=int, default=5, help="after each of them")
    parser.add_argument("--json", type=Path, help="keep the figures")
    args = parser.parse_args()
    if args.rounds < 2 or args.times < 1:
        parser.error("--rounds must be at least 2, and --times 1")
    torch.set_num_threads(1)
    data = graph(args.graph, args.root, args.widths)
    mesh = pdc.init()
    world, size = mesh.world, mesh.size
    bare = pdc.plan(data, args.widths, size, partition=args.method)
    grids = sorted({plan.grid for plan in bare}, reverse=True)
    made = {way: trainer(data, way, args) for way in grids}
    rows = []
    for rate in args.rates:
        collectives.barrier(world)
        network.shape(rate)
        collectives.barrier(world)
        measure(made, 3, world)  # plans, and products that are kept
        taken, took = [], {}
        for _ in range(args.times):
            taken.append(chosen(data, bare, args))
            for way, seconds in measure(made, args.rounds, world).items():
                took.setdefault(way, []).extend(seconds)
        counted = {way: made[way][0].ledger.bytes() for way in took}
        rows += rows_of(rate, bare, taken, took, counted)
    if mesh.rank == 0:
        print(bare.graph, format_table(HEAD, rows), sep="\n\n")
        if args.json:
            args.json.write_text(json.dumps({"graph": bare.graph, "rows": rows}))


if __name__ == "__main__":
    main()

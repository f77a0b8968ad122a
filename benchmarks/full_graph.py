"""Full-graph epochs over links of a given rate: from naive CAGNET 1D to what we choose.

    sudo python benchmarks/full_graph.py [--ranks 4 8] [--rates 1gbit 100mbit]

Trains a GCN of given widths on an R-MAT graph. "naive 1D" multiplies as the reference code
of CAGNET does: whole blocks are exchanged, (A X) W forward and A G backward, at every
layer's full widths. Below it one thing after another is added, and grids are compared; the
last line is what the package takes by itself. All ways are built first, in the same
processes, and take turns, epoch by epoch; a rank has one thread. Needs root, for the links:
see `network.py`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import network
import spmm as bench
import torch
import torch.nn.functional as F
from tables import from_text
from torch import Tensor
from torch_geometric.data import Data

import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.ledger import format_table
from pyg_distcomm.graph.topology import OperatorKind
from pyg_distcomm.nn import DistGCNConv

SHAPES = {
    "reddit": (602, 16, 41),
    "amazon": (300, 16, 24),
    "protein": (128, 16, 256),
    "products": (100, 256, 256, 47),
}
MIB = 2**20


@dataclass(frozen=True)
class Case:
    """One way to train.

    Args:
        name: as the table calls it.
        grid: of ranks; (P, 1, 1) if None.
        halo: what products exchange.
        order: (A X) W, A (X W), or what is cheaper.
        keep: whether A X is kept for the features.
        cutter: how nodes are partitioned.
        refine: whether the partition is refined.
        naive: multiplies as CAGNET's reference code does.
        auto: takes the plan made for the link it is on; anew at each rate.
    """

    name: str
    grid: tuple[int, int, int] | None = None
    halo: str = "auto"
    order: str = "auto"
    keep: bool = True
    cutter: str = "random"
    refine: bool = False
    naive: bool = False
    auto: bool = False


def cases(size: int) -> list[Case]:
    """Lists the ways that so many ranks can train."""
    found = [
        Case("naive 1D", halo="blocks", naive=True),
        Case("1D, blocks, (A X) W", halo="blocks", order="first", keep=False),
        Case("1D, rows, (A X) W", halo="rows", order="first", keep=False),
        Case(
            "1D, rows, METIS refined, (A X) W",
            None,
            "rows",
            "first",
            False,
            "metis",
            True,
        ),
        Case("1D, rows, ordered", halo="rows", keep=False),
        Case("1D, rows, ordered, kept", halo="rows"),
        Case("1D, rows or sums, ordered, kept"),
    ]
    for grid in grids(size):
        name = " x ".join(map(str, grid))
        found.append(Case(f"{name}, ordered, kept", grid))
    found.append(Case("1D, METIS", cutter="metis"))
    found.append(Case("auto", auto=True))
    return found


def grids(size: int) -> list[tuple[int, int, int]]:
    """Lists all grids of so many ranks but (P, 1, 1)."""
    sides = itertools.product(range(1, size + 1), repeat=3)
    return [g for g in sides if g[0] * g[1] * g[2] == size and g[0] < size]


# Models -----------------------------------------------------------------------------


class Naive(torch.autograd.Function):
    """Z = (A X) W, dW = X^T (A^T G), dX = (A^T G) W^T, as CAGNET's reference code."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, matrix) -> Tensor:
        ctx.matrix = matrix
        ctx.save_for_backward(x, weight)
        return matrix @ x @ weight

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        back = ctx.matrix.transposed @ g.contiguous()
        return back @ weight.t(), x.t() @ back, None


class NaiveConv(DistGCNConv):
    """A GCN layer that multiplies so."""

    def forward(self, x, edge_index):
        known = edge_index.topology._plans
        if "naive" not in known:
            ones = torch.ones(len(edge_index.edges))
            topology = edge_index.topology
            kind = OperatorKind("gcn", add_self_loops=True)
            _, value = topology.gcn_norm(ones, kind, torch.float32)
            known["naive"] = topology._looped_plan(True, False).valued(value)
        z = Naive.apply(x.to_local(), self.lin.weight.t(), known["naive"])
        return pdc.DistTensor.wrap(z + self.bias, edge_index.nodes)


class GCN(torch.nn.Module):
    """Layers of given widths, ReLU between them."""

    def __init__(self, widths: Sequence[int], layer: type) -> None:
        super().__init__()
        pairs = itertools.pairwise(widths)
        self.layers = torch.nn.ModuleList(layer(a, b) for a, b in pairs)

    def forward(self, x, edge_index):
        for layer in self.layers[:-1]:
            x = layer(x, edge_index).relu()
        return self.layers[-1](x, edge_index)


def graph(scale: int, degree: int, widths: Sequence[int]) -> Data:
    """Returns the R-MAT graph with random features and labels."""
    row, col, n = bench.rmat(scale, degree // 2)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, widths[0], generator=generator)
    y = torch.randint(0, widths[-1], (n,), generator=generator)
    return Data(x=x, y=y, edge_index=torch.stack([row, col]))


# The ranks --------------------------------------------------------------------------


@dataclass
class Found:
    """One way at one rate: seconds of each epoch, and bytes that a rank receives in one."""

    seconds: list[float]
    bytes: int = 0


def way_of(case: Case, data: Data, widths: Sequence[int]) -> tuple[pdc.Mesh, Callable]:
    """Builds one way to train; returns its mesh, and what trains an epoch."""
    if case.auto:
        mesh = pdc.init(pdc.Auto(data, list(widths), method=case.cutter))
        share = pdc.partition(data, mesh)
        edges = share.edge_index
    else:
        mesh = pdc.init(grid=case.grid or (int(os.environ["WORLD_SIZE"]), 1, 1))
        share = pdc.partition(data, mesh, case.cutter, refine=case.refine)
        edges = share.edge_index.with_halo(case.halo)
        edges = edges.with_ordering(case.order, keep_inputs=case.keep)
    torch.manual_seed(0)
    net = GCN(widths, NaiveConv if case.naive else DistGCNConv)
    model = pdc.replicate(net, mesh)
    opt = torch.optim.Adam(model.parameters(), lr=0.01)

    def epoch() -> float:
        opt.zero_grad()
        loss = F.cross_entropy(model(share.x, edges), share.y)
        loss.backward()
        opt.step()
        return float(loss.detach())

    return mesh, epoch


def rank_main(args: argparse.Namespace) -> None:
    """Runs on a rank: all ways in turn, at every rate; rank 0 writes what it found."""
    torch.set_num_threads(1)
    widths = SHAPES[args.shape]
    data = graph(args.scale, args.degree, widths)
    every = [c for c in cases(int(os.environ["WORLD_SIZE"])) if args.only in c.name]
    fixed = {c.name: way_of(c, data, widths) for c in every if not c.auto}
    world = next(iter(fixed.values()))[0].world
    # plans, compiles, sees the features twice
    losses = {name: [epoch() for _ in range(3)] for name, (_, epoch) in fixed.items()}
    table = {}
    for rate in args.rates:
        collectives.barrier(world)
        network.shape(rate)
        collectives.barrier(world)
        for case in [c for c in every if c.auto]:
            fixed[case.name] = way_of(case, data, widths)
            losses[case.name] = [fixed[case.name][1]() for _ in range(3)]
            if world.rank == 0:
                print(f"{rate}: auto takes {fixed[case.name][0].plan}", flush=True)
        ways = list(fixed.values())
        found = [Found([]) for _ in ways]
        for _ in range(args.rounds):
            for (mesh, epoch), one in zip(ways, found, strict=True):
                collectives.barrier(world)
                mesh.ledger.reset()
                start = time.perf_counter()
                epoch()
                collectives.barrier(world)
                one.seconds.append(time.perf_counter() - start)
                rows = collectives.all_gather_counts([mesh.ledger.bytes()], world)
                one.bytes = max(row[0] for row in rows)
        table[rate] = [asdict(one) for one in found]
    network.shape(network.BARE)
    if world.rank == 0:
        every_loss = list(losses.values())
        found = {"names": list(fixed), "found": table, "losses": every_loss}
        text = json.dumps(found)
        Path(args.result).write_text(text)


# The command ------------------------------------------------------------------------


def run(args: argparse.Namespace, size: int, shape: str) -> str:
    """Runs the ranks; returns the table."""
    with tempfile.TemporaryDirectory() as room:
        result = Path(room) / "found.json"
        command = [sys.executable, __file__, "--rank", "--shape", shape]
        command += ["--scale", str(args.scale), "--degree", str(args.degree)]
        command += ["--rounds", str(args.rounds), "--result", str(result)]
        command += ["--only", args.only, "--rates", *args.rates]
        with network.links(size) as net:
            status = net.run(command)
        if status:
            sys.exit(status)
        found = json.loads(result.read_text())
    rows = []
    for k, name in enumerate(found["names"]):
        row = [name, f"{found['losses'][k][-1]:.4f}"]
        for rate in args.rates:
            one, base = found["found"][rate][k], found["found"][rate][0]
            middle = statistics.median(one["seconds"])
            spread = (max(one["seconds"]) - min(one["seconds"])) / middle
            first = statistics.median(base["seconds"])
            row += [middle, f"{100 * spread:.0f} %", first / middle]
        rows.append((*row, one["bytes"] / MIB, base["bytes"] / max(one["bytes"], 1)))
    head = ["way", "loss"]
    for rate in args.rates:
        head += [f"s/epoch, {rate}", "spread", "times"]
    head += ["MiB", "times"]
    widths = "-".join(map(str, SHAPES[shape]))
    return f"{shape}, {widths}, {size} ranks\n{format_table(head, rows)}"


def main() -> None:
    """Runs the comparisons and prints (or writes) the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--rates", nargs="+", default=["1gbit", "100mbit"])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["reddit"])
    parser.add_argument("--scale", type=int, default=13)
    parser.add_argument("--degree", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="ways with this in their name")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--shape", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        return rank_main(args)
    n = 1 << args.scale
    head = (
        f"`python benchmarks/full_graph.py --ranks {' '.join(map(str, args.ranks))} "
        f"--rates {' '.join(args.rates)} --shapes {' '.join(args.shapes)} --scale "
        f"{args.scale} --degree {args.degree} --rounds {args.rounds}`; torch "
        f"{torch.__version__}, Python {platform.python_version()}; {os.cpu_count()} "
        f"cores, one thread per rank; R-MAT graph of {n:,} nodes and {n * args.degree:,} "
        "edges, float32; medians, ways in turn; spread is (slowest - fastest) / median."
    )
    tables = []
    for shape, size in itertools.product(args.shapes, args.ranks):
        tables.append(run(args, size, shape))
        print(tables[-1], end="\n\n", flush=True)
        if args.write:  # as they come: a long run may be cut short
            text = "\n\n".join(tables)
            args.write.write_text(f"{head}\n\n{from_text(text)}\n")
    return None


if __name__ == "__main__":
    main()

"""Peak memory and bytes per rank against their price, for P = 1, 2, 4, 8.

    python benchmarks/memory.py [--scale 18] [--ranks 1 2 4 8] [--epochs 12] [--write REPORT.md]
    python benchmarks/memory.py --grids --ranks 4 8 [...]

Each rank loads its part of a folder (never the graph), trains a three-layer GCN, and
reports its peak resident memory above what it held idle, with everything
imported and compiled: after one epoch on a graph of a few nodes. With --grids, on every
grid of so many ranks, beside what `pdc.plan` says of it.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import tempfile
from pathlib import Path
from typing import Any

import spmm as bench
import torch
import torch.nn.functional as F
from tables import from_text
from torch_geometric.data import Data

import pyg_distcomm as pdc
from pyg_distcomm import kernels
from pyg_distcomm.comm.ledger import format_table
from pyg_distcomm.kernels import memory
from pyg_distcomm.nn import DistGCNConv
from pyg_distcomm.partition.cutters import cut
from pyg_distcomm.partition.folder import write_folder

WIDTHS = (128, 128, 128, 32)
MIB = 2**20


class GCN(torch.nn.Module):
    """Three layers, as in the epoch benchmark."""

    def __init__(self) -> None:
        super().__init__()
        pairs = itertools.pairwise(WIDTHS)
        self.convs = torch.nn.ModuleList(DistGCNConv(f, g) for f, g in pairs)

    def forward(self, x, edge_index):
        for conv in self.convs[:-1]:
            x = conv(x, edge_index).relu()
        return self.convs[-1](x, edge_index)


def price(n: int, e: int, h: int, t: int) -> dict[str, int]:
    """Prices one rank's memory in bytes: n own nodes, e edges, h ghosts, t rows sent.

    topology     ids of the edges and of their ends (24 e), in local numbering (16 e)
    operator     columns, values and their edges (12 each), their transpose the same
    features     x, y, masks
    activations  A X and relu(...) of each wide layer, the narrow ends, one temporary
    gradients    two of the widest at once
    halo         rows received and sent, for the widest exchange
    """
    wide, last = WIDTHS[1], WIDTHS[-1]
    loops = e + n
    return {
        "topology": 40 * e + 16 * n,
        "operator": 2 * (12 * loops + 4 * n),
        "features": n * (4 * WIDTHS[0] + 8 + 1),
        "activations": 4 * n * (2 * 2 * wide + wide + 4 * last),
        "gradients": 4 * n * 2 * wide,
        "halo": 4 * (h + t) * wide,
    }


def resident(field: str) -> int:
    """Reads VmRSS or VmHWM of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{field} is not in /proc/self/status")


def train(share: Data, mesh: pdc.Mesh, epochs: int) -> None:
    """Trains a new model; the ledger keeps the last epoch."""
    model = pdc.replicate(GCN(), mesh)
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(epochs):
        mesh.ledger.reset()
        opt.zero_grad()
        out = model(share.x, share.edge_index)
        F.cross_entropy(out, share.y).backward()
        opt.step()
        del out


def import_all(mesh: pdc.Mesh) -> None:
    """Imports, loads and compiles what training uses, on a ring of a few nodes."""
    kernels.warm_up()
    node = torch.arange(8 * mesh.size)
    ring = Data(
        x=torch.ones(len(node), WIDTHS[0]),
        y=node % WIDTHS[-1],
        edge_index=torch.stack([node, node.roll(1)]),
    )
    train(pdc.partition(ring, mesh, "block"), mesh, 1)
    memory.give_back()


def rank_main(
    folder: str, grid: tuple[int, int, int] | None, epochs: int
) -> dict[str, float]:
    """Trains on one rank and reports."""
    mesh = pdc.init(grid=grid)
    import_all(mesh)
    idle = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    share = pdc.load_partition(folder, mesh)
    train(share, mesh, epochs)
    halo = share.edge_index.topology.locals.halo
    n, e = len(share.edge_index.nodes), len(share.edge_index.edges)
    parts = price(n, e, halo.num_ghosts, sum(halo.send_counts))
    return {
        "peak": resident("VmHWM") - idle,
        "price": sum(parts.values()),
        "bytes": mesh.ledger.bytes(),
        **parts,
    }


def measured(
    data: Data,
    owners: pdc.Partition,
    epochs: int,
    grid: tuple[int, int, int] | None = None,
) -> list[dict[str, float]]:
    """Returns what each rank reports."""
    with tempfile.TemporaryDirectory() as room:
        write_folder(Path(room) / "parts", data, owners)
        folder = str(Path(room) / "parts")
        return pdc.launch(rank_main, owners.num_parts, folder, grid, epochs, threads=1)


def by_size(data: Data, sizes: list[int], epochs: int) -> str:
    """Returns a table by the number of ranks, with the parts of the price."""
    rows = []
    for size in sizes:
        assert data.edge_index is not None
        assert data.num_nodes is not None
        owners = cut(data.edge_index, data.num_nodes, size, "metis")
        found = measured(data, owners, epochs)
        worst = max(found, key=lambda one: one["peak"])
        rows.append(
            (
                size,
                *(round(worst[k] / MIB) for k in ("peak", "price")),
                round(worst["peak"] / worst["price"], 2),
                *(round(worst[k] / MIB) for k in price(0, 0, 0, 0)),
                round(max(one["bytes"] for one in found) / MIB),
                round(sum(one["bytes"] for one in found) / MIB),
            )
        )
    head = ("ranks", "peak", "price", "ratio", *price(0, 0, 0, 0))
    return format_table((*head, "max MiB/epoch", "all"), rows)


def by_grid(data: Data, sizes: list[int], epochs: int) -> str:
    """Returns a table of all grids, beside the planner's memory."""
    rows = []
    for size in sizes:
        assert data.edge_index is not None
        assert data.num_nodes is not None
        owners = cut(data.edge_index, data.num_nodes, size, "metis")
        plans = pdc.plan(data, WIDTHS, size, partition=owners)
        best: dict[tuple[int, int, int], Any] = {}  # of each grid, as layers would run
        for plan in plans:
            best.setdefault(plan.grid, plan)
        for plan in sorted(best.values(), key=lambda plan: plan.grid, reverse=True):
            found = measured(data, owners, epochs, plan.grid)
            peak = max(one["peak"] for one in found)
            moved = max(one["bytes"] for one in found)
            sizes_of = (round(b / MIB) for b in (peak, plan.memory, moved))
            sides = "x".join(map(str, plan.grid))
            rows.append((size, sides, *sizes_of, round(peak / plan.memory, 2)))
    head = ("ranks", "grid", "peak", "planned", "max MiB/epoch", "peak/planned")
    return format_table(head, rows)


def main() -> None:
    """Runs every number of ranks and prints (or writes) the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=int, default=18)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--grids", action="store_true", help="all grids of so many")
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    row, col, n = bench.rmat(args.scale)
    edge_index = torch.stack([row, col])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, WIDTHS[0], generator=generator)
    y = torch.randint(0, WIDTHS[-1], (n,), generator=generator)
    data = Data(x=x, y=y, edge_index=edge_index)
    table = (by_grid if args.grids else by_size)(data, args.ranks, args.epochs)
    print(table)
    if args.write:
        versions = f"torch {torch.__version__}, Python {platform.python_version()}"
        flag = " --grids" if args.grids else ""
        ranks = " ".join(map(str, args.ranks))
        args.write.write_text(
            f"# Memory and bytes per rank\n\n"
            f"`python benchmarks/memory.py --scale {args.scale}{flag} --ranks {ranks}`; "
            f"{versions}; R-MAT graph of {n:,} nodes and {edge_index.size(1):,} edges, "
            f"METIS cut, GCN {WIDTHS}, float32, one thread per rank.\n\n{from_text(table)}\n"
        )


if __name__ == "__main__":
    main()

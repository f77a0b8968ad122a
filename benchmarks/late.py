"""What one bit and lateness are worth: epoch seconds over shaped links.

    sudo python benchmarks/network.py --ranks 4 --rate 100mbit -- \
        python benchmarks/late.py [--widths 100 128 128 47] [--scale 15] [--rounds 5]

A GCN of given widths on a graph of edges drawn evenly (or by R-MAT), cut at random. Ways
are built first, in the same processes, and take turns. "as in the paper": every exchange is
compressed, also the last, and A X0 is not kept; the others are the defaults of the package,
whose last exchange is exact and whose A X0 is kept. Bytes are those of halos that the
busiest rank received in an epoch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import full_graph
import torch
import torch.nn.functional as F

import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.ledger import format_table
from pyg_distcomm.nn import DistGCNConv

PAPER = {"exact_last": False}
HALO = ("halo", "halo_reduce", "all_gather", "reduce_scatter")
WAYS: dict[str, tuple[Callable[[], Any], bool]] = {  # link, whether A X0 is kept
    "exact, as in the paper": (lambda: None, False),
    "late alone (PipeGCN), as in the paper": (lambda: pdc.PipeGCN(**PAPER), False),
    "1 bit, now, as in the paper": (lambda: pdc.Sylvie(late=0, **PAPER), False),
    "1 bit, late, as in the paper": (lambda: pdc.Sylvie(**PAPER), False),
    "exact": (lambda: None, True),
    "late alone (PipeGCN)": (pdc.PipeGCN, True),
    "1 bit, now": (lambda: pdc.Sylvie(late=0), True),
    "1 bit, late": (pdc.Sylvie, True),
}


def way_of(
    name: str, data: Any, widths: list[int]
) -> tuple[Callable[[int], float], pdc.Mesh]:
    """Builds one way to train; returns what trains epochs, and says how long each took."""
    make, keep = WAYS[name]
    mesh, link = pdc.init(), make()
    share = pdc.partition(data, mesh, "random", link=link)
    edge_index = share.edge_index.with_ordering(keep_inputs=keep)
    torch.manual_seed(0)
    model = pdc.replicate(full_graph.GCN(widths, DistGCNConv), mesh)
    optimizer = torch.optim.Adam(model.parameters())

    def epochs(count: int) -> float:
        collectives.barrier(mesh.world)
        start = time.perf_counter()
        for _ in range(count):
            mesh.ledger.reset()
            optimizer.zero_grad()
            F.cross_entropy(model(share.x, edge_index), share.y).backward()
            optimizer.step()
            if link is not None:
                link.step()
        if link is not None:
            link.drain()  # what is late still has to travel
        collectives.barrier(mesh.world)
        return (time.perf_counter() - start) / count

    return epochs, mesh


def main() -> None:
    """Runs on a rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--law", choices=("uniform", "rmat"), default="uniform")
    parser.add_argument("--widths", type=int, nargs="+", default=[100, 128, 128, 47])
    parser.add_argument("--scale", type=int, default=15)
    parser.add_argument("--degree", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=3, help="of one way, in a round")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = full_graph.graph(args.scale, args.degree, args.widths)
    if args.law == "uniform":
        generator = torch.Generator().manual_seed(0)
        shape = data.edge_index.shape
        data.edge_index = torch.randint(data.num_nodes, shape, generator=generator)
    ways = {name: way_of(name, data, args.widths) for name in args.ways}
    for epochs, _ in ways.values():
        epochs(3)  # the first is exact, the second keeps A X0
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.rounds):
        for name, (epochs, _) in ways.items():
            times[name].append(epochs(args.epochs))
    rows = []
    for name, found in times.items():
        mesh = ways[name][1]
        halo = sum(mesh.ledger.bytes(op) for op in HALO)
        most = max(row[0] for row in collectives.all_gather_counts([halo], mesh.world))
        middle = slowest(statistics.median(found), mesh)
        spread = f"{100 * (max(found) - min(found)) / middle:.0f} %"
        rows.append([name, middle, spread, most])
    by_name = {row[0]: row for row in rows}
    for row in rows:
        base = by_name["exact, as in the paper" if "paper" in row[0] else "exact"]
        seconds, moved = base[1], base[3]
        row[4:] = [
            seconds / row[1],
            moved / row[3],
            by_name["exact, as in the paper"][1] / row[1],
        ]
    if pdc.init().rank == 0:
        head = (
            "way",
            "s/epoch",
            "spread",
            "bytes, most",
            "times",
            "fewer bytes",
            "over the first",
        )
        print(format_table(head, rows))
        if args.json:
            args.json.write_text(json.dumps(rows))


def slowest(seconds: float, mesh: pdc.Mesh) -> float:
    """Returns the seconds of the slowest rank."""
    return max(collectives.all_gather_object(seconds, mesh.world))


if __name__ == "__main__":
    main()

"""What overlap is worth: an epoch with sums in parts and gradients in buckets, or whole.

    sudo python benchmarks/network.py --ranks 4 --rate 1gbit -- \
        python benchmarks/overlap.py [--shape products] [--scale 15] [--rounds 7]

A GCN of given widths on an R-MAT graph cut at random, features with gradient, so that every
product has a transpose. Ways are built first, in the same processes, and take turns, epoch
by epoch. "in line" waits for each exchange as soon as it has begun.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager

import full_graph
import torch
import torch.nn.functional as F

import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.collectives import Pending
from pyg_distcomm.comm.ledger import format_table
from pyg_distcomm.halo import halo as halos
from pyg_distcomm.nn import DistGCNConv

WAYS = {  # parts of sums at most, MB of a bucket, whether exchanges overlap
    "in line": (1, 25, False),
    "own columns meanwhile": (1, 25, True),
    "and sums in parts": (4, 25, True),
    "and gradients in buckets": (4, None, True),
}


@contextmanager
def in_line(wanted: bool):
    """Makes every exchange wait for itself, inside the block."""
    begin = collectives.all_to_all

    def waited(*args, **kwargs) -> Pending:
        pending = begin(*args, **kwargs)
        pending.wait()
        return pending

    try:
        collectives.all_to_all = waited if wanted else begin
        yield
    finally:
        collectives.all_to_all = begin


def way_of(name: str, data, widths) -> Callable[[], float]:
    """Builds one way to train; returns what trains an epoch and says how long it took."""
    most, bucket, overlapping = WAYS[name]
    halos.MAX_CHUNKS, before = most, halos.MAX_CHUNKS
    mesh = pdc.init()
    share = pdc.partition(data, mesh, "random")
    x = share.x.detach().requires_grad_()
    torch.manual_seed(0)
    net = full_graph.GCN(widths, DistGCNConv)
    options = {} if bucket is None else {"bucket_cap_mb": bucket}
    model = pdc.replicate(net, mesh, **options)

    def epoch() -> float:
        collectives.barrier(mesh.world)
        start = time.perf_counter()
        with in_line(not overlapping):
            F.cross_entropy(model(x, share.edge_index), share.y).backward()
        model.zero_grad()
        collectives.barrier(mesh.world)
        return time.perf_counter() - start

    epoch()  # plans with as many parts as asked for
    halos.MAX_CHUNKS = before
    return epoch


def main() -> None:
    """Runs on a rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=full_graph.SHAPES, default="products")
    parser.add_argument("--scale", type=int, default=15)
    parser.add_argument("--degree", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    widths = full_graph.SHAPES[args.shape]
    data = full_graph.graph(args.scale, args.degree, widths)
    ways = {name: way_of(name, data, widths) for name in WAYS}
    for epoch in ways.values():
        epoch()  # DDP puts its buckets in order after the first
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.rounds):
        for name, epoch in ways.items():
            times[name].append(epoch())
    rows = []
    base = statistics.median(times["in line"])
    for name, found in times.items():
        middle = statistics.median(found)
        spread = f"{100 * (max(found) - min(found)) / middle:.0f} %"
        rows.append((name, middle, spread, base / middle))
    if pdc.init().rank == 0:
        head = ("way", "s/epoch", "spread", "times")
        print(format_table(head, rows))


if __name__ == "__main__":
    main()

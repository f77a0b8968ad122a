"""Learnable rows beside torch.nn.Embedding under DistributedDataParallel: a step's seconds.

    python benchmarks/embedding.py [--nodes 1000000] [--dim 64] [--ids 50000] [--ranks 2]

Each rank looks up rows of its own random ids, and takes a step of sparse SGD (DDP averages
sparse gradients with SGD; it does so by gathering those of all ranks). With routes, the ids
were sent to their owners before, as a loader does with a bulk in the background. All take
turns, medians of the slowest rank; bytes are what rank 0 receives in a step, DDP's by the
formula of its all-gather: (P - 1) ids of 8 bytes and rows.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.ledger import format_table
from pyg_distcomm.ops.id_plan import attach_route, plan_ids

DDP, ROUTED = "torch.nn.Embedding + DDP", "DistEmbedding, with routes"


def steps(options: argparse.Namespace) -> list[list[str]]:
    """Returns a table's rows: both tables of vectors, in turns."""
    mesh = pdc.init()
    ways = {}
    emb = pdc.DistEmbedding(options.nodes, options.dim, like=mesh, sparse=True)
    ways["DistEmbedding"] = emb, torch.optim.SGD(emb.parameters(), lr=0.1)
    routed = pdc.DistEmbedding(options.nodes, options.dim, like=mesh, sparse=True)
    ways[ROUTED] = routed, torch.optim.SGD(routed.parameters(), lr=0.1)
    plain = DistributedDataParallel(
        torch.nn.Embedding(options.nodes, options.dim, sparse=True)
    )
    ways[DDP] = (
        plain,
        torch.optim.SGD(plain.parameters(), lr=0.1),
    )
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    received = dict.fromkeys(ways, 0)
    generator = torch.Generator().manual_seed(mesh.rank)
    for turn in range(options.rounds + 1):
        drawn = torch.randint(options.nodes, (options.ids,), generator=generator)
        for name, (model, optimizer) in ways.items():
            ids = drawn.clone()  # a route stays with its tensor
            if name == ROUTED:
                plan = plan_ids([ids], routed.rows, mesh.world)[0]
                _ = plan.asked
                attach_route(ids, plan, routed.rows)
            collectives.barrier(mesh.world)
            before, start = mesh.ledger.bytes(), time.perf_counter()
            optimizer.zero_grad()
            model(ids).square().sum().backward()
            optimizer.step()
            spent = torch.tensor(time.perf_counter() - start)
            received[name] = mesh.ledger.bytes() - before
            dist.all_reduce(spent, op=dist.ReduceOp.MAX)
            if turn:
                seconds[name].append(float(spent))
    received[DDP] = options.ids * (4 * options.dim + 8) * (mesh.size - 1)
    held = dict.fromkeys(ways, emb.shard.numel() * 4)
    held[DDP] = options.nodes * options.dim * 4
    rows = []
    for name, bytes_ in received.items():
        some = sorted(seconds[name])
        spread = (some[-1] - some[0]) / statistics.median(some)
        rows.append(
            [
                name,
                f"{1e3 * statistics.median(some):.1f}",
                f"{spread:.0%}",
                f"{bytes_ / 2**20:.1f}",
                f"{held[name] / 2**20:.0f}",
            ]
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--ids", type=int, default=50_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    rows = pdc.launch(steps, options.ranks, options)[0]
    head = ["table", "ms per step", "spread", "MiB received", "MiB of rows held"]
    print(format_table(head, rows))


if __name__ == "__main__":
    main()

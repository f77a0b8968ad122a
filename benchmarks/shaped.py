"""Minibatches over a link of 1 Gbit/s: two ranks, joined by `network.py`.

    sudo python benchmarks/shaped.py [--rate 1gbit] [--scale 18] [--write REPORT.md]

Needs root; says what else is missing. The ranks shape their own links between turns, so that
each way to load runs on the bare link and on the shaped one in the same processes. What the
link carried is read from the interface, headers included, beside what the ledger counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import loaders
import network
import partitioned
import ranks
import torch
from loaders import BATCH, MIB, WIDTH
from ranks import Case, Found, Task
from tables import from_text

import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.ledger import format_table

CASES = {
    "owner": Case(),
    "owner, k=1": Case(bulk=1),
    "requester": Case(place="requester"),
    "cache of 10 %": Case(cache=0.1),
    "fp16 rows": Case(wire="fp16"),
    "int8 rows": Case(wire="int8"),
    "cache of 10 %, fp16 rows": Case(cache=0.1, wire="fp16"),
    "two copies": Case(copies=2),
    "owner, sampling alone": Case(rows=False),
    "requester, sampling alone": Case(place="requester", rows=False),
}


def rank_main(task: Task, rates: list[str], rounds: int, mesh: pdc.Mesh) -> list[dict]:
    """Runs on a rank: every case at every rate, in turn."""
    ways = ranks.ways_of(list(CASES.values()), task, mesh)
    found: dict[tuple[str, str], list[Found]] = {}
    for turn in range(rounds + 1):
        for rate in rates:
            network.shape(rate)
            for name, way in zip(CASES, ways, strict=True):
                collectives.barrier(mesh.world)
                before = network.carried()
                one = way()
                one.bytes["link"] = network.carried() - before
                if turn:
                    found.setdefault((name, rate), []).append(one)
    collectives.barrier(mesh.world)
    return [
        {"name": name, "rate": rate, **asdict(ranks.typical(every))}
        for (name, rate), every in found.items()
    ]


def started(
    net: network.Network, task: Task, rates: list[str], rounds: int
) -> list[list[dict]]:
    """Runs the ranks; returns what each found."""
    with tempfile.TemporaryDirectory() as room:
        out = Path(room) / "found.json"
        job = {**asdict(task), "rates": rates, "rounds": rounds, "out": str(out)}
        command = [sys.executable, "-W", "ignore", __file__, "--rank", json.dumps(job)]
        home = str(Path(pdc.__file__).parents[1])
        if net.run(command, {"PYTHONPATH": home}):
            raise RuntimeError("a rank failed; what it said stands above")
        return json.loads(out.read_text())


def as_rank(job: str) -> None:
    """Does one rank's work, in its own process; rank 0 writes what all found."""
    asked = json.loads(job)
    rates, rounds, out = (asked.pop(name) for name in ("rates", "rounds", "out"))
    torch.set_num_threads(1)
    asked["fan_out"] = tuple(asked["fan_out"])
    mesh = pdc.init()
    found = rank_main(Task(**asked), rates, rounds, mesh)
    every = collectives.all_gather_object(found, mesh.world)
    if mesh.rank == 0:
        Path(out).write_text(json.dumps(every))


def table(every: list[list[dict]], rates: list[str]) -> str:
    """Formats seconds at each rate, and what travelled."""
    joined: dict[tuple[str, str], Found] = {}
    for row in zip(*every, strict=True):
        name, rate = row[0]["name"], row[0]["rate"]
        found = [
            Found(**{k: v for k, v in one.items() if k not in ("name", "rate")})
            for one in row
        ]
        joined[name, rate] = ranks.joined(found)
    lines = []
    for name in CASES:
        seconds = [joined[name, rate].seconds for rate in rates]
        owner = joined["owner", rates[-1]].seconds
        moved = dict(joined[name, rates[-1]].bytes)
        on_link = moved.pop("link") / MIB
        parts = [
            sum(b for k, b in moved.items() if k.startswith(p)) / MIB
            for p in ("sample", "fetch")
        ]
        shares = seconds[-1] / seconds[0], seconds[-1] / owner
        lines.append((name, *seconds, *shares, *parts, on_link))
    head = ("two ranks", *(f"s/epoch, {r}" for r in rates), f"{rates[-1]}/{rates[0]}")
    head += (f"of owner's, {rates[-1]}", "MiB sampling", "MiB fetching", "MiB on link")
    return format_table(head, lines)


def main() -> None:
    """Runs all ways on the bare and on the shaped link."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--scale", type=int, default=18)
    parser.add_argument("--degree", type=int, default=16)
    parser.add_argument("--share", type=float, default=0.2)
    parser.add_argument("--method", default="metis")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--room", type=Path, help="keeps the cut graph for a later run")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        return as_rank(args.rank)
    reason = network.missing()
    if reason:
        sys.exit(f"no shaped link: {reason}")
    rates, tables = [network.BARE, args.rate], []
    with contextlib.ExitStack() as stack:
        room = args.room or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        size = args.scale, args.degree, args.share
        partitioned.prepared(room, *size, [2], args.method)
        folder = str(room / f"{args.scale}-{args.degree}-2")
        seeds = partitioned.seeds_file(room, args.scale, args.share)
        net = stack.enter_context(network.links(2))
        for fan_out in loaders.FAN_OUTS:
            task = Task(folder, str(seeds), fan_out)
            found = table(started(net, task, rates, args.rounds), rates)
            tables.append(f"{list(fan_out)}\n{found}")
            print(tables[-1], end="\n\n", flush=True)
        count = len(torch.load(seeds, weights_only=True))
    if args.write:
        n = 1 << args.scale
        versions = f"torch {torch.__version__}, Python {platform.python_version()}"
        text = "\n\n".join(tables)
        args.write.write_text(
            f"`sudo python benchmarks/shaped.py --rate {args.rate} --scale {args.scale} "
            f"--degree {args.degree} --share {args.share} --method {args.method} --rounds "
            f"{args.rounds}`; {versions}; two ranks of one thread on {os.cpu_count()} cores, "
            f"tbf with burst {network.BURST} latency {network.LATENCY} at both ends; "
            f"R-MAT graph of {n:,} nodes and {n * args.degree:,} edges, cut by "
            f"{args.method}, {count:,} seeds in batches of "
            f"{BATCH}, {WIDTH} float32 features; medians, ways in turn.\n\n{from_text(text)}\n"
        )


if __name__ == "__main__":
    main()

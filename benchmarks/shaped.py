"""Minibatches over a link of 1 Gbit/s: two ranks in network namespaces, shaped by tc.

    sudo python benchmarks/shaped.py [--rate 1gbit] [--scale 18] [--write REPORT.md]

Needs root, `ip` and `tc`, and Linux's tbf queue; says so where they are missing. Makes two
namespaces joined by a pair of virtual interfaces, and takes them away again. The ranks
shape their own ends between turns, so that each way to load runs on the bare link and on
the shaped one in the same processes. What the link carried is read from the interface,
headers included, beside what the ledger counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import loaders
import partitioned
import ranks
import torch
from loaders import BATCH, MIB, WIDTH
from ranks import Case, Found, Task

import pyg_distcomm as pdc
from pyg_distcomm import wire
from pyg_distcomm.ledger import format_table

SPACES = ("pdc_rank0", "pdc_rank1")
ENDS = ("pdc0", "pdc1")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
QUEUE = ("burst", "256kb", "latency", "50ms")
BARE = "bare"
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


# The link ---------------------------------------------------------------------------


def missing() -> str | None:
    """Says why a link cannot be made here, if so."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "making network namespaces needs root: run it with sudo"
    absent = [name for name in ("ip", "tc") if shutil.which(name) is None]
    return f"{' and '.join(absent)} not found: install iproute2" if absent else None


def call(*words: str) -> None:
    """Runs a command, or raises what it said."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")


@contextlib.contextmanager
def link() -> Iterator[None]:
    """Joins two new namespaces by a link inside the block."""
    made = []
    try:
        for space in SPACES:
            call("ip", "netns", "add", space)
            made.append(space)
        ends = ("type", "veth", "peer", "name", ENDS[1], "netns", SPACES[1])
        call("ip", "link", "add", ENDS[0], "netns", SPACES[0], *ends)
        for space, end, address in zip(SPACES, ENDS, ADDRESSES, strict=True):
            call("ip", "-n", space, "addr", "add", f"{address}/24", "dev", end)
            call("ip", "-n", space, "link", "set", end, "up")
            call("ip", "-n", space, "link", "set", "lo", "up")
        yield
    finally:
        for space in made:  # takes the interfaces along
            call("ip", "netns", "del", space)


def shape(end: str, rate: str) -> None:
    """Limits what this namespace sends, or no longer limits it."""
    here = "dev", end, "root"
    now = subprocess.run(
        ("tc", "qdisc", "del", *here), capture_output=True, check=False
    )
    del now  # there may have been none
    if rate != BARE:
        call("tc", "qdisc", "add", *here, "tbf", "rate", rate, *QUEUE)


def carried(end: str) -> int:
    """Returns the bytes that have arrived here."""
    return int(Path(f"/sys/class/net/{end}/statistics/rx_bytes").read_text())


# The ranks --------------------------------------------------------------------------


def rank_main(task: Task, rates: list[str], rounds: int) -> list[dict]:
    """Runs on a rank: every case at every rate, in turn."""
    mesh = pdc.init()
    end = ENDS[mesh.rank]
    ways = ranks.ways_of(list(CASES.values()), task, mesh)
    found: dict[tuple[str, str], list[Found]] = {}
    for turn in range(rounds + 1):
        for rate in rates:
            shape(end, rate)
            for name, way in zip(CASES, ways, strict=True):
                wire.barrier(mesh.world)
                before = carried(end)
                one = way()
                one.bytes["link"] = carried(end) - before
                if turn:
                    found.setdefault((name, rate), []).append(one)
    wire.barrier(mesh.world)
    return [
        {"name": name, "rate": rate, **asdict(ranks.typical(every))}
        for (name, rate), every in found.items()
    ]


def started(task: Task, rates: list[str], rounds: int) -> list[list[dict]]:
    """Starts both ranks in their namespaces; returns what they print."""
    home = str(Path(pdc.__file__).parents[1])
    running = []
    for rank, (space, end) in enumerate(zip(SPACES, ENDS, strict=True)):
        env = {
            **os.environ,
            "PYTHONPATH": home,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": "29577",
            "GLOO_SOCKET_IFNAME": end,
            "OMP_NUM_THREADS": "1",
        }
        job = json.dumps({**asdict(task), "rates": rates, "rounds": rounds})
        command = [sys.executable, "-W", "ignore", __file__, "--rank", job]
        running.append(
            subprocess.Popen(
                ["ip", "netns", "exec", space, *command],
                env=env,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    try:
        said = [one.communicate()[0] for one in running]
    finally:
        for one in running:
            one.kill()
    if any(one.returncode for one in running):
        raise RuntimeError("a rank failed; what it said stands above")
    return [json.loads(text.splitlines()[-1]) for text in said]


def as_rank(job: str) -> None:
    """Does one rank's work, in its own process, and prints what it found."""
    asked = json.loads(job)
    rates, rounds = asked.pop("rates"), asked.pop("rounds")
    torch.set_num_threads(1)
    asked["fan_out"] = tuple(asked["fan_out"])
    found = rank_main(Task(**asked), rates, rounds)
    print(json.dumps(found), flush=True)


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
    reason = missing()
    if reason:
        sys.exit(f"no shaped link: {reason}")
    rates, tables = [BARE, args.rate], []
    with contextlib.ExitStack() as stack:
        room = args.room or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        size = args.scale, args.degree, args.share
        partitioned.prepared(room, *size, [2], args.method)
        folder = str(room / f"{args.scale}-{args.degree}-2")
        seeds = partitioned.seeds_file(room, args.scale, args.share)
        stack.enter_context(link())
        for fan_out in loaders.FAN_OUTS:
            task = Task(folder, str(seeds), fan_out)
            found = table(started(task, rates, args.rounds), rates)
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
            f"tbf with {' '.join(QUEUE)} at both ends; R-MAT graph of {n:,} nodes and "
            f"{n * args.degree:,} edges cut by {args.method}, {count:,} seeds in batches of "
            f"{BATCH}, {WIDTH} float32 features; medians, ways in turn.\n\n```\n{text}\n```\n"
        )


if __name__ == "__main__":
    main()

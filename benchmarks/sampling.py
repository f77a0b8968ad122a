"""Neighbour sampling and loading: ours against PyG's NeighborLoader and GraphBolt.

    python benchmarks/sampling.py [--scale 18] [--rounds 3] [--write REPORT.md]

Batches of 1024 out of a tenth of the nodes of an R-MAT graph, 100 float32 features a
node. Competitors take turns in one process, each on the same threads, and medians are
compared; a peer that cannot be imported is left out. GraphBolt needs a torch of its own:
PEER_PYTHON names an interpreter that has it, and it runs after the others. Memory and
the time to the first batch are taken in a fresh process for each competitor, warmed up
on a small graph.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import loaders
import torch
from loaders import BATCH, BULKS, FAN_OUTS, GRAPHBOLT, OURS, WIDTH
from tables import from_text
from torch import Tensor
from torch_geometric.data import Data

import pyg_distcomm
from pyg_distcomm.comm.ledger import format_table

HERE = Path(__file__).parent


def in_process(name: str, file: str, fan_out: tuple[int, ...]) -> dict[str, Any]:
    """Runs `alone`, or GraphBolt's script, in a process of its own."""
    command = [sys.executable, str(HERE / "sampling.py"), "--alone", name]
    if name == GRAPHBOLT:
        command = [os.environ["PEER_PYTHON"], str(HERE / "graphbolt.py")]
    command += ["--graph", file, "--fan-out", *map(str, fan_out)]
    home = str(Path(pyg_distcomm.__file__).parents[1])
    path = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
    env = os.environ if name == GRAPHBOLT else {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def on_file(data: Data, nodes: Tensor) -> Iterator[str]:
    """Writes the problem where other processes read it."""
    with tempfile.TemporaryDirectory() as room:
        file = f"{room}/graph.pt"
        torch.save({**data.to_dict(), "seed": nodes}, file)
        yield file


def report(data: Data, nodes: Tensor, rounds: int) -> Iterator[str]:
    """Yields the tables, as they are found."""
    head = ("fan-outs", "threads", "sampling alone", "seeds/s", "edges/s", "times ours")
    yield format_table(head, loaders.sampling(data, nodes, rounds))
    rows = []
    for fan_out in FAN_OUTS:
        for threads in (1, 2):
            times = loaders.loading(data, nodes, fan_out, threads, rounds)
            for name, t in times.items():
                who = str(list(fan_out)), threads, name
                rows.append((*who, t, round(len(nodes) / t), t / times[OURS]))
    head = ("fan-outs", "threads", "whole loader", "s/epoch", "seeds/s", "times ours")
    yield format_table(head, rows)
    curve = []
    for fan_out in FAN_OUTS:
        times = loaders.bulks(data, nodes, fan_out, rounds).values()
        curve.append((str(list(fan_out)), *(round(len(nodes) / t) for t in times)))
    yield format_table(("seeds/s, two threads", *(f"k={k}" for k in BULKS)), curve)
    yield phase_table({f: loaders.phases(data, nodes, f, rounds) for f in FAN_OUTS})
    with on_file(data, nodes) as file:
        yield process_table(file)
        if loaders.missing(GRAPHBOLT) is None:
            yield graphbolt_table({f: in_process(GRAPHBOLT, file, f) for f in FAN_OUTS})


def phase_table(found: dict[tuple[int, ...], dict[str, float]]) -> str:
    """Formats what `phases` found."""
    names = ("sampling", "gathering", "assembly", "loader", "floor")
    rows = []
    for fan_out, p in found.items():
        rates = p["edges"] / p["kernel"] / 1e6, p["bytes"] / p["rows"] / 1e9
        row = str(list(fan_out)), *(1e3 * p[name] for name in names)
        rows.append((*row, p["loader"] / p["floor"], *rates))
    head = ("one thread, ms per batch", *names, "loader/floor", "kernel, Medges/s")
    return format_table((*head, "rows, GB/s"), rows)


def process_table(file: str) -> str:
    """Runs each competitor in a process of its own, and formats what it says."""
    fan_out, rows = FAN_OUTS[0], []
    for name in loaders.present():
        f = in_process(name, file, fan_out)
        rows.append((name, f["first"], f["again"], round(f["idle"]), round(f["more"])))
    head = (f"{list(fan_out)}, two threads", "first batch, s", "next loader's, s")
    return format_table((*head, "idle MiB", "peak above, MiB"), rows)


def graphbolt_table(found: dict[tuple[int, ...], dict[str, Any]]) -> str:
    """Formats what GraphBolt's script prints."""
    rows = [(str(list(f)), *row) for f, one in found.items() for row in one["rows"]]
    head = ("GraphBolt", "threads", "workers", "what", "seeds/s", "edges/s")
    return format_table(head, rows)


def main() -> None:
    """Runs all comparisons and prints (or writes) the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--scale", type=int, default=18)
    parser.add_argument(
        "--share", type=float, default=loaders.SHARE, help="of nodes as seeds"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    parser.add_argument("--graph", help=argparse.SUPPRESS)
    parser.add_argument("--fan-out", type=int, nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        print(json.dumps(loaders.alone(args.alone, args.graph, tuple(args.fan_out))))
        return
    data = loaders.graph(args.scale)
    nodes, tables = loaders.seeds(data, args.share), []
    for table in report(data, nodes, args.rounds):
        print(table, end="\n\n", flush=True)
        tables.append(table)
    if args.write:
        text = "\n\n".join(tables)
        versions = f"torch {torch.__version__}, Python {platform.python_version()}"
        args.write.write_text(
            "# Neighbour sampling beside PyG and GraphBolt\n\n"
            f"`python benchmarks/sampling.py --scale {args.scale} "
            f"--share {args.share} --rounds {args.rounds}`; {versions}; R-MAT graph of "
            f"{data.num_nodes:,} nodes and {data.num_edges:,} edges, {len(nodes):,} seeds in "
            f"batches of {BATCH}, {WIDTH} float32 features; medians, competitors in turn, "
            f"GraphBolt after them.\n\n{from_text(text)}\n"
        )


if __name__ == "__main__":
    main()

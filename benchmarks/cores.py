"""Epochs of minibatch training on 1 and 2 cores, with bulks built ahead or on demand.

    python benchmarks/cores.py [--scale 18] [--batches 6] [--epochs 5] [--write REPORT.md]

One GraphSAGE of three layers, converted, on our loader. Each pair of cores and torch
threads runs in a process of its own, pinned to its cores; ways to build bulks take turns
there. *On demand*: when asked for, on all threads. *Ahead, n*: in the background, on n
threads. *Workers*: in a process of torch's loader. *auto* is the loader's default. Seconds
and processor seconds of an epoch, medians; ratios of seconds to *auto*.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from step import BATCH, Model, epoch, graph
from tables import from_text

import pyg_distcomm as pdc
from pyg_distcomm.comm.ledger import format_table
from pyg_distcomm.kernels import threads as pool
from pyg_distcomm.loader import DistNeighborLoader, LoaderOptions

CASES = ((1, 1), (1, 2), (2, 1), (2, 2))  # cores, threads
FAN_OUTS = [15, 10, 5]


def alone(args: argparse.Namespace) -> dict[str, list[float]]:
    """Measures all ways of one case in this process."""
    torch.set_num_threads(args.threads)
    data = graph(args.scale)
    torch.manual_seed(0)
    model = pdc.convert(Model("sage", args.hidden, len(FAN_OUTS), False))
    opt = torch.optim.Adam(model.parameters())
    order = torch.randperm(data.num_nodes, generator=torch.Generator().manual_seed(1))
    options = {
        "num_neighbors": FAN_OUTS,
        "input_nodes": order[: args.batches * BATCH],
        "batch_size": BATCH,
    }

    def loader(prefetch: int | str = "auto", **more: Any) -> Any:
        ours = LoaderOptions(seed=0, prefetch=prefetch)
        return DistNeighborLoader(data, **options, options=ours, **more)

    idle, spare = pool.spare, {}
    ways = {
        "auto": loader(),
        "on demand": loader(prefetch=0),
        "ahead, 1": loader(prefetch=1),
    }
    spare["ahead, 1"] = 1
    if args.threads > 1:
        ways[f"ahead, {args.threads}"] = loader(prefetch=1)
        spare[f"ahead, {args.threads}"] = args.threads
    ways["1 worker"] = loader(num_workers=1, persistent_workers=True)
    times: dict[str, list[Any]] = {name: [] for name in ways}
    for k in range(args.epochs + 1):
        for name, batches in ways.items():
            forced = spare.get(name)
            pool.spare = idle if forced is None else lambda ranks=1, n=forced: n
            spent, _ = epoch(batches, model, opt)
            if k:  # the first compiles, and starts workers
                times[name].append(spent.sum(0).tolist())
    return {
        name: [statistics.median(t) for t in zip(*found, strict=True)]
        + [max(t[0] for t in found) / min(t[0] for t in found)]
        for name, found in times.items()
    }


def in_process(cores: int, threads: int, args: argparse.Namespace) -> dict[str, Any]:
    """Runs a case in a process that is pinned to its cores."""
    free = sorted(os.sched_getaffinity(0))[:cores]
    command = [sys.executable, __file__, "--alone", "--threads", str(threads)]
    for name in ("scale", "hidden", "batches", "epochs"):
        command += [f"--{name}", str(getattr(args, name))]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: os.sched_setaffinity(0, free),
    )
    if done.returncode:
        raise RuntimeError(f"{cores} cores failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Runs all cases and prints (or writes) the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--scale", type=int, default=18)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    if args.alone:
        print(json.dumps(alone(args)))
        return
    rows = []
    for cores, threads in CASES:
        found = in_process(cores, threads, args)
        base = found["auto"][0]
        rows += [
            (cores, threads, name, *numbers, numbers[0] / base)
            for name, numbers in found.items()
        ]
    heads = "cores", "torch threads", "bulks", "s/epoch", "cpu s"
    text = format_table((*heads, "slowest/fastest", "times auto"), rows)
    print(text)
    if args.write:
        args.write.write_text(
            f"# Threads and cores\n\n`python benchmarks/cores.py --scale {args.scale} "
            f"--batches {args.batches} --epochs {args.epochs}`; torch "
            f"{torch.__version__}, Python {platform.python_version()}; GraphSAGE of 3 "
            f"layers, width {args.hidden}, fan-outs {FAN_OUTS}, {BATCH} seeds.\n\n"
            f"{from_text(text)}\n"
        )


if __name__ == "__main__":
    main()

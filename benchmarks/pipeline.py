"""Deep models over links of a given rate: graph parallelism, a pipeline, and both at once.

    sudo python benchmarks/pipeline.py [--ranks 4 8] [--rates bare 1gbit 100mbit]
        [--graphs rmat-13 Computers CS Tolokers --root DIR] [--models gcnii resgcn gcn]
        [--depths 8 16 32 64 128] [--width 100] [--rounds 5] [--json FILE]
    python benchmarks/pipeline.py --accuracy --graphs Computers [--seeds 3] [--epochs 200]

Every model is Linear, so many layers of one width, Linear. Ways to train it are built
first, in the same processes, and take turns, epoch by epoch; a rank has one thread, and an
epoch ends with the last rank. "best grid" is what the planner takes for the link it is on.
Times and bytes are ratios to graph parallelism in 1D, with nodes cut at random and by METIS;
what loses is shown like what wins, and geometric means are over all cases. The formula
supposes that rows travel: products send sums where that is less, and stay below it. Needs
root, for the links (see `network.py`); `--accuracy` does not: it trains each way from equal
weights, on equal splits, and takes the test accuracy at the best validation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import network
import torch
from deep import BASES, Case, Direction, built, graph, ways

import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.ledger import format_table

MIB = 2**20

# The ranks --------------------------------------------------------------------------


def timed(args: argparse.Namespace) -> None:
    """Runs on a rank: all ways of a case in turn, at every rate; rank 0 writes them down."""
    torch.set_num_threads(1)
    case = Case(**json.loads(args.rank))
    data = graph(case.graph, args.root, args.degree)
    every = [w for w in ways(case.ranks) if args.only in w.name or w.name in BASES]
    made = {way: built(way, case, data, args) for way in every if not way.planned}
    world, found = next(iter(made.values())).mesh.everyone, []
    losses = {way: [one.epoch() for _ in range(2)] for way, one in made.items()}
    for rate in args.rates:
        collectives.barrier(world)
        network.shape(rate)
        collectives.barrier(world)
        for way in every:
            if way.planned:  # for the link that there is now
                made[way] = built(way, case, data, args)
                losses[way] = [made[way].epoch() for _ in range(2)]
        seconds: dict[Direction, list[float]] = {way: [] for way in every}
        for way in every * args.rounds:
            made[way].mesh.ledger.reset()
            collectives.barrier(world)
            start = time.perf_counter()
            made[way].epoch()
            collectives.barrier(world)
            seconds[way].append(time.perf_counter() - start)
        for way in every:
            one = made[way]
            # barriers of another mesh are not in it
            rows = collectives.all_gather_counts([one.mesh.ledger.bytes()], world)
            received = [int(row[0]) for row in rows]
            about = {"way": way.name, "note": one.note, "rate": rate}
            took = {"seconds": seconds[way], "loss": losses[way][-1]}
            sent = {"bytes": sum(received), "busiest": max(received)}
            found.append(
                {**vars(case), **about, **took, **sent, "formula": one.formula}
            )
    network.shape(network.BARE)
    if world.rank == 0:
        Path(args.result).write_text(json.dumps(found))


def learnt(case: Case, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs on a rank: trains each way to the end, from several seeds."""
    torch.set_num_threads(1)
    found = []
    for way in ways(case.ranks):
        if args.only not in way.name or way.planned or way.name == BASES[0]:
            continue  # the same numbers as those of 1D, METIS
        scores = []
        for seed in range(args.seeds):
            data = graph(case.graph, args.root, args.degree, seed)
            one = built(way, case, data, args, seed)
            best = (0.0, 0.0)
            for epoch in range(1, args.epochs + 1):
                one.epoch()
                if epoch % args.every == 0 or epoch == args.epochs:
                    best = max(best, one.test())
            scores.append(best[1])
        found.append({**vars(case), "way": way.name, "test": scores})
    return found


# The tables -------------------------------------------------------------------------


def ratios(found: Sequence[dict], base: str) -> dict[tuple, tuple[float, float]]:
    """Returns seconds and bytes of a base over those of each way, by (way, case, rate)."""
    keys = "graph", "model", "depth", "ranks", "rate"
    of = {tuple(f[k] for k in keys): f for f in found if f["way"] == base}
    out = {}
    for f in found:
        key = tuple(f[k] for k in keys)
        if key in of:
            first = of[key]
            speed = statistics.median(first["seconds"]) / statistics.median(
                f["seconds"]
            )
            out[(f["way"], *key)] = speed, first["bytes"] / max(f["bytes"], 1)
    return out


def table(found: Sequence[dict]) -> str:
    """Returns the ways of one case, a line for each rate."""
    rows = []
    against = [ratios(found, base) for base in BASES]
    for f in found:
        key = f["way"], f["graph"], f["model"], f["depth"], f["ranks"], f["rate"]
        middle = statistics.median(f["seconds"])
        spread = (max(f["seconds"]) - min(f["seconds"])) / middle
        pairs = [a.get(key, (float("nan"),) * 2) for a in against]
        rule = "" if f["formula"] is None else f"{f['formula'] / MIB:.3f}"
        row = [f["rate"], f["way"], f["note"], middle, f"{100 * spread:.0f} %"]
        row += [f"{speed:.2f}" for speed, _ in pairs]
        row += [f"{f[k] / MIB:.3f}" for k in ("bytes", "busiest")]
        rows.append([*row, rule, *(f"{fewer:.2f}" for _, fewer in pairs)])
    head = ["rate", "way", "", "s/epoch", "spread", "x random", "x METIS"]
    head += ["MiB, all", "busiest", "formula", "/ random", "/ METIS"]
    return format_table(head, rows)


def summary(found: Sequence[dict]) -> str:
    """Returns geometric means over all cases, and how many are lost, by way and rate."""
    rows = []
    for base in BASES:
        every = ratios(found, base)
        for way, rate in dict.fromkeys((key[0], key[-1]) for key in every):
            some = [v for key, v in every.items() if (key[0], key[-1]) == (way, rate)]
            if way == base:
                continue
            speeds, fewer = zip(*some, strict=True)
            row = [base, rate, way, len(some)]
            row += [f"{f(speeds):.2f}" for f in (statistics.geometric_mean, min, max)]
            row += [sum(speed < 1 for speed in speeds)]
            row += [f"{f(fewer):.2f}" for f in (statistics.geometric_mean, min, max)]
            rows.append([*row, sum(f < 1 for f in fewer)])
    head = ["against", "rate", "way", "cases", "speed", "least", "most", "slower"]
    return format_table([*head, "fewer bytes", "least", "most", "more"], rows)


# The command ------------------------------------------------------------------------


def run(case: Case, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs the ranks of a case, and returns what they found."""
    if args.accuracy:
        return pdc.launch(learnt, case.ranks, case, args, threads=1)[0]  # type: ignore[no-any-return]
    with tempfile.TemporaryDirectory() as room:
        result = str(Path(room) / "found.json")
        mine = ["--rank", json.dumps(vars(case)), "--result", result]
        with network.links(case.ranks) as net:
            status = net.run([sys.executable, __file__, *sys.argv[1:], *mine])
        if status:
            sys.exit(status)
        return json.loads(Path(result).read_text())  # type: ignore[no-any-return]


def shown(case: Case, found: Sequence[dict], accuracy: bool) -> str:
    """Returns the table of one case."""
    if not accuracy:
        return f"{case}\n{table(found)}"
    rows = []
    for f in found:
        spread = statistics.stdev(f["test"]) if len(f["test"]) > 1 else 0.0
        each = " ".join(f"{score:.4f}" for score in f["test"])
        rows.append(
            (f["way"], f"{statistics.mean(f['test']):.4f}", f"{spread:.4f}", each)
        )
    return f"{case}\n{format_table(('way', 'test', 'stdev', 'seeds'), rows)}"


def main() -> None:
    """Runs the comparisons and prints the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--rates", nargs="+", default=["bare", "1gbit", "100mbit"])
    parser.add_argument("--graphs", nargs="+", default=["rmat-13"])
    parser.add_argument("--root", default="data", help="where data sets are")
    parser.add_argument("--degree", type=int, default=32, help="of R-MAT graphs")
    parser.add_argument("--models", nargs="+", default=["gcnii", "resgcn", "gcn"])
    parser.add_argument("--depths", type=int, nargs="+", default=[32])
    parser.add_argument("--width", type=int, default=100)
    parser.add_argument("--chunks", type=int, default=4, help="for each stage")
    parser.add_argument("--refresh", type=int, default=1, help="epochs of one history")
    parser.add_argument("--order", default="alternating", help="of chunks")
    parser.add_argument("--gradient", default="surrogate")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="ways so named, and the bases")
    parser.add_argument("--accuracy", action="store_true")
    parser.add_argument("--auc", action="store_true", help="scored, of two classes")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--every", type=int, default=5, help="epochs between tests")
    parser.add_argument("--dropout", type=float, default=0.5)
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--json", type=Path, help="what was found, written as it comes")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        return timed(args)
    found: list[dict[str, Any]] = []
    for one in product(args.graphs, args.models, args.depths, args.ranks):
        case = Case(*one)
        here = run(case, args)
        found += here
        print(shown(case, here, args.accuracy), end="\n\n", flush=True)
        if args.json:
            args.json.write_text(json.dumps(found))
    if not args.accuracy:
        print(f"Over all cases\n{summary(found)}")
    return None


if __name__ == "__main__":
    main()

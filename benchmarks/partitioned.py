"""Minibatches of a partitioned graph: where the time goes, what travels, against RPC.

    python benchmarks/partitioned.py [--scale 18] [--degree 16] [--write REPORT.md]

Ranks are processes of this machine with one thread each, over gloo. Each holds its part
of an R-MAT graph with 100 float32 features a node; batches of 1024 out of a share of the
nodes. Ways to load take turns in the same processes, epoch by epoch, and medians are
compared: PyG's own distributed loader (RPC, pyg-lib) takes part if the interpreter can
import pyg-lib, and is compared with ours at its best, by the edge. "CPU s" are processor
seconds of all ranks, which what else runs on the machine hardly changes; "sample",
"fetch" and "assemble" are seconds of a rank's threads, without what it waited for others.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import loaders
import ranks
import spmm as bench
import torch
from loaders import BATCH, MIB, OURS, PYG_LIB, WIDTH
from ranks import PEER, Case, Found, Task
from tables import from_text
from torch_geometric.data import Data

import pyg_distcomm as pdc
from pyg_distcomm.comm.ledger import format_table
from pyg_distcomm.partition.cutters import cut
from pyg_distcomm.partition.folder import write_folder

FAN_OUTS = ((15, 10, 5), (10, 10))
BULKS = (1, 4, 16, "auto")
PLACES = ("owner", "requester")
COPIES = (1, 2, 4)
WHAT = ("sampling", "features")
LAYERS = (1024, 1024, 1024)
PARTS = ("grid", "layers", "memory", "peer")


def graph(scale: int, degree: int) -> Data:
    """Returns the R-MAT graph, with features; `degree` counts edges either way."""
    row, col, n = bench.rmat(scale, degree // 2)
    x = torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(0))
    return Data(x=x, edge_index=torch.stack([row, col]))


def prepared(
    room: Path, scale: int, degree: int, share: float, sizes: Sequence[int], method: str
) -> None:
    """Writes seeds, and parts for each number of ranks, if they are not there yet."""
    nodes = loaders.seeds(Data(num_nodes=1 << scale), share)
    torch.save(nodes, seeds_file(room, scale, share))
    left = [p for p in sizes if not (room / f"{scale}-{degree}-{p}").exists()]
    data = graph(scale, degree) if left else None
    for p in left:
        owners = cut(data.edge_index, data.num_nodes, p, method if p > 1 else "block")
        write_folder(room / f"{scale}-{degree}-{p}", data, owners)


def seeds_file(room: Path, scale: int, share: float) -> Path:
    """Names the file of the seeds."""
    return room / f"seeds-{scale}-{share}.pt"


class Bench:
    """All tables of one graph."""

    def __init__(self, args: argparse.Namespace, room: Path) -> None:
        self.args, self.room = args, room
        size = (args.scale, args.degree, args.share)
        cut_for = args.ranks
        prepared(room, *size, cut_for, args.method)

    def task(self, size: int, fan_out: tuple[int, ...], layers: bool = False) -> Task:
        """Returns what to load on so many ranks."""
        args = self.args
        folder = self.room / f"{args.scale}-{args.degree}-{size}"
        seeds = seeds_file(self.room, args.scale, args.share)
        return Task(str(folder), str(seeds), fan_out, layers, args.most)

    # Tables ---------------------------------------------------------------------------

    def grid(self) -> Iterator[str]:
        """Yields tables over ranks, copies, places and bulk sizes."""
        travelled: list[tuple] = []
        both = [what == WHAT[1] for what in self.args.what]
        for fan_out, rows in product(self.args.fan_outs, both):
            found = []
            for size in self.args.ranks:
                task = self.task(size, fan_out)
                args = self.args
                every = cases(size, rows, args.bulks, args.places, args.copies)
                for case, one in ranks.run(every, task, size, self.args.rounds):
                    found.append((size, case, one))
            yield times_table(fan_out, rows, found)
            travelled += [(fan_out, *f) for f in found if f[0] > 1 and rows]
        yield bytes_table(travelled)

    def layers(self) -> Iterator[str]:
        """Yields the table of layer-wise sampling."""
        found = []
        for size in self.args.ranks:
            task = self.task(size, LAYERS, layers=True)
            every = cases(size, True, ("auto",))
            for case, one in ranks.run(every, task, size, self.args.rounds):
                found.append((size, case, one))
        yield times_table(LAYERS, True, found, "LADIES")

    def memory(self) -> Iterator[str]:
        """Yields what a rank holds."""
        fan_out, rows = self.args.fan_outs[0], []
        sizes = self.args.ranks
        prepared(self.room, 10, 16, 1.0, sizes, "block")
        for size in sizes:
            for case in [c for c in cases(size, True, ("auto",)) if c.copies < 4]:
                seeds = str(seeds_file(self.room, 10, 1.0))
                small = Task(str(self.room / f"10-16-{size}"), seeds, fan_out)
                task = self.task(size, fan_out)
                found = pdc.launch(ranks.memory_of, size, case, small, task, threads=1)
                worst = max(found, key=lambda one: one["peak"])
                whole = [round(worst[k] / MIB) for k in ("built", "peak", "pss")]
                data = worst["edges"] * 40 + worst["nodes"] * (4 * WIDTH + 16)
                name = size, case.copies, case.place
                rows.append((*name, round(data / MIB), *whole))
        head = ("ranks", "c", "at", "share, MiB", "built", "peak", "PSS after")
        yield format_table(head, rows)

    def peer(self) -> Iterator[str]:
        """Yields ours against PyG's own distributed loader, on two processes."""
        if loaders.missing(PYG_LIB):
            yield f"{PEER} left out: {loaders.missing(PYG_LIB)}"
            return
        for fan_out in self.args.fan_outs:
            yield self._peer(fan_out)

    def _peer(self, fan_out: tuple[int, ...]) -> str:
        rows = []
        for home, workers in product((False, True), (0, 1)):
            every, task = peer_cases(home, workers), self.task(2, fan_out)
            found = list(ranks.run(every, task, 2, self.args.rounds))
            for case, one in found:
                alike = [f for c, f in found if c.who == OURS and c.rows == case.rows]
                best = min(f.seconds / f.edges for f in alike)
                least = min(f.work / f.edges for f in alike)
                what = "with features" if case.rows else "sampling alone"
                seeds = "own nodes" if home else "dealt out"
                rate = one.edges / one.seconds / 1e6
                ratio = one.seconds / one.edges / best, one.work / one.edges / least
                who = case.who, _options(case), what, seeds
                rows.append(
                    (str(list(fan_out)), *who, one.seconds, rate, one.work, *ratio)
                )
        head = ("fan-outs", "two ranks", "options", "what", "seeds")
        head += ("s/epoch", "Medges/s", "CPU s", "s, times ours", "CPU, times ours")
        return format_table(head, rows)


def cases(
    size: int,
    rows: bool,
    bulks: Sequence[int | str],
    places: Sequence[str] = PLACES,
    copies: Sequence[int] = COPIES,
) -> list[Case]:
    """Lists the ways that so many ranks can load."""
    copies = [c for c in copies if size % c == 0]
    return [
        Case(c, place, k, rows)
        for c, place, k in product(copies, places, bulks)
        if size > 1 or place == places[0]
    ]


def peer_cases(home: bool, workers: int) -> list[Case]:
    """Lists ours and the peer's, with the options that may suit it.

    Its RPC lives either in the ranks themselves or in their workers.
    """
    if workers:
        both = {"num_workers": workers, "async_sampling": True}
        ways = [(True, {**both, "concurrency": c}) for c in (1, 4)]
    else:
        ways = [(False, {"concurrency": c}) for c in (1, 4)]
        ways += [(True, {"async_sampling": ahead}) for ahead in (False, True)]
    found = [
        Case(bulk=k, rows=rows, home=home)
        for rows in dict.fromkeys(rows for rows, _ in ways)
        for k in (1, "auto")
    ]
    for rows, options in ways:
        given = tuple(options.items())
        found.append(Case(rows=rows, home=home, who=PEER, options=given))
    return found


def _options(case: Case) -> str:
    if case.who == OURS:
        return f"k={case.bulk}"
    return ", ".join(f"{k}={v}" for k, v in case.options)


def times_table(
    fan_out: tuple[int, ...],
    rows: bool,
    found: Sequence[tuple[int, Case, Found]],
    what: str = "",
) -> str:
    """Formats where the time of an epoch goes."""
    lines = []
    for size, case, one in found:
        parts = []
        for name in ("sample", "fetch") if rows else ("sample",):
            parts += [one.computing.get(name, 0.0), one.waiting.get(name, 0.0)]
        parts.append(one.computing.get("assemble", 0.0))
        sent = [
            sum(b for k, b in one.bytes.items() if k.startswith(p)) / MIB
            for p in ("sample", "fetch")
        ]
        rate = one.edges / one.seconds / 1e6
        same = [
            f.seconds
            for s, c, f in found
            if (s, c.copies, c.place, c.bulk) == (size, case.copies, case.place, 1)
        ]
        gain = [same[0] / one.seconds] if same else ["-"]
        who = size, case.copies, case.place, f"k={case.bulk}"
        lines.append(
            (*who, one.seconds, rate, one.work, *gain, *parts, *sent[: 1 + rows])
        )
    head = ["ranks", "c", "at", "bulk", "s/epoch", "Medges/s", "CPU s", "times k=1"]
    head += ["sample", "wait"] + (["fetch", "wait"] if rows else []) + ["assemble"]
    head += ["MiB sampling"] + (["MiB fetching"] if rows else [])
    with_rows = "with features" if rows else "sampling alone"
    title = f"{what} {list(fan_out)}, {with_rows}".strip()
    return f"{title}\n{format_table(head, lines)}"


def bytes_table(found: Sequence[tuple]) -> str:
    """Formats what each operation moves in an epoch, on all ranks together."""
    ops = list(dict.fromkeys(op for *_, one in found for op in one.bytes))
    lines = [
        (
            *(str(list(fan_out)), size, case.copies, case.place, f"k={case.bulk}"),
            *(one.bytes.get(op, 0) / MIB for op in ops),
            sum(one.bytes.values()) / MIB,
        )
        for fan_out, size, case, one in found
        if case.bulk in (1, 16)
    ]
    head = ("MiB per epoch", "ranks", "c", "at", "bulk", *ops, "all")
    return format_table(head, lines)


# The command ------------------------------------------------------------------------


def title(args: argparse.Namespace, n: int, count: int) -> str:
    """Says what was run."""
    most = f" --most {args.most}" if args.most else ""
    bulks = f" --bulks {' '.join(map(str, args.bulks))}" * (args.bulks != BULKS)
    places = f" --places {' '.join(args.places)}" * (args.places != PLACES)
    copies = f" --copies {' '.join(map(str, args.copies))}" * (args.copies != COPIES)
    what = f" --what {' '.join(args.what)}" * (args.what != WHAT)
    fan_outs = " ".join(",".join(map(str, f)) for f in args.fan_outs)
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    return (
        f"`python benchmarks/partitioned.py --scale {args.scale} --degree {args.degree} "
        f"--share {args.share} --method {args.method} --ranks "
        f"{' '.join(map(str, args.ranks))} --rounds {args.rounds} --fan-outs {fan_outs}"
        f"{most}{bulks}{copies}{places}{what} --parts "
        f"{' '.join(args.parts)}`; {versions}; {os.cpu_count()} cores, one thread per rank; "
        f"R-MAT graph of {n:,} nodes and {n * args.degree:,} edges cut by {args.method}, "
        f"{count:,} seeds in batches of {BATCH}, {WIDTH} float32 features; medians, ways "
        "in turn."
    )


def main() -> None:
    """Runs the comparisons and prints (or writes) the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--scale", type=int, default=18)
    parser.add_argument("--degree", type=int, default=16, help="average degree")
    parser.add_argument("--share", type=float, default=0.4, help="of nodes as seeds")
    parser.add_argument("--most", type=int, help="minibatches of an epoch, a rank")
    parser.add_argument("--method", default="metis", help="metis, ldg or random")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--fan-outs", type=_numbers, nargs="+", default=FAN_OUTS)
    parser.add_argument("--copies", type=int, nargs="+", default=COPIES, help="c")
    parser.add_argument("--what", nargs="+", choices=WHAT, default=WHAT)
    parser.add_argument("--places", nargs="+", choices=PLACES, default=PLACES)
    parser.add_argument("--bulks", type=_bulk, nargs="+", default=BULKS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--room", type=Path, help="keeps the cut graph for a later run")
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the ranks, which start from here
    with contextlib.ExitStack() as stack:
        room = args.room or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        room.mkdir(parents=True, exist_ok=True)
        one = Bench(args, room)
        count = len(torch.load(seeds_file(room, args.scale, args.share)))
        head = title(args, 1 << args.scale, count)
        tables = []
        for part in args.parts:
            for table in getattr(one, part)():
                print(table, end="\n\n", flush=True)
                tables.append(table)
                if args.write:  # as they come: a long run may be cut short
                    text = "\n\n".join(tables)
                    args.write.write_text(f"{head}\n\n{from_text(text)}\n")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(","))


def _bulk(text: str) -> int | str:
    return text if text == "auto" else int(text)


if __name__ == "__main__":
    main()

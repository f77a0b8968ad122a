"""How fast rows travel: the package's exchange beside torch's own collectives.

    sudo python benchmarks/exchange.py [--ranks 2 4 8] [--rates bare 1gbit] [--write FILE.md]
    sudo python benchmarks/exchange.py --scale 16 --ranks 4    # epochs of a GCN instead

Ranks in namespaces joined by links of a given rate (`network.py`). Every way to move the
same bytes takes its turn, in the same processes; each turn begins together. "MB/s" is what
one rank receives in a second, in 10^6 bytes, of which a link of 1 Gbit/s carries 119 or so
beside its headers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import epoch
import network
import torch
import torch.distributed as dist
from tables import from_text

import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.collectives import Axis
from pyg_distcomm.comm.ledger import format_table

SIZES = (1, 64, 1024, 8192)  # KiB


@contextlib.contextmanager
def as_before() -> Iterator[None]:
    """Exchanges by one collective inside the block, as gloo's all_to_all does."""
    much, collectives._LARGE_MESSAGE = (
        collectives._LARGE_MESSAGE,
        1 << 60,
    )  # nothing is large
    try:
        yield
    finally:
        collectives._LARGE_MESSAGE = much


def ways(size: int, mesh: pdc.Mesh) -> dict[str, tuple[Callable[[], object], float]]:
    """Returns every way to move bytes, with those that one rank receives.

    Args:
        size: bytes that a rank sends, in all, in an exchange.
        mesh: the ranks.
    """
    axis, ranks = mesh.world, mesh.size
    each = max(size // 4 // (ranks - 1), 1)
    x, counts = torch.randn(each * ranks), [each] * ranks
    group, received = axis.group, 4 * each * (ranks - 1)

    def ours() -> object:
        return collectives.all_to_all(x, counts, counts, axis, most=each).wait()

    def before() -> object:
        with as_before():
            return ours()

    def collective() -> object:
        out = torch.empty_like(x)
        return dist.all_to_all_single(out, x, counts, counts, group=group)

    def messages(receive_first: bool) -> object:
        return by_messages(x, torch.empty_like(x), each, axis, receive_first)

    def gather() -> object:
        return dist.all_gather_into_tensor(torch.empty_like(x), x[:each], group=group)

    def scatter() -> object:
        return dist.reduce_scatter_tensor(torch.empty(each), x, group=group)

    return {
        "ours": (ours, received),
        "before": (before, received),
        "all_to_all": (collective, received),
        "isend, irecv": (lambda: messages(False), received),
        "irecv, isend": (lambda: messages(True), received),
        "our gather": (
            lambda: collectives.all_gather_rows(x[:each], counts, axis),
            received,
        ),
        "all_gather": (gather, received),
        "reduce_scatter": (scatter, received),
        "all_reduce": (lambda: dist.all_reduce(x.clone(), group=group), 2 * received),
    }


def by_messages(
    x: torch.Tensor, out: torch.Tensor, each: int, axis: Axis, receive_first: bool
) -> None:
    """Exchanges equal parts by point-to-point messages, in one order or the other."""
    peers = [(axis.rank + i) % axis.size for i in range(1, axis.size)]
    sends = [(dist.isend, x, i) for i in peers]
    receives = [(dist.irecv, out, i) for i in reversed(peers)]
    order = [*receives, *sends] if receive_first else [*sends, *receives]
    works = [
        begin(t[i * each : (i + 1) * each], i, axis.group) for begin, t, i in order
    ]
    for work in works:
        work.wait()


def slowest(every: list[list[float]]) -> list[float]:
    """Returns how long each turn took: it lasts until its slowest rank is through."""
    return [max(turn) for turn in zip(*every, strict=True)]


def epochs(rates: list[str], rounds: int, scale: int, out: str) -> None:
    """Runs on a rank: epochs of a GCN at every rate, after and before in turn."""
    torch.set_num_threads(1)
    mesh = pdc.init()
    share = pdc.partition(epoch.graph(scale), mesh)
    model = pdc.replicate(epoch.GCN(epoch.DistGCNConv), mesh)
    train = epoch.trainer(model, share.x, share.edge_index, share.y)
    train()
    found: dict[tuple[str, str], list[float]] = {}
    for rate in rates:
        collectives.barrier(mesh.world)
        network.shape(rate)
        for turn in range(rounds):
            turns = [("ours", contextlib.nullcontext), ("before", as_before)]
            for name, context in turns[:: -1 if turn % 2 else 1]:
                collectives.barrier(mesh.world)
                mesh.ledger.reset()
                with context():
                    found.setdefault((rate, name), []).append(train())
    every = collectives.all_gather_object((found, mesh.ledger.bytes()), mesh.world)
    if mesh.rank == 0:
        slow = {key: slowest([one[key] for one, _ in every]) for key in found}
        most = max(sent for _, sent in every) / 2**20
        rows = []
        for rate in rates:
            ours, before = slow[rate, "ours"], slow[rate, "before"]
            ratio = statistics.median(b / o for o, b in zip(ours, before, strict=True))
            medians = statistics.median(ours), statistics.median(before)
            rows.append((rate, *medians, ratio, most))
        Path(out).write_text(json.dumps(rows))


def rank_main(rates: list[str], kibs: list[int], rounds: int, out: str) -> None:
    """Runs on a rank: every way, at every size and rate, in turn."""
    torch.set_num_threads(1)
    mesh = pdc.init()
    found: dict[tuple[str, int, str], list[float]] = {}
    moved: dict[tuple[str, int], float] = {}
    for rate in rates:
        collectives.barrier(mesh.world)
        network.shape(rate)
        collectives.barrier(mesh.world)
        for size in (kib << 10 for kib in kibs):
            runs = list(ways(size, mesh).items())
            moved |= {(name, size): received for name, (_, received) in runs}
            for turn in range(rounds + 1):
                for name, (way, _) in runs[:: -1 if turn % 2 else 1]:
                    collectives.barrier(mesh.world)
                    start = time.perf_counter()
                    way()
                    spent = time.perf_counter() - start
                    if turn:
                        found.setdefault((rate, size, name), []).append(spent)
    every = collectives.all_gather_object(found, mesh.world)
    if mesh.rank == 0:
        rows = [(*key, slowest([one[key] for one in every])) for key in found]
        sizes = {f"{name} {size}": bytes for (name, size), bytes in moved.items()}
        Path(out).write_text(json.dumps([rows, sizes]))


def table(ranks: int, rows: list[list], sizes: dict[str, float]) -> str:
    """Formats what one number of ranks did: MB/s of each way, at each size and rate."""
    turns = {(rate, size, name): spent for rate, size, name, spent in rows}
    names = list(dict.fromkeys(key.rpartition(" ")[0] for key in sizes))
    lines = []
    for rate, size in dict.fromkeys((row[0], row[1]) for row in rows):
        speed = [
            sizes[f"{name} {size}"] / statistics.median(turns[rate, size, name]) / 1e6
            for name in names
        ]
        pairs = zip(turns[rate, size, "before"], turns[rate, size, "ours"], strict=True)
        ratio = statistics.median(theirs / mine for theirs, mine in pairs)
        lines.append((rate, f"{size >> 10} KiB", *speed, ratio))
    head = (f"{ranks} ranks", "size", *names, "ours/before")
    return format_table(head, lines)


def main() -> None:
    """Runs all ways on links of all rates."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rates", nargs="+", default=[network.BARE, "1gbit"])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="KiB")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--scale", type=int, help="of the R-MAT graph, for epochs")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank and args.scale:
        return epochs(args.rates, args.rounds, args.scale, args.rank)
    if args.rank:
        return rank_main(args.rates, args.sizes, args.rounds, args.rank)
    tables = []
    with tempfile.TemporaryDirectory() as room:
        out = str(Path(room) / "found.json")
        home = str(Path(pdc.__file__).parents[1])
        again = [sys.executable, "-W", "ignore", *sys.argv, "--rank", out]
        for ranks in args.ranks:
            with contextlib.suppress(FileNotFoundError):
                os.remove(out)
            with network.links(ranks) as net:
                status = net.run(again, {"PYTHONPATH": home})
            if status:
                sys.exit(status)
            found = json.loads(Path(out).read_text())
            head = (
                f"{ranks} ranks",
                "s/epoch, ours",
                "before",
                "before/ours",
                "MiB/epoch",
            )
            tables.append(
                format_table(head, found) if args.scale else table(ranks, *found)
            )
            print(tables[-1], end="\n\n", flush=True)
    if args.write:
        versions = f"torch {torch.__version__}, Python {platform.python_version()}"
        text = "\n\n".join(tables)
        args.write.write_text(
            f"`sudo python benchmarks/exchange.py --ranks {' '.join(map(str, args.ranks))} "
            f"--rates {' '.join(args.rates)} --sizes {' '.join(map(str, args.sizes))} "
            f"--rounds {args.rounds}"
            f"{f' --scale {args.scale}' if args.scale else ''}`; {versions}; one thread a "
            f"rank on {os.cpu_count()} cores; medians of the slowest rank, ways in turn."
            f"\n\n{from_text(text)}\n"
        )


if __name__ == "__main__":
    main()

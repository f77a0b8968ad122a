"""What cutters, refinement and streaming make of real and made-up graphs.

    python benchmarks/partitioning.py [--root data] [--scale 17] [--parts 4 8]
        [--graphs Computers CS Tolokers R-MAT] [--tables refine blocks memory]
        [--write REPORT.md]

Data sets of PyG are read from, or downloaded below, --root; R-MAT has 2^scale nodes and 16
edges each. Refinement: rows that the busiest rank sends and receives in one exchange, rows
of all, and the largest over the mean of nodes and edges, before -> after; seconds of the cutter
and of refinement. Blocks: nonzeros of the fullest block over the mean, on grids. Memory: the
peak of a process that cuts a file of edges, above that of one that cuts a small file.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import spmm as bench
import torch
from communities import load as load_graph
from tables import from_text

from pyg_distcomm.comm.ledger import format_table
from pyg_distcomm.partition.cutters import cut, refine_partition
from pyg_distcomm.partition.external import partition_files
from pyg_distcomm.partition.partition import imbalance, report

METHODS = ("metis", "ldg", "stream", "random")
GRIDS = {4: [(2, 2, 1), (1, 4, 1)], 8: [(4, 2, 1), (2, 2, 2), (2, 4, 1)]}
WIDTH = 128


def load(name: str, root: str, scale: int) -> tuple[torch.Tensor, int]:
    """Returns edge_index and the number of nodes."""
    if name == "R-MAT":
        row, col, n = bench.rmat(scale)
        return torch.stack([row, col]), n
    data = load_graph(name, root)
    return data.edge_index, data.num_nodes


def refined(name: str, edges: torch.Tensor, n: int, parts: int) -> list[list[str]]:
    """One line for each cutter, what refinement makes of it beside it."""
    lines = []
    for method in METHODS:
        start = time.perf_counter()
        plain = cut(edges, n, parts, method)
        middle = time.perf_counter()
        found = refine_partition(edges, plain)
        end = time.perf_counter()
        new = report(edges, found)
        old = new.before
        assert old is not None
        pairs = ((old.max_send, new.max_send), (old.max_halo, new.max_halo))
        lines.append(
            [
                name,
                str(parts),
                method,
                *(f"{a:,} -> {b:,} ({b / max(a, 1) - 1:+.0%})" for a, b in pairs),
                f"{old.volume:,} -> {new.volume:,} ({new.volume / old.volume - 1:+.0%})",
                f"{imbalance(old.send_rows):.2f} -> {imbalance(new.send_rows):.2f}",
                f"{old.node_imbalance:.2f} -> {new.node_imbalance:.2f}",
                f"{imbalance(old.edges):.2f} -> {imbalance(new.edges):.2f}",
                f"{middle - start:.1f} + {end - middle:.1f}",
            ]
        )
    return lines


def blocks(name: str, edges: torch.Tensor, n: int, parts: int) -> list[list[str]]:
    """One line for each grid: the fullest block over the mean, and the busiest rank."""
    lines = []
    for grid in GRIDS.get(parts, []):
        cells = []
        for method in ("block", "metis", "random"):
            figures = report(edges, cut(edges, n, parts, method, grid=grid), grid=grid)
            most = imbalance(figures.blocks or figures.edges)
            cells.append(f"{most:.3f} ({figures.busiest:,})")
        lines.append([name, " x ".join(map(str, grid)), *cells])
    return lines


def peak(file: Path, n: int, method: str) -> int:
    """Bytes of a fresh process's peak while it cuts, above a small cut's."""
    arguments = [sys.executable, __file__, "--peak", str(file), str(n), method]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def highest() -> int:
    """The most bytes this process has held (Linux; ru_maxrss counts its parent's too)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if "VmHWM" in line)


def print_peak(file: Path, n: int, method: str) -> None:
    """What a process started by `peak` does."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        np.save(home / "e.npy", np.random.default_rng(0).integers(0, 999, (2, 300000)))
        partition_files(home / "e.npy", home / "small", 8, method, num_nodes=999)
        before = highest()
        x = {"x": file.with_name("x.npy")}
        partition_files(file, home / "out", 8, method, num_nodes=n, node_files=x)
        print(highest() - before)


def memory(scale: int) -> list[list[str]]:
    """One line for each number of edges and cutter."""
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        for each in (8, 32):
            row, col, n = bench.rmat(scale, each)
            np.save(home / "e.npy", torch.stack([row, col]).numpy())
            del row, col
            np.save(home / "x.npy", np.zeros((n, WIDTH), np.float32))
            files = sum((home / name).stat().st_size for name in ("e.npy", "x.npy"))
            for method in ("stream", "ldg"):
                most = peak(home / "e.npy", n, method)
                lines.append(
                    [
                        f"{n:,}",
                        f"{2 * each * n:,}",
                        method,
                        f"{files / 2**20:.0f}",
                        f"{most / 2**20:.0f}",
                        f"{most / n:.0f}",
                    ]
                )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", default="data")
    parser.add_argument("--scale", type=int, default=17)
    parser.add_argument("--parts", type=int, nargs="+", default=[4, 8])
    graphs = ["Computers", "CS", "Tolokers", "R-MAT"]
    parser.add_argument("--graphs", nargs="+", default=graphs)
    parser.add_argument("--tables", nargs="+", default=list(TABLES), choices=TABLES)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--peak", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        file, n, method = arguments.peak
        print_peak(Path(file), int(n), method)
        return
    mixed = torch.randint(0, 999, (2, 9999))
    for method in METHODS:  # compiles
        cut(mixed, 999, 4, method, refine=True)
    text = []
    for table in arguments.tables:
        text += [TABLES[table](arguments), ""]
        print("\n".join(text[-2:]), flush=True)
    if arguments.write:
        about = f"torch {torch.__version__}, Python {platform.python_version()}"
        body = "\n".join(text)
        arguments.write.write_text(f"{about}\n\n{from_text(body)}\n")


def each_graph(arguments: argparse.Namespace, rows: Callable) -> list[list[str]]:
    """Joins the lines of all graphs and numbers of parts."""
    lines = []
    for name in arguments.graphs:
        edges, n = load(name, arguments.root, arguments.scale)
        for parts in arguments.parts:
            lines += rows(name, edges, n, parts)
    return lines


def refine_table(arguments: argparse.Namespace) -> str:
    heads = (
        "graph|P|cutter|most sent|most received|rows of all|sent|nodes|edges|seconds"
    )
    table = format_table(heads.split("|"), each_graph(arguments, refined))
    return "Refinement (sent, nodes, edges: largest over mean)\n\n" + table


def block_table(arguments: argparse.Namespace) -> str:
    heads = "graph|grid|block|metis|random".split("|")
    about = "Nonzeros of the fullest block over the mean (rows of the busiest rank)\n\n"
    return about + format_table(heads, each_graph(arguments, blocks))


def memory_table(arguments: argparse.Namespace) -> str:
    heads = "nodes|edges|cutter|MiB in files|peak MiB|bytes per node".split("|")
    return "Memory while files are cut in 8\n\n" + format_table(
        heads, memory(arguments.scale)
    )


TABLES = {"refine": refine_table, "blocks": block_table, "memory": memory_table}


if __name__ == "__main__":
    main()

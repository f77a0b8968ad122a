"""A graph larger than memory: memory cap against seconds and page faults, on two cores.

    python benchmarks/out_of_core.py [--gib 4] [--layer gcn gat] [--caps 0.25 0.5 none]

Generates a partition folder of so many GiB, drops it from the page cache, and trains on it
with `load_partition(folder, memory=...)`. A cap is a share of the graph's bytes, for all
ranks together. As root on Linux the ranks, interpreters, page cache and all, run in a
control group that allows no byte more; elsewhere the cap is `memory=` alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch_geometric.data import Data

import pyg_distcomm as pdc
from pyg_distcomm.comm.ledger import format_table
from pyg_distcomm.nn import GATConv, GCNConv
from pyg_distcomm.partition.folder import write_folder

GIB, MIB = 2**30, 2**20
INTERPRETER = 300 * MIB  # of a rank with torch, before it has data
CLASSES = 8
GROUPS = Path("/sys/fs/cgroup")


class Net(torch.nn.Module):
    """Two layers."""

    def __init__(self, layer: str, width: int, hidden: int) -> None:
        super().__init__()
        make = GCNConv if layer == "gcn" else GATConv
        self.first, self.second = make(width, hidden), make(hidden, CLASSES)

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index)


def generate(folder: Path, size: float, width: int, degree: int, ranks: int) -> None:
    """Writes a graph whose features and edges take so many bytes; one edge in ten is cut."""
    n = int(size / (4 * width + 16 * degree))
    torch.manual_seed(0)
    target = torch.arange(n).repeat_interleave(degree)
    near = (target + torch.randint(-1000, 1000, (n * degree,))).clamp(0, n - 1)
    far = torch.randint(0, n, (n * degree,))
    source = torch.where(torch.rand(n * degree) < 0.2, far, near)
    x = torch.empty(n, width)
    for rows in x.split(4096):
        rows.normal_()
    data = Data(x=x, edge_index=torch.stack([source, target]))
    data.y = torch.randint(0, CLASSES, (n,))
    owner = torch.arange(n) * ranks // n
    write_folder(folder, data, pdc.Partition.from_owner(owner, ranks))


def forget(folder: Path) -> None:
    """Drops the files of a folder from the page cache."""
    os.sync()
    for path in folder.rglob("*.npy"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Peak(threading.Thread):
    """Watches how much anonymous memory this process has, which no file backs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes, self.ended = 0, threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.01):
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("RssAnon"):
                    self.bytes = max(self.bytes, int(line.split()[1]) * 1024)


def train(folder: str, layer: str, memory: int | None, epochs: int, hidden: int):
    """Trains on this rank; returns seconds of each epoch, faults, losses and peaks."""
    peak = Peak()
    peak.start()
    mesh = pdc.init()
    begin = time.perf_counter()
    data = pdc.load_partition(folder, mesh, verify="sizes", memory=memory)
    torch.manual_seed(1)
    model = Net(layer, data.x.size(1), hidden)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    seconds, losses, faults = [], [], []
    for _ in range(epochs):
        start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data.x, data.edge_index), data.y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        after = resource.getrusage(resource.RUSAGE_SELF)
        seconds.append(time.perf_counter() - start)
        faults.append(after.ru_majflt - before.ru_majflt)
    peak.ended.set()
    return {
        "seconds": seconds,
        "all": time.perf_counter() - begin,
        "losses": losses,
        "faults": faults,
        "anonymous": peak.bytes,
        "bytes": mesh.ledger.words("halo") + mesh.ledger.words("halo_reduce"),
    }


@contextlib.contextmanager
def group(limit: int | None) -> Iterator[Path | None]:
    """Yields a control group that allows so many bytes; None where there can be none."""
    home = GROUPS / "memory" if (GROUPS / "memory").is_dir() else GROUPS
    made = home / f"pyg_distcomm-{os.getpid()}-{time.time_ns()}"
    if limit is None or not os.access(home, os.W_OK) or not home.is_dir():
        yield None
        return
    made.mkdir()
    try:
        old = made / "memory.limit_in_bytes"
        (old if old.exists() else made / "memory.max").write_text(str(limit))
        yield made
    finally:
        with contextlib.suppress(OSError):
            made.rmdir()


def measured(folder: Path, layer: str, limit: int | None, args) -> dict | str:
    """Runs one configuration in processes of its own; returns rank 0's figures, or why not."""
    forget(folder)
    memory = None
    if limit is not None:
        left = limit // args.ranks - INTERPRETER
        memory = max(left // 2, 16 * MIB)  # the other half is for plans and activations
    asked = {"layer": layer, "memory": memory, "epochs": args.epochs}
    call = {"folder": str(folder), "hidden": args.hidden, **asked}
    with group(limit) as inside:

        def join() -> None:
            if inside is not None:
                (inside / "cgroup.procs").write_text(str(os.getpid()))

        command = [sys.executable, __file__, "--worker", json.dumps(call)]
        world = {"WORLD_SIZE": str(args.ranks), "MASTER_ADDR": "127.0.0.1"}
        world["MASTER_PORT"] = str(20_000 + time.time_ns() % 20_000)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        ranks = []
        for rank in range(args.ranks):
            names = os.environ | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            env = names if args.ranks > 1 else dict(os.environ)
            one = subprocess.Popen(command, preexec_fn=join, env=env, **pipes)
            ranks.append(one)
        told = [one.communicate() for one in ranks]
        for one, (_, errors) in zip(ranks, told, strict=True):
            if one.returncode:
                return f"ended with {one.returncode}: {errors.strip()[-300:]}"
        every = [json.loads(text.splitlines()[-1]) for text, _ in told]
        out = every[0] | {"anonymous": sum(each["anonymous"] for each in every)}
        held = ("memory.max_usage_in_bytes", "memory.peak")
        found = [inside / name for name in held] if inside is not None else []
        out["group"] = next((int(f.read_text()) for f in found if f.exists()), None)
        return out


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=4)
    parser.add_argument("--layer", nargs="+", default=["gcn", "gat"])
    parser.add_argument("--caps", nargs="+", default=["0.25", "0.5", "none"])
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--degree", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="keep the graph here")
    parser.add_argument("--worker")
    args = parser.parse_args()
    if args.worker:
        call = json.loads(args.worker)
        print(json.dumps(train(**call)))
        return
    size = args.gib * GIB
    with tempfile.TemporaryDirectory() as aside:
        folder = args.folder or Path(aside) / "graph"
        if not folder.exists():
            generate(folder, size, args.width, args.degree, args.ranks)
        rows = []
        for layer in args.layer:
            for cap in args.caps:
                limit = None if cap == "none" else int(float(cap) * size)
                found = measured(folder, layer, limit, args)
                name = "none" if limit is None else f"{limit / MIB:,.0f} MiB"
                if isinstance(found, str):
                    print(f"{layer}, cap {name}: {found}")
                    continue
                seconds, faults = found["seconds"], found["faults"]
                group_peak = found["group"]
                rows.append(
                    [
                        layer,
                        name,
                        f"{sorted(seconds[1:])[len(seconds[1:]) // 2]:.1f}",
                        f"{found['all']:.1f}",
                        f"{sum(faults[1:]) / max(len(faults) - 1, 1):,.0f}",
                        f"{found['anonymous'] / MIB:,.0f}",
                        "" if group_peak is None else f"{group_peak / MIB:,.0f}",
                        f"{found['losses'][-1]:.6f}",
                    ]
                )
                print(rows[-1], flush=True)
    print(
        f"{args.gib} GiB, {args.ranks} ranks, {os.cpu_count()} CPUs, {platform.machine()}"
    )
    heads = "layer|cap|s per epoch|s in all|major faults per epoch"
    heads += "|anonymous MiB|group's peak MiB|last loss"
    print(format_table(heads.split("|"), rows))


if __name__ == "__main__":
    main()

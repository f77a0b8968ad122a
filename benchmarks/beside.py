"""Full-graph epochs of this checkout beside those of another one: processor time and bytes.

    python benchmarks/beside.py OTHER [--ranks 1 2 4] [--only "GAT 2,000"] [--rounds 12]
        [--epochs 3] [--check]

OTHER is the folder of another checkout, as `git worktree add` makes one of an older commit.
Both run in this interpreter, each in processes of its own, and take turns: a round is some
epochs of the one, then of the other. Compared are the least processor seconds of an epoch,
added up over the ranks, since other work on the machine only adds time; and the bytes that rank
0 receives in the last epoch, as the ledger counts them. On four ranks the grid is two by two.

- *halo*: networks of two layers that compute a row for each edge, on a random graph;
- *product*: GCN and GraphSAGE, whose sums over neighbours are sparse products;
- *first*: the model and the graph of `examples/gcn.py`, which the README runs first.

`--check` ends with an error where a time, or the bytes, are above the bound beside it.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

LAYERS = ("GIN", "GAT", "GATv2", "ResGatedGraph", "Edge")
SIZES = {2_000: (8, 32, 1.3), 30_000: (16, 64, 1.1)}  # nodes: degree, width, bound
CASES: dict[str, tuple[str, int, float]] = {
    **{
        f"halo: {layer} {nodes:,}": (f"{layer}Conv", nodes, SIZES[nodes][2])
        for nodes in SIZES
        for layer in LAYERS
    },
    "product: GCN": ("DistGCNConv", 30_000, 1.05),
    "product: SAGE": ("DistSAGEConv", 30_000, 1.05),
    "first: GCN": ("DistGCNConv", 0, 1.2),
}
HIDDEN, CLASSES = 64, 8


def layer(name: str, inputs: int, outputs: int) -> torch.nn.Module:
    """Returns a layer of `pyg_distcomm.nn`."""
    import pyg_distcomm.nn as dnn

    kind: Any = getattr(dnn, name)
    linear = torch.nn.Linear
    if name == "GINConv":
        parts = linear(inputs, outputs), torch.nn.ReLU(), linear(outputs, outputs)
        return kind(torch.nn.Sequential(*parts))
    if name == "EdgeConv":
        return kind(linear(2 * inputs, outputs))
    if name in ("GATConv", "GATv2Conv"):
        return kind(inputs, outputs, heads=2, concat=False)
    return kind(inputs, outputs)


class Net(torch.nn.Module):
    """The model of all cases."""

    def __init__(self, name: str, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = layer(name, inputs, HIDDEN)
        self.conv2 = layer(name, HIDDEN, outputs)

    def forward(self, x, edge_index):
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)


def graph(nodes: int):
    """Returns a random graph of some nodes, or of 0 that of `examples/gcn.py`."""
    from torch_geometric.data import Data

    if not nodes:
        from pyg_distcomm.datasets import load_dataset

        data = load_dataset("digits")
        data.x = data.x.double()
        return data
    degree, width, _ = SIZES[nodes]
    seeded = torch.Generator().manual_seed(0)
    return Data(
        x=torch.randn(nodes, width, generator=seeded),
        y=torch.randint(CLASSES, (nodes,), generator=seeded),
        edge_index=torch.randint(nodes, (2, degree * nodes), generator=seeded),
        train_mask=torch.rand(nodes, generator=seeded) < 0.5,
    )


def worker() -> None:
    """Trains what its standard input names, and answers on its standard output."""
    import pyg_distcomm as pdc

    torch.set_num_threads(1)
    mesh = pdc.init("2d" if os.environ["WORLD_SIZE"] == "4" else "1d")
    data = model = optimizer = None

    def epoch() -> None:
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        F.cross_entropy(out[data.train_mask], data.y[data.train_mask]).backward()
        optimizer.step()

    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        if word == "make":
            kind, nodes, _ = CASES[rest]
            whole = graph(nodes)
            torch.set_default_dtype(whole.x.dtype)
            data = pdc.partition(whole, mesh, "metis" if not nodes else "block")
            torch.manual_seed(0)
            outputs = int(whole.y.max()) + 1
            model = pdc.replicate(Net(kind, whole.x.size(1), outputs), mesh)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            count, spent = 5, 0.0  # until all is planned and compiled
        else:
            count = int(rest)
        start = time.process_time()
        for _ in range(count):
            mesh.ledger.reset()
            epoch()
        spent = (time.process_time() - start) / count
        print(
            "answer", spent, mesh.ledger.bytes(), Path(pdc.__file__).parent, flush=True
        )


class Group:
    """Holds the processes of one checkout."""

    def __init__(self, tree: Path, ranks: int) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        shared = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        shared |= {"PYTHONPATH": tree, "OMP_NUM_THREADS": 1, "LOCAL_WORLD_SIZE": ranks}
        self.tree, self.processes = tree, []
        for rank in range(ranks):
            given = {**shared, "RANK": rank, "LOCAL_RANK": rank}
            process = subprocess.Popen(
                [sys.executable, "-W", "ignore", __file__, "--worker", "."],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | {k: str(v) for k, v in given.items()},
                text=True,
            )
            self.processes.append(process)

    def ask(self, line: str) -> tuple[float, int]:
        """Returns the seconds of all ranks, and the bytes of rank 0."""
        for process in self.processes:
            print(line, file=process.stdin, flush=True)
        seconds, received = 0.0, []
        for process in self.processes:
            answer = process.stdout.readline().split()
            while answer and answer[0] != "answer":
                answer = process.stdout.readline().split()
            if not answer:
                raise SystemExit(f"{line!r} failed in {self.tree}")
            if Path(answer[3]).parent != self.tree:
                raise SystemExit(f"{answer[3]} was imported, wanted {self.tree}")
            seconds += float(answer[1])
            received.append(int(answer[2]))
        return seconds, received[0]

    def close(self) -> None:
        """Ends the processes."""
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            process.wait()


def compared(
    trees: list[Path], ranks: int, names: list[str], rounds: int, epochs: int
) -> list[tuple]:
    """Returns rows: case, ranks, milliseconds and bytes of both, ratio, bound."""
    groups, rows = [Group(tree, ranks) for tree in trees], []
    for name in names:
        for group in groups:
            group.ask(f"make {name}")
        found: list[list[tuple[float, int]]] = [[], []]
        for i in range(rounds):
            for k in (0, 1) if i % 2 else (1, 0):
                found[k].append(groups[k].ask(f"epochs {epochs}"))
        times = [1e3 * min(seconds for seconds, _ in each) for each in found]
        sent = [each[-1][1] for each in found]
        row = (name, ranks, *times, times[0] / times[1], CASES[name][2], *sent)
        rows.append(row)
    for group in groups:
        group.close()
    return rows


def main() -> None:
    """Prints a table of all cases."""
    parser = argparse.ArgumentParser()
    parser.add_argument("other", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--only", nargs="+", default=[""])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--worker", action="store_true")
    args = parser.parse_args()
    if args.worker:
        return worker()
    trees = [Path(__file__).resolve().parents[1], args.other.resolve()]
    names = [n for n in CASES if any(part in n for part in args.only)]
    head = "case ranks ms other ratio bound bytes other_bytes".split()
    print(("{:28}" + "{:>9}" * 5 + "{:>12}" * 2).format(*head))
    wrong = []
    for ranks in args.ranks:
        few = names if ranks < 4 else [n for n in names if n.startswith("product")]
        for row in compared(trees, ranks, few, args.rounds, args.epochs):
            name, ratio, bound, *sent = row[0], *row[4:]
            form = "{:28}{:9}{:9.2f}{:9.2f}{:9.3f}{:9.2f}{:12,}{:12,}"
            print(form.format(*row), flush=True)
            if ratio > bound or sent[0] > sent[1]:
                wrong.append(f"{name}, {ranks} ranks")
    if wrong and args.check:
        raise SystemExit(f"above the bound: {'; '.join(wrong)}")
    return None


if __name__ == "__main__":
    main()

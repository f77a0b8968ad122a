"""Full-graph epochs of typed graphs: RGCN and HGT beside PyG on one process.

    python benchmarks/hetero.py [--data ../shared/data] [--ranks 1 2] [--json]

Trains on DBLP and AMiner, where the folder has them (PyG writes to it), and on a generated
graph of the types and proportions of ogbn-mag. RGCN is a HeteroConv of SAGEConv, a weight for
each relation. PyG's epoch, on rank 0 while the others wait, and ours take turns; a rank has one
thread. Seconds are a processor's, on the busiest rank, which other programs disturb less than a
clock's. Bytes are the ledger's, of the third epoch or later.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch_geometric.data import HeteroData
from torch_geometric.datasets import DBLP

import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.ledger import format_table
from pyg_distcomm.partition.part_share import cut_graph

SHARED = Path(__file__).parents[2] / "shared" / "data"
WIDTH, HIDDEN, HEADS, CLASSES = 128, 64, 4, 8
MIB = 2**20

# ogbn-mag: nodes by type, and edges
NODES = {
    "paper": 736_389,
    "author": 1_134_649,
    "institution": 8_740,
    "field_of_study": 59_965,
}
EDGES = {
    ("author", "affiliated_with", "institution"): 1_043_998,
    ("author", "writes", "paper"): 7_145_660,
    ("paper", "cites", "paper"): 5_416_271,
    ("paper", "has_topic", "field_of_study"): 7_505_078,
}


def like_mag(share: int) -> HeteroData:
    """Makes a graph of 1 / share of ogbn-mag's nodes and edges, both ways, with hubs."""
    rng, data = np.random.default_rng(0), HeteroData()
    for name, count in NODES.items():
        x = rng.standard_normal((count // share, WIDTH), dtype=np.float32)
        data[name].x = torch.from_numpy(x)
    for (source, name, target), count in EDGES.items():
        ends = [len(data[end].x) for end in (source, target)]
        # the u^2 of uniform u: few nodes have most edges
        drawn = [(rng.random(count // share) ** 2 * n).astype(np.int64) for n in ends]
        mixed = [rng.permutation(n)[ids] for n, ids in zip(ends, drawn, strict=True)]
        edges = torch.from_numpy(np.stack(mixed))
        data[source, name, target].edge_index = edges
        data[target, f"rev_{name}", source].edge_index = edges.flip(0)
    labels = rng.integers(0, CLASSES, len(data["paper"].x))
    return labelled(data, "paper", torch.from_numpy(labels))


def labelled(data: HeteroData, name: str, y: Any) -> HeteroData:
    """Gives a type labels, and features of unit width to those that have none."""
    data[name].y = y
    data.target = name
    generator = torch.Generator().manual_seed(0)
    for store in data.node_stores:
        if "x" not in store:
            store.x = torch.randn(store.num_nodes, WIDTH, generator=generator)
        store.num_nodes = len(store.x)
    return data


def dblp(folder: Path) -> HeteroData:
    """Loads authors, papers, terms and conferences."""
    found = DBLP(str(folder))[0]
    data = HeteroData()
    for store in found.node_stores:
        data[store._key].num_nodes = store.num_nodes
        if "x" in store:
            data[store._key].x = store.x
    for store in found.edge_stores:
        data[store._key].edge_index = store.edge_index
    return labelled(data, "author", found["author"].y)


def aminer(folder: Path) -> HeteroData:
    """Loads papers, authors and references."""
    file, data = np.load(next((folder / "raw").glob("*.npz"))), HeteroData()
    others = ("author", "reference")
    for name in ("paper", *others):
        data[name].num_nodes = int(file[f"num_nodes_{name}"])
    for name in others:
        edges = torch.from_numpy(file[f"paper_{name}"]).long()
        data["paper", "to", name].edge_index = edges
        data[name, "to", "paper"].edge_index = edges.flip(0)
    return labelled(data, "paper", torch.from_numpy(file["paper_y"]).long())


def graphs(data: Path, share: int) -> dict[str, Callable[[], HeteroData]]:
    """Lists the graphs that there are."""
    found: dict[str, Callable[[], HeteroData]] = {}
    if (data / "hetero_dblp").exists():
        found["DBLP"] = lambda: dblp(data / "hetero_dblp")
    if (data / "hetero_aminer").exists():
        found["AMiner"] = lambda: aminer(data / "hetero_aminer")
    found[f"MAG / {share}"] = lambda: like_mag(share)
    return found


class Net(torch.nn.Module):
    """Two layers, and a linear one on the type with labels."""

    def __init__(self, data: HeteroData, kind: str) -> None:
        super().__init__()
        self.target, self.kind = data.target, kind
        widths = {store._key: store.x.size(1) for store in data.node_stores}
        self.layers = torch.nn.ModuleList()
        for first in (widths, dict.fromkeys(widths, HIDDEN)):
            if kind == "hgt":
                layer: Any = pyg.HGTConv(first, HIDDEN, data.metadata(), heads=HEADS)
            else:
                layer = pyg.HeteroConv(
                    {
                        t: pyg.SAGEConv((first[t[0]], first[t[2]]), HIDDEN)
                        for t in data.edge_types
                    }
                )
            self.layers.append(layer)
        self.out = torch.nn.Linear(HIDDEN, int(data[data.target].y.max()) + 1)

    def forward(self, x_dict: Any, edge_index_dict: Any) -> Any:
        """Returns scores of the classes of the type with labels."""
        for layer in self.layers:
            x_dict = {k: x.relu() for k, x in layer(x_dict, edge_index_dict).items()}
        return self.out(x_dict[self.target])


@dataclass
class Row:
    """One graph, model and number of ranks."""

    graph: str
    model: str
    ranks: int
    pyg: float
    ours: float
    loss_apart: float
    bytes: int


def trainer(model: torch.nn.Module, data: Any, target: str) -> Callable[[], float]:
    """Returns what trains an epoch, and tells its loss."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)

    def epoch() -> float:
        optimizer.zero_grad()
        out = model(data.x_dict, data.edge_index_dict)
        loss = F.cross_entropy(out, data[target].y)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return epoch


def timed(
    epoch: Callable[[], float], mesh: pdc.Mesh, alone: bool
) -> tuple[float, float]:
    """Runs an epoch on all ranks, or on rank 0 while the others wait.

    Returns the processor seconds of the busiest rank, and the loss.
    """
    collectives.all_gather_counts([0], mesh.control)
    begin, loss = time.process_time(), 0.0
    if not alone or mesh.rank == 0:
        loss = epoch()
    mine = round(1e6 * (time.process_time() - begin))
    return max(collectives.all_gather_counts([mine], mesh.control))[0] / 1e6, loss


def measure(name: str, folder: str, share: int, kind: str, rounds: int) -> Row:
    """Trains on all ranks, and by PyG on rank 0, in turns."""
    torch.set_num_threads(1)
    mesh = pdc.init()
    load = graphs(Path(folder), share)[name]
    first = load() if mesh.rank == 0 else None  # PyG writes what it reads first
    collectives.all_gather_counts([0], mesh.control)
    data = load() if first is None else first
    torch.manual_seed(0)
    plain = Net(data, kind)
    ours = pdc.convert(copy.deepcopy(plain))
    owners = cut_graph(data, mesh.size, "metis")
    begin, by_type = 0, {}
    for store in data.node_stores:
        by_type[store._key] = owners.owner[begin : begin + store.num_nodes]
        begin += store.num_nodes
    spread = pdc.partition(data, mesh, by_type)
    epochs = trainer(plain, data, data.target), trainer(ours, spread, data.target)
    seconds: list[list[float]] = [[], []]
    worst = 0.0
    for number in range(rounds + 2):  # the first two plan, and fill what is kept
        one, loss = timed(epochs[0], mesh, alone=True)
        mesh.ledger.reset()
        two, again = timed(epochs[1], mesh, alone=False)
        worst = max(worst, abs(loss - again) if mesh.rank == 0 else 0.0)
        if number > 1:
            seconds[0].append(one)
            seconds[1].append(two)
    ledger = mesh.ledger
    sent = ledger.bytes() - sum(
        ledger.bytes(op, axis) for op, axis in ledger.entries if axis == "control"
    )
    total = sum(each[0] for each in collectives.all_gather_counts([sent], mesh.world))
    pyg_s, ours_s = map(statistics.median, seconds)
    return Row(name, kind, mesh.size, pyg_s, ours_s, worst, total)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=SHARED)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--share", type=int, default=40, help="of ogbn-mag's size, one in"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", help="graphs, by name")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    names = [
        n for n in graphs(args.data, args.share) if not args.only or n in args.only
    ]
    rows = []
    for name, kind, ranks in itertools.product(names, ("rgcn", "hgt"), args.ranks):
        given = name, str(args.data), args.share, kind, args.rounds
        rows.append(pdc.launch(measure, ranks, *given)[0])
        print(rows[-1], file=sys.stderr, flush=True)
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    head = ("graph", "model", "ranks", "PyG, s", "ours, s", "PyG / ours")
    head += ("loss apart", "MiB, all")
    table = [
        (
            row.graph,
            row.model,
            row.ranks,
            f"{row.pyg:.3f}",
            f"{row.ours:.3f}",
            f"{row.pyg / row.ours:.2f}",
            f"{row.loss_apart:.0e}",
            f"{row.bytes / MIB:.3f}",
        )
        for row in rows
    ]
    print(format_table(head, table))


if __name__ == "__main__":
    main()

"""One graph on 1, 2, 4 and 8 ranks: seconds, what the machine allows, and where they go.

    python benchmarks/strong_scaling.py [--nodes 65536] [--rounds 3] [--write REPORT.md]
    python benchmarks/strong_scaling.py --one-rank [--nodes 16384]    # beside PyG
    python benchmarks/strong_scaling.py --small [--nodes 2000]        # 1 and 2 ranks beside PyG

Two layers of width 64 on a uniform graph, of random halves, and on one with locality, cut by
METIS; the fastest epoch of each round counts, and the median of the rounds. What two cores
allow is told by two processes that train on half of the graph each, and exchange nothing:
they share the memory's bandwidth, and often more. Above two ranks, where ranks outnumber
the cores, seconds are processor seconds of the slowest rank.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch_geometric.nn as pyg
from tables import markdown
from torch_geometric.data import Data

import pyg_distcomm as pdc
from pyg_distcomm import nn
from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.ledger import format_table

WIDTH, DEGREE, EPOCHS, ATTRIBUTES = 64, 24, 6, 16
GRAPHS = {"uniform": "random", "local": "metis"}
PHASES = {"wait for": "waiting", "product": "products"}
DENSE = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm")


def mlp(times: int = 1) -> torch.nn.Module:
    """Makes the two linear layers of a GIN, of inputs that are so many times as wide."""
    first, last = torch.nn.Linear(times * WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
    return torch.nn.Sequential(first, torch.nn.ReLU(), last)


LAYERS = {
    "GCN": lambda lib: lib.GCNConv(WIDTH, WIDTH),
    "SAGE": lambda lib: lib.SAGEConv(WIDTH, WIDTH),
    "GIN": lambda lib: lib.GINConv(mlp()),
    "GAT": lambda lib: lib.GATConv(WIDTH, WIDTH // 4, heads=4),
    "GATv2": lambda lib: lib.GATv2Conv(WIDTH, WIDTH // 4, heads=4),
}
HEADS: dict[str, Any] = {"out_channels": WIDTH // 4, "heads": 4}
MORE = {
    "Transformer": lambda lib: lib.TransformerConv(WIDTH, **HEADS),
    "GraphConv": lambda lib: lib.GraphConv(WIDTH, WIDTH),
    "TAG": lambda lib: lib.TAGConv(WIDTH, WIDTH),
    "SG": lambda lib: lib.SGConv(WIDTH, WIDTH, K=2),
    "APPNP": lambda lib: lib.APPNP(4, 0.1),
    "Cheb": lambda lib: lib.ChebConv(WIDTH, WIDTH, 3),
    "PNA": lambda lib: lib.PNAConv(WIDTH, WIDTH, *PNA),
    "EdgeConv": lambda lib: lib.EdgeConv(mlp(2)),
}
# which read attributes of edges, or their types
ON_EDGES = {
    "GAT": lambda lib: lib.GATConv(WIDTH, edge_dim=ATTRIBUTES, **HEADS),
    "GATv2": lambda lib: lib.GATv2Conv(WIDTH, edge_dim=ATTRIBUTES, **HEADS),
    "Transformer": lambda lib: lib.TransformerConv(WIDTH, edge_dim=ATTRIBUTES, **HEADS),
    "GINE": lambda lib: lib.GINEConv(mlp(), edge_dim=ATTRIBUTES),
    "RGCN, 4 types": lambda lib: lib.RGCNConv(WIDTH, WIDTH, 4),
}
PNA = ["mean", "max"], ["identity"], torch.ones(3 * DEGREE, dtype=torch.long)


class Net(torch.nn.Module):
    """Two layers of one kind."""

    def __init__(self, make: Any, lib: Any) -> None:
        super().__init__()
        self.first, self.last = make(lib), make(lib)

    def forward(self, x, *edges):
        return self.last(self.first(x, *edges).relu(), *edges)


def generate(nodes: int, graph: str) -> Data:
    """Generates a graph; of a local one 1.1 % of the edges end anywhere."""
    torch.manual_seed(0)
    source = torch.randint(nodes, (nodes * DEGREE,))
    target = torch.randint(nodes, source.shape)
    if graph == "local":
        near = (source + (torch.randn(source.shape) * 300).long()) % nodes
        target = torch.where(torch.rand(source.shape) < 0.011, target, near)
    x, y = torch.randn(nodes, WIDTH), torch.randint(WIDTH, (nodes,))
    return Data(x=x, edge_index=torch.stack([source, target]), y=y)


def stepper(make: Any, data: Any, lib: Any = nn, given: str | None = None) -> Any:
    """Returns a function that trains one epoch; edges have what is `given`, too."""
    torch.manual_seed(1)
    net, edges = Net(make, lib), [data.edge_index]
    if given is not None:
        edges.append(data[given])
    params = list(net.parameters())
    rows = data.x if params else data.x.clone().requires_grad_()  # of APPNP
    optimizer = torch.optim.SGD(params or [rows], 0.01)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(rows, *edges), data.y).backward()
        optimizer.step()

    return step


def epochs(step: Any) -> tuple[float, float]:
    """Returns the least seconds and processor seconds of some epochs."""
    found = []
    for _ in range(EPOCHS):
        if dist.is_initialized():
            dist.barrier()
        begin = time.perf_counter(), time.process_time()
        step()
        found.append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
    return min(f[0] for f in found), min(f[1] for f in found)


def run(nodes: int, graph: str, shared: bool) -> dict[str, Any]:
    """Trains each layer on this rank: its share, or a graph of its own."""
    torch.set_num_threads(1)
    mesh = pdc.init()
    data = generate(nodes, graph)
    ghosts = 0.0
    if shared:
        data = pdc.partition(data, mesh, GRAPHS[graph] if mesh.size > 1 else "block")
        here = data.edge_index.topology.locals
        ghosts = here.halo.num_ghosts / here.num_own
    out: dict[str, Any] = {"ghosts": ghosts}
    for kind in LAYERS:
        step = stepper(LAYERS[kind], data)
        for _ in range(4):
            step()
        before = mesh.ledger.bytes()
        step()
        received = mesh.ledger.bytes() - before
        out[kind] = (*epochs(step), received)
        if shared and mesh.size == 2:
            out[kind] += (phases(step),)
    return out


def one_rank(nodes: int) -> list[dict[str, str]]:
    """Trains on one rank with PyG, with swapped imports, and on a share, in turns."""
    torch.set_num_threads(1)
    mesh = pdc.init()
    whole, rows = generate(nodes, "uniform"), []
    whole.edge_attr = torch.randn(whole.num_edges, ATTRIBUTES)
    whole.edge_type = torch.randint(4, (whole.num_edges,))
    share = pdc.partition(whole, mesh, "block")
    makers = {kind: (make, None) for kind, make in (LAYERS | MORE).items()}
    for kind, make in ON_EDGES.items():
        typed = kind.startswith("RGCN")
        name = kind if typed else f"{kind}, {ATTRIBUTES} attributes"
        makers[name] = make, "edge_type" if typed else "edge_attr"
    for kind, (make, given) in makers.items():
        ways = {
            "PyG": stepper(make, whole, pyg, given),
            "swapped": stepper(make, whole.clone(), nn, given),
            "share": stepper(make, share, nn, given),
        }
        spent: dict[str, list[float]] = defaultdict(list)
        for _ in range(3):
            for name, step in ways.items():
                spent[name].append(epochs(step)[1])
        least = {name: min(found) for name, found in spent.items()}
        row = {"layer": kind, "PyG / share": f"{least['PyG'] / least['share']:.1f}"}
        row["share / swapped"] = f"{least['share'] / least['swapped']:.2f}"
        row |= {f"{name}, ms": f"{t * 1e3:.1f}" for name, t in least.items()}
        rows.append(row)
    return rows


def small(nodes: int) -> list[dict[str, str]]:
    """Trains on few nodes of width 16 and degree 10, on a share and with PyG, in turns.

    What the messages of a step take is measured by as many sums of 1,000 numbers, by this
    package and by torch.distributed.
    """
    global WIDTH, DEGREE  # of this process
    WIDTH, DEGREE = 16, 10
    torch.set_num_threads(1)
    mesh, rows = pdc.init(), []
    whole = generate(nodes, "uniform")
    share, sums = pdc.partition(whole, mesh, "block"), torch.zeros(1000)
    for kind in ("GCN", "SAGE", "GIN", "GAT"):
        steps = {
            "PyG": stepper(LAYERS[kind], whole, pyg),
            "share": stepper(LAYERS[kind], share),
        }
        for step in steps.values():
            for _ in range(20):
                step()
        mesh.ledger.reset()
        steps["share"]()
        messages = sum(entry.calls for entry in mesh.ledger.entries.values())
        steps["messages alone"] = lambda n=messages: [
            collectives.all_reduce(sums, mesh.world) for _ in range(n)
        ]
        steps["by gloo alone"] = lambda n=messages: [
            dist.all_reduce(sums, async_op=True).wait() for _ in range(n)
        ]
        spent: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for _ in range(15):
            for name, step in steps.items():
                begin = time.perf_counter(), time.process_time()
                for _ in range(8):
                    step()
                end = time.perf_counter(), time.process_time()
                spent[name].append(
                    tuple((b - a) / 8 for a, b in zip(begin, end, strict=True))
                )
        clocks = {
            name: [statistics.median(t) * 1e3 for t in zip(*found, strict=True)]
            for name, found in spent.items()
        }
        row = {"ranks": str(mesh.size), "layer": kind}
        ratios = [a / b for a, b in zip(clocks["share"], clocks["PyG"], strict=True)]
        row |= {"share / PyG": f"{ratios[0]:.2f}", "of processors": f"{ratios[1]:.2f}"}
        row |= {f"{name}, ms": f"{t[0]:.2f}" for name, t in clocks.items()}
        rows.append(row | {"messages": str(messages)})
    return rows


def phases(step: Any) -> dict[str, float]:
    """Returns the milliseconds of an epoch by phase, from a profile."""
    begin = time.perf_counter()
    for _ in range(EPOCHS):
        step()
    wall = (time.perf_counter() - begin) / EPOCHS * 1e3
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU]
    ) as profile:
        for _ in range(EPOCHS):
            step()
    found: dict[str, float] = defaultdict(float)
    for event in profile.key_averages():
        name = event.key.removeprefix("pyg_distcomm: ")
        own = name != event.key
        phase = next((p for start, p in PHASES.items() if name.startswith(start)), None)
        if event.key in DENSE:
            phase = "dense products"
        elif phase is None or not own:
            phase = "other ops" if event.key.startswith("aten::") else "Python, packing"
        found[phase] += event.self_cpu_time_total / 1e3 / EPOCHS
    scale = wall / sum(found.values())
    return {phase: spent * scale for phase, spent in found.items()} | {"epoch": wall}


def main() -> None:
    """Prints the tables, and writes them to a report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--one-rank", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    if args.one_rank:
        print(table(pdc.launch(one_rank, 1, args.nodes or 16_384)[0]))
        return
    if args.small:
        nodes = args.nodes or 2_000
        print(table([row for p in (1, 2) for row in pdc.launch(small, p, nodes)[0]]))
        return
    args.nodes = args.nodes or 65_536
    two, places, many = [], [], []
    for graph in GRAPHS:
        runs: dict[str, list[Any]] = defaultdict(list)
        for _ in range(args.rounds):
            for name, ranks, nodes, shared in (
                ("whole", 1, args.nodes, False),
                ("apart", 2, args.nodes // 2, False),
                ("share", 2, args.nodes, True),
            ):
                runs[name].append(pdc.launch(run, ranks, nodes, graph, shared))
        for kind in LAYERS:
            one, apart, ours = (
                statistics.median(max(rank[kind][0] for rank in r) for r in runs[name])
                for name in ("whole", "apart", "share")
            )
            gains = [
                max(w[kind][0] for w in a) / max(s[kind][0] for s in b)
                for a, b in zip(runs["whole"], runs["share"], strict=True)
            ]
            two.append(
                {
                    "graph": graph,
                    "layer": kind,
                    "of what two cores allow": f"{apart / ours:.2f}",
                    "gain": f"{one / ours:.2f}",
                    "spread": f"{min(gains):.2f} to {max(gains):.2f}",
                    "two cores allow": f"{one / apart:.2f}",
                    "1 process, ms": f"{one * 1e3:.1f}",
                    "2 apart, ms": f"{apart * 1e3:.1f}",
                    "2 ranks, ms": f"{ours * 1e3:.1f}",
                    "ghosts": f"{runs['share'][0][0]['ghosts']:.0%}",
                }
            )
            spent = runs["share"][-1][0][kind][3]
            names = ("epoch", "waiting", "products", "dense products", "other ops")
            names += ("Python, packing",)
            row = {name: f"{spent.get(name, 0):.1f}" for name in names}
            places.append({"graph": graph, "layer": kind} | row)
        for ranks in (1, 2, 4, 8):
            found = pdc.launch(run, ranks, args.nodes, graph, True)
            row = {"graph": graph, "ranks": str(ranks)}
            for kind in LAYERS:
                row[kind] = f"{max(rank[kind][1] for rank in found) * 1e3:.0f}"
                most = max(rank[kind][2] for rank in found)
                row[f"{kind}, MiB"] = f"{most / 2**20:.1f}"
            many.append(row)
    text = report(args, two, places, many)
    print(text)
    if args.write:
        args.write.write_text(markdown(text))


def table(rows: list[dict[str, str]]) -> str:
    """Returns a table of rows with the same keys."""
    return format_table(list(rows[0]), [list(row.values()) for row in rows])


def report(args: Any, two: Any, places: Any, many: Any) -> str:
    """Returns the report."""
    least = min(float(row["of what two cores allow"]) for row in two)
    most = max(float(row["of what two cores allow"]) for row in two)
    return f"""# Strong scaling

**Two ranks reach {least:.0%} to {most:.0%} of what two processes reach that exchange nothing.**

`python benchmarks/strong_scaling.py --nodes {args.nodes} --rounds {args.rounds}`; torch
{torch.__version__}, Python {platform.python_version()}; {args.nodes:,} nodes, {DEGREE} edges
each, two layers of width {WIDTH}, float32, one thread per rank. Two processes that share
nothing but the machine are slower than one with half of the work: that is what two cores allow.

```
{table(two)}
```

## Where an epoch of rank 0 of two goes, milliseconds

```
{table(places)}
```

## Processor milliseconds of the slowest rank, and MiB that it receives per epoch

```
{table(many)}
```
"""


if __name__ == "__main__":
    main()

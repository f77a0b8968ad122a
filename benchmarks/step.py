"""Epochs of minibatch training: loader and step, ours against PyG's layers.

    python benchmarks/step.py [--scale 18 | --graph Computers --root DATA]
        [--model sage gcn gat] [--hidden 128] [--fan-outs 15 10 5] [--batches 6]
        [--epochs 5] [--threads 1] [--workers 0] [--peer] [--full] [--write REPORT.md]

Each competitor trains on the same seeds of the same graph, an R-MAT graph or a real one, one
epoch at a time, in turns, in one process. Medians are compared, of seconds and of processor
seconds (which other work on the machine disturbs less); times of the loader and of the step
are apart (our loader is run without prefetching here). Ratios are to `pyg_distcomm`: our
loader, and the script's model after `pdc.convert`. *Peak* is the memory that one step takes
above what is held before it. *PyG* is PyG as scripts are commonly written; its NeighborLoader
is run where it can sample, by pyg-lib, else by torch-sparse, also with `--workers`
processes. PyG's layers at their best run on its batches and on ours, by `trim_to_layer`,
`EdgeIndex`, or `SparseTensor` where torch-sparse is installed. On real graphs *quality* is
the accuracy on test nodes after the last epoch, else the loss. *Times limit* is the whole
epoch over what nobody can do without, in processor seconds: each row, edge and weight that is
read moves once at the memory's bandwidth, or, where that takes longer, the products with
weights run at the speed of a large one; see `limit`. `--peer` adds GraphBolt and
DGL's SAGEConv, in the interpreter that PEER_PYTHON names. `--full` adds epochs over the
whole graph.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import spmm as bench
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
import torch_geometric.typing
from loaders import MIB, resident
from tables import from_text
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.sampler import NeighborSampler
from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE, SparseTensor
from torch_geometric.utils import trim_to_layer

import pyg_distcomm as pdc
from pyg_distcomm.comm.ledger import format_table
from pyg_distcomm.kernels import memory
from pyg_distcomm.loader import DistNeighborLoader, LoaderOptions

FEATURES, CLASSES, BATCH = 100, 32, 1024
PLAIN = lambda batch: batch.edge_index  # noqa: E731
PNA = ["mean", "max"], ["identity"], torch.ones(10, dtype=torch.long)
LAYERS: dict[str, Callable[[int, int], torch.nn.Module]] = {
    "sage": pyg.SAGEConv,
    "gcn": pyg.GCNConv,
    "gat": lambda into, out: pyg.GATConv(into, out // 4, heads=4),
    "gat-dropout": lambda into, out: pyg.GATConv(into, out // 4, heads=4, dropout=0.5),
    "edge": lambda into, out: pyg.EdgeConv(torch.nn.Linear(2 * into, out)),
    "film": pyg.FiLMConv,
    "pna": lambda into, out: pyg.PNAConv(into, out, *PNA),
}


class OnTorchSparse(NeighborSampler):
    """PyG's sampler, on torch-sparse where pyg-lib is installed as well."""

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        with patch.object(torch_geometric.typing, "WITH_PYG_LIB", False):
            return super()._sample(*args, **kwargs)


class Model(torch.nn.Module):
    """The model of all competitors, which may trim as PyG's scripts do."""

    def __init__(
        self,
        layer: str,
        hidden: int,
        depth: int,
        trims: bool,
        ends: tuple[int, int] = (FEATURES, CLASSES),
    ) -> None:
        super().__init__()
        widths = [ends[0], *[hidden] * (depth - 1), ends[1]]
        pairs = itertools.pairwise(widths)
        self.convs = torch.nn.ModuleList(LAYERS[layer](f, g) for f, g in pairs)
        self.trims = trims

    def forward(self, x, edge_index, nodes=None, edges=None):
        for k, conv in enumerate(self.convs):
            if self.trims:
                x, edge_index, _ = trim_to_layer(k, nodes, edges, x, edge_index)
            x = conv(x, edge_index)
            x = x.relu() if k + 1 < len(self.convs) else x
        return x


def graph(scale: int) -> Data:
    """Returns the R-MAT graph with random features and labels."""
    row, col, n = bench.rmat(scale)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, FEATURES, generator=generator)
    y = torch.randint(0, CLASSES, (n,), generator=generator)
    return Data(x=x, y=y, edge_index=torch.stack([row, col]))


def real(name: str, root: Path) -> Data:
    """Returns a real graph, and which nodes train (half) and test (the rest)."""
    from torch_geometric import datasets

    kind, folder = {
        "Computers": (datasets.Amazon, "amazon"),
        "Photo": (datasets.Amazon, "amazon"),
        "tolokers": (datasets.HeterophilousGraphDataset, "heterophilous"),
    }[name]
    with tempfile.TemporaryDirectory() as room:
        copied = Path(room) / folder
        subprocess.run(["cp", "-r", str(root / folder), str(copied)], check=True)
        subprocess.run(["chmod", "-R", "u+w", str(copied)], check=True)
        data = kind(str(copied), name)[0]
    data = Data(x=data.x, y=data.y.long(), edge_index=data.edge_index)
    order = torch.randperm(data.num_nodes, generator=torch.Generator().manual_seed(0))
    data.train = order[: data.num_nodes // 2].clone()
    data.test = order[data.num_nodes // 2 :].clone()
    return data


def as_edge_index(batch: Data) -> Any:
    """Returns edges that say that they are sorted by target, as sampled ones are not."""
    n = batch.num_nodes
    return EdgeIndex(batch.edge_index, sparse_size=(n, n)).sort_by("col")[0]


def as_sparse(batch: Data) -> Any:
    """Returns the transposed adjacency of torch-sparse."""
    source, target = batch.edge_index
    n = batch.num_nodes
    return SparseTensor(row=target, col=source, sparse_sizes=(n, n))


def epoch(
    loader: Any,
    model: torch.nn.Module,
    opt: torch.optim.Optimizer,
    edges: Callable[[Data], Any] = PLAIN,
) -> Any:
    """Trains an epoch; returns what loader and steps took, by both clocks, and the loss."""
    spent, losses = torch.zeros(2, 2).double(), []
    at = clocks()
    for batch in loader:
        now = clocks()
        spent[0] += now - at
        opt.zero_grad()
        hops = batch.get("num_sampled_nodes"), batch.get("num_sampled_edges")
        out = model(batch.x, edges(batch), *hops)[: batch.batch_size]
        loss = F.cross_entropy(out, batch.y[: batch.batch_size])
        loss.backward()
        opt.step()
        losses.append(loss.item())
        at = clocks()
        spent[1] += at - now
    return spent, statistics.mean(losses)


def clocks() -> torch.Tensor:
    """Returns seconds, and seconds that processors have worked for this process."""
    now = time.perf_counter(), time.process_time()
    return torch.tensor(now, dtype=torch.float64)


def competitors(data: Data, args: argparse.Namespace, layer: str) -> dict[str, Any]:
    """Returns loader, model and edges of each competitor; all models begin alike."""
    options = {
        "num_neighbors": args.fan_outs,
        "input_nodes": chosen(data, args),
        "batch_size": BATCH,
    }
    torch.manual_seed(2)
    ends = data.num_features, int(data.y.max()) + 1
    plain = Model(layer, args.hidden, len(args.fan_outs), False, ends)
    trimmed = copy.deepcopy(plain)
    trimmed.trims = True
    ours = DistNeighborLoader(
        data, options=LoaderOptions(seed=0, prefetch=0), **options
    )
    found = {
        "pyg_distcomm": (ours, pdc.convert(copy.deepcopy(plain)), PLAIN),
        "pyg_distcomm, trim=False": (
            ours,
            pdc.convert(copy.deepcopy(plain), trim=False),
            PLAIN,
        ),
        "our loader, PyG's layers": (ours, copy.deepcopy(plain), PLAIN),
    }
    # trim_to_layer changes the degrees that GCN reads
    best, how = (plain, "") if layer == "gcn" else (trimmed, ", trim_to_layer")
    if how:
        found[f"our loader, PyG's{how}"] = ours, copy.deepcopy(trimmed), PLAIN
    found["our loader, PyG's, EdgeIndex"] = ours, copy.deepcopy(plain), as_edge_index
    if WITH_TORCH_SPARSE:
        found[f"our loader, PyG's{how}, SparseTensor"] = (
            ours,
            copy.deepcopy(best),
            as_sparse,
        )
    if not (WITH_PYG_LIB or WITH_TORCH_SPARSE):
        print("PyG's NeighborLoader: not run, it needs pyg-lib or torch-sparse")
        return found
    loader = NeighborLoader(data, **options)
    for workers in args.workers:
        more = {"num_workers": workers, "persistent_workers": workers > 0}
        name = "PyG" if not workers else f"PyG, {workers} workers"
        theirs = NeighborLoader(data, **options, **more) if workers else loader
        found[name] = theirs, copy.deepcopy(plain), PLAIN
    if not WITH_PYG_LIB:
        return found  # torch-sparse does not count what trim_to_layer reads
    if how:
        found[f"PyG{how}"] = loader, copy.deepcopy(trimmed), PLAIN
    found["PyG, EdgeIndex"] = loader, copy.deepcopy(plain), as_edge_index
    if WITH_TORCH_SPARSE:
        found[f"PyG{how}, SparseTensor"] = loader, copy.deepcopy(best), as_sparse
        sampler = OnTorchSparse(data, args.fan_outs)
        theirs = NeighborLoader(data, neighbor_sampler=sampler, **options)
        found["PyG on torch-sparse"] = theirs, copy.deepcopy(plain), PLAIN
    return found


def chosen(data: Data, args: argparse.Namespace) -> torch.Tensor:
    """Returns the seeds of an epoch."""
    if "train" in data:
        return data.train[: args.batches * BATCH]
    degree = torch.bincount(data.edge_index[1], minlength=data.num_nodes)
    seeds = degree.nonzero().view(-1)
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(len(seeds), generator=generator)
    return seeds[order[: args.batches * BATCH]]


def quality(data: Data, model: torch.nn.Module, loss: float) -> float:
    """Returns the accuracy on the test nodes of a real graph; the loss of others."""
    if "test" not in data:
        return loss
    plain = copy.deepcopy(model).eval()
    if isinstance(plain, Model):
        plain.trims = False
    with torch.no_grad():
        found = plain(data.x, data.edge_index.clone()).argmax(1)
    return float((found == data.y)[data.test].double().mean())


def peak(batch: Data, model: torch.nn.Module, edges: Callable[[Data], Any]) -> float:
    """Returns the MiB that one step takes above what is held before it."""
    model.zero_grad()
    memory.give_back()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    hops = batch.get("num_sampled_nodes"), batch.get("num_sampled_edges")
    out = model(batch.x, edges(batch), *hops)[: batch.batch_size]
    F.cross_entropy(out, batch.y[: batch.batch_size]).backward()
    model.zero_grad()
    return (resident("VmHWM") - before) / MIB


def limit(
    data: Data, loader: Any, layer: str, args: argparse.Namespace
) -> tuple[float, float, str]:
    """Returns the least processor seconds of an epoch, for bytes and for products, and why.

    Layer k reads the m rows of its sources and e edges, and writes n rows, of its targets.
    Backward, it reads n rows of the gradient and the inputs of its products, and writes m
    rows, except the first. The loader reads and writes features, ids and edges; Adam reads
    four numbers of each weight, and writes three.
    """
    depth, moved, done = len(args.fan_outs), 0, 0
    ends = data.num_features, int(data.y.max()) + 1
    widths = [ends[0], *[args.hidden] * (depth - 1), ends[1]]
    count = {"sage": 2}.get(layer, 1)  # products of each row, at least
    weights = sum(count * f * g for f, g in itertools.pairwise(widths))
    for batch in loader:
        nodes = list(itertools.accumulate(map(int, batch.num_sampled_nodes)))
        edges = list(itertools.accumulate(map(int, batch.num_sampled_edges)))
        moved += nodes[-1] * (8 * ends[0] + 16) + 24 * edges[-1] + 28 * weights
        for k, (f, g) in enumerate(itertools.pairwise(widths)):
            n, m, e = (part[depth - 1 - k] for part in (nodes, nodes[1:], edges))
            rows = m if layer == "gat" else n
            moved += 4 * (m * f + e + n * g) + 4 * (n * g + count * rows * f)
            moved += 4 * m * f * (k > 0) + 4 * e
            done += 2 * count * rows * f * g * (2 + (k > 0))
    large, wide = torch.ones(1 << 26), torch.ones(2048, 2048)
    out, product = torch.empty_like(large), torch.empty_like(wide)
    speed = 2 * large.nbytes / _least(lambda: out.copy_(large))
    rate = 2 * len(wide) ** 3 / _least(lambda: torch.mm(wide, wide, out=product))
    about = (
        f"limit of an epoch: {moved / speed:.4f} cpu s for {moved / MIB:.0f} MiB at "
        f"{speed / 1e9:.1f} GB/s, {done / rate:.4f} for {done / 1e9:.2f} GFLOP of products "
        f"at {rate / 1e9:.0f} GFLOP/s"
    )
    return moved / speed, done / rate, about


def _least(run: Callable[[], Any], times: int = 7) -> float:
    """Returns the least processor seconds of several runs."""
    found = []
    for _ in range(times):
        at = time.process_time()
        run()
        found.append(time.process_time() - at)
    return min(found)


def peer(data: Data, args: argparse.Namespace) -> tuple:
    """Trains GraphBolt and DGL's SAGEConv in another interpreter; returns its row."""
    with tempfile.TemporaryDirectory() as room:
        file = f"{room}/graph.pt"
        kept = {"x": data.x, "y": data.y, "edge_index": data.edge_index}
        torch.save({**kept, "seed": chosen(data, args)}, file)
        command = [
            os.environ["PEER_PYTHON"],
            str(Path(__file__).parent / "graphbolt.py"),
        ]
        command += ["--graph", file, "--train", "--hidden", str(args.hidden)]
        command += ["--rounds", str(args.epochs), "--threads", str(args.threads)]
        command += ["--fan-out", *map(str, args.fan_outs)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"GraphBolt failed:\n{done.stderr[-2000:]}")
    found: list[float] = json.loads(done.stdout.splitlines()[-1])["train"]
    return tuple(found)


def minibatches(
    data: Data, args: argparse.Namespace, layer: str
) -> tuple[list[tuple], str]:
    """Times epochs of all competitors, in turns; returns rows, and the limit."""
    runs = competitors(data, args, layer)
    opts = {
        name: torch.optim.Adam(model.parameters(), lr=0.003)
        for name, (_, model, _) in runs.items()
    }
    times: dict[str, list[Any]] = {name: [] for name in runs}
    for k in range(args.epochs + 1):
        for name, (loader, model, edges) in runs.items():
            if hasattr(loader, "set_epoch"):
                loader.set_epoch(k)
            found = epoch(loader, model, opts[name], edges)
            if k:  # the first compiles, and observes what may be trimmed
                times[name].append(found)
    rows, base = [], None
    *least, about = limit(data, runs["pyg_distcomm"][0], layer, args)
    for name, found in times.items():
        spent = torch.stack(
            [part for part, _ in found]
        )  # epochs, (loader, step), clocks
        medians, whole = spent.median(0).values, spent.sum(1)
        total = whole.median(0).values
        base = (medians, total) if base is None else base
        spread = (whole[:, 0].max() / whole[:, 0].min()).item()
        ratios = [(medians[1, 1] / base[0][1, 1]), *(total / base[1])]
        numbers = [*medians[:, 0], *medians[:, 1], *ratios]
        loader, model, edges = runs[name]
        ends = (
            quality(data, model, found[-1][1]),
            peak(next(iter(loader)), model, edges),
        )
        over = float(total[1]) / max(least)
        rows.append((name, *(float(v) for v in numbers), over, spread, *ends))
    absent = ["-"] * (len(rows[0]) - 2)
    if not WITH_PYG_LIB:
        rows.append(("PyG on pyg-lib", "not run", *absent))
    if not args.peer and layer == "sage":
        rows.append(("GraphBolt, DGL's SAGEConv", "not run", *absent))
    elif layer == "sage" and base is not None:
        *seconds, most, loss = peer(data, args)
        total = seconds[0] + seconds[1], seconds[2] + seconds[3]
        ratios = [
            seconds[3] / float(base[0][1, 1]),
            *(t / float(b) for t, b in zip(total, base[1], strict=True)),
        ]
        ends = most, "-" if "test" in data else loss, "-"
        over = total[1] / max(least)
        rows.append(("GraphBolt, DGL's SAGEConv", *seconds, *ratios, over, *ends))
    return rows, about


def whole_graph(data: Data, args: argparse.Namespace, layer: str) -> list[tuple]:
    """Times epochs over the whole graph: PyG's layers, and converted ones."""
    ends = data.num_features, int(data.y.max()) + 1
    plain = Model(layer, args.hidden, len(args.fan_outs), False, ends)
    models = {"pyg_distcomm": pdc.convert(copy.deepcopy(plain)), "PyG": plain}
    times: dict[str, list[float]] = {name: [] for name in models}
    for k in range(3):
        for name, model in models.items():
            at = time.perf_counter()
            model.zero_grad()
            F.cross_entropy(model(data.x, data.edge_index), data.y).backward()
            if k:
                times[name].append(time.perf_counter() - at)
    base = statistics.median(times["pyg_distcomm"])
    return [
        (name, statistics.median(t), statistics.median(t) / base)
        for name, t in times.items()
    ]


def main() -> None:
    """Runs the comparisons and prints (or writes) the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--scale", type=int, default=18)
    parser.add_argument("--graph")
    parser.add_argument("--root", type=Path, default=Path("../shared/data"))
    parser.add_argument("--workers", type=int, nargs="+", default=[0])
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--model", nargs="+", choices=LAYERS, default=["sage"])
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--fan-outs", type=int, nargs="+", default=[15, 10, 5])
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")
    data = real(args.graph, args.root) if args.graph else graph(args.scale)
    parts = []
    for layer in args.model:
        heads = f"{layer}, epoch", "loader s", "step s", "loader cpu s", "step cpu s"
        heads += "step cpu", "epoch", "epoch cpu", "times limit", "slowest/fastest"
        heads += "quality", "peak MiB"
        rows, about = minibatches(data, args, layer)
        parts.append(f"{format_table(heads, rows)}\n{about}")
        print(parts[-1], flush=True)
        if args.full:
            heads = f"{layer}, whole graph", "s/epoch", "times ours"
            parts.append(format_table(heads, whole_graph(data, args, layer)))
            print(parts[-1], flush=True)
    text = "\n\n".join(parts)
    if args.write:
        off = "write", "root", "graph" if args.graph is None else "scale"
        given = " ".join(
            f"--{k} {' '.join(map(str, v)) if isinstance(v, list) else v}"
            for k, v in vars(args).items()
            if k not in off and v is not False
        )
        args.write.write_text(
            f"# A training step on minibatches\n\n`benchmarks/step.py {given}`; torch "
            f"{torch.__version__}, Python {platform.python_version()}; a graph of "
            f"{data.num_nodes:,} nodes and {data.num_edges:,} edges; medians, competitors "
            f"in turn; cpu: processor seconds; step and epoch as ratios to the first."
            f"\n\n{from_text(text)}\n"
        )


if __name__ == "__main__":
    main()

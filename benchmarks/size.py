"""How large a graph two cores and 24 GiB hold: cut, load, train, sample; growth; on paper.

    python benchmarks/size.py products               # 2.4 million nodes, 124 million edges
    python benchmarks/size.py pyg                    # PyG on one process beside it
    python benchmarks/size.py pyg_batches            # its minibatches
    python benchmarks/size.py cut                    # 50 million nodes, 800 million edges
    python benchmarks/size.py sample                 # minibatches of what `cut` wrote
    python benchmarks/size.py paper                  # 64 to 4,096 ranks, checked on 8 to 64
    python benchmarks/size.py memory                 # what holds a rank's memory
    python benchmarks/size.py growth                 # exponents in nodes and ranks

Graphs are those of `communities.write`, kept in --folder with their parts. Each rank's memory
is its PSS: pages that ranks share, of files too, count once in their sum.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import multiprocessing
import shutil
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import communities
import numpy as np
import spmm as bench
import torch
import torch.nn.functional as F
from scaling import GCN, best_by_name, mib, sides
from torch_geometric import nn as pyg
from torch_geometric.data.data import BaseData, Data
from torch_geometric.loader import NeighborLoader

import pyg_distcomm as pdc
from pyg_distcomm import kernels
from pyg_distcomm.comm.ledger import format_table
from pyg_distcomm.halo.codecs import Quantise
from pyg_distcomm.kernels import memory
from pyg_distcomm.loader import DistNeighborLoader, LoaderOptions
from pyg_distcomm.nn import DistSAGEConv, GraphSAGE
from pyg_distcomm.partition.external import partition_files
from pyg_distcomm.partition.folder import read_part
from pyg_distcomm.plan.planner import LAWS

GIB = 2**30
PARAMETER = torch.nn.Parameter
CLASSES = communities.FIELDS * communities.CLASSES_OF_FIELD
HIDDEN = 128
FANOUTS = [15, 10, 5]
BATCH = 1024
NODE_FILES = ("x", "y", "train_mask")
PAPERS = (111_000_000, 1_600_000_000, (128, 256, 256, 172))
CLUSTERS = {  # bytes of memory of a rank, which is one GPU (or half of an MI250X)
    "perlmutter": 40 * 10**9,  # four A100 per node
    "frontier": 64 * 10**9,  # four MI250X per node
    "dgx-h100": 80 * 10**9,  # eight H100 per node
}


# what a process holds -----------------------------------------------------------------


def held() -> int:
    """Reads this process's PSS, in bytes."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * int(text.split("\nPss:")[1].split()[0])


class Phases:
    """Measures each phase: seconds of the wall, of processors, and the largest PSS in it."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, float]] = {}
        self._peak = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures a block."""
        ended, self._peak = threading.Event(), held()
        watch = threading.Thread(target=self._watch, args=(ended,), daemon=True)
        watch.start()
        wall, spent = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            wall, spent = time.perf_counter() - wall, time.process_time() - spent
            ended.set()
            watch.join()
            end = held()
            peak = max(self._peak, end)
            self.rows[name] = {"wall": wall, "cpu": spent, "peak": peak, "end": end}

    def _watch(self, ended: threading.Event) -> None:
        while not ended.wait(1.0):  # reading it stops the process meanwhile
            self._peak = max(self._peak, held())


def in_process(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function in a new process, so that its memory is its own."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(function, args)


def storages(root: Any, seen: dict[int, Any]) -> int:
    """Returns the bytes of tensors and arrays that an object holds, each counted once.

    Args:
        root: the object; its attributes and entries are followed.
        seen: the objects and storages that are counted already, which are added to; it
            holds them, so that no other object gets their place.
    """
    total, left = 0, [root]
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(
            one, (str, bytes, int, float, type(None), type)
        ):
            continue
        seen[id(one)] = one
        if isinstance(one, torch.Tensor) and type(one) in (torch.Tensor, PARAMETER):
            storage = one.untyped_storage()
            if storage.data_ptr() not in seen:
                seen[storage.data_ptr()] = storage
                total += storage.nbytes()
            left += [one.grad] if one.is_leaf else []
        elif isinstance(one, np.ndarray):
            if one.ctypes.data not in seen:
                seen[one.ctypes.data] = one
                total += one.nbytes
        elif isinstance(one, dict):
            left += [*one.keys(), *one.values()]
        elif isinstance(one, (list, tuple, set, frozenset)):
            left += one
        elif not isinstance(one, (types.ModuleType, types.FunctionType)):
            slots = getattr(type(one), "__slots__", ())
            names = (slots,) if isinstance(slots, str) else slots
            left += [getattr(one, name, None) for name in names]
            left += getattr(one, "__dict__", {}).values()
    return total


# partitions ---------------------------------------------------------------------------


def generated(folder: Path, nodes: int, edges: int, features: int) -> Path:
    """Writes a graph, if it is not there; prints what that took."""
    graph = folder / f"graph-{nodes}-{edges}-{features}"
    if not graph.exists():
        aside = graph.with_suffix(
            ".part"
        )  # a run that is killed leaves no half of a graph
        shutil.rmtree(aside, ignore_errors=True)
        found = in_process(_generate, aside, nodes, edges, features)
        aside.rename(graph)
        show(f"generate {nodes:,} nodes, {found[1]:,} edges", [found[0]])
    return graph


def _generate(graph: Path, nodes: int, edges: int, features: int) -> Any:
    phases = Phases()
    with phases.phase("generate"):
        count = communities.write(graph, nodes, edges, features=features)
    return phases.rows, count


def cut(graph: Path, parts: int, method: str = "stream") -> tuple[Path, Any]:
    """Writes the parts of a graph, if they are not there; returns their folder and figures."""
    out, kept = graph / f"{method}-{parts}", graph / f"{method}-{parts}.json"
    if not (kept.exists() and out.exists()):
        rows, share, edges = in_process(_cut, graph, out, parts, method)
        kept.write_text(json.dumps({"rows": rows, "share": share, "edges": edges}))
    found = json.loads(kept.read_text())
    show(
        f"{parts} parts of {found['edges']:,} edges, {found['share']:.1%} cut",
        [found["rows"]],
    )
    return out, found


def _cut(graph: Path, out: Path, parts: int, method: str) -> Any:
    phases = Phases()
    nodes = np.load(graph / "y.npy", mmap_mode="r").shape[0]
    files = {name: graph / f"{name}.npy" for name in NODE_FILES}
    with phases.phase("partition"):
        figures = partition_files(
            graph / "edge_index.npy",
            out,
            parts,
            method,
            num_nodes=nodes,
            node_files=files,
            force=True,
        )
    edges = sum(figures.edges)
    with phases.phase("check, load one part"):
        part = read_part(out, 0)
        assert part.edge_index.size(1) == figures.edges[0]
    return phases.rows, figures.edge_cut / edges, edges


def show(title: str, ranks: list[dict[str, dict[str, float]]]) -> None:
    """Prints the phases: the slowest rank's wall, all ranks' seconds, and each one's peak."""
    rows = []
    for name in ranks[0]:
        each = [rank[name] for rank in ranks]
        rows.append(
            (
                name,
                f"{max(one['wall'] for one in each):.1f}",
                f"{sum(one['cpu'] for one in each):.1f}",
                " ".join(f"{one['peak'] / GIB:.2f}" for one in each),
                f"{sum(one['peak'] for one in each) / GIB:.2f}",
            )
        )
    print(f"\n{title}")
    head = ("phase", "wall s", "processor s", "peak GiB of each", "all")
    print(format_table(head, rows), flush=True)


# training and sampling ----------------------------------------------------------------


class SAGE(GCN):
    """GraphSAGE of as many layers as there are pairs of widths."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        torch.nn.Module.__init__(self)
        pairs = itertools.pairwise(widths)
        self.convs = torch.nn.ModuleList(DistSAGEConv(a, b) for a, b in pairs)


def step(model: Any, optimizer: Any, data: Any) -> float:
    """Trains on the full graph, once; returns the loss."""
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    return loss.item()


def trained(
    folder: str, ways: list[str], epochs: int, batches: int, hidden: int = HIDDEN
) -> Any:
    """Runs on a rank: loads its part, trains in each way; returns phases, bytes and losses."""
    mesh, phases = pdc.init(), Phases()
    losses, moved = {}, {}
    with phases.phase("interpreter"):
        pass
    with phases.phase("load"):
        data = pdc.load_partition(folder, mesh, verify="sizes")
    for way in ways:
        if way == "batches":
            losses[way] = sampled(data, mesh, phases, batches)
            continue
        torch.manual_seed(0)
        kind = GCN if way == "gcn" else SAGE
        model = pdc.replicate(kind((data.x.size(1), hidden, hidden, CLASSES)), mesh)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for epoch in range(epochs):
            mesh.ledger.reset()
            with phases.phase(f"{way}, epoch {epoch + 1}"):
                losses[way] = step(model, optimizer, data)
            moved[way] = mesh.ledger.bytes()
        del model, optimizer
    return phases.rows, losses, moved


def sampled(data: Any, mesh: Any, phases: Phases, batches: int) -> float:
    """Trains GraphSAGE on minibatches of a share, the first one measured by itself."""
    torch.manual_seed(0)
    model = GraphSAGE(data.x.size(1), HIDDEN, len(FANOUTS), CLASSES)
    model = pdc.replicate(model, mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    loss = torch.zeros(())
    with phases.phase("minibatches, the first"):
        loader = DistNeighborLoader(
            data,
            FANOUTS,
            data.train_mask,
            batch_size=BATCH,
            shuffle=True,
            options=LoaderOptions(bulk_size=2, seed=0),
        )
        supply = iter(loader)
        first = next(supply)
    with phases.phase(f"minibatches, {batches} steps"):
        for batch in itertools.chain([first], itertools.islice(supply, batches - 1)):
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            loss = F.cross_entropy(out, batch.y[: batch.batch_size])
            loss.backward()
            optimizer.step()
    return loss.item()


def train(folder: Path, ranks: int, ways: list[str], epochs: int, batches: int) -> None:
    """Trains on so many ranks and prints the phases."""
    found = pdc.launch(trained, ranks, str(folder), ways, epochs, batches, threads=1)
    show(f"{ranks} ranks, {' and '.join(ways)}", [rows for rows, _, _ in found])
    for way, loss in found[0][1].items():
        moved = max(each[2].get(way, 0) for each in found)
        print(f"{way}: loss {loss:.4f}, {moved / 2**20:,.0f} MiB received by a rank")


def products(args: Any) -> None:
    """Cuts, loads and trains a graph of the size of ogbn-products."""
    graph = generated(
        args.folder, args.nodes or 2_400_000, args.edges or 124_000_000, 100
    )
    for ranks in args.ranks or [2, 4]:
        out, _ = cut(graph, ranks)
        for way in args.ways:  # in processes of its own, so that its memory is
            train(out, ranks, [way], args.epochs, args.batches)
        if not args.keep:
            shutil.rmtree(out)
            (graph / f"stream-{ranks}.json").unlink()


def pyg_alone(args: Any) -> None:
    """Trains PyG's GCN on the whole graph by one process, on a matrix of torch.sparse."""
    nodes, edges = args.nodes or 2_400_000, args.edges or 124_000_000
    graph, phases = generated(args.folder, nodes, edges, 100), Phases()
    with phases.phase("load, CSR"):
        x, y, mask = (
            torch.from_numpy(np.load(graph / f"{name}.npy")) for name in NODE_FILES
        )
        ends = torch.from_numpy(np.load(graph / "edge_index.npy").astype(np.int32)).t()
        order = torch.argsort(ends[1].long(), stable=True)
        degree = torch.bincount(ends[1].long(), minlength=len(x))
        ptr = F.pad(degree.cumsum(0), (1, 0))
        col, ones = ends[0][order].long(), torch.ones(len(order))
        del ends, order
        adj = torch.sparse_csr_tensor(ptr, col, ones, (len(x), len(x)))
    model = GCN((x.size(1), HIDDEN, HIDDEN, CLASSES))
    for k, conv in enumerate(model.convs):
        model.convs[k] = pyg.GCNConv(conv.in_channels, conv.out_channels, cached=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(args.epochs):
        with phases.phase(f"epoch {epoch + 1}"):
            optimizer.zero_grad()
            out = model(x, adj)
            F.cross_entropy(out[mask], y[mask].long()).backward()
            optimizer.step()
    show("PyG on one process, torch.sparse", [phases.rows])


def pyg_batches(args: Any) -> None:
    """Trains PyG's GraphSAGE on minibatches of the whole graph by one process."""
    nodes, edges = args.nodes or 2_400_000, args.edges or 124_000_000
    graph, phases = generated(args.folder, nodes, edges, 100), Phases()
    torch.manual_seed(0)
    with phases.phase("load"):
        x, y, mask = (
            torch.from_numpy(np.load(graph / f"{name}.npy")) for name in NODE_FILES
        )
        ends = torch.from_numpy(np.load(graph / "edge_index.npy")).t().contiguous()
        data = Data(x=x, y=y.long(), train_mask=mask, edge_index=ends)
    model = pyg.GraphSAGE(x.size(1), HIDDEN, len(FANOUTS), CLASSES)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    with phases.phase("minibatches, the first"):
        given = data, FANOUTS
        kept = {"input_nodes": mask, "batch_size": BATCH, "shuffle": True}
        supply = iter(NeighborLoader(*given, **kept))
        first = next(supply)
    with phases.phase(f"minibatches, {args.batches} steps"):
        for batch in itertools.chain(
            [first], itertools.islice(supply, args.batches - 1)
        ):
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            F.cross_entropy(out, batch.y[: batch.batch_size]).backward()
            optimizer.step()
    show("PyG's minibatches on one process", [phases.rows])


def large(args: Any) -> None:
    """Cuts a graph that is larger than memory; says what a random cut would be."""
    graph = generated(
        args.folder, args.nodes or 50_000_000, args.edges or 800_000_000, 16
    )
    for parts in args.ranks or [2]:
        cut(graph, parts)
        print(f"a random cut: {1 - 1 / parts:.1%} of the edges")


def sample(args: Any) -> None:
    """Samples minibatches of parts that stay in files."""
    graph = generated(
        args.folder, args.nodes or 50_000_000, args.edges or 800_000_000, 16
    )
    for ranks in args.ranks or [2]:
        out, _ = cut(graph, ranks)
        train(out, ranks, ["batches"], 0, args.batches)


def holders(folder: str, way: str) -> dict[str, float]:
    """Runs on a rank: trains, returns what each thing holds in a step, and the PSS, in bytes.

    The step is at the end of its forward pass, when most is held: all that autograd saved.
    """
    mesh = pdc.init()
    kernels.warm_up()
    before = held()
    data = pdc.load_partition(folder, mesh, verify="checksums")
    widths = data.x.size(1), HIDDEN, HIDDEN, CLASSES
    if way == "batches":
        model = GraphSAGE(widths[0], HIDDEN, len(FANOUTS), CLASSES)
        options = LoaderOptions(bulk_size=1, seed=0)
        given = data, FANOUTS, data.train_mask
        loader: Any = DistNeighborLoader(*given, batch_size=BATCH, options=options)
        supply = iter(loader)
    else:
        model, loader = GCN(widths) if way == "gcn" else SAGE(widths), None
        supply = itertools.repeat(data)
    model = pdc.replicate(model, mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(3):
        loss = forward(model, next(supply))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    del loss
    batch, saved = next(supply), []

    def note(x: torch.Tensor) -> torch.Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        loss = forward(model, batch)
    seen: dict[int, Any] = {}
    found = {"interpreter": before}
    found["model"] = storages([model, optimizer.state], seen)
    found["features"] = storages(
        [data[name].to_local() for name in ("x", "y", "train_mask")], seen
    )
    found["edges, plans"] = storages(data, seen)
    # minibatches ahead are in queues, which cannot be read
    ahead = [one for one in gc.get_objects() if isinstance(one, BaseData)]
    found["sampler, rows in flight"] = storages([loader, supply, batch, ahead], seen)
    found["activations"] = storages(saved, seen)
    found["sum"] = sum(found.values())
    memory.give_back()
    found["PSS"] = held()
    loss.backward()
    return found


def forward(model: Any, batch: Any) -> torch.Tensor:
    """Returns the loss of a minibatch, or of a share."""
    out = model(batch.x, batch.edge_index)
    if "batch_size" in batch:
        return F.cross_entropy(out[: batch.batch_size], batch.y[: batch.batch_size])
    return F.cross_entropy(out[batch.train_mask], batch.y[batch.train_mask])


def shares(args: Any) -> None:
    """Prints what holds the memory of each rank, beside its PSS."""
    graph = generated(args.folder, args.nodes or 2**18, args.edges or 2**22, 100)
    for ranks in args.ranks or [2]:
        out, _ = cut(graph, ranks)
        for way in args.ways:
            found = pdc.launch(holders, ranks, str(out), way, threads=1)
            rows = [(k, *(f"{one[k] / 2**20:,.0f}" for one in found)) for k in found[0]]
            rows.append(
                ("sum / PSS", *(f"{one['sum'] / one['PSS']:.2f}" for one in found))
            )
            print(
                format_table(
                    (f"{way}, MiB", *(f"rank {k}" for k in range(ranks))), rows
                )
            )


# on paper -----------------------------------------------------------------------------


def loader_rows(graph: pdc.RandomGraph, batch: int = BATCH) -> float:
    """Returns the most distinct nodes of a minibatch in the mean, by the law of degrees.

    A draw meets node v with chance d_v / m, so that D draws leave out E (1 - D/m)^d of all.
    """
    law = LAWS[str(graph.law)]
    nodes, frontier = float(batch), float(batch)
    for fanout in FANOUTS:
        draws = min(frontier * fanout, graph.edges)
        frontier = graph.nodes * (
            1 - law.missing(graph.nodes, graph.edges, draws / graph.edges)
        )
        nodes = min(nodes + frontier, graph.nodes)
    return nodes


def on_paper(sizes: list[int], memory: int) -> list[dict[str, Any]]:
    """Returns what each way of training and each link costs a rank of so many.

    `best` is the one with the fewest bytes that fits in the memory of a rank.
    """
    nodes, edges, widths = PAPERS
    graph, rows = pdc.RandomGraph(nodes, edges, "rmat"), []
    for size in sizes:
        start = time.process_time()
        plans = pdc.plan(
            graph,
            widths,
            size,
            codecs=["bf16", Quantise(1)],
            memory=memory,
        )
        seconds = time.process_time() - start
        every = sorted((*plans, *plans.refused), key=lambda one: one.bytes)
        for codec in dict.fromkeys(one.codec for one in every):
            found = {"best": next(one for one in plans if one.codec == codec)}
            for one in (one for one in every if one.codec == codec):
                found.setdefault(one.algorithm, one)
            for name in ("1d", "2d", "3d", "feature", "best"):
                if name in found:
                    one = found[name]
                    way = {
                        "ranks": size,
                        "link": codec,
                        "way": name,
                        "grid": sides(one),
                    }
                    cost = {"bytes": one.bytes, "memory": one.memory, "plans": seconds}
                    rows.append(way | cost)
        own = nodes / size
        moved = loader_rows(graph) * (1 - 1 / size) * 4 * widths[0]
        kept = own * (4 * widths[0] + 24) + 16 * edges / size
        way = {"ranks": size, "link": "plain", "way": "loader", "grid": "a batch"}
        rows.append(way | {"bytes": moved, "memory": kept, "plans": seconds})
    return rows


def against_real(scale: int, sizes: list[int]) -> list[tuple]:
    """Compares the law with the real plans of every grid, of a graph cut at random."""
    row, col, n = bench.rmat(scale)
    edges, widths = torch.stack([row, col]), (128, 256, 256, 172)
    law, rows = pdc.RandomGraph(n, edges.size(1), "rmat"), []
    for size in sizes:
        start = time.perf_counter()
        how: Any = {"halo": "rows"}
        real = pdc.plan(edges, widths, size, partition="random", **how)
        seconds = time.perf_counter() - start
        paper = pdc.plan(law, widths, size, **how)
        ratios: dict[str, list[float]] = {"bytes": [], "memory": []}
        for one in real:
            other = paper.of(one.grid)
            ratios["bytes"].append(other.total_bytes / max(one.total_bytes, 1))
            ratios["memory"].append(other.memory / one.memory)
        spread = [f"{min(r):.3f} to {max(r):.3f}" for r in ratios.values()]
        rows.append((size, len(ratios["bytes"]), *spread, f"{seconds:.1f}"))
    return rows


def paper(args: Any) -> None:
    """Prints the plans on paper, and how far they are from real ones; draws their growth."""
    memory = CLUSTERS[args.cluster]
    rows = on_paper([64, 512, 4096], memory)
    head = ("ranks", "link", "way", "grid", "MiB received", "GiB held", args.cluster)
    cells = [
        (
            *(one[k] for k in ("ranks", "link", "way", "grid")),
            mib(one["bytes"]),
            f"{one['memory'] / GIB:.2f}",
            "fits" if one["memory"] <= memory else "too large",
        )
        for one in rows
    ]
    print(format_table(head, cells))
    total = sum({one["ranks"]: one["plans"] for one in rows}.values())
    print(f"{total:.1f} processor seconds for all of them")
    head = ("ranks", "grids", "bytes, law / real", "memory, law / real", "s")
    print(format_table(head, against_real(args.scale, args.ranks or [8, 16, 64])))
    if args.write:
        draw_paper(args.write / "size_paper.svg")


# growth -------------------------------------------------------------------------------


def point(folder: Path, nodes: int, ranks: int) -> dict[str, float]:
    """Cuts and trains a graph of 16 edges per node; returns what it cost."""
    graph = generated(folder, nodes, 16 * nodes, 32)
    out, found = cut(graph, ranks)
    ran = pdc.launch(trained, ranks, str(out), ["gcn"], 3, 0, 32, threads=1)
    shutil.rmtree(out)
    (graph / f"stream-{ranks}.json").unlink()
    late = [rows["gcn, epoch 3"] for rows, _, _ in ran]
    return {
        "nodes": nodes,
        "ranks": ranks,
        "partition, processor s": found["rows"]["partition"]["cpu"],
        "epoch, processor s": sum(one["cpu"] for one in late),
        "MiB received by all": sum(moved["gcn"] for _, _, moved in ran) / 2**20,
        "MiB held by all": sum(
            max(one["peak"] for name, one in rows.items() if name != "interpreter")
            - rows["interpreter"]["peak"]
            for rows, _, _ in ran
        )
        / 2**20,
    }


def exponent(xs: list[float], ys: list[float]) -> float:
    """Returns the slope of log y in log x, by least squares; nan of fewer than two points."""
    known = [(x, y) for x, y in zip(xs, ys, strict=True) if y > 0]
    if len(known) < 2:
        return math.nan
    x, y = np.log(np.array(known)).T
    return float(np.polyfit(x, y, 1)[0])


def growth(args: Any) -> None:
    """Prints costs by nodes and by ranks, with exponents (`report_charts.py` draws them)."""
    kept = args.folder / "growth.json"
    found = json.loads(kept.read_text()) if kept.exists() else []
    by_nodes = [(2**k, 2) for k in range(16, args.scale + 1)]
    by_ranks = [(2**args.middle, ranks) for ranks in args.ranks or [1, 2, 4, 8, 16]]
    for nodes, ranks in dict.fromkeys(by_nodes + by_ranks):
        if not any((one["nodes"], one["ranks"]) == (nodes, ranks) for one in found):
            found.append(point(args.folder, nodes, ranks))
            kept.write_text(json.dumps(found))
    for axis, points in (("nodes", by_nodes), ("ranks", by_ranks)):
        rows = [
            next(one for one in found if (one["nodes"], one["ranks"]) == at)
            for at in points
        ]
        names = [name for name in rows[0] if name not in ("nodes", "ranks")]
        table = [(one[axis], *(f"{one[k]:,.2f}" for k in names)) for one in rows]
        xs = [one[axis] for one in rows]
        slopes = [f"{exponent(xs, [one[k] for one in rows]):.2f}" for k in names]
        print(format_table((axis, *names), [*table, ("exponent", *slopes)]))


def draw_paper(path: Path) -> None:
    """Plots bytes and memory of a rank against the number of ranks, by algorithm."""
    from matplotlib import pyplot

    nodes, edges, widths = PAPERS
    graph = pdc.RandomGraph(nodes, edges, "rmat")
    sizes = [64, 128, 256, 512, 1024, 2048, 4096]
    lines: dict[str, list[tuple[int, float, float]]] = {}
    for size in sizes:
        plans = pdc.plan(graph, widths, size)
        for name, one in best_by_name(plans).items():
            lines.setdefault(name, []).append((size, one.bytes, one.memory))
    pyplot.rcParams |= {"svg.hashsalt": "pyg_distcomm", "font.size": 10}
    figure, axes = pyplot.subplots(1, 2, figsize=(8.6, 4.2))
    for k, (axis, label) in enumerate(zip(axes, ("received", "held"), strict=True)):
        for name in ("1d", "2d", "3d", "feature", "best"):
            known = lines.get(name, [])
            xs, ys = [one[0] for one in known], [one[k + 1] / GIB for one in known]
            axis.loglog(xs, ys, marker=".", label=f"{name}: P^{exponent(xs, ys):.2f}")
        axis.set_xlabel("ranks")
        axis.set_ylabel(f"GiB {label} by a rank")
        axis.set_xticks([64, 256, 1024, 4096], ["64", "256", "1,024", "4,096"])
        axis.set_yticks([1, 10], ["1", "10"])
        axis.minorticks_off()
        axis.set_ylim(top=200)
        axis.legend(frameon=False, ncols=2, loc="upper right")
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


COMMANDS: dict[str, Callable[[Any], None]] = {
    "products": products,
    "pyg": pyg_alone,
    "pyg_batches": pyg_batches,
    "cut": large,
    "sample": sample,
    "memory": shares,
    "paper": paper,
    "growth": growth,
}


def main() -> None:
    """Runs one command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument(
        "--folder", type=Path, default=Path("size"), help="of the files"
    )
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--edges", type=int)
    parser.add_argument("--ranks", type=int, nargs="+")
    parser.add_argument("--ways", nargs="+", default=["gcn", "sage", "batches"])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--scale", type=int, default=17, help="log2 of the most nodes")
    parser.add_argument("--cluster", choices=CLUSTERS, default="perlmutter")
    parser.add_argument("--middle", type=int, default=18, help="log2, by ranks")
    parser.add_argument("--write", type=Path, help="folder of the charts")
    parser.add_argument("--keep", action="store_true", help="parts of `products`, too")
    args = parser.parse_args()
    COMMANDS[args.command](args)


if __name__ == "__main__":
    main()

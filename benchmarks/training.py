"""Training by minibatches of a partitioned graph: phases, bytes, accuracy.

    python benchmarks/training.py [--graph Computers] [--ranks 2 4] [--write REPORT.md]

Two tables. *Phases* trains an epoch for each number of ranks P, copies c and minibatches a
bulk k, node-wise (GraphSAGE) and layer-wise (LADIES, FastGCN), and splits it as the figure
of [Tripathy24] does: probability, sampling, extraction, fetching of features, propagation.
Ways take turns in the same processes, medians are shown. *Accuracy* trains to the same
number of epochs over seeds, beside the full graph by the same package.

What the phases are: *probability* brings what probabilities are made of: at the owner ids
travel to it (node-wise), or weights of rows are summed up there (layer-wise); at the
requester whole rows travel. *Sampling* draws, and brings the draws. *Extraction* makes the
minibatch of what was drawn: it relabels nodes (node-wise), or finds the edges between rows
and columns, and weighs them (layer-wise). *Fetching* brings rows of features, *assembly* is
PyG's Data. All of these run in threads beside *propagation*: forward, backward, step.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tables import from_text
from torch_geometric.data import Data
from torch_geometric.nn import GCN, GraphSAGE
from torch_geometric.utils import add_self_loops, scatter

import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.ledger import format_table
from pyg_distcomm.loader import DistLayerLoader, DistNeighborLoader, LoaderOptions
from pyg_distcomm.partition.cutters import cut

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import real

KINDS = ("sage", "ladies", "fastgcn")
PHASES = ("probability", "sampling", "extraction", "fetch", "assemble", "train")
MIB = 2**20


def data_of(file: str) -> Data:
    """Returns a real graph, features of unit length, in float32."""
    data = real.read(file, torch.float32)
    data.x = F.normalize(data.x, dim=1)
    return data


def loader_options(kind: str, args: argparse.Namespace, size: int) -> dict[str, Any]:
    """Returns the arguments of a loader; a step has as many seeds on any number of ranks."""
    common = {"batch_size": max(args.batch // size, 1), "shuffle": True}
    if kind == "sage":
        return {"num_neighbors": list(args.fan_out), **common}
    return {
        "num_nodes_per_layer": [args.nodes // size] * len(args.fan_out),
        "rule": kind,
        **common,
    }


def loader_of(kind: str, data: Any, options: dict[str, Any]) -> Any:
    """Builds the loader of a kind."""
    return (DistNeighborLoader if kind == "sage" else DistLayerLoader)(data, **options)


def model_of(kind: str, data: Any, seed: int, args: argparse.Namespace) -> Any:
    """Returns PyG's model, run on the compiled products."""
    torch.manual_seed(seed)
    sizes = data.num_features, args.hidden, len(args.fan_out), args.classes
    given = {} if kind == "sage" else {"normalize": False, "add_self_loops": False}
    net = (GraphSAGE if kind == "sage" else GCN)(*sizes, dropout=0.5, **given)
    return pdc.convert(net)


def loss_of(model: Any, batch: Any, kind: str) -> torch.Tensor:
    """Returns the loss of the seeds; nothing, where they are a repeat."""
    more = () if kind == "sage" else (batch.edge_weight,)
    out = model(batch.x, batch.edge_index, *more)[: batch.batch_size]
    loss = F.cross_entropy(out, batch.y[: batch.batch_size])
    return 0 * loss if batch.get("padding", False) else loss


# Phases -----------------------------------------------------------------------------


class Watch:
    """Adds up the seconds of methods of one object, in the thread that samples."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES[:3], 0.0)
        self._inside = 0

    def over(self, owner: Any, names: Sequence[str], phase: str) -> None:
        """Replaces methods by timed ones; what one calls of another counts once."""
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name), phase))

    def _timed(self, call: Callable, phase: str) -> Callable:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inside += 1
            begin = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._inside -= 1
                if not self._inside:
                    self.seconds[phase] += time.perf_counter() - begin

        return timed


def watched(loader: Any, kind: str, place: str) -> Watch:
    """Times the parts of a loader's sampler."""
    watch, sampler = Watch(), loader.neighbor_sampler_in_use
    if kind != "sage":
        watch.over(sampler.graph, ("sums", "column_sums"), "probability")
        watch.over(sampler.graph, ("extract",), "extraction")
        return watch
    rows = sampler._rows
    if place == "owner":
        watch.over(rows, ("request",), "probability")
        watch.over(rows, ("answer", "draws"), "sampling")
    else:
        watch.over(rows, ("fetch",), "probability")
    return watch


def split(loader: Any, watch: Watch, kind: str, place: str) -> dict[str, float]:
    """Returns the seconds of each phase of an epoch of a rank; resets the watch."""
    found, phases = dict(watch.seconds), loader.phases
    rest = phases["sample"].seconds - sum(found.values())
    at_owner = kind == "sage" and place == "owner"
    found["extraction" if at_owner else "sampling"] += max(rest, 0.0)
    for name in PHASES[3:]:
        found[name] = phases[name].seconds
    watch.seconds = dict.fromkeys(PHASES[:3], 0.0)
    return found


def epochs(cases: list[tuple], file: str, args: argparse.Namespace) -> list[dict]:
    """Runs on a rank: trains an epoch of each case in turns; medians of each figure."""
    mesh, data = pdc.init(), data_of(file)
    share = pdc.partition(data, mesh, owners_of(data, mesh.size))
    ways = []
    for kind, c, place, k in cases:
        options = loader_options(kind, args, mesh.size)
        options["input_nodes"] = share.train_mask
        options["options"] = LoaderOptions(
            seed=0, bulk_size=k, replication=c, sample_at=place
        )
        loader = loader_of(kind, share, options)
        model = pdc.replicate(model_of(kind, data, 0, args), mesh)
        opt = torch.optim.Adam(model.parameters(), lr=0.01)
        ways.append((loader, model, opt, watched(loader, kind, place)))
    found: list[list[dict]] = [[] for _ in cases]
    for turn in range(args.rounds + 1):
        for case, way, every in zip(cases, ways, found, strict=True):
            loader, model, opt, watch = way
            collectives.barrier(mesh.world)
            mesh.ledger.reset()
            begin, work, steps = time.perf_counter(), time.process_time(), 0
            for batch in loader:
                opt.zero_grad()
                loss_of(model, batch, case[0]).backward()
                opt.step()
                steps += 1
            one = {"s": time.perf_counter() - begin, "steps": steps}
            one["work"] = time.process_time() - work
            loader._end_epoch()
            for purpose in ("sample", "fetch"):
                one[f"{purpose} bytes"] = sum(
                    entry.bytes
                    for (_, axis), entry in mesh.ledger.entries.items()
                    if axis.split(":")[0] == purpose
                )
            one |= split(loader, watch, case[0], case[2])
            one["first"] = float(turn == 0)
            every.append(one)
    out = []
    for every in found:
        typical = {k: statistics.median(o[k] for o in every[1:]) for k in every[0]}
        for name_ in ("sample bytes", "fetch bytes"):  # of the first epoch
            typical[name_] = every[0][name_]
        out.append(typical)
    return out


def owners_of(data: Data, size: int) -> torch.Tensor:
    """Returns the rank of each node."""
    part = cut(data.edge_index, data.num_nodes, size, "metis" if size > 1 else "block")
    return part.owner_of(torch.arange(data.num_nodes))


def cases_of(size: int, args: argparse.Namespace) -> list[tuple]:
    """Lists kinds, copies, places and bulks."""
    copies = [c for c in args.copies if size % c == 0]
    return [
        (kind, c, place, k)
        for kind in args.kinds
        for c in copies
        for place in args.places
        for k in args.bulks
    ]


def phases(args: argparse.Namespace) -> Iterator[str]:
    """Yields a table of phases for each number of ranks and sampler."""
    head = ["ranks", "c", "at", "k", "sampler", "s/epoch", "CPU s"]
    head += ["probab.", "sampling", "extract.", "fetch", "assemble", "propag."]
    head += ["MiB sampling", "MiB features"]
    for size, kind in product(args.ranks, args.kinds):
        cases = [case for case in cases_of(size, args) if case[0] == kind]
        every = pdc.launch(epochs, size, cases, args.file, args, threads=1)
        pairs = zip(cases, zip(*every, strict=True), strict=True)
        lines = [_phase_line(size, case, ranks) for case, ranks in pairs]
        yield format_table(head, lines)


def _phase_line(size: int, case: tuple, ranks: Sequence[dict]) -> tuple:
    kind, c, place, k = case
    got = [(int(r["sample bytes"]), int(r["fetch bytes"])) for r in ranks]
    mean = {k: statistics.mean(r[k] for r in ranks) for k in ranks[0]}
    return (
        *(size, c, place, f"k={k}", kind, max(r["s"] for r in ranks)),
        sum(r["work"] for r in ranks),
        *(mean[name] for name in PHASES),
        *(sum(part) / MIB for part in zip(*got, strict=True)),
    )


# Accuracy ---------------------------------------------------------------------------


def with_operator(data: Data) -> Data:
    """Returns the graph of A + I by the sums of its rows: what a layer estimates."""
    one = torch.ones(data.num_edges)
    edges, one = add_self_loops(data.edge_index, one, 1.0, data.num_nodes)
    total = scatter(one, edges[1], dim_size=data.num_nodes)
    out = data.clone()
    out.edge_index, out.edge_weight = edges, one / total[edges[1]]
    return out


def trained(
    file: str, kind: str, full: bool, seed: int, args: argparse.Namespace
) -> tuple[float, int]:
    """Runs on a rank: trains, and returns the accuracy on test nodes in %, and the steps."""
    mesh, data = pdc.init(), data_of(file)
    owners = owners_of(data, mesh.size)
    whole = data if kind == "sage" else with_operator(data)
    graph, share = (pdc.partition(g, mesh, owners) for g in (whole, data))
    net = model_of(kind, data, seed, args)
    model = pdc.replicate(net, mesh)
    torch.manual_seed(100 * seed + mesh.rank)
    opt, steps = torch.optim.Adam(net.parameters(), lr=0.01), 0
    options = loader_options(kind, args, mesh.size)
    options["options"] = LoaderOptions(seed=seed)
    weight = None if kind == "sage" else graph.edge_weight
    loader = None
    if not full:
        options["input_nodes"] = share.train_mask
        loader = loader_of(kind, share, options)
    for _ in range(args.epochs * (args.full_steps if full else 1)):
        net.train()
        if loader is None:
            opt.zero_grad()
            out = model(graph.x, graph.edge_index, weight)
            mask = graph.train_mask
            F.cross_entropy(out[mask], graph.y[mask]).backward()
            opt.step()
            steps += 1
            continue
        for batch in loader:
            opt.zero_grad()
            loss_of(model, batch, kind).backward()
            opt.step()
            steps += 1
    net.eval()
    with torch.no_grad():
        out = net(graph.x, graph.edge_index, weight)
        good = (out.argmax(-1) == graph.y)[graph.test_mask].sum()
        score = 100 * float(good / graph.test_mask.sum())
    if mesh.rank == 0:
        print(kind, "full" if full else "minibatches", seed, score, file=sys.stderr)
    return score, steps


def scores(
    ways: Sequence[tuple[str, bool]], args: argparse.Namespace
) -> list[list[tuple[float, int]]]:
    """Runs on a rank: trains each way once per seed."""
    return [
        [trained(args.file, kind, full, seed, args) for seed in range(args.seeds)]
        for kind, full in ways
    ]


def accuracy(args: argparse.Namespace) -> Iterator[str]:
    """Yields the table of accuracies."""
    lines = []
    ways = [(kind, full) for kind in args.kinds for full in (False, True)]
    ways = [way for way in ways if way != ("fastgcn", True)]  # LADIES' full graph
    every = pdc.launch(scores, args.trained_on, ways, args, threads=1)[0]
    for (kind, full), runs in zip(ways, every, strict=True):
        found, steps = [score for score, _ in runs], runs[0][1]
        spread = statistics.stdev(found) if len(found) > 1 else 0.0
        model = "GraphSAGE" if kind == "sage" else "GCN, rows of A + I"
        what = "full graph" if full else f"minibatches, {kind}"
        each = " ".join(f"{s:.2f}" for s in found)
        mean = f"{statistics.mean(found):.2f} +- {spread:.2f}"
        lines.append((args.graph, model, what, steps, mean, each))
    head = ("graph", "model", "trained on", "steps", "test accuracy, %", "seeds")
    yield format_table(head, lines)


def main() -> None:
    """Runs both and prints (or writes) the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--graph", default="Computers")
    parser.add_argument("--parts", nargs="+", default=["phases", "accuracy"])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--copies", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--places", nargs="+", default=["owner", "requester"])
    parser.add_argument("--bulks", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--fan-out", type=int, nargs="+", default=[10, 5])
    parser.add_argument("--nodes", type=int, default=1024, help="of a layer")
    parser.add_argument("--batch", type=int, default=256, help="seeds of a step")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument(
        "--full-steps", type=int, default=10, help="of the full graph, an epoch"
    )
    parser.add_argument(
        "--trained-on", type=int, default=2, help="ranks, for the accuracy"
    )
    parser.add_argument("--data", type=Path, default=real.SHARED, help="real graphs")
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the ranks, which start from here
    real.SHARED = args.data
    args.file = real.path(args.graph)
    args.classes = int(data_of(args.file).y.max()) + 1
    makers, tables = {"phases": phases, "accuracy": accuracy}, []
    for part in args.parts:
        for table in makers[part](args):
            print(table, end="\n\n", flush=True)
            tables.append(table)
    if args.write:
        text = "\n\n".join(tables)
        versions = f"torch {torch.__version__}, Python {platform.python_version()}"
        command = " ".join(["python benchmarks/training.py", *sys.argv[1:]])
        args.write.write_text(
            f"# Training on a partitioned graph\n\n`{command}`; {versions}; {os.cpu_count()} "
            f"cores.\n\n{from_text(text)}\n"
        )


if __name__ == "__main__":
    main()

"""Accuracy on graphs of the size of ogbn-arxiv and above: every way to train, in one table.

    python benchmarks/accuracy.py --json found.json            # 170,000 nodes; resumes
    python benchmarks/accuracy.py --graph communities-1000000-15000000 --seeds 1

Trains on graphs of `communities.py`, a share of the nodes labelled, and
prints test accuracy in the epoch of the best validation accuracy, by exact evaluation on
the whole graph. "MLP" sees no edges; the settings of `links.py` train a full-graph model on
--ranks ranks; "node-wise" and "LADIES" train by minibatches on one process. With --json
each way is kept as soon as it is done, and one that is there already is not trained again.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import links
import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GCN, MLP, GraphSAGE
from torch_geometric.utils import add_remaining_self_loops, scatter

import pyg_distcomm as pdc
from pyg_distcomm.comm.ledger import format_table
from pyg_distcomm.loader import DistLayerLoader, DistNeighborLoader, LoaderOptions

WAYS = (
    "MLP",
    "full",
    "none",
    "Sylvie, 1 bit, now",
    "Sylvie, 1 bit, late",
    "late",
    "VARCO, slope 1",
    "VARCO, slope 2",
    "VARCO, slope 5",
    "fixed 16",
    "node-wise",
    "LADIES",
)
BATCH = 1024
FAN_OUT, DRAWN = (10, 10, 5), (2048, 4096, 8192)


def averaged(data: Data) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the edges of A + I and their weights, one over the degree of the target."""
    edges, _ = add_remaining_self_loops(data.edge_index, num_nodes=data.num_nodes)
    one = torch.ones(edges.size(1))
    return edges, 1 / scatter(one, edges[1], dim_size=data.num_nodes)[edges[1]]


def alone(name: str, data: Data, args: argparse.Namespace, seed: int) -> float:
    """Trains one way on this process; returns its test accuracy in %."""
    torch.manual_seed(seed)
    sizes = (data.num_features, args.hidden, args.layers, int(data.y.max()) + 1)
    if name == "MLP":
        model: torch.nn.Module = MLP(
            [sizes[0], 4 * args.hidden, 4 * args.hidden, sizes[3]]
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
        train = data.train_mask

        def epoch() -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(data.x[train]), data.y[train]).backward()
            optimizer.step()

        return best(
            epoch, lambda: model.eval()(data.x), model, data, args.epochs, args.every
        )
    options: dict[str, Any] = {
        "input_nodes": data.train_mask,
        "batch_size": BATCH,
        "shuffle": True,
        "options": LoaderOptions(seed=seed),
    }
    if name == "node-wise":
        loader = DistNeighborLoader(data, list(FAN_OUT[: args.layers]), **options)
        model = pdc.convert(GraphSAGE(*sizes))
        edges, more = data.edge_index, {}
    elif name == "LADIES":
        loader = DistLayerLoader(data, list(DRAWN[: args.layers]), "ladies", **options)
        model = pdc.convert(GCN(*sizes, normalize=False, add_self_loops=False))
        edges, weight = averaged(data)
        more = {"edge_weight": weight}
    else:
        raise ValueError(f"no way to train is called {name!r}")
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    # evaluated as a share of one rank: by products, without a message for each edge
    whole = pdc.partition(Data(x=data.x, edge_index=edges, **more), pdc.init())

    def passes() -> None:
        for batch in loader:
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index, batch.get("edge_weight"))
            F.cross_entropy(
                out[: batch.batch_size], batch.y[: batch.batch_size]
            ).backward()
            optimizer.step()

    def output() -> torch.Tensor:
        model.eval()
        out = model(whole.x, whole.edge_index, whole.get("edge_weight"))
        return out.full_tensor()

    return best(passes, output, model, data, args.passes, 2)


def best(
    epoch: Callable[[], None],
    output: Callable[[], torch.Tensor],
    model: torch.nn.Module,
    data: Data,
    epochs: int,
    every: int,
) -> float:
    """Trains; returns the test accuracy where validation accuracy was best."""
    found = (-1.0, 0.0)
    for k in range(epochs):
        model.train()
        epoch()
        if k % every == every - 1:
            with torch.no_grad():
                hit = output().argmax(-1) == data.y
            masks = data.val_mask, data.test_mask
            found = max(found, tuple(float(hit[m].float().mean()) for m in masks))
            print(k + 1, *found, flush=True)
    return 100 * found[1]


def spread(
    name: str, args: argparse.Namespace, seed: int
) -> tuple[float, float, int, float]:
    """Runs on a rank: trains one setting of `links.py`; returns what its `train` does."""
    torch.set_num_threads(1)
    mesh = pdc.init()
    whole = links.graph(args.graph, args.root, args.features, args.labels)
    args.classes = int(whole.y.max()) + 1
    exact = pdc.partition(whole, mesh, args.method)
    data, link = copy.copy(exact), links.SETTINGS[name](args.epochs)
    if name == "none":
        owner = exact.edge_index.nodes.partition.owner.long()
        source, target = whole.edge_index
        whole.edge_index = whole.edge_index[:, owner[source] == owner[target]]
        data = pdc.partition(whole, mesh, owner)
    return links.train(data, exact, link, mesh, args, seed, False)


def run(name: str, args: argparse.Namespace, seed: int) -> list[float]:
    """Trains one way from one seed; returns accuracy in % and bytes."""
    if name in links.SETTINGS:
        accuracy, _, moved, _ = pdc.launch(
            spread, args.ranks, name, args, seed, threads=1
        )[0]
        return [accuracy, moved]
    data = links.graph(args.graph, args.root, args.features, args.labels)
    return [alone(name, data, args, seed), 0]


def report(found: dict[str, Any]) -> str:
    """Formats accuracies, their deviation over seeds, and bytes beside those of "full"."""
    rows = []
    full = found.get("full")
    for name in (name for name in WAYS if name in found):
        accuracy, moved = zip(*found[name].values(), strict=True)
        spread = statistics.stdev(accuracy) if len(accuracy) > 1 else float("nan")
        share = ""
        if name in links.SETTINGS and full and (whole := full["0"][1]):
            share = f"{100 * moved[0] / whole:.1f} %"
        mean = f"{statistics.mean(accuracy):.2f} +- {spread:.2f}"
        rows.append((name, len(accuracy), mean, share))
    return format_table(("way", "seeds", "test accuracy", "bytes, of full"), rows)


def main() -> None:
    """Trains what is missing, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graph", default="communities-170000-1200000")
    parser.add_argument("--root", default="data")
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--method", default="random")
    parser.add_argument("--model", choices=("sage", "gcn"), default="sage")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--labels", type=float, default=0.1, help="share of the nodes")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--passes", type=int, default=10, help="epochs of a sampler")
    parser.add_argument("--every", type=int, default=10, help="epochs per evaluation")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--settings", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument(
        "--json", type=Path, help="keep what is done, and go on from it"
    )
    args = parser.parse_args()
    kept = args.json is not None and args.json.exists()
    found = json.loads(args.json.read_text()) if kept else {}
    for seed, name in itertools.product(map(str, range(args.seeds)), args.settings):
        runs = found.setdefault(name, {})
        if seed not in runs:
            runs[seed] = run(name, args, int(seed))
        if args.json is not None:
            args.json.write_text(json.dumps(found))
    print(report(found))


if __name__ == "__main__":
    main()

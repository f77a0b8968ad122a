"""Accuracy of training by minibatches of a partitioned graph, beside one process and PyG.

    python benchmarks/sampling_accuracy.py                       # Computers, CS, Tolokers
    python benchmarks/sampling_accuracy.py --graphs Computers --models sage --seeds 1

"1 process" samples the whole graph with this package's loaders. On two ranks no rank samples
a graph that it holds, and a step takes as many seed nodes in all. "PyG" is one process with
PyG's own NeighborLoader, where pyg-lib or torch-sparse is installed.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
import torch.nn.functional as F
from communities import load
from torch_geometric import typing
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import GCN, GraphSAGE
from torch_geometric.transforms import RandomNodeSplit
from torch_geometric.utils import add_self_loops, scatter

import pyg_distcomm as pdc
from pyg_distcomm.comm.ledger import format_table
from pyg_distcomm.loader import DistLayerLoader, DistNeighborLoader, LoaderOptions

EPOCHS = {"Computers": 20, "CS": 6, "tolokers": 20}
PEER = typing.WITH_PYG_LIB or typing.WITH_TORCH_SPARSE
GIVEN = {"normalize": False, "add_self_loops": False}  # edges come with their weights


def graph(name: str, root: str) -> Data:
    """Returns a graph with features of unit length; a new split where it has none."""
    data = load(name, root)
    whole = Data(x=F.normalize(data.x, dim=1), y=data.y, edge_index=data.edge_index)
    torch.manual_seed(0)
    return RandomNodeSplit(num_val=0.2, num_test=0.5)(whole)


def with_operator(data: Data) -> Data:
    """Returns the graph whose edges are those of A + I, by the sums of its rows."""
    out = data.clone()
    edges, _ = add_self_loops(data.edge_index, num_nodes=data.num_nodes)
    one = torch.ones(edges.size(1))
    out.edge_index = edges
    out.edge_weight = 1 / scatter(one, edges[1], dim_size=data.num_nodes)[edges[1]]
    return out


def minibatches(kind: str, data: Data, seed: int, ranks: int, peer: bool) -> Any:
    """Returns a loader of 256 seeds a step, and as many nodes of a layer, on all ranks."""
    options = {"batch_size": 256 // ranks, "shuffle": True}
    if peer:  # draws by torch's generator
        return NeighborLoader(data, [5, 5], data.train_mask, **options)
    options["options"] = LoaderOptions(seed=seed)
    if kind == "sage":
        return DistNeighborLoader(data, [5, 5], data.train_mask, **options)
    drawn = [1024 // ranks] * 2
    return DistLayerLoader(data, drawn, input_nodes=data.train_mask, **options)


def run(name: str, root: str, kind: str, seed: int, peer: bool) -> dict[str, float]:
    """Trains on the ranks there are; returns scores on all test nodes, in per cent."""
    torch.set_num_threads(1)
    mesh, data = pdc.init(), graph(name, root)
    whole = data if kind == "sage" else with_operator(data)
    torch.manual_seed(seed)
    sizes = data.num_features, 64, 2, int(data.y.max()) + 1
    net: torch.nn.Module = GraphSAGE(*sizes, dropout=0.5)
    if kind == "ladies":
        net = GCN(*sizes, dropout=0.5, **GIVEN)
    if mesh.size > 1:
        data = pdc.partition(data, mesh, "ldg")
        owners = data.edge_index.nodes.partition
        whole = data if kind == "sage" else pdc.partition(whole, mesh, owners)
        net = pdc.convert(net)
    model = pdc.replicate(net, mesh)
    torch.manual_seed(100 * seed + mesh.rank)  # of dropout, apart on each rank
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    loader = minibatches(kind, data, seed, mesh.size, peer)
    for _ in range(EPOCHS.get(name, 6)):
        for batch in loader:
            optimizer.zero_grad()
            weight = () if kind == "sage" else (batch.edge_weight,)
            out = model(batch.x, batch.edge_index, *weight)[: batch.batch_size]
            loss = F.cross_entropy(out, batch.y[: batch.batch_size])
            (0 * loss if batch.get("padding", False) else loss).backward()
            optimizer.step()
    return scores(net.eval(), whole, () if kind == "sage" else (whole.edge_weight,))


@torch.no_grad()
def scores(net: torch.nn.Module, whole: Data, weight: tuple) -> dict[str, float]:
    """Returns the accuracy, and the area under ROC where there are two classes."""
    out = net(whole.x, whole.edge_index, *weight)
    out, y, mask = (
        t.full_tensor() if isinstance(t, pdc.DistTensor) else t
        for t in (out, whole.y, whole.test_mask)
    )
    out, y = out[mask], y[mask]
    found = {"accuracy": 100 * float((out.argmax(-1) == y).float().mean())}
    if out.size(1) == 2:
        from sklearn.metrics import roc_auc_score

        found["area"] = 100 * float(roc_auc_score(y, out.diff(dim=1)))
    return found


def main() -> None:
    """Trains each way from each seed, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", nargs="+", default=list(EPOCHS))
    parser.add_argument("--models", nargs="+", default=["sage", "ladies"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--root", default="data")
    args, rows = parser.parse_args(), []
    for name in args.graphs:
        for kind in args.models:
            ways = {"1 process": (1, False), "2 ranks": (2, False)}
            ways |= {"PyG": (1, True)} if PEER and kind == "sage" else {}
            for way, (ranks, peer) in ways.items():
                found = [
                    pdc.launch(run, ranks, name, args.root, kind, seed, peer)[0]
                    for seed in range(args.seeds)
                ]
                for what in found[0]:
                    every = [one[what] for one in found]
                    spread = statistics.stdev(every) if len(every) > 1 else float("nan")
                    mean = f"{statistics.mean(every):.2f} +- {spread:.2f}"
                    rows.append((name, kind, what, way, mean))
    print(format_table(("graph", "model", "figure", "way", "mean"), rows))


if __name__ == "__main__":
    main()

"""What LABOR's rules save at equal accuracy: distinct nodes of a minibatch, and accuracy.

    OMP_NUM_THREADS=1 python benchmarks/labor.py [--root data] [--epochs 5] [--seeds 3]
        [--out benchmarks/reports/labor.md]

GraphSAGE (mean, 64 hidden), as GraphConvs that add with weights, 1 / drawn in-edges. Fan-outs
[10, 10], 512 seeds per minibatch, features of unit length, on real graphs. "full graph" takes
all neighbours. Test accuracy on the full graph after the last epoch, mean and deviation over
seeds; of minibatches, means over all epochs.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import step
import torch
import torch.nn.functional as F
from tables import markdown
from torch_geometric.nn import GraphConv
from torch_geometric.utils import degree

from pyg_distcomm.comm.ledger import format_table
from pyg_distcomm.loader import LoaderOptions, NeighborLoader

WAYS: dict[str, dict[str, Any]] = {
    "neighbor": {"num_neighbors": [10, 10]},
    "labor": {"num_neighbors": [10, 10]},
    "full graph": {"num_neighbors": [-1, -1]},
}


class Sage(torch.nn.Module):
    """GraphSAGE whose mean over neighbours is a weighted sum."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = GraphConv(width, 64), GraphConv(64, classes)

    def forward(self, data: Any) -> Any:
        """Returns scores of classes."""
        edges = data.edge_index
        weight = 1 / degree(edges[1], data.num_nodes)[edges[1]]
        weight = weight.to(data.x.dtype)
        return self.second(self.first(data.x, edges, weight).relu(), edges, weight)


def train(
    data: Any, train_nodes: Any, test_nodes: Any, way: str, epochs: int, seed: int
) -> tuple[float, ...]:
    """Returns nodes and edges of a minibatch, and test accuracy in %."""
    torch.manual_seed(seed)
    loader = NeighborLoader(
        data,
        input_nodes=train_nodes,
        batch_size=512,
        shuffle=True,
        options=LoaderOptions(
            seed=seed, draws="labor" if way == "labor" else "neighbor"
        ),
        **WAYS[way],
    )
    model = Sage(data.num_features, int(data.y.max()) + 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    nodes, edges = [], []
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            out = model(batch)[: batch.batch_size]
            F.cross_entropy(out, batch.y[: batch.batch_size]).backward()
            optimizer.step()
            nodes.append(batch.num_nodes)
            edges.append(batch.num_edges)
    model.eval()
    with torch.no_grad():
        right = model(data).argmax(1) == data.y
    accuracy = 100 * float(right[test_nodes].float().mean())
    return statistics.mean(nodes), statistics.mean(edges), accuracy


def rows_of(name: str, root: Path, epochs: int, seeds: int) -> list[list[str]]:
    """Returns a row of the table for each way to sample one graph."""
    data = step.real(name, root)
    data.x, split = F.normalize(data.x), (data.train, data.test)
    del data.train, data.test
    rows, before = [], 0.0
    for way in WAYS:
        found = [train(data, *split, way, epochs, seed) for seed in range(seeds)]
        nodes, edges, accuracy = (list(column) for column in zip(*found, strict=True))
        mean = statistics.mean(nodes)
        before = before or mean
        rows.append(
            [
                f"{mean / before:.2f}",
                name,
                way,
                f"{mean:,.0f}",
                f"{statistics.mean(edges):,.0f}",
                f"{statistics.mean(accuracy):.2f} +- {statistics.stdev(accuracy):.2f}",
            ]
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Prints the table, and writes it to a file if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--graphs", nargs="+", default=["Photo", "tolokers"])
    parser.add_argument("--root", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    head = ["nodes, of neighbor's", "graph", "sampling", "nodes", "edges"]
    head.append("test accuracy, %")
    rows = [
        row
        for name in given.graphs
        for row in rows_of(name, given.root, given.epochs, given.seeds)
    ]
    print(format_table(head, rows))
    if given.out is not None:
        lines = [head, ["---"] * len(head), *rows]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
        given.out.write_text(
            "# LABOR: fewer nodes at equal accuracy\n\n"
            f"`OMP_NUM_THREADS=1 python benchmarks/labor.py --epochs {given.epochs} "
            f"--seeds {given.seeds}`\n\n{markdown(table)}"
        )


if __name__ == "__main__":
    main()

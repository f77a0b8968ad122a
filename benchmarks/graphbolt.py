"""GraphBolt on the problems of `sampling.py` and `step.py`, in an interpreter with DGL 2.1.

    python benchmarks/graphbolt.py --graph FILE --fan-out 15 10 5 [--train]

FILE holds x, edge_index and seed, as `sampling.py` writes it. Prints one line of JSON:
rows of (threads, workers, what was timed, seeds/s, edges/s), medians. GraphBolt draws
anew for all nodes at each hop, so it counts more edges for the same fan-outs.

With --train, FILE holds y as well: DGL's SAGEConv (mean) is trained on GraphBolt's
minibatches. Printed are medians of (loader s, step s, loader processor s, step processor
s), slowest over fastest epoch, and the last loss.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time

import dgl.graphbolt as gb
import torch
import torch.nn.functional as F
from dgl.nn import SAGEConv

BATCH = 1024


def graph(edge_index: torch.Tensor, n: int) -> gb.FusedCSCSamplingGraph:
    """Returns the in-edges of all nodes as GraphBolt keeps them."""
    target, order = torch.sort(edge_index[1], stable=True)
    indptr = torch.zeros(n + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(target, minlength=n), 0, out=indptr[1:])
    return gb.fused_csc_sampling_graph(indptr, edge_index[0][order])


def loader(stored: dict, csc, fan_out: list[int], workers: int, features: bool):
    """Builds a loader of minibatches, with or without features."""
    items = gb.ItemSet(stored["seed"], names="seed_nodes")
    # GraphBolt's fan-outs begin at the hop that is farthest from the seeds
    pipe = gb.ItemSampler(items, batch_size=BATCH)
    pipe = pipe.sample_neighbor(csc, fan_out[::-1])
    if features:
        feature = gb.TorchBasedFeature(stored["x"])
        store = gb.BasicFeatureStore({("node", None, "x"): feature})
        pipe = pipe.fetch_feature(store, node_feature_keys=["x"])
    return gb.DataLoader(pipe, num_workers=workers)


def epoch(batches) -> tuple[float, int]:
    """Returns the seconds of an epoch, and the edges it drew."""
    start, edges = time.perf_counter(), 0
    for batch in batches:
        edges += sum(hop.sampled_csc.indices.numel() for hop in batch.sampled_subgraphs)
    return time.perf_counter() - start, edges


class Model(torch.nn.Module):
    """GraphSAGE with the layers and widths of `step.Model`."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        pairs = itertools.pairwise(widths)
        self.convs = torch.nn.ModuleList(SAGEConv(f, g, "mean") for f, g in pairs)

    def forward(self, blocks, x):
        for k, (conv, block) in enumerate(zip(self.convs, blocks, strict=True)):
            x = conv(block, x)
            x = x.relu() if k + 1 < len(self.convs) else x
        return x


def clocks() -> torch.Tensor:
    """Returns seconds, and seconds that processors have worked for this process."""
    now = time.perf_counter(), time.process_time()
    return torch.tensor(now, dtype=torch.float64)


def train(stored: dict, csc, args: argparse.Namespace) -> list[float]:
    """Trains, and returns what `--train` prints."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(2)
    classes = int(stored["y"].max()) + 1
    depth = len(args.fan_out)
    model = Model([stored["x"].size(1), *[args.hidden] * (depth - 1), classes])
    opt = torch.optim.Adam(model.parameters(), lr=0.003)
    batches, times, losses = loader(stored, csc, args.fan_out, 0, True), [], []
    for k in range(args.rounds + 1):
        spent, losses = torch.zeros(2, 2, dtype=torch.float64), []
        at = clocks()
        for batch in batches:
            blocks, x = batch.blocks, batch.node_features["x"]
            y = stored["y"][batch.seed_nodes]
            now = clocks()
            spent[0] += now - at
            opt.zero_grad()
            loss = F.cross_entropy(model(blocks, x), y)
            loss.backward()
            opt.step()
            losses.append(loss.item())
            at = clocks()
            spent[1] += at - now
        if k:
            times.append(spent)
    every = torch.stack(times)
    whole = every.sum(1)[:, 0]
    medians = every.median(0).values.t().flatten().tolist()
    return [*medians, float(whole.max() / whole.min()), statistics.mean(losses)]


def main() -> None:
    """Times sampling alone and the whole loader."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--graph", required=True)
    parser.add_argument("--fan-out", type=int, nargs="+", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    stored = torch.load(args.graph)
    csc, rows = graph(stored["edge_index"], len(stored["x"])), []
    if args.train:
        print(json.dumps({"train": train(stored, csc, args)}))
        return
    for threads, workers, features in (
        (1, 0, False),
        (2, 0, False),
        (1, 0, True),
        (2, 0, True),
        (2, 2, True),
    ):
        torch.set_num_threads(threads)
        batches = loader(stored, csc, args.fan_out, workers, features)
        found = [epoch(batches) for _ in range(args.rounds + 1)][1:]
        took, edges = statistics.median(t for t, _ in found), found[-1][1]
        what = "loader" if features else "sampling"
        seeds = len(stored["seed"])
        rows.append((threads, workers, what, round(seeds / took), round(edges / took)))
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()

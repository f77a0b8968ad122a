"""GraphBolt on the problem of `sampling.py`, in an interpreter that has DGL 2.1.

    python benchmarks/graphbolt.py --graph FILE --fan-out 15 10 5

FILE holds x, edge_index and seed, as `sampling.py` writes it. Prints one line of JSON:
rows of (threads, workers, what was timed, seeds/s, edges/s), medians. GraphBolt draws
anew for all nodes at each hop, so it counts more edges for the same fan-outs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import dgl.graphbolt as gb
import torch

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


def main() -> None:
    """Times sampling alone and the whole loader."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--graph", required=True)
    parser.add_argument("--fan-out", type=int, nargs="+", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    stored = torch.load(args.graph)
    csc, rows = graph(stored["edge_index"], len(stored["x"])), []
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

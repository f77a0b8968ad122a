# torchrun --nproc-per-node 2 examples/ecosystem/metrics_and_profile.py
"""torchmetrics and OGB's Evaluator on row-sharded scores, and torch.profiler on an epoch.

A metric that keeps sums adds them up over the ranks, so each rank gives it its own rows. A
metric that keeps all its inputs (an exact AUROC) takes all rows on every rank, and no sum over
ranks. Given row-sharded tensors, a metric would add up values that are already sums.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torchmetrics
from torch.profiler import ProfilerActivity, profile
from torch_geometric.nn import GraphSAGE

import pyg_distcomm as pdc

sys.path.append(str(Path(__file__).parents[1]))  # examples/
from graphs import OGB, load_node_data, node_loss, node_score, num_outputs, ogb_score


def rows(x):
    """This rank's rows, as a plain tensor."""
    return x.detach().to_local()


def epoch(model, share, optimizer):
    optimizer.zero_grad()
    out = model(share.x, share.edge_index)
    loss = node_loss(out[share.train_mask], share.y[share.train_mask])
    loss.backward()
    optimizer.step()


@torch.no_grad()
def measure(model, share, dataset):
    """Returns scores of the test nodes by name, the same on all ranks."""
    out, y, mask = model(share.x, share.edge_index), share.y, share.test_mask
    classes = {"task": "multiclass", "num_classes": num_outputs(y)}
    scores, labels = out[mask].softmax(-1), y[mask]
    sums = torchmetrics.MetricCollection(
        {
            "accuracy": torchmetrics.Accuracy(average="micro", **classes),
            "macro F1": torchmetrics.F1Score(average="macro", **classes),
        }
    )
    if len(rows(labels)):  # a rank may have no test nodes
        sums.update(rows(scores), rows(labels))
    found = {name: float(value) for name, value in sums.compute().items()}
    exact = torchmetrics.AUROC(**classes, sync_on_compute=False)
    exact.update(scores.full_tensor(), labels.full_tensor())
    found["AUROC"] = float(exact.compute())
    found["node_score"] = node_score(out[mask], y[mask])
    if dataset in OGB:
        found["OGB's Evaluator"] = ogb_score(dataset, out[mask], y[mask])
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", default="generated-2000")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--trace", help="a file for the profile, as Chrome reads it")
    args = parser.parse_args()

    mesh = pdc.init()
    share = pdc.partition(load_node_data(args.dataset), mesh)
    torch.manual_seed(0)
    model = pdc.convert(GraphSAGE(share.num_features, 32, 2, num_outputs(share.y)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(args.epochs):
        epoch(model, share, optimizer)
    found = measure(model, share, args.dataset)
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        epoch(model, share, optimizer)
    if args.trace:
        prof.export_chrome_trace(f"{args.trace}.{mesh.rank}.json")  # one per rank
    if mesh.rank == 0:
        for name, value in found.items():
            print(f"{name:<16} {value:.4f}")
        print(prof.key_averages().table(sort_by="self_cpu_time_total", row_limit=8))


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()

# torchrun --nproc-per-node 2 examples/neighbor_loader.py
"""Minibatch training of GraphSAGE: PyG's script for one process, with two lines added."""

import argparse
import time

import torch
import torch.distributed as dist
from graphs import load_node_data, node_loss, node_score, num_outputs
from torch_geometric.nn import GraphSAGE

import pyg_distcomm as pdc
from pyg_distcomm.comm.ledger import format_table
from pyg_distcomm.loader import DistNeighborLoader as NeighborLoader
from pyg_distcomm.loader import LoaderOptions, shared


def train(model, loader, optimizer, device):
    """Trains one epoch; returns its mean loss, and how many seeds this rank had."""
    model.train()
    total, seeds = 0.0, 0
    for batch in loader:
        batch = batch.to(device)
        optimizer.zero_grad()
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        loss = node_loss(out, batch.y[: batch.batch_size])
        if getattr(batch, "padding", False):
            loss = 0 * loss  # a repeat, so that all ranks take equally many steps
        loss.backward()
        optimizer.step()
        total += float(loss.detach()) * batch.batch_size
        seeds += batch.batch_size
    return total / max(seeds, 1), seeds


@torch.no_grad()
def test(model, data, loader, device):
    """Evaluates layer by layer, all neighbours of all nodes."""
    model.eval()
    out, y = model.inference(loader, device), data.y
    return [node_score(out[m], y[m]) for m in (data.train_mask, data.test_mask)]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--device", help="cuda, or cuda:1; else as pdc.init chooses")
    args = parser.parse_args()

    mesh = pdc.init(device=args.device)
    torch.manual_seed(0)
    data = shared(
        lambda: load_node_data(args.dataset)
    )  # once per host, not once per rank
    loader = NeighborLoader(
        data,
        num_neighbors=[10, 5],
        input_nodes=data.train_mask,
        batch_size=args.batch_size,
        shuffle=True,
        options=LoaderOptions(seed=0),
    )
    # a loader of this rank's own: all nodes, in order
    whole = NeighborLoader(
        data, num_neighbors=[-1], batch_size=512, options=LoaderOptions(split=False)
    )

    model = GraphSAGE(data.num_features, 64, 2, num_outputs(data.y), dropout=0.3)
    replica = pdc.replicate(model.to(mesh.device), mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    rows = []
    for epoch in range(args.epochs):
        start = time.perf_counter()
        loss, seeds = train(replica, loader, optimizer, mesh.device)
        seconds = time.perf_counter() - start
        if mesh.rank == 0:
            accuracies = (f"{a:.4f}" for a in test(model, data, whole, mesh.device))
            rows.append((epoch, f"{loss:.4f}", *accuracies, seeds, f"{seconds:.3f}"))
    if mesh.rank == 0:
        print(f"{args.dataset}, {mesh.size} ranks, {len(loader)} batches each")
        head = ("epoch", "loss", "train", "test", "seeds of rank 0", "seconds")
        print(format_table(head, rows))


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()

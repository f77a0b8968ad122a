# torchrun --nproc-per-node 2 examples/partitioned_sampling.py
"""GraphSAGE with minibatches on a graph that no rank holds whole, evaluated exactly.

Each rank keeps its share of the edges and of the features. By default the ranks that own
the edges sample neighbours, rows are fetched from their owners, and every rank keeps hot rows.
"""

import argparse
import time

import torch
import torch.distributed as dist
from graphs import load_node_data, node_loss, node_score, num_outputs
from torch_geometric.nn import GraphSAGE

import pyg_distcomm as pdc
from pyg_distcomm.comm.axis import new_process_grid
from pyg_distcomm.comm.ledger import format_table
from pyg_distcomm.loader import (
    DistFeatureStore,
    DistNeighborLoader,
    LoaderOptions,
)


def train(model, loader, optimizer, device):
    """Trains one epoch: PyG's loop, but for the minibatches that are repeats."""
    model.train()
    for batch in loader:
        batch = batch.to(device)
        optimizer.zero_grad()
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        loss = node_loss(out, batch.y[: batch.batch_size])
        if getattr(batch, "padding", False):
            loss = 0 * loss  # a repeat, so that all ranks take equally many steps
        loss.backward()
        optimizer.step()


@torch.no_grad()
def test(model, share):
    """Evaluates on the whole graph, all neighbours of all nodes; all ranks together."""
    model.eval()
    out = model(share.x, share.edge_index)
    loss = node_loss(out[share.train_mask], share.y[share.train_mask])
    masks = share.train_mask, share.test_mask
    return [float(loss), *(node_score(out[mask], share.y[mask]) for mask in masks)]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--nodes", type=int, help="a generated graph of this size")
    parser.add_argument("--replication", type=int, default=1, help="copies of a block")
    parser.add_argument("--sample-at", default="owner", help="owner requester")
    parser.add_argument("--cache", type=float, default=0.1, help="share of hot nodes")
    parser.add_argument("--wire", help="how rows travel: fp16 bf16 int8")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--device", help="cuda, or cuda:1; else as pdc.init chooses")
    args = parser.parse_args()

    mesh = pdc.init(device=args.device)
    torch.manual_seed(0)
    name = f"generated-{args.nodes}" if args.nodes else args.dataset
    share = pdc.partition(load_node_data(name), mesh)  # the whole graph is let go
    share = share.to(mesh.device)
    sampling = {"num_neighbors": [10, 5], "batch_size": args.batch_size}
    features = DistFeatureStore.from_data(
        share,
        new_process_grid(mesh, args.replication),
        cache=args.cache,  # of the nodes that most others read
        wire=args.wire,
    )
    loader = DistNeighborLoader(
        share,
        input_nodes=share.train_mask,
        shuffle=True,
        options=LoaderOptions(seed=0, sample_at=args.sample_at, features=features),
        **sampling,
    )

    classes = num_outputs(share.y)  # over all nodes, as every reduction of a share
    # converted layers take minibatches as they did, and shares besides
    model = pdc.convert(GraphSAGE(share.num_features, 64, 2, classes, dropout=0.3))
    replica = pdc.replicate(model.to(mesh.device), mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    rows = []
    for epoch in range(args.epochs):
        mesh.ledger.reset()
        start = time.perf_counter()
        train(replica, loader, optimizer, mesh.device)
        seconds = time.perf_counter() - start
        sent = str(mesh.ledger)
        rows.append(
            (epoch, *(f"{v:.4f}" for v in test(model, share)), f"{seconds:.3f}")
        )
    if mesh.rank > 0:
        return
    here, whole = len(share.edge_index.nodes), share.num_nodes
    print(f"{name}, {mesh.size} ranks; rank 0 holds {here:,} of {whole:,} nodes")
    print(f"{len(loader)} batches a rank, loss and accuracies on the whole graph\n")
    print(format_table(("epoch", "loss", "train", "test", "seconds"), rows))
    print(f"\nThe last epoch, as rank 0 sees it:\n{loader.phases}\n\n{sent}")


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()

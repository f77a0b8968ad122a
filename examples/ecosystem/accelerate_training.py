# torchrun --nproc-per-node 2 examples/ecosystem/accelerate_training.py
"""Hugging Face accelerate on a graph that is spread over ranks: whole, or in minibatches.

`prepare` wraps a model in DDP, which is right for minibatches. On the whole graph gradients
are whole without it, so only the optimizer is prepared. Loaders are not prepared: they
already divide the seeds among the ranks.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch_geometric.nn import GraphSAGE

import pyg_distcomm as pdc
from pyg_distcomm.loader import DistNeighborLoader, LoaderOptions

sys.path.append(str(Path(__file__).parents[1]))  # examples/
from graphs import load_node_data, node_loss, node_score, num_outputs


def batches_of(share, args):
    """Yields what each step takes: the share itself, or minibatches."""
    if not args.minibatches:
        return [share]
    return DistNeighborLoader(
        share,
        num_neighbors=[10, 5],
        input_nodes=share.train_mask,
        batch_size=args.batch_size,
        shuffle=True,
        options=LoaderOptions(seed=0),
    )


def step(model, batch):
    out = model(batch.x, batch.edge_index)
    if "batch_size" not in batch:
        return node_loss(out[batch.train_mask], batch.y[batch.train_mask])
    seeds = slice(batch.batch_size)
    loss = node_loss(out[seeds], batch.y[seeds])
    # a repeat, so that all ranks take equally many steps, counts nothing
    return 0 * loss if getattr(batch, "padding", False) else loss


def fit(args):
    """Trains; returns the losses and the score on the test nodes."""
    # whichever comes first makes the process group, and the other one adopts it
    if args.accelerator_first:
        accelerator, mesh = Accelerator(cpu=True), pdc.init()
    else:
        mesh, accelerator = pdc.init(), Accelerator(cpu=True)
    share = pdc.partition(load_node_data(args.dataset), mesh)
    torch.manual_seed(0)
    plain = pdc.convert(GraphSAGE(share.num_features, 32, 2, num_outputs(share.y)))
    optimizer = accelerator.prepare(torch.optim.Adam(plain.parameters(), lr=0.01))
    model = accelerator.prepare(plain) if args.minibatches else plain
    batches, losses = batches_of(share, args), []
    for _ in range(args.epochs):
        for batch in batches:
            optimizer.zero_grad()
            loss = step(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            losses.append(float(loss.detach()))
    with torch.no_grad():
        out = accelerator.unwrap_model(model)(share.x, share.edge_index)
        return losses, node_score(out[share.test_mask], share.y[share.test_mask])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", default="generated-2000")
    parser.add_argument("--minibatches", action="store_true")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--accelerator-first", action="store_true")
    args = parser.parse_args()
    losses, score = fit(args)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(
            f"{args.dataset}: loss {losses[0]:.4f} to {losses[-1]:.4f}, test {score:.4f}"
        )


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()

# torchrun --nproc-per-node 2 examples/ecosystem/lightning_training.py
"""PyTorch Lightning on a graph that is spread over ranks: whole, or in minibatches.

The same LightningModule does both. Lightning's DDP would average gradients of the whole graph
a second time, so `OnShares` leaves the model as it is there. Minibatches are ordinary, and
use Lightning's own "ddp". `use_distributed_sampler=False`: loaders already divide the seeds.

The graph is partitioned in `setup`, where Lightning's ranks have met. So plain `python` works
as well as torchrun: with `--devices 2` Lightning starts the second rank itself.
"""

import argparse
import os
import sys
from pathlib import Path

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader
from torch_geometric.nn import GraphSAGE

import pyg_distcomm as pdc
from pyg_distcomm.loader import DistNeighborLoader, LoaderOptions

sys.path.append(str(Path(__file__).parents[1]))  # examples/
from graphs import load_node_data, node_loss, node_score, num_outputs


class OnShares(DDPStrategy):
    """Joins the ranks as DDP does, and leaves gradients to pyg_distcomm."""

    def configure_ddp(self):
        pass


class NodeClassifier(lightning.LightningModule):
    def __init__(self, in_channels, hidden, out_channels):
        super().__init__()
        self.model = pdc.convert(GraphSAGE(in_channels, hidden, 2, out_channels))
        self.seeds, self.losses = [], []

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return batch  # a share is where its rank is

    def training_step(self, batch, batch_idx):
        out = self.model(batch.x, batch.edge_index)
        if "batch_size" in batch:  # a minibatch: its seeds come first
            seeds = slice(batch.batch_size)
            loss = node_loss(out[seeds], batch.y[seeds])
            if getattr(batch, "padding", False):
                return 0 * loss  # a repeat, so that all ranks take equally many steps
            self.seeds += batch.input_id.tolist()
        else:
            loss = node_loss(out[batch.train_mask], batch.y[batch.train_mask])
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, share, batch_idx):
        out, mask = self.model(share.x, share.edge_index), share.val_mask
        # over all ranks already, so there is nothing for sync_dist
        score = node_score(out[mask], share.y[mask])
        self.log("val_score", score, batch_size=1, rank_zero_only=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Shares(lightning.LightningDataModule):
    """Gives each rank its share, whole or in minibatches."""

    def __init__(self, data, args):
        super().__init__()
        self.data, self.args = data, args

    def setup(self, stage):
        self.share = pdc.partition(self.data, pdc.init())  # adopts Lightning's ranks

    def train_dataloader(self):
        if not self.args.minibatches:
            return self.val_dataloader()  # an epoch is one step on the whole graph
        return DistNeighborLoader(
            self.share,
            num_neighbors=[10, 5],
            input_nodes=self.share.train_mask,
            batch_size=self.args.batch_size,
            shuffle=True,
            options=LoaderOptions(seed=0),
        )

    def val_dataloader(self):
        return DataLoader([self.share], batch_size=None)


def fit(args):
    data = load_node_data(args.dataset)
    torch.manual_seed(0)
    model = NodeClassifier(data.num_features, 32, num_outputs(data.y))
    strategy = "auto"
    if args.devices > 1:
        strategy = "ddp" if args.minibatches else OnShares()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=strategy,
        use_distributed_sampler=False,
        max_epochs=args.epochs,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, Shares(data, args))
    return model, float(trainer.callback_metrics.get("val_score", float("nan")))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", default="generated-2000")
    parser.add_argument("--minibatches", action="store_true")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=10)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))  # of torchrun
    parser.add_argument(
        "--devices", type=int, default=ranks, help="the number of ranks"
    )
    args = parser.parse_args()
    model, score = fit(args)
    if not dist.is_initialized() or dist.get_rank() == 0:
        first, last = model.losses[0], model.losses[-1]
        print(f"{args.dataset}: loss {first:.4f} to {last:.4f}, validation {score:.4f}")


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()

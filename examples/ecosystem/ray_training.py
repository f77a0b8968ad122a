# python examples/ecosystem/ray_training.py
"""Ray Train on a graph that is spread over its workers.

`TorchTrainer` starts the workers and makes their process group, which `pdc.init()` adopts.
Gradients of the whole graph need no wrapper, so `ray.train.torch.prepare_model` is left out.
For minibatches wrap the model by `pdc.replicate(model, mesh)`.
"""

import argparse
import tempfile
from pathlib import Path

import ray
import torch
import torch.nn.functional as F
from ray.train import Checkpoint, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch_geometric.nn import GraphSAGE

import pyg_distcomm as pdc
from pyg_distcomm.datasets import load_dataset


def train(config):
    """Runs on each worker."""
    mesh = pdc.init()  # adopts the group of Ray's workers
    share = pdc.partition(load_dataset(config["dataset"]), mesh)
    torch.manual_seed(0)
    model = pdc.convert(GraphSAGE(share.num_features, 32, 2, int(share.y.max()) + 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(config["epochs"]):
        optimizer.zero_grad()
        out = model(share.x, share.edge_index)
        loss = F.cross_entropy(out[share.train_mask], share.y[share.train_mask])
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            out = model(share.x, share.edge_index)
            hits = out.argmax(-1)[share.test_mask] == share.y[share.test_mask]
        found = {
            "loss": float(loss.detach()),
            "score": float(hits.float().mean()),
        }  # on all ranks
        with tempfile.TemporaryDirectory() as folder:
            if mesh.rank == 0:  # parameters are whole on every rank
                torch.save(model.state_dict(), Path(folder) / "model.pt")
            kept = Checkpoint.from_directory(folder) if mesh.rank == 0 else None
            ray.train.report(found, checkpoint=kept)


def fit(args):
    trainer = TorchTrainer(
        train,
        train_loop_config={"dataset": args.dataset, "epochs": args.epochs},
        torch_config=TorchConfig(backend="gloo"),  # leave it out on GPUs
        scaling_config=ScalingConfig(num_workers=args.workers),
    )
    return trainer.fit().metrics


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", default="generated-2000")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    found = fit(args)
    print(f"{args.dataset}: loss {found['loss']:.4f}, test {found['score']:.4f}")


if __name__ == "__main__":
    main()

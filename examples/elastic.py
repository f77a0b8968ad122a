# torchrun --nproc-per-node 2 --max-restarts 3 examples/elastic.py
"""A run that resumes from its last checkpoint when a host or a rank dies.

The graph is cut once, into a folder that all hosts read, and all ranks save a checkpoint
every few epochs. When a rank dies, torchrun restarts all of them, perhaps on fewer hosts, and
the run resumes from the last checkpoint: see docs/how-to/clusters.md.
"""

import argparse
import hashlib
import os
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F

import pyg_distcomm as pdc
from pyg_distcomm.cli import main as pyg_distcomm
from pyg_distcomm.nn import GCNConv


class GCN(torch.nn.Module):
    def __init__(self, in_channels, hidden, out_channels):
        super().__init__()
        self.conv1 = GCNConv(in_channels, hidden)
        self.conv2 = GCNConv(hidden, out_channels)

    def forward(self, x, edge_index):
        x = F.dropout(self.conv1(x, edge_index).relu(), 0.5, self.training)
        return self.conv2(x, edge_index)


def train(model, data, optimizer):
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def test(model, data):
    model.eval()
    hit = (model(data.x, data.edge_index).argmax(-1) == data.y)[data.test_mask]
    return float(hit.float().mean())


def prepare(args):
    """Cuts the graph, if that is not done yet. On a cluster, do it before the job."""
    if int(os.environ.get("RANK", "0")) == 0 and not args.parts.exists():
        size = args.cut or int(os.environ.get("WORLD_SIZE", "1"))
        words = ["partition", args.dataset, str(args.parts), "--parts", str(size)]
        if pyg_distcomm(words):
            raise SystemExit(1)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/elastic"))
    parser.add_argument(
        "--parts", type=Path, help="of the graph; FOLDER/parts if left out"
    )
    parser.add_argument("--dataset", default="digits", help="to be cut into --parts")
    parser.add_argument("--cut", type=int, help="into so many parts; one for each rank")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="epochs to a checkpoint")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds, of waits")
    parser.add_argument("--device", help="cuda, or cuda:1; else as pdc.init chooses")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds, each epoch")
    args = parser.parse_args()
    args.parts = args.parts or args.folder / "parts"
    args.folder.mkdir(parents=True, exist_ok=True)
    prepare(args)

    with pdc.init(timeout=args.timeout, device=args.device) as mesh:
        # ranks meet in init, so that the parts are there now
        data = pdc.load_partition(args.parts, mesh, merge=True).to(mesh.device)
        torch.manual_seed(0)
        model = GCN(data.num_features, args.hidden, int(data.y.max()) + 1)
        model = model.to(mesh.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

        last, begin = args.folder / "checkpoint", 0
        if last.exists():
            state = pdc.load_checkpoint(last, mesh, model, optimizer, epoch=0)
            begin = state["epoch"]

        def save():
            pdc.save_checkpoint(last, mesh, model, optimizer, epoch=epoch)

        epoch = begin
        preempted = pdc.on_preempt(save, mesh)
        run = pdc.metrics(args.folder, mesh, data=data)
        if mesh.rank == 0:
            print(f"{mesh.size} ranks begin at epoch {begin}", flush=True)
        while epoch < args.epochs:
            traced = run.trace() if epoch == begin + 2 else nullcontext()
            with traced, run.phase("train"):
                loss = train(model, data, optimizer)
            with run.phase("test"):
                accuracy = test(model, data)
            epoch += 1
            run.epoch(epoch, loss=loss, test_accuracy=accuracy)
            if epoch % args.every == 0 or epoch == args.epochs:
                save()
            preempted()
            time.sleep(args.pause)
        accuracy = test(model, data)
        if mesh.rank == 0:
            bits = torch.cat([p.detach().flatten() for p in model.parameters()])
            digest = hashlib.sha256(bits.cpu().numpy().tobytes()).hexdigest()[:16]
            print(f"{mesh.size} ranks ended at epoch {epoch}, accuracy {accuracy:.4f}")
            print(f"sha256 of the parameters {digest}", flush=True)


if __name__ == "__main__":
    main()

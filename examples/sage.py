# torchrun --nproc-per-node 2 examples/sage.py
"""GraphSAGE from a partition folder, with checkpoints: stop it, and start it again.

`pyg-distcomm partition digits FOLDER --parts P` writes the folder. A rank reads only its
own part. A checkpoint may be resumed on another number of ranks.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from graphs import load_node_data, node_loss, node_score, num_outputs

import pyg_distcomm as pdc
from pyg_distcomm.nn import DistSAGEConv as SAGEConv
from pyg_distcomm.partition.cutters import cut
from pyg_distcomm.partition.folder import write_folder


class SAGE(torch.nn.Module):
    def __init__(self, in_channels, hidden, out_channels):
        super().__init__()
        self.conv1 = SAGEConv(in_channels, hidden)
        self.norm = torch.nn.BatchNorm1d(hidden)
        self.conv2 = SAGEConv(hidden, out_channels)

    def forward(self, x, edge_index):
        x = self.norm(self.conv1(x, edge_index)).relu()
        x = F.dropout(x, p=0.5, training=self.training)
        return self.conv2(x, edge_index)


def train(model, data, optimizer):
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    loss = node_loss(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def test(model, data):
    model.eval()
    out = model(data.x, data.edge_index)
    masks = data.train_mask, data.val_mask, data.test_mask
    return [node_score(out[mask], data.y[mask]) for mask in masks]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", default="digits", help="where there is no folder")
    parser.add_argument("--folder", type=Path, help="a partition folder")
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/sage"))
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--every", type=int, default=20, help="epochs per checkpoint")
    parser.add_argument("--device", help="cuda, or cuda:1; else as pdc.init chooses")
    args = parser.parse_args()

    size = os.environ.get("WORLD_SIZE", "1")
    folder = args.folder or Path(f"runs/{Path(args.dataset).stem}-{size}-parts")
    if os.environ.get("RANK", "0") == "0" and not folder.exists():
        whole = load_node_data(args.dataset)
        edges, n, mask = whole.edge_index, whole.num_nodes, whole.train_mask
        print(write_folder(folder, whole, cut(edges, n, int(size), train_mask=mask)))
    mesh = pdc.init(device=args.device)  # others wait here, until the folder is written
    say = print if mesh.rank == 0 else lambda *_: None

    data = pdc.load_partition(folder, mesh).to(mesh.device)
    say(f"\nrank 0 reads {folder}/part_00000: {data}")
    torch.manual_seed(0)
    model = SAGE(data.num_features, 64, num_outputs(data.y)).to(mesh.device)
    model = pdc.replicate(model, mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    done = 0
    if args.checkpoint.exists():
        saved = pdc.load_checkpoint(args.checkpoint, mesh, model, optimizer, epoch=0)
        done = saved["epoch"]
        say(f"resumed {args.checkpoint} after epoch {done}")
    for epoch in range(done + 1, args.epochs + 1):
        loss = train(model, data, optimizer)
        if epoch % args.every == 0 or epoch == args.epochs:
            pdc.save_checkpoint(args.checkpoint, mesh, model, optimizer, epoch=epoch)
            accuracy = " ".join(f"{a:.4f}" for a in test(model, data))
            say(f"epoch {epoch:03d}  loss {loss:.6f}  train/val/test {accuracy}")


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()

# torchrun --nproc-per-node 2 examples/gcn.py
"""A 2-layer GCN on the whole graph: single-process PyG beside P ranks, same loop."""

import argparse
import time
from contextlib import nullcontext
from statistics import median

import torch
import torch.distributed as dist
import torch_geometric.nn
from graphs import load_node_data, node_loss, node_score, num_outputs

import pyg_distcomm as pdc
from pyg_distcomm.comm.ledger import format_table
from pyg_distcomm.nn import DistGCNConv


class GCN(torch.nn.Module):
    def __init__(self, conv, in_channels, hidden, out_channels):
        super().__init__()
        self.conv1 = conv(in_channels, hidden)
        self.conv2 = conv(hidden, out_channels)

    def forward(self, x, edge_index):
        x = self.conv1(x, edge_index).relu()
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
    return out, node_score(out[data.test_mask], data.y[data.test_mask])


def fit(model, data, epochs, say):
    """Trains; the same function for the whole Data and for a rank's share of it."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    seconds = []
    for epoch in range(1, epochs + 1):
        start = time.perf_counter()
        loss = train(model, data, optimizer)
        seconds.append(time.perf_counter() - start)
        if epoch % 50 == 0:
            say(f"  epoch {epoch:03d}  loss {loss:.4f}")
    out, accuracy = test(model, data)
    return out, accuracy, loss, median(seconds), optimizer


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--dataset", default="digits", help="digits, Cora, ogbn-arxiv, a path"
    )
    parser.add_argument("--nodes", type=int, help="a generated graph of this size")
    parser.add_argument("--algorithm", default="1d", help="1d 1.5d 2d 3d feature")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--single", action="store_true", help="float32, not float64")
    parser.add_argument("--trace", help="write a timeline of one epoch to this file")
    parser.add_argument("--device", help="cuda, or cuda:1; else as pdc.init chooses")
    args = parser.parse_args()
    # in float64 rounding stays small over hundreds of steps: what differs would be wrong
    torch.set_default_dtype(torch.float32 if args.single else torch.float64)

    mesh = pdc.init(args.algorithm, device=args.device)
    say = print if mesh.rank == 0 else lambda *_: None
    name = f"generated-{args.nodes}" if args.nodes else args.dataset
    whole = load_node_data(name)
    whole.x = whole.x.to(torch.get_default_dtype())
    sizes = whole.num_features, args.hidden, num_outputs(whole.y)

    say(f"{name}: {whole.num_nodes:,} nodes, {whole.num_edges:,} edges; {mesh}")
    whole = whole.to(mesh.device)
    data = pdc.partition(whole, mesh)
    torch.manual_seed(0)
    model = pdc.replicate(GCN(DistGCNConv, *sizes).to(mesh.device), mesh)
    out, accuracy, loss, seconds, optimizer = fit(model, data, args.epochs, say)
    out = out.full_tensor()

    mesh.ledger.reset()  # one more epoch, to see what one epoch sends
    with pdc.trace(args.trace, mesh) if args.trace else nullcontext():
        train(model, data, optimizer)
    say(f"\nOne epoch, as rank 0 sees it:\n{mesh.ledger}\n")
    ours = accuracy, loss, 1000 * seconds, mesh.ledger.bytes()
    # single-process PyG, on one thread and on as many as all ranks had
    if mesh.rank == 0:
        tries = []
        for threads in sorted({1, torch.get_num_threads() * mesh.size}):
            torch.set_num_threads(threads)
            torch.manual_seed(0)
            model = GCN(torch_geometric.nn.GCNConv, *sizes).to(mesh.device)
            tries.append((*fit(model, whole, args.epochs, lambda _: None), threads))
        want, accuracy, loss, seconds, _, threads = min(tries, key=lambda a: a[3])
        head = ("", "test accuracy", "last loss", "ms/epoch", "bytes/epoch")
        single = accuracy, loss, 1000 * seconds, 0
        rows = [
            (who, f"{a:.4f}", f"{x:.6f}", f"{s:.2f}", f"{b:,}")
            for who, (a, x, s, b) in (
                (f"PyG, 1 process, {threads} thread(s)", single),
                (f"pyg_distcomm, {mesh.size} ranks, {args.algorithm}", ours),
            )
        ]
        print(format_table(head, rows))
        print(f"largest difference of the outputs: {(out - want).abs().max():.1e}")


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()

# torchrun --nproc-per-node 4 examples/sylvie.py
"""A GCN whose rows travel in one bit, one epoch late, or both: Sylvie and PipeGCN.

By default the last exchange is exact, and so is evaluation. A checkpoint also saves the
messages that are under way, so a resumed run continues as if it had not stopped.
"""

import argparse
import time
from statistics import median

import torch
import torch.distributed as dist
from graphs import load_node_data, node_loss, node_score, num_outputs
from torch_geometric.nn import GCN

import pyg_distcomm as pdc
from pyg_distcomm.comm.ledger import format_table

SETTINGS = {
    "exact": lambda: None,
    "one bit, now": lambda: pdc.Sylvie(late=0),
    "one bit, late by 1": lambda: pdc.Sylvie(),
    "one bit, now every 5": lambda: pdc.Sylvie(sync_every=5),
    "one bit, the last too": lambda: pdc.Sylvie(exact_last=False),
    "PipeGCN": lambda: pdc.PipeGCN(),
}


def train(model, data, optimizer, link):
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    loss = node_loss(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    if link is not None:
        link.step()
    return loss.item()


@torch.no_grad()
def test(model, data):
    model.eval()
    out = model(data.x, data.edge_index)
    return node_score(out[data.test_mask], data.y[data.test_mask])


def begin(whole, mesh, owners, link, args):
    """Returns a share, and a model of three layers, the same each time."""
    data = pdc.partition(whole, mesh, owners, link=link)
    torch.manual_seed(0)
    classes = num_outputs(whole.y)
    model = GCN(whole.num_features, args.hidden, 3, classes)
    model = pdc.replicate(pdc.convert(model.to(mesh.device)), mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    return model, data, optimizer


def fit(whole, mesh, owners, link, args):
    """Trains; returns accuracy, bytes of rows in the last epoch, and seconds of one."""
    model, data, optimizer = begin(whole, mesh, owners, link, args)
    seconds = []
    for _ in range(args.epochs):
        mesh.ledger.reset()
        start = time.perf_counter()
        train(model, data, optimizer, link)
        seconds.append(time.perf_counter() - start)
    received = mesh.gather_ledger().sum.bytes(axis="row")
    return test(model, data), received, median(seconds)


def resume(whole, mesh, owners, args):
    """Stops a late run, and goes on twice; returns the loss of the next epoch in both."""
    link = pdc.Sylvie()
    model, data, optimizer = begin(whole, mesh, owners, link, args)
    for _ in range(args.epochs // 2):
        train(model, data, optimizer, link)
    pdc.save_checkpoint("runs/sylvie", mesh, model, optimizer, link=link)
    straight = train(model, data, optimizer, link)
    link = pdc.Sylvie()
    model, data, optimizer = begin(whole, mesh, owners, link, args)
    pdc.load_checkpoint("runs/sylvie", mesh, model, optimizer, link=link)
    return straight, train(model, data, optimizer, link)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", default="digits", help="or generated-5000, say")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--device", help="cuda, or cuda:1; else as pdc.init chooses")
    args = parser.parse_args()

    mesh = pdc.init(device=args.device)
    whole = load_node_data(args.dataset).to(mesh.device)
    owners = pdc.partition(whole, mesh, "random").edge_index.nodes.partition
    rows = []
    for setting, make in SETTINGS.items():
        link = make()
        accuracy, received, seconds = fit(whole, mesh, owners, link, args)
        exact = rows[0][1] if rows else received
        fewer = f"{exact / received:.2f}" if received else "-"
        figures = f"{accuracy:.4f}", fewer, f"{1000 * seconds:.2f}"
        rows.append((setting, received, *figures))
        if setting == "one bit, late by 1":
            said = f"{link}"
    straight, resumed = resume(whole, mesh, owners, args)
    if mesh.rank == 0:
        print(f"{args.dataset}, {mesh.size} ranks, {args.epochs} epochs")
        head = ("setting", "test accuracy", "bytes/epoch", "times fewer", "ms/epoch")
        print(format_table(head, [(s, a, f"{b:,}", *r) for s, b, a, *r in rows]))
        print(f"\nOne bit, late by 1, as rank 0 sees it:\n{said}")
        print(f"\nNext loss: straight on {straight:.6f}, resumed {resumed:.6f}")


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()

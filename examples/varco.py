# torchrun --nproc-per-node 4 examples/varco.py
"""GraphSAGE with fewer columns on the wire: exact, at fixed ratios, with VARCO and BNS.

All settings start from the same parameters on the same random partition. Pass a link to
`partition` and call `link.step()` once per epoch; the model and the loop stay as they are.
"""

import argparse

import torch
import torch.distributed as dist
from graphs import load_node_data, node_loss, node_score, num_outputs
from torch_geometric.nn import GraphSAGE

import pyg_distcomm as pdc
from pyg_distcomm.comm.ledger import format_table
from pyg_distcomm.halo.schedule import Fixed

# what carries rows, and sums back; whole blocks where nearly all rows are needed
ROWS = "halo", "halo_reduce", "all_gather", "reduce_scatter"


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
    model.eval()  # exact, whatever the link
    out = model(data.x, data.edge_index)
    return node_score(out[data.test_mask], data.y[data.test_mask])


def fit(whole, mesh, owners, link, args):
    """Trains; returns the accuracy, and bytes of rows that all ranks received."""
    data = pdc.partition(whole, mesh, owners, link=link)
    torch.manual_seed(args.seed)
    classes = num_outputs(whole.y)
    model = GraphSAGE(whole.num_features, args.hidden, args.layers, classes)
    model = pdc.replicate(pdc.convert(model.to(mesh.device)), mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    mesh.ledger.reset()
    for _ in range(args.epochs):
        train(model, data, optimizer)
        if link is not None:
            link.step()
    together = mesh.gather_ledger().sum  # of rows, and of gradients that answer them
    received = sum(together.bytes(op, "row") for op in ROWS)
    return test(model, data), received


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--nodes", type=int, help="a generated graph of this size")
    parser.add_argument("--cutter", default="random", help="metis ldg random block")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="cuda, or cuda:1; else as pdc.init chooses")
    args = parser.parse_args()

    mesh = pdc.init(device=args.device)
    name = f"generated-{args.nodes}" if args.nodes else args.dataset
    whole = load_node_data(name).to(mesh.device)
    owners = pdc.partition(whole, mesh, args.cutter).edge_index.nodes.partition
    rows = []

    def show(setting, link):
        accuracy, received = fit(whole, mesh, owners, link, args)
        exact = rows[0][1] if rows else received
        share = received / exact if exact else 1.0
        rows.append((setting, received, f"{accuracy:.4f}", f"{share:.3f}"))
        return link

    show("exact", None)
    for c in (2, 8, 32):
        schedule = Fixed(c)
        show(f"fixed, {c}", pdc.VARCO(args.epochs, schedule=schedule))
    show("BNS, a tenth of rows", pdc.BNS(0.1))
    show("VARCO, slope 5", pdc.VARCO(args.epochs))
    varco = show("VARCO, slope 1", pdc.VARCO(args.epochs, slope=1))
    first = pdc.VARCO(args.epochs, slope=1, mask="prefix")
    show("VARCO, slope 1, first columns", first)
    if mesh.rank == 0:
        print(f"{name}, {mesh.size} ranks, {args.epochs} epochs")
        head = ("setting", "test accuracy", "MB of rows", "share of exact")
        table = [(s, a, f"{b / 1e6:.3f}", share) for s, b, a, share in rows]
        print(format_table(head, table))
        print(f"\nThe link of VARCO, as rank 0 sees it:\n{varco}")


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()

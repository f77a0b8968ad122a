# torchrun --nproc-per-node 4 examples/grids.py
"""One GCN on every grid that P ranks allow: words predicted, and words counted.

A 2-layer GCN makes three or four products an epoch. `price` predicts the words of each before
anything is sent; the ledger counts the words that were sent.
"""

import argparse

import torch
import torch.distributed as dist
from graphs import load_node_data, node_loss, num_outputs
from torch_geometric.nn import GCN

import pyg_distcomm as pdc
from pyg_distcomm.comm.ledger import dense_words, format_table

HIDDEN = 16


def grids(size):
    """All (row, col, fiber) whose product is the number of ranks."""
    sides = [n for n in range(1, size + 1) if size % n == 0]
    return [
        (r, s, size // (r * s)) for r in sides for s in sides if size % (r * s) == 0
    ]


def widths_of(whole):
    """Widths of an epoch's products: forward, and transposed, in backward."""
    f, classes = whole.num_features, num_outputs(whole.y)
    # a layer makes (A X) W or A (X W), whichever moves less; x needs no gradient
    first = ([f], []) if f <= 2 * HIDDEN else ([HIDDEN], [HIDDEN])
    second = [min(HIDDEN, classes)]
    return first[0] + second, first[1] + second


def train(model, data, optimizer):
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    loss = node_loss(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    return loss.item()


def run(whole, mesh, cutter, oblivious, epochs):
    """Trains; returns words predicted and counted in one epoch, and the loss."""
    whole = whole.to(mesh.device)
    data = pdc.partition(whole, mesh, cutter, oblivious=oblivious)
    # the formula counts every product, also that with x, which is kept otherwise
    data.edge_index = data.edge_index.with_ordering(keep_inputs=False)
    torch.manual_seed(0)
    model = pdc.convert(GCN(whole.num_features, HIDDEN, 2, num_outputs(whole.y)))
    model = pdc.replicate(model.to(mesh.device), mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss = train(model, data, optimizer)  # plans, compiles
    mesh.ledger.reset()
    for _ in range(epochs):
        loss = train(model, data, optimizer)
    moved = sum(mesh.ledger.words(axis=axis) for axis in ("row", "col", "fiber"))
    a = data.edge_index.topology.sum_plan().matrix
    forward, backward = widths_of(whole)
    priced = sum(a.price(f).words for f in forward)
    priced += sum(a.transposed.price(f).words for f in backward)
    return priced, moved // epochs, loss


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--nodes", type=int, help="a generated graph of this size")
    parser.add_argument("--cutter", default="metis", help="metis ldg random block")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--device", help="cuda, or cuda:1; else as pdc.init chooses")
    args = parser.parse_args()

    whole = load_node_data(f"generated-{args.nodes}" if args.nodes else args.dataset)
    n, (forward, backward) = whole.num_nodes, widths_of(whole)
    size = pdc.init(device=args.device).size
    rows = []
    for grid in grids(size):
        mesh = pdc.init(grid=grid, device=args.device)
        bound = sum(dense_words(n, f, grid) for f in forward + backward)
        for oblivious in (True, False):
            cutter = "random" if oblivious else args.cutter
            priced, moved, loss = run(whole, mesh, cutter, oblivious, args.epochs)
            kind = "oblivious, random" if oblivious else f"sparse, {args.cutter}"
            name = " x ".join(map(str, grid))
            figures = round(bound), priced, moved
            rows.append((name, kind, *figures, f"{loss:.6f}"))
    if mesh.rank == 0:
        print(f"{n:,} nodes, {size} ranks; words that rank 0 receives in an epoch")
        head = ("grid", "exchange", "formula", "priced", "counted", "loss")
        print(format_table(head, rows))


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()

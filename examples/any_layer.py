# torchrun --nproc-per-node 2 examples/any_layer.py
"""Any PyG layer: `convert` for whole models, `HaloConv` for one layer."""

import argparse
import copy

import torch
import torch.distributed as dist
from graphs import load_node_data, node_loss, node_score, num_outputs
from torch_geometric.nn import GAT, GIN, TransformerConv

import pyg_distcomm as pdc
from pyg_distcomm.comm.ledger import format_table
from pyg_distcomm.nn import HaloConv


class Transformer(torch.nn.Module):
    """A model of one's own, of a layer that this package has never heard of."""

    def __init__(self, in_channels, hidden, out_channels):
        super().__init__()
        self.conv1 = TransformerConv(in_channels, hidden, heads=2, concat=False)
        self.conv2 = TransformerConv(hidden, out_channels)

    def forward(self, x, edge_index):
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)


def by_hand(model):
    """Wraps layer by layer, in place of `pdc.convert(model)`."""
    model.conv1, model.conv2 = HaloConv(model.conv1), HaloConv(model.conv2)
    return model


MODELS = {
    "GAT": (lambda f, k: GAT(f, 32, 2, k, heads=2), pdc.convert),
    "GATv2": (lambda f, k: GAT(f, 32, 2, k, v2=True), pdc.convert),
    "GIN": (lambda f, k: GIN(f, 32, 2, k), pdc.convert),
    "Transformer": (lambda f, k: Transformer(f, 32, k), by_hand),
}


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
    return node_score(out[data.test_mask], data.y[data.test_mask])


def fit(model, data, epochs):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    losses = [train(model, data, optimizer) for _ in range(epochs)]
    return losses[-1], test(model, data)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--device", help="cuda, or cuda:1; else as pdc.init chooses")
    args = parser.parse_args()
    torch.set_default_dtype(torch.float64)

    mesh = pdc.init(device=args.device)
    whole = load_node_data(args.dataset)
    whole.x = whole.x.double()
    whole = whole.to(mesh.device)
    data = pdc.partition(whole, mesh)
    fits = []
    for name, (make, distribute) in MODELS.items():
        torch.manual_seed(0)
        single = make(whole.num_features, num_outputs(whole.y)).to(mesh.device)
        model = pdc.replicate(distribute(copy.deepcopy(single)), mesh)
        mesh.ledger.reset()
        loss, accuracy = fit(model, data, args.epochs)
        sent = mesh.ledger.bytes() // args.epochs
        fits.append((name, single, loss, accuracy, sent))
    if mesh.rank == 0:  # PyG last, when no other rank waits for this one
        rows = []
        for name, single, loss, accuracy, sent in fits:
            want, _ = fit(single, whole, args.epochs)
            apart = abs(loss - want)
            figures = f"{want:.9f}", f"{loss:.9f}", f"{apart:.1e}", f"{accuracy:.4f}"
            rows.append((name, *figures, f"{sent:,}"))
        head = ("model", "loss of PyG", f"of {mesh.size} ranks", "difference")
        print(f"after {args.epochs} epochs on {args.dataset}, float64")
        print(format_table((*head, "accuracy", "bytes/epoch, rank 0"), rows))


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()

# torchrun --nproc-per-node 2 examples/ladies.py
"""LADIES or FastGCN beside neighbour sampling: accuracy, time, nodes of a minibatch.

Layer-wise sampling draws a fixed number of nodes for each layer, so a minibatch does not
grow with depth. It estimates rows of Ahat X, where Ahat is A + I with rows that sum to one.
"""

import argparse
import time
from statistics import mean, median

import torch
import torch.distributed as dist
from graphs import load_node_data, node_loss, node_score, num_outputs
from torch_geometric.nn import GCN, GraphSAGE
from torch_geometric.utils import add_self_loops, degree

import pyg_distcomm as pdc
from pyg_distcomm.comm.ledger import format_table
from pyg_distcomm.loader import DistLayerLoader, DistNeighborLoader, LoaderOptions


def with_operator(data):
    """Returns the graph with its loops, and the entries of Ahat on its edges."""
    out = data.clone()
    out.edge_index, _ = add_self_loops(data.edge_index, num_nodes=data.num_nodes)
    target = out.edge_index[1]
    out.edge_weight = 1 / degree(target, data.num_nodes)[target]
    return out


def train(model, loader, optimizer, device):
    """Trains one epoch; returns how many distinct nodes, and edges, each batch had."""
    model.train()
    sizes = []
    for batch in loader:
        batch = batch.to(device)
        optimizer.zero_grad()
        out = model(batch.x, batch.edge_index, batch.get("edge_weight"))
        seeds = slice(batch.batch_size)  # they come first
        loss = node_loss(out[seeds], batch.y[seeds])
        if getattr(batch, "padding", False):
            loss = 0 * loss  # a repeat, so that all ranks take equally many steps
        loss.backward()
        optimizer.step()
        sizes.append((len(batch.n_id.unique()), batch.num_edges))
    return sizes


@torch.no_grad()
def test(model, share):
    """Evaluates on the whole graph, which is spread over the ranks: nothing is sampled."""
    model.eval()
    out = model(share.x, share.edge_index, share.get("edge_weight"))
    return node_score(out[share.test_mask], share.y[share.test_mask])


def fit(model, loader, share, mesh, epochs):
    """Trains; returns accuracy, seconds of an epoch, nodes and edges of a minibatch."""
    model = pdc.convert(
        model.to(mesh.device)
    )  # takes minibatches as before, and shares besides
    replica = pdc.replicate(model, mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    seconds = []
    for epoch in range(epochs):
        loader.set_epoch(epoch)  # the same minibatches, whichever model takes them
        start = time.perf_counter()
        sizes = train(replica, loader, optimizer, mesh.device)
        seconds.append(time.perf_counter() - start)
    nodes, edges = (round(mean(size)) for size in zip(*sizes, strict=True))
    return f"{test(model, share):.4f}", f"{median(seconds):.3f}", nodes, edges


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--nodes", type=int, help="a generated graph of this size")
    parser.add_argument("--rule", default="ladies", help="ladies fastgcn")
    parser.add_argument("--weights", default="normalized", help="importance debiased")
    parser.add_argument("--per-layer", type=int, default=256, help="nodes to draw")
    parser.add_argument("--whole", action="store_true", help="no share is sampled")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--device", help="cuda, or cuda:1; else as pdc.init chooses")
    args = parser.parse_args()

    mesh = pdc.init(device=args.device)
    name = f"generated-{args.nodes}" if args.nodes else args.dataset
    whole = load_node_data(name)
    share = pdc.partition(whole, mesh).to(mesh.device)
    same = share.edge_index.nodes.partition
    operator = pdc.partition(with_operator(whole), mesh, same).to(mesh.device)
    data = whole if args.whole else share  # what is sampled from
    options = {"input_nodes": data.train_mask, "shuffle": True}
    options |= {"batch_size": args.batch_size, "options": LoaderOptions(seed=0)}
    drawn, fanout = [args.per_layer] * 2, [10, 5]
    layers = DistLayerLoader(data, drawn, args.rule, weights=args.weights, **options)
    neighbors = DistNeighborLoader(data, fanout, **options)

    sizes = whole.num_features, 64, 2, num_outputs(whole.y)
    given = {"normalize": False, "add_self_loops": False}  # its edges have weights
    rows = []
    for what, kind, loader, graph, how in (
        (f"{args.rule} {drawn}", GCN, layers, operator, given),
        (f"neighbours {fanout}", GCN, neighbors, share, {}),
        (f"neighbours {fanout}", GraphSAGE, neighbors, share, {}),
    ):
        torch.manual_seed(0)
        model = kind(*sizes, dropout=0.3, **how)
        found = fit(model, loader, graph, mesh, args.epochs)
        rows.append((what, kind.__name__, *found))
    if mesh.rank == 0:
        print(f"{name}, {mesh.size} ranks, {args.epochs} epochs; rank 0's minibatches")
        head = ("sampler", "model", "test accuracy", "s/epoch", "nodes", "edges")
        print(format_table(head, rows))


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()

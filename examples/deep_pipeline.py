# torchrun --nproc-per-node 4 examples/deep_pipeline.py
"""GCNII with 32 layers in stages: its schedule, and its bytes beside graph parallelism."""

import argparse
import time

import torch
import torch.distributed as dist
from graphs import load_node_data, node_loss, node_score, num_outputs
from torch_geometric.nn import GCN2Conv, Sequential

import pyg_distcomm as pdc
from pyg_distcomm.comm.ledger import format_table
from pyg_distcomm.pipeline.pipeline import hybrid_words


def gcnii(in_channels, hidden, out_channels, layers):
    """An ordinary model of PyG; x_0 goes from the first layer to all others."""
    torch.manual_seed(0)
    convs = [(torch.nn.Linear(in_channels, hidden), "x -> x")]
    convs += [(torch.nn.Identity(), "x -> x_0")]
    for k in range(1, layers + 1):
        conv = GCN2Conv(hidden, alpha=0.1, theta=0.5, layer=k)
        convs += [(conv, "x, x_0, edge_index -> x"), (torch.nn.ReLU(), "x -> x")]
    convs += [(torch.nn.Linear(hidden, out_channels), "x -> x")]
    return Sequential("x, edge_index", convs)


def loss_of(out, data):
    return node_loss(out[data.train_mask], data.y[data.train_mask])


def accuracy_of(out, data):
    return node_score(out[data.test_mask], data.y[data.test_mask])


def graph_parallel(whole, model, args):
    """The usual way: every layer on every rank, whose rows travel before each of them."""
    mesh = pdc.init(device=args.device)
    data = pdc.partition(whole, mesh)
    model = pdc.replicate(pdc.convert(model), mesh)
    opt = torch.optim.Adam(model.parameters(), lr=0.01)

    def train():
        opt.zero_grad()
        loss = loss_of(model(data.x, data.edge_index), data)
        loss.backward()
        opt.step()
        return loss

    def test():
        with torch.no_grad():
            return accuracy_of(model(data.x, data.edge_index), data)

    return mesh, data, train, test


def pipelined(whole, model, args):
    """The same loop; `train_step` is forward and backward."""
    mesh = pdc.init(stages=args.stages, device=args.device)
    data = pdc.partition(whole, mesh)
    pipe = pdc.Pipeline(model, mesh, chunks=args.chunks)
    opt = torch.optim.Adam(pipe.parameters(), lr=0.01)

    def train():
        opt.zero_grad()
        loss = pipe.train_step(data, loss_of)
        opt.step()
        return loss

    pipe.eval_step(data, accuracy_of)  # plans
    if mesh.everyone.rank == 0:
        between = f"{pipe.crossing:.1%} of the edges lie between chunks"
        print(f"{pipe.schedule}\nlayers of each stage: {pipe.balance}; {between}\n")
    return mesh, data, train, lambda: pipe.eval_step(data, accuracy_of)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--nodes", type=int, help="a generated graph of this size")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--stages", type=int, help="one per rank; fewer: the hybrid")
    parser.add_argument("--chunks", type=int, help="else as few as the bubble allows")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--device", help="cuda, or cuda:1; else as pdc.init chooses")
    args = parser.parse_args()
    world = pdc.init(device=args.device)
    size, args.stages = world.size, args.stages or world.size
    whole = load_node_data(f"generated-{args.nodes}" if args.nodes else args.dataset)
    whole = whole.to(world.device)
    n, d, classes = whole.num_nodes, args.hidden, num_outputs(whole.y)
    rows = []
    for way, stages in ((pipelined, args.stages), (graph_parallel, 1)):
        model = gcnii(whole.num_features, d, classes, args.layers).to(world.device)
        weights = sum(p.numel() for p in model.parameters())
        mesh, data, train, test = way(whole, model, args)
        start = time.perf_counter()
        losses = [train().item() for _ in range(args.epochs)]
        seconds = (time.perf_counter() - start) / args.epochs
        mesh.ledger.reset()  # one more epoch, to see what one sends
        train()
        counted = mesh.gather_ledger().sum
        # alpha: rows that a layer needs of other ranks of its stage, over all rows
        alpha = sum(pdc.partition_report(data).halo_rows) / n
        many = {"layers": args.layers, "replication": alpha, "weights": weights}
        words = hybrid_words(n, d, stages, size // stages, shared=1, **many)
        name = way.__name__.replace("_", " "), f"{stages} x {size // stages}"
        figures = f"{losses[-1]:.4f}", f"{test():.4f}", f"{1000 * seconds:.0f}"
        moved = f"{4 * words:,.0f}", f"{counted.bytes():,}"
        rows.append((*name, *figures, f"{alpha:.2f}", *moved))
    if world.rank == 0:
        print(f"{n:,} nodes, {size} ranks, {args.layers} layers of width {d}")
        head = ("way", "stages x rows", "loss", "test accuracy", "ms/epoch")
        print(format_table((*head, "alpha", "bytes, formula", "ledger"), rows))


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()

# torchrun --nproc-per-node 4 examples/lossy_links.py
"""Every lossy link beside single-process PyG, and beside sending nothing at all.

For each seed, all lines start from the same parameters on the same partition. *Sending nothing*
trains without the edges between ranks; like all lines, it is scored on the whole graph. A link
is worth the share of the distance between these two baselines that it keeps, for its bytes.
"""

import argparse
import copy
from statistics import mean, stdev

import torch
import torch.distributed as dist
from graphs import load_node_data, node_loss, node_score, num_outputs
from torch_geometric.nn import GCN, GraphSAGE

import pyg_distcomm as pdc
from pyg_distcomm.comm.ledger import format_table
from pyg_distcomm.halo.codecs import Cast, Quantise
from pyg_distcomm.halo.schedule import Fixed

LINKS = {
    "exact": lambda epochs: None,
    "bfloat16": lambda epochs: pdc.LinkPolicy(Cast(torch.bfloat16)),
    "8 bits": lambda epochs: pdc.LinkPolicy(Quantise(8, "stochastic")),
    "1 bit": lambda epochs: pdc.Sylvie(late=0),
    "1 bit, late (Sylvie)": lambda epochs: pdc.Sylvie(),
    "1 bit, now every 5": lambda epochs: pdc.Sylvie(sync_every=5),
    "1 bit, late after 1/3": lambda epochs: pdc.Sylvie(warmup=max(epochs // 3, 1)),
    "late (PipeGCN)": lambda epochs: pdc.PipeGCN(),
    "columns 1/8": lambda epochs: pdc.VARCO(epochs, schedule=Fixed(8)),
    "VARCO, slope 5": lambda epochs: pdc.VARCO(epochs, slope=5),
    "VARCO, slope 1": lambda epochs: pdc.VARCO(epochs, slope=1),
    "rows 1/10 (BNS)": lambda epochs: pdc.BNS(0.1),
}
ROWS = "halo", "halo_reduce", "all_gather", "reduce_scatter"


def fit(model, data, whole, args, mesh=None, link=None):
    """Trains on `data`; returns the score of `whole` in %, and bytes of rows in training."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    for _ in range(args.epochs):
        model.train()
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        node_loss(out[data.train_mask], data.y[data.train_mask]).backward()
        optimizer.step()
        if link is not None:
            link.step()
    moved = 0
    if mesh is not None:
        ledger = mesh.gather_ledger().sum
        moved = sum(ledger.bytes(op, "row") for op in ROWS)
    model.eval()
    with torch.no_grad():  # exact, whatever the link
        out = model(whole.x, whole.edge_index)
        score = node_score(out[whole.test_mask], whole.y[whole.test_mask])
    return 100 * score, moved


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", default="generated-2000")
    parser.add_argument("--cutter", default="random", help="metis ldg random block")
    parser.add_argument("--model", choices=("gcn", "sage"), default="gcn")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--dropout", type=float, default=0.5)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--device", help="cuda, or cuda:1; else as pdc.init chooses")
    args = parser.parse_args()

    mesh = pdc.init(device=args.device)
    whole = load_node_data(args.dataset).to(mesh.device)
    sizes = whole.num_features, args.hidden, args.layers, num_outputs(whole.y)

    def model(seed):
        torch.manual_seed(seed)
        kind = {"gcn": GCN, "sage": GraphSAGE}[args.model]
        return kind(*sizes, dropout=args.dropout).to(mesh.device)

    owner = pdc.partition(whole, mesh, args.cutter).edge_index.nodes.partition.owner
    source, target = owner.long().to(mesh.device)[whole.edge_index]
    alone = copy.copy(whole)
    alone.edge_index = whole.edge_index[:, source == target]
    share, lonely = (pdc.partition(d, mesh, owner) for d in (whole, alone))
    for data in (share, lonely):  # products of the features travel once, for all lines
        pdc.convert(model(0))(data.x, data.edge_index)
    seeds = range(args.seeds)
    rows = []
    for name, make in {"sending nothing": None, **LINKS}.items():
        runs = []
        for seed in seeds:
            link = make(args.epochs) if make else None
            data = copy.copy(share if make else lonely)
            data.edge_index = data.edge_index.with_link(link)
            mesh.ledger.reset()
            runs.append(fit(pdc.convert(model(seed)), data, share, args, mesh, link))
        scores, moved = zip(*runs, strict=True)
        rows.append((name, scores, sum(moved)))
    if mesh.rank > 0:
        return
    # last, when no other rank waits
    single = [fit(model(seed), whole, whole, args)[0] for seed in seeds]
    rows.insert(0, ("PyG, 1 process", single, 0))
    exact = {name: moved for name, _, moved in rows}["exact"] or 1
    table = []
    for name, scores, moved in rows:
        spread = f"{stdev(scores):.2f}" if len(scores) > 1 else "-"
        beside = (f"{mean(scores) - mean(rows[k][1]):+.2f}" for k in (0, 1))
        share_of = "-" if name == rows[0][0] else f"{moved / exact:.3f}"
        table.append((name, f"{mean(scores):.2f}", spread, *beside, share_of))
    setting = f"{mesh.size} ranks cut by {args.cutter}, {args.epochs} epochs"
    print(f"{args.dataset}, {setting}")
    head = ("link", "test score, %", "spread", "beside PyG", "beside nothing")
    print(format_table((*head, "bytes, of exact"), table))


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()

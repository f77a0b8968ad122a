"""Stacks of layers, and a pipeline that is computed by brute force."""

import copy

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import nn

from pyg_distcomm.pipeline.layer_stack import read_stack

WEIGHTED, ATTENTION = "x, edge_index, edge_weight -> x", nn.TransformerEncoderLayer


def gcn(f, c, h):
    inner = [pyg.GCNConv(h, h, cached=True), nn.ELU(), nn.LayerNorm(h)]
    return [pyg.GCNConv(f, h), nn.ReLU(), *inner, nn.Linear(h, h), pyg.GCNConv(h, c)]


def weighted(f, c, h):
    last = pyg.APPNP(2, 0.1)  # adds loops where there are none: a chunk may have one
    return [(pyg.GCNConv(f, h), WEIGHTED), nn.ReLU(), nn.Linear(h, c), (last, WEIGHTED)]


def sage(f, c, h):
    middle = pyg.SAGEConv(h, h, aggr="max")
    return [pyg.SAGEConv(f, h), nn.ReLU(), middle, nn.ReLU(), pyg.SAGEConv(h, c)]


def gat(f, c, h):
    return [pyg.GATConv(f, h // 2, heads=2), nn.ELU(), pyg.GATConv(h, c, heads=1)]


def gin(f, c, h):
    last = nn.Sequential(nn.Linear(h, h), nn.ReLU(), nn.Linear(h, c))
    first = nn.Sequential(nn.Linear(f, h), nn.ReLU(), nn.Linear(h, h))
    return [pyg.GINConv(first), nn.ReLU(), pyg.GINConv(last)]


def gcnii(f, c, h):
    layers = [(nn.Linear(f, h), "x -> x_0")]
    layers += [(pyg.GCN2Conv(h, 0.1, 0.5, 1), "x_0, x_0, edge_index -> x"), nn.ReLU()]
    for k in (2, 3):
        layers += [pyg.GCN2Conv(h, 0.1, 0.5, k), nn.ReLU()]
    return [*layers, nn.Linear(h, c)]


def resgcn(f, c, h):
    first = pyg.DeepGCNLayer(pyg.GENConv(h, h, norm=None), nn.LayerNorm(h), nn.ReLU())
    second = pyg.DeepGCNLayer(pyg.GCNConv(h, h), nn.LayerNorm(h), nn.ReLU())
    return [nn.Linear(f, h), first, second, nn.Linear(h, c)]


def jumping(f, c, h):
    return pyg.Sequential(
        "x, edge_index",
        [
            (pyg.GCNConv(f, h), "x, edge_index -> x1"),
            nn.ReLU(),
            (pyg.SAGEConv(h, h), "x1, edge_index -> x2"),
            nn.ReLU(),
            (lambda a, b: [a, b], "x1, x2 -> xs"),
            (pyg.JumpingKnowledge("cat"), "xs -> x"),
            (nn.Linear(2 * h, c), "x -> x"),
        ],
    )


def _of_pairs(kind, sizes, width, c, **how):
    """A layer on sequences, one of each node."""
    pair = lambda x: torch.stack([x, -x], 1), "x -> x"
    total = lambda out: (out[0] if type(out) is tuple else out).sum(1), "x -> x"
    return [pair, kind(*sizes, batch_first=True, **how), total, nn.Linear(width, c)]


STACKS = {
    f.__name__: f for f in (weighted, gcn, sage, gat, gin, gcnii, resgcn, jumping)
}
SINGLE = {  # with degrees, exchanges and tensors of edges of their own
    "SGConv": lambda f, c, h: [pyg.SGConv(f, c, K=2)],
    "ARMAConv": lambda f, c, h: [pyg.ARMAConv(f, c, 2, 2)],
    "TAGConv": lambda f, c, h: [pyg.TAGConv(f, c)],
    "EdgeConv": lambda f, c, h: [pyg.EdgeConv(nn.Linear(2 * f, c))],
    "GatedGraphConv": lambda f, c, h: [pyg.GatedGraphConv(f, 2)],
    "TransformerConv": lambda f, c, h: [pyg.TransformerConv(f, c)],
    "LSTM": lambda f, c, h: _of_pairs(nn.LSTM, (f, h), 4, c, proj_size=4),
    "GRU": lambda f, c, h: _of_pairs(nn.GRU, (f, h, 2), 2 * h, c, bidirectional=True),
    "Attention": lambda f, c, h: _of_pairs(ATTENTION, (f, f, h, 0.0), f, c),
    # without edges it reads neither their attributes nor weights
    "GATConv": lambda f, c, h: [
        (pyg.GATConv(f, c, edge_dim=1, add_self_loops=False), WEIGHTED)
    ],
}


def stack_of(name, f=7, c=4, h=8, seed=0, dropout=0.0):
    """Layers in float64, weights from a seed."""
    torch.manual_seed(seed)
    made = {**STACKS, **SINGLE}[name](f, c, h)
    if dropout:
        made = list(made)
        made.insert(2, nn.Dropout(dropout))
        made.insert(-1, nn.Dropout(dropout))
    if isinstance(made, nn.Module):
        return made.double()
    pairs = [item if isinstance(item, tuple) else (item, None) for item in made]
    pairs = [(m.double() if isinstance(m, nn.Module) else m, h) for m, h in pairs]
    return [m if header is None else (m, header) for m, header in pairs]


def trained(pipe, share, optimizer, epochs=3):
    """The losses of some epochs."""
    losses = []
    for _ in range(epochs):
        optimizer.zero_grad()
        losses.append(float(pipe.train_step(share, loss_of)))
        optimizer.step()
    return losses


def loss_of(out, data):
    return F.cross_entropy(out[data.train_mask], data.y[data.train_mask])


def run_plain(stack, data):
    """Output, loss and gradients of PyG's own layers, one after the other."""
    layers = read_stack(copy.deepcopy(stack))
    known = data.to_dict()
    for layer in layers:
        known[layer.writes[0]] = layer.run(*(known[name] for name in layer.reads))
    out = known[layers[-1].writes[0]]
    loss = loss_of(out, data)
    owners = [la.run for la in layers if isinstance(la.run, nn.Module)]
    weights = [p for m in owners for p in m.parameters()]
    return out.detach(), loss.detach(), torch.autograd.grad(loss, weights)


class _View(torch.autograd.Function):
    """What chunk c sees: fresh rows, or old ones, which are constant."""

    @staticmethod
    def forward(ctx, x, old, fresh, own, cross):
        ctx.save_for_backward(fresh, own)
        ctx.cross = cross
        return torch.where(fresh, x, old)

    @staticmethod
    def backward(ctx, g):
        fresh, own = ctx.saved_tensors
        known = torch.where(own, g, ctx.cross * g)
        return torch.where(fresh, known, 0), *[None] * 4


class BruteForce:
    """Training with history: PyG's layers on what each chunk sees, old rows being constant.

    Gradients of other chunks count `cross` times.
    """

    def __init__(self, stack, data, chunk, refresh=1, cross=1.0):
        self.layers = read_stack(copy.deepcopy(stack))
        self.data, self.chunk, self.chunks = data, chunk, int(chunk.max()) + 1
        self.refresh, self.cross = refresh, cross
        self.history, self.epoch = {}, 0
        self._forward(lambda place, x: [x] * self.chunks, keep=True)
        owners = [la.run for la in self.layers if isinstance(la.run, nn.Module)]
        self.parameters = [p for m in owners for p in m.parameters()]

    def _forward(self, views, keep):
        known, fresh = {"x": self.data.x, "edge_index": self.data.edge_index}, {}
        for place, layer in enumerate(self.layers):
            x, *rest = (known[name] for name in layer.reads)
            if "edge_index" in layer.reads:
                run, x = exchanged(layer.run, x)
                fresh[place] = x.detach()
                x = sum(
                    torch.where(self._rows_of(c), run(view, *rest), 0)
                    for c, view in enumerate(views(place, x))
                )
            else:
                x = layer.run(x, *rest)
            known[layer.writes[0]] = x
        if keep:
            self.history = fresh
        return known[self.layers[-1].writes[0]]

    def _rows_of(self, c):
        return (self.chunk == c).unsqueeze(1)

    def step(self, order):
        """One epoch; returns the loss, with gradients in the parameters."""
        turn = torch.tensor(order).argsort()
        late = turn[self.chunk].unsqueeze(1)

        def views(place, x):
            old = self.history[place]
            return [_View.apply(x, old, late <= t, late == t, self.cross) for t in turn]

        self.epoch += 1
        out = self._forward(views, keep=self.epoch % self.refresh == 0)
        loss = loss_of(out, self.data)
        for p in self.parameters:
            p.grad = None
        loss.backward()
        return loss.detach()


def exchanged(layer, x):
    """The rows that a layer reads of neighbours, and what it does with them.

    A pyg.GCNConv that narrows its rows multiplies by its weight before.
    """
    if not isinstance(layer, pyg.GCNConv) or layer.in_channels <= layer.out_channels:
        return layer, x
    rest = copy.copy(layer)
    rest._modules = {**layer._modules, "lin": nn.Identity()}
    return rest, layer.lin(x)


def without_loss(ledger, what="words"):
    """What a ledger counts of a pipeline, without the sums and plans of the script's loss."""
    count = getattr(ledger, what)
    return count() - count("all_reduce", "world") - count("plan", "control")

"""Stacks of layers, and a pipeline computed by brute force on dense matrices."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import (
    APPNP,
    DeepGCNLayer,
    GATConv,
    GCN2Conv,
    GCNConv,
    GENConv,
    GINConv,
    JumpingKnowledge,
    SAGEConv,
    Sequential,
)

from pyg_distcomm.pipeline.layer_stack import read_stack


def _mlp(f, h):
    return nn.Sequential(nn.Linear(f, h), nn.ReLU(), nn.Linear(h, h))


def gcn(f, c, h):
    inner = [GCNConv(h, h), nn.ELU(), nn.LayerNorm(h)]
    return [GCNConv(f, h), nn.ReLU(), *inner, nn.Linear(h, h), GCNConv(h, c)]


def weighted(f, c, h):
    header = "x, edge_index, edge_weight -> x"
    last = APPNP(2, 0.1)  # adds loops where there are none: a chunk may have one
    return [(GCNConv(f, h), header), nn.ReLU(), nn.Linear(h, c), (last, header)]


def sage(f, c, h):
    middle = SAGEConv(h, h, aggr="max")
    return [SAGEConv(f, h), nn.ReLU(), middle, nn.ReLU(), SAGEConv(h, c)]


def gat(f, c, h):
    return [GATConv(f, h // 2, heads=2), nn.ELU(), GATConv(h, c, heads=1)]


def gin(f, c, h):
    last = nn.Sequential(nn.Linear(h, h), nn.ReLU(), nn.Linear(h, c))
    return [GINConv(_mlp(f, h)), nn.ReLU(), GINConv(last)]


def gcnii(f, c, h):
    layers = [(nn.Linear(f, h), "x -> x_0")]
    layers += [(GCN2Conv(h, 0.1, 0.5, 1), "x_0, x_0, edge_index -> x"), nn.ReLU()]
    for k in (2, 3):
        layers += [GCN2Conv(h, 0.1, 0.5, k), nn.ReLU()]
    return [*layers, nn.Linear(h, c)]


def resgcn(f, c, h):
    first = DeepGCNLayer(GENConv(h, h, norm=None), nn.LayerNorm(h), nn.ReLU())
    second = DeepGCNLayer(GCNConv(h, h), nn.LayerNorm(h), nn.ReLU())
    return [nn.Linear(f, h), first, second, nn.Linear(h, c)]


def jumping(f, c, h):
    return Sequential(
        "x, edge_index",
        [
            (GCNConv(f, h), "x, edge_index -> x1"),
            nn.ReLU(),
            (SAGEConv(h, h), "x1, edge_index -> x2"),
            nn.ReLU(),
            (lambda a, b: [a, b], "x1, x2 -> xs"),
            (JumpingKnowledge("cat"), "xs -> x"),
            (nn.Linear(2 * h, c), "x -> x"),
        ],
    )


STACKS = {
    f.__name__: f for f in (weighted, gcn, sage, gat, gin, gcnii, resgcn, jumping)
}


def stack_of(name, f=7, c=4, h=8, seed=0, dropout=0.0):
    """Layers in float64, weights from a seed."""
    torch.manual_seed(seed)
    made = STACKS[name](f, c, h)
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
    known = {"x": data.x, "edge_index": data.edge_index}
    known["edge_weight"] = data.edge_weight
    for layer in layers:
        known[layer.writes[0]] = layer.run(*(known[name] for name in layer.reads))
    out = known[layers[-1].writes[0]]
    loss = loss_of(out, data)
    owners = [la.run for la in layers if isinstance(la.run, nn.Module)]
    weights = [p for m in owners for p in m.parameters()]
    return out.detach(), loss.detach(), torch.autograd.grad(loss, weights)


class Dense:
    """A model of dense matrices, whose every read of a neighbour can be intercepted.

    `read(x)` returns `[chunks of targets]` matrices of all rows: what targets of a chunk
    see. It is called at the same places, with the same rows, as the pipeline exchanges.
    """

    def __init__(self, data, chunk):
        n, (source, target) = data.num_nodes, data.edge_index
        one = torch.ones(source.numel(), dtype=torch.float64)
        self.adj = torch.zeros(n, n, dtype=torch.float64)
        self.adj.index_put_((target, source), one, accumulate=True)
        loops = self.adj.diagonal().clone()
        # the loop that is there, or one: PyG keeps the weight of the last of several
        norm = self.adj - torch.diag(loops) + torch.eye(n, dtype=torch.float64)
        scale = norm.sum(1).pow(-0.5)
        self.norm = scale[:, None] * norm * scale
        degree = self.adj.sum(1, keepdim=True).clamp(min=1)
        self.mean = self.adj / degree
        self.chunk, self.data = chunk, data

    def times(self, matrix, views):
        rows = [matrix[self.chunk == c] @ view for c, view in enumerate(views)]
        return self._together(rows)

    def _together(self, rows):
        out = rows[0].new_zeros(len(self.chunk), rows[0].size(1))
        for c, part in enumerate(rows):
            out = out.index_add(0, (self.chunk == c).nonzero().flatten(), part)
        return out

    def layer(self, module, read, x, *rest):
        if isinstance(module, GCNConv):
            w, b = module.lin.weight, module.bias
            if module.in_channels <= module.out_channels:
                return self.times(self.norm, read(x)) @ w.t() + b
            return self.times(self.norm, read(x @ w.t())) + b
        if isinstance(module, SAGEConv):
            assert module.in_channels <= module.out_channels
            mean = self.times(self.mean, read(x))
            return module.lin_l(mean) + module.lin_r(x)
        if isinstance(module, GCN2Conv):
            h = 0.9 * self.times(self.norm, read(x)) + 0.1 * rest[0]
            return (1 - module.beta) * h + module.beta * (h @ module.weight1)
        if isinstance(module, GATConv):
            return self._attention(module, read, x)
        return module(x, *rest)

    def _attention(self, module, read, x):
        n, heads, width = len(x), module.heads, module.out_channels
        near = ((x @ module.lin.weight.t()).view(n, heads, width) * module.att_dst).sum(
            -1
        )
        counts = self.adj - torch.diag(self.adj.diagonal()) + torch.eye(n)
        parts = []
        for c, view in enumerate(read(x)):  # it is the input that is exchanged
            mine = self.chunk == c
            values = (view @ module.lin.weight.t()).view(n, heads, width)
            scores = (values * module.att_src).sum(-1)
            e = F.leaky_relu(near[mine].unsqueeze(1) + scores.unsqueeze(0), 0.2)
            weight = e.exp() * counts[mine].unsqueeze(-1)
            weight = weight / weight.sum(1, keepdim=True)
            parts.append(torch.einsum("ijh,jhf->ihf", weight, values).flatten(1))
        return self._together(parts) + module.bias


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
    """Training with history, as autograd of the forward with history detached.

    Gradients of other chunks count `cross` times.
    """

    def __init__(self, stack, data, chunk, refresh=1, cross=1.0):
        self.cross = cross
        self.layers = read_stack(copy.deepcopy(stack))
        self.dense, self.chunk = Dense(data, chunk), chunk
        self.chunks, self.refresh = int(chunk.max()) + 1, refresh
        self.history, self.epoch, self.data = {}, 0, data
        self._forward(lambda key, x: [x] * self.chunks, keep=True)
        owners = [la.run for la in self.layers if isinstance(la.run, nn.Module)]
        self.parameters = [p for m in owners for p in m.parameters()]

    def _forward(self, views, keep):
        known = {"x": self.data.x, "edge_index": None}
        fresh = {}
        for place, layer in enumerate(self.layers):
            count = 0

            def read(x, place=place):
                nonlocal count
                count += 1
                fresh[place, count] = x.detach()
                return views((place, count), x)

            inputs = [known[name] for name in layer.reads if name != "edge_index"]
            known[layer.writes[0]] = self.dense.layer(layer.run, read, *inputs)
        if keep:
            self.history = fresh
        return known[self.layers[-1].writes[0]]

    def step(self, order):
        """One epoch; returns the loss, with gradients in the parameters."""
        turn = torch.empty(self.chunks, dtype=torch.long)
        turn[torch.tensor(order)] = torch.arange(self.chunks)

        def views(key, x):
            old = self.history[key]
            late = turn[self.chunk].unsqueeze(1)
            return [
                _View.apply(x, old, late <= turn[c], late == turn[c], self.cross)
                for c in range(self.chunks)
            ]

        self.epoch += 1
        out = self._forward(views, keep=self.epoch % self.refresh == 0)
        loss = loss_of(out, self.data)
        for p in self.parameters:
            p.grad = None
        loss.backward()
        return loss.detach()


def without_loss(ledger, what="words"):
    """What a ledger counts of a pipeline, without the sums and plans of the script's loss."""
    count = getattr(ledger, what)
    return count() - count("all_reduce", "world") - count("plan", "control")

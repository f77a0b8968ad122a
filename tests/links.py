"""Links, and a network that trains by them, for the tests."""

import itertools

import torch
import torch.nn.functional as F
import worlds
from problems import GRAPHS, owners

import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives
from pyg_distcomm.halo.codecs import Cast, Chain, ColumnMask, Plain, Quantise, RowSample
from pyg_distcomm.halo.policy import LinkPolicy
from pyg_distcomm.halo.schedule import Fixed, Linear
from pyg_distcomm.nn import DistGCNConv

WIDTHS = (7, 6, 5, 4)
ONE = Quantise(1, "stochastic")
OPS = ("halo", "halo_reduce", "all_gather", "reduce_scatter")


class Net(torch.nn.Module):
    def __init__(self, layer=DistGCNConv, widths=WIDTHS, **options):
        super().__init__()
        pairs = itertools.pairwise(widths)
        self.layers = torch.nn.ModuleList(layer(a, b, **options) for a, b in pairs)

    def forward(self, x, edge_index, *args):
        for layer in self.layers[:-1]:
            x = layer(x, edge_index, *args).relu()
        return self.layers[-1](x, edge_index, *args)


class Dropping(Net):
    """Drops of its input too, which only an evaluation sees as it is."""

    def forward(self, x, edge_index):
        for k, layer in enumerate(self.layers):
            x = F.dropout(x.relu() if k else x, 0.5, self.training)
            x = layer(x, edge_index)
        return x


def build(
    grid, link, cutter="random", graph="undirected", layer=DistGCNConv, keep=False
):
    """A mesh, a share and a network, the same each time."""
    mesh = worlds.mesh(grid=grid)
    data = GRAPHS[graph]()
    share = pdc.partition(data, mesh, owners(cutter, data, mesh.size), link=link)
    share.edge_index = share.edge_index.with_ordering("first", keep_inputs=keep)
    torch.manual_seed(1)
    return mesh, share, Net(layer).double()


def epoch(net, share, *args):
    """One forward and backward pass: output, gradients of parameters, and of x."""
    net.zero_grad()
    x = share.x.clone().requires_grad_()
    out = net(x, share.edge_index, *args)
    out.square().sum().backward()
    mesh = share.edge_index.nodes.mesh
    gradients = [collectives.all_reduce(p.grad, mesh.world) for p in net.parameters()]
    return [out.to_local().detach(), x.grad.to_local(), *gradients]


def moved(mesh):
    exchanged = sum(mesh.ledger.bytes(op) for op in OPS)
    return exchanged + mesh.ledger.bytes("all_reduce", "data")


LINKS = {
    "one bit": lambda: LinkPolicy(ONE),
    "late": lambda: LinkPolicy(Plain(), late=1),
    "late by 2 and 1": lambda: LinkPolicy(ONE, late=2, late_gradients=1),
    "varco": lambda: pdc.VARCO(6, c_max=7, slope=2),
    "varco late": lambda: LinkPolicy(ColumnMask(4), Linear(6, 6, slope=1), late=2),
    "varco rows": lambda: LinkPolicy(RowSample(4.0), Linear(6, 5), exact_last=False),
    "chain": lambda: LinkPolicy(Chain(ColumnMask(2), ONE), Fixed(3), late=1),
    "sylvie": lambda: pdc.Sylvie(2, sync_every=2, exact_last=False),
    "pipegcn": lambda: pdc.PipeGCN(0.9),
    "bns": lambda: pdc.BNS(0.3),
    "cast": lambda: LinkPolicy(Cast(torch.bfloat16), late=1),
    "masked": lambda: LinkPolicy(ColumnMask(3), late=1),
    "adaptive": lambda: pdc.Sylvie(adaptive=True),
}

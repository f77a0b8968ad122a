"""Links beside their definition: every rank's messages in one process, output and gradients."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import tiers
import torch
import worlds
from links import ONE
from problems import GRAPHS, owners

import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives
from pyg_distcomm.halo.codecs import (
    Chain,
    ColumnMask,
    Plain,
    Quantise,
    RangeBits,
)
from pyg_distcomm.halo.policy import LinkPolicy
from pyg_distcomm.halo.staleness import Drift
from pyg_distcomm.nn import DistGCNConv

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # links.py is here, too

from emulated_ranks import EmulatedGCN, EmulatedLink, EmulatedRanks

WIDTHS = [7, 8, 8, 4]
LINKS = {
    "one bit": lambda: LinkPolicy(ONE),
    "smooth rows": lambda: pdc.PipeGCN(0.9, 0.0),
    "smooth gradients": lambda: LinkPolicy(Plain(), late=1, smooth_gradients=0.8),
    "smooth apart": lambda: LinkPolicy(ONE, late=2, smooth=0.5, smooth_gradients=0.9),
    "warm-up": lambda: LinkPolicy(ONE, late=1, warmup=3),
    "prompt gradients": lambda: pdc.PipeGCN(late_gradients=0, exact_last=False),
    "prompt rows": lambda: LinkPolicy(ONE, late=0, late_gradients=2),
    "every 3": lambda: LinkPolicy(Plain(), late=2, sync_every=3, smooth=0.5, warmup=2),
    "sync": lambda: LinkPolicy(Plain(), late=3, sync_every=4),
    "by degree": lambda: pdc.Sylvie(by_degree=True, exact_last=False),
    "by degree, now": lambda: pdc.Sylvie(2, late=0, by_degree=True),
    "by degree, adaptive": lambda: pdc.Sylvie(by_degree=True, adaptive=True),
    "by range": lambda: LinkPolicy(RangeBits(2.5), late=1),
    "by range, all": lambda: LinkPolicy(RangeBits(1.5), exact_last=False),
    "mask by range": lambda: LinkPolicy(Chain(ColumnMask(2), RangeBits(3.0))),
    "skipped": lambda: pdc.SANCUS(0.2, 3, exact_last=False),
    "skipped, one bit": lambda: pdc.SANCUS(0.3, 2, bits=1),
    "skipped rows": lambda: pdc.SANCUS(0.2, gradients=0.0),
    "skipped, masked": lambda: LinkPolicy(ColumnMask(3), skip=Drift(0.3, 2, 0.5)),
    "skipped, four bits": lambda: LinkPolicy(
        Quantise(4, "stochastic"), skip=Drift(0.2), sync_every=4
    ),
    "varco": lambda: pdc.VARCO(9, c_max=8, slope=1),
}
TRAINED = ("halo", "halo_reduce")
CUTTERS = ("random", "empty_rank", "lopsided")


def real(name, size, graph, cutter, epochs):
    """Outputs, gradients and bytes of each epoch, and whether bytes are as foretold."""
    mesh = worlds.mesh()
    data, link = GRAPHS[graph](), LINKS[name]()
    share = pdc.partition(data, mesh, owners(cutter, data, size), link=link)
    edges = share.edge_index.with_halo("rows").with_ordering(keep_inputs=False)
    torch.manual_seed(3)
    pairs = itertools.pairwise(WIDTHS)
    layers = torch.nn.ModuleList(DistGCNConv(a, b) for a, b in pairs).double()
    found = []
    for t in range(epochs):
        before = {op: mesh.ledger.bytes(op) for op in TRAINED}
        asked = mesh.ledger.bytes("all_reduce", "row")
        x = start = (share.x * wave(t)).requires_grad_()
        for number, layer in enumerate(layers):
            x = layer(x.relu() if number else x, edges)
        layers.zero_grad()
        x.square().sum().backward()
        grads = [p.grad.clone() for p in layers.parameters()]
        moved = sum(mesh.ledger.bytes(op) - before[op] for op in TRAINED)
        asked = mesh.ledger.bytes("all_reduce", "row") - asked
        price = link.price()
        if t:  # the first product plans, and sends degrees
            assert moved <= price.forward + price.backward
            assert moved == price.forward + price.backward or not price.exact
            assert asked <= price.agreement
            link.drain()
            assert link.held == price.kept, (t, link.held, price.kept)
        link.step(10.0 - t**0.5)
        mine = mesh.rank == 0
        out, grad = x.full_tensor().detach(), start.grad.full_tensor()
        grads = [grad, *grads]
        found.append((grads if mine else [], out, moved))
    return found


def wave(t):
    """Inputs that change fast at first, and then hardly."""
    return 1.0 + 1.0 / (1 + t) ** 2


def emulated(name, size, graph, cutter, epochs):
    mesh = worlds.mesh()
    data, link = GRAPHS[graph](), LINKS[name]()
    share = pdc.partition(data, mesh, owners(cutter, data, size))
    owner = share.edge_index.nodes.partition.owner.long()
    ranks = EmulatedRanks.cut(data.edge_index, owner, size, torch.float64)
    torch.manual_seed(3)
    net = EmulatedGCN(WIDTHS, keep=False).double()
    made, found = EmulatedLink(ranks, link, len(WIDTHS) - 2), []
    for t in range(epochs):
        before = made.bytes
        x = (data.x * wave(t)).requires_grad_()
        out = net(x, ranks, made)
        net.zero_grad()
        out.square().sum().backward()
        grads = [p.grad.clone() for p in net.parameters()]
        made.step(10.0 - t**0.5)
        found.append(([x.grad, *grads], out.detach(), made.bytes - before))
    return found, made.skipped


def same(name, size, graph, cutter, epochs):
    got = real(name, size, graph, cutter, epochs)
    want, skipped = emulated(name, size, graph, cutter, epochs)
    assert (skipped > 0) == ("skipped" in name) or size == 1
    mesh = worlds.mesh()
    for t, (one, other) in enumerate(zip(got, want, strict=True)):
        for a, b in zip([*one[0], one[1]], [*other[0], other[1]], strict=False):
            if mesh.rank == 0:
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=f"epoch {t}")
        moved = collectives.all_gather_object(one[2], mesh.world)
        assert t == 0 or sum(moved) == other[2], (t, moved, other[2])


CASES = [
    (name, size, ("undirected", "directed")[(k + size) % 2], CUTTERS[(k + size) % 3])
    for k, name in enumerate(LINKS)
    for size in (3, 2, 4, 1)
]
OFTEN = {"smooth apart": 3, "every 3": 3, "skipped, one bit": 2, "sync": 2}
DEFAULT = [case for case in CASES if OFTEN.get(case[0]) == case[1]]


@tiers.parametrize(("name", "size", "graph", "cutter"), CASES, DEFAULT)
def test_links_are_as_defined(name, size, graph, cutter):
    worlds.run(same, size, name, size, graph, cutter, 9)

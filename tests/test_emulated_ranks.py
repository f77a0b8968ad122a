"""Links beside their definition: every rank's messages in one process, output and gradients."""

import sys
from pathlib import Path

import alike
import tiers
import torch
import worlds
from links import ONE, Net
from problems import GRAPHS, owners

import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives
from pyg_distcomm.halo.codecs import Chain, ColumnMask, Plain, Quantise, RangeBits
from pyg_distcomm.halo.policy import LinkPolicy
from pyg_distcomm.halo.staleness import Drift

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
CUTTERS = ("random", "empty_rank", "lopsided")


CASES = [
    (name, size, ("undirected", "directed")[(k + size) % 2], CUTTERS[(k + size) % 3])
    for k, name in enumerate(LINKS)
    for size in (3, 2, 4, 1)
]
OFTEN = {"smooth apart": 3, "every 3": 3, "skipped, one bit": 2, "sync": 2}
DEFAULT = [case for case in CASES if OFTEN.get(case[0]) == case[1]]


@tiers.parametrize(("name", "size", "graph", "cutter"), CASES, DEFAULT)
@worlds.on()
def test_links_are_as_defined(name, size, graph, cutter):
    mesh, data = worlds.mesh(), GRAPHS[graph]()
    link, same = LINKS[name](), LINKS[name]()
    share = pdc.partition(data, mesh, owners(cutter, data, size), link=link)
    edges = share.edge_index.with_halo("rows").with_ordering(keep_inputs=False)
    torch.manual_seed(3)
    ours = Net(widths=WIDTHS).double()
    torch.manual_seed(3)
    net = EmulatedGCN(WIDTHS, keep=False).double()
    owner = share.edge_index.nodes.partition.owner.long()
    ranks = EmulatedRanks.cut(data.edge_index, owner, size, torch.float64)
    emulated = EmulatedLink(ranks, same, len(WIDTHS) - 2)
    for t in range(9):
        wave = 1.0 + 1.0 / (1 + t) ** 2  # inputs change fast at first, and then hardly
        mesh.ledger.reset()
        got = alike.learnt(ours, share.x * wave, edges)
        moved = sum(mesh.ledger.bytes(op) for op in ("halo", "halo_reduce"))
        asked, price = mesh.ledger.bytes("all_reduce", "row"), link.price()
        if t:  # the first product plans, and sends degrees
            assert moved <= price.forward + price.backward
            assert moved == price.forward + price.backward or not price.exact
            assert asked <= price.agreement
            link.drain()
            assert link.held == price.kept, (t, link.held, price.kept)
        link.step(10.0 - t**0.5)
        got, before = alike.whole(got), emulated.bytes
        want = alike.learnt(net, data.x * wave, ranks, emulated)
        emulated.step(10.0 - t**0.5)
        if mesh.rank == 0:
            alike.same(got, want, f"epoch {t}")
        moved = sum(collectives.all_gather_object(moved, mesh.world))
        assert t == 0 or moved == emulated.bytes - before, t
    assert (emulated.skipped > 0) == ("skipped" in name) or size == 1

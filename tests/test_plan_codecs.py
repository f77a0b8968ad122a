"""The planner's codecs: bytes of an epoch over a link as the ledger counts them."""

from __future__ import annotations

import pytest
import tiers
import torch
import torch.nn.functional as F
import worlds
from problems import GRAPHS, grids, owners
from test_plan import LAYERS, stack

import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives
from pyg_distcomm.graph.topology import MultiplyOrder
from pyg_distcomm.halo.codecs import (
    Cast,
    Chain,
    ColumnMask,
    Quantise,
    RowSample,
)
from pyg_distcomm.halo.policy import LinkPolicy

WIDTHS = (7, 6, 5, 4)
ONE = Quantise(1, "stochastic")
LINKS = {
    "1 bit": lambda: LinkPolicy(ONE),
    "4 bits late": lambda: LinkPolicy(Quantise(4, "stochastic"), late=1),
    "bf16": lambda: LinkPolicy(Cast(torch.bfloat16)),
    "mask": lambda: LinkPolicy(ColumnMask(2), exact_last=False),
    "rows": lambda: LinkPolicy(RowSample(3.0), late=2, late_gradients=1),
    "chain": lambda: LinkPolicy(Chain(ColumnMask(2), ONE), late=1),
    "switching": lambda: LinkPolicy(ONE, late=1, sync_every=2),
}


def same_as_ledger(grid, graph, cutter, layer, name, order, keep, halo):
    """Checks the fourth epoch of training over a link, and what the link keeps after it."""
    mesh, data = worlds.mesh(grid=grid), GRAPHS[graph]()
    link, same = LINKS[name](), LINKS[name]()
    owner = owners(cutter, data, mesh.size)
    how = {"partition": owner, "layers": layer, "dtype": torch.float64, "grid": grid}
    how |= {"halo": halo, "ordering": MultiplyOrder(order, keep)}
    plans = pdc.plan(data, WIDTHS, mesh.size, codecs=[same], **how)
    one, plain = plans.of(grid, link=same), plans.of(grid, codec="plain")
    share = pdc.partition(data, mesh, owner, link=link)
    edges = share.edge_index.with_halo(halo).with_ordering(order, keep_inputs=keep)
    torch.manual_seed(0)
    model = pdc.replicate(stack(LAYERS[layer], WIDTHS), mesh)
    for _ in range(4):
        mesh.ledger.reset()
        model.zero_grad()
        out = model(share.x, edges)
        F.cross_entropy(out, share.y % out.size(1)).backward()
        link.drain()
        counted = mesh.ledger.bytes()
        messages = mesh.ledger.messages() - mesh.ledger.messages("all_reduce")
        link.step()
    assert counted == one.bytes_by_rank[mesh.rank], (name, one)
    assert not one.exact
    found = collectives.all_gather_object((messages, link.held), mesh.world)
    messages, held = zip(*found, strict=True)
    assert max(messages) == one.messages
    assert min(held) <= one.memory - plain.memory <= max(held), name


CASES = [
    tiers.rarely(1, "undirected", "block", "gcn"),
    tiers.rarely(2, "directed", "random", "sage"),
    (3, "loops_and_copies", "empty_rank", "gcn"),
    tiers.rarely(4, "directed", "lopsided", "gcn"),
    tiers.rarely(6, "isolated", "random", "sage"),
    tiers.rarely(8, "undirected", "random", "gcn"),
]
SWITCHES = [("first", True, "auto"), ("auto", False, "rows"), ("last", True, "blocks")]


@pytest.mark.parametrize(("size", "graph", "cutter", "layer"), CASES)
@worlds.on()
def test_bytes_of_a_link_are_those_of_the_ledger(size, graph, cutter, layer):
    for number, grid in enumerate(grids(size)):
        for k, name in enumerate(list(LINKS)[number :: len(grids(size))]):
            ways = SWITCHES[(k + number) % 3]
            same_as_ledger(grid, graph, cutter, layer, name, *ways)


@pytest.mark.exhaustive
def test_what_is_asked_for_is_read_and_mistakes_are_named():
    graph, names = pdc.RandomGraph(10**6, 10**7), [ONE, "bf16"]
    for halo in ("rows", "blocks"):
        how = {"ranks": 64, "halo": halo, "grid": (64, 1, 1)}
        plans = pdc.plan(graph, [64, 64, 64, 8], codecs=names, **how)
        assert plans[0].orders == ("kept", "first", "last")
        whole = plans.of((64, 1, 1), codec="plain").exchange_bytes
        last = pdc.plan(graph, [64, 8], inputs="changing", **how)
        assert last[0].orders == ("last",)
        last = last[0].exchange_bytes
        coded = plans.of((64, 1, 1), codec="1 bit").exchange_bytes
        # two of 64 floats become 64 bits and four bytes; the last exchange is exact
        assert coded - last == pytest.approx((whole - last) * 12 / 256, rel=1e-3)
    with pytest.raises(ValueError, match="'3 bits' is not known"):
        pdc.plan(graph, [8, 8], 4, codecs=["3 bits"])
    with pytest.raises(TypeError, match="codec must be a Codec"):
        pdc.plan(graph, [8, 8], 4, codecs=[3])

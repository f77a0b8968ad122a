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


def trained(grid, graph, owner, layer, switches):
    """Bytes of the fourth epoch, all told, and what the link keeps after it."""
    mesh = worlds.mesh(grid=grid)
    found = []
    for name, order, keep, halo in switches:
        link = LINKS[name]()
        share = pdc.partition(GRAPHS[graph](), mesh, owner, link=link)
        edges = share.edge_index.with_halo(halo)
        edges = edges.with_ordering(order, keep_inputs=keep)
        torch.manual_seed(0)
        model = pdc.replicate(stack(LAYERS[layer], WIDTHS), mesh)
        for _ in range(4):
            mesh.ledger.reset()
            model.zero_grad()
            out = model(share.x, edges)
            F.cross_entropy(out, share.y % out.size(1)).backward()
            link.drain()
            got = mesh.ledger.bytes()
            messages = mesh.ledger.messages() - mesh.ledger.messages("all_reduce")
            link.step()
        found.append((got, messages, link.held))
    return found


def same_as_ledger(size, grid, graph, cutter, layer, switches):
    data = GRAPHS[graph]()
    owner = owners(cutter, data, size)
    how = {"partition": owner, "layers": layer, "dtype": torch.float64, "grid": grid}
    counted = worlds.run(trained, size, grid, graph, owner, layer, switches)
    for k, (name, order, keep, halo) in enumerate(switches):
        ways = {"halo": halo, "ordering": MultiplyOrder(order, keep)}
        link = LINKS[name]()
        plans = pdc.plan(data, WIDTHS, size, codecs=[link], **ways, **how)
        one = plans.of(grid, link=link)
        every = zip(*(each[k] for each in counted), strict=True)
        bytes_, messages, held = every
        assert bytes_ == one.bytes_by_rank, (name, one)
        assert max(messages) == one.messages
        assert not one.exact
        plain = plans.of(grid, codec="plain")
        kept = one.memory - plain.memory
        assert min(held) <= kept <= max(held), name


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
def test_bytes_of_a_link_are_those_of_the_ledger(size, graph, cutter, layer):
    for number, grid in enumerate(grids(size)):
        some = list(LINKS)[number :: len(grids(size))]
        ways = [(name, *SWITCHES[(k + number) % 3]) for k, name in enumerate(some)]
        same_as_ledger(size, grid, graph, cutter, layer, ways)


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

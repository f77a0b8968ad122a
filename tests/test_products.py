"""The contract of every distributed linear operator, on every grid."""

from __future__ import annotations

import math

import pytest
import tiers
import torch
import worlds
from problems import GRAPHS, owners, some_grids

import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.ledger import dense_words

pytestmark = pytest.mark.usefixtures("place")

SIZES = (1, 2, 3, 4, 6, 8)


def _matrix(data, weighted):
    n, e = data.num_nodes, data.edge_index.size(1)
    value = data.edge_weight if weighted else torch.ones(e, dtype=torch.float64)
    source, target = data.edge_index
    dense = torch.zeros(n, n, dtype=torch.float64)
    return dense.index_put_((target, source), value, accumulate=True)


def _contract(graph, cutter, grid, width, oblivious):
    data = GRAPHS[graph]()
    mesh = worlds.mesh(grid=grid)
    share = pdc.partition(
        data, mesh, owners(cutter, data, mesh.size), oblivious=oblivious
    )
    g = torch.Generator().manual_seed(3)
    x = torch.randn(data.num_nodes, width, generator=g, dtype=torch.float64)
    y = torch.randn(data.num_nodes, width, generator=g, dtype=torch.float64)
    rows = share.edge_index.nodes
    there = share.edge_index.device
    mine, theirs = x[rows.gid].to(there), y[rows.gid].to(there)
    plan = share.edge_index.topology.sum_plan()
    dense = _matrix(data, True)
    matrix = plan.valued(share.edge_weight.to_local())

    mesh.ledger.reset()
    z = matrix @ mine
    assert mesh.ledger.words() == matrix.price(width).words
    assert mesh.ledger.messages() == matrix.price(width).messages
    assert mesh.ledger.bytes() == 8 * matrix.price(width).words
    if mesh.size == 1:
        assert mesh.ledger.words() == 0
    torch.testing.assert_close(z, (dense @ x)[rows.gid], rtol=1e-12, atol=1e-12)

    mesh.ledger.reset()
    zt = matrix.transposed @ theirs
    assert mesh.ledger.words() == matrix.transposed.price(width).words
    torch.testing.assert_close(zt, (dense.t() @ y)[rows.gid], rtol=1e-12, atol=1e-12)

    pair = torch.stack([(z * theirs).sum(), (mine * zt).sum()])
    pair = collectives.all_reduce(pair, mesh.world)
    torch.testing.assert_close(pair[0], pair[1])
    assert torch.equal(matrix @ mine, z)  # the same bits twice
    return matrix.price(width).words


@tiers.parametrize("size", SIZES, [1, 2, 4])
def test_contract_on_every_grid(size):
    cutters = ("random", "empty_rank", "lopsided", "metis")
    names = list(GRAPHS)
    for k, grid in enumerate(some_grids(size)):
        graph = names[(k + size) % len(names)]
        for oblivious in (False, True):
            cutter, width = cutters[(k + size) % len(cutters)], (5, 1, 16)[k % 3]
            worlds.run(_contract, size, graph, cutter, grid, width, oblivious)


def _dense_words(grid, oblivious):
    n, f, size = 120, 16, 8
    every = torch.arange(n)
    full = torch.stack([every.repeat_interleave(n), every.repeat(n)])
    data = pdc_data(n, f, full)
    mesh = worlds.mesh(grid=grid)
    share = pdc.partition(data, mesh, "block", oblivious=oblivious)
    matrix = share.edge_index.topology.sum_plan().matrix
    mesh.ledger.reset()
    matrix @ share.x.to_local()
    assert size == mesh.size
    return mesh.ledger.words()


def pdc_data(n, f, edge_index):
    from torch_geometric.data import Data

    return Data(x=torch.ones(n, f), edge_index=edge_index)


@tiers.parametrize(
    ("grid", "words"),
    [
        ((8, 1, 1), 1680),
        ((2, 4, 1), 960),
        ((2, 2, 2), 720),
    ],
    [((2, 2, 2), 720)],
)
def test_dense_halo_costs_the_formula(grid, words):
    assert dense_words(120, 16, grid) == words
    for oblivious in (False, True):
        assert worlds.run(_dense_words, 8, grid, oblivious) == [words] * 8


def _oblivious_words():
    data = GRAPHS["directed"]()
    found = {}
    for oblivious in (False, True):
        mesh = worlds.mesh(grid=(4, 1, 1))
        share = pdc.partition(data, mesh, "block", oblivious=oblivious)
        matrix = share.edge_index.topology.sum_plan().matrix
        found[oblivious] = matrix.price(8).words
        matrix @ torch.ones_like(share.x.to_local())[:, :1].expand(-1, 8)
        ops = {op for op, _ in mesh.ledger.entries}
        assert ("all_gather" in ops) == oblivious
    return found, len(share.edge_index.nodes)


def test_sparsity_aware_never_moves_more():
    for found, own in worlds.run(_oblivious_words, 4):
        assert found[False] <= found[True] == (60 - own) * 8


def _overlap(grid):
    data = GRAPHS["directed"]()
    mesh = worlds.mesh(grid=grid)
    share = pdc.partition(data, mesh, "random")
    x = share.x.detach().requires_grad_()
    with mesh.ledger.record() as events:
        z = share.edge_index.matmul(x)
    assert events.index(("begin", "in")) < events.index(("multiply", "own"))
    assert events.index(("multiply", "own")) < events.index(("arrive", "in"))
    assert events.index(("begin", "out")) < events.index(("multiply", "ghost"))
    assert events.index(("multiply", "ghost")) < events.index(("arrive", "out"))
    with mesh.ledger.record() as events:
        z.sum().backward()
    first, own = events.index(("begin", "out")), events.index(("multiply", "own"))
    if grid[1] == 1:  # sums leave before own rows are multiplied
        assert first < own < events.index(("arrive", "out"))
    else:
        assert own < events.index(("arrive", "in")) < first


@pytest.mark.parametrize("grid", [(4, 1, 1), (2, 2, 1), (2, 1, 2)])
def test_own_columns_are_multiplied_while_rows_travel(grid):
    worlds.run(_overlap, 4, grid)


def _gradients_behind():
    """The last layer's gradients leave before the first layer's product is made."""
    data = GRAPHS["undirected"]()
    mesh = worlds.mesh()
    share = pdc.partition(data, mesh, "random")
    from torch_geometric.nn import GCN

    model = pdc.replicate(pdc.convert(GCN(7, 64, 3, 64)).double(), mesh)
    share.x.requires_grad_()
    for _ in range(3):  # DDP puts its buckets in order after the first
        out = model(share.x, share.edge_index)
        with mesh.ledger.record() as events:
            out.square().sum().backward()
    products = [k for k, one in enumerate(events) if one == ("multiply", "own")]
    sums = [k for k, one in enumerate(events) if one == ("begin", "gradients")]
    assert len(products) == 3
    assert len(sums) >= 3
    assert sums[0] < products[1]
    assert sums[1] < products[2]


@pytest.mark.place("cpu", "cuda")  # it is DistributedDataParallel's work
def test_gradients_travel_behind_the_backward_pass():
    worlds.run(_gradients_behind, 3)


def _no_needless_gradient():
    data = GRAPHS["undirected"]()
    mesh = worlds.mesh()
    share = pdc.partition(data, mesh, "random")
    from pyg_distcomm.nn import DistGCNConv

    conv = DistGCNConv(7, 16).double()  # (A X) W: the product needs no gradient
    conv(share.x, share.edge_index)
    mesh.ledger.reset()
    out = conv(share.x, share.edge_index)
    forward = _exchanged(mesh)
    out.sum().backward()
    assert _exchanged(mesh) == forward
    narrow = DistGCNConv(7, 2).double()
    edges = share.edge_index.with_ordering(keep_inputs=False)
    narrow(share.x, edges)
    mesh.ledger.reset()
    narrow(share.x, edges)
    assert _exchanged(mesh) * 7 == forward * 2  # A (X W): two words per row


def _exchanged(mesh):
    return mesh.ledger.words("halo") + mesh.ledger.words("halo_reduce")


def test_order_and_gradients_nobody_needs():
    worlds.run(_no_needless_gradient, 3)


def _relabelled(perm_seed):
    data = GRAPHS["loops_and_copies"]()
    g = torch.Generator().manual_seed(perm_seed)
    perm = torch.randperm(data.num_nodes, generator=g)
    back = torch.argsort(perm)
    turned = data.clone()
    turned.x, turned.edge_index = data.x[perm], back[data.edge_index]
    mesh = worlds.mesh()
    found = []
    for d in (data, turned):
        share = pdc.partition(d, mesh, "random")
        found.append(share.edge_index.matmul(share.x, share.edge_weight).full_tensor())
    torch.testing.assert_close(found[0][perm], found[1], rtol=1e-12, atol=1e-12)


def test_relabelling_permutes_the_answer():
    worlds.run(_relabelled, 3, 11)


def test_three_names_of_grids():
    from pyg_distcomm.comm.mesh import resolve_grid

    assert resolve_grid(6, "2d") == (3, 2, 1)
    assert resolve_grid(64, "3d") == (4, 4, 4)
    assert resolve_grid(12, "3d") == (3, 2, 2)
    assert resolve_grid(8, "1.5d", 4) == (2, 4, 1)
    assert resolve_grid(5, "feature") == (1, 1, 5)
    assert math.prod(resolve_grid(36, "2d")) == 36


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((7, "2d"), "4, 6, 8"),
        ((4, "3d"), "8"),
        ((8, "1.5d", 3), "3, 6, 9"),
        ((8, "1.5d", 0), "at least 1"),
        ((8, "4d"), "1d, 1.5d, 2d, 3d, feature"),
        ((8, "2d", 2), "belongs to"),
        ((8, "1d", None, (2, 2, 1)), "product"),
        ((8, "1d", None, (2, 4)), "three"),
    ],
)
def test_impossible_grids_say_what_fits(args, text):
    from pyg_distcomm.comm.mesh import resolve_grid

    with pytest.raises(ValueError, match=text):
        resolve_grid(*args)


def _ledger():
    mesh = worlds.mesh()
    mesh.ledger.reset()
    collectives.all_reduce(torch.ones(3), mesh.world)
    return mesh.ledger


def test_a_ledger_can_be_brought_home():
    for ledger in worlds.run(_ledger, 2):
        assert ledger.messages("all_reduce") == 2
        ledger.note("more", "world", words=1, bytes=4, sent_bytes=4, messages=1)
        assert ledger.words("more") == 1

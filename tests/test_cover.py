"""Rows, sums, or both: what products exchange, and that it is the least there is."""

from __future__ import annotations

from itertools import product

import definitions
import pytest
import tiers
import torch
import worlds
from problems import GRAPHS, owners, some_grids
from torch_geometric.data import Data

import pyg_distcomm as pdc
from pyg_distcomm import kernels
from pyg_distcomm.comm import collectives
from pyg_distcomm.halo import halo as halos
from pyg_distcomm.ops.grid_plan import HALOS, PACKING

pytestmark = pytest.mark.usefixtures("place")

# The cover ----------------------------------------------------------------------------


def _bipartite(seed, left, right, edges):
    g = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, left, (edges,), generator=g)
    cols = torch.randint(0, right, (edges,), generator=g)
    ptr, to, _ = kernels.coo_to_csr(rows, cols, left)
    return ptr, to, rows, cols


@pytest.mark.parametrize("seed", range(40))
def test_a_cover_is_smallest(seed):
    left, right, edges = 1 + seed % 5, 1 + seed // 3 % 5, seed % 14
    ptr, to, rows, cols = _bipartite(seed, left, right, edges)
    mine, theirs = kernels.minimum_cover(ptr, to, right)
    assert bool((mine[rows] | theirs[cols]).all())
    sizes = []
    for choice in product((False, True), repeat=left + right):
        of = torch.tensor(choice)
        if bool((of[:left][rows] | of[left:][cols]).all()):
            sizes.append((sum(choice), -sum(choice[:left])))
    assert (int(mine.sum() + theirs.sum()), -int(mine.sum())) == min(sizes)


@pytest.mark.parametrize("seed", range(20))
def test_the_compiled_cover_is_the_reference(seed):
    left, right, edges = 40 + seed, 60 - seed, 20 + 8 * seed
    ptr, to, _, _ = _bipartite(seed, left, right, edges)
    found = kernels.minimum_cover(ptr, to, right)
    for a, b in zip(found, definitions.minimum_cover(ptr, to, right), strict=True):
        assert torch.equal(a, b)


def test_a_large_cover_has_the_size_of_a_matching():
    sparse = pytest.importorskip("scipy.sparse")
    from scipy.sparse.csgraph import maximum_bipartite_matching

    ptr, to, rows, cols = _bipartite(1, 30_000, 20_000, 50_000)
    graph = sparse.csr_array((torch.ones(50_000), to.numpy(), ptr.numpy()))
    matched = int((maximum_bipartite_matching(graph, "column") >= 0).sum())
    mine, theirs = kernels.minimum_cover(ptr, to, 20_000)
    assert int(mine.sum() + theirs.sum()) == matched
    assert bool((mine[rows] | theirs[cols]).all())


# The products -------------------------------------------------------------------------


def _dense(data, weight):
    source, target = data.edge_index
    out = torch.zeros(data.num_nodes, data.num_nodes, dtype=torch.float64)
    return out.index_put_((target, source), weight, accumulate=True)


def _contract(*args):
    """Product, transpose, and price; returns the words a rank receives.

    In pieces of few rows, each in messages, or as they are.
    """
    *args, few = args
    before = halos.CHUNK_ROWS, collectives._LARGE_MESSAGE
    if few:
        halos.CHUNK_ROWS, collectives._LARGE_MESSAGE = few, 1
    try:
        return _checked(*args)
    finally:
        halos.CHUNK_ROWS, collectives._LARGE_MESSAGE = before


def _checked(graph, cutter, grid, halo):
    data = GRAPHS[graph]()
    mesh = worlds.mesh(grid=grid)
    share = pdc.partition(data, mesh, owners(cutter, data, mesh.size))
    plan = share.edge_index.with_halo(halo).topology.sum_plan()
    g = torch.Generator().manual_seed(3)
    x = torch.randn(2, data.num_nodes, 5, generator=g, dtype=torch.float64)
    gid = share.edge_index.nodes.gid
    dense = _dense(data, data.edge_weight)
    matrix = plan.valued(share.edge_weight.to_local())
    z = None
    for one, at, truth in (
        (matrix, x[0], dense),
        (matrix.transposed, x[1], dense.t()),
    ):
        mesh.ledger.reset()
        z = one @ at[gid].to(share.x.device)
        assert mesh.ledger.words() == one.price(5).words
        assert mesh.ledger.messages() == one.price(5).messages
        torch.testing.assert_close(z, (truth @ at)[gid], rtol=1e-12, atol=1e-12)
    assert torch.equal(matrix.transposed @ x[1][gid].to(z.device), z)
    received = matrix.price(1).words, matrix.transposed.price(1).words
    return [row[0] for row in collectives.all_gather_counts(received[:1], mesh.world)]


@tiers.parametrize("size", [2, 3, 4, 8], [3])
def test_products_whatever_travels(size):
    names, cutters = list(GRAPHS), ("random", "empty_rank", "lopsided", "metis")
    for k, grid in enumerate(some_grids(size)):
        graph, cutter = names[(k + size) % len(names)], cutters[k % 4]
        words = {
            halo: worlds.run(_contract, size, graph, cutter, grid, halo, k % 3)[0]
            for halo in HALOS
        }
        ways = ("rows", "sums") if 1 in grid[:2] else ("rows",)
        for rank in range(size):
            for way in ways:
                assert words["cover"][rank] <= words[way][rank], (grid, way, words)
            most = words["cover"][rank] * (1 + PACKING)
            assert words["auto"][rank] <= most, (grid, words)


def _hubs(n=64):
    """Half the nodes are hubs on one side, half on the other: neither choice is best."""
    a, b = torch.arange(0, n // 2), torch.arange(n // 2, n)
    spread = torch.stack([a, b[:1].expand(len(a))])  # many to one: send sums
    gather = torch.stack([b[:1].expand(len(a)), a])  # one to many: send rows
    both = torch.cat([spread, gather], 1)
    return Data(x=torch.rand(n, 3), edge_index=both, num_nodes=n)


def _hub_words(halo):
    mesh = worlds.mesh(grid=(2, 1, 1))
    share = pdc.partition(_hubs(), mesh, "block")
    edges = share.edge_index.with_halo(halo)
    matrix = edges.topology.sum_plan().matrix
    return sum(
        row[0]
        for row in collectives.all_gather_counts([matrix.price(1).words], mesh.world)
    )


def test_hubs_send_one_row_and_take_one_sum():
    found = {halo: worlds.run(_hub_words, 2, halo)[0] for halo in HALOS}
    assert found == {"rows": 33, "sums": 33, "cover": 2, "blocks": 64, "auto": 2}


def _complete(halo):
    n, mesh = 24, worlds.mesh(grid=(3, 1, 1))
    every = torch.arange(n)
    full = torch.stack([every.repeat_interleave(n), every.repeat(n)])
    share = pdc.partition(Data(x=torch.ones(n, 4), edge_index=full), mesh, "block")
    edges = share.edge_index.with_halo(halo)
    x = share.x.detach().requires_grad_()
    edges.matmul(x)
    mesh.ledger.reset()
    edges.matmul(x).sum().backward()
    return {op for op, _ in mesh.ledger.entries}, mesh.ledger.words("all_gather")


def test_blocks_take_over_where_a_halo_is_dense():
    for ops, words in worlds.run(_complete, 3, "auto"):
        assert {"all_gather", "reduce_scatter"} <= ops
        assert "halo" not in ops
        assert words == 16 * 4
    for ops, _ in worlds.run(_complete, 3, "cover"):
        assert "halo" in ops
        assert "all_gather" not in ops


def _learnt_weights(halo):
    """Learnt weights of edges send rows, and nothing for the edges themselves."""
    data = GRAPHS["undirected"]()
    mesh = worlds.mesh(grid=(3, 1, 1))
    share = pdc.partition(data, mesh, "random")
    edges = share.edge_index.with_halo(halo)
    weight = share.edge_weight.detach().requires_grad_()
    x = share.x.detach().requires_grad_()
    edges.matmul(x, weight)
    mesh.ledger.reset()
    out = edges.matmul(x, weight)
    assert mesh.ledger.words("edges") == 0
    out.square().sum().backward()
    full, w = data.x.clone().requires_grad_(), data.edge_weight.clone().requires_grad_()
    (_dense(data, w) @ full).square().sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), full.grad)
    torch.testing.assert_close(weight.grad.full_tensor(), w.grad)


@pytest.mark.parametrize("halo", HALOS)
def test_learnt_weights(halo):
    worlds.run(_learnt_weights, 3, halo)


def test_an_unknown_halo_says_which_there_are():
    share = pdc.partition(GRAPHS["tiny"](), worlds.mesh())
    with pytest.raises(ValueError, match="'cover', 'rows', 'sums', 'blocks'"):
        share.edge_index.with_halo("all")


def _parts():
    """The backward pass of a 1D grid sends a part of its sums before the next is made."""
    whole, halos.CHUNK_ROWS = halos.CHUNK_ROWS, 4
    try:
        mesh = worlds.mesh(grid=(3, 1, 1))
        share = pdc.partition(GRAPHS["directed"](), mesh, "random")
        edges = share.edge_index.with_halo("rows")
        x = share.x.detach().requires_grad_()
        out = edges.matmul(x)
    finally:
        halos.CHUNK_ROWS = whole
    with mesh.ledger.record() as events:
        out.sum().backward()
    part = [("multiply", "out"), ("begin", "out")]
    assert events == [
        ("begin", "in"),
        *(halos.MAX_CHUNKS * part),
        ("multiply", "own"),
        ("arrive", "in"),
        ("multiply", "ghost"),
        ("arrive", "out"),
    ]


def test_sums_leave_in_parts():
    worlds.run(_parts, 3)

"""The contract of every distributed linear operator, on every grid, whatever travels."""

import math
from itertools import product

import alike
import pytest
import tiers
import torch
import worlds
from problems import GRAPHS, owners, some_grids
from torch_geometric.data import Data
from torch_geometric.nn import GCN

import pyg_distcomm as pdc
from pyg_distcomm import kernels
from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.ledger import dense_words
from pyg_distcomm.comm.mesh import resolve_grid
from pyg_distcomm.halo import halo as halos
from pyg_distcomm.ops.grid_plan import HALOS, PACKING

pytestmark = pytest.mark.usefixtures("place")

SIZES = (1, 2, 3, 4, 6, 8)


def dense(data, weight):
    """The adjacency matrix, with what a target sums of each source."""
    source, target = data.edge_index
    out = torch.zeros(data.num_nodes, data.num_nodes, dtype=torch.float64)
    return out.index_put_((target, source), weight, accumulate=True)


def contract(graph, cutter, grid, width, oblivious=False, halo=None):
    """Product, transpose and price; returns the words this rank receives."""
    data, mesh = GRAPHS[graph](), worlds.mesh(grid=grid)
    cut = owners(cutter, data, mesh.size)
    share = pdc.partition(data, mesh, cut, oblivious=oblivious)
    edges = share.edge_index.with_halo(halo) if halo else share.edge_index
    g = torch.Generator().manual_seed(3)
    both = torch.randn(2, data.num_nodes, width, generator=g, dtype=torch.float64)
    gid, truth = edges.nodes.gid, dense(data, data.edge_weight)
    matrix = edges.topology.sum_plan().valued(share.edge_weight.to_local())
    mine, found = both[:, gid].to(edges.device), []
    for one, x, whole, whole_x in (
        (matrix, mine[0], truth, both[0]),
        (matrix.transposed, mine[1], truth.t(), both[1]),
    ):
        mesh.ledger.reset()
        found.append(one @ x)
        price = one.price(width)
        assert mesh.ledger.words() == price.words
        assert mesh.ledger.messages() == price.messages
        assert mesh.ledger.bytes() == 8 * price.words
        assert price.words == 0 or mesh.size > 1
        alike.same(found[-1], (whole @ whole_x)[gid], rtol=1e-12, atol=1e-12)
        assert torch.equal(one @ x, found[-1])  # the same bits twice
    pair = torch.stack(
        [(z * x).sum() for z, x in zip(found, mine.flip(0), strict=True)]
    )
    alike.same(*collectives.all_reduce(pair, mesh.world))
    return matrix.price(width).words


@tiers.parametrize("size", SIZES, [1, 2, 4])
def test_contract_on_every_grid(size):
    cutters = ("random", "empty_rank", "lopsided", "metis")
    names = list(GRAPHS)
    for k, grid in enumerate(some_grids(size)):
        graph = names[(k + size) % len(names)]
        for oblivious in (False, True)[: 1 + (k + size) % 2]:
            cutter, width = cutters[(k + size) % len(cutters)], (5, 1, 16)[k % 3]
            worlds.run(contract, size, graph, cutter, grid, width, oblivious)


DENSE = {(8, 1, 1): 1680, (2, 4, 1): 960, (2, 2, 2): 720}
FOUR = [(2, 2, 1), (1, 2, 2), (2, 1, 2)]


@tiers.parametrize("grid", [*FOUR, *DENSE], FOUR)
@worlds.on()
def test_dense_halo_costs_the_formula(grid):
    for each, known in DENSE.items():
        assert dense_words(120, 16, each) == known
    words = dense_words(120, 16, grid)
    n, every = 120, torch.arange(120)
    full = torch.stack([every.repeat_interleave(n), every.repeat(n)])
    data, mesh = Data(x=torch.ones(n, 16), edge_index=full), worlds.mesh(grid=grid)
    for oblivious in (False, True):
        share = pdc.partition(data, mesh, "block", oblivious=oblivious)
        matrix = share.edge_index.topology.sum_plan().matrix
        mesh.ledger.reset()
        matrix @ share.x.to_local()
        assert mesh.ledger.words() == words


@pytest.mark.parametrize("grid", [(4, 1, 1), (2, 2, 1), (2, 1, 2)])
@worlds.on(4)
def test_own_columns_are_multiplied_while_rows_travel(grid):
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


@pytest.mark.place("cpu", "cuda")  # it is DistributedDataParallel's work
@worlds.on(3)
def test_gradients_travel_behind_the_backward_pass():
    """The last layer's gradients leave before the first layer's product is made."""
    data = GRAPHS["undirected"]()
    mesh = worlds.mesh()
    share = pdc.partition(data, mesh, "random")
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


def test_three_names_of_grids():
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
    with pytest.raises(ValueError, match=text):
        resolve_grid(*args)


# What travels -------------------------------------------------------------------------


def _contract(few, *args):
    """The contract of products, with pieces of few rows that are each a message."""
    with pytest.MonkeyPatch.context() as patch:
        if few:
            patch.setattr(halos, "CHUNK_ROWS", few)
            patch.setattr(collectives, "_LARGE_MESSAGE", 1)
        return contract(*args)


@tiers.parametrize("size", [2, 3, 4, 8], [2])
def test_products_whatever_travels(size):
    names, cutters = list(GRAPHS), ("random", "empty_rank", "lopsided", "metis")
    for k, grid in enumerate(some_grids(size)):
        graph, cutter = names[(k + size) % len(names)], cutters[k % 4]
        words = {
            halo: worlds.run(
                _contract, size, k % 3, graph, cutter, grid, 5, False, halo
            )
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


@worlds.on(2)
def test_hubs_send_one_row_and_take_one_sum():
    found, mesh = {}, worlds.mesh(grid=(2, 1, 1))
    share = pdc.partition(_hubs(), mesh, "block")
    for halo in HALOS:
        matrix = share.edge_index.with_halo(halo).topology.sum_plan().matrix
        every = collectives.all_gather_counts([matrix.price(1).words], mesh.world)
        found[halo] = sum(row[0] for row in every)
    assert found == {"rows": 33, "sums": 33, "cover": 2, "blocks": 64, "auto": 2}


@worlds.on(3)
def test_blocks_take_over_where_a_halo_is_dense():
    n, mesh = 24, worlds.mesh(grid=(3, 1, 1))
    every = torch.arange(n)
    full = torch.stack([every.repeat_interleave(n), every.repeat(n)])
    share = pdc.partition(Data(x=torch.ones(n, 4), edge_index=full), mesh, "block")
    x = share.x.detach().requires_grad_()
    for halo, some, none in (
        ("auto", {"all_gather", "reduce_scatter"}, "halo"),
        ("cover", {"halo"}, "all_gather"),
    ):
        edges = share.edge_index.with_halo(halo)
        edges.matmul(x)
        mesh.ledger.reset()
        edges.matmul(x).sum().backward()
        ops = {op for op, _ in mesh.ledger.entries}
        assert some <= ops
        assert none not in ops
        assert halo == "cover" or mesh.ledger.words("all_gather") == 16 * 4


@pytest.mark.parametrize("halo", HALOS)
@worlds.on(3)
def test_learnt_weights(halo):
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
    (dense(data, w) @ full).square().sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), full.grad)
    torch.testing.assert_close(weight.grad.full_tensor(), w.grad)


def test_an_unknown_halo_says_which_there_are():
    share = pdc.partition(GRAPHS["tiny"](), worlds.mesh())
    with pytest.raises(ValueError, match="'cover', 'rows', 'sums', 'blocks'"):
        share.edge_index.with_halo("all")


@worlds.on(3)
def test_sums_leave_in_parts():
    """The backward pass of a 1D grid sends a part of its sums before the next is made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(halos, "CHUNK_ROWS", 4)
        mesh = worlds.mesh(grid=(3, 1, 1))
        share = pdc.partition(GRAPHS["directed"](), mesh, "random")
        edges = share.edge_index.with_halo("rows")
        x = share.x.detach().requires_grad_()
        out = edges.matmul(x)
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


def test_a_large_cover_has_the_size_of_a_matching():
    sparse = pytest.importorskip("scipy.sparse")
    from scipy.sparse.csgraph import maximum_bipartite_matching

    ptr, to, rows, cols = _bipartite(1, 30_000, 20_000, 50_000)
    graph = sparse.csr_array((torch.ones(50_000), to.numpy(), ptr.numpy()))
    matched = int((maximum_bipartite_matching(graph, "column") >= 0).sum())
    mine, theirs = kernels.minimum_cover(ptr, to, 20_000)
    assert int(mine.sum() + theirs.sum()) == matched
    assert bool((mine[rows] | theirs[cols]).all())

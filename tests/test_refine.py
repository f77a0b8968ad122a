"""Refinement for the slowest rank, cuts for a grid, and their figures."""

import itertools

import numpy as np
import problems
import pytest
import refine_reference
import tiers
import torch
from test_cutters import GRAPHS, NONE, cliques, random_graph, rng, star

from pyg_distcomm.partition import cutters_jit
from pyg_distcomm.partition.cutters import METHODS, cut, refine_partition
from pyg_distcomm.partition.partition import (
    Partition,
    capacities,
    node_weights,
    part_loads,
    report,
)


def skewed(num_nodes, num_edges, seed=0):
    """A directed graph whose sources, but not targets, have hubs."""
    dice = torch.rand(num_edges, generator=rng(seed))
    source = (dice**4 * num_nodes).long().clamp(max=num_nodes - 1)
    target = torch.randint(0, num_nodes, (num_edges,), generator=rng(seed + 1))
    place = torch.randperm(num_nodes, generator=rng(seed + 2))
    return torch.stack([place[source], target])


SMALL = {name: make() for name, make in problems.GRAPHS.items()}
EDGES = {name: (data.edge_index, data.num_nodes) for name, data in SMALL.items()}
EDGES |= {
    "skewed": (skewed(50, 200), 50),
    "cliques": (cliques(3, 9)[0], 27),
    "star out": (star(30), 31),
}


@tiers.cover(("name", "how"), [*EDGES], [*itertools.product([2, 3, 12], [0, 1, 3])])
def test_compiled_sweeps_equal_the_definition(name, how):
    (edge_index, n), (num_parts, doublings) = EDGES[name], how
    owner = torch.randint(0, num_parts, (n,), generator=rng(4)).numpy()
    weight = node_weights(edge_index, (np.arange(n) % 3 == 0).astype(np.int64))
    carried = part_loads(owner, weight, num_parts)
    capacity = np.maximum(capacities(weight, num_parts, 1.1), carried.max(0))
    order = torch.randperm(n, generator=rng(5)).numpy()
    pairs = {(u, v) for u, v in edge_index.t().tolist() if u != v}
    state = refine_reference.RefineState(
        owner.tolist(), pairs, weight, capacity, num_parts
    )
    rows = cutters_jit.distinct_sources(*edge_index.numpy(), n, False)
    readers = cutters_jit.list_readers(rows, owner, num_parts)
    load = cutters_jit.rows(owner, num_parts, readers)
    most = int(load[:num_parts].sum())
    first = np.array([load[:num_parts].max(), load[num_parts:].max()])
    for _ in range(3):
        bounds = first.tolist(), most, doublings
        want = refine_reference.sweep(state, order.tolist(), *bounds)
        loads = load, (weight, capacity, carried), first, most, doublings
        assert cutters_jit.sweep(order, rows, owner, readers, *loads) == want
        assert owner.tolist() == state.owner
        assert load.tolist() == [*state.rows()[0], *state.rows()[1]]
        assert (carried == part_loads(owner, weight, num_parts)).all()


@tiers.cover(("name", "method", "num_parts"), [*GRAPHS], METHODS, [5, 1, 2, 40])
def test_never_worse_and_always_the_same(method, name, num_parts):
    edge_index, n = GRAPHS[name]
    train = torch.rand(n, generator=rng()) < 0.3
    plain = cut(edge_index, n, num_parts, method, train_mask=train)
    found, again = (
        cut(edge_index, n, num_parts, method, train_mask=train, refine=True)
        for _ in range(2)
    )
    assert found.same_as(again)
    old, new = (report(edge_index, p, train) for p in (plain, found))
    assert found.before == new.before == old
    assert new.max_send <= old.max_send
    assert new.max_halo <= old.max_halo
    assert new.volume <= old.volume
    if n >= num_parts:
        assert min(found.sizes) > 0
    for name, loose in {"nodes": 1.05, "edges": 1.1, "train": 1.1}.items():
        was, now = getattr(old, name), getattr(new, name)
        assert max(now) <= max(*was, -(-sum(was) * loose // num_parts))


@pytest.mark.parametrize("flip", [False, True])
def test_directed_graphs_lower_both_maxima(flip):
    edge_index = skewed(3000, 9000)
    edge_index = edge_index.flip(0) if flip else edge_index
    figures = report(edge_index, cut(edge_index, 3000, 6, "random", refine=True))
    assert figures.max_send < 0.85 * figures.before.max_send
    assert figures.max_halo < 0.85 * figures.before.max_halo


def test_an_owner_vector_is_refined_and_its_imbalance_kept():
    edge_index = random_graph(200, 900)
    owner = (torch.arange(200) % 7 == 0).long()
    found = cut(edge_index, 200, 2, owner, refine=True)
    assert max(found.sizes) <= max(Partition.from_owner(owner, 2).sizes)
    assert found.before.nodes == (171, 29)


GRIDS = [(8, 1, 1), (4, 2, 1), (2, 4, 1), (2, 2, 2), (1, 8, 1), (1, 2, 4), (4, 1, 2)]


def brute_blocks(edge_index, partition, grid):
    """Nonzeros, sent and received rows of each block, from sets."""
    r, s, p = grid
    place = [(q // (s * p), q // p % s) for q in partition.owner.tolist()]
    nonzeros, sent, got = (np.zeros((r, s), int) for _ in range(3))
    rows, sums = set(), set()
    for u, v in edge_index.t().tolist():
        nonzeros[place[v][0], place[u][1]] += 1
        rows.add((u, place[v][0]))
        sums.add((v, place[u][1]))
    for u, i in rows:
        if i != place[u][0]:
            sent[place[u]] += 1
            got[i, place[u][1]] += 1
    for v, j in sums:
        if j != place[v][1]:
            sent[place[v][0], j] += 1
            got[place[v]] += 1
    return [tuple(a.reshape(-1).tolist()) for a in (nonzeros, sent, got)]


ODD = ["repeats", "directed star out", "sparse", "one node"]


@tiers.cover(("grid", "name"), GRIDS, ODD)
def test_blocks_are_counted(name, grid):
    edge_index, n = GRAPHS[name]
    partition = cut(edge_index, n, 8, "random")
    figures = report(edge_index, partition, grid=grid)
    found = figures.blocks, figures.block_send, figures.block_halo
    if grid[0] == 8:
        assert figures.grid == ()
        found = figures.edges, figures.send_rows, figures.halo_rows
    assert [*found] == brute_blocks(edge_index, partition, grid)


@pytest.mark.parametrize("grid", GRIDS)
def test_refinement_is_no_worse_on_the_grid(grid):
    edge_index = random_graph(300, 900, seed=9)
    for method in ("metis", "random", "grid"):
        found = cut(edge_index, 300, 8, method, refine=True, grid=grid)
        figures = report(edge_index, found, grid=grid)
        assert figures.busiest <= figures.before.busiest


def exchanged(edge_index, block, s):
    """Rows and sums of one product, by sets: connectivity less one, of both parts."""
    row, col = block // s, block % s
    u, v = edge_index
    rows = {(a, i) for a, i in zip(u.tolist(), row[v].tolist(), strict=True)}
    sums = {(b, j) for b, j in zip(v.tolist(), col[u].tolist(), strict=True)}
    own = {(a, i) for a, i in enumerate(row.tolist())}
    return len(rows - own) + len(sums - {(b, j) for b, j in enumerate(col.tolist())})


@pytest.mark.parametrize(
    "grid", [(4, 2, 1), (2, 2, 2), (2, 1, 4), (1, 1, 8), (8, 1, 1)]
)
def test_a_cut_by_grid_sends_no_more_than_parts_as_they_come(grid):
    r, s, p = grid
    n = 600
    block = torch.randint(0, 8, (n,), generator=rng(1))
    ends = torch.randint(0, n, (2, 3000), generator=rng(2))
    near = block[ends[0]] // 2 == block[ends[1]] // 2
    edge_index = ends[:, near | (torch.rand(3000, generator=rng(4)) < 0.2)]
    found = cut(edge_index, n, 8, "grid", grid=grid)
    parts = cut(edge_index, n, r * s, "metis").owner.long()
    plain = Partition.from_owner(parts * p + torch.arange(n) % p, 8)
    new, old = (report(edge_index, each, grid=grid) for each in (found, plain))
    assert new.busiest <= old.busiest or s * p == 1
    block = found.owner.long() // p
    counted = sum(new.block_halo) if s * p > 1 else new.volume
    assert counted == exchanged(edge_index, block, s)
    assert max(found.sizes) <= 1.25 * n / 8
    if p > 1:  # ranks of a fiber share out their block evenly
        sizes = torch.tensor(found.sizes).view(r * s, p)
        assert (sizes.amax(1) - sizes.amin(1) <= 1).all()


def test_wrong_grids_are_refused():
    for grid in [(2, 2, 1), (8, 1), (-8, -1, 1)]:
        with pytest.raises(ValueError, match="product is the number of parts, 8"):
            cut(random_graph(99, 99), 99, 8, "grid", grid=grid)
    with pytest.raises(ValueError, match=r"must be 1 or more, got 0\.5"):
        refine_partition(random_graph(99, 99), cut(NONE, 99, 2, "block"), balance=0.5)


def test_the_figures_compare_before_and_after():
    edge_index = random_graph(400, 1600)
    found = cut(edge_index, 400, 4, "random", refine=True)
    text = str(report(edge_index, found, grid=(2, 2, 1)))
    for words in ("most rows sent", "most rows received", "on a grid of 2 x 2 x 1"):
        assert words in text
    for words in ("sent rows", "edges", "block nonzeros"):
        assert f"{words}, max/mean" in text

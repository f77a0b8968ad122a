import math
import sys
import warnings

import numpy as np
import pytest
import real
import tiers
import torch
from torch_geometric.utils import grid

from pyg_distcomm.partition import cutters
from pyg_distcomm.partition.cutters import METHODS, check_edge_index, cut
from pyg_distcomm.partition.partition import Partition, imbalance, report
from pyg_distcomm.process import PROCESS


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def random_graph(num_nodes, num_edges, seed=0):
    return torch.randint(0, max(num_nodes, 1), (2, num_edges), generator=rng(seed))


def cliques(count, size, seed=0):
    """Cliques with shuffled node ids, each pair of neighbours joined by one edge."""
    inside = torch.combinations(torch.arange(size)).t()
    edges = [inside + size * k for k in range(count)]
    edges += [torch.tensor([[size * k], [size * (k + 1)]]) for k in range(count - 1)]
    place = torch.randperm(count * size, generator=rng(seed))
    pairs = place[torch.cat(edges, dim=1)]
    return torch.cat([pairs, pairs.flip(0)], dim=1), place.argsort() // size


def star(num_leaves):
    return torch.stack([torch.zeros(num_leaves).long(), torch.arange(num_leaves) + 1])


NONE = torch.empty(2, 0, dtype=torch.long)
GRAPHS = {
    "nothing": (NONE, 0),
    "one node": (NONE, 1),
    "only isolated": (NONE, 23),
    "fewer nodes than parts": (random_graph(3, 7), 3),
    "self-loops": (torch.arange(50).repeat(2, 1), 50),
    "repeats": (random_graph(60, 40).repeat(1, 9), 60),
    "directed star in": (star(200).flip(0), 201),
    "directed star out": (star(200), 201),
    "isolated tail": (random_graph(40, 200), 160),
    "dense": (random_graph(33, 4000), 33),
    "int32": (random_graph(100, 400).int(), 100),
    "sparse": (random_graph(500, 600), 500),
}


@tiers.cover(("name", "method", "num_parts"), [*GRAPHS], METHODS, [3, 40, 1, 2, 7])
def test_every_cutter_gives_every_node_to_one_part(method, name, num_parts):
    edge_index, n = GRAPHS[name]
    train = torch.rand(n, generator=rng()) < 0.3
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    found = cut(edge_index, n, num_parts, method, train_mask=train, seed=3)
    again = cut(edge_index, n, num_parts, method, train_mask=train, seed=3)
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()
    assert found.num_nodes == n
    assert found.num_parts == len(found.sizes) == num_parts
    assert sum(found.sizes) == n
    assert found.same_as(again)
    assert found.digest() == again.digest()
    if n >= num_parts:
        assert min(found.sizes) > 0
    if method not in ("metis", "grid"):
        assert max(found.sizes) <= max(-(-n // num_parts), int(1.03 * n / num_parts))


def test_block_is_consecutive_and_even():
    found = cut(NONE, 11, 4, "block")
    assert found.owner.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3]
    assert cut(NONE, 2, 4, "block").sizes == (1, 1, 0, 0)


def test_random_is_even_and_follows_its_seed():
    first, other = cut(NONE, 1001, 4, "random"), cut(NONE, 1001, 4, "random", seed=1)
    assert sorted(first.sizes) == [250, 250, 250, 251]
    assert not first.same_as(other)
    assert not first.same_as(cut(NONE, 1001, 4, "block"))
    edges = random_graph(99, 400)
    one, other = (cut(edges, 99, 4, "stream", seed=seed) for seed in (0, 1))
    assert not one.same_as(other)


@pytest.mark.parametrize("method", ["ldg", "metis"])
def test_joined_cliques_are_found(method):
    edge_index, clique = cliques(5, 24)
    found = cut(edge_index, 120, 5, method)
    assert found.sizes == (24,) * 5
    assert len(set(zip(clique.tolist(), found.owner.tolist(), strict=True))) == 5
    figures = report(edge_index, found)
    assert figures.edge_cut == 8  # four joins, both ways


@pytest.mark.parametrize("method", ["ldg", "stream"])
@pytest.mark.parametrize("balance", [1.0, 1.1])
def test_no_part_exceeds_its_capacity(balance, method):
    edge_index = torch.stack([torch.zeros(996).long(), torch.arange(1, 997)])  # a star
    found = cut(edge_index, 997, 9, method, balance=balance)
    assert max(found.sizes) <= max(-(-997 // 9), int(balance * 997 / 9))


@pytest.mark.parametrize("seed", range(2, 6))  # where a pass is worse than one before
def test_ldg_keeps_the_best_of_its_passes(seed, monkeypatch):
    edge_index = random_graph(60, 300, seed=seed)
    monkeypatch.setattr(cutters, "_improve", lambda *args: None)  # what passes give
    sizes = []
    for passes in range(1, 11):
        monkeypatch.setattr(cutters, "PASSES", passes)
        found = cut(edge_index, 60, 3, "ldg", seed=seed)
        sizes.append(report(edge_index, found).edge_cut)
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("side", "of_side", "parts"), [(20, 2, 2), (30, 3, 2), (30, 3, 4)]
)
@pytest.mark.parametrize("method", ["ldg", "metis"])
def test_train_nodes_in_a_corner_of_a_grid_are_shared_out(method, side, of_side, parts):
    """METIS puts them in one part, and other parts have no room but for as many others."""
    edge_index, _ = grid(side, side)
    row, col = torch.arange(side**2) // side, torch.arange(side**2) % side
    train = (row < side // of_side) & (col < side // of_side)
    found = cut(edge_index, side**2, parts, method, train_mask=train)
    figures = report(edge_index, found, train)
    assert max(figures.train) <= math.ceil(1.06 * int(train.sum()) / parts)
    assert max(figures.nodes) <= 1.04 * side**2 / parts
    random = report(edge_index, cut(edge_index, side**2, parts, "random"))
    assert figures.edge_cut < random.edge_cut / 3


def test_symmetric_csr_is_the_pattern_of_a_plus_its_transpose():
    edge_index = random_graph(30, 200, seed=5)
    noisy = torch.cat([edge_index.flip(0), edge_index, torch.arange(9).repeat(2, 1)], 1)
    dense = torch.zeros(30, 30, dtype=torch.bool)
    dense[edge_index[0], edge_index[1]] = True
    want = ((dense | dense.t()) & ~torch.eye(30, dtype=torch.bool)).nonzero().numpy()
    for edges in (edge_index, noisy):
        indptr, indices = cutters.symmetric_csr(edges, 30)
        rows = np.repeat(np.arange(30), np.diff(indptr))
        assert (np.stack([rows, indices], 1) == want).all()


def test_without_pymetis_ldg_runs_and_says_so_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "pymetis", None)
    PROCESS.warned.discard("pymetis")
    edge_index = random_graph(300, 900)
    try:
        with pytest.warns(UserWarning, match=r"pip install 'pyg-distcomm\[metis\]'"):
            found = cut(edge_index, 300, 3, "metis")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cut(edge_index, 300, 3, "metis")
    finally:
        PROCESS.warned.discard("pymetis")
    assert found.same_as(cut(edge_index, 300, 3, "ldg"))


def test_a_graph_too_large_for_metis_is_refused(monkeypatch):
    monkeypatch.setattr("pymetis.zero_copy_dtype", lambda: np.dtype(np.int8))
    with pytest.raises(ValueError, match=r"counts in int8; cut with method='ldg'"):
        cut(random_graph(300, 900), 300, 3, "metis")


@pytest.mark.parametrize("wrap", [list, np.array, torch.tensor, tuple])
def test_an_owner_vector_is_taken_as_it_is(wrap):
    found = cut(NONE, 4, 5, wrap([4, 0, 0, 2]))
    assert found.owner.tolist() == [4, 0, 0, 2]
    assert found.sizes == (2, 0, 1, 0, 1)
    owner = np.array([0, 1])
    owner.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Partition.from_owner(owner, 2).sizes == (1, 1)


@pytest.mark.parametrize(
    ("owner", "error", "words"),
    [
        ([0, 1], ValueError, "2 entries, but the graph has 3 nodes"),
        ([0, 1, 2], ValueError, "owner of node 2 is 2, but the parts are 0 .. 1"),
        ([0, -1, 1], ValueError, "owner of node 1 is -1"),
        ([[0, 1, 1]], ValueError, "must be 1-D"),
        ([0.0, 1.0, 1.0], TypeError, "must hold integers"),
        (torch.tensor([True, False, True]), TypeError, "torch.bool"),
        (torch.tensor([0, 300, 1]), ValueError, "owner of node 1 is 300"),
    ],
)
def test_a_wrong_owner_vector_is_refused(owner, error, words):
    with pytest.raises(error, match=words):
        cut(NONE, 3, 2, owner)


def test_wrong_options_are_refused():
    edges, mask = random_graph(9, 9), torch.ones(8).bool()
    for parts, method, options, told in (
        (2, "louvain", {}, "block, random, ldg, metis, grid, stream"),
        (0, "block", {}, "at least 1, got 0"),
        (2.0, "block", {}, "must be an int"),
        (2, "ldg", {"balance": 0.5}, r"must be 1 or more, got 0\.5"),
        (2, "ldg", {"train_mask": mask}, r"bool \[9\], one entry per node"),
    ):
        with pytest.raises((TypeError, ValueError), match=told):
            cut(edges, 9, parts, method, **options)


@pytest.mark.parametrize(
    ("edge_index", "error", "words"),
    [
        (torch.zeros(2, 3), TypeError, "int64 or int32, got torch.float32;"),
        (torch.full((2, 3), torch.nan), TypeError, "with NaN in it"),
        (torch.zeros(2, 3).bool(), TypeError, "torch.bool"),
        (torch.zeros(3, 2).long(), ValueError, r"got \[3, 2\]"),
        (torch.zeros(2).long(), ValueError, r"got \[2\]"),
        (torch.tensor([[0], [-3]]), ValueError, "negative node id -3"),
        (torch.tensor([[0], [5]]), ValueError, "names node 5, but the graph has 5"),
        ([[0], [1]], TypeError, "must be a Tensor"),
    ],
)
def test_a_wrong_edge_index_is_refused(edge_index, error, words):
    with pytest.raises(error, match=words):
        check_edge_index(edge_index, 5)


@pytest.mark.parametrize(
    ("num_parts", "dtype"),
    [
        (256, torch.uint8),
        (257, torch.int16),
        (2**15, torch.int16),
        (2**15 + 1, torch.int32),
    ],
)
def test_owner_is_as_small_as_it_can_be(num_parts, dtype):
    found = Partition.from_owner([num_parts - 1, 0], num_parts)
    assert found.owner.dtype == dtype
    assert found.gids(num_parts - 1).tolist() == [0]
    assert found.owner_of(torch.tensor([[0], [1]])).tolist() == [[num_parts - 1], [0]]


def test_partition_answers():
    found = Partition.from_owner([2, 0, 2, 2], 3)
    assert repr(found) == "Partition(4 nodes on 3 parts, 0..3 each)"
    assert repr(Partition.from_owner([0], 1)) == "Partition(1 nodes on 1 part, 1 each)"
    assert found.gids(2).tolist() == [0, 2, 3]
    assert found.gids(1).dtype == found.owner_of(torch.tensor([1])).dtype == torch.int64
    for method, given, told in (
        (found.gids, 3, r"got part 3, but the parts are 0 .. 2"),
        (found.owner_of, torch.tensor([0, -1]), "node id -1, but .* ids are 0 .. 3"),
        (found.owner_of, torch.tensor([4]), "node id 4"),
        (found.owner_of, torch.tensor([1.0]), "must be integers"),
    ):
        with pytest.raises((TypeError, ValueError), match=told):
            method(given)


def test_digest_tells_partitions_apart():
    found = Partition.from_owner([0, 1, 1], 2)
    assert found.same_as(Partition.from_owner(np.array([0, 1, 1], np.int16), 2))
    for owner, num_parts in (([0, 1, 0], 2), ([0, 1, 1], 3), ([0, 1, 1], 300)):
        other = Partition.from_owner(owner, num_parts)
        assert not found.same_as(other)
        assert found.digest() != other.digest()


@tiers.cover(("name", "num_parts"), [*GRAPHS], [5, 2, 300, 1])
def test_report_counts_what_sets_count(name, num_parts):
    edge_index, n = GRAPHS[name]
    found = cut(edge_index, n, num_parts, "random", seed=1)
    train = torch.rand(n, generator=rng()) < 0.5
    figures = report(edge_index, found, train)
    owner = found.owner.tolist()
    pairs = {(owner[d], s) for s, d in edge_index.t().tolist() if owner[s] != owner[d]}
    for part in range(num_parts):
        mine = [d for d in edge_index[1].tolist() if owner[d] == part]
        assert figures.edges[part] == len(mine)
        assert figures.halo_rows[part] == sum(p == part for p, _ in pairs)
        assert figures.send_rows[part] == sum(owner[s] == part for _, s in pairs)
        assert figures.train[part] == int(train[found.gids(part)].sum())
    assert figures.nodes == found.sizes
    assert figures.volume == len(pairs) == sum(figures.send_rows)
    assert figures.max_send == max(figures.send_rows)
    assert figures.bytes(16) == len(pairs) * 64
    assert figures.bytes(16, 2) == len(pairs) * 32
    cuts = sum(owner[s] != owner[d] for s, d in edge_index.t().tolist())
    assert figures.edge_cut == cuts


def test_report_reads_like_a_table():
    figures = report(torch.tensor([[0, 1, 2], [1, 2, 3]]), cut(NONE, 4, 2, "block"))
    assert figures.node_imbalance == 1.0
    assert imbalance(figures.edges) == pytest.approx(4 / 3)
    assert imbalance(figures.train) == 1.0
    lines = str(figures).splitlines()
    assert " ".join(lines[0].split()) == "part nodes edges train halo rows sent rows"
    assert lines[1].split() == ["0", "2", "1", "0", "0", "1"]
    assert lines[3].split() == ["all", "4", "3", "0", "1", "1"]
    assert "1 of 3 (33.3%)" in str(figures)
    assert "24 more parts" in str(report(NONE, cut(NONE, 40, 40, "block")))
    with pytest.raises(ValueError, match=r"bool \[4\]"):
        report(NONE, cut(NONE, 4, 2, "block"), torch.ones(3).bool())


@pytest.mark.data
@pytest.mark.parametrize(("method", "share"), [("ldg", 0.4), ("metis", 0.25)])
@pytest.mark.parametrize("num_parts", [4, 16])
def test_cora_travels_less_than_when_cut_at_random(method, share, num_parts):
    cora = real.read(real.path("Cora"))
    arguments = cora.edge_index, cora.num_nodes, num_parts
    random = report(cora.edge_index, cut(*arguments, "random"))
    found = cut(*arguments, method, train_mask=cora.train_mask)
    figures = report(cora.edge_index, found, cora.train_mask)
    assert figures.volume < share * random.volume
    assert figures.edge_cut < share * random.edge_cut
    assert figures.node_imbalance < 1.1
    assert imbalance(figures.edges) < 1.2


@pytest.mark.parametrize("how", ["ldg", "metis", "stream", "refine"])
def test_ids_that_do_not_fit_in_32_bits_are_refused(how):
    given = {"method": "block", "refine": True} if how == "refine" else {"method": how}
    words = rf"{how}.* at most 2147483647 nodes, got 2147"
    with pytest.raises(ValueError, match=words):
        cut(torch.tensor([[0, 2**31 - 1], [2**31 - 1, 5]]), 2**31, 2, **given)

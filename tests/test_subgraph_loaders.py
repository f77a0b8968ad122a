"""Loaders of subgraphs yield what PyG's classes define, on any ranks, cut or not."""

import pytest
import torch
import worlds
from batches import graph, hetero, made, nodes
from chances import likely
from test_saving import full_after
from torch_geometric.data import Batch, Data
from torch_geometric.utils import k_hop_subgraph, subgraph, to_undirected

import pyg_distcomm as pdc
from pyg_distcomm.loader import (
    ClusterData,
    ClusterLoader,
    GraphSAINTEdgeSampler,
    GraphSAINTNodeSampler,
    GraphSAINTRandomWalkSampler,
    GraphSAINTSampler,
    HGTLoader,
    ImbalancedSampler,
    LoaderOptions,
    NeighborLoader,
    RandomNodeLoader,
    ShaDowKHopSampler,
)

pytestmark = pytest.mark.usefixtures("place")


def check_induced(data, batch):
    """Asserts that a batch has the rows of its nodes, and all edges between them."""
    for kind in getattr(data, "edge_types", [None]):
        given, found = (data, batch) if kind is None else (data[kind], batch[kind])
        ends = [batch, batch] if kind is None else [batch[kind[0]], batch[kind[2]]]
        n_id, e_id = [store.n_id for store in ends], found.e_id
        pairs = zip(n_id, found.edge_index, strict=True)
        pairs = torch.stack([ids[side] for ids, side in pairs])
        assert torch.equal(pairs, given.edge_index[:, e_id])
        sides = zip(given.edge_index, n_id, strict=True)
        inside = torch.stack([torch.isin(side, ids) for side, ids in sides]).all(0)
        assert torch.equal(e_id.sort().values, inside.nonzero().view(-1))
        assert torch.equal(found.edge_attr, given.edge_attr[e_id])
    for whole, found in zip(data.node_stores, batch.node_stores, strict=True):
        for name in {"x", "y", "batch"} & set(whole.keys()):
            assert torch.equal(found[name], whole[name][found.n_id])


# Random parts --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "sizes"), [(graph, [9] * 6 + [6]), (hetero, [10] * 6 + [5])]
)
def test_random_parts_cover_the_nodes(make, sizes):
    data = make()
    data.node_stores[0].batch = data.node_stores[0].x[:, 0] > 0  # as of a Batch
    loader = made(RandomNodeLoader, 7, shuffle=True, seed=1)(data)
    epochs = [list(loader) for _ in range(2)]
    for batches in epochs:
        assert [b.num_nodes for b in batches] == sizes
        for batch in batches:
            check_induced(data, batch)
            assert not hasattr(batch, "batch_size")
        for stores in zip(
            data.node_stores, *(b.node_stores for b in batches), strict=True
        ):
            every = torch.cat([store.n_id for store in stores[1:]])
            assert torch.equal(every.sort().values, torch.arange(stores[0].num_nodes))
    first = (batches[0].node_stores[0].n_id for batches in epochs)
    assert not torch.equal(*first)


# Clusters ------------------------------------------------------------------------------


def test_cluster_data_is_as_pyg_defines_it():
    data = graph()
    for kept in (False, True):
        made = ClusterData(data, 5, method="ldg", keep_inter_cluster_edges=kept)
        assert len(made) == 5
        assert torch.equal(made.node_perm.sort().values, torch.arange(60))
        begin = made.partptr
        for k in range(5):
            node, part = made.node_perm[begin[k] : begin[k + 1]], made[k]
            assert torch.equal(part.x, data.x[node])
            ends, attr = subgraph(node, data.edge_index, data.edge_attr, num_nodes=60)
            if not kept:
                assert part.num_edges == ends.size(1)
                assert torch.allclose(part.edge_attr.sum(0), attr.sum(0), atol=1e-5)
            else:
                sources = torch.isin(data.edge_index[0], node)
                assert part.edge_index.size(1) == int(sources.sum())


@pytest.mark.parametrize("fmt", ["csr", "csc"])
def test_clusters_are_merged_with_the_edges_between_them(fmt):
    data = graph()
    parts = ClusterData(data, 7, sparse_format=fmt)
    batches = list(made(ClusterLoader, batch_size=3, shuffle=True, seed=2)(parts))
    assert len(batches) == 3
    for batch in batches:
        check_induced(data, batch)
    every = torch.cat([b.n_id for b in batches])
    assert torch.equal(every.sort().values, torch.arange(60))
    with pytest.raises(TypeError, match=r"pyg_distcomm\.loader\.ClusterData"):
        ClusterLoader(data)


def test_clusters_and_norms_are_kept_for_another_run(tmp_path):
    data = graph()
    first, again = (
        ClusterData(data, 5, save_dir=str(tmp_path), method=how)
        for how in ("ldg", "random")
    )
    assert torch.equal(first.node_perm, again.node_perm)
    assert torch.equal(first[2].edge_index, again[2].edge_index)
    assert [p.name for p in tmp_path.rglob("*.*")] == ["metis.pt"]
    make = made(GraphSAINTNodeSampler, 9, 3, sample_coverage=5, log=False)
    kept = [make(data, save_dir=str(tmp_path), seed=seed).node_norm for seed in (1, 2)]
    assert torch.equal(*kept)
    assert not torch.equal(make(data, seed=2).node_norm, kept[1])


def test_what_is_kept_is_whole_or_not_there(tmp_path):
    data = graph()
    saint = made(GraphSAINTNodeSampler, 9, 3, sample_coverage=5, log=False)

    def make(folder=tmp_path / "kept"):
        ClusterData(data, 5, save_dir=str(folder), method="ldg")
        return saint(data, save_dir=str(folder)).node_norm

    make(tmp_path / "first")  # compiles loops, which a full disk does not take either
    with (
        pytest.warns(UserWarning, match="not kept: .*make room") as told,
        full_after(9),
    ):
        make()
    assert [str(w.message).split(" are")[0] for w in told] == [
        "clusters",
        "norms of GraphSAINT",
    ]
    assert [p for p in (tmp_path / "kept").rglob("*") if p.is_file()] == []
    make()
    kept = [p for p in (tmp_path / "kept").rglob("*") if p.is_file()]
    assert len(kept) == 2
    for path in kept:
        text = path.read_bytes()
        path.write_bytes(text[: len(text) // 2])
        said = f"{path.name}: cannot be read .*remove it"
        with pytest.raises(ValueError, match=said):
            make()
        path.write_bytes(text)


@worlds.on(2)
def test_clusters_of_a_share_lie_with_one_rank():
    mesh = worlds.mesh()
    data = graph()
    owner = torch.arange(60) % 3 // 2
    made = ClusterData(pdc.partition(data, mesh, owner), 5)
    assert torch.equal(made.node_perm.sort().values, torch.arange(60))
    for k in range(5):
        node = made.node_perm[made.partptr[k] : made.partptr[k + 1]]
        assert owner[node].unique().tolist() == [k // 3]
    for batch in ClusterLoader(made, batch_size=2, options=LoaderOptions(seed=1)):
        check_induced(data, batch)
    with pytest.raises(ValueError, match="give each a cluster"):
        ClusterData(pdc.partition(data, mesh, owner), 1)
    with pytest.raises(TypeError, match="no rank holds the graph"):
        made[0]


# By budgets ---------------------------------------------------------------------------


def _budgets(drawn, data):
    """By a plain loop: what each node not drawn has, and of which type."""
    found = {}
    for source, name, target in data.edge_types:
        ends = data[source, name, target].edge_index.T.tolist()
        into = torch.bincount(data[source, name, target].edge_index[1], minlength=99)
        for u, v in ends:
            if v in drawn[target] and u not in drawn[source]:
                found[source, u] = found.get((source, u), 0) + 1 / int(into[v])
    return found


def test_hgt_draws_by_the_square_of_the_budget():
    data, seeds = hetero(), torch.tensor([3, 7])
    sizes = {"paper": [1, 2], "author": [1]}
    loader = made(HGTLoader, sizes, ("paper", seeds), seed=1)(data)
    for batch in loader:
        check_induced(data, batch)
    budgets = _budgets({"paper": {3, 7}, "author": set()}, data)
    counts = {name: torch.zeros(40) for name in data.node_types}
    for key in range(500):
        inputs = loader.input_data[torch.arange(2)]
        inputs.key = key
        node = loader._draw_nodes([inputs])[0].node
        assert node["paper"][:2].tolist() == [3, 7]
        assert [len(v.unique()) for v in node.values()] == [5, 1]
        counts["paper"][node["paper"][2]] += 1
        counts["author"][node["author"][0]] += 1
    for name, found in counts.items():
        chance = torch.zeros(40)
        for (kind, u), budget in budgets.items():
            chance[u] += budget**2 if kind == name else 0
        likely(found, chance)


# Around roots --------------------------------------------------------------------------


def test_shadow_takes_the_neighbourhoods_of_its_roots():
    data = graph()
    roots = torch.tensor([5, 7, 5, 59])
    batch = next(iter(ShaDowKHopSampler(data, 2, -1, roots, batch_size=4)))
    assert isinstance(batch, Batch)
    assert batch.num_graphs == 4
    assert torch.equal(batch.n_id[batch.root_n_id], roots)
    assert torch.equal(batch.y, data.y[roots])
    for k, root in enumerate(roots.tolist()):
        here = slice(int(batch.ptr[k]), int(batch.ptr[k + 1]))
        assert bool((batch.batch[here] == k).all())
        nodes, _, _, _ = k_hop_subgraph(root, 2, data.edge_index, num_nodes=60)
        n_id = batch.n_id[here]
        assert torch.equal(n_id.sort().values, nodes)
        edges = batch.batch[batch.edge_index[0]] == k
        ends, e_id = batch.edge_index[:, edges], batch.e_id[edges]
        assert torch.equal(batch.n_id[ends], data.edge_index[:, e_id])
        inside = torch.isin(data.edge_index, n_id).all(0)
        assert torch.equal(e_id.sort().values, inside.nonzero().view(-1))
    assert torch.equal(batch.x, data.x[batch.n_id])
    small = next(iter(made(ShaDowKHopSampler, 1, 2, roots, batch_size=4, seed=1)(data)))
    assert int(small.ptr.diff().max()) <= 3


# GraphSAINT ----------------------------------------------------------------------------


def small():
    """A graph whose degrees differ, and where one node has no out-edge."""
    source = torch.tensor([0, 1, 1, 2, 2, 2, 3, 0])
    target = torch.tensor([1, 0, 2, 1, 3, 4, 2, 2])
    return Data(edge_index=torch.stack([source, target]), num_nodes=5)


def test_saint_draws_by_the_chances_of_pyg():
    data = small()
    out = torch.bincount(data.edge_index[0], minlength=5)
    into = torch.bincount(data.edge_index[1], minlength=5)
    nodes = GraphSAINTNodeSampler(data, 3).sample_nodes(20_000, 4)
    likely(torch.bincount(nodes, minlength=5), out)
    sampler = GraphSAINTEdgeSampler(data, 1)
    ends = torch.stack([sampler.sample_nodes(1, key) for key in range(4000)])
    code, edges = ends @ torch.tensor([5, 1]), data.edge_index
    chance = torch.zeros(25).scatter_(
        0, edges[0] * 5 + edges[1], (into[edges[0]] + out[edges[1]]).float()
    )
    likely(torch.bincount(code, minlength=25), chance)
    walks = GraphSAINTRandomWalkSampler(data, 20_000, 2).sample_nodes(20_000, 4)
    first, second, third = walks.view(3, -1)
    step = torch.zeros(5, 5).index_put_(tuple(edges), torch.ones(8), accumulate=True)
    step[4, 4] = 1  # no way out
    step /= step.sum(1, keepdim=True)
    likely(torch.bincount(first, minlength=5), torch.ones(5))
    likely(torch.bincount(first * 5 + second, minlength=25), step.flatten())
    likely(
        torch.bincount(second * 5 + third, minlength=25),
        (step.mean(0)[:, None] * step).flatten(),
    )


def test_saint_subgraphs_and_norms():
    data = graph()
    data.edge_index, data.edge_attr = to_undirected(data.edge_index, data.edge_attr)
    make = made(GraphSAINTNodeSampler, log=False, num_steps=4, seed=1)
    loader = make(data, batch_size=15, sample_coverage=60)
    for batch in loader:
        check_induced(data, batch)
        assert torch.equal(batch.node_norm, loader.node_norm[batch.n_id])
        assert torch.equal(batch.edge_norm, loader.edge_norm[batch.e_id])
    # in closed form: v is in a subgraph unless none of 15 edges leaves it
    source, target = data.edge_index
    share = torch.bincount(source, minlength=60) / data.num_edges
    chance = 1 - (1 - share) ** 15
    there = chance > 0
    ratio = loader.node_norm[there] * 60 * chance[there]
    assert 0.5 < float(ratio.min()) < float(ratio.max()) < 2
    assert abs(float(ratio.mean()) - 1) < 0.05
    both = 1 - (1 - share[source]) ** 15 - (1 - share[target]) ** 15
    both = both + (1 - share[source] - share[target]) ** 15
    wanted = torch.where(source == target, torch.ones(()), chance[source] / both)
    assert abs(float((loader.edge_norm / wanted).median()) - 1) < 0.15
    # sources alone are drawn, one at a time: no edge is ever met, though its source is
    star = Data(edge_index=torch.tensor([[0, 0, 0, 1], [1, 2, 3, 0]]), num_nodes=4)
    loader = make(star, batch_size=1, sample_coverage=20)
    assert loader.edge_norm.tolist() == [1e4] * 4


# Classes -------------------------------------------------------------------------------


def test_classes_are_drawn_alike():
    data = graph(n=200)
    data.y = (torch.arange(200) % 20 == 0).long()
    mask = torch.arange(200) % 2 == 0
    sampler = ImbalancedSampler(data, input_nodes=mask, num_samples=500)
    options = {"batch_size": 50, "sampler": sampler, "shuffle": False}
    loader = nodes(data, [2], input_nodes=mask, **options)
    assert len(loader) == 10
    seeds = [b.n_id[: b.batch_size] for _ in range(4) for b in loader]
    every = torch.cat(seeds)
    assert bool(mask[every].all())
    likely(torch.bincount(data.y[every], minlength=2), torch.ones(2))
    assert not torch.equal(seeds[0], seeds[10])
    with pytest.raises(ValueError, match="the same input_nodes"):
        NeighborLoader(data, [2], batch_size=50, sampler=sampler)


# Refusals ------------------------------------------------------------------------------


def test_what_cannot_be_is_refused():
    data, saint = graph(), GraphSAINTNodeSampler
    named = Data(**{**data.to_dict(), "node_norm": data.y})
    for kind, told, make, *given in (
        (ValueError, "rename them", saint, named, 3),
        (ValueError, "num_steps must be 0 or more, got -1", saint, data, 3, -1),
        (TypeError, "batch_size must be a whole number", saint, data, 2.5),
        (TypeError, "takes a HeteroData", HGTLoader, data, [2], None),
        (ValueError, "node types are", HGTLoader, hetero(), {"venue": [2]}, "paper"),
        (TypeError, "takes a Data", ShaDowKHopSampler, hetero(), 1, 2),
        (TypeError, "takes a Data with an edge_index", ClusterData, hetero(), 2),
    ):
        with pytest.raises(kind, match=told):
            make(*given)
    with pytest.raises(NotImplementedError, match="base class"):
        next(iter(GraphSAINTSampler(data, 3)))


# Held wrong on one rank -----------------------------------------------------------------


@worlds.on(2)
def test_what_is_wrong_on_one_rank_is_told_to_all():
    mesh, data = worlds.mesh(), graph()
    share = pdc.partition(data, mesh, "block")
    typed = pdc.partition(hetero(), mesh, "block")
    bad = mesh.rank == 1
    with pytest.raises(ValueError, match="num_parts must be at least 1, got 0"):
        RandomNodeLoader(share, 0 if bad else 3)
    with pytest.raises(ValueError, match="leave input_nodes out"):
        RandomNodeLoader(share, 3, input_nodes=torch.arange(3) if bad else None)
    with pytest.raises(ValueError, match="topology='partitioned'"):
        GraphSAINTNodeSampler(
            share, 5, options=LoaderOptions(topology="partitioned" if bad else "auto")
        )
    with pytest.raises(ValueError, match="batch_size must be 1 or more, got 0"):
        GraphSAINTNodeSampler(share, 0 if bad else 5, sample_coverage=2)
    with pytest.raises(ValueError, match="all ranks the same numbers"):
        GraphSAINTNodeSampler(share, 5, num_steps=3 if bad else 4)
    with pytest.raises(ValueError, match=r"num_samples must be 0 or more, got \[-3\]"):
        HGTLoader(typed, [-3 if bad else 3], input_nodes="paper", batch_size=4)
    cluster = torch.arange(int(data.num_nodes)) % 3
    with pytest.raises(ValueError, match="the same method: it is block on rank 0"):
        ClusterData(share, 3, method=cluster if bad else "block")
    with pytest.raises(ValueError, match="owner has 59 entries"):
        ClusterData(share, 3, method=cluster[1:] if bad else cluster)

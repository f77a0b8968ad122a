"""Minibatches hold what they should, and are a function of (seed, epoch, number)."""

import numpy as np
import pytest
import tiers
import torch
import worlds
from alike import whole
from batches import all_same, check, graph, hetero, ids, links, made, nodes, same
from torch_geometric.data import Data
from torch_geometric.loader.neighbor_sampler import EdgeIndex
from torch_geometric.sampler import NegativeSampling, NodeSamplerInput, neighbor_sampler
from torch_geometric.testing import MyFeatureStore, MyGraphStore

import pyg_distcomm as pdc
from pyg_distcomm.loader import DistLayerLoader, NeighborLoader, NeighborSampler
from pyg_distcomm.sampling import KeyedNeighborSampler

WRITES = ("author", "writes", "paper")


KINDS = {
    "nodes": nodes,
    "bidirectional": lambda **kw: nodes(subgraph_type="bidirectional", **kw),
    "disjoint": lambda **kw: nodes(disjoint=True, replace=True, **kw),
    "hetero": lambda **kw: nodes(
        hetero(), input_nodes=("paper", torch.arange(20)), **kw
    ),
    "links": links,
    "binary": lambda **kw: links(neg_sampling="binary", **kw),
    "triplet": lambda **kw: links(neg_sampling=NegativeSampling("triplet", 2), **kw),
    "hetero binary": lambda **kw: links(
        hetero(), edge_label_index=WRITES, neg_sampling="binary", **kw
    ),
}
WAYS = [
    {"bulk_size": 1, "prefetch": 3},
    {"bulk_size": 3, "prefetch": 0},
    {"bulk_size": 100},
    {"filter_per_worker": True},
    {"num_workers": 2, "filter_per_worker": False},
    {"num_workers": 2, "filter_per_worker": True, "persistent_workers": True},
]


@tiers.parametrize("kind", list(KINDS), slice(0, None, 6))
def test_batches_do_not_depend_on_how_they_are_made(kind):
    made = KINDS[kind]()
    first, second = list(made), list(made)
    assert len(first) == len(made) > 1
    for way in WAYS:
        other = KINDS[kind](**way)
        all_same(first, other)
        all_same(second, other)
        if other.persistent_workers:  # as garbage torch waits for 5 s for each of them
            other._iterator._shutdown_workers()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        all_same(first, KINDS[kind]())
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("shuffle", [False, True])
def test_epochs_and_seeds_differ_and_repeat(shuffle):
    loader = nodes(shuffle=shuffle)
    one, two = ids(loader), ids(loader)
    assert not torch.equal(one, two)
    loader.set_epoch(0)
    assert torch.equal(ids(loader), one)
    assert torch.equal(ids(loader), two)
    assert not torch.equal(ids(nodes(shuffle=shuffle, seed=2)), one)
    order = torch.cat([batch.input_id for batch in loader])
    assert torch.equal(order, torch.arange(60)) != shuffle
    assert torch.equal(order.sort().values, torch.arange(60))


@pytest.mark.parametrize("disjoint", [False, True])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("fan_outs", [(3, 2), (-1,), (2, 0, 3), (1, -1, 2), (100, 1)])
def test_batches_follow_the_rule(fan_outs, replace, disjoint):
    data = graph()
    loader = nodes(data, fan_outs, replace=replace, disjoint=disjoint)
    for batch in loader:
        check(data, batch, fan_outs, replace)
        assert torch.equal(batch.n_id[: batch.batch_size], batch.input_id)
        if disjoint:
            trees = batch.batch[: batch.batch_size]
            assert torch.equal(trees, torch.arange(batch.batch_size))


def test_nothing_to_draw_from():
    empty = Data(x=torch.ones(5, 2), edge_index=torch.empty(2, 0, dtype=torch.long))
    still = {"shuffle": False}  # torch's DataLoader does not shuffle nothing
    (batch,) = nodes(empty, **still)
    assert torch.equal(batch.n_id, torch.arange(5))
    assert (batch.num_edges, batch.num_sampled_edges) == (0, [0, 0])
    none = torch.empty(2, 0, dtype=torch.long)
    void = Data(x=torch.ones(0, 2), edge_index=none, num_nodes=0)
    for loader in (
        nodes(empty, input_nodes=none[0], **still),
        nodes(input_nodes=torch.zeros(60, dtype=torch.bool), **still),
        links(edge_label_index=none, neg_sampling="binary", **still),
        nodes(void, **still),
    ):
        assert list(loader) == []


def test_narrow_edges_stay_narrow():
    data, wide = graph(), list(nodes())
    data.edge_index = data.edge_index.int()
    for batch, other in zip(nodes(data), wide, strict=True):
        assert batch.edge_index.dtype == torch.int32
        assert torch.equal(batch.edge_index.long(), other.edge_index)
        assert torch.equal(batch.e_id, other.e_id)
        assert torch.equal(batch.x, other.x)


def test_sorted_edges_are_drawn_alike():
    data = graph()
    order = data.edge_index[1].argsort(stable=True)
    data.edge_index, data.edge_attr = data.edge_index[:, order], data.edge_attr[order]
    all_same(nodes(data), nodes(data, is_sorted=True))


def test_induced_and_bidirectional():
    data = graph()
    plain = list(nodes(data))
    for batch, other in zip(nodes(data, subgraph_type="induced"), plain, strict=True):
        assert torch.equal(batch.n_id, other.n_id)
        inside = torch.isin(data.edge_index, batch.n_id).all(0).nonzero().view(-1)
        assert torch.equal(batch.e_id.sort().values, inside)
        assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])
        assert torch.equal(batch.edge_attr, data.edge_attr[batch.e_id])
    both = nodes(data, subgraph_type="bidirectional")
    for batch, other in zip(both, plain, strict=True):
        pairs = set(map(tuple, batch.edge_index.T.tolist()))
        drawn = set(map(tuple, other.edge_index.T.tolist()))
        assert pairs == drawn | {(v, u) for u, v in drawn}
    with pytest.warns(UserWarning, match="directed"):
        all_same(nodes(data, directed=False), nodes(data, subgraph_type="induced"))


def test_heterogeneous_batches():
    data = hetero()
    fan_outs = {key: [2, 3] for key in data.edge_types}
    fan_outs["paper", "cites", "paper"] = [0, -1]
    for batch in made(NeighborLoader, fan_outs, "paper", batch_size=9, seed=2)(data):
        for name in data.node_types:
            assert torch.equal(batch[name].x, data[name].x[batch[name].n_id])
            assert sum(batch[name].num_sampled_nodes) == batch[name].n_id.numel()
            assert batch[name].n_id.unique().numel() == batch[name].n_id.numel()
        for key in data.edge_types:
            store, ends = batch[key], batch[key].edge_index
            found = torch.stack(
                [batch[key[0]].n_id[ends[0]], batch[key[2]].n_id[ends[1]]]
            )
            assert torch.equal(found, data[key].edge_index[:, store.e_id])
            assert torch.equal(store.edge_attr, data[key].edge_attr[store.e_id])
            assert store.e_id.unique().numel() == store.e_id.numel()
        into = torch.bincount(data[WRITES].edge_index[1], minlength=40).clamp(max=2)
        seeds = batch["paper"].n_id[: batch["paper"].batch_size]
        assert batch["paper", "cites", "paper"].num_sampled_edges[0] == 0
        assert batch[WRITES].num_sampled_edges[0] == int(into[seeds].sum())


def stores(data):
    """A store of rows, and one of edges: those of a graph without types have none."""
    typed = hasattr(data, "node_types")
    features, edges = MyFeatureStore(), MyGraphStore()
    for name in data.node_types if typed else [None]:
        features.put_tensor((data[name] if typed else data).x, name, "x", None)
    for key in data.edge_types if typed else [None]:
        store = data[key] if typed else data
        edges.put_edge_index(
            tuple(store.edge_index), edge_type=key, layout="coo", size=store.size()
        )
    return features, edges


@pytest.mark.parametrize("ptr", [[1, 1, 2, 3, 4], [0, 3, 2, 3, 4], [0, 1, 2, 4]])
def test_edges_that_do_not_fit_or_are_missing_are_refused_by_type(ptr):
    features, edges = MyFeatureStore(), MyGraphStore()
    features.put_tensor(torch.ones(4, 1), "a", "x", None)
    ends, key = (torch.tensor([1, 2, 3, 0]), torch.tensor(ptr)), ("a", "to", "a")
    edges.put_edge_index(ends, edge_type=key, layout="csc", size=(4, 4))
    with pytest.raises(ValueError, match=r"\('a', 'to', 'a'\): got . offsets"):
        nodes((features, edges), input_nodes=("a", torch.arange(4)))
    data = hetero()
    data["author", "edits", "paper"].edge_index = data[WRITES].edge_index
    with pytest.raises(ValueError, match=r"got .'author', 'paper'"):  # one of two types
        links(data, edge_label_index=("author", "paper"))
    data[WRITES].edge_indices = data[WRITES].pop("edge_index")
    with pytest.raises(ValueError, match="and no edges"):
        nodes(data, input_nodes=("paper", torch.arange(4)))


def test_feature_and_graph_stores():
    data = graph()
    loader = nodes(stores(data), input_nodes=torch.arange(60))
    for batch, other in zip(loader, nodes(data), strict=True):
        assert torch.equal(batch.input_id, other.input_id)
        ends = batch.n_id[batch.edge_index]
        assert torch.equal(ends, data.edge_index[:, batch.e_id])
        assert torch.equal(batch.x, data.x[batch.n_id])
        assert batch.num_sampled_edges[0] == other.num_sampled_edges[0] > 0
    data = hetero()
    for batch in nodes(stores(data), input_nodes=("paper", torch.arange(40))):
        for name in data.node_types:
            assert torch.equal(batch[name].x, data[name].x[batch[name].n_id])
        ends = batch[WRITES].edge_index
        pairs = batch["author"].n_id[ends[0]] * 40 + batch["paper"].n_id[ends[1]]
        known = data[WRITES].edge_index
        assert torch.isin(pairs, known[0] * 40 + known[1]).all()
        assert pairs.numel() > 0


@tiers.cover(
    ("columns", "dtype"),
    [(), (1,), (3,), (2, 4), (0,)],
    [torch.bool, torch.uint8, torch.float16, torch.float64, torch.complex64],
)
def test_features_of_any_type(dtype, columns):
    data = graph()
    flat = torch.randint(0, 2, (1 + data.x.new_empty(60, *columns).numel(),))
    data.feature = flat.to(dtype)[1:].view(60, *columns)  # where words do not begin
    data.scaled = torch.randn(60, 2, requires_grad=True)
    for batch in nodes(data):
        same(batch.feature, data.feature[batch.n_id])
        assert torch.equal(batch.scaled, data.scaled[batch.n_id])


def test_transforms():
    def fewer(out):
        out.edge, out.row, out.col = out.edge[:1], out.row[:1], out.col[:1]
        return out

    def tagged(batch):
        batch.tag = int(batch.n_id[0])
        return batch

    for workers in (0, 2):
        loader = nodes(
            transform=tagged, transform_sampler_output=fewer, num_workers=workers
        )
        for batch, other in zip(loader, nodes(), strict=True):
            assert batch.tag == int(other.n_id[0])
            assert torch.equal(batch.e_id, other.e_id[:1])
            assert torch.equal(batch.x, other.x)


def test_binary_negatives():
    data = graph()
    for batch in links(data, neg_sampling=NegativeSampling("binary", 1.5)):
        count = batch.input_id.numel()
        assert batch.edge_label.tolist() == [1.0] * count + [0.0] * int(1.5 * count)
        ends = batch.n_id[batch.edge_label_index]
        assert torch.equal(ends[:, :count], data.edge_index[:, batch.input_id])
        assert ends[:, count:].unique().numel() > 40
        assert torch.equal(batch.x, data.x[batch.n_id])


def test_triplets():
    data = graph()
    weight = torch.zeros(60)
    weight[[2, 57]] = torch.tensor([1.0, 2.0])
    negatives = NegativeSampling("triplet", 2, dst_weight=weight)
    for batch in links(data, neg_sampling=negatives):
        ends = torch.stack([batch.src_index, batch.dst_pos_index])
        assert torch.equal(batch.n_id[ends], data.edge_index[:, batch.input_id])
        assert batch.dst_neg_index.numel() == 2 * batch.input_id.numel()
        assert batch.n_id[batch.dst_neg_index].unique().tolist() == [2, 57]


def test_calls_draw_anew_but_repeat_from_a_seed():
    one, two = nodes(), nodes()
    first, second = one([0, 1, 2]), one([0, 1, 2])
    assert not torch.equal(first.e_id, second.e_id)
    same(two([0, 1, 2]), first)
    same(two(torch.tensor([0, 1, 2])), second)
    check(one.data, first, (3, 2))
    for pair in pdc.loader.ZipLoader([one, links()], batch_size=7, num_workers=1):
        assert [type(batch) for batch in pair] == [Data, Data]


# What scripts may do --------------------------------------------------------------------


def test_what_pyg_says_of_a_batch_wins_over_attributes_of_the_same_name():
    data = graph()
    data.edge_label, data.batch = torch.arange(400) + 1000, torch.zeros(60).long()
    data.input_id = torch.arange(60) + 500
    some = {"edge_label_index": data.edge_index[:, :40], "edge_label": torch.arange(40)}
    labels = torch.cat([b.edge_label for b in links(data, shuffle=False, **some)])
    assert torch.equal(labels, torch.arange(40))
    batch = next(iter(nodes(data, shuffle=False)))
    assert batch.input_id.tolist() == [*range(7)]
    assert batch.batch is None


def test_edits_of_the_data_do_not_reach_a_loader_that_is_built():
    data = graph()
    order = data.edge_index[1].argsort(stable=True)
    data.edge_index = data.edge_index[:, order].contiguous()
    loader = nodes(data, is_sorted=True)
    before = ids(loader)
    data.edge_index[0] = 10**12
    loader.set_epoch(0)
    assert torch.equal(ids(loader), before)
    with pytest.raises(ValueError, match="source nodes"):
        nodes(data, is_sorted=True)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("filter_per_worker", [True, False])
def test_methods_of_a_subclass_are_called(workers, filter_per_worker):
    class Mine(NeighborLoader):
        def collate_fn(self, index):
            out = super().collate_fn(index)
            out.touched = True
            return out

        def filter_fn(self, out):
            data = super().filter_fn(out)
            data.filtered = True
            return data

    data = graph()
    ways = {"num_workers": workers, "filter_per_worker": filter_per_worker}
    for batch in Mine(data, [2], batch_size=20, **ways):
        assert batch.filtered
        assert torch.equal(batch.x, data.x[batch.n_id])
        assert "touched" in batch if filter_per_worker else True


def test_samplers_go_backward_and_in_both_directions(monkeypatch):
    data, inputs = hetero(), NodeSamplerInput(None, torch.arange(10))
    inputs.input_type = "author"
    for fan_out in ([-1], {kind: [-1] for kind in data.edge_types}):
        sampler = KeyedNeighborSampler(data, fan_out, sample_direction="backward")
        found = sampler.sample_from_nodes(inputs).edge[WRITES].sort()[0]
        assert torch.equal(found, (data[WRITES].edge_index[0] < 10).nonzero().view(-1))
    monkeypatch.setattr(neighbor_sampler, "NeighborSampler", KeyedNeighborSampler)
    both = neighbor_sampler.BidirectionalNeighborSampler(graph(), [-1])
    out = both.sample_from_nodes(NodeSamplerInput(None, torch.arange(10)))
    wanted = (graph().edge_index < 10).any(0).nonzero().view(-1)
    assert torch.equal(out.edge.unique(), wanted)


@pytest.mark.parametrize("as_given", [np.array, list])
def test_masks_and_ids_that_are_no_tensors(as_given):
    mask = as_given([k < 4 for k in range(60)])
    for kind in (NeighborLoader, DistLayerLoader):
        (batch,) = kind(graph(), [2], input_nodes=mask, batch_size=9)
        assert batch.n_id[:4].tolist() == [0, 1, 2, 3]
        for bad in ([1.5], [[1, 2]], {1}):
            with pytest.raises(ValueError, match="vector of node ids, or a mask"):
                kind(graph(), [2], input_nodes=bad)
        assert not len(kind(graph(), [2], input_nodes=[]))


# NeighborSampler yields what PyG's does with torch-sparse, which is not needed -------


def expected(edges, batch, sizes):
    """What torch-sparse samples with sizes of -1: rows in order, columns as they arrive."""
    nodes, found = batch.tolist(), []
    for _ in sizes:
        targets, place = list(nodes), {node: k for k, node in enumerate(nodes)}
        ends = []
        for row, node in enumerate(targets):
            into = (edges[1] == node).nonzero().view(-1).tolist()
            here = []
            for e in sorted(into, key=lambda e: (int(edges[0, e]), e)):
                source = int(edges[0, e])
                if source not in place:
                    place[source] = len(nodes)
                    nodes.append(source)
                here.append((place[source], row, e))
            ends += sorted(here)
        found.append((torch.tensor(ends).view(-1, 3).T, (len(nodes), len(targets))))
    return torch.tensor(nodes), found[::-1]


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("size", [1, 2])
@worlds.on()
def test_all_neighbours_come_in_torch_sparses_order(size, cut):
    mesh = worlds.mesh()
    data = graph()
    given = pdc.partition(data, mesh, "random") if cut else data
    loader = NeighborSampler(given.edge_index, [-1, -1], num_nodes=60, batch_size=7)
    for k, (size, n_id, adjs) in enumerate(loader):
        batch = torch.arange(60)[7 * k : 7 * k + 7]
        nodes, layers = expected(data.edge_index, batch, [-1, -1])
        assert size == len(batch)
        assert torch.equal(n_id, nodes)
        for adj, (want, shape) in zip(adjs, layers, strict=True):
            assert isinstance(adj, EdgeIndex)
            assert adj.size == shape
            assert torch.equal(adj.edge_index, want[:2])
            assert torch.equal(adj.e_id, want[2])
        assert torch.equal(whole(given.x[n_id]), data.x[n_id])
    assert k == 8


def test_neighbours_are_drawn_without_replacement_by_torchs_generator():
    data, drawn = graph(), []
    into = torch.bincount(data.edge_index[1], minlength=60)
    for _ in range(2):
        torch.manual_seed(0)
        loader = NeighborSampler(data.edge_index, [3], num_nodes=60, batch_size=60)
        epochs = [next(iter(loader)) for _ in range(200)]
        drawn.append([adj.e_id for _, _, adj in epochs])
    assert all(map(torch.equal, *drawn))
    counts = torch.zeros(400)
    for _, n_id, adj in epochs:
        assert torch.equal(
            torch.bincount(adj.edge_index[1], minlength=60), into.clamp(max=3)
        )
        ends = torch.stack([n_id[adj.edge_index[0]], adj.edge_index[1]])
        assert torch.equal(data.edge_index[:, adj.e_id], ends)
        assert len(adj.e_id.unique()) == len(adj.e_id)
        counts[adj.e_id] += 1
    chance = (3 / into.clamp(min=3))[data.edge_index[1]]
    assert float((counts / 200 - chance).abs().max()) < 0.2


def test_arguments_are_pygs():
    edges = graph().edge_index
    seeds = torch.tensor([3, 5, 58])
    mask = torch.zeros(60, dtype=torch.bool).index_fill_(0, seeds, True)
    for node_idx in (seeds, mask):
        loader = NeighborSampler(edges, [2, -1], node_idx, return_e_id=False)
        found = list(loader)
        assert [int(n_id[0]) for _, n_id, _ in found] == seeds.tolist()
        assert all(adj.e_id is None for _, _, adjs in found for adj in adjs)
    matrix = torch.sparse_coo_tensor(
        edges.flip(0), torch.ones(400), (60, 60)
    ).coalesce()
    turned = NeighborSampler(matrix.to_sparse_csr(), [-1], batch_size=60)
    _, _, adj = next(iter(turned))
    assert torch.equal(matrix.indices()[0, adj.e_id], adj.edge_index[1])
    loader = NeighborSampler(edges, [1], batch_size=9, transform=lambda *out: out[0])
    assert sum(loader) == int(edges.max()) + 1
    loader = NeighborSampler(edges, [-1], shuffle=True, batch_size=56, num_workers=0)
    assert next(iter(loader))[1].sort().values.tolist() == list(range(56))
    assert list(NeighborSampler(torch.empty(2, 0).long(), [2])) == []

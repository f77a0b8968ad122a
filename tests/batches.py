"""Graphs to load minibatches from, and what a minibatch has to be."""

import dataclasses

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import SamplerOutput

import pyg_distcomm as pdc
from pyg_distcomm import loader
from pyg_distcomm.kernels.sample_ops import Minibatch

OURS = {field.name for field in dataclasses.fields(loader.LoaderOptions)}


def arguments(**given):
    """Returns the arguments of a loader, with those that PyG lacks as its options."""
    ours = {name: value for name, value in given.items() if name in OURS}
    theirs = {name: value for name, value in given.items() if name not in OURS}
    return theirs | ({"options": loader.LoaderOptions(**ours)} if ours else {})


def made(kind, *args, **options):
    """Returns what makes loaders of a kind, given a graph and more options."""

    def make(data, **more):
        return kind(data, *args, **arguments(**{**options, **more}))

    return make


def clusters(data, **options):
    n = data.num_nodes
    parts = loader.ClusterData(data, 7, method=torch.arange(n) * 7 // n)
    return made(loader.ClusterLoader, batch_size=2, shuffle=True)(parts, **options)


def classes(data, **options):
    sampler = loader.ImbalancedSampler(data)
    return made(loader.NeighborLoader, [3], batch_size=7, sampler=sampler)(
        data, **options
    )


SEEDS = ("paper", torch.arange(30))
SUBGRAPHS = {
    "random": made(loader.RandomNodeLoader, 7, shuffle=True),
    "clusters": clusters,
    "shadow": made(loader.ShaDowKHopSampler, 2, 3, batch_size=9, shuffle=True),
    "saint_nodes": made(loader.GraphSAINTNodeSampler, 9, 5, 20, log=False),
    "saint_edges": made(loader.GraphSAINTEdgeSampler, 9, 5),
    "saint_walks": made(loader.GraphSAINTRandomWalkSampler, 4, 3, 5),
}
LOADERS = {
    "nodes": made(loader.NeighborLoader, [3, 2], batch_size=7, shuffle=True),
    "links": made(
        loader.LinkNeighborLoader,
        [2],
        batch_size=50,
        shuffle=True,
        neg_sampling="binary",
    ),
    "layers": made(loader.DistLayerLoader, [5, 5], batch_size=9, shuffle=True),
    "classes": classes,
    **SUBGRAPHS,
    "types": made(loader.HGTLoader, [4, 3], SEEDS, batch_size=6, shuffle=True),
    "types, random": made(loader.RandomNodeLoader, 4, shuffle=True),
}


def graph_of(kind):
    return hetero() if kind.startswith("types") else graph()


def nodes(data=None, fan_outs=(3, 2), **options):
    options = {"batch_size": 7, "shuffle": True, "seed": 1, **options}
    data = graph() if data is None else data
    return loader.NeighborLoader(data, list(fan_outs), **arguments(**options))


def links(data=None, fan_outs=(3, 2), **options):
    options = {"batch_size": 60, "shuffle": True, "seed": 1, **options}
    data = graph() if data is None else data
    return loader.LinkNeighborLoader(data, list(fan_outs), **arguments(**options))


def graph(n=60, e=400, seed=3):
    """A multigraph whose last four nodes have no edges."""
    g = torch.Generator().manual_seed(seed)
    ends = torch.randint(max(n - 4, 1), (2, e), generator=g)
    return Data(
        x=torch.randn(n, 5, generator=g),
        y=torch.randint(4, (n,), generator=g),
        edge_index=ends,
        edge_attr=torch.randn(e, 2, generator=g),
        num_nodes=n,
    )


def hetero(seed=4):
    g = torch.Generator().manual_seed(seed)
    data = HeteroData(name="a graph-level attribute")
    sizes = {"paper": 40, "author": 25}
    for name, n in sizes.items():
        data[name].x = torch.randn(n, 3, generator=g)
    for source, name, target in (
        ("paper", "cites", "paper"),
        ("author", "writes", "paper"),
        ("paper", "written", "author"),
    ):
        ends = [
            torch.randint(sizes[end], (200,), generator=g) for end in (source, target)
        ]
        data[source, name, target].edge_index = torch.stack(ends)
        data[source, name, target].edge_attr = torch.randn(200, 2, generator=g)
    return data


def rich():
    """Its nodes with a mask and times, its edges with times, and with weights, some zero."""
    data = graph()
    g = torch.Generator().manual_seed(1)
    data.train_mask = torch.arange(data.num_nodes) % 3 == 0
    data.name = "a graph-level attribute"
    data.time = torch.randint(50, (data.num_nodes,), generator=g)
    data.edge_time = torch.rand(data.num_edges, generator=g)
    data.weight = torch.rand(data.num_edges, generator=g) + 0.1
    data.weight[::7] = 0.0
    into = torch.zeros(data.num_nodes).index_add(0, data.edge_index[1], data.weight)
    data.weight[into[data.edge_index[1]] == 0] = 1.0
    return data


def timed_types():
    data = hetero()
    g = torch.Generator().manual_seed(1)
    for name in data.node_types:
        data[name].time = torch.randint(50, (data[name].num_nodes,), generator=g)
    return data


def owners(n, size, seed=0):
    """Owners at random; the last rank of several has no nodes at all."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(max(size - 1, 1), (n,), generator=g)


def share_of(data, mesh):
    """The share of a graph that is cut by such owners."""
    if isinstance(data, Data):
        return pdc.partition(data, mesh, owners(data.num_nodes, mesh.size))
    types = enumerate(data.node_types)
    cut = {t: owners(data[t].num_nodes, mesh.size, k) for k, t in types}
    return pdc.partition(data, mesh, cut)


def same(one, two):
    """Asserts that two minibatches, or parts of them, are equal bit for bit."""
    assert one.__class__ is two.__class__
    if isinstance(one, Tensor):
        assert one.dtype == two.dtype
        assert torch.equal(one, two)
    elif isinstance(one, (Data, HeteroData)):
        same(one.to_dict(), two.to_dict())
    elif isinstance(one, (Minibatch, SamplerOutput)):
        same(vars(one), vars(two))
    elif isinstance(one, (list, tuple)):
        all_same(one, two)
    elif isinstance(one, dict):
        assert list(one) == list(two)
        for key in one:
            same(one[key], two[key])
    else:
        assert one == two


def all_same(one, two):
    for a, b in zip(one, two, strict=True):
        same(a, b)


def equal_epochs(whole, part, count=2):
    """Asserts that two loaders yield the same minibatches."""
    assert len(whole) == len(part)
    ones, twos = ([b for _ in range(count) for b in loader] for loader in (whole, part))
    for one, two in zip(ones, twos, strict=True):
        assert one.num_nodes == two.num_nodes
        a, b = ({**d.to_dict(), "num_nodes": 0} for d in (one, two))
        assert set(a) == set(b)
        for key, value in a.items():
            same(value, b[key])


def check(data, batch, fan_outs, replace=False, candidates=None):
    """Asserts that a minibatch is what the rule of sampling says, node by node.

    `candidates` is a mask of the edges that may be drawn (default: all).
    """
    n_id, e_id, (source, target) = batch.n_id, batch.e_id, batch.edge_index
    assert torch.equal(n_id[batch.edge_index], data.edge_index[:, e_id])
    assert torch.equal(batch.x, data.x[n_id])
    assert torch.equal(batch.y, data.y[n_id])
    assert torch.equal(batch.edge_attr, data.edge_attr[e_id])
    nodes, edges = batch.num_sampled_nodes, batch.num_sampled_edges
    assert (nodes[0], len(edges)) == (batch.batch_size, len(fan_outs))
    assert (sum(nodes), sum(edges)) == (n_id.numel(), e_id.numel())
    trees = torch.zeros_like(n_id) if batch.batch is None else batch.batch
    assert torch.equal(trees[source], trees[target])
    found = torch.stack([trees, n_id])[:, nodes[0] :]  # seeds may be given twice
    assert found.unique(dim=1).size(1) == found.size(1)
    chosen = torch.ones(data.num_edges, dtype=torch.bool)
    chosen = chosen if candidates is None else candidates
    into = torch.bincount(data.edge_index[1, chosen], minlength=data.num_nodes)
    assert bool(chosen[e_id].all())
    begin, first = 0, 0
    for hop, k in enumerate(fan_outs):
        end, last = begin + nodes[hop], first + edges[hop]
        drawn = torch.bincount(target[first:last], minlength=n_id.numel())
        want = into[n_id[begin:end]]
        if k >= 0:
            want = torch.where(want > 0, k, 0) if replace else want.clamp(max=k)
        assert torch.equal(drawn[begin:end], want)  # expanded once, each at its hop
        assert int(drawn.sum()) == int(want.sum())
        assert not edges[hop] or int(source[first:last].max()) < end + nodes[hop + 1]
        begin, first = end, last
    if not replace:
        pairs = torch.stack([target, e_id])
        assert pairs.unique(dim=1).size(1) == e_id.numel()


def ids(loader):
    """The edges of all minibatches of an epoch."""
    return torch.cat([batch.e_id for batch in loader])

"""Graphs with teeth, each a PyG Data in float64 with x, y, masks and edge weights."""

import torch
from torch_geometric.data import Data, HeteroData


def _data(n, edge_index, f=7, classes=4, seed=0, train=0.4):
    g = torch.Generator().manual_seed(seed)
    e = edge_index.size(1)
    weight = torch.randn(e, generator=g, dtype=torch.float64)
    weight = torch.where(torch.rand(e, generator=g) < 0.1, 0.0, weight.abs() + 0.1)
    return Data(
        x=torch.randn(n, f, generator=g, dtype=torch.float64),
        y=torch.randint(0, classes, (n,), generator=g),
        edge_index=edge_index,
        edge_weight=weight,
        edge_attr=torch.randn(e, 3, generator=g, dtype=torch.float64),
        train_mask=torch.rand(n, generator=g) < train,
        num_nodes=n,
    )


def directed(n=60, e=240, seed=1):
    g = torch.Generator().manual_seed(seed)
    return _data(n, torch.randint(0, n, (2, e), generator=g))


def undirected(n=50, e=120, seed=2):
    g = torch.Generator().manual_seed(seed)
    half = torch.randint(0, n, (2, e), generator=g)
    return _data(n, torch.cat([half, half.flip(0)], 1))


def star(n=40):
    leaves = torch.arange(1, n)
    hub = torch.zeros_like(leaves)
    return _data(n, torch.stack([torch.cat([leaves, hub]), torch.cat([hub, leaves])]))


def isolated(n=30):
    return _data(n, torch.tensor([[0, 1, 2, 28], [1, 2, 0, 27]]))


def loops_and_copies(n=24, seed=3):
    g = torch.Generator().manual_seed(seed)
    some = torch.randint(0, n, (2, 60), generator=g)
    loops = torch.arange(0, n, 3).repeat(2, 1)
    return _data(n, torch.cat([some, loops, some[:, :20], loops[:, :2]], 1))


def tiny(n=3):
    return _data(n, torch.tensor([[0, 1, 2], [1, 2, 0]]), train=1.1)


def edgeless(n=12):
    return _data(n, torch.empty(2, 0, dtype=torch.long))


def negative(n=40, seed=5):
    """Weights below zero: PyG's normalisation gives NaN where a degree is negative."""
    data = undirected(n, 100, seed)
    data.edge_weight = data.edge_weight.clone()
    data.edge_weight[::7] *= -0.05
    return data


def two_types():
    """A graph of 20 and 10 nodes of two types, and edges both ways."""
    g, data = torch.Generator().manual_seed(0), HeteroData()
    for kind, n in (("a", 20), ("b", 10)):
        data[kind].x = torch.randn(n, 4, generator=g)
    ends = [torch.randint(n, (40,), generator=g) for n in (20, 10)]
    data["a", "to", "b"].edge_index = torch.stack(ends)
    data["b", "of", "a"].edge_index = torch.stack(ends[::-1])
    return data


GRAPHS = {
    f.__name__: f
    for f in (
        directed,
        undirected,
        star,
        isolated,
        loops_and_copies,
        tiny,
        edgeless,
        negative,
    )
}


def owners(name, data, size, seed=0):
    """An owner vector with teeth, or the name of a cutter."""
    n = data.num_nodes
    if name == "empty_rank":  # the last rank owns nothing
        return torch.arange(n) % max(1, size - 1)
    if name == "no_train":  # rank 0 has every training node there is
        rest = torch.arange(n) % max(1, size - 1) + min(1, size - 1)
        return torch.where(data.train_mask, 0, rest)
    if name == "lopsided":
        return (torch.arange(n) == n - 1).long() * (size - 1)
    return name


CUTTERS = ("metis", "ldg", "random", "block", "empty_rank", "no_train", "lopsided")


def grids(size):
    return [
        (r, s, size // (r * s))
        for r in range(1, size + 1)
        for s in range(1, size + 1)
        if size % (r * s) == 0
    ]


def some_grids(size):
    """All grids of up to four ranks; of more, a third, and those with three axes."""
    every = grids(size)
    return every if size <= 4 else [g for g in every if min(g) > 1] + every[::3]

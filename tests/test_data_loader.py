"""DataLoader on several ranks takes what it takes on one, and draws as PyG's does."""

import io
import itertools
import multiprocessing
import random

import alike
import pytest
import tiers
import torch
import torch_geometric.loader
import torch_geometric.nn as pyg
import worlds
from torch_geometric.data import Batch, Data, HeteroData, TemporalData
from tqdm.auto import tqdm

import pyg_distcomm as pdc
import pyg_distcomm.loader
import pyg_distcomm.nn as nn

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")

COUNTS = (3, 5, 1, 4, 7, 2, 6)
RANKS = pytest.mark.parametrize("size", [2, tiers.rarely(3)])


def rows(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def ring(k, n, g):
    """As many nodes as edges: which of them an attribute has rows of is in its name."""
    ends = torch.stack([torch.arange(n), (torch.arange(n) + 1) % n])
    z, y = torch.arange(n) + k, torch.tensor([k])
    return Data(z=z, x=rows(g, n, 2), edge_index=ends, edge_attr=rows(g, n, 1), y=y)


class Pair(Data):
    def __inc__(self, key, value, *args):
        sizes = self.x_s.size(0), self.x_t.size(0)
        known = {
            "edge_index_s": sizes[0],
            "edge_index_t": sizes[1],
            "edge_index_st": torch.tensor(sizes).view(2, 1),
            "root": sizes[0],
        }
        return known.get(key, 0)


def pair(k, n, g):
    s, t = n, COUNTS[-1 - k]  # in the whole batch as many of both

    def ends(a, b, count):
        return torch.stack([torch.randint(m, (count,), generator=g) for m in (a, b)])

    return Pair(
        x_s=rows(g, s, 2),
        x_t=rows(g, t, 2),
        edge_index_s=ends(s, s, 2 * n),
        edge_index_t=ends(t, t, 3),
        edge_index_st=ends(s, t, n + k),
        edge_attr_st=rows(g, n + k, 1),
        y=torch.tensor([k]),
        root=s - 1,  # an int that PyG increments: the id of a node
    )


def cloud(k, n, g):
    return Data(pos=rows(g, n, 3), y=torch.tensor([k]), name=f"cloud {k}")


def features(k, n, g):
    return Data(feat=rows(g, n, 2), kind=torch.arange(n), y=rows(g, 1, 2))


def sparse_graph(k, n, g):
    """Some graphs without nodes, some without edges."""
    n = n if k % 3 else 0
    ends = torch.randint(max(n, 1), (2, n if k % 2 else 0), generator=g)
    return Data(x=rows(g, n, 2), edge_index=ends, y=torch.tensor([k]), root_index=[k])


def single(k, n, g):
    """One node and one edge each."""
    loop = torch.zeros(2, 1, dtype=torch.int64)
    return Data(x=rows(g, 1, 2), edge_index=loop, y=torch.tensor([k]), z=rows(g, 1, 1))


def typed(k, n, g):
    data = HeteroData()
    data["a"].x, data["b"].x = rows(g, n, 2), rows(g, k, 2)
    data["b", "in", "a"].edge_index = torch.randint(
        max(min(n, k), 1), (2, n if k else 0), generator=g
    )
    data["b", "in", "a"].edge_attr = rows(g, n if k else 0, 1)
    data.y = torch.tensor([k])
    return data


def numbers(k, n, g):
    return {"x": rows(g, 2), "n": n, "name": str(k), "pair": (float(k), cloud(k, n, g))}


# what makes a graph, and the names of what is cut
ATTRIBUTES = "edge_index edge_attr batch"
GRAPHS = {
    "rings": (ring, f"z x {ATTRIBUTES}"),
    "pairs": (
        pair,
        "x_s x_t x_s_batch edge_index_s edge_index_t edge_index_st edge_attr_st",
    ),
    "clouds": (cloud, "pos batch"),
    "features": (features, "feat kind"),
    "with gaps": (sparse_graph, "x edge_index batch"),
    "single nodes": (single, "x edge_index batch"),
    "types": (typed, f"x {ATTRIBUTES}"),
    "tuples of graphs": (
        lambda k, n, g: (ring(k, n, g), cloud(k, n, g)),
        f"z x pos {ATTRIBUTES}",
    ),
    "anything": (numbers, "pos batch"),
    "graph level": (lambda k, n, g: Data(y=rows(g, 1, 2), num_nodes=n), "batch"),
}


def dataset(kind):
    g = torch.Generator().manual_seed(0)
    return [GRAPHS[kind][0](k, n, g) for k, n in enumerate(COUNTS)]


def same(got, want, path=""):
    """Asserts that a batch has the attributes of another, in order; returns the cut ones."""
    if isinstance(want, (Batch, Data, HeteroData)):
        assert type(got).__name__ == type(want).__name__
        assert got.num_graphs == want.num_graphs
        found = []
        for mine, theirs in zip(got.stores, want.stores, strict=True):
            assert mine._key == theirs._key
            names = (set(store.keys()) - {"num_nodes"} for store in (mine, theirs))
            assert len(set(map(frozenset, names))) == 1
            for name in theirs:
                found += same(mine[name], theirs[name], f"{path}.{theirs._key}.{name}")
        assert got.num_nodes == want.num_nodes
        return found
    if isinstance(want, torch.Tensor):
        assert torch.equal(alike.whole(got), want), path
        return [path.split(".")[-1]] if hasattr(got, "full_tensor") else []
    if isinstance(want, dict):
        assert list(got) == list(want)
        got, want = list(got.values()), list(want.values())
    if isinstance(want, (list, tuple)):
        assert len(got) == len(want)
        pairs = enumerate(zip(got, want, strict=True))
        return [n for k, (a, b) in pairs for n in same(a, b, f"{path}.{k}")]
    assert got == want, path
    return []


@tiers.parametrize("kind", GRAPHS, slice(0, None, 2))
@RANKS
@worlds.on()
def test_batches_are_those_of_one_rank(size, kind):
    worlds.mesh()
    for batch_size in (1, 7):
        batches = (
            lib.DataLoader(dataset(kind), batch_size, follow_batch=["x_s"])
            for lib in (pyg_distcomm.loader, torch_geometric.loader)
        )
        found = set()
        for got, want in zip(*batches, strict=True):
            found |= set(same(got, want))
        assert found - {"y"} == set(GRAPHS[kind][1].split())  # of one node: either


class Net(torch.nn.Module):
    """Layers on both graphs of a pair, and between them."""

    def __init__(self, lib):
        super().__init__()
        self.lib, self.conv, self.other = lib, lib.GraphConv(2, 3), lib.GCNConv(2, 3)

    def forward(self, b):
        s, t = self.conv(b.x_s, b.edge_index_s), self.other(b.x_t, b.edge_index_t)
        t = t + self.conv((b.x_s, b.x_t), b.edge_index_st, b.edge_attr_st)
        s, size = s + s[b.root][b.x_s_batch], b.num_graphs
        pool = self.lib.global_mean_pool
        return pool(s, b.x_s_batch, size) - pool(t, b.x_t_batch, size)


def trained(layers, loaders):
    torch.manual_seed(3)
    net = Net(layers).double()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    follow = ["x_s", "x_t"]
    loader = loaders.DataLoader(dataset("pairs"), 4, shuffle=True, follow_batch=follow)
    told = []
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(batch), batch.y % 3)
            loss.backward()
            optimizer.step()
            told.append(loss.item())
    return torch.tensor(told), [p.detach() for p in net.parameters()]


@RANKS
@worlds.on()
def test_a_script_trains_as_on_one_process(size):
    worlds.mesh()
    got = trained(nn, pyg_distcomm.loader)
    want = trained(pyg, torch_geometric.loader)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


# What iter() draws ---------------------------------------------------------------------


def weighted(lib, graphs, generator):
    weights = torch.arange(1.0, len(graphs) + 1)
    sampler = torch.utils.data.WeightedRandomSampler(weights, 20, generator=generator)
    return lib.DataLoader(graphs, 3, sampler=sampler, generator=generator)


def dynamic(lib, graphs, generator):
    sampler = lib.DynamicBatchSampler(graphs, max_num=9, num_steps=4, shuffle=True)
    return lib.DataLoader(graphs, batch_sampler=sampler, generator=generator)


def shuffled(lib, graphs, generator):
    make = {"batch_size": 3, "shuffle": True, "generator": generator}
    return lib.DataLoader(graphs, **make)


def events(lib, _, generator):
    g = torch.Generator().manual_seed(0)
    src, dst = torch.randint(0, 9, (2, 30), generator=g)
    data = TemporalData(src=src, dst=dst, t=torch.arange(30), msg=rows(g, 30, 2))
    make = {"batch_size": 7, "neg_sampling_ratio": 1.0}
    return lib.TemporalDataLoader(data, generator=generator, **make)


DRAW = {f.__name__: f for f in (shuffled, weighted, dynamic, events)}


def plain(loader, rank):
    return loader


def bar(loader, rank):
    return tqdm(loader, file=io.StringIO())


def first(loader, rank):
    next(iter(loader))
    return loader


def twice(loader, rank):
    iter(loader)
    return iter(loader)


def on_rank_0(loader, rank):
    return bar(loader, rank) if rank == 0 else loader


WAYS = {f.__name__: f for f in (plain, bar, first, twice, on_rank_0)}


def drawn(lib, kind, way, rank, given):
    """What two epochs yield, and what torch's generators are left at."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1) if given else None
    loader, found = DRAW[kind](lib, dataset("clouds"), generator), []
    for _ in range(2):
        for batch in WAYS[way](loader, rank):
            names = ("y",) if kind != "events" else ("src", "dst", "neg_dst", "n_id")
            found.append([alike.whole(batch[name]).tolist() for name in names])
    return found, torch.rand(1).item()


@pytest.mark.parametrize("kind", DRAW)
@pytest.mark.parametrize("size", [tiers.rarely(1), 2, tiers.rarely(3)])
@worlds.on()
def test_iter_draws_as_pygs_does(size, kind):
    rank, cases = worlds.mesh().rank, [*itertools.product([False, True], WAYS)]
    if size == 2:  # by default, some of them for each kind
        cases = cases[list(DRAW).index(kind) :: 4]
    for given, way in cases:
        got = drawn(pyg_distcomm.loader, kind, way, rank, given)
        want = drawn(torch_geometric.loader, kind, way, 0, given)
        assert got[0] == want[0], (way, given)
        assert got[1] == want[1] or (way == "on_rank_0" and rank), (way, given)


def _rank_0_draws(kind):
    torch.manual_seed(worlds.mesh().rank)  # a script without a seed
    kept = torch.get_rng_state()
    loader = DRAW[kind](pyg_distcomm.loader, dataset("clouds"), None)
    found = [alike.whole(batch.y).tolist() for _ in range(2) for batch in loader]
    torch.set_rng_state(kept)
    loader = DRAW[kind](torch_geometric.loader, dataset("clouds"), None)
    return found, [batch.y.tolist() for _ in range(2) for batch in loader]


@pytest.mark.parametrize("kind", ["shuffled", "weighted", "dynamic"])
def test_without_a_seed_batches_are_those_of_rank_0(kind):
    (got, want), (other, _) = worlds.run(_rank_0_draws, 2, kind)
    assert got == other == want


# With workers --------------------------------------------------------------------------


class Noisy(torch.utils.data.Dataset):
    """Draws a number for a graph whenever it is read, from torch's and Python's generators."""

    def __init__(self, kind="rings"):
        self.graphs = dataset(kind) * 2

    def __len__(self):
        return len(self.graphs)

    def __getitem__(self, k):
        data = self.graphs[k].clone()
        data.noise = torch.rand(1) + random.random()
        return data


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        yield from dataset("clouds")[worker.id :: worker.num_workers]


def shuffled_by_workers(lib):
    options = {"shuffle": True, "drop_last": True, "pin_memory": True}
    return lib.DataLoader(Noisy(), 4, num_workers=2, **options)


def own_batches(lib):
    batches = torch.utils.data.BatchSampler(range(13, -1, -1), 5, drop_last=False)
    chosen = {"follow_batch": ["x"], "exclude_keys": ["edge_attr"]}
    make = {"batch_sampler": batches, "num_workers": 2, **chosen}
    return lib.DataLoader(Noisy("types"), **make)


def streamed(lib):
    return lib.DataLoader(Stream(), 2, num_workers=2)


BY_WORKERS = {f.__name__: f for f in (shuffled_by_workers, own_batches, streamed)}


def epochs(loader):
    """Yields the batches of an epoch that is broken off, and of one more."""
    for left in (2, 99):
        for count, batch in enumerate(loader, 1):
            yield batch
            if count == left:
                break


@tiers.parametrize("kind", BY_WORKERS, ["shuffled_by_workers", "streamed"])
@worlds.on(2)
def test_workers_batches_are_those_of_one_process(kind):
    worlds.mesh()
    got, want = [], []
    for lib, found in (pyg_distcomm.loader, got), (torch_geometric.loader, want):
        torch.manual_seed(5)
        found += epochs(BY_WORKERS[kind](lib))
        found.append(torch.rand(3))
    assert len(got) > 5
    for mine, theirs in zip(got, want, strict=True):
        same(mine, theirs)


def _started():
    mesh = pdc.init()
    model = pdc.replicate(nn.GraphConv(2, 3).double(), mesh)
    for batch in shuffled_by_workers(pyg_distcomm.loader):
        model(batch.x, batch.edge_index, batch.edge_attr).sum().backward()
    return multiprocessing.get_start_method(allow_none=True)


def test_launched_ranks_start_workers_as_their_launcher_does():
    """By a fork server of their own, workers would import everything anew in each epoch."""
    asked = multiprocessing.get_start_method(allow_none=True)
    default = multiprocessing.get_all_start_methods()[0]
    assert pdc.launch(_started, 2, timeout=300) == [asked or default] * 2

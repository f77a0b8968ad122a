"""The step over several relations, on edges of PyG's own kind, and from worker processes."""

import functools

import batches
import pytest
import tiers
import torch
import torch_geometric.nn as pyg
from test_step import (
    LAYERS,
    WIDTH,
    agree,
    all_close,
    close,
    graded,
    graph,
    loader_of,
    pair,
)
from torch_geometric import EdgeIndex
from torch_geometric.utils import sort_edge_index

import pyg_distcomm as pdc
from pyg_distcomm import kernels
from pyg_distcomm.graph.edge_products import aggregate, ends_added, multiply_linear
from pyg_distcomm.graph.local_adjacency import GroupedEdges, adjacency_of, known
from pyg_distcomm.loader import DistNeighborLoader

pytestmark = pytest.mark.usefixtures("place")

SEEDS = ("paper", torch.arange(12))


@pytest.fixture
def rows(monkeypatch):
    """Records how many rows each product computes."""
    counted = []
    inner = kernels.spmm

    def run(rowptr, *args):
        counted.append(len(rowptr) - 1)
        return inner(rowptr, *args)

    monkeypatch.setattr(kernels, "spmm", run)
    return counted


def hetero():
    return batches.hetero().apply(lambda t: t.double(), "x")


def loader(data, fan_outs=(3, 2), **options):
    return DistNeighborLoader(
        data,
        list(fan_outs),
        **batches.arguments(input_nodes=SEEDS, batch_size=4, seed=1, **options),
    )


class Relations(torch.nn.Module):
    """Two layers of HeteroConv, as scripts write them."""

    def __init__(self, kinds, aggr, layer):
        super().__init__()
        self.convs = torch.nn.ModuleList(
            pyg.HeteroConv({kind: layer(kind) for kind in kinds}, aggr=aggr)
            for _ in range(2)
        )
        self.aggr = aggr

    def forward(self, x_dict, edge_index_dict):
        for k, conv in enumerate(self.convs):
            x_dict = conv(x_dict, edge_index_dict)
            if self.aggr is None:  # a row for each relation
                x_dict = {kind: x.flatten(1) for kind, x in x_dict.items()}
            if k == 0:
                x_dict = {kind: x.relu() for kind, x in x_dict.items()}
        return x_dict


def mixed(kind):
    """A layer for each relation, not all of one class."""
    source, _, target = kind
    if source == target:
        return pyg.SAGEConv((-1, -1), 6, aggr="max")
    if source == "author":
        return pyg.GraphConv((-1, -1), 6, aggr="mean")
    return pyg.GATConv((-1, -1), 6, add_self_loops=False)


def steps_agree(ours, wanted, batch):
    """Compares outputs at the seeds, and the gradients of all inputs and parameters."""

    def seeds(out):
        return out["paper"][: batch["paper"].batch_size]

    agree(ours, wanted, seeds, batch.edge_index_dict, x=batch.x_dict)


class Two(torch.nn.Module):
    """Two layers, for `to_hetero`."""

    def __init__(self):
        super().__init__()
        self.one, self.two = (pyg.SAGEConv((-1, -1), 6) for _ in range(2))

    def forward(self, x, edge_index):
        return self.two(self.one(x, edge_index).relu(), edge_index)


@tiers.parametrize(
    ("lifted", "aggr"),
    [
        *((False, aggr) for aggr in ("sum", "mean", "max", "min", "cat", None)),
        *((True, aggr) for aggr in ("sum", "mean", "max", "min")),
    ],
    slice(0, None, 2),
)
def test_relations_are_trimmed(lifted, aggr, rows):
    """Those of HeteroConv, and of `to_hetero`."""
    data = hetero()
    torch.manual_seed(4)
    if lifted:
        wanted = pyg.to_hetero(Two(), data.metadata(), aggr=aggr).double()
    else:
        layer = mixed if aggr in ("sum", "max") else lambda _: pyg.SAGEConv((-1, -1), 6)
        wanted = Relations(data.edge_types, aggr, layer).double()
    wanted(data.x_dict, data.edge_index_dict)  # which makes its parameters
    wanted, ours = pair(wanted)
    for batch in loader(data):
        steps_agree(ours, wanted, batch)
    assert pdc.nn.trimming_of(ours) == "on"
    rows.clear()
    ours(batch.x_dict, batch.edge_index_dict)
    into = [len(batch[kind[2]].x) for kind in data.edge_types]
    assert sum(rows) < 2 * sum(into)  # of two layers


def viewed(s):
    s[0].add_(1)
    return torch.amax(s, 0)


REDUCED = {
    "sum": lambda s: s.sum(0),
    "mean": lambda s: torch.mean(s, dim=(0,)),
    "max": lambda s: torch.max(s, dim=-3)[0],
}
READ = {
    "kept": lambda s: s.sum(dim=0, keepdim=True)[0],
    "indexed": lambda s: s[1] * 2 + s[0],
    "changed": lambda s: s.mul_(3).sum(0),
    "viewed": viewed,
    "met": lambda s: (s + s[1]).sum(0),
    "over rows": lambda s: s.sum(0) - s.mean(1).sum(0),
}


@tiers.cover(("name", "late"), [*REDUCED, *READ], [False, True])
def test_only_reductions_of_stacks_are_trimmed(name, late):
    """Other reads of a stack get all rows, also after passes that have been trimmed."""
    read = (REDUCED | READ)[name]

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = torch.nn.ModuleList(pyg.SAGEConv(WIDTH, WIDTH) for _ in "abc")
            self.late = late

        def forward(self, x, edge_index):
            one, two, three = self.convs
            s = torch.stack([one(x, edge_index), two(x, edge_index)])
            return three(s.sum(0) if self.late else read(s), edge_index)

    torch.manual_seed(3)
    wanted, ours = pair(Model().double())
    for batch in loader_of(graph()):
        agree(ours, wanted, slice(batch.batch_size), batch.edge_index, x=batch.x)
        if ours.late:
            assert pdc.nn.trimming_of(ours) == "on"
        ours.late = wanted.late = False
    assert pdc.nn.trimming_of(ours).startswith("on" if name in REDUCED else "off")


# Edges of PyG's own kind ----------------------------------------------------------------


@pytest.mark.parametrize("order", [None, "row", "col"])
@pytest.mark.parametrize("name", ["sage mean", "gcn", "graph mean", "gat"])
def test_edge_index_of_pygs_is_multiplied(name, order, rows):
    data = graph()
    n, weight = data.num_nodes, data.edge_weight
    edges = data.edge_index
    if order is not None:
        edges, weight = sort_edge_index(edges, weight, n, sort_by_row=order == "row")
    edges = EdgeIndex(edges, sparse_size=(n, n), sort_order=order)
    torch.manual_seed(1)
    wanted, ours = pair(LAYERS[name]().double())
    plain = edges.as_tensor().clone()
    close(ours(data.x, edges), wanted(data.x, plain))
    assert bool(rows) == (order == "col")  # which is worth it at the first use
    for args in [(), (weight,)] if name in ("gcn", "graph mean") else [()]:
        found = graded(ours, None, edges, *args, x=data.x)
        all_close(found, graded(wanted, None, plain, *args, x=data.x))
    assert rows
    assert adjacency_of(edges) is adjacency_of(edges)


def test_a_changed_edge_index_of_pygs_is_read_again(rows):
    data = graph()
    n = data.num_nodes
    edges = EdgeIndex(data.edge_index.clone(), sparse_size=(n, n))
    wanted, ours = pair(pyg.SAGEConv(WIDTH, 7).double())
    for _ in range(2):
        agree(ours, wanted, None, edges, x=data.x)
    edges[:, 0] = torch.tensor([4, 9])
    for _ in range(2):
        found = graded(ours, None, edges, x=data.x)
        all_close(found, graded(wanted, None, edges.as_tensor().clone(), x=data.x))
    other = EdgeIndex(data.edge_index, sparse_size=(n + 1, n + 1))
    rows.clear()
    for model in (wanted, ours, ours):  # PyG's own error
        with pytest.raises((ValueError, RuntimeError)):
            model(data.x, other)
    assert not rows


def test_gcn2_conv_is_multiplied(rows):
    torch.manual_seed(1)
    conv = pyg.GCN2Conv(WIDTH, 0.3, 0.5, 1, shared_weights=False)
    wanted, ours = pair(conv.double())
    for batch in loader_of(graph()):
        args = torch.rand_like(batch.x), batch.edge_index
        for more in ((), (batch.edge_weight,)):
            agree(ours, wanted, None, *args, *more, x=batch.x)
    assert rows


# From worker processes ------------------------------------------------------------------


def drops_edges(batch):
    batch.edge_index = batch.edge_index[:, ::2]
    return batch


@pytest.mark.parametrize("kind", ["homogeneous", "hetero", "transformed", "later"])
def test_minibatches_of_workers_carry_what_the_sampler_knew(kind):
    options = {"num_workers": 1, "persistent_workers": kind == "homogeneous"}
    if kind == "transformed":
        options["transform"] = drops_edges
    if kind == "later":
        options["filter_per_worker"] = False
    whole = kind != "hetero"
    made = loader_of(graph(), **options) if whole else loader(hetero(), **options)
    for batch in made:
        edges = [batch.edge_index] if whole else batch.edge_index_dict.values()
        found = [known(e) for e in edges]
        if kind == "transformed":
            assert found == [None]
            continue
        seeds = batch.batch_size if whole else batch["paper"].batch_size
        for f in found:
            assert f.batch is found[0].batch
            assert f.batch.seeds[None if whole else "paper"] == seeds
            assert sum(f.batch.sizes.values()) == batch.num_nodes
        assert f.batch.rows(2) is not None
    if kind == "homogeneous":
        wanted, ours = pair(pyg.SAGEConv(WIDTH, 7).double())
        for batch in made:  # its second epoch
            agree(ours, wanted, None, batch.edge_index, x=batch.x)
            assert known(batch.edge_index).uses == 2


# Products with a linear layer -----------------------------------------------------------


@tiers.cover(("kind", "first"), ["sum", "mean"], [True, False], step=2)
def test_products_with_linear_layers_are_differentiated_twice(kind, first):
    g = torch.Generator().manual_seed(0)
    edges = GroupedEdges.build(torch.randint(4, (2, 9), generator=g), 6, 5)
    shapes = (6, 2), (7, 2), (3, 2), (3,), (3, 2)
    x, root, weight, bias, own = (
        torch.randn(s, dtype=torch.float64, generator=g, requires_grad=True)
        for s in shapes
    )
    run = functools.partial(multiply_linear, kind, edges, sums_first=first)
    square = torch.randn(3, 2, dtype=torch.float64, generator=g, requires_grad=True)
    mixed = aggregate(kind, edges, None, x)
    close(
        run(x, root, weight, bias, own).detach(),
        (mixed @ weight.t() + bias + root[:5] @ own.t()).detach(),
    )
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(run, (x, root, weight, bias, own))
        assert check(lambda x, r: ends_added(edges, x, r), (x, root))
        assert check(lambda x, *w: run(x, x, *w), (x, weight, bias, square))
        assert check(lambda x, w: run(x, None, w, None, None), (x, weight))
        assert check(lambda w: run(x.detach(), None, w, None, None), (weight,))
        plain, fixed = x.detach(), (weight.detach(), bias)
        assert check(lambda r, o, p=plain, f=fixed: run(p, r, *f, o), (root, own))

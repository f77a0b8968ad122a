"""Many graphs in a Batch, cut over ranks: each case equals PyG on one process."""

import copy
import types

import alike
import pytest
import tiers
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
import torch_geometric.utils as U
import worlds
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.nn import aggr

import pyg_distcomm as pdc
import pyg_distcomm.loader
import pyg_distcomm.nn as nn
from pyg_distcomm.graph.partition_data_types import graph_owners

pytestmark = pytest.mark.usefixtures("place")

SIZES = (5, 1, 8, 3, 12, 2, 6)  # nodes of each graph
EDGES = (9, 0, 20, 4, 30, 1, 10)
GRAPHS = len(SIZES)
F_IN = 6
BY_SIGMOID = pyg.EdgePooling.compute_edge_score_sigmoid


def graphs():
    g = torch.Generator().manual_seed(0)

    def rows(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    return [
        Data(
            x=rows(n, F_IN),
            edge_index=torch.randint(0, n, (2, e), generator=g),
            edge_attr=rows(e, 3),
            y=torch.randint(0, 3, (1,), generator=g),
            about=rows(1, 4),
            name=f"graph {k}",
        )
        for k, (n, e) in enumerate(zip(SIZES, EDGES, strict=True))
    ]


def case(fn, make=None):
    return types.SimpleNamespace(fn=fn, make=make)


def of_data(make):
    return case(lambda m, d: m(d), make)


def of_batch(make):
    return case(lambda m, d: m(d.x, d.batch), make)


def sized(make):
    return case(lambda m, d: m(d.x, d.batch, dim_size=d.num_graphs), make)


def weighed(make, part):
    """One of the results of a pool over weighted edges."""
    return case(lambda m, d: m(d.x, d.edge_index, d.edge_attr, d.batch)[part], make)


class Pooling(torch.nn.Module):
    """Pools twice between layers, as hierarchical models do."""

    def __init__(self, lib, first, second):
        super().__init__()
        self.lib = lib
        self.convs = torch.nn.ModuleList(lib.GraphConv(F_IN, F_IN) for _ in range(3))
        self.pools = torch.nn.ModuleList([first, second])

    def forward(self, d):
        x, edges, weight, batch = d.x, d.edge_index, d.edge_attr[:, 0], d.batch
        out = 0.0
        for conv, pool in zip(self.convs, self.pools, strict=False):
            weight = self.used(weight)
            x = conv(x, edges, weight).relu()
            x, edges, weight, batch, *_ = pool(x, edges, weight, batch)
            out = out + both(self.lib, x, batch)
        x = self.convs[2](x, edges, self.used(weight))
        return out + self.lib.global_add_pool(x, batch, GRAPHS).repeat(1, 2)

    def used(self, weight):
        return weight


class Asa(Pooling):
    """Pools by ASAPooling, through whose values PyG has no gradients."""

    def used(self, weight):
        return weight.detach()


def both(lib, x, batch):
    """Reads graphs by their largest rows, and by the means."""
    read = (lib.global_max_pool, lib.global_mean_pool)
    return torch.cat([pool(x, batch, GRAPHS) for pool in read], 1)


def in_order(edges, weight):
    """Returns edges and values by source and target; torch has a row in any order."""
    edges, weight = alike.whole(edges), alike.whole(weight)
    order = (edges[0] * 1000 + edges[1]).argsort()
    if weight is None:
        return edges[:, order]
    return torch.cat([edges[:, order], weight.detach()[order][None]])


class Merging(torch.nn.Module):
    """Merges nodes twice between layers."""

    def __init__(self, lib, *pools):
        super().__init__()
        self.lib = lib
        self.convs = torch.nn.ModuleList(lib.GraphConv(F_IN, F_IN) for _ in pools)
        self.pools = torch.nn.ModuleList(pools)

    def forward(self, d):
        x, edges, batch = d.x, d.edge_index, d.batch
        out = 0.0
        for conv, pool in zip(self.convs, self.pools, strict=True):
            x, edges, batch, _ = pool(conv(x, edges).tanh(), edges, batch)
            out = out + both(self.lib, x, batch)
        return out


def unmerged(pool, d):
    x, _, _, info = pool(d.x, d.edge_index, d.batch)
    return pool.unpool(x.sin(), info)[0]


def cases(lib):
    def summed(run, make):
        return case(lambda m, d: lib.global_add_pool(run(m, d), d.batch), make)

    lin = torch.nn.Linear
    modules = {
        "softmax": lambda: aggr.SoftmaxAggregation(learn=True),
        "softmax, half": lambda: aggr.SoftmaxAggregation(semi_grad=True),
        "median": aggr.MedianAggregation,
        "quantiles": lambda: aggr.QuantileAggregation([0.2, 0.7]),
        "multi": lambda: aggr.MultiAggregation(["sum", "mean", "max", "std"]),
        "attention": lambda: aggr.AttentionalAggregation(lin(F_IN, 1)),
        "set2set": lambda: aggr.Set2Set(F_IN, 2),
        "sort": lambda: aggr.SortAggregation(3),
        "lstm": lambda: aggr.LSTMAggregation(F_IN, 4),
        "set transformer": lambda: aggr.SetTransformerAggregation(F_IN, heads=2),
        **{
            name: getattr(aggr, f"{name}Aggregation")
            for name in "Sum Mean Max Min Mul Var Std".split()
        },
    }
    norms = {
        "graph": lambda: lib.GraphNorm(F_IN),
        "pair": lib.PairNorm,
        "pair, each": lambda: lib.PairNorm(scale_individually=True),
        "instance": lambda: lib.InstanceNorm(F_IN, affine=True),
        "size": lib.GraphSizeNorm,
        "mean": lib.MeanSubtractionNorm,
        "layer": lambda: lib.LayerNorm(F_IN),
        "layer, node": lambda: lib.LayerNorm(F_IN, mode="node"),
    }
    out = {
        "sizes": case(
            lambda m, d: torch.tensor(
                [d.num_graphs, d.batch_size, d.num_nodes, d.num_edges, len(d.name)]
            )
        ),
        "loss": case(
            lambda m, d: F.cross_entropy(
                m(lib.global_add_pool(d.x, d.batch, d.batch_size)), d.y
            ),
            lambda: torch.nn.Sequential(
                lin(F_IN, 5), torch.nn.BatchNorm1d(5), lin(5, 3)
            ),
        ),
        "to nodes": case(
            lambda m, d: (
                d.x[:, :4] * d.about[d.batch]
                - lib.global_mean_pool(d.x, d.batch)[d.batch][:, :4]
            )
        ),
        "edges to graphs": case(
            lambda m, d: lib.global_max_pool(
                d.edge_attr, d.batch[d.edge_index[0]], GRAPHS
            )
        ),
        "some nodes": case(
            lambda m, d: lib.global_mean_pool(
                d.x[d.x[:, 0] > 0], d.batch[d.x[:, 0] > 0], GRAPHS
            )
        ),
        "softmax": case(lambda m, d: U.softmax(d.x, d.batch)),
        "softmax ptr": case(lambda m, d: U.softmax(d.x, ptr=d.ptr)),
        "dense": case(lambda m, d: U.to_dense_batch(d.x, d.batch)[0]),
        "last of each": case(lambda m, d: U.scatter(d.x, d.batch, reduce="any")),
        "grouped rows": case(lambda m, d: d.x[:36].view(9, -1)),
        "grouped rows of width": case(lambda m, d: d.x[:36].reshape(-1, 2 * F_IN)),
        "GIN": summed(
            lambda m, d: m(d.x, d.edge_index, batch=d.batch),
            lambda: lib.GIN(F_IN, 8, 2, norm="GraphNorm"),
        ),
        "GINE": summed(
            lambda m, d: m(d.x, d.edge_index, d.edge_attr),
            lambda: lib.GINEConv(lin(F_IN, 5), edge_dim=3),
        ),
        "GPS": summed(
            lambda m, d: m(d.x, d.edge_index, d.batch),
            lambda: lib.GPSConv(F_IN, lib.GINConv(lin(F_IN, F_IN)), heads=2),
        ),
        "top k": of_data(
            lambda: Pooling(lib, lib.TopKPooling(F_IN, 0.6), lib.TopKPooling(F_IN, 2))
        ),
        "top k by score": of_data(
            lambda: Pooling(
                lib, lib.TopKPooling(F_IN, min_score=0.1), lib.TopKPooling(F_IN, 1.0)
            )
        ),
        "sag": of_data(
            lambda: Pooling(
                lib,
                lib.SAGPooling(F_IN, 0.7),
                lib.SAGPooling(F_IN, 0.5, GNN=lib.GATConv),
            )
        ),
        "edges of a pool": weighed(lambda: lib.TopKPooling(F_IN, 0.5), 1),
        "values of a pool": weighed(lambda: lib.TopKPooling(F_IN, 0.5), 2),
        "ties": case(
            lambda m, d: torch.cat(
                [
                    U.scatter(x[d.edge_index[0]], d.edge_index[1], 0, 37, reduce="max")
                    + U.scatter(x, d.batch, reduce="min")[d.batch]
                    for x in (d.x.clamp(max=0.1), d.x.clamp(min=0.0))
                ],
                1,
            )
        ),
        # a softmax of one edge is 1: rounding, of PyG's too, would choose among such
        "edge pool": of_data(
            lambda: Merging(lib, *(lib.EdgePooling(F_IN, BY_SIGMOID) for _ in "ab"))
        ),
        "cluster pool": of_data(
            lambda: Merging(
                lib,
                lib.ClusterPooling(F_IN),
                lib.ClusterPooling(F_IN, "sigmoid", threshold=0.6),
            )
        ),
        "unmerged": case(unmerged, lambda: lib.EdgePooling(F_IN)),
        "asa": of_data(
            lambda: Asa(
                lib,
                lib.ASAPooling(F_IN, 0.7, GNN=lib.GraphConv),
                lib.ASAPooling(F_IN, 0.5, add_self_loops=True),
            )
        ),
        "edges of asa": case(
            lambda m, d: in_order(*m(d.x, d.edge_index, None, d.batch)[1:3]),
            lambda: lib.ASAPooling(F_IN, 3),
        ),
        "values of asa": case(
            lambda m, d: in_order(
                *m(d.x, d.edge_index, d.edge_attr[:, 0], d.batch)[1:3]
            ),
            lambda: lib.ASAPooling(F_IN, 0.6),
        ),
        "u-net": case(
            lambda m, d: m(d.x, d.edge_index, d.batch, d.edge_attr[:, 0].abs()),
            lambda: lib.GraphUNet(F_IN, 8, 3, depth=3, pool_ratios=0.7),
        ),
        "u-net of ones": case(
            lambda m, d: m(d.x, d.edge_index),
            lambda: lib.GraphUNet(F_IN, 8, 3, depth=2, sum_res=False),
        ),
    }
    out |= {f"aggr {name}": sized(make) for name, make in modules.items()}
    # of rows within its clamps: a mean of clamped ones may round to either side
    out["aggr power"] = case(
        lambda m, d: m(d.x.exp(), d.batch, dim_size=d.num_graphs),
        lambda: aggr.PowerMeanAggregation(learn=True),
    )
    out |= {f"norm {name}": of_batch(make) for name, make in norms.items()}
    return out


def measured(one, data):
    data = copy.copy(data)
    for name in ("x", "edge_attr"):
        data[name] = data[name].detach().clone().requires_grad_()
    torch.manual_seed(3)
    module = one.make and one.make().double()
    out = one.fn(module, data)
    found = {"out": alike.whole(out.detach())}
    if out.requires_grad:
        weight = torch.linspace(-1, 2, out.numel()).double().view(out.shape)
        weight = weight.to(out.device)
        (out * weight + out.sin() * weight).sum().backward()
        found |= {n: alike.whole(data[n].grad) for n in ("x", "edge_attr")}
        if module is not None:
            found |= {n: alike.whole(p.grad) for n, p in module.named_parameters()}
    return {name: value for name, value in found.items() if value is not None}


def owners(how, batch, size):
    if how == "within":
        return (torch.arange(batch.num_nodes) * 7 + 3) % 5 % size
    if how == "one rank":
        return torch.full((batch.num_nodes,), size - 1)
    return how


@tiers.parametrize(
    ("size", "how"),
    [
        (2, "within"),
        *((size, how) for size in (1, 3, 4) for how in ("within", None)),
        *((2, how) for how in ("graphs", "one rank")),
    ],
    slice(1),
)
@worlds.on()
def test_a_batch_is_that_of_one_process(size, how):
    batch = Batch.from_data_list(graphs())
    mesh = worlds.mesh()
    share = pdc.partition(batch, mesh, owners(how, batch, mesh.size))
    assert isinstance(share, Batch)
    assert share.ptr.tolist() == batch.ptr.tolist()
    mine, theirs = cases(nn), cases(pyg)
    # PyG's sparse matrices and one-hot vectors are of the default type
    with alike.in_doubles():
        want = alike.once(mesh, theirs, lambda name: measured(theirs[name], batch))

    @alike.in_doubles()
    def check(name):
        alike.same(measured(mine[name], share), want[name])

    alike.check_all({name: name for name in mine}, check)


@worlds.on(2)
def test_whole_graphs_go_to_one_rank_each():
    mesh = worlds.mesh()
    batch = Batch.from_data_list(graphs())
    owner, _ = graph_owners(batch, mesh.size)
    for k in range(GRAPHS):
        assert len(owner[batch.batch == k].unique()) == 1
    share = pdc.partition(batch, mesh, "graphs")
    assert share.x.rows.partition.owner.tolist() == owner.tolist()
    conv = nn.GraphConv(F_IN, 4).double()
    conv(share.x, share.edge_index)  # plans
    mesh.ledger.reset()
    conv(share.x, share.edge_index)
    assert mesh.ledger.words() == 0
    with pytest.raises(ValueError, match=r"needs data\.batch"):
        pdc.partition(graphs()[2], mesh, "graphs")
    count = share.num_nodes + 1
    pool, batch = nn.EdgePooling(F_IN).double(), torch.zeros(count, dtype=torch.int64)
    told = rf"mask \[{count - 1}\] .* the indexed tensor \[{count}\]"  # as PyG's
    with pytest.raises(IndexError, match=told):
        pool(share.x, share.edge_index, batch)
    typed = HeteroData()
    typed["a"].x, typed["b"].x = torch.randn(4, 2), torch.randn(3, 2)
    typed["a", "b"].edge_index = torch.tensor([[0, 3, 2], [1, 2, 0]])
    typed.y = torch.tensor([1])
    typed = Batch.from_data_list([typed] * 4)
    torch.manual_seed(0)
    typed["a"].x = torch.randn(16, 2)
    share = pdc.partition(typed, mesh, "graphs")
    assert share.num_graphs == 4
    assert share.y.tolist() == [1] * 4
    for name in ("a", "b"):
        assert share[name].ptr.tolist() == typed[name].ptr.tolist()
        got = alike.whole(nn.global_add_pool(share[name].x, share[name].batch))
        want = pyg.global_add_pool(typed[name].x, typed[name].batch)
        torch.testing.assert_close(got, want)


@worlds.on(2)
def test_ranks_that_have_other_graphs_are_told():
    every = graphs()[worlds.mesh().rank :]
    with pytest.raises(ValueError, match="the ranks have"):
        next(iter(pyg_distcomm.loader.DataLoader(every, 2)))


@worlds.on(2)
def test_heads_on_pooled_values_have_to_be_alike():
    mesh = worlds.mesh(fresh=True)
    share = pdc.partition(Batch.from_data_list(graphs()), mesh)
    torch.manual_seed(0)
    conv = nn.GraphConv(F_IN, 4).double()
    torch.manual_seed(mesh.rank)
    head = torch.nn.Linear(4, 3).double()
    out = head(nn.global_add_pool(conv(share.x, share.edge_index), share.batch))
    with pytest.raises(ValueError, match=r"torch\.manual_seed .* pooled"):
        F.cross_entropy(out, share.y).backward()


def test_graphs_that_say_how_many_nodes_they_have():
    """PyG's Batch then keeps a list of the numbers, which is no attribute of the batch."""
    ends = torch.tensor([[0, 1], [1, 2]])
    batch = Batch.from_data_list(
        [Data(torch.randn(n, 2), ends, num_nodes=n) for n in (3, 5, 4)]
    )
    share = pdc.partition(batch, pdc.init())
    assert share.num_graphs == 3
    assert torch.equal(share.x.full_tensor(), batch.x)

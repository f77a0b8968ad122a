"""Training by minibatches of a partitioned graph: the gradients of an epoch."""

import pytest
import tiers
import torch
import torch.nn.functional as F
import worlds
from batches import arguments
from problems import GRAPHS, owners
from torch_geometric.nn import GCN, GraphSAGE
from torch_geometric.utils import add_self_loops, scatter

import pyg_distcomm as pdc
from pyg_distcomm.loader import DistLayerLoader, DistNeighborLoader

pytestmark = pytest.mark.usefixtures("place")

GIVEN = {"normalize": False, "add_self_loops": False}  # edges come with their weights


def with_operator(data, weight_attr=None):
    """The graph whose edges are those of Ahat: A + I, by the sums of its rows.

    Weights are rounded to float32, as those of minibatches are.
    """
    one = torch.ones(data.num_edges, dtype=torch.float64)
    one = one if weight_attr is None else data[weight_attr].double()
    edges, one = add_self_loops(data.edge_index, one, 1.0, data.num_nodes)
    out = data.clone()
    total = scatter(one, edges[1], dim_size=data.num_nodes)
    out.edge_index, out.edge_weight = edges, (one / total[edges[1]]).float()
    return out


def loss_of(model, batch, kind, **how):
    """The loss of the seeds of a minibatch; nothing, where it is a repeat."""
    weight = None if kind == "sage" else batch.edge_weight.to(batch.x.dtype)
    out = model(batch.x, batch.edge_index, weight)[: batch.batch_size]
    loss = F.cross_entropy(out, batch.y[: batch.batch_size], **how)
    return 0 * loss if batch.get("padding", False) else loss


def rounded(name):
    """A graph with teeth; weights are eighths, whose sums are exact in any order."""
    data = GRAPHS[name]()
    data.edge_weight = (8 * data.edge_weight).round() / 8
    return data


def everything(kind, data, weight_attr=None, weights=None, **options):
    """A loader that takes all neighbours, or all candidates, of all layers."""
    options = {"input_nodes": data.train_mask, "shuffle": True, "seed": 3, **options}
    if kind == "sage":
        return DistNeighborLoader(data, [-1, -1], **arguments(**options))
    how = {"weights": weights, "weight_attr": weight_attr}
    return DistLayerLoader(data, [-1, -1], kind, **arguments(**how, **options))


def network(kind):
    torch.manual_seed(0)
    if kind == "sage":
        return GraphSAGE(7, 8, 2, 4).double()
    return GCN(7, 8, 2, 4, **GIVEN).double()


def full_gradient(kind, data, weight_attr):
    """What PyG's model makes of the whole graph in one step, on one process."""
    net = network(kind)
    graph = data if kind == "sage" else with_operator(data, weight_attr)
    weight = None if kind == "sage" else graph.edge_weight.double()
    out = net(graph.x, graph.edge_index, weight)
    F.cross_entropy(out[graph.train_mask], graph.y[graph.train_mask]).backward()
    return [p.grad for p in net.parameters()]


CASES = [
    ("sage", {"batch_size": 3}),
    ("sage", {"batch_size": 7, "sample_at": "requester"}),
    ("ladies", {"batch_size": 4, "weights": "normalized"}),
    ("ladies", {"batch_size": 9, "weight_attr": "edge_weight"}),
    ("fastgcn", {"batch_size": 5, "sample_at": "requester"}),
    ("fastgcn", {"batch_size": 4, "weights": "normalized"}),
    (
        "fastgcn",
        {"batch_size": 50, "weights": "debiased", "weight_attr": "edge_weight"},
    ),
]


@tiers.parametrize("size", [1, 2], [2])
@pytest.mark.parametrize(
    ("name", "cutter", "cases"),
    [
        ("directed", "random", CASES[::2]),
        ("isolated", "empty_rank", CASES[1::2]),
        tiers.rarely("directed", "random", CASES[1::2]),
        tiers.rarely("isolated", "empty_rank", CASES[::2]),
        tiers.rarely("loops_and_copies", "no_train", CASES),
        tiers.rarely("star", "lopsided", CASES),
    ],
)
@worlds.on()
def test_minibatches_of_all_neighbours_add_up_to_the_full_gradient(
    name, cutter, cases, size
):
    mesh, data = worlds.mesh(), rounded(name)
    share = pdc.partition(data, mesh, owners(cutter, data, size))
    total = int(data.train_mask.sum())
    for kind, options in cases:
        net = network(kind)
        model = pdc.replicate(net, mesh)
        for batch in everything(kind, share, **options):
            # gradients are averaged over the ranks: size times as much adds up
            loss = loss_of(model, batch, kind, reduction="sum")
            (loss * size / total).backward()
        want = full_gradient(kind, data, options.get("weight_attr"))
        for (which, p), grad in zip(net.named_parameters(), want, strict=True):
            torch.testing.assert_close(
                p.grad,
                grad,
                rtol=1e-9,
                atol=1e-9,
                msg=lambda m, at=(kind, options, which): f"{at}: {m}",
            )

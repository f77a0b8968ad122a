"""Explanations by PyG's explainers on a share: masks equal those of one process."""

import functools

import alike
import pytest
import tiers
import torch
import torch_geometric.nn as pyg
import worlds
from links import Net
from torch_geometric import explain
from torch_geometric.data import Data
from torch_geometric.explain import Explainer, GNNExplainer, fidelity

import pyg_distcomm as pdc
from pyg_distcomm import nn

pytestmark = pytest.mark.usefixtures("place")

NODES, F_IN, CLASSES = 30, 6, 3
MODEL = {
    "mode": "multiclass_classification",
    "task_level": "node",
    "return_type": "raw",
}
MASKS = {
    "explanation_type": "model",
    "node_mask_type": "object",
    "edge_mask_type": "object",
    "model_config": MODEL,
}
LAYERS = {
    "gcn": lambda ns, i, o: ns.GCNConv(i, o),
    "gat": lambda ns, i, o: ns.GATConv(i, o, heads=2, concat=False),
    "sage max": lambda ns, i, o: ns.SAGEConv(i, o, aggr="max"),
    "gin": lambda ns, i, o: ns.GINConv(torch.nn.Linear(i, o)),
    "gat, against edges": lambda ns, i, o: ns.GATConv(i, o, flow="target_to_source"),
    "gcn2": lambda ns, i, o: _Initial(ns, i, o),
}


class _Initial(torch.nn.Module):
    """A layer that takes its first features, too."""

    def __init__(self, ns, i, o):
        super().__init__()
        self.start, self.conv = torch.nn.Linear(i, o), ns.GCN2Conv(o, 0.1)

    def forward(self, x, edge_index):
        x = self.start(x)
        return self.conv(x, x, edge_index)


def network(ns, kind):
    return Net(functools.partial(LAYERS[kind], ns), (F_IN, 8, CLASSES))


def graph():
    """Edges with loops, one of them twice."""
    g = torch.Generator().manual_seed(3)
    loops = torch.tensor([[1, 2, 2], [1, 2, 2]])
    edge_index = torch.randint(0, NODES, (2, 100), generator=g)
    return Data(
        x=torch.randn(NODES, F_IN, generator=g, dtype=torch.float64),
        edge_index=torch.cat([edge_index, loops], 1),
        y=torch.randint(0, CLASSES, (NODES,), generator=g),
    )


@alike.in_doubles()
def explained(ns, data, kind, index):
    """Returns masks of nodes and edges, the output afterwards, and how faithful they are."""
    torch.manual_seed(7)
    net = network(ns, kind)
    explainer = Explainer(net, GNNExplainer(epochs=4), **MASKS)
    found = explainer(data.x, data.edge_index, index=index)
    after = net(data.x, data.edge_index)
    measured = torch.tensor(fidelity(explainer, found))
    return [found.node_mask, found.edge_mask, after, measured]


@tiers.parametrize("kind", LAYERS, default=["gat"])
@pytest.mark.parametrize(
    ("size", "grid", "index"),
    [
        (2, None, torch.tensor([3, 7, 1])),
        tiers.rarely(3, None, 5),
        tiers.rarely(4, (2, 2, 1), None),
    ],
)
@worlds.on()
def test_masks_equal_those_of_one_process(kind, size, grid, index):
    share = pdc.partition(graph(), worlds.mesh(grid=grid))
    wanted = explained(pyg, graph(), kind, index)
    alike.same(explained(nn, share, kind, index), wanted)


@worlds.on(2)
@alike.in_doubles()
def test_replaced_messages_equal_those_of_one_process():
    found = []
    for ns, data in ((nn, pdc.partition(graph(), worlds.mesh())), (pyg, graph())):
        torch.manual_seed(7)
        algorithm = explain.GraphMaskExplainer(2, epochs=2, log=False)
        explainer = Explainer(network(ns, "gcn"), algorithm, **MASKS)
        found.append(explainer(data.x, data.edge_index, index=3).edge_mask)
    alike.same(*found)

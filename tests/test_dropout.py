"""Dropout: masks depend on the seed, the call and the row, never on the ranks."""

import itertools

import alike
import pytest
import tiers
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
import worlds
from layers import Checkpointed, chained, problem
from layers import F as WIDTH
from test_layers import shared, step

import pyg_distcomm as pdc
from pyg_distcomm import kernels
from pyg_distcomm.comm import random

pytestmark = pytest.mark.usefixtures("place")

X = ("x", "edge_index")
W = ("x", "edge_index", "edge_weight")


def on_nodes():
    """Drops numbers, columns and rows of nodes, some of them in place."""
    drops = torch.nn.AlphaDropout(0.1), torch.nn.FeatureAlphaDropout(0.1)
    apart = torch.nn.Unflatten(1, (WIDTH, 1, 1)), torch.nn.Flatten()
    wide = apart[0], torch.nn.Dropout2d(0.1, inplace=True), apart[1]
    first = torch.nn.Dropout1d(0.1), torch.nn.Dropout(0.5), pyg.GCNConv(WIDTH, 6)
    last = torch.nn.ReLU(), torch.nn.Dropout(0.3), pyg.SAGEConv(6, 4)
    return chained(*drops, *wide, *first, *last)


class OnEdgesTwice(pyg.MessagePassing):
    """Messages dropped by edge, twice in one call, one of them in the update."""

    def __init__(self):
        super().__init__(aggr="sum")
        self.lin = torch.nn.Linear(WIDTH, 5)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=F.dropout(self.lin(x), 0.2, self.training))

    def message(self, x_j):
        return F.dropout(F.dropout(x_j, 0.3, self.training), 0.4, self.training)

    def update(self, inputs):
        return F.dropout(inputs, 0.25, self.training)


def _attention(kind, **kwargs):
    return lambda: getattr(pyg, kind)(WIDTH, 3, heads=2, dropout=0.6, **kwargs)


LAYERS = {
    "nodes": (on_nodes, X),
    "edges twice": (OnEdgesTwice, X),
    "GATConv": (_attention("GATConv"), X),
    "GATConv edges": (_attention("GATConv", edge_dim=3), (*X, "edge_attr")),
    "GATConv bare": (_attention("GATConv", add_self_loops=False), X),
    "GATv2Conv": (_attention("GATv2Conv"), X),
    "GATv2Conv back": (_attention("GATv2Conv", flow="target_to_source"), X),
    "TransformerConv": (_attention("TransformerConv"), X),
    "APPNP": (lambda: pyg.APPNP(3, 0.1, dropout=0.4), W),
    "FAConv": (lambda: pyg.FAConv(WIDTH, dropout=0.3), ("x", "x0", "edge_index")),
    "GCN": (lambda: pyg.models.GCN(WIDTH, 8, 3, 4, dropout=0.5, norm="batch"), X),
    "GAT": (lambda: pyg.models.GAT(WIDTH, 8, 2, 4, heads=2, dropout=0.5), X),
}


@alike.in_doubles()
def trained(name, graph, cutter, reentrant=None):
    """What one step computes, on every rank in full."""
    make, names = LAYERS[name]
    share = shared(problem(graph), worlds.mesh(), cutter)
    torch.manual_seed(4)
    model = pdc.convert(make().double())
    again = model if reentrant is None else Checkpointed(model, reentrant)
    found = step(again, share, names)
    assert name == "FAConv" or "gather" not in share.x.rows.mesh.ledger.table()
    if reentrant is None:
        found.update({f"buffer {k}": b for k, b in model.named_buffers()})
    found.update({k: p.grad for k, p in model.named_parameters()})
    return {k: alike.whole(v).detach() for k, v in found.items() if v is not None}


RANKS = [(2, "random"), (2, "metis"), (3, "empty_rank")]


@tiers.cover(
    ("name", "graph", "ranks"),
    [*LAYERS],
    ["directed", "loops_and_copies"],
    RANKS,
    step=4,
)
def test_ranks_and_cutters_do_not_change_the_masks(name, graph, ranks):
    size, cutter = ranks
    want = worlds.run(trained, 1, name, graph, "random")[0]
    for got in worlds.run(trained, size, name, graph, cutter):
        alike.same(got, want)


@pytest.mark.parametrize("name", [n for n in LAYERS if n.endswith("Conv")])
@tiers.parametrize("size", [1, 2, 3], [2])
@worlds.on()
def test_our_layers_draw_the_masks_of_pygs_and_send_no_more(name, size):
    """Output, gradients and bytes of PyG's layer and of ours, from the same draws."""
    make, names = LAYERS[name]
    mesh, found = worlds.mesh(), []
    share = shared(problem("loops_and_copies"), mesh, "random")
    for form in (lambda layer: layer, pdc.convert):
        torch.manual_seed(4)
        layer = form(make().double())
        mesh.step = 7
        mesh.ledger.reset()
        values = alike.learnt(layer, *(share[name] for name in names))
        values, sent = alike.whole(values), mesh.ledger.bytes()
        found.append((values, sent))
    (want, most), (got, sent) = found
    alike.same(got, want)
    assert sent <= most
    torch.manual_seed(4)
    plain, whole = make().double().eval(), problem("loops_and_copies")
    kept = layer.eval()(*(share[name] for name in names))  # no rows are dropped
    alike.same(kept, plain(*(whole[name] for name in names)))


@pytest.mark.parametrize("size", [1, 2])
@worlds.on()
def test_numbers_and_gradients_are_kept_by_the_masks_of_the_kernel(size):
    share = shared(problem("directed"), worlds.mesh(), "random")
    x = share.x.detach().requires_grad_()
    plain = x.full_tensor().detach().cpu()
    gid = torch.arange(len(plain))
    for call in (1, 2):
        x.grad = None
        drawn = F.dropout(x, 0.3)
        (drawn * x.detach()).sum().backward()
        key = random.fold(0, call)
        kept = kernels.keyed_dropout(torch.ones_like(plain), key, gid, 0.3)
        assert 0 < (kept == 0).sum() < kept.numel()
        alike.same([drawn, x.grad], [plain * kept, plain * kept])


class KeepsMessages(pyg.MessagePassing):
    """Keeps the messages it drops, to look at."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        self.kept = F.dropout(torch.ones_like(x_j), 0.5)
        return self.kept


def parallel():
    mesh = worlds.mesh()
    data = problem("directed")
    data.edge_index = torch.tensor([[0, 1], [1, 0]]).repeat(1, 120)
    share = shared(data, mesh, "random")
    conv = KeepsMessages()
    pdc.nn.HaloConv(conv)(share.x, share.edge_index)
    return conv.kept.rows.gid.numpy(), conv.kept.to_local().cpu().numpy()


@pytest.mark.parametrize("size", [1, 2])
def test_parallel_edges_draw_on_their_own(size):
    found = worlds.run(parallel, size)
    kept = {
        int(g): row.tolist() for gid, m in found for g, row in zip(gid, m, strict=True)
    }
    assert len(kept) == 240
    differ = [kept[a] != kept[b] for a, b in itertools.pairwise(sorted(kept)[::2])]
    assert sum(differ) > 0.95 * len(differ)


@tiers.cover(
    ("name", "reentrant"),
    ["nodes", "GATConv", "APPNP", "edges twice", "GAT"],
    [True, False],
    step=3,
)
def test_recomputation_repeats_the_masks(name, reentrant):
    want = worlds.run(trained, 1, name, "directed", "random")[0]
    for size in (1, 2):
        given = name, "directed", "random", reentrant
        for got in worlds.run(trained, size, *given):
            alike.same(got, {k: v for k, v in want.items() if k in got})

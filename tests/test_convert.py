"""convert: any model, its parameters and its names, on ordinary inputs and on ranks."""

import copy
import io
import pickle
from functools import partial

import pytest
import tiers
import torch
import torch_geometric.nn as pyg
import worlds
from layers import DEG, EdgeNorm, F, W, X, chained, make, problem
from test_layers import _in_doubles, parity, step
from torch.nn import BatchNorm1d, Linear, ReLU, Sequential
from torch_geometric.data import HeteroData
from torch_geometric.nn.models import GAT, GCN, GIN, PNA, EdgeCNN, GraphSAGE

import pyg_distcomm as pdc
from pyg_distcomm import nn
from pyg_distcomm.nn import DistGCNConv, DistSAGEConv, HaloConv

pytestmark = pytest.mark.usefixtures("place")

PNA_ARGS = {
    "aggregators": ["mean", "max", "std"],
    "scalers": ["identity", "amplification"],
    "deg": DEG,
}


def _residual(block):
    """DeepGCN layers, with norms and activations between convolutions."""
    parts = []
    for _ in range(2):
        conv, norm = pyg.GENConv(F, F, num_layers=2), pyg.LayerNorm(F, mode="node")
        layer = pyg.DeepGCNLayer(conv, norm, ReLU(), block)
        parts.append((layer, "x, edge_index -> x"))
    return pyg.Sequential("x, edge_index", parts)


def _shared():
    """One layer, used twice, under two names."""
    return chained(pyg.GATConv(F, F), pyg.BatchNorm(F), 0)


def _sequential():
    return pyg.Sequential(
        "x, edge_index, edge_weight",
        [
            (pyg.GCNConv(F, 8), "x, edge_index, edge_weight -> h"),
            (BatchNorm1d(8), "h -> h"),
            ReLU(inplace=True),
            (pyg.GraphConv(8, 5), "h, edge_index, edge_weight -> h"),
            (Linear(5, 4), "h -> h"),
        ],
    )


MODELS = {
    "GCN": (lambda: GCN(F, 8, 3, 4, norm="batch", jk="cat"), W),
    "GCN layer": (
        lambda: GCN(F, 8, 2, 4, norm="layer", norm_kwargs={"mode": "node"}),
        W,
    ),
    "GraphSAGE": (lambda: GraphSAGE(F, 8, 3, 4, norm="BatchNorm", jk="max"), X),
    "GAT": (lambda: GAT(F, 8, 2, 4, heads=2, norm="batch"), X),
    "GATv2": (
        lambda: GAT(F, 8, 2, 4, v2=True, edge_dim=3, jk="last"),
        (*X, "edge_attr"),
    ),
    "GIN": (lambda: GIN(F, 8, 3, 4, norm="batch", train_eps=True), X),
    "PNA": (lambda: PNA(F, 8, 2, 4, **PNA_ARGS), X),
    "EdgeCNN": (lambda: EdgeCNN(F, 8, 2, 4, norm="batch"), X),
    "Sequential": (_sequential, W),
    "DeepGCN res+": (lambda: _residual("res+"), X),
    "shared": (_shared, X),
    "BatchNorm1d": (lambda: BatchNorm1d(F), ("x",)),
    "PyG BatchNorm": (lambda: pyg.BatchNorm(F), ("x",)),
    "InstanceNorm free": (lambda: Sequential(Linear(F, 5), BatchNorm1d(5)), ("x",)),
}


class ByKeyword(torch.nn.Module):
    """Gives a BasicGNN its edge_weight or edge_attr, which it takes by keyword only."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, edge_index, edge=None):
        if edge is None:
            return self.inner(x, edge_index)
        name = "edge_weight" if edge.dim() == 1 else "edge_attr"
        return self.inner(x, edge_index, **{name: edge})


def ready(name):
    model = MODELS[name][0]()
    is_basic = isinstance(model, pyg.models.basic_gnn.BasicGNN)
    return ByKeyword(model) if is_basic else model


def compared(name, graph, cutter):
    build, names = partial(ready, name), MODELS[name][1]
    _in_doubles(parity, build, names, graph, cutter, pdc.convert)


@tiers.parametrize("name", MODELS, slice(0, None, 8))
def test_converted_model_equals_pyg(name):
    worlds.run(compared, 1, name, "directed", "random")
    worlds.run(compared, 2, name, "loops_and_copies", "empty_rank")


@tiers.cover(
    ("name", "copying"),
    list(MODELS),
    ["none", "deepcopy", "pickle", "save", "state", "again"],
    step=4,
)
def test_on_ordinary_inputs_a_converted_model_is_what_it_was(name, copying):
    """Its values, and the names of its parameters, also after it has been copied."""
    names, build = MODELS[name][1], partial(ready, name)
    before, model = make(build), pdc.convert(make(build))
    assert list(before.state_dict()) == list(model.state_dict())
    assert list(dict(before.named_parameters())) == list(dict(model.named_parameters()))
    if copying == "deepcopy":
        model = copy.deepcopy(model)
    elif copying == "pickle" and name != "Sequential":  # PyG's own cannot be pickled
        model = pickle.loads(pickle.dumps(model))
    elif copying == "save" and name != "Sequential":
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        model = torch.load(file, weights_only=False)
    elif copying == "state":
        model = pdc.convert(build().double())
        model.load_state_dict(before.state_dict(), strict=True)
    elif copying == "again":
        model = pdc.convert(model)
    found = [
        step(each, problem("directed"), names)
        for each in (model, before, pdc.convert(make(build)))
    ]
    for key, value in found[0].items():
        assert torch.equal(value, found[2][key]), key
        # sums are taken in another order, from the second use of the edges on
        assert torch.allclose(value, found[1][key], rtol=1e-9, atol=1e-12), key


def test_what_becomes_what():
    model = torch.nn.Sequential(
        pyg.GCNConv(4, 4),
        pyg.SAGEConv(4, 4),
        pyg.GATConv(4, 4),
        BatchNorm1d(4),
        Linear(4, 4),
        EdgeNorm(),
    )
    kinds = "DistGCNConv DistSAGEConv DistGATConv BatchNorm1d Linear HaloConv".split()
    assert [type(m).__name__ for m in pdc.convert(model)] == kinds
    told = r"convert takes a model, a torch\.nn\.Module, got int"
    with pytest.raises(TypeError, match=told):
        pdc.convert(3)
    with pytest.raises(TypeError, match="HaloConv wraps a MessagePassing layer"):
        HaloConv(Linear(3, 3))


def test_a_shared_layer_stays_one():
    model = pdc.convert(_shared())
    assert model[0] is model[2]
    twin = copy.deepcopy(model)
    assert twin[0] is twin[2] is not model[0]
    assert twin[0].lin.weight is not model[0].lin.weight


@pytest.mark.parametrize(
    "copying", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_a_copy_shares_nothing_and_its_parameters_are_its_layers(copying):
    conv = HaloConv(pyg.GATConv(F, 3))
    twin = copying(conv)
    assert twin.conv is not conv.conv
    for name, p in twin.named_parameters():
        assert p is twin.conv.get_parameter(name)
        assert p is not conv.get_parameter(name)


def test_to_hetero_copies_layers_of_swapped_models_for_each_relation():
    data = HeteroData()
    for kind, n in (("a", 5), ("b", 6)):
        data[kind].x = torch.randn(n, 4)
    ends = torch.arange(30).view(2, 15).remainder(5)
    data["a", "r", "b"].edge_index, data["b", "q", "a"].edge_index = ends, ends.flip(0)
    share = pdc.partition(data, pdc.init())
    for name, more in (("GAT", {"add_self_loops": False}), ("GraphSAGE", {})):
        models = [getattr(lib, name)((-1, -1), 8, 2, **more) for lib in (pyg, nn)]
        plain, ours = (pyg.to_hetero(model, data.metadata()) for model in models)
        want = plain(data.x_dict, data.edge_index_dict)
        ours(data.x_dict, data.edge_index_dict)  # which initialises it
        ours.load_state_dict(plain.state_dict())
        found = ours(share.x_dict, share.edge_index_dict)
        for kind, rows in want.items():
            torch.testing.assert_close(found[kind].full_tensor(), rows)


def test_halo_conv_is_its_layer_to_torch():
    layer = pyg.GINConv(Sequential(Linear(F, 4), BatchNorm1d(4)), train_eps=True)
    conv = HaloConv(layer)
    assert list(conv.state_dict()) == list(layer.state_dict())
    conv.double()
    assert all(p.dtype == torch.float64 for p in layer.parameters())
    assert layer.nn[1].running_mean.dtype == torch.float64
    conv.eval()
    assert not layer.training
    assert not layer.nn[1].training
    conv.train()
    assert layer.training
    conv.apply(lambda m: setattr(m, "seen", True))
    assert layer.nn[0].seen
    state = {k: torch.ones_like(v) for k, v in layer.state_dict().items()}
    conv.load_state_dict(state)
    assert all((p == 1).all() for p in layer.parameters())
    conv.requires_grad_(False)
    assert not any(p.requires_grad for p in layer.parameters())
    conv.reset_parameters()
    assert not (layer.nn[0].weight == 1).all()
    assert conv.aggr == layer.aggr
    assert repr(conv) == f"HaloConv({layer})"
    conv.eps = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    assert layer.eps is conv.eps
    conv.to(torch.float32)
    assert layer.eps is conv.eps


@pytest.mark.parametrize(
    ("ours", "theirs", "args", "kwargs"),
    [
        (DistGCNConv, pyg.GCNConv, (3, 4), {"cached": True}),
        (DistGCNConv, pyg.GCNConv, (-1, 4), {}),
        (DistSAGEConv, pyg.SAGEConv, (3, 4), {"aggr": "max", "project": True}),
        (DistSAGEConv, pyg.SAGEConv, ((3, 5), 4), {"aggr": ["mean", "max"]}),
    ],
)
def test_matrix_layers_are_pygs_on_paper(ours, theirs, args, kwargs):
    torch.manual_seed(0)
    mine = ours(*args, **kwargs)
    torch.manual_seed(0)
    other = theirs(*args, **kwargs)
    assert repr(mine) == repr(other).replace(theirs.__name__, ours.__name__)
    assert list(mine.state_dict()) == list(other.state_dict())
    for twin in (copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))):
        assert type(twin) is ours
        assert list(twin.state_dict()) == list(mine.state_dict())


@pytest.mark.parametrize("ours", [DistGCNConv, DistSAGEConv])
def test_matrix_layers_take_pygs_inputs(ours):
    torch.manual_seed(0)
    conv, x = ours(4, 3), torch.randn(4, 4)
    ids = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    want = conv(x, ids)
    adj = torch.sparse_coo_tensor(ids.flip(0), torch.ones(4), (4, 4)).coalesce()
    for given in (adj, adj.to_sparse_csr()):
        torch.testing.assert_close(conv(x, given), want)

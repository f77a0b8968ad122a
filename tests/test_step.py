"""The step on one process: layers of minibatches and whole graphs, against PyG's own."""

import copy
import gc
import io
import itertools
import math

import batches
import layers
import pytest
import tiers
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torch_geometric.utils import trim_to_layer

import pyg_distcomm as pdc
from pyg_distcomm import kernels
from pyg_distcomm.graph import edge_products
from pyg_distcomm.graph.local_adjacency import GroupedEdges, adjacency_of, known
from pyg_distcomm.loader import DistNeighborLoader
from pyg_distcomm.nn import local_products, trimming
from pyg_distcomm.process import PROCESS

WIDTH = 5


def graph(dtype=torch.float64, **options):
    data = batches.graph(**options)
    data.x, data.edge_attr = data.x.to(dtype), data.edge_attr.to(dtype)
    g = torch.Generator().manual_seed(9)
    data.edge_weight = torch.rand(data.num_edges, generator=g, dtype=dtype)
    data.time = torch.randint(50, (data.num_nodes,), generator=g)
    return data


def close(found, wanted):
    if wanted is None or found is None:  # a gradient of nothing
        assert all(t is None or not bool(t.any()) for t in (found, wanted))
        return
    bound = 1e-9 if wanted.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(found, wanted, rtol=bound, atol=bound)


def all_close(found, wanted):
    for one, two in zip(found, wanted, strict=True):
        close(one, two)


def leaf(t):
    return t.clone().requires_grad_() if t.is_floating_point() else t


def graded(model, rows, *args, x=None):
    """Returns outputs and all gradients of a loss over some rows."""
    model.zero_grad()
    given = tree_map(leaf, (x, *args))
    out = model(*given)
    out = rows(out) if callable(rows) else out if rows is None else out[rows]
    kind = {"dtype": out.dtype, "device": out.device}
    weights = torch.linspace(0.5, 1.5, out.numel(), **kind).view(out.shape)
    (out * weights).sum().backward()
    grads = [t.grad for t in (*tree_leaves(given), *model.parameters())]
    return [torch.as_tensor(out.detach()), *grads]


def agree(model, wanted, rows, *args, x):
    all_close(graded(model, rows, *args, x=x), graded(wanted, rows, *args, x=x))


def agree_at_seeds(ours, wanted, told="on", **options):
    """Compares steps on minibatches; in the end the model says whether it is trimmed."""
    for batch in loader_of(graph(), **options):
        agree(ours, wanted, slice(batch.batch_size), batch.edge_index, x=batch.x)
    assert pdc.nn.trimming_of(ours).startswith(told)


def pair(model):
    """A model of PyG's, and what `convert` makes of it."""
    return model, pdc.convert(copy.deepcopy(model))


@pytest.fixture
def runs(monkeypatch):
    """Counts products, and forbids none."""
    counted = []
    for name in ("spmm", "segment_max", "segment_softmax"):
        inner = getattr(kernels, name)

        def run(*args, inner=inner, name=name):
            counted.append(name)
            return inner(*args)

        monkeypatch.setattr(kernels, name, run)
    return counted


LAYERS = {
    "sage mean": lambda: pyg.SAGEConv(WIDTH, 7),
    "sage sum": lambda: pyg.SAGEConv(WIDTH, 7, aggr="sum", normalize=True),
    "sage max": lambda: pyg.SAGEConv(WIDTH, 7, aggr="max"),
    "sage narrow": lambda: pyg.SAGEConv(WIDTH, 2, bias=False),
    "sage project": lambda: pyg.SAGEConv(WIDTH, 7, project=True),
    "sage no root": lambda: pyg.SAGEConv(WIDTH, 7, root_weight=False),
    "gcn": lambda: pyg.GCNConv(WIDTH, 7),
    "gcn narrow": lambda: pyg.GCNConv(WIDTH, 2),
    "gcn improved": lambda: pyg.GCNConv(WIDTH, 7, improved=True, bias=False),
    "gcn no loops": lambda: pyg.GCNConv(WIDTH, 7, add_self_loops=False),
    "gcn plain": lambda: pyg.GCNConv(WIDTH, 7, normalize=False),
    "gcn cached": lambda: pyg.GCNConv(WIDTH, 7, cached=True),
    "graph": lambda: pyg.GraphConv(WIDTH, 7),
    "graph mean": lambda: pyg.GraphConv(WIDTH, 7, aggr="mean"),
    "graph max": lambda: pyg.GraphConv(WIDTH, 7, aggr="max"),
    "gin": lambda: pyg.GINConv(torch.nn.Linear(WIDTH, 7), train_eps=True),
    "gat": lambda: pyg.GATConv(WIDTH, 4, heads=3),
    "gat mean": lambda: pyg.GATConv(WIDTH, 4, heads=2, concat=False, residual=True),
    "gat dropout": lambda: pyg.GATConv(WIDTH, 4, heads=2, dropout=1e-15),
    "gat no loops": lambda: pyg.GATConv(WIDTH, 4, heads=2, add_self_loops=False),
    "gatv2": lambda: pyg.GATv2Conv(WIDTH, 4, heads=3, share_weights=True),
    "transformer": lambda: pyg.TransformerConv(WIDTH, 4, heads=2, beta=True),
    "tag": lambda: pyg.TAGConv(WIDTH, 7, K=2),
    "sg": lambda: pyg.SGConv(WIDTH, 7, K=2),
    "cheb": lambda: pyg.ChebConv(WIDTH, 7, K=3),
    "arma": lambda: pyg.ARMAConv(WIDTH, 7),
    "cluster": lambda: pyg.ClusterGCNConv(WIDTH, 7),
    "mf": lambda: pyg.MFConv(WIDTH, 7),
    "le": lambda: pyg.LEConv(WIDTH, 7),
    "pna-like": lambda: pyg.SAGEConv(WIDTH, 7, aggr=["mean", "std"]),
}
WEIGHTED = "gcn", "gcn narrow", "gcn improved", "gcn no loops", "gcn plain", "graph"
WEIGHTED += "graph mean", "tag", "sg", "cheb", "arma", "le"
# what has no known form may take PyG's path
BY_PATH = "arma", "cluster", "le", "pna-like"

SAMPLES = {
    "plain": {},
    "replace": {"replace": True},
    "disjoint": {"disjoint": True},
    "induced": {"subgraph_type": "induced"},
    "bidirectional": {"subgraph_type": "bidirectional"},
    "temporal": {
        "time_attr": "time",
        "temporal_strategy": "last",
        "input_time": torch.full((14,), 30),
    },
    "weighted": {"weight_attr": "edge_weight"},
    "no hop": {"num_neighbors": [4, 0, 2]},
    "one hop": {"num_neighbors": [2]},
    "all": {"num_neighbors": [-1, -1]},
}


def loader_of(data, seeds=None, **options):
    options = {"num_neighbors": [4, 3, 2], "batch_size": 7, "seed": 3, **options}
    fan_outs = options.pop("num_neighbors")
    if seeds is None:  # isolated ones, and one twice
        seeds = torch.tensor([1, 59, 5, 5, 58, 0, 33, 8, 9, 10, 11, 12, 57, 3])
    return DistNeighborLoader(
        data, fan_outs, **batches.arguments(input_nodes=seeds, **options)
    )


def a_batch():
    return next(iter(loader_of(graph())))


class Stack(torch.nn.Module):
    """Three layers as a script writes them."""

    def __init__(self, layer):
        super().__init__()
        torch.manual_seed(5)
        self.convs = torch.nn.ModuleList(layer() for _ in range(3))
        conv = self.convs[0]
        heads = getattr(conv, "heads", 1) if getattr(conv, "concat", True) else 1
        width = getattr(conv, "out_channels", 7) * heads
        self.lins = torch.nn.ModuleList(torch.nn.Linear(width, WIDTH) for _ in range(2))
        self.double()

    def forward(self, x, edge_index, *args):
        for conv, lin in zip(self.convs, self.lins, strict=False):
            x = F.relu(lin(conv(x, edge_index, *args)))
        return self.convs[-1](x, edge_index, *args)


@tiers.cover(("name", "dtype"), list(LAYERS), [torch.float64, torch.float32])
def test_layers_of_a_minibatch_equal_pygs(name, dtype, runs):
    """Each layer alone, on edges that carry what the sampler knew; features have ties."""
    batch = next(iter(loader_of(graph(dtype))))
    batch.x = batch.x.round()
    torch.manual_seed(1)
    wanted, ours = pair(LAYERS[name]().to(dtype))
    assert known(batch.edge_index) is not None
    for args in [()] if name not in WEIGHTED else [(), (batch.edge_weight,)]:
        agree(ours, wanted, None, batch.edge_index, *args, x=batch.x)
        given = batch.x, batch.edge_index, *args
        for weight in (*args, *args):  # changes between calls
            weight.mul_(1.5)
            close(ours(*given), wanted(*given))
    assert bool(runs) or name in BY_PATH


@tiers.parametrize(
    ("name", "kind"),
    itertools.product(
        ["sage mean", "gcn", "graph", "gat dropout", "gat no loops"], SAMPLES
    ),
    slice(0, None, 7),
)
def test_trimmed_models_equal_pygs_for_the_seeds(name, kind):
    """Three layers, every kind of sampling; each minibatch twice."""
    wanted, ours = pair(Stack(LAYERS[name]))
    for batch in loader_of(graph(), **SAMPLES[kind]):
        for _ in range(2):
            seeds = slice(batch.batch_size)
            agree(ours, wanted, seeds, batch.edge_index, x=batch.x)
    assert pdc.nn.trimming_of(ours) == "on"


def test_trimming_computes_fewer_rows(monkeypatch):
    """As many rows as are read, hop by hop; the shapes are those of all."""
    data = graph(n=400, e=3000)
    batch = next(iter(loader_of(data, seeds=torch.arange(5), num_neighbors=[3, 3, 3])))
    model = pdc.convert(Stack(LAYERS["sage mean"]))
    rows, inner = [], local_products._sage

    def noted(*args):
        out = inner(*args)
        rows.append(len(out))
        return out

    monkeypatch.setattr(local_products, "_sage", noted)
    n = batch.num_nodes
    for _ in range(2):
        out = model(batch.x, batch.edge_index)
        assert out.shape == (n, 7)
        assert len(out) == out.size(0) == n
    hops = torch.tensor(batch.num_sampled_nodes).cumsum(0).tolist()
    assert rows == [n] * 3 + 2 * hops[2::-1]  # the first pass is repeated
    assert type(out[:5]) is torch.Tensor
    model.convs[0](batch.x, batch.edge_index)  # what others make of the batch is theirs
    assert pdc.nn.trimming_of(model) == "on"
    assert pdc.nn.trimming_of(model.eval()) == "not yet known"
    assert "trim=True" in pdc.nn.trimming_of(pdc.convert(model, trim=False))


class Reads(torch.nn.Module):
    """A model that reads more than the seeds, in one way or another."""

    def __init__(self, what):
        super().__init__()
        torch.manual_seed(3)
        self.what = what
        self.convs = torch.nn.ModuleList(
            [pyg.SAGEConv(WIDTH, 8), pyg.SAGEConv(8, 8), pyg.SAGEConv(8, 3)]
        )
        self.norm = torch.nn.BatchNorm1d(8)
        self.jump = torch.nn.Linear(16, 3)
        self.reversible = pyg.GroupAddRev(pyg.SAGEConv(4, 4), num_groups=2)
        self.step = 0
        self.double()

    def forward(self, x, edge_index):
        first = self.convs[0](x, edge_index)
        if self.what == "batch norm":
            first = self.norm(first)
        first = first.relu_() if self.what == "in place" else first.relu()
        second = self.convs[1](first, edge_index)
        if self.what == "residual":
            second = second + first
        if self.what == "rev":
            second = self.reversible(second, edge_index)
        self.step += self.what == "late mean"
        if self.what == "mean" or self.step > 2:
            second = second - second.mean(0)
        if self.what == "softmax of rows":
            second = second.softmax(0)
        if self.what == "sort":
            second = second.flip(0).flip(0)
        if self.what == "jump":
            return self.jump(torch.cat([first, second], dim=-1))
        if self.what == "index":
            second = second.index_select(0, torch.arange(len(second)))
        return self.convs[2](second, edge_index)


ALL_ROWS = "batch norm", "mean", "late mean", "softmax of rows", "sort", "index", "rev"


@tiers.parametrize(
    "what", [*ALL_ROWS, "jump", "residual", "in place"], slice(0, None, 2)
)
def test_models_that_read_other_rows_are_not_trimmed(what):
    wanted, ours = pair(Reads(what))
    told = "off: " if what in ALL_ROWS else "on"
    agree_at_seeds(ours, wanted, told, batch_size=3)
    told = "on" if what == "batch norm" else told  # row by row, in evaluation
    agree_at_seeds(ours.eval(), wanted.eval(), told, batch_size=3)


ONE_HOP = "AGNN CG ClusterGCN Edge FiLM GEN GINE GMM LE MF NN PNA RGCN ResGatedGraph"


@tiers.parametrize("name", ONE_HOP.split(), slice(0, None, 4))
def test_layers_of_one_hop_are_trimmed(name):
    """In evaluation, where a batch norm inside of some treats each row alone."""
    build, names = (layers.EXACT | layers.OTHERS)[f"{name}Conv"]
    data = layers.problem("directed")
    width, given = layers.F if name in ("AGNN", "CG") else layers.OUT, ", ".join(names)
    torch.manual_seed(5)
    three = [(build(), torch.nn.Linear(width, layers.F)) for _ in range(3)]
    parts = [part for conv, lin in three for part in ((conv, f"{given} -> x"), lin)]
    wanted, ours = pair(pyg.Sequential(given, parts).double().eval())
    for batch in DistNeighborLoader(data, [4, 3, 2], batch_size=9):
        more = [batch[each] for each in names[1:]]
        agree(ours, wanted, slice(batch.batch_size), *more, x=batch.x)
    assert pdc.nn.trimming_of(ours) == "on"


class Mixing(pyg.SumAggregation):
    def forward(self, x, *args, **kwargs):
        return super().forward(x, *args, **kwargs) - x.mean(0)


def hooked():
    conv = pyg.GraphConv(WIDTH, 7)
    conv.register_forward_hook(lambda layer, given, out: out - out.mean(0))
    return conv


@tiers.parametrize(
    ("layer", "name"),
    [
        (LAYERS["pna-like"], "SAGEConv"),
        (LAYERS["tag"], "DistTAGConv"),
        (lambda: pyg.GraphConv(WIDTH, 7, aggr=Mixing()), "DistGraphConv"),
        (hooked, "DistGraphConv"),
        (lambda: pyg.GINConv(layers.mlp(WIDTH, 7)), "DistGINConv"),
    ],
    slice(0, None, 2),
)
def test_layers_that_are_not_trimmed_are_named(layer, name):
    """A model of them alone; as its first layer they leave the others to be trimmed."""
    wanted, ours = pair(Stack(layer))
    agree_at_seeds(ours, wanted, f"off: {name} is not trimmed", batch_size=4)
    for k in (1, 2):
        wanted.convs[k] = pyg.SAGEConv(WIDTH, 7).double()
    agree_at_seeds(pair(wanted)[1], wanted, batch_size=4)


OTHER_ROWS = [
    lambda out, n: out.mean(),
    lambda out, n: out[: n + 3].sum(),
    lambda out, n: out[-2:].sum(),
    lambda out, n: out[-1],
    lambda out, n: torch.cat([out, out]).sum(),
    lambda out, n: (out * 2).relu().log_softmax(-1)[torch.arange(len(out)) % 2 == 0],
    lambda out, n: out.T @ out,
    lambda out, n: torch.stack([out, out]).sum(),
    lambda out, n: F.cross_entropy(out, torch.zeros(len(out)).long()),
    lambda out, n: torch.tensor(out.tolist(), dtype=out.dtype),
    lambda out, n: torch.where(out > 0)[0],
    lambda out, n: out.view(size=(-1,)).sum(),
    lambda out, n: torch.cat(tensors=[out, out], dim=1).sum(),
    lambda out, n: torch.quantile(out, torch.tensor([0.1, 0.9]).to(out), 1),
    lambda out, n: out[True],
]


@tiers.parametrize(
    ("late", "read"), itertools.product([True, False], OTHER_ROWS), slice(0, None, 3)
)
def test_scripts_that_read_other_rows_get_them(late, read):
    """At once, which switches trimming off; or after passes that have been trimmed."""
    wanted, ours = pair(Stack(LAYERS["sage mean"]))
    for k, batch in enumerate(loader_of(graph(), batch_size=3)):
        args, n = (batch.x, batch.edge_index), batch.batch_size
        out, theirs = ours(*args), wanted(*args)
        if late and k < 3:
            close(out[:n], theirs[:n])
            assert pdc.nn.trimming_of(ours) in ("on", "not yet known")
            continue
        close(torch.as_tensor(read(out, n)), torch.as_tensor(read(theirs, n)))
        assert pdc.nn.trimming_of(ours).startswith("off: ")


@tiers.parametrize(
    "read",
    [
        lambda out, n: out[:n],
        lambda out, n: out[0],
        lambda out, n: out[: n - len(out)],  # counted from the end of all rows
        lambda out, n: out[: n - len(out), 1:3],
        lambda out, n: out.log_softmax(dim=-1)[:n].argmax(-1),
        lambda out, n: out[:, :2].argmax(dim=1)[:n],
        lambda out, n: out[torch.arange(n)],
        lambda out, n: out[torch.arange(len(out)) < n],
        lambda out, n: out.view(len(out), -1, 1).flatten(1)[:n],
        lambda out, n: (out.sigmoid() * torch.ones(len(out), 1)).narrow(0, 0, n),
        lambda out, n: out.max(dim=-1).indices[:n],
        lambda out, n: torch.cat([out, out * 2], 1).unsqueeze(-1).squeeze(-1)[:n],
        lambda out, n: F.layer_norm(out, (7,))[:n].sum(),
    ],
    slice(0, None, 2),
)
def test_scripts_that_read_seeds_are_trimmed(read):
    wanted, ours = pair(Stack(LAYERS["sage mean"]))
    for batch in loader_of(graph(), batch_size=3):
        args, n = (batch.x, batch.edge_index), batch.batch_size
        found = read(ours(*args), n)
        assert type(found) is torch.Tensor
        close(found, read(wanted(*args), n))
    assert pdc.nn.trimming_of(ours) == "on"


class Turned(torch.autograd.Function):
    """Doubles, and has a gradient of its own."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return -g


@pytest.mark.parametrize(
    "change", ["setitem", "setitem of seeds", "masked", "nested", "function"]
)
def test_late_changes_are_seen(change):
    """What is done after passes that have been trimmed; a function gets all rows."""
    wanted, ours = pair(Stack(LAYERS["graph"]))
    if change == "nested":
        ours = pdc.convert(torch.nn.ModuleDict({"a": ours}))["a"]
    for k, batch in enumerate(loader_of(graph(), batch_size=3)):
        found, n = [], batch.batch_size
        for model in (ours, wanted):
            model.zero_grad()
            out = model(batch.x, batch.edge_index)
            out = Turned.apply(out) if change == "function" else out * 2
            if k > 1 and change == "setitem":
                out[1:] = 3.0
            if k > 1 and change == "setitem of seeds":
                out[:2] += 1
            if k > 1 and change == "masked":
                out.masked_fill_(torch.arange(out.numel()).view(out.shape) % 3 == 0, 7)
            out = out if k > 1 and change == "function" else out[:n]
            out.square().sum().backward()
            found.append([out.detach(), *(p.grad for p in model.parameters())])
        all_close(*found)


@tiers.cover(("part", "reentrant"), ["layer", "model"], [False, True])
def test_checkpointing_switches_trimming_off(part, reentrant):
    """Also where two passes, or two models on one batch, come before one backward."""

    def kept(module, *args):
        return checkpoint(module, *args, use_reentrant=reentrant)

    class Kept(Stack):
        def forward(self, x, edge_index):
            for conv, lin in zip(self.convs, self.lins, strict=False):
                args = x, edge_index
                x = lin(kept(conv, *args) if part == "layer" else conv(*args)).relu()
            return self.convs[-1](x, edge_index)

    wanted, ours = pair(Kept(LAYERS["sage mean"]))
    for batch in loader_of(graph(), batch_size=3):
        found, n = [], batch.batch_size
        for model in (ours, wanted):
            model.zero_grad()
            x, total = batch.x.clone().requires_grad_(), 0
            for other in (model, copy.deepcopy(model), model):
                args = x, batch.edge_index
                out = kept(other, *args) if part == "model" else other(*args)
                total = total + out[:n].square().sum()
            total.backward()
            found.append([x.grad, *(p.grad for p in model.parameters())])
        all_close(*found)
    assert pdc.nn.trimming_of(ours) != "on"


def grads_kept(out, n):
    h = out * 2
    h.retain_grad()
    h[:n].square().sum().backward()
    return h.grad


def grads_hooked(out, n):
    h, found = out * 2, []
    h.register_hook(found.append)
    h[:n].square().sum().backward()
    return found[0]


def grads_asked(out, n):
    h = out * 2
    return torch.autograd.grad(h[:n].square().sum(), h)[0]


@pytest.mark.parametrize("read", [grads_kept, grads_hooked, grads_asked])
def test_gradients_of_what_a_model_returned(read):
    wanted, ours = pair(Stack(LAYERS["sage mean"]))
    for batch in loader_of(graph(), batch_size=3):
        args, n = (batch.x, batch.edge_index), batch.batch_size
        close(read(ours(*args), n), read(wanted(*args), n))
    late = pair(wanted)[1]
    late(*args), late(*args)
    with pytest.raises(RuntimeError, match="trim=False"):
        read(late(*args), n)
    close(read(late(*args), n), read(wanted(*args), n))


def after_a_step(out, model, x):
    with torch.no_grad():
        model.lins[0].weight.mul_(2)
    return out


def after_features(out, model, x):
    x.zero_()
    return out


def through_a_view(out, model, x):
    whole = out * 2
    whole[:, :3].relu_()
    return whole


@pytest.mark.parametrize("change", [after_a_step, after_features, through_a_view])
def test_rows_left_out_are_never_computed_from_changed_inputs(change):
    model, batch = pdc.convert(Stack(LAYERS["sage mean"])), a_batch()
    for _ in range(2):
        x = batch.x.clone()
        out = model(x, batch.edge_index)
    with pytest.raises(RuntimeError, match="changed in"):
        change(out, model, x).sum()
    assert pdc.nn.trimming_of(model).startswith("off")


@pytest.mark.parametrize("name", ["gcn", "sage mean", "gat", "graph mean"])
def test_inference_mode_comes_before_training(name):
    """What is kept from there serves autograd."""
    data, (wanted, ours) = graph(), pair(LAYERS[name]().double())
    given = data.x, data.edge_index
    with torch.inference_mode():
        for args in [given] * 3 + [(*given, data.edge_weight * 2)] * (name == "gcn"):
            close(ours(*args), wanted(*args))
    agree(ours, wanted, None, data.edge_index, x=data.x)


def test_an_interrupted_pass_is_forgotten():
    wanted, ours = pair(Stack(LAYERS["sage mean"]))
    batch = a_batch()

    def stop(*_):
        raise KeyboardInterrupt

    hook = ours.convs[1].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        ours(batch.x, batch.edge_index)
    hook.remove()
    with pytest.raises(RuntimeError):
        ours(batch.x[:, :2], batch.edge_index)
    assert trimming._pass.get() is None
    assert not any("propagate" in vars(conv) for conv in ours.convs)
    agree_at_seeds(ours, wanted, batch_size=3)


@pytest.mark.parametrize("name", ["GCN", "GraphSAGE", "GAT", "GIN"])
@pytest.mark.parametrize("jk", [None, "cat"])
def test_models_of_pyg(name, jk):
    torch.manual_seed(2)
    wanted = getattr(pyg, name)(WIDTH, 6, 3, 4, jk=jk, norm="layer_norm").double()
    mirrored = getattr(pdc.nn, name)(WIDTH, 6, 3, 4, jk=jk, norm="layer_norm").double()
    mirrored.load_state_dict(wanted.state_dict())
    for batch in loader_of(graph()):
        rows = slice(batch.batch_size)
        hops = {
            "num_sampled_nodes_per_hop": batch.num_sampled_nodes,
            "num_sampled_edges_per_hop": batch.num_sampled_edges,
        }
        for ours in (pair(wanted)[1], mirrored):
            agree(ours, wanted, rows, batch.edge_index, x=batch.x)
            if jk is None:
                found = ours(batch.x, batch.edge_index, **hops)
                close(found[rows], wanted(batch.x, batch.edge_index, **hops)[rows])


def test_scripts_that_trim_themselves(runs):
    """A view of the first edges carries what the whole does."""
    wanted, ours = pair(pyg.SAGEConv(WIDTH, WIDTH).double())
    batch = a_batch()
    hops = batch.num_sampled_nodes, batch.num_sampled_edges
    x, edges = batch.x, batch.edge_index
    for k in range(3):
        x, edges, _ = trim_to_layer(k, *hops, x, edges)
        agree(ours, wanted, None, edges, x=x)
    assert len(runs) == 6  # forward and backward


def test_a_copy_of_a_model_begins_anew():
    model = pdc.convert(Reads("mean"))
    for batch in loader_of(graph(), batch_size=3):
        model(batch.x, batch.edge_index)[:1].sum()
    assert pdc.nn.trimming_of(model).startswith("off")
    held = io.BytesIO()
    torch.save(model, held)
    held.seek(0)
    for again in (copy.deepcopy(model), torch.load(held, weights_only=False)):
        assert pdc.nn.trimming_of(again) == "not yet known"
        assert trimming._trimmer_of(again) is not trimming._trimmer_of(model)


# What a tensor carries ---------------------------------------------------------------


def test_what_makes_another_tensor_carries_nothing():
    batch = a_batch()
    e = batch.edge_index
    assert type(e) is torch.Tensor
    assert known(e) is not None
    assert known(batch.clone().edge_index) is None
    for other in (
        e.flip(0),
        e[:, e[0] > 2],
        e.clone(),
        e[:, 3:],
        e.t().contiguous().t(),
        e[:, ::2],
        torch.cat([e, e], 1),
    ):
        assert adjacency_of(other) is None
    assert adjacency_of(e[:, :10]) is not None
    for value in (None, 3, e[0], e.double(), e.view(1, 2, -1), e.numpy()):
        assert adjacency_of(value) is None
    assert adjacency_of(e) is not None


@pytest.mark.parametrize("change", ["swap", "data", "data twice", "resize"])
def test_a_change_in_place_drops_what_is_known(change, runs):
    """Answers are those of the edges as they are now."""
    batch, (wanted, ours) = a_batch(), pair(pyg.SAGEConv(WIDTH, 4).double())
    e = batch.edge_index
    agree(ours, wanted, None, e, x=batch.x)
    if change == "swap":
        e[0, :10] = 0
        e[1] = e[1].flip(0)
    elif change.startswith("data"):
        e.data = e.flip(0).contiguous()
        if change == "data twice":  # which may get the memory of the first
            e.data = e.flip(1).contiguous()
    else:
        e.resize_(2, e.size(1) // 2)
    assert known(e) is None
    count = len(runs)
    agree(ours, wanted, None, e, x=batch.x)
    assert len(runs) == count
    agree(ours, wanted, None, e, x=batch.x)  # the second use of the new edges
    assert len(runs) > count


def test_features_out_of_step():
    """Permuted rows, or more of them, are taken as they are; seeds need not come first."""
    wanted, ours = pair(Stack(LAYERS["gcn"]))
    for batch in loader_of(graph(), batch_size=4):
        seeds, edges = slice(batch.batch_size), batch.edge_index
        for x in (batch.x, batch.x.flip(0), torch.cat([batch.x, batch.x[:3]])):
            agree(ours, wanted, seeds, edges, x=x)
        with pytest.raises((IndexError, RuntimeError)):
            ours(batch.x[:2], edges)


def test_minibatches_are_plain_data():
    """They are saved, pickled and copied as PyG's are."""
    layer, batch = pdc.convert(pyg.SAGEConv(WIDTH, 4).double()), a_batch()
    layer(batch.x, batch.edge_index)
    held = io.BytesIO()
    torch.save({"edges": batch.edge_index}, held)
    held.seek(0)
    again = torch.load(held, weights_only=True)["edges"]
    assert torch.equal(again, batch.edge_index)
    assert not vars(batch.edge_index)
    assert torch.equal(copy.deepcopy(batch).edge_index, again)


def test_what_is_kept_goes_with_the_tensor():
    gc.collect()
    before = len(PROCESS.adjacencies), len(PROCESS.minibatches)
    data = graph()
    layer = pdc.convert(pyg.SAGEConv(WIDTH, 4).double())
    for batch in (*loader_of(data), data, data, data):
        layer(batch.x, batch.edge_index).sum().backward()
    del batch, data, layer
    gc.collect()
    assert (len(PROCESS.adjacencies), len(PROCESS.minibatches)) == before


# Whole graphs, weights and attention --------------------------------------------------


@pytest.mark.parametrize("name", ["sage mean", "gcn", "gcn cached", "graph", "gat"])
def test_whole_graphs_from_the_second_use_on(name, runs):
    data = graph()
    assert not bool((data.edge_index[1].diff() >= 0).all())
    torch.manual_seed(1)
    wanted, ours = pair(LAYERS[name]().double())
    ours(data.x, data.edge_index)
    assert not runs
    agree(ours, wanted, None, data.edge_index, x=data.x)
    assert runs
    data.edge_index[:, 0] = torch.tensor([2, 3])
    if name != "gcn cached":
        agree(ours, wanted, None, data.edge_index, x=data.x)


def test_dropout_of_attention_is_drawn_in_the_order_of_edges(runs):
    data, found = graph(), []
    wanted, ours = pair(pyg.GATConv(WIDTH, 4, heads=2, dropout=0.4).double())
    ours(data.x, data.edge_index)
    for model in (ours, wanted):
        torch.manual_seed(2)
        found.append(model(data.x, data.edge_index))
    assert runs
    close(*found)


FEATURED = {
    "gat": lambda: pyg.GATConv(WIDTH, 4, heads=2, edge_dim=2),
    "gat sums": lambda: pyg.GATConv(WIDTH, 4, heads=3, edge_dim=2, fill_value="add"),
    "gat max": lambda: pyg.GATConv(WIDTH, 4, heads=2, edge_dim=2, fill_value="max"),
    "gat no loops": lambda: pyg.GATConv(WIDTH, 4, 2, edge_dim=2, add_self_loops=False),
    "gatv2": lambda: pyg.GATv2Conv(WIDTH, 4, heads=2, edge_dim=2),
    "transformer": lambda: pyg.TransformerConv(WIDTH, 4, heads=2, edge_dim=2),
}


@tiers.parametrize("name", FEATURED, ["gat", "gatv2", "transformer"])
def test_attention_weights_and_features_of_edges(name, runs):
    torch.manual_seed(1)
    wanted, ours = pair(FEATURED[name]().double())
    stack, trimmed = pair(Stack(FEATURED[name]))
    for batch in loader_of(graph()):
        args = batch.x, batch.edge_index, batch.edge_attr
        agree(ours, wanted, None, *args[1:], x=batch.x)
        more = {"return_attention_weights": True}
        found, theirs = (m(*args, **more) for m in (ours, wanted))
        all_close([found[0], *found[1]], [theirs[0], *theirs[1]])
        agree(trimmed, stack, slice(batch.batch_size), *args[1:], x=batch.x)
    assert ("segment_softmax" in runs) == (name != "gat max")


def test_products_are_differentiated_twice():
    g = torch.Generator().manual_seed(0)
    edge_index = torch.randint(4, (2, 9), generator=g)
    edges = GroupedEdges.build(edge_index, 6, 5)
    shapes = (6, 2), (9,), (9, 2), (6, 2, 2), (5, 2, 2), (2, 2)
    x, value, heads, wide, targets, inner = (
        torch.randn(s, dtype=torch.float64, generator=g, requires_grad=True)
        for s in shapes
    )
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        for kind in ("sum", "mean"):
            run = lambda *a, kind=kind: edge_products.aggregate(kind, edges, *a)  # noqa: E731
            assert check(run, (value, x))
            assert check(lambda x, run=run: run(None, x), (x,))
            assert check(run, (heads, wide))
        assert check(lambda x: edge_products.aggregate("max", edges, None, x), (x,))
        assert check(lambda a: edge_products.softmax_of(edges, a), (heads,))
        assert check(lambda q, k: edge_products.dots(edges, q, k), (targets, wide))
        assert check(lambda x: edge_products.sums_at(x, edge_index[0], 4), (heads,))
        scores = lambda q, k, a: edge_products.pair_scores(edges, q, k, a, 0.2)  # noqa: E731
        assert check(scores, (targets, wide, inner))


# Anything else -------------------------------------------------------------------------


@pytest.mark.parametrize("change", "flow half 3d adj_t explain autocast".split())
def test_anything_else_takes_pygs_path(change, runs):
    """Beside layers that a script has changed, of which test_own_layers.py has many."""
    batch = next(iter(loader_of(graph(torch.float32))))
    x, e = batch.x, batch.edge_index
    options = {"flow": "target_to_source"} if change == "flow" else {}
    layer = pdc.nn.SAGEConv(WIDTH, 4, **options)
    context = torch.autocast("cpu", enabled=change == "autocast", dtype=torch.bfloat16)
    if change == "half":
        layer, x = layer.bfloat16(), x.bfloat16()
    if change == "3d":
        x = x.expand(2, *x.shape)
    if change == "adj_t":
        ones, size = torch.ones(e.size(1)), (len(x), len(x))
        e = torch.sparse_coo_tensor(e.flip(0), ones, size).to_sparse_csr()
    if change == "explain":
        layer.explain = True
        layer._edge_mask, layer._apply_sigmoid = torch.ones(e.size(1)), False
        layer._loop_mask = None
    with context:
        layer(x, e), layer(x, e)
    assert not runs


def test_functional_transforms_see_plain_tensors():
    batch, layer = a_batch(), pdc.convert(pyg.SAGEConv(WIDTH, 4).double())
    args = batch.x, batch.edge_index
    found = torch.func.functional_call(layer, dict(layer.named_parameters()), args)
    close(found, layer(*args))

    def loss(x):
        return layer(x, batch.edge_index).square().sum()

    x = batch.x.clone().requires_grad_()
    (by_hand,) = torch.autograd.grad(loss(x), x)
    close(torch.func.grad(loss)(batch.x), by_hand)
    _, slope = torch.func.jvp(loss, (batch.x,), (torch.ones_like(batch.x),))
    close(slope, by_hand.sum())


def test_ends_out_of_range_are_left_to_pyg():
    edge_index = torch.tensor([[0, 9], [1, 2]])
    wanted, ours = pair(pyg.SAGEConv(WIDTH, 4).double())
    for _ in range(3):
        with pytest.raises((IndexError, RuntimeError)):
            ours(torch.ones(4, WIDTH).double(), edge_index)
    assert GroupedEdges.build(edge_index, 4, 4) is None
    assert known(edge_index) is not None
    empty = torch.empty(2, 0).long()
    for _ in range(2):
        agree(ours, wanted, None, empty, x=torch.ones(3, WIDTH).double())


# A pass on minibatches does not depend on how often its model ran, nor in which process ---


def a_larger_batch():
    data = batches.graph(n=300, e=2400)
    return next(iter(batches.nodes(data, (3, 3, 3), batch_size=8, seed=0)))


class Net(torch.nn.Module):
    """Three layers, and what a script has between them and behind them."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.calls = kind, 0
        make = pyg.GATConv if kind == "attention" else pyg.SAGEConv
        self.convs = torch.nn.ModuleList([make(5, 16), make(16, 16), make(16, 16)])
        self.norm = torch.nn.BatchNorm1d(16) if kind == "batch norm" else None
        lin = torch.nn.Linear(16, 4)
        if kind == "spectral norm":
            lin = torch.nn.utils.parametrizations.spectral_norm(lin)
        self.lin = lin

    def forward(self, x, edge_index, seeds=None):
        self.calls += 1
        if isinstance(x, Data):  # as some scripts write it
            x.x = x.x * 2
            x, edge_index = x.x, x.edge_index
        x = F.dropout(x, 0.1, self.training)
        for conv in self.convs:
            x = conv(x, edge_index).relu()
            x = x if self.norm is None else self.norm(x)
            x = F.dropout(x, 0.5, self.training)
        x = x if seeds is None else x[:seeds]
        x = self.lin(x)
        return x * (1 + 1 / self.calls) if self.kind == "counts" else x


def seeds(out, batch):
    n = batch.batch_size
    return F.cross_entropy(out[:n], batch.y[:n])


def dropped_late(out, batch):
    n = batch.batch_size
    out = F.dropout(out.log_softmax(-1), 0.2)
    noise = torch.rand(n)
    return (F.nll_loss(out[:n], batch.y[:n], reduction="none") * noise).mean()


def all_rows(out, batch):
    return F.cross_entropy(out, batch.y)


KINDS = dict.fromkeys(("seeds", "seeds inside", "a data object", "attention"), seeds)
KINDS |= dict.fromkeys(("batch norm", "spectral norm", "counts"), seeds)
KINDS |= {"dropout behind it": dropped_late, "all rows": all_rows}


def loss_of(model, batch):
    args = batch.x, batch.edge_index
    if model.kind == "a data object":
        args = batch.clone(), None
    if model.kind == "seeds inside":
        args = (*args, batch.batch_size)
    return KINDS[model.kind](model(*args), batch)


def state_of(model):
    """What a pass has left: gradients, buffers, and where random numbers go on."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [*grads, *model.buffers(), torch.get_rng_state()]


@tiers.cover(("kind", "training"), [*KINDS], [True, False])
def test_a_first_pass_is_as_a_later_one(kind, training):
    batch, found = a_larger_batch(), []
    for passes in (0, 1, 3):
        torch.manual_seed(0)
        model = pdc.convert(Net(kind))
        begun = {k: v.clone() for k, v in model.state_dict().items()}
        model.train(training)
        for _ in range(passes):
            loss_of(model, batch).backward()
        model.load_state_dict(begun)
        model.calls = 7
        model.zero_grad()
        torch.manual_seed(1)
        loss = loss_of(model, batch)
        loss.backward()
        found.append([loss.detach(), torch.tensor(model.calls), *state_of(model)])
    for other in found[1:]:
        assert len(other) == len(found[0])
        for one, two in zip(found[0], other, strict=True):
            assert torch.equal(one, two)


def test_a_forward_that_cannot_run_twice_is_not_trimmed():
    class Once(Net):
        def forward(self, x, edge_index):
            if self.calls:
                self.calls = 0
                raise ValueError("once")
            self.todo.pop()
            return super().forward(x, edge_index)

    class Writes(Net):
        def forward(self, x, edge_index):
            x.mul_(0.5)
            return super().forward(x, edge_index)

    batch, once = a_larger_batch(), pdc.convert(Once("seeds"))
    once.todo = [1]
    assert math.isfinite(float(once(batch.x, batch.edge_index)[:8].sum()))
    assert "twice" in pdc.nn.trimming_of(once)
    writes, x = pdc.convert(Writes("seeds")), batch.x.clone()
    writes(x, batch.edge_index)[:8].sum()
    assert torch.equal(x, batch.x / 2)
    assert "in place" in pdc.nn.trimming_of(writes)

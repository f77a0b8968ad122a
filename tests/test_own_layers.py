"""Layers of a user's own, changed ones, and scripts with them: PyG's numbers, or errors."""

import math
from functools import partial

import alike
import batches
import pytest
import tiers
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
import worlds
from problems import GRAPHS, grids, owners
from test_step import agree
from torch.utils.data._utils import worker
from torch_geometric.data import Data
from torch_geometric.nn import Aggregation, MessagePassing
from torch_geometric.utils import add_self_loops, degree, scatter, softmax

import pyg_distcomm as pdc
import pyg_distcomm.nn as nn
from pyg_distcomm.loader import DistNeighborLoader, LoaderOptions
from pyg_distcomm.nn import HaloConv
from pyg_distcomm.sharded import constants

pytestmark = pytest.mark.usefixtures("place")

NODES, WIDE = 30, 6


class Own(MessagePassing):
    """A layer with a weight and a row of numbers for every node of the graph."""

    def __init__(self, **kwargs):
        super().__init__(**{"aggr": "sum", **kwargs})
        self.lin = torch.nn.Linear(WIDE, WIDE)
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, NODES).view(-1, 1))
        self.register_buffer(
            "known", torch.linspace(-1, 1, NODES * WIDE).view(NODES, WIDE)
        )

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x))


def column(x):
    return x.view(-1, 1)


# what multiplies a message x_j, where it is exact
MESSAGES = {
    "index % 2": lambda self, x_j, index: column(index % 2),
    "float": lambda self, x_j, index: column(index.float() + index.to(x_j.dtype)),
    "difference": lambda self, x_j, edge_index_i, edge_index_j: column(
        (edge_index_i - edge_index_j) * 0.1
    ),
    "weight[index]": lambda self, x_j, index: self.weight[index],
    "weight[sources]": lambda self, x_j, edge_index_j: self.weight[edge_index_j],
    "weight[edge_index]": lambda self, x_j, edge_index: self.weight[edge_index[0]],
    "shifted": lambda self, x_j, index: self.known[(index + 1) % NODES],
    "computed": lambda self, x_j, index: self.lin(self.known).index_select(0, index),
    "embedding": lambda self, x_j, index: F.embedding(index, self.weight),
    "one_hot": lambda self, x_j, index: F.one_hot(index, NODES)[:, :WIDE],
    "equal": lambda self, x_j, index: column(index == 7),
    "column equal": lambda self, x_j, index: column(index) == 7,
    "less": lambda self, x_j, edge_index_i, edge_index_j: column(
        edge_index_i < edge_index_j
    ),
    "where": lambda self, x_j, index: column(torch.where(index > 4, index, -index)),
    "bincount": lambda self, x_j, index, size_i: column(
        1 / torch.bincount(index, minlength=size_i)[index]
    ),
    "degree": lambda self, x_j, index, size_i: column(
        1 / degree(index, size_i, x_j.dtype)[index]
    ),
    "softmax": lambda self, x_j, index, ptr, size_i: softmax(x_j, index, ptr, size_i),
    "scatter": lambda self, x_j, index, dim_size: scatter(
        x_j, index, 0, dim_size, "max"
    )[index],
    "onto known": lambda self, x_j, index: self.known.index_add(0, index, x_j)[index],
    "onto zeros": lambda self, x_j, index: torch.zeros(
        NODES, WIDE, device=x_j.device
    ).index_add_(0, index, x_j)[index],
    "size_i": lambda self, x_j, size_i: 1 / size_i + torch.tensor(size_i).sqrt(),
    "size_j": lambda self, x_j, size_j: size_j + 1,
    "sqrt": lambda self, x_j, dim_size: math.sqrt(dim_size),
    "if": lambda self, x_j, size_i: 2 if size_i > NODES - 5 else 1,
    "any": lambda self, x_j, size_i: (
        (2 if size_i else 1) + (3 if size_i == 0 else 4) + (5 if size_i != 0 else 6)
    ),
    "equal to a tensor": lambda self, x_j, size_i: (
        1 + 0 * (size_i == self.known[0]).sum()
    ),
    "edges": lambda self, x_j, index: (
        x_j.size(0) + 1 / index.numel() + 1 / index.shape[0]
    ),
    "x[index]": lambda self, x_j, x, index: x[index],
}


# what else a message may do with ids, numbers of rows, and tables; errors are as PyG's
OTHERS = {
    "max()": lambda self, x_j, index: index.max(),
    "len(x)": lambda self, x_j, index: 1 / len(x_j),
    "len(x) inside": lambda self, x_j, index: 1 / len(index),
    "tensor(x)": lambda self, x_j, index: column(torch.tensor(index)),
    "vmap": lambda self, x_j, index: torch.vmap(lambda a, b: a * b)(x_j, index),
    "vmap and": lambda self, x_j, index: column(torch.vmap(torch.sum)(x_j)),
    "scatter_add()": lambda self, x_j, index, size_i: scatter(
        x_j, index * 2, 0, size_i * 2, "sum"
    )[index],
    "range": lambda self, x_j, size_i: sum(1 for _ in range(size_i)),
    "1.0": lambda self, x_j, size_i: 1.0 / size_i,
    "log": lambda self, x_j, dim_size: math.log(dim_size),
    "table of 9 rows": lambda self, x_j, index: torch.ones(9, 1)[index],
    "numpy()": lambda self, x_j, index: torch.from_numpy(index.numpy()),
    "unique()": lambda self, x_j, index: index.unique().numel(),
    "setitem()": lambda self, x_j, index: self.known.clone().__setitem__(index, 1.0),
}


def _times(factor):
    """Makes a message of a factor, with the factor's own arguments for PyG to read."""
    names = ", ".join(factor.__code__.co_varnames[1 : factor.__code__.co_argcount])
    text = f"def message(self, {names}): return x_j * factor(self, {names})"
    scope = {"factor": factor, "__name__": __name__}
    exec(text, scope)
    return scope["message"]


class Ids(Own):
    """Aggregates by itself."""

    def aggregate(self, inputs, index, dim_size):
        kept = inputs * self.weight[index] * column(index % 3)
        return scatter(kept, index, 0, dim_size, "sum") / dim_size


class Sizes(Own):
    """Updates by the number of nodes, and weighs edges by that of edges with loops."""

    def forward(self, x, edge_index):
        edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        factor = self.edge_updater(edge_index, x=x)
        return self.propagate(edge_index, x=self.lin(x), factor=factor)

    def edge_update(self, x_j, index, dim_size):
        return x_j[:, :1] * column(index) / (dim_size * x_j.size(0))

    def message(self, x_j, factor):
        return x_j * factor

    def update(self, inputs, dim_size):
        return inputs / dim_size * self.weight


class Aggregated(Own):
    """Leaves it to an aggregation; PyG would give what it makes of Own to other layers."""


class OwnAggregation(Aggregation):
    """An aggregation of the user's, over rows of all ranks."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0, 1, NODES))
        self.norm = torch.nn.BatchNorm1d(WIDE)

    def forward(self, x, index=None, ptr=None, dim_size=None, dim=-2):
        x = self.norm(x - x.mean(0)) * column(self.weight[index] * (index != 3))
        out = self.reduce(x, index, ptr, dim_size, dim, "sum") / dim_size
        return out - out.mean(0)


def _made(k, message):
    """A layer with a message; PyG keeps code by the names of classes."""
    return type(f"Own{k}", (Own,), {"message": message, "__module__": __name__})


KINDS = {
    **{
        name: _made(k, _times(factor))
        for k, (name, factor) in enumerate((MESSAGES | OTHERS).items())
    },
    "aggregate": Ids,
    "update": Sizes,
    "update back": lambda: Sizes(flow="target_to_source"),
    "aggregation": lambda: Aggregated(aggr=OwnAggregation()),
}


def _graph():
    g = torch.Generator().manual_seed(3)
    edge_index = torch.randint(0, NODES - 3, (2, 120), generator=g)
    loops = torch.tensor([[1, 2, 2], [1, 2, 2]])
    return Data(
        x=torch.randn(NODES, WIDE, generator=g),
        edge_index=torch.cat([edge_index, loops], 1),
    )


def _step(name, data, wrap):
    """A step of a layer, or that it raised an error, as those of `OTHERS` may."""
    torch.manual_seed(0)
    conv, x = wrap(KINDS[name]()), data.x.clone().requires_grad_()
    try:
        out = conv(x, data.edge_index)
    except (IndexError, RuntimeError, TypeError, ValueError):
        assert name in OTHERS, name
        return "an error"
    (out.square().sum() + out.sin().sum()).backward()
    grads = {name: p.grad for name, p in conv.named_parameters()}
    return {"out": out, "x": x.grad, **grads}


EXACT = [name for name in KINDS if name not in OTHERS]
EVERY = slice(None)


LINES = [(3, 1, 1), (2, 1, 1)]
CUTS = [*zip(LINES, ("lopsided", "random"), strict=True), (LINES[0], "random")]
CUTS += [((2, 2, 1), "random"), (LINES[0], "empty_rank")]
CUTS += [((1, 2, 1), "lopsided"), ((1, 1, 3), "random")]
TURNS = [(*cut, slice(k, None, 2)) for k, cut in enumerate(CUTS[:2])]


@tiers.parametrize(
    ("grid", "cutter", "some"), TURNS + [(*cut, EVERY) for cut in CUTS], slice(1, 2)
)
@worlds.on()
@alike.in_doubles()
def test_values_of_index_and_sizes_are_those_of_one_process(grid, cutter, some):
    mesh, data = worlds.mesh(grid=grid), _graph()
    share = pdc.partition(_graph(), mesh, owners(cutter, data, mesh.size))
    # a rank without edges raises no error of a message
    for name in [*EXACT[some], *(OTHERS if cutter == "random" else ())]:
        want = _step(name, data, lambda conv: conv)
        alike.same(_step(name, share, HaloConv), want, name)


# Layers of PyG that a user has changed ---------------------------------------------------


class Twice:
    """Doubles what a layer propagates."""

    def propagate(self, edge_index, **given):
        return 2 * super().propagate(edge_index, **given)


TwiceSAGE, TwiceGraph, TwiceGAT, TwiceOfOurs = (
    type(f"Twice{kind.__name__}", (Twice, kind), {})
    for kind in (pyg.SAGEConv, pyg.GraphConv, pyg.GATConv, pdc.nn.SAGEConv)
)


class CentredGraph(pyg.GraphConv):
    def message(self, x_j):
        return x_j - x_j.mean(0)


class CentredGCN(pyg.GCNConv):
    message = CentredGraph.message


class CentredSAGE(pyg.SAGEConv):
    message = CentredGraph.message


class CentredGCNOfOurs(pdc.nn.GCNConv):
    message = CentredGraph.message


OF_PYG = {CentredGCNOfOurs: CentredGCN, TwiceOfOurs: TwiceSAGE}


def biased(name):
    def change(conv):
        lin = getattr(conv, name)
        setattr(conv, name, torch.nn.Linear(7, lin.out_channels))

    return change


def patched(name):
    def change(conv):
        part = getattr(conv, name)
        inner = part.forward
        part.forward = lambda *args, **given: 2 * inner(*args, **given)

    return change


def twice(out):
    return 2 * out


def centred(out):
    return out - out.mean(0)


def hooked(name, change=twice):
    def add(conv):
        part = getattr(conv, name)
        part.register_forward_hook(lambda module, given, out: change(out))

    return add


def own_propagate(conv):
    inner = conv.propagate
    conv.propagate = lambda *args, **given: 2 * inner(*args, **given)


def own_update(conv):
    conv.update = centred


def own_aggregation(conv):
    conv.aggr_module = pyg.MaxAggregation()


def hooked_call(name):
    def add(conv):
        register = getattr(conv, f"register_{name}_forward_hook")
        register(lambda module, given, out: 2 * out)

    return add


MEAN = pyg.MeanAggregation()
CHANGES = {
    "gcn linear with bias": (pyg.GCNConv, biased("lin")),
    "gcn linear patched": (pyg.GCNConv, patched("lin")),
    "gcn sum hooked": (pyg.GCNConv, hooked("aggr_module")),
    "gcn own propagate": (pyg.GCNConv, own_propagate),
    "gcn own update": (pyg.GCNConv, own_update),
    "gcn class with message": (CentredGCN, None),
    "our class with message": (CentredGCNOfOurs, None),
    "gcn message hooked": (pyg.GCNConv, hooked_call("message")),
    "gcn own aggregation": (pyg.GCNConv, own_aggregation),
    "sage root with bias": (pyg.SAGEConv, biased("lin_r")),
    "sage linear patched": (pyg.SAGEConv, patched("lin_l")),
    "sage mean hooked": (pyg.SAGEConv, hooked("aggr_module")),
    "sage own propagate": (pyg.SAGEConv, own_propagate),
    "sage own update": (pyg.SAGEConv, own_update),
    "sage class with message": (CentredSAGE, None),
    "sage propagate hooked": (pyg.SAGEConv, hooked_call("propagate")),
    "sage class with propagate": (TwiceSAGE, None),
    "our class with propagate": (TwiceOfOurs, None),
    "graph class with propagate": (TwiceGraph, None),
    "graph class with message": (CentredGraph, None),
    "graph own update": (pyg.GraphConv, own_update),
    "sage projects": (partial(pyg.SAGEConv, aggr=MEAN, project=True), None),
    "graph sum hooked": (pyg.GraphConv, hooked("aggr_module")),
    "gat class with propagate": (TwiceGAT, None),
    "gat linear with bias": (pyg.GATConv, biased("lin")),
    "gat linear hooked": (pyg.GATConv, hooked("lin", centred)),
    "gat sum hooked": (pyg.GATConv, hooked("aggr_module")),
}


def made(name, plain=False):
    kind, change = CHANGES[name]
    kind = OF_PYG.get(kind, kind) if plain else kind
    torch.manual_seed(2)
    conv = kind(7, 4)
    if change is not None:
        change(conv)
    return conv.double()


ON = [(grid, slice(k, None, 3)) for k, grid in enumerate(grids(2))]
ON += [(grid, EVERY) for grid in grids(2) + grids(3)]


@tiers.parametrize(("grid", "some"), ON, slice(1, 3))
@worlds.on()
def test_changed_layers_on_ranks_are_what_they_were_changed_to(grid, some):
    data = GRAPHS["directed"]()
    share = pdc.partition(data, worlds.mesh(grid=grid), "random")
    for name in [*CHANGES][some]:
        plain, ours = made(name, plain=True), pdc.convert(made(name))
        want = alike.learnt(plain, data.x, data.edge_index)
        alike.same(alike.learnt(ours, share.x, share.edge_index), want, name)


@tiers.parametrize("name", CHANGES, slice(0, None, 2))
def test_changed_layers_of_minibatches_are_what_they_were_changed_to(name):
    class Model(torch.nn.Module):
        def __init__(self, plain):
            super().__init__()
            self.conv, self.last = made(name, plain), pyg.SAGEConv(4, 3).double()

        def forward(self, x, edge_index):
            return self.last(self.conv(x, edge_index).relu(), edge_index)

    data = batches.graph()
    data.x = torch.randn(data.num_nodes, 7, dtype=torch.float64)
    wanted, ours = Model(plain=True), pdc.convert(Model(plain=False))
    ours.load_state_dict(wanted.state_dict())
    given = {"input_nodes": torch.arange(9), "options": LoaderOptions(seed=2)}
    for batch in DistNeighborLoader(data, [4, 3], batch_size=3, **given):
        rows = slice(batch.batch_size)
        agree(ours, wanted, rows, batch.edge_index, x=batch.x)


# Short scripts with layers of their own compute on a share what plain PyG computes ---

F_IN, OUT = 7, 4


def layer(lib, base, kind=None, **options):
    torch.manual_seed(2)
    return (kind or getattr(lib, base))(F_IN, OUT, **options).double()


def edges_by_ids(lib, data):
    edges, conv = data.edge_index, layer(lib, "GraphConv")
    few = edges[:, edges[0] < edges[1]], edges[:, edges[1] != torch.tensor(7)]
    return [conv(data.x, each) for each in few]


def gradients_of(use):
    def run(lib, data):
        conv = layer(lib, "GCNConv")
        x = data.x.clone().requires_grad_()
        use(conv(x, data.edge_index), data)
        return [*(p.grad for p in conv.parameters()), x.grad]

    return run


def from_a_vector(out, data):
    out.backward(out.detach().cos())


def from_a_selection(out, data):
    some = out[data.train_mask]
    some.backward(torch.ones_like(some))


def from_edges(out, data):
    pairs = (out[data.edge_index[0]] * out[data.edge_index[1]]).sum(1)
    pairs.backward(torch.ones_like(pairs))


def rows_at_sources(lib, data):
    """PyG's tutorial layer, which reads degrees at both ends, and one that pairs rows."""

    class Tutorial(lib.MessagePassing):
        def __init__(self):
            super().__init__(aggr="add")
            torch.manual_seed(2)
            self.lin, self.pair = (
                torch.nn.Linear(F_IN, OUT),
                torch.nn.Linear(2 * OUT, 1),
            )

        def forward(self, x, edge_index):
            x = self.lin(x)
            edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
            row, col = edge_index
            into = degree(col, x.size(0), dtype=x.dtype).pow(-0.5)
            into[into == float("inf")] = 0
            out = degree(row, x.size(0), dtype=x.dtype)
            score = self.pair(torch.cat([x[row], x[edge_index[1]]], -1)).tanh()
            norm = into[row] * into[col] / out[row] + score.squeeze(-1)
            return self.propagate(edge_index, x=x, norm=norm) + out.unsqueeze(1)

        def message(self, x_j, norm):
            return norm.view(-1, 1) * x_j

    return alike.learnt(Tutorial().double(), data.x, data.edge_index)


CASES = {
    "rows at sources": rows_at_sources,
    "edges by ids": edges_by_ids,
    **{
        use.__name__: gradients_of(use)
        for use in (from_a_vector, from_a_selection, from_edges)
    },
}


@pytest.mark.parametrize(
    ("size", "cutter", "more"),
    [tiers.rarely(1, "block", 0), (2, "random", 60), tiers.rarely(3, "random", 0)],
)
@worlds.on()
def test_scripts_compute_what_one_process_does(size, cutter, more):
    data, share = alike.share_of("directed", cutter)
    mesh = share.edge_index.rows.mesh
    described = constants._NUMBERED - more
    for k in range(described * mesh.rank):  # ranks forget the latest descriptions alike
        constants.constants_of(mesh).number_of(("another", k))

    def check(case):
        alike.same(case(nn, share), case(pyg, data), rtol=1e-8)

    alike.check_all(CASES, check)


@worlds.on(2)
def test_workers_of_a_loader_are_told_that_they_are_no_ranks():
    _, share = alike.share_of()
    worker._worker_info = object()  # as in a process of a DataLoader with num_workers=1
    try:
        with pytest.raises(ValueError, match="leave num_workers at 0"):
            share.x[torch.tensor([3, 5])]
    finally:
        worker._worker_info = None

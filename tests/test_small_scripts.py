"""Short scripts with layers of their own compute on a share what plain PyG computes."""

from __future__ import annotations

import alike
import pytest
import tiers
import torch
import torch_geometric.nn as pyg
import worlds
from torch.utils.data._utils import worker
from torch_geometric.utils import add_self_loops, degree, scatter

import pyg_distcomm.nn as nn
from pyg_distcomm.sharded import constants

pytestmark = pytest.mark.usefixtures("place")

F_IN, OUT = 7, 4


def layer(lib, base, kind=None, **options):
    torch.manual_seed(2)
    return (kind or getattr(lib, base))(F_IN, OUT, **options).double()


def named(kind, *words):
    """Names a class apart: PyG keeps what it makes of a layer by the name of its class."""
    kind.__name__ += "".join(str(getattr(w, "__name__", w)).title() for w in words)
    kind.__name__ = kind.__name__.replace(".", "")
    return kind


def another_message(base):
    def run(lib, data):
        class Mine(getattr(lib, base)):
            def message(self, x_j):
                return x_j.relu()

        return layer(lib, base, named(Mine, "message", base, lib))(
            data.x, data.edge_index
        )

    return run


def another_update(base):
    def run(lib, data):
        class Mine(getattr(lib, base)):
            def update(self, inputs):
                return inputs.relu() * 2

        return layer(lib, base, named(Mine, "update", base, lib))(
            data.x, data.edge_index
        )

    return run


def hooked(base, register, hook, inner=None):
    def run(lib, data):
        conv = layer(lib, base)
        getattr(conv if inner is None else getattr(conv, inner), register)(hook)
        return conv(data.x, data.edge_index)

    return run


def max_of_neighbours(lib, data):
    conv = layer(lib, "GCNConv")
    conv.aggr_module = pyg.MaxAggregation()
    return conv(data.x, data.edge_index)


def own_layer(before=None, message=None, edges=None):
    """A layer of the script's own, with something before it propagates."""

    def run(lib, data):
        class Own(lib.MessagePassing):
            def __init__(self):
                super().__init__(aggr="add")
                torch.manual_seed(2)
                self.lin = torch.nn.Linear(F_IN, OUT).double()
                self.norm = lib.GraphNorm(OUT).double()

            def forward(self, x, edge_index):
                h = self.lin(x)
                h = h if before is None else before(lib, self, h)
                picked = edge_index if edges is None else edges(edge_index)
                return self.propagate(picked, x=h)

            def message(self, x_j, edge_index_i, edge_index_j):
                return (
                    x_j if message is None else message(x_j, edge_index_i, edge_index_j)
                )

        return Own()(data.x, data.edge_index)

    return run


def zeros_of(h):
    return torch.zeros(h.size(0), dtype=torch.long, device=h.device)


def within(make):
    def run(lib, data):
        torch.manual_seed(2)
        norm = make(lib)
        mlp = torch.nn.Sequential(torch.nn.Linear(F_IN, OUT), norm).double()
        return lib.GINConv(mlp)(data.x, data.edge_index)

    return run


def gradients_of(use):
    def run(lib, data):
        conv = layer(lib, "GCNConv")
        x = data.x.clone().requires_grad_()
        more = use(conv(x, data.edge_index), x, data) or ()
        return [*(p.grad for p in conv.parameters()), x.grad, *more]

    return run


def from_a_vector(out, x, data):
    out.backward(out.detach().cos())


def from_a_whole_vector(out, x, data):
    one = torch.ones(data.num_nodes, OUT, dtype=out.dtype, device=out.device)
    out.backward(gradient=one)


def from_a_selection(out, x, data):
    some = out[data.train_mask]
    some.backward(torch.ones_like(some))


def from_edges(out, x, data):
    pairs = (out[data.edge_index[0]] * out[data.edge_index[1]]).sum(1)
    pairs.backward(torch.ones_like(pairs))


def penalty(out, x, data):
    (g,) = torch.autograd.grad(
        out.tanh(), x, grad_outputs=torch.ones_like(out), create_graph=True
    )
    gap = (g.norm(2, dim=1) - 1).square().mean()
    (gap + out.mean()).backward()
    return g, gap


def watched(out, x, data):
    seen = []
    out.register_hook(lambda g: seen.append(g.clone()))
    out.register_hook(lambda g: g.clamp(-0.1, 0.1))
    out.square().sum().backward()
    return seen


def attention(lib, data):
    conv = layer(lib, "GATConv")
    _, (edges, weight) = conv(data.x, data.edge_index, return_attention_weights=True)
    loops = (edges[0] == edges[1]).sum()
    sums = scatter(weight.squeeze(), edges[1], dim_size=data.num_nodes)
    return torch.tensor(edges.shape), loops, degree(edges[1], data.num_nodes), sums


def places(lib, data):
    some, mine = data.x[data.train_mask], data.x[:, 0][data.train_mask]
    return [*some.max(0), some.argmin(0), mine.argmax(), some.argmax(), mine.max(0)[1]]


def not_numbers(lib, data):
    x = data.x.clone()
    x[3] = float("nan")
    x[5, 1] = -float("inf")
    return [*x.max(0), *x.min(0), x.argmax(0), x.amax(), x[:3].amin(), -x.abs().amin(0)]


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

    conv, x = Tutorial().double(), data.x.clone().requires_grad_()
    out = conv(x, data.edge_index)
    out.square().sum().backward()
    return [out, x.grad, *(p.grad for p in conv.parameters())]


def one_edge(lib, data):
    assert f"{data.edge_index}"
    return [data.edge_index[:, 5], data.edge_index[:, -1]]


CASES = {
    "rows at sources": rows_at_sources,
    "one edge": one_edge,
    "message": another_message("GCNConv"),
    "message of SAGE": another_message("SAGEConv"),
    "update": another_update("GCNConv"),
    "update of SAGE": another_update("SAGEConv"),
    "hook of messages": hooked(
        "GCNConv", "register_message_forward_hook", lambda m, i, o: o * 2
    ),
    "hook of propagate": hooked(
        "SAGEConv", "register_propagate_forward_hook", lambda m, i, o: o * 2
    ),
    "hook of the weights": hooked(
        "GCNConv", "register_forward_pre_hook", lambda m, i: (i[0] * 2,), "lin"
    ),
    "another aggregation": max_of_neighbours,
    "GraphNorm in a layer": own_layer(lambda lib, conv, h: conv.norm(h)),
    "GraphSizeNorm in a layer": own_layer(lambda lib, conv, h: lib.GraphSizeNorm()(h)),
    "pool in a layer": own_layer(
        lambda lib, conv, h: h + lib.global_mean_pool(h, zeros_of(h))
    ),
    "scatter in a layer": own_layer(
        lambda lib, conv, h: h + scatter(h, zeros_of(h), 0, 1, "mean")
    ),
    "degree in a layer": own_layer(lambda lib, conv, h: h * degree(zeros_of(h), 1)),
    "branch in a layer": own_layer(
        lambda lib, conv, h: h * (2 if h.size(0) > 40 else 3)
    ),
    "GraphNorm in GIN": within(lambda lib: lib.GraphNorm(OUT)),
    "ids compared": own_layer(message=lambda x_j, i, j: x_j * (i > j).view(-1, 1)),
    "edges by ids": own_layer(edges=lambda e: e[:, e[0] < e[1]]),
    "edges by an id": own_layer(edges=lambda e: e[:, e[1] != torch.tensor(7)]),
    "attention": attention,
    "places in a selection": places,
    "NaN": not_numbers,
    **{
        use.__name__: gradients_of(use)
        for use in (
            from_a_vector,
            from_a_whole_vector,
            from_a_selection,
            from_edges,
            penalty,
            watched,
        )
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

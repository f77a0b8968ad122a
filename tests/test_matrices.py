"""Sparse matrices in the place of edges: PyG's layers, and by what they weigh messages."""

import copy
import warnings

import alike
import pytest
import tiers
import torch
import torch_geometric.nn as pyg
import torch_geometric.transforms as T
import torch_geometric.utils as U
import worlds
from problems import GRAPHS, two_types
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

import pyg_distcomm as pdc

pytestmark = pytest.mark.usefixtures("place")


def seeded(make):
    torch.manual_seed(2)
    return make()


def as_it_is(layer):
    return layer


class Multiplies(MessagePassing):
    """A user's layer, which multiplies by a matrix if it is given one."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message_and_aggregate(self, adj_t, x):
        return U.spmm(adj_t, x, reduce=self.aggr)


VALUED = {
    "GINConv": lambda: pyg.GINConv(torch.nn.Linear(7, 4)),
    "GINConv max": lambda: pyg.GINConv(torch.nn.Linear(7, 4), aggr="max"),
    "SAGEConv": lambda: pyg.SAGEConv(7, 4),
    "SAGEConv sum": lambda: pyg.SAGEConv(7, 4, aggr="sum"),
    "SAGEConv min": lambda: pyg.SAGEConv(7, 4, aggr="min"),
    "SAGEConv std": lambda: pyg.SAGEConv(
        7, 4, aggr="std"
    ),  # not by a product: no values
    "SignedConv": lambda: pyg.SignedConv(7, 4, first_aggr=True),
    "TAGConv": lambda: pyg.TAGConv(7, 4, 2),
    "GATConv": lambda: pyg.GATConv(7, 4, add_self_loops=False),
    "PDNConv": lambda: pyg.PDNConv(7, 4, 3, 4),
    "EGConv": lambda: pyg.EGConv(7, 8, ["sum", "symnorm", "max"], 4, 2),
    "Multiplies": lambda: Multiplies("mean"),
}


@tiers.parametrize(
    ("size", "layout", "memory", "grid"),
    [
        (2, "csr", None, None),
        (1, "coo", None, None),
        (3, "csc", None, None),
        (3, "coo", None, None),
        (2, "csr", "4KiB", None),
        (2, "coo", None, (1, 2, 1)),
        (4, "csr", None, (2, 2, 1)),
    ],
    slice(0, 1),
)
@worlds.on()
def test_values_of_a_matrix_weigh_what_pyg_weighs_by_them(size, layout, memory, grid):
    """Layers that are given a matrix of torch's; its values weigh what PyG weighs by them."""
    data, mesh = GRAPHS["loops_and_copies"](), worlds.mesh(grid=grid)
    n = data.num_nodes
    edges = U.coalesce(U.remove_self_loops(data.edge_index)[0])
    value = torch.linspace(0.5, 2, edges.size(1), dtype=torch.float64).flip(0)
    adj = torch.sparse_coo_tensor(edges.flip(0), value, (n, n)).coalesce()
    adj = getattr(adj, f"to_sparse_{layout}")()
    whole = Data(x=data.x, adj_t=adj)
    cut = pdc.partition(whole, mesh, "random", memory=memory)
    later = Data(x=data.x, edge_index=edges, edge_weight=value)
    later = pdc.partition(later, mesh, "random", memory=memory)
    later = T.ToSparseTensor("edge_weight", layout=torch.sparse_csr)(later)
    for name, build in VALUED.items():
        if layout == "csc" and name in ("PDNConv", "EGConv", "SAGEConv std"):
            continue  # where PyG takes none
        theirs = seeded(build).double()
        given = (adj, adj) if name == "SignedConv" else (adj,)
        want = stepped(theirs, whole.x, given)
        moved = copy.deepcopy(cut).to("cpu")
        for share, made in (
            (cut, pdc.convert),
            (later, pdc.convert),
            (moved, as_it_is),
        ):
            ours = made(seeded(build).double())
            given = [share.adj_t] * len(given)
            for _ in range(1 + (share is cut)):  # the second time by what is kept
                ours.zero_grad()
                alike.same(stepped(ours, share.x, given), want, name)


def stepped(layer, x, given):
    """The output of a layer, and each gradient."""
    x = x.clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = layer(x, *given)
    out.sin().sum().backward()
    found = {"out": out.detach(), "x": x.grad}
    return found | {name: p.grad for name, p in layer.named_parameters()}


@worlds.on(2)
def test_a_matrix_of_another_number_of_nodes_is_refused():
    data = GRAPHS["loops_and_copies"]()
    share, n = pdc.partition(data, worlds.mesh(), "random"), data.num_nodes
    layer = pdc.convert(pyg.SAGEConv(7, 4).double())
    for size in ((n - 1, n - 1), (n + 1, n + 1), (n, n + 1)):
        adj = torch.ones(size, dtype=torch.float64).to_sparse_csr()
        with pytest.raises(ValueError, match=f"is .{n}, {n}., got"):
            layer(share.x, adj)
    adj = T.ToSparseTensor()(share).adj_t
    with pytest.raises(TypeError, match=f"shape .{n - 1}, 2., .* with {n} nodes"):
        adj @ torch.ones(n - 1, 2)


@tiers.parametrize("size", [1, 2, 3], [2])
@worlds.on()
@alike.in_doubles()
def test_a_matrix_may_lead_from_one_type_to_another(size):
    data = two_types().apply(torch.Tensor.double, "x")
    share = pdc.partition(data, worlds.mesh(), "random")
    layers = [pyg.SAGEConv(4, 3, aggr=kind) for kind in ("mean", "sum", "max")]
    layers.append(pyg.GATConv((4, 4), 3, add_self_loops=False))
    for layer in layers:
        found = []
        for d, made in ((data, as_it_is), (share, pdc.convert)):
            d = T.ToSparseTensor()(copy.copy(d))
            x = [d[kind].x.clone().requires_grad_() for kind in "ab"]
            out = made(copy.deepcopy(layer))(tuple(x), d["a", "to", "b"].adj_t)
            out.sin().sum().backward()
            found.append([out, x[0].grad, x[1].grad])
        alike.same(found[1], found[0])


@worlds.on(2)
def test_values_of_a_matrix_may_be_vectors():
    data = GRAPHS["loops_and_copies"]()
    data = Data(x=data.x, edge_index=U.coalesce(data.edge_index))
    share, n = pdc.partition(data, worlds.mesh(), "random"), data.num_nodes
    attr = torch.linspace(-1, 1, 3 * data.num_edges, dtype=torch.float64).view(-1, 3)
    back = data.edge_index.flip(0)
    adj = U.to_torch_csr_tensor(*U.coalesce(back, attr), size=(n, n))
    layer = pyg.GENConv(7, 4, edge_dim=3).double()
    want = layer(data.x, adj)
    got = pdc.convert(layer)(share.x, adj)
    torch.testing.assert_close(got.full_tensor(), want, rtol=0, atol=1e-9)


@pytest.mark.parametrize("size", [1, 2])
@worlds.on()
def test_parts_of_a_matrix_are_those_of_one_process(size):
    """Rows and columns of a matrix, as torch has them of one process."""
    data, mesh = GRAPHS["loops_and_copies"](), worlds.mesh()
    share, n = pdc.partition(data, mesh, "random"), data.num_nodes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one, all_ = (
            U.to_torch_csr_tensor(U.coalesce(g.edge_index), size=(n, n))
            for g in (data, share)
        )
    for read in (
        lambda a: a[0],
        lambda a: a[-1],
        lambda a: a[0, 1],
        lambda a: a.t()[:, 0],
    ):
        want, got = read(one), read(all_)
        assert got.layout == want.layout
        torch.testing.assert_close(got.to_dense(), want.to_dense())

"""Graphs larger than memory: numbers, bytes and draws under a cap are those without."""

import inspect
from unittest import mock

import alike
import pytest
import tiers
import torch
import torch.nn.functional as F
import torch_geometric.nn
import worlds
from alike import whole
from problems import GRAPHS, owners
from test_layers import exact
from torch.autograd.graph import saved_tensors_hooks
from torch_geometric.nn import FeaStConv, aggr
from torch_geometric.utils import softmax

import pyg_distcomm as pdc
from pyg_distcomm.halo.halo import StagedHalo
from pyg_distcomm.kernels import memory
from pyg_distcomm.nn import GATConv, GCNConv, SAGEConv, capped

pytestmark = pytest.mark.usefixtures("place")

CAP = 60_000  # of which a stage is 3,750 bytes
LARGE = "GATv2Conv edges,EdgeConv,PNAConv,GINConv,TransformerConv,APPNP".split(",")


@pytest.fixture
def counted(monkeypatch):
    """Counts chunks of targets, in this process."""
    count = []
    plain = capped.NodeChunks.__call__

    def counting(self):
        count.append(len(self))
        out = plain(self)
        assert not self.tensors  # only autograd keeps them, within the cap
        return out

    monkeypatch.setattr(capped.NodeChunks, "__call__", counting)
    return count


@tiers.parametrize("name", LARGE, slice(0, 2))
def test_layers_in_chunks_are_pygs(name, counted):
    exact(name, "loops_and_copies", "random", None, CAP)
    assert max(counted) > 3


def test_aggregations_that_pad_are_known():
    every = [getattr(aggr, name) for name in aggr.__all__]
    pads = {k for k in every if "to_dense_batch(" in inspect.getsource(k.forward)}
    assert pads - {aggr.Aggregation} == set(capped.PADDED)


class Own(torch_geometric.nn.MessagePassing):
    """Attends, as a layer of a script may."""

    in_chunks = True

    def __init__(self):
        super().__init__(aggr="add")
        self.lin, self.score = torch.nn.Linear(7, 6), torch.nn.Linear(12, 1)
        self.calls = 0

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x))

    def message(self, x_i, x_j, index, size_i):
        logit = F.leaky_relu(self.score(torch.cat([x_i, x_j], -1)))
        return self.weigh(softmax(logit, index, num_nodes=size_i), x_j)

    def weigh(self, share, x_j):
        return share * x_j.tanh()


class Counts(Own):
    """The same, and counts its calls."""

    in_chunks = False

    def weigh(self, share, x_j):
        self.calls = self.calls + 1
        return super().weigh(share, x_j)


def owned(kind):
    found = []
    for cap in (None, CAP):
        share = cut(worlds.mesh(), "directed", cap)
        torch.manual_seed(1)
        layer = pdc.convert(torch.nn.Sequential(kind().double()))[0]
        found.append(alike.learnt(layer, share.x, share.edge_index))
    torch.testing.assert_close(*map(whole, found), rtol=1e-9, atol=1e-9)
    return layer.calls


def test_layers_of_a_script_run_in_chunks_where_they_say_so(counted):
    owned(Own)
    assert max(counted) > 2
    counted.clear()
    assert owned(Counts) == 1
    assert not counted


FIRST_WITHOUT_EDGES = {
    "GAT": lambda: GATConv(7, 6, edge_dim=3, add_self_loops=False),
    "FeaSt": lambda: FeaStConv(7, 6, heads=2, add_self_loops=False),
}


def without_edges_at_first(name):
    data, found = GRAPHS["directed"](), []
    data.edge_index[1] = data.edge_index[1] // 2 + data.num_nodes // 2
    data.edge_attr = torch.randn(data.num_edges, 3).double()
    torch.manual_seed(1)
    conv = FIRST_WITHOUT_EDGES[name]().double()
    for cap in (None, CAP):
        share = pdc.partition(data.clone(), worlds.mesh(), "block", memory=cap)
        given = share.x, share.edge_index, *([share.edge_attr] * (name == "GAT"))
        found.append(alike.learnt(pdc.convert(conv), *given))
    alike.same(*map(alike.whole, found))


@tiers.parametrize("name", FIRST_WITHOUT_EDGES, ["GAT"])
def test_the_first_chunk_may_have_no_edges(name, counted):
    without_edges_at_first(name)
    assert max(counted) > 2


def test_a_rank_may_have_no_edges():
    worlds.run(without_edges_at_first, 2, "FeaSt")


class Rounding(torch_geometric.nn.MessagePassing):
    """Has a weight that bfloat16 rounds to 1."""

    in_chunks = True

    def __init__(self):
        super().__init__(aggr="add")
        self.lin = torch.nn.Linear(7, 7, bias=False)
        torch.nn.init.eye_(self.lin.weight).data.mul_(1 + 2**-9)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return self.lin(x_j)


def test_chunks_are_computed_again_under_the_autocast_of_the_layer(counted):
    share = cut(worlds.mesh(), "directed", CAP)
    x = share.x.float().requires_grad_()
    layer = pdc.convert(torch.nn.Sequential(Rounding()))[0]
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x, share.edge_index)
    assert max(counted) > 2
    out.float().sum().backward()
    degree = torch.bincount(share.edge_index.full_tensor()[0], minlength=len(x))
    assert torch.equal(x.grad.full_tensor(), degree.float()[:, None].expand(-1, 7))


def _several(cases):
    for case in cases:
        exact(*case, CAP)


def test_layers_in_chunks_on_ranks():
    cases = [
        ("GATv2Conv edges", "directed", "random", (2, 1, 1)),
        ("RGATConv within", "loops_and_copies", "empty_rank", (2, 1, 1)),
    ]
    worlds.run(_several, 2, cases)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = GCNConv(7, 12), SAGEConv(12, 6)
        self.third = GATConv(6, 4, heads=2, dropout=0.3)

    def forward(self, x, edge_index, weight):
        x = F.dropout(self.first(x, edge_index, weight).relu(), 0.4, self.training)
        x = self.second(x, edge_index).tanh()
        return F.log_softmax(self.third(x, edge_index), -1)


def rows_moved(mesh):
    return sum(map(mesh.ledger.words, ("halo", "halo_reduce", "fiber", "edges")))


def trained(share):
    """Two steps; all numbers of the second, and the bytes of both."""
    mesh = share.edge_index.nodes.mesh
    torch.manual_seed(3)
    model, x = Net().double(), share.x.clone().requires_grad_()
    weight = share.edge_weight.clone().requires_grad_()
    before = rows_moved(mesh)
    for _ in range(2):
        for leaf in (x, weight, *model.parameters()):
            leaf.grad = None
        out = model(x, share.edge_index, weight)
        F.nll_loss(out[share.train_mask], share.y[share.train_mask]).backward()
    words = rows_moved(mesh) - before
    found = [out.detach(), x.grad, weight.grad, *(p.grad for p in model.parameters())]
    return whole(found), words


def cut(mesh, graph, cap, cutter="random"):
    data = GRAPHS[graph]()
    owner = owners(cutter, data, mesh.size)
    return pdc.partition(data, mesh, owner, memory=cap)


CASES = [
    ("directed", (2, 1, 1), "random"),
    ("star", (3, 1, 1), "empty_rank"),
    ("loops_and_copies", (1, 1, 1), "random"),
    ("undirected", (2, 2, 1), "lopsided"),
    ("directed", (1, 2, 2), "random"),
]


@tiers.parametrize(("graph", "grid", "cutter"), CASES, slice(0, 1))
@worlds.on()
def test_training_is_that_without_a_cap(graph, grid, cutter):
    want, free = trained(cut(worlds.mesh(grid=grid), graph, None, cutter))
    got, words = trained(cut(worlds.mesh(grid=grid), graph, "2 KiB", cutter))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    assert free <= words  # attention with dropout is exchanged once without a cap


def moved(mesh):
    entries = mesh.ledger.entries.values()
    return sum(e.words for e in entries), sum(e.messages for e in entries)


@worlds.on(2)
def test_stages_have_their_price():
    mesh = worlds.mesh()
    here = cut(mesh, "undirected", None).edge_index.topology.locals
    x = torch.randn(here.halo.num_local, 5, dtype=torch.float64)
    x = x.to(here.halo.send_slot.device)
    link = StagedHalo(here.halo, memory.MemoryCap(4096))
    assert torch.equal(link.begin(x)(), here.halo.begin(x)())
    g = torch.randn(link.num_ghosts, 5, dtype=torch.float64).to(x.device)
    sums = [one.begin_transpose(g)(torch.zeros_like(x)) for one in (link, here.halo)]
    torch.testing.assert_close(*sums, rtol=1e-12, atol=1e-12)
    mesh.ledger.reset()
    link.begin(x)()
    price = link.price(5)
    assert moved(mesh) == (price.words, price.messages)
    plain = here.halo.price(5)
    assert price.words == plain.words
    assert price.messages > plain.messages
    matrix = cut(mesh, "undirected", 4096).edge_index.topology.sum_plan().matrix
    mesh.ledger.reset()
    _ = matrix @ x
    price = matrix.price(5)
    assert moved(mesh) == (price.words, price.messages)
    assert matrix.columns < 5


def test_saved_tensors_go_to_files_and_watch_for_changes():
    cap = memory.MemoryCap("64KiB")  # a quarter is 16 KiB
    x = torch.randn(40, 50, dtype=torch.float64, requires_grad=True)  # 16,000 bytes
    with saved_tensors_hooks(cap.pack, cap.unpack):
        y = x.exp()
        z = y.sin()
    assert not memory.is_mapped(y.grad_fn._saved_result)
    with saved_tensors_hooks(cap.pack, cap.unpack):
        w = torch.randn_like(x).requires_grad_().exp().exp()
    assert memory.is_mapped(w.grad_fn._saved_result)
    z.sum().backward()
    torch.testing.assert_close(x.grad, y.cos() * y)
    with saved_tensors_hooks(cap.pack, cap.unpack):
        y = x.exp()
    y.detach().zero_()
    with pytest.raises(RuntimeError, match="changed in place"):
        y.sum().backward()


@worlds.on(2)
def test_saved_rows_of_shares_go_to_files():
    kept, packed = [], memory.MemoryCap.pack

    def pack(cap, x):
        found = packed(cap, x)
        kept.append(memory.is_mapped(found.tensor))
        return found

    mesh, data = worlds.mesh(), GRAPHS["directed"]()
    data.x = torch.randn(data.num_nodes, 50, dtype=torch.float64)
    conv = torch.nn.Sequential(torch.nn.Linear(50, 40), torch.nn.Linear(40, 40))
    layer, found = torch_geometric.nn.GINConv(conv.double()), []
    for cap in (None, "20KiB"):
        share = pdc.partition(data, mesh, "random", memory=cap)
        kept.clear()
        with mock.patch.object(memory.MemoryCap, "pack", pack):
            found.append(
                alike.learnt(pdc.nn.HaloConv(layer), share.x, share.edge_index)
            )
        assert any(kept) is (cap is not None)
    alike.same(*found)


def test_nothing_is_left_of_what_was_kept():
    cap = memory.MemoryCap("1MiB")
    for _ in range(3):
        x = torch.randn(40, 50, requires_grad=True)
        with saved_tensors_hooks(cap.pack, cap.unpack):
            y = x.exp().sin().exp()
        y.sum().backward()
        del x, y
    assert (cap._saved_bytes, cap._saved) == (0, {})


def test_sizes():
    sizes = {7: 7, "8GiB": 2**33, "1.5 kb": 1500, "2e3": 2000, "3 M": 3_000_000}
    for size, found in sizes.items():
        assert memory.parse_bytes(size) == found
    told = "got memory=.*, wanted a number of bytes; give"
    for size in ("lots", 0, "-3GB", "4 apples", True, "0.1"):
        with pytest.raises(ValueError, match=told):
            pdc.partition(GRAPHS["tiny"](), pdc.init(), memory=size)

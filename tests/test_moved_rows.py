"""What PyG's own layers and plain tensors move on a share, and what one rank does alone."""

import alike
import pytest
import tiers
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
import worlds
from problems import owners
from torch_geometric.data import Data

import pyg_distcomm as pdc
from pyg_distcomm import nn

N, E, WIDE = 60, 300, 4
sizes = tiers.parametrize("size", [2, 3], [2])


def _graph():
    torch.manual_seed(0)
    data = Data(x=torch.randn(N, WIDE), edge_index=torch.randint(N, (2, E)))
    data.kind, data.edge_attr = torch.randint(3, (E,)), torch.randn(E, 3)
    return data.apply(lambda t: t.double() if t.is_floating_point() else t)


def _steps(model, data, leaves, mesh=None):
    """Returns output and gradients of the third of three equal steps."""
    given = [data[name].detach().requires_grad_() for name in leaves]
    for _ in range(3):
        if mesh is not None:
            mesh.ledger.reset()
        for leaf in (*given, *model.parameters()):
            leaf.grad = None
        found = model(data, *given)
        found.sin().sum().backward()
    grads = [leaf.grad for leaf in (*given, *model.parameters())]
    moved = {}
    if mesh is not None:
        moved = {op: mesh.ledger.words(op) for op, _ in mesh.ledger.entries}
    return [alike.whole(t) for t in (found.detach(), *grads)], moved


class _On(torch.nn.Module):
    def __init__(self, make, run):
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.run = make().double(), run

    def forward(self, data, *given):
        return self.run(self.layer, data, *given)


class _Table(torch.nn.Module):
    """Holds a plain row for each node, read by ids and in place."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(N, WIDE))

    def forward(self, data):
        source, target = data.edge_index
        rows = F.embedding(source, self.weight)
        return (data.x + self.weight).index_add(0, target, rows)


CASES = {  # how often the halo travels there and back in a step, and leaves
    "MFConv": (lambda: pyg.MFConv(WIDE, 3), 1, ("x",)),
    "GATConv": (lambda: pyg.GATConv(WIDE, WIDE, edge_dim=3), None, ("x", "edge_attr")),
    "PDNConv": (lambda: pyg.PDNConv(WIDE, 3, 3, 2), None, ("x", "edge_attr")),
    "table": (_Table, 0, ()),
}


def _run(layer, data, *given):
    return layer(data) if not given else layer(given[0], data.edge_index, *given[1:])


@sizes
@pytest.mark.parametrize("name", CASES)
@worlds.on()
def test_layers_of_pyg_gather_nothing_in_a_step(name, size):
    make, times, leaves = CASES[name]
    mesh, data = worlds.mesh(), _graph()
    share = pdc.partition(data, mesh, owners("random", data, mesh.size))
    want, _ = _steps(_On(make, _run), data, leaves)
    got, moved = _steps(_On(make, _run), share, leaves, mesh)
    alike.same(got, want)
    assert not [op for op in moved if op.startswith("gather")], moved
    if times is not None:
        halo = share.edge_index.topology.locals.halo
        assert moved.get("halo", 0) == times * halo.price(WIDE).words
        assert moved.get("halo_reduce", 0) == times * halo.price(WIDE, True).words


@sizes
@worlds.on()
def test_degrees_orders_and_parts_travel_no_further_than_needed(size):
    mesh, data = worlds.mesh(), _graph()
    share = pdc.partition(data, mesh, owners("random", data, mesh.size))
    here = len(share.x.to_local())
    mesh.ledger.reset()
    found = torch.zeros(N).index_add_(0, share.edge_index[1], torch.ones(E))
    assert mesh.ledger.bytes("all_gather") == N - here  # degrees as bytes
    torch.testing.assert_close(
        found, torch.zeros(N).index_add_(0, data.edge_index[1], torch.ones(E))
    )
    mesh.ledger.reset()
    torch.testing.assert_close(share.x.full_tensor(), data.x)
    assert mesh.ledger.words() == (N - here) * WIDE  # no order of rows: all know owners
    both = torch.cat([share.x[share.edge_index[0]], share.x[share.edge_index[1]]])
    mesh.ledger.reset()
    one, other = both.split(E)
    torch.testing.assert_close(
        (one - other).full_tensor(),
        data.x[data.edge_index[0]] - data.x[data.edge_index[1]],
    )
    assert not mesh.ledger.words("halo")  # the parts lie as before they were joined


# What one rank does alone ----------------------------------------------------------------


@sizes
@tiers.parametrize("how", ["table", "ids"], ["table"])
@worlds.on(start=worlds.anew)
def test_what_one_rank_alone_writes_to_is_named_on_all(how, size):
    mesh = worlds.mesh()
    share = pdc.partition(_graph(), mesh, "random")
    table, ids = torch.arange(N), torch.tensor([1, 5, 7, 30])
    h = share.x.double() * 2
    with pytest.raises(ValueError, match=r"\[60\]|\[4\]") as told:  # noqa: PT012
        for step in range(3):
            if step == 2 and mesh.rank == 0:
                table[3] = ids[0] = 9
            if how == "table":
                h[table[share.edge_index][0]].sum()
            else:
                h[ids].sum()
            h[share.edge_index[0]].sum()
    assert {"table": "index() reads", "ids": "that index() got"}[how] in str(told.value)


@sizes
@worlds.on()
def test_a_matrix_that_has_no_values_is_an_error_on_all_ranks(size):
    mesh, data = worlds.mesh(), _graph()
    data.square = torch.randn(N, 3, 3).double()
    share = pdc.partition(data, mesh, owners("random", data, mesh.size))
    square = share.square @ share.square.mT
    plain = data.square @ data.square.mT
    share.square[17] = torch.nan
    for op, k in ((torch.linalg.eigh, 0), (torch.linalg.svd, 1)):
        torch.testing.assert_close(op(square)[k].sum(), op(plain)[k].sum())
        with pytest.raises(RuntimeError, match=r"rank \d: .*linalg"):
            op(share.square)[k].sum()


# What travels of rows that are reduced, kept, or met by odd operands -----------------


def _random(*shape, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=gen, dtype=torch.float64)


W = _random(5, 8, 8)


def _wide_graph():
    gen = torch.Generator().manual_seed(1)
    return Data(
        x=_random(40, 8),
        z=_random(40, 8, seed=1).sigmoid(),
        c=_random(40, 3, 16),
        y=torch.randint(4, (40,), generator=gen),
        edge_index=torch.randint(40, (2, 90), generator=gen),
        edge_attr=torch.rand(90, generator=gen),
    )


def _epochs(model, inputs, mesh, epochs=4):
    """Returns the words that products receive on all ranks, epoch by epoch."""
    found = []
    for _ in range(epochs):
        mesh.ledger.reset()
        model(*inputs).square().sum().backward()
        moved = mesh.ledger.words("halo") + mesh.ledger.words("halo_reduce")
        found.append(moved)
    return found


@worlds.on(2)
def test_layers_send_the_rows_of_constant_features_once():
    whole, mesh = _wide_graph(), worlds.mesh()
    share = pdc.partition(whole, mesh)
    x, edges, weights = share.x.float(), share.edge_index, share.edge_attr
    torch.manual_seed(0)
    constant = {
        "GCN of weights as they are": (
            nn.GCNConv(8, 2, normalize=False),
            (x, edges, weights),
        ),
        "cached GCN": (nn.GCNConv(8, 2, cached=True), (x, edges)),
        "all hops of TAG": (nn.TAGConv(8, 2), (x, edges)),
        "both directions": (nn.DirGNNConv(nn.SAGEConv(8, 2)), (x, edges)),
    }
    for name, (layer, inputs) in constant.items():
        words = _epochs(layer, inputs, mesh)
        assert words[0] > 0, name
        assert words[-1] == 0, (name, words)


@worlds.on(2)
def test_a_sparse_adjacency_sends_back_what_its_transpose_costs():
    whole, mesh = _wide_graph(), worlds.mesh()
    share = pdc.partition(whole, mesh)
    n = whole.num_nodes
    ones = torch.ones(90, dtype=torch.float64)
    adj = torch.sparse_coo_tensor(
        whole.edge_index.flip(0), ones, (n, n)
    ).to_sparse_csr()
    x, own = whole.x.clone().requires_grad_(), share.x.clone().requires_grad_()
    layer = nn.GCN2Conv(8, 0.1, 0.5, 1, normalize=False).double()
    layer(x, whole.c[:, 0, :8], adj).square().sum().backward()
    mesh.ledger.reset()
    layer(own, share.c[:, 0, :8], adj).square().sum().backward()
    torch.testing.assert_close(own.grad.full_tensor(), x.grad)
    price = share.edge_index.topology.sum_plan().matrix
    words = price.price(8).words + price.transposed.price(8).words
    assert mesh.ledger.words("halo") + mesh.ledger.words("halo_reduce") == words


@worlds.on(2)
def test_plain_groups_of_sharded_rows_are_reduced_where_the_rows_are():
    # rows of another test, as many as groups, would have the sums sharded
    whole, mesh = _wide_graph(), worlds.mesh(fresh=True)
    share = pdc.partition(whole, mesh)
    gen = torch.Generator().manual_seed(5)
    perm = torch.randperm(40, generator=gen)[:25]
    group, kinds = torch.randint(3, (25,), generator=gen), _random(3, 8)
    found = []
    for data in (whole, share):
        x, table = data.x.clone().requires_grad_(), kinds.clone().requires_grad_()
        mesh.ledger.reset()
        some = x[perm] * table[group]  # the group of each row is plain
        index = group[:, None].expand(-1, 8)
        pooled = some.new_zeros(3, 8).scatter_add_(0, index, some)
        most = some.new_zeros(3, 8).scatter_reduce(
            0, index, some, "amax", include_self=False
        )
        (pooled.square() + most).sum().backward()
        assert "gather" not in mesh.ledger.table()
        found.append([alike.whole(t) for t in (pooled, most, x.grad, table.grad)])
    torch.testing.assert_close(*reversed(found))


@worlds.on(2)
def test_odd_operands_are_those_of_one_process():
    """Index narrower than rows, negative ids, one row, no rows, other dimensions."""
    whole, mesh = _wide_graph(), worlds.mesh()
    ids, table = torch.arange(40) % 5, _random(5, 8)
    eyes = torch.eye(3, dtype=torch.float64).expand(40, 3, 3)
    cases = {
        "one column": lambda x, c: torch.zeros_like(table).scatter_add(
            0, ids[:, None], x
        ),
        "fewer rows": lambda x, c: torch.zeros_like(table).scatter_add(
            0, ids[:9, None].expand(-1, 8), x
        ),
        "a column put": lambda x, c: x.scatter(0, torch.arange(40)[:, None], x * 2),
        "negative ids": lambda x, c: table[ids - 5] * x,
        "diagonals of rows": lambda x, c: torch.diag_embed(x, dim1=0, dim2=1),
        "solve by one": lambda x, c: torch.linalg.solve(eyes[0] * 2, x[:, :3, None]),
        "cross with one": lambda x, c: torch.linalg.cross(x[:1, :3], x[:, :3]),
        "bilinear of one": lambda x, c: F.bilinear(x[:1], x[:1], W),
        "softmax of none": lambda x, c: x[:0].softmax(0),
        "softmax of large": lambda x, c: (x.half() * 100).softmax(0),
        "pad by reflection": lambda x, c: F.pad(c, (2, 2), mode="reflect"),
        "spectra": lambda x, c: torch.fft.irfft(torch.fft.rfft(x)),
        "eigenvalues": lambda x, c: torch.linalg.eigvals(c[:, :, :3]).abs(),
    }
    for cut in ("random", torch.zeros(40, dtype=torch.int64)):
        share = pdc.partition(whole, mesh, cut)
        for name, case in cases.items():
            got = []
            for data in (whole, share):
                x, c = (data[k].clone().requires_grad_() for k in "xc")
                out = case(x, c)
                if name not in ("one column", "fewer rows", "a column put"):
                    # of which torch has no gradient
                    out.float().square().sum().backward()
                got.append([t for t in (out, x.grad, c.grad) if t is not None])
            loose = 1e-3 if name == "softmax of large" else 1e-9  # in half
            alike.same(*reversed(got), name, rtol=loose, atol=loose)

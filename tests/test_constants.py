"""What is kept of constant structure is what torch computes, whatever is done to it."""

import copy
import gc

import alike
import pytest
import tiers
import torch
import torch_geometric.nn as pyg
import worlds
from torch_geometric.data import Data

import pyg_distcomm as pdc
from pyg_distcomm import nn

N = 12
BASES = [{}, {"num_bases": 2}, {"num_blocks": 2}]


def _scalars(y, x):
    """Numbers that are equal, and are not the same."""
    yield y + 1, y + 1.0, y * 2, y * 2.0, y**2, y**2.0, y.clamp(min=1), y.clamp(min=1.0)
    yield torch.copysign(x, torch.tensor(0.0)), torch.copysign(x, torch.tensor(-0.0))
    yield x.masked_fill(x > 0, 0.0).sign(), 1 / x.masked_fill(x > 0, -0.0)
    yield 1 / (x * 0 * torch.tensor([0.0])), 1 / (x * 0 * torch.tensor([-0.0]))


def _aliases(y, x):
    """Views and other names of what an op writes to."""
    v = y + 3
    w = v.view(-1, 1)
    v.add_(1)
    d = y + 5
    e = d.detach()
    e.add_(1)
    m = x - 2.0
    k = m.unsqueeze(1)
    torch.relu_(m)
    p = y + 9
    p[:2].add_(1)
    a, b = y + 1, y + 2
    torch.add(a, a, out=b)
    yield v, w, d, e, m, k, p, a, b, d + 0, p + 0, b + 0
    yield y + 1, y + 2, y + 3, y + 5, y + 9, x - 2.0


def _norms(y, x):
    found = []
    for _ in range(2):
        norm = torch.nn.BatchNorm1d(1, affine=False).double()
        found += [norm(x), norm.running_mean, norm.running_var]
    yield tuple(found)


def _ids(y, x):
    yield x[y - 1], x[torch.tensor([1, -1])]


@pytest.mark.parametrize("cutter", ["spread", "halves"])
@tiers.parametrize("size", [1, 2, 3], [1, 2])
@worlds.on()
def test_constants_are_what_torch_computes(size, cutter):
    mesh = worlds.mesh()
    owner = torch.zeros(N, dtype=torch.int64)
    if cutter == "spread":
        owner = torch.arange(N) * 5 % mesh.size
    elif mesh.size > 1:  # a rank has none of the first rows
        owner[5:] = mesh.size - 1
    g = torch.Generator().manual_seed(0)
    data = Data(
        x=torch.randn(N, 1, generator=g, dtype=torch.float64),
        edge_index=torch.randint(0, N, (2, 30), generator=g),
        y=torch.arange(N),
    )
    share = pdc.partition(data, mesh, owner)
    for case in (_scalars, _aliases, _norms, _ids):
        for _ in range(2):  # computed, and kept
            want = [*case(copy.copy(data.y), data.x)]
            alike.same([*case(share.y, share.x)], want, case.__name__)
    alike.same([share.y, share.x], [data.y, data.x], rtol=0, atol=0)


def _after_writes(data, layers):
    """What a layer returns, twice, after each write to a view of what it reads."""
    torch.manual_seed(1)
    conv, x = layers.GCNConv(7, 3).double(), data.x.clone()
    edges, w = data.edge_index.clone(), data.edge_weight.clone()
    for write in (
        lambda: w[:9].mul_(3),
        lambda: w.detach().add_(1),
        lambda: x[:, 1].zero_(),
        lambda: x.data[3:9].mul_(2),
        lambda: edges[1].add_(1).remainder_(60),
        lambda: edges[0, :9].zero_(),
        lambda: edges.detach().t()[20:].fill_(3),
    ):
        for _ in range(2):
            yield conv(x, edges, w)
        write()
    yield conv(x, edges, w)


@tiers.parametrize("size", [1, 2, 3], [2])
@worlds.on()
def test_layers_notice_what_is_written_to_views(size):
    data, share = alike.share_of()
    with torch.no_grad():
        alike.same([*_after_writes(share, nn)], [*_after_writes(data, pyg)])


@tiers.parametrize("size", [1, 2], [2])
@worlds.on()
def test_what_is_kept_of_rows_and_parameters_is_bounded(size):
    """What loops over sizes and new parameters leave behind is bounded."""
    mesh = worlds.mesh(fresh=True)
    g = torch.Generator().manual_seed(0)
    data = Data(torch.randn(200, 2, generator=g), torch.zeros(2, 1).long())
    share = pdc.partition(data, mesh, torch.arange(200) % mesh.size)
    for k in range(1, 75):
        some = torch.cat([share.x[:k], share.x])
        moved = share.x[k:] + share.x[: 200 - k]
        torch.testing.assert_close(some.full_tensor(), torch.cat([data.x[:k], data.x]))
        torch.testing.assert_close(moved.full_tensor(), data.x[k:] + data.x[: 200 - k])
        weight = torch.nn.Parameter(torch.ones(2, 2))
        (share.x @ weight).sum().backward()
        del weight
    kept = share.x.rows.derived.items()
    sizes = {k: len(v) for k, v in kept if hasattr(v, "__len__")}
    assert max(sizes.values()) <= 64, sizes
    assert len(mesh.sharded.get("facts", ())) < 20
    count, one = (share.x > 0).long(), torch.ones(1, dtype=torch.long)
    for _ in range(600):  # what follows from one operand that is met as it is
        count = count + one
    assert len(mesh.sharded["constants"]._origin) < 600


@tiers.parametrize("size", [1, 2], [2])
@worlds.on()
def test_edges_that_come_once_make_room_and_others_are_planned_once(size):
    mesh, g = worlds.mesh(fresh=True), torch.Generator().manual_seed(0)
    ends = torch.randint(0, 40, (2, 200), generator=g)
    data = Data(x=torch.randn(40, 4, generator=g), edge_index=ends)
    share, conv = pdc.partition(data, mesh, torch.arange(40) % size), pyg.GATConv(4, 4)

    def run(times):
        """Runs on new edges; returns how many tensors are left behind."""
        for _ in range(times):
            mask = torch.rand(200, generator=g) < 0.7
            out = conv(share.x, share.edge_index[:, mask])
            alike.same(out.full_tensor(), conv(data.x, ends[:, mask]), 1e-5)
        gc.collect()
        return sum(type(x) is torch.Tensor for x in gc.get_objects())

    assert run(20) + 20 > run(20)
    masks = torch.rand(20, 200, generator=g) < 0.7
    for _ in range(3):  # known again in the second, and kept then
        mesh.ledger.reset()
        for mask in masks:
            conv(share.x, share.edge_index[:, mask.clone()])
    assert not mesh.ledger.bytes("plan")


# where no edge ends at nodes of the last rank, and one may have none
@tiers.cover(
    ("options", "owner"),
    [{"aggr": "max"}, {"aggr": "max", "root_weight": False}, *BASES],
    [[0] * 10 + [2, 2], [0, 1] * 5 + [2, 2]],
    step=3,
    ids=str,
)
@worlds.on(3)
def test_relations_are_summed_by_one_product_after_one_exchange(options, owner):
    mesh, owner = worlds.mesh(), torch.tensor(owner)
    torch.manual_seed(0)
    ends, kinds = torch.randint(N - 2, (2, 60)), torch.arange(60) % 3
    x = torch.randn(N, 4, dtype=torch.float64, requires_grad=True)
    share = pdc.partition(Data(x=x, edge_index=ends, edge_type=kinds), mesh, owner)
    torch.manual_seed(1)
    conv = nn.RGCNConv(4, 4, 3, **options).double()
    plain = pyg.RGCNConv(4, 4, 3, **options).double()
    plain.load_state_dict(conv.state_dict())
    want = plain(x, ends, kinds)
    wanted = list(torch.autograd.grad(want.sin().sum(), [x, *plain.parameters()]))
    rows = share.x.detach().requires_grad_()
    for given in ((x, ends, kinds), (rows, share.edge_index, share.edge_type)):
        for _ in range(3):
            mesh.ledger.reset()
            out = conv(*given)
            moved = mesh.ledger.words("halo") + mesh.ledger.words("all_gather")
            torch.testing.assert_close(alike.whole(out), want)
            leaves = [given[0], *conv.parameters()]
            for leaf in leaves:
                leaf.grad = None
            out.sin().sum().backward()
            torch.testing.assert_close(alike.whole([t.grad for t in leaves]), wanted)
    assert moved == share.edge_index.topology.locals.halo.price(4).words  # of all
    with pytest.raises(RuntimeError, match="shape"):  # whose sums would fit other rows
        nn.RGCNConv(8, 4, 3, root_weight=False).double()(x, ends, kinds)


@tiers.parametrize("relations", [3, 40], [3])  # of 40 most rows are empty
@worlds.on(2)
def test_types_of_edges_may_be_made_anew_and_be_many(relations):
    mesh = worlds.mesh()
    torch.manual_seed(0)
    ends, kinds = torch.randint(N, (2, 60)), torch.randint(relations, (60,))
    x = torch.randn(N, 4)
    share = pdc.partition(Data(x=x, edge_index=ends, edge_type=kinds), mesh)
    torch.manual_seed(1)
    conv, plain = nn.RGCNConv(4, 3, relations), pyg.RGCNConv(4, 3, relations)
    plain.load_state_dict(conv.state_dict())
    for k in range(7):  # of which four are kept
        want = plain(x, ends, (kinds + k) % relations)
        found = conv(share.x, share.edge_index, (share.edge_type + k) % relations)
        torch.testing.assert_close(found.full_tensor(), want)
        again = conv(x, ends, (kinds + k) % relations)
        torch.testing.assert_close(again, want)

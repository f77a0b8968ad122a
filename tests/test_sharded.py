"""PyG's own layers, unmodified, on tensors that are sharded below autograd."""

import warnings

import alike
import layers
import pytest
import tiers
import torch
import torch.autograd.forward_ad as forward_ad
import torch_geometric.nn as pyg
import worlds
from problems import GRAPHS, owners
from test_layers import problem, shared, step
from torch.nn.utils.parametrizations import weight_norm

import pyg_distcomm as pdc
from pyg_distcomm import DistTensor, nn
from pyg_distcomm.sharded import whole

LAYERS = {**layers.EXACT, **layers.OTHERS}
CUTTERS = ("random", "empty_rank")


def _pieces(conv, data, names):
    found = step(conv, data, names)
    found |= {f"grad of {k}": p.grad for k, p in conv.named_parameters()}
    return found | {f"buffer {k}": b for k, b in conv.named_buffers()}


@tiers.parametrize(
    ("graph", "size"),
    [("loops_and_copies", 3), ("directed", 2), ("undirected", 1)],
    slice(1, 2),
)
@worlds.on()
@alike.in_doubles()
def test_layers_of_pyg_run_as_they_are(graph, size):
    mesh = worlds.mesh()
    for at, name in enumerate(sorted(LAYERS)[3 - size :: 3]):
        build, inputs = LAYERS[name]
        want = _pieces(layers.make(build), problem(graph), inputs)
        share = shared(problem(graph), mesh, CUTTERS[at % 2])
        got = _pieces(layers.make(build), share, inputs)
        alike.same(got, want, f"{name} on {graph}")


def _backward_hooks(data):
    torch.manual_seed(0)
    conv, seen = pyg.GCNConv(7, 4), []
    conv.register_full_backward_hook(lambda m, i, o: seen.append(o[0].mean(0)))
    x = data.x.detach().requires_grad_()
    conv(x, data.edge_index).square().sum().backward()
    return seen


def _double_backward(data):
    torch.manual_seed(0)
    conv, x = pyg.GATConv(7, 4), data.x.detach().requires_grad_()
    out = conv(x, data.edge_index).square().sum()
    (g,) = torch.autograd.grad(out, x, create_graph=True)
    g.square().sum().backward()
    return [p.grad for p in conv.parameters() if p.grad is not None]


def _own(data):
    """The layers of this package for a share, and those that they are."""
    lib = nn if isinstance(data.x, DistTensor) else pyg
    return lib.GCNConv, lib.SAGEConv, lib.GATConv


def _functional(data):
    torch.manual_seed(0)
    found = []
    for make in (pyg.SAGEConv, pyg.GraphConv, *_own(data)):
        conv = make(7, 4)

        def loss(params, conv=conv):
            out = torch.func.functional_call(conv, params, (data.x, data.edge_index))
            return out.square().sum()

        params = dict(conv.named_parameters())
        found += list(torch.func.grad(loss)(params).values())
    return found


def _views_after_no_grad(data):
    torch.manual_seed(0)
    weight, found = torch.nn.Parameter(torch.randn(1, 7, 4)), []
    for _ in range(3):
        with torch.no_grad():
            torch.einsum("nf,fg->ng", data.x, weight[0])
        torch.einsum("nf,fg->ng", data.x, weight[0]).square().sum().backward()
        found.append(weight.grad.clone())
    return found


def views_of_copies(x):
    """Writes to parts of parts that ranks hold as copies."""

    def put(part, at):
        part[at] = 2

    yield lambda: put(x[3], 1)
    yield lambda: put(x[3], slice(1, 3))
    yield lambda: x[3][1:3].zero_()
    yield lambda: x[3].detach().zero_()
    yield lambda: x[3].view(1, -1).t().add_(1)
    yield lambda: x[3].split(2)[0].zero_()
    yield lambda: torch.add(x[4], 1, out=x[3])
    yield lambda: torch.add(x[::2], 1, out=x[::2])
    yield lambda: x[::2][:, 1:].zero_()
    yield lambda: x[::2][1:4].zero_()
    yield lambda: x[::2].t().detach().zero_()
    yield lambda: x.diagonal()[1:3].zero_()
    yield lambda: x.unbind()[3][1:3].zero_()
    yield lambda: torch._foreach_zero_([x[3], x[4]])


@tiers.parametrize("size", [1, 2, 3], [1, 2])
@worlds.on()
def test_what_would_be_lost_or_differ_is_refused(size):
    """What is refused, on all ranks and before anything is exchanged, and what is said."""
    mesh, data = worlds.mesh(fresh=True), problem("directed")
    share = pdc.partition(data, mesh, owners("random", data, mesh.size))
    x, n = share.x, data.num_nodes
    for write in (
        lambda: x[3].zero_(),
        lambda: x[::2].mul_(2),
        lambda: x.view(7, -1).fill_(1),
        *views_of_copies(x),
    ):
        with pytest.raises(RuntimeError, match="would not see what is written"):
            write()
    if mesh.size > 1:
        with pytest.raises(ValueError, match=r"row-sharded one of .* pdc\.from_local"):
            x + torch.zeros_like(x.to_local()[: n // 3])
        with pytest.raises(ValueError, match="lists that differ"):
            x[torch.tensor([mesh.rank])]
        with pytest.raises(ValueError, match="differ"):
            x + torch.full((n, 1), float(mesh.rank))
    with pytest.raises(IndexError, match=f"{n} rows"):
        x[torch.tensor([n])]
    for mask in (torch.ones(5, dtype=torch.bool), share.edge_attr[:, 0] > 0):
        with pytest.raises(IndexError, match=f"wanted one of {n}"):
            x[mask]
    with pytest.raises(TypeError, match=r"resize_\(\) would change the shape"):
        x.clone().resize_(7)
    for value, kind, told in (
        (3, TypeError, "wanted a tensor"),
        (x.new_ones(5, 7), ValueError, "plain"),
    ):
        with pytest.raises(kind, match=told):
            x.data = value
    alike.same(x, data.x)
    mesh.sharded["strict"] = True
    if mesh.size > 1:
        with pytest.raises(TypeError, match=r"sort\(\) needs all rows.*strict=True"):
            x.sort(0)
    mesh.sharded["strict"] = False
    with pytest.raises(TypeError, match="strict must be True or False, got 'yes'"):
        pdc.init(strict="yes")
    with (
        warnings.catch_warnings(record=True) as said,
        pytest.MonkeyPatch.context() as large,
    ):
        warnings.simplefilter("always")
        large.setattr(whole, "_LARGE", 3 * n * x[0].nbytes)
        torch.zeros_like(x).repeat(1, 8)[:, :1].sort(0)
        wide = torch.zeros_like(x).repeat(1, 4)
        wide.sort(0)
        wide.sort(0)
    told = [str(w.message) for w in said if "gathers all rows" in str(w.message)]
    assert len(told) == (mesh.size > 1 and mesh.rank == 0) * 2, told
    assert all("test_sharded.py" in text for text in told)


def _numbers(data):
    """Writes to single rows, extremes of what is no number, puts of several at one place."""
    h = data.x.clone()
    h[:3] = data.x[3:6]
    h[3] = 7.0
    h[-1, 2] = 1.0
    h[1::3] = -2.0
    h[5, 1] = float("nan")
    at = data.edge_index[1]
    put = torch.zeros_like(h[:, 0]).scatter(0, at, torch.arange(1.0, len(at) + 1))
    return [h, h.amax(0), h[:, 2].min(), put]


def _read_early(data):
    """Reads gradients that passes add up, by a hook before the backward pass ends."""
    torch.manual_seed(0)
    convs, seen = [make(7, 4) for make in (pyg.GraphConv, _own(data)[0])], []
    for conv in convs:
        at = len(seen)
        for p in conv.parameters():
            p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad + 0))
        for _ in range(3):
            conv(data.x, data.edge_index).square().sum().backward()
        seen[at:] = sorted(seen[at:], key=lambda g: (g.dim(), float(g.sum())))
    return seen


def _inference(data):
    torch.manual_seed(0)
    conv = pyg.GATConv(7, 4)
    with torch.inference_mode():
        return [conv(data.x.clone(), data.edge_index)]


def _differing_seeds(data):
    """Takes rank 0's parameters, also of what is computed from them."""
    spread = isinstance(data.x, DistTensor)
    torch.manual_seed(data.x.rows.mesh.rank if spread else 0)
    conv, scale = pyg.GCNConv(7, 4), torch.rand(()).requires_grad_()
    two = [weight_norm(torch.nn.Linear(4, 4)) for _ in range(2)]
    base, *factors = (torch.nn.Parameter(torch.rand(4, 4)) for _ in range(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = conv(data.x, data.edge_index) * scale.exp()
        out = two[1](two[0](out)) @ torch.sparse.mm(torch.eye(4).to_sparse(), base)
        for factor in factors:
            out = out @ (base * factor.exp().sum(0).expand(4, 4))
        out.square().mean().backward()
    parameters = [p for module in (conv, *two) for p in module.parameters()]
    return [scale.grad, *(p.grad for p in (*parameters, base, *factors))]


def _forward_mode(data):
    """Differentiates layers forwards, along their parameters and along rows."""
    torch.manual_seed(0)
    found = []
    pygs = pyg.GCNConv(7, 4), pyg.GATConv(7, 4), pyg.SAGEConv(7, 4, aggr="max")
    for conv in (*pygs, *(make(7, 4) for make in _own(data))):
        one = {name: p.detach().cos() for name, p in conv.named_parameters()}
        now = {name: p.detach() for name, p in conv.named_parameters()}

        def out_of(p, conv=conv):
            return torch.func.functional_call(conv, p, (data.x, data.edge_index))

        found += torch.func.jvp(out_of, (now,), (one,))
        if conv not in pygs:
            continue
        with forward_ad.dual_level():
            x = forward_ad.make_dual(data.x, data.x.cos())
            out = forward_ad.unpack_dual(conv(x, data.edge_index))
            found += [out.primal.detach().clone(), out.tangent.detach().clone()]
    return found


def _rows_into_plain(data):
    """Puts rows into parts of a plain tensor, which becomes sharded."""
    x = data.x.detach().clone().requires_grad_()
    h, out = x[data.edge_index[0]][:40], torch.zeros(40, 7)
    out[0::4], out[1::4] = h[0::4].exp(), h[1::4] - h[2::4]
    out[20:30] = h[:10].square()
    out = torch.zeros_like(x).index_add(0, data.edge_index[1][:40], out)
    (out.sin() * data.x).sum().backward()
    return [out, x.grad]


CALLS = (_backward_hooks, _double_backward, _functional, _views_after_no_grad)
MENDED = (
    _rows_into_plain,
    _numbers,
    _read_early,
    _inference,
    _differing_seeds,
    _forward_mode,
)


@alike.in_doubles()
def same_calls(cases, fresh):
    data, mesh = GRAPHS["directed"](), worlds.mesh(fresh=fresh)
    cutter = "empty_rank" if mesh.size == 3 and not fresh else "random"
    for case in cases:
        share = pdc.partition(data, mesh, owners(cutter, data, mesh.size))
        alike.same(case(share), case(data), case.__name__)


@tiers.parametrize("size", [1, 2, 3], [2])
def test_scripts_compute_the_numbers_of_one_process(size):
    worlds.run(same_calls, size, CALLS, False)
    worlds.run(same_calls, size, MENDED, True)


@worlds.on(2)
@alike.in_doubles()
def test_constant_structure_is_planned_once_and_gradients_are_summed_together():
    """Counts collectives of epochs whose results are those of one process."""
    data, share = alike.share_of()
    mesh, found, counts = share.x.rows.mesh, [], []
    for given in (data, share):
        torch.manual_seed(0)
        first, last = (pyg.GATConv(n, 4, heads=2, concat=False) for n in (7, 4))
        weights = [*first.parameters(), *last.parameters()]
        optimizer = torch.optim.Adam(weights)
        for _ in range(4):
            before = {k: v.calls for k, v in mesh.ledger.entries.items()}
            optimizer.zero_grad()
            edges = given.edge_index.clone()
            edges[0] += 3  # in place, as in what joins types of nodes
            edges[0] -= 3
            out = last(first(given.x, given.edge_index).relu(), edges)
            out.square().sum().backward()
            optimizer.step()
            after = {k: v.calls for k, v in mesh.ledger.entries.items()}
            counts.append({k[0]: n - before.get(k, 0) for k, n in after.items()})
        assert all(type(w.grad) is torch.Tensor for w in weights)
        found.append([out, weights])
    alike.same(found[1], found[0])
    first, *others = counts[4:]
    assert first["plan"] > 0
    for later in others:
        assert later.get("plan", 0) == 0
        assert later["all_reduce"] == 2  # the loss, and all gradients
        assert not [n for n in later if n.startswith("gather") and later[n]]

"""Gradients of parameters without a wrapper: those of one process, equal on all ranks."""

import copy
import warnings

import alike
import batches
import pytest
import tiers
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch_geometric.nn as pyg
import worlds
from alike import share_of
from pipelines import loss_of
from problems import GRAPHS
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import pyg_distcomm as pdc
import pyg_distcomm.nn as nn
from pyg_distcomm.loader import (
    DataLoader,
    GraphSAINTNodeSampler,
    LinkNeighborLoader,
    LoaderOptions,
    NeighborLoader,
    RandomNodeLoader,
)

pytestmark = pytest.mark.usefixtures("place")


class Net(torch.nn.Module):
    def __init__(self, lib, norm=True):
        super().__init__()
        self.conv1 = lib.GCNConv(7, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.conv2 = lib.SAGEConv(8, 6)
        self.conv3 = lib.GATConv(6, 4)
        self.scale = torch.nn.Parameter(torch.tensor(1.3))
        self.unused = torch.nn.Linear(2, 2)

    def encode(self, x, edge_index):
        return self.norm(self.conv1(x, edge_index)).relu()

    def decode(self, z, edge_index):
        return self.conv3(self.conv2(z, edge_index).relu(), edge_index) * self.scale

    def forward(self, x, edge_index):
        return self.decode(self.encode(x, edge_index), edge_index)


def net_of(lib, make=Net, seed=5):
    torch.manual_seed(seed)
    return make(lib).double()


def step(model, data, out=None):
    loss = loss_of(model(data.x, data.edge_index) if out is None else out, data)
    loss.backward()
    return model


def _penalty(net, data):
    out = net(data.x, data.edge_index)
    norms = sum(p.square().sum() for p in net.conv1.parameters())
    (loss_of(out, data) + 0.1 * norms + 0.01 * net.unused.weight.sum()).backward()
    return net


def _accumulated(net, data):
    step(net, data), step(net, data)
    loss_of(net(data.x, data.edge_index), data).mul(0.5).backward()
    return net


def _frozen(net, data):
    net.conv1.requires_grad_(False)
    step(net, data)
    net.conv1.requires_grad_(True)
    return step(net, data)


def _spectral_norm(net, data):
    """Each read of a weight is a step of the power iteration."""
    net.conv1.lin = parametrizations.spectral_norm(net.conv1.lin)
    net.conv2.lin_l = parametrizations.spectral_norm(net.conv2.lin_l)
    torch.nn.utils.spectral_norm(net.conv3.lin)
    return step(net, data)


def _weight_norm(net, data):
    net.conv1.lin = parametrizations.weight_norm(net.conv1.lin)
    net.extra = parametrizations.weight_norm(torch.nn.Linear(4, 4).double())
    torch.nn.init.ones_(net.extra.weight)
    return step(net, data, net.extra(net(data.x, data.edge_index)))


def _global_scale(net, data):
    z = net(data.x, data.edge_index)
    return step(
        net, data, z / (1 + z.square().mean()) * net.scale + z.mean(0) * net.scale
    )


def _hooks(net, data):
    net.conv1.lin.weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    step(net, data)
    net.scale.register_hook(lambda g: g.square())
    return step(net, data)


def _checkpointed(reentrant):
    def run(net, data):
        x = data.x.clone().requires_grad_()
        z = checkpoint(net.encode, x, data.edge_index, use_reentrant=reentrant)
        return step(net, data, net.decode(z, data.edge_index))

    return run


def _autograd_grad(net, data):
    loss = loss_of(net(data.x, data.edge_index), data)
    parameters = [p for p in net.parameters() if p.shape != (2, 2) and p.shape != (2,)]
    for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        p.grad = g
    return net


def _intermediate(net, data):
    """Gradients of what is computed from parameters, asked for themselves."""
    z = net.encode(data.x, data.edge_index)
    scale = net.scale.exp()
    scale.retain_grad()
    shift = torch.zeros(4, device=scale.device) + net.scale
    shift.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    step(net, data, z[:, :4].sin() * scale + shift)
    weight = net.scale * torch.ones(4, device=scale.device)
    cut = (z.detach()[:, :4] * weight).cos().mean()
    (g,) = torch.autograd.grad(cut, weight)
    net.scale.grad += g.sum() + scale.grad
    return net


def _copied(net, data):
    twin = copy.deepcopy(step(net, data))
    twin.zero_grad()
    return step(twin, data)


def _embedding(net, data):
    net.table = torch.nn.Embedding(data.num_nodes, 7).double()
    torch.nn.init.normal_(net.table.weight, generator=torch.Generator().manual_seed(0))
    return step(net, data, net(net.table.weight, data.edge_index))


def _sparse(net, data):
    net.rows = torch.nn.Embedding(4, 7, sparse=True).double()
    torch.nn.init.normal_(net.rows.weight, generator=torch.Generator().manual_seed(0))
    for _ in range(2):  # the second time it is known to be sparse
        step(net, data, net(data.x + net.rows(data.y), data.edge_index))
    assert net.rows.weight.grad.is_sparse
    net.rows.weight.grad = net.rows.weight.grad.to_dense()
    return net


def _shared(net, data):
    net.conv2.lin_l.weight = net.conv2.lin_r.weight
    net.conv3.att_dst = net.conv3.att_src
    return step(net, data)


def _edge_weights(net, data):
    w = torch.linspace(0.1, 1, data.num_edges).double().to(data.x.device)
    net.w = torch.nn.Parameter(w)
    out = net.conv1(data.x, data.edge_index, net.w)
    return step(net, data, out[:, :4] * net.scale)


def _recurrent(net, data):
    torch.manual_seed(3)
    net.rnn = torch.nn.LSTM(8, 4, batch_first=True).double()
    z = net.encode(data.x, data.edge_index)
    return step(net, data, net.rnn(z.unsqueeze(1))[0][:, 0])


def _detached(net, data):
    """As a memory that training carries on, but does not go back through."""
    z = net.encode(data.x, data.edge_index).detach_()
    return step(
        net, data, net.decode(z + net.encode(data.x, data.edge_index), data.edge_index)
    )


def _reversible(net, data):
    torch.manual_seed(3)
    net.rev = pyg.GroupAddRev(pyg.SAGEConv(4, 4), num_groups=2).double()
    z = net.encode(data.x, data.edge_index).sin()
    return step(net, data, net.decode(net.rev(z, data.edge_index), data.edge_index))


CASES = {
    "forward": step,
    "penalty": _penalty,
    "accumulated": _accumulated,
    "frozen": _frozen,
    "spectral norm": _spectral_norm,
    "weight norm": _weight_norm,
    "global results": _global_scale,
    "hooks": _hooks,
    "checkpoint": _checkpointed(False),
    "reentrant checkpoint": _checkpointed(True),
    "autograd.grad": _autograd_grad,
    "intermediate": _intermediate,
    "deepcopy": _copied,
    "whole embedding": _embedding,
    "sparse": _sparse,
    "shared": _shared,
    "edge weights": _edge_weights,
    "recurrent": _recurrent,
    "detach_": _detached,
    "reversible": _reversible,
}


@pytest.mark.parametrize(
    ("size", "cutter"),
    [tiers.rarely(1, "block"), (2, "random"), tiers.rarely(3, "no_train")],
)
@worlds.on()
def test_gradients_are_those_of_one_process(size, cutter):
    data, share = share_of("directed", cutter)

    def check(case):
        want = case(net_of(pyg), data)
        got = case(net_of(nn).to(share.x.device), share)
        for kind in ("data", "grad"):
            sides = (
                {k: getattr(p, kind) for k, p in net.named_parameters()}
                for net in (got, want)
            )
            alike.same(*sides, kind, rtol=1e-8)

    alike.check_all(CASES, check)


@worlds.on(2)
def test_parameters_that_differ_take_rank_0s_and_say_so_once():
    data, share = share_of()
    mesh = share.x.rows.mesh
    torch.manual_seed(mesh.rank)
    net = Net(nn).double()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step(net, share)
    torch.manual_seed(0)
    want = step(Net(pyg).double(), data)
    alike.same(*([p.grad for p in one.parameters()] for one in (net, want)))
    told = [w for w in told if "rank 0's are taken" in str(w.message)]
    assert len(told) == (mesh.rank == 0)


@worlds.on(2)
def test_what_differs_between_ranks_is_refused():
    mesh = worlds.mesh(fresh=True)
    data = GRAPHS["directed"]()
    share = pdc.partition(data, mesh, "random")
    torch.manual_seed(mesh.rank)
    with pytest.raises(ValueError, match="seed the generator"):
        share.x + torch.rand(data.num_nodes, 1).double().to(share.x.device)
    with pytest.raises(ValueError, match=r"pdc\.from_local"):
        share.x + torch.zeros_like(share.x.to_local())
    frozen = nn.GATConv(share.x.size(1), 4).double().to(share.x.device)
    with pytest.raises(ValueError, match=r"differ.*leave out tensor parallelism"):
        frozen.requires_grad_(False)(share.x, share.edge_index)
    local = torch.full_like(share.x.to_local(), float(mesh.rank)).requires_grad_()
    out = (pdc.from_local(local, like=share.x) * share.x).sum()
    out.backward()
    torch.testing.assert_close(local.grad, share.x.to_local())


@tiers.parametrize(
    ("size", "loader", "wrapper"),
    [(2, False, False), (2, False, True), (3, True, True), (2, True, True)],
    slice(1, 4, 2),
)
@worlds.on()
def test_another_learning_rate_is_refused(size, loader, wrapper):
    """Trains a model with another learning rate on rank 1."""
    mesh = worlds.mesh()
    data = GRAPHS["undirected"]()
    share = pdc.partition(data, mesh, "random")
    model = net_of(nn).to(share.x.device)
    if wrapper:
        model = pdc.replicate(model, mesh, find_unused_parameters=True)
    rates = [0.01, 0.02] + [0.01] * mesh.size
    optimizer = torch.optim.Adam(model.parameters(), lr=rates[mesh.rank])
    made = NeighborLoader(data, [2, 2, 2], batch_size=2) if loader else [share] * 5
    steps = []

    def trained():
        for batch in made:
            optimizer.zero_grad()
            batch = batch.to(share.x.device) if loader else batch
            out = model(batch.x, batch.edge_index)
            rows = slice(batch.batch_size) if loader else slice(None)
            F.cross_entropy(out[rows], batch.y[rows]).backward()
            optimizer.step()
            steps.append(batch)

    with pytest.raises(
        ValueError,
        match=r"between ranks \[1\] and rank 0\. Give optimizers the same lr",
    ):
        trained()
    assert len(steps) == 1


@worlds.on(2)
def test_a_pass_sums_all_gradients_of_parameters_at_once():
    _, share = share_of()
    net = net_of(nn)
    ledger = share.x.rows.mesh.ledger
    for _ in range(3):
        net.zero_grad()
        loss = loss_of(net(share.x, share.edge_index), share)
        ledger.reset()
        loss.backward()
    entry = ledger.entries["all_reduce", "world"]
    used = sum(p.numel() for p in net.parameters() if p.grad is not None)
    # those of the batch norm are needed on the way
    assert (entry.calls, entry.words) == (2, used)


UNREAD = {
    "mean": lambda: nn.SAGEConv(4, 3),
    "max": lambda: nn.SAGEConv(4, 3, aggr="max"),
    "weights": lambda: nn.GCNConv(4, 3),
    "attention": lambda: nn.GATConv(4, 3),
    "edges": lambda: nn.GATv2Conv(4, 3, edge_dim=2),
}


class TwoOutputs(torch.nn.Module):
    """Each output of a layer of its own, behind one that both read."""

    def __init__(self, make):
        super().__init__()
        self.both, self.read, self.unread = torch.nn.Linear(5, 4), make(), make()

    def forward(self, x, *edges):
        x = self.both(x)
        return {"read": self.read(x, *edges), "unread": self.unread(x, *edges)}


@tiers.parametrize("kind", [*UNREAD], ["mean"])
@worlds.on(2)
def test_replicate_leaves_what_no_rank_reads_without_a_gradient(kind):
    """No gradient, not one of zeros, is what an optimizer with weight decay passes over."""
    g = torch.Generator().manual_seed(worlds.mesh().rank)
    x = torch.rand(6, 5, generator=g)
    edges = [torch.randint(0, 6, (2, 20), generator=g)]
    edges += [torch.rand(20, 2, generator=g)] if kind == "edges" else []
    torch.manual_seed(0)
    model = TwoOutputs(UNREAD[kind])
    model = pdc.replicate(model, find_unused_parameters=True)
    for _ in range(3):  # edges are known from the second time on
        model.zero_grad()
        model(x, *edges)["read"].square().sum().backward()
        for name, p in model.module.named_parameters():
            assert (p.grad is None) == name.startswith("unread"), name


# Minibatches on several ranks --------------------------------------------------------


def graph():
    return batches.graph(n=120, e=700)


LOADERS = {
    "nodes": lambda data: NeighborLoader(data, [4, 3], batch_size=10, shuffle=True),
    "links": lambda data: LinkNeighborLoader(
        data,
        [4, 3],
        batch_size=50,
        neg_sampling_ratio=1.0,
        edge_label_index=data.edge_index[:, :400],
    ),
    "workers": lambda data: NeighborLoader(data, [4, 3], batch_size=10, num_workers=1),
    "one batch": lambda data: NeighborLoader(data, [4, 3], batch_size=60),
    "parts": lambda data: RandomNodeLoader(data, num_parts=8, shuffle=True),
    "saint": lambda data: GraphSAINTNodeSampler(data, 40, num_steps=6),
}


def batch_loss(model, batch):
    out = model(batch.x, batch.edge_index)
    if "edge_label" in batch:
        at = batch.edge_label_index
        score = (out[at[0]] * out[at[1]]).sum(-1)
        return F.binary_cross_entropy_with_logits(score, batch.edge_label)
    rows = batch.get("batch_size", len(out))
    return F.cross_entropy(out[:rows], batch.y[:rows])


def gap(model):
    """The largest difference between ranks of a parameter."""
    mine = torch.cat([p.detach().flatten().cpu() for p in model.parameters()])
    every = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return max(float((other - mine).abs().max()) for other in every)


def train(how, loader="nodes", share=False, mesh=None):
    """Returns how far models are apart in the end, or the error; and the steps done."""
    mesh = worlds.mesh() if mesh is None else mesh
    data = pdc.partition(graph(), mesh, "random") if share else graph()
    made = LOADERS[loader](data) if isinstance(loader, str) else loader(data)
    torch.manual_seed(3)
    model = (pdc.nn if share else pyg).GraphSAGE(5, 8, 2, 4)
    run, optimizer, after_backward, after_step = HOW[how](model, mesh)
    steps = 0
    try:
        for _ in range(2):
            for batch in made:
                optimizer.zero_grad()
                batch_loss(run, batch.to(mesh.device)).backward()
                after_backward(), optimizer.step(), after_step()
                steps += 1
    except ValueError as error:
        return str(error), steps
    return gap(model), steps


def nothing():
    pass


def _adam(model, lr=0.01):
    return torch.optim.Adam(model.parameters(), lr=lr)


def _by(model, optimizer=None, run=None, average=nothing, after=nothing):
    """What is run, the optimizer, and what follows a backward pass and a step."""
    return run or model, optimizer or _adam(model), average, after


def _warm(model, mesh):
    optimizer = _adam(model)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(k / 4, 1.0))
    return _by(model, optimizer, after=rate.step)


def _added_up(model, mesh):
    optimizer = _adam(model)
    inner, zero, calls = optimizer.step, optimizer.zero_grad, [0]

    def step():
        calls[0] += 1
        if calls[0] % 3 == 0:
            inner(), zero()

    optimizer.step, optimizer.zero_grad = step, nothing
    return _by(model, optimizer)


def _lbfgs(model, mesh):
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=1)
    inner = optimizer.step
    optimizer.step = lambda: inner(lambda: torch.zeros(()))
    return _by(model, optimizer)


def _zero(model, mesh):
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    return _by(model, optimizer, DistributedDataParallel(model))


def _own_sum(model, mesh):
    """A sum in another order on each rank, which rounds in another way."""

    def average():
        for p in model.parameters():
            every = [torch.zeros_like(p.grad) for _ in range(mesh.size)]
            dist.all_gather(every, p.grad)
            mine = every[mesh.rank :] + every[: mesh.rank]
            p.grad.copy_(sum(mine) / mesh.size)

    return _by(model, average=average)


def _own_parameters(model, mesh):
    def average():
        for p in model.parameters():
            dist.all_reduce(p.data)
            p.data /= mesh.size

    return _by(model, after=average)


def _probed(model, mesh):
    """Rank 0 alone trains something else, too."""
    probe = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(probe.parameters(), lr=0.1)
    steps = iter(range(99))

    def train_probe():
        if mesh.rank == 0 and next(steps) == 0:
            probe(torch.ones(2, 2)).sum().backward()
            optimizer.step()

    return _by(model, run=DistributedDataParallel(model), after=train_probe)


LATE = {"warm": _warm, "accumulated": _added_up, "lbfgs": _lbfgs}
AVERAGED = {
    "replicate": lambda model, mesh: _by(model, run=pdc.replicate(model, mesh)),
    "ddp": lambda model, mesh: _by(model, run=DistributedDataParallel(model)),
    "zero": _zero,
    "own sum": _own_sum,
    "own parameters": _own_parameters,
    "probed": _probed,
}
HOW = {"plainly": lambda model, mesh: _by(model), **LATE, **AVERAGED}


def refused(answers, steps):
    for error, done in answers:
        assert isinstance(error, str), error
        assert "model = pdc.replicate(model, mesh)" in error
        assert done == steps


@tiers.parametrize("size", [2, 3], [2])
def test_training_that_nothing_averages_is_refused_after_a_step(size):
    refused(worlds.run(train, size, "plainly"), 1)
    (first, _), *others = worlds.run(train, size, "plainly", "nodes", True)
    assert "pdc.replicate" in first
    assert all(error == first for error, _ in others)


@tiers.parametrize("loader", list(LOADERS), ["links", "one batch"])
def test_batches_of_every_loader_are_looked_at(loader):
    refused(worlds.run(train, 2, "plainly", loader), 1)


@pytest.mark.parametrize(("how", "steps"), [*zip(LATE, (2, 4, 1), strict=True)])
def test_steps_that_come_late_or_change_nothing_are_refused_later(how, steps):
    refused(worlds.run(train, 2, how), steps)


@tiers.parametrize("how", AVERAGED, slice(0, None, 2))
def test_what_averages_in_any_way_is_left_alone(how):
    size = 3 if how == "own sum" else 2
    for found, steps in worlds.run(train, size, how):
        assert found < 1e-6, found
        assert steps == 2 * -(-12 // size)


@worlds.on(2)
def test_batches_that_are_the_same_or_cut_need_no_wrapper():
    mesh, options = worlds.mesh(), LoaderOptions(split=False, seed=1)
    every = lambda d: NeighborLoader(d, [-1], batch_size=10, options=options)  # noqa: E731
    assert train("plainly", every, mesh=mesh) == (0.0, 24)
    made, model, steps = [graph() for _ in range(4)], pdc.nn.GraphSAGE(5, 8, 2, 4), 0
    optimizer = _adam(model)
    for batch in DataLoader(made, batch_size=2, mesh=mesh):
        optimizer.zero_grad()
        batch_loss(model, batch).backward()
        optimizer.step()
        steps += 1
    assert gap(model) < 1e-6
    assert steps == 2


@worlds.on(2)
def test_the_comparison_can_be_left_out():
    with worlds.mesh(fresh=True, check="never") as mesh:
        found, steps = train("plainly", mesh=mesh)
    assert found > 1e-3
    assert steps == 12


@worlds.on(2)
def test_evaluation_waits_for_nobody():
    """A loader for evaluation, and a probe that rank 0 trains after it."""
    mesh = worlds.mesh()
    model = pyg.GraphSAGE(5, 8, 2, 4).eval()
    rows = []
    for batch in LOADERS["nodes"](graph()):
        rows.append(len(model(batch.x, batch.edge_index)[: batch.batch_size]))
    if mesh.rank == 0:
        probe = torch.nn.Linear(8, 2)
        optimizer = torch.optim.SGD(probe.parameters(), lr=0.1)
        for _ in range(3):
            probe(torch.ones(2, 8)).sum().backward()
            optimizer.step()
    assert sum(rows) == 60

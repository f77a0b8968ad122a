"""Minibatches on several ranks: without an average each rank would train another model."""

from __future__ import annotations

import batches
import pytest
import tiers
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch_geometric.nn as pyg
import worlds
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import pyg_distcomm as pdc
from pyg_distcomm.loader import (
    DataLoader,
    GraphSAINTNodeSampler,
    LinkNeighborLoader,
    LoaderOptions,
    NeighborLoader,
    RandomNodeLoader,
)

pytestmark = pytest.mark.usefixtures("place")


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


def loss_of(model, batch):
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
                loss_of(run, batch.to(mesh.device)).backward()
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


def _accumulated(model, mesh):
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


def _own_all_reduce(model, mesh):
    def average():
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= mesh.size

    return _by(model, average=average)


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


LATE = {"warm": _warm, "accumulated": _accumulated, "lbfgs": _lbfgs}
AVERAGED = {
    "replicate": lambda model, mesh: _by(model, run=pdc.replicate(model, mesh)),
    "ddp": lambda model, mesh: _by(model, run=DistributedDataParallel(model)),
    "zero": _zero,
    "own all_reduce": _own_all_reduce,
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


@tiers.parametrize("size", [2, 3], [3])
def test_training_that_nothing_averages_is_refused_after_a_step(size):
    refused(worlds.run(train, size, "plainly"), 1)
    (first, _), *others = worlds.run(train, size, "plainly", "nodes", True)
    assert "pdc.replicate" in first
    assert all(error == first for error, _ in others)


@tiers.parametrize("loader", list(LOADERS), ["links", "one batch", "saint"])
def test_batches_of_every_loader_are_looked_at(loader):
    refused(worlds.run(train, 2, "plainly", loader), 1)


@pytest.mark.parametrize(("how", "steps"), [*zip(LATE, (2, 4, 1), strict=True)])
def test_steps_that_come_late_or_change_nothing_are_refused_later(how, steps):
    refused(worlds.run(train, 2, how), steps)


@pytest.mark.parametrize("how", AVERAGED)
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
        loss_of(model, batch).backward()
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

"""A pass on minibatches does not depend on how often its model ran, nor in which process."""

from __future__ import annotations

import math

import batches
import pytest
import tiers
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
import worlds
from torch_geometric.data import Data

import pyg_distcomm as pdc
from pyg_distcomm.loader import LoaderOptions, NeighborLoader


def graph():
    return batches.graph(n=300, e=2400)


def loader_of(data):
    return NeighborLoader(
        data, [3, 3, 3], batch_size=8, shuffle=True, options=LoaderOptions(seed=0)
    )


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


def in_place(out, batch):
    out += 1
    out.mul_(0.5)
    return seeds(out, batch)


def two_results(out, batch):
    best, at = out.max(-1)
    n = batch.batch_size
    return best[:n].mean() + out[:, :2][:n].square().mean() + 0 * at[:n].sum()


def all_rows(out, batch):
    return F.cross_entropy(out, batch.y)


def masked_rows(out, batch):
    return F.cross_entropy(out[batch.y > 1], batch.y[batch.y > 1])


KINDS = dict.fromkeys(("seeds", "seeds inside", "a data object", "attention"), seeds)
KINDS |= dict.fromkeys(("batch norm", "spectral norm", "counts"), seeds)
KINDS |= {
    "dropout behind it": dropped_late,
    "changed in place": in_place,
    "two results": two_results,
    "all rows": all_rows,
    "a mask of rows": masked_rows,
}


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


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_first_pass_is_as_a_later_one(kind, training):
    batch = next(iter(loader_of(graph())))
    found = []
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

    batch = next(iter(loader_of(graph())))
    once = pdc.convert(Once("seeds"))
    once.todo = [1]
    assert math.isfinite(float(once(batch.x, batch.edge_index)[:8].sum()))
    assert "twice" in pdc.nn.trimming_of(once)
    writes, x = pdc.convert(Writes("seeds")), batch.x.clone()
    writes(x, batch.edge_index)[:8].sum()
    assert torch.equal(x, batch.x / 2)
    assert "in place" in pdc.nn.trimming_of(writes)


def _run(path, resumed, share):
    """Trains inside two epochs; saves in the middle of the first, or goes on from there."""
    mesh = pdc.init(timeout=120)
    torch.manual_seed(5 + resumed)
    data = pdc.partition(graph(), mesh, "random") if share else graph()
    model = pdc.replicate(pdc.convert(Net("seeds")), mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader, steps = loader_of(data), 0
    if resumed:
        kept = {"loader": loader.state_dict(), "steps": 0}
        kept = pdc.load_checkpoint(path, mesh, model, optimizer, **kept)
        steps = kept["steps"]
        loader.load_state_dict(kept["loader"])
    elif mesh.rank == 1:
        torch.rand(3)  # ranks draw masks of their own
    while steps < 24:
        for batch in loader:
            model.train()
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            steps += 1
            if steps == 7 and not resumed:
                kept = {"loader": loader.state_dict(), "steps": steps}
                pdc.save_checkpoint(path, mesh, model, optimizer, **kept)
            if steps == 24:
                break
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@tiers.parametrize(("size", "share"), [(2, False), (1, False), (2, True)], slice(1))
def test_a_resumed_run_of_new_processes_ends_in_the_same_bits(tmp_path, size, share):
    """With dropout and three layers, from the middle of an epoch."""
    path = str(tmp_path / "run")
    straight = worlds.anew(_run, size, path, False, share)
    resumed = worlds.anew(_run, size, path, True, share)
    for one, two in zip(straight, resumed, strict=True):
        assert torch.equal(one, two)

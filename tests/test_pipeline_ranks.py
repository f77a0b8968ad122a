"""The pipeline over stages and rows: the same numbers, and the bytes that were foretold."""

from __future__ import annotations

import pytest
import torch
import worlds
from pipelines import STACKS, loss_of, stack_of
from problems import GRAPHS

import pyg_distcomm as pdc

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
SHAPES = [(2, 1), (1, 2), (4, 1), (2, 2)]


def _train(
    stages, name, graph="directed", epochs=3, dropout=0.0, cutter=None, **kwargs
):
    """Losses, state and output after some epochs, and whether bytes were as foretold."""
    data = GRAPHS[graph]()
    mesh = worlds.mesh(stages=stages)
    share = pdc.partition(data, mesh, cutter or "random")
    stack = stack_of(name, dropout=dropout)
    pipe = pdc.Pipeline(stack, mesh, **kwargs)
    opt = torch.optim.SGD(pipe.parameters(), 0.3)
    pipe(share)
    losses = []
    for _ in range(epochs):
        opt.zero_grad()
        mesh.ledger.reset()
        losses.append(float(pipe.train_step(share, loss_of)))
        price, ledger = pipe.price(), mesh.ledger
        told = [price.stage.words, price.rows.words, price.weights.words]
        assert told == [
            ledger.words("stage", "stage"),
            ledger.words("halo", "world") + ledger.words("halo_transpose", "world"),
            ledger.words("all_reduce", "data"),
        ]
        # what the script's own loss sums over the rows of a stage is not ours
        assert price.words == ledger.words() - ledger.words("all_reduce", "world")
        assert price.bytes == ledger.bytes() - ledger.bytes("all_reduce", "world")
        parts = (price.stage, price.rows, price.weights, price.loss)
        sent = ledger.messages() - ledger.messages("all_reduce", "world")
        assert sum(p.messages for p in parts) == sent
        opt.step()
    memory = pipe.memory()
    assert memory["sites"] == sum(s.nbytes for s in pipe._run.sites.values())
    out = pipe(share).full_tensor()
    right = pipe.eval_step(share, lambda out, data: float(loss_of(out, data)))
    return losses, pipe.state_dict(), out, right, price


def _chunks(graph, count=5):
    return torch.arange(GRAPHS[graph]().num_nodes) * 7 % count


def _assert_same(got, want):
    for mine, theirs in zip(got[:4], want[:4], strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", STACKS)
def test_numbers_do_not_depend_on_stages_and_rows(name, shape):
    graph = {"gat": "loops_and_copies", "sage": "isolated"}.get(name, "directed")
    options = {"chunks": _chunks(graph), "graph": graph, "history_refresh": 2}
    if name != "jumping":
        options["dropout"] = 0.3
    want = _train(1, name, **options)
    stages, ways = shape
    for got in worlds.run(_train_with, stages * ways, stages, name, options):
        _assert_same(got, want)


def _train_with(stages, name, options):
    return _train(stages, name, **options)

"""The pipeline on one rank: exact with one chunk, and what its definition says with more."""

from __future__ import annotations

import pytest
import torch
import worlds
from pipelines import STACKS, BruteForce, loss_of, run_plain, stack_of
from problems import GRAPHS

import pyg_distcomm as pdc

EXACT = {"rtol": 1e-10, "atol": 1e-10}


def _share(graph="directed"):
    data = GRAPHS[graph]()
    mesh = worlds.mesh()
    return data, pdc.partition(data, mesh), mesh


@pytest.mark.parametrize("graph", ["directed", "loops_and_copies", "isolated", "star"])
@pytest.mark.parametrize("name", STACKS)
def test_one_chunk_is_the_full_graph(name, graph):
    data, share, mesh = _share(graph)
    stack = stack_of(name)
    out, loss, grads = run_plain(stack, data)
    pipe = pdc.Pipeline(stack, mesh, chunks=1, recompute=graph != "star")
    torch.testing.assert_close(pipe(share).full_tensor(), out, **EXACT)
    for times in (1, 2):  # gradients add up, as after loss.backward()
        torch.testing.assert_close(pipe.train_step(share, loss_of), loss, **EXACT)
        for p, g in zip(pipe.parameters(), grads, strict=True):
            torch.testing.assert_close(p.grad, times * g, **EXACT)


@pytest.mark.parametrize("refresh", [1, 3])
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("name", ["gcn", "gcnii", "gat"])
def test_gradients_are_those_of_autograd_with_constant_history(
    name, recompute, refresh
):
    data, share, mesh = _share()
    chunk = torch.arange(data.num_nodes) * 7 % 5
    stack = stack_of(name)
    brute = BruteForce(stack, data, chunk, refresh)
    pipe = pdc.Pipeline(
        stack, mesh, chunks=chunk, recompute=recompute, history_refresh=refresh, seed=3
    )
    opts = [torch.optim.SGD(p, 0.5) for p in (brute.parameters, pipe.parameters())]
    orders = set()
    for epoch in range(5):
        opts[1].zero_grad()
        loss = pipe.train_step(share, loss_of)
        order = pipe.order_of(epoch)
        orders.add(tuple(order))
        torch.testing.assert_close(loss, brute.step(order), **EXACT)
        for p, q in zip(pipe.parameters(), brute.parameters, strict=True):
            torch.testing.assert_close(p.grad, q.grad, **EXACT)
        for opt in opts:
            opt.step()
    assert len(orders) > 1

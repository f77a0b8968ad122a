"""The pipeline on one rank: exact with one chunk, and what its definition says with more."""

from __future__ import annotations

import copy
import itertools
import warnings

import pytest
import tiers
import torch
import worlds
from pipelines import (
    SINGLE,
    STACKS,
    BruteForce,
    loss_of,
    run_plain,
    stack_of,
    trained,
)
from problems import GRAPHS

import pyg_distcomm as pdc
from pyg_distcomm.pipeline.pipeline import CROSSING

pytestmark = pytest.mark.usefixtures("place")

EXACT = {"rtol": 1e-10, "atol": 1e-10}


def _share(graph="directed"):
    data = GRAPHS[graph]()
    mesh = worlds.mesh()
    return data, pdc.partition(data, mesh), mesh


@pytest.mark.parametrize("graph", ["directed", "loops_and_copies", "isolated", "star"])
@pytest.mark.parametrize("name", [*STACKS, *SINGLE])
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
    pipe = pdc.Pipeline(stack, mesh, chunks=4)
    torch.testing.assert_close(pipe(share).full_tensor(), out, **EXACT)
    # the first epoch reads history of the same weights
    torch.testing.assert_close(pipe.train_step(share, loss_of), loss, **EXACT)


@tiers.cover(
    ("name", "gradient", "order", "refresh", "recompute"),
    ["gcn", "gcnii", "gat", "jumping"],
    ["surrogate", "scaled"],
    ["alternating", "fixed", "shuffled"],
    [1, 3],
    [True, False],
)
def test_epochs_are_as_defined(name, gradient, order, refresh, recompute):
    data, share, mesh = _share()
    chunk = torch.arange(data.num_nodes) * 7 % 5
    stack, cross = stack_of(name), 2.0 if gradient == "scaled" else 1.0
    brute = BruteForce(stack, data, chunk, refresh, cross)
    options = {"gradient": gradient, "order": order, "history_refresh": refresh}
    pipe = pdc.Pipeline(
        stack, mesh, chunks=chunk, seed=3, recompute=recompute, **options
    )
    opts = [torch.optim.SGD(p, 0.3) for p in (brute.parameters, pipe.parameters())]
    for epoch in range(5):
        opts[1].zero_grad()
        loss = pipe.train_step(share, loss_of)
        torch.testing.assert_close(loss, brute.step(pipe.order_of(epoch)), **EXACT)
        for p, q in zip(pipe.parameters(), brute.parameters, strict=True):
            torch.testing.assert_close(p.grad, q.grad, **EXACT)
        for opt in opts:
            opt.step()
    orders = {tuple(pipe.order_of(k)) for k in range(5)}
    assert (len(orders) > 1) == (order != "fixed")


def test_an_order_and_its_reverse_have_each_edge_fresh_once_in_two_epochs():
    _, share, mesh = _share()
    pipe = pdc.Pipeline(stack_of("gcn"), mesh, chunks=5)
    pipe(share)
    draws = set()
    for epoch in range(0, 12, 2):
        first, second = pipe.order_of(epoch), pipe.order_of(epoch + 1)
        draws.add(tuple(first))
        for a, b in itertools.permutations(range(5), 2):
            fresh = [order.index(a) < order.index(b) for order in (first, second)]
            assert sum(fresh) == 1
    assert len(draws) > 3


def test_edges_between_chunks_are_counted_and_warned_of():
    data, share, mesh = _share()
    source, target = data.edge_index
    for chunk in (torch.arange(60) * 7 % 5, torch.arange(60) // 30, torch.zeros(60)):
        pipe = pdc.Pipeline(stack_of("gcn"), mesh, chunks=chunk.long())
        with pytest.raises(ValueError, match="has not seen the data"):
            pipe.crossing  # noqa: B018
        assert "chunks" not in repr(pipe).split("(layers)")[0]
        want = float((chunk[source] != chunk[target]).double().mean())
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            pipe(share)
        assert pipe.crossing == pytest.approx(want)
        assert f"{want:.1%} of edges between" in repr(pipe)
        assert [str(one.message)[:3] for one in told] == (
            [f"{want:.0%}"] if want > CROSSING else []
        )
        assert all(one.filename == __file__ for one in told)


def test_dropout_repeats_itself_and_changes_from_epoch_to_epoch():
    data, share, mesh = _share()
    found = []
    for recompute in (True, False):
        stack = stack_of("gcn", dropout=0.5)
        pipe = pdc.Pipeline(stack, mesh, chunks=1, recompute=recompute)
        before = torch.get_rng_state()
        found.append([float(pipe.train_step(share, loss_of)) for _ in range(3)])
        assert torch.equal(torch.get_rng_state(), before)
        found.append([p.grad.sum().item() for p in pipe.parameters()])
        pipe.eval()
        found.append(float(pipe.train_step(share, loss_of)))
    assert found[:3] == found[3:]
    assert len(set(found[0])) == 3
    right = run_plain(stack_of("gcn"), data)[1]
    torch.testing.assert_close(
        torch.tensor(found[2]).double(), right, rtol=1e-6, atol=0
    )


@pytest.mark.parametrize(("kind", "most"), [(2, 0.5), (float("inf"), 0.1), (1, 2)])
def test_gradients_are_clipped_as_in_torch(kind, most):
    _, share, mesh = _share()
    pipe = pdc.Pipeline(stack_of("gcnii"), mesh, chunks=1)
    pipe.train_step(share, loss_of)
    twin = copy.deepcopy(pipe.layers)
    for p, q in zip(twin.parameters(), pipe.parameters(), strict=True):
        p.grad = q.grad.clone()
    want = torch.nn.utils.clip_grad_norm_(twin.parameters(), most, kind)
    torch.testing.assert_close(pipe.clip_grad_norm_(most, kind), want, **EXACT)
    for p, q in zip(twin.parameters(), pipe.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, **EXACT)


def test_names_of_the_state_are_those_of_the_stack():
    data, share, mesh = _share()
    stack = torch.nn.ModuleList(stack_of("gcn"))
    pipe = pdc.Pipeline(copy.deepcopy(stack), mesh, chunks=3)
    assert list(pipe.state_dict()) == list(stack.state_dict())
    pipe.train_step(share, loss_of)
    torch.optim.SGD(pipe.parameters(), 0.1).step()
    stack.load_state_dict(pipe.state_dict())
    out = run_plain(list(stack), data)[0]
    torch.testing.assert_close(pipe(share).full_tensor(), out, **EXACT)


def test_changed_data_are_seen():
    data, share, mesh = _share()
    pipe = pdc.Pipeline(stack_of("weighted"), mesh, chunks=1)
    pipe.train_step(share, loss_of)
    data.x = share.x = share.x * 2
    data.x = data.x.to_local()
    out = run_plain(stack_of("weighted"), data)[0]
    torch.testing.assert_close(pipe(share).full_tensor(), out, **EXACT)
    share.edge_weight += 0.5
    with pytest.raises(TypeError, match="change from epoch to epoch"):
        pipe.train_step(share, loss_of)


def test_another_graph_is_refused():
    data, share, mesh = _share()
    with pytest.raises(TypeError, match="order is Pipeline"):
        pdc.Pipeline(stack_of("gcn"), share)
    pipe = pdc.Pipeline(stack_of("gcn"), mesh, chunks=2)
    with pytest.raises(TypeError, match="share of pdc"):
        pipe.train_step(data, loss_of)
    with pytest.raises(ValueError, match="has seen the data"):
        pipe.price()
    pipe(share)
    with pytest.raises(ValueError, match="another graph"):
        pipe(pdc.partition(data, mesh))
    with pytest.raises(TypeError, match="one number as a tensor"):
        pipe.train_step(share, lambda out, data: out)


class _Fails(torch.autograd.Function):
    """Fails backward, in the chunk whose turn it is to."""

    left = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        _Fails.left -= 1
        if _Fails.left == 0:
            raise ZeroDivisionError
        return g


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("gradient", ["surrogate", "scaled"])
def test_a_step_that_fails_leaves_everything_as_it_was(gradient, backward):
    _, share, mesh = _share()
    stack = stack_of("gcn")
    stack[1] = lambda x: x.wrap(_Fails.apply(x.to_local()), x.rows), "x -> x"
    found = []
    for fails in (False, True):
        pipe = pdc.Pipeline(copy.deepcopy(stack), mesh, chunks=5, gradient=gradient)
        for p in pipe.parameters():
            p.grad = torch.ones_like(p)
        losses = []
        for _ in range(3):
            if fails:
                _Fails.left = 3
                loss = loss_of if backward else lambda out, data: 1 / 0
                with pytest.raises(ZeroDivisionError):
                    pipe.train_step(share, loss)
            _Fails.left = 0
            losses.append(float(pipe.train_step(share, loss_of)))
            with torch.no_grad():
                for p in pipe.parameters():
                    p.sub_(0.3 * p.grad)
        found.append(losses)
    assert found[0] == found[1]


def test_a_copy_of_a_pipeline_is_one_of_its_layers():
    _, share, mesh = _share()
    pipe = pdc.Pipeline(stack_of("gcn"), mesh, chunks=3)
    opt = torch.optim.SGD(pipe.parameters(), 0.3)
    trained(pipe, share, opt, 1)
    mean = torch.optim.swa_utils.AveragedModel(pipe)
    mean.update_parameters(pipe)
    out = pipe(share).full_tensor()
    trained(pipe, share, opt, 1)
    assert torch.equal(mean.module(share).full_tensor(), out)
    twins = [copy.deepcopy(pipe) for _ in range(2)]
    first, second = (float(twin.train_step(share, loss_of)) for twin in twins)
    assert first == second
    names = {f"module.{name}" for name in pipe.state_dict()}
    assert names == mean.state_dict().keys() - {"n_averaged"}


def test_what_was_saved_before_there_were_data_is_whole(tmp_path):
    _, share, mesh = _share()
    pipes = [pdc.Pipeline(stack_of("gcn", seed=k), mesh, chunks=3) for k in range(2)]
    pipes[0].save(tmp_path / "pipe")
    pipes[1].load(tmp_path / "pipe")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len({float(pipe.train_step(share, loss_of)) for pipe in pipes}) == 1

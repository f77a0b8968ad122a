"""The pipeline on one rank: exact with one chunk, and what its definition says with more."""

from __future__ import annotations

import copy
import itertools
import warnings

import pytest
import tiers
import torch
import worlds
from pipelines import STACKS, BruteForce, loss_of, run_plain, stack_of, trained
from problems import GRAPHS
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import (
    EdgeConv,
    GatedGraphConv,
    GCNConv,
    SAGEConv,
    SGConv,
    TAGConv,
    TransformerConv,
)

import pyg_distcomm as pdc
from pyg_distcomm.pipeline.pipeline import CROSSING

pytestmark = pytest.mark.usefixtures("place")

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


OTHERS = {  # with degrees, exchanges and tensors of edges of their own
    "SGConv": lambda: SGConv(7, 4, K=2),
    "TAGConv": lambda: TAGConv(7, 4),
    "EdgeConv": lambda: EdgeConv(torch.nn.Linear(14, 4)),
    "GatedGraphConv": lambda: GatedGraphConv(7, 2),
    "TransformerConv": lambda: TransformerConv(7, 4),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_layers_read_what_they_do_in_one_process(name):
    for graph in ("loops_and_copies", "isolated"):
        data, share, mesh = _share(graph)
        torch.manual_seed(2)
        stack = [OTHERS[name]().double()]
        out, loss, grads = run_plain(stack, data)
        for chunks in (1, 4):
            pipe = pdc.Pipeline(stack, mesh, chunks=chunks)
            torch.testing.assert_close(pipe(share).full_tensor(), out, **EXACT)
            # the first epoch reads history of the same weights
            torch.testing.assert_close(pipe.train_step(share, loss_of), loss, **EXACT)
            for p, g in zip(pipe.parameters(), grads, strict=True):
                if chunks == 1:
                    torch.testing.assert_close(p.grad, g, **EXACT)


def _compare(name, cross=1.0, epochs=4, graph="directed", **options):
    """Trains the pipeline beside the definition, and compares loss and gradients."""
    data, share, mesh = _share(graph)
    chunk = torch.arange(data.num_nodes) * 7 % 5
    stack = stack_of(name)
    brute = BruteForce(stack, data, chunk, options.get("history_refresh", 1), cross)
    pipe = pdc.Pipeline(stack, mesh, chunks=chunk, seed=3, **options)
    opts = [torch.optim.SGD(p, 0.3) for p in (brute.parameters, pipe.parameters())]
    for epoch in range(epochs):
        opts[1].zero_grad()
        loss = pipe.train_step(share, loss_of)
        torch.testing.assert_close(loss, brute.step(pipe.order_of(epoch)), **EXACT)
        for p, q in zip(pipe.parameters(), brute.parameters, strict=True):
            torch.testing.assert_close(p.grad, q.grad, **EXACT)
        for opt in opts:
            opt.step()
    assert len({tuple(pipe.order_of(k)) for k in range(epochs)}) > 1


@tiers.cover(
    ("name", "recompute", "refresh"), ["gcn", "gcnii", "gat"], [True, False], [1, 3]
)
def test_gradients_are_those_of_autograd_with_constant_history(
    name, recompute, refresh
):
    _compare(name, recompute=recompute, history_refresh=refresh, epochs=5)


@pytest.mark.parametrize("name", ["gcn", "gat"])
def test_gradients_between_chunks_follow_their_rule(name):
    _compare(name, cross=2.0, gradient="scaled")


@pytest.mark.parametrize("order", ["alternating", "shuffled"])
@pytest.mark.parametrize(
    ("gradient", "cross", "refresh"),
    [
        ("scaled", 2.0, 1),
        tiers.rarely("scaled", 2.0, 3),
        tiers.rarely("surrogate", 1.0, 2),
    ],
)
@pytest.mark.parametrize(
    "name", ["gcnii", tiers.rarely("jumping"), tiers.rarely("gat")]
)
def test_orders_train_as_defined(name, gradient, cross, refresh, order):
    _compare(
        name, cross, gradient=gradient, history_refresh=refresh, order=order, epochs=5
    )


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


@tiers.cover(("name", "refresh"), ["gcn", "gcnii", "gat", "gin"], [1, 3], step=2)
def test_frozen_weights_become_exact(name, refresh):
    _, share, mesh = _share()
    stack = stack_of(name)
    pipe = pdc.Pipeline(stack, mesh, chunks=5, history_refresh=refresh)
    pipe.train_step(share, loss_of)
    with torch.no_grad():
        for p in pipe.parameters():
            p.add_(0.3 * torch.randn_like(p))
    right = pipe.eval_step(share, loss_of)
    errors = []
    for _ in range(refresh * len(stack) + refresh):
        errors.append(float((pipe.train_step(share, loss_of) - right).abs()))
    assert errors[0] > 1e-6  # history of other weights
    assert max(errors[-refresh:]) < 1e-12


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


class _Centred(torch.nn.Module):
    def forward(self, x):
        return x - x.mean(0)


@pytest.mark.parametrize(
    ("stack", "options", "kind", "told"),
    [
        ([], {"chunks": 0}, ValueError, "chunks must be a whole number above 0"),
        (None, {"chunks": 61}, ValueError, "graph has 60"),
        (None, {"chunks": torch.arange(60) % 4 * 2}, ValueError, r"chunks \[1, 3, 5\]"),
        (None, {"chunks": torch.zeros(3)}, ValueError, "each of the 60 nodes"),
        (None, {"chunks": "4"}, ValueError, "chunks must be a whole number"),
        (None, {"history_refresh": 0}, ValueError, "history_refresh"),
        (None, {"history_refresh": None}, ValueError, "history_refresh"),
        (None, {"order": "any"}, ValueError, "alternating, shuffled, fixed"),
        (None, {"bubble": 0}, ValueError, "bubble must be a number between 0 and 1"),
        (None, {"bubble": "x"}, ValueError, "bubble must be a number between 0 and 1"),
        (None, {"gradient": "none"}, ValueError, "surrogate, scaled"),
        (None, {"seed": 1.5}, ValueError, "seed must be a whole number"),
        (None, {"balance": 3}, ValueError, "balance=3 must give each of 1 stages"),
        (None, {"balance": [3, 2]}, ValueError, "each of 1 stages"),
        ([_Centred()], {}, TypeError, "reduces over all nodes"),
        ([(torch.nn.ReLU(), "z -> x")], {}, ValueError, "reads z"),
    ],
)
def test_mistakes_are_told(stack, options, kind, told):
    _, share, mesh = _share()
    stack = stack_of("gcn") if stack is None else stack
    with pytest.raises(kind, match=told) as caught:
        pdc.Pipeline(stack, mesh, **options).train_step(share, loss_of)
    if told == "reduces over all nodes":  # the trace leads to where it happened
        assert "x - x.mean(0)" in str(caught.getrepr())


def test_a_mesh_is_a_mesh():
    _, share, _ = _share()
    with pytest.raises(TypeError, match="order is Pipeline"):
        pdc.Pipeline(stack_of("gcn"), share)


def test_another_graph_is_refused():
    data, share, mesh = _share()
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


@pytest.mark.parametrize("gradient", ["surrogate", "scaled"])
def test_a_step_that_fails_leaves_everything_as_it_was(gradient):
    _, share, mesh = _share()
    found = []
    for fails in (False, True):
        pipe = pdc.Pipeline(stack_of("gcn"), mesh, chunks=5, gradient=gradient)
        for p in pipe.parameters():
            p.grad = torch.ones_like(p)
        losses = []
        for _ in range(3):
            if fails:
                with pytest.raises(ZeroDivisionError):
                    pipe.train_step(share, lambda out, data: 1 / 0)
            losses.append(float(pipe.train_step(share, loss_of)))
            with torch.no_grad():
                for p in pipe.parameters():
                    p.sub_(0.3 * p.grad)
        found.append(losses)
    assert found[0] == found[1]


class _Fails(torch.autograd.Function):
    """Fails in the third chunk that is trained backward."""

    count = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        _Fails.count += 1
        if _Fails.count == 3:
            raise ZeroDivisionError
        return g


def test_a_step_that_fails_backward_leaves_its_history():
    _, share, mesh = _share()
    stack = stack_of("gcn")
    stack[1] = lambda x: x.wrap(_Fails.apply(x.to_local()), x.rows), "x -> x"
    found = []
    for fails in (False, True):
        pipe = pdc.Pipeline(copy.deepcopy(stack), mesh, chunks=5, gradient="scaled")
        opt, losses = torch.optim.SGD(pipe.parameters(), 0.3), []
        for epoch in range(3):
            if fails and epoch:
                _Fails.count = 0
                with pytest.raises(ZeroDivisionError):
                    pipe.train_step(share, loss_of)
            _Fails.count = 3
            losses += trained(pipe, share, opt, 1)
        found.append(losses)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("layer", "options", "told"),
    [
        (spectral_norm(torch.nn.Linear(7, 7)), {}, "recompute=False"),
        (SAGEConv(7, 7, aggr="lstm"), {"recompute": False}, r"pads .*LSTMAggregation"),
    ],
)
def test_layers_that_chunks_would_change_are_refused(layer, options, told):
    _, share, mesh = _share()
    stack = _double(layer, GCNConv(7, 4))
    with pytest.raises((TypeError, ValueError), match=told):
        pdc.Pipeline(stack, mesh, chunks=3, **options).train_step(share, loss_of)


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


def _double(*layers):
    return [layer.double() for layer in layers]


class _Checkpointed(torch.nn.Module):
    def __init__(self, reentrant, inner, *more):
        super().__init__()
        self.inner, self.reentrant, self.more = inner, reentrant, more

    def forward(self, x, edge_index):
        more = (edge_index,) if self.more else ()
        return x + checkpoint(self.inner, x, *more, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("what", ["dropout", "conv"])
def test_checkpoints_that_would_compute_something_else_are_refused(reentrant, what):
    _, share, mesh = _share()
    dropout = torch.nn.Dropout(0.5), torch.nn.Linear(8, 8)
    linear = torch.nn.Sequential(torch.nn.Linear(8, 8), *dropout)
    block = (
        _Checkpointed(reentrant, linear)
        if what == "dropout"
        else _Checkpointed(reentrant, GCNConv(8, 8), "edge_index")
    )
    stack = _double(GCNConv(7, 8), block, GCNConv(8, 4))
    pipe = pdc.Pipeline(stack, mesh, chunks=3)
    with pytest.raises(RuntimeError, match="leave the checkpoint out"):
        pipe.train_step(share, loss_of)

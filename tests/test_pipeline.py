"""The pipeline on one rank: exact with one chunk, and what its definition says with more."""

import copy
import functools
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
    without_loss,
)
from problems import GRAPHS
from torch_geometric.nn import GATConv, GCNConv, GINConv, SAGEConv, TransformerConv

import pyg_distcomm as pdc
from pyg_distcomm.halo.codecs import ColumnMask, Plain, Quantise
from pyg_distcomm.halo.policy import LinkPolicy
from pyg_distcomm.pipeline.pipeline import CROSSING

pytestmark = pytest.mark.usefixtures("place")

EXACT = {"rtol": 1e-10, "atol": 1e-10}


def _share(graph="directed"):
    data = GRAPHS[graph]()
    mesh = worlds.mesh()
    return data, pdc.partition(data, mesh), mesh


ODD = ["directed", "loops_and_copies", "isolated", "star"]


@tiers.cover(("name", "graph"), [*STACKS, *SINGLE], ODD, step=3)
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
        warned = [f"{want:.0%}"] if want > CROSSING else []
        assert [str(one.message)[:3] for one in told] == warned
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
    data.x = share.x = data.x * 2  # plain, of all ranks
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
    with pytest.raises(ValueError, match="has not seen the data"):
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


@tiers.cover(("gradient", "backward"), ["surrogate", "scaled"], [False, True], step=2)
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


# The hybrid by a link ----------------------------------------------------------------

LINKS = {
    "none": lambda: None,
    "plain": lambda: LinkPolicy(Plain()),
    "late": lambda: pdc.PipeGCN(),
    "late, the last too": lambda: pdc.PipeGCN(exact_last=False),
    "one bit": lambda: pdc.Sylvie(late=0),
    "one bit, late": lambda: pdc.Sylvie(),
    "all one bit": lambda: pdc.Sylvie(late=0, exact_last=False),
    "8 bits": lambda: LinkPolicy(Quantise(8, "stochastic"), late=2, late_gradients=1),
    "varco": lambda: pdc.VARCO(6, c_max=4, slope=1),
    "columns": lambda: LinkPolicy(ColumnMask(1), exact_last=False),
}


def made(stages, link, stack="gcnii", lr=0.3, **options):
    """A pipeline, a share with a link, and an optimizer."""
    mesh = worlds.mesh(stages=stages)
    share = pdc.partition(GRAPHS["directed"](), mesh, "random", link=LINKS[link]())
    layers = stack_of(stack) if isinstance(stack, str) else stack()
    pipe = pdc.Pipeline(layers, mesh, **{"chunks": torch.arange(60) * 7 % 4, **options})
    return pipe, share, torch.optim.SGD(pipe.parameters(), lr)


def go_on(pipe, share, opt, epochs):
    """Losses, outputs, bytes of halos, as they were foretold, and gradients of some epochs."""
    link, ledger = share.edge_index.topology.link, pipe.mesh.ledger
    losses, moved = [], []
    pipe(share)
    for _ in range(epochs):
        opt.zero_grad()
        ledger.reset()
        losses.append(float(pipe.train_step(share, loss_of)))
        price = pipe.price()
        assert price.bytes == without_loss(ledger, "bytes")
        moved.append(sum(ledger.bytes(op, "world") for op in ("halo", "halo_reduce")))
        assert moved[-1] == price.coded + 8 * price.rows.words
        opt.step()
        if link is not None:
            link.step(losses[-1])
    grads = [p.grad for p in pipe.parameters() if p.grad is not None]
    return losses, pipe(share).full_tensor(), moved, grads


def train(stages, link, epochs=4, **options):
    return go_on(*made(stages, link, **options), epochs)


@tiers.cover(("link", "shape"), ["plain", "columns"], [(1, 2), (2, 2)], step=2)
def test_what_changes_nothing_is_the_exact_link(shape, link):
    stages, ways = shape
    want = worlds.run(train, stages * ways, stages, "none")
    got = worlds.run(train, stages * ways, stages, link)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@tiers.cover(("stack", "link"), [(1, "gin"), (2, "gcnii")], [*LINKS][2:], step=6)
def test_bytes_are_foretold_whatever_the_link(stack, link):
    stages, name = stack
    run = functools.partial(train, stack=name)
    for _, out, *_ in worlds.run(run, 2 * stages, stages, link):
        assert bool(out.isfinite().all())


@worlds.on(2)
def test_links_that_do_not_go_with_chunks_are_refused():
    mesh = worlds.mesh()
    share = pdc.partition(GRAPHS["directed"](), mesh, "random")
    exact = share.edge_index
    for how in ("first", "later", "exact"):
        stack = [SAGEConv(7, 8, aggr="max"), torch.nn.ReLU(), GCNConv(8, 4)]
        if how == "exact":
            stack[0] = pdc.convert(stack[0], link="exact")
        pipe = pdc.Pipeline([layer.double() for layer in stack], mesh, chunks=3)
        share.edge_index = exact
        if how == "later":
            pipe.train_step(share, loss_of)
        share.edge_index = exact.with_link(pdc.VARCO(6, c_max=4, slope=1))
        if how == "exact":
            pipe.train_step(share, loss_of)
            continue
        with pytest.raises(ValueError, match=r"SAGEConv has aggr='max', which could"):
            pipe.train_step(share, loss_of)
    layer = pdc.convert(GCNConv(7, 7), link=pdc.Sylvie())
    with pytest.raises(ValueError, match=r"give the link to pdc\.partition"):
        pdc.Pipeline([layer, GCNConv(7, 4)], mesh)
    link = LinkPolicy(Quantise(8), exact_eval=False)
    share.edge_index = exact.with_link(link)
    with pytest.raises(ValueError, match="evaluates exactly"):
        pdc.Pipeline(stack_of("gcn"), mesh, chunks=2)(share)


def _exactly(stack, link):
    torch.manual_seed(0)
    layers = [layer.double() for layer in stack()]
    return train(1, link, stack=lambda: layers, chunks=2)


def _attention():
    return [GATConv(7, 8), torch.nn.ReLU(), TransformerConv(8, 4)]


def _marked():
    first, last = GCNConv(7, 8), GINConv(torch.nn.Linear(8, 4))
    layers = [first, torch.nn.ReLU(), last]
    return [pdc.convert(layer, link="exact") for layer in layers]


@pytest.mark.parametrize("stack", [tiers.rarely(_attention), _marked])
def test_what_must_be_exact_is_exact(stack):
    want = worlds.run(_exactly, 2, stack, "none")
    for link in ("late, the last too", "all one bit"):
        got = worlds.run(_exactly, 2, stack, link)
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def _resumed(stages, link, path, first, balance):
    run = made(stages, link, balance=balance)
    if first:
        go_on(*run, 4)
        run[0].save(path, run[2])
    else:
        go_on(*run, 1)
        run[0].load(path, run[2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return go_on(*run, 3)[0]


KEPT = ["one bit, late", "8 bits", "varco"]


@tiers.parametrize("link", KEPT, [])
def test_what_a_link_keeps_is_saved_with_the_pipeline(link, tmp_path):
    path = tmp_path / "pipe"
    (want, *_) = worlds.run(_resumed, 4, 2, link, path, True, [3, 5])
    for stages, balance in ((2, [3, 5]), (2, [6, 2]), (1, None)):
        for losses in worlds.run(
            _resumed, 2 * stages, stages, link, path, False, balance
        ):
            assert losses == want


@worlds.on(2)
def test_what_was_kept_of_other_chunks_is_dropped(tmp_path):
    """A link goes on in chunks of other nodes, without the rows of the old ones."""
    (pipe, share, opt), path = made(1, "one bit, late"), tmp_path / "pipe"
    go_on(pipe, share, opt, 2)
    pipe.save(path, opt)
    share.edge_index = share.edge_index.with_link(LINKS["one bit, late"]())
    pipe = pdc.Pipeline(stack_of("gcnii"), pipe.mesh, chunks=3)
    pipe.load(path)
    with pytest.warns(UserWarning, match="late rows of links as well"):
        pipe.train_step(share, loss_of)
    share.edge_index.topology.link.step()
    assert share.edge_index.topology.link.epoch == 3


@tiers.parametrize(("size", "stages"), [(2, 1), (4, 2)], [(2, 1)])
@worlds.on()
def test_an_epoch_of_a_link_is_one_of_the_pipeline(size, stages):
    balance = [7, 1] if stages == 2 else None
    pipe, share, opt = made(stages, "one bit", balance=balance)
    pipe.train_step(share, loss_of)
    with pytest.raises(ValueError, match=r"link\.step\(\) once per epoch"):
        pipe.train_step(share, loss_of)
    share.edge_index.topology.link.step()
    go_on(pipe, share, opt, 2)

"""The hybrid by a link: rows inside a stage coded or late, borders between stages exact."""

from __future__ import annotations

import warnings

import pytest
import tiers
import torch
import worlds
from pipelines import loss_of, stack_of, without_loss
from problems import GRAPHS
from torch_geometric.nn import (
    GATConv,
    GCNConv,
    GINConv,
    SAGEConv,
    TransformerConv,
)

import pyg_distcomm as pdc
from pyg_distcomm.halo.codecs import ColumnMask, Plain, Quantise
from pyg_distcomm.halo.policy import LinkPolicy

pytestmark = pytest.mark.usefixtures("place")

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


def halo_bytes(ledger):
    return sum(ledger.bytes(op, "world") for op in ("halo", "halo_reduce"))


def train(stages, link, name="gcnii", epochs=4, lr=0.3, chunks=4, recompute=True):
    """Returns losses and outputs, bytes of halos by epoch, and what was foretold of them."""
    mesh = worlds.mesh(stages=stages)
    policy = LINKS[link]()
    share = pdc.partition(GRAPHS["directed"](), mesh, "random", link=policy)
    pipe = pdc.Pipeline(stack_of(name), mesh, chunks=chunks, recompute=recompute)
    opt = torch.optim.SGD(pipe.parameters(), lr)
    pipe(share)
    losses, moved = [], []
    for _ in range(epochs):
        opt.zero_grad()
        mesh.ledger.reset()
        losses.append(float(pipe.train_step(share, loss_of)))
        price = pipe.price()
        assert price.bytes == without_loss(mesh.ledger, "bytes")
        moved.append(halo_bytes(mesh.ledger))
        assert moved[-1] == price.coded + 8 * price.rows.words
        opt.step()
        if policy is not None:
            policy.step()
    return losses, pipe(share).full_tensor(), moved


@tiers.cover(("link", "shape"), ["plain", "columns"], [(1, 2), (2, 2)])
def test_what_changes_nothing_is_the_exact_link(shape, link):
    stages, ways = shape
    want = worlds.run(train, stages * ways, stages, "none")
    got = worlds.run(train, stages * ways, stages, link)
    for mine, theirs in zip(got, want, strict=True):
        assert mine[0] == theirs[0]
        assert torch.equal(mine[1], theirs[1])
        assert mine[2] == theirs[2]


@tiers.cover(("stack", "link"), [(1, "gin"), (2, "gcnii")], [*LINKS][2:], step=3)
def test_bytes_are_foretold_whatever_the_link(stack, link):
    stages, name = stack
    for _, out, _ in worlds.run(train, 2 * stages, stages, link, name):
        assert bool(out.isfinite().all())


@tiers.parametrize("recompute", [True, False], [True])
def test_late_rows_of_frozen_weights_become_exact(recompute):
    flags = {"name": "gcnii", "epochs": 9, "lr": 0.0, "chunks": 1}
    want = worlds.run(_frozen, 4, "none", flags, recompute)
    got = worlds.run(_frozen, 4, "late, the last too", flags, recompute)
    for mine, theirs in zip(got, want, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def _frozen(link, flags, recompute):
    """Gradients of the last of some epochs without a step."""
    mesh = worlds.mesh(stages=2)
    policy = LINKS[link]()
    share = pdc.partition(GRAPHS["directed"](), mesh, "random", link=policy)
    pipe = pdc.Pipeline(stack_of(flags["name"]), mesh, chunks=1, recompute=recompute)
    for _ in range(flags["epochs"]):
        pipe.zero_grad()
        pipe.train_step(share, loss_of)
        if policy is not None:
            policy.step()
    return [p.grad for p in pipe.parameters() if p.grad is not None]


def _own_link():
    mesh = worlds.mesh(stages=2)
    layer = pdc.convert(GCNConv(7, 7), link=pdc.Sylvie())
    with pytest.raises(ValueError, match=r"give the link to pdc\.partition"):
        pdc.Pipeline([layer, GCNConv(7, 4)], mesh)


def test_layers_with_a_link_of_their_own_are_refused():
    worlds.run(_own_link, 2)


def _refused(how):
    mesh = worlds.mesh()
    varco = pdc.VARCO(6, c_max=4, slope=1)
    exact = how == "exact"
    share = pdc.partition(GRAPHS["directed"](), mesh, "random")
    stack = [SAGEConv(7, 8, aggr="max"), torch.nn.ReLU(), GCNConv(8, 4)]
    if exact:
        stack[0] = pdc.convert(stack[0], link="exact")
    pipe = pdc.Pipeline([layer.double() for layer in stack], mesh, chunks=3)
    if how == "later":
        pipe.train_step(share, loss_of)
    share.edge_index = share.edge_index.with_link(varco)
    if exact:
        return float(pipe.train_step(share, loss_of))
    with pytest.raises(ValueError, match=r"SAGEConv has aggr='max', which could pick"):
        pipe.train_step(share, loss_of)
    return None


@pytest.mark.parametrize("how", ["first", "later", "exact"])
def test_links_that_leave_out_what_could_win_are_refused(how):
    worlds.run(_refused, 2, how)


def _exactly(stack, link):
    """Losses and bytes of some epochs."""
    mesh, policy = worlds.mesh(), LINKS[link]()
    share = pdc.partition(GRAPHS["directed"](), mesh, "random", link=policy)
    torch.manual_seed(0)
    made = [layer.double() for layer in stack()]
    pipe = pdc.Pipeline(made, mesh, chunks=2)
    pipe(share)
    found = []
    for _ in range(3):
        mesh.ledger.reset()
        loss = float(pipe.train_step(share, loss_of))
        found.append((loss, halo_bytes(mesh.ledger)))
        if policy is not None:
            policy.step()
    return found


def _attention():
    return [GATConv(7, 8), torch.nn.ReLU(), TransformerConv(8, 4)]


def _marked():
    first, last = GCNConv(7, 8), GINConv(torch.nn.Linear(8, 4))
    layers = [first, torch.nn.ReLU(), last]
    return [pdc.convert(layer, link="exact") for layer in layers]


@pytest.mark.parametrize("stack", [_attention, _marked])
def test_what_must_be_exact_is_exact(stack):
    want = worlds.run(_exactly, 2, stack, "none")
    assert worlds.run(_exactly, 2, stack, "late, the last too") == want
    assert worlds.run(_exactly, 2, stack, "all one bit") == want


def _evaluated():
    mesh = worlds.mesh(stages=2)
    link = LinkPolicy(Quantise(8), exact_eval=False)
    share = pdc.partition(GRAPHS["directed"](), mesh, "random", link=link)
    pipe = pdc.Pipeline(stack_of("gcn"), mesh, chunks=2)
    with pytest.raises(ValueError, match="evaluates exactly"):
        pipe(share)


def test_links_that_code_evaluation_are_refused():
    worlds.run(_evaluated, 2)


def _coded(stages, link, balance):
    mesh = worlds.mesh(stages=stages)
    share = pdc.partition(GRAPHS["directed"](), mesh, "random", link=LINKS[link]())
    chunk = torch.arange(60) * 7 % 4
    pipe = pdc.Pipeline(stack_of("gcnii"), mesh, chunks=chunk, balance=balance)
    return pipe, share, torch.optim.Adam(pipe.parameters(), 0.02)


def _go_on(pipe, share, opt, epochs):
    losses = []
    for _ in range(epochs):
        opt.zero_grad()
        losses.append(float(pipe.train_step(share, loss_of)))
        opt.step()
        share.edge_index.topology.link.step(losses[-1])
    return losses


def _losses(stages, link, balance):
    return _go_on(*_coded(stages, link, balance), 4)


@tiers.parametrize("link", ["8 bits", "one bit, late", "varco"], ["one bit, late"])
def test_results_do_not_depend_on_stages(link):
    want = worlds.run(_losses, 2, 1, link, None)[0]
    for stages, balance in ((2, [3, 5]), (2, [7, 1])):  # the last reads no neighbours
        for losses in worlds.run(_losses, 2 * stages, stages, link, balance):
            assert losses == pytest.approx(want, rel=1e-9)


def _resumed(stages, link, path, first, balance):
    pipe, share, opt = _coded(stages, link, balance)
    if first:
        _go_on(pipe, share, opt, 4)
        pipe.save(path, opt)
        return _go_on(pipe, share, opt, 3)
    _go_on(pipe, share, opt, 1)
    pipe.load(path, opt)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return _go_on(pipe, share, opt, 3)


KEPT = ["one bit, late", "8 bits", "varco"]


@pytest.mark.exhaustive
@tiers.parametrize("link", KEPT, ["8 bits"])
def test_what_a_link_keeps_is_saved_with_the_pipeline(link, tmp_path):
    path = tmp_path / "pipe"
    (want, *_) = worlds.run(_resumed, 4, 2, link, path, True, [3, 5])
    for stages, balance in ((2, [3, 5]), (2, [6, 2]), (1, None)):
        for losses in worlds.run(
            _resumed, 2 * stages, stages, link, path, False, balance
        ):
            assert losses == want


def _restarted(stages, path):
    """A link that goes on in chunks of other nodes, without the rows of the old ones."""
    pipe, share, opt = _coded(stages, "one bit, late", None)
    _go_on(pipe, share, opt, 2)
    pipe.save(path, opt)
    share.edge_index = share.edge_index.with_link(LINKS["one bit, late"]())
    pipe = pdc.Pipeline(stack_of("gcnii"), share.edge_index.nodes.mesh, chunks=3)
    pipe.load(path)
    with pytest.warns(UserWarning, match="late rows of links as well"):
        _go_on(pipe, share, opt, 1)
    return share.edge_index.topology.link.epoch


def test_what_was_kept_of_other_chunks_is_dropped(tmp_path):
    assert worlds.run(_restarted, 4, 2, tmp_path / "pipe") == [3] * 4


def _unstepped(stages):
    pipe, share, opt = _coded(stages, "one bit", [7, 1] if stages == 2 else None)
    pipe.train_step(share, loss_of)
    with pytest.raises(ValueError, match=r"link\.step\(\) once per epoch"):
        pipe.train_step(share, loss_of)
    share.edge_index.topology.link.step()
    return _go_on(pipe, share, opt, 2)


@tiers.parametrize("stages", [1, 2], [2])
def test_an_epoch_of_a_link_is_one_of_the_pipeline(stages):
    worlds.run(_unstepped, 2 * stages, stages)

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


def made(stages, link, stack="gcnii", lr=0.3, **options):
    """A pipeline, a share with a link, and an optimizer."""
    mesh = worlds.mesh(stages=stages)
    share = pdc.partition(GRAPHS["directed"](), mesh, "random", link=LINKS[link]())
    layers = stack_of(stack) if isinstance(stack, str) else stack()
    pipe = pdc.Pipeline(layers, mesh, **{"chunks": torch.arange(60) * 7 % 4, **options})
    return pipe, share, torch.optim.SGD(pipe.parameters(), lr)


def go_on(pipe, share, opt, epochs):
    """Losses, outputs, bytes of halos, as they were foretold, and gradients of some epochs."""
    link, ledger, losses, moved = (
        share.edge_index.topology.link,
        pipe.mesh.ledger,
        [],
        [],
    )
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


@tiers.cover(("link", "shape"), ["plain", "columns"], [(1, 2), (2, 2)])
def test_what_changes_nothing_is_the_exact_link(shape, link):
    stages, ways = shape
    want = worlds.run(train, stages * ways, stages, "none")
    got = worlds.run(train, stages * ways, stages, link)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@tiers.cover(("stack", "link"), [(1, "gin"), (2, "gcnii")], [*LINKS][2:], step=3)
def test_bytes_are_foretold_whatever_the_link(stack, link):
    stages, name = stack
    for _, out, *_ in worlds.run(_by_name, 2 * stages, stages, link, name):
        assert bool(out.isfinite().all())


def _by_name(stages, link, name):
    return train(stages, link, stack=name)


@tiers.parametrize("recompute", [True, False], [True])
def test_late_rows_of_frozen_weights_become_exact(recompute):
    want = worlds.run(_frozen, 4, "none", recompute)
    got = worlds.run(_frozen, 4, "late, the last too", recompute)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def _frozen(link, recompute):
    return train(2, link, epochs=9, lr=0.0, chunks=1, recompute=recompute)[3]


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


@pytest.mark.parametrize("stack", [_attention, _marked])
def test_what_must_be_exact_is_exact(stack):
    want = worlds.run(_exactly, 2, stack, "none")
    for link in ("late, the last too", "all one bit"):
        got = worlds.run(_exactly, 2, stack, link)
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def _losses(stages, link, balance):
    return train(stages, link, balance=balance)[0]


@tiers.parametrize("link", ["8 bits", "one bit, late", "varco"], ["one bit, late"])
def test_results_do_not_depend_on_stages(link):
    want = worlds.run(_losses, 2, 1, link, None)[0]
    for stages, balance in ((2, [3, 5]), (2, [7, 1])):  # the last reads no neighbours
        for losses in worlds.run(_losses, 2 * stages, stages, link, balance):
            assert losses == pytest.approx(want, rel=1e-9)


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
    pipe, share, opt = made(stages, "one bit, late")
    go_on(pipe, share, opt, 2)
    pipe.save(path, opt)
    share.edge_index = share.edge_index.with_link(LINKS["one bit, late"]())
    pipe = pdc.Pipeline(stack_of("gcnii"), pipe.mesh, chunks=3)
    pipe.load(path)
    with pytest.warns(UserWarning, match="late rows of links as well"):
        pipe.train_step(share, loss_of)
    share.edge_index.topology.link.step()
    return share.edge_index.topology.link.epoch


def test_what_was_kept_of_other_chunks_is_dropped(tmp_path):
    assert worlds.run(_restarted, 4, 2, tmp_path / "pipe") == [3] * 4


def _unstepped(stages):
    balance = [7, 1] if stages == 2 else None
    pipe, share, opt = made(stages, "one bit", balance=balance)
    pipe.train_step(share, loss_of)
    with pytest.raises(ValueError, match=r"link\.step\(\) once per epoch"):
        pipe.train_step(share, loss_of)
    share.edge_index.topology.link.step()
    go_on(pipe, share, opt, 2)


@tiers.parametrize("stages", [1, 2], [2])
def test_an_epoch_of_a_link_is_one_of_the_pipeline(stages):
    worlds.run(_unstepped, 2 * stages, stages)

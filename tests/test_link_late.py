"""Late links: which rows are read, and when they become exact."""

from __future__ import annotations

import itertools

import pytest
import tiers
import torch
import worlds
from links import WIDTHS, build, epoch, moved
from problems import GRAPHS

import pyg_distcomm as pdc
from pyg_distcomm.halo.codecs import Plain
from pyg_distcomm.halo.policy import LinkPolicy

pytestmark = pytest.mark.usefixtures("place")

# late links


def first_right(right, which):
    return next(i for i in range(len(right)) if all(row[which] for row in right[i:]))


@tiers.parametrize(
    ("grid", "staleness"),
    list(
        itertools.product(
            [(3, 1, 1), (2, 2, 1), (1, 2, 2)], [(1, None), (2, 1), (1, 0), (3, 0)]
        )
    ),
    [((2, 2, 1), (2, 1))],
)
def test_late_links_become_exact(grid, staleness):
    late, late_gradients = staleness
    size = grid[0] * grid[1] * grid[2]
    layers, steps = len(WIDTHS) - 1, 2 if grid[1] > 1 else 1
    for right in worlds.run(changed, size, grid, late, late_gradients):
        most = layers * steps
        assert first_right(right, 0) <= late * most
        back = late if late_gradients is None else late_gradients
        assert first_right(right, 1) <= (late + back) * most


def changed(grid, late, late_gradients):
    """Other inputs at first; then how soon all is as if they had never been."""
    _, share, net = build(grid, None)
    want = epoch(net, share)
    link = LinkPolicy(
        Plain(), late=late, late_gradients=late_gradients, exact_last=False
    )
    _, share, net = build(grid, link)
    x = share.x
    share.x = x * 3.0 + 1.0
    for _ in range(3):
        epoch(net, share)
        link.step()
    share.x = x
    right = []
    for _ in range(
        20
    ):  # rows and gradients late by 2 and 1, through three layers twice
        got = epoch(net, share)
        pairs = zip(got, want, strict=True)
        right.append([torch.allclose(a, b, rtol=1e-9, atol=1e-9) for a, b in pairs])
        link.step()
    return right


def bounded(every):
    """Synchronous epochs are exact, the others as late as they are."""
    _, share, net = build((3, 1, 1), None)
    link = LinkPolicy(Plain(), late=1, sync_every=every, exact_last=False)
    other = share.edge_index.with_link(link)
    x, exact, found = share.x, share.edge_index, []
    for t in range(9):
        share.x = x * (t + 1.0)
        share.edge_index = exact
        want = epoch(net, share)[0]
        share.edge_index = other
        found.append(torch.allclose(epoch(net, share)[0], want, rtol=1e-9))
        link.step()
    return found


@tiers.parametrize("every", [1, 2, 3], [3])
def test_synchronous_epochs(every):
    want = [t == 0 or (t + 1) % every == 0 for t in range(9)]
    for found in worlds.run(bounded, 3, every):
        assert found == want


def smoothed():
    """A mean of late rows, by its definition."""
    mesh = worlds.mesh()
    data = GRAPHS["directed"]()
    link = LinkPolicy(Plain(), late=1, smooth=0.75, exact_last=False)
    share = pdc.partition(data, mesh, "random", link=link)
    mean, found = None, []
    owner = share.edge_index.nodes.partition.owner
    cross = owner[data.edge_index[0]] != owner[data.edge_index[1]]
    for t in range(6):
        late = data.x * max(t - 1, 0) ** 2
        mean = late if mean is None or t == 0 else 0.75 * mean + 0.25 * late
        want = torch.zeros_like(data.x)
        for value, which in ((data.x * t**2, ~cross), (mean, cross)):
            source, target = data.edge_index[:, which]
            want.index_add_(0, target, value[source])
        if t == 0:
            edges = share.edge_index.with_halo("rows")
        x = (share.x * t**2).requires_grad_()
        out = edges.matmul(x)
        link.step()
        found.append(torch.allclose(out.full_tensor(), want, rtol=1e-9, atol=1e-9))
    return found


def test_smooth_is_a_moving_average():
    for found in worlds.run(smoothed, 3):
        assert all(found)


def behind():
    """Which epochs are read, late by 3 and synchronous every 4."""
    _, share, net = build((2, 1, 1), None)
    net.layers[0].link = link = LinkPolicy(Plain(), late=3, sync_every=4)
    seen = []
    for _ in range(10):
        epoch(net, share)
        seen.append({m.messages[0].epoch for *_, m in link.state.buffers})
        link.step()
    return seen


def test_nothing_behind_a_synchronous_epoch_is_kept():
    for seen in worlds.run(behind, 2):
        assert seen == [{e} for e in (0, 0, 0, 3, 3, 3, 4, 7, 7, 7)]


def thawed():
    """Layers that were frozen for some epochs: their last gradients are of long ago."""
    link = LinkPolicy(Plain(), late_gradients=1, exact_last=False)
    mesh, share, net = build((3, 1, 1), link)
    exact, right = share.edge_index.with_link(None), []
    for t in range(7):
        frozen = 1 < t < 5
        net.layers[:2].requires_grad_(not frozen)
        found = []
        for edge_index in (exact, share.edge_index):
            net.zero_grad()
            mesh.ledger.reset()
            (net(share.x, edge_index).square().sum() * (t + 1)).backward()
            found.append([p.grad for p in net.parameters() if p.grad is not None])
        right.append(all(map(torch.allclose, *found)))
        if t not in (0, 2):  # the first product plans, and nobody tells what freezes
            assert moved(mesh) == link.price().total, t
            link.drain()
            assert link.held == link.price().kept, t
        link.step()
    return right


def test_late_gradients_begin_anew_where_layers_were_frozen():
    for right in worlds.run(thawed, 3):
        assert right == [True, False, True, True, True, True, False]


def rates(epochs):
    """A learning rate that is divided by staleness, as the documentation has it."""
    link = LinkPolicy(Plain(), late=2, warmup=3, sync_every=6)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    pace = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda _: 1 / (1 + link.staleness())
    )
    _, share, net = build((2, 1, 1), link)
    found = []
    for _ in range(epochs):
        found.append(optimizer.param_groups[0]["lr"])
        epoch(net, share)
        optimizer.step()
        link.step()
        pace.step()
    return found


def test_staleness_is_known_ahead_and_paces_the_optimizer():
    for found in worlds.run(rates, 2, 8):
        assert found == [1, 1, 1, 1 / 2, 1 / 3, 1, 1 / 2, 1 / 3]


def skipping():
    link = pdc.SANCUS(1e9, 2, exact_last=False)
    _, share, net = build((2, 1, 1), link)
    found = []
    for _ in range(8):
        epoch(net, share)
        found.append({b.messages[-1].epoch for *_, b in link.state.buffers})
        link.step()
        found.append(link.staleness())
    return found


def test_rows_get_no_older_than_the_bound_however_little_they_drift():
    for found in worlds.run(skipping, 2):
        assert found[::2] == [{e} for e in (0, 0, 0, 3, 3, 3, 6, 6)]
        assert found[1::2] == [0, 1, 2, 0, 1, 2, 0, 1]

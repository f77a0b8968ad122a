"""Graphs that are generated: the edges that are asked for, and labels they help to learn."""

from __future__ import annotations

import pytest
import torch
from torch_geometric.utils import degree

from pyg_distcomm.datasets import communities, load_dataset

N, M = 6000, 42000


def accuracy(x, data):
    """Of a linear classifier by least squares on the train nodes, on the test nodes."""
    x = (x - x.mean(0)) / x.std(0)
    x = torch.cat([x, torch.ones(len(x), 1)], 1).double()
    here = data.train_mask
    want = torch.nn.functional.one_hot(data.y[here], 40).double()
    ridge = x[here].t() @ x[here] + 10 * torch.eye(x.size(1))
    found = x @ torch.linalg.solve(ridge, x[here].t() @ want)
    hit = found.argmax(1) == data.y
    return float(hit[data.test_mask].double().mean())


def test_communities_hold_what_is_asked_for():
    data, again = load_dataset(f"communities-{N}-{M}", seed=3), communities(N, M, 3)
    assert all(torch.equal(data[k], again[k]) for k in data.keys())  # noqa: SIM118
    assert not torch.equal(data.edge_index, communities(N, M, 4).edge_index)
    src, dst = data.edge_index
    assert data.edge_index.shape == (2, M)
    assert (src != dst).all()
    key = src * N + dst
    assert len(key.unique()) == M
    assert torch.equal(key.sort()[0], (dst * N + src).sort()[0])
    assert data.x.shape == (N, 64)
    assert data.y.unique().tolist() == list(range(40))
    share = torch.stack([data[f"{k}_mask"] for k in ("train", "val", "test")])
    assert (share.sum(0) == 1).all()
    assert abs(float(share[0].double().mean()) - 0.1) < 0.02


def test_communities_have_hubs_and_levels():
    data = communities(N, M)
    many = degree(data.edge_index[0], N)
    assert many.max() > 10 * many.mean()
    alike = data.y[data.edge_index[0]] == data.y[data.edge_index[1]]
    # 0.45 + 0.15 in the class, and what falls there from above; a tenth of labels wrong
    assert 0.4 < float(alike.double().mean()) < 0.65
    field = data.y // 5
    near = field[data.edge_index[0]] == field[data.edge_index[1]]
    assert 0.7 < float(near.double().mean()) < 0.9


def test_edges_of_communities_are_worth_ten_points():
    data = communities(N, M, train=0.3)
    scale = (degree(data.edge_index[1], N) + 1).rsqrt()
    x = data.x
    for _ in range(2):
        rows = scale.view(-1, 1) * x
        rows = rows.index_add(0, data.edge_index[1], rows[data.edge_index[0]])
        x = scale.view(-1, 1) * rows
    assert accuracy(x, data) > accuracy(data.x, data) + 0.1


@pytest.mark.parametrize(("n", "m"), [(N, 7), (50, 100), (100, 4000)])
def test_communities_that_cannot_be_are_refused(n, m):
    with pytest.raises(ValueError, match=r"even number of edges.*got \d+ and \d+"):
        communities(n, m)

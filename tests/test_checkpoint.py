"""A run resumed from a checkpoint is the run that never stopped, on any rank count."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import worlds
from problems import GRAPHS

import pyg_distcomm as pdc
from pyg_distcomm.nn import DistGCNConv, DistSAGEConv


class Net(torch.nn.Module):
    def __init__(self, rows=None):
        super().__init__()
        self.conv1 = DistGCNConv(7, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.conv2 = DistSAGEConv(8, 4)
        if rows is not None:
            self.emb = torch.nn.Parameter(rows)

    def forward(self, x, edge_index):
        x = x + self.emb if hasattr(self, "emb") else x
        h = self.norm(self.conv1(x, edge_index)).relu()
        return self.conv2(F.dropout(h, 0.3, self.training), edge_index)


def _setup(cut, embedding):
    mesh = worlds.mesh()
    share = pdc.partition(GRAPHS["undirected"](), mesh, cut)
    torch.manual_seed(3)
    net = Net(torch.zeros_like(share.x) if embedding else None).double()
    model = pdc.replicate(net, mesh)
    return mesh, share, model, torch.optim.Adam(model.parameters(), lr=0.01)


def _steps(model, opt, share, n):
    losses = []
    for _ in range(n):
        opt.zero_grad()
        out = model(share.x, share.edge_index)
        loss = F.cross_entropy(out[share.train_mask], share.y[share.train_mask])
        loss.backward()
        opt.step()
        losses.append(float(loss))
    return losses


def _save(path, embedding):
    mesh, share, model, opt = _setup("random", embedding)
    _steps(model, opt, share, 4)
    pdc.save_checkpoint(path, mesh, model, opt, epoch=4)
    pdc.save_checkpoint(path, mesh, model, opt, epoch=4)  # replaces what is there
    return _steps(model, opt, share, 4)


def _resume(path, embedding):
    mesh, share, model, opt = _setup("block", embedding)
    extra = pdc.load_checkpoint(path, mesh, model, opt, epoch=0)
    assert extra == {"epoch": 4}
    return _steps(model, opt, share, 4)


@pytest.mark.parametrize("embedding", [False, True])
def test_resume_on_another_number_of_ranks(tmp_path, embedding):
    path = str(tmp_path / "ckpt")
    want = worlds.run(_save, 3, path, embedding)[0]
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]
    for size in (1, 2, 3, 4):
        got = worlds.run(_resume, size, path, embedding)[0]
        assert got == pytest.approx(want, rel=1e-9)


def _damaged(path):
    mesh, _, model, opt = _setup("random", False)
    with pytest.raises(ValueError, match="cannot load checkpoint"):
        pdc.load_checkpoint(path + "-nowhere", mesh, model, opt)
    with pytest.raises(ValueError, match="cannot load checkpoint"):
        pdc.load_checkpoint(path, mesh, torch.nn.Linear(3, 3), None)


def test_a_checkpoint_that_does_not_fit_is_refused_on_all_ranks(tmp_path):
    path = str(tmp_path / "ckpt")
    worlds.run(_save, 2, path, False)
    worlds.run(_damaged, 2, path)

"""A run resumed from a checkpoint is the run that never stopped, on any rank count."""

from functools import partial

import alike
import numpy as np
import pytest
import tiers
import torch
import torch.nn.functional as F
import torch_geometric.nn
import worlds
from links import Dropping
from problems import GRAPHS

import pyg_distcomm as pdc
from pyg_distcomm.nn import DistGCNConv, DistSAGEConv

pytestmark = pytest.mark.usefixtures("place")


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


def _steps(net, opt, share, steps, scheduler=None):
    def closure():
        opt.zero_grad()
        loss = F.cross_entropy(net(share.x, share.edge_index), share.y)
        loss.backward()
        return loss

    losses = []
    for _ in range(steps):
        losses.append(float(opt.step(closure).detach()))
        if scheduler is not None:
            scheduler.step()
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


@pytest.mark.parametrize("embedding", [tiers.rarely(False), True])
def test_resume_on_another_number_of_ranks(tmp_path, embedding):
    path = str(tmp_path / "ckpt")
    want = worlds.run(_save, 2, path, embedding)[0]
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]
    for size in (1, 2) if embedding else (1, 3):
        got = worlds.run(_resume, size, path, embedding)[0]
        assert got == pytest.approx(want, rel=1e-9)


def _begun(grid, kind, make_link):
    mesh, link = worlds.mesh(grid=grid), make_link and make_link()
    torch.manual_seed(0)
    data = GRAPHS["undirected"]()
    data.x = torch.randn(data.num_nodes, 64)
    share = pdc.partition(data, mesh, "random", link=link)
    torch.manual_seed(1)
    if kind == "Dropping":  # of its input too
        net = Dropping(widths=(64, 8, 8, 4)).to(share.x.device)
    else:
        net = getattr(pdc.nn, kind)(64, 8, 3, 4, dropout=0.3).to(share.x.device)
    return mesh, share, net, torch.optim.Adam(net.parameters(), lr=0.01), link


def _trained(run, epochs):
    """Trains in float32; returns the output of the last evaluation."""
    _, share, net, opt, link = run
    for _ in range(epochs):
        net.train()
        opt.zero_grad()
        F.cross_entropy(net(share.x, share.edge_index), share.y).backward()
        opt.step()
        if link is not None:
            link.step()
        net.eval()
        with torch.no_grad():
            out = net(share.x, share.edge_index).full_tensor()
    return out


SYLVIE, VARCO = partial(pdc.Sylvie, 1), partial(pdc.VARCO, 6, slope=1)
# ranks, grid, model, link, and the epochs of 4 before the checkpoint
RESUMED = [
    (2, (2, 1, 1), "GCN", None, 1),
    (2, (2, 1, 1), "Dropping", SYLVIE, 2),
    (2, (1, 1, 2), "GraphSAGE", None, 1),
    (2, (2, 1, 1), "GraphSAGE", None, 2),
    (2, (1, 2, 1), "GAT", None, 2),
    (2, (2, 1, 1), "GCN", VARCO, 3),
    (2, (1, 2, 1), "GCN", None, 3),
    (4, (2, 2, 1), "GCN", None, 3),
    (4, (4, 1, 1), "GCN", None, 2),
    (8, (2, 2, 2), "GraphSAGE", None, 3),
    (2, (2, 1, 1), "GAT", None, 3),
    (4, (2, 2, 1), "GAT", SYLVIE, 3),
    (4, (2, 1, 2), "GIN", None, 3),
    (2, (1, 2, 1), "GIN", VARCO, 3),
]


@tiers.parametrize(("size", "grid", "kind", "make_link", "at"), RESUMED, slice(1, 2))
@worlds.on()
def test_a_resumed_run_is_the_straight_one_bit_for_bit(
    tmp_path, size, grid, kind, make_link, at
):
    want = _trained(_begun(grid, kind, make_link), 4)
    mesh, *run, link = _begun(grid, kind, make_link)
    _trained((mesh, *run, link), at)
    pdc.save_checkpoint(tmp_path / "ckpt", mesh, *run[1:], link=link)
    mesh, *run, link = _begun(grid, kind, make_link)
    pdc.load_checkpoint(tmp_path / "ckpt", mesh, *run[1:], link=link)
    assert torch.equal(_trained((mesh, *run, link), 4 - at), want)


def test_an_optimizer_of_another_model_is_refused(tmp_path):
    mesh, net = pdc.init(), torch.nn.Linear(2, 2)
    own = torch.optim.Adam(net.parameters())
    other = torch.optim.Adam(torch.nn.Linear(3, 3).parameters())
    with pytest.raises(ValueError, match=r"first of shape \[3, 3\].* not the Linear's"):
        pdc.save_checkpoint(tmp_path / "run", mesh, net, other)
    assert not list(tmp_path.iterdir())
    pdc.save_checkpoint(tmp_path / "run", mesh, net, own)
    with pytest.raises(ValueError, match="give the optimizer of this model"):
        pdc.load_checkpoint(tmp_path / "run", mesh, net, other)


# Optimizers, and models that do not fit -------------------------------------------------


class _Two(torch.nn.Module):
    def __init__(self, width=4, **more):
        super().__init__()
        torch.manual_seed(5)
        self.one, self.two = DistGCNConv(7, width), DistGCNConv(width, 4)
        for name, layer in more.items():
            setattr(self, name, layer)
        self.double()

    def forward(self, x, edge_index):
        return self.two(self.one(x, edge_index).relu(), edge_index)


def _lbfgs(params, **options):
    return torch.optim.LBFGS(params, lr=0.1, max_iter=3, **options)


OPTIMIZERS = {
    "LBFGS": _lbfgs,
    "LBFGS wolfe": lambda p: _lbfgs(p, line_search_fn="strong_wolfe"),
    "Adam": torch.optim.Adam,
    "Adafactor": torch.optim.Adafactor,
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "groups": lambda p: torch.optim.Adam([{"params": [q], "lr": 0.01} for q in p]),
    "tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
}
if hasattr(torch.optim, "Muon"):  # from torch 2.9 on
    OPTIMIZERS["Muon"] = lambda p: torch.optim.Muon([q for q in p if q.dim() == 2])
SCHEDULERS = {
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 3]),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, 9),
}


def _with_optimizers(folder, first, turn):
    """Saves runs at their start and after two steps, or goes on with them."""
    mesh, ends = worlds.mesh(), {}
    cut = "random" if first else "block"
    share = pdc.partition(GRAPHS["undirected"](), mesh, cut)
    for name, make in [*OPTIMIZERS.items()][turn]:
        net = _Two().to(share.x.device)
        opt = make(net.parameters())
        if first:
            pdc.save_checkpoint(f"{folder}/{name} 0", mesh, net, opt)
            before = _steps(net, opt, share, 2)
            pdc.save_checkpoint(f"{folder}/{name} 2", mesh, net, opt)
            ends[name] = before + _steps(net, opt, share, 2)
            continue
        _steps(net, opt, share, 1)
        pdc.load_checkpoint(f"{folder}/{name} 0", mesh, net, opt)
        ends[name] = _steps(net, opt, share, 2)
        net = _Two().to(share.x.device)
        opt = make(net.parameters())
        pdc.load_checkpoint(f"{folder}/{name} 2", mesh, net, opt)
        ends[name] += _steps(net, opt, share, 2)
    return ends


@tiers.parametrize(
    ("size", "other", "turn"),
    [(2, 1, slice(0, None, 3)), *((*n, slice(None)) for n in ((2, 2), (2, 1), (1, 3)))],
    slice(1),
)
def test_every_optimizer_goes_on(tmp_path, size, other, turn):
    wanted = worlds.run(_with_optimizers, size, str(tmp_path), True, turn)[0]
    found = worlds.run(_with_optimizers, other, str(tmp_path), False, turn)[0]
    for name in wanted:
        assert found[name] == pytest.approx(wanted[name], rel=1e-9), name


def test_what_is_saved_beside_a_model_comes_back_as_it_was(tmp_path):
    mesh, data = pdc.init(), GRAPHS["undirected"]()
    share = pdc.partition(data, mesh)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    extra = {"scaler": scaler.state_dict(), "best": torch.arange(3)}
    extra |= {"scores": {0: 0.5, "0": [1, (2, None)], 3: {}}, "history": [1.0, 2.0]}
    for name, make in SCHEDULERS.items():
        net = _Two().to(share.x.device)
        opt, other = (torch.optim.SGD(net.parameters(), 0.1, 0.5) for _ in "ab")
        scheduler = make(opt)
        _steps(net, other, share, 1)
        _steps(net, opt, share, 2, scheduler)
        more = {"scheduler": scheduler.state_dict(), "other": other.state_dict()}
        more |= {**extra, "lr": np.float64(0.25)}
        pdc.save_checkpoint(tmp_path / name, mesh, net, opt, **more)
        want = _steps(net, opt, share, 3, scheduler)
        scheduler = make(opt)
        found = pdc.load_checkpoint(
            tmp_path / name, mesh, net, opt, **dict.fromkeys(more)
        )
        alike.same({key: found[key] for key in extra}, extra)
        assert (found["lr"], type(found["lr"])) == (0.25, float)
        scheduler.load_state_dict(found["scheduler"])
        scaler.load_state_dict(found["scaler"])
        second = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
        second.load_state_dict(found["other"])  # a second optimizer, by numbers
        for p in net.parameters():
            both = (o.state[p]["momentum_buffer"] for o in (second, other))
            assert torch.equal(*both)
        assert _steps(net, opt, share, 3, scheduler) == want, name


@pytest.mark.parametrize("size", [1, 2])
@worlds.on()
def test_a_model_or_an_optimizer_that_does_not_fit_is_named(size, tmp_path):
    mesh, net = worlds.mesh(), _Two(more=torch.nn.Linear(2, 2))
    path = str(tmp_path / "run")
    pdc.save_checkpoint(path, mesh, net, torch.optim.Adam(net.parameters()))
    pdc.save_checkpoint(path + "-bare", mesh, net)

    def refused(says, model, optimizer=None, path=path, **extra):
        before = {k: v.clone() for k, v in model.state_dict().items()}
        with pytest.raises(ValueError, match="cannot load checkpoint") as error:
            pdc.load_checkpoint(path, mesh, model, optimizer, **extra)
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), name
        assert says in str(error.value)
        assert "\n" not in str(error.value)

    for call in (pdc.save_checkpoint, pdc.load_checkpoint):
        with pytest.raises(TypeError, match="Module, got OrderedDict"):
            call(path, mesh, net.state_dict())
        with pytest.raises(TypeError, match=r"takes one optimizer of the .* got list"):
            call(path, mesh, net, [torch.optim.Adam(net.parameters())])
    fewer, same = _Two(), _Two(more=torch.nn.Linear(2, 2))
    gone = "more.weight is of shape [2, 2] in it, and missing in the _Two"
    refused(gone, fewer)
    refused(gone, fewer, torch.optim.Adam(fewer.parameters()))
    for says, made in (
        (
            "other.weight is missing in it, and of shape [2, 2] in the _Two",
            _Two(more=torch.nn.Linear(2, 2), other=torch.nn.Linear(2, 2)),
        ),
        (
            "one.bias is of shape [4] in it, and of shape [8] in the _Two",
            _Two(8, more=torch.nn.Linear(2, 2)),
        ),
        ("mere.weight is missing in it", _Two(mere=torch.nn.Linear(2, 2))),
        (
            "more.weight is of shape [2, 2] in it, and of shape [2]",
            _Two(more=torch.nn.BatchNorm1d(2)),
        ),
        (  # another model on one rank
            "one.bias is of shape [4] in it, and of shape [8] in the _Two",
            _Two(8) if mesh.rank == mesh.size - 1 else same,
        ),
    ):
        refused(says, made)
    groups = [{"params": [p]} for p in same.parameters()]
    for says, made in (
        ("with class Adam, got one with class SGD", torch.optim.SGD(same.parameters())),
        (
            "with more.bias in group 0, got one with more.bias not in group 0",
            torch.optim.Adam(same.one.parameters()),
        ),
        ("with 1 groups, got one with 6 groups", torch.optim.Adam(groups)),
    ):
        refused(says, same, made)
    adam, bare = torch.optim.Adam(same.parameters()), path + "-bare"
    refused("it holds no optimizer, but mesh, model", same, adam, bare)
    lazy = _Two(more=torch_geometric.nn.Linear(-1, 2))  # before its first pass
    pdc.load_checkpoint(path, mesh, lazy)
    alike.same(lazy.state_dict(), net.state_dict())
    refused("it holds no extra.epoch, but mesh, model, optimizer", same, epoch=0)
    refused("nowhere", same, path=path + "-nowhere")

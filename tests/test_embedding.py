"""Learnable rows beside torch.nn.Embedding, in minibatches and on the whole graph."""

from __future__ import annotations

import copy
import io

import pytest
import tiers
import torch
import torch.nn.functional as F
import worlds
from problems import GRAPHS, owners

import pyg_distcomm as pdc
from pyg_distcomm.loader import DistNeighborLoader, LoaderOptions
from pyg_distcomm.nn import DistGCNConv

pytestmark = pytest.mark.usefixtures("place")

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.3),
    "sparse_adam": lambda p: torch.optim.SparseAdam(list(p), lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
}
N, DIM, BATCHES = 50, 3, 4


def _ids(batch, step):
    """Ids of a minibatch, some of them twice; the last one of a step is empty."""
    generator = torch.Generator().manual_seed(10 * step + batch)
    count = 0 if batch == BATCHES - 1 and step == 1 else 12
    return torch.randint(N, (count,), generator=generator)


def _loss(rows, ids):
    target = torch.stack([ids.sin(), ids.cos(), ids / N], 1).to(rows)
    return ((rows - target) ** 2).sum()


def _trained(optimizer, sparse, steps=3):
    """Trains on minibatches t of a step by rank t mod P; returns all rows."""
    mesh = worlds.mesh()
    share = pdc.partition(GRAPHS["undirected"](), mesh, "random")
    torch.manual_seed(5)
    emb = pdc.DistEmbedding(N, DIM, like=share, sparse=sparse, dtype=torch.float64)
    opt = OPTIMIZERS[optimizer](emb.parameters())
    for step in range(steps):
        opt.zero_grad()
        for batch in range(mesh.rank, BATCHES, mesh.size):
            ids = _ids(batch, step)
            (_loss(emb(ids), ids) * mesh.size / BATCHES).backward()
        opt.step()
    return emb.weight.detach().full_tensor()


def _plain(optimizer, sparse, steps=3):
    torch.manual_seed(5)
    emb = torch.nn.Embedding(N, DIM, sparse=sparse, dtype=torch.float64)
    opt = OPTIMIZERS[optimizer](emb.parameters())
    for step in range(steps):
        opt.zero_grad()
        for batch in range(BATCHES):
            ids = _ids(batch, step)
            (_loss(emb(ids), ids) / BATCHES).backward()
        opt.step()
    return emb.weight.detach()


KINDS = [("sgd", True), ("sgd", False), ("adagrad", True), ("sparse_adam", True)]


@pytest.mark.parametrize(("optimizer", "sparse"), [*KINDS, ("adam", False)])
@tiers.parametrize("size", [1, 2, 4], [1, 4])
def test_minibatches_train_the_rows_that_torch_trains(size, optimizer, sparse):
    want = _plain(optimizer, sparse)
    every = worlds.run(_trained, size, optimizer, sparse)
    assert all(torch.equal(got, every[0]) for got in every)
    torch.testing.assert_close(every[0], want, atol=1e-9, rtol=1e-9)


def _table():
    return torch.randn(N, DIM, generator=torch.Generator().manual_seed(1))


def _one_step(sparse):
    """Takes one minibatch on each rank; returns the gradient of all rows."""
    mesh = worlds.mesh()
    emb = pdc.DistEmbedding(N, DIM, like=mesh, sparse=sparse)
    emb.shard.data.copy_(_table()[emb.rows.gid])
    ids = _ids(mesh.rank, 0).unique()
    (_loss(emb(ids), ids) * mesh.size).backward()
    grad = emb.shard.grad.to_dense() if sparse else emb.shard.grad
    return pdc.from_local(grad, like=emb.weight.detach()).full_tensor()


@pytest.mark.parametrize("sparse", [True, False])
def test_gradients_are_added_in_the_order_of_ranks(sparse):
    want = worlds.run(_one_after_the_other, 1, sparse)[0]
    assert torch.equal(worlds.run(_one_step, BATCHES, sparse)[0], want)


def _one_after_the_other(sparse):
    emb = pdc.DistEmbedding(N, DIM, like=worlds.mesh(), sparse=sparse)
    emb.shard.data.copy_(_table())
    for batch in range(BATCHES):
        ids = _ids(batch, 0).unique()
        _loss(emb(ids), ids).backward()
    return emb.shard.grad.to_dense() if sparse else emb.shard.grad


class Net(torch.nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.emb = embedding
        self.conv1, self.conv2 = DistGCNConv(DIM, 8), DistGCNConv(8, 4)

    def forward(self, edge_index):
        return self.conv2(self.conv1(self.emb.weight, edge_index).relu(), edge_index)


def _full_graph(data, embedding_of, steps=4):
    torch.manual_seed(7)
    net = Net(embedding_of(data)).double()
    opt = torch.optim.Adam(net.parameters(), lr=0.05)
    for _ in range(steps):
        opt.zero_grad()
        out = net(data.edge_index)
        F.cross_entropy(out[data.train_mask], data.y[data.train_mask]).backward()
        opt.step()
    return net


def _spread(cut):
    mesh = worlds.mesh()
    data = GRAPHS["undirected"]()
    share = pdc.partition(data, mesh, owners(cut, data, mesh.size))
    net = _full_graph(share, lambda d: pdc.DistEmbedding(N, DIM, like=d))
    names = dict(net.named_parameters())
    return net.emb().detach().full_tensor(), names["conv1.lin.weight"].detach()


@tiers.parametrize("size", [1, 2, 3], [1, 3])
def test_full_graph_training_is_that_of_one_process(size):
    net = _full_graph(GRAPHS["undirected"](), lambda d: torch.nn.Embedding(N, DIM))
    for table, weight in worlds.run(_spread, size, "random"):
        torch.testing.assert_close(table, net.emb.weight.detach(), atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(
            weight, net.conv1.lin.weight.detach(), atol=1e-9, rtol=1e-9
        )


def _resumable(cut, optimizer):
    mesh = worlds.mesh()
    share = pdc.partition(GRAPHS["undirected"](), mesh, cut)
    torch.manual_seed(2)
    emb = pdc.DistEmbedding(N, DIM, like=share, sparse=optimizer != "adam")
    model = pdc.replicate(torch.nn.Sequential(emb.double()), mesh)
    return mesh, emb, model, OPTIMIZERS[optimizer](model.parameters())


def _steps(mesh, emb, opt, steps):
    for step in steps:
        opt.zero_grad()
        for batch in range(mesh.rank, BATCHES, mesh.size):
            ids = _ids(batch, step)
            (_loss(emb(ids), ids) * mesh.size / BATCHES).backward()
        opt.step()
    return emb.weight.detach().full_tensor()


def _save(path, optimizer):
    mesh, emb, model, opt = _resumable("random", optimizer)
    _steps(mesh, emb, opt, range(2))
    pdc.save_checkpoint(path, mesh, model, opt)
    return _steps(mesh, emb, opt, range(2, 4))


def _resume(path, optimizer):
    mesh, emb, model, opt = _resumable("block", optimizer)
    pdc.load_checkpoint(path, mesh, model, opt)
    return _steps(mesh, emb, opt, range(2, 4))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_goes_on_from_a_checkpoint_on_other_ranks(tmp_path, optimizer):
    path = str(tmp_path / "ckpt")
    want = worlds.run(_save, 2, path, optimizer)[0]
    for size in (1, 2, 4):
        got = worlds.run(_resume, size, path, optimizer)[0]
        torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-9)


def _with_factors(path):
    mesh = worlds.mesh()
    emb = pdc.DistEmbedding(N, DIM, like=mesh)
    opt = Factored(emb.parameters(), lr=0.1)
    emb(torch.tensor([mesh.rank])).sum().backward()
    opt.step()
    with pytest.raises(ValueError, match="Factored keeps row_var"):
        pdc.save_checkpoint(path, mesh, emb, opt)
    for kind in (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon):
        own = torch.nn.Linear(3, 2, bias=False)
        own.weight.grad = torch.ones(2, 3)
        kind(own.parameters()).step(lambda: torch.zeros(()))
        with pytest.raises(ValueError, match="reads all rows of a table at once"):
            kind(emb.parameters()).step(lambda: torch.zeros(()))


class Factored(torch.optim.SGD):
    """Keeps a number for each row."""

    def step(self):
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["row_var"] = p.grad.square().sum(1)


def test_what_an_optimizer_keeps_of_all_rows_is_refused(tmp_path):
    worlds.run(_with_factors, 2, str(tmp_path / "ckpt"))


def _replaced():
    emb = pdc.DistEmbedding(N, DIM, like=worlds.mesh())
    values = torch.rand(N, DIM)
    emb.weight.data.copy_(values)
    assert torch.equal(emb(torch.arange(N)), values)
    emb.weight = torch.nn.Parameter(values)
    for read in (lambda: emb(torch.tensor([1])), emb):
        with pytest.raises(ValueError, match=r"replaced by a parameter \[50, 3\]"):
            read()
    five = pdc.DistEmbedding(5, DIM, like=worlds.mesh())  # 3 and 2 rows
    five.weight = torch.nn.Parameter(torch.rand(2, DIM))
    with pytest.raises(
        ValueError, match=r"rank 0: .* replaced by a parameter \[2, 3\]"
    ):
        five(torch.tensor([1]))
    thin = pdc.DistEmbedding(N, 0, like=worlds.mesh())
    assert thin(torch.arange(N)).shape == (N, 0)


def test_a_whole_table_in_place_of_the_rows_is_refused():
    worlds.run(_replaced, 2)


def _priced():
    mesh = worlds.mesh()
    share = pdc.partition(GRAPHS["undirected"](), mesh, "random")
    emb = pdc.DistEmbedding(N, DIM, like=share)
    owner = share.edge_index.nodes.partition.owner_of(torch.arange(N))
    ids = [torch.arange(rank, N, 2).repeat(2) for rank in range(mesh.size)]
    asked = [(owner[i.unique()] != r).sum() for r, i in enumerate(ids)]
    served = [
        (owner[i.unique()] == mesh.rank).sum()
        for r, i in enumerate(ids)
        if r != mesh.rank
    ]
    before = [mesh.ledger.words(op) for op in ("halo", "halo_reduce")]
    emb(ids[mesh.rank]).sum().backward()
    after = [mesh.ledger.words(op) for op in ("halo", "halo_reduce")]
    moved = [b - a for a, b in zip(before, after, strict=True)]
    return moved, [int(asked[mesh.rank]) * DIM, int(sum(served)) * DIM]


def test_distinct_rows_of_other_ranks_travel_once_each_way():
    for size in (2, 3):
        for moved, want in worlds.run(_priced, size):
            assert moved == want


def _looked_up():
    mesh, good = worlds.mesh(), torch.tensor([1])
    emb = pdc.DistEmbedding(N, DIM, like=mesh)
    wrong = [torch.tensor(ids) for ids in ([0, N], [-1], [0.5])]
    for bad in (*wrong, good.to_sparse(), good.to("meta"), [1, 2]):
        with pytest.raises(IndexError, match=r"rank 1: give ids .*in \[0, 50\)"):
            emb(bad if mesh.rank else good)
        assert emb(torch.tensor([[mesh.rank, 3], [3, 4]])).shape == (2, 2, DIM)


def test_bad_ids_of_one_rank_are_refused_on_all():
    worlds.run(_looked_up, 2)


def _misfit():
    mesh = worlds.mesh()
    share = pdc.partition(GRAPHS["undirected"](), mesh, "block")
    with pytest.raises(ValueError, match="an embedding of 7 nodes"):
        pdc.DistEmbedding(7, DIM, like=share)
    for n, dim, said in (
        (N, 3 + mesh.rank, "the same embedding_dim: it is 3 on rank 0"),
        (N, -1, "whole numbers of at least 0, got -1"),
        (N + mesh.rank, DIM, "rank 1: an embedding of 51 nodes"),
    ):
        with pytest.raises(ValueError, match=said):
            pdc.DistEmbedding(n, dim, like=share)
    with pytest.raises((TypeError, ValueError), match="rank 1: like says which rank"):
        pdc.DistEmbedding(N, DIM, like=3 if mesh.rank else share)
    with pytest.raises(TypeError, match="takes the model"):
        pdc.clip_grad_norm_([], 1.0)
    with pytest.raises(ValueError, match="a number above 0, got 0"):
        pdc.clip_grad_norm_(torch.nn.Linear(1, 1), 1.0, 0)
    with pytest.raises(TypeError, match="a Mesh; got a int"):
        pdc.DistEmbedding(N, DIM, like=3)
    with pytest.raises(TypeError, match="tensor of 2 dims"):
        pdc.DistEmbedding.from_pretrained(torch.zeros(3, 2))
    learnt = pdc.DistEmbedding.from_pretrained(share.x, freeze=False)
    ids = torch.tensor([4, 2, 4])
    whole = share.x.full_tensor()
    assert torch.equal(learnt(ids), whole[ids])
    learnt(ids).sum().backward()
    assert learnt.shard.grad.shape == learnt.shard.shape
    twin = copy.deepcopy(learnt)
    assert twin.rows is learnt.rows
    assert torch.equal(twin(ids), learnt(ids))
    assert not pdc.DistEmbedding.from_pretrained(share.x).shard.requires_grad
    return float(learnt.shard.grad.sum())


def test_what_it_is_made_from_is_checked():
    sums = worlds.run(_misfit, 2)
    assert sum(sums) == pytest.approx(3 * 7)  # 3 ids on each rank, averaged


class Scores(torch.nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.emb, self.lin = embedding, torch.nn.Linear(DIM, 1)

    def forward(self, ids):
        return self.lin(self.emb(ids))


def _under_ddp(ids):
    mesh = worlds.mesh()
    emb = pdc.DistEmbedding(4 * mesh.size, DIM, like=mesh)
    assert pdc.replicate(Scores(emb), mesh)(ids).shape[1] == 1
    model = torch.nn.parallel.DistributedDataParallel(Scores(emb))
    with pytest.raises(RuntimeError, match="wrap the model by pdc"):
        model(ids)


@pytest.mark.parametrize("ids", [torch.tensor([1, 2]), None])
@pytest.mark.place("cpu")
def test_ddp_that_would_send_the_rows_is_refused(ids):
    worlds.run(_under_ddp, 2, ids)


def _initial():
    torch.manual_seed(11)
    return pdc.DistEmbedding(N, DIM, like=worlds.mesh()).weight.detach().full_tensor()


def test_the_table_starts_as_torchs():
    torch.manual_seed(11)
    want = torch.nn.Embedding(N, DIM).weight.detach()
    for size in (1, 3):
        assert torch.equal(worlds.run(_initial, size)[0], want)


def _clipped(norm_type, sparse):
    mesh = worlds.mesh()
    torch.manual_seed(1)
    emb = pdc.DistEmbedding(N, DIM, like=mesh, sparse=sparse)
    model = torch.nn.Sequential(emb, torch.nn.Linear(DIM, 1))
    model = pdc.replicate(model.double(), mesh)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in range(mesh.rank, BATCHES, mesh.size):
        (model(_ids(batch, 0)).square().sum() * mesh.size / BATCHES).backward()
    norm = pdc.clip_grad_norm_(model, 0.1, norm_type)
    opt.step()
    return norm, emb.weight.detach().full_tensor(), model.module[1].weight.detach()


@pytest.mark.parametrize(
    ("norm_type", "sparse"), [(2.0, True), (2.0, False), (float("inf"), True)]
)
def test_gradients_are_clipped_as_on_one_process(norm_type, sparse):
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Embedding(N, DIM), torch.nn.Linear(DIM, 1))
    net = net.double()
    for batch in range(BATCHES):
        (net(_ids(batch, 0)).square().sum() / BATCHES).backward()
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1, norm_type)
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    for size in (1, 2):
        for found in worlds.run(_clipped, size, norm_type, sparse):
            want = norm, net[0].weight.detach(), net[1].weight.detach()
            for a, b in zip(found, want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def _changed_ids():
    mesh = worlds.mesh()
    share = pdc.partition(GRAPHS["undirected"](), mesh, "random")
    emb = pdc.DistEmbedding.from_pretrained(share.x, freeze=False)
    whole = share.x.full_tensor()
    for batch in DistNeighborLoader(
        share, [2], batch_size=9, options=LoaderOptions(seed=0, embedding=emb)
    ):
        assert torch.equal(emb(batch.n_id), batch.x)  # fetched rows, with gradients
        twin = copy.deepcopy(batch)
        assert torch.equal(emb(twin.n_id), batch.x)
        torch.save(batch.n_id, io.BytesIO())
        batch.n_id.copy_(batch.n_id.flip(0))
        assert torch.equal(emb(batch.n_id), whole[batch.n_id])
    with torch.inference_mode():
        for batch in DistNeighborLoader(
            share, [2], options=LoaderOptions(embedding=emb, prefetch=0)
        ):
            assert torch.equal(emb(batch.n_id), batch.x)
    other = pdc.DistEmbedding(N + 1, DIM, like=mesh)
    with pytest.raises(ValueError, match="with 51 rows, and a graph with 50 nodes"):
        DistNeighborLoader(share, [2], options=LoaderOptions(embedding=other))
    with pytest.raises(TypeError, match="must be a DistEmbedding"):
        DistNeighborLoader(
            share, [2], options=LoaderOptions(embedding=share.x.to_local())
        )
    with pytest.raises(ValueError, match="embedding is for a graph spread"):
        DistNeighborLoader(
            GRAPHS["undirected"](), [2], options=LoaderOptions(embedding=emb)
        )
    share.x.requires_grad_()
    with pytest.raises(TypeError, match=r"DistEmbedding.from_pretrained\(data.x"):
        DistNeighborLoader(share, [2])


@pytest.mark.parametrize("size", [1, 2])
def test_a_route_of_changed_ids_is_not_taken(size):
    worlds.run(_changed_ids, size)

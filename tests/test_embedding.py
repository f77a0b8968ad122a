"""Learnable rows beside torch.nn.Embedding, in minibatches and on the whole graph."""

import copy
import io

import alike
import pytest
import tiers
import torch
import torch.nn.functional as F
import worlds
from problems import GRAPHS

import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives
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


def _steps(emb, opt, steps, rank=0, size=1):
    """Trains on minibatches t of a step by rank t mod P."""
    for step in steps:
        opt.zero_grad()
        for batch in range(rank, BATCHES, size):
            ids = _ids(batch, step)
            (_loss(emb(ids), ids) * size / BATCHES).backward()
        opt.step()


def _trained(optimizer, sparse):
    mesh = worlds.mesh()
    share = pdc.partition(GRAPHS["undirected"](), mesh, "random")
    torch.manual_seed(5)
    emb = pdc.DistEmbedding(N, DIM, like=share, sparse=sparse, dtype=torch.float64)
    start = emb.weight.detach().full_tensor()
    opt = OPTIMIZERS[optimizer](emb.parameters())
    _steps(emb, opt, range(3), mesh.rank, mesh.size)
    return start, emb.weight.detach().full_tensor()


KINDS = [("sgd", True), ("sgd", False), ("adagrad", True), ("sparse_adam", True)]


@tiers.cover(("kind", "size"), [*KINDS, ("adam", False)], [2, 4], step=2)
def test_minibatches_train_the_rows_that_torch_trains(kind, size):
    optimizer, sparse = kind
    torch.manual_seed(5)
    plain = torch.nn.Embedding(N, DIM, sparse=sparse, dtype=torch.float64)
    start = plain.weight.detach().clone()
    _steps(plain, OPTIMIZERS[optimizer](plain.parameters()), range(3))
    every = worlds.run(_trained, size, optimizer, sparse)
    assert all(torch.equal(found[0], start) for found in every)
    assert all(torch.equal(found[1], every[0][1]) for found in every)
    torch.testing.assert_close(every[0][1], plain.weight.detach(), atol=1e-9, rtol=1e-9)


def _added(sparse, batches):
    """Takes minibatches, one after the other; returns the gradient of all rows."""
    mesh = worlds.mesh()
    emb = pdc.DistEmbedding(N, DIM, like=mesh, sparse=sparse)
    table = torch.randn(N, DIM, generator=torch.Generator().manual_seed(1))
    emb.shard.data.copy_(table[emb.rows.gid])
    for batch in batches or [mesh.rank]:
        ids = _ids(batch, 0).unique()
        (_loss(emb(ids), ids) * mesh.size).backward()
    grad = emb.shard.grad.to_dense() if sparse else emb.shard.grad
    return pdc.from_local(grad, like=emb.weight.detach()).full_tensor()


@pytest.mark.parametrize("sparse", [True, False])
def test_gradients_are_added_in_the_order_of_ranks(sparse):
    want = worlds.run(_added, 1, sparse, range(BATCHES))[0]
    assert torch.equal(worlds.run(_added, BATCHES, sparse, None)[0], want)


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


@tiers.parametrize("size", [1, 2, 3], [2])
@worlds.on()
def test_full_graph_training_is_that_of_one_process(size):
    data, share = alike.share_of("undirected")
    one = _full_graph(data, lambda d: torch.nn.Embedding(N, DIM))
    net = _full_graph(share, lambda d: pdc.DistEmbedding(N, DIM, like=d))
    found = [net.emb(), net.conv1.lin.weight]
    alike.same(found, [one.emb.weight, one.conv1.lin.weight])


def _saved(path, optimizer, resumes):
    """Saves after two steps of four, or goes on from there with another cut."""
    mesh = worlds.mesh()
    cut = "block" if resumes else "random"
    share = pdc.partition(GRAPHS["undirected"](), mesh, cut)
    torch.manual_seed(2)
    emb = pdc.DistEmbedding(N, DIM, like=share, sparse=optimizer != "adam")
    model = pdc.replicate(torch.nn.Sequential(emb.double()), mesh)
    opt = OPTIMIZERS[optimizer](model.parameters())
    if resumes:
        pdc.load_checkpoint(path, mesh, model, opt)
    else:
        _steps(emb, opt, range(2), mesh.rank, mesh.size)
        pdc.save_checkpoint(path, mesh, model, opt)
    _steps(emb, opt, range(2, 4), mesh.rank, mesh.size)
    return emb.weight.detach().full_tensor()


@tiers.cover(("optimizer", "size"), [*OPTIMIZERS], [1, 4, 2], step=3)
def test_a_run_goes_on_from_a_checkpoint_on_other_ranks(tmp_path, optimizer, size):
    path = str(tmp_path / "ckpt")
    want = worlds.run(_saved, 2, path, optimizer, False)[0]
    got = worlds.run(_saved, size, path, optimizer, True)[0]
    torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-9)


@worlds.on(2)
def test_what_an_optimizer_keeps_of_all_rows_is_refused(tmp_path):
    path = str(tmp_path / "ckpt")
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


@worlds.on(2)
def test_a_whole_table_in_place_of_the_rows_is_refused():
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
    told = r"rank 0: .* replaced by a parameter \[2, 3\]"
    with pytest.raises(ValueError, match=told):
        five(torch.tensor([1]))
    thin = pdc.DistEmbedding(N, 0, like=worlds.mesh())
    assert thin(torch.arange(N)).shape == (N, 0)


@tiers.parametrize("size", [2, 3], [2])
@worlds.on()
def test_distinct_rows_of_other_ranks_travel_once_each_way(size):
    mesh = worlds.mesh()
    share = pdc.partition(GRAPHS["undirected"](), mesh, "random")
    emb = pdc.DistEmbedding(N, DIM, like=share)
    owner = share.edge_index.nodes.partition.owner_of(torch.arange(N))
    ids = [torch.arange(rank, N, 2).repeat(2) for rank in range(mesh.size)]
    owners = [owner[i.unique()] for i in ids]
    asked = (owners[mesh.rank] != mesh.rank).sum()
    served = sum((o == mesh.rank).sum() for r, o in enumerate(owners) if r != mesh.rank)
    mesh.ledger.reset()
    emb(ids[mesh.rank]).sum().backward()
    moved = [mesh.ledger.words(op) for op in ("halo", "halo_reduce")]
    assert moved == [int(asked) * DIM, int(served) * DIM]


@worlds.on(2)
def test_bad_ids_of_one_rank_are_refused_on_all():
    mesh, good = worlds.mesh(), torch.tensor([1])
    emb = pdc.DistEmbedding(N, DIM, like=mesh)
    wrong = [torch.tensor(ids) for ids in ([0, N], [-1], [0.5])]
    for bad in (*wrong, good.to_sparse(), good.to("meta"), [1, 2]):
        with pytest.raises(IndexError, match=r"rank 1: give ids .*in \[0, 50\)"):
            emb(bad if mesh.rank else good)
        assert emb(torch.tensor([[mesh.rank, 3], [3, 4]])).shape == (2, 2, DIM)


@worlds.on(2)
def test_what_it_is_made_from_is_checked():
    mesh = worlds.mesh()
    share = pdc.partition(GRAPHS["undirected"](), mesh, "block")
    for n, dim, like, said in (
        (7, DIM, share, "an embedding of 7 nodes"),
        (N, 3 + mesh.rank, share, "the same embedding_dim: it is 3 on rank 0"),
        (N, -1, share, "whole numbers of at least 0, got -1"),
        (N + mesh.rank, DIM, share, "rank 1: an embedding of 51 nodes"),
        (N, DIM, 3 if mesh.rank else share, "rank 1: like says which rank"),
        (N, DIM, 3, "a Mesh; got a int"),
    ):
        with pytest.raises((TypeError, ValueError), match=said):
            pdc.DistEmbedding(n, dim, like=like)
    with pytest.raises(TypeError, match="takes the model"):
        pdc.clip_grad_norm_([], 1.0)
    with pytest.raises(ValueError, match="a number above 0, got 0"):
        pdc.clip_grad_norm_(torch.nn.Linear(1, 1), 1.0, 0)
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
    total = collectives.all_reduce(learnt.shard.grad.sum(), mesh.world)
    assert float(total) == pytest.approx(3 * 7)  # 3 ids on each rank, averaged


@pytest.mark.parametrize("ids", [torch.tensor([1, 2]), None])
@pytest.mark.place("cpu")
@worlds.on(2)
def test_ddp_that_would_send_the_rows_is_refused(ids):
    mesh = worlds.mesh()
    emb = pdc.DistEmbedding(4 * mesh.size, DIM, like=mesh)
    one, two = (torch.nn.Sequential(emb, torch.nn.Linear(DIM, 1)) for _ in "ab")
    assert pdc.replicate(one, mesh)(ids).shape[1] == 1
    model = torch.nn.parallel.DistributedDataParallel(two)
    with pytest.raises(RuntimeError, match="wrap the model by pdc"):
        model(ids)


def _clip(emb, norm_type, wrap, mesh=None):
    """Clips the gradients of one step; returns their norm, and the weights after it."""
    rank, size = (mesh.rank, mesh.size) if mesh else (0, 1)
    model = wrap(torch.nn.Sequential(emb, torch.nn.Linear(DIM, 1)).double())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in range(rank, BATCHES, size):
        (model(_ids(batch, 0)).square().sum() * size / BATCHES).backward()
    clip = pdc.clip_grad_norm_ if mesh else torch.nn.utils.clip_grad_norm_
    norm = clip(model if mesh else model.parameters(), 0.1, norm_type)
    opt.step()
    rest = [p.detach() for p in model.parameters()][1:]
    return norm, alike.whole(emb.weight.detach()), *rest


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("norm_type", "sparse"), [(2.0, True), (2.0, False), (float("inf"), True)]
)
@worlds.on()
def test_gradients_are_clipped_as_on_one_process(size, norm_type, sparse):
    mesh = worlds.mesh()
    torch.manual_seed(1)
    want = _clip(torch.nn.Embedding(N, DIM), norm_type, lambda net: net)
    torch.manual_seed(1)
    emb = pdc.DistEmbedding(N, DIM, like=mesh, sparse=sparse)
    found = _clip(emb, norm_type, lambda net: pdc.replicate(net, mesh), mesh)
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)


@tiers.parametrize("size", [1, 2], [2])
@worlds.on()
def test_a_route_of_changed_ids_is_not_taken(size):
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
    for data, given, said in (
        (share, other, "with 51 rows, and a graph with 50 nodes"),
        (share, share.x.to_local(), "must be a DistEmbedding"),
        (GRAPHS["undirected"](), emb, "embedding is for a graph spread"),
    ):
        with pytest.raises((TypeError, ValueError), match=said):
            DistNeighborLoader(data, [2], options=LoaderOptions(embedding=given))
    share.x.requires_grad_()
    with pytest.raises(TypeError, match=r"DistEmbedding.from_pretrained\(data.x"):
        DistNeighborLoader(share, [2])

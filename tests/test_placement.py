"""What is given on a device comes back on it: every layer, and the algebra, the pipeline, ...

The device is `second_device`'s, with real numbers; compiling it takes a minute.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import second_device
import tiers
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
import worlds
from batches import arguments
from layers import EDGE_ATTRS, EXACT, NODE_ATTRS, OUT, W, X, make, problem
from layers import F as WIDTH
from pipelines import loss_of, stack_of
from problems import GRAPHS, owners
from torch_geometric import transforms as T
from torch_geometric.data import Data, HeteroData
from torch_geometric.utils import scatter

import pyg_distcomm as pdc
import pyg_distcomm.loader as loading
from pyg_distcomm.comm import collectives
from pyg_distcomm.loader import DistFeatureStore, NeighborLoader
from pyg_distcomm.ops import CSR, Pattern
from pyg_distcomm.ops.csr import spgemm
from pyg_distcomm.partition.folder import write_folder

LAYERS = {
    "GCNConv": (lambda: pyg.GCNConv(WIDTH, OUT), W),
    "SAGEConv": (lambda: pyg.SAGEConv(WIDTH, OUT), X),
    "SAGEConv max": (lambda: pyg.SAGEConv(WIDTH, OUT, aggr="max"), X),
    **{name: case for name, case in EXACT.items() if name != "GatedGraphConv"},
}  # whose fused cell the second device lacks
builds = pytest.mark.skipif(not second_device.can_build(), reason="no C++ compiler")
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def whole(value):
    return value.full_tensor() if isinstance(value, pdc.DistTensor) else value


def step(conv, data, names):
    given = [
        torch.stack([data.x, data.x0], 1) if name == "stacked" else data[name]
        for name in names
    ]
    if names[0] == "x":
        given[0] = given[0].clone().requires_grad_()
    out = conv(*given)
    out.square().sum().backward()
    grads = {name: p.grad for name, p in conv.named_parameters()}
    return {"out": out, "grad of x": given[0].grad, **grads}


def layers(names, grid):
    device, failed = second_device.device(), []
    torch.set_default_dtype(torch.float64)
    try:
        for name in names:
            build, attributes = LAYERS[name]
            mesh, data = worlds.mesh(grid=grid), problem("directed")
            want = step(make(build), data, attributes)
            data, conv = problem("directed"), pdc.convert(make(build)).to(device)
            cut = owners("random", data, mesh.size)
            kinds = {"edge_attrs": EDGE_ATTRS, "node_attrs": NODE_ATTRS}
            share = pdc.partition(data, mesh, cut, **kinds).to(device)
            try:
                for key, value in step(conv, share, attributes).items():
                    if value is None:
                        continue
                    assert value.device == device, f"{key} on {value.device}"
                    found, wanted = whole(value).cpu(), want[key].detach()
                    torch.testing.assert_close(
                        found.detach(),
                        wanted,
                        **CLOSE,
                        msg=lambda m, k=key: f"{k}: {m}",
                    )
            except (AssertionError, RuntimeError, TypeError, ValueError) as error:
                failed.append(f"{name}: {type(error).__name__}: {str(error)[:400]}")
                if mesh.size > 1:
                    break
    finally:
        torch.set_default_dtype(torch.float32)
    return failed


SOME = ("GCNConv", "SAGEConv", "GATv2Conv edges", "GINConv", "PNAConv", "GCN2Conv")


@builds
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("size", "grid", "names"),
    [
        (1, None, tuple(LAYERS)),
        (2, None, SOME),
        (3, None, tuple(LAYERS)),
        (4, (1, 2, 2), SOME),
    ],
)
def test_layers(size, grid, names):
    assert worlds.anew(layers, size, names, grid) == [[]] * size


def set_masked(x, mask):
    y = x.clone()
    y[mask] = 0
    y[mask] = y[mask] + 1
    return y


def set_ids(x, ids):
    y = x.clone()
    y[ids] = 1
    return y


OPERATIONS = {
    "sum": lambda x, m, i: x.sum(),
    "sum0": lambda x, m, i: x.sum(0),
    "mean0": lambda x, m, i: x.mean(0),
    "var0": lambda x, m, i: x.var(0),
    "std": lambda x, m, i: x.std(0),
    "max": lambda x, m, i: x.max(),
    "max0": lambda x, m, i: x.max(0).values,
    "argmax0": lambda x, m, i: x.argmax(0),
    "argmax": lambda x, m, i: x.argmax(),
    "amax": lambda x, m, i: x.amax(0),
    "norm": lambda x, m, i: x.norm(),
    "softmax0": lambda x, m, i: x.softmax(0),
    "logsumexp": lambda x, m, i: x.logsumexp(0),
    "any": lambda x, m, i: (x > 0).any(),
    "all": lambda x, m, i: (x > 0).all(0),
    "mask": lambda x, m, i: x[m],
    "ids": lambda x, m, i: x[i],
    "cpuids": lambda x, m, i: x[i.cpu()],
    "slice": lambda x, m, i: x[2:9],
    "row": lambda x, m, i: x[3],
    "col": lambda x, m, i: x[:, 1],
    "last": lambda x, m, i: x[-1],
    "full": lambda x, m, i: x.full_tensor(),
    "sort": lambda x, m, i: x.sort(0).values,
    "topk": lambda x, m, i: x[:, 0].topk(3).values,
    "cumsum": lambda x, m, i: x.cumsum(0),
    "unique": lambda x, m, i: (x > 0).long().unique(),
    "cat1": lambda x, m, i: torch.cat([x, x], 1),
    "cat0": lambda x, m, i: torch.cat([x, x], 0),
    "stack": lambda x, m, i: torch.stack([x, x], 1),
    "t": lambda x, m, i: x.t() @ x,
    "xtx": lambda x, m, i: x @ torch.ones(7, 2, device=x.device, dtype=x.dtype),
    "randn_like": lambda x, m, i: torch.randn_like(x),
    "rand_like": lambda x, m, i: torch.rand_like(x),
    "zeros_like": lambda x, m, i: torch.zeros_like(x),
    "new_zeros": lambda x, m, i: x.new_zeros(x.size(0), 2),
    "dropout": lambda x, m, i: F.dropout(x, 0.5),
    "bn": lambda x, m, i: F.batch_norm(x, None, None, training=True),
    "ln": lambda x, m, i: F.layer_norm(x, (7,)),
    "plain": lambda x, m, i: x + torch.ones(len(x), 1, device=x.device, dtype=x.dtype),
    "where": lambda x, m, i: torch.where(m.unsqueeze(1), x, 0),
    "nonzero": lambda x, m, i: m.nonzero(),
    "countnz": lambda x, m, i: m.sum(),
    "setmask": lambda x, m, i: set_masked(x, m),
    "setids": lambda x, m, i: set_ids(x, i),
    "index_add": lambda x, m, i: torch.zeros(
        3, 7, device=x.device, dtype=x.dtype
    ).index_add(0, (x[:, 0] > 0).long(), x),
    "scatter": lambda x, m, i: scatter(x, (x[:, 0] > 0).long(), 0, 2),
    "gap": lambda x, m, i: pyg.global_mean_pool(x, None),
    "gmp": lambda x, m, i: pyg.global_add_pool(x, (x[:, 0] > 0).long()),
    "gns": lambda x, m, i: pyg.GraphNorm(7).double().to(x.device)(x),
    "inorm": lambda x, m, i: pyg.PairNorm()(x),
    "dn": lambda x, m, i: F.normalize(x, dim=0),
    "clamp": lambda x, m, i: x.clamp(0, 1),
    "isnan": lambda x, m, i: x.isnan().any(),
    "quant": lambda x, m, i: x[:, 0].median(),
    "flip": lambda x, m, i: x.flip(0),
    "roll": lambda x, m, i: x.roll(1, 0),
    "outer": lambda x, m, i: (x[i] * x[i.flip(0)]).sum(-1),
    "rep": lambda x, m, i: x.repeat(1, 2),
    "from_local": lambda x, m, i: pdc.from_local(x.to_local() * 2, like=x),
    "emb": lambda x, m, i: F.embedding(
        (x[:, 0] > 0).long(), torch.ones(2, 3, device=x.device)
    ),
    "to_dense": lambda x, m, i: x.masked_fill(x > 0, 0.0),
    "loss": lambda x, m, i: F.mse_loss(x, x * 2),
    "bce": lambda x, m, i: F.binary_cross_entropy_with_logits(x, (x > 0).double()),
    "deepcopy": lambda x, m, i: copy.deepcopy(x),
    "clone": lambda x, m, i: x.detach().clone(),
    "index_select": lambda x, m, i: x.index_select(0, i),
    "gather": lambda x, m, i: x.gather(1, (x > 0).long()),
    "bincount": lambda x, m, i: (x[:, 0] > 0).long().bincount(),
    "hist": lambda x, m, i: (x[:, 0] > 0).long().unique(return_counts=True)[1],
}


def algebra():
    device, mesh = second_device.device(), worlds.mesh()
    for name, operation in OPERATIONS.items():
        found = []
        for where in (torch.device("cpu"), device):
            torch.manual_seed(0)
            mesh.step, data = 0, GRAPHS["undirected"]()
            cut = owners("random", data, mesh.size)
            share = pdc.partition(data, mesh, cut).to(where)
            ids = torch.tensor([1, 5, 2], device=where)
            out = operation(share.x, share.train_mask, ids)
            assert out.device == where, f"{name}: {out.device}"
            found.append(whole(out).detach().cpu())
        torch.testing.assert_close(found[1], found[0], **CLOSE, msg=name)


@builds
@tiers.parametrize("size", [1, 2, 3], [])
def test_algebra(size):
    worlds.anew(algebra, size)


def link_run(link, where):
    mesh, data = worlds.mesh(), GRAPHS["undirected"]()
    cut = owners("random", data, mesh.size)
    share = pdc.partition(data.to(where), mesh, cut, link=link)
    torch.manual_seed(0)
    model = pdc.convert(pyg.GCN(7, 6, 2, 4).double()).to(where)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        out = model(share.x, share.edge_index)
        loss = F.cross_entropy(out[share.train_mask], share.y[share.train_mask])
        loss.backward()
        optimizer.step()
        link.step()
        losses.append(loss.item())
    assert out.device == where
    return losses


LINKS = {
    "VARCO": lambda: pdc.VARCO(3),
    "Sylvie": lambda: pdc.Sylvie(bits=1),
    "PipeGCN": pdc.PipeGCN,
    "BNS": lambda: pdc.BNS(0.5),
    "SANCUS": lambda: pdc.SANCUS(0.5),
}


def links():
    device = second_device.device()
    for name, link in LINKS.items():
        want = link_run(link(), torch.device("cpu"))
        found = link_run(link(), device)
        torch.testing.assert_close(found, want, rtol=1e-12, atol=0, msg=name)


def pipelines():
    device, losses, grads = second_device.device(), [], []
    for where in (torch.device("cpu"), device):
        mesh, data = worlds.mesh(), GRAPHS["undirected"]()
        share = pdc.partition(data, mesh).to(where)
        stack = stack_of("gcn")
        pipe = pdc.Pipeline(
            [layer.to(where) for layer in stack], mesh, chunks=3, seed=1
        )
        losses += [pipe.train_step(share, loss_of).cpu() for _ in range(2)]
        assert all(p.grad.device == where for p in pipe.parameters())
        assert pipe(share).device == where
        grads.append([p.grad.cpu() for p in pipe.parameters()])
    torch.testing.assert_close(losses[2:], losses[:2], **CLOSE)
    torch.testing.assert_close(*grads, **CLOSE)


def node_types():
    found, device = [], second_device.device()
    for where in (torch.device("cpu"), device):
        g = torch.Generator().manual_seed(0)
        data = HeteroData()
        data["a"].x, data["b"].x = (torch.randn(n, 4, generator=g) for n in (20, 10))
        ends = [torch.randint(n, (40,), generator=g) for n in (20, 10)]
        data["a", "to", "b"].edge_index = torch.stack(ends)
        data["b", "of", "a"].edge_index = torch.stack(ends[::-1])
        torch.manual_seed(0)
        conv = pdc.convert(pyg.HGTConv(4, 4, data.metadata(), heads=2)).to(where)
        share = pdc.partition(data.to(where), worlds.mesh())
        out = conv(share.x_dict, share.edge_index_dict)["a"]
        assert out.device == where
        found.append(out.full_tensor().detach().cpu())
    torch.testing.assert_close(*found)


def minibatches():
    data, device = GRAPHS["undirected"](), second_device.device()
    model = pdc.convert(pyg.GraphSAGE(7, 6, 2, 4).double())
    plain = copy.deepcopy(model)
    model = model.to(device)
    for batch in NeighborLoader(data, [3, 2], batch_size=9):
        want = plain(batch.x, batch.edge_index)
        batch = batch.to(device)
        out = model(batch.x, batch.edge_index)
        assert out.device == device
        seeds = slice(batch.batch_size)  # the rows that are read
        torch.testing.assert_close(out[seeds].cpu(), want[seeds], **CLOSE)


def devices(values):
    """Where the tensors of a Data, a dictionary or a list lie."""
    values = values.values() if hasattr(values, "values") else values
    return {v.device for v in values if isinstance(v, torch.Tensor)}


def shares():
    """Cuts, updates and transforms a graph on the device."""
    device, mesh = second_device.device(), worlds.mesh()
    data = GRAPHS["undirected"]().to(device)
    cut = owners("random", data.cpu(), mesh.size)
    share = pdc.partition(data.to(device), mesh, cut)
    steps = [T.AddSelfLoops(), T.NormalizeFeatures(), T.LocalDegreeProfile()]
    found = [share]
    found += [T.Compose(steps)(copy.copy(share)), *T.RandomLinkSplit()(share)]
    pdc.partition_report(share)
    whole = GRAPHS["undirected"]().coalesce()
    shape, weight = (whole.num_nodes,) * 2, torch.ones(whole.num_edges).double()
    adj = torch.sparse_coo_tensor(whole.edge_index, weight, shape).coalesce()
    weighted = Data(x=whole.x, adj_t=adj, num_nodes=whole.num_nodes)
    weighted = pdc.partition(weighted, mesh, cut).to(device)
    conv = pdc.convert(pyg.GCNConv(7, 4, add_self_loops=False).double().to(device))
    capped = pdc.partition(GRAPHS["undirected"](), mesh, cut, memory=2000).to(device)
    chunked = pdc.convert(pyg.GATConv(7, 4).double().to(device))
    outs = conv(weighted.x, weighted.adj_t), chunked(capped.x, capped.edge_index)
    assert devices(outs) == {device}
    for each in found:
        assert devices(each.to_dict()) == {device}, each


def folders(folder):
    """Reads a folder, and trains on the device."""
    device, mesh, data = second_device.device(), worlds.mesh(), GRAPHS["undirected"]()
    cut = pdc.Partition.from_owner(owners("empty_rank", data, mesh.size), mesh.size)
    if mesh.rank == 0:
        write_folder(f"{folder}/{mesh.size}", data, cut)
    collectives.barrier(mesh.world)
    share = pdc.load_partition(f"{folder}/{mesh.size}", mesh).to(device)
    assert devices(share.to_dict()) == {device}
    model = pdc.convert(pyg.GAT(7, 4, 2, 3).double()).to(device)
    out = model(share.x, share.edge_index)
    out.sum().backward()
    assert devices([out, *(p.grad for p in model.parameters())]) == {device}


def stores():
    """Fetches rows by ids on the device, which come there; learns rows there."""
    device, mesh, data = second_device.device(), worlds.mesh(), GRAPHS["undirected"]()
    share = pdc.partition(data, mesh, owners("random", data, mesh.size)).to(device)
    store = DistFeatureStore.from_data(share, mesh, cache=5)
    ids = torch.tensor([4, 1, 9], device=device)
    mask = torch.zeros(data.num_nodes, dtype=torch.bool, device=device)
    mask[ids] = True
    for index in (ids, mask):
        rows = store.get_tensor(group_name=None, attr_name="x", index=index)
        assert rows.device == device
        torch.testing.assert_close(rows.cpu(), data.x[index.cpu()])
    assert store.get_tensor(group_name=None, attr_name="x", index=ids.cpu()).is_cpu
    whole = DistFeatureStore.from_replicated(data.x.to(device), mesh)
    torch.testing.assert_close(whole[ids].cpu(), data.x[ids.cpu()])
    table = pdc.DistEmbedding(data.num_nodes, 4, like=share).to(device)
    every, some = table(), table(ids)
    (every.sum() + some.sum()).backward()
    norm = pdc.clip_grad_norm_(table, 1.0)
    assert devices([every, some, table.shard.grad, norm, table.weight]) == {device}
    loader = NeighborLoader(share, [2, 2], batch_size=4, input_nodes=share.train_mask)
    for batch in loader:
        assert devices(batch.to(device).to_dict()) == {device}


def blocks():
    """Multiplies sparse blocks by rows, and by each other."""
    device, found = second_device.device(), []
    row, col = torch.tensor([0, 1, 1, 2, 2]), torch.tensor([1, 0, 2, 1, 1])
    for where in (torch.device("cpu"), device):
        pattern, perm = Pattern.build(row.to(where), col.to(where), (3, 3))
        a = CSR(pattern, torch.arange(5.0, device=where))
        x, square = torch.ones(3, 2, device=where), spgemm(a, a)
        out = [perm, a.matmul(x), a.value_gradient(x, x), a.transposed.value]
        out += [square.value, square.pattern.col, square.pattern.rowptr]
        assert devices(out) == {where}
        found.append([t.cpu() for t in out])
    torch.testing.assert_close(*found)


def spread(model, mesh):
    """Returns a model whose gradients are averaged; torch's own way needs a back end."""
    return pdc.replicate(model, mesh) if mesh.size == 1 else pdc.convert(model)


def loaders():
    """Trains on minibatches of other loaders, of a share that lies on the device."""
    device, mesh, data = second_device.device(), worlds.mesh(), GRAPHS["undirected"]()
    share = pdc.partition(data, mesh, owners("random", data, mesh.size)).to(device)
    of_links = {"edge_label_index": data.edge_index[:, :9], "neg_sampling_ratio": 1.0}
    clusters = loading.ClusterData(data, 4, log=False)
    made = [
        loading.LinkNeighborLoader(
            share, [2, 2], **arguments(batch_size=8, **of_links)
        ),
        loading.DistLayerLoader(share, [8, 8], batch_size=8),
        loading.DistLayerLoader(data, [8, 8], batch_size=8),
        loading.ClusterLoader(clusters, batch_size=2),
        loading.RandomNodeLoader(data, 3),
        loading.ShaDowKHopSampler(data, 2, 3, batch_size=8),
        loading.GraphSAINTNodeSampler(data, 16, 2),
    ]
    drawn = loading.ImbalancedSampler(share)
    made.append(NeighborLoader(share, [2, 2], batch_size=8, sampler=drawn))
    model = spread(pyg.GraphSAGE(7, 6, 2, 4).double().to(device), mesh)
    for loader in made:
        for batch in loader:
            batch = batch.to(device)
            assert devices(batch.to_dict()) == {device}, type(loader)
            out = model(batch.x, batch.edge_index)
            assert out.device == device
    graphs = [GRAPHS["undirected"]() for _ in range(4)]
    for batch in loading.DataLoader(graphs, batch_size=4):
        assert devices(batch.to(device).to_dict()) == {device}


def checkpoints(folder):
    """Saves and restores a run of the device; records of it come to the host alone."""
    device, mesh, data = second_device.device(), worlds.mesh(), GRAPHS["undirected"]()
    share = pdc.partition(data, mesh, owners("random", data, mesh.size)).to(device)
    models = [spread(pyg.GCN(7, 6, 2, 4).double().to(device), mesh) for _ in "ab"]
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in models]
    models[0](share.x, share.edge_index).sum().backward()
    optimizers[0].step()
    pdc.save_checkpoint(f"{folder}/{mesh.size}", mesh, models[0], optimizers[0])
    pdc.load_checkpoint(f"{folder}/{mesh.size}", mesh, models[1], optimizers[1])
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        assert q.device == device
        assert torch.equal(p.detach().cpu(), q.detach().cpu())
        moments = [
            o.state[w]["exp_avg"] for o, w in zip(optimizers, (p, q), strict=True)
        ]
        assert devices(moments) == {device}
        assert torch.equal(*(m.cpu() for m in moments))


@builds
@tiers.parametrize("size", [1, 2], [])
def test_checkpoints(size, tmp_path):
    worlds.anew(checkpoints, size, str(tmp_path))


# what has no tensors of rows, or is the host's: runs, figures, plans, traces
PLAIN = """
Auto CSVWriter Ledger LinkPolicy Machine Mesh PartitionReport Plan Plans
RandomGraph RankError Rows TensorBoardWriter init launch metrics on_preempt plan trace
DistEdgeIndex
""".split()


def test_every_public_name_is_placed_or_plain():
    text = Path(__file__).read_text().split("PLAIN = ")
    tested = set(re.findall(r"\bpdc\.(\w+)", text[0]))
    assert sorted(set(pdc.__all__) - tested - set(PLAIN)) == []
    assert sorted(tested & set(PLAIN)) == []


@builds
@tiers.parametrize("size", [1, 2], [])
def test_folders(size, tmp_path):
    worlds.anew(folders, size, str(tmp_path))


PARTS = [loaders, links, node_types, pipelines, minibatches, shares, stores, blocks]


@builds
@tiers.parametrize("size", [1, 2], [])
@pytest.mark.parametrize("part", PARTS)
def test_parts(part, size):
    worlds.anew(part, size)

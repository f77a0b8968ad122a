"""Mistakes of a first hour: each is told, with what to do."""

import itertools
import warnings

import alike
import numpy as np
import pytest
import tiers
import torch
import torch.nn.functional as F
import worlds
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch_geometric import loader as pyg_loader
from torch_geometric import nn as pyg
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GATConv

import pyg_distcomm as pdc
from pyg_distcomm import nn
from pyg_distcomm.comm.mesh import alone
from pyg_distcomm.datasets import generated
from pyg_distcomm.halo.codecs import Plain
from pyg_distcomm.process import PROCESS


def lone():
    return alone((1, 1, 1), 0, torch.device("cpu"))


# No mesh, or something else in its place -------------------------------------------------


@pytest.fixture
def _no_mesh(monkeypatch):
    monkeypatch.setattr(PROCESS, "mesh", None)


CALLS = {
    "partition": lambda mesh: pdc.partition(generated(20), mesh),
    "load_partition": lambda mesh: pdc.load_partition("parts", mesh),
    "replicate": lambda mesh: pdc.replicate(torch.nn.Linear(2, 2), mesh),
    "save_checkpoint": lambda mesh: pdc.save_checkpoint(
        "x", mesh, torch.nn.Linear(2, 2)
    ),
    "load_checkpoint": lambda mesh: pdc.load_checkpoint(
        "x", mesh, torch.nn.Linear(2, 2)
    ),
    "metrics": lambda mesh: pdc.metrics(None, mesh),
}


@pytest.mark.usefixtures("_no_mesh")
@pytest.mark.parametrize("name", CALLS)
def test_a_missing_init_is_told(name):
    with pytest.raises(ValueError, match=f"pdc.{name} needs a mesh.*mesh = pdc.init"):
        CALLS[name](None)
    told = rf"pdc.{name} takes the mesh that pdc.init\(\)"
    with pytest.raises(TypeError, match=told):
        CALLS[name]("metis")


def test_the_last_mesh_is_taken(monkeypatch):
    mesh = lone()
    monkeypatch.setattr(PROCESS, "mesh", lambda: mesh)
    assert pdc.partition(generated(20), method="block").x.rows.mesh is mesh


# What is no model, and what is no tensor ------------------------------------------------


@pytest.mark.parametrize("call", [pdc.replicate, lambda data, _: pdc.convert(data)])
def test_a_graph_for_a_model_is_told(call):
    data = pdc.partition(generated(20), lone(), "block")
    told = r"torch.nn.Module, got Data; to partition a graph, call pdc"
    with pytest.raises(TypeError, match=told):
        call(data, lone())


HELD = {  # in the place of tensors with rows, in a Data or at the nodes a of a HeteroData
    "x": ([[1.0]] * 6, "x is a list, wanted a tensor with a row for each"),
    "y": ((0, 1) * 3, "y is a tuple, wanted a tensor with a row for each"),
    "train_mask": ([True] * 6, "train_mask is a list, wanted a tensor"),
    "names": (np.array(["a"] * 6), "names is an array of <U1, wanted numbers"),
    "val_mask": (torch.ones(5).bool(), "'val_mask' does not fit the 6"),
    "pos": (np.ones((6, 2), ">f4")[::-1], None),  # of another machine, from the end
    "test_mask": (np.broadcast_to(True, 6), None),
}


@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize("typed", [False, True])
@worlds.on(2)
def test_lists_for_rows_are_told_and_arrays_are_tensors(name, typed):
    (value, words), mesh = HELD[name], worlds.mesh()
    data = HeteroData({"a": {"num_nodes": 6}}) if typed else Data(num_nodes=6)
    (data["a", "of", "a"] if typed else data).edge_index = np.array([[0, 1], [1, 2]])
    (data["a"] if typed else data)[name] = value
    if words is None:
        share = pdc.partition(data, mesh, "random")
        got = (share["a"] if typed else share)[name]
        assert np.array_equal(got.full_tensor(), value)
    if words is None and typed:
        data["b", "to", "a"].edge_index, words = torch.zeros(2, 1).long(), "type 'b'"
    if words is not None:
        with pytest.raises((TypeError, ValueError), match=words):
            pdc.partition(data, mesh, "random")


LAYERS = {
    "GCNConv": lambda: nn.GCNConv(32, 2),
    "SAGEConv": lambda: nn.SAGEConv(32, 2),
    "GATConv": lambda: nn.HaloConv(GATConv(32, 2)),
    "converted": lambda: pdc.convert(GATConv(32, 2)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_what_is_given_in_the_place_of_features_is_told(name):
    data, layer = generated(20), LAYERS[name]()
    share = pdc.partition(data, lone(), "block")
    for given, words in (
        ((data,), "takes tensors, got a Data: call it with data.x"),
        ((data, data.edge_index), "takes tensors, got a Data: call it with data.x"),
        ((share.edge_index, share.x), r"takes \(x, edge_index, .* give it x first"),
    ):
        with pytest.raises(TypeError, match=words):
            layer(*given)


PYG = {
    "DataLoader": lambda data: pyg_loader.DataLoader([data, data], batch_size=2),
    "RandomNodeLoader": lambda data: pyg_loader.RandomNodeLoader(data, num_parts=4),
}


@pytest.mark.parametrize("name", PYG)
@pytest.mark.parametrize("size", [1, 2])
@worlds.on()
def test_a_loader_of_pyg_on_a_share_gives_its_minibatches(name, size):
    """PyG's loaders give every rank the same minibatches, of sharded rows."""
    whole = generated(40)
    share = pdc.partition(whole, worlds.mesh(), "random")
    for mine, theirs in zip(PYG[name](share), PYG[name](whole), strict=True):
        for key, value in theirs.items():
            alike.same(mine[key], value, key, rtol=0, atol=0)


# Ranks that were meant ------------------------------------------------------------------

NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_NTASKS")
NAMES += ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


@pytest.fixture
def said(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)

    def say(**names):
        for name, value in names.items():
            monkeypatch.setenv(name, value)

    return say


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (
            {"WORLD_SIZE": "4"},
            "WORLD_SIZE=4: several ranks are meant, but RANK, MASTER",
        ),
        ({"RANK": "1"}, "RANK=1: several ranks are meant, but WORLD_SIZE, MASTER_ADDR"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR, MASTER_PORT are not set"),
        ({"SLURM_STEP_NUM_TASKS": "8"}, "SLURM_STEP_NUM_TASKS=8: several ranks are"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE=2: several ranks are"),
        ({"PMI_SIZE": "2"}, "PMI_SIZE=2: several ranks are"),
    ],
)
def test_a_forgotten_torchrun_is_told(said, names, words):
    said(**names)
    with pytest.raises(ValueError, match=words) as caught:
        pdc.init()
    assert "torchrun --nproc-per-node N script.py" in str(caught.value)


def test_one_process_of_an_allocation_is_warned(said):
    said(SLURM_NTASKS="4")
    told = "SLURM_NTASKS=4, but this process trains alone"
    with pytest.warns(UserWarning, match=told):
        pdc.init()


def test_a_grid_on_one_process_names_torchrun(said):
    said()
    told = r"does not fit 1 ranks.*Start the script by torchrun"
    with pytest.raises(ValueError, match=told):
        pdc.init("2d")


# On several ranks -----------------------------------------------------------------------


def told(act, *given):
    """Texts of the warnings of an act, which is told anew."""
    PROCESS.warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act(*given)
    return [str(one.message) for one in caught]


@worlds.on(2)
def test_a_second_init_is_told():
    first = pdc.init(timeout=180)
    (same,) = told(lambda: pdc.init(timeout=180))
    other = told(lambda: pdc.init("feature", timeout=180))
    first.close()
    assert "pdc.init was called again" in same
    assert "mesh.close() before the second" in same
    assert other == []  # grids are compared so


def _trained(layer, *graphs):
    for each in graphs:
        layer(each.x, each.edge_index).sum().backward()


@torch.no_grad()
def _evaluated(layer, *graphs):
    layer.eval()
    for each in graphs:
        layer(each.x, each.edge_index)


@worlds.on(2)
def test_a_whole_graph_on_each_rank_is_told():
    mesh, data = worlds.mesh(), generated(60)
    share = pdc.partition(data, mesh, "block")
    loaders, PROCESS.loaders = PROCESS.loaders, []
    for name, make in LAYERS.items():
        torch.manual_seed(0)
        layer = make()
        (whole,) = told(_trained, layer, data, data)
        assert "each of 2 ranks gives" in whole, name
        assert "pdc.partition(data, mesh)" in whole
        batches = [generated(30, seed) for seed in range(3)]
        assert told(_trained, layer, share, share) == [], name
        assert told(_trained, layer, *batches) == [], name
        assert told(_evaluated, layer, data, data) == [], name
    PROCESS.loaders = loaders


def _epochs(data, link, layers=2, given=True):
    """Warnings of four epochs of layers on a share, to which a link is given or is not."""
    own = link if given else None
    share = pdc.partition(data, worlds.mesh(), "block", link=own)
    torch.manual_seed(0)
    widths = [data.num_features, *[4] * layers]
    convs = [nn.GCNConv(a, b) for a, b in itertools.pairwise(widths)]

    def run():
        for _ in range(4):
            x = share.x
            for conv in convs:
                x = F.relu(conv(x, share.edge_index))
            x.sum().backward()
            link.step()

    return told(run)


@worlds.on(2)
def test_a_link_that_is_not_used_is_told():
    data = generated(80)
    (nobody,) = _epochs(data, pdc.VARCO(4), given=False)
    assert "configured but not used: no layer has trained with it" in nobody
    assert "pdc.partition(data, mesh, link=link)" in nobody
    (exact,) = _epochs(data, pdc.VARCO(4))
    assert "all exchanges are exact" in exact
    assert "exact_last=False" in exact
    assert _epochs(data, pdc.VARCO(4, exact_last=False)) == []  # all are coded
    assert _epochs(data, pdc.Sylvie(), layers=3) == []
    assert _epochs(data, pdc.LinkPolicy(Plain())) == []  # exact, as asked


# Other ways of torch to run a model -----------------------------------------------------


@tiers.parametrize("size", [1, 2], [2])
@worlds.on()
def test_what_is_exported_of_a_share_computes_the_same(size):
    share = pdc.partition(generated(20), worlds.mesh(), "random")
    width = share.x.size(1)
    model, row = nn.GCNConv(width, 2), torch.nn.Linear(width, 2)
    for part, given in ((model, (share.x, share.edge_index)), (row, (share.x,))):
        found = torch.export.export(part, given).module()
        for x in (share.x, share.x * 2):
            got, want = found(x, *given[1:]), part(x, *given[1:])
            torch.testing.assert_close(got.full_tensor(), want.full_tensor())
    data = generated(20)
    torch.export.export(model, (data.x, data.edge_index))


@worlds.on(2)
def test_fsdp_on_a_share_is_refused():
    share = pdc.partition(generated(20), worlds.mesh(), "random")
    width = share.x.size(1)
    for shard in (fully_shard, FullyShardedDataParallel):
        where = {} if shard is fully_shard else {"device_id": torch.device("cpu")}
        model = shard(nn.GCNConv(width, 2), **where)
        with pytest.raises(TypeError, match="leave out FSDP"):
            model(share.x, share.edge_index)


@worlds.on(2)
def test_ranks_that_select_differently_all_raise():
    mesh = worlds.mesh(fresh=True)
    share = pdc.partition(generated(20), mesh, "random")
    x, edges, n, late = share.x, share.edge_index, share.num_nodes, mesh.rank
    mask, every = x[:, 0] > x[:, 0].mean(), torch.ones(n)
    for select in (
        lambda: x[mask.float() if late else mask],
        lambda: x[every if late else every.bool()],
        lambda: x[torch.arange(n) if late else every.bool()],
        lambda: x[:, 0].masked_select(mask.float() if late else mask),
        lambda: x.index_select(0, torch.arange(5 + late)),
        lambda: x[edges[0, : 10 + late]],
        lambda: torch.zeros(n).index_add(0, edges[1, : 8 + late], edges[0, :8] * 1.0),
        lambda: x.clone().__setitem__(mask.float() if late else mask, 0.0),
        lambda: pyg.GCNConv(x.size(1), 2)(x, edges[:, : 12 + late]),
    ):
        with pytest.raises(ValueError, match="run the same operations"):
            select()
    counts = []
    for _ in range(3):
        x[every.bool()], x[mask], x[edges[0, :9]]
        counts.append({k: v.calls for k, v in mesh.checks.entries.items()})
    assert counts[1] == counts[2]


@worlds.on(2)
def test_ranks_that_compute_differently_all_raise():
    mesh = worlds.mesh(fresh=True)
    share = pdc.partition(generated(20), mesh, "random")
    x, edges, late = share.x * 2, share.edge_index, mesh.rank
    layer = nn.GATConv(x.size(1), 2, negative_slope=0.1 + 0.1 * late)
    other = nn.SAGEConv(x.size(1), 2, aggr="max" if late else "mean")

    def selected():
        mask = torch.arange(share.num_edges) >= late
        return share.edge_subgraph(mask).edge_index[0].double()

    def gcn(**how):
        return nn.GCNConv(x.size(1), 2, **how)(x, edges)

    def rows(columns, dtype=x.dtype):
        mine = torch.ones(len(x.to_local()), columns, dtype=dtype)
        return pdc.from_local(mine, like=x).full_tensor()

    every, few = torch.arange(len(x)), torch.arange(5)
    alone = nn.GCNConv(x.size(1), 2).train(late == 0)

    for words, differs in (
        ("run the same operations", lambda: x.sum(0) if late else x.sum()),
        ("run the same operations", lambda: x.sum(0) if late else x.max(0)),
        ("run the same operations", lambda: x[few] if late else x.full_tensor()),
        ("run the same operations", lambda: x.sum() if late else len(x[x[:, 0] > 0])),
        ("run the same operations", lambda: rows(3 + late)),
        ("run the same operations", lambda: rows(3, torch.int32 if late else x.dtype)),
        (
            "run the same operations",
            lambda: F.cross_entropy(x, x.argmax(-1), label_smoothing=0.1 * late),
        ),
        ("run the same operations", lambda: (x.double() if late else x)[edges[0]]),
        ("run the same operations", lambda: F.dropout(x, training=late > 0).sum()),
        ("seed the generator", lambda: x * torch.full((x.size(1),), float(late))),
        ("seed the generator", lambda: x.__setitem__(0, torch.tensor(float(late)))),
        ("seed the generator", lambda: x.__setitem__(every % 2 == late, 0.0)),
        ("seed the generator", lambda: x[every % 2 == late].sum()),
        ("same ids|same values|all ranks", lambda: selected().sum()),
        ("same negative_slope: it is 0.1 on rank 0", lambda: layer(x, edges)),
        ("same aggr: it is 'mean' on rank 0", lambda: other(x, edges)),
        ("same add_self_loops: it is False", lambda: gcn(add_self_loops=late > 0)),
        (
            "same normalize: it is False",
            lambda: gcn(normalize=late > 0, add_self_loops=False),
        ),
        (
            "same dropout: it is 0.5",
            lambda: nn.GATConv(x.size(1), 2, dropout=0.5 - 0.1 * late)(x, edges),
        ),
        ("same training: it is True on rank 0", lambda: alone(x, edges)),
    ):
        with pytest.raises(ValueError, match=words):  # noqa: PT012 - scripts go on
            differs()
            (x + 1).sum()
    alike.same(share.x, generated(20).x)  # the mesh is as good as before


def _dropout_ends_on_one_rank():
    mesh = worlds.mesh(fresh=True)
    x = pdc.partition(generated(20), mesh, "random").x
    weight = torch.nn.Parameter(torch.ones_like(x.full_tensor()[0]))
    for epoch in range(4):
        drops = mesh.rank == 0 or epoch < 2
        F.dropout(x * weight, training=drops).sum().backward()


def test_dropout_that_one_rank_leaves_out_is_found():
    with pytest.raises(worlds.WorldError, match="masks drawn by dropout: it is 4"):
        worlds.run(_dropout_ends_on_one_rank, 2)


@worlds.on(2)
def test_parts_of_weights_are_refused():
    mesh = worlds.mesh()
    share = pdc.partition(generated(20), mesh, "random")
    ranks = init_device_mesh("cpu", (mesh.size,))
    torch.manual_seed(0)
    row = parallelize_module(
        torch.nn.Linear(share.x.size(1), 4), ranks, ColwiseParallel()
    )
    with pytest.raises(ValueError, match="leave out tensor parallelism"):
        row(share.x)
    with pytest.raises(TypeError, match=r"tensor parallelism \(DTensor"):
        share.x @ row.weight.t()

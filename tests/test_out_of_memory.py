"""Memory that runs out on one rank: all ranks say what needed how much, and what fits."""

from __future__ import annotations

import re
import tempfile

import pytest
import tiers
import torch
import worlds
from problems import GRAPHS, owners
from torch_geometric.data import HeteroData
from torch_geometric.nn import GATConv

import pyg_distcomm as pdc
from pyg_distcomm import kernels
from pyg_distcomm.comm import collectives
from pyg_distcomm.graph import partition_data
from pyg_distcomm.halo import halo
from pyg_distcomm.loader import (
    DistLayerLoader,
    LoaderOptions,
    NeighborLoader,
    device_placement,
)
from pyg_distcomm.nn import DistGCNConv
from pyg_distcomm.ops.grid_plan import GridPlan
from pyg_distcomm.partition.folder import write_folder
from pyg_distcomm.sampling.layer_graph import LocalLayerGraph

TEXTS = {
    "cuda": (torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2.00 GiB"),
    "cpu": (RuntimeError, "DefaultCPUAllocator: can't allocate memory: you tried to"),
}


PLACES = {
    "product": (kernels, "spmm"),
    "backward": (kernels, "spmm"),
    "halo": (halo.kernels, "gather_rows"),
    "partition": (partition_data, "DividedGraph"),
    "typed": (partition_data, "DividedGraph"),
    "folder": (partition_data, "_read_share"),
    "to": (torch.Tensor, "to"),
    "matrix": (GridPlan, "valued"),
}


def steps(where, mesh):
    """Trains a layer; stops once before an allocation that may fail."""
    data = GRAPHS["undirected"]()
    cut = owners("random", data, mesh.size)
    if where in ("partition", "typed", "folder"):
        yield
    if where == "typed":
        typed = HeteroData()
        typed["v"].x = data.x
        typed["v", "to", "v"].edge_index = data.edge_index
        pdc.partition(typed, mesh, cut)
        collectives.barrier(mesh.world)  # a rank that has room goes on until it waits
    if where == "folder":
        with tempfile.TemporaryDirectory() as folder:
            each = torch.arange(data.num_nodes) % mesh.size
            parts = pdc.Partition.from_owner(each, mesh.size)
            write_folder(f"{folder}/parts", data, parts)
            pdc.load_partition(f"{folder}/parts", mesh)
    share = pdc.partition(data, mesh, cut)
    x = share.x.clone().requires_grad_()
    layer = GATConv(7, 4) if where == "halo" else DistGCNConv(7, 4)
    conv = pdc.convert(layer.double())
    if where == "backward":
        loss = conv(x, share.edge_index).sum()
        yield
        loss.backward()
        return
    yield
    if where == "to":
        share.x.to(torch.device("cpu"))
        collectives.barrier(mesh.world)
    conv(x, share.edge_index).sum().item()


def full(where, text, ranks):
    """Runs a step in which an allocation fails on some ranks; says what each raised."""
    mesh, (kind, said) = worlds.mesh(fresh=True), TEXTS[text]
    module, name = PLACES[where]
    before = getattr(module, name)

    def fails(*args, **kwargs):
        raise kind(said)

    try:
        for _ in steps(where, mesh):
            if mesh.rank in ranks:
                setattr(module, name, fails)
    except (RuntimeError, MemoryError, pdc.RankError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        setattr(module, name, before)
    return "it went on"


CASES = [
    ("product", "cuda", (1,)),
    ("halo", "cpu", (0,)),
    ("backward", "cuda", (0,)),
    ("partition", "cpu", (1,)),
    ("product", "cpu", (0, 1)),
    ("typed", "cpu", (0,)),
    ("folder", "cpu", (1,)),
    ("to", "cuda", (1,)),
    ("matrix", "cpu", (0,)),
]


@tiers.parametrize(("where", "text", "ranks"), CASES, slice(0, 1))
def test_all_ranks_say_what_did_not_fit(where, text, ranks):
    part = {"halo": "GATConv, with messages", "to": "a tensor of rows"}
    part |= dict.fromkeys(("partition", "typed", "folder"), "share of the graph")
    part |= {"matrix": "a matrix of"}
    part = part.get(where, "a product of the graph and rows")
    for said in worlds.run(full, 2, where, text, ranks):
        assert re.search(r"needs about [\d,]+ bytes", said), said
        assert part in said
        assert re.search(r"4 ranks, about [\d,]+ bytes on each", said), said
        assert "memory=" in said
        assert TEXTS[text][1] in said
        assert said.startswith(("OutOfMemoryError", "MemoryError", "RankError")), said


def test_other_errors_stay_as_they_are(monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("misaligned address")

    share = pdc.partition(GRAPHS["undirected"](), pdc.init(), "random")
    monkeypatch.setattr(kernels, "spmm", fails)
    with pytest.raises(RuntimeError, match=r"^misaligned address$"):
        DistGCNConv(7, 4).double()(share.x, share.edge_index)


@pytest.mark.parametrize("part", ["rows", "graph", "layers"])
def test_a_loader_names_what_does_not_fit_on_the_device(part, monkeypatch):
    """The host stands for a device, whose rows are copied there all the same."""
    monkeypatch.setattr(device_placement, "HOST", frozenset())
    data, device = GRAPHS["undirected"](), torch.device("cpu")
    how = {"batch_size": 4, "options": LoaderOptions(device=device)}
    placed, ids = device_placement.Placement(device), torch.tensor([1])

    def fails(*args, **kwargs):
        raise torch.OutOfMemoryError(TEXTS["cuda"][1])

    place, run, text = {
        "rows": (
            (device_placement.Placement, "put"),
            lambda: placed.take((None, "x"), data.x, ids),
            "rows_on='host'",
        ),
        "graph": (
            (kernels, "neighbor_sampler"),
            lambda: list(NeighborLoader(data, [2], **how)),
            "graph_on='pinned'",
        ),
        "layers": (
            (LocalLayerGraph, "on"),
            lambda: DistLayerLoader(data, [4, 4], **how),
            "graph_on='pinned'",
        ),
    }[part]
    monkeypatch.setattr(*place, fails)
    wanted = rf"out of memory on cpu of rank 0: .* about [\d,]+ bytes.*{text}"
    with pytest.raises(MemoryError, match=wanted):
        run()

"""Loaders take an adj_t of torch.sparse, and sparse rows, or refuse them by name."""

import pytest
import tiers
import torch
import worlds
from batches import LOADERS
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.utils import is_torch_sparse_tensor, to_edge_index

import pyg_distcomm as pdc
import pyg_distcomm.nn
from pyg_distcomm.loader import DataLoader, NeighborLoader

# torch and PyG warn of sparse tensors as such
pytestmark = pytest.mark.filterwarnings("ignore:Sparse")

NODES = 23
LAYOUTS = ("sparse_csr", "sparse_coo", "sparse_csc")


def graph():
    g = torch.Generator().manual_seed(0)
    dense = torch.rand(NODES, NODES, generator=g)
    dense = dense.masked_fill_(torch.rand(NODES, NODES, generator=g) > 0.2, 0.0)
    return dense, torch.randn(NODES, 4, generator=g)


def as_layout(dense, layout):
    return dense.to_sparse(layout=getattr(torch, layout))


KINDS = ("nodes", "links", "layers", "shadow", "random", "saint_nodes")
LABELS = {"edge_label_index": torch.arange(18).view(2, 9)}


@tiers.cover(("cut", "kind"), [True, False], KINDS)
@tiers.parametrize("layout", LAYOUTS, ["sparse_csr"])
@pytest.mark.parametrize("size", [tiers.rarely(1), 2, tiers.rarely(3)])
@worlds.on()
def test_a_matrix_of_torch_loads(size, cut, layout, kind):
    mesh = worlds.mesh()
    dense, x = graph()
    target, source = dense.nonzero().T
    edges = torch.stack([source, target])
    plain = Data(x=x, edge_index=edges, edge_attr=dense[target, source])
    data = Data(x=x, adj_t=as_layout(dense, layout), y=torch.arange(NODES))
    given = pdc.partition(data, mesh, "random") if cut else data
    more = LABELS if kind == "links" else {}
    found = (LOADERS[kind](d, seed=1, **more) for d in (given, plain))
    for got, want in zip(*found, strict=True):
        adj = torch.zeros(got.num_nodes, got.num_nodes)
        ends = want.edge_index[1], want.edge_index[0]
        adj.index_put_(ends, want.edge_attr, accumulate=True)
        assert torch.equal(got.adj_t.to_dense(), adj)
        assert got.adj_t.layout == getattr(torch, "sparse_csr" if cut else layout)
        assert torch.equal(got.x, want.x)
        assert torch.equal(got.e_id, want.e_id)
        assert ("edge_index" in got) == cut
    assert isinstance(data.adj_t, torch.Tensor)
    assert set(data.keys()) == {"x", "adj_t", "y"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_matrices_between_two_types_load(layout):
    dense = (torch.arange(54).view(9, 6) % 5 == 0).float()
    data = HeteroData()
    data["a"].x, data["b"].x = torch.randn(6, 2), torch.randn(9, 2)
    data["a", "to", "b"].adj_t = as_layout(dense, layout)
    data["b", "of", "a"].adj_t = as_layout(dense.T.contiguous(), layout)
    for batch in NeighborLoader(data, [-1, -1], input_nodes="b", batch_size=4):
        got = batch["a", "to", "b"].adj_t
        assert got.shape == (len(batch["b"].n_id), len(batch["a"].n_id))
        seeds = dense[batch["b"].input_id][:, batch["a"].n_id]
        assert torch.equal(got.to_dense()[: len(seeds)], seeds)
        assert batch["b", "of", "a"].adj_t.layout == getattr(torch, layout)


def rows(name, layout):
    dense, x = graph()
    edges = dense.nonzero().T
    values = torch.rand(edges.size(1), 2) if name == "edge_attr" else x.relu()
    more = {name: as_layout(values, layout)}
    return Data(edge_index=edges, num_nodes=NODES, **more), values


@pytest.mark.parametrize("name", ["x", "y", "edge_attr"])
def test_sparse_rows_load(name):
    data, values = rows(name, "sparse_coo")
    for batch in NeighborLoader(data, [2], batch_size=5):
        ids = batch.e_id if name == "edge_attr" else batch.n_id
        assert batch[name].layout == torch.sparse_coo
        assert torch.equal(batch[name].to_dense(), values[ids])


@pytest.mark.parametrize("name", ["x", "y", "edge_attr"])
@pytest.mark.parametrize("layout", ["sparse_csr", "sparse_csc"])
def test_rows_that_torch_cannot_select_are_named(name, layout):
    data, _ = rows(name, layout)
    with pytest.raises(TypeError, match=rf"'{name}' is torch.{layout}.*to_sparse_coo"):
        NeighborLoader(data, [2])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2])
@worlds.on()
def test_ranks_hold_dense_rows(size, layout):
    mesh = worlds.mesh()
    typed = HeteroData()
    typed["a"].x = as_layout(graph()[1], layout)
    cloud = Data(pos=graph()[1], feat=typed["a"].x, y=torch.zeros(1))
    data = [rows(name, layout)[0] for name in ("x", "y", "edge_attr")]
    every = [*data, typed, Batch.from_data_list([cloud, cloud])]
    for given, name in zip(every, ["x", "y", "edge_attr", "x", "feat"], strict=True):
        with pytest.raises(TypeError, match=rf"{name} is torch.sparse_"):
            pdc.partition(given, mesh, "random")
    loader = DataLoader([data[0], data[0]], 2)
    if mesh.size == 1:
        next(iter(loader))
        return
    with pytest.raises(TypeError, match=r"x'? is torch.sparse"):
        next(iter(loader))


@pytest.mark.parametrize("size", [1, 2])
@worlds.on()
def test_pyg_reads_the_edges_of_a_shares_matrix(size):
    mesh = worlds.mesh()
    dense, x = graph()
    data = Data(x=x, adj_t=as_layout(dense, "sparse_csr"))
    share = pdc.partition(data, mesh, "random")
    for got, want in zip(
        to_edge_index(share.adj_t), to_edge_index(data.adj_t), strict=True
    ):
        got = got.full_tensor() if hasattr(got, "full_tensor") else got
        assert torch.equal(got, want)
    assert share.adj_t.layout == torch.sparse_csr
    assert share.edge_index.layout == torch.strided
    assert is_torch_sparse_tensor(share.adj_t)

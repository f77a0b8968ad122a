"""Parts read by fewer ranks than there are: the same graph, and the same numbers."""

from __future__ import annotations

import itertools

import alike
import pytest
import tiers
import torch
import torch_geometric.nn
import worlds

import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives
from pyg_distcomm.datasets import generated
from pyg_distcomm.nn import GCNConv
from pyg_distcomm.partition.cutters import cut
from pyg_distcomm.partition.folder import read_part, write_folder
from pyg_distcomm.partition.part_share import merged

pytestmark = pytest.mark.usefixtures("place")

PARTS = 5


def graph():
    data = generated(97)
    data.x = data.x.double()
    data.edge_attr = torch.arange(data.num_edges)
    return data


def step(kind, data):
    """The output of a layer on some data, and its gradients."""
    torch.manual_seed(0)
    conv = kind(data.num_features, 3).double()
    out = conv(data.x, data.edge_index)
    out.square().sum().backward()
    return out, [p.grad for p in conv.parameters()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out, data = tmp_path_factory.mktemp("parts") / "five", graph()
    write_folder(out, data, cut(data.edge_index, data.num_nodes, PARTS, "random"))
    return str(out)


@tiers.parametrize("size", [1, 2, 3, 4], [2, 3])
@worlds.on()
def test_fewer_ranks_have_the_same_graph(folder, size):
    mesh, whole = worlds.mesh(), graph()
    data = pdc.load_partition(folder, mesh, merge=True)
    (out, grads), want = step(GCNConv, data), step(torch_geometric.nn.GCNConv, whole)
    alike.same([data.x, data.y, out, grads], [whole.x, whole.y, *want])
    edge = data.edge_attr.to_local()
    for ids in (data.edge_index.nodes.gid, edge):
        assert torch.equal(ids, ids.sort().values)
    edges = torch.cat(collectives.all_gather_object(edge, mesh.world))
    assert torch.equal(edges.sort().values, whole.edge_attr)
    ends = [k * PARTS // size for k in range(size + 1)]
    parts = cut(whole.edge_index, whole.num_nodes, PARTS, "random").sizes
    sums = [sum(parts[a:b]) for a, b in itertools.pairwise(ends)]
    assert list(pdc.partition_report(data).nodes) == sums


def test_parts_with_other_rows_are_not_merged(folder):
    parts = [read_part(folder, k) for k in range(PARTS)]
    del parts[1].node["x"]
    with pytest.raises(ValueError, match="parts 0 and 1 cannot be merged: their node"):
        merged(parts, 1)


def test_without_being_asked_ranks_read_one_part_each(folder):
    with pytest.raises(ValueError, match="holds 5 parts, but there are") as caught:
        pdc.load_partition(folder, worlds.mesh())
    assert "torchrun --nproc-per-node 5" in str(caught.value)
    assert "merge=True" in str(caught.value)

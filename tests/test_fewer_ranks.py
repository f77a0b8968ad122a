"""Parts read by fewer ranks than there are: the same graph, and the same numbers."""

from __future__ import annotations

import itertools

import pytest
import tiers
import torch
import torch_geometric.nn
import worlds

import pyg_distcomm as pdc
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


def conv_of(kind, data):
    torch.manual_seed(0)
    return kind(data.num_features, 3).double()


def read(folder):
    """Runs on a rank: what it has, and what a layer makes of it."""
    mesh = worlds.mesh()
    data = pdc.load_partition(folder, mesh, merge=True)
    conv = conv_of(GCNConv, data)
    out = conv(data.x, data.edge_index)
    out.square().sum().backward()
    grads = [p.grad for p in conv.parameters()]
    own = data.edge_index.nodes.gid, data.edge_attr.to_local()
    whole = data.x.full_tensor(), data.y.full_tensor(), out.full_tensor().detach()
    return own, whole, grads, pdc.partition_report(data).nodes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out, data = tmp_path_factory.mktemp("parts") / "five", graph()
    write_folder(out, data, cut(data.edge_index, data.num_nodes, PARTS, "random"))
    return str(out)


@tiers.parametrize("ranks", [1, 2, 3, 4], [2, 3])
def test_fewer_ranks_have_the_same_graph(folder, ranks):
    every, data = worlds.run(read, ranks, folder), graph()
    conv = conv_of(torch_geometric.nn.GCNConv, data)
    want = conv(data.x, data.edge_index)
    want.square().sum().backward()
    for own, (x, y, out), grads, _ in every:
        assert torch.equal(x, data.x)
        assert torch.equal(y, data.y)
        assert torch.allclose(out, want, atol=1e-12)
        for grad, p in zip(grads, conv.parameters(), strict=True):
            assert torch.allclose(grad, p.grad, atol=1e-10)
        assert all(torch.equal(ids, ids.sort().values) for ids in own)
    edges = torch.cat([own[1] for own, *_ in every]).sort().values
    assert torch.equal(edges, data.edge_attr)
    ends = [k * PARTS // ranks for k in range(ranks + 1)]
    parts = cut(data.edge_index, data.num_nodes, PARTS, "random").sizes
    sums = [sum(parts[a:b]) for a, b in itertools.pairwise(ends)]
    assert list(every[0][3]) == sums


def loads(folder, merge):
    mesh = worlds.mesh()
    with pytest.raises(ValueError, match="holds 5 parts, but there are") as caught:
        pdc.load_partition(folder, mesh, merge=merge)
    return str(caught.value)


def test_parts_with_other_rows_are_not_merged(folder):
    parts = [read_part(folder, k) for k in range(PARTS)]
    del parts[1].node["x"]
    with pytest.raises(ValueError, match="parts 0 and 1 cannot be merged: their node"):
        merged(parts, 1)


def test_without_being_asked_ranks_read_one_part_each(folder):
    (told,) = worlds.run(loads, 1, folder, False)
    assert "torchrun --nproc-per-node 5" in told
    assert "merge=True" in told

"""Shares on ranks: from folders, reports, refinement, overlap."""

import itertools

import alike
import numpy as np
import pytest
import tiers
import torch
import torch_geometric.nn
import worlds
from problems import GRAPHS, two_types

import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives, consistency
from pyg_distcomm.datasets import generated
from pyg_distcomm.nn import DistGCNConv, GCNConv
from pyg_distcomm.partition.cutters import cut
from pyg_distcomm.partition.folder import write_folder
from pyg_distcomm.partition.partition import report

pytestmark = pytest.mark.usefixtures("place")


def _from_folder(folder):
    data = GRAPHS["directed"]()
    mesh = worlds.mesh()
    share = pdc.load_partition(folder, mesh, verify="checksums")
    for name in ("x", "y", "train_mask", "edge_weight", "edge_attr", "edge_index"):
        alike.same(share[name], data[name], name, rtol=0, atol=0)
    assert share.num_nodes == len(share.x) == 60
    assert share.keys() == list(share.to_dict())
    again = pdc.partition(data, mesh, share.edge_index.nodes.partition)
    conv = DistGCNConv(7, 4).double()
    a = conv(share.x, share.edge_index, share.edge_weight)
    b = conv(again.x, again.edge_index, again.edge_weight)
    assert torch.equal(a, b)
    return pdc.partition_report(share)


@pytest.mark.place("cpu")
@pytest.mark.parametrize("shape", [(2, 6000), (6000, 2), (12000,)])
def test_ranks_compare_pieces_of_what_is_long(monkeypatch, shape):
    hashed, whole = [], consistency.digest
    count = lambda x: hashed.append(x.numel() * x.element_size()) or whole(x)  # noqa: E731
    monkeypatch.setattr(consistency, "_HASHED_BYTES", 1 << 13)
    monkeypatch.setattr(consistency, "digest", count)
    x = torch.arange(12000).view(shape)
    mark = consistency.sampled_digest(x)
    assert sum(hashed[:-1]) <= 1 << 13
    assert mark == consistency.sampled_digest(x.clone())
    for at in (0, -1):
        other = x.clone()
        other.view(-1)[at] = -1
        assert consistency.sampled_digest(other) != mark


@tiers.parametrize("size", [1, 2, 3], [2])
def test_a_folder_is_the_graph_and_reports_alike(tmp_path, size):
    data = GRAPHS["directed"]()
    owners = cut(data.edge_index, 60, size, "ldg", train_mask=data.train_mask)
    write_folder(tmp_path / "parts", data, owners)
    want = report(data.edge_index, owners, data.train_mask)
    for found in worlds.run(_from_folder, size, str(tmp_path / "parts")):
        assert found == want


def _refused(folder, text, verify="checksums"):
    mesh = worlds.mesh()
    with pytest.raises(ValueError, match=text):
        pdc.load_partition(folder, mesh, verify=verify)
    return float(pdc.partition(GRAPHS["star"](), mesh, "block").x.sum())


def test_folders_that_do_not_fit_are_refused_on_all_ranks(tmp_path):
    data = GRAPHS["directed"]()
    write_folder(tmp_path / "three", data, cut(data.edge_index, 60, 3, "block"))
    worlds.run(_refused, 2, str(tmp_path / "three"), "3 parts, but there are 2 ranks")
    write_folder(tmp_path / "two", data, cut(data.edge_index, 60, 2, "block"))
    file = next((tmp_path / "two" / "part_00001").glob("node__x*"))
    whole = file.read_bytes()
    for content in (whole[:-9], whole[:-1] + bytes([whole[-1] ^ 1])):
        file.write_bytes(content)
        worlds.run(_refused, 2, str(tmp_path / "two"), file.name)
    file.unlink()
    worlds.run(_refused, 2, str(tmp_path / "two"), file.name)
    file.write_bytes(whole)
    file = file.parent / "edge_gid.npy"
    np.save(file, np.zeros_like(np.load(file)))
    text = r"rank 1: .*part_00001/edge_gid.npy: edge ids do not ascend"
    worlds.run(_refused, 2, str(tmp_path / "two"), text, "sizes")


@pytest.mark.parametrize("grid", [(2, 1, 1), (1, 2, 1), (1, 1, 2)])
@worlds.on(2)
def test_cached_operators_follow_their_weights(grid):
    """Edge weights that change between steps are never taken from an old operator."""
    share = pdc.partition(GRAPHS["undirected"](), worlds.mesh(grid=grid), "random")
    conv = DistGCNConv(7, 4).double()
    first = conv(share.x, share.edge_index, share.edge_weight)
    share.edge_weight.mul_(2.0)
    second = conv(share.x, share.edge_index, share.edge_weight)
    assert not torch.equal(first, second)
    share.edge_weight.div_(2.0)
    third = conv(share.x, share.edge_index, share.edge_weight)
    torch.testing.assert_close(first, third)
    twice = [conv(share.x, share.edge_index).detach() for _ in range(2)]
    assert torch.equal(*twice)


@tiers.parametrize(
    ("method", "grid"),
    itertools.product(
        ["metis", "random", "grid"],
        [(1, 1, 1), (3, 1, 1), (1, 2, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2)],
    ),
    [("grid", (1, 2, 1))],
)
@worlds.on()
def test_refined_shares_are_the_same_on_all_ranks(tmp_path, method, grid):
    data, mesh, folder = GRAPHS["directed"](), worlds.mesh(grid=grid), tmp_path / "out"
    mask = data.train_mask
    plain = pdc.partition(data, mesh, method)
    share = pdc.partition(data, mesh, method, refine=True)
    owners = share.edge_index.nodes.partition
    assert owners.same_as(
        cut(data.edge_index, 60, mesh.size, method, train_mask=mask, refine=True)
        if grid[0] == mesh.size
        else owners
    )
    found = pdc.partition_report(share)
    assert found == report(data.edge_index, owners, mask, grid)
    assert found.before == pdc.partition_report(plain)
    assert found.busiest <= found.before.busiest
    given = pdc.partition(data, mesh, plain.edge_index.nodes.partition, refine=True)
    assert given.edge_index.nodes.partition.same_as(owners)
    conv = DistGCNConv(7, 4).double()
    with torch.no_grad():
        for weight in conv.parameters():
            weight.fill_(0.1)
    a = conv(plain.x, plain.edge_index).full_tensor()
    b = conv(share.x, share.edge_index).full_tensor()
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    if mesh.rank == 0:
        write_folder(folder, data, owners, grid=grid)
    pdc.comm.collectives.barrier(mesh.world)
    assert pdc.partition_report(pdc.load_partition(folder, mesh)) == found
    assert len(set(collectives.all_gather_object(owners.digest(), mesh.world))) == 1


@worlds.on(2)
def test_a_hetero_graph_is_refined_as_one():
    data, mesh = two_types(), worlds.mesh()
    share = pdc.partition(data, mesh, "random", refine=True)
    alike.same(share["a"].x, data["a"].x)
    owners = {"a": torch.zeros(20).long(), "b": torch.zeros(10).long()}
    with pytest.raises(ValueError, match="refine=True improves a cut by a method"):
        pdc.partition(data, mesh, owners, refine=True)


# Parts read by fewer ranks than there are --------------------------------------------

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
    return alike.learnt(conv, data.x, data.edge_index)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out, data = tmp_path_factory.mktemp("parts") / "five", graph()
    write_folder(out, data, cut(data.edge_index, data.num_nodes, PARTS, "random"))
    return str(out)


@tiers.parametrize("size", [1, 2, 3, 4], [2])
@worlds.on()
def test_fewer_ranks_have_the_same_graph(folder, size):
    mesh, whole = worlds.mesh(), graph()
    data = pdc.load_partition(folder, mesh, merge=True)
    found, want = step(GCNConv, data), step(torch_geometric.nn.GCNConv, whole)
    alike.same([data.x, data.y, *found], [whole.x, whole.y, *want])
    edge = data.edge_attr.to_local()
    for ids in (data.edge_index.nodes.gid, edge):
        assert torch.equal(ids, ids.sort().values)
    edges = torch.cat(collectives.all_gather_object(edge, mesh.world))
    assert torch.equal(edges.sort().values, whole.edge_attr)
    ends = [k * PARTS // size for k in range(size + 1)]
    parts = cut(whole.edge_index, whole.num_nodes, PARTS, "random").sizes
    sums = [sum(parts[a:b]) for a, b in itertools.pairwise(ends)]
    assert list(pdc.partition_report(data).nodes) == sums


def test_without_being_asked_ranks_read_one_part_each(folder):
    with pytest.raises(ValueError, match="holds 5 parts, but there are") as caught:
        pdc.load_partition(folder, worlds.mesh())
    assert "torchrun --nproc-per-node 5" in str(caught.value)
    assert "merge=True" in str(caught.value)

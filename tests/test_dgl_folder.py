"""Folders of DGL's partition_graph, written by DGL 1.1.3, are read as they were meant."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import worlds
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

import pyg_distcomm as pdc
from pyg_distcomm.cli import main
from pyg_distcomm.partition.dgl_folder import (
    is_dgl_folder,
    read_dgl_folder,
    read_dgl_partition,
)

# 8 nodes and 13 edges in two parts, once for each form in which DGL saves edges; `truth` has
# the edges as they were given, and where each of DGL's ids came from
WRITTEN = Path(__file__).parent / "files" / "dgl_partitions.zip"
FORMS = ("coo", "csc", "csr")


@pytest.fixture
def folders(tmp_path):
    with zipfile.ZipFile(WRITTEN) as archive:
        archive.extractall(tmp_path)
    return tmp_path


def truth(folder):
    """The graph under DGL's ids, from what DGL was given."""
    told = json.loads((folder / "truth").read_text())
    node, edge = torch.tensor(told["node"]), torch.tensor(told["edge"])
    place = torch.empty_like(node)
    place[node] = torch.arange(len(node))
    ends = torch.tensor([told["src"], told["dst"]])
    return Data(
        x=(10 * node[:, None] + torch.arange(2)).float(),
        y=node % 3,
        train_mask=node % 2 == 0,
        edge_index=place[ends[:, edge]],
        edge_weight=edge / 2,
    )


@pytest.mark.parametrize("form", FORMS)
def test_a_part_is_what_dgl_was_given(folders, form):
    folder = folders / form
    data, partition = truth(folder), read_dgl_partition(folder)
    assert is_dgl_folder(folder)
    assert is_dgl_folder(folder / "toy.json")
    assert not is_dgl_folder(folders)
    assert partition.num_nodes == 8
    for part in range(2):
        share = read_dgl_folder(folder, part)
        assert torch.equal(share.node_gid, partition.gids(part))
        mine = (partition.owner_of(data.edge_index[1]) == part).nonzero().view(-1)
        assert torch.equal(share.edge_gid, mine)
        assert torch.equal(share.edge_index, data.edge_index[:, mine])
        for name in ("x", "y", "train_mask"):
            assert torch.equal(share.node[name], data[name][share.node_gid])
        assert torch.equal(share.edge["edge_weight"], data.edge_weight[mine])
        assert share.num_edges_global == 13


def _step(data, edge_weight):
    torch.manual_seed(0)
    model = GCNConv(2, 3)
    out = pdc.convert(model)(data.x, data.edge_index, edge_weight)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    return float(loss.detach()), model.lin.weight.grad


def _train(folder):
    share = pdc.load_partition(folder, worlds.mesh())
    loss, grad = _step(share, share.edge_weight)
    with pytest.raises(ValueError, match="missing"):
        pdc.load_partition(Path(folder) / "part0", worlds.mesh())
    return loss, grad


def test_two_ranks_train_from_it_as_one_does(folders):
    data = truth(folders / "coo")
    loss, grad = _step(data, data.edge_weight)
    for got, gradient in worlds.run(_train, 2, str(folders / "coo")):
        assert got == pytest.approx(loss, rel=1e-6)
        torch.testing.assert_close(gradient, grad)


def test_the_command_shows_and_plans_it(folders, capsys):
    folder = str(folders / "csr")
    assert main(["inspect", folder]) == 0
    shown = capsys.readouterr().out
    assert "dgl.distributed.partition_graph" in shown
    assert "node=['" in shown
    for named in (folder, f"{folder}/toy.json"):
        assert main(["plan", named, "--widths", "2", "4", "3"]) == 0


def _refusal(folder):
    """What is said of a folder; None if it is read."""
    try:
        read_dgl_folder(folder, 0)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    "name", ["part0/graph.dgl", "part0/node_feat.dgl", "part0/edge_feat.dgl"]
)
def test_damaged_files_are_refused_by_name(folders, name):
    path = folders / "coo" / name
    whole = path.read_bytes()
    named = Path(name).name
    begin = 4096 if "graph" in name else 0
    # cut off anywhere, and each byte of what is no value changed
    for length in [0, 1, *range(begin, len(whole), 97)]:
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=named):
            read_dgl_folder(folders / "coo", 0)
    said = []
    for at in range(begin, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        said += [_refusal(folders / "coo")]  # values may be any: some are read
    said = [text for text in said if text]
    assert len(said) > 5
    assert all(named in text for text in said)
    path.unlink()
    with pytest.raises(ValueError, match=f"{named}: missing"):
        read_dgl_folder(folders / "coo", 0)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"node_map": "map.npy"}, "reshuffle=True"),
        ({"node_map": {"a": [[0, 8]], "b": [[0, 1]]}}, "heterogeneous graph"),
        ({"node_map": {"_N": [[0, 4], [5, 8]]}}, "follow one another"),
        ({"node_map": {"_N": [[0, 4]]}}, "2 ranges"),
        ({"edge_map": {"_E": [[0, 6], [6, 99]]}}, "of 0 .. 13"),
        ({"num_parts": "two"}, "num_parts"),
        ({"part-0": {"part_graph_graphbolt": "g.pt"}}, "GraphBolt"),
        ({"part-0": None}, "part-0 names no part_graph"),
    ],
)
def test_other_folders_are_refused_with_the_reason(folders, change, why):
    path = folders / "coo" / "toy.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=why):
        read_dgl_folder(folders / "coo", 0)


def test_paths_stay_inside_the_folder(folders):
    path = folders / "coo" / "toy.json"
    told = json.loads(path.read_text())
    names = told["part-0"]
    # written elsewhere, and moved: found beside the file; elsewhere: never read
    told["part-0"] = {kind: f"/cluster/out/{name}" for kind, name in names.items()}
    path.write_text(json.dumps(told))
    assert read_dgl_folder(folders / "coo", 0).node["x"].shape[1] == 2
    told["part-0"] = {kind: f"../../{name}" for kind, name in names.items()}
    path.write_text(json.dumps(told))
    assert read_dgl_folder(folders / "coo", 0).part == 0

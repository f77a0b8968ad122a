"""Data sets of OGB and PyG, from small files in the form that their own classes read."""

import gzip
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
import torch
from torch_geometric.utils import to_undirected

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from graphs import load_dataset, load_node_data, num_outputs

pytestmark = pytest.mark.usefixtures("place")

N, E, F_IN = 60, 200, 8


def graph(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "edges": rng.integers(0, N, (2, E)),
        "x": rng.standard_normal((N, F_IN)).astype(np.float32),
        "y": rng.integers(0, 4, N),
        "order": rng.permutation(N),
    }


def split(given):
    return dict(
        zip(("train", "valid", "test"), np.split(given["order"], [30, 40]), strict=True)
    )


def csv(path, array):
    with gzip.open(path, "wt") as file:
        np.savetxt(
            file, array, fmt="%.9g" if array.dtype.kind == "f" else "%d", delimiter=","
        )


def write_ogb(root, name, kind):
    """Writes what OGB's archive of a data set unpacks to."""
    given = graph()
    home = root / name.replace("-", "_")
    raw, cut = home / "raw", home / "split" / kind
    raw.mkdir(parents=True)
    cut.mkdir(parents=True)
    (home / "RELEASE_v1.txt").touch()
    for part, array in (
        ("edge", given["edges"].T),
        ("node-feat", given["x"].astype(np.float64)),
        ("node-label", given["y"][:, None]),
        ("num-node-list", np.array([[N]])),
        ("num-edge-list", np.array([[E]])),
        ("node_year", np.full((N, 1), 2000)),
    ):
        csv(raw / f"{part}.csv.gz", array)
    for part, ids in split(given).items():
        csv(cut / f"{part}.csv.gz", ids[:, None])
    return given


def test_ogbs_own_class_reads_its_files(tmp_path):
    pytest.importorskip("ogb")
    given = write_ogb(tmp_path / "ogb", "ogbn-arxiv", "time")
    data = load_dataset("ogbn-arxiv", tmp_path)
    again = load_node_data(str(tmp_path / "ogbn-arxiv"))  # its root before its name
    want = to_undirected(torch.from_numpy(given["edges"]), num_nodes=N)
    assert torch.equal(data.edge_index, want)
    torch.testing.assert_close(data.x, torch.from_numpy(given["x"]))
    assert torch.equal(data.y, torch.from_numpy(given["y"]))
    for part, ids in split(given).items():
        mask = data[{"valid": "val_mask"}.get(part, f"{part}_mask")]
        assert mask.nonzero().view(-1).tolist() == sorted(ids)
    assert torch.equal(again.y, data.y)


def test_pygs_own_class_reads_its_files(tmp_path):
    given = graph()
    raw = tmp_path / "reddit" / "raw"
    raw.mkdir(parents=True)
    matrix = scipy.sparse.coo_matrix((np.ones(E, np.float32), given["edges"]), (N, N))
    kinds = np.ones(N, np.int64)
    for number, part in enumerate(("valid", "test"), 2):
        kinds[split(given)[part]] = number
    arrays = {"feature": given["x"], "label": given["y"], "node_types": kinds}
    np.savez(raw / "reddit_data.npz", **arrays)
    scipy.sparse.save_npz(raw / "reddit_graph.npz", matrix)
    for data in (
        load_node_data("Reddit", tmp_path),
        load_node_data(
            str(tmp_path / "reddit" / "Reddit")
        ),  # by the folder of its files
    ):
        assert num_outputs(data.y) == 4
        assert torch.equal(data.y, torch.from_numpy(given["y"]))
        assert data.test_mask.nonzero().view(-1).tolist() == sorted(
            split(given)["test"]
        )
        assert data.num_edges == matrix.tocsr().nnz

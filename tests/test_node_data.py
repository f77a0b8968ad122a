"""Data sets of OGB and PyG, from small files in the form that their own classes read."""

import gzip
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
import tiers
import torch
from torch_geometric.utils import to_undirected

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from graphs import OGB, load_dataset, load_node_data, num_outputs

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
    labels = given["y"].astype(np.float32)[:, None]
    if name == "ogbn-papers100M":  # binary, and not all nodes have a label
        labels[given["order"][50:]] = np.nan
        year = np.zeros((N, 1), np.int64)
        arrays = {"edge_index": given["edges"], "node_feat": given["x"]}
        np.savez(
            raw / "data.npz",
            num_nodes_list=[N],
            num_edges_list=[E],
            node_year=year,
            **arrays,
        )
        np.savez(raw / "node-label.npz", node_label=labels)
    else:
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


KINDS = {
    "ogbn-arxiv": "time",
    "ogbn-products": "sales_ranking",
    "ogbn-papers100M": "time",
}


@pytest.mark.parametrize(
    "name", ["ogbn-arxiv", *map(tiers.rarely, ["ogbn-products", "ogbn-papers100M"])]
)
def test_ogbs_own_class_reads_its_files(tmp_path, name):
    pytest.importorskip("ogb")
    given = write_ogb(tmp_path / "ogb", name, KINDS[name])
    data = load_dataset(name, tmp_path)
    again = load_node_data(str(tmp_path / name.lower()))  # its root before its name
    want = torch.from_numpy(given["edges"])
    if OGB[name]:
        want = to_undirected(want, num_nodes=N)
    elif name == "ogbn-products":  # each edge is written once
        both = torch.cat([want, want.flip(0)], 1)
        want = both[:, both[0].mul(N).add(both[1]).argsort(stable=True)]
        data.edge_index = data.edge_index[
            :, data.edge_index[0].mul(N).add(data.edge_index[1]).argsort(stable=True)
        ]
    assert torch.equal(data.edge_index, want)
    torch.testing.assert_close(data.x, torch.from_numpy(given["x"]))
    known = data.y >= 0
    assert data.y.dtype == torch.int64
    assert data.y.shape == (N,)
    assert int(known.sum()) == (50 if name == "ogbn-papers100M" else N)
    assert torch.equal(data.y[known], torch.from_numpy(given["y"])[known])
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

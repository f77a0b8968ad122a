"""Data sets of OGB and PyG, from small files in the form that their own classes read."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
import tiers
import torch
import torch.nn.functional as F
from torch_geometric.utils import to_undirected

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from graphs import (
    OGB,
    load_dataset,
    load_node_data,
    num_outputs,
)

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


def write_pyg(root, name):
    """Writes the raw files of PyG's Reddit, Flickr or Yelp."""
    given = graph()
    raw = root / name.lower() / "raw"
    raw.mkdir(parents=True)
    src, dst = given["edges"]
    matrix = scipy.sparse.coo_matrix((np.ones(E, np.float32), (src, dst)), (N, N))
    if name == "Reddit":
        kinds = np.ones(N, np.int64)
        for number, part in enumerate(("valid", "test"), 2):
            kinds[split(given)[part]] = number
        np.savez(
            raw / "reddit_data.npz",
            feature=given["x"],
            label=given["y"],
            node_types=kinds,
        )
        scipy.sparse.save_npz(raw / "reddit_graph.npz", matrix)
        return given
    csr = matrix.tocsr()
    arrays = {"data": csr.data, "indices": csr.indices, "indptr": csr.indptr}
    np.savez(raw / "adj_full.npz", shape=csr.shape, **arrays)
    np.save(raw / "feats.npy", given["x"])
    several = name == "Yelp"
    classes = {
        str(k): [int(c == y) for c in range(4)] if several else int(y)
        for k, y in enumerate(given["y"])
    }
    (raw / "class_map.json").write_text(json.dumps(classes))
    role = dict(zip(("tr", "va", "te"), split(given).values(), strict=True))
    (raw / "role.json").write_text(json.dumps({k: v.tolist() for k, v in role.items()}))
    return given


@pytest.mark.parametrize("name", ["Reddit", "Flickr", "Yelp"])
def test_pygs_own_classes_read_their_files(tmp_path, name):
    given = write_pyg(tmp_path, name)
    path = tmp_path / name.lower() / name  # by the folder of its files
    data = load_node_data(str(path) if name == "Flickr" else name, tmp_path)
    labels = torch.from_numpy(given["y"])
    assert num_outputs(data.y) == 4
    want = F.one_hot(labels).float() if name == "Yelp" else labels
    assert torch.equal(data.y, want)
    assert data.test_mask.nonzero().view(-1).tolist() == sorted(split(given)["test"])
    src, dst = given["edges"]
    assert data.num_edges == len(set(zip(src.tolist(), dst.tolist(), strict=True)))

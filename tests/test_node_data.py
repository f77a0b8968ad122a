"""Data sets of OGB and PyG, from small files in the form that their own classes read."""

from __future__ import annotations

import gzip
import json
import shutil
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
import tiers
import torch
import torch.nn.functional as F
import torch_geometric.datasets
import worlds
from filelock import FileLock
from torch_geometric.data import Data
from torch_geometric.utils import to_undirected

import pyg_distcomm as pdc

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from graphs import (
    KNOWN,
    OGB,
    load_dataset,
    load_node_data,
    load_ogb,
    node_loss,
    node_score,
    num_outputs,
    ogb_score,
)

pytestmark = pytest.mark.usefixtures("place")

ROOT = Path(__file__).parents[1]
REAL = ROOT.parent / "shared" / "data"
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
        csv(raw / "edge.csv.gz", given["edges"].T)
        csv(raw / "node-feat.csv.gz", given["x"].astype(np.float64))
        csv(raw / "node-label.csv.gz", given["y"][:, None])
        csv(raw / "num-node-list.csv.gz", np.array([[N]]))
        csv(raw / "num-edge-list.csv.gz", np.array([[E]]))
        csv(raw / "node_year.csv.gz", np.full((N, 1), 2000))
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


def _scores(path):
    data = Data(**torch.load(path))
    share = pdc.partition(data, worlds.mesh(), "random")
    return ogb_score(
        "ogbn-arxiv", share.x[share.test_mask], share.y[share.test_mask]
    ), node_score(share.x[share.test_mask], share.y[share.test_mask])


def test_ogbs_evaluator_scores_what_is_spread(tmp_path):
    pytest.importorskip("ogb")
    given = graph()
    data = Data(
        x=torch.from_numpy(given["x"]), edge_index=torch.from_numpy(given["edges"])
    )
    data.y = torch.from_numpy(given["y"])
    data.test_mask = torch.arange(N) % 3 == 0
    torch.save(data.to_dict(), tmp_path / "data.pt")
    hit = data.x.argmax(-1) == data.y
    want = float(hit[data.test_mask].float().mean())
    found = ogb_score("ogbn-arxiv", data.x[data.test_mask], data.y[data.test_mask])
    assert found == pytest.approx(want)
    for found in worlds.run(_scores, 2, str(tmp_path / "data.pt")):
        assert found == pytest.approx((want, want))


def test_without_ogb_or_a_network_it_says_what_to_do(tmp_path, monkeypatch):
    pytest.importorskip("ogb")
    import ogb.nodeproppred.dataset_pyg as source

    def offline(*_):
        raise OSError("no route to host")

    monkeypatch.setattr(source, "decide_download", offline)
    with pytest.raises(
        ValueError, match=r"ogbn-arxiv: not below .*could not be downloaded"
    ):
        load_ogb("ogbn-arxiv", tmp_path)
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred", None)
    with pytest.raises(ImportError, match=r"pip install 'pyg-distcomm\[ogb\]'"):
        load_ogb("ogbn-arxiv", tmp_path)


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


def test_graphs_without_masks_get_them_and_one_of_several_is_taken(tmp_path):
    data = Data(x=torch.rand(N, 2), y=torch.arange(N) % 3)
    data.edge_index = torch.zeros(2, 1, dtype=torch.int64)
    torch.save(data, tmp_path / "bare.pt")
    masks = torch.rand(N, 10) < 0.5
    torch.save(data.update({"train_mask": masks}), tmp_path / "several.pt")
    bare = load_node_data(str(tmp_path / "bare.pt"))
    parts = torch.stack([bare[f"{part}_mask"] for part in ("train", "val", "test")])
    assert torch.equal(parts.sum(0), torch.ones(N, dtype=torch.int64))
    assert torch.equal(
        load_node_data(str(tmp_path / "several.pt")).train_mask, masks[:, 0]
    )
    del data.y
    torch.save(data, tmp_path / "unlabelled.pt")
    with pytest.raises(ValueError, match="got no y"):
        load_node_data(str(tmp_path / "unlabelled.pt"))


def _multilabel(path):
    share = pdc.partition(Data(**torch.load(path)), worlds.mesh(), "random")
    out, y = share.x[share.train_mask], share.y[share.train_mask]
    return float(node_loss(out, y)), node_score(out, y)


def test_several_labels_a_node_are_scored_by_micro_f1(tmp_path):
    metrics = pytest.importorskip("sklearn.metrics")
    given = graph()
    data = Data(
        x=torch.from_numpy(given["x"]), edge_index=torch.from_numpy(given["edges"])
    )
    data.y = (torch.rand(N, F_IN) < 0.3).float()
    data.train_mask = torch.arange(N) % 4 > 0
    torch.save(data.to_dict(), tmp_path / "data.pt")
    out, y = data.x[data.train_mask], data.y[data.train_mask]
    want = metrics.f1_score(y.numpy(), (out > 0).numpy(), average="micro")
    loss = F.binary_cross_entropy_with_logits(out, y)
    for found in worlds.run(_multilabel, 2, str(tmp_path / "data.pt")):
        assert found == pytest.approx((float(loss), want), rel=1e-5)


@tiers.rare
@pytest.mark.subprocess
@pytest.mark.parametrize("name", ["ogbn-arxiv", "Reddit", "Yelp"])
@pytest.mark.parametrize(
    "example",
    "any_layer deep_pipeline gcn grids ladies neighbor_loader partitioned_sampling "
    "sage sylvie varco".split(),
)
def test_every_example_takes_every_data_set(tmp_path, example, name, monkeypatch):
    if name in OGB:
        # what ogb gives torch cannot be written where pandas has lent it
        monkeypatch.setenv("PYTHONWARNINGS", "ignore:The given NumPy array")
        pytest.importorskip("ogb")
        write_ogb(tmp_path / "data" / "ogb", name, KINDS[name])
        load_dataset(name, tmp_path / "data")  # ogb warns while it processes files
    else:
        write_pyg(tmp_path / "data", name)
    flags = ["--dataset", name, "--epochs", "2"]
    flags += ["--layers", "2"] if example in ("deep_pipeline", "varco") else []
    # of two epochs on a few nodes, what is exact is most
    flags += ["--budget", "2"] if example == "varco" else []
    path = ROOT / "examples" / f"{example}.py"
    assert worlds.script(path, 2 if name == "Yelp" else 1, tmp_path, *flags)


def test_known_names_are_classes_of_pyg():
    for _, kind, _ in KNOWN.values():
        assert hasattr(torch_geometric.datasets, kind)
    with pytest.raises(
        ValueError,
        match=r"unknown graph 'kora'; give digits, .*; or one of Cora,",
    ):
        load_dataset("kora")


@pytest.mark.data
def test_a_data_set_is_prepared_by_one_at_a_time(tmp_path):
    if not (REAL / "heterophilous").is_dir():
        pytest.skip(f"no real graphs in {REAL}")
    folder = tmp_path / "heterophilous"
    raw = shutil.ignore_patterns("processed", ".*.lock")
    shutil.copytree(REAL / "heterophilous", folder, ignore=raw)
    other = threading.Thread(target=load_dataset, args=("tolokers", tmp_path))
    with FileLock(folder / ".Tolokers.lock"):  # as a rank that came first has it
        other.start()
        other.join(1)
        assert other.is_alive()
        assert not list(folder.glob("**/processed"))
    other.join(60)
    assert load_dataset("tolokers", tmp_path).num_edges == 1038000


@pytest.mark.data
@pytest.mark.parametrize("name", ["Cora", "tolokers"])
def test_real_graphs_by_name(tmp_path, name):
    folder = KNOWN[name.capitalize()][0]
    if not (REAL / folder).is_dir():
        pytest.skip(f"no real graphs in {REAL}")
    shutil.copytree(REAL / folder, tmp_path / folder)
    data = load_dataset(name, tmp_path)
    assert data.num_edges == {"Cora": 10556, "tolokers": 1038000}[name]

"""Tables of Arrow are partitioned as the same numbers in .npy files are."""

from __future__ import annotations

import numpy as np
import pytest
import tiers
import torch

from pyg_distcomm.cli import main
from pyg_distcomm.partition import arrow_tables
from pyg_distcomm.partition.external import partition_files
from pyg_distcomm.partition.folder import read_part

pa = pytest.importorskip("pyarrow")
N, E = 40, 150


def numbers():
    rng = np.random.default_rng(0)
    pairs = rng.integers(0, N, (E, 2))
    pairs[3] = 5  # a self-loop
    return {
        "pairs": pairs,
        "x": rng.standard_normal((N, 3), np.float32),
        "y": rng.integers(0, 4, N),
        "train_mask": rng.random(N) < 0.5,
        "edge_weight": rng.random(E),
    }


def write(path, table):
    if path.suffix == ".parquet":
        from pyarrow import parquet

        parquet.write_table(table, path, row_group_size=37)
    else:
        with (
            pa.OSFile(str(path), "wb") as file,
            pa.ipc.new_file(file, table.schema) as w,
        ):
            w.write_table(table, max_chunksize=37)
    return path


def edge_table(given, names=("src", "dst")):
    src, dst = given["pairs"].T
    return pa.table({names[0]: src, "edge_weight": given["edge_weight"], names[1]: dst})


def node_table(given, order=None, fixed=True):
    order = np.arange(N) if order is None else order
    kind = pa.list_(pa.float32(), 3) if fixed else pa.list_(pa.float32())
    columns = {name: given[name][order] for name in ("y", "train_mask")}
    columns["x"] = pa.array(given["x"][order].tolist(), kind)
    return pa.table({"id": order, **columns})


def parts(folder):
    return [read_part(folder, part) for part in range(3)]


@tiers.cover(
    ("undirected", "ending"), [False, True], [".parquet", ".arrow", ".feather"]
)
def test_a_table_is_cut_as_arrays_are(tmp_path, monkeypatch, ending, undirected):
    monkeypatch.setattr(arrow_tables, "ROWS", 16)
    given, files = numbers(), {}
    for name in ("x", "y", "train_mask", "edge_weight"):
        files[name] = tmp_path / f"{name}.npy"
        np.save(files[name], given[name])
    np.save(tmp_path / "edges.npy", given["pairs"].T)
    options = {"seed": 1, "undirected": undirected}
    partition_files(
        tmp_path / "edges.npy",
        tmp_path / "arrays",
        3,
        node_files={name: files[name] for name in ("x", "y", "train_mask")},
        edge_files={"edge_weight": files["edge_weight"]},
        **options,
    )
    edges = write(tmp_path / f"edges{ending}", edge_table(given))
    mixed = np.random.default_rng(1).permutation(N)
    nodes = write(tmp_path / f"nodes{ending}", node_table(given, mixed, undirected))
    flags = ["--node-table", str(nodes), "--seed", "1", "--method", "stream"]
    flags += ["--undirected"] if undirected else []
    out = str(tmp_path / "tables")
    assert main(["partition", str(edges), out, "--parts", "3", *flags]) == 0
    for want, got in zip(parts(tmp_path / "arrays"), parts(out), strict=True):
        assert torch.equal(want.edge_index, got.edge_index)
        for kind in ("node", "edge"):
            rows, found = getattr(want, kind), getattr(got, kind)
            assert set(rows) == set(found)
            assert all(torch.equal(rows[name], found[name]) for name in rows)


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"a": [0], "b": [1], "c": [2]}, r"two columns named src and dst.*got a, b, c"),
        ({"src": [0, 7], "dst": [1, -2]}, r"edge 1 has the node -2"),
        ({"src": [0.5], "dst": [1]}, r"'src' holds double, wanted node ids"),
        ({"src": ["a"], "dst": ["b"]}, r"'src' holds string, .* of a table of nodes"),
        ({"src": [0, None], "dst": [1, 2]}, r"'src' has 1 missing values"),
        ({"src": [0], "dst": [1], "when": ["today"]}, r"'when' holds string"),
        ({"src": [0, 1], "dst": [1, 0], "w": [[1.0], [1.0, 2.0]]}, r"1 to 2 numbers"),
    ],
)
def test_what_is_no_edge_is_named(tmp_path, columns, why):
    path = write(tmp_path / "edges.parquet", pa.table(columns))
    with pytest.raises(ValueError, match=f"edges.parquet: .*{why}|{why}"):
        partition_files(path, tmp_path / "out", 1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("texts", [False, True])
@pytest.mark.parametrize("method", ["stream", "block"])
def test_ids_of_any_kind_are_looked_up(tmp_path, monkeypatch, texts, method):
    monkeypatch.setattr(arrow_tables, "MOST_ROWS", 17)
    given = numbers()
    names = np.random.default_rng(2).integers(0, 2**40, N) * 2 + np.arange(N) % 2
    if texts:
        names = np.array([f"node {name}" for name in names])
    columns = {"src": names[given["pairs"][:, 0]], "dst": names[given["pairs"][:, 1]]}
    edges = write(tmp_path / "edges.parquet", pa.table(columns))
    nodes = node_table(given).set_column(0, "ID", pa.array(names))
    nodes = write(tmp_path / "nodes.parquet", nodes)
    partition_files(edges, tmp_path / "tables", 3, method, node_table=nodes)
    columns = dict(zip(("src", "dst"), given["pairs"].T, strict=True))
    plain = write(tmp_path / "plain.parquet", pa.table(columns))
    nodes_in_order = write(tmp_path / "in_order.parquet", node_table(given))
    partition_files(plain, tmp_path / "plain", 3, method, node_table=nodes_in_order)
    both = parts(tmp_path / "plain"), parts(tmp_path / "tables")
    for want, got in zip(*both, strict=True):
        assert torch.equal(want.edge_index, got.edge_index)
        assert set(want.node) == set(got.node)
        assert all(torch.equal(want.node[name], got.node[name]) for name in want.node)


def test_an_end_that_is_no_node_is_named(tmp_path):
    columns = {"src": ["a", "b", "d"], "dst": ["b", "c", "a"]}
    edges = write(tmp_path / "edges.parquet", pa.table(columns))
    table = pa.table({"id": ["a", "b", "c"], "y": [0, 1, 0]})
    nodes = write(tmp_path / "nodes.parquet", table)
    with pytest.raises(
        ValueError, match=r"edge 2 has in 'src' the node 'd'.*no row of"
    ):
        partition_files(edges, tmp_path / "out", 1, node_table=nodes)
    np.save(tmp_path / "edges.npy", np.array([[0], [1]]))
    with pytest.raises(ValueError, match=r"not 0 .. 2.*edges.npy one \(.csv"):
        partition_files(tmp_path / "edges.npy", tmp_path / "out", 1, node_table=nodes)


def test_texts_and_weights_in_a_csv(tmp_path, monkeypatch):
    monkeypatch.setattr(arrow_tables, "BLOCK", 64)
    given = numbers()
    names = [f"node {k}" for k in range(N)]
    ends = [[names[k] for k in end] for end in given["pairs"].T]
    columns = {"from": ends[0], "edge_weight": given["edge_weight"], "to": ends[1]}
    ids = {"id": names, "y": given["y"]}
    for kind, folder in ((".parquet", "arrow"), (".csv.gz", "text")):
        files = []
        for name, table in (("edges", pa.table(columns)), ("nodes", pa.table(ids))):
            files.append(tmp_path / (name + kind))
            if kind == ".parquet":
                write(files[-1], table)
            else:
                from pyarrow import csv

                with pa.CompressedOutputStream(str(files[-1]), "gzip") as out:
                    csv.write_csv(table, out)
        partition_files(files[0], tmp_path / folder, 3, node_table=files[1])
    for want, got in zip(
        parts(tmp_path / "arrow"), parts(tmp_path / "text"), strict=True
    ):
        assert torch.equal(want.edge_index, got.edge_index)
        assert torch.equal(want.node["y"], got.node["y"])
        assert torch.equal(want.edge["edge_weight"], got.edge["edge_weight"])


def test_nodes_of_a_table_are_each_there_once(tmp_path):
    given = numbers()
    edges = write(tmp_path / "edges.parquet", edge_table(given, ("From", "To")))
    twice = np.arange(N)
    twice[3] = 4
    nodes = write(tmp_path / "nodes.parquet", node_table(given, twice))
    with pytest.raises(ValueError, match=r"'id' holds 4 2 times"):
        partition_files(edges, tmp_path / "out", 2, node_table=nodes)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nonsense PAR1")
    with pytest.raises(ValueError, match=r"bad.parquet: cannot be read"):
        partition_files(edges, tmp_path / "out", 2, node_table=tmp_path / "bad.parquet")
    with pytest.raises(ValueError, match=r"none.parquet: missing"):
        partition_files(tmp_path / "none.parquet", tmp_path / "out", 2)

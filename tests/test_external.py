"""Graphs in files: every format, a chunk at a time, and what is refused."""

import gzip
import re
import tracemalloc
import zipfile
from itertools import product

import numpy as np
import pytest
import tiers
import torch
from torch_geometric.data import Data

from pyg_distcomm.cli import main
from pyg_distcomm.datasets import load_dataset
from pyg_distcomm.partition import arrow_tables, cutters
from pyg_distcomm.partition.cutters import METHODS, cut
from pyg_distcomm.partition.external import partition_files
from pyg_distcomm.partition.folder import read_part, verify_folder, write_folder
from pyg_distcomm.partition.partition import imbalance, report

pa = pytest.importorskip("pyarrow")
from pyarrow import csv, parquet  # noqa: E402

N, M = 50, 300


def graph(seed=0):
    g = torch.Generator().manual_seed(seed)
    data = Data(
        x=torch.randn(N, 5, generator=g),
        edge_index=torch.randint(0, N, (2, M), generator=g),
        edge_attr=torch.randn(M, 2, generator=g),
        y=torch.randint(0, 3, (N,), generator=g),
        train_mask=torch.rand(N, generator=g) < 0.4,
    )
    data.edge_index[:, 5] = 7  # a self-loop
    data.edge_index[0, 0] = N - 1  # so that the largest id tells the number
    return data


def same_folders(got, want, parts):
    assert verify_folder(got) == []
    for part in range(parts):
        a, b = read_part(got, part), read_part(want, part)
        assert a.partition.same_as(b.partition)
        assert a.num_edges_global == b.num_edges_global
        for name in ("node_gid", "edge_gid", "edge_index"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name
        for kind in ("node", "edge"):
            left, right = getattr(a, kind), getattr(b, kind)
            assert left.keys() == right.keys()
            for name, value in left.items():
                assert value.dtype == right[name].dtype, name
                assert torch.equal(value, right[name]), name
        assert a.graph == b.graph == {}


def as_text(edges, between=" "):
    return "".join(f"{u}{between}{v}\n" for u, v in edges.t().tolist())


def write_arrays(folder, data):
    """Writes edges and attributes; returns the path and the options of partition_files."""
    folder.mkdir()
    for name, value in data.to_dict().items():
        np.save(folder / f"{name}.npy", value)
    nodes = {name: folder / f"{name}.npy" for name in ("x", "y", "train_mask")}
    files = {"node_files": nodes, "edge_files": {"edge_attr": folder / "edge_attr.npy"}}
    return folder / "edge_index.npy", files


def write_text(path, text):
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", newline="") as file:
        file.write(text)
    return path


FORMATS = {
    "e.txt": lambda p, e: write_text(p, "# a comment\n\n% two\n" + as_text(e)),
    "e.el": lambda p, e: write_text(p, as_text(e, "\t")[:-1]),  # no last newline
    "e.csv": lambda p, e: write_text(p, "source,target\n" + as_text(e, ",")),
    "excel.csv": lambda p, e: write_text(p, "\ufeffsource,target\n" + as_text(e, ",")),
    "marked.txt": lambda p, e: write_text(p, "\ufeff" + as_text(e)),
    "e.tsv": lambda p, e: write_text(p, as_text(e, "\t").replace("\n", "\r\n")),
    "e.txt.gz": lambda p, e: write_text(p, as_text(e, ";")),
    "e.csv.gz": lambda p, e: write_text(p, as_text(e, ", ")),
    "wide.npy": lambda p, e: np.save(p, e.numpy()),
    "tall.npy": lambda p, e: np.save(p, e.t().contiguous().numpy()),
    "fortran.npy": lambda p, e: np.save(p, np.asfortranarray(e.numpy())),
    "small.npy": lambda p, e: np.save(p, e.numpy().astype(np.uint8)),
}


@pytest.mark.parametrize("name", FORMATS)
@tiers.parametrize("chunk", [7, 1 << 18], [7])
def test_every_format_gives_the_same_parts(tmp_path, monkeypatch, name, chunk):
    monkeypatch.setattr(arrow_tables, "CHUNK", chunk)
    monkeypatch.setattr(arrow_tables, "BLOCK", 64 * chunk)
    edges = graph().edge_index
    FORMATS[name](tmp_path / name, edges)
    owners = cut(edges, N, 3, "random")
    data = Data(edge_index=edges, num_nodes=N)
    want = write_folder(tmp_path / "want", data, owners)
    got = partition_files(tmp_path / name, tmp_path / "got", 3, owners.owner)
    assert got == want
    same_folders(tmp_path / "got", tmp_path / "want", 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([name, "got", "want"])


@pytest.mark.parametrize("chunk", [5, 1 << 18])
def test_attributes_travel(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(arrow_tables, "CHUNK", chunk)
    monkeypatch.setattr(arrow_tables, "BYTES", 16 * chunk)
    data = graph()
    path, files = write_arrays(tmp_path / "g", data)
    np.save(tmp_path / "g" / "x.npy", data.x.numpy().astype(">f4"))  # another machine's
    owners = cut(data.edge_index, N, 4, "ldg")
    want = write_folder(tmp_path / "want", data, owners)
    got = partition_files(path, tmp_path / "got", 4, owners.owner, **files)
    assert got == want
    assert got.train != (0,) * 4
    same_folders(tmp_path / "got", tmp_path / "want", 4)


@tiers.cover(("method", "refine"), METHODS, [False, True])
def test_files_are_cut_as_in_memory(tmp_path, monkeypatch, method, refine):
    monkeypatch.setattr(arrow_tables, "CHUNK", 33)
    monkeypatch.setattr(cutters, "CHUNK", 70)
    data = graph(3)
    path, files = write_arrays(tmp_path / "g", data)
    grid = (2, 2, 1)
    how = {"seed": 2, "refine": refine, "grid": grid}
    owners = cut(data.edge_index, N, 4, method, train_mask=data.train_mask, **how)
    got = partition_files(path, tmp_path / "got", 4, method, **how, **files)
    assert got == report(data.edge_index, owners, data.train_mask, grid)
    assert read_part(tmp_path / "got", 0).partition.same_as(owners)


@pytest.mark.parametrize("name", ["e.txt", "wide.npy"])
def test_undirected_edges_get_their_reverse(tmp_path, monkeypatch, name):
    monkeypatch.setattr(arrow_tables, "CHUNK", 8)
    data = graph()
    edges = data.edge_index
    want, rows = [], []
    for k, (u, v) in enumerate(edges.t().tolist()):
        want += [[u, v]] if u == v else [[u, v], [v, u]]
        rows += [k] if u == v else [k, k]
    whole = Data(edge_index=torch.tensor(want).t(), edge_attr=data.edge_attr[rows])
    whole.num_nodes = N
    FORMATS[name](tmp_path / name, edges)
    np.save(tmp_path / "w.npy", data.edge_attr.numpy())
    owners = cut(edges, N, 3, "random")
    write_folder(tmp_path / "want", whole, owners)
    how = {"undirected": True, "edge_files": {"edge_attr": tmp_path / "w.npy"}}
    partition_files(tmp_path / name, tmp_path / "got", 3, owners.owner, **how)
    same_folders(tmp_path / "got", tmp_path / "want", 3)


WRONG = {
    "a letter": ("e.txt", "0 1\n2 b\n", "in 'f1' the node 'b', wanted"),
    "one id": ("e.txt", "0 1\n3\n", "Row #2: Expected 2 columns, got 1: 3"),
    "a table": ("e.csv", "a,b\n0,1\n1,2,3\n", "Row #3: Expected 2 columns, got 3"),
    "fraction": ("e.txt", "0 1\n1.5 2\n", "in 'f0' the node '1.5', wanted"),
    "negative": ("e.txt", "0 -1\n", "edge 0 has in 'f1' the node '-1'"),
    "huge": ("e.txt", "0 1\n0 2147483647\n", "edge 1 has the node 2147483647, but"),
    "large": ("e.txt", "0 1\n0 9\n", "edge 1 has the node 9, but ids are 0 .. 4"),
    "return": ("e.txt", "0 1\n1\r0 5\n", "Row #2: Expected 2 columns, got 1: 1"),
    "zero": ("e.txt", "0 1\n1 01\n", "edge 1 has in 'f1' the node '01', wanted 0 .. n"),
    "index": ("e.csv", ",src,dst\n0,0,1\n", "a name of each column.*index=False"),
    "gaps": ("e.txt", "0 2000000000\n5 7\n", "ids up to 2000000000, and each"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("packed", [False, True])
def test_wrong_lines_are_named(tmp_path, name, packed):
    file, text, words = WRONG[name]
    path = write_text(tmp_path / (file + ".gz" * packed), text)
    count = 5 if name == "large" else None
    with pytest.raises(ValueError, match=words) as caught:
        partition_files(path, tmp_path / "out", 2, num_nodes=count)
    assert str(path) in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def damage(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def test_wrong_files_are_named_and_leave_nothing(tmp_path):
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    edges = graph().edge_index

    def refused(words, path, **options):
        with pytest.raises(ValueError, match=words):
            partition_files(path, out, 2, "stream", **options)
        assert [p.name for p in tmp_path.iterdir()] == ["in"]

    refused("none.txt: missing", source / "none.txt")
    refused("in: is a folder", source)
    np.save(source / "f.npy", np.zeros((2, 3)))
    refused(r"holds float64 \[2, 3\], but edges are integers", source / "f.npy")
    np.save(source / "e.npy", np.array([[0, 1], [1, -2], [7, 3]]))
    refused("edge 1 has the node -2", source / "e.npy")
    np.save(source / "e.npy", np.array([[0, 1], [1, 2], [7, 3]]))
    refused(r"edge 2 has the node 7, but ids are 0 .. 4", source / "e.npy", num_nodes=5)
    np.save(source / "big.npy", edges.numpy())
    damage(source / "big.npy")
    refused("big.npy: cannot be read: mmap length is greater", source / "big.npy")
    np.savez(source / "z.npz", edge_index=edges.numpy())
    refused(r"z.npz: edges are read from .*of an \.npz file, unpack", source / "z.npz")
    write_text(source / "t.txt.gz", as_text(edges))
    damage(source / "t.txt.gz")
    refused("t.txt.gz: cannot be read", source / "t.txt.gz")
    np.save(source / "feat.npy", np.zeros((7, 2)))
    text = write_text(source / "t.txt", as_text(edges))
    given = {"node_files": {"x": source / "feat.npy"}}
    refused(r"feat.npy: has the shape \[7, 2\], but there are 50 nodes", text, **given)
    np.save(source / "feat.npy", np.array(["a"] * N))
    refused("holds <U1; a partition", text, **given)
    np.save(source / "feat.npy", np.asfortranarray(np.zeros((N, 2))))
    refused("is in Fortran order", text, **given)
    with pytest.raises(ValueError, match="unknown partition method 'best'"):
        partition_files(text, out, 2, "best")


def with_head(path, head, rows=b""):
    """A .npy file whose head says what it should not."""
    line = repr({"descr": "<i8", "fortran_order": False, **head}).encode().ljust(117)
    size = (len(line) + 1).to_bytes(2, "little")
    path.write_bytes(b"\x93NUMPY\x01\x00" + size + line + b"\n" + rows)
    return path


HEADS = [
    ({"shape": (2, -3)}, "cannot be read"),
    ({"shape": (True, 2)}, "cannot be read"),
    ({"shape": (2, 10**15)}, "cannot be read"),
    ({"shape": (3, 2)}, "cannot be read"),
    ({"shape": (2, 1)}, "but its header says int64 [2, 1]"),
    ({"shape": (2, "1")}, "cannot be read"),
    ({"shape": (2, 2), "descr": "<i9"}, "cannot be read"),
    ({"shape": (2, 2), "descr": "O"}, "Python objects"),
    ({"shape": (2, 2), "descr": [("a", "<i8")]}, "but edges are integers"),
    ({"shape": (2, 2), "more": 1}, "cannot be read"),
]


@pytest.mark.parametrize("asked", ["edges", "x"])
@pytest.mark.parametrize(("head", "words"), HEADS)
def test_arrays_that_are_not_what_they_say_are_refused(tmp_path, head, words, asked):
    rows, good = bytes(32), np.array([[0, 1], [1, 0]])
    bad = with_head(tmp_path / "bad.npy", head, rows)
    path, out = bad if asked == "edges" else tmp_path / "good.npy", tmp_path / "out"
    np.save(tmp_path / "good.npy", good)
    options = {} if asked == "edges" else {"node_files": {"x": bad}}
    if asked == "x" and "edges are" in words:
        words = "a partition folder keeps numbers"
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        partition_files(path, out, 2, **options)
    assert str(bad) in str(caught.value)
    assert not out.exists()
    with zipfile.ZipFile(tmp_path / "bad.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(bad, "edge_index.npy")
    if words == "cannot be read":
        with pytest.raises(ValueError, match=r"bad\.npz: cannot be read"):
            load_dataset(str(tmp_path / "bad.npz"))


@pytest.mark.parametrize("name", ["e.txt", "e.csv", "e.npy"])
def test_no_edges_tell_no_number_of_nodes(tmp_path, name):
    path = tmp_path / name
    if name.endswith("npy"):
        np.save(path, np.zeros((2, 0), np.int64))
    else:
        path.write_text("source,target\n" if name == "e.csv" else "# nothing\n")
    with pytest.raises(ValueError, match=rf"{name}: holds no edges.*--num-nodes"):
        partition_files(path, tmp_path / "out", 2)
    assert sum(partition_files(path, tmp_path / "out", 2, num_nodes=4).nodes) == 4


def test_the_command_takes_files(tmp_path, capsys):
    data = graph()
    path, files = write_arrays(tmp_path / "g", data)
    how = ["--parts", "4", "--method", "random", "--refine", "--grid", "2", "2", "1"]
    how += [f"--{k[:4]}-file={n}={f}" for k, v in files.items() for n, f in v.items()]
    assert main(["partition", str(path), str(tmp_path / "out"), *how]) == 0
    table, err = capsys.readouterr()
    assert err == ""
    assert "on a grid of 2 x 2 x 1" in table
    share = read_part(tmp_path / "out", 2)
    assert torch.equal(share.node["x"], data.x[share.node_gid])
    assert torch.equal(share.edge["edge_attr"], data.edge_attr[share.edge_gid])
    assert main("partition digits o --parts 2 --undirected".split()) == 2
    assert "--undirected: got the graph 'digits', wanted" in capsys.readouterr().err


def communities(count, size, degree, seed=0):
    """Communities with few edges between them, nodes and edges in random order."""
    g = torch.Generator().manual_seed(seed)
    n = count * size
    source = torch.randint(0, n, (n * degree,), generator=g)
    near = source // size * size + torch.randint(0, size, source.shape, generator=g)
    far = torch.rand(source.shape, generator=g) < 0.05
    target = torch.where(far, torch.randint(0, n, source.shape, generator=g), near)
    place = torch.randperm(n, generator=g)
    return place[torch.stack([source, target])], n


@pytest.mark.parametrize("num_parts", [2, 5, 8, 20])
def test_streaming_finds_communities(num_parts):
    edges, n = communities(40, 50, 8)
    figures = report(edges, cut(edges, n, num_parts, "stream"))
    blind = report(edges, cut(edges, n, num_parts, "random"))
    assert figures.volume < 0.5 * blind.volume
    assert figures.node_imbalance <= max(1.03, -(-n // num_parts) * num_parts / n)
    assert imbalance(figures.edges) < 1.08


def test_memory_is_of_the_nodes_not_of_the_edges_or_features(tmp_path, monkeypatch):
    monkeypatch.setattr(arrow_tables, "CHUNK", 1 << 12)
    monkeypatch.setattr(arrow_tables, "BYTES", 1 << 16)
    n, m, parts = 10_000, 200_000, 8
    np.save(tmp_path / "e.npy", np.random.default_rng(0).integers(0, n, (2, m)))
    np.save(tmp_path / "x.npy", np.arange(n * 99, dtype=np.float32).reshape(n, 99))
    how = {"num_nodes": n, "node_files": {"x": tmp_path / "x.npy"}}
    cut(torch.tensor([[0], [1]]), 9, 2, "stream")  # loads its loops
    tracemalloc.start()
    try:
        partition_files(tmp_path / "e.npy", tmp_path / "out", parts, **how)
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert held < n * (50 + 6 * parts) + 2**20


# Tables of Arrow -------------------------------------------------------------------------


def write(path, table):
    """Writes a table in the format that its path names, in groups of few rows."""
    if path.name.endswith(".csv.gz"):
        with pa.CompressedOutputStream(str(path), "gzip") as out:
            csv.write_csv(table, out)
    elif path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=37)
    else:
        with (
            pa.OSFile(str(path), "wb") as file,
            pa.ipc.new_file(file, table.schema) as w,
        ):
            w.write_table(table, max_chunksize=37)
    return path


def edge_table(data, names=("src", "dst"), ids=None):
    ends = data.edge_index.numpy()
    src, dst = ends if ids is None else np.array(ids)[ends]
    weight = data.edge_attr[:, 0].numpy()
    return pa.table({names[0]: src, "edge_weight": weight, names[1]: dst})


def node_table(data, order=None, fixed=True, ids=None):
    order = np.arange(N) if order is None else order
    kind = pa.list_(pa.float32(), 5) if fixed else pa.list_(pa.float32())
    columns = {name: data[name].numpy()[order] for name in ("y", "train_mask")}
    columns["x"] = pa.array(data.x[order].tolist(), kind)
    return pa.table({"id": order if ids is None else ids, **columns})


@tiers.cover(
    ("undirected", "ending"), [False, True], [".parquet", ".arrow", ".feather"]
)
def test_a_table_is_cut_as_arrays_are(tmp_path, monkeypatch, ending, undirected):
    monkeypatch.setattr(arrow_tables, "ROWS", 16)
    data = graph()
    path, files = write_arrays(tmp_path / "g", data)
    np.save(tmp_path / "g" / "w.npy", data.edge_attr[:, 0].numpy())
    files["edge_files"] = {"edge_weight": tmp_path / "g" / "w.npy"}
    how = {"seed": 1, "undirected": undirected}
    partition_files(path, tmp_path / "arrays", 3, **files, **how)
    edges = write(tmp_path / f"edges{ending}", edge_table(data))
    mixed = np.random.default_rng(1).permutation(N)
    nodes = write(tmp_path / f"nodes{ending}", node_table(data, mixed, undirected))
    flags = ["--node-table", str(nodes), "--seed", "1", "--method", "stream"]
    flags += ["--undirected"] if undirected else []
    out = str(tmp_path / "tables")
    assert main(["partition", str(edges), out, "--parts", "3", *flags]) == 0
    same_folders(out, tmp_path / "arrays", 3)


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"a": [0], "b": [1], "c": [2]}, r"two columns named src and dst.*got a, b, c"),
        ({"src": [0, 7], "dst": [1, -2]}, r"edge 1 has in 'dst' the node -2"),
        ({"src": [0.5], "dst": [1]}, r"edge 0 has in 'src' the node 0.5, wanted 0"),
        ({"src": ["a"], "dst": ["b"]}, r"in 'src' the node 'a', .* a table of nodes"),
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


NUMBERS = np.random.default_rng(2).integers(0, 2**40, N) * 2 + np.arange(N) % 2
TEXTS = pa.array([f"node {k}" for k in NUMBERS])
VIEWS = TEXTS.cast(getattr(pa, "string_view", pa.string)())  # since pyarrow 16
FORMS = [(TEXTS.dictionary_encode(), ".parquet"), (VIEWS, ".arrow")]


@pytest.mark.parametrize(
    ("ids", "ending"), [*product([NUMBERS, TEXTS], [".parquet", ".csv.gz"]), *FORMS]
)
@tiers.parametrize("method", ["stream", "block"], ["stream"])
def test_ids_of_any_kind_are_looked_up(tmp_path, monkeypatch, ids, method, ending):
    monkeypatch.setattr(arrow_tables, "MOST_ROWS", 17)
    monkeypatch.setattr(arrow_tables, "BLOCK", 64)
    data = graph()
    for name, given in (("want", None), ("got", ids)):
        nodes = node_table(data, ids=given)
        nodes = nodes.drop(["x"]) if ending == ".csv.gz" else nodes  # no text
        nodes = write(tmp_path / f"{name}_nodes{ending}", nodes)
        if given is NUMBERS and ending == ".parquet":  # as pandas may hold them
            given = NUMBERS.astype(float)
        edges = write(tmp_path / f"{name}_edges{ending}", edge_table(data, ids=given))
        partition_files(edges, tmp_path / name, 3, method, node_table=nodes)
    same_folders(tmp_path / "got", tmp_path / "want", 3)


MOST = [f"{2**64 - 1}", f"{2**64}"]
AS_WRITTEN = {  # text of edges, ids of nodes in a table and as text: ends or what is told
    "zeros": ("src,dst\n01,1\n1, 2\n", ["1", "01", "2"], [[1, 0], [0, 2]]),
    "digits": ("a,b\n" + ",".join(MOST), MOST, [[0], [1]]),
    "a time": ("src,dst\n2020-01-01 00:00:00,true\n", ["true", "2020-01-01 00:00:00"]),
    "names": ("über,item\na,b\n", ["a", "b"], [[0], [1]]),
    "known names": ("from,to\nto,from\n", ["from", "to"], [[1], [0]]),
    "no names": ("b, a\na,b\n", ["a", "b"], [[1, 0], [0, 1]]),
    "either": ("a,item\nb,a\n", ["a", "b"], "first line, a, item, may be an edge of"),
    "no zero": ("src,dst\n5,01\n", ["1", "5"], "node '01', which is in no row of 'id'"),
}


@pytest.mark.parametrize("name", AS_WRITTEN)
@pytest.mark.parametrize("table", ["nodes.parquet", "nodes.csv.gz"])
def test_ids_of_texts_are_what_is_written(tmp_path, name, table):
    text, ids, want = (*AS_WRITTEN[name], [[1], [0]])[:3]
    edges = write_text(tmp_path / "edges.csv", text)
    nodes = write(tmp_path / table, pa.table({"id": ids}))
    if isinstance(want, str):
        with pytest.raises(ValueError, match=want):
            partition_files(edges, tmp_path / "out", 1, node_table=nodes)
        return
    partition_files(edges, tmp_path / "out", 1, node_table=nodes)
    assert read_part(tmp_path / "out", 0).edge_index.tolist() == want


def test_wrong_tables_of_nodes_are_named(tmp_path):
    edges = {"src": ["a", "b", "d"], "dst": ["b", "c", "a"]}
    edges = write(tmp_path / "edges.parquet", pa.table(edges))
    nodes = write(tmp_path / "nodes.parquet", pa.table({"id": ["a", "b", "c"]}))
    arrays = tmp_path / "edges.npy"
    np.save(arrays, np.array([[0], [1]]))
    twice = node_table(graph(), [0, 1, 2, 4, *range(4, N)])
    twice = write(tmp_path / "twice.parquet", twice)
    numbered = write(tmp_path / "numbered.parquet", edge_table(graph(), ("From", "To")))
    unnamed = write_text(tmp_path / "unnamed.csv", "0,1.5\n1,0.5\n")
    bad = tmp_path / "bad.parquet"
    bad.write_bytes(b"PAR1 nonsense PAR1")
    for path, table, why in (
        (edges, nodes, r"edge 2 has in 'src' the node 'd'.*no row of"),
        (arrays, nodes, r"not 0 .. 2.*edges.npy one \(.csv"),
        (numbered, twice, r"'id' holds 4 2 times"),
        (numbered, unnamed, r"wanted a name of each column in the first line.*'f0'"),
        (numbered, bad, r"bad.parquet: cannot be read"),
        (tmp_path / "none.parquet", None, r"none.parquet: missing"),
    ):
        with pytest.raises(ValueError, match=why):
            partition_files(path, tmp_path / "out", 2, node_table=table)

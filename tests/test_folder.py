import json
import os
import re
import shutil
import socket
import subprocess
import warnings
from pathlib import Path

import numpy as np
import pytest
import tiers
import torch
from test_cutters import rng
from test_saving import flips
from torch_geometric.data import Data

from pyg_distcomm.partition import atomic
from pyg_distcomm.partition import folder as folder_module
from pyg_distcomm.partition.atomic import sha256
from pyg_distcomm.partition.cutters import cut
from pyg_distcomm.partition.folder import (
    attribute_kinds,
    read_part,
    verify_folder,
    write_folder,
)
from pyg_distcomm.partition.layout import META, folder_meta, is_folder, write_meta
from pyg_distcomm.partition.part_share import with_tensors

N, E, P = 41, 230, 4


def halves(data):
    return cut(data.edge_index, data.num_nodes, 2, "block")


def graph(seed=0):
    """A directed graph with repeats, loops, isolated nodes and every sort of value."""
    draw = rng(seed)
    edge_index = torch.randint(0, N - 6, (2, E), generator=draw)
    edge_index[:, 7] = edge_index[:, 3]
    edge_index[1, 9] = edge_index[0, 9]
    return Data(
        x=torch.randn(N, 5, generator=draw),
        edge_index=edge_index,
        y=torch.randint(0, 3, (N,), generator=draw),
        train_mask=torch.rand(N, generator=draw) < 0.4,
        splits=torch.rand(N, 10, generator=draw) < 0.5,
        half=torch.randn(N, 2, generator=draw).bfloat16(),
        tiny=torch.randn(N, generator=draw).to(torch.float8_e4m3fn),
        wave=torch.randn(N, 2, dtype=torch.complex64, generator=draw),
        rank=np.arange(N, dtype=np.int16),
        no_columns=torch.empty(N, 0),
        edge_attr=torch.randn(E, 3, generator=draw),
        edge_weight=torch.rand(E, generator=draw),
        prior=torch.tensor([0.2, 0.3, 0.5]),
        temperature=torch.tensor(1.5),
        seeds=torch.empty(0, dtype=torch.int32),
        name="caf\u00e9",
        year=2024,
        rate=0.1,
        nothing=None,
        tags=["a", {"b": [1, 2.5, True]}],
    )


@pytest.fixture
def written(tmp_path):
    data = graph()
    partition = cut(data.edge_index, N, P, "random", seed=1)
    write_folder(tmp_path / "out", data, partition)
    return tmp_path / "out", data, partition


def same(got, want):
    want = torch.as_tensor(want)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    bits = (t.contiguous().view(-1).view(torch.uint8) for t in (got, want))
    assert not got.numel() or torch.equal(*bits)


@pytest.mark.parametrize("verify", ["sizes", "checksums"])
def test_all_comes_back(written, verify):
    out, data, partition = written
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shares = [read_part(out, p, verify=verify) for p in range(P)]
    for part, share in enumerate(shares):
        assert share.partition.same_as(partition)
        assert share.num_edges_global == E
        same(share.node_gid, partition.gids(part))
        home = partition.owner_of(data.edge_index[1])
        same(share.edge_gid, (home == part).nonzero().view(-1))
        same(share.edge_index, data.edge_index[:, share.edge_gid])
        for name, value in share.node.items():
            same(value, torch.as_tensor(data[name])[share.node_gid])
        for name, value in share.edge.items():
            same(value, data[name][share.edge_gid])
        for name in ("prior", "temperature", "seeds"):
            same(share.graph[name], data[name])
        for name in ("name", "year", "rate", "tags"):
            assert share.graph[name] == data[name]
        names = [name for name in data.to_dict() if name != "edge_index"]
        assert list(share.node) == [n for n in names if n in share.node]
        assert (len(share.node), len(share.edge)) == (9, 2)
    assert list(attribute_kinds(data)) == names
    assert sum(share.edge_gid.numel() for share in shares) == E


def test_a_part_is_read_without_the_others(written):
    out, data, _ = written
    (out / "part_00002" / "node__x.npy").unlink()
    assert len(verify_folder(out)) == 1
    for part in (0, 2, 3):
        shutil.rmtree(out / f"part_{part:05d}")
    for verify in ("sizes", "checksums"):
        share = read_part(out, 1, verify=verify)
        same(share.node["x"], data.x[share.node_gid])
    with pytest.raises(ValueError, match=r"part_00002.*missing"):
        read_part(out, 2)


def test_a_mapped_tensor_can_be_changed_and_the_file_stays(written):
    out, data, _ = written
    share = read_part(out, 0)
    share.node["x"].zero_()
    share.partition.owner.zero_()
    again = read_part(out, 0, verify="checksums")
    same(again.node["x"], data.x[again.node_gid])


def test_the_figures_are_those_of_the_report(written):
    out, _, partition = written
    told = f"PartShare(1/4, {partition.sizes[1]} of 41 nodes, "
    assert repr(read_part(out, 1)).startswith(told)
    meta = folder_meta(out)
    assert is_folder(out)
    assert (meta["num_nodes"], meta["num_edges"], meta["num_parts"]) == (N, E, P)
    assert sum(meta["report"]["nodes"]) == N
    assert sum(meta["report"]["train"]) == int(graph().train_mask.sum())
    half = {"kind": "node", "dtype": "bfloat16", "shape": [N, 2]}
    assert meta["attributes"]["half"] == half
    assert not list(out.rglob("*.p*kl"))
    assert verify_folder(out) == verify_folder(out, checksums=False) == []


@pytest.mark.parametrize(
    ("n", "e", "parts"),
    [(0, 0, 2), tiers.rarely(1, 0, 1), (3, 5, 8), tiers.rarely(300, 2, 260), (5, 0, 5)],
)
def test_small_and_empty_graphs(tmp_path, n, e, parts):
    edge_index = torch.randint(0, max(n, 1), (2, e), generator=rng())
    data = Data(x=torch.randn(n, 2), edge_index=edge_index, edge_attr=torch.ones(e, 1))
    write_folder(tmp_path / "out", data, cut(edge_index, n, parts, "block"))
    assert verify_folder(tmp_path / "out") == []
    for part in range(parts):
        share = read_part(tmp_path / "out", part, verify="checksums")
        same(share.node["x"], data.x[share.node_gid])
        same(share.edge_index, edge_index[:, share.edge_gid])


def test_odd_names_make_safe_files(tmp_path):
    data = Data(edge_index=torch.tensor([[0], [1]]), num_nodes=3)
    for name in ("../../up", "a b", "\u00fc", "."):
        data[name] = torch.arange(3)
    write_folder(tmp_path / "out", data, halves(data))
    assert os.listdir(tmp_path) == ["out"]
    share = read_part(tmp_path / "out", 1)
    assert set(share.node) == {"../../up", "a b", "\u00fc", "."}
    same(share.node["../../up"], share.node_gid)


# --- damage ---------------------------------------------------------------------------

FILES = """
owner.npy graph__prior.npy part_00001/node_gid.npy part_00001/edge_gid.npy
part_00001/edge_index.npy part_00001/node__x.npy part_00001/edge__edge_attr.npy
""".split()


def reshaped(path):
    array = np.load(path)
    other = array.reshape(*array.shape, 1) if array.ndim < 2 else array.T.copy()
    np.save(path, other)


@tiers.parametrize("name", FILES, slice(0, None, 2))
def test_a_file_that_is_short_missing_or_of_another_shape_is_found(written, name):
    path = written[0] / name
    good = path.read_bytes()
    for damage in (lambda p: os.truncate(p, len(good) - 1), Path.unlink, reshaped):
        damage(path)
        with pytest.raises(ValueError, match=name):
            read_part(written[0], 1, verify="sizes")
        problems = verify_folder(written[0], checksums=False)
        assert any(name in problem for problem in problems)
        path.write_bytes(good)


def rewrite(out, name, change):
    """Changes a file, and META.json with it, so that only its meaning is wrong."""
    array = np.load(out / name)
    change(array)
    np.save(out / name, array)
    meta = folder_meta(out)
    size = (out / name).stat().st_size
    meta["files"][name] = {"bytes": size, "sha256": sha256(out / name)}
    write_meta(out, meta)


def swap_ends(array):
    array[[0, -1]] = array[[-1, 0]]


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("part_00001/node_gid.npy", swap_ends, "not the nodes"),
        ("part_00001/edge_gid.npy", swap_ends, "do not ascend"),
        ("part_00001/edge_gid.npy", lambda a: a.fill(0), "do not ascend"),
        ("part_00001/edge_gid.npy", lambda a: a.__setitem__(-1, E), "out of range"),
        ("part_00001/edge_index.npy", lambda a: a.fill(-1), "out of range"),
        ("part_00001/edge_index.npy", lambda a: a.fill(N), "out of range"),
        ("owner.npy", lambda a: a.fill(9), "is 9, but the parts are 0 .. 3"),
        ("owner.npy", lambda a: a.fill(0), "not as large"),
        ("owner.npy", swap_ends, "not the partition of META.json"),
    ],
)
def test_files_that_disagree_are_found(written, name, change, words):
    out = written[0]
    rewrite(out, name, change)
    problems = verify_folder(out)
    assert any(name in problem and words in problem for problem in problems), problems
    if "META" not in words:  # of which a part alone knows nothing
        with pytest.raises(ValueError, match=words) as caught:
            read_part(out, 1, verify="sizes")
        assert name in str(caught.value)


def test_edges_of_another_part_are_found(written):
    out, _, partition = written
    stranger = int(partition.gids(0)[0])
    name = "part_00001/edge_index.npy"
    before = (out / name).read_bytes()
    rewrite(out, name, lambda a: a.__setitem__((1, 0), stranger))
    assert any("another part" in problem for problem in verify_folder(out))
    (out / name).write_bytes(before)
    rewrite(out, name, lambda a: None)
    name = "part_00001/edge_gid.npy"
    stranger = int(np.load(out / "part_00000/edge_gid.npy")[-1])
    rewrite(out, name, lambda a: a.put(range(a.size), np.sort([*a[:-1], stranger])))
    assert verify_folder(out) == [
        f"{out / name}: an edge is held by an earlier part too"
    ]


def forged(meta):
    """METAs that `write_meta` never gets."""
    report, x = meta["report"], meta["attributes"]["x"]
    for name, values in {
        "num_nodes": [1.0, -1],
        "num_edges": [10**15],
        "num_parts": ["4", 5],
        "partition": [None],
        "values": [[]],
        "attributes": [["x"], {"x": 3}],
        "files": [3, {"owner.npy": 3}],
        "report": [1, report | {"more": 1}, report | {"edge_cut": "x"}],
    }.items():
        yield from (meta | {name: value} for value in values)
        yield {k: v for k, v in meta.items() if k != name}
    for name in ("nodes", "edges", "train", "halo_rows", "send_rows"):
        for value in ([-1] * P, [True] * P, [0] * (P + 1), 7):
            yield meta | {"report": report | {name: value}}
    for wrong in ({"kind": "../x"}, {"dtype": "nn"}, {"dtype": 8}, {"shape": []}):
        yield meta | {"attributes": meta["attributes"] | {"x": x | wrong}}


def test_a_forged_meta_is_refused(written):
    out = written[0]
    for meta in forged(folder_meta(out)):
        write_meta(out, {k: v for k, v in meta.items() if k != "digest"})
        with pytest.raises(ValueError, match="does not write") as caught:
            read_part(out, 0)
        assert str(out / META) in str(caught.value)
        assert verify_folder(out) == [str(caught.value)]


def test_no_forged_meta_makes_a_reader_take_memory_or_leave_the_folder(written):
    out = written[0]
    meta, many = folder_meta(out), 10**13
    meta["files"]["../secret"] = meta["files"]["owner.npy"]
    meta["report"]["edges"][1] += many
    write_meta(out, meta | {"num_edges": meta["num_edges"] + many})
    with pytest.raises(ValueError, match="but META"):
        read_part(out, 1)
    (problem,) = verify_folder(out)
    assert "but META.json says" in problem


def test_a_file_that_meta_does_not_name_is_not_read(written):
    out = written[0]
    meta = folder_meta(out)
    del meta["files"]["part_00001/node__x.npy"]
    write_meta(out, meta)
    with pytest.raises(ValueError, match=r"files does not name 'part_00001/node__x"):
        read_part(out, 1)


@tiers.parametrize("seed", range(3), [0])
def test_any_flipped_bit_is_found_by_default(written, seed):
    out = written[0]
    part = (str(p.relative_to(out)) for p in (out / "part_00001").iterdir())
    for name in flips(out, [META, "owner.npy", *part], seed):
        with pytest.raises(ValueError, match=re.escape(str(out / name))):
            read_part(out, 1)
    read_part(out, 1)


def test_a_damaged_meta_another_version_and_no_meta_are_refused(written):
    out = written[0]
    text = (out / META).read_text()
    meta = json.loads(text)
    altered = text.replace('"num_edges": 230', '"num_edges": 231')
    cases = [
        ("", "cannot be read"),
        ('{"format": ', "cannot be read"),
        ("[1, 2]", "is not a JSON object"),
        ('{"num_parts": 4}', "not a pyg-distcomm partition"),
        ("\xff\xfe", "cannot be read"),
        (None, "missing"),
        (altered, "altered"),
    ]
    for version in (2, 1.0, True, "1", None):
        words = f"version {version!r}, but this package reads version 1"
        cases.append(({**meta, "version": version}, words))
    for content, words in cases:
        if content is None:
            (out / META).unlink()
        elif isinstance(content, dict):
            write_meta(out, content)
        else:
            (out / META).write_bytes(content.encode("latin-1"))
        with pytest.raises(ValueError, match=rf"META.json: .*{words}"):
            read_part(out, 0)
        assert words in verify_folder(out)[0]
        assert not is_folder(out) or words.startswith(("altered", "version"))


def test_wrong_parts_and_modes_are_refused(written):
    out = written[0]
    for part in (-1, 4):
        with pytest.raises(ValueError, match=rf"got part {part}, but its parts are 0"):
            read_part(out, part)
    with pytest.raises(ValueError, match="'sizes' or 'checksums', got 'all'"):
        read_part(out, 0, verify="all")


# --- writing --------------------------------------------------------------------------


def test_what_exists_is_replaced_only_by_force(written, tmp_path):
    out, data, partition = written
    before = (out / META).read_bytes()
    with pytest.raises(ValueError, match="exists already"):
        write_folder(out, data, partition)
    assert (out / META).read_bytes() == before
    write_folder(out, data, halves(data), force=True)
    assert folder_meta(out)["num_parts"] == 2
    assert verify_folder(out) == []
    assert not (out / "part_00003").exists()
    assert os.listdir(tmp_path) == ["out"]


def test_force_does_not_remove_what_is_no_partition(tmp_path):
    data = graph()
    partition = halves(data)
    (tmp_path / "home").mkdir()
    write_folder(tmp_path / "out", data, partition)
    write_folder(tmp_path / "deep", data, partition)
    thesis = {
        "file": tmp_path / "file",
        "home": tmp_path / "home/thesis.tex",
        "out": tmp_path / "out/thesis.tex",
        "deep": tmp_path / "deep/part_00000/thesis.tex",
    }

    def kept(name, words):
        thesis[name].write_text("years of work")
        with pytest.raises(ValueError, match=words):
            write_folder(tmp_path / name, data, partition, force=True)
        assert thesis[name].read_text() == "years of work"

    kept("file", "is not a partition folder")
    kept("home", "is not a partition folder")
    (tmp_path / "home" / META).write_text('{"title": "years of work"}')
    kept("home", "is not a partition")
    kept("out", "not a file of the part")
    kept("deep", r"part_00000/thesis\.tex: not a file of the part")


@pytest.fixture
def other():
    """A process that lives until the test is over."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


@tiers.parametrize("state", ["writing", "old"], ["old"])
def test_what_a_living_writer_has_beside_stays(written, state, other):
    out, data, partition = written
    host = socket.gethostname()
    left = out.with_name(f".out.{state}-{host}-{other.pid}-01234567")
    far = out.with_name(f".out.{state}-{host}.far-1-01234567")
    out.rename(left)
    shutil.copytree(left, far)
    # of another place, "out.more"
    kin = out.with_name(f".out.more.{state}-{host}-999999-01234567")
    shutil.copytree(left, kin)
    with pytest.raises(ValueError, match=r"META.json: missing$"):
        folder_meta(out)
    write_folder(out, data, partition)
    assert left.is_dir()
    assert far.is_dir()
    other.kill()
    other.wait()
    os.utime(far, (0, 0))
    if state != "writing":  # what a killed writer has renamed comes to its place
        shutil.rmtree(out)
        with pytest.raises(ValueError, match="exists already"):
            write_folder(out, data, partition)
        assert is_folder(out)
    write_folder(out, data, partition, force=True)
    assert sorted(os.listdir(out.parent)) == [kin.name, "out"]


@pytest.mark.parametrize("fails", ["first", "disk", "rename"])
def test_a_failure_leaves_nothing_and_keeps_what_was(tmp_path, monkeypatch, fails):
    data, out = graph(), tmp_path / "out"
    if fails != "first":
        write_folder(out, data, halves(data))
    at, name, where = folder_module, "write_array", "part_00002"
    if fails == "rename":  # where two folders cannot be exchanged
        at, name, where = os, "rename", ".out.writing-"
        monkeypatch.setattr(atomic.ctypes, "CDLL", lambda *_, **__: None)
    real = getattr(at, name)

    def full_disk(path, other):
        if where in str(path):
            raise OSError(28, "No space left on device")
        return real(path, other)

    monkeypatch.setattr(at, name, full_disk)
    with pytest.raises(ValueError, match=r"make room and allow.*No space left"):
        write_folder(out, data, cut(data.edge_index, N, P, "block"), force=out.exists())
    assert os.listdir(tmp_path) == ([] if fails == "first" else ["out"])
    if fails != "first":
        assert folder_meta(out)["num_parts"] == 2
        assert verify_folder(out) == []


def test_what_cannot_be_kept_is_refused_by_name(tmp_path):
    data = graph()
    partition = halves(data)
    sparse = torch.eye(3).to_sparse()
    for value in (sparse, object(), {1: 2}, ("a", "b"), np.array(["a"]), {"a": sparse}):
        data.odd = value
        with pytest.raises(TypeError, match=r"odd'? is .*(to_dense|delete or|convert)"):
            write_folder(tmp_path / "out", data, partition)
    assert os.listdir(tmp_path) == []


def test_another_graphs_partition_is_refused(tmp_path):
    data = graph()
    with pytest.raises(ValueError, match="has 41 nodes, the partition 40"):
        write_folder(tmp_path / "out", data, cut(torch.empty(2, 0).long(), 40, 2))
    del data.edge_index
    with pytest.raises(ValueError, match="edge_index is missing"):
        write_folder(tmp_path / "out", data, cut(torch.empty(2, 0).long(), N, 2))


def test_gradients_and_views_are_written_as_values(tmp_path):
    data = Data(x=torch.randn(4, 6, requires_grad=True)[:, ::2].t()[:3].t())
    data.edge_index = torch.tensor([[0, 1, 2], [1, 2, 3]], dtype=torch.int32)
    write_folder(tmp_path / "out", data, halves(data))
    share = read_part(tmp_path / "out", 1)
    same(share.node["x"], data.x.detach()[2:])
    assert not share.node["x"].requires_grad
    assert share.edge_index.tolist() == [[1, 2], [2, 3]]


# --- kinds ----------------------------------------------------------------------------


def square(**attributes):
    """As many nodes as edges: 3."""
    edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
    return Data(edge_index=edges, num_nodes=3, **attributes)


def test_kinds_follow_sizes():
    data = graph()
    data.edge_label_index = torch.zeros(2, E, dtype=torch.long)
    data.edge_label = torch.zeros(E)  # of those pairs, not of the edges
    data.train_edge_mask = torch.ones(E).bool()
    kinds = attribute_kinds(with_tensors(data))
    assert kinds["x"] == kinds["rank"] == kinds["train_mask"] == "node"
    assert kinds["edge_attr"] == kinds["train_edge_mask"] == "edge"
    assert kinds["prior"] == kinds["name"] == kinds["edge_label_index"] == "graph"
    assert kinds["edge_label"] == "graph"
    assert not {"edge_index", "num_nodes"} & {*kinds}


def test_kinds_follow_names_where_sizes_are_equal():
    nodes, edges = "x y pos batch val_mask", "edge_attr edge_mask my_edge_time"
    data = square(prior=torch.ones(2))
    for name in (*nodes.split(), *edges.split()):
        data[name] = torch.ones(3).bool() if "mask" in name else torch.ones(3)
    want = {"prior": "graph", **dict.fromkeys(nodes.split(), "node")}
    assert attribute_kinds(data) == {**want, **dict.fromkeys(edges.split(), "edge")}


def test_what_nothing_decides_must_be_declared(tmp_path):
    data = square(time=torch.arange(3))
    told = r"'time'.*node_attrs=\['time'\] or edge_attrs"
    with pytest.raises(ValueError, match=told):
        attribute_kinds(data)
    assert attribute_kinds(data, ["time"]) == {"time": "node"}
    partition = cut(data.edge_index, 3, 3, [2, 1, 0])
    write_folder(tmp_path / "out", data, partition, edge_attrs=["time"])
    assert read_part(tmp_path / "out", 0).edge["time"].tolist() == [1]


@pytest.mark.parametrize(
    ("attributes", "declared", "words"),
    [
        ({"x": torch.ones(5)}, {}, r"'x' does not fit the 4 nodes and 2 edges"),
        ({"val_mask": torch.ones(5)}, {}, "'val_mask' does not fit"),
        ({"edge_weight": torch.ones(3)}, {}, "'edge_weight' does not fit"),
        ({}, {"node_attrs": ["z"]}, "'z' is declared, but is no attribute"),
        ({"z": torch.ones(4)}, {"edge_attrs": ["z"]}, r"there are 2, but its shape is"),
        ({"z": "word"}, {"node_attrs": ["z"]}, "there are 4, but it is 'word'"),
        ({"z": torch.ones(4)}, {"node_attrs": ["z"], "edge_attrs": ["z"]}, "both in"),
        ({}, {"node_attrs": ["edge_index"]}, "'edge_index' is declared"),
    ],
)
def test_wrong_sizes_and_declarations_are_refused(attributes, declared, words):
    data = Data(edge_index=torch.tensor([[0, 1], [1, 2]]), num_nodes=4, **attributes)
    with pytest.raises(ValueError, match=words):
        attribute_kinds(data, **declared)

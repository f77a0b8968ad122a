import os
import signal
import sys
import time

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from pyg_distcomm.cli import main
from pyg_distcomm.datasets import load_dataset
from pyg_distcomm.partition import layout
from pyg_distcomm.partition.folder import read_part
from pyg_distcomm.partition.layout import folder_meta


def graph():
    rng = torch.Generator().manual_seed(0)
    return Data(
        x=torch.randn(30, 4, generator=rng),
        edge_index=torch.randint(0, 30, (2, 90), generator=rng),
        edge_attr=torch.randn(90, 2, generator=rng),
        train_mask=torch.rand(30, generator=rng) < 0.5,
        name="small",
    )


@pytest.fixture
def saved(tmp_path):
    torch.save(graph(), tmp_path / "graph.pt")
    return tmp_path / "graph.pt"


def one_error(capsys):
    out, err = capsys.readouterr()
    assert err.startswith("pyg-distcomm: error: ")
    assert err.count("\n") == 1
    assert out == ""
    return err


@pytest.mark.parametrize("method", ["block", "random", "ldg", "metis"])
def test_partition_writes_and_inspect_reads(saved, tmp_path, capsys, method):
    out = str(tmp_path / "out")
    flags = ["--parts", "3", "--method", method, "--seed", "5", "--checksums"]
    assert main(["partition", str(saved), out, *flags]) == 0
    shown, err = capsys.readouterr()
    assert err == ""
    table, _, wrote = shown.partition("wrote ")
    assert wrote.startswith(f"{out}/ (3 parts, ")
    assert "halo rows" in table
    data = graph()
    for part in range(3):
        share = read_part(out, part, verify="checksums")
        assert torch.equal(share.node["x"], data.x[share.node_gid])
        assert torch.equal(share.edge["edge_attr"], data.edge_attr[share.edge_gid])
    assert main(["inspect", out]) == 0
    shown, err = capsys.readouterr()
    assert err == ""
    assert table in shown
    assert "30 nodes, 90 edges" in shown
    assert "node        x float32 [30, 4]" in shown
    assert "value       name = 'small'" in shown
    assert shown.endswith("whole       yes\n")


def test_inspect_finds_damage_and_exits_with_1(saved, tmp_path, capsys):
    out = tmp_path / "out"
    main(["partition", str(saved), str(out), "--parts", "2"])
    target = out / "part_00001" / "node__x.npy"
    content = bytearray(target.read_bytes())
    content[-1] ^= 1
    target.write_bytes(content)
    capsys.readouterr()
    assert main(["inspect", str(out), "--no-checksums"]) == 0
    assert "(contents not compared)" in capsys.readouterr().out
    assert main(["inspect", str(out)]) == 1
    shown, err = capsys.readouterr()
    assert "whole" not in shown
    assert err.startswith("pyg-distcomm: wrong: ")
    assert "part_00001/node__x.npy: altered" in err.replace("\\", "/")
    target.unlink()
    (out / "owner.npy").unlink()
    assert main(["inspect", str(out), "--no-checksums"]) == 1
    assert capsys.readouterr().err.count("missing") == 2
    (out / "META.json").write_text("{")
    assert main(["inspect", str(out)]) == 1
    assert "META.json: cannot be read" in capsys.readouterr().err


def test_force_is_needed_to_replace(saved, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert main(["partition", str(saved), out, "--parts", "2"]) == 0
    capsys.readouterr()
    assert main(["partition", str(saved), out, "--parts", "4"]) == 2
    assert "exists already; give --force" in one_error(capsys)
    assert main(["partition", str(saved), out, "--parts", "4", "--force"]) == 0
    assert folder_meta(out)["num_parts"] == 4


def test_a_command_that_is_terminated_leaves_nothing(tmp_path, monkeypatch):
    def ended(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    before = signal.getsignal(signal.SIGTERM)
    (tmp_path / "edges.txt").write_text("0 1\n1 2\n")
    monkeypatch.setattr(layout, "put_in_place", ended)
    with pytest.raises(SystemExit) as caught:
        main(
            ["partition", str(tmp_path / "edges.txt"), str(tmp_path / "o"), "--parts=2"]
        )
    assert caught.value.code == 128 + signal.SIGTERM
    assert [p.name for p in tmp_path.iterdir()] == ["edges.txt"]
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "COMMAND"),
        (["dance"], "invalid choice: 'dance'"),
        (["partition"], "required: dataset, out, --parts"),
        (["partition", "digits", "o", "--parts", "two"], "--parts: got 'two', wanted"),
        (["partition", "digits", "o", "--parts", "2", "--method", "x"], "'x'"),
        (["partition", "kora", "o", "--parts", "2"], "unknown graph 'kora'"),
        (["partition", "g.pt", "o", "--parts", "2"], "g.pt: missing"),
        (
            ["partition", "generated-50", "o", "--parts", "0"],
            "--parts: got '0', wanted",
        ),
        (["partition", "digits", "o", *"--parts 2 --seed -1".split()], "--seed: got"),
        (["partition", "g.txt", "o", *"--parts 2 --num-nodes -3".split()], "--num-n"),
        (
            ["partition", "digits", "o", *"--parts 4 --grid 2 0 2".split()],
            "--grid: got",
        ),
        (["inspect", "nowhere"], "nowhere: does not exist, but should be a partition"),
    ],
)
def test_a_users_mistake_is_one_line_and_exits_with_2(
    tmp_path, monkeypatch, capsys, argv, words
):
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    assert words in one_error(capsys)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--node-file", "edge_index=x.npy"], "edge_index: got a file for it"),
        (["--node-file", "x=x.npy", "--edge-file", "x=x.npy"], "x: got a file of the"),
        (["--node-file", "x=x.npy", "--node-file", "x=y.npy"], "two files for 'x'"),
        (["--node-file", "x.npy"], "--node-file: got 'x.npy', wanted NAME="),
    ],
)
def test_no_file_of_an_attribute_is_dropped(
    tmp_path, monkeypatch, capsys, flags, words
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ring.txt").write_text("0 1\n1 2\n2 0\n")
    for name in "xy":
        np.save(f"{name}.npy", np.ones((3, 2)))
    assert main(["partition", "ring.txt", "o", "--parts", "2", *flags]) == 2
    assert words in one_error(capsys)
    assert not (tmp_path / "o").exists()


# --- data sets ------------------------------------------------------------------------


def test_digits_without_sklearn_says_what_to_install(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["partition", "digits", str(tmp_path / "o"), "--parts", "2"]) == 2
    assert "pip install 'pyg-distcomm[demo]'" in one_error(capsys)


def test_other_names_are_refused():
    with pytest.raises(ValueError, match=r"unknown graph 'Cora'.*torch\.save\(dataset"):
        load_dataset("Cora")


def test_files_that_hold_no_graph_are_refused(tmp_path):
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save(Data(x=torch.ones(3, 1)), tmp_path / "points.pt")
    np.savez(tmp_path / "points.npz", x=np.ones(3))
    (tmp_path / "bad.pt").write_bytes(b"nonsense")
    (tmp_path / "text.pt").write_bytes(b"hello")
    (tmp_path / "bad.npz").write_bytes(b"nonsense")
    np.savez(tmp_path / "pickle.npz", edge_index=np.array([{}], dtype=object))
    for name, words in (
        ("list.pt", "holds a list, not a Data"),
        ("points.pt", "has no edge_index"),
        ("points.npz", "has no edge_index"),
        ("bad.pt", "cannot be read"),
        ("text.pt", "cannot be read: not saved by torch.save"),
        ("bad.npz", "cannot be read"),
        ("pickle.npz", "cannot be read: Object arrays"),
    ):
        with pytest.raises(ValueError, match=f"{name}: {words}"):
            load_dataset(str(tmp_path / name))

"""The command: what it loads, what it prints and writes, and how it answers mistakes."""

import fnmatch
import json
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
import tiers
import torch
from torch_geometric.data import Data

import pyg_distcomm
from pyg_distcomm import checkpoint, datasets
from pyg_distcomm import cli as command
from pyg_distcomm.cli import doctor, main
from pyg_distcomm.cli.doctor import Finding
from pyg_distcomm.partition import layout
from pyg_distcomm.partition.arrow_tables import ENDINGS
from pyg_distcomm.partition.cutters import METHODS
from pyg_distcomm.partition.folder import read_part
from pyg_distcomm.partition.layout import folder_meta
from pyg_distcomm.watch import metrics

VERBS = ("partition", "inspect", "report", "doctor")


def test_help_and_version_load_no_torch():
    code = (
        "import sys\n"
        "from pyg_distcomm.cli import main\n"
        "for argv in ['--help'], ['--version'], *([verb, '--help'] for verb in sys.argv[1:]):\n"
        "    try:\n"
        "        main(argv)\n"
        "    except SystemExit as end:\n"
        "        assert end.code == 0\n"
        "heavy = {'torch', 'torch_geometric', 'numpy', 'numba'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    words = [sys.executable, "-c", code, *VERBS]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert f"pyg-distcomm {pyg_distcomm.__version__}\n" in done.stdout
    assert done.stdout.count("--json") >= 2 * len(VERBS)  # usage, and what it does
    as_module = [sys.executable, "-m", "pyg_distcomm.cli", "--version"]
    assert subprocess.check_output(as_module, text=True).startswith("pyg-distcomm ")


# What it writes, and reads ---------------------------------------------------------------


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
    return str(tmp_path / "graph.pt")


@pytest.fixture
def run(capsys):
    """Runs the command; returns what it prints, and the line of an error."""

    def run(*argv, code=0):
        assert main([str(word) for word in argv]) == code
        out, err = capsys.readouterr()
        assert err.count("\n") == (code == 2)
        assert (out == "") or code < 2
        return err if code == 2 else out

    return run


@tiers.parametrize("method", ["block", "random", "ldg", "metis"], ["metis"])
def test_partition_writes_and_inspect_reads(saved, tmp_path, run, method):
    out, data = tmp_path / "out", graph()
    flags = ["--parts", "3", "--method", method, "--seed", "5", "--checksums"]
    table, _, wrote = run("partition", saved, out, *flags).partition("wrote ")
    assert wrote.startswith(f"{out}/ (3 parts, ")
    assert "halo rows" in table
    for part in range(3):
        share = read_part(out, part, verify="checksums")
        assert torch.equal(share.node["x"], data.x[share.node_gid])
        assert torch.equal(share.edge["edge_attr"], data.edge_attr[share.edge_gid])
    shown = run("inspect", out)
    assert table in shown
    assert "30 nodes, 90 edges" in shown
    assert "node        x float32 [30, 4]" in shown
    assert "value       name = 'small'" in shown
    assert shown.endswith("whole       yes\n")
    assert "exists already; give --force" in run(
        "partition", saved, out, *flags, code=2
    )
    run("partition", saved, out, "--parts", "4", "--force")
    assert folder_meta(out)["num_parts"] == 4


def test_inspect_finds_damage_and_exits_with_1(saved, tmp_path, capsys):
    out = tmp_path / "out"
    main(["partition", saved, str(out), "--parts", "2"])
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


def test_json_of_partition_and_inspect(tmp_path, run):
    out = tmp_path / "parts"
    flags = ("--parts", "3", "--method", "block", "--checksums", "--json")
    cut = json.loads(run("partition", "generated-60", out, *flags))
    assert cut["whole"]
    assert cut["out"] == str(out)
    assert cut["report"]["nodes"] == [20, 20, 20]
    seen = json.loads(run("inspect", out, "--json"))
    assert seen["whole"]
    assert seen["num_nodes"] == 60
    assert seen["report"] == cut["report"]
    (out / "owner.npy").unlink()
    seen = json.loads(run("inspect", out, "--json", code=1))
    assert not seen["whole"]
    assert "owner.npy: missing" in seen["problems"][0]


def test_a_command_that_is_terminated_leaves_nothing(tmp_path, monkeypatch):
    def ended(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    before = signal.getsignal(signal.SIGTERM)
    edges = tmp_path / "edges.txt"
    edges.write_text("0 1\n1 2\n")
    monkeypatch.setattr(os, "rename", ended)
    with pytest.raises(SystemExit) as caught:
        main(["partition", str(edges), str(tmp_path / "o"), "--parts=2"])
    assert caught.value.code == 128 + signal.SIGTERM
    assert [p.name for p in tmp_path.iterdir()] == ["edges.txt"]
    assert signal.getsignal(signal.SIGTERM) == before


# Mistakes --------------------------------------------------------------------------------

MISTAKES = {
    "": "COMMAND",
    "dance": "invalid choice: 'dance'",
    "partition": "required: dataset, out, --parts",
    "partition digits o --parts two": "--parts: got 'two', wanted",
    "partition generated-50 o --parts 0": "--parts: got '0', wanted",
    "partition digits o --parts 2 --method x": "got 'x', wanted one of block",
    "partition digits o --parts 2 --method metsi": "did you mean 'metis'?",
    "partition digits o --prts 2": "--prts (did you mean '--parts'?)",
    "partition digits o --parts 2 --mthod ldg": "(did you mean '--method'?)",
    "partition digits o --parts 2 --seed -1": "--seed: got",
    "partition g.txt o --parts 2 --num-nodes -3": "--num-n",
    "partition digits o --parts 4 --grid 2 0 2": "--grid: got",
    "partition kora o --parts 2": "unknown graph 'kora'",
    "partition digts o --parts 2": "unknown graph 'digts' (did you mean 'digits'?)",
    "partition sub/digits o --parts 2": "unknown graph 'sub/digits'",
    "parttion digits o --parts 2": "did you mean 'partition'?",
    "partition g.pt o --parts 2": "g.pt: missing",
    "partition edges.csv.gz o --parts 2": "edges.csv.gz: missing",
    "partition empty o --parts 2": "empty: is a folder; give a file of edges",
    "partition digits full --parts 2": "full: exists already; give --force",
    "partition digits o --parts 2 --node-file x=gone.npy": "gone.npy: missing",
    "partition digits o --parts 2 --node-table t.parquet": "t.parquet: missing",
    "inspect full": "full: is not a partition folder (no META.json; it holds a.t",
    "inspect full/a.txt": "a.txt: is a file, not a partition folder",
    "inspect empty": "empty: is an empty folder; write one",
    "inspect run": "run: is a run of pdc.metrics; draw it by",
    "inspect saved": "saved: is a checkpoint of pyg_distcomm",
    "inspect outer": "outer: is not a partition folder, but holds one; give outer",
    "inspect nowhere": "nowhere: does not exist, but should be a partition",
    "report nowhere": "nowhere: does not exist",
    "report full/a.txt": "full/a.txt: is a file, not a folder of pdc.metrics",
    "report full": "full: is not a folder of pdc.metrics (no run.json; it holds a",
    "report outer/parts": "outer/parts: is a partition folder; `pyg-distcomm in",
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Holds one folder of each kind that a user may name by mistake."""
    monkeypatch.chdir(tmp_path)
    for place in ("full", "empty", "run", "saved", "outer/parts"):
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / "full/a.txt").touch()
    (tmp_path / "run/run.json").write_text("{}")
    (tmp_path / "saved/.pyg_distcomm.json").write_text('{"kind": "checkpoint"}')
    (tmp_path / "outer/parts/META.json").touch()
    return tmp_path


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_answered_in_one_line_before_torch_is_loaded(
    run, monkeypatch, here, words
):
    def light(name):
        assert name == "pyg_distcomm", f"{name} is imported before the check"
        return pyg_distcomm

    monkeypatch.setattr(command, "import_module", light)
    err = run(*words.split(), code=2)
    assert err.startswith("pyg-distcomm: error: ")
    assert MISTAKES[words] in err
    assert not (here / "o").exists()


def test_first_checks_know_what_the_package_knows():
    """They spell out its methods, formats, and the names of what it writes."""
    assert sorted(command.METHODS.split(", ")) == sorted(METHODS)
    assert all(f'"{name}"' in datasets.__doc__ for name in ("digits", "generated-1000"))
    assert {*command.FILES} == {".pt", ".npy", ".npz", ".gz", *ENDINGS}
    assert command.META == layout.META
    assert fnmatch.fnmatch(layout.part_name(7), command.PART)
    assert command.RUN == metrics.RUN
    assert command.MARK == checkpoint.MARK


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--node-file edge_index=x.npy", "edge_index: got a file for it"),
        ("--edge-file num_nodes=x.npy", "num_nodes: got a file for it"),
        ("--node-attr x", "--node-attr: got the graph 'ring.txt', whose attributes"),
        (
            "--node-file x=x.npy --edge-file x=x.npy",
            "x: got a file for it, x.npy, beside x.npy",
        ),
        ("--node-file x=x.npy --node-file x=y.npy", "two files for 'x'"),
        ("--node-file x.npy", "--node-file: got 'x.npy', wanted NAME="),
    ],
)
def test_no_file_of_an_attribute_is_dropped(here, run, flags, words):
    (here / "ring.txt").write_text("0 1\n1 2\n2 0\n")
    for name in "xy":
        np.save(f"{name}.npy", np.ones((3, 2)))
    flags = ("--parts", "2", *flags.split())
    assert words in run("partition", "ring.txt", "o", *flags, code=2)
    assert not (here / "o").exists()


def test_digits_without_sklearn_says_what_to_install(monkeypatch, run, tmp_path):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    told = run("partition", "digits", tmp_path / "o", "--parts", "2", code=2)
    assert "pip install 'pyg-distcomm[demo]'" in told


# The doctor ------------------------------------------------------------------------------


def test_the_doctor_finds_that_this_machine_can_run(run):
    shown = run("doctor")
    assert shown.endswith("\nready\n")
    assert "wrong" not in shown
    for what in ("python", "torch_geometric", "gloo", "nccl", "CPU cores"):
        assert f" {what} " in shown
    assert " agree\n" in shown


def test_a_needed_thing_that_is_missing_is_told_and_exits_with_1(monkeypatch, run):
    some = [Finding("a", "fine"), Finding("b", "missing", "get it")]
    some.append(Finding("c", "missing", "get it", wrong=True))
    monkeypatch.setattr(doctor, "examine", lambda: iter(some))
    shown = [line for line in run("doctor", code=1).splitlines() if line]
    begin = "ok note -> wrong -> not".split()
    assert [line.split()[0] for line in shown] == begin
    assert shown[-1] == "not ready: c"
    seen = json.loads(run("doctor", "--json", code=1))
    assert not seen["ready"]
    assert [one["wrong"] for one in seen["findings"]] == [False, False, True]


@pytest.mark.parametrize("name", ["torch", "torch_geometric", "numba"])
def test_missing_and_old_packages(monkeypatch, name):
    assert not doctor.required(name, doctor.REQUIRED[name]).wrong
    too_new = doctor.required(name, (999, 1))
    assert too_new.wrong
    assert too_new.advice == f"pip install '{name}>=999.1'"
    assert "older than 999.1" in too_new.found
    monkeypatch.setattr(doctor, "_version", lambda _: None)
    assert doctor.required(name, (2, 6)).found == "missing"


@pytest.mark.parametrize("name", doctor.TESTED)
def test_releases_on_which_no_tests_ran_are_noted(monkeypatch, name):
    tested = doctor.TESTED[name]
    for version in (*tested, f"{tested[-1]}.post1", f"{tested[0]}+cu130"):
        monkeypatch.setattr(doctor, "_version", lambda _, v=version: v)
        assert str(doctor.required(name, doctor.REQUIRED[name])).startswith("ok")
    for version in ("99.1.0", "99.1.0a0+git"):
        monkeypatch.setattr(doctor, "_version", lambda _, v=version: v)
        found = doctor.required(name, doctor.REQUIRED[name])
        assert str(found).startswith("note")
        assert f"{version}, with which this package was not" in found.found
        assert all(one in found.advice for one in tested)


def test_back_ends_and_cores(monkeypatch):
    assert doctor.back_end("gloo", False).wrong
    assert not doctor.back_end("gloo", True).wrong
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert doctor.back_end("nccl", False).advice
    assert not doctor.back_end("nccl", False).wrong
    monkeypatch.setattr(torch, "get_num_threads", lambda: 10_000)
    assert "OMP_NUM_THREADS" in doctor.cores().advice


def test_ranks_that_cannot_meet_and_a_kernel_that_is_wrong(monkeypatch):
    def lost(*_, **__):
        raise RuntimeError("no route to host\nmore")

    monkeypatch.setattr(doctor, "launch", lost)
    monkeypatch.setattr(socket, "getaddrinfo", lost)
    monkeypatch.setattr(doctor.kernels, "spmm", lambda *_: torch.zeros(3, 2))
    found = {one.what: one for one in doctor.examine()}
    assert found["2 ranks, gloo"].found == "fail: no route to host"
    assert "wrong here" in found["kernels"].found
    assert "GLOO_SOCKET_IFNAME" in found["host name"].advice
    wrong = [name for name, one in found.items() if one.wrong]
    assert wrong == ["kernels", "2 ranks, gloo"]
    monkeypatch.setattr(doctor, "launch", lambda *_, **__: [3.0, 4.0])
    assert [*doctor.examine()][-1].wrong

"""The command before its verbs: help, version, JSON, and what is loaded for them."""

from __future__ import annotations

import fnmatch
import json
import subprocess
import sys

import pytest

import pyg_distcomm
from pyg_distcomm import checkpoint, datasets
from pyg_distcomm import cli as command
from pyg_distcomm.cli import doctor, main
from pyg_distcomm.partition import layout
from pyg_distcomm.partition.arrow_tables import ENDINGS
from pyg_distcomm.partition.cutters import METHODS
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
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"pyg-distcomm {pyg_distcomm.__version__}\n" in done.stdout
    assert done.stdout.count("--json") >= 2 * len(VERBS)  # usage, and what it does
    as_module = [sys.executable, "-m", "pyg_distcomm.cli", "--version"]
    assert subprocess.check_output(as_module, text=True).startswith("pyg-distcomm ")


def test_help_lists_the_cutters():
    assert sorted(command.METHODS.split(", ")) == sorted(METHODS)


def found(capsys, *argv, code=0):
    assert main([*argv, "--json"]) == code
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def test_json_of_partition_and_inspect(tmp_path, capsys):
    out = tmp_path / "parts"
    flags = ("--parts", "3", "--method", "block", "--checksums")
    cut = found(capsys, "partition", "generated-60", str(out), *flags)
    assert cut["whole"]
    assert cut["out"] == str(out)
    assert cut["report"]["nodes"] == [20, 20, 20]
    seen = found(capsys, "inspect", str(out))
    assert seen["whole"]
    assert seen["num_nodes"] == 60
    assert seen["report"] == cut["report"]
    (out / "owner.npy").unlink()
    seen = found(capsys, "inspect", str(out), code=1)
    assert not seen["whole"]
    assert "owner.npy: missing" in seen["problems"][0]


def test_json_of_doctor(monkeypatch, capsys):

    some = [doctor.Finding("a", "fine"), doctor.Finding("b", "missing", "get it", True)]
    monkeypatch.setattr(doctor, "examine", lambda: iter(some))
    seen = found(capsys, "doctor", code=1)
    assert not seen["ready"]
    assert [one["wrong"] for one in seen["findings"]] == [False, True]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("partition digits o --parts 2 --method x", "got 'x', wanted one of block"),
        ("partition digits o --parts 2 --method metsi", "did you mean 'metis'?"),
        ("partition digits o --prts 2", "--prts (did you mean '--parts'?)"),
        ("partition digits o --parts 2 --mthod ldg", "(did you mean '--method'?)"),
        (
            "partition digts o --parts 2",
            "unknown graph 'digts' (did you mean 'digits'?)",
        ),
        ("parttion digits o --parts 2", "did you mean 'partition'?"),
        ("partition edges.csv.gz o --parts 2", "edges.csv.gz: missing"),
        ("partition empty o --parts 2", "empty: is a folder; give a file of edges"),
        ("partition digits full --parts 2", "full: exists already; give --force"),
        ("inspect full", "full: is not a partition folder (no META.json; it holds a.t"),
        ("inspect full/a.txt", "a.txt: is a file, not a partition folder"),
        ("inspect empty", "empty: is an empty folder; write one"),
        ("inspect run", "run: is a run of pdc.metrics; draw it by"),
        ("inspect saved", "saved: is a checkpoint of pyg_distcomm"),
        (
            "inspect outer",
            "outer: is not a partition folder, but holds one; give outer",
        ),
        ("report nowhere", "nowhere: does not exist"),
        ("report full/a.txt", "full/a.txt: is a file, not the folder of pdc.metrics"),
        ("report full", "full: is not a folder of pdc.metrics (it has no run.json)"),
        ("report outer/parts", "outer/parts: holds parts, not a run; `pyg-distcomm in"),
        ("partition sub/digits o --parts 2", "unknown graph 'sub/digits'"),
        (
            "partition digits o --parts 2 --node-file x=gone.npy",
            "gone.npy: missing",
        ),
        ("partition digits o --parts 2 --node-table t.parquet", "t.parquet: missing"),
    ],
)
def test_mistakes_are_answered_before_torch_is_loaded(
    capsys, monkeypatch, tmp_path, argv, words
):
    monkeypatch.chdir(tmp_path)
    for place in ("full", "empty", "run", "saved", "outer/parts"):
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / "full/a.txt").touch()
    (tmp_path / "run/run.json").write_text("{}")
    (tmp_path / "saved/.pyg_distcomm.json").write_text('{"kind": "checkpoint"}')
    (tmp_path / "outer/parts/META.json").touch()

    def light(name):
        assert name == "pyg_distcomm", f"{name} is imported before the check"
        return pyg_distcomm

    monkeypatch.setattr(command, "import_module", light)
    assert main(argv.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.count("\n") == 1


def test_first_checks_know_the_names_and_files_there_are():
    assert all(f'"{name}"' in datasets.__doc__ for name in ("digits", "generated-1000"))
    assert {*command.FILES} == {".pt", ".npy", ".npz", ".gz", *ENDINGS}


def test_first_checks_know_what_folders_hold():
    """They spell out the names that partitions, runs and checkpoints are written with."""
    assert command.META == layout.META
    assert fnmatch.fnmatch(layout.part_name(7), command.PART)
    assert command.RUN == metrics.RUN
    assert command.MARK == checkpoint.MARK
    assert {*command.KINDS} == {*checkpoint._CONTENTS}

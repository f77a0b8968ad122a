"""The command before its verbs: help, version, JSON, and what is loaded for them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import pyg_distcomm
from pyg_distcomm.cli import command, doctor, main
from pyg_distcomm.partition.cutters import METHODS

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


@pytest.mark.exhaustive
def test_packages_do_not_hide_the_functions_of_their_names():
    code = (
        "import pyg_distcomm.partition.cutters, pyg_distcomm.plan.machine\n"
        "import pyg_distcomm as pdc\n"
        "assert callable(pdc.partition) and callable(pdc.plan)\n"
        "import pyg_distcomm.plan.planner\n"
        "assert callable(pdc.plan)\n"
        "assert pdc.nn.GCNConv and pdc.halo.__name__ == 'pyg_distcomm.halo'\n"
        "assert not hasattr(pdc, 'no_such_name')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


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
    ],
)
def test_names_that_nobody_knows_are_answered_by_those_there_are(capsys, argv, words):
    assert main(argv.split()) == 2
    assert words in capsys.readouterr().err

"""The benchmark of one CUDA device: its 60 tests are there, and one command runs it."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import tiers
from test_synchronisations import benchmark

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"


def functions(path):
    found = ast.parse(path.read_text()).body
    return {node.name for node in found if isinstance(node, ast.FunctionDef)}


def test_sixty_tests_come_first_and_all_are_there():
    first = benchmark("device_tests")
    assert sum(number for _, number in first.FIRST) == 60
    names = [name for name, _ in first.FIRST]
    assert len(set(names)) == len(names)
    assert set(first.SMOKED) <= set(names)
    for name in names:
        file, _, function = name.partition("::")
        assert function in functions(ROOT / "tests" / file), name
    assert first.spread(list(range(10)), 4) == [0, 2, 5, 7]
    assert first.spread([1, 2], 4) == [1, 2]


def test_the_benchmark_says_that_there_is_no_device(tmp_path, capsys, monkeypatch):
    parts = benchmark("device_parts")
    monkeypatch.setattr(parts, "imported", lambda: None)
    monkeypatch.setattr(parts, "probed", lambda: ("CPU", "torch 2", False))
    assert parts.main("", ["--report", str(tmp_path / "report.md")]) == 1
    assert "no CUDA device" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@tiers.rare
@pytest.mark.subprocess
def test_the_benchmark_runs_on_tiny_graphs(tmp_path):
    report = tmp_path / "report.md"
    command = [sys.executable, str(BENCHMARKS / "cuda.py"), "--smoke"]
    command += ["--minutes", "8", "--report", str(report)]
    subprocess.run(command, check=True, timeout=600, stdout=subprocess.DEVNULL)
    text = report.read_text()
    assert "Failed" not in text
    assert "all parts came to their end" in text
    assert [path.name for path in tmp_path.iterdir()] == ["report.md"]
    for part in ("SpMM", "GraphSAGE", "GAT", "waits for one", "Quantise", "gloo"):
        assert part in text


def bare(tmp_path, wheel):
    """A tree of sources with one wheel, whose benchmark writes what it was given."""
    for name in ("tools/wheels", "benchmarks"):
        (tmp_path / name).mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "on_gpu.sh", tmp_path / "tools")
    program = "import os, sys, inside; from pathlib import Path\n"
    program += "os.system(Path(inside.__file__).with_name('program'))\n"
    program += "Path(sys.argv[2]).write_text(f'{inside.__file__} {sys.argv[3:]}')\n"
    (tmp_path / "benchmarks/cuda.py").write_text(program + "sys.exit(3)\n")
    with zipfile.ZipFile(tmp_path / "tools/wheels" / wheel, "w") as made:
        made.writestr("inside.py", "x = 1\n" * 99)
        program = zipfile.ZipInfo("program")
        program.external_attr = 0o100755 << 16
        made.writestr(program, "#!/bin/sh\necho it runs\n")
    return tmp_path / "tools/wheels" / wheel


def on_gpu(tmp_path, *options, **given):
    command = ["bash", str(tmp_path / "tools/on_gpu.sh"), *options]
    given = {**os.environ, "PYTHON": sys.executable, **given}
    return subprocess.run(
        command, cwd=tmp_path, env=given, capture_output=True, text=True, timeout=60
    )


@pytest.mark.skipif(sys.platform != "linux", reason="for bare Linux machines")
@pytest.mark.subprocess
def test_one_command_unpacks_wheels_and_leaves_one_report(tmp_path):
    wheel = bare(tmp_path, "inside-1-py3-none-any.whl")
    spec = importlib.util.spec_from_file_location(
        "fill_wheels", ROOT / "tools/fill_wheels.py"
    )
    filler = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(filler)
    filler.compress(wheel)
    with zipfile.ZipFile(wheel) as made:
        assert made.infolist()[0].compress_type == zipfile.ZIP_LZMA
    done = on_gpu(tmp_path, "--minutes", "4")
    assert done.returncode == 3, done.stderr
    assert "it runs" in done.stdout
    place, _, options = (tmp_path / "on_gpu.md").read_text().partition("/inside.py ")
    assert options == "['--minutes', '4']"
    assert not Path(place).exists()  # unpacked for this run alone
    done = on_gpu(tmp_path, "--report", "other.md", PYTHON="no-such-python")
    assert done.returncode == 1
    assert "Not run: there is no no-such-python" in (tmp_path / "other.md").read_text()
    wheel.rename(wheel.with_name("inside-1-cp27-cp27m-linux_x86_64.whl"))
    done = on_gpu(tmp_path)
    assert "is not for cp3" in done.stderr
    assert "Not run: the wheels do not fit" in (tmp_path / "on_gpu.md").read_text()

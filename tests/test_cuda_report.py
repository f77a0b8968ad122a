"""The benchmark of one CUDA device: the order of its parts, and a run that is cut."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import tiers
from test_synchronisations import benchmark

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
# parts as they end: well, by an error, by a crash, by their time, and never
NAMES = "well error crash hang endless".split()
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from device_report import Part, Report, run_part, run_parts

report, parent = Report(Path(sys.argv[1])), os.getpid()
names = "well error crash hang endless".split()
parts = [Part(letter, name, "", 1.0, "slow") for letter, name in zip("abcde", names)]
parts[3] = Part("d", "hang", "", 1.0, "slow", 1.5)

def body(name, report):
    add = report.table("lines", "number", "of")
    for k in range(10**6 if name == "endless" else 3):
        add(k, name)
        time.sleep(0.01)
    if name == "error":
        raise ValueError("no such thing")
    if name == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    report.doing = "a step that never ends"
    if name == "hang":
        time.sleep(100)

def run(part, seconds):
    report.say(f"process {os.getpid()}")
    return run_part(lambda r: body(part.name, r), report.path, seconds, parent)

run_parts(run, parts, report, time.monotonic() + float(sys.argv[2]), False)
report.say("The end")
"""


def functions(path):
    found = ast.parse(path.read_text()).body
    return {node.name for node in found if isinstance(node, ast.FunctionDef)}


def test_parts_come_in_the_order_of_what_they_decide():
    parts = benchmark("device_parts")
    assert "".join(part.letter for part in parts.PARTS) == "abcdefg"
    names = "tests products epochs minibatches synchronisations packing ranks".split()
    assert [part.name for part in parts.PARTS] == names
    for part in parts.PARTS:
        assert part.name in functions(BENCHMARKS / f"{part.module}.py")
    by_minutes = {4: "abc", 5.9: "abc", 6: "abcdefg", 8: "abcdefg"}
    for minutes, letters in by_minutes.items():
        chosen = parts.chosen(minutes, False, None)
        assert "".join(part.letter for part in chosen) == letters
    assert len(parts.chosen(0.5, True, None)) == 7
    assert [part.name for part in parts.chosen(8, False, ["f", "epochs"])] == [
        "epochs",
        "packing",
    ]
    assert parts.PARTS[0].most == 120
    assert sum(part.seconds for part in parts.PARTS) <= 60 * parts.MINUTES


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


def run(path, seconds):
    given = {**os.environ, "PYTHONPATH": str(BENCHMARKS)}
    command = [sys.executable, "-c", SCRIPT, str(path), str(seconds)]
    return subprocess.Popen(command, env=given, stdout=subprocess.DEVNULL)


def ended(text):
    """Whether all processes of a report have ended; a zombie has."""
    for pid in re.findall(r"^process (\d+)$", text, re.M):
        status = Path(f"/proc/{pid}/status")
        if status.exists() and "Z (zombie)" not in status.read_text():
            return False
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.subprocess
def test_a_run_that_is_cut_leaves_a_report_that_can_be_read(tmp_path):
    path = tmp_path / "report.md"
    child, stop = run(path, 100), time.monotonic() + 60
    while time.monotonic() < stop:
        text = path.read_text() if path.exists() else ""
        if text.count("| endless |") > 5:
            break
        time.sleep(0.05)
    child.send_signal(signal.SIGKILL)
    child.wait()
    while not ended(path.read_text()) and time.monotonic() < stop:
        time.sleep(0.05)
    text = path.read_text()
    assert ended(text)
    heads = re.findall(r"^## \((\w)\) (\w+)$", text, re.M)
    assert [letter for letter, _ in heads] == list("abcde")
    assert [name for _, name in heads] == NAMES
    parts = re.split(r"^## .*$", text, flags=re.M)[1:]
    for name, part in zip(NAMES[:4], parts[:4], strict=True):
        assert part.count(f"| {name} |\n") == 3
        assert "Without CUDA: slow." in part
    assert "Done in" in parts[0]
    assert "ValueError: no such thing" in parts[1]
    assert "Ended with status 1 " in parts[1]
    assert "Ended with status -11 " in parts[2]
    assert "Time was up during a step that never ends" in parts[3]
    assert "Stopped after" in parts[3]
    rows = [line for line in parts[4].splitlines() if line.startswith("|")]
    assert len(rows) > 5
    assert all(row.endswith("|") for row in rows)
    assert "The end" not in text


@pytest.mark.subprocess
def test_a_run_keeps_to_its_time(tmp_path):
    path, start = tmp_path / "report.md", time.monotonic()
    run(path, 6).wait(60)
    took, text = time.monotonic() - start, path.read_text()
    assert text.rstrip().endswith("The end")
    assert text.count("\n## ") == 5
    assert "lines before stand" in text or "no time was left" in text
    assert took < 60  # what never ends was stopped


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

"""Runs the parts of `python benchmarks/cuda.py`, which see, and says on what they ran.

It needs nothing but Python, so that a torch or a package that does not import is told of, too.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from importlib import metadata
from pathlib import Path

from device_report import MET, MISSED, Part, Report, in_process, run_part, run_parts

MINUTES = 8.0
SMOKE_MINUTES = 2.0
ALL_PARTS = 6.0  # minutes from which all parts run, and not the first ones alone
FIRST = "abc"
PARTS = (
    Part(
        *("a", "tests", "device_tests", 115.0),
        "tests marked `cuda` are skipped, and others run on the CPU",
        120.0,
    ),
    Part(
        *("b", "products", "one_device", 70.0),
        "torch's CPU product stands for cuSPARSE, and no memory is measured",
    ),
    Part(
        *("c", "epochs", "one_device", 115.0),
        "no memory is measured",
    ),
    Part(
        *("d", "minibatches", "device_loaders", 75.0),
        "loaders that read pinned memory are left out, and the device is the CPU",
    ),
    Part(
        *("e", "synchronisations", "one_device", 25.0),
        "what waits is counted among operations, and not by CUDA",
    ),
    Part(
        *("f", "packing", "one_device", 25.0),
        "kernels of the CPU write the rows",
    ),
    Part(
        *("g", "ranks", "device_ranks", 45.0),
        "gloo stands for NCCL, and ranks compute on the CPU",
    ),
)


def imported() -> None:
    """Imports what all parts need, once; parts begin as copies of this process.

    None of it touches a device. What fails here fails in each part, which says so.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # which may be copied
    with contextlib.suppress(Exception):
        for name in ("api", "loader"):
            importlib.import_module(f"pyg_distcomm.{name}")
    gc.collect()
    gc.freeze()  # so that collections between measurements pass over all of this


def probe(path: Path) -> int:
    """Writes the device's name, and what computes on it."""
    import torch

    about = f"torch {torch.__version__}, CUDA {torch.version.cuda}"
    name = platform.processor() or "CPU"
    cuda = torch.cuda.is_available()
    if cuda:
        torch.ones(1, device="cuda").sum().item()
        held = torch.cuda.get_device_properties(0)
        name = f"{held.name}, {held.total_memory / 2**30:.0f} GiB"
    path.write_text(json.dumps([name, about, cuda]))
    return 0


def probed() -> tuple[str, str, bool] | None:
    """Asks for the device, in a process that is a copy of this one."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.json")
        if in_process(lambda: probe(path), 60) or not path.exists():
            return None
        name, about, cuda = json.loads(path.read_text())
        return name, about, cuda


def began_anew(given: list[str]) -> int:
    """Replaces this process by one that has imported nothing."""
    command = [sys.executable, str(Path(__file__).with_name("cuda.py")), *given]
    os.execv(sys.executable, command)


def heading(name: str, about: str, cuda: bool, minutes: float, smoke: bool) -> str:
    """Says on what it runs."""
    text = "# On a CUDA device\n"
    if not cuda:
        text += "\nNot run on a CUDA device: nothing here says how fast one is.\n"
    if smoke:
        text += "\nA smoke run on tiny graphs: its figures say nothing.\n"
    told = [about]
    for package in ("torch_geometric", "triton", "numba", "numpy", "pyg_lib"):
        try:
            told.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            told.append(f"no {package}")
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_paths()["include"], "Python.h").exists()
    told += [
        f"driver {_driver()}",
        f"Python {platform.python_version()} {'with' if header else 'without'} Python.h",
        f"{'a' if compiler else 'no'} C compiler",
        f"{os.cpu_count()} cores",
    ]
    smoked = " --smoke" if smoke else ""
    text += f"\n{name}: {', '.join(told)}.\n"
    return f"{text}\n`python benchmarks/cuda.py --minutes {minutes:g}{smoked}`"


def _driver() -> str:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return told.stdout.partition("\n")[0].strip() or "unknown"


def chosen(minutes: float, smoke: bool, only: list[str] | None) -> list[Part]:
    """Returns the parts that run, in order: those asked for, or as time allows."""
    if only is not None:
        return [part for part in PARTS if {part.name, part.letter} & set(only)]
    deep = smoke or minutes >= ALL_PARTS
    return [part for part in PARTS if deep or part.letter in FIRST]


def aims(text: str) -> str:
    """Says how many aims of a report's tables are met."""
    met, missed = (text.count(f"| {word} ") for word in (MET, MISSED))
    return f"{met} of {met + missed} aims are met." if met + missed else ""


def run_here(name: str, report: Report, smoke: bool) -> None:
    """Runs a part in this process."""
    import torch
    from device_clock import Device

    part = next(each for each in PARTS if each.name == name)
    run = getattr(importlib.import_module(part.module), part.name)
    run(Device("cuda" if torch.cuda.is_available() else "cpu", smoke), report)


def parser_of(about: str) -> argparse.ArgumentParser:
    """Returns what parses the command."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument(
        "--report",
        type=Path,
        default=Path("cuda.md"),
        help="a file of Markdown, written anew (%(default)s)",
    )
    parser.add_argument(
        "--smoke", action="store_true", help="tiny graphs, on the CPU too"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help=f"of all parts ({MINUTES:g}, or {SMOKE_MINUTES:g} of a smoke run); "
        f"with fewer than {ALL_PARTS:g}, parts {FIRST[0]} to {FIRST[-1]} run",
    )
    names = [name for part in PARTS for name in (part.letter, part.name)]
    parser.add_argument("--only", nargs="+", choices=names, help="these parts")
    for hidden, kind in (("--part", str), ("--seconds", float)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    return parser


def main(about: str = "", arguments: list[str] | None = None) -> int:
    """Measures, and writes the report; returns 1 without CUDA, or if a part failed."""
    start = time.monotonic()
    args = parser_of(about).parse_args(arguments)
    path, smoke = args.report.resolve(), args.smoke
    if args.part:
        run = functools.partial(run_here, args.part, smoke=smoke)
        return run_part(run, path, args.seconds, os.getppid())
    minutes = args.minutes or (SMOKE_MINUTES if smoke else MINUTES)
    found = probed() or ("CPU", "torch does not import", False)
    if not found[2] and not smoke:
        print("no CUDA device here: nothing was measured, no report was written")
        return 1
    if not found[2]:  # kernels in Triton then run on the CPU
        os.environ.setdefault("TRITON_INTERPRET", "1")
    imported()
    anew = found[2] and probed() is None  # what is a copy has no device
    report = Report(path)
    path.unlink(missing_ok=True)
    report.say(heading(*found, minutes, smoke))
    parts = chosen(minutes, smoke, args.only)
    left_out = [f"({p.letter}) {p.name}" for p in PARTS if p not in parts]
    if left_out:
        report.say(f"Left out: {', '.join(left_out)}.")
    parent = os.getpid()

    def run(part: Part, seconds: float) -> int:
        if anew:
            given = ["--part", part.name, "--seconds", f"{seconds:.1f}"]
            given += ["--report", str(path), *["--smoke"] * smoke]
            return began_anew(given)
        one = functools.partial(run_here, part.name, smoke=smoke)
        return run_part(one, path, seconds, parent)

    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    whole = run_parts(run, parts, report, start + 60 * minutes, found[2])
    took = (time.monotonic() - start) / 60
    ended = f"{'' if whole else 'not '}all parts came to their end"
    report.say(f"## The end\n\n{took:.1f} minutes, {ended}. {aims(path.read_text())}")
    return int(not whole)

"""Runs the command `pyg-distcomm doctor`: checks this machine, and says what to do."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.distributed as dist

from pyg_distcomm import kernels
from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.launch import launch
from pyg_distcomm.comm.mesh import init
from pyg_distcomm.kernels import core_ops

REQUIRED = {"torch": (2, 11), "torch_geometric": (2, 7), "numba": (0, 57)}
TESTED = {  # the releases on which all tests have run: see docs/limits.md
    "torch": ("2.11.0", "2.13.0", "2.15.0"),
    "torch_geometric": ("2.7.0", "2.8.1"),
}
OPTIONAL = {  # package -> what is lost without it, and what to do
    "pymetis": "partition method 'metis' falls back to 'ldg'; "
    "pip install 'pyg-distcomm[metis]'",
    "scikit-learn": "the data set 'digits' cannot be made; "
    "pip install 'pyg-distcomm[demo]'",
    "matplotlib": "`report` and the notebooks cannot draw; pip install 'pyg-distcomm[plot]'",
}
PATIENCE = 120.0  # seconds the round trip may take, process start included


@dataclass(frozen=True)
class Finding:
    """Describes one line of the report.

    what    what was checked
    found   the result
    advice  what to do about it; "" if nothing
    wrong   whether the package cannot run until that is done
    """

    what: str
    found: str
    advice: str = ""
    wrong: bool = False

    def __str__(self) -> str:
        mark = "wrong" if self.wrong else "note" if self.advice else "ok"
        tail = f"\n{'':25}-> {self.advice}" if self.advice else ""
        return f"{mark:<6} {self.what:<17} {self.found}{tail}"


def examine() -> Iterator[Finding]:
    """Yields all checks; the slowest, a round trip between two ranks, comes last."""
    yield Finding("python", f"{platform.python_version()} on {platform.platform()}")
    for name, minimum in REQUIRED.items():
        yield required(name, minimum)
    for name, loss in OPTIONAL.items():
        version = _version(name)
        yield Finding(name, version or "missing", "" if version else loss)
    yield back_end("gloo", dist.is_available() and dist.is_gloo_available())
    yield back_end("nccl", dist.is_available() and dist.is_nccl_available())
    yield cores()
    yield tried("kernels", _multiplies, "pip install --upgrade numba")
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            name = torch.cuda.get_device_name(i)
            yield tried(
                f"{name}, {i}", partial(_multiplies, f"cuda:{i}"), "see nvidia-smi"
            )
        if _version("triton") is None:
            advice = "pip install 'pyg-distcomm[triton]': products without buffers"
            yield Finding("triton", "missing", advice)
    else:
        yield Finding("devices", "no CUDA device; ranks use the CPU")
    advice = "set GLOO_SOCKET_IFNAME to the network interface that ranks shall use"
    yield tried("host name", _address, advice, needed=False)
    yield tried("interfaces", _interfaces, "", needed=False)
    yield tried(
        "2 ranks, gloo", _round_trip, f"{advice}, and look at firewall and memory"
    )


def required(name: str, minimum: tuple[int, ...]) -> Finding:
    """Checks for a required package, in a minimum version, and whether that was tested."""
    least, version = ".".join(map(str, minimum)), _version(name)
    if version is None or _numbers(version) < minimum:
        found = f"{version}, older than {least}" if version else "missing"
        return Finding(name, found, f"pip install '{name}>={least}'", wrong=True)
    tested = TESTED.get(name, (version,))
    if _numbers(version)[:2] in [_numbers(one)[:2] for one in tested]:
        return Finding(name, version)
    advice = f"tested with {', '.join(tested)}: if something fails, try one of these"
    return Finding(name, f"{version}, with which this package was not tested", advice)


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split("+")[0].split(".")
    return tuple(int(part) for part in parts if part.isdecimal())


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def back_end(name: str, available: bool) -> Finding:
    """Checks a back end of torch.distributed; NCCL is needed with CUDA devices only."""
    if available:
        return Finding(name, "available")
    if name == "nccl" and not torch.cuda.is_available():
        return Finding(name, "not in this torch (no CUDA device either: gloo is used)")
    advice = f"install a torch that was built with {name}"
    return Finding(name, "not in this torch", advice, wrong=name == "gloo")


def cores() -> Finding:
    """Compares the cores that this process may use with its number of threads."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS and Windows
    allowed = len(affinity(0)) if affinity else os.cpu_count() or 1
    threads = torch.get_num_threads()
    found = f"{allowed} usable, {threads} torch threads per process"
    advice = f"more threads than cores: set OMP_NUM_THREADS={allowed} or lower"
    return Finding("CPU cores", found, advice if threads > allowed else "")


def tried(
    what: str, check: Callable[[], str], advice: str, *, needed: bool = True
) -> Finding:
    """Runs a check, whose error is the finding: the report goes on, whatever fails."""
    try:
        return Finding(what, check())
    except Exception as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        return Finding(what, f"fail: {first}", advice, needed)


def _multiplies(device: str = "cpu") -> str:
    """Compares a small sparse product with its definition."""
    x = torch.arange(6.0).view(3, 2)
    rowptr, col = torch.tensor([0, 2, 2, 3]), torch.tensor([0, 2, 1])
    found = kernels.spmm(rowptr.to(device), col.to(device), None, x.to(device))
    if not torch.equal(found.cpu(), core_ops.spmm.definition(rowptr, col, None, x)):
        raise ValueError("a compiled kernel is wrong here; please report this machine")
    return ", ".join(f"{k} {v}" for k, v in kernels.describe().items())


def _address() -> str:
    """Returns the addresses of this host's name, which gloo needs."""
    name = socket.gethostname()
    found = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}
    return f"{name} is {', '.join(sorted(found))}"


def _interfaces() -> str:
    """Returns the network interfaces that GLOO_SOCKET_IFNAME may name."""
    return ", ".join(name for _, name in socket.if_nameindex())


def _round_trip() -> str:
    """Starts two ranks on this machine, and all-reduces a number over gloo."""
    sums = launch(_sum_of_ranks, 2, timeout=PATIENCE)
    if sums != [3.0, 3.0]:
        raise ValueError(f"an all_reduce of 1 and 2 gave {sums}")
    return "agree"


def _sum_of_ranks() -> float:
    mesh = init(backend="gloo", timeout=PATIENCE)
    return float(collectives.all_reduce(torch.tensor(mesh.rank + 1.0), mesh.world))


def run_doctor(arguments: argparse.Namespace) -> int:
    """Prints the report; returns 0 when the package can run here, and 1 otherwise."""
    found = []
    for finding in examine():
        found.append(finding)
        if not arguments.json:
            print(finding, flush=True)
    wrong = [finding.what for finding in found if finding.wrong]
    if arguments.json:
        findings = [asdict(finding) for finding in found]
        print(json.dumps({"ready": not wrong, "findings": findings}, indent=1))
    else:
        print(f"\nnot ready: {', '.join(wrong)}" if wrong else "\nready")
    return 1 if wrong else 0

"""Runs the command `pyg-distcomm doctor`: checks this machine, and says what to do."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

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
OPTIONAL = {  # package -> what is lost without it, and what to do; "" for nothing
    "pymetis": "partition method 'metis' falls back to 'ldg'; "
    "pip install 'pyg-distcomm[metis]'",
    "scikit-learn": "the data set 'digits' cannot be made; "
    "pip install 'pyg-distcomm[demo]'",
    "matplotlib": "`report` and the notebooks cannot draw; pip install 'pyg-distcomm[plot]'",
    "pyg-lib": "",
    "torch-sparse": "",
}
PATIENCE = 120.0  # seconds the round trip may take, process start included


@dataclass(frozen=True)
class Finding:
    """Describes one line of the report.

    what    what was checked
    found   the result
    advice  what to do about it; "" if nothing
    needed  whether the package cannot run until that is done
    """

    what: str
    found: str
    advice: str = ""
    needed: bool = False

    @property
    def wrong(self) -> bool:
        """Whether the package cannot run like this."""
        return bool(self.advice) and self.needed

    def __str__(self) -> str:
        mark = "wrong" if self.wrong else "note" if self.advice else "ok"
        tail = f"\n{'':25}-> {self.advice}" if self.advice else ""
        return f"{mark:<6} {self.what:<17} {self.found}{tail}"


def examine() -> Iterator[Finding]:
    """Yields all checks; the slowest, a round trip between two ranks, comes last."""
    yield Finding("python", f"{platform.python_version()} on {platform.platform()}")
    for name, minimum in REQUIRED.items():
        yield required(name, minimum)
    for name in OPTIONAL:
        yield optional(name)
    yield back_end("gloo", dist.is_available() and dist.is_gloo_available())
    yield back_end("nccl", dist.is_available() and dist.is_nccl_available())
    yield devices()
    yield cores()
    yield compiled()
    yield cuda_kernels()
    yield host_name(socket.gethostname())
    yield interfaces()
    yield round_trip()


def required(name: str, minimum: tuple[int, ...]) -> Finding:
    """Checks for a required package, in a minimum version, and whether that was tested."""
    least = ".".join(map(str, minimum))
    version = _version(name)
    if version is None or _version_numbers(version) < minimum:
        found = f"{version}, older than {least}" if version else "missing"
        return Finding(name, found, f"pip install '{name}>={least}'", needed=True)
    tested = TESTED.get(name)
    if tested and _minor(version) not in map(_minor, tested):
        found = f"{version}, with which this package was not tested"
        return Finding(
            name,
            found,
            f"tested with {', '.join(tested)}: if something fails, try one of these",
        )
    return Finding(name, version)


def _minor(version: str) -> tuple[int, ...]:
    return _version_numbers(version)[:2]


def optional(name: str) -> Finding:
    """Checks for an optional package."""
    version, loss = _version(name), OPTIONAL[name]
    if version is None:
        return Finding(name, "missing" if loss else "missing (not needed)", loss)
    return Finding(name, version)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _version_numbers(version: str) -> tuple[int, ...]:
    parts = version.split("+")[0].split(".")
    return tuple(int(part) for part in parts if part.isdecimal())


def back_end(name: str, available: bool) -> Finding:
    """Checks a back end of torch.distributed; NCCL is needed with CUDA devices only."""
    if available:
        return Finding(name, "available")
    if name == "nccl" and not torch.cuda.is_available():
        return Finding(name, "not in this torch (no CUDA device either: gloo is used)")
    advice = f"install a torch that was built with {name}"
    return Finding(name, "not in this torch", advice, needed=name == "gloo")


def devices() -> Finding:
    """Lists the CUDA devices."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [torch.cuda.get_device_name(i) for i in range(count)]
    return Finding("devices", ", ".join(names) or "no CUDA device; ranks use the CPU")


def cores() -> Finding:
    """Compares the cores that this process may use with its number of threads."""
    allowed = os.cpu_count() or 1
    with contextlib.suppress(AttributeError):  # not on macOS and Windows
        allowed = len(os.sched_getaffinity(0))
    threads = torch.get_num_threads()
    found = f"{allowed} usable, {threads} torch threads per process"
    setting = os.environ.get("OMP_NUM_THREADS")
    found += f", OMP_NUM_THREADS={setting}" if setting else ""
    if threads > allowed:
        advice = f"more threads than cores: set OMP_NUM_THREADS={allowed} or lower"
        return Finding("CPU cores", found, advice)
    return Finding("CPU cores", found)


def compiled() -> Finding:
    """Runs a compiled kernel and compares it with its definition."""
    start = time.perf_counter()
    try:
        is_correct = _multiplies("cpu")
        about = ", ".join(f"{k} {v}" for k, v in kernels.describe().items())
    except Exception as error:  # whatever a broken Numba raises, the report goes on
        advice = "pip install --upgrade numba"
        return Finding("kernels", f"fail: {_first_line(error)}", advice, needed=True)
    seconds = time.perf_counter() - start
    if not is_correct:
        advice = "a compiled kernel is wrong here; please report this machine"
        return Finding("kernels", about, advice, needed=True)
    return Finding("kernels", f"{about} (ready in {seconds:.1f} s)")


def _multiplies(device: str) -> bool:
    """Returns whether a small sparse product equals that of its definition."""
    x = torch.arange(6.0).view(3, 2)
    rowptr, col = torch.tensor([0, 2, 2, 3]), torch.tensor([0, 2, 1])
    found = kernels.spmm(rowptr.to(device), col.to(device), None, x.to(device))
    return torch.equal(found.cpu(), core_ops.spmm.definition(rowptr, col, None, x))


def cuda_kernels() -> Finding:
    """Reports which kernels run on CUDA tensors, and runs one if there is a device."""
    version = _version("triton")
    found = "cuSPARSE and plain torch (no Triton)"
    if version is not None:
        found = f"Triton {version} (products, dropout, codecs, draws), cuSPARSE, plain torch"
    found += "; device= of a loader samples there, of a share on the host"
    if not torch.cuda.is_available():
        return Finding("kernels, CUDA", f"no CUDA device; on one: {found}")
    advice = (
        ""
        if version
        else "pip install 'pyg-distcomm[triton]': products without buffers"
    )
    try:
        is_correct = _multiplies("cuda")
    except Exception as error:  # whatever a broken driver raises, the report goes on
        return Finding("kernels, CUDA", f"fail: {_first_line(error)}", "see nvidia-smi")
    if not is_correct:
        advice = "a kernel for CUDA is wrong here; please report this machine"
    return Finding("kernels, CUDA", found, advice)


def host_name(name: str) -> Finding:
    """Checks whether this host's name has an address, which gloo needs."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}
    except OSError as error:
        advice = (
            f"add '127.0.0.1 {name}' to the hosts file, or set GLOO_SOCKET_IFNAME "
            "to the network interface that ranks shall use"
        )
        return Finding("host name", f"{name}: {error}", advice)
    return Finding("host name", f"{name} is {', '.join(sorted(found))}")


def interfaces() -> Finding:
    """Lists the network interfaces that GLOO_SOCKET_IFNAME may name."""
    try:
        names = [name for _, name in socket.if_nameindex()]
    except (AttributeError, OSError) as error:
        return Finding("interfaces", f"cannot be listed: {error}")
    return Finding("interfaces", ", ".join(names))


def round_trip(nprocs: int = 2, patience: float = PATIENCE) -> Finding:
    """Starts ranks on this machine, and all-reduces a number over gloo."""
    what, start = f"{nprocs} ranks, gloo", time.perf_counter()
    try:
        sums = launch(_sum_of_ranks, nprocs, timeout=patience)
    except Exception as error:  # whatever kept them from meeting is the finding
        advice = (
            "ranks cannot reach each other here; set GLOO_SOCKET_IFNAME to an "
            "interface above (lo for one machine), and look at firewall and memory"
        )
        return Finding(what, f"fail: {_first_line(error)}", advice, needed=True)
    if sums != [nprocs * (nprocs + 1) / 2] * nprocs:
        advice = "an all_reduce returned a wrong sum; please report this machine"
        return Finding(what, f"got {sums}", advice, needed=True)
    return Finding(what, f"agree (in {time.perf_counter() - start:.1f} s)")


def _sum_of_ranks() -> float:
    mesh = init(backend="gloo", timeout=PATIENCE)
    return float(collectives.all_reduce(torch.tensor(mesh.rank + 1.0), mesh.world))


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def run_doctor(arguments: argparse.Namespace) -> int:
    """Prints the report; returns 0 when the package can run here, and 1 otherwise."""
    found = []
    for finding in examine():
        found.append(finding)
        if not arguments.json:
            print(finding, flush=True)
    wrong = [finding.what for finding in found if finding.wrong]
    if arguments.json:
        findings = [{**asdict(one), "wrong": one.wrong} for one in found]
        print(json.dumps({"ready": not wrong, "findings": findings}, indent=1))
    else:
        print(f"\nnot ready: {', '.join(wrong)}" if wrong else "\nready")
    return 1 if wrong else 0

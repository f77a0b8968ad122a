"""Imports the package, and runs the 60 tests that say most of a device, in order.

The part `tests` of `python benchmarks/cuda.py`, which see.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from device_clock import Device
from device_report import Report

TESTS = Path(__file__).resolve().parents[1] / "tests"
# Of each test so many cases, spread evenly over those of the default tier that are marked
# `cuda`. First what all else needs, then what most users run, then what spans ranks.
FIRST = (
    # one process, against PyG on the CPU
    ("test_cuda.py::test_one_process", 1),
    ("test_cuda.py::test_layers_on_ordinary_tensors_wait_for_nothing", 1),
    ("test_cuda.py::test_a_step_is_captured_as_a_cuda_graph", 1),
    ("test_cuda.py::test_minibatches_on_the_device_are_trimmed", 1),
    # kernels in Triton, and cuSPARSE, against their definitions in plain torch
    ("test_cuda_kernels.py::test_products", 4),
    ("test_cuda_kernels.py::test_sums_in_the_order_of_the_cpu_have_its_bits", 1),
    ("test_cuda_kernels.py::test_what_torch_brings", 2),
    ("test_cuda_kernels.py::test_keyed_bits_and_masks", 2),
    ("test_cuda_kernels.py::test_keyed_dropout", 3),
    # minibatches drawn on the device, and from pinned memory, against those of the host
    ("test_sample_device.py::test_device_equals_cpu", 5),
    ("test_sample_device.py::test_loaders_yield_the_batches_of_the_host", 2),
    ("test_sample_device.py::test_loaders_read_pinned_memory", 3),
    ("test_sample_device.py::test_layers_read_pinned_memory", 2),
    ("test_sample_device.py::test_rows_are_read_from_pinned_memory", 1),
    ("test_sample_device.py::test_triton_draws_what_is_defined", 1),
    ("test_sample_device.py::test_triton_draws_from_urns_what_is_defined", 1),
    ("test_sample_device.py::test_shares_are_loaded_for_cuda", 1),
    # codecs: the bytes of the CPU
    ("test_cuda_kernels.py::test_quantised_rows_have_the_bytes_of_the_cpu", 1),
    ("test_cuda_kernels.py::test_rows_by_columns", 2),
    (
        "test_cuda_kernels.py::test_codecs_write_the_bytes_of_the_cpu_and_wait_for_nothing",
        4,
    ),
    # the host waits for nothing
    ("test_synchronisations.py::test_no_waits_on_cuda", 1),
    # ranks on one device over gloo: steps, layers, typed graphs, links
    ("test_cuda.py::test_gloo_ranks_share_one_gpu", 1),
    ("test_parity.py::test_step_equals_pyg", 4),
    ("test_layers.py::test_exact", 4),
    ("test_hetero.py::test_training_equals_pyg", 1),
    ("test_products.py::test_contract_on_every_grid", 1),
    ("test_dropout.py::test_ranks_and_cutters_do_not_change_the_masks", 1),
    ("test_mixed_precision.py::test_layers_under_autocast", 1),
    ("test_embedding.py::test_full_graph_training_is_that_of_one_process", 1),
    ("test_checkpoint.py::test_a_resumed_run_is_the_straight_one_bit_for_bit", 1),
    ("test_pipeline.py::test_one_chunk_is_the_full_graph", 2),
    ("test_step_relations.py::test_relations_are_trimmed", 1),
    ("test_tensor.py::test_losses_are_global_means", 1),
    # every kernel and codec once, which takes longest
    ("test_devices.py::test_on_cuda", 1),
)
SMOKED = (
    "test_cuda.py::test_one_process",  # it is skipped without a device
    "test_cuda_kernels.py::test_what_torch_brings",
    "test_sample_device.py::test_device_equals_cpu",
    "test_parity.py::test_step_equals_pyg",
    "test_tensor.py::test_losses_are_global_means",
)


def spread(cases: list[Any], number: int) -> list[Any]:
    """Returns so many of a list, evenly spread, beginning with the first."""
    number = min(number, len(cases))
    return [cases[k * len(cases) // number] for k in range(number)]


class Chosen:
    """Runs tests in order, and writes each into the report, as a plugin of pytest.

    Args:
        report: which has the time, and the lines.
        names: tests, each with the number of its cases.
    """

    def __init__(self, report: Report, names: tuple[tuple[str, int], ...]) -> None:
        self.report, self.names = report, names
        self.add: Any = None
        self.counts: dict[str, int] = {}
        self.told: list[str] = []
        self.begun = 0.0

    @pytest.hookimpl(trylast=True)  # when cases of other marks have been left out
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Picks cases by name, in order, and says which names have none."""
        by_name: dict[str, list[Any]] = {}
        for item in items:
            by_name.setdefault(item.nodeid.partition("[")[0].split("/")[-1], []).append(
                item
            )
        items[:] = [
            item
            for name, number in self.names
            for item in spread(by_name.get(name, []), number)
        ]
        gone = [name for name, _ in self.names if name not in by_name]
        if gone:
            self.report.say(f"Not there: {', '.join(gone)}.")
        self.add = self.report.table(f"{len(items)} tests", "test", "s", "outcome")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Tells the report what runs, for the case that it hangs."""
        self.report.doing, self.begun = nodeid, time.monotonic()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Writes a line when a test has ended."""
        if report.passed and report.when != "call":
            return
        outcome = report.outcome if report.when == "call" else f"{report.outcome}: "
        if report.skipped:
            outcome = f"skipped: {report.longrepr[2]}"
        elif report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            outcome = f"**failed** {str(getattr(crash, 'message', ''))[:300]}"
            self.told.append(f"{report.nodeid}\n{report.longreprtext[-2500:]}")
        kind = outcome.partition(":")[0].split()[0].strip("*")
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self.add(report.nodeid, time.monotonic() - self.begun, outcome)

    def pytest_runtest_logfinish(self) -> None:
        """Ends the session when the time is up."""
        self.session.shouldstop = "no time was left" if self.report.over else False

    def pytest_sessionstart(self, session: Any) -> None:
        """Keeps the session, which is what can be stopped."""
        self.session = session

    def lines(self) -> Iterator[str]:
        """Says how many passed, and what failed."""
        counts = ", ".join(f"{n} {kind}" for kind, n in self.counts.items())
        of = sum(number for _, number in self.names)
        yield f"Of {of}: {counts or 'none ran'}."
        for text in self.told:
            yield f"```\n{text}\n```"


def tests(device: Device, report: Report) -> None:
    """Imports the package, says what that takes, and runs tests until the time is up."""
    start = time.monotonic()
    import pyg_distcomm.api

    assert pyg_distcomm.api.partition
    report.say(
        f"pyg_distcomm {pyg_distcomm.__version__} imports, "
        f"in {time.monotonic() - start:.1f} s."
    )
    names = FIRST
    if device.smoke:
        names = tuple((name, 1) for name, _ in FIRST if name in SMOKED)
    plugin = Chosen(report, names)
    files = dict.fromkeys(str(TESTS / n.partition("::")[0]) for n, _ in names)
    marks = "not exhaustive and not faults" + (" and cuda" if device.cuda else "")
    given = ["-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    given += ["-m", marks, "--place", device.home.type]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, str(TESTS))
    os.chdir(TESTS.parent)
    report.doing = "the collection of tests"
    status = pytest.main([*given, *files], plugins=[plugin])
    for text in plugin.lines():
        report.say(text)
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED,
                      pytest.ExitCode.INTERRUPTED):  # fmt: skip
        report.say(f"pytest ended with status {int(status)}.")

"""Times what runs on a device, weighs it, and puts figures into cells of a report."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from device_report import MET, MISSED, Report

# bytes per second of the memory of devices, by NVIDIA's data sheets of their SXM forms
DEVICES = {"a100": 2.039e12, "h100": 3.35e12, "h200": 4.8e12}
OUT_OF_MEMORY = "out of memory"
LONG = 8.0  # seconds after which a measurement is not repeated


@dataclass(frozen=True)
class Found:
    """What was measured, or what stopped it.

    Args:
        seconds: their median.
        spread: the distance from the least to the most of them, as a share of the median.
        peak: bytes beside those that were there; if memory ran out, the bytes that did not do.
        why: what stopped it.
    """

    seconds: float | None = None
    spread: float | None = None
    peak: float | None = None
    why: str = ""

    @property
    def cells(self) -> list[Any]:
        """Returns milliseconds, or what stopped it, their spread, and MiB at the peak."""
        if self.seconds is None or self.spread is None or self.peak is None:
            return [self.why, "", ""]
        return [self.seconds * 1e3, f"{100 * self.spread:.0f} %", self.peak / 2**20]


HEAD = ("ms", "spread", "MiB at peak")


class Device:
    """Times and weighs what runs on a device; on the CPU only that it runs.

    Args:
        kind: "cuda" or "cpu".
        smoke: whether twice is enough.
    """

    def __init__(self, kind: str, smoke: bool) -> None:
        self.home, self.cuda, self.smoke = torch.device(kind), kind == "cuda", smoke
        self.room: int | None = None  # bytes that were free at the last base
        name = torch.cuda.get_device_name().lower() if self.cuda else ""
        self.sheet = next((DEVICES[k] for k in DEVICES if k in name), None)

    def copy_rate(self) -> float:
        """Measures the bytes per second, read and written, of a copy on the device."""
        x = torch.ones(1 << (10 if self.smoke else 28), device=self.home)
        seconds = self.measure(lambda: x.clone()).seconds
        return 2 * x.nbytes / (seconds or 1.0)

    def measure(
        self, run: Callable[[], Any], times: int = 10, base: int | None = None
    ) -> Found:
        """Returns the median of seconds, and the bytes at the peak beside what was there.

        The clock is read when the device has done all it has to do. What the first run, which
        is not timed, leaves behind counts among the bytes; what it needs only then does not.

        Args:
            run: what is timed.
            times: how often; fewer where it takes long.
            base: the bytes that were there, if not those that are there now.
        """
        times = 2 if self.smoke else times
        base = self.base() if base is None else base
        run()  # compiles, plans, and fills caches
        self.wait()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        took: list[float] = []
        while len(took) < times and (len(took) < 2 or sum(took) < LONG):
            start = time.perf_counter()
            out = run()
            self.wait()
            took.append(time.perf_counter() - start)
            del out
        peak = torch.cuda.max_memory_allocated() - base if self.cuda else 0
        middle = statistics.median(took)
        return Found(middle, (max(took) - min(took)) / middle, peak)

    def base(self) -> int:
        """Returns the bytes that are held now, and notes how many are free."""
        self.clear()
        if not self.cuda:
            return 0
        self.room = torch.cuda.mem_get_info()[0]
        return torch.cuda.memory_allocated()

    def wait(self) -> None:
        """Waits for all that the device has to do."""
        if self.cuda:
            torch.cuda.synchronize()

    def wait_here(self) -> None:
        """Waits for what the current stream has to do, and no other."""
        if self.cuda:
            torch.cuda.current_stream().synchronize()

    def tried(self, report: Report, doing: str, measured: Callable[[], Found]) -> Found:
        """Returns what is measured, or what stopped it.

        Args:
            report: which has the time, and is told what is being done.
            doing: what that is.
            measured: measures it.
        """
        if report.over:
            return Found(why="no time was left")
        report.doing, self.room = doing, None
        try:
            return measured()
        except torch.cuda.OutOfMemoryError:
            return Found(peak=self.room, why=OUT_OF_MEMORY)
        except Exception as error:  # one way that fails hides no other
            return Found(why=failure(error))
        finally:
            self.clear()

    def clear(self) -> None:
        """Gives back memory that nothing holds, cuBLAS's own, which is kept, too."""
        gc.collect()
        if self.cuda:
            self.wait()
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()

    def aim(self, found: float | None, least: float) -> list[Any]:
        """Returns a ratio, and whether it is as large as is aimed at where a device tells."""
        if found is None:
            return ["", ""]
        judged = MET if found >= least else MISSED
        return [found, judged if self.cuda and not self.smoke else ""]


def failure(error: Exception) -> str:
    """Returns what a cell says of an error."""
    return f"{type(error).__name__}: {str(error)[:120]}"


def ratio(one: float | None, other: float | None) -> float | None:
    """Returns how many times the other one is, where both are known."""
    return one / other if one and other else None

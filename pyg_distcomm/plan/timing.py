"""Laps: times what all ranks do at once, in turn and lap by lap."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.mesh import Mesh

CROWD = 0.05  # seconds of computing by which is told how many share a processor
FINE = 1e-5  # seconds: by coarser clocks of processors nothing is timed
EPOCHS = 3  # of each small model, each lap
Work = Callable[[], object]
Name = tuple[str, int | str]  # of what is timed, and its width, depth or codec


class LapTimer:
    """Times many things in turn, lap by lap: all of them meet what befalls the machine.

    Where ranks compute with one thread each, by the clock of the processor, which runs for
    one rank at a time, and by how much longer `long` takes, done for a while: what is over
    soon is over before the next rank has begun, and seems to share a processor with none.
    """

    def __init__(self, works: dict[Name, Work], long: Work, mesh: Mesh) -> None:
        self._works, self._long, self._mesh = works, long, mesh
        self._found: dict[Name, list[float]] = {name: [] for name in works}
        clock = time.get_clock_info("thread_time")
        one = torch.get_num_threads() == 1 and mesh.device.type == "cpu"
        coarse = torch.tensor(float(not one or clock.resolution > FINE))
        self._busy = not collectives.all_reduce(coarse, mesh.world, "max")
        self._crowd: list[float] = [] if self._busy else [1.0]
        for work in works.values():
            work()

    def run(self, laps: int, longest: float = math.inf) -> None:
        """Times each once a lap, epochs more often; collective.

        Left out are products that have taken longer than `longest`: they have met enough.
        """
        took = self.medians() if math.isfinite(longest) else {}
        for _ in range(laps):
            if self._busy:
                wall, busy = _both(partial(_a_while, self._long), self._mesh)
                self._crowd.append(wall / busy)
            for name, work in self._works.items():
                small = name[0] == "epoch"
                if small or took.get(name, 0.0) < longest:
                    for _ in range(EPOCHS if small else 1):
                        self._found[name].append(self._computed(work))

    def _computed(self, work: Work) -> float:
        self._mesh.ledger.reset()
        wall, busy = _both(work, self._mesh)
        # what travels is counted where it does
        waits = (entry.seconds for entry in self._mesh.ledger.entries.values())
        return busy if self._busy else wall - sum(waits)

    def medians(self) -> dict[Name, float]:
        """Returns the median seconds of each, equal on all ranks; collective."""
        crowd = max(statistics.median(self._crowd), 1.0)
        return {
            name: slowest([crowd * took for took in found], self._mesh)
            for name, found in self._found.items()
        }


def _a_while(work: Work) -> None:
    end = time.thread_time() + CROWD
    while time.thread_time() < end:
        work()


def _both(work: Work, mesh: Mesh) -> tuple[float, float]:
    """Returns the seconds of something that all ranks begin at once, and of its processor."""
    busy = 0.0

    def clocked() -> None:
        nonlocal busy
        start = time.thread_time()
        work()
        busy = time.thread_time() - start

    return once(clocked, mesh), busy


def once(work: Work, mesh: Mesh) -> float:
    """Returns the seconds of something that all ranks begin at once."""
    collectives.barrier(mesh.world)
    _finish(mesh)
    start = time.perf_counter()
    work()
    _finish(mesh)
    return time.perf_counter() - start


def _finish(mesh: Mesh) -> None:
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)


def timed(work: Work, mesh: Mesh, repeats: int) -> float:
    """Returns the median seconds of something all ranks do at once, until all are done."""
    work()
    return slowest([once(work, mesh) for _ in range(repeats)], mesh)


def slowest(found: list[float], mesh: Mesh) -> float:
    """Returns the median of the rank where that is most.

    Not of what the slowest took each time: in an epoch that is another rank from step to
    step, and the others go on meanwhile.
    """
    middle = torch.tensor(statistics.median(found), dtype=torch.float64)
    return float(collectives.all_reduce(middle, mesh.world, "max"))

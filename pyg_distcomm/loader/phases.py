"""Measures the phases of an epoch: sampling, fetching, collating, training."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pyg_distcomm.comm import timeline
from pyg_distcomm.comm.ledger import Ledger, format_table

SAMPLE, FETCH, ASSEMBLE, WAIT, TRAIN = "sample", "fetch", "assemble", "wait", "train"


@dataclass
class Phase:
    """Sums up one phase of an epoch, on this rank.

    Args:
        seconds: spent in it.
        waiting: of them, for other ranks and the network.
        bytes: received in it.
    """

    seconds: float = 0.0
    waiting: float = 0.0
    bytes: int = 0

    @property
    def computing(self) -> float:
        """Seconds that were not spent waiting for other ranks."""
        return max(self.seconds - self.waiting, 0.0)


@dataclass(eq=False)
class Phases:
    """Sums up the phases of one epoch of a loader, as far as it has come.

    "sample", "fetch" and "assemble" run in threads beside training, so that they add up
    to more than the epoch; "wait" is what the loop waited for the next minibatch, and
    "train" all that it did between two of them. `print(phases)` shows a table.
    """

    by_name: dict[str, Phase] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _left: int | None = None

    @contextmanager
    def timed(self, name: str, ledger: Ledger | None = None) -> Iterator[None]:
        """Adds what a block takes, and what is counted by a ledger of its own meanwhile."""
        begin, before = time.perf_counter_ns(), _travelled(ledger)
        try:
            yield
        finally:
            after = _travelled(ledger)
            self._add(name, begin, after[0] - before[0], after[1] - before[1])

    def asked(self) -> None:
        """Notes that the loop asks for a minibatch: it has trained until now."""
        if self._left is not None:
            self._add(TRAIN, self._left)

    def given(self, asked: int) -> None:
        """Notes that it has got one, and when it asked, in ns."""
        self._add(WAIT, asked)
        self._left = time.perf_counter_ns()

    def _add(self, name: str, begin: int, waiting: float = 0.0, bytes: int = 0) -> None:
        with self._lock:
            phase = self.by_name.setdefault(name, Phase())
            phase.seconds += (time.perf_counter_ns() - begin) / 1e9
            phase.waiting += waiting
            phase.bytes += bytes
        if (recorder := timeline.recorder) is not None:
            about = {"bytes": bytes} if bytes else {}
            recorder.add("loader", name, begin, **about)

    def __getitem__(self, name: str) -> Phase:
        return self.by_name.get(name, Phase())

    def __str__(self) -> str:
        head = ("phase", "seconds", "computing", "waiting for ranks", "bytes received")
        order = [n for n in (SAMPLE, FETCH, ASSEMBLE, WAIT, TRAIN) if n in self.by_name]
        rows = [
            (name, p.seconds, p.computing, p.waiting, p.bytes)
            for name, p in ((n, self.by_name[n]) for n in order)
        ]
        return format_table(head, rows)


def _travelled(ledger: Ledger | None) -> tuple[float, int]:
    """Returns seconds waited and bytes received."""
    if ledger is None:
        return 0.0, 0
    return ledger.total("seconds"), ledger.bytes()


def plot_phases(runs: Mapping[str, Phases], ax: Any = None) -> Any:
    """Plots a stacked bar of phases for each run, with waiting hatched.

    As the breakdown of epochs in [Tripathy24]; phases overlap in time, so a bar is work and
    not the length of an epoch. Returns matplotlib's axes; needs the extra "plot".
    """
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    ax = plt.subplots()[1] if ax is None else ax
    names = [SAMPLE, FETCH, ASSEMBLE, TRAIN]
    colours = dict(
        zip(names, ("tab:blue", "tab:orange", "tab:green", "tab:gray"), strict=True)
    )
    for place, phases in enumerate(runs.values()):
        top = 0.0
        for name in names:
            phase = phases[name]
            for seconds, hatch in ((phase.computing, ""), (phase.waiting, "//")):
                if seconds:
                    ax.bar(place, seconds, bottom=top, color=colours[name], hatch=hatch)
                    top += seconds
    ax.set_xticks(range(len(runs)), list(runs))
    ax.set_ylabel("seconds in an epoch, summed over threads")
    marks = [Patch(color=colours[name], label=name) for name in names]
    marks.append(Patch(fill=False, hatch="//", label="waiting for ranks"))
    ax.legend(handles=marks)
    return ax

"""Saves a run that is told to end: SIGTERM of a scheduler, or Ctrl-C.

[Note: preemption] Signals come to ranks at different moments, or to one of them alone, and a
checkpoint needs all ranks at the same step. So a signal only leaves a mark, and ranks compare
marks once a step, at a place that the script chooses: if any has one, all save, and end.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.mesh import Mesh, latest_mesh

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_AGAIN = 1.0  # seconds after which the same signal is a second one, and not its echo


def on_preempt(save: Callable[[], Any], mesh: Mesh | None = None) -> Preemption:
    """Has a run save itself before SIGTERM or SIGINT (Ctrl-C) ends it.

    Call what this returns once a step, on all ranks:

        preempted = pdc.on_preempt(lambda: pdc.save_checkpoint("last", mesh, model, opt))
        for epoch in range(200):
            train(...)
            preempted()

    From here on these signals do not end a process: at the next `preempted()` after any rank
    has got one, all ranks call `save`, and raise SystemExit with 128 and the signal's number
    (143 for SIGTERM), so that `finally`, `with` (a trace) and `atexit` run. That one rank
    alone got it makes no difference. The same signal a second time, over a second later,
    ends a rank at once, without a checkpoint. A step and the save have to fit in the time
    that a scheduler leaves (torchrun 30 s); a rank that is stopped is waited for until the
    deadline (`timeout` of `pdc.init`).

    Args:
        save: writes the checkpoint; called on all ranks. What it raises is raised.
        mesh: the ranks; those of the last `pdc.init` if None.

    Raises:
        ValueError: outside of the main thread, where Python takes no signals.

    Price: an all-reduce of one word per call.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ValueError(
            "pdc.on_preempt was called in another thread than the main one, and Python "
            "takes signals in the main thread alone: call it there"
        )
    return Preemption(save, mesh)


class Preemption:
    """Compares between ranks whether to end; see `on_preempt`."""

    def __init__(self, save: Callable[[], Any], mesh: Mesh | None) -> None:
        self._save, self._mesh = save, mesh
        self._got, self._at, self._process = 0, 0.0, os.getpid()
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
        for number in SIGNALS:
            signal.signal(number, self._mark)

    def __call__(self) -> None:
        """Goes on, or saves and ends, on all ranks alike."""
        mesh = latest_mesh() if self._mesh is None else self._mesh
        got = self._got
        if mesh is not None:
            mark = torch.tensor([got])
            got = int(collectives.all_reduce(mark, mesh.everyone, "max").item())
        if got:
            self._save()
            self.close()
            raise SystemExit(128 + got)

    def close(self) -> None:
        """Leaves signals to whom they went before."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._mark:
                signal.signal(number, handler)

    def _mark(self, number: int, frame: Any) -> None:
        again = number == self._got and time.monotonic() > self._at + _AGAIN
        if again or os.getpid() != self._process:  # a fork: not one of the ranks
            self.close()
            signal.raise_signal(number)
        elif not self._got:
            self._got, self._at = number, time.monotonic()
            name = signal.Signals(number).name
            print(
                f"{name}: saving at the end of this step; {name} again ends at once",
                file=sys.stderr,
            )

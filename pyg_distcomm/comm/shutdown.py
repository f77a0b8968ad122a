"""Ends a process only after torch's own threads have come to rest.

[Note: at rest] A thread of gloo lets go of a collective's tensors after whoever waited for
it goes on, and needs Python's lock to do so. A thread that asks for the lock while Python
ends takes the process down ("terminate called without an active exception", exit code -6;
pytorch/pytorch#190489), and a script whose last line is a step of training is as quick as
that. So when a process ends, the lock is left to gloo's threads until they sleep.

What is under way by then has a moment to end; then all groups are broken off, since torch
would wait for it until their timeouts: see [Note: one deadline].
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
from datetime import timedelta

import torch.distributed as dist

from pyg_distcomm.comm import failure, p2p
from pyg_distcomm.process import PROCESS

_PATIENCE = 2.0  # seconds for what nobody waited for, and for threads to sleep
_PAUSE = 0.005  # seconds in which a thread that waits for Python's lock would get it
_UNSEEN = 0.05  # seconds left to threads where the system does not tell of them
_TASKS, _NAME = "/proc/self/task", "pt_gloo_runloop"
_MANY = 8  # works remembered before those that have ended are let go


def keep_in_mind(work: dist.Work) -> None:
    """Remembers a collective, which perhaps nobody will wait for, until it has ended."""
    if len(PROCESS.works) >= _MANY:
        PROCESS.works.difference_update(
            [one for one in list(PROCESS.works) if one.is_completed()]
        )
    PROCESS.works.add(work)


def forget(work: dist.Work) -> None:
    """Forgets a collective that was waited for."""
    PROCESS.works.discard(work)


@atexit.register
def come_to_rest() -> None:
    """Ends what is under way, and lets gloo's threads come to rest."""
    p2p.let_go()
    stop = time.monotonic() + _PATIENCE
    for work in list(PROCESS.works):
        left = max(stop - time.monotonic(), 0.001)
        with contextlib.suppress(Exception):
            work.wait(timedelta(seconds=left))
    failure.break_off_all()
    stop = time.monotonic() + _PATIENCE
    while (
        any(not work.is_completed() for work in PROCESS.works)
        and time.monotonic() < stop
    ):
        time.sleep(_PAUSE)
    PROCESS.works.clear()
    if dist.is_available() and dist.is_initialized() and not os.path.isdir(_TASKS):
        time.sleep(_UNSEEN)
    stop = time.monotonic() + _PATIENCE
    before, now = None, _gloo_threads()
    while now and time.monotonic() < stop:
        if now == before and not any("R (" in state for state in now.values()):
            return
        time.sleep(_PAUSE)
        before, now = now, _gloo_threads()


def _gloo_threads() -> dict[str, str]:
    """Returns the state of each, and how often it has come and gone, on Linux."""
    found = {}
    with contextlib.suppress(OSError):
        for thread in os.listdir(_TASKS):
            with (
                contextlib.suppress(OSError),
                open(f"{_TASKS}/{thread}/status") as file,
            ):
                lines = file.read().splitlines()
                if lines[0].split()[-1] == _NAME:
                    told = ("State", "voluntary", "nonvoluntary")
                    found[thread] = " ".join(s for s in lines if s.startswith(told))
    return found

"""Runs kernels, which release the GIL, on a pool of threads.

Work is a list of pieces. The calling thread and its helpers each take the next piece when
they have finished one, so a slow piece does not delay the others. The caller never waits for
a helper that has not started, so concurrent callers, and callers inside a helper, cannot
deadlock.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import pairwise

import torch

# One executor per process and size. The process id is in the key because threads do not
# survive a fork; setdefault needs no lock that a fork could leave locked.
_executors: dict[tuple[int, int], ThreadPoolExecutor] = {}

# the limit set by the calling thread; None for torch's number of threads
_limit: ContextVar[int | None] = ContextVar("pyg_distcomm_threads", default=None)


def width() -> int:
    """Returns the number of threads that a kernel may use: torch's, unless limited."""
    limit = _limit.get()
    return torch.get_num_threads() if limit is None else limit


def spare(ranks: int = 1) -> int:
    """Returns how many of this rank's cores torch's threads leave idle.

    Args:
        ranks: the number of ranks on this host, unless LOCAL_WORLD_SIZE is set.
    """
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        cores = os.cpu_count() or 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    return max(0, cores // max(ranks, 1) - torch.get_num_threads())


@contextmanager
def limited(most: int) -> Iterator[None]:
    """Limits the number of threads of kernels that this thread calls in a block."""
    token = _limit.set(most)
    try:
        yield
    finally:
        _limit.reset(token)


def run(work: Callable[..., None], pieces: Iterable[tuple[int, ...]]) -> None:
    """Calls ``work(*piece)`` for every piece, on `width()` threads."""
    pending = list(pieces)
    pending.reverse()
    helpers = [
        _executor(width()).submit(_drain, work, pending)
        for _ in range(min(width(), len(pending)) - 1)
    ]
    try:
        _drain(work, pending)
    finally:
        pending.clear()
        for helper in [helper for helper in helpers if not helper.cancel()]:
            helper.result()


def split(count: int, parts: int) -> list[tuple[int, int]]:
    """Cuts ``0 .. count`` into at most ``parts`` nearly equal ranges."""
    parts = max(1, min(parts, count))
    bounds = [count * part // parts for part in range(parts + 1)]
    return list(pairwise(bounds))


def run_split(work: Callable[[int, int], None], count: int, grain: int) -> None:
    """Calls ``work(begin, end)`` over ``0 .. count``, ``grain`` or more at a time."""
    pieces = split(count, min(8 * width(), count // max(grain, 1)))
    run(work, pieces if width() > 1 else [(0, count)])


def _drain(work: Callable[..., None], pending: list[tuple[int, ...]]) -> None:
    while True:
        try:
            piece = pending.pop()
        except IndexError:
            return
        work(*piece)


def _executor(size: int) -> ThreadPoolExecutor:
    key = (os.getpid(), size)
    make = partial(ThreadPoolExecutor, size, thread_name_prefix="pyg_distcomm")
    found = _executors.get(key)
    return _executors.setdefault(key, make()) if found is None else found

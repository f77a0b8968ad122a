"""Runs kernels that release the interpreter lock in a pool of threads.

Work is a list of pieces. The caller and its helpers take the next piece when they
are done with the last, so a piece that takes long stalls nobody; and the caller
never waits for a helper that has not started, so concurrent callers, and callers
inside a helper, cannot lock each other out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import torch

from pyg_distcomm.kernels.state import KERNELS


def width() -> int:
    """Returns the number of threads a kernel may use: torch's own, at call time."""
    limit: int | None = getattr(KERNELS.limit, "width", None)
    return torch.get_num_threads() if limit is None else limit


@contextmanager
def limited(most: int) -> Iterator[None]:
    """Sets how many threads the kernels called by this thread may use."""
    before, KERNELS.limit.width = getattr(KERNELS.limit, "width", None), most
    try:
        yield
    finally:
        KERNELS.limit.width = before


def run(work: Callable[..., None], pieces: Iterable[tuple[int, ...]]) -> None:
    """Calls ``work(*piece)`` for every piece, on as many threads as torch uses."""
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
        _join(helpers)


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


def _join(helpers: list[Future[None]]) -> None:
    started = [helper for helper in helpers if not helper.cancel()]
    for helper in started:
        helper.result()


def _executor(size: int) -> ThreadPoolExecutor:
    key = (os.getpid(), size)
    make = partial(ThreadPoolExecutor, size, thread_name_prefix="pyg_distcomm")
    found = KERNELS.executors.get(key)
    return KERNELS.executors.setdefault(key, make()) if found is None else found

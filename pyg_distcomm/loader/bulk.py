"""Bulks: minibatches sampled many at a time, in a background thread, ahead of training."""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

_SLICE = 0.2  # seconds between looks at whether to stop


class Bulks:
    """Minibatches in order, produced a bulk at a time.

    Dropped, exhausted or interrupted, it stops its thread.

    Args:
        plan: what to produce, in order; read by one thread.
        produce: makes a bulk: a list of minibatches for a list from the plan. It is also
            given a function that tells whether to stop.
        finish: applied to each minibatch in the thread that asks for it.
        size: returns how many minibatches the next bulk has.
        ahead: how many bulks may wait; 0 produces on demand, without a thread.
    """

    def __init__(
        self,
        plan: Iterator[Any],
        produce: Callable[[list[Any], Callable[[], bool]], list[Any]],
        finish: Callable[[Any], Any],
        size: Callable[[], int],
        ahead: int,
    ) -> None:
        self._finish = finish
        self._ready: deque[Any] = deque()
        line = _Line(max(ahead, 1))
        bulks = _cut(plan, lambda wanted: produce(wanted, line.stopped), size)
        self._bulks = bulks if ahead == 0 else iter(line)
        if ahead == 0:
            return
        thread = threading.Thread(
            target=_run,
            args=(bulks, line),
            name="pyg_distcomm bulks",
            daemon=True,
        )
        # the thread knows the line, not this object: dropping this ends it
        weakref.finalize(self, _stop, line, thread)
        thread.start()

    def __iter__(self) -> Bulks:
        """Returns itself."""
        return self

    def __next__(self) -> Any:
        """Returns the next minibatch, or raises what producing it raised."""
        if not self._ready:
            self._ready.extend(next(self._bulks))
        return self._finish(self._ready.popleft())


class _Line:
    """Bulks on their way from the thread that makes them to the one that asks."""

    def __init__(self, room: int) -> None:
        self._queue: queue.Queue[tuple[str, Any]] = queue.Queue(room)
        self._stop = threading.Event()

    def put(self, kind: str, value: Any) -> bool:
        """Waits for room; returns whether to go on."""
        while not self._stop.is_set():
            try:
                self._queue.put((kind, value), timeout=_SLICE)
                return not self._stop.is_set()
            except queue.Full:
                continue
        return False

    def stopped(self) -> bool:
        """Tells whether nobody waits any more."""
        return self._stop.is_set()

    def stop(self) -> None:
        """Makes whoever puts give up, also one who waits."""
        self._stop.set()
        while True:
            try:
                self._queue.get_nowait()
            except queue.Empty:
                return

    def __iter__(self) -> Iterator[list[Any]]:
        while True:
            kind, value = self._queue.get()
            if kind == "error":
                self.stop()
                raise value
            if kind == "end":
                return
            yield value


def _cut(
    plan: Iterator[Any],
    produce: Callable[[list[Any]], list[Any]],
    size: Callable[[], int],
) -> Iterator[list[Any]]:
    while wanted := list(islice(plan, size())):
        yield produce(wanted)


def _run(bulks: Iterator[list[Any]], line: _Line) -> None:
    """Fills the line; what goes wrong is put in it too."""
    try:
        for bulk in bulks:
            if not line.put("bulk", bulk):
                return
        line.put("end", None)
    except BaseException as error:
        line.put("error", error)


def _stop(line: _Line, thread: threading.Thread) -> None:
    line.stop()
    # a collector may run this in a helper that the thread itself is waiting for
    if threading.current_thread() is threading.main_thread():
        thread.join(timeout=30)

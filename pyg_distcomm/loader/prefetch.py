"""PrefetchQueue: minibatches made many at a time, in background threads, ahead of training."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

_SLICE = 0.2  # seconds between looks at whether to stop

Stage = Callable[[list[Any], Callable[[], bool]], list[Any]]


class PrefetchQueue:
    """Minibatches in order, made a bulk at a time, each stage in a thread of its own.

    Dropped, exhausted or interrupted, it stops its threads.

    Args:
        plan: what to make, in order; read by one thread.
        stages: each makes a bulk of what the one before made; the first, of a list from
            the plan. They are also given a function that tells whether to stop.
        finish: applied to each minibatch in the thread that asks for it.
        size: returns how many minibatches the next bulk has; 0 ends the plan.
        ahead: how many bulks may wait behind a stage; 0 works on demand, without threads.
        drain: whether a bulk that has been begun goes through all stages in any case:
            where other ranks take part in them. Only `size` may end the plan early.
    """

    def __init__(
        self,
        plan: Iterator[Any],
        stages: Sequence[Stage],
        finish: Callable[[Any], Any],
        size: Callable[[Callable[[], bool]], int],
        ahead: int,
        drain: bool = False,
    ) -> None:
        self._finish = finish
        self._ready: deque[Any] = deque()
        stop = threading.Event()
        bulks: Iterator[list[Any]] = _cut(plan, lambda: size(stop.is_set))
        before: _Line | None = None
        self.threads: list[threading.Thread] = []
        self._close: Any = None
        if ahead == 0:
            for stage in stages:
                bulks = map(partial(_staged, stage, stop), bulks)
            self._bulks = bulks
            return
        for k, stage in enumerate(stages):
            line = _Line(ahead, stop, drain, last=k == len(stages) - 1)
            thread = threading.Thread(
                target=_run,
                args=(bulks, partial(_staged, stage, stop), before, line),
                name="pyg_distcomm bulks",
                daemon=True,
            )
            self.threads.append(thread)
            bulks, before = iter(line), line
        self._bulks = bulks
        # the threads know the lines, not this object: dropping this ends them
        patience = 5.0 if drain else 30.0  # other ranks may not be there any more
        self._close = weakref.finalize(self, _stop, line, self.threads, patience)
        for thread in self.threads:
            thread.start()

    def close(self) -> None:
        """Stops the threads, after what other ranks take part in."""
        if self._close is not None:
            self._close()

    def __iter__(self) -> PrefetchQueue:
        """Returns itself."""
        return self

    def __next__(self) -> Any:
        """Returns the next minibatch, or raises what making it raised."""
        while not self._ready:
            self._ready.extend(next(self._bulks))
        return self._finish(self._ready.popleft())


class _Line:
    """PrefetchQueue on their way from the thread that makes them to the one that asks."""

    def __init__(
        self, room: int, stop: threading.Event, drain: bool, last: bool
    ) -> None:
        self._queue: queue.Queue[tuple[str, Any]] = queue.Queue(room)
        self._stop, self._drain, self._last = stop, drain, last
        self._left = threading.Event()

    def put(self, kind: str, value: Any) -> bool:
        """Waits for room, or for nobody to want it; returns whether to go on."""
        while not self._unwanted():
            try:
                self._queue.put((kind, value), timeout=_SLICE)
                break
            except queue.Full:
                continue
        return self._drain or not self._unwanted()

    def _unwanted(self) -> bool:
        # what is drained goes on to the next stage, whoever has stopped
        through = self._drain and not self._last
        return self._left.is_set() or (self._stop.is_set() and not through)

    def leave(self) -> None:
        """Says that nobody takes any more, and makes room for one who waits."""
        self._left.set()
        self._stop.set()
        ended = RuntimeError(
            "this epoch of the loader has ended, since another one has begun"
        )
        while True:  # whoever puts at this moment may still win
            try:
                self._queue.put_nowait(("error", ended))
                return
            except queue.Full:
                with contextlib.suppress(queue.Empty):
                    self._queue.get_nowait()

    def __iter__(self) -> Iterator[list[Any]]:
        while True:
            kind, value = self._queue.get()
            if kind == "error":
                raise value
            if kind == "end":
                return
            yield value


def _cut(plan: Iterator[Any], size: Callable[[], int]) -> Iterator[list[Any]]:
    while wanted := list(islice(plan, size())):
        yield wanted


def _staged(stage: Stage, stop: threading.Event, bulk: list[Any]) -> list[Any]:
    return stage(bulk, stop.is_set)


def _run(
    bulks: Iterator[list[Any]],
    work: Callable[[list[Any]], list[Any]],
    before: _Line | None,
    line: _Line,
) -> None:
    """Fills a line, from the plan or the line before; what goes wrong is put in it too."""
    try:
        for bulk in bulks:
            if not line.put("bulk", work(bulk)):
                return
        line.put("end", None)
    except BaseException as error:
        line.put("error", error)
        if before is not None:
            before.leave()


def _stop(line: _Line, threads: list[threading.Thread], patience: float) -> None:
    line.leave()
    # a collector may run this in a helper that a thread itself is waiting for
    if threading.current_thread() is threading.main_thread():
        for thread in threads:
            thread.join(timeout=patience)

"""Records what a process does and when: computation, and each exchange with its bytes.

[Note: tracing] One recorder is in use in a process, or none: `PROCESS.recorder` is None unless
`pdc.trace` is open, and whoever could record something looks at that first. What the ledger
counts is recorded by the ledger itself, so that no exchange can be missing from a trace, and
bytes in a trace add up to the ledger's. Times are those of `time.perf_counter_ns`.

`torch.profiler` shows the same by `label`: "pyg_distcomm: halo over row", "product", "encode",
"sample", "fetch" and "wait for ..." among the operations of torch.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from pyg_distcomm.process import PROCESS

LIMIT = 1_000_000  # events of a rank: up to 400 MB

MAIN = "main thread"

clock = time.perf_counter_ns


@dataclass(slots=True, eq=False)
class Span:
    """Something a thread did: begin and end in ns, and what is worth knowing of it."""

    lane: int
    kind: str
    name: str
    begin: int
    end: int
    about: dict[str, Any]


@dataclass(slots=True, eq=False)
class Exchange:
    """One exchange as this rank sees it.

    Args:
        lane: the thread that began it.
        op, axis, words, bytes, sent_bytes, messages: as in the ledger.
        backward: whether a backward pass began it.
        begin: when it was counted, just before it was begun.
        begun: when the call that began it was back; 0 for one that did not get there.
        landed: when all had arrived, where the back end tells.
        waiter: the thread that waited for it; -1 while none has.
        wait, end: when it began to wait, and when it was done.
    """

    lane: int
    op: str
    axis: str
    words: int
    bytes: int
    sent_bytes: int
    messages: int
    backward: bool
    begin: int
    begun: int = 0
    landed: int = 0
    waiter: int = -1
    wait: int = 0
    end: int = 0
    _recorder: Any = field(default=None, repr=False)

    def under_way(self, future: Any) -> None:
        """Notes that it has been begun; `future`, if any, will say when it has landed."""
        self.begun = clock()
        if future is not None:
            future.add_done_callback(self._land)

    def _land(self, _: Any) -> None:
        self.landed = clock()

    def waited(self, begin: int) -> None:
        """Notes that this thread has waited for it, from `begin` until now."""
        self.waiter, self.wait, self.end = self._recorder.lane(), begin, clock()


class Recorder:
    """Keeps the latest events of this process; threads may record at the same time.

    Args:
        limit: how many events to keep; older ones are dropped, and counted.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.events: deque[Span | Exchange] = deque(maxlen=limit)
        self.seen = 0
        self.lanes: list[str] = []
        self.begin = clock()
        self._lock, self._local = threading.Lock(), threading.local()
        self.lane()  # the thread that traces is the first

    def lane(self) -> int:
        """Returns the number of this thread."""
        found: int | None = getattr(self._local, "lane", None)
        if found is None:
            with self._lock:
                found = self._local.lane = len(self.lanes)
                me = threading.current_thread()
                main = me is threading.main_thread()
                self.lanes.append(MAIN if main else me.name)
        return found

    def add(self, kind: str, name: str, begin: int, /, **about: Any) -> None:
        """Records what this thread did from `begin` until now."""
        begin = max(begin, self.begin)  # it may have begun before the trace
        if torch._C._current_graph_task_id() != -1:
            about["pass"] = "backward"
        self._keep(Span(self.lane(), kind, name, begin, clock(), about))

    def exchange(
        self,
        op: str,
        axis: str,
        words: int,
        bytes: int,
        sent_bytes: int,
        messages: int,
    ) -> Exchange:
        """Records that an exchange begins."""
        back = torch._C._current_graph_task_id() != -1
        begin, lane = clock(), self.lane()
        out = Exchange(lane, op, axis, words, bytes, sent_bytes, messages, back, begin)
        out._recorder = self
        self._keep(out)
        return out

    def taken(self) -> tuple[list[Span | Exchange], int]:
        """Returns the events kept, and how many were dropped; threads may go on."""
        with self._lock:
            return list(self.events), self.seen - len(self.events)

    def _keep(self, event: Span | Exchange) -> None:
        with self._lock:
            self.seen += 1
            self.events.append(event)


def label(name: str) -> AbstractContextManager[Any]:
    """Labels a block for `torch.profiler`, where that runs: a label takes microseconds."""
    if not torch.autograd.profiler._is_profiler_enabled:
        return nullcontext()
    return torch.profiler.record_function(f"pyg_distcomm: {name}")


@contextmanager
def span(kind: str, name: str, /, **about: Any) -> Iterator[None]:
    """Records a block, if anyone records."""
    found = PROCESS.recorder
    if found is None:
        yield
        return
    begin = clock()
    try:
        yield
    finally:
        found.add(kind, name, begin, **about)

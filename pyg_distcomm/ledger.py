"""The Ledger: what has travelled, by operation and axis; and plain-text tables."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyg_distcomm import timeline


@dataclass
class Entry:
    """What one operation moved over one axis, seen from this rank."""

    calls: int = 0
    words: int = 0
    bytes: int = 0
    sent_bytes: int = 0
    messages: int = 0
    seconds: float = 0.0


@dataclass
class Ledger:
    """Counts what travels: words and bytes received, messages sent, seconds waited.

    Rows are keyed by (operation, axis). `print(ledger)` shows a table. Threads may count
    at the same time.

    Args:
        entries: the rows.
        parent: another ledger that counts all this one does.
    """

    entries: dict[tuple[str, str], Entry] = field(default_factory=dict)
    parent: Ledger | None = field(default=None, repr=False)
    _events: list[tuple[str, str]] | None = None
    _lock: threading.Lock = field(
        default_factory=threading.Lock, repr=False, compare=False
    )

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what has no meaning in another process."""
        return {**self.__dict__, "_lock": None, "parent": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def note(
        self,
        op: str,
        axis: str,
        *,
        words: int,
        bytes: int,
        sent_bytes: int,
        messages: int,
    ) -> timeline.Exchange | None:
        """Adds one operation; a parent counts it too.

        Returns its record in the trace under way, if there is one.
        """
        if self.parent is not None:
            traced = self.parent.note(
                op,
                axis,
                words=words,
                bytes=bytes,
                sent_bytes=sent_bytes,
                messages=messages,
            )
        elif (recorder := timeline.recorder) is not None:
            traced = recorder.exchange(op, axis, words, bytes, sent_bytes, messages)
        else:
            traced = None
        with self._lock:  # loaders count from threads of their own
            entry = self.entries.setdefault((op, axis), Entry())
            entry.calls += 1
            entry.words += words
            entry.bytes += bytes
            entry.sent_bytes += sent_bytes
            entry.messages += messages
        return traced

    def waited(self, op: str, axis: str, seconds: float) -> None:
        """Adds seconds that an operation was waited for."""
        if self.parent is not None:
            self.parent.waited(op, axis, seconds)
        with self._lock:
            self.entries.setdefault((op, axis), Entry()).seconds += seconds

    def total(self, what: str, op: str | None = None, axis: str | None = None) -> int:
        """Sums one column over the rows that match `op` and `axis`."""
        with self._lock:
            return sum(
                getattr(entry, what)
                for (o, a), entry in self.entries.items()
                if op in (None, o) and axis in (None, a)
            )

    def words(self, op: str | None = None, axis: str | None = None) -> int:
        """Returns the words received."""
        return self.total("words", op, axis)

    def bytes(self, op: str | None = None, axis: str | None = None) -> int:
        """Returns the bytes received."""
        return self.total("bytes", op, axis)

    def messages(self, op: str | None = None, axis: str | None = None) -> int:
        """Returns the messages sent."""
        return self.total("messages", op, axis)

    def reset(self) -> None:
        """Forgets everything counted so far."""
        with self._lock:
            self.entries.clear()

    @contextlib.contextmanager
    def record(self) -> Iterator[list[tuple[str, str]]]:
        """Records the order of events (`begin`, `multiply`, `arrive`) inside a block."""
        events: list[tuple[str, str]] = []
        self._events = events
        try:
            yield events
        finally:
            self._events = None

    def event(self, kind: str, what: str) -> None:
        """Notes one event, if anyone records."""
        if self._events is not None:
            self._events.append((kind, what))

    def __str__(self) -> str:
        head = ("operation", "axis", "calls", "words", "bytes", "messages", "seconds")
        rows = [
            (op, axis, e.calls, e.words, e.bytes, e.messages, round(e.seconds, 4))
            for (op, axis), e in sorted(list(self.entries.items()))
        ]
        sums: list[Any] = [sum(row[i] for row in rows) for i in range(2, 7)]  # type: ignore[misc]
        return format_table(head, [*rows, ("total", "", *sums)])


def format_table(head: Sequence[Any], rows: Sequence[Sequence[Any]]) -> str:
    """Formats rows as a plain-text table: words to the left, numbers to the right."""
    cells = [[_cell(value) for value in row] for row in [head, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    numeric = [
        all(not isinstance(row[i], str) for row in rows) for i in range(len(head))
    ]
    lines = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)

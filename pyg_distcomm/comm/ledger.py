"""Counts communication by operation and axis, labels it for profilers, and prints tables.

A price is the words and messages of an operator, computed from its plan.

Symbols: n nodes, P ranks, grid r x s x p, f features; one *word* is one element.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeAlias

import torch

from pyg_distcomm.process import PROCESS

__all__ = ["Ledger", "Price", "dense_words", "format_table"]


@dataclass
class Entry:
    """Holds the counts of one operation over one axis, as seen by this rank."""

    calls: int = 0
    words: int = 0
    bytes: int = 0
    sent_bytes: int = 0
    messages: int = 0
    seconds: float = 0.0


Rows: TypeAlias = dict[tuple[str, str], Entry]
Exchange: TypeAlias = Callable[[int], None]  # is given the time at which the wait began
clock = time.perf_counter_ns


def label(name: str) -> AbstractContextManager[Any]:
    """Labels a block for `torch.profiler`, only while that runs: a label takes microseconds."""
    if not torch.autograd.profiler._is_profiler_enabled:
        return contextlib.nullcontext()
    return torch.profiler.record_function(f"pyg_distcomm: {name}")


@dataclass
class Ledger:
    """Counts communication: words and bytes received, messages sent, seconds waited.

    Rows are keyed by (operation, axis). `print(ledger)` shows a table. Threads may count
    at the same time.

    Args:
        entries: the rows.
        parent: another ledger that counts everything this one does.
        traced: whether traces show its operations.
    """

    entries: Rows = field(default_factory=dict)
    parent: Ledger | None = field(default=None, repr=False)
    traced: bool = field(default=True, repr=False)
    _events: list[tuple[str, str]] | None = None
    _lock: threading.Lock = field(
        default_factory=threading.Lock, repr=False, compare=False
    )

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the lock and the parent, which mean nothing in another process."""
        return {**self.__dict__, "_lock": None, "parent": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def note(self, op: str, axis: str, **counts: int) -> Exchange | None:
        """Adds one operation, with its words, bytes, sent_bytes and messages.

        A parent counts it too. In a trace, returns what is called after the wait for it.
        """
        traced = None
        if self.parent is not None:
            traced = self.parent.note(op, axis, **counts)
        elif self.traced and (recorder := PROCESS.recorder) is not None:
            traced = recorder.exchange(op, axis, **counts)
        with self._lock:  # loaders count from threads of their own
            entry = self.entries.setdefault((op, axis), Entry())
            for name, count in {"calls": 1, **counts}.items():
                setattr(entry, name, getattr(entry, name) + count)
        return traced

    def waited(self, op: str, axis: str, seconds: float) -> None:
        """Adds the seconds that a thread waited for an operation."""
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
        """Records one event inside a `record` block."""
        if self._events is not None:
            self._events.append((kind, what))

    def table(self, exact: bool = False) -> str:
        """Returns a table of all rows and their sum, as `print(ledger)` does.

        Columns: the counts, the seconds waited, megabytes received per second of waiting
        (not the rate of the link: communication hidden by computation is not waited for),
        and the share of all bytes.

        Args:
            exact: whether large counts are written in full, instead of 1.234 M.
        """
        return _table({"": self.snapshot()}, exact)

    def __str__(self) -> str:
        return self.table()

    def snapshot(self) -> Rows:
        """Returns a copy of the present rows."""
        with self._lock:  # others may count meanwhile
            return {key: replace(entry) for key, entry in self.entries.items()}


@dataclass(frozen=True)
class Ledgers:
    """Holds the ledgers of all ranks, from `mesh.gather_ledger()`; `print` shows a table.

    Args:
        ranks: one for each rank, as they were.
    """

    ranks: tuple[Ledger, ...]

    @property
    def sum(self) -> Ledger:
        """Returns the sum over all ranks."""
        keys = dict.fromkeys(key for ledger in self.ranks for key in ledger.entries)
        return Ledger(
            {
                key: _added(r.entries.get(key, Entry()) for r in self.ranks)
                for key in keys
            }
        )

    def table(self, exact: bool = False) -> str:
        """Returns a table of sums over the ranks, and of the rank with the most bytes.

        "most" is the most bytes that one rank received, "rank" which one, "/mean" how many
        times the mean of all ranks that is, and "slowest" the most seconds one waited.
        """
        return _table(
            {str(rank): ledger.entries for rank, ledger in enumerate(self.ranks)}, exact
        )

    def __str__(self) -> str:
        return self.table()


def _table(ranks: Mapping[str, Rows], exact: bool) -> str:
    """Formats the rows of one rank, or the sums over several and their worst."""
    one = list(ranks) == [""]
    head = ["operation", "axis", "calls", "words", "bytes", "messages"]
    head += ["seconds", "MB/s"] if one else ["most", "rank", "/mean", "slowest"]
    everything = {name: _added(rows.values()) for name, rows in ranks.items()}
    whole = _added(everything.values()).bytes
    lines = []
    keys = sorted({key for rows in ranks.values() for key in rows})
    for key in [*keys, ("total", "")]:
        found = everything
        if key in keys:
            found = {name: rows.get(key, Entry()) for name, rows in ranks.items()}
        both, counted = _added(found.values()), int if exact else Short
        columns: list[Any] = [
            counted(n) for n in (both.calls, both.words, both.bytes, both.messages)
        ]
        if one:
            # a sum over rows, of which some were not waited for, gives no rate
            known = key in keys and both.seconds > 1e-4
            rate = both.bytes / both.seconds / 1e6 if known else 0.0
            rounded = int(rate) if rate >= 100 else round(rate, 2)
            columns += [round(both.seconds, 4), rounded if known else None]
        else:
            rank, most = max(found.items(), key=lambda pair: pair[1].bytes)
            columns += [counted(most.bytes), int(rank)]
            columns.append(most.bytes * len(ranks) / both.bytes if both.bytes else None)
            columns.append(round(max(entry.seconds for entry in found.values()), 4))
        share = Share(both.bytes / whole) if whole else None
        lines.append([*key, *columns, share])
    return format_table([*head, "share"], lines)


def _added(entries: Iterable[Entry]) -> Entry:
    found = list(entries)
    names = [column.name for column in fields(Entry)]
    return Entry(**{name: sum(getattr(e, name) for e in found) for name in names})


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


class Short(int):
    """Prints a count in full up to ten million, then with four digits."""

    def __str__(self) -> str:
        for size, letter in ((10**12, "T"), (10**9, "G"), (10**6, "M")):
            if self >= max(size, 10**7):
                return f"{self / size:.4g} {letter}"
        return f"{int(self):,}"


class Share(float):
    """Prints a share of a whole, in per cent."""

    def __str__(self) -> str:
        return f"{float(self):.1%}"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, (Short, Share)):
        return str(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


@dataclass(frozen=True)
class Price:
    """Holds the cost of one application of an operator on this rank.

    Args:
        words: elements received from other ranks.
        sent: elements sent to other ranks.
        messages: messages sent.
    """

    words: int = 0
    sent: int = 0
    messages: int = 0

    def __add__(self, other: Price) -> Price:
        return Price(
            self.words + other.words,
            self.sent + other.sent,
            self.messages + other.messages,
        )

    def bytes(self, itemsize: int = 4) -> int:
        """Returns the bytes received, for elements of `itemsize` bytes."""
        return self.words * itemsize


def exchange_price(
    send_counts: Sequence[int], recv_counts: Sequence[int], rank: int, width: int
) -> Price:
    """Returns the price of an all_to_all of rows, without those that a rank keeps."""
    peers = [c for i, c in enumerate(send_counts) if i != rank]
    return Price(
        words=(sum(recv_counts) - recv_counts[rank]) * width,
        sent=sum(peers) * width,
        messages=sum(1 for c in peers if c) if width else 0,
    )


def balanced_split(total: int, parts: int) -> list[int]:
    """Splits `total` into `parts` sizes that differ by at most one, larger first."""
    small, extra = divmod(total, parts)
    return [small + (i < extra) for i in range(parts)]


def dense_words(n: int, f: int, grid: tuple[int, int, int]) -> float:
    """Returns the words a rank receives per product when every halo is dense.

        n f/(s p) (1 - 1/r) + n f/(r p) (1 - 1/s) + 2 n f/P (1 - 1/p)

    for balanced rows and features, on a grid r x s x p of P ranks.
    """
    r, s, p = grid
    size = r * s * p
    return (
        n * f * ((1 - 1 / r) / (s * p) + (1 - 1 / s) / (r * p) + 2 * (1 - 1 / p) / size)
    )

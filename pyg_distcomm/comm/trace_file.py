"""Writes what all ranks recorded as one file that Perfetto and chrome://tracing open.

The file is a JSON object with `traceEvents`, as torch's profiler writes it: each rank is a
process, each of its threads a lane. Complete events ("X") of a lane must lie beside or
inside each other, or viewers drop them; spans that do neither get a lane of their own. An
exchange is an async span ("b", "e") from when it was begun to when it had arrived, an X
where it was begun, an X where it was waited for, and an arrow ("s", "f") between them.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from torch import Tensor

from pyg_distcomm.comm.timeline import MAIN, Exchange, Recorder, Span

Event = dict[str, Any]
Placed = tuple[int, str, str, int, int, Event]  # thread, kind, name, begin, end, about
_LANES = 1 << 16  # Perfetto takes a thread's name by its id alone: ids of ranks differ


def record(rank: int, recorder: Recorder, end: int, failed: str | None) -> Event:
    """Returns what a rank has recorded, as plain values."""
    events, dropped = recorder.taken()
    spans = [e for e in events if isinstance(e, Span)]
    exchanges = [e for e in events if isinstance(e, Exchange)]
    return {
        "rank": rank,
        "begin": recorder.begin,
        "end": end,
        "failed": failed,
        "dropped": dropped,
        "lanes": list(recorder.lanes),
        "spans": [[getattr(e, name) for name in Span.__slots__] for e in spans],
        "exchanges": [[getattr(e, name) for name in _EXCHANGE] for e in exchanges],
    }


def as_json(value: Any, depth: int = 3) -> Any:
    """Returns a value as JSON has it; in words what it has not, as NaN or a tensor."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if depth and isinstance(value, dict):
        return {str(k): as_json(v, depth - 1) for k, v in value.items()}
    if depth and isinstance(value, (list, tuple)):
        return [as_json(v, depth - 1) for v in value]
    try:
        if not isinstance(value, (Tensor, np.ndarray, np.generic)):
            return str(value)
        if value.shape == () and type(value).__module__ in ("torch", "numpy"):
            return as_json(value.item(), 0)
        return f"{type(value).__name__} {list(value.shape)}"  # others may hold the rest
    except Exception:
        return type(value).__name__


_EXCHANGE = tuple(name for name in Exchange.__slots__ if not name.startswith("_"))


def write_trace(path: Path, ranks: Sequence[Event], about: Event) -> None:
    """Writes the records of ranks, their times already on one clock.

    Args:
        path: compressed if it ends in .gz; written aside, then put in place.
        ranks: from `record`, in rank order.
        about: what is to be known of the trace itself.
    """
    start = min(rank["begin"] for rank in ranks)
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with _opened(aside, path.suffix == ".gz") as file:
            file.write('{"displayTimeUnit": "ms", "otherData": ')
            file.write(json.dumps(about) + ',\n"traceEvents": [\n')
            before = ""
            for rank in ranks:
                for event in _events(rank, start):
                    file.write(before + json.dumps(event, separators=(",", ":")))
                    before = ",\n"
            file.write("\n]}\n")
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def _opened(path: Path, zipped: bool) -> IO[str]:
    if zipped:
        return gzip.open(path, "wt", compresslevel=5, encoding="utf-8")
    return path.open("w", encoding="utf-8")


def _events(rank: Event, start: int) -> Iterator[Event]:
    """Yields the events of one rank in order of time, names first."""
    exchanges = [dict(zip(_EXCHANGE, e, strict=True)) for e in rank["exchanges"]]
    spans: list[Placed] = [tuple(span) for span in rank["spans"]]
    for e in exchanges:
        name, about = f"{e['op']} {e['axis']}", {"bytes": e["bytes"]}
        if e["begun"]:
            begun = (e["lane"], "send", f"begin {name}", e["begin"], e["begun"], about)
            spans.append(begun)
        if e["end"]:
            over = (e["waiter"], "wait", f"wait {name}", e["wait"], e["end"], about)
            spans.append(over)
    names, placed = _laid_out(spans, rank["lanes"])
    yield from _names(rank, names)
    number = rank["rank"]
    tids: dict[Any, int] = {}
    out: list[tuple[int, Event]] = []
    for tid, span in placed:
        lane, kind, name, begin, end, about = span
        tids.setdefault((kind, lane, begin), tid)
        event = _event("X", name, kind, begin - start, number, tid)
        out.append((begin, {**event, "dur": (end - begin) / 1000, "args": about}))
    for k, e in enumerate(exchanges):
        out += _travel(e, k, rank, tids, start)
    out.sort(key=lambda pair: pair[0])
    yield from (event for _, event in out)


def _event(ph: str, name: str, cat: str, ns: int, rank: int, tid: int) -> Event:
    ident = number_of(rank, tid)
    at = {"ts": ns / 1000, "pid": rank, "tid": ident}
    return {"ph": ph, "name": name, "cat": cat, **at}


def number_of(rank: int, lane: int) -> int:
    """Returns the thread id of a lane: of no other rank, and no process's id."""
    return (rank + 1) * _LANES + lane


def _travel(
    e: Event, k: int, rank: Event, tids: dict[Any, int], start: int
) -> list[tuple[int, Event]]:
    """Returns an exchange as an async span, and an arrow from its begin to its wait."""
    number, name = rank["rank"], f"{e['op']} {e['axis']}"
    end = e["landed"] or e["end"] or rank["end"]
    lane = tids.get(("send", e["lane"], e["begin"]), 0)
    ident = {"id": hex(number << 32 | k)}
    about = {
        n: e[n] for n in ("op", "axis", "words", "bytes", "sent_bytes", "messages")
    }
    about["pass"] = "backward" if e["backward"] else "forward"
    if e["end"]:
        about["exposed_us"] = (e["end"] - e["wait"]) / 1000
        about["hidden_us"] = max(min(e["wait"], end) - e["begin"], 0) / 1000
    elif not e["landed"]:
        about["unfinished"] = True
    first = _event("b", name, "exchange", e["begin"] - start, number, lane)
    last = _event("e", name, "exchange", max(end, e["begin"]) - start, number, lane)
    out = [
        (e["begin"], {**first, **ident, "args": about}),
        (max(end, e["begin"]), {**last, **ident}),
    ]
    if e["begun"] and e["end"]:
        to = tids[("wait", e["waiter"], e["wait"])]
        tail = _event("s", name, "flow", e["begin"] - start, number, lane)
        head = _event("f", name, "flow", e["wait"] - start, number, to)
        out.append((e["begin"], {**tail, **ident}))
        out.append((e["wait"], {**head, **ident, "bp": "e"}))
    return out


def _laid_out(
    spans: Iterable[Placed], threads: Sequence[str]
) -> tuple[list[str], list[tuple[int, Placed]]]:
    """Returns the names of lanes, and each span with its lane.

    A thread has a lane, and more where its spans overlap without lying inside each other.
    Threads of one name that follow each other share their lanes.
    """
    by_thread: dict[int, list[Placed]] = {}
    for span in sorted(spans, key=lambda s: (s[3], -s[4])):
        by_thread.setdefault(span[0], []).append(span)
    lanes: dict[tuple[str, int, int], int] = {}
    ends: dict[str, list[int]] = {}  # of the threads that a name's lanes have taken
    placed = []
    for thread, mine in by_thread.items():
        name = _title(threads[thread], mine)
        until = ends.setdefault(name, [])
        last = max(span[4] for span in mine)
        free = [k for k, end in enumerate(until) if end <= mine[0][3]]
        place = free[0] if free else len(until)
        until[place : place + 1] = [last]
        for deep, span in _nested(mine):
            lane = lanes.setdefault((name, place, deep), len(lanes))
            placed.append((lane, span))
    many = {name for name, place, deep in lanes if place or deep}
    count = dict.fromkeys(many, 0)
    names = []
    for name, _, _ in lanes:
        count[name] = count.get(name, 0) + 1
        names.append(f"{name} ({count[name]})" if name in many else name)
    return names, placed


def _title(thread: str, spans: Iterable[Placed]) -> str:
    """Returns what to call a thread: those of a loader, by what they do."""
    found = sorted({span[2] for span in spans if span[1] == "loader"})
    return f"loader: {', '.join(found)}" if found and thread != MAIN else thread


def _nested(spans: Iterable[Placed]) -> Iterator[tuple[int, Placed]]:
    """Yields each span of a thread, in order, with the first row that it fits in."""
    rows: list[list[int]] = []  # of each row, the ends of the spans open now
    for span in spans:
        for ends in rows:
            while ends and ends[-1] <= span[3]:
                ends.pop()
        fits = [k for k, ends in enumerate(rows) if not ends or span[4] <= ends[-1]]
        if not fits:
            fits = [len(rows)]
            rows.append([])
        rows[fits[0]].append(span[4])
        yield fits[0], span


def _names(rank: Event, lanes: Sequence[str]) -> Iterator[Event]:
    number = rank["rank"]
    title = f"rank {number}" + (f": {rank['failed']}" if rank["failed"] else "")
    yield _named("process_name", number, 0, {"name": title})
    yield _named("process_sort_index", number, 0, {"sort_index": number})
    for lane, name in enumerate(lanes):
        yield _named("thread_name", number, lane, {"name": name})
        yield _named("thread_sort_index", number, lane, {"sort_index": lane})


def _named(what: str, rank: int, lane: int, args: Event) -> Event:
    ident = number_of(rank, lane)
    return {"ph": "M", "name": what, "pid": rank, "tid": ident, "args": args}

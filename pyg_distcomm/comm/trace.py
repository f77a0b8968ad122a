"""Records the computation and communication of each rank, and merges them into one timeline.

[Note: tracing] `PROCESS.recorder` is None unless a `pdc.trace` is open. The ledger records
every operation it counts, so no exchange is missing, and bytes in a trace add up to the
ledger's. `torch.profiler` shows the same work by `label`: "pyg_distcomm: halo over row",
"product", "encode", "sample", "fetch" and "wait for ..." among the operations of torch.

[Note: trace file] A JSON object with `traceEvents`, as torch's profiler writes it: each rank
is a process, each of its threads a lane. Complete events ("X") of a lane must lie beside or
inside each other, or viewers drop them; others get a lane of their own. An exchange is an
async span ("b", "e") from its begin to its arrival, an X where it was begun, an X where it
was waited for, and an arrow ("s", "f") between them.

[Note: clocks] Monotonic clocks of processes on one host are one clock. Elsewhere a rank asks
rank 0 for its time, through the store, and takes the answer for the middle of the round
trip ([Cristian89], on reading a remote clock): it cannot be off by more than half of it. Of
several trips the shortest counts, and between the first and the last reading an offset is
interpolated.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import math
import os
import platform
import threading
import time
import warnings
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules import module as hooks

from pyg_distcomm.comm.failure import FailureMonitor
from pyg_distcomm.comm.store import StoreMailbox, joined_mesh, world_size
from pyg_distcomm.partition.atomic import whole_file
from pyg_distcomm.process import PROCESS

LIMIT = 1_000_000  # events of a rank: up to 500 MB
TRIPS = 16
_MAIN = "main thread"
_GRACE = 3.0  # seconds to wait for the records of other ranks after a failure
_LANES = 1 << 16  # Perfetto takes a thread's name by its id alone: ids of ranks differ
Event = dict[str, Any]
clock = time.perf_counter_ns


def label(name: str) -> AbstractContextManager[Any]:
    """Labels a block for `torch.profiler`, only while that runs: a label takes microseconds."""
    if not torch.autograd.profiler._is_profiler_enabled:
        return contextlib.nullcontext()
    return torch.profiler.record_function(f"pyg_distcomm: {name}")


@contextlib.contextmanager
def span(kind: str, name: str, /, **args: Any) -> Iterator[None]:
    """Labels a block for `torch.profiler`, and records it in the running trace."""
    recorder, begin = PROCESS.recorder, clock()
    try:
        with label(name):
            yield
    finally:
        if recorder is not None:
            recorder.add(kind, name, begin, **args)


class Span(NamedTuple):
    """Holds a block that a thread ran: begin and end in ns, and the arguments to show."""

    lane: int
    kind: str
    name: str
    begin: int
    end: int
    args: Event


@dataclass(slots=True, eq=False)
class Exchange:
    """Records one exchange, from the time the ledger counts it to its arrival."""

    recorder: Recorder
    lane: int
    op: str
    axis: str
    counts: dict[str, int]  # the ledger's columns
    backward: bool
    begin: int
    begun: int = 0  # when the call that started it returned
    landed: int = 0  # when all data had arrived, if the back end reports it
    waiter: int = -1  # the thread that waited for it; begin and end of the wait follow
    wait: int = 0
    end: int = 0

    def mark_started(self, future: Any) -> None:
        """Records that it is started; `future`, if any, calls back on arrival."""
        self.begun = clock()
        if future is not None:
            future.add_done_callback(self._on_arrival)

    def _on_arrival(self, _: Any) -> None:
        self.landed = clock()

    def waited(self, begin: int) -> None:
        """Records that this thread has waited for it, from `begin` until now."""
        self.waiter, self.wait, self.end = self.recorder.lane(), begin, clock()

    def spans(self) -> tuple[Span | None, Span | None]:
        """Returns the call that started it, and the wait for it; None if not ended."""
        name, args = f"{self.op} {self.axis}", {"bytes": self.counts["bytes"]}
        begun, end = self.begun, self.end
        call = Span(self.lane, "send", f"begin {name}", self.begin, begun, args)
        wait = Span(self.waiter, "wait", f"wait {name}", self.wait, end, args)
        return call if begun else None, wait if end else None


class Recorder:
    """Keeps the latest events of this process, and the forward passes of all modules.

    Args:
        limit: how many events to keep; older ones are dropped, and counted.
    """

    def __init__(self, limit: int) -> None:
        self.events: deque[Span | Exchange] = deque(maxlen=limit)
        self.threads: list[str] = []
        self.seen, self.begin = 0, clock()
        self.lock, self._local = threading.Lock(), threading.local()
        self.lane()  # the thread that traces is the first
        self._names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._handles = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
        ]

    def lane(self) -> int:
        """Returns the number of this thread."""
        number: int | None = getattr(self._local, "lane", None)
        if number is None:
            thread = threading.current_thread()
            main = thread is threading.main_thread()
            with self.lock:
                number = self._local.lane = len(self.threads)
                self.threads.append(_MAIN if main else thread.name)
        return number

    def add(self, kind: str, name: str, begin: int, /, **args: Any) -> None:
        """Records a block of this thread, from `begin` until now."""
        begin = max(begin, self.begin)  # it may have begun before the trace
        if torch._C._current_graph_task_id() != -1:
            args["pass"] = "backward"
        self._keep(Span(self.lane(), kind, name, begin, clock(), args))

    def exchange(self, op: str, axis: str, **counts: int) -> Exchange:
        """Records that an exchange begins."""
        back, lane = torch._C._current_graph_task_id() != -1, self.lane()
        exchange = Exchange(self, lane, op, axis, counts, back, clock())
        self._keep(exchange)
        return exchange

    def stop(self) -> tuple[list[Span | Exchange], int]:
        """Returns the events, and the number of dropped ones; threads may go on."""
        for handle in self._handles:
            handle.remove()
        with self.lock:
            return list(self.events), self.seen - len(self.events)

    def _keep(self, event: Span | Exchange) -> None:
        with self.lock:
            self.seen += 1
            self.events.append(event)

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        if module not in self._names:  # the outermost module names those inside it
            for name, inner in module.named_modules():
                kind = type(inner).__name__
                self._names.setdefault(inner, f"{name} ({kind})" if name else kind)
        self._local.__dict__.setdefault("layers", []).append((module, clock()))

    def _leave(self, module: torch.nn.Module, args: Any, out: Any) -> None:
        layers = self._local.__dict__.get("layers", [])
        while layers:  # a module that raised may have left its entry
            found, begin = layers.pop()
            if found is module:
                self.add("layer", self._names[module], begin)
                return


class trace(contextlib.ContextDecorator):
    """Records all ranks in a `with` block, or decorated function, and writes one timeline.

    Every exchange is there with operation, axis, words, bytes and messages, as in the
    ledger, from its begin to its arrival and with what was waited for it; so are the local
    products, the layers of a model (forward), what loaders do in their threads, and what
    the script marks itself, `with run.span("evaluation"):`. Open the file in
    https://ui.perfetto.dev or chrome://tracing. On a CUDA device, spans show when work was
    handed over, not when it ran.

    Entering and leaving are collective; in between, nothing is sent. Rank 0 writes the file.
    If a rank raises an exception, that propagates, and the events so far are written; a rank
    other than 0 also writes its own part to a file named after the rank, which rank 0
    removes once the part is in the merged file.

    Args:
        path: a JSON file; compressed if its name ends in .gz.
        mesh: the ranks; those of the latest `pdc.init` if None, and this process alone
            without one.
        limit: how many events to keep on each rank, the latest.

    Raises:
        ValueError: at the start, on all ranks: if a trace is under way, if the file cannot
            be written there, if paths differ, or if there is more than one rank and no mesh.
        OSError: at the end, on all ranks, if writing has failed.
    """

    def __init__(
        self, path: str | os.PathLike[str], mesh: Any = None, *, limit: int = LIMIT
    ) -> None:
        if limit < 1:
            raise ValueError(f"limit={limit} must be at least 1 event")
        self.path, self._mesh, self._limit = Path(path), mesh, limit

    def span(self, name: str, **about: Any) -> AbstractContextManager[None]:
        """Marks a block of the script on the timeline of this rank.

        `about` is shown with it: plain values, or what `str` makes of others.
        """
        if PROCESS.recorder is not None:
            about = {key: as_json(value) for key, value in about.items()}
        return span("script", str(name), **about)

    def __enter__(self) -> trace:
        mesh = self._mesh or joined_mesh()
        problem = _argument_error(self.path, mesh)
        ranks = _TraceRanks(mesh)
        ranks.begin_together(problem, str(self.path))
        self._ranks, self._started = ranks, time.localtime()
        self._recorder = PROCESS.recorder = Recorder(self._limit)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        end, PROCESS.recorder = clock(), None
        events, dropped = self._recorder.stop()
        failed = None
        if error is not None:  # its cause on another rank may follow the first line
            failed = f"{type(error).__name__}: {[*str(error).splitlines(), ''][0]}"[
                :300
            ]
        if dropped:
            warnings.warn(
                f"the trace keeps the latest {self._limit:,} events of a rank, and "
                f"{dropped:,} were dropped; trace fewer epochs, or raise `limit`",
                stacklevel=2,
            )
        part = {"rank": self._ranks.rank, "failed": failed, "dropped": dropped}
        try:
            self._finish(part, events, end)
        except Exception as other:
            if failed is None:
                raise
            # nothing that goes wrong here may hide the error
            warnings.warn(f"{self.path}: not written: {other}", stacklevel=2)

    def _finish(self, part: Event, events: list[Any], end: int) -> None:
        ranks, failed = self._ranks, part["failed"]
        ranks.end_recording(part)
        found = _trace_events(events, self._recorder.threads, end, part, ranks.at)
        part["text"] = ",\n".join(json.dumps(e, separators=(",", ":")) for e in found)
        if ranks.rank:
            if failed:
                with contextlib.suppress(OSError):  # it has no such folder
                    write_trace(
                        self._rank_file(part), [part], ranks.size, self._started
                    )
            ranks.submit(part)
            return
        parts, late = ranks.collect(part)
        problem = ""
        try:
            write_trace(self.path, parts, ranks.size, self._started)
            for other in parts[1:]:
                if other["failed"]:
                    self._rank_file(other).unlink(missing_ok=True)
        except Exception as error:  # the others wait for the outcome
            problem = f"{self.path}: cannot be written ({error})"
        ranks.box.post("written", problem)
        if problem:
            raise OSError(problem)
        if late is not None and not failed:
            raise late

    def _rank_file(self, part: Event) -> Path:
        stem, dot, rest = self.path.name.partition(".")
        return self.path.with_name(f"{stem}.rank{part['rank']}{dot}{rest}")


def _argument_error(path: Path, mesh: Any) -> str | None:
    """Returns the problem with starting a trace; None if there is none."""
    folder = path.parent
    if PROCESS.recorder is not None:
        return "a trace is under way in this process; end it before the next begins"
    if mesh is None and world_size() > 1:
        return (
            f"there are {world_size()} ranks and no mesh to merge their traces "
            "by; call pdc.init() first, or pass mesh="
        )
    if mesh is not None and mesh.everyone.rank:
        return None
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        why = "is a folder" if path.is_dir() else f"cannot be written in {folder}"
        return f"{path}: {why}; give the name of a file in a folder that exists"
    return None


def write_trace(path: Path, parts: Sequence[Event], size: int, started: Any) -> None:
    """Writes the parts of ranks, in rank order, to a temporary file, and renames it."""
    here = {part["rank"] for part in parts}
    about = {
        "writer": "pyg_distcomm",
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z", started),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "ranks": size,
        "missing_ranks": [rank for rank in range(size) if rank not in here],
        "failed": {p["rank"]: p["failed"] for p in parts if p["failed"]},
        "dropped_events": {p["rank"]: p["dropped"] for p in parts if p["dropped"]},
        "clock_error_us": {p["rank"]: p["error"] / 1000 for p in parts},
    }
    opened: Any = partial(gzip.open, compresslevel=5) if path.suffix == ".gz" else open
    with whole_file(path) as aside, opened(aside, "wt", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "otherData": ' + json.dumps(about))
        for k, part in enumerate(parts):
            file.write((",\n" if k else ',\n"traceEvents": [\n') + part["text"])
        file.write("\n]}\n")


class Reading(NamedTuple):
    """Holds the offset of rank 0's clock at time `at` of this rank's clock, in ns."""

    at: int
    offset: int  # to add for rank 0's
    error: int  # the largest error of the offset


def to_rank0_clock(at: int, readings: Sequence[Reading]) -> int:
    """Converts a time of this rank to rank 0's clock; unchanged without readings."""
    if not readings:
        return at
    first, last = readings[0], readings[-1]
    length = last.at - first.at
    past = min(max(at - first.at, 0), length)
    drift = (last.offset - first.offset) * past // length if length else 0
    return at + first.offset + drift


def host() -> str:
    """Returns an id that is the same for processes with the same monotonic clock, or ""."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/time').st_ino}"
    return ""


class _TraceRanks:
    """Exchanges the notes of a trace between all ranks, those of all stages."""

    def __init__(self, mesh: Any) -> None:
        watch = None if mesh is None else mesh.everyone.watch
        if watch is None:  # one process alone
            alone = StoreMailbox(dist.HashStore())  # type: ignore[attr-defined]
            watch = FailureMonitor(alone, 0, 1, math.inf)
        self.rank, self.size, self._watch = watch.rank, watch.size, watch
        number = next(PROCESS.traces.setdefault(watch, itertools.count()))
        self.box = watch.store.within(f"trace/{number}")
        self._start = clock()  # of rank 0
        self._readings: list[Reading] = []
        self._other_hosts: list[int] = []  # the ranks on other hosts than rank 0's

    def at(self, ns: int) -> int:
        """Returns a time of this rank in ns since the start, on rank 0's clock."""
        return max(to_rank0_clock(ns, self._readings) - self._start, 0)

    def _read(self, key: str, patience: float | None = None) -> Any:
        """Waits for a note, and returns it; None after `patience` seconds, if given.

        Raises:
            Exception: without `patience`, another rank's failure, or past the deadline.
        """
        try:
            if patience is not None:
                there = self.box.wait([key], lambda seconds: seconds > patience)
            else:
                note = f"a note of the trace ({key})"
                with self._watch.waiting(note, over=False) as check:
                    there = self.box.wait([key], check)
            return self.box.read(key) if there else None
        except dist.DistError as error:  # the process that held the store has ended
            raise self._watch.connection_error("a trace", error) from None

    def begin_together(self, problem: str | None, path: str) -> None:
        """Starts the trace on all ranks, or raises on all; compares clocks across hosts."""
        self.box.post(f"in/{self.rank}", [problem, path, host(), self._start])
        notes = [self._read(f"in/{rank}") for rank in range(self.size)]
        _, first, home, self._start = notes[0]
        for rank, (problem, _, _, _) in enumerate(notes):
            if problem is not None:
                raise ValueError(f"rank {rank}: {problem}")
        for rank, (_, path, _, _) in enumerate(notes):
            if path != first:
                raise ValueError(
                    f"rank {rank}: trace to the same path on all ranks: {path!r} here, "
                    f"and {first!r} on rank 0"
                )
        self._other_hosts = [
            r for r, n in enumerate(notes) if r and not home == n[2] != ""
        ]
        self._compare_clocks("begin", self._other_hosts)

    def _compare_clocks(self, when: str, other_hosts: Sequence[int]) -> None:
        """Compares the clocks of ranks on other hosts with rank 0's: see [Note: clocks]."""
        found = []
        for rank, k in itertools.product(other_hosts, range(TRIPS)):
            ask, answer = f"{when}/ask/{rank}/{k}", f"{when}/time/{rank}/{k}"
            if self.rank == 0:
                self._read(ask)
                self.box.post(answer, clock())
            elif self.rank == rank:
                left = clock()
                self.box.post(ask, "")
                there, back = self._read(answer), clock()
                middle = (left + back) // 2
                found.append(Reading(middle, there - middle, (back - left + 1) // 2))
        self._readings += sorted(found, key=lambda reading: reading.error)[:1]

    def end_recording(self, part: Event) -> None:
        """Posts whether this rank has failed, and compares its clock again if not."""
        failed = part["failed"] or ""
        self.box.post(f"out/{self.rank}", failed)
        if not failed and self.rank in self._other_hosts and self._read("out/0") == "":
            self._compare_clocks("end", [self.rank])
        part["error"] = max((reading.error for reading in self._readings), default=0)

    def submit(self, part: Event) -> None:
        """Sends the record of this rank to rank 0; a rank that has not failed waits for it."""
        data = zlib.compress(json.dumps(part).encode(), 1)
        self.box.post_bytes(f"part/{self.rank}", data)
        if not part["failed"] and (problem := self._read("written")):
            raise OSError(problem)

    def collect(self, own: Event) -> tuple[list[Event], BaseException | None]:
        """Returns the parts that have arrived, and the error why others have not."""
        parts, late = [own], None
        stop = time.monotonic() + _GRACE if own["failed"] else None
        for rank in range(1, self.size):
            left = None if stop is None else max(stop - time.monotonic(), 0.0)
            try:
                well = self._read(f"out/{rank}", left) == ""
                if well and stop is None and rank in self._other_hosts:
                    self._compare_clocks("end", [rank])
                if self._read(f"part/{rank}", left) is not None:
                    data = self.box.take_bytes(f"part/{rank}")
                    parts.append(json.loads(zlib.decompress(data)))
            except Exception as error:  # write the parts of the other ranks
                late, stop = error, time.monotonic() + _GRACE
        return parts, late


def _trace_events(
    recorded: Sequence[Any],
    threads: Sequence[str],
    last: int,
    part: Event,
    at: Callable[[int], int],
) -> list[Event]:
    """Returns the events of a rank, as in [Note: trace file], in order of time."""
    spans = [e for e in recorded if isinstance(e, Span)]
    exchanges = [(e, *e.spans()) for e in recorded if isinstance(e, Exchange)]
    spans += [s for _, *parts in exchanges for s in parts if s is not None]
    names, lanes = _assign_lanes(spans, threads)
    rank, out = part["rank"], list[Event]()

    def add(ph: str, name: str, lane: int, ns: int | None = None, **more: Any) -> None:
        when = {} if ns is None else {"ts": at(ns) / 1000}
        place = {"pid": rank, "tid": (rank + 1) * _LANES + lane}
        out.append({"ph": ph, "name": name, **place, **when, **more})

    failed = f": {part['failed']}" if part["failed"] else ""
    add("M", "process_name", 0, args={"name": f"rank {rank}{failed}"})
    add("M", "process_sort_index", 0, args={"sort_index": rank})
    for lane, name in enumerate(names):
        add("M", "thread_name", lane, args={"name": name})
        add("M", "thread_sort_index", lane, args={"sort_index": lane})
    for s in spans:
        more = {"cat": s.kind, "dur": (at(s.end) - at(s.begin)) / 1000, "args": s.args}
        add("X", s.name, lanes[id(s)], s.begin, **more)
    for k, (e, call, wait) in enumerate(exchanges):
        name, ident = f"{e.op} {e.axis}", {"id": hex(rank << 32 | k)}
        end = max(e.landed or (wait.end if wait else last), e.begin)
        args: Event = {"op": e.op, "axis": e.axis, **e.counts}
        args["pass"] = "backward" if e.backward else "forward"
        if wait is not None:
            args["exposed_us"] = (wait.end - wait.begin) / 1000
            args["hidden_us"] = max(min(wait.begin, end) - e.begin, 0) / 1000
        elif not e.landed:
            args["unfinished"] = True
        lane = 0 if call is None else lanes[id(call)]
        add("b", name, lane, e.begin, cat="exchange", args=args, **ident)
        add("e", name, lane, end, cat="exchange", **ident)
        if call is not None and wait is not None:
            add("s", name, lane, e.begin, cat="flow", **ident)
            add("f", name, lanes[id(wait)], wait.begin, cat="flow", bp="e", **ident)
    return sorted(out, key=lambda event: event.get("ts", -1))


def _assign_lanes(
    spans: Sequence[Span], threads: Sequence[str]
) -> tuple[list[str], dict[int, int]]:
    """Returns the names of lanes, and the lane of each span, by its id.

    A thread has a lane, and more where its spans overlap without lying inside each other.
    Threads of one name share lanes; those of a loader are named by their phases.
    """
    phases: dict[int, set[str]] = {}
    for s in spans:
        if s.kind == "loader" and threads[s.lane] != _MAIN:
            phases.setdefault(s.lane, set()).add(s.name)
    rows: dict[str, dict[int, list[Span]]] = {}  # of each name, spans open in its lanes
    names: list[str] = []
    lanes: dict[int, int] = {}
    for s in sorted(spans, key=lambda s: (s.begin, -s.end)):
        does = ", ".join(sorted(phases.get(s.lane, ())))
        name = f"loader: {does}" if does else threads[s.lane]
        row = rows.setdefault(name, {})
        lane = next((k for k, begun in row.items() if _fits_lane(s, begun)), len(names))
        if lane == len(names):
            names.append(name)
        row.setdefault(lane, []).append(s)
        lanes[id(s)] = lane
    for name, row in rows.items():
        for k, lane in enumerate(row, 1) if len(row) > 1 else ():
            names[lane] = f"{name} ({k})"
    return names, lanes


def _fits_lane(span: Span, begun: list[Span]) -> bool:
    """Returns whether a span lies beside or inside the open spans of a lane."""
    while begun and begun[-1].end <= span.begin:
        begun.pop()
    return not begun or (begun[-1].lane == span.lane and span.end <= begun[-1].end)


def as_json(value: Any, depth: int = 3) -> Any:
    """Returns a value that JSON can hold; others, as NaN or a tensor, as text."""
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

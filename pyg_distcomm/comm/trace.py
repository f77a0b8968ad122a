"""Records the computation and communication of each rank, and merges them into one timeline.

[Note: tracing] `PROCESS.recorder` is None unless a `pdc.trace` is open. The ledger records
every operation it counts, so no exchange is missing, and bytes in a trace add up to the
ledger's. `torch.profiler` shows the same work by `label`: "pyg_distcomm: halo over row",
"product", "encode", "sample", "fetch" and "wait for ..." among the operations of torch.

[Note: trace file] A JSON object with `traceEvents`, as torch's profiler writes it: each rank
is a process, each of its threads a lane. What a thread does is a complete event ("X"), waits
included. An exchange is an async span ("b", "e") from its begin to the end of the wait for it.
Times are those of the system clock, which hosts keep in step by NTP, since rank 0 began.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import math
import os
import threading
import time
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.collectives import Axis
from pyg_distcomm.comm.consistency import check_alike, on_all_ranks
from pyg_distcomm.comm.ledger import Exchange, Ledger, clock, label
from pyg_distcomm.comm.store import latest_mesh, world_size
from pyg_distcomm.partition.atomic import disk_error, whole_file
from pyg_distcomm.process import PROCESS

_LANES = 1 << 22  # Perfetto takes a thread's name by its id alone: ids of ranks differ
Event: TypeAlias = dict[str, Any]


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


class Recorder:
    """Keeps the events of this process, in the form of [Note: trace file].

    `zero` is the time of `clock` when rank 0 began, in ns.
    """

    def __init__(self, rank: int, zero: int) -> None:
        self._rank, self._zero, self._begin = rank, zero, clock()
        self._ids = itertools.count(rank << 32)
        self._lanes: set[int] = set()
        self._events: list[Event] = []
        self._keep("M", "process_name", args={"name": f"rank {rank}"})

    def add(self, kind: str, name: str, begin: int, /, **args: Any) -> Event:
        """Records a block of this thread, from `begin` until now, and returns it."""
        begin = max(begin, self._begin)  # it may have begun before the trace
        if _in_backward():
            args["pass"] = "backward"
        dur = (clock() - begin) / 1000
        return self._keep("X", name, begin, cat=kind, dur=dur, args=args)

    def exchange(self, op: str, axis: str, **counts: int) -> Exchange:
        """Records that an exchange begins; returns what is called after the wait for it."""
        args = {"op": op, "axis": axis, **counts}
        args["pass"] = "backward" if _in_backward() else "forward"
        name, about = f"{op} {axis}", {"cat": "exchange", "id": hex(next(self._ids))}
        event = self._keep("b", name, clock(), **about, args=args)

        def waited(begin: int) -> None:
            wait = self.add("wait", f"wait {name}", begin, bytes=counts["bytes"])
            args["exposed_us"] = wait["dur"]
            self._keep("e", name, clock(), **about, tid=event["tid"])

        return waited

    def in_order(self) -> list[Event]:
        """Returns the events in order of time; threads may go on."""
        return sorted(self._events, key=lambda e: (e.get("ts", -1), -e.get("dur", 0)))

    def _keep(self, ph: str, name: str, at: int | None = None, **more: Any) -> Event:
        thread = threading.current_thread()
        lane = (self._rank + 1) * _LANES + (thread.native_id or 0)
        if lane not in self._lanes:
            self._lanes.add(lane)
            self._keep("M", "thread_name", args={"name": thread.name})
        event = {"ph": ph, "name": name, "pid": self._rank, "tid": lane, **more}
        if at is not None:
            event["ts"] = max(at - self._zero, 0) / 1000
        self._events.append(event)
        return event


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class trace(contextlib.ContextDecorator):
    """Records what all ranks do in a `with` block or decorated function, as one timeline.

    Every exchange is there with operation, axis, words, bytes and messages, as in the
    ledger, from its begin to the end of the wait for it; so are the local products, what
    loaders do in their threads, and what the script marks itself, as a layer or
    `with run.span("evaluation"):`. Open the file in https://ui.perfetto.dev or
    chrome://tracing. On a CUDA device, spans show when work was handed over, not when it ran.
    Events are kept in memory, about 1 KB each, so trace a few epochs at a time.

    Entering and leaving are collective; in between, nothing is sent. Rank 0 writes the file.
    If a rank raises an exception, that propagates, and each rank that is left writes its own
    events so far beside the file, as "rank1.run.json".

    Args:
        path: a JSON file; compressed if its name ends in .gz.
        mesh: the ranks; those of the latest `pdc.init` if None, and this process alone
            without one.

    Raises:
        ValueError: at the start, on all ranks: if a trace is under way, if the file cannot
            be written there, if paths differ, or if there is more than one rank and no mesh.
        OSError: at the end, on all ranks, if writing has failed.
    """

    def __init__(self, path: str | os.PathLike[str], mesh: Any = None) -> None:
        self.path, self._mesh = Path(path), mesh

    def span(self, name: str, **about: Any) -> AbstractContextManager[None]:
        """Marks a block of the script on the timeline of this rank.

        `about` is shown with it: plain values, or what `str` makes of others.
        """
        if PROCESS.recorder is not None:
            about = {key: as_json(value) for key, value in about.items()}
        return span("script", str(name), **about)

    def __enter__(self) -> trace:
        mesh = self._mesh or latest_mesh()
        # in no ledger of the mesh, and in no trace
        own = Ledger(traced=False)
        axis = self._axis = Axis("trace", 0, 1, None, own, None)
        if mesh is not None and mesh.everyone.size > 1:
            axis = self._axis = replace(mesh.everyone, ledger=own)
        with on_all_ranks(axis):
            _check_arguments(self.path, mesh)
        check_alike({"path": str(self.path)}, axis)
        ahead = time.time_ns() - clock()
        begin = collectives.broadcast_object(clock() + ahead, axis)
        self._recorder = PROCESS.recorder = Recorder(axis.rank, begin - ahead)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        PROCESS.recorder = problem = None
        events = self._recorder.in_order()
        try:
            if error is None:
                problem = self._merge(events)
        except Exception as other:  # of another rank
            error = other
            raise
        finally:
            if error is not None:
                self._write_own(error, events)
        if problem:
            raise OSError(problem)

    def _merge(self, events: list[Event]) -> str:
        """Sends events to rank 0, which writes all; returns the problem with writing, or ""."""
        axis, problem = self._axis, ""
        packed = zlib.compress(json.dumps(events).encode(), 1)
        sent = [len(packed) if peer == 0 else 0 for peer in range(axis.size)]
        sizes = collectives.exchange_counts(sent, axis)
        data = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        came = collectives.all_to_all(data, sent, sizes, axis, "plan").wait()
        if axis.rank == 0:
            raw = (part.numpy().tobytes() for part in came.split(sizes))
            parts = [json.loads(zlib.decompress(each)) for each in raw]
            try:
                _write(self.path, parts, {"ranks": len(parts)})
            except Exception as error:  # the others wait for the outcome
                why = getattr(error, "strerror", None) or error
                advice = "trace to another place"
                problem = f"{self.path}: cannot be written: {why}; {advice}"
        return str(collectives.broadcast_object(problem, axis))

    def _write_own(self, error: BaseException, events: list[Event]) -> None:
        """Writes the events of this rank alone; a problem with that does not hide the error."""
        path, axis = self.path, self._axis
        if axis.size > 1:
            path = path.with_name(f"rank{axis.rank}.{path.name}")
        told = [*str(error).splitlines(), ""][0]  # its cause may follow
        about = {"failed": f"{type(error).__name__}: {told}"[:300]}
        try:
            _write(path, [events], about)
        except Exception as other:
            warnings.warn(f"{path}: not written: {other}", stacklevel=3)


def _check_arguments(path: Path, mesh: Any) -> None:
    """Raises ValueError if a trace cannot start."""
    if PROCESS.recorder is not None:
        raise ValueError(
            "a trace is under way in this process; end it before the next begins"
        )
    if mesh is None and world_size() > 1:
        raise ValueError(
            f"there are {world_size()} ranks and no mesh to merge their traces "
            "by; call pdc.init() first, or pass mesh="
        )
    if mesh is not None and mesh.everyone.rank:
        return
    if path.is_dir():
        raise ValueError(f"{path}: is a folder; give the name of a file")
    if (error := disk_error(path.parent)) is not None:
        raise ValueError(
            f"{path}: cannot be written: {error.strerror}; trace to another place"
        )


def _write(path: Path, parts: list[list[Event]], about: Mapping[str, Any]) -> None:
    events = [event for part in parts for event in part]
    found = {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}
    opened: Any = gzip.open if path.suffix == ".gz" else open
    with whole_file(path) as aside, opened(aside, "wt", encoding="utf-8") as file:
        json.dump(found, file)


def as_json(value: Any, depth: int = 3) -> Any:
    """Returns a value that JSON can hold; others, as NaN or a tensor, as text."""
    alone = type(value) in (Tensor, np.ndarray) and value.shape == ()
    if alone or isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, (Tensor, np.ndarray)):  # others may hold the rest
        return f"{type(value).__name__} {list(value.shape)}"
    if depth and isinstance(value, dict):
        return {str(k): as_json(v, depth - 1) for k, v in value.items()}
    if depth and isinstance(value, (list, tuple)):
        return [as_json(v, depth - 1) for v in value]
    return str(value)

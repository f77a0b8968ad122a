"""Merges a timeline of all ranks into one file, of computation and exchanges.

Ranks exchange records, and the time, through the rendezvous store.

[Note: clocks] Monotonic clocks of processes on one host are one clock. Elsewhere a rank asks
rank 0 for its time, through the store, and takes the answer for the middle of the round
trip ([Cristian89], on reading a remote clock): it cannot be off by more than half of it. Of
several trips the shortest counts, and between the first and the last reading an offset is
interpolated. Notes are no collectives: they reach a rank also when another has failed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import threading
import time
import warnings
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.nn.modules import module as hooks

from pyg_distcomm.comm import timeline
from pyg_distcomm.comm.failure import FailureMonitor
from pyg_distcomm.comm.mesh import Mesh, latest_mesh, world_size
from pyg_distcomm.comm.timeline import LIMIT, Recorder, clock
from pyg_distcomm.comm.trace_file import as_json, record, write_trace
from pyg_distcomm.process import PROCESS

TRIPS = 16
_PIECE = 1 << 20  # the store takes values of a few MB
_SLICE = 0.25


@dataclass(frozen=True)
class Reading:
    """What rank 0's clock showed beside this one's.

    Args:
        at: this rank's clock, in ns.
        offset: what to add to it for rank 0's.
        error: how far off that can be.
    """

    at: int
    offset: int
    error: int


def to_first(at: int, readings: Sequence[Reading]) -> int:
    """Returns a time of this rank on rank 0's clock; none known, as it is."""
    if not readings:
        return at
    first, last = readings[0], readings[-1]
    drift = last.offset - first.offset
    span = last.at - first.at
    past = min(max(at - first.at, 0), span)
    return at + first.offset + (drift * past // span if span else 0)


def host() -> str:
    """Returns what processes with the same monotonic clock have in common, or ""."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/time').st_ino}"
    except OSError:
        return ""


class StoreMailbox:
    """Notes between the ranks of a mesh, under a name of their own."""

    def __init__(self, watch: FailureMonitor, name: str) -> None:
        self._watch, self._name = watch, name

    def post(self, key: str, value: str) -> None:
        """Leaves a short note."""
        self._watch.store.set(f"{self._name}/{key}", value)

    def read(self, key: str, patience: float | None = None) -> str | None:
        """Waits for a note, and returns it.

        With `patience`, in seconds, waits no longer, and returns None if it has not come.

        Raises:
            Exception: without `patience`, another rank's failure, or past the deadline.
        """
        watch, name = self._watch, f"{self._name}/{key}"
        begin, pause, looked = time.monotonic(), 0.0, 0.0
        while not self._there(name):
            past = time.monotonic() - begin
            if past > (watch.deadline if patience is None else patience):
                if patience is not None:
                    return None
                raise watch.expired(f"a note of the trace ({key})")
            if patience is None and past > looked + _SLICE:
                watch.look()
                looked = past
            if past > 0.005:  # until then it may be about the time
                pause = min(2 * pause + 1e-4, 0.02)
                time.sleep(pause)
        return str(watch.store.get(name).decode())

    def _there(self, name: str) -> bool:
        try:
            return bool(self._watch.store.check([name]))
        except RuntimeError as error:  # it went with the process that held it
            raise self._watch.broken("a trace", error) from None

    def post_all(self, key: str, data: bytes) -> None:
        """Leaves a note of any size."""
        pieces = range(0, len(data), _PIECE)
        for k, begin in enumerate(pieces):
            piece = data[begin : begin + _PIECE]
            self._watch.store.set(f"{self._name}/{key}/{k}", piece)
        self.post(key, str(len(pieces)))

    def read_all(self, key: str, patience: float | None = None) -> bytes | None:
        """Does as `read` for such a note, and takes it off the store."""
        pieces = self.read(key, patience)
        if pieces is None:
            return None
        store, out = self._watch.store, bytearray()
        for k in range(int(pieces)):
            out += store.get(f"{self._name}/{key}/{k}")
            store.delete_key(f"{self._name}/{key}/{k}")
        return bytes(out)

    def ask_time(self, rank: int, when: str) -> Reading:
        """Returns how this rank's clock stands to that of rank 0, which answers."""
        found = []
        for k in range(TRIPS):
            left = clock()
            self.post(f"{when}/asks/{rank}/{k}", "")
            told = int(self.read(f"{when}/told/{rank}/{k}") or 0)
            back = clock()
            middle = (left + back) // 2
            found.append(Reading(middle, told - middle, (back - left + 1) // 2))
        return min(found, key=lambda reading: reading.error)

    def tell_time(self, rank: int, when: str) -> None:
        """Answers a rank."""
        for k in range(TRIPS):
            self.read(f"{when}/asks/{rank}/{k}")
            self.post(f"{when}/told/{rank}/{k}", str(clock()))


_GRACE = 3.0  # seconds for the records of others, once this rank has failed


def trace(
    path: str | os.PathLike[str], mesh: Mesh | None = None, *, limit: int = LIMIT
) -> Trace:
    """Returns a context, or decorator, that records all ranks and writes one timeline.

    Every exchange is there with operation, axis, words, bytes and messages, as in the
    ledger, from its begin to its arrival and with what was waited for it; so are the local
    products, the layers of a model (forward), what loaders do in their threads, and what
    the script marks itself, `with run.span("evaluation"):`. Open the file in
    https://ui.perfetto.dev or chrome://tracing.

    Collective at both ends; in between, nothing is sent. Rank 0 writes. If a rank leaves
    by an exception, it goes on its way, and what has been recorded is written; a rank
    other than 0 also writes its own part beside the file, named after the rank, which rank 0
    removes if it gets as far as putting it in the whole.

    On a CUDA device, spans show when work was handed over, not when it ran.

    Args:
        path: a JSON file; compressed if its name ends in .gz.
        mesh: the ranks; those of the latest `pdc.init` if None, and this process alone
            without one.
        limit: how many events to keep on each rank, the latest.

    Raises:
        ValueError: at the start, on all ranks: if a trace is under way, if the file cannot
            be written there, or if there is more than one rank and no mesh.
        OSError: at the end, on all ranks, if writing has failed.
    """
    return Trace(Path(path), mesh, limit)


class Trace(contextlib.ContextDecorator):
    """What `trace` returns."""

    def __init__(self, path: Path, mesh: Mesh | None, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"limit={limit} must be at least 1 event")
        self.path, self._given, self._limit = path, mesh, limit

    def span(self, name: str, **about: Any) -> contextlib.AbstractContextManager[None]:
        """Marks a block of the script on the timeline of this rank.

        Args:
            name: as it is shown.
            about: what is to be known of it: plain values, or what `str` makes of others.
        """
        if PROCESS.recorder is not None:
            about = {key: as_json(value) for key, value in about.items()}
        return timeline.span("script", str(name), **about)

    def __enter__(self) -> Trace:
        mesh = self._given or latest_mesh()
        problem = _check(self.path, mesh)
        if PROCESS.recorder is not None:
            problem = (
                "a trace is under way in this process; end it before the next begins"
            )
        ranks = _Ranks(mesh)
        ranks.meet(problem, str(self.path))
        self._ranks = ranks
        self._recorder = PROCESS.recorder = Recorder(self._limit)
        self._started = time.time()
        self._layers = _Layers(self._recorder)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        end = timeline.clock()
        PROCESS.recorder = None
        self._layers.remove()
        told = [*str(error).splitlines(), ""][0]  # its cause on another rank may follow
        failed = None if kind is None else f"{kind.__name__}: {told}"[:300]
        mine = record(self._ranks.rank, self._recorder, end, failed)
        if mine["dropped"]:
            warnings.warn(
                f"the trace keeps the latest {self._limit:,} events of a rank, and "
                f"{mine['dropped']:,} were dropped; trace fewer epochs, or raise `limit`",
                stacklevel=2,
            )
        if failed is None:
            self._finish(mine)
            return
        try:  # nothing that goes wrong here may hide the error
            self._finish(mine)
        except Exception as other:
            warnings.warn(f"{self.path}: not written: {other}", stacklevel=2)

    def _finish(self, mine: dict[str, Any]) -> None:
        ranks = self._ranks
        if ranks.rank:
            if mine["failed"]:
                with contextlib.suppress(OSError):  # it has no such folder
                    write_trace(self._own(ranks.rank), [mine], self._about([mine]))
            ranks.hand_in(mine)
            return
        found, late = ranks.collect(mine)
        problem = ""
        try:
            write_trace(self.path, found, self._about(found))
            for part in found[1:]:
                if part["failed"]:
                    self._own(part["rank"]).unlink(missing_ok=True)
        except Exception as error:  # the others wait to be told
            problem = f"{self.path}: cannot be written ({error})"
        ranks.tell(problem)
        if problem:
            raise OSError(problem)
        if late is not None and not mine["failed"]:
            raise late

    def _own(self, rank: int) -> Path:
        stem, dot, rest = self.path.name.partition(".")
        return self.path.with_name(f"{stem}.rank{rank}{dot}{rest}")

    def _about(self, ranks: list[dict[str, Any]]) -> dict[str, Any]:
        size = self._ranks.size
        here = {part["rank"] for part in ranks}
        return {
            "writer": "pyg_distcomm",
            "started": time.strftime(
                "%Y-%m-%dT%H:%M:%S%z", time.localtime(self._started)
            ),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "ranks": size,
            "missing_ranks": [rank for rank in range(size) if rank not in here],
            "failed": {p["rank"]: p["failed"] for p in ranks if p["failed"]},
            "dropped_events": {p["rank"]: p["dropped"] for p in ranks if p["dropped"]},
            "clock_error_us": {p["rank"]: p.get("error", 0) / 1000 for p in ranks},
        }


def _check(path: Path, mesh: Mesh | None) -> str | None:
    """Returns what is wrong with a trace to be begun."""
    if mesh is None and world_size() > 1:
        return (
            f"there are {world_size()} ranks and no mesh to merge their traces "
            "by; call pdc.init() first, or pass mesh="
        )
    if mesh is not None and mesh.everyone.rank:
        return None
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        why = "is a folder" if path.is_dir() else f"cannot be written in {folder}"
        return f"{path}: {why}; give the name of a file in a folder that exists"
    return None


class _Ranks:
    """The ranks of a trace, and what they tell each other; one process alone, nothing."""

    def __init__(self, mesh: Mesh | None) -> None:
        self.rank = 0 if mesh is None else mesh.everyone.rank  # of all stages
        self.size = 1 if mesh is None else mesh.everyone.size
        watch = None if mesh is None else mesh.everyone.watch
        self._board: StoreMailbox | None = None
        self._readings: list[Reading] = []
        self._away: list[int] = []  # the ranks on other hosts than rank 0's
        if mesh is not None and watch is not None and self.size > 1:
            number = next(PROCESS.traces.setdefault(mesh, itertools.count()))
            self._board = StoreMailbox(watch, f"trace/{number}")

    def meet(self, problem: str | None, path: str) -> None:
        """Begins together, or raises on all ranks; compares clocks across hosts."""
        if self._board is None:
            if problem is not None:
                raise ValueError(problem)
            return
        board = self._board
        mine = {"problem": problem, "host": host(), "path": path}
        if self.rank:
            board.post(f"in/{self.rank}", json.dumps(mine))
            told = json.loads(board.read("go") or "{}")
        else:
            others = range(1, self.size)
            notes = [mine] + [json.loads(board.read(f"in/{r}") or "{}") for r in others]
            bad = [(r, n["problem"]) for r, n in enumerate(notes) if n["problem"]]
            bad += [
                (
                    r,
                    f"trace to the same path on all ranks: {n['path']!r} here, and {path!r} "
                    "on rank 0",
                )
                for r, n in enumerate(notes)
                if n.get("path", path) != path
            ]
            away = [r for r in others if not mine["host"] == notes[r]["host"] != ""]
            told = {"bad": bad[:1], "away": away}
            board.post("go", json.dumps(told))
        for rank, text in told["bad"]:
            raise ValueError(f"rank {rank}: {text}")
        self._away = told["away"]
        self._compare("begin", self._away)

    def _compare(self, when: str, away: list[int]) -> None:
        assert self._board is not None
        if self.rank in away:
            self._readings.append(self._board.ask_time(self.rank, when))
        if self.rank == 0:
            for rank in away:
                self._board.tell_time(rank, when)

    def hand_in(self, mine: dict[str, Any]) -> None:
        """Leaves what this rank has recorded to rank 0; one that is well waits for it."""
        assert self._board is not None
        board, well = self._board, not mine["failed"]
        board.post(f"out/{self.rank}", "well" if well else "failed")
        if well and self.rank in self._away and board.read("out/0") == "well":
            self._compare("end", [self.rank])
        _shift(mine, self._readings)
        board.post_all(
            f"record/{self.rank}", zlib.compress(json.dumps(mine).encode(), 1)
        )
        if well and (problem := board.read("written")):
            raise OSError(problem)

    def collect(
        self, mine: dict[str, Any]
    ) -> tuple[list[dict[str, Any]], BaseException | None]:
        """Returns the records there are, and why others have not come."""
        board, found = self._board, [mine]
        if board is None:
            return found, None
        stop = time.monotonic() + _GRACE if mine["failed"] else None
        board.post("out/0", "failed" if mine["failed"] else "well")
        late: BaseException | None = None
        for rank in range(1, self.size):
            left = None if stop is None else max(stop - time.monotonic(), 0.0)
            try:
                state = board.read(f"out/{rank}", left)
                if state == "well" and stop is None and rank in self._away:
                    self._compare("end", [rank])
                data = board.read_all(f"record/{rank}", left)
            except Exception as error:  # the ranks that are there shall be written
                late, stop, data = error, time.monotonic() + _GRACE, None
            if data is not None:
                found.append(json.loads(zlib.decompress(data)))
        return found, late

    def tell(self, problem: str) -> None:
        """Says that the file is there, or why not."""
        if self._board is not None:
            self._board.post("written", problem)


def _shift(mine: dict[str, Any], readings: list[Reading]) -> None:
    """Brings the times of a record on rank 0's clock."""
    if not readings:
        return
    for key in ("begin", "end"):
        mine[key] = to_first(mine[key], readings)
    for name, columns in (("spans", (3, 4)), ("exchanges", (8, 9, 10, 12, 13))):
        for row in mine[name]:
            for k in columns:
                row[k] = to_first(row[k], readings) if row[k] else 0
    mine["error"] = max(reading.error for reading in readings)


class _Layers:
    """Records the forward passes of modules, by hooks on all of them."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._open = recorder, threading.local()
        self._names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._handles = [
            hooks.register_module_forward_pre_hook(self._begin),
            hooks.register_module_forward_hook(self._end, always_call=True),
        ]

    def remove(self) -> None:
        """Takes the hooks away."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, module: torch.nn.Module, args: Any) -> None:
        stack = self._open.__dict__.setdefault("stack", [])
        if module not in self._names:  # the outermost one knows where the others are
            for name, inner in module.named_modules():
                kind = type(inner).__name__
                self._names.setdefault(inner, f"{name} ({kind})" if name else kind)
        stack.append((module, timeline.clock()))

    def _end(self, module: torch.nn.Module, args: Any, out: Any) -> None:
        stack = self._open.__dict__.get("stack", [])
        while stack:  # one that has raised may have left its own behind
            found, begin = stack.pop()
            if found is module:
                self._recorder.add("layer", self._names[module], begin)
                return

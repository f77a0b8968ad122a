"""Reports an error of one rank to the others, ends every wait at the deadline, and says where.

[Note: failure] A rank that fails writes its traceback to the rendezvous store. A rank
that waits does so in short slices, checks the store between them, and raises the failure
it finds there: the same kind of exception, with the rank and the cause in its message. A
rank that waits past the deadline reports where every rank is: see [Note: whereabouts].
Nothing is written while nothing fails. A failure that all ranks had alike, and that a script
caught, is not raised again.

[Note: one deadline] All waits of a mesh end at its deadline, `timeout` of `pdc.init`; those of
torch's own (it makes groups, and DDP's first steps) end `SPARE` seconds later. A call of the
store never returns if the network to it is cut, so each runs in a thread: see `StoreMailbox`.
A collective of gloo only ends at its group's timeout, and a process waits for it when it
exits. A wait that fails therefore aborts all groups of its mesh, which cannot be used again.

[Note: whereabouts] A rank may compute, sleep, or wait in a call of torch's own, and then
cannot answer. So each process has a thread that looks every few seconds whether some rank has
asked, and if so writes to the rendezvous store where the thread that uses the mesh is: the
innermost line outside of this package, torch, PyG and Python's library, and what it calls
there. A rank that waits asks shortly before it tells. Nothing is looked at, or written, while
nobody asks.
"""

from __future__ import annotations

import builtins
import contextlib
import inspect
import json
import os
import re
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any

import torch
from torch.distributed import DistNetworkError

from pyg_distcomm.comm.store import RankError
from pyg_distcomm.kernels import memory
from pyg_distcomm.process import PROCESS

_TELL_AFTER = 20.0  # seconds of a wait after which one rank tells where all of them are
_LOOK_INTERVAL = 2.5  # seconds, at most, until a rank sees that another asks
_JOIN_TIMEOUT = 5.0  # seconds that a look may take when the process ends
_INNER = frozenset(("pyg_distcomm", "torch", "torch_geometric"))
_LIBRARY, _INSTALLED = os.path.dirname(os.__file__) + os.sep, "-packages" + os.sep
_MODULE_CALLS = frozenset(("_wrapped_call_impl", "_call_impl", "__call__"))


@dataclass(eq=False)
class Wait:
    """A wait of this rank for others, in a thread (0 for none)."""

    places: Whereabouts
    doing: str
    thread: int
    question: int = 0  # the number of the last question that it asked; 0 before
    _asked_at: list[float] = field(default_factory=list)
    _tells: bool | None = None  # whether this rank tells; None before

    def look(self, seconds: float, deadline: float) -> None:
        """Asks where the others are, or tells it, once the wait has taken long enough."""
        if self not in self.places.waits:
            self.places.waits.append(self)
        ahead = 2.5 * look_interval(deadline)  # for answers to come
        for at in (_TELL_AFTER, deadline):
            if at <= deadline and seconds > at - ahead and at not in self._asked_at:
                self._asked_at.append(at)
                self.question = self.places.ask()
        if seconds > _TELL_AFTER and self._tells is None:
            self._tells = self.places.claim()
            if self._tells:
                told = f"after {seconds:.0f} s {self.places.told(self)}"
                print(f"pyg_distcomm: {told}", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Forgets the wait, and lets another rank tell of a later one."""
        if self in self.places.waits:
            self.places.waits.remove(self)
        if self._tells:
            self.places.release()


class Whereabouts:
    """Asks, answers and tells where in the script the ranks of a mesh are.

    Args:
        call: calls a method of the mesh's store; returns None if the store is lost.
        rank: this rank.
        size: how many ranks there are.
        threads: says which thread uses the mesh.
    """

    def __init__(
        self, call: Callable[..., Any], rank: int, size: int, threads: Any
    ) -> None:
        self._call, self._threads = call, threads
        self.rank, self.size = rank, size
        self.waits: list[Wait] = []
        self._answered = 0

    def ask(self) -> int:
        """Asks all ranks where they are; returns the number of the question."""
        return self._call("add", "asks", 1) or 0

    def answer(self, store: Any) -> None:
        """Writes where this rank is, if a rank has asked since the last answer.

        Args:
            store: the mesh's store, for the calls of the thread that answers.
        """
        number = store.add("asks", 0)
        if number > self._answered:
            store.set(f"at/{self.rank}", json.dumps([number, *self.here()]))
            self._answered = number

    def claim(self) -> bool:
        """Returns whether this rank, and no other that waits, is to tell."""
        mine = str(self.rank)
        first = self._call("compare_set", "telling", "", mine)
        return first is not None and bytes(first).decode() == mine

    def release(self) -> None:
        """Ends a claim."""
        self._call("compare_set", "telling", str(self.rank), "")

    def here(self) -> tuple[bool, str]:
        """Returns whether this rank waits, and its place in the script."""
        frames, waits = sys._current_frames(), list(self.waits)
        threads = [wait.thread for wait in waits]
        threads += [self._threads.current, threading.main_thread().ident or 0]
        places = (place_of(frames.get(thread)) for thread in threads)
        doing = f" ({waits[0].doing})" if waits else ""
        return bool(waits), next(filter(None, places), f"no line of a script{doing}")

    def told(self, wait: Wait) -> str:
        """Returns a line that says where each rank is, as it answered what a wait has asked."""
        answers = [self._answer_of(rank, wait) for rank in range(self.size)]
        groups: dict[str, list[int]] = {}
        for rank, (_, place) in enumerate(answers):
            groups.setdefault(place, []).append(rank)
        waited = next((place for waits, place in answers if waits), None)
        parts = []
        for place, ranks in groups.items():
            verbs = ("wait", "waits") if place == waited else ("are", "is")
            parts.append(f"{_named(ranks)} {verbs[len(ranks) == 1]} {place}")
        return ", ".join(parts)

    def _answer_of(self, rank: int, wait: Wait) -> tuple[bool, str]:
        """Returns whether a rank waits, and where it is."""
        if rank == self.rank:
            return True, f"at {self.here()[1]}"
        if self._call("check", [f"left/{rank}"]):
            return False, "at the end of the script"
        if self._call("check", [f"at/{rank}"]):
            note = self._call("get", f"at/{rank}")
            number, waits, place = json.loads(note) if note else (0, False, "")
            if number >= wait.question > 0:
                return waits, f"at {place}"
        return False, "silent (it was stopped or killed, or a call holds Python's lock)"


def look_interval(deadline: float) -> float:
    """Returns the seconds between two looks for questions, for waits that end at a deadline."""
    return min(_LOOK_INTERVAL, deadline / 8)


def place_of(frame: FrameType | None) -> str:
    """Returns where a thread is in the script, as "train.py:41 (mean)"; "" if in none.

    What is in parentheses is what the script called there.
    """
    called, installed = "", ""
    while frame is not None:
        path = frame.f_code.co_filename
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        apart = _INSTALLED in path
        inner = package in _INNER or path.startswith("<frozen")
        if not inner and (apart or not path.startswith(_LIBRARY)):
            place = f"{os.path.basename(path)}:{frame.f_lineno}{called}"
            if not apart:
                return place
            installed = installed or place
        called, frame = f" ({_name_of(frame)})", frame.f_back
    return installed


def script_stacklevel() -> int:
    """Returns the `stacklevel` with which a warning shows the script's own line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _INNER:
            break
        level, frame = level + 1, frame.f_back
    return level


def _name_of(frame: FrameType) -> str:
    """Returns the name of what was called: of what a wrapper wraps, or of a module's class."""
    name, values = frame.f_code.co_name, frame.f_locals
    given = values.get("args")  # of a wrapper of torch.compiler.disable
    given = given if isinstance(given, tuple) else ()
    ops = [x for x in given if hasattr(x, "overloadpacket")]
    wrapped = getattr(values.get("func", *ops[:1]), "__name__", None)
    if isinstance(wrapped, str):
        return wrapped.partition(".")[0].strip("_")  # an op without its overload
    if frame.f_code.co_flags & inspect.CO_GENERATOR:
        return "next"
    if name in _MODULE_CALLS and "self" in values:
        return type(values["self"]).__name__
    return name.strip("_")


def _named(ranks: Sequence[int]) -> str:
    """Returns ranks in words, as "ranks 0, 2-5"."""
    every = set(ranks)
    begins = [rank for rank in ranks if rank - 1 not in every]
    ends = [rank for rank in ranks if rank + 1 not in every]
    spans = [
        f"{a}" if a == b else f"{a}-{b}" for a, b in zip(begins, ends, strict=True)
    ]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(spans)}"


class Answering(threading.Thread):
    """Answers ranks that ask where this process is, of all its meshes; a daemon thread."""

    def __init__(self) -> None:
        super().__init__(name="pyg_distcomm-whereabouts", daemon=True)
        self._ended = threading.Event()

    def run(self) -> None:
        """Looks for questions, and answers them, until the process ends."""
        interval = 0.0
        while not self._ended.wait(interval):
            interval = _LOOK_INTERVAL
            with contextlib.suppress(RuntimeError):  # meshes may come and go meanwhile
                for watch in list(PROCESS.monitors):
                    interval = min(interval, look_interval(watch.deadline))
                    watch.answer()

    def end(self) -> None:
        """Ends the thread, so that it does not ask for the GIL while Python shuts down."""
        self._ended.set()
        self.join(_JOIN_TIMEOUT)


def start_answering() -> None:
    """Starts the thread of this process that answers other ranks."""
    if PROCESS.answering is None:
        PROCESS.answering = Answering()
        PROCESS.answering.start()


CHANGED = (
    "an input of a layer, or its edge_weight, was changed in place on some ranks only, so "
    "that cached products are out of date there alone; change it on all ranks or on none, "
    "by an operation that every rank calls, even if it has no rows"
)
# seconds to wait for another rank's report after a connection broke
_REPORT_GRACE = 2.0
_EXIT_DELAY = 0.6  # seconds, enough for waiting ranks to check the store twice
_ABORT_TAG = 0x9D0D  # of messages that are never sent


class Threads:
    """Lets one thread of a rank at a time use the groups of a mesh, the same on all ranks.

    Two threads that train at once would receive each other's messages. A thread that takes
    over from another waits once until all ranks have done so.
    """

    def __init__(self) -> None:
        self.of: Any = weakref.WeakSet()  # groups
        self.current = threading.get_ident()
        self._busy = self._handovers = 0
        self._lock = threading.Lock()

    def enter(self, watch: FailureMonitor) -> None:
        """Makes the current thread the user of the groups.

        Raises:
            ValueError: where another thread uses one, or other ranks use another thread.
        """
        mine = threading.get_ident()
        if mine == self.current:
            return
        if torch._C._current_graph_task_id() != -1:
            return  # autograd has threads of its own for devices
        if not self._lock.acquire(blocking=False):
            raise ValueError(_ONE_THREAD)  # another thread is taking over
        try:
            if self._busy:
                raise ValueError(_ONE_THREAD)
            self.current, self._handovers = mine, self._handovers + 1
            name = threading.current_thread().name
            number, store = self._handovers, watch.store.patient(watch.deadline)
            first = store.compare_set(f"thread/{number}", "", name).decode()
            if first != name:
                raise ValueError(
                    f"{_ONE_THREAD}: {name} does so on rank {watch.rank}, and {first} elsewhere"
                )
            watch.barrier("another thread", -1, watch.size)
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Keeps other threads out while this thread waits."""
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1


class StreamedWorks:
    """Watches exchanges that CUDA streams wait for, since no thread of this rank does.

    A thread checks twice a second whether they are completed. Past the deadline, or once
    another rank has failed, it reports that and aborts NCCL, and the next exchange of this
    rank raises the error.
    """

    def __init__(self, watch: FailureMonitor) -> None:
        self._watch = weakref.ref(watch)
        self._works: list[tuple[Any, Wait, float]] = []
        self._lock = threading.Lock()
        self._running = False
        self.error: BaseException | None = None

    def add(self, work: Any, doing: str) -> None:
        """Watches an exchange until it is completed."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return  # a CUDA graph is being captured: nothing runs
        watch = self._watch()
        assert watch is not None
        with self._lock:
            self._drop_completed()
            wait = Wait(watch.places, doing, thread=0)
            self._works.append((work, wait, time.monotonic()))
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(_STREAM_POLL_INTERVAL)
            watch = self._watch()
            with self._lock:
                self._drop_completed()
                if watch is None or watch.closed or not self._works:
                    self._running = False
                    return
                _, wait, since = self._works[0]
            try:
                watch.check(wait, time.monotonic() - since)
            except Exception as error:
                self.error = error
                print(f"rank {watch.rank}: {error}", file=sys.stderr, flush=True)
                watch.fail(error)
                for group in list(watch.groups):  # so that the host waits no longer
                    with contextlib.suppress(Exception):
                        group._get_backend(torch.device("cuda")).abort()
                return

    def _drop_completed(self) -> None:
        """Drops completed works, and the buffers they hold."""
        for work in [work for work in self._works if work[0].is_completed()]:
            self._works.remove(work)
            work[1].end()


_OVER = (
    "A wait of this mesh has failed, so it cannot be used again: make a new one by "
    "pdc.init() on all ranks."
)
_STREAM_POLL_INTERVAL = 0.5  # seconds between checks of the works that streams wait for
_ONE_THREAD = (
    "use a mesh from one thread at a time: two threads of a rank train, or exchange rows, "
    "at once; make a mesh for each by pdc.init(), or have the second wait for the first"
)


@dataclass(eq=False)
class FailureMonitor:
    """Reports a failure of this rank to the others of its mesh, and raises theirs.

    Args:
        store: the rendezvous store, under a prefix of this mesh.
        rank: this rank.
        size: how many ranks there are.
        deadline: seconds a rank waits for the others before it gives up.
        ended: the error that lost messages which other ranks wait for; "" if none.
        groups, rings: the process groups of the mesh, and their rings.
        threads: the thread that uses them.
        streamed: exchanges that CUDA streams wait for.
        places: where in the script the ranks are.
        closed: whether the groups are destroyed, or this process is not the rank's own.
        failed: the error with which a wait of this rank, and the mesh, ended; "" if none.
    """

    store: Any
    rank: int
    size: int
    deadline: float
    ended: str = field(default="", init=False)
    groups: Any = field(default_factory=weakref.WeakSet, init=False)
    rings: Any = field(default_factory=weakref.WeakSet, init=False)
    threads: Threads = field(default_factory=Threads, init=False)
    streamed: StreamedWorks = field(init=False)
    places: Whereabouts = field(init=False)
    closed: bool = field(default=False, init=False)
    failed: str = field(default="", init=False)
    _barriers: int = field(default=0, init=False)  # barriers through the store so far
    _store_lost: bool = field(default=False, init=False)
    _answers: Any = field(default=None, init=False)  # the store, for `answer`
    # a failure that was this rank's as well
    _own_failure: str = field(default="", init=False)
    # numbered places in a script where a tensor must have changed on all ranks or on none
    _stage: int = field(default=0, init=False)
    _places: int = field(default=0, init=False)
    # the last of these places where it changed on this rank
    _last_changed: int = field(default=0, init=False)
    # what this rank compares, and where: a key and a value of the store
    _compares: tuple[str, str] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.streamed = StreamedWorks(self)
        self.places = Whereabouts(self._try_store, self.rank, self.size, self.threads)
        PROCESS.monitors.add(self)

    def answer(self) -> None:
        """Says where this rank is, if another asks; called by a thread of its own."""
        if self.size == 1 or self.closed or self._store_lost:
            return
        self._answers = self._answers or self.store.patient()
        try:
            self.places.answer(self._answers)
        except RuntimeError as error:
            self._store_lost = isinstance(error, DistNetworkError)

    def fail(self, error: BaseException) -> None:
        """Ends the mesh on this rank, whose wait ended with an error."""
        if not self.failed and not self.closed:
            self.failed = f"{type(error).__name__}: {error}"
            self.report(error)
            self.abort_groups()

    def abort_groups(self) -> None:
        """Ends running exchanges of all groups by breaking their connections."""
        for rings in [] if self.closed else list(self.rings):
            rings.give_up()
        for group in [] if self.closed else list(self.groups):
            with contextlib.suppress(Exception):
                peer = (group.rank() + 1) % group.size()
                # gloo closes all connections of a group in which a wait ends early
                none = group.recv([torch.empty(1)], peer, _ABORT_TAG)
                none.wait(timedelta(milliseconds=1))

    def report(self, error: BaseException) -> None:
        """Writes this rank's failure to the store, where the waiting ranks find it."""
        text = "".join(traceback.format_exception(error))
        note = {
            "rank": self.rank,
            "kind": type(error).__name__,
            "message": _printable(str(error)),
            "traceback": _printable(text),
            "late": isinstance(error, RankError) and error.late,
        }
        # the first failure written is the cause; later ones follow from it, or timed out
        mine = json.dumps(note)
        report = self._try_store("compare_set", "error", self._own_failure, mine)
        if report and json.loads(report)["late"] and not note["late"]:
            report = self._try_store("compare_set", "error", report.decode(), mine)
        first = json.loads(report or "{}")
        if all(first.get(part) == note[part] for part in ("kind", "message")):
            self._own_failure = report.decode()

    def raise_reported(self) -> None:
        """Raises the failure of another rank, if one is reported."""
        report = self.reported_failure()
        if report and report != self._own_failure:
            note = json.loads(report)
            if note["rank"] != self.rank:
                raise _exception_from(note)
        self._raise_if_changed_elsewhere()

    def pass_by(self, stage: int) -> None:
        """Notes a place where ranks may compare something, and this one does not."""
        self._stage = stage
        self._places += 1

    @contextlib.contextmanager
    def comparing(self, what: str, stage: int) -> Iterator[None]:
        """Notes such a place where this rank compares, in a block; see `pass_by`.

        If others passed by, this rank waits for them, and says so in the store. They find
        that when they next wait for a message, and all raise `what`.
        """
        place, self._stage = self._places + 1, stage
        self._last_changed, self._places = place, place
        self._compares = f"changed/{stage}", f"{place} {what}"
        try:
            yield
        finally:
            self._compares = None

    def meet_changed(self, stage: int, ranks: int, what: str = CHANGED) -> None:
        """Waits until something has changed on all ranks of a stage, as on this one.

        A rank where it has not passes by, and finds out when it next waits: then all raise.
        """
        with self.comparing(what, stage):
            name = f"changed/{stage}/{self._places}"
            self._store_barrier(name, "others to change an input or hooks, too", ranks)

    def barrier(self, doing: str, stage: int, ranks: int) -> None:
        """Waits until all ranks of a stage call this, through the store alone."""
        self._barriers += 1
        try:
            self._store_barrier(f"met/{stage}/{self._barriers}", doing, ranks)
        except BaseException as error:
            self.fail(error)
            raise

    def _store_barrier(self, name: str, doing: str, ranks: int) -> None:
        store = self.store.patient(self.deadline)
        if store.add(name, 1) == ranks:
            store.set(f"{name}/all", "")
        with self.waiting(doing) as check:
            store.wait([f"{name}/all"], check)
        self.raise_reported()  # a rank may have failed after it arrived

    @contextlib.contextmanager
    def waiting(self, doing: str) -> Iterator[Callable[[float], bool]]:
        """Yields what a wait calls now and then with the seconds waited so far.

        It raises another rank's failure, and past the deadline; else it returns False.
        `doing` is what this rank waits for.
        """
        wait = Wait(self.places, doing, threading.get_ident())
        try:
            yield lambda seconds: self.check(wait, seconds)
        finally:
            wait.end()

    def check(self, wait: Wait, seconds: float) -> bool:
        """Does what `waiting` says for a wait that has taken so many seconds."""
        self.raise_reported()
        if seconds > self.deadline:
            raise self.timeout_error(wait)
        if self._compares is not None:
            self._try_store("set", *self._compares)
        wait.look(seconds, self.deadline)
        return False

    def _raise_if_changed_elsewhere(self) -> None:
        name = f"changed/{self._stage}"
        if self._places and self._try_store("check", [name]):
            found = (self._try_store("get", name) or b"0").decode()
            number, _, what = found.partition(" ")
            if self._last_changed < int(number) <= self._places:
                error = ValueError(f"{what} (not on rank {self.rank})")
                self.report(error)
                raise error

    def wait_for_report(self) -> None:
        """Raises the failure of another rank that is reported within a grace period."""
        stop = time.monotonic() + _REPORT_GRACE
        while time.monotonic() < stop and not self._store_lost:
            self.raise_reported()
            time.sleep(0.05)

    def reported_failure(self) -> str:
        """Returns the latest reported failure as JSON; "" if there is none."""
        if not self._try_store("check", ["error"]):
            return ""
        report: bytes | None = self._try_store("get", "error")
        return (report or b"").decode()

    def timeout_error(self, wait: Wait) -> RankError:
        """Returns the error of a wait past the deadline, which says where every rank is."""
        places = "the rendezvous store does not answer"
        if not self._store_lost:
            places = self.places.told(wait)
        note = json.loads(self.reported_failure() or "{}")
        failed = note.get("rank") == self.rank  # in another thread; others ended by it
        error = RankError(
            f"rank {self.rank} waited {self.deadline:.0f} s for {wait.doing}, and not every "
            f"rank came: {places}. Run the same calls in the same order on all ranks (compute "
            "on all, and print on one), or raise `timeout` in pdc.init if one is only slow. "
            + _OVER
            + (f" It had failed before\n{note['traceback']}" if failed else "")
        )
        error.late = True
        return error

    def connection_error(self, doing: str, error: BaseException) -> BaseException:
        """Returns the error of a broken connection, after waiting briefly for a report."""
        stopped = f"rank {self.rank} cannot go on with {doing}"
        if self.failed:  # reported already
            return RankError(f"{stopped}. {_OVER} It was\n{self.failed}")
        self._try_store("set", f"broken/{self.rank}", "")
        try:
            self.wait_for_report()
        except Exception as reason:
            return reason
        note = json.loads(self.reported_failure() or "{}")
        if note.get("rank") == self.rank:  # in another thread
            return RankError(
                f"{stopped}, for it had failed before\n{note['traceback']}"
            )
        lost = f"rank {self.rank} lost another rank during {doing}: "
        for rank in range(self.size):
            if rank != self.rank and self._try_store("check", [f"left/{rank}"]):
                return RankError(
                    f"{lost}the script of rank {rank} had come to its end, or called "
                    "sys.exit; see what it printed last, and run the same calls on all ranks"
                )
        others = [r for r in range(self.size) if r != self.rank]
        silent = [
            r for r in others if self._try_store("check", [f"broken/{r}"]) is False
        ]
        who = f" (nothing was heard of rank(s) {str(silent)[1:-1]})" if silent else ""
        found = re.search(
            r"(connection )?closed by peer( \[\S+\])?|timed out", str(error), re.I
        )
        more = f" ({found[0]})" if found else ""
        early = ", or its script ended early" if self._store_lost else ""
        return RankError(
            f"{lost}a process ended without saying why{who}: it was killed, ran out of "
            "memory, or was aborted by its back end, as gloo does where a message is longer "
            f"than the receiver has planned{early}{more}"
        )

    def report_exit(self) -> None:
        """Writes to the store that this rank's script has ended."""
        if self.size > 1 and not self.failed and not self.closed:
            self._try_store("set", f"left/{self.rank}", "")

    def _try_store(self, verb: str, *args: Any) -> Any:
        if self._store_lost:  # each further call would print torch's warnings
            return None
        try:
            return getattr(self.store, verb)(*args)
        except RuntimeError as error:  # the process that held the store has ended
            self._store_lost = isinstance(error, DistNetworkError)
            return None


def _printable(text: str) -> str:
    """Returns a text without characters that terminals or stores cannot take."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return text.replace("\0", "\\x00")


def _exception_from(note: dict[str, Any]) -> BaseException:
    kind = getattr(builtins, note["kind"], None)
    if note["kind"] == "OutOfMemoryError":
        kind = torch.OutOfMemoryError
    usable = isinstance(kind, type) and issubclass(kind, Exception)
    if not usable or kind in (UnicodeDecodeError, UnicodeEncodeError, KeyError):
        kind = RankError
    message = (
        f"rank {note['rank']} failed with {note['kind']}: {note['message']}\n"
        f"--- traceback of rank {note['rank']} ---\n{note['traceback']}"
    )
    try:
        error: Any = kind(message)  # type: ignore[misc]
    except TypeError:  # an exception with more arguments than a message
        return RankError(message)
    error.told = True
    return error


@contextlib.contextmanager
def needing(
    part: str,
    size: Callable[[], int],
    watch: FailureMonitor | None,
    device: torch.device,
    smaller: str = "",
    instead: Sequence[str] = (),
) -> Iterator[None]:
    """Explains an out-of-memory error in a block: what needed how much, and what needs less.

    All ranks raise it, and the mesh cannot be used afterwards.

    Args:
        part: what the block computes.
        size: returns roughly the bytes that it needs on this rank.
        watch: reports to the other ranks; None on one rank.
        device: the device that is full.
        smaller: a further option that needs less memory.
        instead: the options that need less, where the usual ones do not apply.

    Raises:
        OutOfMemoryError, MemoryError: with part, bytes and options that fit.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        kind = MemoryError if device.type == "cpu" else torch.OutOfMemoryError
        rank, ranks = (0, 1) if watch is None else (watch.rank, watch.size)
        free = memory.available(device) or 0
        ways = list(instead) or _cheaper_choices(size(), free, ranks)
        ways += [smaller] if smaller else []
        full: Any = kind(
            f"out of memory on {device} of rank {rank}: {part} needs about {size():,} bytes "
            f"there, and {free:,} are free; what needs less: {'; '.join(ways)}. "
            f"It was: {str(error).splitlines()[0]}"
        )
        full.told = True
        if watch is not None:
            watch.fail(full)
        raise full from error


def watch_of(mesh: Any) -> FailureMonitor | None:
    """Returns the `FailureMonitor` of a mesh; None on one rank."""
    if hasattr(mesh, "watch"):  # the mesh of a chunk has no world
        return mesh.watch
    return getattr(getattr(mesh, "world", None), "watch", None)


_OUT_OF_MEMORY = re.compile(
    "out of memory|can't allocate memory|not enough memory", re.I
)


def _is_out_of_memory(error: BaseException) -> bool:
    """Tells whether an error is an out-of-memory error that is not explained yet."""
    if isinstance(error, RankError) or getattr(error, "told", False):
        return False
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or bool(
        _OUT_OF_MEMORY.search(str(error))
    )


def _cheaper_choices(size: int, free: int, ranks: int) -> list[str]:
    """Returns options that need less than `size` bytes per rank, and fit in `free`."""
    parts = max(2, -(-size // max(free, size // 1024, 1)))
    more = f"{parts * ranks} ranks, about {size // parts:,} bytes on each"
    cap = min(free or size, size) // 2
    capped = f"pdc.partition(..., memory={max(cap, 1)}), which computes in stages"
    ways = [more, capped]
    if size // 2 <= free:
        ways.append(f"rows in bfloat16 (torch.autocast), {size // 2:,} bytes")
    return ways


def _leave_meshes() -> None:
    """Closes the meshes of a process that a rank has forked, and that is no rank.

    It has the rank's connections, by which whatever it did would end the rank's exchanges.
    """
    for watch in list(PROCESS.monitors):
        watch.closed = True
    PROCESS.answering = None
    for threads_left in (PROCESS.works, PROCESS.messages, PROCESS.inboxes):
        threads_left.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_meshes)


def abort_all_groups() -> None:
    """Aborts the groups of all meshes; called when this process exits."""
    for watch in list(PROCESS.monitors):
        watch.report_exit()
        watch.abort_groups()


def install_excepthook() -> None:
    """Makes an uncaught exception reach the other ranks before this process ends."""
    before = sys.excepthook
    if getattr(before, "tells_ranks", False):
        return

    def hook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        watches = [watch for watch in PROCESS.monitors if watch.size > 1]
        for watch in watches:
            watch.fail(error.with_traceback(trace))
        before(kind, error, trace)
        if (
            watches
            and watches[0].rank == 0
            and "TORCHELASTIC_USE_AGENT_STORE" not in (os.environ)
        ):
            time.sleep(_EXIT_DELAY)  # rank 0's process holds the store

    hook.tells_ranks = True  # type: ignore[attr-defined]
    sys.excepthook = hook

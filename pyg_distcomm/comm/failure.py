"""Reports an error on one rank to the others, and ends every wait by the deadline.

[Note: failure] A rank that fails writes its traceback to the rendezvous store. A rank
that waits does so in short slices, looks at the store between them, and raises what it
finds there: the same kind of exception, with the rank and the cause in its message. A
rank that waits past the deadline says what every rank was doing. Nothing is written
while all is well, so the price of an uneventful run is zero. What all ranks failed with
alike, and a script caught, is not raised again.

[Note: one deadline] All waits of a mesh end at its deadline, `timeout` of `pdc.init`. Torch
has waits of its own (it makes groups, and DDP's first steps), and these end `SPARE` seconds
later. Calls of the store have no end where the network to it is cut, so each is made in a
thread, and waited for in vain once, for `store._ANSWER` seconds. Gloo's collectives have no end
before their group's timeout, and a process waits for them when it ends: so a wait that fails
breaks off all groups of its mesh, and the mesh is over.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
from torch.distributed import DistNetworkError

from pyg_distcomm.comm.store import RankError
from pyg_distcomm.process import PROCESS

CHANGED = (
    "an input of a layer, or its edge_weight, was changed in place on some ranks only, and "
    "what is kept of it is out of date there alone; change it on all ranks or on none, as "
    "by an operation that every rank calls, if only with rows of its own or none"
)
_GRACE = 2.0  # seconds that the reason of a rank's end has to reach the store
_HEARD = 0.6  # seconds in which ranks that wait look at the store twice
_TAG = 0x9D0D  # of messages that nobody sends


class Threads:
    """Lets one thread of a rank at a time use the groups of a mesh, the same on all ranks.

    Two threads that train at once would meet the messages of one another's. A thread that
    takes over from another waits for all ranks to do so, once.
    """

    def __init__(self) -> None:
        self.of: Any = weakref.WeakSet()  # groups
        self._owner = threading.get_ident()
        self._busy = self._turns = 0
        self._lock = threading.Lock()

    def enter(self, watch: FailureMonitor) -> None:
        """Begins to use a group.

        Raises:
            ValueError: where another thread uses one, or other ranks use another thread.
        """
        mine = threading.get_ident()
        if mine == self._owner:
            return
        if torch._C._current_graph_task_id() != -1:
            return  # autograd has threads of its own for devices
        if not self._lock.acquire(blocking=False):
            raise ValueError(_THREADS)  # another is just taking over
        try:
            if self._busy:
                raise ValueError(_THREADS)
            self._owner, self._turns = mine, self._turns + 1
            name = threading.current_thread().name
            key = f"thread/{self._turns}"
            first = watch.store.compare_set(key, "", name).decode()
            if first != name:
                raise ValueError(
                    f"{_THREADS}: {name} does so on rank {watch.rank}, and {first} elsewhere"
                )
            watch.meet("another thread", -1, watch.size)
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Keeps other threads out while this one waits."""
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1


class StreamedWorks:
    """Watches exchanges that streams of a device wait for, as no thread of this rank does.

    A thread looks twice a second whether they have ended, while any has not. Past the
    deadline, or once another rank has failed, it reports that, ends what NCCL has under way,
    and the next exchange of this rank raises why.

    Args:
        watch: the monitor of the mesh.
    """

    def __init__(self, watch: FailureMonitor) -> None:
        self._watch = weakref.ref(watch)
        self._works: list[tuple[Any, str, float]] = []
        self._lock = threading.Lock()
        self._running = False
        self.error: BaseException | None = None

    def add(self, work: Any, doing: str) -> None:
        """Watches an exchange until it has ended."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return  # a graph is recorded, and nothing runs
        with (
            self._lock
        ):  # those that ended are let go, and what they received with them
            self._works = [w for w in self._works if not w[0].is_completed()]
            self._works.append((work, doing, time.monotonic()))
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(_LOOK)
            watch = self._watch()
            with self._lock:
                self._works = [w for w in self._works if not w[0].is_completed()]
                if watch is None or watch.closed or not self._works:
                    self._running = False
                    return
                _, doing, since = self._works[0]
            try:
                watch.look()
                if time.monotonic() - since > watch.deadline:
                    raise watch.expired(doing)
                watch.say(doing)
            except Exception as error:
                self.error = error
                print(f"rank {watch.rank}: {error}", file=sys.stderr, flush=True)
                watch.fail(error)
                _abort(watch.groups)
                return


def _abort(groups: Any) -> None:
    """Ends what NCCL has under way, so that the host's waits for the device end."""
    for group in list(groups):
        with contextlib.suppress(Exception):
            group._get_backend(torch.device("cuda")).abort()


_LOOK = 0.5  # seconds between looks at what streams wait for
_THREADS = (
    "use a mesh from one thread at a time: two threads of a rank train, or exchange rows, "
    "at once; make a mesh for each by pdc.init(), or have the second wait for the first"
)


@dataclass(eq=False)
class FailureMonitor:
    """Reports a failure of this rank to the others of its mesh, and looks up theirs.

    Args:
        store: the rendezvous store, with a prefix of this mesh's own.
        rank: this rank.
        size: how many ranks there are.
        deadline: seconds a rank waits for the others before it gives up.
        ended: with what error messages were lost that others wait for; nothing if none.
        groups: the process groups of the mesh.
        threads: which thread uses them.
        streamed: exchanges that streams of a device wait for.
        closed: whether the groups have been let go.
        failed: what a wait of this rank ended with, and with it the mesh; nothing if none.
    """

    store: Any
    rank: int
    size: int
    deadline: float
    ended: str = field(default="", init=False)
    groups: Any = field(default_factory=weakref.WeakSet, init=False)
    threads: Threads = field(default_factory=Threads, init=False)
    streamed: StreamedWorks = field(init=False)
    closed: bool = field(default=False, init=False)
    failed: str = field(default="", init=False)
    _met: int = field(default=0, init=False)  # places where ranks have met
    _gone: bool = field(default=False, init=False)
    # a failure that was this rank's as well
    _known: str = field(default="", init=False)
    # places where all ranks of a stage must have changed something, or none
    _stage: int = field(default=0, init=False)
    _passed: int = field(default=0, init=False)
    _changed: int = field(default=0, init=False)  # the last of them where this rank had

    def __post_init__(self) -> None:
        self.streamed = StreamedWorks(self)
        PROCESS.monitors.add(self)

    def fail(self, error: BaseException) -> None:
        """Ends the mesh on this rank, whose wait ended with an error."""
        if not self.failed:
            self.failed = f"{type(error).__name__}: {error}"
            self.report(error)
            self.break_off()

    def break_off(self) -> None:
        """Ends what is under way in the groups; their connections end with it."""
        for group in [] if self.closed else list(self.groups):
            with contextlib.suppress(Exception):
                peer = (group.rank() + 1) % group.size()
                # gloo closes all connections of a group in which a wait ends early
                none = group.recv([torch.empty(1)], peer, _TAG)
                none.wait(timedelta(milliseconds=1))

    def report(self, error: BaseException) -> None:
        """Writes this rank's failure where the waiting ranks look."""
        text = "".join(traceback.format_exception(error))
        note = {
            "rank": self.rank,
            "kind": type(error).__name__,
            "message": _printable(str(error)),
            "traceback": _printable(text),
            "late": isinstance(error, RankError) and error.late,
        }
        # the first to write is the cause; the others have only heard of it, or waited
        mine = json.dumps(note)
        told = self._quietly("compare_set", "error", self._known, mine)
        if told and json.loads(told)["late"] and not note["late"]:
            told = self._quietly("compare_set", "error", told.decode(), mine)
        if told is not None and _alike(json.loads(told), note):
            self._known = told.decode()

    def look(self) -> None:
        """Raises another rank's failure, if one has been reported."""
        told = self.note()
        if told and told != self._known:
            note = json.loads(told)
            if note["rank"] != self.rank:
                raise _rebuilt(note)
        self._look_for_changes()

    def all_or_none(self, changed: bool, stage: int, ranks: int) -> None:
        """Passes a place where something has changed on all ranks of a stage, or on none.

        Ranks where it has wait for each other. One where it has not goes on, and learns of
        them when it waits for what they do not send: both raise.
        """
        place, self._stage = self._passed + 1, stage
        if changed:
            self._changed = place  # first: other threads look, too
        self._passed = place
        if not changed:
            return
        name, stop = f"changed/{stage}", time.monotonic() + self.deadline
        self._quietly("set", name, str(place))
        came, pause = self._quietly("add", f"{name}/{place}", 1), 0.0005
        while not self._gone and (came or 0) < ranks:
            self.look()
            if time.monotonic() > stop:
                raise RankError(f"waited {self.deadline:.0f} s: {CHANGED}")
            time.sleep(pause)
            came, pause = (
                self._quietly("add", f"{name}/{place}", 0),
                min(0.1, 2 * pause),
            )

    def meet(self, doing: str, stage: int, ranks: int) -> None:
        """Waits until all ranks of a stage are here, with no word on the wire."""
        self._met += 1
        try:
            self._gather(f"met/{stage}/{self._met}", doing, ranks)
        except BaseException as error:
            self.fail(error)
            raise

    def _gather(self, name: str, doing: str, ranks: int) -> None:
        if self.store.add(name, 1) == ranks:
            self.store.set(f"{name}/all", "")
        self.store.wait([f"{name}/all"], self.until(doing))
        self.look()  # one that was here may have given up

    def until(self, doing: str) -> Callable[[float], bool]:
        """Returns what ends a wait at the mailbox: another rank's failure, or the deadline."""

        def look(seconds: float) -> bool:
            self.look()
            if seconds > self.deadline:
                raise self.expired(doing)
            return False

        return look

    def _look_for_changes(self) -> None:
        name = f"changed/{self._stage}"
        if self._passed and self._quietly("check", [name]):
            place = int(self._quietly("get", name) or 0)
            if self._changed < place <= self._passed:
                error = ValueError(f"{CHANGED} (not on rank {self.rank})")
                self.report(error)
                raise error

    def listen(self) -> None:
        """Looks until a failure is raised, or for as long as one takes to be reported."""
        stop = time.monotonic() + _GRACE
        while time.monotonic() < stop and not self._gone:
            self.look()
            time.sleep(0.05)

    def note(self) -> str:
        """Returns the failure that was reported last; nothing if none was."""
        if not self._quietly("check", ["error"]):
            return ""
        told: bytes | None = self._quietly("get", "error")
        return (told or b"").decode()

    def say(self, doing: str) -> None:
        """Notes what this rank waits for (only once a wait is long)."""
        self._quietly("set", f"doing/{self.rank}", doing)

    def expired(self, doing: str) -> RankError:
        """Returns the error of a wait past the deadline, with every rank's state."""
        states = [f"  rank {r}: {self._doing(r)}" for r in range(self.size)]
        error = RankError(
            f"rank {self.rank} waited {self.deadline:.0f} s for {doing}, and not every "
            "rank came. Ranks must run the same calls in the same order; raise "
            "`timeout` in pdc.init if one is only slow.\n" + "\n".join(states)
        )
        error.late = True
        return error

    def broken(self, doing: str, error: BaseException) -> BaseException:
        """Returns why a connection broke, waiting briefly for the other to say."""
        if self.failed:  # here, and the other ranks have heard of it
            return RankError(
                f"rank {self.rank} cannot go on with {doing}: this mesh is over since a "
                f"wait failed; make a new one with pdc.init(). It was\n{self.failed}"
            )
        self._quietly("set", f"broken/{self.rank}", "")
        try:
            self.listen()
        except Exception as reason:
            return reason
        lost = f"rank {self.rank} lost another rank during {doing}: "
        for rank in range(self.size):
            if rank != self.rank and self._quietly("check", [f"left/{rank}"]):
                return RankError(
                    f"{lost}the script of rank {rank} had come to its end, or called "
                    "sys.exit; see what it printed last, and run the same calls on all ranks"
                )
        others = [r for r in range(self.size) if r != self.rank]
        silent = [r for r in others if self._quietly("check", [f"broken/{r}"]) is False]
        who = f" (nothing was heard of rank(s) {str(silent)[1:-1]})" if silent else ""
        found = re.search(
            r"(connection )?closed by peer( \[\S+\])?|timed out", str(error), re.I
        )
        more = f" ({found[0]})" if found else ""
        early = ", or its script ended early" if self._gone else ""
        return RankError(
            f"{lost}a process ended without saying why{who}: it was killed, ran out of "
            "memory, or was aborted by its back end, as gloo does where a message is longer "
            f"than the receiver has planned{early}{more}"
        )

    def leave(self) -> None:
        """Says that this rank's script has come to its end."""
        if self.size > 1 and not self.failed and not self.closed:
            self._quietly("set", f"left/{self.rank}", "")

    def _doing(self, rank: int) -> str:
        told = self._quietly("check", [f"doing/{rank}"])
        if told is None:
            return "not known (the rendezvous store does not answer)"
        if told:
            return (self._quietly("get", f"doing/{rank}") or b"").decode()
        return "not waiting (computing, or gone)"

    def _quietly(self, verb: str, *args: Any) -> Any:
        if self._gone:  # each further try would print a page of torch's own warnings
            return None
        try:
            return getattr(self.store, verb)(*args)
        except RuntimeError as error:  # the store went with the process that held it
            self._gone = isinstance(error, DistNetworkError)
            return None


def _printable(text: str) -> str:
    """Returns a text without what terminals and stores cannot take."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return text.replace("\0", "\\x00")


def _alike(note: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(note[part] == other[part] for part in ("kind", "message"))


def _rebuilt(note: dict[str, Any]) -> BaseException:
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
    except TypeError:  # an exception that wants more than a text
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
    """Says of an allocation that fails in a block what needed how much, on all ranks.

    The other ranks raise where they wait; the mesh is over.

    Args:
        part: what the block computes.
        size: returns the bytes that it needs on this rank, roughly.
        watch: tells the other ranks; None where there are none.
        device: where.
        smaller: a further choice that needs less.
        instead: the choices that need less, where more ranks would not.

    Raises:
        OutOfMemoryError, MemoryError: with part, bytes and choices that fit.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        kind = MemoryError if device.type == "cpu" else torch.OutOfMemoryError
        rank, ranks = (0, 1) if watch is None else (watch.rank, watch.size)
        ways = list(instead) or _smaller(size(), _free(device), ranks)
        ways += [smaller] if smaller else []
        full: Any = kind(
            f"out of memory on {device} of rank {rank}: {part} needs about {size():,} bytes "
            f"there, and {_free(device):,} are free; what needs less: {'; '.join(ways)}. "
            f"It was: {str(error).splitlines()[0]}"
        )
        full.told = True
        if watch is not None:
            watch.fail(full)
        raise full from error


def watch_of(mesh: Any) -> FailureMonitor | None:
    """Returns what tells the ranks of a mesh of a failure; None where there is none."""
    if hasattr(mesh, "watch"):  # of a chunk's rows, whose mesh has no world
        return mesh.watch
    return getattr(getattr(mesh, "world", None), "watch", None)


_FULL = re.compile("out of memory|can't allocate memory|not enough memory", re.I)


def _is_out_of_memory(error: BaseException) -> bool:
    """Says whether an allocation failed on this rank, and nobody has said in what part."""
    if isinstance(error, RankError) or getattr(error, "told", False):
        return False
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or bool(
        _FULL.search(str(error))
    )


def _free(device: torch.device) -> int:
    """Returns the bytes that are free on a device; 0 where nobody knows."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    with contextlib.suppress(AttributeError, OSError, ValueError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 0


def _smaller(size: int, free: int, ranks: int) -> list[str]:
    """Names choices that need less than `size` bytes a rank, and fit in what is free."""
    parts = max(2, -(-size // max(free, size // 1024, 1)))
    more = f"{parts * ranks} ranks, about {size // parts:,} bytes on each"
    cap = min(free or size, size) // 2
    capped = f"pdc.partition(..., memory={max(cap, 1)}), which computes in stages"
    ways = [more, capped]
    if size // 2 <= free:
        ways.append(f"rows in bfloat16 (torch.autocast), {size // 2:,} bytes")
    return ways


def break_off_all() -> None:
    """Ends what is under way in the groups of all meshes: this process ends."""
    for watch in list(PROCESS.monitors):
        watch.leave()
        watch.break_off()


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
            time.sleep(_HEARD)  # the store ends with this process

    hook.tells_ranks = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def exit_on_sigterm() -> None:
    """Makes SIGTERM end this process as sys.exit does: a script's own cleanup runs.

    Where a script has a handler of its own, or this is not the main thread, leaves it so.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    process = os.getpid()

    def end(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != process:  # a fork, which is not a rank
            signal.raise_signal(number)
        for watch in [watch for watch in PROCESS.monitors if watch.size > 1]:
            watch.report(RankError("it was ended by SIGTERM"))
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)

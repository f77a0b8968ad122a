"""Says where in the script each rank is, when a rank has waited for the others for long.

[Note: whereabouts] A rank may compute, sleep, or wait in a call of torch's own, and then
cannot answer. So each process has a thread that looks every few seconds whether some rank has
asked, and if so writes to the rendezvous store where the thread that uses the mesh is: the
innermost line outside of this package, torch, PyG and Python's library, and what it calls
there. A rank that waits asks shortly before it tells. Nothing is looked at, or written, while
nobody asks.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from pyg_distcomm.process import PROCESS

_TELL_AFTER = 20.0  # seconds of a wait after which one rank tells where all of them are
_LOOK_INTERVAL = 2.5  # seconds, at most, until a rank sees that another asks
_JOIN_TIMEOUT = 5.0  # seconds that a look may take when the process ends
_INNER = frozenset(("pyg_distcomm", "torch", "torch_geometric"))
_LIBRARY, _INSTALLED = os.path.dirname(os.__file__) + os.sep, "-packages" + os.sep
_MODULE_CALLS = frozenset(("_wrapped_call_impl", "_call_impl", "__call__"))


@dataclass(eq=False)
class Wait:
    """A wait of this rank for others.

    Args:
        places: where the ranks of the mesh are.
        doing: what the rank waits for.
        thread: the thread that waits; 0 for none.
        question: the number of the last question that it asked; 0 before.
    """

    places: Whereabouts
    doing: str
    thread: int
    question: int = 0
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
            verb = "waits" if place == waited else "is"
            if len(ranks) > 1:
                verb = {"waits": "wait", "is": "are"}[verb]
            parts.append(f"{_named(ranks)} {verb} {place}")
        return ", ".join(parts)

    def _answer_of(self, rank: int, wait: Wait) -> tuple[bool, str]:
        """Returns whether a rank waits, and where it is."""
        if rank == self.rank:
            _, place = self.here()
            return True, f"at {place}"
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
        """Looks for questions until the process ends."""
        while not self._ended.wait(self._look()):
            pass

    def _look(self) -> float:
        """Answers what was asked; returns the seconds until the next look."""
        interval = _LOOK_INTERVAL
        with contextlib.suppress(RuntimeError):  # meshes may come and go meanwhile
            for watch in list(PROCESS.monitors):
                interval = min(interval, look_interval(watch.deadline))
                watch.answer()
        return interval

    def end(self) -> None:
        """Ends the thread, so that it does not ask for the GIL while Python shuts down."""
        self._ended.set()
        self.join(_JOIN_TIMEOUT)


def start_answering() -> None:
    """Starts the thread of this process that answers other ranks."""
    if PROCESS.answering is None:
        PROCESS.answering = Answering()
        PROCESS.answering.start()

"""How an error on one rank reaches the others.

[Note: failure] A rank that fails writes its traceback to the rendezvous store. A rank
that waits does so in short slices, looks at the store between them, and raises what it
finds there: the same kind of exception, with the rank and the cause in its message. A
rank that waits past the deadline says what every rank was doing. Nothing is written
while all is well, so the price of an uneventful run is zero. What all ranks failed with
alike, and a script caught, is not raised again.
"""

from __future__ import annotations

import builtins
import json
import sys
import time
import traceback
import weakref
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from torch.distributed import DistNetworkError

CHANGED = (
    "an input of a layer, or its edge_weight, was changed in place on some ranks only, and "
    "what is kept of it is out of date there alone; change it on all ranks or on none, as "
    "by an operation that every rank calls, if only with rows of its own or none"
)
_GRACE = 2.0  # seconds that the reason of a rank's end has to reach the store


class RankError(RuntimeError):
    """Another rank failed, or did not answer before the deadline."""


@dataclass(eq=False)
class Watch:
    """What the ranks of one mesh tell each other when something goes wrong.

    Args:
        store: the rendezvous store, with a prefix of this mesh's own.
        rank: this rank.
        size: how many ranks there are.
        deadline: seconds a rank waits for the others before it gives up.
        ended: with what error messages were lost that others wait for; nothing if none.
    """

    store: Any
    rank: int
    size: int
    deadline: float
    ended: str = field(default="", init=False)
    _gone: bool = field(default=False, init=False)
    # a failure that was this rank's as well
    _known: str = field(default="", init=False)
    # places where all ranks of a stage must have changed something, or none
    _stage: int = field(default=0, init=False)
    _passed: int = field(default=0, init=False)
    _changed: int = field(default=0, init=False)  # the last of them where this rank had

    def report(self, error: BaseException) -> None:
        """Writes this rank's failure where the waiting ranks look."""
        text = "".join(traceback.format_exception(error))
        note = {
            "rank": self.rank,
            "kind": type(error).__name__,
            "message": str(error),
            "traceback": text,
        }
        # the first to write is the cause; the others have only heard of it
        mine = json.dumps(note)
        told = self._quietly("compare_set", "error", self._known, mine)
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

    def _look_for_changes(self) -> None:
        name = f"changed/{self._stage}"
        if self._passed and self._quietly("check", [name]):
            place = int(self.store.get(name))
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
        told: bytes = self.store.get("error")
        return told.decode()

    def say(self, doing: str) -> None:
        """Leaves word of what this rank waits for (only once a wait is long)."""
        self._quietly("set", f"doing/{self.rank}", doing)

    def expired(self, doing: str) -> RankError:
        """Returns the error of a wait past the deadline, with every rank's state."""
        states = [f"  rank {r}: {self._doing(r)}" for r in range(self.size)]
        return RankError(
            f"rank {self.rank} waited {self.deadline:.0f} s for {doing}, and not every "
            "rank came. Ranks must run the same calls in the same order; raise "
            "`timeout` in pdc.init if one is only slow.\n" + "\n".join(states)
        )

    def broken(self, doing: str, error: BaseException) -> BaseException:
        """Returns why a connection broke, waiting briefly for the other to say."""
        try:
            self.listen()
        except Exception as reason:
            return reason
        return RankError(
            f"rank {self.rank} lost another rank during {doing}: a process ended without "
            f"saying why (killed, out of memory, or it left early). Transport: {error}"
        )

    def _doing(self, rank: int) -> str:
        if self._quietly("check", [f"doing/{rank}"]):
            return self.store.get(f"doing/{rank}").decode()
        return "not waiting (computing, or gone)"

    def _quietly(self, verb: str, *args: Any) -> Any:
        if self._gone:  # each further try would print a page of torch's own warnings
            return None
        try:
            return getattr(self.store, verb)(*args)
        except RuntimeError as error:  # the store went with the process that held it
            self._gone = isinstance(error, DistNetworkError)
            return None


def _alike(note: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(note[part] == other[part] for part in ("kind", "message"))


def _rebuilt(note: dict[str, Any]) -> BaseException:
    kind = getattr(builtins, note["kind"], None)
    usable = isinstance(kind, type) and issubclass(kind, Exception)
    if not usable or kind in (UnicodeDecodeError, UnicodeEncodeError, KeyError):
        kind = RankError
    message = (
        f"rank {note['rank']} failed with {note['kind']}: {note['message']}\n"
        f"--- traceback of rank {note['rank']} ---\n{note['traceback']}"
    )
    try:
        return kind(message)  # type: ignore[no-any-return, misc]
    except TypeError:  # an exception that wants more than a text
        return RankError(message)


def install_excepthook(watch: Watch) -> None:
    """Makes an uncaught exception reach the other ranks before this process ends."""
    before, ref = sys.excepthook, weakref.ref(watch)

    def hook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        live = ref()
        if live is not None:
            live.report(error.with_traceback(trace))
        before(kind, error, trace)

    sys.excepthook = hook

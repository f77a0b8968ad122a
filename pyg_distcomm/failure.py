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

_GRACE = 2.0  # seconds a broken connection waits for the reason to reach the store


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
    """

    store: Any
    rank: int
    size: int
    deadline: float
    _gone: bool = field(default=False, init=False)
    # a failure that was this rank's as well
    _known: str = field(default="", init=False)

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
        stop = time.monotonic() + _GRACE
        while time.monotonic() < stop and not self._gone:
            try:
                self.look()
            except Exception as reason:
                return reason
            time.sleep(0.05)
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

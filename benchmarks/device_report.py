"""Writes a report line by line, and runs the parts of a benchmark within their time.

A part is a process of its own: one that hangs is stopped with all that it started, one that
spoils the device's context ends alone, and what it has written until then is kept.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MET, MISSED = "met", "missed"
GRACE = 0.9  # of a part's time, after which it begins no other line
SPARED = 2.0  # seconds of the whole that are left to stop what runs


@dataclass(frozen=True)
class Part:
    """A part of a run.

    Args:
        letter: its place, from "a" on.
        name: of the function that runs it, too.
        module: where that function is, which is imported in the part's own process.
        seconds: what it takes, beside the others; the time that is left is divided so.
        on_cpu: what a run without CUDA leaves out of it.
        most: seconds that it never exceeds.
    """

    letter: str
    name: str
    module: str
    seconds: float
    on_cpu: str
    most: float = float("inf")


class Report:
    """Appends whole lines to a report, each at once, and prints them.

    Args:
        path: the report, a file of Markdown.
        seconds: how long the part may take that writes.
    """

    def __init__(self, path: Path, seconds: float = float("inf")) -> None:
        self.path, self.seconds = path, seconds
        self.start = time.monotonic()
        self.doing = "the imports"  # named if time is up meanwhile

    @property
    def over(self) -> bool:
        """Tells whether no other line is to be begun."""
        return self.left <= 0

    @property
    def left(self) -> float:
        """Returns the seconds in which lines may be begun."""
        return GRACE * self.seconds - (time.monotonic() - self.start)

    def say(self, text: str) -> None:
        """Appends a paragraph."""
        self._append(f"\n{text}\n")

    def table(self, about: str, *head: str) -> Callable[..., None]:
        """Begins a table; returns what adds a line to it."""
        rule = "|".join(["---"] * len(head))
        self._append(f"\n{about}:\n\n{_line(head)}|{rule}|\n")

        def add(*cells: Any) -> None:
            self._append(_line(cells))

        return add

    def _append(self, text: str) -> None:
        """Writes whole lines in one call, so that none is torn, and waits for the disk."""
        place = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(place, text.encode())
            os.fsync(place)
        finally:
            os.close(place)
        print(text, end="", flush=True)


def _line(cells: Sequence[Any]) -> str:
    shown = (f"{c:.4g}" if isinstance(c, float) else str(c) for c in cells)
    plain = (c.replace("|", "/").replace("\n", " ") for c in shown)
    return f"| {' | '.join(plain)} |\n"


def run_part(
    run: Callable[[Report], None], path: Path, seconds: float, parent: int
) -> int:
    """Runs one part in this process, until another one ends; returns 1 if it failed."""
    report = Report(path, seconds)
    threading.Thread(target=_watch, args=(report, parent), daemon=True).start()
    try:
        run(report)
    except Exception:
        report.say(f"Failed:\n\n```\n{traceback.format_exc()}```")
        return 1
    return 0


def _watch(report: Report, parent: int) -> None:
    """Says what a part does whose time is nearly up; ends it if its parent has ended."""
    main, said = threading.main_thread().ident, False
    while True:
        time.sleep(0.2)
        if os.getppid() != parent:
            os.killpg(0, signal.SIGKILL)  # a part leads a group of its own
        if not said and time.monotonic() - report.start > report.seconds - 1:
            said = True
            frame = sys._current_frames().get(main or 0)
            places = traceback.format_stack(frame)[-4:] if frame else []
            told = "".join(places)
            report.say(f"Time was up during {report.doing}:\n\n```\n{told}```")


def run_parts(
    run: Callable[[Part, float], int],
    parts: Sequence[Part],
    report: Report,
    stop: float,
    cuda: bool,
) -> bool:
    """Runs parts one after the other, each within its share of the time that is left.

    Args:
        run: runs a part within seconds, in the part's own process; returns its status.
        parts: in order.
        report: where they write, too.
        stop: when all has ended, as of `time.monotonic`.
        cuda: whether they run on CUDA.

    Returns whether all parts came to their end.
    """
    whole = True
    stop -= SPARED
    for k, part in enumerate(parts):
        left = stop - time.monotonic()
        shares = part.seconds / sum(p.seconds for p in parts[k:])
        seconds = min(left * shares, part.most)
        report.say(f"## ({part.letter}) {part.name}")
        if not cuda:
            report.say(f"Without CUDA: {part.on_cpu}.")
        if seconds < 1:
            report.say("Not begun: no time was left.")
            whole = False
            continue
        start = time.monotonic()
        status = in_process(functools.partial(run, part, seconds), seconds)
        took = time.monotonic() - start
        if status == 0:
            report.say(f"Done in {took:.0f} of {seconds:.0f} s.")
        else:
            why = "Stopped" if status is None else f"Ended with status {status}"
            report.say(
                f"{why} after {took:.0f} of {seconds:.0f} s; lines before stand."
            )
            whole = False
    return whole


def in_process(run: Callable[[], int], seconds: float) -> int | None:
    """Runs in a process that begins as a copy of this one, and ends all that it started.

    Returns its status, or None if it had to be stopped.
    """
    stop = time.monotonic() + seconds
    sys.stdout.flush()
    with warnings.catch_warnings():  # of threads, of which libraries have idle ones
        warnings.simplefilter("ignore")
        child = os.fork()
    if not child:
        status = 1
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            status = run()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    found: int | None = None
    try:
        while found is None and time.monotonic() < stop:
            ended, told = os.waitpid(child, os.WNOHANG)
            if ended:
                found = os.waitstatus_to_exitcode(told)
            else:
                time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)  # ranks that it left, too
        if found is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return found

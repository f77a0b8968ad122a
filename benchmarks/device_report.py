"""Writes tables as their lines come, and runs parts of a benchmark within their minutes.

A part is a process of its own: one that hangs is stopped, one that spoils the device's context
ends alone, and what it has measured until then is kept.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tables import from_text

from pyg_distcomm.comm.ledger import format_table

MET, MISSED = "met", "missed"
GRACE = 0.9  # of a part's time, after which it begins no other line
Tables = list[dict[str, Any]]


class Report:
    """Holds the tables of one part, and writes them after each line.

    Args:
        path: where they go, as JSON.
        seconds: how long the part may take.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        self.path, self.stop = path, time.monotonic() + GRACE * seconds
        self.tables: Tables = []

    @property
    def over(self) -> bool:
        """Tells whether no other line is to be begun."""
        return time.monotonic() > self.stop

    def table(self, about: str, *head: str) -> Callable[..., None]:
        """Begins a table; returns what adds a line to it."""
        lines: list[list[Any]] = []
        self.tables.append({"about": about, "head": list(head), "lines": lines})

        def add(*line: Any) -> None:
            lines.append(list(line))
            self.write()

        self.write()
        return add

    def failed(self, name: str, why: str) -> None:
        """Says why a part did not come to its end."""
        self.tables.append({"about": name, "failed": why})
        self.write()

    def write(self) -> None:
        """Writes what there is, whole or not at all."""
        fresh = _unfinished(self.path)
        fresh.write_text(json.dumps(self.tables))
        fresh.replace(self.path)


def run_part(
    name: str,
    part: Callable[[Any, Report], None],
    device: Any,
    path: Path,
    seconds: float,
) -> int:
    """Runs one part in this process; returns 1 if it failed."""
    report = Report(path, seconds)
    try:
        part(device, report)
    except Exception:
        report.failed(name, f"Failed:\n\n```\n{traceback.format_exc()}```")
        return 1
    return 0


def run_parts(
    command: Sequence[str],
    minutes: Mapping[str, float],
    heading: str,
    target: Path,
) -> bool:
    """Runs parts one after the other, each within its minutes, and writes the report.

    Args:
        command: what runs a part, if `--part`, `--into` and `--seconds` are added to it.
        minutes: of each part.
        heading: the first lines of the report.
        target: the report.

    Returns whether all parts came to their end.
    """
    start, found, whole = time.monotonic(), {}, True
    for name, most in minutes.items():
        path = target.with_name(f".{target.name}.{name}.json")
        stop = time.monotonic() + 60 * most
        given = ["--part", name, "--into", str(path), "--seconds", str(60 * most)]
        child = subprocess.Popen([sys.executable, *command, *given])
        try:
            while child.poll() is None and time.monotonic() < stop:
                try:
                    child.wait(5)
                except subprocess.TimeoutExpired:
                    found[name] = _read(path)
                    target.write_text(_text(heading, found))
        finally:
            late = child.poll() is None
            if late:
                child.kill()
                child.wait()
            found[name] = _read(path)
            for left in (path, _unfinished(path)):  # of a child that was stopped
                left.unlink(missing_ok=True)
        if late:
            why = f"Stopped after its {most:.0f} minutes; lines before stand."
            found[name].append({"about": name, "failed": why})
        elif child.returncode and not any("failed" in t for t in found[name]):
            why = f"Ended with status {child.returncode}; lines before stand."
            found[name].append({"about": name, "failed": why})
        whole = whole and not late and not child.returncode
        target.write_text(_text(heading, found))
    took = (time.monotonic() - start) / 60
    target.write_text(_text(heading, found) + f"\n{took:.1f} minutes in all.\n")
    return whole


def _unfinished(path: Path) -> Path:
    return path.with_suffix(".new")


def _read(path: Path) -> Tables:
    return json.loads(path.read_text()) if path.exists() else []


def _text(heading: str, found: Mapping[str, Tables]) -> str:
    """Formats a report: its heading, how many aims were met, and the tables."""
    parts, tables = [heading], [t for each in found.values() for t in each]
    cells = [cell for t in tables for line in t.get("lines", ()) for cell in line]
    met, missed = cells.count(MET), cells.count(MISSED)
    if met + missed:
        parts.append(f"{met} of {met + missed} aims are met: see the columns `aim`.\n")
    for t in tables:
        if "failed" in t:
            parts.append(f"## {t['about']}\n\n{t['failed']}\n")
        elif t["lines"]:
            lines = format_table(t["head"], t["lines"])
            parts.append(f"## {t['about']}\n\n{from_text(lines)}\n")
    return "\n".join(parts)

"""Turns the plain-text tables of reports into tables of Markdown.

    python benchmarks/tables.py FILE.md ...       # in place

Scripts print tables that are read in a terminal, by `format_table`, and write reports that are
read in a browser: a table there folds its cells to the width of the page.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

FENCE = re.compile(r"^```\n(.*?)^```\n", re.M | re.S)
TABLE = re.compile(r"(?:^\|.*\n)+", re.M)
RULE = re.compile(r"-+(?:  +-+)+")
# the column that decides comes first: of a table, the first of these that it has
DECIDES = (
    "times ours|s, times ours|speed-up|PyG's best|times auto|loader/floor|peak/planned|peak|"
    "PyG / ours|ratio|of owner's, 1gbit|MiB sampling|bytes per node|most received|"
    "times fewer, Computers|of neighbor's|new / today|plain/all, 16 / 100 / 602|"
    "100 Mbit/s, METIS|test accuracy, %|test accuracy|ms per step|best|best other"
).split("|")
NUMBER = re.compile(r"[-+]?[\d.,]+ ?(?:[%x]|MiB|GiB)?|-|yes|no|")


def markdown(text: str) -> str:
    """Returns a report with each fenced plain-text table as a table of Markdown."""

    def replace(match: re.Match[str]) -> str:
        parts = match[1].strip("\n").split("\n\n")
        if not all(any(map(RULE.fullmatch, part.split("\n"))) for part in parts):
            return match[0]
        return "\n".join(_table(part.split("\n")) for part in parts)

    return TABLE.sub(_reordered, FENCE.sub(replace, text))


def from_text(text: str) -> str:
    """Returns plain-text tables, with empty lines between them, as Markdown."""
    return markdown(f"```\n{text.strip()}\n```\n").rstrip()


def _table(lines: list[str]) -> str:
    """Returns one table, and below it the lines that are no rows of it."""
    rule = next(k for k, line in enumerate(lines) if RULE.fullmatch(line))
    spans = [match.span() for match in re.finditer("-+", lines[rule])]
    rows, rest = [], []
    for line in lines[rule + 1 :]:
        cells = None if rest else _cells(line, spans)
        rest += [line] if cells is None else []
        rows += [] if cells is None else [cells]
    sides = [
        "---:" if k and all(NUMBER.fullmatch(row[k]) for row in rows) else "---"
        for k in range(len(spans))
    ]
    head = _head(lines[:rule], spans)
    found = _decisive([head, sides, *rows])
    text = "\n".join(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in found)
    return text + "\n" + ("\n" + " ".join(rest) + "\n" if rest else "")


def _reordered(match: re.Match[str]) -> str:
    """Returns a table of Markdown with the column that decides first."""
    lines = match[0].rstrip("\n").split("\n")
    rows = [re.split(r" *(?<!\\)\| *", line.strip())[1:-1] for line in lines]
    if len({len(row) for row in rows}) > 1 or _decisive(rows) == rows:
        return match[0]
    return "\n".join(f"| {' | '.join(row)} |" for row in _decisive(rows)) + "\n"


def _decisive(rows: list[list[str]]) -> list[list[str]]:
    """Returns a table's cells with the column that decides first, if it has one."""
    decides = next((name for name in DECIDES if name in rows[0]), rows[0][0])
    at = rows[0].index(decides)
    return [[row[at], *row[:at], *row[at + 1 :]] for row in rows]


def _cells(line: str, spans: list[tuple[int, int]]) -> list[str] | None:
    """Returns a line's cells, each in the column that it overlaps; None if it is no row."""
    row = [""] * len(spans)
    for match in re.finditer(r"\S+(?: \S+)*", line):
        shared = [min(match.end(), b) - max(match.start(), a) for a, b in spans]
        if sum(width > 2 for width in shared) > 1:
            return None
        at = shared.index(max(shared))
        if row[at]:
            return None
        row[at] = match[0].replace("|", "\\|")
    return row


def _head(lines: list[str], spans: list[tuple[int, int]]) -> list[str]:
    """Returns the head of each column: the label of a group above it, and its own."""
    own = _cells(lines[-1], spans) or []
    for line in lines[:-1]:
        labels = [(m.start(), m[0]) for m in re.finditer(r"\S+(?: \S+)*", line)]
        for k, (first, _) in enumerate(spans):
            above = [label for at, label in labels if at <= first + 1]
            if above:
                own[k] = f"{above[-1]}, {own[k]}" if own[k] else above[-1]
    return own


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(markdown(Path(name).read_text()))

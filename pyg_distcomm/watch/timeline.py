"""Draws a few milliseconds of a trace: what each rank computed, waited for and exchanged."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from pyg_distcomm.watch.drawing import as_seconds, ticks

MOST_RANKS = 16
WIDTH = 1100  # pixels
_LEFT, _LANE, _GAP = 62.0, 13.0, 12.0
# of the lanes of a rank, the kinds of spans, each drawn over those before it
_LANES = (
    ("script", "layer"),
    ("product", "codec", "loader", "send", "wait"),
    ("exchange",),
)
_SERIES = {"script": 6, "layer": 5, "product": 0, "codec": 2, "loader": 1}
_SERIES |= {"send": 7, "wait": 3, "exchange": 4, "other": 2}
_NAMES = {"send": "beginning an exchange", "wait": "waiting", "exchange": "in flight"}


@dataclass(frozen=True)
class Block:
    """A span of a trace, in µs."""

    rank: int
    kind: str
    name: str
    begin: float
    end: float


def read_blocks(path: Path) -> tuple[list[Block], dict[str, Any]]:
    """Returns the spans of a file of `pdc.trace`, exchanges too, and what it says of itself.

    Raises:
        ValueError: if it is no such file.
    """
    opened: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            found = json.load(file)
        about = dict(found["otherData"])
        if about.get("writer") != "pyg_distcomm":
            raise ValueError("it has another writer")
        return _blocks(found["traceEvents"]), about
    except (
        OSError,
        EOFError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:
        raise ValueError(
            f"{path}: is not what pdc.trace has written ({error})"
        ) from None


def _blocks(events: Iterable[dict[str, Any]]) -> list[Block]:
    begun: dict[str, dict[str, Any]] = {}
    out = []
    for event in events:
        ph, rank = event["ph"], int(event["pid"])
        if ph == "X":
            begin, kind = float(event["ts"]), str(event.get("cat", "other"))
            kind = kind if kind in _SERIES else "other"
            end = begin + float(event["dur"])
            out.append(Block(rank, kind, str(event["name"]), begin, end))
        elif ph == "b":
            begun[event["id"]] = event
        elif ph == "e" and event["id"] in begun:
            first = begun.pop(event["id"])
            name = f"{first['name']}, {first['args']['bytes']:,} bytes"
            begin, end = float(first["ts"]), float(event["ts"])
            out.append(Block(rank, "exchange", name, begin, end))
    return out


def window(blocks: list[Block]) -> tuple[float, float]:
    """Returns what to show: the last span that the script called "epoch" or "train", or all."""
    marked = [
        b
        for b in blocks
        if b.kind == "script" and b.name.startswith(("epoch", "train"))
    ]
    if marked:
        last = max(marked, key=lambda b: b.begin)
        return last.begin, last.end
    return min(b.begin for b in blocks), max(b.end for b in blocks)


def draw(blocks: list[Block]) -> tuple[str, str]:
    """Returns the picture of a window of a trace, and its key."""
    begin, end = window(blocks)
    end = max(end, begin + 1)
    scale = (WIDTH - _LEFT - 14) / (end - begin)
    ranks = sorted({b.rank for b in blocks})[:MOST_RANKS]
    shown = [b for b in blocks if b.end > begin and b.begin < end and b.rank in ranks]
    tall = len(_LANES) * _LANE + _GAP
    height = len(ranks) * tall + 36
    out = []
    for value in ticks(0, (end - begin) / 1e6, 7):
        x = _LEFT + value * 1e6 * scale
        out.append(f'<path class="grid" d="M{x:.1f} 4V{height - 30:.1f}"/>')
        text = as_seconds(value)
        out.append(
            f'<text x="{x:.1f}" y="{height - 12:.1f}" text-anchor="middle">{text}</text>'
        )
    for place, rank in enumerate(ranks):
        y = place * tall + 6
        middle = y + tall / 2 - 2
        out.append(
            f'<text x="{_LEFT - 10}" y="{middle:.1f}" text-anchor="end">rank {rank}</text>'
        )
        own = [b for b in shown if b.rank == rank]
        for lane, kinds in enumerate(_LANES):
            for kind in [*kinds, *(["other"] if lane == 1 else [])]:
                some = [b for b in own if b.kind == kind]
                out += _rects(some, y + lane * _LANE, begin, end, scale)
    seen = [k for k in _SERIES if any(b.kind == k for b in shown)]
    key = "".join(
        f'<span class="key"><i class="b{_SERIES[k]}"></i>{_NAMES.get(k, k)}</span>'
        for k in seen
    )
    label = "what each rank computed, waited for and exchanged"
    svg = f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{label}">'
    return svg + "".join(out) + "</svg>", f'<p class="legend">{key}</p>'


def _rects(
    blocks: list[Block], y: float, begin: float, end: float, scale: float
) -> Iterable[str]:
    """Yields rectangles; of those too narrow to see, one for each half pixel."""
    drawn = -1.0
    for b in sorted(blocks, key=lambda b: b.begin):
        left = _LEFT + (max(b.begin, begin) - begin) * scale
        right = _LEFT + (min(b.end, end) - begin) * scale
        if right - left < 0.5 and left < drawn + 0.5:
            continue
        drawn = left
        tip = escape(f"{b.name}: {as_seconds((b.end - b.begin) / 1e6)}")
        place = f'x="{left:.1f}" y="{y:.1f}" width="{max(right - left, 0.5):.1f}"'
        yield (
            f'<rect class="s{_SERIES[b.kind]}" {place} height="{_LANE - 2}">'
            f"<title>{tip}</title></rect>"
        )

"""Draws charts, and timelines of traces, as SVG with the colours of the HTML page.

Series have the CSS classes s0 to s7. The page defines their colours, for light and dark mode;
colour-blind readers can tell them apart. Every shape shows its figures as a tooltip. Legends
are text above a chart, never on its data.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

WIDTH, HEIGHT = 540, 270  # pixels of a chart without scaling
LEFT, RIGHT, TOP, BOTTOM = 74, 14, 12, 46
SERIES = 8
MOST_BARS = 60
Shown = Callable[[float], str]


def as_bytes(value: float) -> str:
    """Writes a number of bytes, as 1.25 MB."""
    return _with_unit(value, 1000.0, ("B", "kB", "MB", "GB", "TB", "PB"))


def as_seconds(value: float) -> str:
    """Writes a time, as 12.5 ms."""
    if value == 0:
        return "0 s"
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def as_count(value: float) -> str:
    """Writes a count, as 12,345 or 1.2 M."""
    if abs(value) < 1e5:
        return f"{value:,.0f}" if value == int(value) else f"{value:.3g}"
    return _with_unit(value, 1000.0, ("", "k", "M", "G", "T"))


def as_number(value: float) -> str:
    """Writes a number with four digits."""
    return f"{value:.4g}"


def _with_unit(value: float, step: float, units: Sequence[str]) -> str:
    for unit in units:
        if abs(value) < step or unit == units[-1]:
            text = f"{value:.0f}" if value == int(value) else f"{value:.3g}"
            return f"{text} {unit}".rstrip()
        value /= step
    return ""


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Returns round numbers from low to high; steps are 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * k for k in (1, 2, 5, 10) if power * k >= rough)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def legend(names: Sequence[str]) -> str:
    """Returns the legend of series, in their order."""
    keys = (
        f'<span class="key"><i class="b{k % SERIES}"></i>{escape(name)}</span>'
        for k, name in enumerate(names)
    )
    return f'<p class="legend">{"".join(keys)}</p>' if len(names) > 1 else ""


def _svg(body: str, label: str, height: float = HEIGHT, width: float = WIDTH) -> str:
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" style="max-width:{width:g}px" role="img" '
        f'aria-label="{escape(label, quote=True)}">{body}</svg>'
    )


def _text(x: float, y: float, text: str, anchor: str = "middle", more: str = "") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f"<text {place} {more}>{escape(text)}</text>"


def _shape(tag: str, attributes: str, tip: str) -> str:
    """Returns a shape with its figures as a tooltip."""
    return f"<{tag} {attributes}><title>{escape(tip)}</title></{tag}>"


class _Axes:
    """Maps values to pixels, and draws the grid with its numbers."""

    def __init__(
        self, x: tuple[float, float], y: tuple[float, float], whole: bool = False
    ) -> None:
        self.x, self.y, self.whole = x, y, whole

    def x_pixel(self, x: float) -> float:
        """Returns the pixel of an x."""
        low, high = self.x
        return LEFT + (x - low) / ((high - low) or 1) * (WIDTH - LEFT - RIGHT)

    def y_pixel(self, y: float) -> float:
        """Returns the pixel of a y."""
        low, high = self.y
        return (
            HEIGHT - BOTTOM - (y - low) / ((high - low) or 1) * (HEIGHT - TOP - BOTTOM)
        )

    def mark(self, x: float, tooltip: str) -> str:
        """Returns a dashed vertical line with a tooltip."""
        path = f'class="mark" d="M{self.x_pixel(x):.1f} {TOP}V{HEIGHT - BOTTOM}"'
        return _shape("path", path, tooltip)

    def draw_grid(self, x_shown: Shown, y_shown: Shown, names: tuple[str, str]) -> str:
        """Returns the grid, its numbers, and the names of both axes."""
        out = []
        for value in ticks(*self.y):
            y = self.y_pixel(value)
            out.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
            out.append(_text(LEFT - 8, y + 4, y_shown(value), "end"))
        for value in ticks(*self.x, about=6):
            if not self.whole or value == int(value):
                out.append(
                    _text(self.x_pixel(value), HEIGHT - BOTTOM + 17, x_shown(value))
                )
        middle = (LEFT + WIDTH - RIGHT) / 2
        out.append(_text(middle, HEIGHT - 6, names[0], more='class="name"'))
        rotation = f'class="name" transform="rotate(-90 13 {HEIGHT / 2 - 16:.0f})"'
        out.append(_text(13, HEIGHT / 2 - 16, names[1], more=rotation))
        return "".join(out)


def stacked(
    xs: Sequence[float],
    series: Mapping[str, Sequence[float]],
    shown: Shown,
    names: tuple[str, str],
    marks: Sequence[tuple[float, str]] = (),
) -> tuple[str, int]:
    """Draws a stacked bar for each x; returns the SVG, and the number of x's in one bar.

    Args:
        xs: the x's, ascending, such as epochs; of many, a bar shows the mean of several.
        series: by name, a value for each x.
        shown: formats a value.
        names: the names of both axes.
        marks: (x, tooltip) of dashed vertical lines.
    """
    group = -(-len(xs) // MOST_BARS)
    starts = range(0, len(xs), group)
    means = {
        name: [sum(v[k : k + group]) / len(v[k : k + group]) for k in starts]
        for name, v in series.items()
    }
    tops = [sum(v[k] for v in means.values()) for k in range(len(starts))]
    last = len(xs) - 1
    axes = _Axes((xs[0] - 0.5, xs[last] + 0.5), (0.0, max([*tops, 0]) or 1), whole=True)
    out = [axes.draw_grid(as_number, shown, names)]
    for bar, start in enumerate(starts):
        end, low = min(start + group, len(xs)) - 1, 0.0
        left, right = axes.x_pixel(xs[start] - 0.5), axes.x_pixel(xs[end] + 0.5)
        gap = min(2.0, (right - left) * 0.15)
        span = f"{xs[start]:g}" if start == end else f"{xs[start]:g} to {xs[end]:g}"
        for k, (name, values) in enumerate(means.items()):
            value = values[bar]
            y, height = (
                axes.y_pixel(low + value),
                axes.y_pixel(low) - axes.y_pixel(low + value),
            )
            low += value
            if height > 0:
                attributes = f'class="s{k % SERIES}" x="{left:.1f}" y="{y:.1f}" '
                attributes += f'width="{right - left - gap:.1f}" height="{height:.1f}"'
                tip = f"{names[0]} {span}, {name}: {shown(value)}"
                out.append(_shape("rect", attributes, tip))
    out += [axes.mark(*one) for one in marks]
    return _svg("".join(out), f"{names[1]} by {names[0]}"), group


def lines(
    series: Mapping[str, Sequence[tuple[float, float]]],
    x_shown: Shown,
    y_shown: Shown,
    names: tuple[str, str],
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """Draws a line for each series of points, with a dot on each if they are few.

    Args:
        series: by name, points (x, y), ascending by x.
        x_shown, y_shown: format a value.
        names: the names of both axes.
        marks: (x, tooltip) of dashed vertical lines.
    """
    xs = [x for points in series.values() for x, _ in points]
    ys = [y for points in series.values() for _, y in points]
    low, high = min(ys), max(ys)
    margin = (high - low) * 0.06 or abs(high) * 0.06 or 1.0
    left = 0.0 if min(xs) > 0 and x_shown is as_bytes else min(xs)
    axes = _Axes((left, max(xs)), (low - margin, high + margin), x_shown is as_number)
    out = [axes.draw_grid(x_shown, y_shown, names)]
    for k, (name, points) in enumerate(series.items()):
        places = [(axes.x_pixel(x), axes.y_pixel(y)) for x, y in points]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        out.append(f'<path class="line l{k % SERIES}" d="M{path}"/>')
        size = 3.2 if len(points) <= 40 else 1.8
        for (x, y), (px, py) in zip(points, places, strict=True):
            attributes = f'class="s{k % SERIES}" cx="{px:.1f}" cy="{py:.1f}" r="{size}"'
            out.append(
                _shape("circle", attributes, f"{name}: {y_shown(y)} at {x_shown(x)}")
            )
    out += [axes.mark(*one) for one in marks]
    return _svg("".join(out), f"{names[1]} by {names[0]}")


def bars(rows: Sequence[tuple[str, Mapping[str, float]]], shown: Shown) -> str:
    """Draws a horizontal bar for each row, divided into its parts, with its sum as text.

    Args:
        rows: (label, parts by name).
        shown: formats a value.
    """
    step, sum_width = 26, 96
    label_width = min(max((len(label) for label, _ in rows), default=0) * 7.0 + 14, 230)
    most = max((sum(parts.values()) for _, parts in rows), default=0) or 1
    names = list(dict.fromkeys(name for _, parts in rows for name in parts))
    scale, out = (WIDTH - label_width - sum_width) / most, []
    for n, (label, parts) in enumerate(rows):
        y, x = n * step + 4, label_width
        out.append(_text(label_width - 8, y + 13, label, "end"))
        for name, value in parts.items():
            length = value * scale
            if length > 0:
                attributes = (
                    f'class="s{names.index(name) % SERIES}" x="{x:.1f}" y="{y}" '
                )
                attributes += f'width="{max(length - 1, 0.5):.1f}" height="18"'
                out.append(
                    _shape("rect", attributes, f"{label}, {name}: {shown(value)}")
                )
                x += length
        out.append(_text(x + 7, y + 13, shown(sum(parts.values())), "start"))
    return _svg("".join(out), "bars", len(rows) * step + 6)


def matrix(values: Sequence[Sequence[float]], what: str) -> str:
    """Draws a heat map of values: rows send, columns receive, larger values are stronger.

    Args:
        values: the values [P, P].
        what: the unit of the values, in plural.
    """
    size, most = len(values), max((v for row in values for v in row), default=0) or 1
    cell = min(64.0, 300 / size)
    left, top, side = 58.0, 46.0, cell * size
    every = max(1, round(22 / cell))
    out = [_text(left + side / 2, 16, "received by rank", more='class="name"')]
    rotation = f'class="name" transform="rotate(-90 14 {top + side / 2:.0f})"'
    out.append(_text(14, top + side / 2, "sent by rank", more=rotation))
    for i, row in enumerate(values):
        if i % every == 0:
            out.append(_text(left - 8, top + (i + 0.5) * cell + 4, str(i), "end"))
            out.append(_text(left + (i + 0.5) * cell, top - 8, str(i)))
        for j, value in enumerate(row):
            x, y, share = left + j * cell, top + i * cell, value / most
            attributes = (
                f'class="s0" fill-opacity="{0.05 + 0.95 * share:.3f}" x="{x:.1f}" '
            )
            attributes += f'y="{y:.1f}" width="{cell - 1:.1f}" height="{cell - 1:.1f}"'
            tip = f"rank {i} to rank {j}: {value:,.0f} {what}"
            out.append(_shape("rect", attributes, tip))
            if size <= 8 and value:
                on = "on" if share > 0.45 else "off"
                shown = as_count(value)
                more = f'class="{on}"'
                out.append(_text(x + cell / 2, y + cell / 2 + 4, shown, more=more))
    label = f"{what} sent from each rank to each other"
    return _svg("".join(out), label, top + side + 6, max(left + side + 12, 240))


def network(sizes: Sequence[float], rows: Sequence[Sequence[float]]) -> str:
    """Draws ranks as discs on a circle, by their nodes, joined by lines for their exchanges.

    Args:
        sizes: the nodes of each rank.
        rows: the rows that each rank sends to each other [P, P].
    """
    count, side = len(sizes), 340.0
    middle, radius = side / 2, side / 2 - 46
    largest = min(34.0, 2.2 * radius / max(count, 4))
    places = []
    for k in range(count):
        angle = 2 * math.pi * k / count - math.pi / 2
        distance = radius if count > 1 else 0.0
        places.append(
            (middle + distance * math.cos(angle), middle + distance * math.sin(angle))
        )
    both = {
        (i, j): rows[i][j] + rows[j][i]
        for i in range(count)
        for j in range(i + 1, count)
    }
    most, top, out = max(both.values(), default=0) or 1, max(sizes, default=0) or 1, []
    for (i, j), value in sorted(both.items(), key=lambda pair: pair[1]):
        if value:
            (x, y), (u, v) = places[i], places[j]
            share = value / most
            stroke_width = 0.6 + 11 * share * min(1.0, 6 / count)
            attributes = f'class="join" stroke-width="{stroke_width:.1f}" '
            attributes += f'opacity="{0.2 + 0.7 * share:.2f}" '
            attributes += f'd="M{x:.1f} {y:.1f}L{u:.1f} {v:.1f}"'
            tip = f"ranks {i} and {j} exchange {value:,.0f} rows"
            out.append(_shape("path", attributes, tip))
    for k, (x, y) in enumerate(places):
        size = max(largest * math.sqrt(sizes[k] / top), 3.0)
        attributes = f'class="disc" cx="{x:.1f}" cy="{y:.1f}" r="{size:.1f}"'
        out.append(_shape("circle", attributes, f"rank {k}: {sizes[k]:,.0f} nodes"))
        if count <= 24 and size > 8:
            out.append(_text(x, y + 4, str(k), more='class="on"'))
    return _svg("".join(out), "ranks and the rows they exchange", side, side)


# Timelines --------------------------------------------------------------------------

TIMELINE_RANKS = 16
_WIDE, _LEFT, _LANE, _GAP = 1100, 62.0, 13.0, 12.0  # pixels, of a timeline
# the kinds of spans in each lane of a rank; later kinds are drawn over earlier ones
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
    """Returns the spans and exchanges in a file of `pdc.trace`, and its metadata.

    Raises:
        ValueError: if `pdc.trace` did not write the file.
    """
    opened: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            found = json.load(file)
        info = dict(found["otherData"])
        if info.get("writer") != "pyg_distcomm":
            raise ValueError("it has another writer")
        return _blocks(found["traceEvents"]), info
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
    open_spans: dict[str, dict[str, Any]] = {}
    out = []
    for event in events:
        ph, rank = event["ph"], int(event["pid"])
        if ph == "X":
            begin, kind = float(event["ts"]), str(event.get("cat", "other"))
            kind = kind if kind in _SERIES else "other"
            end = begin + float(event["dur"])
            out.append(Block(rank, kind, str(event["name"]), begin, end))
        elif ph == "b":
            open_spans[event["id"]] = event
        elif ph == "e" and event["id"] in open_spans:
            first = open_spans.pop(event["id"])
            name = f"{first['name']}, {first['args']['bytes']:,} bytes"
            begin, end = float(first["ts"]), float(event["ts"])
            out.append(Block(rank, "exchange", name, begin, end))
    return out


def _window(blocks: list[Block]) -> tuple[float, float]:
    """Returns the last span that the script named "epoch" or "train", or the whole trace."""
    marked = [
        b
        for b in blocks
        if b.kind == "script" and b.name.startswith(("epoch", "train"))
    ]
    if marked:
        last = max(marked, key=lambda b: b.begin)
        return last.begin, last.end
    return min(b.begin for b in blocks), max(b.end for b in blocks)


def timeline(blocks: list[Block]) -> tuple[str, str]:
    """Returns the SVG of a window of a trace, and its legend."""
    begin, end = _window(blocks)
    end = max(end, begin + 1)
    scale = (_WIDE - _LEFT - 14) / (end - begin)
    ranks = sorted({b.rank for b in blocks})[:TIMELINE_RANKS]
    shown = [b for b in blocks if b.end > begin and b.begin < end and b.rank in ranks]
    rank_height = len(_LANES) * _LANE + _GAP
    height = len(ranks) * rank_height + 36
    out = []
    for value in ticks(0, (end - begin) / 1e6, 7):
        x = _LEFT + value * 1e6 * scale
        out.append(f'<path class="grid" d="M{x:.1f} 4V{height - 30:.1f}"/>')
        out.append(_text(x, height - 12, as_seconds(value)))
    for place, rank in enumerate(ranks):
        y = place * rank_height + 6
        out.append(_text(_LEFT - 10, y + rank_height / 2 - 2, f"rank {rank}", "end"))
        own = [b for b in shown if b.rank == rank]
        for lane, kinds in enumerate(_LANES):
            for kind in [*kinds, *(["other"] if lane == 1 else [])]:
                blocks_of_kind = [b for b in own if b.kind == kind]
                out += _rects(blocks_of_kind, y + lane * _LANE, begin, end, scale)
    seen = [k for k in _SERIES if any(b.kind == k for b in shown)]
    key = "".join(
        f'<span class="key"><i class="b{_SERIES[k]}"></i>{_NAMES.get(k, k)}</span>'
        for k in seen
    )
    label = "what each rank computed, waited for and exchanged"
    svg = f'<svg viewBox="0 0 {_WIDE} {height:g}" role="img" aria-label="{label}">'
    return svg + "".join(out) + "</svg>", f'<p class="legend">{key}</p>'


def _rects(
    blocks: list[Block], y: float, begin: float, end: float, scale: float
) -> Iterable[str]:
    """Yields rectangles; spans too narrow to see share one for each half pixel."""
    last_left = -1.0
    for b in sorted(blocks, key=lambda b: b.begin):
        left = _LEFT + (max(b.begin, begin) - begin) * scale
        right = _LEFT + (min(b.end, end) - begin) * scale
        if right - left < 0.5 and left < last_left + 0.5:
            continue
        last_left = left
        attributes = f'class="s{_SERIES[b.kind]}" x="{left:.1f}" y="{y:.1f}" '
        attributes += f'width="{max(right - left, 0.5):.1f}" height="{_LANE - 2}"'
        yield _shape(
            "rect", attributes, f"{b.name}: {as_seconds((b.end - b.begin) / 1e6)}"
        )

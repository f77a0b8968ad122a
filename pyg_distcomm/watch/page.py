"""Renders a run as one self-contained HTML page, with charts drawn by matplotlib."""

from __future__ import annotations

import io
import itertools
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from statistics import mean, median
from typing import Any

from pyg_distcomm.partition.partition import imbalance
from pyg_distcomm.watch.metrics import LOADER, RESERVED, RecordedRun, Row, is_finite

MOST_RANKS = 24  # the most ranks that are drawn
SLOW = 1.1  # a rank that computes so many times the mean is called slow
COLOURS = "#0072b2 #e69f00 #009e73 #d55e00 #b25a93 #56b4e9 #8a8f96 #c3b200".split()

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<title>{title} · pyg_distcomm</title>
<style>
:root{{color-scheme:light dark}}*{{box-sizing:border-box}}
body{{margin:0;background:Canvas;color:CanvasText;font:15px/1.45 system-ui,sans-serif}}
main{{max-width:1180px;margin:0 auto;padding:28px 20px;display:grid;gap:14px;
grid-template-columns:repeat(auto-fit,minmax(min(480px,100%),1fr));align-items:start}}
header{{grid-column:1/-1}}h1{{font-size:24px;margin:0}}h2{{font-size:17px;margin:0}}
section{{border:1px solid GrayText;border-radius:10px;padding:14px 18px;min-width:0;
overflow-x:auto}}
.verdict{{font-size:18px}}svg{{display:block;max-width:100%;height:auto}}
svg text{{fill:currentColor}}p{{margin:6px 0}}
table{{border-collapse:collapse;font-size:13px;width:100%}}
td,th{{text-align:right;padding:2px 8px;border-bottom:1px solid GrayText}}
td:first-child,th:first-child{{text-align:left}}
@media print{{section{{break-inside:avoid}}}}
</style></head>
<body><main><header><h1>{title}</h1>{head}</header>
{sections}</main></body></html>
"""


def render(title: str, run: RecordedRun) -> str:
    """Returns the HTML page of a run. Its first sentence says which rank is slow, and why.

    Args:
        title: the name of the run.
        run: the run that `pdc.metrics` recorded.

    Raises:
        ImportError: without matplotlib.
    """
    head, rows = _text(*_about(run)), run.rows
    sections = _section("Nothing recorded yet", _text("No epoch has ended."))
    if rows:
        found, marks = _Medians(rows), _restarts(rows)
        verdict = " ".join(_verdict(found, run.about))
        head = f'<p class="verdict">{escape(verdict)}</p>{head}'
        sections = _ranks(found) + _phases(found) + _bytes(rows, marks)
        sections += "".join(_values(rows, marks))
    return _PAGE.format(title=escape(title), head=head, sections=sections)


# What is drawn with --------------------------------------------------------------------


def _axes(height: float = 2.8) -> Any:
    """Returns matplotlib's axes in a new figure of so many inches in height."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "the page of a run is drawn by matplotlib: pip install 'pyg-distcomm[plot]'"
        ) from error
    axes = Figure((5.6, height), layout="constrained").add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_prop_cycle(color=COLOURS)
    return axes


def _svg(axes: Any, label: str) -> str:
    """Returns a figure as an SVG element, in the page's own colour where it is black."""
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "pyg_distcomm"}
    ):
        about = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        axes.figure.savefig(out, format="svg", transparent=True, metadata=about)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
    used = set(re.findall(r"#(\w+)", text))
    text = re.sub(r' id="([^"]*)"', lambda m: m[0] if m[1] in used else "", text)
    text = text.replace("#000000", "currentColor")
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1)


def with_unit(value: float, unit: str) -> str:
    """Writes a value with its unit, as 12.5 ms or 1.25 MB."""
    from matplotlib.ticker import EngFormatter

    return EngFormatter(unit)(float(f"{value:.3g}")).strip()


def _scale(axis: Any, unit: str | None = None) -> None:
    """Labels an axis with a unit, or with whole numbers."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(5, integer=unit is None))
    if unit is not None:
        axis.set_major_formatter(EngFormatter(unit))


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>\n"


def _text(*sentences: str) -> str:
    return f"<p>{escape(' '.join(filter(None, sentences)))}</p>"


def _bars(title: str, rows: Mapping[str, Mapping[str, float]], *sentences: str) -> str:
    """Draws a horizontal bar of seconds for each row, divided into its parts."""
    axes = _axes(height=1.2 + 0.26 * len(rows))
    left = dict.fromkeys(rows, 0.0)
    for name in dict.fromkeys(name for parts in rows.values() for name in parts):
        own = [row for row in rows if name in rows[row]]
        lengths = [rows[row][name] for row in own]
        axes.barh(own, lengths, left=[left[row] for row in own], label=name)
        left = {row: left[row] + rows[row].get(name, 0.0) for row in rows}
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    _scale(axes.xaxis, "s")
    axes.figure.legend(loc="outside upper left", ncols=2, frameon=False)
    return _section(title, _svg(axes, f"{title}, in seconds"), _text(*sentences))


# Figures of epochs ---------------------------------------------------------------------


class _Medians:
    """Holds the medians over the epochs of the last start, without its first if possible.

    By rank: seconds, waits and computing. Means of ranks: epoch (of which computing and
    waiting are parts), and the phases of the script and of a loader.
    """

    def __init__(self, epochs: Sequence[Row]) -> None:
        last = [row for row in epochs if row.get("start") == epochs[-1].get("start")]
        self.rows = rows = last[1:] or last  # the first compiles
        self.seconds, self.waits = (
            [*map(median, zip(*(row["by_rank"][name] for row in rows), strict=True))]
            for name in ("seconds", "waits")
        )
        pairs = zip(self.seconds, self.waits, strict=True)
        self.computing = [max(seconds - waits, 0.0) for seconds, waits in pairs]
        names = dict.fromkeys(name for row in rows for name in row["phases"])
        self.script = {n: median(r["phases"].get(n, 0.0) for r in rows) for n in names}
        self.epoch = {n: self.script.pop(n, 0.0) for n in ("computing", "waiting")}
        of_loader = [n for n in self.script if n.startswith(LOADER)]
        self.loader = {n: self.script.pop(n) for n in of_loader}
        numbers = f"{rows[0]['epoch']} to {rows[-1]['epoch']}"
        self.range = f"Medians of epochs {numbers}."


def _verdict(found: _Medians, about: Mapping[str, Any]) -> Iterator[str]:
    """Says which rank is slow and why, which operation sends most, and the longest phase."""
    computing, script = found.computing, found.script
    slow = max(range(len(computing)), key=computing.__getitem__)
    most = imbalance(computing)
    share = mean(found.waits) / max(mean(found.seconds), 1e-12)
    if len(computing) == 1:
        yield "One rank computes alone."
    elif most < SLOW:
        yield (
            f"No rank is slow: rank {slow}, the busiest, computes {most:.2f} times the mean, "
            f"and ranks wait {share:.0%} of an epoch for each other and for rows."
        )
    else:
        yield (
            f"Rank {slow} is slow: it computes {with_unit(computing[slow], 's')} of an epoch, "
            f"{most:.2f} times the mean, {_cause(slow, found, about)}; "
            f"ranks wait {share:.0%} of an epoch."
        )
    sums = Counter[str]()
    for row in found.rows:
        sums.update(row["bytes"])
    total = sums.pop("total", 0)
    if total and sums:
        op = max(sorted(sums), key=sums.__getitem__)
        yield f"{sums[op] / total:.0%} of bytes are those of {op}."
    if len(script) > 1:
        name = max(script, key=script.__getitem__)
        yield f"The longest phase is {name}, {with_unit(script[name], 's')}."


def _cause(rank: int, found: _Medians, about: Mapping[str, Any]) -> str:
    figures, ranks = about.get("partition", {}), len(found.computing)
    why = "and no figures of the partition say why"
    if len(figures.get("nodes", ())) == ranks:
        columns = {
            "edges": figures["edges"],
            "nodes": figures["nodes"],
            "rows sent": figures["send_rows"],
            "rows received": figures["halo_rows"],
        }
        ratios = {n: c[rank] / max(mean(c), 1e-12) for n, c in columns.items()}
        name = max(ratios, key=ratios.__getitem__)
        if ratios[name] > 1.05:
            return f"and has {ratios[name]:.2f} times the mean of {name}"
        why = "though it has no more nodes, edges and rows to exchange than others"
    longer = {}  # seconds of the script's phases on this rank, beyond the mean
    for name in found.rows[-1]["by_rank"].get("phases", {}):
        each = [r["by_rank"]["phases"].get(name, [0.0] * ranks) for r in found.rows]
        longer[name] = median(one[rank] - mean(one) for one in each)
    name = max(longer, key=longer.__getitem__, default="")
    if longer.get(name, 0.0) > (found.computing[rank] - mean(found.computing)) / 2:
        return f"and spends {with_unit(longer[name], 's')} more than the mean in {name}"
    hosts = about.get("hosts", ())
    return why + (f" (look at its host, {hosts[rank]})" if len(hosts) == ranks else "")


def _ranks(found: _Medians) -> str:
    order = sorted(range(len(found.waits)), key=lambda rank: -found.computing[rank])
    bars = {
        f"rank {rank}, waits {with_unit(found.waits[rank], 's')}": {
            "computing": found.computing[rank],
            "waiting": found.waits[rank],
        }
        for rank in sorted(order[:MOST_RANKS])
    }
    few = len(order) <= MOST_RANKS
    note = "" if few else f"The {MOST_RANKS} busiest of {len(order)} ranks."
    return _bars("Waits by rank", bars, note, found.range)


def _phases(found: _Medians) -> str:
    bars, whole = {"epoch": found.epoch}, sum(found.epoch.values())
    if found.script:
        rest = max(whole - sum(found.script.values()), 0.0)
        bars["script"] = {**found.script, "outside of phases": rest}
    if found.loader:
        bars["loader"] = found.loader
    named = {
        bar: {f"{n} {with_unit(seconds, 's')}": seconds for n, seconds in parts.items()}
        for bar, parts in bars.items()
    }
    note = "A bar is the mean of ranks; its parts do not overlap, and bars run side by side."
    return _bars("Phases", named, note, found.range)


def _restarts(epochs: Sequence[Row]) -> dict[float, str]:
    """Returns where a run went on after a restart, between two epochs, and what to say."""
    return {
        (last["epoch"] + row["epoch"]) / 2: f"after epoch {last['epoch']}, on "
        f"{len(row['by_rank']['bytes'])} ranks"
        for last, row in itertools.pairwise(epochs)
        if last.get("start") != row.get("start")
    }


def _by_epoch(title: str, axes: Any, marks: Mapping[float, str], *parts: str) -> str:
    """Ends a chart by epoch, with a broken line at each restart."""
    axes.set(xlabel="epoch")
    _scale(axes.xaxis)
    for place in marks:
        axes.axvline(place, color="#8a8f96", linestyle="--")
    told = f"A broken line is a restart: {'; '.join(marks.values())}." if marks else ""
    return _section(title, _svg(axes, title), _text(told), *parts)


def _bytes(epochs: Sequence[Row], marks: Mapping[float, str]) -> str:
    title = "Bytes by epoch and operation"
    ops = {op for row in epochs for op in row["bytes"]} - {"total"}
    series = {op: [row["bytes"].get(op, 0) for row in epochs] for op in ops}
    order = sorted(ops, key=lambda op: (-sum(series[op]), op))
    if not order:
        return _section(title, _text("Nothing was sent."))
    axes, drawn = _axes(height=3.2), order[: len(COLOURS)]
    layers, xs = [series[op] for op in drawn], [row["epoch"] for row in epochs]
    axes.stackplot(xs, *layers, labels=drawn, colors=COLOURS)
    _scale(axes.yaxis, "B")
    axes.set(ylabel="received by all ranks", ylim=(0, None))
    axes.figure.legend(loc="outside upper left", ncols=3, frameon=False)
    lines = [
        "<tr><th>operation and axis</th><th>median epoch</th><th>all epochs</th></tr>"
    ]
    for op in order:
        told = op, *(with_unit(f(series[op]), "B") for f in (median, sum))
        lines.append(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in told)}</tr>")
    return _by_epoch(title, axes, marks, f"<table>{''.join(lines)}</table>")


def _values(epochs: Sequence[Row], marks: Mapping[float, str]) -> Iterator[str]:
    """Yields charts of the script's own values by epoch."""
    found = dict.fromkeys(n for row in epochs for n in row if n not in RESERVED)
    for name in list(found)[:6]:
        rows = [row for row in epochs if is_finite(row.get(name))]
        if rows:
            axes = _axes()
            axes.plot([r["epoch"] for r in rows], [r[name] for r in rows], marker=".")
            axes.set(ylabel=name)
            title = f"{name.replace('_', ' ').capitalize()} by epoch"
            note = _text(f"The last is {rows[-1][name]:.4g}.")
            yield _by_epoch(title, axes, marks, note)


def _about(run: RecordedRun) -> Iterator[str]:
    about, first = run.about, run.about["starts"][0]
    counts = [str(n) for n, _ in itertools.groupby(s["ranks"] for s in about["starts"])]
    hosts = list(dict.fromkeys(about.get("hosts", ())))
    more = f" and {len(hosts) - 4} more" if hosts[4:] else ""
    yield (
        f"Begun {time.strftime('%Y-%m-%d %H:%M', time.localtime(first['time']))} on "
        f"{', '.join(hosts[:4])}{more}; {' → '.join(counts)} ranks, grid "
        f"{' x '.join(map(str, about['grid']))}, {about['stages']} stages; torch "
        f"{about['torch']}."
    )
    if run.rows:
        moved = with_unit(sum(row["bytes"]["total"] for row in run.rows), "B")
        seconds = median(row["seconds"] for row in _Medians(run.rows).rows)
        told = f"{with_unit(seconds, 's')} in the median; {moved} received."
        yield f"{len(run.rows):,} epochs, {told}"
    if run.trace is not None:
        yield f"{run.trace.name} is a timeline, to be opened in ui.perfetto.dev."

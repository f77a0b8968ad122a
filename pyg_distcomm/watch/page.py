"""Renders a run as one self-contained HTML page, with charts drawn by matplotlib."""

from __future__ import annotations

import io
import itertools
import re
import time
from collections.abc import Mapping, Sequence
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
:root{{color-scheme:light dark;--bg:#f6f6f4;--card:#fff;--ink:#1b1d20;--line:#dcdde0}}
@media (prefers-color-scheme:dark){{
:root{{--bg:#141619;--card:#1d2024;--ink:#e9eaec;--line:#393e45}}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--bg);color:var(--ink);font:15px/1.45 system-ui,sans-serif}}
main{{max-width:1180px;margin:0 auto;padding:28px 20px;display:grid;gap:14px;
grid-template-columns:repeat(auto-fit,minmax(min(480px,100%),1fr));align-items:start}}
header{{grid-column:1/-1}}h1{{font-size:24px;margin:0}}h2{{font-size:17px;margin:0}}
section{{background:var(--card);border:1px solid var(--line);border-radius:10px;
padding:14px 18px;min-width:0;overflow-x:auto}}
.verdict{{font-size:18px}}svg{{display:block;max-width:100%;height:auto}}
svg text{{fill:currentColor}}p{{margin:6px 0}}
table{{border-collapse:collapse;font-size:13px;width:100%}}
td,th{{text-align:right;padding:2px 8px;border-bottom:1px solid var(--line)}}
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
    head = _about(run)
    if run.rows:
        settled = _settled(run.rows)
        head = f'<p class="verdict">{escape(_verdict(settled, run.about))}</p>{head}'
        sections = (
            _ranks(settled) + _phases(settled) + _bytes(run.rows) + _values(run.rows)
        )
    else:
        sections = _section("Nothing recorded yet", _text("No epoch has ended."))
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
        axes.figure.savefig(out, format="svg", transparent=True, dpi=150)
    text = out.getvalue()
    text = re.sub(
        r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S
    )
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


def _bars(rows: Mapping[str, Mapping[str, float]], label: str) -> str:
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
    return _svg(axes, label)


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>\n"


def _text(*sentences: str) -> str:
    return f"<p>{escape(' '.join(filter(None, sentences)))}</p>"


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    rows = ("".join(f"<td>{escape(cell)}</td>" for cell in line) for line in lines)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


# Figures of epochs ---------------------------------------------------------------------


def _settled(epochs: Sequence[Row]) -> list[Row]:
    """Returns the epochs of the last start, without its first, which compiles, if possible."""
    rows = [row for row in epochs if row.get("start") == epochs[-1].get("start")]
    return rows[1:] or rows


def _by_rank(rows: Sequence[Row], what: str) -> list[float]:
    """Returns the median over epochs of a figure, by rank."""
    columns = zip(*(row["by_rank"][what] for row in rows), strict=True)
    return [median(column) for column in columns]


def _computing(rows: Sequence[Row]) -> list[float]:
    pairs = zip(_by_rank(rows, "seconds"), _by_rank(rows, "waits"), strict=True)
    return [max(seconds - waits, 0.0) for seconds, waits in pairs]


def _verdict(settled: Sequence[Row], about: Mapping[str, Any]) -> str:
    """Says which rank is slow and why, which operation sends most, and the longest phase."""
    computing, waits = _computing(settled), _by_rank(settled, "waits")
    slow = max(range(len(computing)), key=computing.__getitem__)
    most = imbalance(computing)
    share = mean(waits) / max(mean(_by_rank(settled, "seconds")), 1e-12)
    if len(computing) == 1:
        text = "One rank computes alone."
    elif most < SLOW:
        text = (
            f"No rank is slow: rank {slow}, the busiest, computes {most:.2f} times the mean, "
            f"and ranks wait {share:.0%} of an epoch for each other and for rows."
        )
    else:
        text = (
            f"Rank {slow} is slow: it computes {with_unit(computing[slow], 's')} of an epoch, "
            f"{most:.2f} times the mean, {_cause(slow, about, settled)}; "
            f"ranks wait {share:.0%} of an epoch."
        )
    total = sum(row["bytes"]["total"] for row in settled)
    ops = {op for row in settled for op in row["bytes"]} - {"total"}
    if total and ops:
        sums = {op: sum(row["bytes"].get(op, 0) for row in settled) for op in ops}
        op = max(sorted(ops), key=sums.__getitem__)
        text += f" {sums[op] / total:.0%} of bytes are those of {op}."
    own, _ = _script_phases(settled)
    if len(own) > 1:
        name = max(own, key=own.__getitem__)
        text += f" The longest phase is {name}, {with_unit(own[name], 's')}."
    return text


def _cause(rank: int, about: Mapping[str, Any], settled: Sequence[Row]) -> str:
    computing, figures = _computing(settled), about.get("partition", {})
    ranks = len(computing)
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
    else:
        why = "and no figures of the partition say why"
    longer = {}  # seconds of the script's phases on this rank, beyond the mean
    for name in settled[-1]["by_rank"].get("phases", {}):
        each = [row["by_rank"]["phases"].get(name, [0.0] * ranks) for row in settled]
        longer[name] = median(one[rank] - mean(one) for one in each)
    name = max(longer, key=longer.__getitem__, default="")
    if longer.get(name, 0.0) > (computing[rank] - mean(computing)) / 2:
        return f"and spends {with_unit(longer[name], 's')} more than the mean in {name}"
    hosts = about.get("hosts", ())
    where = f" (look at its host, {hosts[rank]})" if len(hosts) == ranks else ""
    return why + where


def _script_phases(settled: Sequence[Row]) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the median seconds of the script's own phases, and of a loader's."""
    names = dict.fromkeys(name for row in settled for name in row["phases"])
    middle = {n: median(row["phases"].get(n, 0.0) for row in settled) for n in names}
    loader = {n: middle.pop(n) for n in names if n.startswith(LOADER)}
    for name in ("computing", "waiting"):
        middle.pop(name, None)
    return middle, loader


def _ranks(settled: Sequence[Row]) -> str:
    bars = {}
    figures = zip(_computing(settled), _by_rank(settled, "waits"), strict=True)
    for rank, (computing, waits) in enumerate(figures):
        label = f"rank {rank}, waits {with_unit(waits, 's')}"
        bars[label] = {"computing": computing, "waiting": waits}
    busiest = sorted(bars, key=lambda label: -bars[label]["computing"])[:MOST_RANKS]
    svg = _bars({n: b for n, b in bars.items() if n in busiest}, "seconds by rank")
    few = len(bars) == len(busiest)
    note = "" if few else f"The {MOST_RANKS} busiest of {len(bars)} ranks."
    return _section("Waits by rank", svg + _text(note, _range(settled)))


def _phases(settled: Sequence[Row]) -> str:
    whole = {
        n: median(row["phases"][n] for row in settled) for n in ("computing", "waiting")
    }
    bars, (own, loader) = {"epoch": whole}, _script_phases(settled)
    if own:
        rest = sum(whole.values()) - sum(own.values())
        bars["script"] = {**own, "outside of phases": max(rest, 0.0)}
    if loader:
        bars["loader"] = loader
    bars = {
        bar: {
            f"{name} {with_unit(seconds, 's')}": seconds
            for name, seconds in parts.items()
        }
        for bar, parts in bars.items()
    }
    note = "A bar is the mean of ranks; its parts do not overlap, and bars run side by side."
    return _section(
        "Phases", _bars(bars, "seconds by phase") + _text(note, _range(settled))
    )


def _range(settled: Sequence[Row]) -> str:
    return f"Medians of epochs {settled[0]['epoch']} to {settled[-1]['epoch']}."


def _bytes(epochs: Sequence[Row]) -> str:
    title = "Bytes by epoch and operation"
    ops = {op for row in epochs for op in row["bytes"]} - {"total"}
    series = {op: [row["bytes"].get(op, 0) for row in epochs] for op in ops}
    order = sorted(ops, key=lambda op: (-sum(series[op]), op))
    if not order:
        return _section(title, _text("Nothing was sent."))
    axes = _axes(height=3.2)
    layers = [series[op] for op in order[: len(COLOURS)]]
    xs = [row["epoch"] for row in epochs]
    axes.stackplot(xs, *layers, labels=order[: len(COLOURS)], colors=COLOURS)
    _scale(axes.yaxis, "B")
    _scale(axes.xaxis)
    axes.set(xlabel="epoch", ylabel="received by all ranks", ylim=(0, None))
    axes.figure.legend(loc="outside upper left", ncols=3, frameon=False)
    note = _mark_restarts(axes, epochs)
    lines = [
        [op, with_unit(median(series[op]), "B"), with_unit(sum(series[op]), "B")]
        for op in order
    ]
    table = _table(["operation and axis", "median epoch", "all epochs"], lines)
    return _section(title, _svg(axes, title) + _text(note) + table)


def _mark_restarts(axes: Any, epochs: Sequence[Row]) -> str:
    """Draws a broken line at each restart; returns the text that explains it, if any."""
    texts = []
    for last, row in itertools.pairwise(epochs):
        if last.get("start") != row.get("start"):
            axes.axvline(
                (last["epoch"] + row["epoch"]) / 2, color="#8a8f96", linestyle="--"
            )
            texts.append(
                f"after epoch {last['epoch']}, on {len(row['by_rank']['bytes'])} ranks"
            )
    return f"A broken line is a restart: {'; '.join(texts)}." if texts else ""


def _values(epochs: Sequence[Row]) -> str:
    """Returns charts of the script's own values by epoch."""
    found = dict.fromkeys(n for row in epochs for n in row if n not in RESERVED)
    out = ""
    for name in list(found)[:6]:
        rows = [row for row in epochs if is_finite(row.get(name))]
        if not rows:
            continue
        title, axes = f"{name.replace('_', ' ').capitalize()} by epoch", _axes()
        axes.plot([r["epoch"] for r in rows], [r[name] for r in rows], marker=".")
        axes.set(xlabel="epoch", ylabel=name)
        _scale(axes.xaxis)
        note = f"The last is {rows[-1][name]:.4g}."
        note = _text(note, _mark_restarts(axes, epochs))
        out += _section(title, _svg(axes, title) + note)
    return out


def _about(run: RecordedRun) -> str:
    about, first = run.about, run.about["starts"][0]
    counts = [str(n) for n, _ in itertools.groupby(s["ranks"] for s in about["starts"])]
    hosts = list(dict.fromkeys(about.get("hosts", ())))
    more = f" and {len(hosts) - 4} more" if hosts[4:] else ""
    texts = [
        f"Begun {time.strftime('%Y-%m-%d %H:%M', time.localtime(first['time']))} on "
        f"{', '.join(hosts[:4])}{more}; {' → '.join(counts)} ranks, grid "
        f"{' x '.join(map(str, about['grid']))}, {about['stages']} stages; torch "
        f"{about['torch']}."
    ]
    if run.rows:
        moved = with_unit(sum(row["bytes"]["total"] for row in run.rows), "B")
        seconds = with_unit(median(r["seconds"] for r in _settled(run.rows)), "s")
        texts.append(
            f"{len(run.rows):,} epochs, {seconds} in the median; {moved} received."
        )
    if run.trace is not None:
        texts.append(
            f"{run.trace.name} is a timeline, to be opened in ui.perfetto.dev."
        )
    return _text(*texts)

"""Renders the charts of a run as one self-contained HTML page."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from pyg_distcomm.partition.partition import PartitionReport, imbalance
from pyg_distcomm.watch import drawing
from pyg_distcomm.watch.drawing import as_bytes, as_count, as_number, as_seconds
from pyg_distcomm.watch.metrics import RESERVED, RecordedRun, Row, is_finite

MOST_RANKS = 24  # the most ranks that get a bar each
SCORES = ("test_accuracy", "test_acc", "accuracy", "acc", "val_accuracy", "val_acc")

_STYLE = """
:root{color-scheme:light dark;--bg:#f6f6f4;--card:#fff;--ink:#1b1d20;--soft:#585d63;
--line:#dcdde0;--c0:#0072b2;--c1:#e69f00;--c2:#009e73;--c3:#d55e00;--c4:#b25a93;
--c5:#56b4e9;--c6:#8a8f96;--c7:#c3b200;--on:#fff}
@media (prefers-color-scheme:dark){:root{--bg:#141619;--card:#1d2024;--ink:#e9eaec;
--soft:#a9aeb5;--line:#393e45;--c0:#4fa3dc;--c1:#f0b13c;--c2:#33c49a;--c3:#f58a4b;
--c4:#dd9cc4;--c5:#9ed5f5;--c6:#868c94;--c7:#e6da5c;--on:#101214}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);line-height:1.45;
font:15px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1180px;margin:0 auto;padding:28px 20px 48px}
h1{font-size:24px;margin:0 0 2px}h2{font-size:17px;margin:0 0 2px}
p{margin:0 0 8px}.soft,figcaption,.about{color:var(--soft)}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(118px,1fr));gap:12px;
margin:18px 0}
.tiles div,section{background:var(--card);border:1px solid var(--line);border-radius:10px}
.tiles div{padding:10px 14px}.tiles b{display:block;font-size:20px;overflow-wrap:anywhere}
.grid2{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(480px,100%),1fr));
gap:14px;align-items:start}
section{padding:16px 18px 12px;min-width:0}.wide{grid-column:1/-1}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(400px,100%),1fr));
gap:18px;align-items:center}.pair svg{margin:0 auto}
figure{margin:8px 0 6px}figcaption{font-size:13px;margin-top:4px}
svg{display:block;width:100%;height:auto}
svg text{fill:var(--soft);font-size:12px}svg text.name{fill:var(--ink)}
svg text.on{fill:var(--on);font-weight:600}svg text.off{fill:var(--ink)}
.grid{stroke:var(--line);fill:none}.mark{stroke:var(--soft);stroke-dasharray:4 3}
.line{fill:none;stroke-width:2.2}
.join{stroke:var(--c1);stroke-linecap:round}.disc{fill:var(--c0)}
.legend{font-size:13px;display:flex;flex-wrap:wrap;gap:3px 16px;margin:6px 0 0}
.key{white-space:nowrap}.key i{display:inline-block;width:11px;height:11px;
border-radius:2px;margin-right:6px;vertical-align:-1px}
table{border-collapse:collapse;font-size:13px;width:100%}
td,th{text-align:right;padding:2px 8px;border-bottom:1px solid var(--line)}
td:first-child,th:first-child{text-align:left}details{margin-top:6px;font-size:13px}
.scroll{overflow-x:auto}
@media print{section{break-inside:avoid}}
""" + "".join(
    f".s{k}{{fill:var(--c{k})}}.l{k}{{stroke:var(--c{k})}}.b{k}{{background:var(--c{k})}}"
    for k in range(drawing.SERIES)
)


def render(
    title: str,
    run: RecordedRun | None = None,
    partition: PartitionReport | None = None,
    rows: Sequence[Sequence[int]] = (),
    trace: Path | None = None,
) -> str:
    """Returns the HTML page of a run.

    Args:
        title: the name of the run.
        run: the run that `pdc.metrics` recorded.
        partition: the figures of the partition, if the run has none.
        rows: the rows that each part sends to each other, if the run has none.
        trace: a file of `pdc.trace`, if the run has none.
    """
    about: Mapping[str, Any] = {} if run is None else run.about
    if "partition" in about:
        partition = PartitionReport.from_dict(about["partition"])
        rows = about.get("rows", ())
    epochs = [] if run is None else run.rows
    repeated = [] if run is None else run.repeated
    trace = trace if run is None or run.trace is None else run.trace
    parts = _accuracy(epochs) if epochs else []
    parts += [] if run is None else _starts(run)
    if epochs:
        parts.append(_bytes(epochs, repeated))
        for name, figure in (("Waits by rank", _waits), ("Phases", _phases)):
            parts.append(_section(name, _figure_by_start(epochs, figure)))
        parts += _values(epochs)
    parts += [] if partition is None else _partition(partition, rows, about)
    parts += [] if trace is None else _timeline(trace)
    parts += _table(epochs) if epochs else []
    if not parts:
        parts = [_section("Nothing recorded yet", "<p>No epoch has ended.</p>")]
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)} · pyg_distcomm</title><style>{_STYLE}</style></head>"
    )
    return (
        f"{head}<body><main><h1>{escape(title)}</h1>{_about(about)}"
        f"{_tiles(about, epochs, partition, repeated)}"
        f'<div class="grid2">{"".join(parts)}</div></main></body></html>\n'
    )


def _section(title: str, body: str, intro: str = "", wide: bool = False) -> str:
    caption = f'<p class="soft">{escape(intro)}</p>' if intro else ""
    kind = ' class="wide"' if wide else ""
    return f"<section{kind}><h2>{escape(title)}</h2>{caption}{body}</section>"


def _figure(key: str, svg: str, caption: str = "") -> str:
    caption = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"{key}<figure>{svg}{caption}</figure>"


def _about(about: Mapping[str, Any]) -> str:
    if not about:
        return ""
    hosts = list(dict.fromkeys(about.get("hosts", ())))
    named = ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if hosts[4:] else "")
    started = time.strftime(
        "%Y-%m-%d %H:%M", time.localtime(about["starts"][0]["time"])
    )
    grid = " x ".join(map(str, about["grid"]))
    stages = f", {about['stages']} stages" if about["stages"] > 1 else ""
    text = f"begun {started} on {named}; grid {grid}{stages}; torch {about['torch']}"
    return f'<p class="about">{escape(text)}</p>'


def _tiles(
    about: Mapping[str, Any],
    epochs: Sequence[Row],
    partition: PartitionReport | None,
    repeated: Sequence[Row] = (),
) -> str:
    found: list[tuple[str, str]] = []
    starts = about.get("starts", ())
    if about:
        counts = [start["ranks"] for start in starts]
        changed = [str(n) for k, n in enumerate(counts) if not k or n != counts[k - 1]]
        found.append(("ranks", " → ".join(changed)))
    if partition is not None:
        found.append(("nodes", as_count(sum(partition.nodes))))
        found.append(("edges", as_count(sum(partition.edges))))
        share = partition.edge_cut / max(sum(partition.edges), 1)
        found.append(("edges cut", f"{share:.1%}"))
    if epochs:
        found.append(("epochs", f"{len(epochs):,}"))
        total = sum(row["bytes"]["total"] for row in [*epochs, *repeated])
        found.append(("bytes received", as_bytes(total)))
        settled = _without_first(epochs, epochs[-1].get("start"))
        of = "median epoch" + (", last start" if len(starts) > 1 else "")
        found.append((of, as_seconds(median(row["seconds"] for row in settled))))
        if score := _score(epochs):
            found.append((f"last {_spaced(score)}", as_number(epochs[-1][score])))
    if len(starts) > 1:
        found.append(("restarts", str(len(starts) - 1)))
        repeated_bytes = as_bytes(sum(row["bytes"]["total"] for row in repeated))
        found.append(("epochs repeated", f"{len(repeated)}, {repeated_bytes}"))
    tiles = (
        f'<div><span class="soft">{escape(n)}</span><b>{escape(v)}</b></div>'
        for n, v in found
    )
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _spaced(name: str) -> str:
    return name.replace("_", " ")


def _names(epochs: Sequence[Row]) -> list[str]:
    """Returns the names of the script's own values."""
    found = dict.fromkeys(
        name for row in epochs for name in row if name not in RESERVED
    )
    return [name for name in found if any(is_finite(row.get(name)) for row in epochs)]


def _score(epochs: Sequence[Row]) -> str | None:
    names = [n for n in _names(epochs) if is_finite(epochs[-1].get(n))]
    known = [name for name in SCORES if name in names]
    others = [
        n for n in names if any(w in n.lower() for w in ("acc", "f1", "auc", "mrr"))
    ]
    return next(iter([*known, *others]), None)


def _accuracy(epochs: Sequence[Row]) -> list[str]:
    score = _score(epochs)
    if score is None:
        return []
    moved, points = 0, []
    for row in epochs:
        moved += row["bytes"]["total"]
        if is_finite(row.get(score)):
            points.append((float(moved), float(row[score])))
    name = _spaced(score)
    names = "bytes received by all ranks so far", name
    svg = drawing.lines({name: points}, as_bytes, as_number, names)
    return [
        _section(
            f"{name.capitalize()} against bytes", _figure("", svg, "A dot is an epoch.")
        )
    ]


def _restarts(epochs: Sequence[Row]) -> list[tuple[float, str]]:
    """Returns the epochs at which the run was restarted, with a text for the tooltip."""
    return [
        (
            (last["epoch"] + row["epoch"]) / 2,
            f"restarted after epoch {last['epoch']}, on {len(row['by_rank']['bytes'])} ranks",
        )
        for last, row in itertools.pairwise(epochs)
        if last.get("start") != row.get("start")
    ]


def _bytes(epochs: Sequence[Row], repeated: Sequence[Row]) -> str:
    sums: dict[str, int] = {}
    for row in epochs:
        for op, count in row["bytes"].items():
            sums[op] = sums.get(op, 0) + count
    total = sums.pop("total", 0)
    if not total:
        return _section("Bytes by epoch and operation", "<p>Nothing was sent.</p>")
    order = sorted(sums, key=lambda op: -sums[op])
    large = [op for op in order if sums[op] > total / 100]
    kept = order if len(order) < 4 else large[: drawing.SERIES - 1]
    rest = order[len(kept) :]
    series = {op: [row["bytes"].get(op, 0) for row in epochs] for op in kept}
    if rest:
        series["others"] = [
            sum(row["bytes"].get(op, 0) for op in rest) for row in epochs
        ]
    xs = [row["epoch"] for row in epochs]
    names = "epoch", "bytes received, all ranks"
    marks = _restarts(epochs)
    svg, group = drawing.stacked(xs, series, as_bytes, names, marks)
    note = f"A bar is the mean of {group} epochs. " if group > 1 else ""
    top = f"{order[0]} is {sums[order[0]] / total:.0%} of {as_bytes(total)}."
    top += " A broken line is a restart." if marks else ""
    if repeated:
        more = as_bytes(sum(row["bytes"]["total"] for row in repeated))
        top += f" Epochs that were trained again, {more} more, are not drawn."
    key = drawing.legend(list(series))
    body = _figure(
        key, svg, f"{note}{top} A name is the operation and the axis of the grid."
    )
    lines = [
        [
            op,
            as_bytes(median(row["bytes"].get(op, 0) for row in epochs)),
            as_bytes(sums[op]),
        ]
        for op in order
    ]
    table = _html_table(["operation", "median epoch", "all epochs"], lines)
    body += f"<details><summary>Each operation</summary>{table}</details>"
    return _section("Bytes by epoch and operation", body)


def _without_first(epochs: Sequence[Row], start: Any) -> list[Row]:
    """Returns the epochs of a start, without the first, which compiles, if it has others."""
    rows = [row for row in epochs if row.get("start") == start]
    return rows[1:] or rows


def _by_rank(rows: Sequence[Row], what: str) -> list[float]:
    """Returns the median over epochs of a figure, by rank."""
    columns = zip(*(row["by_rank"][what] for row in rows), strict=True)
    return [median(column) for column in columns]


def _starts(run: RecordedRun) -> list[str]:
    """Returns a table of the starts of a run, if there were several."""
    starts, lines = run.about.get("starts", ()), []
    for k, start in enumerate(starts if len(starts) > 1 else ()):
        own_rows = [row for row in run.rows if row.get("start") == k]
        repeated_rows = [row for row in run.repeated if row.get("start") == k]
        span = (
            f"{own_rows[0]['epoch']} to {own_rows[-1]['epoch']}" if own_rows else "none"
        )
        waited = "–"
        if own_rows:
            waits = _by_rank(_without_first(run.rows, k), "waits")
            worst = max(range(len(waits)), key=waits.__getitem__)
            waited = f"rank {worst}, {as_seconds(waits[worst])}"
        seconds = [row["seconds"] for row in _without_first(run.rows, k)]
        lines.append(
            [
                time.strftime("%m-%d %H:%M:%S", time.localtime(start["time"])),
                str(start["ranks"]),
                f"{start['cut']:.1%}" if "cut" in start else "–",
                span,
                str(len(repeated_rows)),
                as_bytes(
                    sum(row["bytes"]["total"] for row in [*own_rows, *repeated_rows])
                ),
                as_seconds(median(seconds)) if seconds else "–",
                waited,
            ]
        )
    if not lines:
        return []
    head = ["begun", "ranks", "edges cut", "epochs", "repeated later", "bytes received"]
    table = _html_table([*head, "median epoch", "waits most, median"], lines)
    caption = "Seconds leave out the first epoch of a start, which loads and compiles."
    return [_section("Starts", table, caption, wide=True)]


def _largest_bars(
    labelled: list[tuple[str, Any]], size: Any
) -> tuple[list[tuple[str, Any]], str]:
    """Returns the largest bars if there are too many, in order of ranks, and a note."""
    if len(labelled) <= MOST_RANKS:
        return labelled, ""
    chosen = sorted(range(len(labelled)), key=lambda k: -size(labelled[k][1]))[
        :MOST_RANKS
    ]
    note = f"The {MOST_RANKS} largest of {len(labelled)} ranks. "
    return [labelled[k] for k in sorted(chosen)], note


def _waits(settled: Sequence[Row]) -> str:
    waits, seconds = _by_rank(settled, "waits"), _by_rank(settled, "seconds")
    rows: list[tuple[str, Any]] = [
        (
            f"rank {k}, waits {as_seconds(w)}",
            {"computing": max(s - w, 0.0), "waiting": w},
        )
        for k, (s, w) in enumerate(zip(seconds, waits, strict=True))
    ]
    shown, note = _largest_bars(rows, lambda parts: parts["waiting"])
    worst = imbalance([parts["computing"] for _, parts in rows])
    key = drawing.legend(["computing", "waiting"])
    caption = f"{note}{_epoch_range(settled)} The busiest rank computes "
    caption += f"{worst:.2f} times the mean."
    return _figure(key, drawing.bars(shown, as_seconds), caption)


def _figure_by_start(
    epochs: Sequence[Row], figure: Callable[[Sequence[Row]], str]
) -> str:
    """Returns the figure of the last start, and collapsed figures of earlier starts."""
    starts = list(dict.fromkeys(row.get("start") for row in epochs))
    body = figure(_without_first(epochs, starts[-1]))
    for start in starts[:-1]:
        settled = _without_first(epochs, start)
        ranks = len(settled[0]["by_rank"]["bytes"])
        body += _collapsed(f"An earlier start, on {ranks} ranks", figure(settled))
    return body


def _collapsed(title: str, body: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def _epoch_range(settled: Sequence[Row]) -> str:
    """Returns a text that names the epochs of medians."""
    first, last = settled[0]["epoch"], settled[-1]["epoch"]
    return f"Medians of epochs {first} to {last}."


def _phases(settled: Sequence[Row]) -> str:
    names = dict.fromkeys(name for row in settled for name in row["phases"])
    middle = {n: median(row["phases"].get(n, 0.0) for row in settled) for n in names}
    rows = [(name, {"seconds": value}) for name, value in middle.items()]
    own = len(middle) > 2
    note = f"{_epoch_range(settled)} Means of ranks. "
    note += (
        "Phases of the script hold both kinds; a loader's run beside training."
        if own
        else ""
    )
    return _figure("", drawing.bars(rows, as_seconds), note)


def _values(epochs: Sequence[Row]) -> list[str]:
    out, score = [], _score(epochs)
    for name in _names(epochs)[:6]:
        points = [
            (float(r["epoch"]), float(r[name]))
            for r in epochs
            if is_finite(r.get(name))
        ]
        if len(points) > 1 or name != score:
            names, marks = ("epoch", _spaced(name)), _restarts(epochs)
            svg = drawing.lines(
                {_spaced(name): points}, as_number, as_number, names, marks
            )
            caption = "A broken line is a restart." if marks else ""
            title = f"{_spaced(name).capitalize()} by epoch"
            out.append(_section(title, _figure("", svg, caption)))
    return out


def _partition(
    figures: PartitionReport,
    rows: Sequence[Sequence[int]],
    about: Mapping[str, Any],
) -> list[str]:
    body, last = _partition_of(figures, rows), about.get("partition")
    for start in reversed(about.get("starts", ())):
        if "partition" in start and start["partition"] != last:
            last = start["partition"]
            earlier = PartitionReport.from_dict(last)
            caption = f"An earlier start, on {start['ranks']} ranks"
            body += _collapsed(caption, _partition_of(earlier, start["rows"]))
    return [_section("Partition", body, wide=True)]


def _partition_of(figures: PartitionReport, rows: Sequence[Sequence[int]]) -> str:
    edges, nodes = sum(figures.edges), sum(figures.nodes)
    cut = figures.edge_cut / max(edges, 1)
    intro = (
        f"{nodes:,} nodes and {edges:,} edges on {figures.num_parts} ranks; "
        f"{figures.edge_cut:,} edges ({cut:.1%}) join nodes of two ranks, and an exchange "
        f"sends {figures.volume:,} rows ({figures.volume / max(nodes, 1):.3f} a node)."
    )
    body = ""
    columns = {
        "Nodes owned": figures.nodes,
        "Edges owned": figures.edges,
        "Rows received in an exchange": figures.halo_rows,
        "Rows sent in an exchange": figures.send_rows,
    }
    for name, counts in columns.items():
        labelled: list[tuple[str, Any]] = [
            (f"rank {k}", {name: n}) for k, n in enumerate(counts)
        ]
        shown, note = _largest_bars(labelled, lambda parts: next(iter(parts.values())))
        caption = f"{note}Most over mean: {imbalance(counts):.3f}."
        body += f"<div><b>{name}</b>{_figure('', drawing.bars(shown, as_count), caption)}</div>"
    pictures = ""
    if len(rows) > 1:
        caption = (
            "A disc is a rank, its area its nodes; a line is as wide as rows are many."
        )
        pictures += (
            f"<div>{_figure('', drawing.network(figures.nodes, rows), caption)}</div>"
        )
        caption = "Rows of one exchange, from rank to rank; a stronger colour is more."
        pictures += f"<div>{_figure('', drawing.matrix(rows, 'rows'), caption)}</div>"
        pictures = f'<div class="pair">{pictures}</div>'
    return (
        f'<p class="soft">{escape(intro)}</p>{pictures}<div class="pair">{body}</div>'
    )


def _timeline(path: Path) -> list[str]:
    blocks, about = drawing.read_blocks(path)
    if not blocks:
        return []
    svg, key = drawing.timeline(blocks)
    caption = (
        "Of each rank: layers and marked blocks, what it did, exchanges in flight."
    )
    if about["ranks"] > drawing.TIMELINE_RANKS:
        caption += f" The first {drawing.TIMELINE_RANKS} of {about['ranks']} ranks."
    caption += f" All of {path.name} can be opened in ui.perfetto.dev."
    return [_section("Timeline", _figure(key, svg, caption), wide=True)]


def _html_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>"
        for line in lines
    )
    return f'<div class="scroll"><table><tr>{top}</tr>{body}</table></div>'


def _table(epochs: Sequence[Row]) -> list[str]:
    names = _names(epochs)
    head = [
        "epoch",
        *map(_spaced, names),
        "seconds",
        "bytes",
        "waited, mean",
        "computing, most over mean",
    ]
    sampled = (
        epochs
        if len(epochs) <= 100
        else [*epochs[:: -(-len(epochs) // 100)], epochs[-1]]
    )
    lines = [
        [
            f"{row['epoch']}",
            *(as_number(row[n]) if is_finite(row.get(n)) else "–" for n in names),
            as_seconds(row["seconds"]),
            as_bytes(row["bytes"]["total"]),
            as_seconds(row["waits"]["mean"]),
            f"{row['imbalance']['computing']:.2f}",
        ]
        for row in sampled
    ]
    table = _html_table(head, lines)
    return [
        _section(
            "Figures",
            f"<details><summary>Each epoch</summary>{table}</details>",
            wide=True,
        )
    ]

"""Draws the charts of the reports from their tables.

    python benchmarks/report_charts.py            # writes benchmarks/reports/*.svg, in seconds

A chart has no figures of its own: it reads the table of a report that shows a trend.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

REPORTS = Path(__file__).parent / "reports"
BLUE, ORANGE, GREEN, PINK = "#0072B2 #D55E00 #009E73 #CC79A7".split()


def table(report: str, *columns: str) -> list[list[str]]:
    """Returns the cells of some columns of the report's first table that has them all."""
    lines = (REPORTS / f"{report}.md").read_text().split("\n")
    for at, line in enumerate(lines):
        head = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and set(columns) <= {*head}:
            rows = []
            for row in lines[at + 2 :]:
                if not row.startswith("|"):
                    break
                cells = [cell.strip() for cell in row.strip("|").split("|")]
                rows.append([cells[head.index(name)] for name in columns])
            return rows
    raise LookupError(f"{report}.md has no table with the columns {columns}")


def number(text: str) -> float:
    """Returns the first number of a cell."""
    return float(re.findall(r"[\d.]+", text.replace(",", ""))[0])


def memory(ax: Axes) -> None:
    """Memory of a rank, measured and as planned, against the number of ranks."""
    rows = table("memory", "ranks", "peak", "price")
    names = [ranks for ranks, _, _ in rows]
    at = range(len(rows))
    measured, planned = ([number(row[k]) for row in rows] for k in (1, 2))
    ax.bar([k - 0.2 for k in at], measured, 0.4, color=BLUE, label="measured")
    ax.bar([k + 0.2 for k in at], planned, 0.4, color="#bbbbbb", label="planned")
    ax.set_xticks([*at], names)
    ax.set_xlabel("ranks")
    ax.set_ylabel("MiB, the worst rank")
    ax.legend(frameon=False)


def late(ax: Axes) -> None:
    """Seconds of an epoch against the rate of a link, for exact and coded rows."""
    names = ("rate", "exact, s", "1 bit, now, s", "1 bit, late, s")
    rows = table("late", *names)[::-1]
    at = range(len(rows))
    for k, colour in ((1, BLUE), (2, ORANGE), (3, GREEN)):
        seconds = [number(row[k]) for row in rows]
        ax.plot(at, seconds, "o-", color=colour, label=names[k].removesuffix(", s"))
    ax.set_xticks([*at], ["no limit" if row[0] == "bare" else row[0] for row in rows])
    ax.set_yscale("log")
    ax.set_yticks([0.2, 0.5, 1, 2, 5], ["0.2", "0.5", "1", "2", "5"])
    ax.minorticks_off()
    ax.set_ylabel("seconds per epoch")
    ax.legend(frameon=False, loc="upper left")


def accuracy(ax: Axes) -> None:
    """Accuracy against the bytes that halos bring."""
    rows = [row for row in table("accuracy", "way", "test accuracy", "bytes") if row[2]]
    beside = {"full": (8, 4, "left"), "late": (8, -10, "left")}
    beside |= {"1 bit, now": (8, 6, "left"), "1 bit, late": (8, -12, "left")}
    beside |= {"VARCO, slope 1": (8, 2, "left"), "fixed 16": (8, -10, "left")}
    beside |= {"VARCO, slope 5": (-8, -4, "right")}
    for way, accuracy, share in rows:
        x, y = number(share), number(accuracy)
        ax.plot(x, y, "o", color=ORANGE if "bit" in way else BLUE)
        dx, dy, ha = beside.get(way, (8, -4, "left"))
        ax.annotate(way, (x, y), (dx, dy), textcoords="offset points", ha=ha)
    ax.set_xlim(-4, 112)
    ax.set_ylim(74.2, 77)
    ax.set_xlabel("bytes of halos, % of full")
    ax.set_ylabel("test accuracy, %")


def pipeline(ax: Axes) -> None:
    """Share of the edges between chunks against their number."""
    counts = "3 4 9 16 21 32".split()
    ends = [int(count) for count in counts]
    for row, colour in zip(
        table("pipeline", "chunks", *counts), (BLUE, ORANGE, GREEN), strict=True
    ):
        ax.plot(
            ends, [number(cell) for cell in row[1:]], "o-", color=colour, label=row[0]
        )
    ax.axhline(50, color="#999999", lw=1, ls="--")
    ax.text(32, 51, "a warning above", ha="right", va="bottom", color="#555555")
    ax.set_xticks(ends, counts)
    ax.set_ylim(0, 80)
    ax.set_xlabel("chunks")
    ax.set_ylabel("edges between chunks, %")
    ax.legend(frameon=False, loc="upper left")


def partitioned(ax: Axes) -> None:
    """Bytes of an epoch of minibatches, by where nodes are sampled and the bulk."""
    rows = table("partitioned", "c", "at", "bulk", "MiB sampling", "MiB features")
    rows = [row for row in rows if row[0] == "1"]
    names = [f"{at}, {bulk}" for _, at, bulk, _, _ in rows][::-1]
    drawn, rows_sent = ([number(row[k]) for row in rows][::-1] for k in (3, 4))
    ax.barh(names, drawn, color=ORANGE, label="sampling")
    ax.barh(names, rows_sent, left=drawn, color=BLUE, label="features")
    ax.set_xlabel("MiB per epoch, all of four ranks")
    ax.legend(frameon=False)


def codecs(ax: Axes) -> None:
    """How many times faster a coded message is, against the width of its rows."""
    rows = table("codecs", "plain/all, 16 / 100 / 602", "codec")
    colours = ("#999999", PINK, ORANGE, BLUE, GREEN)
    for (times, name), colour in zip(rows, colours, strict=True):
        values = [float(part) for part in times.split("/")]
        ax.plot((16, 100, 602), values, "o-", color=colour)
        ax.annotate(
            name, (602, values[-1]), (9, -4), textcoords="offset points", color=colour
        )
    _logarithmic(ax, "x", (16, 100, 602))
    _logarithmic(ax, "y", (1, 2, 5, 10))
    ax.set_xlabel("numbers in a row")
    ax.set_ylabel("times faster at 1 Gbit/s")


def full_graph(ax: Axes) -> None:
    """Bytes of each way, from CAGNET's to this package's, on two graphs."""
    rows = table("full_graph", "way", "MiB, Computers", "MiB, R-MAT")[::-1]
    names = [way.split(" (formula")[0].split(" (")[0] for way, _, _ in rows]
    at = range(len(rows))
    for k, name, colour in ((1, "Computers", BLUE), (2, "R-MAT", ORANGE)):
        values = [number(row[k]) for row in rows]
        ax.barh([y + 0.6 - 0.4 * k for y in at], values, 0.4, color=colour, label=name)
    ax.set_yticks([*at], names)
    ax.set_xscale("log")
    _logarithmic(ax, "x", (0.3, 1, 3, 10, 30))
    ax.set_xlabel("MiB that a rank receives per epoch")
    ax.legend(frameon=False, loc="lower right")


def strong_scaling(*axes: Axes) -> None:
    """Processor time of the slowest rank against ranks, by layer, on two graphs."""
    layers = "GCN SAGE GIN GAT GATv2".split()
    rows = table("strong_scaling", "graph", "ranks", *layers)
    for ax, graph in zip(axes, ("uniform", "local"), strict=True):
        mine = [row[1:] for row in rows if row[0] == graph]
        ranks = [int(row[0]) for row in mine]
        for k, colour in enumerate((BLUE, ORANGE, GREEN, PINK, "#999999"), 1):
            values = [number(row[k]) for row in mine]
            ax.loglog(ranks, values, "o-", color=colour, label=layers[k - 1])
        ax.set_title(f"{graph} graph", fontsize=11)
        ax.set_xlabel("ranks")
        _logarithmic(ax, "x", ranks)
        _logarithmic(ax, "y", (20, 50, 100, 200, 500))
    axes[0].set_ylabel("processor ms per epoch, slowest rank")
    axes[1].legend(frameon=False, loc="upper right", ncols=2)


def size(*axes: Axes) -> None:
    """What a graph costs against its nodes, and against ranks, with the exponents."""
    names = ("partition, processor s", "epoch, processor s", "MiB received", "MiB held")
    colours = (BLUE, ORANGE, GREEN, PINK)
    ticks = ((65536, 262144, 1048576, 4194304), (1, 2, 4, 8, 16))
    for ax, axis, marks in zip(
        axes, ("nodes", "ranks, 131,072 nodes"), ticks, strict=True
    ):
        *rows, exponents = table("size", axis, *names)
        for k, colour in enumerate(colours, 1):
            at = [(number(row[0]), number(row[k])) for row in rows]
            xs, ys = zip(*[(x, y) for x, y in at if y > 0], strict=True)
            slope = f"{names[k - 1]}: {number(exponents[k]):.2f}"
            ax.loglog(xs, ys, "o-", color=colour, label=slope)
        ax.set_xlabel(axis)
        _logarithmic(ax, "x", marks)
        _logarithmic(ax, "y", (0.1, 1, 10, 100, 1000))
        ax.set_ylim(0.08, 2e6)
        ax.legend(frameon=False, loc="upper left", title="exponents")


def _logarithmic(ax: Axes, which: str, ticks: Sequence[float]) -> None:
    """Marks these places of a logarithmic axis, "x" or "y", by numbers without powers."""
    ax.set(**{f"{which}scale": "log"})
    axis = ax.xaxis if which == "x" else ax.yaxis
    axis.set_ticks(ticks, [f"{tick:,}" for tick in ticks])
    axis.set_minor_locator(NullLocator())


CHARTS: dict[str, tuple[Callable[..., None], int, float]] = {
    "accuracy": (accuracy, 1, 3.2),
    "codecs": (codecs, 1, 3.4),
    "full_graph": (full_graph, 1, 4.4),
    "late": (late, 1, 3.2),
    "memory": (memory, 1, 3.2),
    "partitioned": (partitioned, 1, 3.2),
    "pipeline": (pipeline, 1, 3.2),
    "size": (size, 2, 4.4),
    "strong_scaling": (strong_scaling, 2, 3.8),
}


def main() -> None:
    """Writes all charts."""
    plt.rcParams |= {"svg.hashsalt": "pyg_distcomm", "svg.fonttype": "path"}
    plt.rcParams |= {"font.family": "DejaVu Sans", "font.size": 10.5}
    for name, (draw, panels, height) in CHARTS.items():
        wide = 7.5 if panels == 1 else 8.6
        figure, axes = plt.subplots(1, panels, figsize=(wide, height), squeeze=False)
        draw(*axes.flat)
        for ax in axes.flat:
            ax.spines[["top", "right"]].set_visible(False)
        figure.tight_layout()
        figure.savefig(REPORTS / f"{name}.svg", metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    main()

"""Draws the pictures of the documentation from what the package computes.

    python docs/drawings.py            # writes docs/img/*.svg, on one process, in seconds

Colours are of Okabe and Ito's palette, which colour-blind readers tell apart. Pictures are
WIDE inches wide, which the site shows at about 690 pixels: text of 10 points has 11 of them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
import numpy as np
import torch
from torch_geometric.datasets import KarateClub

import pyg_distcomm as pdc
from pyg_distcomm.comm.ledger import dense_words
from pyg_distcomm.datasets import load_dataset
from pyg_distcomm.halo.codecs import Plain, Quantise
from pyg_distcomm.partition.cutters import cut
from pyg_distcomm.pipeline.schedule import StageSchedule
from pyg_distcomm.sampling import BulkMatrix, BulkNodes, algebra

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

IMG = Path(__file__).parent / "img"
BLUE, ORANGE, GREEN, PINK, SKY, GREY = (
    "#0072B2 #D55E00 #009E73 #CC79A7 #56B4E9 #999999".split()
)
RANKS = (BLUE, ORANGE, GREEN, PINK)
WIDE = 8.6


def _places(edge_index: torch.Tensor, n: int) -> np.ndarray:
    """Returns a place [n, 2] for each node: a spring layout from a fixed start."""
    place = torch.randn(n, 2, generator=torch.Generator().manual_seed(3)).numpy()
    linked = np.zeros((n, n))
    linked[tuple(edge_index.numpy())] = 1
    for step in range(300):
        away = place[:, None] - place[None]
        far = np.linalg.norm(away, axis=-1) + 1e-3
        push = (away / far[..., None] ** 2).sum(1) * 0.08
        pull = (linked[..., None] * away * far[..., None]).sum(1) * 0.25
        move = push - pull
        size = np.linalg.norm(move, axis=1, keepdims=True) + 1e-9
        place = place + move / size * np.minimum(size, 0.1 * (1 - step / 300))
    return place


def draw_halo() -> Figure:
    """Draws a small graph cut in two, and what each rank receives of the other."""
    data = KarateClub()[0]
    owner = cut(data.edge_index, 34, 2, "ldg", seed=0)
    owner = getattr(owner, "owner", owner)
    src, dst = data.edge_index
    place = _places(data.edge_index, 34)
    figure, axes = plt.subplots(1, 3, figsize=(WIDE, 2.7))
    titles = ["the graph: 34 nodes", "rank 0", "rank 1"]
    for k, (ax, title) in enumerate(zip(axes, titles, strict=True)):
        rank = k - 1
        mine = owner == rank if k else torch.ones(34, dtype=torch.bool)
        keep = mine[dst]
        ghosts = torch.zeros(34, dtype=torch.bool)
        ghosts[src[keep]] = True
        ghosts &= ~mine
        for a, b in zip(src[keep].tolist(), dst[keep].tolist(), strict=True):
            cross = owner[a] != owner[b]
            ax.plot(
                *place[[a, b]].T,
                lw=1.1 if cross else 0.5,
                color="#333333" if cross else "#bbbbbb",
                zorder=1,
            )
        for which, face in ((0, BLUE), (1, ORANGE)):
            own = (owner == which) & mine
            ax.scatter(*place[own].T, s=52, color=face, zorder=3, marker="os"[which])
            ghost = (owner == which) & ghosts
            ax.scatter(
                *place[ghost].T,
                s=52,
                facecolor="white",
                edgecolor=face,
                lw=1.6,
                zorder=3,
                marker="os"[which],
            )
        if k:
            title = f"{title}: {int(mine.sum())} own nodes, {int(ghosts.sum())} ghosts"
        ax.set_title(title, fontsize=10)
        ax.set_xlim(place[:, 0].min() - 0.2, place[:, 0].max() + 0.2)
        ax.set_ylim(place[:, 1].min() - 0.2, place[:, 1].max() + 0.2)
        ax.set_aspect("equal")
        ax.axis("off")
    figure.text(
        0.5,
        0.02,
        "filled: rows that a rank owns.   hollow: ghosts, rows that it receives.\n"
        "dark: edges between ranks.",
        ha="center",
        fontsize=10,
    )
    figure.subplots_adjust(left=0.01, right=0.99, top=0.9, bottom=0.14, wspace=0.05)
    return figure


def draw_how() -> Figure:
    """Draws one epoch on two ranks: what each computes, and what travels between them."""
    figure, ax = plt.subplots(figsize=(WIDE, 5.2))
    steps = [
        ("own rows of x, own edges", "own rows of x, own edges", "once: partition"),
        ("receives its ghosts", "receives its ghosts", "each layer: rows of ghosts"),
        ("layer on its own nodes", "layer on its own nodes", ""),
        ("loss of its own nodes", "loss of its own nodes", "a few numbers: sums"),
        ("backward pass", "backward pass", "each layer: gradients\nof ghosts"),
        ("optimizer steps", "optimizer steps", "gradients of weights: sum"),
    ]
    for k, (left, right, between) in enumerate(steps):
        y = -k
        for x, text, colour in ((0, left, BLUE), (7.2, right, ORANGE)):
            box = Rectangle((x, y - 0.34), 2.8, 0.68, fc="white", ec=colour, lw=1.8)
            ax.add_patch(box)
            ax.text(x + 1.4, y, text, ha="center", va="center", fontsize=10.5)
            if k:
                tip = dict(arrowstyle="->", color=colour, lw=1.3)
                ends = (x + 1.4, y + 0.34), (x + 1.4, y + 0.66)
                ax.annotate("", *ends, arrowprops=tip)
        if between:
            way = dict(arrowstyle="<->" if k else "-", color="#333333", lw=1.2)
            ax.annotate("", (2.85, y), (7.15, y), arrowprops=way)
            ax.text(5, y + 0.08, between, ha="center", va="bottom", fontsize=10.5)
    ax.text(1.4, 0.55, "rank 0", ha="center", fontsize=12, color=BLUE, weight="bold")
    ax.text(8.6, 0.55, "rank 1", ha="center", fontsize=12, color=ORANGE, weight="bold")
    ax.set_xlim(-0.1, 10.1)
    ax.set_ylim(-5.5, 0.9)
    ax.axis("off")
    figure.subplots_adjust(left=0, right=1, top=1, bottom=0)
    return figure


def _blocks(ax: Axes, r: int, s: int, p: int, title: str) -> None:
    """Draws the sparse matrix of a grid, its blocks, and the dense matrix beside it."""
    n = 4.0
    for i in range(r):
        for j in range(s):
            at = (j * n / s, (r - 1 - i) * n / r)
            here = i == 0 and j == 0
            ax.add_patch(
                Rectangle(
                    at,
                    n / s,
                    n / r,
                    fc="#dce9f5" if here else "white",
                    ec="#333333",
                    lw=1,
                )
            )
            ranks = [(i * s + j) * p + k for k in range(p)]
            name = f"rank {ranks[0]}" if p == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
            ax.text(
                at[0] + n / s / 2,
                at[1] + n / r / 2,
                name,
                ha="center",
                va="center",
                fontsize=10,
            )
    ax.add_patch(Rectangle((4.6, 0), 1.6, n, fc="white", ec="#333333", lw=1))
    total = r * s * p
    for rank in range(total):  # rows are owned in equal runs, by process column for x
        i, j, k = rank // (s * p), rank // p % s, rank % p
        row = ((j * r + i) * p + k) / total * n
        first = (i, j, k) == (0, 0, 0)
        comes = j == 0 and not first and (i > 0 or k > 0)
        face = BLUE if first else SKY if comes else "white"
        ax.add_patch(
            Rectangle(
                (4.6, n - row - n / total),
                1.6,
                n / total,
                fc=face,
                ec="#888888",
                lw=0.6,
            )
        )
    ax.text(2, -0.35, "A, which stays", ha="center", va="top", fontsize=10)
    ax.text(5.4, -0.35, "X, by rows", ha="center", va="top", fontsize=10)
    ax.set_title(f"{title}\n{dense_words(1, 1, (r, s, p)):.3f} n f words", fontsize=10)
    ax.set_xlim(-0.2, 6.5)
    ax.set_ylim(-0.9, 4.1)
    ax.set_aspect("equal")
    ax.axis("off")


def draw_grids() -> Figure:
    """Draws which block of A a rank has on three grids of eight ranks."""
    figure, axes = plt.subplots(1, 3, figsize=(WIDE, 3.2))
    _blocks(axes[0], 8, 1, 1, "1D: grid 8 x 1 x 1")
    _blocks(axes[1], 4, 2, 1, "2D: grid 4 x 2 x 1")
    _blocks(axes[2], 2, 2, 2, "3D: grid 2 x 2 x 2")
    figure.text(
        0.5,
        0.02,
        "shaded block: rank 0's.   dark rows of X: rank 0's own.\n"
        "light rows: those that its block multiplies and other ranks own.",
        ha="center",
        fontsize=10,
    )
    figure.subplots_adjust(left=0.01, right=0.99, top=0.85, bottom=0.14, wspace=0.05)
    return figure


def draw_bulk() -> Figure:
    """Draws one hop of a bulk of three minibatches as matrices, from the algebra itself."""
    data = KarateClub()[0]
    source, target = data.edge_index
    a = BulkMatrix.from_edges(target, source, None, (34, 34))
    seeds = BulkNodes.of([torch.tensor(part) for part in ([2, 8], [13, 19], [30, 32])])
    q = BulkMatrix.row_per_node(seeds, 34)
    p = algebra.product(q, a)
    drawn = algebra.sample(p, 3, keys=torch.arange(6) * 7919 + 11).matrix
    parts = [
        (q, "Q: the seeds"),
        (a, "A: in-edges of each node"),
        (p, "P = Q A: candidates"),
        (drawn, "3 drawn of each row"),
    ]
    figure, axes = plt.subplots(2, 2, figsize=(WIDE, 5.6))
    for ax, (matrix, title) in zip(axes.flat, parts, strict=True):
        dense = matrix.dense() != 0
        row, col = dense.nonzero().T.numpy()
        small = len(dense) == 6
        colour = [RANKS[x // 2] for x in row] if small else "#555555"
        ax.scatter(col, row, c=colour, s=16 if small else 5, marker="s")
        ax.set_title(title, fontsize=11)
        ax.set_xlim(-1, 34)
        ax.set_ylim((5.6, -0.6) if small else (34, -1))
        ax.set_xticks([0, 33])
        ax.set_yticks(
            [0.5, 2.5, 4.5], ["batch 0", "batch 1", "batch 2"]
        ) if small else ax.set_yticks([0, 33])
        ax.tick_params(labelsize=10)
        for border in (1.5, 3.5) if small else ():
            ax.axhline(border, color="#bbbbbb", lw=0.8)
        ax.set_xlabel("node", fontsize=10)
    figure.tight_layout()
    return figure


def draw_stages() -> Figure:
    """Draws when each of three stages computes which of six chunks."""
    schedule = StageSchedule(3, 6)
    figure, ax = plt.subplots(figsize=(WIDE, 2.9))
    colours = {"forward": SKY, "backward": "#E69F00"}
    for span in schedule.spans(1.0, 2.0):
        face = colours["forward" if span.kind == "forward" else "backward"]
        size = span.end - span.begin, 0.8
        at = span.begin, -span.stage - 0.4
        ax.add_patch(Rectangle(at, *size, fc=face, ec="white"))
        middle = (span.begin + span.end) / 2
        ax.text(middle, -span.stage, span.slot, ha="center", va="center", fontsize=10)
    ax.set_xlim(0, max(span.end for span in schedule.spans(1.0, 2.0)))
    ax.set_ylim(-2.5, 0.5)
    ax.set_yticks([0, -1, -2], ["stage 0", "stage 1", "stage 2"], fontsize=10)
    ax.set_xticks([])
    for side in ax.spines.values():
        side.set_visible(False)
    ax.set_xlabel(
        "time in one epoch; numbers are chunks\n"
        f"white: idle for {schedule.bubble:.0%} of the turns, (S - 1) / (M + S - 1)",
        fontsize=10,
    )
    names = ("forward", "backward (twice as long)")
    boxes = [Rectangle((0, 0), 1, 1, fc=colour) for colour in colours.values()]
    figure.legend(boxes, names, loc="upper center", ncols=2, frameon=False, fontsize=10)
    figure.tight_layout(rect=(0, 0, 1, 0.92))
    return figure


def draw_late() -> Figure:
    """Draws two epochs of exchanges, prompt and late, and the bytes of a row on the wire."""
    figure, (ax, sizes) = plt.subplots(1, 2, figsize=(WIDE, 3.1), width_ratios=[2, 1])
    rows = [
        ("now", 1.0, False),
        ("one bit, now", 0.1, False),
        ("one bit, an\nepoch late", 0.1, True),
    ]
    for line, (_, length, late) in enumerate(rows):
        y, t = -line, 0.0
        for _ in range(3):
            for _ in range(2):
                if not late:
                    ax.add_patch(
                        Rectangle((t, y - 0.3), length, 0.6, fc=ORANGE, ec="white")
                    )
                    t += length
                else:
                    ax.add_patch(
                        Rectangle((t, y - 0.3), length, 0.16, fc=ORANGE, ec="none")
                    )
                ax.add_patch(
                    Rectangle(
                        (t, y - (0.1 if late else 0.3)),
                        0.5,
                        0.4 if late else 0.6,
                        fc=SKY,
                        ec="white",
                    )
                )
                t += 0.5
            ax.plot([t, t], [y - 0.38, y + 0.38], color="#333333", lw=1)
    ax.set_yticks([0, -1, -2], [name for name, _, _ in rows], fontsize=10)
    ax.set_xlim(0, 9.2)
    ax.set_ylim(-2.6, 1.2)
    ax.set_xticks([])
    ax.set_xlabel(
        "three epochs of two layers; lines end epochs\n(not to scale)", fontsize=10
    )
    boxes = [Rectangle((0, 0), 1, 1, fc=face) for face in (SKY, ORANGE)]
    names = ("computing", "rows on the wire")
    ax.legend(boxes, names, loc="upper center", ncols=2, frameon=False, fontsize=10)
    codecs = [
        ("float32", Plain()),
        *((f"{b} bits" if b > 1 else "1 bit", Quantise(b)) for b in (8, 4, 2, 1)),
    ]
    length = [codec.wire_bytes(1, 128) for _, codec in codecs]
    sizes.barh([name for name, _ in codecs][::-1], length[::-1], color=ORANGE)
    for k, bytes_ in enumerate(length[::-1]):
        sizes.text(bytes_ + 8, k, f"{bytes_}", va="center", fontsize=10)
    sizes.set_xlim(0, 680)
    sizes.set_xlabel("bytes of a row\nof 128 numbers", fontsize=10)
    sizes.tick_params(labelsize=10)
    for one in (ax, sizes):
        for side in ("top", "right"):
            one.spines[side].set_visible(False)
    ax.spines["left"].set_visible(False)
    figure.tight_layout()
    return figure


def draw_prices() -> Figure:
    """Draws bytes of an epoch for every grid of eight ranks, before anything is sent."""
    best, whole = (
        {
            plan.grid: plan.bytes
            for plan in pdc.plan(
                load_dataset("digits"), widths=[64, 64, 10], ranks=8, halo=halo
            )
        }
        for halo in ("auto", "blocks")
    )
    grids = sorted(best, key=lambda grid: best[grid])
    figure, ax = plt.subplots(figsize=(WIDE, 3.3))
    at = np.arange(len(grids))
    if whole:
        ax.bar(
            at + 0.2,
            [whole.get(g, 0) / 1024 for g in grids],
            0.4,
            color=GREY,
            label="whole blocks",
        )
    ax.bar(
        at - 0.2 if whole else at,
        [best[g] / 1024 for g in grids],
        0.4,
        color=BLUE,
        label="rows that are needed",
    )
    ax.set_xticks(at, [" x ".join(map(str, grid)) for grid in grids], fontsize=10)
    ax.set_ylabel("KiB per epoch, busiest rank", fontsize=10)
    ax.tick_params(labelsize=10)
    ax.legend(frameon=False, fontsize=10, loc="upper left")
    ax.set_ylim(0, ax.get_ylim()[1] * 1.2)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    figure.tight_layout()
    return figure


DRAWINGS = {
    "how": draw_how,
    "halo": draw_halo,
    "grids": draw_grids,
    "bulk": draw_bulk,
    "stages": draw_stages,
    "late": draw_late,
    "prices": draw_prices,
}


def main() -> None:
    """Writes the pictures that are named, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", help=" ".join(DRAWINGS))
    parser.add_argument("--folder", type=Path, default=IMG)
    parser.add_argument("--format", default="svg")
    given = parser.parse_args()
    plt.rcParams["svg.hashsalt"] = "pyg_distcomm"
    plt.rcParams["font.family"] = "DejaVu Sans"
    plt.rcParams["svg.fonttype"] = "path"
    for name in given.names or DRAWINGS:
        figure = DRAWINGS[name]()
        metadata = {"Date": None} if given.format == "svg" else None
        figure.savefig(
            given.folder / f"{name}.{given.format}", metadata=metadata, dpi=110
        )
        plt.close(figure)


if __name__ == "__main__":
    main()

"""Bytes and seconds of an epoch against the number of ranks: on paper, and checked.

    python benchmarks/scaling.py [--most 65536] [--check] [--write benchmarks/reports]

Prints what `pdc.plan` predicts for two graphs known by their size, from 64 ranks on, by
algorithm; strong and weak scaling in bytes from 1 rank on; a deep model, also in stages;
and, with --check, trains a small R-MAT graph on 8 ranks of this machine and compares the
ledger with the plan of that graph (equal, rank by rank) and with the closed form (its mean).
"""

from __future__ import annotations

import argparse
import itertools
import platform
from pathlib import Path

import torch
import torch.nn.functional as F
from torch_geometric.data import Data

import pyg_distcomm as pdc
from pyg_distcomm.cli import bench
from pyg_distcomm.comm.ledger import format_table
from pyg_distcomm.nn import DistGCNConv
from pyg_distcomm.plan.plans import show_bytes

# nodes, directed edges, widths
SHAPES = {
    "papers100M-like": (111_000_000, 1_600_000_000, (128, 256, 256, 172)),
    "Protein-like": (8_700_000, 1_300_000_000, (128, 16, 256)),
}
LAW = "rmat"
# A100-like: products bound by 1.5 TB/s of memory, 200 Gbit/s and 5 us to other ranks
MACHINE = pdc.Machine(
    latency=5e-6,
    bandwidth=22e9,
    spmm=2e11,
    gemm=1e13,
    stream=1.2e12,
    overhead=2e-4,
    memory=80 * 2**30,
    source="assumed: one accelerator of 80 GiB a rank, 200 Gbit/s each",
)
LINES = {  # of the plot: colour, style, width; what comes later is drawn on top
    "CAGNET 1d": ("tab:gray", "--", 1.2),
    "CAGNET 2d": ("tab:gray", ":", 1.8),
    "best": ("gold", "-", 7),
    "1d": ("tab:red", "-", 1.5),
    "1.5d": ("tab:purple", "-", 3),
    "2d": ("tab:blue", "-", 1.2),
    "3d": ("tab:green", "-", 1.5),
    "feature": ("tab:brown", "-", 1.5),
}
SMALL = (14, 8, (64, 16, 32))  # scale, edges drawn a node, widths


def cagnet(
    name: str, n: int, m: int, widths: tuple[int, ...], size: int
) -> tuple[float, float]:
    """Returns bytes and seconds of CAGNET's own 1D or 2D algorithm, by its formulas.

    (A X) W forward and A G backward in every layer, nothing kept, whole blocks; 2D is
    SUMMA, which sends the matrix too, 3 words a nonzero ([Tripathy20] Sec. 4).
    """
    words = 0.0
    for a, b in itertools.pairwise(widths):
        if name == "1d":
            words += n * (a + b) * (1 - 1 / size)
        else:
            side = size**0.5
            words += (2 * 3 * m + 3 * n * (a + b)) / side + n * a / size + a * b
    nonzeros = (m + n) / size
    products = (w for a, b in itertools.pairwise(widths) for w in (a, b))
    work = sum(float(MACHINE.multiply_seconds(nonzeros, w)) for w in products)
    return 4 * words, 4 * words / MACHINE.bandwidth + work


def best_by_name(plans: pdc.Plans) -> dict[str, pdc.Plan]:
    """Returns the best plan of each algorithm, and of all."""
    found: dict[str, pdc.Plan] = {"best": plans.best} if len(plans) else {}
    for one in plans:
        found.setdefault(one.algorithm, one)
        if one.grid[2] == 1 and one.grid[1] > 1:
            found.setdefault("1.5d", one)
    return found


def on_paper(shape: str, most: int) -> dict[str, list[tuple]]:
    """Returns (ranks, bytes, seconds, memory, grid) by algorithm."""
    n, m, widths = SHAPES[shape]
    lines: dict[str, list[tuple]] = {}
    size = 64
    while size <= most:
        graph = pdc.RandomGraph(n, m, LAW)
        plans = pdc.plan(graph, widths, size, machine=MACHINE)
        for name, one in best_by_name(plans).items():
            row = (size, one.bytes, one.seconds, one.memory, one.grid)
            lines.setdefault(name, []).append(row)
        for name in ("1d", "2d"):
            if name == "1d" or size**0.5 == int(size**0.5):
                bytes_, seconds = cagnet(name, n, m, widths, size)
                row = (size, bytes_, seconds, None, None)
                lines.setdefault(f"CAGNET {name}", []).append(row)
        size *= 4
    return lines


def table(lines: dict[str, list[tuple]]) -> str:
    """Formats the lines of one shape."""
    rows = [
        (
            size,
            name,
            "x".join(map(str, grid)) if grid else "",
            show_bytes(bytes_),
            f"{seconds * 1e3:,.1f}",
            show_bytes(memory) if memory else "",
        )
        for name, every in lines.items()
        for size, bytes_, seconds, memory, grid in every
        if name != "grid"
    ]
    head = (
        "ranks",
        "algorithm",
        "grid",
        "bytes a rank",
        "ms an epoch",
        "memory a rank",
    )
    return format_table(head, sorted(rows, key=lambda row: row[0]))


def scaling(weak: bool) -> str:
    """Formats bytes a rank and in all for 1 to 1,024 ranks of the Protein-like shape."""
    n, m, widths = SHAPES["Protein-like"]
    rows = []
    for size in (2**k for k in range(11)):
        share = size / 64 if weak else 1
        graph = pdc.RandomGraph(round(n * share), round(m * share), LAW)
        found = best_by_name(
            pdc.plan(graph, widths, size, machine=MACHINE, memory=1e15)
        )
        cells = []
        for name in ("1d", "2d", "3d", "feature", "best"):
            cells.append(show_bytes(found[name].bytes) if name in found else "")
        best = found["best"]
        naive = cagnet("1d", graph.nodes, graph.edges, widths, size)[0]
        grid = "x".join(map(str, best.grid))
        rows.append(
            (size, show_bytes(naive), *cells, grid, show_bytes(best.total_bytes))
        )
    head = (
        "ranks",
        "CAGNET 1d",
        "1d",
        "2d",
        "3d",
        "feature",
        "best",
        "its grid",
        "all ranks",
    )
    return format_table(head, rows)


def deep(layers: int = 32) -> str:
    """Formats a deep GCN on the papers100M-like graph: grids, 1D, stages, and links."""
    n, m, _ = SHAPES["papers100M-like"]
    rows: list[tuple] = []
    for size in (32, 64, 128, 256, 512, 1024):
        graph = pdc.RandomGraph(n, m, LAW)
        plans = pdc.plan(
            graph, [128] * (layers + 1), size, machine=MACHINE, pipeline=True
        )
        found = {"best grid": next((p for p in plans if p.exact), None)}
        found["1d"] = next((p for p in plans if p.algorithm == "1d"), None)
        found["stages"] = next((p for p in plans if p.stages > 1), None)
        for name, one in found.items():
            if one is None:
                rows.append((size, name, "needs more memory", "", "", ""))
                continue
            spent = show_bytes(one.bytes), show_bytes(one.total_bytes)
            rows.append((size, name, one.sides, *spent, f"{one.seconds * 1e3:,.1f}"))
    head = ("ranks", "plan", "grid", "bytes a rank", "all ranks", "ms an epoch")
    return format_table(head, rows)


# checked by the ledger ---------------------------------------------------------------


def small_graph() -> Data:
    """Returns the R-MAT graph that is trained."""
    scale, degree, widths = SMALL
    row, col, n = bench.rmat(scale, degree)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, widths[0], generator=generator)
    y = torch.randint(0, widths[-1], (n,), generator=generator)
    return Data(x=x, y=y, edge_index=torch.stack([row, col]))


class GCN(torch.nn.Module):
    """As many layers as there are pairs of widths."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        pairs = itertools.pairwise(widths)
        self.convs = torch.nn.ModuleList(DistGCNConv(a, b) for a, b in pairs)

    def forward(self, x, edge_index):
        for conv in self.convs[:-1]:
            x = conv(x, edge_index).relu()
        return self.convs[-1](x, edge_index)


def counted(grids: list[tuple[int, int, int]]) -> list[int]:
    """Runs on a rank: the bytes of a late epoch on each grid."""
    data, found = small_graph(), []
    for grid in grids:
        mesh = pdc.init(grid=grid)
        share = pdc.partition(data, mesh, "random")
        edges = share.edge_index.with_halo("rows")
        torch.manual_seed(0)
        model = pdc.replicate(GCN(SMALL[2]), mesh)
        for _ in range(3):
            mesh.ledger.reset()
            F.cross_entropy(model(share.x, edges), share.y).backward()
        found.append(mesh.ledger.bytes())
    return found


def check(size: int = 8) -> str:
    """Compares ledger, plan and closed form on every grid."""
    data, widths = small_graph(), SMALL[2]
    plans = pdc.plan(data, widths, size, partition="random")
    law = pdc.plan(pdc.RandomGraph(data.num_nodes, data.num_edges, LAW), widths, size)
    grids = sorted({one.grid for one in plans}, reverse=True)
    every = pdc.launch(counted, size, grids, threads=1)
    rows = []
    for k, grid in enumerate(grids):
        # over a fiber alone nothing but it travels
        one = plans.of(grid, halo="auto" if grid[:2] == (1, 1) else "rows")
        ledger = tuple(found[k] for found in every)
        mean = law.of(grid, halo="rows").total_bytes
        equal = "yes" if ledger == one.bytes_by_rank else "NO"
        name = "x".join(map(str, grid))
        off = f"{mean / max(sum(ledger), 1) - 1:+.2%}"
        rows.append((name, sum(ledger), one.total_bytes, equal, mean, off))
    head = (
        "grid",
        "ledger, all ranks",
        "plan",
        "equal, rank by rank",
        "closed form",
        "off",
    )
    return format_table(head, rows)


def draw(every: dict[str, dict[str, list[tuple]]], path: Path) -> None:
    """Plots milliseconds and bytes against ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(every), figsize=(10, 7), sharex=True)
    for column, (shape, lines) in zip(axes.T, every.items(), strict=True):
        for name, (color, style, wide) in LINES.items():
            for axis, field, unit in zip(column, (2, 1), (1e3, 2**-20), strict=True):
                values = [row[field] * unit for row in lines.get(name, ())]
                sizes = [row[0] for row in lines.get(name, ())]
                look = {"color": color, "ls": style, "lw": wide, "marker": "."}
                axis.loglog(sizes, values, label=name, **look)
        column[0].set_title(shape)
        column[1].set_xlabel("ranks")
    axes[0, 0].set_ylabel("milliseconds an epoch")
    axes[1, 0].set_ylabel("MiB a rank receives")
    axes[0, 0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=72)


def main() -> None:
    """Prints all tables, and writes them with --write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--most", type=int, default=65536)
    parser.add_argument("--check", action="store_true", help="train on 8 ranks")
    parser.add_argument("--write", type=Path, help="folder of the report and its plot")
    args = parser.parse_args()
    every = {shape: on_paper(shape, args.most) for shape in SHAPES}
    parts = []
    for shape, lines in every.items():
        n, m, widths = SHAPES[shape]
        about = f"{n:,} nodes, {m:,} edges, GCN {'-'.join(map(str, widths))}"
        parts.append(f"## {shape}: {about}\n\n```\n{table(lines)}\n```")
    strong, weak = scaling(False), scaling(True)
    parts.append(
        f"## Strong scaling in bytes a rank, Protein-like\n\n```\n{strong}\n```"
    )
    parts.append(
        "## Weak scaling in bytes a rank, 1/64 of the Protein-like graph a rank\n\n"
        f"```\n{weak}\n```"
    )
    n, m, _ = SHAPES["papers100M-like"]
    parts.append(
        f"## 32 layers of width 128 on {n:,} nodes, {m:,} edges: grids, and stages x grid\n\n"
        "Stages are those of `Pipeline`, four chunks for each: they read history, so they do\n"
        f"not train exactly as the grids do.\n\n```\n{deep()}\n```"
    )
    if args.check:
        scale, degree, widths = SMALL
        parts.append(
            f"## Checked on 8 ranks: R-MAT, 2^{scale} nodes, {2 * degree} edges a node, "
            f"GCN {'-'.join(map(str, widths))}, a late epoch\n\n```\n{check()}\n```"
        )
    text = "\n\n".join(parts)
    print(text)
    if args.write:
        draw(every, args.write / "scaling.png")
        flags = f"--most {args.most}{' --check' if args.check else ''}"
        versions = f"torch {torch.__version__}, Python {platform.python_version()}"
        head = INTRODUCTION.format(flags=flags, versions=versions, machine=MACHINE)
        (args.write / "scaling.md").write_text(f"{head}\n\n{text}\n")


INTRODUCTION = """# An epoch against the number of ranks, on paper

`python benchmarks/scaling.py {flags} --write benchmarks/reports`; {versions}.

Nothing here was timed. Bytes come from `pdc.plan` for a `RandomGraph`: R-MAT degrees, nodes
dealt to ranks at random, features that do not change, gradients and the loss included; they
are means over ranks, received by one. Seconds follow the machine below, and say as much as it
does; every rank has the same share of the edges. `CAGNET` lines are the closed formulas of its
1D and 2D (SUMMA) algorithms in its own order of products, with whole blocks and nothing kept.
A partition that knows the graph would lower the lines of 1d and 1.5d, and a vertex cover (what
products of a real graph exchange by default) all but `feature`; neither is assumed: rows
travel. Plans that need more than 80 GiB a rank are left out. `best` is the fastest of all
grids r x s x p.

```
{machine}
```

![time and bytes](scaling.png)"""


if __name__ == "__main__":
    main()

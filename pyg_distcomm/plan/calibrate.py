"""calibrate: measures what a run computes with and talks over."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_distcomm import kernels
from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.axis import let_go
from pyg_distcomm.comm.ledger import Ledger
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.comm.process_grid import new_axis_group
from pyg_distcomm.graph.partitioning import partition
from pyg_distcomm.halo.codec import RngKey
from pyg_distcomm.halo.codecs import Plain, fresh_state
from pyg_distcomm.nn.gcn_conv import DistGCNConv
from pyg_distcomm.nn.replicate import replicate
from pyg_distcomm.plan.codecs import Asked, codings
from pyg_distcomm.plan.cost import sum_messages
from pyg_distcomm.plan.machine import Line, Machine, Rate, Wire, lines_of
from pyg_distcomm.plan.timing import LapTimer, Name, Work, once, slowest, timed

SMALL, LEAST, MOST = 8, 1 << 16, 1 << 26  # bytes sent to a rank; by a rank, all told
FEW = 5  # times that such a row is timed
LONG = 0.1  # seconds that exchanges of a size are timed, pauses between them
LONGEST = 0.15  # seconds of one exchange: larger ones are as fast
PAUSE = 0.03  # seconds before each exchange
BETWEEN = 2  # times that what computes for less than LONG is timed between lines, too
PROBES = 4  # exchanges of next to nothing, each time
WIDE = 256  # the other side of a dense product, and rows that are copied
AXES = ("world", "row", "col", "fiber", "data")
SHALLOW, DEEP = 1, 5  # layers of the models whose overheads are timed


def calibrate(
    mesh: Mesh,
    widths: Sequence[int] = (4, 16, 64, 256),
    *,
    rows: int = 1 << 14,
    degree: int = 16,
    repeats: int = 7,
    codecs: Sequence[Asked] = (),
) -> Machine:
    """Measures latency, bandwidth and rates, all ranks at the same time.

    Collective over all ranks, of all stages.

    Medians, of the rank where they are most: computation before, between and after the
    lines of the mesh, in seconds of a processor, times how much longer it takes where all
    ranks compute; equal on all ranks. Bandwidths are those of all ranks sending to all
    others at once, many times. Exchanges begin after a pause, and what links let through
    at once, having saved it up, is told from what they hold by the longest of them. Nothing
    is added to the ledger.

    Args:
        mesh: the ranks; the lines of every grid of so many are measured.
        widths: at which products are timed; those of the model, best of all.
        rows, degree: of the matrix that is multiplied, a rank.
        repeats: how often each is timed.
        codecs: those whose coding is timed, as `plan` takes them.

    One rank has no link to measure: its machine has that of `Machine()`.

    Price: about ten seconds for each line of the mesh (of 4 ranks 3, of 8 ranks 6), and
    another ten to twenty for all-reduces and products.
    """
    _check(widths, rows, degree, repeats)
    quiet, widths = _uncounted(mesh), sorted(set(widths))
    narrow = max(1, widths[0] // mesh.size)  # of a rank, on a grid with a fiber
    products = _products(quiet, widths, narrow, rows, degree)
    works = {name: work for name, (_, work) in products.items()}
    works |= _epochs(quiet) | _codes(quiet, codecs, widths[-1], rows)
    laps = LapTimer(works, works["spmm", widths[-1]], quiet)
    laps.run(repeats)
    lines: dict[Line, Wire] = {}
    for size, stride in lines_of(mesh.size):
        lines[size, stride] = _wire(size, stride, quiet, repeats)
        laps.run(BETWEEN, LONG)
    assumed = Wire(Machine.latency, Machine.bandwidth)  # one rank has no link
    every = lines.get((mesh.size, 1), assumed)
    sums = _sums(quiet, repeats) if mesh.size > 1 else None
    laps.run(BETWEEN, LONG)
    took = laps.medians()
    rate = {name: amount / took[name] for name, (amount, _) in products.items()}
    layer, epoch = _overheads(took)
    return Machine(
        every.latency,
        every.bandwidth,
        Rate(tuple((w, rate["spmm", w]) for w in sorted({narrow, *widths}))),
        Rate(tuple((w, rate["gemm", w]) for w in widths)),
        rate["stream", 0],
        layer,
        epoch,
        lines=lines,
        sums=sums,
        codes=_coded(took, rows * widths[-1] * torch.float32.itemsize),
        source=f"measured on {mesh.size} ranks"
        if mesh.size > 1
        else "measured on 1 rank, link assumed",
    )


def _check(widths: Sequence[int], *counts: int) -> None:
    for values, what in ((widths, "widths"), (counts, "rows, degree and repeats")):
        whole = [isinstance(n, int) and n >= 1 for n in values]
        if not whole or not all(whole):
            raise ValueError(
                f"{what} must be whole numbers above 0, got {list(values)}"
            )


def _uncounted(mesh: Mesh) -> Mesh:
    """The same mesh with a ledger of its own."""
    ledger = Ledger()
    names = (*AXES, "control")
    axes = {name: replace(getattr(mesh, name), ledger=ledger) for name in names}
    return replace(mesh, ledger=ledger, compared=None, **axes)


def _wire(size: int, stride: int, mesh: Mesh, repeats: int) -> Wire:
    """Times exchanges in which each rank of a line sends as much to every other.

    All lines at once, each over a process group of its own, as those of a grid: in that
    of the world, ranks of other lines would send, and wait for, messages of no bytes.
    """
    line = new_axis_group(mesh, size, stride)

    def exchange(total: int) -> Work:
        each = max(1, total // (size - 1))
        counts = [each if rank != line.rank else 0 for rank in range(size)]
        message = torch.zeros(sum(counts), dtype=torch.uint8, device=mesh.device)
        return lambda: collectives.all_to_all(
            message, counts, counts, line, most=each
        ).wait()

    found = _curve(exchange, size - 1, mesh, repeats)
    if line is not mesh.world:
        let_go([line])
    return found


def _sums(mesh: Mesh, repeats: int) -> Wire:
    """Times all-reduces; sizes are those of what a rank receives."""

    def reduce(size: int) -> Work:
        numbers = max(1, size * mesh.size // (8 * (mesh.size - 1)))
        values = torch.zeros(numbers, device=mesh.device)
        return lambda: collectives.all_reduce(values, mesh.world)

    return _curve(reduce, sum_messages(mesh.size), mesh, repeats)


def _curve(
    work: Callable[[int], Work], messages: int, mesh: Mesh, repeats: int
) -> Wire:
    """Times work of each size many times, with pauses in which links save up what they may."""
    latency = timed(work(SMALL * messages), mesh, PROBES * repeats) / messages
    sizes, found = [LEAST], [_in_a_row(work(LEAST), mesh)]
    while found[-1] < LONGEST and sizes[-1] < MOST:
        sizes.append(2 * sizes[-1])
        found.append(_in_a_row(work(sizes[-1]), mesh))
    # noise only adds: nothing takes longer than twice as much
    took = list(itertools.accumulate(reversed(found), min))[::-1]
    points = tuple(
        (size, max(t - latency * messages, 0.0))
        for size, t in zip(sizes, took, strict=True)
    )
    # what the last three quarters took, half of their share or more
    begin, earlier = ([0, 0, 0, *values][-3] for values in (sizes, took))
    size, whole = sizes[-1] - begin, took[-1]
    last = max(whole - earlier, whole * size / sizes[-1] / 2)
    return Wire(latency, size / last, points)


def _in_a_row(work: Work, mesh: Mesh) -> float:
    """Returns the seconds of one, when as many follow one another as take a while."""
    times = max(1, round(LONG / (timed(work, mesh, 1) + PAUSE)))
    found = []
    for _ in range(FEW):
        took = 0.0
        for _ in range(times):
            time.sleep(PAUSE)
            took += once(work, mesh)
        found.append(took / times)
    return slowest(found, mesh)


def _products(
    mesh: Mesh, widths: list[int], narrow: int, rows: int, degree: int
) -> dict[Name, tuple[float, Work]]:
    """Returns what is multiplied, and copied, to be timed; and how much work each is."""
    rng = torch.Generator().manual_seed(0)
    col = torch.randint(rows, (rows * degree,), generator=rng)
    row = torch.arange(rows).repeat_interleave(degree)
    rowptr, col, _ = kernels.coo_to_csr(row, col, rows)
    value = torch.rand(len(col), generator=rng).to(mesh.device)
    rowptr, col = rowptr.to(mesh.device), col.to(rowptr.dtype).to(mesh.device)
    wide = torch.rand(rows, WIDE, generator=rng).to(mesh.device)
    found: dict[Name, tuple[float, Work]] = {}
    for width in sorted({narrow, *widths}):
        x = torch.rand(rows, width, generator=rng).to(mesh.device)
        sparse = partial(kernels.spmm, rowptr, col, value, x)
        found["spmm", width] = len(col) * width, sparse
        if width not in widths:
            continue
        w = torch.rand(width, WIDE, generator=rng).to(mesh.device)
        dense = partial(_linear_step, wide, w, x)
        found["gemm", width] = 4 * rows * WIDE * width, dense
    pick = torch.randperm(rows, generator=rng).to(mesh.device)
    found["stream", 0] = 2 * wide.nbytes, partial(kernels.gather_rows, wide, pick)
    return found


def _codes(
    mesh: Mesh, asked: Sequence[Asked], width: int, rows: int
) -> dict[Name, Work]:
    """Returns how codecs write rows, and read them, to be timed."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(rows, width, generator=rng, dtype=torch.float32).to(mesh.device)
    draw = RngKey(1, torch.arange(rows, device=mesh.device))
    found: dict[Name, Work] = {}
    for coding in filter(None, codings(asked)):
        for codec in (coding.rows, coding.gradients):
            name = repr(codec)
            if codec == Plain() or ("write", name) in found:
                continue
            kept = (
                fresh_state(rows, width, x.dtype, x.device) if codec.stateful else None
            )
            message, out = codec.encode(x, draw, state=kept), torch.empty_like(x)
            found["write", name] = partial(codec.encode, x, draw, state=kept)
            found["read", name] = partial(codec.decode, message, out, draw, state=kept)
    return found


def _coded(took: dict[Name, float], nbytes: int) -> dict[str, tuple[float, float]]:
    """Returns the bytes of rows a second that codecs write, and read."""
    return {
        name: (nbytes / took["write", name], nbytes / took["read", name])
        for kind, name in took
        if kind == "write" and isinstance(name, str)
    }


def _linear_step(x: Tensor, w: Tensor, g: Tensor) -> None:
    """X W and its dW, as a layer of `torch.nn` has them."""
    torch.nn.functional.linear(x, w)
    torch.mm(g.t(), x)


def _epochs(mesh: Mesh) -> dict[Name, Work]:
    """Returns epochs to be timed; collective.

    Of models with next to no rows, of which each rank needs one of every other.
    """
    nodes = torch.arange(4 * mesh.size)
    away = torch.combinations(nodes[::4]).t()
    data = Data(
        x=torch.ones(len(nodes), 4), edge_index=torch.cat([away, away.flip(0)], 1)
    )
    data.y = nodes % 4
    share = partition(data, mesh, "block").to(mesh.device)
    share.x.requires_grad_()  # else the first product is kept
    found: dict[Name, Work] = {}
    for depth in (SHALLOW, DEEP):
        model = replicate(_Stack(depth).to(mesh.device), mesh)
        optimizer = torch.optim.Adam(model.parameters())

        def epoch(model: Any = model, optimizer: Any = optimizer) -> None:
            mesh.ledger.reset()
            optimizer.zero_grad()
            out = model(share.x, share.edge_index)
            torch.nn.functional.cross_entropy(out, share.y).backward()
            optimizer.step()

        for _ in itertools.repeat(None, 2):
            epoch()
        found["epoch", depth] = epoch
    return found


def _overheads(took: dict[Name, float]) -> tuple[float, float]:
    """Returns the seconds of a layer, both ways, and of an epoch beside its layers."""
    shallow, deep = took["epoch", SHALLOW], took["epoch", DEEP]
    layer = max((deep - shallow) / (DEEP - SHALLOW), 0.0)
    return layer, max(shallow - SHALLOW * layer, 0.0)


class _Stack(torch.nn.Module):
    """Layers of no width to speak of."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList(DistGCNConv(4, 4) for _ in range(depth))

    def forward(self, x: Any, edge_index: Any) -> Any:
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        return x

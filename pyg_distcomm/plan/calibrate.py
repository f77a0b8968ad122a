"""Measures the latencies, bandwidths and compute rates of a run, as medians: `calibrate`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module
from torch_geometric.data import Data
from tqdm import tqdm

from pyg_distcomm import kernels
from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.axis import destroy_groups
from pyg_distcomm.comm.ledger import Ledger
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.comm.process_grid import new_axis_group
from pyg_distcomm.graph.partition_data import partition
from pyg_distcomm.halo.codec import RngKey
from pyg_distcomm.halo.codecs import Plain
from pyg_distcomm.nn.product_layers import DistGCNConv
from pyg_distcomm.nn.replicate import replicate
from pyg_distcomm.plan.codecs import CodecLike, codings
from pyg_distcomm.plan.cost import sum_messages
from pyg_distcomm.plan.machine import Line, Machine, Rate, Wire, lines_of
from pyg_distcomm.plan.training import Stack

Work: TypeAlias = Callable[[], object]
Name: TypeAlias = tuple[str, int | str]  # a timing, with its width, depth or codec

SMALL, LEAST, MOST = 8, 1 << 16, 1 << 26  # bytes that a rank sends in an exchange
LONG = 0.1  # sizes double until an exchange takes this many seconds
WIDE = 256  # the second dimension of dense products, and the width of copied rows
AXES = ("world", "row", "col", "fiber", "data", "control")
SHALLOW, DEEP = 1, 5  # numbers of layers of the models whose overheads are timed


def calibrate(
    mesh: Mesh,
    widths: Sequence[int] = (4, 16, 64, 256),
    *,
    rows: int = 1 << 14,
    degree: int = 16,
    repeats: int = 7,
    codecs: Sequence[CodecLike] = (),
) -> Machine:
    """Measures the latency, bandwidth and rates of this machine, on all ranks at once.

    Collective over all ranks, of all stages. Each figure is the slowest rank's median, equal
    on all ranks. Bandwidths are measured while all ranks of an axis send to all others.
    Nothing is added to the ledger.

    Args:
        mesh: the ranks; the axes of every grid of this many ranks are measured.
        widths: the widths at which products are timed; best those of the model.
        rows, degree: rows and nonzeros a row of the matrix that each rank multiplies.
        repeats: the number of timings for each figure.
        codecs: the codecs whose encoding and decoding is timed, as `plan` takes them.

    One rank has no link to measure: its machine has that of `Machine()`.

    Price: a second or two for each axis (of 4 ranks 3, of 8 ranks 6), and a few more for
    all-reduces and products.
    """
    _check(widths, rows, degree, repeats)
    uncounted, widths = _with_own_ledger(mesh), sorted(set(widths))
    narrow = max(1, widths[0] // mesh.size)  # of a rank, on a grid with a fiber
    products = _products(uncounted, widths, narrow, rows, degree)
    works = {name: work for name, (_, work) in products.items()}
    works |= _codec_works(uncounted, codecs, widths[-1], rows)
    off = None if mesh.rank == 0 else True
    bar = tqdm(works.items(), "calibrating", disable=off, leave=False)
    seconds = {name: slowest_median(work, uncounted, repeats) for name, work in bar}
    for depth, epoch in _epochs(uncounted).items():
        seconds["epoch", depth] = slowest_median(
            epoch, uncounted, repeats, time_compute
        )
    lines: dict[Line, Wire] = {
        (size, stride): _time_exchanges(size, stride, uncounted, repeats)
        for size, stride in lines_of(mesh.size)
    }
    assumed = Wire(Machine.latency, Machine.bandwidth)  # one rank has no link
    world_wire = lines.get((mesh.size, 1), assumed)
    rate = {name: amount / seconds[name] for name, (amount, _) in products.items()}
    layer, epoch_overhead = _overheads(seconds)
    return Machine(
        world_wire.latency,
        world_wire.bandwidth,
        Rate(tuple((w, rate["spmm", w]) for w in sorted({narrow, *widths}))),
        Rate(tuple((w, rate["gemm", w]) for w in widths)),
        rate["stream", 0],
        layer,
        epoch_overhead,
        lines=lines,
        sums=_time_all_reduces(uncounted, repeats) if mesh.size > 1 else None,
        codes=_codec_rates(seconds, rows * widths[-1] * torch.float32.itemsize),
        source=f"measured on {mesh.size} ranks"
        if mesh.size > 1
        else "measured on 1 rank, link assumed",
    )


def time_once(work: Work, mesh: Mesh) -> float:
    """Returns the seconds of one call of `work`, which all ranks begin together."""
    collectives.barrier(mesh.world)
    _finish(mesh)
    start = time.perf_counter()
    work()
    _finish(mesh)
    return time.perf_counter() - start


def _finish(mesh: Mesh) -> None:
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)


def time_compute(epoch: Work, mesh: Mesh) -> float:
    """Returns the seconds of an epoch without its exchanges."""
    mesh.ledger.reset()
    wall = time_once(epoch, mesh)
    return wall - sum(entry.seconds for entry in mesh.ledger.entries.values())


def slowest_median(
    work: Work,
    mesh: Mesh,
    repeats: int,
    clock: Callable[[Work, Mesh], float] = time_once,
) -> float:
    """Returns the slowest rank's median seconds of `work`, which all ranks run together."""
    work()
    seconds = statistics.median([clock(work, mesh) for _ in range(repeats)])
    median = torch.tensor(seconds, dtype=torch.float64)
    return float(collectives.all_reduce(median, mesh.world, "max"))


def _check(widths: Sequence[int], *counts: int) -> None:
    for values, what in ((widths, "widths"), (counts, "rows, degree and repeats")):
        whole = [isinstance(n, int) and n >= 1 for n in values]
        if not whole or not all(whole):
            raise ValueError(
                f"{what} must be whole numbers above 0, got {list(values)}"
            )


def _with_own_ledger(mesh: Mesh) -> Mesh:
    """Returns the mesh with another ledger, so that timings are not counted."""
    ledger = Ledger()
    axes = {name: replace(getattr(mesh, name), ledger=ledger) for name in AXES}
    return replace(mesh, ledger=ledger, compared=None, **axes)


def _time_exchanges(size: int, stride: int, mesh: Mesh, repeats: int) -> Wire:
    """Times exchanges in which each rank of an axis sends as many bytes to each other.

    All axes of this kind run at once, each over its own process group, as in a grid.
    """
    axis_group = new_axis_group(mesh, size, stride)

    def exchange(total: int) -> Work:
        per_peer = max(1, total // (size - 1))
        counts = [per_peer if rank != axis_group.rank else 0 for rank in range(size)]
        message = torch.zeros(sum(counts), dtype=torch.uint8, device=mesh.device)
        return lambda: collectives.all_to_all(
            message, counts, counts, axis_group, most=per_peer
        ).wait()

    found = _fit_wire(exchange, size - 1, mesh, repeats)
    if axis_group is not mesh.world:
        destroy_groups([axis_group])
    return found


def _time_all_reduces(mesh: Mesh, repeats: int) -> Wire:
    """Times all-reduces by the bytes that a rank receives."""

    def reduce(size: int) -> Work:
        numbers = max(1, size * mesh.size // (8 * (mesh.size - 1)))
        values = torch.zeros(numbers, device=mesh.device)
        return lambda: collectives.all_reduce(values, mesh.world)

    return _fit_wire(reduce, sum_messages(mesh.size), mesh, repeats)


def _fit_wire(
    work: Callable[[int], Work], messages: int, mesh: Mesh, repeats: int
) -> Wire:
    """Returns the latency of exchanges of a few bytes, and the bandwidth of the longest one.

    Sizes double until an exchange takes `LONG` seconds, so that bursts count little.
    """
    start = slowest_median(work(SMALL * messages), mesh, repeats)
    size = LEAST
    seconds = slowest_median(work(size), mesh, repeats)
    while seconds < LONG and size < MOST:
        size *= 2
        seconds = slowest_median(work(size), mesh, 1)
    seconds = slowest_median(work(size), mesh, min(repeats, 3))
    # noise may make the long exchange look shorter: divide by at least half its time
    return Wire(start / messages, size / max(seconds - start, seconds / 2))


def _products(
    mesh: Mesh, widths: list[int], narrow: int, rows: int, degree: int
) -> dict[Name, tuple[float, Work]]:
    """Returns the products and copies to be timed, each with its amount of work."""
    rng = torch.Generator().manual_seed(0)
    col = torch.randint(rows, (rows * degree,), generator=rng)
    row = torch.arange(rows).repeat_interleave(degree)
    rowptr, col, _ = kernels.coo_to_csr(row, col, rows)
    value = torch.rand(len(col), generator=rng).to(mesh.device)
    rowptr, col = rowptr.to(mesh.device), col.to(rowptr.dtype).to(mesh.device)
    wide_x = torch.rand(rows, WIDE, generator=rng).to(mesh.device)
    found: dict[Name, tuple[float, Work]] = {}
    for width in sorted({narrow, *widths}):
        x = torch.rand(rows, width, generator=rng).to(mesh.device)
        sparse = partial(kernels.spmm, rowptr, col, value, x)
        found["spmm", width] = len(col) * width, sparse
        if width not in widths:
            continue
        w = torch.rand(width, WIDE, generator=rng).to(mesh.device)
        dense = partial(_linear_step, wide_x, w, x)
        found["gemm", width] = 4 * rows * WIDE * width, dense
    pick = torch.randperm(rows, generator=rng).to(mesh.device)
    found["stream", 0] = 2 * wide_x.nbytes, partial(kernels.gather_rows, wide_x, pick)
    return found


def _codec_works(
    mesh: Mesh, codecs: Sequence[CodecLike], width: int, rows: int
) -> dict[Name, Work]:
    """Returns the encoding and decoding of rows by each codec, to be timed."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(rows, width, generator=rng, dtype=torch.float32).to(mesh.device)
    ids = torch.arange(rows, device=mesh.device)
    draw = RngKey(1, ids, degree=ids)
    found: dict[Name, Work] = {}
    for coding in filter(None, codings(codecs)):
        codec, name = coding.rows, repr(coding.rows)
        if codec == Plain() or ("write", name) in found:
            continue
        message, out = codec.encode(x, draw), torch.empty_like(x)
        found["write", name] = partial(codec.encode, x, draw)
        found["read", name] = partial(codec.decode, message, out, draw)
    return found


def _codec_rates(
    seconds: dict[Name, float], nbytes: int
) -> dict[str, tuple[float, float]]:
    """Returns the bytes of rows per second that codecs encode and decode."""
    return {
        name: (nbytes / seconds["write", name], nbytes / seconds["read", name])
        for kind, name in seconds
        if kind == "write" and isinstance(name, str)
    }


def _linear_step(x: Tensor, w: Tensor, g: Tensor) -> None:
    """Computes X W and its dW, as a layer of `torch.nn` does."""
    torch.nn.functional.linear(x, w)
    torch.mm(g.t(), x)


def _epochs(mesh: Mesh) -> dict[int, Work]:
    """Returns epochs to be timed, by number of layers; collective.

    The graph has four nodes per rank, and each rank reads one row of every other rank.
    """
    nodes = torch.arange(4 * mesh.size)
    pairs = torch.combinations(nodes[::4]).t()
    data = Data(
        x=torch.ones(len(nodes), 4), edge_index=torch.cat([pairs, pairs.flip(0)], 1)
    )
    data.y = nodes % 4
    share = partition(data, mesh, "block").to(mesh.device)
    share.x.requires_grad_()  # otherwise the first product would be cached
    found: dict[int, Work] = {}
    for depth in (SHALLOW, DEEP):
        run = TrainingRun(share, (DistGCNConv(4, 4) for _ in range(depth)), mesh)
        for _ in range(2):
            run.epoch()
        found[depth] = run.epoch
    return found


def _overheads(seconds: dict[Name, float]) -> tuple[float, float]:
    """Returns the overhead of a layer, forward and backward, and that of an epoch."""
    shallow, deep = seconds["epoch", SHALLOW], seconds["epoch", DEEP]
    layer = max((deep - shallow) / (DEEP - SHALLOW), 0.0)
    return layer, max(shallow - SHALLOW * layer, 0.0)


class TrainingRun:
    """Trains layers, with ReLU between them, on a share.

    Args:
        share: the share of the graph, with x and y.
        layers: the layers, in order.
        mesh: the ranks.
        changing: whether x is a new tensor in each epoch.
    """

    def __init__(
        self, share: Data, layers: Iterable[Module], mesh: Mesh, changing: bool = False
    ) -> None:
        self.share, self.mesh, self._changing = share, mesh, changing
        model = Stack(layers).to(mesh.device, share.x.dtype)  # type: ignore[union-attr]
        self._model = replicate(model, mesh)
        self._optimizer = torch.optim.Adam(self._model.parameters())

    def epoch(self) -> None:
        """Trains once on all nodes."""
        self._optimizer.zero_grad()
        x: Any = self.share.x.clone() if self._changing else self.share.x  # type: ignore[union-attr]
        out = self._model(x, self.share.edge_index)
        torch.nn.functional.cross_entropy(out, self.share.y).backward()
        self._optimizer.step()

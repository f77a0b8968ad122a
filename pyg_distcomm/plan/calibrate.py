"""calibrate: measures what a run computes with and talks over, in a few seconds."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch_geometric.data import Data

from pyg_distcomm import kernels, wire
from pyg_distcomm.ledger import Ledger
from pyg_distcomm.mesh import Mesh
from pyg_distcomm.nn.gcn_conv import DistGCNConv
from pyg_distcomm.plan.machine import Machine, Rate, Wire
from pyg_distcomm.share import partition

SMALL, LEAST, MOST = 8, 1 << 18, 1 << 26  # bytes sent to a rank; by a rank, all told
LONG = 0.15  # seconds of an exchange long enough to be timed
WIDE = 256  # the other side of a dense product
AXES = ("world", "row", "col", "fiber")


def calibrate(
    mesh: Mesh,
    widths: Sequence[int] = (4, 16, 64, 256),
    *,
    rows: int = 1 << 14,
    degree: int = 16,
    repeats: int = 7,
) -> Machine:
    """Measures latency, bandwidth and rates, all ranks at the same time; collective.

    Medians, of the slowest rank; equal on all ranks. A bandwidth is that of all ranks
    sending to all others at once, between an exchange and another twice as long, so
    that what a link lets through in a burst does not count. Nothing is added to the
    ledger.

    Args:
        mesh: the ranks: all of them together are measured, and each axis with fewer.
        widths: at which products are timed; those of the model, best of all.
        rows, degree: of the matrix that is multiplied, a rank.
        repeats: how often each is timed.

    Price: a few seconds, most of them for slow links.
    """
    quiet = _uncounted(mesh)
    found = {}
    for name in AXES:
        axis: wire.Axis = getattr(quiet, name)
        if 1 < axis.size < mesh.size or (name == "world" and mesh.size > 1):
            found[name] = _wire(axis, quiet, repeats)
    world = found.get("world", Wire(0.0, 1e12))
    axes = {name: each for name, each in found.items() if name != "world"}
    spmm, gemm, stream = _rates(quiet, sorted(set(widths)), rows, degree, repeats)
    return Machine(
        world.latency,
        world.bandwidth,
        spmm,
        gemm,
        stream,
        _overhead(quiet, repeats),
        axes=axes,
        grid=mesh.grid,
        source=f"measured on {mesh.size} ranks",
    )


def _uncounted(mesh: Mesh) -> Mesh:
    """The same mesh with a ledger of its own."""
    ledger = Ledger()
    axes = {
        name: replace(getattr(mesh, name), ledger=ledger) for name in (*AXES, "data")
    }
    return replace(mesh, ledger=ledger, **axes)


def _slowest(seconds: float, mesh: Mesh) -> float:
    """Returns the longest of all ranks' times, on all of them."""
    mine = torch.tensor([seconds], dtype=torch.float64)
    return float(wire.all_reduce(mine, mesh.world, "max"))


def _timed(work: Callable[[], object], mesh: Mesh, repeats: int) -> float:
    """Returns the median seconds of something all ranks do at once."""
    work()
    found = []
    for _ in range(repeats):
        wire.barrier(mesh.world)
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return _slowest(statistics.median(found), mesh)


def _wire(axis: wire.Axis, mesh: Mesh, repeats: int) -> Wire:
    def seconds(size: int) -> float:
        each = max(1, size // (axis.size - 1))
        counts = [each if i != axis.rank else 0 for i in range(axis.size)]
        message = torch.zeros(sum(counts), dtype=torch.uint8)
        return _timed(
            lambda: wire.all_to_all(message, counts, counts, axis).wait(), mesh, repeats
        )

    peers = axis.size - 1
    latency = seconds(SMALL * peers) / peers
    size, took = LEAST, seconds(LEAST)
    while took < LONG and size < MOST:
        size *= 2
        took = seconds(size)
    twice = seconds(2 * size)
    return Wire(latency, size / max(twice - took, 1e-3 * twice, 1e-9))


def _rates(
    mesh: Mesh, widths: list[int], rows: int, degree: int, repeats: int
) -> tuple[Rate, Rate, float]:
    rng = torch.Generator().manual_seed(0)
    col = torch.randint(rows, (rows * degree,), generator=rng)
    row = torch.arange(rows).repeat_interleave(degree)
    rowptr, col, _ = kernels.coo_to_csr(row, col, rows)
    value = torch.rand(len(col), generator=rng).to(mesh.device)
    rowptr, col = rowptr.to(mesh.device), col.to(rowptr.dtype).to(mesh.device)
    sparse, dense = [], []
    wide = torch.rand(rows, WIDE, generator=rng).to(mesh.device)
    for width in widths:
        x = torch.rand(rows, width, generator=rng).to(mesh.device)
        w = torch.rand(WIDE, width, generator=rng).to(mesh.device)
        took = _timed(partial(kernels.spmm, rowptr, col, value, x), mesh, repeats)
        sparse.append((width, len(col) * width / took))
        took = _timed(partial(torch.mm, wide, w), mesh, repeats)
        dense.append((width, 2 * rows * WIDE * width / took))
    pick = torch.randperm(rows, generator=rng).to(mesh.device)
    took = _timed(lambda: kernels.gather_rows(wide, pick), mesh, repeats)
    return Rate(tuple(sparse)), Rate(tuple(dense)), 2 * wide.nbytes / took


def _overhead(mesh: Mesh, repeats: int) -> float:
    """Returns the seconds of a layer, forward and backward, that has next to no rows."""
    nodes = 2 * mesh.size
    none = torch.empty(2, 0, dtype=torch.int64)
    data = Data(x=torch.ones(nodes, 4), edge_index=none, num_nodes=nodes)
    share = partition(data, mesh, "block")
    convs = torch.nn.ModuleList(DistGCNConv(4, 4) for _ in range(4))
    optimizer = torch.optim.Adam(convs.parameters())

    def epoch() -> None:
        optimizer.zero_grad()
        x = share.x
        for conv in convs:
            x = conv(x, share.edge_index).relu()
        x.to_local().sum().backward()
        optimizer.step()

    for _ in itertools.repeat(None, 2):
        epoch()
    return _timed(epoch, mesh, repeats) / len(convs)

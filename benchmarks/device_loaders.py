"""Trains for an epoch of minibatches on one CUDA device, by phases, beside PyG's loader.

The part `minibatches` of `python benchmarks/cuda.py`, which see.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.loader as peer
import torch_geometric.nn as pyg
from device_clock import Device, failure
from device_report import Report
from one_device import OURS, Net, graph
from torch_geometric.data import Data

import pyg_distcomm as pdc
from pyg_distcomm.loader import LoaderOptions, NeighborLoader
from pyg_distcomm.sampling import KeyedNeighborSampler

WARM, MOST = (
    20,
    100,
)  # minibatches before those that count, whose shapes compile, and of those
LONG = 4.0  # seconds of either, after which no other is drawn
PATIENCE = 20.0  # seconds that PyG's workers may take for one minibatch
WORKERS = 8


def minibatches(device: Device, report: Report) -> None:
    """Draws minibatches and trains on them: this package's loader, and PyG's.

    The aim is five times the minibatches a second of PyG's loader, with workers and pinned
    copies or without, whether the graph lies on the device or is read through UVA.
    """
    report.doing = "the graph"
    data = graph(device, 20, 16)
    fan_out, size = ([3, 2], 16) if device.smoke else ([15, 10, 5], 1024)
    given: dict[str, Any] = {"num_neighbors": fan_out, "batch_size": size}
    given |= {"input_nodes": data.train_mask, "shuffle": True}
    workers = min(WORKERS, max(1, (os.cpu_count() or 1) // 2))
    own = bool(find_spec("pyg_lib") or find_spec("torch_sparse"))
    if not own:
        report.say(
            "Neither pyg-lib nor torch-sparse is installed, which PyG's sampler needs: PyG's "
            "loader is measured with this package's sampler on the host in its place."
        )
    makers: dict[str, Callable[[], Any]] = {
        "PyG's loader": lambda: _peer(device, data, given, 0, own),
        f"{OURS}, on the device": lambda: _there(device, data, given),
        f"PyG's loader, workers: {workers}": lambda: _peer(
            device, data, given, workers, own
        ),
        f"{OURS}, graph and rows through UVA": lambda: _there(
            device, data, given, graph_on="pinned", rows_on="pinned"
        ),
        f"{OURS}, a fifth of the rows on the device": lambda: _there(
            device, data, given, rows_on="pinned", cache=0.2
        ),
        f"{OURS}, on the host": lambda: NeighborLoader(data, **given),
    }
    add = report.table(
        f"an epoch of minibatches of {size}, fan-outs {fan_out}, {data.num_edges:,} edges, "
        "and the ms of one",
        *("by", "minibatches", "s per epoch", "waits for one", "copies it", "trains"),
        *(
            "spread",
            "draws one, alone",
            "MiB at peak",
            "per second, beside PyG's",
            "aim: 5",
        ),
    )
    best = 0.0  # minibatches a second of PyG's
    for name, make in makers.items():
        found = _trained(device, report, name, make, len(fan_out))
        if isinstance(found, str):
            add(name, found, *[""] * 9)
            continue
        rate, cells = found
        judged: list[Any] = ["", ""]
        if name.startswith("PyG"):
            best = max(best, rate)
        elif best:
            judged = device.aim(rate / best, 5)
            judged = judged if "host" not in name else [judged[0], ""]
        add(name, *cells, *judged)


class Missing(Exception):
    """Says what a measurement lacks."""


def _peer(
    device: Device, data: Data, given: dict[str, Any], workers: int, own: bool
) -> Any:
    """Makes PyG's loader, by PyG's sampler if it runs here."""
    options = {"pin_memory": device.cuda, "num_workers": workers}
    if workers:
        options["timeout"] = PATIENCE
    if own:
        return peer.NeighborLoader(data, **given, **options)
    rest = dict(given)
    sampler = KeyedNeighborSampler(data, rest.pop("num_neighbors"), seed=0)
    return peer.NodeLoader(data, sampler, **rest, **options)


def _there(device: Device, data: Data, given: dict[str, Any], **place: Any) -> Any:
    """Makes this package's loader, which draws on the device."""
    if not device.cuda and "pinned" in place.values():
        raise Missing("not measured: only CUDA reads pinned memory")
    place = {"rows_on": "device", "device": device.home} | place
    return NeighborLoader(data, **given, options=LoaderOptions(**place))


def _trained(
    device: Device, report: Report, name: str, make: Callable[[], Any], depth: int
) -> tuple[float, list[Any]] | str:
    """Draws minibatches of a loader alone, and then trains on them.

    Returns minibatches per second, and cells: how many an epoch has, the seconds of one, and of
    one minibatch the ms of its phases; or what stopped it.
    """
    if report.over:
        return "no time was left"
    report.doing = name
    base = device.base()  # the loader before has gone
    if device.cuda:
        torch.cuda.reset_peak_memory_stats()
    try:
        torch.manual_seed(0)
        loader = make()
        alone, _ = _epoch_of(device, loader, None)
        model = Net(pyg.SAGEConv, (100, *[256] * (depth - 1), 47)).to(device.home)
        model = model if name.startswith("PyG") else pdc.convert(model)
        spent, spread = _epoch_of(device, loader, model)
        peak = torch.cuda.max_memory_allocated() - base if device.cuda else 0
    except Missing as why:
        return str(why)
    except Exception as error:  # one loader that fails hides no other
        return failure(error)
    rate = 1 / sum(spent)
    count = len(loader)
    phases = [s * 1e3 for s in spent]
    cells = [count, count / rate, *phases, f"{100 * spread:.0f} %", sum(alone) * 1e3]
    return rate, [*cells, peak / 2**20]


def _epoch_of(
    device: Device, loader: Any, model: torch.nn.Module | None
) -> tuple[list[float], float]:
    """Returns the seconds of each phase of a minibatch, and their spread, first ones apart.

    That is the distance between quartiles, as a share of the median. Without a model they are
    brought to the device, and no more. Each is waited for, not what the loader makes meanwhile,
    on streams of its own.
    """
    optimizer = None if model is None else torch.optim.Adam(model.parameters())
    spent: list[list[float]] = []
    warm, most = (1, 2) if device.smoke else (WARM, MOST)
    start, begun = time.perf_counter(), 0
    batches = iter(loader)
    while len(spent) < most and time.perf_counter() - start < LONG:
        times = [time.perf_counter()]
        batch = next(batches, None)
        if batch is None:
            break
        times.append(time.perf_counter())
        batch = batch.to(device.home, non_blocking=True)
        device.wait_here()
        times.append(time.perf_counter())
        if model is not None and optimizer is not None:
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            F.cross_entropy(out, batch.y[: batch.batch_size]).backward()
            optimizer.step()
            device.wait_here()
        times.append(time.perf_counter())
        begun += 1
        if begun > warm or (begun > 1 and times[-1] - start > LONG):
            if not spent:
                start = times[0]
            spent.append(
                [after - before for before, after in itertools.pairwise(times)]
            )
    if not spent:
        raise Missing("not measured: an epoch is too short")
    totals = torch.tensor([sum(each) for each in spent])
    low, middle, high = totals.quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
    means = [sum(phase) / len(spent) for phase in zip(*spent, strict=True)]
    return means, (high - low) / middle

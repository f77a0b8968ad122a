"""What is to be known of loaders of minibatches for one CUDA device.

The parts `minibatches` and `other_minibatches` of `python benchmarks/cuda.py`, which see: none
of them has run on a CUDA device yet.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.loader
import torch_geometric.nn as pyg
from device_report import Report
from one_device import Device, Net, failure, graph, ratio
from torch_geometric.data import Data

import pyg_distcomm as pdc
from pyg_distcomm import kernels
from pyg_distcomm.loader import DistLayerLoader, NeighborLoader

PEER, BOLT, OURS = "PyG, CPU, pinned copies", "GraphBolt", "this package"
HOST = "on the host"
WARM = 20  # minibatches before those that count: their shapes compile kernels
HEAD = ("by", "seeds per second, drawn", "trained on")
PHASES = (
    *("by", "minibatches", "s per epoch", "PyG's s / these"),
    *("ms: waits for one", "copies it", "trains", "draws one, alone"),
)


def minibatches(device: Device, report: Report) -> None:
    """Draws minibatches and trains on them: this package's loader, PyG's and GraphBolt's.

    The aim is five times the minibatches per second of PyG's loader of eight workers and pinned
    copies, whether the graph lies on the device or is read through UVA. GraphBolt's are
    compared with those of this package whose graph and rows lie where its do.
    """
    data = graph(device, 20, 16)
    fan_out, size = ([3, 2], 16) if device.smoke else ([15, 10, 5], 1024)
    given: dict[str, Any] = {"num_neighbors": fan_out, "batch_size": size}
    given |= {"input_nodes": data.train_mask, "shuffle": True}
    makers: dict[str, Callable[[], Any]] = {
        PEER: lambda: torch_geometric.loader.NeighborLoader(
            data, **given, pin_memory=device.cuda, num_workers=0 if device.smoke else 8
        ),
        f"{BOLT}, on the device": lambda: _GraphBolt(
            device, data, fan_out, size, False
        ),
        f"{BOLT}, graph and rows through UVA": lambda: _GraphBolt(
            device, data, fan_out, size, True
        ),
        f"{OURS}, {HOST}": lambda: NeighborLoader(data, **given),
    }
    places: dict[str, dict[str, Any]] = {
        "on the device": {"rows_on": "device"},
        "graph through UVA": {"graph_on": "pinned", "rows_on": "device"},
        "graph and rows through UVA": {"graph_on": "pinned", "rows_on": "pinned"},
        "a fifth of the rows on the device": {"rows_on": "pinned", "cache": 0.2},
    }
    for where, place in places.items():
        makers[f"{OURS}, {where}"] = lambda place=place: NeighborLoader(
            data, **given, device=_cuda(device), **place
        )
    add = report.table(
        f"minibatches of {size}, fan-outs {fan_out}, {data.num_edges:,} edges",
        *(*HEAD, "these / PyG's, drawn", "aim: 5", "these / GraphBolt's, drawn"),
    )
    phases = report.table("an epoch of these minibatches, by phases", *PHASES)
    rates: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for name, make in makers.items():
        found = _loaded(device, report, name, make, size, len(fan_out))
        if isinstance(found, str):
            add(name, found, *[""] * (len(HEAD) + 1))
            continue
        drawn, trained, line = found
        rates[name], seconds[name] = drawn, line[1]
        judged: list[Any] = ["", "", ""]
        if name.startswith(OURS):
            judged = device.aim(ratio(drawn, rates.get(PEER)), 5)
            judged = [judged[0], "" if name.endswith(HOST) else judged[1]]
            # whose graph and rows lie in the same places, if there is one
            bolt = name.replace(OURS, BOLT)
            judged.append(ratio(drawn, rates.get(bolt)) or "")
        shown = f"{trained:,.0f}" if trained else "not trained"
        add(name, f"{drawn:,.0f}", shown, *judged)
        if trained:
            behind = ratio(seconds.get(PEER), line[1]) or ""
            phases(name, *line[:2], behind, *line[2:])


def other_minibatches(device: Device, report: Report) -> None:
    """Draws minibatches layer by layer, and of a share, for the host and for the device."""
    data = graph(device, 20, 16)
    numbers, size = ([8, 8], 16) if device.smoke else ([2048, 1024, 512], 512)
    fan_out = [3, 2] if device.smoke else [15, 10, 5]
    given: dict[str, Any] = {"batch_size": size, "shuffle": True}
    places: dict[str, dict[str, Any]] = {
        HOST: {},
        "on the device": {"device": "cuda"},
        "pinned": {"device": "cuda", "rows_on": "pinned"},
    }
    makers: dict[str, Callable[[], Any]] = {}

    @functools.cache
    def share() -> Data:  # cut where it is needed: if that fails, other lines stand
        return pdc.partition(data, pdc.init(device=device.home))

    for where, place in places.items():
        for rule in ("ladies", "fastgcn"):
            makers[f"{rule}, {where}"] = lambda rule=rule, place=place: DistLayerLoader(
                data, numbers, rule, data.train_mask, **given, **_placed(device, place)
            )
        makers[f"share, rows {where}"] = lambda place=place: NeighborLoader(
            share(),
            fan_out,
            input_nodes=share().train_mask,
            **given,
            **_placed(device, place),
        )
    add = report.table(
        f"minibatches of {size}, {numbers} nodes per layer, or fan-outs {fan_out}",
        *(*HEAD, "these / the host's, drawn"),
    )
    phases = report.table("an epoch of these, by phases", *PHASES[:3], *PHASES[4:])
    hosts: dict[str, float] = {}
    for name, make in makers.items():
        found = _loaded(device, report, name, make, size, len(numbers))
        if isinstance(found, str):
            add(name, found, "", "")
            continue
        drawn, trained, line = found
        rule = name.split(",")[0]
        if name.endswith(HOST):
            hosts[rule] = drawn
        behind = ratio(drawn, hosts.get(rule)) or ""
        add(name, f"{drawn:,.0f}", f"{trained:,.0f}", behind)
        phases(name, *line)


class Missing(Exception):
    """Says what a measurement lacks."""


def _cuda(device: Device) -> str:
    if not device.cuda:
        raise Missing("not measured: no CUDA device")
    return "cuda"


def _placed(device: Device, place: dict[str, Any]) -> dict[str, Any]:
    return place | {"device": _cuda(device)} if place else place


def _loaded(
    device: Device,
    report: Report,
    name: str,
    make: Callable[[], Any],
    size: int,
    depth: int,
) -> tuple[float, float, list[Any]] | str:
    """Draws minibatches of a loader alone, and then trains on them.

    Returns seeds per second of both, and of an epoch of training the minibatches, seconds, and
    the ms of the phases of one; or what stopped it.
    """
    if report.over:
        return "no time was left"
    most = 2 if device.smoke else 100
    device.clear()  # of the loader before
    try:
        torch.manual_seed(0)
        loader = make()
        drawn, alone = _epoch_of(device, loader, None, most)
        if name.startswith(BOLT):  # its minibatches are not of PyG's layers
            return size * drawn, 0.0, [0, None]
        model = Net(pyg.SAGEConv, (100, *[256] * (depth - 1), 47))
        model = model.to(device.home)
        model = model if name == PEER else pdc.convert(model)
        trained, spent = _epoch_of(device, loader, model, most)
        count = len(loader)
        return (
            size * drawn,
            size * trained,
            [count, count / trained, *spent, sum(alone)],
        )
    except Missing as why:
        return str(why)
    except Exception as error:  # PyG's, and GraphBolt's, need libraries of their own
        return failure(error)


def _epoch_of(
    device: Device, loader: Any, model: torch.nn.Module | None, most: int
) -> tuple[float, list[float]]:
    """Returns minibatches per second, the first ones apart, and the ms of each phase of one.

    Without a model they are brought to the device, and no more. Each is waited for, not what
    the loader makes meanwhile, on streams of its own.
    """
    optimizer = None if model is None else torch.optim.Adam(model.parameters())
    spent, count = [0.0, 0.0, 0.0], -1 if device.smoke else -WARM
    batches = iter(loader)
    while count < most:
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
        count += 1
        if count > 0:
            for k, (before, after) in enumerate(itertools.pairwise(times)):
                spent[k] += after - before
    if count < 1:
        raise Missing("not measured: an epoch is too short")
    return count / sum(spent), [s * 1e3 / count for s in spent]


class _GraphBolt:
    """Minibatches of GraphBolt, drawn on the device, the graph there or in pinned memory.

    As in DGL 2.1's examples/sampling/graphbolt/node_classification.py; of two hops and more it
    draws anew for all nodes of a hop, so that it counts more edges for the same fan-outs.
    """

    def __init__(
        self, device: Device, data: Data, fan_out: list[int], size: int, uva: bool
    ) -> None:
        try:
            import dgl.graphbolt as gb
        except Exception as error:  # its libraries do not load beside every torch
            why = f"skipped: DGL's GraphBolt does not load ({type(error).__name__})"
            raise Missing(why) from error
        _cuda(device)
        row, col = data.edge_index[1], data.edge_index[0]
        rowptr, col, _ = kernels.coo_to_csr(row, col, data.num_nodes)
        csc = gb.fused_csc_sampling_graph(rowptr.long(), col.long())
        csc = csc.pin_memory_() if uva else csc.to(device.home)
        seeds = gb.ItemSet(data.train_mask.nonzero().view(-1), names="seed_nodes")
        pipe = gb.ItemSampler(seeds, batch_size=size, shuffle=True)
        pipe = pipe.copy_to(device=device.home, extra_attrs=["seed_nodes"])
        pipe = pipe.sample_neighbor(csc, fan_out[::-1])
        x = gb.TorchBasedFeature(data.x if uva else data.x.to(device.home))
        if uva:
            x.pin_memory_()
        rows = gb.BasicFeatureStore({("node", None, "x"): x})
        pipe = pipe.fetch_feature(rows, node_feature_keys=["x"])
        self.loader = gb.DataLoader(pipe)

    def __iter__(self) -> Iterator[Any]:
        return (_There(batch) for batch in self.loader)


class _There:
    """A minibatch that lies on the device already."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def to(self, device: torch.device, non_blocking: bool) -> _There:
        """Returns it as it is."""
        return self

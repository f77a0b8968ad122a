"""Trains on two ranks that share one device over gloo, and on one over NCCL.

The part `ranks` of `python benchmarks/cuda.py`, which see.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from device_clock import Device, failure
from device_report import MET, MISSED, Report
from one_device import KINDS, WIDTHS, Net, epoch, graph

import pyg_distcomm as pdc

STEPS = 5
CLOSE = 1e-3  # of losses after STEPS, whose sums come in any order
TIMEOUT = 60.0


def steps(kind: str, smoke: bool) -> tuple[list[float], list[float], float]:
    """Trains a share; returns losses, seconds of steps, and GB/s of collectives."""
    device = Device(kind, smoke)
    mesh = pdc.init(device=f"{kind}:0" if device.cuda else kind, check="never")
    share = pdc.partition(graph(device, 16, 16), mesh, "random").to(mesh.device)
    torch.manual_seed(0)
    model = pdc.convert(Net(KINDS["GCN"], WIDTHS).to(mesh.device))
    run = epoch(model, share, share.edge_index)
    losses, seconds = [], []
    for _ in range(STEPS):
        start = time.perf_counter()
        loss = run()
        device.wait()
        seconds.append(time.perf_counter() - start)
        losses.append(float(loss))
    return losses, seconds[1:], _collectives(device) if dist.is_initialized() else 0.0


def _collectives(device: Device) -> float:
    """Sends rows to all ranks, and sums them; returns the GB/s that leave this rank."""
    x = torch.ones((1 << (10 if device.smoke else 24)), device=device.home)
    alike = "nccl" in str(dist.get_backend()) or not device.cuda
    x = x if alike else x.cpu()  # gloo takes what lies on the host
    out, most = torch.empty_like(x), 0.0
    for _ in range(3):
        start = time.perf_counter()
        dist.all_to_all_single(out, x)
        dist.all_reduce(out)
        device.wait()
        most = max(most, 2 * x.nbytes / (time.perf_counter() - start) / 1e9)
    assert float(out[0]) == dist.get_world_size()
    return most


def ranks(device: Device, report: Report) -> None:
    """Compares losses on ranks with those of one process, and times steps.

    The aim is that they agree. Two ranks on one device say nothing of speed: they share it, and
    gloo copies messages through the host.
    """
    kind = device.home.type
    nccl = "nccl" if device.cuda and dist.is_nccl_available() else "gloo"
    add = report.table(
        f"{STEPS} steps of a GCN",
        *("by", "ms per step", "spread", "last loss", "off by", "aim: agrees"),
        "GB/s of collectives",
    )
    wanted: list[float] = []
    for name, how in (
        ("one process", None),
        ("two ranks on one device, gloo", (2, "gloo")),
        (f"one rank, {nccl}", (1, nccl)),
    ):
        if report.over:
            add(name, "no time was left", *[""] * 5)
            continue
        report.doing = name
        try:
            found = _found(how, kind, device.smoke, min(TIMEOUT, report.left))
        except Exception as error:  # one way that fails hides no other
            add(name, failure(error), *[""] * 5)
            continue
        losses, seconds, rate = found
        wanted = wanted or losses
        middle = statistics.median(seconds)
        off = max(abs(a - b) for a, b in zip(losses, wanted, strict=True))
        judged = (MET if off < CLOSE else MISSED) if how else ""
        spread = f"{100 * (max(seconds) - min(seconds)) / middle:.0f} %"
        add(name, middle * 1e3, spread, losses[-1], off, judged, rate or "")


def _found(how: Any, kind: str, smoke: bool, timeout: float) -> Any:
    if how is None:
        return steps(kind, smoke)
    count, backend = how
    return pdc.launch(in_group, count, backend, kind, smoke, timeout=timeout)[0]


def in_group(backend: str, kind: str, smoke: bool) -> Any:
    """Joins a process group of a back end, and trains in it."""
    dist.init_process_group(backend)
    try:
        return steps(kind, smoke)
    finally:
        dist.destroy_process_group()

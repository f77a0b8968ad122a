"""What `sampling.py` and `test_sampling.py` measure: competitors, sampling, loading.

Competitors are built alike, and take turns on the same threads; a peer that cannot be
imported is left out.
"""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import spmm as bench
import torch
import torch_geometric
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.sampler import NodeSamplerInput

from pyg_distcomm import kernels
from pyg_distcomm.kernels import threads as pool
from pyg_distcomm.kernels.sample_ops import Request
from pyg_distcomm.loader import DistNeighborLoader, LoaderOptions
from pyg_distcomm.loader.batcher import Batcher
from pyg_distcomm.sampling.graph_source import read_topology

OURS, PYG_LIB, TORCH_SPARSE = "pyg_distcomm", "PyG, pyg-lib", "PyG, torch-sparse"
GRAPHBOLT = "GraphBolt"
FAN_OUTS = ((15, 10, 5), (10, 10))
BULKS = (1, 2, 4, 8, 16, 32)
BATCH, WIDTH, SHARE = 1024, 100, 0.1
MOST = 32  # batches whose phases are timed
EDGES = {21: 12}  # edges drawn for a node, before they are mirrored; else 8
MIB = 2**20

Ways = dict[str, Callable[[], Any]]


# The problem and the competitors ----------------------------------------------------


def graph(scale: int) -> Data:
    """Returns the R-MAT graph, with features."""
    row, col, n = bench.rmat(scale, EDGES.get(scale, 8))
    x = torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(0))
    return Data(x=x, edge_index=torch.stack([row, col]))


def seeds(data: Data, share: float = SHARE) -> Tensor:
    """Returns the nodes of an epoch, the same for all competitors."""
    order = torch.randperm(data.num_nodes, generator=torch.Generator().manual_seed(1))
    return order[: max(int(share * data.num_nodes), 1)]


def missing(name: str) -> str | None:
    """Says why a competitor cannot take part, if so."""
    typing = torch_geometric.typing
    if name == PYG_LIB and not typing.WITH_PYG_LIB:
        return "pyg-lib is not installed"
    if name == TORCH_SPARSE and not typing.WITH_TORCH_SPARSE:
        return "torch-sparse is not installed"
    if name == GRAPHBOLT and not os.environ.get("PEER_PYTHON"):
        return "PEER_PYTHON does not name an interpreter with GraphBolt"
    return None


def present() -> list[str]:
    """Returns the competitors that run in this process, ours first."""
    return [name for name in (OURS, PYG_LIB, TORCH_SPARSE) if missing(name) is None]


@contextmanager
def backed_by(name: str) -> Iterator[None]:
    """Lets PyG sample with the named library inside the block."""
    typing = torch_geometric.typing
    before = typing.WITH_PYG_LIB
    typing.WITH_PYG_LIB = before and name == PYG_LIB
    try:
        yield
    finally:
        typing.WITH_PYG_LIB = before


def loader(
    name: str, data: Data, fan_out: tuple[int, ...], nodes: Tensor, **options: Any
) -> NeighborLoader:
    """Builds a competitor's loader, by arguments of PyG's and `LoaderOptions` for ours."""
    kind = DistNeighborLoader if name == OURS else NeighborLoader
    with backed_by(name), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kind(data, list(fan_out), nodes, batch_size=BATCH, **options)


def sample(name: str, sampler: Any, nodes: Tensor) -> int:
    """Samples all batches, each on one thread of torch's many; returns their edges."""
    batches = nodes.split(BATCH)
    edges = [0] * len(batches)

    def one(k: int) -> None:
        with pool.limited(1):
            out = sampler.sample_from_nodes(NodeSamplerInput(None, batches[k]))
        edges[k] = out.row.numel()

    with backed_by(name):
        pool.run(one, [(k,) for k in range(len(batches))])
    return sum(edges)


def load(name: str, batches: NeighborLoader, most: int | None = None) -> int:
    """Loads an epoch, or its first batches; returns their seeds."""
    with backed_by(name):
        return sum(batch.batch_size for batch in islice(iter(batches), most))


# Measurements -----------------------------------------------------------------------


def measure(ways: Ways, rounds: int) -> dict[str, float]:
    """Returns the median seconds of each way, which take turns."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            found[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in found.items()}


def sampling(data: Data, nodes: Tensor, rounds: int) -> list[tuple]:
    """Times sampling alone: (fan-outs, threads, who, seeds/s, edges/s, times ours)."""
    rows = []
    for fan_out in FAN_OUTS:
        samplers = {
            name: loader(name, data, fan_out, nodes).node_sampler for name in present()
        }
        for threads in (1, 2):
            with bench.using_threads(threads):
                edges = {
                    name: sample(name, sampler, nodes)
                    for name, sampler in samplers.items()
                }
                times = measure(
                    {
                        name: lambda n=name, s=sampler: sample(n, s, nodes)
                        for name, sampler in samplers.items()
                    },
                    rounds,
                )
            for name, t in times.items():
                per_second = round(len(nodes) / t), round(edges[name] / t)
                who = str(list(fan_out)), threads, name
                rows.append((*who, *per_second, t / times[OURS]))
    return rows


def loading(
    data: Data, nodes: Tensor, fan_out: tuple[int, ...], threads: int, rounds: int
) -> dict[str, float]:
    """Times an epoch of each whole loader, features and all."""
    ways = {}
    with bench.using_threads(threads):
        for name in present():
            for workers in (0,) if name == OURS or threads == 1 else (0, 2):
                made = loader(name, data, fan_out, nodes, num_workers=workers)
                load(name, made, 2)
                label = name if name == OURS else f"{name}, {workers} workers"
                ways[label] = lambda n=name, m=made: load(n, m)
        return measure(ways, rounds)


def bulks(data: Data, nodes: Tensor, fan_out: tuple[int, ...], rounds: int) -> dict:
    """Times our epoch for each bulk size, on two threads."""
    ways = {}
    with bench.using_threads(2):
        for k in BULKS:
            made = loader(
                OURS, data, fan_out, nodes, options=LoaderOptions(bulk_size=k)
            )
            load(OURS, made, 2)
            ways[k] = lambda m=made: load(OURS, m)
        return measure(ways, rounds)


def phases(
    data: Data, nodes: Tensor, fan_out: tuple[int, ...], rounds: int
) -> dict[str, float]:
    """Times the phases of our loader, and what they cannot go below, for one batch.

    All run on one thread, whose processor time is taken: what others do on the machine
    slows it down, but is not counted. The floor is the drawn edges at the bare kernel's
    rate, and the gathered bytes at the rate of a gather of random rows into memory that
    is used again.
    """
    ours = LoaderOptions(bulk_size=1, prefetch=0, seed=0)
    made = loader(OURS, data, fan_out, nodes, options=ours)
    assembly, draw = (
        Batcher(made).collate,
        kernels.neighbor_sampler(read_topology(data).graph),
    )
    sampler, outs = made.node_sampler, []
    x = data.x.view(torch.float64)  # rows are copied as whole words
    seeds = nodes.split(BATCH)[:MOST]
    requests = [Request(((0, s),), (fan_out,), key=k) for k, s in enumerate(seeds)]
    inputs = [NodeSamplerInput(torch.arange(len(s)), s) for s in seeds]
    with bench.using_threads(1):
        load(OURS, made, 2)
        found = {
            "kernel": typical(draw, requests),
            "sampling": typical(
                lambda i: outs.append(sampler.sample_from_nodes(i)), inputs
            ),
            "gathering": typical(lambda o: kernels.gather_rows(x, o.node), outs),
        }
        found["assembly"] = typical(assembly, outs) - found["gathering"]
        mixed = [o.node[torch.randperm(len(o.node))] for o in outs]
        room = x.new_zeros(max(map(len, mixed)), x.size(1))
        found["rows"] = typical(
            lambda i: kernels.gather_rows(x, i, room[: len(i)]), mixed
        )
        epochs = typical(lambda _: load(OURS, made), range(rounds))
    found["loader"] = epochs / len(made)
    found["floor"] = found["kernel"] + found["rows"]
    return {
        **found,
        "edges": statistics.median(o.row.numel() for o in outs),
        "bytes": statistics.median(4 * WIDTH * len(o.node) for o in outs),
    }


def typical(call: Callable[[Any], Any], items: Iterable[Any]) -> float:
    """Returns the median processor seconds that a call takes on this thread."""
    found = []
    for item in items:
        start = time.thread_time()
        call(item)
        found.append(time.thread_time() - start)
    return statistics.median(found)


def resident(field: str) -> int:
    """Reads VmRSS or VmHWM of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{field} is not in /proc/self/status")


def alone(name: str, file: str, fan_out: tuple[int, ...]) -> dict[str, float]:
    """Measures one competitor in this process: its first batches, and its memory."""
    torch.set_num_threads(2)
    small = graph(10)
    load(name, loader(name, small, fan_out, seeds(small)))
    stored = torch.load(file, weights_only=True)
    nodes, data = stored.pop("seed"), Data(**stored)
    idle = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    found = {}
    for when in ("first", "again"):
        start = time.perf_counter()
        load(name, made := loader(name, data, fan_out, nodes), 1)
        found[when] = time.perf_counter() - start
    load(name, made)
    return {**found, "idle": idle / MIB, "more": (resident("VmHWM") - idle) / MIB}

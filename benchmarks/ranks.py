"""What the ranks of `partitioned.py` and `shaped.py` do: build loaders and take turns.

All ways to load are built first, alike on all ranks, and each loads one epoch that is
not counted; then they take turns, epoch by epoch, with a barrier before each. Memory that
a loader uses again is its own, as in training.
"""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from loaders import BATCH, OURS, resident

import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives
from pyg_distcomm.kernels import memory
from pyg_distcomm.loader import (
    DistFeatureStore,
    DistLayerLoader,
    DistNeighborLoader,
    LoaderOptions,
)

PEER = "PyG, RPC"


@dataclass(frozen=True)
class Case:
    """One way to load.

    Args:
        copies: c, how many ranks hold each block.
        place: where in-edges are drawn, "owner" or "requester".
        bulk: minibatches made at a time.
        rows: whether features are fetched; sampling alone without them.
        cache: fraction of the nodes whose rows every rank keeps.
        wire: how rows travel.
        home: whether a rank's seeds are its own nodes, not dealt out over all ranks.
        who: ours, or the peer.
        options: the peer's own.
    """

    copies: int = 1
    place: str = "owner"
    bulk: int | str = "auto"
    rows: bool = True
    cache: float = 0
    wire: str | None = None
    home: bool = False
    who: str = OURS
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Task:
    """What is loaded: a folder of parts, seeds, fan-outs (or nodes of each layer)."""

    folder: str
    seeds: str
    fan_out: tuple[int, ...]
    layers: bool = False
    most: int | None = None  # minibatches of an epoch, for each rank


@dataclass
class Found:
    """One epoch on one rank, or what is typical of several; bytes are received.

    `work` is processor seconds of all threads of the rank: what else runs on the machine
    makes `seconds` longer, and hardly changes it.
    """

    seconds: float = 0.0
    work: float = 0.0
    edges: int = 0
    nodes: int = 0
    seeds: int = 0
    computing: dict[str, float] = field(default_factory=dict)
    waiting: dict[str, float] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)


Epoch = Callable[[], Found]


@contextmanager
def timed() -> Iterator[Found]:
    """Fills in the seconds that a block takes."""
    found, start, work = Found(), time.perf_counter(), time.process_time()
    yield found
    found.seconds = time.perf_counter() - start
    found.work = time.process_time() - work


def count(batch: Any, found: Found) -> None:
    """Adds what a minibatch holds."""
    found.edges += batch.edge_index.size(1)
    found.nodes += batch.num_nodes
    found.seeds += batch.batch_size


def share_of(task: Task, mesh: pdc.Mesh, rows: bool = True) -> Any:
    """Reads this rank's share, in memory, with or without features."""
    share = pdc.load_partition(task.folder, mesh)
    return share if rows else without_rows(share)


def without_rows(share: Any) -> Any:
    """Returns the share without its features: to sample alone."""
    bare = copy.copy(share)
    del bare.x
    return bare


def seeds_of(task: Task, case: Case, mesh: pdc.Mesh, share: Any) -> torch.Tensor:
    """Returns the seeds of an epoch: all of them, or those among this rank's nodes."""
    nodes = torch.load(task.seeds, weights_only=True)
    if not case.home or mesh.size == 1:
        return nodes
    return nodes[owner_of(share)[nodes] == mesh.rank]


def owner_of(share: Any) -> torch.Tensor:
    """Returns the rank that owns each node [n]."""
    nodes = share.edge_index.nodes
    return nodes.partition.owner_of(torch.arange(nodes.total)).long()


def store_of(share: Any, mesh: pdc.Mesh, case: Case) -> DistFeatureStore | None:
    """Returns a store with a cache or a codec, if the case wants one."""
    if not (case.cache or case.wire):
        return None
    channel = pdc.comm.axis.new_process_grid(mesh, case.copies, "fetch")
    return DistFeatureStore.from_data(
        share, channel, wire=case.wire, cache=case.cache, ranking="degree"
    )


def loader_of(case: Case, task: Task, share: Any, mesh: pdc.Mesh) -> Any:
    """Builds our loader."""
    data = share if case.rows else without_rows(share)
    kind = DistLayerLoader if task.layers else DistNeighborLoader
    return kind(
        data,
        list(task.fan_out),
        input_nodes=seeds_of(task, case, mesh, share),
        batch_size=BATCH,
        shuffle=True,
        options=LoaderOptions(
            seed=0,
            bulk_size=case.bulk,
            replication=case.copies,
            sample_at=case.place,
            features=store_of(share, mesh, case) if case.rows else None,
        ),
    )


def epoch_of(loader: Any, mesh: pdc.Mesh, most: int | None) -> Epoch:
    """Returns what loads one epoch and tells where its time went."""

    def epoch() -> Found:
        mesh.ledger.reset()
        with timed() as found:
            for batch in islice(iter(loader), most):
                count(batch, found)
        for name, phase in loader.phases.by_name.items():
            found.computing[name] = phase.computing
            found.waiting[name] = phase.waiting
        loader._end_epoch()  # an epoch cut short ends before its bytes are read
        for (op, axis), entry in mesh.ledger.entries.items():
            purpose = axis.split(":")[0]
            if purpose in ("sample", "fetch"):
                key = f"{purpose}: {op}"
                found.bytes[key] = found.bytes.get(key, 0) + entry.bytes
        return found

    return epoch


def ways_of(cases: Sequence[Case], task: Task, mesh: pdc.Mesh) -> list[Epoch]:
    """Builds what the cases say; collective."""
    share, peer, ways = share_of(task, mesh), None, []
    for case in cases:
        if case.who == PEER:
            import rpc_peer

            peer = peer or rpc_peer.Peer(task, mesh)
            nodes = seeds_of(task, case, mesh, share)
            nodes = nodes if case.home else nodes[mesh.rank :: mesh.size]
            ways.append(peer.epoch_of(case, nodes, task.most))
        else:
            ways.append(epoch_of(loader_of(case, task, share, mesh), mesh, task.most))
    return ways


def take_turns(
    cases: Sequence[Case], task: Task, rounds: int
) -> list[tuple[Case, Found]]:
    """Runs on a rank: returns what is typical of an epoch of each case."""
    mesh = pdc.init()
    ways = ways_of(cases, task, mesh)
    times: list[list[Found]] = [[] for _ in cases]
    for turn in range(rounds + 1):
        for way, found in zip(ways, times, strict=True):
            collectives.barrier(mesh.world)
            one = way()
            if turn:
                found.append(one)
    collectives.barrier(mesh.world)  # a peer's rank is asked until the last one is done
    return [(c, typical(found)) for c, found in zip(cases, times, strict=True)]


def typical(found: Sequence[Found]) -> Found:
    """Returns the median of each figure."""
    out = Found()
    for name, value in asdict(out).items():
        every = [getattr(one, name) for one in found]
        if isinstance(value, dict):
            keys = dict.fromkeys(k for one in every for k in one)
            middle = {k: statistics.median(o.get(k, 0) for o in every) for k in keys}
            setattr(out, name, middle)
        else:
            setattr(out, name, statistics.median(every))
    return out


def joined(ranks: Sequence[Found]) -> Found:
    """Joins the ranks: the slowest's seconds, sums of counts, means of phases."""
    out = Found(max(one.seconds for one in ranks), sum(one.work for one in ranks))
    for name in ("edges", "nodes", "seeds"):
        setattr(out, name, int(sum(getattr(one, name) for one in ranks)))
    for name, share in (
        ("computing", len(ranks)),
        ("waiting", len(ranks)),
        ("bytes", 1),
    ):
        every = [getattr(one, name) for one in ranks]
        keys = dict.fromkeys(k for one in every for k in one)
        setattr(out, name, {k: sum(o.get(k, 0) for o in every) / share for k in keys})
    return out


def run(
    cases: Sequence[Case], task: Task, size: int, rounds: int
) -> Iterator[tuple[Case, Found]]:
    """Starts the ranks; yields what they found for each case, joined."""
    every = pdc.launch(take_turns, size, list(cases), task, rounds, threads=1)
    for row in zip(*every, strict=True):
        yield row[0][0], joined([found for _, found in row])


# Memory -----------------------------------------------------------------------------


def proportional() -> int:
    """Reads the memory of this process, what it shares divided by who shares it."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("Pss is not in /proc/self/smaps_rollup")


def memory_of(case: Case, small: Task, task: Task) -> dict[str, float]:
    """Runs on a rank: its memory above idle, which is after an epoch of a small graph."""
    mesh = pdc.init()
    share = share_of(small, mesh)
    loader = loader_of(case, small, share, mesh)
    epoch_of(loader, mesh, None)()
    del loader, share
    gc.collect()
    memory.give_back()
    idle, idle_shared = resident("VmRSS"), proportional()
    Path("/proc/self/clear_refs").write_text("5")
    share = share_of(task, mesh)
    edges, nodes = len(share.edge_index.edges), len(share.edge_index.nodes)
    loader = loader_of(case, task, share, mesh)
    gc.collect()
    built = resident("VmRSS") - idle
    for _ in range(2):
        epoch_of(loader, mesh, task.most)()
    return {
        "edges": edges,
        "nodes": nodes,
        "built": built,
        "peak": resident("VmHWM") - idle,
        "pss": proportional() - idle_shared,
    }

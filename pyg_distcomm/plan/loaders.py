"""Plans the loader of a partitioned graph: how many copies, how large bulks, drawn where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch_geometric.data import Data, HeteroData

from pyg_distcomm.comm.ledger import format_table
from pyg_distcomm.partition.partition import Partition
from pyg_distcomm.plan.machine import Machine
from pyg_distcomm.plan.minibatch_bytes import (
    MinibatchProbe,
    Traffic,
    TrafficModel,
    candidates,
    probe_loader,
)
from pyg_distcomm.plan.plans import MOST_LINES, Ranked, show_bytes
from pyg_distcomm.sampling.neighbor_sampler import ROUNDS
from pyg_distcomm.sampling.partitioned import SAMPLE_AT

BULKS = (1, 2, 4, 8, 16)
PROBED = 16  # minibatches of each rank
# bulks that are in memory: one in use, one in the making, its rows, and those that wait
_BESIDE = 3
_EDGE, _NODE = 8, 8  # bytes of a block's topology
# what has no price: it changes what travels in ways that are not counted here
_UNPRICED = {
    "subgraph_type": ("directional",),
    "time_attr": (None,),
    "input_time": (None,),
    "neighbor_sampler": (None,),
    "backend": (None,),
    "features": (None,),
    "topology": ("auto", "partitioned"),
    "batch_sampler": (None,),
    "sampler": (None,),
    "num_workers": (0,),
}
_CHOSEN = ("replication", "bulk_size", "sample_at")


@dataclass(frozen=True)
class LoaderPlan:
    """One way to load the minibatches of a partitioned graph, and what an epoch costs.

    Args:
        replication: c, the copies of each block.
        bulk_size: k, the minibatches sampled at a time.
        sample_at: "owner" or "requester".
        sample_by_rank: bytes that each rank receives to sample an epoch.
        fetch_by_rank: those of rows of features.
        exact: whether the probe was the epoch; else it is scaled to it.
        messages: that a rank sends in an epoch.
        seconds: estimated for a rank's epoch of loading, without training.
        memory: bytes beside the share: the block's copies, and the bulks in flight.
        reason: why it is refused; None for one that can be run.
    """

    replication: int
    bulk_size: int
    sample_at: str
    sample_by_rank: tuple[int, ...]
    fetch_by_rank: tuple[int, ...]
    exact: bool
    messages: int
    seconds: float
    memory: int
    reason: str | None = None

    @property
    def bytes_by_rank(self) -> tuple[int, ...]:
        """Bytes that each rank receives in an epoch."""
        both = zip(self.sample_by_rank, self.fetch_by_rank, strict=True)
        return tuple(a + b for a, b in both)

    @property
    def bytes(self) -> int:
        """Bytes that the busiest rank receives in an epoch."""
        return max(self.bytes_by_rank)

    @property
    def total_bytes(self) -> int:
        """Bytes that all ranks receive in an epoch."""
        return sum(self.bytes_by_rank)

    @property
    def options(self) -> dict[str, Any]:
        """Returns the arguments of the loader, as `DistNeighborLoader` takes them."""
        return {name: getattr(self, name) for name in _CHOSEN}

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for JSON."""
        names = ("exact", "messages", "seconds", "memory", "reason")
        return {
            **self.options,
            "sample_by_rank": list(self.sample_by_rank),
            "fetch_by_rank": list(self.fetch_by_rank),
            **{name: getattr(self, name) for name in names},
        }

    def __str__(self) -> str:
        return (
            f"replication={self.replication}, bulk_size={self.bulk_size}, "
            f"sample_at={self.sample_at!r}: {show_bytes(self.bytes)} a rank, "
            f"{show_bytes(self.total_bytes)} in all, {self.messages} messages, about "
            f"{self.seconds:.3g} s an epoch, {show_bytes(self.memory)} beside the share"
        )


@dataclass(frozen=True, eq=False)
class LoaderPlans(Ranked[LoaderPlan]):
    """All ways to load that can be run, the fastest first; `print` shows them as a table.

    Args:
        ranked: what can be run.
        refused: what needs more memory than there is.
        about: the graph and the minibatches, in words.
        machine: the figures for seconds.
        partition: who owns which node.
    """

    ranked: tuple[LoaderPlan, ...]
    refused: tuple[LoaderPlan, ...]
    about: str
    machine: Machine
    partition: Partition

    @property
    def best(self) -> LoaderPlan:
        """The plan estimated to be the fastest.

        Raises:
            ValueError: if none can be run.
        """
        if self.ranked:
            return self.ranked[0]
        lean = min(self.refused, key=lambda one: one.memory)
        raise ValueError(f"no plan can be run; the leanest {lean.reason}")

    def of(self, replication: int, bulk_size: int, sample_at: str) -> LoaderPlan:
        """Returns the plan of one choice, refused or not."""
        wanted = replication, bulk_size, sample_at
        for one in (*self.ranked, *self.refused):
            if tuple(one.options.values()) == wanted:
                return one
        raise ValueError(f"no plan has (replication, bulk_size, sample_at) = {wanted}")

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for JSON."""
        return {
            "about": self.about,
            "machine": self.machine.to_dict(),
            "plans": [one.to_dict() for one in self.ranked],
            "refused": [one.to_dict() for one in self.refused],
        }

    def __str__(self) -> str:
        head = ("c", "k", "at", "sampling, all", "features, all", "bytes, most")
        head += ("messages", "seconds *", "memory")  # type: ignore[assignment]
        rows = [
            (
                one.replication,
                one.bulk_size,
                one.sample_at,
                show_bytes(sum(one.sample_by_rank)),
                show_bytes(sum(one.fetch_by_rank)),
                show_bytes(one.bytes),
                one.messages,
                f"{one.seconds:.3g}",
                show_bytes(one.memory),
            )
            for one in self.ranked[:MOST_LINES]
        ]
        table = format_table(head, rows) if rows else "no plan can be run"
        exact = "of the epoch" if self._exact else "scaled from a probe to the epoch"
        parts = [f"loader    {self.about}", str(self.machine), "", table]
        parts.append(
            f"bytes are {exact}; * an estimate, of loading alone; memory is beside the share"
        )
        if self.refused:
            lean = min(self.refused, key=lambda one: one.memory)
            parts += ["", f"refused: {len(self.refused)}; the leanest {lean.reason}"]
        return "\n".join(parts)

    @property
    def _exact(self) -> bool:
        return all(one.exact for one in (*self.ranked, *self.refused))

    def __repr__(self) -> str:
        best = self.ranked[0] if self.ranked else "none can be run"
        return f"LoaderPlans({len(self.ranked)} for {self.about}; best: {best})"


def plan_loader(
    data: Data | HeteroData,
    owners: Partition,
    loader: Mapping[str, Any],
    machine: Machine,
    memory: float | None,
) -> LoaderPlans:
    """Prices every (c, k, place) of a loader, and ranks them; see `plan`.

    Minibatches do not depend on these, so that a probe of them is drawn once, on this process.
    If it is the epoch, bytes are those that the ledger will count in the first epoch with the
    same seed, on each rank; else they are in proportion.

    Args:
        data: the whole graph.
        owners: who owns which node, of all types one after the other.
        loader: arguments of `DistNeighborLoader`, or, with `num_nodes_per_layer`, of
            `DistLayerLoader`, as {"num_neighbors": [15, 10, 5], "batch_size": 1024}; of
            replication, bulk_size and sample_at those left out are chosen. "probe" is how
            many minibatches of each rank are drawn (16).
        machine: for seconds.
        memory: bytes that a rank may use beside its share.

    Raises:
        ValueError, TypeError: for arguments that the loader refuses, or that have no price.
    """
    asked = dict(loader)
    most = asked.pop("probe", PROBED)
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise ValueError(f"probe must be a whole number from 1 on, got {most!r}")
    fixed = {name: asked.pop(name) for name in _CHOSEN if name in asked}
    _check(asked)
    size = owners.num_parts
    copies, bulks, places = _choices(fixed, size)
    asked.pop("topology", None)  # of a share; the probe's graph is whole
    probe = probe_loader(data, owners, asked, most)
    model, limit = TrafficModel(probe), machine.memory if memory is None else memory
    found = []
    for c in copies:
        for k in _useful(bulks, probe.rounds):
            for place in places:
                traffic = model.price(c, min(k, probe.rounds), place)
                found.append(_plan(data, probe, traffic, (c, k, place), machine, limit))
    found.sort(key=_merit)
    kind = "layer-wise" if probe.layered else "node-wise"
    about = (
        f"{owners.num_nodes:,} nodes, {data.num_edges:,} edges, {size} ranks; {kind}, "
        f"{probe.rounds} minibatches a rank, {probe.taken} of them probed"
    )
    return LoaderPlans(
        tuple(one for one in found if one.reason is None),
        tuple(one for one in found if one.reason is not None),
        about,
        machine,
        owners,
    )


def _check(asked: Mapping[str, Any]) -> None:
    given = [name for name in ("num_neighbors", "num_nodes_per_layer") if name in asked]
    if len(given) != 1:
        raise ValueError(
            "loader needs either num_neighbors, of DistNeighborLoader, or "
            f"num_nodes_per_layer, of DistLayerLoader; got {sorted(asked)}"
        )
    draws = asked.get("draws", asked.get("rule"))
    if draws in ROUNDS:
        raise ValueError(
            f"draws={draws!r} does not sample a partitioned graph where it lies, which "
            "is what is planned; take draws='labor'"
        )
    for name, priced in _UNPRICED.items():
        if name in asked and not any(
            asked[name] is p or asked[name] == p for p in priced
        ):
            raise ValueError(
                f"{name}={asked[name]!r} changes what travels, and plan has no price for it; "
                "leave it out for an estimate without it"
            )


def _choices(
    fixed: Mapping[str, Any], size: int
) -> tuple[list[int], list[int], list[str]]:
    """Returns the copies, bulks and places to price."""
    fits = list(candidates(size))
    c, k = fixed.get("replication"), fixed.get("bulk_size", "auto")
    place = fixed.get("sample_at")
    if c is not None and c not in fits:
        raise ValueError(f"replication={c!r} must divide {size} ranks: one of {fits}")
    if k != "auto" and (isinstance(k, bool) or not isinstance(k, int) or k < 1):
        raise ValueError(f"bulk_size must be 'auto' or at least 1, got {k!r}")
    if place is not None and place not in SAMPLE_AT:
        raise ValueError(f"sample_at must be one of {SAMPLE_AT}, got {place!r}")
    return (
        fits if c is None else [c],
        list(BULKS) if k == "auto" else [k],
        list(SAMPLE_AT) if place is None else [place],
    )


def _useful(bulks: Sequence[int], rounds: int) -> list[int]:
    """Leaves out bulks larger than the first that holds the epoch."""
    least = min((k for k in bulks if k >= rounds), default=max(bulks))
    return [k for k in bulks if k <= least]


def _plan(
    data: Data | HeteroData,
    probe: MinibatchProbe,
    traffic: Traffic,
    choice: tuple[int, int, str],
    machine: Machine,
    limit: float | None,
) -> LoaderPlan:
    c, k, place = choice
    bulks = -(-probe.rounds // min(k, probe.rounds))
    scale = bulks / traffic.bulks if not probe.whole else 1.0
    if not probe.whole and probe.taken % k:  # the last bulk of the probe is not full
        scale = probe.rounds / probe.taken
    # double: float32 has no place for bytes beyond 2^24
    sample = (traffic.sample.double() * scale).round().long() + traffic.fixed
    fetch = (traffic.fetch.double() * scale).round().long() + traffic.refresh
    messages = round(traffic.messages * scale)
    most = int((sample + fetch).max())
    wire = machine.latency * messages + most / machine.bandwidth
    # what travels is also written, read and put in its place: about three passes
    work = probe.seconds * probe.rounds + 3 * most / machine.stream
    found = LoaderPlan(
        c,
        k,
        place,
        tuple(sample.tolist()),
        tuple(fetch.tolist()),
        probe.whole,
        messages,
        wire + work,
        _memory(data, probe, c, min(k, probe.rounds)),
    )
    if limit is not None and found.memory > limit:
        need, may = show_bytes(found.memory), show_bytes(limit)
        return replace(
            found, reason=f"needs {need} beside the share, and may use {may}"
        )
    return found


def _memory(data: Data | HeteroData, probe: MinibatchProbe, c: int, k: int) -> int:
    """Returns the bytes of the fullest block, and of the bulks in flight."""
    by_block, blocks = probe.owner // c, probe.size // c
    begin, block = 0, torch.zeros(blocks, dtype=torch.int64)
    counts = (
        [data.num_nodes] if isinstance(data, Data) else data.num_nodes_dict.values()
    )
    for count, width in zip(counts, probe.row_bytes[0], strict=True):
        nodes = torch.bincount(by_block[begin : begin + int(count)], minlength=blocks)
        block += (_NODE + width * (c > 1)) * nodes  # own rows are read where they are
        begin += int(count)
    each = zip(probe.degree, probe.weight, probe.row_bytes[1], strict=True)
    for degree, weight, width in each:
        edges = torch.zeros_like(block).index_add_(0, by_block, degree)
        block += (_EDGE + weight + width * (c > 1)) * edges
    return int(block.max()) + round((_BESIDE + 1) * k * probe.batch_bytes)


def _merit(found: LoaderPlan) -> tuple[Any, ...]:
    """Fastest first; of equals the one with fewer bytes, then with less memory."""
    place = SAMPLE_AT.index(found.sample_at)
    return found.seconds, found.total_bytes, found.memory, found.bulk_size, place

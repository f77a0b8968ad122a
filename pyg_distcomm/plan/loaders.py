"""Plans the loader of a partitioned graph: replication, bulk_size and sample_at."""

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
# bulks in memory beside the one in use: one in the making, its rows, and those that wait
_EXTRA_BULKS = 3
_EDGE, _NODE = 8, 8  # bytes of a block's topology
# options that cannot be priced, with the values that are allowed: others change the traffic
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
    """One way to load the minibatches of a partitioned graph, and the cost of an epoch.

    Args:
        replication: c, the copies of each block.
        bulk_size: k, the minibatches sampled at a time.
        sample_at: "owner" or "requester".
        sample_by_rank: bytes that each rank receives to sample an epoch.
        fetch_by_rank: bytes of feature rows that each rank receives in an epoch.
        exact: whether the probe was a whole epoch; otherwise bytes are scaled to an epoch.
        messages: the messages that a rank sends in an epoch.
        seconds: the estimated seconds of a rank to load an epoch, without training.
        memory: bytes beside the share: the block's copies, and the bulks in flight.
        reason: why it is refused; None for a plan that can be run.
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
    """All plans of a loader that can be run, the fastest first; `print` shows a table.

    Args:
        ranked: the plans that can be run.
        refused: the plans that need more memory than allowed.
        about: a description of the graph and the minibatches.
        machine: the figures for seconds.
        partition: the owners of nodes.
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
        leanest = min(self.refused, key=lambda one: one.memory)
        raise ValueError(f"no plan can be run; the leanest {leanest.reason}")

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
            leanest = min(self.refused, key=lambda one: one.memory)
            parts += ["", f"refused: {len(self.refused)}; the leanest {leanest.reason}"]
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

    Minibatches do not depend on (c, k, place), so a probe of them is drawn once, in this
    process. If it is a whole epoch, bytes are those that the ledger counts on each rank in the
    first epoch with the same seed; otherwise they are scaled.

    Args:
        data: the whole graph.
        owners: the owners of the nodes of all types, type after type.
        loader: arguments of `DistNeighborLoader`, or, with `num_nodes_per_layer`, of
            `DistLayerLoader`, as {"num_neighbors": [15, 10, 5], "batch_size": 1024}; plans
            choose replication, bulk_size and sample_at unless they are given. "probe" is the
            number of minibatches that are drawn for each rank (16).
        machine: the figures for seconds.
        memory: bytes that a rank may use beside its share.

    Raises:
        ValueError, TypeError: for arguments that the loader refuses, or that have no price.
    """
    arguments = dict(loader)
    most = arguments.pop("probe", PROBED)
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise ValueError(f"probe must be a whole number from 1 on, got {most!r}")
    fixed = {name: arguments.pop(name) for name in _CHOSEN if name in arguments}
    _check_arguments(arguments)
    size = owners.num_parts
    copies, bulks, places = _options_to_price(fixed, size)
    arguments.pop("topology", None)  # of a share; the probe's graph is whole
    probe = probe_loader(data, owners, arguments, most)
    model, limit = TrafficModel(probe), machine.memory if memory is None else memory
    plans = []
    for c in copies:
        for k in _distinct_bulks(bulks, probe.rounds):
            for place in places:
                traffic = model.price(c, min(k, probe.rounds), place)
                plans.append(_plan(data, probe, traffic, (c, k, place), machine, limit))
    plans.sort(key=_sort_key)
    kind = "layer-wise" if probe.layered else "node-wise"
    about = (
        f"{owners.num_nodes:,} nodes, {data.num_edges:,} edges, {size} ranks; {kind}, "
        f"{probe.rounds} minibatches a rank, {probe.taken} of them probed"
    )
    return LoaderPlans(
        tuple(one for one in plans if one.reason is None),
        tuple(one for one in plans if one.reason is not None),
        about,
        machine,
        owners,
    )


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    given = [
        name for name in ("num_neighbors", "num_nodes_per_layer") if name in arguments
    ]
    if len(given) != 1:
        raise ValueError(
            "loader needs either num_neighbors, of DistNeighborLoader, or "
            f"num_nodes_per_layer, of DistLayerLoader; got {sorted(arguments)}"
        )
    draws = arguments.get("draws", arguments.get("rule"))
    if draws in ROUNDS:
        raise ValueError(
            f"draws={draws!r} does not sample a partitioned graph, which plan needs; take "
            "draws='labor'"
        )
    for name, priced in _UNPRICED.items():
        if name in arguments and not any(
            arguments[name] is p or arguments[name] == p for p in priced
        ):
            raise ValueError(
                f"{name}={arguments[name]!r} changes what travels, and plan cannot price it; "
                "leave it out for an estimate without it"
            )


def _options_to_price(
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


def _distinct_bulks(bulks: Sequence[int], rounds: int) -> list[int]:
    """Returns the bulk sizes up to the first that holds the whole epoch."""
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
    # bytes that travel are also written, read and stored: about three passes
    work = probe.seconds * probe.rounds + 3 * most / machine.stream
    plan = LoaderPlan(
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
    if limit is not None and plan.memory > limit:
        need, may = show_bytes(plan.memory), show_bytes(limit)
        return replace(plan, reason=f"needs {need} beside the share, and may use {may}")
    return plan


def _memory(data: Data | HeteroData, probe: MinibatchProbe, c: int, k: int) -> int:
    """Returns the bytes of the largest block, and of the bulks in flight."""
    by_block, blocks = probe.owner // c, probe.size // c
    begin, block = 0, torch.zeros(blocks, dtype=torch.int64)
    counts = (
        [data.num_nodes] if isinstance(data, Data) else data.num_nodes_dict.values()
    )
    for count, width in zip(counts, probe.row_bytes[0], strict=True):
        nodes = torch.bincount(by_block[begin : begin + int(count)], minlength=blocks)
        # with c = 1 rows are read from the share itself
        block += (_NODE + width * (c > 1)) * nodes
        begin += int(count)
    each = zip(probe.degree, probe.weight, probe.row_bytes[1], strict=True)
    for degree, weight, width in each:
        edges = torch.zeros_like(block).index_add_(0, by_block, degree)
        block += (_EDGE + weight + width * (c > 1)) * edges
    return int(block.max()) + round((_EXTRA_BULKS + 1) * k * probe.batch_bytes)


def _sort_key(plan: LoaderPlan) -> tuple[Any, ...]:
    """Sorts the fastest first; of equal ones, fewer bytes, then less memory."""
    place = SAMPLE_AT.index(plan.sample_at)
    return plan.seconds, plan.total_bytes, plan.memory, plan.bulk_size, place

"""Describes which rows of a tensor this rank holds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.comm import collectives, consistency
from pyg_distcomm.comm.ledger import balanced_split
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.kernels.memory import MemoryCap
from pyg_distcomm.partition.partition import Partition

_KEPT = 64  # values of one kind


def narrowed(ids: Tensor, total: int) -> Tensor:
    """Returns ids below `total` in the type in which they travel: int32 where it holds them."""
    return ids.int() if total <= 1 << 31 else ids


class Latest(OrderedDict[Any, Any]):
    """Keeps the values of the latest keys that were asked for or set.

    Ranks that ask alike keep alike, so a collective may make what is not found.

    Args:
        most: how many are kept.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __getitem__(self, key: Any) -> Any:
        self.move_to_end(key)
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """Returns the value of a key, if it is kept."""
        if key in self:
            self.move_to_end(key)
        return super().get(key, default)

    def made(self, key: Any, make: Callable[[], Any], *alive: Any) -> Any:
        """Returns the value of a key, made if it is not kept.

        Objects whose ids are in the key are to stay alive as long.
        """
        if key not in self:
            self[key] = make(), alive
        return self[key][0]

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        if len(self) > self._most:
            del self[next(iter(self))]


@dataclass(frozen=True, eq=False)
class Rows:
    """Describes the rows of a row-sharded tensor on this rank, and their total number.

    Args:
        gid: ids of this rank's rows, `[n_i]`, ascending; on the CPU.
        total: ids lie in [0, total).
        mesh: the ranks that share the tensor.
        partition: the owner of each id; None if unknown.
        whole: whether the ranks together hold every id (False behind a mask).
        known: the number of rows on all ranks, if known without communication.
        nodes: for the edges of a graph, the rows of its nodes.
        stacked: for the edges of a graph, makes an edge_index of sources and targets.
        memory: for the nodes of a graph, the memory cap of its layers; None is without one.
    """

    gid: Tensor
    total: int
    mesh: Mesh
    partition: Partition | None
    whole: bool = True
    known: int | None = None
    nodes: Rows | None = None
    stacked: Callable[..., Any] | None = field(default=None, repr=False)
    memory: MemoryCap | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.gid)

    @cached_property
    def count(self) -> int:
        """Returns the number of rows on all ranks.

        Collective once, over the mesh's control axis, behind a mask that was computed from
        row-sharded values; free everywhere else.
        """
        if self.whole:
            return self.total
        if self.known is not None:
            return self.known
        return consistency.count_rows(len(self), self.mesh)

    def gid_on(self, device: torch.device) -> Tensor:
        """Returns `gid` on a device; a copy is made once."""
        return self._copied("gid", device)

    def place_on(self, device: torch.device) -> Tensor:
        """Returns `place` on a device; a copy is made once."""
        return self._copied("gid" if self.whole else "place", device)

    def _copied(self, name: str, device: torch.device) -> Tensor:
        ids: Tensor = getattr(self, name)
        if ids.device == device:
            return ids
        if (name, device) not in self.derived:
            self.derived[name, device] = ids.to(device)
        return self.derived[name, device]  # type: ignore[no-any-return]

    @cached_property
    def derived(self) -> dict[Any, Any]:
        """Returns a cache of values derived from these rows, with the same lifetime."""
        return {}

    def latest(self, kind: str, most: int = _KEPT) -> Latest:
        """Returns the cache of values of one kind that are derived from these rows."""
        found: Latest | None = self.derived.get(kind)
        if found is None:
            found = self.derived[kind] = Latest(most)
        return found

    @cached_property
    def place(self) -> Tensor:
        """Returns the positions `[n_i]` of this rank's rows among all rows, in order of id.

        Collective once behind a mask: the ids of all ranks are gathered.
        """
        if self.whole:
            return self.gid
        return torch.searchsorted(self._gathered(self.gid)[0].sort().values, self.gid)

    def _gathered(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns ids of the rows of all ranks, and the number of each rank's; collective."""
        world = self.mesh.world
        sizes = [row[0] for row in collectives.all_gather_counts([len(self)], world)]
        sent = narrowed(ids, self.total)
        every = collectives.all_gather_rows(sent, sizes, world, op="plan").long()
        return every, torch.tensor(sizes)

    @cached_property
    def owners(self) -> Partition:
        """Returns the owners of the rows, by position; collective once behind a mask."""
        if self.partition is not None:
            return self.partition
        places, sizes = self._gathered(self.place)
        owner = torch.empty(len(places), dtype=torch.int64)
        owner[places] = torch.arange(len(sizes)).repeat_interleave(sizes)
        return Partition.from_owner(owner, self.mesh.size, len(places))

    def same_as(self, other: Rows) -> bool:
        """Returns whether both describe the same rows.

        For all nodes it compares owners, so that all ranks get the same answer.
        """
        if self is other:
            return True
        if self.total != other.total:
            return False
        mine, theirs = self.partition, other.partition
        if self.whole and other.whole and mine is not None and theirs is not None:
            return mine is theirs or mine.same_as(theirs)
        return torch.equal(self.gid, other.gid)

    def matches(self, other: Rows) -> bool:
        """Returns whether both describe the same rows on every rank.

        Price: two words of each rank, once, for two selections that were made separately.
        """
        if self is other:
            return True
        facts = [
            (r.total, r.whole, r.partition is None, r.nodes is None)
            for r in (self, other)
        ]
        if facts[0] != facts[1]:
            return False
        if (self.whole and self.partition is not None) or self.mesh.size == 1:
            return self.same_as(other)
        known, key = self.latest("matches"), id(other)
        if key not in known:
            away = consistency.count_rows(int(not self.same_as(other)), self.mesh)
            known[key] = other, away == 0
        return bool(known[key][1])

    def select(self, mask: Tensor, known: int | None = None) -> Rows:
        """Returns the rows that a local boolean mask `[n_i]` keeps.

        Args:
            mask: the mask of this rank's rows.
            known: the number of rows it keeps on all ranks, if known.
        """
        gid = self.gid[mask.cpu()]
        kept: Any = {"nodes": self.nodes, "stacked": self.stacked}
        return Rows(gid, self.total, self.mesh, None, False, known, **kept)

    def joined(self, parts: list[Rows]) -> Rows:
        """Returns these rows, the first of `parts`, and those of other parts behind them."""
        at, places = 0, []
        for part in parts:
            places.append(part.place + at)
            at += part.count
        nodes = next((p.nodes for p in parts if p.nodes is not None), None)
        return Rows(torch.cat(places), at, self.mesh, None, nodes=nodes)

    @staticmethod
    def blocks(total: int, mesh: Mesh) -> Rows:
        """Cuts `total` rows into equal blocks, one per rank, in rank order."""
        sizes = balanced_split(total, mesh.size)
        start = sum(sizes[: mesh.rank])
        gid = torch.arange(start, start + sizes[mesh.rank])
        return Rows(gid, total, mesh, None)

    def __deepcopy__(self, memo: dict) -> Rows:
        return self

    def __repr__(self) -> str:
        part = "" if self.whole else " (masked)"
        return f"Rows({len(self)} of {self.total}{part} on rank {self.mesh.rank})"

"""Rows: which rows of a tensor this rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pyg_distcomm import wire
from pyg_distcomm.mesh import Mesh
from pyg_distcomm.partition.partition import Partition
from pyg_distcomm.price import balanced_split


@dataclass(frozen=True, eq=False)
class Rows:
    """Which rows of a row-cut tensor are on this rank, and how many there are in all.

    Args:
        gid: ids of the rows here, `[n_i]`, ascending; on the CPU.
        total: ids lie in [0, total).
        mesh: the ranks that share the tensor.
        partition: who has which id; None where nobody can be asked.
        whole: whether the ranks together hold every id (False behind a mask).
    """

    gid: Tensor
    total: int
    mesh: Mesh
    partition: Partition | None
    whole: bool = True

    def __len__(self) -> int:
        return len(self.gid)

    @cached_property
    def count(self) -> int:
        """The number of rows on all ranks; collective once where a mask was applied."""
        if self.whole:
            return self.total
        here = torch.tensor([len(self)], dtype=torch.int64)
        return int(wire.all_reduce(here, self.mesh.world))

    def same_as(self, other: Rows) -> bool:
        """Whether both stand for the same rows on this rank."""
        if self is other:
            return True
        return self.total == other.total and torch.equal(self.gid, other.gid)

    def select(self, mask: Tensor) -> Rows:
        """Returns the rows that a local boolean mask `[n_i]` keeps."""
        return Rows(self.gid[mask.cpu()], self.total, self.mesh, None, whole=False)

    @staticmethod
    def blocks(total: int, mesh: Mesh) -> Rows:
        """Cuts `total` rows into equal blocks, one per rank, in rank order."""
        sizes = balanced_split(total, mesh.size)
        start = sum(sizes[: mesh.rank])
        gid = torch.arange(start, start + sizes[mesh.rank])
        return Rows(gid, total, mesh, None)

    def __repr__(self) -> str:
        part = "" if self.whole else " (masked)"
        return f"Rows({len(self)} of {self.total}{part} on rank {self.mesh.rank})"

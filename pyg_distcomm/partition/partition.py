"""Records who owns which node."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pyg_distcomm.partition.metrics import PartitionReport

Grid = tuple[int, int, int]
Owner = Tensor | np.ndarray | Sequence[int]


@dataclass(frozen=True, eq=False)
class Partition:
    """Says for each node which part owns it; build one with `from_owner` or `cut`.

    owner     [num_nodes], uint8, int16 or int32, whichever is the smallest that
              holds num_parts; on the CPU, possibly a memory-mapped file
    num_parts parts, some of which may own nothing
    sizes     nodes owned by each part
    before    the figures before `refine`, where it was used; not compared by `same_as`
    """

    owner: Tensor
    num_parts: int
    sizes: tuple[int, ...]
    before: PartitionReport | None = None

    @classmethod
    def from_owner(
        cls, owner: Owner, num_parts: int, num_nodes: int | None = None
    ) -> Partition:
        """Checks an owner vector [num_nodes] of part numbers and keeps it.

        Raises TypeError unless it holds integers, ValueError unless it is 1-D, as
        long as `num_nodes` (when given), and within 0 .. num_parts - 1.
        """
        num_parts = check_num_parts(num_parts)
        vector = _as_vector(owner)
        if num_nodes is not None and vector.numel() != num_nodes:
            raise ValueError(
                f"owner has {vector.numel()} entries, but the graph has {num_nodes} "
                "nodes; give the part of every node, in the order of the Data"
            )
        _check_range(vector, num_parts)
        vector = vector.to(owner_dtype(num_parts))
        return cls(vector, num_parts, _count(vector, num_parts))

    @property
    def num_nodes(self) -> int:
        """Nodes of the whole graph."""
        return self.owner.numel()

    def gids(self, part: int) -> Tensor:
        """Lists the nodes of `part`: int64 [sizes[part]], ascending."""
        if not 0 <= part < self.num_parts:
            raise ValueError(
                f"got part {part}, but the parts are 0 .. {self.num_parts - 1}"
            )
        return (self.owner == part).nonzero().view(-1)

    def owner_of(self, gid: Tensor) -> Tensor:
        """Looks up the part of each node: int64, the shape and device of `gid`."""
        if gid.is_floating_point() or gid.dtype == torch.bool:
            raise TypeError(f"node ids must be integers, got {gid.dtype}")
        index = gid.to(self.owner.device, torch.int64)
        _check_gids(index, self.num_nodes)
        # uint8 must not leave this class: as an index, torch reads it as a mask
        return self.owner[index].to(gid.device, torch.int64)

    def same_as(self, other: Partition) -> bool:
        """Says whether both give every node to the same one of as many parts."""
        return (
            self.num_parts == other.num_parts
            and self.sizes == other.sizes
            and torch.equal(self.owner, other.owner)
        )

    def refined_from(self, before: PartitionReport | None) -> Partition:
        """Returns the same partition, remembering the figures of an earlier one."""
        return replace(self, before=before)

    def digest(self) -> str:
        """Hashes num_parts and owner: equal on two ranks when `same_as` holds."""
        state = hashlib.sha256(f"{self.num_parts} {self.num_nodes} ".encode())
        state.update(self.owner.contiguous().numpy().data)
        return state.hexdigest()

    def __repr__(self) -> str:
        low, high = min(self.sizes), max(self.sizes)
        each = f"{low}" if low == high else f"{low}..{high}"
        parts = "1 part" if self.num_parts == 1 else f"{self.num_parts} parts"
        return f"Partition({self.num_nodes} nodes on {parts}, {each} each)"


def owner_dtype(num_parts: int) -> torch.dtype:
    """Gives the smallest of uint8, int16 and int32 that holds num_parts - 1."""
    if num_parts <= 2**8:
        return torch.uint8
    return torch.int16 if num_parts <= 2**15 else torch.int32


def check_num_parts(num_parts: int) -> int:
    """Returns `num_parts` as an int; raises unless it is a whole number above 0."""
    whole = isinstance(num_parts, (int, np.integer)) and not isinstance(num_parts, bool)
    if not whole:
        raise TypeError(f"num_parts must be an int, got {num_parts!r}")
    if not 0 < num_parts < 2**31:
        raise ValueError(f"num_parts must be at least 1, got {num_parts}")
    return int(num_parts)


def check_grid(grid: Grid | None, num_parts: int) -> Grid:
    """Returns the grid (r, s, p), (num_parts, 1, 1) if None; raises for a misfit."""
    if grid is None:
        return num_parts, 1, 1
    r, s, p = (*grid, 0, 0, 0)[:3]
    if len(grid) != 3 or min(grid) < 1 or r * s * p != num_parts:
        raise ValueError(
            f"grid must be three positive sizes (row, col, fiber) whose product is the "
            f"number of parts, {num_parts}; got {tuple(grid)}"
        )
    return r, s, p


def _as_vector(owner: Owner) -> Tensor:
    if isinstance(owner, np.ndarray) and not owner.flags.writeable:
        owner = owner.copy()  # torch warns about memory it may not write
    try:
        vector = torch.as_tensor(owner).detach().cpu()
    except (RuntimeError, ValueError) as error:
        raise TypeError(f"owner is not a vector of part numbers: {error}") from None
    if vector.dim() != 1:
        raise ValueError(
            f"owner has shape {list(vector.shape)}, but must be 1-D: one part per node"
        )
    if vector.numel() == 0:
        return vector.to(torch.int64)
    if vector.is_floating_point() or vector.is_complex() or vector.dtype == torch.bool:
        raise TypeError(
            f"owner must hold integers (one part number per node), got {vector.dtype}"
        )
    return vector


def _check_range(owner: Tensor, num_parts: int) -> None:
    if owner.numel() == 0:
        return
    low, high = (int(value) for value in torch.aminmax(owner))
    if low < 0 or high >= num_parts:
        bad = low if low < 0 else high
        gid = int((owner == bad).nonzero()[0])
        raise ValueError(
            f"owner of node {gid} is {bad}, but the parts are 0 .. {num_parts - 1}"
        )


def _check_gids(gid: Tensor, num_nodes: int) -> None:
    if gid.numel() == 0:
        return
    low, high = (int(value) for value in torch.aminmax(gid))
    if low < 0 or high >= num_nodes:
        bad = low if low < 0 else high
        raise ValueError(
            f"got node id {bad}, but the graph's ids are 0 .. {num_nodes - 1}"
        )


def _count(owner: Tensor, num_parts: int) -> tuple[int, ...]:
    return tuple(torch.bincount(owner, minlength=num_parts).tolist())

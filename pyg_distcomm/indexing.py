"""Row indexing across ranks: masks stay here, ids travel, and full tensors gather."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_distcomm import adjoint, wire
from pyg_distcomm.exchange.halo import Halo
from pyg_distcomm.rows import Rows

_PRIME = (1 << 61) - 1


def take_same(local: Tensor, rows: Rows, idx: Tensor) -> tuple[Tensor, Rows]:
    """Returns the rows `idx` (ids, the same on all ranks), cut into equal blocks.

    Price: two exchanges, of ids and of rows; a rank receives at most
    len(idx)/P times the width.

    Raises:
        IndexError: on all ranks, if an id is out of range.
        ValueError: on all ranks, if `idx` differs between ranks.
    """
    idx = _checked_ids(idx, rows.total)
    _check_same(idx, rows)
    block = Rows.blocks(len(idx), rows.mesh)
    return take(local, rows, idx[block.gid]), block


def take(local: Tensor, rows: Rows, gid: Tensor) -> Tensor:
    """Returns the rows `gid`, which each rank chooses for itself; collective."""
    if local.dim() == 1:
        return take(local.unsqueeze(1), rows, gid).squeeze(1)
    if rows.mesh.size == 1 and rows.whole:
        return local.index_select(0, gid.to(local.device))
    if rows.partition is None:
        raise TypeError(
            "rows picked by a mask or by ids cannot be picked again by id; index the "
            "original tensor, or use .to_local() or .full_tensor()"
        )
    owner = rows.partition.owner_of(gid)
    order = torch.argsort(owner, stable=True)
    counts = torch.bincount(owner, minlength=rows.mesh.size).tolist()
    halo = Halo.build(gid[order], counts, rows.gid, rows.mesh.world)
    got = adjoint.exchange(local, halo.to(local.device))
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return got.index_select(0, back.to(local.device))


def _checked_ids(idx: Tensor, total: int) -> Tensor:
    idx = idx.cpu().long()
    low, high = (int(idx.min()), int(idx.max())) if len(idx) else (0, -1)
    if low < -total or high >= total:
        bad = low if low < -total else high
        raise IndexError(f"index {bad} is out of range for a tensor of {total} rows")
    return torch.where(idx < 0, idx + total, idx)


def _check_same(idx: Tensor, rows: Rows) -> None:
    weight = torch.arange(1, len(idx) + 1)
    mark = [len(idx), int((idx * weight).sum()) % _PRIME]
    marks = wire.all_gather_counts(mark, rows.mesh.world)
    if any(other != marks[0] for other in marks):
        raise ValueError(
            f"x[idx] with a plain idx means the same ids on all ranks, but the ranks "
            f"gave lists that differ (lengths {[m[0] for m in marks]}); build idx from a "
            "shared seed, or use a mask, which costs nothing"
        )


def gather_all(local: Tensor, rows: Rows) -> Tensor:
    """Returns all rows in original order on every rank, differentiably; collective."""
    world = rows.mesh.world
    sizes = [row[0] for row in wire.all_gather_counts([len(rows)], world)]
    every = _replicated(local, sizes, world)
    gid = wire.all_gather_rows(rows.gid, sizes, world)
    order = torch.argsort(gid)
    return every.index_select(0, order.to(local.device))


def _replicated(local: Tensor, sizes: list[int], world: wire.Axis) -> Tensor:
    if world.size == 1:
        return local
    copies = local.repeat(world.size, *([1] * (local.dim() - 1)))
    return adjoint.all_to_all(
        copies, [len(local)] * world.size, sizes, world, "all_gather"
    )


def ids_of(key: Any, total: int) -> Tensor:
    """Returns the ids a slice, list or integer tensor stands for."""
    if isinstance(key, slice):
        return torch.arange(total)[key]
    return torch.as_tensor(key)

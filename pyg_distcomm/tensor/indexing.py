"""Row indexing across ranks: masks stay here, ids travel, and full tensors gather."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.comm import autograd, collectives
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.tensor.gather_by_id import IdPlan, kept

_PRIME = (1 << 61) - 1


def take_same(local: Tensor, rows: Rows, idx: Tensor) -> tuple[Tensor, Rows]:
    """Returns the rows `idx` (ids, the same on all ranks), cut into equal blocks.

    As many as the tensor has, a permutation say, are cut as the tensor is.

    Price: an exchange of rows, each distinct one of another rank once; for ids that are
    new (another tensor, or changed in place) also one of ids.

    Raises:
        IndexError: on all ranks, if an id is out of range.
        ValueError: on all ranks, if `idx` differs between ranks.
    """

    def build() -> tuple[IdPlan, Rows]:
        ids = _checked_ids(idx, rows.count)
        _check_same(ids, rows)
        alike = rows.whole and len(ids) == rows.total
        block = rows if alike else Rows.blocks(len(ids), rows.mesh)
        return IdPlan.build(ids[block.gid], rows).to(local.device), block

    plan, block = kept(idx, rows, build)
    return plan.gather(local), block


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
    marks = collectives.all_gather_counts(mark, rows.mesh.world)
    if any(other != marks[0] for other in marks):
        raise ValueError(
            f"x[idx] with a plain idx means the same ids on all ranks, but the ranks "
            f"gave lists that differ (lengths {[m[0] for m in marks]}); build idx from a "
            "shared seed, or use a mask, which costs nothing"
        )


def gather_all(local: Tensor, rows: Rows) -> Tensor:
    """Returns all rows in original order on every rank, differentiably; collective."""
    return autograd.all_gather(local, rows.gid, rows.mesh.world)


def ids_of(key: Any, total: int) -> Tensor:
    """Returns the ids a slice, list or integer tensor stands for."""
    if isinstance(key, slice):
        return torch.arange(total)[key]
    return torch.as_tensor(key)

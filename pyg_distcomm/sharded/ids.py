"""Plans the exchange of rows by ids, and keeps it with the ids.

With ids v_1 .. v_k, sharded over the ranks, and x with a row for each id:

    gather   y_i = x[v_i]
    scatter  x[v] += sum of y_i over i with v_i = v     (and maximum, minimum, replacement)

What travels is planned once for ids that do not change: each distinct row of another rank
once. So `x[edge_index[0]]` is the halo exchange of a layer, and a scatter to `edge_index[1]`,
whose edges are with the owner of their target, moves nothing. Of a chunk all rows are here.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.comm.rows import Latest, Rows
from pyg_distcomm.ops.id_plan import IdPlan, plan_ids, range_error
from pyg_distcomm.partition.partition import Partition
from pyg_distcomm.sharded.agreement import compare_ids, pass_by
from pyg_distcomm.sharded.constants import ByContent, kept_with, version_of
from pyg_distcomm.sharded.dist_tensor import DistTensor, local_at, own_part, rule

aten = torch.ops.aten
_KEPT = 64  # blocks of rows
_KEPT_PLANS = 16  # of one list of ids


class Ids:
    """Holds the ids `[k]` on this rank, and what has been planned for them.

    The sources of edges are end 0, their targets 1, other ids None.
    """

    __slots__ = ("_highest", "_plans", "end", "local", "rows")

    def __init__(self, local: Tensor, rows: Rows, end: int | None = None) -> None:
        self.local, self.rows, self.end = local, rows, end
        self._highest: int | None = None
        self._plans = Latest(_KEPT_PLANS)

    @property
    def highest(self) -> int:
        """The highest id of all ranks, -1 without ids; collective once."""
        if self._highest is None:
            here = int(self.local.max()) if self.local.numel() else -1
            most = torch.tensor([here])
            found = collectives.all_reduce(most, self.rows.mesh.world, "max")
            self._highest = int(found)
        return self._highest

    def check_below(self, count: int) -> None:
        """Raises on all ranks if an id is not below a number of rows; collective once."""
        most = self.highest
        if most >= count:
            raise IndexError(
                f"index {most} is out of range for a tensor of {count} rows"
            )

    def exchange(self, rows: Rows) -> IdPlan:
        """Returns the exchange with rows of a tensor; collective at the first call."""
        # where gradients of what was read belong
        self.rows.latest("read")[rows.count] = rows
        return self._plans.made(id(rows), lambda: _planned(self, rows), rows)  # type: ignore[no-any-return]


def _planned(ids: Ids, rows: Rows) -> IdPlan:
    if rows.mesh.local_sizes:
        return LocalPlan.of(ids, rows)
    flat = ids.local.reshape(-1).long()
    problem = range_error(flat, rows.count)
    flat = flat[:0] if problem else torch.where(flat < 0, flat + rows.count, flat)
    plan = plan_ids([flat], rows, rows.mesh.world, problem)[0]
    axis = rows.mesh.world
    tell: Any = axis.observer
    if tell is not None:  # edges are where their targets are
        known = ids.end == 0 and rows.partition is not None
        observer = functools.partial(tell, known=known)
        axis = replace(axis, observer=observer)
        plan = replace(plan, halo=replace(plan.halo, axis=axis, silent=ids.end == 1))
    return plan.to(ids.local.device)


class LocalRows(Rows):
    """Rows of a chunk: `gid` are those of the graph, places count from 0 in the chunk."""

    @cached_property
    def place(self) -> Tensor:  # type: ignore[override]
        """The positions of these rows in the chunk: all of them."""
        return torch.arange(len(self))

    @staticmethod
    def of(gid: Tensor, total: int, mesh: Any, nodes: Rows | None = None) -> LocalRows:
        """Returns rows of a chunk by their ids in the graph."""
        return LocalRows(gid, total, mesh, None, False, len(gid), nodes)

    def select(self, mask: Tensor, known: int | None = None) -> Rows:
        """Returns the rows that a boolean mask `[n]` keeps."""
        return LocalRows.of(self.gid[mask.cpu()], self.total, self.mesh, self.nodes)

    def joined(self, parts: list[Rows]) -> Rows:
        """Returns these rows and those of other parts, one after another."""
        gid, total = [], 0
        for part in parts:
            gid.append(part.gid + total)
            total += part.total
        nodes = next((p.nodes for p in parts if p.nodes is not None), None)
        return LocalRows.of(torch.cat(gid), total, self.mesh, nodes)


class _Nothing:
    """Stands in place of the halo of ids that are all in the chunk."""

    num_ghosts, silent, send_slot = 0, True, torch.empty(0, dtype=torch.long)


class LocalPlan(IdPlan):
    """Reads rows of a chunk by ids; those of other chunks are facts of the graph."""

    _topology: Any = None

    @staticmethod
    def of(ids: Ids, rows: Rows) -> LocalPlan:
        """Plans for ids of which other chunks have only the sources of edges."""
        slot = ids.local.reshape(-1).long()
        topology = rows.derived.get("topology") if ids.end == 0 else None
        if topology is None and len(slot) and int(slot.max()) >= len(rows):
            raise TypeError(
                "a layer of a pipeline selects sources of edges, of which some lie in other "
                "chunks, and reads rows by them or sums to them; read by edge_index[0] of all "
                "its edges, or precompute the rows as an attribute of the Data"
            )
        halo: Any = _Nothing() if topology is None else topology.locals.halo
        plan = LocalPlan(halo, slot, len(rows))
        plan._topology, vars(plan)["_read"] = topology, (None, slot)
        return plan

    def _with_ghosts(self, x: Tensor, mine: Tensor, key: int | None) -> Tensor:
        found: Tensor = self._topology.locals.with_ghost_facts(x)
        return found


def ids_of(x: DistTensor) -> Ids | None:
    """Returns the ids that a tensor of whole numbers holds, one for each row; else None."""
    kept = x._kept
    if kept is not None and kept[0] == version_of(x) and "ids" in kept[1]:
        return kept[1]["ids"]  # type: ignore[no-any-return]
    if x.local.dim() != 1 or x.dtype.is_floating_point or x.dtype == torch.bool:
        return None

    def made() -> Ids:
        return Ids(x.local if x._key is None else x.local.clone(), x.rows, x._end)

    return kept_with(x, "ids", made)  # type: ignore[no-any-return]


def with_ids(x: DistTensor, part: DistTensor, end: int | None = None) -> DistTensor:
    """Returns a view of the same rows, which holds the ids of `x`, or one end of edges."""
    if end is None:
        known = x.local.dim() == 1 or x._kept is not None
        ids = ids_of(x) if known else None
    elif x._key is None:  # else known by its own key
        ids = kept_with(x, ("end", end), lambda: Ids(part.local, part.rows, end))
    else:
        ids = None
    part._kept = None if ids is None else (version_of(x), {"ids": ids})
    return part


@rule("reshard")
def reshard(x: DistTensor, rows: Rows) -> Tensor:
    """Returns own rows of `x`, sharded as other rows; collective.

    Price: each row that moves, once; planned the first time.
    """
    ids = Ids(rows.place_on(x.device), rows)
    key, known = (id(x.rows), x.device), rows.latest("reshard")
    plan = known.made(key, lambda: _planned(ids, x.rows), x.rows)
    return plan.gather(front(x)).movedim(0, x.dim_)  # type: ignore[no-any-return]


def chosen(mask: DistTensor | Tensor, rows: Rows) -> tuple[Rows, Tensor]:
    """Returns the rows that a mask keeps of `rows`, and where they are among own rows.

    Kept with the mask until it changes. Collective once, for a mask that was computed.
    """
    if type(mask) is DistTensor:
        kept = kept_with(mask, id(rows), lambda: (_chosen(mask, rows), rows))
        return kept[0]  # type: ignore[no-any-return]
    known = rows.derived.setdefault("masks", ByContent(8))
    found = known.get(mask)
    return known.put(mask, _chosen(mask, rows)) if found is None else found  # type: ignore[no-any-return]


def _chosen(mask: Tensor, rows: Rows) -> tuple[Rows, Tensor]:
    if mask.size(0) != rows.count:
        raise IndexError(
            f"got a mask of {mask.size(0)} rows, wanted one of {rows.count}, as many as the "
            "tensor that it selects from has; take a mask of the same nodes or edges"
        )
    local = local_at(mask, rows, 0)
    known = int(mask.sum()) if type(mask) is not DistTensor else None
    where = local.nonzero().view(-1)
    found = rows.select(local, known)
    if found.count == rows.count:
        return rows, where
    # where gradients of what was kept belong
    found.latest("read")[rows.count] = rows
    return found, where


def blocks_of(count: int, mesh: Mesh) -> Rows:
    """Returns the rows of a new tensor, in equal blocks; the same for each of their number."""
    kept = mesh.sharded.setdefault("blocks", Latest(_KEPT))
    return kept.made(count, lambda: Rows.blocks(count, mesh))  # type: ignore[no-any-return]


def plain_ids(index: Tensor, rows: Rows, device: torch.device) -> Ids:
    """Returns plain ids, sharded (as `rows`, if as many); kept by content.

    Distinct ones are a selection: each is with the owner of its row, which stays there. Lists
    that repeat ids, as the ends of edges, are cut into equal blocks: two of them meet, and
    each distinct row of another rank travels once.
    """
    kept = rows.derived.setdefault(("plain ids", device), ByContent(8))
    if (known := kept.get(index)) is not None:
        pass_by(rows.mesh)
        return known  # type: ignore[no-any-return]
    compare_ids(index, rows.count, rows.mesh)
    flat = index.reshape(-1)
    flat = torch.where(flat < 0, flat + rows.count, flat)
    at = rows
    if len(flat) != rows.count:
        named = torch.zeros(rows.count, dtype=torch.bool, device=flat.device)
        distinct = int(named.index_fill_(0, flat.long(), True).sum()) == len(flat)
        selects = distinct and not rows.mesh.local_sizes
        at = _with_owners(flat, rows) if selects else blocks_of(len(flat), rows.mesh)
    found = Ids(own_part(flat, at, 0).to(device), at)
    return kept.put(index, found)  # type: ignore[no-any-return]


def leading_ids(x: DistTensor, given: list[Any]) -> Ids | None:
    """Returns the ids of the rows i in `x[i, j, ...]`; None if they are not known."""
    v, *rest = (each for each in given if each is not None)
    if any(each.dtype == torch.bool or each.dim() != 1 for each in (v, *rest)):
        return None
    if type(v) is DistTensor:
        return ids_of(v)
    rows = next((each.rows for each in rest if type(each) is DistTensor), None)
    if rows is not None and len(v) == rows.count:
        return Ids(own_part(v, rows, 0), rows)
    return plain_ids(v, x.rows, x.device)


def _with_owners(ids: Tensor, rows: Rows) -> Rows:
    """Returns the rows of a list of ids, which are with the owners of the rows they name."""
    owner = rows.owners.owner_of(ids.cpu().long())
    partition = Partition.from_owner(owner, rows.mesh.size, len(ids))
    gid = (owner == rows.mesh.rank).nonzero().view(-1)
    found = Rows(gid, len(ids), rows.mesh, None)  # no nodes of a graph
    vars(found)["owners"] = partition  # known without an exchange
    return found


def front(x: DistTensor) -> Tensor:
    return x.local if x.dim_ == 0 else x.local.movedim(x.dim_, 0)


def back(local: Tensor, rows: Rows, dim: int) -> DistTensor:
    return DistTensor(
        local if dim == 0 else local.movedim(0, dim).contiguous(), rows, dim
    )

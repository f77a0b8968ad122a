"""Gathers rows by node ids, and scatters rows to nodes by id.

With ids v_1 .. v_k, sharded over the ranks, and x with a row for each node:

    gather   y_i = x[v_i]
    scatter  x[v] += sum of y_i over i with v_i = v     (and maximum, minimum, replacement)

Each distinct row of another rank travels once, as in the halo of a layer, and the exchange is
planned once for ids that do not change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from pyg_distcomm import kernels
from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.axis import Axis
from pyg_distcomm.comm.rows import Rows, narrowed
from pyg_distcomm.halo.halo import Halo
from pyg_distcomm.process import PROCESS

_SUMMED = (torch.float32, torch.float64)


@dataclass(eq=False)
class IdPlan:
    """Plans the exchange between the rows of all ranks and a list of ids on each rank.

    Autograd does not record what it computes.

    Shapes (this rank; n own rows, h ghosts, k ids): slot [k], in 0 .. n+h-1.
    Price: h f words to gather or scatter at width f.
    """

    halo: Halo
    slot: Tensor
    own: int
    # the rows of a constant, by its number
    _constant: tuple[int, Tensor | None] | None = field(default=None, init=False)

    @staticmethod
    def build(gid: Tensor, rows: Rows) -> IdPlan:
        """Plans the exchange for ids `[k]`; collective."""
        return plan_ids([gid], rows, rows.mesh.world)[0]

    def to(self, device: torch.device) -> IdPlan:
        """Returns the plan with its indices on a device."""
        if self.slot.device == device:
            return self
        moved = IdPlan(self.halo.to(device), self.slot.to(device), self.own)
        if "asked" in vars(self):  # made with the plan, not in a step
            vars(moved)["asked"] = tuple(part.to(device) for part in self.asked)
        return moved

    def gather(self, x: Tensor, key: int | None = None) -> Tensor:
        """Returns the rows `[k, ...]` at the ids, of own rows `x` `[n, ...]`.

        The ghosts of a constant, known by its key, are kept from their second use on.
        """
        rest, (picked, slot) = x.shape[1:], self._read
        flat = x.reshape(len(x), math.prod(rest))
        if not self.halo.silent:
            mine = flat if picked is None else flat.index_select(0, picked)
            flat = self._with_ghosts(flat, mine, key)
        return _rows_at(flat, slot).view(len(slot), *rest)

    @cached_property
    def _read(self) -> tuple[Tensor | None, Tensor]:
        """The own rows that a table needs, and where each id is in it; None needs all."""
        if self.halo.silent or 2 * len(self.slot) >= self.own:
            return None, self.slot
        # a copy of all own rows would cost more than the ids
        here = self.slot < self.own
        picked = self.slot[here]
        slot = self.slot - self.own + len(picked)
        slot[here] = torch.arange(len(picked), device=slot.device)
        return picked, slot

    def _with_ghosts(self, x: Tensor, mine: Tensor, key: int | None) -> Tensor:
        """Returns own rows, or some of them, and the ghosts of `x`."""
        last, kept = self._constant or (None, None)
        if key is not None and last == key and kept is not None:
            return torch.cat([mine, kept])
        first = len(mine)
        table = x.new_empty((first + self.halo.num_ghosts, x.size(1)))
        arrive = self.halo.begin(_wire(x), _wire(table[first:]))
        table[:first] = mine
        arrive()
        if key is not None:
            self._constant = key, table[first:].clone() if last == key else None
        return table

    @property
    def count(self) -> int:
        """The number of own rows and ghosts."""
        return self.own + self.halo.num_ghosts

    def sum(self, src: Tensor) -> Tensor:
        """Returns the sums `[n, ...]` of rows `[k, ...]` by id, at the owners."""
        rest = src.shape[1:]
        flat = src.reshape(len(src), math.prod(rest))
        if flat.dtype in _SUMMED and len(flat):
            table = kernels.spmm(*self._sorted, None, flat.contiguous())
        else:
            table = flat.new_zeros((self.count, flat.size(1)))
            table.index_add_(0, self.slot, flat)
        if self.halo.silent:
            return table.view(self.own, *rest)
        arrive = self.halo.begin_transpose(table[self.own :].contiguous())
        return arrive(table[: self.own].contiguous()).view(self.own, *rest)

    def extreme(self, src: Tensor, op: str) -> Tensor:
        """Returns the maxima or minima `[n, ...]` of rows by id ("amax", "amin").

        Rows that no id names hold the identity.
        """
        if op == "amin" and src.dtype.is_floating_point:
            return -self.extreme(-src, "amax")
        empty, rest = reduction_identity(src.dtype, op), src.shape[1:]
        flat = src.reshape(len(src), math.prod(rest)).contiguous()
        if src.dtype in _SUMMED and len(src):
            rowptr, perm = self._sorted
            table = kernels.segment_max(rowptr, perm, flat)
            table.masked_fill_((rowptr.diff() == 0).unsqueeze(1), empty)
        else:
            table = flat.new_full((self.count, flat.size(1)), empty)
            _reduce_at(table, self.slot, flat, op)
        own, halo = table[: self.own], self.halo
        if not halo.silent:
            halo.tell("back", flat)
            sides = halo.recv_counts, halo.send_counts, halo.axis
            sent = table[self.own :].contiguous()
            came = collectives.all_to_all(sent, *sides, "halo_reduce", halo.most).wait()
            _reduce_at(own, halo.send_slot, came, op)
        return own.view(self.own, *rest)

    def put(self, out: Tensor, src: Tensor, at: Tensor) -> None:
        """Writes rows `[k, ...]` to the rows of their ids, `out`; of several the last stays.

        Which one is last is told by the place of each id among those of all ranks, `at`.
        """
        wins = beside(self.gather(self.extreme(at, "amax")) == at, src.dim())
        src = src.to(torch.uint8) if src.dtype == torch.bool else src
        total = self.sum(torch.where(wins, src, torch.zeros_like(src)))
        out.copy_(torch.where(beside(self.hit, out.dim()), total.to(out.dtype), out))

    @cached_property
    def hit(self) -> Tensor:
        """Whether any id names each own row, `[n]`."""
        found = torch.zeros(self.count, dtype=torch.bool, device=self.slot.device)
        found[self.slot] = True
        found = found[: self.own].clone()
        found[self.halo.send_slot] = True
        return found

    @cached_property
    def _sorted(self) -> tuple[Tensor, Tensor]:
        arange = torch.arange(len(self.slot), device=self.slot.device)
        rowptr, col, _ = kernels.coo_to_csr(self.slot, arange, self.count)
        return rowptr, col

    @cached_property  # of the ids alone: made with the plan, it is not made in a step
    def asked(self) -> tuple[Tensor, IdPlan]:
        """The own rows that any rank asks for, ascending, and the plan for these alone."""
        here, halo = self.slot < self.own, self.halo
        named = torch.cat([self.slot[here], halo.send_slot])
        rows, where = torch.unique(named, return_inverse=True)
        slot, count = self.slot - self.own + len(rows), int(here.sum())
        slot[here], sent = where[:count], where[count:]
        halo = replace(halo, send_slot=sent, num_local=len(rows))
        plan = IdPlan(halo, slot, len(rows))
        _ = plan._sorted
        return rows, plan


def plan_ids(
    lists: Sequence[Tensor], rows: Rows, axis: Axis, problem: str | None = None
) -> list[IdPlan]:
    """Plans the exchanges for several lists of ids at once; collective.

    All ranks give as many lists. What is planned is exchanged over `axis`, which has the
    ranks of the mesh in their order; rows will travel over the mesh's own.

    Args:
        lists: ids `[k]` each.
        rows: the sharding of the whole tensor.
        axis: the axis over which the plans are exchanged.
        problem: the error of this rank, which then passes no ids.

    Price: (2 lists + 1) (P - 1) counts, and each distinct id that is asked of this rank.

    Raises:
        IndexError: on all ranks, if one has a problem.
    """
    mesh, m = rows.mesh, len(lists)
    asks = [_request(gid.cpu(), rows) for gid in lists]

    def plan(i: int, asked: Tensor, send_counts: list[int], most: int) -> IdPlan:
        ghost, counts, slot = asks[i]
        sides = ghost, counts.tolist(), asked, send_counts, rows.place
        halo = Halo.of_requests(*sides, rows.mesh.world, most)
        return IdPlan(halo, slot, len(rows))

    if not asks or mesh.size == 1:
        if problem is not None:
            raise IndexError(problem)
        return [plan(i, ask[0], [0], 0) for i, ask in enumerate(asks)]
    counts = torch.stack([ask[1] for ask in asks], 1)
    most = counts.max(0).values.expand(mesh.size, m)
    flag = torch.full((mesh.size, 1), int(problem is not None))
    ones, table = [1] * mesh.size, torch.cat([counts, most, flag], 1)
    came = collectives.all_to_all(table, ones, ones, axis, "plan", 1).wait()
    if bool(came[:, -1].any()) or problem is not None:
        collectives.agree(problem, axis, IndexError)
    theirs = came[:, :m]
    sent, coming = counts.sum(1).tolist(), theirs.sum(1).tolist()
    split = [ghost.split(each.tolist()) for ghost, each, _ in asks]
    ids = torch.cat([part for peer in zip(*split, strict=True) for part in peer])
    ids = narrowed(ids, rows.count)
    asked = collectives.all_to_all(ids, sent, coming, axis, "plan").wait().long()
    parts = asked.split(theirs.reshape(-1).tolist())
    widest = came[:, m : 2 * m].max(0).values.tolist()
    return [
        plan(i, torch.cat(parts[i::m]), theirs[:, i].tolist(), widest[i])
        for i in range(m)
    ]


def _request(gid: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the distinct ids of other ranks, by owner, their numbers, and slots of all."""
    owner = rows.owners.owner_of(gid)
    away, slot = owner != rows.mesh.rank, torch.empty_like(gid)
    slot[~away] = torch.searchsorted(rows.place, gid[~away])
    total = max(rows.count, 1)
    named = owner[away] * total + gid[away]  # in the order of owners, then of ids
    named, where = torch.unique(named, return_inverse=True)
    slot[away] = where + len(rows)
    counts = torch.bincount(named // total, minlength=rows.mesh.size)
    return named % total, counts, slot


def attach_route(ids: Tensor, plan: IdPlan, rows: Rows) -> None:
    """Attaches a plan to its ids, until these change.

    Not in the ids: copies and files of these would take it along, process groups and all.
    """
    if not ids.is_inference():  # which have no version
        PROCESS.routes[ids] = ids._version, plan, rows


def route_of(ids: Tensor, rows: Rows) -> IdPlan | None:
    """Returns the plan attached to ids, if they have not changed and the rows match."""
    found: tuple[int, IdPlan, Rows] | None = PROCESS.routes.get(ids)
    if found is None or ids._version != found[0] or not found[2].same_as(rows):
        return None
    return found[1]


def beside(x: Tensor, dim: int) -> Tensor:
    """Returns numbers `[n]` as `[n, 1, ...]`, with `dim` dimensions."""
    return x.view(-1, *[1] * (dim - 1))


def _reduce_at(x: Tensor, index: Tensor, rows: Tensor, op: str) -> None:
    """Updates maxima or minima `[n, f]` by rows `[k, f]` at an index."""
    x.scatter_reduce_(0, index.view(-1, 1).expand_as(rows), rows, op)


def _wire(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype == torch.bool else x


def _rows_at(x: Tensor, index: Tensor) -> Tensor:
    """Returns `x[index]`, by the package's kernel where it has one."""
    if x.dtype in _SUMMED and x.size(1) > 1:
        return kernels.gather_rows(x.contiguous(), index)
    return x.index_select(0, index)


def range_error(ids: Tensor, count: int) -> str | None:
    """Returns the error of ids `[k]` of which a tensor has no row; None if there is none."""
    low, high = ids.aminmax() if len(ids) else (0, -1)
    if low >= -count and high < count:
        return None
    bad = int(low if low < -count else high)
    return f"index {bad} is out of range for a tensor of {count} rows"


def reduction_identity(dtype: torch.dtype, op: str) -> float:
    """Returns the identity element of "amax" (the least value of a type) or "amin"."""
    if dtype == torch.bool:
        return op == "amin"
    if dtype.is_floating_point:
        return -math.inf if op == "amax" else math.inf
    info = torch.iinfo(dtype)
    return info.min if op == "amax" else info.max

"""Gathers rows by node ids, and scatters rows to nodes by id.

With ids v_1 .. v_k, sharded over the ranks, and x with a row for each node:

    gather   y_i = x[v_i]
    scatter  x[v] += sum of y_i over i with v_i = v     (and maximum, minimum)

Each distinct row of another rank travels once, as in the halo of a layer, and the exchange is
planned once for ids that do not change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.axis import Axis
from pyg_distcomm.comm.rows import Rows, narrowed
from pyg_distcomm.halo.halo import Halo, exchange
from pyg_distcomm.process import PROCESS


@dataclass(frozen=True, eq=False)
class IdPlan:
    """Plans the exchange between the rows of all ranks and a list of ids on each rank.

    Shapes (this rank; n own rows, h ghosts, k ids): slot [k], in 0 .. n+h-1.
    Price: h f words to gather or scatter at width f.
    """

    halo: Halo
    slot: Tensor
    own: int

    @staticmethod
    def build(gid: Tensor, rows: Rows) -> IdPlan:
        """Plans the exchange for ids `[k]`; collective."""
        return plan_ids([gid], rows, rows.mesh.world)[0]

    def to(self, device: torch.device) -> IdPlan:
        """Returns the plan with its indices on a device."""
        if self.slot.device == device:
            return self
        moved = IdPlan(self.halo.to(device), self.slot.to(device), self.own)
        if "owner_slots" in vars(self):  # made with the plan, not in a step
            *slots, here = self.owner_slots
            vars(moved)["owner_slots"] = *(s.to(device) for s in slots), here
        return moved

    def gather(self, x: Tensor) -> Tensor:
        """Returns the rows `[k, ...]` at the ids, of own rows `x` `[n, ...]`."""
        if self.halo.silent:
            return x.index_select(0, self.slot)
        flat = x.flatten(1) if x.dim() > 1 else x.unsqueeze(1)
        ghosts = exchange(flat, self.halo)
        ghosts = ghosts.view(len(ghosts), *x.shape[1:])
        slot = self.slot
        # a copy of all own rows would cost more than the ids
        if 2 * len(slot) < len(x):
            here = slot < self.own
            x, order = x.index_select(0, slot[here]), torch.empty_like(slot)
            order[here] = torch.arange(len(x), device=slot.device)
            order[~here] = slot[~here] - self.own + len(x)
            slot = order
        return torch.cat([x, ghosts]).index_select(0, slot)

    @cached_property  # of the ids alone: made with the plan, it is not made in a step
    def owner_slots(self) -> tuple[Tensor, Tensor, Tensor, int]:
        """Returns the slots of sums at the owners of ids; see `owner_sums`.

        The own rows that this rank asks for, ascending, and the place of each id among them,
        those of ghosts after; then the same of what comes from all ranks, in their order.
        """
        own, place = torch.unique(self.slot, return_inverse=True)
        here = int(torch.searchsorted(own, self.own))
        halo, rank = self.halo, self.halo.axis.rank
        if halo.silent:
            return own[:here], place, own[:0], here
        before = sum(halo.send_counts[:rank])
        every = [halo.send_slot[:before], own[:here], halo.send_slot[before:]]
        slot, where = torch.unique(torch.cat(every), return_inverse=True)
        return slot, place, where, here

    def owner_sums(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """Sends rows `[k, f]` to the owners of the ids, and sums them there.

        Rows that one rank has for an id are added first, then those of ranks in their order.

        Returns:
            The own rows that any rank asked for, ascending [u], and their sums [u, f].
        """
        slot, place, where, here = self.owner_slots
        halo = self.halo
        count = here + halo.num_ghosts
        mine = g.new_zeros((count, g.size(1))).index_add_(0, place, g)
        if halo.silent:
            return slot, mine
        own, ghosts = mine[:here], mine[here:]
        sides = halo.recv_counts, halo.send_counts, halo.axis
        came = collectives.all_to_all(ghosts, *sides, "halo_reduce", halo.most).wait()
        before = sum(halo.send_counts[: halo.axis.rank])
        sums = g.new_zeros((len(slot), g.size(1)))
        first, last = before, before + here
        sums.index_add_(0, where[:first], came[:before])
        sums.index_add_(0, where[first:last], own)
        return slot, sums.index_add_(0, where[last:], came[before:])


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
    asks = [_IdRequest.of(gid.cpu(), rows) for gid in lists]
    counts = torch.stack([ask.counts for ask in asks], 1) if asks else None
    if counts is None or mesh.size == 1:
        if problem is not None:
            raise IndexError(problem)
        return [ask.plan(rows, ask.ghost, [0], 0) for ask in asks]
    most = counts.max(0).values.expand(mesh.size, m)
    flag = torch.full((mesh.size, 1), int(problem is not None))
    ones, table = [1] * mesh.size, torch.cat([counts, most, flag], 1)
    came = collectives.all_to_all(table, ones, ones, axis, "plan", 1).wait()
    if bool(came[:, -1].any()) or problem is not None:
        collectives.agree(problem, axis, IndexError)
    theirs = came[:, :m]
    sent, coming = counts.sum(1).tolist(), theirs.sum(1).tolist()
    split = [ask.ghost.split(ask.counts.tolist()) for ask in asks]
    ids = torch.cat([part for peer in zip(*split, strict=True) for part in peer])
    ids = narrowed(ids, rows.count)
    asked = collectives.all_to_all(ids, sent, coming, axis, "plan").wait().long()
    parts = asked.split(theirs.reshape(-1).tolist())
    widest = came[:, m : 2 * m].max(0).values.tolist()
    return [
        ask.plan(rows, torch.cat(parts[i::m]), theirs[:, i].tolist(), widest[i])
        for i, ask in enumerate(asks)
    ]


@dataclass(frozen=True, eq=False)
class _IdRequest:
    """Holds the distinct ids of one list that other ranks own, by owner."""

    ghost: Tensor
    counts: Tensor
    slot: Tensor

    @staticmethod
    def of(gid: Tensor, rows: Rows) -> _IdRequest:
        mesh, owners = rows.mesh, rows.owners
        owner = owners.owner_of(gid)
        away = owner != mesh.rank
        slot = torch.empty_like(gid)
        slot[~away] = torch.searchsorted(rows.place, gid[~away])
        ghost, where = torch.unique(gid[away], return_inverse=True)
        ghost_owner = owners.owner_of(ghost)
        order = torch.argsort(ghost_owner, stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        slot[away] = place[where] + len(rows)
        counts = torch.bincount(ghost_owner, minlength=mesh.size)
        return _IdRequest(ghost[order], counts, slot)

    def plan(
        self, rows: Rows, asked: Tensor, send_counts: list[int], most: int
    ) -> IdPlan:
        halo = Halo.of_requests(
            self.ghost,
            self.counts.tolist(),
            asked,
            send_counts,
            rows.place,
            rows.mesh.world,
            most,
        )
        return IdPlan(halo, self.slot, len(rows))


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


def reduction_identity(dtype: torch.dtype, op: str) -> float:
    """Returns the identity element of "amax" (the least value of a type) or "amin"."""
    if dtype == torch.bool:
        return op == "amin"
    if dtype.is_floating_point:
        return -math.inf if op == "amax" else math.inf
    info = torch.iinfo(dtype)
    return info.min if op == "amax" else info.max

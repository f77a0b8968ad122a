"""Gathers rows by node ids, and scatters rows to nodes by id.

With ids v_1 .. v_k, sharded over the ranks, and x with a row for each node:

    gather   y_i = x[v_i]
    scatter  x[v] += sum of y_i over i with v_i = v     (and maximum, minimum, mean)

Each distinct row of another rank travels once, as in the halo of a layer, and the exchange is
planned once for ids that do not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.comm import autograd, collectives
from pyg_distcomm.comm.axis import Axis
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.halo.halo import Halo, exchange, exchange_transpose
from pyg_distcomm.partition.partition import Partition
from pyg_distcomm.process import PROCESS
from pyg_distcomm.tensor.row_sharded import (
    RowShardedTensor,
    all_rows,
    local_part,
    shard_plain_operand,
    unsupported_op,
)

_KEPT = 8  # plans per set of nodes


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

    def scatter_add(self, y: Tensor) -> Tensor:
        """Sums rows `y` `[k, ...]` by id; returns the sums `[n, ...]` of own rows."""
        sums = y.new_zeros((self.own + self.halo.num_ghosts, *y.shape[1:]))
        sums = sums.index_add(0, self.slot, y)
        if self.halo.silent:
            return sums
        flat = sums.flatten(1) if sums.dim() > 1 else sums.unsqueeze(1)
        own, ghosts = flat[: self.own], flat[self.own :]
        out = exchange_transpose(ghosts, own, self.halo)
        return out.view(-1, *y.shape[1:])

    def scatter_extreme(self, y: Tensor, start: Tensor, op: str) -> Tensor:
        """Reduces rows by id to maxima or minima of own rows, without gradient.

        Args:
            y: rows at the ids.
            start: own rows to begin with `[n, ...]`.
            op: "amax" or "amin".
        """
        shape = (self.halo.num_ghosts, *y.shape[1:])
        part = y.new_full(shape, reduction_identity(y.dtype, op))
        best = _extremes(torch.cat([start, part]), self.slot, y, op)
        own, ghosts = best[: self.own], best[self.own :]
        if self.halo.silent:
            return own
        halo = self.halo
        sides = halo.recv_counts, halo.send_counts, halo.axis
        came = collectives.all_to_all(ghosts, *sides, "halo_reduce", halo.most).wait()
        return _extremes(own, halo.send_slot, came, op)


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
    asked = collectives.all_to_all(ids, sent, coming, axis, "plan").wait()
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


def plan_of(ids: RowShardedTensor, rows: Rows) -> IdPlan:
    """Returns the plan of row-sharded ids, built on first use; collective."""
    local = ids.to_local()
    return cached_plan(
        local, rows, lambda: IdPlan.build(local.long(), rows).to(local.device)
    )


def cached_plan(ids: Tensor, rows: Rows, build: Callable[[], Any]) -> Any:
    """Returns the cached plan of ids `[k]`, or builds it if they have changed."""
    if ids.is_inference():  # has no version to know it by
        return build()
    storage = ids.untyped_storage()
    key = storage._cdata, ids.storage_offset(), ids.stride(), len(ids), ids._version
    plans = rows.plans
    if key not in plans:
        plans[key] = storage, build()  # the storage, too: no other takes its address
        if len(plans) > _KEPT:
            plans.popitem(last=False)
    plans.move_to_end(key)
    return plans[key][1]


def gather(x: RowShardedTensor, ids: RowShardedTensor) -> RowShardedTensor:
    """Returns `x[ids]`, sharded like the ids; collective.

    Raises:
        IndexError: on all ranks, if an id is out of range.
    """
    local = ids.to_local()
    if local.dim() != 1 or local.is_floating_point():
        raise unsupported_op(
            f"x[idx] with row-sharded idx of {local.dim()} dims and {local.dtype}"
        )
    if x.rows.partition is None and not x.reads_local:  # nobody knows who has them
        return x.wrap(all_rows(x).index_select(0, local.long()), ids.rows)
    if x.rows.mesh.size == 1 and x.rows.whole and x.rows.partition is not None:
        return x.wrap(x.to_local().index_select(0, local.long()), ids.rows)
    return x.wrap(plan_of(ids, x.rows).gather(x.to_local()), ids.rows)


def shard_as(x: RowShardedTensor, rows: Rows) -> Tensor | None:
    """Returns own rows of `x` sharded like other rows; None if the number differs.

    A row-sharded tensor reads as the whole, so operands of one operation are aligned by
    place. Inside layers, and in a backward pass, they have to be cut alike.

    Price: none where they are cut alike; else that of `reshard`.
    """
    inside = x.reads_local or torch._C._current_graph_task_id() != -1
    if x.rows.same_as(rows) if inside else x.rows.matches(rows):
        return x.to_local()
    if inside or x.rows.count != rows.count:
        return None
    return reshard(x, rows)


def reshard(x: RowShardedTensor, rows: Rows) -> Tensor:
    """Returns own rows of `x` in another sharding; collective.

    Both hold the same number of rows, in the same order. Price: the first time, the
    numbers of all rows on every rank.
    """
    plans, key = rows.plans, id(x.rows)
    if key not in plans:
        mesh, before = rows.mesh, x.rows
        sizes = [
            row[0] for row in collectives.all_gather_counts([len(before)], mesh.world)
        ]
        every = collectives.all_gather_rows(before.place, sizes, mesh.world, op="plan")
        owner = torch.empty_like(every)
        owner[every] = torch.arange(mesh.size).repeat_interleave(torch.tensor(sizes))
        home = Rows(
            before.place, len(every), mesh, Partition.from_owner(owner, mesh.size)
        )
        order = torch.argsort(before.place)
        plan = IdPlan.build(rows.place, replace(home, gid=before.place[order]))
        plans[key] = before, (plan.to(x.device), order.to(x.device))
        if len(plans) > _KEPT:
            plans.popitem(last=False)
    plan, order = plans[key][1]
    return plan.gather(x.to_local()[order])  # type: ignore[no-any-return]


def scattered(func: Callable, given: dict[str, Any]) -> Any:
    """Scatters rows to the rows of an index, and returns the target.

    A row-sharded target gets what is for its rows from all ranks; an ordinary one is the same
    on all ranks, before and after.

    Raises:
        TypeError: if the index is not one id for each row.
    """
    name = func.__name__
    target, index = given["input"], given["index"]
    source = given.get("src", given.get("source", given.get("value")))
    op = _reduction(name, given)
    spread = [v for v in given.values() if isinstance(v, RowShardedTensor)]
    if op == "replace" and any(v.reads_local for v in spread):
        raise unsupported_op(f"{name}() that replaces rows, inside a layer,")
    if op in ("prod", "replace"):
        return _scatter_on_all_ranks(func, given)
    if not isinstance(index, RowShardedTensor):
        index, source = _shard_index(index, source, target, name)
    ids = _one_per_row(index, name)
    rows = _source_rows(source, index, target, name)
    if "alpha" in given:
        rows = rows * given["alpha"]
    include = given.get("include_self", True)
    if isinstance(target, RowShardedTensor):
        out = _scatter_to_owners(target, ids, rows, op, include)
    else:
        out = _scatter_into_plain(target, ids, rows, op, include)
    if name.endswith("_"):
        with torch._C.DisableTorchFunctionSubclass():
            torch.Tensor.copy_(target, out)
        return target
    return (
        target.wrap(out, target.rows) if isinstance(target, RowShardedTensor) else out
    )


def _reduction(name: str, given: dict[str, Any]) -> str:
    op = given.get("reduce")
    if op is None:
        op = "sum" if "add" in name else "replace"
    op = {"add": "sum", "max": "amax", "min": "amin"}.get(op, op)
    op = "prod" if op in ("mul", "multiply") else op
    if op not in ("sum", "amax", "amin", "mean", "prod", "replace"):
        raise unsupported_op(f"{name}(reduce={op!r})")
    return str(op)


def _scatter_on_all_ranks(func: Callable, given: dict[str, Any]) -> Any:
    """Gathers all rows on every rank, and scatters them in order.

    For what depends on it: products, and rows that replace others, of which the last stays.
    """
    target, out_of_place = given["input"], func.__name__.removesuffix("_")
    if "src" in given and not isinstance(given["src"], Tensor):
        given["value"] = given.pop("src")

    rest = {k: all_rows(v) for k, v in given.items() if k not in ("input", "self")}
    start = all_rows(target).clone()  # which is kept for the gradient
    out = getattr(torch.Tensor, out_of_place)(start, **rest)
    if isinstance(target, RowShardedTensor):
        out = target.wrap(out[target.rows.place_on(out.device)], target.rows)
    if not func.__name__.endswith("_"):
        return out
    with torch._C.DisableTorchFunctionSubclass():
        torch.Tensor.copy_(target, out)
    return target


def _shard_index(index: Tensor, source: Any, target: Any, name: str) -> tuple[Any, Any]:
    """Shards an ordinary index like its source, or into equal blocks."""
    like = source if isinstance(source, RowShardedTensor) else target
    if isinstance(source, RowShardedTensor):
        rows = source.rows
        cut = shard_plain_operand(index, source, index.dim(), name)
    else:
        rows = Rows.blocks(index.size(0), target.rows.mesh)
        cut = index[rows.gid.to(index.device)]
        if isinstance(source, Tensor) and source.dim():
            source = source[rows.gid.to(source.device)]
            source = like.wrap(source, rows)
    return like.wrap(cut, rows), source


def _one_per_row(index: RowShardedTensor, name: str) -> RowShardedTensor:
    """Returns the ids `[k]` of an index that is expanded over columns."""
    local = index.to_local()
    if local.dim() == 1:
        return index
    same = all(
        s == 0 or n == 1
        for s, n in zip(local.stride()[1:], local.shape[1:], strict=True)
    )
    if not same:
        raise unsupported_op(
            f"{name}() with an index that differs from column to column"
        )
    return index.wrap(local.flatten(1)[:, 0], index.rows)


def _source_rows(
    source: Any, index: RowShardedTensor, target: Any, name: str
) -> Tensor:
    if not isinstance(source, Tensor) or not source.dim():
        base = local_part(target)
        return base.new_ones((len(index.rows), *base.shape[1:])) * source
    if isinstance(source, RowShardedTensor):
        found = shard_as(source, index.rows)
        if found is None:
            raise TypeError(
                f"{name}() got values cut as {source.rows} for ids cut as {index.rows}; "
                "pick the same rows of both"
            )
        return found
    return shard_plain_operand(source, index, source.dim(), name)


def _scatter_to_owners(
    target: RowShardedTensor,
    ids: RowShardedTensor,
    source: Tensor,
    op: str,
    include: bool,
) -> Tensor:
    """Scatters into a row-sharded tensor: results go to the owners of rows."""
    start, plan = target.to_local(), plan_of(ids, target.rows)

    def hits() -> Tensor:
        found = plan.scatter_add(start.new_ones(len(source)))
        return found.view(-1, *([1] * (start.dim() - 1)))

    ways = hits, plan.scatter_add, plan.scatter_extreme, plan.gather
    return _scattered(start, source, op, include, *ways)


def _scatter_into_plain(
    target: Tensor, ids: RowShardedTensor, source: Tensor, op: str, include: bool
) -> Tensor:
    """Scatters into an ordinary tensor: local results are reduced over the ranks."""
    axis, index = ids.rows.mesh.world, ids.to_local()
    zeros = torch.zeros_like(target, requires_grad=False)

    def summed(values: Tensor) -> Tensor:
        into = zeros if values.dim() == zeros.dim() else zeros[(..., 0)]
        return autograd.all_reduce(
            into.to(values.dtype).index_add(0, index, values), axis
        )

    def extreme(values: Tensor, start: Tensor, op: str) -> Tensor:
        best = _extremes(start, index, values, op)
        return collectives.all_reduce(best, axis, op[1:])

    def hits() -> Tensor:
        return summed(source.new_ones(source.shape))

    ways = hits, summed, extreme, lambda best: best.index_select(0, index)
    return _scattered(target, source, op, include, *ways)


def _scattered(
    start: Tensor,
    source: Tensor,
    op: str,
    include: bool,
    hits_of: Callable[[], Tensor],
    summed: Callable[[Tensor], Tensor],
    extreme: Callable[[Tensor, Tensor, str], Tensor],
    gathered: Callable[[Tensor], Tensor],
) -> Tensor:
    """Scatters rows into `start`, with the given reductions over the ranks."""
    if op == "sum" and include:
        return start + summed(source.to(start.dtype))
    hits = hits_of()
    if op == "sum":
        return torch.where(hits > 0, summed(source.to(start.dtype)), start)
    if op == "mean":
        sums = summed(source) + (start if include else 0)
        return torch.where(hits > 0, sums / (hits + int(include)).clamp(min=1), start)
    held = start.detach()
    first = (
        held if include else torch.full_like(held, reduction_identity(held.dtype, op))
    )
    best = extreme(source.detach(), first, op)
    best = torch.where((hits > 0) | bool(include), best, held)
    if not source.requires_grad:
        return best
    mine = source == gathered(best)
    # as torch, which counts a target of the same value whether it is included or not
    ties = summed(mine.to(source.dtype)) + (held == best)
    picked = summed(torch.where(mine, source, 0)) / ties.clamp(min=1)
    return _with_gradient(best, picked, hits)


def _extremes(start: Tensor, index: Tensor, rows: Tensor, op: str) -> Tensor:
    """Returns `start` with maxima or minima updated by the rows at an index."""
    wide = index.view(-1, *([1] * (rows.dim() - 1))).expand_as(rows)
    return start.scatter_reduce(0, wide, rows, op)


def _with_gradient(best: Tensor, picked: Tensor, hits: Tensor) -> Tensor:
    """Adds the gradient of the selected rows to extremes, which may be rounded.

    Of three equal values a mean is not always the value.
    """
    held = picked.detach()
    exact = torch.where(best.isfinite(), best + (picked - held), picked)
    return torch.where((hits > 0) & (best.isfinite() | (best == held)), exact, best)


def reduction_identity(dtype: torch.dtype, op: str) -> float:
    """Returns the identity element of "amax" (the least value of a type) or "amin"."""
    if dtype == torch.bool:
        return op == "amin"
    if dtype.is_floating_point:
        return -math.inf if op == "amax" else math.inf
    info = torch.iinfo(dtype)
    return info.min if op == "amax" else info.max

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
import math
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm import kernels
from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.comm.rows import Latest, Rows
from pyg_distcomm.ops.id_plan import IdPlan, plan_ids, reduction_identity
from pyg_distcomm.partition.partition import Partition
from pyg_distcomm.sharded.agreement import compare_ids, pass_by
from pyg_distcomm.sharded.constants import ByContent, kept_with, version_of
from pyg_distcomm.sharded.dist_tensor import (
    DistTensor,
    local_at,
    own_part,
    rule,
)

aten = torch.ops.aten
_KEPT = 64  # blocks of rows
_KEPT_PLANS = 16  # of one list of ids
_SUMMED = (torch.float32, torch.float64)


class Ids:
    """Holds the ids `[k]` on this rank, and what has been planned for them.

    Args:
        local: the ids.
        rows: which rows these are.
        end: 0 for the sources of edges, 1 for their targets, None for other ids.
    """

    __slots__ = ("_highest", "_plans", "end", "local", "rows")

    def __init__(self, local: Tensor, rows: Rows, end: int | None = None) -> None:
        self.local, self.rows, self.end = local, rows, end
        self._highest: int | None = None
        self._plans = Latest(_KEPT_PLANS)

    def check_below(self, count: int) -> None:
        """Raises on all ranks if an id is not below a number of rows; collective once."""
        if self._highest is None:
            here = int(self.local.max()) if self.local.numel() else -1
            most = torch.tensor([here])
            found = collectives.all_reduce(most, self.rows.mesh.world, "max")
            self._highest = int(found)
        if self._highest >= count:
            raise IndexError(
                f"index {self._highest} is out of range for a tensor of {count} rows"
            )

    def exchange(self, rows: Rows) -> IdExchange:
        """Returns the exchange with rows of a tensor; collective at the first call."""
        if id(rows) not in self._plans:
            self._plans[id(rows)] = rows, _planned(self, rows)
        # where gradients of what was read belong
        self.rows.latest("read")[rows.count] = rows
        return self._plans[id(rows)][1]  # type: ignore[no-any-return]


def _planned(ids: Ids, rows: Rows) -> IdExchange:
    if rows.mesh.local_sizes:
        return LocalExchange(ids, rows)
    flat, problem = ids.local.reshape(-1).long(), None
    flat = torch.where(flat < 0, flat + rows.count, flat)
    low, high = flat.aminmax() if flat.numel() else (0, -1)
    if low < 0 or high >= rows.count:
        bad, flat = int(low if low < 0 else high), flat[:0]
        bad -= rows.count if bad < 0 else 0
        problem = f"index {bad} is out of range for a tensor of {rows.count} rows"
    plan = plan_ids([flat], rows, rows.mesh.world, problem)[0]
    axis = rows.mesh.world
    tell: Any = axis.observer
    if tell is not None:  # edges are where their targets are
        known = ids.end == 0 and rows.partition is not None
        observer = functools.partial(tell, known=known)
        axis = replace(axis, observer=observer)
        halo = replace(plan.halo, axis=axis, silent=ids.end == 1)
        plan = replace(plan, halo=halo)
    return IdExchange(plan.to(ids.local.device))


class IdExchange:
    """Gathers and scatters rows by planned ids, below autograd.

    Shapes: n own rows, h ghosts, k ids; slot [k] in 0 .. n + h - 1.
    Price: h f words for a gather, the same transposed for a scatter.
    """

    __slots__ = ("_constant", "_csr", "_hit", "count", "halo", "own", "slot")

    def __init__(self, plan: IdPlan) -> None:
        self.halo, self.slot, self.own = plan.halo, plan.slot, plan.own
        self.count = self.own + self.halo.num_ghosts
        self._csr: tuple[Tensor, Tensor] | None = None
        self._hit: Tensor | None = None
        self._constant: tuple[int, Tensor | None] | None = (
            None  # the rows of a constant
        )

    def gather(self, x: Tensor, key: int | None = None) -> Tensor:
        """Returns the rows `[k, ...]` of own rows `[n, ...]`.

        Args:
            x: own rows.
            key: the number of `x` among constants, whose ghosts are kept from their second
                use on.
        """
        rest = x.shape[1:]
        flat = x.reshape(len(x), math.prod(rest))
        if not self.halo.silent:
            flat = self._with_ghosts(flat, key)
        return _rows_at(flat, self.slot).view(len(self.slot), *rest)

    def _with_ghosts(self, x: Tensor, key: int | None) -> Tensor:
        known = self._constant
        if (
            key is not None
            and known is not None
            and known[0] == key
            and known[1] is not None
        ):
            return torch.cat([x, known[1]])
        table = x.new_empty((self.count, x.size(1)))
        arrive = self.halo.begin(_wire(x), _wire(table[self.own :]))
        table[: self.own] = x
        arrive()
        if key is not None:
            again = known is not None and known[0] == key
            self._constant = key, table[self.own :].clone() if again else None
        return table

    def sum(self, src: Tensor) -> Tensor:
        """Returns the sums `[n, ...]` of rows `[k, ...]` by id, at the owners."""
        rest = src.shape[1:]
        flat = src.reshape(len(src), math.prod(rest))
        if flat.dtype in _SUMMED and len(flat):
            rowptr, perm = self._sorted()
            table = kernels.spmm(rowptr, perm, None, flat.contiguous())
        else:
            table = flat.new_zeros((self.count, flat.size(1))).index_add_(
                0, self.slot, flat
            )
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
            rowptr, perm = self._sorted()
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

    def hit(self, dim: int) -> Tensor:
        """Tells which own rows any id names, `[n, 1, ...]` with `dim` dimensions."""
        if self._hit is None:
            found = torch.zeros(self.count, dtype=torch.bool, device=self.slot.device)
            found[self.slot] = True
            found = found[: self.own].clone()
            found[self.halo.send_slot] = True
            self._hit = found
        return beside(self._hit, dim)

    def put(self, out: Tensor, src: Tensor, at: Tensor) -> None:
        """Writes rows `[k, ...]` to the rows of their ids; of several the last one stays.

        Args:
            out: own rows, which it writes to.
            src: a row for each id.
            at: the place of each id among those of all ranks.
        """
        last = self.extreme(at, "amax")
        wins = self.gather(last) == at
        src = src.to(torch.uint8) if src.dtype == torch.bool else src
        total = self.sum(
            torch.where(beside(wins, src.dim()), src, torch.zeros_like(src))
        )
        hit = self.hit(out.dim())
        out.copy_(torch.where(hit, total.to(out.dtype), out))

    def _sorted(self) -> tuple[Tensor, Tensor]:
        if self._csr is None:
            arange = torch.arange(len(self.slot), device=self.slot.device)
            rowptr, col, _ = kernels.coo_to_csr(self.slot, arange, self.count)
            self._csr = rowptr, col
        return self._csr


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


class LocalExchange(IdExchange):
    """Reads rows of a chunk by ids; those of other chunks are facts of the graph."""

    __slots__ = ("_topology",)

    def __init__(self, ids: Ids, rows: Rows) -> None:
        slot = ids.local.reshape(-1).long()
        halo: Any = _Nothing()
        self._topology: Any = rows.derived.get("topology")
        if ids.end == 0 and self._topology is not None:
            halo = self._topology.outside
        elif len(slot) and int(slot.max()) >= len(rows):
            raise TypeError(
                "a layer of a pipeline selects sources of edges, of which some lie in other "
                "chunks, and reads rows by them; read by edge_index[0] of all its edges, or "
                "precompute the rows as an attribute of the Data"
            )
        super().__init__(IdPlan(halo, slot, len(rows)))

    def _with_ghosts(self, x: Tensor, key: int | None) -> Tensor:
        found: Tensor = self._topology.locals.with_ghost_facts(x)
        return found


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
    known, key = rows.latest("reshard"), (id(x.rows), x.device)
    if key not in known:
        ids = Ids(rows.place_on(x.device), rows)
        known[key] = x.rows, _planned(ids, x.rows)
    moved = known[key][1].gather(x.local.movedim(x.dim_, 0))
    return moved.movedim(0, x.dim_)  # type: ignore[no-any-return]


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
    if count not in kept:
        kept[count] = Rows.blocks(count, mesh)
    return kept[count]  # type: ignore[no-any-return]


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

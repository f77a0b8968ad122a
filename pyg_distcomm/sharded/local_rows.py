"""Describes rows that are all on this rank, as those of a chunk, and reads them by ids."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.ops.id_plan import IdPlan
from pyg_distcomm.sharded.dist_tensor import rule
from pyg_distcomm.sharded.ids import IdExchange, Ids


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


@rule("ids of a chunk")
def exchange(ids: Ids, rows: Rows) -> IdExchange:
    """Returns what reads and scatters rows of a chunk by ids."""
    return LocalExchange(ids, rows)

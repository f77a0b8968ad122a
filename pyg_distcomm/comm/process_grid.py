"""Opens process groups for sampling and fetching beside training.

[Note: channels] Collectives of one process group have to start in the same order on all
ranks. Sampling and fetching run in their own threads, so each has its own process groups,
independent of the order of training's collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from pyg_distcomm.comm.axis import destroy_groups
from pyg_distcomm.comm.collectives import Axis
from pyg_distcomm.comm.ledger import Ledger
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.comm.store import open_group


@dataclass(frozen=True, eq=False)
class ProcessGrid:
    """Describes a grid of P/c x c ranks with process groups of its own.

    Rank q stands at row q // c, column q % c. The c ranks of one row hold the same
    block of data; the P/c ranks of one column hold all blocks between them.

    Args:
        replication: c.
        world: all ranks.
        row: the ranks of this column, one for each block (the axis on which i varies).
        col: the ranks of this row, which hold the same block.
    """

    replication: int
    world: Axis
    row: Axis
    col: Axis

    @property
    def block(self) -> int:
        """Returns the block that this rank holds: its place on the row axis."""
        return self.row.rank

    def members(self, block: int) -> range:
        """Returns the ranks that hold a block."""
        return range(block * self.replication, (block + 1) * self.replication)

    def close(self) -> None:
        """Destroys the process groups, once nothing uses them.

        After a failure they are kept: a rank that still waits could not destroy them.
        """
        watch = self.world.watch
        if not dist.is_initialized() or (
            watch is not None and watch.reported_failure()
        ):
            return
        # c = 1: row and world share one group
        destroy_groups((self.world, self.row, self.col))


def new_process_grid(
    mesh: Mesh, replication: int | None = None, purpose: str = ""
) -> ProcessGrid:
    """Opens a process grid; collective over all ranks of the mesh.

    Args:
        mesh: the ranks.
        replication: c, which has to divide P. The default is that of the mesh if its
            grid is (P/c, c, 1), and 1 otherwise.
        purpose: a prefix of the names of the axes in the ledger.

    Raises:
        ValueError: if c does not divide P; the message lists the values that do.
    """
    c = check_replication(mesh, replication)
    size, rank = mesh.size, mesh.rank
    watch, ledger = mesh.world.watch, Ledger(parent=mesh.ledger)

    def axis(name: str, ranks: Sequence[int], group: dist.ProcessGroup | None) -> Axis:
        place = ranks.index(rank)
        named = f"{purpose}:{name}" if purpose else name
        return Axis(named, place, len(ranks), group, ledger, watch)

    everyone = range(size)
    group = _group(mesh, everyone)
    columns = [everyone[j::c] for j in range(c)]
    rows = [everyone[i : i + c] for i in range(0, size, c)]
    # every rank makes every group, in the same order, as torch requires
    by_column = [group] if c == 1 else [_group(mesh, ranks) for ranks in columns]
    by_row = [_group(mesh, ranks) for ranks in rows]
    return ProcessGrid(
        c,
        axis("world", everyone, group),
        axis("row", columns[rank % c], by_column[rank % c]),
        axis("col", rows[rank // c], by_row[rank // c]),
    )


def check_replication(mesh: Mesh, replication: int | None) -> int:
    """Returns c, or raises an error that lists the values that fit."""
    if replication is None:
        r, s, p = mesh.grid
        return s if p == 1 and r > 1 else 1
    fits = [c for c in range(1, mesh.size + 1) if mesh.size % c == 0]
    if replication not in fits:
        raise ValueError(
            f"replication={replication!r} must divide the number of ranks, {mesh.size}; "
            f"it may be one of {fits}"
        )
    return int(replication)


def _group(mesh: Mesh, ranks: Sequence[int]) -> dist.ProcessGroup | None:
    if len(ranks) == 1 or mesh.world.group is None:
        return None
    watch = mesh.world.watch
    assert watch is not None
    # ids and features lie in host memory: gloo moves them whatever training uses
    return open_group(list(ranks), "gloo", watch.deadline)

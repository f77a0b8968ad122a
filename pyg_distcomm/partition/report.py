"""What a partition costs, counted before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from torch import Tensor

from pyg_distcomm.partition.edges import check_edge_index, plain_edges
from pyg_distcomm.partition.metrics import PartitionReport as PartitionReport
from pyg_distcomm.partition.partition import Grid, Partition, check_grid

Counts = tuple[int, ...]


def report(
    edge_index: Tensor,
    partition: Partition,
    train_mask: Tensor | None = None,
    grid: Grid | None = None,
) -> PartitionReport:
    """Counts what each part owns, sends and receives, in time linear in the edges.

    edge_index [2, num_edges] and train_mask [num_nodes] (bool) are of the whole graph;
    grid (r, s, p) adds what its blocks hold, send and receive.
    """
    check_edge_index(edge_index, partition.num_nodes)
    plain = plain_edges(edge_index).cpu().numpy()
    home = partition.owner.numpy()[plain[1]]
    # stable sorts of 8- and 16-bit keys are radix sorts, so grouping by part is linear
    order = np.argsort(home, kind="stable")
    count = RowCount(partition, grid)
    start = 0
    for part, edges in enumerate(np.bincount(home, minlength=partition.num_parts)):
        count.add(part, [plain[:, order[start : start + edges]]])
        start += edges
    return count.report(train_mask)


class RowCount:
    """Counts the rows that travel, part after part, from the edges of each part.

    Memory: 25 bytes a node, and a chunk of edges; grids with s > 1: s bytes more for
    each node of one part.
    """

    def __init__(self, partition: Partition, grid: Grid | None = None) -> None:
        """Begins with no edges."""
        parts, n = partition.num_parts, partition.num_nodes
        self._partition = partition
        self._owner = partition.owner.numpy()
        self._grid = check_grid(grid, parts)
        r, s, _ = self._grid
        self._cut = 0
        self._edges = np.zeros(parts, np.int64)
        self._send, self._halo = np.zeros((2, parts), np.int64)
        self._blocks, self._block_send, self._block_halo = np.zeros((3, r, s), np.int64)
        # never cleared: a part, and a process row, reads what it wrote itself
        self._by_part, self._by_row = np.full((2, n), -1, np.int32)
        self._place = np.empty(n, np.int64)
        self._lid = np.empty(n if s > 1 else 0, np.int64)

    def add(self, part: int, chunks: Iterable[np.ndarray]) -> None:
        """Counts the edges `[2, c]` of one part; parts must come in ascending order."""
        _, s, p = self._grid
        sums = np.zeros(0, np.bool_)
        if s > 1:
            gid = self._partition.gids(part).numpy()
            self._lid[gid] = np.arange(gid.size)
            sums = np.zeros(gid.size * s, np.bool_)
        for src, dst in chunks:
            self._edges[part] += src.size
            owner = self._owner[src].astype(np.int64)
            away = src[owner != part]
            self._cut += away.size
            new = self._new(away, self._by_part, part)
            self._halo[part] += new.size
            self._send += np.bincount(self._owner[new], minlength=self._send.size)
            self._add_rows(part // (s * p), src[owner // (s * p) != part // (s * p)])
            self._add_blocks(part, owner // p % s, dst, sums)

    def _new(self, gid: np.ndarray, seen: np.ndarray, stamp: int) -> np.ndarray:
        """Picks the ids that do not bear the stamp yet, each once, and stamps them."""
        gid = gid[seen[gid] != stamp]
        place = np.arange(gid.size)
        self._place[gid] = place
        gid = gid[self._place[gid] == place]
        seen[gid] = stamp
        return gid

    def _add_rows(self, i: int, away: np.ndarray) -> None:
        _, s, p = self._grid
        new = self._owner[self._new(away, self._by_row, i)].astype(np.int64)
        np.add.at(self._block_send, (new // (s * p), new // p % s), 1)
        np.add.at(self._block_halo[i], new // p % s, 1)

    def _add_blocks(
        self, part: int, col: np.ndarray, dst: np.ndarray, sums: np.ndarray
    ) -> None:
        _, s, p = self._grid
        i, j = part // (s * p), part // p % s
        self._blocks[i] += np.bincount(col, minlength=s)
        if s == 1:
            return
        away = col != j
        key = self._lid[dst[away]] * s + col[away]
        key = np.unique(key[~sums[key]])
        sums[key] = True
        self._block_send[i] += np.bincount(key % s, minlength=s)
        self._block_halo[i, j] += key.size

    def report(self, train_mask: Tensor | None = None) -> PartitionReport:
        """Returns the figures of all that was counted."""
        r, s, p = self._grid
        figures = PartitionReport(
            nodes=self._partition.sizes,
            edges=tuple(self._edges.tolist()),
            train=_train(train_mask, self._owner, self._send.size),
            edge_cut=self._cut,
            halo_rows=tuple(self._halo.tolist()),
            send_rows=tuple(self._send.tolist()),
            before=self._partition.before,
        )
        if s * p == 1:
            return figures
        blocks = (self._blocks, self._block_send, self._block_halo)
        flat = (tuple(block.reshape(-1).tolist()) for block in blocks)
        return figures.on_grid((r, s, p), *flat)


def _train(train_mask: Tensor | None, owner: np.ndarray, num_parts: int) -> Counts:
    if train_mask is None:
        return (0,) * num_parts
    mask = train_mask.cpu().numpy()
    if mask.shape != owner.shape or mask.dtype != np.bool_:
        raise ValueError(
            f"train_mask must be bool [{owner.size}], one entry per node, got "
            f"{train_mask.dtype} {list(train_mask.shape)}"
        )
    return tuple(np.bincount(owner[mask], minlength=num_parts).tolist())

"""Counts what parts own, carry, send and receive, before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from pyg_distcomm.partition.partition import (
    Grid,
    Partition,
    PartitionReport,
    check_grid,
    out_of_range,
)

SLACK = 2.0  # a soft limit is this many times looser than the hard one


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
    count = RowCount(partition, grid)
    for part, here in by_part(partition.owner.numpy()[plain[1]]):
        count.add(part, [plain[:, here]])
    return count.report(train_mask)


def by_part(home: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yields each part that occurs, and the places where it does, ascending."""
    # stable sorts of 8- and 16-bit keys are radix sorts, so grouping by part is linear
    order = np.argsort(home, kind="stable")
    start = 0
    for part, count in enumerate(np.bincount(home).tolist()):
        if count:
            yield part, order[start : start + count]
        start += count


class RowCount:
    """Counts the rows that parts exchange, part after part, from the edges of each.

    Memory: 25 bytes a node, and a chunk of edges; grids with s > 1: s bytes more for
    each node of one part.
    """

    def __init__(self, partition: Partition, grid: Grid | None = None) -> None:
        """Allocates counts of zero."""
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
        """Returns the ids whose entry in `seen` is not `stamp` yet, each once, and sets it."""
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
        train = train_vector(train_mask, self._owner.size) == 1
        figures = PartitionReport(
            nodes=self._partition.sizes,
            edges=tuple(self._edges.tolist()),
            train=tuple(np.bincount(self._owner[train], minlength=r * s * p).tolist()),
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


def check_edge_index(edge_index: Tensor, num_nodes: int) -> None:
    """Raises unless edge_index is [2, num_edges] integers within 0 .. num_nodes - 1."""
    if not isinstance(edge_index, Tensor):
        raise TypeError(
            f"edge_index must be a Tensor [2, num_edges], got {type(edge_index)}"
        )
    _check_integers(edge_index)
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        raise ValueError(
            f"edge_index must have shape [2, num_edges], got {list(edge_index.shape)}"
        )
    if num_nodes < 0:
        raise ValueError(f"num_nodes must not be negative, got {num_nodes}")
    bad = out_of_range(plain_edges(edge_index), num_nodes)
    if bad is not None and bad < 0:
        raise ValueError(f"edge_index has the negative node id {bad}")
    if bad is not None:
        raise ValueError(
            f"edge_index names node {bad}, but the graph has {num_nodes} nodes "
            f"(0 .. {num_nodes - 1}); set data.num_nodes if there are more"
        )


def plain_edges(edge_index: Tensor) -> Tensor:
    """Strips an edge_index of its subclass and its gradient."""
    return edge_index.detach().as_subclass(Tensor)


def train_vector(train_mask: Tensor | None, num_nodes: int) -> np.ndarray:
    """Returns 1 for each train node and 0 for others: int64 [num_nodes]."""
    if train_mask is None:
        return np.zeros(num_nodes, np.int64)
    if train_mask.dtype != torch.bool or list(train_mask.shape) != [num_nodes]:
        raise ValueError(
            f"train_mask must be bool [{num_nodes}], one entry per node, got "
            f"{train_mask.dtype} {list(train_mask.shape)}"
        )
    return plain_edges(train_mask).cpu().numpy().astype(np.int64)


def node_weights(edge_index: Tensor, train: np.ndarray) -> np.ndarray:
    """Returns [n, 2 + c]: what each node adds to the nodes, in-edges and further loads.

    Args:
        edge_index: of the graph.
        train: train nodes `[n]`, 0 or 1, or further loads `[n, c]`, that of train nodes first.
    """
    target = plain_edges(edge_index[1]).cpu()
    in_degree = torch.bincount(target, minlength=len(train)).numpy()
    return np.column_stack([np.ones(len(train), np.int64), in_degree, train])


def capacities(weight: np.ndarray, num_parts: int, balance: float) -> np.ndarray:
    """Returns the most that a part may carry of each load, the first being nodes."""
    if not balance >= 1:
        raise ValueError(
            f"balance is the largest part over the mean; got {balance}, give 1 or more"
        )
    mean = weight.sum(0) / num_parts
    loose = np.full(mean.size, 1 + SLACK * (balance - 1))
    loose[0] = 1
    capacity: np.ndarray = np.ceil(mean * loose)
    capacity[0] = max(capacity[0], math.floor(mean[0] * balance))
    return capacity


def part_loads(owner: np.ndarray, weight: np.ndarray, num_parts: int) -> np.ndarray:
    """Sums what each part carries: int64 [num_parts, 3]."""
    columns = [np.bincount(owner, column, num_parts) for column in weight.T]
    return np.stack(columns, axis=1).astype(np.int64)


def fill_empty(owner: np.ndarray, num_parts: int) -> np.ndarray:
    """Assigns to each empty part one node of the largest part."""
    sizes = np.bincount(owner, minlength=num_parts)
    for part in np.flatnonzero(sizes == 0):
        donor = int(sizes.argmax())
        owner[np.flatnonzero(owner == donor)[-1]] = part
        sizes[donor] -= 1
        sizes[part] += 1
    return owner


def _check_integers(edge_index: Tensor) -> None:
    dtype = edge_index.dtype
    if dtype in (torch.int64, torch.int32):
        return
    what = f"edge_index must be int64 or int32, got {dtype}"
    if dtype.is_floating_point and bool(edge_index.isnan().any()):
        what += " with NaN in it"
    raise TypeError(f"{what}; its entries are node ids")

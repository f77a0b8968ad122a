"""Defines `Partition`, the owner of each node, and counts rows that parts own and exchange."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_distcomm.kernels import memory
from pyg_distcomm.process import PROCESS

__all__ = ["Partition", "PartitionReport"]

Grid = tuple[int, int, int]
Owner = Tensor | np.ndarray | Sequence[int]
Counts = tuple[int, ...]
MOST_LINES = 16  # the most parts or blocks that a table shows
SLACK = 2.0  # soft limits allow this many times the slack of the hard limit


@dataclass(frozen=True, eq=False)
class Partition:
    """Assigns each node to the part that owns it; build one with `from_owner` or `cut`.

    owner     [num_nodes], the smallest of uint8, int16 and int32 that holds num_parts; on
              the CPU, possibly a memory-mapped file
    num_parts the number of parts, some of which may own nothing
    sizes     the number of nodes that each part owns
    before    the figures before `refine`, if it was used; `same_as` ignores them
    union     the partition of the nodes of all types, if these are the nodes of one type
    """

    owner: Tensor
    num_parts: int
    sizes: tuple[int, ...]
    before: PartitionReport | None = None
    union: Partition | None = None

    @classmethod
    def from_owner(
        cls, owner: Owner, num_parts: int, num_nodes: int | None = None
    ) -> Partition:
        """Builds a partition from a checked owner vector [num_nodes] of part numbers.

        Raises TypeError unless it holds integers, ValueError unless it is 1-D, as
        long as `num_nodes` (when given), and within 0 .. num_parts - 1.
        """
        num_parts = check_num_parts(num_parts)
        vector = as_vector(owner)
        if num_nodes is not None and vector.numel() != num_nodes:
            raise ValueError(
                f"owner has {vector.numel()} entries, but the graph has {num_nodes} "
                "nodes; give the part of every node, in the order of the Data"
            )
        if (bad := out_of_range(vector, num_parts)) is not None:
            gid = int((vector == bad).nonzero()[0])
            raise ValueError(
                f"owner of node {gid} is {bad}, but the parts are 0 .. {num_parts - 1}; give "
                "each node one of these"
            )
        vector = vector.to(owner_dtype(num_parts))
        counts = torch.bincount(vector, minlength=num_parts)
        return cls(vector, num_parts, tuple(counts.tolist()))

    @property
    def num_nodes(self) -> int:
        """Returns the number of nodes of the whole graph."""
        return self.owner.numel()

    def gids(self, part: int) -> Tensor:
        """Lists the nodes of `part`: int64 [sizes[part]], ascending."""
        if not 0 <= part < self.num_parts:
            raise ValueError(
                f"got part {part}, but the parts are 0 .. {self.num_parts - 1}"
            )
        return (self.owner == part).nonzero().view(-1)

    def owner_of(self, gid: Tensor) -> Tensor:
        """Returns the part of each node: int64, of the shape and device of `gid`."""
        if gid.is_floating_point() or gid.dtype == torch.bool:
            raise TypeError(f"node ids must be integers, got {gid.dtype}")
        index = gid.to(self.owner.device, torch.int64)
        if (bad := out_of_range(index, self.num_nodes)) is not None:
            raise ValueError(
                f"got node id {bad}, but the graph's ids are 0 .. {self.num_nodes - 1}"
            )
        # uint8 must not leave this class: as an index, torch reads it as a mask
        return self.owner[index].to(gid.device, torch.int64)

    def same_as(self, other: Partition) -> bool:
        """Returns whether both have the same parts, and assign each node to the same one."""
        return (
            self.num_parts == other.num_parts
            and self.sizes == other.sizes
            and torch.equal(self.owner, other.owner)
        )

    def refined_from(self, before: PartitionReport | None) -> Partition:
        """Returns the same partition, with the figures of the partition before refinement."""
        return replace(self, before=before)

    def digest(self) -> str:
        """Returns a hash of num_parts and owner: equal on two ranks if `same_as` holds."""
        state = hashlib.sha256(f"{self.num_parts} {self.num_nodes} ".encode())
        state.update(self.owner.contiguous().numpy().data)
        return state.hexdigest()

    def __repr__(self) -> str:
        low, high = min(self.sizes), max(self.sizes)
        each = f"{low}" if low == high else f"{low}..{high}"
        parts = "1 part" if self.num_parts == 1 else f"{self.num_parts} parts"
        return f"Partition({self.num_nodes} nodes on {parts}, {each} each)"


def owner_dtype(num_parts: int) -> torch.dtype:
    """Returns the smallest of uint8, int16 and int32 that holds num_parts - 1."""
    if num_parts <= 2**8:
        return torch.uint8
    return torch.int16 if num_parts <= 2**15 else torch.int32


def check_num_parts(num_parts: int) -> int:
    """Returns `num_parts` as an int; raises unless it is a whole number above 0."""
    whole = isinstance(num_parts, (int, np.integer)) and not isinstance(num_parts, bool)
    if not whole:
        raise TypeError(f"num_parts must be an int, got {num_parts!r}")
    if not 0 < num_parts < 2**31:
        raise ValueError(f"num_parts must be at least 1, got {num_parts}")
    return int(num_parts)


def check_grid(grid: Grid | None, num_parts: int) -> Grid:
    """Returns the grid (r, s, p), by default (num_parts, 1, 1); raises for another size."""
    if grid is None:
        return num_parts, 1, 1
    r, s, p = (*grid, 0, 0, 0)[:3]
    if len(grid) != 3 or min(grid) < 1 or r * s * p != num_parts:
        raise ValueError(
            f"grid must be three positive sizes (row, col, fiber) whose product is the "
            f"number of parts, {num_parts}; got {tuple(grid)}"
        )
    return r, s, p


def as_vector(owner: Owner) -> Tensor:
    """Returns owners as a vector on the CPU; raises if they are none."""
    if isinstance(owner, np.ndarray) and not owner.flags.writeable:
        owner = owner.copy()  # torch warns about memory it may not write
    try:
        vector = torch.as_tensor(owner).detach().cpu()
    except (RuntimeError, ValueError) as error:
        raise TypeError(f"owner is not a vector of part numbers: {error}") from None
    if vector.dim() != 1:
        raise ValueError(
            f"owner has shape {list(vector.shape)}, but must be 1-D: one part per node"
        )
    if vector.numel() == 0:
        return vector.to(torch.int64)
    if vector.is_floating_point() or vector.is_complex() or vector.dtype == torch.bool:
        raise TypeError(
            f"owner must hold integers (one part number per node), got {vector.dtype}"
        )
    return vector


PIECE = 1 << 17  # the ids that are looked at in one go, which stay in a cache


def pieces(ids: Tensor) -> Iterator[Tensor]:
    """Yields ids a piece at a time; of a file each is dropped from memory after it."""
    for part in ids.split(PIECE):
        yield part
        leave_in_file(part)


def leave_in_file(*arrays: Tensor) -> None:
    """Drops the pages of ids that `read_array` mapped, which are read again on access."""
    for x in arrays if PROCESS.in_files else ():
        if x.is_cpu and x.untyped_storage().data_ptr() in PROCESS.in_files:
            memory.drop_pages(x)


def out_of_range(ids: Tensor, count: int) -> int | None:
    """Returns an entry that is not in 0 .. count - 1, or None."""
    if ids.numel() == 0:
        return None
    found = [torch.aminmax(part) for part in pieces(ids.flatten())]
    low, high = min(int(f.min) for f in found), max(int(f.max) for f in found)
    if low < 0:
        return low
    return high if high >= count else None


@dataclass(frozen=True)
class PartitionReport:
    """Holds the figures of a partition; each tuple has one entry per part.

    nodes      the nodes that a part owns
    edges      the edges (nonzeros) that it owns: an edge belongs to its target's owner
    train      the train nodes that it owns; zeros without a train mask
    edge_cut   the number of edges whose ends have different owners
    halo_rows  the distinct nodes of other parts that are sources of its edges
    send_rows  the rows that it sends; a row counts once for each part that receives it
    grid       (r, s, p) of the ranks, if it was given; (P, 1, 1) has no blocks
    blocks     the nonzeros of each block A_ij of that grid, row by row [r s]
    block_send, block_halo
               the rows and partial rows that the ranks (i, j, *) send and receive in one
               product on that grid, each counted once, of the width they have there [r s]
    before     the figures before the partition was refined, if it was
    """

    nodes: Counts
    edges: Counts
    train: Counts
    edge_cut: int
    halo_rows: Counts
    send_rows: Counts
    grid: Counts = ()
    blocks: Counts = ()
    block_send: Counts = ()
    block_halo: Counts = ()
    before: PartitionReport | None = None

    @classmethod
    def from_dict(cls, figures: Mapping[str, Any]) -> PartitionReport:
        """Builds a report from the result of `dataclasses.asdict`, also if read from JSON."""
        plain: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in figures.items()
        }
        if plain.get("before") is not None:
            plain["before"] = cls.from_dict(plain["before"])
        return cls(**plain)

    @property
    def num_parts(self) -> int:
        """Returns the number of parts."""
        return len(self.nodes)

    @property
    def volume(self) -> int:
        """Returns the rows sent in one exchange: the sum over v of lambda(v) - 1.

        lambda(v) is the number of parts that own v or an edge from v.
        """
        return sum(self.halo_rows)

    @property
    def max_send(self) -> int:
        """Returns the most rows that a part sends."""
        return max(self.send_rows)

    @property
    def max_halo(self) -> int:
        """Returns the most rows that a part receives."""
        return max(self.halo_rows)

    @property
    def node_imbalance(self) -> float:
        """Returns the largest over the mean of the nodes owned."""
        return imbalance(self.nodes)

    def on_grid(
        self, grid: Counts, blocks: Counts, send: Counts, halo: Counts
    ) -> PartitionReport:
        """Returns the same figures with those of the blocks of a grid."""
        return replace(self, grid=grid, blocks=blocks, block_send=send, block_halo=halo)

    @property
    def busiest(self) -> int:
        """Returns the most rows that a rank sends or receives, on the grid if there is one."""
        return max(
            *(self.block_send or self.send_rows), *(self.block_halo or self.halo_rows)
        )

    def bytes(self, width: int, itemsize: int = 4) -> int:
        """Predicts the bytes of one exchange: volume * width * itemsize."""
        return self.volume * width * itemsize

    def __str__(self) -> str:
        names: Sequence[str] = ("nodes", "edges", "train", "halo rows", "sent rows")
        counts = (self.nodes, self.edges, self.train, self.halo_rows, self.send_rows)
        labels = [str(part) for part in range(self.num_parts)]
        lines = _table("part", names, labels, counts, "parts") + _summary(self)
        if self.blocks:
            r, s, p = self.grid
            names = ("nonzeros", "halo rows", "sent rows")
            columns = (self.blocks, self.block_halo, self.block_send)
            labels = [f"{i},{j}" for i in range(r) for j in range(s)]
            lines += ["", f"on a grid of {r} x {s} x {p}"]
            lines += _table("block", names, labels, columns, "blocks")
        if self.before is not None:
            lines += ["", *_comparison(self.before, self)]
        return "\n".join(lines)


def imbalance(counts: Sequence[float]) -> float:
    """Returns the largest over the mean, 1 if all are zero."""
    total = sum(counts)
    return max(counts) * len(counts) / total if total else 1.0


def _table(
    corner: str,
    names: Sequence[str],
    labels: list[str],
    columns: Sequence[Counts],
    title: str,
) -> list[str]:
    label_width = max(8, *(len(label) for label in labels[:MOST_LINES]))
    lines = [f"{corner:>{label_width}}" + "".join(f"{name:>12}" for name in names)]
    for label, row in zip(labels, zip(*columns, strict=True), strict=True):
        if len(lines) > MOST_LINES:
            lines.append(f" ... {len(labels) - MOST_LINES} more {title}")
            break
        lines.append(
            f"{label:>{label_width}}" + "".join(f"{count:>12,}" for count in row)
        )
    lines.append(f"{'all':>{label_width}}" + "".join(f"{sum(c):>12,}" for c in columns))
    ratios = "".join(f"{imbalance(column):>12.3f}" for column in columns)
    return [*lines, f"{'max/mean':>{label_width}}" + ratios]


def _summary(figures: PartitionReport) -> list[str]:
    edges, nodes = sum(figures.edges), sum(figures.nodes)
    share = figures.edge_cut / max(edges, 1)
    return [
        f"edge cut  {figures.edge_cut:,} of {edges:,} ({share:.1%})",
        f"volume    {figures.volume:,} rows per exchange "
        f"({figures.volume / max(nodes, 1):.3f} per node), "
        f"{figures.bytes(1):,} bytes per float32 feature",
        f"busiest   sends {figures.max_send:,} rows, receives {figures.max_halo:,}",
    ]


def _comparison(old: PartitionReport, new: PartitionReport) -> list[str]:
    lines = [f"{'refined':<22}{'before':>12}{'after':>12}{'ratio':>8}"]
    for name, old_count, new_count in (
        ("most rows sent", old.max_send, new.max_send),
        ("most rows received", old.max_halo, new.max_halo),
        ("volume", old.volume, new.volume),
    ):
        ratio = new_count / max(old_count, 1)
        lines.append(f"{name:<22}{old_count:>12,}{new_count:>12,}{ratio:>8.3f}")
    ratios = [
        ("nodes", old.nodes, new.nodes),
        ("edges", old.edges, new.edges),
        ("train", old.train, new.train),
        ("sent rows", old.send_rows, new.send_rows),
        ("halo rows", old.halo_rows, new.halo_rows),
    ]
    if new.blocks:
        ratios.append(("block nonzeros", old.blocks, new.blocks))
    for name, *counts in ratios:
        title = f"{name}, max/mean"
        lines.append(f"{title:<22}" + "".join(f"{imbalance(c):>12.3f}" for c in counts))
    return lines


def report(
    edge_index: Tensor,
    partition: Partition,
    train_mask: Tensor | None = None,
    grid: Grid | None = None,
) -> PartitionReport:
    """Counts rows and edges that each part owns, sends and receives, in time linear in edges.

    edge_index [2, num_edges] and train_mask [num_nodes] (bool) are of the whole graph;
    grid (r, s, p) adds the figures of its blocks.
    """
    check_edge_index(edge_index, partition.num_nodes)
    plain = plain_edges(edge_index).cpu().numpy()
    count = RowCount(partition, grid)
    for part, here in group_by_part(partition.owner.numpy()[plain[1]]):
        count.add(part, [plain[:, here]])
    return count.report(train_mask)


def group_by_part(owner: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yields each part that occurs in `owner`, with the ascending indices of its entries."""
    # stable sorts of 8- and 16-bit keys are radix sorts, so grouping by part is linear
    order = np.argsort(owner, kind="stable")
    start = 0
    for part, count in enumerate(np.bincount(owner).tolist()):
        if count:
            yield part, order[start : start + count]
        start += count


class RowCount:
    """Counts the rows that parts exchange from their edges, one part after another.

    Memory: 25 bytes per node, and a chunk of edges; on grids with s > 1, s bytes more for
    each node of one part.
    """

    def __init__(self, partition: Partition, grid: Grid | None = None) -> None:
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
            remote = src[owner != part]
            self._cut += remote.size
            new = self._first_seen(remote, self._by_part, part)
            self._halo[part] += new.size
            self._send += np.bincount(self._owner[new], minlength=self._send.size)
            self._add_rows(part // (s * p), src[owner // (s * p) != part // (s * p)])
            self._add_blocks(part, owner // p % s, dst, sums)

    def _first_seen(self, gid: np.ndarray, seen: np.ndarray, stamp: int) -> np.ndarray:
        """Returns the distinct ids whose entry in `seen` is not `stamp` yet, and sets these."""
        gid = gid[seen[gid] != stamp]
        place = np.arange(gid.size)
        self._place[gid] = place
        gid = gid[self._place[gid] == place]
        seen[gid] = stamp
        return gid

    def _add_rows(self, i: int, remote: np.ndarray) -> None:
        _, s, p = self._grid
        new = self._owner[self._first_seen(remote, self._by_row, i)].astype(np.int64)
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
        remote = col != j
        key = self._lid[dst[remote]] * s + col[remote]
        key = np.unique(key[~sums[key]])
        sums[key] = True
        self._block_send[i] += np.bincount(key % s, minlength=s)
        self._block_halo[i, j] += key.size

    def report(self, train_mask: Tensor | None = None) -> PartitionReport:
        """Returns the figures of all parts that were added."""
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
    dtype = edge_index.dtype
    if dtype not in (torch.int64, torch.int32):
        title = f"edge_index must be int64 or int32, got {dtype}"
        if dtype.is_floating_point and bool(edge_index.isnan().any()):
            title += " with NaN in it"
        raise TypeError(f"{title}; its entries are node ids")
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        raise ValueError(
            f"edge_index must have shape [2, num_edges], got {list(edge_index.shape)}"
        )
    if num_nodes < 0:
        raise ValueError(f"num_nodes must not be negative, got {num_nodes}")
    bad = out_of_range(plain_edges(edge_index), num_nodes)
    if bad is not None and bad < 0:
        raise ValueError(
            f"edge_index has the negative node id {bad}, but ids are 0 .. {num_nodes - 1}; "
            "number the nodes from 0"
        )
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
    """Returns [n, 2 + c]: the loads of each node: 1, its in-degree, and further loads.

    Args:
        edge_index: the edges of the graph.
        train: train nodes `[n]`, 0 or 1, or further loads `[n, c]`, that of train nodes first.
    """
    target = plain_edges(edge_index[1]).cpu()
    in_degree = torch.bincount(target, minlength=len(train)).numpy()
    return np.column_stack([np.ones(len(train), np.int64), in_degree, train])


def capacities(weight: np.ndarray, num_parts: int, balance: float) -> np.ndarray:
    """Returns the largest sum of each load that a part may have; the first is nodes."""
    if not balance >= 1:
        raise ValueError(
            f"balance (the largest part over the mean) must be 1 or more, got {balance}"
        )
    mean = weight.sum(0) / num_parts
    loose = np.full(mean.size, 1 + SLACK * (balance - 1))
    loose[0] = 1
    capacity: np.ndarray = np.ceil(mean * loose)
    capacity[0] = max(capacity[0], math.floor(mean[0] * balance))
    return capacity


def part_loads(owner: np.ndarray, weight: np.ndarray, num_parts: int) -> np.ndarray:
    """Returns the sum of each load over the nodes of each part: int64 [num_parts, 2 + c]."""
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

"""Holds the figures of a partition, as numbers and as a table, and checks edges."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

Counts = tuple[int, ...]
MOST_LINES = 16  # parts or blocks that a table shows


@dataclass(frozen=True)
class PartitionReport:
    """The figures of a partition, each tuple with one entry per part.

    nodes      nodes owned
    edges      edges owned (nonzeros), an edge living with the owner of its target
    train      train nodes owned (zeros without a train mask)
    edge_cut   edges whose ends have different owners
    halo_rows  distinct nodes of other parts that are sources of own edges
    send_rows  own rows asked for, once for each part that asks
    grid       (r, s, p) of the ranks, where it was given; (P, 1, 1) has no blocks
    blocks     nonzeros of each block A_ij of that grid, row by row [r s]
    block_send, block_halo
               rows and partial rows that the ranks (i, j, *) send and receive in one
               product on that grid, each that is needed once, at the width they have
               there [r s]
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
        """Builds a report from what `dataclasses.asdict` gave, through JSON or not."""
        plain: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in figures.items()
        }
        if plain.get("before") is not None:
            plain["before"] = cls.from_dict(plain["before"])
        return cls(**plain)

    @property
    def num_parts(self) -> int:
        """Parts of the partition."""
        return len(self.nodes)

    @property
    def volume(self) -> int:
        """Rows that travel in one exchange: sum over v of lambda(v) - 1.

        lambda(v) is the number of parts that own v or an edge from v.
        """
        return sum(self.halo_rows)

    @property
    def max_send(self) -> int:
        """Rows that the busiest sender sends."""
        return max(self.send_rows)

    @property
    def max_halo(self) -> int:
        """Rows that the busiest receiver receives."""
        return max(self.halo_rows)

    @property
    def node_imbalance(self) -> float:
        """Largest over mean of the nodes owned."""
        return imbalance(self.nodes)

    @property
    def edge_imbalance(self) -> float:
        """Largest over mean of the edges owned."""
        return imbalance(self.edges)

    @property
    def train_imbalance(self) -> float:
        """Largest over mean of the train nodes owned."""
        return imbalance(self.train)

    @property
    def send_imbalance(self) -> float:
        """Largest over mean of the rows sent."""
        return imbalance(self.send_rows)

    @property
    def halo_imbalance(self) -> float:
        """Largest over mean of the rows received."""
        return imbalance(self.halo_rows)

    @property
    def block_imbalance(self) -> float:
        """Largest over mean of the nonzeros of the blocks of the grid."""
        return imbalance(self.blocks or self.edges)

    def on_grid(
        self, grid: Counts, blocks: Counts, send: Counts, halo: Counts
    ) -> PartitionReport:
        """Returns the same figures with those of the blocks of a grid."""
        return replace(self, grid=grid, blocks=blocks, block_send=send, block_halo=halo)

    @property
    def busiest(self) -> int:
        """Rows that the busiest rank sends or receives, on the grid if one was given."""
        return max(
            *(self.block_send or self.send_rows), *(self.block_halo or self.halo_rows)
        )

    def bytes(self, width: int, itemsize: int = 4) -> int:
        """Predicts the bytes of one exchange: volume * width * itemsize."""
        return self.volume * width * itemsize

    def __str__(self) -> str:
        lines = [*_parts(self), *_summary(self)]
        if self.blocks:
            lines += ["", *_blocks(self)]
        if self.before is not None:
            lines += ["", *_comparison(self.before, self)]
        return "\n".join(lines)


def imbalance(counts: Counts) -> float:
    """Gives the largest over the mean; 1 where there is nothing."""
    total = sum(counts)
    return max(counts) * len(counts) / total if total else 1.0


def _parts(figures: PartitionReport) -> list[str]:
    names = ("nodes", "edges", "train", "halo rows", "sent rows")
    columns = (
        figures.nodes,
        figures.edges,
        figures.train,
        figures.halo_rows,
        figures.send_rows,
    )
    labels = [str(part) for part in range(figures.num_parts)]
    return _table("part", names, labels, columns, "parts")


def _blocks(figures: PartitionReport) -> list[str]:
    r, s, p = figures.grid
    names = ("nonzeros", "halo rows", "sent rows")
    columns = (figures.blocks, figures.block_halo, figures.block_send)
    labels = [f"{i},{j}" for i in range(r) for j in range(s)]
    table = _table("block", names, labels, columns, "blocks")
    return [f"on a grid of {r} x {s} x {p}", *table]


def _table(
    corner: str,
    names: tuple[str, ...],
    labels: list[str],
    columns: tuple[Counts, ...],
    what: str,
) -> list[str]:
    wide = max(8, *(len(label) for label in labels[:MOST_LINES]))
    lines = [f"{corner:>{wide}}" + "".join(f"{name:>12}" for name in names)]
    for label, row in zip(labels, zip(*columns, strict=True), strict=True):
        if len(lines) > MOST_LINES:
            lines.append(f" ... {len(labels) - MOST_LINES} more {what}")
            break
        lines.append(f"{label:>{wide}}" + "".join(f"{count:>12,}" for count in row))
    lines.append(f"{'all':>{wide}}" + "".join(f"{sum(c):>12,}" for c in columns))
    ratios = "".join(f"{imbalance(column):>12.3f}" for column in columns)
    return [*lines, f"{'max/mean':>{wide}}" + ratios]


def _summary(figures: PartitionReport) -> list[str]:
    edges, nodes = sum(figures.edges), sum(figures.nodes)
    share = figures.edge_cut / max(edges, 1)
    return [
        f"edge cut  {figures.edge_cut:,} of {edges:,} ({share:.1%})",
        f"volume    {figures.volume:,} rows an exchange "
        f"({figures.volume / max(nodes, 1):.3f} a node), "
        f"{figures.bytes(1):,} bytes a float32 feature",
        f"busiest   sends {figures.max_send:,} rows, receives {figures.max_halo:,}",
    ]


def _comparison(old: PartitionReport, new: PartitionReport) -> list[str]:
    lines = [f"{'refined':<22}{'before':>12}{'after':>12}{'ratio':>8}"]
    for name, pick in (
        ("most rows sent", PartitionReport.max_send),
        ("most rows received", PartitionReport.max_halo),
        ("volume", PartitionReport.volume),
    ):
        was, now = pick.fget(old), pick.fget(new)  # type: ignore[attr-defined]
        lines.append(f"{name:<22}{was:>12,}{now:>12,}{now / max(was, 1):>8.3f}")
    ratios = [
        ("nodes", old.nodes, new.nodes),
        ("edges", old.edges, new.edges),
        ("train", old.train, new.train),
        ("sent rows", old.send_rows, new.send_rows),
        ("halo rows", old.halo_rows, new.halo_rows),
    ]
    if new.blocks:
        ratios.append(("block nonzeros", old.blocks, new.blocks))
    for name, was, now in ratios:
        what = f"{name}, max/mean"
        lines.append(f"{what:<22}{imbalance(was):>12.3f}{imbalance(now):>12.3f}")
    return lines


SLACK = 2.0  # a soft limit is this many times looser than the hard one


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
    if edge_index.size(1) == 0:
        return
    low, high = (int(value) for value in torch.aminmax(plain_edges(edge_index)))
    if low < 0:
        raise ValueError(f"edge_index has the negative node id {low}")
    if high >= num_nodes:
        raise ValueError(
            f"edge_index names node {high}, but the graph has {num_nodes} nodes "
            f"(0 .. {num_nodes - 1}); set data.num_nodes if there are more"
        )


def plain_edges(edge_index: Tensor) -> Tensor:
    """Strips an edge_index of its subclass and its gradient."""
    return edge_index.detach().as_subclass(Tensor)


def train_vector(train_mask: Tensor | None, num_nodes: int) -> np.ndarray:
    """Gives 1 for a train node and 0 for another: int64 [num_nodes]."""
    if train_mask is None:
        return np.zeros(num_nodes, np.int64)
    if train_mask.dtype != torch.bool or list(train_mask.shape) != [num_nodes]:
        raise ValueError(
            f"train_mask must be bool [{num_nodes}], one entry per node, got "
            f"{train_mask.dtype} {list(train_mask.shape)}"
        )
    return plain_edges(train_mask).cpu().numpy().astype(np.int64)


def node_weights(edge_index: Tensor, train: np.ndarray) -> np.ndarray:
    """Gives [n, 3]: what each node adds to the nodes, in-edges and train nodes."""
    target = plain_edges(edge_index[1]).cpu()
    in_degree = torch.bincount(target, minlength=train.size).numpy()
    return np.stack([np.ones_like(train), in_degree, train], axis=1)


def capacities(weight: np.ndarray, num_parts: int, balance: float) -> np.ndarray:
    """Gives the most that a part may carry of each load: nodes, in-edges, train nodes."""
    if not balance >= 1:
        raise ValueError(
            f"balance is the largest part over the mean; got {balance}, give 1 or more"
        )
    mean = weight.sum(0) / num_parts
    loose = 1 + SLACK * (balance - 1)
    capacity: np.ndarray = np.ceil(mean * [1, loose, loose])
    capacity[0] = max(capacity[0], math.floor(mean[0] * balance))
    return capacity


def part_loads(owner: np.ndarray, weight: np.ndarray, num_parts: int) -> np.ndarray:
    """Adds up what each part carries: int64 [num_parts, 3]."""
    columns = [np.bincount(owner, column, num_parts) for column in weight.T]
    return np.stack(columns, axis=1).astype(np.int64)


def fill_empty(owner: np.ndarray, num_parts: int) -> np.ndarray:
    """Gives each empty part one node of the largest part."""
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

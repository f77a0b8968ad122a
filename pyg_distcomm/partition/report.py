"""What a partition costs, counted before anything is sent."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from pyg_distcomm.partition.cutters import check_edge_index
from pyg_distcomm.partition.partition import Partition

Counts = tuple[int, ...]
MOST_LINES = 16  # parts that the table shows


@dataclass(frozen=True)
class PartitionReport:
    """The figures of a partition, each tuple with one entry per part.

    nodes      nodes owned
    edges      edges owned, an edge living with the owner of its target
    train      train nodes owned (zeros without a train mask)
    edge_cut   edges whose ends have different owners
    halo_rows  distinct nodes of other parts that are sources of own edges
    send_rows  own rows asked for, once for each part that asks
    """

    nodes: Counts
    edges: Counts
    train: Counts
    edge_cut: int
    halo_rows: Counts
    send_rows: Counts

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
        return _imbalance(self.nodes)

    @property
    def edge_imbalance(self) -> float:
        """Largest over mean of the edges owned."""
        return _imbalance(self.edges)

    @property
    def train_imbalance(self) -> float:
        """Largest over mean of the train nodes owned."""
        return _imbalance(self.train)

    def bytes(self, width: int, itemsize: int = 4) -> int:
        """Predicts the bytes of one exchange: volume * width * itemsize."""
        return self.volume * width * itemsize

    def __str__(self) -> str:
        return "\n".join([*_table(self), *_summary(self)])


def report(
    edge_index: Tensor, partition: Partition, train_mask: Tensor | None = None
) -> PartitionReport:
    """Counts what each part owns, sends and receives, in time linear in the edges.

    edge_index [2, num_edges] and train_mask [num_nodes] (bool) are of the whole graph.
    """
    check_edge_index(edge_index, partition.num_nodes)
    plain = edge_index.detach().as_subclass(Tensor).cpu().numpy()
    owner = partition.owner.numpy()
    parts = partition.num_parts
    home = owner[plain[1]]
    away = owner[plain[0]] != home
    halo, send = _rows(plain[0][away], home[away], owner, parts)
    return PartitionReport(
        nodes=partition.sizes,
        edges=_per_part(home, parts),
        train=_train(train_mask, owner, parts),
        edge_cut=int(np.count_nonzero(away)),
        halo_rows=halo,
        send_rows=send,
    )


def _rows(
    src_gid: np.ndarray, home: np.ndarray, owner: np.ndarray, num_parts: int
) -> tuple[Counts, Counts]:
    """Counts the distinct (home, source) pairs of the cut edges, by home and by owner.

    Stable sorts of 8- and 16-bit keys are radix sorts, so grouping by part is linear.
    """
    src_gid = src_gid[np.argsort(home, kind="stable")]
    ends = np.cumsum(np.bincount(home, minlength=num_parts))
    halo = np.zeros(num_parts, np.int64)
    send = np.zeros(num_parts, np.int64)
    last = np.empty(owner.size, np.int64)  # never cleared: a part reads what it wrote
    start = 0
    for part, end in enumerate(ends):
        asked = src_gid[start:end]
        place = np.arange(asked.size)
        last[asked] = place
        rows = asked[last[asked] == place]
        halo[part] = rows.size
        send += np.bincount(owner[rows], minlength=num_parts)
        start = end
    return tuple(halo.tolist()), tuple(send.tolist())


def _train(train_mask: Tensor | None, owner: np.ndarray, num_parts: int) -> Counts:
    if train_mask is None:
        return (0,) * num_parts
    mask = train_mask.cpu().numpy()
    if mask.shape != owner.shape or mask.dtype != np.bool_:
        raise ValueError(
            f"train_mask must be bool [{owner.size}], one entry per node, got "
            f"{train_mask.dtype} {list(train_mask.shape)}"
        )
    return _per_part(owner[mask], num_parts)


def _per_part(part: np.ndarray, num_parts: int) -> Counts:
    return tuple(np.bincount(part, minlength=num_parts).tolist())


def _imbalance(counts: Counts) -> float:
    total = sum(counts)
    return max(counts) * len(counts) / total if total else 1.0


def _table(figures: PartitionReport) -> list[str]:
    names = ("nodes", "edges", "train", "halo rows", "sent rows")
    columns = (
        figures.nodes,
        figures.edges,
        figures.train,
        figures.halo_rows,
        figures.send_rows,
    )
    lines = ["part" + "".join(f"{name:>12}" for name in names)]
    for part, row in enumerate(zip(*columns, strict=True)):
        if part == MOST_LINES:
            lines.append(f" ... {figures.num_parts - MOST_LINES} more parts")
            break
        lines.append(f"{part:>4}" + "".join(f"{count:>12,}" for count in row))
    return [*lines, " all" + "".join(f"{sum(column):>12,}" for column in columns)]


def _summary(figures: PartitionReport) -> list[str]:
    edges, nodes = sum(figures.edges), sum(figures.nodes)
    share = figures.edge_cut / max(edges, 1)
    return [
        f"edge cut  {figures.edge_cut:,} of {edges:,} ({share:.1%})",
        f"volume    {figures.volume:,} rows an exchange "
        f"({figures.volume / max(nodes, 1):.3f} a node), "
        f"{figures.bytes(1):,} bytes a float32 feature",
        f"busiest   sends {figures.max_send:,} rows, receives {figures.max_halo:,}",
        f"max/mean  nodes {figures.node_imbalance:.3f}, edges "
        f"{figures.edge_imbalance:.3f}, train {figures.train_imbalance:.3f}",
    ]

"""Adds up and multiplies sparse matrices whose entries are edges, spread over ranks.

An entry (s, t) of a matrix is an edge from s to t. Entries lie anywhere; those of a matrix
on the left of a product, and edges that are made of one, lie with the owners of their targets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyg_distcomm.comm import autograd, collectives
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.graph.edge_index import DistEdgeIndex, rows_of_edges
from pyg_distcomm.tensor.dist_tensor import DistTensor


@dataclass(frozen=True, eq=False)
class EdgeMatrix:
    """Holds the entries of a sparse matrix that are on this rank; equal ones add up.

    Shapes: source [e], target [e], value [e], or None for a matrix of which only the places
    of entries count.

    Args:
        source: rows of the entries, as global ids.
        target: their columns, as global ids.
        value: their values, differentiable.
        rows: the nodes that targets are; they have a partition.
    """

    source: Tensor
    target: Tensor
    value: Tensor | None
    rows: Rows

    def turned(self, rows: Rows) -> EdgeMatrix:
        """Returns the transpose, with the owners of its targets.

        Args:
            rows: the nodes that sources are.

        Price: three words for each entry that another rank gets, two without values.
        """
        return EdgeMatrix(self.target, self.source, self.value, rows).at_owners()

    def at_owners(self) -> EdgeMatrix:
        """Moves entries to the owners of their targets; collective."""
        world = self.rows.mesh.world
        if world.size == 1:
            return self
        owner = _owners(self.rows, self.target)
        order, counts = _by_owner(owner, world.size)
        back = collectives.exchange_counts(counts, world)
        order = order.to(self.source.device)
        ends = torch.stack([self.source, self.target], 1)[order]
        came = collectives.all_to_all(ends, counts, back, world, "edges").wait()
        value = self.value
        if value is not None:
            value = autograd.all_to_all(value[order], counts, back, world, "edges")
        return replace(self, source=came[:, 0], target=came[:, 1], value=value)

    def __matmul__(self, other: EdgeMatrix) -> EdgeMatrix:
        """Returns the product, whose entries lie where those of `other` do.

            c_st = sum over k of a_sk b_kt

        Collective. Price: for each distinct k of `other` that another rank owns its id and a
        count; for each entry of this matrix at them its source, and its value if there are any,
        which returns as a gradient. All paths of two entries are held at once.
        """
        device, world = other.source.device, self.rows.mesh.world
        asked, place = torch.unique(other.source, return_inverse=True)
        order, counts = _by_owner(_owners(self.rows, asked), world.size)
        order = order.to(device)
        back = collectives.exchange_counts(counts, world)
        wanted = collectives.all_to_all(
            asked[order], counts, back, world, "plan"
        ).wait()
        by_target = torch.argsort(self.target, stable=True)
        ends = self.target[by_target].contiguous()
        first = torch.searchsorted(ends, wanted)
        number = torch.searchsorted(ends, wanted, right=True) - first
        arriving = collectives.all_to_all(number, back, counts, world, "plan").wait()
        slot = by_target[_ranges(first, number)]
        sent = [int(part.sum()) for part in number.split(back)]
        coming = [int(part.sum()) for part in arriving.split(counts)]
        source = collectives.all_to_all(
            self.source[slot], sent, coming, world, "edges"
        ).wait()
        # for each entry of `other`, the range of what came for its source
        at = torch.empty_like(order)
        at[order] = torch.arange(len(order), device=device)
        row = at[place]
        begin = arriving.cumsum(0) - arriving
        picked = _ranges(begin[row], arriving[row])
        value = None
        if self.value is not None and other.value is not None:
            came = autograd.all_to_all(self.value[slot], sent, coming, world, "edges")
            value = came[picked] * other.value.repeat_interleave(arriving[row])
        target = other.target.repeat_interleave(arriving[row])
        return EdgeMatrix(source[picked], target, value, other.rows).added_up()

    def added_up(self) -> EdgeMatrix:
        """Adds up entries of this rank in one place, and sorts them by source and target."""
        total = self.rows.total
        key, place = torch.unique(
            self.source * total + self.target, return_inverse=True
        )
        value = self.value
        if value is not None:
            value = value.new_zeros(len(key)).index_add(0, place, value)
        source = torch.div(key, total, rounding_mode="floor") if total else key
        target = key - source * total
        return EdgeMatrix(source, target, value, self.rows)

    def without_loops(self) -> EdgeMatrix:
        """Returns the entries off the diagonal."""
        keep = self.source != self.target
        value = None if self.value is None else self.value[keep]
        return EdgeMatrix(self.source[keep], self.target[keep], value, self.rows)

    def edges(self) -> tuple[DistEdgeIndex, DistTensor | None]:
        """Returns each entry as one edge, sorted by source and target, and their values.

        Sources are of the nodes that targets are. Collective. Price: that of `at_owners`
        for entries added up, and a word for each edge, to all ranks.
        """
        nodes = self.rows
        mine = self.added_up().at_owners().added_up()
        key, world = mine.source * nodes.total + mine.target, nodes.mesh.world
        sizes = [row[0] for row in collectives.all_gather_counts([len(key)], world)]
        every = collectives.all_gather_rows(key, sizes, world, op="plan").sort().values
        place = torch.searchsorted(every, key).cpu()
        edges = rows_of_edges(place, len(every), nodes)
        ends = torch.stack([mine.source, mine.target])
        found = DistEdgeIndex.build(ends, nodes, edges)
        value = mine.value
        return found, None if value is None else DistTensor.wrap(value, edges)


def _owners(rows: Rows, ids: Tensor) -> Tensor:
    assert rows.partition is not None
    return rows.partition.owner_of(ids.cpu())


def _by_owner(owner: Tensor, size: int) -> tuple[Tensor, list[int]]:
    counts: list[int] = torch.bincount(owner, minlength=size).tolist()
    return torch.argsort(owner, stable=True), counts


def _ranges(first: Tensor, number: Tensor) -> Tensor:
    """Returns first_i, first_i + 1, ..., `number_i` of them, one range after another."""
    before = number.cumsum(0) - number
    steps = torch.arange(int(number.sum()), device=first.device)
    return (first - before).repeat_interleave(number) + steps

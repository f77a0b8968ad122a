r"""Multiplies rows of the graph for layer-wise sampling: all rows, or those of a block.

[Note: rows and columns of a layer] A is the graph by target: row v holds the edges u -> v.
Its normalised form divides each row by its sum t_v,

    Ahat[v, u] = A[v, u] / t_v,        of A + I where the rule says so,

so a row of Ahat depends on that row of A alone, and a rank can compute everything here for
the rows of A that it holds: the sums of a block are partial sums, which `algebra.add` adds
up to the sums of the graph, bit for bit; the edges of a block are the edges of the graph
whose target is in it, which `LayerEdges.join` joins.

[Note: integer weights] The weights that a rule adds up (Ahat^2, A or ones) are rounded once
to integers w = round(scale x), at least 1 if x > 0. The scale is a power of two such that
the sum over as many rows as a layer may have (over all rows, for a rule that shares its row)
stays below 2^62, and all later sums are exact. A row of Ahat^2 adds up to 1 at most, so 2^13
rows leave it 47 bits, with which light edges into a hub keep their share. The number of rows
follows from the arguments (`rows_of_layers`), the same on all ranks and for all bulks.
Parallel edges count as one entry, of their sum.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_distcomm import kernels
from pyg_distcomm.kernels.sample_cpu import check_ids
from pyg_distcomm.kernels.sample_ops import Relation
from pyg_distcomm.sampling.algebra import BulkMatrix, BulkNodes, offsets
from pyg_distcomm.sampling.graph_source import read_topology
from pyg_distcomm.sampling.rules import COUNTED, SQUARED, Rule

MOST_ROWS = 1 << 13  # rows of a layer that integer weights are scaled for, by default


def rows_of_layers(numbers: Sequence[int], seeds: int, num_nodes: int) -> int:
    """Returns the most rows that a layer has: the seeds, or seeds and nodes drawn for them."""
    # nodes drawn for the last layer are no rows
    drawn = [num_nodes if s < 0 else int(s) for s in numbers[:-1]]
    return max(seeds, min(num_nodes, seeds + max(drawn, default=0)))


def layer_numbers(num_nodes_per_layer: Sequence[int]) -> tuple[int, ...]:
    """Returns the number of nodes to draw for each layer; raises for invalid numbers."""
    try:
        given = [float(s) for s in num_nodes_per_layer]
        numbers = tuple(int(s) for s in num_nodes_per_layer)
    except (TypeError, ValueError, OverflowError):
        given, numbers = [], ()
    fits = bool(numbers) and min(numbers) >= -1 and max(numbers) < 2**63
    if not fits or list(numbers) != given:
        raise ValueError(
            "num_nodes_per_layer must hold a whole number for each layer, below 2^63, -1 "
            f"for all nodes, got {num_nodes_per_layer!r}"
        )
    return numbers


_ARRAYS = "_ptr", "_col", "_edge", "_weight", "_value"  # of a graph, of edges and rows


@dataclass(frozen=True, eq=False)
class LayerEdges:
    """Holds the edges between the rows and the columns of one layer of a bulk.

    Ordered by row, then by edge id, the loop of `A + I` last.

    Args:
        row: [E] place of the target among all rows asked for (of all minibatches).
        col: [E] place of the source among all columns asked for.
        edge: [E] original edge id; -1 for the loop of `A + I`.
        weight: [E] float64, the share of this edge in its row: entries of Ahat, parallel
            edges apart.
    """

    row: Tensor
    col: Tensor
    edge: Tensor
    weight: Tensor

    @staticmethod
    def join(parts: Sequence[LayerEdges], rows: Sequence[Tensor]) -> LayerEdges:
        """Joins the edges that different blocks hold: each row in one block at most.

        Block i was asked for some rows, whose places among all are `rows[i]`, and for all
        columns.
        """
        own = [place[part.row] for place, part in zip(rows, parts, strict=True)]
        row, order = torch.sort(torch.cat(own), stable=True)
        each = zip(*((part.col, part.edge, part.weight) for part in parts), strict=True)
        return LayerEdges(row, *(torch.cat(values)[order] for values in each))


class LayerGraph(Protocol):
    """Defines what `KeyedLayerSampler` needs of a graph, for a whole bulk at a time.

    For each layer it calls `sums` and then `extract`, with the same rows; for a rule that
    shares its row `column_sums` once, before the first layer, instead of `sums`. So that a
    graph over ranks may communicate in each, as long as ranks sample as many bulks.

    Attributes:
        num_nodes: n, of the whole graph.
        rule: what the weights of the graph were made for.
        scale: integer weights are in units of 1 / scale.
        most_rows: how many rows a minibatch may have in a layer.
    """

    num_nodes: int
    rule: Rule
    scale: float
    most_rows: int

    def sums(self, rows: BulkNodes) -> BulkMatrix:
        """Returns `P = Q W` [k, n], int64: the weights of the rows of each minibatch.

        A row that a minibatch has twice counts twice. Columns ascend.
        """
        ...

    def column_sums(self) -> Tensor:
        """Returns the sums of W over all rows, [n] int64; for rules that share a row."""
        ...

    def extract(self, rows: BulkNodes, cols: BulkNodes) -> LayerEdges:
        """Returns the edges from the columns to the rows of each minibatch.

        Columns ascend within a minibatch; rows may come in any order, and twice.
        """
        ...


class LocalLayerGraph:
    """Multiplies rows held in this process: all rows of a graph, or a block.

    Rows that a block does not hold add nothing to its sums, and have no edges in it.

    Args:
        rows: edges by target, as kernels take them: row i of `colptr` is that of node
            `gid[i]`; sources are global ids. Within a row, edge ids ascend.
        num_nodes: n, of the whole graph.
        rule: which weights to make.
        gid: [m] the nodes whose rows these are, ascending; None for all n.
        most_rows: how many rows a minibatch may have in a layer.
        peak: the largest row sum of the whole graph, needed by rules that add up weights
            as they are; by default that of these rows (see `peak`).

    Memory: 16 m bytes (32 m with loops), and 8 E where some edges are parallel or loops of
    their own, or 16 E where they have weights. The edges themselves are those given.

    Raises:
        ValueError: if the weights of a row add up to infinity.
    """

    def __init__(
        self,
        rows: Relation,
        num_nodes: int,
        rule: Rule,
        gid: Tensor | None = None,
        most_rows: int = MOST_ROWS,
        peak: float | None = None,
    ) -> None:
        self.num_nodes, self.rule, self.most_rows = num_nodes, rule, most_rows
        self._gid, self._ptr = gid, rows.colptr
        self._weight = None if rows.weight is None else rows.weight.double()
        self._col = rows.row[:: rows.stride]
        self._edge = rows.row[1::2] if rows.stride == 2 else None
        #: the largest row sum of A (or A + I) among these rows
        self.peak = self._peak()
        self.scale = self._scale(self.peak if peak is None else peak)
        self._host_graph: LocalLayerGraph | None = None  # the original of a device copy
        self._loops: Tensor | None = None  # the column of each row's self-loop, if any
        if rule.loops:
            self._loops = torch.arange(num_nodes) if gid is None else gid
        graph = (self._ptr, self._col, self._weight)
        made = kernels.layer_weights(graph, self._loops, rule.power, self.scale)
        total, self._row_weight, self._value, loop = made
        self._total = total.masked_fill_(total == 0, 1.0)  # 0 / 1 is a zero row of Ahat
        self._diagonal: Any = None  # columns and values of the self-loops
        if self._loops is not None:
            # without values, in units of the row's weight
            ones = torch.ones_like(self._row_weight)
            self._diagonal = self._loops, ones if loop is None else loop

    @staticmethod
    def from_data(
        data: Data,
        rule: Rule,
        weight_attr: str | None = None,
        most_rows: int = MOST_ROWS,
    ) -> LocalLayerGraph:
        """Reads all rows of a graph.

        Raises:
            ValueError: as `read_topology`.
            TypeError: for anything but a Data: a layer has nodes of one type.
        """
        if not isinstance(data, Data):
            raise TypeError(
                f"layer-wise sampling takes a Data, got {type(data).__name__}; for nodes of "
                "several types, see DistNeighborLoader"
            )
        graph = read_topology(data, weight_attr=weight_attr).graph
        relation = graph.relations[0]
        return LocalLayerGraph(relation, graph.sizes[0], rule, most_rows=most_rows)

    @property
    def arrays(self) -> list[Tensor | None]:
        """Returns the tensors that hold the edges."""
        return [getattr(self, name) for name in _ARRAYS]

    def on(self, device: torch.device, pinned: bool = False) -> LocalLayerGraph:
        """Copies a graph of all rows to a device; the copy keeps a reference to this one.

        Args:
            device: where it multiplies.
            pinned: whether edges stay in host memory, pinned, and the device reads them there.
        """

        def moved(t: Tensor | None, far: bool) -> Tensor | None:
            if t is None:
                return None
            return t.contiguous().pin_memory() if far else t.contiguous().to(device)

        other = copy.copy(self)
        other._host_graph = self
        for name in ("_loops", "_total", "_row_weight", *_ARRAYS):
            far = pinned and name in _ARRAYS
            setattr(other, name, moved(getattr(self, name), far))
        if self._diagonal is not None:
            other._diagonal = other._loops, moved(self._diagonal[1], False)
        return other

    def sums(self, rows: BulkNodes) -> BulkMatrix:
        """Returns `P = Q W` over the rows held here, [k, n] int64.

        Price: one addition for each edge of the rows, and a sort of the columns found.
        """
        place, here = self._find(rows)
        ptr = rows.ptr
        if self._gid is not None:
            ptr = offsets(torch.bincount(rows.batch[here], minlength=len(rows)))
            place = place[here]
        scale = self._row_weight[place] if self._value is None else None
        graph = (self._ptr, self._col, self._value)
        q, n = (ptr, place, scale), self.num_nodes
        found = kernels.spgemm(q, graph, n, self._diagonal)
        each = torch.arange(len(rows) + 1, device=rows.ptr.device)
        return BulkMatrix(*found, self.num_nodes, each)

    def column_sums(self) -> Tensor:
        """Returns the sums of W over the rows held here, [n] int64. Linear in edges."""
        if self._host_graph is not None:
            return self._host_graph.column_sums().to(self._row_weight.device)
        out = torch.zeros(self.num_nodes, dtype=torch.int64)
        value = self._value
        if value is None:
            value = torch.repeat_interleave(self._row_weight, self._ptr.diff())
        out.index_add_(0, self._col.long(), value)
        if self._diagonal is not None:
            own, loop = self._diagonal
            out.index_add_(0, own, self._row_weight if self._value is None else loop)
        return out

    def extract(self, rows: BulkNodes, cols: BulkNodes) -> LayerEdges:
        """Returns the edges from the columns to those rows that are held here.

        Price: a look into a table for each edge of the rows.
        """
        place, here = self._find(rows)
        place = torch.where(here, place, -1)
        graph = (self._ptr, self._col)
        wanted = (place, rows.ptr), (cols.id, cols.ptr)
        row, col, entry = kernels.extract(graph, *wanted, self._loops)
        loop, at = entry < 0, entry.clamp(min=0)
        weight = torch.ones_like(entry, dtype=torch.float64)
        if self._weight is not None and len(self._weight):
            weight = torch.where(loop, weight, kernels.read_rows(self._weight, at))
        edge = entry
        if self._edge is not None and len(self._edge):
            edge = kernels.read_rows(self._edge, at).long().masked_fill(loop, -1)
        return LayerEdges(row, col, edge, weight / self._total[place[row]])

    def _find(self, rows: BulkNodes) -> tuple[Tensor, Tensor]:
        """Returns the local position of each row, and whether the row is held here."""
        if self._host_graph is None:  # rows for a device copy are checked before
            check_ids(rows.id, self.num_nodes, "rows")
        if self._gid is None:
            return rows.id, torch.ones_like(rows.id).bool()
        if not len(self._gid):
            return torch.zeros_like(rows.id), torch.zeros_like(rows.id).bool()
        place = torch.searchsorted(self._gid, rows.id).clamp_(max=len(self._gid) - 1)
        return place, self._gid[place] == rows.id

    def _peak(self) -> float:
        total = self._ptr.diff().double()
        if self._weight is not None:
            ends = self._ptr
            total = torch.segment_reduce(self._weight, "sum", offsets=ends, initial=0)
        peak = (float(total.max()) if len(total) else 0.0) + self.rule.loops
        if not math.isfinite(peak):
            raise ValueError("the weights of the edges of a node add up to infinity")
        return peak

    def _scale(self, peak: float) -> float:
        """Returns the power of two that integer weights are in; see the note above."""
        if self.rule.power == COUNTED:
            return 1.0
        rows = self.num_nodes if self.rule.shared else self.most_rows
        bits = 60 - math.ceil(math.log2(max(rows, 2)))
        if self.rule.power == SQUARED:
            return 2.0 ** min(bits, 52)
        if self._weight is None:
            return 1.0
        return 2.0 ** (bits - math.frexp(peak)[1])

"""What the algebra of sampling is about: nodes and sparse rows of many minibatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyg_distcomm.ops.csr import CSR, Pattern
from pyg_distcomm.ops.spgemm import spgemm


@dataclass(frozen=True, eq=False)
class BulkNodes:
    """Nodes of k minibatches, one after the other.

    Args:
        id: [total] int64, global ids.
        ptr: [k + 1] int64: those of minibatch i are `ptr[i] .. ptr[i + 1] - 1`.
    """

    id: Tensor
    ptr: Tensor

    @staticmethod
    def of(parts: Sequence[Tensor]) -> BulkNodes:
        """Stacks one vector of ids for each minibatch."""
        ids = [part.to(torch.int64) for part in parts]
        sizes = torch.tensor([part.numel() for part in parts], dtype=torch.int64)
        return BulkNodes(torch.cat(ids) if ids else sizes, offsets(sizes))

    @property
    def batch(self) -> Tensor:
        """The minibatch of each node [total]."""
        return torch.repeat_interleave(self.ptr.diff())

    def split(self) -> list[Tensor]:
        """Returns one vector of ids for each minibatch."""
        return list(self.id.split(self.ptr.diff().tolist()))

    def __len__(self) -> int:
        return len(self.ptr) - 1


@dataclass(frozen=True, eq=False)
class BulkMatrix:
    """A sparse matrix whose m rows belong to k minibatches, one after the other.

    Args:
        rowptr: [m + 1] int64, from 0.
        col: [nnz] int64; ascends within a row.
        value: [nnz] int64 or float64; None stands for ones.
        num_cols: n.
        batch_ptr: [k + 1] int64: rows of minibatch i are `batch_ptr[i] ..
            batch_ptr[i + 1] - 1`.
    """

    rowptr: Tensor
    col: Tensor
    value: Tensor | None
    num_cols: int
    batch_ptr: Tensor

    @staticmethod
    def from_edges(
        row: Tensor, col: Tensor, value: Tensor | None, shape: tuple[int, int]
    ) -> BulkMatrix:
        """Builds the matrix of one minibatch from entries; equal ones are added up."""
        pattern, edge = Pattern.build(row.long(), col.long(), shape)
        entries = CSR(pattern, None if value is None else value[edge.long()])
        each = torch.arange(shape[0] + 1)
        c = spgemm(CSR(Pattern(each, each[:-1], shape[0])), entries)
        batch_ptr = each[[0, -1]]
        return BulkMatrix(c.pattern.rowptr, c.pattern.col, c.value, shape[1], batch_ptr)

    @staticmethod
    def row_per_node(nodes: BulkNodes, num_cols: int) -> BulkMatrix:
        """Returns Q with one row for each node, a one in its column."""
        check_nodes(nodes, num_cols, "nodes")
        each = torch.arange(len(nodes.id) + 1)
        return BulkMatrix(each, nodes.id, None, num_cols, nodes.ptr)

    @staticmethod
    def row_per_batch(nodes: BulkNodes, num_cols: int) -> BulkMatrix:
        """Returns Q with one row for each minibatch, its nodes counted."""
        check_nodes(nodes, num_cols, "nodes")
        each = torch.arange(len(nodes.id) + 1)
        ones = CSR(Pattern(each, nodes.id, num_cols))
        c = spgemm(CSR(Pattern(nodes.ptr, each[:-1], len(nodes.id))), ones)
        batch_ptr = torch.arange(len(nodes) + 1)
        return BulkMatrix(c.pattern.rowptr, c.pattern.col, c.value, num_cols, batch_ptr)

    @property
    def num_rows(self) -> int:
        """The number of rows, m."""
        return len(self.rowptr) - 1

    @property
    def nnz(self) -> int:
        """The number of entries."""
        return len(self.col)

    @property
    def row(self) -> Tensor:
        """The row of each entry [nnz]."""
        return torch.repeat_interleave(self.rowptr.diff())

    @property
    def values(self) -> Tensor:
        """The value of each entry [nnz], ones written out."""
        return torch.ones_like(self.col) if self.value is None else self.value

    def with_value(self, value: Tensor | None) -> BulkMatrix:
        """Returns the same pattern with other values."""
        return replace(self, value=value)

    def csr(self) -> CSR:
        """Returns the block that `ops` multiply."""
        return CSR(Pattern(self.rowptr, self.col, self.num_cols), self.value)

    def dense(self) -> Tensor:
        """Returns the matrix written out [m, n], for a look at a small one."""
        out = self.values.new_zeros(self.num_rows, self.num_cols)
        return out.index_put_((self.row, self.col), self.values, accumulate=True)

    def find(self, nodes: BulkNodes) -> tuple[Tensor, Tensor]:
        """Looks up the columns of row i that nodes of minibatch i name (one row each).

        Returns the entry of each node [total], and whether there is one.
        """
        n = max(self.num_cols, 1)
        wanted = nodes.batch * n + nodes.id
        if not self.nnz:
            return torch.zeros_like(wanted), torch.zeros_like(wanted).bool()
        known = self.row * n + self.col
        entry = torch.searchsorted(known, wanted).clamp_(max=self.nnz - 1)
        return entry, known[entry] == wanted


def check_nodes(nodes: BulkNodes, size: int, what: str) -> None:
    """Refuses ids outside 0 .. size - 1."""
    if not nodes.id.numel():
        return
    low, high = (int(v) for v in nodes.id.aminmax())
    if low < 0 or high >= size:
        raise ValueError(
            f"{what} span {low} .. {high}, but there are {size} (0 .. {size - 1})"
        )


def offsets(sizes: Tensor) -> Tensor:
    """Returns where each of a list of ranges begins, and where the last one ends."""
    ptr = torch.zeros(len(sizes) + 1, dtype=torch.int64)
    torch.cumsum(sizes, 0, out=ptr[1:])
    return ptr

"""CSR: one local sparse block, and its transpose."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from pyg_distcomm import kernels
from pyg_distcomm.comm import timeline


@dataclass(frozen=True, eq=False)
class Pattern:
    """Where the nonzeros of an m x n block are, in CSR order.

    Shapes: rowptr [m + 1], col [nnz], both int32 where they fit.
    Columns ascend within a row, and equal entries keep their original order.
    """

    rowptr: Tensor
    col: Tensor
    num_cols: int

    @staticmethod
    def build(
        row: Tensor, col: Tensor, shape: tuple[int, int]
    ) -> tuple[Pattern, Tensor]:
        """Returns the pattern of a list of edges, and the edge of each nonzero."""
        _, row_sorted, by_col = kernels.coo_to_csr(col, row, shape[1])
        rowptr, index, _ = kernels.coo_to_csr(row_sorted, by_col, shape[0])
        del row_sorted, by_col
        index = index.to(rowptr.dtype)
        col = col.index_select(0, index).to(rowptr.dtype)
        return Pattern(rowptr, col, shape[1]), index

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return len(self.rowptr) - 1, self.num_cols

    @property
    def nnz(self) -> int:
        """The number of nonzeros."""
        return len(self.col)

    @cached_property
    def transpose(self) -> tuple[Pattern, Tensor]:
        """The transposed pattern, and for each of its nonzeros the one it comes from.

        A symmetric pattern shares its memory with its transpose.
        """
        rowptr, col, perm = kernels.csr_transpose(self.rowptr, self.col, self.num_cols)
        if torch.equal(rowptr, self.rowptr) and torch.equal(col, self.col):
            rowptr, col = self.rowptr, self.col
        return Pattern(rowptr, col, self.shape[0]), perm.to(rowptr.dtype)

    def to(self, device: torch.device) -> Pattern:
        """Returns the same pattern on another device."""
        return Pattern(self.rowptr.to(device), self.col.to(device), self.num_cols)


@dataclass(frozen=True, eq=False)
class CSR:
    """A local block: a pattern and the values on it (None: all ones).

    Shapes: value [nnz] or None. The name is what its products are called in a trace.
    """

    pattern: Pattern
    value: Tensor | None = None
    name: str = "spmm"

    def named(self, name: str) -> CSR:
        """Returns the same block under another name."""
        return self if name == self.name else replace(self, name=name)

    def matmul(self, x: Tensor, out: Tensor | None = None, first: int = 0) -> Tensor:
        """Returns `A x` `[m, f]` for x `[n, f]`.

        Given `out`, writes there the rows of the product from `first` on that it has
        room for.
        """
        return self._spmm(x, out, first, False)

    def add_matmul(self, x: Tensor, out: Tensor, first: int = 0) -> Tensor:
        """Adds to `out`, in place, the rows of `A x` from `first` on."""
        idle = self.pattern.nnz == 0 or len(out) == 0
        return out if idle else self._spmm(x, out, first, True)

    def _spmm(self, x: Tensor, out: Tensor | None, first: int, add: bool) -> Tensor:
        p, recorder = self.pattern, timeline.recorder
        rowptr = p.rowptr if out is None else p.rowptr[first : first + len(out) + 1]
        if recorder is None or p.nnz == 0:
            return kernels.spmm(rowptr, p.col, self.value, x, out, add)
        begin = timeline.clock()
        out = kernels.spmm(rowptr, p.col, self.value, x, out, add)
        nnz = int(rowptr[-1] - rowptr[0])
        about = {"rows": len(out), "cols": p.num_cols, "nnz": nnz, "width": x.size(1)}
        recorder.add("product", self.name, begin, **about)
        return out

    def value_gradient(self, g: Tensor, x: Tensor) -> Tensor:
        """Returns `d<g, A x> / d value` `[nnz]`: the dot of row and column rows."""
        p = self.pattern
        return kernels.sddmm(p.rowptr, p.col, g, x)

    @cached_property
    def transposed(self) -> CSR:
        """The transpose, computed once; a symmetric block shares its memory with it."""
        pattern, perm = self.pattern.transpose
        if self.value is None:
            return CSR(pattern, None, self.name)
        value = self.value.index_select(0, perm)
        if pattern.col is self.pattern.col and torch.equal(value, self.value):
            value = self.value
        return CSR(pattern, value, self.name)

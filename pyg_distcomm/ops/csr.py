"""Holds local sparse blocks in CSR form, with their transposes, and multiplies two of them.

`LocalBlocks` are those that a rank multiplies in one product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm import kernels
from pyg_distcomm.comm.ledger import clock, label
from pyg_distcomm.kernels import memory
from pyg_distcomm.kernels.core_ops import span_of, transposed
from pyg_distcomm.partition.partition import PIECE, leave_in_file
from pyg_distcomm.process import PROCESS


@dataclass(frozen=True, eq=False)
class Pattern:
    """Holds the places of the nonzeros of an m x n block, in CSR order.

    Shapes: rowptr [m + 1], col [nnz], both int32 where they fit.
    Columns ascend within a row, and equal entries keep their original order.
    Of one that is `checked` columns are known to be in range; its transpose asks a device
    for nothing.
    """

    rowptr: Tensor
    col: Tensor
    num_cols: int
    checked: bool = False

    @staticmethod
    def build(
        row: Tensor, col: Tensor, shape: tuple[int, int]
    ) -> tuple[Pattern, Tensor]:
        """Returns the pattern of a list of edges, and the edge of each nonzero."""
        _, row_sorted, by_col = kernels.coo_to_csr(col, row, shape[1])
        rowptr, index, _ = kernels.coo_to_csr(row_sorted, by_col, shape[0])
        del row_sorted, by_col
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

    def rows(self, first: int, end: int) -> Tensor:
        """Returns the offsets of some rows; the same object each time, with a cached span."""
        if first == 0 and end + 1 == len(self.rowptr):
            return self.rowptr
        if self.rowptr.is_cpu:
            return self.rowptr[first : end + 1]
        if (first, end) not in self._rowptr_slices:
            self._rowptr_slices[first, end] = self.rowptr[first : end + 1]
        return self._rowptr_slices[first, end]

    @cached_property
    def _rowptr_slices(self) -> dict[tuple[int, int], Tensor]:
        return {}

    @cached_property
    def transpose(self) -> tuple[Pattern, Tensor]:
        """The transposed pattern, and for each of its nonzeros the one it comes from.

        A symmetric pattern shares its memory with its transpose.
        """
        if self.checked and not self.rowptr.is_cpu:
            rowptr, col, perm = transposed(self.rowptr, self.col, self.num_cols)
            back = Pattern(rowptr, col.to(rowptr.dtype), self.shape[0], checked=True)
            return back, perm
        rowptr, col, perm = kernels.csr_transpose(self.rowptr, self.col, self.num_cols)
        if torch.equal(rowptr, self.rowptr) and torch.equal(col, self.col):
            rowptr, col = self.rowptr, self.col
        return Pattern(rowptr, col, self.shape[0]), perm

    def transposed_values(self, value: Tensor) -> Tensor:
        """Returns values `[nnz]` in the order of the transpose; kept for the latest ones.

        Only for values that nobody writes to: torch does not count each write of a script.
        """
        order = self.transpose[1]
        if torch.is_grad_enabled() or value.is_inference():
            return value.index_select(0, order)
        stamp = value.data_ptr(), value.dtype, value._version
        known, found, _ = self._turned.get("latest", (None, value, None))
        if known != stamp:
            found = value.index_select(0, order)
            self._turned["latest"] = stamp, found, value.untyped_storage()
        return found

    @cached_property
    def _turned(self) -> dict[str, tuple[Any, Tensor, Any]]:
        return {}

    def moved(self, move: Callable[[Tensor], Tensor]) -> Pattern:
        """Returns the same pattern with `move` applied to its arrays."""
        return Pattern(move(self.rowptr), move(self.col), self.num_cols, self.checked)


@dataclass(frozen=True, eq=False)
class CSR:
    """Holds a local sparse block: a pattern, and the values on it (None: all ones).

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

        Given `out`, writes len(out) rows of the product to it, from row `first` on.
        """
        return self._spmm(x, out, first, False)

    def add_matmul(self, x: Tensor, out: Tensor, first: int = 0) -> Tensor:
        """Adds to `out`, in place, the rows of `A x` from `first` on."""
        idle = self.pattern.nnz == 0 or len(out) == 0
        return out if idle else self._spmm(x, out, first, True)

    def _spmm(self, x: Tensor, out: Tensor | None, first: int, add: bool) -> Tensor:
        p, recorder = self.pattern, PROCESS.recorder
        rowptr = p.rowptr if out is None else p.rows(first, first + len(out))
        begin = 0 if recorder is None else clock()
        with label(f"product {self.name}"):
            out = kernels.spmm(rowptr, p.col, self.value, x, out, add)
        if recorder is None or p.nnz == 0:
            return out
        low, high = span_of(rowptr)
        nnz = high - low
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


_TRACE_NAMES = {
    "own_own": "own columns",
    "own_ghost": "halo columns",
    "out_own": "own columns, rows to send",
    "out_ghost": "halo columns, rows to send",
    "sum_own": "own columns, sums for others",
    "own_far": "forwarded columns",
}


@dataclass(frozen=True, eq=False)
class LocalBlocks:
    """The nonzeros that this rank multiplies, in blocks by the owners of row and column.

    Own rows and columns belong to ranks (i, j, *). A_ij has out rows of other process
    columns, and ghost columns of other process rows. Beside it are nonzeros that other
    ranks handed over (see [Note: rows or sums] in `grid_plan.py`): sum rows are wanted by
    other process rows, far columns are forwarded by other process columns.
    """

    own_own: CSR
    own_ghost: CSR
    out_own: CSR
    out_ghost: CSR
    sum_own: CSR
    own_far: CSR

    def __post_init__(self) -> None:
        for field, name in _TRACE_NAMES.items():
            object.__setattr__(self, field, getattr(self, field).named(name))

    @cached_property
    def transposed(self) -> LocalBlocks:
        """The blocks of the transpose: out rows become ghost columns, and sums far."""
        return LocalBlocks(
            self.own_own.transposed,
            self.out_own.transposed,
            self.own_ghost.transposed,
            self.out_ghost.transposed,
            self.own_far.transposed,
            self.sum_own.transposed,
        )

    @property
    def blocks(self) -> tuple[CSR, ...]:
        """The blocks, in the order of their edges in `EdgeRoute` values."""
        return (
            *(self.own_own, self.own_ghost, self.out_own, self.out_ghost),
            *(self.sum_own, self.own_far),
        )

    def moved(self, move: Callable[[Tensor], Tensor]) -> LocalBlocks:
        """Returns the same blocks with `move` applied to their arrays."""
        return LocalBlocks(
            *(
                CSR(b.pattern.moved(move), None if b.value is None else move(b.value))
                for b in self.blocks
            )
        )

    def with_values(self, value: Tensor, index: tuple[Tensor, ...]) -> LocalBlocks:
        """Returns the same patterns with the values `value[index]` on them."""
        pairs = zip(self.blocks, index, strict=True)
        return LocalBlocks(
            *(CSR(block.pattern, value.index_select(0, i)) for block, i in pairs)
        )


def csr_of(edges: Tensor, value: Any, shape: tuple[int, int]) -> Tensor:
    """Returns a torch.sparse CSR matrix of edges `[2, e]`, with targets as rows."""
    if value is None:
        value = torch.ones(edges.size(1), device=edges.device)
    return (
        torch.sparse_coo_tensor(edges.flip(0), value, shape).coalesce().to_sparse_csr()
    )


def coo_of(adj: Any) -> tuple[Tensor, Tensor | None]:
    """Returns the edges of a sparse adjacency with targets as rows, and their weights.

    Args:
        adj: `[n, n]`, of torch.sparse in any layout, or torch-sparse's SparseTensor.
    """
    if isinstance(adj, Tensor):
        coo = adj.to_sparse_coo()
        coo = coo if coo.is_coalesced() else coo.coalesce()
        return coo.indices().flip(0), coo.values()
    row, col, value = adj.coo()
    return torch.stack([col, row]), value


def spgemm(q: CSR, a: CSR) -> CSR:
    r"""Multiplies two sparse blocks, `C = Q A`.

    Shapes: q [l, m], a [m, n], return [l, n]; columns ascend and are distinct.

    Sums run in the order of Q's and A's entries, so the bits depend on neither threads nor
    neighbouring rows; integers are exact (int64, which wraps). Values None are ones. A
    product is int64 or, where a value is a float, of their common float type. Entries that
    add up to zero are kept. On a device, by operations of torch: the same bits.

    Price: linear in products, and a sort of the columns of each row.

    Raises:
        ValueError: for widths or devices that differ.
    """
    if q.pattern.num_cols != a.pattern.shape[0]:
        raise ValueError(
            f"Q has {q.pattern.num_cols} columns, but A has {a.pattern.shape[0]} rows"
        )
    if q.pattern.col.device != a.pattern.col.device:
        raise ValueError(
            f"Q lies on {q.pattern.col.device}, and A on {a.pattern.col.device}; move one "
            "of them, by q.pattern.moved(lambda t: t.to(device)) and its values"
        )
    p, o = q.pattern, a.pattern
    left, right = (p.rowptr, p.col, q.value), (o.rowptr, o.col, a.value)
    rowptr, col, value = kernels.spgemm(left, right, o.num_cols)
    dtype = _common_dtype(q.value, a.value)
    return CSR(Pattern(rowptr, col, o.num_cols), value.to(dtype))


def _common_dtype(*values: Tensor | None) -> torch.dtype:
    found = [v.dtype for v in values if v is not None and v.is_floating_point()]
    if not found:
        return torch.int64
    return found[0] if len(found) == 1 else torch.promote_types(*found)


def sorted_pairs(
    source: Tensor,
    target: Tensor,
    gid: Tensor | None,
    order: Tensor | None,
    colptr: Tensor,
    kind: torch.dtype,
    find: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Returns the source and the id of each edge, by target, `[2 e]`; see [Note: pairs].

    Args:
        source, target: the ends.
        gid: the ids; None are positions.
        order: the order of edges with the same target; None is as they are.
        colptr: the offsets of targets.
        kind: the type of what is returned.
        find: returns the positions of targets in `colptr`; None if that is what they are.

    Shapes: source, target, gid and order [e]; colptr [m + 1].
    """
    pair = torch.empty(2 * len(target), dtype=kind)
    cursor = memory.advise(torch.empty_like(colptr[:-1])).copy_(colptr[:-1])
    for begin in range(0, len(target), PIECE):
        part: Any = slice(begin, min(begin + PIECE, len(target)))
        edge = torch.arange(part.start, part.stop)
        if order is not None:
            part = edge = order[part]
        ends, edge = (source[part], target[part]), edge if gid is None else gid[part]
        place = ends[1] if find is None else find(ends[1])
        kernels.place_pairs(place, ends[0], edge, cursor, pair)
        leave_in_file(ends[0], ends[1], edge)
    return pair

"""Implements sampling as sparse algebra, with the operators of [Tripathy24].

    P   = product(Q, A)            what each row may draw, and its weight
    P   = norm(P)                  the same as probabilities
    Q'  = sample(P, s, keys)       s distinct columns of each row
    A_S = extract(A, rows, cols)   the part of A that a minibatch keeps

One matrix holds the rows of k minibatches, one below the other, and each operator is one
pass over it; rows never meet, and draw by keys of their own, so that what a minibatch gets
does not depend on the others of its bulk. Weights are integers, or are rounded to integers
once, before anything is drawn: no sum that decides a draw is ever rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm import kernels
from pyg_distcomm.kernels.sample_cpu import check_ids
from pyg_distcomm.ops.csr import CSR, Pattern, spgemm

__all__ = [
    "BulkMatrix",
    "BulkNodes",
    "Sample",
    "SharedRow",
    "add",
    "extract",
    "fixed_point",
    "norm",
    "product",
    "sample",
]


@dataclass(frozen=True, eq=False)
class BulkNodes:
    """Holds the nodes of k minibatches, one after the other.

    Args:
        id: [total] int64, global ids.
        ptr: [k + 1] int64: those of minibatch i are `ptr[i] .. ptr[i + 1] - 1`.
    """

    id: Tensor
    ptr: Tensor

    @staticmethod
    def of(parts: Sequence[Tensor]) -> BulkNodes:
        """Stacks one vector of ids for each minibatch, on their device."""
        ids = [part.to(torch.int64) for part in parts]
        sizes = torch.tensor([part.numel() for part in parts], dtype=torch.int64)
        if not ids:
            return BulkNodes(sizes, offsets(sizes))
        return BulkNodes(torch.cat(ids), offsets(sizes).to(ids[0].device))

    @property
    def batch(self) -> Tensor:
        """Returns the minibatch of each node [total]."""
        return torch.repeat_interleave(self.ptr.diff(), output_size=len(self.id))

    def to(self, device: torch.device) -> BulkNodes:
        """Returns the same nodes on a device."""
        return BulkNodes(self.id.to(device), self.ptr.to(device))

    def split(self) -> list[Tensor]:
        """Returns one vector of ids for each minibatch."""
        return list(self.id.split(self.ptr.diff().tolist()))

    def __len__(self) -> int:
        return len(self.ptr) - 1


# functions with f(0) = 0, which leave what is not stored as it is
ENTRYWISE = frozenset(
    "abs ceil erf expm1 floor log1p pow relu round sign sqrt square tanh trunc".split()
)


@dataclass(frozen=True, eq=False)
class BulkMatrix:
    """Holds a sparse matrix whose m rows belong to k minibatches, one after the other.

    Functions that keep zeros apply entry by entry: `P.sqrt()`, `P**0.5`, `2 * P`, `P / 3`;
    sums, differences and products take matrices of the same entries.
    What would fill in zeros (`P + 1`, `P.exp()`) raises a TypeError;
    `P.with_value(f(P.values))` says what is meant.

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
        each = torch.arange(shape[0] + 1, device=row.device)
        c = spgemm(CSR(Pattern(each, each[:-1], shape[0])), entries)
        batch_ptr = each[[0, -1]]
        return BulkMatrix(c.pattern.rowptr, c.pattern.col, c.value, shape[1], batch_ptr)

    @staticmethod
    def row_per_node(nodes: BulkNodes, num_cols: int) -> BulkMatrix:
        """Returns Q with one row for each node, a one in its column."""
        check_ids(nodes.id, num_cols, "nodes")
        each = torch.arange(len(nodes.id) + 1, device=nodes.id.device)
        return BulkMatrix(each, nodes.id, None, num_cols, nodes.ptr)

    @staticmethod
    def row_per_batch(nodes: BulkNodes, num_cols: int) -> BulkMatrix:
        """Returns Q with one row for each minibatch, its nodes counted."""
        check_ids(nodes.id, num_cols, "nodes")
        each = torch.arange(len(nodes.id) + 1, device=nodes.id.device)
        ones = CSR(Pattern(each, nodes.id, num_cols))
        c = spgemm(CSR(Pattern(nodes.ptr, each[:-1], len(nodes.id))), ones)
        batch_ptr = torch.arange(len(nodes) + 1, device=nodes.id.device)
        return BulkMatrix(c.pattern.rowptr, c.pattern.col, c.value, num_cols, batch_ptr)

    @property
    def num_rows(self) -> int:
        """Returns the number of rows, m."""
        return len(self.rowptr) - 1

    @property
    def nnz(self) -> int:
        """Returns the number of entries."""
        return len(self.col)

    @property
    def row(self) -> Tensor:
        """Returns the row of each entry [nnz]."""
        return torch.repeat_interleave(self.rowptr.diff(), output_size=self.nnz)

    @property
    def values(self) -> Tensor:
        """Returns the value of each entry [nnz], ones included."""
        return torch.ones_like(self.col) if self.value is None else self.value

    def with_value(self, value: Tensor | None) -> BulkMatrix:
        """Returns the same pattern with other values."""
        return replace(self, value=value)

    def map(self, function: Callable[..., Tensor], *others: Any) -> BulkMatrix:
        """Applies a function of values [nnz], which must give 0 where all its inputs are 0.

        Args:
            function: of `self.values`, and of each of `others`.
            others: numbers, or matrices of the same entries.

        Raises:
            ValueError: for a matrix of other entries.
        """
        for other in others:
            if isinstance(other, BulkMatrix) and not self._same_entries(other):
                raise ValueError(
                    f"matrices of the same entries are wanted, got {self.nnz} and "
                    f"{other.nnz} of others; take both from one P"
                )
        values = [o.values if isinstance(o, BulkMatrix) else o for o in others]
        return self.with_value(function(self.values, *values))

    def _same_entries(self, other: BulkMatrix) -> bool:
        mine, theirs = (self.rowptr, self.col), (other.rowptr, other.col)
        return all(
            a is b or torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)
        )

    def __getattr__(self, name: str) -> Any:
        if name in ENTRYWISE:
            return lambda *args, **kwargs: self.map(
                lambda v, *rest: getattr(v, name)(*rest, **kwargs), *args
            )
        if not name.startswith("_") and hasattr(Tensor, name):
            raise AttributeError(_no_function(f"P.{name}"))
        raise AttributeError(f"a {type(self).__name__} has no {name!r}")

    def __pow__(self, exponent: float) -> BulkMatrix:
        if not isinstance(exponent, Real) or exponent <= 0:
            raise TypeError(_no_function(f"P ** {exponent!r}"))
        return self.map(torch.pow, exponent)

    def __mul__(self, other: Any) -> BulkMatrix:
        return self.map(torch.mul, other)

    __rmul__ = __mul__

    def __truediv__(self, other: float) -> BulkMatrix:
        return self.map(torch.div, other)

    def __add__(self, other: BulkMatrix) -> BulkMatrix:
        if not isinstance(other, BulkMatrix):
            raise TypeError(_no_function("P + a number"))
        return self.map(torch.add, other)

    def __sub__(self, other: BulkMatrix) -> BulkMatrix:
        if not isinstance(other, BulkMatrix):
            raise TypeError(_no_function("P - a number"))
        return self.map(torch.sub, other)

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


def _no_function(what: str) -> str:
    return (
        f"{what} is not defined on a {BulkMatrix.__name__}, whose zeros are not stored: "
        f"use {', '.join(sorted(ENTRYWISE))}, or return P.with_value(...) of a function "
        "of P.values, as P.with_value(P.values.sqrt())"
    )


def offsets(sizes: Tensor) -> Tensor:
    """Returns the offsets of consecutive ranges of these sizes, [len(sizes) + 1]."""
    ptr = torch.zeros(len(sizes) + 1, dtype=torch.int64, device=sizes.device)
    torch.cumsum(sizes, 0, out=ptr[1:])
    return ptr


FIXED = 40  # bits of the largest weight in a row of floats


@dataclass(frozen=True, eq=False)
class Sample:
    """Holds the columns drawn from the rows of P.

    Args:
        matrix: Q': the columns drawn, ascending in a row; its value says how often where
            draws were with replacement, otherwise it is None.
        place: [nnz of Q'] the entry of P of each entry of Q'.
        ptr: [m + 1] int64: draws of row i are `ptr[i] .. ptr[i + 1] - 1`.
        drawn: [draws] entries of P, in the order of draw.
        left: [draws] int64, the weight left in the row before each draw; the first is
            the sum of the row.
        complete: [m] bool, whether every positive entry was taken (never with replacement).
    """

    matrix: BulkMatrix
    place: Tensor
    ptr: Tensor
    drawn: Tensor
    left: Tensor
    complete: Tensor


def product(q: BulkMatrix, a: BulkMatrix) -> BulkMatrix:
    """Multiplies stacked rows Q [m, l] by a matrix A [l, n], `P = Q A`.

    Errors and price: see `ops.csr.spgemm`.
    """
    c = spgemm(q.csr(), a.csr())
    return BulkMatrix(c.pattern.rowptr, c.pattern.col, c.value, a.num_cols, q.batch_ptr)


def add(parts: Sequence[BulkMatrix]) -> BulkMatrix:
    """Adds matrices of one shape, equal columns merged: integers exactly, in any order.

    It is the product of `[I I ... I]` with the parts, one below the other.
    """
    first, t = parts[0], len(parts)
    shapes = {(p.num_rows, p.num_cols) for p in parts}
    if len(shapes) > 1:
        raise ValueError(f"matrices of one shape are wanted, got {sorted(shapes)}")
    m, n = shapes.pop()
    device = first.col.device
    begin = offsets(torch.tensor([p.nnz for p in parts])).to(device)
    rows = [p.rowptr[:-1] + at for p, at in zip(parts, begin, strict=False)]
    ones = all(p.value is None for p in parts)
    stacked = CSR(
        Pattern(torch.cat([*rows, begin[-1:]]), torch.cat([p.col for p in parts]), n),
        None if ones else torch.cat([p.values for p in parts]),
    )
    row = torch.arange(m + 1, device=device)
    each = row[:m, None] + m * torch.arange(t, device=device)
    c = spgemm(CSR(Pattern(t * row, each.flatten(), m * t)), stacked)
    return replace(first, rowptr=c.pattern.rowptr, col=c.pattern.col, value=c.value)


def norm(p: BulkMatrix) -> BulkMatrix:
    """Divides each row by its sum, in float64; a zero row stays zero."""
    return p.with_value(kernels.normalize_rows(p.rowptr, p.values.double()))


def extract(a: BulkMatrix, rows: BulkNodes, cols: BulkNodes) -> BulkMatrix:
    """Keeps rows and columns of A, minibatch by minibatch: `A_S[i] = A[rows_i, cols_i]`.

    By a table of the columns of each minibatch, not by a second product. The result is
    block diagonal: row r is node `rows.id[r]`, column c is node `cols.id[c]`.

    Shapes: a [m, n], rows [R], cols [C] (ascending within a minibatch), return [R, C].

    Price: linear in the entries of the rows.

    Raises:
        ValueError: for ids that A does not have, or bulks of different sizes.
    """
    if len(rows) != len(cols):
        raise ValueError(f"rows of {len(rows)} minibatches, but columns of {len(cols)}")
    check_ids(rows.id, a.num_rows, "rows")
    check_ids(cols.id, a.num_cols, "columns")
    wanted = (rows.id, rows.ptr), (cols.id, cols.ptr)
    row, col, entry = kernels.extract((a.rowptr, a.col), *wanted)
    rowptr = offsets(torch.bincount(row, minlength=len(rows.id)))
    value = None if a.value is None else a.value[entry]
    return BulkMatrix(rowptr, col, value, len(cols.id), rows.ptr)


def sample(p: BulkMatrix, s: int, keys: Tensor, replace: bool = False) -> Sample:
    r"""Draws s distinct columns of each row, in proportion to its values.

    One after the other, and what was drawn is out: of the weights w of a row, a draw takes
    u with chance `w_u / (sum of the w that are left)`. A row with no more than s positive
    entries gives them all, and none is ever a zero. With replacement, draws are s
    independent ones. By inverse transform sampling ([Tripathy24]).

    Args:
        p: integers, below 2^62 in a row, or floats (`fixed_point` says how they are
            rounded). All keys draw from one row if P has one.
        s: how many to draw.
        keys: [m] int64 in [0, 2^63): the draws of a row depend on its key and its entries.
        replace: whether a column may be drawn again.

    Price: linear in nnz, and 2 log2(nnz of the row) steps a draw.

    Raises:
        ValueError: for values that are negative, not finite or too large, or keys that
            do not fit the rows.
    """
    if not isinstance(s, Integral) or s < 0:
        raise ValueError(
            f"the number of draws must be whole, and must not be negative, got {s}"
        )
    shared = p.num_rows == 1 and keys.numel() != 1
    if keys.dim() != 1 or (keys.numel() != p.num_rows and not shared):
        raise ValueError(
            f"one key for each of the {p.num_rows} rows is wanted, got {list(keys.shape)}"
        )
    if shared:
        return SharedRow(p).sample(s, keys, replace)
    value = fixed_point(p)
    count = _choices(p.rowptr, value)
    ptr, complete = _draws(count, s, replace)
    drawn, left = kernels.draw(p.rowptr, value, count, keys, ptr, replace)
    return _sampled(p, p.batch_ptr, drawn, left, ptr, complete, replace)


class SharedRow:
    """Draws from one row of weights [1, n] by many keys, as `sample` does.

    Its tree is built once, O(nnz); after that a draw costs 2 log2(nnz) steps. Any number
    of threads may draw at once.
    """

    def __init__(self, p: BulkMatrix) -> None:
        self.p = p.with_value(fixed_point(p))
        self._count = int(_choices(p.rowptr, self.p.values))
        self._urn = kernels.weighted_sampler(self.p.values)

    def sample(self, s: int, keys: Tensor, replace: bool = False) -> Sample:
        """Draws s columns for each key."""
        k = len(keys)
        count = torch.full((k,), self._count, device=keys.device)
        ptr, complete = _draws(count, s, replace)
        drawn, left = self._urn(keys, ptr, replace)
        batch_ptr = torch.arange(k + 1, device=keys.device)
        return _sampled(self.p, batch_ptr, drawn, left, ptr, complete, replace)


def fixed_point(p: BulkMatrix) -> Tensor:
    """Returns the values of P as integers [nnz].

    Integers stay. Floats are rounded once, row by row: `round(p / max 2^40)`, at least 1
    where p > 0; rows of 2^21 entries or more get as many bits as leave their sum below 2^62.
    """
    value = p.values
    if not value.is_floating_point():
        return value.to(torch.int64)
    if not bool((value.isfinite() & (value >= 0)).all()):
        bad = int((~(value.isfinite() & (value >= 0))).nonzero()[0])
        raise ValueError(
            f"P holds {float(value[bad])} in column {int(p.col[bad])}; its values must be "
            "finite and not negative"
        )
    row, value = p.row, value.double()
    top = value.new_zeros(p.num_rows).scatter_reduce_(0, row, value, "amax")
    size = p.rowptr.diff()
    _, length = torch.frexp(size.clamp(min=1).double())  # bits of a size
    bits = FIXED - length.long().sub(21).clamp(min=0)
    scale = (torch.ones_like(bits) << bits).double()
    whole = (value / top[row] * scale[row]).round().clamp(min=1)
    return torch.where(value > 0, whole, 0).long()


def _choices(rowptr: Tensor, value: Tensor) -> Tensor:
    """Counts the positive entries of each row; raises ValueError for invalid values."""
    count = kernels.count_positive(rowptr, value)
    if bool((count < 0).any()):
        bad = int((count < 0).nonzero()[0])
        why = "is negative" if int(count[bad]) == -1 else "makes the sum reach 2^62"
        raise ValueError(
            f"a value in row {bad} of P {why}; weights must be nonnegative integers that "
            "add up to less than 2^62 in a row"
        )
    return count


def _draws(count: Tensor, s: int, replace: bool) -> tuple[Tensor, Tensor]:
    """Returns the offsets of each row's draws, and which rows give all their entries."""
    if replace:
        return offsets(torch.where(count > 0, s, 0)), torch.zeros_like(count).bool()
    return offsets(count.clamp(max=s)), count <= s


def _sampled(
    p: BulkMatrix,
    batch_ptr: Tensor,
    drawn: Tensor,
    left: Tensor,
    ptr: Tensor,
    complete: Tensor,
    replace: bool,
) -> Sample:
    """Returns the draws as a matrix, sorted by column within each row."""
    step = max(p.nnz, 1)
    row = torch.repeat_interleave(ptr.diff(), output_size=len(drawn))
    code, _ = torch.sort(row * step + drawn)
    often = None
    if replace:
        code, often = torch.unique_consecutive(code, return_counts=True)
    place = code % step
    each = torch.arange(len(ptr), device=code.device)
    rowptr = torch.searchsorted(code, each * step)
    matrix = BulkMatrix(rowptr, p.col[place], often, p.num_cols, batch_ptr)
    return Sample(matrix, place, ptr, drawn, left, complete)

"""Sampling as sparse algebra: the operators of [Tripathy24] on stacked minibatches.

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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral

import torch
from torch import Tensor

from pyg_distcomm import kernels
from pyg_distcomm.ops.csr import CSR, Pattern
from pyg_distcomm.ops.spgemm import spgemm
from pyg_distcomm.sampling.bulk_matrix import (
    BulkMatrix,
    BulkNodes,
    check_nodes,
    offsets,
)

FIXED = 40  # bits of the largest weight in a row of floats


@dataclass(frozen=True, eq=False)
class Sample:
    """What was drawn from the rows of P.

    Args:
        matrix: Q': the columns drawn, ascending in a row; its value says how often where
            draws were with replacement, otherwise it is None.
        place: [nnz of Q'] the entry of P that each entry of Q' is.
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


def product(q: BulkMatrix, a: BulkMatrix, backend: str = "own") -> BulkMatrix:
    """Multiplies stacked rows Q [m, l] by a matrix A [l, n], `P = Q A`.

    Back ends, errors and price: see `ops.spgemm`.
    """
    c = spgemm(q.csr(), a.csr(), backend)
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
    begin = offsets(torch.tensor([p.nnz for p in parts]))
    rows = [p.rowptr[:-1] + at for p, at in zip(parts, begin, strict=False)]
    ones = all(p.value is None for p in parts)
    stacked = CSR(
        Pattern(torch.cat([*rows, begin[-1:]]), torch.cat([p.col for p in parts]), n),
        None if ones else torch.cat([p.values for p in parts]),
    )
    each = torch.arange(m)[:, None] + m * torch.arange(t)
    c = spgemm(CSR(Pattern(t * torch.arange(m + 1), each.flatten(), m * t)), stacked)
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
    check_nodes(rows, a.num_rows, "rows")
    check_nodes(cols, a.num_cols, "columns")
    wanted = (rows.id, rows.ptr), (cols.id, cols.ptr)
    row, col, entry = kernels.extract((a.rowptr, a.col), *wanted)
    rowptr = offsets(torch.bincount(row, minlength=len(rows.id)))
    value = None if a.value is None else a.value[entry]
    return BulkMatrix(rowptr, col, value, len(cols.id), rows.ptr)


def sample(
    p: BulkMatrix, s: int, keys: Tensor, method: str = "its", replace: bool = False
) -> Sample:
    r"""Draws s distinct columns of each row, in proportion to its values.

    One after the other, and what was drawn is out: of the weights w of a row, a draw takes
    u with chance `w_u / (sum of the w that are left)`. A row with no more than s positive
    entries gives them all, and none is ever a zero. With replacement, draws are s
    independent ones.

    Args:
        p: integers, below 2^62 in a row, or floats (`fixed_point` says how they are
            rounded). All keys draw from one row if P has one.
        s: how many to draw.
        keys: [m] int64 in [0, 2^63): the draws of a row depend on its key and its entries.
        method: "its", inverse transform sampling ([Tripathy24]), or
            "exponential", the least of independent clocks ([Efraimidis06]): the same
            distribution from other numbers.
        replace: whether a column may be drawn again.

    Price: linear in nnz, and 2 log2(nnz of the row) steps a draw; a sort for clocks.

    Raises:
        ValueError: for values that are negative, not finite or too large, keys that do not
            fit the rows, or an unknown method.
    """
    check_draws(s, method, replace)
    shared = p.num_rows == 1 and keys.numel() != 1
    if keys.dim() != 1 or (keys.numel() != p.num_rows and not shared):
        raise ValueError(
            f"one key for each of the {p.num_rows} rows is wanted, got {list(keys.shape)}"
        )
    if shared and method == "its":
        return SharedRow(p).sample(s, keys, replace)
    k, rowptr, value = len(keys), p.rowptr, fixed_point(p)
    batch_ptr = p.batch_ptr
    if shared:
        rowptr, value = p.nnz * torch.arange(k + 1), value.repeat(k)
        batch_ptr = torch.arange(k + 1)
    count = _choices(rowptr, value)
    ptr, complete = _draws(count, s, replace)
    if method == "its":
        drawn, left = kernels.draw(rowptr, value, count, keys, ptr, replace)
    else:
        drawn, left = kernels.exponential_race(rowptr, value, keys, ptr)
    if shared:
        drawn %= max(p.nnz, 1)
    return _sampled(p, batch_ptr, drawn, left, ptr, complete, replace)


class SharedRow:
    """One row of weights [1, n] that many keys draw from, as `sample` does.

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
        ptr, complete = _draws(torch.full((k,), self._count), s, replace)
        drawn, left = self._urn(keys, ptr, replace)
        batch_ptr = torch.arange(k + 1)
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
    bits = FIXED - torch.log2(size.clamp(min=1).double()).long().sub(20).clamp(min=0)
    scale = (torch.ones_like(bits) << bits).double()
    whole = (value / top[row] * scale[row]).round().clamp(min=1)
    return torch.where(value > 0, whole, 0).long()


def check_draws(s: int, method: str, replace: bool) -> None:
    """Refuses what cannot be drawn."""
    if method not in ("its", "exponential"):
        raise ValueError(f"method must be 'its' or 'exponential', got {method!r}")
    if method == "exponential" and replace:
        raise ValueError(
            "exponential clocks draw without replacement; use method='its' with it"
        )
    if not isinstance(s, Integral) or s < 0:
        raise ValueError(
            f"the number of draws must be whole, and must not be negative, got {s}"
        )


def _choices(rowptr: Tensor, value: Tensor) -> Tensor:
    """Counts the positive entries of each row, or refuses their values."""
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
    """Returns offsets of the draws of each row, and which rows give all they have."""
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
    """Puts draws into the order of columns."""
    step, row = max(p.nnz, 1), torch.repeat_interleave(ptr.diff())
    code, _ = torch.sort(row * step + drawn)
    often = None
    if replace:
        code, often = torch.unique_consecutive(code, return_counts=True)
    place = code % step
    rowptr = offsets(torch.bincount(code // step, minlength=len(ptr) - 1))
    matrix = BulkMatrix(rowptr, p.col[place], often, p.num_cols, batch_ptr)
    return Sample(matrix, place, ptr, drawn, left, complete)

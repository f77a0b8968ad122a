"""Defines products of sparse matrices, and draws from their rows.

Matrices are CSR, `rowptr` [m + 1] and `col` [nnz] (any stride); the CPU backends return the
same numbers, bit for bit, but for logarithms. On a device A may lie in pinned host memory.
All rows are worked on at once; integers are added up in any order, and floats in the order
of their entries. A row draws from a generator of its own key,

    s = mix(key + G),    h_j = mix(s + (j + 1) G)

with mix and G those of `core_ops.keyed_bits`; h_j are 64 bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pyg_distcomm.kernels.registry import op
from pyg_distcomm.kernels.sample_ops import (
    draw_urns,
    first_above,
    hashes,
    keyed_hash,
    read_rows,
    row_sums,
    share,
    spread,
)

HALF = 31  # bits of a weight that are summed apart, so that no sum wraps around

Csr = tuple[Tensor, Tensor, Tensor | None]  # rowptr, col, value (None: ones)
WeightedSampler = Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor]]


@op("q", dtypes=None)
def spgemm(
    q: Csr, a: Csr, num_cols: int, diagonal: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Multiplies sparse matrices, `C = Q (A + D)`; D has one entry per row, or is zero.

    Row j of D holds `diagonal[1][j]` in column `diagonal[0][j]`. Returns the CSR of C in
    int64, columns ascending, equal ones added up in the order of Q's and then of A's
    entries; entries that add up to zero stay. Values are int64 or float64, ones if None.
    """
    device, m, dtype = q[1].device, len(q[0]) - 1, value_type(q[2], a[2])
    row = _rows(q[0], len(q[1]))
    owner, entry, loop = _entries(a[0], q[1].long(), diagonal is not None)
    inner = q[1].long()[owner]
    col = _read(a[1], entry, ~loop).long()
    value = torch.ones(len(owner), dtype=dtype, device=device)
    if a[2] is not None:
        value = _read(a[2], entry, ~loop).to(dtype)
    if diagonal is not None:
        col = torch.where(loop, diagonal[0][inner], col)
        value = torch.where(loop, diagonal[1][inner].to(dtype), value)
    if q[2] is not None:
        value = q[2].to(dtype)[owner] * value
    step = max(num_cols, 1)
    codes, place = torch.unique(row[owner] * step + col, return_inverse=True)
    if dtype == torch.int64:
        total = value.new_zeros(len(codes)).index_add_(0, place, value)
    else:
        order = torch.argsort(place, stable=True)
        each = torch.arange(len(codes) + 1, device=device)
        total = row_sums(torch.searchsorted(place[order], each), value[order])
    return _offsets(codes, m, step), codes % step, total


def value_type(*values: Tensor | None) -> torch.dtype:
    """Returns the type of products: float64 where any is a float, otherwise int64."""
    real = any(v is not None and v.is_floating_point() for v in values)
    return torch.float64 if real else torch.int64


@op("rows", dtypes=None)
def extract(
    a: tuple[Tensor, Tensor],
    rows: tuple[Tensor, Tensor],
    cols: tuple[Tensor, Tensor],
    own: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Finds the entries of rows of A whose column is wanted, minibatch by minibatch.

    `rows` are (places of rows in A, -1 for none; offsets of the k minibatches), `cols`
    (columns, distinct in a minibatch; offsets). Returns, for each entry found, its place in
    `rows`, the place of its column in `cols`, and the entry itself; by place in `rows`, then
    by entry. Where `own` [m] is given, row j has one more entry at its end, -1, in column
    `own[j]`.
    """
    none = rows[0].new_empty(0, dtype=torch.int64)
    if not len(rows[0]) or not len(cols[0]):
        return none, none, none
    owner, entry, loop = _entries(a[0], rows[0].long(), own is not None)
    if not len(owner):
        return none, none, none
    col = _read(a[1], entry, ~loop).long()
    if own is not None:
        col = torch.where(loop, own[rows[0].long()[owner]], col)
    step = cols[0].max() + 1
    known, order = torch.sort(_rows(cols[1], len(cols[0])) * step + cols[0])
    code = _rows(rows[1], len(rows[0]))[owner] * step + col
    place = torch.searchsorted(known, code).clamp_(max=len(known) - 1)
    kept = ((known[place] == code) & (col < step)).nonzero().view(-1)
    return owner[kept], order[place[kept]], torch.where(loop, -1, entry)[kept]


@op("value", dtypes=None)
def count_positive(rowptr: Tensor, value: Tensor) -> Tensor:
    """Counts the positive entries of each row; -1 for a row with a negative one.

    And -2 for a row whose entries add up to 2^62 or more.
    """
    row, m = _rows(rowptr, len(value)), len(rowptr) - 1

    def summed(values: Tensor) -> Tensor:
        return torch.zeros(m, dtype=torch.int64, device=row.device).index_add_(
            0, row, values.long()
        )

    high = summed(value >> HALF) + (summed(value & ((1 << HALF) - 1)) >> HALF)
    count = summed(value > 0).masked_fill_(high >= 1 << HALF, -2)
    return count.masked_fill_(summed(value < 0) > 0, -1)


@op("value", dtypes=None)
def draw(
    rowptr: Tensor,
    value: Tensor,
    count: Tensor,
    keys: Tensor,
    ptr: Tensor,
    replace: bool,
) -> tuple[Tensor, Tensor]:
    """Draws entries of each row in proportion to their integer weights.

    Row i draws `ptr[i + 1] - ptr[i]` times. Draw j takes the first entry whose running
    sum exceeds `floor(h_j left / 2^64)`, where `left` is the sum of what has not been
    drawn yet (all, if `replace`). A row that draws all its `count` positive entries takes
    them in order instead. Returns the entries, and the `left` before each draw.
    """
    running, found = _running(value), _running(value > 0)
    return _draw_entries(
        running, found, rowptr[:-1], rowptr[1:], count, keys, ptr, replace
    )


@op("value", dtypes=None)
def weighted_sampler(value: Tensor) -> WeightedSampler:
    """Returns what draws from one row for many keys: `weighted_sampler(keys, ptr, replace)`.

    As `draw` where all rows are equal; `value` [n].
    """
    running, found = _running(value), _running(value > 0)

    def draw_all(keys: Tensor, ptr: Tensor, replace: bool) -> tuple[Tensor, Tensor]:
        low, high = torch.zeros_like(keys), torch.full_like(keys, len(value))
        count = found[-1].expand(len(keys))
        return _draw_entries(running, found, low, high, count, keys, ptr, replace)

    return draw_all


@op("value", dtypes=None)
def normalize_rows(rowptr: Tensor, value: Tensor) -> Tensor:
    """Divides float64 entries by the sum of their row, taken in order; zero rows stay."""
    total = row_sums(rowptr, value)[_rows(rowptr, len(value))]
    return torch.where(total != 0, value / total, value)


def _draw_entries(
    running: Tensor,
    found: Tensor,
    low: Tensor,
    high: Tensor,
    count: Tensor,
    keys: Tensor,
    ptr: Tensor,
    replace: bool,
) -> tuple[Tensor, Tensor]:
    """Draws from the entries `low .. high - 1` by each key.

    `running` and `found` are the weights, and the numbers of positive ones, before each entry.
    """
    draws = ptr.diff()
    # the host asks once: how many draws, urns, and draws of an urn
    urn = torch.where(draws < count, draws, 0)
    largest = torch.cat([urn.new_zeros(1), urn]).max()
    drawn, urns, most = torch.stack([ptr[-1], (urn > 0).sum(), largest]).tolist()
    row, nth, start = spread(draws, drawn)
    total = (running[high] - running[low])[row]
    if replace:
        goal = share(keyed_hash(hashes(keys)[row], nth), total)
        return first_above(running, low[row], high[row], goal), total
    entry = first_above(found, low[row], high[row], nth)  # where all are taken
    left = total - (running[entry] - running[low][row])
    if urns:
        some = torch.argsort(urn, descending=True, stable=True)[:urns]
        entries, lefts = draw_urns(running, low[some], high[some], keys[some], most)
        steps = torch.arange(most, device=row.device)
        # behind the last of fewer draws is room for all that is left over
        place = torch.where(steps < draws[some, None], start[some, None] + steps, drawn)
        entry, left = (
            torch.cat([t, t.new_zeros(1)]).scatter_(0, place.view(-1), f.view(-1))[:-1]
            for t, f in ((entry, entries), (left, lefts))
        )
    return entry, left


def _entries(
    rowptr: Tensor, rows: Tensor, loops: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Lists the entries of rows, -1 for none, and of each its loop if there are loops.

    Returns, for each, the place in `rows`, the entry, and whether it is a loop.
    """
    real = rows >= 0
    known = torch.where(real, rows, 0)
    if len(rowptr) < 2:
        real, known = torch.zeros_like(real), torch.zeros_like(rows)
        low = size = known
    else:
        low = read_rows(rowptr, known).long()
        size = read_rows(rowptr, known + 1).long() - low
    owner, within, _ = spread(torch.where(real, size + loops, 0))
    return owner, low[owner] + within, within == size[owner]


def _read(values: Tensor, index: Tensor, there: Tensor) -> Tensor:
    """Returns rows by index, any where there is none."""
    if not len(values):
        return torch.zeros(len(index), dtype=values.dtype, device=index.device)
    return read_rows(values, torch.where(there, index, 0))


def _rows(ptr: Tensor, total: int) -> Tensor:
    """Returns the row of each entry."""
    return torch.repeat_interleave(ptr.diff().long(), output_size=total)


def _offsets(codes: Tensor, m: int, step: int) -> Tensor:
    """Returns where each row begins among ascending codes `row step + column`."""
    return torch.searchsorted(codes, torch.arange(m + 1, device=codes.device) * step)


def _running(values: Tensor) -> Tensor:
    """Returns the sums of the integers before each place, and of all."""
    out = torch.zeros(len(values) + 1, dtype=torch.int64, device=values.device)
    torch.cumsum(values, 0, out=out[1:])
    return out

"""Defines every kernel in plain torch, on any device.

Letters: a CSR matrix has ``m`` rows and ``nnz`` edges, ``x`` has ``n`` rows, ``f``
is the feature width. ``rowptr`` may be a slice of a longer one: its entries are
offsets into ``col`` and ``value`` as they stand, and need not start at zero.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

MAX_INT32 = 2**31 - 1
HASH_BITS = 24


def spmm(
    rowptr: Tensor,
    col: Tensor,
    value: Tensor | None,
    x: Tensor,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """Multiplies a CSR matrix by dense rows.

        out[i] (+)= sum of value[e] x[col[e]] over rowptr[i] <= e < rowptr[i + 1]

    Shapes: rowptr [m + 1], col and value [nnz], x [n, f], out [m, f].
    Half-precision sums are taken in float32.
    """
    row, lo, hi = _rows(rowptr)
    wide = _wide(x.dtype)
    message = x[col[lo:hi].long()].to(wide)
    if value is not None:
        message = message * value[lo:hi, None].to(wide)
    m = rowptr.numel() - 1
    total = torch.zeros(m, x.size(1), dtype=wide, device=x.device)
    total = total.index_add_(0, row, message).to(x.dtype)
    if out is None:
        return total
    return out.add_(total) if accumulate else out.copy_(total)


def sddmm(rowptr: Tensor, col: Tensor, g: Tensor, x: Tensor) -> Tensor:
    """Takes one dot product for each edge.

        out[e - rowptr[0]] = <g[row(e)], x[col[e]]>

    Shapes: rowptr [m + 1], col [nnz], g [m, f], x [n, f], out [rowptr[m] - rowptr[0]].
    """
    row, lo, hi = _rows(rowptr)
    wide = _wide(x.dtype)
    product = g[row].to(wide) * x[col[lo:hi].long()].to(wide)
    return product.sum(1).to(x.dtype)


def gather_rows(x: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """Copies rows: ``out[k] = x[index[k]]``.

    Shapes: x [n, f], index [k], out [k, f]. Raises IndexError outside 0 .. n-1.
    """
    _check_index(index, x.size(0))
    rows = x[index.long()]
    return rows if out is None else out.copy_(rows)


def scatter_add_rows(out: Tensor, index: Tensor, src: Tensor) -> Tensor:
    """Adds rows in place, in order of k: ``out[index[k]] += src[k]``.

    Shapes: out [m, f], index [k], src [k, f]. Raises IndexError outside 0 .. m-1.
    """
    _check_index(index, out.size(0))
    return out.index_add_(0, index.long(), src)


def coo_to_csr(
    row: Tensor, col: Tensor, num_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts edges by row, keeping the order of the edges of one row.

        rowptr[i] = number of edges with row < i,   col_sorted = col[perm]

    Shapes: row and col [nnz]; rowptr [num_rows + 1], col_sorted and perm [nnz].
    ``rowptr`` is int32 below 2**31 edges and ``col_sorted`` below 2**31 columns,
    otherwise int64; ``perm`` is int64. Raises IndexError outside 0 .. num_rows-1.
    """
    _check_index(row, num_rows)
    perm = torch.argsort(row, stable=True)
    rowptr = _offsets(row.long(), num_rows, offset_dtype(row.numel()))
    return rowptr, col[perm].to(column_dtype(col)), perm


def csr_transpose(
    rowptr: Tensor, col: Tensor, num_cols: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Transposes a CSR matrix; rows ascend within each column.

        value_t = value[perm]

    Shapes: rowptr [m + 1], col [nnz]; rowptr_t [num_cols + 1], row_t and perm
    [rowptr[m] - rowptr[0]]. Raises IndexError outside 0 .. num_cols-1.
    """
    row, lo, hi = _rows(rowptr)
    part = col[lo:hi]
    _check_index(part, num_cols)
    perm = torch.argsort(part, stable=True)
    rowptr_t = _offsets(part.long(), num_cols, offset_dtype(hi - lo))
    return rowptr_t, row[perm].to(offset_dtype(rowptr.numel() - 1)), perm + lo


def place_pairs(
    target: Tensor, source: Tensor, order: Tensor | None, colptr: Tensor, pair: Tensor
) -> Tensor:
    """Sorts edges by target, and among equal ones as they come in ``order``.

        pair[2 s], pair[2 s + 1] = source[e], e    for the s-th edge e so sorted

    Shapes: target, source and order [nnz]; colptr [m + 1], the offsets of the targets;
    pair [2 nnz], overwritten.
    """
    first = torch.arange(target.numel()) if order is None else order
    edge = first[torch.argsort(target[first], stable=True)]
    return pair.copy_(torch.stack([source[edge], edge], 1).view(-1))


def keyed_bits(key: int, gid: Tensor, cols: int) -> Tensor:
    """Draws 24 random bits for each (key, gid, column): a counter-based hash.

        mix(z): z = (z ^ z >>> 30) A;  z = (z ^ z >>> 27) B;  return z ^ z >>> 31
        bits[v, c] = mix(mix(key ^ mix(gid[v] + G)) + (c + 1) G) >>> 40

    modulo 2**64, with A, B and G the constants of splitmix64.
    Shapes: gid [k]; bits [k, cols], int32 in 0 .. 2**24 - 1.
    """
    return _shift(keyed_hashes(key, gid, cols), 64 - HASH_BITS).to(torch.int32)


def keyed_hashes(key: int, gid: Tensor, count: int) -> Tensor:
    """Returns all 64 bits of the hash in `keyed_bits`, for columns 0 .. count-1."""
    gamma = _signed(0x9E3779B97F4A7C15)
    row = _mix(_mix(gid.long() + gamma) ^ key)
    step = torch.arange(1, count + 1, device=gid.device) * gamma
    return _mix(row[:, None] + step)


def keyed_mask(key: int, gid: Tensor, cols: int, p: float) -> Tensor:
    """Tells which entries a dropout of probability ``p`` keeps.

        keep = keyed_bits >= round(p 2**24)

    Shapes: gid [k]; keep [k, cols], bool.
    """
    return keyed_bits(key, gid, cols) >= drop_threshold(p)


def keyed_dropout(x: Tensor, key: int, gid: Tensor, p: float) -> Tensor:
    """Zeroes entries with probability ``p`` and scales the rest.

        out = x keep / (1 - p)          (zero times x where p = 1)

    Shapes: x [k, ...], trailing dimensions flattened as columns; gid [k].
    """
    keep = keyed_mask(key, gid, x[:1].numel() if len(x) else 0, p)
    return x * (keep.to(x.dtype) * drop_scale(p)).view(x.shape)


def drop_threshold(p: float) -> int:
    """Returns the least 24-bit draw that a dropout of probability ``p`` keeps."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability must lie in [0, 1], got {p}")
    return round(p * (1 << HASH_BITS))


def drop_scale(p: float) -> float:
    """Returns ``1 / (1 - p)``, and zero for p = 1."""
    return 0.0 if p == 1.0 else 1.0 / (1.0 - p)


def offset_dtype(nnz: int) -> torch.dtype:
    """Returns the narrowest index type that counts ``nnz`` edges."""
    return torch.int32 if nnz <= MAX_INT32 else torch.int64


def column_dtype(col: Tensor) -> torch.dtype:
    """Returns int32 unless a column of ``col`` does not fit."""
    narrow = col.dtype == torch.int32 or not col.numel()
    return torch.int32 if narrow or int(col.max()) <= MAX_INT32 else torch.int64


def _rows(rowptr: Tensor) -> tuple[Tensor, int, int]:
    """Returns the row of each edge, and the range of edges ``rowptr`` covers."""
    count = rowptr.diff().long()
    row = torch.arange(count.numel(), device=rowptr.device)
    return row.repeat_interleave(count), int(rowptr[0]), int(rowptr[-1])


def _offsets(index: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    rowptr = torch.zeros(size + 1, dtype=dtype, device=index.device)
    rowptr[1:] = torch.bincount(index, minlength=size).cumsum(0)
    return rowptr


def _check_index(index: Tensor, size: int) -> None:
    if not index.numel():
        return
    low, high = (int(bound) for bound in index.aminmax())
    if low < 0 or high >= size:
        raise IndexError(f"index spans {low} .. {high}, but there are {size} rows")


def _wide(dtype: torch.dtype) -> torch.dtype:
    half = dtype in (torch.float16, torch.bfloat16)
    return torch.float32 if half else dtype


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Shifts right without copying the sign, which ``>>`` does for int64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >= 1 << 63 else constant


def places(gid: Tensor, ids: Tensor) -> Tensor:
    """Returns where ids [k] stand in ascending, distinct gid [m]; -1 if they do not."""
    if not len(gid):
        return torch.full_like(ids, -1)
    place = torch.searchsorted(gid, ids).clamp_(max=len(gid) - 1)
    return torch.where(gid[place] == ids, place, -1)


def minimum_cover(ptr: Tensor, to: Tensor, num_right: int) -> tuple[Tensor, Tensor]:
    """Returns a smallest set of vertices of a bipartite graph that touches every edge.

    By Konig's theorem: with a maximum matching, and all that alternating paths reach from
    unmatched left vertices, it is the left vertices not reached and the right ones
    reached. What is reached is the same for every maximum matching, so the cover is one
    of a kind; of all smallest ones it has the most left vertices.

    Shapes: ptr [m + 1], to [e], edges from left to right vertices as CSR; returns bool
    [m] and [num_right].
    """
    neighbours = [to[a:b].tolist() for a, b in pairwise(ptr.tolist())]
    mate: dict[int, int] = {}  # of right vertices

    def reached(start: int) -> tuple[dict[int, int], int | None]:
        """Searches alternating paths: who led to each right vertex, and a free one."""
        led: dict[int, int] = {}
        queue = [start]
        for u in queue:
            for v in neighbours[u]:
                if v not in led:
                    led[v] = u
                    if v not in mate:
                        return led, v
                    queue.append(mate[v])
        return led, None

    left = torch.ones(len(neighbours), dtype=torch.bool)
    right = torch.zeros(num_right, dtype=torch.bool)
    for start in range(len(neighbours)):
        led, v = reached(start)
        while v is not None:  # turns the path around
            u = led[v]
            before = next((w for w, m in mate.items() if m == u), None)
            mate[v] = u
            v = before if u != start else None
    for start in set(range(len(neighbours))) - set(mate.values()):
        led, _ = reached(start)
        left[[start, *(mate[v] for v in led)]] = False
        right[list(led)] = True
    return left, right

"""Defines products with sparse matrices, row copies, lookups, sorted edges, keyed randomness.

Letters: a CSR matrix has ``m`` rows and ``nnz`` edges, ``x`` has ``n`` rows, ``f``
is the feature width. ``rowptr`` may be a slice of a longer one: its entries are
offsets into ``col`` and ``value`` as they stand, and need not start at zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_distcomm.kernels.registry import FLOATS, HALVES, op

MAX_INT32 = 2**31 - 1
HASH_BITS = 24
TINY = 1e-16  # what PyG adds to the sums of a softmax


def _check_product(
    rowptr: Tensor, col: Tensor, x: Tensor, dims: tuple[int, ...] = (2,)
) -> None:
    if rowptr.dim() != 1 or col.dim() != 1 or not rowptr.numel():
        raise ValueError(
            f"rowptr [m + 1] and col [nnz] must be vectors, got "
            f"{list(rowptr.shape)} and {list(col.shape)}"
        )
    if x.dim() not in dims:
        wanted = " or rows of heads [n, h, f]" if 3 in dims else ""
        raise ValueError(f"x must be a matrix [n, f]{wanted}, got {list(x.shape)}")


def _check_out(out: Tensor, rows: int, like: Tensor) -> None:
    wanted = (rows, *like.shape[1:])
    if tuple(out.shape) != wanted or out.dtype != like.dtype:
        raise ValueError(
            f"expected a tensor of shape {list(wanted)} and type {like.dtype}, "
            f"got {list(out.shape)} and {out.dtype}"
        )


def _check_spmm(
    rowptr: Tensor,
    col: Tensor,
    value: Tensor | None,
    x: Tensor,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> None:
    _check_product(rowptr, col, x, (2, 3))
    heads = x.shape[1:-1]
    if heads if value is None else value.shape != col.shape + heads:
        each = f", and each of the {heads[0]} heads" if heads else ""
        raise ValueError(
            f"value must hold one number for each of the {col.numel()} edges{each}, "
            f"got {value if value is None else list(value.shape)}"
        )
    if accumulate and out is None:
        raise ValueError("spmm(accumulate=True) needs the out to add to")
    if out is not None:
        _check_out(out, rowptr.numel() - 1, x)


def _check_span(rowptr: Tensor, nnz: int) -> None:
    """Raises for offsets of a part of the edges, where each edge has a value."""
    if span_of(rowptr) != (0, nnz):
        first, last = span_of(rowptr)
        raise ValueError(
            f"rowptr must span all {nnz} edges, from 0 to {nnz}, got {first} to {last}"
        )


def _check_sddmm(rowptr: Tensor, col: Tensor, g: Tensor, x: Tensor) -> None:
    _check_product(rowptr, col, x, (2, 3))
    _check_out(g, rowptr.numel() - 1, x)


def _check_gather(x: Tensor, index: Tensor, out: Tensor | None = None) -> None:
    if x.dim() == 2 and out is not None:
        _check_out(out, index.numel(), x)


def _check_scatter(out: Tensor, index: Tensor, src: Tensor) -> None:
    if out.dim() == 2:
        _check_out(src, index.numel(), out)


def _check_coo(row: Tensor, col: Tensor, num_rows: int) -> None:
    if row.shape != col.shape or row.dim() != 1:
        raise ValueError(
            f"row and col must be vectors of one length, got {list(row.shape)} "
            f"and {list(col.shape)}"
        )


def _check_key(key: int, *_: object, **__: object) -> None:
    if not 0 <= key < 2**63:
        raise ValueError(f"key must lie in [0, 2**63), got {key}")


def _check_dropout(x: Tensor, key: int, gid: Tensor, p: float) -> None:
    if gid.shape != x.shape[:1]:
        raise ValueError(
            f"gid must name each of the {len(x)} rows of x, got {list(gid.shape)}"
        )
    _check_key(key)


@op("rowptr col x", check=_check_spmm)
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

    Shapes: rowptr [m + 1], col and value [nnz], x [n, f], out [m, f]; or, with a value for
    each head, value [nnz, h], x [n, h, f], out [m, h, f].
    Half-precision sums are taken in float32. Values are rounded to the type of x. The sum
    of a row is taken in edge order, so the bits depend neither on the number of threads nor
    on how callers cut ``rowptr``; cuSPARSE may take another order, and is not called where
    torch is told to be deterministic.
    """
    free = x.is_cuda and not torch.are_deterministic_algorithms_enabled()
    if free and library_fits(rowptr, col, x):
        return library_spmm(rowptr, col, value, x, out, accumulate)
    row, lo, hi = _rows(rowptr)
    wide = _wide(x.dtype)
    message = x[col[lo:hi].long()].to(wide)
    if value is not None:
        message = message * value[lo:hi, ..., None].to(x.dtype).to(wide)
    shape = (rowptr.numel() - 1, *x.shape[1:])
    total = torch.zeros(shape, dtype=wide, device=x.device)
    total = total.index_add_(0, row, message).to(x.dtype)
    if out is None:
        return total
    return out.add_(total) if accumulate else out.copy_(total)


def library_spmm(
    rowptr: Tensor,
    col: Tensor,
    value: Tensor | None,
    x: Tensor,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """Runs `spmm` by torch's library (on CUDA cuSPARSE), where `library_fits`.

    A matrix without values needs a vector of ones, `[nnz]`.
    """
    ones = col.new_ones(1, dtype=x.dtype).expand(len(col)) if value is None else value
    weight = ones.to(x.dtype).contiguous()
    shape = (rowptr.numel() - 1, len(x))
    matrix = torch.sparse_csr_tensor(rowptr, col, weight, shape, check_invariants=False)
    if out is None:
        return matrix @ x
    return out.addmm_(matrix, x, beta=1 if accumulate else 0)


def library_fits(rowptr: Tensor, col: Tensor, x: Tensor) -> bool:
    """Returns whether torch's library supports a matrix: floats, one index dtype, all edges.

    A slice of offsets shares its memory with the rest, and counts as a part; for other
    offsets it checks once whether they span all columns.
    """
    return (
        x.dtype in FLOATS
        and x.dim() == 2
        and rowptr.dtype == col.dtype
        and rowptr.numel() > 1
        and len(col) > 0
        and x.numel() > 0
        and rowptr.nbytes == rowptr.untyped_storage().nbytes()
        and span_of(rowptr) == (0, len(col))
    )


@op("rowptr col g x", check=_check_sddmm)
def sddmm(rowptr: Tensor, col: Tensor, g: Tensor, x: Tensor) -> Tensor:
    """Takes one dot product for each edge.

        out[e - rowptr[0]] = <g[row(e)], x[col[e]]>

    Shapes: rowptr [m + 1], col [nnz], g [m, f], x [n, f], out [rowptr[m] - rowptr[0]]; or, of
    each head, g [m, h, f], x [n, h, f], out [rowptr[m] - rowptr[0], h].
    """
    row, lo, hi = _rows(rowptr)
    wide = _wide(x.dtype)
    product = g[row].to(wide) * x[col[lo:hi].long()].to(wide)
    return product.sum(-1).to(x.dtype)


def _check_pairs(
    rowptr: Tensor, col: Tensor, g: Tensor, x: Tensor, a: Tensor, *_: object
) -> None:
    _check_span(rowptr, len(col))
    if g.dim() != 3 or g.shape[1:] != x.shape[1:] or a.shape != g.shape[1:]:
        raise ValueError(
            "rows must be [m, heads, f] and [n, heads, f], and a [heads, f], got "
            f"{[list(t.shape) for t in (g, x, a)]}"
        )


@op("rowptr col g x a", check=_check_pairs)
def pair_scores(
    rowptr: Tensor, col: Tensor, g: Tensor, x: Tensor, a: Tensor, slope: float
) -> Tensor:
    """Scores each edge by the rows at its ends, as [Brody22] Eq. 7.

        s[e, h] = <a[h], LeakyReLU(g[row(e), h] + x[col[e], h])>

    Shapes: rowptr [m + 1], from zero to nnz; col [nnz], g [m, heads, f],
    x [n, heads, f], a [heads, f]; returns [nnz, heads].
    """
    row, lo, hi = _rows(rowptr)
    both = g[row] + x[col[lo:hi].long()]
    return (torch.nn.functional.leaky_relu(both, slope) * a).sum(-1)


@op("rowptr col g x a by", check=_check_pairs)
def pair_scores_grad(
    rowptr: Tensor,
    col: Tensor,
    g: Tensor,
    x: Tensor,
    a: Tensor,
    slope: float,
    by: Tensor,
    both: bool,
) -> tuple[Tensor, Tensor | None]:
    """Returns the gradients of `pair_scores` by g, and by a if `both`; `by` is that by s.

    That by x is the one by g of the transposed matrix, with x and g exchanged.
    """
    row, lo, hi = _rows(rowptr)
    s = g[row] + x[col[lo:hi].long()]
    by = by.unsqueeze(-1)
    t = torch.where(s > 0, by, by * slope)
    by_g = torch.zeros_like(g).index_add(0, row, a * t)
    return by_g, (s * t).sum(0) if both else None


def _check_segments(rowptr: Tensor, x: Tensor, *like: Tensor) -> None:
    if x.dim() != 2 or any(t.shape != x.shape for t in like):
        shapes = [list(t.shape) for t in (x, *like)]
        raise ValueError(f"values must be matrices [nnz, h] of one shape, got {shapes}")
    _check_span(rowptr, len(x))


@op("rowptr x", check=_check_segments)
def segment_softmax(rowptr: Tensor, x: Tensor) -> Tensor:
    """Takes the softmax of the values of each row of a CSR matrix.

        y[e] = exp(x[e] - max_i) / (sum_i exp(x - max_i) + 1e-16),   row i of e

    Shapes: rowptr [m + 1], from zero to nnz; x and y [nnz, h]. Rows may be empty.
    """
    row, _, _ = _rows(rowptr)
    index, m = row[:, None].expand_as(x), rowptr.numel() - 1
    most = x.new_zeros(m, x.size(1)).scatter_reduce_(
        0, index, x, "amax", include_self=False
    )
    y = (x - most[row]).exp()
    total = x.new_zeros(m, x.size(1)).index_add_(0, row, y)
    return y / (total + TINY)[row]


@op("rowptr y g", check=_check_segments)
def segment_softmax_grad(rowptr: Tensor, y: Tensor, g: Tensor) -> Tensor:
    """Returns the gradient of `segment_softmax`: ``y (g - sum_i y g)``.

    Shapes: rowptr [m + 1], from zero to nnz; y and g [nnz, h].
    """
    row, _, _ = _rows(rowptr)
    total = y.new_zeros(rowptr.numel() - 1, y.size(1)).index_add_(0, row, y * g)
    return y * (g - total[row])


@op("rowptr col x", check=_check_product)
def segment_max(rowptr: Tensor, col: Tensor, x: Tensor) -> Tensor:
    """Takes the largest number of each column over the edges of a row.

        out[i] = max of x[col[e]] over rowptr[i] <= e < rowptr[i + 1],   0 if there is none

    Shapes: rowptr [m + 1], from zero; col [nnz], x [n, f], out [m, f].
    """
    row, lo, hi = _rows(rowptr)
    message = x[col[lo:hi].long()]
    out = x.new_zeros(rowptr.numel() - 1, x.size(1))
    index = row[:, None].expand_as(message)
    return out.scatter_reduce_(0, index, message, "amax", include_self=False)


def _check_max_grad(
    rowptr: Tensor, col: Tensor, x: Tensor, out: Tensor, g: Tensor
) -> None:
    _check_product(rowptr, col, x)
    _check_out(out, rowptr.numel() - 1, x)
    _check_out(g, rowptr.numel() - 1, x)


@op("rowptr col x out g", check=_check_max_grad)
def segment_max_grad(
    rowptr: Tensor, col: Tensor, x: Tensor, out: Tensor, g: Tensor
) -> Tensor:
    """Returns the gradient of `segment_max`; edges that tie share it evenly.

    So does the zero that torch's `scatter_reduce` starts from, where the maximum is zero:
    PyG's gradients have its share missing, and these are the same.

    Shapes: rowptr [m + 1], from zero; col [nnz], x [n, f], out and g [m, f]; returns
    [n, f].
    """
    row, lo, hi = _rows(rowptr)
    index = col[lo:hi].long()
    best = (x[index] == out[row]).to(x.dtype)
    ties = (out == 0).to(x.dtype).index_add_(0, row, best).clamp_(min=1)
    return torch.zeros_like(x).index_add_(0, index, best * (g / ties)[row])


@op("x index", check=_check_gather)
def gather_rows(x: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """Copies rows: ``out[k] = x[index[k]]``.

    Shapes: x [n, f], index [k], out [k, f]. Raises IndexError outside 0 .. n-1.
    """
    if index.is_cpu:  # the host would wait for a device, which checks indices itself
        _check_index(index, x.size(0))
    if out is None:
        return x.index_select(0, index)
    plain = out.is_contiguous() and out.dtype == x.dtype
    if plain and not (out.requires_grad or x.requires_grad):
        return torch.index_select(x, 0, index, out=out)
    return out.copy_(x.index_select(0, index))


def as_bytes(values: Tensor) -> Tensor:
    """Returns the bytes of a dense tensor, `[bytes]`, in its memory where it is contiguous."""
    flat = values.resolve_conj().resolve_neg().contiguous().flatten()
    # the stride of one number or none may be anything, which `view` does not take
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


@op("out index src", check=_check_scatter)
def scatter_add_rows(out: Tensor, index: Tensor, src: Tensor) -> Tensor:
    """Adds rows in place, in order of k: ``out[index[k]] += src[k]``.

    Shapes: out [m, f], index [k], src [k, f]. Raises IndexError outside 0 .. m-1.
    """
    if index.is_cpu:
        _check_index(index, out.size(0))
    return out.index_add_(0, index.long(), src)


@op("row col", check=_check_coo)
def coo_to_csr(
    row: Tensor, col: Tensor, num_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts edges by row, keeping the order of the edges of one row.

        rowptr[i] = number of edges with row < i,   col_sorted = col[perm]

    Shapes: row and col [nnz]; rowptr [num_rows + 1], col_sorted and perm [nnz].
    ``rowptr`` and ``perm`` are int32 below 2**31 edges and ``col_sorted`` below 2**31
    columns, otherwise int64. Raises IndexError outside 0 .. num_rows-1.
    """
    _check_index(row, num_rows)
    perm = torch.argsort(row, stable=True)
    rowptr = _offsets(row.long(), num_rows, offset_dtype(row.numel()))
    return rowptr, col[perm].to(column_dtype(col)), perm.to(rowptr.dtype)


@op("rowptr col")
def csr_transpose(
    rowptr: Tensor, col: Tensor, num_cols: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Transposes a CSR matrix; rows ascend within each column.

        value_t = value[perm]

    Shapes: rowptr [m + 1], col [nnz]; rowptr_t [num_cols + 1], row_t and perm
    [rowptr[m] - rowptr[0]], ``perm`` of the narrowest index type for nnz. Raises
    IndexError outside 0 .. num_cols-1.
    """
    low, high = span_of(rowptr)
    _check_index(col[low:high], num_cols)
    return transposed(rowptr, col, num_cols)


def transposed(
    rowptr: Tensor, col: Tensor, num_cols: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `csr_transpose` of valid columns; the host waits only for the span of offsets."""
    row, lo, hi = _rows(rowptr)
    by_col, perm = torch.sort(col[lo:hi], stable=True)
    ends = torch.arange(num_cols + 1, dtype=col.dtype, device=col.device)
    rowptr_t = torch.searchsorted(by_col, ends).to(offset_dtype(hi - lo))
    note_span(rowptr_t, 0, hi - lo)
    row_t = row[perm].to(offset_dtype(rowptr.numel() - 1))
    return rowptr_t, row_t, (perm + lo).to(offset_dtype(len(col)))


@op("target source pair")
def place_pairs(
    target: Tensor, source: Tensor, edge: Tensor, cursor: Tensor, pair: Tensor
) -> Tensor:
    """Places some edges by target, in their order, behind those that are there.

        s = cursor[target[e]]++,  pair[2 s], pair[2 s + 1] = source[e], edge[e]

    Shapes: target, source and edge [k]; cursor [m], int64, where the next edge of each
    target goes, and pair [2 nnz]; both are changed.
    """
    order = torch.argsort(target, stable=True)
    by, counts = target[order].long(), torch.bincount(target, minlength=len(cursor))
    first = counts.cumsum(0) - counts
    slot = cursor[by] + torch.arange(len(by), device=by.device) - first[by]
    pair.view(-1, 2)[slot] = torch.stack([source[order], edge[order]], 1).to(pair.dtype)
    cursor.add_(counts)
    return pair


@op("ids counts")
def count_ids(ids: Tensor, counts: Tensor) -> Tensor:
    """Adds to `counts` `[m]`, int64, how often each of `ids` `[k]` occurs."""
    return counts.add_(torch.bincount(ids, minlength=len(counts)))


HASH_ODD = -0x61C8864680B583EB, 0x2545F4914F6CDD1D, 0x4F6CDD1D25458B6B


def hash_sum(values: Tensor, place: Tensor, odd: int) -> Tensor:
    """Sums a hash of each value and its position, modulo 2^64."""
    mixed = (values ^ (values >> 29)) * HASH_ODD[2] + place * odd
    return ((mixed ^ (mixed >> 29)) * HASH_ODD[2]).sum()


@op("source target place")
def hash_edges(source: Tensor, target: Tensor, place: Tensor) -> Tensor:
    """Sums a hash of the ends `[k]` of each edge and its position, modulo 2^64, int64."""
    ends = source.long() * HASH_ODD[0] + target.long() * HASH_ODD[1]
    return hash_sum(ends, place, HASH_ODD[0])


@op("gid", check=_check_key)
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
    gamma = HASH_ODD[0]
    row = _mix(_mix(gid.long() + gamma) ^ key)
    step = torch.arange(1, count + 1, device=gid.device) * gamma
    return _mix(row[:, None] + step)


@op("gid", check=_check_key)
def keyed_mask(key: int, gid: Tensor, cols: int, p: float) -> Tensor:
    """Marks the entries that a dropout of probability ``p`` keeps.

        keep = keyed_bits >= round(p 2**24)

    Shapes: gid [k]; keep [k, cols], bool.
    """
    return keyed_bits.definition(key, gid, cols) >= drop_threshold(p)


@op("x gid", check=_check_dropout)
def keyed_dropout(x: Tensor, key: int, gid: Tensor, p: float) -> Tensor:
    """Zeroes entries with probability ``p`` and scales the rest.

        out = x keep / (1 - p)          (zero times x where p = 1)

    Shapes: x [k, ...], trailing dimensions flattened as columns; gid [k].
    """
    cols = x[:1].numel() if len(x) else 0
    keep = keyed_mask.definition(key, gid, cols, p)
    return x * (keep.to(x.dtype) * drop_scale(p)).view(x.shape)


def deliver(target: Tensor, out: Tensor | None) -> Tensor:
    """Copies what was computed to ``out`` if it is other memory; returns ``out``, if any."""
    if out is None:
        return target
    if target.data_ptr() != out.data_ptr():
        out.detach().copy_(target)
    return out


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
    count, (low, high) = rowptr.diff().long(), span_of(rowptr)
    row = torch.arange(count.numel(), device=rowptr.device)
    return row.repeat_interleave(count, output_size=high - low), low, high


def span_of(rowptr: Tensor) -> tuple[int, int]:
    """Returns the first edge that offsets span, and the end.

    The span is cached on tensors of a device, so that the host waits once; such offsets must
    not change.
    """
    known: tuple[int, int] | None = getattr(rowptr, "_span", None)
    if known is None:
        ends = rowptr[:: max(rowptr.numel() - 1, 1)].tolist()
        known = int(ends[0]), int(ends[-1])
        note_span(rowptr, *known)
    return known


def longest_of(rowptr: Tensor) -> int:
    """Returns the most edges of a row; 0 if a graph is captured that has not been seen.

    Cached as the span is.
    """
    known: int | None = getattr(rowptr, "_longest", None)
    if known is None:
        if rowptr.is_cuda and torch.cuda.is_current_stream_capturing():
            return 0
        known = int(rowptr.diff().max()) if rowptr.numel() > 1 else 0
        rowptr._longest = known  # type: ignore[attr-defined]
    return known


def note_span(rowptr: Tensor, low: int, high: int) -> None:
    """Caches the span of offsets that are on a device; see `span_of`."""
    if not rowptr.is_cpu:
        rowptr._span = low, high  # type: ignore[attr-defined]


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
    return torch.float32 if dtype in HALVES else dtype


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * -0x40A7B892E31B1A47
    z = (z ^ _shift(z, 27)) * -0x6B2FB644ECCEEE15
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Shifts right without copying the sign, which ``>>`` does for int64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)

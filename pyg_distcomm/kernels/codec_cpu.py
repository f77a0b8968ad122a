"""Runs codecs on the CPU by compiled loops over groups of eight rows.

Same signatures and the same bytes as `codec_reference`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyg_distcomm.kernels import codec_jit, column_select_jit, memory, threads
from pyg_distcomm.kernels.codec_reference import META, Noise, rest_begins, wrong_length
from pyg_distcomm.kernels.compile import ready

GRAIN = 1 << 15  # numbers read or written below which a second thread does not pay

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

Array = NDArray[Any]
Rows = tuple[Array, int, "Array | None"]  # storage, row stride, which rows


def quantise(
    x: Tensor, index: Tensor | None, bits: int, noise: Noise | None, out: Tensor
) -> int:
    """Runs `codec_reference.quantise`, groups of rows in parallel."""
    m, f = _size(x, index)
    if not m * f:
        out.zero_()
        return -1
    bad = np.empty(-(-m // 8), np.int64)
    parts = _parts(out, m, f, bits)
    storage, ld, at = _rows(x, index)
    key, gid = (0, None) if noise is None else (noise[0], _vector(noise[1]))
    numbers = (storage, storage.view(f"int{8 * x.itemsize}"), ld, at, f, m, bits)
    _run(codec_jit.quantise, (*numbers, key, gid, *parts, bad), m, f)
    worst = bad[bad >= 0]
    return int(worst[0]) if len(worst) else -1


def dequantise(message: Tensor, bits: int, out: Tensor) -> Tensor:
    """Runs `codec_reference.dequantise`, groups of rows in parallel."""
    m, f = out.shape
    target = _target(out)
    if m * f:
        storage, ld, _ = _rows(target, None)
        args = (*_parts(message, m, f, bits), f, m, bits, storage, ld)
        _run(codec_jit.dequantise, args, m, f)
    return _delivered(target, out)


def compact(x: Tensor, index: Tensor | None) -> Tensor:
    """Runs `codec_reference.compact`: counts first, so that no byte is written twice."""
    m, f = _size(x, index)
    numbers = (*_rows(_integers(x), index), f, m)
    first = np.zeros(-(-m // 8) + 1, np.int64)
    _run(column_select_jit.count_kept, (*numbers, first[1:]), m, f)
    np.cumsum(first, out=first)
    flags, size = -(-m * f // 8), x.element_size()
    out = torch.empty(flags + int(first[-1]) * size, dtype=torch.uint8)
    packed, values = _cut(out, flags)
    _run(column_select_jit.compact, (*numbers, first, packed, values), m, f)
    return out


def expand(message: Tensor, out: Tensor) -> Tensor:
    """Runs `codec_reference.expand`, groups of rows in parallel."""
    m, f = out.shape
    target, flags = _target(out), -(-m * f // 8)
    packed, values = _cut(message, min(flags, len(message)))
    first = np.zeros(-(-m // 8) + 1, np.int64)
    if len(packed) == flags:
        _run(column_select_jit.count_flags, (packed, f, first[1:]), m, f)
    np.cumsum(first, out=first)
    wanted = flags + int(first[-1]) * out.element_size()
    if len(message) != wanted:
        raise ValueError(wrong_length(len(message), wanted))
    storage, ld, _ = _rows(_integers(target), None)
    _run(column_select_jit.expand, (packed, values, first, storage, ld, f, m), m, f)
    return _delivered(target, out)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Runs `codec_reference.pack_bits`, on one thread."""
    out = torch.empty(-(-len(codes) * bits // 8), dtype=torch.uint8)
    words = np.zeros(-(-len(codes) // 8), np.uint64)
    padded = words.view(np.uint8)
    padded[: len(codes)] = codes.numpy()
    ready(codec_jit.pack_group, (padded, words, bits, out.numpy(), 0))()
    return out


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """Runs `codec_reference.unpack_bits`, on one thread."""
    words = np.zeros(-(-count // 8), np.uint64)
    codes = words.view(np.uint8)
    args = (packed.contiguous().numpy(), 0, bits, codes, words)
    ready(codec_jit.unpack_group, args)()
    return torch.from_numpy(codes[:count])


def keyed_columns(key: int, ids: Tensor, width: int, count: int) -> Tensor:
    """Runs `codec_reference.keyed_columns`, ids in parallel."""
    out = torch.empty(len(ids), count, dtype=torch.int32)
    args = (key, _vector(ids.long()), width, count, out.view(-1).numpy())
    _over_rows(column_select_jit.keyed_columns, args, len(ids), 16 * width)
    return out


def top_columns(x: Tensor, index: Tensor | None, count: int) -> Tensor:
    """Runs `codec_reference.top_columns`, rows in parallel."""
    m, f = _size(x, index)
    out = torch.empty(m, count, dtype=torch.int32)
    args = (*_rows(_integers(x), index), f, count, out.view(-1).numpy())
    _over_rows(column_select_jit.top_columns, args, m, 16 * f)
    return out


def take_columns(
    x: Tensor, index: Tensor | None, columns: Tensor, which: Tensor | None
) -> Tensor:
    """Runs `codec_reference.take_columns`, rows in parallel."""
    (m, _), count = _size(x, index), columns.size(1)
    out = memory.empty(m, count, x.dtype)
    lists = (_vector(columns.view(-1)), None if which is None else _vector(which))
    args = (*_rows(x, index), *lists, count, out.view(-1).numpy())
    _over_rows(column_select_jit.take_columns, args, m, count)
    return out


def put_columns(
    y: Tensor, columns: Tensor, which: Tensor | None, scale: float, out: Tensor
) -> Tensor:
    """Runs `codec_reference.put_columns`, rows in parallel."""
    (m, f), count = out.shape, columns.size(1)
    target = _target(out)
    lists = (_vector(columns.view(-1)), None if which is None else _vector(which))
    storage, ld, _ = _rows(target, None)
    factor = storage.dtype.type(scale)
    args = (_vector(y.view(-1)), *lists, count, factor, storage, ld, f)
    _over_rows(column_select_jit.put_columns, args, m, f)
    return _delivered(target, out)


def first_nonfinite(x: Tensor, index: Tensor | None) -> int:
    """Runs `codec_reference.first_nonfinite`, rows in parallel."""
    m, f = _size(x, index)
    bad = np.zeros(m, np.bool_)
    infinity = int(_integers(torch.full((1,), float("inf"), dtype=x.dtype)))
    args = (*_rows(_integers(x), index), f, infinity, bad)
    _over_rows(column_select_jit.finite, args, m, f)
    return int(bad.argmax()) if bad.any() else -1


def _run(loop: Any, args: tuple[Any, ...], rows: int, width: int) -> None:
    """Runs a loop over groups of eight rows."""
    _over_rows(loop, args, -(-rows // 8), 8 * width)


def _over_rows(loop: Any, args: tuple[Any, ...], count: int, width: int) -> None:
    if count and width:
        work: Callable[[int, int], None] = ready(loop, args, 2)
        threads.run_split(work, count, GRAIN // width)


def _size(x: Tensor, index: Tensor | None) -> tuple[int, int]:
    return len(x) if index is None else len(index), x.size(1)


def _rows(x: Tensor, index: Tensor | None) -> Rows:
    """Returns the storage under a matrix as a vector, its row stride, and which rows."""
    if index is not None and not _row_strided(x):
        _checked(_vector(index), len(x))
        x, index = x.detach().index_select(0, index), None  # not all rows of x
    t = x.detach() if _row_strided(x) else x.detach().contiguous()
    span = (t.size(0) - 1) * t.stride(0) + t.size(1) if t.numel() else 0
    at = None if index is None else _checked(_vector(index), len(x))
    return t.as_strided((span,), (1,)).numpy(), t.stride(0), at


def _checked(index: Array, rows: int) -> Array:
    if len(index) and (index.min() < 0 or index.max() >= rows):
        raise IndexError(
            f"index spans {index.min()} .. {index.max()}, but there are {rows} rows"
        )
    return index


def _row_strided(t: Tensor) -> bool:
    return t.stride(1) == 1 and t.stride(0) >= t.size(1)


def _target(out: Tensor) -> Tensor:
    """Returns a matrix with contiguous rows to compute `out` in: itself, if it has."""
    return out.detach() if _row_strided(out) else torch.empty_like(out.contiguous())


def _delivered(target: Tensor, out: Tensor) -> Tensor:
    if target.data_ptr() != out.data_ptr():
        out.detach().copy_(target)
    return out


def _parts(message: Tensor, rows: int, width: int, bits: int) -> tuple[Array, ...]:
    """Returns what leads the rows, their codes, and the rest of constants if any."""
    flat, end = message.numpy(), rest_begins(rows, width, bits)
    return flat[: META * rows], flat[META * rows : end], flat[end:]


def _cut(message: Tensor, at: int) -> tuple[Array, Array]:
    flat = message.numpy()
    return flat[:at], flat[at:]


def _vector(t: Tensor) -> Array:
    return t.detach().contiguous().numpy()


def _integers(t: Tensor) -> Tensor:
    """Returns the bits of numbers, as signed integers."""
    return t.detach().view(_INTEGERS[t.element_size()])

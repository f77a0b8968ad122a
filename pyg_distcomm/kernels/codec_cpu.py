"""Runs the ops of `codec_ops` on the CPU: loops over groups of eight rows, the same bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_distcomm.kernels import codec_jit, memory
from pyg_distcomm.kernels.codec_ops import META, Noise, rest_begins
from pyg_distcomm.kernels.compile import jit, ready
from pyg_distcomm.kernels.core_cpu import (
    Array,
    check_index,
    deliver,
    flat,
    over_rows,
    row_strided,
    vector,
    writable,
)

Rows = tuple[Array, int, "Array | None"]  # storage, row stride, which rows


def quantise_wide(
    x: Tensor, index: Tensor | None, bits: int, noise: Noise | None, out: Tensor
) -> int:
    """Runs `codec_ops.quantise_wide`, groups of rows in parallel."""
    m, f = _size(x, index)
    if not m * f:
        out.zero_()
        return -1
    bad = np.empty(-(-m // 8), np.int64)
    parts = _parts(out, m, f, bits)
    storage, ld, at = _rows(x, index)
    key, gid = (0, None) if noise is None else (noise[0], vector(noise[1]))
    numbers = (storage, storage.view(f"int{8 * x.itemsize}"), ld, at, f, m, bits)
    _run(codec_jit.quantise, (*numbers, key, gid, *parts, bad), m, f)
    worst = bad[bad >= 0]
    return int(worst[0]) if len(worst) else -1


def dequantise_wide(message: Tensor, bits: int, out: Tensor) -> Tensor:
    """Runs `codec_ops.dequantise_wide`, groups of rows in parallel."""
    m, f = out.shape
    target = writable(out, len(out), out)
    if m * f:
        storage, ld, _ = _rows(target, None)
        args = (*_parts(message, m, f, bits), f, m, bits, storage, ld)
        _run(codec_jit.dequantise, args, m, f)
    return deliver(target, out)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Runs `codec_ops.pack_bits`, on one thread."""
    out = torch.empty(-(-len(codes) * bits // 8), dtype=torch.uint8)
    words = np.zeros(-(-len(codes) // 8), np.uint64)
    padded = words.view(np.uint8)
    padded[: len(codes)] = codes.numpy()
    ready(codec_jit.pack_group, (padded, words, bits, out.numpy(), 0))()
    return out


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """Runs `codec_ops.unpack_bits`, on one thread."""
    words = np.zeros(-(-count // 8), np.uint64)
    codes = words.view(np.uint8)
    args = (packed.contiguous().numpy(), 0, bits, codes, words)
    ready(codec_jit.unpack_group, args)()
    return torch.from_numpy(codes[:count])


def take_columns(x: Tensor, index: Tensor | None, columns: Tensor) -> Tensor:
    """Runs `codec_ops.take_columns`, rows in parallel."""
    (m, _), count = _size(x, index), len(columns)
    out = memory.empty(m, count, x.dtype)
    args = (*_rows(x, index), vector(columns), count, out.view(-1).numpy())
    over_rows(copy_columns, args, m, count)
    return out


def put_columns(y: Tensor, columns: Tensor, scale: float, out: Tensor) -> Tensor:
    """Runs `codec_ops.put_columns`, rows in parallel."""
    m, f = out.shape
    target = writable(out, len(out), out)
    storage, ld, _ = _rows(target, None)
    factor = storage.dtype.type(scale)
    args = (vector(y.view(-1)), vector(columns), len(columns), factor, storage, ld, f)
    over_rows(spread_columns, args, m, f)
    return deliver(target, out)


def _run(loop: Any, args: tuple[Any, ...], rows: int, width: int) -> None:
    """Runs a loop over groups of eight rows."""
    over_rows(loop, args, -(-rows // 8), 8 * width)


def _size(x: Tensor, index: Tensor | None) -> tuple[int, int]:
    return len(x) if index is None else len(index), x.size(1)


def _rows(x: Tensor, index: Tensor | None) -> Rows:
    """Returns the storage under a matrix as a vector, its row stride, and which rows."""
    if index is None:
        return (*flat(x), None)
    at = vector(index)
    check_index(at, len(x))
    if row_strided(x):
        return (*flat(x), at)
    return (*flat(x.detach().index_select(0, index)), None)  # not all rows of x


def _parts(message: Tensor, rows: int, width: int, bits: int) -> tuple[Array, ...]:
    """Returns what leads the rows, their codes, and the rest of constants if any."""
    flat, end = message.numpy(), rest_begins(rows, width, bits)
    return flat[: META * rows], flat[META * rows : end], flat[end:]


# Loops over columns ------------------------------------------------------------------


@jit
def copy_columns(
    x: Array,
    ld: int,
    index: Array | None,
    columns: Array,
    count: int,
    out: Array,
    begin: int,
    end: int,
) -> None:
    for r in range(begin, end):
        at = ld * (r if index is None else np.int64(index[r]))
        for j in range(count):
            column = np.uint64(columns[np.uint64(j)])
            out[np.uint64(r * count + j)] = x[np.uint64(at) + column]


@jit
def spread_columns(
    y: Array,
    columns: Array,
    count: int,
    scale: Any,
    out: Array,
    ld: int,
    f: int,
    begin: int,
    end: int,
) -> None:
    for r in range(begin, end):
        at = r * ld
        for c in range(f):
            out[np.uint64(at + c)] = 0
        for j in range(count):
            column = np.uint64(columns[np.uint64(j)])
            out[np.uint64(at) + column] = y[np.uint64(r * count + j)] * scale

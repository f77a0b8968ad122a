"""Chooses the kernels of codecs: compiled on the CPU, plain torch elsewhere.

`codec_reference` defines every op; `code_cpu` holds the compiled ones, for float32 and
float64. Rows are those of a matrix, or those at an index of it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from pyg_distcomm.kernels import codec_reference
from pyg_distcomm.kernels.codec_reference import META, Noise
from pyg_distcomm.kernels.codec_reference import message_bytes as message_bytes
from pyg_distcomm.kernels.codec_reference import wrong_length as wrong_length

FLOATS = (torch.float32, torch.float64)
HALVES = (*FLOATS, torch.float16, torch.bfloat16)
BLOCK = 1 << 16  # numbers of a narrower type that are float32 at a time

P = ParamSpec("P")
R = TypeVar("R")


def quantise(
    x: Tensor, index: Tensor | None, bits: int, noise: Noise | None, out: Tensor
) -> int:
    """Writes rows as a few bits a number; see `codec_reference.quantise`.

    Rows of a narrower type are written as float32, some at a time.
    """
    wanted = message_bytes(_count(x, index), x.size(1), bits, x.element_size())
    if out.dtype != torch.uint8 or out.shape != (wanted,) or not out.is_contiguous():
        raise ValueError(
            f"out must be {wanted} contiguous bytes, got {list(out.shape)} of {out.dtype}"
        )
    if noise is not None and len(noise[1]) != _count(x, index):
        raise ValueError(
            f"noise must name each of the {_count(x, index)} rows, got {len(noise[1])}"
        )
    if x.dtype in FLOATS:
        return _pick(codec_reference.quantise, x)(x, index, bits, noise, out)
    bad = -1
    for rows, meta, packed in _blocks(_count(x, index), x, bits):
        some = x[rows] if index is None else x[index[rows].long()]
        drawn = None if noise is None else (noise[0], noise[1][rows])
        sizes = len(out[meta]), len(out[packed])
        part = out.new_empty(sum(sizes))
        found = quantise(some.float(), None, bits, drawn, part)
        bad = rows.start + found if bad < 0 <= found else bad
        out[meta], out[packed] = part.split(sizes)
    return bad


def dequantise(message: Tensor, bits: int, out: Tensor) -> Tensor:
    """Reads rows of a few bits a number; see `codec_reference.dequantise`.

    In a narrower type, numbers beyond its range arrive as its greatest.
    """
    wanted = message_bytes(len(out), out.size(1), bits, out.element_size())
    if len(message) != wanted:
        raise ValueError(wrong_length(len(message), wanted))
    if out.dtype in FLOATS:
        return _pick(codec_reference.dequantise, out)(message, bits, out)
    most = torch.finfo(out.dtype).max
    for rows, meta, packed in _blocks(len(out), out, bits):
        part = torch.cat([message[meta], message[packed]])
        wide = torch.empty(out[rows].shape, dtype=torch.float32, device=out.device)
        out[rows] = dequantise(part, bits, wide).clamp_(-most, most).to(out.dtype)
    return out


def compact(x: Tensor, index: Tensor | None = None) -> Tensor:
    """Writes rows without their zeros; see `codec_reference.compact`."""
    return _pick(codec_reference.compact, x, HALVES)(x, index)


def expand(message: Tensor, out: Tensor) -> Tensor:
    """Reads rows without their zeros; see `codec_reference.expand`."""
    return _pick(codec_reference.expand, out, HALVES)(message, out)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Packs small integers into bytes; see `codec_reference.pack_bits`."""
    return _pick(codec_reference.pack_bits, codes, (torch.uint8,))(codes, bits)


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """Reads packed integers; see `codec_reference.unpack_bits`."""
    if len(packed) != -(-count * bits // 8):
        raise ValueError(wrong_length(len(packed), -(-count * bits // 8)))
    op = _pick(codec_reference.unpack_bits, packed, (torch.uint8,))
    return op(packed, bits, count)


def keyed_columns(key: int, ids: Tensor, width: int, count: int) -> Tensor:
    """Chooses columns for each id; see `codec_reference.keyed_columns`."""
    if not 0 < count <= width <= codec_reference.MAX_WIDTH:
        raise ValueError(
            f"count and width must satisfy 0 < count <= width <= "
            f"{codec_reference.MAX_WIDTH}, got {count} and {width}"
        )
    op = _pick(codec_reference.keyed_columns, ids, (torch.int32, torch.int64))
    return op(key, ids, width, count)


def top_columns(x: Tensor, index: Tensor | None, count: int) -> Tensor:
    """Finds the largest numbers of each row; see `codec_reference.top_columns`."""
    return _pick(codec_reference.top_columns, x)(x, index, count)


def take_columns(
    x: Tensor, index: Tensor | None, columns: Tensor, which: Tensor | None = None
) -> Tensor:
    """Copies columns of rows; see `codec_reference.take_columns`."""
    return _pick(codec_reference.take_columns, x)(x, index, columns, which)


def put_columns(
    y: Tensor, columns: Tensor, which: Tensor | None, scale: float, out: Tensor
) -> Tensor:
    """Puts columns back in their rows; see `codec_reference.put_columns`."""
    return _pick(codec_reference.put_columns, y)(y, columns, which, scale, out)


def first_nonfinite(x: Tensor, index: Tensor | None = None) -> int:
    """Finds a row that is not finite; see `codec_reference.first_nonfinite`."""
    return _pick(codec_reference.first_nonfinite, x)(x, index)


def _pick(
    op: Callable[P, R], x: Tensor, types: tuple[torch.dtype, ...] = FLOATS
) -> Callable[P, R]:
    """Returns the compiled twin of an op where there is one."""
    if x.device.type != "cpu" or x.dtype not in types:
        return op
    # importing Numba takes a while: only those who encode pay for it
    module = importlib.import_module(".codec_cpu", __package__)
    twin: Callable[P, R] = getattr(module, op.__name__)
    return twin


def _blocks(rows: int, x: Tensor, bits: int) -> Iterator[tuple[slice, slice, slice]]:
    """Yields rows, what leads them, and their codes, which fill whole bytes.

    On a device all rows at once: kernels that are begun one by one would wait.
    """
    width, begins = x.size(1), META * rows
    some = (
        8 * max(BLOCK // (8 * max(width, 1)), 1)
        if x.device.type == "cpu"
        else max(rows, 1)
    )
    for begin in range(0, rows, some):
        end = min(begin + some, rows)
        first, last = (begins + -(-at * width * bits // 8) for at in (begin, end))
        yield slice(begin, end), slice(META * begin, META * end), slice(first, last)


def _count(x: Tensor, index: Tensor | None) -> int:
    return len(x) if index is None else len(index)

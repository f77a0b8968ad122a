"""Writes numbers unchanged, in a narrower type, or in few bits that differ by row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from pyg_distcomm.halo.codec import (
    LEVELS,
    Codec,
    CodingContext,
    ColumnReducer,
    Index,
    RngKey,
    room,
    rows_at,
)
from pyg_distcomm.kernels import codec_ops
from pyg_distcomm.kernels.registry import HALVES


@dataclass(frozen=True)
class Plain(ColumnReducer):
    """Sends all numbers as they are, uncompressed.

    Price: f numbers per row.
    """

    linear = unbiased = True

    def narrowed(self, width: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """Returns the width and type unchanged."""
        return width, dtype

    def narrow(self, x: Tensor, draw: RngKey | None, index: Index) -> Tensor:
        """Returns the rows, without a copy if all are sent."""
        return rows_at(x, index)

    def widen(self, y: Tensor, out: Tensor, draw: RngKey | None) -> Tensor:
        """Copies the rows, bit for bit."""
        return out.copy_(y)


@dataclass(frozen=True)
class Cast(ColumnReducer):
    """Sends each number rounded to a narrower type.

    The relative error is at most 2^-8 for bfloat16, and 2^-11 for float16 from 6e-5 to
    65504; greater magnitudes arrive as infinities, smaller ones are off by up to 3e-8.

    Price: 2 f bytes per row.

    Args:
        dtype: torch.float16 or torch.bfloat16.
    """

    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.dtype not in HALVES:
            raise ValueError(
                f"Cast sends torch.float16 or torch.bfloat16, got {self.dtype}"
            )

    def narrowed(self, width: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """Returns the width and the narrower type."""
        return width, self.dtype

    def narrow(self, x: Tensor, draw: RngKey | None, index: Index) -> Tensor:
        """Returns the rounded numbers."""
        return rows_at(x, index).to(self.dtype)

    def widen(self, y: Tensor, out: Tensor, draw: RngKey | None) -> Tensor:
        """Copies the rounded numbers into the type of `out`."""
        return out.copy_(y)


@dataclass(frozen=True)
class DegreeBits(Codec):
    """Sends rows of nodes with many in-edges in more bits ([Zhang23]).

    The rows of a message, ascending by the in-degree of their node, are cut into as many
    groups as there are numbers of bits from `bits` to 8, of equal size but for rounding:

        group k of G has rows  floor(m k / G) .. floor(m (k + 1) / G) - 1
        and is written as `Quantise(bits 2^k, "stochastic")`

    Both ends know the degrees: they travel once, when a halo is first used, as planning
    does (8 bytes a ghost).

    Price: that of `Quantise` for each group: with `bits=1` 3.75 f / 8 + 4 bytes per row.
    Differs from [Zhang23], whose authors' code this follows, in that ties of the degree do
    not change the sizes of groups, so that bytes are known from the number of rows.

    Args:
        bits: bits of the lowest degrees: 1, 2, 4 or 8; an `adaptive` link changes it.
    """

    bits: int = 1
    ranked = unbiased = keyed = True
    by_row = False

    def __post_init__(self) -> None:
        if self.bits not in LEVELS:
            raise ValueError(
                f"DegreeBits begins at 1, 2, 4 or 8 bits, got bits={self.bits!r}"
            )

    def _group_sizes(self, rows: int) -> list[tuple[int, int]]:
        """Returns the bits and the number of rows of each group."""
        levels = [bits for bits in LEVELS if bits >= self.bits]
        ends = [rows * k // len(levels) for k in range(len(levels) + 1)]
        sizes = (end - begin for begin, end in pairwise(ends))
        return list(zip(levels, sizes, strict=True))

    def wire_bytes(
        self, rows: int, width: int, dtype: torch.dtype = torch.float32
    ) -> int:
        """Returns the bytes of a message, exactly."""
        if not width:
            return 0
        size = dtype.itemsize
        return sum(
            codec_ops.message_bytes(count, width, bits, size)
            for bits, count in self._group_sizes(rows)
        )

    def _groups(self, context: CodingContext) -> Iterator[tuple[int, Tensor]]:
        degree = context.key.degree
        assert degree is not None
        order, begin = torch.argsort(degree, stable=True), 0
        for bits, count in self._group_sizes(context.rows):
            yield bits, order[begin : begin + count]
            begin += count

    def _write(
        self, x: Tensor, index: Index, out: Tensor | None, context: CodingContext
    ) -> Tensor:
        out = room(self.wire_bytes(context.rows, x.size(1), x.dtype), x, out)
        if len(out):
            self._write_groups(x, index, list(self._groups(context)), out, context)
        return out

    def _read(self, message: Tensor, out: Tensor, context: CodingContext) -> Tensor:
        if not out.numel():
            return out
        return self._read_groups(message, list(self._groups(context)), out)

    def _write_groups(
        self,
        x: Tensor,
        index: Index,
        groups: Sequence[tuple[int, Tensor]],
        out: Tensor,
        context: CodingContext,
    ) -> None:
        """Writes groups of rows, as (bits, rows of the message), each as `Quantise` does."""
        key, gid = context.key.rounding
        end, bad = 0, list[int | Tensor]()
        for bits, rows in groups:
            begin, end = end, end + self._message_bytes(len(rows), bits, x)
            chosen = rows if index is None else index[rows]
            noise = key, gid[rows]
            found = codec_ops.quantise(x, chosen, bits, noise, out[begin:end])
            if isinstance(found, Tensor):
                row = rows.index_select(0, found.clamp(min=0).view(1))
                bad.append(row.masked_fill(found < 0, len(gid)))
            elif found >= 0:
                bad.append(int(rows[found]))
        out[end:] = 0
        context.refuse(x, index, _first_unwritable(bad, len(gid)))

    def _read_groups(
        self, message: Tensor, groups: Sequence[tuple[int, Tensor]], out: Tensor
    ) -> Tensor:
        """Reads the groups that `_write_groups` wrote into the rows of `out`."""
        end = 0
        for bits, rows in groups:
            begin, end = end, end + self._message_bytes(len(rows), bits, out)
            part = out.new_empty((len(rows), out.size(1)))
            out[rows] = codec_ops.dequantise(message[begin:end], bits, part)
        return out

    @staticmethod
    def _message_bytes(rows: int, bits: int, x: Tensor) -> int:
        return codec_ops.message_bytes(rows, x.size(1), bits, x.element_size())


def _first_unwritable(bad: list[int | Tensor], none: int) -> int | Tensor:
    """Returns the first row that could not be written, or -1."""
    late = [row for row in bad if isinstance(row, Tensor)]
    if late:
        row = torch.stack(late).amin()
        return row.masked_fill(row == none, -1)
    return min((row for row in bad if isinstance(row, int)), default=-1)

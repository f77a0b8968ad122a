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
from pyg_distcomm.kernels.codec_ops import META, TAIL
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
class _MixedBits(Codec):
    """Writes the rows of a message in groups, each as `Quantise` with its own bits.

    Rounding is stochastic, and keyed by (key, row id, column), whatever the group.
    """

    unbiased = keyed = True
    by_row = False

    def _write_groups(
        self,
        x: Tensor,
        index: Index,
        groups: Sequence[tuple[int, Tensor]],
        out: Tensor,
        context: CodingContext,
    ) -> None:
        """Writes groups of rows, as (bits, rows of the message), one after the other."""
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


@dataclass(frozen=True)
class DegreeBits(_MixedBits):
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
    ranked = True

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


@dataclass(frozen=True)
class RangeBits(_MixedBits):
    """Sends rows of a wide range in more bits, so that rounding errs least for the bytes.

    Of all ways to give the m rows of a message 1, 2, 4 or 8 bits a number, with at most
    `mean` m of them together, it takes the one with the least sum of squared steps

        sum_i (max x_i - min x_i)^2 / (2^b_i - 1)^2

    up to the last step that fits: bits are given in order of what the next ones gain each.
    The sum bounds the variance of stochastic rounding, f/4 times. The sender chooses for
    each message, and two bits a row tell the receiver.

    Price: ceil(m / 4) + 4 m + floor((f floor(mean m) + 28) / 8) bytes a message of m rows,
    and 4 m more in float64 below 33 numbers per row.
    Differs from [Wan23] in solving for the bits of each message, exactly and by sorting,
    and not of all messages every few epochs by an integer program; in 1 bit beside 2, 4
    and 8; and in a sum of errors for given bytes instead of a weighted sum of errors and
    seconds. Weights of edges do not count.

    Args:
        mean: bits a number, on average, from 1 to 8.
    """

    mean: float = 2.0

    def __post_init__(self) -> None:
        if not LEVELS[0] <= self.mean <= LEVELS[-1]:
            raise ValueError(f"mean lies between 1 and 8 bits, got mean={self.mean!r}")

    def wire_bytes(
        self, rows: int, width: int, dtype: torch.dtype = torch.float32
    ) -> int:
        """Returns the bytes of a message, exactly."""
        if not width or not rows:
            return 0
        tail = META * rows if dtype.itemsize == 8 and width < TAIL else 0
        codes = (width * int(self.mean * rows) + 7 * len(LEVELS)) // 8
        return -(-rows // 4) + META * rows + codes + tail

    def levels(self, x: Tensor) -> Tensor:
        """Returns which of 1, 2, 4 and 8 bits each row gets, as its place in them `[m]`."""
        low, high = (end.double() for end in torch.aminmax(x, dim=1))
        span = (high - low).nan_to_num(nan=torch.inf).clamp_max(1e150)
        steps = [1.0 / (2**bits - 1) ** 2 for bits in LEVELS]
        costs = [after - before for before, after in pairwise(LEVELS)]
        each = [
            (a - b) / cost for (a, b), cost in zip(pairwise(steps), costs, strict=True)
        ]
        gain = torch.cat([span.square() * gained for gained in each])
        order = torch.argsort(gain, descending=True, stable=True)
        cost = torch.cat([torch.full_like(low, step) for step in costs]).long()[order]
        spare = int(self.mean * len(x)) - LEVELS[0] * len(x)
        taken = (cost.cumsum(0) <= spare).long()  # asks for no value of a device
        level = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        return level.index_add_(0, order % max(len(x), 1), taken)

    def _write(
        self, x: Tensor, index: Index, out: Tensor | None, context: CodingContext
    ) -> Tensor:
        rows = context.rows
        out = room(self.wire_bytes(rows, x.size(1), x.dtype), x, out)
        if not len(out):
            return out
        level = self.levels(rows_at(x, index))
        head = -(-rows // 4)
        out[:head] = codec_ops.pack_bits(level.to(torch.uint8), 2)
        self._write_groups(x, index, _rows_by_level(level), out[head:], context)
        return out

    def _read(self, message: Tensor, out: Tensor, context: CodingContext) -> Tensor:
        if not out.numel():
            return out
        head = -(-len(out) // 4)
        level = codec_ops.unpack_bits(message[:head], 2, len(out))
        return self._read_groups(message[head:], _rows_by_level(level), out)


def _first_unwritable(bad: list[int | Tensor], none: int) -> int | Tensor:
    """Returns the first row that could not be written, or -1."""
    late = [row for row in bad if isinstance(row, Tensor)]
    if late:
        row = torch.stack(late).amin()
        return row.masked_fill(row == none, -1)
    return min((row for row in bad if isinstance(row, int)), default=-1)


def _rows_by_level(level: Tensor) -> list[tuple[int, Tensor]]:
    """Returns the rows of each number of bits; synchronises once with a device."""
    each = torch.arange(len(LEVELS), device=level.device)
    counts = (level.unsqueeze(1) == each).sum(0).tolist()
    order = torch.argsort(level, stable=True)
    return list(zip(LEVELS, order.split(counts), strict=True))

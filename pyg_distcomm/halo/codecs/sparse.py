"""Sends the numbers of a row that are not zero, or the largest of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from pyg_distcomm.halo.codec import (
    Codec,
    CodingContext,
    Index,
    bytes_of,
    check_rate,
    matrix_of,
    room,
    share_of,
)
from pyg_distcomm.halo.codecs.quantise import Plain, rows_at
from pyg_distcomm.kernels import codec_ops


@dataclass(frozen=True)
class Bitmap(Codec):
    """Sends a flag for each number, and the numbers that are not zero: lossless.

    After a ReLU half of the numbers are zero, after a dropout of a half three quarters,
    and so are their gradients. A message that would not become shorter is sent unchanged.
    A zero arrives without its sign.

    Price: (m f) / 8 bytes and the nonzero numbers; at most all numbers. The size depends
    on values, so a header of 8 bytes goes ahead of each message.
    """

    linear = unbiased = True
    fixed_size = False

    def wire_bytes(
        self, rows: int, width: int, dtype: torch.dtype = torch.float32
    ) -> int:
        """Returns the bytes of the unchanged rows, which no message exceeds."""
        return rows * width * dtype.itemsize

    def _write(
        self, x: Tensor, index: Index, out: Tensor | None, context: CodingContext
    ) -> Tensor:
        """Writes flags and numbers, or the unchanged rows where those are no longer."""
        whole = self.wire_bytes(context.rows, x.size(1), x.dtype)
        message = codec_ops.compact(x, index) if whole else bytes_of(x[:0])
        if len(message) >= whole:
            return bytes_of(rows_at(x, index), out)
        return message if out is None else room(len(message), x, out).copy_(message)

    def _read(self, message: Tensor, out: Tensor, context: CodingContext) -> Tensor:
        if len(message) == out.numel() * out.element_size():
            return out.copy_(matrix_of(message, len(out), out.size(1), out.dtype))
        return codec_ops.expand(message, out)


@dataclass(frozen=True)
class TopK(Codec):
    """Sends the k numbers of each row that are largest in magnitude, and their columns.

        k = min(max(round(f / rate), 1), f)

    Of equal numbers the first are sent. Columns are flags, f / 8 bytes a row, or k numbers
    of 1, 2 or 4 bytes, whichever is shorter, which both ends derive from f and k.

    Price: that of `values` for k columns, and the columns; exact.

    Args:
        rate: the compression ratio c >= 1 in numbers; a schedule may set another.
        values: the codec of the numbers.
    """

    rate: float
    values: Codec = field(default_factory=Plain)

    def __post_init__(self) -> None:
        check_rate(self.rate)
        if self.values.stateful:
            raise ValueError(
                f"TopK sends other columns each time, so {self.values!r} has nothing to "
                "remember; put it around: Residual(TopK(rate))"
            )

    @property
    def inside(self) -> tuple[Codec, ...]:
        """The codec of its values."""
        return (self.values,)

    def with_rate(self, rate: float) -> TopK:
        """Returns the same codec at another rate."""
        return replace(self, rate=rate)

    def kept(self, width: int) -> int:
        """Returns how many numbers of a row are sent."""
        return share_of(width, self.rate)

    def wire_bytes(
        self, rows: int, width: int, dtype: torch.dtype = torch.float32
    ) -> int:
        """Returns the bytes of columns and values."""
        values = self.values.wire_bytes(rows, self.kept(width), dtype)
        return self._columns_bytes(rows, width) + values

    def _write(
        self, x: Tensor, index: Index, out: Tensor | None, context: CodingContext
    ) -> Tensor:
        """Writes columns, then values."""
        context.refuse(x, index, codec_ops.first_nonfinite(x, index))
        rows, width = context.rows, x.size(1)
        chosen = codec_ops.top_columns(x, index, self.kept(width))
        which = torch.arange(rows, device=x.device)
        picked = codec_ops.take_columns(x, index, chosen, which)
        head = self._columns_bytes(rows, width)
        out = room(self.wire_bytes(rows, width, x.dtype), x, out)
        out[:head] = self._write_columns(chosen, width)
        tail = self.values.encode(
            picked, context.draw, out=out[head:], where=context.where
        )
        return out[: head + len(tail)]

    def _read(self, message: Tensor, out: Tensor, context: CodingContext) -> Tensor:
        """Reads values into their columns, with zeros elsewhere."""
        rows, width = out.shape
        head = self._columns_bytes(rows, width)
        chosen = self._read_columns(message[:head], rows, width)
        picked = out.new_empty(rows, self.kept(width))
        self.values.decode(message[head:], picked, context.draw)
        which = torch.arange(rows, device=out.device)
        return codec_ops.put_columns(picked, chosen, which, 1.0, out)

    def _index_type(self, width: int) -> torch.dtype:
        if width <= 1 << 8:
            return torch.uint8
        return torch.int16 if width <= 1 << 15 else torch.int32

    def _columns_bytes(self, rows: int, width: int) -> int:
        count = self.kept(width)
        if count == width:
            return 0
        numbers = rows * count * self._index_type(width).itemsize
        return min(numbers, -(-rows * width // 8))

    def _as_flags(self, rows: int, width: int) -> bool:
        numbers = rows * self.kept(width) * self._index_type(width).itemsize
        return self._columns_bytes(rows, width) < numbers

    def _write_columns(self, chosen: Tensor, width: int) -> Tensor:
        rows = len(chosen)
        if self.kept(width) == width:
            return chosen.new_empty(0, dtype=torch.uint8)
        if not self._as_flags(rows, width):
            return bytes_of(chosen.to(self._index_type(width)))
        flags = chosen.new_zeros(rows, width, dtype=torch.uint8)
        return codec_ops.pack_bits(flags.scatter_(1, chosen.long(), 1).view(-1), 1)

    def _read_columns(self, head: Tensor, rows: int, width: int) -> Tensor:
        count = self.kept(width)
        if count == width:
            return torch.arange(width, device=head.device).expand(rows, -1).int()
        if not self._as_flags(rows, width):
            return matrix_of(head, rows, count, self._index_type(width)).int()
        flags = codec_ops.unpack_bits(head, 1, rows * width).view(rows, width)
        return codec_ops.flagged_columns(flags, count)

"""Bitmap and TopK: rows of which many numbers are zero, or small."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from pyg_distcomm.halo.codec import (
    Codec,
    CodecState,
    RngKey,
    count_of,
    read,
    room,
    written,
)
from pyg_distcomm.halo.codecs.plain import Plain, rows_at
from pyg_distcomm.halo.codecs.quantise import refusal
from pyg_distcomm.kernels import codec_ops


@dataclass(frozen=True)
class Bitmap(Codec):
    """Sends a flag for each number, and those numbers that are not zero: lossless.

    After a ReLU half of them are; after dropout of a half beside, three quarters. So are
    their gradients. A message that would not become shorter is sent as it is. A zero
    arrives without its sign.

    Price: (m f) / 8 bytes and the numbers that are not zero; at most all of them. The
    size depends on values, so a header of 8 bytes goes ahead of each message.
    """

    @property
    def linear(self) -> bool:
        """The identity is."""
        return True

    @property
    def unbiased(self) -> bool:
        """The identity is."""
        return True

    @property
    def sized(self) -> bool:
        """Sizes depend on values."""
        return False

    def wire_bytes(
        self, rows: int, width: int, dtype: torch.dtype = torch.float32
    ) -> int:
        """Returns the bytes of the rows as they are, which no message exceeds."""
        return rows * width * dtype.itemsize

    def encode(
        self,
        x: Tensor,
        draw: RngKey | None = None,
        *,
        index: Tensor | None = None,
        out: Tensor | None = None,
        state: CodecState | None = None,
        where: str = "",
    ) -> Tensor:
        """Writes flags and numbers, or the rows as they are where that is no longer."""
        whole = self.wire_bytes(count_of(x, index), x.size(1), x.dtype)
        message = codec_ops.compact(x, index) if whole else written(x[:0], None)
        if len(message) >= whole:
            return written(rows_at(x, index), out)
        return message if out is None else room(len(message), x, out).copy_(message)

    def decode(
        self,
        message: Tensor,
        out: Tensor,
        draw: RngKey | None = None,
        *,
        state: CodecState | None = None,
    ) -> Tensor:
        """Reads what was sent, zeros between."""
        if len(message) == out.numel() * out.element_size():
            return out.copy_(read(message, len(out), out.size(1), out.dtype))
        return codec_ops.expand(message, out)


@dataclass(frozen=True)
class TopK(Codec):
    """Sends the k numbers of each row that are largest in magnitude, and their columns.

        k = min(max(round(f / rate), 1), f)

    Of equal ones the first are sent. Columns are flags, f / 8 bytes a row, or k numbers
    of 1, 2 or 4 bytes, whichever is shorter: both ends know without being told.

    Price: what `values` takes for k columns, and the columns; exact.

    Args:
        rate: the compression ratio c >= 1 in numbers; a schedule may set another.
        values: how the numbers are written.
    """

    rate: float
    values: Codec = field(default_factory=Plain)

    def __post_init__(self) -> None:
        if not 1.0 <= self.rate < float("inf"):
            raise ValueError(f"a compression rate is 1 or more, got rate={self.rate!r}")
        if self.values.stateful:
            raise ValueError(
                f"TopK sends other columns each time, so {self.values!r} has nothing to "
                "remember; put it around: Residual(TopK(rate))"
            )

    @property
    def sized(self) -> bool:
        """As how its values are written."""
        return self.values.sized

    @property
    def keyed(self) -> bool:
        """As how its values are written."""
        return self.values.keyed

    @property
    def inside(self) -> tuple[Codec, ...]:
        """How its values are written."""
        return (self.values,)

    def with_rate(self, rate: float) -> TopK:
        """Returns the same codec at another rate."""
        return replace(self, rate=rate)

    def kept(self, width: int) -> int:
        """Returns how many numbers of a row are sent."""
        return min(max(round(width / self.rate), 1), width)

    def wire_bytes(
        self, rows: int, width: int, dtype: torch.dtype = torch.float32
    ) -> int:
        """Returns the bytes of columns and values."""
        count = self.kept(width)
        return self._columns_bytes(rows, width) + self.values.wire_bytes(
            rows, count, dtype
        )

    def encode(
        self,
        x: Tensor,
        draw: RngKey | None = None,
        *,
        index: Tensor | None = None,
        out: Tensor | None = None,
        state: CodecState | None = None,
        where: str = "",
    ) -> Tensor:
        """Writes columns, then values."""
        bad = codec_ops.first_nonfinite(x, index)
        if bad >= 0:
            raise ValueError(refusal(self, x, index, bad, where))
        rows, width = count_of(x, index), x.size(1)
        chosen = codec_ops.top_columns(x, index, self.kept(width))
        which = torch.arange(rows, device=x.device)
        picked = codec_ops.take_columns(x, index, chosen, which)
        head = self._columns_bytes(rows, width)
        out = room(self.wire_bytes(rows, width, x.dtype), x, out)
        out[:head] = self._written(chosen, width)
        tail = self.values.encode(picked, draw, out=out[head:], where=where)
        return out[: head + len(tail)]

    def decode(
        self,
        message: Tensor,
        out: Tensor,
        draw: RngKey | None = None,
        *,
        state: CodecState | None = None,
    ) -> Tensor:
        """Reads values into their columns, zeros elsewhere."""
        rows, width = out.shape
        head = self._columns_bytes(rows, width)
        chosen = self._read(message[:head], rows, width)
        picked = out.new_empty(rows, self.kept(width))
        self.values.decode(message[head:], picked, draw)
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

    def _written(self, chosen: Tensor, width: int) -> Tensor:
        rows = len(chosen)
        if self.kept(width) == width:
            return chosen.new_empty(0, dtype=torch.uint8)
        if not self._as_flags(rows, width):
            return written(chosen.to(self._index_type(width)), None)
        flags = chosen.new_zeros(rows, width, dtype=torch.uint8)
        return codec_ops.pack_bits(flags.scatter_(1, chosen.long(), 1).view(-1), 1)

    def _read(self, head: Tensor, rows: int, width: int) -> Tensor:
        count = self.kept(width)
        if count == width:
            return torch.arange(width, device=head.device).expand(rows, -1).int()
        if not self._as_flags(rows, width):
            return read(head, rows, count, self._index_type(width)).int()
        flags = codec_ops.unpack_bits(head, 1, rows * width).view(rows, width)
        return flags.nonzero()[:, 1].view(rows, count).int()

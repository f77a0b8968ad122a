"""Codec: how rows of floating-point numbers are written on the wire.

[Note: one message] What a rank sends to one peer in one exchange is a message: bytes of
numbers and of what describes them, side by side. Its length is known on both ends from
the number of rows, or, where it depends on values (`sized` is False), is sent ahead in
`HEADER` bytes. `parcel.py` puts the messages for all peers into one tensor.

[Note: gradients] Where what arrives is a linear map C of the rows, gradients go back
through its transpose. Every linear codec is symmetric, so the same codec with the same
key does both: what arrives of a gradient g is C^T g. Codecs that round are passed
straight through, and write the gradient as rows of its own.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_distcomm.kernels import codec_ops

HEADER = 8  # bytes of a size that is sent ahead


@dataclass(frozen=True, eq=False)
class RngKey:
    """Where the randomness of a message comes from; both ends have the same.

    Args:
        key: of what both ends choose alike: columns. A gradient has the key of the rows
            it answers. In [0, 2^63), as `random.fold` makes them.
        gid: the global id of each row `[m]`.
        noise: the key of rounding, which only the sender needs: it should differ between
            directions and, where sums are sent, between senders. The default is `key`.
    """

    key: int
    gid: Tensor
    noise: int | None = None

    def part(self, begin: int, end: int) -> RngKey:
        """Returns the draw of rows begin .. end-1."""
        return RngKey(self.key, self.gid[begin:end], self.noise)

    @property
    def rounding(self) -> tuple[int, Tensor]:
        """The key and ids that rounding is drawn from."""
        return self.key if self.noise is None else self.noise, self.gid


@dataclass(eq=False)
class CodecState:
    """What both ends remember of the rows of a link: the last values decoded, `[m, f]`."""

    last: Tensor

    def part(self, begin: int, end: int) -> CodecState:
        """Returns the state of rows begin .. end-1, in the same memory."""
        return CodecState(self.last[begin:end])

    def reset(self) -> None:
        """Forgets the values: both ends must, between the same two messages."""
        self.last.zero_()


class Codec(abc.ABC):
    """Writes rows as bytes and reads them again.

    A codec is a value: what changes from message to message is given with each call.
    Rows are `[m, f]` of a floating-point type; for what rounds, computed in float32 or
    float64. Every method is a plain function of tensors, without autograd, and leaves
    torch's generators as they are.
    """

    @property
    def linear(self) -> bool:
        """Whether decode(encode(.)) is a linear function of the rows."""
        return False

    @property
    def unbiased(self) -> bool:
        """Whether its mean over draws is the row."""
        return False

    @property
    def stateful(self) -> bool:
        """Whether both ends keep a `CodecState`."""
        return False

    @property
    def sized(self) -> bool:
        """Whether `wire_bytes` is exact; otherwise it is a bound, and a header goes ahead."""
        return True

    @property
    def keyed(self) -> bool:
        """Whether it needs a `RngKey`."""
        return False

    @property
    def zero_fills(self) -> bool:
        """Whether numbers that it leaves out arrive as zeros, whatever they are.

        A gradient must then be masked as the rows it answers were.
        """
        return False

    @property
    def inside(self) -> tuple[Codec, ...]:
        """The codecs that it hands numbers to, or asks first; see `nested`."""
        return ()

    @abc.abstractmethod
    def wire_bytes(
        self, rows: int, width: int, dtype: torch.dtype = torch.float32
    ) -> int:
        """Returns the bytes of a message; the most there can be if not `sized`."""

    @abc.abstractmethod
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
        """Writes rows as one message.

        Args:
            x: rows `[n, f]`.
            draw: where randomness comes from, for codecs that are `keyed`.
            index: which rows of x are sent `[m]`; all of them without it.
            out: bytes to write into; the message is how it begins.
            state: for codecs that are `stateful`.
            where: which layer this is, for errors.

        Raises:
            ValueError: for rows that cannot be written; nothing has changed then.
        """

    @abc.abstractmethod
    def decode(
        self,
        message: Tensor,
        out: Tensor,
        draw: RngKey | None = None,
        *,
        state: CodecState | None = None,
    ) -> Tensor:
        """Reads a message into `out` `[m, f]`, and returns it."""

    def adjoint(self, g: Tensor, draw: RngKey | None = None) -> Tensor:
        """Returns C^T g `[m, f]`, what a gradient becomes; see [Note: gradients].

        C is the linear part of decode(encode(.)) for this draw, the identity in codecs
        that round. For gradients that travel by another codec than the rows did.
        """
        return g

    def with_rate(self, rate: float) -> Codec:
        """Returns the same codec at another compression ratio, a schedule's.

        Raises:
            ValueError: if it has none.
        """
        raise ValueError(
            f"{self!r} has no rate to schedule; one that has is ColumnMask(rate)"
        )


class ColumnReducer(Codec):
    """A codec that makes rows narrower, and leaves their numbers for another to write."""

    @abc.abstractmethod
    def narrowed(self, width: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """Returns the width and the type of narrow rows."""

    @abc.abstractmethod
    def narrow(self, x: Tensor, draw: RngKey | None, index: Tensor | None) -> Tensor:
        """Returns the narrow rows `[m, k]`."""

    @abc.abstractmethod
    def widen(self, y: Tensor, out: Tensor, draw: RngKey | None) -> Tensor:
        """Puts narrow rows into `out` `[m, f]`."""

    def wire_bytes(
        self, rows: int, width: int, dtype: torch.dtype = torch.float32
    ) -> int:
        """Returns the bytes of narrow rows as they are."""
        count, kind = self.narrowed(width, dtype)
        return rows * count * kind.itemsize

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
        """Writes the bytes of narrow rows."""
        return written(self.narrow(x, draw, index), out)

    def decode(
        self,
        message: Tensor,
        out: Tensor,
        draw: RngKey | None = None,
        *,
        state: CodecState | None = None,
    ) -> Tensor:
        """Reads narrow rows."""
        shape = self.narrowed(out.size(1), out.dtype)
        return self.widen(read(message, len(out), *shape), out, draw)


def nested(codec: Codec) -> Iterator[Codec]:
    """Yields a codec and all that it is made of, however deep."""
    yield codec
    for one in codec.inside:
        yield from nested(one)


def drawn(codec: Codec, draw: RngKey | None, rows: int) -> RngKey:
    """Returns a draw that fits.

    Raises:
        ValueError: if there is none, or one of other rows.
    """
    if draw is None:
        raise ValueError(
            f"{codec!r} draws at random: give draw=Draw(key, gid), the same on both ends"
        )
    if len(draw.gid) != rows:
        raise ValueError(
            f"a draw names the rows of its message: got {len(draw.gid)} ids for {rows} rows"
        )
    return draw


def count_of(x: Tensor, index: Tensor | None) -> int:
    """Returns how many rows are meant."""
    return len(x) if index is None else len(index)


def room(size: int, like: Tensor, out: Tensor | None) -> Tensor:
    """Returns `size` bytes to write a message in: how `out` begins, if it is given."""
    if out is None:
        return torch.empty(size, dtype=torch.uint8, device=like.device)
    if out.dtype != torch.uint8 or out.dim() != 1 or len(out) < size:
        raise ValueError(
            f"out must be a vector of {size} bytes or more, got {list(out.shape)} of "
            f"{out.dtype}"
        )
    return out[:size]


def written(y: Tensor, out: Tensor | None) -> Tensor:
    """Returns the bytes of a matrix as they are in memory, in `out` if it is given."""
    flat = y.contiguous().view(-1).view(torch.uint8)
    return flat if out is None else room(len(flat), y, out).copy_(flat)


def read(message: Tensor, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Returns the matrix whose bytes are given, in their memory where that can be.

    Raises:
        ValueError: if there are more or fewer.
    """
    wanted = rows * width * dtype.itemsize
    if len(message) != wanted:
        raise ValueError(codec_ops.wrong_length(len(message), wanted))
    if message.storage_offset() % dtype.itemsize or not message.is_contiguous():
        message = message.clone(memory_format=torch.contiguous_format)
    return message.view(dtype).view(rows, width)

"""Defines Codec, which encodes rows as bytes, and Quantise, which writes few bits a number.

[Note: one message] The bytes that one rank sends to one peer in one exchange are a message.
Both ends know its length from the number of rows. `exchange.Packing` puts the messages for
all peers side by side in one tensor.

[Note: gradients] Where decode(encode(.)) is a linear map C of the rows, gradients go back
through its transpose. Every linear codec is symmetric, so the same codec with the same
key does both: a gradient g arrives as C^T g. Codecs that round pass gradients straight
through, and write them as any other rows.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TypeAlias, final

import torch
from torch import Tensor

from pyg_distcomm import kernels
from pyg_distcomm.comm.ledger import label
from pyg_distcomm.kernels import codec_ops
from pyg_distcomm.process import PROCESS

__all__ = [
    "Codec",
    "CodingContext",
    "ColumnReducer",
    "Quantise",
    "RngKey",
    "room",
    "share_of",
    "unpack",
]

Index: TypeAlias = Tensor | None
# writes rows, with the key of their noise, to bytes; returns the first that it cannot, or -1
Writer: TypeAlias = Callable[[Tensor, int, Tensor], int]
LEVELS = (1, 2, 4, 8)  # bits a number
ROUNDINGS = ("nearest", "stochastic")


@dataclass(frozen=True, eq=False)
class RngKey:
    """Holds the key of a message's randomness, which is the same on both ends.

    Args:
        key: the key of choices that both ends make, such as columns, in [0, 2^63), as
            `random.fold` returns it. A gradient has the key of the rows it answers.
        gid: the global id of each row `[m]`.
        noise: the key of rounding, which only the sender needs; it should differ between
            directions and, where sums are sent, between senders. The default is `key`.
        degree: the in-degree of each row's node `[m]`, for codecs that are `ranked`.
    """

    key: int
    gid: Tensor
    noise: int | None = None
    degree: Tensor | None = None

    def part(self, begin: int, end: int) -> RngKey:
        """Returns the key of rows begin .. end-1."""
        return self.at(slice(begin, end))

    def at(self, index: Tensor | slice) -> RngKey:
        """Returns the key of the rows at `index`."""
        degree = None if self.degree is None else self.degree[index]
        return RngKey(self.key, self.gid[index], self.noise, degree)

    @property
    def rounding(self) -> tuple[int, Tensor]:
        """The key and the ids that stochastic rounding draws from."""
        return self.key if self.noise is None else self.noise, self.gid


@dataclass(frozen=True, eq=False)
class CodingContext:
    """Passes the checked arguments of `encode` and `decode` to `_write` and `_read`.

    Args:
        codec: the codec.
        rows: the number of rows of the message, m.
        draw: the key of its randomness, or None.
        where: the name of the layer in errors.
        writer: what `Codec.writer` returned for these places, if anything.
    """

    codec: Codec
    rows: int
    draw: RngKey | None
    where: str = ""
    writer: Writer | None = None

    @property
    def key(self) -> RngKey:
        """The key of a codec that is `keyed`."""
        return checked_key(self.codec, self.draw, self.rows)

    def error(self, x: Tensor, index: Index, bad: int) -> ValueError:
        """Returns the error for a row that holds a number that cannot be sent."""
        row = x[bad if index is None else int(index[bad])]
        worst = row[~row.isfinite()][:1].tolist() or [float(row.abs().max())]
        return self._error_for(f"row {bad} of a message holds {worst[0]:g}, which")

    def _error_for(self, what: str) -> ValueError:
        """Returns an error whose sentence begins with `what`."""
        place = f"{self.where}: " if self.where else ""
        return ValueError(
            f"{place}{what} {self.codec!r} cannot write; the numbers diverged before they "
            "were sent: check the layer below, lower the learning rate, or send them "
            "unchanged with Plain()"
        )

    def refuse(self, x: Tensor, index: Index, bad: int | Tensor) -> None:
        """Raises the error for the first row that cannot be written, if there is one.

        Args:
            x, index: the rows.
            bad: its position in the message, or -1; a tensor on CUDA, for which the host does
                not wait: then a later message of this process raises.
        """
        raise_deferred()
        if not isinstance(bad, Tensor):
            if bad >= 0:
                raise self.error(x, index, bad)
        elif not (
            torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        ):
            flag = bad.to("cpu", non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(bad.device))
            PROCESS.refused.append((event, flag, replace(self, draw=None)))


def raise_deferred() -> None:
    """Raises for an earlier row that a device has since found not finite."""
    for _ in range(len(PROCESS.refused)):
        try:
            event, flag, context = first = PROCESS.refused.popleft()
        except IndexError:  # another thread took it
            return
        if not event.query():
            return PROCESS.refused.appendleft(first)
        if int(flag) >= 0:
            PROCESS.refused.clear()
            row = f"row {int(flag)} of a message before this one"
            raise context._error_for(f"{row} is not finite, which")


class Codec(abc.ABC):
    """Writes rows as bytes and reads them again.

    A codec is an immutable value: everything that changes between messages is an argument.
    Rows are `[m, f]` of a floating-point type; codecs that round compute in float32 or
    float64. Every method is a plain function of tensors, without autograd, and leaves
    torch's generators unchanged.

    To define a codec, write a frozen dataclass, so that ranks can compare its arguments by
    its repr; implement `wire_bytes`, `_write` and `_read`, and set the properties that hold:

        @dataclass(frozen=True)
        class Float8(Codec):
            def wire_bytes(self, rows, width, dtype=torch.float32):
                return rows * width

            def _write(self, x, index, out, context):
                chosen = x if index is None else x[index]
                return bytes_of(chosen.to(torch.float8_e5m2), out)

            def _read(self, message, out, context):
                return out.copy_(matrix_of(message, *out.shape, torch.float8_e5m2))

    `bytes_of` and `matrix_of` convert matrices to bytes and back. A random codec sets
    `keyed = True`, and draws from the key alone: choices of both ends from
    `context.key.key`, roundings by `random.keyed_uniform(*context.key.rounding, chosen)`.
    It rejects rows that it cannot write by `context.refuse(x, index, bad)`.
    """

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__qualname__}({shown})"

    @property
    def linear(self) -> bool:
        """Whether decode(encode(.)) is a linear function of the rows."""
        return False

    @property
    def unbiased(self) -> bool:
        """Whether the mean over keys is the row."""
        return False

    @property
    def keyed(self) -> bool:
        """Whether it needs a `RngKey`."""
        return any(one.keyed for one in self.inside)

    @property
    def ranked(self) -> bool:
        """Whether its `RngKey` must have the in-degrees of rows."""
        return any(one.ranked for one in self.inside)

    @property
    def by_row(self) -> bool:
        """Whether the bytes of a row do not depend on the other rows of the message."""
        return all(one.by_row for one in self.inside)

    @property
    def zero_fills(self) -> bool:
        """Whether omitted numbers arrive as zeros; gradients are then masked alike."""
        return False

    @property
    def inside(self) -> tuple[Codec, ...]:
        """The codecs that write numbers for this one; see `nested`."""
        return ()

    @abc.abstractmethod
    def wire_bytes(
        self, rows: int, width: int, dtype: torch.dtype = torch.float32
    ) -> int:
        """Returns the bytes of a message, whatever its values."""

    @final
    def encode(
        self,
        x: Tensor,
        draw: RngKey | None = None,
        *,
        index: Index = None,
        out: Tensor | None = None,
        where: str = "",
        writer: Writer | None = None,
    ) -> Tensor:
        """Writes rows as one message.

        Args:
            x: rows `[n, f]`.
            draw: the key of randomness, for codecs that are `keyed`.
            index: the rows of x to send `[m]`; all of them by default.
            out: bytes to write into; the message is their beginning.
            where: the name of the layer in errors.
            writer: what `writer` returned for these places; `out` then has their bytes.

        Raises:
            ValueError: for rows that cannot be written; nothing has changed then.
        """
        rows = len(x) if index is None else len(index)
        context = self._context(rows, draw, where, writer)
        with label(f"encode {type(self).__name__}"):
            return self._write(x, index, out, context)

    @final
    def decode(
        self, message: Tensor, out: Tensor, draw: RngKey | None = None
    ) -> Tensor:
        """Reads a message into `out` `[m, f]`, and returns it."""
        context = self._context(len(out), draw)
        with label(f"decode {type(self).__name__}"):
            return self._read(message, out, context)

    @abc.abstractmethod
    def _write(
        self, x: Tensor, index: Index, out: Tensor | None, context: CodingContext
    ) -> Tensor:
        """Returns the message of the rows `x[index]`, at the beginning of `out` if given."""

    @abc.abstractmethod
    def _read(self, message: Tensor, out: Tensor, context: CodingContext) -> Tensor:
        """Reads a message into `out`, and returns it."""

    def writer(self, x: Tensor, index: Index, gid: Tensor) -> Writer | None:
        """Returns what writes rows like `x[index]` epoch by epoch; None if `_write` does."""
        return None

    def _context(
        self,
        rows: int,
        draw: RngKey | None,
        where: str = "",
        writer: Writer | None = None,
    ) -> CodingContext:
        if self.keyed:
            degree = checked_key(self, draw, rows).degree
            if self.ranked and (degree is None or len(degree) != rows):
                raise ValueError(
                    f"{self!r} needs the in-degrees of {rows} rows: give them as "
                    "RngKey(key, gid, degree=degree), the same on both ends"
                )
        return CodingContext(self, rows, draw, where, writer)

    def with_rate(self, rate: float) -> Codec:
        """Returns the same codec at another compression ratio, set by a schedule.

        Raises:
            ValueError: if it has none.
        """
        raise ValueError(
            f"{self!r} has no rate to schedule; one that has is ColumnMask(rate)"
        )


class ColumnReducer(Codec):
    """Makes rows narrower, and leaves the encoding of their numbers to another codec."""

    @abc.abstractmethod
    def narrowed(self, width: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """Returns the width and the type of narrow rows."""

    @abc.abstractmethod
    def narrow(self, x: Tensor, draw: RngKey | None, index: Index) -> Tensor:
        """Returns the narrow rows `[m, k]`."""

    @abc.abstractmethod
    def widen(self, y: Tensor, out: Tensor, draw: RngKey | None) -> Tensor:
        """Writes narrow rows into `out` `[m, f]`."""

    def wire_bytes(
        self, rows: int, width: int, dtype: torch.dtype = torch.float32
    ) -> int:
        """Returns the bytes of the narrow rows."""
        count, kind = self.narrowed(width, dtype)
        return rows * count * kind.itemsize

    def _write(
        self, x: Tensor, index: Index, out: Tensor | None, context: CodingContext
    ) -> Tensor:
        return bytes_of(self.narrow(x, context.draw, index), out)

    def _read(self, message: Tensor, out: Tensor, context: CodingContext) -> Tensor:
        shape = self.narrowed(out.size(1), out.dtype)
        return self.widen(matrix_of(message, len(out), *shape), out, context.draw)


def nested(codec: Codec) -> Iterator[Codec]:
    """Yields a codec and, recursively, the codecs inside it."""
    yield codec
    for one in codec.inside:
        yield from nested(one)


def checked_key(codec: Codec, draw: RngKey | None, rows: int) -> RngKey:
    """Returns the key of a message of `rows` rows.

    Raises:
        ValueError: if it is None, or has another number of ids.
    """
    if draw is None:
        raise ValueError(
            f"{codec!r} draws at random: give draw=RngKey(key, gid), the same on both ends"
        )
    if len(draw.gid) != rows:
        raise ValueError(
            f"a key holds an id for each row: got {len(draw.gid)} ids for {rows} rows"
        )
    return draw


def check_rate(rate: float, name: str = "rate") -> None:
    """Raises a ValueError for a compression ratio below 1, or one that is not finite."""
    if not 1.0 <= rate < float("inf"):
        raise ValueError(f"a compression ratio is 1 or more, got {name}={rate!r}")


def share_of(count: int, rate: float) -> int:
    """Returns how many of `count` are sent at a rate: min(max(round(n / rate), 1), n)."""
    return min(max(round(count / rate), 1), count)


def room(size: int, like: Tensor, out: Tensor | None) -> Tensor:
    """Returns a buffer of `size` bytes for a message: the beginning of `out`, if given."""
    if out is None:
        return torch.empty(size, dtype=torch.uint8, device=like.device)
    if out.dtype != torch.uint8 or out.dim() != 1 or len(out) < size:
        raise ValueError(
            f"out must be a vector of {size} bytes or more, got {list(out.shape)} of "
            f"{out.dtype}"
        )
    return out[:size]


def bytes_of(y: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns the bytes of a matrix, copied to `out` if given."""
    flat = y.contiguous().view(-1).view(torch.uint8)
    return flat if out is None else room(len(flat), y, out).copy_(flat)


def matrix_of(message: Tensor, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Returns the matrix with these bytes, without a copy where they are aligned.

    Raises:
        ValueError: if there are more or fewer bytes.
    """
    wanted = rows * width * dtype.itemsize
    if len(message) != wanted:
        raise ValueError(codec_ops.wrong_length(len(message), wanted))
    if message.storage_offset() % dtype.itemsize or not message.is_contiguous():
        message = message.clone(memory_format=torch.contiguous_format)
    return message.view(dtype).view(rows, width)


def packed_bytes(
    codec: Codec, counts: Sequence[int], width: int, dtype: torch.dtype
) -> list[int]:
    """Returns the bytes of the message for each peer.

        bytes[q] = codec.wire_bytes(counts[q], width, dtype)

    No rows make no message.
    """
    return [codec.wire_bytes(count, width, dtype) if count else 0 for count in counts]


@dataclass(frozen=True)
class Load:
    """Describes the rows that one exchange receives from each peer, and how many it sends.

    Args:
        counts: rows from each rank of the axis.
        peers: how many other ranks it has.
        width, dtype: the shape of a row.
        sent: rows that are sent.
    """

    counts: tuple[int, ...]
    peers: int
    width: int
    dtype: torch.dtype
    sent: int

    def bytes(self, codec: Codec) -> int:
        """Returns the bytes received."""
        return sum(packed_bytes(codec, self.counts, self.width, self.dtype))


def unpack(
    codec: Codec,
    messages: Tensor,
    sizes: Sequence[int],
    counts: Sequence[int],
    out: Tensor,
    draw: RngKey | None = None,
) -> Tensor:
    """Reads the messages of all peers into `out` `[sum(counts), f]`, and returns it.

    Args:
        codec: the codec they were written with.
        messages: the messages side by side.
        sizes: their bytes: `packed_bytes`.
        counts: how many rows come from each peer.
        out: the operator's input, or a part of it.
        draw: the key of the rows, in the order they arrive.
    """
    cuts = zip(ranges(counts), ranges(sizes), strict=True)
    for (begin, end), (first, last) in cuts:
        if end > begin:
            codec.decode(
                messages[first:last],
                out[begin:end],
                None if draw is None else draw.part(begin, end),
            )
    return out


def ranges(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Returns where consecutive blocks of these lengths begin and end."""
    return list(pairwise([0, *accumulate(counts)]))


def rows_at(x: Tensor, index: Index) -> Tensor:
    """Returns the rows `x[index]`, of any type; all of them for None."""
    return x if index is None else kernels.gather_rows(x, index)


@dataclass(frozen=True)
class Quantise(Codec):
    """Sends each number as one of 2^b levels between the bounds of its row.

        z = min x rounded down,  D = (max x - z) / B rounded up,   B = 2^b - 1
        t = (x - z) / D,         x' = z + q D   (1/D is taken, and kept, by the sender)

        nearest     q = round(t)                            |x' - x| <= D/2
        stochastic  q = floor(t) + (u < t mod 1)            E x' = x, to 2^-17 D
                    Var x' = D^2 f (1 - f),  f = t mod 1    <= D^2/4

    plus half a unit of the type of x. z and D are bf16; codes are taken against the
    rounded pair, so every number lies between levels. Zeros and other constant rows
    arrive exactly.

    Price: b f / 8 + 4 bytes per row, and 4 more in float64 below 33 bits of codes; only a
    message as a whole is padded to bytes.
    Differs from the Low-bit Module of [Zhang23], its authors' code, in the row header: they
    send the reciprocal of D, which overflows for small rows, and round it after codes
    were taken. Their one bit is b = 1, stochastic; so is QSGD's rounding ([Alistarh17]
    Sec. 3.1), which has levels between 0 and the norm instead.

    Args:
        bits: 1, 2, 4 or 8.
        rounding: "nearest", or "stochastic", keyed by (key, row id, column).
        strict: refuses rows with a NaN, an infinity, or bounds beyond bf16's 3.3e38;
            otherwise these arrive as NaN throughout.
    """

    bits: int = 8
    rounding: str = "nearest"
    strict: bool = True

    def __post_init__(self) -> None:
        if self.bits not in LEVELS:
            raise ValueError(
                f"Quantise knows 1, 2, 4 and 8 bits, got bits={self.bits!r}"
            )
        if self.rounding not in ROUNDINGS:
            raise ValueError(
                f"rounding={self.rounding!r} is not known; choose 'nearest' or 'stochastic'"
            )

    @property
    def unbiased(self) -> bool:
        """Whether rounding is stochastic."""
        return self.keyed

    @property
    def keyed(self) -> bool:
        """Whether rounding is stochastic."""
        return self.rounding == "stochastic"

    def wire_bytes(
        self, rows: int, width: int, dtype: torch.dtype = torch.float32
    ) -> int:
        """Returns the bytes of a message, exactly."""
        size = dtype.itemsize
        return codec_ops.message_bytes(rows, width, self.bits, size) if width else 0

    def _write(
        self, x: Tensor, index: Index, out: Tensor | None, context: CodingContext
    ) -> Tensor:
        """Writes minimum and step of all rows, then their codes."""
        noise = context.key.rounding if self.keyed else None
        if context.writer is not None and out is not None:
            bad: int | Tensor = context.writer(x, noise[0] if noise else 0, out)
        else:
            out = room(self.wire_bytes(context.rows, x.size(1), x.dtype), x, out)
            if not len(out):
                return out
            bad = codec_ops.quantise(x, index, self.bits, noise, out)
        if self.strict:
            context.refuse(x, index, bad)
        return out

    def writer(self, x: Tensor, index: Index, gid: Tensor) -> Writer | None:
        """Returns a compiled loop for these places, on the CPU."""
        return kernels.quantiser(x, index, self.bits, gid if self.keyed else None)

    def _read(self, message: Tensor, out: Tensor, context: CodingContext) -> Tensor:
        return codec_ops.dequantise(message, self.bits, out) if out.size(1) else out

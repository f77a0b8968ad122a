"""Codecs: how rows of floating-point numbers are written on the wire.

A message is a matrix of bytes with one row for each row sent, so that it can be cut by
destination before anything is decoded. What a row holds is up to the codec alone.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

_META = 4  # bytes of a row's minimum and step, in bf16


class Codec(abc.ABC):
    """Writes rows as bytes and reads them again.

    linear    decode(encode(.)) is a linear function of the rows
    unbiased  its mean over the codec's own draws is the row
    """

    linear: ClassVar[bool]
    unbiased: ClassVar[bool]

    @abc.abstractmethod
    def row_bytes(self, width: int, dtype: torch.dtype) -> int:
        """Returns the bytes of one row of `width` numbers, exactly."""

    @abc.abstractmethod
    def encode(self, x: Tensor) -> Tensor:
        """Returns the message of `x` `[m, f]`: uint8 `[m, row_bytes(f, x.dtype)]`."""

    @abc.abstractmethod
    def decode(
        self, message: Tensor, width: int, dtype: torch.dtype, out: Tensor | None = None
    ) -> Tensor:
        """Returns the rows `[m, width]` of a message, written to `out` if given."""


@dataclass(frozen=True)
class Plain(Codec):
    """Sends the bytes of the numbers, whatever they are."""

    linear = unbiased = True

    def row_bytes(self, width: int, dtype: torch.dtype) -> int:
        """Returns the bytes of one row: those it has in memory."""
        return width * dtype.itemsize

    def encode(self, x: Tensor) -> Tensor:
        """Returns the bytes of `x`, without copying a contiguous one."""
        return _bytes_of(x.contiguous())

    def decode(
        self, message: Tensor, width: int, dtype: torch.dtype, out: Tensor | None = None
    ) -> Tensor:
        """Returns the rows that were sent, bit for bit."""
        out = _place(message, width, dtype, out)
        _bytes_of(out).copy_(message)
        return out


@dataclass(frozen=True)
class Cast(Codec):
    """Sends each number rounded to a narrower type.

    The relative error is at most 2^-8 for bfloat16, and 2^-11 for float16 from 6e-5 to
    65504; greater magnitudes arrive as infinities, smaller ones are off by up to 3e-8.

    Args:
        dtype: torch.float16 or torch.bfloat16.
    """

    dtype: torch.dtype

    linear = unbiased = False

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(
                f"Cast sends torch.float16 or torch.bfloat16, got {self.dtype}"
            )

    def row_bytes(self, width: int, dtype: torch.dtype) -> int:
        """Returns two bytes a number."""
        return 2 * width

    def encode(self, x: Tensor) -> Tensor:
        """Returns the rounded numbers."""
        return _bytes_of(x.to(self.dtype).contiguous())

    def decode(
        self, message: Tensor, width: int, dtype: torch.dtype, out: Tensor | None = None
    ) -> Tensor:
        """Returns the rounded numbers as `dtype`."""
        narrow = Plain().decode(message, width, self.dtype)
        return _place(message, width, dtype, out).copy_(narrow)


@dataclass(frozen=True)
class Quantise(Codec):
    """Sends each number as one of 2^bits levels between the bounds of its row.

        z = min x rounded down,  D = (max x - z) / B rounded up,   B = 2^bits - 1
        q = round((x - z) / D),  x' = z + q D

    z and D are bf16 and lead the row's bytes; codes are taken against the rounded pair,
    so |x' - x| <= D/2, and half a unit of the type of x beside. The step is not sent as a
    reciprocal, as in [Zhang23], which overflows for small rows.

    Where z rounded is the minimum itself the minimum is exact: so are rows of zeros, and
    constant rows of a value that bf16 holds. Another constant is off by at most 1.6e-5
    of itself. A row with a NaN, an infinity or a number below -3.3e38 arrives as NaN
    throughout.

    Args:
        bits: 8.
    """

    bits: int = 8

    linear = unbiased = False

    def __post_init__(self) -> None:
        if self.bits != 8:
            raise ValueError(f"Quantise knows 8 bits, got bits={self.bits!r}")

    def row_bytes(self, width: int, dtype: torch.dtype) -> int:
        """Returns a byte a number, and four for the row's minimum and step."""
        return width + _META

    def encode(self, x: Tensor) -> Tensor:
        """Returns the minimum and step of each row, then its codes."""
        shape = len(x), self.row_bytes(x.size(1), x.dtype)
        message = torch.empty(shape, dtype=torch.uint8, device=x.device)
        if x.numel() == 0:
            return message.zero_()
        x = x if x.dtype == torch.float64 else x.float()
        low, step = self._bounds(x)
        meta = torch.stack([low, step], 1)
        message[:, :_META] = _bytes_of(meta)
        low, step = (t.to(x.dtype).unsqueeze(1) for t in (low, step))
        # a step of zero is a constant row: its codes are zero, whatever 0 / 0 is
        codes = (x - low).div_(step).round_().nan_to_num_(0.0)
        message[:, _META:] = codes.clamp_(0, 2**self.bits - 1)
        return message

    def _bounds(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns z and D of each row, as bf16 `[m]`; NaN and zero if it has none."""
        low, high = (t.double() for t in torch.aminmax(x, dim=1))
        z = _rounded(low, up=False)
        step = _rounded((high - z.double()) / (2**self.bits - 1), up=True)
        bad = ~(z.isfinite() & step.isfinite() & high.isfinite())
        return z.masked_fill(bad, float("nan")), step.masked_fill(bad, 0.0)

    def decode(
        self, message: Tensor, width: int, dtype: torch.dtype, out: Tensor | None = None
    ) -> Tensor:
        """Returns z + q D for each code, computed in float32 or float64."""
        out = _place(message, width, dtype, out)
        if out.numel() == 0:
            return out
        # a clone, since a single row counts as contiguous whatever its stride
        meta = message[:, :_META].clone(memory_format=torch.contiguous_format)
        meta = meta.view(torch.bfloat16)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        low, step = meta.to(wide).unsqueeze(-1).unbind(1)
        return out.copy_(torch.addcmul(low, message[:, _META:].to(wide), step))


CODECS: Mapping[str, Codec] = MappingProxyType(
    {
        "fp16": Cast(torch.float16),
        "bf16": Cast(torch.bfloat16),
        "int8": Quantise(8),
    }
)


def codec_of(wire: str | Codec | None) -> Codec:
    """Returns the codec of a name; None is `Plain`.

    Raises:
        ValueError: for another name; it lists those there are.
    """
    if wire is None:
        return Plain()
    if isinstance(wire, Codec):
        return wire
    if wire not in CODECS:
        raise ValueError(
            f"wire={wire!r} is not known; choose one of {', '.join(CODECS)}, a Codec, or "
            "None to send rows as they are"
        )
    return CODECS[wire]


def _rounded(x: Tensor, up: bool) -> Tensor:
    """Rounds to bf16, never below (`up`) or never above."""
    near = x.to(torch.bfloat16)
    beyond = near.double() < x if up else near.double() > x
    end = torch.full_like(near, float("inf") if up else float("-inf"))
    return torch.where(beyond, torch.nextafter(near, end), near)


def _bytes_of(x: Tensor) -> Tensor:
    """Returns a contiguous `[m, f]` as its bytes, uint8 `[m, f * itemsize]`."""
    return x.view(torch.uint8)


def _place(
    message: Tensor, width: int, dtype: torch.dtype, out: Tensor | None
) -> Tensor:
    if out is None:
        return torch.empty(len(message), width, dtype=dtype, device=message.device)
    return out

"""Writes numbers unchanged, in a narrower type, or in a few bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_distcomm import kernels
from pyg_distcomm.halo.codec import (
    Codec,
    CodingContext,
    ColumnReducer,
    Index,
    RngKey,
    room,
)
from pyg_distcomm.kernels import codec_ops
from pyg_distcomm.kernels.registry import HALVES

ROUNDINGS = ("nearest", "stochastic")


@dataclass(frozen=True)
class Plain(ColumnReducer):
    """Sends the bytes of the numbers, whatever they are.

    Price: f numbers a row.
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

    Price: 2 f bytes a row.

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

    Price: b f / 8 + 4 bytes a row, and 4 more in float64 below 33 bits of codes; only a
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
        if self.bits not in (1, 2, 4, 8):
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
        out = room(self.wire_bytes(context.rows, x.size(1), x.dtype), x, out)
        if not len(out):
            return out
        bad = codec_ops.quantise(x, index, self.bits, noise, out)
        if self.strict:
            context.refuse(x, index, bad)
        return out

    def _read(self, message: Tensor, out: Tensor, context: CodingContext) -> Tensor:
        return codec_ops.dequantise(message, self.bits, out) if out.size(1) else out


def rows_at(x: Tensor, index: Index) -> Tensor:
    """Returns the rows `x[index]`, of any type; all of them for None."""
    return x if index is None else kernels.gather_rows(x, index)

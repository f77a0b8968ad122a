"""Quantise: a few bits a number, between the bounds of each row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_distcomm.halo.codec import Codec, CodecState, RngKey, count_of, drawn, room
from pyg_distcomm.kernels import codec_ops

ROUNDINGS = ("nearest", "stochastic")


@dataclass(frozen=True)
class Quantise(Codec):
    """Sends each number as one of 2^b levels between the bounds of its row.

        z = min x rounded down,  D = (max x - z) / B rounded up,   B = 2^b - 1
        t = (x - z) / D,         x' = z + q D   (1/D is taken, and kept, by the sender)

        nearest     q = round(t)                            |x' - x| <= D/2
        stochastic  q = floor(t) + (u < t mod 1)            E x' = x, to 2^-17 D
                    Var x' = D^2 f (1 - f),  f = t mod 1    <= D^2/4

    and half a unit of the type of x beside. z and D are bf16; codes are taken against the
    rounded pair, so every number lies between levels. Zeros and other rows of one number
    arrive exactly.

    Price: b f / 8 + 4 bytes a row, and 4 more in float64 below 33 bits of codes; only a
    message as a whole is filled up to bytes.
    Differs from the Low-bit Module of [Zhang23], its authors' code, in what leads a row: they
    send the reciprocal of D, which overflows for small rows, and round it after codes
    were taken. Their one bit is b = 1, stochastic; so is QSGD's rounding ([Alistarh17]
    Sec. 3.1), which has levels between 0 and the norm instead.

    Args:
        bits: 1, 2, 4 or 8.
        rounding: "nearest", or "stochastic", keyed by (draw, row id, column).
        strict: refuses rows with a NaN, an infinity, or bounds beyond bf16's 3.3e38;
            without it these arrive as NaN throughout.
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
        """Stochastic rounding is."""
        return self.keyed

    @property
    def keyed(self) -> bool:
        """Stochastic rounding is."""
        return self.rounding == "stochastic"

    def wire_bytes(
        self, rows: int, width: int, dtype: torch.dtype = torch.float32
    ) -> int:
        """Returns the bytes of a message, exactly."""
        size = dtype.itemsize
        return codec_ops.message_bytes(rows, width, self.bits, size) if width else 0

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
        """Writes minimum and step of all rows, then their codes."""
        rows = count_of(x, index)
        noise = drawn(self, draw, rows).rounding if self.keyed else None
        out = room(self.wire_bytes(rows, x.size(1), x.dtype), x, out)
        if not len(out):
            return out
        bad = codec_ops.quantise(x, index, self.bits, noise, out)
        if bad >= 0 and self.strict:
            raise ValueError(refusal(self, x, index, bad, where))
        return out

    def decode(
        self,
        message: Tensor,
        out: Tensor,
        draw: RngKey | None = None,
        *,
        state: CodecState | None = None,
    ) -> Tensor:
        """Reads z + q D for each code."""
        return codec_ops.dequantise(message, self.bits, out) if out.size(1) else out


def refusal(codec: Codec, x: Tensor, index: Tensor | None, bad: int, where: str) -> str:
    """Returns what to say of a row that holds no number that can be sent."""
    row = x[bad if index is None else int(index[bad])]
    worst = row[~row.isfinite()][:1].tolist() or [float(row.abs().max())]
    place = f"{where}: " if where else ""
    return (
        f"{place}row {bad} of a message holds {worst[0]:g}, which {codec!r} cannot write; "
        "the numbers diverged before they were sent: look at the layer below, lower the "
        "learning rate, or send them as they are with Plain()"
    )

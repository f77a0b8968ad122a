"""Residual: what changed since the last message, with a state that both ends share."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyg_distcomm.halo.codec import Codec, CodecState, RngKey, count_of, nested
from pyg_distcomm.halo.codecs.mask import ColumnMask
from pyg_distcomm.halo.codecs.plain import Cast, rows_at
from pyg_distcomm.halo.codecs.quantise import Quantise, refusal
from pyg_distcomm.halo.codecs.rows import RowSample
from pyg_distcomm.kernels import codec_ops

ONE_BIT_GAIN = 0.125


@dataclass(frozen=True)
class Residual(Codec):
    """Sends rows less the value that was decoded last, on both ends alike.

        s_0 = 0,   s_t = s_(t-1) + gain C(x_t - s_(t-1)),   x' = s_t

    with C the inner codec. As rows settle s goes to them, if C is off by less than what
    it is given: |r - gain C(r)| < |r|. With an unbiased C of variance w |r|^2 a gain of
    1 / (1 + w) makes that w / (1 + w) of |r|^2 in the mean. One bit has w of about 6 on
    normal rows of 128 and would diverge at gain 1; a mask that is not scaled has 1 - k/f
    and sends later what it left out.

    A difference beyond the range of a `Cast` inside is cut off at it, and the rest sent
    later; an infinity would stay in the state.

    Both ends must decode the same messages in the same order: a message that is skipped
    or repeated sets them apart for good, so both `reset()` when the timing changes.

    Price: that of the inner codec; memory: one more copy of the rows on each end.

    Args:
        inner: how the difference is written.
        gain: how much of it is believed; None is 1, or 1/8 where numbers have one bit.
    """

    inner: Codec
    gain: float | None = None

    def __post_init__(self) -> None:
        if self.inner.stateful:
            raise ValueError(f"a residual of a residual has no use, got {self.inner!r}")
        if self.gain is not None and not 0.0 < self.gain <= 1.0:
            raise ValueError(f"gain lies in (0, 1], got {self.gain!r}")
        scaling = (ColumnMask, RowSample)
        if any(isinstance(c, scaling) and c.scaled for c in nested(self.inner)):
            raise ValueError(
                f"{self.inner!r} scales up what it sends, so that differences grow instead "
                "of falling; use scaled=False, which sends later what it left out"
            )

    @property
    def factor(self) -> float:
        """How much of a difference is believed."""
        if self.gain is not None:
            return self.gain
        every = nested(self.inner)
        coarse = any(isinstance(c, Quantise) and c.bits == 1 for c in every)
        return ONE_BIT_GAIN if coarse else 1.0

    @property
    def unbiased(self) -> bool:
        """If the inner codec is, and is believed whole."""
        return self.inner.unbiased and self.factor == 1.0

    @property
    def stateful(self) -> bool:
        """It is."""
        return True

    @property
    def sized(self) -> bool:
        """As the inner codec."""
        return self.inner.sized

    @property
    def keyed(self) -> bool:
        """As the inner codec."""
        return self.inner.keyed

    @property
    def inside(self) -> tuple[Codec, ...]:
        """The inner codec."""
        return (self.inner,)

    def with_rate(self, rate: float) -> Residual:
        """Returns it with its inner codec at another rate."""
        return replace(self, inner=self.inner.with_rate(rate))

    def wire_bytes(
        self, rows: int, width: int, dtype: torch.dtype = torch.float32
    ) -> int:
        """Returns the bytes of the inner codec's message."""
        return self.inner.wire_bytes(rows, width, dtype)

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
        """Writes the difference, and updates the state as the other end will."""
        last = _fitting(self, state, count_of(x, index), x.size(1))
        bad = codec_ops.first_nonfinite(x, index)
        if bad >= 0:  # it would stay in the state for good
            raise ValueError(refusal(self, x, index, bad, where))
        difference = rows_at(x, index) - last
        for one in nested(self.inner):
            if isinstance(one, Cast):
                kinds = one.dtype, difference.dtype
                most = min(torch.finfo(kind).max for kind in kinds)
                difference.clamp_(-most, most)
        message = self.inner.encode(difference, draw, out=out, where=where)
        self._update(message, last, difference, draw)
        return message

    def decode(
        self,
        message: Tensor,
        out: Tensor,
        draw: RngKey | None = None,
        *,
        state: CodecState | None = None,
    ) -> Tensor:
        """Adds the difference to the state, and copies that to `out`."""
        last = _fitting(self, state, len(out), out.size(1))
        self._update(message, last, out, draw)
        return out.copy_(last)

    def _update(
        self, message: Tensor, last: Tensor, room: Tensor, draw: RngKey | None
    ) -> None:
        last.add_(self.inner.decode(message, room, draw), alpha=self.factor)


def _fitting(codec: Codec, state: CodecState | None, rows: int, width: int) -> Tensor:
    if state is None:
        raise ValueError(
            f"{codec!r} needs the state of this link: keep one on each end, made by "
            "fresh_state(rows, width, dtype)"
        )
    if state.last.shape != (rows, width):
        raise ValueError(
            f"the state has rows of {list(state.last.shape)}, the message of "
            f"{[rows, width]}; a state belongs to one link of one width"
        )
    return state.last


def fresh_state(
    rows: int,
    width: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> CodecState:
    """Returns the state before the first message: zeros."""
    return CodecState(torch.zeros(rows, width, dtype=dtype, device=device))

"""Composes codecs: one after another, or on the change since the last message."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyg_distcomm.halo.codec import (
    Codec,
    CodingContext,
    ColumnReducer,
    Index,
    RngKey,
    nested,
)
from pyg_distcomm.halo.codecs.quantise import Cast, Quantise, rows_at
from pyg_distcomm.halo.codecs.sparse import ColumnMask, RowSample, TopK
from pyg_distcomm.kernels import codec_ops

ONE_BIT_GAIN = 0.125


@dataclass(frozen=True, init=False)
class Chain(Codec):
    """Applies codecs one after another, such as a column mask and then one bit.

        Chain(ColumnMask(4), Quantise(1, "stochastic"))    k/8 + 4 bytes a row
        Chain(Cast(torch.bfloat16), Bitmap())              f/8 + 2 bytes a nonzero

    Random numbers of its codecs are independent, so a chain of unbiased ones is unbiased;
    a scaled mask multiplies the variance of the codecs after it by the square of its scale.

    Price: that of the last codec, at the width and type the others leave.

    Args:
        codecs: all but the last are `Plain`, `Cast` or `ColumnMask`; the last is any that
            keeps no state.
    """

    stages: tuple[ColumnReducer, ...]
    last: Codec

    def __init__(self, *codecs: Codec) -> None:
        if not codecs:
            raise ValueError("Chain needs a codec")
        *stages, last = codecs
        for one in stages:
            if not isinstance(one, ColumnReducer):
                raise ValueError(
                    f"{one!r} leaves no numbers for another codec to write, so it comes "
                    "last in a Chain; before it come ColumnMask and Cast"
                )
        if last.stateful:
            raise ValueError(
                f"{last!r} remembers whole rows, so it goes around a chain, not into one: "
                "Residual(Chain(...))"
            )
        object.__setattr__(self, "stages", tuple(stages))
        object.__setattr__(self, "last", last)

    @property
    def linear(self) -> bool:
        """Whether all of its codecs are."""
        return all(one.linear for one in self.inside)

    @property
    def unbiased(self) -> bool:
        """Whether all of its codecs are."""
        return all(one.unbiased for one in self.inside)

    @property
    def zero_fills(self) -> bool:
        """Whether one of its codecs does."""
        return any(one.zero_fills for one in self.inside)

    @property
    def inside(self) -> tuple[Codec, ...]:
        """Its codecs, in order."""
        return (*self.stages, self.last)

    def with_rate(self, rate: float) -> Chain:
        """Returns the chain with its only codec that has a rate at another one."""
        kinds = ColumnMask, TopK, RowSample
        rated = [k for k, one in enumerate(self.inside) if isinstance(one, kinds)]
        if len(rated) != 1:
            raise ValueError(
                f"a schedule sets the rate of one codec, but {self!r} has {len(rated)}"
            )
        new = list(self.inside)
        new[rated[0]] = new[rated[0]].with_rate(rate)
        return Chain(*new)

    def wire_bytes(
        self, rows: int, width: int, dtype: torch.dtype = torch.float32
    ) -> int:
        """Returns the bytes of the last codec's message."""
        return self.last.wire_bytes(rows, *self._shapes(width, dtype)[-1])

    def _write(
        self, x: Tensor, index: Index, out: Tensor | None, context: CodingContext
    ) -> Tensor:
        draw = context.draw
        for stage in self.stages:
            x, index = stage.narrow(x, draw, index), None
        return self.last.encode(x, draw, index=index, out=out, where=context.where)

    def _read(self, message: Tensor, out: Tensor, context: CodingContext) -> Tensor:
        """Reads the last codec's message, and widens it stage by stage."""
        draw, shapes = context.draw, self._shapes(out.size(1), out.dtype)
        y = out if not self.stages else _empty(out, shapes[-1])
        self.last.decode(message, y, draw)
        for k in range(len(self.stages) - 1, -1, -1):
            wider = _empty(out, shapes[k]) if k else out
            y = self.stages[k].widen(y, wider, draw)
        return y

    def adjoint(self, g: Tensor, draw: RngKey | None = None) -> Tensor:
        """Returns the adjoint of the linear stages; those that round pass gradients."""

        def through(h: Tensor, stages: tuple[ColumnReducer, ...]) -> Tensor:
            if not stages:
                return self.last.adjoint(h, draw)
            first, *rest = stages
            if not first.zero_fills:
                return through(first.adjoint(h, draw), tuple(rest))
            inner = through(first.narrow(h, draw, None), tuple(rest))
            return first.widen(inner, torch.empty_like(h), draw)

        return through(g, self.stages)

    def _shapes(self, width: int, dtype: torch.dtype) -> list[tuple[int, torch.dtype]]:
        """Returns the width and type before the first stage and after each."""
        shapes = [(width, dtype)]
        for stage in self.stages:
            shapes.append(stage.narrowed(*shapes[-1]))
        return shapes

    def __repr__(self) -> str:
        return f"Chain({', '.join(map(repr, self.inside))})"


@dataclass(frozen=True)
class Residual(Codec):
    """Sends rows minus the value that both ends decoded last.

        s_0 = 0,   s_t = s_(t-1) + gain C(x_t - s_(t-1)),   x' = s_t

    with C the inner codec. As rows settle, s converges to them if the error of C is below
    its input: |r - gain C(r)| < |r|. With an unbiased C of variance w |r|^2 a gain of
    1 / (1 + w) makes that w / (1 + w) of |r|^2 in the mean. One bit has w of about 6 on
    normal rows of 128 and would diverge at gain 1; an unscaled mask has 1 - k/f and sends
    later the columns it left out.

    A difference beyond the range of a `Cast` inside is clamped to it, and the rest sent
    later; an infinity would stay in the state.

    Both ends must decode the same messages in the same order: a message that is skipped
    or repeated makes their states differ for good, so both `reset()` when the timing
    changes.

    Price: that of the inner codec; memory: one more copy of the rows on each end.

    Args:
        inner: the codec of the difference.
        gain: the factor of a difference; None is 1, or 1/8 where numbers have one bit.
    """

    stateful = True

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
        """The gain in use."""
        if self.gain is not None:
            return self.gain
        every = nested(self.inner)
        coarse = any(isinstance(c, Quantise) and c.bits == 1 for c in every)
        return ONE_BIT_GAIN if coarse else 1.0

    @property
    def unbiased(self) -> bool:
        """Whether the inner codec is, at gain 1."""
        return self.inner.unbiased and self.factor == 1.0

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

    def _write(
        self, x: Tensor, index: Index, out: Tensor | None, context: CodingContext
    ) -> Tensor:
        """Writes the difference, and updates the state as the other end will."""
        # what is not finite would stay in the state for good
        context.refuse(x, index, codec_ops.first_nonfinite(x, index))
        difference = rows_at(x, index) - context.last
        for one in nested(self.inner):
            if isinstance(one, Cast):
                kinds = one.dtype, difference.dtype
                most = min(torch.finfo(kind).max for kind in kinds)
                difference.clamp_(-most, most)
        message = self.inner.encode(
            difference, context.draw, out=out, where=context.where
        )
        self._update(message, difference, context)
        return message

    def _read(self, message: Tensor, out: Tensor, context: CodingContext) -> Tensor:
        """Adds the difference to the state, and copies that to `out`."""
        self._update(message, out, context)
        return out.copy_(context.last)

    def _update(self, message: Tensor, room: Tensor, context: CodingContext) -> None:
        difference = self.inner.decode(message, room, context.draw)
        context.last.add_(difference, alpha=self.factor)


def _empty(like: Tensor, shape: tuple[int, torch.dtype]) -> Tensor:
    width, dtype = shape
    return torch.empty(len(like), width, dtype=dtype, device=like.device)

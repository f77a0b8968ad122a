"""Composes codecs, one after another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_distcomm.halo.codec import (
    Codec,
    CodingContext,
    ColumnReducer,
    Index,
    RngKey,
)
from pyg_distcomm.halo.codecs.sparse import ColumnMask, RowSample


@dataclass(frozen=True, init=False)
class Chain(Codec):
    """Applies codecs one after another, such as a column mask and then one bit.

        Chain(ColumnMask(4), Quantise(1, "stochastic"))    k/8 + 4 bytes per row

    Random numbers of its codecs are independent, so a chain of unbiased ones is unbiased;
    a scaled mask multiplies the variance of the codecs after it by the square of its scale.

    Price: that of the last codec, at the width and type the others leave.

    Args:
        codecs: all but the last are `Plain`, `Cast` or `ColumnMask`; the last is any.
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
        kinds = ColumnMask, RowSample
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


def _empty(like: Tensor, shape: tuple[int, torch.dtype]) -> Tensor:
    width, dtype = shape
    return torch.empty(len(like), width, dtype=dtype, device=like.device)

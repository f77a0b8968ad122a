"""Chain: one codec after another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_distcomm.halo.codec import Codec, CodecState, ColumnReducer, RngKey
from pyg_distcomm.halo.codecs.mask import ColumnMask
from pyg_distcomm.halo.codecs.rows import RowSample
from pyg_distcomm.halo.codecs.sparse import TopK


@dataclass(frozen=True, init=False)
class Chain(Codec):
    """Writes what one codec leaves of the rows by the next: mask, then one bit.

        Chain(ColumnMask(4), Quantise(1, "stochastic"))    k/8 + 4 bytes a row
        Chain(Cast(torch.bfloat16), Bitmap())              f/8 + 2 bytes a nonzero

    Random numbers of its codecs are independent, so a chain of unbiased ones is unbiased;
    a scaled mask multiplies the variance of what follows by the square of its scale.

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
        """If all of them are."""
        return all(one.linear for one in self.inside)

    @property
    def unbiased(self) -> bool:
        """If all of them are."""
        return all(one.unbiased for one in self.inside)

    @property
    def sized(self) -> bool:
        """If the last one is."""
        return self.last.sized

    @property
    def keyed(self) -> bool:
        """If one of them is."""
        return any(one.keyed for one in self.inside)

    @property
    def zero_fills(self) -> bool:
        """If one of them is."""
        return any(one.zero_fills for one in self.inside)

    @property
    def inside(self) -> tuple[Codec, ...]:
        """All of them."""
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
        """Writes what the stages leave."""
        for stage in self.stages:
            x, index = stage.narrow(x, draw, index), None
        return self.last.encode(x, draw, index=index, out=out, where=where)

    def decode(
        self,
        message: Tensor,
        out: Tensor,
        draw: RngKey | None = None,
        *,
        state: CodecState | None = None,
    ) -> Tensor:
        """Reads the last codec's message, and widens it stage by stage."""
        if not self.stages:
            return self.last.decode(message, out, draw)
        shapes = self._shapes(out.size(1), out.dtype)
        width, dtype = shapes[-1]
        y = torch.empty(len(out), width, dtype=dtype, device=out.device)
        self.last.decode(message, y, draw)
        for stage, (width, dtype) in zip(
            self.stages[:0:-1], shapes[-2:0:-1], strict=True
        ):
            wider = torch.empty(len(out), width, dtype=dtype, device=out.device)
            y = stage.widen(y, wider, draw)
        return self.stages[0].widen(y, out, draw)

    def adjoint(self, g: Tensor, draw: RngKey | None = None) -> Tensor:
        """Returns what the linear stages make of a gradient; those that round pass it."""

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

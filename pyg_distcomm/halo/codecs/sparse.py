"""Sends some of the numbers, columns or rows that a key chooses, and chains codecs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from pyg_distcomm.comm import random
from pyg_distcomm.halo.codec import (
    Codec,
    CodingContext,
    ColumnReducer,
    Index,
    RngKey,
    check_rate,
    checked_key,
    rows_at,
    share_of,
)
from pyg_distcomm.halo.codecs.quantise import Plain
from pyg_distcomm.kernels import codec_ops

PICKS = ("prefix", "epoch")
_SALT = 0x5A  # rows are chosen by another hash than columns


@dataclass(frozen=True)
class ColumnMask(ColumnReducer):
    """Sends k of f columns of each row; the others arrive as zeros.

        x' = s x M,   M diagonal with k ones,   k = min(max(round(f / rate), 1), f)

    with s = f / k if `scaled`, else 1. A hash of the key chooses the columns, so no byte
    is spent on them. Over keys, with columns "epoch",

        s = 1      E x' = k/f x    E |x' - x|^2 = (1 - k/f) |x|^2
        s = f/k    E x' = x        E |x' - x|^2 = (f/k - 1) |x|^2

    so that beyond rate 2 the scaled mask has a greater error than sending nothing. Rate 1
    sends rows unchanged, bit for bit.

    Price: k numbers per row.
    Differs from the compression mechanism of [Cervino24] in keeping at least one column
    and in reseeding no generator. Their text speaks of random columns, their scripts send
    the first ones; both are here.

    Args:
        rate: the compression ratio c >= 1; a schedule may set another.
        pick: "prefix": the first k; "epoch": k at random, the same for all rows of a
            message.
        scaled: scales received numbers by f / k, which makes them unbiased.
    """

    linear = True  # for each key

    rate: float
    pick: str = "epoch"
    scaled: bool = False

    def __post_init__(self) -> None:
        check_rate(self.rate)
        if self.pick not in PICKS:
            raise ValueError(
                f"pick={self.pick!r} is not known; choose 'prefix' or 'epoch'"
            )

    @property
    def unbiased(self) -> bool:
        """Whether columns are random and scaled."""
        return self.scaled and self.keyed

    @property
    def keyed(self) -> bool:
        """Whether columns are random."""
        return self.pick != "prefix"

    @property
    def zero_fills(self) -> bool:
        """True beyond rate 1."""
        return self.rate > 1.0

    def with_rate(self, rate: float) -> ColumnMask:
        """Returns the same mask at another rate."""
        return replace(self, rate=rate)

    def kept(self, width: int) -> int:
        """Returns how many columns are sent."""
        return share_of(width, self.rate)

    def scale(self, width: int) -> float:
        """Returns the factor s."""
        return width / self.kept(width) if self.scaled and width else 1.0

    def narrowed(self, width: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """Returns the number of columns that are sent, and their type."""
        return self.kept(width), dtype

    def narrow(self, x: Tensor, draw: RngKey | None, index: Index) -> Tensor:
        """Returns the chosen columns, unscaled."""
        if self.kept(x.size(1)) == x.size(1):
            return rows_at(x, index)
        rows = len(x) if index is None else len(index)
        chosen = self._columns(draw, rows, x.size(1), x.device)
        return codec_ops.take_columns(x, index, chosen)

    def widen(self, y: Tensor, out: Tensor, draw: RngKey | None) -> Tensor:
        """Scales the columns into their places, with zeros elsewhere."""
        width = out.size(1)
        if self.kept(width) == width:
            return out.copy_(y)
        chosen = self._columns(draw, len(y), width, y.device)
        return codec_ops.put_columns(y.to(out.dtype), chosen, self.scale(width), out)

    def _columns(
        self, draw: RngKey | None, rows: int, width: int, device: torch.device
    ) -> Tensor:
        """Returns the columns that are sent, ascending `[k]`."""
        count = self.kept(width)
        if not self.keyed:
            return torch.arange(count, dtype=torch.int32, device=device)
        draw = checked_key(self, draw, rows)
        return codec_ops.keyed_columns(draw.key, width, count, device)


@dataclass(frozen=True)
class RowSample(Codec):
    """Sends k of the m rows of each message; the others arrive as zeros.

        x' = s M x,   M diagonal with k ones,   k = min(max(round(m / rate), 1), m)

    with s = m / k if `scaled`, else 1: unbiased, with E |x' - x|^2 = (m/k - 1) |x|^2. The
    k rows are those whose ids have the smallest hashes of the key, so both ends know them
    and no byte is spent on them. Rate 1 sends rows unchanged, bit for bit.

    Price: that of `values` for k rows.
    Differs from the boundary node sampling of [Wan22] Alg. 1 in that no list of the chosen
    rows travels.

    Args:
        rate: the compression ratio c >= 1, 1 / p in the paper; a schedule may set another.
        scaled: scales received rows by m / k, which makes them unbiased.
        values: the codec of the rows that travel.
    """

    keyed, by_row = True, False

    rate: float
    scaled: bool = True
    values: Codec = field(default_factory=Plain)

    def __post_init__(self) -> None:
        check_rate(self.rate)

    @property
    def linear(self) -> bool:
        """Whether its values are, for each key."""
        return self.values.linear

    @property
    def unbiased(self) -> bool:
        """Whether rows are scaled and their values unbiased."""
        return self.scaled and self.values.unbiased

    @property
    def zero_fills(self) -> bool:
        """True beyond rate 1."""
        return self.rate > 1.0 or self.values.zero_fills

    @property
    def inside(self) -> tuple[Codec, ...]:
        """The codec of its values."""
        return (self.values,)

    def with_rate(self, rate: float) -> RowSample:
        """Returns the same codec at another rate."""
        return replace(self, rate=rate)

    def kept(self, rows: int) -> int:
        """Returns how many rows of a message are sent."""
        return share_of(rows, self.rate)

    def wire_bytes(
        self, rows: int, width: int, dtype: torch.dtype = torch.float32
    ) -> int:
        """Returns the bytes of the values of k rows."""
        return self.values.wire_bytes(self.kept(rows), width, dtype)

    def _write(
        self, x: Tensor, index: Index, out: Tensor | None, context: CodingContext
    ) -> Tensor:
        """Writes the chosen rows, unscaled."""
        draw = context.key
        if self.kept(context.rows) < context.rows:
            chosen = self._chosen(draw)
            index = chosen if index is None else index[chosen]
            draw = draw.at(chosen)
        return self.values.encode(x, draw, index=index, out=out, where=context.where)

    def _read(self, message: Tensor, out: Tensor, context: CodingContext) -> Tensor:
        """Scales the rows into their places, with zeros elsewhere."""
        rows, draw, count = context.rows, context.key, self.kept(context.rows)
        if count == rows:
            return self.values.decode(message, out, draw)
        chosen = self._chosen(draw)
        few = out.new_empty(count, out.size(1))
        self.values.decode(message, few, draw.at(chosen))
        if self.scaled:
            few.mul_(rows / count)
        return out.zero_().index_copy_(0, chosen, few)

    def _chosen(self, draw: RngKey) -> Tensor:
        """Returns the places of the rows that are sent, ascending `[k]`."""
        bits = random.keyed_bits48(random.fold(draw.key, _SALT), draw.gid)
        order = torch.argsort(bits, stable=True)
        return order[: self.kept(len(order))].sort().values


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

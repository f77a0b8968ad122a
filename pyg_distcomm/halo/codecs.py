"""Writes rows on the wire: plain, rounded, masked, sparse, and compositions of these."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType

import torch
from torch import Tensor

from pyg_distcomm import plugins
from pyg_distcomm.comm import random
from pyg_distcomm.halo.codec import (
    LEVELS,
    Codec,
    CodingContext,
    ColumnReducer,
    Index,
    RngKey,
    check_rate,
    checked_key,
    room,
    rows_at,
    share_of,
)
from pyg_distcomm.halo.codec import Quantise as Quantise
from pyg_distcomm.kernels import codec_ops
from pyg_distcomm.kernels.codec_ops import META, TAIL
from pyg_distcomm.kernels.registry import HALVES

__all__ = [
    "CODECS",
    "Cast",
    "Chain",
    "Codec",
    "ColumnMask",
    "DegreeBits",
    "Plain",
    "Quantise",
    "RangeBits",
    "RngKey",
    "RowSample",
    "codec_of",
    "known_codecs",
]


@dataclass(frozen=True)
class Plain(ColumnReducer):
    """Sends all numbers as they are, uncompressed.

    Price: f numbers per row.
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

    Price: 2 f bytes per row.

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
class _MixedBits(Codec):
    """Writes the rows of a message in groups, each as `Quantise` with its own bits.

    Rounding is stochastic, and keyed by (key, row id, column), whatever the group.
    """

    unbiased = keyed = True
    by_row = False

    @abc.abstractmethod
    def _grouped(
        self, context: CodingContext, x: Tensor | None, index: Index, message: Tensor
    ) -> tuple[Iterable[tuple[int, Tensor]], Tensor]:
        """Returns groups, as (bits, rows of the message), and where their codes are.

        Writes what else tells them, of rows that are sent; reads it for those that arrive.
        """

    def _write(
        self, x: Tensor, index: Index, out: Tensor | None, context: CodingContext
    ) -> Tensor:
        """Writes groups of rows, one after the other."""
        message = room(self.wire_bytes(context.rows, x.size(1), x.dtype), x, out)
        if not len(message):
            return message
        groups, codes = self._grouped(context, x, index, message)
        key, gid = context.key.rounding
        end, bad = 0, list[int | Tensor]()
        for bits, rows in groups:
            begin, end = end, end + self._message_bytes(len(rows), bits, x)
            chosen = rows if index is None else index[rows]
            noise = key, gid[rows]
            found = codec_ops.quantise(x, chosen, bits, noise, codes[begin:end])
            if isinstance(found, Tensor):
                row = rows.index_select(0, found.clamp(min=0).view(1))
                bad.append(row.masked_fill(found < 0, len(gid)))
            elif found >= 0:
                bad.append(int(rows[found]))
        codes[end:] = 0
        context.refuse(x, index, _first_unwritable(bad, len(gid)))
        return message

    def _read(self, message: Tensor, out: Tensor, context: CodingContext) -> Tensor:
        if not out.numel():
            return out
        groups, codes = self._grouped(context, None, None, message)
        end = 0
        for bits, rows in groups:
            begin, end = end, end + self._message_bytes(len(rows), bits, out)
            part = out.new_empty((len(rows), out.size(1)))
            out[rows] = codec_ops.dequantise(codes[begin:end], bits, part)
        return out

    @staticmethod
    def _message_bytes(rows: int, bits: int, x: Tensor) -> int:
        return codec_ops.message_bytes(rows, x.size(1), bits, x.element_size())


@dataclass(frozen=True)
class DegreeBits(_MixedBits):
    """Sends rows of nodes with many in-edges in more bits ([Zhang23]).

    The rows of a message, ascending by the in-degree of their node, are cut into as many
    groups as there are numbers of bits from `bits` to 8, of equal size but for rounding:

        group k of G has rows  floor(m k / G) .. floor(m (k + 1) / G) - 1
        and is written as `Quantise(bits 2^k, "stochastic")`

    Both ends know the degrees: they travel once, when a halo is first used, as planning
    does (8 bytes a ghost).

    Price: that of `Quantise` for each group: with `bits=1` 3.75 f / 8 + 4 bytes per row.
    Differs from [Zhang23], whose authors' code this follows, in that ties of the degree do
    not change the sizes of groups, so that bytes are known from the number of rows.

    Args:
        bits: bits of the lowest degrees: 1, 2, 4 or 8; an `adaptive` link changes it.
    """

    bits: int = 1
    ranked = True

    def __post_init__(self) -> None:
        if self.bits not in LEVELS:
            raise ValueError(
                f"DegreeBits begins at 1, 2, 4 or 8 bits, got bits={self.bits!r}"
            )

    def _group_sizes(self, rows: int) -> list[tuple[int, int]]:
        """Returns the bits and the number of rows of each group."""
        levels = [bits for bits in LEVELS if bits >= self.bits]
        ends = [rows * k // len(levels) for k in range(len(levels) + 1)]
        sizes = (end - begin for begin, end in pairwise(ends))
        return list(zip(levels, sizes, strict=True))

    def wire_bytes(
        self, rows: int, width: int, dtype: torch.dtype = torch.float32
    ) -> int:
        """Returns the bytes of a message, exactly."""
        if not width:
            return 0
        size = dtype.itemsize
        return sum(
            codec_ops.message_bytes(count, width, bits, size)
            for bits, count in self._group_sizes(rows)
        )

    def _grouped(
        self, context: CodingContext, x: Tensor | None, index: Index, message: Tensor
    ) -> tuple[Iterable[tuple[int, Tensor]], Tensor]:
        assert context.key.degree is not None
        levels, sizes = zip(*self._group_sizes(context.rows), strict=True)
        order = torch.argsort(context.key.degree, stable=True)
        return zip(levels, order.split(sizes), strict=True), message


@dataclass(frozen=True)
class RangeBits(_MixedBits):
    """Sends rows of a wide range in more bits, so that rounding errs least for the bytes.

    Of all ways to give the m rows of a message 1, 2, 4 or 8 bits a number, with at most
    `mean` m of them together, it takes the one with the least sum of squared steps

        sum_i (max x_i - min x_i)^2 / (2^b_i - 1)^2

    up to the last step that fits: bits are given in order of what the next ones gain each.
    The sum bounds the variance of stochastic rounding, f/4 times. The sender chooses for
    each message, and two bits a row tell the receiver.

    Price: ceil(m / 4) + 4 m + floor((f floor(mean m) + 28) / 8) bytes a message of m rows,
    and 4 m more in float64 below 33 numbers per row.
    Differs from [Wan23] in solving for the bits of each message, exactly and by sorting,
    and not of all messages every few epochs by an integer program; in 1 bit beside 2, 4
    and 8; and in a sum of errors for given bytes instead of a weighted sum of errors and
    seconds. Weights of edges do not count.

    Args:
        mean: bits a number, on average, from 1 to 8.
    """

    mean: float = 2.0

    def __post_init__(self) -> None:
        if not LEVELS[0] <= self.mean <= LEVELS[-1]:
            raise ValueError(f"mean lies between 1 and 8 bits, got mean={self.mean!r}")

    def wire_bytes(
        self, rows: int, width: int, dtype: torch.dtype = torch.float32
    ) -> int:
        """Returns the bytes of a message, exactly."""
        if not width or not rows:
            return 0
        tail = META * rows if dtype.itemsize == 8 and width < TAIL else 0
        codes = (width * int(self.mean * rows) + 7 * len(LEVELS)) // 8
        return -(-rows // 4) + META * rows + codes + tail

    def levels(self, x: Tensor) -> Tensor:
        """Returns which of 1, 2, 4 and 8 bits each row gets, as its place in them `[m]`."""
        low, high = (end.double() for end in torch.aminmax(x, dim=1))
        span = (high - low).nan_to_num(nan=torch.inf).clamp_max(1e150)
        steps = [1.0 / (2**bits - 1) ** 2 for bits in LEVELS]
        costs = [after - before for before, after in pairwise(LEVELS)]
        each = [
            (a - b) / cost for (a, b), cost in zip(pairwise(steps), costs, strict=True)
        ]
        gain = torch.cat([span.square() * gained for gained in each])
        order = torch.argsort(gain, descending=True, stable=True)
        cost = torch.cat([torch.full_like(low, step) for step in costs]).long()[order]
        spare = int(self.mean * len(x)) - LEVELS[0] * len(x)
        taken = (cost.cumsum(0) <= spare).long()  # asks for no value of a device
        level = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        return level.index_add_(0, order % max(len(x), 1), taken)

    def _grouped(
        self, context: CodingContext, x: Tensor | None, index: Index, message: Tensor
    ) -> tuple[Iterable[tuple[int, Tensor]], Tensor]:
        head = -(-context.rows // 4)
        if x is not None:
            level = self.levels(rows_at(x, index))
            message[:head] = codec_ops.pack_bits(level.to(torch.uint8), 2)
        else:
            level = codec_ops.unpack_bits(message[:head], 2, context.rows)
        each = torch.arange(len(LEVELS), device=level.device)
        counts = (level.unsqueeze(1) == each).sum(0).tolist()  # waits for a device
        order = torch.argsort(level, stable=True)
        return zip(LEVELS, order.split(counts), strict=True), message[head:]


def _first_unwritable(bad: list[int | Tensor], none: int) -> int | Tensor:
    """Returns the first row that could not be written, or -1."""
    late = [row for row in bad if isinstance(row, Tensor)]
    if late:
        row = torch.stack(late).amin()
        return row.masked_fill(row == none, -1)
    return min((row for row in bad if isinstance(row, int)), default=-1)


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


CODECS: Mapping[str, Codec] = MappingProxyType(
    {
        "fp16": Cast(torch.float16),
        "bf16": Cast(torch.bfloat16),
        "int8": Quantise(8, strict=False),
    }
)


def known_codecs() -> tuple[str, ...]:
    """Returns the names of all codecs, including those that other packages register."""
    more = plugins.registered(plugins.CODECS)
    return (*CODECS, *(name for name in more if name not in CODECS))


def codec_of(wire: str | Codec | None) -> Codec:
    """Returns the codec of a name; None is `Plain`.

    A name in the entry point group "pyg_distcomm.codecs" must refer to a Codec, or to a
    class or function that returns one when called without arguments.

    Raises:
        ValueError: for an unknown name, listing the known ones, and for a registered one
            that does not give a Codec.
    """
    if wire is None:
        return Plain()
    if isinstance(wire, Codec):
        return wire
    if wire in CODECS:
        return CODECS[wire]
    if wire not in known_codecs():
        raise ValueError(
            f"codec {wire!r} is not known; choose one of {', '.join(known_codecs())}, a "
            "Codec, or Plain() to send rows unchanged"
        )
    found = plugins.load(plugins.CODECS, wire)
    try:
        codec = found if isinstance(found, Codec) else found()
    except Exception as error:
        raise ValueError(
            f"the registered codec {wire!r} failed: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(codec, Codec):
        raise ValueError(
            f"the registered codec {wire!r} gave {codec!r}; wanted a Codec, or a function "
            "that returns one"
        )
    return codec

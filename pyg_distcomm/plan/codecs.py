"""Prices exchanges by a link: bytes, staleness, and buffers that are kept.

Bytes are exact for codecs whose sizes do not depend on values, pair of ranks by pair and
piece by piece, as `halo.packing` has them; for others the most there can be.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

from pyg_distcomm.graph.partitioning_kinds import links_of
from pyg_distcomm.halo.codec import HEADER, Codec
from pyg_distcomm.halo.codecs import codec_of, known_codecs
from pyg_distcomm.halo.codecs.quantise import Cast, Plain, Quantise
from pyg_distcomm.halo.codecs.sparse import Bitmap
from pyg_distcomm.halo.compressed import gradient_codec
from pyg_distcomm.halo.halo import DEGREES, MAX_CHUNKS, NAMES
from pyg_distcomm.halo.policy import LinkPolicy
from pyg_distcomm.partition.part_share import EdgeType
from pyg_distcomm.plan.traffic import Array, Side
from pyg_distcomm.plan.training import ProductShape

Asked: TypeAlias = str | Codec | LinkPolicy

_NAME = re.compile(r"(?P<codec>.*?)(,? +late(?: +by)?(?: +(?P<late>\d+))?)?")
_BITS = re.compile(r"([1248])[ -]?bits?")


@dataclass(frozen=True, eq=False)
class Coding:
    """A link, as it stands, and how its exchanges are written.

    Args:
        name: in tables.
        link: the link, to be given to `pdc.partition`.
        rows, gradients: how they are written.
    """

    name: str
    link: LinkPolicy
    rows: Codec
    gradients: Codec

    @staticmethod
    def of(asked: Asked) -> Coding:
        """Reads what was asked for: a name as "1 bit" or "bf16 late", a codec, or a link.

        Raises:
            ValueError, TypeError: for what is none, with what there is.
        """
        link = asked if isinstance(asked, LinkPolicy) else _link_of(asked)
        rows, own = link.codecs_at(link.epoch)
        name = asked if isinstance(asked, str) else _name_of(link, rows, own)
        return Coding(name, link, rows, gradient_codec(rows, rows, own))

    @property
    def sized(self) -> bool:
        """Whether bytes are exact; otherwise they are the most there can be.

        Those of exchanges that may be skipped are all of them, without the deciding.
        """
        fixed = self.rows.fixed_size and self.gradients.fixed_size
        return fixed and self.link.timing.skip is None

    @property
    def exact(self) -> bool:
        """Whether it changes no number: lossless, and now."""
        whole = all(isinstance(c, (Plain, Bitmap)) for c in (self.rows, self.gradients))
        return whole and not self.link.timing.is_late

    def codec_of(self, product: ProductShape, last: int | None) -> Codec | None:
        """Returns how a product's rows are written; None for the exact exchange.

        Args:
            product: one of an epoch, from the third on.
            last: the number of the last layer, whose exchanges are exact; None if products
                say so themselves.
        """
        if self.link.is_exact or not product.coded:
            return None
        if self.link.exact_last and product.layer == last:
            return None
        return self.gradients if product.transposed else self.rows

    def early(self, epoch: int) -> Coding | None:
        """Returns it as it stands in epoch 0 or 1 of a run; None where all is exact.

        Which call is the last, and so exact, is known after the first epoch. Late rows of
        that are read in the next, and gradients answer them.
        """
        if epoch == 0 and self.link.exact_last:
            return None
        rows, own = self.link.codecs_at(self.link.epoch + epoch)
        read = rows
        if epoch and self.late(transposed=False):
            first = self.early(0)
            read = Plain() if first is None else first.rows
        return replace(self, rows=rows, gradients=gradient_codec(rows, read, own))

    def late(self, transposed: bool) -> int:
        """Returns by how many epochs rows, or gradients, are late."""
        return self.link.timing.staleness(transposed)

    @property
    def synchronous(self) -> float:
        """The share of epochs that wait for their own rows."""
        every = self.link.timing.sync_every
        return 1 / every if every else 0.0


def codings(asked: Sequence[Asked]) -> list[Coding | None]:
    """Returns the exact link, which is None, and each other that was asked for."""
    if isinstance(asked, (str, Codec, LinkPolicy)):
        asked = (asked,)
    found = [Coding.of(one) for one in asked]
    return [None, *(one for one in found if not one.link.is_exact)]


def links_by_type(
    asked: Any, kinds: Sequence[EdgeType]
) -> list[tuple[str, Any, dict[EdgeType, Coding]]]:
    """Returns of each link its name, what gives it to `pdc.partition`, and it by edge type.

    Those that code no relation are left out.
    """
    if isinstance(asked, (str, Codec, LinkPolicy, Mapping)):
        asked = (asked,)
    found = []
    for one in asked:
        given: Any
        if not isinstance(one, Mapping):
            coding = Coding.of(one)
            name, given = coding.name, coding.link
            by_type = dict.fromkeys(kinds, coding)
        else:
            read = {k: None if v is None else Coding.of(v) for k, v in one.items()}
            given = {k: None if c is None else c.link for k, c in read.items()}
            by_link = {id(c.link): c for c in read.values() if c is not None}
            links = links_of(given, kinds)
            by_type = {k: by_link[id(x)] for k, x in links.items() if x is not None}
            said = (
                (k if isinstance(k, str) else "__".join(k), c) for k, c in read.items()
            )
            name = ", ".join(f"{k}: {c.name}" for k, c in said if c is not None)
        if any(not coding.link.is_exact for coding in by_type.values()):
            found.append((name, given, by_type))
    return found


def _link_of(asked: Any) -> LinkPolicy:
    if isinstance(asked, Codec):
        return LinkPolicy(asked)
    if not isinstance(asked, str):
        raise TypeError(
            "codecs are names as '1 bit' or 'bf16 late', Codecs or LinkPolicys, got "
            f"{asked!r}"
        )
    match = _NAME.fullmatch(asked.strip())
    assert match is not None
    name = match["codec"].strip()
    late = 0 if match[2] is None else int(match["late"] or 1)
    bits = _BITS.fullmatch(name)
    if bits is not None:
        return LinkPolicy(Quantise(int(bits[1]), "stochastic"), late=late)
    known = ("plain", *known_codecs())
    if name not in known:
        raise ValueError(
            f"codec {asked!r} is not known; choose '1 bit', '2 bits', '4 bits', '8 bits', "
            f"{', '.join(map(repr, known))}, each with ' late' behind it or not, or give a "
            "Codec or a LinkPolicy"
        )
    codec = Plain() if name == "plain" else codec_of(name)
    return LinkPolicy(codec, late=late)


def _name_of(link: LinkPolicy, rows: Codec, own: Codec | None) -> str:
    said = _short(rows)
    said += "" if own is None else f", gradients {_short(own)}"
    skip = link.timing.skip
    said += "" if skip is None else f", skipped below {skip.bound:g}"
    late = [link.timing.staleness(backward) for backward in (False, True)]
    if any(late):
        said += f", late by {late[0]}"
    return said if late[0] == late[1] else f"{said} and {late[1]}"


def _short(codec: Codec) -> str:
    if isinstance(codec, Quantise):
        return "1 bit" if codec.bits == 1 else f"{codec.bits} bits"
    if isinstance(codec, Cast):
        return "bf16" if codec.dtype == torch.bfloat16 else "fp16"
    return "plain" if codec == Plain() else f"{codec}"


@dataclass(frozen=True)
class DryExchange:
    """Stands in for `LayerExchange` in a dry run, and for the links that it wraps.

    Args:
        coded: whether rows are coded.
    """

    coded: bool = True

    def as_exact(self, why: str) -> DryExchange:
        """Returns the same for rows that must be exact."""
        return DryExchange(False)

    def wrap(self, link: Any, name: int) -> Any:
        """Returns a product's own link, which exchanges nothing, or a mark for rows."""
        if name < len(NAMES):
            return link
        return self if name < DEGREES else DryExchange(False)


@dataclass(eq=False)
class DryCalls:
    """The calls of layers by one link in an epoch of a dry run.

    Args:
        exact_last: whether the last is exact, of several.
        made: the layer, and the number of its call, in order.
        last: the call that is exact.
    """

    exact_last: bool
    made: list[tuple[Any, int]] = field(default_factory=list)
    last: tuple[Any, int] | None = None

    def begin(self, layer: Any) -> DryExchange | None:
        """Begins a call; returns None if it is the exact one."""
        call = layer, sum(other is layer for other, _ in self.made)
        self.made.append(call)
        return None if call == self.last else DryExchange()

    def end_first(self) -> None:
        """Ends the first epoch, by which the last call is known."""
        if self.exact_last and len(self.made) > 1:
            self.last = self.made[-1]

    @property
    def agreements(self) -> int:
        """How often ranks agree whether they train: in each call of the first layer."""
        return sum(layer is self.made[0][0] for layer, _ in self.made)


class DryLink(LinkPolicy):
    """Stands in for a link on the one rank of a dry run: records calls, and codes nothing.

    Args:
        link: the link.
        calls: of it.
        tell: is told of each call whether it is coded.
    """

    def __init__(
        self, link: LinkPolicy, calls: DryCalls, tell: Callable[[bool], None]
    ) -> None:
        self.__dict__.update(link.__dict__)
        self._calls, self._tell = calls, tell

    def is_used_on(self, mesh: Any) -> bool:
        """Whether it is not exact, for as many ranks as are planned for."""
        return not self.is_exact

    def begin(self, layer: Any, nodes: Any, *_: Any, **more: Any) -> Any:
        """Returns what stands in for a call of a layer."""
        self.check_ranked(nodes, more["degrees"])
        exchange = self._calls.begin(layer)
        self._tell(exchange is not None)
        return exchange

    def note_cached(self, *_: Any) -> None:
        """Records nothing."""

    def was_constant(self, *_: Any) -> bool:
        """Says that no run was before."""
        return False


@dataclass(frozen=True, eq=False)
class Writing:
    """How the rows of one product are written.

    Args:
        codec: by what; None is the exact link.
        dtype: of the numbers.
    """

    codec: Codec | None
    dtype: torch.dtype

    def sizes(self, side: Side, width: Array) -> tuple[Array, Array, Array]:
        """Returns what one link moves, `[r, s, p]` or broadcast to it.

        Args:
            side: the link.
            width: of the rows `[1, 1, p]`.

        Returns:
            Bytes of the rows that a rank asks for, of those it is asked for, and the
            messages, to all it has to do with, that tell sizes ahead.
        """
        codec, dtype = self.codec, self.dtype
        if codec is None:
            each = width * dtype.itemsize
            ends = side.ghosts[:, :, None] * each, side.lent[:, :, None] * each
            return *ends, np.zeros_like(ends[0])
        found = {}
        for w in {int(w) for w in width.ravel()}:
            message = partial(codec.wire_bytes, width=w, dtype=dtype)
            found[w] = _coded(side, codec.fixed_size, message)
        every = [found[int(w)] for w in width.ravel()]
        asking, asked, ahead = (np.stack(part, 2) for part in zip(*every, strict=True))
        return asking, asked, ahead

    def in_chunks(
        self, side: Side, width: int, chunks: int, others: int
    ) -> tuple[Array, Array]:
        """Returns the bytes a rank asks for, and is asked for, if rows come chunk by chunk.

        Exact without a codec; with one the most there can be, as a plan does not know how
        many rows of a pair of ranks are in which chunk. Shapes `[r, s]`; `others` are the
        ranks beside one.
        """
        codec = self.codec
        if codec is None:
            each = width * self.dtype.itemsize
            return side.ghosts * each, side.lent * each
        message = partial(codec.wire_bytes, width=width, dtype=self.dtype)
        told = 0 if codec.fixed_size else chunks * others * HEADER

        def most(rows: int) -> int:
            if not rows:
                return 0
            # a message more rounds up once more
            return message(rows) + (min(chunks, rows) - 1) * (message(1) + 1)

        if side.pairs is None:  # means: all messages alike
            mean = max(round(float(side.ghosts.max() / max(side.sources.max(), 1))), 1)
            share = most(mean) / mean
            return side.ghosts * share + told, side.lent * share + told
        counts, where = np.unique(side.pairs.want, return_inverse=True)
        sizes = np.array([most(int(n)) for n in counts], np.int64)
        ends = side.pairs.by_rank(sizes[where.reshape(side.pairs.want.shape)])
        return ends[0] + told, ends[1] + told


def _coded(
    side: Side, sized: bool, message: Callable[[int], int]
) -> tuple[Array, Array, Array]:
    """Returns bytes asked for, those one is asked for, and messages with sizes [r, s]."""
    pairs = side.pairs
    if pairs is None:  # means: all messages alike
        peers = side.sources
        mean = max(round(float(side.ghosts.max() / max(peers.max(), 1))), 1)
        each = message(mean) / mean
        ahead = peers * (not sized) * (side.ghosts > 0)
        told = ahead * HEADER
        return side.ghosts * each + told, side.lent * each + told, ahead
    total = np.zeros_like(pairs.want)
    others = pairs.want.shape[1] - 1
    ahead = np.zeros_like(total)
    for number in range(MAX_CHUNKS):
        rows = pairs.of_piece(number)
        counts, where = np.unique(rows, return_inverse=True)
        sizes = [message(int(n)) if n else 0 for n in counts]
        total = total + np.array(sizes, np.int64)[where.reshape(rows.shape)]
        if not sized:  # to all others of a line on which anything travels
            speaks = rows.any((1, 2), keepdims=True)
            ahead = ahead + speaks * (1 - np.eye(others + 1, dtype=np.int64))
    asking, asked = pairs.by_rank(total + ahead * HEADER)
    return asking, asked, pairs.by_rank(ahead)[0]

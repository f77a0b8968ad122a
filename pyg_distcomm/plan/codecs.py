"""Prices exchanges over a link: their bytes, staleness and buffers.

Bytes are exact, for each pair of ranks and each piece of a message, for codecs whose sizes do
not depend on values; for other codecs they are an upper bound.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

from pyg_distcomm.graph.partition_data_types import links_of
from pyg_distcomm.halo.codec import HEADER, Codec
from pyg_distcomm.halo.codecs import codec_of, known_codecs
from pyg_distcomm.halo.codecs.quantise import Cast, Plain, Quantise
from pyg_distcomm.halo.codecs.sparse import Bitmap
from pyg_distcomm.halo.compressed import gradient_codec
from pyg_distcomm.halo.halo import DEGREES, MAX_CHUNKS, NAMES
from pyg_distcomm.halo.policy import LinkPolicy
from pyg_distcomm.partition.part_share import EdgeType
from pyg_distcomm.plan.traffic import Array, LinkCounts
from pyg_distcomm.plan.training import ProductShape

CodecLike: TypeAlias = str | Codec | LinkPolicy

_NAME = re.compile(r"(?P<codec>.*?)(,? +late(?: +by)?(?: +(?P<late>\d+))?)?")
_BITS = re.compile(r"([1248])[ -]?bits?")


@dataclass(frozen=True, eq=False)
class Coding:
    """A link in its present epoch, with the codecs of its exchanges.

    Args:
        name: the name in tables.
        link: the link, for `pdc.partition(link=...)`.
        rows, gradients: the codecs of rows and of gradients.
    """

    name: str
    link: LinkPolicy
    rows: Codec
    gradients: Codec

    @staticmethod
    def of(spec: CodecLike) -> Coding:
        """Builds the coding of a name such as "1 bit" or "bf16 late", a codec, or a link.

        Raises:
            ValueError, TypeError: for anything else; the message lists the choices.
        """
        link = spec if isinstance(spec, LinkPolicy) else _parse_link(spec)
        rows, own = link.codecs_at(link.epoch)
        name = spec if isinstance(spec, str) else _describe_link(link, rows, own)
        return Coding(name, link, rows, gradient_codec(rows, rows, own))

    @property
    def sized(self) -> bool:
        """Whether bytes are exact; otherwise they are an upper bound.

        Exchanges that may be skipped count as sent; the votes on skipping do not count.
        """
        fixed = self.rows.fixed_size and self.gradients.fixed_size
        return fixed and self.link.timing.skip is None

    @property
    def exact(self) -> bool:
        """Whether it changes no number: lossless and synchronous."""
        whole = all(isinstance(c, (Plain, Bitmap)) for c in (self.rows, self.gradients))
        return whole and not self.link.timing.is_late

    def codec_of(self, product: ProductShape, last: int | None) -> Codec | None:
        """Returns the codec of a product's rows; None for the exact exchange.

        Args:
            product: a product of the third epoch or a later one.
            last: the number of the last layer, whose exchanges are exact; None if
                `product.coded` says so.
        """
        if self.link.is_exact or not product.coded:
            return None
        if self.link.exact_last and product.layer == last:
            return None
        return self.gradients if product.transposed else self.rows

    def in_epoch(self, epoch: int) -> Coding | None:
        """Returns the coding in epoch 0 or 1 of a run; None if all exchanges are exact.

        The last call, which is exact, is known after the first epoch only. Late rows of the
        first epoch are read in the second, and its gradients belong to them.
        """
        if epoch == 0 and self.link.exact_last:
            return None
        rows, own = self.link.codecs_at(self.link.epoch + epoch)
        read = rows
        if epoch and self.late(transposed=False):
            first = self.in_epoch(0)
            read = Plain() if first is None else first.rows
        return replace(self, rows=rows, gradients=gradient_codec(rows, read, own))

    def late(self, transposed: bool) -> int:
        """Returns by how many epochs rows, or gradients, are late."""
        return self.link.timing.staleness(transposed)

    @property
    def synchronous(self) -> float:
        """The fraction of epochs that wait for their own rows."""
        every = self.link.timing.sync_every
        return 1 / every if every else 0.0


def codings(specs: Sequence[CodecLike]) -> list[Coding | None]:
    """Returns None for the exact link, followed by the coding of each other link."""
    if isinstance(specs, (str, Codec, LinkPolicy)):
        specs = (specs,)
    found = [Coding.of(one) for one in specs]
    return [None, *(one for one in found if not one.link.is_exact)]


def links_by_type(
    specs: Any, kinds: Sequence[EdgeType]
) -> list[tuple[str, Any, dict[EdgeType, Coding]]]:
    """Returns for each link its name, its value for `pdc.partition`, and codings by edge type.

    Links that code no edge type are left out.
    """
    if isinstance(specs, (str, Codec, LinkPolicy, Mapping)):
        specs = (specs,)
    found = []
    for one in specs:
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
            named = (
                (k if isinstance(k, str) else "__".join(k), c) for k, c in read.items()
            )
            name = ", ".join(f"{k}: {c.name}" for k, c in named if c is not None)
        if any(not coding.link.is_exact for coding in by_type.values()):
            found.append((name, given, by_type))
    return found


def _parse_link(spec: Any) -> LinkPolicy:
    if isinstance(spec, Codec):
        return LinkPolicy(spec)
    if not isinstance(spec, str):
        raise TypeError(
            "codecs are names as '1 bit' or 'bf16 late', Codecs or LinkPolicys, got "
            f"{spec!r}"
        )
    match = _NAME.fullmatch(spec.strip())
    assert match is not None
    name = match["codec"].strip()
    late = 0 if match[2] is None else int(match["late"] or 1)
    bits = _BITS.fullmatch(name)
    if bits is not None:
        return LinkPolicy(Quantise(int(bits[1]), "stochastic"), late=late)
    known = ("plain", *known_codecs())
    if name not in known:
        raise ValueError(
            f"codec {spec!r} is not known; choose '1 bit', '2 bits', '4 bits', '8 bits', "
            f"{', '.join(map(repr, known))}, each with ' late' behind it or not, or give a "
            "Codec or a LinkPolicy"
        )
    codec = Plain() if name == "plain" else codec_of(name)
    return LinkPolicy(codec, late=late)


def _describe_link(link: LinkPolicy, rows: Codec, own: Codec | None) -> str:
    text = _codec_name(rows)
    text += "" if own is None else f", gradients {_codec_name(own)}"
    skip = link.timing.skip
    text += "" if skip is None else f", skipped below {skip.bound:g}"
    late = [link.timing.staleness(backward) for backward in (False, True)]
    if any(late):
        text += f", late by {late[0]}"
    return text if late[0] == late[1] else f"{text} and {late[1]}"


def _codec_name(codec: Codec) -> str:
    if isinstance(codec, Quantise):
        return "1 bit" if codec.bits == 1 else f"{codec.bits} bits"
    if isinstance(codec, Cast):
        return "bf16" if codec.dtype == torch.bfloat16 else "fp16"
    return "plain" if codec == Plain() else f"{codec}"


@dataclass(frozen=True)
class DryExchange:
    """Stands in for `LayerExchange` in a dry run.

    Args:
        coded: whether rows are coded.
    """

    coded: bool = True

    def as_exact(self, why: str) -> DryExchange:
        """Returns an exchange whose rows are exact."""
        return DryExchange(False)

    def wrap(self, link: Any, name: int) -> Any:
        """Returns a product's own link, or one that tells whether rows are coded."""
        if name < len(NAMES):
            return link
        coded = self.coded and name < DEGREES
        axis = replace(link.axis, observer=partial(link.axis.observer, coded=coded))
        return replace(link, axis=axis)


@dataclass(eq=False)
class DryCalls:
    """The layer calls over one link in an epoch of a dry run.

    Args:
        exact_last: whether the last of several calls is exact.
        made: (layer, number of its call), in order.
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
        """Ends the first epoch, after which the last call is known."""
        if self.exact_last and len(self.made) > 1:
            self.last = self.made[-1]

    @property
    def agreements(self) -> int:
        """The number of agreements on training or evaluation: one a call of the first layer."""
        return sum(layer is self.made[0][0] for layer, _ in self.made)


class DryLink(LinkPolicy):
    """Stands in for a link on the one rank of a dry run: records calls, and codes nothing.

    Args:
        link: the link.
        calls: takes its calls.
        record: called with whether a call is coded, for each call.
    """

    def __init__(
        self, link: LinkPolicy, calls: DryCalls, record: Callable[[bool], None]
    ) -> None:
        self.__dict__.update(link.__dict__)
        self._calls, self._record = calls, record

    def is_used_on(self, mesh: Any) -> bool:
        """Returns whether rows are coded on the planned number of ranks."""
        return not self.is_exact

    def begin(self, layer: Any, nodes: Any, *_: Any, **more: Any) -> Any:
        """Returns the dry exchange of a layer call."""
        self.check_ranked(nodes, more["degrees"])
        exchange = self._calls.begin(layer)
        self._record(exchange is not None)
        return exchange

    def note_cached(self, *_: Any) -> None:
        """Records nothing."""

    def was_constant(self, *_: Any) -> bool:
        """Returns False, as before the first run."""
        return False


@dataclass(frozen=True, eq=False)
class Writing:
    """The codec and the dtype of the rows of one product.

    Args:
        codec: the codec; None is the exact link.
        dtype: the dtype of the rows.
    """

    codec: Codec | None
    dtype: torch.dtype

    def sizes(self, side: LinkCounts, width: Array) -> tuple[Array, Array, Array]:
        """Returns the traffic of one link, `[r, s, p]` or broadcast to it.

        Args:
            side: the rows of the link.
            width: the width of rows `[1, 1, p]`.

        Returns:
            Bytes of the rows that a rank receives, bytes of those it sends, and the messages
            that announce sizes to its peers.
        """
        codec, dtype = self.codec, self.dtype
        if codec is None:
            each = width * dtype.itemsize
            ends = side.ghosts[:, :, None] * each, side.sent[:, :, None] * each
            return *ends, np.zeros_like(ends[0])
        found = {}
        for w in {int(w) for w in width.ravel()}:
            message = partial(codec.wire_bytes, width=w, dtype=dtype)
            found[w] = _coded(side, codec.fixed_size, message)
        every = [found[int(w)] for w in width.ravel()]
        received, sent, ahead = (np.stack(part, 2) for part in zip(*every, strict=True))
        return received, sent, ahead

    def in_chunks(
        self, side: LinkCounts, width: int, chunks: int, others: int
    ) -> tuple[Array, Array]:
        """Returns the bytes that a rank receives and sends, if rows travel chunk by chunk.

        Exact without a codec; with one an upper bound, since a plan does not know how the
        rows of a pair of ranks spread over chunks. Shapes `[r, s]`; `others` is the number
        of other ranks.
        """
        codec = self.codec
        if codec is None:
            each = width * self.dtype.itemsize
            return side.ghosts * each, side.sent * each
        message = partial(codec.wire_bytes, width=width, dtype=self.dtype)
        size_headers = 0 if codec.fixed_size else chunks * others * HEADER

        def most(rows: int) -> int:
            if not rows:
                return 0
            # each further message may round up by a byte
            return message(rows) + (min(chunks, rows) - 1) * (message(1) + 1)

        if side.pairs is None:  # means: all messages are equal
            mean = max(round(float(side.ghosts.max() / max(side.sources.max(), 1))), 1)
            share = most(mean) / mean
            return side.ghosts * share + size_headers, side.sent * share + size_headers
        counts, index = np.unique(side.pairs.want, return_inverse=True)
        sizes = np.array([most(int(n)) for n in counts], np.int64)
        ends = side.pairs.by_rank(sizes[index.reshape(side.pairs.want.shape)])
        return ends[0] + size_headers, ends[1] + size_headers


def _coded(
    side: LinkCounts, sized: bool, message: Callable[[int], int]
) -> tuple[Array, Array, Array]:
    """Returns bytes received, bytes sent, and messages that announce sizes [r, s]."""
    pairs = side.pairs
    if pairs is None:  # means: all messages are equal
        peers = side.sources
        mean = max(round(float(side.ghosts.max() / max(peers.max(), 1))), 1)
        each = message(mean) / mean
        ahead = peers * (not sized) * (side.ghosts > 0)
        size_headers = ahead * HEADER
        return side.ghosts * each + size_headers, side.sent * each + size_headers, ahead
    total = np.zeros_like(pairs.want)
    others = pairs.want.shape[1] - 1
    ahead = np.zeros_like(total)
    for number in range(MAX_CHUNKS):
        rows = pairs.of_piece(number)
        counts, index = np.unique(rows, return_inverse=True)
        sizes = [message(int(n)) if n else 0 for n in counts]
        total = total + np.array(sizes, np.int64)[index.reshape(rows.shape)]
        if not sized:  # sizes go to all other ranks of a line with any rows
            has_rows = rows.any((1, 2), keepdims=True)
            ahead = ahead + has_rows * (1 - np.eye(others + 1, dtype=np.int64))
    received, sent = pairs.by_rank(total + ahead * HEADER)
    return received, sent, pairs.by_rank(ahead)[0]

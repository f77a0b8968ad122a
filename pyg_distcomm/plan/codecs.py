"""Prices exchanges over a link: their bytes, staleness and buffers.

Bytes are exact, for each pair of ranks and each piece of a message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import torch

from pyg_distcomm.halo.codec import Codec
from pyg_distcomm.halo.codecs import Cast, Plain, Quantise
from pyg_distcomm.halo.halo import MAX_CHUNKS
from pyg_distcomm.halo.policy import LinkPolicy
from pyg_distcomm.plan.traffic import Array, LinkCounts
from pyg_distcomm.plan.training import ProductShape

CodecLike: TypeAlias = str | Codec | LinkPolicy


@dataclass(frozen=True, eq=False)
class Coding:
    """A link in its present epoch, with the codecs of its exchanges.

    Args:
        name: the name in tables.
        link: the link, for `pdc.partition(link=...)`.
        rows: the codec of rows, and of their gradients.
    """

    name: str
    link: LinkPolicy
    rows: Codec

    @staticmethod
    def of(spec: CodecLike) -> Coding:
        """Builds the coding of a link, or of a codec or its name, as `LinkPolicy` takes it.

        Raises:
            ValueError, TypeError: for anything else; the message lists the choices.
        """
        link = spec if isinstance(spec, LinkPolicy) else LinkPolicy(spec)
        rows = link.codec_at(link.epoch)
        return Coding(_describe_link(link, rows), link, rows)

    @property
    def sized(self) -> bool:
        """Whether bytes are exact; otherwise they are an upper bound.

        Exchanges that may be skipped count as sent; the votes on skipping do not count.
        """
        return self.link.timing.skip is None

    @property
    def exact(self) -> bool:
        """Whether it changes no number: lossless and synchronous."""
        return self.rows == Plain() and not self.link.timing.is_late

    def codec_of(self, product: ProductShape, last: int) -> Codec | None:
        """Returns the codec of a product's rows; None for the exact exchange.

        Args:
            product: a product of the third epoch or a later one.
            last: the number of the last layer, whose exchanges may be exact.
        """
        if self.link.is_exact:
            return None
        if self.link.exact_last and product.layer == last:
            return None
        return self.rows

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


def _describe_link(link: LinkPolicy, rows: Codec) -> str:
    text = _codec_name(rows)
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


@dataclass(frozen=True, eq=False)
class Writing:
    """The codec and the dtype of the rows of one product.

    Args:
        codec: the codec; None is the exact link.
        dtype: the dtype of the rows.
    """

    codec: Codec | None
    dtype: torch.dtype

    def sizes(self, side: LinkCounts, width: Array) -> tuple[Array, Array]:
        """Returns the traffic of one link, `[r, s, p]` or broadcast to it.

        Args:
            side: the rows of the link.
            width: the width of rows `[1, 1, p]`.

        Returns:
            Bytes of the rows that a rank receives, and bytes of those it sends.
        """
        codec, dtype = self.codec, self.dtype
        if codec is None:
            each = width * dtype.itemsize
            return side.ghosts[:, :, None] * each, side.sent[:, :, None] * each
        found = {}
        for w in {int(w) for w in width.ravel()}:
            found[w] = _coded(side, partial(codec.wire_bytes, width=w, dtype=dtype))
        every = [found[int(w)] for w in width.ravel()]
        received, sent = (np.stack(part, 2) for part in zip(*every, strict=True))
        return received, sent


def _coded(side: LinkCounts, message: Callable[[int], int]) -> tuple[Array, Array]:
    """Returns bytes received, and bytes sent [r, s]."""
    pairs = side.pairs
    if pairs is None:  # means: all messages are equal
        peers = side.sources
        mean = max(round(float(side.ghosts.max() / max(peers.max(), 1))), 1)
        each = message(mean) / mean
        return side.ghosts * each, side.sent * each
    total = np.zeros_like(pairs.want)
    for number in range(MAX_CHUNKS):
        rows = pairs.of_piece(number)
        counts, index = np.unique(rows, return_inverse=True)
        sizes = [message(int(n)) if n else 0 for n in counts]
        total = total + np.array(sizes, np.int64)[index.reshape(rows.shape)]
    return pairs.by_rank(total)

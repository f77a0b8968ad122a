"""Adds up the prices of an epoch on one grid: bytes, messages and memory.

Bytes are exact: the ledger counts the same. Of a link whose rows are late, the messages that
are kept from epoch to epoch count as memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from pyg_distcomm.comm.collectives import ring_words
from pyg_distcomm.graph.product_cache import MultiplyOrder
from pyg_distcomm.halo.codec import Codec
from pyg_distcomm.halo.codecs import Cast, Plain, Quantise
from pyg_distcomm.halo.policy import LinkPolicy
from pyg_distcomm.plan.ranks import Array, Traffic
from pyg_distcomm.plan.training import ProductShape, Training

CodecLike: TypeAlias = str | Codec | LinkPolicy


@dataclass(frozen=True, eq=False)
class Coding:
    """A link in its present epoch, with the codec of its exchanges.

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
        rows, late = link.codec_at(link.epoch), link.lateness
        text = _codec_name(rows) + (f", late by {late[0]}" if any(late) else "")
        text += f" and {late[1]}" if late[0] != late[1] else ""
        return Coding(text, link, rows)

    @property
    def exact(self) -> bool:
        """Whether it changes no number: lossless and synchronous."""
        return self.rows == Plain() and not self.link.timing.is_late

    def codec_of(self, product: ProductShape, last: int) -> Codec | None:
        """Returns the codec of a product of the third epoch or later; None if it is exact.

        Args:
            product: the product.
            last: the number of the last layer, whose exchanges may be exact.
        """
        exact = self.link.exact_last and product.layer == last
        return None if exact or self.link.is_exact else self.rows


def codings(specs: Sequence[CodecLike]) -> list[Coding | None]:
    """Returns None for the exact link, followed by the coding of each other link."""
    if isinstance(specs, (str, Codec, LinkPolicy)):
        specs = (specs,)
    found = [Coding.of(one) for one in specs]
    return [None, *(one for one in found if not one.link.is_exact)]


def _codec_name(codec: Codec) -> str:
    if isinstance(codec, Quantise):
        return "1 bit" if codec.bits == 1 else f"{codec.bits} bits"
    if isinstance(codec, Cast):
        return "bf16" if codec.dtype == torch.bfloat16 else "fp16"
    return "plain" if codec == Plain() else f"{codec}"


def epoch_cost(
    traffic: Traffic,
    training: Training,
    ordering: MultiplyOrder,
    coding: Coding | None,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Returns the cost of an epoch, as fields of a `Plan`.

    Args:
        traffic: what ranks exchange.
        training: the model.
        ordering: the order in which layers multiply A X W.
        coding: the link; None is the exact one. Rows of a coded link are summed on the rank
            that reads them, and none are cached.
        dtype: the dtype of the rows.
    """
    exact, size = coding is None, math.prod(traffic.grid)
    how: Any = {"adds_on_grid": traffic.adds and exact, "keeps_rows": exact}
    products, orders = training.products(ordering, **how), training.orders(ordering)
    last = len(training.layers) - 1
    exchange, messages, kept = _totals(traffic, products, last, coding, dtype)
    sums = training.sums(size)
    if coding is not None and size > 1:
        sums["agreement"] = ring_words(1, size) * any(o != "kept" for o in orders)
    every = sum(sums.values())
    by_rank = tuple(round(float(n)) + every for n in exchange)
    known = len(by_rank) == size and exchange.dtype.kind == "i"
    mean = (float(exchange.mean()) + every) * size
    memory = kept + _memory(traffic, training, products, orders)
    rows = training.kept_rows(ordering, **how)
    memory = memory + traffic.ghosts * rows * training.itemsize
    return {
        "bytes_by_rank": by_rank if known else (max(by_rank),),
        "exchange_bytes": round(float(exchange.max())),
        "sum_bytes": sums,
        "total_bytes": sum(by_rank) if known else round(mean),
        "messages": round(float(messages.max())),
        "memory": round(float(memory.max())),
    }


def _totals(
    traffic: Traffic,
    products: list[ProductShape],
    last: int,
    coding: Coding | None,
    dtype: torch.dtype,
) -> tuple[Array, Array, Array]:
    """Returns bytes received, messages, and bytes kept by a link; each kind is priced once."""
    total: list[Any] = [0 * traffic.nodes] * 3
    known: dict[Any, tuple[Array, Array, Array]] = {}
    for one in products:
        codec = None if coding is None else coding.codec_of(one, last)
        key = one.width, one.transposed, one.halo, codec
        if key not in known:
            known[key] = traffic.exchange(one, codec or Plain(), dtype)
        fiber, received, messages = known[key]
        late = (
            0
            if coding is None or codec is None
            else coding.link.lateness[one.transposed]
        )
        news = fiber + received, messages, late * received
        total = [sum_ + new for sum_, new in zip(total, news, strict=True)]
    exchange, messages, kept = total
    return exchange, messages, kept


def _memory(
    traffic: Traffic,
    training: Training,
    products: list[ProductShape],
    orders: tuple[str, ...],
) -> Array:
    """Returns an estimate of the bytes allocated on each rank at the peak of an epoch.

    topology     ids of own edges and of their ends (24 e), in local numbering (16 e)
    operator     columns, values and edges of the block (12 each), its transpose the same
    features     x, and A X if it is cached; y and masks
    activations  of each layer A X, if it comes first, and its output; a temporary
    gradients    two of the widest at once
    halo         rows received and sent, for the widest product
    parameters   with gradients and the two moments of Adam
    """
    layers, item, p = training.layers, training.itemsize, traffic.grid[2]
    features = layers[0].width_in * (1 + (orders[0] == "kept")) * item + 9
    saved = sum(
        layer.width_in
        for order, layer in zip(orders, layers, strict=True)
        if order in ("first", "halo")
    )
    outs = [layer.width_out for layer in layers]
    widest = max([*outs, *(layer.width_in for layer in layers[1:])])
    active = (saved + sum(outs) + 3 * outs[-1] + 3 * widest) * item
    wide, fetched = (
        max((one.width for one in products if one.halo == way), default=0)
        for way in (False, True)
    )
    share = -(-wide // p)
    inside = traffic.fiber * share * item * 2 if p > 1 else 0
    halo = np.maximum(
        traffic.rows * share * item + inside,
        (traffic.ghosts + traffic.sent) * fetched * item,
    )
    only = all(one.halo for one in products) and set(orders) == {"halo"}
    looped = traffic.nonzeros + traffic.fiber * training.adds_loops
    block = traffic.edges if only else looped
    held: Array = (
        40 * traffic.edges
        + 24 * block
        + traffic.nodes * (24 + features + active)
        + halo
        + 4 * item * training.parameters
    )
    return held

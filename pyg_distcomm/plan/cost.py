"""Cost: bytes, seconds and memory of an epoch on one grid, as plain arithmetic.

Bytes are exact: what the ledger counts. Products take the seconds of `passage.py`; those of
late links overlap with all that an epoch computes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from pyg_distcomm.comm.collectives import ring_words
from pyg_distcomm.plan.block_traffic import Array, Side
from pyg_distcomm.plan.codecs import Coding, Writing
from pyg_distcomm.plan.machine import Machine
from pyg_distcomm.plan.product_cost import (
    ProductPath,
    carried_seconds,
    halo_passage,
    late_seconds,
    passage,
    product_seconds,
)
from pyg_distcomm.plan.traffic import Flow
from pyg_distcomm.plan.training import ProductShape, Training

PASSES = 12  # times an epoch reads or writes the outcome of a layer, row by row


@dataclass(frozen=True, eq=False)
class Cost:
    """An epoch on one grid.

    exchange   bytes each rank receives in products [r, s, p], or their mean
    sums       bytes each rank receives in all-reduces, by what is summed
    messages   messages each rank sends in products [r, s, p]
    seconds    of the epoch
    memory     bytes that live at its peak, beside the interpreter's [r, s, p]
    """

    exchange: Array
    sums: dict[str, int]
    messages: Array
    seconds: float
    memory: Array


def epoch_cost(
    flows: tuple[Flow, Flow, Flow],
    training: Training,
    ways: tuple[list[ProductShape], tuple[str, ...]],
    coding: Coding | None,
    dtype: torch.dtype,
    machine: Machine,
) -> Cost:
    """Prices an epoch.

    Args:
        flows: of products, of those against the edges, and of `HaloConv`, which always
            sends only what is needed.
        training: the model.
        ways: what it multiplies, and each layer's order.
        coding: the link; None is the exact one.
        dtype: of the features.
        machine: the figures for seconds.
    """
    flow, back, halo = flows
    products, orders = ways
    size = int(np.prod(flow.grid))
    shape = np.broadcast_shapes(flow.nodes.shape, (1, 1, flow.grid[2]))
    exchange, messages, kept = (np.zeros(shape) for _ in range(3))
    if not np.issubdtype(flow.nodes.dtype, np.floating):
        exchange, messages = exchange.astype(np.int64), messages.astype(np.int64)
    worked = machine.epoch + _dense_seconds(flow, training, machine)
    clock, known = _Clock(flow, machine, worked, len(products)), {}
    for product in products:
        writing = _writing(coding, product, len(training.layers) - 1, dtype)
        kind = product.transposed, product.halo, product.against
        key = product.width, *kind, writing.codec
        if key not in known:
            if product.halo:
                known[key] = halo_passage(halo, product, writing)
            else:
                rows = back if product.against else flow
                known[key] = passage(rows, product, training.itemsize, writing)
        found = known[key]
        exchange = exchange + found.received
        messages = messages + sum(move.messages for move in found.moves)
        clock.add(found, writing.late)
        if coding is not None and writing.codec is not None:
            kept = kept + _kept(found, writing, coding)
    sums = training.sums(size)
    if coding is not None and size > 1:
        sums["agreement"] = [ring_words(1, size)] * any(o != "kept" for o in orders)
    link = machine.sum_wire()
    for each in (n for group in sums.values() for n in group):
        clock.waited += float(link.seconds(sum_messages(size), each, each))
        clock.carried = clock.carried + each / link.bandwidth
    return Cost(
        exchange,
        {name: sum(group) for name, group in sums.items()},
        messages,
        clock.seconds(1.0 if coding is None else coding.synchronous),
        memory(flow, training, products, orders, dtype) + kept,
    )


def _writing(
    coding: Coding | None, product: ProductShape, last: int, dtype: torch.dtype
) -> Writing:
    codec = None if coding is None else coding.codec_of(product, last)
    late = 0 if codec is None or coding is None else coding.late(product.transposed)
    return Writing(codec, dtype, late)


def _kept(found: ProductPath, writing: Writing, coding: Coding) -> Array:
    """Returns the bytes that exchanges keep from epoch to epoch, as `StaleBuffer` has them."""
    codec, total = writing.codec, np.zeros(())
    assert codec is not None
    for move in (*found.first, *found.second):
        total = total + writing.late * move.received
        averaged = writing.late > 0 and coding.link.timing.smooth is not None
        total = total + move.read * (averaged + codec.stateful)
        total = total + move.written * codec.stateful
    return total


class _Clock:
    """Adds up an epoch: what is waited for, what is computed, what has time to arrive.

    Work beside products is done between them, as much before each. Links that let more
    through after it make up for that later: no epoch takes less than its bytes do at the
    rate that they hold.
    """

    def __init__(
        self, flow: Flow, machine: Machine, worked: float, products: int
    ) -> None:
        self._flow, self._machine = flow, machine
        self.worked, self._pause = worked, worked / max(products, 1)
        self._saved: Array | float = 0.0
        self.waited = 0.0
        self.carried: Array | float = 0.0
        self._now, self._late = 0.0, (0.0, 0.0, 0.0)

    def add(self, found: ProductPath, late: int) -> None:
        """Adds a product."""
        how = found, self._flow, self._machine
        now, self._saved = product_seconds(*how, self._saved + self._pause)
        then = late_seconds(*how) if late else (now, 0.0, 0.0)
        self._now += now
        self.carried = self.carried + carried_seconds(*how)
        first, second, third = (a + b for a, b in zip(self._late, then, strict=True))
        self._late = first, second, third

    def seconds(self, synchronous: float) -> float:
        """Returns the mean epoch, a share of which waits for its own rows."""
        waited, worked, hidden = self._late
        now = self.waited + self.worked + self._now
        late = self.waited + waited + max(self.worked + worked, hidden)
        least = float(np.max(self.carried))
        return synchronous * max(now, least) + (1 - synchronous) * max(late, least)


def sum_messages(size: int) -> int:
    """Returns the steps of an all-reduce, one after the other, that a back end takes.

    By halving and doubling, as in [Thakur05] Sec. 4: as many bytes as in a ring.
    """
    return 2 * math.ceil(math.log2(max(size, 1)))


def _dense_seconds(flow: Flow, training: Training, machine: Machine) -> float:
    """Returns the seconds of what no rank needs another for, on the fullest rank."""
    rows, total = float(flow.nodes.max()), 0.0
    for i, layer in enumerate(training.layers):
        times = 2 + training.wants_gradient(i)  # X W, its dW, its dX
        one = machine.linear_seconds(rows, layer.width_in, layer.width_out)
        dense = 2 if layer.kind == "sage" else 1
        passes = PASSES * rows * layer.width_out * training.itemsize / machine.stream
        total += float(times * dense * one) + passes + machine.overhead
    return total


def memory(
    flow: Flow,
    training: Training,
    products: list[ProductShape],
    orders: tuple[str, ...],
    dtype: torch.dtype,
) -> Array:
    """Returns the bytes that live on each rank at the peak of an epoch, about.

    topology     ids of own edges and of their ends (24 e), in local numbering (16 e)
    operator     columns, values and edges of the block (12 each), its transpose the same
    features     x, and A X where it is kept; y and masks
    activations  of each layer A X, where it comes first, and its outcome; a temporary
    gradients    two of the widest at once
    halo         rows received and sent, for the widest product
    parameters   with gradients and the two moments of Adam
    """
    n, item = flow.nodes, training.itemsize
    layers = training.layers
    block = sum(flow.nonzeros)[:, :, None]  # type: ignore[index]
    features = layers[0].width_in * (1 + (orders[0] == "kept")) * item + 9
    saved = sum(
        (order == "first") * layer.width_in + (order == "halo") * layer.width_in
        for order, layer in zip(orders, layers, strict=True)
    )
    outs = [layer.width_out for layer in layers]
    widest = max([*outs, *(layer.width_in for layer in layers[1:])])
    active = (saved + sum(outs) + 3 * outs[-1] + 3 * widest) * item
    out: Array = (
        40 * flow.edges
        + 24 * block
        + n * (16 + 8 + features + active)
        + _halo_bytes(flow, products, dtype, item)
        + 4 * item * sum(training.parameters)
    )
    return out


def _halo_bytes(
    flow: Flow, products: list[ProductShape], dtype: torch.dtype, item: int
) -> Array:
    width = max((product.width for product in products), default=0)
    p = flow.grid[2]
    share = -(-width // p)
    rows = sum(_traffic(side) for side in flow.sides.all)
    inside = flow.fiber * share * item * 2 if p > 1 else 0
    return (rows * share * dtype.itemsize + inside)[:, :, None]  # type: ignore[operator,index]


def _traffic(side: Side) -> Array:
    return side.ghosts + side.lent

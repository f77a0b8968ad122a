"""Cost: bytes, seconds and memory of an epoch on one grid, as plain arithmetic.

Bytes are exact: what the ledger counts. Seconds follow the steps of `GridMatrix.apply`,
each as long as its slowest rank takes, with alpha messages + bytes / beta for an exchange:

    fiber | gather, beside the own columns | ghost columns of out rows
          | scatter, beside the ghost columns of own rows | fiber
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pyg_distcomm.exchange.codec import Codec
from pyg_distcomm.plan.flow import Flow
from pyg_distcomm.plan.links import Array, Side
from pyg_distcomm.plan.machine import Machine
from pyg_distcomm.plan.training import Product, Training
from pyg_distcomm.price import balanced_split

PASSES = 12  # times an epoch reads or writes the outcome of a layer, row by row


@dataclass(frozen=True, eq=False)
class Move:
    """One exchange on every rank [r, s, p]: bytes each way, and messages sent."""

    axis: str
    received: Array
    sent: Array
    messages: Array


@dataclass(frozen=True, eq=False)
class Passage:
    """One product: its exchanges, and the nonzeros that each step multiplies.

    gather, scatter        exchanges of rows, and of sums
    early, between, late   times the width: beside the gather, then, beside the scatter
    """

    split: Move
    gather: tuple[Move, ...]
    scatter: tuple[Move, ...]
    join: Move
    width: Array
    early: Array
    between: Array
    late: Array

    @property
    def moves(self) -> tuple[Move, ...]:
        """All exchanges, in order."""
        return self.split, *self.gather, *self.scatter, self.join

    @property
    def received(self) -> Array:
        """Bytes received `[r, s, p]`."""
        out: Array = sum(move.received for move in self.moves)  # type: ignore[assignment]
        return out


def passage(
    flow: Flow, product: Product, itemsize: int, row_bytes: dict[int, int]
) -> Passage:
    """Prices one product, as `GridMatrix.price` does on each rank.

    Args:
        flow: the rows.
        product: its width and direction.
        itemsize: bytes of a number on the fiber.
        row_bytes: bytes of a row on the wire by its width, as a codec writes it.
    """
    p = flow.grid[2]
    width = np.array(balanced_split(product.width, p))[None, None, :]
    size = np.array([row_bytes[w] for w in width.ravel()])[None, None, :]
    sides, axes = flow.sides, ("row", "col")
    own, own_ghost, out_own, out_ghost, sum_own, own_far = flow.nonzeros
    if product.transposed:
        sides, axes = sides.mirrored, ("col", "row")
        own_ghost, out_own, sum_own, own_far = out_own, own_ghost, own_far, sum_own
    one, two = axes
    return Passage(
        _fiber(flow, product.width, width, itemsize, leaving=True),
        (_there(one, sides.ghost, width, size), _there(two, sides.far, width, size)),
        (_back(two, sides.out, width, size), _back(one, sides.sums, width, size)),
        _fiber(flow, product.width, width, itemsize, leaving=False),
        width,
        (own + out_own + sum_own)[:, :, None],
        out_ghost[:, :, None],
        (own_ghost + own_far)[:, :, None],
    )


def halo_passage(flow: Flow, product: Product, row_bytes: dict[int, int]) -> Passage:
    """Prices one exchange of `HaloConv`: rows come, or their sums go home."""
    side, width = flow.sides.ghost, np.array([[[product.width]]])
    size, none = np.array([[[row_bytes[product.width]]]]), np.zeros((1, 1, 1), np.int64)
    still = Move("world", none, none, none)
    here = sum(flow.nonzeros)[:, :, None]  # type: ignore[index]
    if product.transposed:
        back = (_back("world", side, width, size),)
        return Passage(still, (), back, still, width, none, here, none)
    there = (_there("world", side, width, size),)
    return Passage(still, there, (), still, width, none, here, none)


def _there(axis: str, side: Side, width: Array, size: Array) -> Move:
    return _move(axis, side.ghosts, side.lent, side.readers, width, size)


def _back(axis: str, side: Side, width: Array, size: Array) -> Move:
    return _move(axis, side.lent, side.ghosts, side.sources, width, size)


def _move(
    axis: str, into: Array, out: Array, peers: Array, width: Array, size: Array
) -> Move:
    received, sent, to = (v[:, :, None] for v in (into, out, peers))
    return Move(axis, received * size, sent * size, to * (width > 0))


def _fiber(flow: Flow, total: int, width: Array, item: int, leaving: bool) -> Move:
    """All features of own rows for a share of the features of the fiber's, or back."""
    p, n = flow.grid[2], flow.nodes
    if p == 1:
        none = np.zeros_like(n)
        return Move("fiber", none, none, none)
    away, others = (
        n * (total - width) * item,
        (flow.fiber[:, :, None] - n) * width * item,
    )
    if flow.nodes.shape[2] == 1:  # a law of degrees: no rank is empty
        busy = np.full((1, 1, 1), p)
    else:
        busy = (n > 0).sum(2, keepdims=True)
    wide = (width > 0).sum()
    if leaving:
        return Move("fiber", others, away, (n > 0) * (wide - (width > 0)))
    return Move("fiber", away, others, (width > 0) * (busy - (n > 0)))


def product_seconds(found: Passage, flow: Flow, machine: Machine) -> float:
    """Returns the seconds of one product; every step waits for its slowest rank."""

    def wire(move: Move) -> Array:
        link = machine.wire(move.axis, flow.grid)
        moved = (move.sent + move.received) / machine.stream  # gathered, and put down
        out: Array = link.seconds(move.messages, move.sent, move.received) + moved
        return out

    def work(nonzeros: Array) -> Array:
        out: Array = machine.multiply_seconds(nonzeros, found.width)
        return out

    gather, scatter = (sum(map(wire, m)) for m in (found.gather, found.scatter))
    steps = (
        wire(found.split),
        np.maximum(gather, work(found.early)),
        work(found.between),
        np.maximum(scatter, work(found.late)),
        wire(found.join),
    )
    return float(sum(step.max() for step in steps))


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
    flows: tuple[Flow, Flow],
    training: Training,
    products: list[Product],
    orders: tuple[str, ...],
    codec: Codec,
    dtype: object,
    machine: Machine,
) -> Cost:
    """Prices an epoch.

    Args:
        flows: of products, and of `HaloConv`, which always sends only what is needed.
        training: the model.
        products, orders: what it multiplies, and each layer's order.
        codec, dtype: how rows are written, and of what.
        machine: the figures for seconds.
    """
    flow, halo = flows
    size = int(np.prod(flow.grid))
    shape = np.broadcast_shapes(flow.nodes.shape, (1, 1, flow.grid[2]))
    exchange, messages = np.zeros(shape), np.zeros(shape)
    if not np.issubdtype(flow.nodes.dtype, np.floating):
        exchange, messages = exchange.astype(np.int64), messages.astype(np.int64)
    seconds, known = 0.0, {}
    for product in products:
        key = product.width, product.transposed, product.halo
        if key not in known:
            written = _row_bytes(codec, product.width, flow.grid[2], dtype)
            found = (
                halo_passage(halo, product, written)
                if product.halo
                else passage(flow, product, training.itemsize, written)
            )
            known[key] = found, product_seconds(found, flow, machine)
        found, took = known[key]
        exchange = exchange + found.received
        messages = messages + sum(move.messages for move in found.moves)
        seconds += took
    sums = training.sums(size)
    seconds += _dense_seconds(flow, training, machine)
    link = machine.sum_wire()
    for each in (n for group in sums.values() for n in group):
        seconds += float(link.seconds(sum_messages(size), each, each))
    return Cost(
        exchange,
        {name: sum(group) for name, group in sums.items()},
        messages,
        seconds,
        memory(flow, training, products, orders, codec, dtype),
    )


def sum_messages(size: int) -> int:
    """Returns the steps of an all-reduce, one after the other, that a back end takes.

    By halving and doubling, as in [Thakur05] Sec. 4: as many bytes as in a ring.
    """
    return 2 * math.ceil(math.log2(max(size, 1)))


def _row_bytes(codec: Codec, width: int, parts: int, dtype: object) -> dict[int, int]:
    sizes = {width // parts, -(-width // parts)}
    return {w: codec.wire_bytes(1, w, dtype) for w in sizes}  # type: ignore[arg-type]


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
    products: list[Product],
    orders: tuple[str, ...],
    codec: Codec,
    dtype: object,
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
        + _halo_bytes(flow, products, codec, dtype, item)
        + 4 * item * sum(training.parameters)
    )
    return out


def _halo_bytes(
    flow: Flow, products: list[Product], codec: Codec, dtype: object, item: int
) -> Array:
    width = max((product.width for product in products), default=0)
    p = flow.grid[2]
    share = -(-width // p)
    size = codec.wire_bytes(1, share, dtype)  # type: ignore[arg-type]
    rows = sum(_traffic(side) for side in flow.sides.all)
    inside = flow.fiber * share * item * 2 if p > 1 else 0
    return (rows * size + inside)[:, :, None]  # type: ignore[operator,index]


def _traffic(side: Side) -> Array:
    return side.ghosts + side.lent

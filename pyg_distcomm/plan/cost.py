"""Prices an epoch on one grid: bytes, seconds and memory, as plain arithmetic.

Bytes are exact: the ledger counts the same. Seconds are estimates from a `Machine`'s latency,
bandwidth and rates; they rank plans.

A product takes the steps of `GridMatrix.apply` (see [Note: order of a product] in
`ops/grid_matrix.py`), each as long as its slowest rank takes. Exchanges of one step
share the
link: alpha messages + bytes / beta for all of them, alpha for the one with most messages:

    fiber | ghosts travel, beside sums for others, which follow, and the own columns
          | far columns travel, beside the ghost columns of out rows, whose sums follow, and
          the ghost columns of own rows | far columns | fiber

Exchanges of late links overlap with all that an epoch computes.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pyg_distcomm.comm.collectives import ring_words
from pyg_distcomm.comm.ledger import balanced_split
from pyg_distcomm.comm.mesh import Grid
from pyg_distcomm.graph.product_cache import MultiplyOrder
from pyg_distcomm.halo.codec import Codec
from pyg_distcomm.plan.codecs import Coding, Writing
from pyg_distcomm.plan.machine import Machine
from pyg_distcomm.plan.traffic import Array, Flow, Side
from pyg_distcomm.plan.training import ProductShape, Training


@dataclass(frozen=True, eq=False)
class Move:
    """One exchange on every rank [r, s, p]: bytes each way, and messages sent.

    codec          how rows are written; None as they are
    read, written  bytes of the rows, before and after a codec
    """

    axis: str
    received: Array
    sent: Array
    messages: Array
    codec: Codec | None = None
    read: Array | int = 0
    written: Array | int = 0

    def handled(self, machine: Machine) -> Array:
        """Returns the seconds in which rows are gathered or coded, and put down."""
        out: Array = (self.sent + self.received) / machine.stream
        if self.codec is None:
            return out
        return out + machine.coding_seconds(self.codec, self.written, self.read)


@dataclass(frozen=True, eq=False)
class ProductPath:
    """One product: its exchanges, and the nonzeros that each step multiplies.

    split, join     over the fiber
    first, second   what travels at once: ghosts, and sums for others; far columns, and sums
    before, early   times the width, beside the first: sums for others, and then the rest
    between, late   times the width, beside the second: sums, and then the rest
    after           times the width, when that has arrived
    """

    split: Move
    first: tuple[Move, Move]
    second: tuple[Move, Move]
    join: Move
    width: Array
    before: Array
    early: Array
    between: Array
    late: Array
    after: Array

    @property
    def moves(self) -> tuple[Move, ...]:
        """All exchanges, in order."""
        return self.split, *self.first, *self.second, self.join

    @property
    def received(self) -> Array:
        """Bytes received `[r, s, p]`."""
        out: Array = sum(move.received for move in self.moves)  # type: ignore[assignment]
        return out


def product_path(
    flow: Flow, product: ProductShape, itemsize: int, writing: Writing
) -> ProductPath:
    """Prices one product, as `GridMatrix.price` does on each rank.

    Args:
        flow: the rows.
        product: its width and direction.
        itemsize: bytes of a number on the fiber.
        writing: how rows are written on the other axes.
    """
    p = flow.grid[2]
    width = np.array(balanced_split(product.width, p))[None, None, :]
    sides, axes = flow.sides, ("row", "col")
    own, own_ghost, out_own, out_ghost, sum_own, own_far = flow.nonzeros
    if product.transposed:
        sides, axes = sides.mirrored, ("col", "row")
        own_ghost, out_own, sum_own, own_far = out_own, own_ghost, own_far, sum_own
    one, two = axes
    # where nothing has to arrive first, far columns and sums leave before own rows are
    # multiplied
    line = ("row", "col").index(one)
    others = np.any(sides.sums.ghosts > 0, axis=line, keepdims=True)
    waits = (sides.ghost.ghosts > 0) | others
    soon, later = (own + out_own) * waits, own * ~waits
    return ProductPath(
        _fiber(flow, product.width, width, itemsize, leaving=True),
        (
            _there(one, sides.ghost, width, writing),
            _back(one, sides.sums, width, writing),
        ),
        (
            _there(two, sides.far, width, writing),
            _back(two, sides.out, width, writing),
        ),
        _fiber(flow, product.width, width, itemsize, leaving=False),
        width,
        sum_own[:, :, None],
        soon[:, :, None],
        (out_ghost + out_own * ~waits)[:, :, None],
        (later + own_ghost)[:, :, None],
        own_far[:, :, None],
    )


def halo_path(
    flow: Flow, product: ProductShape, writing: Writing, grid: Grid
) -> ProductPath:
    """Prices one exchange of `HaloConv`: rows come, or their sums go home.

    Args:
        flow: its rows, as on (P, 1, 1).
        product: its width and direction.
        writing: how rows are written.
        grid: where the ranks stand.
    """
    side, width = flow.sides.ghost, np.array([[[product.width]]])
    none = np.zeros((1, 1, 1), np.int64)
    still = Move("world", none, none, none)
    here = _placed(sum(flow.nonzeros)[:, :, None], grid)  # type: ignore[index]
    go = _back if product.transposed else _there
    move = go("world", side, width, writing)
    facts = (move.received, move.sent, move.messages, move.read, move.written)
    came, went, messages, read, written = (_placed(fact, grid) for fact in facts)
    move = Move("world", came, went, messages, move.codec, read, written)
    both = (move, still), (still, still)
    if product.transposed:
        both = (still, still), (still, move)
    return ProductPath(still, *both, still, width, none, none, here, none, none)


def _placed(each: Any, grid: Grid) -> Any:
    """Puts figures of ranks `[P, 1, 1]` where the ranks stand; means stay as they are."""
    found = np.asarray(each)
    return found.reshape(grid) if found.size == math.prod(grid) else found


def adds_on_grid(flow: Flow, halo: Flow, dtype: torch.dtype) -> bool:
    """Tells whether sums of rows are products on the grid; see `Topology.adds_on_grid`."""
    one, plain = ProductShape(0, flow.grid[2], False), Writing(None, dtype, 0)
    sums = product_path(flow, one, dtype.itemsize, plain).received.mean()
    rows = halo_path(halo, one, plain, flow.grid).received.mean()
    return flow.grid[1:] != (1, 1) and bool(sums < rows)


def _there(axis: str, side: Side, width: Array, writing: Writing) -> Move:
    asking, asked, ahead = writing.sizes(side, width)
    rows = width * writing.dtype.itemsize
    messages = side.readers[:, :, None] * (width > 0) + ahead
    came, went = side.ghosts[:, :, None] * rows, side.lent[:, :, None] * rows
    return Move(axis, asking, asked, messages, writing.codec, came, went)


def _back(axis: str, side: Side, width: Array, writing: Writing) -> Move:
    asking, asked, ahead = writing.sizes(side, width)
    rows = width * writing.dtype.itemsize
    messages = side.sources[:, :, None] * (width > 0) + ahead
    came, went = side.lent[:, :, None] * rows, side.ghosts[:, :, None] * rows
    return Move(axis, asked, asking, messages, writing.codec, came, went)


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


def product_seconds(path: ProductPath, flow: Flow, machine: Machine) -> float:
    """Returns the seconds of one product; every step waits for its slowest rank."""
    total, none = 0.0, np.zeros(())
    steps: tuple[tuple[tuple[Move, ...], tuple[Move, ...], Array, Array], ...] = (
        ((path.split,), (), none, none),
        (path.first[:1], path.first[1:], path.before, path.early),
        (path.second[:1], path.second[1:], path.between, path.late),
        ((), (), path.after, none),
        ((path.join,), (), none, none),
    )
    for rows, sums, *nonzeros in steps:
        ahead, beside = (machine.multiply_seconds(n, path.width) for n in nonzeros)
        travel = _travel(rows + sums, flow, machine)
        follow = _travel(sums, flow, machine)
        # encoding and copying are not hidden behind other work, communication is
        handled = sum(move.handled(machine) for move in rows + sums)
        slowest = np.maximum(travel, ahead + np.maximum(follow, beside)) + handled
        total += float(slowest.max())
    return total


def late_seconds(
    path: ProductPath, flow: Flow, machine: Machine
) -> tuple[float, float, float]:
    """Returns the seconds of one product whose rows are read in a later epoch.

    Returns:
        Seconds spent waiting (fiber exchanges are never late), seconds of computing and
        encoding, and seconds of communication that the whole epoch can hide.
    """
    fiber = (path.split, path.join)
    waited = sum(_travel((m,), flow, machine) + m.handled(machine) for m in fiber)
    moves = (*path.first, *path.second)
    nonzeros = path.before + path.early + path.between + path.late + path.after
    work = machine.multiply_seconds(nonzeros, path.width)
    work = work + sum(move.handled(machine) for move in moves)
    hidden = sum(_travel(group, flow, machine) for group in (path.first, path.second))
    return tuple(float(np.max(part)) for part in (waited, work, hidden))  # type: ignore[return-value]


def _travel(moves: tuple[Move, ...], flow: Flow, machine: Machine) -> Array:
    """Returns the seconds of exchanges that run at once over one axis."""
    if not any(np.any(move.messages) for move in moves):
        return np.zeros(())
    link = machine.wire(moves[0].axis, flow.grid)
    messages = functools.reduce(np.maximum, (move.messages for move in moves))
    sent: Any = sum(move.sent for move in moves)
    received: Any = sum(move.received for move in moves)
    took: Array = link.seconds(messages, sent, received)
    return took


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
    ways: tuple[list[ProductShape], tuple[str, ...], int],
    coding: Coding | None,
    dtype: torch.dtype,
    machine: Machine,
) -> Cost:
    """Prices an epoch.

    Args:
        flows: of products, of those against the edges, and of `HaloConv`, which always
            sends only what is needed.
        training: the model.
        ways: what it multiplies, each layer's order, and the width of ghosts that are kept.
        coding: the link; None is the exact one.
        dtype: of the features.
        machine: the figures for seconds.
    """
    flow, back, halo = flows
    products, orders, kept_rows = ways
    size = int(np.prod(flow.grid))
    shape = np.broadcast_shapes(flow.nodes.shape, (1, 1, flow.grid[2]))
    exchange, messages, kept = (np.zeros(shape) for _ in range(3))
    if not np.issubdtype(flow.nodes.dtype, np.floating):
        exchange, messages = exchange.astype(np.int64), messages.astype(np.int64)
    worked = machine.epoch + _dense_seconds(flow, training, machine)
    clock, known = EpochClock(flow, machine, worked), {}
    for product in products:
        writing = writing_of(coding, product, len(training.layers) - 1, dtype)
        kind = product.transposed, product.halo, product.against
        key = product.width, *kind, writing.codec
        if key not in known:
            if product.halo:
                known[key] = halo_path(halo, product, writing, flow.grid)
            else:
                rows = back if product.against else flow
                known[key] = product_path(rows, product, training.itemsize, writing)
        found = known[key]
        exchange = exchange + found.received
        messages = messages + sum(move.messages for move in found.moves)
        clock.add(found, writing.late)
        if coding is not None and writing.codec is not None:
            kept = kept + link_bytes(found, writing, coding, product.transposed)
    sums = training.sums(size)
    if coding is not None and size > 1:
        sums["agreement"] = [ring_words(1, size)] * any(o != "kept" for o in orders)
    link = machine.sum_wire()
    for each in (n for group in sums.values() for n in group):
        clock.waited += float(link.seconds(sum_messages(size), each, each))
    return Cost(
        exchange,
        {name: sum(group) for name, group in sums.items()},
        messages,
        clock.seconds(1.0 if coding is None else coding.synchronous),
        memory((flow, halo), training, products, orders, dtype)
        + kept
        + kept_bytes(halo, kept_rows * training.itemsize, flow.grid),
    )


def early_bytes(
    flows: tuple[Flow, Flow, Flow],
    training: Training,
    how: tuple[MultiplyOrder, dict[str, Any]],
    dtype: torch.dtype,
    coding: Coding | None = None,
) -> tuple[int, int]:
    """Returns what all ranks receive in the first and second epoch.

    Args:
        flows, training, dtype: see `epoch_cost`.
        how: the order of products, and what else `Training.products` takes.
        coding: the link, which begins to be used; None is the exact one.
    """
    (flow, back, halo), uses = flows, dict[Any, int]()
    size, known, last = math.prod(flow.grid), {}, len(training.layers) - 1
    rest = size * sum(sum(group) for group in training.sums(size).values())
    found = []
    for epoch in range(2):
        total, now = 0.0, None if coding is None else coding.early(epoch)
        for product in training.products(how[0], uses=uses, **how[1]):
            writing = writing_of(now, product, last, dtype)
            kind = product.transposed, product.halo, product.against
            key = product.width, *kind, writing.codec
            if key not in known:
                if product.halo:
                    path = halo_path(halo, product, writing, flow.grid)
                else:
                    rows, item = back if product.against else flow, training.itemsize
                    path = product_path(rows, product, item, writing)
                came = np.broadcast_arrays(path.received, flow.nodes, path.width)[0]
                means = came.size < size
                known[key] = float(came.mean() * size if means else came.sum())
            total += known[key]
        found.append(round(total) + rest)
    return found[0], found[1]


def kept_bytes(halo: Flow, row_bytes: int, grid: Grid) -> Array:
    """Returns the bytes of ghosts that each rank keeps, `[r, s, p]`."""
    ghosts: Array = _placed(halo.sides.ghost.ghosts[:, :, None], grid)
    return ghosts * row_bytes


def writing_of(
    coding: Coding | None,
    product: ProductShape,
    last: int | None,
    dtype: torch.dtype,
) -> Writing:
    """Returns how a product is written by a link."""
    codec = None if coding is None else coding.codec_of(product, last)
    late = 0 if codec is None or coding is None else coding.late(product.transposed)
    return Writing(codec, dtype, late)


def link_bytes(
    found: ProductPath, writing: Writing, coding: Coding, transposed: bool
) -> Array:
    """Returns the bytes that exchanges keep from epoch to epoch, as `StaleBuffer` has them."""
    codec, total = writing.codec, np.zeros(())
    assert codec is not None
    timing = coding.link.timing
    averaged, skips = timing.momentum(transposed) > 0, timing.skips(transposed)
    for move in (*found.first, *found.second):
        total = total + (writing.late + skips) * move.received
        total = total + move.read * (averaged + codec.stateful)
        total = total + move.written * (codec.stateful + skips)
    return total


@dataclass
class EpochClock:
    """Adds up the seconds of an epoch.

    Args:
        flow, machine: of all products.
        worked: seconds of computing beside products.
    """

    flow: Flow
    machine: Machine
    worked: float
    waited: float = 0.0  # for sums
    now: float = 0.0  # in products, if their rows are those of this epoch
    late: tuple[float, float, float] = (0.0, 0.0, 0.0)  # see `late_seconds`

    def add(self, path: ProductPath, late: int) -> None:
        """Adds a product."""
        now = product_seconds(path, self.flow, self.machine)
        then = (now, 0.0, 0.0)
        if late:
            then = late_seconds(path, self.flow, self.machine)
        self.now += now
        first, second, third = (a + b for a, b in zip(self.late, then, strict=True))
        self.late = first, second, third

    def seconds(self, synchronous: float) -> float:
        """Returns the mean epoch, of which a share `synchronous` reads no late rows."""
        waited, worked, hidden = self.late
        now = self.waited + self.worked + self.now
        late = self.waited + waited + max(self.worked + worked, hidden)
        return synchronous * now + (1 - synchronous) * late


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
    flows: tuple[Flow, Flow],
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
    flow, halo = flows
    n, item = flow.nodes, training.itemsize
    layers = training.layers
    block = sum(flow.nonzeros)[:, :, None]  # type: ignore[index]
    if all(product.halo for product in products) and set(orders) == {"halo"}:
        block = _placed(sum(halo.nonzeros)[:, :, None], flow.grid)  # type: ignore[index]
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
        + _halo_bytes(flows, products, dtype, item)
        + 4 * item * sum(training.parameters)
    )
    return out


def _halo_bytes(
    flows: tuple[Flow, Flow],
    products: list[ProductShape],
    dtype: torch.dtype,
    item: int,
) -> Array:
    flow, halo = flows
    wide = {way: [one.width for one in products if one.halo == way] for way in (0, 1)}
    p = flow.grid[2]
    share, whole = -(-max(wide[0], default=0) // p), max(wide[1], default=0)
    rows = sum(_traffic(side) for side in flow.sides.all)
    inside = flow.fiber * share * item * 2 if p > 1 else 0
    product = (rows * share * dtype.itemsize + inside)[:, :, None]  # type: ignore[operator,index]
    fetched = _traffic(halo.sides.ghost)[:, :, None] * whole * dtype.itemsize
    return np.maximum(product, _placed(fetched, flow.grid))


def _traffic(side: Side) -> Array:
    return side.ghosts + side.lent

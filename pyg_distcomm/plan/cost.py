"""Prices an epoch on one grid: bytes, seconds and memory, as plain arithmetic.

Bytes are exact: the ledger counts the same. Seconds are estimates from a `Machine`'s latency,
bandwidth and rates; they rank plans.

A product takes the steps of `GridMatrix.apply` (see [Note: order of a product] in
`ops/grid_matrix.py`), each as long as its slowest rank takes. Exchanges of one step share the
link: alpha messages + bytes / beta for all of them, alpha for the one with most messages:

    fiber | ghosts travel, beside sums for others, which follow, and the own columns
          | far columns travel, beside the ghost columns of out rows, whose sums follow, and
          the ghost columns of own rows | far columns | fiber

Exchanges of late links overlap with all that an epoch computes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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

    fiber           exchanges over the fiber, before and after
    first, second   what travels at once: ghosts, and sums for others; far columns, and sums
    before, early   nonzeros multiplied beside the first: sums for others, and then the rest
    between, late   nonzeros multiplied beside the second: sums, and then the rest
    after           nonzeros multiplied when that has arrived
    """

    fiber: tuple[Move, ...]
    first: tuple[Move, ...]
    second: tuple[Move, ...]
    width: Array
    before: Array
    early: Array
    between: Array
    late: Array
    after: Array

    @property
    def moves(self) -> tuple[Move, ...]:
        """All exchanges."""
        return *self.fiber, *self.first, *self.second

    @property
    def coded(self) -> bool:
        """Whether a codec writes its rows."""
        return any(move.codec is not None for move in self.first)

    @property
    def received(self) -> Array:
        """Bytes received `[r, s, p]`."""
        out: Array = sum(move.received for move in self.moves)  # type: ignore[assignment]
        return out


def kept_by_link(moves: Iterable[Move], coding: Coding, transposed: bool) -> Any:
    """Returns the bytes that coded exchanges keep, as `StaleBuffer` has them."""
    total, timing = np.zeros(()), coding.link.timing
    averaged, skips = timing.momentum(transposed) > 0, timing.skips(transposed)
    for move in moves:
        if move.codec is not None:
            stateful = move.codec.stateful
            total = total + (coding.late(transposed) + skips) * move.received
            total = total + move.read * (averaged + stateful)
            total = total + move.written * (stateful + skips)
    return total


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
    width = np.array(balanced_split(product.width, flow.grid[2]))[None, None, :]
    sides, (one, two) = flow.sides, ("row", "col")
    own, own_ghost, out_own, out_ghost, sum_own, own_far = flow.nonzeros
    if product.transposed:
        sides, (one, two) = sides.mirrored, ("col", "row")
        own_ghost, out_own, sum_own, own_far = out_own, own_ghost, own_far, sum_own
    # where nothing has to arrive first, far columns and sums leave before own rows are
    # multiplied
    line = ("row", "col").index(one)
    others = np.any(sides.sums.ghosts > 0, axis=line, keepdims=True)
    waits = (sides.ghost.ghosts > 0) | others
    soon, later = (own + out_own) * waits, own * ~waits
    return ProductPath(
        _fiber(flow, product.width, width, itemsize),
        (
            _move(one, sides.ghost, width, writing),
            _move(one, sides.sums, width, writing, back=True),
        ),
        (
            _move(two, sides.far, width, writing),
            _move(two, sides.out, width, writing, back=True),
        ),
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
    width = np.array([[[product.width]]])
    here = _placed(sum(flow.nonzeros)[:, :, None], grid)  # type: ignore[index]
    move = _move("world", flow.sides.ghost, width, writing, product.transposed)
    names = "received", "sent", "messages", "read", "written"
    facts = {name: _placed(getattr(move, name), grid) for name in names}
    none = np.zeros((1, 1, 1), np.int64)
    first = (replace(move, **facts),)
    return ProductPath((), first, (), width, none, none, here, none, none)


def _placed(each: Any, grid: Grid) -> Any:
    """Puts figures of ranks `[P, 1, 1]` where the ranks stand; means stay as they are."""
    found = np.asarray(each)
    return found.reshape(grid) if found.size == math.prod(grid) else found


def adds_on_grid(flow: Flow, halo: Flow, dtype: torch.dtype) -> bool:
    """Tells whether sums of rows are products on the grid; see `Topology.adds_on_grid`."""
    one, plain = ProductShape(0, flow.grid[2], False), Writing(None, dtype)
    sums = product_path(flow, one, dtype.itemsize, plain).received.mean()
    rows = halo_path(halo, one, plain, flow.grid).received.mean()
    return flow.grid[1:] != (1, 1) and bool(sums < rows)


def _move(
    axis: str, side: Side, width: Array, writing: Writing, back: bool = False
) -> Move:
    """Prices an exchange over one link: ghosts come, or their sums go `back`."""
    asking, asked, ahead = writing.sizes(side, width)
    rows = width * writing.dtype.itemsize
    ends = side.ghosts[:, :, None] * rows, side.lent[:, :, None] * rows
    peers = (side.sources if back else side.readers)[:, :, None] * (width > 0) + ahead
    if back:
        return Move(axis, asked, asking, peers, writing.codec, *ends[::-1])
    return Move(axis, asking, asked, peers, writing.codec, *ends)


def _fiber(flow: Flow, total: int, width: Array, item: int) -> tuple[Move, ...]:
    """All features of own rows for a share of the features of the fiber's, and back."""
    p, n = flow.grid[2], flow.nodes
    if p == 1:
        return ()
    away = n * (total - width) * item
    others = (flow.fiber[:, :, None] - n) * width * item
    if n.shape[2] == 1:  # a law of degrees: no rank is empty
        busy = np.full((1, 1, 1), p)
    else:
        busy = (n > 0).sum(2, keepdims=True)
    wide = (width > 0).sum()
    return (
        Move("fiber", others, away, (n > 0) * (wide - (width > 0))),
        Move("fiber", away, others, (width > 0) * (busy - (n > 0))),
    )


@dataclass
class EpochClock:
    """Adds up the seconds of an epoch.

    Args:
        grid, machine: of all products.
        worked: seconds of computing beside products.
    """

    grid: Grid
    machine: Machine
    worked: float
    waited: float = 0.0  # for sums
    now: float = 0.0  # in products, if their rows are those of this epoch
    # in products, if rows are late: waited for, worked, and hidden behind the epoch
    late: Array = field(default_factory=lambda: np.zeros(3))

    def add(self, path: ProductPath, late: int) -> None:
        """Adds a product, each step of which takes as long as its slowest rank."""
        machine, none = self.machine, np.zeros(())
        fiber = sum(
            float(np.max(self._travel((move,)) + move.handled(machine)))
            for move in path.fiber
        )
        steps = (
            (path.first, path.before, path.early),
            (path.second, path.between, path.late),
            ((), path.after, none),
        )
        now, worked, hidden = fiber, none, none
        for moves, *nonzeros in steps:
            ahead, beside = (machine.multiply_seconds(n, path.width) for n in nonzeros)
            # encoding and copying are not hidden behind other work, communication is
            handled = sum(move.handled(machine) for move in moves)
            travel, follow = self._travel(moves), self._travel(moves[1:])
            slowest = np.maximum(travel, ahead + np.maximum(follow, beside)) + handled
            now += float(np.max(slowest))
            worked, hidden = worked + ahead + beside + handled, hidden + travel
        parts = (fiber, worked, hidden) if late else (now, 0.0, 0.0)
        self.now += now
        self.late += [float(np.max(part)) for part in parts]

    def add_sums(self, sums: Mapping[str, Sequence[int]], size: int) -> None:
        """Adds all-reduces of so many ranks, by the bytes that each receives."""
        wire = self.machine.sum_wire()
        for each in (n for group in sums.values() for n in group):
            self.waited += float(wire.seconds(sum_messages(size), each, each))

    def _travel(self, moves: tuple[Move, ...]) -> Array:
        """Returns the seconds of exchanges that run at once over one axis."""
        if not any(np.any(move.messages) for move in moves):
            return np.zeros(())
        wire = self.machine.wire(moves[0].axis, self.grid)
        messages = functools.reduce(np.maximum, (move.messages for move in moves))
        sent: Any = sum(move.sent for move in moves)
        received: Any = sum(move.received for move in moves)
        took: Array = wire.seconds(messages, sent, received)
        return took

    def seconds(self, synchronous: float) -> float:
        """Returns the mean epoch, of which a share `synchronous` reads no late rows."""
        waited, worked, hidden = self.late
        now = self.waited + self.worked + self.now
        late = self.waited + waited + max(self.worked + worked, hidden)
        return float(synchronous * now + (1 - synchronous) * late)


PASSES = 12  # times an epoch reads or writes the outcome of a layer, row by row


@dataclass(frozen=True, eq=False)
class Cost:
    """An epoch on one grid.

    exchange   bytes each rank receives in products [r, s, p], or their mean
    sums       bytes each rank receives in all-reduces, by what is summed
    messages   messages each rank sends in products [r, s, p]
    seconds    of the epoch
    memory     bytes that live at its peak, beside the interpreter's [r, s, p]
    early      bytes all ranks receive in products in the first epoch, and in the second
    """

    exchange: Array
    sums: dict[str, int]
    messages: Array
    seconds: float
    memory: Array
    early: tuple[int, int]

    def figures(self, size: int) -> dict[str, Any]:
        """Returns the same as fields of a `Plan`."""
        sums = sum(self.sums.values())
        by_rank = tuple(round(float(n)) + sums for n in self.exchange.ravel())
        every = len(by_rank) == size
        mean = float(self.exchange.mean()) + sums
        return {
            "bytes_by_rank": by_rank if every else (max(by_rank),),
            "exchange_bytes": round(float(self.exchange.max())),
            "sum_bytes": self.sums,
            "total_bytes": sum(by_rank) if every else round(mean * size),
            "messages": round(float(self.messages.max())),
            "seconds": self.seconds,
            "memory": round(float(self.memory.max())),
            "early_bytes": tuple(n + size * sums for n in self.early),
        }


class EpochProducts:
    """Prices what a training multiplies on one grid, products of each kind once.

    Args:
        flows: of products, of those against the edges, and of `HaloConv`, which always
            sends only what is needed.
        training: the model.
        dtype: of the features.
        last: the number of the layer whose exchanges a link leaves exact; None if products
            say so themselves.
    """

    def __init__(
        self,
        flows: tuple[Flow, Flow, Flow],
        training: Training,
        dtype: torch.dtype,
        last: int | None,
    ) -> None:
        self.flows, self.training = flows, training
        self._dtype, self._last = dtype, last
        self._known: dict[Any, ProductPath] = {}

    def _path(self, product: ProductShape, coding: Coding | None) -> ProductPath:
        flow, back, halo = self.flows
        codec = None if coding is None else coding.codec_of(product, self._last)
        key = product.width, product.transposed, product.halo, product.against, codec
        if key not in self._known:
            writing = Writing(codec, self._dtype)
            if product.halo:
                path = halo_path(halo, product, writing, flow.grid)
            else:
                rows = back if product.against else flow
                path = product_path(rows, product, self.training.itemsize, writing)
            self._known[key] = path
        return self._known[key]

    def moved(
        self, products: list[ProductShape], coding: Coding | None, clock: EpochClock
    ) -> tuple[Array, Array, Array]:
        """Returns bytes received, messages, and what a link keeps, of each rank `[r, s, p]`.

        Args:
            products: of an epoch.
            coding: the link; None is the exact one.
            clock: which they are added to.
        """
        nodes = self.flows[0].nodes
        shape = np.broadcast_shapes(nodes.shape, (1, 1, clock.grid[2]))
        whole = not np.issubdtype(nodes.dtype, np.floating)
        exchange, messages = np.zeros((2, *shape), np.int64 if whole else np.float64)
        kept = np.zeros(shape)
        for product in products:
            path = self._path(product, coding)
            exchange = exchange + path.received
            messages = messages + sum(move.messages for move in path.moves)
            late, back = 0, product.transposed
            if coding is not None and path.coded:
                late = coding.late(back)
                kept = kept + kept_by_link(path.moves, coding, back)
            clock.add(path, late)
        return exchange, messages, kept

    def early(
        self, ordering: MultiplyOrder, coding: Coding | None, **how: bool
    ) -> tuple[int, int]:
        """Returns what all ranks receive in the first and second epoch, but for sums.

        Args:
            ordering, how: as `Training.products` takes them.
            coding: the link, which begins to be used; None is the exact one.
        """
        flow, uses, found = self.flows[0], dict[Any, int](), []
        size = math.prod(flow.grid)
        for epoch in range(2):
            total, now = 0.0, None if coding is None else coding.early(epoch)
            for product in self.training.products(ordering, uses=uses, **how):
                path = self._path(product, now)
                came = np.broadcast_arrays(path.received, flow.nodes, path.width)[0]
                means = came.size < size
                total += float(came.mean() * size if means else came.sum())
            found.append(round(total))
        return found[0], found[1]

    def memory(
        self, products: list[ProductShape], orders: tuple[str, ...], kept_rows: int
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
        flow, _, halo = self.flows
        layers, grid = self.training.layers, flow.grid
        n, item = flow.nodes, self.training.itemsize
        block = sum(flow.nonzeros)[:, :, None]  # type: ignore[index]
        if all(product.halo for product in products) and set(orders) == {"halo"}:
            block = _placed(sum(halo.nonzeros)[:, :, None], grid)  # type: ignore[index]
        features = layers[0].width_in * (1 + (orders[0] == "kept")) * item + 9
        saved = sum(
            layer.width_in
            for order, layer in zip(orders, layers, strict=True)
            if order in ("first", "halo")
        )
        outs = [layer.width_out for layer in layers]
        widest = max([*outs, *(layer.width_in for layer in layers[1:])])
        active = (saved + sum(outs) + 3 * outs[-1] + 3 * widest) * item
        kept = _placed(halo.sides.ghost.ghosts[:, :, None], grid) * kept_rows * item
        out: Array = (
            40 * flow.edges
            + 24 * block
            + n * (16 + 8 + features + active)
            + self._halo_bytes(products)
            + 4 * item * sum(self.training.parameters)
            + kept
        )
        return out

    def _halo_bytes(self, products: list[ProductShape]) -> Array:
        flow, _, halo = self.flows
        p, item = flow.grid[2], self._dtype.itemsize
        wide = [
            max((one.width for one in products if one.halo == way), default=0)
            for way in (False, True)
        ]
        share = -(-wide[0] // p)
        rows = sum(side.ghosts + side.lent for side in flow.sides.all)
        inside = flow.fiber * share * self.training.itemsize * 2 if p > 1 else 0
        ghost = halo.sides.ghost
        fetched = (ghost.ghosts + ghost.lent)[:, :, None] * wide[1] * item
        product = (rows * share * item + inside)[:, :, None]  # type: ignore[operator,index]
        return np.maximum(product, _placed(fetched, flow.grid))


def epoch_cost(
    prices: EpochProducts,
    ordering: MultiplyOrder,
    coding: Coding | None,
    machine: Machine,
    adds_on_grid: bool,
) -> Cost:
    """Prices an epoch.

    Args:
        prices: of its products.
        ordering: how layers take A X W apart.
        coding: the link; None is the exact one. Rows of a coded link are summed where they
            are read, and none are kept.
        machine: the figures for seconds.
        adds_on_grid: whether rows that `HaloConv` sums are products on the grid.
    """
    flow, training, exact = prices.flows[0], prices.training, coding is None
    how: Any = {"adds_on_grid": adds_on_grid and exact, "keeps_rows": exact}
    products, orders = training.products(ordering, **how), training.orders(ordering)
    worked = machine.epoch + _dense_seconds(flow, training, machine)
    clock, size = EpochClock(flow.grid, machine, worked), math.prod(flow.grid)
    exchange, messages, kept = prices.moved(products, coding, clock)
    sums = training.sums(size)
    if coding is not None and size > 1:
        sums["agreement"] = [ring_words(1, size)] * any(o != "kept" for o in orders)
    clock.add_sums(sums, size)
    rows = training.kept_rows(ordering, **how)
    return Cost(
        exchange,
        {name: sum(group) for name, group in sums.items()},
        messages,
        clock.seconds(1.0 if coding is None else coding.synchronous),
        prices.memory(products, orders, rows) + kept,
        prices.early(ordering, coding, **how),
    )


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

"""Prices an epoch on one grid, the cost model: bytes, seconds and memory.

Bytes are exact: the ledger counts the same. Seconds are estimates from a `Machine`'s latency,
bandwidth and rates; they rank plans.

A product takes the steps of `GridMatrix.apply` (see [Note: order of a product] in
`ops/grid_matrix.py`); a step takes as long as its slowest rank. Exchanges of one step share a
link: alpha messages + bytes / beta, with all bytes, and the messages of the one with most:

    fiber | ghosts travel, while sums for others, which follow, and own columns are computed
          | far columns travel, while ghost columns of out rows, whose sums follow, and ghost
          columns of own rows are computed | far columns | fiber

Exchanges of late links overlap with all computation of the epoch.
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
from pyg_distcomm.plan.traffic import Array, Flow, LinkCounts
from pyg_distcomm.plan.training import ProductShape, Training


@dataclass(frozen=True, eq=False)
class ExchangeCost:
    """One exchange on every rank [r, s, p]: bytes each way, and messages sent.

    codec          the codec of the rows; None sends them as they are
    read, written  bytes of the rows that the codec decodes and encodes
    """

    axis: str
    received: Array
    sent: Array
    messages: Array
    codec: Codec | None = None
    read: Array | int = 0
    written: Array | int = 0

    def local_seconds(self, machine: Machine) -> Array:
        """Returns the seconds in which rows are gathered, coded and stored."""
        out: Array = (self.sent + self.received) / machine.stream
        if self.codec is None:
            return out
        return out + machine.coding_seconds(self.written, self.read)


@dataclass(frozen=True, eq=False)
class ProductPath:
    """One product: its exchanges, and the nonzeros that each step multiplies.

    fiber           exchanges over the fiber, before and after
    first, second   exchanges that travel together: ghosts, and sums for other ranks; then far
                    columns, and sums
    before, early   nonzeros multiplied during the first: for sums, and then the rest
    between, late   nonzeros multiplied during the second: for sums, and then the rest
    after           nonzeros multiplied after the second has arrived
    """

    fiber: tuple[ExchangeCost, ...]
    first: tuple[ExchangeCost, ...]
    second: tuple[ExchangeCost, ...]
    width: Array
    before: Array
    early: Array
    between: Array
    late: Array
    after: Array

    @property
    def moves(self) -> tuple[ExchangeCost, ...]:
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


def kept_by_link(
    moves: Iterable[ExchangeCost], coding: Coding, transposed: bool
) -> Any:
    """Returns the bytes that coded exchanges keep between epochs, as in `StaleBuffer`."""
    total, timing = np.zeros(()), coding.link.timing
    averaged, skips = timing.momentum(transposed) > 0, timing.skips(transposed)
    for move in moves:
        if move.codec is not None:
            total = total + (coding.late(transposed) + skips) * move.received
            total = total + move.read * averaged
            total = total + move.written * skips
    return total


def product_path(
    flow: Flow, product: ProductShape, itemsize: int, writing: Writing
) -> ProductPath:
    """Prices one product, as `GridMatrix.price` does on each rank.

    Args:
        flow: the rows that it exchanges and multiplies.
        product: its width and direction.
        itemsize: bytes of an element on the fiber.
        writing: codec and dtype of the rows on the other axes.
    """
    width = np.array(balanced_split(product.width, flow.grid[2]))[None, None, :]
    sides, (one, two) = flow.sides, ("row", "col")
    own, own_ghost, out_own, out_ghost, sum_own, own_far = flow.nonzeros
    if product.transposed:
        sides, (one, two) = sides.mirrored, ("col", "row")
        own_ghost, out_own, sum_own, own_far = out_own, own_ghost, own_far, sum_own
    # if no ghosts or sums have to arrive first, far columns and sums leave before own rows
    # are multiplied
    line = ("row", "col").index(one)
    others = np.any(sides.sums.ghosts > 0, axis=line, keepdims=True)
    waits = (sides.ghost.ghosts > 0) | others
    soon, later = (own + out_own) * waits, own * ~waits
    return ProductPath(
        _fiber_exchanges(flow, product.width, width, itemsize),
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
    """Prices one exchange of `HaloConv`: rows go to ghosts, or sums from ghosts to owners.

    Args:
        flow: its rows, on (P, 1, 1).
        product: its width and direction.
        writing: codec and dtype of the rows.
        grid: the grid of the ranks.
    """
    width = np.array([[[product.width]]])
    here = _on_grid(sum(flow.nonzeros)[:, :, None], grid)  # type: ignore[index]
    move = _move("world", flow.sides.ghost, width, writing, product.transposed)
    names = "received", "sent", "messages", "read", "written"
    facts = {name: _on_grid(getattr(move, name), grid) for name in names}
    none = np.zeros((1, 1, 1), np.int64)
    first = (replace(move, **facts),)
    return ProductPath((), first, (), width, none, none, here, none, none)


def _on_grid(each: Any, grid: Grid) -> Any:
    """Reshapes figures of ranks `[P, 1, 1]` to the grid; means are not reshaped."""
    found = np.asarray(each)
    return found.reshape(grid) if found.size == math.prod(grid) else found


def adds_on_grid(flow: Flow, halo: Flow, dtype: torch.dtype) -> bool:
    """Returns whether sums of rows are products; see `Topology.adds_on_grid`."""
    if flow.grid[1:] == (1, 1):
        return True
    one, plain = ProductShape(0, flow.grid[2], False), Writing(None, dtype)
    sums = product_path(flow, one, dtype.itemsize, plain).received.mean()
    rows = halo_path(halo, one, plain, flow.grid).received.mean()
    return bool(sums < rows)


def _move(
    axis: str, side: LinkCounts, width: Array, writing: Writing, back: bool = False
) -> ExchangeCost:
    """Prices an exchange over one link: rows go to ghosts, or with `back`, sums to owners."""
    received, sent = writing.sizes(side, width)
    rows = width * writing.dtype.itemsize
    ends = side.ghosts[:, :, None] * rows, side.sent[:, :, None] * rows
    peers = (side.sources if back else side.readers)[:, :, None] * (width > 0)
    if back:
        return ExchangeCost(axis, sent, received, peers, writing.codec, *ends[::-1])
    return ExchangeCost(axis, received, sent, peers, writing.codec, *ends)


def _fiber_exchanges(
    flow: Flow, total: int, width: Array, item: int
) -> tuple[ExchangeCost, ...]:
    """Prices the exchanges over the fiber, from own rows to a slice of features, and back."""
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
        ExchangeCost("fiber", others, away, (n > 0) * (wide - (width > 0))),
        ExchangeCost("fiber", away, others, (width > 0) * (busy - (n > 0))),
    )


@dataclass
class EpochClock:
    """Adds up the seconds of an epoch.

    Args:
        grid, machine: the grid and the machine of all products.
        worked: the seconds of computation other than products.
    """

    grid: Grid
    machine: Machine
    worked: float
    waited: float = 0.0  # seconds that wait for all-reduces
    now: float = 0.0  # seconds of products whose rows are of this epoch
    # seconds of products with late rows: waiting, working, and overlapped with the epoch
    late: Array = field(default_factory=lambda: np.zeros(3))

    def add(self, path: ProductPath, late: int) -> None:
        """Adds a product; each of its steps takes as long as its slowest rank."""
        machine, none = self.machine, np.zeros(())
        fiber = sum(
            float(np.max(self._travel((move,)) + move.local_seconds(machine)))
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
            # communication overlaps with multiplication; encoding and copying do not
            local = sum(move.local_seconds(machine) for move in moves)
            travel, follow = self._travel(moves), self._travel(moves[1:])
            slowest = np.maximum(travel, ahead + np.maximum(follow, beside)) + local
            now += float(np.max(slowest))
            worked, hidden = worked + ahead + beside + local, hidden + travel
        parts = (fiber, worked, hidden) if late else (now, 0.0, 0.0)
        self.now += now
        self.late += [float(np.max(part)) for part in parts]

    def add_sums(self, sums: Mapping[str, Sequence[int]], size: int) -> None:
        """Adds all-reduces over `size` ranks, given the bytes that each rank receives."""
        wire = self.machine.sum_wire
        for each in (n for group in sums.values() for n in group):
            self.waited += float(wire.seconds(sum_messages(size), each, each))

    def _travel(self, moves: tuple[ExchangeCost, ...]) -> Array:
        """Returns the seconds of exchanges that run at once over one axis."""
        if not any(np.any(move.messages) for move in moves):
            return np.zeros(())
        wire = self.machine.wire
        messages = functools.reduce(np.maximum, (move.messages for move in moves))
        sent: Any = sum(move.sent for move in moves)
        received: Any = sum(move.received for move in moves)
        took: Array = wire.seconds(messages, sent, received)
        return took

    def seconds(self, synchronous: float) -> float:
        """Returns the mean seconds of an epoch; a fraction `synchronous` reads no late rows."""
        waited, worked, hidden = self.late
        now = self.waited + self.worked + self.now
        late = self.waited + waited + max(self.worked + worked, hidden)
        return float(synchronous * now + (1 - synchronous) * late)


PASSES = 12  # reads and writes of a layer's output in an epoch, beside its products


class EpochProducts:
    """Prices the products of a training on one grid; each kind of product is priced once.

    Args:
        flows: the rows of products, and of layers that read rows, of which only those that
            are needed travel.
        training: the model.
        dtype: the dtype of the features.
    """

    def __init__(
        self,
        flows: tuple[Flow, Flow],
        training: Training,
        dtype: torch.dtype,
    ) -> None:
        self.flows, self.training, self._dtype = flows, training, dtype
        self._known: dict[Any, ProductPath] = {}

    def _path(self, product: ProductShape, coding: Coding | None) -> ProductPath:
        (flow, halo), last = self.flows, len(self.training.layers) - 1
        codec = None if coding is None else coding.codec_of(product, last)
        key = product.width, product.transposed, product.halo, codec
        if key not in self._known:
            writing = Writing(codec, self._dtype)
            if product.halo:
                path = halo_path(halo, product, writing, flow.grid)
            else:
                path = product_path(flow, product, self.training.itemsize, writing)
            self._known[key] = path
        return self._known[key]

    def totals(
        self, products: list[ProductShape], coding: Coding | None, clock: EpochClock
    ) -> tuple[Array, Array, Array]:
        """Returns bytes received, messages, and bytes kept by a link, by rank `[r, s, p]`.

        Args:
            products: the products of an epoch.
            coding: the link; None is the exact one.
            clock: takes the seconds of the products.
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

    def memory(
        self, products: list[ProductShape], orders: tuple[str, ...], kept_rows: int
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
        flow, halo = self.flows
        layers, grid = self.training.layers, flow.grid
        n, item = flow.nodes, self.training.itemsize
        block = sum(flow.nonzeros)[:, :, None]  # type: ignore[index]
        if all(product.halo for product in products) and set(orders) == {"halo"}:
            block = _on_grid(sum(halo.nonzeros)[:, :, None], grid)  # type: ignore[index]
        features = layers[0].width_in * (1 + (orders[0] == "kept")) * item + 9
        saved = sum(
            layer.width_in
            for order, layer in zip(orders, layers, strict=True)
            if order in ("first", "halo")
        )
        outs = [layer.width_out for layer in layers]
        widest = max([*outs, *(layer.width_in for layer in layers[1:])])
        active = (saved + sum(outs) + 3 * outs[-1] + 3 * widest) * item
        kept = _on_grid(halo.sides.ghost.ghosts[:, :, None], grid) * kept_rows * item
        out: Array = (
            40 * flow.edges
            + 24 * block
            + n * (16 + 8 + features + active)
            + self._halo_bytes(products)
            + 4 * item * self.training.parameters
            + kept
        )
        return out

    def _halo_bytes(self, products: list[ProductShape]) -> Array:
        flow, halo = self.flows
        p, item = flow.grid[2], self._dtype.itemsize
        wide = [
            max((one.width for one in products if one.halo == way), default=0)
            for way in (False, True)
        ]
        share = -(-wide[0] // p)
        rows = sum(side.ghosts + side.sent for side in flow.sides.all)
        inside = flow.fiber * share * self.training.itemsize * 2 if p > 1 else 0
        ghost = halo.sides.ghost
        fetched = (ghost.ghosts + ghost.sent)[:, :, None] * wide[1] * item
        product = (rows * share * item + inside)[:, :, None]  # type: ignore[operator,index]
        return np.maximum(product, _on_grid(fetched, flow.grid))


def epoch_cost(
    prices: EpochProducts,
    ordering: MultiplyOrder,
    coding: Coding | None,
    machine: Machine,
    adds_on_grid: bool,
) -> dict[str, Any]:
    """Returns the cost of an epoch, as fields of a `Plan`.

    Args:
        prices: the prices of its products.
        ordering: the order in which layers multiply A X W.
        coding: the link; None is the exact one. Rows of a coded link are summed on the rank
            that reads them, and none are cached.
        machine: the figures for seconds.
        adds_on_grid: whether rows that `HaloConv` sums are products on the grid.
    """
    flow, training, exact = prices.flows[0], prices.training, coding is None
    how: Any = {"adds_on_grid": adds_on_grid and exact, "keeps_rows": exact}
    products, orders = training.products(ordering, **how), training.orders(ordering)
    worked = machine.epoch + _dense_seconds(flow, training, machine)
    clock, size = EpochClock(flow.grid, machine, worked), math.prod(flow.grid)
    exchange, messages, kept = prices.totals(products, coding, clock)
    sums = training.sums(size)
    if coding is not None and size > 1:
        sums["agreement"] = [ring_words(1, size)] * any(o != "kept" for o in orders)
    clock.add_sums(sums, size)
    rows = training.kept_rows(ordering, **how)
    memory = prices.memory(products, orders, rows) + kept
    sum_bytes = {name: sum(group) for name, group in sums.items()}
    every = sum(sum_bytes.values())
    by_rank = tuple(round(float(n)) + every for n in exchange.ravel())
    known = len(by_rank) == size  # of a law of degrees only means
    total = sum(by_rank) if known else round((float(exchange.mean()) + every) * size)
    return {
        "bytes_by_rank": by_rank if known else (max(by_rank),),
        "exchange_bytes": round(float(exchange.max())),
        "sum_bytes": sum_bytes,
        "total_bytes": total,
        "messages": round(float(messages.max())),
        "seconds": clock.seconds(1.0 if coding is None else coding.synchronous),
        "memory": round(float(memory.max())),
    }


def sum_messages(size: int) -> int:
    """Returns the number of sequential steps of an all-reduce.

    Assumes halving and doubling, as in [Thakur05] Sec. 4: it moves as many bytes as a ring.
    """
    return 2 * math.ceil(math.log2(max(size, 1)))


def _dense_seconds(flow: Flow, training: Training, machine: Machine) -> float:
    """Returns the seconds of local computation, on the rank with most nodes."""
    rows, total = float(flow.nodes.max()), 0.0
    for layer in training.layers:
        times = 2 + layer.needs_gradient  # X W, its dW, its dX
        one = machine.linear_seconds(rows, layer.width_in, layer.width_out)
        dense = 2 if layer.kind == "sage" else 1
        passes = PASSES * rows * layer.width_out * training.itemsize / machine.stream
        total += float(times * dense * one) + passes + machine.overhead
    return total

"""Passage: one product on a grid: its exchanges, what each step multiplies, and how long.

Seconds follow the steps of `GridMatrix.apply` (see [Note: order of a product] in
`ops/multiply.py`), each as long as its slowest rank takes. What travels at once shares the
link, with alpha messages + bytes / beta for all of it; messages begin while others travel,
so alpha counts for the exchange that has most. That sums leave in parts, and that those for
others may land later, is not counted. What a link lets through at once it has saved up while
nothing was sent:

    fiber | ghosts travel, beside sums for others, which follow, and the own columns
          | far columns travel, beside the ghost columns of out rows, whose sums follow, and
          the ghost columns of own rows | far columns | fiber
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyg_distcomm.comm.price import balanced_split
from pyg_distcomm.halo.codec import Codec
from pyg_distcomm.plan.block_traffic import Array, Side
from pyg_distcomm.plan.codecs import Writing
from pyg_distcomm.plan.machine import Machine
from pyg_distcomm.plan.traffic import Flow
from pyg_distcomm.plan.training import ProductShape


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
    def groups(self) -> tuple[tuple[Move, ...], ...]:
        """All exchanges, in order; those of a group travel at once, over one axis."""
        return (self.split,), self.first, self.second, (self.join,)

    @property
    def received(self) -> Array:
        """Bytes received `[r, s, p]`."""
        out: Array = sum(move.received for move in self.moves)  # type: ignore[assignment]
        return out


def passage(
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


def halo_passage(flow: Flow, product: ProductShape, writing: Writing) -> ProductPath:
    """Prices one exchange of `HaloConv`: rows come, or their sums go home."""
    side, width = flow.sides.ghost, np.array([[[product.width]]])
    none = np.zeros((1, 1, 1), np.int64)
    still = Move("world", none, none, none)
    here = sum(flow.nonzeros)[:, :, None]  # type: ignore[index]
    if product.transposed:
        both = (still, still), (still, _back("world", side, width, writing))
    else:
        both = (_there("world", side, width, writing), still), (still, still)
    return ProductPath(still, *both, still, width, none, none, here, none, none)


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


def product_seconds(
    found: ProductPath, flow: Flow, machine: Machine, saved: Any
) -> tuple[float, Array]:
    """Returns the seconds of one product, and what links have saved up when it ends.

    Every step waits for its slowest rank.

    Args:
        found, flow, machine: the product.
        saved: seconds for which the links have saved up, before it.
    """
    total, none = 0.0, np.zeros(())
    steps: tuple[tuple[tuple[Move, ...], tuple[Move, ...], Array, Array], ...] = (
        ((found.split,), (), none, none),
        (found.first[:1], found.first[1:], found.before, found.early),
        (found.second[:1], found.second[1:], found.between, found.late),
        ((), (), found.after, none),
        ((found.join,), (), none, none),
    )
    for rows, sums, *nonzeros in steps:
        ahead, beside = (machine.multiply_seconds(n, found.width) for n in nonzeros)
        travel, left = _travel(rows + sums, flow, machine, saved)
        follow, _ = _travel(sums, flow, machine, saved + ahead)
        # what is coded and put down cannot be hidden, what travels can
        handled = sum(move.handled(machine) for move in rows + sums)
        slowest = np.maximum(travel, ahead + np.maximum(follow, beside)) + handled
        took = float(slowest.max())
        total, saved = total + took, left + (took - travel)
    return total, saved


def late_seconds(
    found: ProductPath, flow: Flow, machine: Machine
) -> tuple[float, float, float]:
    """Returns the seconds of one product whose rows are read in a later epoch.

    Returns:
        Those it waits (the fiber's steps are never late), those it computes and codes,
        and those of messages, which have the whole epoch to arrive.
    """
    fiber = (found.split, found.join)
    waited = sum(_travel((m,), flow, machine)[0] + m.handled(machine) for m in fiber)
    moves = (*found.first, *found.second)
    nonzeros = found.before + found.early + found.between + found.late + found.after
    work = machine.multiply_seconds(nonzeros, found.width)
    work = work + sum(move.handled(machine) for move in moves)
    both = found.first, found.second
    hidden = sum(_travel(moves, flow, machine)[0] for moves in both)
    return tuple(float(np.max(part)) for part in (waited, work, hidden))  # type: ignore[return-value]


def carried_seconds(found: ProductPath, flow: Flow, machine: Machine) -> Array:
    """Returns the seconds that each rank's bytes take at the rates that links hold."""
    total: Array = np.zeros(())
    for moves in filter(None, found.groups):
        link = machine.wire(moves[0].axis, flow.grid)
        ways = sum(move.sent for move in moves), sum(move.received for move in moves)
        total = total + np.maximum(*ways) / link.bandwidth
    return total


def _travel(
    moves: tuple[Move, ...], flow: Flow, machine: Machine, saved: Any = math.inf
) -> tuple[Array, Array]:
    """Returns the seconds of what travels at once, over one axis, and what is saved then.

    Args:
        moves, flow, machine: what travels.
        saved: seconds in which the link has saved up what it lets through at once.
    """
    if not any(np.any(move.messages) for move in moves):
        return np.zeros(()), saved
    link = machine.wire(moves[0].axis, flow.grid)
    messages = functools.reduce(np.maximum, (move.messages for move in moves))
    sent: Any = sum(move.sent for move in moves)
    received: Any = sum(move.received for move in moves)
    saved, idle = np.minimum(saved, link.burst), link.latency * messages
    took: Array = link.seconds(messages, sent, received, saved)
    spent = np.maximum(sent, received) / link.bandwidth - (took - idle)
    return took, saved - np.maximum(spent, 0.0) + idle

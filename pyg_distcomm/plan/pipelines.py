"""Prices pipelines: layers in stages, and chunks of nodes that stream through them.

Symbols: P ranks, S stages of W ranks, M chunks, L layers, n own nodes of a rank, h ghosts.

    bytes      of each border, n d forward and n d back; of each exchange in a stage, h d
               forward and what is lent back; as `pipeline.price` has them, exactly; coded,
               the most there can be
    seconds    M turns of the slowest stage and S - 1 to fill, forward and back; messages
               between stages overlap with computing, as late ones inside a stage do
    memory     of each exchange n + h rows, as many of history, n of gradients; borders
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import torch

from pyg_distcomm.comm.collectives import ring_words
from pyg_distcomm.graph.product_cache import MultiplyOrder
from pyg_distcomm.nn.message_forms import check_aggregations
from pyg_distcomm.pipeline.layer_stack import check_untied, cut_layers
from pyg_distcomm.pipeline.schedule import BUBBLE, bubble, fewest_chunks
from pyg_distcomm.plan.codecs import Coding, Writing
from pyg_distcomm.plan.cost import PASSES, Move, kept_by_link, sum_messages
from pyg_distcomm.plan.machine import Machine, Wire
from pyg_distcomm.plan.model_profile import Item, Read
from pyg_distcomm.plan.plans import Plan
from pyg_distcomm.plan.traffic import Array, Flow
from pyg_distcomm.plan.training import LOSS_ITEM, LOSS_WORDS, Training

BACK = (
    3  # a backward pass to a forward pass: two products for one, and it computes again
)
ROWS_ONLY = "the stages of a pipeline have rows only, a grid (W, 1, 1)"


def items_of(training: Training, skips: int) -> list[Item]:
    """Reads the items of a stack from the widths of its layers."""
    found = []
    for i, layer in enumerate(training.layers):
        pair = layer.width_in, layer.width_out
        # chunks multiply the narrower side, whatever needs gradients
        after = layer.kind != "halo" and not MultiplyOrder().takes_first(
            *pair, (False, False)
        )
        found.append(
            Item(
                1.0,
                (Read(pair[after], after or training.wants_gradient(i)),),
                (pair, pair) if layer.kind == "sage" else (pair,),
                sum(layer.parameters),
                layer.width_out * (1 + skips),
                skips,
            )
        )
    return found


@dataclass(frozen=True, eq=False)
class LayerProfile:
    """A deep model on a graph, to be cut into stages.

    Args:
        items: its layers, in order.
        training: their kinds and widths, and the size of a number.
        share: what so many ranks exchange for a layer; raises ValueError with the reason
            if the graph cannot be cut for them.
        nodes: of the graph.
        chunks: how many; None is the fewest that the bubble allows, as in `Pipeline`.
        machine: the figures for seconds.
        links: by which rows may travel inside a stage; None is the exact one.
        dtype: of the rows.
    """

    items: list[Item]
    training: Training
    share: Callable[[int], Flow]
    nodes: int
    chunks: int | None
    machine: Machine
    links: Sequence[Coding | None] = (None,)
    dtype: torch.dtype = torch.float32
    bubble: float = BUBBLE

    def plans(self, size: int) -> list[Plan]:
        """Returns a plan, or the reason against it, for each way to cut so many ranks."""
        found = []
        for stages in (d for d in range(2, size + 1) if size % d == 0):
            ways = size // stages
            links = self.links if ways > 1 else (None,)  # one rank ignores a link
            found += [self._plan(size, stages, link) for link in links]
            for r in (d for d in range(1, ways) if ways % d == 0):
                for s in (d for d in range(1, ways // r + 1) if ways // r % d == 0):
                    grid = r, s, ways // (r * s)
                    found.append(Plan(grid, stages=stages, reason=ROWS_ONLY))
        return found

    def _plan(self, size: int, stages: int, coding: Coding | None) -> Plan:
        fewest = fewest_chunks(stages, self.bubble)
        chunks = fewest if self.chunks is None else self.chunks
        grid = size // stages, 1, 1
        none = Plan(grid, stages=stages, chunks=chunks, exact=False)
        if coding is not None:
            none = replace(none, codec=coding.name, link=coding.link, sized=False)
        if stages > len(self.items):
            count = f"{len(self.items)} layers"
            return replace(none, reason=f"{stages} stages need more than {count}")
        if chunks > self.nodes:
            return replace(none, reason=f"{chunks} chunks, but {self.nodes} nodes")
        try:
            flow = self.share(size // stages)
            alpha = _alpha(self.share(size), size, self.nodes)
            cut = Staged(self, flow, stages, size // stages, chunks, coding)
            cut.check()
        except ValueError as error:
            return replace(none, reason=str(error))
        by_rank = [round(float(n)) for n in cut.bytes.ravel()]
        every = len(by_rank) == size
        return replace(
            none,
            orders=("chunked",),
            halo="rows",
            bytes_by_rank=tuple(by_rank) if every else (max(by_rank),),
            exchange_bytes=round(float((cut.border + cut.rows).max())),
            sum_bytes={
                "parameters": int(cut.weights.max()),
                "loss": int(cut.loss.max()),
            },
            total_bytes=round(float(cut.bytes.mean()) * size),
            messages=round(float(cut.messages.max())),
            seconds=cut.seconds(),
            memory=round(float(cut.memory().max())),
            exact=chunks == 1 and (coding is None or coding.exact),
            balance=cut.balance,
            remark=self._verdict(cut, alpha),
        )

    def _verdict(self, cut: Staged, alpha: float) -> str:
        """Compares the rows of a node that travel with those of graph parallelism."""
        reads = sum(len(item.reads) for item in self.items)
        skips = max(self.items[k].skips for k in cut.borders)
        between = (cut.stages - 1) * (1 + skips)
        inside = reads * _alpha(cut.flow, cut.ways, self.nodes)
        other = reads * alpha
        more = f" + L alpha(W) = {inside:.3g}" if cut.ways > 1 else ""
        loses = between + inside >= other
        why = "it loses: the model is too shallow, or few edges are cut"
        return (
            f"{cut.stages} stages x {cut.ways}, {cut.chunks} chunks, bubble "
            f"{bubble(cut.stages, cut.chunks):.0%}: (S-1)(1+s) = {between}{more} rows a node "
            f"each way, against L alpha(P) = {other:.3g} of graph parallelism: "
            f"{why if loses else f'{other / (between + inside):.3g} times fewer'}"
        )


def _alpha(flow: Flow, ranks: int, nodes: int) -> float:
    """Returns the ghosts of all ranks over the nodes."""
    return float(flow.sides.ghost.ghosts.mean()) * ranks / max(nodes, 1)


class Staged:
    """A model cut into stages; arrays are `[S, W]`, or `[S, 1]` where ranks are alike.

    Args:
        deep: the model.
        flow: what a stage's ranks exchange.
        stages, ways, chunks: S, W and M.
        coding: how rows travel inside a stage.
    """

    def __init__(
        self,
        deep: LayerProfile,
        flow: Flow,
        stages: int,
        ways: int,
        chunks: int,
        coding: Coding | None = None,
    ) -> None:
        self.deep, self.flow = deep, flow
        self.stages, self.ways, self.chunks = stages, ways, chunks
        self.coding = coding
        items = deep.items
        self.balance = tuple(cut_layers([item.cost for item in items], stages))
        ends = list(accumulate(self.balance, initial=0))
        self.borders = [end - 1 for end in ends[1:-1]]
        self._of = [items[a:b] for a, b in pairwise(ends)]
        item, side = deep.training.itemsize, flow.sides.ghost
        self._n = flow.nodes.reshape(1, -1)
        self._ghosts = np.broadcast_to(side.ghosts.reshape(1, -1), self._n.shape)
        self._there, self._back = self._moves(False), self._moves(True)
        into = [0, *(items[k].carried for k in self.borders)]
        out = [*(items[k].carried for k in self.borders), 0]
        self._into, self._out = (np.array([x]).T for x in (into, out))
        self.border = self._n * (self._into + self._out) * item
        self.rows = self._by_stage(lambda move: move.received)
        numbers = [sum(one.parameters for one in part) for part in self._of]
        weights = [ring_words(n, ways) * item for n in numbers]
        self.weights = np.array([weights]).T
        last = 2 * ring_words(LOSS_WORDS, ways) * LOSS_ITEM
        loss = np.full((stages, 1), ring_words(1, stages) * LOSS_ITEM)
        loss[-1] += last
        self.loss = loss
        self.bytes = self.border + self.rows + self.weights + self.loss
        self._numbers = np.array([numbers]).T

    def check(self) -> None:
        """Raises a ValueError where `Pipeline` would refuse these stages, or the link."""
        coding, items = self.coding, self.deep.items
        for layers in (readers for item in items for readers in item.readers):
            if coding is not None:
                check_aggregations(layers, coding.link)
        for border in self.borders:
            if items[border].stuck:
                raise ValueError(items[border].stuck)
        stack = [item.layer for item in items if item.layer is not None]
        if stack:
            check_untied(stack, self.balance)

    def _total(self, of: Callable[[Item], float]) -> Array:
        """Adds something up over the items of each stage."""
        return np.array([[sum(of(one) for one in part)] for part in self._of])

    def _moves(self, back: bool) -> list[list[Move]]:
        """Returns the exchanges of each stage, one way, each of all chunks together."""
        last = sum(len(one.reads) for one in self.deep.items) - 1
        place = 0
        found: list[list[Move]] = []
        for part in self._of:
            found.append([])
            for read in (r for one in part for r in one.reads):
                flows = read.flows or (read.behind and len(found) > 1)
                if flows or not back:
                    exact = read.exact or (0 < place == last and self._spares_last)
                    found[-1].append(self._move(read.width, exact, back))
                place += 1
        return found

    @property
    def _spares_last(self) -> bool:
        return self.coding is not None and self.coding.link.exact_last

    def _move(self, width: int, exact: bool, back: bool) -> Move:
        coding, side = self.coding, self.flow.sides.ghost
        codec = None
        if coding is not None and not exact:
            codec = coding.gradients if back else coding.rows
        writing, row = Writing(codec, self.deep.dtype), width * self.deep.dtype.itemsize
        ends = writing.in_chunks(side, width, self.chunks, self.ways - 1)
        rows = side.ghosts * row, side.lent * row
        peers = side.sources if back else side.readers
        if codec is not None and not codec.fixed_size:  # sizes go ahead
            peers = peers + self.ways - 1
        if back:
            ends, rows = ends[::-1], rows[::-1]
        found = (x.reshape(1, -1) for x in (*ends, self.chunks * peers, *rows))
        received, sent, messages, read, written = found
        return Move("row", received, sent, messages, codec, read, written)

    def _by_stage(self, of: Callable[[Move], Array]) -> Array:
        """Adds something up over the exchanges of each stage, both ways."""
        both = zip(self._there, self._back, strict=True)
        none = np.zeros_like(self._n)
        return np.concatenate([sum(map(of, (*a, *b)), none) for a, b in both])

    @property
    def messages(self) -> Array:
        """Messages that each rank sends, at most."""
        ends = self.chunks * ((self._into > 0).astype(np.int64) + (self._out > 0))
        out: Array = ends + self._by_stage(lambda move: move.messages)
        return out

    def seconds(self) -> float:
        """Returns the seconds of an epoch, a share of which waits for its own rows."""
        now, coding = self._seconds(False), self.coding
        if coding is None or not coding.link.timing.is_late:
            return now
        share = coding.synchronous
        return share * now + (1 - share) * self._seconds(True)

    def _seconds(self, late: bool) -> float:
        deep, chunks = self.deep, self.chunks
        machine, item = deep.machine, deep.training.itemsize
        loops = self._n * deep.training.adds_loops
        nonzeros = sum(self.flow.nonzeros).reshape(1, -1) + loops  # type: ignore[union-attr]

        def work(one: Item) -> Array:
            took = sum(machine.multiply_seconds(nonzeros, r.width) for r in one.reads)
            took = took + sum(machine.linear_seconds(self._n, *w) for w in one.dense)
            wide = one.carried / (1 + one.skips)
            took = took + PASSES / 3 * self._n * wide * item / machine.stream
            out: Array = took + len(one.reads) * machine.overhead / 3 * chunks
            return out

        forward = np.concatenate([sum(map(work, part)) for part in self._of])  # type: ignore[arg-type]
        link = Wire(machine.latency, machine.bandwidth)
        hop = machine.lines.get((self.stages, self.ways), link)
        total, hidden = machine.epoch, 0.0
        for back in (False, True):
            waited, behind = self._halos(back, late)
            each = (forward * (BACK if back else 1) + waited) / chunks
            rows = self._n * np.maximum(self._into, self._out) * item / chunks
            turn = np.maximum(each, hop.seconds(1, rows, rows))
            first = each.max() + float(hop.seconds(1, rows, rows).max())
            total += chunks * float(turn.max()) + (self.stages - 1) * float(first)
            hidden += float(behind.max())
        sums, steps = machine.sum_wire(), sum_messages(self.ways)
        weights = float(self.weights.max())
        end = float(self.loss.max())
        total = max(total, hidden) + float(sums.seconds(steps, weights, weights))
        return total + float(sums.seconds(sum_messages(self.stages), end, end))

    def _halos(self, back: bool, late: bool) -> tuple[Array, Array]:
        """Returns the seconds of exchanges inside each stage, one way: waited for, and not."""
        machine, coding = self.deep.machine, self.coding
        link = machine.wire("row", (self.ways, 1, 1))
        late = late and coding is not None and coding.late(back) > 0
        waited, behind = np.zeros((2, self.stages, self._n.size))
        for stage, moves in enumerate(self._back if back else self._there):
            for move in moves:
                took = link.seconds(move.messages, move.sent, move.received)
                waited[stage] += move.handled(machine)[0]
                held = behind if late and move.codec is not None else waited
                held[stage] += took[0]
        return waited, behind

    def memory(self) -> Array:
        """Returns the bytes of each rank at the peak of an epoch, about.

        As in `cost.EpochProducts.memory`: edges and blocks, features, parameters; beside them
        rows that exchanges read, their history and gradients, borders, and a chunk's
        activations.
        """
        item, n = self.deep.training.itemsize, self._n
        copies = 2 if self.chunks > 1 else 1
        there = self._total(lambda one: sum(r.width for r in one.reads))
        back = self._total(lambda one: sum(r.width * r.flows for r in one.reads))
        sites = ((n + self._ghosts) * there * copies + n * back) * item
        blocks = sum(self.flow.nonzeros).reshape(1, -1)  # type: ignore[union-attr]
        active = self._total(lambda one: one.carried + sum(b for _, b in one.dense))
        features = self.deep.training.layers[0].width_in * item + 33
        out: Array = (
            sites
            + self.border
            + 40 * self.flow.edges.reshape(1, -1)
            + 24 * blocks
            + n * (features + 3 * active * item / self.chunks)
            + 4 * item * self._numbers
            + self._kept()
        )
        return out

    def _kept(self) -> Array:
        """Returns the bytes that coded exchanges keep from epoch to epoch."""
        if self.coding is None:
            return np.zeros_like(self._n)
        found = [
            kept_by_link(there, self.coding, False)
            + kept_by_link(back, self.coding, True)
            for there, back in zip(self._there, self._back, strict=True)
        ]
        return np.concatenate([np.broadcast_to(kept, self._n.shape) for kept in found])

"""Prices pipelines: layers in stages, and chunks of nodes that stream through them.

Symbols: P ranks, S stages of W ranks, M chunks, L layers, n own nodes of a rank, h ghosts.

    bytes      of each border, n d forward and n d backward; of each exchange in a stage, h d
               forward and the rows sent backward. They equal `Pipeline.price` exactly; with a
               codec they are an upper bound
    seconds    M turns of the slowest stage and S - 1 to fill, forward and backward; messages
               between stages, and late ones inside a stage, overlap with computation
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
from pyg_distcomm.plan.cost import PASSES, ExchangeCost, kept_by_link, sum_messages
from pyg_distcomm.plan.machine import Machine, Wire
from pyg_distcomm.plan.model_profile import Item, Read
from pyg_distcomm.plan.plans import Plan
from pyg_distcomm.plan.traffic import Array, Flow
from pyg_distcomm.plan.training import LOSS_WORDS, Training

# a backward pass to a forward pass: two products for one, and it computes again
BACK = 3
LOSS_ITEM = 8  # bytes of the loss that stages tell each other
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
class PipelinePlanner:
    """Plans pipelines of a deep model on a graph, for all numbers of stages.

    Args:
        items: its layers, in order.
        training: their kinds and widths, and the size of an element.
        share: returns the rows that a number of ranks exchange for a layer; raises a
            ValueError with the reason if the graph cannot be cut for them.
        nodes: the number of nodes.
        chunks: the number of chunks; None is the fewest that the bubble allows.
        machine: the figures for seconds.
        links: the links for rows inside a stage; None is the exact one.
        dtype: the dtype of the rows.
        bubble: the fraction of turns that stages may be idle.
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
        """Returns a plan, refused or not, for each number of stages of `size` ranks."""
        found = []
        for stages in (d for d in range(2, size + 1) if size % d == 0):
            ranks = size // stages
            links = self.links if ranks > 1 else (None,)  # one rank ignores a link
            found += [self._plan(size, stages, link) for link in links]
            for r in (d for d in range(1, ranks) if ranks % d == 0):
                for s in (d for d in range(1, ranks // r + 1) if ranks // r % d == 0):
                    grid = r, s, ranks // (r * s)
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
            cut = StagedModel(self, flow, stages, size // stages, chunks, coding)
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
            remark=self._compare_with_grids(cut, alpha),
        )

    def _compare_with_grids(self, cut: StagedModel, alpha: float) -> str:
        """Describes the rows that travel for a node beside those of graph parallelism."""
        reads = sum(len(item.reads) for item in self.items)
        skips = max(self.items[k].skips for k in cut.borders)
        between = (cut.stages - 1) * (1 + skips)
        inside = reads * _alpha(cut.flow, cut.ranks, self.nodes)
        other = reads * alpha
        more = f" + L alpha(W) = {inside:.3g}" if cut.ranks > 1 else ""
        loses = between + inside >= other
        why = "it loses: the model is too shallow, or few edges are cut"
        return (
            f"{cut.stages} stages x {cut.ranks}, {cut.chunks} chunks, bubble "
            f"{bubble(cut.stages, cut.chunks):.0%}: (S-1)(1+s) = {between}{more} rows a node "
            f"each way, against L alpha(P) = {other:.3g} of graph parallelism: "
            f"{why if loses else f'{other / (between + inside):.3g} times fewer'}"
        )


def _alpha(flow: Flow, ranks: int, nodes: int) -> float:
    """Returns alpha, the ghosts of all ranks divided by the nodes."""
    return float(flow.sides.ghost.ghosts.mean()) * ranks / max(nodes, 1)


class StagedModel:
    """A model cut into stages; arrays are `[S, W]`, or `[S, 1]` if ranks are equal.

    Args:
        planner: the model.
        flow: what a stage's ranks exchange.
        stages, ranks, chunks: S, W and M.
        coding: how rows travel inside a stage.
    """

    def __init__(
        self,
        planner: PipelinePlanner,
        flow: Flow,
        stages: int,
        ranks: int,
        chunks: int,
        coding: Coding | None = None,
    ) -> None:
        self.planner, self.flow = planner, flow
        self.stages, self.ranks, self.chunks = stages, ranks, chunks
        self.coding = coding
        items = planner.items
        self.balance = tuple(cut_layers([item.cost for item in items], stages))
        ends = list(accumulate(self.balance, initial=0))
        self.borders = [end - 1 for end in ends[1:-1]]
        self._items_by_stage = [items[a:b] for a, b in pairwise(ends)]
        item, side = planner.training.itemsize, flow.sides.ghost
        self._own_nodes = flow.nodes.reshape(1, -1)
        self._ghosts = np.broadcast_to(
            side.ghosts.reshape(1, -1), self._own_nodes.shape
        )
        self._forward, self._backward = self._moves(False), self._moves(True)
        into = [0, *(items[k].crossing_width for k in self.borders)]
        out = [*(items[k].crossing_width for k in self.borders), 0]
        self._width_in, self._width_out = (np.array([x]).T for x in (into, out))
        self.border = self._own_nodes * (self._width_in + self._width_out) * item
        self.rows = self._by_stage(lambda move: move.received)
        numbers = [sum(one.parameters for one in part) for part in self._items_by_stage]
        weights = [ring_words(n, ranks) * item for n in numbers]
        self.weights = np.array([weights]).T
        loss = np.full((stages, 1), ring_words(1, stages) * LOSS_ITEM)
        loss[-1] += ring_words(LOSS_WORDS, ranks) * item  # of its last stage's nodes
        self.loss = loss
        self.bytes = self.border + self.rows + self.weights + self.loss
        self._numbers = np.array([numbers]).T

    def check(self) -> None:
        """Raises a ValueError if `Pipeline` would refuse these stages, or the link."""
        coding, items = self.coding, self.planner.items
        for layers in (readers for item in items for readers in item.readers):
            if coding is not None:
                check_aggregations(layers, coding.link)
        for border in self.borders:
            if items[border].border_problem:
                raise ValueError(items[border].border_problem)
        stack = [item.layer for item in items if item.layer is not None]
        if stack:
            check_untied(stack, self.balance)

    def _total(self, of: Callable[[Item], float]) -> Array:
        """Returns the sum of `of` over the items of each stage."""
        return np.array(
            [[sum(of(one) for one in part)] for part in self._items_by_stage]
        )

    def _moves(self, backward: bool) -> list[list[ExchangeCost]]:
        """Returns the exchanges of each stage in one direction, of all chunks together."""
        last = sum(len(one.reads) for one in self.planner.items) - 1
        place = 0
        found: list[list[ExchangeCost]] = []
        for part in self._items_by_stage:
            found.append([])
            for read in (r for one in part for r in one.reads):
                needs_gradient = read.needs_gradient or (
                    read.gradient_behind and len(found) > 1
                )
                if needs_gradient or not backward:
                    exact = read.exact or (0 < place == last and self._exact_last)
                    found[-1].append(self._move(read.width, exact, backward))
                place += 1
        return found

    @property
    def _exact_last(self) -> bool:
        return self.coding is not None and self.coding.link.exact_last

    def _move(self, width: int, exact: bool, backward: bool) -> ExchangeCost:
        coding, side = self.coding, self.flow.sides.ghost
        codec = None
        if coding is not None and not exact:
            codec = coding.gradients if backward else coding.rows
        writing, row = (
            Writing(codec, self.planner.dtype),
            width * self.planner.dtype.itemsize,
        )
        ends = writing.in_chunks(side, width, self.chunks, self.ranks - 1)
        rows = side.ghosts * row, side.sent * row
        peers = side.sources if backward else side.readers
        if codec is not None and not codec.fixed_size:  # sizes go ahead
            peers = peers + self.ranks - 1
        if backward:
            ends, rows = ends[::-1], rows[::-1]
        found = (x.reshape(1, -1) for x in (*ends, self.chunks * peers, *rows))
        received, sent, messages, read, written = found
        return ExchangeCost("row", received, sent, messages, codec, read, written)

    def _by_stage(self, of: Callable[[ExchangeCost], Array]) -> Array:
        """Returns the sum of `of` over the exchanges of each stage, in both directions."""
        both = zip(self._forward, self._backward, strict=True)
        none = np.zeros_like(self._own_nodes)
        return np.concatenate([sum(map(of, (*a, *b)), none) for a, b in both])

    @property
    def messages(self) -> Array:
        """Messages that each rank sends, at most."""
        ends = self.chunks * (
            (self._width_in > 0).astype(np.int64) + (self._width_out > 0)
        )
        out: Array = ends + self._by_stage(lambda move: move.messages)
        return out

    def seconds(self) -> float:
        """Returns the mean seconds of an epoch; a fraction of epochs reads no late rows."""
        synchronous, coding = self._seconds(False), self.coding
        if coding is None or not coding.link.timing.is_late:
            return synchronous
        share = coding.synchronous
        return share * synchronous + (1 - share) * self._seconds(True)

    def _seconds(self, late: bool) -> float:
        planner, chunks = self.planner, self.chunks
        machine, item = planner.machine, planner.training.itemsize
        loops = self._own_nodes * planner.training.adds_loops
        nonzeros = sum(self.flow.nonzeros).reshape(1, -1) + loops  # type: ignore[union-attr]

        def work(one: Item) -> Array:
            seconds = sum(
                machine.multiply_seconds(nonzeros, r.width) for r in one.reads
            )
            seconds = seconds + sum(
                machine.linear_seconds(self._own_nodes, *w) for w in one.dense
            )
            wide = one.crossing_width / (1 + one.skips)
            seconds = (
                seconds + PASSES / 3 * self._own_nodes * wide * item / machine.stream
            )
            out: Array = seconds + len(one.reads) * machine.overhead / 3 * chunks
            return out

        forward = np.concatenate(
            [sum(map(work, part)) for part in self._items_by_stage]
        )  # type: ignore[arg-type]
        link = Wire(machine.latency, machine.bandwidth)
        hop = machine.lines.get((self.stages, self.ranks), link)
        total, hidden = machine.epoch, 0.0
        for backward in (False, True):
            waited, overlapped = self._halos(backward, late)
            each = (forward * (BACK if backward else 1) + waited) / chunks
            rows = (
                self._own_nodes
                * np.maximum(self._width_in, self._width_out)
                * item
                / chunks
            )
            turn = np.maximum(each, hop.seconds(1, rows, rows))
            first = each.max() + float(hop.seconds(1, rows, rows).max())
            total += chunks * float(turn.max()) + (self.stages - 1) * float(first)
            hidden += float(overlapped.max())
        sums, steps = machine.sum_wire(), sum_messages(self.ranks)
        weights = float(self.weights.max())
        end = float(self.loss.max())
        total = max(total, hidden) + float(sums.seconds(steps, weights, weights))
        return total + float(sums.seconds(sum_messages(self.stages), end, end))

    def _halos(self, backward: bool, late: bool) -> tuple[Array, Array]:
        """Returns the waiting and overlapped seconds of exchanges in stages, one direction."""
        machine, coding = self.planner.machine, self.coding
        link = machine.wire("row", (self.ranks, 1, 1))
        late = late and coding is not None and coding.late(backward) > 0
        waited, overlapped = np.zeros((2, self.stages, self._own_nodes.size))
        for stage, moves in enumerate(self._backward if backward else self._forward):
            for move in moves:
                seconds = link.seconds(move.messages, move.sent, move.received)
                waited[stage] += move.local_seconds(machine)[0]
                held = overlapped if late and move.codec is not None else waited
                held[stage] += seconds[0]
        return waited, overlapped

    def memory(self) -> Array:
        """Returns an estimate of the bytes of each rank at the peak of an epoch.

        As in `cost.EpochProducts.memory`: edges and blocks, features, parameters; beside them
        rows that exchanges read, their history and gradients, borders, and a chunk's
        activations.
        """
        item, n = self.planner.training.itemsize, self._own_nodes
        copies = 2 if self.chunks > 1 else 1
        forward = self._total(lambda one: sum(r.width for r in one.reads))
        backward = self._total(
            lambda one: sum(r.width * r.needs_gradient for r in one.reads)
        )
        sites = ((n + self._ghosts) * forward * copies + n * backward) * item
        blocks = sum(self.flow.nonzeros).reshape(1, -1)  # type: ignore[union-attr]
        active = self._total(
            lambda one: one.crossing_width + sum(b for _, b in one.dense)
        )
        features = self.planner.training.layers[0].width_in * item + 33
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
            return np.zeros_like(self._own_nodes)
        found = [
            kept_by_link(forward, self.coding, False)
            + kept_by_link(backward, self.coding, True)
            for forward, backward in zip(self._forward, self._backward, strict=True)
        ]
        return np.concatenate(
            [np.broadcast_to(kept, self._own_nodes.shape) for kept in found]
        )

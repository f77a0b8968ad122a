"""Prices what a pipeline moves and how long it idles, as plain arithmetic.

Symbols: n nodes, d features of a hidden layer, S stages, W ranks of a stage, M chunks, L
exchanges of rows among the ranks of a stage, s tensors that all stages share (GCNII's x_0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.comm.price import Price
from pyg_distcomm.pipeline.chunk_graph import ChunkPass
from pyg_distcomm.pipeline.epoch import StageBuffers


def stage_words(n: int, d: int, stages: int, shared: int = 0) -> int:
    """Returns the words of an epoch between stages, all ranks together, after [Chen23]:

    2 (S - 1) n d (1 + s)
    """
    return 2 * (stages - 1) * n * d * (1 + shared)


def hybrid_words(
    n: int,
    d: int,
    stages: int,
    ways: int,
    *,
    layers: int,
    replication: float,
    weights: int,
    shared: int = 0,
) -> float:
    """Returns the words of an epoch of stages over several ranks, all ranks together:

        2 (S - 1) n d (1 + s) + 2 L alpha n d + 2 (W - 1) w

    Args:
        n, d, stages, ways, shared: as above.
        layers: exchanges of rows in a pass, L.
        replication: ghosts of all ranks of a stage over n, alpha.
        weights: parameters of all layers, w.
    """
    rows = 2 * layers * replication * n * d
    return stage_words(n, d, stages, shared) + rows + 2 * (ways - 1) * weights


def bubble(stages: int, chunks: int) -> float:
    """Returns the share of turns in which a stage is idle, (S - 1) / (M + S - 1)."""
    return (stages - 1) / (chunks + stages - 1)


@dataclass(frozen=True)
class EpochPrice:
    """What one epoch of training costs this rank; the ledger counts exactly this.

    Args:
        stage: rows and their gradients, from and to neighbouring stages.
        rows: rows and their gradients, among the ranks of a stage, as they are.
        weights: gradients of weights, among the ranks of a stage.
        loss: the loss, from the last stage to all.
        bytes: received, all told.
        coded: of them, those of rows that go by a link; see `LinkPolicy.price`.
    """

    stage: Price
    rows: Price
    weights: Price
    loss: Price
    bytes: int
    coded: int = 0

    @property
    def words(self) -> int:
        """The words received, but for those that a link writes."""
        parts = (self.stage, self.rows, self.weights, self.loss)
        return sum(part.words for part in parts)


def epoch_price(
    mesh: Mesh, boundary: StageBuffers, run: ChunkPass, weights: Sequence[Tensor]
) -> EpochPrice:
    """Returns the price of an epoch on this rank.

    Args:
        mesh: the ranks.
        boundary: what crosses the borders of this stage.
        run: its sites.
        weights: parameters of this stage that have gradients.
    """
    own = run.plan.own
    messages = sum(own.size(c) > 0 for c in range(run.plan.chunks))
    last = mesh.stage.rank == mesh.stage.size - 1
    boxes = boundary.inbox, None if last else boundary.outbox
    stage = [  # rows one way, their gradients the other
        (Price(box.numel(), box.numel(), messages), box.element_size())
        for box in boxes
        if box is not None
    ]
    sums = []
    for kind in dict.fromkeys(p.dtype for p in weights):
        count = sum(p.numel() for p in weights if p.dtype == kind)
        sums.append((_reduced(count, mesh.size), kind.itemsize))
    rows, loss = run.prices(), _reduced(1, mesh.stage.size)
    coded = 0 if run.link is None else run.link.price().total
    moved = sum(price.bytes(item) for price, item in (*stage, *rows, *sums, (loss, 8)))
    return EpochPrice(_sum(stage), _sum(rows), _sum(sums), loss, moved + coded, coded)


def _sum(parts: list[tuple[Price, int]]) -> Price:
    return sum((price for price, _ in parts), Price())


def _reduced(numel: int, size: int) -> Price:
    words = collectives.ring_words(numel, size)
    return Price(words, words, 2 * (size - 1))

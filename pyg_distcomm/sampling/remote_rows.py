"""Rows of a partitioned graph: asked of the ranks that have them, answered, fetched.

[Note: rows over the process row] In the Graph Partitioned algorithm of [Tripathy24] the c
ranks of a process row hold the same rows of Q. Each multiplies by a c-th of the blocks of A,
whose rows it gets in its process column, block by block; the partial products are added up
by a sparse all-reduce over the process row, and each rank samples a c-th of the sum. What
differs here:

- a rank has the minibatches that it samples from the start, so ids of the rows they need go
  to the others of the process row, and only these rows come back: a reduce-scatter;
- a row of a node-wise Q has one nonzero, so that no two ranks have parts of one row of the
  product, and nothing is left to add; layer-wise, partial rows are added;
- which of the c ranks brings a row is settled by the column of its owner, not by its block,
  so that c need not divide P/c, and they bring about as many each;
- rows of the own block, which all c ranks hold, do not travel;
- one all_to_allv brings all blocks, and each row once for all minibatches of all c ranks.

Each rank asking its column for what itself needs would bring fewer words to a rank in all;
this way a row comes into a process row once, which is what counts where it is a host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm import kernels
from pyg_distcomm.comm.collectives import Axis
from pyg_distcomm.comm.process_grid import ProcessGrid
from pyg_distcomm.kernels.minibatch import (
    Draws,
    HopDraw,
    Relation,
    UnweightedNode,
    everything,
)
from pyg_distcomm.sampling.graph_block import GraphBlock
from pyg_distcomm.sampling.row_request import (
    RowQuery,
    RowReply,
    RowRequest,
    answer,
    columns_of,
)


class RemoteRows:
    """The rows of all blocks, as one rank can reach them.

    Args:
        block: what this rank holds.
        channel: the ranks; used by one thread at a time.
    """

    def __init__(self, block: GraphBlock, channel: ProcessGrid) -> None:
        self.block, self.channel = block, channel
        self.relations = block.topology.graph.relations
        wide = any(r.row.dtype == torch.int64 for r in self.relations)
        self.word = torch.int64 if wide else torch.int32
        self._sampler: Any = kernels.neighbor_sampler(block.topology.graph)

    def ask(self, wishes: Sequence[RowQuery]) -> RowRequest:
        """Sends ids to the ranks of the process column that have their rows."""
        return self._errand(self.channel.row, wishes, self.block.block_of)

    def _errand(
        self,
        axis: Axis,
        wishes: Sequence[RowQuery],
        whom: Callable[[int, Tensor], Tensor],
    ) -> RowRequest:
        """Begins an errand to whoever has, or brings, the rows of nodes of a type."""
        peers = [
            whom(kind, torch.cat([w.node for w in some]))
            for kind, some in groupby(
                wishes, lambda w: self.relations[w.relation].target
            )
        ]
        return RowRequest(axis, wishes, peers, self.word)

    def place_of(self, r: int, node: Tensor) -> Tensor:
        """Returns where nodes that were asked of this rank have their rows."""
        return self.block.place_of(self.relations[r].target, node)

    def answer(self, asks: list[tuple[int, HopDraw]], whole: bool = False) -> Tensor:
        """Draws what one rank asks of this one; see `errand.answer`."""
        try:
            return answer(self.relations, asks, self._sampler, self.word, whole)
        except UnweightedNode as error:
            raise self.unweighted(error, error.relation) from None

    def draws(self, errand: RowRequest, messages: Sequence[Tensor]) -> Draws:
        """Answers every rank by a message; returns the draws that this one asked for."""
        found, far = errand.arrived(messages)
        parts = list(zip(found, errand.asked, strict=True))
        draws: Draws = self._sampler.locate(parts, self.channel.row.rank, far)
        return draws

    def unweighted(self, error: UnweightedNode, r: int) -> ValueError:
        """Returns the error with the name of its edge type."""
        edge_type = self.block.topology.edge_types[r]
        where = "" if edge_type is None else f"edge type {edge_type}: "
        return ValueError(f"{where}{error}")

    def fetch(
        self, r: int, nodes: Sequence[Tensor | None]
    ) -> tuple[Relation, list[Tensor]]:
        """Fetches whole rows of a relation, each distinct one once; collective.

        With c copies of a block, the ranks of a process row pool what they want; see
        [Note: rows over the process row].

        Price: `errand_price` and `counts_price` on each axis. In the process row, it asks
        for the distinct rows that others are to bring; in the process column, for those
        that it is to bring for any of the process row and does not hold.

        Returns:
            the rows as a relation, and for each list of nodes, their places in it.
        """
        none = torch.empty(0).long()
        every = torch.cat([none, *(n for n in nodes if n is not None)])
        wanted, where = torch.unique(every, return_inverse=True)
        errand = self.ask_twins([RowQuery(r, wanted)])
        asked = [theirs[0].node for theirs in errand.received]
        pool, places = torch.unique(torch.cat(asked), return_inverse=True)
        answers = self._column(r, pool)
        if self.channel.col.size > 1:
            shelf = self._shelf(r, answers)
            messages = [
                answer(
                    [shelf],
                    [(0, everything(node, answers.slot[place]))],
                    self._sampler,
                    self.word,
                    whole=True,
                )
                for node, place in zip(
                    asked, places.split([len(a) for a in asked]), strict=True
                )
            ]
            answers = errand.reply(messages, self._columns(r))
        sizes = [0 if n is None else len(n) for n in nodes]
        return self._shelf(r, answers), list(answers.slot[where].split(sizes))

    def ask_twins(self, wishes: Sequence[RowQuery]) -> RowRequest:
        """Tells each rank of the process row which rows it is to bring for all of them.

        See `GraphBlock.twin_of`.
        """
        return self._errand(self.channel.col, wishes, self.block.twin_of)

    def sorted_rows(self, r: int, nodes: Tensor) -> Relation:
        """Fetches the rows of distinct ids from this column, in the order of the ids."""
        answers = self._column(r, nodes)
        shelf = self._shelf(r, answers)
        start, entry, _ = self._sampler.draw_rows(
            shelf, None, everything(nodes, answers.slot), _as_array
        )
        picked = torch.from_numpy(entry)
        weight = None if shelf.weight is None else shelf.weight[picked]
        pair = shelf.row.view(-1, 2)[picked].view(-1)
        return replace(
            shelf, colptr=torch.from_numpy(start), row=pair, weight=weight, time=None
        )

    def _column(self, r: int, wanted: Tensor) -> RowReply:
        errand = self.ask([RowQuery(r, wanted)])
        messages = [
            self.answer(
                [(r, everything(wish.node, self.place_of(r, wish.node)))], whole=True
            )
            for (wish,) in errand.received
        ]
        return errand.reply(messages, self._columns(r))

    def _shelf(self, r: int, answers: RowReply) -> Relation:
        """Returns rows that have arrived as a relation of their own."""
        columns, own = list(answers.columns), self.relations[r]
        weight = None if own.weight is None else columns.pop(0)
        time = None if own.time is None else columns.pop(0)
        return replace(
            own, colptr=answers.offset, row=answers.pair, weight=weight, time=time
        )

    def _columns(self, r: int) -> list[torch.dtype]:
        return [column.dtype for column in columns_of(self.relations[r])]


def _as_array(total: int) -> Any:
    return torch.empty(total, dtype=torch.int64).numpy(), 0

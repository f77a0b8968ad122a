"""One product inside the fiber: what is sent, and what is multiplied meanwhile.

[Note: order of a product] Over the row axis ghosts leave first, then sums; over the col
axis far columns, then outgoing sums. All ranks keep to that order, whatever they multiply
in between. Own columns are multiplied while the rest travels, and sums leave in parts, each
while the next is multiplied. Where nothing has to arrive before sums can leave, they leave
before own rows are multiplied: so in the backward pass of a 1D grid.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pyg_distcomm.halo.link import Link
from pyg_distcomm.ops.csr import CSR
from pyg_distcomm.ops.local_blocks import Links, LocalBlocks

Land = Callable[[Tensor], Tensor]


class OverlappedSpMM:
    """A product under way.

    Shapes (this rank; n own rows, o out rows, h ghosts): own [n, f] -> [n, f], ghosts
    [h, f].
    """

    def __init__(
        self,
        tile: LocalBlocks,
        links: Links,
        own: Tensor,
        note: Callable[[str, str], None],
    ) -> None:
        self._tile, self._links, self._own, self._note = tile, links, own, note
        n, out = tile.own_own.pattern.shape[0], tile.out_own.pattern.shape[0]
        self._z = own.new_empty((n, own.size(1)))
        self._out = own.new_empty((out, own.size(1)))
        self._ghost = own[:0]

    def run(self) -> tuple[Tensor, Tensor]:
        """Returns own rows of the product, and the ghosts; collective."""
        tile, links, own, note = self._tile, self._links, self._own, self._note
        arrive = links.ghost.begin(own)
        note("begin", "in")
        sums = self._sent(links.sums, tile.sum_own)
        early = links.ghost.num_ghosts == 0 and links.sums.silent
        if early:
            far, outgoing = self._leave(early)
            tile.own_own.matmul(own, self._z)
            note("multiply", "own")
            self._ghost = arrive()
            note("arrive", "in")
        else:
            tile.own_own.matmul(own, self._z)
            tile.out_own.matmul(own, self._out)
            note("multiply", "own")
            self._ghost = arrive()
            note("arrive", "in")
            if len(self._out):  # they wait for sums; own rows need not, yet
                sums = self._land_everywhere(sums)
            far, outgoing = self._leave(early)
        tile.own_ghost.add_matmul(self._ghost, self._z)
        note("multiply", "ghost")
        _landed(sums, self._z)
        tile.own_far.add_matmul(far(), self._z)
        _landed(outgoing, self._z)
        note("arrive", "out")
        return self._z, self._ghost

    def _land_everywhere(self, sums: list[Land]) -> list[Land]:
        """Adds sums to own and out rows, which they know as one tensor."""
        if not self._links.sums.silent:
            both = torch.cat([self._z, self._out])
            _landed(sums, both)
            self._z = both[: len(self._z)].clone()  # autograd wants no view of another
            self._out = both[len(self._z) :]
        return []

    def _leave(self, early: bool) -> tuple[Callable[[], Tensor], list[Land]]:
        """Starts all that travels over the col axis."""
        links = self._links
        held = self._own
        if not links.far.silent and len(self._ghost):
            held = torch.cat([self._own, self._ghost])
        far = links.far.begin(held)
        outgoing, first = [], 0
        for part in links.out.parts:
            rows = self._out[first : first + part.num_ghosts]
            if early:
                self._tile.out_own.matmul(self._own, rows, first)
            self._tile.out_ghost.add_matmul(self._ghost, rows, first)
            self._note("multiply", "out")
            outgoing.append(part.begin_transpose(rows))
            self._note("begin", "out")
            first += part.num_ghosts
        self._out = self._own[:0]  # what is coded is not needed any more
        return far, outgoing

    def _sent(self, link: Link, block: CSR) -> list[Land]:
        """Multiplies own columns into sums for other ranks, part by part as they leave."""
        outgoing, first = [], 0
        for part in link.parts:
            rows = self._own.new_empty((part.num_ghosts, self._own.size(1)))
            block.matmul(self._own, rows, first)
            outgoing.append(part.begin_transpose(rows))
            first += part.num_ghosts
        if not link.silent:
            self._note("begin", "sums")
        return outgoing


def _landed(sums: list[Land], rows: Tensor) -> None:
    for land in sums:
        land(rows)

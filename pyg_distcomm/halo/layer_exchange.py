"""Call: one use of a link by a layer, as its policy has it at that moment."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from pyg_distcomm.comm import random
from pyg_distcomm.halo.chunked import ChunkedHalo
from pyg_distcomm.halo.codec import Codec
from pyg_distcomm.halo.codecs.quantise import Plain
from pyg_distcomm.halo.compressed import CompressedLink, Direction
from pyg_distcomm.halo.halo import Halo
from pyg_distcomm.halo.link import Link
from pyg_distcomm.halo.link_cost import DEGREES
from pyg_distcomm.halo.link_state import LinkState
from pyg_distcomm.halo.staleness import StaleBuffer, Timing


@dataclass(frozen=True, eq=False)
class LayerExchange:
    """One call of a layer.

    Args:
        run: whose state it changes.
        timing: when rows arrive.
        seed: of what is drawn.
        remembers: whether a state is kept of rows, and of gradients.
        place: of the layer, by first use.
        number: of its calls in this epoch.
        epoch: this one.
        codec, gradient_codec: how rows and gradients are written.
        fresh: whether it waits for its own rows.
        keeps: whether it changes what is kept; evaluation does not.
        first: whether it is exact because the epoch is the first.
        where: what the layer is called in messages.
        exactly: why rows are exact, and now, in all epochs; nothing where they are not.
    """

    run: LinkState
    timing: Timing
    seed: int
    remembers: tuple[bool, bool]
    place: int
    number: int
    epoch: int
    codec: Codec
    gradient_codec: Codec | None
    fresh: bool
    keeps: bool
    first: bool
    where: str
    exactly: str = ""

    def whole(self, why: str) -> LayerExchange:
        """Returns the same call for rows that must be exact, and of now."""
        exact: Any = {"codec": Plain(), "gradient_codec": None}
        return replace(self, **exact, first=False, exactly=why)

    def wrap(self, link: Link, name: int) -> Link:
        """Returns a link of an operator as this call uses it, part by part.

        Degrees are exact, and of now.
        """
        if name >= DEGREES and not self.exactly:
            return self.whole("degrees are").wrap(link, name)
        if isinstance(link, ChunkedHalo):
            parts = [self._coded(part, name, i) for i, part in enumerate(link.parts)]
            return ChunkedHalo(tuple(parts))
        return self._coded(link, name, 0)

    def _coded(self, link: Link, name: int, piece: int) -> Link:
        if link.silent or not isinstance(link, Halo):
            return link
        return CompressedLink(link, self, name, piece)

    def key(self, name: int) -> int:
        """Returns the key of what is drawn for the rows of an exchange."""
        return random.fold(self.seed, self.epoch, self.place, self.number, name)

    def late(self, backward: bool) -> int:
        """Returns by how many epochs rows, or gradients, are late."""
        kept = self.keeps and not self.exactly
        return self.timing.staleness(backward) if kept else 0

    def inbox(
        self, halo: Halo, name: int, piece: int, way: Direction, x: Tensor
    ) -> StaleBuffer:
        """Returns what an exchange keeps, in one direction."""
        if not self.keeps or self.exactly:
            return StaleBuffer()
        key = self.place, self.number, name, piece, way.backward
        inbox = self.run.inbox(key, way)
        inbox.meet(halo, x.size(1), x.dtype)
        return inbox

    def note(self, name: int, piece: int, way: Direction, x: Tensor) -> None:
        """Remembers that an exchange takes place, if training does."""
        if self.keeps:
            key = self.place, self.number, name, piece
            load = way.load(x.size(1), x.dtype)
            self.run.note(key, way.backward, load, len(way.gid), self.exactly)

    def intact(self) -> Any:
        """Drops what is kept if an exchange in it fails."""
        return self.run.intact()

    def seeds(self, backward: bool) -> bool:
        """Tells whether this exact exchange is where both ends of a residual begin."""
        return self.first and self.remembers[backward]

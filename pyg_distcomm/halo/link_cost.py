"""What the exchanges of a link cost: bytes of each, foretold from its plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from pyg_distcomm.comm.ledger import Short, format_table
from pyg_distcomm.halo.codec import Codec, header_bytes, packed_bytes

RecordKey: TypeAlias = tuple[int, int, int, int]  # place, number, name, piece
NAMES = ("ghost", "out", "sums", "far")
DEGREES = 1 << 20  # from here on names of exchanges of degrees, which layers may cache


@dataclass(frozen=True)
class Load:
    """What arrives in one exchange: rows from each peer, and their shape.

    Args:
        counts: rows from each rank of the axis.
        peers: how many other ranks it has.
        width, dtype: of the rows.
    """

    counts: tuple[int, ...]
    peers: int
    width: int
    dtype: torch.dtype

    def bytes(self, codec: Codec) -> int:
        """Returns the bytes received, those that tell sizes ahead included.

        Exact where the codec is `sized`, otherwise the most there can be.
        """
        return self.payload(codec) + header_bytes(codec, self.peers)

    def payload(self, codec: Codec) -> int:
        """Returns the bytes of the messages alone."""
        return sum(packed_bytes(codec, self.counts, self.width, self.dtype))

    @property
    def rows_bytes(self) -> int:
        """The bytes of the rows as they are."""
        return sum(self.counts) * self.width * self.dtype.itemsize


@dataclass(eq=False)
class Record:
    """One exchange that has been seen.

    Args:
        place, number: which call of which layer it belongs to.
        name, piece: which of the call's exchanges it is.
        layer: what the layer is called.
        exactly: why its rows are always exact, and now, if they are.
        loads: what arrives forward, and backward; None where nothing has gone that way.
        sent_rows: how many rows leave, forward and backward.
    """

    place: int
    number: int
    name: int
    piece: int
    layer: str
    exactly: str
    loads: list[Load | None]
    sent_rows: list[int]


@dataclass(frozen=True)
class Line:
    """What one exchange costs this rank in one epoch.

    Args:
        layer: place, kind and call of the layer.
        exchange: "ghost" brings rows over the row axis and "sums" takes sums back over it;
            "out" and "far" do so over the col axis; others count what a layer looks up.
        width: of the rows.
        how: what was used.
        forward, backward: bytes received.
        kept: bytes kept until the next epoch.
    """

    layer: str
    exchange: str
    width: int
    how: str
    forward: int
    backward: int
    kept: int


@dataclass(frozen=True)
class LinkPrice:
    """What a link costs this rank in one epoch of training.

    Args:
        epoch: which one.
        lines: each exchange.
        agreement: bytes by which ranks agree on whether calls are exact.
        exact: whether all of it is exact; if not, sizes depend on values and it is the
            most there can be.
    """

    epoch: int
    lines: tuple[Line, ...]
    agreement: int
    exact: bool

    @property
    def forward(self) -> int:
        """Bytes received in forward passes."""
        return sum(line.forward for line in self.lines)

    @property
    def backward(self) -> int:
        """Bytes received in backward passes."""
        return sum(line.backward for line in self.lines)

    @property
    def total(self) -> int:
        """All bytes received, those of agreeing included."""
        return self.forward + self.backward + self.agreement

    @property
    def kept(self) -> int:
        """Bytes kept until the next epoch."""
        return sum(line.kept for line in self.lines)

    def __str__(self) -> str:
        head = ["layer", "exchange", "width", "how", "forward", "backward", "kept"]
        rows: list[Sequence[object]] = [
            (
                *(line.layer, line.exchange, line.width, line.how),
                *map(Short, (line.forward, line.backward, line.kept)),
            )
            for line in self.lines
        ]
        sums = map(Short, (self.forward, self.backward, self.kept))
        rows.append(("all", "", None, "", *sums))
        most = "" if self.exact else ", at most"
        return (
            f"epoch {self.epoch}: bytes received here{most}\n{format_table(head, rows)}"
        )


def exchange_name(name: int) -> str:
    """Returns what an exchange of a call is called."""
    if name >= DEGREES:
        return "degrees"
    return NAMES[name] if name < len(NAMES) else str(name - len(NAMES))

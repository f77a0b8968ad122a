"""Words and messages of each operator, as plain arithmetic on its plan.

Symbols: n nodes, P ranks, grid r x s x p, f features; one *word* is one element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Price:
    """What one application of an operator costs this rank.

    Args:
        words: elements received from other ranks.
        sent: elements sent to other ranks.
        messages: messages sent.
    """

    words: int = 0
    sent: int = 0
    messages: int = 0

    def __add__(self, other: Price) -> Price:
        return Price(
            self.words + other.words,
            self.sent + other.sent,
            self.messages + other.messages,
        )

    def bytes(self, itemsize: int = 4) -> int:
        """Returns the bytes received, for elements of `itemsize` bytes."""
        return self.words * itemsize


def exchange_price(
    send_counts: Sequence[int], recv_counts: Sequence[int], rank: int, width: int
) -> Price:
    """Prices an all_to_all of rows: everything but what a rank keeps."""
    peers = [c for i, c in enumerate(send_counts) if i != rank]
    return Price(
        words=(sum(recv_counts) - recv_counts[rank]) * width,
        sent=sum(peers) * width,
        messages=sum(1 for c in peers if c) if width else 0,
    )


def balanced_split(total: int, parts: int) -> list[int]:
    """Cuts `total` into `parts` sizes that differ by at most one, larger first."""
    small, extra = divmod(total, parts)
    return [small + (i < extra) for i in range(parts)]


def dense_words(n: int, f: int, grid: tuple[int, int, int]) -> float:
    """Returns the words a rank receives per product when every halo is dense.

        n f/(s p) (1 - 1/r) + n f/(r p) (1 - 1/s) + 2 n f/P (1 - 1/p)

    for balanced rows and features, on a grid r x s x p of P ranks.
    """
    r, s, p = grid
    size = r * s * p
    return (
        n * f * ((1 - 1 / r) / (s * p) + (1 - 1 / s) / (r * p) + 2 * (1 - 1 / p) / size)
    )

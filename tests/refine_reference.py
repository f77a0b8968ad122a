"""The moves of `refine` in plain Python: the definition."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

CANDIDATES = 8
TINY = 1e-12


@dataclass
class RefineState:
    """A graph and who owns its nodes, changed in place by `sweep`."""

    owner: list[int]  # the part of each node
    pairs: set[tuple[int, int]]  # distinct (source, target), loops apart
    weight: np.ndarray  # [n, c], what each node adds to the loads that have a limit
    capacity: np.ndarray  # [c], the most of each that a part may carry
    num_parts: int

    def rows(self) -> tuple[list[int], list[int]]:
        """Counts the rows that each part sends and receives."""
        sent, received = [0] * self.num_parts, [0] * self.num_parts
        for u, q in {(u, self.owner[v]) for u, v in self.pairs}:
            if q != self.owner[u]:
                sent[self.owner[u]] += 1
                received[q] += 1
        return sent, received

    def moved(self, v: int, b: int) -> RefineState:
        """Returns the state after a move of v to part b."""
        return replace(self, owner=[*self.owner[:v], b, *self.owner[v + 1 :]])


def sweep(
    state: RefineState, order: list[int], first: list[int], most: int, doublings: int
) -> int:
    """Moves each node of `order` once, to the part where the potential falls most.

        potential = sum over parts of (sent / B)^k + (received / B)^k,   k = 2^doublings

    with B the largest of all counts at the beginning. A part is tried if it is among
    the CANDIDATES that hold most neighbours of the node, if every load with a limit
    that the node adds to still fits, and if the node is not the last of its own part. A
    move must not raise a count above the largest of all, nor one of rows sent above
    first[0], one of rows received above first[1], or the sum of the rows sent above
    `most`; equal falls go to the part with more neighbours, then to the lower number.
    Returns the number of moves.
    """
    scale = float(max(1, *state.rows()[0], *state.rows()[1]))
    moves = 0
    for v in order:
        a = state.owner[v]
        if state.owner.count(a) <= 1:
            continue
        best, best_gain = -1, 0.0
        for b in candidates(state, v):
            if not _fits(state, v, b):
                continue
            gain = _gain(state, state.moved(v, b), first, most, scale, doublings)
            if gain > best_gain + TINY:
                best, best_gain = b, gain
        if best >= 0:
            state.owner[v] = best
            moves += 1
    return moves


def candidates(state: RefineState, v: int) -> list[int]:
    """Lists the parts, but its own, that hold most neighbours of v."""
    near: dict[int, int] = {}
    for u, w in state.pairs:
        for end, other in ((u, w), (w, u)):
            if end == v:
                q = state.owner[other]
                near[q] = near.get(q, 0) + 1
    near.pop(state.owner[v], None)
    return sorted(near, key=lambda q: (-near[q], q))[:CANDIDATES]


def _fits(state: RefineState, v: int, b: int) -> bool:
    carried = state.weight[[u for u, q in enumerate(state.owner) if q == b]].sum(0)
    fits = carried + state.weight[v] <= state.capacity
    return bool(((state.weight[v] == 0) | fits).all())


def _gain(
    old: RefineState,
    new: RefineState,
    first: list[int],
    most: int,
    scale: float,
    doublings: int,
) -> float:
    was, now = old.rows(), new.rows()
    if sum(now[0]) > most:
        return 0.0
    gain, power = 0.0, 2**doublings
    largest = max(*was[0], *was[1])
    for before, after, limit in zip(was, now, first, strict=True):
        for x, y in zip(before, after, strict=True):
            if y > x and y > min(limit, largest):
                return 0.0
            gain += (x / scale) ** power - (y / scale) ** power
    return gain

"""Compiles the loops of `refine_partition`; importing this module imports Numba.

`held` lists the parts that need the row of each node, as (start, size, part, count): node u is
needed by the `size[u]` parts from `part[start[u]]` on, each for `count` of its targets.
"""

from __future__ import annotations

import numpy as np

from pyg_distcomm.kernels.compile import entry, jit
from pyg_distcomm.partition.cutters_jit import fits, transfer

Array = np.ndarray
Held = tuple[Array, Array, Array, Array]

CANDIDATES = 8  # parts that a node is tried in: those with most of its neighbours
TINY = 1e-12  # differences below are rounding


@entry
def hold(indptr: Array, source: Array, owner: Array, num_parts: int) -> Held:
    """Lists the parts that need each node's row, and for how many targets."""
    num_nodes = owner.size
    start = np.zeros(num_nodes + 1, np.int64)
    for k in range(source.size):
        start[source[k] + 1] += 1
    for u in range(num_nodes):
        start[u + 1] = start[u] + min(start[u + 1], num_parts)
    size = np.zeros(num_nodes, np.int32)
    part = np.empty(start[-1], np.int32)
    count = np.empty(start[-1], np.int32)
    held = (start, size, part, count)
    for v in range(num_nodes):
        for k in range(indptr[v], indptr[v + 1]):
            _take(source[k], owner[v], held)
    return held


@jit
def _take(u: int, q: int, held: Held) -> None:
    """Counts one more target of u in part q."""
    start, size, part, count = held
    for k in range(start[u], start[u] + size[u]):
        if part[k] == q:
            count[k] += 1
            return
    k = start[u] + size[u]
    part[k], count[k] = q, 1
    size[u] += 1


@jit
def _drop(u: int, q: int, held: Held) -> None:
    """Counts one target of u less in part q."""
    start, size, part, count = held
    k = start[u]
    while part[k] != q:
        k += 1
    count[k] -= 1
    if count[k] == 0:
        size[u] -= 1
        last = start[u] + size[u]
        part[k], count[k] = part[last], count[last]


@entry
def rows(owner: Array, num_parts: int, held: Held) -> Array:
    """Counts the rows that each part sends [:P] and receives [P:]."""
    start, size, part, _ = held
    found = np.zeros(2 * num_parts, np.int64)
    for u in range(owner.size):
        for k in range(start[u], start[u] + size[u]):
            if part[k] != owner[u]:
                found[owner[u]] += 1
                found[num_parts + part[k]] += 1
    return found


@jit
def _note(q: int, change: int, delta: Array, hit: Array, hits: int) -> int:
    """Adds to delta[q]; hit lists the entries ever touched, in that order."""
    if delta[q, 1] == 0:
        delta[q, 1] = 1
        hit[hits] = q
        hits += 1
    delta[q, 0] += change
    return hits


@jit
def _change(
    v: int,
    b: int,
    indptr: Array,
    source: Array,
    owner: Array,
    held: Held,
    delta: Array,
    hit: Array,
) -> int:
    """Counts what a move of v to part b adds to the rows sent and received, exactly.

    delta [2 P, 2] is zero before; its first column is the change, and hit lists the
    entries touched, whose number is returned.
    """
    start, size, part, count = held
    num_parts = delta.shape[0] // 2
    a = owner[v]
    away_a = away_b = at_a = at_b = 0
    for k in range(start[v], start[v] + size[v]):
        at_a += part[k] == a
        at_b += part[k] == b
        away_a += part[k] != a
        away_b += part[k] != b
    hits = _note(a, -away_a, delta, hit, 0)
    hits = _note(b, away_b, delta, hit, hits)
    hits = _note(num_parts + a, at_a, delta, hit, hits)
    hits = _note(num_parts + b, -at_b, delta, hit, hits)
    for e in range(indptr[v], indptr[v + 1]):
        u = source[e]
        home, in_b, last = owner[u], False, False
        for k in range(start[u], start[u] + size[u]):
            in_b = in_b or part[k] == b
            last = last or (part[k] == a and count[k] == 1)
        if last and home != a:
            hits = _note(home, -1, delta, hit, hits)
            hits = _note(num_parts + a, -1, delta, hit, hits)
        if not in_b and home != b:
            hits = _note(home, 1, delta, hit, hits)
            hits = _note(num_parts + b, 1, delta, hit, hits)
    return hits


@jit
def power_of(value: float, doublings: int) -> float:
    """Returns value ** (2 ** doublings), by squaring: the same bits everywhere."""
    for _ in range(doublings):
        value *= value
    return value


@jit
def _gain(
    load: Array,
    limit: Array,
    most: int,
    scale: float,
    doublings: int,
    delta: Array,
    hit: Array,
    hits: int,
) -> float:
    """Returns the fall of the potential, 0 for a move that a limit forbids; clears delta."""
    num_parts = load.size // 2
    gain, volume, allowed = 0.0, 0, True
    for h in range(hits):
        q = hit[h]
        change = delta[q, 0]
        delta[q, 0] = delta[q, 1] = 0
        new = load[q] + change
        allowed = allowed and (change <= 0 or new <= limit[q // num_parts])
        if q < num_parts:
            volume += change
        gain += power_of(load[q] / scale, doublings) - power_of(new / scale, doublings)
    return gain if allowed and load[:num_parts].sum() + volume <= most else 0.0


@jit
def _candidates(
    v: int,
    indptr: Array,
    source: Array,
    owner: Array,
    held: Held,
    near: Array,
    chosen: Array,
) -> int:
    """Lists the parts, but its own, with most neighbours of v; ties: lower numbers."""
    start, size, part, count = held
    found = 0
    for k in range(start[v], start[v] + size[v]):
        near[part[k]] += count[k]
    for e in range(indptr[v], indptr[v + 1]):
        near[owner[source[e]]] += 1
    for _ in range(CANDIDATES):
        best = -1
        for k in range(start[v], start[v] + size[v]):
            best = _better(part[k], best, owner[v], near)
        for e in range(indptr[v], indptr[v + 1]):
            best = _better(owner[source[e]], best, owner[v], near)
        if best < 0:
            break
        chosen[found] = best
        found += 1
        near[best] = 0
    for k in range(start[v], start[v] + size[v]):
        near[part[k]] = 0
    for e in range(indptr[v], indptr[v + 1]):
        near[owner[source[e]]] = 0
    return found


@jit
def _better(q: int, best: int, home: int, near: Array) -> int:
    if q == home or near[q] == 0:
        return best
    if best < 0 or near[q] > near[best] or (near[q] == near[best] and q < best):
        return q
    return best


@entry
def sweep(
    order: Array,
    indptr: Array,
    source: Array,
    owner: Array,
    held: Held,
    load: Array,
    weight: Array,
    capacity: Array,
    carried: Array,
    first: Array,
    most: int,
    doublings: int,
) -> int:
    """Moves each node of `order` once, to where the potential falls most; in place.

    The definition is `sweep` in tests/refine_reference.py. Returns the number of moves.
    """
    num_parts = carried.shape[0]
    delta = np.zeros((2 * num_parts, 2), np.int64)
    hit = np.empty(2 * num_parts, np.int64)
    near, chosen = np.zeros(num_parts, np.int64), np.empty(num_parts, np.int64)
    scale = float(max(1, load.max()))
    limit = np.minimum(first, load.max())
    moves = 0
    for v in order:
        a = owner[v]
        if carried[a, 0] <= 1:
            continue
        found = _candidates(v, indptr, source, owner, held, near, chosen)
        best, best_gain = -1, 0.0
        for c in range(found):
            b = chosen[c]
            if not fits(carried, capacity, b, weight, v):
                continue
            hits = _change(v, b, indptr, source, owner, held, delta, hit)
            gain = _gain(load, limit, most, scale, doublings, delta, hit, hits)
            if gain > best_gain + TINY:
                best, best_gain = b, gain
        if best < 0:
            continue
        hits = _change(v, best, indptr, source, owner, held, delta, hit)
        for h in range(hits):
            load[hit[h]] += delta[hit[h], 0]
            delta[hit[h]] = 0
        for e in range(indptr[v], indptr[v + 1]):
            _drop(source[e], a, held)
            _take(source[e], best, held)
        owner[v] = best
        transfer(carried, weight, v, a, best)
        limit = np.minimum(first, load.max())
        moves += 1
    return moves

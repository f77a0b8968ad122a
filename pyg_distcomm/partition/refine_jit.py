"""Compiles the loops of `refine_partition`; importing this module imports Numba.

`readers` lists the parts that read the row of each node, as (start, size, part, count): the row
of node u is read by the `size[u]` parts from `part[start[u]]` on, each for `count` targets.
"""

from __future__ import annotations

import numpy as np

from pyg_distcomm.kernels.compile import entry, jit
from pyg_distcomm.partition.cutters_jit import fits, transfer

Array = np.ndarray
Readers = tuple[Array, Array, Array, Array]

CANDIDATES = 8  # parts that a node may move to: those with most of its neighbours
TINY = 1e-12  # differences below are rounding


@entry
def list_readers(indptr: Array, source: Array, owner: Array, num_parts: int) -> Readers:
    """Lists the parts that read each node's row, and for how many targets."""
    num_nodes = owner.size
    start = np.zeros(num_nodes + 1, np.int64)
    for k in range(source.size):
        start[source[k] + 1] += 1
    for u in range(num_nodes):
        start[u + 1] = start[u] + min(start[u + 1], num_parts)
    size = np.zeros(num_nodes, np.int32)
    part = np.empty(start[-1], np.int32)
    count = np.empty(start[-1], np.int32)
    readers = (start, size, part, count)
    for v in range(num_nodes):
        for k in range(indptr[v], indptr[v + 1]):
            _add_reader(source[k], owner[v], readers)
    return readers


@jit
def _add_reader(u: int, q: int, readers: Readers) -> None:
    """Counts one more target of u in part q."""
    start, size, part, count = readers
    for k in range(start[u], start[u] + size[u]):
        if part[k] == q:
            count[k] += 1
            return
    k = start[u] + size[u]
    part[k], count[k] = q, 1
    size[u] += 1


@jit
def _remove_reader(u: int, q: int, readers: Readers) -> None:
    """Counts one target less of u in part q."""
    start, size, part, count = readers
    k = start[u]
    while part[k] != q:
        k += 1
    count[k] -= 1
    if count[k] == 0:
        size[u] -= 1
        last = start[u] + size[u]
        part[k], count[k] = part[last], count[last]


@entry
def rows(owner: Array, num_parts: int, readers: Readers) -> Array:
    """Counts the rows that each part sends [:P] and receives [P:]."""
    start, size, part, _ = readers
    found = np.zeros(2 * num_parts, np.int64)
    for u in range(owner.size):
        for k in range(start[u], start[u] + size[u]):
            if part[k] != owner[u]:
                found[owner[u]] += 1
                found[num_parts + part[k]] += 1
    return found


@jit
def _add_change(
    q: int, change: int, delta: Array, touched: Array, num_touched: int
) -> int:
    """Adds to delta[q]; touched lists the entries ever touched, in that order."""
    if delta[q, 1] == 0:
        delta[q, 1] = 1
        touched[num_touched] = q
        num_touched += 1
    delta[q, 0] += change
    return num_touched


@jit
def _count_change(
    v: int,
    b: int,
    indptr: Array,
    source: Array,
    owner: Array,
    readers: Readers,
    delta: Array,
    touched: Array,
) -> int:
    """Counts how moving v to part b changes the rows sent and received, exactly.

    delta [2 P, 2] is zero before; its first column is the change, and touched lists
    the entries touched, whose number is returned.
    """
    start, size, part, count = readers
    num_parts = delta.shape[0] // 2
    a = owner[v]
    remote_a = remote_b = in_a = in_b = 0
    for k in range(start[v], start[v] + size[v]):
        in_a += part[k] == a
        in_b += part[k] == b
        remote_a += part[k] != a
        remote_b += part[k] != b
    num_touched = _add_change(a, -remote_a, delta, touched, 0)
    num_touched = _add_change(b, remote_b, delta, touched, num_touched)
    num_touched = _add_change(num_parts + a, in_a, delta, touched, num_touched)
    num_touched = _add_change(num_parts + b, -in_b, delta, touched, num_touched)
    for e in range(indptr[v], indptr[v + 1]):
        u = source[e]
        own_part, b_reads, last = owner[u], False, False
        for k in range(start[u], start[u] + size[u]):
            b_reads = b_reads or part[k] == b
            last = last or (part[k] == a and count[k] == 1)
        if last and own_part != a:
            num_touched = _add_change(own_part, -1, delta, touched, num_touched)
            num_touched = _add_change(num_parts + a, -1, delta, touched, num_touched)
        if not b_reads and own_part != b:
            num_touched = _add_change(own_part, 1, delta, touched, num_touched)
            num_touched = _add_change(num_parts + b, 1, delta, touched, num_touched)
    return num_touched


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
    max_volume: int,
    scale: float,
    doublings: int,
    delta: Array,
    touched: Array,
    num_touched: int,
) -> float:
    """Returns by how much the potential falls, 0 if a limit forbids the move; clears delta."""
    num_parts = load.size // 2
    gain, volume, allowed = 0.0, 0, True
    for h in range(num_touched):
        q = touched[h]
        change = delta[q, 0]
        delta[q, 0] = delta[q, 1] = 0
        new = load[q] + change
        allowed = allowed and (change <= 0 or new <= limit[q // num_parts])
        if q < num_parts:
            volume += change
        gain += power_of(load[q] / scale, doublings) - power_of(new / scale, doublings)
    return gain if allowed and load[:num_parts].sum() + volume <= max_volume else 0.0


@jit
def _candidates(
    v: int,
    indptr: Array,
    source: Array,
    owner: Array,
    readers: Readers,
    neighbors: Array,
    candidates: Array,
) -> int:
    """Lists the other parts with most neighbours of v; ties go to the lower number."""
    start, size, part, count = readers
    found = 0
    for k in range(start[v], start[v] + size[v]):
        neighbors[part[k]] += count[k]
    for e in range(indptr[v], indptr[v + 1]):
        neighbors[owner[source[e]]] += 1
    for _ in range(CANDIDATES):
        best = -1
        for k in range(start[v], start[v] + size[v]):
            best = _better_part(part[k], best, owner[v], neighbors)
        for e in range(indptr[v], indptr[v + 1]):
            best = _better_part(owner[source[e]], best, owner[v], neighbors)
        if best < 0:
            break
        candidates[found] = best
        found += 1
        neighbors[best] = 0
    for k in range(start[v], start[v] + size[v]):
        neighbors[part[k]] = 0
    for e in range(indptr[v], indptr[v + 1]):
        neighbors[owner[source[e]]] = 0
    return found


@jit
def _better_part(q: int, best: int, own_part: int, neighbors: Array) -> int:
    if q == own_part or neighbors[q] == 0:
        return best
    if (
        best < 0
        or neighbors[q] > neighbors[best]
        or (neighbors[q] == neighbors[best] and q < best)
    ):
        return q
    return best


@entry
def sweep(
    order: Array,
    indptr: Array,
    source: Array,
    owner: Array,
    readers: Readers,
    load: Array,
    weight: Array,
    capacity: Array,
    part_load: Array,
    start_limit: Array,
    max_volume: int,
    doublings: int,
) -> int:
    """Moves each node of `order`, in place, to the part where the potential falls most.

    The definition is `sweep` in tests/refine_reference.py. Returns the number of moves.
    """
    num_parts = part_load.shape[0]
    delta = np.zeros((2 * num_parts, 2), np.int64)
    touched = np.empty(2 * num_parts, np.int64)
    neighbors, candidates = np.zeros(num_parts, np.int64), np.empty(num_parts, np.int64)
    scale = float(max(1, load.max()))
    limit = np.minimum(start_limit, load.max())
    moves = 0
    for v in order:
        a = owner[v]
        if part_load[a, 0] <= 1:
            continue
        found = _candidates(v, indptr, source, owner, readers, neighbors, candidates)
        best, best_gain = -1, 0.0
        for c in range(found):
            b = candidates[c]
            if not fits(part_load, capacity, b, weight, v):
                continue
            num_touched = _count_change(
                v, b, indptr, source, owner, readers, delta, touched
            )
            gain = _gain(
                load, limit, max_volume, scale, doublings, delta, touched, num_touched
            )
            if gain > best_gain + TINY:
                best, best_gain = b, gain
        if best < 0:
            continue
        num_touched = _count_change(
            v, best, indptr, source, owner, readers, delta, touched
        )
        for h in range(num_touched):
            load[touched[h]] += delta[touched[h], 0]
            delta[touched[h]] = 0
        for e in range(indptr[v], indptr[v + 1]):
            _remove_reader(source[e], a, readers)
            _add_reader(source[e], best, readers)
        owner[v] = best
        transfer(part_load, weight, v, a, best)
        limit = np.minimum(start_limit, load.max())
        moves += 1
    return moves

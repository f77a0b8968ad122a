"""Compiled loops of the cutters; importing this file imports Numba."""

from __future__ import annotations

import heapq

import numpy as np

from pyg_distcomm.kernels.compile import entry, jit

Array = np.ndarray

LOADS = 3  # what a part carries: nodes (a hard limit), in-edges, train nodes (soft)


@entry
def symmetric_csr(src: Array, dst: Array, num_nodes: int) -> tuple[Array, Array]:
    """Gives indptr [n + 1] and sorted indices of A + A^T, loops and duplicates dropped.

    Two counting sorts, linear in nodes and edges.
    """
    start = np.zeros(num_nodes + 1, np.int64)
    for e in range(src.size):
        if src[e] != dst[e]:
            start[src[e] + 1] += 1
            start[dst[e] + 1] += 1
    start = np.cumsum(start)
    fill = start[:-1].copy()
    first = np.empty(start[-1], np.int32)
    for e in range(src.size):
        s, d = src[e], dst[e]
        if s != d:
            first[fill[s]] = d
            fill[s] += 1
            first[fill[d]] = s
            fill[d] += 1
    # the pattern is symmetric, so walking its rows in order fills its columns sorted;
    # equal neighbours then follow one another, and the last one written is enough
    indices = np.empty(start[-1], np.int32)
    fill[:] = start[:-1]
    for v in range(num_nodes):
        for k in range(start[v], start[v + 1]):
            u = first[k]
            if fill[u] == start[u] or indices[fill[u] - 1] != v:
                indices[fill[u]] = v
                fill[u] += 1
    return _squeeze(start, fill, indices)


@jit
def _squeeze(start: Array, end: Array, indices: Array) -> tuple[Array, Array]:
    num_nodes = end.size
    indptr = np.zeros(num_nodes + 1, np.int64)
    total = 0
    for v in range(num_nodes):
        for k in range(start[v], end[v]):
            indices[total] = indices[k]
            total += 1
        indptr[v + 1] = total
    return indptr, indices[:total].copy()


@entry
def bfs_order(indptr: Array, indices: Array, roots: Array) -> Array:
    """Lists every node, breadth first, each component from its first node in roots."""
    order = np.empty(roots.size, np.int64)
    seen = np.zeros(roots.size, np.bool_)
    head, tail = 0, 0
    for root in roots:
        if seen[root]:
            continue
        seen[root] = True
        order[tail] = root
        tail += 1
        while head < tail:
            v = order[head]
            head += 1
            for k in range(indptr[v], indptr[v + 1]):
                u = indices[k]
                if not seen[u]:
                    seen[u] = True
                    order[tail] = u
                    tail += 1
    return order


@jit
def _touch(
    v: int, indptr: Array, indices: Array, owner: Array, count: Array, touched: Array
) -> int:
    """Counts v's neighbours by part; lists in `touched` the parts that have any."""
    found = 0
    for k in range(indptr[v], indptr[v + 1]):
        p = owner[indices[k]]
        if p >= 0:
            if count[p] == 0:
                touched[found] = p
                found += 1
            count[p] += 1
    return found


@jit
def _room(load: Array, capacity: Array, p: int, weight: Array, v: int) -> float:
    """Gives the smallest free share over the loads that v adds to; <= 0 is full."""
    room: float = 1.0 - load[p, 0] / capacity[0]
    for c in range(1, LOADS):
        if weight[v, c] > 0:
            room = min(room, 1.0 - load[p, c] / capacity[c])
    return room


@jit
def _emptiest(load: Array, capacity: Array, weight: Array, v: int) -> int:
    """Gives the part with the most room that is not full of nodes."""
    best, best_room = -1, -np.inf
    for p in range(load.shape[0]):
        if load[p, 0] < capacity[0]:
            room = _room(load, capacity, p, weight, v)
            if room > best_room:
                best, best_room = p, room
    return best


@entry
def stream(
    order: Array,
    indptr: Array,
    indices: Array,
    weight: Array,
    capacity: Array,
    owner: Array,
    load: Array,
) -> None:
    """Places each node of `order` anew, by linear deterministic greedy.

        part(v) = argmax_p |N(v) in p| * room(p),   room = min_c 1 - load_c(p) / cap_c

    owner [n] holds the last pass's parts (-1: none yet) and is rewritten; load [P, 3]
    is counted afresh. Ties go to the emptier part, then to the lower number.
    """
    num_parts = load.shape[0]
    count = np.zeros(num_parts, np.int64)
    touched = np.empty(num_parts, np.int64)
    load[:] = 0
    for v in order:
        found = _touch(v, indptr, indices, owner, count, touched)
        best, best_score, best_room = -1, 0.0, 0.0
        for t in range(found):
            p = touched[t]
            room = _room(load, capacity, p, weight, v)
            score = count[p] * room
            count[p] = 0
            if load[p, 0] >= capacity[0] or room <= 0:
                continue
            tie = score == best_score and (
                room > best_room or (room == best_room and p < best)
            )
            if score > best_score or tie:
                best, best_score, best_room = p, score, room
        if best < 0:
            best = _emptiest(load, capacity, weight, v)
        owner[v] = best
        for c in range(LOADS):
            load[best, c] += weight[v, c]


@jit
def _fits(load: Array, capacity: Array, p: int, weight: Array, v: int) -> bool:
    for c in range(LOADS):
        if weight[v, c] > 0 and load[p, c] + weight[v, c] > capacity[c]:
            return False
    return True


@entry
def refine(
    order: Array,
    indptr: Array,
    indices: Array,
    weight: Array,
    capacity: Array,
    owner: Array,
    load: Array,
) -> int:
    """Moves each node to the fitting part that holds most of its neighbours.

    Only strict gains are taken, so the cut falls with each move; returns the moves.
    """
    num_parts = load.shape[0]
    count = np.zeros(num_parts, np.int64)
    touched = np.empty(num_parts, np.int64)
    moves = 0
    for v in order:
        found = _touch(v, indptr, indices, owner, count, touched)
        home = owner[v]
        best, best_count = home, count[home]
        for t in range(found):
            p = touched[t]
            if count[p] > best_count and _fits(load, capacity, p, weight, v):
                best, best_count = p, count[p]
        for t in range(found):
            count[touched[t]] = 0
        if best != home and load[home, 0] > 1:
            moves += 1
            owner[v] = best
            for c in range(LOADS):
                load[home, c] -= weight[v, c]
                load[best, c] += weight[v, c]
    return moves


@jit
def _over(load: Array, capacity: Array, p: int, weight: Array, v: int) -> bool:
    over = False
    for c in range(LOADS):
        over = over or (weight[v, c] > 0 and load[p, c] > capacity[c])
    return over


@entry
def rebalance(
    order: Array,
    indptr: Array,
    indices: Array,
    weight: Array,
    capacity: Array,
    owner: Array,
    load: Array,
    loss: int,
) -> None:
    """Moves nodes out of parts above a limit, each adding at most `loss` to the cut."""
    num_parts = load.shape[0]
    count = np.zeros(num_parts, np.int64)
    touched = np.empty(num_parts, np.int64)
    for v in order:
        home = owner[v]
        if not _over(load, capacity, home, weight, v):
            continue
        found = _touch(v, indptr, indices, owner, count, touched)
        best, best_count = -1, max(0, count[home] - loss - 1)
        for t in range(found):
            p = touched[t]
            better = p != home and count[p] > best_count
            if better and _fits(load, capacity, p, weight, v):
                best, best_count = p, count[p]
        if best < 0 and count[home] <= loss:
            p = _emptiest(load, capacity, weight, v)
            if p >= 0 and _room(load, capacity, p, weight, v) > 0:
                best = p
        for t in range(found):
            count[touched[t]] = 0
        if best >= 0 and best != home:
            owner[v] = best
            for c in range(LOADS):
                load[home, c] -= weight[v, c]
                load[best, c] += weight[v, c]


@entry
def deal(order: Array, weight: Array, load: Array, group: Array) -> None:
    """Deals nodes out to groups: each to the lightest that has room, ties to the first.

    order [c] should fall in weight; load [groups] is what each group has and is added
    to; group [n] is written. The groups' sizes differ by one at most.
    """
    each, more = order.size // load.size, order.size % load.size
    size = np.zeros(load.size, np.int64)
    heap = [(load[g], g) for g in range(load.size)]
    heapq.heapify(heap)
    for v in order:
        while True:
            _, g = heapq.heappop(heap)
            if size[g] < each or more > 0:
                break
        more -= size[g] == each
        size[g] += 1
        group[v] = g
        load[g] += weight[v]
        if size[g] <= each:
            heapq.heappush(heap, (load[g], g))


@entry
def cut_size(indptr: Array, indices: Array, owner: Array) -> int:
    """Counts the neighbours owned by another part, over all nodes."""
    total = 0
    for v in range(owner.size):
        for k in range(indptr[v], indptr[v + 1]):
            if owner[indices[k]] != owner[v]:
                total += 1
    return total

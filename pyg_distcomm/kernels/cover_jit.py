"""The loops of minimum vertex covers, for Numba."""

from __future__ import annotations

import numpy as np

from pyg_distcomm.kernels.compile import Array, jit

FREE = -1


@jit
def match(ptr: Array, to: Array, mate: Array, mate_of_right: Array) -> None:
    """Fills in a maximum matching ([Hopcroft73] Sec. 3).

    Phases: a search by breadth gives every left vertex its distance from a free one, and
    searches by depth along growing distances find augmenting paths, apart from each
    other. The first phase is greedy.
    """
    lefts = len(ptr) - 1
    for u in range(lefts):
        for e in range(ptr[u], ptr[u + 1]):
            if mate_of_right[to[e]] == FREE:
                mate[u], mate_of_right[to[e]] = to[e], u
                break
    distance = np.empty(lefts, np.int64)
    cursor = np.empty(lefts, np.int64)
    room = np.empty(lefts, np.int64)
    while spread(ptr, to, mate, mate_of_right, distance, room):
        cursor[:] = ptr[:-1]
        for root in range(lefts):
            if mate[root] == FREE:
                augment(root, ptr, to, mate, mate_of_right, distance, cursor, room)


@jit
def spread(
    ptr: Array,
    to: Array,
    mate: Array,
    mate_of_right: Array,
    distance: Array,
    queue: Array,
) -> bool:
    """Measures alternating paths from free left vertices; tells if one ends free."""
    tail, found = 0, False
    for u in range(len(ptr) - 1):
        distance[u] = FREE
        if mate[u] == FREE:
            distance[u] = 0
            queue[tail] = u
            tail += 1
    head = 0
    while head < tail:
        u = queue[head]
        head += 1
        for e in range(ptr[u], ptr[u + 1]):
            w = mate_of_right[to[e]]
            if w == FREE:
                found = True
            elif distance[w] == FREE:
                distance[w] = distance[u] + 1
                queue[tail] = w
                tail += 1
    return found


@jit
def augment(
    root: int,
    ptr: Array,
    to: Array,
    mate: Array,
    mate_of_right: Array,
    distance: Array,
    cursor: Array,
    path: Array,
) -> None:
    """Looks for one augmenting path; a vertex that leads nowhere is left for good."""
    depth = 0
    path[0] = root
    while depth >= 0:
        u = path[depth]
        if cursor[u] == ptr[u + 1]:
            depth -= 1
            if depth >= 0:
                cursor[path[depth]] += 1
            continue
        w = mate_of_right[to[cursor[u]]]
        if w == FREE:
            for k in range(depth, -1, -1):  # turns the path around
                u = path[k]
                v = to[cursor[u]]
                mate[u], mate_of_right[v] = v, u
                cursor[u] = ptr[u + 1]
            return
        if distance[w] == distance[u] + 1:
            depth += 1
            path[depth] = w
        else:
            cursor[u] += 1


@jit
def reach(
    ptr: Array, to: Array, mate: Array, mate_of_right: Array, left: Array, right: Array
) -> None:
    """Marks what alternating paths from free left vertices reach."""
    lefts = len(ptr) - 1
    queue = np.empty(lefts, np.int64)
    tail = 0
    for u in range(lefts):
        if mate[u] == FREE:
            left[u] = True
            queue[tail] = u
            tail += 1
    head = 0
    while head < tail:
        u = queue[head]
        head += 1
        for e in range(ptr[u], ptr[u + 1]):
            v = to[e]
            if not right[v]:
                right[v] = True
                w = mate_of_right[v]
                if not left[w]:
                    left[w] = True
                    queue[tail] = w
                    tail += 1

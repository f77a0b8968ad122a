"""Compiled loops of the streaming cutter; importing this file imports Numba.

Each takes a chunk of edges and arrays with an entry, or SEATS entries, per node.
"""

from __future__ import annotations

import numpy as np

from pyg_distcomm.kernels.compile import entry, jit

Array = np.ndarray

LOADS = 2  # what a part carries: nodes (a hard limit) and in-edges (soft)


@entry
def count_degrees(src: Array, dst: Array, out_degree: Array, weight: Array) -> None:
    """Adds to the out-degrees [n], and to the in-degrees weight[:, 1]."""
    for e in range(src.size):
        out_degree[src[e]] += 1
        weight[dst[e], 1] += 1


@entry
def cluster(
    src: Array,
    dst: Array,
    degree: Array,
    home: Array,
    volume: Array,
    size: Array,
    most: Array,
) -> None:
    """Joins the ends of each edge: the one in the smaller cluster goes to the larger.

    home [n] is the cluster of each node, named after a node; volume and size [n] are
    the degrees and nodes in each, never above most = (volume, nodes).
    """
    for e in range(src.size):
        small, large = src[e], dst[e]
        if home[small] == home[large]:
            continue
        rest_small = volume[home[small]] - degree[small]
        rest_large = volume[home[large]] - degree[large]
        if rest_small > rest_large:
            small, large = large, small
        a, b = home[small], home[large]
        if volume[b] + degree[small] <= most[0] and size[b] + 1 <= most[1]:
            volume[a] -= degree[small]
            size[a] -= 1
            volume[b] += degree[small]
            size[b] += 1
            home[small] = b


@entry
def pack(
    order: Array,
    weight: Array,
    capacity: Array,
    load: Array,
    place: Array,
) -> None:
    """Puts each cluster of `order` where most room is left; place -1 where none has it.

    load [P, LOADS] is added to.
    """
    for c in order:
        best, best_room = -1, -np.inf
        for p in range(load.shape[0]):
            if load[p, 0] + weight[c, 0] > capacity[0]:
                continue
            room = 1.0
            for k in range(LOADS):
                room = min(room, 1 - (load[p, k] + weight[c, k]) / max(capacity[k], 1))
            if room > best_room:
                best, best_room = p, room
        place[c] = best
        if best >= 0:
            load[best] += weight[c]


@entry
def vote(
    src: Array,
    dst: Array,
    owner: Array,
    own: Array,
    seat: Array,
    count: Array,
) -> int:
    """Counts, for both ends of each edge, where the other is; returns the edges cut.

    own [n] counts neighbours in a node's own part, exactly. seat [n, SEATS] names parts
    of others, and count their neighbours, by the rule of [Misra82]: a part without a
    seat takes an empty one, or takes one vote from every seat; so counts are never too
    high, and exact while a node's neighbours are in no more parts than there are seats.
    """
    cut = 0
    for e in range(src.size):
        u, v = src[e], dst[e]
        if u == v:
            continue
        if owner[u] == owner[v]:
            own[u] += 1
            own[v] += 1
            continue
        cut += 1
        _sit(u, owner[v], seat, count)
        _sit(v, owner[u], seat, count)
    return cut


@jit
def _sit(v: int, part: int, seat: Array, count: Array) -> None:
    free = -1
    for k in range(seat.shape[1]):
        if count[v, k] == 0:
            free = k
        elif seat[v, k] == part:
            count[v, k] += 1
            return
    if free >= 0:
        seat[v, free], count[v, free] = part, 1
        return
    for k in range(seat.shape[1]):
        count[v, k] -= 1


@jit
def _fits(v: int, q: int, weight: Array, capacity: Array, load: Array) -> bool:
    for c in range(LOADS):
        if weight[v, c] > 0 and load[q, c] + weight[v, c] > capacity[c]:
            return False
    return True


@entry
def move(
    order: Array,
    owner: Array,
    own: Array,
    seat: Array,
    count: Array,
    weight: Array,
    capacity: Array,
    load: Array,
) -> int:
    """Moves each unit of `order` to the part with most votes that has room.

    weight [n, LOADS] is what a unit, a node or a cluster, adds to a part. Returns moves.
    """
    moves = 0
    for v in order:
        a, best, most = owner[v], -1, own[v]
        for k in range(seat.shape[1]):
            q = seat[v, k]
            if count[v, k] == 0 or not _fits(v, q, weight, capacity, load):
                continue
            if count[v, k] > most or (best >= 0 and count[v, k] == most and q < best):
                best, most = q, count[v, k]
        if best >= 0 and load[a, 0] > weight[v, 0]:
            owner[v] = best
            load[a] -= weight[v]
            load[best] += weight[v]
            moves += 1
    return moves

"""Compiles the loops of the cutters; importing this module imports Numba.

Loads of parts are nodes (a hard limit), in-edges and, but for streams, train nodes (soft).
Loops of the streaming cutter take a chunk of edges, and arrays with an entry, or a few
seats, per node.
"""

from __future__ import annotations

import heapq

import numpy as np

from pyg_distcomm.kernels.compile import entry, jit

Array = np.ndarray


@entry
def distinct_sources(
    src: Array, dst: Array, num_nodes: int, both: bool
) -> tuple[Array, Array]:
    """Returns indptr [n + 1] and, for each node, its distinct sources but itself, sorted.

    With `both`, edges count in both directions. Two counting sorts, linear in nodes and
    edges.
    """
    start = np.zeros(num_nodes + 1, np.int64)
    for e in range(src.size):
        if src[e] != dst[e]:
            start[src[e] + 1] += 1
            if both:
                start[dst[e] + 1] += 1
    start = np.cumsum(start)
    fill = start[:-1].copy()
    target = np.empty(start[-1], np.int32)
    for e in range(src.size):
        s, d = src[e], dst[e]
        if s != d:
            target[fill[s]] = d
            fill[s] += 1
            if both:
                target[fill[d]] = s
                fill[d] += 1
    begin = np.zeros(num_nodes + 1, np.int64)
    for k in range(target.size):
        begin[target[k] + 1] += 1
    begin = np.cumsum(begin)
    end = begin[:-1].copy()
    source = np.empty(target.size, np.int32)
    for u in range(num_nodes):
        for k in range(start[u], start[u + 1]):
            t = target[k]
            # equal ones follow one another, and the last one written is enough
            if end[t] == begin[t] or source[end[t] - 1] != u:
                source[end[t]] = u
                end[t] += 1
    indptr = np.zeros(num_nodes + 1, np.int64)
    total = 0
    for v in range(num_nodes):  # closes the gaps between rows
        for k in range(begin[v], end[v]):
            source[total] = source[k]
            total += 1
        indptr[v + 1] = total
    return indptr, source[:total].copy()


@jit
def transfer(load: Array, weight: Array, v: int, a: int, b: int) -> None:
    """Takes what node v adds from the load of part a, and gives it to part b."""
    for c in range(weight.shape[1]):
        load[a, c] -= weight[v, c]
        load[b, c] += weight[v, c]


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
    """Returns the smallest free share over the loads that v adds to; <= 0 is full."""
    room: float = 1.0 - load[p, 0] / capacity[0]
    for c in range(1, capacity.size):
        if weight[v, c] > 0:
            room = min(room, 1.0 - load[p, c] / capacity[c])
    return room


@jit
def _emptiest(load: Array, capacity: Array, weight: Array, v: int) -> int:
    """Returns the part with the most room that is not full of nodes."""
    best, best_room = -1, -np.inf
    for p in range(load.shape[0]):
        if load[p, 0] < capacity[0]:
            room = _room(load, capacity, p, weight, v)
            if room > best_room:
                best, best_room = p, room
    return best


@entry
def ldg(
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
        for c in range(capacity.size):
            load[best, c] += weight[v, c]


@jit
def fits(load: Array, capacity: Array, p: int, weight: Array, v: int) -> bool:
    """Returns whether part p has room for all that node v adds."""
    for c in range(capacity.size):
        if weight[v, c] > 0 and load[p, c] + weight[v, c] > capacity[c]:
            return False
    return True


@entry
def lower_cut(
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
            if count[p] > best_count and fits(load, capacity, p, weight, v):
                best, best_count = p, count[p]
        for t in range(found):
            count[touched[t]] = 0
        if best != home and load[home, 0] > 1:
            moves += 1
            owner[v] = best
            transfer(load, weight, v, home, best)
    return moves


@jit
def _over(load: Array, capacity: Array, p: int, weight: Array, v: int) -> bool:
    over = False
    for c in range(capacity.size):
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
            if better and fits(load, capacity, p, weight, v):
                best, best_count = p, count[p]
        if best < 0 and count[home] <= loss:
            p = _emptiest(load, capacity, weight, v)
            if p >= 0 and _room(load, capacity, p, weight, v) > 0:
                best = p
        for t in range(found):
            count[touched[t]] = 0
        if best >= 0 and best != home:
            owner[v] = best
            transfer(load, weight, v, home, best)


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
    order: Array, weight: Array, capacity: Array, load: Array, place: Array
) -> None:
    """Puts each cluster of `order` where most room is left; place -1 where none has it.

    load [P, 2] is added to.
    """
    for c in order:
        best, best_room = -1, -np.inf
        for p in range(load.shape[0]):
            if load[p, 0] + weight[c, 0] > capacity[0]:
                continue
            room = 1.0
            for k in range(capacity.size):
                room = min(room, 1 - (load[p, k] + weight[c, k]) / max(capacity[k], 1))
            if room > best_room:
                best, best_room = p, room
        place[c] = best
        if best >= 0:
            load[best] += weight[c]


@entry
def vote(
    src: Array, dst: Array, owner: Array, own: Array, seat: Array, count: Array
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

    weight [n, 2] is what a unit, a node or a cluster, adds to a part. Returns moves.
    """
    moves = 0
    for v in order:
        a, best, most = owner[v], -1, own[v]
        for k in range(seat.shape[1]):
            q = seat[v, k]
            if count[v, k] == 0 or not fits(load, capacity, q, weight, v):
                continue
            if count[v, k] > most or (best >= 0 and count[v, k] == most and q < best):
                best, most = q, count[v, k]
        if best >= 0 and load[a, 0] > weight[v, 0]:
            owner[v] = best
            transfer(load, weight, v, a, best)
            moves += 1
    return moves

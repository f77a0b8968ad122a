"""Compiles the loops of the cutters and of refinement; importing this module imports Numba.

The loads of a part are its nodes (a hard limit), its in-edges and, except for streams, its
train nodes (soft limits). `loads` are the weights [n, c] that nodes, or clusters, add to a
part, the capacity [c] of any part, and the loads [P, c] of all. A `csr` is (indptr, indices).
Loops of the streaming cutter take a chunk of edges, and arrays with an entry, or a few slots,
per node.

`readers` lists the parts that read the row of each node, as (start, size, part, count): the row
of node u is read by the `size[u]` parts from `part[start[u]]` on, each for `count` targets.
"""

from __future__ import annotations

import heapq

import numpy as np

from pyg_distcomm.kernels.compile import jit

Array = np.ndarray
Csr = tuple[Array, Array]
Loads = tuple[Array, Array, Array]
Votes = tuple[Array, Array, Array]  # see `vote`


@jit
def distinct_sources(
    src: Array, dst: Array, num_nodes: int, both: bool
) -> tuple[Array, Array]:
    """Returns indptr [n + 1] and each node's distinct sources, sorted, without self-loops.

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
def transfer(loads: Loads, v: int, a: int, b: int) -> None:
    """Moves the weights of node v from the loads of part a to those of part b."""
    weight, _, load = loads
    for c in range(weight.shape[1]):
        load[a, c] -= weight[v, c]
        load[b, c] += weight[v, c]


@jit
def _count_neighbors(
    v: int, csr: Csr, owner: Array, count: Array, near_parts: Array
) -> int:
    """Counts v's neighbours by part; lists in `near_parts` the parts that have any."""
    (indptr, indices), found = csr, 0
    for k in range(indptr[v], indptr[v + 1]):
        p = owner[indices[k]]
        if p >= 0:
            if count[p] == 0:
                near_parts[found] = p
                found += 1
            count[p] += 1
    return found


@jit
def _free_share(loads: Loads, p: int, v: int) -> float:
    """Returns the least free fraction of part p over the loads of v; <= 0 means full."""
    weight, capacity, load = loads
    free: float = 1.0 - load[p, 0] / capacity[0]
    for c in range(1, capacity.size):
        if weight[v, c] > 0:
            free = min(free, 1.0 - load[p, c] / capacity[c])
    return free


@jit
def _emptiest_part(loads: Loads, v: int) -> int:
    """Returns the part with the largest free fraction that may take another node."""
    _, capacity, load = loads
    best, best_free = -1, -np.inf
    for p in range(load.shape[0]):
        if load[p, 0] < capacity[0]:
            free = _free_share(loads, p, v)
            if free > best_free:
                best, best_free = p, free
    return best


@jit
def ldg(order: Array, csr: Csr, loads: Loads, owner: Array) -> None:
    """Assigns each node of `order` anew, by linear deterministic greedy.

        part(v) = argmax_p |N(v) in p| * free(p),   free = min_c 1 - load_c(p) / cap_c

    owner [n] holds the parts of the last pass (-1 for none yet) and is overwritten; loads are
    counted anew. Ties go to the emptier part, then to the lower number.
    """
    weight, capacity, load = loads
    num_parts = load.shape[0]
    count = np.zeros(num_parts, np.int64)
    near_parts = np.empty(num_parts, np.int64)
    load[:] = 0
    for v in order:
        found = _count_neighbors(v, csr, owner, count, near_parts)
        best, best_score, best_free = -1, 0.0, 0.0
        for t in range(found):
            p = near_parts[t]
            free = _free_share(loads, p, v)
            score = count[p] * free
            count[p] = 0
            if load[p, 0] >= capacity[0] or free <= 0:
                continue
            tie = score == best_score and (
                free > best_free or (free == best_free and p < best)
            )
            if score > best_score or tie:
                best, best_score, best_free = p, score, free
        if best < 0:
            best = _emptiest_part(loads, v)
        owner[v] = best
        for c in range(capacity.size):
            load[best, c] += weight[v, c]


@jit
def fits(loads: Loads, p: int, v: int) -> bool:
    """Returns whether part p has room for all weights of node v."""
    weight, capacity, load = loads
    for c in range(capacity.size):
        if weight[v, c] > 0 and load[p, c] + weight[v, c] > capacity[c]:
            return False
    return True


@jit
def _over_capacity(loads: Loads, p: int, v: int) -> bool:
    weight, capacity, load = loads
    over = False
    for c in range(capacity.size):
        over = over or (weight[v, c] > 0 and load[p, c] > capacity[c])
    return over


@jit
def improve(order: Array, csr: Csr, loads: Loads, owner: Array, loss: int) -> int:
    """Moves each node to the part with most of its neighbours that has room for it.

    Every move lowers the cut, for a loss of -1; else nodes move out of parts above a limit,
    and a move adds at most `loss` to the cut. Returns the number of moves.
    """
    load = loads[2]
    num_parts = load.shape[0]
    count = np.zeros(num_parts, np.int64)
    near_parts = np.empty(num_parts, np.int64)
    moves = 0
    for v in order:
        own_part = owner[v]
        if loss >= 0 and not _over_capacity(loads, own_part, v):
            continue
        found = _count_neighbors(v, csr, owner, count, near_parts)
        best, best_count = -1, max(0, count[own_part] - loss - 1)
        for t in range(found):
            p = near_parts[t]
            if p != own_part and count[p] > best_count and fits(loads, p, v):
                best, best_count = p, count[p]
        if best < 0 and count[own_part] <= loss:
            p = _emptiest_part(loads, v)
            if p >= 0 and _free_share(loads, p, v) > 0:
                best = p
        for t in range(found):
            count[near_parts[t]] = 0
        if best >= 0 and best != own_part and (loss >= 0 or load[own_part, 0] > 1):
            moves += 1
            owner[v] = best
            transfer(loads, v, own_part, best)
    return moves


@jit
def deal(order: Array, weight: Array, load: Array, group: Array) -> None:
    """Assigns each node to the lightest group that has room; ties go to the first.

    order [c] should be by descending weight; load [groups] is updated; group [n] is written.
    The sizes of groups differ by one at most.
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


@jit
def cut_size(indptr: Array, indices: Array, owner: Array) -> int:
    """Counts the neighbours, over all nodes, that another part owns."""
    total = 0
    for v in range(owner.size):
        for k in range(indptr[v], indptr[v + 1]):
            if owner[indices[k]] != owner[v]:
                total += 1
    return total


@jit
def count_degrees(src: Array, dst: Array, out_degree: Array, weight: Array) -> None:
    """Adds to the out-degrees [n], and to the in-degrees weight[:, 1]."""
    for e in range(src.size):
        out_degree[src[e]] += 1
        weight[dst[e], 1] += 1


@jit
def cluster(
    src: Array,
    dst: Array,
    degree: Array,
    cluster_of: Array,
    volume: Array,
    size: Array,
    most: Array,
) -> None:
    """Joins clusters along edges: the end in the smaller cluster moves to the larger.

    cluster_of [n] is the cluster of each node, named after a node; volume and size [n] are
    the degrees and nodes in each, never above most = (volume, nodes).
    """
    for e in range(src.size):
        smaller, larger = src[e], dst[e]
        if cluster_of[smaller] == cluster_of[larger]:
            continue
        rest_smaller = volume[cluster_of[smaller]] - degree[smaller]
        rest_larger = volume[cluster_of[larger]] - degree[larger]
        if rest_smaller > rest_larger:
            smaller, larger = larger, smaller
        a, b = cluster_of[smaller], cluster_of[larger]
        if volume[b] + degree[smaller] <= most[0] and size[b] + 1 <= most[1]:
            volume[a] -= degree[smaller]
            size[a] -= 1
            volume[b] += degree[smaller]
            size[b] += 1
            cluster_of[smaller] = b


@jit
def pack(order: Array, loads: Loads, place: Array) -> None:
    """Assigns each cluster of `order` to the part with most room; `place` is -1 if none has."""
    weight, capacity, load = loads
    for c in order:
        best, best_free = -1, -np.inf
        for p in range(load.shape[0]):
            if load[p, 0] + weight[c, 0] > capacity[0]:
                continue
            free = 1.0
            for k in range(capacity.size):
                free = min(free, 1 - (load[p, k] + weight[c, k]) / max(capacity[k], 1))
            if free > best_free:
                best, best_free = p, free
        place[c] = best
        if best >= 0:
            load[best] += weight[c]


@jit
def vote(src: Array, dst: Array, owner: Array, votes: Votes) -> int:
    """Counts, for both ends of each edge, the part of the other end; returns the edges cut.

    own [n] counts neighbours in a node's own part, exactly. voted_part [n, SLOTS] names other
    parts, and count the neighbours in each, by the rule of [Misra82]: a part that has no
    slot takes an empty slot, or takes one vote from every slot. So counts are never too
    high, and exact while a node has neighbours in no more parts than there are slots.
    """
    (own, voted_part, count), cut = votes, 0
    for e in range(src.size):
        u, v = src[e], dst[e]
        if u == v:
            continue
        if owner[u] == owner[v]:
            own[u] += 1
            own[v] += 1
            continue
        cut += 1
        _add_vote(u, owner[v], voted_part, count)
        _add_vote(v, owner[u], voted_part, count)
    return cut


@jit
def _add_vote(v: int, part: int, voted_part: Array, count: Array) -> None:
    """Counts a neighbour of v in another part, in one of v's slots."""
    slot = -1
    for k in range(voted_part.shape[1]):
        if count[v, k] == 0:
            slot = k
        elif voted_part[v, k] == part:
            count[v, k] += 1
            return
    if slot >= 0:
        voted_part[v, slot], count[v, slot] = part, 1
        return
    for k in range(voted_part.shape[1]):
        count[v, k] -= 1


@jit
def move(order: Array, owner: Array, votes: Votes, loads: Loads) -> None:
    """Moves each node or cluster of `order` to the part with most votes that has room."""
    own, voted_part, count = votes
    weight, _, load = loads
    for v in order:
        a, best, most = owner[v], -1, own[v]
        for k in range(voted_part.shape[1]):
            q = voted_part[v, k]
            if count[v, k] == 0 or not fits(loads, q, v):
                continue
            if count[v, k] > most or (best >= 0 and count[v, k] == most and q < best):
                best, most = q, count[v, k]
        if best >= 0 and load[a, 0] > weight[v, 0]:
            owner[v] = best
            transfer(loads, v, a, best)


Readers = tuple[Array, Array, Array, Array]

CANDIDATES = 8  # parts that a node may move to: those with most of its neighbours
TINY = 1e-12  # differences below are rounding


@jit
def list_readers(csr: Csr, owner: Array, num_parts: int) -> Readers:
    """Lists the parts that read each node's row, and for how many targets."""
    (indptr, source), num_nodes = csr, owner.size
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


@jit
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
    csr: Csr,
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
    (indptr, source), a = csr, owner[v]
    num_parts = delta.shape[0] // 2
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
    v: int, csr: Csr, owner: Array, readers: Readers, count: Array, near_parts: Array
) -> int:
    """Lists first the other parts with most neighbours of v; ties go to the lower number.

    Returns how many, `CANDIDATES` at most; count [P] is zero before and after.
    """
    start, size, part, targets = readers
    found = _count_neighbors(v, csr, owner, count, near_parts)
    for k in range(start[v], start[v] + size[v]):
        if count[part[k]] == 0:
            near_parts[found] = part[k]
            found += 1
        count[part[k]] += targets[k]
    count[owner[v]] = 0
    chosen = 0
    while chosen < min(found, CANDIDATES):
        best = chosen
        for t in range(chosen, found):
            p, q = near_parts[t], near_parts[best]
            if count[p] > count[q] or (count[p] == count[q] and p < q):
                best = t
        if count[near_parts[best]] == 0:  # its own
            break
        near_parts[chosen], near_parts[best] = near_parts[best], near_parts[chosen]
        chosen += 1
    for t in range(found):
        count[near_parts[t]] = 0
    return chosen


@jit
def sweep(
    order: Array,
    csr: Csr,
    owner: Array,
    readers: Readers,
    load: Array,
    loads: Loads,
    start_limit: Array,
    max_volume: int,
    doublings: int,
) -> int:
    """Moves each node of `order`, in place, to the part where the potential falls most.

    The definition is `sweep` in tests/refine_reference.py. Returns the number of moves.
    """
    (indptr, source), part_load = csr, loads[2]
    num_parts = part_load.shape[0]
    delta = np.zeros((2 * num_parts, 2), np.int64)
    touched = np.empty(2 * num_parts, np.int64)
    count, candidates = np.zeros(num_parts, np.int64), np.empty(num_parts, np.int64)
    scale = float(max(1, load.max()))
    limit = np.minimum(start_limit, load.max())
    moves = 0
    for v in order:
        a = owner[v]
        if part_load[a, 0] <= 1:
            continue
        found = _candidates(v, csr, owner, readers, count, candidates)
        best, best_gain = -1, 0.0
        for c in range(found):
            b = candidates[c]
            if not fits(loads, b, v):
                continue
            num_touched = _count_change(v, b, csr, owner, readers, delta, touched)
            gain = _gain(
                load, limit, max_volume, scale, doublings, delta, touched, num_touched
            )
            if gain > best_gain + TINY:
                best, best_gain = b, gain
        if best < 0:
            continue
        num_touched = _count_change(v, best, csr, owner, readers, delta, touched)
        for h in range(num_touched):
            load[touched[h]] += delta[touched[h], 0]
            delta[touched[h]] = 0
        for e in range(indptr[v], indptr[v + 1]):
            _remove_reader(source[e], a, readers)
            _add_reader(source[e], best, readers)
        owner[v] = best
        transfer(loads, v, a, best)
        limit = np.minimum(start_limit, load.max())
        moves += 1
    return moves

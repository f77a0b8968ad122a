"""Holds the loops of `sample_cpu` for Numba: neighbour sampling.

A relation is a CSC matrix: the in-edges of node v are entries ``colptr[v] ..
colptr[v+1]-1``, in ascending edge id. Entry e is ``row[e * stride]``, the source; with
stride 2 the edge's id stands beside it, ``row[2 e + 1]``, so that one cache miss fetches
both, and otherwise it is e itself.

[Note: sampling in phases] A hop looks up the bounds of each node of the frontier, draws
entries, fetches them, and relabels their sources. Each phase is a loop of its own over
the whole hop, because only then can it ask for memory well before it needs it: a
minibatch touches the graph at random, and most of its time would be spent waiting.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pyg_distcomm.kernels.compile import LINE, Array, Matrix, jit, prefetch
from pyg_distcomm.kernels.core_jit import GOLDEN, UNIT, hash_row, mix, word

SOON = 32  # nodes or entries asked for before they are needed
LOCAL_ID = np.int64(0xFFFFFFFF)  # mask: the low half of a slot; above is the stamp
ROWS_SOON = 16  # rows asked for before they are needed
FEW = 48  # draws of a row up to which a scan for repeats beats a table
# keys and ends of minibatches; nodes, their first and last entries, and where draws begin
Nodes = tuple[Array, Array, Array, Array, Array, Array]
Entries = tuple[Array, int]  # sources, and the distance between them
Place = tuple[Array, int]  # where drawn entries go, and from which position on
# slots, the stamp of those in use, and the number of nodes
Table = tuple[Array, int, int]


@jit
def stream(key: int, tree: int, node: int | np.int64) -> np.uint64:
    """Returns the generator of one node in one tree of one minibatch."""
    return mix(hash_row(key, tree) ^ mix(np.uint64(node) + GOLDEN))


@jit
def uniform(generator: np.uint64, draw: int | np.int64) -> float:
    """Returns draw number ``draw`` of a generator, in [0, 1)."""
    return np.float64(word(generator, draw) >> np.uint64(11)) * UNIT


@jit
def bounds(
    colptr: Array, node: Array, low: Array, high: Array, begin: int, end: int
) -> None:
    """Looks up where the in-edges of nodes begin .. end-1 of the frontier are."""
    for i in range(begin, end):
        prefetch(colptr, np.int64(node[min(i + SOON, end - 1)]))
        v = node[i]
        low[i] = colptr[v]
        high[i] = colptr[v + 1]


@jit
def narrow(
    entries: Entries,
    clock: tuple[Array, bool],
    limits: Array,
    keep_last: int,
    bounds: tuple[Array, Array],
    begin: int,
    end: int,
) -> None:
    """Keeps the in-edges that are no later than a limit; of them the last few.

    The time of an entry is its own, or its source's if ``by_node``; the entries of one
    node ascend in it. ``keep_last`` is -1 to keep all.
    """
    (row, stride), (time, by_node), (low, high) = entries, clock, bounds
    for i in range(begin, end):
        limit = limits[i]
        first, last = low[i], high[i]
        while first < last:
            middle = (first + last) // 2
            timed = np.int64(row[middle * stride]) if by_node else middle
            if time[timed] <= limit:
                first = middle + 1
            else:
                last = middle
        high[i] = first
        if keep_last >= 0:
            low[i] = max(low[i], first - keep_last)


@jit
def count(
    low: Array,
    high: Array,
    weight: Array | None,
    fan_out: int,
    replace: bool,
    start: Array,
    begin: int,
    end: int,
) -> None:
    """Counts the draws of node i as `start[i + 1]`; -1 where it cannot be drawn from.

    Entries of weight zero are never drawn, so they do not count, unless all are taken.
    """
    for i in range(begin, end):
        draws, choices = 0, high[i] - low[i]
        drawn = weight is not None and fan_out > 0 and choices > 0
        if weight is not None and drawn:
            choices = 0
            for e in range(low[i], high[i]):
                choices += weight[e] > 0
        if fan_out < 0 or (choices < fan_out and not replace):
            draws = choices
        elif choices:
            draws = fan_out
        start[i + 1] = -1 if drawn and not choices else draws


@jit
def add_up(start: Array) -> int:
    """Turns counts into offsets; returns their sum, or -1 - i if count i is negative."""
    start[0] = 0
    for i in range(len(start) - 1):
        if start[i + 1] < 0:
            return -1 - i
        start[i + 1] += start[i]
    return start[-1]


@jit
def draw(
    nodes: Nodes, tree: Array | None, replace: bool, to: Place, begin: int, end: int
) -> None:
    """Draws entries uniformly; without replacement by Floyd's method ([Bentley87]).

    For minibatches begin .. end-1, whose nodes end at `ends`.
    """
    (keys, ends, node, low, high, start), (position, at) = nodes, to
    head, tail = ends[begin - 1] if begin else 0, ends[end - 1]
    widest = 0
    for i in range(head, tail):
        widest = max(widest, high[i] - low[i] if start[i + 1] - start[i] > FEW else 0)
    taken = np.zeros(widest, np.int64)  # the last node, from 1, that took this entry
    batch = begin
    for i in range(head, tail):
        while i >= ends[batch]:
            batch += 1
        first, size = low[i], high[i] - low[i]
        home, draws = at + start[i], start[i + 1] - start[i]
        if draws == size and not replace:
            for k in range(draws):
                position[home + k] = first + k
            continue
        generator = stream(keys[batch], 0 if tree is None else tree[i], node[i])
        for k in range(draws):
            top = size if replace else size - draws + k + 1
            pick = np.int64(uniform(generator, k) * top)
            if replace:
                pass
            elif draws > FEW:
                pick = top - 1 if taken[pick] == i + 1 else pick
                taken[pick] = i + 1
            else:
                again = False  # no way out early: that would be a branch to guess
                for other in range(home, home + k):
                    again |= position[other] == first + pick
                pick = top - 1 if again else pick
            position[home + k] = first + pick


@jit
def keep_least(
    scratch: Array,
    position: Array,
    home: int,
    held: int,
    draws: int,
    clock: float,
    edge: int,
) -> int:
    """Puts an edge among the `draws` of least clock, ascending; returns how many there are.

    `held` of them are kept so far, clocks in `scratch` and edges from `position[home]` on.
    """
    if held == draws and clock >= scratch[draws - 1]:
        return held
    slot = held if held < draws else draws - 1
    while slot and scratch[slot - 1] > clock:
        scratch[slot] = scratch[slot - 1]
        position[home + slot] = position[home + slot - 1]
        slot -= 1
    scratch[slot] = clock
    position[home + slot] = edge
    return min(held + 1, draws)


@jit
def draw_weighted(
    nodes: Nodes,
    tree: Array | None,
    replace: bool,
    entries: Entries,
    weight: Array,
    to: Place,
    begin: int,
    end: int,
) -> None:
    """Draws entries by weight; without replacement by exponential keys ([Efraimidis06]).

    With replacement, draw k takes the first entry whose running sum of weights exceeds
    its uniform number times the whole sum.
    """
    (keys, ends, node, low, high, start), (position, at) = nodes, to
    row, stride = entries
    head, tail = ends[begin - 1] if begin else 0, ends[end - 1]
    widest = 0
    for i in range(head, tail):
        widest = max(widest, high[i] - low[i])
    scratch = np.empty(widest, np.float64)
    batch = begin
    for i in range(head, tail):
        while i >= ends[batch]:
            batch += 1
        first, size = low[i], high[i] - low[i]
        home, draws = at + start[i], start[i + 1] - start[i]
        if draws == size and not replace:
            for k in range(draws):
                position[home + k] = first + k
            continue
        generator = stream(keys[batch], 0 if tree is None else tree[i], node[i])
        if replace:
            total = 0.0
            for e in range(size):
                total += weight[first + e]
                scratch[e] = total
            for k in range(draws):
                goal = uniform(generator, k) * total
                pick = min(np.searchsorted(scratch[:size], goal, "right"), size - 1)
                position[home + k] = first + pick
            continue
        held = 0
        for e in range(first, first + size):
            if weight[e] <= 0:
                continue
            edge = np.int64(row[2 * e + 1]) if stride == 2 else e
            clock = -math.log(uniform(generator, edge) + 0.5 * UNIT) / weight[e]
            held = keep_least(scratch, position, home, held, draws, clock, e)


@jit
def running_sums(colptr: Array, weight: Array, out: Array) -> None:
    """Sums the weights of each node's in-edges up to each, in the order of `draw_weighted`."""
    for v in range(len(colptr) - 1):
        total = 0.0
        for e in range(colptr[v], colptr[v + 1]):
            total += weight[e]
            out[e] = total


@jit
def draw_labor(
    nodes: Nodes,
    entries: Entries,
    weight: Array | None,
    to: Place,
    begin: int,
    end: int,
) -> None:
    """Draws the entries with the least keys, which are those of their sources ([Balin23]).

    The key of an entry is u, or -log(u) / weight ([Efraimidis06]). Its number u is one of
    the source's generator: the first for the first edge from there to a node, the next
    for one beside it, and so on, so that the entries of one node are independent.
    """
    (keys, ends, _, low, high, start), (position, at) = nodes, to
    row, stride = entries
    head, tail = ends[begin - 1] if begin else 0, ends[end - 1]
    widest = 0
    for i in range(head, tail):
        size = high[i] - low[i]
        widest = max(widest, size if start[i + 1] - start[i] < size else 0)
    slots = 2
    while slots < 2 * widest:
        slots *= 2
    met = np.zeros(slots, np.int64)  # the last node, from 1, that has a source here
    known, edges = np.empty(slots, np.int64), np.empty(slots, np.int64)
    scratch = np.empty(widest, np.float64)
    batch = begin
    for i in range(head, tail):
        while i >= ends[batch]:
            batch += 1
        first, size = low[i], high[i] - low[i]
        home, draws = at + start[i], start[i + 1] - start[i]
        if draws == size:
            for k in range(draws):
                position[home + k] = first + k
            continue
        held = 0
        for e in range(first, first + size):
            if weight is not None and weight[e] <= 0:
                continue
            source = np.int64(row[e * stride])
            generator = stream(keys[batch], 0, source)
            slot = np.int64(generator & np.uint64(slots - 1))
            while met[slot] == i + 1 and known[slot] != source:
                slot = (slot + 1) & (slots - 1)
            if met[slot] != i + 1:
                met[slot], known[slot], edges[slot] = i + 1, source, 0
            clock = uniform(generator, edges[slot])
            edges[slot] += 1
            if weight is not None:
                clock = -math.log(clock + 0.5 * UNIT) / weight[e]
            held = keep_least(scratch, position, home, held, draws, clock, e)


@jit
def fetch(row: Array, stride: int, edge: Array, source: Array, at: int) -> None:
    """Replaces entries ``edge[at:]`` by edge ids, and writes their sources."""
    last = len(edge) - 1
    for k in range(at, len(edge)):
        prefetch(row, edge[min(k + SOON, last)] * stride)
        e = edge[k]
        source[k] = row[e * stride]
        if stride == 2:
            edge[k] = row[2 * e + 1]


@jit
def point_to(start: Array, begin: int, target: Array, at: int) -> None:
    """Writes the local id of each draw's target: node ``begin + i`` for node i."""
    for i in range(len(start) - 1):
        for k in range(start[i], start[i + 1]):
            target[at + k] = begin + i


@jit
def write_pairs(
    row: Array, entry: Array, words: Array, at: int, begin: int, end: int
) -> None:
    """Writes the pairs of entries begin .. end-1 into a message, from word `at` on."""
    for k in range(begin, end):
        prefetch(row, 2 * entry[min(k + SOON, end - 1)])
        e = 2 * entry[k]
        words[at + 2 * k] = row[e]
        words[at + 2 * k + 1] = row[e + 1]


@jit
def locate(
    words: Array, order: Array, near: bool, base: int, begin: Array, count: Array
) -> None:
    """Finds the pairs of each node in a message: how many each has, then all of them.

    Node i of the message is number `order[i]` of those who asked; see `RemoteDraws`.
    """
    at = np.int64(base + len(order))
    for i in range(len(order)):
        draws = np.int64(words[i])
        count[order[i]] = draws
        begin[order[i]] = ~at if near else at
        at += 2 * draws


@jit
def take_rows(
    draws: tuple[Array, Array, Array, Array],
    first: int,
    edges: tuple[Array, Array, Array],
    at: int,
) -> None:
    """Takes in draws made elsewhere, those of node i as edges to local id `first + i`."""
    (begin, count, near, far), (source, target, edge) = draws, edges
    for i in range(len(begin)):
        there = begin[i] < 0
        words, start = (near, ~begin[i]) if there else (far, begin[i])
        for e in range(start, start + 2 * count[i], 2):
            source[at], target[at], edge[at] = words[e], first + i, words[e + 1]
            at += 1


@jit
def find_slot(slots: Array, labels: Array | None, name: np.int64) -> np.int64:
    """Returns where a name is in a table, or the slot where it would go."""
    if labels is None:
        return name
    mask = np.uint64(len(slots) - 1)
    slot = mix(np.uint64(name) + GOLDEN) & mask
    while slots[slot] != -1 and slots[slot] != name:
        slot = (slot + np.uint64(1)) & mask
    return np.int64(slot)


@jit
def read_label(slots: Array, labels: Array | None, stamp: int, slot: np.int64) -> Any:
    """Returns the local id in a slot, -1 where there is none.

    A slot of a table of all nodes holds the stamp of the minibatch that wrote it, so that
    emptying costs nothing.
    """
    found = slots[slot]
    if labels is None:
        return found & LOCAL_ID if found >> 32 == stamp else np.int64(-1)
    return labels[slot] if found != -1 else np.int64(-1)


@jit
def write_label(
    table: Table, labels: Array | None, slot: np.int64, name: np.int64, label: Any
) -> None:
    slots, stamp, _ = table
    if labels is None:
        slots[slot] = (stamp << 32) | label
    else:
        slots[slot], labels[slot] = name, label


@jit
def enter(
    table: Table,
    labels: Array | None,
    node: Array,
    tree: Array | None,
    count: int,
    copy: Array | None,
) -> int:
    """Enters the first nodes into an empty table; returns how many of them are repeats.

    A node of tree t goes by the name ``t size + node``, of no tree by its id. A repeated
    seed keeps a place of its own, which no edge points to, and ``copy`` says how many of the
    same came before.
    """
    slots, stamp, size = table
    repeats = 0
    copies = np.zeros(count if copy is not None else 0, np.int64)
    for i in range(count):
        name = np.int64(node[i]) + (0 if tree is None else tree[i] * size)
        slot = find_slot(slots, labels, name)
        label = read_label(slots, labels, stamp, slot)
        if label < 0:
            write_label(table, labels, slot, name, i)
            if copy is not None:
                copy[i] = 0
        elif copy is not None:
            copies[label] += 1
            copy[i] = copies[label]
            repeats += 1
    return repeats


@jit
def relabel(
    table: Table,
    labels: Array | None,
    ends: tuple[Array, Array],
    at: int,
    target_tree: Array | None,
    node: Array,
    tree: Array | None,
    known: int,
) -> int:
    """Turns sources into local ids, and enters those not seen before; returns how many.

    Sources join their target's tree.
    """
    (slots, stamp, size), (source, target) = table, ends
    last = len(source) - 1
    for k in range(at, len(source)):
        if labels is None:
            prefetch(slots, source[min(k + SOON, last)])
        v = source[k]
        t: Any = np.int64(0) if target_tree is None else target_tree[target[k]]
        slot = find_slot(slots, labels, v + t * size)
        label = read_label(slots, labels, stamp, slot)
        if label < 0:
            label = known
            write_label(table, labels, slot, v + t * size, label)
            node[known] = v
            if tree is not None:
                tree[known] = t
            known += 1
        source[k] = label
    return known


@jit
def known_edges(
    table: Table,
    labels: Array | None,
    tree: Array | None,
    entries: Entries,
    low: Array,
    high: Array,
) -> Array:
    """Finds the in-edges whose source is in the table: (place in low, entry, local id)."""
    (slots, stamp, size), (row, stride) = table, entries
    total = 0
    for i in range(len(low)):
        t = np.int64(0) if tree is None else tree[i]
        for e in range(low[i], high[i]):
            slot = find_slot(slots, labels, np.int64(row[e * stride]) + t * size)
            total += read_label(slots, labels, stamp, slot) >= 0
    found = np.empty((3, total), np.int64)
    k = 0
    for i in range(len(low)):
        t = np.int64(0) if tree is None else tree[i]
        for e in range(low[i], high[i]):
            slot = find_slot(slots, labels, np.int64(row[e * stride]) + t * size)
            label = read_label(slots, labels, stamp, slot)
            if label >= 0:
                found[0, k], found[1, k], found[2, k] = i, e, label
                k += 1
    return found


@jit
def gather(
    rows: Matrix, index: Array, target: Matrix, f: int, begin: int, end: int
) -> None:
    """Copies rows: out[k] = x[index[k]] for k in begin .. end-1, f numbers each."""
    (x, x_ld), (out, out_ld) = rows, target
    for k in range(begin, end):
        soon = np.int64(index[min(k + ROWS_SOON, end - 1)]) * x_ld
        for c in range(0, f, LINE // x.itemsize):
            prefetch(x, soon + c)
        source, base = np.int64(index[k]) * x_ld, k * out_ld
        for c in range(f):
            out[np.uint64(base + c)] = x[np.uint64(source + c)]

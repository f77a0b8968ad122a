"""Holds the loops of `core_cpu` for Numba: flat arrays, row strides, and a range of work each.

Nothing is compiled when this module is imported. A matrix is passed as the flat
view of its storage and the distance between rows (``ld``), so that one compiled
loop serves contiguous and strided matrices. What belongs together is one argument, a
tuple, but for what may be None, which Numba compiles a loop for only as an argument.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pyg_distcomm.kernels.compile import (
    LINE,
    Array,
    Edges,
    Heads,
    Matrix,
    jit,
    prefetch,
    reordering,
    sum_block,
)

AHEAD = 4096  # bytes of rows prefetched ahead of the one in use
SOON = 16  # rows prefetched ahead of the one in use
LOOKUP_SOON = 32  # lookups of ids prefetched ahead of the one in use
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
TINY = 1e-16  # what PyG adds to the sums of a softmax
ONE, LOW = np.uint64(1), np.uint64(63)
UNIT = 2.0**-53  # the grain of uniform numbers
FREE = -1  # a vertex without a mate, or that no path has reached
Noise = tuple[int, Array]  # a key, and the global id of each row
Drop = tuple[int, Any]  # the least draw that is kept, and what scales the rest
Mates = tuple[Array, Array]  # of left and of right vertices
Pairs = tuple[Array, Array, Array, Any]  # rows of targets and sources, a, and the slope


@jit
def spmm(
    width: tuple[int, ...],
    edges: Edges,
    value: Array | None,
    heads: int | None,
    rows: Heads,
    target: Heads,
    add: bool,
    block: tuple[int, int, int],
    begin: int,
    end: int,
) -> None:
    """Multiplies rows begin .. end-1 of one block of columns, of each head if there are any.

    The block begins at column ``at`` and is ``lanes`` wide, of which the last ``keep`` are
    wanted: where columns do not fill a block it reaches back over its neighbour, never past
    a row. All are wanted where sums are fresh: the neighbour's come out with the same bits.
    """
    rowptr, col = edges
    x, x_ld, x_step = rows
    out, out_ld, out_step = target
    at, lanes, keep = block
    spill, fresh = np.zeros(lanes, x.dtype), not add
    soon = max(16, min(64, AHEAD // (lanes * x.itemsize)))
    last = np.int64(rowptr[end]) - 1
    for i in range(begin, end):
        low, high = np.int64(rowptr[i]), np.int64(rowptr[i + 1])
        for h in range(1 if heads is None else heads):
            home, from_ = i * out_ld + h * out_step + at, h * x_step + at
            read = x, x_ld, from_, soon, last, heads, h
            if keep == lanes:
                sum_block(width, out, home, fresh, col, value, low, high, *read)
                continue
            for k in range(lanes - keep, lanes):
                spill[np.uint64(k)] = out[np.uint64(home + k)]
            sum_block(width, spill, 0, fresh, col, value, low, high, *read)
            for k in range(lanes - keep, lanes):
                out[np.uint64(home + k)] = spill[np.uint64(k)]


@jit
def pack(
    rows: Matrix, offset: int, width: int, panel: Array, begin: int, end: int
) -> None:
    """Copies ``width`` columns of rows begin .. end-1 side by side."""
    x, x_ld = rows
    for i in range(begin, end):
        source, base = i * x_ld + offset, i * width
        for k in range(width):
            panel[np.uint64(base + k)] = x[np.uint64(source + k)]


@jit
def balance(rowptr: Array, pieces: int) -> Array:
    """Cuts rows so that each piece has about as many edges plus rows."""
    m = len(rowptr) - 1
    total = rowptr[m] - rowptr[0] + m
    bounds = np.zeros(pieces + 1, np.int64)
    for piece in range(1, pieces):
        goal, low, high = total * piece // pieces, 0, m
        while low < high:
            middle = (low + high) // 2
            if rowptr[middle] - rowptr[0] + middle < goal:
                low = middle + 1
            else:
                high = middle
        bounds[piece] = low
    bounds[pieces] = m
    return bounds


@jit
def sddmm(
    edges: Edges,
    heads: int | None,
    left: Heads,
    right: Heads,
    out: Array,
    f: int,
    begin: int,
    end: int,
) -> None:
    rowptr, col = edges
    g, g_ld, g_step = left
    x, x_ld, x_step = right
    first, last = np.int64(rowptr[0]), np.int64(rowptr[end]) - 1
    count = 1 if heads is None else heads
    for i in range(begin, end):
        for e in range(np.int64(rowptr[i]), np.int64(rowptr[i + 1])):
            soon = np.int64(col[min(e + SOON, last)]) * x_ld
            for k in range(0, (count - 1) * x_step + f, LINE // x.itemsize):
                prefetch(x, soon + k)
            source = np.int64(col[e]) * x_ld
            for h in range(count):
                from_, at = i * g_ld + h * g_step, source + h * x_step
                out[(e - first) * count + h] = dot(g, from_, x, at, f)


@reordering
def dot(a: Array, a_at: int, b: Array, b_at: np.int64, f: int) -> Any:
    total = a.dtype.type(0)
    for k in range(f):
        total += a[np.uint64(a_at + k)] * b[np.uint64(b_at + k)]
    return total


@jit
def less_segment_max(
    rowptr: Array, x: Array, out: Array, h: int, begin: int, end: int
) -> None:
    for i in range(begin, end):
        low, high = np.int64(rowptr[i]), np.int64(rowptr[i + 1])
        for k in range(h if high > low else 0):
            most = x[low * h + k]
            for e in range(low + 1, high):
                most = max(most, x[e * h + k])
            for e in range(low, high):
                out[e * h + k] = x[e * h + k] - most


@jit
def over_segment_sum(rowptr: Array, out: Array, h: int, begin: int, end: int) -> None:
    for i in range(begin, end):
        low, high = np.int64(rowptr[i]), np.int64(rowptr[i + 1])
        for k in range(h):
            total = out.dtype.type(0)
            for e in range(low, high):
                total += out[e * h + k]
            total += out.dtype.type(TINY)
            for e in range(low, high):
                out[e * h + k] /= total


@jit
def segment_softmax_grad(
    rowptr: Array, y: Array, g: Array, out: Array, h: int, begin: int, end: int
) -> None:
    for i in range(begin, end):
        low, high = np.int64(rowptr[i]), np.int64(rowptr[i + 1])
        for k in range(h):
            total = y.dtype.type(0)
            for e in range(low, high):
                total += y[e * h + k] * g[e * h + k]
            for e in range(low, high):
                out[e * h + k] = y[e * h + k] * (g[e * h + k] - total)


@jit
def segment_max(
    edges: Edges, rows: Matrix, out: Array, f: int, begin: int, end: int
) -> None:
    (rowptr, col), (x, x_ld) = edges, rows
    last = np.int64(rowptr[end]) - 1
    for i in range(begin, end):
        low, high = np.int64(rowptr[i]), np.int64(rowptr[i + 1])
        base = i * f
        for k in range(f):
            out[np.uint64(base + k)] = 0
        for e in range(low, high):
            soon = np.int64(col[min(e + SOON, last)]) * x_ld
            for k in range(0, f, LINE // x.itemsize):
                prefetch(x, soon + k)
            source = np.int64(col[e]) * x_ld
            if e == low:
                for k in range(f):
                    out[np.uint64(base + k)] = x[np.uint64(source + k)]
            else:
                for k in range(f):
                    value = x[np.uint64(source + k)]
                    so_far = out[np.uint64(base + k)]
                    # a NaN stays, as in torch
                    larger = value > so_far or value != value
                    out[np.uint64(base + k)] = value if larger else so_far


@jit
def segment_max_grad(
    edges: Edges, rows: Matrix, most: Matrix, by: Matrix, grad: Array, f: int
) -> None:
    (rowptr, col), (x, x_ld), (out, out_ld), (g, g_ld) = edges, rows, most, by
    ties = np.empty(f, x.dtype)
    for i in range(len(rowptr) - 1):
        low, high = np.int64(rowptr[i]), np.int64(rowptr[i + 1])
        home, from_ = i * out_ld, i * g_ld
        for k in range(f):
            ties[k] = out[np.uint64(home + k)] == 0
        for e in range(low, high):
            source = np.int64(col[e]) * x_ld
            for k in range(f):
                ties[k] += x[np.uint64(source + k)] == out[np.uint64(home + k)]
        for k in range(f):
            ties[k] = g[np.uint64(from_ + k)] / max(ties[k], 1)
        for e in range(low, high):
            source, base = np.int64(col[e]) * x_ld, np.int64(col[e]) * f
            for k in range(f):
                same = x[np.uint64(source + k)] == out[np.uint64(home + k)]
                grad[np.uint64(base + k)] += ties[k] if same else 0


@jit
def scatter_add(
    target: Matrix, index: Array, rows: Matrix, f: int, part: int, parts: int
) -> None:
    """Adds the rows whose target lies in this part: each target has one writer."""
    (out, out_ld), (src, src_ld) = target, rows
    for k in range(len(index)):
        if (index[k] >> 4) % parts == part:
            base, source = np.int64(index[k]) * out_ld, k * src_ld
            for c in range(f):
                out[np.uint64(base + c)] += src[np.uint64(source + c)]


@jit
def in_range(index: Array, size: int) -> bool:
    """Tells whether every entry lies in ``0 .. size-1``."""
    good = True
    for k in range(len(index)):
        good &= (index[k] >= 0) & (index[k] < size)
    return good


@jit
def count(index: Array, rowptr: Array) -> None:
    """Turns zeros into the CSR offsets of a counting sort by ``index``."""
    for k in range(len(index)):
        rowptr[index[k] + 1] += 1
    for i in range(len(rowptr) - 1):
        rowptr[i + 1] += rowptr[i]


@jit
def place(
    row: Array, col: Array, cursor: Array, col_sorted: Array, perm: Array
) -> None:
    for e in range(len(row)):
        slot = cursor[row[e]]
        cursor[row[e]] = slot + 1
        col_sorted[slot] = col[e]
        perm[slot] = e


@jit
def place_transposed(edges: Edges, cursor: Array, row_t: Array, perm: Array) -> None:
    rowptr, col = edges
    for i in range(len(rowptr) - 1):
        for e in range(rowptr[i], rowptr[i + 1]):
            slot = cursor[col[e]]
            cursor[col[e]] = slot + 1
            row_t[slot] = i
            perm[slot] = e


@jit
def place_pairs(
    col: Array, source: Array, edge: Array, cursor: Array, pair: Array
) -> None:
    """Places (source, edge id) by target, edges as they come."""
    for e in range(len(col)):
        prefetch(cursor, np.int64(col[min(e + LOOKUP_SOON, len(col) - 1)]))
        slot = cursor[col[e]]
        cursor[col[e]] = slot + 1
        pair[2 * slot] = source[e]
        pair[2 * slot + 1] = edge[e]


@jit
def count_ids(ids: Array, counts: Array) -> None:
    """Counts ids."""
    for e in range(len(ids)):
        prefetch(counts, np.int64(ids[min(e + LOOKUP_SOON, len(ids) - 1)]))
        counts[ids[e]] += 1


@jit
def hash_edges(
    odd: Array, source: Array, target: Array, place: Array, out: Array
) -> None:
    """Adds up the hashes of edges, modulo 2^64."""
    total = np.int64(0)
    for e in range(len(source)):
        ends = np.int64(source[e]) * odd[0] + np.int64(target[e]) * odd[1]
        mixed = (ends ^ (ends >> 29)) * odd[2] + np.int64(place[e]) * odd[0]
        total += (mixed ^ (mixed >> 29)) * odd[2]
    out[0] = total


# Keyed randomness ---------------------------------------------------------------------


@jit
def mix(z: np.uint64) -> np.uint64:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@jit
def hash_row(key: int, gid: int) -> np.uint64:
    """Returns the generator of one row, node or seed."""
    return mix(np.uint64(key) ^ mix(np.uint64(gid) + GOLDEN))


@jit
def word(generator: np.uint64, draw: int | np.int64) -> np.uint64:
    """Returns draw number ``draw`` of a generator: 64 bits."""
    return mix(generator + (np.uint64(draw) + np.uint64(1)) * GOLDEN)


@jit
def draw(row: np.uint64, c: int) -> np.uint64:
    return word(row, c) >> np.uint64(40)


@jit
def bits(noise: Noise, out: Array, cols: int, begin: int, end: int) -> None:
    key, gid = noise
    for v in range(begin, end):
        row, base = hash_row(key, gid[v]), np.uint64(v * cols)
        for c in range(cols):
            out[base + np.uint64(c)] = draw(row, c)


@jit
def mask(
    noise: Noise, out: Array, cols: int, threshold: int, begin: int, end: int
) -> None:
    key, gid = noise
    for v in range(begin, end):
        row, base = hash_row(key, gid[v]), np.uint64(v * cols)
        for c in range(cols):
            out[base + np.uint64(c)] = draw(row, c) >= np.uint64(threshold)


@jit
def dropout(
    x: Array, noise: Noise, out: Array, cols: int, drop: Drop, begin: int, end: int
) -> None:
    (key, gid), (threshold, scale) = noise, drop
    for v in range(begin, end):
        row, base = hash_row(key, gid[v]), np.uint64(v * cols)
        for c in range(cols):
            keep = draw(row, c) >= np.uint64(threshold)
            k = base + np.uint64(c)
            out[k] = x[k] * (scale if keep else out.dtype.type(0))


# Lookup of ids -----------------------------------------------------------------------


@jit
def ones_in(word: np.uint64) -> np.int64:
    """Counts the bits of a word."""
    word = word - ((word >> ONE) & np.uint64(0x5555555555555555))
    twos = np.uint64(0x3333333333333333)
    word = (word & twos) + ((word >> np.uint64(2)) & twos)
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56))


@jit
def mark_bits(gid: Array, words: Array, counts: Array) -> None:
    """Sets the bits of ids, and counts those before each word."""
    for i in range(len(gid)):
        words[gid[i] >> 6] |= ONE << (np.uint64(gid[i]) & LOW)
    before = np.int64(0)
    for w in range(len(words)):
        counts[w] = before
        before += ones_in(words[w])


@jit
def find_places(
    words: Array, counts: Array, ids: Array, out: Array, begin: int, end: int
) -> None:
    """Looks up places: the bits set before that of an id."""
    for i in range(begin, end):
        soon = ids[min(i + LOOKUP_SOON, end - 1)] >> 6
        prefetch(words, soon)
        prefetch(counts, soon)
        at, bit = ids[i] >> 6, np.uint64(ids[i]) & LOW
        word = words[at]
        if word >> bit & ONE:
            out[i] = counts[at] + ones_in(word & ((ONE << bit) - ONE))
        else:
            out[i] = -1


# Vertex covers ------------------------------------------------------------------------


@jit
def match(graph: Edges, mates: Mates) -> None:
    """Fills in a maximum matching ([Hopcroft73] Sec. 3).

    Phases: a search by breadth gives every left vertex its distance from a free one, and
    searches by depth along growing distances find augmenting paths, apart from each
    other. The first phase is greedy.
    """
    (ptr, to), (mate, mate_of_right) = graph, mates
    lefts = len(ptr) - 1
    for u in range(lefts):
        for e in range(ptr[u], ptr[u + 1]):
            if mate_of_right[to[e]] == FREE:
                mate[u], mate_of_right[to[e]] = to[e], u
                break
    distance = np.empty(lefts, np.int64)
    cursor = np.empty(lefts, np.int64)
    room = np.empty(lefts, np.int64)
    while spread(graph, mates, distance, room):
        cursor[:] = ptr[:-1]
        for root in range(lefts):
            if mate[root] == FREE:
                augment(root, graph, mates, distance, cursor, room)


@jit
def spread(graph: Edges, mates: Mates, distance: Array, queue: Array) -> bool:
    """Measures alternating paths from free left vertices; tells if one ends free."""
    (ptr, to), (mate, mate_of_right) = graph, mates
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
    root: int, graph: Edges, mates: Mates, distance: Array, cursor: Array, path: Array
) -> None:
    """Looks for one augmenting path; a vertex that leads nowhere is left for good."""
    (ptr, to), (mate, mate_of_right) = graph, mates
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
def reach(graph: Edges, mates: Mates, left: Array, right: Array) -> None:
    """Marks what alternating paths from free left vertices reach."""
    (ptr, to), (mate, mate_of_right) = graph, mates
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


@reordering
def fetch_ahead(x: Array, col: Array, e: int, last: np.int64, wide: int) -> None:
    """Prefetches the row that is read SOON edges after `e`."""
    at = np.int64(col[min(e + SOON, last)]) * wide
    for k in range(0, wide, LINE // x.itemsize):
        prefetch(x, at + k)


@reordering
def score(
    g: Array,
    g_at: int,
    x: Array,
    x_at: np.int64,
    a: Array,
    a_at: int,
    slope: float,
    f: int,
) -> float:
    """Returns `<a, LeakyReLU(g + x)>` of one head."""
    total = g.dtype.type(0)
    for k in range(f):
        s = g[np.uint64(g_at + k)] + x[np.uint64(x_at + k)]
        total += a[np.uint64(a_at + k)] * (s if s > 0 else s * slope)
    return total


@jit
def pair_scores(
    edges: Edges, pairs: Pairs, out: Array, shape: tuple[int, int], begin: int, end: int
) -> None:
    (rowptr, col), (g, x, a, slope), (heads, f) = edges, pairs, shape
    first, last = np.int64(rowptr[0]), np.int64(rowptr[end]) - 1
    wide = heads * f
    for i in range(begin, end):
        for e in range(np.int64(rowptr[i]), np.int64(rowptr[i + 1])):
            fetch_ahead(x, col, e, last, wide)
            j = np.int64(col[e]) * wide
            for h in range(heads):
                at = h * f
                found = score(g, i * wide + at, x, j + at, a, at, slope, f)
                out[(e - first) * heads + h] = found


@jit
def pair_scores_grad(
    edges: Edges,
    pairs: Pairs,
    grads: tuple[Array, Array, Array],
    shape: tuple[int, int],
    begin: int,
    end: int,
) -> None:
    """Sums the gradient of each row of g, and of a over the edges of the row, if wanted."""
    (rowptr, col), (g, x, a, slope), (heads, f) = edges, pairs, shape
    by, out, by_a = grads
    first, last = np.int64(rowptr[0]), np.int64(rowptr[end]) - 1
    wide = heads * f
    for i in range(begin, end):
        home = i * wide
        for k in range(wide):
            out[np.uint64(home + k)] = 0
        for k in range(wide if len(by_a) else 0):
            by_a[np.uint64(home + k)] = 0
        for e in range(np.int64(rowptr[i]), np.int64(rowptr[i + 1])):
            fetch_ahead(x, col, e, last, wide)
            j = np.int64(col[e]) * wide
            for h in range(heads):
                d, at = by[(e - first) * heads + h], h * f
                for k in range(at, at + f):
                    s = g[np.uint64(home + k)] + x[np.uint64(j + k)]
                    t = d if s > 0 else d * slope
                    out[np.uint64(home + k)] += a[np.uint64(k)] * t
                    if len(by_a):
                        by_a[np.uint64(home + k)] += s * t

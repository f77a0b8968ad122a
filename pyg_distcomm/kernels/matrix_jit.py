"""Holds the loops of `matrix_cpu` for Numba: products, extraction, and draws from rows.

Column e of a matrix is `col[e * stride]`. Arrays of length zero stand for what is not
given (ones, no diagonal), so that one compiled loop serves both.

[Note: drawing from a Fenwick tree] Node i (from 1) of the tree of a row holds the sum of
its last `i & -i` weights up to i ([Fenwick94]). Going down from the root by halves finds
the first entry whose running sum exceeds a goal, and going up takes its weight away, each
in as many steps as the length of the row has bits. All sums are integers, so the sum that
is left is exact, and an entry that was drawn, or weighs nothing, cannot be drawn.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pyg_distcomm.kernels.compile import Array, jit, prefetch
from pyg_distcomm.kernels.core_jit import GOLDEN, ONE, mix, ones_in, word

FEW = 1 << 9  # columns that a table has room for at first
SOON = 16  # products before it is needed that a slot is asked for
DIGIT_BITS = 11  # of a pass of a radix sort
DIGIT = 1 << DIGIT_BITS
LOW = np.uint64(0xFFFFFFFF)  # the lower half of a word
HALF = np.uint64(32)
MOST = 1 << 62  # sums of integer weights stay below it
Rows = tuple[Array, Array, Array]  # offsets, columns, values
Strided = tuple[Array, Array, int, Array]  # with the distance between columns
Diagonal = tuple[Array, Array]  # the column and value of one more entry in each row
Entries = tuple[Array, Array]  # drawn entries, and what was left before each


@jit
def bits_for(count: int) -> int:
    """Returns the bits of a hash table for so many keys, at most half full."""
    bits = 4
    while (1 << bits) < 2 * count:
        bits += 1
    return bits


@jit
def home(bits: int, key: Any) -> Any:
    """Returns the slot in which a search for a key begins."""
    return np.int64((np.uint64(key) * GOLDEN) >> np.uint64(64 - bits))


@jit
def slot_of(table: Array, bits: int, key: Any) -> Any:
    """Finds the slot that holds a key, or the empty one where it belongs.

    Slot t is `table[2 t]`, the key or -1, and `table[2 t + 1]`, what is known of it.
    """
    slot = home(bits, key)
    while table[2 * slot] != key and table[2 * slot] >= 0:
        slot = (slot + 1) & ((1 << bits) - 1)
    return slot


@jit
def table_of(keys: Array, known: int, bits: int, slots: Array) -> Array:
    """Returns a table that holds the place of each key, and notes their slots."""
    table = np.full(2 << bits, -1, np.int64)
    for place in range(known):
        slot = slot_of(table, bits, keys[place])
        table[2 * slot], table[2 * slot + 1] = keys[place], place
        slots[place] = slot
    return table


@jit
def ascending(key: Array, size: int) -> Array:
    """Returns the places of distinct keys, in ascending order of keys."""
    place = np.arange(size)
    if size < DIGIT:
        return place[np.argsort(key[:size])]
    other, shift, top = np.empty_like(place), 0, key[:size].max()
    while top >> shift:
        begin = np.zeros(DIGIT + 1, np.int64)
        for k in range(size):
            begin[((key[k] >> shift) & (DIGIT - 1)) + 1] += 1
        for digit in range(DIGIT):
            begin[digit + 1] += begin[digit]
        for k in range(size):
            digit = (key[place[k]] >> shift) & (DIGIT - 1)
            other[begin[digit]] = place[k]
            begin[digit] += 1
        place, other, shift = other, place, shift + DIGIT_BITS
    return place


@jit
def row_bounds(q: Rows, a: Strided, more: int, begin: int, end: int) -> tuple[int, int]:
    """Returns the most products in a row of Q A, and in all rows."""
    (q_rowptr, q_col, _), a_rowptr = q, a[0]
    most, total = 0, 0
    for i in range(begin, end):
        size = 0
        for k in range(q_rowptr[i], q_rowptr[i + 1]):
            j = q_col[k]
            size += a_rowptr[j + 1] - a_rowptr[j] + more
        most, total = max(most, size), total + size
    return most, total


@jit
def spgemm(q: Rows, a: Strided, extra: Diagonal, begin: int, end: int) -> Rows:
    """Multiplies rows begin .. end-1; returns entries of each row, columns, values.

    A row's columns are numbered as they are found, by a table that grows with them: how
    many products there are says little about how many columns.
    """
    (q_rowptr, q_col, q_value), (a_rowptr, a_col, stride, a_value) = q, a
    own, diagonal = extra
    more = 1 if len(own) else 0
    most, room = row_bounds(q, a, more, begin, end)
    found, slots = np.empty(most, np.int64), np.empty(most, np.int64)
    sums, one = np.empty(most, q_value.dtype), q_value.dtype.type(1)
    bits = bits_for(min(most, FEW))
    table = table_of(found, 0, bits, slots)
    count = np.empty(end - begin, np.int64)
    col, value, at = np.empty(room, np.int64), np.empty(room, q_value.dtype), 0
    for i in range(begin, end):
        known = 0
        for k in range(q_rowptr[i], q_rowptr[i + 1]):
            j, scale = q_col[k], q_value[k] if len(q_value) else one
            last = a_rowptr[j + 1]
            for e in range(a_rowptr[j], last + more):
                soon = (
                    np.int64(a_col[min(e + SOON, last - 1) * stride]) if e < last else 0
                )
                prefetch(table, 2 * home(bits, soon))
                column = own[j] if e == last else np.int64(a_col[e * stride])
                x = scale * diagonal[j] if e == last else scale
                if e < last and len(a_value):
                    x = scale * a_value[e]
                slot = slot_of(table, bits, column)
                if table[2 * slot] >= 0:
                    sums[table[2 * slot + 1]] += x
                    continue
                found[known], sums[known], slots[known] = column, x, slot
                table[2 * slot], table[2 * slot + 1] = column, known
                known += 1
                if 2 * known > 1 << bits:
                    bits += 1
                    table = table_of(found, known, bits, slots)
        for place in ascending(found, known):
            col[at], value[at] = found[place], sums[place]
            table[2 * slots[place]] = -1
            at += 1
        count[i - begin] = known
    return count, col[:at].copy(), value[:at].copy()


@jit
def spgemm_dense(
    q: Rows, a: Strided, extra: Diagonal, num_cols: int, begin: int, end: int
) -> Rows:
    """Multiplies as `spgemm`, with a place for every column and a bit for those in use.

    The bits, read in order, are the columns in order. For rows that fill a fair part.
    """
    (q_rowptr, q_col, q_value), (a_rowptr, a_col, stride, a_value) = q, a
    own, diagonal = extra
    more = 1 if len(own) else 0
    _, room = row_bounds(q, a, more, begin, end)
    sums, one = np.empty(num_cols, q_value.dtype), q_value.dtype.type(1)
    used = np.zeros((num_cols >> 6) + 1, np.uint64)
    count = np.empty(end - begin, np.int64)
    col, value, at = np.empty(room, np.int64), np.empty(room, q_value.dtype), 0
    for i in range(begin, end):
        before = at
        for k in range(q_rowptr[i], q_rowptr[i + 1]):
            j, scale = q_col[k], q_value[k] if len(q_value) else one
            last = a_rowptr[j + 1]
            for e in range(a_rowptr[j], last + more):
                column = own[j] if e == last else np.int64(a_col[e * stride])
                x = scale * diagonal[j] if e == last else scale
                if e < last and len(a_value):
                    x = scale * a_value[e]
                word, bit = column >> 6, ONE << np.uint64(column & 63)
                if used[word] & bit:
                    sums[column] += x
                else:
                    used[word] |= bit
                    sums[column] = x
        for word in range(len(used)):
            left, used[word] = used[word], np.uint64(0)
            while left:
                column = 64 * word + ones_in((left & (~left + ONE)) - ONE)
                col[at], value[at], at = column, sums[column], at + 1
                left &= left - ONE
        count[i - begin] = at - before
    return count, col[:at].copy(), value[:at].copy()


@jit
def extract(
    a: tuple[Array, Array, int],
    wanted: tuple[Array, Array, Array, Array],
    own: Array,
    begin: int,
    end: int,
) -> tuple[Array, Array, Array]:
    """Finds wanted entries for minibatches begin .. end-1; see the reference.

    Most columns are not wanted: a sieve of 32 bits for each that is tells most of them.
    """
    (rowptr, a_col, stride), (rows, row_ptr, cols, col_ptr) = a, wanted
    most, room = 0, 0
    for i in range(begin, end):
        most = max(most, col_ptr[i + 1] - col_ptr[i])
        for r in range(row_ptr[i], row_ptr[i + 1]):
            j = rows[r]
            if j >= 0:
                room += rowptr[j + 1] - rowptr[j] + 1
    bits, slots = bits_for(most), np.empty(most, np.int64)
    row, col = np.empty(room, np.int64), np.empty(room, np.int64)
    entry, at, more = np.empty(room, np.int64), 0, 1 if len(own) else 0
    for i in range(begin, end):
        first, size = col_ptr[i], col_ptr[i + 1] - col_ptr[i]
        table = table_of(cols[first:], size, bits, slots)
        sieve = np.zeros(1 << (bits - 2), np.uint64)
        for k in range(first, first + size):
            mark = home(bits + 4, cols[k])
            sieve[mark >> 6] |= np.uint64(1) << np.uint64(mark & 63)
        for r in range(row_ptr[i], row_ptr[i + 1]):
            j = rows[r]
            if j < 0:
                continue
            last = rowptr[j + 1]
            for e in range(rowptr[j], last + more):
                column = own[j] if e == last else np.int64(a_col[e * stride])
                mark = home(bits + 4, column)
                if not (sieve[mark >> 6] >> np.uint64(mark & 63)) & np.uint64(1):
                    continue
                slot = slot_of(table, bits, column)
                if table[2 * slot] >= 0:
                    row[at], col[at] = r, first + table[2 * slot + 1]
                    entry[at] = -1 if e == last else e
                    at += 1
    return row[:at].copy(), col[:at].copy(), entry[:at].copy()


@jit
def rounded(x: float, total: float, power: int, scale: float) -> Any:
    if x <= 0 or total <= 0:
        return 0
    if power == 0:
        return 1
    share = x / total
    return max(1, np.int64(np.rint(scale * (share * share if power == 2 else x))))


@jit
def sum_entries(
    a: Strided, low: int, high: int, table: Array, bits: int, sums: Array, slots: Array
) -> float:
    """Sums parallel edges of one row into a table; returns the sum of the row."""
    _, a_col, stride, weight = a
    total = 0.0
    for e in range(low, high):
        x = weight[e] if len(weight) else 1.0
        slot = slot_of(table, bits, np.int64(a_col[e * stride]))
        if table[2 * slot] < 0:
            table[2 * slot], sums[slot] = np.int64(a_col[e * stride]), 0.0
        sums[slot] += x
        slots[e - low] = slot
        total += x
    return total


@jit
def layer_weights(
    a: Strided,
    own: Array,
    rule: tuple[int, float],
    out: tuple[Array, Array, Array, Array],
    begin: int,
    end: int,
) -> int:
    """Rounds rows begin .. end-1; returns how many edges differ from their row's w.

    `value` may have length zero: then they are only counted.
    """
    rowptr, (power, scale), (total, even, loop, value) = a[0], rule, out
    most, other = 0, 0
    for j in range(begin, end):
        most = max(most, rowptr[j + 1] - rowptr[j] + 1)
    bits = bits_for(most)
    table, sums = np.full(2 << bits, -1, np.int64), np.empty(1 << bits)
    slots = np.empty(most, np.int64)
    for j in range(begin, end):
        low, high = rowptr[j], rowptr[j + 1]
        row = sum_entries(a, low, high, table, bits, sums, slots)
        mine = -1
        if len(own):
            row += 1.0
            mine = slot_of(table, bits, own[j])
            x = 1.0 if table[2 * mine] < 0 else sums[mine] + 1.0
            loop[j] = rounded(x, row, power, scale)
        total[j], even[j] = row, rounded(1.0, row, power, scale)
        other += len(own) > 0 and loop[j] != even[j]
        for e in range(low, high):
            slot, w = slots[e - low], 0
            if table[2 * slot] >= 0 and slot != mine:
                w = rounded(sums[slot], row, power, scale)
            table[2 * slot] = -1  # of equal columns, the first edge has the weight
            other += w != even[j]
            if len(value):
                value[e] = w
    return other


# Draws --------------------------------------------------------------------------------


@jit
def count_positive(
    rowptr: Array, value: Array, count: Array, begin: int, end: int
) -> None:
    for i in range(begin, end):
        positive, total = 0, 0
        for e in range(rowptr[i], rowptr[i + 1]):
            w = value[e]
            if w < 0:
                positive = -1
                break
            if w >= MOST - total and positive >= 0:
                positive = -2
            if positive >= 0:
                total += w
                positive += w > 0
        count[i] = positive


@jit
def high_half(a: np.uint64, b: np.uint64) -> np.uint64:
    """Returns the upper 64 bits of the product of two words."""
    a_low, a_high, b_low, b_high = a & LOW, a >> HALF, b & LOW, b >> HALF
    middle = a_high * b_low + ((a_low * b_low) >> HALF)
    other = a_low * b_high + (middle & LOW)
    return a_high * b_high + (middle >> HALF) + (other >> HALF)


@jit
def grow(value: Array, first: int, size: int, tree: Array) -> int:
    """Builds the Fenwick tree of `value[first : first + size]`; returns the sum."""
    total = 0
    for i in range(1, size + 1):
        tree[i] = value[first + i - 1]
        total += tree[i]
    for i in range(1, size + 1):
        parent = i + (i & -i)
        if parent <= size:
            tree[parent] += tree[i]
    return total


@jit
def find(tree: Array, size: int, goal: Any) -> int:
    """Returns the first entry whose running sum exceeds the goal."""
    place, step = 0, 1
    while 2 * step <= size:
        step *= 2
    while step:
        below = place + step
        if below <= size and tree[below] <= goal:
            place = below
            goal -= tree[below]
        step >>= 1
    return place


@jit
def change(tree: Array, size: int, place: int, by: int) -> None:
    """Adds `by` to the weight of one entry."""
    i = place + 1
    while i <= size:
        tree[i] += by
        i += i & -i


@jit
def take_all(
    value: Array, first: int, size: int, left: int, out: Entries, at: int
) -> None:
    """Takes the positive entries of a row in order."""
    entry, lefts = out
    for e in range(first, first + size):
        if value[e] > 0:
            entry[at], lefts[at] = e, left
            left -= value[e]
            at += 1


@jit
def draw_from(
    row: tuple[Array, Array, int, int, int],
    key: int,
    replace: bool,
    out: Entries,
    at: int,
    end: int,
) -> None:
    """Draws entries `at .. end-1` from one row: its tree, values, first, size and sum."""
    (tree, value, first, size, left), (entry, lefts) = row, out
    generator = mix(np.uint64(key) + GOLDEN)
    for k in range(at, end):
        goal = np.int64(high_half(word(generator, k - at), np.uint64(left)))
        pick = find(tree, size, goal)
        entry[k], lefts[k] = first + pick, left
        if not replace:
            left -= value[first + pick]
            change(tree, size, pick, -value[first + pick])


@jit
def draw(
    rows: tuple[Array, Array, Array],
    draws: tuple[Array, Array],
    replace: bool,
    out: Entries,
    begin: int,
    end: int,
) -> None:
    """Draws from rows begin .. end-1, each with a tree of its own."""
    (rowptr, value, count), (keys, ptr) = rows, draws
    most = 0
    for i in range(begin, end):
        most = max(most, rowptr[i + 1] - rowptr[i])
    tree = np.empty(most + 1, np.int64)
    for i in range(begin, end):
        first, size, at = rowptr[i], rowptr[i + 1] - rowptr[i], ptr[i]
        if ptr[i + 1] == at:
            continue
        if ptr[i + 1] - at == count[i] and not replace:
            left = 0
            for e in range(first, first + size):
                left += value[e]
            take_all(value, first, size, left, out, at)
            continue
        row = (tree, value, first, size, grow(value, first, size, tree))
        draw_from(row, keys[i], replace, out, at, ptr[i + 1])


@jit
def draw_shared(
    row: tuple[Array, Array, int, int, int],
    count: int,
    draws: tuple[Array, Array],
    replace: bool,
    out: Entries,
) -> None:
    """Draws from one row for many keys; the tree is as before when it returns."""
    (tree, value, _, size, total), (keys, ptr), entry = row, draws, out[0]
    for i in range(len(keys)):
        at, end = ptr[i], ptr[i + 1]
        if end - at == count and not replace:
            take_all(value, 0, size, total, out, at)
            continue
        draw_from(row, keys[i], replace, out, at, end)
        for k in range(at, end if not replace else at):
            change(tree, size, entry[k], value[entry[k]])


@jit
def normalize_rows(
    rowptr: Array, value: Array, out: Array, begin: int, end: int
) -> None:
    for i in range(begin, end):
        total = 0.0
        for e in range(rowptr[i], rowptr[i + 1]):
            total += value[e]
        for e in range(rowptr[i], rowptr[i + 1]):
            out[e] = value[e] / total if total != 0 else value[e]

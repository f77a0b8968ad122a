"""The loop that rounds the weights of a layer-wise rule to integers, for Numba."""

from __future__ import annotations

from typing import Any

import numpy as np

from .loops import Array, jit
from .matrix_loops import bits_for, slot_of


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
    a_col: Array,
    stride: int,
    weight: Array,
    low: int,
    high: int,
    key: Array,
    bits: int,
    sums: Array,
    slots: Array,
) -> float:
    """Sums parallel edges of one row into a table; returns the sum of the row."""
    total = 0.0
    for e in range(low, high):
        x = weight[e] if len(weight) else 1.0
        slot = slot_of(key, bits, np.int64(a_col[e * stride]))
        if key[slot] < 0:
            key[slot], sums[slot] = np.int64(a_col[e * stride]), 0.0
        sums[slot] += x
        slots[e - low] = slot
        total += x
    return total


@jit
def layer_weights(
    rowptr: Array,
    a_col: Array,
    stride: int,
    weight: Array,
    own: Array,
    power: int,
    scale: float,
    total: Array,
    even: Array,
    loop: Array,
    value: Array,
    begin: int,
    end: int,
) -> int:
    """Rounds rows begin .. end-1; returns how many edges differ from their row's w.

    `value` may have length zero: then they are only counted.
    """
    most, other = 0, 0
    for j in range(begin, end):
        most = max(most, rowptr[j + 1] - rowptr[j] + 1)
    bits = bits_for(most)
    key, sums = np.full(1 << bits, -1, np.int64), np.empty(1 << bits)
    slots = np.empty(most, np.int64)
    for j in range(begin, end):
        low, high = rowptr[j], rowptr[j + 1]
        table = (key, bits, sums, slots)
        row = sum_entries(a_col, stride, weight, low, high, *table)
        mine = -1
        if len(own):
            row += 1.0
            mine = slot_of(key, bits, own[j])
            x = 1.0 if key[mine] < 0 else sums[mine] + 1.0
            loop[j] = rounded(x, row, power, scale)
        total[j], even[j] = row, rounded(1.0, row, power, scale)
        other += len(own) > 0 and loop[j] != even[j]
        for e in range(low, high):
            slot, w = slots[e - low], 0
            if key[slot] >= 0 and slot != mine:
                w = rounded(sums[slot], row, power, scale)
            key[slot] = -1  # of equal columns, the first edge has the weight
            other += w != even[j]
            if len(value):
                value[e] = w
    return other

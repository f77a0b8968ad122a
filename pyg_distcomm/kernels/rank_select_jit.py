"""The inner loops of `place`, for Numba."""

from __future__ import annotations

import numpy as np

from pyg_distcomm.kernels.compile import Array, jit, prefetch
from pyg_distcomm.kernels.relabel_jit import SOON

ONE = np.uint64(1)
SIX = np.uint64(6)
LOW = np.uint64(63)


@jit
def ones_in(word: np.uint64) -> np.int64:
    """Counts the bits of a word."""
    word = word - ((word >> ONE) & np.uint64(0x5555555555555555))
    twos = np.uint64(0x3333333333333333)
    word = (word & twos) + ((word >> np.uint64(2)) & twos)
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56))


@jit
def mark(gid: Array, words: Array, counts: Array) -> None:
    """Sets the bits of ids, and counts those before each word."""
    for i in range(len(gid)):
        words[gid[i] >> 6] |= ONE << (np.uint64(gid[i]) & LOW)
    before = np.int64(0)
    for w in range(len(words)):
        counts[w] = before
        before += ones_in(words[w])


@jit
def find(
    words: Array, counts: Array, ids: Array, out: Array, begin: int, end: int
) -> None:
    """Looks up places: the bits set before that of an id."""
    for i in range(begin, end):
        soon = ids[min(i + SOON, end - 1)] >> 6
        prefetch(words, soon)
        prefetch(counts, soon)
        at, bit = ids[i] >> 6, np.uint64(ids[i]) & LOW
        word = words[at]
        if word >> bit & ONE:
            out[i] = counts[at] + ones_in(word & ((ONE << bit) - ONE))
        else:
            out[i] = -1

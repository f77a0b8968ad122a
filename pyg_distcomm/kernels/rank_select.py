"""Finds ids in a sorted list, by a bit for each id there could be, and counts.

`reference.places` is the definition. Memory: 12 bytes for 64 ids in [0, total), whether
they are in the list or not; a lookup touches two lines of it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pyg_distcomm.kernels import threads
from pyg_distcomm.kernels.compile import Array, jit, ready
from pyg_distcomm.kernels.llvm_intrinsics import prefetch
from pyg_distcomm.kernels.node_relabeler import SOON

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


GRAIN = 1 << 14  # lookups that are worth a thread


class RankSelect:
    """The places of ascending, distinct ids in [0, total), for fast lookups."""

    def __init__(self, gid: Tensor, total: int) -> None:
        words = torch.zeros(total // 64 + 1, dtype=torch.int64)
        kind = torch.int32 if len(gid) < 2**31 else torch.int64
        counts = torch.zeros(total // 64 + 1, dtype=kind)
        self._bits = words.numpy().view("uint64"), counts.numpy()
        ready(mark, (gid.long().contiguous().numpy(), *self._bits))()

    def __call__(self, ids: Tensor) -> Tensor:
        """Returns the place of each id [k], -1 for those that are not in the list."""
        ids = ids.long().contiguous()
        out = torch.empty_like(ids)
        search = ready(find, (*self._bits, ids.numpy(), out.numpy()), integers=2)
        threads.run_split(search, len(ids), GRAIN)
        return out

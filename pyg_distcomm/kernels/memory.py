"""Matrices in huge pages, where the system offers them.

A random gather over 4 KiB pages misses the translation cache at nearly each row,
and a fresh matrix faults once a page. Linux gives 2 MiB pages to those who ask.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

WORTH = 1 << 23  # bytes below which asking does not pay


def empty(rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    """Returns an uninitialised CPU matrix [rows, cols], in huge pages when large."""
    matrix = torch.empty(rows, cols, dtype=dtype)
    size = matrix.numel() * matrix.element_size()
    if size >= WORTH:
        _advise()(matrix.data_ptr(), size)
    return matrix


@cache
def _advise() -> Callable[[int, int], None]:
    """Returns a function that asks for huge pages, or one that does nothing."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    try:
        madvise = ctypes.CDLL(None).madvise
    except (AttributeError, OSError, TypeError):
        madvise = None

    def ask(address: int, size: int) -> None:
        if madvise is not None and advice is not None:
            first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
            pages = (address + size - first) // mmap.PAGESIZE
            # a refusal costs speed only, so nobody reads the answer
            madvise(
                ctypes.c_void_p(first), ctypes.c_size_t(pages * mmap.PAGESIZE), advice
            )

    return ask


def give_back() -> None:
    """Returns freed memory to the system: planning frees more than it keeps.

    glibc holds on to blocks below 32 MiB, which would count against this process for
    as long as it lives; elsewhere this does nothing.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):
        return

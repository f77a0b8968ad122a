"""Matrices in huge pages, where the system offers them.

A random gather over 4 KiB pages misses the translation cache at nearly each row,
and a fresh matrix faults once a page. Linux gives 2 MiB pages to those who ask.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

WORTH = 1 << 23  # bytes below which asking does not pay
ROOM = 1 << 20  # bytes of a product below which making room does not pay


def empty(rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    """Returns an uninitialised CPU matrix [rows, cols], in huge pages when large."""
    return advise(torch.empty(rows, cols, dtype=dtype))


def advise(fresh: Tensor) -> Tensor:
    """Asks for huge pages under a tensor that has not been written to, when large."""
    size = fresh.numel() * fresh.element_size()
    if size >= WORTH:
        _advise()(fresh.data_ptr(), size)
    return fresh


def make_room(size: int) -> None:
    """Returns freed memory to the system before a product that needs `size` bytes.

    Blocks of several sizes leave holes between them that none fits: without this, the
    heap of a rank that exchanges grows to about twice what lives in it. Below `ROOM`
    nothing is done.
    """
    if size >= ROOM:
        give_back()


def give_back() -> None:
    """Returns freed memory to the system: planning frees more than it keeps.

    glibc holds on to blocks below 32 MiB, which would count against this process for
    as long as it lives; elsewhere this does nothing. What is used again comes in huge
    pages.
    """
    libc = _libc()
    if libc is not None:
        first, end = _heap_start(), libc.sbrk(0)
        if first is not None and end > first:
            _advise()(first, end - first)
        libc.malloc_trim(0)


@cache
def _libc() -> ctypes.CDLL | None:
    """Returns the C library where it is one whose heap can be trimmed."""
    try:
        libc = ctypes.CDLL(None)
        libc.malloc_trim.argtypes = [ctypes.c_size_t]
        libc.sbrk.argtypes, libc.sbrk.restype = [ctypes.c_ssize_t], ctypes.c_void_p
    except (AttributeError, OSError, TypeError):
        return None
    return libc


@cache
def _heap_start() -> int | None:
    """Returns the address at which the heap of this process starts."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    starts = (line.split("-")[0] for line in lines if line.endswith("[heap]"))
    return next((int(start, 16) for start in starts), None)


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

"""Asks the system for huge pages under matrices, and gives freed memory back.

A random gather over 4 KiB pages misses the translation cache at nearly each row,
and a fresh matrix faults once a page. Linux gives 2 MiB pages to those who ask.
"""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import torch
from torch import Tensor

WORTH = 1 << 23  # bytes below which asking does not pay
ROOM = 1 << 20  # bytes of a product below which making room does not pay


def _open_libc(*names: str) -> ctypes.CDLL | None:
    """Returns the C library of this process if it has these functions."""
    try:
        libc = ctypes.CDLL(None)
        return libc if all(hasattr(libc, name) for name in names) else None
    except (OSError, TypeError):
        return None


def _find_heap() -> int | None:
    """Returns the address at which the heap of this process starts."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    starts = (line.split("-")[0] for line in lines if line.endswith("[heap]"))
    return next((int(start, 16) for start in starts), None)


HEAP_START = _find_heap()
GLIBC = _open_libc("malloc_trim", "sbrk")
if GLIBC is not None:
    GLIBC.malloc_trim.argtypes = [ctypes.c_size_t]
    GLIBC.sbrk.argtypes, GLIBC.sbrk.restype = [ctypes.c_ssize_t], ctypes.c_void_p
ADVISES = _open_libc("madvise") if hasattr(mmap, "MADV_HUGEPAGE") else None


def available() -> int | None:
    """Returns how many bytes this process may still take, where the system says so."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def empty(rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    """Returns an uninitialised CPU matrix [rows, cols], in huge pages when large."""
    return advise(torch.empty(rows, cols, dtype=dtype))


def advise(fresh: Tensor) -> Tensor:
    """Asks for huge pages under a tensor that has not been written to, when large."""
    size = fresh.numel() * fresh.element_size()
    if size >= WORTH:
        _advise(fresh.data_ptr(), size)
    return fresh


def give_back() -> None:
    """Returns freed memory to the system: planning frees more than it keeps.

    glibc holds on to blocks below 32 MiB, which would count against this process for
    as long as it lives; elsewhere this does nothing. What is used again comes in huge
    pages.
    """
    if GLIBC is not None:
        end = GLIBC.sbrk(0)
        if HEAP_START is not None and end > HEAP_START:
            _advise(HEAP_START, end - HEAP_START)
        GLIBC.malloc_trim(0)


def _advise(address: int, size: int) -> None:
    """Asks for huge pages, where the system has them."""
    if ADVISES is not None:
        first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        pages = (address + size - first) // mmap.PAGESIZE
        arguments = ctypes.c_void_p(first), ctypes.c_size_t(pages * mmap.PAGESIZE)
        # a refusal costs speed only, so nobody reads the answer
        ADVISES.madvise(*arguments, mmap.MADV_HUGEPAGE)

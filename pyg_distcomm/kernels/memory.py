"""Matrices in huge pages, where the system offers them.

A random gather over 4 KiB pages misses the translation cache at nearly each row,
and a fresh matrix faults once a page. Linux gives 2 MiB pages to those who ask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_distcomm.kernels.state import KERNELS

WORTH = 1 << 23  # bytes below which asking does not pay
ROOM = 1 << 20  # bytes of a product below which making room does not pay


def empty(rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    """Returns an uninitialised CPU matrix [rows, cols], in huge pages when large."""
    return advise(torch.empty(rows, cols, dtype=dtype))


def advise(fresh: Tensor) -> Tensor:
    """Asks for huge pages under a tensor that has not been written to, when large."""
    size = fresh.numel() * fresh.element_size()
    if size >= WORTH:
        KERNELS.advise(fresh.data_ptr(), size)
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
    libc = KERNELS.libc
    if libc is not None:
        first, end = KERNELS.heap_start, libc.sbrk(0)
        if first is not None and end > first:
            KERNELS.advise(first, end - first)
        libc.malloc_trim(0)

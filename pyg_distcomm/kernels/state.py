"""Holds what kernels keep for this process, in one object: `KERNELS`."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any


class KernelState:
    """Lists what compiled kernels, their threads and their memory keep.

    `compiled` has the loops and types that are ready; `executors` a pool of threads for each
    process and size (the key holds the process id, since the threads of a parent do not
    survive a fork); `limit.width` how many threads this one may use.
    """

    def __init__(self) -> None:
        self.compiled: set[tuple[int, Any]] = set()
        self.executors: dict[tuple[int, int], ThreadPoolExecutor] = {}
        self.limit = threading.local()

    @cached_property
    def libc(self) -> ctypes.CDLL | None:
        """Returns the C library where it is one whose heap can be trimmed."""
        try:
            libc = ctypes.CDLL(None)
            libc.malloc_trim.argtypes = [ctypes.c_size_t]
            libc.sbrk.argtypes, libc.sbrk.restype = [ctypes.c_ssize_t], ctypes.c_void_p
        except (AttributeError, OSError, TypeError):
            return None
        return libc

    @cached_property
    def heap_start(self) -> int | None:
        """Returns the address at which the heap of this process starts."""
        try:
            lines = Path("/proc/self/maps").read_text().splitlines()
        except OSError:
            return None
        starts = (line.split("-")[0] for line in lines if line.endswith("[heap]"))
        return next((int(start, 16) for start in starts), None)

    @cached_property
    def advise(self) -> Callable[[int, int], None]:
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
                    ctypes.c_void_p(first),
                    ctypes.c_size_t(pages * mmap.PAGESIZE),
                    advice,
                )

        return ask


KERNELS = KernelState()

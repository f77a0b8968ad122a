"""Allocates matrices in huge pages, returns freed memory to the system, and caps memory.

A random gather over 4 KiB pages misses the TLB at nearly every row, and a fresh matrix
faults once per page. Linux gives 2 MiB pages on request (`madvise`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

HUGE_PAGES_FROM = 1 << 23  # bytes of a matrix from which huge pages pay
GIVE_BACK_FROM = 1 << 20  # bytes of a product from which giving memory back first pays
SLACK = 1 << 27  # bytes of free blocks that a heap keeps in any case
SPILL_FROM = 1 << 12  # bytes of a saved tensor from which a file pays


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
STATM = Path("/proc/self/statm")
MALLINFO = _open_libc("mallinfo2") if GLIBC is not None and STATM.exists() else None
ADVISES = _open_libc("madvise") if hasattr(mmap, "MADV_HUGEPAGE") else None


def available() -> int | None:
    """Returns the bytes that this process can still allocate; None if that is not known."""
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
    """Requests huge pages for a large tensor that has not been written to; returns it."""
    size = fresh.numel() * fresh.element_size()
    if size >= HUGE_PAGES_FROM:
        _advise(fresh.data_ptr(), size)
    return fresh


def give_back() -> None:
    """Returns freed memory to the system: planning frees more than it keeps.

    glibc keeps freed blocks below 32 MiB, which would count as memory of this process as
    long as it lives; without glibc this does nothing. The heap gets huge pages when it is
    used again.
    """
    if GLIBC is not None:
        end = GLIBC.sbrk(0)
        if HEAP_START is not None and end > HEAP_START:
            _advise(HEAP_START, end - HEAP_START)
        GLIBC.malloc_trim(0)


class _Mallinfo(ctypes.Structure):
    """What glibc counts of its heap."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks "
        "keepcost".split()
    ]


if MALLINFO is not None:
    MALLINFO.mallinfo2.restype = _Mallinfo


class Heap:
    """Returns freed memory to the system where the heap has outgrown what it holds.

    Blocks of many sizes fragment the heap of a rank that exchanges, which grows to about
    twice its live memory. But pages that were returned fault when they are used again, which
    takes a small graph as long as its products. So they are returned before the first
    product, and then where the heap is an eighth larger than the most it has held.
    """

    def __init__(self) -> None:
        self._most = 0
        self._rest: int | None = None  # resident memory that is not of the heap

    def trim(self, size: int) -> None:
        """Trims the heap before `size` bytes are allocated, if it has outgrown them."""
        if MALLINFO is None or (self._rest is not None and self._fits()):
            return
        used = _bytes_held()
        self._most = max(self._most, used + size)
        if self._rest is None or not self._fits():
            give_back()
            rest = _resident() - used
            self._rest = rest if self._rest is None else min(self._rest, rest)

    def _fits(self) -> bool:
        assert self._rest is not None
        return _resident() - self._rest <= self._most * 1.125 + SLACK


def _bytes_held() -> int:
    """Returns the bytes of all blocks that this process has allocated."""
    assert MALLINFO is not None
    found = MALLINFO.mallinfo2()
    return int(found.uordblks + found.hblkhd)


def _resident() -> int:
    """Returns the resident bytes of this process."""
    return int(STATM.read_text().split()[1]) * mmap.PAGESIZE


def drop_pages(x: Tensor) -> None:
    """Drops what memory holds of a tensor that is mapped from a file, and not written to."""
    _advise(x.data_ptr(), x.nbytes, getattr(mmap, "MADV_DONTNEED", None))


def _advise(address: int, size: int, advice: int | None = None) -> None:
    """Gives the system advice on a range of memory; None requests huge pages."""
    if ADVISES is not None:
        first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        pages = (address + size - first) // mmap.PAGESIZE
        arguments = ctypes.c_void_p(first), ctypes.c_size_t(pages * mmap.PAGESIZE)
        # a failure costs speed only, so the result is not read
        ADVISES.madvise(*arguments, mmap.MADV_HUGEPAGE if advice is None else advice)


def has_saved_tensors_hooks() -> bool:
    """Returns whether hooks for saved tensors are active, as in torch's checkpointing."""
    try:  # which torch refuses where there are any
        with torch.autograd.graph.disable_saved_tensors_hooks("only asked"):
            return False
    except RuntimeError:
        return True


class MemoryCap:
    """Caps the memory that layers on a rank's share of a graph take.

    A quarter of the limit is for tensors that autograd saves for the backward pass; further
    ones are spilled to memory-mapped files in the folder for temporary files (TMPDIR), which
    the system reads and writes page by page, and which end with the process. A sixteenth is
    for one stage: the rows received in one exchange, or the messages of one chunk of nodes.

    Args:
        limit: the bytes, or a text such as "8GiB" or "500MB".

    Raises:
        ValueError: if the limit is no size, or less than one byte.
    """

    def __init__(self, limit: int | str) -> None:
        self.limit = parse_bytes(limit)
        self.stage = max(self.limit // 16, 1)
        self._permanent: set[int] = set()  # storages that live as long as the graph
        self._saved: dict[int, list[int]] = {}  # by storage: number of users, bytes
        self._saved_bytes = 0
        self._lock = threading.Lock()

    def keep(self, *permanent: Tensor) -> None:
        """Marks tensors that live as long as the graph: saving them costs no memory."""
        self._permanent.update(x.untyped_storage()._cdata for x in permanent)

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Returns an uninitialised tensor, in a file if it is larger than a stage."""
        size = math.prod(shape) * dtype.itemsize
        if device.type != "cpu" or size <= self.stage:
            return torch.empty(shape, dtype=dtype, device=device)
        return mapped(shape, dtype)

    def moved(self, x: Tensor) -> Tensor:
        """Moves a tensor that is kept for long to a file if it is larger than a stage."""
        if x.nbytes <= self.stage or x.device.type != "cpu" or is_mapped(x):
            return x
        return self.empty(tuple(x.shape), x.dtype, x.device).copy_(x)

    @contextlib.contextmanager
    def spilling(self) -> Iterator[None]:
        """Keeps tensors that autograd saves within the cap, and spills others to files.

        It does nothing where other saved-tensor hooks are active, as in torch's checkpointing.
        """
        if has_saved_tensors_hooks() or not torch.is_grad_enabled():
            yield
            return
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            yield

    def pack(self, x: Tensor) -> Any:
        """Returns what is kept of a tensor that autograd saves: its values, or a file."""
        with torch._C.DisableTorchFunctionSubclass():
            plain = x.detach().as_subclass(Tensor)
            storage = plain.untyped_storage()
            size = plain.nbytes
            parameter = x.is_leaf and x.requires_grad
            if (
                parameter
                or storage._cdata in self._permanent
                or is_mapped(plain)
                or size < SPILL_FROM
                or storage.nbytes() < size
            ):
                return _Saved(plain, x._version, None)
            if x.device.type != "cpu" or self._acquire(storage._cdata, size):
                drop = functools.partial(self._release, storage._cdata)
                return _Saved(plain, x._version, drop)
            file = mapped(tuple(plain.shape), plain.dtype)
            return _Saved(file.copy_(plain), None, None)

    @staticmethod
    def unpack(saved: _Saved) -> Tensor:
        """Returns a tensor that autograd has saved."""
        x, version = saved.tensor, saved.version
        if version is not None and not x.is_inference() and x._version != version:
            raise RuntimeError(
                "a tensor that the backward pass needs was changed in place: it is at version "
                f"{x._version}, and was saved at {version}; change a clone of it"
            )
        return x

    def _acquire(self, storage: int, size: int) -> bool:
        """Counts a user of a saved storage; returns False if it does not fit the cap."""
        with self._lock:
            if storage in self._saved:
                self._saved[storage][0] += 1
                return True
            if self._saved_bytes + size > self.limit // 4:
                return False
            self._saved[storage] = [1, size]
            self._saved_bytes += size
            return True

    def _release(self, storage: int) -> None:
        """Drops a user of a saved storage, and its bytes with the last user."""
        with self._lock:
            entry = self._saved.get(storage)
            if entry is None:
                return
            entry[0] -= 1
            if not entry[0]:
                self._saved_bytes -= entry[1]
                del self._saved[storage]


class _Saved:
    """Holds a tensor saved for the backward pass, and calls `drop` when it is freed."""

    def __init__(
        self, tensor: Tensor, version: int | None, drop: Callable[[], None] | None
    ) -> None:
        self.tensor, self.version, self.drop = tensor, version, drop

    def __del__(self) -> None:
        if self.drop is not None:
            self.drop()


def parse_bytes(size: int | str) -> int:
    """Parses a number of bytes, given as a number or as text: "8GiB", "500 MB", "2e9".

    Raises:
        ValueError: if it is neither, or less than 1.
    """
    found = re.fullmatch(
        r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmgt]?i?b?)\s*", str(size).lower()
    )
    try:
        if found is None or isinstance(size, bool):
            raise ValueError
        unit = found[2].removesuffix("b")
        step = 1024 if unit.endswith("i") else 1000
        power = " kmgt".index(unit.removesuffix("i") or " ")
        count = int(float(found[1]) * step**power)
        if count < 1:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"got memory={size!r}, wanted a number of bytes; give one, or a text as '8GiB'"
        ) from None
    return count


def is_mapped(x: Tensor) -> bool:
    """Returns whether a tensor is in a file that torch has mapped."""
    return x.device.type == "cpu" and x.untyped_storage().filename is not None


def mapped(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns a tensor of zeros in a memory-mapped file, which is deleted with the tensor.

    Raises:
        MemoryError: if the disk is too full.
    """
    size = math.prod(shape) * dtype.itemsize
    number, path = tempfile.mkstemp(prefix="pyg_distcomm-")
    try:
        if size and hasattr(os, "posix_fallocate"):
            # else a full disk kills at a later write
            os.posix_fallocate(number, 0, size)
        file = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    except OSError as error:
        raise MemoryError(
            f"no room for {size:,} bytes in {tempfile.gettempdir()}: {error.strerror}; set "
            "TMPDIR to a larger disk, or give more memory"
        ) from error
    finally:
        os.close(number)
        os.unlink(path)
    # not a view of the bytes: operations in place would be refused on it
    empty = torch.empty(0, dtype=dtype)
    return empty.set_(file.untyped_storage(), 0, shape)  # type: ignore[call-overload]

"""Asks for huge pages under matrices, gives freed memory back, and keeps within a cap.

A random gather over 4 KiB pages misses the translation cache at nearly each row,
and a fresh matrix faults once a page. Linux gives 2 MiB pages to those who ask.
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
from typing import Any

import torch
from torch import Tensor

WORTH = 1 << 23  # bytes below which asking does not pay
ROOM = 1 << 20  # bytes of a product below which making room does not pay
SMALLEST = 1 << 12  # bytes of a saved tensor below which a file does not pay


def as_bytes(values: Tensor) -> Tensor:
    """Returns the bytes of a dense tensor, `[bytes]`, in its memory where it is contiguous."""
    flat = values.contiguous().flatten()
    # of one number or none, a stride may be anything, which `view` does not take
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


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


class MemoryCap:
    """Bounds the memory that layers on a rank's share of a graph take, in bytes.

    A quarter is for what autograd keeps for the backward pass; what is more goes to
    memory-mapped files in the folder for temporary files (TMPDIR), which the system reads
    and writes page by page, and which end with the process. A sixteenth is for one stage:
    rows that arrive in one exchange, or the messages of one chunk of nodes.

    Args:
        limit: the bytes, or a text such as "8GiB" or "500MB".

    Raises:
        ValueError: if it is no size, or less than one byte.
    """

    def __init__(self, limit: int | str) -> None:
        self.limit = parse_bytes(limit)
        self.stage = max(self.limit // 16, 1)
        self.given: set[int] = set()  # storages that live as long as the graph
        self._kept: dict[int, list[int]] = {}  # of each storage: users, bytes
        self._sum = 0
        self._lock = threading.Lock()

    def keep(self, *lasting: Tensor) -> None:
        """Notes tensors that live as long as the graph: to save them costs nothing."""
        self.given.update(x.untyped_storage()._cdata for x in lasting)

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Returns a tensor that is not initialised, in a file where it exceeds a stage."""
        size = math.prod(shape) * dtype.itemsize
        if device.type != "cpu" or size <= self.stage:
            return torch.empty(shape, dtype=dtype, device=device)
        return mapped(shape, dtype)

    def moved(self, x: Tensor) -> Tensor:
        """Returns a tensor that is kept for long, in a file where it exceeds a stage."""
        if x.nbytes <= self.stage or x.device.type != "cpu" or is_mapped(x):
            return x
        return self.empty(tuple(x.shape), x.dtype, x.device).copy_(x)

    @contextlib.contextmanager
    def spilling(self) -> Iterator[None]:
        """Has what autograd saves in a block kept within the cap, or in files.

        Not where other hooks look after saved tensors, as in torch's checkpointing.
        """
        hooked = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        if hooked or not torch.is_grad_enabled():
            yield
            return
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, x: Tensor) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            plain = x.detach().as_subclass(Tensor)
            storage = plain.untyped_storage()
            size = plain.nbytes
            lasting = (x.is_leaf and x.requires_grad) or storage._cdata in self.given
            if (
                lasting
                or is_mapped(plain)
                or size < SMALLEST
                or storage.nbytes() < size
            ):
                return _Saved(plain, x._version, None)
            if x.device.type != "cpu" or self._keeps(storage._cdata, size):
                drop = functools.partial(self._dropped, storage._cdata)
                return _Saved(plain, x._version, drop)
            file = mapped(tuple(plain.shape), plain.dtype)
            return _Saved(file.copy_(plain), None, None)

    @staticmethod
    def _unpack(saved: _Saved) -> Tensor:
        x, version = saved.tensor, saved.version
        if version is not None and not x.is_inference() and x._version != version:
            raise RuntimeError(
                "a tensor that the backward pass needs was changed in place: it is at version "
                f"{x._version}, and was saved at {version}; change a clone of it"
            )
        return x

    def _keeps(self, storage: int, size: int) -> bool:
        with self._lock:
            if storage in self._kept:
                self._kept[storage][0] += 1
                return True
            if self._sum + size > self.limit // 4:
                return False
            self._kept[storage] = [1, size]
            self._sum += size
            return True

    def _dropped(self, storage: int) -> None:
        with self._lock:
            known = self._kept.get(storage)
            if known is None:
                return
            known[0] -= 1
            if not known[0]:
                self._sum -= known[1]
                del self._kept[storage]


class _Saved:
    """A tensor saved for the backward pass, its version, and what to tell at its end."""

    def __init__(
        self, tensor: Tensor, version: int | None, drop: Callable[[], None] | None
    ) -> None:
        self.tensor, self.version, self.drop = tensor, version, drop

    def __del__(self) -> None:
        if self.drop is not None:
            self.drop()


def memory_problem(memory: int | str | None) -> ValueError | None:
    """Returns the error for what cannot be a memory cap."""
    try:
        _ = memory is None or parse_bytes(memory)
    except ValueError as error:
        return error
    return None


def parse_bytes(size: int | str) -> int:
    """Returns a number of bytes, given as one or as text: "8GiB", "500 MB", "2e9".

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
            f"memory must be a number of bytes, or a text such as '8GiB', got {size!r}"
        ) from None
    return count


def is_mapped(x: Tensor) -> bool:
    """Tells whether a tensor lies in a file that torch has mapped."""
    return x.device.type == "cpu" and x.untyped_storage().filename is not None


def mapped(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns a tensor of zeros in a file without a name, which ends with it.

    Raises:
        MemoryError: if the disk has no room for it.
    """
    size = math.prod(shape) * dtype.itemsize
    number, path = tempfile.mkstemp(prefix="pyg_distcomm-")
    try:
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(number, 0, size)  # a full disk would kill later
        file = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    except OSError as error:
        raise MemoryError(
            f"no room for {size:,} bytes in {tempfile.gettempdir()}: {error.strerror}; set "
            "TMPDIR to a larger disk, or give more memory"
        ) from error
    finally:
        os.close(number)
        os.unlink(path)
    # no view of the bytes, which operations in place would be refused on
    empty = torch.empty(0, dtype=dtype)
    return empty.set_(file.untyped_storage(), 0, shape)  # type: ignore[call-overload]

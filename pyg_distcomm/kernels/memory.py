"""Allocates matrices in huge pages and freed blocks, returns memory, and caps memory.

A random gather over 4 KiB pages misses the TLB at nearly every row; Linux gives 2 MiB pages
on request (`madvise`). A fresh matrix faults once per page, which takes as long as to compute
it (in a virtual machine, longer), and glibc returns every block of more than 32 MiB to the
system when it is freed. So large blocks are kept for the next matrix of their size.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import math
import mmap
import os
import re
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HUGE_PAGES_FROM = 1 << 23  # bytes of a matrix from which huge pages pay
KEPT_FROM = 1 << 20  # bytes of a matrix from which its block is kept
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
ADVISES = _open_libc("madvise") if hasattr(mmap, "MADV_HUGEPAGE") else None


def available(device: torch.device | None = None) -> int | None:
    """Returns the bytes still free, on the host or a CUDA device; None if not known."""
    if device is not None and device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


class Blocks:
    """Keeps the blocks of large matrices that are freed, for the next ones of their size.

    A size is rounded up to an eighth of its power of two. Blocks in use and kept are together
    at most as large as the most that were in use at one time: what was kept longest goes first.
    """

    def __init__(self) -> None:
        self._kept: dict[int, list[Tensor]] = {}  # by size; the size used last is last
        self._freed: collections.deque[Tensor] = collections.deque()
        self._used = self._most = self._idle = 0  # bytes
        self.renew_lock()

    def renew_lock(self) -> None:
        """Makes a lock, also in a forked process: another thread may have held the one."""
        self._lock = threading.RLock()  # of a finalizer that computes, too

    def take(self, size: int) -> Tensor:
        """Returns `size` uninitialised bytes; their block returns when no tensor holds them."""
        step = 1 << max(size.bit_length() - 4, 12)
        rounded = -(-size // step) * step
        with self._lock:
            self._collect()
            kept = self._kept.get(rounded)
            block = kept.pop() if kept else None
            self._idle -= 0 if block is None else rounded
            used = self._used + rounded
            most = max(self._most, used)
            self._drop(most - used)
        if block is None:
            block = advise(torch.empty(rounded, dtype=torch.uint8, device="cpu"))
        lent = block.numpy()[:size]
        weakref.finalize(lent, self._freed.append, block).atexit = False
        with self._lock:  # there was memory
            self._used += rounded
            self._most = max(self._most, self._used)
        return torch.from_numpy(lent)

    def drop(self) -> None:
        """Returns all blocks that are not in use to the system."""
        with self._lock:
            self._collect()
            self._drop(0)
            self._most = self._used

    def _collect(self) -> None:
        """Takes back blocks that were freed; a finalizer may run anywhere, and only appends."""
        while self._freed:
            block = self._freed.popleft()
            same = self._kept.pop(len(block), None) or []
            same.append(block)
            self._kept[len(block)] = same
            self._used -= len(block)
            self._idle += len(block)

    def _drop(self, most: int) -> None:
        """Drops blocks that are not in use until they have at most so many bytes."""
        while self._idle > most and self._kept:
            size, oldest = next(iter(self._kept.items()))
            if oldest:
                oldest.pop()
                self._idle -= size
            if not oldest:
                del self._kept[size]


BLOCKS = Blocks()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=BLOCKS.renew_lock)


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns an uninitialised CPU tensor, in a kept block when large."""
    size = math.prod(shape) * dtype.itemsize
    if size < KEPT_FROM:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return _over(BLOCKS.take(size), shape, dtype)


def empty_rows(like: Tensor, count: int) -> Tensor:
    """Returns uninitialised rows `[count, ...]`, as those of another tensor."""
    shape = (count, *like.shape[1:])
    return empty(shape, like.dtype) if like.is_cpu else like.new_empty(shape)


def computed(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Computes an op of torch; into a kept block, if its result is a large CPU matrix.

    Args:
        func: the op; those of `_INTO` are computed into a block.
        args: what it takes; autograd does not record the op.
    """
    tensors = [a for a in args if isinstance(a, Tensor)] if func in _INTO else []
    # results are seldom more than four times as large as the largest operand
    if all(t.nbytes * 4 < KEPT_FROM for t in tensors):
        return func(*args, **kwargs)
    into, *more = _INTO[func]
    first, (rows, cols) = tensors[0], _shape(func, tensors)
    large = rows * cols * first.element_size() >= KEPT_FROM
    if not large or any(isinstance(a, complex) for a in (*args, *kwargs.values())):
        return func(*args, **kwargs)
    if all(
        type(t) in (Tensor, torch.nn.Parameter)
        and t.is_cpu
        and t.layout is torch.strided
        and (func in _PRODUCTS or t.is_contiguous())
        and t.dtype is first.dtype
        and t.is_floating_point()
        for t in tensors
    ):
        name = into._schema.arguments[-1].name
        kwargs[name] = empty((rows, cols), first.dtype)
        return into(*args, *more, **kwargs)
    return func(*args, **kwargs)


aten = torch.ops.aten
_PRODUCTS = (aten.mm.default, aten.addmm.default)
# by op: the overload that computes it into a tensor, and what that takes besides
_INTO: dict[Any, tuple[Any, ...]] = {
    aten.mm.default: (aten.mm.out,),
    aten.addmm.default: (aten.addmm.out,),
    aten.add.Tensor: (aten.add.out,),
    aten.mul.Tensor: (aten.mul.out,),
    aten.relu.default: (aten.clamp_min.out, 0),
    aten.threshold_backward.default: (aten.threshold_backward.grad_input,),
    aten.elu.default: (aten.elu.out,),
    aten.elu_backward.default: (aten.elu_backward.grad_input,),
    aten.leaky_relu.default: (aten.leaky_relu.out,),
    aten.leaky_relu_backward.default: (aten.leaky_relu_backward.grad_input,),
    aten._log_softmax.default: (aten._log_softmax.out,),
    aten._log_softmax_backward_data.default: (aten._log_softmax_backward_data.out,),
}


def _shape(func: Any, tensors: list[Tensor]) -> tuple[int, int]:
    """Returns the shape of the result of an op; 0, 0 if it is no matrix, or an error."""
    if func in _PRODUCTS:
        return tensors[-2].size(0), tensors[-1].size(1)
    shape = tensors[0].shape
    if any(t.shape != shape for t in tensors):
        try:
            shape = torch.broadcast_shapes(*(t.shape for t in tensors))
        except RuntimeError:  # of which the op tells
            return 0, 0
    return (shape[0], shape[1]) if len(shape) == 2 else (0, 0)


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
    BLOCKS.drop()
    if GLIBC is not None:
        end = GLIBC.sbrk(0)
        if HEAP_START is not None and end > HEAP_START:
            _advise(HEAP_START, end - HEAP_START)
        GLIBC.malloc_trim(0)


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
    return _over(file, shape, dtype)


def _over(raw: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns a tensor over bytes; no view of them, on which in-place ops would be refused."""
    empty = torch.empty(0, dtype=dtype, device="cpu")
    return empty.set_(raw.untyped_storage(), 0, shape)  # type: ignore[call-overload]

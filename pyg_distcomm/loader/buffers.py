"""Memory of minibatches that have been dropped, used again.

[Note: fresh pages] Features of a minibatch take tens of megabytes. Fresh, each page of
them is zeroed by the system before it is written, by all threads of a process under one
lock: with two threads that takes longer than the copy itself.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_distcomm.kernels import memory

WORTH = 1 << 20  # bytes below which fresh memory is as good
SLACK = 1.25  # minibatches vary in size

_probe = [np.empty(0)]
_ALONE = sys.getrefcount(_probe[0])  # references to an array that only a list holds


class Buffers:
    """Arrays whose tensors come and go; any number of threads may take from it.

    It grows to what is in use at a time, and is freed with its owner.
    """

    def __init__(self) -> None:
        self._held: list[Any] = []
        self._lock = threading.Lock()

    def empty(self, like: Tensor, rows: int) -> Tensor:
        """Returns an uninitialised matrix [rows, like.size(1)] of the type of `like`."""
        size = rows * like.size(1) * like.element_size()
        if size < WORTH:
            return like.new_empty(rows, like.size(1))
        with self._lock:
            # the array is referred to by the tensor for as long as its memory is
            array = self._unused(size)
            part = torch.from_numpy(array[:size])
        return part.view(like.dtype).view(rows, like.size(1))

    def _unused(self, size: int) -> Any:
        for k in range(len(self._held)):
            if sys.getrefcount(self._held[k]) == _ALONE and self._held[k].size >= size:
                return self._held[k]
        fresh = torch.empty(int(size * SLACK) // 64 * 64 + 64, dtype=torch.uint8)
        # one that nobody uses and that is too small gives way
        self._held = [a for a in self._held if not self._outgrown(a, size)]
        self._held.append(memory.advise(fresh).numpy())
        return self._held[-1]

    @staticmethod
    def _outgrown(array: Any, size: int) -> bool:
        # references: the list, the loop, this call's own, and getrefcount's
        return array.size < size and sys.getrefcount(array) <= _ALONE + 2

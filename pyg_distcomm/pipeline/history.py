"""History: rows of an earlier epoch, in full or fewer bits, in memory or in a file."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from pyg_distcomm.kernels import codec_ops

DTYPES = (None, torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8)
_BITS = 8


class History:
    """Rows in blocks, each written and read as a whole.

    As int8, a row is 256 levels between its least and its greatest number, which are kept
    in bf16 (see `code_reference.quantise`); rounding is to nearest.

    Args:
        bounds: where blocks end, from 0.
        like: a tensor of the rows' type and device, `[*, w]`.
        dtype: how they are kept; None as they are.
        path: a file to map, instead of memory.

    Price: `nbytes`, at most 4 bytes a row more than its numbers take.
    """

    def __init__(
        self,
        bounds: tuple[int, ...],
        like: Tensor,
        dtype: torch.dtype | None = None,
        path: Path | None = None,
    ) -> None:
        self._bounds = bounds
        coded = dtype is torch.int8 and like.is_floating_point()
        kind = like.dtype if dtype is None or not like.is_floating_point() else dtype
        width = like.size(1)
        if coded:
            sizes = [b - a for a, b in pairwise(bounds)]
            item = max(like.element_size(), 4)  # codes are of float32 and float64
            ends = [codec_ops.message_bytes(n, width, _BITS, item) for n in sizes]
            self._ends: list[int] | None = [0]
            for size in ends:
                self._ends.append(self._ends[-1] + size)
            self.kept = _empty(self._ends[-1], torch.uint8, like.device, path)
        else:
            self._ends = None
            numbers = _empty(bounds[-1] * width, kind, like.device, path)
            self.kept = numbers.view(bounds[-1], width)

    @property
    def nbytes(self) -> int:
        """The bytes that it takes."""
        return self.kept.nbytes

    def store(self, block: int, x: Tensor) -> None:
        """Writes the rows of a block."""
        if self._ends is None:
            rows = self._rows(block).copy_(x)
            if rows.dtype is torch.float16 and not bool(rows.isfinite().all()):
                raise _not_finite("float16")
        elif x.numel():
            message = self.kept[self._ends[block] : self._ends[block + 1]]
            bad = codec_ops.quantise(x, None, _BITS, None, message)
            if bad >= 0:
                raise _not_finite("int8")

    def load(self, block: int, out: Tensor) -> None:
        """Reads the rows of a block."""
        if self._ends is None:
            out.copy_(self._rows(block))
        elif out.numel():
            message = self.kept[self._ends[block] : self._ends[block + 1]]
            codec_ops.dequantise(message, _BITS, out)

    def _rows(self, block: int) -> Tensor:
        return self.kept[self._bounds[block] : self._bounds[block + 1]]


def _not_finite(kind: str) -> ValueError:
    return ValueError(
        f"a row of history is not finite as {kind}, and cannot be kept; lower the learning "
        "rate, or use history_dtype=torch.bfloat16"
    )


def _empty(
    count: int, dtype: torch.dtype, device: torch.device, path: Path | None
) -> Tensor:
    if path is None or not count:
        return torch.zeros(count, dtype=dtype, device=device)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # another history may be mapped from it, and keeps it
    return torch.from_file(str(path), shared=True, size=count, dtype=dtype)

"""Plain and Cast: numbers as they are, and in a narrower type."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_distcomm import kernels
from pyg_distcomm.halo.codec import ColumnReducer, RngKey

HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Plain(ColumnReducer):
    """Sends the bytes of the numbers, whatever they are.

    Price: f numbers a row.
    """

    @property
    def linear(self) -> bool:
        """The identity is."""
        return True

    @property
    def unbiased(self) -> bool:
        """The identity is."""
        return True

    def narrowed(self, width: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """Returns rows as they are."""
        return width, dtype

    def narrow(self, x: Tensor, draw: RngKey | None, index: Tensor | None) -> Tensor:
        """Returns the rows, without copying all of them."""
        return rows_at(x, index)

    def widen(self, y: Tensor, out: Tensor, draw: RngKey | None) -> Tensor:
        """Copies the rows, bit for bit."""
        return out.copy_(y)


@dataclass(frozen=True)
class Cast(ColumnReducer):
    """Sends each number rounded to a narrower type.

    The relative error is at most 2^-8 for bfloat16, and 2^-11 for float16 from 6e-5 to
    65504; greater magnitudes arrive as infinities, smaller ones are off by up to 3e-8.

    Price: 2 f bytes a row.

    Args:
        dtype: torch.float16 or torch.bfloat16.
    """

    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.dtype not in HALVES:
            raise ValueError(
                f"Cast sends torch.float16 or torch.bfloat16, got {self.dtype}"
            )

    def narrowed(self, width: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """Returns rows of the narrower type."""
        return width, self.dtype

    def narrow(self, x: Tensor, draw: RngKey | None, index: Tensor | None) -> Tensor:
        """Returns the rounded numbers."""
        return rows_at(x, index).to(self.dtype)

    def widen(self, y: Tensor, out: Tensor, draw: RngKey | None) -> Tensor:
        """Returns the rounded numbers in the type of `out`."""
        return out.copy_(y)


def rows_at(x: Tensor, index: Tensor | None) -> Tensor:
    """Returns the rows that are meant, of any type."""
    return x if index is None else kernels.gather_rows(x, index)

"""Batch norm over the nodes of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class DistBatchNorm(torch.nn.BatchNorm1d):
    """Batch norm whose mean and variance are taken over the nodes of all ranks.

        y = (x - mean) / sqrt(var + eps) * weight + bias

    Takes the arguments of `torch.nn.BatchNorm1d`, and is it for an ordinary tensor
    (SyncBatchNorm refuses CPU tensors). Ranks with one row or none are fine.

    Shapes: x `[n_i, C]` DistTensor -> `[n_i, C]`.
    Price: two all-reduces of C words forward and two backward.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Runs the layer."""
        return super().forward(input)  # DistTensor makes F.batch_norm global

    @classmethod
    def of(cls, norm: torch.nn.BatchNorm1d) -> DistBatchNorm:
        """Returns the distributed form of a batch norm, sharing its parameters."""
        twin = cls.__new__(cls)
        state: dict[str, Any] = vars(twin)
        state.update(vars(norm))
        return twin

"""Defines `DistBatchNorm`, batch norm with mean and variance over the nodes of all ranks."""

from __future__ import annotations

import torch


class DistBatchNorm(torch.nn.BatchNorm1d):
    """Batch norm with mean and variance over the nodes of all ranks.

        y = (x - mean) / sqrt(var + eps) * weight + bias

    Takes the arguments of `torch.nn.BatchNorm1d`, and is it for an ordinary tensor
    (SyncBatchNorm refuses CPU tensors). Ranks with one row or none are fine.

    Shapes: x `[n_i, C]` DistTensor -> `[n_i, C]`.
    Price: two all-reduces of C words forward and two backward.
    """

    # forward is torch's: batch norm of a DistTensor is global

    @classmethod
    def of(cls, norm: torch.nn.BatchNorm1d) -> DistBatchNorm:
        """Returns the distributed form of a batch norm, sharing its parameters."""
        out = cls.__new__(cls)
        vars(out).update(vars(norm))
        return out

"""Normalises over the nodes of all ranks, in place of PyG's batch norms."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import InstanceNorm as PygInstanceNorm

from pyg_distcomm.tensor.row_sharded import RowShardedTensor


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


class InstanceNorm(PygInstanceNorm):
    """PyG's InstanceNorm: of one graph, each channel by its mean and variance over nodes.

    Takes PyG's arguments, and is PyG's for an ordinary tensor or a `batch` vector.

    Shapes: x `[n, C]`, row-sharded -> `[n, C]`. Price: that of batch norm.
    """

    def forward(self, x: Tensor, batch: Any = None, batch_size: Any = None) -> Tensor:
        """Runs the layer."""
        if not isinstance(x, RowShardedTensor) or batch is not None:
            return super().forward(x, batch, batch_size)
        by_input = self.training or not self.track_running_stats
        kept = self.running_mean, self.running_var, self.weight, self.bias
        return F.batch_norm(x, *kept, by_input, self.momentum or 0.0, self.eps)

    @classmethod
    def of(cls, norm: PygInstanceNorm) -> InstanceNorm:
        """Returns the distributed form of an instance norm, sharing its parameters."""
        twin = cls.__new__(cls)
        twin.__dict__.update(norm.__dict__)
        return twin

"""Minimum vertex covers of bipartite graphs: `reference.minimum_cover`, compiled."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pyg_distcomm.kernels import cover_jit
from pyg_distcomm.kernels.compile import ready


def minimum_cover(ptr: Tensor, to: Tensor, num_right: int) -> tuple[Tensor, Tensor]:
    """Runs `reference.minimum_cover`, on one thread."""
    graph = ptr.to(torch.int64).numpy(), to.to(torch.int64).numpy()
    lefts = ptr.numel() - 1
    mates = np.full(lefts, -1, np.int64), np.full(num_right, -1, np.int64)
    ready(cover_jit.match, (*graph, *mates))()
    left, right = np.zeros(lefts, np.bool_), np.zeros(num_right, np.bool_)
    ready(cover_jit.reach, (*graph, *mates, left, right))()
    return torch.from_numpy(~left), torch.from_numpy(right)

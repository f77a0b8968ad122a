"""The norm of gradients that are spread over stages, and gradients scaled down to one."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.mesh import Mesh


def clip_grad_norm_(
    layers: torch.nn.Module, mesh: Mesh, max_norm: float, norm_type: float
) -> Tensor:
    """Scales the gradients of all stages; returns their norm before, on all ranks.

        norm = (sum over parameters of |grad|^p)^(1/p),  grad <- grad min(1, max / norm)

    The norms of parameters are joined in the order of layers, so that the number of
    stages does not matter.

    Price: one number for each parameter.

    Raises:
        ValueError: for a norm that is none.
    """
    if isinstance(max_norm, str) or not float(max_norm) >= 0:
        raise ValueError(f"max_norm must be a number from 0 on, got {max_norm!r}")
    mine = [p.grad for p in layers.parameters() if p.grad is not None]
    norms = [float(torch.linalg.vector_norm(g.detach(), norm_type)) for g in mine]
    every = [
        n for part in collectives.all_gather_object(norms, mesh.stage) for n in part
    ]
    total = torch.linalg.vector_norm(
        torch.tensor(every or [0.0], dtype=torch.float64), norm_type
    )
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)  # NaN stays
    for grad in mine:
        grad.mul_(float(scale))
    return total

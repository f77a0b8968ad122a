"""Keyed draws of negative samples, in the place of PyG's."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch_geometric.sampler import NegativeSampling

from pyg_distcomm.comm.random import fold, keyed_unit


class KeyedNegatives(NegativeSampling):
    """A `NegativeSampling` whose draws are a function of a key and of their order."""

    def __init__(self, like: NegativeSampling, key: int) -> None:
        super().__init__(like.mode, like.amount, like.src_weight, like.dst_weight)
        self.key, self.calls = key, 0

    def sample(
        self, num_samples: int, endpoint: Any = None, num_nodes: int | None = None
    ) -> Tensor:
        """Draws node ids, uniformly or by the weights of the endpoint."""
        weight = self.src_weight if endpoint == "src" else self.dst_weight
        unit = keyed_unit(fold(self.key, self.calls), num_samples)
        self.calls += 1
        if weight is None:
            if num_nodes is None:
                raise ValueError(
                    f"cannot draw negatives at the endpoint '{endpoint}' without num_nodes"
                )
            return (unit * num_nodes).long()
        if num_nodes is not None and weight.numel() != num_nodes:
            raise ValueError(
                f"The 'weight' attribute in 'NegativeSampling' needs to match "
                f"the number of nodes {num_nodes} (got {weight.numel()})"
            )
        running = weight.double().cumsum(0)
        if not bool((weight >= 0).all()) or not 0 < float(running[-1]) < math.inf:
            raise ValueError(
                f"'{endpoint}_weight' of the negative samples must be finite, not "
                "negative, and not all zero"
            )
        place = torch.searchsorted(running, unit * running[-1], right=True)
        return place.clamp_(max=weight.numel() - 1)

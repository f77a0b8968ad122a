"""Shards tensors by rows below autograd: one wrapper subclass, and rules by aten op."""

from pyg_distcomm.sharded import (
    adjacency,
    batched,
    by_id,
    constants,
    fused,
    products,
    reductions,
    views,
)
from pyg_distcomm.sharded.dist_tensor import DistTensor

__all__ = [
    "DistTensor",
    "adjacency",
    "batched",
    "by_id",
    "constants",
    "fused",
    "products",
    "reductions",
    "views",
]

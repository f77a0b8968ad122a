"""Shards tensors by rows below autograd: one wrapper subclass, and rules by aten op."""

from pyg_distcomm.sharded import by_id, fused, products, reductions, views
from pyg_distcomm.sharded.dist_tensor import RULES, DistTensor

__all__ = ["RULES", "DistTensor", "by_id", "fused", "products", "reductions", "views"]

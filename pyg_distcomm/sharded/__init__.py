"""Shards tensors by rows below autograd: one wrapper subclass, and rules by aten op."""

from pyg_distcomm.sharded import (  # noqa: F401  which declare the rules
    by_id,
    constants,
    edges,
    reductions,
    views,
)

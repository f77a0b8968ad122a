"""What the matrix layers share: the direction of messages and the order of products."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch_geometric.nn.dense.linear import Linear

from pyg_distcomm.constants import Ordering
from pyg_distcomm.tensor import DistTensor
from pyg_distcomm.topology import Topology


def flowing(
    topology: Topology, weight: Tensor | None, flow: str
) -> tuple[Topology, Tensor | None]:
    """Returns the edges, and their weights, in the direction that messages flow."""
    if flow == "source_to_target":
        return topology, weight
    back = topology.reversed
    return back.topology, None if weight is None else back.carry(weight)


def in_best_order(
    x: DistTensor,
    lin: Linear,
    bias: Tensor | None,
    multiply: Callable[[Tensor], Tensor],
    ordering: Ordering,
    known: Callable[[DistTensor, Callable[[], Tensor]], Tensor | None],
) -> Tensor:
    """Returns `(A X) W + b` or `A (X W) + b`, whichever exchanges fewer words.

    Both are the same function; the exchange has the width it is made at ([Kurt23]). The
    first is made once where x needs no gradient, and again backward where it does; not
    at all where A X is known (see [Note: constant inputs]).
    `x` may have more dims than two: they travel flattened.

    Args:
        x: the features.
        lin, bias: W and b.
        multiply: the product with A.
        ordering: which order to take, and whether to keep products.
        known: looks up, or computes, what is kept of `A x` (see `Constants.product`).
    """
    if is_lazy(lin.weight):
        lin(x)  # takes its width from x, through its own hooks
    if ordering.keep_inputs and ordering.order != "last":
        product = known(x, lambda: _by_row(multiply, x.to_local()))
        if product is not None:
            return F.linear(product, lin.weight, bias)
    grad = torch.is_grad_enabled()
    grads = (
        grad and x.requires_grad,
        grad and (x.requires_grad or lin.weight.requires_grad),
    )
    if ordering.takes_first(lin.in_channels, lin.out_channels, grads):
        return F.linear(_by_row(multiply, x.to_local()), lin.weight, bias)
    out = _by_row(multiply, F.linear(x.to_local(), lin.weight))
    return out if bias is None else out.add_(bias)  # a fresh tensor: nobody saved it


def _by_row(multiply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return multiply(x.flatten(1)).view(x.shape) if x.dim() > 2 else multiply(x)

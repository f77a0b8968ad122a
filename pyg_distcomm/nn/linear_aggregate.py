"""What the matrix layers share: the direction of messages and the order of products."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch_geometric.nn import MeanAggregation, MessagePassing, SumAggregation
from torch_geometric.nn.dense.linear import Linear

from pyg_distcomm.comm.gradient_averaging import meet
from pyg_distcomm.graph.edge_index import DistEdgeIndex
from pyg_distcomm.graph.product_cache import ProductCache
from pyg_distcomm.graph.topology import Topology
from pyg_distcomm.nn.layer_link import LayerLink
from pyg_distcomm.ops.local_blocks import Wrap
from pyg_distcomm.tensor.dist_tensor import DistTensor


def edges_for_flow(
    topology: Topology, weight: Tensor | None, flow: str
) -> tuple[Topology, Tensor | None]:
    """Returns the edges, and their weights, in the direction that messages flow.

    Weights are `[e]` or, as PyG takes them too, `[e, 1]`.
    """
    if weight is not None and weight.dim() > 1:
        if weight.shape[1:].numel() != 1:  # on a rank without edges, too
            raise ValueError(
                f"edge_weight has the shape {list(weight.shape)}, wanted one for each edge"
            )
        weight = weight.flatten()
    if flow == "source_to_target":
        return topology, weight
    back = topology.reversed
    return back.topology, None if weight is None else back.carry(weight)


def is_product(conv: MessagePassing, base: type, *linears: Any) -> bool:
    """Says whether a layer computes what PyG's class does, which is a product of matrices.

    Not where a subclass or a hook changes what it does on the way.

    Args:
        conv: the layer.
        base: PyG's class.
        linears: its transformations of features.
    """
    steps = "message aggregate update message_and_aggregate edge_update".split()
    kind, own = type(conv), vars(conv)
    if any(s in own or getattr(kind, s) is not getattr(base, s) for s in steps):
        return False
    if any(own.get(f"_{s}_forward_{when}") for s in _HOOKED for when in _WHEN):
        return False
    wanted = MeanAggregation if conv.aggr == "mean" else SumAggregation
    if type(conv.aggr_module) is not wanted:
        return False
    return all(
        type(lin).forward in (Linear.forward, torch.nn.Linear.forward)
        and not (lin._forward_hooks or lin._forward_pre_hooks)
        for lin in linears
        if not is_lazy(lin._parameters.get("weight"))
    )


_HOOKED = "propagate message aggregate message_and_aggregate edge_update".split()
_WHEN = ("pre_hooks", "hooks")


def linear_aggregate(
    x: DistTensor,
    lin: Linear,
    bias: Tensor | None,
    multiply: Callable[[Tensor, Wrap | None], Tensor],
    edge_index: DistEdgeIndex,
    kept: LayerProductCache,
    user: LayerLink,
) -> Tensor:
    """Returns `(A X) W + b` or `A (X W) + b`, whichever exchanges fewer words.

    Both are the same function; the exchange has the width it is made at ([Kurt23]). The
    first is made once where x needs no gradient, and again backward where it does; not
    at all where A X is known (see [Note: constant inputs]).
    `x` may have more dims than two: they travel flattened.

    Args:
        x: the features.
        lin, bias: W and b.
        multiply: the product with A, over links as the second argument wraps them.
        edge_index: A's; says which order to take, and whether to keep products.
        kept: what is kept of `A x`.
        user: the layer, and its link.
    """
    ordering, mesh = edge_index.topology.ordering, edge_index.nodes.mesh
    weight = lin.weight  # once: that of a parametrization may be another each time
    if is_lazy(weight):
        lin(x)  # takes its width from x, through its own hooks
        weight = lin.weight
    w, bias = meet(weight, mesh), meet(bias, mesh)
    local = x.to_local().contiguous()  # products round by strides
    grad = torch.is_grad_enabled()
    keeps = ordering.keep_inputs and ordering.order != "last"
    if keeps:

        def exactly() -> Tensor:
            user.keep(grad)  # which is off in here
            return _by_row(multiply, local, None)

        product = kept.product(x, exactly, user.had_kept)
        if product is not None:
            return F.linear(product, w, bias)
    wrap = user.wrap(kept.stage_of(x) if keeps else None)
    grads = (
        grad and x.requires_grad,
        grad and (x.requires_grad or weight.requires_grad),
    )
    if ordering.takes_first(lin.in_channels, lin.out_channels, grads):
        return F.linear(_by_row(multiply, local, wrap), w, bias)
    out = _by_row(multiply, F.linear(local, w), wrap)
    return out if bias is None else out.add_(bias)  # a fresh tensor: nobody saved it


def _by_row(
    multiply: Callable[[Tensor, Wrap | None], Tensor], x: Tensor, wrap: Wrap | None
) -> Tensor:
    if x.dim() > 2:
        return multiply(x.flatten(1), wrap).view(x.shape)
    return multiply(x, wrap)


@dataclass(frozen=True, eq=False)
class LayerProductCache:
    """Where a layer's products with inputs that do not change are kept.

    Args:
        constants: of the graph.
        kind: tells operators apart.
        weight: the weights of edges, or None.
    """

    constants: ProductCache
    kind: tuple
    weight: Any = None

    def product(
        self, x: DistTensor, multiply: Callable[[], Tensor], at_once: bool
    ) -> Tensor | None:
        """Returns `A x` as `ProductCache.product` has it."""
        kind, inputs = (*self.kind, x.dtype), (x, self.weight)
        return self.constants.product(kind, inputs, multiply, at_once=at_once)

    def stage_of(self, x: DistTensor) -> Callable[[], int]:
        """Returns how to ask whether `A x` is kept, for as long as x lives."""
        kind, alive = (*self.kind, x.dtype), weakref.ref(x)

        def stage() -> int:
            now = alive()
            return 0 if now is None else self.constants.stage(now, kind, self.weight)

        return stage

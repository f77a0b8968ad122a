"""Distributes PyG's GCNConv, GCN2Conv and SAGEConv as products with the graph's matrix."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch_geometric.nn import GCN2Conv, GCNConv, SAGEConv
from torch_geometric.nn.dense.linear import Linear

from pyg_distcomm.comm.gradient_averaging import as_replicated
from pyg_distcomm.graph.edge_index import DistEdgeIndex
from pyg_distcomm.graph.topology import OperatorKind
from pyg_distcomm.nn.halo_conv import shard_inputs, through_halo
from pyg_distcomm.nn.layer_context import (
    LayerContext,
    OwnLink,
    check_link,
    is_product,
)
from pyg_distcomm.nn.local_products import run_gcn, run_layer, run_sage
from pyg_distcomm.ops.grid_matrix import GridMatrix
from pyg_distcomm.tensor.dist_tensor import DistTensor
from pyg_distcomm.tensor.row_sharded import eagerly


class LinearProduct:
    """Plans `(A X) W + b` or `A (X W) + b`, whichever exchanges fewer words.

    Both are the same function, but exchange rows of different width ([Kurt23]). The first
    exchanges once if x needs no gradient, and once more in the backward pass if it does; not
    at all if A X is cached (see [Note: constant inputs]). The layer multiplies:

        plan = LinearProduct(context, x, kind, lin, bias)
        out = plan.finish(plan.matrix @ plan.rows if plan.known is None else plan.known)

    `x` may have more than two dims: its rows travel flattened.

    Args:
        context: the context of the call.
        x: the features.
        kind: the matrix A.
        lin, bias: W and b.
        mean: whether sums are divided by the number of edges.
    """

    def __init__(
        self,
        context: LayerContext,
        x: DistTensor,
        kind: OperatorKind,
        lin: Linear,
        bias: Tensor | None,
        *,
        mean: bool = False,
    ) -> None:
        self._context, self._kind, self._mean = context, kind, mean
        topology, weight = context.topology, lin.weight
        ordering, mesh = context.edges.topology.ordering, topology.nodes.mesh
        if is_lazy(weight):
            lin(x)  # initialises a lazy layer through its own hooks
            weight = lin.weight
        self._w, self._bias = (
            as_replicated(weight, mesh),
            as_replicated(bias, mesh),
        )
        local = x.to_local().contiguous()  # strides affect the rounding of products
        self._values = None if context.weight is None else context.weight.dtype
        if context.weight is None and kind.normalize:
            self._values = local.dtype
        self._outside = bias is not None and bias is not lin.bias
        grad, learns = torch.is_grad_enabled(), weight.requires_grad
        self.known = self._exchange = cached = None
        self._first = True
        keep = ordering.keep_inputs and topology.nodes.memory is None
        if keep and ordering.order != "last":
            cached = kind, mean, local.dtype
            self.known = topology.constants.product(
                cached,
                (x, context.given),
                lambda: self._exact_product(local, grad),
                cache_now=context.had_kept(),
            )
        if self.known is None:
            self._exchange = context.exchange(None if cached is None else x, cached)
            backward = grad and local.requires_grad
            grads = backward, backward or (grad and learns)
            widths = lin.in_channels, lin.out_channels
            self._first = ordering.takes_first(*widths, grads)
            self._set_operands(local if self._first else F.linear(local, self._w))

    def _exact_product(self, local: Tensor, grad: bool) -> Tensor:
        """Returns `A x` for the cache, over exact links."""
        self._context.note_kept(grad)  # gradients are off in here
        self._set_operands(local)
        return self._scale(self.matrix @ self.rows)

    def _set_operands(self, h: Tensor) -> None:
        """Sets the flattened rows to multiply, narrow under autocast, and the matrix."""
        self._shape = h.shape
        self.rows = h.flatten(1) if h.dim() > 2 else h
        context = self._context
        self.matrix: GridMatrix = context.topology.operator(
            self._kind, context.weight, self._message_dtype(h.dtype), self._exchange
        )

    def _message_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the type of messages that PyG's layer makes of rows of a type."""
        found = self._values
        return dtype if found is None else torch.promote_types(dtype, found)

    def _scale(self, z: Tensor) -> Tensor:
        if self._mean:
            degree = self._context.topology.in_degree.clamp(min=1)
            z = z / degree.to(z.dtype).unsqueeze(1)
        return z.view(self._shape) if len(self._shape) > 2 else z

    def finish(self, z: Tensor) -> DistTensor:
        """Returns the layer's output, given the product or the cached one."""
        z = z if self.known is not None else self._scale(z)
        if self._first:
            out = F.linear(z, self._w, self._bias)
        else:  # a fresh tensor that nothing else holds
            out = z if self._bias is None else z.add_(self._bias)
        if self._outside:
            out = out.to(torch.promote_types(out.dtype, self._bias.dtype))
        out = out.to(self._message_dtype(out.dtype))
        return DistTensor.wrap(out, self._context.edges.nodes)


class _LayerWithLink:
    """Adds the argument `link` to a PyG layer."""

    link: OwnLink = None

    def __init__(self, *args: Any, link: OwnLink = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.link = check_link(link)


class DistGCNConv(_LayerWithLink, GCNConv):
    r"""The graph convolution of [Kipf17], on a graph spread over ranks.

        X' = D^-1/2 (A + I) D^-1/2 X W + b

    Takes the arguments of `torch_geometric.nn.GCNConv`, has its `state_dict` and its
    `repr`, and *is* it for ordinary inputs. With a `DistEdgeIndex` it computes the same
    numbers on any grid: degrees and self-loops are global, (A X) W or A (X W) is chosen
    by the narrower width, and unused gradients are not computed. For the ordinary edges of a
    minibatch, or edges used before, it runs compiled products; see `nn.local_products`.

    Args:
        link: the `LinkPolicy` of its rows; "exact", or None for that of the edge_index.

    Shapes (this rank):
        x            [n_i, F_in]   DistTensor
        edge_index   [2, e_i]      DistEdgeIndex
        edge_weight  [e_i]         DistTensor, optional, may require gradients
        return       [n_i, F_out]  DistTensor

    Price: `GridMatrix.price(min(F_in, F_out))` forward, and the price of its transpose
    backward unless x needs no gradient; nothing for an x that does not change, from its
    third use on (see `DistEdgeIndex.with_ordering`).

    Raises:
        TypeError: if x is not a DistTensor; ValueError: if its rows are not the nodes.
    """

    def forward(
        self, x: Any, edge_index: Any = None, edge_weight: Any = None
    ) -> Tensor:
        """Runs the layer."""
        if not isinstance(edge_index, DistEdgeIndex):
            (x, edge_index), _ = shard_inputs((x, edge_index), {}, self)
        if not isinstance(edge_index, DistEdgeIndex):
            if torch.compiler.is_compiling():
                return super().forward(x, edge_index, edge_weight)
            return run_gcn(self, super().forward, x, edge_index, edge_weight)
        return self._distributed_forward(x, edge_index, edge_weight)

    @eagerly
    def _distributed_forward(
        self, x: Any, edge_index: DistEdgeIndex, edge_weight: Any
    ) -> Tensor:
        with edge_index.nodes.spilling():
            known = not isinstance(x, (tuple, list)) and self.aggr in ("add", "sum")
            if not known or not is_product(self, GCNConv, self.lin):
                run = super().forward
                return through_halo(self, self.link, run, x, edge_index, edge_weight)
            x = edge_index.as_nodes(x, "x")
            weight = edge_index.check_edges(edge_weight, "edge_weight")
            kind = OperatorKind()
            if self.normalize:
                edge_index.check_loops(self)
                kind = OperatorKind("gcn", self.improved, self.add_self_loops)
            context = LayerContext.of(self, self.link, edge_index, weight, edge_weight)
            plan = LinearProduct(context, x, kind, self.lin, self.bias)
            return plan.finish(
                plan.matrix @ plan.rows if plan.known is None else plan.known
            )


class DistGCN2Conv(_LayerWithLink, GCN2Conv):
    r"""The layer of GCNII [Chen20], on a graph spread over ranks.

        X' = ((1 - a) P X + a X_0) ((1 - b) I + b W_1),   P = D^-1/2 (A + I) D^-1/2

    and with W_2 in place of W_1 for X_0 where weights are not shared. Takes the arguments of
    `torch_geometric.nn.GCN2Conv`, has its `state_dict`, and *is* it for ordinary inputs.
    With a `DistEdgeIndex` it computes the same numbers on any grid; degrees and self-loops
    are global.

    Args:
        link: the `LinkPolicy` of its rows; "exact", or None for that of the edge_index.

    Shapes (this rank): x, x_0 `[n_i, C]` DistTensors -> `[n_i, C]`.
    Price: `GridMatrix.price(C)` forward, and that of its transpose backward unless x needs
    no gradient.

    Raises:
        TypeError: if x is not a DistTensor; ValueError: if its rows are not the nodes.
    """

    def forward(
        self, x: Any, x_0: Any, edge_index: Any, edge_weight: Any = None
    ) -> Tensor:
        """Runs the layer."""
        (x, x_0, edge_index), _ = shard_inputs((x, x_0, edge_index), {}, self)
        if not isinstance(edge_index, DistEdgeIndex):
            if torch.compiler.is_compiling():
                return super().forward(x, x_0, edge_index, edge_weight)
            return run_layer(self, super().forward, x, x_0, edge_index, edge_weight)
        return self._distributed_forward(x, x_0, edge_index, edge_weight)

    @eagerly
    def _distributed_forward(
        self, x: Any, x_0: Any, edge_index: DistEdgeIndex, edge_weight: Any
    ) -> Tensor:
        with edge_index.nodes.spilling():
            if self.aggr not in ("add", "sum") or not is_product(self, GCN2Conv):
                run = super().forward
                return through_halo(
                    self, self.link, run, x, x_0, edge_index, edge_weight
                )
            local = edge_index.check_nodes(x, "x")
            first = edge_index.check_nodes(x_0, "x_0")
            weight = edge_index.check_edges(edge_weight, "edge_weight")
            kind = OperatorKind()
            if self.normalize:
                edge_index.check_loops(self)
                kind = OperatorKind("gcn", False, self.add_self_loops)
            context = LayerContext.of(self, self.link, edge_index, weight)
            dtype = local.dtype
            if context.weight is not None:
                dtype = torch.promote_types(dtype, context.weight.dtype)
            operator = kind, context.weight, dtype, context.exchange()
            mixed = context.topology.operator(*operator) @ local
            mesh = edge_index.nodes.mesh
            weight1, weight2 = (
                as_replicated(self.weight1, mesh),
                as_replicated(self.weight2, mesh),
            )
            mixed, first = mixed * (1 - self.alpha), first * self.alpha
            rest = {"beta": 1 - self.beta, "alpha": self.beta}
            if self.weight2 is None:
                mixed = mixed + first
                out = torch.addmm(mixed, mixed, weight1, **rest)
            else:
                out = torch.addmm(mixed, mixed, weight1, **rest)
                out = out + torch.addmm(first, first, weight2, **rest)
            return DistTensor.wrap(out, edge_index.nodes)


class DistSAGEConv(_LayerWithLink, SAGEConv):
    r"""The GraphSAGE layer of [Hamilton17], on a graph spread over ranks.

        x'_i = W_1 x_i + W_2 mean_{j in N(i)} x_j

    Takes the arguments of `torch_geometric.nn.SAGEConv`, has its `state_dict`, and *is*
    it for ordinary inputs. With a `DistEdgeIndex`, "mean" and "sum" are products on any
    grid; every other aggregation fetches the rows of neighbours, as `HaloConv` does. For the
    ordinary edges of a minibatch, or edges used before, it runs compiled products; see
    `nn.local_products`.

    Args:
        link: the `LinkPolicy` of its rows; "exact", or None for that of the edge_index.

    Shapes (this rank):
        x           [n_i, F_in]   DistTensor, or a pair of them
        edge_index  [2, e_i]      DistEdgeIndex
        return      [n_i, F_out]  DistTensor

    Price: `GridMatrix.price(min(F_in, F_out))` forward, and the price of its transpose
    backward unless x needs no gradient, and nothing for an x that does not change, from
    its third use on (see `DistEdgeIndex.with_ordering`); F_in for other aggregations.

    Raises:
        TypeError: if x is not a DistTensor; ValueError: if its rows are not the nodes.
    """

    def forward(self, x: Any, edge_index: Any = None, size: Any = None) -> Tensor:
        """Runs the layer."""
        (x, edge_index), _ = shard_inputs((x, edge_index), {}, self)
        if not isinstance(edge_index, DistEdgeIndex):
            if torch.compiler.is_compiling():
                return super().forward(x, edge_index, size)
            return run_sage(self, super().forward, x, edge_index, size)
        return self._distributed_forward(x, edge_index)

    @eagerly
    def _distributed_forward(self, x: Any, edge_index: DistEdgeIndex) -> Tensor:
        with edge_index.nodes.spilling():
            known = self.aggr in ("mean", "sum", "add")
            known = known and edge_index.topology.sources is None
            if not known or not is_product(self, SAGEConv, biased=[self.lin_l]):
                return through_halo(self, self.link, super().forward, x, edge_index)
            source, root = x if isinstance(x, (tuple, list)) else (x, x)
            source = edge_index.as_nodes(source, "x")
            if self.project and hasattr(self, "lin"):
                source = self.lin(source).relu()
            weight: Any = edge_index.weight if edge_index.of_torch else None
            local = edge_index.check_edges(weight, "adj_t")
            context = LayerContext.of(self, self.link, edge_index, local, weight)
            product = context, source, OperatorKind(), self.lin_l, self.lin_l.bias
            plan = LinearProduct(*product, mean=self.aggr == "mean")
            mixed = plan.matrix @ plan.rows if plan.known is None else plan.known
            out = plan.finish(mixed)
            if self.root_weight and root is not None:
                own = edge_index.check_nodes(root, "x[1]")
                out = out + self.lin_r(DistTensor.wrap(own, edge_index.nodes))
            return F.normalize(out, p=2.0, dim=-1) if self.normalize else out

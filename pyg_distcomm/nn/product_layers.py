"""Distributes PyG's GCNConv, GCN2Conv and SAGEConv as products with the graph's matrix.

What PyG's own classes compute on a share op by op, these compute on ordinary tensors, between
`to_local` and `from_local`: a faster way to the same numbers, on every grid.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn
from torch import Tensor
from torch.nn.parameter import is_lazy

from pyg_distcomm.graph.edge_products import linear
from pyg_distcomm.graph.topology import OperatorKind, Topology
from pyg_distcomm.nn.capped import spilling
from pyg_distcomm.nn.halo_conv import on_ranks, one_hop, run_any, run_on_share
from pyg_distcomm.nn.layer_context import (
    Explained,
    LayerContext,
    OwnLink,
    are_rows_of,
    check_arguments,
    check_edges,
    check_link,
    dtype_of,
    is_product,
    is_spread,
    sharded_inputs,
    topology_of,
)
from pyg_distcomm.nn.local_products import run_gcn, run_sage
from pyg_distcomm.nn.message_forms import AGGREGATIONS, with_attributes
from pyg_distcomm.ops.grid_matrix import GridMatrix
from pyg_distcomm.sharded.agreement import compare_weights
from pyg_distcomm.sharded.dist_tensor import DistTensor
from pyg_distcomm.sharded.partial import all_entered


class WithLink(Explained):
    """Adds the argument `link` to a layer of PyG.

    Args:
        link: the `LinkPolicy` of its rows; "exact", or None for that of the edge_index. It
            applies to the tensors that the layer passes to `propagate`, except those of
            which attention logits are made, which are exact and synchronous.
    """

    link: OwnLink = None

    def __init__(self, *args: Any, link: OwnLink = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.link = check_link(link)


class PlannedProduct:
    """Computes `A X W + b + X_root R` on own rows: what is multiplied by A, and what follows.

    By `(A X) W` or `A (X W)`, whichever sends fewer words; [Kurt23] orders the products. The
    gradients of W, R and b are summed over the ranks.

    Args:
        x: the rows X.
        context: the edges, and the link.
        kind: the matrix A.
        weight: the weights of the edges; None of ones.
        lin: the linear layer of W.
        mean: whether sums are divided by the number of edges.
        root: the rows X_root, and the linear layer of R; None without.
        bias: b; None without.
    """

    rows: Tensor  # own rows that A is multiplied by `[n, f]`, or the kept A X
    matrix: GridMatrix | None  # A; None where A X is kept

    def __init__(
        self,
        x: DistTensor,
        context: LayerContext,
        kind: OperatorKind,
        weight: DistTensor | None,
        lin: Any,
        mean: bool = False,
        root: tuple[DistTensor, Any] | None = None,
        bias: Tensor | None = None,
    ) -> None:
        layers = [(x, lin)] if root is None else [(x, lin), root]
        for rows, layer in layers:
            if is_lazy(layer._parameters.get("weight")):
                layer(rows)  # initialises a lazy layer through its own hooks
        grad, self.topology = torch.is_grad_enabled(), context.topology
        mesh, ordering = self.topology.nodes.mesh, self.topology.ordering
        weights = [layer.weight for _, layer in layers]  # once: it may be computed
        weights += [] if bias is None else [bias]
        compare_weights(weights, mesh)
        w, *own = all_entered(weights, mesh)
        self.kind, self.mean = kind, mean
        self.edges = None if weight is None else weight.to_local()
        # the type of the values of A, as PyG's messages are of; None where they are ones
        self.values = x.dtype if kind.normalize else None
        self.values = self.values if weight is None else weight.dtype
        self.root = None if root is None else (root[0].to_local().contiguous(), own[0])
        self.bias: Tensor | None = None if bias is None else own.pop()
        self.weight: Tensor | None = w  # None where it comes before A
        held = None
        if ordering.keep_inputs and ordering.order != "last":

            def exact() -> Tensor:
                context.note_kept(grad)  # gradients are off in here
                matrix: Any = self.of(x.to_local()).matrix
                return self.averaged(matrix @ self.rows)

            held, reuse = (kind, mean, x.dtype), context.had_kept()
            constants = self.topology.constants
            known = constants.product(held, (x, weight), exact, cache_now=reuse)
            if known is not None:
                self.rows, self.matrix = known, None
                return
        exchange = context.exchange(None if held is None else x, held)
        backward = grad and x.requires_grad
        grads = backward, backward or (grad and weights[0].requires_grad)
        if ordering.takes_first(lin.in_channels, lin.out_channels, grads):
            self.of(x.to_local(), exchange)
        else:
            self.weight = None
            self.of(linear(x.to_local().contiguous(), w), exchange)

    def of(self, local: Tensor, exchange: Any = None) -> PlannedProduct:
        """Sets the rows `[n, ...]` to multiply, and A, over the links of an exchange."""
        local = local.contiguous()
        self.shape = local.shape
        self.rows = local.flatten(1) if local.dim() > 2 else local
        dtype = self._wider(local.dtype)
        self.matrix = self.topology.operator(self.kind, self.edges, dtype, exchange)
        return self

    def averaged(self, out: Tensor) -> Tensor:
        """Divides sums by the number of edges of each node, in means."""
        if self.mean:
            degree = self.topology.in_degree.clamp(min=1)
            out = out.div_(degree.to(out.dtype).unsqueeze(1))
        return out.view(self.shape)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def finish(self, out: Tensor) -> Tensor:
        """Returns the sharded output of a layer, of sums over edges `[n, f]`."""
        out = out if self.matrix is None else self.averaged(out)
        root = self.root or (None, None)
        if self.weight is not None:
            out = linear(out, self.weight, self.bias, *root)
        elif self.root is not None:
            rest = linear(*self.root, self.bias)
            out = rest.add_(out) if rest.dtype == out.dtype else out + rest
        elif self.bias is not None:
            out = out.add_(self.bias.to(out.dtype))
        dtype = self._wider(out.dtype)
        out = out if out.dtype == dtype else out.to(dtype)
        return DistTensor.from_local(out, self.topology.nodes)

    def _wider(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if self.values is None else torch.promote_types(dtype, self.values)


def _saving(topology: Topology) -> contextlib.AbstractContextManager[None]:
    """Returns a context that keeps what autograd saves within the memory cap, if any."""
    capped = topology.nodes.memory is not None
    return spilling(topology) if capped else contextlib.nullcontext()


def _edges_of_product(
    conv: Any, base: type, edge_index: Any, given: Any, *linears: Any, biased: Any = ()
) -> Topology | None:
    """Returns the edges of a layer that is a product with their matrix; None if it is none.

    Of the features that it is given some may be None; see `is_product` for the rest.
    """
    topology = topology_of(edge_index)
    if topology is None or topology.sources is not None:
        return None
    rows = [x for x in given if x is not None]
    fits = all(are_rows_of(x, topology) and x.is_floating_point() for x in rows)
    fits = fits and conv.flow == "source_to_target"
    fits = fits and not (getattr(conv, "add_self_loops", False) and edge_index.looped)
    fits = fits and is_product(conv, base, *linears, biased=biased)
    return topology if fits else None


def _weights_of(edge_index: Any, weight: Any, topology: Topology) -> tuple[bool, Any]:
    """Returns the weights of edges, and whether a product can have them."""
    weight = edge_index.weight if weight is None else weight
    if weight is None:
        return True, None
    known = type(weight) is DistTensor and weight.rows is topology.edges
    return known and weight.dim() == 1, weight


class DistGCNConv(WithLink, torch_geometric.nn.GCNConv):
    r"""Applies the graph convolution of [Kipf17] on a graph that is spread over ranks.

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
    """

    def forward(
        self, x: Any, edge_index: Any = None, edge_weight: Any = None
    ) -> Tensor:
        """Runs the layer."""
        if is_spread(x, edge_index):
            # what a cached layer of PyG keeps of its first call
            first = vars(self).get("first_edges", (edge_index, edge_weight))
            edge_index, edge_weight = first
            product = self._planned(x, edge_index, edge_weight)
            if product is None:
                given = x, edge_index, edge_weight
                return run_on_share(self, self.link, super().forward, *given)  # type: ignore[no-any-return]
            matrix, rows = product.matrix, product.rows
            with _saving(product.topology):
                return product.finish(rows if matrix is None else matrix @ rows)
        check_arguments(self, (x, edge_index, edge_weight), {})
        if torch.compiler.is_compiling():
            return super().forward(x, edge_index, edge_weight)
        return run_gcn(self, super().forward, x, edge_index, edge_weight)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _planned(
        self, x: Any, edge_index: Any, edge_weight: Any
    ) -> PlannedProduct | None:
        """Returns the product that the layer is on a share, or None; collective."""
        check_arguments(self, (x, edge_index, edge_weight), {})
        (x, edge_index), _ = sharded_inputs((x, edge_index), {})
        check_edges("edge_weight", edge_weight, topology_of(edge_index))
        given = torch_geometric.nn.GCNConv, edge_index, [x], self.lin
        topology = _edges_of_product(self, *given)
        if topology is None or self._cached_edge_index is not None:
            return None
        if self.aggr not in ("add", "sum") or x.dtype != dtype_of(self.lin):
            return None
        if not self.normalize and torch.is_autocast_enabled(x.device.type):
            return None
        fits, weight = _weights_of(edge_index, edge_weight, topology)
        if not fits or (weight is not None and weight.dtype != x.dtype):
            return None
        context = LayerContext(self, self.link, edge_index, weight)
        kind = OperatorKind()
        if self.normalize:
            kind = OperatorKind("gcn", self.improved, self.add_self_loops)
        if self.cached and self.normalize:
            self.__dict__.setdefault("first_edges", (edge_index, edge_weight))
        with _saving(topology):
            return PlannedProduct(x, context, kind, weight, self.lin, bias=self.bias)

    def reset_parameters(self) -> None:
        """Draws weights anew, and forgets the edges of the first call."""
        super().reset_parameters()
        self.__dict__.pop("first_edges", None)


class DistGCN2Conv(WithLink, torch_geometric.nn.GCN2Conv):
    r"""Applies the layer of GCNII [Chen20] on a graph that is spread over ranks.

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
    """

    def forward(
        self, x: Any, x_0: Any, edge_index: Any, edge_weight: Any = None
    ) -> Tensor:
        """Runs the layer."""
        if is_spread(x, edge_index):
            return self._on_share(super().forward, x, x_0, edge_index, edge_weight)  # type: ignore[no-any-return]
        return run_any(self, None, super().forward, x, x_0, edge_index, edge_weight)  # type: ignore[no-any-return]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _on_share(self, run: Callable[..., Tensor], *given: Any) -> Tensor:
        check_arguments(self, given, {})
        *sharded, edge_weight = given
        (x, x_0, edge_index), _ = sharded_inputs(tuple(sharded), {})
        matrix = self._matrix(x, x_0, edge_index, edge_weight)
        if matrix is None:
            return run_on_share(self, self.link, run, x, x_0, edge_index, edge_weight)  # type: ignore[no-any-return]
        topology = edge_index.topology
        with _saving(topology), on_ranks(self, topology):
            # the edges are normalised in the matrix
            sums = matrix @ x.to_local().contiguous()
            known = {"propagate": lambda *_, **__: sums, "normalize": False}
            with with_attributes([self], lambda _: known):
                out = run(sums, x_0.to_local(), edge_index)
            return DistTensor.from_local(out, topology.nodes)

    def _matrix(
        self, x: Any, x_0: Any, edge_index: Any, edge_weight: Any
    ) -> GridMatrix | None:
        """Returns the matrix P, over the links of this call; None if it is another layer."""
        check_edges("edge_weight", edge_weight, topology_of(edge_index))
        given = torch_geometric.nn.GCN2Conv, edge_index, [x, x_0]
        topology = _edges_of_product(self, *given)
        if topology is None or self.aggr not in ("add", "sum"):
            return None
        if self.cached or not self.normalize:
            return None
        fits, weight = _weights_of(edge_index, edge_weight, topology)
        if not fits:
            return None
        context = LayerContext(self, self.link, edge_index, weight)
        kind = OperatorKind("gcn", False, self.add_self_loops)
        edges = None if weight is None else weight.to_local()
        return topology.operator(kind, edges, x.dtype, context.exchange())


class DistSAGEConv(WithLink, torch_geometric.nn.SAGEConv):
    r"""Applies the GraphSAGE layer of [Hamilton17] on a graph that is spread over ranks.

        x'_i = W_1 x_i + W_2 mean_{j in N(i)} x_j

    Takes the arguments of `torch_geometric.nn.SAGEConv`, has its `state_dict`, and *is*
    it for ordinary inputs. With a `DistEdgeIndex`, "mean" and "sum" are products on any
    grid; every other aggregation, and edges between two types of nodes, fetch the rows of
    neighbours, as `HaloConv` does. For the ordinary edges of a minibatch, or edges used
    before, it runs compiled products; see `nn.local_products`.

    Args:
        link: the `LinkPolicy` of its rows; "exact", or None for that of the edge_index.

    Shapes (this rank):
        x           [n_i, F_in]   DistTensor, or a pair of them
        edge_index  [2, e_i]      DistEdgeIndex
        return      [n_i, F_out]  DistTensor

    Price: `GridMatrix.price(min(F_in, F_out))` forward, and the price of its transpose
    backward unless x needs no gradient, and nothing for an x that does not change, from
    its third use on (see `DistEdgeIndex.with_ordering`); where rows are fetched, F_in.
    """

    def forward(self, x: Any, edge_index: Any = None, size: Any = None) -> Tensor:
        """Runs the layer."""
        if is_spread(x, edge_index):
            product = self._planned(x, edge_index, size)
            if product is None:
                run, given = super().forward, (x, edge_index, size)
                if size is None and type(self.aggr_module) in AGGREGATIONS:
                    run = one_hop(self, run)
                return run_on_share(self, self.link, run, *given)  # type: ignore[no-any-return]
            matrix, rows = product.matrix, product.rows
            with _saving(product.topology):
                out = product.finish(rows if matrix is None else matrix @ rows)
            return F.normalize(out, p=2.0, dim=-1) if self.normalize else out
        check_arguments(self, (x, edge_index), {})
        if torch.compiler.is_compiling():
            return super().forward(x, edge_index, size)
        return run_sage(self, super().forward, x, edge_index, size)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _planned(self, x: Any, edge_index: Any, size: Any) -> PlannedProduct | None:
        """Returns the product that the layer is on a share, or None; collective."""
        check_arguments(self, (x, edge_index), {})
        (x, edge_index), _ = sharded_inputs((x, edge_index), {})
        source, root = x if isinstance(x, (tuple, list)) else (x, x)
        linears = [self.lin_r] if self.root_weight else []
        given = torch_geometric.nn.SAGEConv, edge_index, [source, root], *linears
        topology = _edges_of_product(self, *given, biased=[self.lin_l])
        if topology is None or self.aggr not in ("mean", "sum", "add"):
            return None
        if source is None or edge_index.weight is not None:
            return None
        if self.project and hasattr(self, "lin"):
            source = self.lin(source).relu()
        context = LayerContext(self, self.link, edge_index)
        own = (root, self.lin_r) if self.root_weight and root is not None else None
        plan = context, OperatorKind(), None, self.lin_l, self.aggr == "mean"
        with _saving(context.topology):
            return PlannedProduct(source, *plan, own, self.lin_l.bias)

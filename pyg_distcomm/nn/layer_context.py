"""Gathers what one call of a layer needs: edges, link and cache; and orders its products."""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch_geometric.nn import (
    MaxAggregation,
    MeanAggregation,
    MessagePassing,
    SumAggregation,
)
from torch_geometric.nn.dense.linear import Linear

from pyg_distcomm.comm.consistency import check_transforms, comparer_of
from pyg_distcomm.comm.gradient_averaging import meet
from pyg_distcomm.comm.ledger import dense_words
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.graph.edge_index import DistEdgeIndex
from pyg_distcomm.graph.topology import OperatorKind, Topology
from pyg_distcomm.halo.compressed import LayerExchange
from pyg_distcomm.halo.policy import LinkPolicy, settings_of
from pyg_distcomm.nn.message_forms import has_hooks, is_changed, propagates_as_pyg
from pyg_distcomm.ops.grid_matrix import GridMatrix
from pyg_distcomm.process import tell
from pyg_distcomm.tensor.dist_tensor import DistTensor

OwnLink: TypeAlias = LinkPolicy | Literal["exact"] | None


def check_link(link: OwnLink) -> OwnLink:
    """Returns the link of a layer if it can be one.

    Raises:
        TypeError: naming what a layer takes as its link.
    """
    if link is None or link == "exact" or isinstance(link, LinkPolicy):
        return link
    raise TypeError(
        "link must be a LinkPolicy, such as pdc.Sylvie() or pdc.VARCO(epochs), 'exact', or "
        f"None for that of the edge_index, got {link!r}"
    )


@dataclass(eq=False)
class LayerContext:
    """Holds the edges, the link and the weights of one call of a layer.

    Args:
        layer: the layer.
        edges: what it was given.
        topology: these edges, in the direction of its messages.
        link: how its rows travel; None is exact.
        weight: of the edges in that direction, `[e]` or None.
        given: the weights as they were given, by which products are remembered.
    """

    layer: torch.nn.Module
    edges: DistEdgeIndex
    topology: Topology
    link: LinkPolicy | None
    weight: Tensor | None = None
    given: Any = None

    @staticmethod
    def of(
        layer: Any,
        own: OwnLink,
        edges: DistEdgeIndex,
        weight: Tensor | None = None,
        given: Any = None,
    ) -> LayerContext:
        """Returns the context of a call; collective at first.

        Args:
            layer: the layer.
            own: its own link; None for that of the edges.
            edges: the edges that it is given.
            weight: their weights here, `[e]` or, as PyG takes them too, `[e, 1]`.
            given: the tensor that the layer was given as weights.

        Raises:
            ValueError: on all ranks, if links or settings of the layer differ.
        """
        check_transforms()
        topology = edges.topology
        if weight is not None and weight.dim() > 1:
            if weight.shape[1:].numel() != 1:  # on a rank without edges, too
                raise ValueError(
                    f"edge_weight has the shape {list(weight.shape)}, wanted one for each "
                    "edge"
                )
            weight = weight.flatten()
        if layer.flow != "source_to_target":
            back = topology.reversed
            topology = back.topology
            weight = None if weight is None else back.carry(weight)
        link = _agreed_link(layer, own, edges)
        return LayerContext(layer, edges, topology, link, weight, given)

    @property
    def is_coded(self) -> bool:
        """Whether anything it exchanges may be coded or late."""
        link = self.link
        return link is not None and link.is_used_on(self.edges.nodes.mesh)

    def exchange(self, x: Any = None, kind: Any = None) -> LayerExchange | None:
        """Returns how the links of this call write rows, None if it is exact.

        Args:
            x: the input whose product with the graph may be kept, if any.
            kind: the kind of that product.
        """
        if self.link is None:
            return None
        stage = None
        if x is not None:
            alive, key = weakref.ref(x), (kind, self.given)

            def stage() -> int:
                now = alive()
                return 0 if now is None else self.topology.constants.stage(now, *key)

        nodes, training = self.edges.nodes, self.layer.training
        begin, degrees = self.link.begin, self.topology.own_degrees
        return begin(self.layer, nodes, training, stage, degrees=degrees)

    def had_kept(self) -> bool:
        """Says whether a resumed run had seen the input of this call, before it was saved."""
        if not self.is_coded:
            return False
        assert self.link is not None
        trains = self.layer.training and torch.is_grad_enabled()
        return self.link.was_constant(self.layer, trains)

    def note_kept(self, graded: bool) -> None:
        """Tells the link that a product will be kept, where gradients are on or not."""
        if self.link is not None:
            nodes = self.edges.nodes
            self.link.note_cached(self.layer, nodes, self.layer.training and graded)


def _agreed_link(layer: Any, own: OwnLink, edges: DistEdgeIndex) -> LinkPolicy | None:
    """Returns the link of a layer on some edges, compared between ranks at first use."""
    topology = edges.topology
    link = topology.link if own is None else own
    topology.read_by(layer, link)
    policy = link if isinstance(link, LinkPolicy) else None
    known, mode = topology.compared.get(layer, (None, None))
    check_placement(layer, topology)
    if known is not policy or mode is not layer.training:
        mesh: Any = edges.nodes.mesh
        if isinstance(mesh, Mesh):  # a pipeline compares the links of its stages itself
            kind = {"kind of device": topology.device.type}
            comparer_of(mesh).check_given(
                layer, policy, lambda: settings_of(policy) | kind
            )
        topology.compared[layer] = policy, layer.training
    return policy


def check_placement(layer: Any, topology: Topology) -> None:
    """Raises, on all ranks, if a parameter of a layer lies elsewhere than its edges.

    Looks at all of them when the layer is first used, and then at the first.

    Raises:
        ValueError: naming the parameter, and both devices.
    """
    first = next(layer.parameters(), None)
    if first is None or (
        layer in topology.compared and first.device == topology.device
    ):
        return
    for name, parameter in layer.named_parameters():
        topology.placed(f"{type(layer).__name__}.{name}", parameter)


def tell_of_rows(layer: Any, topology: Topology, why: str) -> None:
    """Tells, once for each kind of layer, that rows travel where the grid has more axes.

    On rank 0, as a warning and in the log, with the price of both ways. Collective.

    Args:
        layer: the layer.
        topology: its edges, in the direction of its messages.
        why: why the grid cannot add up its messages, in words.
    """
    mesh, name = topology.nodes.mesh, type(layer).__name__
    if mesh.grid[1:] == (1, 1) or name in mesh.told:
        return
    mesh.told.add(name)
    sides = " x ".join(map(str, mesh.grid))
    text = (
        f"{name} runs by halo exchange on the grid {sides}, as on ({mesh.size}, 1, 1): "
        f"{why}. For each feature, rows bring {topology.row_words:,} numbers to all ranks "
        "together"
    )
    known = vars(topology).get("product_words")  # for which a product has been planned
    if known is not None:
        text += f", and a product on the grid, as of GCNConv, {known:,.0f}"
    elif topology.sources is None:
        most = mesh.size * dense_words(topology.nodes.total, 1, mesh.grid)
        text += f", and a product on the grid, as of GCNConv, at most {most:,.0f}"
    tell(mesh.rank, "%s", text)
    if mesh.rank == 0:
        warnings.warn(f"{text}; pdc.plan prices a model on every grid", stacklevel=2)


def is_product(
    conv: MessagePassing, base: type, *linears: Any, biased: Any = ()
) -> bool:
    """Says whether a layer computes what PyG's class does, which is a product of matrices.

    Not where a subclass, a hook or another module in its place changes what it does.

    Args:
        conv: the layer.
        base: PyG's class.
        linears: its transformations of features, which have no bias.
        biased: those that may have one.
    """
    steps = "message aggregate update message_and_aggregate edge_update".split()
    kind, own = type(conv), vars(conv)
    if any(s in own or getattr(kind, s) is not getattr(base, s) for s in steps):
        return False
    if "propagate" in own or not propagates_as_pyg(conv):
        return False
    if conv.explain or has_hooks(conv):  # messages are weighed by a mask of edges
        return False
    named = {"mean": MeanAggregation, "max": MaxAggregation}
    if type(conv.aggr_module) is not named.get(str(conv.aggr), SumAggregation):
        return False
    if any(getattr(lin, "bias", None) is not None for lin in linears):
        return False
    return all(
        type(lin).forward in (Linear.forward, torch.nn.Linear.forward)
        and not is_changed(lin)
        for lin in (*linears, *biased)
        if not is_lazy(lin._parameters.get("weight"))
    )


class LinearProduct:
    """Plans `(A X) W + b` or `A (X W) + b`, whichever exchanges fewer words.

    Both are the same function; the exchange has the width it is made at ([Kurt23]). The
    first is made once where x needs no gradient, and again backward where it does; not
    at all where A X is known (see [Note: constant inputs]). The layer multiplies:

        plan = LinearProduct(context, x, kind, lin, bias)
        out = plan.finish(plan.matrix @ plan.rows if plan.known is None else plan.known)

    `x` may have more dims than two: they travel flattened.

    Args:
        context: of the call.
        x: the features.
        kind: which matrix A is.
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
            lin(x)  # takes its width from x, through its own hooks
            weight = lin.weight
        self._w, self._bias = meet(weight, mesh), meet(bias, mesh)
        local = x.to_local().contiguous()  # products round by strides
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
                lambda: self._exactly(local, grad),
                at_once=context.had_kept(),
            )
        if self.known is None:
            self._exchange = context.exchange(None if cached is None else x, cached)
            backward = grad and local.requires_grad
            grads = backward, backward or (grad and learns)
            widths = lin.in_channels, lin.out_channels
            self._first = ordering.takes_first(*widths, grads)
            self._set(local if self._first else F.linear(local, self._w))

    def _exactly(self, local: Tensor, grad: bool) -> Tensor:
        """Returns `A x` to be kept."""
        self._context.note_kept(grad)  # which is off in here
        self._set(local)
        return self._scaled(self.matrix @ self.rows)

    def _set(self, h: Tensor) -> None:
        """Takes the rows to multiply, flat; under autocast narrower than the matrix."""
        self._shape = h.shape
        self.rows = h.flatten(1) if h.dim() > 2 else h
        context = self._context
        self.matrix: GridMatrix = context.topology.operator(
            self._kind, context.weight, self._wider(h.dtype), self._exchange
        )

    def _wider(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the type of messages made of rows, in PyG's layer."""
        found = self._values
        return dtype if found is None else torch.promote_types(dtype, found)

    def _scaled(self, z: Tensor) -> Tensor:
        if self._mean:
            degree = self._context.topology.in_degree.clamp(min=1)
            z = z / degree.to(z.dtype).unsqueeze(1)
        return z.view(self._shape) if len(self._shape) > 2 else z

    def finish(self, z: Tensor) -> DistTensor:
        """Returns the layer's output of the product, or of the known one."""
        z = z if self.known is not None else self._scaled(z)
        if self._first:
            out = F.linear(z, self._w, self._bias)
        else:  # a fresh tensor: nobody saved it
            out = z if self._bias is None else z.add_(self._bias)
        if self._outside:
            out = out.to(torch.promote_types(out.dtype, self._bias.dtype))
        out = out.to(self._wider(out.dtype))
        return DistTensor.wrap(out, self._context.edges.nodes)

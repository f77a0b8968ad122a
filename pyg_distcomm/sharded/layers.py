"""Runs layers of PyG by products with the graph's matrix, or on own rows and ghosts.

What PyG's own classes compute on a share op by op, these compute on ordinary tensors, between
`to_local` and `from_local`: a faster way to the same numbers. A link other than the exact one
takes the place of the exchange of source rows, in any layer; see `linked.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map

from pyg_distcomm.graph.topology import OperatorKind, Topology
from pyg_distcomm.nn.layer_context import (
    LayerContext,
    OwnLink,
    check_arguments,
    check_link,
    has_hooks,
    is_changed,
    is_product,
)
from pyg_distcomm.nn.local_products import run_gcn, run_layer, run_sage
from pyg_distcomm.nn.message_forms import layers_of
from pyg_distcomm.sharded.adding import adding
from pyg_distcomm.sharded.agreement import compare_parameters
from pyg_distcomm.sharded.capped import within_cap
from pyg_distcomm.sharded.dist_tensor import DistTensor, rule
from pyg_distcomm.sharded.edge_methods import EdgeMethods
from pyg_distcomm.sharded.edges import DistEdgeIndex
from pyg_distcomm.sharded.linked import exchanging, keeps_rows
from pyg_distcomm.sharded.partial import entered


def topology_of(edge_index: Any) -> Topology | None:
    """Returns what is planned for the edges of a graph; None for others."""
    return edge_index.topology if isinstance(edge_index, DistEdgeIndex) else None


def run_on_share(
    conv: Any, link: OwnLink, run: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Runs `run`, the forward of a layer, on a share, over its link if it has one."""
    args, kwargs = sharded_inputs(args, kwargs)
    values = (*args, *kwargs.values())
    edges: list[Any] = [v for v in values if isinstance(v, DistEdgeIndex)]
    if len(edges) != 1:
        return run(*args, **kwargs)
    topology = edges[0].topology
    exact = link in (None, "exact") and topology.link is None
    if exact and edges[0].of_torch:
        return run(*args, **kwargs)
    if exact and not topology.chunked:
        capped = topology.nodes.memory is not None
        with within_cap(conv, topology, args, kwargs) if capped else adding(conv):
            return run(*args, **kwargs)
    if edges[0].of_torch:
        raise TypeError(
            f"give {type(conv).__name__} an edge_index, or no link: rows that are multiplied "
            "by a sparse matrix are not sent over links"
        )
    if any(map(keeps_rows, layers_of(conv))):
        link = "exact"  # what it keeps must be exact
    context = LayerContext.of(conv, link, edges[0])
    if topology.chunked and is_one_hop(conv) and not is_changed(conv):
        run = _one_hop(conv, run)
    with exchanging(conv, context):
        return run(*args, **kwargs)


def sharded_inputs(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Returns the arguments of a layer, with a whole edge_index beside sharded features cut."""
    values = [*args, *kwargs.values()]
    flat = [x for v in values for x in (v if isinstance(v, (tuple, list)) else (v,))]
    found = [x for x in flat if type(x) is DistTensor]
    _check_current(found)
    nodes = [x.rows for x in found if x.dim_ == 0 and x.rows.partition is not None]
    if not nodes or any(x.dim_ == 1 for x in found):
        return args, kwargs
    ends = nodes[0], nodes[0]
    for pair in values:
        if isinstance(pair, (tuple, list)) and len(pair) == 2:
            if all(type(x) is DistTensor for x in pair):
                ends = pair[1].rows, pair[0].rows

    def cut(value: Any) -> Any:
        if type(value) is not Tensor:
            return value
        if value.layout != torch.strided:
            return DistEdgeIndex.of_sparse(value, ends[0])
        pair = value.dim() == 2 and value.size(0) == 2
        if pair and value.dtype in (torch.int64, torch.int32):
            sources = None if ends[1].same_as(ends[0]) else ends[1]
            return DistEdgeIndex.cut(value, ends[0], sources)
        return value

    return [cut(v) for v in args], {name: cut(v) for name, v in kwargs.items()}


def _check_current(values: list[DistTensor]) -> None:
    """Raises for rows of before `pdc.update` beside edges of after it, or the reverse."""
    edges = next((x.topology for x in values if isinstance(x, DistEdgeIndex)), None)
    if edges is None:
        return
    ends = edges.nodes, edges.source_rows
    for x in values:
        rows = x.rows
        if x.dim_ or rows.partition is None or any(rows is end for end in ends):
            continue
        if rows.updates or any(end.updates for end in ends):
            raise ValueError(
                "take the rows and the edge_index of a layer from one pdc.partition or update: "
                f"got {rows}, and edges between {ends[0]}; one is from before pdc.update"
            )


def sharded_inputs_of(args: Any, kwargs: Any, layer: Any) -> tuple[Any, Any]:
    """Returns the arguments of a layer; see `sharded_inputs`."""
    return sharded_inputs(args, kwargs)


def is_spread(*values: Any) -> bool:
    """Tells whether any argument of a layer is sharded."""
    return any(
        isinstance(x, EdgeMethods)
        for v in values
        for x in (v if isinstance(v, (tuple, list)) else (v,))
    )


@rule("layer")
def run_any(
    conv: Any, link: OwnLink, run: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Runs `run`, a layer of any kind, on a share, a minibatch or a whole graph."""
    check_arguments(conv, args, kwargs)
    if is_spread(*args, *kwargs.values()):
        return run_on_share(conv, link, run, *args, **kwargs)
    if torch.compiler.is_compiling():
        return run(*args, **kwargs)
    return run_layer(conv, run, *args, **kwargs)


class OnShare:
    """Runs a layer of PyG over a link on a share, by compiled products elsewhere.

    On a share the layer is PyG's, op by op; see `DistTensor`.

        class MyConv(OnShare, torch_geometric.nn.MessagePassing): ...
    """

    link: OwnLink = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the layer, with its hooks."""
        run: Any = super().__call__  # type: ignore[misc]
        return run_any(self, self.link, run, *args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the layer."""
        run: Callable[..., Any] = super().forward  # type: ignore[misc]
        if is_one_hop(self) and is_spread(*args, *kwargs.values()):
            run = _one_hop(self, run)
        return run(*args, **kwargs)


class WithLink:
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


def _rows_of(x: Any, topology: Topology | None) -> bool:
    nodes = None if topology is None else topology.source_rows
    return type(x) is DistTensor and x.dim_ == 0 and x.rows is nodes


def linear_product(
    x: DistTensor,
    context: LayerContext,
    kind: OperatorKind,
    weight: DistTensor | None,
    lin: Any,
    bias: Tensor | None,
    mean: bool = False,
) -> Tensor:
    """Returns `(A X) W + b`, or `A (X W) + b`, whichever exchanges fewer words."""
    if is_lazy(lin.weight):
        lin(x)  # initialises a lazy layer through its own hooks
    edges = None if weight is None else weight.to_local()
    grad, topology = torch.is_grad_enabled(), context.topology
    values = x.dtype if kind.normalize else None  # as PyG's messages are of
    values = values if weight is None else weight.dtype

    def wide(dtype: torch.dtype) -> torch.dtype:
        return dtype if values is None else torch.promote_types(dtype, values)

    def finish(out: Tensor) -> Tensor:
        return out.to(wide(out.dtype))

    def multiply(rows: Any, exchange: Any = None) -> Tensor:
        local = rows.to_local().contiguous()
        shape = local.shape
        local = local.flatten(1) if local.dim() > 2 else local
        out = topology.operator(kind, edges, wide(local.dtype), exchange) @ local
        if mean:
            degree = topology.in_degree.clamp(min=1)
            out = out / degree.to(out.dtype).unsqueeze(1)
        return out.view(shape)

    known = held = None
    ordering = topology.ordering
    if ordering.keep_inputs and ordering.order != "last":

        def exact() -> Tensor:
            context.note_kept(grad)  # gradients are off in here
            return multiply(x)

        held = kind, mean, x.dtype
        known = topology.constants.product(
            held, (x, weight), exact, cache_now=context.had_kept()
        )
    if known is not None:
        rows = DistTensor.from_local(known, topology.nodes)
        return finish(F.linear(rows, lin.weight, bias))
    exchange = context.exchange(None if held is None else x, held)
    backward = grad and x.requires_grad
    grads = backward, backward or (grad and lin.weight.requires_grad)
    if ordering.takes_first(lin.in_channels, lin.out_channels, grads):
        rows = DistTensor.from_local(multiply(x, exchange), topology.nodes)
        return finish(F.linear(rows, lin.weight, bias))
    out: Tensor = DistTensor.from_local(
        multiply(F.linear(x.contiguous(), lin.weight), exchange), topology.nodes
    )
    return finish(out if bias is None else out + bias.to(out.dtype))


def _weights_of(edge_index: Any, weight: Any, topology: Topology) -> tuple[bool, Any]:
    """Returns the weights of edges, and whether a product can have them."""
    weight = edge_index.weight if weight is None else weight
    if weight is None:
        return True, None
    known = type(weight) is DistTensor and weight.rows is topology.edges
    return known and weight.dim() == 1, weight


class DistGCNConv(WithLink, torch_geometric.nn.GCNConv):
    """PyG's GCNConv; on a share, a product with `D^-1/2 (A + I) D^-1/2`."""

    def forward(self, x: Any, edge_index: Any, edge_weight: Any = None) -> Tensor:
        """Runs the layer."""
        run: Callable[..., Tensor] = torch_geometric.nn.GCNConv.forward.__get__(self)
        check_arguments(self, (x, edge_index), {})
        if not is_spread(x, edge_index):
            if torch.compiler.is_compiling():
                return run(x, edge_index, edge_weight)
            return run_gcn(self, run, x, edge_index, edge_weight)
        (x, edge_index), _ = sharded_inputs((x, edge_index), {})
        topology = topology_of(edge_index)
        known = (
            topology is not None and topology.sources is None and _rows_of(x, topology)
        )
        known = (
            known
            and self.normalize
            and not self.cached
            and not (self.add_self_loops and edge_index.looped)
            and x.dtype == self.lin.weight.dtype
        )
        known = (
            known and self.aggr in ("add", "sum") and self.flow == "source_to_target"
        )
        if not known or not is_product(self, torch_geometric.nn.GCNConv, self.lin):
            return run_on_share(self, self.link, run, x, edge_index, edge_weight)
        assert topology is not None
        fits, weight = _weights_of(edge_index, edge_weight, topology)
        if not fits:
            return run_on_share(self, self.link, run, x, edge_index, edge_weight)
        context = LayerContext.of(self, self.link, edge_index, None, weight)
        kind = OperatorKind("gcn", self.improved, self.add_self_loops)
        return linear_product(x, context, kind, weight, self.lin, self.bias)


class DistGCN2Conv(WithLink, torch_geometric.nn.GCN2Conv):
    """PyG's GCN2Conv; on a share, a product with `D^-1/2 (A + I) D^-1/2`."""

    def forward(
        self, x: Any, x_0: Any, edge_index: Any, edge_weight: Any = None
    ) -> Tensor:
        """Runs the layer."""
        run: Callable[..., Tensor] = torch_geometric.nn.GCN2Conv.forward.__get__(self)
        check_arguments(self, (x, x_0, edge_index), {})
        if not is_spread(x, edge_index):
            return run_any(self, None, run, x, x_0, edge_index, edge_weight)  # type: ignore[no-any-return]
        (x, x_0, edge_index), _ = sharded_inputs((x, x_0, edge_index), {})
        found = self._product(x, x_0, edge_index, edge_weight)
        if found is None:
            return run_on_share(self, self.link, run, x, x_0, edge_index, edge_weight)  # type: ignore[no-any-return]
        return found

    def _product(
        self, x: Any, x_0: Any, edge_index: Any, edge_weight: Any
    ) -> Tensor | None:
        topology = topology_of(edge_index)
        base = torch_geometric.nn.GCN2Conv
        known = topology is not None and topology.sources is None
        known = known and self.normalize and not self.cached
        known = known and not (self.add_self_loops and edge_index.looped)
        known = known and self.aggr in ("add", "sum") and is_product(self, base)
        if not known or topology is None or self.flow != "source_to_target":
            return None
        fits, weight = _weights_of(edge_index, edge_weight, topology)
        if not (fits and _rows_of(x, topology) and _rows_of(x_0, topology)):
            return None
        context = LayerContext.of(self, self.link, edge_index, None, weight)
        kind = OperatorKind("gcn", False, self.add_self_loops)
        edges = None if weight is None else weight.to_local()
        local = x.to_local().contiguous()
        operator = topology.operator(kind, edges, local.dtype, context.exchange())
        mixed = DistTensor.from_local(operator @ local, topology.nodes)
        mixed, first = mixed * (1 - self.alpha), x_0 * self.alpha
        rest = {"beta": 1 - self.beta, "alpha": self.beta}
        if self.weight2 is None:
            mixed = mixed + first
            return torch.addmm(mixed, mixed, self.weight1, **rest)
        out = torch.addmm(mixed, mixed, self.weight1, **rest)
        return out + torch.addmm(first, first, self.weight2, **rest)


class DistSAGEConv(WithLink, torch_geometric.nn.SAGEConv):
    """PyG's SAGEConv; on a share, "mean" and "sum" are products with `A`."""

    def forward(self, x: Any, edge_index: Any, size: Any = None) -> Tensor:
        """Runs the layer."""
        run: Callable[..., Tensor] = torch_geometric.nn.SAGEConv.forward.__get__(self)
        check_arguments(self, (x, edge_index), {})
        if not is_spread(x, edge_index):
            if torch.compiler.is_compiling():
                return run(x, edge_index, size)
            return run_sage(self, run, x, edge_index, size)
        (x, edge_index), _ = sharded_inputs((x, edge_index), {})
        topology = topology_of(edge_index)
        source, root = x if isinstance(x, (tuple, list)) else (x, x)
        known = topology is not None and topology.sources is None
        known = (
            known and self.aggr in ("mean", "sum", "add") and _rows_of(source, topology)
        )
        known = known and edge_index.weight is None and self.flow == "source_to_target"
        if not known or not is_product(
            self, torch_geometric.nn.SAGEConv, biased=[self.lin_l]
        ):
            return run_on_share(self, self.link, run, x, edge_index, size)
        if self.project and hasattr(self, "lin"):
            source = self.lin(source).relu()
        context = LayerContext.of(self, self.link, edge_index)
        given = context, OperatorKind(), None, self.lin_l, self.lin_l.bias
        out = linear_product(source, *given, mean=self.aggr == "mean")
        if self.root_weight and root is not None:
            out = out + self.lin_r(root.contiguous())
        return F.normalize(out, p=2.0, dim=-1) if self.normalize else out


class _OnOwnRows(torch.nn.Module):
    """Runs a layer's computation, as `functional_call` needs a module for."""

    def __init__(self, conv: Any) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, run: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        return run_layer(self.conv, run, *args, **kwargs)  # type: ignore[arg-type,no-any-return]


def _one_hop(conv: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a layer on own rows and ghosts, of which each travels once.

    What travels is the input, `[h, F_in]`; that of a constant input once. A layer with a
    link, or with dropout of attention, runs op by op.
    """

    def on_own_rows(x: Any, edge_index: Any, *args: Any, **kwargs: Any) -> Any:
        topology, training = topology_of(edge_index), getattr(conv, "training", False)
        known = topology is not None and topology.sources is None
        drawn = training or (known and topology.chunked)  # type: ignore[union-attr]
        known = known and not (drawn and getattr(conv, "dropout", 0.0) > 0)
        known = known and edge_index.weight is None and _rows_of(x, topology)
        known = (
            known and x.dim() == 2 and getattr(conv, "link", None) in (None, "exact")
        )
        if not known or topology is None or topology.link is not None:
            return run(x, edge_index, *args, **kwargs)
        values = (*args, *kwargs.values())
        plain = all(v is None or _of_edges(v, topology) for v in values)
        if not plain or conv.flow != "source_to_target" or has_hooks(conv):
            return run(x, edge_index, *args, **kwargs)
        return _on_own_rows(conv, topology, run, x, args, kwargs)

    return on_own_rows


def _on_own_rows(
    conv: Any,
    topology: Topology,
    run: Callable[..., Any],
    x: Any,
    args: Any,
    kwargs: Any,
) -> Any:
    mesh = topology.nodes.mesh
    table = topology.constant_rows(x)
    if table is None:
        table = topology.locals.with_ghosts(x.to_local().contiguous())
    args, kwargs = tree_map(
        lambda v: v.to_local() if type(v) is DistTensor else v, (args, kwargs)
    )
    own = table[: len(topology.nodes)]
    if mesh.size > 1:
        compare_parameters(list(conv.parameters()), mesh)
    params = {f"conv.{name}": entered(p, mesh) for name, p in conv.named_parameters()}
    given = run, (table, own), topology.locals.ends, *args
    out = torch.func.functional_call(_OnOwnRows(conv), params, given, kwargs)

    return DistTensor.from_local(out, topology.nodes)


def _of_edges(value: Any, topology: Topology) -> bool:
    return (
        type(value) is DistTensor and value.dim_ == 0 and value.rows is topology.edges
    )


# layers whose output at a node depends on its in-edges and the rows at their ends alone, and
# which read no more of these in their `forward` than a pair of sources and targets gives
_ONE_HOP = frozenset(
    getattr(torch_geometric.nn, name)
    for name in "GATConv GATv2Conv GraphConv TransformerConv".split()
)


def is_one_hop(conv: Any) -> bool:
    """Tells whether a layer is one of PyG's that `_one_hop` runs, with PyG's `forward`."""
    for kind in type(conv).__mro__:
        if kind in _ONE_HOP:
            return True
        if kind is not OnShare and "forward" in vars(kind):
            return False
    return False

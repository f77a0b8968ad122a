"""Runs layers of PyG by products with the graph's matrix, or on own rows and ghosts.

What PyG's own classes compute on a share op by op, these compute on ordinary tensors, between
`to_local` and `from_local`: a faster way to the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn
from torch import Tensor
from torch.utils._pytree import tree_map

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.graph.topology import OperatorKind, Topology
from pyg_distcomm.nn.layer_context import is_product
from pyg_distcomm.nn.local_products import run_layer
from pyg_distcomm.sharded.dist_tensor import DistTensor
from pyg_distcomm.sharded.partial import summed_over_ranks


def topology_of(edge_index: Any) -> Topology | None:
    """Returns what is planned for the edges of a graph; None for others."""
    if (
        type(edge_index) is not DistTensor
        or edge_index.dim() != 2
        or edge_index.dim_ != 1
    ):
        return None
    found: Topology | None = edge_index.rows.derived.get("topology")
    return None if found is None or edge_index._version else found


def _rows_of(x: Any, topology: Topology) -> bool:
    nodes = topology.source_rows
    return type(x) is DistTensor and x.dim() == 2 and x.dim_ == 0 and x.rows is nodes


def linear_product(
    x: DistTensor,
    topology: Topology,
    kind: OperatorKind,
    weight: DistTensor | None,
    lin: Any,
    bias: Tensor | None,
    mean: bool = False,
) -> Tensor:
    """Returns `(A X) W + b`, or `A (X W) + b`, whichever exchanges fewer words."""
    edges = None if weight is None else weight.to_local()
    grad = torch.is_grad_enabled()

    def multiply(rows: Any) -> Tensor:
        local = rows.to_local().contiguous()
        out = topology.operator(kind, edges, local.dtype) @ local
        if mean:
            degree = topology.in_degree.clamp(min=1)
            out = out / degree.to(out.dtype).unsqueeze(1)
        return out

    known = None
    ordering = topology.ordering
    if ordering.keep_inputs and ordering.order != "last":
        held = kind, mean, x.dtype
        known = topology.constants.product(held, (x, weight), lambda: multiply(x))
    if known is not None:
        return F.linear(DistTensor.from_local(known, topology.nodes), lin.weight, bias)
    backward = grad and x.requires_grad
    grads = backward, backward or (grad and lin.weight.requires_grad)
    if ordering.takes_first(lin.in_channels, lin.out_channels, grads):
        return F.linear(
            DistTensor.from_local(multiply(x), topology.nodes), lin.weight, bias
        )
    out: Tensor = DistTensor.from_local(
        multiply(F.linear(x, lin.weight)), topology.nodes
    )
    return out if bias is None else out + bias


class DistGCNConv(torch_geometric.nn.GCNConv):
    """PyG's GCNConv; on a share, a product with `D^-1/2 (A + I) D^-1/2`."""

    def forward(self, x: Any, edge_index: Any, edge_weight: Any = None) -> Tensor:
        """Runs the layer."""
        topology = topology_of(edge_index)
        known = topology is not None and topology.sources is None and self.normalize
        known = known and not self.cached and self.aggr in ("add", "sum")
        if not known or not is_product(self, torch_geometric.nn.GCNConv, self.lin):
            return super().forward(x, edge_index, edge_weight)
        assert topology is not None
        if not _rows_of(x, topology):
            return super().forward(x, edge_index, edge_weight)
        kind = OperatorKind("gcn", self.improved, self.add_self_loops)
        return linear_product(x, topology, kind, edge_weight, self.lin, self.bias)


class DistSAGEConv(torch_geometric.nn.SAGEConv):
    """PyG's SAGEConv; on a share, "mean" and "sum" are products with `A`."""

    def forward(self, x: Any, edge_index: Any, size: Any = None) -> Tensor:
        """Runs the layer."""
        run: Callable[..., Tensor] = super().forward
        topology = topology_of(edge_index)
        known = topology is not None and topology.sources is None
        known = known and self.aggr in ("mean", "sum", "add") and not self.project
        source, root = x if isinstance(x, (tuple, list)) else (x, x)
        if not known or not is_product(
            self, torch_geometric.nn.SAGEConv, biased=[self.lin_l]
        ):
            return run(x, edge_index, size)
        assert topology is not None
        if not _rows_of(source, topology):
            return run(x, edge_index, size)
        given = topology, OperatorKind(), None, self.lin_l, self.lin_l.bias
        out = linear_product(source, *given, mean=self.aggr == "mean")
        if self.root_weight and root is not None:
            out = out + self.lin_r(root)
        return F.normalize(out, p=2.0, dim=-1) if self.normalize else out


class _Enter(torch.autograd.Function):
    """Takes a plain tensor into a computation on own rows; its gradient is summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh) -> Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():
            return _Sum.apply(g, ctx.mesh), None
        return summed_over_ranks(g, ctx.mesh), None


class _Sum(torch.autograd.Function):
    """Sums parts over the ranks; the gradient of each part is that of the sum."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, mesh: Mesh) -> Tensor:
        ctx.mesh = mesh
        return collectives.all_reduce(part, mesh.world)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return _Enter.apply(g, ctx.mesh), None


class _OnOwnRows(torch.nn.Module):
    """Runs a layer's computation, as `functional_call` needs a module for."""

    def __init__(self, conv: Any) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, run: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        return run_layer(self.conv, run, *args, **kwargs)  # type: ignore[arg-type,no-any-return]


class _OneHop:
    """Runs a layer on own rows and ghosts, of which each travels once.

    For layers whose output at a node depends on its in-edges and on the rows at their ends
    alone. What travels is the input, `[h, F_in]`; that of a constant input once.
    """

    def forward(self, x: Any, edge_index: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs the layer."""
        run: Callable[..., Tensor] = super().forward  # type: ignore[misc]
        topology, training = topology_of(edge_index), getattr(self, "training", False)
        drawn = training and getattr(self, "dropout", 0.0) > 0
        if topology is None or topology.sources is not None or drawn:
            return run(x, edge_index, *args, **kwargs)
        values = (*args, *kwargs.values())
        plain = all(
            v is None or isinstance(v, bool) or _of_edges(v, topology) for v in values
        )
        if not _rows_of(x, topology) or not plain:
            return run(x, edge_index, *args, **kwargs)
        mesh = topology.nodes.mesh
        table = topology.constant_rows(x)
        if table is None:
            table = topology.locals.with_ghosts(x.to_local())
        args, kwargs = tree_map(
            lambda v: v.to_local() if type(v) is DistTensor else v, (args, kwargs)
        )
        own = table[: len(topology.nodes)]
        entered = {
            f"conv.{name}": _Enter.apply(p, mesh)
            for name, p in self.named_parameters()  # type: ignore[attr-defined]
        }
        inner, given = (
            _OnOwnRows(self),
            (run, (table, own), topology.locals.ends, *args),
        )  # type: ignore[arg-type]
        out = torch.func.functional_call(inner, entered, given, kwargs)
        return DistTensor.from_local(out, topology.nodes)


def _of_edges(value: Any, topology: Topology) -> bool:
    return (
        type(value) is DistTensor and value.dim_ == 0 and value.rows is topology.edges
    )


class DistGATConv(_OneHop, torch_geometric.nn.GATConv):
    """PyG's GATConv; on a share, compiled on own rows and ghosts."""


class DistGATv2Conv(_OneHop, torch_geometric.nn.GATv2Conv):
    """PyG's GATv2Conv; on a share, compiled on own rows and ghosts."""


class DistGraphConv(_OneHop, torch_geometric.nn.GraphConv):
    """PyG's GraphConv; on a share, compiled on own rows and ghosts."""


class DistTransformerConv(_OneHop, torch_geometric.nn.TransformerConv):
    """PyG's TransformerConv; on a share, compiled on own rows and ghosts."""

"""Runs PyG's GCNConv and SAGEConv as products with the graph's matrix, on any grid.

What PyG's own classes compute on a share by exchanges and scatters, these compute by
`GridMatrix`, between `to_local` and `from_local`: a faster way to the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn
from torch import Tensor

from pyg_distcomm.graph.topology import OperatorKind, Topology
from pyg_distcomm.nn.layer_context import is_product
from pyg_distcomm.sharded.dist_tensor import DistTensor


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


class GCNConv(torch_geometric.nn.GCNConv):
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


class SAGEConv(torch_geometric.nn.SAGEConv):
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

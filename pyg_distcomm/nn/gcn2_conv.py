"""Distributes PyG's GCN2Conv when given a DistEdgeIndex: `DistGCN2Conv`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import GCN2Conv

from pyg_distcomm.comm.gradient_averaging import meet
from pyg_distcomm.graph.edge_index import DistEdgeIndex
from pyg_distcomm.graph.topology import OperatorKind
from pyg_distcomm.nn.halo_conv import spread_inputs, through_halo
from pyg_distcomm.nn.layer_context import (
    LayerContext,
    OwnLink,
    check_link,
    is_product,
)
from pyg_distcomm.nn.local_products import run_layer
from pyg_distcomm.tensor.dist_tensor import DistTensor
from pyg_distcomm.tensor.row_sharded import eagerly


class DistGCN2Conv(GCN2Conv):
    r"""The layer of GCNII [Chen20], on a graph spread over ranks.

        X' = ((1 - a) P X + a X_0) ((1 - b) I + b W_1),   P = D^-1/2 (A + I) D^-1/2

    and with W_2 in place of W_1 for X_0 where weights are not shared. Takes the arguments of
    `torch_geometric.nn.GCN2Conv`, has its `state_dict`, and *is* it for ordinary inputs.
    With a `DistEdgeIndex` it computes the same numbers on any grid; degrees and self-loops
    are global.

    Args:
        link: how rows travel, if not by the link of the edges; "exact" as they are.

    Shapes (this rank): x, x_0 `[n_i, C]` DistTensors -> `[n_i, C]`.
    Price: `GridMatrix.price(C)` forward, and that of its transpose backward unless x needs
    no gradient.

    Raises:
        TypeError: if x is not a DistTensor; ValueError: if its rows are not the nodes.
    """

    link: OwnLink = None

    def __init__(self, *args: Any, link: OwnLink = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.link = check_link(link)

    def forward(
        self, x: Any, x_0: Any, edge_index: Any, edge_weight: Any = None
    ) -> Tensor:
        """Runs the layer."""
        (x, x_0, edge_index), _ = spread_inputs((x, x_0, edge_index), {}, self)
        if not isinstance(edge_index, DistEdgeIndex):
            if torch.compiler.is_compiling():
                return super().forward(x, x_0, edge_index, edge_weight)
            return run_layer(self, super().forward, x, x_0, edge_index, edge_weight)
        return self._multiplied(x, x_0, edge_index, edge_weight)

    @eagerly
    def _multiplied(
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
            weight1, weight2 = meet(self.weight1, mesh), meet(self.weight2, mesh)
            mixed, first = mixed * (1 - self.alpha), first * self.alpha
            rest = {"beta": 1 - self.beta, "alpha": self.beta}
            if self.weight2 is None:
                mixed = mixed + first
                out = torch.addmm(mixed, mixed, weight1, **rest)
            else:
                out = torch.addmm(mixed, mixed, weight1, **rest)
                out = out + torch.addmm(first, first, weight2, **rest)
            return DistTensor.wrap(out, edge_index.nodes)

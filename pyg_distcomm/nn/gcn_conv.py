"""Distributes PyG's GCNConv when given a DistEdgeIndex: `DistGCNConv`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import GCNConv

from pyg_distcomm.graph.edge_index import DistEdgeIndex
from pyg_distcomm.graph.topology import OperatorKind
from pyg_distcomm.nn.halo_conv import spread_inputs, through_halo
from pyg_distcomm.nn.layer_context import (
    LayerContext,
    LinearProduct,
    OwnLink,
    check_link,
    is_product,
)
from pyg_distcomm.nn.local_products import run_gcn
from pyg_distcomm.tensor.row_sharded import eagerly


class DistGCNConv(GCNConv):
    r"""The graph convolution of [Kipf17], on a graph spread over ranks.

        X' = D^-1/2 (A + I) D^-1/2 X W + b

    Takes the arguments of `torch_geometric.nn.GCNConv`, has its `state_dict` and its
    `repr`, and *is* it for ordinary inputs. With a `DistEdgeIndex` it computes the same
    numbers on any grid: degrees and self-loops are global, (A X) W or A (X W) is chosen
    by the narrower width, and a gradient nobody needs is not computed. Ordinary edges of a
    minibatch, or used before, are multiplied by compiled products; see `nn.local_products`.

    Args:
        link: how rows travel, a `LinkPolicy`; "exact", or that of the edge_index (None).

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

    link: OwnLink = None

    def __init__(self, *args: Any, link: OwnLink = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.link = check_link(link)

    def forward(
        self, x: Any, edge_index: Any = None, edge_weight: Any = None
    ) -> Tensor:
        """Runs the layer."""
        if not isinstance(edge_index, DistEdgeIndex):
            (x, edge_index), _ = spread_inputs((x, edge_index), {}, self)
        if not isinstance(edge_index, DistEdgeIndex):
            if torch.compiler.is_compiling():
                return super().forward(x, edge_index, edge_weight)
            return run_gcn(self, super().forward, x, edge_index, edge_weight)
        return self._multiplied(x, edge_index, edge_weight)

    @eagerly
    def _multiplied(
        self, x: Any, edge_index: DistEdgeIndex, edge_weight: Any
    ) -> Tensor:
        with edge_index.nodes.spilling():
            linear = is_product(self, GCNConv, self.lin)
            if (
                isinstance(x, (tuple, list))
                or self.aggr not in ("add", "sum")
                or not linear
            ):
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

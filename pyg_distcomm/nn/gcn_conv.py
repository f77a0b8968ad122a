"""DistGCNConv: PyG's GCNConv, distributed when given a DistEdgeIndex."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import GCNConv

from pyg_distcomm.graph.edge_index import DistEdgeIndex
from pyg_distcomm.nn.halo_conv import spread_inputs, through_halo
from pyg_distcomm.nn.layer_link import LayerLink, OwnLink, check_link
from pyg_distcomm.nn.linear_aggregate import (
    LayerProductCache,
    edges_for_flow,
    is_product,
    linear_aggregate,
)
from pyg_distcomm.ops.local_blocks import Wrap
from pyg_distcomm.tensor.dist_tensor import DistTensor
from pyg_distcomm.tensor.eager import eagerly


class DistGCNConv(GCNConv):
    r"""The graph convolution of [Kipf17], on a graph spread over ranks.

        X' = D^-1/2 (A + I) D^-1/2 X W + b

    Takes the arguments of `torch_geometric.nn.GCNConv`, has its `state_dict` and its
    `repr`, and *is* it for ordinary inputs. With a `DistEdgeIndex` it computes the same
    numbers on any grid: degrees and self-loops are global, (A X) W or A (X W) is chosen
    by the narrower width, and a gradient nobody needs is not computed.

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

    def forward(self, x: Any, edge_index: Any, edge_weight: Any = None) -> Tensor:
        """Runs the layer."""
        (x, edge_index), _ = spread_inputs((x, edge_index), {})
        if not isinstance(edge_index, DistEdgeIndex):
            return super().forward(x, edge_index, edge_weight)
        return self._multiplied(x, edge_index, edge_weight)

    @eagerly
    def _multiplied(
        self, x: Any, edge_index: DistEdgeIndex, edge_weight: Any
    ) -> Tensor:
        known = is_product(self, GCNConv, self.lin)
        if isinstance(x, (tuple, list)) or self.aggr not in ("add", "sum") or not known:
            run = super().forward
            return through_halo(self, self.link, run, x, edge_index, edge_weight)
        x = edge_index.as_nodes(x, "x")
        weight = edge_index.check_edges(edge_weight, "edge_weight")
        if self.normalize:
            edge_index.check_loops(self)
        topology, weight = edges_for_flow(edge_index.topology, weight, self.flow)

        dtype = x.dtype if self.normalize and weight is None else None
        dtype = dtype if weight is None else weight.dtype

        def multiply(h: Tensor, wrap: Wrap | None) -> Tensor:
            if dtype is not None:  # under autocast, h may be narrower than its weights
                h = h.to(torch.promote_types(h.dtype, dtype))
            if not self.normalize:
                return topology.sum(h, weight, wrap)
            loops = self.improved, self.add_self_loops
            return topology.gcn(h, weight, *loops, wrap)

        kind = "gcn", self.normalize, self.improved, self.add_self_loops
        kept = LayerProductCache(topology.constants, kind, edge_weight)
        user = LayerLink.of(self, self.link, edge_index)
        args = x, self.lin, self.bias, multiply, edge_index
        out = linear_aggregate(*args, kept, user)
        if dtype is not None:
            out = out.to(torch.promote_types(out.dtype, dtype))
        return DistTensor.wrap(out, edge_index.nodes)

"""DistGCNConv: PyG's GCNConv, distributed when given a DistEdgeIndex."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch_geometric.nn import GCNConv

from pyg_distcomm.edge_index import DistEdgeIndex
from pyg_distcomm.nn.halo_conv import through_halo
from pyg_distcomm.nn.product import flowing, in_best_order
from pyg_distcomm.tensor import DistTensor


class DistGCNConv(GCNConv):
    r"""The graph convolution of [Kipf17], on a graph spread over ranks.

        X' = D^-1/2 (A + I) D^-1/2 X W + b

    Takes the arguments of `torch_geometric.nn.GCNConv`, has its `state_dict` and its
    `repr`, and *is* it for ordinary inputs. With a `DistEdgeIndex` it computes the same
    numbers on any grid: degrees and self-loops are global, (A X) W or A (X W) is chosen
    by the narrower width, and a gradient nobody needs is not computed.

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

    def forward(self, x: Any, edge_index: Any, edge_weight: Any = None) -> Tensor:
        """Runs the layer."""
        if not isinstance(edge_index, DistEdgeIndex):
            return super().forward(x, edge_index, edge_weight)
        if isinstance(x, (tuple, list)) or self.aggr not in ("add", "sum"):
            return through_halo(self, super().forward, x, edge_index, edge_weight)
        edge_index.check_nodes(x, "x")
        weight = edge_index.check_edges(edge_weight, "edge_weight")
        topology, weight = flowing(edge_index.topology, weight, self.flow)

        def multiply(h: Tensor) -> Tensor:
            if not self.normalize:
                return topology.sum(h, weight)
            return topology.gcn(h, weight, self.improved, self.add_self_loops)

        def known(features: Any, product: Any) -> Tensor | None:
            kind = (self.normalize, self.improved, self.add_self_loops, features.dtype)
            inputs = features, edge_weight
            return topology.constants.product(("gcn", *kind), inputs, product)

        ordering = edge_index.topology.ordering
        out = in_best_order(x, self.lin, self.bias, multiply, ordering, known)
        return DistTensor.wrap(out, edge_index.nodes)

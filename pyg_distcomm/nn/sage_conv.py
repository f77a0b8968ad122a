"""Distributes PyG's SAGEConv when given a DistEdgeIndex: `DistSAGEConv`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import SAGEConv

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
from pyg_distcomm.nn.local_products import run_sage
from pyg_distcomm.tensor.dist_tensor import DistTensor
from pyg_distcomm.tensor.row_sharded import eagerly


class DistSAGEConv(SAGEConv):
    r"""The GraphSAGE layer of [Hamilton17], on a graph spread over ranks.

        x'_i = W_1 x_i + W_2 mean_{j in N(i)} x_j

    Takes the arguments of `torch_geometric.nn.SAGEConv`, has its `state_dict`, and *is*
    it for ordinary inputs. With a `DistEdgeIndex`, "mean" and "sum" are products on any
    grid; every other aggregation brings the rows of the neighbours here, as `HaloConv`
    does. Ordinary edges of a minibatch, or used before, are multiplied by compiled
    products; see `nn.local_products`.

    Args:
        link: how rows travel, a `LinkPolicy`; "exact", or that of the edge_index (None).

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

    link: OwnLink = None

    def __init__(self, *args: Any, link: OwnLink = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.link = check_link(link)

    def forward(self, x: Any, edge_index: Any = None, size: Any = None) -> Tensor:
        """Runs the layer."""
        (x, edge_index), _ = spread_inputs((x, edge_index), {}, self)
        if not isinstance(edge_index, DistEdgeIndex):
            if torch.compiler.is_compiling():
                return super().forward(x, edge_index, size)
            return run_sage(self, super().forward, x, edge_index, size)
        return self._multiplied(x, edge_index)

    @eagerly
    def _multiplied(self, x: Any, edge_index: DistEdgeIndex) -> Tensor:
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

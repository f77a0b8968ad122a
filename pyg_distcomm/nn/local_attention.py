"""Runs PyG's GATConv on ordinary tensors by products, where its edges are known.

    X'_i = sum_j a_ij W x_j + b,   a_ij = softmax_j(LeakyReLU(<u, W x_j> + <v, W x_i>))

[Velickovic18] Eq. 1-4. PyG computes `<u, W x>` from the transformed rows of all nodes; here
it is `<W^T u, x>`, a product with a matrix of as many columns as there are heads, and of
targets only the rows that are computed. Self-loops are added once for an edge_index.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch_geometric.utils import add_self_loops, remove_self_loops

from pyg_distcomm.graph.edge_products import ends_added, multiply, softmax_of
from pyg_distcomm.graph.local_adjacency import (
    GroupedEdges,
    LocalAdjacency,
    looped_edges,
    outside_inference_mode,
)
from pyg_distcomm.nn.layer_context import is_product
from pyg_distcomm.nn.leading_rows import leading


def is_supported(conv: Any, given: dict[str, Any]) -> bool:
    """Tells whether a layer is PyG's GATConv, and its features fit the kernels."""
    if type(conv).forward is not pyg.GATConv.forward:
        return False
    if given.get("edge_attr") is not None or given.get("size") is not None:
        return False
    x = given.get("x")
    parts = [leading(t) for t in (x if isinstance(x, tuple) else (x,))]
    if any(not isinstance(t, Tensor) or t.dim() != 2 for t in parts):
        return False
    linears = [lin for lin in _linears(conv) if lin is not None]
    if any(is_lazy(p) for p in conv.parameters()) or conv.node_dim != 0:
        return False
    if any(t.dtype != linears[0].weight.dtype for t in parts):
        return False
    residual = [conv.res] if conv.res is not None else []
    return is_product(conv, pyg.GATConv, *linears, biased=residual)


def _linears(conv: Any) -> tuple[Any, Any]:
    """Returns the linear transformations of sources and of targets."""
    both = conv.lin is not None
    return (conv.lin, conv.lin) if both else (conv.lin_src, conv.lin_dst)


def edges_of(
    conv: Any,
    adjacency: LocalAdjacency,
    edge_index: Tensor,
    num_sources: int,
    num_targets: int,
) -> GroupedEdges | None:
    """Returns the edges of a layer in CSR form, with self-loops; built once."""
    shape = num_sources, num_targets
    if not conv.add_self_loops or adjacency.grouped(edge_index, *shape) is None:
        return adjacency.grouped(edge_index, *shape)
    key = "loops", *shape
    if key not in adjacency.derived:
        with outside_inference_mode():
            looped, _ = remove_self_loops(edge_index)
            looped, _ = add_self_loops(looped, num_nodes=min(shape))
            adjacency.derived[key] = looped_edges(adjacency, looped, *shape)
    found: GroupedEdges | None = adjacency.derived[key]
    return found


def run_gat(conv: Any, edges: GroupedEdges, source: Tensor, target: Tensor) -> Tensor:
    """Runs the layer on its edges, for the first rows of `target`.

    Shapes: source [n, F_s], target [>= m, F_t]; returns [m, H F_out] or [m, F_out].
    """
    heads, width = conv.heads, conv.out_channels
    of_source, of_target = _linears(conv)
    target = target[: edges.num_targets]
    edges = edges.prefix(edges.num_targets, len(source))
    scores = ends_added(
        edges,
        F.linear(source, _folded(of_source.weight, conv.att_src)),
        F.linear(target, _folded(of_target.weight, conv.att_dst)),
    )
    share = softmax_of(edges, F.leaky_relu(scores, conv.negative_slope))
    if conv.training and conv.dropout:
        share = _dropped(edges, share, conv.dropout)
    rows = of_source(source).view(-1, heads, width)
    out = multiply(edges, share, rows)
    out = out.view(-1, heads * width) if conv.concat else out.mean(1)
    if conv.res is not None:
        out = out + conv.res(target)
    return out if conv.bias is None else out + conv.bias


def _folded(weight: Tensor, attention: Tensor) -> Tensor:
    """Returns `W^T u` of each head, `[H, F]`, for W [H C, F] and u [1, H, C]."""
    heads, width = attention.shape[1:]
    return torch.einsum("hcf,hc->hf", weight.view(heads, width, -1), attention[0])


def _dropped(edges: GroupedEdges, share: Tensor, p: float) -> Tensor:
    """Applies dropout in the original order of the edges, as PyG draws it."""
    if edges.order is None or edges.inverse is None:
        return F.dropout(share, p)
    return edges.in_order(F.dropout(share.index_select(0, edges.inverse), p))

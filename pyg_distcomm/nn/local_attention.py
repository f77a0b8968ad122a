"""Runs PyG's layers of attention on ordinary tensors by products, where edges are known.

    X'_i = sum_j a_ij W x_j,   a_ij = softmax_j(s_ij)

    GATConv          s_ij = LeakyReLU(<u, W x_j> + <v, W x_i>)    [Velickovic18] Eq. 1-4
    GATv2Conv        s_ij = <a, LeakyReLU(W x_j + V x_i)>         [Brody22] Eq. 7
    TransformerConv  s_ij = <Q x_i, K x_j> / sqrt(C)              [Shi21] Sec. 3.1

PyG computes `<u, W x>` from the transformed rows of all nodes; here it is `<W^T u, x>`, a
product with a matrix of as many columns as there are heads. Scores are computed edge by edge:
no row is copied for each edge. Of targets only the rows that are computed are transformed, and
self-loops are added once for an edge_index.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch_geometric.utils import add_self_loops, remove_self_loops

from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.graph.edge_products import (
    dots,
    ends_added,
    multiply,
    pair_scores,
    softmax_of,
)
from pyg_distcomm.graph.local_adjacency import (
    GroupedEdges,
    LocalAdjacency,
    known,
    looped_edges,
    outside_inference_mode,
)
from pyg_distcomm.nn.layer_context import dtype_of, is_product
from pyg_distcomm.nn.leading_rows import leading
from pyg_distcomm.sharded.dist_tensor import DistTensor

# takes a layer, its edges, sources and targets; returns scores [e, H], and rows [n, H, C]
Scores = Callable[[Any, GroupedEdges, Tensor, Tensor], tuple[Tensor, Tensor]]


def is_supported(conv: Any, given: dict[str, Any]) -> bool:
    """Tells whether a layer is PyG's own of a kind above, and its features fit the kernels."""
    kind = _kind(conv)
    if kind is None or conv.node_dim != 0:
        return False
    if any(given.get(name) is not None for name in ("edge_attr", "size")):
        return False
    if any(map(is_lazy, conv.parameters())):
        return False
    x = given.get("x")
    parts = [leading(t) for t in (x if isinstance(x, tuple) else (x,))]
    if any(not isinstance(t, Tensor) or t.dim() != 2 for t in parts):
        return False
    plain, biased = _linears(conv, kind)
    dtype = dtype_of((*plain, *biased)[0])
    return all(t.dtype == dtype for t in parts) and is_product(
        conv, kind, *plain, biased=biased
    )


def _kind(conv: Any) -> type | None:
    """Returns the class of PyG whose `forward` a layer has, if it is one of those above."""
    for kind in _SCORES:
        if type(conv).forward is vars(kind)["forward"]:
            return kind
    return None


def _linears(conv: Any, kind: type) -> tuple[list[Any], list[Any]]:
    """Returns the linear maps of a layer, those without a bias and those that may have one."""
    if kind is pyg.TransformerConv:
        maps = (
            conv.lin_query,
            conv.lin_key,
            conv.lin_value,
            conv.lin_skip,
            conv.lin_beta,
        )
        return [], [lin for lin in maps if lin is not None]
    residual = [] if conv.res is None else [conv.res]
    if kind is pyg.GATv2Conv:
        return [], [conv.lin_l, conv.lin_r, *residual]
    return [lin for lin in _ends_of(conv) if lin is not None], residual


def _ends_of(conv: Any) -> tuple[Any, Any]:
    """Returns the linear maps of sources and of targets of a GATConv."""
    both = conv.lin is not None
    return (conv.lin, conv.lin) if both else (conv.lin_src, conv.lin_dst)


def edges_of(
    conv: Any,
    adjacency: LocalAdjacency,
    edge_index: Tensor,
    num_sources: int,
    num_targets: int,
) -> GroupedEdges | None:
    """Returns the edges of a layer in CSR form, with its self-loops; built once."""
    shape = num_sources, num_targets
    plain = adjacency.grouped(edge_index, *shape)
    if plain is None or not getattr(conv, "add_self_loops", False):
        return plain
    key = "loops", *shape
    if key not in adjacency.derived:
        with outside_inference_mode():
            looped, _ = remove_self_loops(edge_index)
            looped, _ = add_self_loops(looped, num_nodes=min(shape))
            adjacency.derived[key] = looped_edges(adjacency, looped, *shape)
    found: GroupedEdges | None = adjacency.derived[key]
    return found


def note_rows(conv: Any, ends: Tensor, edge_index: Any) -> None:
    """Keeps the rows of the edges of a share, and of a layer's self-loops, with own edges.

    Args:
        conv: the layer.
        ends: own edges, which `stays` knows.
        edge_index: those of the share.
    """
    adjacency = known(ends)
    assert adjacency is not None
    loops = bool(getattr(conv, "add_self_loops", False))
    if ("rows", loops) not in adjacency.derived:
        if loops:
            nodes = edge_index.topology.nodes.count
            edge_index = remove_self_loops(edge_index)[0]
            edge_index = add_self_loops(edge_index, num_nodes=nodes)[0]
        adjacency.derived["rows", loops] = edge_index.rows


def noted_rows(conv: Any, adjacency: LocalAdjacency) -> Rows | None:
    """Returns what `note_rows` has kept, if it has."""
    loops = bool(getattr(conv, "add_self_loops", False))
    return adjacency.derived.get(("rows", loops))


def run(
    conv: Any,
    edges: GroupedEdges,
    source: Tensor,
    target: Tensor,
    edge_rows: Rows | None = None,
) -> Tensor:
    """Runs the layer on its edges, for the first rows of `target`.

    Args:
        conv: the layer.
        edges: its edges, with self-loops.
        source: rows of sources.
        target: rows of targets.
        edge_rows: those of the edges, as they were before they were grouped, if they are edges
            of a share: dropout is keyed by them.

    Shapes: source [n, F_s], target [>= m, F_t]; returns [m, H F_out] or [m, F_out].
    """
    kind = _kind(conv)
    assert kind is not None
    target = target[: edges.num_targets]
    edges = edges.prefix(edges.num_targets, len(source))
    with parametrize.cached():  # PyG's code reads each weight once
        scores, rows = _SCORES[kind](conv, edges, source, target)
    share = softmax_of(edges, scores)
    if conv.training and conv.dropout:
        share = _dropped(edges, share, conv.dropout, edge_rows)
    out = multiply(edges, share, rows)
    out = out.flatten(1) if conv.concat else out.mean(1)
    if kind is pyg.TransformerConv:
        return _skipped(conv, out, target)
    if conv.res is not None:
        out = out + conv.res(target)
    return out if conv.bias is None else out + conv.bias


def _heads(conv: Any, rows: Tensor) -> Tensor:
    return rows.view(-1, conv.heads, conv.out_channels)


def _gat(
    conv: Any, edges: GroupedEdges, source: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:
    of_source, of_target = _ends_of(conv)
    scores = ends_added(
        edges,
        F.linear(source, _folded(of_source.weight, conv.att_src)),
        F.linear(target, _folded(of_target.weight, conv.att_dst)),
    )
    scores = F.leaky_relu(scores, conv.negative_slope)
    return scores, _heads(conv, of_source(source))


def _folded(weight: Tensor, attention: Tensor) -> Tensor:
    """Returns `W^T u` of each head, `[H, F]`, for W [H C, F] and u [1, H, C]."""
    heads, width = attention.shape[1:]
    return torch.einsum("hcf,hc->hf", weight.view(heads, width, -1), attention[0])


def _gatv2(
    conv: Any, edges: GroupedEdges, source: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:
    rows, of_target = _heads(conv, conv.lin_l(source)), _heads(conv, conv.lin_r(target))
    slope = conv.negative_slope
    return pair_scores(edges, of_target, rows, conv.att[0], slope), rows


def _transformer(
    conv: Any, edges: GroupedEdges, source: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:
    query, key = (
        _heads(conv, conv.lin_query(target)),
        _heads(conv, conv.lin_key(source)),
    )
    scores = dots(edges, query / math.sqrt(conv.out_channels), key)
    return scores, _heads(conv, conv.lin_value(source))


def _skipped(conv: Any, out: Tensor, target: Tensor) -> Tensor:
    """Adds a target's own row to a TransformerConv's sum, or mixes both."""
    if not conv.root_weight:
        return out
    own = conv.lin_skip(target)
    if conv.lin_beta is None:
        return out + own
    beta = conv.lin_beta(torch.cat([out, own, out - own], dim=-1)).sigmoid()
    return beta * own + (1 - beta) * out


def _dropped(edges: GroupedEdges, share: Tensor, p: float, rows: Rows | None) -> Tensor:
    """Applies dropout in the original order of the edges, as PyG draws it."""
    if edges.inverse is not None:
        share = share.index_select(0, edges.inverse)
    if rows is None:
        share = F.dropout(share, p)
    else:
        spread: Any = F.dropout(DistTensor.from_local(share, rows), p)
        share = spread.to_local()
    return share if edges.order is None else edges.in_order(share)


_SCORES: dict[type, Scores] = {
    pyg.GATConv: _gat,
    pyg.GATv2Conv: _gatv2,
    pyg.TransformerConv: _transformer,
}
